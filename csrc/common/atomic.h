// Atomics, futexes, clocks and process functions with which ranks and threads synchronize.
//
// The model checker (tests/native/model) compiles the same sources with FL_MODEL. It defines the functions
// that are only declared under FL_MODEL, instruments every memory access with the compiler, and replaces
// mutexes, conditions, threads, clocks, files and mappings of libc. Only this file may wait in the kernel.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace fl {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");

// Which threads use a futex: threads of several processes, or only threads of one process.
enum class FutexScope { kProcesses, kThreads };
constexpr uint32_t kAllBits = ~0u;

// kNoProcess: no process descriptor is available. kEndedProcess: the process has already ended.
constexpr int kNoProcess = -1, kEndedProcess = -2;

#ifdef FL_MODEL

// Return `model`, a small number with which the model checker reaches every branch in few memory accesses.
template <typename T>
constexpr T sized(T, T model) {
  return model;
}

void futex_wait(const void* word, uint32_t expected, int64_t nanoseconds, uint32_t bits, FutexScope scope);
void futex_wake(const void* word, uint32_t bits, FutexScope scope);
void full_fence();
void pause_briefly();
void yield_processor();
int processors();
int32_t process_id();
int open_process(int32_t pid);
bool process_has_ended(int process);
ssize_t read_memory(int32_t pid, uint64_t from, void* into, size_t bytes);
void* process_object(const void* type, void* (*make)());

// Return the only object of type T in this process.
template <typename T>
T& process_singleton() {
  static const char type = 0;
  return *static_cast<T*>(process_object(&type, [] { return static_cast<void*>(new T()); }));
}

#else

template <typename T>
constexpr T sized(T real, T) {
  return real;
}

// Sleep if `word` equals `expected`: at most until a wake with one of the `bits` or until the timeout.
inline void futex_wait(const void* word, uint32_t expected, int64_t nanoseconds, uint32_t bits, FutexScope scope) {
  timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  const int64_t fraction = end.tv_nsec + nanoseconds % 1000000000;
  end.tv_sec += nanoseconds / 1000000000 + fraction / 1000000000;
  end.tv_nsec = fraction % 1000000000;
  const int operation = FUTEX_WAIT_BITSET | (scope == FutexScope::kThreads ? FUTEX_PRIVATE_FLAG : 0);
  syscall(SYS_futex, word, operation, expected, &end, nullptr, bits);
}

inline void futex_wake(const void* word, uint32_t bits, FutexScope scope) {
  const int operation = FUTEX_WAKE_BITSET | (scope == FutexScope::kThreads ? FUTEX_PRIVATE_FLAG : 0);
  syscall(SYS_futex, word, operation, INT_MAX, nullptr, nullptr, bits);
}

// Order this thread's memory accesses before the fence and after it. Needed if another process reads the
// memory through the kernel: C++ fences do not cover such reads, and ThreadSanitizer rejects
// std::atomic_thread_fence. On x86, the processor itself keeps two stores, or two loads, in order.
inline void full_fence() {
#if defined(__x86_64__) || defined(__i386__)
  asm volatile("" ::: "memory");
#elif defined(__aarch64__)
  asm volatile("dmb ish" ::: "memory");
#else
  __sync_synchronize();
#endif
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void yield_processor() { sched_yield(); }

// Return the number of processors that this process may use.
inline int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

inline int32_t process_id() { return getpid(); }

// Return a descriptor that becomes readable when the process ends, or kEndedProcess or kNoProcess.
inline int open_process(int32_t pid) {
  const int process = static_cast<int>(syscall(434, pid, 0));  // SYS_pidfd_open, which glibc 2.28 lacks
  if (process >= 0) return process;
  return errno == ESRCH ? kEndedProcess : kNoProcess;
}

inline bool process_has_ended(int process) {
  pollfd end{process, POLLIN, 0};
  return process == kEndedProcess || (process >= 0 && poll(&end, 1, 0) == 1);
}

// Read memory of another process. Return the number of bytes read, or -1.
inline ssize_t read_memory(int32_t pid, uint64_t from, void* into, size_t bytes) {
  const iovec local{into, bytes}, remote{reinterpret_cast<void*>(from), bytes};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

template <typename T>
T& process_singleton() {
  static T singleton;
  return singleton;
}

#endif

}  // namespace fl
