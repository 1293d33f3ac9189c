#include "envelopes.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fl {
namespace {

// Envelopes of a peer that can be on their way at once.
constexpr size_t kPosted = 4;

// Blanks that are kept: more messages at once are rare.
constexpr size_t kSpareEnvelopes = 32;

// Only a small send has its payload with it.
size_t payload_of(const fl_signature& call) {
  return call.verb == FL_SEND && !is_large(call) ? bytes_of(call) : 0;
}

}  // namespace

struct Envelopes::Line {
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::list<EnvelopePtr> posted;  // in the order in which they will arrive
  std::list<EnvelopePtr> read;    // and nobody has taken, in the order of arrival
  bool reading = false;           // a thread waits for the next one
};

Envelopes::Envelopes(Mesh& mesh) : mesh_(mesh), lines_(mesh.size) {}

Envelopes::~Envelopes() = default;

void Envelopes::open() {
  for (int peer = 0; peer < mesh_.size; ++peer) {
    if (peer == mesh_.rank) continue;
    lines_[peer] = std::make_unique<Line>();
    if (mesh_.group == 0 && mesh_.size <= Mesh::kDirect && mesh_.is_connected(peer)) post(*lines_[peer], peer);
  }
}

EnvelopePtr Envelopes::blank() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!blanks_.empty()) {
      EnvelopePtr envelope = std::move(blanks_.back());
      blanks_.pop_back();
      return envelope;
    }
  }
  EnvelopePtr envelope(new Envelope);
  envelope->buffer = mesh_.buffer(envelope.get(), offsetof(Envelope, buffer));
  return envelope;
}

void Envelopes::take_back(EnvelopePtr envelope) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (blanks_.size() < kSpareEnvelopes) blanks_.push_back(std::move(envelope));
}

void Envelopes::post(Line& line, int peer) {
  while (line.posted.size() < kPosted) {
    line.posted.push_back(blank());
    line.posted.back()->call.sequence = 0;  // until it arrives
    try {
      line.posted.back()->buffer->recv(peer, kEnvelopeSlot);
    } catch (const std::exception&) {
      // This peer has left already, after a message that succeeded. Who waits for another one is
      // notified by the watch.
      continue;
    }
  }
}

// Who sends one gets one back, maybe before this rank comes to wait for it: in a ring nobody may be the first.
void Envelopes::give(const Envelope& envelope, int peer) {
  Line& line = *lines_[peer];
  const Packet packet = mesh_.packet(peer);
  {
    const std::lock_guard<std::mutex> lock(line.mutex);
    if (line.posted.empty() && !line.reading) post(line, peer);
  }
  const size_t bytes = offsetof(Envelope, payload) + payload_of(envelope.call);
  envelope.buffer->send(peer, kEnvelopeSlot, 0, bytes);
}

EnvelopePtr Envelopes::receive(int peer, int verb, int32_t tag, Waiter& waiter) {
  Line& line = *lines_[peer];
  std::unique_lock<std::mutex> lock(line.mutex);
  for (;;) {
    const auto found = std::find_if(
        line.read.begin(), line.read.end(),
        [&](const EnvelopePtr& one) { return one->call.verb == verb && one->call.root == tag; });
    if (found != line.read.end()) {
      EnvelopePtr one = std::move(*found);
      line.read.erase(found);
      return one;
    }
    if (!line.reading) {
      read(line, lock, peer, waiter);
    } else if (line.changed.wait_for(lock, kTick) == std::cv_status::timeout) {
      lock.unlock();
      waiter.look_around(peer);
      lock.lock();
    }
  }
}

// Read one envelope, whomever it is for. The lock is held before and after, not while waiting.
// Receives are posted before the wait, when there is time for it, not after.
void Envelopes::read(Line& line, std::unique_lock<std::mutex>& lock, int peer, Waiter& waiter) {
  post(line, peer);
  Envelope& next = *line.posted.front();
  line.reading = true;
  lock.unlock();
  const struct Leave {
    Line& line;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      line.reading = false;
      line.changed.notify_all();
    }
  } leave{line, lock};
  waiter.received(*next.buffer, peer);
  lock.lock();
  line.read.splice(line.read.end(), line.posted, line.posted.begin());
}

void Envelopes::read_arriving(int peer, Waiter& waiter) {
  Line& line = *lines_[peer];
  if (!mesh_.is_connected(peer)) return;
  std::unique_lock<std::mutex> lock(line.mutex);
  if (line.posted.empty()) post(line, peer);
  while (!line.reading && is_arriving(line)) read(line, lock, peer, waiter);
}

bool Envelopes::has_arrived(int peer, int32_t tag, fl_signature& call) {
  Line& line = *lines_[peer];
  const std::lock_guard<std::mutex> lock(line.mutex);
  for (const EnvelopePtr& one : line.read) {
    if (one->call.verb != FL_SEND || one->call.root != tag) continue;
    call = one->call;
    return true;
  }
  return false;
}

// Whether the first bytes of the next envelope are there. Where its receive could not be posted there
// will be none.
bool Envelopes::is_arriving(Line& line) {
  return !line.posted.empty() &&
         __atomic_load_n(&line.posted.front()->call.sequence, __ATOMIC_ACQUIRE) != 0;
}

std::vector<fl_signature> Envelopes::not_taken(int peer) {
  Line& line = *lines_[peer];
  const std::lock_guard<std::mutex> lock(line.mutex);
  std::vector<fl_signature> calls;
  for (const EnvelopePtr& one : line.read) calls.push_back(one->call);
  return calls;
}

}  // namespace fl
