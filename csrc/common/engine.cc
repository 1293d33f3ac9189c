#include "engine.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "copying.h"

namespace fl {
namespace {

constexpr int kNobody = -1;
constexpr long kSliceMilliseconds = 20;  // a sleep, before somebody looks around
// What a rank may have sent to another that this has not received yet, in bytes: it keeps as much.
constexpr size_t kMostCredit = 1 << 20;
constexpr size_t kReadAtOnce = 4 << 20, kLeastPiece = 8 << 10;
constexpr size_t kMostWanted = 16;
constexpr uint32_t kLongWait = 100;  // milliseconds until a sender is told what a receive waits for
constexpr int kTokenBits = 20;
constexpr uint32_t kTokens = (1u << kTokenBits) - 1;

uint64_t key_of(int peer, int32_t tag) {
  return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32 | static_cast<uint32_t>(tag);
}

size_t bytes_of(const fl_signature& call) { return static_cast<size_t>(call.count) * call.itemsize; }

// Of all that same_call() compares but the tag: equal for two calls that same_message() finds the same,
// different (by 64 bits) for others.
uint64_t digest_of(const fl_signature& s) {
  uint64_t scale, digest = 0x9e3779b97f4a7c15u;
  std::memcpy(&scale, &s.scale, sizeof scale);
  const auto add = [&digest](uint64_t number) {
    digest = (digest ^ number) * 0xff51afd7ed558ccdu;
    digest ^= digest >> 32;
  };
  add(static_cast<uint64_t>(s.dtype) << 32 | static_cast<uint32_t>(s.op));
  add(static_cast<uint64_t>(s.itemsize) << 32 | static_cast<uint32_t>(s.ndim));
  add(static_cast<uint64_t>(s.part_of));
  add(scale);
  add(static_cast<uint64_t>(s.count));
  for (int d = 0; d < std::min(s.ndim, 8); ++d) add(static_cast<uint64_t>(s.shape[d]));
  return digest;
}

// What a receiver keeps until the message is received counts; offers without data are counted by their
// sender, which waits for each.
size_t charge_of(Kind kind, size_t bytes) {
  return kind == kMessage || bytes > kTinyMessage ? bytes + 64 : 0;
}

const char* data_of(const Record& record, const char* data) {
  return record.bytes > kTinyMessage ? data : record.tiny;
}

Failure closed_by_this_rank() { return {FL_CLOSED, {}, "the group was closed"}; }

std::unique_ptr<Outcome> outcome_of(const Failure& failure) {
  auto outcome = std::make_unique<Outcome>();
  outcome->message = failure.what();
  outcome->missing = failure.missing;
  return outcome;
}

// What was wrong with a call that no Message stands for.
Handle ended(fl_status status, Outcome outcome) {
  auto operation = std::make_shared<Operation>();
  static_cast<Outcome&>(*operation) = std::move(outcome);
  operation->shared = std::make_shared<Shared>();
  operation->status = status;
  return handle_of(std::move(operation));
}

bool must_check_at_once() {
  const char* checks = std::getenv("FLASHLIGHT_CHECKS");
  return checks != nullptr && std::strcmp(checks, "sync") == 0;
}

}  // namespace

// A record that is not about the data of a message, and waits for room.
struct Engine::Control {
  Kind kind;
  uint32_t group = 0;
  int32_t tag = 0;
  uint32_t token = 0;
  uint32_t theirs = 0;
  uint64_t amount = 0;  // kCredit: in bytes
  uint16_t site = 0;
  uint8_t way = 0;
  fl_signature call{};
  std::string data{};
};

struct Engine::Peer {
  std::deque<Control> controls;     // that wait for room
  Message* waiting = nullptr;       // sends that do, oldest first
  Message* last_waiting = nullptr;
  size_t charged = 0;               // bytes of ours that it may still keep
  size_t owed = 0;                  // bytes of its that we do not keep any more, and have not said so
  std::vector<bool> told;           // sites of ours that it knows, by number
  std::unordered_map<uint16_t, fl_site> sites;
};

struct Engine::Verdict {
  Port* port;
  Message* message;
  Message::State state;  // when it was found
  Failure failure;
};

struct Port::Arrival {
  Arrival* next;
  Record record;  // its number: who sends
  char data[];

  static Arrival* make(int from, const Record& record, const char* data) {
    const size_t more = record.bytes > kTinyMessage ? record.bytes : 0;
    auto* arrival = static_cast<Arrival*>(::operator new(sizeof(Arrival) + more));
    std::memcpy(static_cast<void*>(&arrival->record), &record, sizeof record);
    arrival->record.number = static_cast<uint32_t>(from);
    if (more > 0) std::memcpy(arrival->data, data, more);
    return arrival;
  }
  static void free(Arrival* arrival) { ::operator delete(arrival); }
  int from() const { return static_cast<int>(record.number.load(std::memory_order_relaxed)); }
  uint64_t key() const { return key_of(from(), record.tag); }
};

// Messages ------------------------------------------------------------------------------------

Message::Message(Port& port, const Given& given, double seconds, uint16_t site)
    : port_(&port),
      match_(given.match),
      data_(static_cast<char*>(given.data)),
      mine_(given.call),
      peer_(given.peer),
      site_(site),
      seconds_(static_cast<float>(seconds)),
      since_(port.engine_.now()) {
  if (given.peer < 0) flags_ |= kAny;
}

Message::~Message() {
  if ((flags_ & kHasOutcome) != 0) delete outcome_;
}

void Message::release() noexcept {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

uint64_t Message::key() const { return key_of((flags_ & kAny) != 0 ? kNobody : peer_, mine_.root); }

const Outcome& Message::outcome() const {
  static const Outcome nothing;
  return is_open() || (flags_ & kHasOutcome) == 0 ? nothing : *outcome_;
}

// Whom it is likely to hear of next, as the engine knows it.
int Message::hot() const { return peer_ < 0 ? kNobody : port_->ranks_[peer_]; }

double Message::ended_at() const { return is_open() ? 0 : ended_; }

fl_status Message::wait(double seconds) {
  if (!is_open()) return status();
  Engine& engine = port_->engine_;
  if (seconds <= 0) {
    Engine::Lock lock(engine.mutex_, std::try_to_lock);
    if (lock.owns_lock()) engine.progress(lock, kNobody);
    return status();
  }
  {
    const Engine::Lock lock(engine.mutex_);
    flags_ |= kAwaited;
  }
  engine.wait(*port_, [this] { return !is_open(); }, hot(), deadline_after(seconds), nullptr);
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

// Ports ---------------------------------------------------------------------------------------

Port::Port(Engine& engine, uint32_t group, int rank, std::vector<int> ranks, Transport& transport)
    : engine_(engine),
      group_(group),
      rank_(rank),
      ranks_(std::move(ranks)),
      numbers_(engine.size_, -1),
      transport_(transport),
      sent_(ranks_.size()),
      answered_at_(ranks_.size()),
      arrived_(ranks_.size()),
      wanted_(ranks_.size()) {
  for (size_t i = 0; i < ranks_.size(); ++i) numbers_[ranks_[i]] = static_cast<int>(i);
  const Engine::Lock lock(engine.mutex_);
  engine.ports_[group] = this;
}

Port::~Port() { close(); }

void Port::close() {
  Engine::Lock lock(engine_.mutex_);
  if (is_closed_) return;
  is_closed_ = true;
  engine_.ports_.erase(group_);
  engine_.end_all(*this, closed_by_this_rank(), nullptr, nullptr);
  arrivals_.clear([](Arrival& arrival) { Arrival::free(&arrival); });
  engine_.wire_.wake(true);
  engine_.idle_.wait(lock, [this] { return busy_ == 0; });
}

// Why the group takes no more messages; under the engine's lock.
std::optional<Failure> Port::why_ended() const {
  if (transport_.is_broken()) return transport_.why_broken();
  if (is_closed_) return closed_by_this_rank();
  return std::nullopt;
}

// The entry of a message that has begun, and may have ended; null: it has ended well.
Message* Port::begin(const Given& given, double seconds, bool is_awaited) {
  const auto why = why_ended();
  const bool is_refused = !why && has_refusal();
  if (!why && !is_refused && given.call.verb == FL_SEND && engine_.send_now(*this, given)) return nullptr;
  auto* message = new Message(*this, given, seconds, engine_.number_of(given.site));
  if (is_awaited) message->flags_ |= Message::kAwaited;
  if (why) {
    engine_.begin(*message, why->status, outcome_of(*why));
  } else if (is_refused) {
    engine_.begin(*message, FL_MISMATCH, take_refusal());
  } else {
    engine_.begin(*message);
  }
  return unless_well(message);
}

// A message that has ended, if there is anything to fetch.
Message* Port::unless_well(Message* message) {
  if (message != nullptr && message->is_well()) std::exchange(message, nullptr)->release();
  return message;
}

Handle Port::run(const Given& given, double seconds, Interrupt interrupt) {
  Message* message;
  {
    const Engine::Lock lock(engine_.mutex_);
    message = begin(given, seconds, true);
  }
  if (message == nullptr) return nullptr;
  const bool has_limit = given.match != nullptr && given.match->patience >= 0;
  const auto until = has_limit ? deadline_after(given.match->patience) : kNever;
  engine_.wait(*this, [message] { return !message->is_open(); }, message->hot(), until, interrupt);
  if (message->is_open()) engine_.cancel(*message);
  return Handle(unless_well(message));
}

Handle Port::start(const Given& given, double seconds) {
  const Engine::Lock lock(engine_.mutex_);
  Message* const message = begin(given, seconds, false);
  if (message != nullptr && message->is_open()) engine_.ticker_.wind();
  return Handle(message);
}

Port::Posted Port::post(const fl_message* messages, int count, double seconds, int spins) {
  Posted posted(count);
  {
    const Engine::Lock lock(engine_.mutex_);
    for (int i = 0; i < count; ++i) {
      const fl_message& m = messages[i];
      posted[i] = begin({m.signature, m.data, m.peer, m.site}, seconds, true);
    }
  }
  const Patience patience{transport_.patience().spins > 0 ? std::max(spins, 0) : 0, 0};
  const int hot = count == 1 ? ranks_[messages[0].peer] : kNobody;
  const auto ended = [&] { return has_ended(posted); };
  if (!ended() && (spins < 0 || !engine_.burn(ended, patience, hot))) return posted;
  for (Message*& message : posted) message = unless_well(message);
  const auto is_nothing = [](const Message* message) { return message == nullptr; };
  return std::all_of(posted.begin(), posted.end(), is_nothing) ? Posted() : posted;
}

bool Port::has_ended(const Posted& posted) {
  const auto is_open = [](const Message* message) { return message != nullptr && message->is_open(); };
  return std::none_of(posted.begin(), posted.end(), is_open);
}

std::vector<Handle> Port::finish(const Posted& posted, Interrupt interrupt) {
  const int hot = posted.size() == 1 ? posted[0]->hot() : kNobody;
  engine_.wait(*this, [&] { return has_ended(posted); }, hot, kNever, interrupt);
  std::vector<Handle> handles;
  for (Message* message : posted) handles.emplace_back(unless_well(message));
  return handles;
}

std::vector<Handle> Port::exchange(const fl_message* messages, int count, double seconds,
                                   Interrupt interrupt) {
  const Posted posted = post(messages, count, seconds, -1);
  return posted.empty() ? std::vector<Handle>(count) : finish(posted, interrupt);
}

std::vector<Handle> Port::start_exchange(const fl_message* messages, int count, double seconds) {
  std::vector<Handle> handles(count);
  const Engine::Lock lock(engine_.mutex_);
  for (int i = 0; i < count; ++i) {
    const fl_message& m = messages[i];
    handles[i] = Handle(begin({m.signature, m.data, m.peer, m.site}, seconds, false));
  }
  if (engine_.open_ > 0) engine_.ticker_.wind();
  return handles;
}

Handle Port::refused() {
  if (!has_refusal()) return nullptr;
  const Engine::Lock lock(engine_.mutex_);
  return refusals_.empty() ? nullptr : ended(FL_MISMATCH, std::move(*take_refusal()));
}

std::unique_ptr<Outcome> Port::take_refusal() {
  auto outcome = std::make_unique<Outcome>();
  outcome->message = Mismatch().what();
  outcome->seen = std::move(refusals_.front());
  refusals_.pop_front();
  has_refusal_ = !refusals_.empty();
  return outcome;
}

// Sending -------------------------------------------------------------------------------------

Engine::Engine(Wire& wire, int size)
    : wire_(wire), size_(size), checks_at_once_(must_check_at_once()), peers_(size) {
  sites_.emplace_back();  // not known
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  stopping_ = true;
  wire_.wake(false);
  ticker_.stop();
}

uint32_t Engine::now() const {
  return static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began_).count());
}

// Callers keep their sites where they are, as a rule.
uint16_t Engine::number_of(const fl_site& site) {
  auto& [known, number] = last_sites_[reinterpret_cast<uintptr_t>(&site) / sizeof site % 16];
  if (known == &site && std::strcmp(site.text, sites_[number].text) == 0) return number;
  const auto [found, is_new] = site_numbers_.try_emplace(site.text, static_cast<uint16_t>(sites_.size()));
  if (is_new && sites_.size() > UINT16_MAX) {  // refusals say why, each in its own words
    site_numbers_.erase(found);
    return 0;
  }
  if (is_new) sites_.push_back(site);
  known = &site;
  return number = found->second;
}

// A send that need not be waited for, without an entry; false: it has to be.
bool Engine::send_now(Port& port, const Given& given) {
  const Peer& peer = peers_[port.ranks_[given.peer]];
  if (peer.waiting != nullptr || !peer.controls.empty()) return false;
  return put(port, given.call, given.peer, given.data, number_of(given.site), nullptr) == Sent::kGone;
}

// `outcome`, if there is one, of a message that has ended before it began.
void Engine::begin(Message& message, fl_status status, std::unique_ptr<Outcome> outcome) {
  message.refs_.fetch_add(1, std::memory_order_relaxed);
  open_.fetch_add(1, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (outcome != nullptr) return end(message, status, std::move(outcome));
  Port& port = *message.port_;
  if (message.sends()) {
    message.state_ = Message::kWaitsForRoom;
    queue(peers_[message.hot()], message);
    flush(message.hot());
    return;
  }
  message.state_ = Message::kPosted;
  message.mine_.sequence = ++port.posted_count_;
  Port::Arrival* found = nullptr;
  if ((message.flags_ & Message::kAny) == 0) {
    if (port.arrived_[message.peer_] > 0) found = port.arrivals_.first(message.key());
  } else {  // of all ranks in turn, from another one each time
    const int size = static_cast<int>(port.ranks_.size());
    const uint32_t first = port.searches_++;
    for (int i = 0; i < size && found == nullptr; ++i) {
      const int from = static_cast<int>((first + i) % size);
      if (port.arrived_[from] > 0) found = port.arrivals_.first(key_of(from, message.mine_.root));
    }
  }
  if (found == nullptr) return port.posted_.append(message);
  port.arrivals_.remove(*found);
  --port.arrived_[found->from()];
  deliver(message, found->from(), found->record, found->data);
  Port::Arrival::free(found);
}

// Behind those that wait for room.
void Engine::queue(Peer& peer, Message& message) {
  (peer.waiting == nullptr ? peer.waiting : peer.last_waiting->next) = &message;
  peer.last_waiting = &message;
}

// `message` may be null: then only what need not be waited for is sent.
Engine::Sent Engine::put(Port& port, const fl_signature& call, int peer, const void* data, uint16_t site,
                         Message* message) {
  const int to = port.ranks_[peer];
  Peer& known = peers_[to];
  const size_t all = bytes_of(call);
  const bool has_credit = known.charged + all + 64 <= kMostCredit;
  const bool is_whole = all <= kTinyMessage || (all <= wire_.eager_bytes() && has_credit);
  const bool waits = !is_whole || !has_credit || checks_at_once_ || is_compared(call);
  if (waits && message == nullptr) return Sent::kNot;
  const bool is_read = !is_whole && wire_.can_read(to);
  const size_t part = has_credit && !is_read ? std::min(all, wire_.eager_bytes()) : 0;
  const size_t bytes = is_whole ? all : part;
  if (!tell_site(to, site)) return Sent::kNot;
  const Wire::Room room = wire_.reserve(to, bytes > kTinyMessage ? bytes : 0);
  if (room.record == nullptr) return Sent::kNot;
  Record& record = *room.record;
  record.group = port.group_;
  record.kind = waits ? kOffer : kMessage;
  record.site = site;
  record.tag = call.root;
  record.bytes = static_cast<uint32_t>(bytes);
  record.token = waits ? message->token_ = token_for(*message) : 0;
  record.digest = digest_of(call);
  record.call = call;
  record.call.sequence = sequence_of(++port.sent_[peer]);
  record.address = is_read ? reinterpret_cast<uintptr_t>(data) : 0;
  if (bytes > kTinyMessage) {
    copy(room.data, data, bytes);
  } else if (bytes > 0) {
    std::memcpy(record.tiny, data, bytes);
  }
  known.charged += charge_of(record.kind, bytes);
  wire_.send(to, room);
  if (!waits) return Sent::kGone;
  message->mine_.sequence = record.call.sequence;
  return Sent::kOffered;
}

bool Engine::tell_site(int to, uint16_t site) {
  auto& told = peers_[to].told;
  if (site < told.size() && told[site]) return true;
  Control says{kSite};
  says.site = site;
  says.data = sites_[site].text;
  if (!put_control(to, says)) return false;
  if (told.size() <= site) told.resize(sites_.size());
  told[site] = true;
  return true;
}

void Engine::control(int to, Control control) {
  auto& controls = peers_[to].controls;
  if (!controls.empty() || !put_control(to, control)) controls.push_back(std::move(control));
}

bool Engine::put_control(int to, const Control& control) {
  const bool refuses = control.kind == kRefused || control.kind == kLateRefusal;
  if (refuses && !tell_site(to, control.site)) return false;
  const size_t bytes = control.data.size();
  const Wire::Room room = wire_.reserve(to, bytes > kTinyMessage ? bytes : 0);
  if (room.record == nullptr) return false;
  Record& record = *room.record;
  record.group = control.group;
  record.kind = control.kind;
  record.way = control.way;
  record.site = control.site;
  record.tag = control.tag;
  record.bytes = static_cast<uint32_t>(bytes);
  record.token = control.token;
  record.digest = control.amount;
  if (control.kind == kAccepted) {
    record.theirs = control.theirs;
  } else if (bytes > 0) {
    std::memcpy(bytes > kTinyMessage ? room.data : record.tiny, control.data.data(), bytes);
  }
  if (refuses) record.call = control.call;
  wire_.send(to, room);
  return true;
}

// Send what waits for room; whether anything went.
bool Engine::flush(int to) {
  Peer& peer = peers_[to];
  bool moved = false;
  while (!peer.controls.empty() && put_control(to, peer.controls.front())) {
    peer.controls.pop_front();
    moved = true;
  }
  while (peer.waiting != nullptr && peer.controls.empty()) {
    Message& message = *peer.waiting;
    const Sent sent = put(*message.port_, message.mine_, message.peer_, message.data_, message.site_, &message);
    if (sent == Sent::kNot) break;
    peer.waiting = std::exchange(message.next, nullptr);
    moved = true;
    if (sent == Sent::kGone) {
      end(message, FL_OK);
    } else {
      message.state_ = Message::kOffered;
    }
  }
  return moved;
}

// Of an accepted message as much as there is room for.
bool Engine::flow_out(Message& message) {
  Message::Movement& movement = *message.movement_;
  const size_t all = message.bytes();
  bool moved = false;
  while (movement.done < all) {
    // Several pieces even of what would fit one, so that filling and draining overlap.
    const size_t part = std::min(std::max(kLeastPiece, all / 4), wire_.most_bytes());
    const size_t piece = std::min(part, all - movement.done);
    const Wire::Room room = wire_.reserve(movement.from, piece > kTinyMessage ? piece : 0);
    if (room.record == nullptr) return moved;
    Record& record = *room.record;
    record.group = message.port_->group_;
    record.kind = kData;
    record.bytes = static_cast<uint32_t>(piece);
    record.token = movement.offer.theirs;
    char* const into = piece > kTinyMessage ? room.data : record.tiny;
    (movement.offer.way == kThroughCaches ? copy : stream_copy)(into, message.data_ + movement.done, piece);
    wire_.send(movement.from, room);
    movement.done += piece;
    message.since_ = now();
    moved = true;
  }
  end(message, FL_OK);
  return true;
}

// Receiving -----------------------------------------------------------------------------------

// Do what can be done; from rank `hot`, if there is one, most often. Whether anything was.
bool Engine::progress(Lock& lock, int hot) {
  bool moved = hot != kNobody && read_records(hot);
  if (hot == kNobody || moved || ++passes_ % 8 == 0) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != hot && read_records(peer)) moved = true;
      Peer& known = peers_[peer];
      if ((known.waiting != nullptr || !known.controls.empty()) && flush(peer)) moved = true;
    }
  }
  for (size_t i = 0; i < moving_.size(); ++i) {
    Message& message = *moving_[i];
    if (message.movement_->is_busy) continue;
    if (message.state_ == Message::kFlowsOut) {
      const size_t before = moving_.size();
      if (flow_out(message)) moved = true;
      if (moving_.size() < before) --i;
    } else {
      read_on(message, lock);
      return true;  // the list may be another by now
    }
  }
  return moved;
}

bool Engine::read_records(int from) {
  bool moved = false;
  for (Wire::Room room = wire_.next(from); room.record != nullptr; room = wire_.next(from)) {
    handle(from, *room.record, room.data);
    wire_.drop(from);
    moved = true;
  }
  return moved;
}

void Engine::handle(int from, const Record& record, const char* data) {
  switch (record.kind) {
    case kMessage:
    case kOffer: return arrive(from, record, data);
    case kTaken:
    case kAccepted:
    case kRefused: return answered(from, record);
    case kData: return receive_data(record, data_of(record, data));
    case kCredit: peers_[from].charged -= record.digest; return;
    case kSite: {
      fl_site& site = peers_[from].sites[record.site];
      const size_t bytes = std::min<size_t>(record.bytes, sizeof site.text - 1);
      std::memcpy(site.text, data_of(record, data), bytes);
      site.text[bytes] = '\0';
      return;
    }
    case kLateRefusal:
    case kWanted: break;
  }
  const auto found = ports_.find(record.group);
  if (found == ports_.end()) return;
  Port& port = *found->second;
  if (record.kind == kWanted) {
    auto& wanted = port.wanted_[port.numbers_[from]];
    if (wanted.size() < kMostWanted) wanted.push_back(record.tag);
    return;
  }
  // What this rank has sent comes back with it.
  Seen seen;
  seen.reset(static_cast<int>(port.ranks_.size()));
  const int peer = port.numbers_[from];
  seen.calls[peer] = record.call;
  seen.sites[peer] = site_of(from, record.site);
  std::memcpy(&seen.calls[port.rank_], data, sizeof(fl_signature));
  const size_t mine = std::min<size_t>(static_cast<uint16_t>(record.token), sites_.size() - 1);
  seen.sites[port.rank_] = sites_[mine];
  port.refusals_.push_back(std::move(seen));
  port.has_refusal_ = true;
}

// A message for whoever has first posted a receive of it, or to be kept.
void Engine::arrive(int from, const Record& record, const char* data) {
  const auto found = ports_.find(record.group);
  if (found == ports_.end()) return;  // a group that this rank has left
  Port& port = *found->second;
  const int peer = port.numbers_[from];
  Message* named = port.posted_.first(key_of(peer, record.tag));
  Message* any = port.posted_.first(key_of(kNobody, record.tag));
  Message* const first =
      named == nullptr || (any != nullptr && any->mine_.sequence < named->mine_.sequence) ? any : named;
  if (first == nullptr) {
    port.arrivals_.append(*Port::Arrival::make(peer, record, data));
    ++port.arrived_[peer];
    return;
  }
  port.posted_.remove(*first);
  if (Message* const next = port.posted_.first(first->key())) next->since_ = now();
  deliver(*first, peer, record, data);
}

void Engine::credit(int from, size_t bytes) {
  Peer& peer = peers_[from];
  peer.owed += bytes;
  if (peer.owed < kMostCredit / 4) return;
  Control says{kCredit};
  says.amount = std::exchange(peer.owed, 0);
  control(from, says);
}

// `from` is its rank in the group. What comes with the record, or all there is to know, is here.
void Engine::deliver(Message& message, int from, const Record& record, const char* data) {
  Port& port = *message.port_;
  const int source = port.ranks_[from];
  fl_match* const match = std::exchange(message.match_, nullptr);
  message.peer_ = from;
  if (match != nullptr && match->partial != 0) message.mine_ = fitted(message.mine_, record.call);
  if (match != nullptr) {
    match->source = from;
    match->rows = message.mine_.ndim > 0 ? message.mine_.shape[0] : 1;
  }
  const bool is_offer = record.kind == kOffer;
  credit(source, charge_of(record.kind, record.bytes));
  if (record.digest != digest_of(message.mine_) && !same_message(message.mine_, record.call)) {
    return refuse(message, from, record);
  }
  const size_t all = message.bytes();
  if (record.bytes > kTinyMessage) {
    copy(message.data_, data, record.bytes);
  } else if (record.bytes > 0) {
    std::memcpy(message.data_, record.tiny, record.bytes);
  }
  if (record.bytes < all) {
    message.movement_ = new Message::Movement(record, source);
    return take_rest(message);
  }
  if (is_offer) {
    Control taken{kTaken};
    taken.token = record.token;
    taken.call.sequence = record.call.sequence;
    control(source, taken);
  }
  if (!is_compared(message.mine_)) return end(message, FL_OK);
  message.mine_.sequence = record.call.sequence;
  auto outcome = std::make_unique<Outcome>();
  outcome->seen = seen(message, from, record.call, site_of(source, record.site));
  outcome->output = make_bytes(0);
  end(message, FL_OK, std::move(outcome));
}

// The ends have called different things: tell the other one.
void Engine::refuse(Message& message, int from, const Record& record) {
  Port& port = *message.port_;
  Control says{record.kind == kOffer ? kRefused : kLateRefusal, port.group_, record.tag};
  says.token = record.kind == kOffer ? record.token : record.site;
  says.call = message.mine_;
  says.call.sequence = record.call.sequence;
  says.site = message.site_;
  if (record.kind != kOffer) {
    says.data.assign(reinterpret_cast<const char*>(&record.call), sizeof record.call);
  }
  message.mine_.sequence = record.call.sequence;
  const int source = port.ranks_[from];
  auto outcome = std::make_unique<Outcome>();
  outcome->message = Mismatch().what();
  outcome->seen = seen(message, from, record.call, site_of(source, record.site));
  control(source, std::move(says));
  end(message, FL_MISMATCH, std::move(outcome));
}

// Read what did not come with the offer, or let it flow.
void Engine::take_rest(Message& message) {
  Message::Movement& movement = *message.movement_;
  const int from = movement.from;
  Choice& choice = wire_.choice(from);
  const bool can_read = movement.offer.address != 0 && wire_.can_read(from);
  movement.done = movement.offer.bytes;
  Choice::Slowest slowest;
  slowest.add(choice.costs(0, message.bytes()));
  movement.trial = choice.begin(0, message.bytes(), can_read ? kWays : kDirectly, slowest);
  if (movement.trial.way == kDirectly) {
    message.state_ = Message::kReads;
    moving_.push_back(&message);
    return;
  }
  message.state_ = Message::kFlowsIn;
  Control accepted{kAccepted};
  accepted.token = movement.offer.token;
  accepted.theirs = token_for(message);
  accepted.amount = movement.done;
  accepted.way = static_cast<uint8_t>(movement.trial.way);
  movement.token = accepted.theirs;
  control(from, accepted);
}

// The lock is let go meanwhile.
void Engine::read_on(Message& message, Lock& lock) {
  Message::Movement& movement = *message.movement_;
  Port& port = *message.port_;
  const size_t all = message.bytes(), size = std::min(kReadAtOnce, all - movement.done);
  movement.is_busy = true;
  ++port.busy_;
  lock.unlock();
  const uint64_t address = movement.offer.address + movement.done;
  const size_t got = wire_.read(movement.from, address, message.data_ + movement.done, size);
  const bool is_void = port.transport_.has_given_up(port.numbers_[movement.from]);
  lock.lock();
  movement.is_busy = false;
  if (--port.busy_ == 0 && port.is_closed_) idle_.notify_all();
  movement.done += got;
  message.since_ = now();
  if (const auto why = port.why_ended()) {
    end(message, why->status, outcome_of(*why));
  } else if (is_void) {  // what was read may be anything; whoever looks around finds why
    movement.done = 0;
    drop_moving(message);
  } else if (got < size) {  // the system does not let it be read, after all
    drop_moving(message);
    take_rest(message);
  } else if (movement.done == all) {
    wire_.choice(movement.from).end(movement.trial);
    Control taken{kTaken};
    taken.token = movement.offer.token;
    control(movement.from, taken);
    end(message, FL_OK);
  }
}

void Engine::receive_data(const Record& record, const char* data) {
  Message* const message = by_token(record.token);
  if (message == nullptr) return;  // it has failed meanwhile
  Message::Movement& movement = *message->movement_;
  const size_t all = message->bytes();
  if (record.bytes > all - movement.done) return;
  if (movement.done == movement.offer.bytes) movement.trial.started = Clock::now();
  copy(message->data_ + movement.done, data, record.bytes);
  movement.done += record.bytes;
  message->since_ = now();
  if (movement.done < all) return;
  wire_.choice(movement.from).end(movement.trial);
  end(*message, FL_OK);
}

// An offer of this rank.
void Engine::answered(int from, const Record& record) {
  Message* const message = by_token(record.token);
  if (message == nullptr) return;
  free_token(record.token);
  message->port_->answered_at_[message->peer_] = message->since_ = now();
  if (record.kind == kAccepted) {
    message->state_ = Message::kFlowsOut;
    message->movement_ = new Message::Movement(record, from);
    message->movement_->done = record.digest;  // came with the offer
    moving_.push_back(message);
    return;
  }
  const Port& port = *message->port_;
  const bool is_refused = record.kind == kRefused;
  if (!is_refused && !is_compared(message->mine_)) return end(*message, FL_OK);
  auto outcome = std::make_unique<Outcome>();
  if (is_refused) outcome->message = Mismatch().what();
  const fl_signature& theirs = is_refused ? record.call : message->mine_;
  outcome->seen = seen(*message, port.numbers_[from], theirs, site_of(from, record.site));
  if (!is_refused) outcome->output = make_bytes(0);
  end(*message, is_refused ? FL_MISMATCH : FL_OK, std::move(outcome));
}

// Ends ----------------------------------------------------------------------------------------

uint32_t Engine::token_for(Message& message) {
  if (free_tokens_.empty()) {
    if (tokens_.size() >= kTokens) throw Failure(FL_FAILED, {}, "too many messages are open");
    tokens_.emplace_back(0, nullptr);
    free_tokens_.push_back(static_cast<uint32_t>(tokens_.size()) - 1);
  }
  const uint32_t place = free_tokens_.back();
  free_tokens_.pop_back();
  auto& [uses, holder] = tokens_[place];
  holder = &message;
  // Never 0, and another one for each use: late answers to a message that has failed find nobody.
  return (++uses << kTokenBits | place) + 1;
}

Message* Engine::by_token(uint32_t token) {
  const uint32_t place = (token - 1) & kTokens;
  if (token == 0 || place >= tokens_.size()) return nullptr;
  const auto& [uses, message] = tokens_[place];
  return (uses << kTokenBits | place) + 1 == token ? message : nullptr;
}

void Engine::free_token(uint32_t token) {
  const uint32_t place = (token - 1) & kTokens;
  tokens_[place].second = nullptr;
  free_tokens_.push_back(place);
}

void Engine::drop_moving(Message& message) {
  moving_.erase(std::remove(moving_.begin(), moving_.end(), &message), moving_.end());
}

// It is in no table or queue any more, but may move. The last thing that is done with it.
void Engine::end(Message& message, fl_status status, std::unique_ptr<Outcome> outcome) {
  if (message.state_ == Message::kFlowsIn) free_token(message.movement_->token);
  if (message.is_moving()) {
    drop_moving(message);
    delete message.movement_;
  }
  message.match_ = nullptr;
  message.state_ = Message::kOver;
  if (outcome != nullptr) {
    message.outcome_ = outcome.release();
    message.flags_ |= Message::kHasOutcome;
  }
  message.ended_ = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  if (message.stamp_ != nullptr) {
    const int64_t running = __atomic_load_n(message.stamp_, __ATOMIC_RELAXED);
    if (static_cast<uint32_t>(running) == message.running_) fl_stamp(message.stamp_, running);
  }
  open_.fetch_sub(1, std::memory_order_relaxed);
  message.status_.store(static_cast<uint8_t>(status), std::memory_order_release);
  if (callers_.load(std::memory_order_relaxed) > 0) wire_.wake(true);
  message.release();
}

// All that is open in `port`: take each message out of where it waits, and visit it.
template <typename Visit>
void Engine::take_all(Port& port, Visit visit) {
  port.posted_.clear(visit);
  for (Peer& peer : peers_) {
    Message* message = std::exchange(peer.waiting, nullptr);
    while (message != nullptr) {
      Message& one = *std::exchange(message, message->next);
      one.next = nullptr;
      one.port_ == &port ? visit(one) : queue(peer, one);
    }
  }
  for (auto& [uses, holder] : tokens_) {
    if (holder == nullptr || holder->port_ != &port || holder->state_ != Message::kOffered) continue;
    Message& one = *holder;
    free_token(one.token_);
    visit(one);
  }
  for (auto& [uses, holder] : tokens_) {
    if (holder != nullptr && holder->port_ == &port) visit(*holder);
  }
  const auto moving = moving_;
  for (Message* message : moving) {
    // A thread that reads finds out when it has done so.
    if (message->port_ == &port && !message->movement_->is_busy) visit(*message);
  }
}

template <typename Visit>
void Engine::for_each(const Port& port, Visit visit) const {
  const auto visit_own = [&](Message* message) {
    if (message != nullptr && message->port_ == &port) visit(*message);
  };
  port.posted_.for_each(visit);
  for (const Peer& peer : peers_) {
    for (Message* message = peer.waiting; message != nullptr; message = message->next) visit_own(message);
  }
  for (const auto& [uses, message] : tokens_) visit_own(message);
  for (Message* message : moving_) visit_own(message);
}

// End all that is open in a group, which has ended: `about` it was found, and what waits for the ranks that
// are missing says the same.
void Engine::end_all(Port& port, const Failure& why, const Failure* found, const Message* about) {
  take_all(port, [&](Message& message) {
    const auto waits_for = [&](int rank) { return rank == message.peer_ || message.peer_ < 0; };
    const bool concerns =
        found != nullptr && (&message == about || (found->status != FL_TIMEOUT &&
                                                   std::any_of(found->missing.begin(), found->missing.end(), waits_for)));
    const Failure& failure = concerns ? *found : why;
    end(message, failure.status, outcome_of(failure));
  });
}

// A receive that nothing has come for in time: all is well, and its source is nobody.
void Engine::cancel(Message& message) {
  const Lock lock(mutex_);
  if (message.state_ != Message::kPosted) return;
  message.port_->posted_.remove(message);
  end(message, FL_OK);
}

Seen Engine::seen(const Message& message, int from, const fl_signature& theirs, const fl_site& site) {
  const Port& port = *message.port_;
  Seen seen;
  seen.reset(static_cast<int>(port.ranks_.size()));
  seen.calls[port.rank_] = message.mine_;
  seen.sites[port.rank_] = sites_[message.site_];
  seen.calls[from] = theirs;
  seen.sites[from] = site;
  return seen;
}

const fl_site& Engine::site_of(int from, uint16_t number) const {
  const auto found = peers_[from].sites.find(number);
  return found == peers_[from].sites.end() ? sites_[0] : found->second;
}


// Waiting -------------------------------------------------------------------------------------

// Without going to sleep; whether it is done.
template <typename Done>
bool Engine::burn(Done done, Patience patience, int hot) {
  for (int look = 0; look <= patience.spins + patience.yields; ++look) {
    bool moved = false;
    {
      Lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock()) moved = progress(lock, hot);
    }
    if (done()) return true;
    if (moved) look = -1;
    look < patience.spins ? pause_after(look) : static_cast<void>(sched_yield());
  }
  return false;
}

// Until it is done, or `until`. What fails ends the messages of its group.
template <typename Done>
void Engine::wait(Port& port, Done done, int hot, Clock::time_point until, Port::Interrupt interrupt) {
  if (burn(done, port.transport_.patience(), hot)) return;
  const struct Caller {
    Engine& engine;
    explicit Caller(Engine& engine) : engine(engine) { ++engine.callers_; }
    ~Caller() {
      if (--engine.callers_ == 0 && engine.open_ > 0) engine.ticker_.wind();
    }
  } caller{*this};
  do {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left < 0 || sleep(true, std::min<long>(kSliceMilliseconds, left + 1), done)) continue;
    if (interrupt != nullptr && interrupt() != 0) {
      fail(port, {FL_CLOSED, {}, "a signal handler interrupted the operation"}, nullptr);
    }
    look_around();
  } while (!burn(done, port.transport_.patience(), hot) && Clock::now() < until);
}

// Until something has come, or for a while; whether anything went on.
template <typename Done>
bool Engine::sleep(bool as_caller, long milliseconds, Done done) {
  const uint32_t since = wire_.begin_wait();
  bool moved;
  {
    Lock lock(mutex_);
    moved = progress(lock, kNobody);
  }
  if (!moved && !done()) wire_.wait(since, as_caller, milliseconds);
  wire_.end_wait();
  return moved;
}

// The thread's part. What callers come for again and again they see to themselves.
void Engine::tick() {
  if (open_ == 0) return;
  ticker_.wind();
  const bool is_attended = callers_ > 0 || std::exchange(calls_seen_, calls_.load()) != calls_;
  const auto is_relieved = [this] { return stopping_ || callers_ > 0 || open_ == 0; };
  while (!is_attended && !is_relieved()) {
    if (!sleep(false, kSliceMilliseconds, is_relieved)) look_around();
  }
}

// Find what will never end, and end it. What has come until now counts more.
void Engine::look_around() {
  std::vector<Verdict> found;
  {
    Lock lock(mutex_);
    for (const auto& [group, port] : ports_) find_failures(*port, found);
    if (found.empty()) return;
    progress(lock, kNobody);
    const auto is_over = [](const Verdict& verdict) {
      return verdict.message != nullptr && verdict.message->state_ != verdict.state;
    };
    const auto rest = std::stable_partition(found.begin(), found.end(), [&](const Verdict& v) { return !is_over(v); });
    for (auto over = rest; over != found.end(); ++over) over->message->release();
    found.erase(rest, found.end());
    for (const Verdict& verdict : found) ++verdict.port->busy_;
  }
  for (const Verdict& verdict : found) {
    fail(*verdict.port, verdict.failure, verdict.message);
    if (verdict.message != nullptr) verdict.message->release();
    const Lock lock(mutex_);
    if (--verdict.port->busy_ == 0) idle_.notify_all();
  }
}

void Engine::fail(Port& port, const Failure& failure, const Message* about) {
  port.transport_.fail(failure);  // it may take its time to tell others
  const Lock lock(mutex_);
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
    if (found.size() > before) return;
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
      return report({FL_TIMEOUT, peers, what_keeps(message)});
    }
    if (is_posted && is_first && message.peer_ >= 0 && waited > kLongWait) announce(message);
  });
}

// Let the sender know what this rank waits for.
void Engine::announce(Message& message) {
  if ((message.flags_ & Message::kAnnounced) != 0) return;
  message.flags_ |= Message::kAnnounced;
  control(message.hot(), {kWanted, message.port_->group_, message.mine_.root});
}

std::string Engine::what_keeps(const Message& message) const {
  constexpr size_t kShown = 4;
  const Port& port = *message.port_;
  const std::string here = std::string("this rank ") + (message.sends() ? "sends" : "receives") +
                           " with tag " + std::to_string(message.mine_.root);
  if (message.is_moving()) return "the message stopped half way, " + here;
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
  return text + here;
}

}  // namespace fl
