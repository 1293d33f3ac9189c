#include "program.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace fl::tape {

Slots slots;
const int64_t* structure;

namespace {

// A step releases the GIL if it processes at least this number of elements.
constexpr int64_t WORK_WITHOUT_GIL = 100000;

PyArrayObject* as_array(const Owned& object) { return reinterpret_cast<PyArrayObject*>(object.get()); }

// Return the array that an argument is or contains; null if there is no array.
Owned array_of(PyObject* object, Argument::Kind kind) {
  Owned array = share(object);
  if (kind == Argument::VARIABLE) {
    if (!slots.is_instance(object) || slots.get(object, Slots::CALC_GRAD).get() != Py_False) return nullptr;
    array = slots.get(object, Slots::DATA);
    if (array == nullptr) PyErr_Clear();
  }
  return array != nullptr && PyArray_CheckExact(array.get()) ? std::move(array) : nullptr;
}

constexpr int FLAGS = NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;  // the compared flags

}  // namespace

Span span_of(PyArrayObject* array) {
  const char *low = PyArray_BYTES(array), *high = low;
  if (PyArray_SIZE(array) == 0) return {low, high};
  for (int i = 0; i < PyArray_NDIM(array); ++i) {
    const npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
    (reach < 0 ? low : high) += reach;
  }
  return {low, high + PyArray_ITEMSIZE(array)};
}

Form::Form(PyArrayObject* array)
    : data(PyArray_BYTES(array)), type(PyArray_TYPE(array)), flags(PyArray_FLAGS(array) & FLAGS) {
  const int dimensions = PyArray_NDIM(array);
  extents.assign(PyArray_DIMS(array), PyArray_DIMS(array) + dimensions);
  extents.insert(extents.end(), PyArray_STRIDES(array), PyArray_STRIDES(array) + dimensions);
}

// True if the array has this form. The stride of a dimension with one element is ignored.
bool Form::fits(PyArrayObject* array) const {
  const size_t dimensions = static_cast<size_t>(PyArray_NDIM(array));
  if (PyArray_TYPE(array) != type || (PyArray_FLAGS(array) & FLAGS) != flags ||
      !PyArray_ISNOTSWAPPED(array) || 2 * dimensions != extents.size() ||
      (data != nullptr && data != PyArray_BYTES(array))) {
    return false;
  }
  const npy_intp *shape = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
  for (size_t i = 0; i < dimensions; ++i) {
    if (shape[i] != extents[i] || (shape[i] > 1 && strides[i] != extents[dimensions + i])) return false;
  }
  return true;
}

bool Slots::use(PyObject* type, PyObject* descriptors) {
  PyTypeObject* kind = nullptr;
  if (PyTuple_Size(descriptors) == COUNT) kind = Py_TYPE(PyTuple_GetItem(descriptors, 0));
  for (Py_ssize_t i = 0; kind != nullptr && i < COUNT; ++i) {
    if (Py_TYPE(PyTuple_GetItem(descriptors, i)) != kind) kind = nullptr;
  }
  if (kind != nullptr) {
    read_ = reinterpret_cast<descrgetfunc>(PyType_GetSlot(kind, Py_tp_descr_get));
    write_ = reinterpret_cast<descrsetfunc>(PyType_GetSlot(kind, Py_tp_descr_set));
  }
  type_ = share(type).release();
  descriptors_ = share(descriptors).release();
  zero_ = PyLong_FromLong(0);
  if (read_ == nullptr || write_ == nullptr) PyErr_SetString(PyExc_TypeError, "expected slot descriptors");
  return PyErr_Occurred() == nullptr;
}

Owned Slots::get(PyObject* variable, Name name) const {
  return Owned(read_(PyTuple_GetItem(descriptors_, name), variable, type_));
}

void Slots::set(PyObject* variable, Name name, PyObject* value) const {
  write_(PyTuple_GetItem(descriptors_, name), variable, value);
}

PyObject* Slots::make(Owned array, PyObject* calc_grad, PyObject* node) const {
  Owned new_object(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type_), 0));
  if (new_object == nullptr) return nullptr;
  for (Name name : {GRAD, HOOK, BUFFER, PLACEMENT}) set(new_object.get(), name, Py_None);
  set(new_object.get(), DATA, array.get());
  set(new_object.get(), NODE, node);
  set(new_object.get(), CHANGED, zero_);
  set(new_object.get(), CALC_GRAD, calc_grad);
  return new_object.release();
}

// True for equal values of one type and representation. 0.0 and -0.0 differ, like (1,) and (True,). NaN
// equals NaN.
int same_value(PyObject* before, PyObject* after) {
  if (before == after) return 1;
  if (Py_TYPE(before) != Py_TYPE(after)) return 0;
  if (PyFloat_CheckExact(before)) {
    const double numbers[] = {PyFloat_AsDouble(before), PyFloat_AsDouble(after)};
    return std::memcmp(&numbers[0], &numbers[1], sizeof(double)) == 0;
  }
  const bool is_written_whole = PyArray_IsScalar(before, Number) || PyComplex_CheckExact(before);
  const int answer = is_written_whole ? 1 : PyObject_RichCompareBool(before, after, Py_EQ);
  if (answer != 1 || PyLong_CheckExact(before) || PyUnicode_CheckExact(before) || PyAnySet_Check(before)) {
    return answer;
  }
  const Owned first(PyObject_Repr(before)), second(PyObject_Repr(after));
  if (first == nullptr || second == nullptr) return -1;
  return PyObject_RichCompareBool(first.get(), second.get(), Py_EQ);
}

// Read (arguments, names, (arrays of the state, names of the function, gradients), table, instructions,
// bindings, result, occupied, keep)
std::unique_ptr<Program> Program::read(PyObject* description) {
  PyObject *arguments{}, *names{}, *state{}, *table{}, *instructions{}, *bindings{}, *result{}, *occupied{};
  PyObject *keep{}, *arrays{}, *names_read{}, *gradients{};
  auto program = std::make_unique<Program>();
  Program& p = *program;
  p.description_ = share(description);
  const bool is_read =
      tape::read(description, 0, &arguments, &names, &state, &table, &instructions, &bindings, &result,
                 &occupied, &keep) &&
      tape::read(state, 0, &arrays, &names_read, &gradients) &&
      read_each(names, [&](PyObject* name) { return p.names_.push_back(name), true; }) &&
      read_each(arguments, [&](PyObject* element) { return p.read_argument(element); }) &&
      read_each(arrays, [&](PyObject* element) {
        PyArrayObject* array = reinterpret_cast<PyArrayObject*>(element);
        return p.state_.push_back({array, Form(array)}), true;
      }) &&
      read_all<&Name::holder, &Name::name, &Name::value, &Name::is_items, &Name::is_number,
               &Name::descriptor>(names_read, &p.names_read_) &&
      read_all<&Binding::variable, &Binding::value>(gradients, &p.gradients_read_) &&
      read_all<&Binding::variable, &Binding::value, &Binding::since>(bindings, &p.bindings_) &&
      read_each(table, [&](PyObject* element) { return p.read_table(element); }) &&
      read_each(instructions, [&](PyObject* element) { return p.read_instruction_of(element); }) &&
      p.read_result(result, &p.result_) && read_all<&Span::first, &Span::second>(occupied, &p.occupied_);
  for (Name& element : p.names_read_) element.prepare();
  return is_read ? std::move(program) : nullptr;
}

// Read (kind, value or an array of the same form, cell or None)
bool Program::read_argument(PyObject* described) {
  arrays_.emplace_back();
  Argument& argument = arguments_.emplace_back();
  if (!tape::read(described, 0, &argument.kind, &argument.value, &argument.cell)) return false;
  if (argument.kind == Argument::ARRAY || argument.kind == Argument::VARIABLE) {
    argument.form = std::make_unique<Form>(reinterpret_cast<PyArrayObject*>(argument.value));
    argument.form->data = nullptr;
  }
  return true;
}

// Read (-1, address), or (number, offset in an array). Numbers count the arguments, then the new arrays.
bool Program::read_table(PyObject* described) {
  int argument;
  intptr_t address;
  if (!tape::read(described, 0, &argument, &address)) return false;
  table_.push_back(argument < 0 ? reinterpret_cast<char*>(address) : nullptr);
  const size_t number = static_cast<size_t>(argument);
  if (argument >= 0 && number < arguments_.size() && arguments_[number].cell != nullptr) {
    table_.back() = PyArray_BYTES(arguments_[number].cell) + address;
  } else if (argument >= 0) {
    argument_entries_.push_back({table_.size() - 1, number, address});
  }
  return true;
}

bool Program::read_instruction_of(PyObject* described) {
  std::unique_ptr<Instruction> instruction = read_instruction(described);
  if (instruction == nullptr) return false;
  work_ += std::max<int64_t>(0, instruction->work());
  may_leave_ |= instruction->may_leave();
  instructions_.push_back(std::move(instruction));
  return true;
}

// Read (kind, object, node, at, like, parts)
bool Program::read_result(PyObject* described, Result* to) {
  PyObject* parts;
  if (!tape::read(described, 0, &to->kind, &to->object, &to->node, &to->at, &to->like, &parts)) return false;
  if (to->at < 0) {
    new_forms_.resize(std::max(new_forms_.size(), static_cast<size_t>(-to->at)));
    new_arrays_.resize(new_forms_.size());
    new_forms_[static_cast<size_t>(-1 - to->at)] = to->like;
  }
  return read_each(parts, [&](PyObject* part) { return read_result(part, &to->parts.emplace_back()); });
}

PyObject* Program::argument_at(PyObject* args, PyObject* kwargs, size_t number) const {
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
  int answer = take_arguments(args, kwargs);
  if (answer == 1) answer = state_is_unchanged();
  if (answer == 1) answer = are_disjoint();
  if (answer != 1) {
    for (Owned& array : arrays_) array.reset();
  }
  return answer;
}

// Return 1 if the arguments fit, else 0; -1: exception. Values are compared before arrays, because comparing
// values may run Python code that changes arrays.
int Program::take_arguments(PyObject* args, PyObject* kwargs) {
  for (const bool is_array : {false, true}) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Argument& argument = arguments_[i];
      if ((argument.form != nullptr) != is_array) continue;
      PyObject* object = argument_at(args, kwargs, i);
      if (object == nullptr) return PyErr_Occurred() ? -1 : 0;
      if (is_array) {
        arrays_[i] = array_of(object, argument.kind);
        if (arrays_[i] == nullptr || !argument.form->fits(as_array(arrays_[i]))) return 0;
      } else if (argument.kind == Argument::OBJECT) {
        if (PyWeakref_GetObject(argument.value) != object) return 0;
      } else if (const int same = same_value(argument.value, object); same != 1) {
        return same;
      }
    }
  }
  return 1;
}

void Program::Name::prepare() {
  is_in_dict = !is_items && PyDict_Check(holder);
  index = !is_items && PySequence_Check(holder) && PyLong_Check(name) ? PyLong_AsSsize_t(name) : -1;
  if (descriptor == Py_None) return;
  read = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
}

int Program::Name::is_as_before() const {
  Owned item;
  if (is_in_dict) {
    item = share(PyDict_GetItemWithError(holder, name));
    if (item == nullptr && PyErr_Occurred()) return -1;
  } else if (read != nullptr) {
    item.reset(read(descriptor, holder, reinterpret_cast<PyObject*>(Py_TYPE(holder))));
  } else if (index >= 0 && PyList_Check(holder)) {
    if (index < PyList_Size(holder)) item = share(PyList_GetItem(holder, index));
  } else if (index >= 0) {
    item.reset(PySequence_GetItem(holder, index));
  } else if (!is_items) {
    item.reset(PyObject_GetAttr(holder, name));
  } else if (PyLong_CheckExact(value)) {
    const Py_ssize_t size = PyObject_Size(holder);
    return size < 0 ? -1 : size == PyLong_AsSsize_t(value);
  } else {
    item = share(holder);
  }
  if (item.get() == value) return 1;
  if (item == nullptr && PyErr_Occurred()) {  // for example a deleted variable of an outer function
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
  }
  return item == nullptr || !is_number ? 0 : same_value(value, item.get());
}

// Return 1 if names have their recorded values and state arrays their recorded memory, else 0; -1: exception.
int Program::state_is_unchanged() const {
  for (const Name& element : names_read_) {
    if (const int same = element.is_as_before(); same != 1) return same;
  }
  for (const Binding& element : gradients_read_) {
    const Owned now = slots.get(element.variable, Slots::GRAD);
    if (now == nullptr) PyErr_Clear();  // the gradient was deleted
    if (now.get() != element.value) return 0;
  }
  for (const State& element : state_) {
    if (!element.form.fits(element.array)) return 0;
  }
  return 1;
}

// True if, as in the recording, no argument overlaps another argument or memory that the step writes.
bool Program::are_disjoint() const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (arrays_[i] == nullptr) continue;
    const Span span = span_of(as_array(arrays_[i]));
    const auto next = std::lower_bound(occupied_.begin(), occupied_.end(), span.second,
                                       [](const Span& element, const char* end) { return element.first < end; });
    if (next != occupied_.begin() && (next - 1)->second > span.first && span.first < span.second) return false;
    for (size_t j = 0; j < i; ++j) {
      if (arrays_[j] == nullptr) continue;
      const Span other = span_of(as_array(arrays_[j]));
      const std::less<const char*> before;
      if (before(span.first, other.second) && before(other.first, span.second)) return false;
    }
  }
  return true;
}

bool Program::is_alive() const {
  for (const Argument& element : arguments_) {
    if (element.kind == Argument::OBJECT && PyWeakref_GetObject(element.value) == Py_None) return false;
  }
  return true;
}

bool Program::set_arguments() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    PyArrayObject* cell = arguments_[i].cell;
    if (cell != nullptr && PyArray_CopyInto(cell, as_array(arrays_[i])) < 0) return false;
  }
  for (size_t i = 0; i < new_forms_.size(); ++i) {
    new_arrays_[i].reset(PyArray_SimpleNew(PyArray_NDIM(new_forms_[i]), PyArray_DIMS(new_forms_[i]),
                                           PyArray_TYPE(new_forms_[i])));
    if (new_arrays_[i] == nullptr) return false;
  }
  for (const ArgumentEntry& slot : argument_entries_) {
    const size_t count = arrays_.size();
    const Owned& array = slot.argument < count ? arrays_[slot.argument] : new_arrays_[slot.argument - count];
    table_[slot.entry] = PyArray_BYTES(as_array(array)) + slot.offset;
  }
  return true;
}

Outcome Program::run(Py_ssize_t* count) {
  Outcome outcome = Outcome::done;
  PyThreadState* thread_state = nullptr;
  for (const auto& instruction : instructions_) {
    const bool is_native = work_ >= WORK_WITHOUT_GIL && instruction->work() >= 0;
    if (is_native && thread_state == nullptr) thread_state = PyEval_SaveThread();
    if (!is_native && thread_state != nullptr) PyEval_RestoreThread(std::exchange(thread_state, nullptr));
    ++*count;
    outcome = instruction->run(table_.data());
    if (outcome != Outcome::done) break;
  }
  if (thread_state != nullptr) PyEval_RestoreThread(thread_state);
  return outcome;
}

PyObject* Program::replay(PyObject* args, PyObject* kwargs, bool* is_left) {
  *is_left = false;
  // Other threads must not free arrays that the replay uses, or replay again before the result exists.
  const Owned kept_args = share(args), kept_kwargs = share(kwargs);
  is_busy_ = true;
  PyObject* result = nullptr;
  std::vector<Owned> before;  // old gradients, restored if the step is left
  if (set_arguments()) {
    for (const Binding& element : bindings_) {
      if (may_leave_) before.push_back(slots.get(element.variable, Slots::GRAD));
      slots.set(element.variable, Slots::GRAD, element.value);
    }
    Py_ssize_t count = 0;
    Outcome outcome = run(&count);
    if (PyErr_Occurred()) outcome = Outcome::failed;
    *is_left = outcome == Outcome::left;
    for (size_t i = 0; outcome != Outcome::done && i < bindings_.size(); ++i) {
      const Binding& element = bindings_[i];
      // After an exception, gradients that were not computed become None: their memory may contain other
      // data.
      const bool is_missing = !*is_left && element.since + 1 >= count;
      if (*is_left || is_missing) {
        slots.set(element.variable, Slots::GRAD, is_missing ? Py_None : before[i].get());
      }
    }
    if (outcome == Outcome::done) result = build(result_, args, kwargs);
  }
  for (Owned& array : arrays_) array.reset();
  for (Owned& element : new_arrays_) element.reset();
  is_busy_ = false;
  return result;
}

PyObject* Program::build_array(const Result& result) {
  if (result.at < 0) return new_arrays_[static_cast<size_t>(-1 - result.at)].release();
  char* from = table_[static_cast<size_t>(result.at)];
  if (!PyArray_IS_C_CONTIGUOUS(result.like)) {
    const Owned view(array_at(result.like, from));
    return view == nullptr ? nullptr : PyArray_NewCopy(as_array(view), NPY_KEEPORDER);
  }
  PyArrayObject* like = result.like;
  Owned new_object(PyArray_SimpleNew(PyArray_NDIM(like), PyArray_DIMS(like), PyArray_TYPE(like)));
  if (new_object == nullptr) return nullptr;
  std::memcpy(PyArray_DATA(as_array(new_object)), from, static_cast<size_t>(PyArray_NBYTES(as_array(new_object))));
  return new_object.release();
}

PyObject* Program::build(const Result& result, PyObject* args, PyObject* kwargs) {
  if (result.kind == Result::CONSTANT) return share(result.object).release();
  if (result.kind == Result::ARGUMENT) {
    return share(argument_at(args, kwargs, static_cast<size_t>(result.at))).release();
  }
  if (result.like != nullptr) {
    Owned array(build_array(result));
    if (array == nullptr || result.kind == Result::ARRAY) return array.release();
    if (result.kind == Result::VARIABLE) return slots.make(std::move(array), result.object, result.node);
    char* number = PyArray_BYTES(as_array(array));
    return result.kind == Result::NUMBER ? PyArray_GETITEM(as_array(array), number)
                                         : PyArray_ToScalar(number, as_array(array));
  }
  const Py_ssize_t count = static_cast<Py_ssize_t>(result.parts.size());
  Owned new_object(result.kind == Result::TUPLE  ? PyTuple_New(count)
             : result.kind == Result::LIST ? PyList_New(count)
                                           : PyDict_New());
  for (Py_ssize_t i = 0; new_object != nullptr && i < count; ++i) {
    Owned part(build(result.parts[static_cast<size_t>(i)], args, kwargs));
    if (part == nullptr) return nullptr;
    if (result.kind == Result::DICT) {
      if (PyDict_SetItem(new_object.get(), PyTuple_GetItem(result.object, i), part.get()) < 0) return nullptr;
    } else if (result.kind == Result::LIST) {
      PyList_SetItem(new_object.get(), i, part.release());
    } else {
      PyTuple_SetItem(new_object.get(), i, part.release());
    }
  }
  return new_object.release();
}

}  // namespace fl::tape
