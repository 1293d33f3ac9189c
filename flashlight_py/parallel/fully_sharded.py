"""One model per host: parameters, gradients and optimizers' state that ranks have in common."""

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
from flashlight_py.parallel.gradient_pass import install, release
from flashlight_py.parallel.sharder import HostSharder
from flashlight_py.parallel.synchronize import broadcast_parameters, give_state, require_module

# Of all parameters. Below it ranks take less time to step alone than to wait for each other: at 8
# MiB a sharded step took two ranks 1.15 times as long, at 16 MiB 0.98 times, and four ranks 0.76.
SMALL_BYTES = 12 << 20


@in_step()
def fully_shard(
    module: Module, *, across_hosts: bool = False, group: ProcessGroup | None = None
) -> None:
    """Keep one copy of the module, its gradients and its optimizer's state on each host.

    Collective, blocking; in place. The parameters become those of the group's rank 0. Afterwards
    all ranks of a host map one memory for the parameters and their gradients. After ``backward()``
    a gradient is the mean over all ranks. ``optimizer.step()`` changes the elements that belong to
    this rank; nothing is gathered. ``module(x)``, ``params()``, ``state_dict()`` and checkpoints
    keep the shapes of the whole module. Make the optimizer after this call. A second call
    distributes the module again.

    Making an optimizer, ``step()``, ``clip_grad_norm`` and saving or loading the optimizer's state
    are collective then, as is every synchronised backward pass. Do not write to parameters between
    steps: all ranks would see it, some of them in the middle of a pass. With
    FLASHLIGHT_DEBUG_SHARED=1 in the environment NumPy rejects such a write. Copies and pickles of
    the module and its optimizer are ordinary ones, of this process alone.

    A module with less than 12 MiB of parameters stays each rank's own, as by
    :func:`flashlight_py.distribute_module_grads`, unless ``across_hosts``: waiting for each other
    would take longer than to step alone. Ranks that share no memory, as through Gloo alone, count
    as a host each: then only ``across_hosts`` saves memory.

    Args:
        module: the same on every rank but for its values. Parameters that are CuPy arrays are
            sharded over all ranks, and gathered module by module while they are used (ZeRO-3):
            docs/sharding-gpu.md says what is different then.
        group: the process group, default the world.
        across_hosts: each host keeps state for, and steps, its part of the parameters, and sends
            it to the others, as ZeRO-1 does; ``grad`` is then complete in that part alone.

    Raises:
        TypeError: ``module`` is no Module.
        ValueError: it has no parameter with ``calc_grad``; the array of one is not C-contiguous;
            of parameters on GPUs: ``across_hosts`` is asked for, or they are sharded already or
            have a gradient hook.
        MemoryError, OSError: there is no memory for it; no rank's module has changed, but on GPUs
            parameters may be sharded in part: make the module anew.
        MismatchError: ranks' modules or arguments differ, or another rank has raised one of the
            above; says which and why.
        TornStateError: it was sharded before, and a rank ended in the middle of a step.
        DistributedError: as :func:`flashlight_py.all_reduce`.

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
        raise ValueError("fully_shard: the module has no parameter with calc_grad")
    if any(is_cupy(param.data) for param in named.values()):
        if across_hosts:
            how = "on GPUs each rank has a part of everything in any case"
            raise ValueError(f"fully_shard: across_hosts is for parameters on the CPU; {how}")
        with reject_together(members, "fully_shard"):
            sync = shard_by_gathering(module, members)
            install(module, sync, before_forward)
        return
    for name, param in named.items():
        if param.placement is not None and param.placement.is_cut:
            raise ValueError(
                f"fully_shard: {name} is cut between ranks by shard_linear already; shard the "
                "module's other parts"
            )
        if param.placement is not None:
            param.placement.shards.check("fully_shard")
    nbytes = sum(param.data.nbytes for param in named.values())
    if nbytes < SMALL_BYTES and not across_hosts:
        with reject_together(members, "fully_shard"):  # each rank has its own again, of all or none
            own = {p: np.array(p.data) for p in named.values() if p.placement is not None}
            for param, data in own.items():
                param.placement, param.data = None, data
        release(module)
        broadcast_parameters(module, group=members)
        distribute_module_grads(module, group=members)
        return
    with reject_together(members, "fully_shard"):
        for name, param in named.items():
            if not param.data.flags.c_contiguous:  # BLAS would round otherwise
                raise ValueError(
                    f"fully_shard: {name} has strides {param.data.strides} for shape "
                    f"{param.shape}, and common memory is in C order, in which products may have "
                    "other last bits. Before, do: param.array = np.ascontiguousarray(param.array)"
                )
    sharder = HostSharder(_in_order(module), members, across_hosts)
    give_state(module, module.buffers, 0, members)
    release(module)
    sharder.take()
    sharder.ignored = frozenset(named)
    install(module, sharder, before_forward)


def _in_order(module: Module) -> list[Variable]:
    """Return the parameters about as a backward pass completes them: the last layer's first.

    Those of one layer stay in order: a weight comes before its bias.
    """
    named = module.named_params()
    layers = itertools.groupby(named, key=lambda name: name.rpartition(".")[0])
    grouped = [[named[name] for name in names] for _, names in layers]
    return [param for layer in reversed(grouped) for param in layer]
