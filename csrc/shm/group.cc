#include "group.h"

#include <utility>

namespace fl {

ShmGroup::ShmGroup(Mapping mapping, int rank, int size)
    : rank_(rank),
      size_(size),
      segment_(std::move(mapping), size),
      peers_(segment_, rank, size),
      collectives_(segment_, peers_, rank, size) {}

ShmGroup::~ShmGroup() {
  peers_.stop();
  worker_.reset();
  peers_.give_up(Failure(FL_OK, {}, "left"));
}

// On the caller's own thread, unless operations are queued: they come first.
std::shared_ptr<Operation> ShmGroup::run(const fl_signature& signature, void* data, void* output,
                                         int peer, double seconds) {
  if (queued_.load(std::memory_order_acquire) != 0) {
    return start(signature, data, output, peer, seconds);
  }
  const std::lock_guard<std::mutex> lock(running_);
  return guarded([&](Collectives::Seen& seen) {
    return dispatch(signature, data, output, peer, seconds, interrupt_, seen);
  });
}

// Run `body` on the caller's thread; what it throws becomes an operation that has failed.
template <typename Body>
std::shared_ptr<Operation> ShmGroup::guarded(Body body) {
  if (!broken_.empty()) return ended(FL_CLOSED, broken_, {}, {});
  Collectives::Seen seen;
  try {
    Bytes output = body(seen);
    if (output.data == nullptr) return nullptr;
    auto done = ended(FL_OK, "", {}, collectives_.signatures());
    done->output = std::move(output);
    return done;
  } catch (const Mismatch& mismatch) {
    if (seen.empty()) seen = collectives_.signatures();
    return ended(FL_MISMATCH, mismatch.what(), {}, std::move(seen));
  } catch (const Failure& failure) {
    return broken_by(failure);
  } catch (const std::exception& error) {  // no memory: the others are in the middle of this call
    return broken_by(peers_.explain(error.what()));
  }
}

std::shared_ptr<Operation> ShmGroup::broken_by(const Failure& failure) {
  broken_ = failure.what();
  peers_.give_up(failure);
  return ended(failure.status, failure.what(), failure.missing, {});
}

bool ShmGroup::begin(const fl_signature& signature, const void* data, double seconds) {
  if (queued_.load(std::memory_order_acquire) != 0) return false;
  running_.lock();
  if (!broken_.empty()) {
    running_.unlock();
    return false;
  }
  peers_.begin(seconds, collectives_.next_call(), -1, interrupt_);
  collectives_.call_all_reduce(signature, data);
  return true;
}

bool ShmGroup::ready(int spins) const {
  if (!peers_.may_spin()) spins = 0;
  while (!collectives_.called()) {
    if (spins-- <= 0) return false;
    pause_briefly();
  }
  return true;
}

std::shared_ptr<Operation> ShmGroup::finish(const fl_signature& signature, void* data) {
  const std::lock_guard<std::mutex> lock(running_, std::adopt_lock);
  return guarded([&](Collectives::Seen&) {
    collectives_.complete_all_reduce(signature, data);
    return Bytes();
  });
}

std::shared_ptr<Operation> ShmGroup::start(const fl_signature& signature, void* data, void* output,
                                           int peer, double seconds) {
  if (worker_ == nullptr) worker_ = std::make_unique<Worker>(peers_);
  queued_.fetch_add(1, std::memory_order_acq_rel);
  return worker_->submit(seconds, [=](Operation& operation) {
    const struct Leave {
      std::atomic<int>& queued;
      ~Leave() { queued.fetch_sub(1, std::memory_order_acq_rel); }
    } leave{queued_};
    const std::lock_guard<std::mutex> lock(running_);
    if (!broken_.empty()) throw Failure(FL_CLOSED, {}, broken_);
    try {
      operation.output = dispatch(signature, data, output, peer, operation.seconds, nullptr,
                                  operation.signatures);
      if (operation.output.data != nullptr) operation.signatures = collectives_.signatures();
    } catch (const Mismatch&) {
      throw;
    } catch (const std::exception& error) {
      broken_ = error.what();
      throw;
    }
  });
}

Bytes ShmGroup::dispatch(const fl_signature& s, void* data, void* output, int peer, double seconds,
                         InterruptCheck interrupt, Collectives::Seen& seen) {
  const bool pairwise = s.verb == FL_SEND || s.verb == FL_RECV;
  peers_.begin(seconds, collectives_.next_call(), pairwise ? peer : -1, interrupt);
  if (pairwise) seen.assign(size_, fl_signature{});
  try {
    switch (s.verb) {
      case FL_ALL_REDUCE: collectives_.all_reduce(s, data); return {};
      case FL_BARRIER: collectives_.barrier(s); return {};
      case FL_BROADCAST: collectives_.broadcast(s, data); return {};
      case FL_REDUCE: collectives_.reduce(s, data); return {};
      case FL_REDUCE_SCATTER: collectives_.reduce_scatter(s, data, output); return {};
      case FL_ALL_GATHER: return collectives_.all_gather(s, data);
      case FL_GATHER: return collectives_.gather(s, data);
      case FL_SCATTER: collectives_.scatter(s, data, output); return {};
      case FL_ALL_TO_ALL: collectives_.all_to_all(s, data, output); return {};
      case FL_SEND: collectives_.send(s, data, peer, seen); return {};
      case FL_RECV: collectives_.recv(s, data, peer, seen); return {};
      default: throw Failure(FL_FAILED, {}, "unknown verb");
    }
  } catch (const Mismatch&) {
    if (!pairwise) seen = collectives_.signatures();
    throw;
  }
}

std::shared_ptr<Operation> ShmGroup::ended(fl_status status, const std::string& message,
                                            std::vector<int> missing, Collectives::Seen seen) {
  auto operation = std::make_shared<Operation>();
  operation->queue = std::make_shared<Queue>();
  operation->status = status;
  operation->message = message;
  operation->missing = std::move(missing);
  operation->signatures = std::move(seen);
  return operation;
}

void* ShmGroup::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  const std::lock_guard<std::mutex> lock(running_);
  return collectives_.add_region(std::move(mapping), stride);
}

void ShmGroup::drop_region(const void* array) {
  const std::lock_guard<std::mutex> lock(running_);
  collectives_.drop_region(array);
}

}  // namespace fl
