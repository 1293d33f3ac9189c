/* Objects that were met before, by address, numbered in the order in which they were met. */

#ifndef FL_TREE_MEMO_H
#define FL_TREE_MEMO_H

#include "tree.h"

/* Open addressing; the capacity is a power of two, at least twice the count. */
typedef struct {
  const void **keys;
  uint32_t *numbers;
  size_t capacity, count;
} Memo;

static inline size_t slot_of(const Memo *memo, const void *key) {
  const uint64_t mixed = (uint64_t)(uintptr_t)key * 0x9E3779B97F4A7C15u;
  size_t slot = (size_t)(mixed >> 20) & (memo->capacity - 1);
  while (memo->keys[slot] != NULL && memo->keys[slot] != key) {
    slot = (slot + 1) & (memo->capacity - 1);
  }
  return slot;
}

static inline void free_memo(Memo *memo) {
  free(memo->keys);
  free(memo->numbers);
}

static inline int grow_memo(Memo *memo) {
  Memo larger = {NULL, NULL, memo->capacity ? 4 * memo->capacity : 256, memo->count};
  larger.keys = calloc(larger.capacity, sizeof *larger.keys);
  larger.numbers = malloc(larger.capacity * sizeof *larger.numbers);
  if (larger.keys == NULL || larger.numbers == NULL) {
    free_memo(&larger);
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < memo->capacity; ++i) {
    if (memo->keys[i] == NULL) continue;
    const size_t slot = slot_of(&larger, memo->keys[i]);
    larger.keys[slot] = memo->keys[i];
    larger.numbers[slot] = memo->numbers[i];
  }
  free_memo(memo);
  *memo = larger;
  return 0;
}

/* The object's number where it was met before, -1 where it is new, -2 on failure. */
static inline int64_t meet(Memo *memo, const void *object) {
  if (2 * memo->count >= memo->capacity && grow_memo(memo) < 0) return -2;
  const size_t slot = slot_of(memo, object);
  if (memo->keys[slot] != NULL) return memo->numbers[slot];
  memo->keys[slot] = object;
  memo->numbers[slot] = (uint32_t)memo->count++;
  return -1;
}

#endif
