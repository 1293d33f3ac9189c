"""One model per host: ranks share its parameters, gradients and optimizer state."""

import itertools

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import is_cupy
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import group_or_world, in_step, reject_together
from flashlight_py.nn import Module
from flashlight_py.parallel.agreement import check_modules_agree, check_settings_agree
from flashlight_py.parallel.data_parallel import before_forward, distribute_module_grads
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from flashlight_py.parallel.gradient_pass import drop_pass, install_pass
from flashlight_py.parallel.sharder import HostSharder
from flashlight_py.parallel.synchronize import broadcast_parameters, give_state, require_module

# Modules with fewer bytes of parameters are not sharded: a separate step of each rank takes less
# time than ranks need to wait for each other. Time of a sharded step of two ranks, relative to
# separate steps: 1.15 at 8 MiB, 0.98 at 16 MiB. Four ranks at 16 MiB: 0.76.
SMALL_BYTES = 12 << 20


@in_step()
def fully_shard(
    module: Module, *, across_hosts: bool = False, group: ProcessGroup | None = None
) -> None:
    """Keep one copy of the module, its gradients and its optimizer's state on each host.

    Collective, blocking; in place. The parameters take the values of the group's rank 0. All ranks
    of a host then map the same memory for the parameters and their gradients. After ``backward()``
    a gradient is the mean over all ranks. ``optimizer.step()`` updates the elements that this rank
    owns; no data is gathered. ``module(x)``, ``params()``, ``state_dict()`` and checkpoints keep
    the shapes of the whole module. Create the optimizer after this call. A second call distributes
    the module again.

    Every synchronised backward pass, the creation of an optimizer, ``step()``, ``clip_grad_norm``,
    and saving or loading the optimizer's state become collective. Do not write to parameters
    between steps: all ranks would see the change, some of them in the middle of a pass. With
    FLASHLIGHT_DEBUG_SHARED=1 in the environment, NumPy rejects such a write. Copies and pickles of
    the module and its optimizer are ordinary objects of this process.

    If the parameters have less than 12 MiB and ``across_hosts`` is not set, each rank keeps its own
    copy, as with :func:`flashlight_py.distribute_module_grads`: ranks would wait for each other
    longer than a separate step takes. Ranks that share no memory, for example with Gloo alone,
    count as separate hosts. In that case only ``across_hosts`` saves memory.

    Args:
        module: Module with the same structure on every rank. CuPy parameters are sharded over all
            ranks and gathered module by module for use (ZeRO-3); see docs/sharding-gpu.md.
        group: Process group. Default: the world.
        across_hosts: If True, each host updates only a part of the parameters, stores optimizer
            state only for this part, and sends the updated part to the other hosts (ZeRO-1).
            ``grad`` then has the mean over all ranks only in this part.

    Raises:
        TypeError: If ``module`` is not a Module.
        ValueError: If no parameter has ``calc_grad``, an array is not C-contiguous, or a weight was
            cut by ``shard_linear``. On GPUs: if ``across_hosts`` is set, or parameters are already
            sharded or have a gradient hook.
        MemoryError, OSError: If memory cannot be allocated. No rank's module has changed. On GPUs
            some parameters may already be sharded: create the module again.
        MismatchError: If modules or arguments differ, or another rank has raised one of the errors
            above. The message contains the difference or the reason.
        TornStateError: If the module was sharded before and a rank ended during a step.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 2)
        >>> fl.fully_shard(model)  # one process: everything works as before
        >>> optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.01)
        >>> model(fl.input(np.ones((1, 3), np.float32))).backward(np.ones((1, 2), np.float32))
        >>> optimizer.step()
    """
    require_module(module)
    members = group_or_world(group)
    check_settings_agree("fully_shard", {"across_hosts": bool(across_hosts)}, members)
    named = module.named_params()
    check_modules_agree(named, members)
    if not any(param.calc_grad for param in named.values()):
        raise ValueError("fully_shard: expected at least one trainable parameter, got 0")
    if any(is_cupy(param.data) for param in named.values()):
        if across_hosts:
            remedy = "Remove across_hosts: on GPUs everything is sharded over all ranks"
            raise ValueError(f"fully_shard: expected NumPy arrays, got CuPy arrays. {remedy}")
        with reject_together(members, "fully_shard"):
            install_pass(module, shard_by_gathering(module, members), before_forward)
        return
    for name, param in named.items():
        if param.placement is not None and param.placement.is_cut:
            raise ValueError(
                f"fully_shard: expected parameters that are not cut, got {name} of shard_linear. "
                "Call fully_shard on the other submodules"
            )
        if param.placement is not None:
            param.placement.shards.check("fully_shard")
    nbytes = sum(param.data.nbytes for param in named.values())
    if nbytes < SMALL_BYTES and not across_hosts:
        with reject_together(members, "fully_shard"):  # if a copy fails, no rank changes
            copies = {p: np.array(p.data) for p in named.values() if p.placement is not None}
            for param, data in copies.items():
                param.placement, param.data = None, data
        drop_pass(module)
        broadcast_parameters(module, group=members)
        distribute_module_grads(module, group=members)
        return
    with reject_together(members, "fully_shard"):
        for name, param in named.items():
            if not param.data.flags.c_contiguous:  # BLAS rounds differently for other layouts
                raise ValueError(
                    f"fully_shard: {name} of shape {param.shape} must be C-contiguous, got strides "
                    f"{param.data.strides}. Set param.array = np.ascontiguousarray(param.array), "
                    "which may change the last bits of products"
                )
    sharder = HostSharder(_in_order(module), members, across_hosts)
    give_state(module, module.buffers, 0, members)
    drop_pass(module)
    sharder.adopt_params()
    sharder.ignored = frozenset(named)
    install_pass(module, sharder, before_forward)


def _in_order(module: Module) -> list[Variable]:
    """Return the parameters in about the order in which a backward pass completes them."""
    named = module.named_params()
    layers = itertools.groupby(named, key=lambda name: name.rpartition(".")[0])
    grouped = [[named[name] for name in names] for _, names in layers]
    return [param for layer in reversed(grouped) for param in layer]
