#include "operation.h"

#include <algorithm>

namespace fl {

void Transport::fail(const Failure& failure) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_broken_.load(std::memory_order_relaxed)) return;
    try {
      // With FL_RAISED, the message comes from the failed rank and already names that rank.
      const bool names_itself = failure.status == FL_RAISED;
      why_ = Failure(FL_CLOSED, names_itself ? std::vector<int>{} : failure.missing, failure.what());
    } catch (const std::bad_alloc&) {  // `why_` keeps its initial text
    }
    is_broken_.store(true, std::memory_order_relaxed);
  }
  give_up(failure.peer_failure != nullptr ? *failure.peer_failure : failure);
}

Failure Transport::why_broken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

Bytes make_bytes(size_t size) { return {std::unique_ptr<char[]>(new char[size + 1]), size}; }

Clock::time_point deadline_after(double seconds) {
  constexpr double kLongest = 1e9;  // limit of the clock's range, in seconds
  const auto limit = std::chrono::duration<double>(std::min(seconds, kLongest));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
}

void execute(Transport& transport, Operation& operation) noexcept {
  if (transport.is_broken()) {
    const Failure why = transport.why_broken();
    return finish(operation, why.status, why.what(), why.missing);
  }
  operation.deadline = deadline_after(operation.seconds);
  Failure failure(FL_OK, {}, "");
  try {
    operation.run(operation);
    return finish(operation, FL_OK);
  } catch (const Mismatch& mismatch) {
    operation.report = mismatch.report;
    return finish(operation, FL_MISMATCH, mismatch.what());
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {
    failure = transport.explain(error.what());
  }
  operation.report = failure.report;
  transport.fail(failure);
  finish(operation, failure.status, failure.what(), failure.missing);
}

std::unique_ptr<Outcome> outcome_of(const Failure& failure) {
  return std::make_unique<Outcome>(Outcome{failure.what(), failure.missing, {}, {}});
}

std::shared_ptr<Operation> ended_with(fl_status status, Outcome outcome) {
  auto operation = std::make_shared<Operation>();
  static_cast<Outcome&>(*operation) = std::move(outcome);
  operation->shared = std::make_shared<Shared>();
  operation->status = status;
  return operation;
}

fl_status Started::wait(double seconds) {
  Operation& operation = *operation_;
  Shared& shared = *operation.shared;
  const auto ended = [&] { return operation.status != FL_PENDING; };
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (operation.help && !ended()) {
    lock.unlock();
    operation.help(operation, seconds > 0);
    lock.lock();
  }
  // Do not sleep if `seconds` is 0: a sleep takes 60 us, because the kernel wakes threads late.
  if (seconds > 0) shared.done.wait_for(lock, std::chrono::duration<double>(seconds), ended);
  return operation.status;
}

double Started::ended_at() const {
  const std::lock_guard<std::mutex> lock(operation_->shared->mutex);
  return std::chrono::duration<double>(operation_->ended.time_since_epoch()).count();
}

void Started::stamp(int64_t* ended, int64_t running) {
  const std::lock_guard<std::mutex> lock(operation_->shared->mutex);
  operation_->stamp = {ended, running};
  if (operation_->status != FL_PENDING) operation_->stamp.write();
}

void finish(Operation& operation, fl_status status, const std::string& message, std::vector<int> missing) {
  {
    const std::lock_guard<std::mutex> lock(operation.shared->mutex);
    operation.message = message;
    operation.missing = std::move(missing);
    operation.run = nullptr;
    operation.ended = Clock::now();
    operation.status = status;
    operation.stamp.write();
  }
  operation.shared->done.notify_all();
}

}  // namespace fl
