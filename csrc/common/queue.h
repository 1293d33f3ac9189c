// Operations that run one after the other: the collectives of a group.
//
// The head of a queue runs on a thread of its own; threads are made when all others are busy, and kept. Groups may
// share them: there may be as many as groups that have something to do, since each may wait for what a peer only
// does when another one of its own has ended. A caller that wants to wait anyway can run an operation on its own
// thread, when the queue is idle: no change of threads, a tenth of the time.
//
// How a group uses it:
//
//   blocking:  if (queue.enter()) { run it here; queue.leave(); }
//              else wait for queue.submit(seconds, run)
//   else:      queue.submit(seconds, run)
//
// `run` gets its Operation, whose deadline bounds its waits. It throws Mismatch, after which all goes on, or
// anything else, which breaks the transport: Transport::fail. Then the other operations must end
// too, so their waits look at Transport::is_broken now and then, or are ended by give_up.
#pragma once

#include <list>
#include <thread>

#include "operation.h"

namespace fl {

// Threads, as many as have something to do at a time.
class Crew {
 public:
  Crew() = default;
  ~Crew();  // when nothing runs
  Crew(const Crew&) = delete;

  // Run `task` at once; false: no thread can be had.
  bool run(std::function<void()> task) noexcept;

 private:
  void work();

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::list<std::function<void()>> ready_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;  // threads that wait for something to do
  bool closing_ = false;
};

class Queue {
 public:
  explicit Queue(Transport& transport, std::shared_ptr<Crew> crew = std::make_shared<Crew>());
  ~Queue();
  Queue(const Queue&) = delete;

  // Stop the transport, end what is queued with FL_CLOSED, and return when nothing runs on a thread of
  // the queue any more. An operation that callers run on theirs ends soon; it is not waited for, as it may be
  // the caller's own: a signal handler interrupts an operation, and closes the group.
  void close();
  // Whether nothing runs, on whatever thread.
  bool is_idle();

  // Run `run` on a thread, after all that was submitted before. An operation for which no thread can be had has
  // failed.
  std::shared_ptr<Operation> submit(double seconds, std::function<void(Operation&)> run);
  // The same in two steps.
  std::shared_ptr<Operation> make(double seconds, std::function<void(Operation&)> run) const;
  void submit(std::shared_ptr<Operation> operation);

  // True where nothing runs or waits: it is the caller's then, until leave(). An operation that has ended does
  // not run: its thread is waited for until it has returned.
  bool enter();
  void leave() noexcept;

 private:
  using Pending = std::shared_ptr<Operation>;

  Pending next();
  void begin(Pending operation) noexcept;
  bool hand_over(const Pending& operation) noexcept;
  void work() noexcept;

  Transport& transport_;
  const std::shared_ptr<Crew> crew_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();  // its mutex guards what follows
  std::list<Pending> waiting_;  // behind what runs, or is about to
  Pending running_;             // on a thread; null: nothing does
  bool is_busy_ = false;        // something runs
  bool closing_ = false;
};

}  // namespace fl
