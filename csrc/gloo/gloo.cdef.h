/* The C ABI between Python and Gloo. Calls that start an operation return at once; the group's
   worker thread runs them in the order they came. */

typedef struct fl_group fl_group;

/* A group of `size` processes whose sockets are bound to `host` (a name or address) or, when
   `host` is empty, to the network interface `interface`. `seconds` bounds the connecting.
   NULL with a message on failure. */
fl_group *fl_gloo_create(int rank, int size, const char *host, const char *interface,
                         double seconds, char *message, size_t message_bytes);

/* Write the address that `peer` must connect to; returns its bytes, or -1 where the room is too
   small. All addresses of a group have the same number of bytes. */
int fl_gloo_address(fl_group *group, int peer, char *address, size_t address_bytes);

/* The calls below start an operation and return at once; never NULL. `seconds` bounds the
   operation's time from when it begins to run. `data` and `output` must stay alive and untouched
   until it has ended. */

/* Connect to every peer: `addresses` holds, in rank order, what each rank gave for this one. */
fl_op *fl_gloo_connect(fl_group *group, const char *addresses, size_t address_bytes,
                       double seconds);

/* all_reduce, broadcast: in place on data.      barrier: data is NULL.
   reduce_scatter: data has signature.count elements in all, output takes this rank's part.
   all_gather: the ranks' data, one after the other, are given by fl_op_output.
   send, recv: data, to and from `peer`. */
fl_op *fl_gloo_run(fl_group *group, const fl_signature *signature, void *data, void *output,
                   int peer, double seconds);

/* Stop the running operation, fail the queued ones, close the sockets, free the group. */
void fl_gloo_close(fl_group *group);
