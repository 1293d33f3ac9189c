#include "group.h"

#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "../common/signature.h"

namespace fl {
namespace {

// Beside other threads of this process, which need the processor.
constexpr Patience kInALane{0, 20};

bool is_message(const fl_signature& s) { return s.verb == FL_SEND || s.verb == FL_RECV; }

// A receive that has to find out who sends, or how much.
bool is_match(const fl_signature& s, const void* output) {
  return s.verb == FL_RECV && output != nullptr;
}

// Which no message has.
constexpr Lane kCollectives{-1, false, 0};

Lane lane_of(const fl_signature& s, int peer) { return {peer, s.verb == FL_SEND, s.root}; }

// So long a group that is closed waits for a collective of another thread, which ends sooner.
constexpr long kLeavingMilliseconds = 500;

// A lane that was entered.
class Stay {
 public:
  Stay(Lanes& lanes, const Lane& lane) : lanes_(&lanes), lane_(lane) {}
  ~Stay() {
    if (lanes_ != nullptr) lanes_->leave(lane_);
  }
  Stay(const Stay&) = delete;

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

ShmGroup::~ShmGroup() { close(); }

// Who leaves in the middle of a collective has not done its part of it, and says so.
void ShmGroup::close() {
  if (closed_.exchange(true)) return;
  lanes_->close();
  const bool nothing_runs = turn_.try_take_for(kLeavingMilliseconds);
  if (nothing_runs) peers_.give_up(Failure(FL_OK, {}, "left"));
  peers_.fail(Failure(FL_CLOSED, {}, "the group was closed"));
  if (nothing_runs) turn_.give();
}

// The turn, from here to the end of the block. Waiting for it throws Failure where the group ends
// meanwhile, or a signal handler raises.
class ShmGroup::Running {
 public:
  Running(ShmGroup& group, InterruptCheck interrupt) : turn_(group.turn_) {
    while (!turn_.try_take_for(kSliceMilliseconds)) {
      if (group.peers_.has_ended()) throw group.peers_.why_ended();
      if (interrupt != nullptr && interrupt() != 0) throw interrupted();
    }
    if (!group.peers_.has_ended()) return;
    turn_.give();
    throw group.peers_.why_ended();
  }
  // One that begin() has taken.
  explicit Running(ShmGroup& group) : turn_(group.turn_) {}
  ~Running() { turn_.give(); }
  Running(const Running&) = delete;

 private:
  Turn& turn_;
};

// On the caller's own thread, unless operations are queued: they come first.
ShmGroup::Result ShmGroup::run(const fl_signature& signature, void* data, void* output, int peer,
                               double seconds, const fl_site* site) {
  if (is_match(signature, output)) {
    return run_match({signature, data, peer, asked(site)}, *static_cast<fl_match*>(output), seconds);
  }
  if (is_message(signature)) return run_message({signature, data, peer, asked(site)}, seconds);
  if (queued_.load(std::memory_order_acquire) != 0) {
    return start_collective(signature, data, output, seconds, asked(site));
  }
  if (turn_.is_mine()) {
    return ended(FL_FAILED, "this thread is in the middle of another call of the group", {}, {});
  }
  return guarded([&](Seen& seen) {
    const Running running(*this, interrupt_);
    return dispatch(signature, data, output, seconds, interrupt_, site, seen);
  });
}

ShmGroup::Result ShmGroup::start(const fl_signature& signature, void* data, void* output, int peer,
                                 double seconds, const fl_site* site) {
  if (is_match(signature, output)) {
    return start_match({signature, data, peer, asked(site)}, *static_cast<fl_match*>(output),
                       seconds);
  }
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
  if (!turn_.try_take()) return false;
  const Running running(*this);
  return queued_ == 0 && collectives_.is_ahead(rank, call);
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
// what ranks have called, that goes with what it restays.
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
  if (queued_.load(std::memory_order_acquire) != 0 || peers_.has_ended()) return false;
  if (!turn_.try_take()) return false;
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
  const Running running(*this);
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
    const Running running(*this, nullptr);
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
    case FL_REDUCE_SCATTER_UNEVEN:
      collectives_.reduce_scatter_uneven(s, *static_cast<const fl_sections*>(data), output);
      return {};
    default: throw Failure(FL_FAILED, {}, "unknown verb");
  }
}

void* ShmGroup::add_region(std::shared_ptr<Mapping> mapping, size_t stride) {
  const Running running(*this, nullptr);
  return collectives_.add_region(std::move(mapping), stride);
}

bool ShmGroup::drop_region(const void* array) {
  if (!turn_.try_take()) return false;
  const Running running(*this);
  collectives_.drop_region(array);
  return true;
}

// Messages ------------------------------------------------------------------------------------

ShmGroup::Result ShmGroup::run_message(const fl_message& sent, double seconds) {
  const Lane lane = lane_of(sent.signature, sent.peer);
  if (!lanes_->enter(lane)) return start_message(sent, seconds);
  const Stay stay(*lanes_, lane);
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
  Stay stay(*lanes_, lane);
  auto result = guarded([&](Seen&) {
    message->step();
    return end_of(*message);
  });
  const bool goes_on = result == nullptr && !message->has_ended();
  return goes_on ? stay.go_on(seconds, rest_of(message)) : result;
}

ShmGroup::Result ShmGroup::run_match(const fl_message& asked, fl_match& match, double seconds) {
  const Lane lane{asked.peer < 0 ? kAnyRank : asked.peer, false, asked.signature.root};
  if (!lanes_->enter(lane)) return start_match(asked, match, seconds);
  const Stay stay(*lanes_, lane);
  return guarded([&](Seen&) {
    receive_match(asked, match, {seconds, interrupt_, peers_.patience()});
    return Bytes();
  });
}

ShmGroup::Result ShmGroup::start_match(const fl_message& asked, fl_match& match, double seconds) {
  const Lane lane{asked.peer < 0 ? kAnyRank : asked.peer, false, asked.signature.root};
  return lanes_->submit(lane, seconds, [this, asked, &match](Operation& operation) {
    receive_match(asked, match, {operation.seconds, nullptr, kInALane});
  });
}

void ShmGroup::receive_match(fl_message asked, fl_match& match, const Waiting& waiting) {
  Search search(mail_, peers_, *lanes_, asked.peer, asked.signature.root);
  match.source = search.run(waiting, match.patience);
  if (match.source < 0) return;
  std::optional<Stay> stay;  // which the search has entered
  if (asked.peer < 0) stay.emplace(*lanes_, Lane{match.source, false, asked.signature.root});
  asked.peer = match.source;
  if (match.partial != 0) asked.signature = fitted(asked.signature, search.offered());
  match.rows = asked.signature.ndim > 0 ? asked.signature.shape[0] : 1;
  const auto message = make_message(mail_, asked);
  deliver(mail_, peers_, {message.get()}, waiting);
  end_of(*message);
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
  std::list<Stay> stays;
  for (int i = 0; i < count; ++i) {
    const Lane lane = lane_of(messages[i].signature, messages[i].peer);
    if (!lanes_->enter(lane)) {
      results[i] = start_message(messages[i], seconds);
      continue;
    }
    stays.emplace_back(*lanes_, lane);
    own[i] = make_message(mail_, messages[i]);
    all.push_back(own[i].get());
  }
  const Result failure = guarded([&](Seen&) {
    deliver_briefly(peers_, all);
    return Bytes();
  });
  auto stay = stays.begin();
  for (int i = 0; i < count; ++i) {
    if (own[i] == nullptr) continue;
    if (own[i]->is_mismatched()) {
      results[i] = ended(FL_MISMATCH, Mismatch().what(), {}, own[i]->seen());
    } else if (!own[i]->has_ended()) {
      results[i] = failure != nullptr ? failure : stay->go_on(seconds, rest_of(own[i]));
    }
    ++stay;
  }
  return results;
}

std::vector<ShmGroup::Result> ShmGroup::exchange(const fl_message* messages, int count,
                                                 double seconds) {
  std::vector<Result> results(count);
  std::vector<std::unique_ptr<Message>> own(count);
  std::vector<Message*> all;
  std::list<Stay> stays;
  for (int i = 0; i < count; ++i) {
    const Lane lane = lane_of(messages[i].signature, messages[i].peer);
    auto stay = std::find_if(stays.begin(), stays.end(),
                             [&](const Stay& one) { return one.lane() == lane; });
    if (stay == stays.end() && lanes_->enter(lane)) {
      stay = stays.emplace(stays.end(), *lanes_, lane);
    }
    if (stay == stays.end()) {
      results[i] = start_message(messages[i], seconds);
      continue;
    }
    own[i] = make_message(mail_, messages[i]);
    own[i]->follow(std::exchange(stay->last, own[i].get()));
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
