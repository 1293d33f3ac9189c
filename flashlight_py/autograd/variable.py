"""A variable: an array, its gradient, and the operation that computed it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from flashlight_py import device, structure
from flashlight_py.autograd import graph
from flashlight_py.autograd.engine import GradSink, run_pass
from flashlight_py.autograd.graph import Leaf, Node, Outline, Vjp, note_changes, this_thread
from flashlight_py.device import Array, array_module, device_of, is_cupy, is_floating, to_device

Input: TypeAlias = Union["Variable", Array]
Operand: TypeAlias = Union["Variable", Array, float]
_new = object.__new__
_CUDA = 2  # kDLCUDA in dlpack.h


class Variable(Leaf):
    """An array in a computation, with an optional gradient.

    ``array`` is a NumPy or CuPy array, or another array with DLPack. The variable refers to it
    without a copy and keeps its dtype, also in arithmetic with Python numbers. Arrays of two dtypes
    follow NumPy's promotion (float16 with float32: float32). Each gradient has the dtype of its
    variable. A variable that the user creates is a leaf. If an input of an operation has
    ``calc_grad``, the result keeps the graph until a backward pass frees it.

    Do not modify arrays between a forward pass and its backward pass. ``backward()`` detects
    changes by this package, but not changes by NumPy. Operations copy indices, targets and lengths.

    NumPy functions that ``fl.autograd.functions`` also has return variables. Functions whose result
    has no derivative (``np.argmax``, ``<``) return arrays. Other NumPy functions raise TypeError if
    a variable needs a gradient. ``==`` is True only for the same variable, so that sets and dicts
    can have variables. ``np.equal(x, y)`` compares elements.

    Args:
        array: The value, of any shape. With ``calc_grad`` the dtype must be floating.
        calc_grad: Whether ``backward()`` computes a gradient for the variable.

    Raises:
        TypeError: If ``array`` is not an array, or not floating although ``calc_grad`` is True.
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
        """The value. Assignment stores another array of the same shape and dtype, without a copy.

        Assignment raises TypeError if the new value is not an array or has another dtype, and
        ValueError if its shape differs or if the variable is sharded.
        """
        return self.data

    @array.setter
    def array(self, value: Array) -> None:
        value = _as_array(value)
        _require_same(value, self, "Variable.array")
        if self.placement is not None:
            raise ValueError(
                "Variable.array: a parameter of a sharded module cannot be replaced, because ranks "
                "share its memory. Copy values into it by load_state_dict"
            )
        if self.data is not value:
            structure.changed()
        self.data = value
        note_changes((self,))

    @property
    def calc_grad(self) -> bool:
        """Whether ``backward()`` computes a gradient for this variable. Can be set on leaves.

        Setting True raises TypeError unless the dtype is floating. Setting it on the result of an
        operation raises ValueError.
        """
        return self._calc_grad

    @calc_grad.setter
    def calc_grad(self, value: bool) -> None:
        if self.node is not None:
            raise ValueError("Variable.calc_grad: expected a leaf, got an operation's result")
        if value:
            _require_floating(self)
        self._calc_grad = bool(value)
        # record_all() does not set ``changed``, which every leaf needs.
        self.changed = getattr(self, "changed", 0)
        structure.changed()

    @property
    def has_history(self) -> bool:
        """Whether the graph of this variable exists, so that ``backward()`` can start here.

        False for leaves and constants, and after a backward pass has freed the graph.
        """
        node = self.node
        return node is not None and (node.edges is not None or isinstance(node, Outline))

    @property
    def grad_buffer(self) -> Array | None:
        """Array that stores this leaf's gradient. If None (the default), each pass allocates it.

        A buffer may be a view into a larger array. If ``grad`` is None, a pass copies the first
        contribution to the buffer, and ``grad`` becomes the buffer. Later contributions are added
        in place. Always None for parameters of a sharded module (see ``fl.fully_shard``).
        Assignment raises TypeError if the buffer is not an array or has another dtype than the
        variable. It raises ValueError if the buffer has another shape or is read-only, or if the
        variable is sharded or the result of an operation.
        """
        return None if isinstance(self.buffer, GradSink) else self.buffer

    @grad_buffer.setter
    def grad_buffer(self, buffer: Array | None) -> None:
        if buffer is None and isinstance(self.buffer, GradSink):
            return  # None is already the value
        if buffer is not None:
            self._require_leaf("a gradient buffer")
            buffer = _as_array(buffer)
            _require_same(buffer, self, "Variable.grad_buffer")
            if not (is_cupy(buffer) or buffer.flags.writeable):
                raise ValueError("Variable.grad_buffer must be writable, got a read-only array")
            if isinstance(self.buffer, GradSink):
                raise ValueError(
                    "Variable.grad_buffer: a sharded parameter cannot have a gradient buffer, and "
                    "distribute_module_grads cannot be combined with fl.fully_shard, which reduces "
                    "its gradients. Use only one of them"
                )
        self.buffer = buffer
        structure.changed()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
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
        """The dtype of the array."""
        return self.data.dtype

    def assign(self, value: Array) -> None:
        """Copy ``value``, an array of the same shape on any device, into ``array``. Internal."""
        self.data[...] = to_device(value, device_of(self.data))
        note_changes((self,))

    def numpy(self) -> Array:
        """Return the array if it is on the CPU, else a NumPy copy. Blocks until it is copied."""
        return to_device(self.data, "cpu")

    def scalar(self) -> float:
        """Return the only element as a Python number. Blocks until it is computed.

        Raises:
            ValueError: If the variable does not have exactly one element.
        """
        if self.data.size != 1:
            raise ValueError(f"scalar: expected exactly one element, got shape {self.shape}")
        return self.data.item()  # type: ignore[no-any-return]

    item = scalar  # NumPy and torch call it item()

    def detach(self) -> Variable:
        """Return a constant with the same array. Gradients do not propagate through it."""
        return Variable(self.data)

    def copy(self) -> Variable:
        """Return the value in a new array. Gradients propagate through the copy."""
        return record(self.data.copy(), (self, lambda grad: grad))

    def zero_grad(self) -> None:
        """Set ``grad`` to None until the next backward pass."""
        self.grad = None

    def register_grad_hook(self, hook: Callable[[Variable], None]) -> None:
        """Call ``hook(self)`` in every backward pass when this leaf's gradient is complete.

        The pass continues after the hook. Hooks of the last layer run first. The hook may read and
        replace ``grad``. A new hook replaces the previous hook. Passes that do not use the
        variable do not call the hook.

        Raises:
            TypeError: If ``hook`` is not callable.
            ValueError: If the variable is the result of an operation.
        """
        if not callable(hook):
            raise TypeError(f"register_grad_hook: hook must be callable, got {type(hook).__name__}")
        self._require_leaf("a gradient hook")
        self.hook = hook
        structure.changed()

    def clear_grad_hook(self) -> None:
        """Remove the gradient hook, if there is one."""
        self.hook = None
        structure.changed()

    def backward(self, grad: Array | None = None, retain_graph: bool = False) -> None:
        """Add the gradient of this variable with respect to every leaf to ``leaf.grad``.

        Blocks until all gradients are computed, or, on a GPU, until the kernels are queued. If a
        leaf has a gradient, that array changes in place. If a hook raises, the pass ends with its
        exception, and gradients may be complete, partial or missing.

        Args:
            grad: Gradient of the objective for this variable, of the same shape and dtype. It is
                not modified. Default: 1, if the variable has exactly one element.
            retain_graph: Keep the graph for another call. By default the graph is freed.

        Raises:
            ValueError: If ``grad`` is missing and the variable does not have one element, or if
                ``grad`` has another shape.
            TypeError: If ``grad`` is not an array or has another dtype.
            RuntimeError: If no input has ``calc_grad``, if the graph was freed, or if an optimizer
                step, ``load_state_dict`` or a new ``array`` changed a leaf after the forward pass.
        """
        if not self._calc_grad:
            raise RuntimeError(
                "backward: expected a variable that depends on a variable with calc_grad=True. "
                "Make the inputs with param(), or call train() on the module"
            )
        if grad is None:
            like = self.data
            if like.size != 1:
                raise ValueError(
                    "backward() without grad: expected a variable of one element, got shape "
                    f"{like.shape}. Reduce it to a loss, or pass grad"
                )
            if type(like) is np.ndarray and not like.ndim:
                seed = np.asarray(1, like.dtype)  # five times as fast as np.ones()
            else:
                seed = array_module(like).ones(like.shape, like.dtype)
        else:
            seed = _as_array(grad)
            _require_same(seed, self.data, "backward(grad)")
        run_pass(self.node or self, seed, retain_graph)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have the array and ``calc_grad``, but no graph, gradient or hook."""
        if self.placement is not None:
            self.placement.shards.check("copy")
        return Variable, (self.data, self._calc_grad)

    def __repr__(self) -> str:
        return f"Variable({self.data!r}, calc_grad={self._calc_grad})"

    def __format__(self, spec: str) -> str:
        """Format the only element by ``spec``. An empty ``spec`` formats like ``str``."""
        return format(self.scalar(), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the array, for ``np.asarray(variable)`` and functions of other libraries.

        Raises TypeError if the variable needs a gradient, or is on a GPU. Raises ValueError if
        ``copy`` is False and ``dtype`` needs a copy.
        """
        self._require_constant("numpy", "variable.numpy()", TypeError)
        return np.array(self.data, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the array without a copy, for ``np.from_dlpack`` and ``torch.from_dlpack``.

        ``options`` are ``stream``, ``max_version``, ``dl_device`` and ``copy`` of the protocol.
        Raises BufferError if the variable needs a gradient.
        """
        self._require_constant("from_dlpack", "variable.array", BufferError)
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type and the number of the device, as in dlpack.h."""
        return self.data.__dlpack_device__()

    def _require_constant(self, operation: str, remedy: str, error: type[Exception]) -> None:
        if self.calc_grad:
            raise error(
                f"{operation}: a Variable of shape {self.shape} that needs a gradient cannot "
                "become an array, because results would not be part of the graph. Use functions "
                f"of fl.autograd.functions, or pass {remedy} if no gradient is needed"
            )

    def __len__(self) -> int:
        if not self.data.ndim:
            raise TypeError("len(): expected a Variable with dimensions, got one number")
        return int(self.data.shape[0])

    def __iter__(self) -> Iterator[Variable]:
        """Iterate over the first dimension."""
        return map(self.__getitem__, range(len(self)))

    def _require_leaf(self, attribute: str) -> None:
        if self.node is not None:
            raise ValueError(f"{attribute} needs a leaf, got an operation's result")

    if TYPE_CHECKING:  # for type checkers: operators.py adds these methods

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
    """Return a leaf without gradient for ``array`` of any shape and dtype."""
    return Variable(array)


no_grad = input
"""Alias of ``fl.input``, for constants."""


def param(array: Array) -> Variable:
    """Return a leaf with gradient for ``array`` of any shape and real floating dtype."""
    return Variable(array, True)


def shards_of(variables: Iterable[Variable]) -> list[Any]:
    """Return the distinct ``Shards`` objects of the sharded modules that own ``variables``."""
    return list(dict.fromkeys(v.placement.shards for v in variables if v.placement is not None))


def record(array: Any, *inputs: tuple[Variable, Vjp], through: Vjp | None = None) -> Variable:
    """Return the result of an operation, with edges to the inputs that need a gradient.

    Args:
        array: The result.
        inputs: Each input with its vector-Jacobian product (see ``engine``). Hooks of earlier
            inputs run first.
        through: None, or a function of the result's gradient that runs before the products.
    """
    if array.__class__ is not np.ndarray and isinstance(array, np.generic):
        # NumPy returns a scalar instead of an array without dimensions.
        array = getattr(array, "__array_library__", np).asarray(array)
    return record_all(array, inputs, through)


def record_all(
    array: Array, inputs: Sequence[tuple[Variable, Vjp]], through: Vjp | None = None
) -> Variable:
    """Record like :func:`record`. A call takes 0.5 us less, because ``inputs`` is a sequence."""
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
    if this_thread.is_outline:
        result.node = Outline(tuple([source for source, _ in edges]))
    else:
        result.node = Node(array.shape, array.dtype, edges, through)
    return result


def record_pair(
    array: Any, x: Variable, x_vjp: Vjp, y: Variable, y_vjp: Vjp, through: Vjp | None = None
) -> Variable:
    """Record an operation on two operands. A broadcast operand gets the sum of its gradients."""
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

    vjp_of_operand.__qualname__ = vjp.__qualname__  # errors quote it
    return vjp_of_operand


def record_in_order(array: Any, *inputs: tuple[Variable, Vjp]) -> Variable:
    """Record like :func:`record`, for an operation with side effects such as messages.

    A backward pass visits these operations in the reverse order of recording, on all ranks.
    """
    result = record(array, *inputs)
    if isinstance(result.node, Outline):
        result.node.ordered = True
    elif result.node is not None:
        result.node = graph.OrderedNode(result.node)
    return result


def function(forward: Callable[..., tuple[Any, Callable[[Array], Any]]]) -> Callable[..., Variable]:
    """Return a differentiable operation on variables, from its forward function; a decorator.

    ``forward`` receives the arguments of the operation, with NumPy or CuPy arrays in place of
    variables. It returns an array and a function ``backward``. A backward pass calls ``backward``
    once with the gradient of the result, which ``backward`` must not modify. ``backward`` returns
    one gradient for each variable or array that was passed by position, as a tuple if there are
    several. A gradient has the shape of its argument, or is None if it is zero or not needed. Check
    the derivative with ``fl.gradcheck``.

    Raises:
        TypeError: If a call passes a variable by keyword, or ``forward`` returns other types.
        ValueError: If ``backward`` returns a wrong number of gradients or wrong shapes.
            ``Variable.backward()`` raises this error.

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
        if any(isinstance(option, Variable) for option in options.values()):
            raise TypeError(f"{name}: got a Variable by keyword. Pass variables by position")
        arrays = [x.data if isinstance(x, Variable) else x for x in args]
        returned = forward(*arrays, **options)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            raise TypeError(f"{name} must return an array and a function, got {type(returned)}")
        result, backward = _as_array(returned[0]), returned[1]
        positions = [i for i, x in enumerate(arrays) if isinstance(x, np.ndarray) or is_cupy(x)]
        learning = {i: x for i, x in enumerate(args) if isinstance(x, Variable) and x._calc_grad}
        needed = set(learning)
        shapes = [learning[index].shape if index in learning else None for index in positions]
        if learning:
            _require_floating(result)

        def gradients(grad: Array) -> Any:
            grads = backward(grad)
            grads = grads if isinstance(grads, tuple) else (grads,)
            received = [None if x is None else getattr(x, "shape", type(x).__name__) for x in grads]
            if len(received) != len(shapes) or any(
                None not in (shape, other) and shape != other
                for shape, other in zip(shapes, received, strict=True)
            ):
                raise ValueError(
                    f"{name}: backward must return one gradient per array or variable passed by "
                    f"position, of the shapes {shapes} (None: any shape), got {received}"
                )
            # Return views, which the pass copies, because the user may keep the returned arrays.
            zero = array_module(grad).zeros_like
            return {
                index: zero(arrays[index]) if gradient is None else gradient[...]
                for index, gradient in zip(positions, grads, strict=True)
                if index in needed
            }

        edges = [(x, lambda grads, index=index: grads[index]) for index, x in learning.items()]
        return record_all(result, edges, gradients)

    return operation


def _as_array(value: object) -> Array:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return value  # type: ignore[return-value]
    if isinstance(value, np.generic):
        return getattr(value, "__array_library__", np).array(value)  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack_device__") and not isinstance(value, Variable):
        if value.__dlpack_device__()[0] != _CUDA:
            return np.from_dlpack(value)  # type: ignore[arg-type]
        import cupy

        return cupy.from_dlpack(value)  # type: ignore[no-any-return]
    raise TypeError(
        f"expected a NumPy, CuPy or DLPack array, got {type(value).__name__}. "
        "Convert it with numpy.asarray first"
    )


def _require_floating(array: Array | Variable) -> None:
    if not is_floating(array.dtype):
        raise TypeError(
            f"a variable with gradient must have a real floating dtype, got {array.dtype}. "
            "Cast the array, or pass calc_grad=False"
        )


def _require_same(value: Array, like: Array | Variable, name: str) -> None:
    if value.shape != like.shape:
        raise ValueError(f"{name} must have shape {like.shape}, got {value.shape}")
    if value.dtype != like.dtype:
        raise TypeError(f"{name} must have dtype {like.dtype}, got {value.dtype}. Cast it first")
