"""The house stands on its floors: rooms import only from rooms below; private jax names stay in one room."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from places import ROOT, TESTS

# From the ground up: a room imports from rooms in front of it only, so there is no circle.
ROOMS = (
    "base",
    "ir",
    "runtime",
    "annotate",
    "shardy",
    "lowering.targets",
    "lowering.reshard",
    "lowering.ops",
    "lowering.planner",
    "plan",
    "mesh_dialects",
    "calls",
    "equivalence",
    "pipelines",
    "cli",
)
FACES = {"__init__", "__main__", "dialect", "errors", "passes", "shard", "testing"}
"""What users import by name: modules at the top of the package."""


def modules() -> dict[str, Path]:
    found = {}
    for folder, _, files in os.walk(ROOT / "sdy_jax", followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = path.relative_to(ROOT / "sdy_jax").with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The room that a module is in, or the face that it is."""
    face = module.partition(".")[0] or "__init__"
    return next((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), face)


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "sdy_jax":
            inside = (node.module or "").partition(".")[2]
            for alias in node.names:
                whole = f"{inside}.{alias.name}".removeprefix(".")
                yield whole if whole in MODULES else inside
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "sdy_jax")


def test_rooms_import_from_rooms_below() -> None:
    for module, path in MODULES.items():
        room, taken = room_of(module), {room_of(name) for name in imports(path)}
        if room in ROOMS and room != "cli":
            assert taken <= set(ROOMS[: ROOMS.index(room) + 1]), module
        else:
            assert room in {*ROOMS, *FACES, "lowering"} and taken <= {*ROOMS, *FACES}, module


def test_a_name_is_that_of_one_class() -> None:
    """Of those that other modules may import: a reader who knows one is not to meet another."""
    seen: dict[str, Path] = {}
    for path in set(modules().values()):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert seen.setdefault(node.name, path) == path, (node.name, path, seen[node.name])


def test_there_is_no_circle_of_modules() -> None:
    """Not even of those that only type checkers import."""
    left = {name: {other for other in imports(path) if other in MODULES} - {name} for name, path in MODULES.items()}
    while free := {name for name, taken in left.items() if not taken & left.keys()}:
        left = {name: taken for name, taken in left.items() if name not in free}
    assert not left


def test_what_rooms_offer_to_rooms_below_is_imported_where_it_is_registered() -> None:
    """So that the list of rooms has it, and type checkers see whether it is what the room below declares."""
    from sdy_jax.cli.extensions import OFFERED, REGISTERING

    seen = set(imports(MODULES["cli.extensions"]))
    assert {name.removeprefix("sdy_jax.") for name in (*OFFERED.values(), *REGISTERING)} <= seen


def test_only_the_faces_stand_at_the_top() -> None:
    top = {path.name for path in (ROOT / "sdy_jax").glob("*.py")}
    assert top == {f"{face}.py" for face in FACES}


def test_every_room_says_what_lives_there() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_private_names_of_jax_are_used_in_one_room() -> None:
    users = {name for name, path in MODULES.items() if "jax._src" in path.read_text()}
    assert {room_of(name) for name in users} == {"base"}


def test_jit_is_asked_for_in_one_module() -> None:
    """`jax.jit` may be replaced at any time, by `partition` for example: then what is called here would come back."""
    asking = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asking |= {name} if (node.value.id, node.attr) == ("jax", "jit") else set()
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
                asking |= {name} if any(alias.name == "jit" for alias in node.names) else set()
    assert asking == {"base.jax_calls"}


def test_shardings_meshes_and_rules_do_not_know_mlir() -> None:
    """They are values; `attributes` reads them from MLIR and writes them there."""
    values = ("ir.meshes", "ir.shardings", "ir.shardings", "ir.collectives")
    assert not [name for name in values if "jax.extend" in MODULES[name].read_text()]


def test_only_targets_say_which_devices_there_are() -> None:
    """Planning asks the target instead: a new accelerator is one module. Plain functions that are read, as references
    and single ops of local programs, are lowered for CPUs, whatever they are planned for."""
    platforms, saying = {"cpu", "gpu", "tpu"}, set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())) if name.startswith("lowering.") else ():
            said = node.value if isinstance(node, ast.Constant) else node.arg if isinstance(node, ast.keyword) else ""
            saying |= {name} if said in platforms else set()
    reading = {"lowering.planner.references.reference", "lowering.planner.stages.local"}
    assert not {name for name in saying - reading if not name.startswith("lowering.targets.")}


def words_in_code(path: Path) -> Iterator[str]:
    """Names and texts of a module, but for docstrings and comments."""
    tree = ast.parse(path.read_text())
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value
        yield from (str(getattr(node, field)) for field in ("id", "attr", "arg", "name") if hasattr(node, field))


def test_targets_and_the_table_of_described_platforms_speak_of_tpus() -> None:
    """Besides, an op of Pallas has them in its name, functions of JAX in their modules', and jax tables of what it
    lowers by platform."""
    speaking = {
        name
        for name, path in MODULES.items()
        if any("tpu" in word.lower().replace("output", "") for word in words_in_code(path))
    }
    assert speaking == {
        "base.jax_lowering",
        "base.jax_primitives",
        "base.jax_tracing",
        "cli.main",
        "ir.kernels.libraries",
        "lowering.targets.target",
        "lowering.targets.tpu",
        "shardy.rules.registry",
    }


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Of two with one name pytest runs the first, and reports an error that is easily read over."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_tests_share_what_is_in_helpers() -> None:
    """Not what is in other tests, which would have to be run, moved and read together with them."""
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not tests & set(names), path


def test_programs_that_tests_run_are_there() -> None:
    """Those of slow tests, too, which are seldom run."""
    folders = {"HELPERS": TESTS / "helpers", "SCRIPTS": ROOT / "scripts", "EXAMPLES": ROOT / "examples"}
    for path in TESTS.rglob("*.py"):
        for folder, name in re.findall(rf'\b({"|".join(folders)}) / "([^"]+)"', path.read_text()):
            assert (folders[folder] / name).exists(), f"{path}: {folder} / {name}"
