"""Modules drawn at random, partitioned and run beside the plain ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from partitioned_text import LOCAL, partitioned, run_partitioned, types_of
from plain_program import Undefined, plain_module, run_plain
from random_programs import RandomProgram

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.setting import Policy

XLA_FAILS = {
    r"stablehlo\.scatter\".* scatter_dims_to_operand_dims = \[\],": "XLA's scatter to no index",
    r"stablehlo\.atan2": "XLA's atan2 of zeros is 0 or NaN",
    r"stablehlo\.cholesky": "rounding decides whether XLA finds a factor of a singular matrix",
    r"chlo\.mulhi": "XLA cannot compile chlo.mulhi for several devices",
}
"""What XLA does wrong with the plain program, does in two ways, or cannot do with what every device runs (jaxlib 0.10).
In the scatters, all updates but the first get lost."""


WITHOUT = (
    # There is no answer on one device:
    "collective",  # of replicas
    "all_to_all",
    # Nobody computes them:
    "custom_call",  # of functions that CPUs do not have
    "decomposition",
    "largest",
    "tokens",  # infeeds, outfeeds, calls with effects
    # The answer depends on how it is computed:
    "bitcast_convert",  # shows the last bit
)


def text_of(seed: int, steps: int = 20) -> str:
    text = RandomProgram(seed, ops=steps, without=WITHOUT, devices=8).text
    return re.sub(r"(epsilon = [\d.e-]+ : )f64", r"\1f32", text.replace("f32", "f64"))


def some_array(rng: np.random.Generator, aval: jax.core.ShapedArray) -> np.ndarray:
    """Floats of both signs, integers some of which are indices within bounds."""
    if aval.dtype == np.bool_:
        return rng.random(aval.shape) < 0.5
    if np.issubdtype(aval.dtype, np.integer):
        return rng.integers(-2, 12, aval.shape).astype(aval.dtype)
    return rng.normal(size=aval.shape).astype(aval.dtype)


_CLOSE = {64: (1e-7, 1e-11), 32: (1e-4, 1e-5), 16: (5e-2, 0.4)}
"""By the bits of a float: the difference to what is wanted that rounding may make, over the largest number, and the
least: what should be zero may be a difference of equal numbers, and of halves a sum of hundreds."""


def difference(found: Any, wanted: Any, solved: bool = False) -> str:
    """Where two results differ by more than rounding; empty where nothing does.

    Where systems were `solved`, matrices are alike in which both have something that is not finite: how much of it is,
    and whether it is NaN or infinite, where one is singular, depends on how many are solved at once.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        same = found == wanted
    else:
        relative, least = _CLOSE[jnp.finfo(found.dtype).bits]
        if found.dtype.kind not in "fc":
            found, wanted = found.astype(np.float32), wanted.astype(np.float32)
        finite = np.abs(wanted[np.isfinite(wanted)])
        close = max(relative * finite.max(initial=0.0), least)
        with np.errstate(all="ignore"):
            same = (found == wanted) | (np.isnan(found) & np.isnan(wanted)) | (np.abs(found - wanted) <= close)
        if solved:
            of_matrix = tuple(range(max(same.ndim - 2, 0), same.ndim))
            lost = [~np.isfinite(x).all(axis=of_matrix, keepdims=True) for x in (found, wanted)]
            same |= lost[0] & lost[1]
    if same.all():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(~same)) if same.ndim else ()
    return f"{np.sum(~same)} of {same.size} elements; at {at} {found[at]} instead of {wanted[at]}"


class Skipped(Exception):
    """Why a program cannot be run or compared."""


@dataclass(frozen=True)
class Question:
    """A program with arguments, and what it returns on one device."""

    text: str
    arguments: Sequence[np.ndarray]
    wanted: Sequence[jax.Array]

    @classmethod
    def of(cls, text: str, seed: int) -> Question:
        """Raises: Skipped."""
        for pattern, reason in XLA_FAILS.items():
            if re.search(pattern, text):
                raise Skipped(reason)
        try:
            plain = plain_module(text)
        except Undefined as error:
            raise Skipped(str(error)) from error
        graph = Graph(plain.operation)
        results = types_of(graph.outputs)
        if not results:
            raise Skipped("returns nothing")
        rng = np.random.default_rng(seed)
        arguments = [some_array(rng, aval) for aval in types_of(graph.arguments)]
        with jax.enable_x64(True):
            try:
                return cls(text, arguments, run_plain(plain, arguments, results))
            except jax.errors.JaxRuntimeError as error:
                raise Skipped(f"XLA cannot run the plain program: {str(error)[:60]}") from error

    def answered(self, policy: Policy = LOCAL, machine: str = "") -> str:
        """ "same", or what differs where the program is partitioned.

        Raises:
            Skipped: it cannot be.
        """
        try:
            module = partitioned(self.text, policy, machine)
        except UnsupportedError as error:
            raise Skipped(str(error).rpartition("; ")[2]) from error
        graph = Graph(module.operation)
        boundary = [*(v.sharding for v in graph.arguments), *graph.result_shardings(graph.main)]
        if any(sharding is not None and sharding.unreduced_axes for sharding in boundary):
            raise Skipped("an argument or result is a sum of its parts")
        with jax.enable_x64(True):
            try:
                found = [x if x.size else np.zeros(x.shape, x.dtype) for x in run_partitioned(module, self.arguments)]
                found = [np.asarray(x) for x in found]  # shards of empty arrays come back in other shapes
            except jax.errors.JaxRuntimeError as error:
                if "fft_thunk" not in str(error):
                    raise
                raise Skipped("XLA's fft on CPUs takes some layouts only") from error
        solved = "triangular_solve" in self.text
        pairs = zip(found, self.wanted, strict=True)
        what = (f"result {i}: {difference(*pair, solved)}" for i, pair in enumerate(pairs))
        return next((f"WRONG: {text}" for text in what if not text.endswith(": ")), "same")


def outcome(text: str, seed: int, policy: Policy = LOCAL, machine: str = "") -> str:
    """ "same", or why the program was not run; otherwise what differs."""
    try:
        return Question.of(text, seed).answered(policy, machine)
    except Skipped as error:
        return f"skipped: {error}"


def check(seeds: Iterable[int], policy: Policy = LOCAL) -> Counter[str]:
    """How often what came out. Fails at the first program with a wrong number."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            found = outcome(text_of(seed), seed, policy)
        except Exception as error:
            raise AssertionError(f"program {seed}\n{text_of(seed)}") from error
        counts[found] += 1
        assert not found.startswith("WRONG"), f"program {seed}: {found}\n{text_of(seed)}"
    return counts


GLOBAL = {
    "much memory": Policy(layouts="global", memory=1e12),
    "no more memory than op by op": Policy(layouts="global"),
}


def policy_of(seed: int) -> Policy:
    """How layouts are chosen for a random program: each way for every third."""
    return (LOCAL, *GLOBAL.values())[seed % (1 + len(GLOBAL))]


WAYS = (
    *((policy, "") for policy in (LOCAL, *GLOBAL.values())),
    (Policy(layouts="global", memory=1e12), "tpu v5e"),
    (Policy(layouts="global"), "h100"),
    (Policy(layouts="propagated"), ""),
    (Policy(uneven="replicate"), ""),
)
"""How programs are partitioned: with which policy, for which machine."""


def check_ways(text: str, seed: int, count: int = 3) -> Counter[str]:
    """What came out of one program, partitioned in some ways of all, which are others for each seed.

    Raises:
        AssertionError: a wrong number, or another error than that the program is not supported.
    """
    counts: Counter[str] = Counter()
    try:
        question = Question.of(text, seed)
    except Skipped:
        return Counter(skipped=1)
    for number in range(count):
        policy, machine = WAYS[(seed + number) % len(WAYS)]
        try:
            found = question.answered(policy, machine)
        except Skipped:
            found = "skipped"
        except Exception as error:
            raise AssertionError(f"program {seed}, {policy}, {machine or 'cpu'}\n{text}") from error
        assert not found.startswith("WRONG"), f"program {seed}, {policy}, {machine or 'cpu'}: {found}\n{text}"
        counts[found] += 1
    return counts
