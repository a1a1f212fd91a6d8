"""What the models share: layouts by the names of dimensions, training steps, small layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

Tree = Any
Names = tuple[str | None, ...]
"""The names of an array's dimensions."""

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


@dataclass(frozen=True)
class Layout:
    """How arrays lie on a mesh: `rules` say along which axes dimensions of a name are split, as MaxText's logical axes.

    Attributes:
        constrained: activations are held to it, too; else only arguments and results are.
    """

    mesh: Mesh
    rules: Mapping[str, str | tuple[str, ...]]
    constrained: bool = False

    def spec(self, names: Names) -> P:
        """That of an array; an axis splits the first dimension that wants it."""
        used: set[str] = set()
        found: list[tuple[str, ...]] = []
        for name in names:
            axes = self.rules.get(name, ()) if name else ()
            found.append(tuple(axis for axis in ([axes] if isinstance(axes, str) else axes) if axis not in used))
            used.update(found[-1])
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in found))

    def specs(self, tree: Tree) -> Tree:
        """Those of a tree of names."""
        return jax.tree.map(self.spec, tree, is_leaf=_is_names)

    def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
        """An activation, which is held to the layout where activations are."""
        if not self.constrained:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(names)))


def _is_spec(tree: Tree) -> bool:
    return isinstance(tree, P)


def _is_names(tree: Tree) -> bool:
    return isinstance(tree, tuple) and all(name is None or isinstance(name, str) for name in tree)


@dataclass(frozen=True)
class Program:
    """A function of arrays, the types of its arguments, and the names of the dimensions of these and of its results.

    Attributes:
        flops: the floating-point operations of the model, counted by hand: what is computed again counts once, and what
            is no product is left out. 0 where nobody counted.
    """

    run: Callable[..., Any]
    arguments: tuple[Tree, ...]
    named: tuple[Tree, ...]
    results: Tree
    donated: tuple[int, ...] = ()
    flops: float = 0.0

    def partitioned(self, layout: Layout, automatic: bool = False, **options: Any) -> sdy.PartitionedFunction[..., Any]:
        """The function partitioned; where `automatic`, the planner chooses the layouts of weights and of what comes
        back: an optimizer's state, or a cache. `options` are further ones of `sdy.partition`."""
        given, made = layout.specs(self.named), layout.specs(self.results)
        if automatic:
            state, back = max(self.donated, default=0) + 1, len(self.donated)
            given, made = (sdy.AUTO,) * state + given[state:], (sdy.AUTO,) * back + made[back:]
        stated = {"in_shardings": given, "out_shardings": made, "donate_argnums": self.donated}
        return sdy.partition(self.run, mesh=layout.mesh, **stated, **options)

    def jitted(self, layout: Layout) -> Any:
        """The function under `jax.jit` with the same layouts."""
        named = [
            jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), layout.specs(tree), is_leaf=_is_spec)
            for tree in (self.named, self.results)
        ]
        return jax.jit(self.run, in_shardings=named[0], out_shardings=named[1], donate_argnums=self.donated)


@dataclass(frozen=True)
class Array:
    """A weight, or what a program takes: its shape, the names of its dimensions, and its type."""

    shape: tuple[int, ...]
    names: Names
    dtype: Any = f32

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def types(tree: Tree) -> Tree:
    """The types of a tree of `Array`s."""
    return jax.tree.map(lambda array: array.type, tree, is_leaf=is_array)


def names(tree: Tree) -> Tree:
    """The names of a tree of `Array`s."""
    return jax.tree.map(lambda array: array.names, tree, is_leaf=is_array)


def stacked(layers: int, tree: Tree) -> Tree:
    """The weights of all layers, each kind as one array."""
    return jax.tree.map(
        lambda a: dataclasses.replace(a, shape=(layers, *a.shape), names=(None, *a.names)), tree, is_leaf=is_array
    )


def in_type(dtype: Any, tree: Tree) -> Tree:
    """The same weights in another type."""
    return jax.tree.map(lambda array: dataclasses.replace(array, dtype=dtype), tree, is_leaf=is_array)


def is_array(tree: Tree) -> bool:
    """Whether a part of a tree is an `Array`."""
    return isinstance(tree, Array)


def training(loss: Callable[..., jax.Array], weights: Tree, batch: tuple[Tree, ...], flops: float = 0.0) -> Program:
    """A step of AdamW on float32 weights: `(weights, m, v, *batch) -> (weights, m, v, loss)`.

    Args:
        flops: the operations of the loss. A product with weights has two more of as many in the gradient, by what it
            is multiplied with and by the weights, and so has one of two activations: the step has three times those.
    """

    def step(weights: Tree, m: Tree, v: Tree, *batch: jax.Array) -> tuple[Tree, Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, gradients)
        weights = jax.tree.map(lambda w, m, v: w - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w), weights, m, v)
        return weights, m, v, value

    state = (weights,) * 3
    return Program(
        step,
        (*map(types, state), *map(types, batch)),
        (*map(names, state), *map(names, batch)),
        (*map(names, state), ()),
        (0, 1, 2),
        3 * flops,
    )


def layers_of(
    layer: Callable[[jax.Array, Tree], jax.Array], x: jax.Array, weights: Tree, scanned: bool, checkpointed: bool
) -> jax.Array:
    """`x` through all layers of a stack, in a loop or one after the other."""
    # A loop keeps what is computed again apart by itself, so that it needs no barriers.
    layer = jax.checkpoint(layer, prevent_cse=not scanned) if checkpointed else layer
    if scanned:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
    for number in range(jax.tree.leaves(weights)[0].shape[0]):
        x = layer(x, jax.tree.map(lambda stack, number=number: stack[number], weights))
    return x


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(f32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | float) -> jax.Array:
    wide = x.astype(f32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale + bias).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array | None = None, base: float = 10000.0) -> jax.Array:
    """Rotary positions of `x` (batch, sequence, heads, width), from 0 on or given: (sequence) or (batch, sequence)."""
    width = x.shape[-1]
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    turns = positions[..., None] * base ** (-jnp.arange(0, width, 2) / width)
    cos, sin = (f(turns)[..., None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Grouped attention: `q` (batch, sequence, heads, width), `k` and `v` of fewer heads, whose values may have another
    width; scores in float32."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", grouped, k).astype(f32) * width**-0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    found = jnp.einsum("bkgqt,btkd->bqkgd", jax.nn.softmax(scores, -1).astype(q.dtype), v)
    return found.reshape(batch, length, heads, v.shape[-1])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(f32)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)
