// The other ranks of the host: waiting for them, and noticing when there is no point.
#pragma once

#include <atomic>
#include <vector>

#include "../common/failure.h"
#include "../common/worker.h"
#include "segment.h"

namespace fl {

// Called now and then while a caller's own thread waits; not 0: give up (a signal handler said so).
using InterruptCheck = int (*)();

class Peers : public Transport {
 public:
  Peers(const Segment& segment, int rank, int size);
  ~Peers() override;
  Peers(const Peers&) = delete;

  // Wait until a counter of rank `peer` has reached `target`; throws Failure.
  void wait(Counter& counter, uint32_t target, int peer) {
    if (!counter.reached(target)) wait_long(counter, target, peer);
  }

  // Begin an operation that may take `seconds`: the collective number `call`, or one with `only`
  // that rank (else -1), whatever becomes of the others. On the caller's own thread it can be
  // interrupted.
  void begin(double seconds, uint32_t call, int only, InterruptCheck interrupt);

  // Whether every rank has a processor of its own to wait on.
  bool may_spin() const { return patience_.spins > 0; }

  void begin(Clock::time_point) override {}
  void enforce_deadline() override {}
  void stop() override { stopped_ = true; }
  Failure explain(const std::string& what) override { return {FL_FAILED, {}, what}; }
  void give_up(const Failure& failure) noexcept override;

 private:
  void wait_long(Counter& counter, uint32_t target, int peer);
  void check_farewells(const Counter& counter, uint32_t target);
  void check_deaths(const Counter& counter, uint32_t target);
  bool has_done_its_part(int r) const;
  std::vector<int> not_called() const;
  bool matters(int r) const { return r != rank_ && (only_ < 0 || only_ == r); }
  void open_pidfds();

  const Segment& segment_;
  const int rank_, size_;
  const Patience patience_;
  double seconds_ = 0;
  uint32_t call_ = 0;
  int only_ = -1;
  InterruptCheck interrupt_ = nullptr;
  std::atomic<bool> stopped_{false};
  std::vector<int> pidfds_;  // by rank; empty until first needed; -1 where there is none
};

}  // namespace fl
