// Operations that run one after the other: the collectives of a group.
//
// The head of a queue runs on a thread. Threads are created when all others are busy, and are kept. Groups
// may share threads: there may be as many threads as groups with work, because an operation may wait for a
// peer's other group. If the queue is idle, a blocking caller runs the operation on its own thread, which
// avoids a thread switch and takes a tenth of the time.
//
// Use by a group:
//
//   blocking:  if (queue.enter()) { run it here; queue.leave(); }
//              else wait for queue.submit(seconds, run)
//   else:      queue.submit(seconds, run)
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

  // Run `task` at once on a thread. Return false if no thread can be created.
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
  // operation. Operations on callers' threads end soon and are not awaited: a signal handler that closes the
  // group may have interrupted one on the same thread.
  void close();
  // True if no operation runs on any thread.
  bool is_idle();

  // Run `run` on a thread after all earlier operations. The operation fails if no thread can be created.
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);
  // make() and the function below it are the two steps of submit().
  std::shared_ptr<Operation> make(double seconds, std::function<void(Operation&)> run) const;
  void submit(std::shared_ptr<Operation> operation);

  // Return true if the queue is idle; the caller then owns the queue until leave(). If an operation has ended
  // but its thread has not returned from the operation, enter() waits for that thread.
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
  Pending running_;                                                    // on a thread; null: no operation
  bool is_busy_ = false;                                               // an operation runs
  bool closing_ = false;
};

}  // namespace fl
