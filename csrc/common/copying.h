// Copies of large blocks from or to memory that another core has read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// ThreadSanitizer does not detect streamed stores. Therefore they are disabled under it.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#define FL_HAS_SSE2 1
#include <emmintrin.h>
#endif

namespace fl {

// Prefetch a cache line of another core for writing. This shortens the wait of both cores.
inline void expect_to_write(const volatile void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const volatile char*>(line)));
#else
  __builtin_prefetch(const_cast<const void*>(line), 1);
#endif
}

// Minimum bytes for streamed stores (docs/shared-memory.md). For fewer bytes, streaming to memory costs more
// than it saves.
constexpr size_t kStreamBytes = 2048;

// From this size in bytes, the C library copies with `rep movsb`. It takes two to five times as long if source
// and destination have different offsets in a cache line, like most arrays and slots (docs/shared-memory.md).
constexpr size_t kLongBytes = 2048;

#ifdef FL_HAS_SSE2

// Copy the destination's complete cache lines with `store`, and its other bytes with memcpy.
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

#endif

inline void copy(void* to, const void* from, size_t bytes) {
#ifdef FL_HAS_SSE2
  const auto store = [](__m128i* out, __m128i value) { _mm_store_si128(out, value); };
  if (bytes >= kLongBytes) return copy_lines(to, from, bytes, store);
#endif
  std::memcpy(to, from, bytes);
}

inline void stream_copy(void* to, const void* from, size_t bytes) {
#ifdef FL_HAS_SSE2
  if (bytes >= kStreamBytes) {
    copy_lines(to, from, bytes, [](__m128i* out, __m128i value) { _mm_stream_si128(out, value); });
    return _mm_sfence();  // the stores must be visible before the counter that announces them
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace fl
