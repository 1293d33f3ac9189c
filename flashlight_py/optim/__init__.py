"""Optimizers that update parameters by their gradients, learning-rate schedules, and clipping."""

from flashlight_py.names import export

# The submodule that defines each public name. `scripts/stubs` writes the same table into a stub.
_HOMES = {
    "optimizer": ["FirstOrderOptimizer", "clip_grad_norm", "clip_grad_value"],
    "algorithms": [
        *("SGDOptimizer", "AdamOptimizer", "AMSgradOptimizer", "AdagradOptimizer"),
        *("AdadeltaOptimizer", "RMSPropOptimizer", "NovogradOptimizer"),
    ],
    "schedules": [
        *("LearningRateSchedule", "LambdaLR", "StepLR", "MultiStepLR", "ExponentialLR", "LinearLR"),
        *("CosineAnnealingLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"),
    ],
}
export(globals(), _HOMES)
