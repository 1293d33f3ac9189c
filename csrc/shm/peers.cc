#include "peers.h"

#include <sys/stat.h>

namespace fl {
namespace {

struct ProcessCache {
  std::mutex mutex;
  std::unordered_map<int32_t, std::weak_ptr<Process>> processes;
};

// If each rank has a core, waits usually end after some hundred nanoseconds, and polling costs less than
// sleep and wake-up. Otherwise the awaited rank may need this core.
Patience patience_for(int ranks) {
  constexpr int kSpins = sized(16000, 1), kYields = sized(200, 1), kYieldsOfMany = sized(1000, 1);
  return ranks <= processors() ? Patience{kSpins, kYields} : Patience{0, kYieldsOfMany};
}

uint64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

// Processes -----------------------------------------------------------------------------------

std::shared_ptr<Process> Process::find(int32_t pid) {
  ProcessCache& cache = process_singleton<ProcessCache>();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  auto& slot = cache.processes[pid];
  auto process = slot.lock();
  if (process != nullptr && !process->has_ended()) return process;  // else another process may have the PID
  process = std::make_shared<Process>(open_process(pid));
  slot = process;
  return process;
}

// Peers ---------------------------------------------------------------------------------------

Peers::Peers(const Segment& segment, int rank, int size)
    : segment_(segment), rank_(rank), size_(size), patience_(patience_for(size)), space_(pid_namespace()),
      processes_(size) {
  RankBlock& own_block = segment_.block(rank);
  own_block.holds_lock.store(segment_.mapping().lock(rank) ? 1 : 0, std::memory_order_relaxed);
  own_block.pid_namespace.store(space_, std::memory_order_relaxed);
  own_block.pid.store(process_id(), std::memory_order_release);  // publishes the fields above: see Remote
}

Peers::~Peers() { close_files(); }

void Peers::close_files() noexcept { processes_.clear(); }

std::optional<Failure> Peers::loss(const Concern& concern) {
  if (stopped_.load(std::memory_order_relaxed)) return why_ended();  // own close() has precedence
  if (auto failure = farewell(concern)) return failure;
  const std::vector<int> dead_ranks = dead(concern);
  if (!dead_ranks.empty()) {
    if (auto failure = farewell(concern)) return failure;  // a dead rank may have sent a reason before
    return Failure(FL_PEER_LOST, dead_ranks, "its process has ended");
  }
  if (has_ended()) return why_ended();
  return std::nullopt;
}

std::optional<Failure> Peers::lost() {
  if (has_ended()) return why_ended();
  for (int r = 0; r < size_; ++r) {
    const Concern concern{r};
    if (r == rank_ || (left_in_order(r) && dead(concern).empty())) continue;
    if (auto failure = loss(concern)) return failure;
  }
  return std::nullopt;
}

std::optional<Failure> Peers::farewell(const Concern& concern) const {
  for (int r = 0; r < size_; ++r) {
    const Farewell& farewell = segment_.block(r).farewell;
    if (farewell.is_set.value() == 0 || !matters(r, concern)) continue;
    const auto status = static_cast<fl_status>(farewell.status);
    const std::vector<int> missing(farewell.missing, farewell.missing + farewell.missing_count);
    if (status == FL_OK) return Failure(FL_PEER_LOST, {r}, kHasLeft);
    const bool is_own = std::find(missing.begin(), missing.end(), rank_) != missing.end();
    if (is_own && status == FL_RAISED) return Failure(FL_CLOSED, {}, "this rank reported an exception");
    return given_up_by(r, name(r), rank_, {status, missing, farewell.message});
  }
  return std::nullopt;
}

std::vector<int> Peers::dead(const Concern& concern) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> dead;
  for (int r = 0; r < size_; ++r) {
    if (matters(r, concern) && is_dead(r)) dead.push_back(r);
  }
  return dead;
}

// A rank without a PID has not started yet and counts as alive. If PIDs are not comparable (another
// container, or no /proc), the rank is dead if it no longer holds its lock.
bool Peers::is_dead(int r) {
  const RankBlock& block = segment_.block(r);
  const int32_t pid = block.pid.load(std::memory_order_relaxed);
  if (pid == 0) return false;
  if (space_ == 0 || block.pid_namespace.load(std::memory_order_relaxed) != space_) {
    return block.holds_lock.load(std::memory_order_relaxed) != 0 && !segment_.mapping().is_locked(r);
  }
  if (processes_[r] == nullptr) processes_[r] = Process::find(pid);
  return processes_[r]->has_ended();
}

// True if an operation fails when rank r ends. A rank that has left in order and has made the call is not
// needed: for example, it had little data for a gather.
bool Peers::matters(int r, const Concern& concern) const {
  if (r == rank_) return false;
  if (concern.only >= 0) return r == concern.only;
  const RankBlock& block = segment_.block(r);
  return !(left_in_order(r) && block.calls[concern.call % kCalls].number.reached(concern.call));
}

bool Peers::left_in_order(int r) const {
  const Farewell& farewell = segment_.block(r).farewell;
  return farewell.is_set.value() != 0 && farewell.status == FL_OK;
}

std::vector<int> Peers::not_called(const Concern& concern) const {
  std::vector<int> missing;
  if (concern.only >= 0) return missing;
  for (int r = 0; r < size_; ++r) {
    const Counter& number = segment_.block(r).calls[concern.call % kCalls].number;
    if (r != rank_ && !number.reached(concern.call)) missing.push_back(r);
  }
  return missing;
}

void Peers::give_up(const Failure& failure) noexcept {
  // Keep the first reason: two threads may call this function at the same time.
  if (has_farewell_.exchange(true, std::memory_order_relaxed)) return;
  Farewell& farewell = segment_.block(rank_).farewell;
  farewell.status = failure.status;
  farewell.missing_count = 0;
  for (int r : failure.missing) {
    if (farewell.missing_count < Farewell::kMaxMissing) {
      farewell.missing[farewell.missing_count++] = r;
    }
  }
  std::strncpy(farewell.message, failure.what(), sizeof farewell.message - 1);
  farewell.is_set.set(1);
  full_fence();  // peers see the farewell before this rank frees memory that they read
}

// Watch ---------------------------------------------------------------------------------------

void Watch::wait_long(Counter& counter, uint32_t target, int peer) {
  const bool soon = counter.poll(target, peers_->patience());
  peers_->waited(!soon);
  if (soon || counter.sleep(target, kSliceMilliseconds)) return;
  const Clock::time_point since = Clock::now();
  do {
    check_loss(counter, target, since, peer);
  } while (!counter.wait(target, Patience{0, 0}, kSliceMilliseconds));
}

// Throw if the wait must end, unless a lost rank has raised the counter to `target` before its end.
void Watch::check_loss(const Counter& counter, uint32_t target, Clock::time_point since, int peer) {
  if (const auto lost = loss()) {
    if (counter.reached(target)) return;
    throw *lost;
  }
  check(since, peer);
}

void Watch::check(Clock::time_point since, int peer) {
  if (interrupt_ != nullptr && interrupt_() != 0) throw interrupted();
  if (std::chrono::duration<double>(Clock::now() - since).count() < seconds_) return;
  auto missing = peers_->not_called(concern_);
  if (missing.empty()) missing.push_back(peer);
  throw Failure(FL_TIMEOUT, missing, "timed out");
}

}  // namespace fl
