"""Public names are documented, examples in the documentation work, and the site is complete."""

import ast
import builtins
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.doctor import mpirun_command
from tests.launch.launcher import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PACKAGES = ("amp", "autograd", "checkpoint", "dataset", "device", "distributed", "errors", "meter")
PACKAGES += ("nn", "optim", "parallel", "parallel.functional", "tagi", "trace")
# The docstring must state the unit of parameters whose names denote durations or sizes.
UNITS = {"timeout": "seconds", "interval": "seconds", "bytes": "bytes"}


def public_names() -> dict[str, Any]:
    """Return all functions and classes in an ``__all__`` of this package, by shortest name."""
    modules: list[ModuleType] = [fl]
    modules += [importlib.import_module(f"flashlight_py.{name}") for name in PACKAGES]
    results: dict[int, tuple[str, Any]] = {}
    for module in modules:
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name))
            if inspect.isclass(value) or inspect.isfunction(value):
                results.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(results.values())


def documented() -> Iterator[tuple[str, Any, str]]:
    """Return (name, object, docstring) of all public functions, classes, methods and properties."""
    for name, value in public_names().items():
        docstring = inspect.getdoc(value) or ""
        yield name, value, docstring + referred(docstring)
        if inspect.isclass(value):
            yield from members(name, value)


def members(class_name: str, cls: type) -> Iterator[tuple[str, Any, str]]:
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function) and not name.startswith("_"):
            docstring = inspect.getdoc(getattr(cls, name)) or ""
            yield (
                f"{class_name}.{name}",
                function,
                docstring + referred(docstring) + overridden(cls, name),
            )
        if name == "__init__" and inspect.isfunction(member):
            # The docstring of a class describes its constructor.
            yield class_name + "()", member, inspect.getdoc(cls) or ""


def overridden(cls: type, name: str) -> str:
    """Return the docstrings of the overridden methods, which also describe this method."""
    methods = (getattr(base, name, None) for base in cls.__mro__[1:])
    return "".join(
        f"\n\n{inspect.getdoc(method)}" for method in methods if inspect.isfunction(method)
    )


def referred(doc: str) -> str:
    """Return the docstrings to which this docstring refers by ``:func:`` and its full name."""
    names = re.findall(r":(?:func|class):`flashlight_py\.(\w+)`", doc)
    return "".join(f"\n\n{inspect.getdoc(getattr(fl, name))}" for name in names)


CASES = list(documented())
FUNCTIONS = [case for case in CASES if inspect.isfunction(case[1])]


def parameters(function: Any) -> dict[str, str]:
    params = inspect.signature(function).parameters.values()
    return {parameter.name: str(parameter.annotation) for parameter in params}


def raised_by(function: Any) -> set[str]:
    """Return the exception classes that the body of the function raises by name."""
    if function.__code__.co_filename == "<string>":  # what dataclass makes raises nothing
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc}
    calls = {item.func if isinstance(item, ast.Call) else item for item in raised}
    names = {ast.unparse(value).rpartition(".")[2] for value in calls}
    return {name for name in names if name[:1].isupper()}


def test_summaries_are_sentences() -> None:
    wrong = []
    for name, _, doc in CASES:
        summary = doc.partition("\n\n")[0].strip()
        begins = summary[:1].isupper() or summary.startswith("``")
        if not (begins and summary.endswith(".")):
            wrong.append((name, summary))
    assert not wrong, "begin with a capital letter and end with a full stop"


def test_docstrings_list_the_errors_of_a_function() -> None:
    raised = {name: raised_by(function) for name, function, _ in FUNCTIONS}
    documented = {name: doc.partition("Raises:")[2] for name, _, doc in FUNCTIONS}
    wrong = [
        (name, error) for name in raised for error in raised[name] if error not in documented[name]
    ]
    assert not wrong, "these raise what their docstrings do not say under 'Raises:'"


def test_units_are_documented() -> None:
    wrong = [
        (name, parameter, unit)
        for name, function, doc in FUNCTIONS
        for parameter in parameters(function)
        for part, unit in UNITS.items()
        if part in parameter and unit not in doc
    ]
    assert not wrong, "the units of these parameters are missing"


def is_array(annotation: str) -> bool:
    """Return whether an annotation is ``Array``, as text or as an alias, and not a variable."""
    names = "Array", str(fl.device.Array)
    return "Variable" not in annotation and any(name in annotation for name in names)


def test_functions_of_arrays_state_shape_or_dtype() -> None:
    wrong = [
        name
        for name, function, doc in FUNCTIONS
        if any(is_array(annotation) for annotation in parameters(function).values())
        and not re.search(r"shape|dtype|dimension|element", doc)
        # The device of an array does not matter for these annotations.
        and function.__module__ != "flashlight_py.device"
    ]
    assert not wrong, "these take an array and say neither shape nor dtype"


def test_enough_is_looked_at() -> None:
    names = {name for name, _, _ in CASES}
    assert {"flashlight_py.all_reduce", "flashlight_py.Variable.backward"} <= names
    assert len(names) > 100
    assert not any(isinstance(value, Enum) for value in public_names().values())


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# Pages whose programs run in every test run. Programs of other pages are slow tests.
FIRST = ("README",)
PROGRAMS = [
    pytest.param(program, id=f"{name}-{number}", marks=[] if name in FIRST else pytest.mark.slow)
    for name, text in [("README", README), *((page.stem, page.read_text()) for page in DOCS)]
    for number, program in enumerate(blocks("python", text), 1)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_the_documents_run_on_two_ranks(program: str, tmp_path: Path) -> None:
    if "import zarr\n" in program:
        pytest.importorskip("zarr", minversion="3")  # Python 3.11 or later
    file = tmp_path / "program.py"
    file.write_text(program)
    command = [*mpirun_command(2), sys.executable, "-W", "error", file]
    done = run(command, cwd=tmp_path)  # with its output
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_shows_the_example_and_its_output() -> None:
    program, shown = blocks("python")[0], blocks("text")[0]
    file = ROOT / "examples" / "all_reduce.py"
    assert program == file.read_text()
    assert len(program.splitlines()) <= 15
    assert run([*mpirun_command(4), sys.executable, file], code=0).stdout == shown


def test_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(blocks("bash"))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
    for file in re.findall(r"\b(?:examples|benchmarks)/\w+\.py", README):
        assert (ROOT / file).exists(), file
    options = re.findall(r"DistributedTraining\.py (.*)", commands)
    source = (ROOT / "examples" / "DistributedTraining.py").read_text()
    for option in re.findall(r"(--[a-z-]+)", " ".join(options)):
        assert f'"{option}"' in source, option


PAGES_AT_TOP = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]


@pytest.mark.parametrize("document", [*PAGES_AT_TOP, "docs"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for page in [path] if path.is_file() else sorted(path.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


# Names that newcomers' pages call and that are not of the package: the reader's objects, built-ins.
LOCAL = {"len", "optimizer", "loss", "sampler", "joined", "group"}
LOCAL |= {"model", "criterion", "sgd", "l", "meter", "var", "module", "train", "eval"}
LOCAL |= {"clear_grad_hook"}  # of a Variable


@pytest.mark.parametrize("page", ["from-flashlight", "from-pytorch", "from-mpi4py"])
def test_names_that_lead_from_another_library_exist(page: str) -> None:
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    column, called = 0, list[str]()
    for cells in (row.split("|") for row in rows):
        ours = [index for index, cell in enumerate(cells) if "flashlight_py" in cell]
        column = ours[0] if ours else column
        called += re.findall(r"(?:fl\.)?([A-Za-z_][\w.]*)\(", cells[column])
    names = [name.split(".") for name in called if name.partition(".")[0] not in LOCAL]
    assert len(names) > 20
    for name in names:
        functools.reduce(getattr, name, fl)


def number_in(source: str, constant: str) -> int:
    """Return the value of ``constant = 4 << 10`` in a source file of any language."""
    # In `sized(4 << 10, 64)` the model checker uses the second number.
    match = re.search(rf"\b{constant}\s*=\s*(?:sized\()?([\d <]+)", source)
    assert match, f"{constant} is not there"
    return int(eval(match[1]))  # digits, spaces and shifts only


THRESHOLDS = re.findall(
    r"^\| `(\w+)` \| `(\S+)` \| (\d+)(?: (B|KB|MB))? \|",
    (ROOT / "docs" / "algorithms.md").read_text(),
    re.MULTILINE,
)


def test_thresholds_of_the_page_equal_the_code() -> None:
    for constant, file, number, unit in THRESHOLDS:
        stated = int(number) * {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20}[unit]
        assert number_in((ROOT / file).read_text(), constant) == stated, constant


def test_thresholds_are_found_at_all() -> None:
    assert {"kTinyBytes", "kChunkBytes", "INLINE_BYTES"} <= {row[0] for row in THRESHOLDS}
    assert len(THRESHOLDS) >= 15


def test_page_of_errors_lists_each_class() -> None:
    explained = (ROOT / "docs" / "errors.md").read_text()
    assert not [name for name in fl.errors.__all__ if f"| `{name}` |" not in explained]


def offered(module: Any, names: str) -> list[str]:
    return [name for name in names.split() if hasattr(module, name)]


def arguments(function: Any, names: str) -> list[str]:
    return [name for name in names.split() if name in inspect.signature(function).parameters]


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def within(context: Any) -> None:
    with context:
        pass


def perceptron() -> fl.nn.Sequential:
    return fl.nn.Sequential(fl.nn.Linear(4, 3), fl.nn.ReLU(), fl.nn.Linear(3, 2))


def sharded(**options: Any) -> fl.nn.Sequential:
    """Return a module whose parameters are all sharded. Small parameters need an option."""
    module = perceptron() if options else fl.nn.Sequential(fl.nn.Linear(1800, 1800))
    fl.fully_shard(module, **options)
    return module


def distributed(**options: Any) -> fl.nn.Sequential:
    module = perceptron()
    fl.distribute_module_grads(module, **options)
    return module


def reduce_with(hook: Any, x: Any) -> None:
    reducer = fl.CoalescingReducer(1.0, hook=hook)
    reducer.add(x)
    reducer.finalize()


def sgd(module: Any) -> Any:
    return fl.optim.SGDOptimizer(module.params(), 0.1)


# Statements of pages that something does not exist or is rejected: the page and its words, then
# code that raises the error, or code that lists the existing names.
ABSENT = re.findall(
    r"^(\S+): (.*)\n    (?:(\w+Error): )?(.*)$",
    """
from-pytorch: (`torch.distributed.rpc`) are not supported
    offered(fl, "rpc")
from-pytorch: it is no context manager
    TypeError: within(fl.no_grad(np.ones(3)))
from-pytorch: no `last_epoch` argument
    arguments(fl.optim.StepLR, "last_epoch")
from-pytorch: leaves momentum as it is (`cycle_momentum=False`)
    arguments(fl.optim.OneCycleLR, "cycle_momentum")
from-mpi4py: one-sided communication, parallel files, graph topologies, derived datatypes, probes
    offered(fl, "Win put get File dist_graph Datatype probe send_init")
from-mpi4py: no `ANY_TAG`
    ValueError: fl.recv(np.ones(3), 0, tag=None)
reliability: no probes, no cancelled, buffered, ready or persistent requests, and no communicators
    offered(fl, "probe bsend rsend send_init intercomm")
reliability: no Adasum
    ValueError: fl.all_reduce(np.ones(3), op="adasum")
verbs: Only `isend`, `irecv` and `sendrecv` can send to the same rank
    ValueError: fl.send(np.ones(3), 0)
verbs: bitwise; no `scale`
    ValueError: fl.all_reduce(np.ones(3, int), scale=2, op="and")
verbs: real numbers, bool, dates
    TypeError: fl.all_reduce(np.ones(3, complex), op="min")
verbs: The other verbs need an array: pass `np.asarray(x)`
    TypeError: fl.all_gather(3.5)
verbs: arrays of any dtype without objects
    TypeError: fl.all_gather(np.array([None, 1], object))
sharp-bits: Masked arrays raise `TypeError`
    TypeError: fl.all_reduce(np.ma.ones(3))
sharp-bits: If a verb would change a read-only array, it raises `ValueError`
    ValueError: fl.all_reduce(read_only(np.ones(3)))
sharp-bits: Averages of integers raise `TypeError`
    TypeError: fl.all_reduce(np.ones(3, int), op="avg")
models: An empty batch raises an error
    ValueError: fl.nn.Conv2D(1, 2, 3)(fl.input(np.zeros((0, 1, 8, 8), np.float32)))
differentiable-collectives: `op` is `"sum"` or `"avg"`
    ValueError: fl.functional.all_reduce(fl.param(np.ones(3)), op="max")
differentiable-collectives: Verbs that work in place reject a Variable with a history
    ValueError: fl.all_reduce(fl.param(np.ones(3)) * 2)
uneven-inputs: `throw_on_early_termination=True` | not offered
    arguments(fl.join, "throw_on_early_termination")
compression: take float32 and float64 and raise `TypeError` for other dtypes
    TypeError: reduce_with(fl.Float16Compression(), np.ones(3, np.float16))
from-lux: Both together raise `ValueError`
    ValueError: fl.DistributedOptimizer(sgd(distributed()))
sharding: `all_reduce_parameters`
    ValueError: fl.all_reduce_parameters(sharded())
sharding: `all_reduce_gradients`
    ValueError: fl.all_reduce_gradients(sharded())
sharding: `PeriodicAveraging` raise `ValueError` for a sharded module
    ValueError: fl.PeriodicAveraging(sharded(), 2)
sharding: `DistributedOptimizer` always raises `ValueError`
    ValueError: fl.DistributedOptimizer(sgd(sharded()))
leaves: `reducer`, `hook`, `scale` or `bucket_bytes` together with `leaves`
    ValueError: distributed(leaves=2, scale=0.5)
leaves: `no_sync` and `join` raise `ValueError` for a module with `leaves`
    ValueError: within(fl.no_sync(distributed(leaves=2)))
tagi: layers that are not in `fl.tagi.nn`, such as attention
    offered(fl.tagi, "MultiheadAttention Attention Transformer")
from-pytagi: without `set_size`, `set_input_x`, `get_name`
    offered(fl.tagi.nn.BaseHiddenStates, "set_size set_input_x get_name")
""",
    re.MULTILINE,
)


@pytest.mark.parametrize(("page", "words", "error", "attempt"), ABSENT)
def test_missing_features_are_missing_as_stated(
    page: str, words: str, error: str, attempt: str
) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert words in text, "the page has changed: so must the table"
    if error:
        with pytest.raises(getattr(builtins, error)):
            eval(attempt, {**globals(), "np": np})
    else:
        assert eval(attempt, {**globals(), "np": np}) == []


def test_absences_are_tried_or_dated() -> None:
    """A statement that something does not exist is in the table above, or has a date."""
    claims = re.compile(r"\b(not here|not yet|yet:|not supported|not offered|nothing has run)\b")
    tried = [words for _, words, _, _ in ABSENT]
    wrong = []
    for page in [ROOT / "README.md", *DOCS]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for sentence in re.split(r"(?<=[.;:])\s|\n\n|\n[|-]", text):
            flat = " ".join(sentence.split())
            if claims.search(flat) and not re.search(r"[Aa]s of 20\d\d-\d\d", flat):
                wrong += [] if any(words in flat for words in tried) else [f"{page.name}: {flat}"]
    assert not wrong, "\n".join(wrong)


NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
IN_NAV = re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)
AT_TOP = ["contributing.md", "security.md", "changelog.md"]  # their files are not in docs/
API = "".join(page.read_text() for page in DOCS if page.parent.name == "api")
FAMILIES = re.findall(r"^::: every name of (\S+)$", API, re.MULTILINE)
DESCRIBED = {
    *re.findall(r"^::: flashlight_py\.(\S+)$", API, re.MULTILINE),
    *(
        name if family.startswith("flashlight_py.distributed.") else f"{family[14:]}.{name}"
        for family in FAMILIES
        for name in importlib.import_module(family).__all__
    ),
}


def test_navigation_lists_each_page_once() -> None:
    pages = [str(page.relative_to(ROOT / "docs")) for page in DOCS]
    examples = [f"examples/{file.stem}.md" for file in (ROOT / "examples").glob("*.py")]
    assert sorted(IN_NAV) == sorted([*pages, *examples, *AT_TOP])


@pytest.mark.parametrize(("front", "folder"), [("README.md", "docs/"), ("docs/index.md", "")])
def test_front_pages_lead_to_every_page(front: str, folder: str) -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (ROOT / front).read_text()))
    pages = {f"{folder}{page}" for page in IN_NAV if "/" not in page}
    pages -= {f"{folder}{page}" for page in ("index.md", *AT_TOP)}
    assert not pages - linked


def test_api_pages_list_each_public_name() -> None:
    names = {f.rpartition(".")[2] for f in DESCRIBED}
    public = [name for name in fl.__all__ if callable(getattr(fl, name))]
    assert not [name for name in public if name not in names]
    for package in (fl.nn, fl.optim, fl.dataset, fl.meter, fl.errors, fl.functional, fl.tagi):
        offered = [n for n in package.__all__ if inspect.isclass(getattr(package, n))]
        assert not [name for name in offered if name not in names], package.__name__
    for module in (fl.autograd.functions, fl.nn.init, fl.optim):
        home = module.__name__.partition(".")[2]
        functions = [f for f in vars(module).values() if inspect.isfunction(f)]
        family = module.__name__ if module is fl.nn.init else module.__name__ + "."
        offered = [f.__name__ for f in functions if f.__module__.startswith(family)]
        assert offered
        assert not [n for n in offered if f"{home}.{n}" not in DESCRIBED], home


def test_described_names_exist() -> None:
    for name in DESCRIBED:
        result = pkgutil.resolve_name(f"flashlight_py.{name}")
        assert callable(getattr(result, name.rpartition(".")[2], result)), name  # or a module


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "mkdocstrings")):
        pytest.skip("needs the extra docs: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run(command, code=0, cwd=ROOT, timeout=100, env=env)
    front = (tmp_path / "index.html").read_text()
    assert 'href="quick-start.html"' in front
    page = (tmp_path / "api" / "distributed.html").read_text()
    assert 'id="flashlight_py.all_reduce"' in page
    # The site converts references and examples of docstrings to HTML.
    assert ":func:" not in page
    assert "<blockquote>" not in page
    for file in tmp_path.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="(?!/|\w+:)([^"#]+)', file.read_text()):
            assert (file.parent / unquote(link)).exists(), f"{file.name}: {link}"
    changes = (tmp_path / "contributing.html").read_text()
    assert 'href="design.html"' in changes
