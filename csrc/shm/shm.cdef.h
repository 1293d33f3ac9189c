/* Functions of groups in shared memory in addition to group.cdef.h. */

typedef struct fl_region fl_region;
typedef struct fl_posted fl_posted;

/* Return the bytes of the segment that `ranks` ranks of one host share. */
size_t fl_shm_bytes(int ranks);

/* Map the segment at `path`: an empty unnamed file (/proc/PID/fd/N), or a named file of this user in
   memory. One rank passes nonzero `create` and sizes the file before the other ranks open it. With
   `is_named` the file stays open and its memory is reserved, because ranks that do not see each other's
   processes need its locks. NULL on failure. */
fl_group *fl_shm_open(const char *path, int create, int is_named, int rank, int size);
/* Like fl_shm_open, for a subgroup of `size` ranks of `whole`. The engine of `whole` sends the messages of the
   subgroup. `number` is nonzero and equal on all ranks of the subgroup. */
fl_group *fl_shm_part(fl_group *whole, const int *ranks, unsigned number, const char *path, int create,
                      int is_named, int rank, int size);

/* Compare the calls with FL_AHEAD that all ranks have made. Set *is_behind to 1 if some are not compared
   yet, else to 0. Return a failure if calls differ or a rank is more than `seconds` late, else NULL. */
fl_op *fl_look_back(fl_group *group, double seconds, int *is_behind);

/* fl_exchange on the caller's thread, in two steps. fl_post does not sleep. It polls until all messages have
   ended or `spins` consecutive polls made no progress (negative: no polling). It returns NULL if all messages
   have ended without an error. Otherwise, call fl_deliver on the same thread: it waits for the messages and
   writes the results. The data must not change until then. */
fl_posted *fl_post(fl_group *group, const fl_message *messages, int count, double seconds, int spins);
void fl_deliver(fl_posted *posted, fl_op **results);

/* A collective on the caller's thread in steps. fl_begin announces the call without waiting. If it returns 0,
   it had no effect: use fl_run. fl_ready returns the state of the other ranks without sleeping. If every rank
   has its own processor, it polls `spins` times. Otherwise it polls only if `spins` is -1, and yields the
   processor. fl_finish completes the call like fl_run. After FL_COMPLETE it does not wait. */
enum { FL_AWAITED = 0, FL_CALLED = 1, FL_COMPLETE = 2 };
int fl_begin(fl_group *group, const fl_signature *signature, const void *data, double seconds,
             const fl_site *site);
int fl_ready(fl_group *group, int spins);
fl_op *fl_finish(fl_group *group, const fl_signature *signature, void *data, void *output);

/* Add memory for an array of `bytes` bytes on each rank. Reductions of such arrays need no copies. Every rank
   maps the same files in the same order. One rank creates each file: it passes `create` 1, or 2 if the memory
   is reserved already. NULL on failure. The memory is freed after fl_free_region and either fl_drop_region or
   fl_free. While a thread runs a collective, fl_drop_region returns 0 and must be repeated. */
fl_region *fl_add_region(fl_group *group, const char *path, int create, size_t bytes);
void *fl_region_array(fl_region *region);
void fl_free_region(fl_region *region);
int fl_drop_region(fl_group *group, void *array);

/* Set the function that writes the call site, called on the caller's thread when other ranks need it. */
int fl_on_mismatch(fl_group *group, void (*where)(fl_site *site));
