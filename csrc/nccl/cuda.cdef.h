/* Functions of CUDA's driver, whose addresses launch.c gets; handles are those of the runtime. */

int cuEventRecord(void *event, void *stream);
int cuStreamWaitEvent(void *stream, void *event, unsigned int flags);
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *stream);
int cuGraphLaunch(void *graph, void *stream);
