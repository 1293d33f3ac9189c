/* CUDA driver functions whose addresses are passed to launch.c; handles are runtime handles. */

int cuEventRecord(void *event, void *stream);
int cuStreamWaitEvent(void *stream, void *event, unsigned int flags);
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *stream);
int cuGraphLaunch(void *graph, void *stream);
