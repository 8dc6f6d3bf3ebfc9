# SPDX-License-Identifier: Apache-2.0
"""A step, lowered for one layout over devices that are not there.

The step is compiled as a training loop would compile it: Variables that it writes keep their
layout. A plain function has no such rule, so that of a *carried* result is made up: a result with
the tree, shapes and dtypes of an argument is taken to be that argument's next value, keeps its
layout, and may reuse its memory. What ``jax.jit`` made is taken as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardax._core.object import Object
from shardax._transforms.jit.jit import Jit, jit
from shardax.partition.context import axis_rules
from shardax.partition.rules import Rules
from shardax.plan.errors import PlanInputError
from shardax.plan.inputs import Inputs, Placed, label
from shardax.plan.records import Layout

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A lowered step.

    Attributes:
        lowered: JAX's ``Lowered``, or that of ``sx.jit``.
        paths: Where each input of the program is among the arguments, by JAX's name of it.
    """

    lowered: Any
    paths: dict[str, str]


def lower(inputs: Inputs, layout: Layout, placed: Placed, mesh: Mesh) -> LoweredStep:
    """Traces and lowers a step in a layout.

    Args:
        inputs: The step and its arguments.
        layout: The layout, whose rules hold for constraints in the step.
        placed: The arguments in this layout.
        mesh: Its mesh, over devices that need not be there.

    Raises:
        PlanInputError: If the step needs values; names the line.
        ShardaxError: If the layout does not fit the step.
    """
    with axis_rules(layout.as_rules), jax.set_mesh(mesh), needs_no_values():
        traced = _compiled(inputs, placed).trace(*placed.args)
        return LoweredStep(traced.lower(), _paths(traced, inputs))


def lower_alone(inputs: Inputs, mesh_axes: Sequence[str] = ()) -> LoweredStep:
    """Lowers a step for one device, without a layout.

    Args:
        inputs: The step and its arguments.
        mesh_axes: Names of mesh axes, for code in the step that asks for them; all of size 1.

    Raises:
        PlanInputError: If the step needs values; names the line.
    """
    devices = np.array(jax.devices("cpu")[:1]).reshape((1,) * len(mesh_axes))
    # Each name has a rule, so that constraints find that they may stay as they are.
    rules = Rules([(name, None) for name in inputs.logical_names or ("batch",)])
    with contextlib.ExitStack() as scope:
        if mesh_axes:
            scope.enter_context(jax.set_mesh(Mesh(devices, tuple(mesh_axes))))
            scope.enter_context(axis_rules(rules))
        scope.enter_context(needs_no_values())
        traced = _compiled(inputs, None).trace(*inputs.shapes())
        return LoweredStep(traced.lower(), _paths(traced, inputs))


@contextlib.contextmanager
def needs_no_values() -> Iterator[None]:
    """Turns JAX's errors about values that a step needs into one that names the line."""
    try:
        yield
    except _CONCRETE as error:
        line = _line_of(error)
        raise PlanInputError(
            f"The step needs concrete values{f' at {line}' if line else ''}, but is planned from "
            "shapes alone. Compute with jax.numpy and sx.cond or sx.while_loop there, or make the "
            f"value static. JAX says: {str(error).splitlines()[0]}"
        ) from error


def _line_of(error: BaseException) -> str:
    """The innermost line of the traceback that is neither JAX's nor shardax's, as file:line."""
    found, here = "", error.__traceback__
    while here is not None:
        name = here.tb_frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("jax", "shardax", "contextlib"):
            found = f"{here.tb_frame.f_code.co_filename}:{here.tb_lineno}"
        here = here.tb_next
    return found


def _compiled(inputs: Inputs, placed: Placed | None) -> Any:
    """The step as something with ``trace``."""
    step = inputs.step
    shardings = None if placed is None else placed.shardings
    if isinstance(step, Jit):
        options = dataclasses.replace(step.options, in_shardings=shardings, keep_unused=True)
        return Jit(step.__wrapped__, options)
    if hasattr(step, "trace"):
        return step
    if any(_holds_objects(arg) for arg in inputs.tree.values()):
        return jit(step, in_shardings=shardings, keep_unused=True)
    donated, out = _carried(step, inputs, placed)
    if placed is None:
        return jax.jit(step, donate_argnums=donated, keep_unused=True)
    return jax.jit(step, donate_argnums=donated, out_shardings=out, keep_unused=True)


def _holds_objects(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda value: isinstance(value, Object))
    return any(isinstance(leaf, Object) for leaf in leaves)


def _carried(
    step: Callable[..., Any], inputs: Inputs, placed: Placed | None
) -> tuple[tuple[int, ...], Any]:
    """Finds which arguments come back, and the shardings of the results as a prefix."""
    shapes = inputs.shapes()
    result = jax.eval_shape(step, *shapes)
    several = type(result) in (tuple, list)
    parts = list(result) if several else [result]
    donated: list[int] = []
    places: list[Any] = []
    for part in parts:
        found = [i for i, arg in enumerate(shapes) if i not in donated and _alike(arg, part)]
        donated += found[:1]
        places.append(placed.shardings[found[0]] if found and placed is not None else None)
    return tuple(sorted(donated)), type(result)(places) if several else places[0]


def _alike(one: Any, other: Any) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return (
        bool(leaves)
        and jax.tree.structure(one) == jax.tree.structure(other)
        and all(
            (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(leaves, others, strict=True)
        )
    )


def _paths(traced: Any, inputs: Inputs) -> dict[str, str]:
    found = getattr(traced, "input_paths", None)
    if found is None:
        return {}
    return {
        name: label((inputs.names[path[0]] if isinstance(path[0], int) else path[0], *path[1:]))
        for name, path in found.items()
    }
