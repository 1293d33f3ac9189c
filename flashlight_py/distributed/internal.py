"""Internal names for code outside ``distributed/``, which imports only these and public names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlight_py._native.codes import DTYPES
from flashlight_py.checks import as_integer, check_integer
from flashlight_py.distributed import verbs
from flashlight_py.distributed.api import memory as host_memory
from flashlight_py.distributed.api.verb_call import check_calls, in_step, reason_of, reject_together
from flashlight_py.distributed.backend import Backend, exchange_bytes
from flashlight_py.distributed.calls import arrays as call_arrays
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.call import COMPOSED, PASS_FAILED, SPARSE, Call, Matched
from flashlight_py.distributed.calls.checks import bounds, check_rank
from flashlight_py.distributed.calls.journal import caller, hide_folder
from flashlight_py.distributed.constants import LinearOp, ReduceOp
from flashlight_py.distributed.failures import abort, flight_record
from flashlight_py.distributed.failures.flight_record import dump, read_fields
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.groups.membership import Membership, members_of, world_fast
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.reducers.hook import CommunicationHook, check_hook
from flashlight_py.distributed.reducers.reducer import EagerReducer, plan_buckets, reduce_all
from flashlight_py.distributed.rendezvous import store as rendezvous
from flashlight_py.distributed.rendezvous.secret import REMEDY as SECRET_REMEDY
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.stores import is_local
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import MOST_SECONDS, Settings, requested_interface
from flashlight_py.distributed.start.world import current_world, group_or_world
from flashlight_py.distributed.verbs import ALL_REDUCE, RECV, SCATTER, SEND, Verb
from flashlight_py.distributed.work import AllOf, Done, Then

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.nccl.library import GraphLauncher


def graph_launcher(graph: Any, targets: Sequence[Any]) -> "GraphLauncher":
    """Return a ``GraphLauncher``. The delayed import saves time in programs without GPUs."""
    from flashlight_py.distributed.backends.nccl.library import GraphLauncher

    return GraphLauncher(graph, targets)


def nccl_library() -> tuple[str, str]:
    """Load NCCL, and return its version and path, or raise BackendUnavailableError."""
    from flashlight_py.distributed.backends.nccl.library import load_nccl, version_text

    library = load_nccl()
    return version_text(library.version), library.path
