// The object that keeps guards: made from tuples, freed by the garbage collector.

#include "groups.h"

#include <cstring>

namespace {

using namespace fl::tape;

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

struct GuardsObject {
  PyObject_HEAD
  Guards* guards;
};

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

bool refers(PyObject* owner, Py_ssize_t place, PyObject* dict) {
  return std::memcmp(reinterpret_cast<const char*>(owner) + place, &dict, sizeof dict) == 0;
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
  return inside && place % word == 0 && refers(owner, place, dict) ? place : 0;
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
  if (guards_type == nullptr) {
    know_layouts();
    guards_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
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
  return all_hold(*guards);
}
