// Messages and ports: the interface of the engine for callers.

#include "engine.h"

namespace fl {
namespace {

const Outcome kNothing;

Failure closed_by_this_rank() { return {FL_CLOSED, {}, kWasClosed}; }

}  // namespace

Message::Message(Port& port, const fl_message& request, double seconds, uint16_t site)
    : port_(&port), match_(request.match), data_(static_cast<char*>(request.data)), call_(request.signature),
      peer_(request.peer), site_(site), seconds_(static_cast<float>(seconds)), since_(port.engine_.now()) {
  if (request.peer < 0) flags_ |= kAny;
}

Message::~Message() {
  if ((flags_ & kHasOutcome) != 0) delete outcome_;
}

void Message::release() noexcept {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

uint64_t Message::key() const { return key_of((flags_ & kAny) != 0 ? kNoPeer : peer_, call_.root); }

const Outcome& Message::outcome() const {
  return is_open() || (flags_ & kHasOutcome) == 0 ? kNothing : *outcome_;
}

void Message::cancel() {
  if (is_open()) port_->engine_.cancel(*this);
}

// Return the engine rank that probably sends the next record of this message. The caller holds the lock.
int Message::hint() const { return peer_ < 0 ? kNoPeer : port_->ranks_[peer_]; }

double Message::ended_at() const { return is_open() ? 0 : ended_; }

fl_status Message::wait(double seconds) {
  if (!is_open()) return status();
  Engine& engine = port_->engine_;
  if (seconds <= 0) {
    Engine::Lock lock(engine.mutex_, std::try_to_lock);
    if (lock.owns_lock()) engine.progress(lock, kNoPeer);
    return status();
  }
  int hint;
  {
    const Engine::Lock lock(engine.mutex_);
    flags_ |= kAwaited;
    hint = this->hint();
  }
  Message* const self = this;
  engine.wait(*port_, {&self, 1}, hint, deadline_after(seconds), nullptr);
  return status();
}

void Message::stamp(int64_t* ended, int64_t running) {
  if (is_open()) {
    const Engine::Lock lock(port_->engine_.mutex_);
    if (is_open()) {
      stamp_ = ended;
      running_ = static_cast<uint32_t>(running);
      return;
    }
  }
  fl_stamp(ended, running);
}

Port::Port(Engine& engine, uint64_t group, int rank, std::vector<int> ranks, Transport& transport)
    : engine_(engine), group_(group), rank_(rank), ranks_(std::move(ranks)), numbers_(engine.size_, -1),
      transport_(transport), sent_(ranks_.size()), answered_at_(ranks_.size()), arrived_(ranks_.size()),
      wanted_(ranks_.size()) {
  for (size_t i = 0; i < ranks_.size(); ++i) numbers_[ranks_[i]] = static_cast<int>(i);
  const Engine::Lock lock(engine.mutex_);
  engine.ports_[group] = this;
  const auto early = engine.early_.find(group);
  if (early == engine.early_.end()) return;
  for (Arrival* arrival : early->second) {
    engine.arrive(*this, arrival->from(), arrival->record, arrival->data);
    Arrival::free(arrival);
  }
  engine.early_.erase(early);
}

Port::~Port() { close(); }

void Port::close() {
  engine_.send_answers(*this);
  Engine::Lock lock(engine_.mutex_);
  if (is_closed_) return;
  is_closed_ = true;
  engine_.ports_.erase(group_);
  engine_.end_all(*this, closed_by_this_rank(), nullptr, nullptr);
  arrivals_.clear([this](Arrival& arrival) { engine_.return_credit(ranks_[arrival.from()], arrival); });
  engine_.idle_.wait(lock, [this] { return busy_ == 0; });
}

// Return the reason why the group accepts no messages. Requires the engine's lock.
std::optional<Failure> Port::why_ended() const {
  if (transport_.is_broken()) return transport_.why_broken();
  if (is_closed_) return closed_by_this_rank();
  return std::nullopt;
}

// Begin a message and return it, or null if it has already succeeded. If there is a `refusal`, the message
// does not begin; it ends with the mismatch.
Message* Port::begin(const fl_message& request, double seconds, bool is_awaited,
                     const std::optional<CallReport>& refusal) {
  const auto why = why_ended();
  const bool begins = !why && !refusal;
  if (begins && request.signature.verb == FL_SEND && engine_.send_now(*this, request)) return nullptr;
  auto* message = new Message(*this, request, seconds, engine_.site_number(request.site));
  message->flags_ |= is_awaited ? Message::kAwaited : Message::kTimed;
  if (why) {
    engine_.begin(*message, why->status, outcome_of(*why));
  } else if (refusal) {
    engine_.begin(*message, FL_MISMATCH, std::make_unique<Outcome>(Outcome{Mismatch().what(), {}, *refusal, {}}));
  } else {
    engine_.begin(*message);
  }
  return release_if_ok(message);
}

Port::Posted Port::begin_all(const fl_message* messages, int count, double seconds, bool is_awaited) {
  Posted begun(count);
  const auto refusal = take_refusal();
  for (int i = 0; i < count; ++i) begun[i] = begin(messages[i], seconds, is_awaited, refusal);
  return begun;
}

// If `message` has succeeded without an outcome, release it and return null. Otherwise return it.
Message* Port::release_if_ok(Message* message) {
  if (message != nullptr && message->is_plain_success()) std::exchange(message, nullptr)->release();
  return message;
}

Handle Port::run(const fl_message& request, double seconds, InterruptCheck interrupt) {
  const bool has_limit = request.match != nullptr && request.match->patience >= 0;
  const auto until = has_limit ? deadline_after(request.match->patience) : kNever;
  const Posted posted = post(&request, 1, seconds, -1);
  return posted.empty() ? nullptr : std::move(finish(posted, interrupt, until)[0]);
}

Handle Port::start(const fl_message& request, double seconds) {
  const Engine::Lock lock(engine_.mutex_);
  Message* const message = begin(request, seconds, false, take_refusal());
  if (message != nullptr && message->is_open()) engine_.ticker_.activate();
  return Handle(message);
}

Port::Posted Port::post(const fl_message* messages, int count, double seconds, int spins) {
  Posted posted;
  {
    const Engine::Lock lock(engine_.mutex_);
    posted = begin_all(messages, count, seconds, true);
  }
  const Patience patience{transport_.patience().spins > 0 ? std::max(spins, 0) : 0, 0};
  const int hint = count == 1 && messages[0].peer >= 0 ? ranks_[messages[0].peer] : kNoPeer;
  const Awaited awaited{posted.data(), posted.size()};
  if (!awaited.has_ended()) {
    if (spins < 0 || !engine_.poll(awaited, patience, hint)) return posted;
    transport_.waited(false);
  }
  for (Message*& message : posted) message = release_if_ok(message);
  const auto is_null = [](const Message* message) { return message == nullptr; };
  return std::all_of(posted.begin(), posted.end(), is_null) ? Posted() : posted;
}

std::vector<Handle> Port::finish(const Posted& posted, InterruptCheck interrupt, Clock::time_point until) {
  int hint = kNoPeer;
  if (posted.size() == 1) {
    const Engine::Lock lock(engine_.mutex_);
    hint = posted[0]->hint();
  }
  engine_.wait(*this, {posted.data(), posted.size()}, hint, until, interrupt);
  std::vector<Handle> handles;
  for (Message* message : posted) {
    if (message != nullptr && message->is_open()) engine_.cancel(*message);
    handles.emplace_back(release_if_ok(message));
  }
  return handles;
}

std::vector<Handle> Port::exchange(const fl_message* messages, int count, double seconds, InterruptCheck interrupt) {
  const Posted posted = post(messages, count, seconds, -1);
  return posted.empty() ? std::vector<Handle>(count) : finish(posted, interrupt);
}

std::vector<Handle> Port::start_exchange(const fl_message* messages, int count, double seconds) {
  std::vector<Handle> handles;
  const Engine::Lock lock(engine_.mutex_);
  for (Message* message : begin_all(messages, count, seconds, false)) handles.emplace_back(message);
  if (engine_.open_.load(std::memory_order_relaxed) > 0) engine_.ticker_.activate();
  return handles;
}

Handle Port::refused() {
  if (!has_refusal()) return nullptr;
  const Engine::Lock lock(engine_.mutex_);
  auto refusal = take_refusal();
  if (!refusal) return nullptr;
  return handle_of(ended_with(FL_MISMATCH, {Mismatch().what(), {}, std::move(*refusal), {}}));
}

std::optional<CallReport> Port::take_refusal() {
  if (refusals_.empty()) return std::nullopt;
  std::optional<CallReport> refusal(std::move(refusals_.front()));
  refusals_.pop_front();
  has_refusal_.store(!refusals_.empty(), std::memory_order_relaxed);
  return refusal;
}

}  // namespace fl
