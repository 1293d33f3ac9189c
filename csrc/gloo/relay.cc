#include "relay.h"

namespace fl {
namespace {

constexpr size_t kAlignment = 8;  // of payloads that are computed with

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Relay::Relay(Mesh& mesh) : mesh_(mesh) {}

void Relay::open() {
  const int rank = mesh_.rank, size = mesh_.size;
  const auto room = [](size_t blocks) { return blocks * (sizeof(Head) + kAlignment) + kBytes; };
  held_.reset(new char[room(size)]);
  for (int far = 1; far < size; far *= 2) {
    Step step{(rank + far) % size, (rank - far + size) % size,
              static_cast<size_t>(std::min(far, size - far)), {}, {}, nullptr};
    for (size_t turn = 0; turn < kTurns; ++turn) {
      step.rooms[turn].reset(new char[room(step.blocks)]);
      step.receives[turn] = mesh_.buffer(step.rooms[turn].get(), room(step.blocks));
    }
    step.sends = mesh_.buffer(held_.get(), room(size));
    steps_.push_back(std::move(step));
  }
  for (size_t turn = 0; turn < kTurns; ++turn) {
    for (Step& step : steps_) ask(step, turn);
  }
}

void Relay::ask(Step& step, size_t turn) {
  std::memset(step.rooms[turn].get(), 0, sizeof(Head));  // nothing has arrived
  const Buffer& receive = step.receives[turn];
  mesh_.ask(*receive, step.from, kRelaySlot, 0, receive->size);
}

void Relay::exchange(const fl_signature& call, const fl_site& site, const void* data, size_t bytes, Waiter& waiter) {
  begins_.clear();
  end_ = 0;
  hold({bytes, call, site, 1}, data);
  for (Step& step : steps_) {
    const size_t sent = step.blocks == begins_.size() ? end_ : begins_[step.blocks];
    step.sends->send(step.to, kRelaySlot, 0, sent);
    waiter.received(*step.receives[turn_], step.from);
    take(step.rooms[turn_].get(), step.blocks);
  }
  for (Step& step : steps_) ask(step, turn_);
  turn_ = (turn_ + 1) % kTurns;
  for (Step& step : steps_) waiter.sent(*step.sends, step.to);
}

void Relay::take(const char* from, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i) {
    const Head& head = *reinterpret_cast<const Head*>(from);
    hold(head, from + sizeof(Head));
    from += sizeof(Head) + aligned(head.bytes);
  }
}

void Relay::hold(const Head& head, const void* payload) {
  if (head.bytes * mesh_.size > kBytes) throw std::runtime_error("a payload that is too long");
  begins_.push_back(end_);
  std::memcpy(&held_[end_], &head, sizeof(Head));
  if (head.bytes > 0) std::memcpy(&held_[end_ + sizeof(Head)], payload, head.bytes);
  end_ += sizeof(Head) + aligned(head.bytes);
}

std::vector<int> Relay::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < mesh_.size; ++rank) {
    if (place(rank) >= begins_.size()) ranks.push_back(rank);
  }
  return ranks;
}

bool Relay::is_ahead(int rank, fl_signature& call) const {
  for (const Step& step : steps_) {
    if (step.from != rank) continue;
    const Head& head = *reinterpret_cast<const Head*>(step.rooms[turn_].get());
    if (__atomic_load_n(&head.arrived, __ATOMIC_ACQUIRE) == 0) return false;
    call = head.call;
    return true;
  }
  return false;
}

}  // namespace fl
