// The messages of a group, beside its collectives: each in its lane, on the caller's thread or another.
#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "../common/signature.h"
#include "group.h"

namespace fl {
namespace {

// Beside other threads of this process, which need the processor.
constexpr Patience kInALane{0, 20};

Lane lane_of(const fl_signature& s, int peer) { return {peer, s.verb == FL_SEND, s.root}; }

// Of a receive that has to find out who sends, or how much.
Lane lane_of_match(const fl_message& asked) {
  return {asked.peer < 0 ? kAnyRank : asked.peer, false, asked.signature.root};
}

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

// Nothing to fetch, of a message that has moved; of one that was only compared what both have called.
// Throws what there is to tell of one that does not match.
Bytes end_of(const Message& message, Seen& seen) {
  if (message.is_mismatched()) throw Mismatch(message.seen());
  if (!message.is_only_compared() || !message.has_ended()) return {};
  seen = message.seen();
  return make_bytes(0);
}

}  // namespace

ShmGroup::Result ShmGroup::run_message(const fl_message& sent, double seconds) {
  const Lane lane = lane_of(sent.signature, sent.peer);
  if (!lanes_->enter(lane)) return start_message(sent, seconds);
  const Stay stay(*lanes_, lane);
  const auto message = make_message(mail_, sent);
  return guarded([&](Seen& seen) {
    deliver(mail_, peers_, {message.get()}, {seconds, interrupt_, peers_.patience()});
    return end_of(*message, seen);
  });
}

// What can be done at once is done here: an offer is made, or what is there already is taken.
ShmGroup::Result ShmGroup::start_message(const fl_message& sent, double seconds) {
  const Lane lane = lane_of(sent.signature, sent.peer);
  const std::shared_ptr<Message> message = make_message(mail_, sent);
  if (!lanes_->enter(lane)) return lanes_->submit(lane, seconds, rest_of(message));
  Stay stay(*lanes_, lane);
  auto result = guarded([&](Seen& seen) {
    message->step();
    return end_of(*message, seen);
  });
  const bool goes_on = result == nullptr && !message->has_ended();
  return goes_on ? stay.go_on(seconds, rest_of(message)) : result;
}

ShmGroup::Result ShmGroup::run_match(const fl_message& asked, fl_match& match, double seconds) {
  const Lane lane = lane_of_match(asked);
  if (!lanes_->enter(lane)) return start_match(asked, match, seconds);
  const Stay stay(*lanes_, lane);
  return guarded([&](Seen& seen) {
    return receive_match(asked, match, {seconds, interrupt_, peers_.patience()}, seen);
  });
}

ShmGroup::Result ShmGroup::start_match(const fl_message& asked, fl_match& match, double seconds) {
  return lanes_->submit(lane_of_match(asked), seconds, [this, asked, &match](Operation& operation) {
    const Waiting waiting{operation.seconds, nullptr, kInALane};
    operation.output = receive_match(asked, match, waiting, operation.seen);
  });
}

Bytes ShmGroup::receive_match(fl_message asked, fl_match& match, const Waiting& waiting,
                              Seen& seen) {
  Search search(mail_, peers_, *lanes_, asked.peer, asked.signature.root);
  match.source = search.run(waiting, match.patience);
  if (match.source < 0) return {};
  std::optional<Stay> stay;  // which the search has entered
  if (asked.peer < 0) stay.emplace(*lanes_, Lane{match.source, false, asked.signature.root});
  asked.peer = match.source;
  if (match.partial != 0) asked.signature = fitted(asked.signature, search.offered());
  match.rows = asked.signature.ndim > 0 ? asked.signature.shape[0] : 1;
  const auto message = make_message(mail_, asked);
  deliver(mail_, peers_, {message.get()}, waiting);
  return end_of(*message, seen);
}

// What a thread does with a message.
std::function<void(Operation&)> ShmGroup::rest_of(std::shared_ptr<Message> message) {
  return [this, message = std::move(message)](Operation& operation) {
    deliver(mail_, peers_, {message.get()}, {operation.seconds, nullptr, kInALane});
    operation.output = end_of(*message, operation.seen);
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
