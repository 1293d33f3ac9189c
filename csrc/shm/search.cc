#include "search.h"

#include <sched.h>

#include <algorithm>

namespace fl {

ShmSearch::ShmSearch(Mail& mail, Peers& peers, Queues& queues, const fl_message& asked)
    : Search(queues, asked, mail.rank, mail.size, mail.searches),
      mail_(mail),
      peers_(peers),
      wishes_(ranks_.size()) {}

ShmSearch::~ShmSearch() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const std::lock_guard<std::mutex> lock(mail_.from(ranks_[i]).mutex);
    wishes_[i].withdraw(mail_.segment.channel(ranks_[i], mail_.rank));
  }
}

void ShmSearch::run(const Waiting& waiting, double patience) {
  const auto since = Clock::now();
  const auto end = patience < 0 ? Clock::time_point::max() : deadline_after(patience);
  const long slice = patience < 0 ? kSliceMilliseconds : 1;
  do {
    for (int idle = 0; idle <= waiting.patience.spins + waiting.patience.yields; ++idle) {
      if (look()) return;
      idle < waiting.patience.spins ? pause_briefly() : static_cast<void>(sched_yield());
    }
    if (sleep(slice) || look_around(since, waiting)) return;
  } while (Clock::now() < end);
}

bool ShmSearch::has_come(int from, fl_signature& call) {
  Inbox& inbox = mail_.from(from);
  const std::lock_guard<std::mutex> lock(inbox.mutex);
  mail_.read_offers(from);
  const auto known = std::find_if(inbox.known.begin(), inbox.known.end(),
                                  [&](const Inbox::Known& one) { return one.envelope.tag == tag_; });
  if (known == inbox.known.end()) return false;
  call = mail_.segment.offer(from, mail_.rank, known->envelope.place).signature;
  return true;
}

std::vector<int32_t> ShmSearch::tags_of(int from) {
  Inbox& inbox = mail_.from(from);
  const std::lock_guard<std::mutex> lock(inbox.mutex);
  std::vector<int32_t> tags;
  for (const Inbox::Known& known : inbox.known) tags.push_back(known.envelope.tag);
  return tags;
}

// Until somebody offers something, or for a while; whether it is found.
bool ShmSearch::sleep(long milliseconds) {
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

// Whether something is found after all: it was posted just before its sender was lost.
bool ShmSearch::look_around(Clock::time_point since, const Waiting& waiting) {
  for (int from : ranks_) {
    Watch watch(peers_, Concern{from, 0}, waiting.seconds, waiting.interrupt);
    if (const auto lost = watch.loss()) {
      if (look()) return true;
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
  return false;
}

}  // namespace fl
