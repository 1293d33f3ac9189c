// Asynchronous collectives.
//
// If all data fits into the call, the caller's thread announces the call immediately. So no other rank waits
// for this rank, and no thread needs to be woken. The first of these threads completes the collective: the
// thread that waits for it, the thread that makes the next call, or, after 8 ms, a thread of the group.
// Other collectives run in the queue.

#include "group.h"

namespace fl {
namespace {

// Polling for the end of an operation. kNoTime: no thread waits for it. kLittleTime: before the next call.
constexpr Patience kNoTime{0, 0}, kLittleTime{sized(100, 1), 0};
constexpr int kSpins = sized(1000, 1);

}  // namespace

ShmGroup::Result ShmGroup::make_collective(const Request& call, const fl_site& site, bool is_begun) {
  // The operation stores `queued`. At its end, finish() destroys `queued`, and `leave` decreases queued_.
  queued_.fetch_add(1, std::memory_order_relaxed);
  const auto leave = [](std::atomic<int>* count) { count->fetch_sub(1, std::memory_order_relaxed); };
  const std::shared_ptr<std::atomic<int>> queued(&queued_, leave);
  return queue_.make(call.seconds, [=, queued = queued](Operation& operation) {
    const Turn::Guard running = await_turn(nullptr);
    if (is_begun) {
      is_begun_ = false;
      collectives_.go_on(operation.seconds, nullptr);
      operation.output = reporting(
          &site, [&] { return complete(call.signature, call.data, call.output, operation.report); });
    } else {
      operation.output = dispatch(call, nullptr, &site, operation.report);
    }
  });
}

ShmGroup::Result ShmGroup::start_collective(const Request& call, const fl_site& site) {
  if (starting_.is_owner()) return reentrant_call();
  while (!starting_.try_take_for(kSliceMilliseconds)) {
    if (peers_.has_ended()) return ended(peers_.why_ended());
  }
  const Turn::Guard guard(starting_);
  end_begun(kLittleTime, true);
  Result result;
  if (begin_small(call, site, result)) return result;
  result = make_collective(call, site, false);
  queue_.submit(result);
  return result;
}

// Begin a small collective and return true with its operation in `result`, if possible. Requires `starting_`.
bool ShmGroup::begin_small(const Request& call, const fl_site& site, Result& result) {
  if (queued_.load(std::memory_order_relaxed) != 0) return false;
  if (peers_.has_ended() || !turn_.try_take()) return false;
  {
    const Turn::Guard running(turn_);
    if (!collectives_.can_begin(call.signature)) return false;
    collectives_.begin(call.seconds, nullptr);
    collectives_.call(call.signature, call.data, &site, call.is_ahead);
    if (collectives_.progress() == Progress::kComplete) {
      result = guarded([&](CallReport& report) {
        return reporting(&site, [&] { return complete(call.signature, call.data, call.output, report); });
      });
      if (result == nullptr && call.is_ahead) return true;
      // Null means success, but the caller needs a handle to wait for.
      if (result == nullptr) result = ended_with(FL_OK);
      result->ended = Clock::now();
      return true;
    }
    is_begun_ = true;
    begun_ = result = make_collective(call, site, true);
  }
  begun_->help = [this](const Operation& operation, bool waits) { help(operation, waits); };
  try {
    family_->activate();
  } catch (const std::exception&) {  // the thread for ticks cannot be created
    hand_over();
  }
  return true;
}

// Complete begun_ if the other ranks call within `patience`. If they do not, and `or_hand_over` is true, give
// it to a thread. Requires `starting_`.
void ShmGroup::end_begun(Patience patience, bool or_hand_over) {
  if (begun_ == nullptr) return;
  Progress progress = collectives_.progress();
  for (int i = 0; progress == Progress::kAwaited && i < patience.spins + patience.yields; ++i) {
    if (peers_.has_ended()) break;
    i < patience.spins ? pause_after(i) : yield_processor();
    progress = collectives_.progress();
  }
  if (progress == Progress::kComplete || peers_.has_ended()) {
    const auto operation = std::exchange(begun_, nullptr);
    execute(peers_, *operation);
  } else if (or_hand_over) {
    hand_over();
  }
}

ShmGroup::Result ShmGroup::look_back(double seconds, bool& is_behind) {
  is_behind = true;
  if (peers_.has_ended()) return ended(peers_.why_ended());
  if (!starting_.try_take()) return nullptr;
  const Turn::Guard guard(starting_);
  // Nothing to do: the operations in the queue first compare all earlier calls.
  if (begun_ != nullptr || queued_.load(std::memory_order_relaxed) != 0) return nullptr;
  if (!turn_.try_take()) return nullptr;
  const Turn::Guard running(turn_);
  const auto operation = queue_.make(seconds, [&](Operation&) {
    try {
      is_behind = collectives_.look_back(seconds);
    } catch (Failure& failure) {
      if (failure.status == FL_TIMEOUT) failure.report = collectives_.last_calls();
      throw;
    }
  });
  execute(peers_, *operation);
  return operation->status == FL_OK ? nullptr : operation;
}

void ShmGroup::hand_over() { queue_.submit(std::exchange(begun_, nullptr)); }

// True if all started collectives have ended. Does not sleep.
bool ShmGroup::has_caught_up() {
  if (!starting_.try_take()) return false;
  const Turn::Guard guard(starting_);
  end_begun(kLittleTime, false);
  return queued_.load(std::memory_order_relaxed) == 0;
}

// Try to complete `operation`. If another thread has `starting_`, return: the caller will try again.
void ShmGroup::help(const Operation& operation, bool waits) {
  if (!starting_.try_take()) return;
  const Turn::Guard guard(starting_);
  if (begun_.get() != &operation) return;
  const Patience all = peers_.patience();
  const Patience limited{std::min(all.spins, kSpins), peers_.may_spin() ? 0 : all.yields};
  end_begun(waits ? limited : kNoTime, waits);
}

// Called every 8 ms. If a collective was begun before the previous tick, give it to a thread.
void ShmGroup::tick() {
  if (!starting_.try_take()) return;
  const Turn::Guard guard(starting_);
  if (begun_ != nullptr && begun_.get() == seen_by_tick_) hand_over();
  seen_by_tick_ = begun_.get();
}

}  // namespace fl
