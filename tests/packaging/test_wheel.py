"""Installed packages work: the wheel without a system Gloo, the package without Gloo."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.distributed.jobs import finish_all
from tests.packaging.building import Wheel, copy_of_sources, empty_environment, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXTENSIONS = "SHM", "FAST", "OPTIM", "NN", "TAPE", "TAGI", "GLOO"


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


def test_build_compiles_common_sources_once(made: Wheel) -> None:
    """If two compilers wrote the same object at once, the library would be damaged."""
    objects = re.findall(r" -o (\S+\.o)\b", made.compiled)
    assert sum("/reduce-" in name for name in objects) == 1
    assert len(objects) == len(set(objects)), sorted(objects)
    assert " -shared " in made.output
    assert not re.findall(r" -o (\S+\.o)\b", made.output), "compiled again for the wheel"


def test_make_wheel_keeps_other_files_in_build(made: Wheel) -> None:
    assert not [path for path in (made.sources / "build").iterdir() if "bdist" in path.name]
    assert (made.sources / "build" / "site" / "index.html").exists()


def test_wheel_supports_every_python_and_contains_gloo(wheel: Path) -> None:
    assert "-cp310-abi3-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    carried = [name for name in names if name.startswith("flashlight_py.libs/")]
    assert any("libgloo" in name for name in carried), names
    package_data = ("py.typed", "__init__.pyi", "distributed/api/group.pyi", "optim/rules.inc")
    assert {f"flashlight_py/{name}" for name in package_data} <= set(names)
    assert {f"flashlight_py/_native/_{name}.abi3.so" for name in ("nn", "optim")} <= {*names}
    assert not any("missing.txt" in name or name.startswith("tests") for name in names)


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
        assert "flashlight_py.libs/libgloo" in used
    shown = run(python.with_name("flrun"), "-n", 2, "--no-python", "sh", "-c", "echo $RANK")
    assert sorted(shown.splitlines()) == ["[0] 0", "[1] 1"]


@pytest.fixture(scope="module")
def reason(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the reason why Gloo is missing, from a build with hidden headers."""
    folder = tmp_path_factory.mktemp("no_gloo")
    hidden = folder / "gloo" / "transport" / "tcp"
    hidden.mkdir(parents=True)
    (hidden / "device.h").write_text('#error "this machine has no Gloo"\n')
    options = {"CPATH": str(folder), **without(*EXTENSIONS[:-1])}
    return reason_in(build(copy_of_sources(folder), folder / "dist", **options))


def test_package_without_gloo_states_the_remedy(wheel: Path, reason: str, tmp_path: Path) -> None:
    """The wheel contains the reason of such a build instead of Gloo's extension."""
    assert "could not be compiled" in reason
    assert "libgloo-dev" in reason
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    (extension,) = (tmp_path / "venv").rglob("_native/_gloo*.so")
    extension.with_name("gloo.missing.txt").write_text(reason)
    extension.unlink()
    alone = (
        "import numpy as np, flashlight_py as fl\n"
        "fl.distributed_init()\n"
        "print(fl.all_reduce(np.ones(2), scale=3.0))\n"
        "print(fl.distributed_backend())\n"
    )
    assert "[3. 3.]" in run(python, "-c", alone)
    program = (
        "import flashlight_py as fl\n"
        "try:\n"
        "    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 2,\n"
        f"        {{'FILE_PATH': {str(tmp_path / 'meet')!r}, 'BACKEND': 'gloo', 'TIMEOUT': 5}})\n"
        "except fl.errors.BackendUnavailableError as error:\n"
        "    print(error)\n"
    )
    assert reason.strip() in run(python, "-c", program)
    assert not list(tmp_path.glob("meet*"))
    assert train_on_two_ranks(python, tmp_path, "auto") == ["", ""]  # they use shared memory


def test_build_succeeds_without_gloo(tmp_path: Path) -> None:
    reason = reason_in(build(copy_of_sources(tmp_path), tmp_path / "dist", **without(*EXTENSIONS)))
    assert "FLASHLIGHT_WITHOUT_GLOO" in reason
    assert "libgloo-dev" in reason


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
    assert "FLASHLIGHT_WITHOUT_FAST=1 pip install" in str(failed.value)
    assert not list(tmp_path.rglob("*.whl"))


def build(sources: Path, into: Path, **variables: str) -> Path:
    """Return a wheel built from ``sources``, before auditwheel changes it."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", into, sources, **variables)
    (built,) = into.glob("*.whl")
    return built


def reason_in(built: Path) -> str:
    """Return the reason why the wheel has no Gloo."""
    with zipfile.ZipFile(built) as content:
        assert not any("_gloo" in name and name.endswith(".so") for name in content.namelist())
        return content.read("flashlight_py/_native/gloo.missing.txt").decode()
