// Fibers replace threads and processes; this file schedules them and implements sleeping and ending.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sys/single_threaded.h>

#include "runtime.h"

extern "C" {
void* __cxa_get_globals();
// Save the registers that a function must preserve, and continue in another fiber.
void model_switch(void** from, void* to);
}
asm(R"(
.text
.globl model_switch
.type model_switch, @function
model_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size model_switch, .-model_switch
)");

namespace model {

Fiber fibers[kMostFibers];
int fiber_count = 0;
Fiber* here = nullptr;
Fiber* watched = nullptr;
bool is_quiet = true;

const Case* current = nullptr;
int64_t now = 0;
int gone = -1;
bool in_prepare = false;

namespace {

constexpr long kMostSteps = 20000;   // steps without an end: a livelock
constexpr int64_t kTicks = 8000000;  // nanoseconds: the longest period of a Ticker; shorter waits only let time pass

Bounds left;
int waiting_to_begin = 0;
long steps = 0, accesses[kMostRanks];

// History of a location in an execution: its last change, and the sum over later accesses that saw it.
struct Object {
  uintptr_t place;
  uint64_t execution, changed, seen;
};
constexpr size_t kMostObjects = 1 << 14;
Object objects[kMostObjects];
size_t object_count = 0;
uint64_t executions = 0, happened = 0;  // sum over all locations

uint64_t sleeps = 0;
bool have_given_up[kMostRanks];
void* host_stack;
std::string* text_of_failure;
bool has_failed = false, is_traced = false;

void resume(Fiber* fiber) {
  auto* globals = static_cast<uintptr_t*>(__cxa_get_globals());
  std::memcpy(globals, fiber->exceptions, sizeof fiber->exceptions);
  here = watched = fiber;
}

Fiber* arriving;  // the fiber whose stack begins

void switch_to(Fiber* next) {
  Fiber* const self = here;
  if (next == self) return;
  arriving = next;
  std::memcpy(self->exceptions, __cxa_get_globals(), sizeof self->exceptions);
  here = watched = nullptr;
  model_switch(&self->stack, next->stack);
  resume(self);
}

[[noreturn]] void to_host() {
  void* unused;
  here = watched = nullptr;
  std::memset(__cxa_get_globals(), 0, sizeof fibers->exceptions);
  model_switch(&unused, host_stack);
  std::abort();
}

constexpr int8_t kSleeps = 0x40;  // flag of a choice: its time is over

int fibers_of(int rank) {
  int count = 0;
  for (int i = 0; i < fiber_count; ++i) {
    const Fiber& one = fibers[i];
    count += one.rank == rank && (one.state == Fiber::kReady || one.state == Fiber::kBlocked) ? 1 : 0;
  }
  return count;
}

void wake(Fiber& fiber, bool by_time) {
  fiber.state = Fiber::kReady;
  fiber.on = nullptr;
  fiber.has_timed_out = by_time;
  fiber.has_yielded = false;
  if (by_time) happens(fiber, kClock, true);
  else fiber.past += 3 * here->past;
  if (by_time && fiber.until > now) now = fiber.until;
}

bool all_have_ended() {
  for (int i = 0; i < fiber_count; ++i) {
    const Fiber& one = fibers[i];
    if (one.is_main && one.state != Fiber::kEnded && one.state != Fiber::kGone) return false;
  }
  return true;
}

[[noreturn]] void deadlock() {
  char text[512];
  int used = 0;
  for (int i = 0; i < fiber_count && used < 400; ++i) {
    if (fibers[i].state != Fiber::kBlocked) continue;
    used += std::snprintf(text + used, sizeof text - used, "%s rank %d (fiber %d) waits at <%lx>",
                          used > 0 ? "," : "",
                          fibers[i].rank, i, fibers[i].depth > 0 ? fibers[i].calls[fibers[i].depth - 1] : 0);
  }
  stop("nobody can go on:%s", text);
}

// A fiber sleeps, and no other fiber can run: time passes.
int earliest() {
  int found = -1;
  for (int i = 0; i < fiber_count; ++i) {
    const Fiber& one = fibers[i];
    if (one.state != Fiber::kBlocked || one.until < 0) continue;
    // At equal times a tick comes first, because it may wake other fibers.
    const bool is_first = found < 0 || one.until < fibers[found].until ||
                          (one.until == fibers[found].until && one.slept <= kTicks);
    if (is_first) found = i;
  }
  if (found < 0) deadlock();
  const Fiber& one = fibers[found];
  if (!current->late && gone < 0 && one.slept > kTicks) {
    stop("rank %d (fiber %d) sleeps until its time is over, and nobody else can go on: a wake is missing, at <%lx>",
         one.rank, found, one.depth > 0 ? one.calls[one.depth - 1] : 0);
  }
  return found;
}

}  // namespace

void happens(Fiber& fiber, uintptr_t place, bool changes) {
  if (is_quiet) return;
  size_t at = (place * 0x9e3779b97f4a7c15u >> 40) % kMostObjects;
  while (objects[at].execution == executions && objects[at].place != place) at = (at + 1) % kMostObjects;
  Object& object = objects[at];
  if (object.execution != executions) {
    if (++object_count > kMostObjects / 2) stop("too many places");
    object = {place, executions, 0, 0};
  }
  fiber.past = mixed(fiber.past + 3 * place + 5 * object.changed + (changes ? 7 * object.seen + 1 : 0));
  happened += fiber.past;
  object.seen = changes ? 0 : object.seen + fiber.past;
  if (changes) object.changed = fiber.past;
}

void decide(Why why) {
  int8_t options[2 * kMostFibers];
  int count = 0;
  const int self = here->number;
  if (++steps > kMostSteps) stop("%ld accesses, and no end", steps);
  if (why == kAccess) options[count++] = static_cast<int8_t>(self);
  if (why != kAccess || left.preemptions > 0) {
    for (int pass = 0; pass < 2 && count == (why == kAccess ? 1 : 0); ++pass) {
      for (int i = 1; i <= fiber_count; ++i) {
        const int other = (self + i) % fiber_count;
        const Fiber& one = fibers[other];
        if (one.state != Fiber::kReady || (other == self && (why == kAccess || pass == 0))) continue;
        if (why != kAccess && pass == 0 && one.has_yielded) continue;
        options[count++] = static_cast<int8_t>(other);
      }
    }
  }
  if (why != kAccess && count > 0 && fibers[options[0]].has_yielded) {
    for (int i = 0; i < fiber_count; ++i) fibers[i].has_yielded = false;
  }
  if (count > 0 && left.timers > 0) {
    for (int i = 0; i < fiber_count; ++i) {
      const Fiber& one = fibers[i];
      if (one.state == Fiber::kBlocked && one.until >= 0) options[count++] = static_cast<int8_t>(i | kSleeps);
    }
  }
  int next;
  if (count == 0) {
    next = earliest();
    wake(fibers[next], true);
  } else {
    if (count > 1) {
      uint64_t state = happened + static_cast<uint64_t>(steps) * 64 + static_cast<uint64_t>(self) * 4 + why;
      for (int i = 0; i < fiber_count; ++i) state = mixed(state) + fibers[i].state * 2u + fibers[i].has_yielded;
      if (was_there(state, left)) to_host();
    }
    const int taken = count == 1 ? 0 : choose(Kind::kSchedule, count, options);
    next = options[taken] & ~kSleeps;
    if ((options[taken] & kSleeps) != 0) {
      --left.timers;
      // Its time is over early, while other sleepers continue.
      const int64_t early = fibers[next].until - now;
      for (int i = 0; i < fiber_count; ++i) fibers[i].until += i != next && fibers[i].until >= 0 ? early : 0;
      wake(fibers[next], true);
    } else if (why == kAccess && next != self) {
      --left.preemptions;
    }
  }
  switch_to(&fibers[next]);
}

void block(const void* on, int64_t until, uint32_t bits) {
  if (is_quiet) stop("rank %d waits before it begins", here->rank);
  Fiber& self = *here;
  if (until >= 0) happens(self, kClock, false);
  self.state = Fiber::kBlocked;
  self.on = on;
  self.until = until;
  self.slept = until < 0 ? 0 : until - clock_of(self);
  self.bits = bits;
  self.since = ++sleeps;
  decide(kBlocks);
}

// Fibers that wait at an address, in order of arrival.
int wake_all(const void* on, int most, uint32_t bits) {
  int woken = 0;
  while (woken < most) {
    Fiber* first = nullptr;
    for (int i = 0; i < fiber_count; ++i) {
      Fiber& one = fibers[i];
      if (one.state != Fiber::kBlocked || one.on != on || (bits != 0 && (one.bits & bits) == 0)) continue;
      if (first == nullptr || one.since < first->since) first = &one;
    }
    if (first == nullptr) break;
    wake(*first, false);
    ++woken;
  }
  return woken;
}

namespace {

[[noreturn]] void vanish() {
  record("VANISHES", 0, 0, 0);
  gone = here->rank;
  for (int i = 0; i < fiber_count; ++i) {
    if (fibers[i].rank == gone && fibers[i].state != Fiber::kEnded) fibers[i].state = Fiber::kGone;
  }
  steps = 0;
  if (all_have_ended()) to_host();
  decide(kBlocks);
  std::abort();
}

// The first function on a stack.
void run_fiber() {
  resume(arriving);
  here->entry(here->argument);
  if (is_quiet) stop("a case that does not begin()");
  Fiber& self = *here;
  self.state = Fiber::kEnded;
  tick(*here);
  if (all_have_ended()) to_host();
  happens(self, reinterpret_cast<uintptr_t>(&self), true);
  wake_all(&self, kMostFibers);
  decide(kBlocks);
  std::abort();
}

}  // namespace

Fiber& spawn(int rank, void* (*entry)(void*), void* argument) {
  if (fiber_count == kMostFibers) stop("too many threads");
  Fiber& fiber = fibers[fiber_count];
  std::memset(&fiber, 0, offsetof(Fiber, calls));
  fiber.number = static_cast<int8_t>(fiber_count++);
  fiber.rank = static_cast<int8_t>(rank);
  fiber.state = Fiber::kReady;
  fiber.now.at[fiber.number] = 1;
  fiber.past = (here == nullptr ? 0 : here->past) + fiber.number + 1;
  fiber.entry = entry;
  fiber.argument = argument;
  const uintptr_t top = kBase + (rank + 2) * kArea - fiber.number * kStack;
  auto* stack = reinterpret_cast<uintptr_t*>(top - 72);
  stack[0] = 0;  // no caller
  *--stack = reinterpret_cast<uintptr_t>(&run_fiber);
  for (int i = 0; i < 6; ++i) *--stack = 0;
  fiber.stack = stack;
  return fiber;
}

namespace {

void* run_main(void* rank) {
  current->run(static_cast<int>(reinterpret_cast<intptr_t>(rank)));
  return nullptr;
}

struct Event {
  const char* what;
  int8_t rank, fiber;
  uintptr_t at[4], place;
  uint64_t value;
};
constexpr size_t kMostEvents = 1 << 15;
Event* events;
size_t event_count = 0;

}  // namespace

void record(const char* what, uintptr_t at, uint64_t value, uintptr_t pc) {
  if (!is_traced || event_count == kMostEvents || is_quiet) return;
  Event& event = events[event_count++];
  event = {what, here->rank, here->number, {pc, 0, 0, 0}, at, value};
  for (int i = 0; i < 3 && i < here->depth; ++i) event.at[i + 1] = here->calls[here->depth - 1 - i];
}

std::string trace(size_t last) {
  std::string text;
  auto* const addresses = new uintptr_t[4 * event_count];
  for (size_t i = 0; i < 4 * event_count; ++i) addresses[i] = events[i / 4].at[i % 4];
  resolve_places(addresses, 4 * event_count);
  delete[] addresses;
  for (size_t i = event_count > last ? event_count - last : 0; i < event_count; ++i) {
    const Event& event = events[i];
    char line[256];
    std::snprintf(line, sizeof line, "%5zu  rank %d fiber %d  %-28s %-22s %#lx = %#lx\n", i, event.rank, event.fiber,
                  place_of(event.at).c_str(), event.what, event.place, event.value);
    text += line;
  }
  return text;
}

void stop(const char* format, ...) {
  is_quiet = true;
  Fiber* const self = here;
  here = watched = nullptr;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  text_of_failure->assign(text);
  has_failed = true;
  if (self == nullptr) {
    std::fprintf(stderr, "model: %s\n", text);
    std::exit(2);
  }
  to_host();
}

const std::string& failure() { return *text_of_failure; }
bool has_given_up(int rank) { return have_given_up[rank]; }
long steps_of(int rank) { return accesses[rank]; }

int stores_back(int count) {
  const int back = left.stale > 0 ? choose(Kind::kStale, count) : 0;
  if (back > 0) --left.stale;
  here->past = here->past * 31 + back;
  return back;
}

bool is_common(uintptr_t at) { return area_of(at) == 0 || fibers_of(here->rank) > 1; }

void point(uintptr_t at) {
  if (watched == nullptr || is_quiet || !is_common(at)) return;
  ++accesses[here->rank];
  if (here->rank == left.victim && accesses[here->rank] == left.kill) vanish();
  decide(kAccess);
}

// Initial state of each execution, in which all ranks have called begin(). Created once per case.
struct Beginning {
  const Case* of = nullptr;
  Fiber fibers[kMostRanks];
  size_t used[kMostRanks + 1];
  char* heaps[kMostRanks + 1];
  char stacks[kMostRanks][8192];
};
Beginning beginning;

char* heap_of(int area) { return reinterpret_cast<char*>(kBase + area * kArea); }
size_t stack_bytes(const Fiber& fiber) {
  return kBase + (fiber.rank + 2) * kArea - fiber.number * kStack - reinterpret_cast<uintptr_t>(fiber.stack);
}

void keep(const Case& one) {
  beginning.of = &one;
  for (int area = 0; area <= one.ranks; ++area) {
    const size_t used = beginning.used[area] = used_of(area);
    std::free(beginning.heaps[area]);
    beginning.heaps[area] = static_cast<char*>(std::malloc(used + 1));
    std::memcpy(beginning.heaps[area], heap_of(area), used);
  }
  for (int i = 0; i < one.ranks; ++i) {
    beginning.fibers[i] = fibers[i];
    if (stack_bytes(fibers[i]) > sizeof beginning.stacks[i]) stop("too much is on the stack at begin()");
    std::memcpy(beginning.stacks[i], fibers[i].stack, stack_bytes(fibers[i]));
  }
}

void restore_beginning(const Case& one) {
  for (int area = 0; area <= one.ranks; ++area) {
    used_of(area) = beginning.used[area];
    std::memcpy(heap_of(area), beginning.heaps[area], beginning.used[area]);
  }
  for (int i = 0; i < one.ranks; ++i) {
    std::memcpy(&fibers[i], &beginning.fibers[i],
                offsetof(Fiber, calls) + beginning.fibers[i].depth * sizeof(uintptr_t));
    std::memcpy(fibers[i].stack, beginning.stacks[i], stack_bytes(fibers[i]));
  }
}

void run_beginning(const Case& one) {
  reset_memory();
  fiber_count = 0;
  waiting_to_begin = one.ranks;
  is_quiet = true;
  reset_system();
  if (one.prepare != nullptr) {
    in_prepare = true;
    one.prepare();
    in_prepare = false;
  }
  for (int rank = 0; rank < one.ranks; ++rank) {
    spawn(rank, run_main, reinterpret_cast<void*>(static_cast<intptr_t>(rank))).is_main = true;
  }
  arriving = &fibers[0];
  model_switch(&host_stack, fibers[0].stack);
  if (has_failed) {
    std::fprintf(stderr, "model: %s: %s\n", one.name, text_of_failure->c_str());
    std::exit(2);
  }
  if (fiber_count != one.ranks) stop("a thread is begun before begin()");
  Times all{};
  for (int i = 0; i < fiber_count; ++i) all.join(fibers[i].now);
  for (int i = 0; i < fiber_count; ++i) {
    fibers[i].now = all;
    ++fibers[i].now.at[i];
  }
  keep(one);
  save_system();
}

bool execute(const Case& one, const Bounds& bounds, bool traced) {
  if (text_of_failure == nullptr) {
    text_of_failure = new std::string;
    events = static_cast<Event*>(std::calloc(kMostEvents, sizeof(Event)));
    __libc_single_threaded = 0;  // else shared pointers count without atomics
    std::set_terminate([] { stop("std::terminate() was called"); });
  }
  has_failed = false;
  current = &one;
  now = 1000000000;
  if (beginning.of != &one) run_beginning(one);
  restore_beginning(one);
  restore_system();
  forget_order();
  left = bounds;
  fiber_count = one.ranks;
  steps = 0;
  sleeps = 0;
  now = 2000000000;
  gone = -1;
  is_traced = traced;
  event_count = 0;
  ++executions;
  object_count = happened = 0;
  is_quiet = false;
  std::memset(accesses, 0, sizeof accesses);
  std::memset(have_given_up, 0, sizeof have_given_up);
  Fiber* const last = &fibers[one.ranks - 1];
  model_switch(&host_stack, last->stack);
  return !has_failed;
}

void begin() {
  Fiber& self = *here;
  if (--waiting_to_begin > 0) {
    switch_to(&fibers[self.number + 1]);
    return;
  }
  std::memcpy(self.exceptions, __cxa_get_globals(), sizeof self.exceptions);
  here = watched = nullptr;
  model_switch(&self.stack, host_stack);
  resume(&self);
  // From here on any rank may be the first.
  decide(kYields);
}

void check(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

void fail(const std::string& what) { stop("rank %d: %s", here->rank, what.c_str()); }

void* shared(size_t bytes) {
  void* const at = allocate(0, bytes, 64);
  std::memset(at, 0, bytes);
  return at;
}

int vanished() { return gone; }
void gave_up() { have_given_up[here->rank] = true; }

int one_of(int n) {
  const int taken = choose(Kind::kCase, n);
  here->past = here->past * 31 + taken;
  return taken;
}

}  // namespace model
