# SPDX-License-Identifier: Apache-2.0
"""Fields of nested configs by their paths, such as ``attention.num_heads``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from shardax.nn.errors import LayerConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class ConfigPart:
    """The config of a part of a model."""

    # What fields say where there is no such part; by the first of them it is known to be absent.
    absent: ClassVar[Mapping[str, Any]] = {}


@functools.cache
def parts_of(kind: type[DataclassInstance]) -> dict[str, type[ConfigPart]]:
    """Returns the classes of the parts of a config, by field."""
    hints, parts = get_type_hints(kind), dict[str, type[ConfigPart]]()
    for field in fields(kind):
        for member in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(member, type) and issubclass(member, ConfigPart):
                parts[field.name] = member
    return parts


@functools.cache
def paths_of(kind: type[DataclassInstance]) -> dict[str, str]:
    """Returns the annotations of all fields of a config, by path."""
    annotations, parts = dict[str, str](), parts_of(kind)
    for field in fields(kind):
        if field.name not in parts:
            annotations[field.name] = str(field.type)
            continue
        nested = paths_of(parts[field.name])
        annotations |= {f"{field.name}.{path}": text for path, text in nested.items()}
    return annotations


def read_field(config: Any, path: str) -> Any:
    """Returns a field, or its value in an absent part."""
    *parts, name = path.split(".")
    kind: Any = type(config)
    for part in parts:
        config, kind = getattr(config, part, None), parts_of(kind)[part]
    return absent_value(kind, name) if config is None else getattr(config, name)


def is_unsaid(config: Any, path: str) -> bool:
    """Whether a field is of an absent part, but for its first."""
    part, _, name = path.rpartition(".")
    if not part or read_field(config, part) is not None:
        return False
    return name != switch_of(part_class(type(config), part))


def part_class(kind: Any, path: str) -> Any:
    """Returns the class of a part; its own for the empty path."""
    return functools.reduce(
        lambda kind, name: parts_of(kind)[name], path.split(".") if path else (), kind
    )


def switch_of(kind: type[ConfigPart]) -> str | None:
    """Returns the field for the absence of a part."""
    return next(iter(kind.absent), None)


def is_off(kind: type[ConfigPart], values: Mapping[str, Any]) -> bool:
    """Whether fields stand for an absent part."""
    switch = switch_of(kind)
    return switch is not None and values.get(switch, True) in (0, None)


def absent_value(kind: type[ConfigPart], name: str) -> Any:
    """Returns the value of a field in an absent part."""
    defaults = {field.name: field.default for field in fields(kind)}
    return kind.absent.get(name, defaults[name])


def read_fields(config: Any) -> dict[str, Any]:
    """Returns all fields of a config, by path."""
    return {path: read_field(config, path) for path in paths_of(type(config))}


def replace_fields(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a config with other values of fields, by path."""
    return replace(config, **_options(type(config), config, values))


def make_config(kind: Any, values: Mapping[str, Any]) -> Any:
    """Makes a config of fields by path, the others at their defaults."""
    return kind(**_options(kind, None, values))


def _options(
    kind: type[DataclassInstance], config: Any, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns keyword arguments of a config, of fields by path."""
    options = {path: value for path, value in values.items() if "." not in path}
    for name, changes in grouped(values):
        part = default_part(kind, name) if config is None else getattr(config, name)
        part = options.get(name, part)
        options[name] = changed_part(parts_of(kind)[name], part, changes)
    return options


def default_part(kind: Any, name: str) -> Any:
    """Returns the default of a part."""
    field = next(field for field in fields(kind) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def grouped(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the parts in paths, each with its own fields."""
    groups = dict[str, dict[str, Any]]()
    for path, value in values.items():
        name, dot, field = path.partition(".")
        if dot:
            groups.setdefault(name, {})[field] = value
    yield from groups.items()


def changed_part(kind: type[ConfigPart], part: Any, values: Mapping[str, Any]) -> Any:
    """Returns a part with other values of fields, or None."""
    switch = switch_of(kind)
    if is_off(kind, values) or (part is None and switch is not None and switch not in values):
        return None
    options = _options(kind, part, values)
    if part is not None:
        return replace(part, **options)
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in options]
    if missing:
        raise LayerConfigError(f"{kind.__name__} needs {' and '.join(missing)} too.")
    return kind(**options)
