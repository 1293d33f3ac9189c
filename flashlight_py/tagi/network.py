"""State of a network in dictionaries and files under pytagi's names, and states of its LSTMs.

The binary file has one record per layer, in the order of the forward pass. Layers in blocks have
records; activations have none. A record contains the length of a description (8 bytes,
little-endian), the description, such as ``Linear(784,128)``, and float32 numbers. The numbers are
means and variances of the weights, then of the biases; for batch normalisation, running means and
variances follow. Each of the four text files has one number per line: means of all weights,
variances of all weights, means of all biases, or variances of all biases.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.activations import Activation
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.lstm import LSTM, SLSTM, SLinear, States
from flashlight_py.tagi.states import REAL, BaseHiddenStates, as_real, host_copy, unmasked

# The arrays of a layer in pytagi's dictionaries, and the first arrays in state_dict().
FOUR = ("mu_w", "var_w", "mu_b", "var_b")
STATISTICS = ("running_mean", "running_variance")
ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")  # in the order of FOUR
HEAD = np.dtype("<u8")
FLOATS = np.dtype("<f4")

StateDict = dict[str, tuple[Array, ...]]
FileName = str | os.PathLike[str]


class Network:
    """Base class of networks: named layers, learned state, and carried LSTM states."""

    layers: list[BaseLayer]
    _smoothed: BaseHiddenStates | None = None
    _num_samples = 0

    def named_layers(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield all layers, including layers in blocks, with the names that pytagi uses."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(str(number))

    def state_dict(self) -> StateDict:
        """Return the learned state: flat copies on the CPU.

        Keys are pytagi's names, such as ``"Linear.0"``, or ``"Conv2d.main.3.0"`` in a block. Values
        are means and variances of the weights, then of the biases, then running statistics, if any.
        """
        return {
            name: (
                *(getattr(layer, name) for name in FOUR),
                *(host_copy(array) for array in layer.statistics()),
            )
            for name, layer in self.named_layers()
            if layer.has_state
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the learned state from ``state_dict()`` of this library or pytagi.

        Values may be any sequences. Running statistics, which pytagi omits, may be missing.

        Raises:
            ValueError: If names or sizes differ from the network's, a value is not finite or
                masked, or a variance is negative. The message lists the names. Nothing has changed.
        """
        layers = {name: layer for name, layer in self.named_layers() if layer.has_state}
        problems = [f"missing {name!r}" for name in layers if name not in state_dict]
        problems += [f"unexpected {name!r}" for name in state_dict if name not in layers]
        # Convert all arrays before setting any, because a conversion may fail.
        entries = {
            name: [
                np.asarray(unmasked(f"load_state_dict: {name!r}", values), REAL)
                for values in state_dict[name]
            ]
            for name in layers
            if name in state_dict
        }
        for name, arrays in entries.items():
            layer, sizes = layers[name], [int(array.size) for array in arrays]
            expected = [layer.num_weights] * 2 + [layer.num_biases] * 2
            statistics = [int(array.size) for array in layer.statistics()]
            if sizes not in (expected, expected + statistics):
                expected += statistics
                problems += [f"{name!r}: expected arrays of {expected} elements, got {sizes}"]
            elif invalid := wrong_moments((*FOUR, *STATISTICS), arrays):
                problems += [f"{name!r}: {'; '.join(invalid)}"]
        if problems:
            raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
        for name, layer in layers.items():
            for attribute, values in zip(FOUR, entries[name], strict=False):
                setattr(layer, attribute, values)
            for target, values in zip(layer.statistics(), entries[name][len(FOUR) :], strict=False):
                target[...] = array_module(target).asarray(values).reshape(target.shape)

    def save(self, filename: FileName) -> None:
        """Write the learned state to a binary file in pytagi's format.

        The file is complete or absent. Its folder is created if necessary.

        Raises:
            ValueError: If the sizes of a layer are unknown. Run a batch first.
            OSError: If the file cannot be written.
        """
        state, records = self.state_dict(), []
        for name, layer in _recorded(self):
            if layer.output_shape is None:
                remedy = "Call the network with a batch first"
                raise ValueError(f"save: the sizes of {name} are not known. {remedy}")
            records += [_head(layer), *(a.astype(FLOATS).tobytes() for a in state.get(name, ()))]
        _write(Path(filename), b"".join(records))

    def load(self, filename: FileName) -> None:
        """Set the state from a file of ``save()``, of this library or pytagi.

        Raises:
            ValueError: If the file belongs to another network, is incomplete or too long. Nothing
                has changed.
            OSError: If the file cannot be read.
        """
        self.load_state_dict(_parse(self, Path(filename)))

    def save_csv(self, filename: FileName) -> None:
        """Write all parameters to text files: ``<filename>_1_mw.csv``, ``_2_Sw.csv`` and so on.

        Numbers have six digits, as in pytagi. Unlike in pytagi, the files include layers in blocks.
        Running statistics are not included: to continue a training later, use :meth:`save`. Raises
        OSError if a file cannot be written.
        """
        entries = self.state_dict().values()
        for number, ending in enumerate(ENDINGS):
            columns = (entry[number].tolist() for entry in entries)
            lines = [f"{value:.6g}\n" for column in columns for value in column]
            _write(Path(os.fspath(filename) + ending), "".join(lines).encode())

    def load_csv(self, filename: FileName) -> None:
        """Set the parameters from files of ``save_csv()``; running statistics are unchanged.

        Raises:
            ValueError: If a file has a wrong number of values or text that is not a number. Nothing
                has changed.
            OSError: If a file cannot be read.
        """
        state = self.state_dict()
        columns = []
        for number, ending in enumerate(ENDINGS):
            path = Path(os.fspath(filename) + ending)
            try:
                values = np.array(path.read_text().split(), FLOATS)
            except ValueError as error:
                problem = f"expected only numbers: {error}"
                raise ValueError(f"load_csv: {path}: {problem}. Nothing was loaded") from error
            sizes = [entry[number].size for entry in state.values()]
            if values.size != sum(sizes):
                raise ValueError(
                    f"load_csv: {path}: expected {sum(sizes)} values, got {values.size}. Nothing "
                    "was loaded. (pytagi omits the parameters of layers in blocks)"
                )
            columns.append(np.split(values, np.cumsum(sizes)[:-1]))
        self.load_state_dict(dict(zip(state, zip(*columns, strict=True), strict=True)))

    @property
    def num_samples(self) -> int:
        """Number of time steps that each SLSTM keeps for the smoother; 0: none."""
        return self._num_samples

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self._num_samples = value
        for _, layer in self.named_layers():
            if isinstance(layer, SLSTM):
                layer.num_samples = value

    def reset_lstm_states(self) -> None:
        """Reset h and c of every LSTM to 0 for the next call. Every SLSTM starts a new series."""
        for layer in self._lstms().values():
            layer.set_states(None)

    def get_lstm_states(self, time_step: int = -1) -> dict[int | str, States]:
        """Return means and variances of h, then of c, of each LSTM with ``seq_len=1``: flat copies.

        Keys are layer numbers. For a layer in a block, the key is its name without the class, such
        as ``"main.3.0"``.

        Args:
            time_step: -1: initial states of the next call. Otherwise smoothed states of each SLSTM
                at this time step, from 0.

        Raises:
            ValueError: If ``time_step`` was not smoothed.
        """
        if time_step == -1:
            return {key: layer.get_states() for key, layer in self._lstms().items()}
        smoothed = {
            key: layer.smoothed
            for key, layer in self._lstms().items()
            if isinstance(layer, SLSTM) and layer.smoothed is not None
        }
        steps = min((len(array[0]) for array in smoothed.values()), default=0)
        if not 0 <= time_step < steps:
            expected = f"-1, or from 0 and below {steps}, the number of smoothed time steps"
            raise ValueError(f"get_lstm_states: time_step must be {expected}, got {time_step}")
        return {
            key: States(*(host_copy(array[time_step]) for array in states))
            for key, states in smoothed.items()
        }

    def set_lstm_states(self, states: Mapping[Any, Any]) -> None:
        """Set the initial states of the next call, for some or all keys of ``get_lstm_states()``.

        Raises:
            TypeError: If the states are not real numbers.
            ValueError: If a layer carries no states or has other sizes, a state is masked or not
                finite, or a variance is negative. Nothing has changed.
        """
        layers, entries = self._lstms(), {}
        for key, entry in states.items():
            if key not in layers:
                keys = ", ".join(map(repr, layers)) or "no such layer"
                lstms = f"LSTMs with seq_len=1 ({keys})"
                raise ValueError(f"set_lstm_states: expected keys of {lstms}, got {key!r}")
            name = f"set_lstm_states: layer {key!r}"
            entries[key] = [as_real(name, array, "cpu") for array in entry]
            expected, got = [layers[key].output_size] * 4, [array.size for array in entries[key]]
            if got != expected:
                raise ValueError(
                    f"{name}, {layers[key]}: expected means and variances of h and c, "
                    f"{expected} elements, got {got}"
                )
            if invalid := wrong_moments(States._fields, entries[key]):
                raise ValueError(f"{name}, {layers[key]}: {'; '.join(invalid)}")
        for key, entry in entries.items():
            layers[key].set_states(entry)

    def smoother(self) -> tuple[Array, Array]:
        """Smooth the time steps that SLSTM layers keep, and return the smoothed outputs.

        See :meth:`get_outputs_smoother`. The smoothed h and c of a time step use the observations
        of all time steps. The outputs use the smoothed h of the last SLSTM and the current
        parameters. Afterwards, a new series starts.

        Raises:
            RuntimeError: If no time step was kept: ``num_samples`` is 0, or no backward pass ran.
            ValueError: If there is no SLSTM, or a later layer is neither SLSTM nor SLinear.
        """
        layers = list(self.named_layers())
        kinds = [isinstance(layer, SLSTM) for _, layer in layers]
        if not any(kinds):
            raise ValueError("smoother: expected a network with an SLSTM, got no SLSTM")
        layers = layers[kinds.index(True) :]
        for name, layer in layers:
            if not isinstance(layer, SLSTM | SLinear):
                raise ValueError(f"smoother: expected only SLSTM and SLinear, got {name!r}")
        hidden = BaseHiddenStates(np.empty((0, 0)))
        for _, layer in layers:
            if isinstance(layer, SLSTM):
                hidden = layer.smooth()
            elif isinstance(layer, SLinear):
                hidden = layer.smooth(hidden)
        self._smoothed = hidden
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[Array, Array]:
        """Return means and variances of the outputs from the last call of :meth:`smoother`.

        Both are copies on the CPU, ``[time steps * outputs]``.

        Raises:
            RuntimeError: If :meth:`smoother` was not called.
        """
        if self._smoothed is None:
            raise RuntimeError("get_outputs_smoother: no smoothed outputs. Call smoother() first")
        return host_copy(self._smoothed.mu_a), host_copy(self._smoothed.var_a)

    def _lstms(self) -> dict[int | str, LSTM]:
        """Return the LSTMs that carry states between calls, with ``get_lstm_states()``'s keys."""
        layers: dict[int | str, LSTM] = {}
        for name, layer in self.named_layers():
            if isinstance(layer, LSTM) and layer.carries_states:
                suffix = name.split(".", 1)[1]
                layers[int(suffix) if suffix.isdecimal() else suffix] = layer
        return layers


def wrong_moments(names: Iterable[str], arrays: list[Array]) -> list[str]:
    """Return a text for each invalid array. ``arrays`` has means and variances in turn."""
    named = list(zip(names, arrays, strict=False))
    invalid = [f"{name} is not finite" for name, array in named if not np.isfinite(array).all()]
    return invalid + [f"{name} has negative variances" for name, a in named[1::2] if (a < 0).any()]


def _recorded(network: Network) -> list[tuple[str, BaseLayer]]:
    """Return the layers that have a record in the binary file: all except activations."""
    return [pair for pair in network.named_layers() if not isinstance(pair[1], Activation)]


def _head(layer: BaseLayer) -> bytes:
    info = layer.get_layer_info().encode()
    return np.array(len(info), HEAD).tobytes() + info


def _parse(network: Network, path: Path) -> StateDict:
    """Return the state in a binary file; ValueError if the file belongs to another network."""
    data, offset, layers = path.read_bytes(), 0, _recorded(network)
    state = {}
    for number, (name, layer) in enumerate(layers):
        text_start = offset + HEAD.itemsize
        if text_start > len(data):
            raise _file_error(path, f"it ends before {name}, {layer}")
        length = int(np.frombuffer(data[offset:text_start], HEAD)[0])
        text = data[text_start : text_start + min(length, len(data))].decode(errors="replace")
        expected = layer.get_layer_info()
        is_known = layer.output_shape is not None
        if not (text == expected if is_known else text.startswith(layer.get_layer_name() + "(")):
            raise _file_error(path, f"expected {expected!r} for {name}, got {text[:60]!r}")
        offset = text_start + length  # start of the layer's numbers
        sizes = [getattr(layer, name).size for name in FOUR]
        sizes += [int(array.size) for array in layer.statistics()]
        end = offset + FLOATS.itemsize * sum(sizes)
        if end > len(data):
            raise _file_error(path, f"it ends within {name}, {layer}")
        if layer.has_state:
            values = np.frombuffer(data[offset:end], FLOATS)
            state[name] = tuple(np.split(values, np.cumsum(sizes)[:-1]))
        offset = end
        if layer.get_layer_name() == "LayerNorm":
            following = layers[number + 1][1] if number + 1 < len(layers) else None
            offset = _end_of_layer_norm(data, offset, following)
    if offset != len(data):
        raise _file_error(path, f"it has {len(data) - offset} bytes after the last layer")
    return state


def _end_of_layer_norm(data: bytes, offset: int, following: BaseLayer | None) -> int:
    """Return the offset of the record that follows the record of a LayerNorm.

    In files of pytagi, the LayerNorm's record ends with moments of each sample of the last batch.
    """
    if following is None:
        return len(data) if (len(data) - offset) % (2 * FLOATS.itemsize) == 0 else offset
    step, head = 2 * FLOATS.itemsize, _head(following)
    for start in range(offset, len(data), step):
        if data.startswith(head, start):
            return start
    return offset


def _file_error(path: Path, problem: str) -> ValueError:
    return ValueError(f"load: {path} does not match this network: {problem}. Nothing was loaded")


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically: it is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
