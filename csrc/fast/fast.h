/* Arrays read by NumPy's C API: what the files of this module share. */
#pragma once

#include <stdint.h>

#include "../common/types.cdef.h"

enum { SHAPE = sizeof((fl_signature *)0)->shape / sizeof(int64_t) };

/* Element size, count and shape of `array`; as describing.py does it. */
static inline void describe_array(PyArrayObject *array, fl_signature *out) {
  const int dims = PyArray_NDIM(array);
  const int shown = dims <= SHAPE ? dims : SHAPE - 1;
  uint64_t hash = 0; /* of the others */
  out->itemsize = (int32_t)PyArray_ITEMSIZE(array);
  out->ndim = dims;
  out->count = 1;
  for (int d = 0; d < dims; ++d) {
    const int64_t extent = PyArray_DIM(array, d);
    out->count *= extent;
    if (d < shown) {
      out->shape[d] = extent;
    } else {
      hash = hash * 1099511628211u + (uint64_t)extent;
    }
  }
  if (shown < dims) out->shape[shown] = (int64_t)(hash & INT64_MAX);
}
