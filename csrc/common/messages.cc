// Sending and receiving of messages between ranks.

#include "copying.h"
#include "engine.h"

namespace fl {
namespace {

// kMostCredit: maximum bytes of a sender that a peer buffers before its program receives them. kReadAtOnce:
// maximum bytes of one read from a sender's memory. kLeastPiece: minimum bytes of a chunk.
constexpr size_t kMostCredit = sized(1 << 20, 512);
constexpr size_t kReadAtOnce = sized(4 << 20, 128), kLeastPiece = sized(8 << 10, 64);
constexpr size_t kMostWanted = 16;
enum { kRest, kAtOnce };  // verbs of Wire::choice(): the rest of an offered message; data of a record
// Seconds per byte that a copy takes longer if the sender has streamed the data to memory.
constexpr double kReadFromMemory = 80e-12;

size_t bytes_of(const fl_signature& call) { return static_cast<size_t>(call.count) * call.itemsize; }

// Return a 64-bit digest of the fields that same_call() compares, except the tag. If same_message() accepts
// two signatures, their digests are equal. Otherwise they almost certainly differ.
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
  for (int d = 0; d < std::min(s.ndim, FL_DIMENSIONS); ++d) add(static_cast<uint64_t>(s.shape[d]));
  return digest;
}

// Return the bytes of a record that the receiver buffers and that count towards kMostCredit.
size_t charge_of(Kind kind, size_t bytes) {
  return kind == kMessage || bytes > kTinyMessage ? bytes + 64 : 0;
}

void copy_by(int path, void* to, const void* from, size_t bytes) {
  (path == kThroughCaches ? copy : stream_copy)(to, from, bytes);
}

const char* data_of(const Record& record, const char* data) {
  return record.bytes > kTinyMessage ? data : record.tiny;
}

}  // namespace

// Send a message without a Message object, if no caller must wait for it. Return false if it was not sent.
bool Engine::send_now(Port& port, const fl_message& request) {
  const Peer& peer = peers_[port.ranks_[request.peer]];
  if (peer.waiting != nullptr || !peer.controls.empty()) return false;
  return put(port, request.signature, request.peer, request.data, site_number(request.site), nullptr) == Sent::kGone;
}

// Begin a message. If there is an `outcome`, end the message with it.
void Engine::begin(Message& message, fl_status status, std::unique_ptr<Outcome> outcome) {
  message.refs_.fetch_add(1, std::memory_order_relaxed);
  open_.fetch_add(1, std::memory_order_relaxed);
  ++message.port_->open_;
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (outcome != nullptr) return end(message, status, std::move(outcome));
  Port& port = *message.port_;
  if (message.sends()) {
    message.state_ = Message::kWaitsForRoom;
    queue(peers_[message.hint()], message);
    flush(message.hint());
    return;
  }
  message.state_ = Message::kPosted;
  message.call_.sequence = ++port.posted_count_;
  Port::Arrival* found = nullptr;
  if ((message.flags_ & Message::kAny) == 0) {
    if (port.arrived_[message.peer_] > 0) found = port.arrivals_.first(message.key());
  } else {  // each receive from any rank begins its search with another rank
    const int size = static_cast<int>(port.ranks_.size());
    const uint32_t first = port.searches_++;
    for (int i = 0; i < size && found == nullptr; ++i) {
      const int from = static_cast<int>((first + i) % size);
      if (port.arrived_[from] > 0) found = port.arrivals_.first(key_of(from, message.call_.root));
    }
  }
  if (found == nullptr) return port.posted_.append(message);
  if (!claim(message)) return end(message, FL_OK);
  port.arrivals_.remove(*found);
  --port.arrived_[found->from()];
  deliver(message, found->from(), found->record, found->data);
  Port::Arrival::free(found);
}

void Engine::queue(Peer& peer, Message& message) {
  (peer.waiting == nullptr ? peer.waiting : peer.last_waiting->next) = &message;
  peer.last_waiting = &message;
}

// Send a message. If `message` is null, send it only if its caller need not wait for an answer.
Engine::Sent Engine::put(Port& port, const fl_signature& call, int peer, const void* data, uint16_t site,
                         Message* message) {
  const int to = port.ranks_[peer];
  Peer& state = peers_[to];
  const size_t all = bytes_of(call);
  const bool has_credit = state.charged + all + 64 <= kMostCredit;
  const bool is_whole = all <= kTinyMessage || (all <= wire_.eager_bytes() && has_credit);
  const bool waits = !is_whole || !has_credit || checks_at_once_ || is_compared(call) ||
                     port.transport_.has_given_up(peer);  // only a wait reports that failure
  if (waits && message == nullptr) return Sent::kNot;
  const bool is_read = !is_whole && wire_.can_read(to);
  const size_t part = has_credit && !is_read ? std::min(all, wire_.eager_bytes()) : 0;
  const size_t bytes = is_whole ? all : part;
  if (!send_site(to, site)) return Sent::kNot;
  Wire::Room room = wire_.reserve(to, bytes > kTinyMessage ? bytes : 0);
  if (room.record == nullptr) return Sent::kNot;
  Record& record = *room.record;
  room.group = port.group_;
  record.kind = waits ? kOffer : kMessage;
  record.site = site;
  record.tag = call.root;
  record.bytes = static_cast<uint32_t>(bytes);
  record.token = waits ? message->token_ = token_for(*message) : 0;
  record.digest = digest_of(call);
  record.call = call;
  const uint64_t sequence = record.call.sequence = sequence_of(++port.sent_[peer]);
  record.address = is_read ? reinterpret_cast<uintptr_t>(data) : 0;
  // If this rank does not wait for the answer, the receiver must not request chunks.
  record.path = waits && (message->flags_ & Message::kAwaited) != 0 ? kPaths : kDirectly;
  Choice* const choice = bytes >= kStreamBytes ? wire_.choice(to) : nullptr;
  Choice::Trial trial;
  if (choice != nullptr) trial = choice->begin_alone(kAtOnce, bytes, kDirectly);
  if (bytes > 0) copy_by(trial.path, bytes > kTinyMessage ? room.data : record.tiny, data, bytes);
  state.charged += charge_of(record.kind, bytes);
  wire_.send(to, room);  // the receiver owns the record from here on
  if (choice != nullptr) choice->end(trial, trial.path == kPastCaches ? kReadFromMemory : 0);
  if (!waits) return Sent::kGone;
  message->call_.sequence = sequence;
  return Sent::kOffered;
}

bool Engine::send_site(int to, uint16_t site) {
  auto& sent_sites = peers_[to].sent_sites;
  if (site < sent_sites.size() && sent_sites[site]) return true;
  Control says{kSite};
  says.site = site;
  says.data = sites_[site].text;
  if (!put_control(to, says)) return false;
  if (sent_sites.size() <= site) sent_sites.resize(sites_.size());
  sent_sites[site] = true;
  return true;
}

void Engine::control(int to, Control control) {
  auto& controls = peers_[to].controls;
  if (controls.empty() && put_control(to, control)) return;
  controls.push_back(std::move(control));
  open_.fetch_add(1, std::memory_order_relaxed);
  ticker_.activate();  // its thread sends the control if no caller waits here
}

bool Engine::put_control(int to, const Control& control) {
  const bool refuses = control.kind == kRefused || control.kind == kLateRefusal;
  if (refuses && !send_site(to, control.site)) return false;
  const size_t bytes = control.data.size();
  Wire::Room room = wire_.reserve(to, bytes > kTinyMessage ? bytes : 0);
  if (room.record == nullptr) return false;
  Record& record = *room.record;
  room.group = control.group;
  record.kind = control.kind;
  record.path = control.path;
  record.site = control.site;
  record.tag = control.tag;
  record.bytes = static_cast<uint32_t>(bytes);
  record.token = control.token;
  record.digest = control.amount;
  if (control.kind == kAccepted) {
    record.receiver_token = control.receiver_token;
  } else if (bytes > 0) {
    std::memcpy(bytes > kTinyMessage ? room.data : record.tiny, control.data.data(), bytes);
  }
  if (refuses) record.call = control.call;
  wire_.send(to, room);
  return true;
}

// Send queued controls and messages to `to` while there is space. Return whether anything was sent.
bool Engine::flush(int to) {
  Peer& peer = peers_[to];
  bool moved = false;
  while (!peer.controls.empty() && put_control(to, peer.controls.front())) {
    peer.controls.pop_front();
    open_.fetch_sub(1, std::memory_order_relaxed);
    moved = true;
  }
  while (peer.waiting != nullptr && peer.controls.empty()) {
    Message& message = *peer.waiting;
    const Sent sent = put(*message.port_, message.call_, message.peer_, message.data_, message.site_, &message);
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

bool Engine::flow_out(Message& message) {
  Message::Movement& movement = *message.movement_;
  const size_t all = message.bytes();
  bool moved = false;
  while (movement.done < all) {
    // At least four chunks: the receiver copies one chunk out while the sender copies another in.
    const size_t part = std::min(std::max(kLeastPiece, all / 4), wire_.most_bytes());
    const size_t piece = std::min(part, all - movement.done);
    Wire::Room room = wire_.reserve(movement.from, piece > kTinyMessage ? piece : 0);
    if (room.record == nullptr) return moved;
    Record& record = *room.record;
    room.group = message.port_->group_;
    record.kind = kData;
    record.bytes = static_cast<uint32_t>(piece);
    record.token = movement.offer.receiver_token;
    char* const into = piece > kTinyMessage ? room.data : record.tiny;
    copy_by(movement.offer.path, into, message.data_ + movement.done, piece);
    wire_.send(movement.from, room);
    movement.done += piece;
    message.since_ = now();
    moved = true;
  }
  end(message, FL_OK);
  return true;
}

// Handle arrived records, usually only from rank `hint`, and continue transfers. True if there was progress.
bool Engine::progress(Lock& lock, int hint) {
  bool moved = hint != kNoPeer && read_records(hint);
  if (hint == kNoPeer || moved || ++passes_ % 8 == 0) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != hint && read_records(peer)) moved = true;
      Peer& state = peers_[peer];
      if ((state.waiting != nullptr || !state.controls.empty()) && flush(peer)) moved = true;
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
      read_chunk(message, lock);
      return true;  // moving_ may have changed
    }
  }
  return moved;
}

bool Engine::read_records(int from) {
  bool moved = false;
  for (Wire::Room room = wire_.next(from); room.record != nullptr; room = wire_.next(from)) {
    handle(from, room);
    wire_.drop(from);
    moved = true;
  }
  return moved;
}

void Engine::handle(int from, const Wire::Room& room) {
  const Record& record = *room.record;
  const char* const data = room.data;
  switch (record.kind) {
    case kMessage:
    case kOffer: return arrive(from, room);
    case kTaken:
    case kAccepted:
    case kRefused: return handle_answer(from, record);
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
  const auto found = ports_.find(room.group);
  if (found == ports_.end()) return;
  Port& port = *found->second;
  if (record.kind == kWanted) {
    auto& wanted = port.wanted_[port.numbers_[from]];
    if (wanted.size() < kMostWanted) wanted.push_back(record.tag);
    return;
  }
  // A kLateRefusal record: `call` is the peer's differing call, and the data is the call of this rank.
  CallReport report;
  report.reset(static_cast<int>(port.ranks_.size()));
  report.ago = 1;
  const int peer = port.numbers_[from];
  report.calls[peer] = record.call;
  report.sites[peer] = site_of(from, record.site);
  std::memcpy(&report.calls[port.rank_], data, sizeof(fl_signature));
  const size_t own_site = std::min<size_t>(static_cast<uint16_t>(record.token), sites_.size() - 1);
  report.sites[port.rank_] = sites_[own_site];
  if (report.calls[port.rank_].ndim == FL_REFUSED) return;  // this rank has raised already
  port.refusals_.push_back(std::move(report));
  port.has_refusal_.store(true, std::memory_order_relaxed);
}

void Engine::arrive(int from, const Wire::Room& room) {
  const auto found = ports_.find(room.group);
  if (found != ports_.end()) return arrive(*found->second, from, *room.record, room.data);
  Port::Arrival* const arrival = Port::Arrival::make(from, *room.record, room.data);
  room.group == Wire::kLeft ? return_credit(from, *arrival) : early_[room.group].push_back(arrival);
}

// Deliver a message to the oldest matching receive, or keep it.
void Engine::arrive(Port& port, int from, const Record& record, const char* data) {
  const int peer = port.numbers_[from];
  Message* const first = take_receive(port, peer, record.tag);
  if (first == nullptr) {
    port.arrivals_.append(*Port::Arrival::make(peer, record, data));
    ++port.arrived_[peer];
    return;
  }
  deliver(*first, peer, record, data);
}

Message* Engine::take_receive(Port& port, int peer, int32_t tag) {
  for (;;) {
    Message* const named = port.posted_.first(key_of(peer, tag));
    Message* const any = port.posted_.first(key_of(kNoPeer, tag));
    const bool is_any = named == nullptr || (any != nullptr && any->call_.sequence < named->call_.sequence);
    Message* const first = is_any ? any : named;
    if (first == nullptr) return nullptr;
    port.posted_.remove(*first);
    if (Message* const next = port.posted_.first(first->key())) next->since_ = now();
    if (claim(*first)) return first;
    end(*first, FL_OK);
  }
}

// Take the claim that `message` shares with other receives. Return false if another receive has taken it.
bool Engine::claim(const Message& message) {
  int32_t* const shared = message.match_ == nullptr ? nullptr : message.match_->claim;
  if (shared == nullptr) return true;
  if (__atomic_exchange_n(shared, 1, __ATOMIC_RELAXED) != 0) return false;  // relaxed: it guards no memory
  futex_wake(shared, kAllBits, FutexScope::kThreads);
  return true;
}

void Engine::credit(int from, size_t bytes) {
  Peer& peer = peers_[from];
  peer.owed += bytes;
  if (peer.owed < kMostCredit / 4) return;
  Control says{kCredit};
  says.amount = std::exchange(peer.owed, 0);
  control(from, says);
}

// Free a message that no receive will match, and return its credit to the sender.
void Engine::return_credit(int from, Port::Arrival& arrival) {
  credit(from, charge_of(arrival.record.kind, arrival.record.bytes));
  Port::Arrival::free(&arrival);
}

void Engine::forget(uint64_t group) {
  Lock lock(mutex_);
  progress(lock, kNoPeer);
  wire_.forget(group);
  const auto early = early_.find(group);
  if (early == early_.end()) return;
  for (Port::Arrival* arrival : early->second) return_credit(arrival->from(), *arrival);
  early_.erase(early);
}

// Match the receive `message` with a record from group rank `from`, and copy the record's data to its array.
void Engine::deliver(Message& message, int from, const Record& record, const char* data) {
  Port& port = *message.port_;
  const int source = port.ranks_[from];
  fl_match* const match = std::exchange(message.match_, nullptr);
  message.peer_ = from;
  if (match != nullptr && match->partial != 0) message.call_ = fitted(message.call_, record.call);
  if (match != nullptr) {
    match->source = from;
    match->rows = message.call_.ndim > 0 ? message.call_.shape[0] : 1;
  }
  const bool is_offer = record.kind == kOffer;
  credit(source, charge_of(record.kind, record.bytes));
  if (record.digest != digest_of(message.call_) && !same_message(message.call_, record.call)) {
    return refuse(message, from, record);
  }
  const size_t all = message.bytes();
  if (record.bytes > 0) copy(message.data_, data_of(record, data), record.bytes);
  if (record.bytes < all) {
    message.movement_ = new Message::Movement(record, source);
    return receive_rest(message);
  }
  if (is_offer) control(source, {kTaken, port.group_, 0, record.token});
  if (!is_compared(message.call_)) return end(message, FL_OK);
  message.call_.sequence = record.call.sequence;
  end_compared(message, FL_OK, from, record.call, record.site);
}

// Notify the sender of a mismatch, and end the receive.
void Engine::refuse(Message& message, int from, const Record& record) {
  Port& port = *message.port_;
  Control says{record.kind == kOffer ? kRefused : kLateRefusal, port.group_, record.tag};
  says.token = record.kind == kOffer ? record.token : record.site;
  says.call = message.call_;
  says.call.sequence = record.call.sequence;
  says.site = message.site_;
  if (record.kind != kOffer) {
    says.data.assign(reinterpret_cast<const char*>(&record.call), sizeof record.call);
  }
  message.call_.sequence = record.call.sequence;
  control(port.ranks_[from], std::move(says));
  end_compared(message, FL_MISMATCH, from, record.call, record.site);
}

// End a message with the signatures and sites of both ends as its outcome.
void Engine::end_compared(Message& message, fl_status status, int from, const fl_signature& peer_call,
                          uint16_t site) {
  const Port& port = *message.port_;
  auto outcome = std::make_unique<Outcome>();
  CallReport& report = outcome->report;
  report.reset(static_cast<int>(port.ranks_.size()));
  report.calls[port.rank_] = message.call_;
  report.sites[port.rank_] = sites_[message.site_];
  report.calls[from] = peer_call;
  report.sites[from] = site_of(port.ranks_[from], site);
  if (status == FL_OK) {
    outcome->output = make_bytes(0);
  } else {
    outcome->message = Mismatch().what();
  }
  end(message, status, std::move(outcome));
}

// Receive the data that was not in the offer: read it from the sender's memory, or request it.
void Engine::receive_rest(Message& message) {
  Message::Movement& movement = *message.movement_;
  const int from = movement.from;
  const bool can_read = movement.offer.address != 0 && wire_.can_read(from);
  Choice* const choice = wire_.choice(from);
  movement.done = movement.offer.bytes;
  movement.trial = Choice::Trial();
  if (can_read && movement.offer.path == kDirectly) {
    movement.trial.path = kDirectly;
  } else if (choice != nullptr) {
    movement.trial = choice->begin_alone(kRest, message.bytes(), can_read ? kPaths : kDirectly);
  }
  if (movement.trial.path == kDirectly) {
    message.state_ = Message::kReads;
    moving_.push_back(&message);
    return;
  }
  message.state_ = Message::kFlowsIn;
  Control accepted{kAccepted, message.port_->group_};
  accepted.token = movement.offer.token;
  accepted.receiver_token = token_for(message);
  accepted.amount = movement.done;
  accepted.path = static_cast<uint8_t>(movement.trial.path);
  movement.token = accepted.receiver_token;
  movement.flow = wire_.flow({message.data_ + movement.done, message.bytes() - movement.done, from,
                              message.port_->group_, movement.token, movement.token, false});
  control(from, accepted);
}

// Read the next chunk from the sender's memory. The lock is released during the read.
void Engine::read_chunk(Message& message, Lock& lock) {
  Message::Movement& movement = *message.movement_;
  Port& port = *message.port_;
  const size_t all = message.bytes(), size = std::min(kReadAtOnce, all - movement.done);
  movement.is_busy = true;
  ++port.busy_;
  lock.unlock();
  const uint64_t address = movement.offer.address + movement.done;
  const size_t bytes_read = wire_.read(movement.from, address, message.data_ + movement.done, size);
  const bool is_invalid = port.transport_.has_given_up(port.numbers_[movement.from]);
  lock.lock();
  movement.is_busy = false;
  if (--port.busy_ == 0 && port.is_closed_) idle_.notify_all();
  movement.done += bytes_read;
  message.since_ = now();
  if (const auto why = port.why_ended()) {
    end(message, why->status, outcome_of(*why));
  } else if (is_invalid) {  // the sender may have changed the data; check_waits() fails the message
    drop_moving(message);
    message.state_ = Message::kFlowsIn;
    movement.token = token_for(message);
  } else if (bytes_read < size) {  // the system does not permit this read
    drop_moving(message);
    receive_rest(message);
  } else if (movement.done == all) {
    if (Choice* const choice = wire_.choice(movement.from)) choice->end(movement.trial);
    control(movement.from, {kTaken, port.group_, 0, movement.offer.token});
    end(message, FL_OK);
  } else if (callers_.load(std::memory_order_relaxed) > 0) {
    wire_.wake(true);  // if this thread leaves now, a waiting thread must read the next chunk
  }
}

void Engine::receive_data(const Record& record, const char* data) {
  Message* const message = by_token(record.token);
  if (message == nullptr) return;  // the message has failed
  Message::Movement& movement = *message->movement_;
  const size_t all = message->bytes();
  if (movement.flow != nullptr) {
    movement.done += record.digest;
    message->since_ = now();
    return movement.done < all ? movement.flow->go_on() : end(*message, FL_OK);
  }
  if (record.bytes > all - movement.done) return;
  copy(message->data_ + movement.done, data, record.bytes);
  movement.done += record.bytes;
  message->since_ = now();
  if (movement.done < all) return;
  wire_.choice(movement.from)->end(movement.trial);
  end(*message, FL_OK);
}

// Handle a peer's answer to an offer of this rank.
void Engine::handle_answer(int from, const Record& record) {
  Message* const message = by_token(record.token);
  if (message == nullptr) return;
  message->port_->answered_at_[message->peer_] = message->since_ = now();
  if (record.kind == kAccepted) {
    free_token(record.token);
    message->state_ = Message::kFlowsOut;
    auto& movement = *(message->movement_ = new Message::Movement(record, from));
    movement.done = record.digest;  // bytes that came with the offer
    if (wire_.choice(from) != nullptr) return moving_.push_back(message);
    movement.token = token_for(*message);
    movement.flow = wire_.flow({message->data_ + movement.done, message->bytes() - movement.done, from,
                                message->port_->group_, movement.token, record.receiver_token, true});
    return;
  }
  const bool is_refused = record.kind == kRefused;
  if (!is_refused && !is_compared(message->call_)) return end(*message, FL_OK);
  const fl_signature& peer_call = is_refused ? record.call : message->call_;
  const int rank = message->port_->numbers_[from];
  end_compared(*message, is_refused ? FL_MISMATCH : FL_OK, rank, peer_call, record.site);
}

}  // namespace fl
