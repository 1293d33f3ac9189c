"""The process of the oracle, which answers requests with the real pytagi.

``oracle`` starts it in the environment of pytagi, without flashlight_py. Tests also call ``step``
for this package.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.oracles import answer_requests

DELTAS = ("delta_mu_w", "delta_var_w", "delta_mu_b", "delta_var_b")


def flat(array: Any) -> np.ndarray:
    """Convert for pytagi, which ignores strides and rejects float64."""
    return np.ascontiguousarray(array, np.float32).ravel()


def as_arrays(state: dict[str, Any]) -> dict[str, tuple[np.ndarray, ...]]:
    """Return a dictionary of parameters with arrays instead of lists."""
    return {name: tuple(map(flat, entry)) for name, entry in state.items()}


def named_layers(layer: Any, suffix: str) -> Iterator[tuple[str, Any]]:
    """Yield a layer or its inner layers with their names in the dictionary of parameters."""
    if hasattr(layer, "main_block"):
        yield from named_layers(layer.main_block, f"main.{suffix}")
        if layer.shortcut is not None:
            yield from named_layers(layer.shortcut, f"shortcut.{suffix}")
    elif hasattr(layer, "layers"):
        for number, part in enumerate(layer.layers):
            yield from named_layers(part, f"{suffix}.{number}")
    else:
        yield f"{layer.get_layer_name()}.{suffix}", layer


def names_of(library: Any) -> dict[str, Any]:
    """Return the names that a program can use."""
    layers = {name: getattr(library.nn, name) for name in dir(library.nn)}
    return {"np": np, "pytagi": library, **layers}


def observe(net: Any, updater: Any, request: dict[str, Any]) -> None:
    y, states, deltas = flat(request["y"]), net.output_z_buffer, net.input_delta_z_buffer
    if request["heteros"]:
        updater.update_heteros(states, y, deltas)
    elif request["idx"] is None:
        updater.update(states, y, flat(request["var_y"]), deltas)
    else:
        indices = np.ravel(request["idx"])
        updater.update_using_indices(states, y, flat(request["var_y"]), indices, deltas)


def step(library: Any, request: dict[str, Any]) -> dict[str, Any]:
    library.manual_seed(request["seed"])
    net, updater = eval(request["network"], names_of(library)), library.nn.OutputUpdater("cpu")
    net.set_threads(1)
    inputs = [flat(array) for array in (request["x"], request["var_x"]) if array is not None]
    net(*inputs)  # convolutions have no parameters before the first batch
    if request["params"] is not None:
        net.load_state_dict({k: tuple(a.tolist() for a in t) for k, t in request["params"].items()})
    net.reset_lstm_states()
    answer: dict[str, Any] = {"before": as_arrays(net.state_dict())}
    for _ in range(request["steps"]):
        mu, var = (np.array(item, np.float32) for item in net(*inputs))
        observe(net, updater, request)
        buffer = net.input_delta_z_buffer  # read before backward(), which swaps the buffers
        output_deltas = [
            np.array(value[: mu.size]) for value in (buffer.delta_mu, buffer.delta_var)
        ]
        net.backward()
        deltas = {
            name: tuple(flat(getattr(layer, which)).copy() for which in DELTAS)
            for number, element in enumerate(net.layers)
            for name, layer in named_layers(element, str(number))
            if name in answer["before"]
        }
        net.step()
    return answer | {
        "mu": mu,
        "var": var,
        "output_deltas": tuple(map(flat, output_deltas)),
        "deltas": deltas,
        "after": as_arrays(net.state_dict()),
    }


def answer(**request: Any) -> Any:
    import pytagi
    import pytagi.nn

    if "network" in request:
        return step(pytagi, request)
    space = names_of(pytagi) | request["arrays"]
    exec(request["program"], space)
    return space.get("result")


if __name__ == "__main__":
    answer_requests(answer)
