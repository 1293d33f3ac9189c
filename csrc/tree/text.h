/* The description of a tree, which grows while the tree is walked through. */

#ifndef FL_TREE_TEXT_H
#define FL_TREE_TEXT_H

#include "tree.h"

typedef struct {
  char *data;
  size_t size, room;
} Text;

static inline int put(Text *text, const void *data, size_t size) {
  if (text->size + size > text->room) {
    const size_t room = 2 * (text->size + size) + 1024;
    char *larger = realloc(text->data, room);
    if (larger == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    text->data = larger;
    text->room = room;
  }
  memcpy(text->data + text->size, data, size);
  text->size += size;
  return 0;
}

static inline int put_tag(Text *text, char tag) { return put(text, &tag, 1); }

static inline int put_count(Text *text, char tag, Py_ssize_t count) {
  char head[5];
  const uint32_t narrow = (uint32_t)count;
  if (narrow != (size_t)count) {
    PyErr_SetString(PyExc_OverflowError, "a container has 2**32 entries or more");
    return -1;
  }
  head[0] = tag;
  memcpy(head + 1, &narrow, 4);
  return put(text, head, 5);
}

static inline int put_chars(Text *text, char tag, const char *data, size_t size) {
  return put_count(text, tag, (Py_ssize_t)size) < 0 ? -1 : put(text, data, size);
}

static inline int put_str(Text *text, char tag, PyObject *str) {
  Py_ssize_t size;
  const char *data = PyUnicode_AsUTF8AndSize(str, &size);
  return data == NULL ? -1 : put_chars(text, tag, data, (size_t)size);
}

static inline int put_bytes(Text *text, PyObject *bytes) {
  char *data;
  Py_ssize_t size;
  return PyBytes_AsStringAndSize(bytes, &data, &size) < 0 ? -1 : put(text, data, (size_t)size);
}

/* Write what `function` calls `object`. */
static inline int put_answer(Text *text, char tag, PyObject *function, PyObject *object) {
  PyObject *answer = PyObject_CallFunctionObjArgs(function, object, NULL);
  if (answer == NULL) return -1;
  const int failed = put_str(text, tag, answer);
  Py_DECREF(answer);
  return failed;
}

#endif
