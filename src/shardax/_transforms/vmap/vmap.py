# SPDX-License-Identifier: Apache-2.0
"""``vmap``: a function over Modules, run on a batch of inputs.

An array with an axis as its entry has one part per *batch element*; an array with ``None`` is
*shared*: all elements see it whole. A shared Variable stays one, so it may be written only with a
value that is equal in all elements. What is attached to a shared Module, or sown into it, has one
part per element (axis 0) if it differs between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core.frames import kind_of
from shardax._core.graph.paths import Leaf, PyTree, format_path
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift import prefix
from shardax._transforms.lift.engine import LiftedCall, RunContext, SealedFrame, decorator, wraps
from shardax._transforms.vmap import axes as mapped
from shardax._transforms.vmap.batch_axes import Batch, automatic_batch, filter_text

_REASON = (
    "so all batch elements would write the one Variable. Pass the Module that holds it as an "
    "argument, with an axis in in_axes for one value per batch element, or None if all batch "
    "elements write the same."
)


@decorator
def vmap(
    function: Any = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    metadata: Mapping[str, Any] | None = None,
    batch: int | Batch | None = None,
) -> Any:
    """Makes a function over Modules run on a batch of inputs.

    Every Variable, and every plain array, has an axis along which the batch is taken apart and put
    together, or ``None`` if it is shared. What batch elements write into a Variable is stored back
    along its axis. A random stream with an axis is split, so that batch elements draw different
    numbers; under ``None`` all batch elements draw the same ones.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        in_axes: One entry for all positional arguments, a tuple of one each, or a dict with one for
            each argument by its parameter's name, such as ``{"layer": None, "x": 0}``. An entry is
            an axis (negative counts from the end), ``None``, for a Module also ``StateAxes`` or a
            ``State`` of axes, for a container the same container with entries. An argument given by
            name has the entry of its position, or axis 0. Or ``"auto"``: an array is mapped if its
            leading axis has the size of the batch; another match is an error unless declared, as
            for ``batch_axes``.
        out_axes: A prefix of the result, likewise.
        axis_name: A name for collectives inside, such as ``jax.lax.pmean(x, "batch")``.
        axis_size: The size of the batch, if no argument has an axis.
        spmd_axis_name: As in ``jax.vmap``.
        metadata: ``{sx.partition.PARTITION_NAME: "layers"}`` names the mapped dimension in the
            ``axes`` of Variables and in boxes. Without it, a new dimension is unnamed.
        batch: With ``in_axes="auto"``, the size of the batch, or a ``Batch`` that also declares.

    Returns:
        A function of the same arguments.

    Raises:
        PrefixError: If an entry is no axis; when called, if a prefix does not fit.
        TransformError: If ``axis_size`` is no size; when called, if an array has no such axis, or
            sizes differ; when called, if axes are to be found and sizes do not say which; when
            called, if a Variable gets two different axes; when called, if arrays are split
            differently over Explicit mesh axes; when called, if batch elements write different
            values into a shared Variable, or a result without an axis differs between them.
        ForeignMutationError: When called, if a Variable that was not passed in is written.
        MetadataError: When called, if a mapped dimension has another name than ``metadata`` gives.
        PartitionError: When called, if a box cannot lose or gain the dimension; names its path;
            when called, if a box must have a name for it.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> make = lambda rngs: sx.nn.Linear(2, 3, rngs=rngs)
        >>> five = sx.vmap(make, axis_size=5)(sx.Rngs(0))
        >>> five.kernel.shape, five.kernel.axes
        ((5, 2, 3), (None, 'in', 'out'))
        >>> sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(five, jnp.ones(2)).shape
        (5, 3)
    """
    axis_size = mapped.as_count(axis_size, "axis_size")
    if isinstance(in_axes, str):
        in_axes = automatic_batch(in_axes, batch, axis_size)
        axis_size = in_axes.size
    else:
        prefix.check_axes_only(in_axes, "in_axes")
        if batch is not None:
            raise PrefixError(
                "batch= says how to find the axes of arguments, but in_axes gives them. Give one "
                "of the two: in_axes='auto' with batch=."
            )
    prefix.check_axes_only(out_axes, "out_axes")
    mapped.mapped_params(metadata, "vmap")

    @wraps(function)
    def vmapped(*args, **kwargs):
        call = _VmapCall(function, in_axes, out_axes, axis_size, metadata, args, kwargs)
        return call.run({"axis_name": axis_name, "spmd_axis_name": spmd_axis_name})

    return vmapped


class _VmapCall(mapped.MappedCall):
    """One call of a function made by ``vmap``."""

    def __init__(
        self,
        function: Callable[..., PyTree],
        in_axes,
        out_axes,
        axis_size: int | None,
        metadata: Mapping[str, Any] | None,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        make_frame = functools.partial(SealedFrame, functions=[function], reason=_REASON)
        prefixes: PyTree = None
        named: PyTree = None
        if not isinstance(in_axes, Batch):
            assigned = prefix.assign(function, in_axes, args, kwargs, "in_axes", 0)
            args, kwargs, prefixes, named = assigned
        call = LiftedCall("vmap", [function], args, kwargs, make_frame)
        if isinstance(in_axes, Batch):
            prefixes, named = in_axes.find_call(call.labels, args, kwargs).axes
        assignment = prefix.EntryAssignment(call, args, kwargs, prefixes, named, None, "in_axes")
        entries = [*prefix.entries_in((prefixes, named, out_axes)), 0, None]
        axes = assignment.leaves
        super().__init__(
            assignment, (out_axes, "out_axes", None), entries, lambda p: axes[p] is not None
        )
        self.params = mapped.mapped_params(metadata, "vmap")
        self.plain, self.plain_tree = call.arguments.plain_leaves()
        self.rows = mapped.entering_arrays(assignment, self.streams, self.values, self.plain)
        self.size = mapped.common_size(self.rows, axis_size, "vmap")
        self.graphdef = mapped.element_graphdef(assignment, self.streams, self.params)
        self.boxes = mapped.MappedBoxes(assignment, self.params)
        call.enter = self.boxes.enter

    def run(self, options: dict[str, Any]) -> PyTree:
        """Runs all batch elements and carries back what they did."""
        axes = [0 if p in self.streams else axis for p, axis in enumerate(self.assignment.leaves)]
        values = self.streams.split_keys(
            self.values, self.size, mapped.mapped_sharding(self.rows, "vmap")
        )
        mark, mark_axis = self._mark()
        transformed = jax.vmap(
            self._pure,
            in_axes=(axes, self.assignment.plain, mark_axis),
            out_axes=tuple(self.entries),
            axis_size=self.size,
            **options,
        )
        return self.apply(transformed(values, self.plain, mark))

    def _mark(self) -> tuple[Any, Any]:
        """Returns an array that differs between batch elements, and its axis."""
        for _, leaf, axis in self.rows:
            if axis is not None and isinstance(leaf, (jax.Array, np.ndarray)):
                return leaf, axis  # not an array of our own: it is split over the mesh as it must
        return np.arange(self.size), 0

    def _pure(self, values: list[Leaf], plain: list[Leaf], mark) -> tuple[list[PyTree], ...]:
        positional, named = self.plain_tree.unflatten(plain)
        leave = functools.partial(self._leave, mark=mark)
        return self.call.run(values, positional, named, leave, graphdef=self.graphdef)

    def _leave(self, context: RunContext, mark: object) -> tuple[list[PyTree], ...]:
        """Groups what leaves a batch element by axis."""
        axes = self.assignment.leaves
        outputs, leaving, sown = self.record(context, lambda position: axes[position] is None)
        shared = [i for i, leaf in enumerate(leaving) if leaf.entry is None]
        values = [leaving[i].value for i in shared]
        for i, differs in zip(shared, varies(mark, values), strict=True):
            if differs and leaving[i].kind == "attached":  # to what is shared: one part per element
                leaving[i] = leaving[i]._replace(entry=0)
            elif differs:
                raise TransformError(self._explain(leaving[i]))
        for leaf in leaving:
            mapped.check_new_axis(leaf.value, leaf.entry, leaf.path, "vmap")
        new = [leaf.entry for leaf in leaving if leaf.new]
        mapped.name_new_dimensions(self.assignment, self.streams, outputs, new, self.params)
        entries = [leaf.entry for leaf in leaving for _ in jax.tree.leaves(leaf.value)]
        return self.group(outputs, sown, entries)

    def _explain(self, leaf: mapped.LeavingValue) -> str:
        where = format_path(leaf.path)
        if leaf.kind == "result":
            return (
                f"out_axes of sx.vmap gives None for {where}, but its value differs between batch "
                f"elements. Give it an axis in out_axes, or reduce it over the batch: "
                f"jax.lax.pmean(x, axis_name)."
            )
        position = self.assignment.leaf_paths.index(leaf.path)
        variable = self.call.graph.flat.leaves[position]
        kind = kind_of(variable)
        if id(variable) in self.assignment.by_id:
            reason = "is shared by all batch elements of sx.vmap (its entry in in_axes is None)"
            axes = f"{{{filter_text(type(variable), leaf.path)}: 0, ...: None}}"
            fix = f"Give it an axis, sx.StateAxes({axes})"
        else:
            reason = "of what sx.vmap was bound to is shared by all batch elements"
            call = "sx.vmap(lambda module, x: module(x))(module, x)"
            fix = f"Pass the Module as an argument with an axis, {call}"
        return (
            f"The {kind} at {where} {reason}, but was written with a value that differs between "
            f"them. {fix}, or write a value that is equal in all batch elements: "
            f"jax.lax.pmean(x, axis_name)."
        )


def varies(mark: object, values: Sequence[object]) -> list[bool]:
    """Returns, inside ``vmap``, whether each value differs between batch elements."""
    # JAX tells a rule for batching which of its operands are batched; this one only listens.
    flags = [False] * len(values)

    @jax.custom_batching.custom_vmap
    def look(mark: object, values: list[object]):
        return mark

    @look.def_vmap
    def rule(axis_size: int, batched, mark: object, values: list[object]) -> tuple[PyTree, bool]:
        flags[:] = [any(jax.tree.leaves(item)) for item in batched[1]]
        return mark, True

    if values:
        look(mark, list(values))
    return flags
