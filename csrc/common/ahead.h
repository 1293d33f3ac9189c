// Calls from which a rank may return before others have made them: see shm/entering.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "failure.h"
#include "signature.h"

namespace fl {

// From one to before another.
struct Ranks {
  int first = 0, last = 0;
  int count() const { return last - first; }
  bool has(int rank) const { return first <= rank && rank < last; }
};

// The ranks whose calls bring something for `rank` of `size`, which calls that, if all of it goes with them.
inline Ranks needed_by(int rank, int size, const fl_signature& call) {
  const bool is_root = rank == call.root;
  switch (call.verb) {
    case FL_SCATTER:
    case FL_BROADCAST:
      return is_root ? Ranks{} : Ranks{call.root, call.root + 1};
    case FL_REDUCE:
    case FL_GATHER:
      return {0, is_root ? size : 0};
    case FL_SCAN:
    case FL_EXSCAN:
      return {0, rank};
    default:
      return {0, size};
  }
}

// Whether `rank` does not know how much comes: it may go with the root's call.
inline bool may_be_small(int rank, const fl_signature& call) {
  return root_must_know(call.verb) && call.ndim == FL_ANY && rank != call.root;
}

// Earlier calls in which the ranks differ, as far as not every rank has raised since.
class Differing {
 public:
  struct Call {
    uint32_t number;
    bool told;  // this rank has raised it
    Seen seen;
  };
  // A rank may be so many calls ahead.
  explicit Differing(uint32_t most_ahead) : most_ahead_(most_ahead) {}

  bool none() const { return calls_.empty(); }

  void forget_old(uint32_t number) {
    const auto is_old = [&](const Call& call) { return number - call.number > most_ahead_; };
    calls_.erase(std::remove_if(calls_.begin(), calls_.end(), is_old), calls_.end());
  }

  // What was found of a call, the next one: whether some rank may have returned from it.
  void compared(bool same, bool runs_ahead, Call call) {
    forget_old(call.number);
    if (!runs_ahead) {
      calls_.clear();  // every rank raises in this call
    } else if (!same) {
      calls_.push_back(std::move(call));
    }
  }

  // What is to be raised in call `number`: with `only_news` one of which this rank has not been told.
  std::optional<Call> to_raise(uint32_t number, bool only_news) {
    if (none()) return std::nullopt;
    forget_old(number);
    const auto news = std::find_if(calls_.begin(), calls_.end(), [](const Call& call) { return !call.told; });
    if (none() || (only_news && news == calls_.end())) return std::nullopt;
    const Call found = news == calls_.end() ? calls_.back() : *news;
    for (Call& call : calls_) call.told = true;
    return found;
  }

 private:
  const uint32_t most_ahead_;
  std::vector<Call> calls_;
};

}  // namespace fl
