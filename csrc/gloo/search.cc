#include "search.h"

#include <algorithm>
#include <thread>

namespace fl {
namespace {

// Gloo waits for one rank at a time, so several are looked at in turn: often at first, then with
// pauses that grow, up to this.
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr int kYields = 100;

}  // namespace

Search::Search(Mesh& mesh, Envelopes& envelopes, Queues& queues, int peer, int32_t tag)
    : mesh_(mesh), envelopes_(envelopes), queues_(queues), any_(peer < 0), tag_(tag) {
  for (int r = 0; r < mesh.size; ++r) {
    if (r == peer || (any_ && r != mesh.rank)) ranks_.push_back(r);
  }
  mesh.reach(ranks_);  // one that is not there is lost, and who is there has sent
  // From another one each time, so that nobody who sends again and again keeps the others from it.
  if (any_ && !ranks_.empty()) {
    std::rotate(ranks_.begin(), ranks_.begin() + envelopes.searches++ % ranks_.size(), ranks_.end());
  }
}

int Search::run(Waiter& waiter, double patience, double waited) {
  const Waiter::Unmatched unmatched(waiter, ranks_, waited);
  const auto end = patience < 0 ? Clock::time_point::max() : deadline_after(patience);
  auto look_around_at = Clock::now() + kTick;
  std::chrono::microseconds pause{10};
  for (int idle = 0;; ++idle) {
    if (look(waiter)) return found_;
    const auto now = Clock::now();
    if (now >= end) {  // whoever asks again and again is notified of a loss here, or never
      look_around(waiter);
      if (look(waiter)) return found_;
      look_around(waiter);
      return -1;
    }
    if (now >= look_around_at) {
      look_around(waiter);
      look_around_at = now + kTick;
    }
    if (idle < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
}

bool Search::look(Waiter& waiter) {
  for (int from : ranks_) {
    envelopes_.read_arriving(from, waiter);
    if (!envelopes_.has_arrived(from, tag_, offered_)) continue;
    const QueueId id{from, false, tag_};
    if (any_ && !queues_.enter(id)) continue;  // another receive takes it
    if (envelopes_.has_arrived(from, tag_, offered_)) {
      found_ = from;
      return true;
    }
    if (any_) queues_.leave(id);  // one that has ended meanwhile took it
  }
  return false;
}

void Search::look_around(Waiter& waiter) {
  mesh_.reach(ranks_);  // again, where one has left while it was being connected: now it is lost
  for (int from : ranks_) {
    try {
      waiter.look_around(from);
    } catch (const TimedOut&) {
      throw Failure(FL_TIMEOUT, ranks_, what_is_sent());
    }
  }
}

std::string Search::what_is_sent() {
  std::string text;
  for (int from : ranks_) {
    for (const fl_signature& call : envelopes_.not_taken(from)) {
      if (call.verb != FL_SEND) continue;
      text += mesh_.name(from) + " is sending with tag " + std::to_string(call.root) + ", ";
    }
  }
  return text + "this rank receives with tag " + std::to_string(tag_);
}

}  // namespace fl
