#include "wire.h"

namespace fl {
namespace {

// Maximum bytes that wait to be sent to a peer. Records up to kSmall bytes are always accepted, because there
// may be no thread to send them later.
constexpr size_t kMostWaiting = 1 << 20;
constexpr size_t kSmall = 1 << 10;

// Maximum number of ranks for which a thread polls all connections. With more ranks it polls only one peer.
constexpr int kMostPolled = 8;

}  // namespace

GlooWire::GlooWire(Links& links) : links_(links), peer_states_(std::make_unique<PeerState[]>(links.size)) {}

// If `peer` is not connected, begin to connect and return an empty Room. ended() wakes the waiting threads.
Wire::Room GlooWire::reserve(int peer, size_t bytes) {
  PeerState& state = peer_states_[peer];
  Pair* const pair = links_.pair(peer);
  if (pair == nullptr) {
    try {
      links_.reach(peer);
    } catch (const std::exception&) {
      // Ignore errors: a later check reports the peer as lost.
    }
    return {};
  }
  const bool is_full = bytes > kSmall && state.waits > kMostWaiting;
  if (is_full || pair->ended_at() != kNever) return {};
  state.reserved.emplace(sizeof(Record) + bytes);
  char* const memory = state.reserved->memory.get();
  std::memset(memory, 0, sizeof(Record));
  return {new (memory) Record, memory + sizeof(Record), 0};
}

void GlooWire::send(int peer, const Room& room) {
  PeerState& state = peer_states_[peer];
  const size_t bytes = state.reserved->bytes;
  state.waits += bytes;
  try {
    links_.pair(peer)->post(room.group, std::move(*state.reserved));
  } catch (const std::exception&) {
    state.waits -= bytes;  // the connection has ended; a later check reports the lost peer
  }
  state.reserved.reset();
}

bool GlooWire::has_sent(int peer) { return links_.pair(peer) == nullptr || links_.pair(peer)->hurry(); }

Wire::Room GlooWire::next(int peer) {
  PeerState& state = peer_states_[peer];
  const bool polls = state.pollers.load(std::memory_order_relaxed) > 0;
  if (polls && state.count.load(std::memory_order_acquire) == 0) {
    Pair* const pair = links_.pair(peer);
    if (pair != nullptr) pair->read_available();
  }
  if (state.count.load(std::memory_order_seq_cst) == 0) return {};
  const std::lock_guard<std::mutex> lock(state.mutex);
  StoredParcel& first = state.parcels.front();
  char* const memory = first.parcel.memory.get();
  return {reinterpret_cast<Record*>(memory), memory + sizeof(Record), first.group};
}

void GlooWire::drop(int peer) {
  PeerState& state = peer_states_[peer];
  std::optional<StoredParcel> taken;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(state.mutex);
  taken.emplace(std::move(state.parcels.front()));
  state.parcels.pop_front();
  --state.count;
}

// Memory to memory -----------------------------------------------------------------------------

// Sends an array to one peer, or receives it, in chunks. The connection must exist.
class GlooWire::Stream final : public Flow, private Route, private Receiver::Mover, private Receiver {
 public:
  Stream(GlooWire& wire, const Moves& moves)
      : Route(moves.group),
        Receiver(wire.links_.shared_from_this(), *this, moves.data, moves.bytes, this),
        wire_(wire),
        moves_(moves) {
    for (int i = 0; !moves.out || i < kAtOnce; ++i) {
      if (at_ == moves.bytes) break;
      go_on();
    }
  }

  ~Stream() override { wire_.links_.pair(moves_.peer)->forget(*this, group); }

  void go_on() override {
    const size_t bytes = std::min(kPieceBytes, moves_.bytes - at_);
    if (bytes == 0) return;
    const uint64_t slot = kFirstStream | moves_.receiver;
    try {
      moves_.out ? send(moves_.peer, slot, at_, bytes) : recv(moves_.peer, slot, at_, bytes);
    } catch (const std::exception&) {
      // Ignore errors: a later check reports the peer as lost.
    }
    at_ += bytes;
  }

 private:
  // First slot number of streams, above the numbers of all other slots.
  static constexpr uint64_t kFirstStream = uint64_t{1} << 40;
  // Bytes per chunk: other packets wait for at most one chunk, some ms. kAtOnce: number of chunks in transit.
  static constexpr size_t kPieceBytes = 4 << 20;
  static constexpr int kAtOnce = 2;

  Pair& pair_with(int peer) override { return *wire_.links_.pair(peer); }

  void moved(int peer, size_t bytes) override {
    Parcel parcel(sizeof(Record));
    std::memset(parcel.memory.get(), 0, sizeof(Record));
    auto* const record = new (parcel.memory.get()) Record;
    record->kind = kData;
    record->bytes = 0;
    record->token = moves_.token;
    record->digest = bytes;
    wire_.parcels(peer, {moves_.group, std::move(parcel)});
  }

  GlooWire& wire_;
  const Moves moves_;
  size_t at_ = 0;
};

std::unique_ptr<Wire::Flow> GlooWire::flow(const Moves& moves) {
  return std::make_unique<Stream>(*this, moves);
}

// Polling --------------------------------------------------------------------------------------

template <typename Visit>
void GlooWire::for_each(int peer, Visit visit) {
  if (peer == kNoPeer && links_.size > kMostPolled) return;
  const int first = peer == kNoPeer ? 0 : peer, last = peer == kNoPeer ? links_.size - 1 : peer;
  for (int rank = first; rank <= last; ++rank) {
    visit(links_.pair(rank), peer_states_[rank].pollers);
  }
}

void GlooWire::begin_polling(int peer) {
  links_.hurry();
  for_each(peer, [](Pair* pair, std::atomic<int>& pollers) {
    if (pollers++ == 0 && pair != nullptr) pair->set_served(false);
  });
}

void GlooWire::end_polling(int peer, bool in_vain) {
  for_each(peer, [in_vain](Pair* pair, std::atomic<int>& pollers) {
    if (--pollers == 0 && pair != nullptr && (in_vain || Pair::sleepers > 0)) pair->set_served(true);
  });
}

void GlooWire::rest(int peer, int polls) {
  std::vector<Pair*> pairs;
  for_each(peer, [&](Pair* pair, std::atomic<int>&) {
    if (pair != nullptr) pairs.push_back(pair);
  });
  Links::rest(pairs, polls);
}

// Events of pairs -------------------------------------------------------------------------------

void GlooWire::received(int peer, uint64_t group, bool is_over, Parcel parcel) {
  if (parcel.bytes < sizeof(Record)) return;
  parcels(peer, {is_over ? kLeft : group, std::move(parcel)});
}

void GlooWire::parcels(int peer, StoredParcel parcel) {
  PeerState& state = peer_states_[peer];
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.parcels.push_back(std::move(parcel));
    // Either a waiting thread sees this change, or this thread sees the waiting thread: see Futex.
    state.count.fetch_add(1, std::memory_order_seq_cst);
  }
  wake_all();
}

void GlooWire::sent(int peer, size_t bytes) {
  const size_t before = peer_states_[peer].waits.fetch_sub(bytes, std::memory_order_seq_cst);
  if (before > kMostWaiting) wake_all();
}

}  // namespace fl
