"""Table of all differentiable functions, with inputs and the same function in torch.

``ours`` takes variables. ``torch_code`` is a torch expression of ``F`` (torch.nn.functional), the
tensors a, b, c in the order of ``arrays``, and the names in ``extra``. The inputs keep a distance
from kinks and poles, where neither central differences nor slopes are comparable.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.sequences import GATES


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    torch_code: str
    arrays: tuple[np.ndarray, ...]
    extra: dict[str, Any] = {}  # noqa: RUF012 - of a NamedTuple


_random = np.random.default_rng(0)


def signed(*shape: int) -> np.ndarray:
    """Return values of both signs. Their magnitudes differ by 0.1 or more, also from 0."""
    size = int(np.prod(shape))
    values = 0.1 + np.arange(1, size + 1) / size
    return (_random.permutation(values) * _random.choice([-1, 1], size)).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return np.abs(signed(*shape))


def ones(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


A, B, ROW, COLUMN, SCALAR = signed(3, 4), signed(3, 4), signed(4), signed(3, 1), signed()
P, Q = positive(3, 4), positive(3, 4)
CUBE = signed(2, 3, 4)
LABELS = np.array([2, 0, -1, 1])
PICKS = np.array([[0, 2, 0], [1, 2, 2]])
ROWS = np.array([0, 2, 2, 1])


def cross_entropy(reduction: str, smoothing: float = 0.0) -> Case:
    options = f"reduction={reduction!r}, ignore_index=-1, label_smoothing={smoothing}"
    return Case(
        f"categorical_cross_entropy_{reduction}_{smoothing}",
        lambda x: F.categorical_cross_entropy(F.log_softmax(x), LABELS, reduction, -1, smoothing),
        f"F.cross_entropy(a, labels, {options})",
        (signed(4, 3),),
        {"labels": LABELS},
    )


SPOKEN = np.array([[1, 1, 2], [3, 2, 0], [1, 3, 2], [0, 0, 0]])  # labels with two equal neighbours
TIMES, SAID = np.array([6, 4, 5, 2]), np.array([3, 2, 3, 0])


def temporal(reduction: str, blank: int = 0) -> Case:
    spoken = SPOKEN - 4 * (SPOKEN == 0) if not blank else SPOKEN - 1
    options = f"{blank}, {reduction!r}"
    return Case(
        f"connectionist_temporal_classification_{reduction}",
        lambda x: F.connectionist_temporal_classification(
            F.log_softmax(x), spoken, TIMES, SAID, blank, reduction
        ),
        f"F.ctc_loss(a.transpose(0, 1).log_softmax(-1), spoken, times, said, {options})",
        (3 * signed(4, 6, 4),),
        {"spoken": abs(spoken), "times": TIMES, "said": SAID},
    )


def einsum(subscripts: str, *arrays: np.ndarray) -> Case:
    torch_code = f"torch.einsum({subscripts!r}, {', '.join('abcd'[: len(arrays)])})"
    return Case(f"einsum_{subscripts}", lambda *v: F.einsum(subscripts, *v), torch_code, arrays)


def recurrent(kind: str, module: str, reverse: bool, states: int) -> Case:
    rows = 2 * GATES[kind]
    shapes = (2, 4, 3), (rows, 3), (rows, 2), (rows,), (rows,), *[(2, 2)] * states

    def ours(x: Any, *args: Any) -> Any:
        out, *last = F.recurrent(kind, x, args[:4], args[4:], reverse)
        return F.concatenate([out, *[F.reshape(state, (2, 1, 2)) for state in last]], 1)

    code = f"""a, None
layer = nn.{module}(3, 2, batch_first=True)
first = [x[None] for x in (f, g)[:{states}]]
flipped = a.flip(1) if {reverse} else a
state = None if not first else tuple(first) if {kind == "lstm"} else first[0]
names = "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"
out, last = torch.func.functional_call(layer, dict(zip(names, (b, c, d, e))), (flipped, state))
last = last if isinstance(last, tuple) else (last,)
y = torch.cat([out.flip(1) if {reverse} else out, *[x[0][:, None] for x in last]], 1)"""
    arrays = tuple(signed(*shape) for shape in shapes)
    return Case(f"recurrent_{kind}_{reverse}", ours, code, arrays, dict.fromkeys("fg"[states:]))


_ATTENTION = "F.scaled_dot_product_attention"
QKV = signed(2, 2, 3, 4), signed(2, 2, 5, 4), signed(2, 2, 5, 3)
MAY = np.arange(15).reshape(1, 3, 5) % 4 > 0

CASES = [
    Case("conv2d", F.conv2d, "F.conv2d(a, b, c)",
        (signed(2, 3, 4, 5), signed(4, 3, 2, 3), signed(4))),
    Case("pool2d", lambda x: F.pool2d(x, 2), "F.max_pool2d(a, 2)", (signed(2, 3, 4, 5),)),
    Case("negative", F.negative, "-a", (A,)),
    Case("add", F.add, "a + b", (A, B)),
    Case("add_row", F.add, "a + b", (A, ROW)),
    Case("sub", F.sub, "a - b", (A, B)),
    Case("sub_column", F.sub, "a - b", (COLUMN, A)),
    Case("mul", F.mul, "a * b", (A, B)),
    Case("mul_scalar", F.mul, "a * b", (SCALAR, A)),
    Case("mul_outer", F.mul, "a * b", (COLUMN, ROW)),
    Case("div", F.div, "a / b", (A, B)),
    Case("div_row", F.div, "a / b", (ROW, A)),
    Case("pow", F.pow, "a**b", (P, B)),
    Case("pow_number", lambda x: x**3, "a**3", (A,)),
    Case("maximum", F.maximum, "torch.maximum(a, b)", (A, B)),
    Case("maximum_row", F.maximum, "torch.maximum(a, b)", (A, ROW)),
    Case("minimum", F.minimum, "torch.minimum(a, b)", (A, B)),
    Case("exp", F.exp, "torch.exp(a)", (A,)),
    Case("log", F.log, "torch.log(a)", (P,)),
    Case("sqrt", F.sqrt, "torch.sqrt(a)", (P,)),
    Case("sin", F.sin, "torch.sin(a)", (A,)),
    Case("cos", F.cos, "torch.cos(a)", (A,)),
    Case("tanh", F.tanh, "torch.tanh(a)", (A,)),
    Case("sigmoid", F.sigmoid, "torch.sigmoid(a)", (A,)),
    Case("relu", F.relu, "torch.relu(a)", (A,)),
    Case("abs", F.abs, "torch.abs(a)", (A,)),
    Case("clamp", lambda x: F.clamp(x, -0.55, 0.55), "torch.clamp(a, -0.55, 0.55)", (A,)),
    Case("clamp_below", lambda x: F.clamp(x, -0.55), "torch.clamp(a, -0.55)", (A,)),
    Case("clamp_above", lambda x: F.clamp(x, upper=0.55), "a.clamp(max=0.55)", (A,)),
    Case("sum", F.sum, "a.sum()", (CUBE,)),
    Case("sum_axis", lambda x: F.sum(x, 1), "a.sum(1)", (CUBE,)),
    Case("sum_axes", lambda x: F.sum(x, (0, -1)), "a.sum((0, -1))", (CUBE,)),
    Case("sum_keep", lambda x: F.sum(x, -1, True), "a.sum(-1, True)", (CUBE,)),
    Case("mean", F.mean, "a.mean()", (CUBE,)),
    Case("mean_axes", lambda x: F.mean(x, (0, 2)), "a.mean((0, 2))", (CUBE,)),
    Case("var", F.var, "a.var(correction=0)", (CUBE,)),
    Case("var_axis", lambda x: F.var(x, 1, ddof=1), "a.var(1)", (CUBE,)),
    Case("std", F.std, "a.std(correction=0)", (CUBE,)),
    Case("std_axes", lambda x: F.std(x, (0, -1), True, 1), "a.std((0, 2), keepdim=True)", (CUBE,)),
    Case("prod", F.prod, "a.prod()", (CUBE,)),
    Case("prod_axes", lambda x: F.prod(x, (0, 2)), "a.prod(2).prod(0)", (CUBE,)),
    Case("prod_zeros", lambda x: F.prod(x, 1), "a.prod(1)", (A * (A > 0),)),
    Case("logsumexp", F.logsumexp, "a.logsumexp((0, 1, 2))", (CUBE,)),
    Case("logsumexp_axis", lambda x: F.logsumexp(x, 1, True), "a.logsumexp(1, True)", (CUBE,)),
    Case("squeeze", F.squeeze, "a.squeeze()", (COLUMN,)),
    Case("squeeze_axis", lambda x: F.squeeze(x, -1), "a.squeeze(-1)", (COLUMN,)),
    Case("expand_dims", lambda x: F.expand_dims(x, (0, -1)), "a[None, ..., None]", (A,)),
    Case("flip", F.flip, "a.flip(0, 1, 2)", (CUBE,)),
    Case("flip_axis", lambda x: F.flip(x, -2), "a.flip(1)", (CUBE,)),
    Case("sort", F.sort, "a.sort().values", (CUBE,)),
    Case("sort_axis", lambda x: F.sort(x, 1), "a.sort(1).values", (CUBE,)),
    Case("pad", lambda x: F.pad(x, ((1, 0), (2, 3))), "F.pad(a, (2, 3, 1, 0))", (A,)),
    Case("pad_reflect", lambda x: F.pad(x, ((0, 0), (0, 0), (3, 1)), "reflect"),
        "F.pad(a, (3, 1), mode='reflect')", (CUBE,)),
    Case("softplus", lambda x: F.softplus(x, 2.0), "F.softplus(a, 2, 100)", (5 * A,)),
    Case("max", F.max, "a.amax()", (CUBE,)),
    Case("max_axis", lambda x: F.max(x, 1), "a.amax(1)", (CUBE,)),
    Case("max_keep", lambda x: F.max(x, 1, True), "a.amax(1, True)", (CUBE,)),
    Case("min_axes", lambda x: F.min(x, (0, 2)), "a.amin((0, 2))", (CUBE,)),
    Case("matmul", F.matmul, "a @ b", (A, signed(4, 2))),
    Case("matmul_batched", F.matmul, "a @ b", (CUBE, signed(2, 4, 2))),
    Case("matmul_broadcast", F.matmul, "a @ b", (CUBE, signed(4, 2))),
    Case("matmul_row", F.matmul, "a @ b", (ROW, signed(2, 4, 3))),
    Case("matmul_column", F.matmul, "a @ b", (CUBE, ROW)),
    Case("matmul_inner", F.matmul, "a @ b", (ROW, signed(4))),
    Case("reshape", lambda x: F.reshape(x, (4, -1)), "a.reshape(4, -1)", (A,)),
    Case("moddims", lambda x: F.moddims(x, (2, 6)), "a.reshape(2, 6)", (A,)),
    Case("flat", F.flat, "a.reshape(-1)", (A,)),
    Case("transpose", F.transpose, "a.permute(2, 1, 0)", (CUBE,)),
    Case("transpose_axes", lambda x: F.transpose(x, (1, -1, 0)), "a.permute(1, 2, 0)", (CUBE,)),
    Case("concatenate", lambda *v: F.concatenate(v), "torch.cat([a, b, c])", (A, B, signed(1, 4))),
    Case("concatenate_axis", lambda *v: F.concatenate(v, -1), "torch.cat([a, b], -1)", (A, COLUMN)),
    Case("index", lambda x: x[1:, ..., 2], "a[1:, ..., 2]", (CUBE,)),
    Case("index_new", lambda x: x[None, -1], "a[None, -1]", (CUBE,)),
    Case("index_repeated", lambda x: x[ROWS], "a[rows]", (A,), {"rows": ROWS}),
    Case("index_pairs", lambda x: x[ROWS, ROWS], "a[rows, rows]", (A,), {"rows": ROWS}),
    Case("index_mask", lambda x: x[A > 0], "a[mask]", (A,), {"mask": A > 0}),
    Case("clip", lambda x: F.clip(x, -0.55, 0.55), "a.clip(-0.55, 0.55)", (A,)),
    Case("log1p", F.log1p, "torch.log1p(a)", (P,)),
    Case("erf", F.erf, "torch.erf(a)", (9 * A,)),
    Case("gelu", F.gelu, "F.gelu(a)", (5 * A,)),
    Case("gelu_tanh", lambda x: F.gelu(x, True), "F.gelu(a, approximate='tanh')", (5 * A,)),
    Case("silu", F.silu, "F.silu(a)", (5 * A,)),
    Case("elu", lambda x: F.elu(x, 1.5), "F.elu(a, 1.5)", (A,)),
    Case("leaky_relu", F.leaky_relu, "F.leaky_relu(a)", (A,)),
    Case("hardtanh", F.hardtanh, "F.hardtanh(a)", (1.7 * A,)),
    Case("prelu", F.prelu, "F.prelu(a, b)", (CUBE, positive(3))),
    Case("prelu_one", F.prelu, "F.prelu(a, b)", (ROW, positive(1))),
    Case("glu", F.glu, "F.glu(a)", (A,)),
    Case("glu_axis", lambda x: F.glu(x, 0), "F.glu(a, 0)", (CUBE,)),
    Case("where", lambda x, y: F.where(A > B, x, y), "torch.where(m, a, b)", (A, ROW),
        {"m": A > B}),
    Case("gather", lambda x: F.gather(x, PICKS, 1), "a.gather(1, i)", (A,), {"i": PICKS}),
    Case("gather_first", lambda x: F.gather(x, PICKS, 0), "a.gather(0, i)", (A,), {"i": PICKS}),
    Case("scatter_add", lambda x, y: F.scatter_add(x, PICKS, y, -1), "a.scatter_add(1, i, b)",
        (A, signed(2, 3)), {"i": PICKS}),
    Case("embedding", lambda x: F.embedding(x, PICKS), "F.embedding(i, a)", (A,), {"i": PICKS}),
    Case("topk", lambda x: F.topk(x, 2)[0], "a.topk(2)[0]", (CUBE,)),
    Case("topk_axis", lambda x: F.topk(x, 2, 1)[0], "a.topk(2, 1)[0]", (CUBE,)),
    Case("stack", lambda *v: F.stack(v), "torch.stack([a, b])", (A, B)),
    Case("stack_axis", lambda *v: F.stack(v, -1), "torch.stack([a, b], -1)", (A, B)),
    Case("split", lambda x: F.split(x, 2, 1)[1], "a.split(2, 1)[1]", (A,)),
    Case("split_sizes", lambda x: F.concatenate(F.split(x, [1, 0, 3], -1)[::-1], -1),
        "torch.cat(a.split([1, 0, 3], -1)[::-1], -1)", (A,)),
    Case("tile", lambda x: F.tile(x, (2, 3)), "a.tile(2, 3)", (CUBE,)),
    Case("tile_new", lambda x: F.tile(x, (2, 1, 3)), "a.tile(2, 1, 3)", (A,)),
    Case("norm", F.norm, "torch.linalg.vector_norm(a)", (CUBE,)),
    Case("norm_one", lambda x: F.norm(x, 1, (0, -1)), "torch.linalg.vector_norm(a, 1, (0, 2))",
        (CUBE,)),
    Case("norm_three", lambda x: F.norm(x, 3, 1), "torch.linalg.vector_norm(a, 3, 1)", (CUBE,)),
    Case("norm_largest", lambda x: F.norm(x, np.inf, 1, True),
        "torch.linalg.vector_norm(a, torch.inf, 1, True)", (CUBE,)),
    Case("cumsum", lambda x: F.cumsum(x, 1), "a.cumsum(1)", (CUBE,)),
    einsum("ij,ij->", A, B),
    einsum("ij,kj->ik", A, B),
    einsum("bij,bjk", CUBE, signed(2, 4, 2)),
    einsum("ij->j", A),
    einsum("ii->i", signed(3, 3)),
    einsum("ii", signed(3, 3)),
    einsum("iij,jk->ki", signed(2, 2, 3), A),
    einsum("...ij,...jk->...ik", CUBE, signed(4, 2)),
    einsum("i...,i...->...", signed(3, 2, 1), A.reshape(3, 1, 4)),
    einsum("ij,jk,kl,m->il", A, signed(4, 2), signed(2, 3), signed(2)),
    einsum("k,ij->kji", signed(2), COLUMN),
    Case("softmax", F.softmax, "a.softmax(-1)", (A,)),
    Case("softmax_axis", lambda x: F.softmax(x, 1), "a.softmax(1)", (CUBE,)),
    Case("log_softmax", F.log_softmax, "a.log_softmax(-1)", (A,)),
    Case("log_softmax_axis", lambda x: F.log_softmax(x, 0), "a.log_softmax(0)", (A,)),
    Case("linear", F.linear, "F.linear(a, b)", (A, B)),
    Case("linear_bias", F.linear, "F.linear(a, b, c)", (A, signed(2, 4), signed(2))),
    Case("linear_relu", F.linear_relu, "torch.relu(F.linear(a, b, c))",
        (A, signed(2, 4), signed(2))),
    Case("linear_relu_vector", F.linear_relu, "torch.relu(F.linear(a, b, c))",
        (ROW, signed(2, 4), signed(2))),
    Case("linear_one_row", F.linear, "F.linear(a, b, c)", (signed(1, 4), signed(2, 4), signed(2))),
    Case("linear_vector", F.linear, "F.linear(a, b, c)", (ROW, signed(2, 4), signed(2))),
    Case("linear_batched", F.linear, "F.linear(a, b, c)", (CUBE, signed(2, 4), signed(2))),
    Case("mean_squared_error", F.mean_squared_error, "F.mse_loss(a, b)", (A, B)),
    recurrent("tanh", "RNN", False, 0),
    recurrent("tanh", "RNN", True, 1),
    recurrent("gru", "GRU", False, 1),
    recurrent("gru", "GRU", True, 0),
    recurrent("lstm", "LSTM", False, 2),
    recurrent("lstm", "LSTM", True, 0),
    *[cross_entropy(reduction) for reduction in ("mean", "sum", "none")],
    *[cross_entropy(reduction, 0.3) for reduction in ("mean", "none")],
    temporal("mean"),
    temporal("sum", blank=3),
    temporal("none"),
    *[
        Case(
            f"{ours}_{reduction}",
            partial(getattr(F, ours), reduction=reduction),
            f"F.{torch_code}(a, b, reduction={reduction!r})",
            arrays,
        )
        for reduction in ("mean", "sum", "none")
        for ours, torch_code, arrays in (
            ("mean_absolute_error", "l1_loss", (A, B)),
            ("binary_cross_entropy_with_logits", "binary_cross_entropy_with_logits", (5 * A, Q)),
        )
    ],
    Case("layer_norm", F.layer_norm, "F.layer_norm(a, (4,), b, c)", (CUBE, ROW, ROW + 1)),
    Case("layer_norm_of_two", F.layer_norm, "F.layer_norm(a, (3, 4), b, c)", (CUBE, A, B)),
    Case("layer_norm_plain", lambda x: F.layer_norm(x, dimensions=2), "F.layer_norm(a, (3, 4))",
        (CUBE,)),
    Case("rms_norm", F.rms_norm, "F.rms_norm(a, (4,), b, 1e-5)", (CUBE, ROW)),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "F.group_norm(a, 2, b, c)",
        (signed(2, 4, 3), ROW, ROW + 1)),
    Case("batch_norm", F.batch_norm, "F.batch_norm(a, None, None, b, c, True)",
        (signed(3, 4), ROW, ROW + 1)),
    *(
        Case(
            f"{name}_last_{channels}",
            lambda x, w, b, f=function: f(F.transpose(x, (0, 3, 1, 2)), w, b),
            torch_code.format("a.permute(0, 3, 1, 2)"),
            (signed(2, 3, 2, channels), signed(channels), signed(channels)),
        )
        for channels in (4, 6)
        for name, function, torch_code in (
            ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "F.group_norm({}, 2, b, c)"),
            ("batch_norm", F.batch_norm, "F.batch_norm({}, None, None, b, c, True)"),
        )
    ),
    Case(
        "batch_norm_given",
        lambda x, w, b: F.batch_norm(x, w, b, ROW, ROW * ROW),
        "F.batch_norm(a, mean.to(a.dtype), mean.to(a.dtype) ** 2, b, c)",
        (signed(2, 4, 3), ROW, ROW + 1),
        {"mean": ROW},
    ),
    Case("attention", F.attention, f"{_ATTENTION}(a, b, c)", QKV),
    Case("attention_causal", lambda q, k, v: F.attention(q, k, v, causal=True, scale=0.5),
        f"{_ATTENTION}(a, b, c, is_causal=True, scale=0.5)", QKV),
    Case("attention_mask", lambda q, k, v: F.attention(q, k, v, MAY), f"{_ATTENTION}(a, b, c, m)",
        QKV, {"m": MAY}),
    Case(
        "self_attention",
        lambda x: F.self_attention(x, 2, causal=True),
        "(lambda q, k, v: " + _ATTENTION + "(q, k, v, is_causal=True))"
        "(*a.reshape(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(2, 5, 4)",
        (signed(2, 5, 12),),
    ),
]  # fmt: skip
