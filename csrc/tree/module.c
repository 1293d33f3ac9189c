/* Walks through trees of containers and packs their arrays, for fl.synchronize().

   From Python it takes 3 us to look at an array and 2 us to copy it, and a model has hundreds.
   flashlight_py/parallel/tree says what these functions do, and does the same in Python where this
   module is missing; a test compares the two. */

#define FL_TREE_IMPORTS_NUMPY
#include "tree.h"

static PyMethodDef methods[] = {{"walk", walk, METH_VARARGS, NULL},
                                {"pack", pack, METH_VARARGS, NULL},
                                {"unpack", unpack, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tree", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tree(void) {
  import_array();
  return PyModule_Create(&definition);
}
