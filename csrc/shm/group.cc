#include "group.h"

#include "../common/signature.h"
#include "../common/verbs.h"

namespace fl {
namespace {

// Maximum milliseconds for which close() waits for a collective on another thread.
constexpr long kLeavingMilliseconds = 500;

}  // namespace

ShmGroup::ShmGroup(Mapping mapping, int rank, int size)
    : ShmGroup(std::make_shared<Family>(std::move(mapping), rank, size), {}, rank, all_ranks(size), 0) {}

ShmGroup::ShmGroup(std::shared_ptr<Family> family, Mapping mapping, int rank, const std::vector<int>& ranks,
                   uint32_t number)
    : rank_(rank), size_(static_cast<int>(ranks.size())), family_(std::move(family)), number_(number),
      own_segment_(number == 0 ? Segment() : Segment(std::move(mapping), size_)),
      own_remote_(number == 0 ? nullptr : std::make_unique<Remote>(own_segment_, rank, size_)),
      segment_(number == 0 ? family_->segment : own_segment_), peers_(segment_, rank, size_),
      collectives_(segment_, peers_, number == 0 ? family_->remote : *own_remote_, rank, size_),
      port_(family_->engine, number, rank, ranks, peers_) {
  family_->join(number, [this] { tick(); });
}

ShmGroup::~ShmGroup() { close(); }

// End the group. If a collective still runs, ranks that need this rank in it get FL_CLOSED as the reason.
void ShmGroup::close() {
  if (closed_.exchange(true, std::memory_order_relaxed)) return;
  Result begun;
  if (starting_.try_take_for(kLeavingMilliseconds)) {
    const Turn::Guard guard(starting_);
    begun = std::exchange(begun_, nullptr);
  }
  if (begun != nullptr) fl::finish(*begun, FL_CLOSED, kWasClosed);
  queue_.close();
  port_.close();
  family_->leave(number_);
  const bool nothing_runs = turn_.try_take_for(kLeavingMilliseconds);
  if (nothing_runs) peers_.give_up(Failure(FL_OK, {}, "left"));
  peers_.fail(Failure(FL_CLOSED, {}, kWasClosed));
  if (nothing_runs) turn_.release();
}

Handle ShmGroup::run(const Request& call) {
  if (is_message(call.signature)) return port_.run(message_by(call, site_of(call.site)), call.seconds, interrupt_);
  if (auto refused = port_.refused()) return refused;
  return handle_of(run_collective(call));
}

Handle ShmGroup::start(const Request& call) {
  if (is_message(call.signature)) return port_.start(message_by(call, site_of(call.site)), call.seconds);
  if (auto refused = port_.refused()) return refused;
  return handle_of(start_collective(call, site_of(call.site)));
}

// Run the collective on the caller's thread, or start it if an earlier collective has not ended.
ShmGroup::Result ShmGroup::run_collective(const Request& call) {
  if (queued_.load(std::memory_order_relaxed) != 0 && !has_caught_up()) {
    return start_collective(call, site_of(call.site));
  }
  if (turn_.is_owner()) return reentrant_call();
  bool was_late = false;  // another thread has begun a collective
  Result result = guarded([&](CallReport& report) {
    const Turn::Guard running = await_turn(interrupt_);
    was_late = is_begun_;
    if (was_late) return Bytes();
    return dispatch(call, interrupt_, call.site, report);
  });
  return was_late ? start_collective(call, site_of(call.site)) : result;
}

// Wait for turn_. Throws Failure if the group ends or a signal handler raises an error.
Turn::Guard ShmGroup::await_turn(InterruptCheck interrupt) {
  while (!turn_.try_take_for(kSliceMilliseconds)) {
    if (peers_.has_ended()) throw peers_.why_ended();
    if (interrupt != nullptr && interrupt() != 0) throw interrupted();
  }
  if (!peers_.has_ended()) return Turn::Guard(turn_);
  turn_.release();
  throw peers_.why_ended();
}

fl_site ShmGroup::site_of(const fl_site* site) const {
  if (site != nullptr) return *site;
  fl_site current{};
  if (site_function_ != nullptr) site_function_(&current);
  return current;
}

bool ShmGroup::is_ahead(int rank, fl_signature& call) {
  if (!turn_.try_take()) return false;
  const Turn::Guard running(turn_);
  return queued_.load(std::memory_order_relaxed) == 0 && collectives_.is_ahead(rank, call);
}

ShmGroup::Result ShmGroup::lost() {
  const auto failure = peers_.lost();
  return failure ? ended(*failure) : nullptr;
}

void ShmGroup::give_up(const std::string& why) {
  peers_.fail(Failure(FL_RAISED, {rank_}, why));
}

// In the forked child a lock may be held by a thread that does not exist there, so take none. The segment's
// file must be closed, because its lock shows the other ranks that this rank is alive.
void ShmGroup::abandon() noexcept {
  family_->segment.close_file();
  segment_.close_file();
  peers_.close_files();
}

bool ShmGroup::begin(const fl_signature& signature, const void* data, double seconds, const fl_site* site) {
  if (queued_.load(std::memory_order_relaxed) != 0 && !has_caught_up()) return false;
  if (port_.has_refusal()) return false;
  if (peers_.has_ended() || !turn_.try_take()) return false;
  if (is_begun_) {
    turn_.release();
    return false;
  }
  collectives_.begin(seconds, interrupt_);
  collectives_.call(signature, data, site);
  return true;
}

Progress ShmGroup::ready(int spins) {
  const bool yields = spins < 0 && !peers_.may_spin();
  const int polls = yields ? peers_.patience().yields : peers_.may_spin() ? spins : 0;
  for (int poll_count = 0;; ++poll_count) {
    const Progress progress = collectives_.progress();
    if (progress != Progress::kAwaited || poll_count >= polls) return progress;
    yields ? yield_processor() : pause_after(poll_count);
  }
}

ShmGroup::Result ShmGroup::finish(const fl_signature& signature, void* data, void* output) {
  const Turn::Guard running(turn_);
  return guarded([&](CallReport& report) {
    return reporting(nullptr, [&] { return complete(signature, data, output, report); });
  });
}

Bytes ShmGroup::dispatch(const Request& call, InterruptCheck interrupt, const fl_site* site, CallReport& report) {
  collectives_.begin(call.seconds, interrupt);
  collectives_.call(call.signature, call.data, site);
  return reporting(site, [&] { return complete(call.signature, call.data, call.output, report); });
}

Bytes ShmGroup::complete(const fl_signature& s, void* data, void* output, CallReport& report) {
  Bytes received = do_verb(collectives_, s, s, data, output);
  if (received.data != nullptr) report.calls = collectives_.calls();
  return received;
}

void* ShmGroup::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  const Turn::Guard running = await_turn(nullptr);
  return collectives_.add_region(std::move(mapping), stride);
}

bool ShmGroup::drop_region(const void* array) {
  if (!turn_.try_take()) return false;
  const Turn::Guard running(turn_);
  collectives_.drop_region(array);
  return true;
}

}  // namespace fl
