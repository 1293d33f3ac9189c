"""The backend of a group of one process: every verb returns its input, multiplied by the scale."""

from flashlight_py import _native
from flashlight_py.distributed.backend import Backend, EntryPoints, dropped
from flashlight_py.distributed.backends.native import SLOWER, light_work
from flashlight_py.distributed.calls.arrays import check_out_rows, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import Journal, hidden_files
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import SCATTER
from flashlight_py.distributed.work import AllOf, Done, Work


class SingleBackend(Backend):
    """A group of one rank, for NumPy and CuPy arrays."""

    kind = DistributedBackend.SINGLE
    path = "nothing moves"
    rank = 0
    size = 1

    def start(self, call: Call) -> Work:
        """Scale in place, or return a scaled copy. For a message, raise ValueError."""
        verb, array = call.verb, call.array
        if call.refusal:
            return Done()
        if verb.is_message:
            raise ValueError(
                f"{verb}: expected a group of at least 2 ranks, got 1 rank. Start more processes"
            )
        if call.received is not None and call.rows is not None:
            call.received += call.rows
        if array is not None and not verb.in_place:
            source = array[0, ...] if verb is SCATTER else array
            array = source.copy() if call.out is None else call.out
            if call.out is not None:
                if call.out.ndim:
                    check_out_rows(call.name, call.out, source.shape[0] if source.ndim else 1, 0, 1)
                call.out[...] = source
        if array is not None and verb.reduces and verb.fills(0, call.root):
            scale_in_place(array, call.scale)
        return Done(array)

    def synchronize(self) -> None:
        """Do nothing: no operation is ever pending."""

    def close(self) -> None:
        """Do nothing: a group of one rank has no resources."""

    def bind(self, journal: Journal) -> EntryPoints:
        """Return native functions for calls in a group of one rank; see ``Backend``."""
        if (fast := _native.optional("fast", SLOWER)) is None:
            return super().bind(journal)
        journal.open_to_native(fast)
        functions = fast.bind(
            *(0, None, 0, 1, 0.0, (0, 0), (None,) * 3, (0,) * 12, (None,) * 3),
            (AllOf, None, light_work(fast), {}),
            *(journal.memory, journal.notes, hidden_files(), set(), ([], dropped)),
        )
        return EntryPoints(*functions)
