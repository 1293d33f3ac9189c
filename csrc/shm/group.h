// The ranks of one host as a group. Collectives run one after the other. Messages do not wait for them.
#pragma once

#include "../common/engine.h"
#include "../common/queue.h"
#include "abi.h"
#include "collectives.h"
#include "family.h"
#include "peers.h"
#include "segment.h"
#include "turn.h"

namespace fl {

// Writes the call site of the program to `site`. It is called on the caller's thread.
using SiteFunction = void (*)(fl_site* site);

class ShmGroup {
 public:
  // An operation. Null means that the operation succeeded and has no result to fetch.
  using Result = std::shared_ptr<Operation>;

  ShmGroup(Mapping mapping, int rank, int size);
  // Create a subgroup. `number` is not 0, equal on all its ranks, and unique among the subgroups of a rank.
  ShmGroup(const ShmGroup& whole, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number)
      : ShmGroup(whole.family_, std::move(mapping), rank, ranks, number) {}
  ~ShmGroup();
  // End running and queued operations, and leave the group. If a signal handler calls close(), an operation
  // that it has interrupted on this thread ends after the handler returns.
  void close();

  // Run an operation. If its site is null, the function of on_mismatch() finds the site when it is needed.
  Handle run(const Request& call);
  // Start an operation. A call with `is_ahead` moves no data and ends immediately: look_back() compares it.
  Handle start(const Request& call);
  // Compare the calls with `is_ahead` that all ranks have made. Set `is_behind` to true if some calls are not
  // compared yet. Return a failed operation if calls differ or a rank is more than `seconds` late, else null.
  Result look_back(double seconds, bool& is_behind);

  // Run several sends and receives; see Port.
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, bool async) {
    return async ? port_.start_exchange(messages, count, seconds)
                 : port_.exchange(messages, count, seconds, interrupt_);
  }
  Port::Posted post(const fl_message* messages, int count, double seconds, int spins) {
    return port_.post(messages, count, seconds, spins);
  }
  std::vector<Handle> deliver(const Port::Posted& posted) { return port_.finish(posted, interrupt_); }

  // A collective in two steps on the caller's thread, which can release a lock between the steps. begin()
  // never waits. It returns false, and does nothing, if another collective has not ended or the group has
  // ended. If it returns true, call finish() on the same thread. After ready() has returned kComplete,
  // finish() does not wait. If `site` is not null, it must exist until finish(), and the call may end before
  // other ranks have made it.
  bool begin(const fl_signature& signature, const void* data, double seconds, const fl_site* site = nullptr);
  Progress ready(int spins);
  Result finish(const fl_signature& signature, void* data, void* output);

  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  // Return false, and keep the region, if a thread runs a collective.
  bool drop_region(const void* array);
  void call_ranks(std::vector<int> numbers) { peers_.call_ranks(std::move(numbers)); }
  void compare_at_once() {
    collectives_.compare_at_once();
    family_->engine.check_at_once();
  }
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }
  void on_mismatch(SiteFunction site_function) { site_function_ = site_function; }
  // If `rank` has begun a collective that this rank has not called, store it in `call` and return true.
  bool is_ahead(int rank, fl_signature& call);
  // Return null if the group is usable, else a failed operation whose error is the reason.
  Result lost();
  // Announce that this rank will start no more sends and receives.
  void leave() { peers_.leave(); }
  // End the group with the reason `why`, and send the reason to the other ranks.
  void give_up(const std::string& why);
  // In a forked child: close the descriptors.
  void abandon() noexcept;
  int size() const { return size_; }

 private:
  Turn::Guard await_turn(InterruptCheck interrupt);
  ShmGroup(std::shared_ptr<Family> family, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number);
  template <typename Body>
  Result guarded(Body body);
  static Result ended(const Failure& failure) {
    return ended_with(failure.status, {failure.what(), failure.missing, failure.report, {}});
  }
  fl_site site_of(const fl_site* site) const;
  Bytes dispatch(const Request& call, InterruptCheck interrupt, const fl_site* site, CallReport& report);
  Bytes complete(const fl_signature& signature, void* data, void* output, CallReport& report);
  template <typename Body>
  auto reporting(const fl_site* site, Body body);
  Result start_collective(const Request& call, const fl_site& site);
  Result make_collective(const Request& call, const fl_site& site, bool is_begun);
  bool begin_small(const Request& call, const fl_site& site, Result& result);
  void end_begun(Patience patience, bool or_hand_over);
  void hand_over();
  bool has_caught_up();
  void help(const Operation& operation, bool waits);
  void tick();
  Result run_collective(const Request& call);

  static Result reentrant_call() {
    return ended_with(FL_FAILED, {"this thread has not finished another call of the group", {}, {}, {}});
  }

  const int rank_, size_;
  const std::shared_ptr<Family> family_;
  const uint32_t number_;
  // Used only in a subgroup. Declared before peers_, whose constructor publishes that this rank is ready.
  Segment own_segment_;
  const std::unique_ptr<Remote> own_remote_;
  Segment& segment_;
  Peers peers_;
  Collectives collectives_;
  Port port_;
  InterruptCheck interrupt_ = nullptr;
  SiteFunction site_function_ = nullptr;
  Turn turn_;  // held by the thread that runs a collective
  std::atomic<bool> closed_{false};
  // Number of started collectives that have not ended.
  std::atomic<int> queued_{0};
  Queue queue_{peers_, family_->crew};
  Turn starting_;          // guards begun_; see starting.cc
  Result begun_;           // collective that is announced and not complete
  bool is_begun_ = false;  // whether begun_ exists; guarded by turn_
  const void* seen_by_tick_ = nullptr;
};

// Run the collective `body`, called at `site`. Add the calls of all ranks to its exceptions.
template <typename Body>
auto ShmGroup::reporting(const fl_site* site, Body body) {
  try {
    return body();
  } catch (const Mismatch& mismatch) {
    collectives_.publish_site(site_of(site));
    if (!mismatch.report.calls.empty()) throw;  // it has the report of an earlier call
    throw Mismatch(collectives_.current_report());
  } catch (Failure& failure) {
    if (failure.status == FL_TIMEOUT || failure.status == FL_PEER_LOST) failure.report = collectives_.last_calls();
    throw;
  }
}

// Run `body` and convert its exceptions into a failed operation. If the caller needs the shapes of the
// result, `body` stores the calls of all ranks in `report`.
template <typename Body>
ShmGroup::Result ShmGroup::guarded(Body body) {
  if (peers_.is_broken()) return ended(peers_.why_broken());
  CallReport report;
  std::optional<Failure> failure;
  try {
    Bytes output = body(report);
    if (output.data == nullptr) return nullptr;
    return ended_with(FL_OK, {"", {}, std::move(report), std::move(output)});
  } catch (const Mismatch& mismatch) {
    return ended_with(FL_MISMATCH, {mismatch.what(), {}, mismatch.report, {}});
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {  // out of memory; other ranks wait for this rank
    failure = peers_.explain(error.what());
  }
  peers_.fail(*failure);
  return ended(*failure);
}

}  // namespace fl
