"""torch as an oracle, which lives in another interpreter: one process for a session of tests.

``python tests/nn/oracle.py`` in that interpreter reads pickled tasks from its input and answers
each by one pickle.
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


class Oracle:
    """``oracle(code, grads, **arrays)`` runs ``code`` in torch, which sets ``y``.

    The code has ``torch``, ``F`` (torch.nn.functional), ``nn`` and the arrays as tensors, those in
    ``grads`` with gradients. Returned: ``y`` under that name, every other array that the code puts
    into the dict ``more``, and the gradients of ``grads`` by their names: of the sum of y times
    fixed weights from 0.5 to 1.5, as in ``gradcheck``.
    """

    def __init__(self, python: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([python, __file__], stdin=pipe, stdout=pipe)

    def __call__(self, code: str, grads: Sequence[str] = (), **arrays: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump((code, list(grads), arrays), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise AssertionError(f"torch could not run this:\n{code}\n{answer}")
        return answer  # type: ignore[no-any-return]

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.communicate()


def weights_of(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the weights of a result's elements: the gradient to call ``backward`` with."""
    return np.linspace(0.5, 1.5, y.size).reshape(y.shape).astype(y.dtype)


def compare(
    oracle: Oracle, code: str, result: Any, leaves: dict[str, Any], rtol: float = 1e-7,
    atol: float = 0, **given: Any,
) -> None:  # fmt: skip
    """Check ``result`` and the gradients of ``leaves``, which the code in torch names as here."""
    arrays = {name: leaf.array for name, leaf in leaves.items()}
    theirs = oracle(code, [*leaves], **arrays, **given)
    result.backward(weights_of(result.array))
    assert result.dtype == theirs["y"].dtype
    np.testing.assert_allclose(result.array, theirs["y"], rtol, atol)
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (theirs[name] is None)
        if leaf.grad is not None:
            np.testing.assert_allclose(leaf.grad, theirs[name], rtol, atol, err_msg=name)


def _answer(torch: Any, code: str, grads: list[str], arrays: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: torch.tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in arrays.items()
    }
    for name in grads:
        tensors[name].requires_grad_()
    nn, more = torch.nn, {}
    names = {"torch": torch, "F": nn.functional, "nn": nn, "more": more, **tensors}
    exec(code, names)
    y = names["y"]
    if grads:
        y.backward(torch.tensor(weights_of(y.detach().numpy())))
    own = {name: tensors[name].grad for name in grads}
    found = {"y": y, **more, **own}
    return {name: x.detach().numpy() if torch.is_tensor(x) else x for name, x in found.items()}


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever torch may print
    while True:
        try:
            code, grads, arrays = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = _answer(torch, code, grads, arrays)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
