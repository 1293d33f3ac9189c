"""Releases work on each Python, without compiler, Gloo and MPI; builds name missing packages."""

import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.distributed.processes import finish_all
from tests.doctor.test_doctor import states
from tests.packaging.building import (
    ROOT,
    Machine,
    Release,
    copy_of_sources,
    empty_environment,
    environment,
    interpreters,
    machine,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NEEDS_ROOT = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ("mmdebstrap", "unshare"))),
    reason="needs root and mmdebstrap: make tools-slow",
)

EXTENSIONS = "SHM", "FAST", "OPTIM", "NN", "TAPE", "TAGI", "GLOO"


# Debian's release of each Python. Debian has no 3.10 and 3.12: for them, a machine of the host's
# release gets an interpreter of the host.
DEBIAN = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
NEEDED = "pip", "numpy>=2.2.5,<3", "cffi>=1.16,<3"


def without(*names: str) -> dict[str, str]:
    return {f"FLASHLIGHT_WITHOUT_{name}": "1" for name in names}


# Trains on 2 ranks that find each other through a file, and prints the loaded libraries of Gloo.
TRAIN = """
import sys
import numpy as np
import flashlight_py as fl

rank, place, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
params = {"FILE_PATH": place, "BACKEND": backend}
fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, 2, params)
fl.set_seed(rank)
model = fl.nn.Sequential()
model.add(fl.nn.Linear(3, 4))
model.add(fl.nn.Linear(4, 1))
fl.broadcast_parameters(model)
fl.distribute_module_grads(model)
optimizer = fl.optim.SGDOptimizer(model.params(), 0.01)
x = fl.input(np.full((2, 3), rank, np.float32))
y = fl.no_grad(np.ones((2, 1), np.float32))
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = fl.nn.MeanSquaredError()(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.scalar())
total = np.array(losses)
fl.all_reduce(total)
assert total[-1] < total[0], total
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "libgloo" in line}))
"""


def test_build_compiles_common_sources_once(release: Release) -> None:
    """If two compilers wrote the same object at once, the library would be damaged."""
    objects = re.findall(r" -o (build/objects/\S+\.o)\b", release.compiled)
    assert sum("/reduce-" in name for name in objects) == 1
    assert len(objects) == len(set(objects)), sorted(objects)
    assert " -shared " in release.output
    assert not re.findall(r" -o (build/objects/\S+\.o)\b", release.output), (
        "compiled again for the wheel"
    )


def test_make_release_keeps_other_files_in_build(release: Release) -> None:
    assert not [path for path in (release.sources / "build").iterdir() if "bdist" in path.name]
    assert (release.sources / "build" / "site" / "index.html").exists()


def test_release_contains_libgloo_and_package_data(release: Release) -> None:
    assert "-cp310-abi3-manylinux" in release.native.name
    assert release.portable.name.endswith("-py3-none-any.whl")
    for wheel in (release.native, release.portable):
        names = zipfile.ZipFile(wheel).namelist()
        package_data = ("py.typed", "__init__.pyi", "distributed/api/group.pyi", "optim/rules.inc")
        package_data += ("_native/_nccl.py",)
        assert {f"flashlight_py/{name}" for name in package_data} <= set(names)
        assert not any(name.startswith("tests") for name in names)
        libraries = " ".join(name for name in names if ".so" in name)
        is_native = wheel == release.native
        assert all((f"_native/_{name}.abi3.so" in libraries) == is_native for name in ("nn", "shm"))
        assert ("_native/libs/libgloo" in libraries) == is_native


def train_on_two_ranks(python: Path, folder: Path, backend: str) -> list[str]:
    """Run TRAIN, and return the path of libgloo that each rank has loaded."""
    program = folder / "train.py"
    program.write_text(TRAIN)
    ranks = [
        subprocess.Popen(
            [python, "-W", "error", program, str(rank), folder / "rendezvous", backend],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment(),
        )
        for rank in range(2)
    ]
    codes, libraries, _ = zip(*finish_all(ranks, 60), strict=True)
    assert codes == (0, 0)
    return [library.strip() for library in libraries]


def test_wheel_trains_on_two_ranks_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert {line.partition("==")[0] for line in installed.split()} <= {
        "cffi", "flashlight-py", "flashlight_py", "numpy", "pip", "pycparser", "setuptools",
    }  # fmt: skip
    for used in train_on_two_ranks(python, tmp_path, "gloo"):
        assert len(used.split()) == 1, used
        assert "flashlight_py/_native/libs/libgloo" in used
    shown = run(python.with_name("flrun"), "-n", 2, "--no-python", "sh", "-c", "echo $RANK")
    assert sorted(shown.splitlines()) == ["[0] 0", "[1] 1"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    shutil.rmtree(tmp_path / "home", ignore_errors=True)  # 100 MB


def machine_with(version: str, home: Path, *packages: str) -> Machine:
    release, python = DEBIAN.get(version), ""
    if release is None:
        release = platform.freedesktop_os_release().get("VERSION_CODENAME")
        if version not in interpreters() or release not in DEBIAN.values():
            pytest.skip(f"Debian has no Python {version}, and this machine no copy for Debian")
        python = str(Path(interpreters()[version]).resolve().parents[1])
    (debian,) = (f"python{key}" for key, value in DEBIAN.items() if value == release)
    made = machine(release, debian, *packages, home=home, python=python)
    made.run(f"python{version}", "-m", "venv", "--without-pip", "/home/env")
    return made


def install(at: Machine, version: str, file: Path, *more: str, **variables: str) -> float:
    """Install the file and run the program of the README; return the processor time in seconds."""
    download = sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"
    for name in (f"manylinux_2_28_{platform.machine()}", f"manylinux2014_{platform.machine()}"):
        download += "--platform", name
    (at.home / "files").mkdir()
    run(*download, "--python-version", version, "--dest", at.home / "files", *NEEDED, *more)
    shutil.copy(file, at.home / "files")
    shutil.copy(ROOT / "examples" / "all_reduce.py", at.home)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    (pip,) = (at.home / "files").glob("pip-*.whl")
    options = "install", "--no-index", "--find-links", "/home/files", f"/home/files/{file.name}"
    at.run("python", f"/home/files/{pip.name}/pip", *options, **variables)
    output = at.run("flrun", "-n", "4", "/home/all_reduce.py")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert output.count("[6. 6. 6.]") == 3, output
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@NEEDS_ROOT
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_wheel_adds_arrays_within_seconds(version: str, release: Release, home: Path) -> None:
    """A normal user of a system without compiler, apt and MPI installs it."""
    seconds = install(machine_with(version, home), version, release.native)
    print(f"Python {version}: {seconds:.1f} s")
    assert seconds <= 15


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("compilers", "shm"), [(["g++", "libpython3.11-dev"], "ok"), ([], "missing")]
)
def test_source_installs_without_gloo(
    compilers: list[str], shm: str, release: Release, home: Path
) -> None:
    """With a compiler the package has shared memory, without one the portable backend."""
    at = machine_with("3.11", home, *compilers)
    install(at, "3.11", release.source, "setuptools", **without(*EXTENSIONS[1:-1]))
    report = at.run("python", "-m", "flashlight_py.doctor")
    state_of = states(report)
    assert (state_of["shm"], state_of["gloo"]) == (shm, "missing")
    assert "apt-get install gcc g++ python3-dev libgloo-dev" in " ".join(report.split())


def test_build_prints_its_progress_below_pip(tmp_path: Path) -> None:
    """pip hides the output of a build, so the build prints to the terminal itself."""
    pip = sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"
    command = shlex.join([*pip, str(tmp_path), str(copy_of_sources(tmp_path))])
    output = run("script", "-qec", command, "/dev/null", **without("SHM", *EXTENSIONS[2:]))
    lines = re.findall(r"compiled (\d+) of (\d+) files in (\d+) s", output)
    assert lines[-1][0] == lines[-1][1]
    seconds = [0, *(int(line[2]) for line in lines)]
    assert max(after - before for before, after in pairwise(seconds)) <= 8, lines


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        # A shared library may lack a symbol, which is detected when it is loaded.
        ("void nowhere(void);", "was built and does not load: .*undefined symbol: nowhere"),
        ("#error out of order\nvoid nowhere(void);", "could not be compiled"),
    ],
    ids=["does not load", "cannot be compiled"],
)
def test_build_fails_if_an_extension_fails(tmp_path: Path, broken: str, message: str) -> None:
    sources = copy_of_sources(tmp_path)
    module = sources / "csrc" / "fast" / "fast.c"
    module.write_text(f"{broken}\nvoid (*place)(void) = nowhere;\n{module.read_text()}")
    others = without(*(name for name in EXTENSIONS if name != "FAST"))
    with pytest.raises(AssertionError) as failed:  # the message contains the output
        build(sources, tmp_path / "dist", **others)
    assert re.search(rf"error: flashlight_py._native._fast.*{message}", str(failed.value))
    assert "Set FLASHLIGHT_WITHOUT_FAST=1" in str(failed.value)
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.parametrize(
    ("variables", "package"),
    [({"CFLAGS": "-I{}"}, "python3-dev"), ({"CXX": "no-compiler"}, r"g\+\+ libgloo-dev")],
)
def test_build_names_missing_packages(
    tmp_path: Path, variables: dict[str, str], package: str
) -> None:
    (tmp_path / "Python.h").write_text('#error "this machine has no header"\n')
    variables = {name: value.format(tmp_path) for name, value in variables.items()}
    with pytest.raises(AssertionError, match=f"error: .*apt-get install {package}\\)"):
        build(copy_of_sources(tmp_path), tmp_path / "dist", **variables)


def build(sources: Path, into: Path, **variables: str) -> Path:
    """Return a wheel built from ``sources``, before auditwheel changes it."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", into, sources, **variables)
    (built,) = into.glob("*.whl")
    return built
