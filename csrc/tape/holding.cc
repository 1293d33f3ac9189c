// Guards: what each container held, as flat lists of pointers, compared group by group.
//
// Between two replays hardly anything changes, and then every comparison is of two pointers. What
// takes time is to reach the values, so each container is walked as its kind allows: a whole dict by
// PyDict_Next in order; some of its names by PyDict_Next from the place where each was last time
// (places are indices into the dict's items, and one that is wrong shows another key); attributes
// with slots, cells and functions' parts straight from memory.

#include "groups.h"

#include <cstring>
#include <utility>

namespace fl::tape {
namespace {

// Whether `now` is what was there before; then it is remembered.
inline int compare(PyObject*& before, PyObject* now) {
  if (before == now) return 1;
  Py_INCREF(now);  // a comparison must not lose it
  const int answer = guards_same(before, now);
  PyObject* left = now;
  if (answer == 1) std::swap(before, left);
  Py_DECREF(left);
  return answer;
}

inline PyObject* at(PyObject* object, Py_ssize_t offset) {
  PyObject* found;
  std::memcpy(&found, reinterpret_cast<const char*>(object) + offset, sizeof found);
  return found;
}

// What lies where in objects of those versions of Python that are known, besides the limited API: a
// comparison of 15 attributes takes 100 ns by PyDict_Next, and 2 by the number that dicts have up to
// 3.12 (PEP 509), which is another one after every change. Later versions are asked item by item.
struct Known {
  bool versions = false;  // PyDictObject: ma_used, ma_version_tag
  bool lists = false;     // PyListObject: ob_size, ob_item
} known;

}  // namespace

void know_layouts() {
  PyObject* said = PySys_GetObject("hexversion");
  const long version = said == nullptr ? 0 : PyLong_AsLong(said);
  known.versions = version >= 0x030A0000 && version < 0x030D0000;
  known.lists = version >= 0x030A0000 && version < 0x030F0000;
}

namespace {

inline uint64_t version_of(PyObject* dict) {
  uint64_t found;
  std::memcpy(&found, reinterpret_cast<const char*>(dict) + sizeof(PyObject) + sizeof(Py_ssize_t),
              sizeof found);
  return found;
}

inline PyObject** items_of(PyObject* list) {
  return reinterpret_cast<PyObject**>(at(list, sizeof(PyVarObject)));
}

// Whether the dict is still the one that holds the owner's attributes, and its class the same.
inline int is_owned(const Group& group) {
  if (group.owner == nullptr) return 1;
  if (Py_TYPE(group.owner) != group.type) return 0;
  if (group.dict_at != 0) return at(group.owner, group.dict_at) == group.held;
  PyObject* now = PyObject_GenericGetDict(group.owner, nullptr);
  if (now == nullptr) return -1;
  Py_DECREF(now);  // the owner has it
  return now == group.held;
}

int whole_holds(const Group& group, Value* value, Value* end) {
  if (PyDict_Size(group.held) != group.size) return 0;
  Py_ssize_t position = 0;
  PyObject *key, *now;
  for (; value < end; ++value) {
    if (!PyDict_Next(group.held, &position, &key, &now)) return 0;
    if (value->key == key && value->now == now) continue;
    Py_INCREF(key);
    int answer = compare(value->now, now);
    if (answer == 1) answer = compare(value->key, key);
    Py_DECREF(key);
    if (answer != 1) return answer;
  }
  return 1;
}

// Look for a name anew, and remember where it is; null: it is not there.
PyObject* find(const Group& group, Value* value) {
  Py_ssize_t position = 0, before = 0;
  PyObject *key, *now;
  while (PyDict_Next(group.held, &position, &key, &now)) {
    if (guards_same(value->key, key) == 1) {
      compare(value->key, key);
      value->position = before;
      return now;
    }
    before = position;
  }
  return nullptr;
}

int named_holds(const Group& group, Value* value, Value* end) {
  if (group.size >= 0 && PyDict_Size(group.held) != group.size) return 0;
  for (; value < end; ++value) {
    Py_ssize_t position = value->position;
    PyObject *key, *now;
    if (!PyDict_Next(group.held, &position, &key, &now) || key != value->key) {
      now = find(group, value);
      if (now == nullptr) return 0;
    }
    const int answer = compare(value->now, now);
    if (answer != 1) return answer;
  }
  return 1;
}

int absent_holds(const Group& group, const Value* value, const Value* end) {
  for (; value < end; ++value) {
    if (PyDict_GetItemWithError(group.held, value->key) != nullptr) return 0;
    if (PyErr_Occurred()) return -1;
  }
  return 1;
}

int list_holds(const Group& group, Value* value, Value* end) {
  if (Py_SIZE(group.held) != group.size) return 0;
  for (; value < end; ++value) {
    PyObject* now = known.lists ? items_of(group.held)[value->position]
                                : PyList_GetItem(group.held, value->position);
    const int answer = compare(value->now, now);
    if (answer != 1) return answer;
  }
  return 1;
}

int items_hold(const Group& group, Value* value, Value* end) {
  PyObject* iterator = PyObject_GetIter(group.held);
  if (iterator == nullptr) return -1;
  int answer = 1;
  while (PyObject* item = answer == 1 ? PyIter_Next(iterator) : nullptr) {
    answer = value < end ? compare((value++)->now, item) : 0;
    Py_DECREF(item);
  }
  Py_DECREF(iterator);
  if (PyErr_Occurred()) return -1;
  return answer == 1 ? value == end : answer;
}

int length_holds(const Group& group) {
  const Py_ssize_t now = PyObject_Size(group.held);
  return now < 0 ? -1 : now == group.size;
}

int slots_hold(const Group& group, Value* value, Value* end) {
  if (Py_TYPE(group.held) != group.type) return 0;
  for (; value < end; ++value) {
    PyObject* now = at(group.held, value->position);
    if (now == value->now) continue;
    // null, for what is empty, is like itself alone
    const int answer = now == nullptr || value->now == nullptr ? 0 : compare(value->now, now);
    if (answer != 1) return answer;
  }
  return 1;
}

int dict_holds(Group& group, Value* value, Value* end) {
  const uint64_t version = known.versions ? version_of(group.held) : UINT64_MAX;
  if (known.versions && version == group.version) return 1;
  const int answer = group.kind == WHOLE   ? whole_holds(group, value, end)
                     : group.kind == NAMED ? named_holds(group, value, end)
                                           : absent_holds(group, value, end);
  if (answer == 1) group.version = version;
  return answer;
}

inline int holds(Group& group, Value* value, Value* end) {
  if (const int owned = is_owned(group); owned != 1) return owned;
  switch (group.kind) {
    case WHOLE:
    case NAMED:
    case ABSENT: return dict_holds(group, value, end);
    case LIST: return list_holds(group, value, end);
    case ITEMS: return items_hold(group, value, end);
    case LENGTH: return length_holds(group);
    default: return slots_hold(group, value, end);
  }
}

}  // namespace

int all_hold(Guards& guards) {
  Value* values = guards.values.data();
  for (Group& group : guards.groups) {
    const int answer = holds(group, values + group.first, values + group.end);
    if (answer != 1) return answer;
  }
  return 1;
}

}  // namespace fl::tape
