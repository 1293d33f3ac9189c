"""Reference results from torch, which runs in another interpreter."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from tests import oracles


class Oracle(oracles.Oracle):
    """A function: ``oracle(code, grads, **arrays)`` runs ``code``, which sets ``y``, in torch.

    The code can use ``torch``, ``F`` (torch.nn.functional), ``nn`` and the arrays as tensors.
    Tensors in ``grads`` have gradients. The result contains ``y``, the arrays that the code stores
    in the dict ``more``, and the gradients of ``grads`` by name. The gradients are of the sum of y
    times fixed weights from 0.5 to 1.5, as in ``gradcheck``.
    """

    def __call__(self, code: str, grads: Sequence[str] = (), **arrays: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(code=code, grads=list(grads), arrays=arrays)
        return answer


def weights_of(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the weights of the elements of a result: the gradient to pass to ``backward``."""
    return np.linspace(0.5, 1.5, y.size).reshape(y.shape).astype(y.dtype)


def compare(
    oracle: Oracle, code: str, result: Any, leaves: dict[str, Any], rtol: float = 1e-7,
    atol: float = 0, **options: Any,
) -> None:  # fmt: skip
    """Compare ``result`` and gradients of ``leaves`` with torch's tensors of equal names."""
    arrays = {name: leaf.array for name, leaf in leaves.items()}
    expected = oracle(code, [*leaves], **arrays, **options)
    result.backward(weights_of(result.array))
    assert result.dtype == expected["y"].dtype
    np.testing.assert_allclose(result.array, expected["y"], rtol, atol)
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (expected[name] is None)
        if leaf.grad is not None:
            np.testing.assert_allclose(leaf.grad, expected[name], rtol, atol, err_msg=name)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Compute in array operations instead of the native kernels."""
    with mock.patch("flashlight_py.autograd.native._kernel", return_value=None):
        yield


def _answer(code: str, grads: list[str], arrays: dict[str, Any]) -> dict[str, Any]:
    import torch

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
    results = {"y": y, **more, **{name: tensors[name].grad for name in grads}}
    return {name: x.detach().numpy() if torch.is_tensor(x) else x for name, x in results.items()}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    oracles.answer_requests(_answer)
