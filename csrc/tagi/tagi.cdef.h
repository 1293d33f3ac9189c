/* A function that returns an int returns -1 where there is no memory for it, else 0. */

/* How many samples an LSTM has, of how many time steps, and the units of a time step. */
typedef struct {
  size_t rows, steps, inputs, outputs;
} fl_tagi_lstm;

/* All time steps of all samples; see flashlight_py/tagi/lstm.py. NULL: no biases; no
   variances of inputs; begin with 0. Otherwise `states`, of one sample, is where h and c with their
   variances are, `[4, outputs]`, and are written. */
int fl_tagi_lstm_forward(const fl_tagi_lstm *lstm, const float *weight,
                          const float *weight_variance, const float *bias,
                          const float *bias_variance, const float *x, const float *x_variance,
                          float *h, float *h_variance, float *joined, float *slopes,
                          float *states);

/* Back through time: deltas of the inputs of the gates, and unless NULL of x. */
int fl_tagi_lstm_backward(const fl_tagi_lstm *lstm, const float *weight, const float *slopes,
                           const float *d, const float *e, float *dz, float *ez, float *dx,
                           float *ex);

/* The step of flat arrays of `size` elements; see flashlight_py/tagi/parameters.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum,
                  size_t size, float inverse_cap);

/* Square windows over images whose rows are contiguous, and which of them a call is about: those of
   images [images, images_end), in output rows [rows, rows_end). Steps are in elements. */
typedef struct {
  ptrdiff_t channels, height, width, out_width;
  ptrdiff_t kernel, stride, before; /* before: how much padding there is above and to the left */
  ptrdiff_t images, images_end, rows, rows_end;
  ptrdiff_t image_step, channel_step, row_step;
} fl_tagi_windows;

/* Windows as columns: `[channels * kernel^2, windows]` of the means; of the variances and of
   mean^2 + variance; without variances (NULL), of mean^2, unless moments is NULL as well. */
void fl_tagi_patches(const fl_tagi_windows *windows, const float *mean, const float *variance,
                     float *means, float *variances, float *moments);

/* Add such columns to the places in the images that they are of. */
void fl_tagi_add_patches(const fl_tagi_windows *windows, const float *patches, float *images);

/* The sum of each window times `factor`, channel by channel: rows of out_width elements, one after
   the other, each image and channel at steps of its own. */
int fl_tagi_sum_windows(const fl_tagi_windows *windows, const float *images, float *sums,
                         ptrdiff_t image_step, ptrdiff_t channel_step, float factor);

/* The adjoint: what each window has, times `factor`, added to its places, which begin with 0. */
int fl_tagi_spread_windows(const fl_tagi_windows *windows, const float *deltas, float *images,
                            ptrdiff_t image_step, ptrdiff_t channel_step, float factor);

/* The largest mean of each window, its variance (unless NULL), and its place in the window, row by
   row; steps as of fl_tagi_sum_windows, the same of all three. */
void fl_tagi_largest(const fl_tagi_windows *windows, const float *mean, const float *variance,
                     float *means, float *variances, int32_t *taken, ptrdiff_t image_step,
                     ptrdiff_t channel_step);

/* Add what each window has to the place that was taken. */
void fl_tagi_spread_taken(const fl_tagi_windows *windows, const float *deltas,
                          ptrdiff_t image_step, ptrdiff_t channel_step, const int32_t *taken,
                          ptrdiff_t taken_image_step, ptrdiff_t taken_channel_step,
                          float *images);
/* Moments of max(z, 0) for flat arrays of `size` elements; see tagi/activations.py. */
void fl_tagi_mixture_relu(const float *mean, const float *variance, float *mean_out,
                          float *variance_out, float *slope_out, size_t size);

/* The same of max(-1, min(z, 1)) times `share` plus `shift`. */
void fl_tagi_mixture_between(const float *mean, const float *variance, float *mean_out,
                             float *variance_out, float *slope_out, size_t size, float share,
                             float shift);

/* Units as rows of `positions` contiguous elements, one for each sample and feature; see
   flashlight_py/tagi/normalization.py. Steps are in elements; all arrays of a call have the same. */
typedef struct {
  ptrdiff_t batch, features, positions, batch_step, feature_step;
} fl_tagi_rows;

/* Of a row: t = (m - center) scale; means t weight + bias; variances t^2 weight_variance + v gain +
   bias_variance. */
typedef struct {
  float center, scale, weight, bias, weight_variance, gain, bias_variance;
} fl_tagi_affine;

/* The sum of each row; the sum of squares of its differences to the row's center. */
void fl_tagi_row_sums(const fl_tagi_rows *rows, const float *units, double *sums);
void fl_tagi_row_squares(const fl_tagi_rows *rows, const float *units, const float *centers,
                         double *sums);

void fl_tagi_standardize(const fl_tagi_rows *rows, const float *mean, const float *variance,
                         const fl_tagi_affine *affine, float *t_out, float *mean_out,
                         float *variance_out);

/* Four sums of each row, `[4, batch, features]`: of t d, t^2 e, d, e. And, unless d_out is NULL, d
   and e times the row's `back` (and slope, unless that is NULL), and times its square. */
void fl_tagi_standardize_back(const fl_tagi_rows *rows, const float *t, const float *d,
                              const float *e, const float *slope, const float *back, double *sums,
                              float *d_out, float *e_out);

/* Outputs of a network, flat, and how many of them are observed: in all, and of each sample. */
typedef struct {
  const float *mean, *variance, *slope; /* NULL: all variances are 0, all slopes 1 */
  size_t each, observed, observed_each;
} fl_tagi_outputs;

/* The deltas of what is observed; see flashlight_py/tagi/updater.py. Without indices (NULL) that
   is every output. errors_step 0: all have the first error's variance. */
void fl_tagi_observe(const fl_tagi_outputs *outputs, const int64_t *indices, const float *observed,
                     const float *errors, size_t errors_step, float *d, float *e);
