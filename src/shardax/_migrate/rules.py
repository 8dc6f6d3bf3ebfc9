# SPDX-License-Identifier: Apache-2.0
"""Rules of the translation, as ``rules.toml`` has them.

A name is in one of two tables. ``NAMES`` has those that are translated, each with its arguments:
those that carry over, under which name, and those written out because the default differs here.
``LEFT`` has those without a counterpart of the same meaning, with the reason and what to write. A
name in neither is left too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

ANY = "any value"
NNX = "flax.nnx"


@dataclass(frozen=True)
class Name:
    """A translated name."""

    target: str
    # Arguments that carry over, in their order there; None for all, as they are.
    arguments: tuple[str, ...] | None = None
    # How many of the arguments may stay positional; the others get their keyword.
    positional: int = 99
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Arguments without a counterpart, with the code for which leaving them out changes nothing.
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Arguments whose default differs, with that of the original.
    written: Mapping[str, str] = field(default_factory=dict)
    # Whether it may also be used without a call: as a value, base class or annotation.
    bare: bool = True
    # What a person must look at, for each use.
    check: str = ""

    @property
    def usage(self) -> str:
        """How it is written here."""
        words = [self.renamed.get(argument, argument) for argument in self.arguments or ("...",)]
        return f"{self.target}({', '.join(words)})"


@dataclass(frozen=True)
class Left:
    """An untranslated name."""

    reason: str
    write: str


_TEXT = resources.files("shardax._migrate").joinpath("rules.toml").read_text(encoding="utf-8")
_RULES: dict[str, Any] = tomllib.loads(_TEXT)


def _words(text: str) -> list[str]:
    """Returns the words of a rule, with the words of the groups in it."""
    words: list[str] = []
    for word in text.split():
        words.extend(_words(_RULES["groups"][word[1:]]) if word.startswith("$") else [word])
    return words


def _note(text: str) -> str:
    name, mark, rest = text.partition(";")
    return f"{_RULES['notes'][name[1:]]}{mark}{rest}" if text.startswith("@") else text


def _name(target: str, arguments: str, check: str = "") -> Name:
    """Returns the rule of a name, from its arguments as the table writes them."""
    words = _words(arguments)
    carried: list[str] = []
    renamed: dict[str, str] = {}
    dropped: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    positional = 99

    for word in words:
        if word.startswith("-"):
            argument, _, values = word[1:].partition("=")
            dropped[argument] = tuple(values.split("|")) if values else (ANY,)
        elif word.startswith("+"):
            argument, _, code = word[1:].partition("=")
            written[argument] = code
        elif word == "/":
            positional = len(carried)
        elif word not in "!*":
            argument, _, here = word.partition(":")
            carried.append(argument)
            if here:
                renamed[argument] = here

    given = None if "*" in words else tuple(carried)
    return Name(
        target, given, positional, renamed, dropped, written, "!" not in words, _note(check)
    )


def _names(table: Mapping[str, list[str]]) -> Iterator[tuple[str, Name]]:
    """Yields the names of a table with their rules; a target that ends in a dot takes the name."""
    for names, (target, *others) in table.items():
        for name in names.split():
            whole = f"{target}{name}" if target.endswith(".") else target
            yield name, _name(whole, *others)


def _same() -> Iterator[tuple[str, Name]]:
    for prefix, names in _RULES["same"].items():
        front = "initializers." if prefix.endswith(".") else ""
        for name in names.split():
            yield f"{front}{name}", Name(f"{prefix.rstrip('.')}.{name}")


def _by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for names, value in table.items() for name in names.split()}


NAMES: dict[str, Name] = {**dict(_same()), **dict(_names(_RULES["names"]))}
LIBRARIES: dict[str, Mapping[str, Name]] = {
    NNX: NAMES,
    "flax.linen": dict(_names(_RULES["linen"])),
    "equinox": dict(_names(_RULES["equinox"])),
}
LEFT = {name: Left(*rule) for name, rule in _by_name(_RULES["left"]).items()}
STATE_FUNCTIONS: dict[str, tuple[str, int, int]] = _RULES["state_functions"]
# Names whose translation has another form than a call: see plan.py.
FORMS = {*STATE_FUNCTIONS, "data", "static", "initializers.zeros_init", "initializers.ones_init"}
OPTIONS = {option: _note(text) for option, text in _RULES["options"].items()}
AXES: dict[str, list[str]] = _by_name(_RULES["axes"])
AXES_NOTE = f"axes= names every dimension (None for one without a name); {_note('@eager')}"
HOOKS = frozenset(_RULES["methods"].pop("hooks")["names"].split())
METHODS: dict[str, dict[str, str]] = _RULES["methods"]
VARIABLE_ATTRIBUTES: dict[str, str] = _RULES["attributes"]
FAMILIES = frozenset(_RULES["families"]["names"].split())
FILTERED: dict[str, str] = _by_name(_RULES["filtered"])
ORDERED = tuple(_RULES["ordered"]["functions"].split())
CAPTURE_NOTE, ORDER_NOTE, FILTER_NOTE, FAMILY_NOTE, NUMBER_NOTE = (
    _note(f"@{name}") for name in ("capture", "order", "filter", "family", "number")
)
UNREAD = frozenset(_RULES["layer_attributes"].pop("unread").split())
# Attributes that a text must not name, as in ``hasattr(layer, "use_bias")``.
NAMED_IN_TEXTS = {
    *UNREAD,
    *VARIABLE_ATTRIBUTES,
    *METHODS["variable"],
    *_RULES["texts"]["names"].split(),
}
LAYER_ATTRIBUTES = {
    layer: {word.partition(":")[0]: word.partition(":")[2] for word in words.split()}
    for layer, words in _by_name(_RULES["layer_attributes"]).items()
}
VARIABLES = frozenset(
    [
        "Variable",
        "Param",
        "BatchStat",
        "Cache",
        "Intermediate",
        "Perturbation",
        "RngState",
        "OptState",
    ]
)
