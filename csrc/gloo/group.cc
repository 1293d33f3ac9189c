#include "group.h"

#include <utility>

namespace fl {

Group::Group(int rank, int size, const std::string& host, const std::string& interface,
             double connect_seconds)
    : mesh_(std::make_unique<Mesh>(rank, size, host, interface, connect_seconds)),
      collectives_(*mesh_) {
  queue_->mesh = mesh_.get();
  worker_ = std::thread(&Group::work, this);
}

Group::~Group() {
  {
    std::lock_guard<std::mutex> lock(queue_->mutex);
    closing_ = true;
    queue_->mesh = nullptr;
  }
  mesh_->stop();
  queue_->work.notify_all();
  worker_.join();
}

std::shared_ptr<Operation> Group::submit(double seconds, std::function<void(Operation&)> run) {
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

std::shared_ptr<Operation> Group::connect(std::vector<char> addresses, size_t bytes,
                                          double seconds) {
  return submit(seconds, [this, addresses = std::move(addresses), bytes](Operation&) {
    mesh_->connect(addresses.data(), bytes);
    collectives_.open();
  });
}

std::shared_ptr<Operation> Group::start(const fl_signature& signature, void* data, void* output,
                                        int peer, double seconds) {
  return submit(seconds, [=](Operation& operation) {
    dispatch(operation, signature, data, output, peer);
  });
}

void Group::dispatch(Operation& operation, const fl_signature& signature, void* data,
                     void* output, int peer) {
  fl_signature mine = signature;
  mine.sequence = ++sequence_;
  auto& seen = operation.signatures;
  seen.assign(mesh_->size, fl_signature{});
  switch (mine.verb) {
    case FL_BARRIER: return collectives_.barrier(mine, seen);
    case FL_ALL_REDUCE: return collectives_.all_reduce(mine, data, seen);
    case FL_REDUCE_SCATTER: return collectives_.reduce_scatter(mine, data, output, seen);
    case FL_BROADCAST: return collectives_.broadcast(mine, data, seen);
    case FL_SEND: return collectives_.send(mine, data, peer, seen);
    case FL_RECV: return collectives_.recv(mine, data, peer, seen);
    case FL_ALL_GATHER:
      operation.output = collectives_.all_gather(mine, data, seen);
      return;
    default: throw std::invalid_argument("unknown verb");
  }
}

void Group::work() {
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

void Group::execute(Operation& operation) {
  if (!broken_.empty()) return finish(operation, FL_CLOSED, broken_);
  const auto limit = std::chrono::duration<double>(operation.seconds);
  mesh_->begin(Clock::now() + std::chrono::duration_cast<Clock::duration>(limit));
  Failure failure(FL_OK, {}, "");
  try {
    operation.run(operation);
    return finish(operation, FL_OK);
  } catch (const Mismatch& mismatch) {
    return finish(operation, FL_MISMATCH, mismatch.what());
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& error) {
    failure = mesh_->explain(-1, error.what());
  }
  broken_ = failure.what();
  mesh_->give_up(failure);
  finish(operation, failure.status, failure.what(), failure.missing);
}

void Group::finish(Operation& operation, fl_status status, std::string message,
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
