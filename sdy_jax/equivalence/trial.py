"""Trials: a program runs partitioned, and its results are compared with the plain program's; here or in a process."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.annotate.arguments import AUTO
from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import InternalError, SdyError, UnsupportedError
from sdy_jax.calls.load import loads
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.equivalence.bisection import Wrong, WrongOp, first_wrong
from sdy_jax.equivalence.comparison import Difference, compared, decided_by, is_wide, more_exact, rounded_otherwise
from sdy_jax.equivalence.extraction import results_of
from sdy_jax.equivalence.faults import fault_of, reproducer_of_op, reproducer_of_program
from sdy_jax.equivalence.subject import plain_results, program_on_mesh, words_of
from sdy_jax.equivalence.verification import Fault, Job, Outcome, Subject, Trial
from sdy_jax.ir import locations
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.devices import mesh_on_devices

# One trial.


def outcomes(job: Job, first: int = 0, plain: Sequence[np.ndarray] | None = None) -> Iterator[Outcome]:
    """What comes of the trials from one on, in order; `plain`: the results of the first program, where only the process
    that traced it can compute them."""
    subjects = [_Plain(job, subject) for subject in job.subjects]
    if plain is not None:
        subjects[0].known = list(plain)
    known: dict[Any, tuple[Trial, Outcome]] = {}
    is_found = False
    for trial in job.trials[first:]:
        outcome = _Run(job, subjects[trial.subject], trial).outcome(known, finds=job.finds and not is_found)
        is_found = is_found or outcome.fault is not None
        yield outcome


class _Plain:
    """A program, and what it returns without partitioning."""

    def __init__(self, job: Job, subject: Subject):
        self.job, self.subject = job, subject
        self.program = loads(subject.text)
        self.plain = loads(subject.plain).module if subject.plain else self.program.module
        self.values = subject.values[len(subject.values) - len(Graph(self.plain).arguments) :]
        self.known: list[np.ndarray] | None = None

    def results(self, devices: jax.sharding.Mesh) -> list[np.ndarray]:
        """The results of the plain program, in the types of its own; `devices` for what computes on their blocks."""
        return self._results(devices) if self.known is None else self.known

    @cached_property
    def _results(self) -> Callable[[jax.sharding.Mesh], list[np.ndarray]]:
        return lru_cache(maxsize=4)(lambda devices: results_of(self.plain, self.values, devices))

    @cached_property
    def exact(self) -> Callable[[bool], list[np.ndarray] | None]:
        """The results computed more exactly than in float32, or than in float64; None where they cannot be had so."""
        return lru_cache(lambda of_wide: more_exact(self.plain, self.values, of_wide))

    @cached_property
    def moved(self) -> list[np.ndarray] | None:
        """The results for arguments that are rounded otherwise."""
        return rounded_otherwise(self.plain, self.values)


class _Run:
    def __init__(self, job: Job, plain: _Plain, trial: Trial):
        self.job, self.plain, self.trial = job, plain, trial

    def outcome(self, known: dict[Any, tuple[Trial, Outcome]], finds: bool) -> Outcome:
        """`known`: the outcomes of programs that ran."""
        try:
            with warnings.catch_warnings(), jax.enable_x64(True):
                warnings.simplefilter("ignore")
                return self._outcome(known, finds)
        except InternalError as error:
            return Outcome("failed", str(error))
        except SdyError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {error}")

    def _outcome(self, known: dict[Any, tuple[Trial, Outcome]], finds: bool) -> Outcome:
        function, values = self._function(), self.plain.subject.values
        plan: Plan = function.plan(*values)
        key = self.trial.subject, self.trial.mesh, plan.mlir("partitioned")
        if key in known:
            trial, before = known[key]
            return Outcome(before.status, before.problem, before.largest, before.allowed, like=trial.target)
        found = [np.asarray(x) for x in jax.tree.leaves(function(*values))]
        difference, path = self._compared(found)
        fault = None if difference.ok or not finds else self._fault(plan)
        outcome = _outcome_of(difference, path, fault)
        known[key] = self.trial, outcome
        return outcome

    @cached_property
    def devices(self) -> jax.sharding.Mesh:
        return mesh_on_devices(self.trial.mesh)

    def _function(self) -> PartitionedFunction[..., Any]:
        """The program, partitioned."""
        subject = self.plain.subject
        program = program_on_mesh(self.plain.program, subject.mesh_name, self.trial.mesh)
        options = {**self.job.options, "mesh": self.devices, "costs": self.trial.costs, "on_unknown": "ignore"}
        with locations.called_from(subject.source):
            made: PartitionedFunction[..., Any] = partition(program, **options, **_automatic(subject, program))
        return made

    def _compared(self, found: list[np.ndarray]) -> tuple[Difference, str]:
        """What differs most, relative to what is allowed, and where."""
        paths = self.plain.subject.outputs
        differences = [(self._difference(x, number), paths[number]) for number, x in enumerate(found)]
        return max(differences, key=_how_far, default=(Difference(), ""))

    def _difference(self, found: np.ndarray, number: int) -> Difference:
        """How an array differs from a result of the plain program."""
        wanted = self.plain.results(self.devices)[number]
        difference = compared(found, wanted, self.job.rtol, self.job.atol)
        if difference.ok or self.job.rtol is not None:
            return difference
        exact, moved = self.plain.exact(is_wide(wanted.dtype)), self.plain.moved
        if exact is None:
            return difference
        return decided_by(found, wanted, exact[number], None if moved is None else moved[number])

    def _fault(self, plan: Plan) -> Fault:
        """What is wrong first. Where that cannot be found, the results are still wrong."""
        try:
            wrong = first_wrong(plan, self.devices, self.plain.subject.values, self._difference)
            fault = fault_of(wrong, plan)
        except Exception as error:
            said = " ".join(str(error).split())
            return Fault("the program", plan.source, "its results differ", "unknown", f"{type(error).__name__}: {said}")
        return replace(fault, reproducer=self._reproducer(wrong, fault)) if self.job.reproduces else fault

    def _reproducer(self, wrong: Wrong | None, fault: Fault) -> str:
        """A program that shows the wrong op alone, or else the whole program."""
        what = f"{fault.op} at {fault.source}: {fault.difference}."
        found = reproducer_of_op(wrong, what) if isinstance(wrong, WrongOp) else ""
        if found:
            return found
        program = program_on_mesh(self.plain.program, self.plain.subject.mesh_name, self.trial.mesh)
        return reproducer_of_program(self.trial, program.module.get_asm(enable_debug_info=False), what)


def _outcome_of(difference: Difference, path: str, fault: Fault | None) -> Outcome:
    """Results that differ by finite numbers, and by no op, differ by rounding."""
    figures = difference.largest, difference.allowed
    if difference.ok:
        return Outcome("same", "", *figures)
    problem = f"{path} {difference.problem}"
    if fault is not None and fault.culprit == "rounding" and np.isfinite(difference.largest):
        return Outcome("rounding", f"{problem}; {fault.evidence}", *figures)
    return Outcome("different", problem, *figures, fault=fault)


def _how_far(pair: tuple[Difference, str]) -> tuple[bool, float]:
    difference = pair[0]
    share = difference.largest / difference.allowed if difference.allowed else difference.largest
    return not difference.ok, share


def _automatic(subject: Subject, program: Program) -> dict[str, Any]:
    """What leaves layouts to the planner that were left to it."""
    found: dict[str, Any] = {}
    if subject.automatic_arguments:
        chosen = [AUTO if i in subject.automatic_arguments else None for i in range(len(program.inputs))]
        found["in_shardings"] = tuple(chosen)
    if subject.automatic_results:
        chosen = [AUTO if i in subject.automatic_results else None for i in range(len(program.outputs))]
        found["out_shardings"] = chosen[0] if len(chosen) == 1 else tuple(chosen)
    return found


# What is verified in this process: programs that only it can run, because they call its Python functions, and the
# plans of tests.


def run_here(
    job: Job, function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Outcome]:
    """The outcomes of a job's trials, on devices of this process; those for which there are too few are refused.

    Raises:
        UnsupportedError: there are too few devices for the first.
    """
    here = len(jax.devices())
    if job.trials and job.trials[0].mesh.size > here:
        raise UnsupportedError(
            f"verify: {job.subjects[0].name} calls functions of this process, so it runs here, and its mesh needs "
            f"{job.trials[0].mesh.size} devices; there {'is' if here == 1 else 'are'} {here}. To fix: "
            f"jax.config.update('jax_num_cpu_devices', {job.trials[0].mesh.size}) before jax is used"
        )
    called = _filled(job.subjects[0].values, args, kwargs)
    wanted = [np.asarray(x) for x in plain_results(function, *called)]
    return list(outcomes(job, plain=wanted))


def _filled(
    values: Sequence[np.ndarray], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with what was made up in the place of types. Values are those of what is closed over,
    then of the leaves; static arguments have none, and stand with arrays only."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        pairs = zip(leaves, values[len(values) - len(leaves) :], strict=True)
        leaves = [_like(leaf, value) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf, value in pairs]
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return args, kwargs


def _like(info: jax.ShapeDtypeStruct, value: np.ndarray) -> Any:
    if not jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(jnp.empty((), info.dtype)))


def first_wrong_in(plan: Plan, mesh: AnyMesh, called: Any, wanted: Sequence[np.ndarray]) -> str:
    """What is wrong first in a plan whose results are wrong, as lines that begin with a line's end; empty where that
    cannot be found here."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return ""
    values = [words_of(x) for x in (*plan.program.constants, *jax.tree.leaves(called))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = first_wrong(plan, mesh, values, lambda found, number: compared(found, wanted[number]))
        return f"\n{fault_of(wrong, plan)}"
    except Exception:  # the results are wrong all the same, and that is what is to be said
        return ""


# A job in a process of its own, which has as many virtual CPU devices as the job needs.

_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")
_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags of XLA's. Measured (2026-11): small programs spend most of their time in LLVM's passes."""

_FASTER = " --xla_cpu_use_fusion_emitters=false"
"""A flag of jaxlib 0.10; later ones end the process at it. Measured (2026-11, a training step of three layers): 0.7 s
instead of 3.1 s to compile and run."""

_LAST_WORDS = 300
"""Characters that are kept of what a process says as it dies. Chosen: for a table."""


def run_in_child(job: Job, timeout: float) -> list[Outcome]:
    """The outcomes of a job's trials. A trial at which the process dies has failed, and the others run in another.

    Args:
        timeout: seconds that each trial may take on average; what is not done then has failed.
    """
    with tempfile.TemporaryDirectory(prefix="sdy_jax-verify-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        found: list[Outcome] = []
        while len(found) < len(job.trials):
            first = len(found)
            problem = _run_process(folder, first, job.devices, timeout * (len(job.trials) - first))
            found += _read(folder / f"outcomes{first}")
            if len(found) < len(job.trials):
                found.append(Outcome("failed", problem or "the process ended early"))
        return found


def _run_process(folder: Path, first: int, devices: int, timeout: float) -> str:
    """What ended the process before it was done; empty if nothing did."""
    command = [sys.executable, "-m", "sdy_jax.equivalence.trial", str(folder), str(first)]
    try:
        done = subprocess.run(command, env=_environment(devices), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"the process was not done after {timeout:.0f} seconds"
    said = " ".join(done.stderr.split())[-_LAST_WORDS:]
    return f"the process ended with status {done.returncode}: {said}" if done.returncode else ""


def _environment(devices: int) -> dict[str, str]:
    given = _COUNT.sub("", os.environ.get("XLA_FLAGS", ""))
    faster = _FASTER if version("jaxlib").startswith("0.10.") else ""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{_FAST}{faster} {given} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _read(path: Path) -> Iterator[Outcome]:
    if not path.exists():  # it died before
        return
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end, or what was being written as the process died
                return


# The process that verifies: `python -m sdy_jax.equivalence.trial FOLDER FIRST`.
#
# It reads `job` in the folder, and adds each outcome to a file there as soon as it is known: what is written stays,
# if the process dies.

HOOK = "SDY_JAX_VERIFY_HOOK"
"""An environment variable, for tests: `module:function`, which is called before anything runs."""


def main(folder: Path, first: int) -> None:
    """Runs the trials from one on."""
    if hook := os.environ.get(HOOK):
        module, _, name = hook.partition(":")
        getattr(importlib.import_module(module), name)()
    job = pickle.loads((folder / "job").read_bytes())
    with open(folder / f"outcomes{first}", "wb") as file:
        for outcome in outcomes(job, first):
            pickle.dump(outcome, file)
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
