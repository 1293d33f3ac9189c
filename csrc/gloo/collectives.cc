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
      outgoing_(new Frame[frames()]),
      incoming_(new Frame[frames()]),
      outgoing_buffers_(frames()),
      incoming_buffers_(frames()),
      relay_(mesh),
      is_here_(frames()),
      is_leaving_(frames()) {}

Collectives::~Collectives() = default;

size_t Collectives::frames() const { return static_cast<size_t>(passes_on_ ? 1 : kTurns) * size_; }

void Collectives::open() {
  last_.reset(size_);
  compares_at_once_ = mesh_.checks_at_once();
  for (size_t i = 0; i < frames(); ++i) {
    outgoing_buffers_[i] = mesh_.buffer(&outgoing_[i], sizeof(Frame));
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
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Packet packet = mesh_.packet(r);
    for (uint32_t number = 1; number <= kTurns; ++number) post_header(r, number);
  }
}

// Of many ranks: what did not go with the headers has been sent.
void Collectives::await_given() {
  for (int r : given_) waiter_->sent(*outgoing_buffers_[r], r);
  given_.clear();
}

// Receives are posted ahead of time: a header then arrives in one message, without waiting for
// this rank to say that it is ready.
void Collectives::post_header(int r, uint32_t number) {
  const size_t place = place_of(number, r);
  incoming_[place].how = kNotArrived;
  is_here_[place] = 0;
  mesh_.ask(*incoming_buffers_[place], r, kHeaderSlot, 0, sizeof(Frame));
}

// Every rank announces to every other what it calls and, where it is small, what `give` has of `data` for
// it. All ranks come to the same verdict, but where one needs no more than the calls of some: see enter().
// Payloads are there until the next call, those of many ranks once they are fetched.
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
    if (!passes_on_) return enter(call, data, give);
    const size_t common = common_bytes(give);
    pass_on(call, data, give, common);
    remember(call);
    if (!are_one_call(call.seen.calls.data(), size_)) throw Mismatch(call.seen);
    if (common == 0) give_each(data, give);
  } catch (const TimedOut& failure) {
    const auto missing = not_arrived(call);
    throw Failure(FL_TIMEOUT, missing.empty() ? failure.missing : missing, failure.what());
  }
}

// Few ranks -------------------------------------------------------------------------------------
//
// As in shared memory (shm/entering.cc): a rank that needs fewer calls than all, as the root of a small
// broadcast needs none, returns when what it has given was copied. It compares the others' calls in its next
// ones, and may be kMostAhead ahead of the latest. Where they differ, who sees it at once raises at once; then
// also the next call in which every rank waits for every other does nothing and raises on all.

void Collectives::enter(Call& call, const void* data, const Parts& give) {
  while (calls_ + 1 - compared_ > kMostAhead) compare_call(compared_ + 1);
  ++calls_;
  const Ranks needed = needed_by(rank_, call.mine);
  const bool is_ahead = needed.count() < size_;
  announce(call, data, give, is_ahead ? kRunsAhead : kWaits);
  if (is_ahead && receive_some(call, needed)) return;
  receive_all(call);
}

// The ranks whose calls bring something for `rank`, which calls that. All, where data follows that does not
// go with the call.
Ranks Collectives::needed_by(int rank, const fl_signature& call) const {
  const bool is_scan = call.verb == FL_SCAN || call.verb == FL_EXSCAN;  // of which all that it gives goes along
  const size_t bytes = static_cast<size_t>(call.count) * call.itemsize * (is_scan ? size_ - 1 : 1);
  const bool is_small = may_be_small(rank, call) || (call.ndim >= 0 && bytes <= kInlineBytes);
  const bool is_ahead = is_small && !is_compared(call) && !compares_at_once_;
  return is_ahead ? fl::needed_by(rank, size_, call) : Ranks{0, size_};
}

void Collectives::announce(const Call& call, const void* data, const Parts& give, How how) {
  const char* const source = static_cast<const char*>(data);
  const uint32_t read = compared_;  // what came with these calls
  awaited_ = calls_;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const size_t place = place_of(calls_, r);
    unless_left(r, [&] { if (is_leaving_[place]) waiter_->sent(*outgoing_buffers_[place], r); });
    is_leaving_[place] = 0;
    Frame& frame = outgoing_[place];
    frame.how = how;
    frame.signature = call.mine;
    frame.site = call.site;
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    if (bytes > 0) std::memcpy(frame.payload, source + give[r].begin, bytes);
    const Packet packet = mesh_.packet(r);
    for (uint32_t number = asked_; number != read;) post_header(r, ++number + kTurns);
    unless_left(r, [&] {
      outgoing_buffers_[place]->send(r, kHeaderSlot, 0, offsetof(Frame, payload) + bytes);
      is_leaving_[place] = 1;
    });
  }
  asked_ = read;
}

// Who has left in order may have done its part before. Whoever waits for more finds it lost.
template <typename Send>
void Collectives::unless_left(int r, Send send) {
  try {
    send();
  } catch (const std::exception&) {
    if (!mesh_.has_closed(r)) throw;
  }
}

// False: more is needed, as the root has more than goes with its call.
bool Collectives::receive_some(Call& call, Ranks needed) {
  while (compared_ + 1 != calls_ && all_have_called(compared_ + 1)) compare_call(compared_ + 1);
  raise_earlier(true);
  call.seen = last_;  // of whom this call need not be known
  call.seen.ago = 0;
  bool same = true;
  for (int r = needed.first; r < needed.last; ++r) {
    if (r != rank_) wait_for(calls_, r);
    call.seen.calls[r] = r == rank_ ? call.mine : incoming(r, calls_).signature;
    call.seen.sites[r] = r == rank_ ? call.site : incoming(r, calls_).site;
    const fl_signature both[] = {call.mine, call.seen.calls[r]};
    same = same && all_same(both, 2) && !(root_must_know(call.mine.verb) && both[1].ndim == FL_ANY);
  }
  call.seen.calls[rank_] = call.mine;
  call.seen.sites[rank_] = call.site;
  received_at_ = Clock::now();
  if (!same) {
    raised_ = calls_;
    throw Mismatch(seen_in(calls_));
  }
  const fl_signature& root = call.seen.calls[call.mine.root];
  return call.mine.ndim != FL_ANY || static_cast<size_t>(root.count) * root.itemsize <= kInlineBytes;
}

void Collectives::receive_all(Call& call) {
  while (compared_ + 1 != calls_) compare_call(compared_ + 1);
  raise_earlier(false);
  const bool same = compare_call(calls_, true);
  call.seen = last_;
  if (!same) throw Mismatch(call.seen);
}

void Collectives::wait_for(uint32_t number, int r) {
  const size_t place = place_of(number, r);
  awaited_ = number;
  if (!is_here_[place]) waiter_->received(*incoming_buffers_[place], r);
  is_here_[place] = 1;
}

bool Collectives::all_have_called(uint32_t number) const {
  for (int r = 0; r < size_; ++r) {
    const uint64_t& how = incoming(r, number).how;
    if (r != rank_ && __atomic_load_n(&how, __ATOMIC_ACQUIRE) == kNotArrived) return false;
  }
  return true;
}

// What is known of a call: this rank's own is in what it has sent.
Seen Collectives::seen_in(uint32_t number) const {
  Seen seen;
  seen.reset(size_);
  seen.ago = calls_ - number;
  for (int r = 0; r < size_; ++r) {
    const Frame& frame = r == rank_ ? outgoing_[place_of(number, (rank_ + 1) % size_)] : incoming(r, number);
    if (__atomic_load_n(&frame.how, __ATOMIC_ACQUIRE) == kNotArrived) continue;
    seen.calls[r] = frame.signature;
    seen.sites[r] = frame.site;
  }
  return seen;
}

// What all have called in the next call that was not compared; whether it is the same. A rank that may not
// have been told where not, as it has returned ahead, hears of it in a later call.
bool Collectives::compare_call(uint32_t number, bool or_raises) {
  bool runs_ahead = false;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) wait_for(number, r);
    const size_t place = place_of(number, r == rank_ ? (rank_ + 1) % size_ : r);
    runs_ahead = runs_ahead || (r == rank_ ? outgoing_ : incoming_)[place].how == kRunsAhead;
  }
  last_ = seen_in(number);
  received_at_ = Clock::now();
  const bool same = are_one_call(last_.calls.data(), size_);
  compared_ = number;
  if (same && differing_.none()) return true;
  differing_.compared(same, runs_ahead, {number, or_raises || number == raised_, last_});
  return same;
}

// A mismatch of an earlier call: with `only_news` one of which this rank has not been told.
void Collectives::raise_earlier(bool only_news) {
  auto found = differing_.to_raise(calls_, only_news);
  if (!found) return;
  if (!only_news) compare_call(calls_);
  found->seen.ago = calls_ - found->number;
  throw Mismatch(found->seen);
}

void Collectives::flush(Clock::time_point end) noexcept {
  for (size_t place = 0; !passes_on_ && place < frames(); ++place) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (!is_leaving_[place]) continue;
    try {
      outgoing_buffers_[place]->waitSend(nullptr, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      return;  // somebody has gone, or is too late
    }
    is_leaving_[place] = 0;
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
  if (!passes_on_) return incoming(r, calls_).payload;
  return relay_.bytes(r) > 0 ? relay_.payload(r) : incoming_[r].payload;
}

// What is known of the others -------------------------------------------------------------------

void Collectives::remember(Call& call) {
  received_at_ = Clock::now();
  for (int r = 0; r < size_; ++r) {
    last_.calls[r] = r == rank_ ? call.mine : relay_.call(r);
    last_.sites[r] = r == rank_ ? call.site : relay_.site(r);
  }
  call.seen.calls = last_.calls;
  call.seen.sites = last_.sites;
}

Seen Collectives::last_calls() const {
  Seen seen = last_;
  seen.ago = 0;
  // And what has come of those that this rank has not compared.
  for (uint32_t number = compared_; !passes_on_ && number != calls_;) {
    const Seen later = seen_in(++number);
    for (int r = 0; r < size_; ++r) {
      if (later.calls[r].sequence == 0) continue;
      seen.calls[r] = later.calls[r];
      seen.sites[r] = later.sites[r];
    }
  }
  const double age = std::chrono::duration<double>(Clock::now() - received_at_).count();
  for (int r = 0; r < size_; ++r) seen.ages[r] = seen.calls[r].sequence == 0 ? -1 : age;
  return seen;
}

bool Collectives::is_ahead(int rank, fl_signature& call) const {
  if (!has_begun_ || rank == rank_) return false;
  if (passes_on_) return relay_.is_ahead(rank, call);
  const Frame& frame = incoming(rank, calls_ + 1);
  if (__atomic_load_n(&frame.how, __ATOMIC_ACQUIRE) == kNotArrived) return false;
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
    if (__atomic_load_n(&incoming(r, awaited_).how, __ATOMIC_ACQUIRE) == kNotArrived) missing.push_back(r);
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
  await_given();
}

}  // namespace fl
