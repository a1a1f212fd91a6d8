"""`sdy-jax plan`: the report on a program, why a value is sharded so, the module of a stage, budgets; and `clear`."""

from __future__ import annotations

import argparse

import jax

from sdy_jax.base.errors import SdyError, did_you_mean
from sdy_jax.cli import UsageError
from sdy_jax.cli.arguments import explained
from sdy_jax.cli.devices import Topology, compiled_report, prepare
from sdy_jax.cli.partitioned_program import UserProgram, job_of
from sdy_jax.ir.jax_shardings import array_text, bytes_of_text, bytes_text
from sdy_jax.plan.contracts import Advice, Budget, check
from sdy_jax.plan.digests import FOLDER, cache_folder
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.files import is_saved_plan, load_plan
from sdy_jax.plan.record.record import PlanRecord

# Plans kept, compared and held to budgets on the command line.

_ADVICE = Advice("sdy-jax plan without --budget", "with --fixes")

_BYTES = ("wire_bytes", "memory")
_LIMITS = (*_BYTES, "forbid")


class Demands:
    """What is asked of a plan beside printing it. What needs no plan is checked first: it may take long to make.

    Raises:
        UsageError: `--budget` says nothing that a budget can.
        SdyError: the file of `--diff` is no plan.
    """

    def __init__(self, options: argparse.Namespace):
        self.before: PlanRecord | None = load_plan(options.diff) if options.diff else None
        self._save, self._html, self._trace = options.save, options.html, options.trace
        self._budget = budget_of(options.budget) if options.budget else None

    def keep(self, plan: Plan) -> None:
        """Writes the plan to the file of `--save`, and what is drawn of it to others."""
        if self._save:
            plan.save(self._save)
        self.draw(plan)

    def draw(self, plan: Plan | PlanRecord) -> None:
        """Writes the files of `--html`, beside the plan of `--diff`, and of `--trace`."""
        if self._html:
            plan.to_html(self._html, self.before)
        if self._trace:
            plan.to_trace(self._trace)

    def check(self, plan: Plan) -> None:
        """
        Raises:
            ContractError: the plan breaks its budget.
        """
        check(plan, self._budget, (), _ADVICE)


def show_saved(file: str, options: argparse.Namespace) -> None:
    """Prints a plan that `--save` wrote, a table of it, or what changed before it, and writes its page or trace.

    Raises:
        UsageError: options ask for what only the program can answer.
    """
    asked = [f"--{name.replace('_', '-')}" for name in _OF_PROGRAMS if getattr(options, name)]
    if asked:
        raise UsageError(f"{asked[0]} needs the program, {file} is a saved plan of it; to fix: name the program")
    plan, demands = load_plan(file), Demands(options)
    demands.draw(plan)
    if options.table:
        plan.table(options.table).show()
    else:
        print(plan if demands.before is None else plan.diff(demands.before))


_SHARDINGS = ("in_shardings", "out_shardings")
_ARGUMENTS = ("args", "args_from")
_DEVICES = ("topology", "machine", "mesh")
_OF_PROGRAMS = ("why", "fixes", "stage", "python", "save", "budget", *_DEVICES, *_ARGUMENTS, *_SHARDINGS)


def budget_of(text: str) -> Budget:
    """The budget that `wire_bytes=10MiB,memory=12GiB,forbid=all_gather,model=all_reduce+reduce_scatter` says: every
    other name is that of a mesh axis, with the kinds that may send along it.

    Raises:
        UsageError: it says none.
    """
    said: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not name or not equals or name in said:
            raise UsageError(f"--budget: {entry.strip()!r} is not NAME=VALUE, once per name; {_FORM}")
        if name not in _LIMITS and bytes_of_text(value) is not None:
            near = did_you_mean(name, _LIMITS)
            raise UsageError(f"--budget: no limit is called {name!r}; {near}{_FORM}")
        said[name] = value
    forbidden = _kinds(said.pop("forbid", ""))
    amounts = {name: said.pop(name) for name in _BYTES if name in said}
    axes = {axis: _kinds(kinds) for axis, kinds in said.items()}
    try:
        return Budget(**amounts, forbid=forbidden, axes=axes or None)
    except SdyError as error:
        raise UsageError(f"--budget: {str(error).removeprefix('Budget: ')}") from None


_FORM = "expected wire_bytes=10MiB,memory=12GiB,forbid=all_gather,AXIS=all_reduce+reduce_scatter, or some of them"


def _kinds(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (kind.strip() for kind in text.split("+"))))


# `sdy-jax plan`: the report on a program, why a value is sharded as it is, or the module of a stage.


def run(options: argparse.Namespace) -> int:
    """Prints what is asked for."""
    if is_saved_plan(options.program):
        show_saved(options.program, options)
        return 0
    options.chips = _chips(options)
    demands = Demands(options)
    job = job_of(options)
    with explained(job.file), job.settings():
        check_sizes(job)
        plan = job.plan(job.args, job.kwargs)
        demands.keep(plan)
        if demands.before is not None:
            print(plan.diff(demands.before))
        elif options.why:
            print(plan.why(options.why))
        elif options.table:
            plan.table(options.table).show()
        elif options.fixes:
            print(plan.fixes)
        elif options.stage:
            print(plan.mlir(options.stage), end="")
        elif options.python is not None:
            _write_python(plan, options.python)
        else:
            plan.show()
            if options.chips is not None:
                print(f"\n{compiled_report(job.lower(), options.chips)}")
        demands.check(plan)
    return 0


def _write_python(plan: Plan, file: str) -> None:
    """Writes the program as Python, or prints it where the file is `-`."""
    if file == "-":
        print(plan.to_python(), end="")
    else:
        plan.to_python(file)
        print(f"{file}: {plan.headline}")


def _chips(options: argparse.Namespace) -> Topology | None:
    """The accelerators that `--topology` names."""
    if options.topology and options.machine:
        raise UsageError("--topology compiles for what it names, and --machine plans without a compiler; leave one out")
    if not options.topology:
        if options.slices != 1:
            raise UsageError("--slices says of how many slices there are to be; name one of them by --topology")
        if options.machine:
            prepare()
        return None
    prepare()
    return Topology.of(options.topology, options.slices)


def check_sizes(job: UserProgram) -> None:
    """
    Raises:
      SdyError: a size of an argument is symbolic.
    """
    infos = [leaf for leaf in jax.tree.leaves((job.args, job.kwargs)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not all(isinstance(size, int) for info in infos for size in info.shape):
        raise SdyError(
            f"the program takes {', '.join(map(array_text, infos))}; to fix: give the types with sizes as --args"
        )


# `sdy-jax clear`: removes the plans that are kept, and the programs beside them.


def clear(options: argparse.Namespace) -> int:
    """Removes the plans that are kept, and the programs beside them; prints how many there were.

    Raises:
        SdyError: none are kept anywhere.
    """
    folder = cache_folder()
    if folder is None:
        raise SdyError(f"no plans are kept; to fix: name their folder, {FOLDER}=DIR in the environment")
    files, size = folder.clear()
    print(f"{folder.path}: {files} file{'' if files == 1 else 's'} removed, {bytes_text(size)}")
    return 0
