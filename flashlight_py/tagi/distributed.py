"""Data-parallel training of TAGI networks.

Each rank sums each parameter's deltas over its samples, and the ranks add these sums in buckets.
Each rank then takes the same step as one process with all samples would take.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlight_py import distributed as fl
from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup, all_reduce, barrier, distributed_init
from flashlight_py.distributed.internal import EagerReducer, group_or_world, in_step, plan_buckets
from flashlight_py.parallel import gradient_pass
from flashlight_py.parallel.agreement import check_entries_agree, check_settings_agree
from flashlight_py.parallel.synchronize import synchronize
from flashlight_py.tagi.layer import BaseLayer, ParameterBucket
from flashlight_py.tagi.network import StateDict
from flashlight_py.tagi.normalization import BatchNorm2d
from flashlight_py.tagi.sequential import Sequential
from flashlight_py.tagi.states import REAL, BaseDeltaStates, BaseHiddenStates

_BACKENDS = ("auto", "nccl", "gloo", "shm", "mpi", "portable")


class DDPConfig:
    """Configuration of :class:`DDPSequential` in pytagi's form. Every argument is optional.

    Args:
        device_ids: The index of the GPU of each rank. Empty: the network stays on its device.
        backend: Accepted for compatibility. CuPy arrays use NCCL, and NumPy arrays use the backend
            of ``distributed_init``.
        rank, world_size: Rank and size of the world. The defaults match any world.

    Raises:
        ValueError: If ``backend`` is not auto, nccl, gloo, shm or mpi.
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


def _model_attribute(name: str) -> Any:
    """Return a property that reads the attribute ``name`` of the wrapped network."""
    doc = f"``{name}`` of the wrapped network, for this rank's samples. No communication."
    return property(lambda ddp: getattr(ddp.model, name), doc=doc)


class DDPSequential:
    """A network that all ranks train together, each with different samples.

    The constructor is collective and blocks. Every rank passes the same network and receives the
    parameters and running statistics of rank 0. ``backward()`` is collective as well: it adds each
    parameter's deltas over the samples of all ranks. The sums, and the results of ``step()``, then
    have the same bits on every rank.

    With ``average=False``, training equals training in one process with the samples of all ranks in
    one batch, even if ranks have different numbers of samples. The bound of a step depends on the
    total number of samples. Exception: an LSTM with ``seq_len=1`` carries states between calls if
    the batch of its rank has one sample. With ``average=True``, pytagi's default, the sums are
    divided by the number of ranks. A step then counts the samples of one average rank only, so the
    network learns more slowly with more ranks.

    The buffers of outputs and deltas, ``step``, ``train``, ``eval``, ``get_outputs``,
    ``output_to_host``, ``state_dict`` and ``load_state_dict`` forward to the network without
    communication. ``state_dict`` is equal on all ranks, except for running statistics. Pass the
    same state to ``load_state_dict`` on every rank.

    Args:
        model: The ``fl.tagi.Sequential`` to wrap. It is used in place.
        config: Configuration in the form of pytagi. None: the defaults.
        average: Whether to divide the sums by the number of ranks.
        sync: Whether batch normalisation uses the samples of all ranks. A forward pass in training
            is then collective, with one ``all_reduce`` per batch normalisation. False: each rank
            uses its samples and has different running statistics; see :meth:`average_statistics`.
        group: Process group. Default: the world.
        bucket_bytes: Maximum size of a bucket. Default:
            ``DistributedConstants.COALESCE_CACHE_SIZE`` (20 MiB).

    Raises:
        TypeError: If ``model`` is not a Sequential.
        ValueError: If rank or size in ``config`` differ from the world, ``bucket_bytes`` is not
            positive, or the network has no parameters.
        MismatchError: If networks or arguments differ between ranks. The text names the first layer
            that differs.
        DistributedError: See :func:`flashlight_py.all_reduce`.

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
        if self.config.world_size > 1 and not fl.is_distributed_init():
            distributed_init()  # pytagi scripts do not call it
        members, devices = group_or_world(group), self.config.device_ids
        location = f"DDPSequential: rank {members.rank} of {members.size}"
        configured = (self.config.rank, self.config.world_size)
        if configured not in ((0, 1), (members.rank, members.size)):
            raise ValueError(
                f"{location}: expected this rank and size in the config, got rank {configured[0]} "
                f"of {configured[1]}. Remove rank and world_size from the config"
            )
        if devices and len(devices) < members.size:
            raise ValueError(
                f"{location}: device_ids must be empty or have one entry per rank, got {devices}"
            )
        default = fl.DistributedConstants.COALESCE_CACHE_SIZE
        limit = default if bucket_bytes is None else bucket_bytes
        if limit <= 0:
            raise ValueError(f"DDPSequential: bucket_bytes must be positive, got {limit}")
        settings = {"average": average, "sync": sync, "bucket_bytes": limit}
        check_settings_agree("DDPSequential", settings, members)
        layers = [_describe(name, layer) for name, layer in model.named_layers()]
        remedy = "Build the same network on every rank"
        check_entries_agree("the networks differ in layer", remedy, layers, members)
        if devices:
            model.to_device(f"cuda:{devices[members.rank]}")
        self.sync = DeltaSync(model, limit, average, sync, group)
        self.synchronize(0)

    output_z_buffer: BaseHiddenStates = _model_attribute("output_z_buffer")
    input_delta_z_buffer: BaseDeltaStates = _model_attribute("input_delta_z_buffer")
    output_delta_z_buffer: BaseDeltaStates = _model_attribute("output_delta_z_buffer")
    step: Callable[[], None] = _model_attribute("step")
    train: Callable[[], None] = _model_attribute("train")
    eval: Callable[[], None] = _model_attribute("eval")
    get_outputs: Callable[[], tuple[Array, Array]] = _model_attribute("get_outputs")
    output_to_host: Callable[[], Array] = _model_attribute("output_to_host")
    state_dict: Callable[[], StateDict] = _model_attribute("state_dict")
    load_state_dict: Callable[[Any], None] = _model_attribute("load_state_dict")

    def __call__(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs for this rank's samples; see ``Sequential``.

        Collective if ``sync`` is set, the network is in training, and it has batch normalisation.
        """
        return self.forward(mu_x, var_x)

    @in_step(lambda arguments: arguments["self"].sync.ranks_of_forward())
    def forward(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs, like :meth:`__call__`."""
        self.sync.begin_forward()
        return self.model.forward(mu_x, var_x)

    def backward(self) -> None:
        """Run the backward pass and add parameter deltas over the ranks. Collective, blocking.

        Raises:
            RuntimeError: If there are no deltas, or the parameters or the number of ranks have
                changed since the network was wrapped.
            ValueError: If the deltas have a wrong shape.
            DistributedError: See :func:`flashlight_py.all_reduce`. The parameters have not changed.
        """
        self.sync.backward()

    def barrier(self) -> None:
        """Wait for all ranks of the group. Collective, blocking."""
        barrier(group=self.sync.reducer.group)

    def get_device_with_index(self) -> str:
        """Return the device of the network: ``"cpu"`` or ``"cuda:<index>"``."""
        return self.model.device

    def synchronize(self, root: int = 0) -> None:
        """Copy parameters and running statistics of ``root`` to all ranks. Collective, blocking.

        Raises:
            ValueError: If ``root`` is not a rank of the group.
            DistributedError: See :func:`flashlight_py.all_reduce`.
        """
        arrays = [x for bucket in self.model.buckets for x in (bucket.mean, bucket.variance)]
        synchronize([*arrays, *_statistics(self.model)], root, group=self.sync.reducer.group)

    def average_statistics(self) -> None:
        """Replace running statistics by their mean over the ranks. Collective, blocking.

        Call it before evaluation or a checkpoint if the ranks have different statistics.
        """
        for array in _statistics(self.model):
            all_reduce(array, op="avg", group=self.sync.reducer.group)


class DeltaBucket(gradient_pass.PassBucket):
    def __init__(self, bucket: ParameterBucket, layers: int) -> None:
        super().__init__((), layers)
        self.parameters = bucket


# The ranks add deltas that are not yet multiplied by the variances of the parameters. The step
# multiplies them in the same kernel on every rank, so the results have equal bits. The bound of a
# step depends on the total number of samples. This number is the last element of the last bucket,
# because a separate message would cost a small network one more round trip.
class DeltaSync(gradient_pass.GradientPass[DeltaBucket]):
    """Data-parallel backward pass: it adds parameter deltas over the ranks, bucket by bucket.

    A pass sets ``learnt`` of the network to the number of samples on all ranks. If ``average``,
    the number is the mean over the ranks that have samples.
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
        for norm in norms:  # an earlier wrapper may have set add_up of any norm
            norm.add_up = functools.partial(all_reduce, group=group) if sync else None
        self._norms = norms if sync else []
        model.gather_parameters(functools.partial(self._make_buckets, limit))
        self._parameter_buckets = model.buckets
        self._weight = 1.0

    def _make_buckets(self, limit: int, layers: Sequence[BaseLayer]) -> list[ParameterBucket]:
        """Create the buckets, and set ``on_sums`` of each layer. Collective."""
        if not layers:
            raise ValueError("DDPSequential: expected a network with parameters, got no parameters")
        device, group = self._model.device, self.reducer.group
        shared = functools.partial(gradient_pass.shared_zeros, dtype=REAL, group=group)
        sums = shared if device == "cpu" else None
        sizes = [2 * REAL.itemsize * (layer.num_weights + layer.num_biases) for layer in layers]
        planned = [[layers[i] for i in bucket] for bucket in plan_buckets(sizes, limit)]
        for bucket in planned:
            parameters = [parameter for layer in bucket for parameter in layer.parameters_in_use]
            has_samples = int(bucket is planned[-1])  # the last bucket stores the number of samples
            storage = ParameterBucket(parameters, device, sums, has_samples)
            self._buckets.append(DeltaBucket(storage, len(bucket)))
            for layer in bucket:
                layer.on_sums = functools.partial(self._on_sums, self._buckets[-1])
        return [bucket.parameters for bucket in self._buckets]

    def ranks_of_forward(self) -> ProcessGroup | None:
        """Return the group if forward passes are collective in the current mode, else None."""
        return self._members if self._norms and self._model.training else None

    def begin_forward(self) -> None:
        """Call ``weigh`` now, and not in the backward pass, if the forward pass is collective."""
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
                "backward: the parameters were moved after DDPSequential was created. Move the "
                "network before wrapping it, or wrap it again on every rank"
            )
        ranks = group_or_world(self.reducer.group).size
        if ranks != self._ranks:
            raise RuntimeError(
                f"backward: expected {self._ranks} ranks, as when DDPSequential was created, got "
                f"{ranks}. Call distributed_init before wrapping, or wrap the network again"
            )
        self._model.check_deltas()
        if self.weigh is None:
            self._weight = 1.0
        elif not self._norms:
            self._weight = self.weigh(True)
        self._running = True

    def _on_sums(self, bucket: DeltaBucket, _: BaseLayer) -> None:
        """Count a layer whose deltas are summed. Send ``bucket`` after the last of its layers."""
        if not self._running:
            raise RuntimeError(
                "backward: a DDPSequential wraps this network. Call backward() of the "
                "DDPSequential, which adds the sums over the ranks"
            )
        self._on_ready(bucket)

    def _send_next(self) -> None:
        self._send_bucket(self._buckets[self._sent], self._weight)
        self._sent += 1

    def _send_bucket(self, bucket: DeltaBucket, weight: float) -> None:
        bucket.parameters.extra[...] = self._model.samples
        gradient_pass.weigh_in_place(bucket.parameters.sums, weight)
        self.reducer.add(bucket.parameters.sums)

    def _next_arrays(self) -> list[Array]:
        return [self._parameter_buckets[0].sums]

    def _finish(self) -> None:
        self.reducer.finalize()
        self._model.learnt = round(float(self._parameter_buckets[-1].extra[0]))

    def weight(self, samples: int, all_samples: int, training: int, ranks: int) -> float:
        """Return the factor for this rank's deltas. ``training``: number of ranks with samples."""
        return ranks / training if self.averages else 1.0

    def send_zeros(self) -> None:
        """Join the collective calls of a forward and a backward pass on a rank without samples."""
        for norm in self._norms:
            norm.forward_nothing()
        super().send_zeros()


def _statistics(model: Sequential) -> list[Array]:
    return [array for _, layer in model.named_layers() for array in layer.statistics()]


def _describe(name: str, layer: BaseLayer) -> str:
    """Return ``name``, settings and parameter shapes of a layer. Ranks compare this text."""
    settings = [
        f"{key}={value}"
        for key, value in vars(layer).items()
        if not key.startswith("_") and key != "training" and isinstance(value, int | float | str)
    ]
    shapes = [str(parameter.mean.shape) for parameter in layer.parameters_in_use]
    return f"{name}: {' '.join([*settings, *shapes])}"
