#include "program.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "guards.h"

namespace fl::tape {

Slots slots;

namespace {

// From here on, in elements, a step is long enough to let other threads run meanwhile.
constexpr int64_t WORK_WITHOUT_GIL = 100000;

bool read_shape(PyObject* described, std::vector<npy_intp>* to) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(described); ++i) {
    to->push_back(PyLong_AsSsize_t(PyTuple_GetItem(described, i)));
  }
  return PyErr_Occurred() == nullptr;
}

// The array of an argument, borrowed; null: it is none.
PyArrayObject* array_of(PyObject* object, Argument::Kind kind) {
  if (kind == Argument::VARIABLE) {
    if (!slots.is_instance(object) || slots.get(object, Slots::CALC_GRAD) != Py_False) return nullptr;
    object = slots.get(object, Slots::DATA);
  }
  return object != nullptr && PyArray_CheckExact(object) ? reinterpret_cast<PyArrayObject*>(object)
                                                         : nullptr;
}

bool fits_array(const Argument& argument, PyObject* object) {
  PyArrayObject* array = array_of(object, argument.kind);
  if (array == nullptr || PyArray_TYPE(array) != argument.type || !PyArray_ISNOTSWAPPED(array) ||
      static_cast<size_t>(PyArray_NDIM(array)) != argument.shape.size()) {
    return false;
  }
  if (!PyArray_ISCARRAY_RO(array) || PyArray_ISWRITEABLE(array) != argument.is_writeable) return false;
  return argument.shape.empty() ||
         std::memcmp(PyArray_DIMS(array), argument.shape.data(),
                     argument.shape.size() * sizeof(npy_intp)) == 0;
}

}  // namespace

bool Slots::use(PyObject* type, PyObject* offsets) {
  if (PyTuple_Size(offsets) != COUNT) PyErr_SetString(PyExc_ValueError, "another number of slots");
  for (int name = 0; name < COUNT && !PyErr_Occurred(); ++name) {
    offsets_[name] = PyLong_AsSize_t(PyTuple_GetItem(offsets, name));
  }
  type_ = share(type);
  return PyErr_Occurred() == nullptr;
}

void Slots::set(PyObject* variable, Name name, PyObject* value) const {
  PyObject** place = at(variable, name);
  PyObject* before = *place;
  if (before == value) return;
  Py_INCREF(value);
  *place = value;
  Py_XDECREF(before);
}

PyObject* Slots::make(Owned array, PyObject* calc_grad, PyObject* node) const {
  Owned made(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type_.get()), 0));
  if (made == nullptr) return nullptr;
  for (int name = 0; name < COUNT; ++name) set(made.get(), static_cast<Name>(name), Py_None);
  set(made.get(), DATA, array.get());
  set(made.get(), CALC_GRAD, calc_grad);
  set(made.get(), NODE, node);
  return made.release();
}

// (arguments, names, table, instructions, bindings, result, occupied, guards, keep)
std::unique_ptr<Program> Program::read(PyObject* description) {
  PyObject *arguments, *names, *table, *instructions, *bindings, *result, *occupied, *guards, *keep;
  if (!PyArg_ParseTuple(description, "O!O!O!O!O!O!O!OO", &PyTuple_Type, &arguments, &PyTuple_Type, &names,
                        &PyList_Type, &table, &PyList_Type, &instructions, &PyList_Type, &bindings,
                        &PyTuple_Type, &result, &PyList_Type, &occupied, &guards, &keep)) {
    return nullptr;
  }
  auto program = std::make_unique<Program>();
  program->description_ = share(description);
  program->guards_ = guards;
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
    program->names_.push_back(PyTuple_GetItem(names, i));
  }
  const bool read = program->read_arguments(arguments) && program->read_table(table) &&
                    program->read_instructions(instructions) && program->read_bindings(bindings) &&
                    program->read_result(result, &program->result_) && program->read_occupied(occupied);
  return read ? std::move(program) : nullptr;
}

// Each is (kind, type, shape, cell, value, whether it can be written to).
bool Program::read_arguments(PyObject* described) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(described); ++i) {
    PyObject *shape, *value;
    int kind, type, is_writeable;
    Py_ssize_t cell;
    if (!PyArg_ParseTuple(PyTuple_GetItem(described, i), "iiO!nOi", &kind, &type, &PyTuple_Type, &shape,
                          &cell, &value, &is_writeable)) {
      return false;
    }
    arguments_.push_back({static_cast<Argument::Kind>(kind), type, {}, reinterpret_cast<char*>(cell),
                          value, is_writeable != 0});
    if (!read_shape(shape, &arguments_.back().shape)) return false;
  }
  return true;
}

// Each entry is (argument or -1, address or offset).
bool Program::read_table(PyObject* described) {
  for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
    int argument;
    Py_ssize_t where;
    if (!PyArg_ParseTuple(PyList_GetItem(described, i), "in", &argument, &where)) return false;
    table_.push_back(argument < 0 ? reinterpret_cast<char*>(where) : nullptr);
    if (argument < 0) continue;
    const size_t number = static_cast<size_t>(argument);
    if (arguments_[number].cell != nullptr) {
      table_.back() = arguments_[number].cell + where;
    } else {
      places_.push_back({table_.size() - 1, number, where});
    }
  }
  return true;
}

bool Program::read_instructions(PyObject* described) {
  int64_t work = 0;
  for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
    std::unique_ptr<Instruction> instruction = read_instruction(PyList_GetItem(described, i));
    if (instruction == nullptr) return false;
    work += std::max<int64_t>(0, instruction->work());
    instructions_.push_back(std::move(instruction));
  }
  is_large_ = work >= WORK_WITHOUT_GIL;
  return true;
}

// Each is (variable, slot, value).
bool Program::read_bindings(PyObject* described) {
  for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
    PyObject *variable, *value;
    int slot;
    if (!PyArg_ParseTuple(PyList_GetItem(described, i), "OiO", &variable, &slot, &value)) return false;
    bindings_.push_back({variable, value, static_cast<Slots::Name>(slot)});
  }
  return true;
}

// (kind, object, node, at, type, shape, strides or nothing, parts)
bool Program::read_result(PyObject* described, Result* to) {
  PyObject *object, *node, *shape, *strides, *parts;
  int kind;
  if (!PyArg_ParseTuple(described, "iOOiiO!O!O!", &kind, &object, &node, &to->at, &to->type, &PyTuple_Type,
                        &shape, &PyTuple_Type, &strides, &PyTuple_Type, &parts)) {
    return false;
  }
  to->kind = static_cast<Result::Kind>(kind);
  to->object = object;
  to->node = node;
  if (!read_shape(shape, &to->shape) || !read_shape(strides, &to->strides)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(parts); ++i) {
    to->parts.emplace_back();
    if (!read_result(PyTuple_GetItem(parts, i), &to->parts.back())) return false;
  }
  return true;
}

bool Program::read_occupied(PyObject* described) {
  for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(PyList_GetItem(described, i), "nn", &begin, &end)) return false;
    occupied_.push_back({reinterpret_cast<const char*>(begin), reinterpret_cast<const char*>(end)});
  }
  return true;
}

PyObject* Program::given(PyObject* args, PyObject* kwargs, size_t number) const {
  const size_t by_place = arguments_.size() - names_.size();
  if (number < by_place) return PyTuple_GetItem(args, static_cast<Py_ssize_t>(number));
  return PyDict_GetItemWithError(kwargs, names_[number - by_place]);
}

int Program::fits(PyObject* args, PyObject* kwargs) {
  const Py_ssize_t by_name = kwargs == nullptr ? 0 : PyDict_Size(kwargs);
  if (static_cast<size_t>(by_name) != names_.size() ||
      static_cast<size_t>(PyTuple_Size(args) + by_name) != arguments_.size()) {
    return 0;
  }
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    PyObject* object = given(args, kwargs, i);
    if (object == nullptr) return PyErr_Occurred() ? -1 : 0;
    if (argument.kind != Argument::VALUE) {
      if (!fits_array(argument, object)) return 0;
    } else {
      const int same = guards_same(argument.value, object);
      if (same != 1) return same;
    }
  }
  return are_apart(args, kwargs) ? guards_hold(guards_) : 0;
}

// Whether no argument shares memory with another one, or with what the step changes, as when it was
// recorded.
bool Program::are_apart(PyObject* args, PyObject* kwargs) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].kind == Argument::VALUE) continue;
    PyArrayObject* one = array_of(given(args, kwargs, i), arguments_[i].kind);
    const std::pair<const char*, const char*> own(PyArray_BYTES(one),
                                                  PyArray_BYTES(one) + PyArray_NBYTES(one));
    const auto next = std::lower_bound(occupied_.begin(), occupied_.end(), own.second,
                                       [](const auto& each, const char* end) { return each.first < end; });
    if (next != occupied_.begin() && (next - 1)->second > own.first && own.first < own.second) return false;
    for (size_t j = 0; j < i; ++j) {
      if (arguments_[j].kind == Argument::VALUE) continue;
      PyArrayObject* other = array_of(given(args, kwargs, j), arguments_[j].kind);
      const std::less<const char*> before;
      if (before(PyArray_BYTES(one), PyArray_BYTES(other) + PyArray_NBYTES(other)) &&
          before(PyArray_BYTES(other), PyArray_BYTES(one) + PyArray_NBYTES(one))) {
        return false;
      }
    }
  }
  return true;
}

bool Program::set_arguments(PyObject* args, PyObject* kwargs) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (argument.cell == nullptr) continue;
    PyArrayObject* array = array_of(given(args, kwargs, i), argument.kind);
    if (PyArray_ISCARRAY_RO(array)) {
      std::memcpy(argument.cell, PyArray_DATA(array), static_cast<size_t>(PyArray_NBYTES(array)));
      continue;
    }
    Owned packed(PyArray_NewCopy(array, NPY_CORDER));
    if (packed == nullptr) return false;
    array = reinterpret_cast<PyArrayObject*>(packed.get());
    std::memcpy(argument.cell, PyArray_DATA(array), static_cast<size_t>(PyArray_NBYTES(array)));
  }
  for (const Place& place : places_) {
    PyArrayObject* array = array_of(given(args, kwargs, place.argument), arguments_[place.argument].kind);
    table_[place.entry] = PyArray_BYTES(array) + place.offset;
  }
  return true;
}

Outcome Program::run() {
  Outcome outcome = Outcome::done;
  if (!is_large_) {
    for (size_t i = 0; outcome == Outcome::done && i < instructions_.size(); ++i) {
      outcome = instructions_[i]->run(table_.data());
    }
    return outcome;
  }
  PyThreadState* others = nullptr;
  for (const auto& instruction : instructions_) {
    const bool is_native = instruction->work() >= 0;
    if (is_native && others == nullptr) others = PyEval_SaveThread();
    if (!is_native && others != nullptr) {
      PyEval_RestoreThread(others);
      others = nullptr;
    }
    outcome = instruction->run(table_.data());
    if (outcome != Outcome::done) break;
  }
  if (others != nullptr) PyEval_RestoreThread(others);
  return outcome;
}

PyObject* Program::replay(PyObject* args, PyObject* kwargs, bool* is_left) {
  *is_left = false;
  // What is used where it lies must not go while other threads run; and until the result is there,
  // none may begin a replay.
  const Owned kept_args = share(args), kept_kwargs = share(kwargs);
  is_busy_ = true;
  PyObject* result = nullptr;
  if (set_arguments(args, kwargs)) {
    for (const Binding& each : bindings_) slots.set(each.variable, each.slot, each.value);
    Outcome outcome = run();
    if (PyErr_Occurred()) outcome = Outcome::failed;
    *is_left = outcome == Outcome::left;
    if (outcome == Outcome::done) result = build(result_, args, kwargs);
  }
  is_busy_ = false;
  return result;
}

PyObject* Program::build_array(const Result& result) const {
  const int dimensions = static_cast<int>(result.shape.size());
  npy_intp* shape = const_cast<npy_intp*>(result.shape.data());
  if (!result.strides.empty()) {
    Owned there(PyArray_New(&PyArray_Type, dimensions, shape, result.type,
                            const_cast<npy_intp*>(result.strides.data()),
                            table_[static_cast<size_t>(result.at)], 0, 0, nullptr));
    return there == nullptr
               ? nullptr
               : PyArray_NewCopy(reinterpret_cast<PyArrayObject*>(there.get()), NPY_KEEPORDER);
  }
  PyObject* made = PyArray_SimpleNew(dimensions, shape, result.type);
  if (made == nullptr) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(made);
  std::memcpy(PyArray_DATA(array), table_[static_cast<size_t>(result.at)],
              static_cast<size_t>(PyArray_NBYTES(array)));
  return made;
}

PyObject* Program::build(const Result& result, PyObject* args, PyObject* kwargs) const {
  const Py_ssize_t parts = static_cast<Py_ssize_t>(result.parts.size());
  switch (result.kind) {
    case Result::CONSTANT:
      return share(result.object).release();
    case Result::ARGUMENT:
      return share(given(args, kwargs, static_cast<size_t>(result.at))).release();
    case Result::ARRAY:
      return build_array(result);
    case Result::VARIABLE: {
      Owned array(build_array(result));
      return array == nullptr ? nullptr
                              : slots.make(std::move(array), result.object, result.node);
    }
    case Result::NUMBER: {
      Owned array(build_array(result));
      if (array == nullptr) return nullptr;
      PyArrayObject* of_one = reinterpret_cast<PyArrayObject*>(array.get());
      return PyArray_GETITEM(of_one, PyArray_BYTES(of_one));
    }
    case Result::SCALAR: {
      Owned array(build_array(result));
      if (array == nullptr) return nullptr;
      PyArrayObject* of_one = reinterpret_cast<PyArrayObject*>(array.get());
      return PyArray_ToScalar(PyArray_BYTES(of_one), of_one);
    }
    case Result::TUPLE:
    case Result::LIST: {
      const bool is_list = result.kind == Result::LIST;
      Owned made(is_list ? PyList_New(parts) : PyTuple_New(parts));
      for (Py_ssize_t i = 0; made != nullptr && i < parts; ++i) {
        PyObject* part = build(result.parts[static_cast<size_t>(i)], args, kwargs);
        if (part == nullptr) return nullptr;
        if ((is_list ? PyList_SetItem : PyTuple_SetItem)(made.get(), i, part) < 0) return nullptr;
      }
      return made.release();
    }
    case Result::DICT: {
      Owned made(PyDict_New());
      for (Py_ssize_t i = 0; made != nullptr && i < parts; ++i) {
        Owned part(build(result.parts[static_cast<size_t>(i)], args, kwargs));
        PyObject* key = PyTuple_GetItem(result.object, i);
        if (part == nullptr || PyDict_SetItem(made.get(), key, part.get()) < 0) return nullptr;
      }
      return made.release();
    }
  }
  return nullptr;
}

}  // namespace fl::tape
