# SPDX-License-Identifier: Apache-2.0
"""JAX's errors about a compiled function, in terms of the user's arguments.

A specialization calls JAX with flat lists of values, so JAX names a place like ``flat[0][3]``. Here
it gets its name back: ``model.layers[0].kernel``. Common mistakes get an error of their own; any
other error keeps its type and text, and a note names the argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from shardax._core.errors import DonationError, first_of
from shardax._core.graph.paths import Path, format_path
from shardax._core.values import refuse_deleted
from shardax._core.variable import Param
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift.arguments import TreeTemplate, plain_paths
from shardax._transforms.lift.binding import absent_error
from shardax._transforms.lift.tracer_errors import TRACER_ERRORS, rewrite

_PLACE = re.compile(r"flat\[(\d)\](?:\[(?:(\d+)|'(\w+)')\](?:\[(\d+)\])?)")

_TYPE = re.compile(r"problematic value is of type <class '([^']*)'>")


def explain_error(error: Exception, program: object, graph: object) -> None:
    """Raises a clearer error than JAX, or adds a note."""
    explain_values(error, program, graph)
    if isinstance(error, (ValueError, IndexError)):
        _explain_shardings(error, program, graph)
    if type(error).__name__ == "ShardingTypeError":  # JAX gives it no public name
        rewrite(error, lambda text: text + _about_layouts(text, graph))
    explain_places(error, program)


def _about_layouts(text: str, graph) -> str:
    """Names Variables split over an error's mesh axes, and remedies."""
    mesh_axes = {first or second for first, second in re.findall(r"'(\w+)'|@(\w+)", text)}
    pairs = [*zip(graph.flat.leaf_paths, graph.leaves, strict=True)]
    params = [pair for pair in pairs if isinstance(pair[1], Param)]
    mesh, lines = None, []
    for path, variable in params or pairs:
        names = variable.axes or ()
        for leaf in jax.tree.leaves(variable._value):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, NamedSharding) or AxisType.Auto in sharding.mesh.axis_types:
                continue
            for dimension, entry in enumerate(sharding.spec):
                if mesh_axes.isdisjoint(entry if isinstance(entry, tuple) else (entry,)):
                    continue
                mesh = sharding.mesh
                lines.append(
                    f"  {format_path(path)}, a {type(variable).__name__}: dimension {dimension} "
                    f"over {entry!r}"
                    + (f", by a rule {names[dimension], entry}" if dimension < len(names) else "")
                )
    if mesh is None:
        return ""
    kinds = f"(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
    make = f"jax.make_mesh({mesh.axis_sizes}, {mesh.axis_names}, axis_types={kinds})"
    layouts = first_of(lines, "\n")
    return (
        "\nOver Explicit mesh axes, an operation whose result has no evident layout has to be told "
        f"it. Split over these axes are\n{layouts}\nLeave layouts to the compiler, over a mesh "
        f"with Auto axes: `{make}`. Or say the layout of the product: "
        "`jnp.dot(x, w, out_sharding=spec)` for `x @ w`; sx.nn.Linear does so by the rules."
    )


def explain_places(error: Exception, program: Any) -> None:
    """Explains or annotates an error that names flat arguments."""
    text = str(error)
    if "flat[" not in text:
        return
    explained = in_user_terms(text, program)
    kind = _TYPE.search(text)
    if "Error interpreting argument" in text and kind is not None:
        place = _PLACE.search(text)
        name = place_name(place, program) if place else "an argument"
        raise TransformError(
            f"{name} of {_shown(program.function)} is a {kind.group(1)}, which is neither an array "
            "or number nor a Module, Variable or pytree of these. Make configuration static: "
            "sx.jit(f, static_argnames=...). Register the class of what holds arrays or Modules "
            "as a pytree (jax.tree_util.register_dataclass), or make it a sx.Module."
        ) from error
    if "sharding" in text and isinstance(error, ValueError):
        raise PrefixError(explained) from error
    if isinstance(error, TRACER_ERRORS) or "while tracing" in text:
        rewrite(
            error, lambda text: in_user_terms(text, program).replace(" for jit. ", " for sx.jit. ")
        )
        return
    notes = [f"{place.group(0)} is {place_name(place, program)}" for place in _PLACE.finditer(text)]
    error.add_note(f"In the call of {_shown(program.function)}: {', '.join(dict.fromkeys(notes))}.")


def in_user_terms(text: str, program: object) -> str:
    """Replaces every place in a message of JAX by its name."""
    return _PLACE.sub(lambda place: place_name(place, program), text)


def place_name(place: re.Match[str], program: Any) -> str:
    """Returns the user's name of a flat argument, like ``model.kernel``."""
    group, index, name, leaf = place.groups()
    below = "" if leaf is None else f"[{leaf}]"
    if group in "01":
        donated = [i in program.donated_leaves for i in range(len(program.leaf_paths))]
        positions = [i for i, flag in enumerate(donated) if flag == (group == "1")]
        return format_path(program.leaf_paths[positions[int(index)]]).removeprefix(".") + below
    if name is not None:
        template = dict(program.named)[name]
    else:
        template, name = program.templates[int(index)], program.positions.labels[int(index)]
    if leaf is None or not isinstance(template, TreeTemplate):
        return name + below
    return name + format_path(plain_paths(template)[int(leaf)])


def _shown(function) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _shared_arrays(pairs: Sequence[tuple[Path, Any]]) -> list[list[Path]]:
    """Returns the paths of Variables with one array in common."""
    owners: dict[int, list[Path]] = {}
    for path, variable in pairs:
        for leaf in jax.tree.leaves(variable._value):
            owners.setdefault(id(leaf), []).append(path)
    return [paths for paths in owners.values() if len(paths) > 1]


def explain_values(error: Exception, program: Any, graph: Any) -> None:
    """Explains errors of absent, deleted or twice donated values."""
    pairs = list(zip(graph.flat.leaf_paths, graph.leaves, strict=True))
    is_of_types = isinstance(error, TypeError)
    absent = [path for path, v in pairs if is_of_types and v.is_abstract]
    if absent:
        raise absent_error(absent) from error
    if "delete" in str(error) or "donate" in str(error):
        refuse_deleted(graph.flat.leaf_paths, [leaf._value for leaf in graph.leaves])
    if program.donated_leaves and "donate" in str(error):
        twice = _shared_arrays(pairs)
        if twice:
            raise DonationError(
                "Two Variables hold one and the same array, which cannot be donated twice: "
                f"{'; '.join(_listed(paths) for paths in twice)}. Copy one of them: v[...] = "
                "jnp.copy(v)."
            ) from error


def _sharding_misfits(program: Any, graph: Any) -> Iterator[str]:
    """Yields Variables with unfitting declared shardings."""
    shardings = program.leaf_shardings
    for path, variable, sharding in zip(
        graph.flat.leaf_paths, graph.leaves, shardings, strict=True
    ):
        for leaf in jax.tree.leaves(variable._value) if hasattr(sharding, "shard_shape") else ():
            try:
                sharding.shard_shape(leaf.shape)
            except ValueError as reason:
                yield f"  {format_path(path)}, shape {leaf.shape}: {reason}"
            except IndexError:  # what JAX raises for arrays with too few dimensions
                yield f"  {format_path(path)}, shape {leaf.shape}: {sharding} has more"


def _explain_shardings(error: Exception, program, graph) -> None:
    """Raises if declared shardings do not fit, listing all Variables."""
    misfits = list(_sharding_misfits(program, graph))
    if misfits:
        raise PrefixError(
            f"in_shardings does not fit {len(misfits)} Variables; nothing was changed:\n"
            + "\n".join(misfits)
            + "\nGive these a sharding of their own: sx.StateSharding({filter: ..., ...: ...})."
        ) from error


def _listed(paths: Sequence[Path]) -> str:
    return first_of([format_path(path) for path in paths])
