#include "group.h"

#include <stdexcept>
#include <utility>

#include "../common/signature.h"

namespace fl {
namespace {

bool is_message(const fl_signature& signature) {
  return signature.verb == FL_SEND || signature.verb == FL_RECV;
}

// Collectives come one after the other: they share a lane, which no message has.
constexpr Lane kCollectives{-1, false, 0};

Lane lane_of(const fl_signature& signature, int peer) {
  if (!is_message(signature)) return kCollectives;
  return {peer, signature.verb == FL_SEND, signature.root};
}

}  // namespace

Group::Group(int rank, int size, const std::string& host, const std::string& interface,
             double connect_seconds)
    : mesh_(std::make_unique<Mesh>(rank, size, host, interface, connect_seconds)),
      collectives_(*mesh_),
      point_to_point_(*mesh_),
      lanes_(*mesh_) {}

std::shared_ptr<Operation> Group::connect(std::vector<char> addresses, size_t bytes,
                                          double seconds) {
  const auto connect = [this, addresses = std::move(addresses), bytes](Operation&) {
    mesh_->connect(addresses.data(), bytes);
    collectives_.open();
    point_to_point_.open();
  };
  return lanes_.submit(kCollectives, seconds, connect);
}

std::shared_ptr<Operation> Group::start(const fl_signature& signature, void* data, void* output,
                                        int peer, double seconds) {
  return lanes_.submit(lane_of(signature, peer), seconds,
                       task(signature, data, output, peer, nullptr));
}

std::shared_ptr<Operation> Group::run(const fl_signature& signature, void* data, void* output,
                                      int peer, double seconds) {
  const Lane lane = lane_of(signature, peer);
  if (!lanes_.enter(lane)) return start(signature, data, output, peer, seconds);
  const struct Leave {
    Lanes& lanes;
    const Lane& lane;
    ~Leave() { lanes.leave(lane); }
  } leave{lanes_, lane};
  auto operation = std::make_shared<Operation>();
  operation->queue = ended_;
  operation->seconds = seconds;
  operation->run = task(signature, data, output, peer, interrupt_);
  execute(*mesh_, *operation);
  const bool nothing_to_fetch = operation->status == FL_OK && operation->output.data == nullptr;
  return nothing_to_fetch ? nullptr : operation;
}

std::function<void(Operation&)> Group::task(const fl_signature& signature, void* data,
                                            void* output, int peer, InterruptCheck interrupt) {
  return [this, mine = signature, data, output, peer, interrupt](Operation& operation) mutable {
    if (!is_message(mine)) mine.sequence = sequence_of(++calls_);
    operation.signatures.assign(mesh_->size, fl_signature{});
    Waiter waiter(mesh_->watch(), operation.deadline, interrupt);
    Call call{mine, operation.signatures, waiter};
    operation.output = dispatch(call, data, output, peer);
  };
}

Bytes Group::dispatch(Call& call, void* data, void* output, int peer) {
  switch (call.mine.verb) {
    case FL_BARRIER: collectives_.barrier(call); return {};
    case FL_ALL_REDUCE: collectives_.all_reduce(call, data); return {};
    case FL_REDUCE: collectives_.reduce(call, data); return {};
    case FL_REDUCE_SCATTER: collectives_.reduce_scatter(call, data, output); return {};
    case FL_BROADCAST: collectives_.broadcast(call, data); return {};
    case FL_ALL_GATHER: return collectives_.all_gather(call, data);
    case FL_GATHER: return collectives_.gather(call, data);
    case FL_SCATTER: return collectives_.scatter(call, data, output);
    case FL_ALL_TO_ALL: collectives_.all_to_all(call, data, output); return {};
    case FL_ALL_TO_ALL_UNEVEN:
      collectives_.all_to_all_uneven(call, *static_cast<fl_sections*>(data), output);
      return {};
    case FL_SEND: point_to_point_.send(call, data, peer); return {};
    case FL_RECV: point_to_point_.recv(call, data, peer); return {};
    default: throw std::invalid_argument("unknown verb");
  }
}

}  // namespace fl
