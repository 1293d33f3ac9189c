// The ranks of one host as a group. Operations run on the caller's thread or are started. Collectives run in
// order, and messages run concurrently.
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

// Writes the call site of the program. It is called on the caller's thread if the site is needed.
using SiteFunction = void (*)(fl_site* site);

class ShmGroup : private Helper, private Family::Ticking {
 public:
  // Result of a call. Null: the call succeeded and there is no result to fetch.
  using Result = std::shared_ptr<Operation>;

  ShmGroup(Mapping mapping, int rank, int size);
  // Create a subgroup. `number`: nonzero, equal on its ranks, unique among subgroups that share ranks.
  ShmGroup(const ShmGroup& whole, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number)
      : ShmGroup(whole.family_, std::move(mapping), rank, ranks, number) {}
  ~ShmGroup();
  // End running and queued operations, and leave. An operation on the calling thread, which a signal handler
  // has interrupted, ends when it continues.
  void close();

  // Run an operation. If its call site is needed and missing, the function of on_mismatch() supplies it.
  Handle run(const Request& call);
  // A comparison-only call with `is_ahead` ends at once; look_back() compares it later.
  Handle start(const Request& call);
  // Compare calls with `is_ahead` as far as other ranks have made them. `is_behind`: some ranks have not made
  // all. Null: the calls agree, and no rank is more than `seconds` late.
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

  // A collective on the caller's thread in two steps, so that a caller can release a lock while other ranks
  // are late. begin() never waits. It returns false without effect if a collective runs or is queued, or if
  // the group has ended. After true, finish() must follow on the same thread; it does not wait once ready()
  // is kComplete. With a `site`, valid until then, the call may end before other ranks have made it.
  bool begin(const fl_signature& signature, const void* data, double seconds, const fl_site* site = nullptr);
  Progress ready(int spins);
  Result finish(const fl_signature& signature, void* data, void* output);

  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  // Return false if a thread runs a collective; then the region remains.
  bool drop_region(const void* array);
  void call_ranks(std::vector<int> numbers) { peers_.call_ranks(std::move(numbers)); }
  void compare_at_once() {
    collectives_.compare_at_once();
    family_->engine.check_at_once();
  }
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }
  void on_mismatch(SiteFunction site_function) { site_function_ = site_function; }
  // True if `rank` has begun a collective that this rank has not called; `call` receives it.
  bool is_ahead(int rank, fl_signature& call);
  // Return null if the group is usable, else an ended operation with the reason.
  Result lost();
  // Announce that this rank begins no more messages.
  void leave() { peers_.leave(); }
  // End the group and report the reason to the other ranks.
  void give_up(const std::string& why);
  // In a forked child: close the descriptors.
  void abandon() noexcept;
  int size() const { return size_; }

 private:
  Turn::Guard await_turn(InterruptCheck interrupt);
  ShmGroup(std::shared_ptr<Family> family, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number);
  template <typename Body>
  Result guarded(Body body);
  Result failed(const Failure& failure);
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
  void help(const Operation& operation, bool waits) override;
  void tick() override;
  Result run_collective(const Request& call);

  static Result reentrant_call() {
    return ended_with(FL_FAILED, {"this thread has not finished another call of the group", {}, {}, {}});
  }

  const int rank_, size_;
  const std::shared_ptr<Family> family_;
  const uint32_t number_;
  // Used only in a subgroup; else the family's is used. Declared before peers_, which publish this rank.
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
  // Started collectives that have not ended. Their effects are visible to the next holder of turn_.
  std::atomic<int> queued_{0};
  Queue queue_{peers_, family_->crew};
  // See starting.cc.
  Turn starting_;          // guards begun_
  Result begun_;           // an announced collective that is not complete here
  bool is_begun_ = false;  // true while begun_ exists; guarded by turn_
  const void* seen_by_tick_ = nullptr;
};

// Run `body`, a collective called at `site`, and add the calls of all ranks to its exceptions.
template <typename Body>
auto ShmGroup::reporting(const fl_site* site, Body body) {
  try {
    return body();
  } catch (const Mismatch& mismatch) {
    collectives_.publish_site(site_of(site));
    if (!mismatch.report.calls.empty()) throw;  // a mismatch of an earlier call
    throw Mismatch(collectives_.current_report());
  } catch (Failure& failure) {
    if (failure.status == FL_TIMEOUT || failure.status == FL_PEER_LOST) failure.report = collectives_.last_calls();
    throw;
  }
}

// Run `body` on the caller's thread and convert its exceptions into a failed operation. `report` receives the
// ranks' calls for the result.
template <typename Body>
ShmGroup::Result ShmGroup::guarded(Body body) {
  if (peers_.is_broken()) return ended(peers_.why_broken());
  CallReport report;
  try {
    Bytes output = body(report);
    if (output.data == nullptr) return nullptr;
    return ended_with(FL_OK, {"", {}, std::move(report), std::move(output)});
  } catch (const Mismatch& mismatch) {
    return ended_with(FL_MISMATCH, {mismatch.what(), {}, mismatch.report, {}});
  } catch (const Failure& caught) {
    return failed(caught);
  } catch (const std::exception& error) {  // no memory: other ranks are inside this call
    return failed(peers_.explain(error.what()));
  }
}

}  // namespace fl
