/* The step of flat arrays of `size` elements; see flashlight_py/tagi/capped_step.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum,
                  size_t size, float inverse_cap, float scale);

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
