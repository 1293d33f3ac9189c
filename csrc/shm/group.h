// The ranks of one host as a group: operations run on the caller's thread, or in turn on one of
// their own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "../common/worker.h"
#include "collectives.h"
#include "peers.h"
#include "segment.h"

namespace fl {

class ShmGroup {
 public:
  ShmGroup(Mapping mapping, int rank, int size);
  ~ShmGroup();

  // Null where all went well and there is nothing to fetch.
  std::shared_ptr<Operation> run(const fl_signature& signature, void* data, void* output, int peer,
                                 double seconds);
  std::shared_ptr<Operation> start(const fl_signature& signature, void* data, void* output,
                                   int peer, double seconds);

  // all_reduce on the caller's thread in two steps, so that a caller who holds a lock can let it
  // go when the others are late. begin() is false, and nothing has happened, where operations are
  // queued or the group is broken; else finish() must follow, on the same thread.
  bool begin(const fl_signature& signature, const void* data, double seconds);
  bool ready(int spins) const;
  std::shared_ptr<Operation> finish(const fl_signature& signature, void* data);

  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  void drop_region(const void* array);
  void on_interrupt(InterruptCheck check) { interrupt_ = check; }
  int size() const { return size_; }

 private:
  template <typename Body>
  std::shared_ptr<Operation> guarded(Body body);
  std::shared_ptr<Operation> broken_by(const Failure& failure);
  Bytes dispatch(const fl_signature& signature, void* data, void* output, int peer,
                 double seconds, InterruptCheck interrupt, Collectives::Seen& seen);
  std::shared_ptr<Operation> ended(fl_status status, const std::string& message,
                                    std::vector<int> missing, Collectives::Seen seen);

  const int rank_, size_;
  Segment segment_;
  Peers peers_;
  Collectives collectives_;
  InterruptCheck interrupt_ = nullptr;
  std::mutex running_;               // whoever runs an operation holds it
  std::atomic<int> queued_{0};       // operations that were started and have not ended
  std::string broken_;               // why the group cannot be used any more
  std::unique_ptr<Worker> worker_;   // made when first needed; last: it ends before the rest
};

}  // namespace fl
