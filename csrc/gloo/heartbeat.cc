#include "heartbeat.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sstream>

namespace fl {
namespace {

// First byte of a message. kBeat: a beat. kNews: news of a loss. kLeave: the sender leaves, so the end of its
// connection is no loss. News contains the kind of loss, milliseconds since the loss, the first and last
// number of each range of lost hosts or ranks, and a zero byte. Rank r has the number r + number of hosts.
constexpr char kBeat = 1, kNews = 2, kLeave = 3;
// Kinds of losses. kSilent: a host does not answer. kStopped: only the kernel of a host answers. kCutOff:
// this host is cut off. kDead: a process has died.
constexpr char kSilent = 'S', kStopped = 'A', kCutOff = 'C', kDead = 'D';
// Sizes of one message of news. It has at least kLeastNews bytes, because fewer bytes (beats) do not wake the
// receiver. It has at most kMostRuns ranges. A receiver rejects more than kMostNews bytes.
constexpr size_t kLeastNews = 24, kMostRuns = 256, kMostNews = 8192;
// Minimum time between messages of news. If many hosts are lost, one message contains several losses.
constexpr std::chrono::milliseconds kPause{10};

// Sizes in bytes of the rank number and the proof that a rank sends first on its new connection.
constexpr size_t kRankBytes = sizeof(int32_t), kProofBytes = FL_PROOF_BYTES;
constexpr size_t kMostStrangers = 64;  // this plus Hosts::most: maximum number of unproven connections

// Fractions of Hosts::seconds. kLook: time between beats. kDoubt: silence after which other ranks are asked.
// kJudge: silence after which the host is lost. The remaining time is for news and the end of operations.
constexpr double kLook = 0.05, kDoubt = 0.3, kJudge = 0.75;
// Maximum number of intervals between two calls of update(). After a longer pause, this rank itself was
// stopped, and the pause does not count as silence of other hosts.
constexpr int kAsleep = 4;
// Maximum number of other hosts that this rank asks if a host is silent.
constexpr int kWitnesses = 8;
// If a host has at most kDirect ranks, each notifies all ranks of the host. Otherwise, ranks forward news.
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
    auto& host_ranks = ranks[this->numbers[r]];
    host_ranks.push_back(static_cast<int>(r));
    most = std::max(most, host_ranks.size());
  }
}

void Heartbeat::abandon() const noexcept {
  listener_.abandon();
  for (const Link& link : links_) link.line.abandon();
}

void Heartbeat::begin(std::shared_ptr<const Hosts> hosts) {
  hosts_ = std::move(hosts);
  prover_ = Prover(rank_, hosts_->key);
  own_host_ = host(rank_);
  const std::vector<int>& local = hosts_->ranks[own_host_];
  host_index_ = static_cast<int>(std::find(local.begin(), local.end(), rank_) - local.begin());
  interval_ = std::min<Clock::duration>(seconds(hosts_->seconds * kLook), kLongestInterval);
  doubt_ = seconds(hosts_->seconds * kDoubt);
  limit_ = seconds(hosts_->seconds * kJudge);
  // settling_: time from the detection of a loss to its report. The ranks of this host may detect the same
  // loss up to two intervals apart.
  settling_ = hosts_->count() > 2 ? 2 * interval_ : Clock::duration{};
  looked_ = beats_ = due_ = time_now();
  // Every rank of this host watches the next host. The hosts at distance 2, 4, 8, ... are divided among the
  // ranks.
  const int ranks = static_cast<int>(local.size());
  for (int bit = 0; 1 << bit < hosts_->count(); ++bit) {
    if (bit == 0 || bit % ranks == host_index_ % ranks) watched_.push_back({1 << bit, -1, looked_});
  }
}

void Heartbeat::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_leaving_ = true;
  for (Link& link : links_) {
    if (link.is_proven) link.line.send({kLeave});
  }
}

std::optional<Failure> Heartbeat::update() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = time_now();
  const auto asleep = now - looked_;
  if (asleep > kAsleep * interval_) {
    for (Watched& entry : watched_) entry.heard += asleep - interval_;
    for (auto& entry : doubts_) entry.second.since += asleep - interval_;
    visited_ += asleep - interval_;
  }
  looked_ = now;
  accept_guests();
  listen();
  if (!lost_.count(own_host_)) judge();
  if (now >= beats_) ask_hosts();
  links_.remove_if([](const Link& link) { return link.line.has_ended(); });
  send_news();
  due_ = std::min(beats_, reports_);
  if (!unsent_.empty()) due_ = std::min(due_, sends_at_);
  for (const Watched& entry : watched_) {
    if (entry.heard + limit_ > now) due_ = std::min(due_, entry.heard + limit_);
  }
  return report();
}

// No lock is needed to read the links, because only this thread adds or removes links.
void Heartbeat::await() {
  std::vector<const Line*> lines;
  for (const Link& link : links_) lines.push_back(&link.line);
  listener_.await(lines, due_);
}

std::vector<int> Heartbeat::present(int index) const {
  std::vector<int> ranks;
  for (int rank : hosts_->ranks[index]) {
    if (!left_.count(rank)) ranks.push_back(rank);
  }
  return ranks;
}

Heartbeat::Watched* Heartbeat::watched(int index) {
  const auto result = std::find_if(watched_.begin(), watched_.end(),
                                  [&](const Watched& entry) { return entry.host == index; });
  return result == watched_.end() ? nullptr : &*result;
}

// Listening ----------------------------------------------------------------------------------

void Heartbeat::accept_guests() {
  while (auto line = listener_.accept()) links_.push_back({std::move(*line), looked_, false});
  const auto is_stranger = [](const Link& link) { return !link.is_ours && !link.is_proven; };
  size_t strangers = std::count_if(links_.begin(), links_.end(), is_stranger);
  for (Link& link : links_) {
    if (!is_stranger(link)) continue;
    if (strangers <= hosts_->most + kMostStrangers && looked_ - link.since <= limit_) continue;
    link.line.give_up();
    --strangers;
  }
}

void Heartbeat::listen() {
  for (Link& link : links_) {
    link.line.update();
    listen_to(link);
    if (!link.is_ours || !link.line.has_left()) continue;
    left_.insert(link.peer);
    const bool is_dead = link.is_proven && !link.is_leaving && !lost_.count(host(link.peer));
    if (is_dead && !lost_.count(own_host_)) add_loss(hosts_->count() + link.peer, {kDead, looked_});
    if (Watched* const entry = watched(host(link.peer))) entry->heard = looked_;
  }
}

void Heartbeat::listen_to(Link& link) {
  const auto doubt = link.is_fresh ? doubts_.find(host(link.peer)) : doubts_.end();
  if (doubt != doubts_.end() && (link.line.is_connected() || link.line.has_left())) {
    doubt->second.has_answered = true;
  }
  if (!link.line.is_connected() || !is_proven_now(link)) return;
  if (!has_beaten(link)) return;
  if (link.is_ours) return handle_answer(link);
  if (host(link.peer) != own_host_) visited_ = looked_;
  link.line.send({kBeat});
}

// True if the peer has sent a valid proof. The rank that opened the connection sends its proof first.
bool Heartbeat::is_proven_now(Link& link) {
  if (link.is_proven) return true;
  int32_t rank = rank_;
  if (link.is_ours && !std::exchange(link.has_shown, true)) {
    std::string shown(reinterpret_cast<const char*>(&rank), kRankBytes);
    link.line.send(shown + prover_.shown_to(link.peer));
  }
  const size_t before = link.is_ours ? 0 : kRankBytes;
  if (link.line.received().size() < before + kProofBytes) return false;
  std::memcpy(&rank, link.line.take(before).data(), before);
  const std::string proof = link.line.take(kProofBytes);
  if (!link.is_ours && rank >= 0 && rank < static_cast<int>(hosts_->numbers.size())) link.peer = rank;
  link.is_proven = link.peer >= 0 && prover_.is_shown_by(link.peer, proof.data());
  if (!link.is_proven) {
    if (link.is_ours) left_.insert(link.peer);  // the peer has ended: another process uses its port
    link.line.give_up();
    return false;
  }
  if (!link.is_ours) link.line.send(prover_.shown_to(link.peer) + kBeat);
  if (is_leaving_) link.line.send({kLeave});
  link.line.await_at_least(kLeastNews);
  return true;
}

// Process beats and news; return true if a beat arrived.
bool Heartbeat::has_beaten(Link& link) {
  const std::string& text = link.line.received();
  bool has_beaten = false;
  for (;;) {
    const std::string beats = link.line.take(std::min(text.find(kNews), text.size()));
    has_beaten |= beats.find(kBeat) != std::string::npos;
    link.is_leaving |= beats.find(kLeave) != std::string::npos;
    const size_t end = text.find('\0');
    if (text.empty() || end == std::string::npos) break;
    const std::string news = link.line.take(end + 1);
    const bool is_near = host(link.peer) == own_host_;
    if (news[1] != kCutOff || is_near) read_news(news.substr(1, end - 1));
  }
  if (text.size() > kMostNews) link.line.give_up();
  return has_beaten;
}

// The peer of `answers` has answered, so its host is alive. Close the other new connections to this host. An
// old connection to a silent rank stays open: if it ends, the process of that rank has died.
void Heartbeat::handle_answer(Link& answers) {
  Watched* const entry = watched(host(answers.peer));
  if (entry == nullptr) return;
  entry->heard = looked_;
  answers.is_fresh = false;
  if (doubts_.erase(entry->host) == 0) return;
  for (Link& link : links_) {
    if (link.is_fresh && host(link.peer) == entry->host) link.line.give_up();
  }
}

// Asking -------------------------------------------------------------------------------------

// Send a beat to each watched host. It is called once per interval.
void Heartbeat::ask_hosts() {
  beats_ = looked_ + interval_;
  std::set<int> hosts_asked;
  for (const Link& link : links_) {
    if (link.is_ours && !link.line.has_ended()) hosts_asked.insert(host(link.peer));
  }
  watched_.remove_if([&](Watched& entry) {
    const bool stays = entry.host >= 0 && hosts_asked.count(entry.host) && !lost_.count(entry.host);
    return !stays && !choose(entry);
  });
  bool doubts = false;
  for (const Watched& entry : watched_) {
    if (!is_silent(entry, doubt_)) continue;
    doubts = true;
    for (int peer : present(entry.host)) ask_again(peer);
  }
  for (int index : witnesses()) {
    const std::vector<int> ranks = present(index);
    const auto doubt = doubts_.find(index);
    const bool is_open = doubt != doubts_.end() && !doubt->second.has_answered;
    if (ranks.empty() || watched(index) != nullptr || !(doubts || is_open)) continue;
    doubts = true;
    ask_again(ranks[host_index_ % ranks.size()]);
  }
  if (!doubts) doubts_.clear();
  for (Link& link : links_) {
    if (!doubts && link.is_fresh) link.line.give_up();
    if (link.is_ours && link.is_proven && host(link.peer) != own_host_) link.line.send({kBeat});
  }
}

// Choose a host for `entry` and connect to ranks of it. Return false if no host is left. Each rank asks the
// rank with its own index there, so that each is asked once. If entry.distance is 1, choose the next host
// with present ranks. Other distances are exact: otherwise, all ranks would ask the first host after a gap of
// lost hosts.
bool Heartbeat::choose(Watched& entry) {
  const int count = hosts_->count();
  const int end = entry.distance == 1 ? count : entry.distance + 1;
  for (int step = entry.distance; step < end; ++step) {
    const int next = (own_host_ + step) % count;
    Watched* const other = watched(next);
    const std::vector<int> ranks = present(next);
    if (ranks.empty() || lost_.count(next) || (other != nullptr && other != &entry)) continue;
    if (std::exchange(entry.host, next) != next) entry.heard = looked_;
    const size_t first = host_index_ % ranks.size(), local_ranks = hosts_->ranks[own_host_].size();
    for (size_t at = first; at < ranks.size(); at += local_ranks) {
      if (at == first || entry.distance == 1) ask(ranks[at], false);
    }
    return true;
  }
  return false;
}

// Return the hosts to ask as witnesses. They are spread over all hosts and differ for each rank of this host.
std::vector<int> Heartbeat::witnesses() const {
  const int count = hosts_->count(), most = std::min(kWitnesses, count - 1);
  std::vector<int> result;
  for (int i = 1; i <= most; ++i) {
    const int64_t step = most == count - 1 ? i : int64_t{i} * count / (most + 1) + host_index_;
    const int index = static_cast<int>((own_host_ + step) % count);
    if (index != own_host_ && !lost_.count(index)) result.push_back(index);
  }
  return result;
}

void Heartbeat::ask(int peer, bool is_fresh) {
  links_.push_back({Line(hosts_->addresses[peer]), looked_, true, peer, is_fresh});
}

// Ask `peer` on a new connection. The old connection may be slow after a network outage, because the kernel
// waits longer and longer before it repeats a lost packet.
void Heartbeat::ask_again(int peer) {
  doubts_.emplace(host(peer), Doubt{looked_});
  const auto is_question = [&](const Link& link) {
    return link.is_ours && link.peer == peer && link.is_fresh;
  };
  links_.remove_if([&](const Link& link) { return is_question(link) && !link.line.is_connected(); });
  if (std::none_of(links_.begin(), links_.end(), is_question)) ask(peer, true);
}

// Losses -------------------------------------------------------------------------------------

void Heartbeat::judge() {
  bool is_due = false, has_answer = looked_ - visited_ < doubt_;
  auto since = looked_;
  for (const Watched& entry : watched_) {
    is_due |= is_silent(entry, limit_);
    has_answer |= !is_silent(entry, doubt_);
    since = std::min(since, entry.heard);
  }
  const auto is_open = [&](const auto& entry) {
    const auto& [index, doubt] = entry;
    return !doubt.has_answered && !lost_.count(index) && watched(index) == nullptr;
  };
  for (const auto& entry : doubts_) {
    has_answer |= entry.second.has_answered;
    is_due |= is_open(entry) && looked_ - entry.second.since >= limit_;
  }
  if (!is_due) return;
  if (!has_answer && hosts_->count() > 2) return add_loss(own_host_, {kCutOff, since});
  for (const Watched& entry : watched_) {
    const auto doubt = doubts_.find(entry.host);
    const bool answers = doubt != doubts_.end() && doubt->second.has_answered;
    if (is_silent(entry, limit_)) add_loss(entry.host, {answers ? kStopped : kSilent, entry.heard});
  }
  for (const auto& entry : doubts_) {
    const auto asked_at = entry.second.since;
    const bool is_lost = is_open(entry) && looked_ - asked_at >= limit_;
    if (is_lost && !present(entry.first).empty()) add_loss(entry.first, {kSilent, asked_at});
  }
}

void Heartbeat::add_loss(int index, const Loss& loss) {
  if (lost_.count(index)) return;
  lost_.emplace(index, loss);
  for (Link& link : links_) {
    if (link.is_ours && host(link.peer) == index && !link.line.is_connected()) link.line.give_up();
  }
  unsent_.emplace(index, loss);
  unreported_.emplace(index, loss);
  reports_ = std::min(reports_, looked_ + (index == own_host_ ? Clock::duration{} : settling_));
}

void Heartbeat::read_news(const std::string& text) {
  char* at = nullptr;
  const auto since = looked_ - std::chrono::milliseconds(std::strtoll(text.c_str() + 1, &at, 10));
  while (*at == ' ' && std::isdigit(at[1])) {
    const int first = static_cast<int>(std::strtol(at, &at, 10));
    const int last = static_cast<int>(std::strtol(at, &at, 10));
    const int end = hosts_->count() + static_cast<int>(hosts_->numbers.size());
    for (int index = std::max(first, 0); index <= last && index < end; ++index) {
      add_loss(index, {text[0], since});
    }
  }
}

// Return the ranks of this host to notify: all ranks, or on large hosts some ranks, which forward the news.
std::vector<int> Heartbeat::local_receivers() const {
  const std::vector<int>& local = hosts_->ranks[own_host_];
  const int count = static_cast<int>(local.size());
  std::vector<int> result;
  for (int step = 1; step < count; step += local.size() > kDirect ? step : 1) {
    result.push_back(local[(host_index_ + step) % count]);
    result.push_back(local[(host_index_ + count - step) % count]);
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

// Send news. Before the first news, connect to ranks of this host. If this host is cut off, send the news
// only to its own ranks: when the network returns, other hosts must not receive a wrong loss.
void Heartbeat::send_news() {
  if (!unsent_.empty() && news_.empty()) {
    for (int peer : local_receivers()) ask(peer, false);
  }
  const bool sends = looked_ >= sends_at_;
  if (sends && !unsent_.empty()) sends_at_ = looked_ + kPause;
  while (sends && !unsent_.empty()) {
    const Loss loss = unsent_.begin()->second;
    std::ostringstream text;
    text << kNews << loss.kind << in_milliseconds(looked_ - loss.since);
    int last = -1;
    size_t runs = 0;
    for (auto entry = unsent_.begin(); entry != unsent_.end();) {
      const auto& [index, other] = *entry;
      const bool is_alike = other.kind == loss.kind && other.since == loss.since;
      const bool is_next = runs > 0 && index == last + 1;
      if (!is_alike || (!is_next && runs == kMostRuns)) {
        ++entry;
        continue;
      }
      if (!is_next) {
        if (runs++ > 0) text << ' ' << last;
        text << ' ' << index;
      }
      last = index;
      entry = unsent_.erase(entry);
    }
    text << ' ' << last;
    std::string news = text.str();
    news.resize(std::max(news.size(), kLeastNews - 1), ' ');
    news_ += news + '\0';
  }
  const auto own_loss = lost_.find(own_host_);
  const bool stays_here = own_loss != lost_.end() && own_loss->second.kind == kCutOff;
  for (Link& link : links_) {
    const bool is_known = link.is_ours ? link.has_shown : link.is_proven;
    if (!is_known || link.news_sent == news_.size()) continue;
    const bool is_near = host(link.peer) == own_host_;  // ranks of one host have two links: send on own one
    if (is_near ? link.is_ours : !stays_here) link.news_sent += link.line.send(news_.substr(link.news_sent));
  }
}

// Return a new loss. Lost hosts are returned first, and lost processes by the next call.
std::optional<Failure> Heartbeat::report() {
  if (looked_ < reports_) return std::nullopt;
  const int count = hosts_->count();
  const auto ranks = unreported_.lower_bound(count);
  std::vector<int> missing;
  if (ranks == unreported_.begin()) {
    for (const auto& entry : unreported_) missing.push_back(entry.first - count);
    unreported_.clear();
    reports_ = kNever;
    const bool is_one = missing.size() == 1;
    return Failure(FL_PEER_LOST, missing, is_one ? "its process has ended" : "their processes have ended");
  }
  Losses lost(unreported_.begin(), ranks);
  unreported_.erase(unreported_.begin(), ranks);
  if (unreported_.empty()) reports_ = kNever;
  const auto own_loss = lost.find(own_host_);
  const bool is_ours = own_loss != lost.end();
  std::string words = describe(is_ours ? Losses{*own_loss} : lost);
  if (is_ours && own_loss->second.kind != kCutOff) {
    words = "the other hosts have reported the loss of this host: " + words;
  }
  for (int index = 0; index < count; ++index) {
    if (is_ours ? index == own_host_ : !lost.count(index)) continue;
    const std::vector<int>& host_ranks = hosts_->ranks[index];
    missing.insert(missing.end(), host_ranks.begin(), host_ranks.end());
  }
  std::sort(missing.begin(), missing.end());
  return Failure(FL_HOST_LOST, missing, words);
}

std::string Heartbeat::describe(const Losses& lost) const {
  const std::string own_host = "host " + hosts_->names[own_host_] + ", where this rank runs,";
  std::string words;
  for (const char kind : {kSilent, kStopped, kCutOff}) {
    std::string names;
    size_t count = 0;
    auto since = looked_;
    for (const auto& [index, loss] : lost) {
      if (loss.kind != kind) continue;
      if (count++ < kMostNames) names += (count > 1 ? ", " : "") + hosts_->names[index];
      since = std::min(since, loss.since);
    }
    if (count == 0) continue;
    if (count > kMostNames) names += " and " + std::to_string(count - kMostNames) + " more";
    words += words.empty() ? "" : "; ";
    words += kind == kCutOff ? own_host : (count > 1 ? "hosts " : "host ") + names;
    const std::string plural = count > 1 ? "" : "s";
    if (kind == kStopped) words += " answer" + plural + ", but none of " + (count > 1 ? "their" : "its") +
                                  " ranks does";
    if (kind != kStopped) words += kind == kSilent ? " cannot be reached" : " cannot reach any other host";
    words += " since " + when(looked_ - since);
    if (kind == kStopped) words += ": they are stopped, or the machine hangs";
  }
  const auto& [index, loss] = *lost.begin();
  if (hosts_->count() > 2 || loss.kind != kSilent || index == own_host_) return words;
  return words + "; it is the only other host, so " + own_host + " may be cut off instead";
}

}  // namespace fl
