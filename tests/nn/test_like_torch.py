"""Layers and losses compared with torch; normalization, attention, states and training modes."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks
from tests.nn.oracle import Oracle, weights_of, without_kernels
from tests.nn.oracle import compare as compare_with_torch
from tests.tables import for_each
from tests.tape.steps import compare, training

F = fl.autograd.functions
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((2, 4, 6))
PROBABILITIES = RANDOM.random((4, 6))
SEQUENCES, IMAGES = RANDOM.standard_normal((3, 5, 4)), RANDOM.standard_normal((2, 3, 4, 4))
BATCH = RANDOM.standard_normal((2, 6, 3, 40)) + 10
LAST = np.ascontiguousarray(RANDOM.standard_normal((3, 5, 7, 6))).transpose(0, 3, 1, 2)
INDICES, LABELS = RANDOM.integers(0, 7, (3, 5)), np.array([2, -1, 0, 5])
SPOKEN = np.array([[1, 1, 2], [3, 2, 1], [2, 2, 2]])


class Row(NamedTuple):
    """A module from ``make(dtype)`` and ``torch_code``, a torch expression for the same module.

    ``inputs`` are the arguments of the module. ``after`` is applied to its result.
    """

    name: str
    make: Callable[[], fl.nn.Module]
    torch_code: str
    inputs: tuple[np.ndarray, ...]
    after: Callable[[Any], Any] = lambda y: y
    after_torch: str = ""


def rnn(kind: str, **options: Any) -> Row:
    torch_name = {"tanh": "RNN", "gru": "GRU", "lstm": "LSTM"}[kind]
    torch_options = {"num_layers" if name == "layers" else name: x for name, x in options.items()}
    return Row(
        f"rnn_{kind}_{len(options)}",
        lambda: fl.nn.RNN(kind, 4, 3, **options),
        f"nn.{torch_name}(4, 3, batch_first=True, **{torch_options})",
        (SEQUENCES,),
        lambda y: F.concatenate([F.flat(x) for x in (y[0], *(y[1] if kind == "lstm" else y[1:]))]),
        "y = torch.cat([x.flatten() for x in (y[0], *(y[1] if len(y[1]) == 2 and "
        f"{kind == 'lstm'} else y[1:]))])",
    )


ROWS = [
    Row("linear", lambda: fl.nn.Linear(6, 3), "nn.Linear(6, 3)", (X,)),
    Row("linear_without", lambda: fl.nn.Linear(6, 3, False), "nn.Linear(6, 3, False)", (X,)),
    Row("relu", fl.nn.ReLU, "nn.ReLU()", (X,)),
    Row("tanh", fl.nn.Tanh, "nn.Tanh()", (X,)),
    Row("sigmoid", fl.nn.Sigmoid, "nn.Sigmoid()", (X,)),
    Row("log_softmax", fl.nn.LogSoftmax, "nn.LogSoftmax(-1)", (X,)),
    Row("log_softmax_first", lambda: fl.nn.LogSoftmax(0), "nn.LogSoftmax(0)", (X,)),
    Row("view", lambda: fl.nn.View([-1]), "nn.Flatten(0)", (X,)),
    Row("gelu", fl.nn.GELU, "nn.GELU()", (X,)),
    Row("gelu_none", lambda: fl.nn.GELU("none"), "nn.GELU('none')", (X,)),
    Row("gelu_tanh", lambda: fl.nn.GELU("tanh"), "nn.GELU('tanh')", (X,)),
    Row("softplus", lambda: fl.nn.Softplus(2), "nn.Softplus(2)", (X,)),
    Row("softmax", lambda: fl.nn.Softmax(0), "nn.Softmax(0)", (X,)),
    Row("upsample", lambda: fl.nn.Upsample((3, 2)), "nn.Upsample(scale_factor=(3, 2))", (IMAGES,)),
    *(
        Row(
            f"bilinear_{number}",
            lambda scale=scale: fl.nn.Upsample(scale, "bilinear"),
            f"nn.Upsample(scale_factor={scale}, mode='bilinear')",
            (LAST,),
        )
        for number, scale in enumerate([(1, 2), (3, 5)])
    ),
    Row("conv1d", lambda: fl.nn.Conv1D(6, 4, 3, 2, 1, 2, 2), "nn.Conv1d(6, 4, 3, 2, 1, 2, 2)",
        (BATCH[:, :, 0],)),
    Row("conv1d_same", lambda: fl.nn.Conv1D(6, 4, 5, padding="same", bias=False),
        "nn.Conv1d(6, 4, 5, padding='same', bias=False)", (BATCH[:, :, 0],)),
    *(
        Row(
            f"conv_transpose_{number}",
            lambda options=options: fl.nn.ConvTranspose2D(6, 4, *options),
            f"nn.ConvTranspose2d(6, 4, *{options})",
            (LAST,),
        )
        for number, options in enumerate(
            [(3,), (3, 2, 1, 1), ((2, 4), (2, 3), 1, (1, 0), 2, False, 2)]
        )
    ),
    Row("huber", lambda: fl.nn.HuberLoss(delta=0.7), "nn.HuberLoss(delta=0.7)", (X, Y)),
    Row("huber_none", lambda: fl.nn.HuberLoss("none"), "nn.HuberLoss('none')", (X, Y)),
    *(
        Row(
            f"divergence_{ours}",
            lambda ours=ours: fl.nn.KLDivergence(ours),
            f"lambda p, t: nn.KLDivLoss(reduction={torch_code!r})(p, t){after}",
            (X, PROBABILITIES + 0.1),
        )
        for ours, torch_code, after in [
            ("mean", "batchmean", ""),
            ("sum", "sum", ""),
            ("none", "none", ".sum(-1)"),
        ]
    ),
    Row("silu", fl.nn.SiLU, "nn.SiLU()", (X,)),
    Row("elu", lambda: fl.nn.ELU(0.5), "nn.ELU(0.5)", (X,)),
    Row("leaky_relu", lambda: fl.nn.LeakyReLU(0.2), "nn.LeakyReLU(0.2)", (X,)),
    Row("hard_tanh", lambda: fl.nn.HardTanh(-1, 0.5), "nn.Hardtanh(-1, 0.5)", (X,)),
    Row("prelu", fl.nn.PReLU, "nn.PReLU()", (X,)),
    Row("prelu_images", lambda: fl.nn.PReLU(3, 0.1), "nn.PReLU(3, 0.1)", (IMAGES,)),
    Row("glu", lambda: fl.nn.GatedLinearUnit(1), "nn.GLU(1)", (IMAGES.transpose(0, 2, 1, 3),)),
    Row("embedding", lambda: fl.nn.Embedding(7, 3), "nn.Embedding(7, 3)", (INDICES,)),
    Row("embedding_padded", lambda: fl.nn.Embedding(7, 3, -2), "nn.Embedding(7, 3, -2)",
        (INDICES,)),
    rnn("tanh"),
    rnn("gru"),
    rnn("lstm"),
    rnn("tanh", layers=2, bidirectional=True),
    rnn("gru", layers=2, bidirectional=True),
    rnn("lstm", layers=2, bidirectional=True),
    Row("layer_norm", lambda: fl.nn.LayerNorm(4), "nn.LayerNorm(4)", (SEQUENCES,)),
    Row("layer_norm_2", lambda: fl.nn.LayerNorm((5, 4)), "nn.LayerNorm((5, 4))", (SEQUENCES,)),
    Row("layer_norm_without", lambda: fl.nn.LayerNorm(6, 1e-3, False),
        "nn.LayerNorm(6, 1e-3, bias=False)", (X,)),
    Row("rms_norm", lambda: fl.nn.RMSNorm(4), "nn.RMSNorm(4, 1e-5)", (SEQUENCES,)),
    Row("group_norm", lambda: fl.nn.GroupNorm(3, 6), "nn.GroupNorm(3, 6)", (BATCH,)),
    Row("group_norm_last", lambda: fl.nn.GroupNorm(2, 6), "nn.GroupNorm(2, 6)", (LAST,)),
    Row("group_norm_flat", lambda: fl.nn.GroupNorm(2, 6), "nn.GroupNorm(2, 6)", (X,)),
    Row("batch_norm", lambda: fl.nn.BatchNorm(6), "nn.BatchNorm2d(6)", (BATCH,)),
    Row("batch_norm_last", lambda: fl.nn.BatchNorm(6), "nn.BatchNorm2d(6)", (LAST,)),
    Row("batch_norm_flat", lambda: fl.nn.BatchNorm(6), "nn.BatchNorm1d(6)", (X,)),
    Row("batch_norm_given", lambda: fl.nn.BatchNorm(6, affine=False, eps=0.5).eval(),
        "nn.BatchNorm2d(6, 0.5, affine=False).eval()", (LAST,)),
    *(
        Row(
            f"transformer_{norm}_{activation}",
            lambda norm=norm, activation=activation: fl.nn.Transformer(
                4, 2, 7, 2, activation=activation, norm=norm
            ),
            "nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 7, 0.0, "
            f"{activation!r}, batch_first=True, norm_first={norm == 'pre'}), 2, "
            "enable_nested_tensor=False)",
            (SEQUENCES,),
        )
        for norm, activation in (("pre", "gelu"), ("post", "relu"))
    ),
    Row("mean_absolute_error", fl.nn.MeanAbsoluteError, "nn.L1Loss()", (X, Y)),
    Row("binary", fl.nn.BinaryCrossEntropy, "nn.BCELoss()", (PROBABILITIES, PROBABILITIES[::-1])),
    Row("binary_sum", lambda: fl.nn.BinaryCrossEntropy("sum"), "nn.BCELoss(reduction='sum')",
        (PROBABILITIES / 2 + 0.2, PROBABILITIES[::-1])),
    Row(
        "smoothed",
        lambda: fl.nn.CategoricalCrossEntropy(label_smoothing=0.1),
        "nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)",
        (np.log(PROBABILITIES / PROBABILITIES.sum(1, keepdims=True)), LABELS),
    ),
    Row("entropy_none", lambda: fl.nn.CategoricalCrossEntropy("none"),
        "nn.CrossEntropyLoss(reduction='none', ignore_index=-1)", (X, LABELS)),
    Row("entropy_sum", lambda: fl.nn.CategoricalCrossEntropy("sum", ignore_index=5),
        "nn.CrossEntropyLoss(reduction='sum', ignore_index=5)", (X, abs(LABELS))),
    Row(
        "temporal",
        lambda: fl.nn.ConnectionistTemporalClassification(reduction="sum"),
        "lambda x, s: F.ctc_loss(x.transpose(0, 1).log_softmax(-1), s, (5, 5, 5), (3, 3, 3), "
        "reduction='sum')",
        (SEQUENCES, SPOKEN),
    ),
]  # fmt: skip
ROWS_BY_NAME = for_each("row", ROWS)


def call(row: Row, module: fl.nn.Module, inputs: Any) -> Any:
    if row.name in ("temporal", "smoothed", "entropy_none", "entropy_sum"):
        # torch applies log_softmax in this loss, flashlight_py does not.
        inputs = F.log_softmax(inputs[0]), inputs[1]
    return row.after(module(*inputs))


def variables_of(row: Row, dtype: Any) -> list[fl.Variable]:
    is_float = [array.dtype.kind == "f" for array in row.inputs]
    return [
        fl.param(array.astype(dtype)) if floating else fl.input(array)
        for array, floating in zip(row.inputs, is_float, strict=True)
    ]


def made(row: Row, dtype: Any) -> fl.nn.Module:
    fl.set_seed(0)
    return row.make().astype(dtype)


@for_each("dtype", ["float32", "float64"])
@ROWS_BY_NAME
def test_layers_have_values_and_gradients_of_torch(row: Row, dtype: str, oracle: Oracle) -> None:
    module, inputs = made(row, dtype), variables_of(row, dtype)
    result = call(row, module, inputs)
    named = dict(zip("abcd", inputs, strict=False))
    parameters = {name.replace(".", "_"): v for name, v in module.named_params().items()}
    leaves = {**parameters, **{name: x for name, x in named.items() if x.calc_grad}}
    code = f"layer, given = {row.torch_code}, ({', '.join(named)},)\n"
    if "norm" in row.name:
        code += "layer.to(a.dtype)\n"  # its buffers
    if parameters:
        items = [f"{name!r}: {name.replace('.', '_')}" for name in module.named_params()]
        code += f"own = {{{', '.join(items)}}}\n"
        code += "y = torch.func.functional_call(layer, own, given)\n"
    else:
        code += "y = layer(*given)\n"
    constants = {name: x.array for name, x in named.items() if not x.calc_grad}
    tolerance = (1e-10, 1e-12) if dtype == "float64" else (1e-4, 1e-5)
    compare_with_torch(oracle, code + row.after_torch, result, leaves, *tolerance, **constants)


@ROWS_BY_NAME
def test_float16_is_computed_in_float32(row: Row) -> None:
    results = []
    for dtype in ("float16", "float32"):
        module = made(row, "float16").astype(dtype)
        inputs = variables_of(row, "float16")
        for variable in inputs:
            if variable.calc_grad:
                variable.data = variable.data.astype(dtype)
        result = call(row, module, inputs)
        assert repr(module).startswith(f"{type(module).__name__}(")
        assert result.dtype == dtype
        result.backward(weights_of(result.array))
        leaves = [v for v in (*inputs, *module.params()) if v.calc_grad]
        assert all(v.grad is not None and v.grad.dtype == dtype for v in leaves)
        results.append([result.array, *(v.grad for v in leaves)])
    for half, single in zip(*results, strict=True):
        most = 0.1 if "transformer" in row.name else 1e-2  # errors of many functions add up
        np.testing.assert_allclose(half, single, rtol=1e-2, atol=most)


@ROWS_BY_NAME
def test_captured_step_has_the_bits_of_an_eager_step(row: Row) -> None:
    def make() -> Any:
        module, variables = made(row, "float32"), variables_of(row, "float32")
        params = [*module.params(), *(v for v in variables if v.calc_grad)]

        def loss_of(factor: np.ndarray) -> Any:
            operands = [v * fl.input(factor) if v.calc_grad else v for v in variables]
            return F.sum(call(row, module, operands)) * 1.5

        return training(fl.optim.SGDOptimizer(params, 1e-4), loss_of), module, params

    compare(make, [np.asarray(1 - k / 1000, "float32") for k in range(5)])


def test_residual_adds_the_input_or_a_shortcut() -> None:
    body, past = fl.nn.Linear(6, 6), fl.nn.Linear(6, 6)
    x = fl.input(X.astype("float32"))
    np.testing.assert_array_equal(fl.nn.Residual(body)(x).array, body(x).array + x.array)
    both = fl.nn.Residual(body, past)
    np.testing.assert_array_equal(both(x).array, body(x).array + past(x).array)
    assert list(both.named_params())[::2] == ["module.weight", "shortcut.weight"]
    assert fl.nn.Identity()(x) is x


def test_rnn_continues_from_a_returned_state() -> None:
    for kind in ("lstm", "gru", "tanh"):
        module = fl.nn.RNN(kind, 4, 3, layers=2).astype("f8")
        outputs, state = module(fl.input(SEQUENCES))
        first, between = module(fl.input(SEQUENCES[:, :2]))
        second, end = module.forward(fl.input(SEQUENCES[:, 2:]), between)
        parts = np.concatenate([first.array, second.array], 1)
        np.testing.assert_allclose(parts, outputs.array, rtol=1e-12)
        for one, other in zip(state, end, strict=True):
            np.testing.assert_allclose(one.array, other.array, rtol=1e-12)


def test_rnn_dropout_acts_only_in_training() -> None:
    fl.set_seed(0)
    module = fl.nn.RNN("gru", 4, 3, layers=2, dropout=0.5).astype("f8")
    x = fl.input(SEQUENCES)
    assert (module(x)[0].array != module(x)[0].array).any()
    module.eval()
    np.testing.assert_array_equal(module(x)[0].array, module(x)[0].array)


@for_each("zero", [False, True])
def test_ctc_loss_is_infinite_without_an_alignment(zero: bool, oracle: Oracle) -> None:
    logs = fl.param(np.log(np.full((2, 3, 4), 0.25)))
    labels = np.array([[1, 1], [1, 2]])  # a row needs a blank between labels
    times = np.array([2, 3])
    loss = F.connectionist_temporal_classification(logs, labels, times, None, 0, "none", zero)
    options = f"(2, 3), (2, 2), reduction='none', zero_infinity={zero}"
    expected = oracle(f"y = F.ctc_loss(a.transpose(0, 1), s, {options})", a=logs.array, s=labels)
    np.testing.assert_allclose(loss.array, expected["y"])
    assert np.isinf(loss.array[0]) != zero
    loss.backward(np.ones(2))
    assert not logs.grad[0].any()
    assert logs.grad[1].any()


def test_binary_cross_entropy_limits_logarithms_to_100(oracle: Oracle) -> None:
    p, target = fl.param(np.array([0.0, 1, 0, 1, 0.3])), np.array([0.0, 1, 1, 0, 0.5])
    loss = F.binary_cross_entropy(p, target, "none")
    code = "y = F.binary_cross_entropy(a, t, reduction='none')"
    compare_with_torch(oracle, code, loss, {"a": p}, t=target)


@for_each("function", [F.erf, F.gelu, F.silu, F.elu, F.log1p])
def test_activations_of_extremes_are_finite(function: Callable[..., Any], oracle: Oracle) -> None:
    ends = np.array([0.0, -0.0, 1e-30, 30.0, 700.0])
    ends = ends if function is F.log1p else np.concatenate([ends, -ends])
    name = function.__name__
    expected = oracle(
        f"y = getattr(F, {name!r}, None) or getattr(torch, {name!r})\ny = y(a)", a=ends
    )
    np.testing.assert_allclose(function(ends).array, expected["y"], rtol=1e-14, atol=1e-15)


ONES, FLAT = np.ones((2, 3)), np.ones(3)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    r"where: condition must have dtype bool, got float64": (
        lambda: F.where(ONES, fl.param(ONES), 0.0), TypeError),
    r"gather: indices must be integers, got float64": (lambda: F.gather(ONES, ONES, 0), TypeError),
    r"gather: expected indices of 0..2 .* shape \(3,\), got index 3 in .* shape \(1,\)": (
        lambda: F.gather(FLAT, np.array([3]), 0), IndexError),
    r"gather: .* shape \(2, 3\) except along axis 0, got \(1, 4\)": (
        lambda: F.gather(ONES, np.zeros((1, 4), int), 0), ValueError),
    r"scatter_add: expected a source .* \(2,\), got \(3,\)": (
        lambda: F.scatter_add(FLAT, np.zeros(2, int), FLAT, 0), ValueError),
    r"embedding: .* 0..1 .* index -1": (lambda: F.embedding(ONES, np.array(-1)), IndexError),
    r"embedding: .* 0..6 for .* shape \(7, 2\), got index 7 in .* shape \(1,\)": (
        lambda: fl.nn.Embedding(7, 2)(fl.input(np.array([7]))), IndexError),
    r"embedding: .* index 9223372036854775808 in": (
        lambda: F.embedding(ONES, np.array([2**63], "u8")), IndexError),
    r"embedding: expected a weight \[rows, dim\], got \(3,\)": (
        lambda: F.embedding(FLAT, np.zeros(1, int)), ValueError),
    r"topk: .* got k=4, axis=-1, .*\(2, 3\)": (lambda: F.topk(ONES, 4), ValueError),
    r"stack: expected variables of one shape, got \[\]": (lambda: F.stack([]), ValueError),
    r"stack: expected .*\(2, 3\), \(3,\)": (lambda: F.stack([ONES, FLAT]), ValueError),
    r"got 'average'": (lambda: fl.nn.CategoricalCrossEntropy("average"), ValueError),
    r"HuberLoss: delta must be above 0, got 0": (lambda: fl.nn.HuberLoss(delta=0), ValueError),
    r"Conv1D: kernel must be an integer, got float": (lambda: fl.nn.Conv1D(1, 1, 1.5), TypeError),
    r"Upsample: mode must be .* got 'cubic'": (lambda: fl.nn.Upsample(2, "cubic"), ValueError),
    r"Upsample: expected x of shape .* got \(3,\)": (lambda: fl.nn.Upsample()(FLAT), ValueError),
    r"Conv1D: stride must be at least 1, got 0": (lambda: fl.nn.Conv1D(1, 1, 1, 0), ValueError),
    r"Conv1D: padding must be at least 0, got -1": (
        lambda: fl.nn.Conv1D(1, 1, 1, 1, -1), ValueError),
    r"Conv1D: padding must be an integer, got tuple": (
        lambda: fl.nn.Conv1D(1, 1, 1, 1, (1, 1)), TypeError),
    r"Conv1D: padding='same' must .*, got stride 2, kernel 3 and dilation 1": (
        lambda: fl.nn.Conv1D(1, 1, 3, 2, "same"), ValueError),
    r"Conv1D: expected x of shape \[batch, 3, time\] .* got \(2, 3\)": (
        lambda: fl.nn.Conv1D(3, 1, 1)(ONES), ValueError),
    r"Conv1D: expected x .* with batch > 0 and time >= 3, got \(1, 2, 3\)": (
        lambda: fl.nn.Conv1D(3, 1, 5, padding=1)(ONES[None]), ValueError),
    r"Conv1D: .* time >= 1, got \(0, 2, 3\)": (
        lambda: fl.nn.Conv1D(2, 1, 1, padding=3)(np.ones((0, 2, 3))), ValueError),
    r"Conv1D: .* time >= 4, got \(1, 2, 3\)": (
        lambda: fl.nn.Conv1D(2, 1, 4)(ONES[None]), ValueError),
    r"ConvTranspose2D: output_padding must be below .* got \(1, 1\)": (
        lambda: fl.nn.ConvTranspose2D(1, 1, 1, output_padding=1), ValueError),
    r"ConvTranspose2D: expected x of shape \[batch, 3, .* got \(2, 3\)": (
        lambda: fl.nn.ConvTranspose2D(3, 1, 1)(ONES), ValueError),
    r"pad: mode must be .* got 'mean'": (lambda: F.pad(ONES, 1, "mean"), ValueError),
    r"std: expected more than ddof = 3 elements, got 3": (
        lambda: F.std(ONES, 1, ddof=3), ValueError),
    r"axis must name .* 2-D array, got 2": (lambda: F.flip(ONES, 2), ValueError),
    r"axis must name .* 4-D array, got \(0, 0\)": (lambda: F.expand_dims(ONES, (0, 0)), ValueError),
    r"split: .* 3, size of axis 1, got 2": (lambda: F.split(ONES, 2, 1), ValueError),
    r"split: .* 3, size of axis 1, got \[4, -1\]": (
        lambda: F.split(ONES, [4, -1], 1), ValueError),
    r"norm: p must be at least 1, got 0": (lambda: F.norm(ONES, 0), ValueError),
    r"einsum: 'i,j' does not fit .* 1 terms, got 2": (lambda: F.einsum("i,j", ONES), ValueError),
    r"einsum: .* 'j' must .* got 3 and 2": (lambda: F.einsum("ij,jk", ONES, ONES), ValueError),
    r"einsum: .* 'i' must have one letter per dim": (lambda: F.einsum("i", ONES), ValueError),
    r"einsum: .* distinct letters .* got 'ik'": (lambda: F.einsum("ij->ik", ONES), ValueError),
    r"glu: expected an even size .* got shape \(2, 3\)": (lambda: F.glu(ONES), ValueError),
    r"prelu: .* weight of shape \(3,\) or \(1,\) .* got \(2,\)": (
        lambda: F.prelu(ONES, FLAT[:2]), ValueError),
    r"hardtanh: lower must be below .* 1 and 0": (lambda: F.hardtanh(ONES, 1, 0), ValueError),
    r"mean_absolute_error: .* prediction's shape \(2, 3\), got \(3,\)": (
        lambda: F.mean_absolute_error(ONES, FLAT), ValueError),
    r"binary_cross_entropy: probabilities .* 0 to 1 \(pass sigmoid.* got 2.0": (
        lambda: F.binary_cross_entropy(np.array([1.0, 2]), np.zeros(2)), ValueError),
    r"binary_cross_entropy: probabilities .* diverged\), got nan": (
        lambda: F.binary_cross_entropy(np.array([0.5, np.nan]), np.zeros(2)), ValueError),
    r"binary_cross_entropy: targets of shape \(2,\) must be 0 to 1 .* got 7.0": (
        lambda: F.binary_cross_entropy(np.ones(2), np.array([1.0, 7])), ValueError),
    r"label_smoothing must be 0 to 1, got 2": (
        lambda: fl.nn.CategoricalCrossEntropy(label_smoothing=2), ValueError),
    r"classification: targets .* 0..3 and not 0 .* \(1, 1\) .* \(1, 2, 4\) with target 0": (
        lambda: F.connectionist_temporal_classification(np.ones((1, 2, 4)), np.array([[0]])),
        ValueError),
    r"target lengths must be 0 to 1, got 2": (
        lambda: F.connectionist_temporal_classification(
            np.ones((1, 2, 4)), np.array([[1]]), None, np.array([2])), ValueError),
    r"expected targets \[batch, longest\] of shape \(1, longest\) .* got \(2, 1\)": (
        lambda: F.connectionist_temporal_classification(np.ones((1, 2, 4)), np.ones((2, 1), int)),
        ValueError),
    r"expected log probabilities \[batch, time, classes\], .* got shape \(0, 2, 4\)": (
        lambda: F.connectionist_temporal_classification(np.ones((0, 2, 4)), np.ones((0, 1), int)),
        ValueError),
    r"ratio must be at least 0 and below 1, got 1": (lambda: fl.nn.Dropout(1), ValueError),
    r"in_features must be .* got 0": (lambda: fl.nn.Linear(0, 1), ValueError),
    r"out_features must be .* got -1": (lambda: fl.nn.Linear(1, -1), ValueError),
    r"RNN: kind must be one of tanh, gru, lstm, got 'relu'": (
        lambda: fl.nn.RNN("relu", 1, 1), ValueError),
    r"RNN: hidden_size must be at least 1, got 0": (lambda: fl.nn.RNN("gru", 1, 0), ValueError),
    r"RNN: expected \[batch, time, 4\], got \(\)": (
        lambda: fl.nn.RNN("gru", 4, 2)(fl.input(np.ones(())), ONES), ValueError),
    r"RNN: expected \[batch, time, 4\], got \(3, 4\)": (
        lambda: fl.nn.RNN("gru", 4, 2)(fl.input(np.ones((3, 4)))), ValueError),
    r"not empty, .* got shape \(0, 3, 4\)": (
        lambda: fl.nn.RNN("gru", 4, 2)(fl.input(np.ones((0, 3, 4)))), ValueError),
    r"RNN: expected 2 state\(s\) of shape \(1, 3, 2\)": (
        lambda: fl.nn.RNN("lstm", 4, 2)(fl.input(SEQUENCES), (ONES, ONES)), ValueError),
    r"Embedding: n must be an integer, got float": (lambda: fl.nn.Embedding(1.0, 2), TypeError),
    r"Embedding: padding_idx must be in .* got 2": (lambda: fl.nn.Embedding(2, 2, 2), ValueError),
    r"Residual: expected a Module, got ABCMeta": (lambda: fl.nn.Residual(fl.nn.ReLU), TypeError),
    r"Residual: .* for input \(2, 3\), got \(2, 1\) and \(2, 3\)": (
        lambda: fl.nn.Residual(fl.nn.Linear(3, 1))(fl.input(ONES)), ValueError),
}  # fmt: skip


@for_each("layer", [
        fl.nn.BatchNorm(2), fl.nn.GroupNorm(1, 2), fl.nn.MultiheadAttention(2, 1),
        fl.nn.RNN("gru", 2, 2), fl.nn.PositionEmbedding(2, 2), fl.nn.Transformer(2, 1),
        fl.nn.PReLU(2), fl.nn.Linear(2, 2), fl.nn.Conv2D(2, 2, 1), fl.nn.LayerNorm(2),
        fl.nn.Conv1D(2, 2, 1), fl.nn.Upsample(), fl.nn.Upsample(mode="bilinear"),
        fl.nn.ReLU(), fl.nn.Tanh(), fl.nn.Sigmoid(), fl.nn.LogSoftmax(), fl.nn.Dropout(),
        fl.nn.View((-1,)), fl.nn.Sequential(fl.nn.Linear(2, 2), fl.nn.Dropout()),
    ])  # fmt: skip
def test_layers_accept_arrays_and_reject_lists(layer: Any) -> None:
    with pytest.raises(TypeError, match=r"got list. Convert it with numpy.asarray"):
        layer([[[1.0, 2.0]]])
    x = np.ones((2, 2, 2, 2) if type(layer) is fl.nn.Conv2D else (2, 2, 2), "float32")
    layer(x)
    layer.eval()(x)


@for_each(
    "criterion targets",
    [(fl.nn.CategoricalCrossEntropy(), np.arange(4)), (fl.nn.MeanSquaredError(), Y)],
)
def test_losses_accept_arrays(criterion: Any, targets: np.ndarray) -> None:
    x = F.log_softmax(fl.param(X))
    expected = criterion(x, fl.input(targets)).array
    np.testing.assert_array_equal(criterion(x, targets).array, expected)


EMPTY: dict[str, Callable[..., Any]] = {
    "prelu: (0, 4, 8)": fl.nn.PReLU(),
    "embedding: (0, 4, 8)": lambda x: fl.nn.Embedding(3, 2)(fl.input(x.array.astype(int))),
    "layer_norm: (0, 4, 8)": fl.nn.LayerNorm(8),
    "rms_norm: (0, 4, 8)": fl.nn.RMSNorm(8),
    "group_norm: (0, 4, 8)": fl.nn.GroupNorm(2, 4),
    "batch_norm: (0, 4, 8)": fl.nn.BatchNorm(4).eval(),
    "self_attention: (0, 4, 24)": fl.nn.MultiheadAttention(8, 2),
    "attention: (0, 2, 4, 4), (0, 2, 4, 4)": lambda x: fl.nn.MultiheadAttention(8, 2)(x, x, x),
    "layer_norm:  (0, 4, 8)": fl.nn.Transformer(8, 2),
    "PositionEmbedding: (0, 4, 8)": fl.nn.PositionEmbedding(4, 8),
    "recurrent: (0, 4, 8)": fl.nn.RNN("lstm", 8, 2),
    "conv2d: (0, 4, 8, 1)": lambda x: fl.nn.Conv2D(4, 4, 1)(F.reshape(x, (0, 4, 8, 1))),
    "pool2d: (0, 4, 8, 1)": lambda x: fl.nn.Pool2D(1)(F.reshape(x, (0, 4, 8, 1))),
    "mean_squared_error: (0, 4, 8), (0, 4, 8)": lambda x: fl.nn.MeanSquaredError()(x, x),
    "mean_absolute_error: (0, 4, 8), (0, 4, 8)": lambda x: fl.nn.MeanAbsoluteError("sum")(x, x),
    "binary_cross_entropy: (0, 4, 8), (0, 4, 8)": lambda x: fl.nn.BinaryCrossEntropy("none")(x, x),
    "categorical_cross_entropy: (0, 4, 8)": (
        lambda x: fl.nn.CategoricalCrossEntropy()(x, fl.input(np.zeros((0, 4), int)))),
    "connectionist_temporal_classification: (0, 4, 8)": (
        lambda x: fl.nn.ConnectionistTemporalClassification()(x, np.ones((0, 2), int))),
}  # fmt: skip


@for_each("context", [nullcontext, without_kernels])
@for_each("words", EMPTY)
def test_layers_raise_value_error_for_empty_batches(words: str, context: Any) -> None:
    name, shape = words.split(": ")
    match = f"^{name}: .*{re.escape(shape.strip())}"
    with context(), pytest.raises(ValueError, match=match):
        EMPTY[words](fl.input(np.ones((0, 4, 8), np.float32)))


@for_each("words", ERRORS)
def test_errors_name_the_layer_and_the_shapes(words: str) -> None:
    call, error = ERRORS[words]
    with pytest.raises(error, match=words):
        call()


BATCHES = RANDOM.standard_normal((3, 5, 4, 3, 2)) * 2 + 3
QUERIES, MEMORY = RANDOM.standard_normal((2, 6, 8)), RANDOM.standard_normal((2, 9, 8))


def test_running_statistics_equal_torch(oracle: Oracle) -> None:
    layer = fl.nn.BatchNorm(4, 0.2).astype("float64")
    buffers = layer.buffers
    for batch in BATCHES:
        layer(fl.input(batch))
    assert buffers["running_mean"] is layer.running_mean  # updated in place
    in_evaluation = layer.eval()(fl.input(BATCHES[0]))
    code = "layer = nn.BatchNorm2d(4, momentum=0.2).double()\nfor x in a: layer(x)\n"
    code += "more.update(layer.state_dict())\ny = layer.eval()(a[0])"
    expected = oracle(code, a=BATCHES)
    np.testing.assert_allclose(in_evaluation.array, expected["y"], rtol=1e-12)
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    for name, array in layer.state_dict().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12)
    before = layer.running_mean.copy()
    layer(fl.input(BATCHES[1]))
    np.testing.assert_array_equal(layer.running_mean, before)


def test_batch_norm_without_statistics_uses_the_batch() -> None:
    layer = fl.nn.BatchNorm(4, affine=False, track_statistics=False)
    assert not layer.state_dict()
    x = fl.input(BATCHES[0])
    np.testing.assert_array_equal(layer(x).array, layer.eval()(x).array)


@for_each("kind", ["self", "masked", "cross", "cross_masked", "memory"])
def test_multihead_attention_equals_torch(kind: str, oracle: Oracle) -> None:
    fl.set_seed(1)
    layer = fl.nn.MultiheadAttention(8, 2).astype("float64")
    layer.in_proj_bias.data[:] = RANDOM.standard_normal(24)
    q, k = fl.param(QUERIES), fl.param(MEMORY)
    cross = kind in ("cross", "cross_masked", "memory")
    keys = 9 if cross else 6
    may = np.arange(6 * keys).reshape(6, keys) % 3 > 0
    inputs: list[Any] = [q] if not cross else [q, k, k if kind == "memory" else k * 2]
    result = layer(*inputs, *([may] if "masked" in kind else []))
    code = "layer = nn.MultiheadAttention(8, 2, batch_first=True).double()\n"
    code += "own = {n: p for n, p in zip(dict(layer.named_parameters()), (w, b, ow, ob))}\n"
    arguments = "q, q, q" if not cross else ("q, k, k" if kind == "memory" else "q, k, k * 2")
    code += f"y = torch.func.functional_call(layer, own, ({arguments}), dict(need_weights=False"
    code += f"{', attn_mask=~may' if 'masked' in kind else ''}))[0]"
    leaves = dict(zip(("w", "b", "ow", "ob", "q", "k"), (*layer.params(), q, k), strict=True))
    compare_with_torch(oracle, code, result, leaves, 1e-9, 1e-11, may=may)


def test_torch_states_load_by_name(oracle: Oracle) -> None:
    code = """
torch.manual_seed(0)
one = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
net = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).double()
more.update(net.state_dict())
y = net(a, mask=nn.Transformer.generate_square_subsequent_mask(6).double(), is_causal=True)"""
    other = oracle(code, a=QUERIES)
    net = fl.nn.Transformer(8, 2, layers=2, causal=True).astype("float64")
    expected = other.pop("y")
    net.load_state_dict(other)
    np.testing.assert_allclose(net(fl.input(QUERIES)).array, expected, rtol=1e-10, atol=1e-12)


def test_causal_attention_ignores_later_positions() -> None:
    net = fl.nn.Transformer(8, 2, layers=2, causal=True).eval()
    changed = QUERIES.copy()
    changed[:, 4:] += 1
    one, other = (net(fl.input(x.astype("float32"))).array for x in (QUERIES, changed))
    np.testing.assert_array_equal(one[:, :4], other[:, :4])
    assert (one[:, 4:] != other[:, 4:]).any()


MODELS: dict[str, tuple[Callable[[], fl.nn.Module], np.ndarray]] = {
    "transformer": (
        lambda: fl.nn.Transformer(8, 2, layers=2, dropout=0.3, causal=True),
        QUERIES.astype("float32"),
    ),
    "batch_norm": (
        lambda: fl.nn.Sequential(fl.nn.BatchNorm(4), fl.nn.Tanh(), fl.nn.GroupNorm(2, 4)),
        BATCHES[0].astype("float32"),
    ),
    "positions": (lambda: fl.nn.PositionEmbedding(7, 8), QUERIES.astype("float32")),
}


@for_each("name", MODELS)
def test_captured_and_recomputed_steps_have_the_same_bits(name: str) -> None:
    def make(change: Callable[[Any], Any] = lambda module: module) -> Any:
        fl.set_seed(3)
        module = change(MODELS[name][0]())
        optimizer = fl.optim.SGDOptimizer(module.params(), 0.01)
        return training(optimizer, lambda x: F.sum(F.sin(module(fl.input(x))))), module

    batches = [MODELS[name][1] * np.float32(1 + k / 10) for k in range(5)]
    compare(make, batches)
    results = []
    for change in (lambda module: module, fl.recompute):
        step, module = make(change)
        fl.set_seed(5)
        results.append([*[step(x) for x in batches], module.state_dict()])
    for name_, array in results[0][-1].items():
        np.testing.assert_array_equal(array, results[1][-1][name_])


def test_sinusoidal_embedding_adds_sines() -> None:
    layer = fl.nn.SinusoidalPositionEmbedding(7, 8)
    added = layer(fl.input(np.zeros((1, 7, 8), "float32"))).array[0]
    angles = np.arange(7)[:, None] / 10_000 ** (np.arange(4) / 4)
    np.testing.assert_allclose(added[:, ::2], np.sin(angles), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(added[:, 1::2], np.cos(angles), rtol=1e-5, atol=1e-6)


@on_ranks(("shm", 2))
def test_batch_norm_raises_value_error_for_one_value_over_ranks(rank: int, size: int) -> None:
    layer = fl.nn.BatchNorm(4, sync=True)
    with pytest.raises(ValueError, match="expected more than one value per channel"):
        layer(fl.input(np.ones((int(rank == 0), 4), np.float32)))
    assert fl.all_reduce(layer.running_var)[0] == size


@pytest.mark.parametrize("first", [0, 1, 2])
@on_ranks(("shm", 2))
def test_batch_norm_uses_the_global_batch(rank: int, size: int, first: int) -> None:
    rows, results = slice(first, 5) if rank else slice(0, first), []
    for sync in (False, True):
        layer = fl.nn.BatchNorm(4, sync=sync).astype("float64")
        selected = rows if sync else slice(None)
        x = fl.param(BATCHES[0][selected])
        y = layer(x)
        y.backward(weights_of(BATCHES[0])[selected])
        grads = [fl.all_reduce(v.grad) if sync else v.grad for v in layer.params()]
        parts = (y.array, x.grad) if sync else (y.array[rows], x.grad[rows])
        results.append([*parts, *grads, layer.running_mean, layer.running_var])
    for alone, together in zip(*results, strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-10, atol=1e-12)
