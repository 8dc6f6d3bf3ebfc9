# SPDX-License-Identifier: Apache-2.0
"""The ``shardax`` command: thin, with no logic of its own beyond reading the command line.

``shardax train`` trains a byte-level decoder on text, ``shardax show`` prints the parameters of a
run, ``shardax sample`` continues a prompt with a trained one, ``shardax check`` says what is wrong
with a layout, ``shardax plan`` finds the layouts that fit on hardware and what each costs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from shardax._core.errors import ShardaxError

_EXTRAS = {
    **dict.fromkeys(("optax", "orbax", "rich", "tyro"), "train"),
    "cloudpickle": "plan",
}
"""Packages, and the extra that brings them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after ``shardax``; by default those of the process.

    Returns:
        The exit status: 0, 1 after an error, or 128 plus the signal that stopped it.

    Raises:
        SystemExit: If the words cannot be understood, with status 2; or after ``--help``.

    Example:
        >>> main(["show", "/no/such/run"])
        1
    """
    try:
        return _run(arguments)
    except ShardaxError as error:
        print(f"shardax: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # no permission, disk full: the user's affair, not a fault of ours
        print(f"shardax: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"shardax: {error.name} is missing. The command line needs extra packages: "
            f"pip install 'shardax[{extra}]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("shardax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str] | None) -> int:
    import tyro

    from shardax.cli.check import Check
    from shardax.cli.plan import Diff, Explain, PlanCommand
    from shardax.cli.runs import Sample, Show
    from shardax.cli.train import Train

    commands: dict[str, Any] = {
        "train": Train,
        "show": Show,
        "sample": Sample,
        "check": Check,
        "plan": PlanCommand,
    }
    words = list(sys.argv[1:] if arguments is None else arguments)
    below: dict[str, Any] = {"explain": Explain, "diff": Diff}
    if words[:1] == ["plan"] and words[1:2] and words[1] in below:
        # Beside these, the word after "plan" is a step, so tyro cannot tell them apart.
        command = tyro.cli(below[words[1]], args=words[2:], prog=f"shardax plan {words[1]}")
    else:
        command = tyro.extras.subcommand_cli_from_dict(commands, args=words, prog="shardax")
    status = command.run()
    sys.stdout.flush()
    return status
