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
    execute(*operation);
  }
}

void Worker::execute(Operation& operation) {
  if (!broken_.empty()) return finish(operation, FL_CLOSED, broken_);
  const auto limit = std::chrono::duration<double>(operation.seconds);
  transport_.begin(Clock::now() + std::chrono::duration_cast<Clock::duration>(limit));
  Failure failure(FL_OK, {}, "");
  try {
    operation.run(operation);
    return finish(operation, FL_OK);
  } catch (const Mismatch& mismatch) {
    return finish(operation, FL_MISMATCH, mismatch.what());
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {
    failure = transport_.explain(error.what());
  }
  broken_ = failure.what();
  transport_.give_up(failure);
  finish(operation, failure.status, failure.what(), failure.missing);
}

void Worker::finish(Operation& operation, fl_status status, std::string message,
                   std::vector<int> missing) {
  {
    std::lock_guard<std::mutex> lock(operation.queue->mutex);
    operation.message = std::move(message);
    operation.missing = std::move(missing);
    operation.run = nullptr;
    operation.status = status;
  }
  operation.queue->done.notify_all();
}

}  // namespace fl
