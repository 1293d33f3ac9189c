/* The step of flat arrays of `size` elements; see flashlight_py/tagi/capped_step.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum,
                  size_t size, float inverse_cap);
