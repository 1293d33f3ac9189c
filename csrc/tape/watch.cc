// An allocator that records the memory of all NumPy arrays that a thread creates while a step is captured.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "program.h"

namespace fl::tape {
namespace {

// Freed memory may be allocated again. Therefore each block gets a second, unique address, and an array at
// this address represents the block after it is freed. Nothing writes to these addresses; reads give zeros.
// If the reservation of addresses fails, for example under a shell limit, a smaller one is tried. The
// reservation leaves address space for other uses.
constexpr uintptr_t LINE = 64, MOST = uintptr_t(1) << 40, FEWEST = uintptr_t(1) << 28;

uintptr_t reserved() {
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  static void* const begin = [] {
    void* reserved_at = MAP_FAILED;
    for (uintptr_t size = MOST; reserved_at == MAP_FAILED && size >= FEWEST; size /= 4) {
      reserved_at = mmap(nullptr, size, PROT_READ, FLAGS, -1, 0);
    }
    return reserved_at;
  }();
  return begin == MAP_FAILED ? uintptr_t(1) << 62 : reinterpret_cast<uintptr_t>(begin);
}

struct Piece {
  size_t size;
  uintptr_t stand_in_address;
};

class Pieces {
 public:
  explicit Pieces(const PyDataMemAllocator& base) : base_(base) {}

  void* add(void* memory, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (memory != nullptr) {
      alive_[reinterpret_cast<uintptr_t>(memory)] = {size, end_};
      end_ += (size / LINE + 2) * LINE;
    }
    return memory;
  }
  void remove(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    alive_.erase(reinterpret_cast<uintptr_t>(memory));
  }
  // Find the block that contains `address` and the offset in it; false if there is none.
  bool find(uintptr_t address, Piece* piece, uintptr_t* offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = alive_.upper_bound(address);
    if (next == alive_.begin()) return false;
    --next;
    *piece = next->second;
    *offset = address - next->first;
    return *offset < std::max<size_t>(1, piece->size);
  }
  const PyDataMemAllocator& base() const { return base_; }

 private:
  PyDataMemAllocator base_;
  std::mutex mutex_;  // any thread may free arrays
  std::map<uintptr_t, Piece> alive_;
  uintptr_t end_ = reserved();
};

Pieces& pieces_of(void* context) { return *static_cast<Pieces*>(context); }

void* allocate(void* context, size_t size) {
  const PyDataMemAllocator& base = pieces_of(context).base();
  return pieces_of(context).add(base.malloc(base.ctx, size), size);
}

void* allocate_zeros(void* context, size_t count, size_t size) {
  const PyDataMemAllocator& base = pieces_of(context).base();
  return pieces_of(context).add(base.calloc(base.ctx, count, size), count * size);
}

void* reallocate(void* context, void* memory, size_t size) {
  const PyDataMemAllocator& base = pieces_of(context).base();
  pieces_of(context).remove(memory);
  return pieces_of(context).add(base.realloc(base.ctx, memory, size), size);
}

void release(void* context, void* memory, size_t size) {
  const PyDataMemAllocator& base = pieces_of(context).base();
  pieces_of(context).remove(memory);
  base.free(base.ctx, memory, size);
}

// Name that NumPy requires for an allocator's capsule. An array keeps the capsule of its allocator alive.
constexpr char CAPSULE[] = "mem_handler";

struct Handler {
  PyDataMem_Handler handler;
  Pieces pieces;
  Owned base;  // its allocator allocates the pieces
};

Handler* handler_of(PyObject* capsule) {
  return static_cast<Handler*>(PyCapsule_GetPointer(capsule, CAPSULE));
}

}  // namespace

PyObject* new_memory(PyObject*, PyObject*) {
  Owned now(PyDataMem_GetHandler());
  Handler* base = now == nullptr ? nullptr : handler_of(now.get());
  if (base == nullptr) return nullptr;
  auto* handler = new Handler{{"watched", 1, {}}, Pieces(base->handler.allocator), std::move(now)};
  handler->handler.allocator = {&handler->pieces, allocate, allocate_zeros, reallocate, release};
  return PyCapsule_New(handler, CAPSULE, [](PyObject* dead_capsule) { delete handler_of(dead_capsule); });
}

PyObject* use_memory(PyObject*, PyObject* capsule) { return PyDataMem_SetHandler(capsule); }

PyObject* find_memory(PyObject*, PyObject* args) {
  PyObject* capsule;
  PyArrayObject* array;
  if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyArray_Type, &array)) return nullptr;
  Handler* handler = handler_of(capsule);
  if (handler == nullptr) return nullptr;
  Piece piece;
  uintptr_t offset;
  const uintptr_t address = reinterpret_cast<uintptr_t>(PyArray_DATA(array));
  if (!handler->pieces.find(address, &piece, &offset)) Py_RETURN_NONE;
  PyObject* stand_in = array_at(array, reinterpret_cast<char*>(piece.stand_in_address + offset));
  return stand_in == nullptr ? nullptr
                             : Py_BuildValue("LN", static_cast<long long>(piece.stand_in_address), stand_in);
}

}  // namespace fl::tape
