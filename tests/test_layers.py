"""The layers of docs/design.md: direction of imports, and optional libraries."""

import ast
import functools
import graphlib
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import flashlight_py as fl
from tests.launch.launcher import run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashlight_py"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_native" not in path.parts)
LONGEST = 700  # maximum number of lines of a file

# Allowed imports of each module or package. The first matching entry applies, so narrow rules
# precede wide rules.
FRAMEWORK = ("errors", "device", "random", "kernels", "autograd", "nn", "optim")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": (*FRAMEWORK, "_version", "distributed", "tape"),
    "_version": (),
    "tracebacks": (),
    "errors": ("tracebacks",),
    "device": ("errors",),
    "structure": (),
    "checks": (),
    "names": (),
    "cores": (),
    "kinds": ("device",),
    "blas": ("libraries", "system"),
    # The program of a rank imports the package (""), like a user's script.
    "processes.rank_main": ("launch", ""),
    "processes": ("system",),
    "system": ("processes.windows",),
    "interfaces": ("system",),
    "random": (*FRAMEWORK[:2], "checks", "structure"),
    "kernels": FRAMEWORK[:2],
    "erf": ("device",),
    "autograd": (*FRAMEWORK[:4], "erf", "names", "structure", "libraries", "_native"),
    "safetensors": ("errors", "device"),
    "nn": (*FRAMEWORK[:5], "checks", "names", "structure", "safetensors"),
    "optim": (*FRAMEWORK[:6], "checks", "names", "structure", "_native"),
    "dataset": ("errors", "device", "random", "cores", "names"),
    "meter": ("device", "kernels", "structure"),
    "distributed.rendezvous": ("errors", "interfaces", "system"),
    "distributed": (
        *("errors", "tracebacks", "device", "checks", "cores", "interfaces", "libraries"),
        *("names", "_native", "system", "structure", "kinds", "blas"),
    ),
    "libraries": (),
    "tape": (*FRAMEWORK, "meter", "distributed", "parallel", "libraries", "structure", "_native"),
    # Workers are processes that this process starts, like the ranks of spawn.
    "parallel.workers": (*FRAMEWORK, "blas", "cores", "distributed", "launch"),
    "parallel": (
        *(*FRAMEWORK, "dataset", "meter", "distributed", "names", "structure", "_native"),
        *("kinds", "blas"),
    ),
    "tagi.distributed": ("tagi", "errors", "device", "distributed", "parallel"),
    "tagi": ("errors", "device", "random", "kernels", "erf", "names", "_native"),
    "trace": ("errors", "distributed"),
    "amp": (*FRAMEWORK, "distributed", "structure"),
    "torch": ("errors", "interfaces", "distributed"),
    "checkpoint": ("_version", *FRAMEWORK[:3], "safetensors", "distributed", "parallel"),
    "doctor": (
        *("_version", "errors", "device", "interfaces", "libraries", "_native"),
        *("distributed", "launch"),
    ),
    # The plugin uses the package as a test does.
    "testing": ("", "errors", "distributed", "launch", "processes", "system"),
    # Ranks of engines also import the package in the function that starts them.
    "engines": ("launch", "", "interfaces", "distributed"),
    "launch.records": ("launch", "distributed", "system"),
    "launch": (
        *("_version", "errors", "tracebacks", "cores", "interfaces", "system", "processes"),
        "engines",  # fl.launch.ray, dask and spark
    ),
}
# Parts of these packages from the lowest layer. Each part may import itself and earlier parts.
LAYERS: dict[str, tuple[str, ...]] = {
    "autograd": (
        *("graph", "engine", "variable", "precision", "native", "functions"),
        *("gradcheck", "operators"),
    ),
    "nn": ("init", "module", "layers", "images", "sequences", "recompute"),
    "optim": ("cpu", "cuda", "optimizer", "algorithms", "schedules"),
    "distributed": (
        *("constants", "verbs", "work", "calls", "rendezvous", "backend", "memory", "failures"),
        *("backends", "groups", "api", "start", "reducers", "internal"),
    ),
    "parallel": (
        *("agreement", "data", "gradient_pass"),
        *("functional", "shard_memory", "optimizer", "layers"),
        *("tree", "synchronize", "gathered_shards", "leaf_sync"),
        *("data_parallel", "fully_sharded", "workers"),
    ),
}
OPTIONAL = {
    *("mpi4py", "cupy", "torch", "matplotlib", "tqdm", "ml_dtypes", "jax", "cloudpickle"),
    *("distributed", "pyspark", "ray"),
}

# Optional parts, which can be deleted with their tests and pages. The core imports them by name.
WINGS = ("amp", "tape", "tagi", "engines", "torch", "testing", "distributed.backends.mpi")


def name_of(module: Path) -> str:
    """Return a module's name: ``nn.layers`` for ``flashlight_py/nn/layers.py``."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def rule_for(name: str) -> str | None:
    return next((part for part in MAY_IMPORT if within(name, part)), None)


def imported(tree: ast.AST, by_name: bool = True) -> Iterator[tuple[int, str]]:
    """Return (line, dotted name) of every import, also inside functions.

    ``by_name`` includes modules that ``import_module`` imports. An f-string with a constant
    beginning ends with "*".
    """
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if by_name and getattr(called, "attr", getattr(called, "id", "")) == "import_module":
            assert isinstance(node, ast.Call)
            text = ast.unparse(node.args[0]).strip("f'")
            if not text.startswith("{"):
                yield node.lineno, re.sub(r"\{.*", "*", text)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports with the full name"
            # In `from package import name`, the name may be a module.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def imports_of(module: Path, by_name: bool = True) -> list[tuple[int, str]]:
    return list(imported(ast.parse(module.read_text()), by_name))


def imported_at_once(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the imports of a module's import, without functions and TYPE_CHECKING blocks."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from imported(node)
    for child in children:
        yield from imported_at_once(child)


def test_imports_follow_the_layers() -> None:
    wrong = []
    for module in MODULES:
        name = name_of(module)
        rule = rule_for(name)
        assert rule is not None, f"{name} has no place in the house; give it one in MAY_IMPORT"
        allowed = (rule, *MAY_IMPORT[rule])
        for line, full_name in imports_of(module):
            target = full_name.removeprefix("flashlight_py").lstrip(".")
            is_ours = within(full_name, "flashlight_py")
            if is_ours and not any(within(target, part) for part in allowed):
                where = f"{module.relative_to(ROOT)}:{line}"
                wrong.append(f"{where}: {rule} may import {allowed}, not {target!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", LAYERS)
def test_layers_inside_a_package_import_downward(package: str) -> None:
    """Imports for annotations are included."""
    order = LAYERS[package]
    wrong = []
    for module in MODULES:
        inside = name_of(module).split(".")
        if inside[0] != package or len(inside) == 1:
            continue
        assert inside[1] in order, f"{package}.{inside[1]} has no place in LAYERS"
        above = order[order.index(inside[1]) + 1 :]
        for line, target in imports_of(module):
            if any(within(target, f"flashlight_py.{package}.{part}") for part in above):
                wrong.append(f"{module.relative_to(ROOT)}:{line}: {target} is above {inside[1]}")
    assert not wrong, "\n".join(wrong)


def test_code_outside_distributed_uses_its_public_names_and_one_module() -> None:
    names = ["", ".*", *(f".{name}" for name in fl.distributed.__all__)]
    allowed = {f"flashlight_py.distributed{name}" for name in names}
    inside = [
        f"{module.relative_to(ROOT)}:{line}: take {target} from distributed.internal"
        for module in MODULES
        if not within(name_of(module), "distributed")
        for line, target in imports_of(module)
        if within(target, "flashlight_py.distributed") and target not in allowed
        if not within(target, "flashlight_py.distributed.internal")
    ]
    assert not inside, "\n".join(inside)


def test_core_does_not_import_optional_packages() -> None:
    named = [
        f"{module.relative_to(ROOT)}:{line}: {target}"
        for module in MODULES
        for line, target in imports_of(module, by_name=False)
        for wing in WINGS
        if within(target, f"flashlight_py.{wing}") and not within(name_of(module), wing)
    ]
    assert not named, "\n".join(named)


# In these packages, imports for annotations count as well.
ONE_WAY = ("distributed.rendezvous", "distributed.start", "launch", "engines")


def test_modules_import_each_other_in_one_direction() -> None:
    """Imports in functions are included, except for annotations and lazy public names."""
    names = {name_of(module): module for module in MODULES}
    graph: dict[str, set[str]] = {}
    for name, module in names.items():
        targets = (target for _, target in imported(without_lazy_names(module)))
        ours = re.findall(r"^flashlight_py\.([\w.]+)$", "\n".join(targets), re.MULTILINE)
        # In `from module import name`, use the longest part that is a module.
        graph[name] = {
            next((part for part in (target, target.rpartition(".")[0]) if part in names), name)
            for target in ours
        } - {name, ""}
    graphlib.TopologicalSorter(graph).prepare()  # a cycle raises CycleError, which names it


def without_lazy_names(module: Path) -> ast.Module:
    tree = ast.parse(module.read_text())
    is_strict = any(within(name_of(module), package) for package in ONE_WAY)
    tree.body = [
        node
        for node in tree.body
        if (
            is_strict
            or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        )
        and getattr(node, "name", "") != "__getattr__"
    ]
    return tree


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    wrong = [
        f"{module.relative_to(ROOT)}:{line}: import {target} inside the function that needs it"
        for module in MODULES
        for line, target in imported_at_once(ast.parse(module.read_text()))
        if target.partition(".")[0] in OPTIONAL
        and not name_of(module).startswith("torch.")  # required by torch
    ]
    assert not wrong, "\n".join(wrong)


# Modules of the control plane, except modules that handle only processes of this machine.
CONTROL_PLANE = (
    *("interfaces", "distributed.rendezvous", "distributed.start", "distributed.memory.topology"),
    *("distributed.failures.flight_record"),
    *(f"launch.{name}" for name in ("agent", "channel", "failures", "hosts")),
    *(f"launch.{name}" for name in ("job", "loop", "output", "ranks", "records", "supervisor")),
)
# Functions without system calls.
ASKS_NOTHING = {"inet_pton", "AddressFamily", "strftime", "localtime", "register_at_fork"}


def asked_for(module: Path, taken: set[str]) -> Iterator[tuple[int, str]]:
    """Return the lines where a module uses a name of ``taken`` or of the same libraries."""
    libraries = {name.partition(".")[0] for name in taken} - {"os", "signal", "time"}
    tree = ast.parse(module.read_text())
    for line, name in imported(tree):
        library, _, used = name.rpartition(".")
        if library in libraries and used not in ASKS_NOTHING and not used.isupper():
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in taken:
            yield node.lineno, ast.unparse(node)


def test_control_plane_uses_the_system_module() -> None:
    seam = ast.parse((PACKAGE / "system.py").read_text())
    libraries = {name for _, name in imported(seam)} - {"array", "struct"}
    names = {ast.unparse(node).lstrip("_") for node in ast.walk(seam)}
    taken = {name for name in names if re.match(rf"({'|'.join(libraries)})\.\w*[a-z]", name)}
    taken -= {"os.fstat", "os.listdir"}  # also used for local files
    taken |= {"secrets.token_hex", "secrets.token_bytes"}
    wrong = [
        f"{module.relative_to(ROOT)}:{line}: {name}: take it from flashlight_py/system.py"
        for module in MODULES
        if any(within(name_of(module), part) for part in CONTROL_PLANE)
        for line, name in asked_for(module, taken)
    ]
    assert taken
    assert not wrong, "\n".join(wrong)


def modules_of(program: str) -> set[str]:
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    return set(run(command, code=0).stdout.split())


def test_importing_every_public_name_loads_no_optional_library() -> None:
    loaded = modules_of("from flashlight_py import *")
    assert OPTIONAL.isdisjoint(loaded)
    assert "flashlight_py.distributed.backends.mpi.backend" not in loaded
    assert "flashlight_py.distributed.backends.nccl.communicator" not in loaded
    native = [name for name in loaded if name.startswith("flashlight_py._native._")]
    assert native == ["flashlight_py._native._fast"]  # used by the verbs


def test_names_are_imported_at_first_use() -> None:
    assert "numpy" not in modules_of("import flashlight_py")
    loaded = modules_of("import flashlight_py as fl\nfl.all_reduce")
    assert "flashlight_py.distributed" in loaded
    assert not {"flashlight_py.nn", "flashlight_py.parallel", "flashlight_py.autograd"} & loaded


def test_launcher_imports_few_modules() -> None:
    loaded = modules_of("import flashlight_py.launch.__main__")
    assert not {"numpy", "cffi", "multiprocessing", "asyncio", "inspect", "logging"} & loaded


def test_type_checkers_see_the_public_names() -> None:
    stubs = dict(runpy.run_path(str(ROOT / "scripts" / "stubs"))["stubs"]())
    assert {stub: stub.read_text() for stub in stubs} == stubs, "run scripts/stubs"
    assert set(PACKAGE.rglob("*.pyi")) == set(stubs)


def test_files_stay_short() -> None:
    folders = ("flashlight_py", "csrc", "tests", "examples", "benchmarks", "scripts")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    kinds = {".py", ".cc", ".h", ""}
    lengths = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for path in sources
        if path.is_file() and path.suffix in kinds
    }
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_import_parser_handles_every_kind_of_import() -> None:
    source = (
        "import a.b\n"
        "from c import d\n"
        "if TYPE_CHECKING:\n    import types_only\n"
        "try:\n    import tried\nexcept ImportError:\n    import instead\n"
        "def f():\n    import lazy\n    import_module('by.name')\n    import_module(f'g.{x}')\n"
        "class C:\n    import in_class\n"
    )
    tree = ast.parse(source)
    at_once = {target for _, target in imported_at_once(tree)}
    assert at_once == {"a.b", "c.d", "tried", "in_class", "instead"}
    written = at_once | {"types_only", "lazy"}
    assert {target for _, target in imported(tree, by_name=False)} == written
    assert {target for _, target in imported(tree)} == written | {"by.name", "g.*"}
