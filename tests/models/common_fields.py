# SPDX-License-Identifier: Apache-2.0
"""Writes the table of fields that ``transformers`` writes into the ``config.json`` of any model.

The fields are those of its base class of configs, and those of its configs of generation, which it
wrote into the same file before they had one of their own. They are read off the sources of several
versions, as files of all of them are in use: nothing of ``transformers`` is imported. Beside them
stand the defaults that each known type of models has in the last of these versions. To write the
table anew, with wheels that ``pip download --no-deps transformers==VERSION`` fetches, the newest
one last::

    python -m tests.models.common_fields WHEEL... > src/shardax/models/config/common_fields.json
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from shardax.models.families.registry import FAMILIES

CONFIG_OF_TYPE = re.compile(r"transformers/models/\w+/configuration_\w+\.py")
CONFIGS, GENERATION = "configuration_utils.py", "generation/configuration_utils.py"
NAMES = ("PretrainedConfig", "PreTrainedConfig")


def class_body(source: str, names: tuple[str, ...]) -> list[ast.stmt]:
    """Returns the statements of the first class of these names, none without one."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            return node.body
    return []


def initializers(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    return [
        node
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")
    ]


def taken_keywords(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields the keywords that are set as attributes, with their defaults."""
    arguments = function.args
    count = len(arguments.defaults)
    positional = zip(arguments.args[len(arguments.args) - count :], arguments.defaults, strict=True)
    for argument, default in (
        *positional,
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        yield argument.arg, default
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        for call in ast.walk(node.value):
            if isinstance(target, ast.Attribute) and is_taken(call):
                keyword, *default = call.args
                yield str(keyword.value), default[0] if default else None
                yield target.attr, default[0] if default else None


def is_taken(node: ast.AST) -> Any:
    """Whether a node is ``kwargs.pop(...)``."""
    is_pop = isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.pop"
    return is_pop and isinstance(node.args[0], ast.Constant)


def declared(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields the fields of a dataclass that are no variables of the class."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            yield ast.unparse(node.target), node.value


def literal(default: ast.expr | None) -> Any:
    return None if default is None else ast.literal_eval(default)


def common_fields(source: str) -> dict[str, Any]:
    """Returns the fields of all configs, with their defaults, of the sources of a version."""
    body = class_body(source, NAMES)
    functions = initializers(body)
    pairs = [pair for function in functions for pair in taken_keywords(function)]
    if all(function.name == "__post_init__" for function in functions):  # a dataclass
        pairs += declared(body)
    return {name: literal(default) for name, default in pairs}


def generation_fields(source: str) -> list[str]:
    """Returns the fields of configs of generation."""
    functions = initializers(class_body(source, ("GenerationConfig",)))
    return [name for function in functions for name, _ in taken_keywords(function)]


def computed(default: ast.expr) -> Any:
    """Returns the value of a default, None for one that is no literal of JSON."""
    # A default that is checked: interval(min=0.0, max=1.0)(default=0.02).
    if isinstance(default, ast.Call) and default.keywords and default.keywords[0].arg == "default":
        return computed(default.keywords[0].value)
    if isinstance(default, ast.BinOp) and isinstance(default.op, ast.Mult):
        return computed(default.left) * computed(default.right)
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def defaults_of_types(sources: Iterable[str], types: Set[str]) -> dict[str, dict[str, Any]]:
    """Returns the defaults of the configs of these types, but for those that are null."""
    defaults: dict[str, dict[str, Any]] = {}
    classes = [node for source in sources for node in ast.parse(source).body]
    for node in classes:
        body = node.body if isinstance(node, ast.ClassDef) else []
        kinds = [x.value for x in body if ast.unparse(x).startswith("model_type = ")]
        kind = ast.literal_eval(kinds[0]) if kinds else None
        if kind in types:
            values = {name: default and computed(default) for name, default in declared(body)}
            defaults[kind] = {name: x for name, x in values.items() if x is not None}
    return dict(sorted(defaults.items()))


def table(wheels: list[Path]) -> dict[str, Any]:
    """Returns the table of several versions."""
    fields: dict[str, list[Any]] = {}
    generation, versions = set[str](), list[str]()
    for wheel in wheels:
        versions.append(wheel.name.split("-")[1])
        with zipfile.ZipFile(wheel) as archive:
            sources = {
                name: archive.read(f"transformers/{name}").decode()
                for name in (CONFIGS, GENERATION)
                if f"transformers/{name}" in archive.namelist()
            }
        for name, default in common_fields(sources[CONFIGS]).items():
            defaults = fields.setdefault(name, [])
            if default not in defaults:
                defaults.append(default)
        generation |= {*generation_fields(sources.get(GENERATION, ""))}

    with zipfile.ZipFile(wheels[-1]) as archive:
        names = [name for name in archive.namelist() if CONFIG_OF_TYPE.fullmatch(name)]
        of_types = [archive.read(name).decode() for name in names]
    return {
        "transformers": versions,
        "fields": dict(sorted(fields.items())),
        "generation": sorted(generation - {*fields}),
        "types": defaults_of_types(of_types, {*FAMILIES}),
    }


if __name__ == "__main__":
    print(json.dumps(table([*map(Path, sys.argv[1:])]), indent=1))
