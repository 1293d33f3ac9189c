// Replacements of pthreads, the kernel and the C library for fibers.
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "../../../csrc/common/atomic.h"
#include "runtime.h"

namespace model {

namespace {

struct Mutex {
  const void* at;
  int owner;  // -1: unlocked
  Times times;
};
constexpr int kMostMutexes = 256;
Mutex mutexes[kMostMutexes];
int mutex_count = 0;

uintptr_t number(const void* at) { return reinterpret_cast<uintptr_t>(at); }
bool is_own(const void* at) { return watched != nullptr && is_modelled(reinterpret_cast<uintptr_t>(at)); }

Mutex& mutex_of(const void* at) {
  for (int i = mutex_count; i-- > 0;) {
    if (mutexes[i].at == at) return mutexes[i];
  }
  if (mutex_count == kMostMutexes) stop("too many mutexes");
  Mutex& made = mutexes[mutex_count++];
  made.at = at;
  made.owner = -1;
  std::memset(&made.times, 0, sizeof made.times);
  return made;
}

void take(Mutex& mutex) {
  happens(*here, number(mutex.at), true);
  while (mutex.owner >= 0) {
    block(&mutex, -1);
    happens(*here, number(mutex.at), true);
  }
  mutex.owner = here->number;
  here->now.join(mutex.times);
}

void give(Mutex& mutex) {
  happens(*here, number(mutex.at), true);
  mutex.times = here->now;
  tick(*here);
  mutex.owner = -1;
  wake_all(&mutex, kMostFibers);
}

int wait_on(const void* condition, const void* at, int64_t until) {
  Mutex& mutex = mutex_of(at);
  give(mutex);
  happens(*here, number(condition), true);
  block(condition, until);
  const bool is_late = here->has_timed_out;
  take(mutex);
  return is_late ? ETIMEDOUT : 0;
}

int64_t nanoseconds(const timespec* time) { return int64_t{time->tv_sec} * 1000000000 + time->tv_nsec; }

}  // namespace
}  // namespace model

using namespace model;

#define CALLER reinterpret_cast<uintptr_t>(__builtin_return_address(0))

extern "C" {

int pthread_mutex_lock(pthread_mutex_t* at) {
  if (!is_own(at)) return 0;
  point(number(at));
  record("lock", number(at), 0, CALLER);
  take(mutex_of(at));
  return 0;
}
int pthread_mutex_trylock(pthread_mutex_t* at) {
  if (!is_own(at)) return 0;
  point(number(at));
  record("try to lock", number(at), 0, CALLER);
  happens(*here, number(at), true);
  if (mutex_of(at).owner >= 0) return EBUSY;
  take(mutex_of(at));
  return 0;
}
int pthread_mutex_unlock(pthread_mutex_t* at) {
  if (!is_own(at)) return 0;
  record("unlock", number(at), 0, CALLER);
  give(mutex_of(at));
  return 0;
}
int pthread_mutex_destroy(pthread_mutex_t*) { return 0; }

int pthread_cond_wait(pthread_cond_t* at, pthread_mutex_t* mutex) { return wait_on(at, mutex, -1); }
int pthread_cond_clockwait(pthread_cond_t* at, pthread_mutex_t* mutex, clockid_t, const timespec* until) {
  return wait_on(at, mutex, nanoseconds(until));
}
int pthread_cond_timedwait(pthread_cond_t* at, pthread_mutex_t* mutex, const timespec* until) {
  return wait_on(at, mutex, nanoseconds(until));
}
int pthread_cond_destroy(pthread_cond_t*) { return 0; }

// Called by the sources in place of std::condition_variable.
void model_notify_one(void* at) {
  if (watched == nullptr || is_dropped(number(at), CALLER)) return;
  point(number(at));
  happens(*here, number(at), true);
  record("notify one", number(at), static_cast<uint64_t>(wake_all(at, 1)), CALLER);
}
void model_notify_all(void* at) {
  if (watched == nullptr || is_dropped(number(at), CALLER)) return;
  point(number(at));
  happens(*here, number(at), true);
  record("notify all", number(at), static_cast<uint64_t>(wake_all(at, kMostFibers)), CALLER);
}

int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*entry)(void*), void* argument) {
  if (here == nullptr) return EAGAIN;
  Fiber& made = spawn(here->rank, entry, argument);
  made.now.join(here->now);
  tick(*here);
  *thread = made.number + 1;
  record("begin a thread", 0, made.number, CALLER);
  if (!is_quiet) decide(kAccess);
  return 0;
}
int pthread_join(pthread_t thread, void**) {
  Fiber& other = fibers[thread - 1];
  happens(*here, number(&other), true);
  while (other.state != Fiber::kEnded) {
    block(&other, -1);
    happens(*here, number(&other), true);
  }
  here->now.join(other.now);
  return 0;
}
int pthread_detach(pthread_t) { return 0; }
pthread_t pthread_self() { return here == nullptr ? 999 : static_cast<pthread_t>(here->number + 1); }

int clock_gettime(clockid_t clock, timespec* time) {
  if (here == nullptr) return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  happens(*here, kClock, false);
  ++here->looked;
  const int64_t since = clock_of(*here);
  time->tv_sec = since / 1000000000;
  time->tv_nsec = since % 1000000000;
  return 0;
}

}  // extern "C"

namespace {

// Memory of a rank, or of prepare(); never reused within one execution.
void* make(size_t bytes, size_t alignment, uintptr_t) {
  if (here == nullptr && !in_prepare) {
    void* const made = alignment > 16 ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                                      : std::malloc(bytes);
    if (made == nullptr) std::abort();
    return made;
  }
  const int area = here == nullptr ? 0 : here->rank + 1;
  const size_t head = alignment > 16 ? alignment : 16;
  char* const at = static_cast<char*>(allocate(area, head + bytes, head)) + head;
  std::memcpy(at - 8, &bytes, 8);
  std::memset(at, 0xa5, bytes);
  return at;
}

void unmake(void* at, uintptr_t pc) {
  if (at == nullptr) return;
  if (!is_modelled(reinterpret_cast<uintptr_t>(at))) return std::free(at);
  size_t bytes;
  std::memcpy(&bytes, static_cast<char*>(at) - 8, 8);
  note(reinterpret_cast<uintptr_t>(at), bytes, kWrite | kFreed, pc);
}

}  // namespace

void* operator new(size_t bytes) { return make(bytes, 16, CALLER); }
void* operator new[](size_t bytes) { return make(bytes, 16, CALLER); }
void* operator new(size_t bytes, std::align_val_t alignment) { return make(bytes, static_cast<size_t>(alignment), CALLER); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return make(bytes, 16, CALLER); }
void operator delete(void* at) noexcept { unmake(at, CALLER); }
void operator delete[](void* at) noexcept { unmake(at, CALLER); }
void operator delete(void* at, size_t) noexcept { unmake(at, CALLER); }
void operator delete[](void* at, size_t) noexcept { unmake(at, CALLER); }
void operator delete(void* at, std::align_val_t) noexcept { unmake(at, CALLER); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { unmake(at, CALLER); }

namespace model {
namespace {

constexpr int kFirstPid = 1000, kFirstFile = 100000;

struct Segment {
  int name;
  uintptr_t at;
  size_t bytes;
  int users[kMostRanks];
  int8_t locks[kMostRanks];  // by byte: the owning rank; -1: none
};
constexpr int kMostSegments = 8;
struct File {
  int8_t segment, rank;
};
constexpr int kMostFiles = 64;
struct Single {
  const void* type;
  void* object;
};

// Kernel state except processes.
struct System {
  Segment segments[kMostSegments];
  int segment_count;
  File files[kMostFiles];
  int file_count;
  Single singles[kMostRanks][4];
};
System kernel, kernel_at_beginning;
auto& segments = kernel.segments;
auto& files = kernel.files;
int &segment_count = kernel.segment_count, &file_count = kernel.file_count;

File& file_of(int fd) { return files[fd - kFirstFile]; }

}  // namespace

void reset_system() {
  std::memset(&kernel, 0, sizeof kernel);
  mutex_count = 0;
}
void save_system() { kernel_at_beginning = kernel; }
void restore_system() {
  kernel = kernel_at_beginning;
  mutex_count = 0;
}

bool is_mapped(uintptr_t at, int rank) {
  for (int i = 0; i < segment_count; ++i) {
    if (at - segments[i].at < segments[i].bytes) return segments[i].users[rank] > 0;
  }
  return true;  // created by a case
}

}  // namespace model

namespace fl {

void futex_wait(const void* word, uint32_t seen, int64_t nanoseconds, uint32_t bits, FutexScope) {
  point(number(word));
  happens(*here, number(word), true);
  if (!is_quiet) model::full_fence();  // by the kernel; no mutant
  const uint32_t value = kernel_load(number(word), CALLER);
  record("futex wait", number(word), value, CALLER);
  if (value != seen) return;
  block(word, clock_of(*here) + nanoseconds, bits);
  record(here->has_timed_out ? "its time is over" : "wakes", number(word), value, CALLER);
}

void futex_wake(const void* word, uint32_t bits, FutexScope) {
  if (is_dropped(number(word), CALLER)) return;
  point(number(word));
  happens(*here, number(word), true);
  if (!is_quiet) model::full_fence();  // by the kernel; no mutant
  record("futex wake", number(word), static_cast<uint64_t>(wake_all(word, kMostFibers, bits)), CALLER);
}

void pause_briefly() { yield_processor(); }

void yield_processor() {
  if (is_quiet) return;
  here->has_yielded = true;
  decide(kYields);
}

void full_fence() {
  if (!is_quiet && !is_dropped(kBase, CALLER, Site::kFence)) model::full_fence();
}

int processors() { return current->processors; }
int32_t process_id() { return kFirstPid + here->rank; }
int open_process(int32_t pid) { return pid - kFirstPid == gone ? kEndedProcess : pid; }
bool process_has_ended(int process) { return process == kEndedProcess || process - kFirstPid == gone; }

ssize_t read_memory(int32_t pid, uint64_t from, void* into, size_t bytes) {
  const int owner = pid - kFirstPid;
  point(kBase);
  record("read memory", from, bytes, CALLER);
  errno = owner == gone ? ESRCH : EFAULT;
  if (owner == gone || !is_modelled(from) || area_of(from) != owner + 1) return -1;
  if (current->reads_fail && bytes > sizeof(uint64_t) && one_of(2) == 1) return -1;
  const bool is_well = note_remote(from, bytes, CALLER);
  note(number(into), bytes, kWrite, CALLER);
  std::memcpy(into, reinterpret_cast<void*>(from), bytes);
  if (is_well) return static_cast<ssize_t>(bytes);
  if (!has_given_up(owner)) stop("rank %d reads memory of rank %d at %#lx that it is changing", here->rank, owner, from);
  taint(number(into), bytes);
  return static_cast<ssize_t>(bytes);
}

void* process_object(const void* type, void* (*make)()) {
  for (Single& one : kernel.singles[here->rank]) {
    if (one.type == nullptr) one = {type, make()};
    if (one.type == type) return one.object;
  }
  stop("too many objects of a process");
}

}  // namespace fl

// Files: only the calls that Mapping uses.
extern "C" {

int model_open(const char* path, int, ...) {
  happens(*here, kKernel, true);
  const int name = std::atoi(std::strrchr(path, '/') + 1);
  int found = 0;
  while (found < segment_count && segments[found].name != name) ++found;
  if (found == segment_count) {
    if (segment_count == kMostSegments) stop("too many segments");
    segments[segment_count++] = {name, 0, 0, {}, {-1, -1, -1, -1}};
  }
  if (file_count == kMostFiles) stop("too many files");
  files[file_count] = {static_cast<int8_t>(found), here->rank};
  return kFirstFile + file_count++;
}

int model_ftruncate(int fd, off_t bytes) {
  happens(*here, kKernel, true);
  Segment& segment = segments[file_of(fd).segment];
  segment.bytes = static_cast<size_t>(bytes);
  segment.at = number(allocate(0, segment.bytes, 4096));
  std::memset(reinterpret_cast<void*>(segment.at), 0, segment.bytes);
  return 0;
}
int model_posix_fallocate(int fd, off_t, off_t bytes) { return model_ftruncate(fd, bytes); }

int model_fstat(int fd, struct stat* status) {
  std::memset(status, 0, sizeof *status);
  status->st_uid = geteuid();
  status->st_mode = S_IFREG | 0600;
  status->st_size = static_cast<off_t>(segments[file_of(fd).segment].bytes);
  return 0;
}

void* model_mmap(void*, size_t, int, int, int fd, off_t) {
  happens(*here, kKernel, true);
  Segment& segment = segments[file_of(fd).segment];
  ++segment.users[here->rank];
  return reinterpret_cast<void*>(segment.at);
}

int model_munmap(void* at, size_t) {
  happens(*here, kKernel, true);
  for (int i = 0; i < segment_count; ++i) {
    if (segments[i].at == number(at)) --segments[i].users[here->rank];
  }
  return 0;
}

int model_fcntl(int fd, int command, ...) {
  happens(*here, kKernel, true);
  va_list arguments;
  va_start(arguments, command);
  auto* const range = va_arg(arguments, struct flock*);
  va_end(arguments);
  int8_t& lock = segments[file_of(fd).segment].locks[range->l_start];
  const bool is_others = lock >= 0 && lock != file_of(fd).rank && lock != gone;
  if (command == F_OFD_GETLK) {
    range->l_type = is_others ? F_WRLCK : F_UNLCK;
    return 0;
  }
  if (is_others) return -1;
  lock = file_of(fd).rank;
  return 0;
}

int model_close(int fd) {
  if (fd < kFirstFile) return 0;  // a file of the process
  happens(*here, kKernel, true);
  for (int8_t& lock : segments[file_of(fd).segment].locks) {
    if (lock == file_of(fd).rank) lock = -1;
  }
  return 0;
}

int model_unlink(const char*) { return 0; }

}  // extern "C"
