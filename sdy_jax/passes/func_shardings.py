"""The shardings of calls and of the functions that they call, made to agree before and after propagation."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.operations import callee_of, calls_in, functions, just_after, main_function, module_meshes, returned_by
from sdy_jax.ir.stored_shardings import (
    filled,
    function_shardings,
    list_of,
    mesh_of,
    set_function_shardings,
    set_list,
    stating,
)
from sdy_jax.passes.constraints import current_sharding
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

_SHARDING = "sdy.sharding"


def propagate_from_func_to_call(module: ir.Operation) -> None:
    """A call without shardings gets those of the callee's results."""
    known, meshes = functions(module), module_meshes(module)
    for call in calls_in(module):
        if _SHARDING in call.attributes or callee_of(call) not in known:
            continue
        given = filled(function_shardings(known[callee_of(call)], "res_attrs"), list(call.results), meshes)
        set_list(call, _SHARDING, given or [])


def propagate_to_func_results(module: ir.Operation) -> None:
    """The result shardings of every function become those of the values that it returns; main keeps those it has.

    On a maximal mesh a value is whole on one device: that is nothing that a result would say.
    """
    meshes, main = module_meshes(module), main_function(module)
    for function in functions(module).values():
        found = [current_sharding(value) for value in returned_by(function)]
        found = [None if s is None or mesh_of(meshes, s).is_maximal else s for s in found]
        if function == main:
            kept = function_shardings(function, "res_attrs")
            found = [old or new for old, new in zip(kept, found, strict=True)]
        set_function_shardings(function, "res_attrs", dict(enumerate(found)))


def insert_func_call_reshards(module: ir.Operation) -> None:
    """Every call gets its callee's result shardings; a result that the callers had otherwise is resharded to that.

    A callee or a call without any sharding counts as fully closed, where the other one has some.
    """
    known, meshes = functions(module), module_meshes(module)
    for call in calls_in(module):
        if callee_of(call) in known:
            _agree(call, function_shardings(known[callee_of(call)], "res_attrs"), meshes)


def _agree(call: ir.Operation, returned: list[TensorSharding | None], meshes: dict[str, Mesh]) -> None:
    results = list(call.results)
    wanted = list_of(call, _SHARDING)
    given: list[TensorSharding | None] = [*(filled(returned, results, meshes) or (w and _closed(w) for w in wanted))]
    set_list(call, _SHARDING, given)
    for result, have, want in zip(results, given, wanted, strict=True):
        if have is not None and not are_equivalent(have, want or _closed(have)):
            place = just_after(result)
            reshard = stating("sdy.reshard", result, want or _closed(have), call.location, place)
            result.replace_all_uses_except(reshard.results[0], reshard)


def _closed(sharding: TensorSharding) -> TensorSharding:
    return TensorSharding.replicated(sharding.mesh, sharding.rank)


def are_equivalent(a: TensorSharding, b: TensorSharding) -> bool:
    """The same devices hold the same parts; unreduced axes do not count, because the call takes the callee's."""
    if a.is_fully_replicated or b.is_fully_replicated:
        return a.is_fully_replicated and b.is_fully_replicated  # on whatever mesh
    return a.axes == b.axes and a.mesh == b.mesh
