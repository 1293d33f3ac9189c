// Start of a call: each rank announces its call, waits for the calls of other ranks, and compares them.
//
// A rank need not wait for the calls of all ranks. For example, the root of a small broadcast needs none, and
// returns before the other ranks call. Such a rank compares the other calls later, and may be at most
// kMostAhead calls ahead of the last compared call. If calls differ, each rank that detects it raises
// immediately. In the next call in which every rank waits for all ranks, no data is moved and every rank
// raises. All ranks compare the same announced calls, so they agree on this.

#include "../common/signature.h"
#include "collectives.h"
#include "../common/copying.h"

namespace fl {
namespace {

// Flags in Call::kind.
constexpr uint32_t kRunsAhead = 1u << 23;  // this rank may return before other ranks have called
constexpr uint32_t kAny = 1u << 29;        // the rank knows only verb and root

// Maximum bytes of a call that may return early, if each rank has its own processor. With more data, the next
// call would slow down ranks that still read the data of this call (docs/shared-memory.md).
constexpr size_t kAheadBytes = sized(1024, 32);

// Maximum seconds to wait for the call site of another rank after a mismatch.
constexpr double kAnnouncingSeconds = 5;

uint32_t kind_of(const fl_signature& s) {
  const uint32_t call = static_cast<uint32_t>(s.part_of) << 24 | static_cast<uint32_t>(s.verb) << 16;
  if (s.ndim == FL_ANY) return call | kAny;
  return call | static_cast<uint32_t>(s.dtype) << 8 | static_cast<uint32_t>(s.op);
}

// Return the FNV-1a hash of the shape, without a first dimension that may differ between ranks.
uint64_t hash_of_shape(const fl_signature& s) {
  uint64_t hash = 1469598103934665603u ^ static_cast<uint64_t>(s.ndim);
  const int dims = std::min(s.ndim, FL_DIMENSIONS);
  for (int d = first_dimension_is_free(s.verb) ? 1 : 0; d < dims; ++d) {
    hash = (hash ^ static_cast<uint64_t>(s.shape[d])) * 1099511628211u;
  }
  return hash;
}

// Like same_call(), but compares only the first cache lines of two calls. If `free`, the counts may differ.
bool alike(const Call& a, const Call& b, bool free) {
  constexpr uint32_t kMayDiffer = kRunsAhead | kIsLarge | kCanRead;
  if (((a.kind | b.kind) & kAny) != 0) {
    constexpr uint32_t kVerb = 0x1fff0000 & ~kRunsAhead;  // bits of `verb` and `part_of`
    return ((a.kind ^ b.kind) & kVerb) == 0 && a.root == b.root;
  }
  return (a.kind | kMayDiffer) == (b.kind | kMayDiffer) && a.root == b.root && a.scale == b.scale &&
         a.shape == b.shape && (free || a.count == b.count);
}

}  // namespace

void Collectives::begin(double seconds, InterruptCheck interrupt) {
  watch_ = Watch(peers_, Concern{-1, calls_ + 1}, seconds, interrupt);
}

void Collectives::go_on(double seconds, InterruptCheck interrupt) {
  watch_ = Watch(peers_, Concern{-1, calls_}, seconds, interrupt);
}

// Showing this rank's call --------------------------------------------------------------------

// Announce a call. If `is_ahead`, it sends no data and is compared later, so this rank need not wait.
void Collectives::call(const fl_signature& signature, const void* data, const fl_site* site, bool is_ahead) {
  const Outgoing outgoing = outgoing_of(signature, data);
  needed_ = is_ahead ? Ranks{} : needed_by(rank_, signature);
  const size_t bytes = static_cast<size_t>(signature.count) * signature.itemsize;
  // A rank that waits for no rank publishes its call site now. Without a site, it waits for all ranks.
  const bool is_lost = needed_.count() == 0 && site == nullptr;
  if (compares_at_once_ || is_lost || (bytes > kAheadBytes && peers_.may_spin())) needed_ = {0, size_};
  is_shown_ = find_room(outgoing.inline_bytes);
  if (is_shown_) {
    announce(signature, outgoing, site);
  } else {
    waiting_ = signature;
    waiting_data_ = data;
    waiting_site_ = site;
  }
}

Collectives::Outgoing Collectives::outgoing_of(const fl_signature& signature, const void* data) const {
  const bool is_uneven = signature.verb == FL_ALL_TO_ALL_UNEVEN || signature.verb == FL_REDUCE_SCATTER_UNEVEN;
  return is_uneven ? sections_in(signature, data) : Outgoing{data, bytes_with_call(signature)};
}

void Collectives::show_waiting() {
  is_shown_ = true;
  announce(waiting_, outgoing_of(waiting_, waiting_data_), waiting_site_);
}

bool Collectives::travels_whole(const fl_signature& signature) const {
  if (is_compared(signature)) return true;
  if (signature.verb == FL_ALL_TO_ALL_UNEVEN || signature.verb == FL_REDUCE_SCATTER_UNEVEN) return false;
  const size_t parts = signature.verb == FL_SCATTER ? size_ : 1;
  return signature.ndim >= 0 && signature.count * signature.itemsize * parts <= kInlineBytes;
}

bool Collectives::can_begin(const fl_signature& signature) {
  return travels_whole(signature) && find_room(bytes_with_call(signature));
}

// Return the number of bytes that are sent with the call: this rank's whole data, or 0 if it is too large.
size_t Collectives::bytes_with_call(const fl_signature& signature) const {
  size_t bytes = static_cast<size_t>(signature.count) * signature.itemsize;
  const bool only_root = signature.verb == FL_BROADCAST || signature.verb == FL_SCATTER;
  if (is_compared(signature) || signature.verb == FL_BARRIER || (only_root && rank_ != signature.root)) return 0;
  if (signature.verb == FL_SCATTER) bytes *= size_;
  return bytes <= kInlineBytes ? bytes : 0;
}

// Return the ranks that `rank` must wait for in `call`: all ranks if the data is not in the calls.
Ranks Collectives::needed_by(int rank, const fl_signature& call) const {
  const bool travels = may_be_small(rank, call) || travels_whole(call);
  return travels && !is_compared(call) ? fl::needed_by(rank, size_, call) : Ranks{0, size_};
}

// True if the next call, k, can be announced. It replaces this rank's call k - kCalls, which no rank reads
// any more: all ranks compared it before their call k - kMostAhead, which this rank has compared. A payload
// is free if all ranks have made a later call than the call that used it.
bool Collectives::find_room(size_t inline_bytes) {
  while (calls_ + 1 - compared_ > kMostAhead || (inline_bytes > kTinyBytes && !find_payload())) {
    if (!all_have_called(compared_ + 1)) return false;
    compare_call(compared_ + 1);
  }
  return true;
}

bool Collectives::find_payload() {
  for (payload_ = 0; payload_ < kPayloads; ++payload_) {
    const Payload& payload = payloads_[payload_];
    if (!payload.is_used || is_before(payload.call, compared_)) return true;
  }
  return false;
}

void Collectives::wait_for_room(size_t inline_bytes) {
  while (!find_room(inline_bytes)) wait_for_all(watch_.in_call(compared_ + 1), compared_ + 1);
}

void Collectives::announce(const fl_signature& signature, const Outgoing& outgoing, const fl_site* site) {
  const uint32_t number = calls_ + 1;
  const int64_t now = coarse_now();
  news_.reset();
  if (needed_.count() < size_) {
    // If the clock has not ticked since the last call, compare nothing: other ranks wait for this call.
    if (now != description_of(rank_, calls_).called_at) compare_earlier(number);
    news_ = mismatches_.to_raise(number, true);
    // If this call will raise, announce it as withdrawn, so that no other rank uses its payload as a result.
    if (news_ && !is_compared(signature)) return write_call(withdrawn(signature, compared_), {nullptr, 0}, site, now);
  }
  write_call(signature, outgoing, site, now);
}

void Collectives::write_call(const fl_signature& signature, const Outgoing& outgoing, const fl_site* site,
                             int64_t now) {
  const uint32_t number = ++calls_;
  Call& call = segment_.block(rank_).calls[number % kCalls];
  call.kind = kind_of(signature);
  call.root = signature.root;
  call.count = signature.count;
  call.scale = signature.scale;
  call.shape = hash_of_shape(signature);
  call.location = outgoing.inline_bytes > 0 ? 0 : location_of(outgoing.data);
  Description& description = description_of(rank_, number);
  description.signature = signature;
  description.signature.sequence = sequence_of(number);
  description.called_at = now;
  if (needed_.count() < size_) {
    call.kind |= kRunsAhead;
    if (needed_.count() == 0) {
      description.site = *site;
      description.site_known.set(number);
    }
  }
  if (outgoing.inline_bytes == 0) {
    announce_large(signature, outgoing.data, call);
  } else if (outgoing.inline_bytes <= kTinyBytes) {
    copy(call.tiny, outgoing.data, outgoing.inline_bytes);
  } else {
    payloads_[payload_] = {true, number};
    call.payload = payload_;
    copy(segment_.block(rank_).payloads[payload_], outgoing.data, outgoing.inline_bytes);
  }
  call.number.raise(number);
}

// Announce the address of large data, and the costs of the copy paths. A rank that does not know how much
// data the call moves also does this, because it may be large.
void Collectives::announce_large(const fl_signature& signature, const void* data, Call& call) {
  if (is_compared(signature)) return;
  const bool knows = signature.ndim != FL_ANY && signature.verb != FL_ALL_TO_ALL_UNEVEN;
  size_t bytes = signature.ndim == FL_ANY ? 0 : static_cast<size_t>(signature.count) * signature.itemsize;
  if (signature.verb == FL_SCATTER) bytes *= size_;
  if (knows && bytes <= kInlineBytes) return;
  call.kind |= kIsLarge | (remote_.can_read_all() ? kCanRead : 0);
  call.large = {reinterpret_cast<uintptr_t>(data), choice_.costs(key_of(signature, call), bytes)};
}

// Return the key of this call's costs in choice_. Reductions in shared memory have their own key, 0.
int Collectives::key_of(const fl_signature& signature, const Call& call) {
  return signature.verb == FL_ALL_REDUCE && call.location != 0 ? 0 : signature.verb;
}

const char* Collectives::inline_data(int rank, size_t bytes) const {
  const Call& call = call_of(rank);
  if (bytes <= kTinyBytes) return call.tiny;
  // Both ranks usually use the same index. With this guess, the data is loaded before the index of `rank`.
  uint32_t payload = payload_;
  if (call.payload != payload || needed_.count() < size_) {
    payload = call.payload;
    asm volatile("" : "+r"(payload));  // the compiler must keep the branch above, which is predicted
  }
  return segment_.block(rank).payloads[payload];
}

// Calls of other ranks ----------------------------------------------------------------------

Progress Collectives::progress() {
  if (!is_shown_) {
    if (!find_room(outgoing_of(waiting_, waiting_data_).inline_bytes)) return Progress::kAwaited;
    show_waiting();
  }
  bool complete = true;
  for (int r = needed_.first; r < needed_.last; ++r) {
    const Call& call = call_of(r);
    if (!call.number.reached(calls_)) return Progress::kAwaited;
    complete = complete && (call.kind & (kIsLarge | kAny)) != kIsLarge;
    complete = complete && (needed_.count() == size_ || (call.kind & kRunsAhead) != 0);
  }
  return complete ? Progress::kComplete : Progress::kCalled;
}

// Wait for the calls that this rank needs. If it needs the calls of all ranks, compare them.
void Collectives::receive_calls(const fl_signature& signature) {
  if (!is_shown_) {
    wait_for_room(outgoing_of(waiting_, waiting_data_).inline_bytes);
    watch_ = watch_.in_call(calls_ + 1);
    show_waiting();
  }
  only_reader_ = -1;
  if (needed_.count() < size_) return receive_some(signature);
  const Call& own_call = call_of(rank_);
  const uint32_t verb = own_call.kind >> 16 & 0x1f;
  const bool free = first_dimension_is_free(static_cast<int>(verb));
  bool same = (own_call.kind & (kAny | kRunsAhead)) == 0 && verb != FL_SCATTER;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Call& peer_call = segment_.block(r).calls[calls_ % kCalls];
    watch_.wait(peer_call.number, calls_, r);
    same = same && alike(own_call, peer_call, free);
  }
  if (verb == FL_BROADCAST) same = same && (call_of(own_call.root).kind & kAny) == 0;
  // All ranks have used the call that the next call replaces: load its cache line for writing.
  expect_to_write(&segment_.block(rank_).calls[(calls_ + 1) % kCalls]);
  if (same && compared_ + 1 == calls_ && mismatches_.empty()) {
    compared_ = calls_;  // as compare_call() would do
  } else {
    compare_all();
  }
}

void Collectives::compare_all() {
  while (compared_ + 1 != calls_) compare_call(compared_ + 1);
  mismatches_.forget_old(calls_);
  const auto earlier = mismatches_.to_raise(calls_, false);
  const bool same = compare_call(calls_);
  if (earlier) throw Mismatch(report_of(earlier->number));
  if (!same) throw Mismatch();
}

void Collectives::receive_some(const fl_signature& signature) {
  if (news_) throw Mismatch(report_of(news_->number));
  compare_earlier(calls_);
  const Call& own_call = call_of(rank_);
  bool same = true, some_wait = false;
  for (int r = needed_.first; r < needed_.last; ++r) {
    Call& peer_call = segment_.block(r).calls[calls_ % kCalls];
    watch_.wait(peer_call.number, calls_, r);
    some_wait = some_wait || (peer_call.kind & kRunsAhead) == 0;
    same = same && alike(own_call, peer_call, false);
    if (root_must_know(signature.verb)) same = same && (peer_call.kind & kAny) == 0;
  }
  if (same && some_wait) {
    needed_ = {0, size_};  // the root has large data: see awaited()
    return receive_calls(signature);
  }
  expect_to_write(&segment_.block(rank_).calls[(calls_ + 1) % kCalls]);
  if (!same) raise_now();
}

bool Collectives::look_back(double seconds) {
  compare_earlier(calls_ + 1);
  if (const auto news = mismatches_.to_raise(calls_, true)) throw Mismatch(report_of(news->number));
  if (compared_ == calls_) return false;
  const uint32_t oldest = compared_ + 1;
  const double age = (coarse_now() - description_of(rank_, oldest).called_at) * 1e-9;
  if (age > seconds) wait_for_all(Watch(peers_, Concern{-1, oldest}, 0, nullptr), oldest);
  return true;
}

// Compare all calls before `number` that all ranks have made.
void Collectives::compare_earlier(uint32_t number) {
  while (compared_ + 1 != number && all_have_called(compared_ + 1)) compare_call(compared_ + 1);
}

void Collectives::wait_for_all(Watch watch, uint32_t number) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) watch.wait(segment_.block(r).calls[number % kCalls].number, number, r);
  }
}

bool Collectives::all_have_called(uint32_t number) const {
  for (int r = 0; r < size_; ++r) {
    if (!call_of(r, number).number.reached(number)) return false;
  }
  return true;
}

// Compare call `number` of all ranks, and return true if the calls agree. If they differ, a rank that has
// returned from this call early raises the mismatch in a later call.
bool Collectives::compare_call(uint32_t number) {
  const Call& own_call = call_of(rank_, number);
  const int verb = static_cast<int>(own_call.kind >> 16 & 0x1f);
  const bool free = first_dimension_is_free(verb);
  bool same = (own_call.kind & kAny) == 0;
  uint32_t kinds = own_call.kind;
  for (int r = 0; r < size_; ++r) {
    const Call& peer_call = call_of(r, number);
    kinds |= peer_call.kind;
    same = same && (r == rank_ || alike(own_call, peer_call, free));
  }
  if (root_must_know(verb)) same = same && (call_of(own_call.root, number).kind & kAny) == 0;
  // The complete calls give the same result on all ranks, also on ranks that do not know the shape.
  same = same || are_one_call(calls(number).data(), size_);
  compared_ = number;
  if (same && (kinds & kIsLarge) != 0 && (own_call.kind & kRunsAhead) != 0 && verb == FL_GATHER) {
    mismatches_.forget_old(number);
    if (mismatches_.empty()) pass_rows(number);  // after a mismatch no rank moves rows
  }
  if (same && mismatches_.empty()) return true;
  // Call sites are read later, when the mismatch is raised.
  const auto made = calls(number);
  const auto needed = [&](int r) {
    const auto waits = [&](int other) { return (call_of(other, number).kind & kRunsAhead) == 0; };
    if (waits(r)) return Ranks{0, size_};
    return is_compared(made[r]) ? Ranks{} : awaited(made.data(), size_, r, needed_by(r, made[r]), waits);
  };
  mismatches_.compared(number, same, made, needed, {});
  return same;
}

std::vector<fl_signature> Collectives::calls(uint32_t number) const {
  std::vector<fl_signature> calls(size_);
  for (int r = 0; r < size_; ++r) {
    if (call_of(r, number).number.value() == number) calls[r] = description_of(r, number).signature;
  }
  return calls;
}

// Mismatches ----------------------------------------------------------------------------------

// Raise the mismatch of this call. If a rank has withdrawn its call because of an earlier mismatch, raise the
// earlier mismatch. This rank detects it, too, because it can compare the same calls as that rank.
void Collectives::raise_now() {
  if (withdrawn_after(calls().data(), needed_)) {
    compare_earlier(calls_);
    if (const auto earlier = mismatches_.to_raise(calls_, false)) throw Mismatch(report_of(earlier->number));
  }
  try {
    wait_for_all(watch_.at_most(kAnnouncingSeconds), calls_);
  } catch (const Failure&) {  // late ranks are missing in the report
  }
  throw Mismatch();
}

void Collectives::publish_site(const fl_site& site) {
  Description& description = description_of(rank_, calls_);
  if (!is_shown_ || description.site_known.value() == calls_) return;
  description.site = site;
  description.site_known.raise(calls_);
}

CallReport Collectives::report_of(uint32_t number) {
  CallReport report;
  report.reset(size_);
  report.calls = calls(number);
  report.ago = calls_ - number;
  for (int r = 0; r < size_; ++r) {
    if (report.calls[r].sequence != 0 && has_site(r, number)) report.sites[r] = description_of(r, number).site;
  }
  return report;
}

// Wait for the call site of `rank`. Return false if `rank` has ended or has detected no mismatch.
bool Collectives::has_site(int rank, uint32_t number) {
  Counter& site_known = description_of(rank, number).site_known;
  if (number == 0) return false;  // 0 is also the initial value
  if (!site_known.reached(number) && !raises_itself(rank, number)) return false;
  try {
    watch_.at_most(kAnnouncingSeconds).wait(site_known, number, rank);
  } catch (const Failure&) {
    return false;
  }
  return site_known.value() == number;
}

// True if `rank` itself detects that the calls `number` differ, and so publishes its site.
bool Collectives::raises_itself(int rank, uint32_t number) const {
  const Call& call = call_of(rank, number);
  if ((call.kind & kRunsAhead) == 0) return true;
  const Ranks needed = needed_by(rank, description_of(rank, number).signature);
  for (int r = needed.first; r < needed.last; ++r) {
    const Call& other = call_of(r, number);
    if (!other.number.reached(number) || !alike(call, other, false)) return true;
  }
  return false;
}

CallReport Collectives::last_calls() const {
  CallReport report;
  report.reset(size_);
  const int64_t now = coarse_now();
  for (int r = 0; r < size_; ++r) {
    uint32_t last = 0;
    for (const Call& call : segment_.block(r).calls) {
      const uint32_t number = call.number.value();
      if (number != 0 && (last == 0 || is_before(last, number))) last = number;
    }
    if (last == 0) continue;  // the rank has made no call
    const Description& description = description_of(r, last);
    report.calls[r] = description.signature;
    report.ages[r] = (now - description.called_at) * 1e-9;
  }
  if (!is_shown_) {
    report.calls[rank_] = waiting_;
    report.calls[rank_].sequence = sequence_of(calls_ + 1);
  }
  return report;
}

bool Collectives::is_ahead(int rank, fl_signature& call) const {
  if (rank == rank_ || call_of(rank, calls_ + 1).number.value() != calls_ + 1) return false;
  call = description_of(rank, calls_ + 1).signature;
  return true;
}

}  // namespace fl
