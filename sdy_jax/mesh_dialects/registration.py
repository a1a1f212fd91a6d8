"""What the mesh and shard dialects bring to the registries of other rooms."""

from __future__ import annotations

from sdy_jax.ir.verification import EXTENSIONS
from sdy_jax.mesh_dialects import (
    emitters,  # noqa: F401  (registers emitters, checks and rules)
    mesh_annotations,
)
from sdy_jax.mesh_dialects.simplify_mesh import simplify_mesh
from sdy_jax.mesh_dialects.stated_blocks import layout_notes
from sdy_jax.mesh_dialects.verification import verify_ops
from sdy_jax.plan.build import NOTE_SOURCES
from sdy_jax.shardy.passes.registry import PASSES

PASSES["import-mesh-annotations"] = mesh_annotations.import_mesh_annotations
PASSES["simplify-mesh"] = simplify_mesh
EXTENSIONS.append(verify_ops)
NOTE_SOURCES.append(layout_notes)
