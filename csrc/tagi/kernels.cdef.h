/* Functions that return an int return 0, or -1 if there is not enough memory. */

/* Compute all time steps of all samples; see flashlight_py/tagi/lstm.py. bias NULL: no biases. x_variance
   NULL: exact inputs. states NULL: start from 0. Otherwise states, `[4, outputs]` of one sample, contains h
   and c with their variances, and is updated. */
int fl_tagi_lstm_forward(fl_tagi_lstm lstm, const float *weight, const float *weight_variance,
                         const float *bias, const float *bias_variance, const float *x,
                         const float *x_variance, float *h, float *h_variance, float *joined, float *slopes,
                         float *states);

/* Backward pass through time: deltas dz, ez of the gates' inputs, and dx, ex of x unless dx is NULL. */
int fl_tagi_lstm_backward(fl_tagi_lstm lstm, const float *weight, const float *slopes, const float *d,
                          const float *e, float *dz, float *ez, float *dx, float *ex);

/* Update flat arrays of `size` elements; see ParameterBucket of flashlight_py/tagi/layer.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum, size_t size,
                  float inverse_cap);

/* Copy each window to a column of means, variances and moments (mean^2 + variance), each `[channels *
   kernel^2, windows]`. Without variances (NULL), moments are mean^2; they are not written if NULL. */
void fl_tagi_patches(fl_tagi_windows windows, const float *mean, const float *variance, float *means,
                     float *variances, float *moments);

/* Add each column of `patches`, laid out as in fl_tagi_patches, to its window of the images. */
void fl_tagi_add_patches(fl_tagi_windows windows, const float *patches, float *images);

/* Write `factor` times the sum of each window, for each channel. Rows of `sums` have out_width adjacent
   elements; image_step and channel_step are the steps of `sums`. */
int fl_tagi_sum_windows(fl_tagi_windows windows, const float *images, float *sums, ptrdiff_t image_step,
                        ptrdiff_t channel_step, float factor);

/* Adjoint of fl_tagi_sum_windows: set images to the sums of the deltas of their windows times `factor`. */
int fl_tagi_spread_windows(fl_tagi_windows windows, const float *deltas, float *images, ptrdiff_t image_step,
                           ptrdiff_t channel_step, float factor);

/* Write the largest mean of each window, its variance (unless NULL), and its row-major position in the
   window. All three outputs have the same steps, given as in fl_tagi_sum_windows. */
void fl_tagi_largest(fl_tagi_windows windows, const float *mean, const float *variance, float *means,
                     float *variances, int32_t *taken, ptrdiff_t image_step, ptrdiff_t channel_step);

/* Add each window's delta to the pixel at its position `taken`. */
void fl_tagi_spread_taken(fl_tagi_windows windows, const float *deltas, ptrdiff_t image_step,
                          ptrdiff_t channel_step, const int32_t *taken, ptrdiff_t taken_image_step,
                          ptrdiff_t taken_channel_step, float *images);

/* Moments of max(z, 0) for flat arrays of `size` elements; see tagi/activations.py. */
void fl_tagi_mixture_relu(const float *mean, const float *variance, float *mean_out, float *variance_out,
                          float *slope_out, size_t size);

/* Moments of max(-1, min(z, 1)) times `share` plus `shift`. */
void fl_tagi_mixture_between(const float *mean, const float *variance, float *mean_out, float *variance_out,
                             float *slope_out, size_t size, float share, float shift);

/* Write the sum of each row or, if centers is not NULL, of the squared differences from its center. */
void fl_tagi_row_sums(fl_tagi_rows rows, const float *units, const float *centers, double *sums);

void fl_tagi_standardize(fl_tagi_rows rows, const float *mean, const float *variance,
                         const fl_tagi_affine *affine, float *t_out, float *mean_out, float *variance_out);

/* Write four sums per row, `[4, batch, features]`: of t d, t^2 e, d and e. Unless d_out is NULL, also write
   the products d f to d_out and e f^2 to e_out. f: the row's `back`, times `slope` unless slope is NULL. */
void fl_tagi_standardize_back(fl_tagi_rows rows, const float *t, const float *d, const float *e,
                              const float *slope, const float *back, double *sums, float *d_out,
                              float *e_out);

/* Compute the deltas of observed outputs; see flashlight_py/tagi/states.py. indices NULL: all outputs are
   observed. errors_step 0: all outputs have the first error variance. */
void fl_tagi_observe(fl_tagi_outputs outputs, const int64_t *indices, const float *observed,
                     const float *errors, size_t errors_step, float *d, float *e);
