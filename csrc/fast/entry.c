/* The public verbs: a plain call goes from here to native_call, any other one to the verb's function in Python.

   CPython 3.11 takes 80 ns to begin a function in Python that has keyword-only arguments. */

#include <stddef.h>
#include <string.h>

#include "verbs.h"

#include <structmember.h>

/* What the limited API has from Python 3.12 on. It is the same in the versions before, which do not change. */
enum { HAVE_VECTORCALL = 1 << 11 };
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
typedef PyObject *(*vectorcall)(PyObject *self, PyObject *const *args, size_t count, PyObject *keywords);

/* Places of what a call is given: those of native_call, and behind them the group. */
enum { ONLY_IN_PYTHON, GROUP = 8, PLACES };
enum { MOST_PARAMETERS = 8 };

typedef struct {
  PyObject_HEAD
  PyObject *attributes, *references; /* __dict__ and __weakref__ */
  vectorcall call;
  PyObject *kept;              /* a tuple that has the objects below */
  PyObject *function, *name;
  PyObject *world, *groups;    /* the EntryPoints of the world; the class of groups */
  PyObject *given[PLACES];     /* for arguments that are left out */
  PyObject *names[MOST_PARAMETERS], *defaults[MOST_PARAMETERS];
  int places[MOST_PARAMETERS]; /* ONLY_IN_PYTHON: native code knows nothing but the default */
  Py_ssize_t count, positional; /* parameters */
} entry;

static PyObject *name_collective, *name_fast;

int entry_names(void) {
  name_collective = PyUnicode_InternFromString("collective");
  name_fast = PyUnicode_InternFromString("fast");
  return name_collective && name_fast;
}

/* Put the arguments in their places; 0: the function must do the call, or says what is wrong with it. */
static int read_arguments(const entry *one, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                          PyObject **given) {
  const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  memcpy(given, one->given, sizeof one->given);
  if (count > one->positional) return 0;
  for (Py_ssize_t i = 0; i < count + named; ++i) {
    Py_ssize_t at = i;
    if (i >= count) { /* names are compared by identity, as those in programs are interned */
      PyObject *name = PyTuple_GetItem(keywords, i - count);
      for (at = count; at < one->count && one->names[at] != name;) ++at;
      if (at == one->count) return 0;
    }
    if (one->places[at] != ONLY_IN_PYTHON) {
      given[one->places[at]] = args[i];
    } else if (args[i] != one->defaults[at]) {
      return 0;
    }
  }
  return 1;
}

/* The EntryPoints' native_call of the group, a new reference; NULL where there is none, or with an exception. */
static PyObject *native_of(const entry *one, PyObject *group) {
  PyObject *points = one->world;
  if (group != Py_None) {
    if (!PyType_IsSubtype(Py_TYPE(group), (PyTypeObject *)one->groups)) return NULL;
    points = PyObject_GetAttr(group, name_fast);
    if (points == NULL) return NULL;
  }
  PyObject *native = PyObject_GetAttr(points, name_collective);
  if (group != Py_None) Py_DECREF(points);
  if (native == NULL) return NULL;
  if (PyCFunction_CheckExact(native) && PyCFunction_GetFunction(native) == (PyCFunction)(void (*)(void))native_call) {
    return native;
  }
  Py_DECREF(native);
  return NULL;
}

static PyObject *call_function(const entry *one, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
  const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  PyObject *all = PyTuple_New(count), *options = PyDict_New(), *result = NULL;
  int is_good = all != NULL && options != NULL;
  for (Py_ssize_t i = 0; is_good && i < count; ++i) {
    Py_INCREF(args[i]);
    is_good = PyTuple_SetItem(all, i, args[i]) == 0;
  }
  for (Py_ssize_t i = 0; is_good && i < named; ++i) {
    is_good = PyDict_SetItem(options, PyTuple_GetItem(keywords, i), args[count + i]) == 0;
  }
  if (is_good) result = PyObject_Call(one->function, all, options);
  Py_XDECREF(all);
  Py_XDECREF(options);
  return result;
}

static PyObject *vectorcall_entry(PyObject *self, PyObject *const *args, size_t flags, PyObject *keywords) {
  const entry *one = (const entry *)self;
  const Py_ssize_t count = (Py_ssize_t)(flags & ~ARGUMENTS_OFFSET);
  PyObject *given[PLACES], *native = NULL;
  if (read_arguments(one, args, count, keywords, given)) native = native_of(one, given[GROUP]);
  if (native == NULL) return PyErr_Occurred() ? NULL : call_function(one, args, count, keywords);
  PyObject *const before = called_verb;
  called_verb = one->name;
  PyObject *result = native_call(PyCFunction_GetSelf(native), given, GROUP);
  called_verb = before;
  Py_DECREF(native);
  if (result != Py_NotImplemented) return result;
  Py_DECREF(result);
  return call_function(one, args, count, keywords);
}

static PyObject *call(PyObject *self, PyObject *args, PyObject *options) {
  return PyObject_Call(((entry *)self)->function, args, options);
}

/* As a method it is the function: a class may have it as an attribute. */
static PyObject *bind_method(PyObject *self, PyObject *owner, PyObject *type) {
  PyObject *function = ((entry *)self)->function;
  if (owner != NULL && owner != Py_None) return PyObject_CallMethod(function, "__get__", "OO", owner, type ? type : Py_None);
  Py_INCREF(self);
  return self;
}

static PyObject *show(PyObject *self) { return PyObject_Repr(((entry *)self)->function); }

/* Pickled and copied by name, as functions are. */
static PyObject *reduce(PyObject *self, PyObject *args) {
  (void)args;
  return PyObject_GetAttrString(((entry *)self)->function, "__qualname__");
}

static void free_entry(PyObject *self) {
  entry *one = (entry *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_ClearWeakRefs(self);
  Py_CLEAR(one->attributes);
  Py_CLEAR(one->kept);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* verb(function, name, world, groups, given, ((name, place, default), ...), positional) */
static PyObject *make_entry(PyTypeObject *type, PyObject *args, PyObject *options) {
  (void)options;
  entry *one = (entry *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (one == NULL) return NULL;
  PyObject *given, *parameters, **g = one->given;
  int is_good = PyArg_ParseTuple(args, "OOOO!O!O!n", &one->function, &one->name, &one->world, &PyType_Type,
                                 &one->groups, &PyTuple_Type, &given, &PyTuple_Type, &parameters, &one->positional) &&
                PyArg_ParseTuple(given, "OOOOOOOOO", g, g + 1, g + 2, g + 3, g + 4, g + 5, g + 6, g + 7, g + 8);
  for (; is_good && one->count < PyTuple_Size(parameters); ++one->count) {
    const Py_ssize_t at = one->count;
    is_good = at < MOST_PARAMETERS && PyArg_ParseTuple(PyTuple_GetItem(parameters, at), "OiO", &one->names[at],
                                                       &one->places[at], &one->defaults[at]);
  }
  one->call = vectorcall_entry;
  one->kept = args;
  Py_INCREF(args);
  if (!is_good) Py_CLEAR(one);
  return (PyObject *)one;
}

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
static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, make_entry},
    {Py_tp_dealloc, free_entry},
    {Py_tp_call, call},
    {Py_tp_descr_get, bind_method},
    {Py_tp_repr, show},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};
static PyType_Spec spec = {"flashlight_py._native._fast.verb", sizeof(entry), 0,
                           Py_TPFLAGS_DEFAULT | HAVE_VECTORCALL, slots};

PyObject *entry_type(void) { return PyType_FromSpec(&spec); }
