"""What the mesh and shard dialects bring to the registries of other rooms."""

from __future__ import annotations

from sdy_jax.passes.registry import PASSES
from sdy_jax.plan.build import NOTE_SOURCES
from sdy_jax.shard import (
    emitters,  # noqa: F401  (registers emitters and checks)
    stated_blocks,  # noqa: F401  (registers a fold)
)
from sdy_jax.shard import rules as mesh_collective  # noqa: F401  (registers rules)
from sdy_jax.shard.layout_notes import layout_notes
from sdy_jax.shard.passes import mesh_annotations
from sdy_jax.shard.passes.simplify_mesh import simplify_mesh
from sdy_jax.shard.verification import verify_ops
from sdy_jax.verification.module import EXTENSIONS

PASSES["import-mesh-annotations"] = mesh_annotations.import_mesh_annotations
PASSES["simplify-mesh"] = simplify_mesh
EXTENSIONS.append(verify_ops)
NOTE_SOURCES.append(layout_notes)
