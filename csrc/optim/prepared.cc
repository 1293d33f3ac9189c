/* Steps whose arrays are known beforehand: what flashlight_py/tape replays. */

#include "tasks.h"

#include <structmember.h>

#include <vector>

namespace fl::optim {
namespace {

struct Prepared {
  PyObject_HEAD
  PyObject *times, *rule, *scale;
  bool per_position;
  Py_ssize_t states;
  std::vector<Task>* tasks;
};

/* Steps(pieces, times, rule, scale, per_position): each piece is (position, parameter, gradient,
   *states). ValueError where an array does not fit into a kernel. */
PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *pieces, *times, *rule, *scale;
  int per_position;
  if (!PyArg_ParseTuple(args, "O!O!OOp", &PyList_Type, &pieces, &PyList_Type, &times, &rule, &scale,
                        &per_position)) {
    return nullptr;
  }
  Owned self(PyType_GenericAlloc(type, 0));
  if (self == nullptr) return nullptr;
  Prepared* made = reinterpret_cast<Prepared*>(self.get());
  made->tasks = new std::vector<Task>(static_cast<size_t>(PyList_Size(pieces)));
  for (PyObject** each : {&times, &rule, &scale}) Py_INCREF(*each);
  made->times = times;
  made->rule = rule;
  made->scale = scale;
  made->per_position = per_position != 0;
  for (Py_ssize_t i = 0; i < PyList_Size(pieces); ++i) {
    PyObject* piece = PyList_GetItem(pieces, i);
    Task& task = (*made->tasks)[static_cast<size_t>(i)];
    bool fits = PyTuple_Check(piece) && PyTuple_Size(piece) >= 3;
    if (fits) {
      made->states = PyTuple_Size(piece) - 3;
      task.position = PyLong_AsSsize_t(PyTuple_GetItem(piece, 0));
      PyObject *param = PyTuple_GetItem(piece, 1), *grad = PyTuple_GetItem(piece, 2);
      Py_INCREF(param);
      Py_INCREF(grad);
      fits = take_param(Owned(param), &task) && take_grad(Owned(grad), &task, false);
    }
    for (int k = 0; fits && k < made->states; ++k) {
      fits = k < MOST_STATES && take_state(k, PyTuple_GetItem(piece, 3 + k), &task);
    }
    if (!fits && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a piece does not fit");
    if (!fits || PyErr_Occurred()) return nullptr;
  }
  return self.release();
}

PyObject* call(PyObject* self, PyObject*, PyObject*) {
  const Prepared* made = reinterpret_cast<Prepared*>(self);
  const Asking asking{made->times, made->rule, made->scale, made->per_position, made->states};
  const double scale = PyFloat_AsDouble(made->scale);
  if (PyErr_Occurred() || !run_all(made->tasks->data(), made->tasks->size(), asking, scale)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Prepared* made = reinterpret_cast<Prepared*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(made->times);
  Py_VISIT(made->rule);
  Py_VISIT(made->scale);
  return 0;
}

int clear(PyObject* self) {
  Prepared* made = reinterpret_cast<Prepared*>(self);
  Py_CLEAR(made->times);
  Py_CLEAR(made->rule);
  Py_CLEAR(made->scale);
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<Prepared*>(self)->tasks;
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                       {Py_tp_call, reinterpret_cast<void*>(call)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {0, nullptr}};
PyType_Spec spec = {"flashlight_py._native._optim.Steps", sizeof(Prepared), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyObject* steps_type() { return PyType_FromSpec(&spec); }

}  // namespace fl::optim
