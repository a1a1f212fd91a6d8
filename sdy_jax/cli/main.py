"""The command line: `sdy-jax opt`, `plan`, `run`, `verify`, `doctor`, `clear`, their options and platforms."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn

from sdy_jax.base.errors import SdyError, did_you_mean, listed, nearest
from sdy_jax.base.version import __version__
from sdy_jax.cli import UsageError, terminal
from sdy_jax.cli.terminal import described_bug

# Platforms whose devices need not be there to compile for them: what the command line says and sets for each.
#
# Without jax, so that `--help` is quick.


@dataclass(frozen=True, slots=True)
class CompilerPackage:
    """What compiles for devices that are not there.

    Attributes:
        name: as people call it.
        modules: those of which one is there where it is installed.
        install: what pip installs it by.
        uses: packages with what they are for, as `doctor` says it.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    uses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DescribedPlatform:
    """A platform that `--topology` names.

    Attributes:
        example: devices of it, as they are named.
        sizes: what the sizes in it count, where the platform has no names of its own for them.
        compiler: what has to be installed.
        environment: variables to be set before jax looks for devices.
    """

    example: str
    sizes: str
    compiler: CompilerPackage
    environment: Mapping[str, str]


TPU = DescribedPlatform(
    "tpu:v5e:16x16",
    "",
    CompilerPackage("libtpu", ("libtpu",), "libtpu", {"libtpu": "plans for TPU pods"}),
    # It asks no cloud, which might not answer, and compiles beside other processes.
    {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
)

GPU = DescribedPlatform(
    "gpu:h100:8x1x8",
    "slices x hosts x GPUs",
    CompilerPackage("jax's plugin for CUDA", ("jax_cuda13_plugin", "jax_cuda12_plugin"), "jax-cuda13-plugin"),
    # It loads without the libraries that programs run with.
    {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
)

DESCRIBED = {"tpu": TPU, "gpu": GPU}
"""By the platform, as `--topology` begins with it."""

EXAMPLE = TPU.example

FORMS = ", or ".join(
    f"{', '.join(filter(None, (each.example, each.sizes)))} (needs {each.compiler.name})" for each in DESCRIBED.values()
)
"""What `--topology` may be, with what has to be installed."""


def check_compiler(platform: str) -> None:
    """Raises:
    SdyError: the platform is known, and its compiler is not installed.
    """
    if platform not in DESCRIBED:
        return
    compiler = DESCRIBED[platform].compiler
    if not any(importlib.util.find_spec(module) for module in compiler.modules):
        raise SdyError(
            f"--topology {platform}:... compiles with {compiler.name}, which is not installed; to fix: "
            f"pip install {compiler.install}"
        )


# The options of the command line, and what `--help` says of them.
#
# No command is imported here, nor jax, so that `--help` is quick.

_MAIN = """\
Shardy's tensor partitioning in Python, on JAX.

  sdy-jax opt --pipeline propagation-pipeline model.mlir         run passes on a module
  sdy-jax plan model.mlir                                        read which collectives it needs, and why
  sdy-jax plan train.py:step --mesh data=8 --args-from example   likewise of a function, for the arguments of example()
  sdy-jax run model.mlir --inputs in.npz --outputs out.npz       run it, on real or virtual devices
  sdy-jax verify model.mlir                                      compare it with the program on one device
  sdy-jax doctor                                                 check this installation
  sdy-jax clear                                                  forget the plans that are kept

Exit status: 0; 1 where the input is bad, as FILE:LINE:COLUMN: error: MESSAGE on standard error; 2 for bad options.
Colours are used on terminals only, and not where NO_COLOR is set.
"""

_OPT = """\
Runs passes on a module and prints it. The names and options of passes are Shardy's:

  sdy-jax opt --pipeline basic-propagate,close-shardings model.mlir
  sdy-jax opt --pipeline 'sdy-aggressive-propagate{propagation-strategy=basic}' - < model.mlir

Without a pipeline the module is parsed, verified and printed. What is wrong with it is said on standard error as
FILE:LINE:COLUMN: error: MESSAGE, and the exit status is 1. Where a rule of the SDY dialect is broken, MESSAGE begins
with the rule's name.
"""

_SPLIT = """\
take the parts of the file between lines `// -----` for modules of their own, and print them likewise; where one is
wrong, `// error: MESSAGE` stands in its place, and the exit status at the end is 1
"""

_PROGRAM = """\
PROGRAM is a file (- for standard input) with MLIR text, MLIR bytecode, a StableHLO portable artifact or what jax.export
serialized; or a function, as module:function or file.py:function. What kind of file it is, is found out by itself.
"""

_PLAN = f"""\
Prints the plan of a program: what is sharded how, which collectives run, how many bytes they send and which line caused
each. Nothing runs, and no accelerators are needed: devices that are missing are virtual ones on the CPU.

{_PROGRAM}
  sdy-jax plan model.mlir                                   a module that says its mesh and shardings itself
  sdy-jax plan model.bin --mesh data=2,model=4 \\
      --in-shardings "P('data'), {{'up': P(None, 'model'), 'down': P('model')}}"
  sdy-jax plan train.py:step --mesh data=8 --args "f32[64,128], f32[128,10]" --in-shardings "P('data'), None"
  sdy-jax plan train.py:step --mesh data=8 --args-from train.py:example   types from a function that returns arguments
  sdy-jax plan train.py:step --mesh data=8 --mesh data=4,model=2 --in-shardings AUTO ...   on the better one of both
  sdy-jax plan model.mlir --why result                      why the result is sharded as it is
  sdy-jax plan model.mlir --stage partitioned               the module with its collectives
  sdy-jax plan train.py:step ... --save step.plan.json      keeps the plan, which needs no source to be read
  sdy-jax plan step.plan.json                               prints the plan that was saved
  sdy-jax plan train.py:step ... --diff step.plan.json      what changed since, because of which line
  sdy-jax plan train.py:step ... --pin step.plan.json       the same plan, or an error that says what is another
  sdy-jax plan train.py:step ... --budget wire_bytes=10MiB,forbid=all_gather   fails where it does more
  sdy-jax plan model.mlir --python on_devices.py            what each device runs, as Python to read and run
  sdy-jax plan train.py:step ... --html plan.html           a page to explore in a browser
  sdy-jax plan train.py:step --mesh data=256,model=256 ...  makes no devices, however many there are
  sdy-jax plan train.py:step --machine h100 --mesh data=8,model=8 ...   for eight servers of eight, in seconds
  sdy-jax plan train.py:step --topology {EXAMPLE} --mesh data=16,model=16 ...   compiles it for them
"""

_RUN = f"""\
Runs a program, partitioned, on real devices or, where there are too few, on virtual ones on the CPU.

{_PROGRAM}
Inputs and outputs are numpy's .npz files. Inputs are called arg0, arg1, ... in the order in which the program takes
them, or by the names that the plan has for them; outputs out0, out1, ... All are global arrays. numpy has no names for
bfloat16, float8 and such: it writes them as raw bytes (dtype V2 or V1), and so they are read and written here. In
Python they are numpy.load(FILE)["out0"].view(ml_dtypes.bfloat16). Random keys are their words, uint32.

A program on local arrays, which communicates itself by ops of the mesh or shard dialect, runs on every device as it is:
its inputs and outputs have a leading dimension, with an entry for every device of its mesh.

  sdy-jax run model.mlir --inputs in.npz --outputs out.npz
  sdy-jax run model.mlir --random 0                         random inputs; prints a summary of the outputs
  sdy-jax run model.bin --mesh x=4 --in-shardings "P('x')" --inputs in.npz --outputs out.npz
"""

_VERIFY = f"""\
Compares a program, partitioned, with the same program on one device: forward and derivatives, on its mesh and on one
whose sizes divide few others, as it is planned for each kind of machine. It runs on virtual devices on the CPU, in a
process of its own; meshes of more than 16 devices are scaled down. The exit status is 1 where something differs; then
the first wrong value is named, with its op, line, layouts and collectives.

{_PROGRAM}
  sdy-jax verify model.mlir                                 with arguments that are made up
  sdy-jax verify train.py:step --mesh data=8 --args "f32[64,128], f32[128,10]" --in-shardings "P('data'), None"
  sdy-jax verify model.mlir --also x=2,y=3 --target gpu --reproducer wrong.py
"""

_DOCTOR = """\
Says what is installed, which devices there are and what works on them, down to a small partitioned program that is
compared with the plain one. The exit status is 1 if something essential is broken.
"""

_CLEAR = """\
Removes the plans that were kept so that programs need not be planned again: those in the folder that SDY_JAX_CACHE_DIR
names, else in that of jax's compilation cache, where that is on.
"""


_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)")


class OptionParser(argparse.ArgumentParser):
    """A parser that says of an option what is wrong and what would be right in one line."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Says it, and ends the process with exit status 2."""
        choice = _CHOICE.search(message)
        if choice is not None:
            known = [name.strip("'") for name in choice["known"].split(", ")]
            near = did_you_mean(choice["given"], known)
            message = message.replace(choice[0], f"{choice['given']!r}; {near}expected one of {listed(known)}")
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help says more\n")

    def parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options; those that no command has are an error of the command."""
        options, rest = self.parse_known_args(arguments)
        if rest:
            command = self.commands.get(options.command, self)
            name = next((each for each in rest if each.startswith("-")), rest[0]).partition("=")[0]
            near = nearest(name, command._option_string_actions)
            meant = f"; did you mean {near}?" if near else ""
            is_option = name.startswith("-")
            command.error(f"no option is called {name}{meant}" if is_option else f"{name!r} is one argument too many")
        return options


def option_parser() -> OptionParser:
    parser = OptionParser(prog="sdy-jax", description=_MAIN, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of sdy_jax")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.commands = commands.choices
    _add_opt(_command(commands, "opt", "apply passes to a module and print it", _OPT))
    _add_plan(_command(commands, "plan", "print the plan of a program", _PLAN))
    _add_run(_command(commands, "run", "run a program, partitioned", _RUN))
    _add_verify(_command(commands, "verify", "compare a program, partitioned, with itself on one device", _VERIFY))
    _add_doctor(_command(commands, "doctor", "check the installation and the devices", _DOCTOR))
    _command(commands, "clear", "remove the plans that are kept", _CLEAR)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("sdy_jax", __version__)
        parser.exit()


def _command(
    commands: argparse._SubParsersAction[OptionParser], name: str, summary: str, text: str
) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text, formatter_class=formatter, allow_abbrev=False
    )
    return parser


def _add_opt(parser: argparse.ArgumentParser) -> None:
    passes = "passes separated by commas, with or without the sdy- prefix, options in braces"
    parser.add_argument("--pipeline", default="", metavar="NAMES", help=passes)
    parser.add_argument("--split-input-file", action="store_true", help=_SPLIT)
    generic = "print every op in MLIR's generic form, which any MLIR tool with the program's dialects can read"
    parser.add_argument("--generic", action="store_true", help=generic)
    strict = "check the module for the rules that the SDY dialect documents and jaxlib does not enforce, too"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("file", metavar="FILE", help="MLIR text, or - for standard input")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_program(parser)
    parser.add_argument(
        "--topology",
        metavar="PLATFORM:SLICE",
        help="compile for all devices of a slice, though none is there, and print what the compiler says of memory, "
        f"costs and collectives: {FORMS}",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="plan for these machines by their published rates and memory, with no compiler and none of them there: "
        "h100, v5e, 'h100 x8' for a host of eight, '4 x h100 x8' for four and their network; by the name alone, "
        "as many usual hosts as the mesh takes. An unknown name lists the names",
    )
    parser.add_argument(
        "--slices", type=_count, default=1, metavar="N", help="so many slices; the mesh's first axis runs over them"
    )
    parser.add_argument(
        "--donate",
        metavar="ARGS",
        help="arguments whose memory results may take, as a training step's state: their numbers or names, 0,state",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--why", metavar="VALUE", help="print why a value is sharded as it is, back to the annotations")
    shown.add_argument(
        "--table",
        metavar="KIND",
        choices=("collectives", "ops", "values", "arguments", "memory", "meshes"),
        help="print all rows of one kind, which the report folds: %(choices)s",
    )
    shown.add_argument("--fixes", action="store_true", help="try changes of one line, and print those that save bytes")
    shown.add_argument("--diff", metavar="OLD", help="print what changed since the plan that --save wrote to this file")
    shown.add_argument(
        "--stage",
        metavar="NAME",
        choices=("traced", "imported", "propagated", "ordered", "recomputed", "blocked", "partitioned"),
        help="print the module after this stage instead of the report: %(choices)s",
    )
    shown.add_argument(
        "--python",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write what each device runs as a Python module, which needs jax and numpy only; without FILE, print it",
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan to a file as well, for --diff and --pin")
    _add_pin(parser)
    page = "write the plan as a page to explore in a browser, too; with --diff, beside the plan before"
    parser.add_argument("--html", metavar="FILE", help=page)
    trace = "write one step as a trace, which ui.perfetto.dev and chrome://tracing open; the costs are to be seconds"
    parser.add_argument("--trace", metavar="FILE", help=trace)
    parser.add_argument(
        "--budget",
        metavar="LIMITS",
        help="fail, with exit status 1, where the plan sends or holds more: "
        "wire_bytes=10MiB,memory=12GiB,forbid=all_gather+all_to_all,AXIS=all_reduce",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_program(parser)
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--inputs", metavar="FILE.npz", help="the arguments")
    inputs.add_argument(
        "--random",
        type=_seed,
        metavar="SEED",
        help="make up the arguments: floats are normally distributed, integers are from 0 to 9",
    )
    parser.add_argument("--outputs", metavar="FILE.npz", help="where to write the results; default: print a summary")
    _add_pin(parser)


def _add_pin(parser: argparse.ArgumentParser) -> None:
    what = "follow the plan that --save wrote to this file, or fail where the program has another one"
    parser.add_argument("--pin", metavar="FILE", help=what)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_program(parser)
    parser.add_argument("--inputs", metavar="FILE.npz", help="the arguments, as for run; default: made up")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="AXES",
        help="other sizes of its axes to run on: name=size,...",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        help="by whose costs it is planned: a kind of machine, such as gpu, or one, such as h100; may be given several "
        "times; default: each kind",
    )
    parser.add_argument("--no-derivatives", dest="derivatives", action="store_false", help="compare results only")
    parser.add_argument("--no-uneven", dest="uneven", action="store_false", help="run on the program's mesh only")
    parser.add_argument("--seed", type=_seed, default=0, metavar="SEED", help="of what is made up; default: 0")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--reproducer", metavar="FILE.py", help="where to write a program that shows what is wrong")


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM", help="a file or a function")
    parser.add_argument(
        "--function",
        metavar="NAME",
        help="the function of a file with MLIR that the program begins at; default: the only one, or @main. Of modules "
        "between lines `// -----`, and of modules in one another, the one that defines it is taken",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        action="append",
        help="name=size,...; default: the mesh of the program's shardings, else one axis with all of --devices; of "
        "several the best one is taken where shardings are AUTO",
    )
    parser.add_argument(
        "--devices", type=_count, metavar="N", help="how many devices there are to be; default: the mesh's"
    )
    parser.add_argument(
        "--in-shardings",
        metavar="SPECS",
        help="as in Python: one for all arguments, or one per argument, separated by commas: P('data', None), None for "
        "what propagation decides, AUTO for what the planner chooses, a string with SDY's text, or tuples, lists and "
        "dicts of them",
    )
    parser.add_argument("--out-shardings", metavar="SPECS", help="likewise for the results")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--args",
        metavar="TYPES",
        help="the types of a function's arguments, or of those of a program with symbolic shapes: f32[64,128], "
        "bf16[8], i32[], or tuples, lists and dicts of them",
    )
    given.add_argument(
        "--args-from",
        metavar="FUNCTION",
        help="a function without parameters that returns the arguments as a tuple, arrays or jax.ShapeDtypeStructs: "
        "module:function, file.py:function, or the name of one beside the program; only run computes what it returns",
    )
    parser.add_argument(
        "--drop-shardings", action="store_true", help="forget the shardings and meshes that a file has by itself"
    )
    parser.add_argument(
        "--any-platform", action="store_true", help="run a jax.export file on platforms that it was not exported for"
    )
    parser.add_argument(
        "--optimize-collectives",
        action="store_true",
        help="let cheaper collectives take the place of those that the program holds itself",
    )
    parser.add_argument(
        "--layouts",
        metavar="HOW",
        help="how layouts inside of the program are chosen: local, propagated or global, as in sdy_jax.partition",
    )
    parser.add_argument(
        "--constraints",
        metavar="HOW",
        help="with --layouts global, what constraints inside are: kept or hints, as in sdy_jax.partition",
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help="with --layouts global, what a device may hold: a number, or 16GiB"
    )
    parser.add_argument(
        "--effort",
        type=_count,
        metavar="N",
        help="with --layouts global, how often layouts are chosen for the whole program at most",
    )

    parser.add_argument(
        "--no-recompute",
        dest="recompute",
        action="store_false",
        help="hold what a backward pass needs, instead of computing it again where memory does not suffice",
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=_count, metavar="N", help="check with N devices, virtual ones if need be")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices")
    return number


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no seed, which is a whole number from 0 on")
    return int(text)


# The command line: `sdy-jax opt`, `plan`, `run`, `verify`, `doctor` and `clear`.
#
# Here are the exit statuses. What does the work is imported when a command runs, and jax with it, so that `--help` is
# quick.

_WORK = {
    "opt": ("opt", "run"),
    "plan": ("plan", "run"),
    "run": ("run", "run"),
    "verify": ("run", "verify_program"),
    "doctor": ("doctor", "run"),
    "clear": ("plan", "clear"),
}
"""The module of each command, and its function."""

_INTERRUPTED = 130
"""Given by shells: 128 and the number of the signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, 1 where the input is bad, 2 where the options are."""
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    parser = option_parser()
    options = parser.parsed(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _run(options)
    except SdyError as error:
        terminal.print_error(error)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # who reads our output has stopped; nothing may be flushed to them at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None:
            terminal.print_error(SdyError(described_bug(error)))
        else:  # of writing our output: those of the user's files are explained where these are opened
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            terminal.print_error(SdyError(f"<stdout>: error: {error.strerror or error}"))
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        terminal.print_error(SdyError(described_bug(error)))
        return 1


def _run(options: argparse.Namespace) -> int:
    module, function = _WORK[options.command]
    work = getattr(import_module(f"sdy_jax.cli.{module}"), function)
    unfiltered = import_module("sdy_jax.base.jax_calls").unfiltered  # for `described_bug`
    with unfiltered(), terminal.printed_warnings():
        status = int(work(options))
    sys.stdout.flush()
    return status
