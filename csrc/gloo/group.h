// A group's queue: operations run one after the other on one worker thread, in the order in which
// they were started, so that callers can wait with a signal handler in between, or not at all.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives.h"
#include "mesh.h"

namespace fl {

// What the worker and the holders of operations share; it outlives the group.
struct Queue {
  std::mutex mutex;
  std::condition_variable work;  // something to do, or time to end
  std::condition_variable done;  // an operation has ended
  Mesh* mesh = nullptr;          // null once the group is closed
};

struct Operation {
  std::shared_ptr<Queue> queue;
  double seconds = 0;
  std::function<void(Operation&)> run;
  // Results; readable once status is no longer FL_PENDING.
  fl_status status = FL_PENDING;
  std::string message;
  std::vector<int> missing;
  std::vector<fl_signature> signatures;
  Bytes output;
};

class Group {
 public:
  Group(int rank, int size, const std::string& host, const std::string& interface,
        double connect_seconds);
  ~Group();

  int size() const { return mesh_->size; }
  std::vector<char> address(int peer) { return mesh_->address(peer); }
  std::shared_ptr<Operation> connect(std::vector<char> addresses, size_t bytes, double seconds);
  std::shared_ptr<Operation> start(const fl_signature& signature, void* data, void* output,
                                   int peer, double seconds);

 private:
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);
  void work();
  void execute(Operation& operation);
  void finish(Operation& operation, fl_status status, std::string message = {},
              std::vector<int> missing = {});
  void dispatch(Operation& operation, const fl_signature& signature, void* data, void* output,
                int peer);

  std::unique_ptr<Mesh> mesh_;
  Collectives collectives_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::deque<std::shared_ptr<Operation>> pending_;
  bool closing_ = false;
  std::string broken_;  // why the group cannot be used any more
  uint64_t sequence_ = 0;
  std::thread worker_;
};

}  // namespace fl
