"""A captured step on a GPU: what it needs to be as it was, what a replay does and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashlight_py import _native, random
from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Node
from flashlight_py.device import is_cupy
from flashlight_py.tape.checking import SavedNumbers
from flashlight_py.tape.cuda_session import NotCaptured
from flashlight_py.tape.holders import Holder
from flashlight_py.tape.kinds import package_of
from flashlight_py.tape.reach import MANY, Reach
from flashlight_py.tape.recording import gpu_array_of, live, numbers_of

Array = Any  # of CuPy
_tape = _native.load("tape")
# Makes what a replay returns from the arguments.
Result = Callable[[Sequence[Any]], Any]


class GpuReach(Reach):
    """All that a step can reach, with CuPy's objects, which are compared by identity.

    ``gpu_arrays``: the arrays of them, by how a person would write them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.gpu_arrays: dict[str, Array] = {}
        super().__init__(function)

    def _look(self, value: Any, above: Holder | None, key: Any) -> None:
        if is_cupy(value):
            self.gpu_arrays[above.words(key) if above else str(key)] = value
        else:
            super()._look(value, above, key)

    def _visit_of(self, kind: type) -> Any:
        return None if package_of(kind) == "cupy" else super()._visit_of(kind)


def memory_of(arrays: Iterable[Array]) -> set[int]:
    """Return the ids of the blocks of memory that CuPy has given to ``arrays``."""
    return {id(array.data.mem) for array in arrays}


def pool_of_graphs(cupy: Any) -> Any:
    """Return a pool of memory that gives nothing back before it is gone itself.

    CuPy's own do where memory is short, also what nodes of a graph will use.
    """
    given = []

    def give(size: int) -> Any:
        given.append(cupy.cuda.Memory(size))
        return cupy.cuda.MemoryPointer(given[-1], 0)

    return cupy.cuda.MemoryPool(give)


# Several graphs with the collectives between them: inside of a graph no comparison, flight record
# or watchdog would see a collective, and a lost rank would be a hang. cuBLAS is called by CFFI,
# since CuPy (13.6 to 14.2) raises where it is called while a stream is captured.
class Program:
    """A captured step: ``parts``, called one after the other, read ``inputs``; see ``GpuSession``.

    ``pool``: what has the memory of its graphs. ``grads``: which gradients it leaves behind.
    """

    def __init__(
        self,
        parts: list[Callable[[], object]],
        inputs: list[Array | None],
        result: Result,
        pool: Any,
    ) -> None:
        import cupy

        self._parts, self._inputs, self._result = parts, inputs, result
        self._pool = pool  # CuPy frees all that is not in use of a pool with the pool
        self._cupy: Any = cupy
        self._done = cupy.cuda.Event(disable_timing=True)
        self.grads: list[tuple[Variable, Array | None]] = []
        self.left_to_check = 0

    def guard(
        self,
        root: Callable[..., Any],
        read: list[tuple[Variable, Array | None]],
        present: list[Variable],
    ) -> None:
        """Keep what must be as it is now; ``read``: and which gradients; ``present``: not None."""
        reach = GpuReach(root)
        grads = {(id(variable), "grad") for variable in reach.variables}
        self._guards = _tape.guards(reach.guards(numbers_of(live.values()) | grads))
        self._read, self._present = read, present
        places = [place.get() for place in reach.arrays]
        self._constants = [(each, each.tobytes()) for each in places if each.size <= MANY]
        # Arrays of the user are copied to ``inputs``: one that the step can reach would be two.
        unread = {id(variable.grad) for variable in reach.variables} - {id(g) for _, g in read}
        self._known = [each for each in reach.gpu_arrays.values() if id(each) not in unread]
        self._memory = memory_of(self._known)
        self._generator = random.existing("cupy")  # its state is where the graphs know it

    def fits(self, values: Sequence[Any]) -> bool:
        """Return whether all that the step can reach is as it was."""
        given = [array for each in values if (array := gpu_array_of(each)) is not None]
        return (
            _tape.hold(self._guards)
            and random.existing("cupy") is self._generator
            and all(variable.grad is grad for variable, grad in self._read)
            and all(variable.grad is not None for variable in self._present)
            and all(array.tobytes() == bits for array, bits in self._constants)
            and self._memory.isdisjoint(memory_of(given))
        )

    def replay(self, values: Sequence[Any]) -> Any:
        """Return what the step returns, new; the host goes on once all is queued.

        Raises:
            DistributedError: as the step's collectives.
        """
        stream = self._cupy.cuda.get_current_stream()
        stream.wait_event(self._done)  # the last replay, from the same memory, may be on another
        try:
            for value, room in zip(values, self._inputs, strict=True):
                if room is not None:
                    room[...] = gpu_array_of(value)
            for part in self._parts:
                part()
            for variable, grad in self.grads:
                variable.grad = grad
            return self._result(values)
        finally:
            self._done.record(stream)


class GpuState:
    """All that a step on a GPU may change, as it is now."""

    def __init__(self, reach: GpuReach) -> None:
        self._grads = [(variable, variable.grad) for variable in reach.variables]
        self._arrays = {words: (array, array.copy()) for words, array in reach.gpu_arrays.items()}
        self._numbers = SavedNumbers(live.values())
        self._drawn = random.in_use()

    def restore(self) -> None:
        """Make all as it was."""
        for variable, grad in self._grads:
            variable.grad = grad
        for array, copy in self._arrays.values():
            array[...] = copy
        self._numbers.restore()
        for generator, state in self._drawn:  # captured kernels know where it lies
            random.set_state_of(generator, state)

    def bits(self, result: Any) -> dict[str, Any]:
        """Return all of it, and what the step has returned, by name, to be compared."""
        arrays = {words: copy.tobytes() for words, (_, copy) in self._arrays.items()}
        return {"what it returns": _bits(result), **arrays}


def _bits(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [_bits(each) for each in result]
    if isinstance(result, dict):
        return {name: _bits(each) for name, each in result.items()}
    array = gpu_array_of(result)
    return result if array is None else array.tobytes()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs in two of ``State.bits``."""
    return [name for name, bits in one.items() if bits != other.get(name, bits)]


def result_of(
    result: Any, values: Sequence[Any], inputs: Sequence[Array | None], there: set[int]
) -> Result:
    """Return what makes the result of each replay; ``there``: ids of what was there before.

    Raises:
        NotCaptured: it holds something that cannot be made anew.
    """
    number = next((n for n, v in enumerate(values) if v is result and v is not None), None)
    if number is not None:
        return lambda values: values[number]
    if id(result) in there or result is None or type(result) in (int, float, bool, str, complex):
        return lambda _: result
    if is_cupy(result):
        return _array_of(result, inputs)
    if type(result) is Variable:
        return _variable_of(result)
    if type(result) in (tuple, list):
        parts = [result_of(each, values, inputs, there) for each in result]
        return lambda values: type(result)([part(values) for part in parts])
    if type(result) is dict:
        named = {k: result_of(each, values, inputs, there) for k, each in result.items()}
        return lambda values: {name: part(values) for name, part in named.items()}
    raise NotCaptured(f"it returns an object of type {type(result).__name__}")


def _array_of(result: Array, inputs: Sequence[Array | None]) -> Result:
    number = next((n for n, array in enumerate(inputs) if array is result), None)
    if number is None:
        return lambda _: result.copy()
    return lambda values: gpu_array_of(values[number])


def _variable_of(result: Variable) -> Result:
    array: Any = result.data
    if not is_cupy(array):
        raise NotCaptured("it returns a variable of the host")
    calc_grad, has_history = result.calc_grad, result.node is not None
    node = Node(array.shape, array.dtype, None) if has_history else None  # type: ignore[arg-type]

    def make(_: Sequence[Any]) -> Variable:
        made = Variable(array.copy())
        made._calc_grad, made.node = calc_grad, node
        return made

    return make
