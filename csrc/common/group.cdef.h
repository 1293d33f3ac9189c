/* The groups of both native libraries. gloo.cdef.h and shm.cdef.h declare how to create them, and more. */

/* Run an operation on the caller's thread. The result is NULL after success without a result to fetch, else a
   handle: of a failure, of received data, or of a running operation. With `async`, or if earlier started
   operations must come first, the operation runs on a thread of the group. `data` and `output` must stay
   alive and unchanged until it has ended. `site` is the call site; NULL: unknown. Shared memory then calls
   the function of fl_on_mismatch if other ranks need the site. `seconds` is the timeout. With Gloo it begins
   when the operation begins to run; in shared memory it begins with each wait. Collectives run in the order
   of their calls. Messages run concurrently and are matched by peer, tag and the order of their calls.

   all_reduce, broadcast: in place on data. If the signature of a broadcast has FL_ANY, data is NULL and
     fl_op_output returns the received data.
   reduce: in place on the root's data; other ranks' data is unchanged.
   barrier: data is NULL.
   reduce_scatter, all_to_all: data has signature.count elements in total; output receives the result.
   all_to_all_uneven: data is an fl_sections; output receives the sections for this rank, in rank order.
   reduce_scatter_uneven: data is an fl_sections with equal sizes for every source.
   all_gather, gather: output may be an fl_room. If it is NULL or has the wrong size, fl_op_output returns the
     ranks' data in rank order. In a gather, this is empty on ranks other than the root.
   scatter: the signature describes one part. On the root, data has one part per rank; on other ranks it is
     NULL and ndim may be FL_ANY. output receives this rank's part. If it is NULL, fl_op_output returns the
     part, described by the root's signature.
   send, recv: data to and from `peer`; the signature's root is the tag. A send of little data ends after
     the copy; if its receiver's call differs, the sender's next call of the group raises. With
     FLASHLIGHT_CHECKS=sync the send ends when the message is received. Other sends end when the receiver has
     called and the last byte is on its way. The output of a recv may be an fl_match. */
fl_op *fl_run(fl_group *group, const fl_signature *signature, void *data, void *output, int peer,
              double seconds, int async, const fl_site *site);
/* A value of `async` in shared memory, for comparison-only calls: fl_run usually returns NULL before the
   other ranks have called. fl_look_back then compares the call. */
enum { FL_AHEAD = 2 };

/* Run several messages concurrently on the caller's thread, or start them (`async`). results[i] is NULL if
   message i ended well, else a handle of its failure or of the running message. */
void fl_exchange(fl_group *group, const fl_message *messages, int count, double seconds, int async,
                 fl_op **results);

/* Set the user-visible numbers of a subgroup's ranks. Call it before the first operation. */
int fl_call_ranks(fl_group *group, const int *numbers);
/* From now on no call of this rank returns before all ranks have made it. Use before the first operation. */
int fl_compare_at_once(fl_group *group);
/* Set a function that is called regularly while a caller's thread waits. A nonzero result ends the group. */
int fl_on_interrupt(fl_group *group, int (*check)(void));

/* Return 1 if `rank` has begun a collective that this rank has not begun, and write this call to
   `call`. Only for error texts, because the state may change at any moment. */
int fl_is_ahead(fl_group *group, int rank, fl_signature *call);
/* Return NULL while the group is usable, as far as known without waiting; else the handle of a failed
   operation with the reason, such as a rank that died or gave up. A rank that left in order is no failure. */
fl_op *fl_lost(fl_group *group);

/* Announce that this rank begins no more messages, because it waits for the shutdown of the other ranks.
   Ranks that wait for a further message of this rank raise. Does not wait. */
int fl_leave(fl_group *group);
/* End the group and report the reason `why`, which ends the operations of all ranks (FL_RAISED). */
int fl_give_up(fl_group *group, const char *why);
/* In a forked child: close the descriptors and change nothing else. The group must not be used after it. */
int fl_abandon(fl_group *group);
/* End running and queued operations (FL_CLOSED), and leave. Operations on other threads end soon after. An
   operation on the calling thread, which a signal handler has interrupted, ends when it continues. */
int fl_close(fl_group *group);
/* Close and free the group, which no thread may be using. Does nothing in a forked child. */
void fl_free(fl_group *group);
