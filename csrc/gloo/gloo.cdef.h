/* The C ABI between Python and Gloo. */

typedef struct fl_group fl_group;

/* A group of `size` processes whose sockets are bound to `host` (a name or address) or, when
   `host` is empty, to the network interface `interface`. `seconds` bounds the connecting.
   NULL on failure. */
fl_group *fl_gloo_create(int rank, int size, const char *host, const char *interface,
                         double seconds);

/* A group of `size` ranks of another one that is connected, in this order, this one among them, which shares
   its connections and threads. `number` is the same on all of them, not 0, and that of no other group with two of
   them that is made of a group with these connections. Waits for nobody. */
fl_group *fl_gloo_part(fl_group *group, const int *ranks, int size, uint64_t number);

/* Write the address that peers connect to; returns its bytes, or -1 where the room is too small. All
   addresses of a group have the same number of bytes. */
int fl_gloo_address(fl_group *group, char *address, size_t address_bytes);

/* Of a group on several hosts, before fl_gloo_connect: listen for those who ask whether this host is
   there. Returns the port, or -1. */
int fl_gloo_listen_for_hosts(fl_group *group);

/* What is known of the hosts of a group. */
typedef struct {
  const int *numbers;       /* by rank: which host it is on, from 0 without gaps */
  const int *ports;         /* by rank: what it was given by fl_gloo_listen_for_hosts */
  const char *const *names; /* by host */
  int count;                /* of hosts */
  double seconds;           /* a host that is silent for so long is lost; 0: none is ever */
} fl_hosts;

/* Then: notice when hosts cannot be reached any more. Operations end (FL_HOST_LOST), also the next one
   where none runs. Without fl_gloo_listen_for_hosts, a group that takes this one along notices that.
   Addresses and key are those of fl_gloo_connect. */
int fl_gloo_watch_hosts(fl_group *group, const fl_hosts *hosts, const char *addresses,
                         size_t address_bytes, const char *key);

/* Where hosts are lost, call give_up of `other` too, with why, and then `advice`: another group, which
   must live at least as long. */
int fl_gloo_take_along(fl_group *group, int (*give_up)(void *other, const char *why), void *other,
                        const char *advice);

/* Before fl_gloo_connect: no call of this rank ends before the others have made it, in this group and those
   that are made of it. */
int fl_gloo_check_at_once(fl_group *group);

/* The calls below start an operation. `seconds` bounds the operation's time from when it begins to
   run. `data` and `output` must stay alive and untouched until it has ended. */

/* Learn where the peers are, and connect to those that every collective needs, or `lazily` to none:
   the others are connected when they are needed first. `addresses` holds, in rank order, what each
   rank gave for this one. `key` holds FL_KEY_BYTES that only the ranks of this group know: with it both ends of
   each connection prove, first of all, that they are of the group. Returns at once; never NULL. */
#define FL_KEY_BYTES 32
#define FL_PROOF_BYTES 32
fl_op *fl_gloo_connect(fl_group *group, const char *addresses, size_t address_bytes,
                       const char *key, int lazily, double seconds);

/* Which rank fl_gloo_connect waits for just now; -1: for none. */
int fl_gloo_awaited(fl_group *group);

/* Run an operation on the caller's thread, or, with `async` or where others that were started must
   come first, on one of the group's own. Where it has ended well and there is nothing to fetch, the
   result is NULL; else a handle: of a failure, of what was received, or of an operation that runs.
   `site` is where the program calls; NULL: not known.
   Collectives run in the order in which they are called; messages run beside them, and are matched by peer and
   tag in the order in which they are called.

   all_reduce, broadcast: in place on data.      barrier: data is NULL.
   Where the signature of a broadcast says FL_ANY, data is NULL; fl_op_output gives what has come.
   reduce: in place on the root's data; the others' stays as it is.
   reduce_scatter, all_to_all: data has signature.count elements in all; output takes the result.
   all_to_all_uneven: data is an fl_sections; output takes what is for this rank, in rank order.
   reduce_scatter_uneven: data is an fl_sections, the same bytes of every source.
   all_gather, gather: output may be an fl_room; where it does not fit, or is NULL, the ranks' data,
   one after the other, are given by fl_op_output: empty where this rank is not a gather's root.
   scatter: the signature describes one part. On the root, data has one for each rank; elsewhere it
   is NULL, and ndim may be FL_ANY. output takes this rank's part; where it is NULL, fl_op_output
   gives it, and the root's signature says what it is.
   send, recv: data, to and from `peer`; the signature's root is the tag. A send of little data ends when that
   was copied; a receiver that calls something else is what the sender's next call of the group raises
   (FLASHLIGHT_CHECKS=sync: it ends when it was received). Others end when their receiver has called and the last
   byte is on its way. A recv may be given an fl_match as output: see there. */
fl_op *fl_gloo_run(fl_group *group, const fl_signature *signature, void *data, void *output,
                   int peer, double seconds, int async, const fl_site *site);

/* What users call the ranks of this group, where it is part of a larger one: `size` numbers. Before
   the first operation. */
int fl_gloo_call_ranks(fl_group *group, const int *numbers);

/* Whether `rank` has begun a collective that this rank has not, and what it is. For messages: it may
   change at any moment. */
int fl_gloo_is_ahead(fl_group *group, int rank, fl_signature *call);

/* NULL while the group can be used, as far as is known without waiting; else the handle of an operation
   that has failed by what ended it: what a rank said when it gave up, for example, also where nothing
   waits for it. A connection that was closed says nothing: its rank may have left in order. */
fl_op *fl_gloo_lost(fl_group *group);

/* Let the others know that this rank begins no more messages, as it waits for them to shut down: who waits
   for one of it that it has not begun raises. Does not wait. */
int fl_gloo_leave(fl_group *group);

/* End the group, and report to the others why, in words that end their operations too (FL_RAISED). */
int fl_gloo_give_up(fl_group *group, const char *why);

/* Run several messages at once, on the caller's thread; `async`: start them. results[i] is NULL where
   message i ended well, else a handle: of its failure, or of one that goes on (async). */
void fl_gloo_exchange(fl_group *group, const fl_message *messages, int count, double seconds,
                      int async, fl_op **results);

/* Called now and then while the caller's own thread waits in fl_gloo_run or fl_gloo_exchange; not
   0: give up, and end the group. */
int fl_gloo_on_interrupt(fl_group *group, int (*check)(void));

/* In a child that was forked: close the descriptors and touch nothing else. The group is not used
   again, nor closed. */
int fl_gloo_abandon(fl_group *group);

/* End what runs and what is queued (FL_CLOSED). What runs on callers' threads ends soon after; where it
   is the calling thread itself (a signal handler has interrupted it, and closes the group) when that
   goes on. */
int fl_gloo_close(fl_group *group);

/* Close it, and the sockets, and free the group, which nobody may be in any more. Does nothing in a
   child that was forked. */
void fl_gloo_free(fl_group *group);
