# SPDX-License-Identifier: Apache-2.0
"""Explanations of retraces.

A function is traced anew when the structure of its arguments, a static value, or a shape or dtype
differs from every earlier call. ``explain_retraces`` says which, by path, compared with the most
similar earlier call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from shardax._core.graph.differences import part_text, parts_by_path, structure_differences
from shardax._core.graph.paths import PyTree, format_path
from shardax._core.graph.settings import SettingsKey
from shardax._core.graph.static import Static, functions_in
from shardax._transforms.lift.arguments import TreeTemplate, leaf_paths
from shardax._transforms.lift.captures import closed_over
from shardax._transforms.lift.signatures import parameter_name

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import Jit
    from shardax._transforms.jit.specialization import Specialization


@dataclass(frozen=True)
class Retrace:
    """One retrace of a compiled function."""

    function: str  # its name
    reasons: tuple[str, ...]  # what differs from the most similar earlier call, a line each

    def __str__(self) -> str:
        return f"{self.function} was traced again because:\n" + "\n".join(
            f"  {reason}" for reason in self.reasons
        )


listeners: contextvars.ContextVar[tuple[tuple[list[Retrace], Any], ...]] = contextvars.ContextVar(
    "shardax_retrace_listeners", default=()
)


@contextlib.contextmanager
def explain_retraces(file: object = None) -> Generator[list[Retrace]]:
    """Reports every retrace of a compiled function within a ``with`` block.

    Args:
        file: Where to print each explanation; by default ``sys.stderr``. False: nowhere.

    Yields:
        A list that collects the ``Retrace`` objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> f = sx.jit(lambda x: x + 1)
        >>> _ = f(jnp.zeros(2))
        >>> with sx.explain_retraces(file=False) as retraces:
        ...     _ = f(jnp.zeros(3))
        >>> retraces[0].reasons
        ('.x: float32[2] -> float32[3]',)
    """
    retraces: list[Retrace] = []
    token = listeners.set((*listeners.get(), (retraces, sys.stderr if file is None else file)))
    try:
        yield retraces
    finally:
        listeners.reset(token)


def _report(function, reasons: Sequence[str]) -> None:
    name = getattr(function, "__qualname__", None) or repr(function)
    retrace = Retrace(
        name,
        tuple(reasons)
        or ("nothing that shardax can see (JAX's own settings, or its cache was cleared)",),
    )
    for retraces, file in listeners.get():
        retraces.append(retrace)
        if file:
            print(retrace, file=file)


def report_specialization(jit: Jit, new: Specialization) -> None:
    """Reports that no earlier specialization fits a call."""
    differences = [call_differences(old, new) for old in [*jit.specializations.values()]]
    _report(jit.function, min(differences, key=len))


def report_trace(
    program: Specialization, earlier: Sequence[Sequence[PyTree]], signature: Sequence[PyTree]
) -> None:
    """Reports that a specialization is traced for other types than before."""
    new = _named_types(program, signature)
    differences: list[list[str]] = []

    for earlier_signature in earlier:
        old = _named_types(program, earlier_signature)
        changes = [f"{name}: {old[name]} -> {new[name]}" for name in new if old[name] != new[name]]
        differences.append(changes)
    _report(program.function, min(differences, key=len))


def _named_types(program: Specialization, signature: Sequence[PyTree]) -> dict[str, str]:
    """Returns the type of every array by its path, for messages."""
    types_by_name: dict[str, str] = {}
    for name, value in zip(program.input_names, signature, strict=True):
        for key, aval in jax.tree_util.tree_leaves_with_path(value):
            is_weak = getattr(aval, "weak_type", False)
            array_type = aval.str_short() + (" (weakly typed)" if is_weak else "")
            types_by_name[f".{name}{jax.tree_util.keystr(key)}"] = array_type
    return types_by_name


def call_differences(old: Specialization, new: Specialization) -> list[str]:
    """Describes how the calls that two specializations are for differ, by path."""
    reasons = _structure_changes(old, new)
    in_arguments = list(_static_leaf_differences(old, new)) or _argument_differences(old, new)
    reasons = in_arguments + reasons

    old_static, new_static = dict(old.key.static), dict(new.key.static)
    for place in dict.fromkeys([*old_static, *new_static]):
        if old_static.get(place) != new_static.get(place):
            name = parameter_name(new.function, place) if isinstance(place, int) else place
            reasons += _changes(
                f"static argument {name!r}", old_static.get(place), new_static.get(place)
            )
    if not reasons and old.key.functions != new.key.functions:
        reasons += _functions_made_anew(old, new)
    return reasons


def _argument_differences(old: Specialization, new: Specialization) -> list[str]:
    """Describes how objects and arrays stand elsewhere in the arguments."""
    first, second = old.key, new.key
    counts = [(len(key.templates), len(key.named)) for key in (first, second)]
    if counts[0] != counts[1]:
        expected = ", ".join(old.positions.labels) or "no positional arguments"
        return [
            f"{counts[1][0]} positional arguments given, compiled for {counts[0][0]} ({expected})"
        ]
    if first[1:6] == second[1:6]:
        return []

    before, after = old.array_names, new.array_names
    lines = [f".{name}: an array -> absent" for name in before if name not in after]
    lines += [f".{name}: absent -> an array" for name in after if name not in before]
    return lines or ["the arguments have other containers, or objects stand elsewhere in them"]


def _functions_made_anew(old: Specialization, new: Specialization) -> list[str]:
    """Describes which functions, of the same code, are others than before."""
    before = parts_by_path(old.graphdef, old.names)
    reasons: list[str] = []

    for path, part in parts_by_path(new.graphdef, new.names).items():
        values = [item.value for item in (before.get(path), part) if isinstance(item, Static)]
        if len(values) < 2:
            continue

        pairs = zip(*map(functions_in, values), strict=False)
        names = [now.__qualname__ for was, now in pairs if was is not now]
        reasons += [f"{format_path(path)}: the function {name} (made anew)" for name in names[:1]]
    return reasons or ["a function among the static arguments is another one (made anew)"]


def _static_leaf_differences(old: Specialization, new: Specialization) -> Iterator[str]:
    """Yields how the static leaves of two calls differ."""
    before = {**dict(enumerate(old.key.templates)), **dict(old.key.named)}
    after = {**dict(enumerate(new.key.templates)), **dict(new.key.named)}
    labels = dict(enumerate(new.positions.labels))

    for place, template in after.items():
        earlier = before.get(place)
        if not (isinstance(earlier, TreeTemplate) and isinstance(template, TreeTemplate)):
            continue
        if earlier[:2] != template[:2]:
            continue

        paths, earlier_values = leaf_paths(template.treedef), dict(earlier.static)
        for leaf, value in template.static:
            if value != earlier_values.get(leaf):
                where = format_path((labels.get(place, place), *paths[leaf]))
                yield from _changes(where, earlier_values.get(leaf), value)


def _structure_changes(old: Specialization, new: Specialization) -> list[str]:
    """Describes how two structures differ, a line per place, by path."""
    if old.graphdef == new.graphdef:
        return []
    lines: list[str] = []
    for path, was, now in structure_differences(old.graphdef, new.graphdef, old.names, new.names):
        lines += _changes(format_path(path), was, now)
    return lines or ["objects are shared, or stand in containers, in another way"]


def _changes(where: str, was: object, now: object) -> list[str]:
    """Describes how an entry changed, a line per reason."""
    return (
        _settings_changes(where, was, now)
        or _closure_changes(where, was, now)
        or [f"{where}: {part_text(was)} -> {part_text(now)}"]
    )


def _settings_changes(where: str, was: object, now: object) -> list[str]:
    """Describes which attributes of settings objects were changed in place."""
    first, second = (item.key if isinstance(item, Static) else None for item in (was, now))
    if not (isinstance(first, SettingsKey) and isinstance(second, SettingsKey)):
        return []
    return [f"{where}{format_path(path)} was changed in place" for path in first.changes(second)]


def _closure_changes(where: str, was: object, now: object) -> list[str]:
    """Describes what two functions of one ``def`` close over differently."""
    first, second = (item.value if isinstance(item, Static) else item for item in (was, now))

    # Functions inside of partials and tuples.
    if isinstance(first, functools.partial) and isinstance(second, functools.partial):
        return _closure_changes(where, first.func, second.func)
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for i, pair in pairs for line in _closure_changes(f"{where}[{i}]", *pair)]

    # Two functions of one ``def``: what each of its cells holds.
    if not (isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType)):
        return []
    if first.__code__ is not second.__code__:
        return []
    cells = [
        [part_text(content) for content in closed_over(function)] for function in (first, second)
    ]
    return [
        f"{where} closes over {name}: {old} -> {new}"
        for name, old, new in zip(first.__code__.co_freevars, *cells, strict=True)
        if old != new
    ]
