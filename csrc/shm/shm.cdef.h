/* What groups in shared memory have besides group.cdef.h. */

typedef struct fl_region fl_region;
typedef struct fl_posted fl_posted;

/* Bytes of the segment that `ranks` ranks of one host share. */
size_t fl_shm_bytes(int ranks);

/* Map the segment at `path`, an empty file without a name (/proc/PID/fd/N) or one of this user in
   memory; `create` is not 0 on the one rank that makes it as large as that, before the others come. It
   stays open where it `is_named`, as ranks that do not see each other's processes need its locks: then
   its memory is reserved. NULL on failure. */
fl_group *fl_shm_open(const char *path, int create, int is_named, int rank, int size);
/* The same of `size` ranks of `whole`, whose engine its messages share; they have this number, which is not 0. */
fl_group *fl_shm_part(fl_group *whole, const int *ranks, unsigned number, const char *path, int create,
                      int is_named, int rank, int size);

/* Compare the calls that were run with FL_AHEAD as far as the others have made them. `is_behind`: they have not
   made all. The result is a handle of the failure if the ranks differ, or if one has not made a call for so many
   seconds. */
fl_op *fl_look_back(fl_group *group, double seconds, int *is_behind);

/* fl_exchange on the caller's thread, in two steps: post never sleeps, and is NULL where all have ended well
   within so many looks in a row without any progress (`spins` < 0: none is taken); else deliver must
   follow on the same thread, waits for the rest, and writes the results. The data stays untouched until
   then. */
fl_posted *fl_post(fl_group *group, const fl_message *messages, int count, double seconds, int spins);
void fl_deliver(fl_posted *posted, fl_op **results);

/* A collective on the caller's thread in two steps: begin, which never waits, shows the others what this rank
   calls (0: nothing has happened, use fl_run); ready says after up to `spins` looks (-1: as long as they need this
   rank's processor, without sleeping) how far they are: FL_AWAITED, FL_CALLED, or FL_COMPLETE, after which nothing
   is waited for; finish waits for them and does the work, with the result of fl_run. */
enum { FL_AWAITED = 0, FL_CALLED = 1, FL_COMPLETE = 2 };
int fl_begin(fl_group *group, const fl_signature *signature, const void *data, double seconds,
             const fl_site *site);
int fl_ready(fl_group *group, int spins);
fl_op *fl_finish(fl_group *group, const fl_signature *signature, void *data, void *output);

/* Memory for an array of `bytes` on each rank; operations on it skip the copies. Collective: every
   rank maps the same file, in the same order, which one creates; with 2 its memory is reserved already.
   NULL on failure. The memory lives until the region was freed and the group has dropped
   the array, or was freed. It is dropped later, 0, while a thread runs a collective. */
fl_region *fl_add_region(fl_group *group, const char *path, int create, size_t bytes);
void *fl_region_array(fl_region *region);
void fl_free_region(fl_region *region);
int fl_drop_region(fl_group *group, void *array);

/* Called on the caller's thread where other ranks are to know where the program has called. */
int fl_on_mismatch(fl_group *group, void (*where)(fl_site *site));
