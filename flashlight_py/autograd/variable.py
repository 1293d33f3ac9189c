"""A variable: an array, its gradient, and the operation that made it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from flashlight_py import device, structure
from flashlight_py.autograd import graph
from flashlight_py.autograd.engine import GradSink, run_pass
from flashlight_py.autograd.graph import Leaf, Node, Outline, Vjp, note_changes, recording
from flashlight_py.device import Array, array_module, device_of, is_cupy, is_floating, to_device

GradHook: TypeAlias = "Callable[[Variable], None]"
Input: TypeAlias = Union["Variable", Array]
Operand: TypeAlias = Union["Variable", Array, float]
_new = object.__new__
_CUDA = 2  # kDLCUDA in dlpack.h


class Variable(Leaf):
    """An array in a computation whose gradient can be asked for.

    The array is NumPy's or CuPy's, or another with DLPack; it is shared, not copied. The dtype is
    kept, also with Python numbers; arrays of two dtypes yield what NumPy makes of them (float16
    with float32: float32), and each gets a gradient of its own dtype. A variable made by the user
    is a leaf; one made by an operation on variables with ``calc_grad`` remembers that operation
    until a backward pass has used it.

    Arrays must not be changed between a forward pass and its backward pass. ``backward()`` notices
    changes by this package, but not by NumPy. Indices, targets and lengths are copied.

    NumPy's functions return variables if ``fl.autograd.functions`` has the same function, arrays if
    the result has no derivative (``np.argmax``, ``<``), and raise TypeError otherwise if a variable
    needs a gradient. ``==`` compares objects, as sets, dicts and lists of variables need it;
    ``np.equal(x, y)`` compares elements.

    Args:
        array: the value, any shape; of a real floating dtype, or bfloat16, with ``calc_grad``.
        calc_grad: whether ``backward()`` computes a gradient for it.

    Raises:
        TypeError: not an array, or ``calc_grad`` with a dtype that has no gradient.
    """

    __slots__ = ()

    def __init__(self, array: Array, calc_grad: bool = False) -> None:
        if array.__class__ is not np.ndarray:
            array = _as_array(array)
        if calc_grad:
            _require_floating(array)
        self.data = array
        self.grad = self.node = self.hook = self.buffer = self.placement = None
        self.changed = 0
        self._calc_grad = calc_grad

    @property
    def array(self) -> Array:
        """The value. Assigning replaces the array (no copy); shape and dtype must stay.

        Raises:
            TypeError: the new value is no array, or of another dtype.
            ValueError: the new array has another shape, or this is a parameter of a sharded module.
        """
        return self.data

    @array.setter
    def array(self, value: Array) -> None:
        value = _as_array(value)
        _require_same(value, self, "Variable.array")
        if self.placement is not None:
            raise ValueError(
                "Variable.array: this parameter is of a sharded module, whose arrays lie in memory "
                "that ranks have in common; load_state_dict copies values into it"
            )
        if self.data is not value:
            structure.changed()
        self.data = value
        note_changes((self,))

    @property
    def calc_grad(self) -> bool:
        """Whether ``backward()`` computes a gradient for this variable; assignable on leaves.

        Raises:
            TypeError: set to True where the dtype has no gradient.
            ValueError: set on the result of an operation.
        """
        return self._calc_grad

    @calc_grad.setter
    def calc_grad(self, value: bool) -> None:
        if self.node is not None:
            raise ValueError("calc_grad can be set on leaves only; this is an operation's result")
        if value:
            _require_floating(self)
        self._calc_grad = bool(value)
        self.changed = getattr(self, "changed", 0)  # an operation's result that becomes a leaf
        structure.changed()

    @property
    def has_history(self) -> bool:
        """Whether a backward pass can go from this variable to those it was computed from.

        False for a leaf, for a constant, and once a backward pass has freed the graph.
        """
        node = self.node
        return node is not None and (node.edges is not None or isinstance(node, Outline))

    @property
    def grad_buffer(self) -> Array | None:
        """Memory for this leaf's gradient, or None (the default): then each pass makes its own.

        With a buffer, which may be a view into a larger array, the first contribution after
        ``grad`` was None is written into it, later ones are added in place, and ``grad`` is the
        buffer itself. None for a sharded module's parameter (see ``fl.fully_shard``).

        Raises:
            TypeError: the buffer is no array or of another dtype than the variable.
            ValueError: it has another shape, is read-only, or the variable is no leaf, or sharded.
        """
        return None if isinstance(self.buffer, GradSink) else self.buffer

    @grad_buffer.setter
    def grad_buffer(self, buffer: Array | None) -> None:
        if buffer is None and isinstance(self.buffer, GradSink):
            return  # there is none to take away
        if buffer is not None:
            self._require_leaf("a gradient buffer")
            buffer = _as_array(buffer)
            _require_same(buffer, self, "Variable.grad_buffer")
            if not (is_cupy(buffer) or buffer.flags.writeable):
                raise ValueError("Variable.grad_buffer must be writable, got a read-only array")
            if isinstance(self.buffer, GradSink):
                raise ValueError(
                    "this parameter is sharded: its gradients are reduced where fl.fully_shard has "
                    "arranged it, and neither distribute_module_grads nor a gradient buffer goes "
                    "with that"
                )
        self.buffer = buffer
        structure.changed()

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype."""
        return self.data.dtype

    def assign(self, value: Array) -> None:
        """Copy ``value``, of the same shape, into the array: in place, across devices if need be.

        Floating dtypes are cast. For the library's own use.
        """
        self.data[...] = to_device(value, device_of(self.data))
        note_changes((self,))

    def numpy(self) -> Array:
        """Return the value as a NumPy array: itself on the CPU, else a copy (blocks for it)."""
        return to_device(self.data, "cpu")

    def scalar(self) -> float:
        """Return the only element as a Python number; blocks until it is computed.

        Raises:
            ValueError: there is not exactly one element.
        """
        if self.data.size != 1:
            raise ValueError(f"a number needs exactly one element, got shape {self.shape}")
        return self.data.item()  # type: ignore[no-any-return]

    item = scalar  # NumPy's name, and torch's

    def detach(self) -> Variable:
        """Return a constant that shares the array: no gradient passes it."""
        return Variable(self.data)

    def copy(self) -> Variable:
        """Return the same value in a new array; gradients pass it."""
        return record(self.data.copy(), (self, lambda grad: grad))

    def zero_grad(self) -> None:
        """Drop the gradient: ``grad`` is None until the next backward pass."""
        self.grad = None

    def register_grad_hook(self, hook: GradHook) -> None:
        """Call ``hook(self)`` in every backward pass once this leaf's gradient is complete.

        The pass then goes on, so the parameters of the last layer come first. The hook may read and
        replace ``grad``. A new hook replaces the old one. Passes without the variable skip it.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: the variable is the result of an operation.
        """
        if not callable(hook):
            raise TypeError(f"a gradient hook must be callable, got {type(hook).__name__}")
        self._require_leaf("a gradient hook")
        self.hook = hook
        structure.changed()

    def clear_grad_hook(self) -> None:
        """Remove the hook, if there is one."""
        self.hook = None
        structure.changed()

    def backward(self, grad: Array | None = None, retain_graph: bool = False) -> None:
        """Add to every leaf's ``grad`` the gradient of this variable with respect to it.

        Blocks the calling thread (on a GPU: until the kernels are queued). Existing gradients are
        added to in place. If a hook raises, the exception ends the pass: some gradients are then
        complete, some partial, some absent.

        Args:
            grad: gradient of the final objective with respect to this variable, of its shape and
                dtype, not changed; by default 1, for which this must have exactly one element.
            retain_graph: keep the graph, which is freed otherwise, for another call.

        Raises:
            ValueError: more than one element and no ``grad``, or ``grad`` of another shape.
            TypeError: ``grad`` is no array or of another dtype.
            RuntimeError: nothing here has ``calc_grad``, the graph was already freed, or a leaf was
                changed after its use: an optimizer's step, ``load_state_dict``, a new ``array``.
        """
        if not self._calc_grad:
            raise RuntimeError(
                "backward: this variable depends on nothing that has calc_grad=True; "
                "make the inputs with param(), or call train() on the module"
            )
        if grad is None:
            like = self.data
            if like.size != 1:
                raise ValueError(
                    "backward() without grad needs a variable of one element, got shape "
                    f"{like.shape}; reduce it to a loss, or pass grad"
                )
            if type(like) is np.ndarray and not like.ndim:
                seed = np.asarray(1, like.dtype)  # in a fifth of the time of ones()
            else:
                seed = array_module(like).ones(like.shape, like.dtype)
        else:
            seed = _as_array(grad)
            _require_same(seed, self.data, "backward(grad)")
        run_pass(self.node or self, seed, retain_graph)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the array and ``calc_grad``, not the graph, gradient or hook."""
        if self.placement is not None:
            self.placement.shards.check("copy")
        return Variable, (self.data, self._calc_grad)

    def __repr__(self) -> str:
        return f"Variable({self.data!r}, calc_grad={self._calc_grad})"

    def __format__(self, spec: str) -> str:
        """Return the only element in the format ``spec``; without one, what ``str`` does."""
        return format(self.scalar(), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the array, for ``np.asarray(variable)`` and functions of other libraries.

        Raises:
            TypeError: the variable needs a gradient, or is on a GPU.
            ValueError: ``copy`` is False and ``dtype`` needs one.
        """
        if self.calc_grad:
            raise TypeError(
                "NumPy asks for the array of a Variable that needs a gradient (shape "
                f"{self.shape}): what it computes would not be part of the graph. Where that is "
                "meant, pass it variable.numpy(); else use the functions of fl.autograd.functions"
            )
        return np.array(self.data, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self.data.ndim:
            raise TypeError("len() of a Variable without dimensions; its number is scalar()")
        return int(self.data.shape[0])

    def __iter__(self) -> Iterator[Variable]:
        """Go through the first dimension."""
        return map(self.__getitem__, range(len(self)))

    def _require_leaf(self, what: str) -> None:
        if self.node is not None:
            raise ValueError(f"{what} belongs to a leaf; this variable is an operation's result")

    if TYPE_CHECKING:  # operators.py adds these to the class, one function each

        def __neg__(self) -> Variable: ...
        def __add__(self, other: Operand) -> Variable: ...

        __abs__ = __neg__
        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__
        __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __add__

        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __lt__(self, other: Operand) -> Array: ...

        __le__ = __gt__ = __ge__ = __lt__

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any: ...
        def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any: ...
        def __getitem__(self, index: Any) -> Variable: ...
        def reshape(self, *shape: Any) -> Variable: ...
        def transpose(self, *axes: Any) -> Variable: ...
        def squeeze(self, axis: Any = None) -> Variable: ...
        def astype(self, dtype: Any) -> Variable: ...
        def flatten(self) -> Variable: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> Variable: ...
        def var(self, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Variable: ...

        mean = max = min = sum

        @property
        def T(self) -> Variable: ...


def input(array: Array) -> Variable:
    """Return a leaf without gradient that shares ``array``, of any shape and dtype, such as data.

    Anything else than an array is a TypeError.
    """
    return Variable(array)


no_grad = input
"""Another name of ``fl.input``, for constants."""


def param(array: Array) -> Variable:
    """Return a leaf with gradient that shares ``array``, of any shape: something to learn.

    Anything else than an array of a real floating dtype is a TypeError.
    """
    return Variable(array, True)


def shards_of(variables: Iterable[Variable]) -> list[Any]:
    """Return what the variables' sharded modules have in common, each once, in order."""
    return list(dict.fromkeys(v.placement.shards for v in variables if v.placement is not None))


def record(array: Any, *inputs: tuple[Variable, Vjp], through: Vjp | None = None) -> Variable:
    """Return the result of an operation, which remembers how to reach those inputs that learn.

    Args:
        array: the result.
        inputs: each input with its vector-Jacobian product (see ``engine``); hooks of inputs
            that come first fire first.
        through: see ``Node``.
    """
    if array.__class__ is not np.ndarray and isinstance(array, np.generic):
        # NumPy's answer where a result has no dimensions.
        array = getattr(array, "__array_library__", np).asarray(array)
    return record_all(array, inputs, through)


def record_all(
    array: Array, inputs: Sequence[tuple[Variable, Vjp]], through: Vjp | None = None
) -> Variable:
    """Return what :func:`record` returns: inputs in a list take half of a microsecond less."""
    edges: list[tuple[graph.Target, Vjp]] = []
    for edge in inputs:
        x, vjp = edge
        if x._calc_grad:
            edges.append(edge if x.node is None else (x.node, vjp))
    result = _new(Variable)
    result.data = array
    result.grad = result.hook = result.buffer = result.placement = result.node = None
    if not edges:
        result._calc_grad = False
        return result
    result._calc_grad = True
    if recording.is_outline:
        result.node = Outline(tuple([source for source, _ in edges]))
    else:
        result.node = Node(array.shape, array.dtype, edges, through)
    return result


def record_pair(
    array: Any, x: Variable, x_vjp: Vjp, y: Variable, y_vjp: Vjp, through: Vjp | None = None
) -> Variable:
    """Return what :func:`record` returns of two operands, which may have been broadcast.

    A vjp may return the gradient of the broadcast operand: it is summed to the operand's shape.
    """
    if x.data.shape != array.shape:
        x_vjp = summed(x_vjp, x.data.shape)
    if y.data.shape != array.shape:
        y_vjp = summed(y_vjp, y.data.shape)
    return record(array, (x, x_vjp), (y, y_vjp), through=through)


def summed(vjp: Vjp, shape: tuple[int, ...]) -> Vjp:
    def vjp_of_operand(grad: Array) -> Array:
        grad = vjp(grad)
        if grad.shape == shape:
            return grad
        added = grad.ndim - len(shape)
        stretched = [i + added for i, n in enumerate(shape) if n == 1 != grad.shape[i + added]]
        return device.total(grad, (*range(added), *stretched)).reshape(shape)

    vjp_of_operand.__qualname__ = vjp.__qualname__  # which is in errors
    return vjp_of_operand


def record_in_order(array: Any, *inputs: tuple[Variable, Vjp]) -> Variable:
    """Return what :func:`record` returns, for an operation that does more than compute.

    A backward pass visits those below it in the reverse of the order in which they were recorded,
    so that the messages of a forward pass have their answers in reverse order.
    """
    result = record(array, *inputs)
    if isinstance(result.node, Outline):
        result.node.ordered = True
    elif result.node is not None:
        result.node = graph.OrderedNode(result.node)
    return result


def function(forward: Callable[..., tuple[Any, Callable[[Array], Any]]]) -> Callable[..., Variable]:
    """Return an operation of your own on variables, with its derivative; a decorator.

    ``forward`` is called as the operation is, with arrays (NumPy's or CuPy's) in the place of
    variables, and returns an array and ``backward``. A backward pass calls that once with the
    gradient of the result, which it must not change. It returns a gradient for each variable or
    array that was passed by position, in a tuple if there are several, of their shapes; None where
    it is zero or not needed. ``fl.gradcheck`` compares the derivative with differences.

    Raises:
        TypeError: when called: ``forward`` does not return an array and a function, or a variable
            is passed by name.
        ValueError: in ``backward()``: gradients in another number, or of other shapes.

    Example:
        >>> @fl.autograd.function
        ... def softplus(x):
        ...     e = np.exp(x)
        ...     return np.log1p(e), lambda grad: grad * e / (1 + e)
        >>> x = fl.param(np.zeros(2))
        >>> softplus(x).sum().backward()
        >>> x.grad
        array([0.5, 0.5])
    """
    name = getattr(forward, "__name__", "the operation")

    @functools.wraps(forward)
    def operation(*args: Any, **options: Any) -> Variable:
        if any(isinstance(each, Variable) for each in options.values()):
            raise TypeError(f"{name}: pass variables by position; options have no gradient")
        given = [x.data if isinstance(x, Variable) else x for x in args]
        made = forward(*given, **options)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise TypeError(f"{name} must return an array, and a function from its gradient on")
        result, backward = _as_array(made[0]), made[1]
        places = [at for at, x in enumerate(given) if isinstance(x, np.ndarray) or is_cupy(x)]
        learning = {at: x for at, x in enumerate(args) if isinstance(x, Variable) and x._calc_grad}
        ends = set(learning)
        shapes = [learning[at].shape if at in learning else None for at in places]
        if learning:
            _require_floating(result)

        def gradients(grad: Array) -> Any:
            found = backward(grad)
            found = found if isinstance(found, tuple) else (found,)
            got = [None if x is None else getattr(x, "shape", type(x).__name__) for x in found]
            if len(got) != len(shapes) or any(
                None not in (shape, one) and shape != one
                for shape, one in zip(shapes, got, strict=True)
            ):
                raise ValueError(
                    f"the gradients of {name}: expected one for each variable or array that was "
                    f"passed by position, of the shapes {shapes} (None: any), got {got}"
                )
            # Views, of which the pass makes copies: the function may keep what it has returned.
            zero = array_module(grad).zeros_like
            return {
                at: zero(given[at]) if each is None else each[...]
                for at, each in zip(places, found, strict=True)
                if at in ends
            }

        edges = [(x, lambda found, at=at: found[at]) for at, x in learning.items()]
        return record_all(result, edges, gradients)

    return operation


def _as_array(value: object) -> Array:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return value  # type: ignore[return-value]
    if isinstance(value, np.generic):
        return getattr(value, "__array_library__", np).array(value)  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] != _CUDA:
            return np.from_dlpack(value)
        import cupy

        return cupy.from_dlpack(value)  # type: ignore[no-any-return]
    raise TypeError(
        f"expected a NumPy or CuPy array (or one with DLPack), got {type(value).__name__}; "
        "convert it with numpy.asarray first"
    )


def _require_floating(array: Array | Variable) -> None:
    if not is_floating(array.dtype):
        raise TypeError(
            f"a gradient needs a real floating dtype, got {array.dtype}; "
            "cast the array, or leave calc_grad off"
        )


def _require_same(value: Array, like: Array | Variable, what: str) -> None:
    if value.shape != like.shape:
        raise ValueError(f"{what} must have shape {like.shape}, got {value.shape}")
    if value.dtype != like.dtype:
        raise TypeError(f"{what} must have dtype {like.dtype}, got {value.dtype}; cast it first")
