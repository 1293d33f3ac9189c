// Calls from which a rank may return before others have made them: see shm/entering.cc.
#pragma once

#include <optional>

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

// Of two numbers of calls, which wrap.
inline bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

// Whether `rank`, which needs the calls of `needed`, finds among these one that differs from its own.
inline bool sees_difference(const fl_signature* calls, int rank, Ranks needed) {
  for (int r = needed.first; r < needed.last; ++r) {
    const fl_signature both[] = {calls[rank], calls[r]};
    if (!all_same(both, 2) || (root_must_know(calls[rank].verb) && calls[r].ndim == FL_ANY)) return true;
  }
  return false;
}

// Up to which call those of `needed` have compared that have withdrawn their calls; nothing: none has. Who needs
// such a call raises the earlier mismatch as well.
inline std::optional<uint32_t> withdrawn_after(const fl_signature* calls, Ranks needed) {
  std::optional<uint32_t> last;
  for (int r = needed.first; r < needed.last; ++r) {
    const auto compared = static_cast<uint32_t>(calls[r].count);
    if (calls[r].ndim == FL_WITHDRAWN && (!last || is_before(*last, compared))) last = compared;
  }
  return last;
}

// The ranks for whose calls `rank` waits, which needs those of `needed`: all if one of these waits for all. That
// one may raise the mismatch of an earlier call, and then `rank` must do so, too.
template <typename WaitsForAll>
Ranks awaited(const fl_signature* calls, int size, int rank, Ranks needed, WaitsForAll waits_for_all) {
  if (sees_difference(calls, rank, needed)) return needed;
  for (int r = needed.first; r < needed.last; ++r) {
    if (r != rank && waits_for_all(r)) return {0, size};
  }
  return needed;
}

// Earlier calls in which the ranks differ, as far as not every rank has raised since. All ranks find the same,
// from what they have called.
class Differing {
 public:
  struct Call {
    uint32_t number;
    Seen seen;
    std::vector<bool> told;  // which ranks have raised in it, or since
    bool is_raised = false;  // by this rank, maybe in a call that was not compared yet
  };
  // A rank may be so many calls ahead.
  Differing(int rank, uint32_t most_ahead) : rank_(rank), most_ahead_(most_ahead) {}

  bool none() const { return calls_.empty(); }

  void forget_old(uint32_t number) {
    forget([&](const Call& call) { return number - call.number > most_ahead_; });
  }

  // What the ranks have called in `number`, the next to be compared. `needed(r)` are those for whose calls r
  // waits in it: all, if it can raise an earlier one.
  template <typename Needed>
  void compared(uint32_t number, bool same, const std::vector<fl_signature>& calls, Needed needed, Seen seen) {
    forget_old(number);
    const int size = static_cast<int>(calls.size());
    std::vector<bool> told(size);
    for (int r = 0; r < size; ++r) {
      const bool is_withdrawn = calls[r].ndim == FL_WITHDRAWN;
      const Ranks others = is_withdrawn ? Ranks{r, r + 1} : needed(r);
      const bool waits = others.count() == size;
      const auto known = withdrawn_after(calls.data(), others);
      for (Call& call : calls_) {
        call.told[r] = call.told[r] || waits || (known && !is_before(*known, call.number));
      }
      told[r] = waits || is_withdrawn || calls[r].ndim == FL_REFUSED || sees_difference(calls.data(), r, others);
    }
    if (!same && !only_withdrawn(calls)) calls_.push_back({number, std::move(seen), std::move(told)});
    forget([](const Call& call) { return std::find(call.told.begin(), call.told.end(), false) == call.told.end(); });
  }

  // What is to be raised in call `number`: one of which this rank has not been told, or else, unless `only_news`,
  // the last. Where all calls before it were compared, forget_old() comes first; others may not forget it before.
  std::optional<Call> to_raise(uint32_t number, bool only_news) {
    const auto is_news = [&](const Call& call) {
      return !call.told[rank_] && !call.is_raised && number - call.number <= most_ahead_;
    };
    const auto news = std::find_if(calls_.begin(), calls_.end(), is_news);
    if (none() || (only_news && news == calls_.end())) return std::nullopt;
    const Call found = news == calls_.end() ? calls_.back() : *news;
    for (Call& call : calls_) call.is_raised = true;
    return found;
  }

 private:
  template <typename Condition>
  void forget(Condition is_done) {
    calls_.erase(std::remove_if(calls_.begin(), calls_.end(), is_done), calls_.end());
  }

  // Whether the ranks call the same but for those that have withdrawn their calls.
  static bool only_withdrawn(std::vector<fl_signature> calls) {
    const auto is_withdrawn = [](const fl_signature& call) { return call.ndim == FL_WITHDRAWN; };
    const auto end = std::remove_if(calls.begin(), calls.end(), is_withdrawn);
    return end != calls.end() && (end == calls.begin() || all_same(calls.data(), end - calls.begin()));
  }

  const int rank_;
  const uint32_t most_ahead_;
  std::vector<Call> calls_;
};

}  // namespace fl
