// Python state that has to be as it was when a step was recorded.
#pragma once

#include <memory>
#include <vector>

#include "program.h"

namespace fl::tape {

// Values are compared as objects. A number, a text or the like that is another object may still be
// equal; then it is remembered, and the next comparison is quick again.
class Guards {
 public:
  // From a list of (kind, container, key, values), as flashlight_py/tape/reach.py makes it, where
  // `anything` stands for values that are not compared; false with an exception.
  bool read(PyObject* entries, PyObject* anything);

  int hold();  // 1, or 0 where something differs; -1 with an exception

  // Where the contents of a cell are, which the limited API does not tell; false with an exception.
  static bool find_cells();

 private:
  enum Kind { DICT, ITEMS, CELL, GLOBAL, SLOT, LENGTH };
  struct Entry {
    Kind kind;
    Owned container, key;
    std::vector<Owned> values;  // null: anything
    Slots::Name slot;
  };

  int holds(Entry& entry) const;
  int holds_dict(Entry& entry) const;
  static int compare(PyObject* now, Owned& before);

  std::vector<Entry> entries_;
};

}  // namespace fl::tape
