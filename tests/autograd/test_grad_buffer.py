"""Gradients in memory that somebody else owns, such as a bucket."""

from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import functions as F
from flashlight_py.autograd import input, param
from tests.autograd.cases import ones


def test_gradient_is_the_buffer_and_ends_up_in_the_larger_array() -> None:
    bucket = np.full(9, np.nan, "float32")
    w, b = param(ones(3, 2)), param(ones(3))
    w.grad_buffer, b.grad_buffer = bucket[:6].reshape(3, 2), bucket[6:]
    F.sum(F.linear(input(ones(2, 2)), w, b)).backward()
    assert w.grad is w.grad_buffer
    assert b.grad is b.grad_buffer
    np.testing.assert_array_equal(bucket, [2] * 9)


def test_next_pass_overwrites_after_zero_grad_and_adds_without() -> None:
    x = param(ones(2))
    buffer = x.grad_buffer = np.full(2, 7, "float32")
    for expected in (1, 2):
        F.sum(x).backward()
        np.testing.assert_array_equal(buffer, [expected] * 2)
    x.zero_grad()
    F.sum(x).backward()
    np.testing.assert_array_equal(buffer, [1, 1])


def test_shared_weight_adds_in_place() -> None:
    w, same = (param(np.array([[1.0, 2.0], [3.0, 5.0]])) for _ in range(2))
    w.grad_buffer = np.empty((2, 2))
    for weight in (w, same):
        F.sum(F.linear(F.linear(input(np.ones((3, 2))), weight), weight)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, same.grad)


def test_gradient_assigned_before_is_carried_into_the_buffer() -> None:
    x = param(ones(2))
    x.grad_buffer = np.empty(2, "float32")
    held = x.grad = np.array([1, 2], "float32")
    F.sum(x).backward()
    assert x.grad is x.grad_buffer
    np.testing.assert_array_equal(x.grad, [2, 3])
    np.testing.assert_array_equal(held, [1, 2])


def test_strided_buffer_and_other_dtypes_of_the_graph() -> None:
    w = param(ones(3, 2))
    w.grad_buffer = np.empty((2, 3), "float32").T
    F.sum(F.linear(input(ones(1, 2)), w)).backward()
    np.testing.assert_array_equal(w.grad, ones(3, 2))
    w.grad, w.grad_buffer = None, np.empty((3, 2), "float32")
    F.sum(F.linear(input(ones(1, 2, dtype="float64")), w)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, ones(3, 2))


def test_without_dimensions() -> None:
    x = param(np.array(3.0))
    x.grad_buffer = np.empty(())
    (x * x * x).backward()
    assert x.grad is x.grad_buffer
    assert x.grad == 27.0


def test_matrix_product_writes_into_it_without_a_temporary() -> None:
    """The product's own output is the buffer: no second array of the weight's size exists."""
    w = param(ones(3, 2))
    buffer = w.grad_buffer = np.zeros((3, 2), "float32")
    result = F.linear(input(ones(1, 2)), w)
    _, vjp = result.node.edges[0]
    assert vjp(ones(1, 3)) is buffer


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (np.empty(3, "float32"), ValueError),
        (np.empty(2, "float64"), TypeError),
        ([0.0, 0.0], TypeError),
        (np.broadcast_to(np.float32(0), 2), ValueError),
    ],
)
def test_wrong_buffer_is_refused(buffer: Any, error: type[Exception]) -> None:
    x = param(ones(2))
    with pytest.raises(error):
        x.grad_buffer = buffer
    assert x.grad_buffer is None


def test_results_have_none() -> None:
    with pytest.raises(ValueError, match="leaf"):
        (param(ones(2)) * 2.0).grad_buffer = ones(2)
