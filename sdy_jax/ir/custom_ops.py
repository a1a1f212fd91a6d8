"""Calls that nobody looks into: the functions that custom ops, callbacks and kernels stand for, and stated work."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from jax.extend.core import Jaxpr
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.base.errors import SdyError, ShardingError
from sdy_jax.ir.attributes import rule_to_attribute
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.operations import AnyOp, named
from sdy_jax.ir.shardings import OpShardingRule

# The work of calls that nobody looks into: kernels and functions of libraries, as numbers that stand in the module.
#
# What a call computes and what it moves between the device's memory and its cores is stated on its custom call, as a
# dictionary:
#
#     sdy_jax.work = {basis = "counted", bytes = 16777216, efficiency = 6.0e-1 : f64, flops = 34359738368}
#
# It is of the whole call, as its operands and results are; a device that runs a block of it performs its share
# (`lowering/ops/registry.py`). No function of the process is asked, so that a module which is read from text has the
# same prices.

WORK = "sdy_jax.work"
"""The attribute of a custom call that states its work."""


Uneven = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
"""Pairs of a factor and pairs: of a number of parts and the share of one of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one device has of a whole that factors of these sizes share out, in whole elements: the first one's, or
    that with the largest share along factors that are `uneven`.

    >>> Share(24.0, (3, 8))((2, 4))
    4.0
    """

    whole: float
    sizes: tuple[int, ...]
    uneven: Uneven = ()

    def __call__(self, shards: Sequence[int]) -> float:
        """That of a device where each factor is in so many shards."""
        split = [(f, n, count) for f, (n, count) in enumerate(zip(self.sizes, shards, strict=True)) if count > 1 and n]
        known = {factor: dict(shares) for factor, shares in self.uneven}
        return self.whole * math.prod([known.get(f, {}).get(count, -(-n // count) / n) for f, n, count in split])


@dataclass(frozen=True, slots=True)
class StatedWork:
    """What a whole call performs.

    Attributes:
        flops: its floating-point operations; a multiplication with an addition is two. Whole numbers are stored.
        bytes: those that it reads from the device's memory and writes to it, likewise; what stays near its cores counts
            once.
        efficiency: the share of the peak of arithmetic that such calls reach, above 0; where what it moves takes
            longer, that decides.
        basis: where the numbers are from, in words, with what they leave out.
        uneven: the factors of the op's rule along which parts perform unequal shares, as queries under a causal mask:
            per number of parts of one the share of that which performs most. Of others all perform alike.

    Raises:
        SdyError: a number that is negative or not finite, or an efficiency of 0.
    """

    flops: float
    bytes: float
    efficiency: float = 1.0
    basis: str = ""
    uneven: Uneven = ()

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "efficiency"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name == "efficiency" and not value):
                least = "above 0" if name == "efficiency" else "of at least 0"
                raise SdyError(f"the work of a call has {name}={value}; expected a finite number {least}")

    @property
    def operations(self) -> float:
        """The operations of the cost model that take as long: one is a multiplication with an addition, at peak."""
        return self.flops / 2 / self.efficiency

    def write(self, attributes: MutableMapping[str, ir.Attribute]) -> None:
        """States it among the attributes of a custom call, in the current context."""
        whole = ir.IntegerType.get_signless(64)
        stated: dict[str, ir.Attribute] = {
            "basis": ir.StringAttr.get(self.basis),
            "bytes": ir.IntegerAttr.get(whole, round(self.bytes)),
            "efficiency": ir.FloatAttr.get_f64(float(self.efficiency)),
            "flops": ir.IntegerAttr.get(whole, round(self.flops)),
        }
        if self.uneven:
            stated["uneven"] = ir.DictAttr.get({str(factor): _shares_said(shares) for factor, shares in self.uneven})
        attributes[WORK] = ir.DictAttr.get(stated)


def stated_work(op: AnyOp) -> StatedWork | None:
    """What a call states of its work; None where it states nothing."""
    found = op.attributes.get(WORK)
    if found is None:
        return None
    stated = ir.DictAttr(found)
    flops, size = (float(ir.IntegerAttr(stated[name]).value) for name in ("flops", "bytes"))
    share, basis = ir.FloatAttr(stated["efficiency"]).value, ir.StringAttr(stated["basis"]).value
    uneven = ir.DictAttr(stated["uneven"]) if "uneven" in stated else ()
    factors = sorted((int(entry.name), _shares(ir.DictAttr(entry.attr))) for entry in uneven)
    return StatedWork(flops, size, float(share), str(basis), tuple(factors))


def _shares_said(shares: Sequence[tuple[int, float]]) -> ir.DictAttr:
    return ir.DictAttr.get({str(count): ir.FloatAttr.get_f64(share) for count, share in shares})


def _shares(said: ir.DictAttr) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(entry.name), float(ir.FloatAttr(entry.attr).value)) for entry in said))


# The functions that custom ops and callbacks stand for. A module names them; they live as long as its MLIR context.

TARGET = "sdy_jax.custom_op"
"""The target of a custom op's call; its backend configuration is the key of the function."""

CALLBACK = "sdy_jax.callback"
"""That of a call of a Python function on the host, with whole values."""

CALLBACK_ON_BLOCKS = "sdy_jax.callback_on_blocks"
"""That of a call of one by every device, with its own blocks."""

INSPECTED = "sdy_jax.inspected"
"""That of a question for the sharding of a value; its function is called while the device's program is made."""

AFTER = "sdy_jax.after"
"""That of a value as it is, once others are there; `lowering/ops/elementwise.py`."""

ROUNDED = "sdy_jax.rounded"
"""That of a sum in another type; partial ones are rounded one by one, as a product in that type rounds them;
`lowering/ops/elementwise.py`."""

PARTITIONED = "sdy_jax.custom_partitioning"
"""That of one whose function is asked in which layouts it runs."""

KERNEL = "sdy_jax.kernel"
"""That of a kernel, which runs on blocks with a grid that is as much shorter."""

SHIFTED = "sdy_jax.shifted"
"""The attribute of a kernel that lists the factors of which it has to know the first index on a device."""

GROUP_SIZES = "sdy_jax.group_sizes"
"""Of a product of rows that are in groups: the operand that says how many rows each group has."""

WHOLE = "sdy_jax.whole"
"""That which says per factor of a rule why it is whole; empty for those that may be split, or where nobody knows."""

RAGGED = "ragged_all_to_all"
"""That of jax's exchange of rows among devices, of which each says when it runs how many it sends to which."""

ASKED = "sdy_jax.asked"
"""The attribute of such an op that runs in other layouts than were chosen: those that were, with which it was asked."""

Specs = tuple[PartitionSpec, ...]
"""One for each operand, or for each result."""


class Placed(NamedTuple):
    """What devices run on blocks in these layouts of operands and results, in axes of the mesh that was asked for;
    `traced`: its jaxpr, for the sizes of these axes and whether each result is read."""

    run: Callable[..., Sequence[Any]]
    operands: Specs
    results: Specs
    traced: Callable[[Mapping[str, int], Sequence[bool]], Jaxpr]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CustomOp:
    """What devices run: `run` takes local blocks and returns the local results as a list.

    `reduction`: how results combine along reduction factors; None: `run` does that itself. `padding`: what they have to
    hold behind the end of a dimension that does not divide; None: they are split evenly or not at all. `placed`: what
    gives `run` for the specs of operands and results, where it depends on them; for a mesh like `mesh`. `answers`: what
    those who asked remember of it.

    `partial`: pass-through factors of its rule along which results that do not have them are terms, to be combined by
    `reduction`, too. `reference`: what computes the same of whole arrays, in plain ops.
    """

    title: str
    run: Callable[..., Sequence[Any]]
    reduction: str | None = "sum"
    padding: Any | None = None
    placed: Callable[[AnyMesh, Specs, Specs], Placed] | None = None
    mesh: AnyMesh | None = None
    answers: dict[Any, Any] = field(default_factory=dict)
    partial: frozenset[int] = frozenset()
    reference: Callable[..., Sequence[Any]] | None = None


class KernelBlocks(NamedTuple):
    """The blocks on which a device runs a kernel.

    Attributes:
        shards: of each factor of its rule; empty for the whole kernel.
        firsts: the device's first index of each factor of which the kernel has to know it, an int32 scalar.
        results: the shapes of its blocks of results.
    """

    shards: tuple[int, ...]
    firsts: Mapping[int, Any]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Kernel:
    """A kernel: `run` takes the blocks' places and the operands' blocks, and returns the results' blocks.

    `work`: the work of the whole call, by the values of its first operands, so many `scalars`, where they are known.
    """

    title: str
    run: Callable[..., Sequence[Any]]
    work: Callable[[Sequence[Any]], StatedWork]
    scalars: int = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Callback:
    """What calls the host: `run` takes the operands and returns the results as a list.

    With whole values, the device at `position` of the mesh runs it for all; in a manual computation, one for each block
    along the manual axes. What is called with blocks has no results.

    `checked`: where `run` gives one more result at the end, which says that it failed, what takes that and the others
    on every device. `planned`: what is told once of the operand when it is planned: the source line, its type with its
    sharding, and that of a device's part.
    """

    title: str
    run: Callable[..., Sequence[Any]]
    position: int = 0
    checked: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None
    planned: Callable[[str, str, str], None] | None = None


Function = CustomOp | Kernel | Callback
"""What a call may stand for."""

_keys = itertools.count()
_by_key: WeakValueDictionary[str, Function] = WeakValueDictionary()
_key_of: WeakKeyDictionary[Function, str] = WeakKeyDictionary()
_of_context: WeakKeyDictionary[ir.Context, dict[str, Function]] = WeakKeyDictionary()
"""What keeps them: every context with a module that calls them."""
_lock = threading.Lock()


def call_function(
    target: str,
    op: Function,
    types: Sequence[ir.Type],
    xs: Sequence[ir.Value],
    rule: OpShardingRule | None = None,
    has_effect: bool = False,
    work: StatedWork | None = None,
    stated: Mapping[str, ir.Attribute] | None = None,
) -> list[ir.Value]:
    """Keeps a function as long as the current context, and emits the custom call that stands for it.

    It is split by a rule, or as its target is; one that has an effect is never erased. `work`: what the whole call
    performs, where that is known. `stated`: what else its attributes say.

    Returns:
        The results of the call.
    """
    context = ir.Context.current
    attributes: dict[str, ir.Attribute] = {
        "call_target_name": ir.StringAttr.get(target),
        "backend_config": ir.StringAttr.get(register(op, context)),
        "api_version": ir.Attribute.parse("2 : i32"),
        "has_side_effect": ir.BoolAttr.get(has_effect),
        **(stated or {}),
    }
    if rule is not None:
        attributes["sdy.sharding_rule"] = rule_to_attribute(replace(rule, is_custom=True), context)
    if work is not None:
        work.write(attributes)
    return list(ir.Operation.create("stablehlo.custom_call", types, list(xs), attributes).results)


def register(op: Function, context: ir.Context) -> str:
    """Keeps a function as long as a context; returns its key, which is one for all calls that stand for it."""
    with _lock:
        key = _key_of.setdefault(op, f"{op.title}:{next(_keys)}")
        _by_key[key] = op
        _of_context.setdefault(context, {})[key] = op
    return key


def kept_in(context: ir.Context) -> Collection[Function]:
    """The functions that a context keeps."""
    with _lock:
        return tuple(_of_context.get(context, {}).values())


def title_of(key: str) -> str:
    """What a key says about its function."""
    return key.rpartition(":")[0] or key


def function_of(key: str, context: ir.Context, where: str) -> Any:
    """The `CustomOp` or `Callback` of a call in a context, which keeps it from now on: the module may have been read
    from text.

    Raises:
        ShardingError: the function is not in this process, or not any more; `where` names the call.
    """
    with _lock:
        found = _by_key.get(key)
        if found is not None:
            _of_context.setdefault(context, {})[key] = found
    if found is None:
        raise ShardingError(
            f"{where}: the function `{title_of(key)}` of a custom_op or callback is not known here; a program with "
            "such functions runs in the process that traced it, as long as what it was traced for is there"
        )
    return found


OF_FUNCTIONS = (TARGET, PARTITIONED, KERNEL, CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED)
"""The targets of calls whose backend configuration is the key of a function."""

ASKED_ABOUT = (TARGET, PARTITIONED)
"""Those whose functions say how they may be split."""


def calls_of_functions(module: ir.Operation, targets: Collection[str] = OF_FUNCTIONS) -> list[ir.Operation]:
    """The calls in a module that stand for functions of this process, in order."""
    calls = named(module, "stablehlo.custom_call")
    return [call for call in calls if target_of(call) in targets]


def keys_in(module: ir.Operation) -> list[str]:
    """The keys of the functions that a module calls, each once, in order."""
    return keys_of(calls_of_functions(module))


def keys_of(calls: Iterable[ir.Operation]) -> list[str]:
    """The keys of the functions that are called, each once, in order."""
    return list(dict.fromkeys(ir.StringAttr(call.attributes["backend_config"]).value for call in calls))


def target_of(call: ir.Operation) -> str:
    """The target of a call."""
    target: str = ir.StringAttr(call.attributes["call_target_name"]).value
    return target


def reasons_of(call: AnyOp) -> tuple[str, ...]:
    """Why factors of a call's own rule are whole, as its attribute says; nothing of calls that have none."""
    stated = call.attributes.get(WHOLE)
    return () if stated is None else tuple(ir.StringAttr(reason).value for reason in ir.ArrayAttr(stated))


def set_keys(module: ir.Operation, keys: Mapping[str, str]) -> None:
    """Writes other keys in the place of those of the functions that a module calls.

    Raises:
        KeyError: one of them is not among those that are given.
    """
    for call in calls_of_functions(module):
        key = ir.StringAttr(call.attributes["backend_config"]).value
        call.attributes["backend_config"] = ir.StringAttr.get(keys[key], module.context)
