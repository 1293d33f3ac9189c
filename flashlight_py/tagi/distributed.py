"""Data-parallel training of TAGI networks: ranks add up what their batches teach each parameter.

Each rank computes the sums of a backward pass over its own samples. The ranks add up these sums,
bucket by bucket in shared memory, and all take the step of one process with all samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed import (
    DistributedConstants,
    ProcessGroup,
    all_reduce,
    barrier,
    distributed_init,
    is_distributed_init,
)
from flashlight_py.distributed.internal import EagerReducer, group_or_world, in_step, plan_buckets
from flashlight_py.parallel.agreement import check_entries_agree, check_settings_agree
from flashlight_py.parallel.gradient_pass import (
    GradientPass,
    PassBucket,
    shared_zeros,
    weigh_in_place,
)
from flashlight_py.parallel.synchronize import synchronize
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.network import StateDict
from flashlight_py.tagi.normalization import BatchNorm2d
from flashlight_py.tagi.parameters import ParameterBucket, on_device
from flashlight_py.tagi.sequential import Sequential
from flashlight_py.tagi.states import REAL, BaseDeltaStates, BaseHiddenStates

_BACKENDS = ("auto", "nccl", "gloo", "shm", "mpi")


class DDPConfig:
    """The configuration of pytagi's DDPSequential; no argument is required here.

    Args:
        device_ids: the GPU of each rank; empty: the network stays where it is.
        backend: accepted for pytagi's sake. Arrays decide: those of CuPy are added up by NCCL,
            NumPy's by what ``distributed_init`` has found.
        rank, world_size: checked against the world's where they are not the defaults.

    Raises:
        ValueError: ``backend`` is none of auto, nccl, gloo, shm, mpi.
    """

    def __init__(
        self, device_ids: Sequence[int] = (), backend: str = "nccl", rank: int = 0,
        world_size: int = 1,
    ) -> None:  # fmt: skip
        if backend not in _BACKENDS:
            raise ValueError(f"DDPConfig: backend must be one of {_BACKENDS}, got {backend!r}")
        self.device_ids = list(device_ids)
        self.backend = backend
        self.rank = rank
        self.world_size = world_size


def _of_model(name: str) -> Any:
    """Return an attribute of a DDPSequential that is its network's."""
    doc = f"The network's own ``{name}``: of this rank's samples, and without messages."
    return property(lambda ddp: getattr(ddp.model, name), doc=doc)


class DDPSequential:
    """A network that is trained by all ranks together, each on its own samples.

    Collective, blocking: every rank passes the same network. All ranks receive the parameters and
    running statistics of rank 0. From then on ``backward()`` is collective: during the pass, the
    sums of every parameter, also inside blocks, are added up over the ranks. When it returns, they
    have the same bits on every rank. Therefore ``step()`` has the same result on every rank.

    With ``average=False`` training is that of one process with all ranks' samples in one batch,
    however unequal their shares; the step's bound is that of all samples together. (An LSTM that
    carries states from call to call, by batches of one sample, goes by each rank's own batch.) With
    ``average=True``, as in pytagi by default, the sums are divided by the number of ranks: evidence
    is lost, and the more ranks the slower the network learns.

    The buffers of outputs and deltas, ``step``, ``train``, ``eval``, ``get_outputs``,
    ``output_to_host``, ``state_dict`` and ``load_state_dict`` are the network's own, and send
    nothing: the state is the same on every rank but for running statistics, and a state that is
    loaded must be.

    Args:
        model: a ``fl.tagi.Sequential``; used as it is, in place.
        config: pytagi's; None: nothing is needed.
        average: divide the sums by the number of ranks.
        sync: let batch normalisation take the statistics of all ranks' samples: one ``all_reduce``
            for each such layer in each forward pass in training, which then is collective. False:
            of each rank's own, and so are running statistics (:meth:`average_statistics`).
        group: the process group, default the world.
        bucket_bytes: how large a bucket may become, default
            ``DistributedConstants.COALESCE_CACHE_SIZE`` (20 MiB).

    Raises:
        TypeError: ``model`` is no Sequential.
        ValueError: ``config`` says another rank or size than the world; ``bucket_bytes`` is not
            positive; the network has no parameters.
        MismatchError: ranks' networks or arguments differ; names the first layer that does.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> net = fl.tagi.Sequential(fl.tagi.Linear(1, 50), fl.tagi.ReLU(), fl.tagi.Linear(50, 1))
        >>> model = fl.tagi.DDPSequential(net, average=False)
        >>> mean, variance = model(np.ones((8, 1)))
    """

    @in_step()
    def __init__(
        self, model: Sequential, config: DDPConfig | None = None, average: bool = True,
        sync: bool = False, *, group: ProcessGroup | None = None, bucket_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, Sequential):
            raise TypeError(
                f"DDPSequential: expected a fl.tagi.Sequential, got {type(model).__name__}"
            )
        self.model = model
        self.config = config or DDPConfig()
        if self.config.world_size > 1 and not is_distributed_init():
            distributed_init()  # scripts of pytagi do not call it
        members, devices = group_or_world(group), self.config.device_ids
        where = f"DDPSequential: rank {members.rank} of {members.size}"
        given = (self.config.rank, self.config.world_size)
        if given not in ((0, 1), (members.rank, members.size)):
            raise ValueError(
                f"{where}: the config says rank {given[0]} of {given[1]}. Leave both out: the "
                "world knows them"
            )
        if devices and len(devices) < members.size:  # the same on every rank
            raise ValueError(
                f"{where}: device_ids has {len(devices)} entries; pass one for each rank, or none"
            )
        limit = DistributedConstants.COALESCE_CACHE_SIZE if bucket_bytes is None else bucket_bytes
        if limit <= 0:
            raise ValueError(f"DDPSequential: bucket_bytes must be positive, got {limit}")
        check_settings_agree(
            "DDPSequential", {"average": average, "sync": sync, "bucket_bytes": limit}, members
        )
        check_entries_agree(
            "the networks differ in layer",
            "Build the same network on every rank",
            [_describe(name, layer) for name, layer in model.named_layers()],
            members,
        )
        if devices:
            model.to_device(f"cuda:{devices[members.rank]}")
        self.sync = DeltaSync(model, limit, average, sync, group)
        self.synchronize(0)

    output_z_buffer: BaseHiddenStates = _of_model("output_z_buffer")
    input_delta_z_buffer: BaseDeltaStates = _of_model("input_delta_z_buffer")
    output_delta_z_buffer: BaseDeltaStates = _of_model("output_delta_z_buffer")
    step: Callable[[], None] = _of_model("step")
    train: Callable[[], None] = _of_model("train")
    eval: Callable[[], None] = _of_model("eval")
    get_outputs: Callable[[], tuple[Array, Array]] = _of_model("get_outputs")
    output_to_host: Callable[[], Array] = _of_model("output_to_host")
    state_dict: Callable[[], StateDict] = _of_model("state_dict")
    load_state_dict: Callable[[Any], None] = _of_model("load_state_dict")

    def __call__(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs for this rank's samples; see ``Sequential``.

        Collective in training with ``sync`` and a network that has batch normalisation.
        """
        return self.forward(mu_x, var_x)

    @in_step(lambda arguments: arguments["self"].sync.ranks_of_forward())
    def forward(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs, as by calling it."""
        self.sync.begin_forward()
        return self.model.forward(mu_x, var_x)

    def backward(self) -> None:
        """Go back, and add up the sums of every parameter over the ranks. Collective, blocking.

        Raises:
            RuntimeError, ValueError: as ``Sequential.backward``, before anything is sent; or the
                network's parameters have been moved since.
            DistributedError: as :func:`flashlight_py.all_reduce`; nothing was stepped.
        """
        self.sync.backward()

    def barrier(self) -> None:
        """Wait for all ranks of the group. Collective, blocking."""
        barrier(group=self.sync.reducer.group)

    def get_device_with_index(self) -> str:
        """Return where the network is: ``"cpu"`` or ``"cuda:<index>"``."""
        return self.model.device

    def synchronize(self, root: int = 0) -> None:
        """Make parameters and running statistics those of rank ``root``. Collective, blocking.

        Raises:
            ValueError: ``root`` is no rank of the group.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        own = [each for bucket in self.model.buckets for each in (bucket.mean, bucket.variance)]
        synchronize([*own, *_statistics(self.model)], root, group=self.sync.reducer.group)

    def average_statistics(self) -> None:
        """Make running statistics the mean of the ranks', in place. Collective, blocking.

        Before evaluation or a checkpoint, where ranks have taken them of their own samples.
        """
        for array in _statistics(self.model):
            all_reduce(array, op="avg", group=self.sync.reducer.group)


class DeltaBucket(PassBucket):
    """A bucket of sums of so many layers."""

    def __init__(self, bucket: ParameterBucket, layers: int) -> None:
        super().__init__((), layers)
        self.parameters = bucket


# Ranks add up the sums without the factor of the variance, which is the same on every rank and
# which the step multiplies: so the bits are, and one kernel takes the whole step. The number of
# samples travels at the end of the last bucket: the bound of a step is that of all samples, also
# where shares are unequal, and a message of its own would cost a small network a round trip.
class DeltaSync(GradientPass[DeltaBucket]):
    """Adds up the sums of a network's backward passes over the ranks, bucket by bucket.

    The network's ``learnt`` becomes how many samples the last pass had on all ranks together; where
    sums are averaged, on the mean rank.
    """

    ends_with_message = False

    def __init__(
        self, model: Sequential, limit: int, average: bool, sync: bool, group: ProcessGroup | None,
    ) -> None:  # fmt: skip
        self._ranks = group_or_world(group).size
        super().__init__(EagerReducer(1 / self._ranks if average else 1.0, group=group), [])
        self.averages = average
        self._model = model
        norms = [layer for _, layer in model.named_layers() if isinstance(layer, BatchNorm2d)]
        for norm in norms:  # also those that were wrapped with sync before
            norm.add_up = functools.partial(all_reduce, group=group) if sync else None
        self._norms = norms if sync else []
        model.gather_parameters(functools.partial(self._make_buckets, limit))
        self._parameter_buckets = model.buckets
        self._weight = 1.0

    def _make_buckets(self, limit: int, layers: Sequence[BaseLayer]) -> list[ParameterBucket]:
        """Plan the buckets, and have each layer report when its sums are complete. Collective."""
        if not layers:
            raise ValueError("DDPSequential: the network has no parameters")
        device, group = self._model.device, self.reducer.group
        shared = functools.partial(shared_zeros, dtype=REAL, group=group)
        sums = shared if device == "cpu" else on_device(device)
        sizes = [2 * REAL.itemsize * (each.num_weights + each.num_biases) for each in layers]
        planned = [[layers[i] for i in bucket] for bucket in plan_buckets(sizes, limit)]
        for bucket in planned:
            parameters = [each for layer in bucket for each in layer.parameters_in_use]
            has_samples = int(bucket is planned[-1])  # the last element is their number
            room = ParameterBucket(parameters, on_device(device), sums, has_samples)
            self._buckets.append(DeltaBucket(room, len(bucket)))
            for layer in bucket:
                layer.on_sums = functools.partial(self._on_sums, self._buckets[-1])
        return [each.parameters for each in self._buckets]

    def ranks_of_forward(self) -> ProcessGroup | None:
        """Return the ranks that add up statistics in a forward pass now, if any do."""
        return self._members if self._norms and self._model.training else None

    def begin_forward(self) -> None:
        """Begin the pass here if the ranks add up statistics in the forward pass."""
        if self.ranks_of_forward() is not None and self.weigh is not None:
            self._weight = self.weigh(True)

    def backward(self) -> None:
        completed = False
        try:
            self._begin_backward()
            self._model.backward()
            completed = True
        finally:
            try:
                self._on_computed(completed)
            finally:
                self._on_end(completed)

    def _begin_backward(self) -> None:
        if self._model.buckets is not self._parameter_buckets:
            raise RuntimeError(
                "backward: the network's parameters were moved after DDPSequential was made; move "
                "it before, or wrap it again on every rank"
            )
        ranks = group_or_world(self.reducer.group).size
        if ranks != self._ranks:
            raise RuntimeError(
                f"backward: there are {ranks} ranks, and there were {self._ranks} when "
                "DDPSequential was made; call distributed_init before it, or wrap the network again"
            )
        self._model.check_deltas()
        if self.weigh is None:
            self._weight = 1.0
        elif not self._norms:
            self._weight = self.weigh(True)
        self._running = True

    def _on_sums(self, bucket: DeltaBucket, _: BaseLayer) -> None:
        """A layer's sums are complete: pass on each bucket that is, in order."""
        if not self._running:
            raise RuntimeError(
                "backward: this network is trained by a DDPSequential; call its backward(), "
                "as it adds up over the ranks"
            )
        self._on_ready(bucket)

    def _send_next(self) -> None:
        self._send_bucket(self._buckets[self._sent], self._weight)
        self._sent += 1

    def _send_bucket(self, bucket: DeltaBucket, weight: float) -> None:
        bucket.parameters.extra[...] = self._model.samples
        weigh_in_place(bucket.parameters.sums, weight)
        self.reducer.add(bucket.parameters.sums)

    def _next_arrays(self) -> list[Array]:
        return [self._parameter_buckets[0].sums]

    def _finish(self) -> None:
        self.reducer.finalize()
        self._model.learnt = round(float(self._parameter_buckets[-1].extra[0]))

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Return 1, or what turns the mean over all ranks into that over those with data."""
        return ranks / training if self.averages else 1.0

    def send_zeros(self) -> None:
        """Take part with no samples, on the way forward and on the way back."""
        for norm in self._norms:
            norm.forward_nothing()
        super().send_zeros()


def _statistics(model: Sequential) -> list[Array]:
    return [array for _, layer in model.named_layers() for array in layer.statistics()]


def _describe(name: str, layer: BaseLayer) -> str:
    """Return what must be the same on every rank: not the sizes of images, which one rank may know
    already, and another not yet.
    """
    settings = [
        f"{key}={value}"
        for key, value in vars(layer).items()
        if not key.startswith("_") and key != "training" and isinstance(value, int | float | str)
    ]
    shapes = [str(each.mean.shape) for each in layer.parameters_in_use]
    return f"{name}: {' '.join([*settings, *shapes])}"
