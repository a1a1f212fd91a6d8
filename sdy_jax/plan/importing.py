"""A traced program as propagation takes it."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import copied
from sdy_jax.passes.common_mesh import put_on_mesh
from sdy_jax.passes.pipelines import plan_import
from sdy_jax.passes.programs import run_pipeline
from sdy_jax.plan.dump import Dump, ignore


def imported(program: Program, dump: Dump = ignore) -> ir.Operation:
    """A copy of a program's module after import; `dump`: is called with the module after each pass."""
    module = copied(program.module)
    run_pipeline(module, plan_import(), after=dump)
    put_on_mesh(module, program.mesh_name)
    return module
