#include "mesh.h"

#include <iterator>
#include <sstream>

namespace fl {
namespace {

using std::chrono::milliseconds;

// Maximum time to deliver the reason why this rank ends a group, and to wait for answers to calls_of().
constexpr milliseconds kGoodbye{500};

// Maximum time by which this rank's heartbeat may report a lost host later than another rank's.
constexpr milliseconds kNewsTakes = 2 * Heartbeat::kLongestInterval;

// Errors that mean that a host does not answer. If only a process has ended, its kernel still answers.
constexpr int kSilence[] = {ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN};

// True if `what`, Gloo's text of an error, says that a host does not answer.
bool is_silence(const std::string& what) {
  return std::any_of(std::begin(kSilence), std::end(kSilence), [&](int error) {
    return what.find(std::generic_category().message(error)) != std::string::npos;
  });
}

// After a timeout, maximum time to wait for timeouts that other ranks report, and time between checks.
constexpr milliseconds kSettling{200}, kSettlingTick{2};

std::string text_for_peers(std::string message, const std::string& name) {
  const std::string self = "this rank";
  for (size_t at; (at = message.find(self)) != std::string::npos;) {
    message.replace(at, self.size(), name);
  }
  return message;
}

}  // namespace

// Why a rank has ended the group. text(): kMark, status, number of missing ranks, their numbers, error text.
struct Mesh::Farewell {
  static constexpr char kMark = 'F';
  static constexpr size_t kMostBytes = 4000;

  int status = 0;
  std::vector<int> missing;
  std::string words;

  std::string text() const {
    std::ostringstream text;
    text << kMark << status << ' ' << missing.size();
    for (int r : missing) text << ' ' << r;
    text << '\n' << words.substr(0, kMostBytes);
    return text.str();
  }

  static Farewell of(const std::string& text) {
    std::istringstream stream(text.substr(1));
    Farewell result;
    size_t count = 0;
    stream >> result.status >> count;
    for (int r; result.missing.size() < count && stream >> r;) result.missing.push_back(r);
    stream.ignore();
    std::getline(stream, result.words, '\0');
    return result;
  }
};

namespace {

int index_in(const std::vector<int>& ranks, int rank) {
  const auto result = std::find(ranks.begin(), ranks.end(), rank);
  return result == ranks.end() ? -1 : static_cast<int>(result - ranks.begin());
}

}  // namespace

// The base class Connections needs the family's watch, so the family is created first, in this call.
Mesh::Mesh(int rank, int size, const std::string& host, const std::string& interface,
           double connect_seconds)
    : Mesh(std::make_shared<Family>(rank, size, host, interface, size > kDirect), all_ranks(size), 0,
           connect_seconds) {}

Mesh::Mesh(const Mesh& whole, const std::vector<int>& ranks, uint64_t number)
    : Mesh(whole.family, whole.to_whole(ranks), number, whole.connect_seconds_) {}

Mesh::Mesh(std::shared_ptr<Family> whole, std::vector<int> ranks, uint64_t number,
           double connect_seconds)
    : Connections(whole->watch),
      Route(number),
      family(std::move(whole)),
      rank(index_in(ranks, family->links->rank)),
      size(static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      connect_seconds_(connect_seconds),
      peer_states_(size) {
  family->add(*this);
}

Mesh::~Mesh() { family->remove(*this); }

std::vector<int> Mesh::to_whole(const std::vector<int>& ranks) const {
  std::vector<int> members;
  for (int r : ranks) members.push_back(ranks_[r]);
  return members;
}

int Mesh::index_of(int member) const { return index_in(ranks_, member); }

std::vector<int> Mesh::neighbours() const {
  std::set<int> result;
  if (size > kDirect) {
    for (int step = 1; step < size; step *= 2) {
      result.insert((rank + step) % size);
      result.insert((rank - step + size) % size);
    }
  } else {
    for (int peer = 0; peer < size; ++peer) result.insert(peer);
  }
  result.erase(rank);
  return {result.begin(), result.end()};
}

void Mesh::connect(const char* addresses, size_t bytes, const char* key, bool lazily, Clock::time_point deadline) {
  family->open(addresses, bytes, key);
  if (lazily) return;
  const Waiter waiter(*this, deadline, nullptr);
  const std::vector<int> peers = neighbours();
  reach(peers);
  for (int peer : peers) {
    awaited_ = peer;
    require(peer);
  }
  awaited_ = -1;
}

void Mesh::reach(const std::vector<int>& peers) {
  for (int peer : peers) links_.reach(ranks_[peer]);
}

void Mesh::require(int peer) {
  Waiter* const waiter = Waiter::current();
  const auto end = deadline_after(connect_seconds_);
  try {
    while (!links_.await(ranks_[peer], Clock::now() + kTick)) {
      if (waiter != nullptr) waiter->check(peer);
      if (waiter == nullptr && Clock::now() >= end) throw TimedOut(peer);
    }
  } catch (const Failure& failure) {
    if (failure.status == FL_PEER_LOST) throw not_connected(peer, failure.what());
    if (const auto why = reason()) throw Failure(*why);
    throw;
  }
}

// Return the failure to raise: the reason that another rank sends soon, if any, else `problem`.
Failure Mesh::not_connected(int peer, const std::string& problem) {
  await_reason(is_silence(problem));
  if (const auto why = reason()) return *why;
  return has_farewell() ? explain(peer, problem) : Failure(FL_PEER_LOST, {peer}, problem);
}

Pair& Mesh::pair_with(int peer) {
  if (!is_connected(peer)) require(peer);
  if (has_news_ && has_ended_sending(peer)) throw std::runtime_error(kHasLeft);  // explain() finds the reason
  return *links_.pair(ranks_[peer]);
}

void Mesh::request(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
  if (!is_connected(peer)) require(peer);
  try {
    buffer.recv(peer, slot, offset, bytes);
  } catch (const std::exception&) {
    // Ignore errors: a later send to the peer reports the broken connection.
  }
}

std::vector<int> Mesh::not_called(const std::vector<int>& ranks, int64_t calls) {
  std::vector<int> behind, absent;
  for (const auto& [member, answer] : links_.calls_of(to_whole(ranks), group, Clock::now() + kGoodbye)) {
    const int peer = index_of(member);
    const bool has_answered = answer != Links::kSilent && answer != Links::kAbsent;
    if (!has_answered ? answer == Links::kSilent : answer < calls) behind.push_back(peer);
    if (answer == Links::kAbsent) absent.push_back(peer);
  }
  return behind.empty() ? absent : behind;
}

// Notifications between members ---------------------------------------------------------------

// Store a note. The calling thread has locked a pair. So another thread forwards a reason to the other ranks.
void Mesh::receive_note(int peer, const std::string& text) {
  const bool is_hearsay = text[0] == kHearsay;
  bool is_first = false;
  const std::string hearsay = is_hearsay ? text : kHearsay + std::to_string(peer) + ' ' + text;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    PeerState& state = peer_states_[peer];
    if (text == kLeaving) state.left_at = Clock::now();
    if (text == kClosed) state.closed_at = Clock::now();
    if (text[0] == Farewell::kMark) state.farewell = std::make_shared<Farewell>(Farewell::of(text));
    if (text != kLeaving && !is_hearsay) has_news_ = true;
    is_first = first_farewell_.second == nullptr && (is_hearsay || text[0] == Farewell::kMark);
    if (is_first) {
      const size_t words = hearsay.find(Farewell::kMark);
      first_farewell_ = {std::stoi(hearsay.substr(1)), std::make_shared<Farewell>(Farewell::of(hearsay.substr(words)))};
      has_farewell_ = true;
    }
  }
  if (is_first && size > kDirect) family->forward_later(*this, hearsay);
  if (text != kLeaving) wake_concerned();
}

void Mesh::forward(const std::string& text) noexcept {
  if (has_reported_) return;
  family->notify(*this, text);
  connect_neighbours(all_ranks(size));  // peers that connect later receive the text too
}

Mesh::PeerState Mesh::state_of(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peer_states_[peer];
}

// Return the reason that arrived first. Later reasons may be consequences of it.
Mesh::PeerFarewell Mesh::first_farewell() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_farewell_;
}

void Mesh::leave() {
  if (is_leaving_.exchange(true)) return;
  family->notify(*this, kLeaving);
  if (group == 0) family->leave();
}

bool Mesh::has_left(int peer) {
  const auto left_at = state_of(peer).left_at;
  return left_at != kNever && Clock::now() - left_at > kLastMessages;
}

bool Mesh::has_ended_sending(int peer) {
  const PeerState state = state_of(peer);
  return state.farewell != nullptr || state.closed_at != kNever;
}

bool Mesh::has_closed(int peer) const {
  const PeerState state = state_of(peer);
  return state.farewell == nullptr && state.closed_at != kNever;
}

bool Mesh::is_lost(int peer) {
  const Pair* const pair = links_.pair(ranks_[peer]);
  if (links_.has_failed(ranks_[peer]) || (pair != nullptr && pair->ended_at() != kNever)) return true;
  return has_news_ && has_ended_sending(peer);
}

// Return the failure if the peer is lost. Connect first: without a connection, a loss may not be detected.
std::optional<Failure> Mesh::loss_of(int peer) {
  if (const auto why = reason()) return why;
  try {
    reach({peer});
  } catch (const std::exception& error) {
    return Failure(FL_PEER_LOST, {peer}, error.what());
  }
  if (!is_lost(peer)) return std::nullopt;
  return Failure(FL_PEER_LOST, {peer}, "the connection broke");
}

Failure Mesh::with_details(const Failure& failure) {
  if (failure.status != FL_PEER_LOST) return failure;
  const int peer = failure.missing[0];
  const Waiter waiter(*this, deadline_after(family->patience()), nullptr);
  const bool has_failed = links_.has_failed(ranks_[peer]);
  return has_failed ? not_connected(peer, links_.problem(ranks_[peer])) : explain(peer, failure.what());
}

Clock::time_point Mesh::end_of(int peer) const {
  const Pair* const pair = links_.pair(ranks_[peer]);
  return std::min(pair != nullptr ? pair->ended_at() : kNever, state_of(peer).closed_at);
}

void Mesh::stop() { end(Failure(FL_CLOSED, {}, kWasClosed)); }

// If a peer has closed the connection because of a lost host, this rank receives the news within kNewsTakes.
// If `is_silent` and this thread has a Waiter, wait longer: until the heartbeats report a loss, or until the
// Waiter's deadline.
void Mesh::await_reason(bool is_silent) {
  const Waiter* const waiter = Waiter::current();
  auto end = Clock::now();
  const double patience = family->patience();
  if (patience > 0) end += kNewsTakes;
  if (is_silent && waiter != nullptr) end = std::max(end, deadline_after(patience));
  if (waiter != nullptr) end = std::min(end, waiter->deadline());
  while (!is_explained()) {
    const auto now = Clock::now();
    if (now >= end || (waiter != nullptr && waiter->is_interrupted())) return;
    reason(std::min(end, now + kTick));
  }
}

// A peer that ends the group sends its reason before it closes its connections. If no reason arrives, the
// peers with the first ended connections are the lost ranks.
Failure Mesh::explain(int peer, const std::string& what) {
  std::map<int, std::string> broken;
  std::vector<int> missing;
  if (!is_explained()) {
    bool is_silent = is_silence(what);
    broken = broken_peers();
    for (const auto& entry : broken) is_silent |= is_silence(entry.second);
    missing = first_of(broken, peer);
    await_reason(is_silent);
  }
  if (const auto why = reason()) return *why;
  if (has_farewell()) {
    const auto [r, farewell] = first_farewell();
    const auto status = static_cast<fl_status>(farewell->status);
    if (index_in(farewell->missing, rank) >= 0 && status == FL_HOST_LOST) {
      return {status, {r}, "it has reported the loss of this host: " + farewell->words};
    }
    Failure result = given_up_by(r, name(r), rank, {status, farewell->missing, farewell->words});
    if (result.status == FL_TIMEOUT) result.missing = await_cause(result.missing);
    return result;
  }
  if (missing.empty() && peer >= 0) missing.push_back(peer);
  const bool has_closed = !missing.empty() && broken[missing[0]] == kHasLeft;
  return Failure(FL_PEER_LOST, missing, has_closed ? kHasLeft : what);
}

std::map<int, std::string> Mesh::broken_peers() {
  std::map<int, std::string> broken;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || end_of(peer) == kNever) continue;
    const bool has_closed = state_of(peer).closed_at != kNever;
    broken.emplace(peer, has_closed ? kHasLeft : links_.pair(ranks_[peer])->problem());
  }
  return broken;
}

// Return the peers in `broken` that ended within kGoodbye / 2 after the first one. Peers that ended later may
// have ended because of it: they close their connections after their reason is delivered or kGoodbye has
// passed. A peer that has called leave() counts only if it is `peer`, or if all peers in `broken` did so.
std::vector<int> Mesh::first_of(const std::map<int, std::string>& broken, int peer) const {
  std::vector<int> suspects, result;
  for (const auto& entry : broken) {
    if (state_of(entry.first).left_at == kNever || entry.first == peer) suspects.push_back(entry.first);
  }
  if (suspects.empty()) {
    for (const auto& entry : broken) suspects.push_back(entry.first);
  }
  auto first = kNever;
  for (int suspect : suspects) first = std::min(first, end_of(suspect));
  for (int suspect : suspects) {
    if (end_of(suspect) <= first + kGoodbye / 2) result.push_back(suspect);
  }
  return result;
}

std::vector<int> Mesh::cause_of(const Failure& timeout) noexcept {
  report_to_others(timeout);
  return await_cause(timeout.missing);
}

// If `missing` is one rank, and this rank reports a timeout as well, replace `missing` by the ranks that it
// waited for. Repeat this until no such report arrives. Return the last `missing`.
std::vector<int> Mesh::await_cause(std::vector<int> missing) {
  const auto end = Clock::now() + kSettling;
  for (int steps = 0; steps < size && missing.size() == 1 && missing[0] != rank; ++steps) {
    auto farewell = state_of(missing[0]).farewell;
    while (farewell == nullptr && Clock::now() < end) {
      std::this_thread::sleep_for(kSettlingTick);
      farewell = state_of(missing[0]).farewell;
    }
    if (farewell == nullptr || farewell->status != FL_TIMEOUT) break;
    const std::vector<int>& next = farewell->missing;
    if (next.empty() || std::find(next.begin(), next.end(), rank) != next.end()) break;
    missing = next;
  }
  return missing;
}

// If the heartbeats have detected the loss, they notify all ranks. So make no connections to report it.
void Mesh::give_up(const Failure& failure) noexcept {
  report_to_others(failure);
  if (!reason()) connect_neighbours(failure.missing);
  family->deliver();
  end(failure);
  family->end(*this);
}

// Connect to the neighbours, except ranks in `missing`. A neighbour that connected only later would not
// receive the reason and would report this rank as lost.
void Mesh::connect_neighbours(const std::vector<int>& missing) noexcept {
  const auto end = Clock::now() + kGoodbye;
  const std::vector<int> peers = neighbours();
  const auto for_each_peer = [&](const auto& connect) {
    for (int peer : peers) {
      try {
        connect(peer);
      } catch (const std::exception&) {
        // Ignore errors: the peer has ended, or this rank has closed the group.
      }
    }
  };
  for_each_peer([&](int peer) { reach({peer}); });
  for_each_peer([&](int peer) {
    if (index_in(missing, peer) < 0) links_.await(ranks_[peer], end);
  });
}

// Report only the first failure, because later failures may be its consequences.
void Mesh::report_to_others(const Failure& failure) noexcept {
  if (has_reported_.exchange(true)) return;
  const Farewell farewell{failure.status, failure.missing, text_for_peers(failure.what(), name(rank))};
  family->notify(*this, farewell.text());
}

// Lost hosts ----------------------------------------------------------------------------

void Mesh::take_along(Companion companion) {
  const std::lock_guard<std::mutex> lock(mutex_);
  companions_.push_back(std::move(companion));
}

Failure Mesh::for_members(const Failure& failure) const {
  std::vector<int> missing;
  for (int member : failure.missing) {
    if (const int index = index_of(member); index >= 0) missing.push_back(index);
  }
  return {failure.status, missing, failure.what()};
}

void Mesh::lose(const Failure& failure) noexcept {
  end(failure);
  family->end(*this);
  std::vector<Companion> companions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    companions = companions_;
  }
  for (const Companion& companion : companions) {
    companion.give_up(companion.other, (loss_text(failure) + companion.advice).c_str());
  }
}

// Return the reason for a companion in the form that native_errors.py reads.
std::string Mesh::loss_text(const Failure& failure) const {
  std::string names;
  for (int r : failure.missing) {
    names += (names.empty() ? "" : ", ") + name(r).substr(std::strlen("rank "));
  }
  return std::string("Plost rank") + (failure.missing.size() > 1 ? "s " : " ") + names + " (" + failure.what() + ")";
}

}  // namespace fl
