# SPDX-License-Identifier: Apache-2.0
"""The ``shardax`` command line.

``shardax train`` trains a byte-level decoder on text, ``shardax show`` prints the parameters of a
run, ``shardax sample`` continues a prompt with a trained one, ``shardax check`` reports what is
wrong with a layout, ``shardax plan`` finds the layouts that fit on hardware and what each costs.

A command is a dataclass: its fields are the options, the comments above them the help of these.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

from shardax._core.errors import ShardaxError

# Packages, and the extra that brings them.
_EXTRAS = {**dict.fromkeys(("optax", "orbax", "rich", "tyro"), "train"), "cloudpickle": "plan"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ShardaxError, OSError) as error:  # such as no permission, disk full
        problem = str(error)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        problem = (
            f"{error.name} is missing. The command line needs extra packages: "
            f"pip install 'shardax[{extra}]'"
        )
    except KeyboardInterrupt:
        print("shardax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"shardax: {problem}", file=sys.stderr)
    return 1


def _run(words: list[str]) -> int:
    import tyro

    from shardax.cli.check import Check
    from shardax.cli.plan import Diff, Explain, PlanCommand
    from shardax.cli.runs import Sample, Show
    from shardax.cli.train import Train

    # Beside these, the word after "plan" is a step, so tyro cannot tell them apart.
    below: dict[str, Any] = {"explain": Explain, "diff": Diff}
    if words[:1] == ["plan"] and words[1:2] and words[1] in below:
        command = tyro.cli(below[words[1]], args=words[2:], prog=f"shardax plan {words[1]}")
    else:
        commands: dict[str, Any] = {
            "train": Train,
            "show": Show,
            "sample": Sample,
            "check": Check,
            "plan": PlanCommand,
        }
        choices: Any = tuple(
            Annotated[Any, tyro.conf.subcommand(name, constructor=kind, description=_help(kind))]
            for name, kind in commands.items()
        )
        union: Any = Union[choices]  # noqa: UP007 (of a tuple)
        command = tyro.cli(union, args=words, prog="shardax")
    status = command.run()
    sys.stdout.flush()
    return status


def _help(command: Any) -> str:
    return "\n\n".join(filter(None, [command.__doc__, getattr(command, "details", "")]))
