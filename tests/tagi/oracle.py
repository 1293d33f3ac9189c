"""The oracle: the real pytagi in a process, for comparisons on the same numbers.

It runs in a separate environment (``make test-slow`` installs it). Without it, tests are skipped.
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
    """Results of a step: flat float32 arrays, for layers by the name of the layer.

    Attributes:
        mu, var: Moments of the outputs.
        output_deltas: Deltas of their means and variances.
        deltas: delta_mu_w, delta_var_w, delta_mu_b, delta_var_b of each layer with parameters.
        before, after: The parameters.
    """

    mu: np.ndarray
    var: np.ndarray
    output_deltas: Entry
    deltas: dict[str, Entry]
    before: dict[str, Entry]
    after: dict[str, Entry]


@functools.cache
def _oracle() -> Oracle | str:
    """Return the oracle, or the reason why it is missing."""
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
    """Return the oracle, or skip the test with the reason."""
    oracle_or_reason = _oracle()
    if isinstance(oracle_or_reason, str):
        pytest.skip(f"needs the real pytagi: {oracle_or_reason}")
    return oracle_or_reason


def oracle_run(program: str, **arrays: Any) -> Any:
    """Run ``program`` with the real pytagi and return its variable ``result``, or None.

    The program can use ``np``, ``pytagi``, all names of ``pytagi.nn``, and ``arrays``. The result
    must be a pickle of NumPy and Python types.
    """
    return oracle().ask(program=textwrap.dedent(program), arrays=arrays)


def equal_programs(program: str, rtol: float = 0, atol: float = 0, **arrays: Any) -> None:
    """Run ``program`` with both libraries and compare the variable ``result``."""
    space = names_of(tagi) | arrays
    exec(textwrap.dedent(program), space)
    equal(space["result"], oracle_run(program, **arrays), rtol, atol)


def run_both(program: str, **arrays: Any) -> tuple[Any, Any]:
    """Run ``program`` with both libraries and return both values of ``result``.

    The first element of the result is the initial parameters, which this package takes from pytagi.
    ``{load}`` in the program is whether to load ``parameters``.
    """
    parameters, *real = oracle_run(program.format(load=False), **arrays)
    space = {**vars(nn), "np": np, **arrays, "parameters": parameters}
    exec(program.format(load=True), space)
    return space["result"][1:], real


# Options of a step: ``var_y``, ``idx`` and ``var_x`` of ``Sequential`` and ``OutputUpdater``;
# whether to call ``update_heteros``, which has no ``var_y``; the number of steps, of which the last
# is returned; and the seed of the parameters.
OPTIONS = {"var_y": None, "idx": None, "var_x": None, "heteros": False, "steps": 1, "seed": 0}


def oracle_step(
    network: str, x: Any, y: Any, params: dict[str, Entry] | None = None, **options: Any
) -> Stepped:
    """Return the results of the real pytagi for steps on one batch and one thread.

    Args:
        network: Expression that creates the network, with the names of ``pytagi.nn``.
        x, y: Arguments of its ``Sequential`` and ``OutputUpdater``, of any shape.
        params: Initial parameters by the names of ``state_dict()``. None: its own.
        options: Options in ``OPTIONS``.
    """
    request = OPTIONS | {"network": network, "x": x, "y": y, "params": params} | options
    if request["idx"] is not None:
        request["idx"] = np.asarray(request["idx"], np.int32)
    return Stepped(**oracle().ask(**request))


def own_step(network: str, params: dict[str, Entry], x: Any, y: Any, **options: Any) -> Stepped:
    """Return the results of this package for the same steps; see :func:`oracle_step`."""
    request = {"network": network, "x": x, "y": y, "params": params}
    return Stepped(**step(tagi, OPTIONS | request | options))


def compare(
    network: str, x: Any, y: Any, var_y: Any = None, *, own_network: str | None = None,
    params: dict[str, Entry] | None = None, rtol: float = 1e-5, atol: float = 1e-5, **options: Any,
) -> tuple[Stepped, Stepped]:  # fmt: skip
    """Run the same steps with both libraries and compare all results.

    The results are moments and deltas of the outputs, deltas of all parameters, including blocks,
    and the final parameters.

    Args:
        network: Expression with the names of ``pytagi.nn`` and ``fl.tagi``.
        x, y, var_y, params, options: See :func:`oracle_step`.
        here: Expression for this package, if it differs.
        rtol: Tolerance relative to an element.
        atol: Tolerance relative to the largest element of an array, for sums that nearly cancel.

    Returns:
        The results of the oracle and of this package.
    """
    arguments = {"x": x, "y": y, "var_y": var_y, **options}
    reference = oracle_step(network, params=params, **arguments)
    ours = own_step(own_network or network, reference.before, **arguments)
    close = functools.partial(assert_close, rtol=rtol, atol=atol)
    close("output means", ours.mu, reference.mu)
    close("output variances", ours.var, reference.var)
    close("deltas of output means", ours.output_deltas[0], reference.output_deltas[0])
    close("deltas of output variances", ours.output_deltas[1], reference.output_deltas[1])
    assert set(ours.after) == set(reference.after)
    for name in sorted(reference.after):
        for which, actual, expected in zip(
            DELTAS, ours.deltas[name], reference.deltas[name], strict=True
        ):
            close(f"{name}: {which}", actual, expected)
        # Entries of this package also have running statistics, unlike pytagi's.
        for number, expected in enumerate(reference.after[name]):
            close(f"{name}: {STATE[number]} after", ours.after[name][number], expected)
    return reference, ours


def assert_close(
    name: str, actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float
) -> None:
    """Compare with the tolerances of :func:`compare`; the message names the array."""
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(actual, expected, rtol, atol * largest, err_msg=name)
