#include "rings.h"

#include "../common/copying.h"

namespace fl {

Rings::Rings(Segment& segment, Remote& remote, int rank, int size)
    : segment_(segment), remote_(remote), rank_(rank), ends_(std::make_unique<Ends[]>(size)) {
  for (int peer = 0; peer < size; ++peer) ends_[peer].ends.resize(segment.records());
}

Wire::Room Rings::reserve(int peer, size_t bytes) {
  Ends& ends = ends_[peer];
  const auto all = static_cast<uint32_t>(segment_.data_bytes()), records = segment_.records();
  const auto size = static_cast<uint32_t>((bytes + kLine - 1) / kLine * kLine);
  uint32_t at = ends.at;
  if (at % all + size > all) at += all - at % all;  // data does not wrap around
  const auto is_full = [&] {
    return ends.sent - ends.seen_drained >= records || at + size - ends.drained_at > all;
  };
  if (is_full()) {
    Channel& channel = segment_.channel(rank_, peer);
    const auto update = [&] {
      const uint32_t drained = channel.drained.load(std::memory_order_seq_cst);
      if (drained != ends.seen_drained) ends.drained_at = ends.ends[drained % records];
      ends.seen_drained = drained;
      return !is_full();
    };
    // Check again: either this rank sees new space, or the receiver sees that wants_room is set.
    if (!update()) {
      channel.wants_room.exchange(1, std::memory_order_seq_cst);
      if (!update()) return {};
    }
  }
  ends.reserved_at = at + size;
  Record& record = segment_.record(rank_, peer, ends.sent + 1);
  record.at = at % all;
  return {&record, segment_.data(rank_, peer) + at % all, 0};
}

void Rings::send(int peer, const Room& room) {
  Ends& ends = ends_[peer];
  const uint32_t number = ++ends.sent;
  ends.ends[number % segment_.records()] = ends.at = ends.reserved_at;
  room.record->group = static_cast<uint32_t>(room.group);
  // Either a waiting thread sees this number, or this thread sees the waiting thread: see Futex.
  room.record->number.exchange(number, std::memory_order_seq_cst);
  segment_.block(peer).futex.wake(kCallers | kThread);
  expect_to_write(&segment_.record(rank_, peer, number + 1));
}

Wire::Room Rings::next(int peer) {
  if (peer == rank_) return {};
  Record& record = segment_.record(peer, rank_, ends_[peer].received + 1);
  if (record.number.load(std::memory_order_seq_cst) != ends_[peer].received + 1) return {};
  const bool is_left = !left_groups_.empty() && left_groups_.count(record.group) > 0;
  return {&record, record.bytes > kTinyMessage ? segment_.data(peer, rank_) + record.at : nullptr,
          is_left ? kLeft : record.group};
}

void Rings::drop(int peer) {
  const uint32_t received = ++ends_[peer].received;
  Channel& channel = segment_.channel(peer, rank_);
  channel.drained.exchange(received, std::memory_order_seq_cst);
  if (channel.wants_room.load(std::memory_order_seq_cst) == 0) return;
  channel.wants_room.store(0, std::memory_order_seq_cst);
  segment_.block(peer).futex.wake(kCallers | kThread);
}

}  // namespace fl
