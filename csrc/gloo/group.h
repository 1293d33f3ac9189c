// A process group over Gloo: its mesh, its collectives, its messages and its queue.
#pragma once

#include "../common/queue.h"
#include "collectives.h"
#include "mesh.h"

namespace fl {

class Group {
 public:
  Group(int rank, int size, const std::string& host, const std::string& interface, double connect_seconds);
  // Create a subgroup with `ranks` of another group; see Mesh.
  Group(const Group& whole, const std::vector<int>& ranks, uint64_t number);

  Mesh& mesh() { return *mesh_; }
  int size() const { return mesh_->size; }
  void call_ranks(std::vector<int> numbers) { mesh_->call_ranks(std::move(numbers)); }
  void compare_at_once() { mesh_->compare_at_once(); }
  // Call before the first run().
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }

  std::shared_ptr<Operation> connect(std::vector<char> addresses, size_t bytes,
                                     std::string key, bool lazily, double seconds);
  // True if `rank` has begun a collective that this rank has not called; `call` receives it.
  bool is_ahead(int rank, fl_signature& call);
  // Return null if the group is usable, else an ended operation with the reason.
  std::shared_ptr<Operation> lost();
  // Announce that this rank begins no more messages.
  void leave() { mesh_->leave(); }
  // End the group and report the reason to the other ranks.
  void give_up(const std::string& why);
  // End running and queued operations; the destructor closes the sockets. An operation on the calling thread,
  // which a signal handler has interrupted, ends when it continues.
  void close();

  // In a forked child: close the descriptors, without locks.
  void abandon() noexcept { mesh_->close_descriptors(); }

  // Start an operation; collectives run on a thread, in order.
  Handle start(const Request& call);
  // Run an operation on the caller's thread; if earlier operations are pending, start it instead. A
  // null result means success without a result to fetch.
  Handle run(const Request& call);
  // Run several sends and receives; see Port.
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, bool async) {
    return async ? port_->start_exchange(messages, count, seconds)
                 : port_->exchange(messages, count, seconds, interrupt_);
  }

 private:
  using Task = std::function<void(Operation&)>;
  explicit Group(std::unique_ptr<Mesh> mesh);
  std::shared_ptr<Operation> run_here(double seconds, Task task);
  Task collective(const Request& request, InterruptCheck interrupt);
  Bytes dispatch(Call& call, void* data, void* output);

  std::unique_ptr<Mesh> mesh_;
  Collectives collectives_;
  const std::unique_ptr<Port> port_;
  InterruptCheck interrupt_ = nullptr;
  uint32_t calls_ = 0;  // collectives so far
  std::shared_ptr<Shared> ended_ = std::make_shared<Shared>();  // shared by the operations that run() has ended
  Queue queue_;  // last: destroyed before the objects that its operations use
};

}  // namespace fl
