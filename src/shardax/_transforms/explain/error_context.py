# SPDX-License-Identifier: Apache-2.0
"""JAX's errors about a compiled function, in terms of the user's arguments.

``explaining`` is what ``jit`` calls; it stands around each step in which JAX may raise. A common
mistake gets an error of its own. It is told by the arguments and Variables of the call, and by the
class of JAX's error. Any other error keeps its type and text, and a note names the argument.

A specialization calls JAX with flat lists of values, so JAX names a place like ``flat[0][3]``. Here
it gets its name back: ``model.layers[0].kernel``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import jax
from jax.sharding import AxisType, NamedSharding

from shardax._core.errors import first_of
from shardax._core.graph.paths import Path, format_path
from shardax._core.variable import Param
from shardax._transforms import errors
from shardax._transforms.errors import PrefixError, TransformError, absent_error
from shardax._transforms.explain.tracer_errors import TRACER_ERRORS, rewrite
from shardax._transforms.jit.programs import NeedsSlowCall
from shardax._transforms.lift.arguments import TreeTemplate, plain_paths
from shardax._transforms.lift.engine import RetraceRequest
from shardax._transforms.lift.input_graph import InputGraph

_PLACE = re.compile(r"flat\[(\d)\](?:\[(?:(\d+)|'(\w+)')\](?:\[(\d+)\])?)")

_TYPE = re.compile(r"problematic value is of type <class '([^']*)'>")


class ExplainedCall(Protocol):
    """What an explanation has to know of a call: a ``CachedCall``."""

    specialization: Any

    def graph(self) -> InputGraph:
        """Returns the objects of the call, flattened."""
        ...


@contextlib.contextmanager
def explaining(call: ExplainedCall) -> Generator[None]:
    """Explains the errors of a block; requests for another trace are none."""
    try:
        yield
    except (RetraceRequest, NeedsSlowCall):
        raise
    except Exception as error:
        explain(error, call)
        raise


def explain(error: Exception, call: ExplainedCall) -> None:
    """Raises a clearer error than JAX, or adds a note; returns where there is nothing to say."""
    explain_values(error, call)
    if isinstance(error, (ValueError, IndexError)):
        _explain_shardings(error, call)
    if type(error).__name__ == "ShardingTypeError":  # JAX gives it no public name
        rewrite(error, lambda text: text + _about_layouts(text, call.graph()))
    explain_places(error, call.specialization)


def _about_layouts(text: str, graph: InputGraph) -> str:
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


def explain_places(error: Exception, specialization: Any) -> None:
    """Explains or annotates an error that names flat arguments."""
    text = str(error)
    if "flat[" not in text:
        return
    explained = in_user_terms(text, specialization)
    kind = _TYPE.search(text)
    if "Error interpreting argument" in text and kind is not None:
        place = _PLACE.search(text)
        name = place_name(place, specialization) if place else "an argument"
        raise TransformError(
            f"{name} of {_shown(specialization.function)} is a {kind.group(1)}, which is neither "
            "an array or number nor a Module, Variable or pytree of these. Make configuration "
            "static: sx.jit(f, static_argnames=...). Register the class of what holds arrays or "
            "Modules as a pytree (jax.tree_util.register_dataclass), or make it a sx.Module."
        ) from error
    if "sharding" in text and isinstance(error, ValueError):
        raise PrefixError(explained) from error
    if isinstance(error, TRACER_ERRORS) or "while tracing" in text:
        rewrite(
            error,
            lambda text: in_user_terms(text, specialization).replace(" for jit. ", " for sx.jit. "),
        )
        return
    notes = [
        f"{place.group(0)} is {place_name(place, specialization)}"
        for place in _PLACE.finditer(text)
    ]
    error.add_note(
        f"In the call of {_shown(specialization.function)}: {', '.join(dict.fromkeys(notes))}."
    )


def in_user_terms(text: str, specialization: Any) -> str:
    """Replaces every place in a message of JAX by its name."""
    return _PLACE.sub(lambda place: place_name(place, specialization), text)


def place_name(place: re.Match[str], specialization: Any) -> str:
    """Returns the user's name of a flat argument, like ``model.kernel``."""
    group, index, name, leaf = place.groups()
    below = "" if leaf is None else f"[{leaf}]"

    # The first two inputs are the values of Variables, kept and donated.
    if group in "01":
        kept, donated = specialization.partition(specialization.leaf_paths)
        paths = kept if group == "0" else donated
        return format_path(paths[int(index)]).removeprefix(".") + below

    # The others are plain arguments, by position or by name.
    if name is None:
        template = specialization.templates[int(index)]
        name = specialization.positions.labels[int(index)]
    else:
        template = dict(specialization.named)[name]
    if leaf is None or not isinstance(template, TreeTemplate):
        return name + below
    return name + format_path(plain_paths(template)[int(leaf)])


def _shown(function) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def explain_values(error: Exception, call: ExplainedCall) -> None:
    """Raises the error of Variables without arrays, or with arrays that are donated twice."""
    graph, donated = call.graph(), call.specialization.donated_leaves

    if isinstance(error, TypeError):
        leaves = zip(graph.flat.leaf_paths, graph.leaves, strict=True)
        absent = [path for path, variable in leaves if variable.is_abstract]
        if absent:
            raise absent_error(absent) from error

    # XLA refuses an array that is given twice if it is donated once.
    if donated and isinstance(error, jax.errors.JaxRuntimeError):
        groups = _shared_with_donated(graph, donated)
        if groups:
            raise errors.donated_twice(groups) from error


def _shared_with_donated(graph: InputGraph, donated: frozenset[int]) -> list[list[Path]]:
    """Returns the paths of Variables that have a donated array in common."""
    positions_by_array: dict[int, list[int]] = {}
    for position, variable in enumerate(graph.leaves):
        for leaf in jax.tree.leaves(variable._value):
            positions_by_array.setdefault(id(leaf), []).append(position)

    return [
        [graph.flat.leaf_paths[position] for position in positions]
        for positions in positions_by_array.values()
        if len(positions) > 1 and not donated.isdisjoint(positions)
    ]


def _explain_shardings(error: Exception, call: ExplainedCall) -> None:
    """Raises if declared shardings do not fit, listing all Variables."""
    misfits = list(_sharding_misfits(call))
    if misfits:
        raise PrefixError(
            f"in_shardings does not fit {len(misfits)} Variables; nothing was changed:\n"
            + "\n".join(misfits)
            + "\nGive these a sharding of their own: sx.StateSharding({filter: ..., ...: ...})."
        ) from error


def _sharding_misfits(call: ExplainedCall) -> Iterator[str]:
    """Yields Variables with unfitting declared shardings, as lines of a message."""
    graph = call.graph()
    shardings = call.specialization.layouts.of_variables

    for path, variable, sharding in zip(
        graph.flat.leaf_paths, graph.leaves, shardings, strict=True
    ):
        if not hasattr(sharding, "shard_shape"):
            continue
        for leaf in jax.tree.leaves(variable._value):
            where = f"  {format_path(path)}, shape {leaf.shape}"
            try:
                sharding.shard_shape(leaf.shape)
            except ValueError as reason:
                yield f"{where}: {reason}"
            except IndexError:  # what JAX raises for arrays with too few dimensions
                yield f"{where}: {sharding} has more"
