/* The module: a step that replays its programs, and falls back to Python. */

#define FL_TAPE_MODULE
#include "guards.h"
#include "products.h"
#include "program.h"

#include <structmember.h>

namespace fl::tape {
namespace {

// What Python's Captured is derived from: `programs`, the most recent first; `slow`(args, kwargs) is
// called where none fits, `left`(args, kwargs) where one was left on the way.
struct Step {
  PyObject_HEAD
  PyObject *slow, *left;
  Py_ssize_t replays;  // that were done to the end
  std::vector<std::shared_ptr<Program>>* programs;
};

PyObject* fall_back(PyObject* function, PyObject* args, PyObject* kwargs) {
  PyObject* options = kwargs == nullptr ? Py_None : kwargs;
  return PyObject_CallFunctionObjArgs(function, args, options, nullptr);
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
  Step* step = reinterpret_cast<Step*>(self);
  auto& programs = *step->programs;
  for (size_t i = 0; i < programs.size(); ++i) {
    // Held: whatever runs meanwhile, a garbage collection is enough, may drop it.
    const std::shared_ptr<Program> program = programs[i];
    if (program->is_busy()) return fall_back(step->left, args, kwargs);  // a thread, or from inside
    const int fits = program->fits(args, kwargs);
    if (fits < 0) return nullptr;
    if (fits == 0) continue;
    if (i > 0 && i < programs.size()) std::swap(programs[i], programs[0]);
    bool is_left;
    PyObject* result = program->replay(args, kwargs, &is_left);
    if (is_left) return fall_back(step->left, args, kwargs);
    step->replays += result != nullptr;
    return result;
  }
  return fall_back(step->slow, args, kwargs);
}

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  Step* step = reinterpret_cast<Step*>(self);
  Py_INCREF(Py_None);
  step->slow = Py_None;
  Py_INCREF(Py_None);
  step->left = Py_None;
  step->programs = new std::vector<std::shared_ptr<Program>>();
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Step* step = reinterpret_cast<Step*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(step->slow);
  Py_VISIT(step->left);
  for (const auto& program : *step->programs) {
    if (program.use_count() == 1) Py_VISIT(program->description());  // else it runs
  }
  return 0;
}

int clear(PyObject* self) {
  Step* step = reinterpret_cast<Step*>(self);
  Py_CLEAR(step->slow);
  Py_CLEAR(step->left);
  if (step->programs != nullptr) step->programs->clear();
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<Step*>(self)->programs;
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

/* add(description): the program that is tried first from now on; returns how many instructions it has. */
PyObject* add(PyObject* self, PyObject* description) {
  std::unique_ptr<Program> program = Program::read(description);
  if (program == nullptr) return nullptr;
  const int64_t count = program->instructions();
  auto& programs = *reinterpret_cast<Step*>(self)->programs;
  programs.insert(programs.begin(), std::move(program));
  return PyLong_FromLongLong(count);
}

/* fits(args, kwargs or None): whether there is a program for them, as things are now. */
PyObject* fits(PyObject* self, PyObject* given) {
  PyObject *args, *kwargs;
  if (!PyArg_ParseTuple(given, "O!O", &PyTuple_Type, &args, &kwargs)) return nullptr;
  for (auto& program : *reinterpret_cast<Step*>(self)->programs) {
    const int found = program->fits(args, kwargs == Py_None ? nullptr : kwargs);
    if (found != 0) return found < 0 ? nullptr : PyBool_FromLong(1);
  }
  Py_RETURN_FALSE;
}

/* drop(most): keep that many programs, those that were used last. */
PyObject* drop(PyObject* self, PyObject* most) {
  auto& programs = *reinterpret_cast<Step*>(self)->programs;
  const size_t count = PyLong_AsSize_t(most);
  if (PyErr_Occurred()) return nullptr;
  while (programs.size() > count) programs.pop_back();
  Py_RETURN_NONE;
}

/* use_slots(type, offsets): where the slots of variables lie, in the order of Slots::Name. */
PyObject* use_slots(PyObject*, PyObject* args) {
  PyObject *type, *offsets;
  if (!PyArg_ParseTuple(args, "OO!", &type, &PyTuple_Type, &offsets) || !slots.use(type, offsets)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* hold(PyObject*, PyObject* guards) {
  const int answer = guards_hold(guards);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

PyObject* same(PyObject*, PyObject* args) {
  PyObject *before, *after;
  if (!PyArg_ParseTuple(args, "OO", &before, &after)) return nullptr;
  const int answer = guards_same(before, after);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

PyObject* offset(PyObject*, PyObject* args) {
  PyObject *object, *descriptor, *marker;
  if (!PyArg_ParseTuple(args, "OOO", &object, &descriptor, &marker)) return nullptr;
  const Py_ssize_t found = guards_offset(object, descriptor, marker);
  return found < 0 ? nullptr : PyLong_FromSsize_t(found);
}

/* use_blas(is_long, sgemm, dgemm, sgemv, dgemv, sdot, ddot): addresses. */
PyObject* use_blas(PyObject*, PyObject* args) {
  Py_ssize_t at[6];
  int is_long;
  if (!PyArg_ParseTuple(args, "pnnnnnn", &is_long, &at[0], &at[1], &at[2], &at[3], &at[4], &at[5])) {
    return nullptr;
  }
  for (int i = 0; i < 2; ++i) {
    blas.gemm[i] = reinterpret_cast<void*>(at[i]);
    blas.gemv[i] = reinterpret_cast<void*>(at[2 + i]);
    blas.dot[i] = reinterpret_cast<void*>(at[4 + i]);
  }
  blas.is_long = is_long != 0;
  Py_RETURN_NONE;
}

PyObject* address(PyObject*, PyObject* array) {
  if (PyArray_Check(array)) return PyLong_FromVoidPtr(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)));
  return PyErr_Format(PyExc_TypeError, "address: no array: %R", array);
}

PyObject* bounds(PyObject*, PyObject* object) {
  if (!PyArray_Check(object)) return PyErr_Format(PyExc_TypeError, "bounds: no array: %R", object);
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  const char *low = PyArray_BYTES(array), *high = low;
  if (PyArray_SIZE(array) != 0) {
    for (int i = 0; i < PyArray_NDIM(array); ++i) {
      const npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
      (reach < 0 ? low : high) += reach;
    }
    high += PyArray_ITEMSIZE(array);
  }
  return Py_BuildValue("nn", reinterpret_cast<Py_ssize_t>(low), reinterpret_cast<Py_ssize_t>(high));
}

PyMethodDef step_methods[] = {{"add", add, METH_O, nullptr},
                              {"drop", drop, METH_O, nullptr},
                              {"fits", fits, METH_VARARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyMemberDef step_members[] = {{"slow", T_OBJECT_EX, offsetof(Step, slow), 0, nullptr},
                              {"left", T_OBJECT_EX, offsetof(Step, left), 0, nullptr},
                              {"replays", T_PYSSIZET, offsetof(Step, replays), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                            {Py_tp_call, reinterpret_cast<void*>(call)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                            {Py_tp_methods, step_methods},
                            {Py_tp_members, step_members},
                            {0, nullptr}};
PyType_Spec step_spec = {"flashlight_py._native._tape.Step", sizeof(Step), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, step_slots};

PyMethodDef methods[] = {
    {"address", address, METH_O, "address(array): of its first element."},
    {"bounds", bounds, METH_O, "bounds(array): the addresses between which its elements lie."},
    {"use_slots", use_slots, METH_VARARGS, nullptr},
    {"use_blas", use_blas, METH_VARARGS, nullptr},
    {"guards", guards_new, METH_O, "guards(entries): an object that keeps the state of containers."},
    {"hold", hold, METH_O, "hold(guards): whether all is as it was."},
    {"same", same, METH_VARARGS, "same(before, after): whether two values are the same."},
    {"offset", offset, METH_VARARGS, "offset(object, descriptor, marker): where it is, in bytes."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tape", nullptr, -1,     methods,
                          nullptr,               nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fl::tape

PyMODINIT_FUNC PyInit__tape(void) {
  import_array();
  PyObject* module = PyModule_Create(&fl::tape::definition);
  if (module == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&fl::tape::step_spec);
  if (type == nullptr || PyModule_AddObject(module, "Step", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
