// A group of processes joined by Gloo: a mesh, the collectives on it, and the thread they run on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../common/worker.h"
#include "collectives.h"
#include "mesh.h"

namespace fl {

class Group {
 public:
  Group(int rank, int size, const std::string& host, const std::string& interface,
        double connect_seconds);

  int size() const { return mesh_->size; }
  std::vector<char> address(int peer) { return mesh_->address(peer); }
  std::shared_ptr<Operation> connect(std::vector<char> addresses, size_t bytes, double seconds);
  std::shared_ptr<Operation> start(const fl_signature& signature, void* data, void* output,
                                   int peer, double seconds);

 private:
  void dispatch(Operation& operation, const fl_signature& signature, void* data, void* output,
                int peer);

  std::unique_ptr<Mesh> mesh_;
  Collectives collectives_;
  uint64_t sequence_ = 0;
  Worker worker_;  // last: it ends before what it works on
};

}  // namespace fl
