"""The loop of a worker: forward passes of its share of a batch, and their backward passes."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Walk
from flashlight_py.autograd.variable import record
from flashlight_py.device import Array
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps
from flashlight_py.parallel.workers.shared_values import (
    ArrayPlace,
    Part,
    WorkerMemory,
    array_of,
    is_data,
    put_together,
    take_apart,
)
from flashlight_py.random import set_seed

# A parameter of the module (True) or an input (False), and its number.
Leaf: TypeAlias = tuple[bool, int]
# What a worker has computed: leaves, as its method says, and arrays.
ShareResult: TypeAlias = tuple[list[Any], list[Array]]


# A method of the share, for the forward pass of a number, and its last arguments.
Request: TypeAlias = tuple[str, int, tuple[Any, ...]]
# The result of a method, the leaves that it names and where its arrays lie; or where it raised, how
# and the exception as a pickle, which is empty where there can be none.
Answer: TypeAlias = tuple[list[Any], list[ArrayPlace]] | tuple[Failure, bytes]


def serve(
    link: Connection,
    fds: tuple[int, int, int],
    params: list[ArrayPlace],
    buffers: list[ArrayPlace],
    takes_output: bool,
) -> None:
    """Answer ``(request, places of arrays, module, numbers of graphs to forget)`` to the end.

    The request is None for a worker that is left idle, the module's form None where it is as
    before. An answer is a pair: what was computed, and what was printed meanwhile; that is empty
    unless this end ``takes_output``.
    """
    share = _Share(fds, params, buffers)
    while True:
        try:
            request, places, module, forgotten = link.recv()
        except (EOFError, ConnectionResetError):
            return
        for number in forgotten:
            share.graphs.pop(number, None)  # none where the forward pass raised
        if module is not None:
            share.module = module
        if request is None:
            continue
        printed = io.StringIO()
        out, err = (printed, printed) if takes_output else (sys.stdout, sys.stderr)
        with redirect_stdout(out), redirect_stderr(err):
            answer = _answer(share, request, places)
        link.send((answer, printed.getvalue()))


def _answer(share: _Share, request: Request, places: list[ArrayPlace]) -> Answer:
    method, number, arguments = request
    try:
        arrays = share.inbox.views(places)
        leaves, results = getattr(share, method)(number, arrays, *arguments)
        return leaves, share.outbox.put(results)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        pickled = b""
        with suppress(TypeError):
            pickled = dumps(error)
        return Failure.of_exception(error, time.monotonic()), pickled


class _Share:
    """This worker's side: the parameters in shared memory, and the graphs of forward passes."""

    def __init__(
        self, fds: tuple[int, int, int], params: list[ArrayPlace], buffers: list[ArrayPlace]
    ) -> None:
        model, self.inbox, self.outbox = map(WorkerMemory, fds)
        self._params = [Variable(array) for array in model.views(params)]
        for param, view in zip(self._params, model.views(buffers), strict=True):
            param.buffer = view
        model.close()
        self.module = b""
        self.graphs: dict[int, tuple[list[Part], list[Part]]] = {}

    def forward(
        self, number: int, arrays: Sequence[Array], seed: int, form: bytes
    ) -> tuple[list[list[Leaf]], list[Array]]:
        """Return the leaves on which each result depends, and the results' arrays."""
        module = put_together(self.module, self._param)
        set_seed(seed)
        # Copies: the graph needs the inputs, and the next request overwrites the inbox.
        inputs: list[Part] = [np.array(view) for view in arrays]

        def find(number: int, calc_grad: bool | None) -> Part:
            if calc_grad is not None and not isinstance(inputs[number], Variable):
                inputs[number] = Variable(array_of(inputs[number]), calc_grad)
            return inputs[number]

        given, options = put_together(form, find)
        result = module(*given, **options)
        _, results = take_apart(result, is_data)
        self.graphs[number] = inputs, results
        known = self._leaves(inputs)
        leaves = [[known[v] for v in _leaves_below(part) if v in known] for part in results]
        return leaves, [array_of(part) for part in results]

    def backward(
        self, number: int, seeds: Sequence[Array], numbers: Sequence[int]
    ) -> tuple[list[Leaf], list[Array]]:
        """Go back from the results of ``numbers``, whose gradients are ``seeds``.

        Returned are the leaves that have a gradient, inputs first, and the gradients of these;
        those of parameters are in their buffers.
        """
        inputs, results = self.graphs[number]
        leaves = self._leaves(inputs)
        for variable in leaves:
            variable.grad = None
        roots = zip([results[each] for each in numbers], seeds, strict=True)
        # One pass from all results: the root is a number that depends on each of them.
        edges: list[tuple[Variable, Any]] = [
            (root, lambda _, seed=seed: seed) for root, seed in roots if isinstance(root, Variable)
        ]
        root = record(np.zeros(()), *edges)
        if root.calc_grad:
            root.backward(retain_graph=True)  # until the parent's graph is gone
        grads = {leaf: v.grad for v, leaf in leaves.items() if v.grad is not None}
        return list(grads), [grad for (is_param, _), grad in grads.items() if not is_param]

    def _leaves(self, inputs: Sequence[Part]) -> dict[Variable, Leaf]:
        """Return what may have a gradient that the parent needs."""
        found = {part: (False, n) for n, part in enumerate(inputs) if isinstance(part, Variable)}
        return {**found, **{param: (True, n) for n, param in enumerate(self._params)}}

    def _param(self, number: int, calc_grad: bool | None) -> Variable:
        self._params[number].calc_grad = bool(calc_grad)
        return self._params[number]


def _leaves_below(result: Part) -> list[Variable]:
    """Return the leaves that a backward pass from ``result`` would reach."""
    if not isinstance(result, Variable) or not result.calc_grad:
        return []
    if result.node is None:
        return [result]
    walk = Walk(result.node, result.array, False)
    with suppress(RuntimeError):  # it has been differentiated: that is for who does so again
        walk.count([result.node], (), walk.pending)
    return [target for target in walk.pending if isinstance(target, Variable)]
