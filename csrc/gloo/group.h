// A process group over Gloo: mesh, collectives, messages and queue.
#pragma once

#include "../common/queue.h"
#include "collectives.h"
#include "mesh.h"

namespace fl {

class Group {
 public:
  explicit Group(std::unique_ptr<Mesh> mesh);

  Mesh& mesh() { return *mesh_; }
  int size() const { return mesh_->size; }
  void call_ranks(std::vector<int> numbers) { mesh_->call_ranks(std::move(numbers)); }
  // Let each call wait until all ranks have made it, also in subgroups. Use this before any operation.
  void compare_at_once() { mesh_->family->engine.check_at_once(); }
  void sum_by_hosts(std::vector<int> host_of) { collectives_.sum_by_hosts(std::move(host_of)); }
  // Set the check for signals. Call it before the first run().
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }

  std::shared_ptr<Operation> connect(std::vector<char> addresses, size_t bytes,
                                     std::string key, bool lazily, double seconds);
  // If `rank` has begun a collective that this rank has not called, store it in `call` and return true.
  bool is_ahead(int rank, fl_signature& call);
  // Return null if the group is usable, else a failed operation whose error is the reason.
  std::shared_ptr<Operation> lost();
  // Announce that this rank will start no more sends and receives.
  void leave() { mesh_->leave(); }
  // End the group with the reason `why`, and send the reason to the other ranks.
  void give_up(const std::string& why);
  // End running and queued operations. The destructor closes the sockets. If a signal handler calls close(),
  // an operation that it has interrupted on this thread ends after the handler returns.
  void close();

  // In a forked child: close the descriptors. Uses no lock.
  void abandon() noexcept { mesh_->family->abandon(); }

  // Start an operation. Collectives run one after the other on another thread.
  Handle start(const Request& call);
  // Run an operation on the caller's thread, or start it if earlier operations have not ended. Null means
  // that the operation succeeded and has no result to fetch.
  Handle run(const Request& call);
  // Run several sends and receives; see Port.
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, bool async) {
    return async ? port_.start_exchange(messages, count, seconds)
                 : port_.exchange(messages, count, seconds, interrupt_);
  }

 private:
  using Task = std::function<void(Operation&)>;
  std::shared_ptr<Operation> run_here(double seconds, Task task);
  Task collective(const Request& request, InterruptCheck interrupt);

  std::unique_ptr<Mesh> mesh_;
  Collectives collectives_;
  Port port_;
  InterruptCheck interrupt_ = nullptr;
  uint32_t calls_ = 0;  // collectives so far
  std::shared_ptr<Shared> ended_ = std::make_shared<Shared>();
  Queue queue_;  // declared last: destroyed before the objects that its operations use
};

}  // namespace fl
