# SPDX-License-Identifier: Apache-2.0
"""Writes ``golden_linen_rules.json``: what ``flax.linen.logical_to_mesh_axes`` makes of many rules.

Run by hand, in an environment that has flax (the table in the repository is of flax 0.12.8)::

    python tests/core/partition/make_golden_linen_rules.py

The table maps a list of rules, written ``"a=x b=x+y c=-"`` in order of priority, to one result for
each of ``names``. Names, targets and results are written alike: ``-`` is None, ``*`` is
UNCONSTRAINED, ``x+y`` is a tuple, and blanks separate dimensions.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from typing import Any

NAMES = ("a", "a b", "b a", "a - b", "b * a", "a b c", "c b a", "d -")
TARGETS = ("-", "*", "x", "y", "x+y", "y+z")
PATH = pathlib.Path(__file__).with_name("golden_linen_rules.json")


def rule_lists() -> list[str]:
    """All lists of up to two rules over a and b, some of three, and random ones of up to seven."""
    pairs = [f"{name}={target}" for name in "ab" for target in TARGETS]
    split = [f"{name}={target}" for name in "abc" for target in ("x", "y", "x+y")]
    lists = [
        " ".join(rules) for size in range(3) for rules in itertools.product(pairs, repeat=size)
    ]
    lists += [" ".join(rules) for rules in itertools.permutations(split, 3)]
    draw = random.Random(0)
    every = [f"{name}={target}" for name in "abc" for target in (*TARGETS, "z")]
    lists += [" ".join(draw.choices(every, k=draw.randint(4, 7))) for _ in range(200)]
    return list(dict.fromkeys(lists))


def main() -> None:
    """Asks flax for every list of rules and writes the table."""
    import flax
    from flax.linen import spmd
    from jax.sharding import PartitionSpec

    def read(word: str) -> Any:
        special = {"-": None, "*": PartitionSpec.UNCONSTRAINED}
        return special[word] if word in special else tuple(word.split("+")) if "+" in word else word

    def write(entry: Any) -> str:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return "-" if entry is None else "*"
        return "+".join(entry) if isinstance(entry, tuple) else str(entry)

    table: dict[str, list[str]] = {}
    for text in rule_lists():
        rules = tuple((pair.split("=")[0], read(pair.split("=")[1])) for pair in text.split())
        specs = [
            spmd.logical_to_mesh_axes(tuple(map(read, names.split())), rules) for names in NAMES
        ]
        table[text] = [" ".join(map(write, spec)) for spec in specs if spec is not None]
    rows = ",\n".join(f"{json.dumps(text)}: {json.dumps(row)}" for text, row in table.items())
    head = f'{{"flax": {json.dumps(flax.__version__)},\n"names": {json.dumps(NAMES)},\n'
    PATH.write_text(f'{head}"rules": {{\n{rows}\n}}}}\n')
    print(f"{len(table)} lists of rules, {len(table) * len(NAMES)} results: {PATH}")


if __name__ == "__main__":
    main()
