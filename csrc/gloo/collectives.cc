// How a collective begins: every rank announces to every other what it calls.
#include "collectives.h"

#include <cstddef>
#include <cstring>

#include "../common/signature.h"

namespace fl {

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      outgoing_(new Frame[size_]),
      incoming_(new Frame[kTurns * size_]),
      outgoing_buffers_(size_),
      incoming_buffers_(kTurns * size_) {}

Collectives::~Collectives() = default;

void Collectives::open() {
  last_.reset(size_);
  for (int r = 0; r < size_; ++r) {
    outgoing_[r].arrived = 1;
    outgoing_buffers_[r] = mesh_.buffer(&outgoing_[r], sizeof(Frame));
  }
  for (size_t i = 0; i < incoming_buffers_.size(); ++i) {
    incoming_buffers_[i] = mesh_.buffer(&incoming_[i], sizeof(Frame));
  }
  for (size_t turn = 0; turn < kTurns; ++turn) post_headers_of(turn);
}

// Receives are posted ahead of time: a header then arrives in one message, without waiting for
// this rank to say that it is ready. What came with the last call is read by now.
void Collectives::post_headers() {
  post_headers_of(turn_);
  turn_ = (turn_ + 1) % kTurns;
}

void Collectives::post_headers_of(size_t turn) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    incoming_[turn * size_ + r].arrived = 0;
    try {
      incoming_buffers_[turn * size_ + r]->recv(r, kHeaderSlot);
    } catch (const std::exception&) {
      // This peer has left already, after an operation that succeeded. The next one will fail
      // when it sends its header there.
      continue;
    }
  }
}

// Every rank announces to every other what it calls and, where it is small, what `give` has of `data` for
// it. After this all ranks hold the same headers and so come to the same verdict. Payloads lie in
// incoming_ until post_headers().
void Collectives::meet(Call& call, const void* data, const Parts& give) {
  announce(call, data, give);
  receive_calls(call);
  const auto& calls = call.seen.calls;
  const bool same = all_same(calls.data(), size_);
  const bool root_knows = call.mine.verb != FL_SCATTER || calls[call.mine.root].ndim != FL_ANY;
  if (same && root_knows) return;
  post_headers();
  throw Mismatch(call.seen);
}

void Collectives::announce(const Call& call, const void* data, const Parts& give) {
  const char* const source = static_cast<const char*>(data);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Frame& frame = outgoing_[r];
    frame.signature = call.mine;
    frame.site = call.site;
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    if (bytes > 0) std::memcpy(frame.payload, source + give[r].begin, bytes);
    outgoing_buffers_[r]->send(r, kHeaderSlot, 0, offsetof(Frame, payload) + bytes);
  }
}

void Collectives::receive_calls(Call& call) {
  try {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) call.waiter.received(*incoming_buffers_[turn_ * size_ + r], r);
    }
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) call.waiter.sent(*outgoing_buffers_[r], r);
    }
  } catch (const TimedOut& failure) {
    const auto missing = not_arrived();
    throw Failure(FL_TIMEOUT, missing.empty() ? failure.missing : missing, failure.what());
  }
  remember(call);
}

void Collectives::remember(Call& call) {
  received_at_ = Clock::now();
  for (int r = 0; r < size_; ++r) {
    last_.calls[r] = r == rank_ ? call.mine : incoming(r).signature;
    last_.sites[r] = r == rank_ ? call.site : incoming(r).site;
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
  const Frame& frame = incoming(rank);
  if (rank == rank_ || __atomic_load_n(&frame.arrived, __ATOMIC_ACQUIRE) == 0) return false;
  call = frame.signature;
  return true;
}

std::vector<int> Collectives::not_arrived() const {
  std::vector<int> missing;
  for (int r = 0; r < size_; ++r) {
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
