// Kernels of flashlight_py.tagi that replace several NumPy passes over memory. CFFI's code includes this header
// and calls the kernels of the best instruction set by the names in kernels.cdef.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "types.cdef.h"

namespace {

#define FL_KERNELS "csrc/tagi/kernels.inc"
#include "../common/each_set.inc"

const auto fl_tagi_lstm_forward = FL_CHOSEN(fl_tagi_lstm_forward);
const auto fl_tagi_lstm_backward = FL_CHOSEN(fl_tagi_lstm_backward);
const auto fl_tagi_step = FL_CHOSEN(fl_tagi_step);
const auto fl_tagi_patches = FL_CHOSEN(fl_tagi_patches);
const auto fl_tagi_add_patches = FL_CHOSEN(fl_tagi_add_patches);
const auto fl_tagi_sum_windows = FL_CHOSEN(fl_tagi_sum_windows);
const auto fl_tagi_spread_windows = FL_CHOSEN(fl_tagi_spread_windows);
const auto fl_tagi_largest = FL_CHOSEN(fl_tagi_largest);
const auto fl_tagi_spread_taken = FL_CHOSEN(fl_tagi_spread_taken);
const auto fl_tagi_mixture_relu = FL_CHOSEN(fl_tagi_mixture_relu);
const auto fl_tagi_mixture_between = FL_CHOSEN(fl_tagi_mixture_between);
const auto fl_tagi_row_sums = FL_CHOSEN(fl_tagi_row_sums);
const auto fl_tagi_standardize = FL_CHOSEN(fl_tagi_standardize);
const auto fl_tagi_standardize_back = FL_CHOSEN(fl_tagi_standardize_back);
const auto fl_tagi_observe = FL_CHOSEN(fl_tagi_observe);

}  // namespace
