// Guards: what each container held, as flat lists of pointers, compared group by group.
//
// Between two replays hardly anything changes, and then every comparison is of two pointers. What
// takes time is to reach the values, so each container is walked as its kind allows: a whole dict by
// PyDict_Next in order; some of its names by PyDict_Next from the place where each was last time
// (places are indices into the dict's items, and one that is wrong shows another key); attributes
// with slots, cells and functions' parts straight from memory.

#include "guards.h"

#include <cstring>
#include <initializer_list>
#include <vector>

namespace {

enum Kind { WHOLE, NAMED, ABSENT, LIST, ITEMS, LENGTH, SLOTS, EMPTY, KINDS };

// Of each kind: its name, and what its tuple has, in this order: (o)wner, (h)eld container, (k)eys,
// (p)ositions, (v)alues, (s)ize.
struct Form {
  const char* name;
  const char* parts;
};
constexpr Form FORMS[KINDS] = {
    {"whole", "ohkv"}, {"named", "ohkvs"}, {"absent", "hk"},  {"list", "hpvs"},
    {"items", "hv"},   {"length", "hs"},  {"slots", "hpv"},  {"empty", "hp"},
};

struct Group {
  Kind kind = WHOLE;
  PyObject* held = nullptr;
  PyObject* owner = nullptr;      // null: none
  PyTypeObject* type = nullptr;   // of the owner
  Py_ssize_t size = -1;
  size_t count = 0;
  std::vector<PyObject*> keys, values;
  std::vector<Py_ssize_t> positions;
};

struct Guards {
  std::vector<Group> groups;
};

struct GuardsObject {
  PyObject_HEAD
  Guards* guards;
};

// --- comparing

// Whether `now` is what `known` was; then it is remembered.
inline int compare(PyObject*& known, PyObject* now) {
  if (known == now) return 1;
  Py_INCREF(now);  // a comparison must not lose it
  const int answer = guards_same(known, now);
  if (answer != 1) {
    Py_DECREF(now);
    return answer;
  }
  PyObject* before = known;
  known = now;
  Py_DECREF(before);
  return 1;
}

// Whether the dict is still the one that holds the owner's attributes, and its class the same.
inline int is_owned(const Group& group) {
  if (group.owner == nullptr) return 1;
  if (Py_TYPE(group.owner) != group.type) return 0;
  PyObject* now = PyObject_GenericGetDict(group.owner, nullptr);
  if (now == nullptr) return -1;
  Py_DECREF(now);  // the owner has it
  return now == group.held;
}

int whole_holds(Group& group) {
  if (const int owned = is_owned(group); owned != 1) return owned;
  if (PyDict_Size(group.held) != group.size) return 0;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  for (size_t i = 0; i < group.count; ++i) {
    if (!PyDict_Next(group.held, &position, &key, &value)) return 0;
    int answer = 1;
    if (key != group.keys[i]) {
      Py_INCREF(value);
      answer = compare(group.keys[i], key);
      Py_DECREF(value);
    }
    if (answer == 1) answer = compare(group.values[i], value);
    if (answer != 1) return answer;
  }
  return 1;
}

// Look for a name anew, and remember where it is; null: it is not there.
PyObject* find(Group& group, size_t i) {
  Py_ssize_t position = 0, before = 0;
  PyObject *key, *value;
  while (PyDict_Next(group.held, &position, &key, &value)) {
    if (guards_same(group.keys[i], key) == 1) {
      compare(group.keys[i], key);
      group.positions[i] = before;
      return value;
    }
    before = position;
  }
  return nullptr;
}

int named_holds(Group& group) {
  if (const int owned = is_owned(group); owned != 1) return owned;
  if (group.size >= 0 && PyDict_Size(group.held) != group.size) return 0;
  for (size_t i = 0; i < group.count; ++i) {
    Py_ssize_t position = group.positions[i];
    PyObject *key, *value;
    if (!PyDict_Next(group.held, &position, &key, &value) || key != group.keys[i]) {
      value = find(group, i);
      if (value == nullptr) return 0;
    }
    const int answer = compare(group.values[i], value);
    if (answer != 1) return answer;
  }
  return 1;
}

int absent_holds(const Group& group) {
  for (PyObject* key : group.keys) {
    if (PyDict_GetItemWithError(group.held, key) != nullptr) return 0;
    if (PyErr_Occurred()) return -1;
  }
  return 1;
}

int list_holds(Group& group) {
  if (PyList_Size(group.held) != group.size) return 0;
  for (size_t i = 0; i < group.count; ++i) {
    const int answer = compare(group.values[i], PyList_GetItem(group.held, group.positions[i]));
    if (answer != 1) return answer;
  }
  return 1;
}

int items_hold(Group& group) {
  PyObject* iterator = PyObject_GetIter(group.held);
  if (iterator == nullptr) return -1;
  int answer = 1;
  size_t i = 0;
  while (PyObject* item = PyIter_Next(iterator)) {
    answer = i < group.count ? compare(group.values[i++], item) : 0;
    Py_DECREF(item);
    if (answer != 1) break;
  }
  Py_DECREF(iterator);
  if (PyErr_Occurred()) return -1;
  return answer == 1 ? i == group.count : answer;
}

int length_holds(const Group& group) {
  const Py_ssize_t now = PyObject_Size(group.held);
  return now < 0 ? -1 : now == group.size;
}

inline PyObject* at(PyObject* object, Py_ssize_t offset) {
  PyObject* found;
  std::memcpy(&found, reinterpret_cast<const char*>(object) + offset, sizeof found);
  return found;
}

int slots_hold(Group& group) {
  for (size_t i = 0; i < group.count; ++i) {
    PyObject* now = at(group.held, group.positions[i]);
    if (now == group.values[i]) continue;
    const int answer = now == nullptr ? 0 : compare(group.values[i], now);
    if (answer != 1) return answer;
  }
  return 1;
}

int empty_holds(const Group& group) {
  for (const Py_ssize_t offset : group.positions) {
    if (at(group.held, offset) != nullptr) return 0;
  }
  return 1;
}

int holds(Group& group) {
  switch (group.kind) {
    case WHOLE: return whole_holds(group);
    case NAMED: return named_holds(group);
    case ABSENT: return absent_holds(group);
    case LIST: return list_holds(group);
    case ITEMS: return items_hold(group);
    case LENGTH: return length_holds(group);
    case SLOTS: return slots_hold(group);
    default: return empty_holds(group);
  }
}

// --- making and keeping

bool take_objects(PyObject* given, std::vector<PyObject*>* to) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) {
    PyObject* object = PyTuple_GetItem(given, i);
    Py_INCREF(object);
    to->push_back(object);
  }
  return PyErr_Occurred() == nullptr;
}

bool take_numbers(PyObject* given, std::vector<Py_ssize_t>* to) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) {
    to->push_back(PyLong_AsSsize_t(PyTuple_GetItem(given, i)));
  }
  return PyErr_Occurred() == nullptr;
}

bool take_part(char part, PyObject* given, Group* group) {
  switch (part) {
    case 'o':
      if (given == Py_None) return true;
      Py_INCREF(given);
      group->owner = given;
      group->type = Py_TYPE(given);
      Py_INCREF(reinterpret_cast<PyObject*>(group->type));
      return true;
    case 'h':
      Py_INCREF(given);
      group->held = given;
      return true;
    case 'k': return take_objects(given, &group->keys);
    case 'v': return take_objects(given, &group->values);
    case 'p': return take_numbers(given, &group->positions);
    default: group->size = PyLong_AsSsize_t(given); return PyErr_Occurred() == nullptr;
  }
}

bool refuse(const Group& group) {
  PyErr_Format(PyExc_ValueError, "guards: no entry %s of %R with these parts",
               FORMS[group.kind].name, group.held);
  return false;
}

// Whether the parts fit each other and the container; what the loops rely on.
bool check(Group* group) {
  const size_t keys = group->keys.size(), values = group->values.size();
  const size_t positions = group->positions.size();
  switch (group->kind) {
    case WHOLE:
    case NAMED:
      if (!PyDict_Check(group->held) || keys != values) return refuse(*group);
      group->positions.assign(keys, 0);
      if (group->kind == WHOLE) group->size = static_cast<Py_ssize_t>(keys);
      break;
    case ABSENT:
      if (!PyDict_Check(group->held)) return refuse(*group);
      break;
    case LIST:
      if (!PyList_Check(group->held) || positions != values) return refuse(*group);
      for (const Py_ssize_t position : group->positions) {
        if (position < 0 || position >= group->size) return refuse(*group);
      }
      break;
    case SLOTS:
      if (positions != values) return refuse(*group);
      break;
    default: break;
  }
  group->count = values;
  return true;
}

bool take(PyObject* entry, Group* group) {
  PyObject* name = PyTuple_Check(entry) && PyTuple_Size(entry) ? PyTuple_GetItem(entry, 0) : nullptr;
  for (int kind = 0; name != nullptr && kind < KINDS; ++kind) {
    const Form& form = FORMS[kind];
    const Py_ssize_t parts = static_cast<Py_ssize_t>(std::strlen(form.parts));
    if (!PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, form.name) != 0) continue;
    if (PyTuple_Size(entry) != 1 + parts) break;
    group->kind = static_cast<Kind>(kind);
    for (Py_ssize_t i = 0; i < parts; ++i) {
      if (!take_part(form.parts[i], PyTuple_GetItem(entry, 1 + i), group)) return false;
    }
    return check(group);
  }
  PyErr_Format(PyExc_ValueError, "guards: no such entry: %R", entry);
  return false;
}

// Calls `visit` with every reference that the guards keep.
template <typename Visit>
int each(const Guards& guards, Visit visit) {
  for (const Group& group : guards.groups) {
    for (PyObject* object : {group.held, group.owner, reinterpret_cast<PyObject*>(group.type)}) {
      if (object != nullptr) {
        if (const int stop = visit(object)) return stop;
      }
    }
    for (const auto* objects : {&group.keys, &group.values}) {
      for (PyObject* object : *objects) {
        if (const int stop = visit(object)) return stop;
      }
    }
  }
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Guards* guards = reinterpret_cast<GuardsObject*>(self)->guards;
  if (guards == nullptr) return 0;
  return each(*guards, [&](PyObject* object) { return visit(object, arg); });
}

int clear(PyObject* self) {
  Guards* guards = reinterpret_cast<GuardsObject*>(self)->guards;
  reinterpret_cast<GuardsObject*>(self)->guards = nullptr;
  if (guards == nullptr) return 0;
  each(*guards, [](PyObject* object) {
    Py_DECREF(object);
    return 0;
  });
  delete guards;
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {0, nullptr},
};
PyType_Spec spec = {"flashlight_py._native._tape.Guards", sizeof(GuardsObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

PyTypeObject* guards_type;  // made once

}  // namespace

PyObject* guards_new(PyObject*, PyObject* entries) {
  if (guards_type == nullptr) guards_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  PyObject* sequence = guards_type == nullptr ? nullptr : PySequence_Tuple(entries);
  if (sequence == nullptr) return nullptr;
  GuardsObject* self = PyObject_GC_New(GuardsObject, guards_type);
  if (self == nullptr) {
    Py_DECREF(sequence);
    return nullptr;
  }
  self->guards = new Guards;
  self->guards->groups.resize(PyTuple_Size(sequence));
  bool taken = true;
  for (size_t i = 0; taken && i < self->guards->groups.size(); ++i) {
    taken = take(PyTuple_GetItem(sequence, i), &self->guards->groups[i]);
  }
  Py_DECREF(sequence);
  PyObject_GC_Track(self);
  if (!taken) {
    Py_DECREF(reinterpret_cast<PyObject*>(self));
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

int guards_hold(PyObject* object) {
  Guards* guards = Py_TYPE(object) == guards_type ? reinterpret_cast<GuardsObject*>(object)->guards
                                                  : nullptr;
  if (guards == nullptr) {
    PyErr_SetString(PyExc_TypeError, "guards_hold: not what guards_new returned");
    return -1;
  }
  for (Group& group : guards->groups) {
    const int answer = holds(group);
    if (answer != 1) return answer;
  }
  return 1;
}

Py_ssize_t guards_offset(PyObject* object, PyObject* descriptor, PyObject* marker) {
  PyTypeObject* type = Py_TYPE(descriptor);
  auto get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(type, Py_tp_descr_get));
  auto set = reinterpret_cast<descrsetfunc>(PyType_GetSlot(type, Py_tp_descr_set));
  PyObject* basic = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)),
                                           "__basicsize__");
  const Py_ssize_t size = basic == nullptr ? -1 : PyLong_AsSsize_t(basic);
  Py_XDECREF(basic);
  if (get == nullptr || set == nullptr || size < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "guards_offset: no data descriptor");
    return -1;
  }
  PyObject* before = get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
  if (before == nullptr) {  // nothing is there
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) {
      return -1;
    }
    PyErr_Clear();
  }
  if (set(descriptor, object, marker) < 0) {
    Py_XDECREF(before);
    return -1;
  }
  Py_ssize_t found = -1;
  for (Py_ssize_t offset = sizeof(PyObject); offset + Py_ssize_t{sizeof before} <= size;
       offset += sizeof before) {
    if (at(object, offset) == marker) found = offset;
  }
  const int restored = set(descriptor, object, before);
  Py_XDECREF(before);
  if (restored < 0) return -1;
  if (found < 0) PyErr_SetString(PyExc_TypeError, "guards_offset: the attribute is not in memory");
  return found;
}
