// A model checker for csrc/shm and csrc/common: their sources, compiled with -fsanitize=thread against the
// runtime of memory.cc and fibers.cc, with all ranks as fibers of one process. search.cc chooses schedules.
//
// Example of a case, in a source that the Makefile compiles like cases.cc:
//
//   void run(int rank) {                       // on a fiber of each rank, in each execution
//     model::begin();                          // earlier steps run rank by rank, unexplored
//     ...                                      // any std::atomic, std::thread, mutex, futex of common/atomic.h
//     model::check(value == 7, "a lost store"); // expected
//   }
//   const model::Case cases[] = {{.name = "name/2", .ranks = 2, .run = run}};
//   const model::Table all{cases};
//
// Ranks share the memory from model::shared(bytes) in prepare(), which runs before each execution: zeros, as in a new
// file. Other memory belongs to the rank that allocates it, as in a process. Any race is an error, also with accesses
// of the case: after a case has overwritten a buffer, no rank may read that buffer.
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
  long share = 1;         // relative share of all tried schedules
  // Maxima per schedule.
  int preemptions = 2, stale = 1, timers = 1;
  bool vanishes = false;    // any one rank may vanish, at any access
  bool late = false;        // a sleep may end by timeout: a rank is late or absent
  bool is_searched = true;  // all schedules within these bounds, if few enough; else random ones
  bool is_small = false;    // few enough: search completely, regardless of the share
  int processors = 8;
  bool reads_fail = false;  // reads from other processes fail occasionally
  long vanishing = 0;       // share of an additional case, NAME/vanish, in which any one rank vanishes
};

// Cases to try.
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
int vanished();     // the vanished rank; -1: none
void gave_up();     // this rank's call has failed: other ranks may see its memory change and must not use it
int one_of(int n);  // a choice that is searched like the choices of schedules

enum class Kind : uint8_t { kSchedule, kStale, kCase };
// Choose one of `n` alternatives, from 0, which costs nothing. For kSchedule: the fibers.
int choose(Kind kind, int n, const int8_t* fibers = nullptr);

// Run one execution; return true on success, else failure() has the text.
struct Bounds {
  int preemptions, stale, timers;
  int victim = -1;  // vanishes at its access number `kill`, from 1
  long kill = 0;
};
// Return true if a search has visited this state with at least as much left; else record the visit.
bool was_there(uint64_t state, const Bounds& left);
inline uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
bool execute(const Case& one, const Bounds& bounds, bool traced);
const std::string& failure();
long steps_of(int rank);  // number of accesses at which it could have vanished
// Each access of the last traced execution, with its call sites.
std::string trace(size_t last);

// Orders that occurred, and one that is weakened.
struct Site {
  enum Op : uint8_t { kLoad, kStore, kChange, kWake, kFence };
  uintptr_t at[4];  // the call site and its callers
  Op op;
  int order;
};
void collect_sites(bool on);
size_t site_count();
const Site& site(size_t number);
void weaken(size_t number, int order);  // a wake or a fence: drop it
bool was_reached(size_t number);        // since the last query, by one of several fibers that share it

// `file:line` in csrc, from DWARF.
std::string place_of(const uintptr_t (&at)[4]);  // of resolved addresses
void resolve_places(const uintptr_t* addresses, size_t count);

}  // namespace model
