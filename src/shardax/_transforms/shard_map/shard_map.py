# SPDX-License-Identifier: Apache-2.0
"""``shard_map``: a function over Modules, run on each shard of a mesh.

A run is one *shard*: it sees its part of what a spec splits, and the whole of what no spec splits.
Runs talk to each other by collectives (``jax.lax.psum`` and the like). JAX keeps track of the mesh
axes over which a value *varies*, that is, over which its shards may differ. What a write to a
Variable does depends on its spec in ``in_specs``:

- A spec that names mesh axes: the written shards are put together by the spec.
- ``P()``, or a mesh axis that the spec does not name: all shards along it have one value, so a
  written value that varies over it raises ``TransformError`` (``_ShardMapCall._leave``). With
  ``check_vma=False`` JAX keeps no track, and nobody checks.
- No spec, because it was reached through a closure or a global: it becomes a hidden input that all
  shards see whole (``jax.shard_map`` cannot take all arrays through a closure), and a write raises
  ``ForeignMutationError`` (``SealedFrame``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import varying_axes
from shardax._core.frames import is_eager, resolve
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.init.lazy import Init
from shardax._core.variable import Variable
from shardax._transforms.jit import eager
from shardax._transforms.lift import engine
from shardax._transforms.lift.entries import EntryAssignment
from shardax._transforms.lift.frames import (
    SealedFrame,
    objects_at_places,
    request_placement,
    stands_for,
)
from shardax._transforms.lift.placement import place_variables
from shardax._transforms.lift.transformed import decorator, wraps
from shardax._transforms.mapped.call import LeavingValue, MappedCall
from shardax._transforms.shard_map import errors
from shardax._transforms.shard_map.region import AnyMesh, ManualRegion, find_region
from shardax._transforms.shard_map.specs import (
    WHOLE,
    assign,
    axes_of,
    canonical,
    spec_per_array,
    specs_in,
)

_CAPTURED_WRITE = (
    "so all shards would write the one Variable. Pass the Module that holds it as an argument, "
    "with its spec in in_specs."
)


@decorator
def shard_map(
    function: Callable[..., PyTree] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: Iterable[str] = frozenset(),
    check_vma: bool = True,
) -> Any:
    """Makes a function over Modules run on each shard of a mesh.

    Arrays and Variables enter by their specs, each run seeing its shard. What is written into a
    Variable is stored back by the spec of that Variable. A random stream whose spec names mesh axes
    is split, so that shards along these axes draw different numbers; under ``P()`` all draw the
    same ones. What a method is bound to, and what a function takes from a closure, is whole in
    every shard, and what it captured cannot be written.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        mesh: The mesh, its axes Auto or Explicit; None for the one in scope (``jax.set_mesh``).
        in_specs: One entry for all arguments, a tuple of one per positional parameter, or a dict
            with one for each argument by its parameter's name. In a tuple, an argument given by
            name has the entry of its position; one that can be given by name alone has none, and is
            whole in every shard. An entry is a
            ``PartitionSpec`` (None is ``P()``), for a Module also a State of specs, such as
            ``sx.partition_specs(model)``, or a ``StateSharding``; for a container the same
            container with entries. Variables in the arguments move to their shards and stay there.
        out_specs: A prefix of the result, likewise.
        axis_names: The mesh axes to split over; the others are left to the compiler. Empty: all.
        check_vma: As in ``jax.shard_map``: whether JAX keeps track of what varies. Without it,
            nobody checks that what a spec does not split is equal in all shards.

    Returns:
        A function of the same arguments.

    Raises:
        PrefixError: If an entry is no spec. When called, if specs do not fit the arguments, or name
            axes that the mesh does not have.
        NoMeshError: When called, if there is no mesh.
        TransformError: When called, if the mesh is not the one in scope, or lacks an axis; when
            called, if an array has no such dimension, or one that cannot be divided; when called,
            if a Variable gets two different specs; when called, if shards give different values for
            one place.
        ForeignMutationError: When called, if a captured Variable is written.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> seen = sx.BatchStat(jnp.zeros(()))
        >>> def centre(seen, x):
        ...     seen[...] = jax.lax.pmean(x.mean(), "data")
        ...     return x - seen
        >>> specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        >>> centred = sx.shard_map(centre, mesh=mesh, **specs)
        >>> centred(seen, jnp.arange(4.0)).tolist(), float(seen)
        ([-1.5, -0.5, 0.5, 1.5], 1.5)
    """
    assert function is not None  # ``decorator`` makes a decorator without it
    if isinstance(axis_names, str):
        raise errors.axis_names_is_text(axis_names)
    in_specs, out_specs = canonical(in_specs, "in_specs"), canonical(out_specs, "out_specs")
    options = (mesh, in_specs, out_specs, frozenset(axis_names), check_vma)

    @wraps(function)
    def sharded(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return eager.run(_shard_map, (function,), options, args, kwargs)

    return sharded


def _shard_map(
    functions: Sequence[Callable[..., PyTree]],
    options: Sequence[Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    mesh, in_specs, out_specs, axis_names, check_vma = options
    region = find_region(mesh, axis_names)
    region.check_specs(specs_in(in_specs), "in_specs")
    region.check_specs(specs_in(out_specs), "out_specs")
    assigned = assign(functions[0], in_specs, args, kwargs)
    make_frame = functools.partial(_ShardFrame, functions=functions, reason=_CAPTURED_WRITE)

    def attempt(captured: list[Variable]) -> PyTree:
        call = engine.LiftedCall(
            "shard_map", functions, assigned.args, assigned.kwargs, make_frame, captured
        )
        assignment = EntryAssignment(call, *assigned, WHOLE, "in_specs")
        _materialize_in_shards(region, assignment)
        entries = [*specs_in((in_specs, out_specs)), WHOLE]
        sharded_call = _ShardMapCall(region, assignment, out_specs, entries)
        return sharded_call.run(axis_names=axis_names, check_vma=check_vma)

    return engine.retry_captured(attempt)


class _ShardFrame(SealedFrame):
    """A frame in which captured Variables must be inputs."""

    __slots__ = ()

    def capture(self, outer: Variable) -> PyTree:
        """Asks for the Variable as an input, with those of its type in the same object."""
        # They are likely to be captured next, and every request traces the function again.
        by_id = {id(outer): outer}
        for _, flat in objects_at_places(self.functions):
            if not any(v is outer or stands_for(outer, v) for v in flat.leaves):
                continue
            alike = [resolve(v, self.parent) for v in flat.leaves if type(v) is type(outer)]
            by_id.update((id(variable), variable) for variable in alike)
        raise engine.RetraceRequest(list(by_id.values()))


def _materialize_in_shards(region: ManualRegion, assignment: EntryAssignment) -> None:
    """Computes lazy values in the arguments straight into their shards."""
    if not isinstance(region.mesh, Mesh) or not is_eager():
        return

    variables: list[Variable] = []
    shardings: list[NamedSharding] = []
    graph = assignment.call.graph
    for original, variable, path, spec in zip(
        graph.flat.leaves, graph.leaves, assignment.leaf_paths, assignment.leaves, strict=True
    ):
        if id(original) in assignment.by_id and isinstance(variable._value, Init):
            region.check_shape(path, variable._value.shape, spec, "in_specs")
            variables.append(variable)
            shardings.append(NamedSharding(region.mesh, spec))

    place_variables(variables, shardings)


class _ArrayWithSpec(NamedTuple):
    """An array that enters a call, with its spec."""

    path: Path
    array: Leaf
    spec: PartitionSpec


class _ShardMapCall(MappedCall):
    """One call of a function made by ``shard_map``."""

    out_name = "out_specs"
    shared_entry = WHOLE

    def __init__(
        self,
        region: ManualRegion,
        assignment: EntryAssignment,
        out_specs: PyTree,
        entries: Iterable[PartitionSpec],
    ) -> None:
        super().__init__(assignment, out_specs, entries)
        self.region = region

    def is_mapped(self, entry: PyTree) -> bool:
        """See ``MappedCall.is_mapped``."""
        return isinstance(entry, PartitionSpec) and bool(axes_of(entry))

    def run(self, **options: Any) -> PyTree:
        """Runs all shards; stores what they wrote, and returns the result of the call."""
        drawn_keys = self.streams.draw(self.values)
        entering, _ = self._entering(drawn_keys)
        for path, array, spec in entering:
            self.region.check(path, array, spec, "in_specs")

        self._move_variables()
        entering, treedef = self._entering(drawn_keys)
        arrays = [self.region.move(array, spec) for _, array, spec in entering]

        sharded = jax.shard_map(
            functools.partial(self._run_shard, treedef),
            mesh=self.region.mesh,
            in_specs=([spec for _, _, spec in entering],),
            out_specs=tuple(self.entries),
            **options,
        )
        if self.region.is_inner:  # JAX does not run one shard_map in another without compiling
            sharded = jax.jit(sharded)
        return self.apply(sharded(arrays))

    def _move_variables(self) -> None:
        """Moves Variables in the arguments to their shards, where they stay."""
        mesh = self.region.mesh
        if not isinstance(mesh, Mesh):
            return

        sharding_of: dict[int, NamedSharding] = {}
        for position, original in enumerate(self.call.graph.flat.leaves):
            spec = self.assignment.leaves[position]
            is_declared = id(original) in self.assignment.by_id and isinstance(spec, PartitionSpec)
            if is_declared and position not in self.streams and self._may_be_moved(original, mesh):
                sharding_of[position] = NamedSharding(mesh, spec)

        variables = [self.call.graph.leaves[position] for position in sharding_of]
        shardings = list(sharding_of.values())
        if not is_eager():  # the compiled function around this call has them moved
            request_placement(variables, shardings)
            return
        place_variables(variables, shardings)
        for position, variable in zip(sharding_of, variables, strict=True):
            self.values[position] = variable._value
        self.call.graph.read = list(self.values)

    def _may_be_moved(self, variable: Variable, mesh: Mesh) -> bool:
        """Whether the spec alone says where a Variable is to be."""
        if len(self.region.axes) == len(mesh.axis_names):
            return True
        # On this mesh, the other mesh axes lay it out, too.
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(variable._value)]
        return all(getattr(sharding, "mesh", None) != mesh for sharding in shardings)

    def _entering(
        self, drawn_keys: Mapping[int, Leaf]
    ) -> tuple[list[_ArrayWithSpec], jax.tree_util.PyTreeDef]:
        """Returns the arrays that enter, and the tree of values and plain arguments they make."""
        assignment = self.assignment
        entering: list[_ArrayWithSpec] = []
        values = list(self.values)
        for position, path in enumerate(assignment.leaf_paths):
            entry = assignment.leaves[position]
            if position in self.streams:  # each shard makes a key of its own of the drawn one
                values[position] = drawn_keys.get(position, jnp.zeros((), jnp.uint32))
                entry = WHOLE
            value = values[position]
            specs = spec_per_array(entry, value, path, "in_specs")
            for array, spec in zip(jax.tree.leaves(value), specs, strict=True):
                entering.append(_ArrayWithSpec(path, array, spec))

        plain = (list(self.call.arguments.plain), self.call.arguments.plain_named)
        entering += map(
            _ArrayWithSpec, assignment.plain_paths, jax.tree.leaves(plain), assignment.plain
        )
        return entering, jax.tree.structure((values, plain))

    def _run_shard(
        self, treedef: jax.tree_util.PyTreeDef, arrays: list[Leaf]
    ) -> tuple[list[Leaf], ...]:
        """Runs the function on one shard; returns what leaves, by spec."""
        values, (positional, named) = treedef.unflatten(arrays)
        for stream in self.streams.streams:
            shard = jax.lax.axis_index(axes_of(self.assignment.leaves[stream.key]))
            values[stream.key] = jax.random.fold_in(values[stream.key], shard)
        return self.call.run(values, positional, named, self._leave)

    def _leave(self, context: engine.RunContext) -> tuple[list[Leaf], ...]:
        """Returns what leaves a shard; refuses what varies over axes that its spec lacks."""
        effects = self.record(context)
        entries: list[PartitionSpec] = []
        for item in effects.leaving:
            specs = spec_per_array(item.entry, item.value, item.path, "in_specs or out_specs")
            for array, spec in zip(jax.tree.leaves(item.value), specs, strict=True):
                self._check_leaving(item, array, spec)
            entries += specs
        return self.group(effects, entries)

    def _check_leaving(self, item: LeavingValue, array: Leaf, spec: PartitionSpec) -> None:
        """Raises unless the shards of an array make one array by a spec."""
        if len(spec) > jnp.ndim(array):
            description = f"new {item.new_type}" if item.new_type else item.source
            raise errors.leaving_value_has_too_few_dimensions(
                description, item.path, jnp.shape(array), spec
            )

        unnamed = varying_axes(array) - set(axes_of(spec))
        axes = [axis for axis in self.region.axes if axis in unnamed]
        if axes:
            raise self._shards_differ(item, spec, axes)

    def _shards_differ(
        self, item: LeavingValue, spec: PartitionSpec, axes: Sequence[str]
    ) -> Exception:
        if item.new_type == "RngState":
            return errors.new_stream_differs(item.path, axes)
        if item.new_type:
            return errors.new_variable_differs(item.new_type, item.path, spec, axes)
        if item.source == "result":
            return errors.result_differs(item.path, spec, axes)
        position = self.assignment.leaf_paths.index(item.path)
        type_name = type(self.call.graph.leaves[position]).__name__
        return errors.written_variable_differs(type_name, item.path, spec, axes)
