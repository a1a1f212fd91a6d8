"""Profiles name what users wrote: compiled ops have the scopes, transformations and source lines that jit's have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_names import shown
from jax import lax, named_scope
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy
from sdy_jax.plan.digests import FOLDER

KINDS = frozenset({"dot", "convolution", "reduce", "reduce-window", "sort", "fft", "custom-call"})
CASES = {}


def case(*given):
    """A program with its arguments, each with the entries of its PartitionSpec."""

    def add(fun):
        CASES[fun.__name__] = fun, [x for x, _ in given], [spec for _, spec in given]
        return fun

    return add


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


W = {"a": array(16, 32), "b": array(32, 16)}, {"a": P(None, "y"), "b": P("y")}
X = array(8, 16), P("x")


def mlp(w, x):
    with named_scope("mlp"):
        h = x @ w["a"]
        return jax.nn.gelu(h) @ w["b"]


def slope(fun):
    return lambda w, *xs: jax.grad(lambda w: (fun(w, *xs) ** 2).mean())(w)


@case(W, X)
def forward(w, x):
    return mlp(w, x)


@case(W, X)
def gradient(w, x):
    return slope(mlp)(w, x)


def attend(w, x):
    with named_scope("attention"):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
        with named_scope("scores"):
            p = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
        return jnp.einsum("bshe,hed->bsd", jnp.einsum("bhst,bthe->bshe", p, v), w["o"])


HEADS = (
    {name: array(16, 4, 4) for name in "qkv"} | {"o": array(4, 4, 16)},
    {name: P(None, "y") for name in "qkv"} | {"o": P("y")},
)


@case(HEADS, (array(4, 8, 16), P("x")))
def attention(w, x):
    return slope(attend)(w, x)


STACK = {"a": array(3, 16, 32), "b": array(3, 32, 16)}, {"a": P(None, None, "y"), "b": P(None, "y")}


@case(STACK, X)
def scanned(w, x):
    def layer(x, w):
        with named_scope("layer"):
            return x + mlp(w, x), None

    def layers(w, x):
        with named_scope("stack"):
            return lax.scan(layer, x, w)[0]

    return slope(layers)(w, x)


@case(STACK, X)
def scanned_again(w, x):
    def layer(x, w):
        return jax.checkpoint(mlp)(w, x), None

    return slope(lambda w, x: lax.scan(layer, x, w)[0])(w, x)


@case(W, X)
def checkpointed(w, x):
    return slope(lambda w, x: jax.checkpoint(mlp)(w, mlp(w, x)))(w, x)


@case(W, X, (jnp.int32(1), P()))
def branches(w, x, index):
    with named_scope("chosen"):
        return lax.switch(index, [lambda: mlp(w, x), lambda: x @ (w["a"] @ w["b"])])


@case((array(3, 3, 4, 8), P(None, None, None, "y")), (array(8, 8, 8, 4), P("x")))
def convolution(w, x):
    def network(w, x):
        with named_scope("conv"):
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        with named_scope("pool"):
            return lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    return slope(network)(w, x)


@jax.custom_vjp
def squared(x):
    return (x * x).sum(-1)


def _squared_forward(x):
    with named_scope("by_hand"):
        return (x * x).sum(-1), x


squared.defvjp(_squared_forward, lambda x, g: (2 * x * g[..., None],))


@case(W, X)
def custom_derivative(w, x):
    return slope(lambda w, x: squared(mlp(w, x)))(w, x)


@case(W, (array(3, 8, 16), P(None, "x")))
def mapped(w, x):
    return jax.vmap(mlp, (None, 0))(w, x)


@case(W, X)
def nested(w, x):
    with named_scope("a"):
        with named_scope("b"):
            x = mlp(w, x)
        return mlp(w, x).sum(0)


@jax.jit
def called(w, x):
    return mlp(w, x)


@case(W, X)
def jitted_twice(w, x):
    with named_scope("one"):
        x = called(w, x)
    with named_scope("two"):
        return called(w, x)


@case((array(64, 16), P("y")), (jnp.arange(32).reshape(8, 4), P("x")))
def embedding(w, tokens):
    with named_scope("embed"):
        return slope(lambda w, tokens: w[tokens].sum(1) @ w.T)(w, tokens)


@case((array(8, 32), P("x")))
def sorting(x):
    with named_scope("sorts"):
        return jnp.sort(x, -1).sum(), lax.top_k(x, 4), jnp.argmax(x, -1), jnp.cumsum(x, 0)


@case((array(8, 32), P("x")))
def transform(x):
    with named_scope("spectrum"):
        return jnp.abs(jnp.fft.fft(x)).sum(-1)


@case(W, (array(4, 8, 16), P(None, "x")))
def accumulated(w, x):
    def add(total, x):
        with named_scope("micro"):
            return jax.tree.map(jnp.add, total, slope(mlp)(w, x)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, w), x)[0]


@case((array(16, 32), P(None, "y")), X)
def per_device(w, x):
    @partial(jax.shard_map, mesh=PLANE, in_specs=(P(None, "y"), P("x")), out_specs=P("x", "y"))
    def local(w, x):
        with named_scope("mine"):
            return x @ w

    with named_scope("around"):
        return local(w, x).sum(0)


@case(W, X)
def loop(w, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, mlp(w, c[1])), (0, x))


@case(W, X)
def training(w, x):
    with named_scope("loss"):
        g = slope(mlp)(w, x)
    with named_scope("optimizer"):
        norm = jnp.sqrt(sum(jnp.sum(v * v) for v in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / norm, w, g)


@case((array(64, 512), P("x")), (array(512), P()))
def normalized(x, scale):
    def rms(scale, x):
        with named_scope("rms"):
            return x * lax.rsqrt((x * x).mean(-1, keepdims=True)) * scale

    return slope(rms)(scale, x)


@case((array(16, 32), P()), X)
def kernel(w, x):
    def product(x, w, out):
        out[...] = x[...] @ w[...]

    blocks = [pl.BlockSpec((4, 16), lambda i: (i, 0)), pl.BlockSpec((16, 32), lambda i: (0, 0))]
    out = pl.BlockSpec((4, 32), lambda i: (i, 0))
    type_ = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    with named_scope("kernel"):
        return pl.pallas_call(product, grid=2, in_specs=blocks, out_specs=out, out_shape=type_, interpret=True)(x, w)


@case(STACK, (array(4, 8, 16), P(None, "x")))
def shifted_stages(w, x):
    """A pipeline as `jit` has them: stages under `vmap`, whose states move on by one."""

    def tick(states, x):
        with named_scope("tick"):
            states = jax.vmap(mlp)(w, jnp.concatenate([x[None], states[:-1]]))
            return states, states[-1]

    return lax.scan(tick, jnp.zeros((3, 8, 16)), x)[1]


@case((array(8, 4, 16, 32), P("y")), (array(8, 16), P("x")))
def experts(w, x):
    with named_scope("router"):
        gates = jax.nn.softmax(x @ w[:, 0, :, 0].T)
    with named_scope("experts"):
        return jnp.einsum("td,edf,te->tf", x, w[:, 1], gates)


class Layer:
    """As libraries of modules name what they compute."""

    def __init__(self, name, inner=()):
        self.name, self.inner = name, inner

    def __call__(self, w, x):
        with named_scope(self.name):
            for layer in self.inner:
                x = layer(w[layer.name], x)
            return x if self.inner else mlp(w, x)


MODEL = Layer("Model", (Layer("Block_0"), Layer("Block_1")))


@case(({"Block_0": W[0], "Block_1": W[0]}, {"Block_0": W[1], "Block_1": W[1]}), X)
def modules(w, x):
    return slope(MODEL)(w, x)


def compiled(decorate, name):
    fun, args, specs = CASES[name]
    shardings = jax.tree.map(partial(NamedSharding, PLANE), tuple(specs), is_leaf=lambda x: isinstance(x, P))
    return decorate(fun, in_shardings=shardings).lower(*args).compile().as_text()


QUICK = ("scanned", "per_device", "jitted_twice")
OTHERS = [pytest.param(name, marks=pytest.mark.more("further programs")) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_scopes_and_lines_are_those_of_jit(name):
    by_jit, by_us = (shown(compiled(decorate, name)) for decorate in (jax.jit, sdy.partition))
    wanted = {(each.scope, each.line) for each in by_jit if each.kind in KINDS}
    assert wanted
    assert {(each.scope, each.line) for each in by_us if each.kind in KINDS} == wanted
    assert all(each.line for each in by_us if each.scope.startswith(f"jit({name})/"))


def test_stages_of_a_pipeline_have_their_scopes():
    def layer(w, x):
        with named_scope("layer"):
            return x + jnp.tanh(x @ w["a"]) @ w["b"]

    def loss(w, x):
        return (sdy.pipeline(layer, w, x, axis="x", microbatches=4) ** 2).sum()

    (w, _), (x, _) = STACK, X
    w = jax.tree.map(lambda x: x[:2], w)
    specs = {"a": P("x", None, "y"), "b": P("x", "y")}, P()
    text = sdy.partition(jax.grad(loss), mesh=PLANE, in_shardings=specs).lower(w, x).compile().as_text()
    dots = [each for each in shown(text) if each.kind == "dot"]
    assert len({each.line for each in dots}) == 1
    assert {each.scope.rpartition("/")[2] for each in dots} == {"jvp(layer)", "transpose(jvp(layer))"}


def test_derivatives_from_outside_have_the_lines_of_the_function():
    fun, args, specs = CASES["forward"]
    step = sdy.partition(fun, mesh=PLANE, in_shardings=tuple(specs))
    by_us = shown(jax.jit(jax.grad(lambda w, x: step(w, x).sum())).lower(*args).compile().as_text())
    by_jit = shown(jax.jit(jax.grad(lambda w, x: fun(w, x).sum())).lower(*args).compile().as_text())
    assert {each.line for each in by_us if each.kind == "dot"} == {each.line for each in by_jit if each.kind == "dot"}


def test_lines_of_loaded_programs_are_those_of_the_text():
    text = """
        func.func @main(%a: tensor<8x16xf32>, %b: tensor<16x32xf32>) -> tensor<8x32xf32> {
          %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
              : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32> loc("mine/product"("model.py":7:3))
          return %0 : tensor<8x32xf32>
        }"""
    step = sdy.partition(sdy.loads(text), mesh=PLANE, in_shardings=(P("x"), P(None, "y")))
    found = shown(step.lower(array(8, 16), array(16, 32)).compile().as_text())
    assert {(each.scope.rpartition("/")[2], each.line) for each in found if each.kind == "dot"} == {
        ("mine", "model.py:7")
    }


def test_names_outlive_the_process_with_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made, found = (shown(compiled(sdy.partition, "scanned")) for _ in range(2))
    assert list(tmp_path.glob("*.module"))
    assert made == found
