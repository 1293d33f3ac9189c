/* One pass through a tree: its description, its arrays, its numbers and its containers.

   Dicts, lists, tuples, arrays and Python's numbers, of exactly these types, are looked at here;
   whatever else there is, is shown to `look`, a function in Python, which says what it is. */

#include "memo.h"
#include "text.h"
#include "tree.h"

/* What the answers of `look` begin with: flashlight_py/parallel/tree/walk.py. */
enum { NUMBER = 0, ARRAY = 1, GPU_ARRAY = 2, PARTS = 3 };

typedef struct {
  PyObject *look, *key_text, *dtype_text; /* functions in Python */
  PyObject *arrays, *gpu_arrays, *numbers, *nodes, *kept;
  int64_t array_bytes;
  Memo memo;
  Text text;
} Walk;

/* Where a value stands: entry `key` of node `node`, or entry `index` where there is no key. */
typedef struct {
  Py_ssize_t node;
  PyObject *key;
  Py_ssize_t index;
} Place;

static int visit(Walk *w, PyObject *value, Place place);

/* 1 where the object was met before, which has been written down then; 0 where it is new. */
static int met_before(Walk *w, PyObject *object) {
  const int64_t number = meet(&w->memo, object);
  if (number == -1) return 0;
  return number < 0 || put_count(&w->text, 'r', (Py_ssize_t)number) < 0 ? -1 : 1;
}

/* list.append((node, key, object)) */
static int append_record(PyObject *list, Place place, PyObject *object) {
  PyObject *record = place.key != NULL
                         ? Py_BuildValue("nOO", place.node, place.key, object)
                         : Py_BuildValue("nnO", place.node, place.index, object);
  if (record == NULL) return -1;
  const int failed = PyList_Append(list, record);
  Py_DECREF(record);
  return failed;
}

/* Write a container down as a node; returns its number, -1 on failure. */
static Py_ssize_t new_node(Walk *w, PyObject *container, Place place) {
  return append_record(w->nodes, place, container) < 0 ? -1 : PyList_Size(w->nodes) - 1;
}

static int changed_meanwhile(void) {
  PyErr_SetString(PyExc_RuntimeError, "a container of the tree changed during the walk");
  return -1;
}

/* NumPy's names of the types that are called the same everywhere; NULL: ask Python. */
static const char *name_of_type(int type) {
  switch (type) {
    case NPY_BOOL: return "bool";
    case NPY_BYTE: return "int8";
    case NPY_UBYTE: return "uint8";
    case NPY_SHORT: return "int16";
    case NPY_USHORT: return "uint16";
    case NPY_INT: return "int32";
    case NPY_UINT: return "uint32";
    case NPY_LONG: return sizeof(long) == 8 ? "int64" : "int32";
    case NPY_ULONG: return sizeof(long) == 8 ? "uint64" : "uint32";
    case NPY_LONGLONG: return "int64";
    case NPY_ULONGLONG: return "uint64";
    case NPY_HALF: return "float16";
    case NPY_FLOAT: return "float32";
    case NPY_DOUBLE: return "float64";
    case NPY_CFLOAT: return "complex64";
    case NPY_CDOUBLE: return "complex128";
    default: return NULL;
  }
}

static int put_dtype(Walk *w, PyArrayObject *array) {
  const char *name = name_of_type(PyArray_TYPE(array));
  if (name != NULL) return put_chars(&w->text, 'a', name, strlen(name));
  return put_answer(&w->text, 'a', w->dtype_text, (PyObject *)PyArray_DESCR(array));
}

/* `identity` is the object that stands in the tree, `array` has its memory. */
static int visit_array(Walk *w, PyObject *value, PyObject *identity) {
  if (!PyArray_CheckExact(value)) {
    PyErr_SetString(PyExc_TypeError, "expected an array");
    return -1;
  }
  PyArrayObject *array = (PyArrayObject *)value;
  const int seen = met_before(w, identity);
  if (seen) return seen < 0 ? -1 : 0;
  int64_t shape[NPY_MAXDIMS];
  const int dims = PyArray_NDIM(array);
  for (int d = 0; d < dims; ++d) shape[d] = PyArray_DIM(array, d);
  if (put_dtype(w, array) < 0 || put_tag(&w->text, (char)dims) < 0 ||
      put(&w->text, shape, (size_t)dims * sizeof *shape) < 0) {
    return -1;
  }
  w->array_bytes += aligned(PyArray_NBYTES(array));
  return PyList_Append(w->arrays, value);
}

static int visit_number(Walk *w, char tag, PyObject *value, Place place) {
  return put_tag(&w->text, tag) < 0 ? -1 : append_record(w->numbers, place, value);
}

static int put_key(Walk *w, char tag, PyObject *key) {
  if (tag == 'p' || PyUnicode_CheckExact(key)) return put_str(&w->text, tag, key);
  return put_answer(&w->text, 'k', w->key_text, key);
}

static int visit_dict(Walk *w, PyObject *dict, Place place) {
  const int seen = met_before(w, dict);
  if (seen) return seen < 0 ? -1 : 0;
  const Py_ssize_t count = PyDict_Size(dict), node = new_node(w, dict, place);
  if (node < 0 || put_count(&w->text, 'D', count) < 0) return -1;
  PyObject *key, *value;
  Py_ssize_t position = 0, visited = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    const Place entry = {node, key, 0};
    Py_INCREF(key);
    Py_INCREF(value);
    const int failed = put_key(w, 's', key) < 0 || visit(w, value, entry) < 0;
    Py_DECREF(key);
    Py_DECREF(value);
    if (failed) return -1;
    ++visited;
    if (PyDict_Size(dict) != count) return changed_meanwhile();
  }
  return visited == count ? 0 : changed_meanwhile();
}

/* The entries of a list or tuple; `names` (NULL: positions) are of the kind `tag`. */
static int visit_entries(Walk *w, PyObject *entries, Py_ssize_t node, PyObject *names, char tag) {
  const int is_list = PyList_Check(entries);
  const Py_ssize_t count = is_list ? PyList_Size(entries) : PyTuple_Size(entries);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *value = is_list ? PyList_GetItem(entries, i) : PyTuple_GetItem(entries, i);
    if (value == NULL) return -1;
    const Place entry = {node, names == NULL ? NULL : PyList_GetItem(names, i), i};
    if (names != NULL && (entry.key == NULL || put_key(w, tag, entry.key) < 0)) return -1;
    Py_INCREF(value);
    const int failed = visit(w, value, entry);
    Py_DECREF(value);
    if (failed) return -1;
    if (is_list && PyList_Size(entries) != count) return changed_meanwhile();
  }
  return 0;
}

static int visit_list(Walk *w, PyObject *list, Place place) {
  const int seen = met_before(w, list);
  if (seen) return seen < 0 ? -1 : 0;
  const Py_ssize_t node = new_node(w, list, place);
  if (node < 0 || put_count(&w->text, 'L', PyList_Size(list)) < 0) return -1;
  return visit_entries(w, list, node, NULL, 0);
}

/* Equal tuples may be one object on one rank and two on another, so they are not remembered. */
static int visit_tuple(Walk *w, PyObject *tuple, Place place) {
  const Py_ssize_t node = new_node(w, tuple, place);
  if (node < 0 || put_count(&w->text, 'T', PyTuple_Size(tuple)) < 0) return -1;
  return visit_entries(w, tuple, node, NULL, 0);
}

/* (PARTS, tag, class name, names or None, list of parts); the tags are those of a description. */
static int visit_parts(Walk *w, PyObject *value, PyObject *answer, Place place) {
  const char *tag;
  PyObject *kind, *names, *parts;
  int code;
  if (!PyArg_ParseTuple(answer, "isUOO!", &code, &tag, &kind, &names, &PyList_Type, &parts)) {
    return -1;
  }
  const int is_object = *tag == 'O' || *tag == 'N', is_remembered = *tag != 'T' && *tag != 'N';
  const int seen = is_remembered ? met_before(w, value) : 0;
  if (seen) return seen < 0 ? -1 : 0;
  const Py_ssize_t node = new_node(w, value, place);
  if (node < 0 || (is_object && put_str(&w->text, *tag, kind) < 0) ||
      put_count(&w->text, is_object ? '.' : *tag, PyList_Size(parts)) < 0) {
    return -1;
  }
  return visit_entries(w, parts, node, names == Py_None ? NULL : names, is_object ? 'p' : 's');
}

/* None; (NUMBER, description); (ARRAY, array, identity); (GPU_ARRAY, description, array); PARTS */
static int visit_answer(Walk *w, PyObject *value, PyObject *answer, Place place) {
  PyObject *code, *second = NULL, *third = NULL;
  if (answer == Py_None) return put_tag(&w->text, 'x');
  if ((code = PyTuple_GetItem(answer, 0)) == NULL) return -1;
  if (PyLong_AsLong(code) == PARTS) return visit_parts(w, value, answer, place);
  if ((second = PyTuple_GetItem(answer, 1)) == NULL) return -1;
  if (PyLong_AsLong(code) == NUMBER) {
    return put_bytes(&w->text, second) < 0 ? -1 : append_record(w->numbers, place, value);
  }
  if ((third = PyTuple_GetItem(answer, 2)) == NULL) return -1;
  if (PyLong_AsLong(code) == ARRAY) return visit_array(w, second, third);
  const int seen = met_before(w, third);
  if (seen) return seen < 0 ? -1 : 0;
  return put_bytes(&w->text, second) < 0 ? -1 : PyList_Append(w->gpu_arrays, third);
}

/* What was made for the walk is kept until its end, for objects are told by their addresses. */
static int visit_other(Walk *w, PyObject *value, Place place) {
  PyObject *answer = PyObject_CallFunctionObjArgs(w->look, value, NULL);
  if (answer == NULL) return -1;
  const int failed = PyList_Append(w->kept, answer) < 0 || PyList_Append(w->kept, value) < 0 ||
                     visit_answer(w, value, answer, place) < 0;
  Py_DECREF(answer);
  return failed ? -1 : 0;
}

static int visit_container(Walk *w, PyObject *value, Place place) {
  if (Py_EnterRecursiveCall(" while walking through a tree")) return -1;
  const int failed = PyDict_CheckExact(value)    ? visit_dict(w, value, place)
                     : PyList_CheckExact(value)  ? visit_list(w, value, place)
                     : PyTuple_CheckExact(value) ? visit_tuple(w, value, place)
                                                 : visit_other(w, value, place);
  Py_LeaveRecursiveCall();
  return failed;
}

static int visit(Walk *w, PyObject *value, Place place) {
  if (PyArray_CheckExact(value) && PyArray_ISWRITEABLE((PyArrayObject *)value)) {
    return visit_array(w, value, value);
  }
  if (PyFloat_CheckExact(value)) return visit_number(w, 'f', value, place);
  if (PyLong_CheckExact(value)) return visit_number(w, 'i', value, place);
  if (PyBool_Check(value)) return visit_number(w, 'b', value, place);
  if (PyComplex_CheckExact(value)) return visit_number(w, 'c', value, place);
  if (value == Py_None || PyUnicode_CheckExact(value)) return put_tag(&w->text, 'x');
  return visit_container(w, value, place);
}

static int begin(Walk *w) {
  PyObject **lists[] = {&w->arrays, &w->gpu_arrays, &w->numbers, &w->nodes, &w->kept};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i) {
    if ((*lists[i] = PyList_New(0)) == NULL) return -1;
  }
  return 0;
}

static void end(Walk *w) {
  free(w->text.data);
  free_memo(&w->memo);
  Py_XDECREF(w->arrays);
  Py_XDECREF(w->gpu_arrays);
  Py_XDECREF(w->numbers);
  Py_XDECREF(w->nodes);
  Py_XDECREF(w->kept);
}

/* walk(box, look, key_text, dtype_text): `box` is a list with the tree in it, which is node 0.
   Returns (description, arrays, bytes of them, gpu_arrays, numbers, nodes). */
PyObject *walk(PyObject *module, PyObject *args) {
  Walk w = {0};
  PyObject *box, *result = NULL;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!OOO", &PyList_Type, &box, &w.look, &w.key_text, &w.dtype_text)) {
    return NULL;
  }
  const Place nowhere = {-1, NULL, 0};
  if (begin(&w) == 0 && new_node(&w, box, nowhere) == 0 &&
      visit_entries(&w, box, 0, NULL, 0) == 0) {
    result = Py_BuildValue("y#OLOOO", w.text.data, (Py_ssize_t)w.text.size, w.arrays,
                           (long long)w.array_bytes, w.gpu_arrays, w.numbers, w.nodes);
  }
  end(&w);
  return result;
}
