"""Optimizers that update parameters by their gradients, learning-rate schedules, and clipping."""

from importlib import import_module

# The submodule that defines each public name. `scripts/stubs` writes the same table into a stub.
_HOMES = {
    "optimizer": ["FirstOrderOptimizer"],
    "algorithms": [
        *("SGDOptimizer", "AdamOptimizer", "AMSgradOptimizer", "AdagradOptimizer"),
        *("AdadeltaOptimizer", "RMSPropOptimizer", "NovogradOptimizer"),
    ],
    "clip": ["clip_grad_norm", "clip_grad_value"],
    "schedules": [
        *("LearningRateSchedule", "LambdaLR", "StepLR", "MultiStepLR", "ExponentialLR", "LinearLR"),
        *("CosineAnnealingLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"),
    ],
}
for _home, _names in _HOMES.items():
    _module = import_module(f"{__name__}.{_home}")
    globals().update({name: getattr(_module, name) for name in _names})

__all__ = [name for names in _HOMES.values() for name in names]
