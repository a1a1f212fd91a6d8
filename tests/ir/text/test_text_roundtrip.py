"""Everything that parses prints back to the text that jaxlib prints: attributes, and whole modules through `opt`."""

from __future__ import annotations

import random

import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from places import HELPERS

from sdy_jax.cli.opt import optimize
from sdy_jax.ir import attributes as attrs
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis, quoted
from sdy_jax.ir.parsers import (
    parse_axis,
    parse_mesh,
    parse_propagation_edges,
    parse_rule,
    parse_sharding,
    parse_shardings,
)
from sdy_jax.ir.shardings import (
    AxisSpread,
    DimensionSharding,
    EdgeValue,
    OpShardingRule,
    PropagationEdges,
    PropagationStep,
    TensorSharding,
    per_value,
)
from sdy_jax.ir.text.modules import split_modules

CONTEXT = mlir.make_ir_context()
EXAMPLES = list(split_modules((HELPERS / "sdy_reference.mlir").read_text()))
COUNT = 500


def printed(text):
    """How jaxlib prints an attribute."""
    return str(ir.Attribute.parse(text, CONTEXT))


class Random(random.Random):
    """Random objects of the vocabulary: well-formed ones, which need not keep the rules."""

    def several(self, make, most, least=0):
        return tuple(make() for _ in range(self.randint(least, most)))

    def name(self):
        plain = "".join(self.choices("abxyz_19", k=self.randint(1, 4)))
        return self.choice([plain, plain, plain, 'a"b', "a\\b", "é", "x.1.2", "a\n", "", " "])

    def axis(self):
        if self.random() < 0.5:
            return AxisRef(self.name())
        return AxisRef.sub(self.name(), self.randint(1, 99), self.randint(2, 99))

    def axes(self):
        return self.several(self.axis, 3)

    def mesh(self):
        axes = tuple(MeshAxis(f"{self.name()}{i}", self.randint(1, 3)) for i in range(self.randint(0, 3)))
        if not axes:
            return Mesh((), self.choice([(), (5,)]))
        count = Mesh(axes).size
        ids = tuple(self.sample(range(count), count))
        return Mesh(axes, ids if self.random() < 0.5 and ids != tuple(range(count)) else ())

    def dimension(self):
        return DimensionSharding(self.axes(), self.random() < 0.5, self.choice([None, None, 0, 3, 17]))

    def sharding(self):
        mesh = self.choice(["mesh", "mesh_0", "my mesh", "0m", "é", self.mesh()])
        return TensorSharding(mesh, self.several(self.dimension, 3), self.axes(), self.axes())

    def factors(self):
        return frozenset(self.several(lambda: self.randrange(24), 3))

    def mapping(self):
        return self.several(lambda: self.several(lambda: self.randrange(24), 3, 1), 3)

    def rule(self):
        sizes = self.several(lambda: self.randrange(99), 24)
        sides = self.several(self.mapping, 3, 1), self.several(self.mapping, 2, 1)
        return OpShardingRule(sizes, *sides, *(self.factors() for _ in range(4)), self.random() < 0.3)

    def spread(self):
        ends = [EdgeValue(side, i) for side in ("operand", "result") for i in range(12)]
        source, *targets = self.sample(ends, self.randint(2, 4))
        return AxisSpread(self.axis(), source, tuple(targets))

    def record(self):
        numbers = self.sample(range(200), self.randint(1, 3))
        return PropagationEdges(tuple(PropagationStep(n, self.several(self.spread, 3, 1)) for n in numbers))


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return Random(seed)


def test_axes_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        axis = rng.axis()
        assert printed(f"#sdy<axis_ref{axis}>") == f"#sdy<axis_ref{axis}>"
        assert parse_axis(str(axis)) == axis


def test_dimensions_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        dimension = rng.dimension()
        assert printed(f"#sdy<dimension_sharding{dimension}>") == f"#sdy<dimension_sharding{dimension}>"


def test_meshes_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        mesh = rng.mesh()
        attribute = attrs.mesh_to_attribute(mesh, CONTEXT)
        assert str(attribute) == f"#sdy.mesh{mesh}"
        assert attrs.mesh_from_attribute(attribute) == parse_mesh(str(attribute)) == mesh


def test_shardings_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        sharding = rng.sharding()
        attribute = attrs.sharding_to_attribute(sharding, CONTEXT)
        assert str(attribute) == f"#sdy.sharding<{sharding}>"
        assert attrs.sharding_from_attribute(attribute) == parse_sharding(str(attribute)) == sharding


def test_lists_of_shardings_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        several = rng.several(rng.sharding, 3)
        attribute = attrs.shardings_to_attribute(several, CONTEXT)
        assert str(attribute) == f"#sdy.sharding_per_value<{per_value(several)}>"
        assert attrs.shardings_from_attribute(attribute) == parse_shardings(str(attribute)) == several


def test_rules_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        rule = rng.rule()
        attribute = attrs.rule_to_attribute(rule, CONTEXT)
        assert str(attribute) == f"#sdy.op_sharding_rule<{rule}>"
        assert attrs.rule_from_attribute(attribute) == parse_rule(str(attribute)) == rule


def test_manual_axes_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        several = rng.several(rng.name, 3)
        attribute = attrs.manual_axes_to_attribute(several, CONTEXT)
        assert str(attribute) == f"#sdy<manual_axes{{{', '.join(map(quoted, several))}}}>"
        assert attrs.manual_axes_from_attribute(attribute) == several


def test_records_of_propagation_print_as_in_jaxlib(rng):
    for _ in range(COUNT):
        record = rng.record()
        attribute = attrs.propagation_edges_to_attribute(record, CONTEXT)
        assert str(attribute) == f"#sdy.propagation_edges<{record}>"
        assert attrs.propagation_edges_from_attribute(attribute) == parse_propagation_edges(str(attribute)) == record


@pytest.mark.parametrize("kind", attrs.SAYABLE)
def test_reductions_that_the_dialect_can_say_print_as_in_jaxlib(kind):
    text = f'#sdy.sharding<@m, [{{}}], unreduced={"" if kind == "sum" else kind}{{"a"}}>'
    sharding = attrs.sharding_from_attribute(ir.Attribute.parse(text, CONTEXT))
    assert sharding.reduction == kind
    assert str(attrs.sharding_to_attribute(sharding, CONTEXT)) == printed(text) == text == f"#sdy.sharding<{sharding}>"


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.strip().splitlines()[1][:40])
def test_examples_of_the_dialects_reference_print_as_in_jaxlib(text):
    expected = str(ir.Module.parse(text, CONTEXT))
    assert optimize(text, "", "example.mlir") == expected
    assert optimize(expected, "", "example.mlir") == expected


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.strip().splitlines()[1][:40])
def test_examples_after_propagation_are_valid_and_print_again(text):
    # `optimize` verifies what the passes have made.
    propagated = optimize(text, "sdy-propagation-pipeline", "example.mlir")
    assert optimize(propagated, "", "propagated.mlir") == propagated


def test_there_are_examples_of_every_op():
    ops = {name.removesuffix("Op") for name in vars(attrs.sdy) if name.endswith("Op") and name != "ReductionOp"}
    used = "\n".join(EXAMPLES).replace("_", "")
    # These are not in the reference.
    ops -= {"ReplicatedToUnreduced", "ShardedToUnreduced", "FuncDataFlowEdge"}
    assert [op for op in sorted(ops) if f"sdy.{op.lower()}" not in used.lower()] == []
