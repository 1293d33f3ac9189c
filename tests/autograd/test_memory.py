"""Memory of arrays: freed blocks that the engine keeps, and the effect of an import."""

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from tests.tables import for_each

MB = 1 << 20
LIMIT = 32 * MB
KeptBytes = Callable[[], int]
_IMPORTS_ALL = """
import importlib, os, pkgutil
import numpy as np
import flashlight_py as fl

for name in fl.__all__:
    getattr(fl, name)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

before = resident()
x = np.ones(16 << 20, np.uint8)
print(resident() - before)
del x
print(resident() - before)
"""


def test_import_does_not_activate_the_block_cache() -> None:
    command = [sys.executable, "-c", _IMPORTS_ALL]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    held, left = map(int, text.split())
    assert held >= 15
    assert left <= 1


@pytest.fixture
def kept_bytes() -> Iterator[KeptBytes]:
    module = _native.optional("nn", "tests")
    if module is None:
        pytest.skip("the extension nn was not built")
    run_passes(20)  # frees the memory of earlier tests
    yield module.kept_bytes
    run_passes(20)


def run_passes(count: int) -> None:
    for _ in range(count):
        fl.param(np.ones(())).backward()


def train(x: fl.Variable, count: int) -> None:
    for _ in range(count):
        fl.autograd.functions.gelu(x).backward(x.array)
        x.zero_grad()


def test_cached_blocks_avoid_new_pages(kept_bytes: KeptBytes) -> None:
    x = fl.param(np.ones((12, 64, 512), np.float32))  # 1.5 MB
    train(x, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    train(x, 20)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages < 20 * x.array.nbytes / os.sysconf("SC_PAGE_SIZE") / 10


def test_block_cache_is_limited_to_32_megabytes_and_8_passes(kept_bytes: KeptBytes) -> None:
    run_passes(1)
    arrays = [np.ones(3 * MB // 2, np.uint8) for _ in range(40)]
    assert kept_bytes() < MB
    del arrays
    assert LIMIT - 2 * MB < kept_bytes() <= LIMIT
    np.ones(LIMIT, np.uint8)  # larger than the limit of kept memory
    assert LIMIT - 2 * MB < kept_bytes() <= LIMIT
    run_passes(7)
    assert kept_bytes() > LIMIT - 2 * MB
    run_passes(2)
    assert kept_bytes() < MB


def test_block_is_not_reused_while_a_view_exists(kept_bytes: KeptBytes) -> None:
    run_passes(1)
    view = np.full(2 * MB, 7, np.uint8)[::1000]
    gc.collect()
    others = [np.full(2 * MB, 9, np.uint8) for _ in range(3)]
    assert (view == 7).all()
    del view, others


@for_each("size", [100, 20_000, 200_000, 40 * MB])
def test_arrays_in_cached_blocks_behave_like_other_arrays(kept_bytes: KeptBytes, size: int) -> None:
    run_passes(1)
    for _ in range(2):  # the second pass reuses blocks with other values
        array = np.full(size, 7, np.uint8)
        assert array.ctypes.data % 16 == 0
        array.resize(size + 50_000, refcheck=False)
        assert (array[:size] == 7).all()
        assert not array[size:].any()
        array.resize(size // 3, refcheck=False)
        assert (array == 7).all()
        del array
        assert not np.zeros(size, np.uint8).any()
    assert np.fromiter(range(size // 100), np.int64).sum() == sum(range(size // 100))


def test_many_arrays_do_not_exhaust_memory_mappings(kept_bytes: KeptBytes) -> None:
    run_passes(1)
    arrays = [np.empty(40_000, np.uint8) for _ in range(40_000)]
    del arrays[::2]  # the kernel merges adjacent mappings
    with open("/proc/self/maps") as file:
        assert sum(1 for _ in file) < 12_000


def test_forked_process_has_its_own_block_cache(kept_bytes: KeptBytes) -> None:
    run_passes(1)
    np.ones(MB, np.uint8)
    pid = os.fork()
    if pid == 0:
        os._exit(int(np.full(MB, 3, np.uint8).sum() != 3 * MB))
    array = np.full(MB, 5, np.uint8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (array == 5).all()
