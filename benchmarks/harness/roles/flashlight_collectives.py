"""The verbs of this package, as a user calls them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, RankSetup, Refusal
from harness.roles import flashlight
from harness.roles.flashlight import RankRole
from harness.roles.verbs import Builder, CollectiveRole, Messages, Op, elements


def _sendrecv(x: Any, dst: int, out: Any, src: int, tag: int) -> Call:
    return lambda: fl.sendrecv(x, dst, out=out, src=src, tag=tag)


def _batch(ops: Sequence[Op]) -> Call:
    prepared = [fl.P2POp(*op) for op in ops]

    def call() -> None:
        fl.batch_isend_irecv(prepared).wait()

    return call


def _new_batch(ops: Sequence[Op]) -> Call:
    def call() -> None:
        made = [fl.P2POp(kind, x, peer, tag) for kind, x, peer, tag in ops]
        fl.batch_isend_irecv(made).wait()

    return call


class Flashlight(RankRole, CollectiveRole):
    """NumPy arrays; the kind "shared" is an array in shared memory, which is not copied."""

    messages = Messages(
        fl.send, fl.recv, fl.isend, fl.irecv, _sendrecv, _batch, new_batch=_new_batch
    )

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        return (Refusal, TypeError, fl.errors.BackendUnavailableError)

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        element = flashlight.dtype_of(dtype)
        shape = (elements(nbytes, element.itemsize, parts),)
        if kind != "shared":
            return np.empty(shape, element)
        create = getattr(fl.distributed, "shared_empty", None)
        if create is None:
            raise Refusal("flashlight_py has no distributed.shared_empty")
        return create(shape, element)

    def reduction(self, verb: str) -> Callable[[Any], object]:
        function: Callable[[Any], object] = getattr(fl, verb)
        return function

    def several(self, arrays: Sequence[Any], kind: str) -> Call:
        contiguous = kind == "contiguous"

        def together() -> None:
            fl.all_reduce_multiple(arrays, contiguous=contiguous)

        def loop() -> None:
            for x in arrays:
                fl.all_reduce(x)

        return loop if kind == "loop" else together

    @property
    def builders(self) -> Mapping[str, Builder]:
        root = self.rank == 0

        def part(x: Any) -> Any:
            return np.empty_like(x[: x.shape[0] // self.size])

        def gather_output(x: Any) -> Any:
            return np.empty(x.shape[0] * self.size, x.dtype)

        def with_out(verb: Callable[..., Any], x: Any, out: Any) -> tuple[Call, Any]:
            return lambda: verb(x, out=out), out

        return {
            "all_reduce": lambda x: (lambda: fl.all_reduce(x), x),
            "all_reduce, min": lambda x: (lambda: fl.all_reduce(x, op="min"), x),
            "all_reduce, max": lambda x: (lambda: fl.all_reduce(x, op="max"), x),
            "all_reduce, number": lambda x: (lambda: [fl.all_reduce(float(x[0]))], x),
            "all_reduce, every second": lambda x: (lambda: fl.all_reduce(x[::2]), x),
            "reduce": lambda x: (lambda: fl.reduce(x), x),
            "broadcast": lambda x: (lambda: fl.broadcast(x), x),
            "all_gather": lambda x: with_out(fl.all_gather, x, gather_output(x)),
            "gather": lambda x: with_out(fl.gather, x, gather_output(x) if root else None),
            "scatter": lambda x: with_out(fl.scatter, x if root else None, part(x)),
            "reduce_scatter": lambda x: with_out(fl.reduce_scatter, x, part(x)),
            "all_to_all": lambda x: with_out(fl.all_to_all, x, np.empty_like(x)),
            "barrier": lambda x: (fl.barrier, x),
            "all_gather, unequal": self._all_gather_unequal,
            "all_to_all, unequal": self._all_to_all_unequal,
            "broadcast_object": lambda x: (lambda: fl.broadcast_object(x), x),
            "all_gather_object": lambda x: (lambda: fl.all_gather_object(x)[-1], x),
        }

    def _all_gather_unequal(self, x: Any) -> tuple[Call, Any]:
        out = np.empty(x.shape[0] * (self.size + 1) // 2, x.dtype)
        part = self.share(x)
        return lambda: fl.all_gather(part, out=out), out

    def _all_to_all_unequal(self, x: Any) -> tuple[Call, Any]:
        out, (gives, _) = np.empty_like(x), self.unequal_rows(x.shape[0])
        return lambda: fl.all_to_all(x, rows=gives, out=out), out


def join(setup: RankSetup) -> Flashlight:
    """Connect to the other ranks."""
    return Flashlight(setup)
