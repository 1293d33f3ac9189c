/* 64 bits that tell descriptions apart, not against somebody who wants to deceive.

   A sum of words, each mixed with its position: no word waits for another. The mixing is the
   finaliser of MurmurHash3 (Appleby, public domain) with the constants of variant 13 (Stafford). */

#include "tree.h"

#define STEP 0x9E3779B97F4A7C15u

static uint64_t mixed(uint64_t word) {
  word ^= word >> 30;
  word *= 0xBF58476D1CE4E5B9u;
  word ^= word >> 27;
  word *= 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

PyObject *digest(PyObject *module, PyObject *bytes) {
  char *data;
  Py_ssize_t size;
  (void)module;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) < 0) return NULL;
  const size_t words = (size_t)size / 8;
  uint64_t sum = 0, place = 0, word;
  for (size_t i = 0; i < words; ++i) {
    memcpy(&word, data + 8 * i, 8);
    sum += mixed(word + (place += STEP));
  }
  if (size % 8) { /* what is left, as if zeros came after it */
    word = 0;
    memcpy(&word, data + 8 * words, (size_t)size % 8);
    sum += mixed(word + place + STEP);
  }
  return PyLong_FromLongLong((long long)mixed(sum + (uint64_t)size));
}
