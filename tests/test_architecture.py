"""The house stands on its floors: no module imports from one above its own; private jax names stay in one place."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = {"sdy_jax": "sdy_jax", "lowering": "sdy_jax.lowering", "runtime": "sdy_jax.runtime"}

# The longest matching prefix counts.
FLOORS = {
    "sdy_jax.errors": 0,
    "sdy_jax.representation": 1,
    "sdy_jax.graph": 2,
    "sdy_jax.symbols": 2,
    "sdy_jax.rules": 2,
    "sdy_jax.arguments": 2,
    "sdy_jax.argument_errors": 2,
    "sdy_jax.statics": 2,
    "sdy_jax.locations": 2,
    "sdy_jax.own_frames": 2,
    "sdy_jax.user_function": 2,
    "sdy_jax.jax_internals": 2,
    "sdy_jax.extensions": 0,
    "sdy_jax.verified_text": 3,
    "sdy_jax.drop_annotations": 5,
    "sdy_jax.annotate": 2,
    "sdy_jax.program": 2,
    "sdy_jax.diagnostics": 2,
    "sdy_jax.fatal_mistakes": 2,
    "sdy_jax.positions": 2,
    "sdy_jax.source_text": 3,
    "sdy_jax.dialects.assembly": 2,
    "sdy_jax.dialects.cursor": 2,
    "sdy_jax.dialects.elements": 2,
    "sdy_jax.dialects.kinds": 2,
    "sdy_jax.dialects.meshes": 2,
    "sdy_jax.dialects.ops": 2,
    "sdy_jax.dialects.pairs": 2,
    "sdy_jax.dialects.printer": 2,
    "sdy_jax.dialects.reader": 2,
    "sdy_jax.dialects.shardings": 2,
    "sdy_jax.dialects.source": 2,
    "sdy_jax.dialects.statement": 2,
    "sdy_jax.dialects.verification": 2,
    "sdy_jax.dialects.view": 2,
    "sdy_jax.verification": 3,
    "sdy_jax.artifacts": 3,
    "sdy_jax.symbolic_sizes": 3,
    "sdy_jax.runtime": 2,
    "sdy_jax.propagation": 3,
    "sdy_jax.lowering": 3,
    "sdy_jax.passes": 4,
    "sdy_jax.dialects": 4,
    "sdy_jax.plan": 5,
    "sdy_jax.shard": 5,
    "sdy_jax.loading": 5,
    "sdy_jax.loaded_function": 5,
    "sdy_jax.derivatives": 5,
    "sdy_jax.planned_call": 5,
    "sdy_jax.call": 5,
    "sdy_jax.dispatch": 5,
    "sdy_jax.api": 6,
    "sdy_jax.opt": 6,
    "sdy_jax.commands": 6,
    "sdy_jax.cli": 6,
    "sdy_jax.terminal": 1,
    "sdy_jax.bug_report": 1,
    "sdy_jax.testing": 7,
    "sdy_jax.__main__": 7,
    "sdy_jax": 8,
}


def floor_of(module):
    parts = module.split(".")
    return next(FLOORS[p] for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in FLOORS)


def module_name(path):
    wing, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((WINGS[wing], *(part for part in rest if part != "__init__")))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


FILES = sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_come_from_the_same_floor_or_below(path):
    own = floor_of(module_name(path))
    above = [m for m in imports(path) if m.split(".")[0] == "sdy_jax" and m != "sdy_jax" and floor_of(m) > own]
    assert not above


def test_private_names_of_jax_are_used_in_one_module():
    users = [path.name for path in FILES for module in imports(path) if module.startswith("jax._src")]
    assert set(users) <= {"jax_internals.py"}


def test_the_representation_does_not_know_mlir_but_for_attributes():
    knowing = {path.name for path in FILES if path.parent.name == "representation" and "jax.extend" in path.read_text()}
    assert knowing == {"attributes.py"}
