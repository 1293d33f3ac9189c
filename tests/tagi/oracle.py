"""The oracle: the real pytagi beside this package, on the same numbers.

It runs in an environment of its own (``make test-slow`` installs it). The test is skipped, with the
reason, where there is none.
"""

import atexit
import functools
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from tests.oracles import ROOT, Oracle
from tests.tagi.helpers import equal
from tests.tagi.oracle_main import DELTAS, names_of, step

STATE = ("means of weights", "variances of weights", "means of biases", "variances of biases")

Entry = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Stepped:
    """What a step has made: all arrays flat, float32; those of layers by the layer's name.

    Attributes:
        mu, var: of the outputs.
        output_deltas: of their means and variances.
        deltas: delta_mu_w, delta_var_w, delta_mu_b, delta_var_b of each layer with parameters.
        before, after: the parameters.
    """

    mu: np.ndarray
    var: np.ndarray
    output_deltas: Entry
    deltas: dict[str, Entry]
    before: dict[str, Entry]
    after: dict[str, Entry]


@functools.cache
def _oracle() -> Oracle | str:
    """Return the oracle, or the reason why there is none."""
    from harness.environments import PEERS, libraries_of, python_of

    peer = PEERS["pytagi"]
    python = python_of(peer, ROOT)
    if isinstance(python, str):
        return python
    environment = {"LD_LIBRARY_PATH": libraries_of(peer, python), "OPENBLAS_NUM_THREADS": "1"}
    oracle = Oracle(python, "tests.tagi.oracle_main", **environment)
    atexit.register(oracle.close)
    return oracle


def oracle() -> Oracle:
    """Return the oracle; skip the test, with the reason, where there is none."""
    found = _oracle()
    if isinstance(found, str):
        pytest.skip(f"needs the real pytagi: {found}")
    return found


def oracle_run(program: str, **arrays: Any) -> Any:
    """Return what ``program`` leaves in ``result``, if anything, executed beside the real pytagi.

    It sees ``np``, ``pytagi``, all names of ``pytagi.nn``, and ``arrays`` by their names. What is
    returned must be a pickle of NumPy and Python's own types.
    """
    return oracle().ask(program=textwrap.dedent(program), arrays=arrays)


def equal_programs(program: str, rtol: float = 0, atol: float = 0, **given: Any) -> None:
    """Compare what ``program`` leaves in ``result`` here and beside the real pytagi."""
    space = names_of(tagi) | given
    exec(textwrap.dedent(program), space)
    equal(space["result"], oracle_run(program, **given), rtol, atol)


def run_both(program: str, **given: Any) -> tuple[Any, Any]:
    """Return what ``program`` leaves in ``result``, here and beside the real pytagi.

    The first part is the parameters that the program begins with: here they are those of pytagi.
    ``{load}`` in the program is whether to load ``parameters``.
    """
    parameters, *real = oracle_run(program.format(load=False), **given)
    space = {**vars(nn), "np": np, **given, "parameters": parameters}
    exec(program.format(load=True), space)
    return space["result"][1:], real


# What a step may have beside a network and its batch: ``var_y``, ``idx`` and ``var_x`` as for
# ``Sequential`` and ``OutputUpdater``; whether to call ``update_heteros``, of which there is no
# ``var_y``; how many steps, of which the last one is returned; the seed of its own parameters.
OPTIONS = {"var_y": None, "idx": None, "var_x": None, "heteros": False, "steps": 1, "seed": 0}


def oracle_step(
    network: str, x: Any, y: Any, params: dict[str, Entry] | None = None, **options: Any
) -> Stepped:
    """Return what the real pytagi makes of steps on one batch, on one thread.

    Args:
        network: the expression that makes it, with the names of ``pytagi.nn``.
        x, y: as for its ``Sequential`` and ``OutputUpdater``, of any shape.
        params: what to begin with, by the names of its ``state_dict()``; None: its own.
        options: those of ``OPTIONS``.
    """
    request = OPTIONS | {"network": network, "x": x, "y": y, "params": params} | options
    if request["idx"] is not None:
        request["idx"] = np.asarray(request["idx"], np.int32)
    return Stepped(**oracle().ask(**request))


def own_step(network: str, params: dict[str, Entry], x: Any, y: Any, **options: Any) -> Stepped:
    """Return what this package makes of the same steps; see :func:`oracle_step`."""
    request = {"network": network, "x": x, "y": y, "params": params}
    return Stepped(**step(tagi, OPTIONS | request | options))


def compare(
    network: str, x: Any, y: Any, var_y: Any = None, *, here: str | None = None,
    params: dict[str, Entry] | None = None, rtol: float = 1e-5, atol: float = 1e-5, **options: Any,
) -> tuple[Stepped, Stepped]:  # fmt: skip
    """Let both libraries do the same steps from the same parameters, and compare all they make.

    These are the moments and deltas of the outputs, the deltas of every layer's parameters, also of
    those inside blocks, and the parameters afterwards.

    Args:
        network: evaluated with the names of ``pytagi.nn`` there, of ``fl.tagi`` here.
        x, y, var_y, params, options: as for :func:`oracle_step`.
        here: the expression for this package, where it differs, such as by an option.
        rtol: of an element.
        atol: of an array's largest element: sums of many numbers that nearly cancel are as exact.

    Returns:
        What the oracle has made, then what this package has.
    """
    given = {"x": x, "y": y, "var_y": var_y, **options}
    there = oracle_step(network, params=params, **given)
    ours = own_step(here or network, there.before, **given)
    close = functools.partial(assert_close, rtol=rtol, atol=atol)
    close("output means", ours.mu, there.mu)
    close("output variances", ours.var, there.var)
    close("deltas of output means", ours.output_deltas[0], there.output_deltas[0])
    close("deltas of output variances", ours.output_deltas[1], there.output_deltas[1])
    assert set(ours.after) == set(there.after)
    for name in sorted(there.after):
        for which, own, real in zip(DELTAS, ours.deltas[name], there.deltas[name], strict=True):
            close(f"{name}: {which}", own, real)
        # This package's entries go on with running statistics, which pytagi's lack.
        for number, real in enumerate(there.after[name]):
            close(f"{name}: {STATE[number]} after", ours.after[name][number], real)
    return there, ours


def assert_close(what: str, own: np.ndarray, real: np.ndarray, rtol: float, atol: float) -> None:
    """Compare with the tolerances of :func:`compare`; the message says what differs."""
    largest = np.abs(real).max(initial=0)
    np.testing.assert_allclose(own, real, rtol, atol * largest, err_msg=what)
