// Copying into memory that another core has read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// ThreadSanitizer does not see streamed stores.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#define FL_CAN_STREAM 1
#include <emmintrin.h>
#endif

namespace fl {

// An ordinary store to a line that lies in a peer's cache first has to fetch and invalidate it: up
// to 29 us for 64 KB where the cores are far apart (measured: docs/algorithms.md). Stores past the
// caches do not: 1.7 us. Below this size the way through memory costs more than it saves.
constexpr size_t kStreamBytes = 2048;

inline void stream_copy(void* to, const void* from, size_t bytes) {
#ifdef FL_CAN_STREAM
  if (bytes >= kStreamBytes) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    const size_t head = -reinterpret_cast<uintptr_t>(target) & 15;
    std::memcpy(target, source, head);
    size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
      const auto* in = reinterpret_cast<const __m128i*>(source + i);
      auto* out = reinterpret_cast<__m128i*>(target + i);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    std::memcpy(target + i, source + i, bytes - i);
    _mm_sfence();  // streamed stores are not ordered with the counter that announces them
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace fl
