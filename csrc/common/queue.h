// Operations that run one after the other: the collectives of a group.
//
// A thread of a pool runs the submitted operations. The pool creates a thread if all its threads are busy,
// and keeps it. Groups may share a pool. A pool may need one thread per group, because an operation may
// wait for an operation of another group. If the queue is idle, a blocking caller runs its operation on its
// own thread. This avoids a thread switch and takes a tenth of the time.
//
// `run` gets its Operation, whose deadline bounds its waits. If it throws Mismatch, the queue continues. Any
// other exception breaks the transport: Transport::fail. The other operations must then end too: their waits
// check Transport::is_broken regularly, or give_up ends them.
#pragma once

#include <list>
#include <thread>

#include "operation.h"

namespace fl {

// A pool of threads that grows when a task arrives while all threads are busy.
class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();  // call when no task runs
  ThreadPool(const ThreadPool&) = delete;

  // Run `task` on a thread without delay. Return false if no thread can be created.
  bool run(std::function<void()> task) noexcept;

 private:
  void work();

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::list<std::function<void()>> ready_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;  // threads without a task
  bool closing_ = false;
};

class Queue {
 public:
  explicit Queue(Transport& transport, std::shared_ptr<ThreadPool> crew = std::make_shared<ThreadPool>());
  ~Queue();
  Queue(const Queue&) = delete;

  // Stop the transport, end queued operations with FL_CLOSED, and wait until no thread of the queue runs an
  // operation. Do not wait for operations on callers' threads: they end soon, and a signal handler that calls
  // close() may have interrupted one of them.
  void close();
  // True if no operation runs on any thread.
  bool is_idle();

  // Run `run` on a thread after all earlier operations. The operation fails if no thread can be created.
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);
  // The two steps of submit(seconds, run).
  std::shared_ptr<Operation> make(double seconds, std::function<void(Operation&)> run) const;
  void submit(std::shared_ptr<Operation> operation);

  // Return true if the queue was idle. The caller may then run an operation until leave(). If an operation
  // has ended but still occupies a thread, wait for this thread first.
  bool enter();
  void leave() noexcept;

 private:
  using Pending = std::shared_ptr<Operation>;

  Pending next();
  void begin(Pending operation) noexcept;
  bool hand_over(const Pending& operation) noexcept;
  void work() noexcept;

  Transport& transport_;
  const std::shared_ptr<ThreadPool> crew_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();  // its mutex guards the members below
  std::list<Pending> waiting_;                                         // queued behind the running operation
  Pending running_;                                                    // on a thread of the queue, or null
  bool is_busy_ = false;                                               // an operation runs
  bool closing_ = false;
};

}  // namespace fl
