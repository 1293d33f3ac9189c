// What guards consist of.
#pragma once

#include "guards.h"

#include <cstdint>
#include <vector>

namespace fl::tape {

enum Kind { WHOLE, NAMED, ABSENT, LIST, ITEMS, LENGTH, SLOTS, EMPTY, KINDS };

struct Group {
  Kind kind = WHOLE;
  PyObject* held = nullptr;
  PyObject* owner = nullptr;     // null: none
  PyTypeObject* type = nullptr;  // of the owner, or of what is held
  Py_ssize_t dict_at = 0;        // where the owner's memory refers to its dict; 0: not known
  uint64_t version = UINT64_MAX;  // of the dict, when it was last compared
  Py_ssize_t size = -1;
  size_t first = 0, end = 0;  // its values
};

// One value: where it is to be found, and what was there; null for what its group does not have.
struct Value {
  PyObject* now;
  PyObject* key;
  Py_ssize_t position;
};

// Flat, since to follow a pointer per group would take as long as to compare a value.
struct Guards {
  std::vector<Group> groups;
  std::vector<Value> values;
};

// As guards_hold.
int all_hold(Guards& guards);

// Called once, before the first guards.
void know_layouts();

}  // namespace fl::tape
