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

GlooSearch::GlooSearch(Mesh& mesh, Envelopes& envelopes, Queues& queues, const fl_message& asked,
                       Waiter& waiter)
    : Search(queues, asked, mesh.rank, mesh.size, envelopes.searches),
      mesh_(mesh),
      envelopes_(envelopes),
      waiter_(waiter) {
  mesh.reach(ranks_);  // one that is not there is lost, and who is there has sent
}

void GlooSearch::run(double patience, double waited) {
  const Waiter::Unmatched unmatched(waiter_, ranks_, waited);
  const auto end = patience < 0 ? Clock::time_point::max() : deadline_after(patience);
  auto look_around_at = Clock::now() + kTick;
  std::chrono::microseconds pause{10};
  for (int idle = 0; !look(); ++idle) {
    const auto now = Clock::now();
    if (now >= end) {  // whoever asks again and again is notified of a loss here, or never
      look_around();
      if (!look()) look_around();
      return;
    }
    if (now >= look_around_at) {
      look_around();
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

bool GlooSearch::has_come(int from, fl_signature& call) {
  envelopes_.read_arriving(from, waiter_);
  return envelopes_.has_arrived(from, tag_, call);
}

std::vector<int32_t> GlooSearch::tags_of(int from) {
  std::vector<int32_t> tags;
  for (const fl_signature& call : envelopes_.not_taken(from)) {
    if (call.verb == FL_SEND) tags.push_back(call.root);
  }
  return tags;
}

void GlooSearch::look_around() {
  mesh_.reach(ranks_);  // again, where one has left while it was being connected: now it is lost
  for (int from : ranks_) {
    try {
      waiter_.look_around(from);
    } catch (const TimedOut&) {
      throw Failure(FL_TIMEOUT, ranks_, what_is_sent());
    }
  }
}

}  // namespace fl
