// Selection of schedules: all within bounds, in the order of a depth-first search, or random ones with priorities.
//
//   model [CASE...] [--schedules N] [--jobs N]   try N of all cases together, according to their shares
//         [--search N]                           and at most N in the search of each case that is not small
//   model --replay 'CASE SCHEDULE'               repeat it, and print every access
//   model --mutants [FILE] [--schedules N]       weaken each order, drop each wake and fence: which case detects it?
//   model --list
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <tuple>
#include <utility>

#include "model.h"
#include "places.h"

namespace model {
namespace {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// One schedule: its choices or their seed, and the access at which a rank vanishes.
struct Schedule {
  bool is_random = false;
  uint64_t seed = 0;
  long expected = 1;  // expected number of scheduling choices, for the seed
  int victim = -1;
  long kill = 0;
  std::map<long, int> choices;  // all choices other than the first alternative

  std::string text() const {
    std::string text;
    if (victim >= 0) text += "v" + std::to_string(victim) + "," + std::to_string(kill) + " ";
    if (is_random) return text + "r" + std::to_string(seed) + "," + std::to_string(expected);
    text += "d";
    for (const auto& [at, taken] : choices) text += std::to_string(at) + "=" + std::to_string(taken) + ",";
    return text;
  }

  static Schedule of(const std::string& text) {
    Schedule schedule;
    const char* at = text.c_str();
    int used = 0, taken;
    if (std::sscanf(at, "v%d,%ld %n", &schedule.victim, &schedule.kill, &used) == 2) at += used;
    schedule.is_random = std::sscanf(at, "r%lu,%ld", &schedule.seed, &schedule.expected) == 2;
    for (long place; *at == 'd' || *at == ','; at += used) {
      if (std::sscanf(++at, "%ld=%d%n", &place, &taken, &used) != 2) break;
      schedule.choices[place] = taken;
    }
    return schedule;
  }
};

// The current position of choose(). In a search: earlier choices, each with its number of alternatives.
struct Taken {
  int8_t taken, of;
};
enum class Mode { kTree, kRandom, kReplay } mode;
constexpr size_t kLongest = 1 << 16;
Taken path[kLongest];  // not a vector: memory allocated by a fiber belongs to its rank
size_t path_length = 0, at_choice = 0;
const Schedule* schedule_now = nullptr;

// Hashes of visited states with the remaining bounds: they lead to no new states.
constexpr size_t kMostStates = size_t{1} << 26;
void* const room_for_states = mmap(nullptr, kMostStates * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
auto* const states = static_cast<uint64_t*>(room_for_states);
size_t state_count = 0;
Bounds most;  // initial bounds

// Random schedules with priorities (PCT): the fiber with the highest priority runs until it loses it at one
// of a few accesses.
constexpr int kChanges = 2;
uint64_t random_state;
uint64_t next_random() { return mixed(random_state += 0x9e3779b97f4a7c15u); }
int priorities[kMostFibers], lowest;
long decisions, changes[kChanges];

void begin_random(const Schedule& schedule) {
  random_state = schedule.seed * 0x2545f4914f6cdd1du + 1;
  decisions = 0;
  lowest = 0;
  for (int i = 0; i < kMostFibers; ++i) priorities[i] = 1 + static_cast<int>(next_random() % 1000000);
  for (long& one : changes) one = static_cast<long>(next_random() % static_cast<uint64_t>(schedule.expected));
}

int next_at_random(int n, const int8_t* fibers) {
  const bool fires = next_random() % 64 == 0;
  ++decisions;
  if (std::find(changes, changes + kChanges, decisions) != changes + kChanges) priorities[fibers[0] & 15] = --lowest;
  int best = -1, sleepers = 0;
  for (int i = 0; i < n; ++i) {
    if ((fibers[i] & 0x40) != 0) {
      ++sleepers;
    } else if (best < 0 || priorities[fibers[i]] > priorities[fibers[best]]) {
      best = i;
    }
  }
  if (sleepers > 0 && (fires || best < 0)) return n - 1 - static_cast<int>(next_random() % sleepers);
  return best;
}

}  // namespace

int choose(Kind kind, int n, const int8_t* fibers) {
  if (n == 1) return 0;
  const size_t place = at_choice++;
  if (mode == Mode::kReplay) {
    const auto found = schedule_now->choices.find(static_cast<long>(place));
    return found == schedule_now->choices.end() ? 0 : std::min(found->second, n - 1);
  }
  if (mode == Mode::kRandom) {
    if (kind == Kind::kSchedule) return next_at_random(n, fibers);
    const bool is_first = kind == Kind::kStale && next_random() % 4 != 0;
    return is_first ? 0 : static_cast<int>(next_random() % static_cast<uint64_t>(n));
  }
  if (place >= kLongest) return 0;
  if (place == path_length) path[path_length++] = {0, static_cast<int8_t>(n)};
  return path[place].taken;
}

bool was_there(uint64_t state, const Bounds& left) {
  if (mode != Mode::kTree || at_choice < path_length) return false;
  uint64_t key = 0;
  size_t place = 0;
  for (int p = most.preemptions; p >= left.preemptions; --p) {
    for (int s = most.stale; s >= left.stale; --s) {
      for (int t = most.timers; t >= left.timers; --t) {
        key = mixed(state + (p * 8 + s) * 8 + t) | 1;
        size_t at = key % kMostStates;
        while (states[at] != 0 && states[at] != key) at = (at + 1) % kMostStates;
        if (states[at] == key) return true;
        place = at;
      }
    }
  }
  if (state_count < kMostStates / 2) {
    states[place] = key;
    ++state_count;
  }
  return false;
}

void enter(const Case& one) { cases().push_back(one); }

Case vanishing(Case one) {
  one.name = strdup((std::string(one.name) + "/vanish").c_str());
  one.share = one.vanishing;
  one.vanishes = true;
  one.timers = 2;
  return one;
}

namespace {

bool run(const Case& one, const Schedule& schedule, bool traced = false) {
  Bounds bounds{one.preemptions, one.stale, one.timers, schedule.victim, schedule.kill};
  if (schedule.is_random) {
    bounds.preemptions = 1 << 30;
    bounds.stale = one.stale == 0 ? 0 : one.stale + 2;
    begin_random(schedule);
  }
  most = bounds;
  schedule_now = &schedule;
  at_choice = 0;
  return execute(one, bounds, traced);
}

// Advance to the next path of the search; return false after the last one.
bool advance() {
  while (path_length > 0 && path[path_length - 1].taken + 1 >= path[path_length - 1].of) --path_length;
  if (path_length == 0) return false;
  ++path[path_length - 1].taken;
  return true;
}

struct Result {
  long tried = 0;
  bool is_all = false;  // all within the bounds
  bool is_well = true;
  Schedule failing;
  std::string failure;
};

void take_path(Result& result) {
  for (size_t i = 0; i < path_length; ++i) {
    if (path[i].taken != 0) result.failing.choices[static_cast<long>(i)] = path[i].taken;
  }
}

// Try random schedules, unless a search of at most `searched` schedules is complete before. An incomplete
// search covers only late choices.
Result try_case(const Case& one, long schedules, long searched) {
  Result result;
  const auto fails = [&](const Schedule& schedule) {
    result.is_well = false;
    result.failing = schedule;
    result.failure = failure();
    return result;
  };
  long expected = 64, kills[kMostRanks] = {};
  if (!one.vanishes && one.is_searched && searched > 0) {
    mode = Mode::kTree;
    path_length = 0;
    madvise(room_for_states, kMostStates * sizeof(uint64_t), MADV_DONTNEED);
    state_count = 0;
    do {
      Schedule schedule;
      ++result.tried;
      if (!run(one, schedule)) {
        fails(schedule);
        take_path(result);
        return result;
      }
      if (!advance()) {
        result.is_all = true;
        return result;
      }
    } while (result.tried < searched);
    schedules += result.tried;
  }
  mode = Mode::kRandom;
  for (uint64_t seed = 1; result.tried < schedules; ++seed) {
    Schedule schedule;
    schedule.is_random = true;
    schedule.seed = seed;
    schedule.expected = expected;
    if (one.vanishes && seed > 4) {
      schedule.victim = static_cast<int>(seed % static_cast<uint64_t>(one.ranks));
      schedule.kill = 1 + static_cast<long>(seed / static_cast<uint64_t>(one.ranks) %
                                            static_cast<uint64_t>(kills[schedule.victim] + 2));
    }
    ++result.tried;
    if (!run(one, schedule)) return fails(schedule);
    if (seed <= 4) expected = std::max(expected, decisions);
    for (int r = 0; r < one.ranks && seed <= 4; ++r) kills[r] = std::max(kills[r], steps_of(r));
  }
  return result;
}

void tell_failure(const Case& one, const Result& result) {
  std::printf("%s: %s\n", one.name, with_places(result.failure).c_str());
  std::printf("  make model SCHEDULE='%s %s'\n", one.name, result.failing.text().c_str());
}

int replay(const std::string& text) {
  const size_t space = text.find(' ');
  const std::string name = text.substr(0, space);
  const auto found = std::find_if(cases().begin(), cases().end(), [&](const Case& one) { return name == one.name; });
  if (found == cases().end() || space == std::string::npos) {
    std::fprintf(stderr, "model: there is no case %s; --list shows all\n", name.c_str());
    return 2;
  }
  const Schedule schedule = Schedule::of(text.substr(space + 1));
  mode = schedule.is_random ? Mode::kRandom : Mode::kReplay;
  const bool is_well = run(*found, schedule, true);
  std::printf("%s", trace(400).c_str());
  std::printf("%s: %s\n", found->name, is_well ? "all right" : with_places(failure()).c_str());
  return is_well ? 0 : 1;
}

// Run `work(i)` for each i below `count` in separate processes, a few at a time; return true if all succeed.
template <typename Work>
bool in_parallel(size_t count, int jobs, Work work) {
  bool is_well = true;
  int running = 0;
  const auto await = [&] {
    int status = 0;
    wait(&status);
    --running;
    is_well = is_well && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  for (size_t i = 0; i < count; ++i) {
    if (running == jobs) await();
    std::fflush(stdout);
    if (fork() == 0) {
      const bool was_well = work(i);
      std::fflush(stdout);
      std::_Exit(was_well ? 0 : 1);
    }
    ++running;
  }
  while (running > 0) await();
  return is_well;
}

// `searched`: maximum for the search of each case that is not small.
int try_all(const std::vector<Case>& chosen, long schedules, long searched, int jobs) {
  constexpr long kAll = 1L << 40;
  long shares = 0;
  for (const Case& one : chosen) shares += one.share;
  const bool is_well = in_parallel(chosen.size(), jobs, [&](size_t i) {
    const Case& one = chosen[i];
    const auto started = std::chrono::steady_clock::now();
    const Result result = try_case(one, std::max(1L, schedules * one.share / shares), one.is_small ? kAll : searched);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (!result.is_well) tell_failure(one, result);
    std::printf("%-32s %9ld schedules%s %6.1f s%s\n", one.name, result.tried, result.is_all ? ", all" : "     ",
                seconds, result.is_well ? "" : "  FAILS");
    return result.is_well;
  });
  std::printf(is_well ? "all right\n" : "the model has found something\n");
  return is_well ? 0 : 1;
}

const char* const kOrders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
enum { kRelaxed, kConsume, kAcquire, kRelease, kBoth, kSequential };

bool is_dropped(Site::Op op) { return op == Site::kWake || op == Site::kFence; }

struct Mutant {
  Place place;
  Site::Op op;
  int order, weaker;  // 1 and 0 for operations that can only be dropped
  std::vector<size_t> sites;
  std::set<const Case*> cases;  // that reach one of its sites

  std::string order_name() const { return op == Site::kWake ? "wake" : op == Site::kFence ? "fence" : kOrders[order]; }
  std::string change() const {
    return order_name() + " -> " + (is_dropped(op) ? "none" : kOrders[weaker]);
  }
  std::string file() const { return place.at.substr(0, place.at.find(':')); }
  std::string source() const {
    std::ifstream file("../../../" + this->file());
    std::string line;
    for (int i = std::atoi(place.at.c_str() + place.at.find(':') + 1); i > 0; --i) std::getline(file, line);
    line.erase(0, line.find_first_not_of(' '));
    return line;
  }
};

// One step weaker in each direction.
std::vector<int> weaker_than(Site::Op op, int order) {
  if (is_dropped(op)) return {0};
  if (order == kSequential) {
    if (op == Site::kLoad) return {kAcquire, kRelaxed};
    if (op == Site::kStore) return {kRelease, kRelaxed};
    return {kBoth, kAcquire, kRelease};
  }
  if (order == kBoth) return {kAcquire, kRelease};
  return order == kRelaxed ? std::vector<int>{} : std::vector<int>{kRelaxed};
}

// Its location in csrc. For a wake: the call of the common wake function. Calls without a name are attributed
// to the next named function.
Place place_in_csrc(const Site& site) {
  Place found;
  for (const uintptr_t one : site.at) {
    for (const Place& place : places_of(one)) {
      const auto is_in = [&](const char* start) { return place.at.rfind(start, 0) == 0; };
      if (!found.at.empty()) {
        found.function = place.function;
        if (!found.function.empty()) return found;
        continue;
      }
      const bool is_wake = site.op == Site::kWake && (is_in("csrc/common/futex.h") || is_in("csrc/shm/counter.h") ||
                                                      is_in("csrc/shm/rings.h"));
      if (is_wake) continue;
      if (!is_in("csrc/") || !place.function.empty()) return is_in("csrc/") ? place : Place{};
      found = place;
    }
  }
  return found;
}

// All atomics, wakes and fences of the program, reached or not. The order is taken from the machine code if
// it is nearby.
std::vector<Site> sites_in_code() {
  std::vector<Site> found;
  FILE* const pipe = popen(("objdump -d --no-show-raw-insn " + executable()).c_str(), "r");
  char line[4096];
  std::map<std::string, int> constants;  // by register
  bool is_next = false;
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    char* instruction;
    const uintptr_t address = std::strtoul(line, &instruction, 16);
    if (*instruction != ':') {
      constants.clear();
      continue;
    }
    if (std::exchange(is_next, false)) found.back().at[0] = address;
    char into[16];
    int value;
    if (std::sscanf(instruction, ": mov $0x%x,%%%15s", &value, into) == 2) constants[into] = value;
    if (std::sscanf(instruction, ": xor %%%*[a-z0-9],%%%15s", into) == 1) constants[into] = kRelaxed;
    const char* const call = std::strstr(instruction, "call ");
    const auto calls = [&](const char* name) { return call != nullptr && std::strstr(call, name) != nullptr; };
    const bool is_wake = calls("<model_notify_") || calls("futex_wake");
    const bool is_fence = calls("<_ZN2fl10full_fenceEv>");
    if (!is_wake && !is_fence && !calls("<__tsan_atomic")) continue;
    const Site::Op op = is_wake ? Site::kWake : is_fence ? Site::kFence : calls("_load") ? Site::kLoad : calls("_store") ? Site::kStore : Site::kChange;
    const char* const order = op == Site::kLoad ? "esi" : calls("compare") ? "ecx" : "edx";
    found.push_back({{}, op, is_dropped(op) ? 1 : constants.count(order) > 0 ? constants[order] : kSequential});
    is_next = true;
  }
  if (pipe != nullptr) pclose(pipe);
  return found;
}

std::vector<Mutant> all_mutants() {
  collect_sites(true);
  std::map<size_t, std::set<const Case*>> reach;
  for (const Case& one : cases()) {
    try_case(one, 300, 0);
    for (size_t i = 0; i < site_count(); ++i) {
      if (was_reached(i)) reach[i].insert(&one);
    }
  }
  const std::vector<Site> in_code = sites_in_code();
  std::vector<uintptr_t> addresses;
  for (size_t i = 0; i < site_count(); ++i) addresses.insert(addresses.end(), site(i).at, site(i).at + 4);
  for (const Site& one : in_code) addresses.push_back(one.at[0]);
  resolve(addresses);
  std::map<std::tuple<std::string, int, int>, Mutant> lines;  // by file, line and operation
  const auto line_of = [&](const Site& one) -> Mutant* {
    const Place place = place_in_csrc(one);
    if (place.at.empty() || is_foreign(one.at[0])) return nullptr;
    const size_t colon = place.at.find(':');
    Mutant& line = lines[{place.at.substr(0, colon), std::atoi(place.at.c_str() + colon + 1), one.op}];
    line.place = place;
    line.op = one.op;
    return &line;
  };
  for (size_t i = 0; i < site_count(); ++i) {
    if (Mutant* const line = line_of(site(i))) {
      line->order = std::max(line->order, site(i).order);
      line->sites.push_back(i);
      line->cases.insert(reach[i].begin(), reach[i].end());
    }
  }
  for (const Site& one : in_code) {
    Mutant* const line = line_of(one);
    if (line != nullptr && line->sites.empty()) line->order = std::max(line->order, one.order);
  }
  std::vector<Mutant> mutants;
  for (auto& [place, line] : lines) {
    for (const int weaker : weaker_than(line.op, line.order)) {
      mutants.push_back(line);
      mutants.back().weaker = weaker;
    }
  }
  return mutants;
}

// Return the reason why a mutant is equivalent, from equivalent.txt; empty: a case must detect it.
std::string excuse_of(const Mutant& mutant) {
  std::ifstream list("equivalent.txt");
  for (std::string file, line, change, reason; std::getline(list, file) && std::getline(list, line) &&
                                               std::getline(list, change) && std::getline(list, reason);) {
    std::string empty;
    std::getline(list, empty);
    const bool is_it = mutant.file() == file && mutant.source().find(line) != std::string::npos;
    if (is_it && (change == mutant.change() || change == "*")) return reason;
  }
  return "";
}

struct Verdict {
  long tried;
  char killer[64];  // first case that detects it; empty: none
};

// First few schedules of each case, because most mutants are detected at once; then more of the first,
// simplest cases.
Verdict verdict_of(const Mutant& mutant, long schedules) {
  Verdict verdict{};
  for (const size_t one : mutant.sites) weaken(one, mutant.weaker);
  const long each = schedules / static_cast<long>(mutant.cases.size() + 1);
  for (const long most : {std::min(20L, each), std::min(200L, each), each, schedules}) {
    long simple = 3;
    for (const Case* const one : mutant.cases) {
      if (most == schedules && simple-- == 0) break;
      const Result result = try_case(*one, most, most < 3000 ? 0 : most / 2);
      verdict.tried += result.tried;
      if (result.is_well) continue;
      std::snprintf(verdict.killer, sizeof verdict.killer, "%s", one->name);
      return verdict;
    }
  }
  return verdict;
}

// Name in the table for a source line that changes.
std::string operation_of(const Mutant& mutant) {
  const std::string source = mutant.source();
  static const std::regex atomic(R"(\w+(\.|->)(load|store|exchange|fetch_add|fetch_sub|compare_exchange_\w+)(?=\())");
  static const std::regex dropped(R"((\w+(\.|->))?(full_fence|futex_wake|notify_one|notify_all|wake|raise|give)(?=\())");
  std::smatch found;
  if (std::regex_search(source, found, is_dropped(mutant.op) ? dropped : atomic)) return found.str();
  return source;
}

// Weaken every order, and drop every wake and fence, one at a time; print the detecting case, as in
// docs/model-checking.md.
int try_mutants(long schedules, int jobs, const std::string& only, const std::vector<Case>& chosen) {
  std::vector<Mutant> mutants;
  const auto is_chosen = [&](const Case* one) {
    return std::any_of(chosen.begin(), chosen.end(), [&](const Case& c) { return std::strcmp(c.name, one->name) == 0; });
  };
  for (Mutant& one : all_mutants()) {
    for (auto at = one.cases.begin(); !chosen.empty() && at != one.cases.end();) {
      at = is_chosen(*at) ? std::next(at) : one.cases.erase(at);
    }
    if (one.place.at.rfind(only, 0) == 0) mutants.push_back(std::move(one));
  }
  std::fprintf(stderr, "%zu mutants\n", mutants.size());
  void* const room = mmap(nullptr, mutants.size() * sizeof(Verdict) + 1, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const verdicts = static_cast<Verdict*>(room);
  in_parallel(mutants.size(), jobs, [&](size_t i) {
    if (!excuse_of(mutants[i]).empty()) return true;
    verdicts[i] = verdict_of(mutants[i], schedules);
    if (verdicts[i].killer[0] == '\0') {
      std::fprintf(stderr, "%s, %s: %s %s in %zu cases, %ld schedules\n", mutants[i].place.at.c_str(),
                   mutants[i].change().c_str(), mutants[i].source().c_str(),
                   mutants[i].cases.empty() ? "NOT REACHED" : "SURVIVES", mutants[i].cases.size(), verdicts[i].tried);
    }
    return true;
  });
  bool is_well = !mutants.empty();
  std::printf("| file | function | operation | memory order, or kind (wake, fence) | change to the operation: case that detects it |\n|---|---|---|---|---|\n");
  std::string row, file;
  for (size_t i = 0; i < mutants.size(); ++i) {
    const Mutant& one = mutants[i];
    const std::string excuse = excuse_of(one), killer = verdicts[i].killer;
    is_well = is_well && !(killer.empty() && excuse.empty());
    const std::string next = " | `" + one.place.function + "` | `" + operation_of(one) + "` | " + one.order_name() + " | ";
    if (next != row || file != one.file()) std::printf("%s| `%s`%s", row.empty() ? "" : " |\n", one.file().c_str(), next.c_str());
    else std::printf("; ");
    row = next;
    file = one.file();
    std::printf("%s: ", is_dropped(one.op) ? "removed" : kOrders[one.weaker]);
    std::printf("%s", killer.empty() ? excuse.empty() ? "NOBODY" : excuse.c_str() : ("`" + killer + "`").c_str());
  }
  std::printf(" |\n");
  std::fflush(stdout);  // the table first if both go to one file
  std::fprintf(stderr, is_well ? "every mutant is noticed, or equivalent: all right\n" : "mutants survive\n");
  return is_well ? 0 : 1;
}

int start(int count, char** words) {
  long schedules = 100000, searched = 0;
  int jobs = 2;
  bool mutates = false;
  std::string only;
  std::vector<Case> chosen;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--list") {
      for (const Case& one : cases()) std::printf("%s\n", one.name);
      return 0;
    }
    if (word == "--replay") return replay(words[i + 1]);
    if (word == "--mutants") {
      mutates = true;
      if (i + 1 < count && words[i + 1][0] != '-') only = words[++i];
    } else if (word == "--schedules") {
      schedules = std::atol(words[++i]);
    } else if (word == "--search") {
      searched = std::atol(words[++i]);
    } else if (word == "--jobs") {
      jobs = std::atoi(words[++i]);
    } else {
      for (const Case& one : cases()) {
        if (std::strncmp(one.name, words[i], word.size()) == 0) chosen.push_back(one);
      }
    }
  }
  if (mutates) return try_mutants(schedules, jobs, only, chosen);
  return try_all(chosen.empty() ? cases() : chosen, schedules, searched, jobs);
}

}  // namespace
}  // namespace model

int main(int count, char** words) { return model::start(count, words); }
