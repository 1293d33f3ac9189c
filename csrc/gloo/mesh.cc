#include "mesh.h"

#include <iterator>
#include <sstream>

namespace fl {
namespace {

using std::chrono::milliseconds;

// An answer that does not come in this time is not worth waiting for.
constexpr milliseconds kGoodbye{500};

// So long after another rank at most this one reports that a host is lost: news come at once, but whoever hears
// of a loss waits a little for others.
constexpr milliseconds kNewsTakes = 2 * Heartbeat::kLongestInterval;

// Errors of the kernel about hosts, where of a process that has ended another kernel says so.
constexpr int kSilence[] = {ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN};

// Whether `what`, all that Gloo keeps of an error, is that.
bool is_silence(const std::string& what) {
  return std::any_of(std::begin(kSilence), std::end(kSilence), [&](int error) {
    return what.find(std::generic_category().message(error)) != std::string::npos;
  });
}

// How far apart the ranks' ends of one wait may lie, and how often who is to blame is looked at.
constexpr milliseconds kSettling{200}, kSettlingTick{2};

std::string in_words_for_others(std::string message, const std::string& name) {
  const std::string self = "this rank";
  for (size_t at; (at = message.find(self)) != std::string::npos;) {
    message.replace(at, self.size(), name);
  }
  return message;
}

}  // namespace

// Why a rank gave up; as it travels: its first letter, the status, how many ranks and which, the words.
struct Mesh::Farewell {
  static constexpr char kMark = 'F';
  static constexpr size_t kMostBytes = 4000;  // of words

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
    std::istringstream given(text.substr(1));
    Farewell found;
    size_t count = 0;
    given >> found.status >> count;
    for (int r; found.missing.size() < count && given >> r;) found.missing.push_back(r);
    given.ignore();
    std::getline(given, found.words, '\0');
    return found;
  }
};

namespace {

int place_in(const std::vector<int>& ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

}  // namespace

// The watch belongs to the family, which is a member: a base needs it before.
Mesh::Mesh(int rank, int size, const std::string& host, const std::string& interface,
           double connect_seconds)
    : Mesh(std::make_shared<Family>(rank, size, host, interface, size > kDirect), all_ranks(size), 0,
           connect_seconds) {}

Mesh::Mesh(const Mesh& whole, const std::vector<int>& ranks, uint64_t number)
    : Mesh(whole.family_, whole.in_whole(ranks), number, whole.connect_seconds_) {}

Mesh::Mesh(std::shared_ptr<Family> family, std::vector<int> ranks, uint64_t number,
           double connect_seconds)
    : Connections(family->watch),
      Route(number),
      rank(place_in(ranks, family->links->rank)),
      size(static_cast<int>(ranks.size())),
      family_(std::move(family)),
      ranks_(std::move(ranks)),
      connect_seconds_(connect_seconds),
      known_(size) {
  family_->add(*this);
}

Mesh::~Mesh() { family_->remove(*this); }

std::vector<int> Mesh::in_whole(const std::vector<int>& ranks) const {
  std::vector<int> members;
  for (int r : ranks) members.push_back(ranks_[r]);
  return members;
}

int Mesh::place_of(int member) const { return place_in(ranks_, member); }

std::vector<int> Mesh::neighbours() const {
  std::set<int> found;
  if (size > kDirect) {
    for (int step = 1; step < size; step *= 2) {
      found.insert((rank + step) % size);
      found.insert((rank - step + size) % size);
    }
  } else {
    for (int peer = 0; peer < size; ++peer) found.insert(peer);
  }
  found.erase(rank);
  return {found.begin(), found.end()};
}

void Mesh::connect(const char* addresses, size_t bytes, const char* key, bool lazily, Clock::time_point deadline) {
  family_->open(addresses, bytes, key);
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
      if (waiter != nullptr) waiter->look_around(peer);
      if (waiter == nullptr && Clock::now() >= end) throw TimedOut(peer);
    }
  } catch (const Failure& failure) {
    if (failure.status == FL_PEER_LOST) throw not_connected(peer, failure.what());
    if (const auto why = reason()) throw Failure(*why);
    throw;
  }
}

// What it means that there can be no connection.
Failure Mesh::not_connected(int peer, const std::string& problem) {
  await_reason(is_silence(problem));
  if (const auto why = reason()) return *why;
  return has_farewell() ? explain(peer, problem) : Failure(FL_PEER_LOST, {peer}, problem);
}

Pair& Mesh::pair_with(int peer) {
  if (!is_connected(peer)) require(peer);
  if (has_news_ && has_said_all(peer)) throw std::runtime_error(kHasLeft);  // or given up: see explain
  return *links_.pair(ranks_[peer]);
}

void Mesh::ask(gloo::transport::UnboundBuffer& buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
  if (!is_connected(peer)) require(peer);  // one that is not made is no connection that broke
  try {
    buffer.recv(peer, slot, offset, bytes);
  } catch (const std::exception&) {
    // Anything that is sent there says so.
  }
}

void Mesh::expect(Receiver& buffer, int peer, uint64_t slot, size_t offset, size_t bytes, bool tells) {
  try {
    pair_with(peer).expect(buffer, group, slot, offset, bytes, tells);
  } catch (const std::exception&) {
    // As above.
  }
}

std::vector<int> Mesh::not_called(const std::vector<int>& ranks, int64_t calls) {
  std::vector<int> behind, absent;
  for (const auto& [member, answer] : links_.calls_of(in_whole(ranks), group, Clock::now() + kGoodbye)) {
    const int peer = place_of(member);
    const bool has_answered = answer != Links::kSilent && answer != Links::kAbsent;
    if (!has_answered ? answer == Links::kSilent : answer < calls) behind.push_back(peer);
    if (answer == Links::kAbsent) absent.push_back(peer);
  }
  return behind.empty() ? absent : behind;
}

// What the members tell each other ---------------------------------------------------------------

// On Gloo's thread, or one that reads, with a pair locked: others are told by another thread.
void Mesh::hear(int peer, const std::string& text) {
  const bool is_hearsay = text[0] == kHearsay;
  bool is_first = false;
  const std::string hearsay = is_hearsay ? text : kHearsay + std::to_string(peer) + ' ' + text;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Known& known = known_[peer];
    if (text == kLeaving) known.left_at = Clock::now();
    if (text == kClosed) known.closed_at = Clock::now();
    if (text[0] == Farewell::kMark) known.farewell = std::make_shared<Farewell>(Farewell::of(text));
    if (text != kLeaving && !is_hearsay) has_news_ = true;
    is_first = first_.second == nullptr && (is_hearsay || text[0] == Farewell::kMark);
    if (is_first) {
      const size_t words = hearsay.find(Farewell::kMark);
      first_ = {std::stoi(hearsay.substr(1)), std::make_shared<Farewell>(Farewell::of(hearsay.substr(words)))};
      has_farewell_ = true;
    }
  }
  if (is_first && size > kDirect) family_->soon_pass_on(*this, hearsay);
  if (text != kLeaving) wake_those_who_should_know();
}

void Mesh::pass_on(const std::string& text) noexcept {
  if (has_reported_) return;
  family_->tell(*this, text);
  connect_neighbours(all_ranks(size));  // they are told where they are connected
}

Mesh::Known Mesh::known(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return known_[peer];
}

// Later ones may be of ranks that found nobody any more.
Mesh::Said Mesh::first_farewell() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_;
}

void Mesh::leave() {
  if (is_leaving_.exchange(true)) return;
  family_->tell(*this, kLeaving);
  if (group == 0) family_->leave();
}

bool Mesh::has_left(int peer) {
  const auto left_at = known(peer).left_at;
  return left_at != kNever && Clock::now() - left_at > kLastMessages;
}

bool Mesh::has_said_all(int peer) {
  const Known found = known(peer);
  return found.farewell != nullptr || found.closed_at != kNever;
}

bool Mesh::has_closed(int peer) const {
  const Known found = known(peer);
  return found.farewell == nullptr && found.closed_at != kNever;
}

bool Mesh::is_lost(int peer) {
  const Pair* const pair = links_.pair(ranks_[peer]);
  if (links_.has_failed(ranks_[peer]) || (pair != nullptr && pair->ended_at() != kNever)) return true;
  return has_news_ && has_said_all(peer);
}

std::unique_ptr<Port> Mesh::port() {
  return std::make_unique<Port>(family_->engine, group, rank, ranks_, *this);
}

// One that is not connected could go unnoticed.
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

Failure Mesh::in_full(const Failure& found) {
  if (found.status != FL_PEER_LOST) return found;
  const int peer = found.missing[0];
  const Waiter waiter(*this, deadline_after(family_->patience()), nullptr);
  const bool has_failed = links_.has_failed(ranks_[peer]);
  return has_failed ? not_connected(peer, links_.problem(ranks_[peer])) : explain(peer, found.what());
}

Clock::time_point Mesh::end_of(int peer) const {
  const Pair* const pair = links_.pair(ranks_[peer]);
  return std::min(pair != nullptr ? pair->ended_at() : kNever, known(peer).closed_at);
}

void Mesh::stop() { end(Failure(FL_CLOSED, {}, kWasClosed)); }

// A peer may have closed a connection because it has found out that a host is lost: then news of that
// are on their way. Where nobody answers, the heartbeats are about to say which host that is, and since
// when. That may take longer, so there must be somebody who can say that it takes too long.
void Mesh::await_reason(bool is_silent) {
  const Waiter* const waiter = Waiter::current();
  auto end = Clock::now();
  const double patience = family_->patience();
  if (patience > 0) end += kNewsTakes;
  if (is_silent && waiter != nullptr) end = std::max(end, deadline_after(patience));
  if (waiter != nullptr) end = std::min(end, waiter->deadline());
  while (!is_explained()) {
    const auto now = Clock::now();
    if (now >= end || (waiter != nullptr && waiter->is_interrupted())) return;
    reason(std::min(end, now + kTick));
  }
}

// A connection broke. A peer that gave up has said why before it closed, and that reason is the
// true one; otherwise the connections that are broken by now show who is gone.
Failure Mesh::explain(int peer, const std::string& what) {
  std::map<int, std::string> broken;
  std::vector<int> missing;
  if (!is_explained()) {
    bool is_silent = is_silence(what);
    broken = broken_peers();
    for (const auto& each : broken) is_silent |= is_silence(each.second);
    missing = first_of(broken, peer);
    await_reason(is_silent);
  }
  if (const auto why = reason()) return *why;
  if (has_farewell()) {
    const auto [r, farewell] = first_farewell();
    const auto status = static_cast<fl_status>(farewell->status);
    if (place_in(farewell->missing, rank) >= 0 && status == FL_HOST_LOST) {
      return {status, {r}, "it has given up the host of this rank: " + farewell->words};
    }
    Failure found = given_up_by(r, name(r), rank, {status, farewell->missing, farewell->words});
    if (found.status == FL_TIMEOUT) found.missing = await_cause(found.missing);
    return found;
  }
  if (missing.empty() && peer >= 0) missing.push_back(peer);
  const bool has_closed = !missing.empty() && broken[missing[0]] == kHasLeft;
  return Failure(FL_PEER_LOST, missing, has_closed ? kHasLeft : what);
}

std::map<int, std::string> Mesh::broken_peers() {
  std::map<int, std::string> broken;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || end_of(peer) == kNever) continue;
    const bool has_closed = known(peer).closed_at != kNever;
    broken.emplace(peer, has_closed ? kHasLeft : links_.pair(ranks_[peer])->problem());
  }
  return broken;
}

// A rank that gives up because of another closes later: when the reason has come through, or not for so long.
// One that has left as planned is no cause, unless it is waited for or nobody else has gone.
std::vector<int> Mesh::first_of(const std::map<int, std::string>& broken, int peer) const {
  std::vector<int> suspects, found;
  for (const auto& each : broken) {
    if (known(each.first).left_at == kNever || each.first == peer) suspects.push_back(each.first);
  }
  if (suspects.empty()) {
    for (const auto& each : broken) suspects.push_back(each.first);
  }
  auto first = kNever;
  for (int each : suspects) first = std::min(first, end_of(each));
  for (int each : suspects) {
    if (end_of(each) <= first + kGoodbye / 2) found.push_back(each);
  }
  return found;
}

std::vector<int> Mesh::cause_of(const Failure& timeout) noexcept {
  report_to_others(timeout);
  return await_cause(timeout.missing);
}

// Follow who waited for whom, from `missing` on, to the rank that has not said that it waited.
// No event says that none will come.
std::vector<int> Mesh::await_cause(std::vector<int> missing) {
  const auto end = Clock::now() + kSettling;
  for (int steps = 0; steps < size && missing.size() == 1 && missing[0] != rank; ++steps) {
    auto farewell = known(missing[0]).farewell;
    while (farewell == nullptr && Clock::now() < end) {
      std::this_thread::sleep_for(kSettlingTick);
      farewell = known(missing[0]).farewell;
    }
    if (farewell == nullptr || farewell->status != FL_TIMEOUT) break;
    const std::vector<int>& next = farewell->missing;
    if (next.empty() || std::find(next.begin(), next.end(), rank) != next.end()) break;
    missing = next;
  }
  return missing;
}

// Of a loss that the heartbeats have found all know.
void Mesh::give_up(const Failure& failure) noexcept {
  report_to_others(failure);
  if (!reason()) connect_neighbours(failure.missing);
  family_->deliver();
  end(failure);
  family_->end(*this);
}

// A rank that wants to connect to this one later would find nobody, and call it lost. `missing` are not
// waited for.
void Mesh::connect_neighbours(const std::vector<int>& missing) noexcept {
  const auto end = Clock::now() + kGoodbye;
  const std::vector<int> peers = neighbours();
  const auto each = [&](const auto& connect) {
    for (int peer : peers) {
      try {
        connect(peer);
      } catch (const std::exception&) {
        // It has gone, or all has ended here.
      }
    }
  };
  each([&](int peer) { reach({peer}); });
  each([&](int peer) {
    if (place_in(missing, peer) < 0) links_.await(ranks_[peer], end);
  });
}

// Once: others ask for no second reason.
void Mesh::report_to_others(const Failure& failure) noexcept {
  if (has_reported_.exchange(true)) return;
  const Farewell farewell{failure.status, failure.missing, in_words_for_others(failure.what(), name(rank))};
  family_->tell(*this, farewell.text());
}

// Hosts that are lost ----------------------------------------------------------------------------

void Mesh::take_along(Companion companion) {
  const std::lock_guard<std::mutex> lock(mutex_);
  companions_.push_back(std::move(companion));
}

Failure Mesh::as_its_own(const Failure& failure) const {
  std::vector<int> missing;
  for (int member : failure.missing) {
    if (const int place = place_of(member); place >= 0) missing.push_back(place);
  }
  return {failure.status, missing, failure.what()};
}

// The next operation raises what has happened, as do those that wait.
void Mesh::lose(const Failure& failure) noexcept {
  end(failure);
  family_->end(*this);
  std::vector<Companion> companions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    companions = companions_;
  }
  for (const Companion& companion : companions) {
    companion.give_up(companion.other, (words_of(failure) + companion.advice).c_str());
  }
}

// As this rank's Python code says it of an error that ends another group: see native_errors.py.
std::string Mesh::words_of(const Failure& failure) const {
  std::string names;
  for (int r : failure.missing) {
    names += (names.empty() ? "" : ", ") + name(r).substr(std::strlen("rank "));
  }
  return std::string("Plost rank") + (failure.missing.size() > 1 ? "s " : " ") + names + " (" + failure.what() + ")";
}

}  // namespace fl
