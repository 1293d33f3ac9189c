#include "group.h"

#include <algorithm>
#include <list>
#include <utility>

namespace fl {
namespace {

// Beside other threads of this process, which need the processor.
constexpr Patience kInALane{0, 20};

bool is_message(const fl_signature& s) { return s.verb == FL_SEND || s.verb == FL_RECV; }

// Which no message has.
constexpr Lane kCollectives{-1, false, 0};

Lane lane_of(const fl_signature& s, int peer) { return {peer, s.verb == FL_SEND, s.root}; }

// A lane that was entered.
class Turn {
 public:
  Turn(Lanes& lanes, const Lane& lane) : lanes_(&lanes), lane_(lane) {}
  ~Turn() {
    if (lanes_ != nullptr) lanes_->leave(lane_);
  }
  Turn(const Turn&) = delete;

  const Lane& lane() const { return lane_; }
  std::shared_ptr<Operation> go_on(double seconds, std::function<void(Operation&)> run) {
    return std::exchange(lanes_, nullptr)->go_on(lane_, seconds, std::move(run));
  }

  const Message* last = nullptr;  // in this lane

 private:
  Lanes* lanes_;
  const Lane lane_;
};

std::unique_ptr<Message> make_message(Mail& mail, const fl_signature& s, void* data, int peer) {
  return s.verb == FL_SEND ? make_send(mail, s, data, peer) : make_receive(mail, s, data, peer);
}

// Nothing, of a message that was received; `seen` tells of one that does not match.
Bytes end_of(const Message& message, std::vector<fl_signature>& seen) {
  if (!message.is_mismatched()) return {};
  seen = message.signatures();
  throw Mismatch();
}

}  // namespace

ShmGroup::ShmGroup(Mapping mapping, int rank, int size)
    : rank_(rank),
      size_(size),
      segment_(std::move(mapping), size),
      remote_(segment_, rank, size),
      peers_(segment_, rank, size),
      collectives_(segment_, peers_, remote_, rank, size),
      mail_(segment_, peers_, remote_, rank, size),
      lanes_(std::make_unique<Lanes>(peers_)) {}

ShmGroup::~ShmGroup() {
  peers_.stop();
  lanes_.reset();
  const std::lock_guard<std::mutex> lock(running_);  // on another thread of the caller's
  peers_.give_up(Failure(FL_OK, {}, "left"));
}

// On the caller's own thread, unless operations are queued: they come first.
ShmGroup::Result ShmGroup::run(const fl_signature& signature, void* data, void* output, int peer,
                               double seconds) {
  if (is_message(signature)) return run_message(signature, data, peer, seconds);
  if (queued_.load(std::memory_order_acquire) != 0) {
    return start_collective(signature, data, output, seconds);
  }
  const std::lock_guard<std::mutex> lock(running_);
  return guarded([&](Seen& seen) {
    return dispatch(signature, data, output, seconds, interrupt_, seen);
  });
}

ShmGroup::Result ShmGroup::start(const fl_signature& signature, void* data, void* output, int peer,
                                 double seconds) {
  return is_message(signature) ? start_message(signature, data, peer, seconds)
                               : start_collective(signature, data, output, seconds);
}

// Run `body` on the caller's thread; what it throws becomes an operation that has failed. `seen`
// are the signatures that go with what it returns or throws.
template <typename Body>
ShmGroup::Result ShmGroup::guarded(Body body) {
  if (peers_.is_broken()) return ended(FL_CLOSED, peers_.why_broken(), {}, {});
  Seen seen;
  Failure failure(FL_OK, {}, "");
  try {
    Bytes output = body(seen);
    if (output.data == nullptr) return nullptr;
    auto done = ended(FL_OK, "", {}, std::move(seen));
    done->output = std::move(output);
    return done;
  } catch (const Mismatch& mismatch) {
    return ended(FL_MISMATCH, mismatch.what(), {}, std::move(seen));
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {  // no memory: the others are in the middle of this call
    failure = peers_.explain(error.what());
  }
  peers_.fail(failure);
  return ended(failure.status, failure.what(), failure.missing, {});
}

ShmGroup::Result ShmGroup::ended(fl_status status, const std::string& message,
                                 std::vector<int> missing, Seen seen) {
  auto operation = std::make_shared<Operation>();
  operation->queue = std::make_shared<Queue>();
  operation->status = status;
  operation->message = message;
  operation->missing = std::move(missing);
  operation->signatures = std::move(seen);
  return operation;
}

// Collectives ---------------------------------------------------------------------------------

bool ShmGroup::begin(const fl_signature& signature, const void* data, double seconds) {
  if (queued_.load(std::memory_order_acquire) != 0 || peers_.is_broken()) return false;
  running_.lock();
  collectives_.begin(seconds, interrupt_);
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

ShmGroup::Result ShmGroup::finish(const fl_signature& signature, void* data) {
  const std::lock_guard<std::mutex> lock(running_, std::adopt_lock);
  return guarded([&](Seen& seen) {
    try {
      collectives_.complete_all_reduce(signature, data);
    } catch (const Mismatch&) {
      seen = collectives_.signatures();
      throw;
    }
    return Bytes();
  });
}

ShmGroup::Result ShmGroup::start_collective(const fl_signature& signature, void* data,
                                            void* output, double seconds) {
  queued_.fetch_add(1, std::memory_order_acq_rel);
  return lanes_->submit(kCollectives, seconds, [=](Operation& operation) {
    const struct Leave {
      std::atomic<int>& queued;
      ~Leave() { queued.fetch_sub(1, std::memory_order_acq_rel); }
    } leave{queued_};
    const std::lock_guard<std::mutex> lock(running_);
    if (peers_.is_broken()) throw Failure(FL_CLOSED, {}, peers_.why_broken());
    operation.output =
        dispatch(signature, data, output, operation.seconds, nullptr, operation.signatures);
  });
}

Bytes ShmGroup::dispatch(const fl_signature& s, void* data, void* output, double seconds,
                         InterruptCheck interrupt, Seen& seen) {
  collectives_.begin(seconds, interrupt);
  const auto* room = static_cast<const fl_room*>(output);  // of the gathers
  const auto with_shapes = [&](Bytes received) {
    seen = collectives_.signatures();
    return received;
  };
  try {
    switch (s.verb) {
      case FL_ALL_REDUCE: collectives_.all_reduce(s, data); return {};
      case FL_BARRIER: collectives_.barrier(s); return {};
      case FL_BROADCAST: collectives_.broadcast(s, data); return {};
      case FL_REDUCE: collectives_.reduce(s, data); return {};
      case FL_REDUCE_SCATTER: collectives_.reduce_scatter(s, data, output); return {};
      case FL_ALL_GATHER: return with_shapes(collectives_.all_gather(s, data, room));
      case FL_GATHER: return with_shapes(collectives_.gather(s, data, room));
      case FL_SCATTER: return with_shapes(collectives_.scatter(s, data, output));
      case FL_ALL_TO_ALL: collectives_.all_to_all(s, data, output); return {};
      case FL_ALL_TO_ALL_UNEVEN:
        collectives_.all_to_all_uneven(s, *static_cast<const fl_sections*>(data), output);
        return {};
      default: throw Failure(FL_FAILED, {}, "unknown verb");
    }
  } catch (const Mismatch&) {
    seen = collectives_.signatures();
    throw;
  }
}

void* ShmGroup::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  const std::lock_guard<std::mutex> lock(running_);
  return collectives_.add_region(std::move(mapping), stride);
}

void ShmGroup::drop_region(const void* array) {
  const std::lock_guard<std::mutex> lock(running_);
  collectives_.drop_region(array);
}

// Messages ------------------------------------------------------------------------------------

ShmGroup::Result ShmGroup::run_message(const fl_signature& signature, void* data, int peer,
                                       double seconds) {
  const Lane lane = lane_of(signature, peer);
  if (!lanes_->enter(lane)) return start_message(signature, data, peer, seconds);
  const Turn turn(*lanes_, lane);
  const auto message = make_message(mail_, signature, data, peer);
  return guarded([&](Seen& seen) {
    deliver(mail_, peers_, {message.get()}, {seconds, interrupt_, peers_.patience()});
    return end_of(*message, seen);
  });
}

// What can be done at once is done here: an offer is made, or what is there already is taken.
ShmGroup::Result ShmGroup::start_message(const fl_signature& signature, void* data, int peer,
                                         double seconds) {
  const Lane lane = lane_of(signature, peer);
  const std::shared_ptr<Message> message = make_message(mail_, signature, data, peer);
  const auto run = [=](Operation& operation) {
    deliver(mail_, peers_, {message.get()}, {operation.seconds, nullptr, kInALane});
    end_of(*message, operation.signatures);
  };
  if (!lanes_->enter(lane)) return lanes_->submit(lane, seconds, run);
  Turn turn(*lanes_, lane);
  auto result = guarded([&](Seen& seen) {
    message->step();
    return end_of(*message, seen);
  });
  const bool goes_on = result == nullptr && !message->has_ended();
  return goes_on ? turn.go_on(seconds, run) : result;
}

std::vector<ShmGroup::Result> ShmGroup::exchange(const fl_message* messages, int count,
                                                 double seconds) {
  std::vector<Result> results(count);
  std::vector<std::unique_ptr<Message>> own(count);
  std::vector<Message*> all;
  std::list<Turn> turns;
  for (int i = 0; i < count; ++i) {
    const auto& [signature, data, peer] = messages[i];
    const Lane lane = lane_of(signature, peer);
    auto turn = std::find_if(turns.begin(), turns.end(),
                             [&](const Turn& one) { return one.lane() == lane; });
    if (turn == turns.end() && lanes_->enter(lane)) {
      turn = turns.emplace(turns.end(), *lanes_, lane);
    }
    if (turn == turns.end()) {
      results[i] = start_message(signature, data, peer, seconds);
      continue;
    }
    own[i] = make_message(mail_, signature, data, peer);
    own[i]->follow(std::exchange(turn->last, own[i].get()));
    all.push_back(own[i].get());
  }
  const Result failure = guarded([&](Seen&) {
    deliver(mail_, peers_, all, {seconds, interrupt_, peers_.patience()});
    return Bytes();
  });
  for (int i = 0; i < count; ++i) {
    if (own[i] == nullptr) continue;
    if (!own[i]->has_ended()) results[i] = failure;
    if (own[i]->is_mismatched()) {
      results[i] = ended(FL_MISMATCH, Mismatch().what(), {}, own[i]->signatures());
    }
  }
  return results;
}

}  // namespace fl
