// Comparison of the ranks' calls, in groups where a rank may return from a call before the other ranks have
// made it: see shm/entering.cc.
#pragma once

#include <optional>

#include "failure.h"
#include "signature.h"

namespace fl {

// The ranks in [first, last), and the rank `also` unless it is -1.
struct Ranks {
  int first = 0, last = 0, also = -1;
  int count() const { return last - first + (also >= 0 ? 1 : 0); }
  bool has(int rank) const { return (first <= rank && rank < last) || rank == also; }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (int rank = first; rank < last; ++rank) visit(rank);
    if (also >= 0) visit(also);
  }
};

// Return the ranks from which `rank` needs data in `call`, if each rank sends its data with its call.
inline Ranks needed_by(int rank, int size, const fl_signature& call) {
  const bool is_root = rank == call.root;
  switch (call.verb) {
    case FL_SCATTER:
    case FL_BROADCAST: return is_root ? Ranks{} : Ranks{call.root, call.root + 1};
    case FL_REDUCE:
    case FL_GATHER: return {0, is_root ? size : 0};
    case FL_SCAN:
    case FL_EXSCAN: return {0, rank};
    default: return {0, size};
  }
}

// True if `rank` does not know how many bytes the root sends. If they are few, the root's call contains them.
inline bool may_be_small(int rank, const fl_signature& call) {
  return root_must_know(call.verb) && call.ndim == FL_ANY && rank != call.root;
}

// Compare two call numbers, which wrap around.
inline bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

// True if a rank among `needed` made a call that differs from the call of `rank`.
inline bool sees_difference(const fl_signature* calls, int rank, Ranks needed) {
  bool differs = false;
  needed.for_each([&](int r) {
    const fl_signature pair[] = {calls[rank], calls[r]};
    const bool is_root = root_must_know(calls[rank].verb) && r == calls[rank].root;
    differs = differs || !all_same(pair, 2) || (is_root && calls[r].ndim == FL_ANY);
  });
  return differs;
}

// Return the highest `count` of the withdrawn calls of the ranks `needed`, or nothing if no call is
// withdrawn. The `count` of a withdrawn call is the number of the last call that its rank has compared.
inline std::optional<uint32_t> withdrawn_after(const fl_signature* calls, Ranks needed) {
  std::optional<uint32_t> last;
  needed.for_each([&](int r) {
    const auto compared = static_cast<uint32_t>(calls[r].count);
    if (calls[r].ndim == FL_WITHDRAWN && (!last || is_before(*last, compared))) last = compared;
  });
  return last;
}

// Return the ranks whose calls `rank` must await: `needed`, or all ranks if a rank in `needed` awaits all
// ranks. Reason: that rank may raise an earlier mismatch, and then `rank` must raise the same mismatch.
template <typename WaitsForAll>
Ranks awaited(const fl_signature* calls, int size, int rank, Ranks needed, WaitsForAll waits_for_all) {
  if (sees_difference(calls, rank, needed)) return needed;
  bool waits = false;
  needed.for_each([&](int r) { waits = waits || (r != rank && waits_for_all(r)); });
  return waits ? Ranks{0, size} : needed;
}

// Mismatches of past calls that some ranks have not raised yet. All ranks compute the same list.
class Mismatches {
 public:
  struct Call {
    uint32_t number;
    CallReport report;
    std::vector<bool> raised;  // by rank: whether it has raised this mismatch, in this call or a later one
    bool is_raised = false;  // this rank has raised the mismatch, perhaps in a call not yet compared
  };
  // `most_ahead`: number of calls by which a rank may be ahead of another rank.
  Mismatches(int rank, uint32_t most_ahead) : rank_(rank), most_ahead_(most_ahead) {}

  bool empty() const { return calls_.empty(); }

  void forget_old(uint32_t number) {
    forget([&](const Call& call) { return number - call.number > most_ahead_; });
  }

  // Record the calls with this number, and whether they were the `same`. Record all calls in order.
  // `needed(r)`: ranks whose calls rank r awaits in this call; all ranks if r may raise an earlier mismatch.
  template <typename Needed>
  void compared(uint32_t number, bool same, const std::vector<fl_signature>& calls, Needed needed,
                CallReport report) {
    forget_old(number);
    const int size = static_cast<int>(calls.size());
    std::vector<bool> raised(size);
    for (int r = 0; r < size; ++r) {
      const bool is_withdrawn = calls[r].ndim == FL_WITHDRAWN;
      const Ranks wanted = is_withdrawn ? Ranks{r, r + 1} : needed(r);
      const bool waits = wanted.count() == size;
      const auto until = withdrawn_after(calls.data(), wanted);
      for (Call& call : calls_) {
        call.raised[r] = call.raised[r] || waits || (until && !is_before(*until, call.number));
      }
      raised[r] = waits || is_withdrawn || calls[r].ndim == FL_REFUSED || sees_difference(calls.data(), r, wanted);
    }
    if (!same && !only_withdrawn(calls)) calls_.push_back({number, std::move(report), std::move(raised)});
    forget([](const Call& c) { return std::find(c.raised.begin(), c.raised.end(), false) == c.raised.end(); });
  }

  // Return the mismatch that this rank must raise in call `number`: the first one that it has not raised. If
  // it has raised all, return the last one, or nothing if `only_news`. If all earlier calls have been
  // compared, call forget_old() before. Otherwise do not call forget_old().
  std::optional<Call> to_raise(uint32_t number, bool only_news) {
    const auto is_news = [&](const Call& call) {
      return !call.raised[rank_] && !call.is_raised && number - call.number <= most_ahead_;
    };
    const auto news = std::find_if(calls_.begin(), calls_.end(), is_news);
    if (empty() || (only_news && news == calls_.end())) return std::nullopt;
    const Call result = news == calls_.end() ? calls_.back() : *news;
    for (Call& call : calls_) call.is_raised = true;
    return result;
  }

 private:
  template <typename Condition>
  void forget(Condition is_done) {
    calls_.erase(std::remove_if(calls_.begin(), calls_.end(), is_done), calls_.end());
  }

  // True if some calls are withdrawn and all other calls are equal.
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
