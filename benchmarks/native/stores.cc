// Cost of writing data that another core reads. Two threads run on separate cores. In each step a thread fills
// its slot with `bytes` bytes, waits for the other thread's slot, and adds its content to an array.
//
// Usage: stores BYTES ordinary|streamed. Prints the microseconds per step for filling and for adding.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../../csrc/common/copying.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSteps = 2000, kWarmUp = 500;
constexpr size_t kSlots = 4;

struct alignas(64) Flag {
  std::atomic<int> step{0};
};

Flag flags[2];

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void rank(int self, char* slots, size_t bytes, bool streamed) {
  pin(self);
  std::vector<float> array(bytes / sizeof(float), 0.0f);
  double filling = 0, adding = 0;
  for (int step = 1; step <= kWarmUp + kSteps; ++step) {
    if (step == kWarmUp + 1) filling = adding = 0;
    char* own = slots + (self * kSlots + step % kSlots) * bytes;
    const char* theirs = slots + ((1 - self) * kSlots + step % kSlots) * bytes;
    auto start = Clock::now();
    if (streamed) {
      fl::stream_copy(own, array.data(), bytes);
    } else {
      std::memcpy(own, array.data(), bytes);
    }
    flags[self].step.store(step);
    filling += seconds_since(start);
    while (flags[1 - self].step.load() < step) {
    }
    start = Clock::now();
    const float* other = reinterpret_cast<const float*>(theirs);
    for (size_t i = 0; i < array.size(); ++i) array[i] += other[i];
    adding += seconds_since(start);
  }
  if (self == 0) std::printf("%.2f %.2f\n", filling / kSteps * 1e6, adding / kSteps * 1e6);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const size_t bytes = std::strtoul(arguments[1], nullptr, 10);
  const bool streamed = std::strcmp(arguments[2], "streamed") == 0;
  auto* slots = static_cast<char*>(std::aligned_alloc(4096, 2 * kSlots * bytes));
  std::memset(slots, 0, 2 * kSlots * bytes);
  std::thread first(rank, 0, slots, bytes, streamed), second(rank, 1, slots, bytes, streamed);
  first.join();
  second.join();
  std::free(slots);
}
