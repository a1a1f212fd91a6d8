"""The parser for the textual form of op sharding rules.

    rule  "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}"

`text` says how it is wrapped, and what it checks.
"""

from __future__ import annotations

import re

from sdy_jax.representation.rule import LETTERS, OpShardingRule, TensorMapping
from sdy_jax.representation.scanner import Scanner, scan_integer, unwrapped

_FACTOR_SETS = ("reduction", "need_replication", "permutation", "blocked_propagation")
_FACTOR = re.compile(r"z_([1-9]\d*)|([i-z])")


def parse_rule(text: str) -> OpShardingRule:
    """An op sharding rule, such as `([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}`."""
    return unwrapped(text, "#sdy.op_sharding_rule", _rule)


def _rule(scanner: Scanner) -> OpShardingRule:
    scanner.expect("(")
    operands = scanner.items(_mapping, ")")
    scanner.expect("->")
    scanner.expect("(")
    results = scanner.items(_mapping, ")")
    sizes = _factor_sizes(scanner)
    reduction, need_replication, permutation, blocked = (_factor_set(scanner, name) for name in _FACTOR_SETS)
    is_custom = scanner.accept(",")
    if is_custom:
        scanner.expect("custom")
    return OpShardingRule(sizes, operands, results, reduction, need_replication, permutation, blocked, is_custom)


def _mapping(scanner: Scanner) -> TensorMapping:
    scanner.expect("[")
    return scanner.items(_dimension_mapping, "]")


def _dimension_mapping(scanner: Scanner) -> tuple[int, ...]:
    factors = [_factor(scanner)]
    while found := _FACTOR.match(scanner.text, scanner.position):
        scanner.position = found.end()
        factors.append(_factor_index(found))
    return tuple(factors)


def _factor(scanner: Scanner) -> int:
    return _factor_index(scanner.require(_FACTOR, "a factor: `i` to `z`, `z_1`, `z_2`, ..."))


def _factor_index(symbol: re.Match[str]) -> int:
    return LETTERS - 1 + int(symbol[1]) if symbol[1] else ord(symbol[2]) - ord("i")


def _factor_sizes(scanner: Scanner) -> tuple[int, ...]:
    if not scanner.accept("{"):
        return ()
    start = scanner.position
    sized = scanner.items(_factor_size, "}")
    if [factor for factor, _ in sized] != list(range(len(sized))):
        scanner.position = start
        scanner.fail("expected the sizes of the factors i, j, k, ... in that order")
    return tuple(size for _, size in sized)


def _factor_size(scanner: Scanner) -> tuple[int, int]:
    factor = _factor(scanner)
    scanner.expect("=")
    return factor, scan_integer(scanner)


def _factor_set(scanner: Scanner, name: str) -> frozenset[int]:
    if not scanner.accept(name):
        return frozenset()
    scanner.expect("=")
    scanner.expect("{")
    start = scanner.position
    factors = scanner.items(_factor, "}")
    if list(factors) != sorted(set(factors)):
        scanner.position = start
        scanner.fail("expected each factor once, in ascending order")
    return frozenset(factors)
