#include "group.h"

#include <utility>

namespace fl {

Group::Group(int rank, int size, const std::string& host, const std::string& interface,
             double connect_seconds)
    : mesh_(std::make_unique<Mesh>(rank, size, host, interface, connect_seconds)),
      collectives_(*mesh_),
      worker_(*mesh_) {}

std::shared_ptr<Operation> Group::connect(std::vector<char> addresses, size_t bytes,
                                          double seconds) {
  return worker_.submit(seconds, [this, addresses = std::move(addresses), bytes](Operation&) {
    mesh_->connect(addresses.data(), bytes);
    collectives_.open();
  });
}

std::shared_ptr<Operation> Group::start(const fl_signature& signature, void* data, void* output,
                                        int peer, double seconds) {
  return worker_.submit(seconds, [=](Operation& operation) {
    dispatch(operation, signature, data, output, peer);
  });
}

void Group::dispatch(Operation& operation, const fl_signature& signature, void* data,
                     void* output, int peer) {
  fl_signature mine = signature;
  mine.sequence = ++sequence_;
  auto& seen = operation.signatures;
  seen.assign(mesh_->size, fl_signature{});
  switch (mine.verb) {
    case FL_BARRIER: return collectives_.barrier(mine, seen);
    case FL_ALL_REDUCE: return collectives_.all_reduce(mine, data, seen);
    case FL_REDUCE_SCATTER: return collectives_.reduce_scatter(mine, data, output, seen);
    case FL_BROADCAST: return collectives_.broadcast(mine, data, seen);
    case FL_SEND: return collectives_.send(mine, data, peer, seen);
    case FL_RECV: return collectives_.recv(mine, data, peer, seen);
    case FL_ALL_GATHER:
      operation.output = collectives_.all_gather(mine, data, seen);
      return;
    default: throw std::invalid_argument("unknown verb");
  }
}

}  // namespace fl
