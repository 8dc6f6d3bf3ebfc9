# SPDX-License-Identifier: Apache-2.0
"""The ``shardax`` command line.

``shardax train`` trains a byte-level decoder on text, ``shardax show`` prints the parameters of a
run, ``shardax sample`` continues prompts with a trained one, ``shardax verify`` checks the files
of a run, ``shardax launch`` trains in several processes on one machine, ``shardax check`` reports
what is wrong with a layout, ``shardax plan`` finds the layouts that fit on hardware and what each
costs, ``shardax migrate`` translates programs that use Flax NNX.

A command is a dataclass: its fields are the options, the comments above them the help of these. The
exit status is 2 for a command line that cannot be run, and 1 for what fails on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import io
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Union

from shardax.errors import ShardaxError

_COMMANDS = {
    "train": "Train a byte-level decoder on text.",
    "show": "Print the table of a run's parameters.",
    "sample": "Continue prompts with a trained run, or with a published model.",
    "verify": "Check the checkpoints, the settings and the log of a run.",
    "launch": "Run a command in several processes on this machine.",
    "check": "Report what is wrong with a model's layout over a mesh.",
    "plan": "Find the layouts that fit on hardware, with their costs.",
    "migrate": "Translate Flax NNX programs.",
}
"""First lines of the commands' own docstrings, for where these cannot be imported."""

# Packages, and the extra that brings them.
_EXTRAS = {
    **dict.fromkeys(("optax", "orbax", "rich", "tyro"), "train"),
    "cloudpickle": "plan",
    "libcst": "migrate",
}
_MISSING = "{} is missing. The command line needs extra packages: pip install 'shardax[{}]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    # Python's documentation says to replace it so; ty takes functions of modules for constants.
    warnings.showwarning = _show_warning  # ty: ignore[invalid-assignment]
    status = 1
    try:
        if arguments is None:  # the process is this command
            _import_train()
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ShardaxError, OSError) as error:  # such as no permission, disk full
        problem = str(error)
        # A path that no file could have is the command line's fault.
        unusable = getattr(error, "errno", None) in (errno.ENAMETOOLONG, errno.ELOOP)
        status = 2 if unusable else getattr(error, "exit_status", 1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        problem = _MISSING.format(error.name, extra)
    except KeyboardInterrupt as error:
        problem, status = str(error) or "interrupted", 128 + signal.SIGINT
    except Exception as error:
        if not _is_one_of_several():
            raise
        traceback.print_exc()
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:400]}"
    print(f"shardax: {problem}", file=sys.stderr)
    if _is_one_of_several():
        from shardax.distributed.startup import end_now

        end_now(status)
    return status


def _is_one_of_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _show_warning(message: Warning | str, *args: object, **named: object) -> None:
    print(f"shardax: {message}", file=sys.stderr)


def _import_train() -> None:
    """Imports modules common to all commands, with few garbage collections."""
    # Tracing a step makes a hundred thousand objects, of which most stay, and what is imported
    # stays too: to look at them again and again takes a tenth of the time to the first step.
    gc.set_threshold(50_000, 20, 20)
    with contextlib.suppress(ImportError):  # said where it is needed
        import shardax.cli.train  # noqa: F401
    gc.freeze()


def _run(words: list[str]) -> int:
    try:
        import tyro
    except ModuleNotFoundError as error:
        if {"-h", "--help"}.isdisjoint(words):
            raise
        print(f"usage: shardax [-h] {{{','.join(_COMMANDS)}}}\n")
        print(*(f"  {name:8}{line}" for name, line in _COMMANDS.items()), sep="\n")
        print(f"\n{_MISSING.format(error.name, _EXTRAS['tyro'])}", flush=True)
        return 0

    from shardax.cli.inputs import check_words

    check_words(words)
    if words[:1] == ["migrate"]:  # it needs none of the extras of the others
        from shardax.cli.migrate import Migrate

        return _finished(_parsed(Migrate, words[1:], "shardax migrate"))
    from shardax.cli.train import Train

    if words[:1] == ["train"]:  # without importing what the other commands need
        return _finished(_parsed(Train, words[1:], "shardax train"))
    from shardax.cli.check import Check
    from shardax.cli.launch import Launch
    from shardax.cli.plan import Diff, Explain, PlanCommand
    from shardax.cli.runs import Sample, Show, Verify

    child: tuple[str, ...] = ()
    if words[:1] == ["launch"] and "--" in words:
        place = words.index("--")
        words, child = words[:place], tuple(words[place + 1 :])
    # Beside these, the word after "plan" is a step, so tyro cannot tell them apart.
    plan_commands: dict[str, Any] = {"explain": Explain, "diff": Diff}
    kind, name = None, "shardax"
    if words[:1] == ["plan"] and words[1:2] and words[1] in plan_commands:
        kind, name, words = plan_commands[words[1]], f"shardax plan {words[1]}", words[2:]
    else:
        commands: dict[str, Any] = {
            "train": Train,
            "show": Show,
            "sample": Sample,
            "verify": Verify,
            "launch": Launch,
            "check": Check,
            "plan": PlanCommand,
        }
        if words[:1] not in [[name] for name in commands]:  # help, or a mistake
            with contextlib.suppress(ModuleNotFoundError):
                from shardax.cli.migrate import Migrate

                commands["migrate"] = Migrate
        choices = tuple(
            Annotated[Any, tyro.conf.subcommand(name, constructor=kind, description=_help(kind))]
            for name, kind in commands.items()
        )
        kind = Union[choices]  # noqa: UP007 (of a tuple)
    command = _parsed(kind, words, name)
    if isinstance(command, Launch):
        # Here, so that the mistakes of the command that is launched are told once.
        launched = _parsed(Train, child[1:], "shardax train") if child[:1] == ("train",) else None
        command = dataclasses.replace(command, words=child, launched=launched)
    return _finished(command)


def _finished(command) -> int:
    status = command.run()
    sys.stdout.flush()
    return status


def _parsed(kind, words: Sequence[str], name: str):
    """Makes a command of its words, or raises CommandError."""
    import tyro

    from shardax.cli.inputs import CommandError

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(kind, args=words, prog=name)
    except SystemExit as error:
        if not error.code:  # such as after --help
            raise
        raise CommandError(_in_one_line(stderr.getvalue())) from None


def _in_one_line(box: str) -> str:
    """Returns tyro's text in a box, without the repeated help."""
    text = re.sub("[\u256d\u256e\u256f\u2570\u2502|]", " ", box)
    parts = [" ".join(part.split()).strip("-\u2500 ") for part in re.split("[-\u2500]{3,}", text)]
    title, message = [part for part in parts if part][:2]
    start = "" if message.startswith(title) else f"{title}: "
    return f"{start}{message[:400].rstrip('.')}. See shardax --help."


def _help(command: object) -> str:
    return "\n\n".join(filter(None, [command.__doc__, getattr(command, "details", "")]))
