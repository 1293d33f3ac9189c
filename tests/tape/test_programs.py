"""Random programs over NumPy arrays and variables, captured and compared bit by bit.

The environment variable EXAMPLES sets the number of programs, which then differ in every run.
"""

import copy
import os
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

import flashlight_py as fl
from tests.tape.steps import compare

FEW = int(os.environ.get("EXAMPLES", "40"))
MANY = pytest.param(1200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


def words(text: str) -> list[str]:
    return text.split()


DTYPES = ["f4", "f8", "f4", "f8", "f2", "c8", "i4", "i8", "i1", "u1", "?"]
SHAPES = ["nm", "nm", "nm", "m", "n1", "1m", "mk", "mk", "nmk", "n", "", "mm"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, np.inf, -np.inf, np.nan, 1e-40]

UNARY = words("""
    negative positive absolute sign sqrt square reciprocal exp log log1p expm1 sin cos tanh
    arctan floor ceil rint isnan isfinite signbit logical_not invert conjugate fabs cbrt
""")
BINARY = words("""
    add subtract multiply divide floor_divide remainder power maximum minimum fmax fmin less
    less_equal equal not_equal greater logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor arctan2 hypot copysign nextafter logaddexp heaviside float_power
""")
OPERATORS = words("+ - * / // % ** < <= == != > & | ^ @")
IN_PLACE = words("+ - * / // % ** & | ^ @")
NUMBERS = words("2 0 -1 3 0.5 2.0 -0.0 1e-3 True 1j np.float32(0.5) np.float64(2) np.int8(3)")
REDUCE = words("sum prod max min any all mean var std argmax argmin cumsum cumprod")
VIEWS = words("""
    {a}[{i}] {a}[{i}] {a}[{i},{i}] {a}.T {a}.ravel() {a}.reshape(-1) {a}[None] {a}[...,None]
    {a}.diagonal() {a}.real {a}.imag {a}.swapaxes(0,-1) {a}.view('u1') np.flip({a})
    np.squeeze({a}) np.atleast_2d({a}) np.broadcast_to({a},{b}.shape) {a}.reshape({b}.shape)
    {a}[0] {a}[-1,0] {a}[()] np.expand_dims({a},0) np.moveaxis({a},0,-1)
    {a}.reshape(-1,order='F') np.rot90({a}) {a}[:,0] np.reshape({a},-1,'F') np.ravel({a},'K')
    np.transpose({a}) {a}.reshape(-1,1)
""")
READS = words("""
    {a}[I] {a}[I,I] {a}[:,I] {a}[I,None] {a}[M] np.take({a},I[:{a}.size],{x},mode='wrap')
    np.take_along_axis({a},{a}.argsort(-1),-1) {a}[{a}.argmax(-1)%1] {a}.flat[0] {a}[J[:2]]
    np.take({a},I,0,None,'clip') {a}.repeat(2,{x}) np.tile({a},2) np.roll({a},1,{x})
    list({a})[0] np.searchsorted({c},{a}) np.choose(I%2,[{a},{a}]) {a}[{a}.argmax()%2]
    {a}[[0,-1]] {a}.take(I)
""")
JOINS = words("""
    np.concatenate([{a},{b}]) np.concatenate([{a},{b}],-1) np.stack([{a},{a}],{x})
    np.split({a},2)[0] np.array_split({a},2,{x})[-1] np.where({b}>0,{a},{b}) np.where({a},{b},0)
    np.where({a}>0,{a},0.5) np.clip({a},-1,1) np.clip({a},{b},None) {a}.clip(0,{b})
    np.vstack([{a},{b}]) np.hstack([{a},{b},{a}]) np.concatenate([{a},{b}],None)
    np.append({a},{b}) np.maximum({a},0) np.select([{a}>0,{a}<0],[{a},{b}],0)
    np.concatenate(({a},[1,2])) np.block([{a},{b}]) np.concatenate({a})
    np.interp({a},[0,1],[2,3]) np.column_stack([{a},{b}])
""")
SORTS = words("""
    np.sort({a},{x}) np.argsort({a},{x}) np.sort({a},None) {a}.argsort() np.lexsort(({a},{a}))
    np.partition({a},0) np.diff({a}) np.diff({a},axis=0) np.cumsum({a},{x}) np.median({a},{x})
    np.ptp({a}) np.percentile({a},30) np.count_nonzero({a},{x}) np.nanmax({a})
    np.nansum({a},{x}) np.round({a},1) np.add.reduce({a},{x},initial=2)
    np.sum({a},{x},where={b}>0) np.mean({a},axis=(0,-1)) np.ldexp({a},2) np.sum({a},(0,1))
    np.sum({a},(-1,-2),keepdims=True) np.max({a},(0,)) np.sum({a},np.int64(0))
    np.add.accumulate({a},{x}) np.multiply.accumulate({a}) np.add.outer({a},{c})
    np.gradient({a})[0] np.subtract.outer({c},{a}) np.add.reduceat({a},[0,1])
    np.maximum.reduce({a},{x}) np.modf({a})[0] np.divmod({a},{b})[1] np.frexp({a})[0]
    np.nan_to_num({a}) np.linalg.norm({a}) np.trace({a}) np.sum({a},0,None,None,True)
    np.mean({a},dtype='f8') np.average({a},{x}) np.tril({a})
""")
PRODUCTS = words("""
    {a}@{b} {a}.T@{b} {a}@{b}.T {a}@{a}.T np.dot({a},{b}) np.dot({a}.T,{b}) {a}.dot({b}.T)
    np.outer({a},{b}) np.inner({a},{b}) np.tensordot({a},{b},1) np.tensordot({a},{b},0)
    np.vdot({a},{b}) np.einsum('ij,jk->ik',{a},{b}) np.einsum('ij->ji',{a})
    np.einsum('ij,ij->i',{a},{b}) np.kron({a},{c}) np.einsum('i,i',{c},{c}) {a}.T.dot({b}.T)
    np.matmul({a}[:,None],{b}[None]) {a}[...,::2]@{b}[::2] {a}.dot({c}) {c}.dot({a}) {a}@{c}
    {a}[::-1]@{b} np.dot({c},{c})
""")
COPIES = words("""
    {a}.astype('{d}') {a}.astype('{d}',copy=False) {a}.copy() {a}.copy('F') np.copy({a})
    np.ascontiguousarray({a}) np.asfortranarray({a}) np.zeros_like({a}) np.full_like({a},3)
    {a}+0 np.ones_like({a},'{d}') {a}.flatten('F') np.array({a},copy=True) copy.copy({a})
""")
CHANGES = words("""
    {a}[{i}]={b} {a}[{i},{i}]={b} {a}[...]={b} {a}[{i}]={n} {a}[I]={b} {a}[M]=0 {a}[{a}>0]={n}
    {a}[0]={b} np.copyto({a},{b}) np.copyto({a},{b},where={a}>0)
    np.copyto({a},{b},'unsafe',{b}>0) np.add.at({a},I,{b}) np.subtract.at({a},(I,I),1)
    np.putmask({a},{b}>0,{c}) {a}.sort() {a}.sort(0) np.put({a},I,{c}) {a}.fill({n})
    np.cumsum({a},{x},None,{a}) np.take({b},I,0,{a}) {a}[0]={a}[-1] {a}[:]={a}[::-1]
    {a}[1:]={a}[:-1] {a}[:2]=[{c}.sum(),{c}.max()] np.fill_diagonal({a},{n}) np.dot({a},{b},{a})
    np.matmul({a},{b},out={a}) np.clip({a},0,1,{a}) {a}.sum(0,out={a}[0])
    np.nan_to_num({a},copy=False) np.divmod({a},2,out=({a},{b})) {a}.real[...]=1 {a}.flat[{i}]=2
    {a}.partition(1) np.concatenate([{b},{b}],out={a}) np.negative.at({a},I) {a}.T[...]={b}
    np.multiply({a},{b},out={b},where={b}>0) np.sqrt({a},out={b},casting='unsafe')
""")
VARIABLES = words("""
    fl.input({a}) fl.no_grad({a}) {u}+{v} {u}-{v} {u}*{v} {u}/{v} {u}@{v} F.sin({u}) F.exp({u})
    F.tanh({u}) F.sigmoid({u}) F.relu({u}) F.abs({u}) F.sqrt({u}) F.maximum({u},{v})
    F.minimum({u},{v}) F.sum({u},0) F.sum({u},1,True) F.mean({u}) F.mean({u},0) F.var({u},0)
    F.max({u},1) F.min({u},0) F.matmul({u},{v}) F.linear({u},{v}) F.linear({u},{v},{v})
    F.linear_relu({u},{v},{v}) {u}.T {u}**2 F.reshape({u},(-1,)) F.transpose({u})
    F.concatenate([{u},{v}]) {u}[{i}] {u}[I] F.softmax({u}) F.log_softmax({u})
    F.mean_squared_error({u},{v}) F.clamp({u},-1,1) 2*{u} {u}-{a} {u}**{v} -{u}
    F.astype({u},'{d}') F.log({u}) {u}.sum() {u}.mean() F.sum({u}) F.pow({u},3)
""")
LINES = [*VIEWS, *READS, *JOINS, *SORTS, *PRODUCTS, *COPIES]
INDICES = words(":: ::-1 1: :2 ::2 0 -1 1:3 None ... -2: ::-2 :0")
OUTS = ["", "", "", ",out={a}", ",out={b}", ",dtype='{d}'"]
AXES = ["", "0", "-1", "1", "None", "0,keepdims=True", "1,dtype='{d}'", "(0,1)"]
# Parts of a line: texts, and lists from which one text is drawn.
WAYS: dict[str, list[Any]] = {
    "unary": ["np.", UNARY, "({a}", [*OUTS[:3], *OUTS[4:6], ",out={b},where=M"], ")"],
    "binary": ["np.", BINARY, "({a},", ["{b}", "{b}", "{n}"], OUTS, ")"],
    "operator": [["{a}%s{b}", "{a}%s{b}", "{a}%s({n})", "({n})%s{a}"], OPERATORS],
    "in_place": ["{a}", IN_PLACE, "=", ["{b}", "{b}", "{n}"]],
    "reduce": ["{a}.", REDUCE, "(", AXES, ")"],
    "line": [LINES],
    "change": [CHANGES],
    "variable": [VARIABLES],
}


class State:
    """Values that a program changes, and the globals of its code."""

    def __init__(self, shape: dict[str, int], dtype: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.p = values(random, (shape["n"], shape["m"]), dtype, False)
        self.q = values(random, (shape["m"],), dtype, False)
        kind = dtype if dtype in ("f4", "f8") else "f8"
        self.w = fl.param(values(random, (shape["n"], shape["m"]), kind, False))

    def state(self) -> list[Any]:
        return [self.p, self.q, self.w.array, self.w.grad]


def values(random: Any, shape: tuple[int, ...], dtype: str, special: bool) -> Any:
    array = random.standard_normal(shape) * 2
    if np.dtype(dtype).kind in "iub":
        return random.integers(0 if dtype in "u1?" else -3, 5, shape).astype(dtype)
    if special:
        array = np.where(random.random(shape) < 0.4, random.choice(SPECIAL, shape), array)
    return np.asarray(array).astype(dtype)


def is_usable(value: Any) -> bool:
    data = value.array if isinstance(value, fl.Variable) else value
    is_array = isinstance(data, (np.ndarray, np.generic)) and data.dtype.kind in "biufc"
    return is_array and data.size < 20_000 and data.ndim < 5


class Writer:
    """A generator of the lines of a step, each tested with the arrays of one call."""

    def __init__(self, draw: Any, state: State, arguments: list[Any]) -> None:
        self.draw, self.lines, self.number = draw, list[str](), 0
        self.env = {**GLOBALS, "s": state, "x": arguments[0], "y": arguments[1]}
        self.names = ["x", "y", "s.p", "s.q", "s.w.array"]
        self.variables = ["s.w"]

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def filled(self, line: str) -> str:
        recent = self.names[-6:] + self.names[:3]
        names = {
            "a": self.pick(recent), "b": self.pick(self.names), "c": self.pick(["s.q", "x", "y"]),
            "u": self.pick(self.variables), "v": self.pick(self.variables),
            "x": self.pick(["0", "-1", "1", "None"]), "n": self.pick(NUMBERS),
            "d": self.pick(DTYPES),
        }  # fmt: skip
        while "{i}" in line:
            line = line.replace("{i}", self.pick(INDICES), 1)
        return line.format(**names)

    def add(self) -> None:
        statement = self.pick([*WAYS, "line", "line"])
        is_new = statement not in ("in_place", "change")
        parts = [part if type(part) is str else self.pick(part) for part in WAYS[statement]]
        line = self.filled(parts[0] % parts[1] if statement == "operator" else "".join(parts))
        name = f"v{self.number}"
        if self.tries(f"{name}={line}" if is_new else line):
            self.number += 1
            if is_new and not is_usable(self.env[name]):
                self.lines.pop()
            elif is_new:
                is_variable = isinstance(self.env[name], fl.Variable)
                (self.variables if is_variable else self.names).append(name)

    def tries(self, line: str) -> bool:
        try:
            exec(line, self.env)
        except REFUSED:
            return False
        self.lines.append(line)
        return True


REFUSED = (ArithmeticError, AttributeError, IndexError, MemoryError, RuntimeError, TypeError,
           ValueError)  # fmt: skip
GLOBALS = {
    "np": np, "fl": fl, "F": fl.autograd.functions, "copy": copy, "__name__": "programs",
    "I": np.array([0, -1, 0]), "J": np.array([1, 0, 1]), "M": np.array([True, False, True]),
}  # fmt: skip
RETURNS = words("""
    ({0},{1},{2}) [{0},{{'a':{1}}},({2},{2})] {{'x':{0},'y':({1},x)}} {2} None
    ({0},{0}[::-1],{1}.T,s.p) ({0}.sum().item(),{1},{2}) y,{0},s.q[1:],{2}
""")


@st.composite
def programs(draw: Any) -> Any:
    sizes = st.sampled_from([3, 3, 2, 1, 4, 17, 0, 70])
    shape = {"n": draw(sizes), "m": draw(sizes), "k": draw(sizes), "1": 1}
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(3)]
    shapes = [draw(st.sampled_from(SHAPES)) for _ in range(2)]
    seed = draw(st.integers(0, 9))
    drawn = shape, dtypes, shapes, seed
    state = State(shape, dtypes[2], seed)
    writer = Writer(draw, state, arguments(drawn, 0))
    for _ in range(draw(st.integers(1, 12))):
        writer.add()
    if draw(st.booleans()):
        writer.tries(f"({writer.variables[-1]}*1).sum().backward()")
        writer.tries(draw(st.sampled_from(["s.w.array-=0.1*s.w.grad", "s.w.zero_grad()"])))
    for name in ("s.p", "s.q", "s.w.array"):
        if draw(st.integers(0, 3)) == 0:
            other = draw(st.sampled_from(writer.names))
            if np.shape(eval(other, writer.env)) in ((), np.shape(eval(name, writer.env))):
                writer.tries(f"{name}=({name}*1+{other}).astype({name}.dtype)")
    picked = [draw(st.sampled_from(writer.names + writer.variables)) for _ in range(3)]
    result = draw(st.sampled_from(RETURNS)).format(*picked)
    if not writer.tries(f"r={result}"):
        writer.lines.append("r={},{},{}".format(*picked))
    body = "".join(f"  {line}\n" for line in writer.lines)
    return f"def make(s):\n def step(x,y):\n{body}  return r\n return step", drawn


def arguments(drawn: Any, call: int) -> list[Any]:
    """Return two arrays for a call. Some have other layouts or shapes, or are the same array."""
    shape, dtypes, shapes, seed = drawn
    if call == 6:
        shape = shape | {"k": shape["k"] + 1, "n": max(1, shape["n"])}
    random = np.random.default_rng([seed, call])
    both = [
        values(random, tuple(shape[item] for item in dims), dtype, call % 3 == 2)
        for dims, dtype in zip(shapes, dtypes, strict=False)
    ]
    if call == 4 and seed % 3 == 0:
        return [both[0], both[0]]
    return [np.asfortranarray(array) for array in both] if call == 5 and seed % 2 else both


def run(drawn: tuple[str, Any]) -> Any:
    """Run a program eagerly and captured, compare after each call, and return the captured step."""
    text, (shape, dtypes, _, seed) = drawn
    scope: dict[str, Any] = dict(GLOBALS)
    exec(text, scope)

    def make() -> Any:
        state = State(shape, dtypes[2], seed)
        return scope["make"](state), state

    def change(call: int, state: State) -> None:
        if call in (3, 6) and seed % 3 == 2:
            state.w.grad = np.full_like(state.w.array, 0.5)

    calls = [tuple(arguments(drawn[1], call)) for call in range(8)]
    x, p = calls[5][0], State(shape, dtypes[2], seed).p
    if seed % 3 == 1 and (x.shape, x.dtype) == (p.shape, p.dtype):
        calls[5] = lambda state: state.p, calls[5][1]
    return compare(
        make, calls, change, eager=None, reason=None, raises=None, named=True, stays=True
    )


@pytest.mark.parametrize("examples", [FEW, MANY])
def test_programs_equal_eager_steps(examples: int) -> None:
    ways = {"replayed": 0, "eager": 0, "neither": 0}

    @hypothesis.settings(
        max_examples=examples,
        derandomize="EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @hypothesis.given(programs())
    def check(drawn: tuple[str, Any]) -> None:
        captured = run(drawn)
        ways["eager" if captured.reason else "replayed" if captured.replays else "neither"] += 1

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        check()
    assert ways["replayed"] > 0.5 * examples, ways
    assert ways["neither"] < 0.3 * examples, ways
