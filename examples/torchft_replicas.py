"""Train replicas with torchft on this package's collectives. A killed replica returns.

    torchft_lighthouse --min_replicas 1 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python examples/torchft_replicas.py 0 &
    python examples/torchft_replicas.py 1 --die-after 50
    python examples/torchft_replicas.py 1

A replica dies in the middle of a step, and the other one continues alone. Started again, the lost
replica receives the parameters from the other one. Both end after ``--steps`` steps that they have
computed together, with the same bits.
"""

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft.process_group import ProcessGroupWrapper

import flashlight_py.torch

TIMEOUT = timedelta(seconds=30)


class ProcessGroupFlashlight(ProcessGroupWrapper):
    """A group that torchft creates again whenever the set of replicas changes."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return flashlight_py.torch.create_group(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "flashlight"


def train(replica: int, steps: int, die_after: int | None, group: Any) -> str:
    """Train until two replicas have computed ``steps`` steps; return the SHA-256 of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    together = 0

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": inner.state_dict(), "together": together}

    def load(saved: dict[str, Any]) -> None:
        nonlocal together
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["adam"])
        together = saved["together"]

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica{replica}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=TIMEOUT,
    )
    optimizer = torchft.Optimizer(manager, inner)
    while together < steps:
        step = manager.current_step()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + replica))
        optimizer.zero_grad()  # finds the replicas that participate in this step
        if together == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        # The DistributedDataParallel of torchft 0.2 raises AssertionError if a replica is lost.
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()  # changes nothing if a replica was lost in this step
        if manager.current_step() > step:
            together += manager.num_participants() == 2
            print(f"step {step}: {manager.num_participants()} replicas", flush=True)
    manager.shutdown()
    group.shutdown()
    parameters = [value.numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def main() -> None:
    """Read the command line and train one replica."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("replica", type=int, choices=[0, 1])
    parser.add_argument("--steps", type=int, default=100, help="of both replicas; default 100")
    parser.add_argument("--die-after", type=int, help="number of steps; default: stay alive")
    parser.add_argument("--gloo", action="store_true", help="use torchft's group with torch's gloo")
    options = parser.parse_args()
    kind = torchft.ProcessGroupGloo if options.gloo else ProcessGroupFlashlight
    group = kind(timeout=TIMEOUT)
    digest = train(options.replica, options.steps, options.die_after, group)
    print(f"SHA-256 of the parameters: {digest}")


if __name__ == "__main__":
    main()
