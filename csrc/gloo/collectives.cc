// How a collective begins: every rank announces to every other what it calls.
#include "collectives.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "../common/signature.h"

namespace fl {

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      passes_on_(size_ > Mesh::kDirect),
      outgoing_(new Frame[size_]),
      incoming_(new Frame[kTurns * size_]),
      outgoing_buffers_(size_),
      incoming_buffers_(kTurns * size_),
      relay_(mesh) {}

Collectives::~Collectives() = default;

void Collectives::open() {
  last_.reset(size_);
  for (int r = 0; r < size_; ++r) {
    outgoing_buffers_[r] = mesh_.buffer(&outgoing_[r], sizeof(Frame));
  }
  for (size_t i = 0; i < incoming_buffers_.size(); ++i) {
    incoming_buffers_[i] = mesh_.buffer(&incoming_[i], sizeof(Frame));
  }
  has_begun_ = false;
  const auto neighbours = mesh_.neighbours();
  const auto connected = [&](int peer) { return mesh_.is_connected(peer); };
  if (std::all_of(neighbours.begin(), neighbours.end(), connected)) begin();
}

// Once, when the neighbours are connected.
void Collectives::begin() {
  has_begun_ = true;
  if (passes_on_) return relay_.open();
  for (size_t turn = 0; turn < kTurns; ++turn) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) post_header(r, turn);
    }
  }
}

// Receives are posted ahead of time: a header then arrives in one message, without waiting for
// this rank to say that it is ready. What came with the last call is read by now.
void Collectives::post_headers() {
  if (passes_on_) {
    for (int r : given_) waiter_->sent(*outgoing_buffers_[r], r);
    return given_.clear();
  }
  has_read_ = true;
  turn_ = (turn_ + 1) % kTurns;
}

void Collectives::post_header(int r, size_t turn) {
  incoming_[turn * size_ + r].arrived = 0;
  mesh_.ask(*incoming_buffers_[turn * size_ + r], r, kHeaderSlot, 0, sizeof(Frame));
}

// Every rank announces to every other what it calls and, where it is small, what `give` has of `data` for
// it. After this all ranks hold the same headers and so come to the same verdict. Payloads are there
// until post_headers(), those of many ranks once they are fetched.
void Collectives::meet(Call& call, const void* data, const Parts& give) {
  waiter_ = &call.waiter;
  mesh_.has_called(call.mine.sequence);
  try {
    if (!has_begun_) {
      const auto neighbours = mesh_.neighbours();
      mesh_.reach(neighbours);
      for (int peer : neighbours) mesh_.require(peer);
      begin();
    }
    const size_t common = passes_on_ ? common_bytes(give) : 0;
    if (passes_on_) {
      pass_on(call, data, give, common);
    } else {
      announce(call, data, give);
      receive_calls(call);
    }
    remember(call);
    const auto& calls = call.seen.calls;
    const bool same = all_same(calls.data(), size_);
    const bool is_known = !root_must_know(call.mine.verb) || calls[call.mine.root].ndim != FL_ANY;
    if (same && is_known) return passes_on_ && common == 0 ? give_each(data, give) : void();
  } catch (const TimedOut& failure) {
    const auto missing = not_arrived(call);
    throw Failure(FL_TIMEOUT, missing.empty() ? failure.missing : missing, failure.what());
  }
  post_headers();
  throw Mismatch(call.seen);
}

void Collectives::announce(const Call& call, const void* data, const Parts& give) {
  const char* const source = static_cast<const char*>(data);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Frame& frame = outgoing_[r];
    frame.arrived = 1;
    frame.signature = call.mine;
    frame.site = call.site;
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    if (bytes > 0) std::memcpy(frame.payload, source + give[r].begin, bytes);
    const Packet packet = mesh_.packet(r);
    if (has_read_) post_header(r, (turn_ + 1) % kTurns);
    outgoing_buffers_[r]->send(r, kHeaderSlot, 0, offsetof(Frame, payload) + bytes);
  }
  has_read_ = false;
}

void Collectives::receive_calls(Call& call) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) call.waiter.received(*incoming_buffers_[turn_ * size_ + r], r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) call.waiter.sent(*outgoing_buffers_[r], r);
  }
}

// Many ranks ------------------------------------------------------------------------------------

// Of what all ranks that get anything get alike, where it is so little that it can go by all.
size_t Collectives::common_bytes(const Parts& give) const {
  Part common;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || give[r].bytes == 0) continue;
    if (common.bytes > 0 && (give[r].begin != common.begin || give[r].bytes != common.bytes)) return 0;
    common = give[r];
  }
  return common.bytes * size_ <= Relay::kBytes ? common.bytes : 0;
}

void Collectives::pass_on(Call& call, const void* data, const Parts& give, size_t bytes) {
  size_t begin = 0;
  for (int r = 0; r < size_ && bytes > 0; ++r) {
    if (r != rank_ && give[r].bytes > 0) begin = give[r].begin;
  }
  relay_.exchange(call.mine, call.site, static_cast<const char*>(data) + begin, bytes, call.waiter);
}

// What did not go by all.
void Collectives::give_each(const void* data, const Parts& give) {
  const char* const source = static_cast<const char*>(data);
  for (int step = 1; step < size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (give[r].bytes == 0 || give[r].bytes > kInlineBytes) continue;
    std::memcpy(outgoing_[r].payload, source + give[r].begin, give[r].bytes);
    outgoing_buffers_[r]->send(r, kHeaderSlot, offsetof(Frame, payload), give[r].bytes);
    given_.push_back(r);
  }
}

// What each rank has given this one: take[r] bytes; empty where that was nothing, or large.
void Collectives::fetch(const Parts& take) {
  if (!passes_on_) return;
  std::vector<int> asked;
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = take[r].bytes;
    if (r == rank_ || bytes == 0 || bytes > kInlineBytes || relay_.bytes(r) > 0) continue;
    incoming_buffers_[r]->recv(r, kHeaderSlot, offsetof(Frame, payload), bytes);
    asked.push_back(r);
  }
  for (int r : asked) waiter_->received(*incoming_buffers_[r], r);
}

const char* Collectives::payload(int r) const {
  if (!passes_on_) return incoming(r).payload;
  return relay_.bytes(r) > 0 ? relay_.payload(r) : incoming_[r].payload;
}

// What is known of the others -------------------------------------------------------------------

void Collectives::remember(Call& call) {
  received_at_ = Clock::now();
  for (int r = 0; r < size_; ++r) {
    last_.calls[r] = r == rank_ ? call.mine : passes_on_ ? relay_.call(r) : incoming(r).signature;
    last_.sites[r] = r == rank_ ? call.site : passes_on_ ? relay_.site(r) : incoming(r).site;
  }
  call.seen.calls = last_.calls;
  call.seen.sites = last_.sites;
}

Seen Collectives::last_calls() const {
  Seen seen = last_;
  const double age = std::chrono::duration<double>(Clock::now() - received_at_).count();
  for (int r = 0; r < size_; ++r) seen.ages[r] = seen.calls[r].sequence == 0 ? -1 : age;
  return seen;
}

bool Collectives::is_ahead(int rank, fl_signature& call) const {
  if (!has_begun_ || rank == rank_) return false;
  if (passes_on_) return relay_.is_ahead(rank, call);
  const Frame& frame = incoming(rank);
  if (__atomic_load_n(&frame.arrived, __ATOMIC_ACQUIRE) == 0) return false;
  call = frame.signature;
  return true;
}

// Of many ranks those are asked of which nothing has come: whoever should have passed it on may be
// waiting itself.
std::vector<int> Collectives::not_arrived(const Call& call) {
  if (passes_on_ && has_begun_) return mesh_.not_called(relay_.missing(), call.mine.sequence);
  std::vector<int> missing;
  for (int r = 0; has_begun_ && r < size_; ++r) {
    if (r == rank_) continue;
    // It may be arriving just now.
    if (__atomic_load_n(&incoming(r).arrived, __ATOMIC_ACQUIRE) == 0) missing.push_back(r);
  }
  return missing;
}

Parts Collectives::same_for_all(size_t bytes) const { return Parts(size_, Part{0, bytes}); }

Parts Collectives::equal_sections(size_t bytes) const {
  Parts parts(size_);
  for (int r = 0; r < size_; ++r) parts[r] = {bytes * r, bytes};
  return parts;
}

void Collectives::barrier(Call& call) {
  meet(call, nullptr, same_for_all(0));
  post_headers();
}

}  // namespace fl
