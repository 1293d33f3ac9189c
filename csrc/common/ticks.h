/* The clock of the flight record, the fastest one available; for C and C++. */
#pragma once

#include <stdint.h>
#include <time.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* Nanoseconds of the clock behind Python's time.monotonic_ns(). */
static inline int64_t fl_nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Ticks of the processor's counter if it has one, because the system clock takes 25 ns. */
static inline int64_t fl_ticks(void) {
#if defined(__x86_64__)
  return (int64_t)__rdtsc();
#elif defined(__aarch64__)
  int64_t ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return fl_nanoseconds();
#endif
}

/* Write the time into `*ended` if it still contains `running`, that is, if no later call has reused the
   entry of the flight record. Thread-safe. */
static inline void fl_stamp(int64_t *ended, int64_t running) {
  const int64_t now = fl_ticks();
  __atomic_compare_exchange_n(ended, &running, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
