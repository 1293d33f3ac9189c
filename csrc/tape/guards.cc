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
  PyObject* owner = nullptr;     // null: none
  PyTypeObject* type = nullptr;  // of the owner, or of what is held
  Py_ssize_t dict_at = 0;        // where the owner's memory refers to its dict; 0: not known
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

inline PyObject* at(PyObject* object, Py_ssize_t offset) {
  PyObject* found;
  std::memcpy(&found, reinterpret_cast<const char*>(object) + offset, sizeof found);
  return found;
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
  if (PyList_Size(group.held) != group.size) return 0;
  for (; value < end; ++value) {
    const int answer = compare(value->now, PyList_GetItem(group.held, value->position));
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

inline int holds(const Group& group, Value* value, Value* end) {
  if (const int owned = is_owned(group); owned != 1) return owned;
  switch (group.kind) {
    case WHOLE: return whole_holds(group, value, end);
    case NAMED: return named_holds(group, value, end);
    case ABSENT: return absent_holds(group, value, end);
    case LIST: return list_holds(group, value, end);
    case ITEMS: return items_hold(group, value, end);
    case LENGTH: return length_holds(group);
    default: return slots_hold(group, value, end);
  }
}

// --- making and keeping

PyObject* referred(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// The values of a group while its tuple is read.
struct Reading {
  Group* group;
  std::vector<Value> values;
};

bool take_part(char part, PyObject* given, Reading* reading) {
  Group* group = reading->group;
  if (part == 'o' && given != Py_None) group->owner = referred(given);
  if (part == 'h') {
    group->held = referred(given);
    group->type = Py_TYPE(group->owner == nullptr ? given : group->owner);
    Py_INCREF(reinterpret_cast<PyObject*>(group->type));
  }
  if (part == 's') group->size = PyLong_AsSsize_t(given);
  if (part == 'o' || part == 'h' || part == 's') return PyErr_Occurred() == nullptr;
  const Py_ssize_t count = PyTuple_Size(given);
  if (count < 0) return false;
  if (reading->values.empty()) reading->values.resize(count, Value{nullptr, nullptr, 0});
  if (static_cast<size_t>(count) != reading->values.size()) {
    PyErr_SetString(PyExc_ValueError, "guards: an entry's tuples have different lengths");
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* one = PyTuple_GetItem(given, i);
    if (part == 'k') reading->values[i].key = referred(one);
    if (part == 'v') reading->values[i].now = referred(one);
    if (part == 'p') reading->values[i].position = PyLong_AsSsize_t(one);
  }
  return PyErr_Occurred() == nullptr;
}

// Where an object refers to its dict, if that can be told: at __dictoffset__, or where the class has
// Py_TPFLAGS_MANAGED_DICT (3.11 and later), which is not in the limited API, a word before what the
// garbage collector has in front of the object. Asking Python takes some ten times as long.
Py_ssize_t place_of_dict(PyObject* owner, PyObject* dict) {
  constexpr unsigned long managed = 1ul << 4;
  constexpr Py_ssize_t word = sizeof(PyObject*);
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(owner));
  Py_ssize_t place = 0;
  if (PyType_GetFlags(Py_TYPE(owner)) & managed) {
    place = -3 * word;
  } else if (PyObject* said = PyObject_GetAttrString(type, "__dictoffset__")) {
    place = PyLong_AsSsize_t(said);
    Py_DECREF(said);
  }
  PyErr_Clear();
  const bool inside = place == -3 * word || place > 0;
  return inside && place % word == 0 && at(owner, place) == dict ? place : 0;
}

// Whether the parts fit the container: what the loops rely on.
bool fits(const Reading& reading) {
  Group* group = reading.group;
  if (group->owner != nullptr) group->dict_at = place_of_dict(group->owner, group->held);
  switch (group->kind) {
    case WHOLE: group->size = static_cast<Py_ssize_t>(reading.values.size()); [[fallthrough]];
    case NAMED:
    case ABSENT: return PyDict_Check(group->held);
    case LIST:
      for (const Value& value : reading.values) {
        if (value.position < 0 || value.position >= group->size) return false;
      }
      return PyList_Check(group->held);
    default: return true;
  }
}

bool take(PyObject* entry, Guards* guards) {
  PyObject* name = PyTuple_Check(entry) && PyTuple_Size(entry) ? PyTuple_GetItem(entry, 0) : Py_None;
  int kind = 0;
  while (kind < KINDS && !(PyUnicode_Check(name) &&
                           PyUnicode_CompareWithASCIIString(name, FORMS[kind].name) == 0)) {
    ++kind;
  }
  const char* parts = kind < KINDS ? FORMS[kind].parts : "";
  bool taken = kind < KINDS && PyTuple_Size(entry) == 1 + static_cast<Py_ssize_t>(std::strlen(parts));
  if (taken) {
    // What was taken is in `guards` at once, which releases it also where something is wrong.
    guards->groups.emplace_back();
    Reading reading{&guards->groups.back(), {}};
    reading.group->kind = static_cast<Kind>(kind);
    for (Py_ssize_t i = 0; taken && parts[i] != 0; ++i) {
      taken = take_part(parts[i], PyTuple_GetItem(entry, 1 + i), &reading);
    }
    taken = taken && fits(reading);
    reading.group->first = guards->values.size();
    guards->values.insert(guards->values.end(), reading.values.begin(), reading.values.end());
    reading.group->end = guards->values.size();
  }
  if (!taken && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "guards: bad entry %R", entry);
  return taken;
}

// Calls `visit` with every reference that the guards keep.
template <typename Visit>
int each(const Guards& guards, Visit visit) {
  int stop = 0;
  const auto one = [&](PyObject* object) {
    if (object != nullptr && stop == 0) stop = visit(object);
  };
  for (const Group& group : guards.groups) {
    one(group.held);
    one(group.owner);
    one(reinterpret_cast<PyObject*>(group.type));
  }
  for (const Value& value : guards.values) {
    one(value.now);
    one(value.key);
  }
  return stop;
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
  bool taken = true;
  for (Py_ssize_t i = 0; taken && i < PyTuple_Size(sequence); ++i) {
    taken = take(PyTuple_GetItem(sequence, i), self->guards);
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
  Value* values = guards->values.data();
  for (const Group& group : guards->groups) {
    const int answer = holds(group, values + group.first, values + group.end);
    if (answer != 1) return answer;
  }
  return 1;
}
