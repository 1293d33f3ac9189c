"""What the oracle's process does: it answers requests with the real pytagi, until its input ends.

It runs in the environment of pytagi, knows nothing of flashlight_py, and is started by ``oracle``.
The descriptor of the line to its tests is its only argument.
"""

import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytagi
import pytagi.nn

DELTAS = ("delta_mu_w", "delta_var_w", "delta_mu_b", "delta_var_b")
NAMES = {"np": np, "pytagi": pytagi, **{name: getattr(pytagi.nn, name) for name in dir(pytagi.nn)}}


def flat(array: Any) -> np.ndarray:
    """Return what pytagi takes: it ignores strides and refuses float64."""
    return np.ascontiguousarray(array, np.float32).ravel()


def as_arrays(state: dict[str, Any]) -> dict[str, tuple[np.ndarray, ...]]:
    """Return a dictionary of parameters with arrays for lists."""
    return {name: tuple(map(flat, entry)) for name, entry in state.items()}


def named_layers(layer: Any, suffix: str) -> Iterator[tuple[str, Any]]:
    """Yield the layers that a layer consists of, by the names in the dictionary of parameters."""
    if hasattr(layer, "main_block"):
        yield from named_layers(layer.main_block, f"main.{suffix}")
        if layer.shortcut is not None:
            yield from named_layers(layer.shortcut, f"shortcut.{suffix}")
    elif hasattr(layer, "layers"):
        for number, part in enumerate(layer.layers):
            yield from named_layers(part, f"{suffix}.{number}")
    else:
        yield f"{layer.get_layer_name()}.{suffix}", layer


def observe(net: Any, request: dict[str, Any]) -> None:
    """Let the updater write the deltas of the outputs."""
    updater, y = pytagi.nn.OutputUpdater("cpu"), flat(request["y"])
    states, deltas = net.output_z_buffer, net.input_delta_z_buffer
    if request["heteros"]:
        updater.update_heteros(states, y, deltas)
        return
    errors = flat(request["var_y"])
    if request["idx"] is None:
        updater.update(states, y, errors, deltas)
    else:
        indices = np.ascontiguousarray(request["idx"], np.int32).ravel()
        updater.update_using_indices(states, y, errors, indices, deltas)


def step(request: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the last of some steps on one batch makes."""
    pytagi.manual_seed(request["seed"])
    net = eval(request["network"], dict(NAMES))
    net.set_threads(1)
    inputs = [flat(each) for each in (request["x"], request["var_x"]) if each is not None]
    net(*inputs)  # convolutions have no parameters before
    if request["params"] is not None:
        net.load_state_dict({k: tuple(a.tolist() for a in t) for k, t in request["params"].items()})
    net.reset_lstm_states()
    answer: dict[str, Any] = {"before": as_arrays(net.state_dict())}
    for _ in range(request["steps"]):
        mu, var = (np.array(each, np.float32) for each in net(*inputs))
        observe(net, request)
        buffer = net.input_delta_z_buffer  # backward() swaps the buffers: read before
        deltas = [np.array(each[: mu.size]) for each in (buffer.delta_mu, buffer.delta_var)]
        net.backward()
        net.step()
    layers = [
        pair for number, layer in enumerate(net.layers) for pair in named_layers(layer, str(number))
    ]
    after = as_arrays(net.state_dict())
    return answer | {
        "mu": mu,
        "var": var,
        "output_deltas": tuple(map(flat, deltas)),
        "deltas": {
            name: tuple(flat(getattr(layer, which)) for which in DELTAS)
            for name, layer in layers
            if name in after
        },
        "after": after,
    }


def run(request: dict[str, Any]) -> Any:
    """Execute a program with the arrays that it names; return its ``result``, if any."""
    space = NAMES | request["arrays"]
    exec(request["program"], space)
    return space.get("result")


def main() -> None:
    """Answer."""
    line = Connection(int(sys.argv[1]))
    while True:
        try:
            request = line.recv()
        except EOFError:  # the tests have ended
            return
        try:
            answer = step(request) if "network" in request else run(request)
        except Exception:  # noqa: BLE001  (whatever it is, the test is shown it)
            line.send(("error", traceback.format_exc()))
        else:
            line.send(("answer", answer))


if __name__ == "__main__":
    main()
