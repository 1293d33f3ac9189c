/* The C ABI between Python and the shared-memory collectives. */

typedef struct fl_shm_group fl_shm_group;
typedef struct fl_shm_region fl_shm_region;
typedef struct fl_shm_posted fl_shm_posted;

/* Bytes of the segment that `ranks` ranks of one host share. */
size_t fl_shm_bytes(int ranks);

/* Map the segment at `path`, an empty file without a name (/proc/PID/fd/N) or one of this user in
   memory; `create` is not 0 on the one rank that makes it as large as that, before the others come. It
   stays open where it `is_named`, as ranks that do not see each other's processes need its locks: then
   its memory is reserved. NULL on failure. */
fl_shm_group *fl_shm_open(const char *path, int create, int is_named, int rank, int size);
/* The same of `size` ranks of `whole`, whose engine its messages share; they have this number, which is not 0. */
fl_shm_group *fl_shm_part(fl_shm_group *whole, const int *ranks, unsigned number, const char *path, int create,
                          int is_named, int rank, int size);

/* Run an operation. Where it ended well and there is nothing to fetch, the result is NULL; else a
   handle: of a failure, of what was received, or of an operation that goes on, which it does with
   `async` unless it could be done at once. `seconds` bounds each wait. `data` and `output` must
   stay alive and untouched until it has ended. `site` is where the program calls; NULL: it is asked
   for, see fl_shm_on_mismatch.

   Collectives that were started run on a thread of the group's own, one after the other; those
   without `async` on the caller's, after them. Messages run beside collectives and beside each
   other, and are matched by tag; those of one direction between two ranks and with one tag in
   order.

   all_reduce, reduce, broadcast: in place on data; reduce leaves the others' data as it is. Where the
     signature of a broadcast says FL_ANY, data is NULL and fl_op_output gives what has come.
   barrier: data is NULL.
   reduce_scatter, all_to_all: data has signature.count elements, output takes the result.
   all_to_all_uneven: data is an fl_sections *; output takes what came, in rank order.
   reduce_scatter_uneven: data is an fl_sections *, the same bytes of every source.
   all_gather, gather: the ranks' data, one after the other, go into output, which is NULL or an
     fl_room *; where they do not fit exactly they are given by fl_op_output.
   scatter: signature.count elements for each rank lie in data on the root. output takes one part;
     where it is NULL, and it is where the signature says FL_ANY, fl_op_output gives it.
   send, recv: data, to and from `peer`, which is another rank. A recv may be given an fl_match as
   output: see there. */
fl_op *fl_shm_run(fl_shm_group *group, const fl_signature *signature, void *data, void *output,
                  int peer, double seconds, int async, const fl_site *site);

/* In place of `async`, for a call that is only compared: the result is NULL as a rule, before the other
   ranks have made the call, and fl_shm_look_back compares it. */
enum { FL_AHEAD = 2 };

/* Compare such calls as far as the others have made them. `is_behind`: they have not made all. The result
   is a handle of the failure if the ranks differ, or if one has not made a call for so many seconds. */
fl_op *fl_shm_look_back(fl_shm_group *group, double seconds, int *is_behind);

/* Run several messages at once, on the caller's thread; `async`: for a moment only. results[i] is NULL
   where message i has ended well, else a handle: of its failure, or of one that goes on (async, or an
   earlier message of its id is not done). */
void fl_shm_exchange(fl_shm_group *group, const fl_message *messages, int count, double seconds,
                     int async, fl_op **results);

/* The same on the caller's thread, in two steps: post never sleeps, and is NULL where all have ended well
   within so many looks in a row without any progress (`spins` < 0: none is taken); else deliver must
   follow on the same thread, waits for the rest, and writes the results. The data stays untouched until
   then. */
fl_shm_posted *fl_shm_post(fl_shm_group *group, const fl_message *messages, int count, double seconds,
                           int spins);
void fl_shm_deliver(fl_shm_posted *posted, fl_op **results);

/* A collective on the caller's thread in two steps: begin, which never waits, shows the others what
   this rank calls (0: nothing has happened, use fl_shm_run); ready says after up to `spins` looks (-1:
   as long as they need this rank's processor, without sleeping) how far they are: FL_AWAITED, FL_CALLED, or FL_COMPLETE, after which nothing is waited for; finish waits
   for them and does the work, with the result of fl_shm_run. */
enum { FL_AWAITED = 0, FL_CALLED = 1, FL_COMPLETE = 2 };
int fl_shm_begin(fl_shm_group *group, const fl_signature *signature, const void *data,
                 double seconds, const fl_site *site);
int fl_shm_ready(fl_shm_group *group, int spins);
fl_op *fl_shm_finish(fl_shm_group *group, const fl_signature *signature, void *data, void *output);

/* Memory for an array of `bytes` on each rank; operations on it skip the copies. Collective: every
   rank maps the same file, in the same order, which one creates; with 2 its memory is reserved already.
   NULL on failure. The memory lives until the region was freed and the group has dropped
   the array, or was freed. It is dropped later, 0, while a thread runs a collective. */
fl_shm_region *fl_shm_add_region(fl_shm_group *group, const char *path, int create, size_t bytes);
void *fl_shm_region_array(fl_shm_region *region);
void fl_shm_free_region(fl_shm_region *region);
int fl_shm_drop_region(fl_shm_group *group, void *array);

/* Called now and then while the caller's own thread waits in one of these; not 0: give up. */
int fl_shm_on_interrupt(fl_shm_group *group, int (*check)(void));

/* Called on the caller's thread where other ranks are to know where the program has called. */
int fl_shm_on_mismatch(fl_shm_group *group, void (*where)(fl_site *site));

/* From now on no call of this rank ends before all others have made it. */
int fl_shm_compare_at_once(fl_shm_group *group);

/* What users call the ranks of this group, where it is part of a larger one: `size` numbers. Before
   the first operation. */
int fl_shm_call_ranks(fl_shm_group *group, const int *numbers);

/* Whether `rank` has begun a collective that this rank has not, and what it is. For messages: it may
   change at any moment. */
int fl_shm_is_ahead(fl_shm_group *group, int rank, fl_signature *call);

/* NULL while the group can be used; else the handle of an operation that has failed by what ended it: a
   rank that died or gave up, for example, also where nothing waits for it. One that left in order has
   not ended it, as long as its process runs. Does not wait. */
fl_op *fl_shm_lost(fl_shm_group *group);

/* Let the others know that this rank begins no more messages, as it waits for them to shut down: who waits
   for one of it that it has not begun raises. Does not wait. */
int fl_shm_leave(fl_shm_group *group);

/* End the group, and report to the others why, in words that end their operations too (FL_RAISED). */
int fl_shm_give_up(fl_shm_group *group, const char *why);

/* In a child that was forked: close the descriptors and touch nothing else. The group is not used
   again, nor closed. */
int fl_shm_abandon(fl_shm_group *group);

/* End what runs and what is queued (FL_CLOSED), and leave. What runs on the calling thread itself (a
   signal handler has interrupted it, and closes the group) ends when that goes on; of what runs on
   other threads nothing may be left after half a second. */
int fl_shm_close(fl_shm_group *group);

/* Close it, unmap, free the group, which nobody may be in any more. Does nothing in a child that was
   forked. */
void fl_shm_free(fl_shm_group *group);
