"""The house stands on its floors: rooms import only from rooms below; private jax names stay in one room."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT, TESTS

# Each room with the rooms that it may import from, all of them above it in this list: so there is no circle.
ROOMS = {
    "version": "",
    "errors": "",
    "files": "errors",
    "jax_internals": "errors",
    "representation": "errors",
    "ir": "errors jax_internals representation",
    "runtime": "errors jax_internals representation",
    "kernels": "jax_internals representation ir",
    "annotate": "errors jax_internals representation ir runtime kernels",
    "op_rules": "representation ir",
    "propagation": "representation ir op_rules",
    "verification": "representation ir",
    "text": "errors representation ir verification",
    "lowering.targets": "errors files representation runtime",
    "lowering.costs": "errors jax_internals representation runtime lowering.targets",
    "lowering.strips": "errors representation",
    "lowering.reshard": "errors representation runtime lowering.targets lowering.costs lowering.strips",
    "lowering.collectives": "errors jax_internals representation ir runtime lowering.targets",
    "lowering.emission": (
        "errors jax_internals representation ir runtime op_rules propagation lowering.targets lowering.strips "
        "lowering.reshard lowering.collectives"
    ),
    "lowering.strategies": (
        "errors jax_internals representation ir runtime op_rules lowering.targets lowering.strips "
        "lowering.collectives lowering.emission"
    ),
    "lowering.analysis": (
        "errors representation ir runtime annotate op_rules propagation verification lowering.targets "
        "lowering.costs lowering.reshard lowering.emission lowering.strategies"
    ),
    "lowering.interface": (
        "representation ir op_rules lowering.targets lowering.costs lowering.collectives lowering.analysis"
    ),
    "lowering.candidates": (
        "representation ir op_rules lowering.costs lowering.reshard lowering.strategies lowering.analysis"
    ),
    "lowering.proposal": "representation ir lowering.costs lowering.analysis lowering.interface lowering.candidates",
    "lowering.prepare": (
        "representation ir lowering.strips lowering.emission lowering.strategies lowering.analysis lowering.interface"
    ),
    "lowering.memory": "representation ir op_rules lowering.targets lowering.strategies lowering.analysis",
    "lowering.schedule": (
        "representation ir runtime op_rules lowering.targets lowering.costs lowering.collectives "
        "lowering.emission lowering.strategies lowering.analysis lowering.interface lowering.proposal "
        "lowering.prepare lowering.memory"
    ),
    "lowering.insert": (
        "errors representation ir op_rules propagation lowering.targets lowering.costs lowering.reshard "
        "lowering.emission lowering.strategies lowering.analysis lowering.interface lowering.candidates "
        "lowering.proposal lowering.prepare lowering.schedule"
    ),
    "lowering.model": (
        "representation ir op_rules lowering.targets lowering.costs lowering.reshard lowering.strategies "
        "lowering.analysis lowering.interface lowering.candidates lowering.proposal"
    ),
    "lowering.solve": "errors representation lowering.model",
    "lowering.whole_program": (
        "errors representation ir op_rules lowering.targets lowering.analysis lowering.interface "
        "lowering.candidates lowering.proposal lowering.prepare lowering.memory lowering.schedule lowering.insert "
        "lowering.model lowering.solve"
    ),
    "lowering.recomputation": (
        "representation ir op_rules lowering.targets lowering.strategies lowering.analysis lowering.interface "
        "lowering.candidates lowering.proposal lowering.prepare lowering.schedule lowering.whole_program"
    ),
    "lowering.blocking": (
        "representation ir op_rules lowering.targets lowering.collectives lowering.emission lowering.strategies "
        "lowering.analysis lowering.interface lowering.proposal lowering.prepare lowering.memory "
        "lowering.schedule lowering.insert lowering.whole_program lowering.recomputation"
    ),
    "lowering": "",
    "passes": "errors files jax_internals representation ir runtime annotate op_rules propagation text",
    "counterparts": (
        "errors jax_internals representation ir kernels annotate op_rules lowering.strategies lowering.analysis "
        "lowering.prepare lowering.blocking passes"
    ),
    "partitioning": (
        "errors jax_internals representation ir runtime op_rules propagation verification lowering.costs "
        "lowering.reshard lowering.emission lowering.strategies lowering.interface lowering.insert passes"
    ),
    "pipelines.schedules": "errors ir",
    "plan.record": "errors files jax_internals representation ir",
    "plan.page": "errors representation plan.record",
    "python_source": (
        "errors representation ir runtime annotate op_rules lowering.targets lowering.emission "
        "lowering.strategies lowering.interface"
    ),
    "plan.html": "errors files jax_internals plan.record",
    "plan.border": "representation ir runtime annotate lowering.targets lowering.costs lowering.interface",
    "plan.estimates": (
        "errors representation ir op_rules lowering.targets lowering.emission lowering.analysis "
        "lowering.interface lowering.memory"
    ),
    "plan.explanations": (
        "errors representation ir annotate op_rules propagation lowering.costs lowering.interface lowering.model "
        "lowering.solve lowering.whole_program passes plan.record plan.border"
    ),
    "plan.pinning": (
        "errors representation ir annotate op_rules lowering.targets lowering.costs lowering.collectives "
        "lowering.strategies lowering.interface lowering.candidates lowering.proposal lowering.insert plan.record "
        "plan.border"
    ),
    "plan.cache": (
        "version errors files jax_internals representation ir annotate lowering.interface lowering.recomputation "
        "plan.record plan.border plan.pinning"
    ),
    "plan": (
        "version errors files jax_internals representation ir annotate op_rules propagation lowering.targets "
        "lowering.costs lowering.collectives lowering.emission lowering.analysis lowering.interface lowering.proposal "
        "lowering.prepare lowering.memory lowering.whole_program lowering.recomputation lowering.blocking passes "
        "plan.record plan.page python_source plan.border plan.estimates plan.explanations plan.pinning plan.cache "
        "pipelines.schedules"
    ),
    "plan.fixes": (
        "errors representation ir annotate lowering.emission lowering.interface plan.border plan.explanations plan"
    ),
    "shard": (
        "errors jax_internals representation ir runtime annotate op_rules verification text lowering.strips "
        "lowering.reshard lowering.collectives lowering.emission lowering.strategies lowering.interface passes "
        "plan.record plan.border plan.estimates plan.explanations plan"
    ),
    "loading": (
        "errors jax_internals representation ir runtime annotate verification text lowering.emission passes shard"
    ),
    "plan.measuring": (
        "errors representation ir lowering.targets lowering.emission lowering.interface plan.page plan.estimates plan"
    ),
    "processes": "errors jax_internals representation ir runtime plan.estimates plan",
    "contracts": (
        "errors jax_internals representation ir op_rules lowering.interface plan.record plan.explanations plan"
    ),
    "calls": (
        "errors jax_internals representation ir runtime annotate lowering.targets lowering.costs "
        "lowering.emission lowering.interface plan.record plan.border plan.estimates plan.cache plan shard loading "
        "processes contracts"
    ),
    "spec_trees": "errors jax_internals representation annotate",
    "pipelines": "errors jax_internals representation annotate pipelines.schedules",
    "equivalence": (
        "errors files jax_internals representation ir runtime annotate op_rules lowering.targets lowering.costs "
        "lowering.emission lowering.strategies lowering.analysis passes counterparts plan.page plan loading calls"
    ),
    "pytest_plugin": "",
    "testing": "errors jax_internals lowering.costs plan.record plan calls equivalence pytest_plugin",
    "commands": (
        "version errors files jax_internals representation ir runtime annotate verification text lowering.targets "
        "passes plan.record plan.estimates plan.cache plan shard loading contracts calls equivalence"
    ),
    "registration": (
        "ir annotate lowering.strategies passes partitioning plan.record plan.page plan.html plan plan.fixes "
        "shard loading plan.measuring"
    ),
    "__main__": "commands",
    "dialect": "representation annotate",
    "__init__": (
        "version errors representation annotate lowering.costs passes counterparts plan.record plan.html plan shard "
        "loading contracts calls spec_trees pipelines.schedules pipelines equivalence testing registration dialect"
    ),
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, _, files in os.walk(ROOT / "sdy_jax", followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = path.relative_to(ROOT / "sdy_jax").with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The longest room that a module is in; the top of the package is a room of its own."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), "__init__" if module in ("", "__init__") else module)


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


def test_rooms_are_listed_from_the_ground_up() -> None:
    seen: set[str] = set()
    for room, below in ROOMS.items():
        assert set(below.split()) <= seen, room
        seen.add(room)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_from_the_rooms_below_that_it_names(module: str) -> None:
    room = room_of(module)
    assert room in ROOMS, f"{module} is in no room"
    taken = {room_of(name) for name in imports(MODULES[module])} - {room}
    assert taken <= set(ROOMS[room].split())


def test_there_is_no_circle_of_modules() -> None:
    """Not even of those that only type checkers import."""
    left = {name: {other for other in imports(path) if other in MODULES} - {name} for name, path in MODULES.items()}
    while free := {name for name, taken in left.items() if not taken & left.keys()}:
        left = {name: taken for name, taken in left.items() if name not in free}
    assert not left


def test_what_rooms_offer_to_rooms_below_is_imported_where_it_is_registered() -> None:
    """So that the list of rooms has it, and type checkers see whether it is what the room below declares."""
    from sdy_jax.registration.extensions import OFFERED, REGISTERING

    seen = set(imports(MODULES["registration.extensions"]))
    assert {name.removeprefix("sdy_jax.") for name in (*OFFERED.values(), *REGISTERING)} <= seen


def test_only_the_faces_stand_at_the_top() -> None:
    top = {path.name for path in (ROOT / "sdy_jax").glob("*.py")}
    assert top == {"__init__.py", "__main__.py", "dialect.py", "errors.py", "testing.py", "version.py"}


def test_every_room_says_what_lives_there() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_private_names_of_jax_are_used_in_one_room() -> None:
    users = {name for name, path in MODULES.items() if "jax._src" in path.read_text()}
    assert {room_of(name) for name in users} == {"jax_internals"}


def test_jit_is_asked_for_in_one_module() -> None:
    """`jax.jit` may be replaced at any time, by `partition` for example: then what is called here would come back."""
    asking = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asking |= {name} if (node.value.id, node.attr) == ("jax", "jit") else set()
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
                asking |= {name} if any(alias.name == "jit" for alias in node.names) else set()
    assert asking == {"jax_internals.jit"}


def test_the_representation_does_not_know_mlir_but_for_attributes() -> None:
    knowing = {name for name, path in MODULES.items() if room_of(name) == "representation"}
    assert {name for name in knowing if "jax.extend" in MODULES[name].read_text()} == {"representation.attributes"}


def test_only_targets_say_which_devices_there_are() -> None:
    """Planning asks the target instead: a new accelerator is one module."""
    platforms, saying = {"cpu", "gpu", "tpu"}, set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())) if name.startswith("lowering.") else ():
            said = node.value if isinstance(node, ast.Constant) else node.arg if isinstance(node, ast.keyword) else ""
            saying |= {name} if said in platforms else set()
    assert not {name for name in saying if not name.startswith("lowering.targets.")}


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
        "commands.described_platforms",
        "jax_internals.asked_devices",
        "jax_internals.pallas",
        "jax_internals.platform_rules",
        "kernels.library_functions",
        "lowering.targets.registry",
        "lowering.targets.tpu",
        "op_rules.registry",
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
