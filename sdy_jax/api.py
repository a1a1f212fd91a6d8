"""`partition`: jit's interface, with our partitioner under it."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sdy_jax.arguments import Leaf, argument_leaves, parameter_names
from sdy_jax.errors import SdyError, ShardingError, UnsupportedError
from sdy_jax.graph import Graph
from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.emit import local_function, used_axes
from sdy_jax.plan.build import build_plan
from sdy_jax.plan.plan import Plan
from sdy_jax.program import from_function
from sdy_jax.representation.named import mesh_from_jax
from sdy_jax.runtime.boundary import Boundary, auto_mesh
from sdy_jax.runtime.mesh import RefinedMesh

Static = int | str | Sequence[int] | Sequence[str] | None


class PartitionWarning(UserWarning):
    """Something is gathered or computed replicated because it cannot be split; it names the op and the source line."""


def partition(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    costs: CostModel | None = None,
    on_unknown: str = "warn",
) -> Any:
    """Partitions a function over a mesh: like `jax.jit`, with explicit collectives chosen by cost and a readable plan.

    Args:
        fun: a function of arrays and pytrees of arrays. Without it `partition` returns a decorator.
        mesh: the mesh to run on, with Auto or Explicit axes. By default the one set by `jax.set_mesh`.
        in_shardings: a prefix tree for the positional arguments; each entry is None (propagation decides), a
            `PartitionSpec`, a `NamedSharding`, the text of an SDY sharding such as `'[{"data"}, {?}p1]'`, or a
            `TensorSharding`. Keyword arguments take the entry of the parameter of their name.
        out_shardings: likewise for the results.
        static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, inline, compiler_options: as in
            `jax.jit`.
        costs: what communication costs; by default one unit per byte on the wire.
        on_unknown: what to do with an op, or a dimension of one, that cannot be split: "warn" (gather, compute
            replicated, warn once per op and source line), "error", or "ignore" (the plan still says it).

    Returns:
        A `PartitionedFunction`; with `fun=None`, a decorator that makes one.

    Raises:
        SdyError: bad arguments, here or at the first call; the message names the argument and what would be right.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> @partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)
    """
    options = dict(
        mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
        keep_unused=keep_unused, inline=inline, compiler_options=compiler_options, costs=costs, on_unknown=on_unknown,
    )
    if fun is None:
        return lambda f: PartitionedFunction(f, **options)
    return PartitionedFunction(fun, **options)


_tracing = threading.local()


class PartitionedFunction:
    """A function that runs partitioned. Called like the function itself; `plan` shows what will run.

    Under another partitioned function's trace it is inlined, and its in_shardings become sharding constraints.
    """

    def __init__(self, fun: Callable[..., Any], *, mesh: jax.sharding.Mesh | None, in_shardings: Any,
                 out_shardings: Any, static_argnums: Any, static_argnames: Any, donate_argnums: Any,
                 donate_argnames: Any, keep_unused: bool, inline: bool, compiler_options: dict[str, Any] | None,
                 costs: CostModel | None, on_unknown: str):
        if not callable(fun):
            raise SdyError(f"partition got a {type(fun).__name__}; expected a function")
        if on_unknown not in ("warn", "error", "ignore"):
            raise SdyError(f"on_unknown={on_unknown!r}; expected 'warn', 'error' or 'ignore'")
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._mesh = fun, mesh
        self._in, self._out = in_shardings, out_shardings
        self._costs, self._on_unknown = costs, on_unknown
        self._names = parameter_names(fun)
        self._static_nums, self._static_names = _static_parameters(static_argnums, static_argnames, self._names)
        self._plans: dict[Any, Plan] = {}

        @functools.wraps(fun, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._jitted: Any = jax.jit(
            run, static_argnums=static_argnums, static_argnames=static_argnames,
            donate_argnums=donate_argnums, donate_argnames=donate_argnames, keep_unused=keep_unused, inline=inline,
            compiler_options=compiler_options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_tracing, "active", False):
            return self._inlined(args, kwargs)
        return self._jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).trace`: the traced program of the partitioned function."""
        return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).lower`; the result's `compile()` gives the executable."""
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results; nothing is planned or run."""
        return jax.eval_shape(self._fun, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans and compiled programs."""
        self._plans.clear()
        self._jitted.clear_cache()

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these (arrays or `ShapeDtypeStruct`s); nothing runs."""
        dynamic, named, statics = self._split(args, kwargs)
        as_avals = functools.partial(jax.tree.map, _abstract)
        return self._planned(as_avals(dynamic), as_avals(named), statics)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """What jit traces: plan, then the per-device program on shards."""
        dynamic, named, statics = self._split(args, kwargs)
        leaves = jax.tree.leaves((dynamic, named))
        as_avals = functools.partial(jax.tree.map, jax.typeof)
        plan = self._planned(as_avals(dynamic), as_avals(named), statics)
        program = plan.program
        graph = Graph(program.module)
        refined = RefinedMesh.of(program.mesh, used_axes(graph))
        boundary = Boundary(self._jax_mesh(), refined, [v.sharding for v in (*plan.constants, *plan.arguments)],
                            [v.sharding for v in plan.results])
        results = boundary(local_function(graph, refined), [*program.constants, *leaves], program.out_info)
        return jax.tree.unflatten(program.out_tree, results)

    def _planned(self, args: Sequence[Any], kwargs: dict[str, Any], statics: _Statics) -> Plan:
        mesh = self._jax_mesh()
        dynamic_names = [n for i, n in enumerate(self._names) if i not in statics.positions]
        leaves = argument_leaves(self._in, args, kwargs, dynamic_names)
        tree = jax.tree.structure((tuple(args), kwargs))
        key = (mesh, tree, tuple(_signature(leaf) for leaf in leaves), statics)
        if key not in self._plans:
            self._plans[key] = self._made(leaves, tree, statics, mesh)
        return self._plans[key]

    def _made(self, leaves: list[Leaf], tree: Any, statics: _Statics, mesh: jax.sharding.Mesh) -> Plan:
        def fun(*args: Any, **kwargs: Any) -> Any:
            _tracing.active, outer = True, getattr(_tracing, "active", False)
            try:
                return self._fun(*statics.merged(args), **kwargs, **dict(statics.named))
            finally:
                _tracing.active = outer

        program = from_function(fun, leaves, tree, self._out, mesh_from_jax(mesh), auto_mesh(mesh))
        costs = self._costs or CostModel.of_platform(mesh.devices.flat[0].platform)
        plan = build_plan(getattr(self._fun, "__name__", "function"), program, costs)
        self._report(plan)
        return plan

    def _report(self, plan: Plan) -> None:
        if self._on_unknown == "error" and plan.notes:
            raise UnsupportedError("cannot be split, and on_unknown='error':\n" + "\n".join(map(str, plan.notes)))
        if self._on_unknown == "warn":
            for note in plan.notes:
                warnings.warn(str(note), PartitionWarning, stacklevel=2)

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], _Statics]:
        """Positional and keyword arguments without the static ones, and the static ones."""
        positions = frozenset(n % len(args) if n < 0 else n for n in self._static_nums) if args else frozenset()
        statics = _Statics(tuple((i, args[i]) for i in sorted(positions) if i < len(args)),
                           tuple((n, kwargs[n]) for n in sorted(self._static_names) if n in kwargs))
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        return dynamic, {n: v for n, v in kwargs.items() if n not in self._static_names}, statics

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain function, its in_shardings as constraints of the surrounding program."""
        dynamic, named, statics = self._split(args, kwargs)
        dynamic_names = [n for i, n in enumerate(self._names) if i not in statics.positions]
        leaves = argument_leaves(self._in, dynamic, named, dynamic_names)
        values = [_constrained(leaf, self._jax_mesh()) for leaf in leaves]
        dynamic, named = jax.tree.unflatten(jax.tree.structure((dynamic, named)), values)
        return self._fun(*statics.merged(dynamic), **named, **dict(statics.named))

    def _jax_mesh(self) -> jax.sharding.Mesh:
        mesh = self._mesh or jax.sharding.get_mesh()
        if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
            raise ShardingError("partition needs a mesh: pass mesh=jax.make_mesh(shape, names), or call the function "
                                "under jax.set_mesh")
        return mesh


class _Statics:
    """The static arguments of a call: (position, value) and (name, value) pairs; hashable as they are."""

    __slots__ = ("named", "positional")

    def __init__(self, positional: tuple[tuple[int, Any], ...], named: tuple[tuple[str, Any], ...]):
        self.positional, self.named = positional, named

    @property
    def positions(self) -> frozenset[int]:
        return frozenset(i for i, _ in self.positional)

    def merged(self, dynamic: Sequence[Any]) -> list[Any]:
        """Static and dynamic positional arguments in their order."""
        rest, values = iter(dynamic), dict(self.positional)
        return [values[i] if i in values else next(rest) for i in range(len(dynamic) + len(values))]

    def __hash__(self) -> int:
        return hash((self.positional, self.named))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Statics) and (self.positional, self.named) == (other.positional, other.named)


def _static_parameters(nums: Any, names: Any, parameters: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static positions and names; a parameter given by either is static however it is passed, as in jit."""
    numbers = (nums,) if isinstance(nums, int) else tuple(nums or ())
    given = (names,) if isinstance(names, str) else tuple(names or ())
    by_name = tuple(parameters.index(n) for n in given if n in parameters)
    by_number = tuple(parameters[n] for n in numbers if -len(parameters) <= n < len(parameters))
    return tuple(sorted({*numbers, *by_name})), tuple(sorted({*given, *by_number}))


def _abstract(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def _signature(leaf: Leaf) -> tuple[Any, ...]:
    x = leaf.value
    return (tuple(x.shape), x.dtype, getattr(x, "weak_type", False), getattr(x, "sharding", None))


def _constrained(leaf: Leaf, mesh: jax.sharding.Mesh) -> Any:
    spec = leaf.spec
    if isinstance(spec, jax.sharding.PartitionSpec):
        spec = jax.sharding.NamedSharding(auto_mesh(mesh), spec)
    if not isinstance(spec, jax.sharding.NamedSharding):
        return leaf.value
    return jax.lax.with_sharding_constraint(leaf.value, spec)
