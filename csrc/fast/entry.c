/* The public verbs. A plain call goes directly to native_call, any other call to the verb's Python function.

   CPython 3.11 takes 80 ns to enter a Python function with keyword-only arguments. */

#include <stddef.h>
#include <string.h>

#include "verbs.h"
#include <structmember.h>

/* These names are in the limited API from Python 3.12 on. Their values are the same in earlier versions. */
enum { HAVE_VECTORCALL = 1 << 11 };
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
typedef PyObject *(*vectorcall)(PyObject *self, PyObject *const *args, size_t count, PyObject *keywords);

/* Indices of arguments. 1 to 7 are the arguments of native_call after the verb; for native_sendrecv, 1 to PAIR
   are all arguments. GROUP is the group. ONLY_IN_PYTHON marks an argument that only Python handles. */
enum { ONLY_IN_PYTHON, PAIR = 6, GROUP = 8, PLACES, MOST_PARAMETERS = 8 };

/* A parameter. `place`: index of its argument. If ONLY_IN_PYTHON, native code only allows `fallback`. */
typedef struct {
  PyObject *name, *fallback;
  int place;
} parameter;

typedef struct {
  PyObject_HEAD
  PyObject *attributes, *references; /* __dict__ and __weakref__ */
  vectorcall call;
  PyObject *(*native)(PyObject *, PyObject *const *, Py_ssize_t); /* native_call or native_sendrecv */
  PyObject *kept; /* tuple that keeps the objects below alive */
  PyObject *function, *name;
  PyObject *points, *world, *groups; /* attribute of EntryPoints; EntryPoints of the world; class of groups */
  PyObject *arguments[PLACES];       /* values of omitted arguments */
  parameter parameters[MOST_PARAMETERS];
  Py_ssize_t count, positional; /* parameters */
} entry;

static PyObject *name_fast;

/* Store the arguments in their slots; 0: the Python function must handle the call or raise the error. */
static int read_arguments(const entry *verb, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                          PyObject **arguments) {
  const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  memcpy(arguments, verb->arguments, sizeof verb->arguments);
  if (count > verb->positional) return 0;
  for (Py_ssize_t i = 0; i < count + named; ++i) {
    Py_ssize_t at = i;
    if (i >= count) { /* names are compared by identity, because names in programs are interned */
      PyObject *name = PyTuple_GetItem(keywords, i - count);
      for (at = count; at < verb->count && verb->parameters[at].name != name;) ++at;
      if (at == verb->count) return 0;
    }
    const parameter *target = &verb->parameters[at];
    if (target->place == ONLY_IN_PYTHON && args[i] != target->fallback) return 0;
    if (target->place != ONLY_IN_PYTHON) arguments[target->place] = args[i];
  }
  return 1;
}

/* Return the native function of the group, a new reference; NULL if it has none, or with an exception. */
static PyObject *native_of(const entry *verb, PyObject *group) {
  const int is_world = group == Py_None;
  if (!is_world && !PyType_IsSubtype(Py_TYPE(group), (PyTypeObject *)verb->groups)) return NULL;
  PyObject *fast = is_world ? verb->world : PyObject_GetAttr(group, name_fast);
  PyObject *native = fast == NULL ? NULL : PyObject_GetAttr(fast, verb->points);
  if (!is_world) Py_XDECREF(fast);
  const int is_native = native != NULL && PyCFunction_CheckExact(native) &&
                        PyCFunction_GetFunction(native) == (PyCFunction)(void (*)(void))verb->native;
  if (!is_native) Py_CLEAR(native);
  return native;
}

PyObject *call_function(PyObject *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
  const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  PyObject *all = PyTuple_New(count), *options = PyDict_New(), *result = NULL;
  int is_good = all != NULL && options != NULL;
  for (Py_ssize_t i = 0; is_good && i < count; ++i) {
    is_good = PyTuple_SetItem(all, i, Py_NewRef(args[i])) == 0;
  }
  for (Py_ssize_t i = 0; is_good && i < named; ++i) {
    is_good = PyDict_SetItem(options, PyTuple_GetItem(keywords, i), args[count + i]) == 0;
  }
  if (is_good) result = PyObject_Call(function, all, options);
  Py_XDECREF(all);
  Py_XDECREF(options);
  return result;
}

static PyObject *call_entry(PyObject *self, PyObject *const *args, size_t flags, PyObject *keywords) {
  const entry *verb = (const entry *)self;
  const Py_ssize_t count = (Py_ssize_t)(flags & ~ARGUMENTS_OFFSET);
  PyObject *arguments[PLACES], *native = NULL, *result = Py_NotImplemented;
  if (read_arguments(verb, args, count, keywords, arguments)) native = native_of(verb, arguments[GROUP]);
  if (native != NULL) {
    PyObject *const before = called_verb;
    called_verb = verb->name;
    const int is_pair = verb->native == native_sendrecv;
    result = verb->native(PyCFunction_GetSelf(native), arguments + is_pair, is_pair ? PAIR : GROUP);
    called_verb = before;
    Py_DECREF(native);
    if (result != NULL && PyTuple_CheckExact(result)) { /* from native_several: (Work, arrays to unpack at the end) */
      PyObject *const started = result;
      result = PyObject_CallMethod(self, "finish", "OOO", started, arguments[1], arguments[GROUP]);
      Py_DECREF(started);
    }
    if (result != Py_NotImplemented) return result;
    Py_DECREF(result);
  }
  return PyErr_Occurred() ? NULL : call_function(verb->function, args, count, keywords);
}

static PyObject *call(PyObject *self, PyObject *args, PyObject *options) {
  return PyObject_Call(((entry *)self)->function, args, options);
}

static void free_entry(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_ClearWeakRefs(self);
  Py_CLEAR(((entry *)self)->attributes);
  Py_CLEAR(((entry *)self)->kept);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* verb(function, name, name in EntryPoints, world, groups, given, ((name, place, default), ...), positional) */
static PyObject *make_entry(PyTypeObject *type, PyObject *args, PyObject *options) {
  (void)options;
  entry *verb = (entry *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (verb == NULL) return NULL;
  PyObject *arguments, *parameters, **g = verb->arguments;
  verb->call = call_entry;
  verb->kept = Py_NewRef(args);
  int is_good = PyArg_ParseTuple(args, "OOOOO!O!O!n", &verb->function, &verb->name, &verb->points, &verb->world,
                                 &PyType_Type, &verb->groups, &PyTuple_Type, &arguments, &PyTuple_Type, &parameters,
                                 &verb->positional) &&
                PyArg_ParseTuple(arguments, "OOOOOOOOO", g, g + 1, g + 2, g + 3, g + 4, g + 5, g + 6, g + 7, g + 8);
  for (; is_good && verb->count < PyTuple_Size(parameters); ++verb->count) {
    parameter *target = &verb->parameters[verb->count];
    PyObject *described = PyTuple_GetItem(parameters, verb->count);
    is_good = verb->count < MOST_PARAMETERS && PyArg_ParseTuple(described, "OiO", &target->name, &target->place,
                                                                &target->fallback);
  }
  verb->native = is_good && PyLong_AsLong(g[0]) == FL_SENDRECV ? native_sendrecv : native_call;
  if (!is_good) Py_CLEAR(verb);
  return (PyObject *)verb;
}

PyObject *entry_type(void) {
  static PyMemberDef members[] = {
      {"__dictoffset__", T_PYSSIZET, offsetof(entry, attributes), READONLY, NULL},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(entry, references), READONLY, NULL},
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(entry, call), READONLY, NULL},
      {NULL, 0, 0, 0, NULL},
  };
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
      {NULL, NULL, NULL, NULL, NULL},
  };
  static PyType_Slot slots[] = {{Py_tp_new, make_entry},   {Py_tp_dealloc, free_entry},  {Py_tp_call, call},
                                {Py_tp_members, members}, {Py_tp_getset, attributes}, {0, NULL}};
  static PyType_Spec spec = {"flashlight_py._native._fast.verb", sizeof(entry), 0,
                             Py_TPFLAGS_DEFAULT | HAVE_VECTORCALL, slots};
  name_fast = PyUnicode_InternFromString("fast");
  return name_fast == NULL ? NULL : PyType_FromSpec(&spec);
}
