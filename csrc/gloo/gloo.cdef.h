/* What Gloo's groups have besides group.cdef.h. */

/* A group of `size` processes whose sockets are bound to `host` (a name or address) or, when `host` is empty, to
   the network interface `interface`. `seconds` bounds the connecting. NULL on failure. */
fl_group *fl_gloo_create(int rank, int size, const char *host, const char *interface, double seconds);

/* A group of `size` ranks of another one that is connected, in this order, this one among them, which shares
   its connections and threads. `number` is the same on all of them, not 0, and that of no other group with two of
   them that is made of a group with these connections. Waits for nobody. */
fl_group *fl_gloo_part(fl_group *group, const int *ranks, int size, uint64_t number);

/* Write the address that peers connect to; returns its bytes, or -1 where the room is too small. All
   addresses of a group have the same number of bytes. */
int fl_address(fl_group *group, char *address, size_t address_bytes);

/* Of a group on several hosts, before fl_connect: listen for those who ask whether this host is
   there. Returns the port, or -1. */
int fl_listen_for_hosts(fl_group *group);

/* What is known of the hosts of a group. */
typedef struct {
  const int *numbers;       /* by rank: which host it is on, from 0 without gaps */
  const int *ports;         /* by rank: what it was given by fl_listen_for_hosts */
  const char *const *names; /* by host */
  int count;                /* of hosts */
  double seconds;           /* a host that is silent for so long is lost; 0: none is ever */
} fl_hosts;

/* Then: notice when hosts cannot be reached any more. Operations end (FL_HOST_LOST), also the next one
   where none runs. Without fl_listen_for_hosts, a group that takes this one along notices that.
   Addresses and key are those of fl_connect. */
int fl_watch_hosts(fl_group *group, const fl_hosts *hosts, const char *addresses, size_t address_bytes,
                   const char *key);

/* Where hosts are lost, call give_up of `other` too, with why, and then `advice`: another group, which
   must live at least as long. */
int fl_take_along(fl_group *group, int (*give_up)(void *other, const char *why), void *other,
                  const char *advice);

/* Learn where the peers are, and connect to those that every collective needs, or `lazily` to none:
   the others are connected when they are needed first. `addresses` holds, in rank order, what each
   rank gave for this one. `key` holds FL_KEY_BYTES that only the ranks of this group know: with it both ends of
   each connection prove, first of all, that they are of the group. Returns at once; never NULL. */
#define FL_KEY_BYTES 32
#define FL_PROOF_BYTES 32
fl_op *fl_connect(fl_group *group, const char *addresses, size_t address_bytes, const char *key, int lazily,
                  double seconds);

/* Which rank fl_connect waits for just now; -1: for none. */
int fl_awaited(fl_group *group);
