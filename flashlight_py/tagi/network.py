"""The layers of a network by pytagi's names: their state as a dictionary and in files, their LSTMs.

The binary file has a record for each layer but activations, blocks entered, in the order of the
forward pass: the length of a line that describes the layer (8 bytes, little-endian), the line, such
as ``Linear(784,128)``, and float32: means and variances of the weights, then of the biases; of a
batch normalisation also the running means and variances. The files of text have one number a line:
all weights' means, all weights' variances, and the same of the biases.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.activations import Activation
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.lstm import States
from flashlight_py.tagi.recurrent import LSTM, SLSTM, SLinear
from flashlight_py.tagi.states import REAL, BaseHiddenStates, host_copy, real, unmasked

# The first four entries of a layer, which pytagi's dictionaries have as well.
FOUR = ("mu_w", "var_w", "mu_b", "var_b")
STATISTICS = ("running_mean", "running_variance")
ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")  # in the order of FOUR
HEAD = np.dtype("<u8")
FLOATS = np.dtype("<f4")

StateDict = dict[str, tuple[Array, ...]]
FileName = str | os.PathLike[str]


class Network:
    """The base of networks: layers by name, what they have learnt, and what LSTMs carry on."""

    layers: list[BaseLayer]
    _smoothed: BaseHiddenStates | None = None
    _num_samples = 0

    def named_layers(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield every layer, also those inside blocks, by the names that pytagi gives them."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(str(number))

    def state_dict(self) -> StateDict:
        """Return all that the network has learnt: copies of flat arrays, on the CPU.

        By pytagi's names, such as ``"Linear.0"`` and ``"Conv2d.main.3.0"`` in a block: means and
        variances of the weights, then of the biases; of a layer that keeps running statistics,
        also these.
        """
        return {
            name: (
                *(getattr(layer, which) for which in FOUR),
                *(host_copy(each) for each in layer.statistics()),
            )
            for name, layer in self.named_layers()
            if layer.has_state
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict()`` returned, of this library's or pytagi's; any sequences.

        Entries of four arrays, as pytagi's, leave running statistics as they are.

        Raises:
            ValueError: names or sizes are not this network's, something is not finite or masked, or
                a variance is negative; names them. Nothing was changed.
        """
        layers = {name: layer for name, layer in self.named_layers() if layer.has_state}
        problems = [f"missing {name!r}" for name in layers if name not in state_dict]
        problems += [f"unexpected {name!r}" for name in state_dict if name not in layers]
        # All of them before the first is set: some may be no numbers.
        entries = {
            name: [
                np.asarray(unmasked(f"load_state_dict: {name!r}", values), REAL)
                for values in state_dict[name]
            ]
            for name in layers
            if name in state_dict
        }
        for name, arrays in entries.items():
            layer, found = layers[name], [int(each.size) for each in arrays]
            expected = [layer.num_weights] * 2 + [layer.num_biases] * 2
            statistics = [int(each.size) for each in layer.statistics()]
            if found not in (expected, expected + statistics):
                expected += statistics
                problems += [f"{name!r} has arrays of {found} elements, expected {expected}"]
            elif wrong := wrong_moments((*FOUR, *STATISTICS), arrays):
                problems += [f"{name!r}: {'; '.join(wrong)}"]
        if problems:
            raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
        for name, layer in layers.items():
            for which, values in zip(FOUR, entries[name], strict=False):
                setattr(layer, which, values)
            for home, values in zip(layer.statistics(), entries[name][len(FOUR) :], strict=False):
                home[...] = array_module(home).asarray(values).reshape(home.shape)

    def save(self, filename: FileName) -> None:
        """Write all that the network has learnt into pytagi's binary file.

        The file is there whole or not at all. Its folder is made if need be.

        Raises:
            ValueError: the sizes of a layer are not known yet; run a batch first.
            OSError: the file cannot be written.
        """
        state, records = self.state_dict(), []
        for name, layer in _recorded(self):
            if layer.output_shape is None:
                raise ValueError(
                    f"save: {name} does not know its sizes yet; call the network with a batch first"
                )
            records += [_head(layer), *(a.astype(FLOATS).tobytes() for a in state.get(name, ()))]
        _write(Path(filename), b"".join(records))

    def load(self, filename: FileName) -> None:
        """Take what ``save()`` has written, of this library's or pytagi's.

        Raises:
            ValueError: the file is another network's, incomplete or too long; says where. Nothing
                was changed.
            OSError: it cannot be read.
        """
        self.load_state_dict(_parse(self, Path(filename)))

    def save_csv(self, filename: FileName) -> None:
        """Write all parameters as text: ``<filename>_1_mw.csv``, ``_2_Sw``, ``_3_mb``, ``_4_Sb``.

        With six digits, as pytagi does; it leaves out what is inside blocks, this does not. Running
        statistics are not in it: use :meth:`save` to go on later. A file that cannot be written is
        an OSError.
        """
        entries = self.state_dict().values()
        for number, ending in enumerate(ENDINGS):
            columns = (entry[number].tolist() for entry in entries)
            lines = [f"{value:.6g}\n" for column in columns for value in column]
            _write(Path(os.fspath(filename) + ending), "".join(lines).encode())

    def load_csv(self, filename: FileName) -> None:
        """Take what ``save_csv()`` has written; running statistics stay as they are.

        Raises:
            ValueError: a file has another number of values than the network, or something that is
                no number. Nothing was changed.
            OSError: a file cannot be read.
        """
        state = self.state_dict()
        columns = []
        for number, ending in enumerate(ENDINGS):
            path = Path(os.fspath(filename) + ending)
            try:
                values = np.array(path.read_text().split(), FLOATS)
            except ValueError as error:
                raise ValueError(
                    f"load_csv: {path} has something that is no number: {error}. Nothing was loaded"
                ) from error
            sizes = [entry[number].size for entry in state.values()]
            if values.size != sum(sizes):
                raise ValueError(
                    f"load_csv: {path} has {values.size} values, the network {sum(sizes)}. Nothing "
                    "was loaded. (pytagi leaves out the parameters of layers inside blocks)"
                )
            columns.append(np.split(values, np.cumsum(sizes)[:-1]))
        self.load_state_dict(dict(zip(state, zip(*columns, strict=True), strict=True)))

    @property
    def num_samples(self) -> int:
        """How many time steps a smoother keeps; 0: none."""
        return self._num_samples

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self._num_samples = value
        for _, layer in self.named_layers():
            if isinstance(layer, SLSTM):
                layer.num_samples = value

    def reset_lstm_states(self) -> None:
        """Let h and c of every LSTM begin with 0 in the next call; a smoother's series, too."""
        for layer in self._lstms().values():
            layer.set_states(None)

    def get_lstm_states(self, time_step: int = -1) -> dict[int | str, States]:
        """Return means and variances of h, then of c, of each LSTM that carries them: flat copies.

        By the number of the layer; in a block, by what follows its kind in ``state_dict()``.
        LSTMs with ``seq_len > 1`` carry nothing from call to call.

        Args:
            time_step: -1: what the next call begins with; otherwise the smoothed states of the
                time step, from 0, of each SLSTM.

        Raises:
            ValueError: ``time_step`` was not smoothed.
        """
        if time_step == -1:
            return {key: layer.get_states() for key, layer in self._lstms().items()}
        smoothed = {
            key: layer.smoothed
            for key, layer in self._lstms().items()
            if isinstance(layer, SLSTM) and layer.smoothed is not None
        }
        steps = min((len(each[0]) for each in smoothed.values()), default=0)
        if not 0 <= time_step < steps:
            raise ValueError(
                f"get_lstm_states: time_step is -1 or that of one of {steps} smoothed time steps, "
                f"from 0, got {time_step}"
            )
        return {
            key: States(*(host_copy(each[time_step]) for each in states))
            for key, states in smoothed.items()
        }

    def set_lstm_states(self, states: Mapping[Any, Any]) -> None:
        """Let the next call begin with what ``get_lstm_states()`` has returned, of some layers.

        Raises:
            TypeError: they are no real numbers.
            ValueError: a layer carries no states, has others than ``output_size`` units, or they
                are masked, not finite, or negative variances. Nothing was changed.
        """
        layers, found = self._lstms(), {}
        for key, entry in states.items():
            if key not in layers:
                raise ValueError(
                    f"set_lstm_states: layer {key!r} is no LSTM with seq_len=1; those are "
                    f"{', '.join(map(repr, layers)) or 'none'}"
                )
            name = f"set_lstm_states: layer {key!r}"
            found[key] = [real(name, each, "cpu") for each in entry]
            expected, got = [layers[key].output_size] * 4, [each.size for each in found[key]]
            if got != expected:
                raise ValueError(
                    f"{name}, {layers[key]}: expected means and variances of h and c, {expected} "
                    f"elements, got {got}"
                )
            if wrong := wrong_moments(States._fields, found[key]):
                raise ValueError(f"{name}, {layers[key]}: {'; '.join(wrong)}")
        for key, entry in found.items():
            layers[key].set_states(entry)

    def smoother(self) -> tuple[Array, Array]:
        """Go back over the time steps since the last smoother; return the smoothed outputs.

        As :meth:`get_outputs_smoother`. Each SLSTM's h and c by all observations, and the outputs
        by the last SLSTM's h and the parameters as they are now. A new series begins.

        Raises:
            RuntimeError: no time step was kept: ``num_samples`` is 0, or there was no pass.
            ValueError: there is no SLSTM, or another layer than SLSTM and SLinear after one.
        """
        layers = list(self.named_layers())
        kinds = [isinstance(layer, SLSTM) for _, layer in layers]
        if not any(kinds):
            raise ValueError("smoother: the network has no SLSTM")
        layers = layers[kinds.index(True) :]
        for name, layer in layers:
            if not isinstance(layer, SLSTM | SLinear):
                raise ValueError(f"smoother: cannot smooth {name!r}, only SLSTM and SLinear layers")
        hidden = BaseHiddenStates(np.empty((0, 0)))
        for _, layer in layers:
            if isinstance(layer, SLSTM):
                hidden = layer.smooth()
            elif isinstance(layer, SLinear):
                hidden = layer.smooth(hidden)
        self._smoothed = hidden
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[Array, Array]:
        """Return means and variances of the outputs that the last smoother has made.

        ``[time steps * outputs]``, on the CPU; copies.

        Raises:
            RuntimeError: there was none.
        """
        if self._smoothed is None:
            raise RuntimeError("get_outputs_smoother: call smoother() first")
        return host_copy(self._smoothed.mu_a), host_copy(self._smoothed.var_a)

    def _lstms(self) -> dict[int | str, LSTM]:
        """Return the layers that carry states."""
        found: dict[int | str, LSTM] = {}
        for name, layer in self.named_layers():
            if isinstance(layer, LSTM) and layer.carries_states:
                suffix = name.split(".", 1)[1]
                found[int(suffix) if suffix.isdecimal() else suffix] = layer
        return found


def wrong_moments(names: Iterable[str], arrays: list[Array]) -> list[str]:
    """Return what cannot be among means and variances, which take turns, by their names."""
    named = list(zip(names, arrays, strict=False))
    found = [f"{name} is not finite" for name, each in named if not np.isfinite(each).all()]
    return found + [f"{name} has negative variances" for name, a in named[1::2] if (a < 0).any()]


def _recorded(network: Network) -> list[tuple[str, BaseLayer]]:
    """Return the layers that have a record: pools have an empty one, activations none."""
    return [pair for pair in network.named_layers() if not isinstance(pair[1], Activation)]


def _head(layer: BaseLayer) -> bytes:
    info = layer.get_layer_info().encode()
    return np.array(len(info), HEAD).tobytes() + info


def _parse(network: Network, path: Path) -> StateDict:
    """Return the state in a binary file, if that is this network's."""
    data, place, layers = path.read_bytes(), 0, _recorded(network)
    state = {}
    for number, (name, layer) in enumerate(layers):
        begin = place + HEAD.itemsize
        if begin > len(data):
            raise _unfit(path, f"it ends before {name}, {layer}")
        length = int(np.frombuffer(data[place:begin], HEAD)[0])
        found = data[begin : begin + min(length, len(data))].decode(errors="replace")
        expected = layer.get_layer_info()
        known = layer.output_shape is not None
        if not (found == expected if known else found.startswith(layer.get_layer_name() + "(")):
            raise _unfit(path, f"expected {expected!r} for {name}, found {found[:60]!r}")
        place = begin + length  # where the numbers of the layer begin
        sizes = [getattr(layer, which).size for which in FOUR]
        sizes += [int(each.size) for each in layer.statistics()]
        end = place + FLOATS.itemsize * sum(sizes)
        if end > len(data):
            raise _unfit(path, f"it ends within {name}, {layer}")
        if layer.has_state:
            values = np.frombuffer(data[place:end], FLOATS)
            state[name] = tuple(np.split(values, np.cumsum(sizes)[:-1]))
        place = end
        if layer.get_layer_name() == "LayerNorm":
            following = layers[number + 1][1] if number + 1 < len(layers) else None
            place = _after_left_overs(data, place, following)
    if place != len(data):
        raise _unfit(path, f"it goes on for {len(data) - place} bytes after the last layer")
    return state


def _after_left_overs(data: bytes, place: int, following: BaseLayer | None) -> int:
    """Return where the next record begins after a LayerNorm's.

    pytagi writes there the means and variances of each sample of its last batch, however many.
    """
    if following is None:
        rest = len(data) - place
        return len(data) if rest % (2 * FLOATS.itemsize) == 0 else place
    step, head = 2 * FLOATS.itemsize, _head(following)
    for start in range(place, len(data), step):
        if data.startswith(head, start):
            return start
    return place


def _unfit(path: Path, what: str) -> ValueError:
    return ValueError(f"load: {path} is not this network's: {what}. Nothing was loaded")


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
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
