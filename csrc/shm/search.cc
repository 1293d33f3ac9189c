#include "search.h"

#include <sched.h>

#include <algorithm>

namespace fl {

Search::Search(Mail& mail, Peers& peers, Queues& queues, int peer, int32_t tag)
    : mail_(mail), peers_(peers), queues_(queues), any_(peer < 0), tag_(tag) {
  // From another one each time, so that nobody who sends again and again keeps the others
  // from it.
  for (int i = 1; i < mail.size && any_; ++i) ranks_.push_back((mail.rank + i) % mail.size);
  if (any_ && !ranks_.empty()) {
    std::rotate(ranks_.begin(), ranks_.begin() + mail.searches++ % ranks_.size(), ranks_.end());
  }
  if (!any_) ranks_.push_back(peer);
  wishes_.resize(ranks_.size());
}

Search::~Search() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const std::lock_guard<std::mutex> lock(mail_.from(ranks_[i]).mutex);
    wishes_[i].withdraw(mail_.segment.channel(ranks_[i], mail_.rank));
  }
}

int Search::run(const Waiting& waiting, double patience) {
  const auto since = Clock::now();
  const auto end = patience < 0 ? Clock::time_point::max() : deadline_after(patience);
  const long slice = patience < 0 ? kSliceMilliseconds : 1;
  for (;;) {
    for (int idle = 0; idle <= waiting.patience.spins + waiting.patience.yields; ++idle) {
      if (look()) return found_;
      idle < waiting.patience.spins ? pause_briefly() : static_cast<void>(sched_yield());
    }
    if (sleep(slice)) return found_;
    look_around(since, waiting);
    if (found_ >= 0) return found_;
    if (Clock::now() >= end) return -1;
  }
}

bool Search::look() {
  for (int from : ranks_) {
    Inbox& inbox = mail_.from(from);
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    mail_.read_offers(from);
    const auto known = std::find_if(inbox.known.begin(), inbox.known.end(),
                                    [&](const Inbox::Known& one) { return one.envelope.tag == tag_; });
    if (known == inbox.known.end()) continue;
    if (any_ && !queues_.enter({from, false, tag_})) continue;  // another receive takes it
    offered_ = mail_.segment.offer(from, mail_.rank, known->envelope.place).signature;
    found_ = from;
    return true;
  }
  return false;
}

// Until somebody offers something, or for a while; whether it is found.
bool Search::sleep(long milliseconds) {
  uint32_t bits = 0;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const int from = ranks_[i];
    bits |= bits_of(from, mail_.rank);
    const std::lock_guard<std::mutex> lock(mail_.from(from).mutex);
    if (!wishes_[i].declare(mail_.segment.channel(from, mail_.rank), tag_)) continue;
    mail_.segment.block(from).futex.wake(bits_of(from, mail_.rank));
  }
  Futex& futex = mail_.segment.block(mail_.rank).futex;
  const uint32_t wakes = futex.begin_wait();
  const bool found = look();
  if (!found) futex.wait(wakes, bits, milliseconds);
  futex.end_wait();
  return found || look();
}

void Search::look_around(Clock::time_point since, const Waiting& waiting) {
  for (int from : ranks_) {
    Watch watch(peers_, Concern{from, 0}, waiting.seconds, waiting.interrupt);
    if (const auto lost = watch.loss()) {
      if (look()) return;  // posted just before
      throw *lost;
    }
    try {
      watch.check(since, from);
    } catch (const Failure& failure) {
      if (failure.status != FL_TIMEOUT) throw;
      throw Failure(FL_TIMEOUT, ranks_, what_is_sent());
    }
  }
  waiting.look_around(peers_, ranks_, since);
}

std::string Search::what_is_sent() {
  std::string text;
  for (int from : ranks_) {
    Inbox& inbox = mail_.from(from);
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    for (const Inbox::Known& known : inbox.known) {
      text += mail_.peers.name(from) + " is sending with tag " + std::to_string(known.envelope.tag) + ", ";
    }
  }
  return text + "this rank receives with tag " + std::to_string(tag_);
}

}  // namespace fl
