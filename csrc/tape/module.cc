/* The module: a step that replays its programs and falls back to Python. */

#define FL_MODULE
#include "program.h"

#include <structmember.h>

namespace fl::tape {
namespace {

// Python's Program. `signature`: State.signature at the capture. `stamp`: *structure at the last comparison
// of the signature.
struct ProgramObject {
  PyObject_HEAD
  Program* program;
  PyObject* signature;
  long long stamp;
};

// Base of the Python class Captured. A call replays the first of `programs` that fits, and moves it to the
// front. If none fits, it calls slow(args, kwargs); if it is busy or left, left(args, kwargs).
struct Step {
  PyObject_HEAD
  PyObject *slow, *left, *programs;
  Py_ssize_t replays;  // completed replays
};

Program* program_of(PyObject* object) { return reinterpret_cast<ProgramObject*>(object)->program; }

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  reinterpret_cast<inquiry>(PyType_GetSlot(type, Py_tp_clear))(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* create_program(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *description, *signature;
  long long stamp;
  if (!PyArg_ParseTuple(args, "O!OL", &PyTuple_Type, &description, &signature, &stamp)) return nullptr;
  std::unique_ptr<Program> program = Program::read(description);
  PyObject* self = program == nullptr ? nullptr : PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  ProgramObject* program_self = reinterpret_cast<ProgramObject*>(self);
  program_self->program = program.release();
  program_self->signature = share(signature).release();
  program_self->stamp = stamp;
  return self;
}

int traverse_program(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<ProgramObject*>(self)->signature);
  if (program_of(self) != nullptr) Py_VISIT(program_of(self)->description());
  return 0;
}

int clear_program(PyObject* self) {
  Py_CLEAR(reinterpret_cast<ProgramObject*>(self)->signature);
  delete std::exchange(reinterpret_cast<ProgramObject*>(self)->program, nullptr);
  return 0;
}

/* is_alive(): True if all objects that are arguments exist. */
PyObject* is_alive(PyObject* self, PyObject*) { return PyBool_FromLong(program_of(self)->is_alive()); }

int fits(PyObject* self, PyObject* args, PyObject* kwargs) {
  const ProgramObject* object = reinterpret_cast<ProgramObject*>(self);
  return object->stamp == *structure ? object->program->fits(args, kwargs) : 0;
}

/* fits(args, kwargs or None): True if the program can run with them now. */
PyObject* fits_given(PyObject* self, PyObject* call_args) {
  PyObject *args, *kwargs;
  if (!PyArg_ParseTuple(call_args, "O!O", &PyTuple_Type, &args, &kwargs)) return nullptr;
  const int matches = program_of(self)->is_busy() ? 0 : fits(self, args, kwargs == Py_None ? nullptr : kwargs);
  return matches < 0 ? nullptr : PyBool_FromLong(matches);
}

PyObject* fall_back(PyObject* function, PyObject* args, PyObject* kwargs) {
  return PyObject_CallFunctionObjArgs(function, args, kwargs == nullptr ? Py_None : kwargs, nullptr);
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
  Step* step = reinterpret_cast<Step*>(self);
  const Owned programs = share(step->programs);  // Python code may replace the list meanwhile
  if (programs == nullptr) return PyErr_SetString(PyExc_TypeError, "the step is not initialized"), nullptr;
  for (Py_ssize_t i = 0; i < PyList_Size(programs.get()); ++i) {
    const Owned program_object = share(PyList_GetItem(programs.get(), i));
    Program* program = program_of(program_object.get());
    if (program->is_busy()) return fall_back(step->left, args, kwargs);  // another thread, or recursion
    const int matches = fits(program_object.get(), args, kwargs);
    if (matches < 0) return nullptr;
    if (matches == 0) continue;
    if (i > 0 && (PyList_SetSlice(programs.get(), i, i + 1, nullptr) < 0 ||
                  PyList_Insert(programs.get(), 0, program_object.get()) < 0)) {
      return nullptr;
    }
    bool is_left;
    PyObject* result = program->replay(args, kwargs, &is_left);
    if (is_left) return fall_back(step->left, args, kwargs);
    step->replays += result != nullptr;
    return result;
  }
  return fall_back(step->slow, args, kwargs);
}

int traverse_step(PyObject* self, visitproc visit, void* arg) {
  const Step* step = reinterpret_cast<Step*>(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* member : {step->slow, step->left, step->programs}) Py_VISIT(member);
  return 0;
}

int clear_step(PyObject* self) {
  Step* step = reinterpret_cast<Step*>(self);
  Py_CLEAR(step->slow);
  Py_CLEAR(step->left);
  Py_CLEAR(step->programs);
  return 0;
}

/* use_variables(type, slots, structure): store the type of variables, the descriptors of its slots in the
   order of Slots::Name, and the address of an int64 that is compared with the stamps of programs. */
PyObject* use_variables(PyObject*, PyObject* args) {
  PyObject *type, *descriptors;
  Py_ssize_t address;
  if (!PyArg_ParseTuple(args, "OO!n", &type, &PyTuple_Type, &descriptors, &address)) return nullptr;
  structure = reinterpret_cast<const int64_t*>(address);
  return slots.use(type, descriptors) ? share(Py_None).release() : nullptr;
}

/* use_blas(is_long, sgemm, dgemm, sgemv, dgemv, sdot, ddot): store the addresses of BLAS functions. */
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

/* same(before, after): True if both have one type, are equal, and have the same representation. */
PyObject* same(PyObject*, PyObject* args) {
  PyObject *before, *after;
  if (!PyArg_ParseTuple(args, "OO", &before, &after)) return nullptr;
  const int answer = same_value(before, after);
  return answer < 0 ? nullptr : PyBool_FromLong(answer);
}

/* run(instruction, arrays): run one instruction; its operands are indices into the arrays. */
PyObject* run(PyObject*, PyObject* args) {
  PyObject *described, *arrays;
  if (!PyArg_ParseTuple(args, "OO!", &described, &PyTuple_Type, &arrays)) return nullptr;
  const std::unique_ptr<Instruction> instruction = read_instruction(described);
  std::vector<char*> table;
  const bool is_read = instruction != nullptr && read_each(arrays, [&](PyObject* array) {
    return table.push_back(PyArray_BYTES(reinterpret_cast<PyArrayObject*>(array))), true;
  });
  if (!is_read || instruction->run(table.data()) == Outcome::failed) return nullptr;
  Py_RETURN_NONE;
}

PyObject* has_loop(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8AndSize(name, nullptr);
  return text == nullptr ? nullptr : PyBool_FromLong(own_loop(text) != nullptr);
}

PyObject* address(PyObject*, PyObject* array) {
  if (PyArray_Check(array)) return PyLong_FromVoidPtr(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array)));
  return PyErr_Format(PyExc_TypeError, "address: expected an array, got %R", array);
}

/* at(owner, address, like): return an array like `like` in the memory of `owner`, which it keeps alive. */
PyObject* at(PyObject*, PyObject* args) {
  PyObject *owner, *like;
  Py_ssize_t address;
  if (!PyArg_ParseTuple(args, "OnO!", &owner, &address, &PyArray_Type, &like)) return nullptr;
  Owned array(array_at(reinterpret_cast<PyArrayObject*>(like), reinterpret_cast<char*>(address)));
  if (array == nullptr) return nullptr;
  Py_INCREF(owner);  // the array takes over this reference
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), owner) < 0) return nullptr;
  return array.release();
}

PyMethodDef program_methods[] = {{"fits", caught<fits_given>, METH_VARARGS, nullptr},
                                 {"is_alive", caught<is_alive>, METH_NOARGS, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};
PyMemberDef program_members[] = {
    {"signature", T_OBJECT_EX, offsetof(ProgramObject, signature), READONLY, nullptr},
    {"stamp", T_LONGLONG, offsetof(ProgramObject, stamp), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot program_slots[] = {{Py_tp_new, reinterpret_cast<void*>(caught<create_program>)},
                               {Py_tp_traverse, reinterpret_cast<void*>(traverse_program)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear_program)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                               {Py_tp_methods, program_methods},
                               {Py_tp_members, program_members},
                               {0, nullptr}};
PyType_Spec program_spec = {"flashlight_py._native._tape.Program", sizeof(ProgramObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};

PyMemberDef step_members[] = {{"slow", T_OBJECT_EX, offsetof(Step, slow), 0, nullptr},
                              {"left", T_OBJECT_EX, offsetof(Step, left), 0, nullptr},
                              {"programs", T_OBJECT_EX, offsetof(Step, programs), 0, nullptr},
                              {"replays", T_PYSSIZET, offsetof(Step, replays), 0, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_call, reinterpret_cast<void*>(caught<call>)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse_step)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_step)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                            {Py_tp_members, step_members},
                            {0, nullptr}};
PyType_Spec step_spec = {"flashlight_py._native._tape.Step", sizeof(Step), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, step_slots};

PyMethodDef methods[] = {
    {"address", caught<address>, METH_O, "address(array): return the address of its first element."},
    {"at", caught<at>, METH_VARARGS, "at(owner, address, like): return an array like `like` in owner's memory."},
    {"new_memory", caught<new_memory>, METH_NOARGS, nullptr},
    {"use_memory", caught<use_memory>, METH_O, nullptr},
    {"find_memory", caught<find_memory>, METH_VARARGS, nullptr},
    {"same", caught<same>, METH_VARARGS, nullptr},
    {"run", caught<run>, METH_VARARGS, nullptr},
    {"has_loop", caught<has_loop>, METH_O, "has_loop(name): return whether kernels.cc has this loop."},
    {"use_variables", caught<use_variables>, METH_VARARGS, nullptr},
    {"use_blas", caught<use_blas>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tape", nullptr, -1,     methods,
                          nullptr,               nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fl::tape

PyMODINIT_FUNC PyInit__tape(void) {
  using namespace fl::tape;
  import_array();
  PyObject* module = PyModule_Create(&definition);
  PyObject *program = PyType_FromSpec(&program_spec), *step = PyType_FromSpec(&step_spec);
  if (module == nullptr || program == nullptr || step == nullptr ||
      PyModule_AddObject(module, "Program", program) < 0 || PyModule_AddObject(module, "Step", step) < 0) {
    return nullptr;
  }
  return module;
}
