// Heartbeats of very many ranks in virtual time: csrc/gloo/heartbeat.cc with the connections, listeners and clock of
// this file instead of csrc/gloo/line.cc. A seed selects the faults.
//
//   heartbeats RANKS SEED [COUNT [FAULT]]   COUNT seeds from SEED on, with one kind of fault or any
//
// Prints the measurements of the last seed and all errors: a rank that does not learn of a loss in time, or that
// names a rank that is not lost. Exits with 1 after an error.
#include <algorithm>
#include <functional>
#include <iostream>
#include <queue>
#include <random>
#include <set>
#include <tuple>

#include "../../csrc/gloo/heartbeat.h"

namespace {

using fl::Clock;
using Time = Clock::time_point;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr int kRanksOfHost = 8, kHostsOfRack = 16;
// Delays in one direction: within a host, within a rack, and between racks; from an event until a thread
// runs; and between two sent messages, as measured like those of costs.py. Lost messages are sent again.
constexpr microseconds kNear{20}, kRack{50}, kFar{500}, kWake{7}, kSend{3};
constexpr milliseconds kAgain{200};
constexpr double kLimit = 5.0;  // seconds
constexpr Time kBegin{std::chrono::hours{1}};

struct End {  // of a connection
  struct Packet {
    Time arrives;       // kNever: not before the data can arrive
    std::string bytes;  // empty: the other end is closed
  };
  int rank = -1;  // -1: a stranger
  int least = 1;  // bytes that make an event
  bool is_open = true;
  std::vector<Packet> come;
};

struct Connection {
  Time made = fl::kNever;  // when the asking side knows it
  bool is_refused = false;
  End ends[2];
};

struct Rank {
  std::unique_ptr<fl::Heartbeat> heartbeat;  // null: it has ended
  Time wakes = fl::kNever, stopped{}, died = fl::kNever;
  std::vector<std::pair<Time, int>> guests;  // times of arrival, and their ends of connections
  int lines = 0;
  std::map<int, Time> lost;  // lost hosts, and ranks after them, with the time of the report
};

struct Host {
  int side = 0;                             // hosts of other sides cannot be reached
  bool is_dead = false, is_silent = false;  // no power; or no process on it answers
  milliseconds slow{};                      // maximum additional delay of its ranks
  Time gone{};                              // time of the loss
};

struct Event {
  Time time;
  int64_t number;
  int rank;  // -1: another task
  std::function<void()> what;
  bool operator<(const Event& other) const {
    return std::tie(time, number) > std::tie(other.time, other.number);
  }
};

struct World {
  World(int ranks, uint64_t seed);
  ~World() {
    for (Rank& each : ranks) each.heartbeat.reset();
  }
  void at(Time time, std::function<void()> what) { events.push({time, count++, -1, std::move(what)}); }
  void wake(int rank, Time time);
  void run(Time end);
  void update(int rank);

  int host(int rank) const { return rank / kRanksOfHost; }
  int size() const { return static_cast<int>(hosts.size()); }
  End& end(int number) { return connections[number / 2].ends[number % 2]; }
  bool can_reach(int from, int to) const {
    const Host &a = hosts[host(from)], &b = hosts[host(to)];
    return !a.is_dead && !b.is_dead && a.side == b.side;
  }
  Clock::duration way(int from, int to);
  int connect(int from, int to);
  void send(int from, const std::string& bytes);
  void close(int from);

  void stop(int rank, Time until) { ranks[rank].stopped = std::max(ranks[rank].stopped, until); }
  void end_process(int rank, bool leaves);
  void silence(int which, bool is_dead);
  void part(int which, int side);
  bool is_asked(int host, int own) const;
  bool is_asked_for(int rank, int own) const;
  std::string wrong_on(int rank, std::set<int> affected, bool is_few, bool is_alone);
  bool check(const std::string& story);

  Time now = kBegin;
  std::vector<Rank> ranks;
  std::vector<Host> hosts;
  std::vector<Connection> connections;
  std::vector<int> unused;
  std::priority_queue<Event> events;
  std::mt19937_64 random;
  int current = -1, most_lines = 0;
  microseconds spent{};  // in this check
  double loss = 0;
  int64_t count = 0, messages = 0, bytes = 0;
  Clock::duration latest{};
} * world;

World::World(int size, uint64_t seed)
    : ranks(size), hosts((size + kRanksOfHost - 1) / kRanksOfHost), random(seed) {
  world = this;
  std::vector<int> numbers(size);
  std::vector<std::string> names;
  std::vector<sockaddr_in6> addresses(size);
  for (size_t h = 0; h < hosts.size(); ++h) names.push_back("h" + std::to_string(h));
  for (int r = 0; r < size; ++r) {
    numbers[r] = host(r);
    addresses[r].sin6_scope_id = r;
    ranks[r].heartbeat = std::make_unique<fl::Heartbeat>(r, sockaddr_storage{});
  }
  const auto shared = std::make_shared<const fl::Hosts>(numbers, names, addresses, "a key", kLimit);
  for (int r = 0; r < size; ++r) {
    stop(r, kBegin + microseconds(random() % 300000));
    at(ranks[r].stopped, [this, r, shared] {
      if (ranks[r].heartbeat != nullptr) ranks[r].heartbeat->begin(shared);
      wake(r, now);
    });
  }
}

void World::wake(int rank, Time time) {
  if (rank < 0 || time >= ranks[rank].wakes) return;
  ranks[rank].wakes = time;
  events.push({time, count++, rank, {}});
}

void World::run(Time end) {
  while (!events.empty() && events.top().time <= end) {
    const Event event = events.top();
    events.pop();
    now = event.time;
    if (event.rank < 0) event.what();
    if (event.rank >= 0 && ranks[event.rank].wakes == now) update(event.rank);
  }
}

void World::update(int number) {
  Rank& rank = ranks[number];
  const Host& here = hosts[host(number)];
  rank.wakes = fl::kNever;
  if (rank.heartbeat == nullptr || here.is_dead) return;
  if (now < rank.stopped) return wake(number, rank.stopped);
  current = number;
  spent = {};
  if (const auto lost = rank.heartbeat->update()) {
    for (int each : lost->missing) {
      rank.lost.emplace(lost->status == FL_PEER_LOST ? size() + each : host(each), now);
    }
  }
  const milliseconds late(here.slow.count() > 0 ? random() % here.slow.count() : 0);
  wake(number, std::max(now + microseconds(1), rank.heartbeat->due()) + late);
}

Clock::duration World::way(int from, int to) {
  const int a = host(from), b = host(to);
  Clock::duration way = a == b ? kNear : a / kHostsOfRack == b / kHostsOfRack ? kRack : kFar;
  for (auto again = kAgain; a != b && loss > 0 && random() % 10000 < loss * 10000; again *= 2) way += again;
  return way;
}

int World::connect(int from, int to) {
  if (unused.empty()) {
    unused.push_back(static_cast<int>(connections.size()));
    connections.emplace_back();
  }
  const int number = unused.back();
  unused.pop_back();
  Connection& made = connections[number] = {};
  made.ends[0].rank = from;
  made.ends[1].rank = to;
  made.ends[1].is_open = false;
  messages += 3;
  const int source = from < 0 ? to : from;
  if (!can_reach(source, to)) return 2 * number;
  const Time there = now + spent + way(source, to);
  made.made = there + way(source, to);
  wake(from, made.made + kWake);
  made.is_refused = ranks[to].heartbeat == nullptr;
  if (made.is_refused) return 2 * number;
  made.ends[1].is_open = true;
  ranks[to].guests.emplace_back(there, 2 * number + 1);
  wake(to, there + kWake);
  return 2 * number;
}

void World::send(int from, const std::string& sent) {
  End& there = end(from ^ 1);
  ++messages;
  bytes += sent.size();
  spent += kSend;
  if (!there.is_open || !end(from).is_open) return;
  const int source = std::max(end(from).rank, 0);
  Time arrives = can_reach(source, there.rank) ? now + spent + way(source, there.rank) : fl::kNever;
  if (!there.come.empty()) arrives = std::max(arrives, there.come.back().arrives);
  there.come.push_back({arrives, sent});
  size_t waiting = 0;
  for (const auto& each : there.come) waiting += each.bytes.size();
  const bool is_event = sent.empty() || waiting >= static_cast<size_t>(there.least);
  if (is_event && arrives != fl::kNever) wake(there.rank, arrives + kWake);
}

void World::close(int from) {
  if (end(from ^ 1).is_open) send(from, "");
  end(from).is_open = false;
  end(from).come = {};
  if (!end(from ^ 1).is_open) unused.push_back(from / 2);
}

// Faults and their expected consequences

void World::end_process(int rank, bool leaves) {
  Rank& ends = ranks[current = rank];
  if (ends.heartbeat == nullptr || hosts[host(rank)].is_silent) return;
  if (leaves) ends.heartbeat->leave();
  if (!leaves) ends.died = now;
  ends.heartbeat.reset();
  for (const auto& guest : ends.guests) close(guest.second);
  ends.guests.clear();
}

void World::silence(int which, bool is_dead) {
  Host& there = hosts[which];
  if (!there.is_silent) there.gone = now;
  there.is_silent = true;
  there.is_dead |= is_dead;
  const int end = std::min<int>((which + 1) * kRanksOfHost, ranks.size());
  for (int r = which * kRanksOfHost; r < end; ++r) stop(r, fl::kNever);
}

void World::part(int which, int side) {
  if (!hosts[which].is_silent) hosts[which].gone = now;
  hosts[which].side = side;
  for (size_t number = 0; number < 2 * connections.size(); ++number) {
    End& there = end(number);
    const int source = end(number ^ 1).rank;
    if (there.rank < 0 || source < 0 || there.come.empty() || !can_reach(source, there.rank)) continue;
    for (auto& each : there.come) {
      if (each.arrives == fl::kNever) each.arrives = now + kAgain;
    }
    wake(there.rank, now + kAgain + kWake);
  }
}

// Return true if one of the hosts that ask it is left on the side of `own`, and both are fast.
bool World::is_asked(int which, int own) const {
  for (int step = 1; step < size() && hosts[own].slow.count() == 0; step *= 2) {
    const Host& asks = hosts[(which + size() - step) % size()];
    if (!asks.is_silent && asks.side == hosts[own].side && asks.slow.count() == 0) return true;
  }
  return false;
}

// Return true if the rank that asks it existed when it died, and no lost host lies between them.
bool World::is_asked_for(int rank, int own) const {
  const int total = static_cast<int>(ranks.size()), asks = (rank + total - kRanksOfHost) % total;
  for (int each : {host(asks), host(rank), own}) {
    if (hosts[each].gone != Time{}) return false;
  }
  return ranks[asks].heartbeat != nullptr && ranks[asks].stopped < ranks[rank].died;
}

std::string World::wrong_on(int rank, std::set<int> affected, bool is_few, bool is_alone) {
  const int own = host(rank);
  const auto& lost = ranks[rank].lost;
  for (const auto& each : lost) affected.insert(each.first);
  std::string wrong = is_few && lost.empty() ? " knows of nothing" : "";
  // A host that is cut off gets no answer from the hosts that it asks; hosts on its side may not be among
  // them.
  const bool is_cut_off = is_few && std::distance(lost.begin(), lost.lower_bound(size())) == size() - 1;
  for (int each : affected) {
    const bool is_host = each < size();
    const std::string who = is_host ? " h" + std::to_string(each) : " rank " + std::to_string(each - size());
    const bool is_apart = is_host && hosts[each].side != hosts[own].side;
    const Time died = is_host ? hosts[each].gone : ranks[each - size()].died;
    const bool is_gone = is_host ? is_apart || hosts[each].is_silent : died != fl::kNever;
    const bool is_known = is_host ? is_alone || !is_few : is_asked_for(each - size(), own);
    const auto named = lost.find(each);
    if (named == lost.end()) {
      if (is_gone && is_known) wrong += " misses" + who;
      continue;
    }
    if (!is_gone && !(is_cut_off && is_host)) wrong += " names" + who;
    if (!is_gone || is_few || (is_host && !is_asked(each, own))) continue;
    const Time apart = is_apart ? hosts[own].gone : Time{};
    const auto took = named->second - std::max({died, apart, ranks[rank].stopped});
    latest = std::max(latest, took);
    if (took > Seconds(kLimit) && hosts[own].slow.count() == 0) wrong += " is late with" + who;
  }
  return wrong;
}

// Fewer than half of the hosts, which cannot reach the others, need not know all of them.
bool World::check(const std::string& story) {
  std::map<int, int> sides;
  for (const Host& each : hosts) sides[each.side] += !each.is_silent;
  std::set<int> affected;  // hosts, and ranks after them
  for (int h = 0; h < size(); ++h) {
    if (hosts[h].is_silent || sides.size() > 1) affected.insert(h);
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].died != fl::kNever) affected.insert(size() + static_cast<int>(r));
  }
  bool is_right = true;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].heartbeat == nullptr || now < ranks[r].stopped) continue;
    const int near = sides[hosts[host(r)].side];
    const std::string wrong = wrong_on(r, affected, 2 * near < size(), near == 1);
    if (!wrong.empty() && is_right) std::cout << story << ": rank " << r << wrong << "\n";
    is_right &= wrong.empty();
  }
  return is_right;
}

using Fault = std::function<void(World&, int)>;
const std::map<std::string, Fault> kFaults = {
    {"host", [](World& w, int h) { w.silence(h, true); }},
    {"rack", [](World& w, int h) {
       const int count = std::min(kHostsOfRack, w.size() / 2 - 2);
       for (int i = 0; i < count; ++i) w.silence((h + i) % w.size(), true);
     }},
    {"freeze", [](World& w, int h) { w.silence(h, false); }},
    {"cut", [](World& w, int h) { w.part(h, 1 + h); }},
    {"partition", [](World& w, int h) {
       for (int i = 0; i < w.size() / 2; ++i) w.part((h + i) % w.size(), -1);
     }},
    {"gap", [](World& w, int h) {
       if (w.hosts[h].side != 0) return;
       w.part(h, 1 + h);
       w.at(w.now + milliseconds(w.random() % 2000), [&w, h] { w.part(h, 0); });
     }},
    {"stop", [](World& w, int h) { w.stop(h * kRanksOfHost, w.now + milliseconds(w.random() % 8000)); }},
    {"death", [](World& w, int h) { w.end_process(h * kRanksOfHost, false); }},
    {"leaving", [](World& w, int h) { w.end_process(h * kRanksOfHost, true); }},
    {"slow", [](World& w, int h) { w.hosts[h].slow = milliseconds(1 + w.random() % 1000); }},
    {"loss", [](World& w, int) { w.loss = 0.01; }},
    {"stranger", [](World& w, int h) {
       const int end = w.connect(-1, h * kRanksOfHost);
       w.send(end, std::string(w.random() % 100, static_cast<char>(w.random())));
     }},
};

bool simulate(World& w, uint64_t seed, const std::string& fault) {
  std::string story = "seed " + std::to_string(seed) + ":";
  const int count = fault.empty() ? 1 + w.random() % 4 : 1;
  for (int i = 0; i < count; ++i) {
    const auto drawn = std::next(kFaults.begin(), w.random() % kFaults.size());
    const auto& [name, happens] = fault.empty() ? *drawn : *kFaults.find(fault);
    const int host = w.random() % w.size();
    story += " " + name + " h" + std::to_string(host);
    const milliseconds later(2000 + (fault.empty() ? w.random() % 3000 : 0));
    w.at(kBegin + later, [&w, &happens = happens, host] { happens(w, host); });
  }
  w.run(kBegin + milliseconds(fault.empty() ? 16000 : 8000));
  return w.check(story);
}

}  // namespace

// Replacements of csrc/gloo/line.cc and descriptors.cc.
namespace fl {

void Descriptor::close_if_same() const noexcept {}
Clock::time_point time_now() { return world->now; }

Line::Line(int socket) : socket_(socket), is_connected_(true) {
  world->most_lines = std::max(world->most_lines, ++world->ranks[world->current].lines);
}

Line::Line(const sockaddr_in6& address)
    : Line(world->connect(world->current, static_cast<int>(address.sin6_scope_id))) {
  is_connected_ = false;
}

Line::~Line() {
  if (socket_ < 0) return;
  --world->ranks[world->end(socket_).rank].lines;
  world->close(socket_);
}

Line::Line(Line&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)),
      is_connected_(other.is_connected_),
      has_left_(other.has_left_),
      is_broken_(other.is_broken_),
      received_(std::move(other.received_)) {}

void Line::update() {
  const Connection& made = world->connections[socket_ / 2];
  if (has_ended() || (!is_connected_ && world->now < made.made)) return;
  if ((has_left_ = made.is_refused)) return;
  is_connected_ = true;
  auto& come = world->end(socket_).come;
  auto next = come.begin();
  for (; next != come.end() && next->arrives <= world->now; ++next) {
    has_left_ |= next->bytes.empty();
    received_ += next->bytes;
  }
  come.erase(come.begin(), next);
}

std::string Line::take(size_t bytes) {
  std::string taken = received_.substr(0, bytes);
  received_.erase(0, bytes);
  return taken;
}

size_t Line::send(const std::string& bytes) {
  if (has_ended()) return 0;
  world->send(socket_, bytes);
  return bytes.size();
}

void Line::await_at_least(int bytes) { world->end(socket_).least = bytes; }
pollfd Line::awaited() const { return {}; }

Listener::Listener(sockaddr_storage) {}
Listener::~Listener() = default;
void Listener::await(const std::vector<const Line*>&, Clock::time_point) {}
void Listener::ring() noexcept {}

std::optional<Line> Listener::accept() {
  auto& guests = world->ranks[world->current].guests;
  const auto found = std::find_if(guests.begin(), guests.end(),
                                  [](const auto& guest) { return guest.first <= world->now; });
  if (found == guests.end()) return std::nullopt;
  const int socket = found->second;
  guests.erase(found);
  return std::make_optional<Line>(socket);
}

}  // namespace fl

int main(int argc, char** arguments) {
  const int ranks = std::stoi(arguments[1]);
  const uint64_t seed = std::stoull(arguments[2]), count = argc > 3 ? std::stoull(arguments[3]) : 1;
  uint64_t wrong = 0;
  for (uint64_t each = seed; each < seed + count; ++each) {
    World made(ranks, each);
    wrong += !simulate(made, each, argc > 4 ? arguments[4] : "");
    if (each + 1 < seed + count) continue;
    const double rank_seconds = Seconds(made.now - kBegin).count() * ranks;
    std::cout << "ranks " << ranks << ", loss known " << Seconds(made.latest).count() << " s, connections "
              << made.most_lines << ", of each rank " << made.messages / rank_seconds << " messages/s and "
              << made.bytes / rank_seconds << " bytes/s, " << wrong << " of " << count << " seeds wrong\n";
  }
  return wrong > 0;
}
