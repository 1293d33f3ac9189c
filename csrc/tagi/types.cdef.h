/* Sizes of an LSTM: samples, time steps of a sample, input and output units of a time step. */
typedef struct {
  size_t rows, steps, inputs, outputs;
} fl_tagi_lstm;

/* Square windows over images with contiguous rows. A call processes images [images, images_end) and output
   rows [rows, rows_end). Steps are in elements. */
typedef struct {
  ptrdiff_t channels, height, width, out_width;
  ptrdiff_t kernel, stride, before; /* before: padding above and to the left */
  ptrdiff_t images, images_end, rows, rows_end;
  ptrdiff_t image_step, channel_step, row_step;
} fl_tagi_windows;

/* Units as rows of `positions` contiguous elements, one per sample and feature; see
   flashlight_py/tagi/normalization.py. Steps are in elements and equal for all arrays of a call. */
typedef struct {
  ptrdiff_t batch, features, positions, batch_step, feature_step;
} fl_tagi_rows;

/* Transformation of a row of means m and variances v: t = (m - center) * scale. New means are t * weight +
   bias; new variances are t^2 * weight_variance + v * gain + bias_variance. */
typedef struct {
  float center, scale, weight, bias, weight_variance, gain, bias_variance;
} fl_tagi_affine;

/* Flat outputs of a network. per_sample: outputs of a sample. observed: observed outputs of all samples.
   observed_per_sample: observed outputs of a sample. */
typedef struct {
  const float *mean, *variance, *slope; /* NULL: all variances are 0, all slopes 1 */
  size_t per_sample, observed, observed_per_sample;
} fl_tagi_outputs;
