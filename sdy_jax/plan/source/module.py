"""The whole module: imports, mesh, what one device runs, and the function of global arrays with its arguments and
results.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, PyTreeDef, SequenceKey

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import by_argument
from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.graph import Value as GlobalValue
from sdy_jax.ir.jax_shardings import type_text
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.plan.source import control_flow, elementwise, reductions  # noqa: F401  (each registers its printers)
from sdy_jax.plan.source.blocks import INDENT, BlockWriter
from sdy_jax.plan.source.expressions import TEXT_LENGTH, Expr, dtype_text, formatted, shape_text, spec_code, tuple_text
from sdy_jax.plan.source.loops import with_layers, with_plain_loops
from sdy_jax.plan.source.names import Sources, identifier
from sdy_jax.plan.source.steps import StepBlock, without_dead_steps
from sdy_jax.plan.source.trace import DeviceFunction, trace

# Global arrays in and out: where the leaves of the arguments are found, and how the results are put together.


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of the function of global arrays, and an expression for each leaf of its arguments."""

    positional: tuple[str, ...]
    named: tuple[str, ...]
    leaves: tuple[str, ...]
    trees: tuple[tuple[PyTreeDef, str], ...]
    """The parts of the arguments that are no tuples, lists or dictionaries, by their structure."""

    @property
    def text(self) -> str:
        return ", ".join([*self.positional, *(["*", *self.named] if self.named else [])])


def signature_of(tree: PyTreeDef, paths: Sequence[str]) -> Signature:
    """The signature of a function of positional and keyword arguments; `paths` say what the user calls the leaves."""
    args, kwargs = jax.tree.unflatten(tree, map(_Index, range(tree.num_leaves)))
    names: list[str] = []
    for number, arg in enumerate(args):
        found = jax.tree.leaves(arg)
        root = identifier(paths[found[0].number].partition("[")[0].partition(".")[0]) if found else f"arg{number}"
        names.append(root if root not in names and root not in kwargs else f"{root}_{number}")
    roots = [*zip(names, args, strict=True), *kwargs.items()]
    leaves = {leaf: text for root, value in roots for leaf, text in _leaves(root, value)}
    trees = tuple(found for root, value in roots for found in _special(root, value))
    return Signature(tuple(names), tuple(kwargs), tuple(leaves[i] for i in range(tree.num_leaves)), trees)


def _leaves(root: str, value: Any) -> Iterator[tuple[int, str]]:
    """Each leaf of an argument, and an expression for it."""
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(value)):
        steps = [_step(key) for key in path]
        yield leaf.number, f"jax.tree.leaves({root})[{number}]" if None in steps else root + "".join(map(str, steps))


def _step(key: Any) -> str | None:
    """One key of a path, as Python takes it; None for what only pytrees know."""
    if isinstance(key, DictKey) and isinstance(key.key, (str, int)):
        return f"[{_quoted(key.key)}]"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}"
    return None


def _quoted(key: str | int) -> str:
    return f'"{key}"' if isinstance(key, str) and key.isprintable() and not set(key) & set('"\\') else repr(key)


def _special(root: str, value: Any) -> Iterator[tuple[PyTreeDef, str]]:
    if type(value) in (tuple, list):
        for number, item in enumerate(value):
            yield from _special(f"{root}[{number}]", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _special(f"{root}[{_quoted(key)}]", item)
    elif value is not None and not isinstance(value, _Index):
        yield jax.tree.structure(value), root


def result_text(tree: PyTreeDef, leaves: Sequence[str], known: Sequence[tuple[PyTreeDef, str]]) -> str:
    """The results in their tree. What is no tuple, list or dictionary is made like an argument of its structure, or is
    a tuple of its leaves where there is none."""
    return _tree_text(jax.tree.unflatten(tree, [_Leaf(text) for text in leaves]), known)


@dataclass(frozen=True, slots=True)
class _Leaf:
    text: str


@dataclass(frozen=True, slots=True)
class _Index:
    """A leaf by its number; no number itself, of which a node may make an array."""

    number: int


def _tree_text(value: Any, known: Sequence[tuple[PyTreeDef, str]]) -> str:
    if isinstance(value, _Leaf):
        return value.text
    if value is None:
        return "None"
    if type(value) is dict:
        return f"{{{', '.join(f'{_quoted(key)}: {_tree_text(item, known)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(_tree_text(item, known) for item in value)}]"
    if type(value) is tuple:
        return tuple_text([_tree_text(item, known) for item in value]) if value else "()"
    leaves = [leaf.text for leaf in jax.tree.leaves(value)]
    structure = jax.tree.structure(value)
    alike = next((text for tree, text in known if tree == structure), None)
    if alike is not None:
        return f"jax.tree.unflatten(jax.tree.structure({alike}), [{', '.join(leaves)}])"
    return tuple_text(leaves) if leaves else "()"


# Functions that a module brings along, where jax has none.

_STABLEHLO = '''
stablehlo_p = Primitive("stablehlo")
stablehlo_p.multiple_results = True
stablehlo_p.def_abstract_eval(lambda *_, text, types: [jax.core.ShapedArray(s, jnp.dtype(d)) for s, d in types])


def _lowered(ctx, *operands, text, types):
    """Puts a module beside the one that jax makes, and calls its function."""
    context = ctx.module_context
    module = ir.Module.parse(text, context.context)
    made = ir.FunctionType(ir.TypeAttr(module.body.operations[0].attributes["function_type"]).value).results
    name = mlir.merge_mlir_modules(context.module, "stablehlo_op", module, context.symbol_table)
    return list(func.CallOp(list(made), ir.FlatSymbolRefAttr.get(name), list(operands)).results)


mlir.register_lowering(stablehlo_p, _lowered)


def stablehlo(text, types, *operands):
    """Runs an op that lax has no function for, as it stands in StableHLO; `types` are shapes and dtypes of results."""
    return stablehlo_p.bind(*operands, text=text, types=types)
'''

HELPERS = {
    "stablehlo": (
        ("from jax.extend.core import Primitive", "from jax.extend.mlir import ir"),
        ("from jax.extend.mlir.dialects import func", "from jax.interpreters import mlir"),
        _STABLEHLO,
    )
}
"""Per name: what it imports, and its text."""


def helper_imports(names: Collection[str]) -> list[str]:
    return sorted(line for name in names for lines in HELPERS[name][:-1] for line in lines)


_LAPACK = "\n\njax.jit(lax.linalg.cholesky).lower(jnp.eye(1))  # jax loads LAPACK when it first lowers such an op"


def helper_text(names: Collection[str], mlir: Collection[str]) -> str:
    """The functions, and what some ops of StableHLO that they run need."""
    text = "\n\n".join(HELPERS[name][-1].strip("\n") for name in sorted(names))
    return text + _LAPACK if any("lapack_" in each for each in mlir) else text


_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+')


def wrapped(mlir: str) -> str:
    """MLIR's text in lines that are no longer than those of a module, but for what has no spaces."""
    return "\n".join(line if len(line) <= TEXT_LENGTH else _wrapped_line(line) for line in mlir.strip().splitlines())


def _wrapped_line(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [indent]
    for word in _WORD.findall(line):
        if len(lines[-1]) + len(word) > TEXT_LENGTH:
            lines.append(f"{indent}    ")
        lines[-1] += f"{'' if lines[-1].isspace() or not lines[-1] else ' '}{word}"
    return "\n".join(lines)


# Arrays of the module: small ones in its text, large ones in a file beside it.

LARGEST_IN_TEXT = 1024
"""Elements of an array that is written as text. Chosen: larger ones are no page that one reads."""


def constants_text(arrays: Mapping[str, np.ndarray]) -> tuple[str, dict[str, np.ndarray]]:
    """The assignments of the arrays, and those of them that they load from a file."""
    loaded = {name: x for name, x in arrays.items() if x.size > LARGEST_IN_TEXT}
    lines = ['ARRAYS = np.load(Path(__file__).with_suffix(".npz"))'] if loaded else []
    for name, x in arrays.items():
        lines += [_loaded(name, x)] if name in loaded else [_written(name, x)]
    return "\n".join(lines), {name: stored(x) for name, x in loaded.items()}


def stored(x: np.ndarray) -> np.ndarray:
    """The array in a dtype that files of numpy keep: bits, for those of ml_dtypes."""
    return x if x.dtype.isbuiltin == 1 else x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _loaded(name: str, x: np.ndarray) -> str:
    view = "" if x.dtype.isbuiltin == 1 else f".view({dtype_text(x.dtype)})"
    return f'{name} = ARRAYS["{name}"]{view}'


def _written(name: str, x: np.ndarray) -> str:
    """The elements in lines, which a formatter leaves as they are."""
    flat = stored(x).reshape(-1)
    words = [repr(item) for item in flat.tolist()]
    lines = textwrap.wrap(", ".join(words), TEXT_LENGTH, break_long_words=False, break_on_hyphens=False)
    dtype = dtype_text(flat.dtype).replace("jnp", "np")
    view = "" if x.dtype.isbuiltin == 1 else f".view({dtype_text(x.dtype)})"
    body = "\n".join(f"    {line}" for line in lines)
    elements = body.replace("nan", "np.nan").replace("inf", "np.inf")
    return f"# fmt: off\n{name} = np.array([\n{elements}\n], {dtype}){view}.reshape({shape_text(x.shape)})\n# fmt: on"


# The whole module: imports, mesh, what one device runs, and the function of global arrays.


@dataclass(frozen=True, slots=True)
class PythonModule:
    """The text of a module, and the arrays that it loads from a file beside it."""

    text: str
    arrays: dict[str, np.ndarray]


def python_module(
    name: str,
    headline: str,
    program: Program,
    results: Sequence[TensorSharding],
    collectives: Sequence[CollectiveRecord],
    source: str = "",
) -> PythonModule:
    """The module of a partitioned program.

    Args:
        name: what the function is called.
        headline: what the module's docstring says of the plan.
        program: the partitioned program.
        results: the shardings of its results.
        collectives: what the plan knows of its collectives.
        source: the line that states the shardings of arguments and results.

    Raises:
        UnsupportedError: something in the program has no text: a callback to the host, a value of an outer trace.
    """
    _check(name, program)
    graph = Graph(program.module)
    traced = trace(graph, program.mesh, results)
    sizes = dict(zip(traced.mesh.axis_names, traced.mesh.shape, strict=True))
    sources = Sources(traced.ops, collectives, program.mesh, sizes, _is_wide(traced.body), source)
    return _Writing(identifier(name), headline, program, graph, traced, sources, tuple(results)).module()


def _check(name: str, program: Program) -> None:
    if any(isinstance(constant, jax.core.Tracer) for constant in program.constants):
        raise UnsupportedError(f"{name} closes over values of an outer trace, which a module of its own does not have")
    if program.unreduced_arguments:
        path = program.inputs[min(program.unreduced_arguments)]
        raise UnsupportedError(f"`{path}` holds partial sums by its type, which a module of its own cannot take")


@dataclass(slots=True)
class _Writing:
    name: str
    headline: str
    program: Program
    graph: Graph
    traced: DeviceFunction
    sources: Sources
    results: tuple[TensorSharding, ...]

    def module(self) -> PythonModule:
        on_device = self.sources.names.fresh(f"{self.name}_on_device")
        self.name = self.sources.names.fresh(self.name)
        body = "\n".join(self._on_device(on_device))
        around = "\n".join(self._of_arrays(on_device))
        constants, arrays = constants_text(self.sources.constants.arrays)
        helpers = helper_text(self.sources.helpers, self.sources.texts.texts)
        parts = [constants, helpers, self._texts(), body, around]
        text = "\n\n\n".join([*filter(None, [f"{self._head(bool(arrays))}\n\n{self._mesh()}", *parts])])
        return PythonModule(formatted(self._with_imports(text) + "\n"), arrays)

    def _head(self, loads: bool) -> str:
        lines = [
            f'"""{self.headline.removeprefix("plan of ")}.',
            "",
            "What every device of the mesh runs, as sdy_jax planned it. It needs jax and numpy, and as many devices as",
            f"the mesh has. `{self.name}` takes and returns whole arrays.",
        ]
        if loads:
            lines += ["", "Arrays that the function closes over are in the file of this name that ends in `.npz`."]
        return "\n".join([*lines, '"""'])

    def _with_imports(self, text: str) -> str:
        """The text with the imports that it uses after its docstring."""
        docstring, _, rest = text.partition('"""\n\nMESH')
        used = [line for line, name in _IMPORTS.items() if re.search(rf"(?<!\w){name}", rest)]
        members = sorted([line for line in used if line.startswith("from")] + helper_imports(self.sources.helpers))
        path = ["from pathlib import Path", ""] if "Path(" in rest else []
        lines = [*path, "import jax", *(line for line in used if line.startswith("import")), *members]
        return f'{docstring}"""\n\n' + "\n".join(lines) + "\n\nMESH" + rest

    def _texts(self) -> str:
        found = self.sources.texts.texts.items()
        return "\n\n".join(f'{name} = r"""\n{wrapped(text)}\n"""' for text, name in found)

    def _mesh(self) -> str:
        names = tuple_text([f'"{name}"' for name in self.traced.mesh.axis_names])
        types = f"(jax.sharding.AxisType.Auto,) * {len(self.traced.mesh.shape)}"
        return f"MESH = jax.make_mesh({shape_text(self.traced.mesh.shape)}, {names}, axis_types={types})"

    # What one device runs.

    def _on_device(self, name: str) -> Iterator[str]:
        body = with_layers(without_dead_steps(with_plain_loops(self.traced.body)), self.sources.line)
        writer = BlockWriter(self.sources, {})
        parameters = []
        for number, value in zip(self.traced.taken, body.inputs, strict=True):
            own = self.sources.names.fresh(self._path(number))
            writer.known[value] = Expr(own, value.shape)
            parameters.append(f"{INDENT}{own},  # {_type(self.graph.arguments[number])}")
        writer.run(body, [self.program.outputs[i] for i in self.traced.made])
        returned = [writer.array(value).text for value in body.outputs]
        yield from [f"def {name}(", *parameters, "):"] if parameters else [f"def {name}():"]
        yield f'{INDENT}"""One device\'s part: blocks in, blocks out."""'
        yield from writer.lines
        yield f"{INDENT}return {tuple_text(returned) if returned else '()'}"

    def _path(self, number: int) -> str:
        first = len(self.program.constants)
        return f"constant_{number}" if number < first else self.program.inputs[number - first]

    # The function of global arrays.

    def _of_arrays(self, on_device: str) -> Iterator[str]:
        signature = signature_of(self.program.in_tree, self.program.inputs)
        yield f"@{self._jit()}"
        yield f"def {self.name}({signature.text}):"
        yield from self._run(on_device)
        given = ", ".join(self._given(signature))
        names = [f"result_{i}" if len(self.results) > 1 else "result" for i in self.traced.made]
        if names:
            around, why = "jax.sharding.use_abstract_mesh(MESH.abstract_mesh)", "whichever one is set outside"
            if self.sources.is_wide:
                around, why = f"{around}, jax.enable_x64(True)", "some ops count in 64 bits"
            yield f"{INDENT}with {around}:  # {why}"
            yield f"{INDENT * 2}{tuple_text(names) if len(names) == 1 else ', '.join(names)} = run({given})"
        made = dict(zip(self.traced.made, names, strict=True))
        leaves = [self._result(i, made) for i in range(len(self.results))]
        yield f"{INDENT}return {result_text(self.program.out_tree, leaves, signature.trees)}"

    def _jit(self) -> str:
        entries = entries_of(main_function(self.program.module), "arg_attrs")[len(self.program.constants) :]
        donated = {i for i, entry in enumerate(entries) if "jax.buffer_donor" in entry}
        if not donated:
            return "jax.jit"
        args, kwargs = by_argument(self.program.in_tree)
        positions = tuple(i for i, (_, which) in enumerate(args) if _all_in(which, donated))
        named = tuple(name for name, (_, which) in kwargs.items() if _all_in(which, donated))
        options = [f"donate_argnums={positions}"] if positions else []
        options += [f"donate_argnames={named}"] if named else []
        return f"jax.jit({', '.join(options)})" if options else "jax.jit"

    def _run(self, on_device: str) -> Iterator[str]:
        arguments, shardings = self.graph.arguments, [self.results[i] for i in self.traced.made]
        specs = [self._spec(arguments[i].sharding) for i in self.traced.taken]
        yield f"{INDENT}run = jax.shard_map("
        yield f"{INDENT * 2}{on_device},"
        yield f"{INDENT * 2}mesh=MESH,"
        yield f"{INDENT * 2}in_specs={tuple_text(specs) if specs else '()'},"
        yield f"{INDENT * 2}out_specs={tuple_text(list(map(self._spec, shardings))) if shardings else '()'},"
        yield f"{INDENT * 2}check_vma=False,"
        yield f"{INDENT})"

    def _spec(self, sharding: TensorSharding | None) -> str:
        return spec_code(self.traced.spec(sharding)) if sharding else "P()"

    def _given(self, signature: Signature) -> Iterator[str]:
        first = len(self.program.constants)
        for number in self.traced.taken:
            if number < first:
                yield self._constant(self.program.constants[number])
                continue
            text, info = signature.leaves[number - first], self.program.in_info[number - first]
            yield f"jax.random.key_data({text})" if _is_key(info) else text

    def _constant(self, x: Any) -> str:
        """An array that the function closes over."""
        return self.sources.constants.name(np.asarray(jax.random.key_data(x) if _is_key(x) else x))

    def _result(self, number: int, made: dict[int, str]) -> str:
        info = self.program.out_info[number]
        value = self.graph.main.blocks[0].terminator.operands[number]
        text = made.get(number) or f"jnp.zeros({shape_text(value.shape or ())}, {dtype_text(info.dtype)})"
        if not _is_key(info):
            return text
        impl = jax.random.key_impl(jax.numpy.empty((), info.dtype))
        return f'jax.random.wrap_key_data({text}, impl="{impl}")'


def _is_wide(body: StepBlock) -> bool:
    """Whether a program needs 64-bit types, which the caller need not have."""
    values = [v for step in body.walk() for v in (*step.inputs, *step.outputs)]
    return any(np.dtype(v.dtype).name in _WIDE for v in (*body.inputs, *values))


_IMPORTS = {
    "import jax.numpy as jnp": r"jnp\.",
    "import numpy as np": r"np\.",
    "from jax import lax": r"lax\.",
    "from jax.experimental.layout import Layout, with_layout_constraint": r"with_layout_constraint\(",
    "from jax.sharding import PartitionSpec as P": r"P\(",
}
"""What a module imports, and what in it says that it does."""

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def _all_in(leaves: range, donated: set[int]) -> bool:
    return bool(leaves) and donated.issuperset(leaves)


def _is_key(info: Any) -> bool:
    return jax.numpy.issubdtype(info.dtype, jax.dtypes.prng_key)  # type: ignore[no-any-return]


def _type(value: GlobalValue) -> str:
    return type_text(value.dtype, value.shape, value.sharding)
