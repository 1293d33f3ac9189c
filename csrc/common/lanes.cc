#include "lanes.h"

#include <algorithm>

namespace fl {

Lanes::Lanes(Transport& transport) : transport_(transport) { queue_->transport = &transport; }

Lanes::~Lanes() { close(); }

void Lanes::close() {
  std::list<Pending> never_run;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    if (closing_) return;
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
  queue_->work.notify_all();
  for (std::thread& thread : threads_) thread.join();  // no more are made once closing
}

bool Lanes::is_idle() {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  return busy_.empty();
}

std::shared_ptr<Operation> Lanes::submit(const Lane& lane, double seconds,
                                         std::function<void(Operation&)> run) {
  auto operation = make(seconds, std::move(run));
  submit(lane, operation);
  return operation;
}

void Lanes::submit(const Lane& lane, std::shared_ptr<Operation> operation) {
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    const auto busy = find(lane);
    if (busy != busy_.end()) {
      busy->waiting.push_back(std::move(operation));
      return;
    }
    busy_.push_back({lane, {}});
  }
  begin(lane, std::move(operation));
}

bool Lanes::enter(const Lane& lane) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  if (find(lane) != busy_.end()) return false;
  busy_.push_back({lane, {}});
  return true;
}

void Lanes::leave(const Lane& lane) noexcept {
  Pending operation;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    operation = next(lane);
  }
  if (operation != nullptr) begin(lane, std::move(operation));
}

std::shared_ptr<Operation> Lanes::go_on(const Lane& lane, double seconds,
                                        std::function<void(Operation&)> run) {
  auto operation = make(seconds, std::move(run));
  begin(lane, operation);
  return operation;
}

Lanes::Pending Lanes::make(double seconds, std::function<void(Operation&)> run) const {
  auto operation = std::make_shared<Operation>();
  operation->queue = queue_;
  operation->seconds = seconds;
  operation->run = std::move(run);
  return operation;
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
    return nullptr;
  }
  Pending operation = std::move(busy->waiting.front());
  busy->waiting.pop_front();
  return operation;
}

// Let a thread run the head of a lane. Where none can be had this fails, as if it had run: the others
// wait for it, and what comes next would be out of turn.
void Lanes::begin(const Lane& lane, Pending operation) noexcept {
  while (operation != nullptr) {
    bool closing;
    {
      const std::lock_guard<std::mutex> lock(queue_->mutex);
      closing = closing_;
      if (!closing && hand_over(lane, operation)) return;
    }
    operation->run = [closing](Operation&) {
      if (closing) throw Failure(FL_CLOSED, {}, "the group was closed");
      throw Failure(FL_FAILED, {}, "no thread can be had for another operation");
    };
    execute(transport_, *operation);
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    operation = next(lane);
  }
}

bool Lanes::hand_over(const Lane& lane, const Pending& operation) noexcept {
  try {
    if (idle_ <= ready_.size()) threads_.emplace_back(&Lanes::work, this);
    ready_.emplace_back(lane, operation);
  } catch (const std::exception&) {
    return false;
  }
  queue_->work.notify_one();
  return true;
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
