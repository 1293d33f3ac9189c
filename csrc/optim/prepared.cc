/* Steps on arrays that are known beforehand, for replays of captured steps. */

#include "tasks.h"

namespace fl::optim {
namespace {

constexpr const char* NAME = "flashlight_py._native._optim.Steps";

struct Prepared {
  Source source;
  std::vector<Task> tasks;
};

bool take_piece(PyObject* piece, const Source& source, Task* task) {
  const int states = source.fields.rule->states;
  if (!PyTuple_Check(piece) || PyTuple_Size(piece) != 3 + states) return false;
  task->position = PyLong_AsSsize_t(PyTuple_GetItem(piece, 0));
  return task->position >= 0 && task->position < source.params && take_arrays(piece, states, task);
}

PyObject* take_steps(PyObject* capsule, PyObject*) {
  const Prepared* prepared = static_cast<Prepared*>(PyCapsule_GetPointer(capsule, NAME));
  if (prepared == nullptr || !run_all(prepared->tasks, prepared->source)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef taking = {"steps", take_steps, METH_NOARGS, nullptr};

void destroy(PyObject* capsule) {
  delete static_cast<Prepared*>(PyCapsule_GetPointer(capsule, NAME));
}

}  // namespace

/* Steps(pieces, lr, counts, norms, rule, scale): return a function that updates `pieces`, each (position,
   parameter, gradient, *states), without Python code. It keeps the arrays alive; the caller must keep their
   addresses fixed. ValueError if a kernel does not support a piece. */
PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyList_Check(args[0])) {
    return PyErr_Format(PyExc_TypeError, "Steps(pieces, lr, counts, norms, rule, scale)");
  }
  auto prepared = std::make_unique<Prepared>();
  if (!read_source(args + 1, &prepared->source)) return nullptr;
  prepared->tasks.resize(static_cast<size_t>(PyList_Size(args[0])));
  for (size_t i = 0; i < prepared->tasks.size(); ++i) {
    PyObject* piece = PyList_GetItem(args[0], static_cast<Py_ssize_t>(i));
    if (!take_piece(piece, prepared->source, &prepared->tasks[i])) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a piece does not fit the rule or its arrays");
      return nullptr;
    }
  }
  Owned capsule(PyCapsule_New(prepared.get(), NAME, destroy));
  if (capsule == nullptr) return nullptr;
  prepared.release();
  return PyCFunction_New(&taking, capsule.get());
}

}  // namespace fl::optim
