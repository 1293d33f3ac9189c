#include "queue.h"

namespace fl {

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadPool::run(std::function<void()> task) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (idle_ <= ready_.size()) threads_.emplace_back(&ThreadPool::work, this);
    ready_.push_back(std::move(task));
  } catch (const std::exception&) {
    return false;
  }
  changed_.notify_one();
  return true;
}

void ThreadPool::work() {
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

Queue::Queue(Transport& transport, std::shared_ptr<ThreadPool> crew)
    : transport_(transport), crew_(std::move(crew)) {}

Queue::~Queue() { close(); }

void Queue::close() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (!closing_) {
    closing_ = true;
    const auto never_run = std::exchange(waiting_, {});
    lock.unlock();
    for (const Pending& operation : never_run) finish(*operation, FL_CLOSED, kWasClosed);
    transport_.stop();
    lock.lock();
  }
  shared_->work.wait(lock, [this] { return running_ == nullptr; });
}

bool Queue::is_idle() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return !is_busy_;
}

std::shared_ptr<Operation> Queue::submit(double seconds, std::function<void(Operation&)> run) {
  auto operation = make(seconds, std::move(run));
  submit(operation);
  return operation;
}

void Queue::submit(std::shared_ptr<Operation> operation) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (is_busy_) return waiting_.push_back(std::move(operation));
    is_busy_ = true;
  }
  begin(std::move(operation));
}

bool Queue::enter() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->work.wait(lock, [this] { return running_ == nullptr || running_->status == FL_PENDING; });
  return !std::exchange(is_busy_, true);
}

void Queue::leave() noexcept {
  Pending operation;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    operation = next();
  }
  if (operation != nullptr) begin(std::move(operation));
}

Queue::Pending Queue::make(double seconds, std::function<void(Operation&)> run) const {
  auto operation = std::make_shared<Operation>();
  operation->shared = shared_;
  operation->seconds = seconds;
  operation->run = std::move(run);
  return operation;
}

// Return the next operation, after the running one has ended. Null: the queue is idle.
Queue::Pending Queue::next() {
  is_busy_ = !waiting_.empty();
  if (!is_busy_) return nullptr;
  Pending operation = std::move(waiting_.front());
  waiting_.pop_front();
  return operation;
}

// Run `operation` on a thread. If no thread can be created, the operation fails and breaks the transport,
// because other ranks wait for it and a later operation would be out of order.
void Queue::begin(Pending operation) noexcept {
  while (operation != nullptr) {
    bool closing;
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      closing = closing_;
      if (!closing && hand_over(operation)) return;
    }
    operation->run = [closing](Operation&) {
      if (closing) throw Failure(FL_CLOSED, {}, kWasClosed);
      throw Failure(FL_FAILED, {}, "the system cannot start a thread for another operation");
    };
    execute(transport_, *operation);
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    operation = next();
  }
}

bool Queue::hand_over(const Pending& operation) noexcept {
  running_ = operation;
  if (crew_->run([this] { work(); })) return true;
  running_ = nullptr;
  return false;
}

void Queue::work() noexcept {
  const auto shared = shared_;  // keeps the mutex if the queue is destroyed after its last operation
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (running_ != nullptr) {
    const bool closing = closing_;
    lock.unlock();
    if (closing) {
      finish(*running_, FL_CLOSED, kWasClosed);
    } else {
      execute(transport_, *running_);
    }
    lock.lock();
    running_ = next();
    shared->work.notify_all();
  }
}

}  // namespace fl
