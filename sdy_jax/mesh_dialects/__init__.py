"""The mesh and shard dialects: their ops in programs in text, and the collectives and shardings of `sdy_jax.shard`.

Importing this package fills the registries of other rooms with what the dialects bring.
"""

from sdy_jax.ir.verification import EXTENSIONS
from sdy_jax.mesh_dialects import emitters  # noqa: F401  (registers emitters, checks and rules)
from sdy_jax.mesh_dialects.mesh_annotations import import_mesh_annotations
from sdy_jax.mesh_dialects.simplify_mesh import simplify_mesh
from sdy_jax.mesh_dialects.stated_blocks import layout_notes
from sdy_jax.mesh_dialects.verification import verify_ops
from sdy_jax.plan.build import NOTE_SOURCES
from sdy_jax.shardy.passes.registry import PASSES

PASSES["import-mesh-annotations"] = import_mesh_annotations
PASSES["simplify-mesh"] = simplify_mesh
EXTENSIONS.append(verify_ops)
NOTE_SOURCES.append(layout_notes)
