// Random messages: many tags, in any order, one by one or many at once, matching or not.
#include <cstdlib>
#include <map>
#include <tuple>

#include "calls.h"
#include "reference.h"

namespace stress {

struct Author::Letter {
  int from, to, tag;
  Step send, receive;

  Step& of(int rank) { return rank == from ? send : receive; }
};

Author::Letter Author::letter(int from, int to, size_t count, int dtype, int tag) {
  const Block given = made(dtype, count, false), before = made(dtype, count, false);
  Letter one{from, to, tag, step(signature(FL_SEND, dtype, 0, tag, 1.0, count), given),
             step(signature(FL_RECV, dtype, 0, tag, 1.0, count), before)};
  one.send.peer = to;
  one.receive.peer = from;
  one.receive.data_after = given;
  return one;
}

// The calls of both ends differ, and both ends raise. A sender of little data may have returned before: see
// test_late_refusal.
Author::Letter Author::misfit(int from, int to, size_t count, int dtype, int tag) {
  if (std::getenv("FLASHLIGHT_CHECKS") == nullptr) count += world_.eager_bytes / info_of(dtype).itemsize + 1;
  const fl_signature sent = signature(FL_SEND, dtype, 0, tag, 1.0, count);
  const fl_signature awaited = random_.one_in(2)
                                   ? signature(FL_RECV, dtype, 0, tag, 1.0, count + 1)
                                   : signature(FL_RECV, dtype == 1 ? 2 : 1, 0, tag, 1.0, count);
  Letter one{from, to, tag, mismatched(sent), mismatched(awaited)};
  one.send.peer = to;
  one.receive.peer = from;
  std::vector<fl_signature> seen(world_.ranks);
  seen[from] = sent;
  seen[to] = awaited;
  seen[from].sequence = seen[to].sequence = 1;
  one.send.seen = one.receive.seen = seen;
  return one;
}

// Messages in sequence, in the same order on both ends.
void Author::add_message() {
  if (world_.ranks == 1) return;
  const int from = some_root();
  const int to = (from + 1 + static_cast<int>(random_.below(world_.ranks - 1))) % world_.ranks;
  const int dtype = some_dtype(FL_MIN);
  const bool empty = random_.one_in(2);
  const int number = 1 + static_cast<int>(random_.below(empty ? 30 : 3));
  for (int i = 0; i < number; ++i) {
    Letter one = letter(from, to, empty ? 0 : some_count(info_of(dtype).itemsize), dtype, i);
    script_.steps[from].push_back(std::move(one.send));
    script_.steps[to].push_back(std::move(one.receive));
  }
}

// Messages to one rank that knows neither source nor size. It starts some receives before earlier ones have
// ended.
void Author::add_open_receives() {
  if (world_.ranks == 1) return;
  const int dtype = some_dtype(FL_MIN), item = info_of(dtype).itemsize, to = some_root();
  const int tag = next_tag_++;
  std::vector<Block> sent(world_.ranks);
  size_t largest = 0;
  int number = 0;
  for (int r = 0; r < world_.ranks; ++r) {
    if (r == to || random_.one_in(4)) continue;
    sent[r] = made(dtype, std::min<size_t>(some_count(item), 400000 / item), false);
    largest = std::max(largest, sent[r]->size() / item);
    const int times = 1 + static_cast<int>(random_.below(3));
    number += times;
    for (int i = 0; i < times; ++i) {
      const size_t count = sent[r]->size() / item;
      Step send = step(signature(FL_SEND, dtype, 0, tag, 1.0, count), sent[r]);
      send.peer = to;
      script_.steps[r].push_back(std::move(send));
    }
  }
  for (int i = 0; i < number; ++i) {
    Step receive = step(signature(FL_RECV, dtype, 0, tag, 1.0, largest), made(dtype, largest, false));
    receive.from = sent;
    script_.steps[to].push_back(std::move(receive));
  }
  add_barrier();  // no rank leaves before, because it may be a sender
}

// Messages to the next rank, in the same order on both ends.
void Author::add_ring() {
  if (world_.ranks == 1) return;
  const int dtype = some_dtype(FL_MIN);
  for (int r = 0; r < world_.ranks; ++r) {
    const int to = (r + 1) % world_.ranks;
    Letter one = letter(r, to, some_count(info_of(dtype).itemsize), dtype, 7);
    script_.steps[r].push_back(std::move(one.send));
    script_.steps[to].push_back(std::move(one.receive));
  }
}

void Author::add_message_mismatch() {
  if (world_.ranks == 1) return;
  const int from = some_root(), to = (from + 1) % world_.ranks;
  const int dtype = some_dtype(FL_MIN);
  const size_t count = some_count(info_of(dtype).itemsize);
  for (int i = 0; i < 5; ++i) {
    Letter one = misfit(from, to, count, dtype, i);
    script_.steps[from].push_back(std::move(one.send));
    script_.steps[to].push_back(std::move(one.receive));
  }
}

Author::Letter Author::some_letter(int from, int to, int tag, size_t largest_bytes) {
  const int dtype = some_dtype(FL_MIN), item = info_of(dtype).itemsize;
  const size_t count = std::min(some_count(item), largest_bytes / item);
  return random_.one_in(12) ? misfit(from, to, count, dtype, tag)
                            : letter(from, to, count, dtype, tag);
}

// A random order that keeps the order of messages with equal direction, peer and tag.
std::vector<size_t> Author::some_order(const std::vector<Letter*>& letters, int rank) {
  std::vector<size_t> order(letters.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
  std::map<std::tuple<bool, int, int>, std::vector<size_t>> lanes;
  const auto lane = [&](size_t i) {
    const Letter& one = *letters[i];
    return std::make_tuple(one.from == rank, one.from == rank ? one.to : one.from, one.tag);
  };
  for (size_t i = order.size(); i > 0; --i) lanes[lane(i - 1)].push_back(i - 1);
  for (size_t& at : order) {
    auto& rest = lanes[lane(at)];
    at = rest.back();
    rest.pop_back();
  }
  return order;
}

// Many concurrent messages between some ranks, in a different order on every rank. A rank starts all
// messages, exchanges all of them, or waits for some in turn after starting the rest. It waits only for
// messages whose other end does not wait in turn, so that no deadlock occurs.
void Author::add_letters() {
  if (world_.ranks == 1) return;
  enum Way { kStarts, kExchanges, kWaits };
  const size_t number = 1 + random_.below(random_.one_in(4) ? 200 : 20);
  const size_t largest = 4000000 / number;
  const int tags = random_.one_in(3) ? 200 : 4, first_tag = random_.one_in(2) ? -2 : 1 << 30;
  const int some = random_.one_in(2) ? 2 : world_.ranks, first = some_root();
  std::vector<Way> ways;
  for (int r = 0; r < world_.ranks; ++r) ways.push_back(static_cast<Way>(random_.below(3)));
  std::vector<Letter> letters;
  std::vector<std::vector<Letter*>> of(world_.ranks);
  letters.reserve(number);
  for (size_t i = 0; i < number; ++i) {
    const int a = static_cast<int>(random_.below(some));
    const int b = (a + 1 + static_cast<int>(random_.below(some - 1))) % some;
    const int from = (first + a) % world_.ranks, to = (first + b) % world_.ranks;
    const int tag = first_tag + static_cast<int>(random_.below(tags));
    letters.push_back(some_letter(from, to, tag, largest));
    of[from].push_back(&letters.back());
    of[to].push_back(&letters.back());
  }
  for (int r = 0; r < world_.ranks; ++r) {
    std::vector<Step> last;
    for (const size_t i : some_order(of[r], r)) {
      Letter& one = *of[r][i];
      const int other = one.from == r ? one.to : one.from;
      Step& step = one.of(r);
      step.wait = false;
      step.how = ways[r] == kExchanges ? How::kExchange : How::kStart;
      const bool waits = ways[r] == kWaits && ways[other] != kWaits && one.tag % 2 == 0;
      if (waits) step.how = How::kRun;
      (waits ? last : script_.steps[r]).push_back(std::move(step));
    }
    std::move(last.begin(), last.end(), std::back_inserter(script_.steps[r]));
  }
}

}  // namespace stress
