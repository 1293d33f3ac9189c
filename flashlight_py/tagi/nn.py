"""Layers, containers and the updater, under the names of the module ``pytagi.nn``."""

from flashlight_py.names import export

# Public names by module. `scripts/stubs` copies this table to a stub for type checkers.
_HOMES = {
    "activations": [
        *("ClosedFormSoftmax", "EvenExp", "LeakyReLU", "MixtureReLU", "MixtureSigmoid"),
        *("MixtureTanh", "ReLU", "Remax", "Sigmoid", "Softmax", "Softplus", "Tanh"),
    ],
    "distributed": ["DDPConfig", "DDPSequential"],
    "layer": ["BaseLayer", "LayerBlock", "ResNetBlock"],
    "linear": ["Conv2d", "ConvTranspose2d", "Embedding", "Linear"],
    "lstm": ["LSTM", "SLSTM", "SLinear"],
    "normalization": ["BatchNorm2d", "LayerNorm"],
    "sequential": ["Sequential"],
    "states": ["BaseDeltaStates", "BaseHiddenStates", "OutputUpdater"],
    "utilities": ["HRCSoftmax"],
    "windows": ["AvgPool2d", "MaxPool2d"],
}
export(globals(), _HOMES, later=["distributed"])  # networks do not depend on it
