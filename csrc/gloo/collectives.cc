// Start of a collective: every rank announces its call to every other rank.
#include "collectives.h"

#include <sys/mman.h>

#include "../common/signature.h"

namespace fl {

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      uses_relay_(size_ > Mesh::kDirect),
      outgoing_(frames(size_ * (uses_relay_ ? 1 : kLeaving))),
      incoming_(frames(size_ * turns())),
      outgoing_buffers_(size_),
      incoming_buffers_(size_),
      leaving_(size_),
      received_(size_),
      own_calls_(uses_relay_ ? 0 : kMostAhead + 1),
      relay_(mesh) {}

Collectives::~Collectives() = default;

void Collectives::Frame::set_site(const fl_site& site) {
  const size_t bytes = strnlen(site.text, sizeof site.text - 1) + 1;
  site_bytes = (bytes + 15) / 16 * 16;
  std::memcpy(data, site.text, bytes);
}

fl_site Collectives::Frame::site() const {
  fl_site site{};
  std::memcpy(site.text, data, std::min<size_t>(site_bytes, sizeof site.text));
  return site;
}

// Return zeroed frames. Huge pages are disabled, because most pages of this memory are never accessed.
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
  const uint32_t leaving = uses_relay_ ? 1 : kLeaving;
  for (int r = 0; r < size_; ++r) {
    outgoing_buffers_[r] = mesh_.buffer(&outgoing_[r * leaving], leaving * sizeof(Frame));
    incoming_buffers_[r] = mesh_.buffer(&incoming_[r * turns()], turns() * sizeof(Frame));
  }
  has_begun_ = false;
  const auto neighbours = mesh_.neighbours();
  const auto connected = [&](int peer) { return mesh_.is_connected(peer); };
  if (std::all_of(neighbours.begin(), neighbours.end(), connected)) begin();
}

// Post the receives for the first headers. The neighbours must be connected.
void Collectives::begin() {
  has_begun_ = true;
  if (uses_relay_) return relay_.open();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    for (uint32_t number = 1; number <= kTurns; ++number) post_header(r, number, number == kTurns);
  }
}

// Wait until the payloads of send_separately() have been sent.
void Collectives::await_pending() {
  for (int r : pending_) waiter_->sent(*outgoing_buffers_[r], r);
  pending_.clear();
}

// Post a receive for the header of call `number` of rank r. If `grants`, permit rank r to send headers.
void Collectives::post_header(int r, uint32_t number, bool grants) {
  mesh_.expect(*incoming_buffers_[r], r, kHeaderSlot, number % kTurns * sizeof(Frame), sizeof(Frame), grants);
}

// Send this rank's call to every rank, with the range give[r] of `data` for rank r if this range is small.
// Throws Mismatch if calls differ. payload() is valid until the next call. With a relay, call fetch() first.
void Collectives::exchange_calls(Call& call, const void* data, const Parts& give) {
  waiter_ = &call.waiter;
  mesh_.has_called(call.signature.sequence);
  try {
    if (!has_begun_) {
      const auto neighbours = mesh_.neighbours();
      mesh_.reach(neighbours);
      for (int peer : neighbours) mesh_.require(peer);
      begin();
    }
    if (!uses_relay_) return enter(call, data, give);
    const size_t common = common_bytes(give);
    relay_calls(call, data, give, common);
    store_calls(call);
    if (!are_one_call(call.report.calls.data(), size_)) throw Mismatch(call.report);
    if (common == 0) send_separately(data, give);
  } catch (const TimedOut& failure) {
    // If a peer has ended the group, report its reason: the awaited rank may be late because of that peer.
    if (mesh_.has_farewell()) throw mesh_.explain(failure.missing[0], failure.what());
    const auto missing = not_arrived(call);
    throw Failure(FL_TIMEOUT, missing.empty() ? failure.missing : missing, failure.what());
  }
}

// A rank need not wait for the calls of all ranks. For example, the root of a small broadcast returns after
// it has copied its data, before the other ranks call, as in shm/entering.cc. Such a rank compares the other
// calls later, and may be at most kMostAhead calls ahead of the last compared call. If calls differ, each
// rank that detects it raises immediately. In the next call in which every rank waits for all ranks, no data
// is moved and every rank raises.

void Collectives::enter(Call& call, const void* data, const Parts& give) {
  while (calls_ + 1 - compared_ > kMostAhead) compare_call(compared_ + 1);
  ++calls_;
  const Ranks needed = compares_at_once_ ? Ranks{0, size_} : needed_by(rank_, call.signature);
  const bool is_ahead = needed.count() < size_;
  if (is_ahead) raise_new_mismatch(call);
  announce(call.signature, call.site, data, give, is_ahead ? kRunsAhead : kWaits);
  if (is_ahead && receive_some(call, needed)) return;
  if (is_ahead) mesh_.hurry();
  receive_all(call);
}

// If this rank has not yet raised a mismatch of an earlier call, raise it. Before that, announce the current
// call as withdrawn: otherwise, other ranks would use its payload as a result.
void Collectives::raise_new_mismatch(const Call& call) {
  while (compared_ + 1 != calls_ && all_have_called(compared_ + 1)) compare_call(compared_ + 1);
  const auto news = mismatches_.to_raise(calls_, true);
  if (!news) return;
  announce(withdrawn(call.signature, compared_), call.site, nullptr, Parts(size_), kRunsAhead);
  mesh_.hurry();
  raise_earlier(news);
}

// Return the ranks that `rank` must wait for in `call`: all ranks if the data is too large for headers.
Ranks Collectives::needed_by(int rank, const fl_signature& call) const {
  const bool is_scan = call.verb == FL_SCAN || call.verb == FL_EXSCAN;
  const size_t bytes = static_cast<size_t>(call.count) * call.itemsize * (is_scan ? size_ - 1 : 1);
  const bool is_small = may_be_small(rank, call) || (call.ndim >= 0 && bytes <= kInlineBytes);
  const bool is_ahead = is_small && !is_compared(call);
  return is_ahead ? fl::needed_by(rank, size_, call) : Ranks{0, size_};
}

void Collectives::announce(const fl_signature& signature, const fl_site& site, const void* data, const Parts& give,
                           WaitMode mode) {
  const char* const source = static_cast<const char*>(data);
  const uint32_t read = compared_;  // frames of calls up to this number are free
  awaited_ = calls_;
  own_calls_[calls_ % own_calls_.size()] = {signature, site, mode};
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const uint32_t slot = calls_ % kLeaving;
    ignore_if_left(r, [&] { await_leaving(r); });
    Frame& frame = outgoing_[r * kLeaving + slot];
    frame.mode = mode;
    frame.signature = signature;
    frame.set_site(site);
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    if (bytes > 0) std::memcpy(frame.data + frame.site_bytes, source + give[r].begin, bytes);
    for (uint32_t number = reposted_; number != read;) post_header(r, ++number + kTurns, false);
    // In a gather, rank r waits for all headers if its own data is large. This rank does not know that size.
    const bool may_wait = mode == kWaits || first_dimension_is_free(signature.verb);
    const bool is_needed = may_wait || fl::needed_by(r, size_, signature).has(rank_);
    const bool at_leisure = !is_needed && calls_ % kHurryEvery != 0;
    const size_t sent = offsetof(Frame, data) + frame.site_bytes + bytes;
    ignore_if_left(r, [&] {
      outgoing_buffers_[r]->send(r, kHeaderSlot, slot * sizeof(Frame), sent, at_leisure);
      ++leaving_[r];
    });
  }
  reposted_ = read;
}

// Wait until fewer than kLeaving headers to rank r are unsent, so that the next header has a free frame.
void Collectives::await_leaving(int r) {
  for (; leaving_[r] == kLeaving; --leaving_[r]) waiter_->sent(*outgoing_buffers_[r], r);
}

// Ignore a failed send to a rank that has closed the group, because it may have completed this call. If this
// rank needs data from that rank, the wait for the data fails later.
template <typename Send>
void Collectives::ignore_if_left(int r, Send send) {
  try {
    send();
  } catch (const std::exception&) {
    if (!mesh_.has_closed(r)) throw;
  }
}

// Receive the calls of the ranks `needed` and return true. If these calls show that the root's data is large,
// return false: then this rank needs the calls of all ranks.
bool Collectives::receive_some(Call& call, Ranks needed) {
  call.report = last_;
  call.report.ago = 0;
  for (int r = needed.first; r < needed.last; ++r) {
    if (r != rank_) wait_for(calls_, r);
    call.report.calls[r] = r == rank_ ? call.signature : incoming(r, calls_).signature;
    call.report.sites[r] = r == rank_ ? call.site : incoming(r, calls_).site();
  }
  call.report.calls[rank_] = call.signature;
  call.report.sites[rank_] = call.site;
  received_at_ = Clock::now();
  if (sees_difference(call.report.calls.data(), rank_, needed)) {
    mesh_.hurry();
    if (const auto until = withdrawn_after(call.report.calls.data(), needed)) {
      while (is_before(compared_, *until)) compare_call(compared_ + 1);
      raise_earlier(mismatches_.to_raise(calls_, false));
    }
    throw Mismatch(report_of(calls_));
  }
  const auto waits = [&](int r) { return mode_of(r, calls_) == kWaits; };
  return awaited(call.report.calls.data(), size_, rank_, needed, waits).count() < size_;
}

Collectives::WaitMode Collectives::mode_of(int r, uint32_t number) const {
  return r == rank_ ? own_calls_[number % own_calls_.size()].mode : incoming(r, number).mode;
}

void Collectives::receive_all(Call& call) {
  while (compared_ + 1 != calls_) compare_call(compared_ + 1);
  mismatches_.forget_old(calls_);
  const auto earlier = mismatches_.to_raise(calls_, false);
  const bool same = compare_call(calls_);
  raise_earlier(earlier);
  call.report = last_;
  if (!same) throw Mismatch(call.report);
}

void Collectives::wait_for(uint32_t number, int r) {
  awaited_ = number;
  for (; is_before(received_[r], number); ++received_[r]) waiter_->received(*incoming_buffers_[r], r);
}

// True if the header of rank r for call `number` has arrived, also if wait_for() has not been called for it.
bool Collectives::has_arrived(uint32_t number, int r) const {
  return !is_before(received_[r], number) || !is_before(received_[r] + incoming_buffers_[r]->received(), number);
}

bool Collectives::all_have_called(uint32_t number) const {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !has_arrived(number, r)) return false;
  }
  return true;
}

// Return call `number` of each rank. A rank has no entry if its header has not arrived.
CallReport Collectives::report_of(uint32_t number) const {
  CallReport report;
  report.reset(size_);
  report.ago = calls_ - number;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !has_arrived(number, r)) continue;
    const OwnCall& own_call = own_calls_[number % own_calls_.size()];
    report.calls[r] = r == rank_ ? own_call.signature : incoming(r, number).signature;
    report.sites[r] = r == rank_ ? own_call.site : incoming(r, number).site();
  }
  return report;
}

// Receive call `number` of all ranks and return true if the calls agree. If they differ, a rank that has
// returned from this call early raises the mismatch in a later call.
bool Collectives::compare_call(uint32_t number) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) wait_for(number, r);
  }
  last_ = report_of(number);
  received_at_ = Clock::now();
  const auto& known_calls = last_.calls;
  const bool same = are_one_call(known_calls.data(), size_);
  compared_ = number;
  if (same && mismatches_.empty()) return true;
  const auto needed = [&](int r) {
    const auto waits = [&](int other) { return mode_of(other, number) == kWaits; };
    return waits(r) ? Ranks{0, size_} : awaited(known_calls.data(), size_, r, needed_by(r, known_calls[r]), waits);
  };
  mismatches_.compared(number, same, known_calls, needed, last_);
  return same;
}

void Collectives::raise_earlier(std::optional<Mismatches::Call> earlier) const {
  if (!earlier) return;
  earlier->report.ago = calls_ - earlier->number;
  throw Mismatch(earlier->report);
}

void Collectives::flush(Clock::time_point end) noexcept {
  try {
    Waiter waiter(mesh_, end, nullptr);
    for (int r = 0; r < size_; ++r) {
      for (; leaving_[r] > 0; --leaving_[r]) waiter.sent(*outgoing_buffers_[r], r);
    }
  } catch (const std::exception&) {
    // Ignore errors: a peer has closed the group, or `end` has passed.
  }
}

// Many ranks ------------------------------------------------------------------------------------

// Return the size of the payload if it is equal for all receivers and the relay has space for it, else 0.
size_t Collectives::common_bytes(const Parts& give) const {
  Part common;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || give[r].bytes == 0) continue;
    if (common.bytes > 0 && (give[r].begin != common.begin || give[r].bytes != common.bytes)) return 0;
    common = give[r];
  }
  return common.bytes * size_ <= Relay::kBytes ? common.bytes : 0;
}

void Collectives::relay_calls(Call& call, const void* data, const Parts& give, size_t bytes) {
  size_t begin = 0;
  for (int r = 0; r < size_ && bytes > 0; ++r) {
    if (r != rank_ && give[r].bytes > 0) begin = give[r].begin;
  }
  relay_.exchange(call.signature, call.site, static_cast<const char*>(data) + begin, bytes, call.waiter);
}

// Send the small payloads that were not sent through the relay.
void Collectives::send_separately(const void* data, const Parts& give) {
  const char* const source = static_cast<const char*>(data);
  for (int step = 1; step < size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (give[r].bytes == 0 || give[r].bytes > kInlineBytes) continue;
    std::memcpy(outgoing_[r].data, source + give[r].begin, give[r].bytes);
    outgoing_buffers_[r]->send(r, kHeaderSlot, offsetof(Frame, data), give[r].bytes);
    pending_.push_back(r);
  }
}

// Receive take[r] bytes from each rank r, unless they are too large for a header or came through the relay.
void Collectives::fetch(const Parts& take) {
  if (!uses_relay_) return;
  std::vector<int> requested;
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = take[r].bytes;
    if (r == rank_ || bytes == 0 || bytes > kInlineBytes || relay_.bytes(r) > 0) continue;
    incoming_buffers_[r]->recv(r, kHeaderSlot, offsetof(Frame, data), bytes);
    requested.push_back(r);
  }
  for (int r : requested) waiter_->received(*incoming_buffers_[r], r);
}

const char* Collectives::payload(int r) const {
  if (!uses_relay_) return incoming(r, calls_).payload();
  return relay_.bytes(r) > 0 ? relay_.payload(r) : incoming_[r].payload();
}

// Last known calls ------------------------------------------------------------------------------

void Collectives::store_calls(Call& call) {
  received_at_ = Clock::now();
  for (int r = 0; r < size_; ++r) {
    last_.calls[r] = r == rank_ ? call.signature : relay_.call(r);
    last_.sites[r] = r == rank_ ? call.site : relay_.site(r);
  }
  call.report.calls = last_.calls;
  call.report.sites = last_.sites;
}

CallReport Collectives::last_calls() const {
  CallReport report = last_;
  report.ago = 0;
  // Also report calls that have arrived and are not compared yet.
  for (uint32_t number = compared_; !uses_relay_ && number != calls_;) {
    const CallReport later = report_of(++number);
    for (int r = 0; r < size_; ++r) {
      if (later.calls[r].sequence == 0) continue;
      report.calls[r] = later.calls[r];
      report.sites[r] = later.sites[r];
    }
  }
  const double age = std::chrono::duration<double>(Clock::now() - received_at_).count();
  for (int r = 0; r < size_; ++r) report.ages[r] = report.calls[r].sequence == 0 ? -1 : age;
  return report;
}

bool Collectives::is_ahead(int rank, fl_signature& call) const {
  if (!has_begun_ || rank == rank_) return false;
  if (uses_relay_) return relay_.is_ahead(rank, call);
  if (!has_arrived(calls_ + 1, rank)) return false;
  call = incoming(rank, calls_ + 1).signature;
  return true;
}

// Return the ranks whose call has not arrived. With a relay, such a rank may have called, although the rank
// that forwards its call is late. So ask each of them, and return the ranks that have not called.
std::vector<int> Collectives::not_arrived(const Call& call) {
  if (uses_relay_ && has_begun_) return mesh_.not_called(relay_.missing(), call.signature.sequence);
  std::vector<int> missing;
  for (int r = 0; has_begun_ && r < size_; ++r) {
    if (r != rank_ && !has_arrived(awaited_, r)) missing.push_back(r);
  }
  return missing;
}

Parts Collectives::same_for_all(size_t bytes) const { return Parts(size_, Part{0, bytes}); }

Parts Collectives::equal_sections(size_t bytes) const {
  return adjacent_parts(size_, [&](int) { return bytes; });
}

void Collectives::barrier(Call& call) {
  exchange_calls(call, nullptr, same_for_all(0));
  await_pending();
}

}  // namespace fl
