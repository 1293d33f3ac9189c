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

std::unique_ptr<Message> make_message(Mail& mail, const fl_message& m) {
  return m.signature.verb == FL_SEND ? make_send(mail, m) : make_receive(mail, m);
}

// Nothing, of a message that was received; throws what there is to tell of one that does not match.
Bytes end_of(const Message& message) {
  if (message.is_mismatched()) throw Mismatch(message.seen());
  return {};
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
                               double seconds, const fl_site* site) {
  if (is_message(signature)) return run_message({signature, data, peer, asked(site)}, seconds);
  if (queued_.load(std::memory_order_acquire) != 0) {
    return start_collective(signature, data, output, seconds, asked(site));
  }
  const std::lock_guard<std::mutex> lock(running_);
  return guarded([&](Seen& seen) {
    return dispatch(signature, data, output, seconds, interrupt_, site, seen);
  });
}

ShmGroup::Result ShmGroup::start(const fl_signature& signature, void* data, void* output, int peer,
                                 double seconds, const fl_site* site) {
  return is_message(signature)
             ? start_message({signature, data, peer, asked(site)}, seconds)
             : start_collective(signature, data, output, seconds, asked(site));
}

fl_site ShmGroup::asked(const fl_site* site) const {
  if (site != nullptr) return *site;
  fl_site here{};
  if (where_ != nullptr) where_(&here);
  return here;
}

bool ShmGroup::is_ahead(int rank, fl_signature& call) {
  const std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  return lock.owns_lock() && queued_ == 0 && collectives_.is_ahead(rank, call);
}

void ShmGroup::give_up(const std::string& why) {
  peers_.fail(Failure(FL_RAISED, {rank_}, why));
}

// Without any lock: threads that are not in this process may have held it. The segment's file has
// a lock that others take for this rank's life.
void ShmGroup::abandon() noexcept {
  segment_.close_file();
  peers_.close_files();
}

// Run `body` on the caller's thread; what it throws becomes an operation that has failed. `seen` is
// what ranks have called, that goes with what it returns.
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
    return ended(FL_MISMATCH, mismatch.what(), {}, mismatch.seen);
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {  // no memory: the others are in the middle of this call
    failure = peers_.explain(error.what());
  }
  peers_.fail(failure);
  return ended(failure.status, failure.what(), failure.missing, failure.seen);
}

ShmGroup::Result ShmGroup::ended(fl_status status, const std::string& message,
                                 std::vector<int> missing, Seen seen) {
  auto operation = std::make_shared<Operation>();
  operation->queue = std::make_shared<Queue>();
  operation->status = status;
  operation->message = message;
  operation->missing = std::move(missing);
  operation->seen = std::move(seen);
  return operation;
}

// Run `body`, a collective that was called at `site`; what it throws tells what ranks have called.
template <typename Body>
auto ShmGroup::telling(const fl_site* site, Body body) {
  try {
    return body();
  } catch (const Mismatch&) {
    throw Mismatch(collectives_.compare(asked(site)));
  } catch (Failure& failure) {
    if (failure.status == FL_TIMEOUT) failure.seen = collectives_.last_calls();
    throw;
  }
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
  return guarded([&](Seen&) {
    return telling(nullptr, [&] {
      collectives_.complete_all_reduce(signature, data);
      return Bytes();
    });
  });
}

ShmGroup::Result ShmGroup::start_collective(const fl_signature& signature, void* data,
                                            void* output, double seconds, const fl_site& site) {
  queued_.fetch_add(1, std::memory_order_acq_rel);
  return lanes_->submit(kCollectives, seconds, [=](Operation& operation) {
    const struct Leave {
      std::atomic<int>& queued;
      ~Leave() { queued.fetch_sub(1, std::memory_order_acq_rel); }
    } leave{queued_};
    const std::lock_guard<std::mutex> lock(running_);
    if (peers_.is_broken()) throw Failure(FL_CLOSED, {}, peers_.why_broken());
    operation.output =
        dispatch(signature, data, output, operation.seconds, nullptr, &site, operation.seen);
  });
}

Bytes ShmGroup::dispatch(const fl_signature& s, void* data, void* output, double seconds,
                         InterruptCheck interrupt, const fl_site* site, Seen& seen) {
  collectives_.begin(seconds, interrupt);
  return telling(site, [&] { return call(s, data, output, seen); });
}

Bytes ShmGroup::call(const fl_signature& s, void* data, void* output, Seen& seen) {
  const auto* room = static_cast<const fl_room*>(output);  // of the gathers
  const auto with_shapes = [&](Bytes received) {
    seen.calls = collectives_.calls();
    return received;
  };
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

ShmGroup::Result ShmGroup::run_message(const fl_message& sent, double seconds) {
  const Lane lane = lane_of(sent.signature, sent.peer);
  if (!lanes_->enter(lane)) return start_message(sent, seconds);
  const Turn turn(*lanes_, lane);
  const auto message = make_message(mail_, sent);
  return guarded([&](Seen&) {
    deliver(mail_, peers_, {message.get()}, {seconds, interrupt_, peers_.patience()});
    return end_of(*message);
  });
}

// What can be done at once is done here: an offer is made, or what is there already is taken.
ShmGroup::Result ShmGroup::start_message(const fl_message& sent, double seconds) {
  const Lane lane = lane_of(sent.signature, sent.peer);
  const std::shared_ptr<Message> message = make_message(mail_, sent);
  if (!lanes_->enter(lane)) return lanes_->submit(lane, seconds, rest_of(message));
  Turn turn(*lanes_, lane);
  auto result = guarded([&](Seen&) {
    message->step();
    return end_of(*message);
  });
  const bool goes_on = result == nullptr && !message->has_ended();
  return goes_on ? turn.go_on(seconds, rest_of(message)) : result;
}

// What a thread does with a message.
std::function<void(Operation&)> ShmGroup::rest_of(std::shared_ptr<Message> message) {
  return [this, message = std::move(message)](Operation& operation) {
    deliver(mail_, peers_, {message.get()}, {operation.seconds, nullptr, kInALane});
    end_of(*message);
  };
}

std::vector<ShmGroup::Result> ShmGroup::start_exchange(const fl_message* messages, int count,
                                                       double seconds) {
  std::vector<Result> results(count);
  std::vector<std::shared_ptr<Message>> own(count);
  std::vector<Message*> all;
  std::list<Turn> turns;
  for (int i = 0; i < count; ++i) {
    const Lane lane = lane_of(messages[i].signature, messages[i].peer);
    if (!lanes_->enter(lane)) {
      results[i] = start_message(messages[i], seconds);
      continue;
    }
    turns.emplace_back(*lanes_, lane);
    own[i] = make_message(mail_, messages[i]);
    all.push_back(own[i].get());
  }
  const Result failure = guarded([&](Seen&) {
    deliver_briefly(peers_, all);
    return Bytes();
  });
  auto turn = turns.begin();
  for (int i = 0; i < count; ++i) {
    if (own[i] == nullptr) continue;
    if (own[i]->is_mismatched()) {
      results[i] = ended(FL_MISMATCH, Mismatch().what(), {}, own[i]->seen());
    } else if (!own[i]->has_ended()) {
      results[i] = failure != nullptr ? failure : turn->go_on(seconds, rest_of(own[i]));
    }
    ++turn;
  }
  return results;
}

std::vector<ShmGroup::Result> ShmGroup::exchange(const fl_message* messages, int count,
                                                 double seconds) {
  std::vector<Result> results(count);
  std::vector<std::unique_ptr<Message>> own(count);
  std::vector<Message*> all;
  std::list<Turn> turns;
  for (int i = 0; i < count; ++i) {
    const Lane lane = lane_of(messages[i].signature, messages[i].peer);
    auto turn = std::find_if(turns.begin(), turns.end(),
                             [&](const Turn& one) { return one.lane() == lane; });
    if (turn == turns.end() && lanes_->enter(lane)) {
      turn = turns.emplace(turns.end(), *lanes_, lane);
    }
    if (turn == turns.end()) {
      results[i] = start_message(messages[i], seconds);
      continue;
    }
    own[i] = make_message(mail_, messages[i]);
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
      results[i] = ended(FL_MISMATCH, Mismatch().what(), {}, own[i]->seen());
    }
  }
  return results;
}

}  // namespace fl
