# SPDX-License-Identifier: Apache-2.0
"""``vmap``: a function over Modules, run on many lanes at once.

A *lane* is one of the runs. An array with an axis as its entry has one part per lane; an array with
``None`` is *shared*: all lanes see it whole. A shared Variable stays one, so lanes may write it only
with a value that does not differ between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import AxisSizeError, MetadataError, OutputError, SharedWriteError
from shardax.core.metadata import PARTITION_NAME
from shardax.core.paths import Path, format_path
from shardax.core.structure import GraphDef, VariableDef
from shardax.transforms.call import Call, Inside, SealedFrame, wraps
from shardax.transforms.layout import Layout, Leaving, Parts, Sorted, entries_in, map_metadata
from shardax.transforms.lift import Carried, Record, carry_in, check_no_leak, check_result
from shardax.transforms.prefix import check_axes_only, per_argument
from shardax.transforms.streams import SplitStreams

_REASON = (
    "so all lanes would write the one Variable. Pass the Module that holds it as an argument, with "
    "an axis in in_axes for one value per lane, or None if all lanes write the same."
)


def vmap(
    function: Callable[..., Any] | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Makes a function over Modules run on many lanes at once.

    Every Variable, and every plain array, has an axis along which lanes are taken apart and put
    together, or ``None`` if it is shared. What lanes write into a Variable is stored back along its
    axis. A random stream with an axis is split, so that lanes draw different numbers; under
    ``None`` all lanes draw the same ones.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        in_axes: One entry for all positional arguments, or a tuple of one each. An entry is an axis
            (negative counts from the end), ``None``, for a Module also ``StateAxes`` or a ``State``
            of axes, for a container the same container with entries. Keyword arguments have axis 0.
        out_axes: A prefix of the result, likewise.
        axis_name: A name for collectives inside, such as ``jax.lax.pmean(x, "batch")``.
        axis_size: The number of lanes, if no argument has an axis.
        spmd_axis_name: As in ``jax.vmap``.
        metadata: ``{sx.partition.PARTITION_NAME: "layers"}`` names the mapped dimension in the
            ``axes`` of Variables. Without it, a new dimension is unnamed.

    Returns:
        A function of the same arguments.

    Raises:
        PrefixError: When called, if a prefix does not fit.
        AxisSizeError: When called, if an array has no such axis, or sizes differ.
        SharedWriteError: When called, if lanes write different values into a shared Variable.
        InconsistentAliasingError: When called, if a Variable gets two different axes.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> make = lambda rngs: sx.nn.Linear(2, 3, rngs=rngs)
        >>> five = sx.vmap(make, axis_size=5)(sx.Rngs(0))
        >>> five.kernel.shape, five.kernel.axes
        ((5, 2, 3), (None, 'embed', 'mlp'))
        >>> sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(five, jnp.ones(2)).shape
        (5, 3)
    """
    options = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
        "metadata": metadata,
    }
    if function is None:
        return functools.partial(vmap, **options)
    check_axes_only(in_axes, "in_axes")
    check_axes_only(out_axes, "out_axes")
    name = (metadata or {}).get(PARTITION_NAME)

    @wraps(function)
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        batch = _Batch(function, in_axes, out_axes, axis_size, name, args, kwargs)
        return batch.run({"axis_name": axis_name, "spmd_axis_name": spmd_axis_name})

    return vmapped


class _Batch:
    """One call of a function made by ``vmap``."""

    def __init__(
        self,
        function: Callable[..., Any],
        in_axes: Any,
        out_axes: Any,
        axis_size: int | None,
        partition_name: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        def make_frame(name: str) -> SealedFrame:
            return SealedFrame(name, [function], _REASON)

        self.call = Call("vmap", [function], args, kwargs, make_frame)
        prefixes = per_argument(in_axes, self.call.labels, "in_axes")
        self.layout = Layout(self.call, args, kwargs, prefixes, 0, None, "in_axes")
        self.out_axes = out_axes
        self.partition_name = partition_name
        self.values = self.call.graph.values()
        arguments = self.call.arguments
        self.plain, self.plain_tree = jax.tree.flatten(
            (list(arguments.plain), arguments.plain_named)
        )
        axes = self.layout.leaves
        self.streams = SplitStreams(self.call, self.values, lambda p: axes[p] is not None)
        self.size = self._find_size(axis_size)
        self.graphdef = lane_structure(self.layout, self.streams, partition_name)
        self.sorted = Sorted([*entries_in(in_axes), *entries_in(out_axes), 0, None])
        self.parts: Parts | None = None
        self.moved: dict[int, Any] = {}

    def _find_size(self, axis_size: int | None) -> int:
        sizes = []
        rows = zip(self.layout.leaf_paths, self.values, self.layout.leaves, strict=True)
        sizes = [
            (path, leaf, axis)
            for position, (path, value, axis) in enumerate(rows)
            if position not in self.streams
            for leaf in jax.tree.leaves(value)
        ]
        sizes.extend(zip(self.layout.plain_paths, self.plain, self.layout.plain, strict=True))
        return common_size(sizes, axis_size, "vmap")

    def run(self, options: dict[str, Any]) -> Any:
        axes = [0 if p in self.streams else axis for p, axis in enumerate(self.layout.leaves)]
        mapped = jax.vmap(
            self._pure,
            in_axes=(axes, self.layout.plain, 0),
            out_axes=tuple(self.sorted.entries),
            axis_size=self.size,
            **options,
        )
        values = self.streams.lanes(self.values, self.size)
        lists = mapped(values, self.plain, jnp.arange(self.size))
        assert self.parts is not None
        carried = self.parts.assemble(self.sorted.restore(lists))
        carried = self.streams.restore(carried, self.moved)
        check_no_leak(self.call.graph, carried)
        return carry_in(self.call.graph, carried)

    def _pure(self, values: list[Any], plain: list[Any], lane: Any) -> tuple[list[Any], ...]:
        positional, named = self.plain_tree.unflatten(plain)

        def leave(inside: Inside) -> tuple[list[Any], ...]:
            check_result(inside.result, "vmap")
            leaving = self.layout.leaving(inside, self.out_axes, "out_axes")
            carried, self.moved = self.streams.settle(inside.carry_out(inside.result))
            refuse_foreign(carried.record, "vmap")
            self.parts = Parts(carried)
            axes, new = self._axes_of(carried, leaving, lane)
            name_new_dimensions(self.layout, carried.record, new, self.partition_name)
            return self.sorted.sort(zip(axes, self.parts.values, strict=True))

        return self.call.run(values, positional, named, leave, graphdef=self.graphdef)

    def _axes_of(
        self, carried: Carried, leaving: Leaving, lane: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns the axis of every value that leaves, and of every new Variable."""
        assert self.parts is not None
        record = carried.record
        written = [self.layout.leaves[position] for position in record.written]
        new = [leaving.by_id.get(key, ((), None))[1] for key in record.fresh_ids]
        axes = [*leaving.plain, *written, *new]
        shared = [i for i, axis in enumerate(axes) if axis is None]
        varying = varies(lane, [self.parts.values[i] for i in shared])
        first_new = len(axes) - len(new)
        for position, differs in zip(shared, varying, strict=True):
            if not differs:
                continue
            if position >= first_new:  # attached to a shared Module: one value per lane
                axes[position] = 0
            elif position >= len(leaving.plain):
                self._refuse_shared(record, position - len(leaving.plain))
            else:
                where = format_path(leaving.plain_paths[position]) or "the result"
                raise SharedWriteError(
                    f"out_axes gives None for {where} of the result of sx.vmap, but its value "
                    f"differs between lanes. Give it an axis in out_axes, or reduce it over the "
                    f"lanes: jax.lax.pmean(x, axis_name)."
                )
        return axes, axes[first_new:]

    def _refuse_shared(self, record: Record, place: int) -> None:
        position = record.written[place]
        path = format_path(self.layout.leaf_paths[position])
        kind = type(self.call.graph.leaves[position]).__name__
        raise SharedWriteError(
            f"The {kind} at {path} is shared by all lanes of sx.vmap (its entry in in_axes is "
            f"None), but was written with a value that differs between them. Give it an axis, "
            f"sx.StateAxes({{sx.{kind}: 0, ...: None}}), or write a value that is equal in all "
            f"lanes: jax.lax.pmean(x, axis_name)."
        )


def varies(lane: jax.Array, values: Sequence[Any]) -> list[bool]:
    """Returns, inside ``vmap``, whether each value differs between lanes.

    JAX tells a rule for batching which of its operands are batched; this one only listens.

    Args:
        lane: The number of the lane.
        values: Pytrees of arrays.
    """
    found = [False] * len(values)

    @jax.custom_batching.custom_vmap
    def look(lane: Any, values: list[Any]) -> Any:
        return lane

    @look.def_vmap
    def rule(axis_size: int, batched: Any, lane: Any, values: list[Any]) -> tuple[Any, bool]:
        found[:] = [any(jax.tree.leaves(item)) for item in batched[1]]
        return lane, True

    if values:
        look(lane, list(values))
    return found


def common_size(sizes: Sequence[tuple[Path, Any, Any]], given: int | None, name: str) -> int:
    """Returns the size that all mapped arrays have along their axes.

    Args:
        sizes: (path, array, axis or None) of each array.
        given: What the caller says it is, or None.
        name: The transform's name, for messages.

    Raises:
        AxisSizeError: If an array has no such axis, sizes differ, or nothing has an axis.
    """
    found: dict[int, Path | None] = {} if given is None else {int(given): None}
    for path, leaf, axis in sizes:
        if axis is None:
            continue
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise AxisSizeError(
                f"sx.{name} maps axis {axis} of the array at {format_path(path)}, which has shape "
                f"{shape}. Give it None in in_axes if it is the same for all, or another axis."
            )
        found.setdefault(shape[axis], path)
    if len(found) > 1:
        shown = "\n".join(
            f"  {'axis_size or length' if path is None else format_path(path)}: {size}"
            for size, path in found.items()
        )
        raise AxisSizeError(f"sx.{name} maps arrays of different sizes:\n{shown}")
    if not found:
        option = "length" if name == "scan" else "axis_size"
        raise AxisSizeError(
            f"sx.{name} does not know how many times to run: no argument has an axis to map. Give "
            f"{option}=..., or an axis in in_axes."
        )
    return next(iter(found))


def lane_structure(layout: Layout, streams: SplitStreams, partition_name: Any) -> GraphDef:
    """Returns the structure of one lane: mapped Variables without the name of their axis."""

    def change(position: int, definition: VariableDef) -> VariableDef:
        axis = layout.leaves[position]
        if not isinstance(axis, int) or position in streams:
            return definition
        try:
            metadata = definition.metadata.without_axis(axis, partition_name)
        except MetadataError as error:
            path = format_path(layout.leaf_paths[position])
            raise MetadataError(
                f"The {definition.type.__name__} at {path} cannot be mapped: {error}"
            ) from error
        return definition._replace(metadata=metadata)

    return map_metadata(layout.call.graph.flat.graphdef, change)


def name_new_dimensions(
    layout: Layout, record: Record, axes_of_new: Sequence[Any], partition_name: Any
) -> None:
    """Adds the mapped dimension's name to the metadata of everything that leaves.

    Args:
        layout: The call's layout.
        record: What the function did; changed.
        axes_of_new: The axis of each new Variable.
        partition_name: Its name, or None.
    """
    remaining = iter(axes_of_new)
    fresh = []
    for definition in record.fresh:
        if type(definition) is VariableDef and isinstance(axis := next(remaining), int):
            metadata = definition.metadata.with_axis(axis, partition_name)
            definition = definition._replace(metadata=metadata)
        fresh.append(definition)
    record.fresh = tuple(fresh)
    graphdef = layout.call.graph.flat.graphdef
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    for index, definition in record.updates.items():
        if type(definition) is not VariableDef:
            continue
        axis, outer = layout.leaves[leaf_of[index]], graphdef.objects[index].metadata
        if isinstance(axis, int):
            name = outer.axes[axis] if outer.axes is not None else partition_name
            metadata = definition.metadata.with_axis(axis, name)
            record.updates[index] = definition._replace(metadata=metadata)


def refuse_foreign(record: Record, name: str) -> None:
    """Raises if objects that were not passed in stand in the result.

    Raises:
        OutputError: Naming the type.
    """
    for item in record.foreign.values():
        raise OutputError(
            f"The function given to sx.{name} returned (or attached to an argument) a "
            f"{type(item).__name__} that was not passed in, so it is one object and has no part "
            f"per lane. Pass it as an argument, or return sx.clone of it."
        )
