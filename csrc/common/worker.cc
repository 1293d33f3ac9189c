#include "worker.h"

#include <utility>

namespace fl {

Worker::Worker(Transport& transport) : transport_(transport) {
  queue_->transport = &transport;
  thread_ = std::thread(&Worker::work, this);
}

Worker::~Worker() {
  {
    std::lock_guard<std::mutex> lock(queue_->mutex);
    closing_ = true;
    queue_->transport = nullptr;
  }
  transport_.stop();
  queue_->work.notify_all();
  thread_.join();
}

std::shared_ptr<Operation> Worker::submit(double seconds, std::function<void(Operation&)> run) {
  auto operation = std::make_shared<Operation>();
  operation->queue = queue_;
  operation->seconds = seconds;
  operation->run = std::move(run);
  {
    std::lock_guard<std::mutex> lock(queue_->mutex);
    pending_.push_back(operation);
  }
  queue_->work.notify_one();
  return operation;
}

void Worker::work() {
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      std::unique_lock<std::mutex> lock(queue_->mutex);
      queue_->work.wait(lock, [&] { return closing_ || !pending_.empty(); });
      if (pending_.empty()) return;
      operation = std::move(pending_.front());
      pending_.pop_front();
    }
    execute(transport_, *operation);
  }
}

}  // namespace fl
