"""Programs in text of the mesh and shard dialects, for Python."""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import mlir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import SdyError
from sdy_jax.shard.local_plan import LocalPlan, local_plan
from sdy_jax.shard.local_program import LocalFunction, LocalSpecs
from sdy_jax.text.verified_module import text_module


class LocalProgram(LocalFunction):
    """A program on local arrays as a function of global ones, as `run_local` returns it. `plan` shows what it sends."""

    def plan(self, *arguments: Any) -> LocalPlan:
        """The plan of a call with arguments like these (arrays or `ShapeDtypeStruct`s); nothing runs.

        Example:
            >>> total = run_local('''
            ... mesh.mesh @m(shape = 2x4)
            ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
            ...   %0 = mesh.all_reduce %x on @m mesh_axes = [1] : tensor<3xf32> -> tensor<3xf32>
            ...   return %0 : tensor<3xf32>
            ... }''')
            >>> total.plan(jnp.ones((8, 3))).wire_bytes
            18.0
        """
        return local_plan(self, arguments)


def run_local(
    program: Program | str,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: LocalSpecs = None,
    out_specs: LocalSpecs = None,
) -> LocalProgram:
    """A program on local arrays, one that communicates by ops of the mesh or shard dialect, as a function.

    Args:
        program: its text, or what `sdy.load` or `sdy.loads` made of it. Ops of `stablehlo`, `chlo`, `arith` (on
            integers, and the usual ones on floats), `scf.if`, `scf.for`, `tensor.from_elements` and `tensor.extract`
            may stand between.
        mesh: the devices. Its axes are those of the program's mesh in order, and give `?` its size. By default the
            first devices of the machine; one `?` is then as large as they allow.
        in_specs, out_specs: the layouts of arguments and results on the mesh, a `PartitionSpec` for all or one each. By
            default arrays have a leading dimension with an entry per device, in the order of linear indices:
            `(devices, *local shape)`.

    Returns:
        A jitted function of global arrays, whose blocks are the program's arguments. It returns one array, or a tuple
        if the program has not just one result; its `plan(*arguments)` says what a call sends.

    Raises:
        SdyError: the text is wrong, with its line and column; the mesh does not fit the devices; an op cannot be run.
            On a call: arguments that do not fit, or sizes that were not known and break a rule of an op.

    Example:
        >>> total = run_local('''
        ... mesh.mesh @m(shape = 2x4)
        ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
        ...   %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
        ...   return %0 : tensor<3xf32>
        ... }''')
        >>> total(jnp.ones((8, 3))).shape
        (8, 3)

    Source: the mesh dialect reference, "Collective Communication Operations".
    """
    if isinstance(program, str):
        module = text_module(program, mlir.make_ir_context(), "<text>")
        return LocalProgram(module.operation, mesh, in_specs, out_specs)
    if not isinstance(program, Program):
        raise SdyError(
            f"run_local got a {type(program).__name__}; expected the text of a program, or what sdy_jax.load returned"
        )
    return LocalProgram(program.module, mesh, in_specs, out_specs)
