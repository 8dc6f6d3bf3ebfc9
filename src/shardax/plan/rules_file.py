# SPDX-License-Identifier: Apache-2.0
"""Rules files: layouts in TOML, written by the planner or by hand.

A rules file holds one layout or several, each a table in ``layouts``, best first::

    [layouts."fsdp 16x1"]
    mesh = { data = 16, model = 1 }
    rules = [
        ["batch", "data"],
        ["mlp", ["model", "data"]],
        ["layers", []],
    ]

A rule is a pair of a logical name and a mesh axis, or a list of mesh axes, the first varying
slowest; ``[]`` stands for None (replicate), which TOML does not have, and
``{ unconstrained = true }`` leaves a dimension to the compiler. ``mesh`` may be left out, and the
policies ``on_conflict`` and ``on_unmapped`` are those of ``Rules``; ``parallel``, a table, has the
settings of ``sx.parallel``, and ``optimizer_rules`` and ``optimizer_memory`` are of the optimizer's
state alone. With a single layout its keys
may stand at the top of the file, and rules of distinct names may be a table (``[rules]``,
``batch = "data"``). The order of everything is kept.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardax import OptState, Rules, parallel
from shardax._files import write_whole
from shardax.errors import PartitionError
from shardax.extend import did_you_mean
from shardax.partition import UNCONSTRAINED
from shardax.plan.records import Layout

_OPTIMIZER = ("optimizer_rules", "optimizer_memory")
_KEYS = ("rules", "mesh", "on_conflict", "on_unmapped", "parallel", *_OPTIMIZER)
_EXAMPLE = 'rules = [["batch", "data"], ["mlp", ["data", "model"]], ["layers", []]]'
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class NamedRules:
    """Rules with a name, and their mesh.

    Attributes:
        name: For tables and for picking it from a file.
        rules: The rules.
        mesh: Pairs of a mesh axis and its size, in order; None: any mesh.
        notes: Lines written as comments above it; reading does not bring them back.
        parallel: Settings of ``sx.parallel``, pairs of name and value.
        optimizer_rules: Rules of the optimizer's state alone, before the others.
        optimizer_memory: Kind of memory of the optimizer's state; "" for that of the devices.

    Example:
        >>> entry = NamedRules("tp", Rules({"mlp": "model"}), (("model", 4),), ("9.1 GiB",))
        >>> print(rules_text([entry]), end="")
        # 9.1 GiB
        [layouts."tp"]
        mesh = { "model" = 4 }
        rules = [
            ["mlp", "model"],
        ]
    """

    name: str
    rules: Rules
    mesh: tuple[tuple[str, int], ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    parallel: tuple[tuple[str, Any], ...] = ()
    optimizer_rules: tuple[tuple[str, Any], ...] = ()
    optimizer_memory: str = ""

    @property
    def overrides(self) -> dict[Any, Any] | None:
        """The argument ``overrides`` of ``sx.shard``, or None."""
        return {OptState: list(self.optimizer_rules)} if self.optimizer_rules else None

    @property
    def memory_kind(self) -> dict[Any, Any] | None:
        """The argument ``memory_kind`` of ``sx.shard``, or None."""
        return {OptState: self.optimizer_memory} if self.optimizer_memory else None


def named_rules(layout: Layout, notes: Sequence[str] = ()) -> NamedRules:
    """Returns a layout of the planner as a rules file holds it.

    Args:
        layout: The layout.
        notes: Lines for the comment above it.

    Example:
        >>> entry = named_rules(Layout("dp", (("batch", "data"),), (("data", 8),)))
        >>> entry.name, entry.rules, entry.mesh
        ('dp', Rules([('batch', 'data')]), (('data', 8),))
    """
    return NamedRules(
        layout.name,
        layout.as_rules,
        layout.mesh,
        tuple(notes),
        layout.parallel,
        layout.optimizer_rules,
        layout.optimizer_memory,
    )


def write_rules(
    path: str | os.PathLike[str], layouts: Iterable[NamedRules], notes: Sequence[str] = ()
) -> Path:
    """Writes a rules file, replacing it in one step.

    Args:
        path: The file.
        layouts: At least one, each with a name of its own.
        notes: Lines for the comment at the top.

    Returns:
        The path.

    Raises:
        PartitionError: If there is no layout, or a name occurs twice, or holds half of a surrogate
            pair, which is no text.
        OSError: If the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "best.toml"
        >>> dp = NamedRules("dp", Rules({"batch": "data"}), (("data", 8),))
        >>> read_rules(write_rules(file, [dp])) == (dp,)
        True
    """
    return write_whole(path, rules_text(layouts, notes))


def read_rules(path: str | os.PathLike[str]) -> tuple[NamedRules, ...]:
    """Reads a rules file.

    Args:
        path: The file. A layout at its top is named like the file, without ``.toml``.

    Returns:
        Its layouts, in order.

    Raises:
        PartitionError: If it is no TOML, or not as a rules file is; names the file and the key.
        OSError: If it cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.toml"
        >>> _ = file.write_text('rules = [["batch", "data"]]')
        >>> [(entry.name, entry.rules, entry.mesh) for entry in read_rules(file)]
        [('mine', Rules([('batch', 'data')]), None)]
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PartitionError(f"{file}: not a text file: {error}.") from error
    return parse_rules(text, str(file), file.stem)


def rules_text(layouts: Iterable[NamedRules], notes: Sequence[str] = ()) -> str:
    """Returns the text of a rules file; ``parse_rules`` is its inverse."""
    entries = list(layouts)
    names = [entry.name for entry in entries]
    if not names or len(set(names)) < len(names):
        raise PartitionError(
            f"A rules file holds one layout or several of distinct names, not {names!r}."
        )

    blocks = ["\n".join(_comments(notes))] if notes else []
    for entry in entries:
        table = entry_to_data(entry)
        lines = [*_comments(entry.notes), f"[layouts.{_toml(entry.name)}]"]
        lines += [f"{key} = {_toml(table[key])}" for key in _KEYS[1:] if key in table]
        pairs = [f"    {_toml(pair)}," for pair in table["rules"]]
        lines += ["rules = [", *pairs, "]"] if pairs else ["rules = []"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def parse_rules(text: str, where: str = "TOML", name: str = "rules") -> tuple[NamedRules, ...]:
    """Returns the layouts of a rules file's text.

    ``where`` is the file, for errors; ``name`` that of a layout at its top.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PartitionError(f"{where}: not TOML: {error}.") from error
    if "layouts" not in data:
        return (entry_from_data(data, where, name),)

    unknown_keys = [key for key in data if key != "layouts"]
    if unknown_keys:
        raise PartitionError(
            f"{where}: {', '.join(map(repr, unknown_keys))} beside 'layouts'. The keys of a layout "
            'belong into its own table: [layouts."name"], and below it rules = [...].'
        )

    tables = data["layouts"]
    if not isinstance(tables, dict) or not tables:
        raise PartitionError(
            f"{where}: 'layouts' is {tables!r}, not a table of at least one layout. Write "
            f'[layouts."name"], and below it {_EXAMPLE}.'
        )
    return tuple(
        entry_from_data(table, where, entry_name, f"layouts.{_toml(entry_name)}")
        for entry_name, table in tables.items()
    )


def entry_to_data(entry: NamedRules) -> dict[str, Any]:
    """Returns a layout as JSON or TOML data; ``entry_from_data`` is its inverse."""
    rules = entry.rules
    data: dict[str, Any] = {"rules": _pairs_to_data(rules)}
    if entry.mesh is not None:
        data["mesh"] = dict(entry.mesh)
    if rules.on_conflict != "first":
        data["on_conflict"] = rules.on_conflict
    if rules.on_unmapped != "replicate":
        data["on_unmapped"] = rules.on_unmapped

    if entry.parallel:
        data["parallel"] = dict(entry.parallel)
    if entry.optimizer_rules:
        data["optimizer_rules"] = _pairs_to_data(Rules(list(entry.optimizer_rules)))
    if entry.optimizer_memory:
        data["optimizer_memory"] = entry.optimizer_memory
    return data


def entry_from_data(table: object, where: str, name: str, key: str = "") -> NamedRules:
    """Returns the layout of a table of a file."""
    at = f"{key}." if key else ""
    if not isinstance(table, Mapping):
        raise PartitionError(f"{where}: {key} is {table!r}, not a table with {_EXAMPLE}.")

    for option in table:
        if option not in _KEYS:
            raise PartitionError(
                f"{where}: unknown key {at}{option}; a layout has {', '.join(_KEYS)}."
                f"{did_you_mean(option, _KEYS)}"
            )
    if "rules" not in table:
        raise PartitionError(f"{where}: {at}rules is missing. Write {_EXAMPLE}.")

    try:
        rules = Rules(_pairs(table["rules"]), table.get("on_conflict"), table.get("on_unmapped"))
    except PartitionError as error:
        raise PartitionError(f"{where}: {at}rules: {error} In a file: {_EXAMPLE}.") from error
    settings = _beside_rules(table, where, at)
    mesh = _mesh_from_data(table["mesh"], where, at) if "mesh" in table else None
    return NamedRules(name, rules, mesh, **settings)


def _mesh_from_data(mesh: object, where: str, at: str) -> tuple[tuple[str, int], ...]:
    """Returns the sizes of mesh axes of a table."""
    if not isinstance(mesh, dict):
        raise PartitionError(
            f"{where}: {at}mesh is {mesh!r}, not sizes by mesh axis. Write "
            "mesh = { data = 4, model = 2 }."
        )
    for axis, size in mesh.items():
        if type(size) is not int or size < 1:
            raise PartitionError(
                f"{where}: {at}mesh.{axis} is {size!r}; the size of a mesh axis is an integer from "
                f"1, as in mesh = {{ {axis} = 4 }}."
            )
    return tuple(mesh.items())


def _beside_rules(table: Mapping[str, Any], where: str, at: str) -> dict[str, Any]:
    """Returns the settings of a layout beside rules and mesh."""
    settings = table.get("parallel", {})
    try:
        with parallel(**settings):  # which checks them
            pass
    except (PartitionError, TypeError) as error:
        raise PartitionError(
            f"{where}: {at}parallel is {settings!r}: {error} In a file: parallel = {{ microbatches "
            "= 8 }."
        ) from error

    memory = table.get("optimizer_memory", "")
    if not isinstance(memory, str):
        raise PartitionError(
            f"{where}: {at}optimizer_memory is {memory!r}, not a kind of memory such as "
            '"pinned_host".'
        )

    try:
        pairs = Rules(_pairs(table.get("optimizer_rules", [])))
    except PartitionError as error:
        raise PartitionError(
            f"{where}: {at}optimizer_rules: {error} In a file: {_EXAMPLE}."
        ) from error
    return {
        "parallel": tuple(settings.items()),
        "optimizer_rules": tuple(pairs),
        "optimizer_memory": memory,
    }


def _pairs(value: object) -> Any:
    """Returns rules as ``Rules`` takes them, from a table or a list of pairs.

    What is no rule stays as it is, for ``Rules`` to refuse.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value
    return [_pair(pair) for pair in pairs] if isinstance(pairs, list) else pairs


def _pair(pair: Any) -> Any:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return pair
    name, axes = pair
    return [name, UNCONSTRAINED if axes == {"unconstrained": True} else axes]


def _pairs_to_data(rules: Rules) -> list[Any]:
    """Returns rules as pairs of JSON or TOML data."""
    return [[name, _target(axes)] for name, axes in rules]


def _target(axes):
    if axes is UNCONSTRAINED:
        return {"unconstrained": True}
    return axes if isinstance(axes, str) else list(axes or ())


def _toml(value: object) -> str:
    """Returns a TOML value, with strings and quoted keys as in JSON."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if _SURROGATE.search(text):
        raise PartitionError(f"The name {value!r} holds half of a surrogate pair: no file can.")
    return text


def _comments(lines: Sequence[str]) -> list[str]:
    """Comment lines, with blanks for characters not allowed by TOML."""
    parts = [part for line in lines for part in line.split("\n")]
    return [f"# {_NOT_IN_COMMENTS.sub(' ', part)}".rstrip() for part in parts]
