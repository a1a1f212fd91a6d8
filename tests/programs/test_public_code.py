"""Programs as people write them with public libraries run as they are, `jax.jit` replaced by `sdy.partition(mesh=...)`.

Each file in `public_code/` is such a program. It runs twice on eight devices: as it stands, and with the text `jax.jit`
replaced by `partition`, which is `sdy.partition` with the mesh; parameters are sharded, batches split. Numbers agree.
The libraries come with `pip install -e '.[test,public]'`; programs whose libraries are not there are left out.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

PROGRAMS = sorted(Path(__file__).parent.joinpath("public_code").glob("*.py"))
pytestmark = pytest.mark.public


def libraries(program: Path) -> set[str]:
    """The packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def results(source: str, name: str, mesh: jax.sharding.Mesh) -> Any:
    """What a program's `main` returns on a mesh: parameters lie as `sdy.fsdp` says, batches along `data`."""
    names: dict[str, Any] = {"__name__": name, "partition": partial(sdy.partition, mesh=mesh)}
    exec(compile(source, name, "exec", dont_inherit=True), names)

    def placed(params: Any) -> Any:
        specs = sdy.fsdp(params, "model", mesh=mesh, min_size=64)
        return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def batched(x: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P("data")))

    return names["main"](placed, batched)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_public_code_runs_as_under_jit(program: Path, mesh: Any) -> None:
    for library in sorted(libraries(program)):
        pytest.importorskip(library)
    source = program.read_text()
    assert "jax.jit" in source
    expected = results(source, program.stem, mesh)
    ours = results(source.replace("jax.jit", "partition"), program.stem, mesh)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for own, jits in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(jits), rtol=2e-3, atol=2e-4)
