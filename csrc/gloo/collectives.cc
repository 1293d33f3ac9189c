// Start of a collective: every rank announces its call to every other rank.
#include "collectives.h"

#include "../common/signature.h"

namespace fl {

// True if the caller needs the signatures of other ranks.
static bool needs_report(const fl_signature& call) { return shapes_are_wanted(call.verb) || call.ndim == FL_ANY; }

Collectives::Collectives(Mesh& mesh)
    : mesh_(mesh),
      rank_(mesh.rank),
      size_(mesh.size),
      uses_relay_(size_ > Mesh::kDirect),
      counters_(size_),
      arrived_(size_),
      entries_(uses_relay_ ? 0 : size_ * kTurns),
      texts_(uses_relay_ ? 0 : size_ * kTexts),
      compared_texts_(size_),
      relay_(mesh) { make_bytes(8 << 20); }  // raises if memory runs out: Gloo's thread, which needs some, cannot

fl_signature Collectives::Entry::call(uint32_t number) const {
  fl_signature call = text->signature;
  call.sequence = sequence_of(number);
  return call;
}

void Collectives::open() {
  last_.reset(size_);
  compares_at_once_ = mesh_.family->engine.checks_at_once();
  has_begun_ = false;
  const auto neighbours = mesh_.neighbours();
  const auto connected = [&](int peer) { return mesh_.is_connected(peer); };
  if (std::all_of(neighbours.begin(), neighbours.end(), connected)) begin();
}

// Prepare to receive headers. The neighbours must be connected.
void Collectives::begin() {
  has_begun_ = true;
  if (uses_relay_) return relay_.open();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    counters_[r] = mesh_.buffer(nullptr, 0);
    mesh_.listen(*counters_[r], r);
  }
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
    const char* const source = static_cast<const char*>(data);
    const Part common = common_part(give);
    relay_.exchange(call.signature, call.site, source + common.begin, common.bytes, call.waiter);
    store_calls(call);
    if (!are_one_call(call.report.calls.data(), size_)) throw Mismatch(call.report);
    if (common.bytes == 0) send_separately(source, give);
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
  const size_t bytes = std::max<size_t>(longest(give), 1);
  const auto most_ahead = static_cast<uint32_t>(std::clamp<size_t>(kAheadBytes / bytes, 1, kMostAhead));
  while (calls_ + 1 - compared_ > most_ahead) compare_call(compared_ + 1);
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
  Ranks needed = is_ahead ? fl::needed_by(rank, size_, call) : Ranks{0, size_};
  if (needed.count() == 1 && uses_tree(call)) {
    const int parent = Tree{size_, static_cast<int>(call.root)}.parent(rank);
    if (parent != call.root) needed.also = parent;
  }
  return needed;
}

// True if ranks forward the root's data. Only the root knows the size of an object, so objects always use a tree.
bool Collectives::uses_tree(const fl_signature& call) const {
  if (call.verb != FL_BROADCAST || size_ == 2 || uses_relay_) return false;
  if (compares_at_once_ || is_compared(call)) return false;
  if (call.part_of != 0) return true;
  const size_t bytes = static_cast<size_t>(call.count) * call.itemsize;
  const bool is_small = call.ndim >= 0 && bytes <= kInlineBytes;
  return is_small && kEthernet.tree(size_, bytes) < kEthernet.direct(size_, bytes);
}

void Collectives::announce(const fl_signature& signature, const fl_site& site, const void* data, const Parts& give,
                           WaitMode mode) {
  char* const source = static_cast<char*>(const_cast<void*>(data));
  awaited_ = calls_;
  Text text{signature, site, 0};
  text.signature.sequence = 0;  // equal calls have equal bytes
  const std::string_view bytes(reinterpret_cast<const char*>(&text), sizeof text);
  const size_t number = std::hash<std::string_view>{}(bytes) % kTexts;
  auto& known = texts_[rank_ * kTexts + number];
  const bool repeats = known != nullptr && std::memcmp(known.get(), &text, sizeof text) == 0;
  if (!repeats) known = std::make_shared<const Text>(text);
  entry(rank_, calls_) = {known, mode, {}, 0, nullptr};
  sender_ = rank_;
  const uint64_t tag = number | (repeats ? kRepeats : 0) | (mode == kRunsAhead ? kAhead : 0);
  const iovec head{&text, repeats ? 0 : sizeof text};
  const Tree tree{size_, static_cast<int>(signature.root)};
  const bool in_tree = mode == kRunsAhead && uses_tree(signature);
  for (int step = size_ - 1; step > 0; --step) {  // in a tree, this is the order of Tree::for_each_child
    const int r = (rank_ + step) % size_;
    entry(r, calls_ - 1).parcel.reset();
    entry(r, calls_ - 1).forwarded.reset();
    const size_t bytes = give[r].bytes <= kInlineBytes ? give[r].bytes : 0;
    // Rank r also waits for this rank if it waits for a rank that waits for all ranks.
    const Ranks needed = needed_by(r, signature);
    const bool is_awaited = needed.has(rank_) || (mode == kWaits && needed.count() > 0);
    // In a tree, only the root's children wait for a header of this call. Others wait for forwarded data.
    const bool is_needed = in_tree ? rank_ == tree.root && tree.parent(r) == rank_ : is_awaited;
    auto haste = is_needed || calls_ % kHurryEvery == 0 ? Pair::kSoon : Pair::kLater;
    if (is_needed && mode == kWaits) haste = Pair::kNow;
    ignore_if_left(r, [&] {
      mesh_.pair_with(r).call(mesh_.group, tag, {head, {source + give[r].begin, bytes}}, haste);
    });
  }
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
  std::array<fl_signature, Mesh::kDirect> calls{};
  if (needed.count() > 0 && uses_tree(call.signature)) receive_in_tree(call);
  needed.for_each([&](int r) {
    if (r != rank_ && &latest(r) == &entry(r, calls_)) wait_for(calls_, r);
    calls[r] = call_of(call, r);
  });
  calls[rank_] = call.signature;
  received_at_ = Clock::now();
  if (sees_difference(calls.data(), rank_, needed)) {
    mesh_.hurry();
    needed.for_each([&](int r) {
      if (r != rank_) wait_for(calls_, r);
    });
    if (const auto until = withdrawn_after(calls.data(), needed)) {
      while (is_before(compared_, *until)) compare_call(compared_ + 1);
      raise_earlier(mismatches_.to_raise(calls_, false));
    }
    throw Mismatch(report_of(calls_));
  }
  if (needs_report(call.signature) && needed.count() > 0) call.report = report_of(calls_);
  const auto waits = [&](int r) { return latest(r).mode == kWaits; };
  return awaited(calls.data(), size_, rank_, needed, waits).count() < size_;
}

// Receive the root's call and data from the parent in the tree, and send them to the children. If the parent made
// another call, it does not forward, and the root's own header shows whether the calls differ.
void Collectives::receive_in_tree(const Call& call) {
  const Tree tree{size_, static_cast<int>(call.signature.root)};
  const int parent = tree.parent(rank_);
  wait_for(calls_, parent);
  const Entry& from = entry(parent, calls_);
  const fl_signature& other = from.text->signature;
  const bool forwards = parent != tree.root && same_call(call.signature, other) && uses_tree(other);
  while (forwards && from.forwarded == nullptr) wait_for_packet(parent);
  if (forwards) sender_ = parent;
  if (!forwards) wait_for(calls_, tree.root);
  const Entry& root = latest(tree.root);
  const iovec head{const_cast<Text*>(root.text.get()), sizeof(Text)};
  const iovec data{root.parcel->memory.get() + root.payload, root.parcel->bytes - root.payload};
  const uint64_t tag = kForwards | (root.mode == kRunsAhead ? kAhead : 0);
  tree.for_each_child(rank_, [&](int r) {
    ignore_if_left(r, [&] { mesh_.pair_with(r).call(mesh_.group, tag, {head, data}, Pair::kSoon); });
  });
}

// Return the entry of rank r, or the root's entry that this rank has received in a tree.
const Collectives::Entry& Collectives::latest(int r) const {
  const Entry& sender = entry(sender_, calls_);
  const bool is_root = sender_ != rank_ && sender.forwarded != nullptr && r == sender.text->signature.root;
  return is_root ? *sender.forwarded : entry(r, calls_);
}

const fl_signature& Collectives::call_of(const Call& call, int r) const {
  if (r == rank_) return call.signature;
  return uses_relay_ ? relay_.call(r) : latest(r).text->signature;
}

void Collectives::receive_all(Call& call) {
  while (compared_ + 1 != calls_) compare_call(compared_ + 1);
  mismatches_.forget_old(calls_);
  const auto earlier = mismatches_.to_raise(calls_, false);
  const bool same = compare_call(calls_);
  raise_earlier(earlier);
  if (!same || needs_report(call.signature)) call.report = report_of(calls_);
  if (!same) throw Mismatch(call.report);
}

void Collectives::wait_for(uint32_t number, int r) {
  awaited_ = number;
  while (!has_arrived(number, r)) wait_for_packet(r);
}

void Collectives::wait_for_packet(int r) {
  waiter_->received(*counters_[r], r);
  store_arrived(r);
}

// True if the header of rank r for call `number` has arrived, also if wait_for() has not been called for it.
bool Collectives::has_arrived(uint32_t number, int r) const {
  if (is_before(arrived_[r], number)) store_arrived(r);
  return !is_before(arrived_[r], number);
}

// Store the headers that have arrived from rank r.
void Collectives::store_arrived(int r) const {
  mesh_.take_calls(r, taken_calls_);
  for (ArrivedCall& arrived : taken_calls_) {
    const WaitMode mode = (arrived.tag & kAhead) != 0 ? kRunsAhead : kWaits;
    const auto sent_text = [&] {
      return std::make_shared<const Text>(*reinterpret_cast<const Text*>(arrived.parcel.memory.get()));
    };
    if ((arrived.tag & kForwards) != 0) {
      Entry root{sent_text(), mode, std::move(arrived.parcel), sizeof(Text), nullptr};
      entry(r, arrived_[r]).forwarded = std::make_unique<Entry>(std::move(root));
      continue;
    }
    auto& text = texts_[r * kTexts + arrived.tag % kTexts];
    const bool repeats = (arrived.tag & kRepeats) != 0;
    if (!repeats) text = sent_text();
    entry(r, ++arrived_[r]) = {text, mode, std::move(arrived.parcel), repeats ? 0 : sizeof(Text), nullptr};
  }
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
    const Entry& from = number == calls_ ? latest(r) : entry(r, number);
    if (r != rank_ && &from == &entry(r, number) && !has_arrived(number, r)) continue;
    report.calls[r] = from.call(number);
    report.sites[r] = from.text->site;
  }
  return report;
}

// Receive call `number` of all ranks and return true if the calls agree. If they differ, a rank that has
// returned from this call early raises the mismatch in a later call.
bool Collectives::compare_call(uint32_t number) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) wait_for(number, r);
  }
  received_at_ = Clock::now();
  compared_ = number;
  bool is_known = mismatches_.empty();  // every rank repeats its last compared call, and those calls were the same
  for (int r = 0; r < size_; ++r) is_known = is_known && entry(r, number).text == compared_texts_[r];
  if (is_known) return true;
  const CallReport report = report_of(number);
  const auto& known_calls = report.calls;
  const bool same = are_one_call(known_calls.data(), size_);
  for (int r = 0; r < size_; ++r) compared_texts_[r] = same ? entry(r, number).text : nullptr;
  if (same && mismatches_.empty()) return true;
  const auto needed = [&](int r) {
    const auto waits = [&](int other) { return entry(other, number).mode == kWaits; };
    return waits(r) ? Ranks{0, size_} : awaited(known_calls.data(), size_, r, needed_by(r, known_calls[r]), waits);
  };
  mismatches_.compared(number, same, known_calls, needed, report);
  return same;
}

void Collectives::raise_earlier(std::optional<Mismatches::Call> earlier) const {
  if (!earlier) return;
  earlier->report.ago = calls_ - earlier->number;
  throw Mismatch(earlier->report);
}

void Collectives::flush(Clock::time_point end) noexcept {
  while (!mesh_.hurry() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Many ranks ------------------------------------------------------------------------------------

// Return the payload if it is the same for all receivers and the relay has space for it, else an empty range.
Part Collectives::common_part(const Parts& give) const {
  Part common;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || give[r].bytes == 0) continue;
    if (common.bytes > 0 && (give[r].begin != common.begin || give[r].bytes != common.bytes)) return {};
    common = give[r];
  }
  return common.bytes * size_ <= Relay::kBytes ? common : Part{};
}

// Send the small payloads that were not sent through the relay.
void Collectives::send_separately(const char* data, const Parts& give) {
  for (int step = 1; step < size_; ++step) {
    const int r = (rank_ + step) % size_;
    if (give[r].bytes > 0 && give[r].bytes <= kInlineBytes) relay_.send(r, data + give[r].begin, give[r].bytes);
  }
}

// Receive take[r] bytes from each rank r, unless they are too large for a header or came through the relay.
void Collectives::fetch(const Parts& take) {
  std::vector<int> sources;
  for (int r = 0; r < size_ && uses_relay_; ++r) {
    const size_t bytes = take[r].bytes;
    if (r != rank_ && bytes > 0 && bytes <= kInlineBytes && relay_.bytes(r) == 0) sources.push_back(r);
  }
  mesh_.reach(sources);
  for (int r : sources) relay_.receive(r, *waiter_);
}

const char* Collectives::payload(int r) const {
  if (uses_relay_) return relay_.payload(r);
  const Entry& from = latest(r);
  return from.parcel ? from.parcel->memory.get() + from.payload : nullptr;
}

// Last known calls ------------------------------------------------------------------------------

void Collectives::store_calls(Call& call) {
  received_at_ = Clock::now();
  for (int r = 0; r < size_; ++r) {
    last_.calls[r] = r == rank_ ? call.signature : relay_.call(r);
    last_.sites[r] = r == rank_ ? call.site : relay_.site(r);
  }
  call.report = last_;
}

CallReport Collectives::last_calls() {
  CallReport report = last_;
  for (int r = 0; r < size_ && !uses_relay_; ++r) {
    const uint32_t number = r == rank_ || has_arrived(calls_, r) ? calls_ : arrived_[r];
    if (number == 0 || entry(r, number).text == nullptr) continue;
    report.calls[r] = entry(r, number).call(number);
    report.sites[r] = entry(r, number).text->site;
  }
  const double age = std::chrono::duration<double>(Clock::now() - received_at_).count();
  for (int r = 0; r < size_; ++r) report.ages[r] = report.calls[r].sequence == 0 ? -1 : age;
  return report;
}

bool Collectives::is_ahead(int rank, fl_signature& call) {
  if (!has_begun_ || rank == rank_) return false;
  if (uses_relay_) return relay_.is_ahead(rank, call);
  if (!has_arrived(calls_ + 1, rank)) return false;
  call = entry(rank, calls_ + 1).call(calls_ + 1);
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
}

}  // namespace fl
