#include "mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

namespace fl {
namespace {

using std::chrono::milliseconds;

// A reason that cannot be delivered in this time is not worth waiting for.
constexpr milliseconds kGoodbye{500};

// So long news take that a host is lost: to a rank of each host, which looks for them now and then, and
// from there to the others, which look for them in every tick where they await them.
constexpr milliseconds kNewsTakes = 2 * Heartbeat::kLongestInterval;

// What the kernel says of hosts, where of a process that has ended another kernel says so.
constexpr int kSilence[] = {ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN};

// Whether `what`, all that Gloo keeps of an error, is that.
bool is_silence(const std::string& what) {
  return std::any_of(std::begin(kSilence), std::end(kSilence), [&](int error) {
    return what.find(std::generic_category().message(error)) != std::string::npos;
  });
}

// How far apart the ranks' ends of one wait may lie, and how often who is to blame is looked at.
constexpr milliseconds kSettling{200}, kSettlingTick{2};

std::shared_ptr<gloo::transport::Device> create_device(const std::string& host,
                                                       const std::string& interface) {
  gloo::transport::tcp::attr attributes;
  attributes.hostname = host;
  attributes.iface = interface;
  return gloo::transport::tcp::CreateDevice(attributes);
}

// Of what may be arriving just now.
bool is_present(const int32_t& flag) { return __atomic_load_n(&flag, __ATOMIC_ACQUIRE) != 0; }

std::string in_words_for_others(std::string message, const std::string& name) {
  const std::string self = "this rank";
  for (size_t at; (at = message.find(self)) != std::string::npos;) {
    message.replace(at, self.size(), name);
  }
  return message;
}

}  // namespace

uint64_t slot_of(const fl_signature& call) {
  uint64_t hash = 1469598103934665603u;
  const auto add = [&](uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ (value & 0xff)) * 1099511628211u;
  };
  uint64_t scale;
  std::memcpy(&scale, &call.scale, sizeof scale);
  for (const int64_t value : {call.root, call.dtype, call.op, call.itemsize, call.ndim}) add(value);
  add(scale);
  add(call.count);
  for (int d = 0; d < std::min(call.ndim, 8); ++d) add(call.shape[d]);
  return std::max<uint64_t>(hash, kFirstFreeSlot);
}

// Why a rank gave up, as it travels.
struct Mesh::Control {
  static constexpr int kMaxMissing = 32;
  int32_t status;
  int32_t missing_count;
  int32_t missing[kMaxMissing];
  char message[4000];
  int32_t present;  // last: when it is there, all is
};

Mesh::Mesh(int rank, int size, const std::string& host, const std::string& interface,
           double connect_seconds)
    : gloo::Context(rank, size),
      connect_seconds_(connect_seconds),
      control_(static_cast<Control*>(std::calloc(size, sizeof(Control)))),
      control_buffers_(size),
      departures_(new int32_t[size]()),
      noticed_(new std::atomic<Clock::duration>[size]()),
      departure_buffers_(size),
      connections_(size) {
  if (control_ == nullptr) throw std::bad_alloc();
  auto device = std::dynamic_pointer_cast<gloo::transport::tcp::Device>(create_device(host, interface));
  device_ = device;
  links_ = std::make_shared<Links>(std::move(device), rank, size, size > kDirect);
  transportContext_ = links_;
}

Mesh::~Mesh() { links_->close(); }

std::vector<int> Mesh::neighbours() const {
  std::set<int> found;
  if (size > kDirect) {
    for (int step = 1; step < size; step *= 2) {
      found.insert((rank + step) % size);
      found.insert((rank - step + size) % size);
    }
  } else {
    for (int peer = 0; peer < size; ++peer) found.insert(peer);
  }
  found.erase(rank);
  return {found.begin(), found.end()};
}

void Mesh::connect(const char* addresses, size_t bytes, const char* proofs, bool lazily,
                   Clock::time_point deadline) {
  links_->open(
      addresses, bytes, proofs,
      [this](int peer, gloo::transport::Pair& pair) { post_control(peer, pair); },
      [this](int peer) { require(peer); });
  if (lazily) return;
  const Waiter waiter(watch_, deadline, nullptr);
  const std::vector<int> peers = neighbours();
  reach(peers);
  for (int peer : peers) {
    awaited_ = peer;
    require(peer);
  }
  awaited_ = -1;
}

void Mesh::reach(const std::vector<int>& peers) {
  for (int peer : peers) links_->reach(peer);
}

void Mesh::require(int peer) {
  Waiter* const waiter = Waiter::current();
  const auto end = deadline_after(connect_seconds_);
  try {
    while (!links_->await(peer, Clock::now() + kTick)) {
      if (waiter != nullptr) waiter->look_around(peer);
      if (waiter == nullptr && Clock::now() >= end) throw TimedOut(peer);
    }
  } catch (const Failure& failure) {
    if (failure.status == FL_PEER_LOST) await_reason(is_silence(failure.what()));
    if (const auto reason = watch_.reason()) throw Failure(*reason);
    if (failure.status == FL_PEER_LOST && has_farewell()) throw explain(peer, failure.what());
    throw;
  }
}

void Mesh::ask(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset,
               size_t bytes) {
  if (!is_connected(peer)) require(peer);  // one that is not made is no connection that broke
  try {
    buffer.recv(peer, slot, offset, bytes);
  } catch (const std::exception&) {
    // Whatever is sent there says so.
  }
}

std::vector<int> Mesh::not_called(const std::vector<int>& ranks, int64_t calls) {
  std::vector<int> behind, absent;
  for (const auto& [peer, answer] : links_->calls_of(ranks, Clock::now() + kGoodbye)) {
    const bool has_answered = answer != Links::kSilent && answer != Links::kAbsent;
    if (!has_answered ? answer == Links::kSilent : answer < calls) behind.push_back(peer);
    if (answer == Links::kAbsent) absent.push_back(peer);
  }
  return behind.empty() ? absent : behind;
}

// On Gloo's thread: before anything else is sent or received there.
void Mesh::post_control(int peer, gloo::transport::Pair& pair) {
  const std::lock_guard<std::mutex> lock(asking_);
  control_buffers_[peer] = createUnboundBuffer(&control_[peer], sizeof(Control));
  pair.recv(control_buffers_[peer].get(), kControlSlot, 0, sizeof(Control));
  departure_buffers_[peer] = createUnboundBuffer(&departures_[peer], sizeof own_departure_);
  pair.recv(departure_buffers_[peer].get(), kLeavingSlot, 0, sizeof own_departure_);
  if (own_departure_buffer_ != nullptr) send_departure(pair);
  connections_[peer] = &pair;  // not one that has thrown, in whose place another may come
}

void Mesh::send_departure(gloo::transport::Pair& pair) {
  pair.send(own_departure_buffer_.get(), kLeavingSlot, 0, sizeof own_departure_);
}

void Mesh::leave() {
  std::vector<gloo::transport::Pair*> connections;
  {
    const std::lock_guard<std::mutex> lock(asking_);
    if (own_departure_buffer_ != nullptr) return;
    own_departure_buffer_ = createUnboundBuffer(&own_departure_, sizeof own_departure_);
    connections = connections_;  // those that come later, post_control notifies
  }
  for (gloo::transport::Pair* pair : connections) {  // one that fails waits for Gloo's thread
    if (pair == nullptr) continue;
    try {
      send_departure(*pair);
    } catch (const std::exception&) {
      // It has gone, and waits for nothing.
    }
  }
}

bool Mesh::is_leaving(int peer) {
  if (!is_present(departures_[peer])) return false;
  const auto now = Clock::now().time_since_epoch();
  Clock::duration noticed{};
  const bool is_first = noticed_[peer].compare_exchange_strong(noticed, now);
  return !is_first && now - noticed > kLastMessages;
}

// Gloo notifies those who wait to receive that a connection broke, and so the receive of the control
// message knows. A wait that has been ended before it began only looks.
bool Mesh::is_lost(int peer) {
  if (links_->has_failed(peer)) return true;
  const std::lock_guard<std::mutex> lock(asking_);
  const Buffer& control = control_buffers_[peer];
  if (control == nullptr) return false;
  try {
    control->abortWaitRecv();
    control->waitRecv(kTick);
  } catch (const std::exception&) {
    return true;
  }
  return is_present(control_[peer].present);
}

bool Mesh::has_farewell() const {
  return std::any_of(control_.get(), control_.get() + size,
                     [](const Control& control) { return is_present(control.present); });
}

void Mesh::stop() { watch_.end(Failure(FL_CLOSED, {}, "the group was closed")); }

// A peer may have closed a connection because it has found out that a host is lost: then news of that
// are on their way. Where nobody answers, the heartbeats are about to say which host that is, and since
// when. That may take longer, so there must be somebody who can say that it takes too long.
void Mesh::await_reason(bool is_silent) {
  const Waiter* const waiter = Waiter::current();
  auto end = Clock::now();
  if (patience_ > 0) end += kNewsTakes;
  if (is_silent && waiter != nullptr) end = std::max(end, deadline_after(patience_));
  if (waiter != nullptr) end = std::min(end, waiter->deadline());
  while (!is_explained()) {
    const auto now = Clock::now();
    if (now >= end || (waiter != nullptr && waiter->is_interrupted())) return;
    watch_.hurry();
    watch_.reason(std::min(end, now + kTick));
  }
}

// A connection broke. A peer that gave up has said why before it closed, and that reason is the
// true one; otherwise the pairs that are broken by now show who is gone.
Failure Mesh::explain(int peer, const std::string& what) {
  std::vector<int> missing;
  if (!is_explained()) {
    bool is_silent = is_silence(what);
    const auto broken = broken_pairs();
    for (const auto& each : broken) is_silent |= is_silence(each.second);
    missing = first_of(broken, peer);
    await_reason(is_silent);
  }
  if (const auto reason = watch_.reason()) return *reason;
  for (int r = 0; r < size; ++r) {
    const Control& control = control_[r];
    if (!is_present(control.present)) continue;
    const auto status = static_cast<fl_status>(control.status);
    const std::vector<int> missing(control.missing, control.missing + control.missing_count);
    if (std::find(missing.begin(), missing.end(), rank) != missing.end()) {
      if (status == FL_HOST_LOST) {
        return {status, {r}, std::string("it has given up the host of this rank: ") + control.message};
      }
      return {FL_PEER_LOST, {r},
              std::string("it gave up waiting for this rank: ") + control.message};
    }
    const std::string message = as_told(control.message, name(r));
    if (status == FL_RAISED || status == FL_HOST_LOST) return {status, missing, control.message};
    if (status == FL_TIMEOUT) return {status, await_cause(missing), message};
    if (status == FL_PEER_LOST || status == FL_LEAVING) return {status, missing, message};
    return {FL_PEER_LOST, {r}, std::string("it gave up: ") + control.message};
  }
  if (missing.empty() && peer >= 0) missing.push_back(peer);
  return Failure(FL_PEER_LOST, missing, what);
}

std::map<int, std::string> Mesh::broken_pairs() {
  std::map<int, std::string> broken;
  char nothing;
  const auto probe = createUnboundBuffer(&nothing, 0);
  for (int peer = 0; peer < size; ++peer) {
    if (!is_connected(peer)) continue;
    try {
      // A pair that has failed throws at once; on one that works this receive stays unanswered.
      probe->recv(peer, kProbeSlot);
    } catch (const std::exception& error) {
      broken.emplace(peer, error.what());
    }
  }
  return broken;
}

// Who gives up because of another closes later: when the reason has come through, or not for so long. One
// that has left as planned is no cause, unless it is waited for or nobody else has gone.
std::vector<int> Mesh::first_of(const std::map<int, std::string>& broken, int peer) const {
  std::vector<int> suspects, found;
  for (const auto& each : broken) {
    if (!is_present(departures_[each.first]) || each.first == peer) suspects.push_back(each.first);
  }
  if (suspects.empty()) {
    for (const auto& each : broken) suspects.push_back(each.first);
  }
  const auto end_of = [&](int each) {
    const Pair* const pair = links_->pair(each);
    return pair != nullptr ? pair->ended_at() : kNever;
  };
  auto first = kNever;
  for (int each : suspects) first = std::min(first, end_of(each));
  for (int each : suspects) {
    if (end_of(each) <= first + kGoodbye / 2) found.push_back(each);
  }
  return found;
}

std::vector<int> Mesh::cause_of(const Failure& timeout) noexcept {
  try {
    report_to_others(timeout);
    return await_cause(timeout.missing);
  } catch (const std::exception&) {
    return timeout.missing;  // who cannot be notified has gone, which the connections say
  }
}

// Follow who waited for whom, from `missing` on, to the rank that has not said that it waited.
// No event says that none will come.
std::vector<int> Mesh::await_cause(std::vector<int> missing) {
  const auto end = Clock::now() + kSettling;
  for (int steps = 0; steps < size && missing.size() == 1 && missing[0] != rank; ++steps) {
    const Control& control = control_[missing[0]];
    while (!is_present(control.present) && Clock::now() < end) {
      std::this_thread::sleep_for(kSettlingTick);
    }
    if (!is_present(control.present) || control.status != FL_TIMEOUT) break;
    const std::vector<int> next(control.missing, control.missing + control.missing_count);
    if (next.empty() || std::find(next.begin(), next.end(), rank) != next.end()) break;
    missing = next;
  }
  return missing;
}

// Before the other operations end: what they have begun to send must not stand in the way.
void Mesh::give_up(const Failure& failure) noexcept {
  try {
    report_to_others(failure);
  } catch (const std::exception&) {
    // A peer that takes nothing more learns it when the connection closes.
  }
  watch_.end(failure);
  links_->close();
}

// Once: others ask for no second reason. Who takes nothing is given up without Gloo's limit on a wait:
// see Watch.
void Mesh::report_to_others(const Failure& failure) {
  const std::lock_guard<std::mutex> lock(reporting_);
  if (std::exchange(has_reported_, true)) return;
  Control control{};
  control.present = 1;
  control.status = failure.status;
  for (int r : failure.missing) {
    if (control.missing_count < Control::kMaxMissing) control.missing[control.missing_count++] = r;
  }
  const std::string message = in_words_for_others(failure.what(), name(rank));
  std::strncpy(control.message, message.c_str(), sizeof control.message - 1);
  const Buffer buffer = createUnboundBuffer(&control, sizeof control);
  int sent = 0;
  for (int peer = 0; peer < size; ++peer) {
    if (!is_connected(peer)) continue;
    try {
      buffer->send(peer, kControlSlot);
      ++sent;
    } catch (const std::exception&) {
      continue;  // this peer is gone, the next may not be
    }
  }
  // A connection that is closed while something comes from the other end drops what is on its way there.
  const auto is_delivered = [&] {
    for (int peer = 0; peer < size; ++peer) {
      Pair* const pair = links_->pair(peer);
      if (pair != nullptr && !pair->has_delivered(kGoodbye)) return false;
    }
    return static_cast<Receiver&>(*buffer).sent() >= sent;
  };
  for (const auto end = Clock::now() + kGoodbye; !is_delivered() && Clock::now() < end;) {
    std::this_thread::sleep_for(kSettlingTick);
  }
}

}  // namespace fl
