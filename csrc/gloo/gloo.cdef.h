/* Functions of Gloo's groups in addition to group.cdef.h. */

/* Create a group of `size` processes whose sockets are bound to `host` (a name or address) or, if `host` is
   empty, to the network interface `interface`. `seconds` is the timeout for connecting. NULL on failure. */
fl_group *fl_gloo_create(int rank, int size, const char *host, const char *interface, double seconds);

/* Create a subgroup of `size` ranks of a connected group, in this order, including this rank. It shares
   the connections and threads of `group`. `number` is nonzero, equal on all ranks of the subgroup, and
   unique among subgroups that share two ranks. Does not block. */
fl_group *fl_gloo_part(fl_group *group, const int *ranks, int size, uint64_t number);

/* Write the address that peers connect to. Return its number of bytes, or -1 if `address_bytes` is too
   small. All addresses of a group have the same number of bytes. */
int fl_address(fl_group *group, char *address, size_t address_bytes);

/* Before fl_connect: listen for ranks that check whether this host is alive. Return the port, or -1. */
int fl_listen_for_hosts(fl_group *group);

/* The hosts of a group. */
typedef struct {
  const int *numbers;       /* for each rank: host number, from 0 without gaps */
  const int *ports;         /* for each rank: result of fl_listen_for_hosts */
  const char *const *names; /* name of each host */
  int count;                /* number of hosts */
  double seconds;           /* silence after which a host is lost; 0: hosts are not monitored */
} fl_hosts;

/* Start to monitor the hosts. If a host is lost, all running operations fail with FL_HOST_LOST. If none is
   running, the next operation fails. If fl_listen_for_hosts was not called, another group must monitor the
   hosts and end this group: see fl_take_along. For `addresses` and `key` see fl_connect. */
int fl_watch_hosts(fl_group *group, const fl_hosts *hosts, const char *addresses, size_t address_bytes,
                   const char *key);

/* Before any operation: combine the small arrays of each host first. `numbers` has the host of each rank. */
int fl_sum_by_hosts(fl_group *group, const int *numbers);

/* If hosts are lost, also call give_up(other, why). `why` ends with `advice`. `other` is a group that must
   exist at least as long as `group`. */
int fl_take_along(fl_group *group, int (*give_up)(void *other, const char *why), void *other,
                  const char *advice);

/* Connect to the peers that every collective needs or, if `lazily`, to no peer. Other connections are made
   at their first use. `addresses` contains the results of fl_address of all ranks, in rank order. `key` has
   FL_KEY_BYTES bytes that only the ranks of this group know. With it, both ends of each connection prove that
   they are members. Returns immediately, and never NULL. */
#define FL_KEY_BYTES 32
#define FL_PROOF_BYTES 32
fl_op *fl_connect(fl_group *group, const char *addresses, size_t address_bytes, const char *key, int lazily,
                  double seconds);

/* Return the rank that fl_connect waits for at this moment, or -1. */
int fl_awaited(fl_group *group);
