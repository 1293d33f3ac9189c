#include "peers.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fl {
namespace {

// How long a sleep lasts before a rank looks around: for farewells, deaths, signals, the deadline.
constexpr long kSliceMilliseconds = 20;

// In place of a file descriptor: this process had ended before one could be had.
constexpr int kGone = -2;

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// With a core for each rank, what is waited for is some hundred nanoseconds away, and sleeping
// and waking cost more than burning. With fewer cores the peer needs this one to get on.
Patience patience_for(int ranks) {
  return ranks <= processors() ? Patience{4000, 200} : Patience{0, 200};
}

uint64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

Peers::Peers(const Segment& segment, int rank, int size)
    : segment_(segment), rank_(rank), size_(size), patience_(patience_for(size)) {
  RankBlock& mine = segment_.block(rank);
  mine.pid_namespace = pid_namespace();
  mine.pid = getpid();
}

Peers::~Peers() {
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void Peers::begin(double seconds, uint32_t call, int only, InterruptCheck interrupt) {
  seconds_ = seconds;
  call_ = call;
  only_ = only;
  interrupt_ = interrupt;
}

void Peers::wait_long(Counter& counter, uint32_t target, int peer) {
  if (counter.wait(target, patience_, kSliceMilliseconds)) return;
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
  for (;;) {
    check_farewells(counter, target);
    check_deaths(counter, target);
    if (stopped_) throw Failure(FL_CLOSED, {}, "the group was closed");
    if (interrupt_ != nullptr && interrupt_() != 0) {
      throw Failure(FL_CLOSED, {}, "a signal handler interrupted the operation");
    }
    if (counter.wait(target, Patience{0, 0}, kSliceMilliseconds)) return;
    if (Clock::now() >= deadline) {
      auto missing = not_called();
      if (missing.empty()) missing.push_back(peer);
      throw Failure(FL_TIMEOUT, missing, "timed out");
    }
  }
}

// A rank that has gone may have raised the counter just before: then all is well here.
void Peers::check_farewells(const Counter& counter, uint32_t target) {
  for (int r = 0; r < size_; ++r) {
    const Farewell& farewell = segment_.block(r).farewell;
    if (!matters(r) || farewell.given.value() == 0 || has_done_its_part(r)) continue;
    if (counter.reached(target)) return;
    const auto status = static_cast<fl_status>(farewell.status);
    const std::vector<int> missing(farewell.missing, farewell.missing + farewell.missing_count);
    if (status == FL_OK) throw Failure(FL_PEER_LOST, {r}, "it has left the group");
    if (std::find(missing.begin(), missing.end(), rank_) != missing.end()) {
      throw Failure(FL_PEER_LOST, {r}, "it gave up waiting for this rank");
    }
    const std::string message = "rank " + std::to_string(r) + " gave up: " + farewell.message;
    if (status == FL_PEER_LOST || status == FL_TIMEOUT) throw Failure(status, missing, message);
    throw Failure(FL_PEER_LOST, {r}, message);
  }
}

void Peers::check_deaths(const Counter& counter, uint32_t target) {
  if (pidfds_.empty()) open_pidfds();
  std::vector<int> dead;
  for (int r = 0; r < size_; ++r) {
    pollfd end{pidfds_[r], POLLIN, 0};
    const bool ended = end.fd == kGone || (end.fd >= 0 && poll(&end, 1, 0) == 1);
    if (ended && matters(r) && !has_done_its_part(r)) dead.push_back(r);
  }
  if (dead.empty() || counter.reached(target)) return;
  check_farewells(counter, target);  // who could say why it ended said so before
  throw Failure(FL_PEER_LOST, dead, "its process has ended");
}

// Opened when first needed; a rank may be gone by then.
void Peers::open_pidfds() {
  pidfds_.assign(size_, -1);
  for (int r = 0; r < size_; ++r) {
    const RankBlock& block = segment_.block(r);
    const int32_t pid = block.pid;
    if (r == rank_ || pid == 0 || block.pid_namespace != pid_namespace()) continue;
    pidfds_[r] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (pidfds_[r] < 0) pidfds_[r] = errno == ESRCH ? kGone : -1;
  }
}

// A rank may be done with a call before others, as one that has little to give to a gather. If it
// then left in order, nobody waits for it in vain.
bool Peers::has_done_its_part(int r) const {
  const RankBlock& block = segment_.block(r);
  return only_ < 0 && block.farewell.given.value() != 0 && block.farewell.status == FL_OK &&
         block.calls[call_ % 2].number.reached(call_);
}

std::vector<int> Peers::not_called() const {
  std::vector<int> missing;
  if (only_ >= 0) return missing;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !segment_.block(r).calls[call_ % 2].number.reached(call_)) missing.push_back(r);
  }
  return missing;
}

void Peers::give_up(const Failure& failure) noexcept {
  Farewell& farewell = segment_.block(rank_).farewell;
  if (farewell.given.value() != 0) return;
  farewell.status = failure.status;
  farewell.missing_count = 0;
  for (int r : failure.missing) {
    if (farewell.missing_count < Farewell::kMaxMissing) {
      farewell.missing[farewell.missing_count++] = r;
    }
  }
  std::strncpy(farewell.message, failure.what(), sizeof farewell.message - 1);
  farewell.given.raise(1);
}

}  // namespace fl
