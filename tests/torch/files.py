"""torch's own test files, on CPUs, with another backend in place of gloo; see ``suite``.

A checkout of torch is copied to a folder. Its tests for GPUs run on CPUs there: text is replaced.
Only tests that start processes are loaded, because other tests do not communicate.

Passed, failed and skipped tests with gloo, and here (files of torch 2.6, torch 2.13):

- c10d: 72, 3, 52; 56, 19, 52
- FSDP2: 28, 19, 0; 28, 19, 0
- checkpoints: 47, 39, 13; 47, 39, 13
- DTensor and tensor parallelism: 168, 16, 22; 168, 13, 25

Tests that fail on both mostly need a GPU, FSDP1 on a GPU, or internals of torch 2.6.
"""

import importlib
import multiprocessing
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed, common_fsdp

# Files that exist in all versions of torch since 2.6, or in some.
PATTERNS = [
    *("test_c10d_common.py", "test_c10d_gloo.py", "_composable/fsdp/test_*.py"),
    *("_tensor/test_*.py", "tensor/test_*.py", "tensor/parallel/test_*.py"),
    *("checkpoint/test_*.py", "checkpoint/*/test_*.py"),
]
LEFT_OUT = re.compile("compile|memory|overlap|export|attention")  # inductor, or properties of GPUs
ON_CPUS = {
    r'"cuda(:\d)?"': '"cpu"',
    r"\.cuda\((?!\.)[^()]*\)": ".cpu()",
    r'"cpu:gloo,cuda:nccl"|"nccl"': '"gloo"',
    r"requires_nccl\b": "requires_gloo",
    r"torch\.cuda\.device_count\(\)": "2",
    r"torch\.cuda\.": "torch.cpu.",
    r"skip_if_lt_x_gpu\(\d\)": "skip_if_lt_x_gpu(1, allow_cpu=True)",
    r"not TEST_(CUDA|MULTIGPU)\b": "False",
    r"device_ids=\[self\.rank\]": "device_ids=None",
}


def copied(checkout: str, folder: str) -> list[str]:
    """Copy the tests of distributed code, changed for CPUs, and return the names of test files."""
    tests = Path(checkout, "test/distributed")
    for path in tests.rglob("*.py"):
        text, target = path.read_text(), Path(folder, path.relative_to(tests))
        if "c10d" not in path.name:
            for pattern, replacement in ON_CPUS.items():
                text = re.sub(pattern, replacement, text)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    names = [str(path.relative_to(tests)) for one in PATTERNS for path in sorted(tests.glob(one))]
    return [name for name in names if not LEFT_OUT.search(name)]


def replace_gloo(backend: str) -> None:
    """Make torch create groups of ``backend`` for the name gloo and for ``ProcessGroupGloo``."""
    from flashlight_py import torch as ours
    from flashlight_py.torch.process_group import FlashlightGroup

    gloo, parsed = dist.ProcessGroupGloo, dist.Backend.__new__

    def parse(cls: type, name: Any) -> Any:
        return parsed(cls, backend if str(name).lower() == "gloo" else name)

    class Group(FlashlightGroup):
        """The constructor of gloo's group."""

        def __new__(
            cls, store: Any, rank: int, size: int, *options: Any, timeout: Any = None
        ) -> Any:
            limits = [timeout, *(getattr(one, "_timeout", one) for one in options), 300.0]
            return ours.create_group(store, rank, size, next(filter(None, limits)))

    for name in ("_Options", "create_device", "create_default_device"):
        setattr(FlashlightGroup, name, staticmethod(getattr(gloo, name)))
    dist.Backend.__new__ = parse  # type: ignore[method-assign, assignment]
    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = Group  # type: ignore[misc]


def use_cpus() -> None:
    """Make torch's test classes fork their ranks, and run without GPUs."""
    case, fork = common_distributed.MultiProcessTestCase, multiprocessing.get_context("fork")
    case._spawn_processes = lambda self: self._start_processes(fork.Process)
    torch.accelerator.device_count = lambda: 64
    torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]
    common_fsdp.DEVICE_COUNT = 2
    common_fsdp.test_compiled_fsdp = lambda **options: lambda test: test  # before torch 2.7


def cases_of_files(folder: str, names: list[str]) -> dict[str, unittest.TestCase]:
    """Return the tests of the files ``names``, by "file::class.test"."""
    cases = {}
    for name in names:
        sys.path[:0] = [folder, str(Path(folder, name).parent)]
        try:
            module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
        except Exception as error:  # noqa: BLE001 (the file and the installed torch differ)
            print(name, error, file=sys.stderr)
            continue
        for kind in vars(module).values():
            is_local = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_local and issubclass(kind, common_distributed.MultiProcessTestCase):
                for test in unittest.defaultTestLoader.getTestCaseNames(kind):
                    cases[f"{name}::{kind.__name__}.{test}"] = kind(test)
    return cases
