#include "heartbeat.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sstream>

namespace fl {
namespace {

// Messages after both ends have exchanged proofs. News starts with kNews and ends with a zero byte. It
// contains the kind, the age in milliseconds, and the first and last number of each run of hosts or ranks;
// rank numbers follow the host numbers. A rank that has sent kLeave is not lost when its connection ends.
constexpr char kBeat = 1, kNews = 2, kLeave = 3;
// Kinds of losses: no answer; only the kernel answers; this host is cut off; a rank's process has died.
constexpr char kSilent = 'S', kStopped = 'A', kCutOff = 'C', kDead = 'D';
// Minimum bytes of news, which wake the peer, unlike beats; maximum runs, and maximum bytes, of one message.
constexpr size_t kLeastNews = 24, kMostRuns = 256, kMostNews = 8192;
// Pause between two rounds of news, which are sent together: if half of the hosts are lost, there is a lot.
constexpr std::chrono::milliseconds kPause{10};

// An asking rank sends its number and its proof.
constexpr size_t kRankBytes = sizeof(int32_t), kProofBytes = FL_PROOF_BYTES;
constexpr size_t kMostStrangers = 64;  // unproven connections beyond the ranks of one host

// Fractions of the limit: interval of beats, silence before doubt, silence before the decision. The remaining
// time is for spreading the news and ending the operations.
constexpr double kLook = 0.05, kDoubt = 0.3, kJudge = 0.75;
// A rank that has not run for this many intervals was stopped itself; its silence measurements are invalid.
constexpr int kAsleep = 4;
// Number of other hosts to ask in doubt.
constexpr int kWitnesses = 8;
// Up to this many ranks of a host all notify each other of a loss; more ranks notify some, which forward it.
constexpr size_t kDirect = 8;
constexpr size_t kMostNames = 20;

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

int64_t in_milliseconds(Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

std::string when(Clock::duration ago) {
  using System = std::chrono::system_clock;
  const std::time_t time = System::to_time_t(System::now() - std::chrono::duration_cast<System::duration>(ago));
  std::tm parts{};
  localtime_r(&time, &parts);
  char text[64];
  const size_t end = std::strftime(text, sizeof text, "%H:%M:%S", &parts);
  std::snprintf(text + end, sizeof text - end, " (for %.1f s)", in_milliseconds(ago) / 1000.0);
  return text;
}

}  // namespace

Hosts::Hosts(std::vector<int> numbers, std::vector<std::string> names,
             std::vector<sockaddr_in6> addresses, std::string key, double seconds)
    : numbers(std::move(numbers)),
      names(std::move(names)),
      addresses(std::move(addresses)),
      key(std::move(key)),
      seconds(seconds),
      ranks(this->names.size()) {
  for (size_t r = 0; r < this->numbers.size(); ++r) {
    auto& there = ranks[this->numbers[r]];
    there.push_back(static_cast<int>(r));
    most = std::max(most, there.size());
  }
}

void Heartbeat::abandon() const noexcept {
  listener_.abandon();
  for (const Talk& talk : talks_) talk.line.abandon();
}

void Heartbeat::begin(std::shared_ptr<const Hosts> hosts) {
  hosts_ = std::move(hosts);
  prover_ = Prover(rank_, hosts_->key);
  own_ = host(rank_);
  const std::vector<int>& here = hosts_->ranks[own_];
  place_ = static_cast<int>(std::find(here.begin(), here.end(), rank_) - here.begin());
  interval_ = std::min<Clock::duration>(seconds(hosts_->seconds * kLook), kLongestInterval);
  doubt_ = seconds(hosts_->seconds * kDoubt);
  limit_ = seconds(hosts_->seconds * kJudge);
  // Ranks of one host hear a lost host's last answers at most two intervals apart.
  settling_ = hosts_->count() > 2 ? 2 * interval_ : Clock::duration{};
  looked_ = beats_ = due_ = time_now();
  // All ranks of this host ask the next host; one rank asks each other host.
  const int ranks = static_cast<int>(here.size());
  for (int bit = 0; 1 << bit < hosts_->count(); ++bit) {
    if (bit == 0 || bit % ranks == place_ % ranks) watched_.push_back({1 << bit, -1, looked_});
  }
}

void Heartbeat::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_leaving_ = true;
  for (Talk& talk : talks_) {
    if (talk.is_proven) talk.line.send({kLeave});
  }
}

std::optional<Failure> Heartbeat::look() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = time_now();
  const auto asleep = now - looked_;
  if (asleep > kAsleep * interval_) {
    for (Watched& each : watched_) each.heard += asleep - interval_;
    for (auto& each : doubts_) each.second.since += asleep - interval_;
    visited_ += asleep - interval_;
  }
  looked_ = now;
  accept_guests();
  listen();
  if (!lost_.count(own_)) judge();
  if (now >= beats_) ask_around();
  talks_.remove_if([](const Talk& talk) { return talk.line.has_ended(); });
  tell();
  due_ = std::min(beats_, reports_);
  if (!untold_.empty()) due_ = std::min(due_, tells_);
  for (const Watched& each : watched_) {
    if (each.heard + limit_ > now) due_ = std::min(due_, each.heard + limit_);
  }
  return report();
}

// Only this thread adds or removes lines.
void Heartbeat::await() {
  std::vector<const Line*> lines;
  for (const Talk& talk : talks_) lines.push_back(&talk.line);
  listener_.await(lines, due_);
}

std::vector<int> Heartbeat::present(int which) const {
  std::vector<int> ranks;
  for (int rank : hosts_->ranks[which]) {
    if (!left_.count(rank)) ranks.push_back(rank);
  }
  return ranks;
}

Heartbeat::Watched* Heartbeat::watched(int which) {
  const auto found = std::find_if(watched_.begin(), watched_.end(),
                                  [&](const Watched& each) { return each.host == which; });
  return found == watched_.end() ? nullptr : &*found;
}

// Listening ----------------------------------------------------------------------------------

void Heartbeat::accept_guests() {
  while (auto line = listener_.accept()) talks_.push_back({std::move(*line), looked_, false});
  const auto is_stranger = [](const Talk& talk) { return !talk.is_ours && !talk.is_proven; };
  size_t strangers = std::count_if(talks_.begin(), talks_.end(), is_stranger);
  for (Talk& talk : talks_) {
    if (!is_stranger(talk)) continue;
    if (strangers <= hosts_->most + kMostStrangers && looked_ - talk.since <= limit_) continue;
    talk.line.give_up();
    --strangers;
  }
}

void Heartbeat::listen() {
  for (Talk& talk : talks_) {
    talk.line.look();
    listen_to(talk);
    if (!talk.is_ours || !talk.line.has_left()) continue;
    left_.insert(talk.peer);
    const bool is_dead = talk.is_proven && !talk.is_leaving && !lost_.count(host(talk.peer));
    if (is_dead && !lost_.count(own_)) learn(hosts_->count() + talk.peer, {kDead, looked_});
    if (Watched* const each = watched(host(talk.peer))) each->heard = looked_;
  }
}

void Heartbeat::listen_to(Talk& talk) {
  const auto doubt = talk.is_fresh ? doubts_.find(host(talk.peer)) : doubts_.end();
  if (doubt != doubts_.end() && (talk.line.is_connected() || talk.line.has_left())) {
    doubt->second.has_answered = true;
  }
  if (!talk.line.is_connected() || !meets(talk)) return;
  if (!has_beaten(talk)) return;
  if (talk.is_ours) return trust(talk);
  if (host(talk.peer) != own_) visited_ = looked_;
  talk.line.send({kBeat});
}

// True after both ends have shown valid proofs; the asking rank goes first.
bool Heartbeat::meets(Talk& talk) {
  if (talk.is_proven) return true;
  int32_t rank = rank_;
  if (talk.is_ours && !std::exchange(talk.has_shown, true)) {
    std::string shown(reinterpret_cast<const char*>(&rank), kRankBytes);
    talk.line.send(shown + prover_.shown_to(talk.peer));
  }
  const size_t before = talk.is_ours ? 0 : kRankBytes;
  if (talk.line.come().size() < before + kProofBytes) return false;
  std::memcpy(&rank, talk.line.take(before).data(), before);
  const std::string proof = talk.line.take(kProofBytes);
  if (!talk.is_ours && rank >= 0 && rank < static_cast<int>(hosts_->numbers.size())) talk.peer = rank;
  talk.is_proven = talk.peer >= 0 && prover_.is_shown_by(talk.peer, proof.data());
  if (!talk.is_proven) {
    if (talk.is_ours) left_.insert(talk.peer);  // another process listens there now
    talk.line.give_up();
    return false;
  }
  if (!talk.is_ours) talk.line.send(prover_.shown_to(talk.peer) + kBeat);
  if (is_leaving_) talk.line.send({kLeave});
  talk.line.await_at_least(kLeastNews);
  return true;
}

// Process beats and news; return true if a beat arrived.
bool Heartbeat::has_beaten(Talk& talk) {
  const std::string& text = talk.line.come();
  bool has_beaten = false;
  for (;;) {
    const std::string beats = talk.line.take(std::min(text.find(kNews), text.size()));
    has_beaten |= beats.find(kBeat) != std::string::npos;
    talk.is_leaving |= beats.find(kLeave) != std::string::npos;
    const size_t end = text.find('\0');
    if (text.empty() || end == std::string::npos) break;
    const std::string news = talk.line.take(end + 1);
    const bool is_near = host(talk.peer) == own_;
    if (news[1] != kCutOff || is_near) hear(news.substr(1, end - 1));
  }
  if (text.size() > kMostNews) talk.line.give_up();
  return has_beaten;
}

// Handle an answer. One working new connection to a host is enough. The connection to the silent rank stays,
// because its end is information.
void Heartbeat::trust(Talk& answers) {
  Watched* const each = watched(host(answers.peer));
  if (each == nullptr) return;
  each->heard = looked_;
  answers.is_fresh = false;
  if (doubts_.erase(each->host) == 0) return;
  for (Talk& talk : talks_) {
    if (talk.is_fresh && host(talk.peer) == each->host) talk.line.give_up();
  }
}

// Asking -------------------------------------------------------------------------------------

// Called once per interval.
void Heartbeat::ask_around() {
  beats_ = looked_ + interval_;
  std::set<int> asked;
  for (const Talk& talk : talks_) {
    if (talk.is_ours && !talk.line.has_ended()) asked.insert(host(talk.peer));
  }
  watched_.remove_if([&](Watched& each) {
    const bool stays = each.host >= 0 && asked.count(each.host) && !lost_.count(each.host);
    return !stays && !choose(each);
  });
  bool doubts = false;
  for (const Watched& each : watched_) {
    if (!is_silent(each, doubt_)) continue;
    doubts = true;
    for (int peer : present(each.host)) ask_again(peer);
  }
  for (int which : witnesses()) {
    const std::vector<int> ranks = present(which);
    const auto doubt = doubts_.find(which);
    const bool is_open = doubt != doubts_.end() && !doubt->second.has_answered;
    if (ranks.empty() || watched(which) != nullptr || !(doubts || is_open)) continue;
    doubts = true;
    ask_again(ranks[place_ % ranks.size()]);
  }
  if (!doubts) doubts_.clear();
  for (Talk& talk : talks_) {
    if (!doubts && talk.is_fresh) talk.line.give_up();
    if (talk.is_ours && talk.is_proven && host(talk.peer) != own_) talk.line.send({kBeat});
  }
}

// Ask the rank at this rank's index on the next host; every rank of that host is asked by one rank of this
// host. If all ranks of the host are gone, the first later host with present ranks takes its place for
// distance 1. Other distances are skipped, so that the host behind many lost hosts is not asked by all.
bool Heartbeat::choose(Watched& each) {
  const int count = hosts_->count();
  const int end = each.distance == 1 ? count : each.distance + 1;
  for (int step = each.distance; step < end; ++step) {
    const int next = (own_ + step) % count;
    Watched* const other = watched(next);
    const std::vector<int> ranks = present(next);
    if (ranks.empty() || lost_.count(next) || (other != nullptr && other != &each)) continue;
    if (std::exchange(each.host, next) != next) each.heard = looked_;
    const size_t first = place_ % ranks.size(), others = hosts_->ranks[own_].size();
    for (size_t at = first; at < ranks.size(); at += others) {
      if (at == first || each.distance == 1) ask(ranks[at], false);
    }
    return true;
  }
  return false;
}

// Hosts spread over all, different for each rank of this host.
std::vector<int> Heartbeat::witnesses() const {
  const int count = hosts_->count(), most = std::min(kWitnesses, count - 1);
  std::vector<int> found;
  for (int i = 1; i <= most; ++i) {
    const int64_t step = most == count - 1 ? i : int64_t{i} * count / (most + 1) + place_;
    const int which = static_cast<int>((own_ + step) % count);
    if (which != own_ && !lost_.count(which)) found.push_back(which);
  }
  return found;
}

void Heartbeat::ask(int peer, bool is_fresh) {
  talks_.push_back({Line(hosts_->addresses[peer]), looked_, true, peer, is_fresh});
}

// Ask on a new connection: the kernel repeats lost connection requests after growing pauses, too late for a
// network outage of two seconds.
void Heartbeat::ask_again(int peer) {
  doubts_.emplace(host(peer), Doubt{looked_});
  const auto is_that = [&](const Talk& talk) {
    return talk.is_ours && talk.peer == peer && talk.is_fresh;
  };
  talks_.remove_if([&](const Talk& talk) { return is_that(talk) && !talk.line.is_connected(); });
  if (std::none_of(talks_.begin(), talks_.end(), is_that)) ask(peer, true);
}

// Losses -------------------------------------------------------------------------------------

void Heartbeat::judge() {
  bool is_due = false, has_answer = looked_ - visited_ < doubt_;
  auto since = looked_;
  for (const Watched& each : watched_) {
    is_due |= is_silent(each, limit_);
    has_answer |= !is_silent(each, doubt_);
    since = std::min(since, each.heard);
  }
  const auto is_open = [&](const auto& each) {
    const auto& [which, doubt] = each;
    return !doubt.has_answered && !lost_.count(which) && watched(which) == nullptr;
  };
  for (const auto& each : doubts_) {
    has_answer |= each.second.has_answered;
    is_due |= is_open(each) && looked_ - each.second.since >= limit_;
  }
  if (!is_due) return;
  if (!has_answer && hosts_->count() > 2) return learn(own_, {kCutOff, since});
  for (const Watched& each : watched_) {
    const auto doubt = doubts_.find(each.host);
    const bool answers = doubt != doubts_.end() && doubt->second.has_answered;
    if (is_silent(each, limit_)) learn(each.host, {answers ? kStopped : kSilent, each.heard});
  }
  for (const auto& each : doubts_) {
    const auto asked = each.second.since;
    const bool is_lost = is_open(each) && looked_ - asked >= limit_;
    if (is_lost && !present(each.first).empty()) learn(each.first, {kSilent, asked});
  }
}

void Heartbeat::learn(int which, const Loss& loss) {
  if (lost_.count(which)) return;
  lost_.emplace(which, loss);
  for (Talk& talk : talks_) {  // they may answer and be notified
    if (talk.is_ours && host(talk.peer) == which && !talk.line.is_connected()) talk.line.give_up();
  }
  untold_.emplace(which, loss);
  unreported_.emplace(which, loss);
  reports_ = std::min(reports_, looked_ + (which == own_ ? Clock::duration{} : settling_));
}

void Heartbeat::hear(const std::string& text) {
  char* at = nullptr;
  const auto since = looked_ - std::chrono::milliseconds(std::strtoll(text.c_str() + 1, &at, 10));
  while (*at == ' ' && std::isdigit(at[1])) {
    const int first = static_cast<int>(std::strtol(at, &at, 10));
    const int last = static_cast<int>(std::strtol(at, &at, 10));
    const int end = hosts_->count() + static_cast<int>(hosts_->numbers.size());
    for (int which = std::max(first, 0); which <= last && which < end; ++which) {
      learn(which, {text[0], since});
    }
  }
}

// All ranks of this host, or a subset that forwards.
std::vector<int> Heartbeat::near() const {
  const std::vector<int>& here = hosts_->ranks[own_];
  const int count = static_cast<int>(here.size());
  std::vector<int> found;
  for (int step = 1; step < count; step += here.size() > kDirect ? step : 1) {
    found.push_back(here[(place_ + step) % count]);
    found.push_back(here[(place_ + count - step) % count]);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// Send news. Connections to ranks of this host are made now. A host that is cut off notifies only its own
// ranks: after it returns, other hosts have better information.
void Heartbeat::tell() {
  if (!untold_.empty() && news_.empty()) {
    for (int peer : near()) ask(peer, false);
  }
  const bool tells = looked_ >= tells_;
  if (tells && !untold_.empty()) tells_ = looked_ + kPause;
  while (tells && !untold_.empty()) {
    const Loss loss = untold_.begin()->second;
    std::ostringstream text;
    text << kNews << loss.kind << in_milliseconds(looked_ - loss.since);
    int last = -1;
    size_t runs = 0;
    for (auto each = untold_.begin(); each != untold_.end();) {
      const auto& [which, other] = *each;
      const bool is_alike = other.kind == loss.kind && other.since == loss.since;
      const bool is_next = runs > 0 && which == last + 1;
      if (!is_alike || (!is_next && runs == kMostRuns)) {
        ++each;
        continue;
      }
      if (!is_next) {
        if (runs++ > 0) text << ' ' << last;
        text << ' ' << which;
      }
      last = which;
      each = untold_.erase(each);
    }
    text << ' ' << last;
    std::string news = text.str();
    news.resize(std::max(news.size(), kLeastNews - 1), ' ');
    news_ += news + '\0';
  }
  const auto own = lost_.find(own_);
  const bool stays_here = own != lost_.end() && own->second.kind == kCutOff;
  for (Talk& talk : talks_) {
    const bool is_known = talk.is_ours ? talk.has_shown : talk.is_proven;
    if (!is_known || talk.told == news_.size()) continue;
    const bool is_near = host(talk.peer) == own_;  // the peer gets it on the other connection
    if (is_near ? talk.is_ours : !stays_here) talk.told += talk.line.send(news_.substr(talk.told));
  }
}

// Report hosts first, then ranks; both at once is rare.
std::optional<Failure> Heartbeat::report() {
  if (looked_ < reports_) return std::nullopt;
  const int count = hosts_->count();
  const auto ranks = unreported_.lower_bound(count);
  std::vector<int> missing;
  if (ranks == unreported_.begin()) {
    for (const auto& each : unreported_) missing.push_back(each.first - count);
    unreported_.clear();
    reports_ = kNever;
    const bool is_one = missing.size() == 1;
    return Failure(FL_PEER_LOST, missing, is_one ? "its process has ended" : "their processes have ended");
  }
  Losses lost(unreported_.begin(), ranks);
  unreported_.erase(unreported_.begin(), ranks);
  if (unreported_.empty()) reports_ = kNever;
  const auto own = lost.find(own_);
  const bool is_ours = own != lost.end();
  std::string words = in_words(is_ours ? Losses{*own} : lost);
  if (is_ours && own->second.kind != kCutOff) {
    words = "the other hosts have given up this one: " + words;
  }
  for (int which = 0; which < count; ++which) {
    if (is_ours ? which == own_ : !lost.count(which)) continue;
    const std::vector<int>& there = hosts_->ranks[which];
    missing.insert(missing.end(), there.begin(), there.end());
  }
  std::sort(missing.begin(), missing.end());
  return Failure(FL_HOST_LOST, missing, words);
}

std::string Heartbeat::in_words(const Losses& lost) const {
  const std::string here = "host " + hosts_->names[own_] + ", where this rank runs,";
  std::string words;
  for (const char kind : {kSilent, kStopped, kCutOff}) {
    std::string names;
    size_t count = 0;
    auto since = looked_;
    for (const auto& [which, loss] : lost) {
      if (loss.kind != kind) continue;
      if (count++ < kMostNames) names += (count > 1 ? ", " : "") + hosts_->names[which];
      since = std::min(since, loss.since);
    }
    if (count == 0) continue;
    if (count > kMostNames) names += " and " + std::to_string(count - kMostNames) + " more";
    words += words.empty() ? "" : "; ";
    words += kind == kCutOff ? here : (count > 1 ? "hosts " : "host ") + names;
    const std::string plural = count > 1 ? "" : "s";
    if (kind == kStopped) words += " answer" + plural + ", but none of " + (count > 1 ? "their" : "its") +
                                  " ranks does";
    if (kind != kStopped) words += kind == kSilent ? " cannot be reached" : " cannot reach any other host";
    words += " since " + when(looked_ - since);
    if (kind == kStopped) words += ": they are stopped, or the machine hangs";
  }
  const auto& [which, loss] = *lost.begin();
  if (hosts_->count() > 2 || loss.kind != kSilent || which == own_) return words;
  return words + "; it is the only other one, so " + here + " may be the one that is cut off";
}

}  // namespace fl
