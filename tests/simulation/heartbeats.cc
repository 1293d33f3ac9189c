// The heartbeats of very many ranks in virtual time: csrc/gloo/heartbeat.cc as it is, with the connections, the
// listeners and the clock of this file in place of csrc/gloo/line.cc. A seed decides which faults there are.
//
//   heartbeats RANKS SEED [COUNT [FAULT]]   COUNT seeds from SEED on, with one kind of fault or what the seed says
//
// Prints what was measured, and what was wrong: a rank that has not heard of a loss within the limit, or that
// names a host which is there. Ends with 1 where something was.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <queue>
#include <random>

#include "../../csrc/gloo/heartbeat.h"

namespace {

using fl::Clock;
using Time = Clock::time_point;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr int kRanksOfHost = 8, kHostsOfRack = 16;
// One way: inside of a host, of a rack, and between racks. From an event until a thread runs, and from one
// message that it sends to the next. A packet that was lost is sent again.
constexpr microseconds kNear{20}, kRack{50}, kFar{500}, kWake{50}, kSend{10};
constexpr milliseconds kAgain{200};
constexpr double kLimit = 5.0;  // seconds
constexpr milliseconds kMargin{20};  // of a measurement: the news' own way
constexpr Time kBegin{std::chrono::hours{1}};
const std::string kEnd;  // what travels when a connection is closed

struct Packet {
  Time arrives;
  std::string bytes;
};

struct End {
  int rank = -1;  // a stranger's
  int least = 1;  // bytes that are an event
  bool is_open = true;
  std::vector<Packet> come;
};

struct Connection {
  Time made;  // when who asks knows; kNever: not
  bool is_refused = false;
  End ends[2];
};

struct Rank {
  std::unique_ptr<fl::Heartbeat> heartbeat;  // null: it has ended
  Time wakes = fl::kNever, stopped{};
  std::vector<std::pair<Time, int>> guests;  // ends of connections, and when they are there
  int lines = 0;
  Time died = fl::kNever;
  std::map<int, Time> lost;  // hosts, and behind them ranks, and when it has reported them
};

struct Host {
  int side = 0;  // hosts of other sides cannot be reached
  bool is_dead = false, is_silent = false;  // it has no power; or nobody on it answers
  milliseconds slow{};                      // its ranks look so much later, at most
  Time gone{};                              // since when
};

class World {
 public:
  World(int ranks, uint64_t seed);
  ~World() {
    for (Rank& each : ranks) each.heartbeat.reset();
  }
  void run(Time end);
  void at(Time time, std::function<void()> what) { schedule({time, count_++, -1, std::move(what)}); }

  // What ranks do: see Line and Listener.
  int connect(int from, int to);
  void send(int end, const std::string& bytes);
  void close(int end);
  void wake(int rank, Time time);
  bool can_reach(int from, int to) const {
    return !hosts[from].is_dead && !hosts[to].is_dead && hosts[from].side == hosts[to].side;
  }
  int host(int rank) const { return rank / kRanksOfHost; }
  End& end(int number) { return connections[number / 2].ends[number % 2]; }

  void stop(int rank, Time until) { ranks[rank].stopped = std::max(ranks[rank].stopped, until); }
  void die(int rank, bool leaves);
  void kill(int host);
  void part(int host, int side);
  // Whether one that asks it is left on the side of `own`, which is not slow either.
  bool is_watched(int host, int own) const {
    const int count = static_cast<int>(hosts.size());
    for (int step = 1; step < count && hosts[own].slow.count() == 0; step *= 2) {
      const Host& asks = hosts[(host + count - step) % count];
      if (!asks.is_silent && asks.side == hosts[own].side && asks.slow.count() == 0) return true;
    }
    return false;
  }
  // Whether the rank of the host before it that asks it is one of those, and has been so from the beginning.
  bool is_asked(int rank, int own) const {
    const int count = static_cast<int>(ranks.size()), asks = (rank + count - kRanksOfHost) % count;
    const Host& there = hosts[host(asks)];
    const bool is_there = ranks[asks].heartbeat != nullptr && !there.is_silent && ranks[asks].stopped < ranks[rank].died;
    return is_there && there.gone == Time{} && hosts[own].gone == Time{} && hosts[host(rank)].gone == Time{};
  }
  bool check(const std::string& name);

  Time now = kBegin;
  std::vector<Rank> ranks;
  std::vector<Host> hosts;
  std::vector<Connection> connections;
  std::mt19937_64 random;
  double loss = 0;
  int current = -1;
  microseconds spent{};  // in this look
  int64_t messages = 0, bytes = 0;
  int most_lines = 0;
  Clock::duration latest{};

 private:
  struct Event {
    Time time;
    int64_t number;
    int rank;  // -1: something else is to be done
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };
  void schedule(Event event) { events_.push(std::move(event)); }
  void look(int rank);
  Clock::duration way(int from, int to);
  void deliver(int to, Time arrives, const std::string& bytes);

  std::priority_queue<Event> events_;
  int64_t count_ = 0;
  std::vector<int> free_;
};

World* world = nullptr;

World::World(int count, uint64_t seed)
    : ranks(count), hosts((count + kRanksOfHost - 1) / kRanksOfHost), random(seed) {
  world = this;
  std::vector<int> numbers(count);
  std::vector<std::string> names;
  std::vector<sockaddr_in6> addresses(count);
  for (size_t h = 0; h < hosts.size(); ++h) names.push_back("h" + std::to_string(h));
  for (int r = 0; r < count; ++r) {
    numbers[r] = host(r);
    addresses[r].sin6_scope_id = r;
    ranks[r].heartbeat = std::make_unique<fl::Heartbeat>(r, sockaddr_storage{});
  }
  const auto shared = std::make_shared<const fl::Hosts>(numbers, names, addresses, "a key", kLimit);
  for (int r = 0; r < count; ++r) {
    stop(r, kBegin + microseconds(random() % 300000));
    at(ranks[r].stopped, [this, r, shared] {
      ranks[r].heartbeat->begin(shared);
      wake(r, now);
    });
  }
}

void World::run(Time end) {
  while (!events_.empty() && events_.top().time <= end) {
    const Event event = events_.top();
    events_.pop();
    now = event.time;
    if (event.rank < 0) {
      event.what();
    } else if (ranks[event.rank].wakes == event.time) {
      look(event.rank);
    }
  }
}

void World::wake(int rank, Time time) {
  if (rank < 0 || time >= ranks[rank].wakes) return;
  ranks[rank].wakes = time;
  schedule({time, count_++, rank, {}});
}

void World::look(int number) {
  Rank& rank = ranks[number];
  rank.wakes = fl::kNever;
  if (rank.heartbeat == nullptr || hosts[host(number)].is_dead) return;
  if (now < rank.stopped) return wake(number, rank.stopped);
  current = number;
  spent = {};
  if (const auto lost = rank.heartbeat->look()) {
    const bool is_rank = lost->status == FL_PEER_LOST;
    const int first = static_cast<int>(hosts.size());
    for (int each : lost->missing) rank.lost.emplace(is_rank ? first + each : host(each), now);
  }
  const auto slow = hosts[host(number)].slow;
  const auto late = slow.count() > 0 ? milliseconds(random() % slow.count()) : milliseconds{};
  wake(number, std::max(now + microseconds(1), rank.heartbeat->due()) + late);
}

Clock::duration World::way(int from, int to) {
  const int a = host(from), b = host(to);
  Clock::duration way = a == b ? kNear : a / kHostsOfRack == b / kHostsOfRack ? kRack : kFar;
  for (auto again = kAgain; a != b && loss > 0 && random() % 10000 < loss * 10000; again *= 2) way += again;
  return way;
}

int World::connect(int from, int to) {
  int number = static_cast<int>(connections.size());
  if (free_.empty()) {
    connections.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
  }
  Connection& made = connections[number] = {};
  made.made = fl::kNever;
  made.ends[0].rank = from;
  made.ends[1].rank = to;
  made.ends[1].is_open = false;
  messages += 3;
  const int source = from < 0 ? to : from;
  if (!can_reach(host(source), host(to))) return 2 * number;
  const Time there = now + spent + way(source, to);
  made.made = there + way(source, to);
  made.is_refused = ranks[to].heartbeat == nullptr;
  made.ends[1].is_open = !made.is_refused;
  wake(from, made.made + kWake);
  if (made.is_refused) return 2 * number;
  ranks[to].guests.emplace_back(there, 2 * number + 1);
  wake(to, there + kWake);
  return 2 * number;
}

void World::deliver(int to, Time arrives, const std::string& bytes) {
  End& there = end(to);
  if (!there.come.empty()) arrives = std::max(arrives, there.come.back().arrives);
  there.come.push_back({arrives, bytes});
  size_t waiting = 0;
  for (const Packet& each : there.come) waiting += each.bytes.size();
  const bool is_event = bytes.empty() || waiting >= static_cast<size_t>(there.least);
  if (is_event && arrives != fl::kNever) wake(there.rank, arrives + kWake);
}

// What does not get through is there as soon as it can be.
void World::send(int from, const std::string& sent) {
  const int to = from ^ 1;
  ++messages;
  bytes += sent.size();
  spent += kSend;
  if (!end(to).is_open || !end(from).is_open) return;
  const int source = std::max(end(from).rank, 0), target = end(to).rank;
  const bool arrives = can_reach(host(source), host(target));
  deliver(to, arrives ? now + spent + way(source, target) : fl::kNever, sent);
}

void World::close(int from) {
  if (end(from ^ 1).is_open) send(from, kEnd);
  end(from).is_open = false;
  end(from).come = {};
  if (!end(from ^ 1).is_open) free_.push_back(from / 2);
}

void World::die(int rank, bool leaves) {
  current = rank;
  if (ranks[rank].heartbeat == nullptr || hosts[host(rank)].is_silent) return;
  if (leaves) ranks[rank].heartbeat->leave();
  if (!leaves) ranks[rank].died = now;
  ranks[rank].heartbeat.reset();
  for (const auto& guest : ranks[rank].guests) close(guest.second);
  ranks[rank].guests.clear();
}

void World::kill(int host) {
  if (hosts[host].is_silent) return;
  hosts[host].is_dead = hosts[host].is_silent = true;
  hosts[host].gone = now;
}

void World::part(int which, int side) {
  if (!hosts[which].is_silent) hosts[which].gone = now;
  hosts[which].side = side;
  for (size_t number = 0; number < 2 * connections.size(); ++number) {
    End& there = end(number);
    const int source = end(number ^ 1).rank;
    if (there.rank < 0 || source < 0 || !there.is_open) continue;
    if (!can_reach(host(source), host(there.rank))) continue;
    for (Packet& each : there.come) {
      if (each.arrives == fl::kNever) each.arrives = now + kAgain;
    }
    if (!there.come.empty()) wake(there.rank, now + kAgain + kWake);
  }
}

// Of ranks that run, what they must name, and what they may.
bool World::check(const std::string& name) {
  std::map<int, int> sides;
  for (const Host& each : hosts) sides[each.side] += !each.is_silent;
  bool is_right = true;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const int own = host(r);
    if (ranks[r].heartbeat == nullptr || hosts[own].is_silent || now < ranks[r].stopped) continue;
    const bool is_alone = sides[hosts[own].side] == 1, is_few = 2 * sides[hosts[own].side] < static_cast<int>(hosts.size());
    std::string wrong;
    for (size_t h = 0; h < hosts.size(); ++h) {
      const bool is_apart = hosts[h].side != hosts[own].side;
      const bool is_gone = is_apart || hosts[h].is_silent;
      const auto named = ranks[r].lost.find(h);
      if (named == ranks[r].lost.end()) {
        if (is_gone && (is_alone || !is_few)) wrong += " misses h" + std::to_string(h);
        continue;
      }
      if (!is_gone) wrong += " names h" + std::to_string(h);
      const Time apart = is_apart ? hosts[own].gone : Time{};
      const Time since = std::max({hosts[h].gone, apart, ranks[r].stopped});
      if (!is_gone || is_few || !is_watched(h, own)) continue;
      latest = std::max(latest, named->second - since);
      if (named->second - since > Seconds(kLimit)) wrong += " is late with h" + std::to_string(h);
    }
    for (size_t other = 0; other < ranks.size(); ++other) {
      const auto named = ranks[r].lost.find(hosts.size() + other);
      if (named == ranks[r].lost.end()) {
        if (ranks[other].died != fl::kNever && is_asked(other, own)) wrong += " misses rank " + std::to_string(other);
      } else if (ranks[other].died == fl::kNever) {
        wrong += " names rank " + std::to_string(other);
      } else {
        latest = std::max(latest, named->second - std::max(ranks[other].died, ranks[r].stopped));
      }
    }
    if (is_few && ranks[r].lost.empty()) wrong += " knows of nothing";
    if (wrong.empty()) continue;
    if (is_right) std::cout << name << ": rank " << r << wrong << "\n";
    is_right = false;
  }
  return is_right;
}

}  // namespace

// What csrc/gloo/line.cc and descriptors.cc are elsewhere.
namespace fl {

void Descriptor::close_if_same() const noexcept {}
Clock::time_point time_now() { return world->now; }

Line::Line(int socket) : socket_(socket), is_connected_(true) {
  Rank& rank = world->ranks[world->current];
  world->most_lines = std::max(world->most_lines, ++rank.lines);
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
      come_(std::move(other.come_)) {}

void Line::look() {
  if (has_left_ || is_broken_) return;
  const Connection& made = world->connections[socket_ / 2];
  if (!is_connected_ && world->now < made.made) return;
  if (made.is_refused) {
    has_left_ = true;
    return;
  }
  is_connected_ = true;
  auto& come = world->end(socket_).come;
  size_t count = 0;
  for (; count < come.size() && come[count].arrives <= world->now; ++count) {
    if (come[count].bytes.empty()) has_left_ = true;
    come_ += come[count].bytes;
  }
  come.erase(come.begin(), come.begin() + count);
}

std::string Line::take(size_t bytes) {
  std::string taken = come_.substr(0, bytes);
  come_.erase(0, bytes);
  return taken;
}

size_t Line::send(const std::string& bytes) {
  if (has_left_ || is_broken_) return 0;
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
  const auto is_there = [](const auto& guest) { return guest.first <= world->now; };
  const auto found = std::find_if(guests.begin(), guests.end(), is_there);
  if (found == guests.end()) return std::nullopt;
  const int socket = found->second;
  guests.erase(found);
  return std::make_optional<Line>(socket);
}

}  // namespace fl

namespace {

// What happens, from two seconds on, as it is known to the check.
const std::map<std::string, std::function<void(World&, int)>> kFaults = {
    {"host", [](World& w, int h) { w.kill(h); }},
    {"rack", [](World& w, int h) {
       for (int i = 0; i < kHostsOfRack && i + 2 < static_cast<int>(w.hosts.size()) / 2; ++i) {
         w.kill((h + i) % w.hosts.size());
       }
     }},
    {"cut", [](World& w, int h) { w.part(h, 1 + h); }},
    {"partition", [](World& w, int h) {
       for (size_t i = 0; i < w.hosts.size() / 2; ++i) {
         w.part((h + i) % w.hosts.size(), -1);
       }
     }},
    {"freeze", [](World& w, int h) {
       for (int r = h * kRanksOfHost; r < std::min<int>((h + 1) * kRanksOfHost, w.ranks.size()); ++r) {
         w.stop(r, fl::kNever);
       }
       w.hosts[h].is_silent = true;
       w.hosts[h].gone = w.now;
     }},
    {"gap", [](World& w, int h) {
       if (w.hosts[h].side != 0) return;
       w.part(h, 1 + h);
       w.at(w.now + milliseconds(w.random() % 2000), [&w, h] { w.part(h, 0); });
     }},
    {"stop", [](World& w, int h) { w.stop(h * kRanksOfHost, w.now + milliseconds(w.random() % 8000)); }},
    {"death", [](World& w, int h) { w.die(h * kRanksOfHost, false); }},
    {"leaving", [](World& w, int h) { w.die(h * kRanksOfHost, true); }},
    {"slow", [](World& w, int h) { w.hosts[h].slow = milliseconds(1 + w.random() % 1000); }},
    {"loss", [](World& w, int) { w.loss = 0.01; }},
    {"stranger", [](World& w, int h) {
       const int end = w.connect(-1, h * kRanksOfHost);
       w.send(end, std::string(w.random() % 100, static_cast<char>(w.random())));
     }},
};

bool simulate(int ranks, uint64_t seed, std::string fault, World& w) {
  const std::string name = "seed " + std::to_string(seed) + " of " + std::to_string(ranks) + " ranks";
  std::string story;
  const int count = fault.empty() ? 1 + w.random() % 4 : 1;
  for (int i = 0; i < count; ++i) {
    auto kind = kFaults.begin();
    std::advance(kind, w.random() % kFaults.size());
    if (!fault.empty()) kind = kFaults.find(fault);
    const int host = w.random() % w.hosts.size();
    const auto time = kBegin + milliseconds(2000 + (fault.empty() ? w.random() % 3000 : 0));
    story += " " + kind->first + " of h" + std::to_string(host);
    w.at(time, [&w, kind, host] { kind->second(w, host); });
  }
  w.run(kBegin + milliseconds(fault.empty() ? 16000 : 8000));
  return w.check(name + "," + story);
}

}  // namespace

int main(int argc, char** arguments) {
  const int ranks = std::stoi(arguments[1]);
  const uint64_t seed = std::stoull(arguments[2]), count = argc > 3 ? std::stoull(arguments[3]) : 1;
  const std::string fault = argc > 4 ? arguments[4] : "";
  uint64_t wrong = 0;
  for (uint64_t each = seed; each < seed + count; ++each) {
    World made(ranks, each);
    wrong += !simulate(ranks, each, fault, made);
    if (each + 1 < seed + count) continue;
    std::cout << "ranks " << ranks << ", loss known " << Seconds(made.latest).count() << " s, connections "
              << made.most_lines << ", " << made.messages / Seconds(made.now - kBegin).count() / ranks
              << " messages/s and " << made.bytes / Seconds(made.now - kBegin).count() / ranks
              << " bytes/s a rank, " << count << " seeds, " << wrong << " wrong\n";
  }
  return wrong > 0;
}
