/* The step of flat arrays of `size` elements; see flashlight_py/tagi/capped_step.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum,
                  size_t size, float inverse_cap);

/* Moments of max(z, 0) for flat arrays of `size` elements; see flashlight_py/tagi/mixtures.py. */
void fl_tagi_mixture_relu(const float *mean, const float *variance, float *mean_out,
                          float *variance_out, float *slope_out, size_t size);
