# SPDX-License-Identifier: Apache-2.0
"""JAX's errors about a compiled function, in terms of the user's arguments.

``explaining`` is what ``jit`` calls; it stands around each step in which JAX may raise. A common
mistake gets an error of its own. It is told by the arguments and Variables of the call, and by the
class of JAX's error, never by its text. Any other error keeps its type and text.

A specialization calls JAX with flat lists of values, so JAX names an input like ``flat[0][3]``.
Here it gets its name back: ``model.layers[0].kernel``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import AxisType, NamedSharding

from shardax._core._jax import is_sharding_type_error
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.variable_types import Param
from shardax._transforms import errors
from shardax._transforms.errors import absent_error
from shardax._transforms.explain.tracer_errors import TRACER_ERRORS, rewrite
from shardax._transforms.jit.programs import FlatInputs, NeedsSlowCall
from shardax._transforms.lift.engine import RetraceRequest
from shardax._transforms.lift.input_graph import InputGraph

if TYPE_CHECKING:
    from shardax._transforms.jit.specialization import Specialization

# What JAX calls an input of the pure function of a ``Specialization``: of the kept ones, or the
# donated ones, the one at a position.
_INPUT = re.compile(r"flat\[([01])\]\[(\d+)\]")


class ExplainedCall(Protocol):
    """What an explanation has to know of a call: a ``CachedCall``."""

    specialization: Specialization

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
    """Raises a clearer error than JAX, or names the inputs in the error that there is."""
    explain_values(error, call)
    if isinstance(error, (ValueError, IndexError)):
        _explain_shardings(error, call)
    if is_sharding_type_error(error):
        rewrite(error, lambda text: text + _about_layouts(call.graph()))
    name_inputs(error, call.specialization)


def name_inputs(error: Exception, specialization: Specialization) -> None:
    """Replaces JAX's names of the inputs, in the text of an error, by those of the user."""
    rewrite(error, lambda text: in_user_terms(text, specialization))
    if isinstance(error, TRACER_ERRORS):
        rewrite(error, lambda text: text.replace(" for jit. ", " for sx.jit. "))


def in_user_terms(text: str, specialization: Specialization) -> str:
    """Returns a text with the name of each input: ``model.kernel`` for ``flat[0][3]``."""
    names = specialization.partition(specialization.input_names)
    return _INPUT.sub(lambda match: names[int(match.group(1))][int(match.group(2))], text)


def _about_layouts(graph: InputGraph) -> str:
    """Returns which Variables are split over Explicit mesh axes, and remedies."""
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
                if not entry:
                    continue
                mesh = sharding.mesh
                rule = f", by a rule {names[dimension], entry}" if dimension < len(names) else ""
                kind = type(variable).__name__
                place = f"{format_path(path)}, a {kind}: dimension {dimension} over {entry!r}"
                lines.append(f"  {place}{rule}")

    return "" if mesh is None else errors.about_explicit_axes(mesh, lines)


def explain_values(error: Exception, call: ExplainedCall) -> None:
    """Raises the error of Variables without arrays, or with arrays that are donated twice."""
    graph, donated = call.graph(), call.specialization.donated_variables

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
    graph = call.graph()
    names = map(format_path, graph.flat.leaf_paths)
    values = [variable._value for variable in graph.leaves]
    misfits = list(_sharding_misfits(names, values, call.specialization.layouts.of_variables))
    if misfits:
        raise errors.unfitting_shardings(misfits) from error


def explain_inputs(
    error: Exception, specialization: Specialization, flat_inputs: FlatInputs
) -> None:
    """Raises a clearer error than JAX about an argument that it does not take.

    Args:
        error: What JAX raised when it was to trace the pure function of a specialization.
        specialization: The specialization.
        flat_inputs: The inputs of its pure function.
    """
    values = specialization.join(*flat_inputs)
    if isinstance(error, TypeError):
        for name, value in zip(specialization.input_names, values, strict=True):
            for leaf in jax.tree.leaves(value):
                if not _has_type(leaf):
                    raise errors.no_input(name, leaf, specialization.function) from error

    if isinstance(error, ValueError):
        first = specialization.variable_count
        names, shardings = specialization.input_names[first:], specialization.layouts.of_arrays
        misfits = list(_sharding_misfits(names, values[first:], shardings))
        if misfits:
            raise errors.unfitting_argument_shardings(misfits) from error


def _has_type(leaf: object) -> bool:
    """Whether JAX takes a leaf as an array or number."""
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _sharding_misfits(
    names: Iterable[str], values: Iterable[PyTree], shardings: Iterable[Any]
) -> Iterator[str]:
    """Yields the values with unfitting declared shardings, as lines of a message."""
    for name, value, sharding in zip(names, values, shardings, strict=False):
        if not hasattr(sharding, "shard_shape"):
            continue
        for leaf in jax.tree.leaves(value):
            where = f"  {name}, shape {jax.numpy.shape(leaf)}"
            try:
                sharding.shard_shape(jax.numpy.shape(leaf))
            except ValueError as reason:
                yield f"{where}: {reason}"
            except IndexError:  # what JAX raises for arrays with too few dimensions
                yield f"{where}: {sharding} has more"
