#include "heartbeat.h"

#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <set>
#include <sstream>
#include <utility>

namespace fl {
namespace {

// What travels once both ends have shown their proofs.
constexpr char kBeat = 1, kNews = 2;  // news: the ranks that are lost, ";", why, and a zero
constexpr size_t kProofBytes = FL_PROOF_BYTES;
constexpr size_t kMostStrangers = 64;  // who have not proven anything yet, beyond one for each rank

// Of the limit: how often to look, when to doubt and when to judge. What is left of it then is for
// the looks in between, and for what ends the operations.
constexpr double kLook = 0.05, kDoubt = 0.3, kJudge = 0.8;
// Who has not looked for so many intervals was stopped itself, and has heard nobody for that reason.
constexpr int kAsleep = 4;

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

double in_seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// In the same time wherever they differ.
bool are_equal(const std::string& a, const std::string& b) {
  int difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

std::string when(Clock::duration ago) {
  using System = std::chrono::system_clock;
  const std::time_t time =
      System::to_time_t(System::now() - std::chrono::duration_cast<System::duration>(ago));
  std::tm parts{};
  localtime_r(&time, &parts);
  char text[64];
  const size_t end = std::strftime(text, sizeof text, "%H:%M:%S", &parts);
  std::snprintf(text + end, sizeof text - end, " (for %.1f s)", in_seconds(ago));
  return text;
}

}  // namespace

Heartbeat::Heartbeat(int rank, sockaddr_storage here) : rank_(rank) {
  set_port(here, 0);
  const auto address = reinterpret_cast<sockaddr*>(&here);
  socklen_t size = here.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  listener_ = socket(here.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool listens = listener_ >= 0 && bind(listener_, address, size) == 0 &&
                       listen(listener_, SOMAXCONN) == 0 &&
                       getsockname(listener_, address, &size) == 0;
  if (!listens) {
    const std::string reason = std::strerror(errno);
    if (listener_ >= 0) close(listener_);
    throw std::runtime_error("cannot listen for heartbeats: " + reason);
  }
  listening_ = Descriptor::of(listener_);
  port_ = ntohs(here.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(here).sin_port
                                          : reinterpret_cast<sockaddr_in6&>(here).sin6_port);
}

Heartbeat::~Heartbeat() { close(listener_); }

void Heartbeat::abandon() const noexcept {
  listening_.close_if_same();
  for (const Guest& guest : guests_) guest.line.abandon();
  for (const Asked& asked : asked_) asked.line.abandon();
}

void Heartbeat::begin(Hosts hosts) {
  hosts_ = std::move(hosts);
  interval_ = std::min<Clock::duration>(seconds(hosts_.seconds * kLook), kLongestInterval);
  doubt_ = seconds(hosts_.seconds * kDoubt);
  limit_ = seconds(hosts_.seconds * kJudge);
  left_.assign(hosts_.numbers.size(), false);
  reached_.assign(hosts_.numbers.size(), false);
  looked_ = due_ = Clock::now();
  choose();
}

std::vector<int> Heartbeat::ranks_of(int which) const {
  std::vector<int> ranks;
  for (size_t r = 0; r < hosts_.numbers.size(); ++r) {
    if (host(r) == which) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

std::string Heartbeat::name(int which) const { return hosts_.names[ranks_of(which)[0]]; }

std::optional<Failure> Heartbeat::look() {
  const auto now = Clock::now();
  const auto asleep = now - looked_;
  if (asleep > kAsleep * interval_) heard_ += asleep - interval_;
  looked_ = now;
  due_ = now + interval_;
  accept_guests();
  Found found = serve_guests();
  if (!found) found = listen_to_asked();
  if (!found && target_ >= 0 && now - heard_ >= limit_) found = verdict();
  if (found) {
    notify(*found);
    due_ = kNever;
  } else if (target_ >= 0 && now - heard_ >= doubt_) {
    suspect();
  }
  return found;
}

// Those who ask ------------------------------------------------------------------------------

void Heartbeat::accept_guests() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) break;  // nobody, or no room: they are there at the next look
    guests_.push_back({Line(socket), looked_});
  }
  size_t strangers = std::count_if(guests_.begin(), guests_.end(),
                                   [](const Guest& guest) { return !guest.is_proven; });
  const size_t most = hosts_.numbers.size() + kMostStrangers;
  guests_.remove_if([&](const Guest& guest) {
    const bool goes =
        !guest.is_proven && (strangers > most || looked_ - guest.since > limit_);
    if (goes) --strangers;
    return goes;
  });
}

std::optional<Failure> Heartbeat::serve_guests() {
  for (Guest& guest : guests_) {
    guest.line.look();
    if (const Found found = serve(guest)) return found;
  }
  guests_.remove_if(
      [](const Guest& guest) { return guest.line.has_left() || guest.line.is_broken(); });
  return std::nullopt;
}

std::optional<Failure> Heartbeat::serve(Guest& guest) {
  if (!guest.is_proven) {
    if (guest.line.come().size() < kProofBytes) return std::nullopt;
    const std::string shown = guest.line.take(kProofBytes);
    for (size_t peer = 0; peer < hosts_.expected.size(); ++peer) {
      if (!are_equal(shown, hosts_.expected[peer])) continue;
      guest.is_proven = true;
      guest.line.send(hosts_.shown[peer] + kBeat);
    }
    if (!guest.is_proven) guest.line.give_up();
  }
  bool has_beaten = false;
  Found found = read(guest.line, has_beaten);
  if (has_beaten) guest.line.send({kBeat});
  return found;
}

// Those who are asked ------------------------------------------------------------------------

std::optional<Failure> Heartbeat::listen_to_asked() {
  for (auto asked = asked_.begin(); asked != asked_.end();) {
    asked->line.look();
    if (const Found found = listen_to(*asked)) return found;
    const bool has_left = asked->line.has_left();
    if (has_left) left_[asked->peer] = true;
    if (has_left && host(asked->peer) == target_) heard_ = looked_;
    const bool goes = has_left || asked->line.is_broken();
    asked = goes ? asked_.erase(asked) : std::next(asked);
  }
  const bool asks = std::any_of(asked_.begin(), asked_.end(), [&](const Asked& asked) {
    return host(asked.peer) == target_;
  });
  if (!asks) choose();
  return std::nullopt;
}

std::optional<Failure> Heartbeat::listen_to(Asked& asked) {
  const int from = host(asked.peer);
  const bool is_there = asked.line.is_connected() || asked.line.has_left();
  if (asked.is_fresh && is_there) reached_[from] = true;
  if (!asked.line.is_connected()) return std::nullopt;
  if (!asked.has_shown) asked.line.send(hosts_.shown[asked.peer]);
  asked.has_shown = true;
  if (!asked.is_proven) {
    if (asked.line.come().size() < kProofBytes) return std::nullopt;
    asked.is_proven = are_equal(asked.line.take(kProofBytes), hosts_.expected[asked.peer]);
    if (!asked.is_proven) {  // somebody else listens there now
      left_[asked.peer] = true;
      asked.line.give_up();
      return std::nullopt;
    }
  }
  bool has_beaten = false;
  Found found = read(asked.line, has_beaten);
  if (has_beaten && from == target_) trust(asked);
  asked.line.send({kBeat});
  return found;
}

// Nothing is the matter: one line is enough.
void Heartbeat::trust(Asked& answers) {
  heard_ = looked_;
  answers.is_fresh = false;
  reached_.assign(reached_.size(), false);
  asked_.remove_if([&](const Asked& asked) { return &asked != &answers; });
}

std::optional<Failure> Heartbeat::read(Line& line, bool& has_beaten) {
  const std::string& text = line.come();
  has_beaten = text.find(kBeat) != std::string::npos;
  const size_t at = text.find(kNews);
  const size_t end = at == std::string::npos ? text.size() : text.find('\0', at);
  if (end == std::string::npos) return std::nullopt;  // not all of it has come
  Found found;
  if (at != std::string::npos) found = news(text.substr(at + 1, end - at - 1));
  line.take(end);
  return found;
}

// Whom to ask --------------------------------------------------------------------------------

// The next host on which somebody is, and there the rank in this one's place.
void Heartbeat::choose() {
  const std::set<int> all(hosts_.numbers.begin(), hosts_.numbers.end());
  const int count = static_cast<int>(all.size()), own = host(rank_);
  const std::vector<int> here = ranks_of(own);
  const size_t place = std::find(here.begin(), here.end(), rank_) - here.begin();
  const int before = std::exchange(target_, -1);
  for (int step = 1; step < count && target_ < 0; ++step) {
    const std::vector<int> ranks = present((own + step) % count);
    if (ranks.empty()) continue;
    target_ = host(ranks[0]);
    ask(ranks[place % ranks.size()], false);
  }
  if (target_ != before) heard_ = looked_;
}

std::vector<int> Heartbeat::present(int which) const {
  std::vector<int> ranks = ranks_of(which);
  ranks.erase(std::remove_if(ranks.begin(), ranks.end(), [&](int r) { return left_[r]; }),
              ranks.end());
  return ranks;
}

void Heartbeat::ask(int peer, bool is_fresh) {
  asked_.push_back({peer, Line(hosts_.addresses[peer]), looked_, is_fresh});
}

// Every rank of the host that is silent, and one of each other host.
void Heartbeat::suspect() {
  const std::set<int> all(hosts_.numbers.begin(), hosts_.numbers.end());
  for (int which : all) {
    std::vector<int> ranks = present(which);
    if (which == host(rank_)) continue;
    if (which != target_ && !ranks.empty()) ranks.resize(1);
    for (int peer : ranks) ask_again(peer);
  }
}

// Requests to connect that got lost are repeated by the kernel after ever longer pauses: too late
// for a network that was gone for two seconds.
void Heartbeat::ask_again(int peer) {
  asked_.remove_if([&](const Asked& asked) {
    return asked.peer == peer && asked.is_fresh && !asked.line.is_connected();
  });
  const bool is_asked = std::any_of(asked_.begin(), asked_.end(), [&](const Asked& asked) {
    return asked.peer == peer && asked.is_fresh;
  });
  if (!is_asked) ask(peer, true);
}

// What to make of it -------------------------------------------------------------------------

Failure Heartbeat::verdict() const {
  const std::set<int> all(hosts_.numbers.begin(), hosts_.numbers.end());
  std::vector<int> missing, lost;
  bool reaches_another = false;
  for (int which : all) {
    if (which == host(rank_)) continue;
    const bool is_lost = which == target_ || (!reached_[which] && !present(which).empty());
    reaches_another |= reached_[which];
    if (!is_lost) continue;
    lost.push_back(which);
    const std::vector<int> ranks = ranks_of(which);
    missing.insert(missing.end(), ranks.begin(), ranks.end());
  }
  std::sort(missing.begin(), missing.end());
  return {FL_HOST_LOST, missing, in_words(lost, reaches_another, all.size())};
}

std::string Heartbeat::in_words(const std::vector<int>& lost, bool reaches_another,
                                size_t hosts) const {
  const std::string since = " since " + when(looked_ - heard_);
  const std::string here = "host " + name(host(rank_)) + ", where this rank runs,";
  if (!reaches_another && hosts > 2) return here + " cannot reach any other host" + since;
  std::string names;
  for (int which : lost) names += (names.empty() ? "" : ", ") + name(which);
  names = (lost.size() > 1 ? "hosts " : "host ") + names;
  if (reached_[target_] && lost.size() == 1) {
    return names + " answers, but none of its ranks does" + since +
           ": they are stopped, or the machine hangs";
  }
  const std::string words = names + " cannot be reached" + since;
  if (hosts > 2) return words;
  return words + "; it is the only other one, so " + here + " may be the one that is cut off";
}

// Those of this host too, whom nobody else may be about to notify: connections to them are made at once.
void Heartbeat::notify(const Failure& found) {
  std::ostringstream text;
  for (int rank : found.missing) text << (rank == found.missing[0] ? "" : ",") << rank;
  text << ";" << found.what();
  const std::string bytes = kNews + text.str() + '\0';
  for (Guest& guest : guests_) {
    if (guest.is_proven) guest.line.send(bytes);
  }
  for (Asked& asked : asked_) {
    if (asked.has_shown) asked.line.send(bytes);
  }
  for (int peer : ranks_of(host(rank_))) {
    if (peer == rank_) continue;
    ask(peer, false);
    asked_.back().line.send(hosts_.shown[peer] + bytes);
  }
}

std::optional<Failure> Heartbeat::news(const std::string& text) const {
  std::istringstream given(text);
  std::vector<int> missing;
  int rank;
  char comma;
  while (given >> rank >> comma) {
    missing.push_back(rank);
    if (comma == ';') break;
  }
  std::string words;
  std::getline(given, words);
  if (std::find(missing.begin(), missing.end(), rank_) != missing.end()) {
    words = "the other hosts have given up this one: " + words;
    missing.clear();
    for (size_t r = 0; r < hosts_.numbers.size(); ++r) {
      if (host(r) != host(rank_)) missing.push_back(static_cast<int>(r));
    }
  }
  return Failure(FL_HOST_LOST, missing, words);
}

}  // namespace fl
