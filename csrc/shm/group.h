// The ranks of one host as a group. Operations run on the caller's thread, or are started: collectives
// in turn, messages beside them.
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

// Writes where the program is that has called; asked on the caller's thread, where that matters.
using WhereAmI = void (*)(fl_site* site);

class ShmGroup : private Helper, private Family::Ticking {
 public:
  // What became of a call: null where all went well and there is nothing to fetch.
  using Result = std::shared_ptr<Operation>;

  ShmGroup(Mapping mapping, int rank, int size);
  // A group of some `ranks` of `whole`, which has this `number` on all of them and not that of another
  // group of two of them; 0 is `whole` itself.
  ShmGroup(const ShmGroup& whole, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number)
      : ShmGroup(whole.family_, std::move(mapping), rank, ranks, number) {}
  ~ShmGroup();
  // End what runs and what is queued, and leave. An operation on the calling thread itself (a signal handler
  // has interrupted it, and closes the group) ends when that goes on.
  void close();

  // Where the call is made without a site it is asked for if that matters.
  Handle run(const Request& call);
  // A call that is_ahead, and only compared, ends at once; look_back() compares it.
  Handle start(const Request& call);
  // Compare such calls as far as the others have made them; `is_behind`: they have not made all. Null: the
  // ranks do not differ, and none has been missing for so many seconds.
  Result look_back(double seconds, bool& is_behind);

  // Several messages at once; see Port.
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, bool async) {
    return async ? port_.start_exchange(messages, count, seconds)
                 : port_.exchange(messages, count, seconds, interrupt_);
  }
  Port::Posted post(const fl_message* messages, int count, double seconds, int spins) {
    return port_.post(messages, count, seconds, spins);
  }
  std::vector<Handle> deliver(const Port::Posted& posted) { return port_.finish(posted, interrupt_); }

  // A collective on the caller's thread in two steps, so that a caller who holds a lock can let it
  // go when the others are late. begin() never waits: it is false, and nothing has happened, where a
  // thread runs a collective, some are queued, or the group has ended; else finish() must follow, on
  // the same thread. It does not wait once ready() is kComplete.
  // With a `site`, which must live until then, the call may end before the others have made it.
  bool begin(const fl_signature& signature, const void* data, double seconds, const fl_site* site = nullptr);
  Progress ready(int spins);
  Result finish(const fl_signature& signature, void* data, void* output);

  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  // False while a thread runs a collective.
  bool drop_region(const void* array);
  void call_ranks(std::vector<int> numbers) { peers_.call_ranks(std::move(numbers)); }
  void compare_at_once() {
    collectives_.compare_at_once();
    family_->engine.check_at_once();
  }
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }
  void on_mismatch(WhereAmI where) { where_ = where; }
  // Whether `rank` has begun a collective that nobody has called here, and which.
  bool is_ahead(int rank, fl_signature& call);
  // Null while the group can be used; else why it cannot, because of another rank for example.
  Result lost();
  // Let the others know that this rank begins no more messages.
  void leave() { peers_.leave(); }
  // End, and report to the others why.
  void give_up(const std::string& why);
  // In a forked child: close the descriptors.
  void abandon() noexcept;
  int size() const { return size_; }

 private:
  Turn::Held await_turn(InterruptCheck interrupt);
  ShmGroup(std::shared_ptr<Family> family, Mapping mapping, int rank, const std::vector<int>& ranks, uint32_t number);
  template <typename Body>
  Result guarded(Body body);
  Result failed(const Failure& failure);
  static Result ended(const Failure& failure) {
    return ended_with(failure.status, {failure.what(), failure.missing, failure.seen, {}});
  }
  fl_site asked(const fl_site* site) const;
  Bytes dispatch(const Request& call, InterruptCheck interrupt, const fl_site* site, Seen& seen);
  Bytes complete(const fl_signature& signature, void* data, void* output, Seen& seen);
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

  static Result in_the_middle() {
    return ended_with(FL_FAILED, {"this thread is in the middle of another call of the group", {}, {}, {}});
  }

  const int rank_, size_;
  const std::shared_ptr<Family> family_;
  const uint32_t number_;
  // Of a part of another group; that itself has the family's. Before the peers: they say that all is there.
  Segment own_segment_;
  const std::unique_ptr<Remote> own_remote_;
  Segment& segment_;
  Peers peers_;
  Collectives collectives_;
  Port port_;
  InterruptCheck interrupt_ = nullptr;
  WhereAmI where_ = nullptr;
  Turn turn_;                   // whoever runs a collective has it
  std::atomic<bool> closed_{false};
  // Collectives that were started and have not ended; what they have done, whoever takes the turn sees.
  std::atomic<int> queued_{0};
  Queue queue_{peers_, family_->crew};
  // See starting.cc.
  Turn starting_;             // whoever has it may use the next one
  Result begun_;              // a collective that others know of, and that is not complete here
  bool is_begun_ = false;     // whether there is one, for whoever has turn_
  const void* seen_by_tick_ = nullptr;
};

// Run `body`, a collective that was called at `site`; what it throws has what ranks have called.
template <typename Body>
auto ShmGroup::reporting(const fl_site* site, Body body) {
  try {
    return body();
  } catch (const Mismatch& mismatch) {
    collectives_.place(asked(site));
    if (!mismatch.seen.calls.empty()) throw;  // of an earlier call
    throw Mismatch(collectives_.seen_now());
  } catch (Failure& failure) {
    if (failure.status == FL_TIMEOUT || failure.status == FL_PEER_LOST) failure.seen = collectives_.last_calls();
    throw;
  }
}

// Run `body` on the caller's thread; what it throws becomes an operation that has failed. `seen` is
// what ranks have called, that goes with what it returns.
template <typename Body>
ShmGroup::Result ShmGroup::guarded(Body body) {
  if (peers_.is_broken()) return ended(peers_.why_broken());
  Seen seen;
  try {
    Bytes output = body(seen);
    if (output.data == nullptr) return nullptr;
    return ended_with(FL_OK, {"", {}, std::move(seen), std::move(output)});
  } catch (const Mismatch& mismatch) {
    return ended_with(FL_MISMATCH, {mismatch.what(), {}, mismatch.seen, {}});
  } catch (const Failure& caught) {
    return failed(caught);
  } catch (const std::exception& error) {  // no memory: the others are in the middle of this call
    return failed(peers_.explain(error.what()));
  }
}

}  // namespace fl
