// Allocator for all NumPy arrays that a thread creates after keep_freed(). It reuses large blocks that were
// freed.
//
// Otherwise each result would get new memory, which the kernel clears page by page. In small networks this
// takes as long as the arithmetic. glibc keeps such blocks only with higher thresholds for the whole process.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "../common/numpy.h"
#include "nn.h"

namespace fl::nn {
namespace {

constexpr size_t LEAST = 32 << 10, LIMIT = 32 << 20, LINE = 64, PAGE = 4096;
constexpr size_t HUGE_FROM = 4 << 20;  // same limit as in NumPy, in bytes
constexpr size_t MOST_MAPPED = 16384;  // a process may have 65,530 mappings (vm.max_map_count)

// Header before an array's elements. `start`, `room`: address and bytes of the block, or `room` 0: NumPy's.
struct alignas(16) Header {
  size_t room, size;
  char* start;
};
struct Block {
  char* start;
  size_t room, pass;  // `pass`: number of the backward pass that freed the block
};

Block kept[LIMIT / LEAST];  // sorted by the time of freeing
size_t count = 0, bytes = 0, pass = 0;
std::atomic<size_t> turn = 0, mapped = 0;
// Use only try_lock: in a forked process the mutex may be locked by a thread that does not exist.
std::mutex mutex;
using Lock = std::unique_lock<std::mutex>;

const PyDataMemAllocator& under() {
  static const void* handler = PyCapsule_GetPointer(PyDataMem_DefaultHandler, "mem_handler");
  return static_cast<const PyDataMem_Handler*>(handler)->allocator;
}

Header& header_of(void* array) { return static_cast<Header*>(array)[-1]; }

Block remove(size_t i) {
  const Block block = kept[i];
  std::copy(kept + i + 1, kept + count--, kept + i);
  bytes -= block.room;
  return block;
}

// Return a block of `room` to `room` * 9 / 8 bytes, or null. Set `is_new` if it is new: it contains zeros.
Block take(size_t room, bool* is_new) {
  if (Lock lock(mutex, std::try_to_lock); lock.owns_lock()) {
    for (size_t i = count; i-- > 0;) {
      if (kept[i].room >= room && kept[i].room - room <= room / 8) return remove(i);
    }
  }
  if (mapped >= MOST_MAPPED) return {};
  void* start = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return {};
  ++mapped;
  if (room >= HUGE_FROM) madvise(start, room, MADV_HUGEPAGE);
  *is_new = true;
  return {static_cast<char*>(start), room, 0};
}

void give_back(const Block& block) {
  --mapped;
  if (munmap(block.start, block.room) != 0) madvise(block.start, block.room, MADV_DONTNEED);
}

void keep(char* start, size_t room) {
  Lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock() || room > LIMIT) return give_back({start, room, 0});
  while (bytes + room > LIMIT) give_back(remove(0));
  kept[count++] = {start, room, pass};
  bytes += room;
}

void* allocate_either(size_t size, bool zeros) {
  const size_t total = size + sizeof(Header);
  bool is_new = false;
  const Block block = total < LEAST ? Block{} : take((size + 2 * PAGE - 1) / PAGE * PAGE, &is_new);
  if (block.start == nullptr) {
    void* start = zeros ? under().calloc(under().ctx, 1, total) : under().malloc(under().ctx, total);
    if (start == nullptr) return nullptr;
    *static_cast<Header*>(start) = {0, size, static_cast<char*>(start)};
    return static_cast<Header*>(start) + 1;
  }
  // Vary the offset in the page: arrays at equal offsets would compete for lines of the first-level cache.
  char* array = block.start + LINE * (1 + turn++ % (PAGE / LINE));
  header_of(array) = {block.room, size, block.start};
  return zeros && !is_new ? std::memset(array, 0, size) : array;
}

void* allocate(void*, size_t size) { return allocate_either(size, false); }

void* allocate_zeros(void*, size_t number, size_t size) { return allocate_either(number * size, true); }

void release(void*, void* array, size_t) {
  if (array == nullptr) return;
  const Header header = header_of(array);
  if (header.room != 0) return keep(header.start, header.room);
  under().free(under().ctx, header.start, header.size + sizeof(Header));
}

void* reallocate(void*, void* array, size_t size) {
  void* other = allocate(nullptr, size);
  if (other == nullptr || array == nullptr) return other;
  std::memcpy(other, array, std::min(size, header_of(array).size));
  release(nullptr, array, 0);
  return other;
}

PyDataMem_Handler handler{"flashlight_py", 1, {nullptr, allocate, allocate_zeros, reallocate, release}};

}  // namespace

// Let this thread keep freed blocks, unless the program or a recording has set another allocator.
bool keep_freed() {
  static PyObject* const capsule = PyCapsule_New(&handler, "mem_handler", nullptr);
  PyObject* now = capsule == nullptr ? nullptr : PyDataMem_GetHandler();
  if (now == nullptr) return false;
  PyObject* before = now == PyDataMem_DefaultHandler ? PyDataMem_SetHandler(capsule) : Py_NewRef(now);
  Py_DECREF(now);
  Py_XDECREF(before);
  return before != nullptr;
}

void begin_pass(size_t passes) {
  if (Lock lock(mutex, std::try_to_lock); lock.owns_lock()) {
    ++pass;
    while (count > 0 && kept[0].pass + passes < pass) give_back(remove(0));
  }
}

size_t kept_bytes() { return bytes; }

}  // namespace fl::nn
