// Start of a collective: every rank announces its call to every other rank.
#include "collectives.h"

#include <sys/mman.h>

#include "../common/signature.h"

namespace fl {

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      passes_on_(size_ > Mesh::kDirect),
      outgoing_(frames(size_ * (passes_on_ ? 1 : kLeaving))),
      incoming_(frames(size_ * turns())),
      outgoing_buffers_(size_),
      incoming_buffers_(size_),
      leaving_(size_),
      received_(size_),
      made_(passes_on_ ? 0 : kMostAhead + 1),
      relay_(mesh) {}

Collectives::~Collectives() = default;

void Collectives::Frame::set_site(const fl_site& site) {
  const size_t bytes = strnlen(site.text, sizeof site.text - 1) + 1;
  site_bytes = (bytes + 15) / 16 * 16;
  std::memcpy(rest, site.text, bytes);
}

fl_site Collectives::Frame::site() const {
  fl_site site{};
  std::memcpy(site.text, rest, std::min<size_t>(site_bytes, sizeof site.text));
  return site;
}

// Zeroed frames in small pages, because most pages of a frame are never touched.
Collectives::Frames Collectives::frames(size_t count) {
  const size_t bytes = count * sizeof(Frame);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, bytes, MADV_NOHUGEPAGE);
  return Frames(static_cast<Frame*>(memory), Unmap{bytes});
}

void Collectives::Unmap::operator()(Frame* memory) const { munmap(memory, bytes); }

void Collectives::open() {
  last_.reset(size_);
  compares_at_once_ = mesh_.compares_at_once();
  const uint32_t leaving = passes_on_ ? 1 : kLeaving;
  for (int r = 0; r < size_; ++r) {
    outgoing_buffers_[r] = mesh_.buffer(&outgoing_[r * leaving], leaving * sizeof(Frame));
    incoming_buffers_[r] = mesh_.buffer(&incoming_[r * turns()], turns() * sizeof(Frame));
  }
  has_begun_ = false;
  const auto neighbours = mesh_.neighbours();
  const auto connected = [&](int peer) { return mesh_.is_connected(peer); };
  if (std::all_of(neighbours.begin(), neighbours.end(), connected)) begin();
}

// Call it once, when the neighbours are connected.
void Collectives::begin() {
  has_begun_ = true;
  if (passes_on_) return relay_.open();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    for (uint32_t number = 1; number <= kTurns; ++number) post_header(r, number, number == kTurns);
  }
}

// Wait until payloads sent separately from the headers have been sent.
void Collectives::await_given() {
  for (int r : given_) waiter_->sent(*outgoing_buffers_[r], r);
  given_.clear();
}

// Post a receive for the header of a later call, so that the header arrives in one message without a request.
void Collectives::post_header(int r, uint32_t number, bool tells) {
  mesh_.expect(*incoming_buffers_[r], r, kHeaderSlot, number % kTurns * sizeof(Frame), sizeof(Frame), tells);
}

// Announce this rank's call to every rank, with the small payloads that `give` selects of `data`. All ranks
// reach the same verdict, except that a rank may need the calls of only some ranks: see enter(). Payloads
// stay valid until the next call; with many ranks they must be fetched first.
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
    // If a peer has given up, report its reason: the awaited rank need not be late.
    if (mesh_.has_farewell()) throw mesh_.explain(failure.missing[0], failure.what());
    const auto missing = not_arrived(call);
    throw Failure(FL_TIMEOUT, missing.empty() ? failure.missing : missing, failure.what());
  }
}

// As in shared memory (shm/entering.cc), a rank that needs only some calls may return early. For example, the
// root of a small broadcast needs no call and returns after the copy of its data. It compares the calls of
// other ranks in its next calls, and may be at most kMostAhead calls ahead of the last compared one. If calls
// differ, a rank that detects it raises at once. In addition, the next call in which every rank waits for
// every other rank does nothing and raises on all ranks.

void Collectives::enter(Call& call, const void* data, const Parts& give) {
  while (calls_ + 1 - compared_ > kMostAhead) compare_call(compared_ + 1);
  ++calls_;
  const Ranks needed = compares_at_once_ ? Ranks{0, size_} : needed_by(rank_, call.mine);
  const bool is_ahead = needed.count() < size_;
  if (is_ahead) raise_news(call);
  announce(call.mine, call.site, data, give, is_ahead ? kRunsAhead : kWaits);
  if (is_ahead && receive_some(call, needed)) return;
  if (is_ahead) mesh_.hurry();
  receive_all(call);
}

// Raise the mismatch of an earlier call that this rank has not raised yet. The payload of the current call
// would become a result on other ranks, so this rank announces the call as withdrawn.
void Collectives::raise_news(const Call& call) {
  while (compared_ + 1 != calls_ && all_have_called(compared_ + 1)) compare_call(compared_ + 1);
  const auto news = differing_.to_raise(calls_, true);
  if (!news) return;
  announce(withdrawn(call.mine, compared_), call.site, nullptr, Parts(size_), kRunsAhead);
  mesh_.hurry();
  raise_earlier(news);
}

// Return the ranks whose calls bring data for `rank` in `call`; all ranks if data follows outside the calls.
Ranks Collectives::needed_by(int rank, const fl_signature& call) const {
  const bool is_scan = call.verb == FL_SCAN || call.verb == FL_EXSCAN;  // all its data travels in the calls
  const size_t bytes = static_cast<size_t>(call.count) * call.itemsize * (is_scan ? size_ - 1 : 1);
  const bool is_small = may_be_small(rank, call) || (call.ndim >= 0 && bytes <= kInlineBytes);
  const bool is_ahead = is_small && !is_compared(call);
  return is_ahead ? fl::needed_by(rank, size_, call) : Ranks{0, size_};
}

void Collectives::announce(const fl_signature& mine, const fl_site& site, const void* data, const Parts& give,
                           How how) {
  const char* const source = static_cast<const char*>(data);
  const uint32_t read = compared_;  // payloads of these calls were used
  awaited_ = calls_;
  made_[calls_ % made_.size()] = {mine, site, how};
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const uint32_t place = calls_ % kLeaving;
    unless_left(r, [&] { await_leaving(r); });
    Frame& frame = outgoing_[r * kLeaving + place];
    frame.how = how;
    frame.signature = mine;
    frame.set_site(site);
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    if (bytes > 0) std::memcpy(frame.rest + frame.site_bytes, source + give[r].begin, bytes);
    for (uint32_t number = asked_; number != read;) post_header(r, ++number + kTurns, false);
    // A rank that gives a gather more than fits into its call waits for all ranks.
    const bool may_wait = how == kWaits || first_dimension_is_free(mine.verb);
    const bool is_needed = may_wait || fl::needed_by(r, size_, mine).has(rank_);
    const bool at_leisure = !is_needed && calls_ % kHurryEvery != 0;
    const size_t sent = offsetof(Frame, rest) + frame.site_bytes + bytes;
    unless_left(r, [&] {
      outgoing_buffers_[r]->send(r, kHeaderSlot, place * sizeof(Frame), sent, at_leisure);
      ++leaving_[r];
    });
  }
  asked_ = read;
}

// Wait for a free frame.
void Collectives::await_leaving(int r) {
  for (; leaving_[r] == kLeaving; --leaving_[r]) waiter_->sent(*outgoing_buffers_[r], r);
}

// Ignore a failed send to a rank that has closed the group, because it may have completed its part. If this
// rank needs data from it, the later wait fails.
template <typename Send>
void Collectives::unless_left(int r, Send send) {
  try {
    send();
  } catch (const std::exception&) {
    if (!mesh_.has_closed(r)) throw;
  }
}

// Return false if the calls of all ranks are needed, because the root's data is large: see awaited().
bool Collectives::receive_some(Call& call, Ranks needed) {
  call.seen = last_;  // for ranks whose calls this rank does not need
  call.seen.ago = 0;
  for (int r = needed.first; r < needed.last; ++r) {
    if (r != rank_) wait_for(calls_, r);
    call.seen.calls[r] = r == rank_ ? call.mine : incoming(r, calls_).signature;
    call.seen.sites[r] = r == rank_ ? call.site : incoming(r, calls_).site();
  }
  call.seen.calls[rank_] = call.mine;
  call.seen.sites[rank_] = call.site;
  received_at_ = Clock::now();
  if (sees_difference(call.seen.calls.data(), rank_, needed)) {
    mesh_.hurry();
    if (const auto until = withdrawn_after(call.seen.calls.data(), needed)) {
      while (is_before(compared_, *until)) compare_call(compared_ + 1);
      raise_earlier(differing_.to_raise(calls_, false));
    }
    throw Mismatch(seen_in(calls_));
  }
  const auto waits = [&](int r) { return how_of(r, calls_) == kWaits; };
  return awaited(call.seen.calls.data(), size_, rank_, needed, waits).count() < size_;
}

Collectives::How Collectives::how_of(int r, uint32_t number) const {
  return r == rank_ ? made_[number % made_.size()].how : incoming(r, number).how;
}

void Collectives::receive_all(Call& call) {
  while (compared_ + 1 != calls_) compare_call(compared_ + 1);
  differing_.forget_old(calls_);
  const auto earlier = differing_.to_raise(calls_, false);
  const bool same = compare_call(calls_);
  raise_earlier(earlier);
  call.seen = last_;
  if (!same) throw Mismatch(call.seen);
}

void Collectives::wait_for(uint32_t number, int r) {
  awaited_ = number;
  for (; is_before(received_[r], number); ++received_[r]) waiter_->received(*incoming_buffers_[r], r);
}

// True even if the header was not awaited.
bool Collectives::has_arrived(uint32_t number, int r) const {
  return !is_before(received_[r], number) || !is_before(received_[r] + incoming_buffers_[r]->received(), number);
}

bool Collectives::all_have_called(uint32_t number) const {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !has_arrived(number, r)) return false;
  }
  return true;
}

// Return the known calls of number `number`. This rank's own call is in made_.
Seen Collectives::seen_in(uint32_t number) const {
  Seen seen;
  seen.reset(size_);
  seen.ago = calls_ - number;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !has_arrived(number, r)) continue;
    const Made& mine = made_[number % made_.size()];
    seen.calls[r] = r == rank_ ? mine.signature : incoming(r, number).signature;
    seen.sites[r] = r == rank_ ? mine.site : incoming(r, number).site();
  }
  return seen;
}

// Receive and compare the next uncompared call; return true if all calls agree. A rank that returned ahead
// may not have raised a mismatch; it raises in a later call.
bool Collectives::compare_call(uint32_t number) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) wait_for(number, r);
  }
  last_ = seen_in(number);
  received_at_ = Clock::now();
  const auto& made = last_.calls;
  const bool same = are_one_call(made.data(), size_);
  compared_ = number;
  if (same && differing_.none()) return true;
  const auto needed = [&](int r) {
    const auto waits = [&](int other) { return how_of(other, number) == kWaits; };
    return waits(r) ? Ranks{0, size_} : awaited(made.data(), size_, r, needed_by(r, made[r]), waits);
  };
  differing_.compared(number, same, made, needed, last_);
  return same;
}

void Collectives::raise_earlier(std::optional<Differing::Call> found) const {
  if (!found) return;
  found->seen.ago = calls_ - found->number;
  throw Mismatch(found->seen);
}

void Collectives::flush(Clock::time_point end) noexcept {
  try {
    Waiter waiter(mesh_, end, nullptr);
    for (int r = 0; r < size_; ++r) {
      for (; leaving_[r] > 0; --leaving_[r]) waiter.sent(*outgoing_buffers_[r], r);
    }
  } catch (const std::exception&) {
    // A peer has left or is too late.
  }
}

// Many ranks ------------------------------------------------------------------------------------

// Return the payload size if all receivers get the same small payload, which the relay can carry; else 0.
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

// Send small payloads that the relay did not carry.
void Collectives::give_each(const void* data, const Parts& give) {
  const char* const source = static_cast<const char*>(data);
  for (int step = 1; step < size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (give[r].bytes == 0 || give[r].bytes > kInlineBytes) continue;
    std::memcpy(outgoing_[r].rest, source + give[r].begin, give[r].bytes);
    outgoing_buffers_[r]->send(r, kHeaderSlot, offsetof(Frame, rest), give[r].bytes);
    given_.push_back(r);
  }
}

// Receive the small payload of every rank: take[r] bytes, unless it is empty or large.
void Collectives::fetch(const Parts& take) {
  if (!passes_on_) return;
  std::vector<int> asked;
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = take[r].bytes;
    if (r == rank_ || bytes == 0 || bytes > kInlineBytes || relay_.bytes(r) > 0) continue;
    incoming_buffers_[r]->recv(r, kHeaderSlot, offsetof(Frame, rest), bytes);
    asked.push_back(r);
  }
  for (int r : asked) waiter_->received(*incoming_buffers_[r], r);
}

const char* Collectives::payload(int r) const {
  if (!passes_on_) return incoming(r, calls_).payload();
  return relay_.bytes(r) > 0 ? relay_.payload(r) : incoming_[r].payload();
}

// Last known calls ------------------------------------------------------------------------------

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
  // Add headers that have arrived and were not compared.
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
  if (!has_arrived(calls_ + 1, rank)) return false;
  call = incoming(rank, calls_ + 1).signature;
  return true;
}

// With many ranks, ask the ranks without blocks: a rank that should have relayed them may itself be waiting.
std::vector<int> Collectives::not_arrived(const Call& call) {
  if (passes_on_ && has_begun_) return mesh_.not_called(relay_.missing(), call.mine.sequence);
  std::vector<int> missing;
  for (int r = 0; has_begun_ && r < size_; ++r) {
    if (r != rank_ && !has_arrived(awaited_, r)) missing.push_back(r);
  }
  return missing;
}

Parts Collectives::same_for_all(size_t bytes) const { return Parts(size_, Part{0, bytes}); }

Parts Collectives::equal_sections(size_t bytes) const {
  return in_a_row(size_, [&](int) { return bytes; });
}

void Collectives::barrier(Call& call) {
  meet(call, nullptr, same_for_all(0));
  await_given();
}

}  // namespace fl
