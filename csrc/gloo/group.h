// A group of processes joined by Gloo: a mesh, what runs on it, and on which threads.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../common/queue.h"
#include "collectives.h"
#include "mesh.h"

namespace fl {

class Group {
 public:
  Group(int rank, int size, const std::string& host, const std::string& interface,
        double connect_seconds);
  // One of `ranks` of another; see Mesh.
  Group(const Group& whole, const std::vector<int>& ranks, uint64_t number);

  int size() const { return mesh_->size; }
  const std::vector<char>& address() const { return mesh_->address(); }
  void call_ranks(std::vector<int> numbers) { mesh_->call_ranks(std::move(numbers)); }
  // Ask `check` now and then while run() waits; not 0: give up. Before the first run().
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }

  std::shared_ptr<Operation> connect(std::vector<char> addresses, size_t bytes,
                                     std::string key, bool lazily, double seconds);
  // Which rank connect() waits for; -1: for none.
  int awaited() const { return mesh_->awaited(); }
  // See Mesh.
  void check_at_once() { mesh_->check_at_once(); }
  int listen_for_hosts() { return mesh_->listen_for_hosts(); }
  void watch_hosts(std::shared_ptr<const Hosts> hosts) { mesh_->watch_hosts(std::move(hosts)); }
  void take_along(Companion companion) { mesh_->take_along(std::move(companion)); }
  // Whether `rank` has begun a collective that nobody has called here, and which.
  bool is_ahead(int rank, fl_signature& call);
  // Null while the group can be used; else why it cannot, because of another rank for example.
  std::shared_ptr<Operation> lost();
  // Let the others know that this rank begins no more messages.
  void leave() { mesh_->leave(); }
  // End, and report to the others why.
  void give_up(const std::string& why);
  // End what runs and what is queued; the destructor closes the sockets. An operation on the calling thread
  // itself (a signal handler has interrupted it) ends when that goes on.
  void close();

  // In a forked child: close the descriptors, without any lock.
  void abandon() noexcept { mesh_->close_descriptors(); }

  // Of a collective `given` has no peer.
  // Start an operation; collectives run on a thread, in turn.
  Handle start(const fl_message& given, void* output, double seconds);
  // Run an operation on the caller's thread, unless others must come first: then it is started.
  // Null where it has ended well and there is nothing to fetch.
  Handle run(const fl_message& given, void* output, double seconds);
  // Several messages at once; see Port.
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds) {
    return port_->exchange(messages, count, seconds, interrupt_);
  }
  std::vector<Handle> start_exchange(const fl_message* messages, int count, double seconds) {
    return port_->start_exchange(messages, count, seconds);
  }

 private:
  using Task = std::function<void(Operation&)>;
  explicit Group(std::unique_ptr<Mesh> mesh);
  std::shared_ptr<Operation> run_here(double seconds, Task task);
  Task collective(const fl_message& given, void* output, InterruptCheck interrupt);
  Bytes dispatch(Call& call, void* data, void* output);

  std::unique_ptr<Mesh> mesh_;
  Collectives collectives_;
  const std::unique_ptr<Port> port_;
  InterruptCheck interrupt_ = nullptr;
  uint32_t calls_ = 0;  // collectives so far
  std::shared_ptr<Shared> ended_ = std::make_shared<Shared>();  // of operations that run() has ended
  Queue queue_;  // last: it ends before what it works on
};

}  // namespace fl
