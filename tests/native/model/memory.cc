// Memory order: which stores an atomic load may return, and which accesses race.
//
// Stores to one location are ordered by execution, or precede another thread's store that no fiber has passed yet. A
// load returns any store that C++20 allows: none older than a store that happened before the load, than the result of
// a read that happened before it, or than required by the single order of all seq_cst operations, which is the order
// of execution. Plain accesses are recorded by granules of eight bytes.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "runtime.h"

namespace model {
namespace {

enum { kRelaxed, kConsume, kAcquire, kRelease, kBoth, kSequential };
bool acquires(int order) { return order == kConsume || order == kAcquire || order >= kBoth; }
bool releases(int order) { return order >= kRelease; }

uint32_t run = 0;         // number of the execution; marks of earlier executions are ignored
uint64_t operations = 0;  // in this execution
Times fences;             // time of each fiber at its last seq_cst fence

struct Cell {
  uint32_t run, time, pc;
  int8_t fiber;
  uint8_t mask, access;
};
constexpr int kCells = 4;
struct Granule {
  Cell cells[kCells];
};
static_assert(sizeof(Granule) == 64, "of eight bytes");

Granule& granule_of(uintptr_t at) { return reinterpret_cast<Granule*>(kShadow)[(at - kBase) / 8]; }

const char* name_of(int access) {
  if ((access & kRemote) != 0) return "reads out of its process";
  if ((access & kAtomic) != 0) return (access & kWrite) != 0 ? "changes as an atomic" : "loads as an atomic";
  return (access & kWrite) != 0 ? "writes" : "reads";
}

[[noreturn]] void race(const Cell& cell, uintptr_t at, int access, uintptr_t pc) {
  const int other = fibers[cell.fiber].rank, rank = here->rank;
  stop("race at %p: rank %d (fiber %d) %s it at <%x>, not ordered with rank %d (fiber %d), which %s it at <%x>",
       reinterpret_cast<void*>(at), rank, here->number, name_of(access), static_cast<unsigned>(pc), other,
       cell.fiber, name_of(cell.access), cell.pc);
}

bool is_before(const Cell& cell, const Fiber& fiber) { return cell.time <= fiber.now.at[cell.fiber]; }

// Return true without a race. A race is an error unless another process reads.
bool touch(uintptr_t at, uint8_t mask, int access, uintptr_t pc) {
  Granule& granule = granule_of(at);
  const Fiber& fiber = *here;
  const uint32_t time = fiber.now.at[fiber.number];
  Cell& first = granule.cells[0];
  if (first.run == run && first.fiber == fiber.number && first.time == time && first.mask == mask &&
      first.access == access) {
    return true;
  }
  const bool writes = (access & kWrite) != 0, is_plain_write = writes && (access & kAtomic) == 0;
  bool is_well = true;
  int room = -1;
  for (int i = 0; i < kCells; ++i) {
    Cell& cell = granule.cells[i];
    if (cell.run != run) {
      if (room < 0) room = i;
      continue;
    }
    if ((cell.mask & mask) == 0) continue;
    if ((cell.access & kFreed) != 0) {
      if ((access & kRemote) != 0) return false;
      stop("rank %d uses memory at %p that fiber %d has freed at <%x>, at <%x>", fiber.rank,
           reinterpret_cast<void*>(at), cell.fiber, cell.pc, static_cast<unsigned>(pc));
    }
    if ((cell.access & kTainted) != 0 && !writes) {
      stop("rank %d uses at <%x> what it has read of memory that another rank was changing, at <%x>", fiber.rank,
           static_cast<unsigned>(pc), cell.pc);
    }
    if (cell.fiber != fiber.number && (writes || (cell.access & kWrite) != 0) &&
        (cell.access & access & kAtomic) == 0 && !is_before(cell, fiber)) {
      const bool is_void = (access & kRemote) != 0 || ((cell.access & kRemote) != 0 && has_given_up(fiber.rank));
      if (!is_void) race(cell, at, access, pc);
      is_well = false;
    }
    const bool covers = (cell.mask & ~mask) == 0;
    const bool is_same = cell.fiber == fiber.number && cell.access == access;
    if (covers && (is_same || (is_plain_write && is_before(cell, fiber)))) {
      cell.run = 0;
      if (room < 0 || granule.cells[room].run == run) room = i;
    }
  }
  if (room < 0) {  // the least likely to be missed
    room = kCells - 1;
    for (int i = 0; i < kCells; ++i) {
      if (is_before(granule.cells[i], fiber) && (granule.cells[i].access & kWrite) == 0) room = i;
    }
  }
  if (room != 0) granule.cells[room] = first;
  first = {run, time, static_cast<uint32_t>(pc), fiber.number, mask, static_cast<uint8_t>(access)};
  return is_well;
}

bool touch_all(uintptr_t at, size_t bytes, int access, uintptr_t pc) {
  bool is_well = true;
  while (bytes > 0) {
    const size_t skip = at & 7, part = bytes < 8 - skip ? bytes : 8 - skip;
    is_well = touch(at, static_cast<uint8_t>(((1u << part) - 1) << skip), access, pc) && is_well;
    at += part;
    bytes -= part;
  }
  return is_well;
}

struct Store {
  uint64_t value;
  Store* before;
  uint64_t operation;
  uint32_t time;
  int8_t fiber;
  bool is_sequential, has_times;
  bool is_fixed;  // no store may precede it any more: it modified a value, or was read in the single order
  uint32_t seen[kMostFibers];  // by fiber: time of the first read; 0: unread
  Times times;  // times that an acquiring fiber joins
};
constexpr int kMostStores = 1 << 17;
Store* stores;
int store_count = 0;

struct Location {
  uintptr_t at;
  uint32_t run;
  bool is_fresh;  // written by plain stores, for example on creation
  Store* last;
};
constexpr size_t kLocations = 1 << 13;
Location locations[kLocations];
size_t location_count = 0;

Store& new_store(uint64_t value, Store* before) {
  if (store_count == kMostStores) stop("too many stores");
  Store& store = stores[store_count++];
  std::memset(&store, 0, sizeof store);
  store.value = value;
  store.before = before;
  store.operation = ++operations;
  return store;
}

uint32_t* const has_atomics = reinterpret_cast<uint32_t*>(kMarks);  // by granule: last execution with atomics

Location* find(uintptr_t at, bool or_make) {
  size_t place = (at * 0x9e3779b97f4a7c15u >> 40) % kLocations;
  while (locations[place].run == run) {
    if (locations[place].at == at) return &locations[place];
    place = (place + 1) % kLocations;
  }
  if (!or_make) return nullptr;
  if (++location_count > kLocations / 2) stop("too many atomics");
  locations[place] = {at, run, true, nullptr};
  return &locations[place];
}

uint64_t value_at(uintptr_t at, int bytes) {
  uint64_t value = 0;
  std::memcpy(&value, reinterpret_cast<void*>(at), bytes);
  return value;
}

Location& location_of(uintptr_t at, int bytes) {
  Location& location = *find(at, true);
  if (location.is_fresh) {
    location.is_fresh = false;
    has_atomics[(at - kBase) / 8] = run;
    location.last = &new_store(value_at(at, bytes), nullptr);  // time 0: before all fibers
  }
  return location;
}

// A plain store replaces all earlier stores.
void forget_atomics(uintptr_t at, size_t bytes) {
  for (uintptr_t one = at; one < at + bytes; one += 8 - (one & 7)) {
    if (has_atomics[(one - kBase) / 8] != run) continue;
    for (uintptr_t byte = one; byte < at + bytes && (byte == one || (byte & 7) != 0); ++byte) {
      if (Location* location = find(byte, false)) location->is_fresh = true;
    }
  }
}

// Return true if no older store may be read any more.
bool is_settled(const Store& store, const Fiber& fiber, int order) {
  if (store.time <= fiber.now.at[store.fiber]) return true;
  for (int i = 0; i < fiber_count; ++i) {
    if (store.seen[i] != 0 && store.seen[i] <= fiber.now.at[i]) return true;
  }
  if (store.is_sequential && (order == kSequential || store.operation < fiber.fenced_at)) return true;
  if (store.time <= fiber.fenced.at[store.fiber]) return true;
  return order == kSequential && store.time <= fences.at[store.fiber];
}

// Choose the store that a load returns.
Store& chosen(Location& location, int order) {
  Store* store = location.last;
  const Fiber& fiber = *here;
  if (store->before == nullptr || is_settled(*store, fiber, order)) return *store;
  int count = 1;
  for (const Store* one = store; one->before != nullptr && !is_settled(*one, fiber, order); one = one->before) ++count;
  for (int back = stores_back(count); back > 0; --back) store = store->before;
  return *store;
}

// Choose the store before which a new one may go: C++ does not order stores of several threads by execution.
Store* overtaken(Location& location, int order) {
  int count = 1;
  for (Store* one = location.last; one->before != nullptr && !one->is_fixed && !is_settled(*one, *here, order);
       one = one->before) {
    ++count;
  }
  if (count == 1) return nullptr;
  int back = stores_back(count);
  if (back == 0) return nullptr;
  Store* one = location.last;
  while (--back > 0) one = one->before;
  return one;
}

void has_read(Store& store, int order) {
  Fiber& fiber = *here;
  if (order == kSequential) store.is_fixed = true;
  if (store.seen[fiber.number] == 0) store.seen[fiber.number] = fiber.now.at[fiber.number];
  if (!store.has_times) return;
  (acquires(order) ? fiber.now : fiber.to_acquire).join(store.times);
}

Store& add(Location& location, uint64_t value, int order, const Store* read, Store* after) {
  Fiber& fiber = *here;
  Store*& place = after == nullptr ? location.last : after->before;
  Store& store = new_store(value, place);
  store.is_fixed = read != nullptr;
  store.time = fiber.now.at[fiber.number];
  store.fiber = fiber.number;
  store.is_sequential = order == kSequential;
  store.times = releases(order) ? fiber.now : fiber.released;
  store.has_times = true;
  if (read != nullptr && read->has_times) store.times.join(read->times);  // same release sequence
  place = &store;
  return store;
}

struct Known {
  Site site;
  uintptr_t key;
  int weaker;       // -1: not weakened
  bool is_reached;  // by one of several fibers that may access it
};
constexpr size_t kMostSites = 1 << 12;
Known sites[kMostSites];
size_t sites_known = 0;
uint16_t by_address[1 << 14];  // 0: none; else number + 1
bool are_collected = false, is_any_weaker = false;

size_t place_in(uintptr_t key) {
  size_t place = (key * 0x9e3779b97f4a7c15u >> 32) % std::size(by_address);
  while (by_address[place] != 0 && sites[by_address[place] - 1].key != key) {
    place = (place + 1) % std::size(by_address);
  }
  return place;
}

// A wake belongs to its callers, up to the caller of the function that all wakes use.
uintptr_t key_of(uintptr_t pc, Site::Op op) {
  if (op != Site::kWake) return pc;
  uintptr_t key = pc;
  for (int i = 1; i <= 2 && i <= here->depth; ++i) key = key * 31 + here->calls[here->depth - i];
  return key;
}

int order_at(uintptr_t pc, Site::Op op, int order, uintptr_t at) {
  if (!are_collected && !is_any_weaker) return order;
  const uintptr_t key = key_of(pc, op);
  if (are_collected) {
    const size_t place = place_in(key);
    if (by_address[place] == 0 && sites_known < kMostSites) {
      Known& known = sites[sites_known];
      known = {{{pc, 0, 0, 0}, op, order}, key, -1, false};
      for (int i = 0; i < 3 && i < here->depth; ++i) known.site.at[i + 1] = here->calls[here->depth - 1 - i];
      by_address[place] = static_cast<uint16_t>(++sites_known);
    }
    if (by_address[place] != 0 && is_common(at)) sites[by_address[place] - 1].is_reached = true;
  }
  if (!is_any_weaker) return order;
  const size_t found = by_address[place_in(key)];
  return found == 0 || sites[found - 1].weaker < 0 ? order : sites[found - 1].weaker;
}

template <typename T>
T load(const volatile T* place, int order, uintptr_t pc) {
  if (watched == nullptr || is_quiet) return *place;
  const auto at = reinterpret_cast<uintptr_t>(place);
  if (!is_modelled(at)) return *place;
  order = order_at(pc, Site::kLoad, order, at);
  point(at);
  note(at, sizeof(T), kRead | kAtomic, pc);
  Store& store = chosen(location_of(at, sizeof(T)), order);
  happens(*here, at, false);
  if (order == kSequential) happens(*here, kFences, false);
  has_read(store, order);
  tick(*here);
  record("load", at, store.value, pc);
  return static_cast<T>(store.value);
}

// `change` computes the next value, and returns false without one.
template <typename T, typename Change>
T change(volatile T* place, int order, int otherwise, Site::Op op, const char* what, uintptr_t pc, Change change) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  if (watched == nullptr || is_quiet || !is_modelled(at)) {
    T next = *place;
    const T before = next;
    if (change(next)) *place = next;
    return before;
  }
  order = order_at(pc, op, order, at);
  point(at);
  Location& location = location_of(at, sizeof(T));
  Store* const after = overtaken(location, order);
  happens(*here, at, true);
  if (order == kSequential) happens(*here, kFences, false);
  Store& last = after == nullptr ? *location.last : *after->before;
  T next = static_cast<T>(last.value);
  const bool changes = change(next);
  note(at, sizeof(T), (changes ? kWrite : kRead) | kAtomic, pc);
  if (op == Site::kChange) has_read(last, changes ? order : otherwise);
  if (changes) {
    Store& store = add(location, next, order, op == Site::kChange ? &last : nullptr, after);
    store.seen[here->number] = here->now.at[here->number];
    if (after == nullptr) *place = next;
  }
  tick(*here);
  record(what, at, changes ? next : last.value, pc);
  return static_cast<T>(last.value);
}

}  // namespace

// Position in the single order of all seq_cst operations.
void full_fence() {
  Fiber& self = *here;
  self.now.join(self.to_acquire);
  self.released = self.now;
  happens(self, kFences, true);
  fences.at[self.number] = self.now.at[self.number];
  self.fenced.join(fences);
  self.fenced_at = ++operations;
  tick(self);
}

uint32_t kernel_load(uintptr_t at, uintptr_t pc) {
  note(at, 4, kRead | kAtomic, pc);
  Store& store = chosen(location_of(at, 4), kSequential);
  happens(*here, at, false);
  has_read(store, kRelaxed);
  store.is_fixed = true;
  tick(*here);
  return static_cast<uint32_t>(store.value);
}

namespace {

size_t heap_used[kMostRanks + 1];

void map_at(uintptr_t at, size_t bytes) {
  void* const got = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == reinterpret_cast<void*>(at)) return;
  std::fprintf(stderr, "model: no memory at %p\n", reinterpret_cast<void*>(at));
  std::exit(2);
}

}  // namespace

void reset_memory() {
  if (run == 0) {
    map_at(kBase, (kMostRanks + 1) * kArea);
    map_at(kShadow, (kMostRanks + 1) * kArea * sizeof(Granule) / 8);
    map_at(kMarks, (kMostRanks + 1) * kArea * sizeof *has_atomics / 8);
    stores = static_cast<Store*>(std::calloc(kMostStores, sizeof(Store)));
  }
  forget_order();
  std::memset(heap_used, 0, sizeof heap_used);
}

void forget_order() {
  ++run;
  store_count = 0;
  operations = 0;
  location_count = 0;
  std::memset(&fences, 0, sizeof fences);
}

size_t& used_of(int area) { return heap_used[area]; }

void* allocate(int area, size_t bytes, size_t alignment) {
  size_t& used = heap_used[area];
  if (here != nullptr) happens(*here, kHeap + area, true);
  used = (used + alignment - 1) / alignment * alignment;
  void* const at = reinterpret_cast<void*>(kBase + area * kArea + used);
  used += bytes;
  if (used > kArea - kMostFibers * kStack) stop("rank %d takes too much memory", area - 1);
  return at;
}

void note(uintptr_t at, size_t bytes, int access, uintptr_t pc) {
  if (watched == nullptr || is_quiet || !is_modelled(at)) return;
  const int area = area_of(at);
  if (area != 0 && area != here->rank + 1) {
    stop("rank %d (fiber %d) %s memory of rank %d at %p, at <%x>", here->rank, here->number, name_of(access),
         area - 1, reinterpret_cast<void*>(at), static_cast<unsigned>(pc));
  }
  if (area == 0 && !is_mapped(at, here->rank)) {
    stop("rank %d (fiber %d) %s memory at %p that it has unmapped, at <%x>", here->rank, here->number,
         name_of(access), reinterpret_cast<void*>(at), static_cast<unsigned>(pc));
  }
  touch_all(at, bytes, access, pc);
  if ((access & kWrite) != 0 && (access & kAtomic) == 0) forget_atomics(at, bytes);
}

bool note_remote(uintptr_t at, size_t bytes, uintptr_t pc) {
  return touch_all(at, bytes, kRead | kRemote, pc);
}

void taint(uintptr_t at, size_t bytes) {
  for (uintptr_t one = at; one < at + bytes; one += 8 - (one & 7)) {
    granule_of(one).cells[kCells - 1] = {run, 0, 0, here->number, 0xff, kTainted};
  }
}

void collect_sites(bool on) { are_collected = on; }
size_t site_count() { return sites_known; }
const Site& site(size_t number) { return sites[number].site; }
void weaken(size_t number, int order) {
  sites[number].weaker = order;
  is_any_weaker = true;
}
bool was_reached(size_t number) {
  const bool was = sites[number].is_reached;
  sites[number].is_reached = false;
  return was;
}
bool is_dropped(uintptr_t at, uintptr_t pc, Site::Op op) {
  return watched != nullptr && !is_quiet && order_at(pc, op, 1, at) == 0;
}

}  // namespace model

using model::here;
using model::note;
using model::watched;

namespace {

uintptr_t as_number(const volatile void* at) { return reinterpret_cast<uintptr_t>(at); }

}  // namespace

#define CALLER reinterpret_cast<uintptr_t>(__builtin_return_address(0))

extern "C" {

#define ATOMICS(bits, T)                                                                                     \
  T __tsan_atomic##bits##_load(const volatile T* at, int order) { return model::load(at, order, CALLER); }   \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int order) {                                     \
    model::change(at, order, 0, model::Site::kStore, "store", CALLER, [&](T& next) {                         \
      next = value;                                                                                          \
      return true;                                                                                           \
    });                                                                                                      \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int order,         \
                                                    int otherwise) {                                         \
    const T wanted = *expected;                                                                              \
    const T found = model::change(at, order, otherwise, model::Site::kChange, "compare and exchange",        \
                                  CALLER, [&](T& next) {                                                     \
                                    const bool is_it = next == wanted;                                       \
                                    if (is_it) next = value;                                                 \
                                    return is_it;                                                            \
                                  });                                                                        \
    *expected = found;                                                                                       \
    return found == wanted;                                                                                  \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int order,           \
                                                  int otherwise)                                             \
      __attribute__((alias("__tsan_atomic" #bits "_compare_exchange_strong")));                              \
  CHANGES(bits, T, exchange, "exchange", value)                                                              \
  CHANGES(bits, T, fetch_add, "add", static_cast<T>(next + value))                                           \
  CHANGES(bits, T, fetch_sub, "subtract", static_cast<T>(next - value))                                      \
  CHANGES(bits, T, fetch_and, "and", static_cast<T>(next & value))                                           \
  CHANGES(bits, T, fetch_or, "or", static_cast<T>(next | value))                                             \
  CHANGES(bits, T, fetch_xor, "xor", static_cast<T>(next ^ value))
#define CHANGES(bits, T, name, what, result)                                                                 \
  T __tsan_atomic##bits##_##name(volatile T* at, T value, int order) {                                       \
    return model::change(at, order, 0, model::Site::kChange, what, CALLER, [&](T& next) {                    \
      next = result;                                                                                         \
      return true;                                                                                           \
    });                                                                                                      \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

#define PLAIN(size)                                                                                          \
  void __tsan_read##size(void* at) { note(as_number(at), size, model::kRead, CALLER); }                      \
  void __tsan_write##size(void* at) { note(as_number(at), size, model::kWrite, CALLER); }                    \
  void __tsan_unaligned_read##size(void* at) { note(as_number(at), size, model::kRead, CALLER); }            \
  void __tsan_unaligned_write##size(void* at) { note(as_number(at), size, model::kWrite, CALLER); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

void __tsan_read_range(void* at, size_t bytes) { note(as_number(at), bytes, model::kRead, CALLER); }
void __tsan_write_range(void* at, size_t bytes) { note(as_number(at), bytes, model::kWrite, CALLER); }
void __tsan_vptr_update(void** at, void*) { note(as_number(at), 8, model::kWrite, CALLER); }
void __tsan_vptr_read(void** at) { note(as_number(at), 8, model::kRead, CALLER); }
void __tsan_init() {}

void __tsan_func_entry(void* caller) {
  if (here != nullptr && here->depth < model::kMostDepth) {
    here->calls[here->depth++] = reinterpret_cast<uintptr_t>(caller);
  }
}
void __tsan_func_exit() {
  if (here != nullptr && here->depth > 0) --here->depth;
}

// Called by the sources in place of functions of the C library.
void* model_memcpy(void* to, const void* from, size_t bytes) {
  note(as_number(from), bytes, model::kRead, CALLER);
  note(as_number(to), bytes, model::kWrite, CALLER);
  return std::memcpy(to, from, bytes);
}
void* model_memmove(void* to, const void* from, size_t bytes) {
  note(as_number(from), bytes, model::kRead, CALLER);
  note(as_number(to), bytes, model::kWrite, CALLER);
  return std::memmove(to, from, bytes);
}
void* model_memset(void* to, int value, size_t bytes) {
  note(as_number(to), bytes, model::kWrite, CALLER);
  return std::memset(to, value, bytes);
}
int model_memcmp(const void* a, const void* b, size_t bytes) {
  note(as_number(a), bytes, model::kRead, CALLER);
  note(as_number(b), bytes, model::kRead, CALLER);
  return std::memcmp(a, b, bytes);
}
size_t model_strlen(const char* text) {
  const size_t bytes = std::strlen(text);
  note(as_number(text), bytes + 1, model::kRead, CALLER);
  return bytes;
}
char* model_strncpy(char* to, const char* from, size_t bytes) {
  note(as_number(from), strnlen(from, bytes), model::kRead, CALLER);
  note(as_number(to), bytes, model::kWrite, CALLER);
  return std::strncpy(to, from, bytes);
}

}  // extern "C"
