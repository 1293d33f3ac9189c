"""The oracle: the real pytagi beside this package, on the same numbers.

It runs in a process of its own, in an environment of its own (``make test-slow`` installs it), and
stays from the first comparison to the end of the session, so that one takes milliseconds. The test
is skipped, with the reason, where there is none.
"""

import atexit
import functools
import os
import socket
import subprocess
import tempfile
import textwrap
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import nn

MAIN = Path(__file__).with_name("oracle_main.py")
ROOT = MAIN.parent.parent.parent
DELTAS = ("delta_mu_w", "delta_var_w", "delta_mu_b", "delta_var_b")
STATE = ("means of weights", "variances of weights", "means of biases", "variances of biases")
WORDS = 2000  # of what a process that ends has written

Entry = tuple[np.ndarray, ...]


class OracleDied(Exception):
    """The oracle's process ended while it worked, as pytagi does in some cases."""


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


class Oracle:
    """A process that answers. One that has ended is started again for the next question."""

    def __init__(self, python: Path, libraries: str) -> None:
        self._command = [str(python), str(MAIN)]
        # Nothing of this session's: its mark, and what a test may have set for MPI.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        self._environment = kept | {"LD_LIBRARY_PATH": libraries, "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (close() does)

    def ask(self, **request: Any) -> Any:
        """Return the answer.

        Raises:
            RuntimeError: the request has raised there; holds the traceback.
            OracleDied: the process ended; holds what it has written.
        """
        if self._line is None:
            self._start()
        assert self._line is not None
        try:
            self._line.send(request)
            kind, answer = self._line.recv()
        except (EOFError, ConnectionError) as error:
            raise OracleDied(f"ended with status {self._end()}: {self._words()}") from error
        if kind == "error":
            raise RuntimeError(f"pytagi: {answer}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._line is not None:
            self._end()
        self._log.close()

    def _start(self) -> None:
        ours, its = socket.socketpair()
        self._log.truncate(0)
        self._process = subprocess.Popen(
            [*self._command, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            pass_fds=[its.fileno()],
        )
        its.close()
        self._line = Connection(ours.detach())

    def _end(self) -> int:
        """Wait for a process that has nobody to talk to; return its status."""
        assert self._line is not None
        assert self._process is not None
        self._line.close()
        self._line = None
        return self._process.wait()

    def _words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-WORDS:]


@functools.cache
def _oracle() -> Oracle | str:
    """Return the oracle, or the reason why there is none."""
    from harness.environments import PEERS, libraries_of, python_of

    peer = PEERS["pytagi"]
    python = python_of(peer, ROOT)
    if isinstance(python, str):
        return python
    oracle = Oracle(python, libraries_of(peer, python))
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
# ``var_y``; how many steps, of which the last one is returned.
OPTIONS = {"var_y": None, "idx": None, "var_x": None, "heteros": False, "steps": 1}


def oracle_step(
    network: str, x: Any, y: Any, params: dict[str, Entry] | None = None, seed: int = 0,
    **options: Any,
) -> Stepped:  # fmt: skip
    """Return what the real pytagi makes of steps on one batch, on one thread.

    Args:
        network: the expression that makes it, with the names of ``pytagi.nn``.
        x, y: as for its ``Sequential`` and ``OutputUpdater``, of any shape.
        params: what to begin with, by the names of its ``state_dict()``; None: its own.
        seed: of its own parameters.
        options: those of ``OPTIONS``.
    """
    request = {"network": network, "x": x, "y": y, "params": params, "seed": seed}
    return Stepped(**oracle().ask(**request, **(OPTIONS | options)))


def own_step(network: str, params: dict[str, Entry], x: Any, y: Any, **options: Any) -> Stepped:
    """Return what this package makes of the same steps; see :func:`oracle_step`."""
    var_y, idx, var_x, heteros, steps = (OPTIONS | options).values()
    net: nn.Sequential = eval(network, dict(vars(nn)))
    net.load_state_dict(params)
    before = net.state_dict()
    updater = nn.OutputUpdater(net.device)
    states = net.input_delta_z_buffer
    for _ in range(steps):
        mu, var = net(x, var_x)
        if heteros:
            updater.update_heteros(net.output_z_buffer, y, states)
        elif idx is None:
            updater.update(net.output_z_buffer, y, var_y, states)
        else:
            updater.update_using_indices(net.output_z_buffer, y, var_y, idx, states)
        output_deltas = np.array(states.delta_mu), np.array(states.delta_var)
        net.backward()
        deltas = {
            name: tuple(getattr(layer, which) for which in DELTAS)
            for name, layer in net.named_layers()
            if name in before
        }
        net.step()
    return Stepped(mu.ravel(), var.ravel(), output_deltas, deltas, before, net.state_dict())


def compare(
    network: str, x: Any, y: Any, var_y: Any = None, *, here: str | None = None,
    params: dict[str, Entry] | None = None, seed: int = 0, rtol: float = 1e-5, atol: float = 1e-5,
    **options: Any,
) -> tuple[Stepped, Stepped]:  # fmt: skip
    """Let both libraries do the same steps from the same parameters, and compare all they make.

    These are the moments and deltas of the outputs, the deltas of every layer's parameters, also of
    those inside blocks, and the parameters afterwards.

    Args:
        network: evaluated with the names of ``pytagi.nn`` there, of ``fl.tagi`` here.
        x, y, var_y, params, seed, options: as for :func:`oracle_step`.
        here: the expression for this package, where it differs, such as by an option.
        rtol: of an element.
        atol: of an array's largest element: sums of many numbers that nearly cancel are as exact.

    Returns:
        What the oracle has made, then what this package has.
    """
    given = {"x": x, "y": y, "var_y": var_y, **options}
    there = oracle_step(network, params=params, seed=seed, **given)
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
