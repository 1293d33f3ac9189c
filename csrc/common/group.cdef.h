/* The groups of both native libraries. gloo.cdef.h and shm.cdef.h have what makes a group, and more. */

/* Run an operation on the caller's thread. If it has ended well and there is nothing to fetch, the result is
   NULL; else it is a handle: of a failure, of what was received, or of an operation that runs. With `async`, or
   if others that were started must come first, it runs on one of the group's own threads. `data` and `output`
   must stay alive and untouched until it has ended. `site` is where the program calls; NULL: not known, and
   shared memory asks fl_on_mismatch. `seconds` bounds an operation, from when it begins to run; in shared
   memory each of its waits.
   Collectives run in the order in which they are called. Messages run beside them, and are matched by peer and
   tag in the order in which they are called.

   all_reduce, broadcast: in place on data. If the signature of a broadcast says FL_ANY, data is NULL, and
     fl_op_output gives what has come.
   reduce: in place on the root's data; the others' stays as it is.
   barrier: data is NULL.
   reduce_scatter, all_to_all: data has signature.count elements in all; output takes the result.
   all_to_all_uneven: data is an fl_sections; output takes what is for this rank, in rank order.
   reduce_scatter_uneven: data is an fl_sections, the same bytes of every source.
   all_gather, gather: output may be an fl_room; if it does not fit, or is NULL, fl_op_output gives the ranks'
     data, one after the other: empty on other ranks than a gather's root.
   scatter: the signature describes one part. On the root, data has one for each rank; elsewhere it is NULL, and
     ndim may be FL_ANY. output takes this rank's part; if it is NULL, fl_op_output gives the part, and the
     root's signature describes it.
   send, recv: data, to and from `peer`; the signature's root is the tag. A send of little data ends when that
     was copied; if its receiver calls something else, the sender's next call of the group raises
     (FLASHLIGHT_CHECKS=sync: it ends when it was received). Others end when their receiver has called and the
     last byte is on its way. The output of a recv may be an fl_match. */
fl_op *fl_run(fl_group *group, const fl_signature *signature, void *data, void *output, int peer,
              double seconds, int async, const fl_site *site);
/* In place of `async`, in shared memory, for a call that is only compared: the result is NULL as a rule, before
   the other ranks have made the call, and fl_look_back compares it. */
enum { FL_AHEAD = 2 };

/* Run several messages at once, on the caller's thread; `async`: start them. results[i] is NULL if message i
   has ended well, else a handle: of its failure, or of one that goes on. */
void fl_exchange(fl_group *group, const fl_message *messages, int count, double seconds, int async,
                 fl_op **results);

/* Before the first operation: the numbers by which users call the ranks of a group that is part of a larger one. */
int fl_call_ranks(fl_group *group, const int *numbers);
/* From the beginning: no call of this rank ends before all others have made it. */
int fl_compare_at_once(fl_group *group);
/* `check` is called now and then while a caller's own thread waits; not 0: give up, and end the group. */
int fl_on_interrupt(fl_group *group, int (*check)(void));

/* Whether `rank` has begun a collective that this rank has not, and what it is. For texts: it may change at any
   moment. */
int fl_is_ahead(fl_group *group, int rank, fl_signature *call);
/* NULL while the group can be used, as far as is known without waiting; else the handle of an operation that has
   failed by what ended it: a rank that died or gave up, for example. A rank that left in order has not. */
fl_op *fl_lost(fl_group *group);

/* Let the others know that this rank begins no more messages, as it waits for them to shut down: who waits
   for one of it that it has not begun raises. Does not wait. */
int fl_leave(fl_group *group);
/* End the group, and report to the others why, in words that end their operations too (FL_RAISED). */
int fl_give_up(fl_group *group, const char *why);
/* In a child that was forked: close the descriptors and touch nothing else. The group is not used again, nor
   closed. */
int fl_abandon(fl_group *group);
/* End what runs and what is queued (FL_CLOSED), and leave. What runs on other threads ends soon after; what runs
   on the calling thread itself (a signal handler has interrupted it, and closes the group) when that goes on. */
int fl_close(fl_group *group);
/* Close and free the group, which no thread may be in any more. Does nothing in a child that was forked. */
void fl_free(fl_group *group);
