# SPDX-License-Identifier: Apache-2.0
"""Errors about fields that a nested config has not, with the names of those that it has."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from shardax.models.config.paths import grouped, paths_of

_Config = TypeVar("_Config")


def lists_fields(kind: type[_Config]) -> type[_Config]:
    """Returns a config class whose errors about unknown fields list the known ones, by part."""
    assert is_dataclass(kind)
    initialize: Any = kind.__init__
    names = {field.name for field in fields(kind)}

    @functools.wraps(initialize)
    def initialize_known_fields(self: Any, *args: Any, **options: Any) -> None:
        if unknown := sorted(options.keys() - names):
            raise TypeError(f"{kind.__name__} has no {', '.join(unknown)}. {_listed(kind)}")
        initialize(self, *args, **options)

    def refuse_unknown_field(self: Any, name: str) -> NoReturn:
        text = f"{kind.__name__} has no {name}."
        raise AttributeError(text if name.startswith("_") else f"{text} {_listed(kind)}")

    made: Any = kind
    made.__init__, made.__getattr__ = initialize_known_fields, refuse_unknown_field
    return kind


def _listed(kind: type) -> str:
    """Returns the names of all fields, by part."""
    own = [path for path in paths_of(kind) if "." not in path]
    texts = [f"Its fields are {', '.join(own)}"]
    for name, values in grouped(dict.fromkeys(paths_of(kind), "")):
        texts.append(f"those of {name} are {', '.join(values)}")
    return "; ".join(texts) + "."
