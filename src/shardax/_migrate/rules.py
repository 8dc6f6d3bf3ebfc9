# SPDX-License-Identifier: Apache-2.0
"""Rules of the translation, as ``rules.toml`` has them.

A name is in one of two tables. ``NAMES`` has those that are translated, each with its arguments;
``LEFT`` has those without a counterpart of the same meaning, with the reason and what to write. A
name in neither is left too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

ANY = "any value"
NNX = "flax.nnx"
# What the object is called of which a method is called.
OBJECTS = ("v", "optimizer", "self")
_FLAGS = {"*": "takes_all", "!": "is_only_called", "%": "is_only_scoped", "=": "is_form"}


@dataclass
class NameRule:
    """What becomes of a name."""

    target: str
    # What a person must look at, for each use.
    check: str = ""
    # Arguments that carry over, in their order there, and whether all others do.
    arguments: list[str] = field(default_factory=list)
    takes_all: bool = False
    # How many of the arguments may stay positional; the others get their keyword.
    positional: int = 99
    renamed: dict[str, str] = field(default_factory=dict)
    # Arguments without a counterpart, with the code for which leaving them out changes nothing.
    dropped: dict[str, list[str]] = field(default_factory=dict)
    # Arguments whose default differs, with that of the original.
    written: dict[str, str] = field(default_factory=dict)
    # Arguments of which a false value is another value here.
    falsy: dict[str, str] = field(default_factory=dict)
    # Where it is translated: only calls, and only those of a `with` or decorator.
    is_only_called: bool = False
    is_only_scoped: bool = False
    # Whether the target is the code of the whole call.
    is_form: bool = False

    @property
    def usage(self) -> str:
        """How it is written here."""
        if self.is_form:
            names = {name: name for name in (*OBJECTS, *self.arguments)}
            return self.target.format_map({**names, "rest": ""})
        words = [word for word in self.arguments or ["..."] if word not in self.dropped]
        new = dict.fromkeys(self.renamed.get(word, word) for word in words)
        return f"{self.target}({', '.join(new)})"


class Left(NamedTuple):
    """An untranslated name."""

    reason: str
    write: str


_TEXT = resources.files("shardax._migrate").joinpath("rules.toml").read_text(encoding="utf-8")
_RULES: dict[str, Any] = tomllib.loads(_TEXT)


def _words(text: str) -> Iterator[str]:
    """Yields the words of a rule, with the words of the groups in it."""
    for word in text.split():
        if word.startswith("$"):
            yield from _words(_RULES["groups"][word[1:]])
        else:
            yield word


def _note(text: str) -> str:
    name, mark, rest = text.partition(";")
    return f"{_RULES['notes'][name[1:]]}{mark}{rest}" if text.startswith("@") else text


def _rule(target: str, arguments: str = "*", check: str = "") -> NameRule:
    """Returns a rule from its arguments as the table writes them."""
    rule = NameRule(target, _note(check))
    for word in _words(arguments):
        if word in _FLAGS:
            setattr(rule, _FLAGS[word], True)
        elif word == "/":
            rule.positional = len(rule.arguments)
        elif word.startswith("-"):
            argument, _, values = word[1:].partition("=")
            rule.dropped[argument] = values.split("|") if values else [ANY]
        elif word.startswith("+"):
            argument, _, code = word[1:].partition("=")
            rule.written[argument] = code
        elif "?" in word:
            argument, _, code = word.partition("?")
            rule.arguments.append(argument)
            rule.falsy[argument] = code
        else:
            argument, _, here = word.partition(":")
            rule.arguments.append(argument)
            rule.renamed |= {argument: here} if here else {}
    return rule


def _rules(table: Mapping[str, list[str]]) -> dict[str, NameRule]:
    """Returns the rules of a table by name; a target that ends in a dot takes the name."""
    rules: dict[str, NameRule] = {}
    for name, (target, *others) in _by_name(table).items():
        whole = f"{target}{name}" if target.endswith(".") else target
        rules[name] = _rule(whole, *others)
    return rules


def _same() -> Iterator[tuple[str, NameRule]]:
    """Yields the names that are the same here; those of initializers keep that word before them."""
    for prefix, names in _RULES["same"].items():
        front = "initializers." if prefix.endswith(".") else ""
        for name in names.split():
            yield f"{front}{name}", _rule(f"{prefix.rstrip('.')}.{name}")


def _by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for names, value in table.items() for name in names.split()}


NAMES = {**dict(_same()), **_rules(_RULES["names"])}
LIBRARIES = {
    NNX: NAMES,
    "flax.linen": _rules(_RULES["linen"]),
    "equinox": _rules(_RULES["equinox"]),
}
METHODS = {kind: _rules(table) for kind, table in _RULES["methods"].items()}
LEFT = {name: Left(*rule) for name, rule in _by_name(_RULES["left"]).items()}
OPTIONS = {option: _note(text) for option, text in _RULES["options"].items()}
NOTES: dict[str, str] = _RULES["notes"]
SETS = {name: frozenset(words.split()) for name, words in _RULES["sets"].items()}
MISSING: dict[str, dict[str, str]] = _RULES["missing"]
LAYER_ATTRIBUTES = {
    layer: {word.partition(":")[0]: word.partition(":")[2] for word in words.split()}
    for layer, words in _by_name(_RULES["layer_attributes"]).items()
}
