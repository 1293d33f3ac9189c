#include "engine.h"

#include <cstdlib>

namespace fl {
namespace {

constexpr long kSliceMilliseconds = 20;  // maximum sleep before failures are checked
constexpr uint32_t kLongWait = 100;  // milliseconds; a receive that waits longer notifies its sender
constexpr int kSpinsALook = 4;  // a poll of all queues takes as long as this many polls of a counter
constexpr int kTokenBits = 20;
constexpr uint32_t kTokens = (1u << kTokenBits) - 1;

bool must_check_at_once() {
  const char* checks = std::getenv("FLASHLIGHT_CHECKS");
  return checks != nullptr && std::strcmp(checks, "sync") == 0;
}

}  // namespace

Engine::Engine(Wire& wire, int size)
    : wire_(wire), size_(size), checks_at_once_(must_check_at_once()), peers_(size) {
  sites_.emplace_back();  // number 0: unknown site
}

Engine::~Engine() {
  stop();
  for (const auto& [group, early] : early_) {
    for (Port::Arrival* arrival : early) Port::Arrival::free(arrival);
  }
}

void Engine::stop() {
  {
    const Lock lock(mutex_);  // the lock lets the thread see the flag before it sleeps
    stopping_.store(true, std::memory_order_relaxed);
  }
  wire_.wake(false);
  ticker_.stop();
}

// Return the number of `site`, cached by address: a caller should pass the same object each time.
uint16_t Engine::site_number(const fl_site& site) {
  auto& [known, number] = last_sites_[reinterpret_cast<uintptr_t>(&site) / sizeof site % 16];
  if (known == &site && std::strcmp(site.text, sites_[number].text) == 0) return number;
  const auto [found, is_new] = site_numbers_.try_emplace(site.text, static_cast<uint16_t>(sites_.size()));
  if (is_new && sites_.size() > UINT16_MAX) {  // error texts are sites, too, so there may be many
    site_numbers_.erase(found);
    return 0;
  }
  if (is_new) sites_.push_back(site);
  known = &site;
  return number = found->second;
}

uint32_t Engine::token_for(Message& message) {
  if (free_tokens_.empty()) {
    if (tokens_.size() >= kTokens) throw Failure(FL_FAILED, {}, "too many messages are open");
    tokens_.emplace_back(0, nullptr);
    free_tokens_.push_back(static_cast<uint32_t>(tokens_.size()) - 1);
  }
  const uint32_t index = free_tokens_.back();
  free_tokens_.pop_back();
  auto& [uses, holder] = tokens_[index];
  holder = &message;
  // A token is never 0 and is new for each use, so that late answers match no other message.
  return (++uses << kTokenBits | index) + 1;
}

Message* Engine::by_token(uint32_t token) {
  const uint32_t index = (token - 1) & kTokens;
  if (token == 0 || index >= tokens_.size()) return nullptr;
  const auto& [uses, message] = tokens_[index];
  return (uses << kTokenBits | index) + 1 == token ? message : nullptr;
}

void Engine::free_token(uint32_t token) {
  const uint32_t index = (token - 1) & kTokens;
  tokens_[index].second = nullptr;
  free_tokens_.push_back(index);
}

void Engine::drop_moving(Message& message) {
  moving_.erase(std::remove(moving_.begin(), moving_.end(), &message), moving_.end());
}

// End `message`, which must not be in a table or queue. Its transfer, if any, ends too. May free `message`.
void Engine::end(Message& message, fl_status status, std::unique_ptr<Outcome> outcome) {
  if (message.state_ == Message::kOffered) free_token(message.token_);
  if (message.is_moving()) {
    if (message.movement_->token != 0) free_token(message.movement_->token);
    drop_moving(message);
    delete message.movement_;
  }
  message.match_ = nullptr;
  message.state_ = Message::kOver;
  if (outcome != nullptr) {
    message.outcome_ = outcome.release();
    message.flags_ |= Message::kHasOutcome;
  }
  const bool is_timed = (message.flags_ & Message::kTimed) != 0;  // reading a clock takes time
  message.ended_ = is_timed ? std::chrono::duration<double>(Clock::now().time_since_epoch()).count() : 0;
  if (message.stamp_ != nullptr) {
    const int64_t running = __atomic_load_n(message.stamp_, __ATOMIC_RELAXED);
    if (static_cast<uint32_t>(running) == message.running_) fl_stamp(message.stamp_, running);
  }
  open_.fetch_sub(1, std::memory_order_relaxed);
  --message.port_->open_;
  message.status_.store(static_cast<uint8_t>(status), std::memory_order_release);
  if (callers_.load(std::memory_order_relaxed) > 0) wire_.wake(true);
  message.release();
}

// Remove each open message of `port` from its table or queue, and call `visit` with it.
template <typename Visit>
void Engine::take_all(Port& port, Visit visit) {
  port.posted_.clear(visit);
  for (Peer& peer : peers_) {
    Message* message = std::exchange(peer.waiting, nullptr);
    while (message != nullptr) {
      Message& open = *std::exchange(message, message->next);
      open.next = nullptr;
      open.port_ == &port ? visit(open) : queue(peer, open);
    }
  }
  for (auto& [uses, holder] : tokens_) {
    if (holder != nullptr && holder->port_ == &port) visit(*holder);
  }
  const auto moving = moving_;
  for (Message* message : moving) {
    // If a thread reads the message's data without the lock, that thread detects the end of the group itself.
    if (message->port_ == &port && !message->movement_->is_busy) visit(*message);
  }
}

template <typename Visit>
void Engine::for_each(const Port& port, Visit visit) const {
  const auto visit_own_message = [&](Message* message) {
    if (message != nullptr && message->port_ == &port) visit(*message);
  };
  port.posted_.for_each(visit);
  for (const Peer& peer : peers_) {
    for (Message* message = peer.waiting; message != nullptr; message = message->next) visit_own_message(message);
  }
  for (const auto& [uses, message] : tokens_) visit_own_message(message);
  for (Message* message : moving_) visit_own_message(message);
}

// End all open messages of the group of `port`. If `found` is not null, it becomes the failure of the message
// `about` and of all messages that wait for a rank in `found->missing`. Other messages get the failure `why`.
void Engine::end_all(Port& port, const Failure& why, const Failure* found, const Message* about) {
  take_all(port, [&](Message& message) {
    const auto waits_for = [&](int rank) { return rank == message.peer_ || message.peer_ < 0; };
    const bool concerns = found != nullptr && (&message == about || found->status == FL_HOST_LOST ||
        (found->status != FL_TIMEOUT && std::any_of(found->missing.begin(), found->missing.end(), waits_for)));
    const Failure& failure = concerns ? *found : why;
    end(message, failure.status, outcome_of(failure));
  });
}

// End an open receive. Its status is FL_OK, and its source is unset, which marks it as cancelled.
void Engine::cancel(Message& message) {
  const Lock lock(mutex_);
  if (message.state_ != Message::kPosted) return;
  message.port_->posted_.remove(message);
  end(message, FL_OK);
}

const fl_site& Engine::site_of(int from, uint16_t number) const {
  const auto found = peers_[from].sites.find(number);
  return found == peers_[from].sites.end() ? sites_[0] : found->second;
}

// Before this rank leaves, wait until its answers to received messages have been sent. Do not wait for peers
// that have given up.
void Engine::send_answers(Port& port) {
  const auto is_waited_for = [&](const Control& control) {
    return control.group == port.group_ && control.kind != kCredit && control.kind != kWanted;
  };
  const auto is_done = [&] {
    for (int rank = 0; rank < static_cast<int>(port.ranks_.size()); ++rank) {
      const auto& controls = peers_[port.ranks_[rank]].controls;
      const bool waits = std::any_of(controls.begin(), controls.end(), is_waited_for) ||
                         !wire_.has_sent(port.ranks_[rank]);
      if (waits && !port.transport_.has_given_up(rank)) return false;
    }
    return true;
  };
  const auto end = Clock::now() + kLastMessages;
  while (Clock::now() < end) {
    {
      Lock lock(mutex_);
      progress(lock, kNoPeer);
      if (port.is_closed_ || port.transport_.is_broken() || is_done()) return;
    }
    sleep(true, kSliceMilliseconds, {});
  }
}

// Poll without sleeping. Return true if the awaited messages have ended.
bool Engine::poll(const Awaited& awaited, Patience patience, int hint) {
  patience.spins /= kSpinsALook;
  struct Polling {
    Wire& wire;
    const int peer;
    bool has_begun = false, in_vain = false;
    ~Polling() {
      if (has_begun) wire.end_polling(peer, in_vain);
    }
  } polling{wire_, hint};
  for (int poll_count = 0; poll_count <= patience.spins + patience.yields; ++poll_count) {
    bool moved = false;
    {
      Lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock()) moved = progress(lock, hint);
    }
    if (awaited.has_ended()) return true;
    if (moved) poll_count = -1;
    if (!polling.has_begun && patience.spins + patience.yields > 0) {
      wire_.begin_polling(hint);
      polling.has_begun = true;
    }
    poll_count < patience.spins ? pause_after(poll_count) : wire_.rest(hint, poll_count);
  }
  polling.in_vain = true;
  return false;
}

// Wait until the time `until` or the end of the awaited messages. A failure ends all messages of the group.
void Engine::wait(Port& port, const Awaited& awaited, int hint, Clock::time_point until, InterruptCheck interrupt) {
  const struct Caller {
    Engine& engine;
    explicit Caller(Engine& engine) : engine(engine) {
      engine.callers_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Caller() {
      const bool is_last = engine.callers_.fetch_sub(1, std::memory_order_relaxed) == 1;
      if (is_last && engine.open_.load(std::memory_order_relaxed) > 0) engine.ticker_.activate();
    }
  } caller{*this};
  const bool ended = poll(awaited, port.transport_.patience(), hint);
  port.transport_.waited(!ended);
  if (ended) return;
  do {
    const auto remaining = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (remaining < 0 || sleep(true, std::min<long>(kSliceMilliseconds, remaining + 1), awaited)) continue;
    if (interrupt != nullptr && interrupt() != 0) {
      {
        const Lock lock(mutex_);
        ++port.failing_;
      }
      fail(port, {FL_CLOSED, {}, kInterrupted}, nullptr);
    }
    check_waits();
  } while (!poll(awaited, port.transport_.patience(), hint) && Clock::now() < until);
}

// Sleep until a record arrives or `milliseconds` are over. Return true, without sleep, if a message advances.
bool Engine::sleep(bool as_caller, long milliseconds, const Awaited& awaited) {
  const uint32_t since = wire_.begin_wait();
  bool moved, stops;
  {
    Lock lock(mutex_);
    moved = progress(lock, kNoPeer);
    stops = !as_caller && stopping_.load(std::memory_order_relaxed);
  }
  if (!moved && !stops && !awaited.has_ended()) wire_.wait(since, as_caller, milliseconds);
  wire_.end_wait();
  return moved;
}

// Called regularly on the engine's thread: advance the open messages until a thread begins or awaits a
// message, and so advances them itself.
void Engine::tick() {
  if (open_.load(std::memory_order_relaxed) == 0) return;
  ticker_.activate();
  const auto is_relieved = [this] {
    const uint32_t calls = calls_.load(std::memory_order_relaxed);
    const bool are_new = std::exchange(calls_seen_, calls) != calls;
    constexpr auto order = std::memory_order_relaxed;
    return are_new || stopping_.load(order) || callers_.load(order) > 0 || open_.load(order) == 0;
  };
  while (!is_relieved()) {
    if (!sleep(false, kSliceMilliseconds, {})) check_waits();
  }
}

// Find messages that can never end. Handle arrived records, then fail the found messages that are still open.
void Engine::check_waits() {
  std::vector<Verdict> found;
  {
    Lock lock(mutex_);
    for (const auto& [group, port] : ports_) {
      if (port->open_ > 0 && port->failing_ == 0) find_failures(*port, found);
    }
    if (found.empty()) return;
    progress(lock, kNoPeer);
    const auto is_over = [](const Verdict& verdict) {
      return verdict.message != nullptr && verdict.message->state_ != verdict.state;
    };
    const auto rest = std::stable_partition(found.begin(), found.end(),
                                            [&](const Verdict& v) { return !is_over(v); });
    for (auto over = rest; over != found.end(); ++over) over->message->release();
    found.erase(rest, found.end());
    for (const Verdict& verdict : found) {
      ++verdict.port->busy_;
      ++verdict.port->failing_;
    }
  }
  for (const Verdict& verdict : found) {
    fail(*verdict.port, verdict.failure, verdict.message);
    if (verdict.message != nullptr) verdict.message->release();
    const Lock lock(mutex_);
    if (--verdict.port->busy_ == 0) idle_.notify_all();
  }
}

// End the group of `port` with the failure `found`. `about`: the message that it concerns, or null. The
// caller has increased failing_, so that no other thread ends the group.
void Engine::fail(Port& port, const Failure& found, const Message* about) {
  const Failure failure = port.transport_.with_details(found);
  port.transport_.fail(failure);  // may block while it notifies other ranks
  const Lock lock(mutex_);
  --port.failing_;
  end_all(port, port.transport_.why_broken(), &failure, about);
}

void Engine::find_failures(Port& port, std::vector<Verdict>& found) {
  Transport& transport = port.transport_;
  const uint32_t time = now();
  const size_t before = found.size();
  std::vector<int> others;
  std::vector<std::optional<Failure>> losses(port.ranks_.size());
  std::vector<bool> is_asked(port.ranks_.size());
  for (int r = 0; r < static_cast<int>(port.ranks_.size()); ++r) {
    if (r != port.rank_) others.push_back(r);
  }
  const auto loss = [&](int rank) -> const std::optional<Failure>& {
    if (!is_asked[rank]) losses[rank] = transport.loss_of(rank);
    is_asked[rank] = true;
    return losses[rank];
  };
  for_each(port, [&](Message& message) {
    if (found.size() > before || (message.state_ == Message::kPosted && is_claimed(message))) return;
    const std::vector<int> peers = message.peer_ < 0 ? others : std::vector<int>{message.peer_};
    const auto report = [&](const Failure& failure) {
      message.refs_.fetch_add(1, std::memory_order_relaxed);
      found.push_back({&port, &message, message.state_, failure});
    };
    if (transport.is_broken()) return report(transport.why_broken());
    for (const int rank : peers) {
      if (const auto& lost = loss(rank)) return report(*lost);
    }
    const bool is_send = message.sends() && !message.is_moving();
    const uint32_t since = is_send ? std::max(message.since_, port.answered_at_[message.peer_]) : message.since_;
    const uint32_t waited = time - since;
    const bool is_posted = message.state_ == Message::kPosted;
    const auto has_left = [&](int rank) { return transport.has_left(rank); };
    if (!message.is_moving() && (message.flags_ & Message::kAwaited) != 0 && waited > kLastMessages.count() &&
        std::all_of(peers.begin(), peers.end(), has_left)) {
      return report({FL_LEAVING, peers, kIsLeaving});
    }
    const bool is_first = !is_posted || port.posted_.first(message.key()) == &message;
    if (is_first && waited >= 1000.0 * message.seconds_) {
      return report({FL_TIMEOUT, peers, describe_wait(message)});
    }
    if (is_posted && is_first && message.peer_ >= 0 && waited > kLongWait) announce(message);
  });
}

// True if another receive that shares the claim of `message` has already matched.
bool Engine::is_claimed(const Message& message) {
  return message.match_ != nullptr && message.match_->claim != nullptr &&
         __atomic_load_n(message.match_->claim, __ATOMIC_RELAXED) != 0;
}

// Send the tag of `message` to its sender, because this rank waits for it.
void Engine::announce(Message& message) {
  if ((message.flags_ & Message::kAnnounced) != 0) return;
  message.flags_ |= Message::kAnnounced;
  control(message.hint(), {kWanted, message.port_->group_, message.call_.root});
}

std::string Engine::describe_wait(const Message& message) const {
  constexpr size_t kShown = 4;
  const Port& port = *message.port_;
  const std::string own_state = std::string("this rank ") + (message.sends() ? "sends" : "receives") +
                           " with tag " + std::to_string(message.call_.root);
  if (message.is_moving()) return "the message stopped during its transfer, " + own_state;
  std::string text;
  for (int rank = 0; rank < static_cast<int>(port.ranks_.size()); ++rank) {
    const bool is_any = message.peer_ < 0;
    if (rank == port.rank_ || (!is_any && rank != message.peer_)) continue;
    std::vector<int32_t> tags = port.wanted_[rank];
    if (!message.sends()) {
      tags.clear();
      port.arrivals_.for_each([&](const Port::Arrival& arrival) {
        if (arrival.from() == rank) tags.push_back(arrival.record.tag);
      });
    }
    if (tags.empty() && is_any) continue;
    text += port.transport_.name(rank) + " is " + (tags.empty() ? "not " : "") +
            (message.sends() ? "receiving" : "sending");
    for (size_t i = 0; i < std::min(tags.size(), kShown); ++i) {
      text += (i > 0 ? ", " : " with tag ") + std::to_string(tags[i]);
    }
    text += std::string(tags.size() > kShown ? " and more" : "") + ", ";
  }
  return text + own_state;
}

}  // namespace fl
