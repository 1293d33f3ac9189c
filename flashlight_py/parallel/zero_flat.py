"""Parameters end to end, of which every rank keeps one part, and how a variable shows them whole.

The arrays may be NumPy's or CuPy's: what is done with them here, both can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import GradSink
from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.distributed import ProcessGroup, Work
from flashlight_py.optim.cpu import sum_of_squares
from flashlight_py.optim.optimizer import Placement

if TYPE_CHECKING:
    from flashlight_py.parallel.zero import GatheredShards

# Parts begin at multiples of so many elements: 64 bytes of float32.
GRAIN = 16


class Flat:
    """The parameters of one module and dtype in one array of shape ``(ranks, row)``.

    Rank r keeps row r, ``part``. All of it is there between ``start`` and ``release``, as
    ``arrays``; its gradients between ``open`` and ``close``, as ``homes``.

    ``row`` must differ from that of every other flat: then the shapes that collectives compare say
    which flat is meant, and ranks that use different modules get an error instead of a mixture.
    """

    def __init__(self, params: Sequence[Variable], group: ProcessGroup, row: int) -> None:
        self.params = params
        self.group = group
        self.row = row
        self.shapes = [param.shape for param in params]
        self.starts = [0]
        for param in params:
            self.starts.append(self.starts[-1] + param.size)
        self._library = array_module(params[0].data)
        self.dtype = params[0].dtype
        self.part = self._part_of_first_rank()
        self.arrays: list[Array] | None = None
        self._whole: Array | None = None  # arrives while there is work
        self._work: Work | None = None
        self.homes: list[Array] | None = None
        self._gradients: Array | None = None
        self._set_aside: list[Array | None] = []
        self.pending = 0

    def _part_of_first_rank(self) -> Array:
        """Return this rank's part of the values on rank 0. Collective, blocking."""
        whole = self._empty()
        for array, param in zip(self._views(whole), self.params, strict=True):
            array[...] = param.data
        self._fill_padding(whole)
        self.group.broadcast(whole, 0)
        part: Array = whole[self.group.rank].copy()
        return part

    def _empty(self) -> Array:
        shape = (self.group.size, self.row)
        return self._library.empty(shape, self.dtype)  # type: ignore[no-any-return]

    def _views(self, whole: Array) -> list[Array]:
        line = whole.reshape(-1)
        return [
            line[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(self.starts, self.shapes, strict=False)
        ]

    def _fill_padding(self, whole: Array) -> None:
        whole.reshape(-1)[self.starts[-1] :] = 0

    def start(self) -> None:
        """Begin to gather the parameters, unless they are here. Collective."""
        if self._whole is None:
            whole = self._empty()
            row = self.part.reshape(1, -1)
            self._work = self.group.all_gather(row, out=whole, async_op=True)
            self._whole = whole

    def finish(self) -> list[Array]:
        """Wait until the parameters are here; return them, not to be written to."""
        if self.arrays is None:
            whole, work = self._whole, self._work
            self._whole = self._work = None
            assert whole is not None
            assert work is not None
            work.wait()
            if not is_cupy(whole):
                whole.flags.writeable = False  # it is a copy: what is written there would be lost
            self._whole, self.arrays = whole, self._views(whole)
        return self.arrays

    def release(self, wait: bool = True) -> None:
        """Let go of the parameters; with ``wait``, of those on their way when they are here."""
        work = self._work
        self._whole = self._work = self.arrays = None
        if wait and work is not None:
            work.wait()

    def open(self) -> list[Array]:
        """Make memory for the gradients of one pass; what earlier passes have left is set aside."""
        self._gradients = self._empty()
        self.homes = self._views(self._gradients)
        self._set_aside = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self.pending = sum(param.calc_grad for param in self.params)
        return self.homes

    def close(self) -> Reduction:
        """Begin to average this pass's gradients over the ranks; zeros for those not there."""
        assert self._gradients is not None
        assert self.homes is not None
        used = [param.grad is not None for param in self.params]
        for param, home in zip(self.params, self.homes, strict=True):
            if param.grad is not home:
                home[...] = 0 if param.grad is None else param.grad
        self._fill_padding(self._gradients)
        reduction = Reduction(self, self._gradients, used)
        self.forget_gradients()
        return reduction

    def forget_gradients(self) -> None:
        """End what ``open`` has begun: parameters have the gradients of before again."""
        for param, grad in zip(self.params, self._set_aside, strict=True):
            param.grad = grad
        self._set_aside = []
        self.homes = self._gradients = None

    def put(self, position: int, value: Array) -> None:
        """Set a parameter to ``value``, of its shape and on its device: this rank's part of it."""
        cut = Cut(self, position)
        self.part[cut.here] = value.reshape(-1)[cut.of_all]


class Reduction:
    """Gradients of one flat on their way: each rank gets the mean of its row."""

    def __init__(self, flat: Flat, gradients: Array, used: list[bool]) -> None:
        self.flat = flat
        self.used = used  # by this rank
        part = array_module(flat.part).empty((1, flat.row), flat.dtype)
        self._part = part.reshape(-1)
        self._work: Work | None = flat.group.reduce_scatter(
            gradients, 1.0 / flat.group.size, out=part, async_op=True
        )

    def wait(self) -> None:
        """Block until it has ended, and free the gradients that were reduced."""
        work, self._work = self._work, None  # which keeps the gradients
        if work is not None:
            work.wait()

    def add(self, used: Sequence[bool]) -> None:
        """Add this rank's part to the parameters' gradients: of those that were ``used``."""
        for position, param in enumerate(self.flat.params):
            if not used[position]:
                continue
            piece = self._part[Cut(self.flat, position).here]
            if param.grad is None:
                param.grad = piece
            else:
                param.grad += piece


class Cut:
    """A rank's elements of a parameter: ``here`` in its part, ``of_all`` in the whole."""

    def __init__(self, flat: Flat, position: int, rank: int | None = None) -> None:
        first = (flat.group.rank if rank is None else rank) * flat.row
        start, stop = flat.starts[position : position + 2]
        begin, end = (min(max(edge, first), first + flat.row) for edge in (start, stop))
        self.here = slice(begin - first, end - first)
        self.of_all = slice(begin - start, end - start)
        self.length = end - begin


class PartPlacement(Placement):
    """A parameter of which this rank has a part, and a part of its gradient and of its state."""

    shards: GatheredShards

    def __init__(self, shards: GatheredShards, flat: Flat, position: int) -> None:
        self.shards, self.flat, self.position = shards, flat, position
        self._cut = Cut(flat, position)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.flat.shapes[self.position]

    def zeros(self, dtype: DTypeLike) -> Array:
        """Return new state for this rank's part, of one dimension. Not collective."""
        library = array_module(self.flat.part)
        return library.zeros(self._cut.length, dtype)  # type: ignore[no-any-return]

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        """Return (part of the parameter, of the gradient, *states), unless this rank has none."""
        assert variable.grad is not None
        part = self.flat.part[self._cut.here]
        return [(part, variable.grad, *states)] if self._cut.length else []

    def sum_of_squares(self, variable: Variable) -> float:
        """Return that of the whole gradient, in float64. Collective, blocking."""
        assert variable.grad is not None
        squares = np.array([sum_of_squares(variable.grad)])
        return float(self.flat.group.all_reduce(squares)[0])

    def whole(self, state: Array) -> Array:
        """Return the parts of all ranks in the parameter's shape, a new array. Collective."""
        group, library = self.flat.group, array_module(state)
        cuts = [Cut(self.flat, self.position, rank) for rank in range(group.size)]
        longest = max(cut.length for cut in cuts)
        mine = library.zeros((1, longest), state.dtype)
        mine[0, : state.size] = state
        rows = group.all_gather(mine)
        found = library.empty(math.prod(self.shape), state.dtype)
        for rank, cut in enumerate(cuts):
            found[cut.of_all] = rows[rank, : cut.length]
        return found.reshape(self.shape)  # type: ignore[no-any-return]

    def put(self, state: Array, value: Any) -> None:
        """Set ``state`` to this rank's part of ``value``. Not collective."""
        state[...] = to_device(value.reshape(-1)[self._cut.of_all], device_of(state))


class PartedVariable(Variable):
    """A parameter that is gathered when its array is read, as the modules of a model do.

    Its gradient is the part of this rank, of one dimension. To read ``array`` is collective.
    Parameters become this class in place, so that whoever holds one need not know.
    """

    __slots__ = ()
    placement: PartPlacement

    @property
    def data(self) -> Array:
        """All of the parameter; read-only where NumPy can say so, and freed when others follow."""
        placement = self.placement
        return placement.shards.arrays_of(placement.flat)[placement.position]

    @data.setter
    def data(self, value: Array) -> None:
        raise ValueError(
            "this parameter is sharded, so there is no array of this process to replace; "
            "load_state_dict copies values into it"
        )

    @property
    def buffer(self) -> Array | GradSink | None:
        """The array that a backward pass writes the whole gradient to; None outside of one."""
        placement = self.placement
        homes = placement.shards.homes_of(placement.flat)
        return None if homes is None else homes[placement.position]

    @buffer.setter
    def buffer(self, value: Array | GradSink | None) -> None:
        if value is not None:
            raise ValueError(
                "this parameter is sharded: its gradients are reduced where fl.fully_shard has "
                "arranged it, and neither distribute_module_grads nor a gradient buffer goes with "
                "that"
            )

    def assign(self, value: Array) -> None:
        """Set the parameter, of which this rank keeps its part. Every rank passes the same."""
        flat = self.placement.flat
        flat.release()
        flat.put(self.placement.position, to_device(value, device_of(flat.part)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.placement.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The parameter's dtype."""
        return self.placement.flat.dtype

    def __repr__(self) -> str:
        return f"Variable(sharded, shape={self.shape}, dtype={self.dtype})"
