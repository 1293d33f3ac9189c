// The smallest parts, tested separately with few accesses: for most of them all schedules can be tried.

#include "../../../csrc/common/queue.h"
#include "../../../csrc/common/ticker.h"
#include "../../../csrc/shm/rings.h"
#include "../../../csrc/shm/turn.h"
#include "member.h"

namespace {

using namespace model;

// Longer than any wait during which a missing wake is not detected.
constexpr long kMilliseconds = 100;

// An event that one thread sets and another thread waits for.
struct Event {
  std::mutex mutex;
  std::condition_variable came;
  int count = 0;

  void reach(int number) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (count < number) count = number;
    came.notify_all();
  }
  void await(int number) {
    std::unique_lock<std::mutex> lock(mutex);
    came.wait(lock, [&] { return count >= number; });
  }
};

// After each activate() a tick sees all earlier writes, even if the thread sleeps or is about to.
void ticks(int) {
  begin();
  Event* const seen = new Event;
  std::atomic<int>* const wound = new std::atomic<int>(0);
  int* const last = new int(0);  // number of the last tick
  fl::Ticker* const ticker = new fl::Ticker(std::chrono::milliseconds(1), [=] {
    const int number = wound->load(std::memory_order_relaxed);
    if (number > *last) seen->reach(*last = number);
  });
  for (int number = 1; number <= 2; ++number) {
    wound->store(number, std::memory_order_relaxed);
    ticker->activate();
    seen->await(number);
    let_pass(one_of(5));
  }
  ticker->stop();
}

// Two threads, one at a time.
void turns(int) {
  begin();
  fl::Turn* const turn = new fl::Turn;
  int* const taken = new int(0);
  const auto take = [=] {
    check(turn->try_take_for(kMilliseconds), "a turn that is given cannot be had");
    const fl::Turn::Guard held(*turn);
    check(turn->is_owner() && !turn->try_take_for(kMilliseconds), "a turn is not its thread's own");
    ++*taken;
  };
  std::thread other(take);
  take();
  other.join();
  check(*taken == 2, "two threads have had the turn at a time");
}

// A thread pool that is destroyed when it is idle.
void crew(int) {
  begin();
  Event* const done = new Event;
  fl::ThreadPool* const crew = new fl::ThreadPool;
  check(crew->run([=] { done->reach(1); }), "no thread");
  done->await(1);
  const std::unique_ptr<fl::ThreadPool> owned(crew);
}

struct Nothing : fl::Transport {
  void stop() override {}
  fl::Failure explain(const std::string& what) override { return {FL_FAILED, {}, what}; }
  void give_up(const fl::Failure&) noexcept override {}
};

// A queue that is closed while it runs: no operation runs afterwards.
void queue(int) {
  begin();
  Nothing* const transport = new Nothing;
  fl::Queue* const queue = new fl::Queue(*transport);
  int* const ran = new int(0);
  const auto first = queue->submit(1, [=](fl::Operation&) { ++*ran; });
  queue->close();
  ++*ran;
}

// A ring with room for fewer records than are sent.
template <size_t bytes, int records>
void ring(int rank) {
  fl::Segment* const segment = new fl::Segment(map(0, rank, fl::Segment::bytes_for(2)), 2);
  fl::Remote* const remote = new fl::Remote(*segment, rank, 2);
  fl::Rings* const rings = new fl::Rings(*segment, *remote, rank, 2);
  const auto sleep_until = [=](auto try_to) {
    while (!try_to()) {
      const uint32_t since = rings->begin_wait();
      const bool is_done = try_to();
      if (!is_done) rings->wait(since, true, kMilliseconds);
      rings->end_wait();
      if (is_done) return;
    }
  };
  begin();
  for (int i = 0; i < records; ++i) {
    fl::Wire::Room room;
    if (rank == 0) {
      sleep_until([&] { return (room = rings->reserve(1, bytes)).record != nullptr; });
      room.record->bytes = bytes;
      if (bytes > 0) std::memset(room.data, i, bytes);
      rings->send(1, room);
    } else {
      sleep_until([&] { return (room = rings->next(0)).record != nullptr; });
      for (size_t k = 0; k < bytes; ++k) check(room.data[k] == i, "another record's data");
      rings->drop(0);
    }
  }
}

const Case parts[] = {
    {.name = "ticks/1", .ranks = 1, .run = ticks, .share = 4, .stale = 3},
    {.name = "turns/1", .ranks = 1, .run = turns, .timers = 0, .is_small = true},
    {.name = "crew/1", .ranks = 1, .run = crew, .timers = 0, .is_small = true},
    {.name = "queue/1", .ranks = 1, .run = queue, .timers = 0, .is_small = true},
    {.name = "ring/2", .ranks = 2, .run = ring<0, 6>, .share = 2, .stale = 3, .timers = 0, .is_small = true},
    {.name = "ring_data/2", .ranks = 2, .run = ring<48, 9>, .share = 2, .stale = 3, .timers = 0, .is_small = true},
};
const Table all_parts{parts};

}  // namespace
