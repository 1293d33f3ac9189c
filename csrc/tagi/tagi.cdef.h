/* How many samples an LSTM has, of how many time steps, and the units of a time step. */
typedef struct {
  size_t rows, steps, inputs, outputs;
} fl_tagi_lstm;

/* All time steps of all samples; see flashlight_py/tagi/lstm_window.py. NULL: no biases; no
   variances of inputs; begin with 0. Otherwise `states`, of one sample, is where h and c with their
   variances are, `[4, outputs]`, and are written. */
void fl_tagi_lstm_forward(const fl_tagi_lstm *lstm, const float *weight,
                          const float *weight_variance, const float *bias,
                          const float *bias_variance, const float *x, const float *x_variance,
                          float *h, float *h_variance, float *joined, float *slopes,
                          float *states);

/* Back through time: deltas of the inputs of the gates, and unless NULL of x. */
void fl_tagi_lstm_backward(const fl_tagi_lstm *lstm, const float *weight, const float *slopes,
                           const float *d, const float *e, float *dz, float *ez, float *dx,
                           float *ex);

/* The step of flat arrays of `size` elements; see flashlight_py/tagi/capped_step.py. */
void fl_tagi_step(float *mean, float *variance, const float *mean_sum, const float *variance_sum,
                  size_t size, float inverse_cap);
