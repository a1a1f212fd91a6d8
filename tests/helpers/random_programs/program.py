"""Random StableHLO programs with random annotations, as text. The same seed gives the same program."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

from random_programs import moves, regions
from random_programs.annotations import Annotations
from random_programs.block import TOKEN, Block, Named
from random_programs.tensors import FAMILIES, Case, Shape, Tensor

_DIMS = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 13, 16, 17)
_COMMON = ("elementwise", "dot_general", "transpose", "aligned_reshape", "reshape", "broadcast_in_dim", "reduce")

FEATURES: dict[str, float] = {
    "families": 0.7,
    "while": 0.3,
    "case": 0.25,
    "if": 0.15,
    "barrier": 0.35,
    "named": 0.2,
    "manual": 0.25,
    "group": 0.3,
    "constant": 0.4,
    "priority": 0.35,
    "constraint": 0.6,
    "unreduced": 0.25,
    "rules": 0.25,
    "meshes": 0.2,
    "inline": 0.1,
    "one": 0.15,
    "tokens": 0.1,
    "edges": 0.1,
    "functions": 0.1,
}
"""What a program may have, and how probable that is in one whose features are not given."""


class RandomProgram:
    """One program.

    Args:
        seed: anything that `random.Random` takes.
        features: names of `FEATURES`; drawn if not given.
        ops: the program ends after so many steps; one step is an op, with what it needs.
        without: families of ops, and features, to leave out.
        devices: a program to run on at most so many: its loops end, it calls no functions that nobody has, and its
            reductions start from what may count any number of times.
    """

    def __init__(
        self,
        seed: int,
        features: Sequence[str] | None = None,
        ops: int = 20,
        without: Sequence[str] = (),
        devices: int | None = None,
    ):
        self.rng = rng = random.Random(seed)
        drawn = [name for name, probability in FEATURES.items() if rng.random() < probability]
        self.features = tuple(f for f in (drawn if features is None else features) if f not in without)
        self.annotations = Annotations(rng, self.features, devices)
        self.runs = devices is not None
        self.names = itertools.count(1)
        self.scopes = itertools.count(1)
        self.scope = 0
        """Which manual computation is being filled; 0: none."""
        self._groups: dict[int, tuple[int, Shape]] = {}
        self._families = [name for name in FAMILIES if name not in without]
        self._common = [name for name in _COMMON if name not in without]
        self._density = rng.choice((0.3, 0.6, 1.0))
        """How many of the values that may have a sharding do have one, compared with the most."""
        self._left = min(rng.randint(3, 20), ops)
        self.text = "\n".join([*self.annotations.mesh_lines(), *self._functions()]) + "\n"

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Functions.

    def _functions(self) -> list[str]:
        lines = self._function("main", self._left)
        if "functions" in self.features:
            lines += self._function("other", self.rng.randint(1, 4), "private " if self.chance(0.5) else "")
        return lines

    def _function(self, name: str, steps: int, visibility: str = "") -> list[str]:
        arguments: list[Named] = []

        def argument(tensor: Tensor) -> Named:
            arguments.append(Named(f"%arg{len(arguments)}", tensor))
            block.values.insert(0, arguments[-1])
            return arguments[-1]

        block = Block(self.rng, self.names, [], argument, reshapes="reshape" in self._families)
        self._left = steps
        for _ in range(self.rng.randint(1, 3)):
            argument(Tensor(self._shape()))
        if "tokens" in self.features:
            block.tokens.append(block.name())
            block.lines.append(f"{block.tokens[0]} = stablehlo.create_token : {TOKEN}")
        while self._left > 0:
            self.op(block)
        results = self._results(block)
        head = ", ".join(f"{a.name}: {a.tensor}{self._attribute(a.tensor, 0.7)}" for a in arguments)
        types = ", ".join(f"{v.tensor}{self._attribute(v.tensor, 0.4)}" for v in results)
        returned = f"{', '.join(v.name for v in results)} : {', '.join(str(v.tensor) for v in results)}"
        return [
            f"func.func {visibility}@{name}({head}) -> ({types}) {{",
            *block.lines,
            f"return {returned}" if results else "return",
            "}",
        ]

    def _results(self, block: Block) -> list[Named]:
        """A few values, and most of those that nothing uses."""
        text = "\n".join(block.lines)
        unused = [v for v in block.values if not re.search(rf"{v.name}\b(?!:| =)", text) and self.chance(0.7)]
        chosen = [block.pick() for _ in range(self.rng.choice((0, 0, 1, 2)))]
        return self.rng.sample([*chosen, *unused], len(chosen) + len(unused))

    def _shape(self) -> Shape:
        return tuple(self.rng.choice(_DIMS) for _ in range(self.rng.randint(1, 3)))

    # Annotations.

    def sharding(self, tensor: Tensor | None, **options: float) -> str:
        return self.annotations.sharding(tensor, **options)  # type: ignore[arg-type]

    def _attribute(self, tensor: Tensor, chance: float) -> str:
        if not self.chance(chance * self._density):
            return ""
        sharding = self.annotations.sharding(tensor, priority="priority" in self.features)
        return f" {{sdy.sharding = #sdy.sharding<{sharding}>}}"

    def per_value(self, tensors: Sequence[Tensor | None], chance: float = 0.15) -> str:
        """Attributes that give each of an op's results a sharding, now and then."""
        given = self._given(tensors, chance)
        return f" {{{given}}}" if given else ""

    def _given(self, tensors: Sequence[Tensor | None], chance: float) -> str:
        if not tensors or not self.chance(chance * self._density):
            return ""
        shardings = ", ".join(f"<{self.sharding(t)}>" for t in tensors)
        return f"sdy.sharding = #sdy.sharding_per_value<[{shardings}]>"

    # Steps.

    def ops(self, block: Block, low: int, high: int) -> None:
        for _ in range(self.rng.randint(low, high)):
            self.op(block)

    def op(self, block: Block) -> None:
        """One random step."""
        self._left -= 1
        self.rng.choices(*self._choices(block))[0](block)

    def _choices(self, block: Block) -> tuple[list[Callable[[Block], object]], list[float]]:
        features = self.features
        hard = 3 if self.runs else 1
        table: list[tuple[Callable[[Block], object], float]] = [
            (self._common_op, 8),
            (self._any_op, 5 * hard * ("families" in features)),
            (self._constraint, 3 * ("constraint" in features)),
            (self._barrier, 1.5 * ("barrier" in features)),
            (self._group, 2 * ("group" in features)),
            (self._constant, 2 * ("constant" in features)),
            (self._ruled_call, 1.5 * ("rules" in features and not self.runs)),
            (self._token_op, 1.5 * ("tokens" in features)),
            (lambda block: moves.move(block, self.rng), 1.5 * hard * ("families" in features)),
        ]
        nested: list[tuple[Callable[[RandomProgram, Block], None], float]] = [
            (regions.optimization_barrier, 1.5 * ("barrier" in features)),
            (regions.loop, 2 * ("while" in features)),
            (regions.case, 2 * ("case" in features)),
            (regions.if_, 1.5 * ("if" in features)),
            (regions.named_computation, 2 * ("named" in features)),
            (regions.manual_computation, 3 * ("manual" in features)),
        ]
        if block.depth < 3:
            table += [((lambda b, make=make: make(self, b)), weight) for make, weight in nested]
        return [make for make, _ in table], [weight for _, weight in table]

    def _common_op(self, block: Block) -> None:
        self._from_family(block, self.rng.choice(self._common))

    def _any_op(self, block: Block) -> None:
        self._from_family(block, self.rng.choice(self._families))

    def _from_family(self, block: Block, name: str) -> None:
        for _ in range(4):
            case = FAMILIES[name](self.rng, block.pick().tensor)
            if case is not None and all(self._is_handy(t) for t in (*case.operands, *case.results)):
                self._emit(block, case)
                return

    def _is_handy(self, tensor: Tensor) -> bool:
        return tensor.rank <= 5 and math.prod(tensor.shape) <= 20000

    def _emit(self, block: Block, case: Case, rule: float = 0.1) -> None:
        taken = len(case.operands) - (len(case.starts) if self.runs else 0)
        operands = [block.operand(t).name for t in case.operands[:taken]]
        operands += [block.number(n, t).name for n, t in zip(case.starts, case.operands[taken:], strict=self.runs)]
        extra = [self._given(case.results, 0.12)]
        if "rules" in self.features and case.operands and case.results and self.chance(rule):
            extra.append(
                f"sdy.sharding_rule = #sdy.op_sharding_rule<{self.annotations.rule(case.operands, case.results)}>"
            )
        name = block.name()
        block.lines.append(case.text(operands, name, ", ".join(filter(None, extra))))
        results = [Named(f"{name}#{i}", t) for i, t in enumerate(case.results)]
        block.values += [v for v in results if not v.tensor.dtype.startswith("ui") or self.chance(0.3)]

    def _ruled_call(self, block: Block) -> None:
        operands = [block.pick().tensor for _ in range(self.rng.randint(1, 3))]
        shapes = [block.pick().tensor for _ in range(self.rng.randint(1, 2))]
        effect = ", has_side_effect = true" if self.chance(0.2) else ""
        call = Case("stablehlo.custom_call", operands, shapes, f'call_target_name = "mine"{effect}')
        self._emit(block, call, rule=1.0)

    def _constraint(self, block: Block) -> None:
        """Constraints on constraints happen, since a late value is more likely; some have no user."""
        x, is_reshard = block.pick(), self.chance(0.1)
        priority = "priority" in self.features and not is_reshard  # a dead op with a priority kills the oracle
        sharding = self.annotations.sharding(x.tensor, closed=self.rng.choice((0.2, 1.0)), priority=priority)
        block.emit(
            f"sdy.{'reshard' if is_reshard else 'sharding_constraint'} {x.name} <{sharding}> : {x.tensor}", x.tensor
        )
        if self.chance(0.2):
            block.values.pop()

    def _barrier(self, block: Block) -> None:
        x = block.pick()
        direction = self.rng.choice(("NONE", "FORWARD", "BACKWARD"))
        block.emit(f"sdy.propagation_barrier {x.name} allowed_direction={direction} : {x.tensor}", x.tensor)

    def _constant(self, block: Block) -> None:
        constant = block.constant(block.pick().tensor)
        head, _, type_ = block.lines[-1].rpartition(" : ")
        if "stablehlo.constant " in head:
            op, value = head.split(" dense<")
            block.lines[-1] = f"{op}{self.per_value([constant.tensor], 0.3)} dense<{value} : {type_}"
        if self.chance(0.5):
            case = FAMILIES["elementwise"](self.rng, constant.tensor)
            assert case is not None
            name = block.name()
            operands = [constant.name if t == constant.tensor else block.operand(t).name for t in case.operands]
            block.lines.append(case.text(operands, name))
            block.values += [Named(f"{name}#{i}", t) for i, t in enumerate(case.results)]

    def _group(self, block: Block) -> None:
        """Puts a value in a group; members of one group have one shape and are in one manual computation."""
        x = block.pick()
        number = self.rng.choice((0, 2, 7)) + 10 * self.scope
        known = self._groups.setdefault(number, (self.scope, x.tensor.shape))
        alike = [v for v in block.values if v.tensor.shape == known[1]]
        if alike:
            x = self.rng.choice(alike)
            block.lines.append(f"sdy.sharding_group {x.name} group_id={number} : {x.tensor}")

    def _token_op(self, block: Block) -> None:
        if not block.tokens:
            return
        token, x, name = block.tokens[-1], block.pick(), block.name()
        if self.chance(0.3):
            types = f"({TOKEN}) -> ({x.tensor}, {TOKEN})"
            block.lines.append(f'{name}:2 = "stablehlo.infeed"({token}){self.per_value([x.tensor, None])} : {types}')
            block.values.append(Named(f"{name}#0", x.tensor))
            block.tokens.append(f"{name}#1")
            return
        block.lines.append(
            self.rng.choice(
                [
                    f"{name} = stablehlo.after_all {token} : {TOKEN}",
                    f'{name} = "stablehlo.outfeed"({x.name}, {token}) : ({x.tensor}, {TOKEN}) -> {TOKEN}',
                    f"{name} = stablehlo.custom_call @effect({x.name}, {token}) {{has_side_effect = true}} : "
                    f"({x.tensor}, {TOKEN}) -> {TOKEN}",
                ]
            )
        )
        block.tokens.append(name)

    # Values.

    def of_type(self, block: Block, tensor: Tensor) -> Named:
        """A value of a type that the block can return: a late one if there is one."""
        known = [v for v in block.values if v.tensor == tensor]
        return self.rng.choice(known[-3:]) if known else block.operand(tensor)

    def bring_in(
        self,
        block: Block,
        name: str,
        tensors: Sequence[Tensor],
        count: int,
        edges: float = 0.8,
        given: Sequence[str] = (),
    ) -> None:
        """Brings an op's results into scope, some behind an edge; the last ones of `count` may be tokens."""
        values = [Named(f"{name}#{i}", t) for i, t in enumerate(tensors)]
        if "edges" in self.features:
            shardings = given or [""] * len(values)
            values = [
                self.edge(block, v, s) if self.chance(edges) else v for v, s in zip(values, shardings, strict=True)
            ]
        block.values += values
        block.tokens += [f"{name}#{i}" for i in range(len(tensors), count)]

    def edge(self, block: Block, value: Named, sharding: str = "") -> Named:
        """The value behind a data-flow edge written by hand."""
        sharding = sharding or (self.sharding(value.tensor) if self.chance(0.5) else "")
        given = f" sharding=<{sharding}>" if sharding else ""
        return block.emit(f"sdy.data_flow_edge {value.name}{given} : {value.tensor}", value.tensor)
