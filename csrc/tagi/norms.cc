#include <cstddef>

#include "tagi.h"

namespace fl::tagi::norms {
namespace {
#define FL_KERNELS "csrc/tagi/norms.inc"
#include "../common/each_set.inc"

const auto row_sums = FL_CHOSEN(row_sums);
const auto row_squares = FL_CHOSEN(row_squares);
const auto standardize = FL_CHOSEN(standardize);
const auto standardize_back = FL_CHOSEN(standardize_back);
}  // namespace
}  // namespace fl::tagi::norms

void fl_tagi_row_sums(const fl_tagi_rows* rows, const float* units, double* sums) {
  fl::tagi::norms::row_sums(*rows, units, sums);
}

void fl_tagi_row_squares(const fl_tagi_rows* rows, const float* units, const float* centers,
                         double* sums) {
  fl::tagi::norms::row_squares(*rows, units, centers, sums);
}

void fl_tagi_standardize(const fl_tagi_rows* rows, const float* mean, const float* variance,
                         const fl_tagi_affine* affine, float* t_out, float* mean_out,
                         float* variance_out) {
  fl::tagi::norms::standardize(*rows, mean, variance, affine, t_out, mean_out, variance_out);
}

void fl_tagi_standardize_back(const fl_tagi_rows* rows, const float* t, const float* d,
                              const float* e, const float* slope, const float* back, double* sums,
                              float* d_out, float* e_out) {
  fl::tagi::norms::standardize_back(*rows, t, d, e, slope, back, sums, d_out, e_out);
}
