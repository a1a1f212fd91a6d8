"""What one collective does to one sharding, and whether it may: rows of (operand's sharding, op, verdict, strict one).

Written without quotes on the meshes below, for a tensor of 8x16x32. A verdict is a rule that is broken, "" for none,
or SYNTAX for what cannot be written at all. The first is the dialect's, the second that of a partitioned module.
"""

from __future__ import annotations

import re

from jax.extend.mlir import ir
from jax.interpreters import mlir

_AXES = '"p"=2, "q"=4, "r"=2, "s"=2'
MESHES = f"""sdy.mesh @m = <[{_AXES}]>
sdy.mesh @m2 = <[{_AXES}], device_ids=[{", ".join(map(str, reversed(range(32))))}]>
sdy.mesh @m3 = <[{_AXES}]>
sdy.mesh @m4 = <["p"=4, "q"=2, "r"=2, "s"=2]>
"""
SYNTAX = "syntax"

VECTORS: tuple[tuple[str, str, str, str], ...] = (
    # all_gather
    ("@m, [{p,q}, {}, {}]", "all_gather [{q:(2)2}, {}, {}] -> <@m, [{p, q:(1)2}, {}, {}]>", "", ""),
    ("@m, [{p,q,r}, {}, {}]", "all_gather [{q, r}, {}, {}] -> <@m, [{p}, {}, {}]>", "", ""),
    ("@m, [{p,q}, {}, {}]", "all_gather [{p}, {}, {}] -> <@m, [{q}, {}, {}]>", "C8", "C8"),
    ("none", "all_gather [{p}, {}, {}] -> <@m, [{}, {}, {}]>", "C1", "C1"),
    ("@m, [{q}, {}, {}]", "all_gather [{q:(1)2}, {}, {}] -> <@m, [{q:(2)2}, {}, {}]>", "C8", "C8"),
    ("@m, [{q}, {}, {}]", "all_gather [{q:(1)2,q:(2)2}, {}, {}] -> <@m, [{}, {}, {}]>", "A4", "A4"),
    ("@m, [{p,q}, {}, {}]", "all_gather [{q}, {}, {}] -> <@m, [{}, {}, {p}]>", "C9", "C9"),
    ("@m, [{p,q}, {}, {}]", "all_gather [{q}, {}, {}] -> <@m2, [{p}, {}, {}]>", "C3", "C3"),
    ("@m, [{p,q}, {}, {}]", "all_gather [{q}, {}, {}] -> <@m3, [{p}, {}, {}]>", "", ""),
    ("@m, [{p}, {}, {}]", "all_gather [{}, {}, {}] -> <@m, [{p}, {}, {}]>", "", "V4"),
    ("@m, [{q}, {}, {}], unreduced={p}", "all_gather [{q}, {}, {}] -> <@m, [{}, {}, {}]>", "", "V1"),
    ("@m, [{q}, {}, {}]", "all_gather [{q}, {}, {}] -> <@m, [{}, {}, {}], replicated={q}>", "", ""),
    ("@m, [{}, {}, {p,q,r}]", "all_gather [{}, {}, {r}] -> <@m, [{}, {}, {p,q}]>", "", ""),
    ("@m, [{}, {}, {}]", "all_gather [{}, {}] -> <@m, [{}, {}, {}]>", "C4", "C4"),
    ("@m, [{p}, {}, {}]", "all_gather [{x}, {}, {}] -> <@m, [{}, {}, {}]>", "A1", "A1"),
    ("@m, [{p,?}, {}, {?}]", "all_gather [{p}, {}, {}] -> <@m, [{?}p2, {}, {}]>", "", ""),
    # all_slice
    ("none", "all_slice [{q:(1)2}, {}, {r}] -> <@m, [{q:(1)2}, {}, {r}]>", "", ""),
    ("@m, [{q:(1)2}, {}, {}]", "all_slice [{q:(2)2}, {}, {}] -> <@m, [{q}, {}, {}]>", "", ""),
    ("@m, [{q:(1)2}, {}, {}]", "all_slice [{q:(2)2}, {}, {}] -> <@m, [{q:(1)2,q:(2)2}, {}, {}]>", "A4", "A4"),
    ("@m, [{p}, {}, {}]", "all_slice [{}, {p}, {}] -> <@m, [{p}, {p}, {}]>", "A2", "A2"),
    ("@m, [{q}, {}, {}]", "all_slice [{p}, {}, {}] -> <@m, [{p,q}, {}, {}]>", "C9", "C9"),
    ("@m, [{}, {}, {}], replicated={p}", "all_slice [{p}, {}, {}] -> <@m, [{p}, {}, {}]>", "", ""),
    ("@m, [{}, {}, {}], unreduced={p}", "all_slice [{p}, {}, {}] -> <@m, [{p}, {}, {}]>", "", "V2"),
    ("@m, [{}, {}, {}], unreduced={p}", "all_slice [{q}, {}, {}] -> <@m, [{q}, {}, {}], unreduced={r}>", "", "V1"),
    ("@m, [{q,p}, {}, {}]", "all_slice [{r}, {}, {}] -> <@m, [{q,p,r}, {}, {}]>", "", "V5"),
    # all_to_all
    ("@m, [{p,q,r}, {}, {s}]", "all_to_all [{q:(2)2, r}: 0->2] -> <@m, [{p,q:(1)2}, {}, {s,q:(2)2,r}]>", "", ""),
    ("@m, [{p}, {}, {}]", "all_to_all [] -> <@m, [{p}, {}, {}]>", "C10", "C10"),
    ("@m, [{p}, {}, {}]", "all_to_all [{p}: 0->0] -> <@m, [{p}, {}, {}]>", "C10", "C10"),
    ("@m, [{p}, {q}, {}]", "all_to_all [{p}: 0->2, {q}: 1->2] -> <@m, [{}, {}, {p,q}]>", "C10", "C10"),
    ("@m, [{p}, {}, {}]", "all_to_all [{p}: 0->3] -> <@m, [{}, {}, {}]>", "C10", "C10"),
    ("@m, [{p}, {}, {}]", "all_to_all [{p}: 3->1] -> <@m, [{}, {p}, {}]>", "C10", "C10"),
    ("@m, [{p}, {}, {}]", "all_to_all [{}: 0->1] -> <@m, [{p}, {}, {}]>", SYNTAX, SYNTAX),
    ("@m, [{p}, {}, {q}]", "all_to_all [{p}: 0->1] -> <@m, [{}, {p}, {}]>", "C9", "C9"),
    ("@m, [{p,q}, {}, {}]", "all_to_all [{p}: 0->1] -> <@m, [{q}, {p}, {}]>", "C8", "C8"),
    ("none", "all_to_all [{p}: 0->1] -> <@m, [{}, {p}, {}]>", "C1", "C1"),
    # collective_permute
    ("@m, [{p,r}, {s}, {}]", "collective_permute -> <@m, [{q}, {s}, {}]>", "", ""),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m, [{p,r}, {s}, {}]>", "", ""),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m, [{q,r}, {s}, {}]>", "C11", "C11"),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m2, [{q}, {p}, {}]>", "", ""),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m3, [{q}, {p}, {}]>", "C3", "C3"),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m4, [{q}, {p}, {}]>", "C3", "C3"),
    ("@m, [{q}, {p}, {}]", "collective_permute -> <@m, [{q}, {p}, {}]>", "", "V4"),
    ("@m, [{}, {q}, {}]", "collective_permute -> <@m, [{q}, {}, {}]>", "C11", "C11"),
    ("@m, [{q}, {}, {}], unreduced={p}", "collective_permute -> <@m, [{p,r}, {}, {}]>", "", "V1"),
    # all_reduce
    ("@m, [{q}, {}, {}]", "all_reduce {p} -> <@m, [{q}, {}, {}]>", "", "V3"),
    ("@m, [{q}, {}, {}], unreduced={p,r}", "all_reduce {p} -> <@m, [{q}, {}, {}], unreduced={r}>", "", ""),
    ("@m, [{q}, {}, {}]", "all_reduce {r,p} -> <@m, [{q}, {}, {}]>", "C5", "C5"),
    ("@m, [{q}, {}, {}]", "all_reduce {q:(2)2} -> <@m, [{q}, {}, {}]>", "C12", "C12"),
    ("@m, [{q}, {}, {}], replicated={p}", "all_reduce {p} -> <@m, [{q}, {}, {}]>", "C12", "C12"),
    ("@m, [{q}, {}, {}], unreduced={p}", "all_reduce {p} -> <@m, [{q}, {}, {}], unreduced={p}>", "C12", "C12"),
    ("@m, [{q}, {}, {}], unreduced={p,r}", "all_reduce {p} -> <@m, [{q}, {}, {}]>", "", "V3"),
    ("@m, [{q}, {}, {}]", "all_reduce {} -> <@m, [{q}, {}, {}]>", "", "V4"),
    ("@m, [{q}, {}, {}]", "all_reduce {p} -> <@m, [{}, {}, {}]>", "C9", "C9"),
    ("none", "all_reduce {p} -> <@m, [{}, {}, {}]>", "", "V3"),
    ("@m, [{}, {}, {}], unreduced={q}", "all_reduce {q:(2)2} -> <@m, [{}, {}, {}], unreduced={q:(1)2}>", "", ""),
    # reduce_scatter
    ("@m, [{q}, {}, {}]", "reduce_scatter [{p}, {}, {r}] -> <@m, [{q,p}, {}, {r}]>", "", "V3"),
    ("@m, [{q}, {}, {}], unreduced={p}", "reduce_scatter [{p}, {}, {}] -> <@m, [{q,p}, {}, {}]>", "", ""),
    ("@m, [{q:(1)2}, {}, {}]", "reduce_scatter [{q:(2)2}, {}, {}] -> <@m, [{q}, {}, {}]>", "", "V3"),
    ("@m, [{q}, {}, {}]", "reduce_scatter [{q}, {}, {}] -> <@m, [{q,q}, {}, {}]>", "A2", "A2"),
    ("@m, [{}, {}, {}], unreduced={p,r}", "reduce_scatter [{p}, {}, {}] -> <@m, [{p}, {}, {}], unreduced={r}>", "", ""),
    ("@m, [{}, {}, {}], unreduced={p,r}", "reduce_scatter [{p}, {}, {}] -> <@m, [{p}, {}, {}]>", "", "V3"),
    # conversions
    ("@m, [{q}, {}, {}], unreduced={r}", "replicated_to_unreduced {p} -> <@m, [{q}, {}, {}], unreduced={p,r}>", "", ""),
    ("@m, [{q}, {}, {}]", "replicated_to_unreduced {} -> <@m, [{q}, {}, {}]>", "C13", "C13"),
    ("@m, [{q}, {}, {}]", "replicated_to_unreduced {q} -> <@m, [{}, {}, {}], unreduced={q}>", "C9", "C9"),
    ("@m, [{p}, {}, {}]", "replicated_to_unreduced {p} -> <@m, [{p}, {}, {}], unreduced={q}>", "C13", "C13"),
    ("@m, [{}, {}, {}], unreduced={p}", "replicated_to_unreduced {p} -> <@m, [{}, {}, {}]>", "C13", "C13"),
    ("@m, [{}, {}, {}]", "replicated_to_unreduced {p} -> <@m, [{}, {}, {}], unreduced={q}>", "C14", "C14"),
    ("@m, [{}, {}, {}]", "replicated_to_unreduced {r,p} -> <@m, [{}, {}, {}], unreduced={p,r}>", "C5", "C5"),
    ("@m, [{q,?}, {}, {}]", "replicated_to_unreduced {p} -> <@m, [{q}, {}, {}], unreduced={p}>", "C9", "C9"),
    ("none", "replicated_to_unreduced {q} -> <@m, [{}, {}, {}], unreduced={q}>", "C1", "C1"),
    (
        "@m, [{q,r}, {}, {}], unreduced={p}",
        "sharded_to_unreduced [{r}, {}, {}] -> <@m, [{q}, {}, {}], unreduced={p,r}>",
        "",
        "",
    ),
    ("@m, [{q,r}, {}, {}]", "sharded_to_unreduced [{q}, {}, {}] -> <@m, [{r}, {}, {}], unreduced={q}>", "C8", "C8"),
    ("@m, [{q,r}, {}, {}]", "sharded_to_unreduced [{r}, {}, {}] -> <@m, [{q}, {}, {}]>", "C14", "C14"),
    ("none", "sharded_to_unreduced [{p}, {}, {}] -> <@m, [{}, {}, {}], unreduced={p}>", "C1", "C1"),
    # reshard
    ("@m, [{p}, {}, {}]", "reshard -> <@m, [{}, {}, {}], unreduced={p}>", "", ""),
    ("@m, [{p}, {}, {}]", "reshard -> <@m, [{}, {}], unreduced={p}>", "S1", "S1"),
)  # fmt: skip

WITH_REDUCTION: tuple[tuple[str, str, str], ...] = (
    ("@m, [{}, {}, {}]", "all_reduce max {p} -> <@m, [{}, {}, {}]>", "V3"),
    ("@m, [{}, {}, {}], unreduced=max{p}", "all_reduce max {p} -> <@m, [{}, {}, {}]>", ""),
    ("@m, [{}, {}, {}], unreduced=max{p,q}", "all_gather [{}, {}, {}] -> <@m, [{}, {}, {}], unreduced=max{p,q}>", "V4"),
    ("@m, [{}, {}, {}], unreduced=min{p}", "reduce_scatter min [{p}, {}, {}] -> <@m, [{p}, {}, {}]>", ""),
    ("@m, [{}, {}, {}], unreduced=max{p}", "all_slice [{q}, {}, {}] -> <@m, [{q}, {}, {}], unreduced={p}>", "V1"),
)
"""The same for reductions that dialect version 0.10 cannot say: the dialect's verdict is SYNTAX there, later none."""

_ATTRIBUTES = {
    "all_gather": ("gathering_axes", "list_of_axis_ref_lists"),
    "all_slice": ("slicing_axes", "list_of_axis_ref_lists"),
    "all_to_all": ("params", "all_to_all_param_list"),
    "all_reduce": ("reduction_axes", "axis_ref_list"),
    "reduce_scatter": ("reduce_scatter_axes", "list_of_axis_ref_lists"),
    "replicated_to_unreduced": ("axes", "axis_ref_list"),
    "sharded_to_unreduced": ("axes", "list_of_axis_ref_lists"),
}
_TYPE = "tensor<8x16x32xf32>"


def quoted(text: str) -> str:
    return re.sub(r"(?<![@\w])([pqrsx])(?=[},:\] ])", r'"\1"', text)


def _parts(op: str) -> tuple[str, str, str]:
    """The op's name, what it says, and its result's sharding."""
    head, out = re.split(r" ?-> (?=<)", op)
    name, _, said = head.partition(" ")
    return name, quoted(said), quoted(out)


def _argument(operand: str) -> str:
    sharding = "" if operand == "none" else f" {{sdy.sharding = #sdy.sharding<{quoted(operand)}>}}"
    return f"{MESHES}func.func @f(%x: {_TYPE}{sharding})"


def text_of(operand: str, op: str) -> str:
    """A module with the op."""
    name, said, out = _parts(op)
    out = out if name == "reshard" else f"out_sharding={out}"
    return f"{_argument(operand)} {{ %0 = sdy.{name} {said} %x {out} : {_TYPE}\n return }}".replace("  ", " ")


def built(operand: str, op: str) -> ir.Module:
    """The same module with the op built in Python, which no verifier has seen."""
    name, said, out = _parts(op)
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(f"{_argument(operand)} {{ return }}", context)
        block = module.body.operations[len(module.body.operations) - 1].regions[0].blocks[0]
        attributes = {"sharding" if name == "reshard" else "out_sharding": ir.Attribute.parse(f"#sdy.sharding{out}")}
        if name in _ATTRIBUTES:
            key, kind = _ATTRIBUTES[name]
            attributes[key] = ir.Attribute.parse(f"#sdy<{kind}{said}>")
        x = block.arguments[0]
        created = ir.Operation.create(f"sdy.{name}", [x.type], [x], attributes)
        ir.InsertionPoint(block.operations[0]).insert(created)
    return module
