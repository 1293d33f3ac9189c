#include "queues.h"

#include <algorithm>
#include <utility>

namespace fl {
namespace {

constexpr const char* kWasClosed = "the group was closed";

}  // namespace

Crew::~Crew() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Crew::run(std::function<void()> task) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (idle_ <= ready_.size()) threads_.emplace_back(&Crew::work, this);
    ready_.push_back(std::move(task));
  } catch (const std::exception&) {
    return false;
  }
  changed_.notify_one();
  return true;
}

void Crew::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [&] { return closing_ || !ready_.empty(); });
    --idle_;
    if (ready_.empty()) return;
    auto task = std::move(ready_.front());
    ready_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

Queues::Queues(Transport& transport, std::shared_ptr<Crew> crew)
    : transport_(transport), crew_(std::move(crew)) {
  shared_->transport = &transport;
}

Queues::~Queues() { close(); }

void Queues::close() {
  std::list<Pending> never_run;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (!closing_) {
    closing_ = true;
    shared_->transport = nullptr;
    for (Busy& busy : busy_) never_run.splice(never_run.end(), busy.waiting);
    lock.unlock();
    for (const Pending& operation : never_run) finish(*operation, FL_CLOSED, kWasClosed);
    transport_.stop();
    lock.lock();
  }
  shared_->work.wait(lock, [this] { return running_ == 0; });
}

bool Queues::is_idle() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return busy_.empty();
}

std::shared_ptr<Operation> Queues::submit(const QueueId& id, double seconds,
                                         std::function<void(Operation&)> run) {
  auto operation = make(seconds, std::move(run));
  submit(id, operation);
  return operation;
}

void Queues::submit(const QueueId& id, std::shared_ptr<Operation> operation) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    const auto busy = find(id);
    if (busy != busy_.end()) {
      operation->ahead = std::exchange(busy->last, operation);
      busy->waiting.push_back(std::move(operation));
      return;
    }
    busy_.push_back({id, {}, operation});
  }
  begin(id, std::move(operation));
}

bool Queues::enter(const QueueId& id) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (find(id) != busy_.end()) return false;
  busy_.push_back({id, {}, {}});
  return true;
}

void Queues::leave(const QueueId& id) noexcept {
  Pending operation;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    operation = next(id);
  }
  if (operation != nullptr) begin(id, std::move(operation));
}

std::shared_ptr<Operation> Queues::go_on(const QueueId& id, double seconds,
                                        std::function<void(Operation&)> run) {
  auto operation = make(seconds, std::move(run));
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    const auto busy = find(id);
    if (busy->waiting.empty()) {
      busy->last = operation;
    } else {  // one that has been submitted meanwhile
      busy->waiting.front()->ahead = operation;
      operation->is_awaited = busy->waiting.front()->is_awaited.load();
    }
  }
  begin(id, operation);
  return operation;
}

Queues::Pending Queues::make(double seconds, std::function<void(Operation&)> run) const {
  auto operation = std::make_shared<Operation>();
  operation->shared = shared_;
  operation->seconds = seconds;
  operation->run = std::move(run);
  return operation;
}

std::vector<Queues::Busy>::iterator Queues::find(const QueueId& id) {
  return std::find_if(busy_.begin(), busy_.end(),
                      [&](const Busy& busy) { return busy.id == id; });
}

// What comes next in a queue whose head has ended; null: the queue is idle now.
Queues::Pending Queues::next(const QueueId& id) {
  const auto busy = find(id);
  if (busy->waiting.empty()) {
    busy_.erase(busy);
    return nullptr;
  }
  Pending operation = std::move(busy->waiting.front());
  busy->waiting.pop_front();
  return operation;
}

// Let a thread run the head of a queue. Where none can be had this fails, as if it had run: the others
// wait for it, and what comes next would be out of turn.
void Queues::begin(const QueueId& id, Pending operation) noexcept {
  while (operation != nullptr) {
    bool closing;
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      closing = closing_;
      if (!closing && hand_over(id, operation)) return;
    }
    operation->run = [closing](Operation&) {
      if (closing) throw Failure(FL_CLOSED, {}, kWasClosed);
      throw Failure(FL_FAILED, {}, "no thread can be had for another operation");
    };
    execute(transport_, *operation);
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    operation = next(id);
  }
}

bool Queues::hand_over(const QueueId& id, const Pending& operation) noexcept {
  ++running_;
  if (crew_->run([this, id, operation]() mutable { work(id, std::move(operation)); })) return true;
  --running_;
  return false;
}

void Queues::work(const QueueId& id, Pending operation) noexcept {
  const auto shared = shared_;  // these queues may go as soon as nothing runs
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (operation != nullptr) {
    const bool closing = closing_;
    lock.unlock();
    if (closing) {
      finish(*operation, FL_CLOSED, kWasClosed);
    } else {
      execute(transport_, *operation);
    }
    operation.reset();
    lock.lock();
    operation = next(id);
  }
  if (--running_ == 0) shared->work.notify_all();
}

}  // namespace fl
