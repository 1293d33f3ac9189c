// The messages of a group, beside its collectives: each in its queue, on the caller's thread or another.
#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "../common/signature.h"
#include "group.h"

namespace fl {
namespace {

// Beside other threads of this process, which need the processor.
constexpr Patience kInAQueue{0, 20};

// A queue that was entered.
class Stay {
 public:
  Stay(Queues& queues, const QueueId& id) : queues_(&queues), id_(id) {}
  ~Stay() {
    if (queues_ != nullptr) queues_->leave(id_);
  }
  Stay(const Stay&) = delete;

  const QueueId& id() const { return id_; }
  std::shared_ptr<Operation> go_on(double seconds, std::function<void(Operation&)> run) {
    return std::exchange(queues_, nullptr)->go_on(id_, seconds, std::move(run));
  }

  const Message* last = nullptr;  // in this queue

 private:
  Queues* queues_;
  const QueueId id_;
};

std::unique_ptr<Message> make_message(Mail& mail, const fl_message& m) {
  return m.signature.verb == FL_SEND ? make_send(mail, m) : make_receive(mail, m);
}

// Nothing to fetch, of a message that has moved; of one that was only compared what both have called.
// Throws what there is to report of one that does not match.
Bytes end_of(const Message& message, Seen& seen) {
  if (message.is_mismatched()) throw Mismatch(message.seen());
  if (!message.is_only_compared() || !message.has_ended()) return {};
  seen = message.seen();
  return make_bytes(0);
}

}  // namespace

// The messages of one call, on the caller's thread; those with something before them in their queue are
// started.
class ShmGroup::Messages final : public Exchange {
 public:
  Messages(ShmGroup& group, const fl_message* messages, int count, double seconds)
      : group_(group), seconds_(seconds), count_(count), ones_(std::make_unique<One[]>(count)) {
    own_.reserve(count);
    for (int i = 0; i < count; ++i) add(messages[i], i);
  }

  // Whether all of them do, and well.
  bool end_within(int spins) {
    bool all = false;
    failure_ = group_.guarded([&](Seen&) {
      all = deliver_within(group_.peers_, own_, spins);
      return Bytes();
    });
    const auto is_well = [](const One& one) {
      return one.message != nullptr && !one.message->is_mismatched() &&
             !one.message->is_only_compared();
    };
    return all && failure_ == nullptr && std::all_of(&ones_[0], &ones_[0] + count_, is_well);
  }

  std::vector<Result> end() override {
    if (failure_ == nullptr) {
      failure_ = group_.guarded([&](Seen&) {
        deliver(group_.mail_, group_.peers_, own_,
                {seconds_, group_.interrupt_, group_.peers_.patience()});
        return Bytes();
      });
    }
    std::vector<Result> results(count_);
    for (int i = 0; i < count_; ++i) results[i] = result_of(ones_[i]);
    return results;
  }

 private:
  struct One {
    std::optional<Stay> stay;          // of the first one in a queue
    std::unique_ptr<Message> message;  // or
    Result started;
  };

  void add(const fl_message& sent, int i) {
    One* const first = &ones_[0];
    const QueueId id = queue_of(sent);
    One* stays = std::find_if(first, first + i, [&](const One& one) {
      return one.stay.has_value() && one.stay->id() == id;
    });
    if (stays == first + i && group_.queues_->enter(id)) stays->stay.emplace(*group_.queues_, id);
    if (!stays->stay.has_value()) {
      ones_[i].started = group_.start_message(sent, seconds_);
      return;
    }
    ones_[i].message = make_message(group_.mail_, sent);
    own_.push_back(ones_[i].message.get());
    own_.back()->follow(std::exchange(stays->stay->last, own_.back()));
  }

  Result result_of(const One& one) {
    if (one.message == nullptr) return one.started;
    if (one.message->is_mismatched()) {
      return group_.ended(FL_MISMATCH, Mismatch().what(), {}, one.message->seen());
    }
    return one.message->has_ended() ? group_.known(*one.message) : failure_;
  }

  ShmGroup& group_;
  const double seconds_;
  const int count_;
  std::unique_ptr<One[]> ones_;
  std::vector<Message*> own_;
  Result failure_;
};

ShmGroup::Result ShmGroup::run_message(const fl_message& sent, double seconds) {
  return exchange(&sent, 1, seconds)[0];
}

std::vector<ShmGroup::Result> ShmGroup::exchange(const fl_message* messages, int count,
                                                 double seconds) {
  return Messages(*this, messages, count, seconds).end();
}

std::unique_ptr<ShmGroup::Exchange> ShmGroup::post(const fl_message* messages, int count,
                                                   double seconds, int spins) {
  auto posted = std::make_unique<Messages>(*this, messages, count, seconds);
  if (posted->end_within(spins)) return nullptr;
  return posted;
}

// Of a message that has ended well: null, or of one that was only compared what both have called.
ShmGroup::Result ShmGroup::known(const Message& message) {
  if (!message.is_only_compared()) return nullptr;
  return guarded([&](Seen& seen) { return end_of(message, seen); });
}

// What can be done at once is done here: an offer is made, or what is there already is taken.
ShmGroup::Result ShmGroup::start_message(const fl_message& sent, double seconds) {
  const QueueId id = queue_of(sent);
  const std::shared_ptr<Message> message = make_message(mail_, sent);
  if (!queues_->enter(id)) return queues_->submit(id, seconds, rest_of(message));
  Stay stay(*queues_, id);
  auto result = guarded([&](Seen& seen) {
    message->step();
    return end_of(*message, seen);
  });
  const bool goes_on = result == nullptr && !message->has_ended();
  return goes_on ? stay.go_on(seconds, rest_of(message)) : result;
}

ShmGroup::Result ShmGroup::run_match(const fl_message& asked, fl_match& match, double seconds) {
  const QueueId id = queue_of(asked);
  if (!queues_->enter(id)) return start_match(asked, match, seconds);
  const Stay stay(*queues_, id);
  return guarded([&](Seen& seen) {
    return receive_match(asked, match, {seconds, interrupt_, peers_.patience()}, seen);
  });
}

ShmGroup::Result ShmGroup::start_match(const fl_message& asked, fl_match& match, double seconds) {
  return queues_->submit(queue_of(asked), seconds, [this, asked, &match](Operation& operation) {
    const Waiting waiting{operation.seconds, nullptr, kInAQueue, &operation.is_awaited};
    operation.output = receive_match(asked, match, waiting, operation.seen);
  });
}

Bytes ShmGroup::receive_match(const fl_message& asked, fl_match& match, const Waiting& waiting,
                              Seen& seen) {
  ShmSearch search(mail_, peers_, *queues_, asked);
  search.run(waiting, match.patience);
  const fl_message found = search.receive(asked, match);
  if (found.peer < 0) return {};
  std::optional<Stay> stay;  // which the search has entered
  if (asked.peer < 0) stay.emplace(*queues_, queue_of(found));
  const auto message = make_message(mail_, found);
  deliver(mail_, peers_, {message.get()}, waiting);
  return end_of(*message, seen);
}

// What a thread does with a message.
std::function<void(Operation&)> ShmGroup::rest_of(std::shared_ptr<Message> message) {
  return [this, message = std::move(message)](Operation& operation) {
    const Waiting waiting{operation.seconds, nullptr, kInAQueue, &operation.is_awaited};
    deliver(mail_, peers_, {message.get()}, waiting);
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
    const QueueId id = queue_of(messages[i]);
    if (!queues_->enter(id)) {
      results[i] = start_message(messages[i], seconds);
      continue;
    }
    stays.emplace_back(*queues_, id);
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
    } else if (own[i]->has_ended()) {
      results[i] = known(*own[i]);
    } else {
      results[i] = failure != nullptr ? failure : stay->go_on(seconds, rest_of(own[i]));
    }
    ++stay;
  }
  return results;
}

}  // namespace fl
