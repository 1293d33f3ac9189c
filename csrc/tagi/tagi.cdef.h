/* The step of flat arrays of `size` elements; see flashlight_py/tagi/capped_step.py. */
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
void fl_tagi_sum_windows(const fl_tagi_windows *windows, const float *images, float *sums,
                         ptrdiff_t image_step, ptrdiff_t channel_step, float factor);

/* The adjoint: what each window has, times `factor`, added to its places, which begin with 0. */
void fl_tagi_spread_windows(const fl_tagi_windows *windows, const float *deltas, float *images,
                            ptrdiff_t image_step, ptrdiff_t channel_step, float factor);
/* Moments of max(z, 0) for flat arrays of `size` elements; see flashlight_py/tagi/mixtures.py. */
void fl_tagi_mixture_relu(const float *mean, const float *variance, float *mean_out,
                          float *variance_out, float *slope_out, size_t size);
