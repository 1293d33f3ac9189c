#include "queues.h"

#include <algorithm>
#include <utility>

namespace fl {

Queues::Queues(Transport& transport) : transport_(transport) { shared_->transport = &transport; }

Queues::~Queues() { close(); }

void Queues::close() {
  std::list<Pending> never_run;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (closing_) return;
    closing_ = true;
    shared_->transport = nullptr;
    for (auto& [id, operation] : ready_) {
      never_run.push_back(std::move(operation));
      never_run.splice(never_run.end(), find(id)->waiting);
      busy_.erase(find(id));
    }
    ready_.clear();
    for (Busy& busy : busy_) never_run.splice(never_run.end(), busy.waiting);
  }
  for (const Pending& operation : never_run) finish(*operation, FL_CLOSED, "the group was closed");
  transport_.stop();
  shared_->work.notify_all();
  for (std::thread& thread : threads_) thread.join();  // no more are made once closing
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
      if (closing) throw Failure(FL_CLOSED, {}, "the group was closed");
      throw Failure(FL_FAILED, {}, "no thread can be had for another operation");
    };
    execute(transport_, *operation);
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    operation = next(id);
  }
}

bool Queues::hand_over(const QueueId& id, const Pending& operation) noexcept {
  try {
    if (idle_ <= ready_.size()) threads_.emplace_back(&Queues::work, this);
    ready_.emplace_back(id, operation);
  } catch (const std::exception&) {
    return false;
  }
  shared_->work.notify_one();
  return true;
}

void Queues::work() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  for (;;) {
    ++idle_;
    shared_->work.wait(lock, [&] { return closing_ || !ready_.empty(); });
    --idle_;
    if (ready_.empty()) return;
    auto [id, operation] = std::move(ready_.front());
    ready_.pop_front();
    while (operation != nullptr) {
      lock.unlock();
      execute(transport_, *operation);
      operation.reset();
      lock.lock();
      operation = next(id);
    }
  }
}

}  // namespace fl
