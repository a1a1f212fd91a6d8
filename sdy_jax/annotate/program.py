"""Programs: a StableHLO + sdy module with its mesh, its argument names and the arrays it closes over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.mlir import ir
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from sdy_jax.ir.extensions import Extension
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import entries_of, set_entries
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.device_orders import rewritten

if TYPE_CHECKING:
    from jax.export import Exported

    from sdy_jax.annotate.arguments import Leaf

LOADS: Extension[Callable[[str], Program]] = Extension("loads")
RUN_LOCAL: Extension[Callable[[Program, jax.sharding.Mesh | None, Any, Any], Any]] = Extension("run_local")


@dataclass(frozen=True, slots=True)
class Program:
    """A module whose `main` takes the closed-over `constants`, then one argument per input leaf.

    `inputs` and `outputs` are the paths of the leaves (`params['w1']`, `result[0]`); `in_info` and `out_info` have a
    shape and dtype per leaf, with jax's extended dtypes, of which the module only shows the raw words. `in_tree` is the
    structure of positional and keyword arguments.

    The `main` of a program that `sdy.load` found in a `jax.export` file is called as `exported` says; `partition`
    brings it to that form. The mesh of a loaded program is the one that its shardings are on, empty if it has none.

    `jaxpr` is the function that was traced, of the tracers among `constants` and of the input leaves.
    `unreduced_arguments` are the indices of the input leaves that are unreduced by their types (`Leaf.unreduced`),
    `automatic_arguments` and `automatic_results` those of the leaves whose layout the planner chooses (`AUTO`).
    `unchecked` says that checks of `checkify.check` were left out of the module, `is_typed` that the function was
    traced with types that show shardings, which `in_info` and `out_info` have. `host_arguments` and `host_results` are
    the indices of the input leaves and results that are in the memory of the host. `types_elsewhere` has the types of
    results that are on another mesh with Explicit axes, None for all others. `uncut` is the function's mesh, where
    `mesh` cuts the axes of it. `stated_results` are the results as `out_shardings` state them.

    Example:
        program = sdy.load("model.mlir")
        print(sdy.partition(program).plan(*program.in_info))

    See also:
        `load`, `loads`: make it.
        `partition`: takes it like a function.
    """

    module: ir.Operation
    mesh: Mesh
    mesh_name: str
    constants: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_info: tuple[Any, ...]
    out_info: tuple[Any, ...]
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    name: str = "main"
    exported: Exported | None = None
    jaxpr: Any = None
    unreduced_arguments: frozenset[int] = frozenset()
    automatic_arguments: frozenset[int] = frozenset()
    automatic_results: frozenset[int] = frozenset()
    unchecked: bool = False
    is_typed: bool = False
    host_arguments: frozenset[int] = frozenset()
    host_results: frozenset[int] = frozenset()
    uncut: Mesh | None = None
    types_elsewhere: tuple[NamedSharding | None, ...] = ()
    stated_results: tuple[Leaf, ...] = ()

    def on_uncut(self, sharding: TensorSharding) -> TensorSharding:
        """A sharding in axes of the function's mesh."""
        if self.uncut is None or sharding.mesh != self.mesh_name:
            return sharding
        return rewritten(sharding, self.mesh, self.uncut, self.mesh_name)

    def on_mesh(self, sharding: TensorSharding) -> TensorSharding:
        """A sharding that is in axes of the function's mesh in those of the program's."""
        if self.uncut is None or sharding.mesh != self.mesh_name:
            return sharding
        return rewritten(sharding, self.uncut, self.mesh, self.mesh_name)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of the function's mesh."""
        return (self.uncut or self.mesh).axis_names

    def axis_of_function(self, name: str) -> str:
        """The axis of the function's mesh that an axis of the program's is, or is a part of."""
        return name if self.uncut is None or name in self.uncut.sizes else name.rpartition(":")[0]

    @property
    def is_automatic(self) -> bool:
        """Whether the layouts of some arguments or results are left to the planner."""
        return bool(self.automatic_arguments or self.automatic_results)

    def with_module(self, module: ir.Operation) -> Program:
        """The same program at another stage."""
        return replace(self, module=module)

    def mark_donated(self, leaves: Collection[int]) -> None:
        """Says of argument leaves that results may take over their memory."""
        main = main_function(self.module)
        with self.module.context:
            entries = entries_of(main, "arg_attrs")
            for leaf in leaves:
                entries[len(self.constants) + leaf]["jax.buffer_donor"] = ir.BoolAttr.get(True)
            set_entries(main, "arg_attrs", entries)

    @staticmethod
    def from_text(text: str) -> Program:
        """The program that a string holds, in StableHLO, SDY and the mesh and shard dialects: as `loads`."""
        return LOADS.function(text)

    def run_local(self, mesh: jax.sharding.Mesh | None = None, in_specs: Any = None, out_specs: Any = None) -> Any:
        """A program on local arrays as a function of global ones: as `sdy_jax.shard.run_local`.

        Example:
            >>> total = Program.from_text('''
            ... mesh.mesh @m(shape = 2x4)
            ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
            ...   %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
            ...   return %0 : tensor<3xf32>
            ... }''').run_local()
            >>> total(jnp.ones((8, 3))).shape
            (8, 3)
        """
        return RUN_LOCAL.function(self, mesh, in_specs, out_specs)
