# SPDX-License-Identifier: Apache-2.0
"""Models and rules of the user's own, as the command line names them.

A *target* is ``module:name``, something in a Python module, which is looked for in the working
folder too. Rules are a target; or a JSON file: a list of pairs of a name and mesh axes, or an
object from names to mesh axes; or a TOML file (``plan.rules_file``), which may name the mesh too,
and hold several layouts, of which ``FILE.toml:NAME`` is one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardax.core.errors import CommandError, RulesError
from shardax.core.node import Object
from shardax.partition.findings import did_you_mean
from shardax.partition.rules import Rules
from shardax.partition.survey import Survey
from shardax.plan.rules_file import NamedRules, parse_rules


def is_target(text: str) -> bool:
    """Whether a text is of the form ``module:name``.

    Example:
        >>> is_target("my_package.models:make_model"), is_target("runs/demo"), is_target("tiny")
        (True, False, False)
    """
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def load_target(text: str) -> Any:
    """Imports what a target names.

    Args:
        text: ``module:name``.

    Raises:
        CommandError: If there is no such module, or no such name in it. What the module itself
            raises comes out as it is.

    Example:
        >>> load_target("shardax.models:DECODER_RULES").names[0]
        'batch'
    """
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that this one needs
        raise CommandError(
            f"{text!r}: there is no module {error.name!r}, neither installed nor in the folder "
            f"{os.getcwd()}."
        ) from error
    if not hasattr(module, name):
        near = did_you_mean(name, [known for known in vars(module) if not known.startswith("_")])
        raise CommandError(f"{text!r}: the module {module_name} has no {name!r}.{near}")
    return getattr(module, name)


def load_model(text: str) -> Any:
    """Makes the model that a target names.

    Args:
        text: ``module:name`` of a function or class that is called without arguments, or of a
            model.

    Returns:
        A Module, or any tree that ``shardax.check`` takes.

    Raises:
        CommandError: As ``load_target``; or if it holds no array.
    """
    found = load_target(text)
    made = found if isinstance(found, Object) or not callable(found) else found()
    if not Survey(made).slots:
        raise CommandError(
            f"{text!r} gave {made!r} of type {type(made).__name__}, in which there is no array. "
            "Name a function without arguments that returns a model, or a model."
        )
    return made


def load_rules(text: str) -> NamedRules:
    """Reads rules, and the mesh that they are meant for if they name one.

    Args:
        text: A target, or the path of a JSON file or of a TOML file; after the latter, with a
            colon, the name of one of its layouts.

    Raises:
        CommandError: If there are none, or several, or they are malformed; names the file.
    """
    name, toml, layout = text.partition(".toml")
    if toml and (not layout or layout.startswith(":")):
        return _one(text, load_layouts(name + toml), layout[1:])
    found = load_target(text) if is_target(text) else _read(text, json.loads)
    try:
        return NamedRules(Path(text).stem, Rules(found))
    except RulesError as error:
        raise CommandError(f"--rules {text}: {error}") from error


def load_layouts(file: str) -> tuple[NamedRules, ...]:
    """Reads all layouts of a TOML file.

    Args:
        file: Its path.

    Raises:
        CommandError: If it cannot be read, or something in it is wrong; names file and key.
    """
    try:
        return parse_rules(_read(file, str), file, Path(file).stem)
    except RulesError as error:
        raise CommandError(f"--rules {error}") from error


def _read(file: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CommandError(
            f"--rules {file}: there is no such file; and it is no target, module:name."
        ) from error
    except (OSError, ValueError) as error:  # no JSON, or no text
        raise CommandError(f"--rules {file}: cannot be read: {error}.") from error


def _one(text: str, layouts: Sequence[NamedRules], name: str) -> NamedRules:
    """The layout of a name, or the only one."""
    names = [layout.name for layout in layouts]
    if not name and len(layouts) == 1:
        return layouts[0]
    if name in names:
        return layouts[names.index(name)]
    listed = ", ".join(map(repr, names))
    if not name:
        raise CommandError(
            f"--rules {text}: it holds {len(names)} layouts: {listed}. Name one, as in --rules "
            f"'{text}:{names[0]}'."
        )
    raise CommandError(
        f"--rules {text!r}: the file holds no layout {name!r}, but {listed}."
        f"{did_you_mean(name, names)}"
    )
