# SPDX-License-Identifier: Apache-2.0
"""Rules in TOML: layouts that the planner found, or that a person wrote, for other commands.

A *rules file* holds one layout or several, each a table in ``layouts``, best first::

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
policies ``on_conflict`` and ``on_unmapped`` say what they say in ``Rules``. With a single layout
its keys may stand at the top of the file, and rules of distinct names may be a table
(``[rules]``, ``batch = "data"``). The order of everything is kept.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardax.host.files import write_whole
from shardax.partition.errors import RulesError, did_you_mean
from shardax.partition.rules import UNCONSTRAINED, Rules
from shardax.plan.records import Layout

_KEYS = ("rules", "mesh", "on_conflict", "on_unmapped")
_EXAMPLE = 'rules = [["batch", "data"], ["mlp", ["data", "model"]], ["layers", []]]'


@dataclass(frozen=True)
class NamedRules:
    """Rules with a name, and the mesh that they are meant for.

    Attributes:
        name: For tables and for picking it from a file.
        rules: The rules.
        mesh: Pairs of a mesh axis and its size, in order; None: any mesh.
        notes: Lines written as comments above it; reading does not bring them back.

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
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)


def named_rules(layout: Layout, notes: Sequence[str] = ()) -> NamedRules:
    """Returns a layout of the planner as a rules file holds it.

    Args:
        layout: The layout.
        notes: Lines for the comment above it.

    Example:
        >>> named_rules(Layout("dp", (("batch", "data"),), (("data", 8),)))
        NamedRules(name='dp', rules=Rules([('batch', 'data')]), mesh=(('data', 8),), notes=())
    """
    return NamedRules(layout.name, layout.as_rules, layout.mesh, tuple(notes))


def rules_text(layouts: Iterable[NamedRules], notes: Sequence[str] = ()) -> str:
    """Returns the text of a rules file; ``parse_rules`` is its inverse.

    Args:
        layouts: At least one, each with a name of its own.
        notes: Lines for the comment at the top.

    Raises:
        RulesError: If there is no layout, or a name occurs twice, or holds half of a surrogate
            pair, which is no text.

    Example:
        >>> rules = Rules([("batch", "data"), ("layers", None)])
        >>> print(rules_text([NamedRules("dp", rules, (("data", 8),))]), end="")
        [layouts."dp"]
        mesh = { "data" = 8 }
        rules = [
            ["batch", "data"],
            ["layers", []],
        ]
    """
    entries = list(layouts)
    names = [entry.name for entry in entries]
    if not names or len(set(names)) < len(names):
        raise RulesError(
            f"A rules file holds one layout or several of distinct names, not {names!r}."
        )
    blocks = ["\n".join(_comments(notes))] if notes else []
    for entry in entries:
        lines = [*_comments(entry.notes), f"[layouts.{_string(entry.name)}]"]
        if entry.mesh is not None:
            sizes = ", ".join(f"{_string(axis)} = {size}" for axis, size in entry.mesh)
            lines.append(f"mesh = {{ {sizes} }}" if sizes else "mesh = {}")
        if entry.rules.on_conflict != "first":
            lines.append(f"on_conflict = {_string(entry.rules.on_conflict)}")
        if entry.rules.on_unmapped != "replicate":
            lines.append(f"on_unmapped = {_string(entry.rules.on_unmapped)}")
        pairs = [f"    [{_string(name)}, {_target_text(to)}]," for name, to in entry.rules]
        lines += ["rules = [", *pairs, "]"] if pairs else ["rules = []"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def write_rules(
    path: str | os.PathLike[str], layouts: Iterable[NamedRules], notes: Sequence[str] = ()
) -> Path:
    """Writes a rules file, replacing it in one step.

    Args:
        path: The file.
        layouts: See ``rules_text``.
        notes: See ``rules_text``.

    Returns:
        The path.

    Raises:
        RulesError: As ``rules_text``.
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
        RulesError: If it is no TOML, or not as a rules file is; names the file and the key.
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
        raise RulesError(f"{file}: not a text file: {error}.") from error
    return parse_rules(text, str(file), file.stem)


def parse_rules(text: str, where: str = "TOML", name: str = "rules") -> tuple[NamedRules, ...]:
    r"""Reads the text of a rules file.

    Args:
        text: The text.
        where: What errors call it: the file.
        name: Of a layout that stands at the top of the file, without ``layouts``.

    Returns:
        Its layouts, in order.

    Raises:
        RulesError: If it is no TOML, or not as a rules file is; names the key.

    Example:
        >>> [entry] = parse_rules('mesh = {data = 8}\nrules = [["batch", "data"]]', name="dp")
        >>> entry.name, entry.rules, entry.mesh
        ('dp', Rules([('batch', 'data')]), (('data', 8),))
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RulesError(f"{where}: not TOML: {error}.") from error
    if "layouts" not in data:
        return (entry_from_data(data, where, name),)
    if others := [key for key in data if key != "layouts"]:
        raise RulesError(
            f"{where}: {', '.join(map(repr, others))} beside 'layouts'. The keys of a layout "
            'belong into its own table: [layouts."name"], and below it rules = [...].'
        )
    tables = data["layouts"]
    if not isinstance(tables, dict) or not tables:
        raise RulesError(
            f"{where}: 'layouts' is {tables!r}, not a table of at least one layout. Write "
            f'[layouts."name"], and below it {_EXAMPLE}.'
        )
    return tuple(
        entry_from_data(table, where, each, f"layouts.{_string(each)}")
        for each, table in cast("dict[str, Any]", tables).items()
    )


def entry_to_data(entry: NamedRules) -> dict[str, Any]:
    """Returns a layout as plain data (JSON or TOML); ``entry_from_data`` is its inverse.

    Example:
        >>> entry_to_data(NamedRules("dp", Rules([("batch", "data"), ("layers", None)])))
        {'rules': [['batch', 'data'], ['layers', []]]}
    """
    data: dict[str, Any] = {"rules": [[name, _target_data(to)] for name, to in entry.rules]}
    if entry.mesh is not None:
        data["mesh"] = dict(entry.mesh)
    if entry.rules.on_conflict != "first":
        data["on_conflict"] = entry.rules.on_conflict
    if entry.rules.on_unmapped != "replicate":
        data["on_unmapped"] = entry.rules.on_unmapped
    return data


def entry_from_data(data: Any, where: str, name: str, key: str = "") -> NamedRules:
    """Returns the layout that plain data describe.

    Args:
        data: A mapping with ``rules``, and ``mesh``, ``on_conflict`` and ``on_unmapped`` if wanted.
        where: What errors call the file.
        name: Name of the layout.
        key: Where in the file the mapping stands, ``""`` at its top.

    Raises:
        RulesError: If something is not as it should be; names the key.

    Example:
        >>> entry_from_data({"rules": {"batch": "data"}}, "run.json", "dp").rules
        Rules([('batch', 'data')])
    """
    at = f"{key}." if key else ""
    if not isinstance(data, Mapping):
        raise RulesError(f"{where}: {key} is {data!r}, not a table with {_EXAMPLE}.")
    table = cast("Mapping[str, Any]", data)
    for found in table:
        if found not in _KEYS:
            raise RulesError(
                f"{where}: unknown key {at}{found}; a layout has {', '.join(_KEYS)}."
                f"{did_you_mean(found, _KEYS)}"
            )
    if "rules" not in table:
        raise RulesError(f"{where}: {at}rules is missing. Write {_EXAMPLE}.")
    try:
        rules = Rules(_pairs(table["rules"]), table.get("on_conflict"), table.get("on_unmapped"))
    except RulesError as error:
        raise RulesError(f"{where}: {at}rules: {error} In a file: {_EXAMPLE}.") from error
    mesh = _mesh(table["mesh"], f"{where}: {at}mesh") if "mesh" in table else None
    return NamedRules(name, rules, mesh)


def _pairs(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(cast("dict[Any, Any]", value).items())
    if not isinstance(value, list):
        return value  # for Rules to refuse
    return [
        [pair[0], UNCONSTRAINED if pair[1] == {"unconstrained": True} else pair[1]]
        if isinstance(pair, (list, tuple)) and len(cast("list[Any]", pair)) == 2
        else pair
        for pair in cast("list[Any]", value)
    ]


def _mesh(value: Any, where: str) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, dict):
        raise RulesError(
            f"{where} is {value!r}, not sizes by mesh axis. Write mesh = {{ data = 4, model = 2 }}."
        )
    sizes = cast("dict[str, Any]", value)
    for axis, size in sizes.items():
        if type(size) is not int or size < 1:
            raise RulesError(
                f"{where}.{axis} is {size!r}; the size of a mesh axis is an integer from 1, as in "
                f"mesh = {{ {axis} = 4 }}."
            )
    return tuple(sizes.items())


def _target_data(target: Any) -> Any:
    if target is UNCONSTRAINED:
        return {"unconstrained": True}
    if target is None:
        return []
    return target if isinstance(target, str) else list(target)


def _target_text(target: Any) -> str:
    if target is UNCONSTRAINED:
        return "{ unconstrained = true }"
    if isinstance(target, str):
        return _string(target)
    return f"[{', '.join(map(_string, target or ()))}]"


def _string(text: str) -> str:
    r"""A basic string of TOML, which is also a quoted key.

    >>> print(_string('a"b' + chr(7)))
    "a\"b\u0007"
    """
    characters: list[str] = []
    for character in text:
        code = ord(character)
        if 0xD800 <= code < 0xE000:
            raise RulesError(f"The name {text!r} holds half of a surrogate pair: no file can.")
        if character in '"\\':
            characters.append("\\" + character)
        elif code < 0x20 or code == 0x7F:
            characters.append(f"\\u{code:04x}")
        else:
            characters.append(character)
    return f'"{"".join(characters)}"'


def _comments(lines: Sequence[str]) -> list[str]:
    """Comment lines; what TOML does not allow in one becomes a blank."""
    cleaned = [
        "".join(
            " " if ord(each) < 0x20 or ord(each) == 0x7F or 0xD800 <= ord(each) < 0xE000 else each
            for each in part
        )
        for line in lines
        for part in line.split("\n")
    ]
    return [f"# {line}".rstrip() for line in cleaned]
