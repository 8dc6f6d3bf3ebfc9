# SPDX-License-Identifier: Apache-2.0
"""The ``shardax`` command: thin, with no logic of its own beyond reading the command line.

``shardax train`` trains a byte-level decoder on text, ``shardax show`` prints the parameters of a
run, ``shardax sample`` continues a prompt with a trained one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardax.core.errors import CommandError, ShardaxError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after ``shardax``; by default those of the process.

    Returns:
        The exit status: 0, 1 after an error, or 128 plus the signal that stopped training.

    Example:
        >>> main(["show", "/no/such/run"])
        1
    """
    try:
        import tyro
    except ImportError:
        print(
            "The command line needs extra packages: pip install 'shardax[train]'", file=sys.stderr
        )
        return 1
    from shardax.cli.sample import Sample
    from shardax.cli.show import Show
    from shardax.cli.train import Train

    command = tyro.extras.subcommand_cli_from_dict(
        {"train": Train, "show": Show, "sample": Sample}, args=arguments, prog="shardax"
    )
    try:
        return command.run()
    except (CommandError, ShardaxError) as error:
        print(f"shardax: {error}", file=sys.stderr)
        return 1
