"""pytagi's files of parameters: one binary file, or four of comma-separated values.

The binary file has a record for each layer but activations, blocks entered, in the order of the
forward pass: the length of a line that describes the layer (8 bytes, little-endian), the line, such
as ``Linear(784,128)``, and float32: means and variances of the weights, then of the biases; of a
batch normalisation also the running means and variances. The files of text have one number a line:
all weights' means, all weights' variances, and the same of the biases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.activations import Activation
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.network import FOUR, Network

ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")  # in the order of FOUR
HEAD = np.dtype("<u8")
FLOATS = np.dtype("<f4")

State = dict[str, tuple[Array, ...]]
FileName = str | os.PathLike[str]


class Files(Network):
    """The part of a network that writes and reads pytagi's files."""

    def save(self, filename: FileName) -> None:
        """Write all that the network has learnt into pytagi's binary file.

        The file is there whole or not at all. Its folder is made if need be.

        Raises:
            ValueError: the sizes of a layer are not known yet; run a batch first.
            OSError: the file cannot be written.
        """
        _write(Path(filename), b"".join(_records(self)))

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
        statistics are not in it: use :meth:`save` to go on later.

        Raises:
            OSError: a file cannot be written.
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
            expected = sum(entry[number].size for entry in state.values())
            if values.size != expected:
                raise ValueError(
                    f"load_csv: {path} has {values.size} values, the network {expected}. Nothing "
                    "was loaded. (pytagi leaves out the parameters of layers inside blocks)"
                )
            ends = np.cumsum([entry[number].size for entry in state.values()])
            columns.append(np.split(values, ends[:-1]))
        self.load_state_dict(dict(zip(state, zip(*columns, strict=True), strict=True)))


def _recorded(network: Network) -> list[tuple[str, BaseLayer]]:
    """Return the layers that have a record: pools have an empty one, activations none."""
    return [pair for pair in network.named_layers() if not isinstance(pair[1], Activation)]


def _records(network: Network) -> Iterator[bytes]:
    state = network.state_dict()
    for name, layer in _recorded(network):
        if layer.output_shape is None:
            raise ValueError(
                f"save: {name} does not know its sizes yet; call the network with a batch first"
            )
        yield _head(layer)
        yield from (each.astype(FLOATS).tobytes() for each in state.get(name, ()))


def _head(layer: BaseLayer) -> bytes:
    info = layer.get_layer_info().encode()
    return np.array(len(info), HEAD).tobytes() + info


def _parse(network: Network, path: Path) -> State:
    """Return the state in a binary file.

    Raises:
        ValueError: the file is not this network's.
    """
    data, place, layers = path.read_bytes(), 0, _recorded(network)
    state = {}
    for number, (name, layer) in enumerate(layers):
        place = _after_head(data, place, name, layer, path)
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


def _after_head(data: bytes, place: int, name: str, layer: BaseLayer, path: Path) -> int:
    """Return where the numbers of a layer begin, once its description is what it should be."""
    begin = place + HEAD.itemsize
    if begin > len(data):
        raise _unfit(path, f"it ends before {name}, {layer}")
    length = int(np.frombuffer(data[place:begin], HEAD)[0])
    found = data[begin : begin + min(length, len(data))].decode(errors="replace")
    expected = layer.get_layer_info()
    known = layer.output_shape is not None
    if not (found == expected if known else found.startswith(layer.get_layer_name() + "(")):
        raise _unfit(path, f"expected {expected!r} for {name}, found {found[:60]!r}")
    return begin + length


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
