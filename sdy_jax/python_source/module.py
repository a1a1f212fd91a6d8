"""The whole module: imports, mesh, what one device runs, and the function of global arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import by_argument
from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.graph import Value as GlobalValue
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.python_source import printers  # noqa: F401  (fills the registry)
from sdy_jax.python_source.blocks import INDENT, BlockWriter
from sdy_jax.python_source.border import Signature, result_text, signature_of
from sdy_jax.python_source.constants import constants_text
from sdy_jax.python_source.expressions import Expr, tuple_text
from sdy_jax.python_source.formatting import formatted
from sdy_jax.python_source.helpers import helper_imports, helper_text, wrapped
from sdy_jax.python_source.layers import with_layers
from sdy_jax.python_source.literals import dtype_text, shape_text, spec_text
from sdy_jax.python_source.loops import with_plain_loops
from sdy_jax.python_source.names import identifier
from sdy_jax.python_source.sources import Sources
from sdy_jax.python_source.steps import Block, without_dead_steps
from sdy_jax.python_source.trace import Traced, trace
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


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
    traced: Traced
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
        yield f"@{self._jit(signature)}"
        yield f"def {self.name}({signature.text}):"
        yield from self._run(on_device)
        given = ", ".join(self._given(signature))
        wide = self.sources.is_wide
        indent = INDENT * 2 if wide else INDENT
        names = [f"result_{i}" if len(self.results) > 1 else "result" for i in self.traced.made]
        if wide:
            yield f"{INDENT}with jax.enable_x64(True):  # some ops count in 64 bits"
        if names:
            yield f"{indent}{tuple_text(names) if len(names) == 1 else ', '.join(names)} = run({given})"
        made = dict(zip(self.traced.made, names, strict=True))
        leaves = [self._result(i, made) for i in range(len(self.results))]
        yield f"{INDENT}return {result_text(self.program.out_tree, leaves, signature.trees)}"

    def _jit(self, signature: Signature) -> str:
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
        return spec_text(self.traced.spec(sharding)) if sharding else "P()"

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


def _is_wide(body: Block) -> bool:
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
