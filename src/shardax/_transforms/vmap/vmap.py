# SPDX-License-Identifier: Apache-2.0
"""``vmap``: a function over Modules, run on a batch of inputs.

``vmap`` is a mapped call (``mapped.call`` has its steps, and what ``scan`` and ``shard_map`` do
instead). A run is one *batch element*; JAX traces it once for all. What a batch element sees of a
Variable, and what a write to it does, depends on its entry in ``in_axes``:

- An axis: each batch element has its own slice. The written slices are stacked along the axis.
- None (shared), also for the Module whose method the function is: all batch elements see the same
  value, and the Variable stays one. When the function has run, ``_VmapCall._settle_shared`` looks
  at what was written. What counts is whether JAX has batched the new value (``is_batched``), that
  is, whether it was computed from mapped values; numbers are not compared. One that is not batched
  is stored once: ``v += 1`` adds one, whatever the size of the batch; so is a reduction by
  ``axis_name``. One that is batched raises ``TransformError``, and nothing is stored.
- No entry, because it was reached through a closure or a global: it can be read. A write raises
  ``ForeignMutationError`` in the line that writes (``SealedFrame`` in ``lift.frames``).

What is attached to a shared Module, or appended to a tuple of it (``Module.sow``), is stacked along
axis 0 if it is batched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core.graph.paths import Leaf, PyTree
from shardax._transforms.errors import PrefixError
from shardax._transforms.lift.engine import LiftedCall, RunContext
from shardax._transforms.lift.entries import EntryAssignment, assign
from shardax._transforms.lift.filter_mappings import check_axes_only, entries_in
from shardax._transforms.lift.frames import SealedFrame
from shardax._transforms.lift.transformed import decorator, wraps
from shardax._transforms.mapped import dimension, errors
from shardax._transforms.mapped.call import AxisMappedCall, LeavingValue
from shardax._transforms.mapped.names import Params, check_metadata
from shardax._transforms.vmap.batch_axes import Batch, automatic_batch

_CAPTURED_WRITE = (
    "so all batch elements would write the one Variable. Pass the Module that holds it as an "
    "argument, with an axis in in_axes for one value per batch element, or None if all batch "
    "elements write the same."
)


@decorator
def vmap(
    function: Callable[..., PyTree] | None = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable = None,
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
    assert function is not None  # ``decorator`` makes a decorator without it
    axis_size = dimension.as_count(axis_size, "axis_size")
    if isinstance(in_axes, str):
        in_axes = automatic_batch(in_axes, batch, axis_size)
        axis_size = in_axes.size
    else:
        check_axes_only(in_axes, "in_axes")
        if batch is not None:
            raise PrefixError(
                "batch= says how to find the axes of arguments, but in_axes gives them. Give one "
                "of the two: in_axes='auto' with batch=."
            )
    check_axes_only(out_axes, "out_axes")
    check_metadata(metadata, "vmap")

    @wraps(function)
    def vmapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        assignment = _assign_axes(function, in_axes, args, kwargs)
        call = _VmapCall(assignment, out_axes, metadata, axis_size)
        return call.run(axis_name=axis_name, spmd_axis_name=spmd_axis_name)

    return vmapped


def _assign_axes(
    function: Callable[..., PyTree],
    in_axes: PyTree | Batch,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> EntryAssignment:
    """Returns the call of a function, with the axis of each Variable and array."""
    make_frame = functools.partial(SealedFrame, functions=[function], reason=_CAPTURED_WRITE)
    if isinstance(in_axes, Batch):
        call = LiftedCall("vmap", [function], args, kwargs, make_frame)
        prefixes, named = in_axes.find_call(call.labels, args, kwargs).axes
    else:
        assigned = assign(function, in_axes, args, kwargs, "in_axes", 0)
        args, kwargs, prefixes, named = assigned
        call = LiftedCall("vmap", [function], args, kwargs, make_frame)
    return EntryAssignment(call, args, kwargs, prefixes, named, None, "in_axes")


class _VmapCall(AxisMappedCall):
    """One call of a function made by ``vmap``."""

    def __init__(
        self,
        assignment: EntryAssignment,
        out_axes: PyTree,
        metadata: Params | None,
        axis_size: int | None,
    ) -> None:
        declared = entries_in((assignment.prefixes, assignment.named, out_axes))
        super().__init__(assignment, out_axes, [*declared, 0, None], metadata, axis_size)

    def run(self, **options: Any) -> PyTree:
        """Runs all batch elements; stores what they wrote, and returns the result of the call."""
        sharding = dimension.mapped_sharding(self.entering, "vmap")
        values = self.streams.split_keys(self.values, self.size, sharding)
        axes = [
            0 if position in self.streams else axis
            for position, axis in enumerate(self.assignment.leaves)
        ]
        batched_array, batched_axis = self._entering_batched_array()

        vectorized = jax.vmap(
            self._run_element,
            in_axes=(axes, self.assignment.plain, batched_axis),
            out_axes=tuple(self.entries),
            axis_size=self.size,
            **options,
        )
        return self.apply(vectorized(values, self.plain, batched_array))

    def _entering_batched_array(self) -> tuple[jax.Array | np.ndarray, int]:
        """Returns an array with a mapped dimension, for ``is_batched``, and its axis."""
        # One that enters, if there is any: it is split over the mesh as the mapped dimension is.
        for _, array, axis in self.entering:
            if axis is not None and isinstance(array, (jax.Array, np.ndarray)):
                return array, axis
        return np.arange(self.size), 0

    def _run_element(
        self, values: list[Leaf], plain: list[Leaf], batched_array: Leaf
    ) -> tuple[list[Leaf], ...]:
        """Runs the function on one batch element; returns what leaves, by axis."""

        def leave(context: RunContext) -> tuple[list[Leaf], ...]:
            effects = self.record(context)
            return self.group_by_axis(effects, self._settle_shared(effects.leaving, batched_array))

        positional, named = self.plain_tree.unflatten(plain)
        return self.call.run(values, positional, named, leave, graphdef=self.slice_graphdef)

    def _settle_shared(
        self, leaving: Sequence[LeavingValue], batched_array: Leaf
    ) -> list[LeavingValue]:
        """Returns what leaves; refuses shared values that differ between batch elements."""
        shared_values = [item.value for item in leaving if item.entry is None]
        batched = iter(is_batched(batched_array, shared_values))

        settled = []
        for item in leaving:
            if item.entry is None and next(batched):
                if item.source == "result":
                    raise errors.shared_result_differs(item.path)
                if item.source == "written":
                    raise self._shared_variable_differs(item)
                item = item._replace(entry=0)  # attached: one value per batch element
            settled.append(item)
        return settled

    def _shared_variable_differs(self, item: LeavingValue) -> Exception:
        position = self.assignment.leaf_paths.index(item.path)
        variable = self.call.graph.flat.leaves[position]
        is_in_arguments = id(variable) in self.assignment.by_id
        return errors.shared_variable_differs(item.path, variable, is_in_arguments)


def is_batched(batched_array: Leaf, values: Sequence[PyTree]) -> list[bool]:
    """Returns, inside ``vmap``, whether each value is batched.

    Args:
        batched_array: Any array that is batched.
        values: The values in question.
    """
    # JAX tells the batching rule of a function which operands are batched. It asks the rule only if
    # one of them is, hence the array.
    if not values:
        return []
    are_batched = [False] * len(values)

    @jax.custom_batching.custom_vmap
    def observe(batched_array: jax.Array, values: list[PyTree]) -> jax.Array:
        return batched_array

    @observe.def_vmap
    def rule(
        axis_size: int, batched: PyTree, batched_array: jax.Array, values: list[PyTree]
    ) -> tuple[jax.Array, bool]:
        _, batched_values = batched
        are_batched[:] = [any(jax.tree.leaves(value)) for value in batched_values]
        return batched_array, True

    observe(batched_array, list(values))
    return are_batched
