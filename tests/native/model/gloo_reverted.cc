// The all_reduce through shared memory that gloo merged and took back in 2026, written again for one number
// (the small way) and for one a rank (the large way): who announces which state, and who waits for which.
// Each fault of it is a case by itself, which the model must refute; the mended ones must pass.
#include <array>
#include <new>

#include "../../../csrc/common/atomic.h"
#include "model.h"

// ThreadSanitizer does not know fences; the model does.
#pragma GCC diagnostic ignored "-Wtsan"

namespace {

constexpr int kRanks = 2, kCalls = 3;
using Numbers = std::array<int, kRanks>;

// Of states. Gloo's are plain words that are read as volatile, which orders nothing.
enum class Words { kPlain, kRelaxed, kAcquired };
enum Way { kSmall, kLarge };

// Of each rank, which alone writes it. Of two buffers each call takes the other one, so that a rank may be a
// call ahead of those who still read.
struct Workspace {
  int words[2];
  std::atomic<int> states[2];
  int small[2];
  Numbers large[2];
};
Workspace* workspaces;

void prepare() { workspaces = new (model::shared(kRanks * sizeof(Workspace))) Workspace[kRanks]{}; }

template <Words words>
void announce(int rank, Way way, int state) {
  Workspace& mine = workspaces[rank];
  std::atomic_thread_fence(std::memory_order_release);
  if constexpr (words == Words::kPlain) {
    *static_cast<volatile int*>(&mine.words[way]) = state;
  } else {
    mine.states[way].store(state, std::memory_order_relaxed);
  }
}

// Until every other rank has announced one of the two.
template <Words words>
void await(int rank, Way way, int state, int or_else) {
  constexpr auto order = words == Words::kAcquired ? std::memory_order_acquire : std::memory_order_relaxed;
  for (int r = 0; r < kRanks; ++r) {
    const Workspace& other = workspaces[r];
    const auto has_come = [&] {
      int seen;
      if constexpr (words == Words::kPlain) seen = *static_cast<const volatile int*>(&other.words[way]);
      else seen = other.states[way].load(order);
      return seen == state || seen == or_else;
    };
    while (r != rank && !has_come()) fl::yield_processor();
  }
}

// Who is a call ahead has announced the next state already; three tell it from the one before.
template <Words words>
int small(int rank, int call, int value) {
  const int state = (call + 1) % 3, next = (call + 2) % 3, buffer = call % 2;
  workspaces[rank].small[buffer] = value;
  announce<words>(rank, kSmall, state);
  await<words>(rank, kSmall, state, next);
  int sum = 0;
  for (int r = 0; r < kRanks; ++r) sum += workspaces[r].small[buffer];
  return sum;
}

// Each rank sums its slice, where it lies in its own buffer, and takes the others' from theirs. Gloo waits
// for the same states twice: that holds before anybody has summed, and not any more of who is ahead.
template <Words words, bool awaits_sums>
Numbers large(int rank, int call, const Numbers& values) {
  const int buffer = call % 2, copied = 1 + 2 * buffer, summed = copied + 1, next = 3 - 2 * buffer;
  workspaces[rank].large[buffer] = values;
  announce<words>(rank, kLarge, copied);
  await<words>(rank, kLarge, copied, summed);
  int sum = 0;
  for (int r = 0; r < kRanks; ++r) sum += workspaces[r].large[buffer][rank];
  workspaces[rank].large[buffer][rank] = sum;
  announce<words>(rank, kLarge, summed);
  await<words>(rank, kLarge, awaits_sums ? summed : copied, awaits_sums ? next : summed);
  Numbers sums{};
  for (int r = 0; r < kRanks; ++r) sums[r] = workspaces[r].large[buffer][r];
  return sums;
}

void expect(int sum, int call, int slice) {
  const int right = kRanks * (10 * call + slice) + kRanks * (kRanks - 1) / 2;
  model::check(sum == right, "the sum is " + std::to_string(sum) + ", not " + std::to_string(right));
}

template <Words words>
void small_calls(int rank) {
  model::begin();
  for (int call = 0; call < kCalls; ++call) expect(small<words>(rank, call, 10 * call + rank), call, 0);
}

template <Words words, bool awaits_sums>
void large_calls(int rank) {
  model::begin();
  for (int call = 0; call < kCalls; ++call) {
    Numbers values{};
    for (int slice = 0; slice < kRanks; ++slice) values[slice] = 10 * call + slice + rank;
    const Numbers sums = large<words, awaits_sums>(rank, call, values);
    for (int slice = 0; slice < kRanks; ++slice) expect(sums[slice], call, slice);
  }
}

const model::Case cases[] = {
    {"gloo_small_plain/2x3", kRanks, prepare, small_calls<Words::kPlain>, .refuted = "race"},
    {"gloo_small_relaxed/2x3", kRanks, prepare, small_calls<Words::kRelaxed>, .refuted = "race"},
    {"gloo_small_mended/2x3", kRanks, prepare, small_calls<Words::kAcquired>},
    {"gloo_large_plain/2x3", kRanks, prepare, large_calls<Words::kPlain, false>, .refuted = "race"},
    {"gloo_large_relaxed/2x3", kRanks, prepare, large_calls<Words::kRelaxed, true>, .refuted = "race"},
    // By a wrong sum, or a wait without end: whichever the search meets first.
    {"gloo_large_early/2x3", kRanks, prepare, large_calls<Words::kAcquired, false>, .refuted = ""},
    {"gloo_large_mended/2x3", kRanks, prepare, large_calls<Words::kAcquired, true>},
};
const model::Table all{cases};

}  // namespace
