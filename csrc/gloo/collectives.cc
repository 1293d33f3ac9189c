#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "../reduce/reduce.h"

namespace fl {
namespace {

// Payloads up to this size travel inside the header, in one step instead of two. The header is
// always sent whole; 4 KB more or less do not change what a message costs.
constexpr size_t kInlineBytes = 4096;

// Large arrays move in pieces, so that a rank reduces one while the next is on the wire.
constexpr size_t kChunkBytes = 512 << 10;

}  // namespace

struct Collectives::Frame {
  fl_signature signature;
  char payload[kInlineBytes];
  // Written by the sender, cleared by the receiver: tells which headers have arrived.
  uint64_t arrived;
};

// A run of elements: [begin, begin + count) in units of bytes.
struct Collectives::Part {
  size_t begin;
  size_t bytes;
};

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      outgoing_(std::make_unique<Frame>()),
      incoming_(size_),
      outgoing_buffer_(mesh.createUnboundBuffer(outgoing_.get(), sizeof(Frame))),
      incoming_buffers_(size_) {}

Collectives::~Collectives() = default;

void Collectives::open() {
  for (int peer = 0; peer < size_; ++peer) {
    incoming_buffers_[peer] = mesh_.createUnboundBuffer(&incoming_[peer], sizeof(Frame));
  }
  post_headers();
}

// Receives are posted ahead of time: a header then arrives in one message, without waiting for
// this rank to say that it is ready.
void Collectives::post_headers() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    incoming_[peer].arrived = 0;
    try {
      incoming_buffers_[peer]->recv(peer, kHeaderSlot);
    } catch (const std::exception&) {
      // This peer has left already, after an operation that succeeded. The next one will fail
      // when it sends its header there.
      continue;
    }
  }
}

// Every rank tells every other what it calls, and small payloads with it. After this all ranks
// hold the same headers and so come to the same verdict.
void Collectives::exchange_headers(const fl_signature& mine, const void* payload, size_t bytes,
                                   Seen& seen) {
  outgoing_->signature = mine;
  outgoing_->arrived = 1;
  if (bytes > 0) std::memcpy(outgoing_->payload, payload, bytes);
  incoming_[rank_].signature = mine;
  if (bytes > 0) std::memcpy(incoming_[rank_].payload, payload, bytes);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) outgoing_buffer_->send(r, kHeaderSlot);
  }
  try {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) mesh_.wait_recv(*incoming_buffers_[r], r);
    }
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) mesh_.wait_send(*outgoing_buffer_, r);
    }
  } catch (Failure& failure) {
    if (failure.status == FL_TIMEOUT) {
      failure.missing.clear();
      for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !incoming_[r].arrived) failure.missing.push_back(r);
      }
    }
    throw;
  }
  for (int r = 0; r < size_; ++r) seen[r] = incoming_[r].signature;
  check(seen, mine);
}

void Collectives::check(const Seen& seen, const fl_signature& mine) {
  for (const fl_signature& theirs : seen) {
    if (!same_call(mine, theirs)) {
      post_headers();
      throw Mismatch();
    }
  }
}

void Collectives::barrier(const fl_signature& mine, Seen& seen) {
  exchange_headers(mine, nullptr, 0, seen);
  post_headers();
}

void Collectives::reduce_inline(const fl_signature& mine, size_t skip, size_t count, void* into) {
  std::vector<const void*> from(size_);
  for (int r = 0; r < size_; ++r) from[r] = incoming_[r].payload + skip;
  reduce(mine.dtype, mine.op, mine.scale, into, from.data(), size_, count);
  post_headers();
}

// Small: everybody has everybody's data and reduces it. Large: a direct reduce-scatter (rank p
// gets part p of every rank and reduces in rank order), then a direct all-gather of the parts.
// Bytes sent per rank: 2 (n-1)/n of the array, as for a ring, in 2 steps instead of 2 (n-1), and
// with a sum that does not depend on where in the ring a part began.
void Collectives::all_reduce(const fl_signature& mine, void* data, Seen& seen) {
  const size_t count = static_cast<size_t>(mine.count);
  const size_t bytes = count * mine.itemsize;
  if (bytes <= kInlineBytes) {
    exchange_headers(mine, data, bytes, seen);
    reduce_inline(mine, 0, count, data);
    return;
  }
  exchange_headers(mine, nullptr, 0, seen);
  post_headers();
  std::vector<Part> parts(size_);
  for (int r = 0; r < size_; ++r) {
    const size_t begin = count / size_ * r + std::min<size_t>(r, count % size_);
    const size_t length = count / size_ + (static_cast<size_t>(r) < count % size_ ? 1 : 0);
    parts[r] = {begin * mine.itemsize, length * mine.itemsize};
  }
  reduce_parts(mine, data, static_cast<char*>(data) + parts[rank_].begin, parts, true);
}

void Collectives::reduce_scatter(const fl_signature& mine, const void* data, void* output,
                                 Seen& seen) {
  const size_t part = static_cast<size_t>(mine.count) / size_;
  const size_t bytes = part * mine.itemsize;
  if (bytes * size_ <= kInlineBytes) {
    exchange_headers(mine, data, bytes * size_, seen);
    reduce_inline(mine, bytes * rank_, part, output);
    return;
  }
  exchange_headers(mine, nullptr, 0, seen);
  post_headers();
  std::vector<Part> parts(size_);
  for (int r = 0; r < size_; ++r) parts[r] = {bytes * r, bytes};
  reduce_parts(mine, data, output, parts, false);
}

// Chunk c of every part is on the wire while chunk c-1 is being reduced. With `gather`, a
// reduced chunk goes to every rank at once, into the place it came from: its owner can only send
// it after it has received that place's old contents from everybody, so nothing unsent is lost.
void Collectives::reduce_parts(const fl_signature& mine, const void* data, void* output,
                               const std::vector<Part>& parts, bool gather) {
  const size_t chunk = kChunkBytes / mine.itemsize * mine.itemsize;
  size_t longest = 0;
  for (const Part& part : parts) longest = std::max(longest, part.bytes);
  const size_t rounds = (longest + chunk - 1) / chunk;
  const auto piece = [&](int r, size_t c) -> Part {
    const size_t begin = std::min(c * chunk, parts[r].bytes);
    return {parts[r].begin + begin, std::min(chunk, parts[r].bytes - begin)};
  };

  scratch_.resize(std::max(scratch_.size(), 2 * chunk * size_));
  char* whole = static_cast<char*>(const_cast<void*>(data));
  const size_t whole_bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const Buffer sends = mesh_.createUnboundBuffer(whole, whole_bytes);
  const Buffer results = mesh_.createUnboundBuffer(output, parts[rank_].bytes);
  std::vector<Buffer> slots(2 * size_), gathers(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    for (int parity = 0; parity < 2; ++parity) {
      slots[2 * r + parity] =
          mesh_.createUnboundBuffer(&scratch_[(2 * r + parity) * chunk], chunk);
    }
    gathers[r] = mesh_.createUnboundBuffer(whole + parts[r].begin, parts[r].bytes);
  }

  std::vector<int> sent, returned;  // peers of the sends that are to be waited for
  const auto start = [&](size_t c) {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Part own = piece(rank_, c), theirs = piece(r, c);
      if (own.bytes > 0) slots[2 * r + c % 2]->recv(r, kReduceSlot, 0, own.bytes);
      if (theirs.bytes > 0) {
        sends->send(r, kReduceSlot, theirs.begin, theirs.bytes);
        sent.push_back(r);
      }
      if (gather && theirs.bytes > 0) {
        gathers[r]->recv(r, kGatherSlot, theirs.begin - parts[r].begin, theirs.bytes);
      }
    }
  };

  std::vector<const void*> from(size_);
  start(0);
  for (size_t c = 0; c < rounds; ++c) {
    if (c + 1 < rounds) start(c + 1);
    const Part own = piece(rank_, c);
    if (own.bytes == 0) continue;
    for (int r = 0; r < size_; ++r) {
      from[r] = r == rank_ ? whole + own.begin : &scratch_[(2 * r + c % 2) * chunk];
      if (r != rank_) mesh_.wait_recv(*slots[2 * r + c % 2], r);
    }
    const size_t offset = own.begin - parts[rank_].begin;
    reduce(mine.dtype, mine.op, mine.scale, static_cast<char*>(output) + offset, from.data(),
           size_, own.bytes / mine.itemsize);
    if (!gather) continue;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      results->send(r, kGatherSlot, offset, own.bytes);
      returned.push_back(r);
    }
  }
  for (int r : sent) mesh_.wait_send(*sends, r);
  for (int r : returned) mesh_.wait_send(*results, r);
  if (!gather) return;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    for (size_t c = 0; c < rounds && piece(r, c).bytes > 0; ++c) mesh_.wait_recv(*gathers[r], r);
  }
}

// Large: the root scatters the array's parts, then every rank gives its part to all others, so
// that the root's link carries the array about twice instead of n-1 times.
void Collectives::broadcast(const fl_signature& mine, void* data, Seen& seen) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  const int root = mine.root;
  if (bytes <= kInlineBytes) {
    exchange_headers(mine, data, rank_ == root ? bytes : 0, seen);
    if (rank_ != root) std::memcpy(data, incoming_[root].payload, bytes);
    post_headers();
    return;
  }
  exchange_headers(mine, nullptr, 0, seen);
  post_headers();
  std::vector<Part> parts(size_);
  for (int r = 0; r < size_; ++r) {
    const size_t begin = bytes / size_ * r;
    parts[r] = {begin, r + 1 == size_ ? bytes - begin : bytes / size_};
  }
  std::vector<Part> give(size_), take(size_);
  if (rank_ == root) {
    give = parts;
  } else {
    take[root] = parts[rank_];
  }
  exchange_parts(give, data, take, data);
  give.assign(size_, Part{});
  take.assign(size_, Part{});
  for (int r = 0; r < size_; ++r) {
    if (r != root) give[r] = parts[rank_];
    if (rank_ != root) take[r] = parts[r];
  }
  exchange_parts(give, data, take, data);
}

Bytes Collectives::all_gather(const fl_signature& mine, const void* data, Seen& seen) {
  const size_t bytes = static_cast<size_t>(mine.count) * mine.itemsize;
  exchange_headers(mine, data, bytes <= kInlineBytes ? bytes : 0, seen);
  std::vector<Part> take(size_), give(size_, Part{0, bytes});
  size_t total = 0, largest = 0;
  for (int r = 0; r < size_; ++r) {
    take[r] = {total, static_cast<size_t>(seen[r].count) * mine.itemsize};
    total += take[r].bytes;
    largest = std::max(largest, take[r].bytes);
  }
  Bytes output{std::unique_ptr<char[]>(new char[total + 1]), total};  // never a null pointer
  if (largest <= kInlineBytes) {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(output.data.get() + take[r].begin, incoming_[r].payload, take[r].bytes);
    }
    post_headers();
    return output;
  }
  post_headers();
  if (bytes > 0) std::memcpy(output.data.get() + take[rank_].begin, data, bytes);
  exchange_parts(give, data, take, output.data.get());
  return output;
}

// Send give[r] of `from` to every rank r and receive take[r] of `into` from it, all at once.
void Collectives::exchange_parts(const std::vector<Part>& give, const void* from,
                                 const std::vector<Part>& take, void* into) {
  std::vector<Buffer> sends(size_), recvs(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (take[r].bytes > 0) {
      recvs[r] = mesh_.createUnboundBuffer(static_cast<char*>(into) + take[r].begin, take[r].bytes);
      recvs[r]->recv(r, kGatherSlot);
    }
    if (give[r].bytes > 0) {
      char* source = static_cast<char*>(const_cast<void*>(from)) + give[r].begin;
      sends[r] = mesh_.createUnboundBuffer(source, give[r].bytes);
      sends[r]->send(r, kGatherSlot);
    }
  }
  for (int r = 0; r < size_; ++r) {
    if (recvs[r]) mesh_.wait_recv(*recvs[r], r);
  }
  for (int r = 0; r < size_; ++r) {
    if (sends[r]) mesh_.wait_send(*sends[r], r);
  }
}

// Both ends show each other what they call before the payload moves, so that both see a
// mismatch. The verbs differ by nature; everything else must be equal.
void Collectives::handshake(const fl_signature& mine, int peer, bool sender, Seen& seen) {
  const uint64_t tag = static_cast<uint32_t>(mine.root);
  fl_signature own = mine, theirs{};
  const Buffer out = mesh_.createUnboundBuffer(&own, sizeof own);
  const Buffer in = mesh_.createUnboundBuffer(&theirs, sizeof theirs);
  in->recv(peer, (sender ? kTagReplySlot : kTagHeaderSlot) + tag);
  out->send(peer, (sender ? kTagHeaderSlot : kTagReplySlot) + tag);
  mesh_.wait_recv(*in, peer);
  mesh_.wait_send(*out, peer);
  seen[rank_] = mine;
  seen[peer] = theirs;
  theirs.verb = mine.verb;
  if (!same_call(mine, theirs)) throw Mismatch();
}

void Collectives::send(const fl_signature& mine, void* data, int peer, Seen& seen) {
  handshake(mine, peer, true, seen);
  if (mine.count == 0) return;
  const Buffer out = mesh_.createUnboundBuffer(data, mine.count * mine.itemsize);
  out->send(peer, kTagDataSlot + static_cast<uint32_t>(mine.root));
  mesh_.wait_send(*out, peer);
}

void Collectives::recv(const fl_signature& mine, void* data, int peer, Seen& seen) {
  handshake(mine, peer, false, seen);
  if (mine.count == 0) return;
  const Buffer in = mesh_.createUnboundBuffer(data, mine.count * mine.itemsize);
  in->recv(peer, kTagDataSlot + static_cast<uint32_t>(mine.root));
  mesh_.wait_recv(*in, peer);
}

}  // namespace fl
