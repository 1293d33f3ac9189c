// Shared by memory.cc and fibers.cc. While a fiber runs, neither may use templates that its sources
// instantiate.
#pragma once

#include "model.h"

namespace model {

// The time of each fiber at an event: earlier events have no larger time of any fiber.
struct Times {
  uint32_t at[kMostFibers];
  void join(const Times& other) {
    for (int i = 0; i < kMostFibers; ++i) at[i] = at[i] < other.at[i] ? other.at[i] : at[i];
  }
};

constexpr int kMostDepth = 256;

struct Fiber {
  enum State : uint8_t { kReady, kBlocked, kEnded, kGone };
  int8_t number, rank;
  State state;
  bool is_main, has_yielded, has_timed_out;
  // Memory order.
  Times now, to_acquire, released, fenced;
  uint64_t fenced_at;
  // Wait.
  const void* on;
  uint32_t bits;
  int64_t until, slept;  // end and duration of the wait; -1: no limit
  uint64_t since;
  int64_t looked;  // number of clock reads
  uint64_t past;   // hash of all that it has seen
  // Position.
  void* stack;
  void* (*entry)(void*);
  void* argument;
  uintptr_t exceptions[2];
  int depth;
  uintptr_t calls[kMostDepth];
};

extern Fiber fibers[kMostFibers];
extern int fiber_count;
extern Fiber* here;     // null: on the host's stack
extern Fiber* watched;  // the same, if its accesses are checked
extern bool is_quiet;   // before begin()

inline void tick(Fiber& fiber) { ++fiber.now.at[fiber.number]; }

// State of the execution for replaced system calls.
extern const Case* current;
extern int64_t now;  // nanoseconds
inline int64_t clock_of(const Fiber& fiber) { return now + 50 * fiber.looked; }  // own clock reads
extern int gone;  // the vanished rank; -1: none
extern bool in_prepare;  // on the host's stack: memory belongs to the ranks
enum Why { kAccess, kYields, kBlocks };
void decide(Why why);  // choose the next fiber
// Sleep at an address until a wake or a time; -1: no limit. Wake sleepers in order of arrival.
void block(const void* on, int64_t until, uint32_t bits = 0);
int wake_all(const void* on, int most, uint32_t bits = 0);
Fiber& spawn(int rank, void* (*entry)(void*), void* argument);
void reset_system();
void save_system();
void restore_system();

// An access of a fiber comes after the last change of the location and before its later changes. These orders
// alone determine the future: a search identifies visited states by them.
enum Common : uintptr_t { kFences = 1, kClock, kKernel, kHeap };  // also kHeap + area, and addresses
void happens(Fiber& fiber, uintptr_t place, bool changes);

// Memory: a shared area, and one area per rank: heap from below, stacks from above.
constexpr uintptr_t kBase = 0x100000000000, kShadow = 0x200000000000, kMarks = 0x300000000000;
constexpr size_t kArea = size_t{32} << 20;
constexpr size_t kStack = size_t{128} << 10;
inline bool is_modelled(uintptr_t at) { return at - kBase < (kMostRanks + 1) * kArea; }
inline int area_of(uintptr_t at) { return static_cast<int>((at - kBase) / kArea); }  // 0, or rank + 1
void reset_memory();
void forget_order();  // all earlier events precede all later ones
size_t& used_of(int area);
void* allocate(int area, size_t bytes, size_t alignment);

enum Access : uint8_t { kRead = 0, kWrite = 1, kAtomic = 2, kRemote = 4, kFreed = 8, kTainted = 16 };
void note(uintptr_t at, size_t bytes, int access, uintptr_t pc);
// Another process reads; false: the data may be changing, which the reader detects.
bool note_remote(uintptr_t at, size_t bytes, uintptr_t pc);
void taint(uintptr_t at, size_t bytes);

// Both futex calls are full barriers, and the kernel reads the word after one, like a seq_cst load.
void full_fence();
uint32_t kernel_load(uintptr_t at, uintptr_t pc);

// An access before which another fiber may run.
void point(uintptr_t at);
bool is_common(uintptr_t at);  // used by several fibers
// Choose which of `count` stores, the newest first, a load returns.
int stores_back(int count);

// Errors end the execution.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool has_given_up(int rank);
bool is_mapped(uintptr_t at, int rank);

void record(const char* what, uintptr_t at, uint64_t value, uintptr_t pc);
bool is_dropped(uintptr_t at, uintptr_t pc, Site::Op op = Site::kWake);  // true if a mutant drops it

}  // namespace model
