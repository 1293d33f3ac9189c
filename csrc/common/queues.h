// Operations that run beside each other, but those of one queue one after the other.
//
// A queue holds what must not overtake itself: the messages of one direction to or from one rank with
// one tag; or all collectives, whose queue no message has. Its head runs on a thread of its own;
// threads are made when all others are busy, and kept. There may be as many as queues that have
// something to do, since each may wait for what a peer only does after it has received something of
// another. Groups may share them. A caller that wants to wait anyway can run an operation on its own thread, when the queue
// is idle: no change of threads, a tenth of the time.
//
// How a group uses it:
//
//   blocking:  if (queues.enter(id)) { run it here; queues.leave(id); }
//              else wait for queues.submit(id, seconds, run)
//   else:      queues.submit(id, seconds, run)
//   or:        if (queues.enter(id)) { begin it here; queues.go_on(id, seconds, rest); }
//
// `run` gets its Operation, whose deadline bounds its waits, and runs at the same time as others:
// what it shares with them must be guarded. It throws Mismatch, after which all goes on, or
// anything else, which breaks the transport: Transport::fail. Then the other operations must end
// too, so their waits look at Transport::is_broken now and then, or are ended by give_up.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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

struct QueueId {
  int peer;
  bool sends;
  int32_t tag;

  bool operator==(const QueueId& other) const {
    return peer == other.peer && sends == other.sends && tag == other.tag;
  }
};

// The queue of receives from any rank: the peer of no other one.
// A receive from any rank looks for an offer that has arrived, enters the queue of its sender and
// then receives as any other: senders need not know, the wire has nothing new, and receives that
// name their rank keep their order.
constexpr int kAnyRank = -2;

// Messages run beside collectives, each direction and tag in a queue of its own, as users of MPI
// expect: on the one thread that keeps collectives in order, two ranks that send to each other
// would wait for ever. A send ends when it was received: both ends see each other's call before
// anything moves, so a wrong shape is an error on both, and nothing has to be buffered.
class Queues {
 public:
  explicit Queues(Transport& transport, std::shared_ptr<Crew> crew = std::make_shared<Crew>());
  ~Queues();
  Queues(const Queues&) = delete;

  // Stop the transport, end what is queued with FL_CLOSED, and return when nothing runs on a thread of
  // the queues any more. What callers run on theirs ends soon; it is not waited for, as it may be the
  // caller's own: a signal handler interrupts an operation, and closes the group.
  void close();
  // Whether nothing runs, on whatever thread.
  bool is_idle();

  // Run `run` on a thread, after all that was submitted to or runs in this queue. An operation for
  // which no thread can be had has failed.
  std::shared_ptr<Operation> submit(const QueueId& id, double seconds,
                                    std::function<void(Operation&)> run);
  // The same in two steps.
  std::shared_ptr<Operation> make(double seconds, std::function<void(Operation&)> run) const;
  void submit(const QueueId& id, std::shared_ptr<Operation> operation);

  // True where nothing runs or waits in this queue: it is the caller's then, until leave(), or until
  // it lets a thread go on with what it has begun.
  bool enter(const QueueId& id);
  void leave(const QueueId& id) noexcept;
  std::shared_ptr<Operation> go_on(const QueueId& id, double seconds,
                                   std::function<void(Operation&)> run);

 private:
  using Pending = std::shared_ptr<Operation>;
  struct Busy {
    QueueId id;
    std::list<Pending> waiting;  // behind what runs, or is about to
    std::weak_ptr<Operation> last;
  };

  std::vector<Busy>::iterator find(const QueueId& id);
  Pending next(const QueueId& id);
  void begin(const QueueId& id, Pending operation) noexcept;
  bool hand_over(const QueueId& id, const Pending& operation) noexcept;
  void work(const QueueId& id, Pending operation) noexcept;

  Transport& transport_;
  const std::shared_ptr<Crew> crew_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();  // its mutex guards what follows
  std::vector<Busy> busy_;
  size_t running_ = 0;  // heads of queues that threads have
  bool closing_ = false;
};

}  // namespace fl
