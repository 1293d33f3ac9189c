// Operations: what was started and can be waited for, and how it ends.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "ticks.h"

namespace fl {

using Clock = std::chrono::steady_clock;

// So long after a rank has said that it shuts down, what it has begun before may still arrive: one that has
// waited as long for another message of it, in vain and unmatched until then, ends. It begins those that are
// queued behind others when these have ended.
constexpr std::chrono::milliseconds kLastMessages{500};
constexpr const char* kIsLeaving = "it waits in distributed_shutdown() and has not begun this message";

// No clock comes near it, nor overflows where it is waited for.
constexpr Clock::time_point kNever{std::chrono::hours{1000000}};

// What moves the bytes of a group, and whether it still can.
class Transport {
 public:
  virtual ~Transport() = default;

  // From any thread: end the running waits whose deadline has passed.
  virtual void enforce_deadline() = 0;
  // From any thread: end all running waits and all later ones.
  virtual void stop() = 0;
  // What an unexpected error of a running operation means.
  virtual Failure explain(const std::string& what) = 0;
  // Tell every peer why this rank gives up. fail() calls it, once.
  virtual void give_up(const Failure& failure) noexcept = 0;

  // What users call the ranks of this group, where it is part of a larger one; once, at first.
  void call_ranks(std::vector<int> numbers) { numbers_ = std::move(numbers); }
  std::string name(int rank) const {
    return "rank " + std::to_string(numbers_.empty() ? rank : numbers_[rank]);
  }

  // From any thread: this failure ends the group; the first one counts. Operations that still run,
  // on whatever thread, must end soon, those that come later with FL_CLOSED at once.
  void fail(const Failure& failure) noexcept;
  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
  // Why, and because of whom, as operations that come later are to say it.
  Failure why_broken() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_broken_{false};
  Failure why_{FL_CLOSED, {}, ""};
  std::vector<int> numbers_;
};

struct Bytes {
  std::unique_ptr<char[]> data;
  size_t size = 0;
};

// Room for `size` bytes, not initialised; never a null pointer.
Bytes make_bytes(size_t size);

// What those who run operations and those who hold them share; it outlives the group.
struct Shared {
  std::mutex mutex;
  std::condition_variable work;    // something to do, or time to end
  std::condition_variable done;    // an operation has ended
  Transport* transport = nullptr;  // null once the group is closed
};

// Where the end of an operation is recorded; see fl_op_stamp.
struct Stamp {
  int64_t* ended = nullptr;
  int64_t running = 0;

  void write() const {
    if (ended != nullptr) fl_stamp(ended, running);
  }
};

struct Operation;

// Who can end an operation on the thread of whoever asks for it.
class Helper {
 public:
  // Do so if nothing has to be waited for; `waits`: the thread is about to.
  virtual void help(const Operation& operation, bool waits) = 0;

 protected:
  ~Helper() = default;
};

struct Operation {
  std::shared_ptr<Shared> shared;
  Helper* helper = nullptr;  // of one that no thread has; lives while it is pending and waited for
  std::weak_ptr<Operation> ahead;       // in its queue
  std::atomic<bool> is_awaited{false};  // somebody waits for it, or has, or for one behind it
  double seconds = 0;
  Clock::time_point deadline = Clock::time_point::max();  // of its waits, from when it begins to run
  std::function<void(Operation&)> run;
  // Results; readable once status is no longer FL_PENDING.
  fl_status status = FL_PENDING;
  Clock::time_point ended;
  std::string message;
  std::vector<int> missing;
  Seen seen;
  Bytes output;
  Stamp stamp;
};

// `seconds` from now, or the end of time where that is nearer.
Clock::time_point deadline_after(double seconds);

// Run `operation` on this thread to its end, unless the transport is broken. What it throws becomes
// its status; anything but Mismatch breaks the transport.
void execute(Transport& transport, Operation& operation) noexcept;

// Somebody waits for `operation`, and so for all that are ahead of it. Its mutex is held.
void await(Operation& operation);

// End `operation` without running it.
void finish(Operation& operation, fl_status status, const std::string& message = {},
            std::vector<int> missing = {});

}  // namespace fl
