"""What ends pytagi 0.2.1's process, or is silently wrong there: here it works or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import nn
from tests.tagi.oracle import OracleDied, oracle_run

RNG = np.random.default_rng(0)

IMAGES = RNG.standard_normal((6, 1, 8, 8)).astype(np.float32)


def make(*layers: nn.BaseLayer) -> nn.Sequential:
    return nn.Sequential(*layers)


def step(net: nn.Sequential, x: Any, y: Any = None, var_x: Any = None) -> list[np.ndarray]:
    """Do a step; return all parameters, which are finite."""
    mean, _ = net(x, var_x)
    y = np.sin(np.arange(mean.size)) if y is None else y
    nn.OutputUpdater(net.device).update(net.output_z_buffer, y, 0.1, net.input_delta_z_buffer)
    net.backward()
    net.step()
    arrays = [array for entry in net.parameters() for array in entry]
    assert all(np.isfinite(array).all() for array in arrays)
    return arrays


def seeded(text: str) -> nn.Sequential:
    """Return a network with the parameters of a fixed seed."""
    fl.tagi.manual_seed(7)
    net: nn.Sequential = eval(f"Sequential({text})", dict(vars(nn)))
    return net


def equal(one: list[np.ndarray], other: list[np.ndarray], tolerance: float = 0.0) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


CNN = "Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8), ReLU(), AvgPool2d(2), Linear(64, 2)"

# What is shown to be so there, that this is a test of something.
ENDINGS = {
    "a batch larger than the first one": """
        net = Sequential(Linear(3, 4), ReLU(), Linear(4, 2))
        net(np.zeros(3 * 2, np.float32))
        net(np.zeros(3 * 20000, np.float32))
    """,
    "preinit_layer, then training a convolution": f"""
        net = Sequential({CNN.replace("AvgPool2d(2)", "AvgPool2d(2, 2)")})
        net.preinit_layer()
        net(x)
        OutputUpdater("cpu").update(net.output_z_buffer, np.zeros(12, np.float32),
                                    np.ones(12, np.float32), net.input_delta_z_buffer)
        net.backward()
        net.step()
    """,
    "the default stride of AvgPool2d": f"Sequential({CNN})(x)",
    "an activation as the first layer": "Sequential(ReLU(), Linear(3, 2))(x[:3])",
    "the statistics of a LayerNorm": """
        net = Sequential(Linear(8, 4), LayerNorm((4,)), Linear(4, 1))
        net(x)
        net.get_norm_mean_var()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDINGS)
def test_pytagi_s_process_ends_by(what: str) -> None:
    with pytest.raises(OracleDied):
        oracle_run(ENDINGS[what], x=IMAGES.ravel())


def test_batches_may_grow_behind_convolutions() -> None:
    net = seeded(CNN)
    for count in (1, 4, 6, 2):
        step(net, IMAGES[:count])


def test_layers_can_be_prepared_first() -> None:
    prepared, other = seeded(CNN), seeded(CNN)
    prepared.preinit_layer()
    equal(step(prepared, IMAGES), step(other, IMAGES))


def test_an_average_pool_s_stride_is_its_size() -> None:
    equal(
        step(seeded(CNN), IMAGES),
        step(seeded(CNN.replace("AvgPool2d(2)", "AvgPool2d(2, 2)")), IMAGES),
    )


def test_an_activation_may_be_the_first_layer() -> None:
    net = seeded("ReLU(), Linear(3, 2)")
    mean, _ = net(np.array([[-1.0, 2.0, 3.0]]))
    alone = seeded("Linear(3, 2)")
    np.testing.assert_array_equal(mean, alone(np.array([[0.0, 2.0, 3.0]]))[0])
    step(net, RNG.standard_normal((5, 3)))


def test_norms_report_their_statistics() -> None:
    net = seeded("Linear(8, 4), LayerNorm((4,)), BatchNorm2d(4), Linear(4, 1)")
    step(net, IMAGES.reshape(-1, 8))
    assert net.get_norm_mean_var()


@pytest.mark.parametrize("shape", [(8, 6), (5, 9)])
def test_images_may_be_rectangular(shape: tuple[int, int]) -> None:
    height, width = shape
    net = seeded(
        f"Conv2d(2, 3, 3, padding=1, in_width={width}, in_height={height}), MixtureReLU(), "
        f"BatchNorm2d(3), Linear({3 * height * width}, 2)"
    )
    shaped = RNG.standard_normal((4, 2, height, width))
    step(net, shaped)
    np.testing.assert_array_equal(net(shaped)[0].ravel(), net(shaped.ravel())[0])


@pytest.mark.parametrize("network", [CNN, "Linear(64, 5), Tanh(), Linear(5, 2)"])
def test_layouts_and_dtypes_do_not_matter(network: str) -> None:
    """There strides are ignored, and float64 is refused by a list of C++ signatures."""
    expected = step(seeded(network), IMAGES.copy())
    for x in (
        np.asfortranarray(IMAGES),
        IMAGES.astype(np.float64),
        np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        np.repeat(IMAGES, 2, axis=3)[..., ::2],
    ):
        equal(step(seeded(network), x), expected)


@pytest.mark.parametrize("count", [5, 7, 12, 0])
def test_a_wrong_number_of_targets_is_refused(count: int) -> None:
    net = seeded("Linear(3, 1)")
    net(np.zeros((6, 3)))
    with pytest.raises(ValueError, match=rf"expected shape \(6, 1\), .*got \({count},\)"):
        nn.OutputUpdater().update(
            net.output_z_buffer, np.zeros(count), np.ones(count), net.input_delta_z_buffer
        )


def test_deltas_below_a_norm_behind_linear_layers_are_right() -> None:
    """BatchNorm2d behind a Linear behind a convolution: as behind a Linear alone."""
    behind = seeded(
        "Conv2d(1, 2, 8, in_width=8, in_height=8), Linear(2, 3), BatchNorm2d(3), ReLU()"
    )
    alone = seeded("Linear(64, 2), Linear(2, 3), BatchNorm2d(3), ReLU()")  # the same as a matrix
    for name, entry in behind.state_dict().items():
        other = {"Conv2d.0": "Linear.0"}.get(name, name)
        alone.load_state_dict(alone.state_dict() | {other: entry})
    y = RNG.standard_normal((6, 3))
    equal(step(behind, IMAGES, y), step(alone, IMAGES, y), 1e-5)


def test_an_activation_s_output_is_its_own() -> None:
    """The wheel's LeakyReLU returns the buffer of the layer before it."""
    x = np.array([[-2.0, 3.0]])
    net = make(nn.LeakyReLU())
    mean, variance = net(x, np.ones_like(x))
    np.testing.assert_allclose(mean, [[-0.2, 3.0]], rtol=1e-6)
    np.testing.assert_allclose(variance, [[0.01, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(make(nn.Softplus())(x)[0], np.log1p(np.exp(x)), rtol=1e-6)


def test_two_activations_in_a_row_are_both_differentiated() -> None:
    """There the second one's slope takes the place of the first one's."""
    net = make(nn.LeakyReLU(), nn.LeakyReLU())
    net(np.array([[-2.0, 3.0]]), np.ones((1, 2)))
    np.testing.assert_allclose(net.output_z_buffer.jcb, [0.01, 1.0], rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_softmax_works_for_any_batch(batch: int) -> None:
    net = make(nn.Softmax())
    mean, variance = net(RNG.standard_normal((batch, 4)), np.full((batch, 4), 0.1))
    np.testing.assert_allclose(mean.sum(1), 1, rtol=1e-6)
    assert (variance > 0).all()


def test_nothing_known_and_nothing_there_is_finite() -> None:
    """Mean and variance 0 make MixtureReLU's slope NaN there, as an Embedding's padding does."""
    step(seeded("MixtureReLU(), Linear(3, 2)"), np.zeros((2, 3)), var_x=np.zeros((2, 3)))
    padded = seeded("Embedding(5, 3, 4, padding_idx=0), MixtureReLU(), Linear(12, 2)")
    step(padded, np.array([[0, 0, 1, 2], [0, 0, 0, 0]]))


def test_an_embedding_forgets_the_step_before() -> None:
    net = seeded("Embedding(5, 3, 2), Linear(6, 1)")
    once = np.array([[0, 1], [2, 3]])
    step(net, once)
    rows = net.layers[0].mu_w.reshape(5, 3).copy()
    step(net, np.array([[4, 4], [4, 4]]))
    np.testing.assert_array_equal(net.layers[0].mu_w.reshape(5, 3)[:4], rows[:4])


def test_a_window_is_recurrent() -> None:
    net = seeded("LSTM(1, 4, 3), Linear(12, 1)")
    one, other = np.array([[0.0, 0.5, 1.0]]), np.array([[9.0, 0.5, 1.0]])
    net(one)
    first = net(one)[0]
    assert not np.allclose(first, net(other)[0])
    step(net, RNG.standard_normal((6, 3)))


@pytest.mark.parametrize("norm", ["BatchNorm2d(4, bias=False)", "LayerNorm((4,), bias=False)"])
def test_norms_need_no_biases(norm: str) -> None:
    step(seeded(f"Linear(3, 4), {norm}, Linear(4, 1)"), RNG.standard_normal((6, 3)))


def test_running_statistics_are_part_of_the_state() -> None:
    x = RNG.normal(3, 2, (6, 3))
    net = seeded("Linear(3, 4), BatchNorm2d(4), Linear(4, 1)")
    other = seeded("Linear(3, 4), BatchNorm2d(4), Linear(4, 1)")
    for _ in range(3):
        step(net, x)
    other.load_state_dict(net.state_dict())
    net.eval()
    other.eval()
    equal(list(net(x)), list(other(x)))


def test_threads_change_nothing() -> None:
    """There the first batch of a BatchNorm2d counts by how many threads there are."""
    one, four = (seeded("Linear(3, 4), BatchNorm2d(4), Linear(4, 1)") for _ in range(2))
    one.set_threads(1)
    four.set_threads(4)
    x = RNG.standard_normal((6, 3))
    equal(step(one, x), step(four, x))
    equal(list(one.state_dict()["BatchNorm2d.1"]), list(four.state_dict()["BatchNorm2d.1"]))


def test_a_file_with_a_layer_norm_can_be_read_again(tmp_path: Path) -> None:
    """There it depends on the size of the last batch whether it can."""
    net = seeded("Linear(3, 4), LayerNorm((4,)), Linear(4, 1)")
    step(net, RNG.standard_normal((6, 3)))
    net.save(tmp_path / "net")
    other = seeded("Linear(3, 4), LayerNorm((4,)), Linear(4, 1)")
    other.load(tmp_path / "net")
    x = RNG.standard_normal((2, 3))
    equal(list(net(x)), list(other(x)))


def test_data_parallel_training_needs_no_gpu() -> None:
    net, alone = seeded(CNN), seeded(CNN)
    model = nn.DDPSequential(net, nn.DDPConfig(), average=False)
    expected = step(alone, IMAGES)
    mean, _ = model(IMAGES)
    y = np.sin(np.arange(mean.size))
    nn.OutputUpdater(net.device).update(model.output_z_buffer, y, 0.1, model.input_delta_z_buffer)
    model.backward()
    model.step()
    equal([array for entry in net.parameters() for array in entry], expected)
