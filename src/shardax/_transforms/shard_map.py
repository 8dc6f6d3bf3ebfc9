# SPDX-License-Identifier: Apache-2.0
"""``shard_map``: a function over Modules, run on each shard of a mesh.

Every run sees its own *shard* of what a spec splits, and the whole of what no spec splits; runs
talk to each other by collectives (``jax.lax.psum`` and the like). A Variable has one spec, by which
it is taken apart and put together again. JAX keeps track of the mesh axes over which a value
*varies*, that is, over which its shards may differ; where a spec does not name such an axis, there
would be several values for one place, which is refused.

A Variable that the function captured becomes a hidden input that all shards see whole, because
``jax.shard_map`` cannot take all arrays through a closure.

A *region* is a mesh and the mesh axes that become *manual* in one call: all of them unless
``axis_names`` says otherwise. Specs are kept in one form (``canonical``), so that ``P("data")`` and
``P("data", None)`` are one entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.errors import ModuleError
from shardax._core.frames import is_eager, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.init.lazy import Init, compute_all
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.jit import eager
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import engine
from shardax._transforms.lift import prefix as prefixes
from shardax._transforms.lift.captures import objects_in, places_of
from shardax._transforms.vmap.axes import LeavingValue, MappedCall

AnyMesh = Mesh | AbstractMesh

# The spec of an array that every shard sees whole.
WHOLE = PartitionSpec()


def canonical(prefix: object, name: str) -> Any:
    """Returns a prefix with every spec in its one form."""

    def convert(leaf: object):
        if leaf is None:
            return WHOLE
        if isinstance(leaf, prefixes.FilterMapping) and not isinstance(leaf, prefixes.StateAxes):
            return type(leaf)([(item, canonical(value, name)) for item, value in leaf.items()])
        if not isinstance(leaf, PartitionSpec):
            raise errors.PrefixError(
                f"{name} gives {leaf!r}; an entry is a PartitionSpec (None for P()), for a Module "
                "also a State of specs (sx.partition_specs(model)) or sx.StateSharding."
            )
        if PartitionSpec.UNCONSTRAINED in tuple(leaf):
            raise errors.PrefixError(
                f"{name} gives {leaf}; inside sx.shard_map every dimension is split over mesh axes "
                "or whole. To leave mesh axes to the compiler, use axis_names=..."
            )
        return _without_end(leaf)

    return jax.tree.map(convert, prefix, is_leaf=lambda item: item is None)


def _without_end(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    if len(entries) == len(tuple(spec)):
        return spec
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def specs_in(prefix: object) -> list[PartitionSpec]:
    """Returns the specs that a canonical prefix can give."""
    return jax.tree.leaves(prefixes.entries_in(prefix))


def dimension_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension."""
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all mesh axes that a spec names."""
    return tuple(axis for axes in dimension_axes(spec) for axis in axes)


def spread(entry: object, value: object, path: Path, name: str) -> list[PartitionSpec]:
    """Returns one spec per array of a value."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(entry, value))
    except ValueError as error:
        raise errors.PrefixError(
            f"{name} does not fit the value at {format_path(path)}: it has {entry} where the value "
            f"is {jax.tree.structure(value)}. Give one spec for the whole value."
        ) from error


def assign(
    function: Callable[..., PyTree],
    specs: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> prefixes.AssignedPrefixes:
    """Finds the entry of every argument, by position or name."""
    by_name = prefixes.assign_by_name(function, specs, args, kwargs, "in_specs")
    if by_name is not None:
        return by_name
    positional = inputs.positional_names(function)
    args, kwargs = inputs.by_position(function, args, kwargs)
    if not isinstance(specs, (tuple, list)):
        named = dict.fromkeys(kwargs, specs)
        return prefixes.AssignedPrefixes(args, kwargs, [specs] * len(args), named)
    by_position = dict(zip(positional, specs, strict=False))
    without_entry = [name for name in kwargs if name in positional and name not in by_position]
    too_many = len(specs) > max(len(positional), len(args))
    if len(args) > len(specs) or too_many or without_entry:
        labels = [inputs.parameter_name(function, position) for position in range(len(args))]
        raise misfit(len(specs), [*labels, *kwargs], positional)

    # What can be given by name alone has no place in the entries: it is whole, as in Flax NNX.
    named = {name: by_position.get(name, WHOLE) for name in kwargs}
    return prefixes.AssignedPrefixes(args, kwargs, list(specs[: len(args)]), named)


def misfit(count: int, given: Sequence[str], positional: Sequence[str]) -> errors.PrefixError:
    """Returns the error of entries that are not one per positional parameter.

    Args:
        count: The number of entries.
        given: The arguments of the call, by parameter.
        positional: The parameters that may be given by position.
    """
    entries = "1 entry" if count == 1 else f"{count} entries"
    takes = ", ".join(positional) or "no parameter by position"
    example = ", ".join(f"{name!r}: jax.P()" for name in given)
    return errors.PrefixError(
        f"in_specs has {entries}, but the function takes {takes}, and the call gives "
        f"{', '.join(given) or 'nothing'}. Give one entry for everything, or one per parameter "
        f"that may be given by position; what can be given by name alone is then whole in every "
        f"shard. Or name them all: in_specs={{{example}}}."
    )


class ManualRegion(NamedTuple):
    """Where one call runs."""

    mesh: AnyMesh  # the mesh; without devices where JAX hides them
    axes: tuple[str, ...]  # the mesh axes that become manual, in the order of the mesh

    @property
    def is_inner(self) -> bool:
        """Whether this is inside another ``shard_map``, over other axes."""
        return AxisType.Manual in self.mesh.axis_types

    @property
    def types(self) -> dict[str, AxisType]:
        """The type of every mesh axis."""
        return dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))

    def check(self, path: Path, leaf: object, spec: PartitionSpec, name: str) -> None:
        """Checks that an array can be taken apart by a spec."""
        where = format_path(path)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ModuleError(
                f"The value at {where} is abstract ({leaf.dtype}{list(leaf.shape)}): a shape "
                "without numbers. Give the model numbers first, sx.update(model, state), or "
                "restore a checkpoint into it; or look at shapes only with sx.eval_shape."
            )
        if not isinstance(leaf, engine.ARRAY_OR_NUMBER):
            raise errors.TransformError(
                f"The argument of sx.shard_map at {where} is {leaf!r} of type "
                f"{type(leaf).__name__}, which is neither an array nor a Module. Bind it by "
                "functools.partial, or keep it as configuration of a Module."
            )
        self.check_shape(path, np.shape(leaf), spec, name)

    def check_shape(
        self, path: Path, shape: tuple[int, ...], spec: PartitionSpec, name: str
    ) -> None:
        """Checks that a spec can split arrays of a shape."""
        where, parts = format_path(path), dimension_axes(spec)
        if len(parts) > len(shape):
            raise errors.TransformError(
                f"{name} gives {spec} for the array at {where}, which has shape {shape} and so no "
                f"dimension {len(parts) - 1}. Give it P() if all shards see it whole."
            )
        for dimension, axes in enumerate(parts):
            count = math.prod(self.mesh.shape[axis] for axis in axes)
            if shape[dimension] % count:
                sizes = " and ".join(f"{axis!r} of size {self.mesh.shape[axis]}" for axis in axes)
                raise errors.TransformError(
                    f"{name} gives {spec} for the array at {where}, but its dimension {dimension} "
                    f"of shape {shape} cannot be divided over the mesh axis {sizes}. Pad it to a "
                    f"multiple of {count}, or give another spec."
                )

    def place(self, leaf: Leaf, spec: PartitionSpec) -> Leaf:
        """Returns an array where ``jax.shard_map`` can take it apart."""
        # JAX refuses arrays that are committed to other devices than the mesh's, and over Explicit
        # axes those that are not laid out by their spec already; newer versions also where other
        # axes are left to the compiler.
        kinds = self.types
        typed = all(kinds[axis] is AxisType.Explicit for axis in self.axes)
        if isinstance(leaf, Tracer):
            if not typed:
                return leaf
            target = self._with_others(spec, jax.typeof(leaf).sharding, leaf.shape)
            return jax.sharding.reshard(leaf, NamedSharding(self.mesh, target))
        if not isinstance(self.mesh, Mesh):
            return leaf
        now = getattr(leaf, "sharding", None)
        target = NamedSharding(self.mesh, self._with_others(spec, now, np.shape(leaf)))
        if isinstance(leaf, jax.Array):
            same_mesh = isinstance(now, NamedSharding) and now.mesh == self.mesh
            if now == target or (same_mesh and not typed):
                return leaf
        return jax.device_put(leaf, target)

    def _with_others(self, spec: PartitionSpec, now: object, shape: Sequence[int]) -> PartitionSpec:
        """Returns a spec with the other mesh axes of a layout."""
        if not isinstance(now, NamedSharding) or now.mesh.axis_names != self.mesh.axis_names:
            return spec
        parts = [*dimension_axes(spec), *[()] * len(shape)]
        for dimension, axes in enumerate(dimension_axes(now.spec)):
            both = (*parts[dimension], *(axis for axis in axes if axis not in self.axes))
            if shape[dimension] % math.prod(self.mesh.shape[axis] for axis in both) == 0:
                parts[dimension] = both
        return _without_end(PartitionSpec(*(axes or None for axes in parts)))


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def find_region(mesh: AnyMesh | None, axis_names: Iterable[str]) -> ManualRegion:
    """Returns the region of a call."""
    scope_mesh = jax.sharding.get_abstract_mesh()
    if mesh is None:
        if scope_mesh.empty:
            raise errors.NoMeshError(
                "sx.shard_map needs a mesh, but none was given and none is in scope: "
                "sx.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs), or "
                "with jax.set_mesh(mesh): ..."
            )
        region_mesh = _with_devices(scope_mesh)
    elif not isinstance(mesh, (Mesh, AbstractMesh)) or mesh.empty:
        raise errors.TransformError(
            f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh with axes. Make one, for "
            "instance jax.make_mesh((8,), ('data',)), or pass None to use the mesh in scope."
        )
    elif scope_mesh.empty or _abstract(mesh) == scope_mesh:
        region_mesh = mesh
    elif dict(scope_mesh.shape) == dict(mesh.shape) and AxisType.Manual in scope_mesh.axis_types:
        region_mesh = scope_mesh  # the same mesh, seen from inside the shard_map around this call
    else:
        raise errors.TransformError(
            f"sx.shard_map was given {mesh}, which differs from the mesh in scope here, "
            f"{scope_mesh}. Pass the same mesh, or none to take the one in scope."
        )
    pairs = list(zip(region_mesh.axis_names, region_mesh.axis_types, strict=True))
    free = [axis for axis, kind in pairs if kind is not AxisType.Manual]
    chosen_names = frozenset(axis_names)
    if not chosen_names <= set(free):
        raise errors.TransformError(
            f"axis_names={sorted(chosen_names)} is not a part of the mesh axes {free} that can "
            "become manual here."
        )
    return ManualRegion(
        region_mesh, tuple(axis for axis in free if not chosen_names or axis in chosen_names)
    )


def _with_devices(scope_mesh: AbstractMesh) -> AnyMesh:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to name devices while it traces
        return scope_mesh
    # Inside shard_map the abstract mesh says more.
    return mesh if isinstance(mesh, Mesh) and mesh.abstract_mesh == scope_mesh else scope_mesh


def check_axes(region: ManualRegion, specs: Iterable[PartitionSpec], name: str) -> None:
    """Checks that specs name manual axes of a region, each once."""
    for spec in specs:
        named = axes_of(spec)
        unknown = [axis for axis in named if axis not in region.axes]
        if unknown:
            raise errors.PrefixError(
                f"{name} gives {spec}, but the mesh axes to split over here are "
                f"{list(region.axes)} of {region.mesh}."
            )
        if len(set(named)) < len(named):
            raise errors.PrefixError(f"{name} gives {spec}, which names a mesh axis twice.")


_REASON = (
    "so all shards would write the one Variable. Pass the Module that holds it as an argument, "
    "with its spec in in_specs."
)


@engine.decorator
def shard_map(
    function: Any = None,
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
    if isinstance(axis_names, str):
        raise errors.PrefixError(
            f"axis_names={axis_names!r} is one string; give a set: {{{axis_names!r}}}."
        )
    in_specs, out_specs = canonical(in_specs, "in_specs"), canonical(out_specs, "out_specs")
    axis_names = frozenset(axis_names)

    options = (mesh, in_specs, out_specs, axis_names, check_vma)

    @engine.wraps(function)
    def sharded(*args, **kwargs) -> Any:
        return eager.run(_shard_map, (function,), options, args, kwargs)

    return sharded


def _shard_map(
    functions: Sequence[Any],
    options: tuple[Any, ...],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
):
    mesh, in_specs, out_specs, axis_names, check_vma = options
    region = find_region(mesh, axis_names)
    check_axes(region, specs_in(in_specs), "in_specs")
    check_axes(region, specs_in(out_specs), "out_specs")
    assigned = assign(functions[0], in_specs, args, kwargs)

    def attempt(captured: list[Variable]):
        call = _ShardMapCall(functions[0], (in_specs, out_specs), region, assigned, captured)
        return call.run({"axis_names": axis_names, "check_vma": check_vma})

    return engine.retry_captured(attempt)


class _ShardFrame(engine.SealedFrame):
    """A frame in which captured Variables must be inputs."""

    __slots__ = ()

    def capture(self, outer):
        """Asks for the Variable as an input, and for its likely followers."""
        by_id = {id(outer): outer}
        for place in (place for f in self.functions for place in places_of(f)):
            for item in objects_in(place.read()):
                leaves = flatten(item).leaves
                if any(leaf is outer or engine.stands_for(outer, leaf) for leaf in leaves):
                    alike = [resolve(v, self.parent) for v in leaves if type(v) is type(outer)]
                    by_id.update((id(variable), variable) for variable in alike)
        raise engine.RetraceRequest(list(by_id.values()))


class _ShardMapCall(MappedCall):
    """One call of a function made by ``shard_map``."""

    def __init__(
        self,
        function: Callable[..., PyTree],
        specs: tuple[PyTree, PyTree],
        region: ManualRegion,
        assigned: prefixes.AssignedPrefixes,
        captured: Sequence[Variable],
    ) -> None:
        make_frame = functools.partial(_ShardFrame, functions=[function], reason=_REASON)
        self.region = region
        call = engine.LiftedCall(
            "shard_map", [function], assigned.args, assigned.kwargs, make_frame, captured
        )
        assignment = prefixes.EntryAssignment(
            call,
            assigned.args,
            assigned.kwargs,
            assigned.prefixes,
            assigned.named,
            WHOLE,
            "in_specs",
        )
        self._materialise(assignment)
        entries = [*specs_in(specs), WHOLE]
        super().__init__(assignment, (specs[1], "out_specs", WHOLE), entries, self._splits)

    def _splits(self, position: int) -> bool:
        entry = self.assignment.leaves[position]
        return isinstance(entry, PartitionSpec) and bool(axes_of(entry))

    def _materialise(self, assignment: prefixes.EntryAssignment) -> None:
        """Computes lazy values in the arguments straight into their shards."""
        mesh = self.region.mesh
        if not (isinstance(mesh, Mesh) and is_eager()):
            return
        rows = [
            (path, variable, entry)
            for path, leaf, variable, entry in zip(
                assignment.leaf_paths,
                assignment.call.graph.flat.leaves,
                assignment.call.graph.leaves,
                assignment.leaves,
                strict=True,
            )
            if id(leaf) in assignment.by_id and isinstance(variable._value, Init)
        ]
        for path, variable, spec in rows:
            self.region.check_shape(path, variable._value.shape, spec, "in_specs")
        places = [NamedSharding(mesh, spec) for _, _, spec in rows]
        arrays = compute_all([variable._value for _, variable, _ in rows], places)
        for (_, variable, _), array in zip(rows, arrays, strict=True):
            variable._value = array

    def run(self, options: dict[str, Any]) -> PyTree:
        """Runs all shards and carries back what they did."""
        entering_arrays, specs, treedef = self._entering()
        mapped = jax.shard_map(
            functools.partial(self._pure, treedef),
            mesh=self.region.mesh,
            in_specs=(specs,),
            out_specs=tuple(self.entries),
            **options,
        )
        if self.region.is_inner:  # JAX does not run one shard_map in another without compiling
            mapped = jax.jit(mapped)
        return self.apply(mapped(entering_arrays))

    def _entering(self) -> tuple[list[Any], list[PartitionSpec], Any]:
        """Returns the arrays that enter, their specs, and the treedef."""
        drawn = self.streams.draw(self.values)
        for path, leaf, spec in self._rows(drawn)[0]:
            self.region.check(path, leaf, spec, "in_specs")
        self._settle()
        rows, treedef = self._rows(drawn)
        placed = [self.region.place(leaf, spec) for _, leaf, spec in rows]
        return placed, [spec for _, _, spec in rows], treedef

    def _settle(self) -> None:
        """Moves Variables in the arguments to their shards, where they stay."""
        mesh, assignment = self.region.mesh, self.assignment
        if not isinstance(mesh, Mesh):
            return
        whole = len(self.region.axes) == len(mesh.axis_names)  # else others lay it out, too
        sharding_by_position: dict[int, NamedSharding] = {}
        for position, (leaf, spec) in enumerate(
            zip(self.call.graph.flat.leaves, assignment.leaves, strict=True)
        ):
            on_mesh = any(
                getattr(getattr(item, "sharding", None), "mesh", None) == mesh
                for item in jax.tree.leaves(leaf._value)
            )
            declared = id(leaf) in assignment.by_id and isinstance(spec, PartitionSpec)
            if declared and position not in self.streams and (whole or not on_mesh):
                sharding_by_position[position] = NamedSharding(mesh, spec)
        leaves = [self.call.graph.leaves[position] for position in sharding_by_position]
        if not is_eager():  # the compiled function around this call has them moved
            engine.request_placement(leaves, [*sharding_by_position.values()])
            return
        prefixes.place_variables(leaves, [*sharding_by_position.values()])
        for position, variable in zip(sharding_by_position, leaves, strict=True):
            self.values[position] = variable._value
        self.call.graph.read = list(self.values)

    def _rows(
        self, drawn: Mapping[int, object]
    ) -> tuple[list[tuple[Path, Any, PartitionSpec]], Any]:
        """Returns (path, array, spec) of all that enters, and the treedef."""
        arguments, assignment = self.call.arguments, self.assignment
        plain = (list(arguments.plain), arguments.plain_named)
        rows: list[tuple[Path, Any, PartitionSpec]] = []
        values = list(self.values)
        for position, (path, entry) in enumerate(
            zip(assignment.leaf_paths, assignment.leaves, strict=True)
        ):
            if position in self.streams:
                values[position] = drawn.get(position, jnp.zeros((), jnp.uint32))
                entry = WHOLE
            value = values[position]
            leaves = jax.tree.leaves(value)
            specs = spread(entry, value, path, "in_specs")
            rows += [(path, leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        rows += zip(assignment.plain_paths, jax.tree.leaves(plain), assignment.plain, strict=True)
        return rows, jax.tree.structure((values, plain))

    def _pure(self, treedef, entering_arrays: list[Leaf]) -> tuple[list[PyTree], ...]:
        values, (positional, named) = treedef.unflatten(entering_arrays)
        for stream in self.streams.streams:
            shard = jax.lax.axis_index(axes_of(self.assignment.leaves[stream.key]))
            values[stream.key] = jax.random.fold_in(values[stream.key], shard)
        return self.call.run(values, positional, named, self._leave)

    def _leave(self, context: engine.RunContext) -> tuple[list[PyTree], ...]:
        """Groups what leaves a shard by spec."""
        outputs, leaving, sown = self.record(context)
        entries: list[PartitionSpec] = []
        for item in leaving:
            specs = spread(item.entry, item.value, item.path, "in_specs or out_specs")
            for leaf, spec in zip(jax.tree.leaves(item.value), specs, strict=True):
                self._check_leaving(item, leaf, spec)
            entries += specs
        return self.group(outputs, sown, entries)

    def _check_leaving(self, item: LeavingValue, leaf, spec: PartitionSpec) -> None:
        """Checks that shards can be put together to one array."""
        if len(spec) > jnp.ndim(leaf):
            described = f"new {item.new}" if item.new else item.kind
            raise errors.TransformError(
                f"sx.shard_map puts the {described} value at {format_path(item.path)} together by "
                f"{spec}, but in each shard it has shape {jnp.shape(leaf)} and so no dimension "
                f"{len(spec) - 1}. Add one, x[None], or reduce it and give P()."
            )
        varying = _jax.varying_axes(leaf) & set(self.region.axes) - set(axes_of(spec))
        if varying:
            self._refuse(item, spec, [axis for axis in self.region.axes if axis in varying])

    def _refuse(self, item: LeavingValue, spec: PartitionSpec, axes: list[str]) -> NoReturn:
        over = ", ".join(map(repr, axes))
        named = axes[0] if len(axes) == 1 else tuple(axes)
        reduced = f"jax.lax.pmean(x, {named!r})"
        where, name = format_path(item.path), item.new
        if item.kind == "result" and not name:
            raise errors.TransformError(
                f"out_specs of sx.shard_map gives {spec} for the value at {where}, but it differs "
                f"between shards over the mesh axes {over}. Reduce it, {reduced} or psum, or name "
                "these axes in out_specs."
            )
        if name:
            place = f"at {where}" if item.path else "attached to what the function is bound to"
            if name == "RngState":
                raise errors.TransformError(
                    f"The new RngState {place} is of a stream that in_specs splits, so it differs "
                    f"between shards over the mesh axes {over}, and a new object has one. Give the "
                    "Rngs that it keeps the spec P() in in_specs, sx.StateSharding([(sx.RngState, "
                    "P()), (..., spec)]), or make the object outside."
                )
            raise errors.TransformError(
                f"The new {name} {place} has the spec {spec} (that of the Module it was attached "
                "to, or of its place in the result), but differs between shards over the mesh "
                f"axes {over}. Reduce it, {reduced}, or give its type a spec in the entry of that "
                f"Module: sx.StateSharding([({name}, P({named!r})), (..., P())])."
            )
        position = self.assignment.leaf_paths.index(item.path)
        raise errors.TransformError(
            f"The {type(self.call.graph.leaves[position]).__name__} at {where} has the spec {spec} "
            "in in_specs, but was written with a value that differs between shards over the mesh "
            f"axes {over}. Write an equal one, {reduced} or psum, or name these axes in its spec."
        )
