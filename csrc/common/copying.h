// Copying much, into memory that another core has read, or out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// ThreadSanitizer does not see streamed stores.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#define FL_HAS_SSE2 1
#include <emmintrin.h>
#endif

namespace fl {

// Have a cache line here that this core is about to write and another one has: the two wait less.
inline void expect_to_write(const volatile void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const volatile char*>(line)));
#else
  __builtin_prefetch(const_cast<const void*>(line), 1);
#endif
}

// An ordinary store to a line that lies in a peer's cache first has to fetch and invalidate it: up
// to 29 us for 64 KB where the cores are far apart (measured: docs/shared-memory.md). Stores past the
// caches do not: 1.7 us. Below this size the way through memory costs more than it saves.
constexpr size_t kStreamBytes = 2048;

// From here on the C library moves bytes by one instruction (rep movsb), which takes two to five
// times as long where source and destination begin at different places of a line, as arrays and
// slots do (measured: docs/shared-memory.md). Below it is as good as anything.
constexpr size_t kLongBytes = 2048;

#ifdef FL_HAS_SSE2

// Whole lines of the destination, by `store`; what is before and behind them by the C library.
template <typename Store>
void copy_lines(void* to, const void* from, size_t bytes, Store store) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const size_t head = -reinterpret_cast<uintptr_t>(target) & 63;
  std::memcpy(target, source, head);
  size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    const auto* in = reinterpret_cast<const __m128i*>(source + i);
    auto* out = reinterpret_cast<__m128i*>(target + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    store(out, a);
    store(out + 1, b);
    store(out + 2, c);
    store(out + 3, d);
  }
  std::memcpy(target + i, source + i, bytes - i);
}

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes < kLongBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  copy_lines(to, from, bytes, [](__m128i* out, __m128i value) { _mm_store_si128(out, value); });
}

inline void stream_copy(void* to, const void* from, size_t bytes) {
  if (bytes < kStreamBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  copy_lines(to, from, bytes, [](__m128i* out, __m128i value) { _mm_stream_si128(out, value); });
  _mm_sfence();  // streamed stores are not ordered with the counter that announces them
}

#else

inline void copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void stream_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace fl
