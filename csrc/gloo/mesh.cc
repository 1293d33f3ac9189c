#include "mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace fl {
namespace {

using std::chrono::milliseconds;

// A reason that cannot be delivered in this time is not worth waiting for.
constexpr milliseconds kGoodbye{500};

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
    : gloo::Context(rank, size), control_(size), control_buffers_(size) {
  device_ = create_device(host, interface);
  transportContext_ = device_->createContext(rank, size);
  // A pair waits five times its timeout for the first connection.
  const auto timeout = milliseconds(static_cast<int64_t>(connect_seconds * 200) + 1);
  setTimeout(timeout);
  transportContext_->setTimeout(timeout);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    transportContext_->createPair(peer);
    descriptors_.add(address(peer));
  }
  descriptors_.find(*device_);  // they listen
}

Mesh::~Mesh() = default;

std::vector<char> Mesh::address(int peer) {
  // One's own place in the list is filled with zeros of an address's length.
  if (peer == rank) {
    return std::vector<char>(size == 1 ? 1 : address(rank == 0 ? 1 : 0).size());
  }
  return getPair(peer)->address().bytes();
}

// The first messages on a connection, both ways.
struct Mesh::Proof {
  char seen[FL_PROOF_BYTES];
  Buffer sent, received;
};

void Mesh::connect(const char* addresses, size_t bytes, const char* proofs,
                   Clock::time_point deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw Failure(FL_CLOSED, {}, "closed while connecting");
    connecting_ = true;
  }
  std::vector<Proof> shown(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    awaited_ = peer;
    const char* at = addresses + peer * bytes;
    try {
      descriptors_.add({at, at + bytes});
      getPair(peer)->connect({at, at + bytes});
      show(proofs + 2 * FL_PROOF_BYTES * peer, peer, shown[peer]);
    } catch (const std::exception& error) {
      if (const auto reason = watch_.reason()) throw Failure(*reason);
      throw Failure(FL_PEER_LOST, {peer}, error.what());
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    connecting_ = false;
    if (stopped_) throw Failure(FL_CLOSED, {}, "closed while connecting");
  }
  descriptors_.find(*device_);
  post_control();
  Waiter waiter(watch_, deadline, nullptr);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    awaited_ = peer;
    require_proof(proofs + 2 * FL_PROOF_BYTES * peer + FL_PROOF_BYTES, peer, shown[peer], waiter);
  }
  awaited_ = -1;
}

// At once, before the next connection, so that nobody takes this rank for the one that is late.
void Mesh::show(const char* mine, int peer, Proof& proof) {
  proof.received = buffer(proof.seen, sizeof proof.seen);
  proof.received->recv(peer, kProofSlot);
  proof.sent = buffer(mine, FL_PROOF_BYTES);
  proof.sent->send(peer, kProofSlot);
}

void Mesh::require_proof(const char* theirs, int peer, Proof& proof, Waiter& waiter) {
  waiter.sent(*proof.sent, peer);
  waiter.received(*proof.received, peer);
  // In the same time wherever they differ: how long it takes must not say how much is right.
  int difference = 0;
  for (size_t i = 0; i < sizeof proof.seen; ++i) difference |= proof.seen[i] ^ theirs[i];
  if (difference == 0) return;
  throw Failure(FL_PEER_LOST, {peer},
                "who connected in its place does not know the secret of this job");
}

void Mesh::post_control() {
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    control_[peer] = Control{};
    control_buffers_[peer] = createUnboundBuffer(&control_[peer], sizeof(Control));
    control_buffers_[peer]->recv(peer, kControlSlot);
  }
}

// Gloo notifies those who wait to receive that a connection broke, and so the receive of the control
// message knows. A wait that has been ended before it began only looks.
bool Mesh::is_lost(int peer) {
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
  return std::any_of(control_.begin(), control_.end(),
                     [](const Control& control) { return is_present(control.present); });
}

void Mesh::stop() {
  watch_.end(Failure(FL_CLOSED, {}, "the group was closed"));
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  // A pair that is still connecting waits on itself; closing it is what ends that wait.
  if (connecting_) closeConnections();
}

// A connection broke. A peer that gave up has said why before it closed, and that reason is the
// true one; otherwise the pairs that are broken by now show who is gone.
Failure Mesh::explain(int peer, const std::string& what) {
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
    const std::string message = name(r) + " gave up: " + control.message;
    if (status == FL_RAISED || status == FL_HOST_LOST) return {status, missing, control.message};
    if (status == FL_TIMEOUT) return {status, await_cause(missing), message};
    if (status == FL_PEER_LOST) return {status, missing, message};
    return {FL_PEER_LOST, {r}, message};
  }
  auto missing = broken_pairs();
  if (missing.empty() && peer >= 0) missing.push_back(peer);
  return Failure(FL_PEER_LOST, missing, what);
}

std::vector<int> Mesh::broken_pairs() {
  std::vector<int> broken;
  char nothing;
  const auto probe = createUnboundBuffer(&nothing, 0);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      // A pair that has failed throws at once; on one that works this receive stays unanswered.
      probe->recv(peer, kProbeSlot);
    } catch (const std::exception&) {
      broken.push_back(peer);
    }
  }
  return broken;
}

std::vector<int> Mesh::cause_of(const Failure& timeout) noexcept {
  try {
    report_to_others(timeout);
    has_reported_ = true;
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
    if (!has_reported_) report_to_others(failure);
  } catch (const std::exception&) {
    // A peer that takes nothing more learns it when the connection closes.
  }
  watch_.end(failure);
  closeConnections();
}

void Mesh::report_to_others(const Failure& failure) {
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
    if (peer == rank) continue;
    try {
      buffer->send(peer, kControlSlot);
      ++sent;
    } catch (const std::exception&) {
      continue;  // this peer is gone, the next may not be
    }
  }
  while (sent-- > 0) buffer->waitSend(kGoodbye);
}

}  // namespace fl
