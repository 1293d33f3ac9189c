// A model checker for csrc/shm and csrc/common: their own sources, compiled with -fsanitize=thread against the
// runtime of memory.cc and fibers.cc, with all ranks as fibers of one process. search.cc chooses schedules.
//
// How a case is written, in a source that the Makefile compiles as it does cases.cc:
//
//   void run(int rank) {                       // on a fiber of each rank, over and over
//     model::begin();                          // what was before is done by one rank after the other, unexplored
//     ...                                      // any std::atomic, std::thread, mutex, futex of common/atomic.h
//     model::check(value == 7, "a lost store"); // what must hold
//   }
//   const model::Case cases[] = {{.name = "name/2", .ranks = 2, .run = run}};
//   const model::Table all{cases};
//
// Memory that ranks share comes from model::shared(bytes) in prepare(), which runs before each execution: zeros, as a
// new file has. All else that a rank allocates is its own, as in a process. Any two accesses that race are an error,
// also of the case itself: a buffer that a case overwrites after its call is one that nobody may read any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace model {

constexpr int kMostRanks = 4, kMostFibers = 16;

struct Case {
  const char* name;
  int ranks;
  void (*prepare)() = nullptr;
  void (*run)(int rank);  // must return, unless the rank vanishes
  long share = 1;         // of all schedules that are tried
  // The most of each in one schedule.
  int preemptions = 2, stale = 1, timers = 1;
  bool vanishes = false;    // any one rank, at any access
  bool late = false;        // a sleep may have to end by its time: somebody comes late, or never
  bool is_searched = true;  // all schedules within these bounds, if they are not too many; else at random
  bool is_small = false;    // they are not too many: to the end, whatever its share
  int processors = 8;
  bool reads_fail = false;  // out of other processes, now and then
  long vanishing = 0;  // the share of a case more, NAME/vanish, in which any one rank does
};

// Cases that are to be tried.
void enter(const Case& one);
Case vanishing(Case one);
struct Table {
  template <size_t count>
  explicit Table(const Case (&cases)[count]) {
    for (const Case& one : cases) {
      enter(one);
      if (one.vanishing > 0) enter(vanishing(one));
    }
  }
};

// Of a case.
void begin();
void check(bool holds, const std::string& what);
[[noreturn]] void fail(const std::string& what);
void* shared(size_t bytes);
int vanished();     // the rank that has; -1: none
void gave_up();     // this rank's call has failed: others may see its memory change, and must not use it
int one_of(int n);  // a choice that is searched as those of schedules are

// Between the parts of the model -----------------------------------------------------------------

enum class Kind : uint8_t { kSchedule, kStale, kCase };
// Which of `n` comes next, from 0, the one that costs nothing. Of kSchedule: the fibers.
int choose(Kind kind, int n, const int8_t* fibers = nullptr);

// One execution; whether it ended well. The failure's text is in failure().
struct Bounds {
  int preemptions, stale, timers;
  int victim = -1;  // vanishes at its access number `kill`, from 1
  long kill = 0;
};
// Whether a search has been there, with no less left; else it has, from now on.
bool was_there(uint64_t state, const Bounds& left);
inline uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
bool execute(const Case& one, const Bounds& bounds, bool traced);
const std::string& failure();
long steps_of(int rank);  // accesses at which it could have vanished
// Every access of the last execution that was traced, with where it comes from.
std::string trace(size_t last);

// Orders that were seen, and one that is weakened.
struct Site {
  enum Op : uint8_t { kLoad, kStore, kChange, kWake, kFence };
  uintptr_t at[4];  // the call, and what called that
  Op op;
  int order;
};
void collect_sites(bool on);
size_t site_count();
const Site& site(size_t number);
void weaken(size_t number, int order);  // a wake or a fence: it does nothing
bool was_reached(size_t number);  // since this was last asked, by one of several fibers that share it

// `file:line` in csrc, by DWARF.
std::string place_of(const uintptr_t (&at)[4]);  // of those that were resolved
void resolve_places(const uintptr_t* addresses, size_t count);

}  // namespace model
