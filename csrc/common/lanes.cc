#include "lanes.h"

#include <algorithm>
#include <system_error>

namespace fl {

Lanes::Lanes(Transport& transport) : transport_(transport) { queue_->transport = &transport; }

Lanes::~Lanes() {
  std::list<Pending> never_run;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    closing_ = true;
    queue_->transport = nullptr;
    for (auto& [lane, operation] : ready_) {
      never_run.push_back(std::move(operation));
      never_run.splice(never_run.end(), find(lane)->waiting);
      busy_.erase(find(lane));
    }
    ready_.clear();
    for (Busy& busy : busy_) never_run.splice(never_run.end(), busy.waiting);
  }
  for (const Pending& operation : never_run) finish(*operation, FL_CLOSED, "the group was closed");
  transport_.stop();
  {
    std::unique_lock<std::mutex> lock(queue_->mutex);
    queue_->work.notify_all();
    queue_->work.wait(lock, [&] { return busy_.empty(); });
  }
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<Operation> Lanes::submit(const Lane& lane, double seconds,
                                         std::function<void(Operation&)> run) {
  auto operation = std::make_shared<Operation>();
  operation->queue = queue_;
  operation->seconds = seconds;
  operation->run = std::move(run);
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    const auto busy = find(lane);
    if (busy != busy_.end()) {
      busy->waiting.push_back(operation);
      return operation;
    }
    busy_.push_back({lane, {}});
    if (hand_over(lane, operation)) return operation;
  }
  finish(*operation, FL_FAILED, "no thread can be had for another message");
  leave(lane);
  return operation;
}

bool Lanes::enter(const Lane& lane) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  if (find(lane) != busy_.end()) return false;
  busy_.push_back({lane, {}});
  return true;
}

void Lanes::leave(const Lane& lane) noexcept {
  for (;;) {
    Pending operation;
    {
      const std::lock_guard<std::mutex> lock(queue_->mutex);
      operation = next(lane);
      if (operation == nullptr || hand_over(lane, operation)) return;
    }
    finish(*operation, FL_FAILED, "no thread can be had for another message");
  }
}

std::vector<Lanes::Busy>::iterator Lanes::find(const Lane& lane) {
  return std::find_if(busy_.begin(), busy_.end(),
                      [&](const Busy& busy) { return busy.lane == lane; });
}

// What comes next in a lane whose head has ended; null: the lane is idle now.
Lanes::Pending Lanes::next(const Lane& lane) {
  const auto busy = find(lane);
  if (busy->waiting.empty()) {
    busy_.erase(busy);
    if (closing_) queue_->work.notify_all();
    return nullptr;
  }
  Pending operation = std::move(busy->waiting.front());
  busy->waiting.pop_front();
  return operation;
}

// Give the head of a lane to a thread; false where none can be had.
bool Lanes::hand_over(const Lane& lane, Pending operation) {
  ready_.emplace_back(lane, std::move(operation));
  if (idle_ >= ready_.size()) {
    queue_->work.notify_one();
    return true;
  }
  try {
    threads_.emplace_back(&Lanes::work, this);
    return true;
  } catch (const std::system_error&) {
    ready_.pop_back();
    return false;
  }
}

void Lanes::work() {
  std::unique_lock<std::mutex> lock(queue_->mutex);
  for (;;) {
    ++idle_;
    queue_->work.wait(lock, [&] { return closing_ || !ready_.empty(); });
    --idle_;
    if (ready_.empty()) return;
    auto [lane, operation] = std::move(ready_.front());
    ready_.pop_front();
    while (operation != nullptr) {
      lock.unlock();
      execute(transport_, *operation);
      operation.reset();
      lock.lock();
      operation = next(lane);
    }
  }
}

}  // namespace fl
