"""NCCL's real library, without a GPU: found, opened, asked what it answers everywhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlight_py import _native
from flashlight_py.distributed.backends.nccl import library
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.distributed.backends.nccl.reduction import form_of
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import BackendUnavailableError, DistributedError
from tests.distributed.conformance import dtype_of

ffi = _native.load("nccl").ffi


@pytest.fixture
def nccl() -> NcclLibrary:
    try:
        return library.load()
    except BackendUnavailableError as error:
        pytest.skip(f"needs NCCL's library, a GPU is not needed: {error}")


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for anew, before and after."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_it_tells_its_version_and_where_it_was_found(nccl: NcclLibrary) -> None:
    assert nccl.version >= library.MINIMUM
    assert re.fullmatch(r"2\.\d+\.\d+", library.version_text(nccl.version))
    assert Path(nccl.path).name.startswith("libnccl.so")


def test_unique_ids_are_128_bytes_and_differ(nccl: NcclLibrary) -> None:
    first, second = nccl.unique_id(), nccl.unique_id()
    assert len(first) == len(second) == 128
    assert first != second


def test_a_refusal_carries_both_of_nccls_texts(nccl: NcclLibrary) -> None:
    null = ffi.NULL
    status = nccl.lib.ncclAllReduce(null, null, 1, 7, 0, null, null)
    assert status == nccl.lib.ncclInvalidArgument
    told = str(nccl.failure("[all_reduce] rank 0 of 2", status))
    assert "invalid argument" in told  # ncclGetErrorString
    assert "comm argument is NULL" in told  # ncclGetLastError


def test_every_declared_function_is_there(nccl: NcclLibrary) -> None:
    declared = re.findall(r"\b(nccl\w+)\(", cdef())
    assert len(declared) >= 20
    for name in declared:
        assert callable(getattr(nccl.lib, name)), name


def cdef() -> str:
    return (Path(__file__).parents[2] / "csrc" / "nccl" / "nccl.cdef.h").read_text()


def test_declarations_are_those_of_nccl_h(nccl: NcclLibrary) -> None:
    """Enumerators have the header's values, functions the header's parameter types."""
    header = Path(nccl.path).parents[1] / "include" / "nccl.h"
    if not header.exists():
        pytest.skip(f"this NCCL has no header: {header}")
    theirs, ours = header.read_text(), cdef()
    enumerators = re.findall(r"\b(nccl\w+)\s*=\s*(\d+)", ours)
    assert len(enumerators) >= 20
    added = {"ncclTimeout": 22900}  # by which version
    for name, value in enumerators:
        if nccl.version < added.get(name, 0):
            continue
        assert re.search(rf"\b{name}\s*=\s*{value}\b", theirs), name
    for name in re.findall(r"\b(nccl\w+)\(", ours):
        assert parameters(theirs, name) == parameters(ours, name), name


def parameters(source: str, function: str) -> list[str]:
    """The types of a function's parameters; const says nothing about how they are passed."""
    found = re.search(
        rf"ncclResult_t\s+{function}\(([^)]*)\)|char\s*\*\s*{function}\(([^)]*)\)", source
    )
    assert found, function
    text = found[1] if found[1] is not None else found[2]
    plain = [re.sub(r"\b(const|struct)\b", "", each) for each in text.split(",")]
    types = [re.sub(r"\s+|\b\w+\s*$", "", each.replace("*", " * ")) for each in plain]
    return [each for each in types if each not in ("", "void")]


def test_without_a_gpu_a_communicator_is_refused_with_cuda_s_words(nccl: NcclLibrary) -> None:
    """Also shows that a struct of 128 bytes passes by value, and that the config is taken."""
    if _gpus():
        pytest.skip("there is a GPU here: tests/gpu makes communicators")
    with pytest.raises(DistributedError, match=r"\[init\] rank 0 of 2: NCCL 2.*[Cc]uda failure"):
        Communicator(nccl, nccl.unique_id(), 0, 2, 5.0)


def _gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def test_the_variable_comes_first_and_stands_alone(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libnccl.so.2")
    assert list(library.candidates()) == [(library.VARIABLE, "/nowhere/libnccl.so.2")]
    with pytest.raises(BackendUnavailableError, match=r"/nowhere/libnccl.so.2") as told:
        library.load()
    assert "pip install 'flashlight-py[cuda12]'" in str(told.value)


def test_the_order_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_path_in_wheel", lambda name: f"/{name}/libnccl.so.2")
    monkeypatch.setattr(library, "_path_in_process", lambda: "/loaded/libnccl.so.2")
    assert [path for _, path in library.candidates()] == [
        "/nvidia-nccl-cu12/libnccl.so.2",
        "/nvidia-nccl-cu13/libnccl.so.2",
        "/loaded/libnccl.so.2",
        "libnccl.so.2",
    ]


def test_one_that_somebody_has_opened_is_seen(nccl: NcclLibrary) -> None:
    found = library._path_in_process()
    assert found is not None
    assert Path(found).samefile(nccl.path)


def stand_in(version: int) -> Any:
    """A library of that version, which no machine has installed."""

    def tell(room: Any) -> int:
        room[0] = version
        return 0

    return SimpleNamespace(ncclSuccess=0, ncclGetVersion=tell)


def test_too_old_says_which_version_is_needed_and_why() -> None:
    places = iter([("the system", "libnccl.so.2")])
    with pytest.raises(BackendUnavailableError) as told:
        library.open_first(ffi, places, lambda path: stand_in(21003))
    assert "is NCCL 2.10.3, too old: 2.14 is needed for ncclCommInitRankConfig" in str(told.value)


def test_a_place_that_has_none_is_passed_by_and_named() -> None:
    def open_path(path: str) -> Any:
        if path == "/missing":
            raise OSError("no such file")
        return stand_in(21801 if path == "/new" else 2708)

    places = [("wheel", "/missing"), ("loaded", "/old"), ("system", "/new")]
    assert library.open_first(ffi, iter(places), open_path).path == "/new"
    with pytest.raises(BackendUnavailableError, match=r"no such file.*NCCL 2.7.8, too old"):
        library.open_first(ffi, iter(places[:2]), open_path)


@pytest.mark.parametrize(("code", "text"), [(2708, "2.7.8"), (21403, "2.14.3"), (22707, "2.27.7")])
def test_versions_in_words(code: int, text: str) -> None:
    assert library.version_text(code) == text


def test_forms_of_dtypes_are_the_library_s_codes() -> None:
    codes = {name.removeprefix("nccl").lower(): code for code, name in enum("ncclDataType_t")}
    for name, code in codes.items():
        form = form_of(dtype_of(name), ReduceOp.SUM)
        assert (form.code, form.parts, form.widened) == (code, 1, False)
    assert form_of(np.dtype("bool"), ReduceOp.MAX).code == codes["uint8"]
    pair = form_of(np.dtype("complex128"), ReduceOp.SUM)
    assert (pair.dtype, pair.parts) == ("float64", 2)
    assert form_of(np.dtype("uint16"), ReduceOp.PROD).widened


def enum(name: str) -> list[tuple[int, str]]:
    return list(ffi.typeof(name).elements.items())


@pytest.mark.parametrize(
    ("dtype", "op", "told"),
    [
        ("complex64", ReduceOp.PROD, "no prod of complex64"),
        ("longdouble", ReduceOp.SUM, "got float"),
    ],
)
def test_what_nccl_cannot_reduce_is_a_type_error(dtype: str, op: ReduceOp, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        form_of(np.dtype(dtype), op)
