# SPDX-License-Identifier: Apache-2.0
"""Search space and candidates: the layouts that a search times, of which it compiles few.

A *group* is names that get the same mesh axes; a *fixed* name is one whose axes are not searched.
Names of *activations*, on constraints and on the batch, are groups of their own. Whole stay names
of dimensions that a loop takes one element at a time; names summed over in a product of two
computed arrays, if every argument with them also has a batch dimension of that product (the size of
a head, beside the heads); and names on no product and on less than a hundredth of the arguments.
The others are tied as far as no two of them are on one argument: they are the inner dimensions of
blocks that follow each other (heads, hidden layer, vocabulary). A tied name whose size the axes do
not divide stays whole while the others are split.

Of all assignments of mesh axes to groups, over all meshes, a candidate

- can be: sizes divide, and no array uses a mesh axis twice but by priority;
- is the first of its equivalents, which have the same specs up to names, order and merging of mesh
  axes: with the fewest axes, used in the order of priority of names (the batch outermost);
- is the first of those that only store arguments by another dimension. Where a mesh axis splits a
  *free* name (on no parameter, but on nearly every product, once: the batch), an argument that is
  split by it too is gathered before use, and of which dimension it was hardly matters;
- repeats little work: at most 1.05 times what devices do in the best candidate;
- has arguments that fit into the memory. Those that fail the last two are kept, with the reason.

Mesh axes of three names are for a *form* of parallelism. ``"stage"`` splits the dimension that the
loop over layers takes apart, which makes it a pipeline, and beside that only names that no array of
that loop has (the vocabulary), as they are used outside of it; ``"context"`` splits ``"seq"``; and
``"expert"`` splits ``"expert"`` and the batch. A candidate then has variants by *settings*: of
``sx.parallel``, and of where the optimizer's state is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardax import Rules
from shardax.extend import TreeInventory, axis_names_in, did_you_mean, mesh_axes_of
from shardax.plan.errors import PlanInputError
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.searching.dimensions import DimensionModel

_SMALL_SHARE = 0.01  # of all elements: smaller arguments do not decide whether a name is searched
_SLICE_AXIS = "slice"  # the mesh axis whose positions are slices, where a search makes the meshes
_MOST_REPEATED = 1.05  # how much more work than in the best candidate devices may do

FORMS = {"stage": None, "context": "seq", "expert": "expert"}  # and the names that they split
SETTINGS = ("microbatches", "schedule", "context", "zero", "optimizer_memory")
_PER_STAGE = (1, 2, 4)  # microbatches of a stage, where none are given

Meshes = tuple[tuple[tuple[str, int], ...], ...]


@dataclass(frozen=True)
class SearchSpace:
    """Groups of names and meshes varied by a search."""

    groups: tuple[tuple[str, ...], ...]  # names that get the same mesh axes, in order of priority
    fixed: tuple[tuple[str, Any], ...]  # names whose axes are not searched, with these
    meshes: Meshes
    activations: tuple[str, ...]  # names on constraints and on the batch
    staged: tuple[str, ...]  # names of the dimensions that stages split
    notes: tuple[str, ...]  # why names are fixed or tied that nobody fixed or tied


def search_space(
    dimensions: DimensionModel,
    meshes: Meshes,
    *,
    activations: Iterable[str] = (),
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, object] | None = None,
) -> SearchSpace:
    """Sorts the names of a step into groups and fixed ones."""
    fix, ties = dict(fix or {}), [tuple(group) for group in tie or ()]
    _check_names(dimensions, ties, fix, meshes)
    fixed = dict(Rules(fix).pairs)
    notes = []
    forms = _names_of_forms(dimensions, meshes)
    fixed = {name: axis for axis, names in forms.items() for name in names} | fixed
    tied = [name for group in ties for name in group]
    on_constraints = (name for _, names in dimensions.constraints for name in axis_names_in(names))
    named = list(dict.fromkeys((*activations, *on_constraints)))
    for name, why in _kept_whole(dimensions, named):
        if name not in fixed and name not in tied:
            fixed[name] = None
            notes.append(f"{name} stays whole: {why}")
    free = [name for name in dimensions.names if name not in fixed and name not in tied]
    alone = [name for name in free if name in named]
    inner = [name for name in free if name not in alone]
    tied_groups = _tied(dimensions, inner) if tie is None else [(name,) for name in inner]
    notes += [f"tied: {', '.join(group)}" for group in tied_groups if len(group) > 1]
    groups = [*((name,) for name in alone), *ties, *tied_groups]
    order = {name: at for at, name in enumerate(dict.fromkeys((*named, *dimensions.names)))}
    groups.sort(key=lambda group: (group[0] not in alone, min(order[name] for name in group)))
    return SearchSpace(
        tuple(groups),
        tuple(fixed.items()),
        meshes,
        tuple(named),
        tuple(forms.get("stage", ())),
        tuple(notes),
    )


def _names_of_forms(dimensions: DimensionModel, meshes: Meshes) -> dict[str, list[str]]:
    """Returns the names split by the mesh axis of each form."""
    names_by_axis: dict[str, list[str]] = {}
    stored = {name for _, names in dimensions.arguments for name in axis_names_in(names)}
    for axis in dict.fromkeys(axis for mesh in meshes for axis, _ in mesh):
        if axis not in FORMS:
            continue
        required = FORMS[axis]
        names = [required] if required else sorted(dimensions.looped & stored)
        if not names or not set(names) <= set(dimensions.names):
            requirement = (
                f"a dimension called {required!r}"
                if required
                else "a loop over layers, whose parameters have a named first dimension (nn.Stack; "
                "a decoder with scan_layers=True)"
            )
            raise PlanInputError(
                f"The mesh axis {axis!r} needs {requirement}, and the step has none. Its names are "
                f"{', '.join(map(repr, dimensions.names))}. Give it, or leave the axis out of "
                "mesh_axes or meshes."
            )
        names_by_axis[axis] = names
    return names_by_axis


def _decided_twice(ties: Sequence[Sequence[str]], fix: Mapping[str, object]) -> list[str]:
    """Returns names in several ties, or in a tie and fixed."""
    tied = [name for group in ties for name in group]
    return sorted({name for name in tied if tied.count(name) > 1 or name in fix})


def _check_names(
    dimensions: DimensionModel,
    ties: Sequence[Sequence[str]],
    fix: Mapping[str, object],
    meshes: Meshes,
) -> None:
    step_names = dimensions.names
    for name in [*(name for group in ties for name in group), *fix]:
        if name not in step_names:
            raise PlanInputError(
                f"There is no axis name {name!r} in the step's arguments and constraints, which "
                f"have {', '.join(map(repr, step_names))}.{did_you_mean(name, step_names)}"
            )
    twice = _decided_twice(ties, fix)
    if twice:
        raise PlanInputError(
            f"{', '.join(map(repr, twice))}: tied twice, or tied and fixed. Give each name once, "
            'as in tie=[("heads", "kv_heads", "mlp")], fix={"layers": None}.'
        )
    axes = {axis for mesh in meshes for axis, _ in mesh}
    for name, target in Rules(fix).pairs:
        for axis in mesh_axes_of(target):
            if axis not in axes:
                raise PlanInputError(
                    f"fix={{{name!r}: {target!r}}} names the mesh axis {axis!r}, but the meshes "
                    f"have {', '.join(map(repr, sorted(axes)))}.{did_you_mean(axis, axes)}"
                )


def _kept_whole(
    dimensions: DimensionModel, activations: Sequence[str]
) -> Iterable[tuple[str, str]]:
    """Names kept whole, with the reason."""
    batch_names = _batch_beside(dimensions)
    total = sum(math.prod(shape) for shape, _ in dimensions.arguments) or 1
    multiplied = {n for product in dimensions.products for dim in product.dims for n in dim.names}
    for name in dimensions.names:
        if name in dimensions.looped:
            yield name, "a loop takes it one element at a time"
            continue
        if name in activations:
            continue
        arrays = [(shape, set(axis_names_in(n))) for shape, n in dimensions.arguments]
        having = [(shape, names) for shape, names in arrays if name in names]
        batch_axes = batch_names.get(name, frozenset())
        if having and batch_axes and all(names & batch_axes for _, names in having):
            yield name, f"{' or '.join(sorted(batch_axes))} beside it can be split without a sum"
        elif (
            name not in multiplied
            and sum(math.prod(shape) for shape, _ in having) < _SMALL_SHARE * total
        ):
            yield name, "it is on no matrix product, and on little else"


def _batch_beside(dimensions: DimensionModel) -> dict[str, frozenset[str]]:
    """Batch dimensions of products of computed arrays, by summed name."""
    batch_names: dict[str, frozenset[str]] = {}
    for product in dimensions.products:
        batch = {n for dim in product.dims if dim.role == "batch" for n in dim.names}
        for dim in product.dims if product.computed and batch else ():
            if dim.role == "sum":
                for name in dim.names:
                    batch_names[name] = batch_names.get(name, frozenset()) | batch - dim.names
    return batch_names


def _tied(dimensions: DimensionModel, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Ties names never together on one argument."""
    arrays = [set(axis_names_in(names)) for _, names in dimensions.arguments]
    groups: list[list[str]] = []
    for name in names:
        for group in groups:
            if not any(name in array and array & set(group) for array in arrays):
                group.append(name)
                break
        else:
            groups.append([name])
    return [tuple(group) for group in groups]


def mesh_shapes(devices: int, axes: Sequence[str], slices: int = 1) -> Meshes:
    """Returns all meshes of some axes, the first axis largest first."""
    # Of several slices the first axis is that of slices, named "slice" unless ``axes`` begin so.
    names = tuple(axes)
    if isinstance(axes, str) or not names or len(set(names)) < len(names):
        raise PlanInputError(
            f"mesh_axes={axes!r} are not names of mesh axes; give each one once, as in "
            'mesh_axes=("data", "model").'
        )
    if slices > 1:
        inner = names[1:] if names[0] == _SLICE_AXIS else names
        inner_shapes = mesh_shapes(devices // slices, inner) if inner else ((),)
        return tuple(((_SLICE_AXIS, slices), *mesh) for mesh in inner_shapes)
    if len(names) == 1:
        return (((names[0], devices),),)
    sizes = [size for size in range(devices, 0, -1) if devices % size == 0]
    return tuple(
        ((names[0], size), *mesh)
        for size in sizes
        for mesh in mesh_shapes(devices // size, names[1:])
    )


class LayoutCandidate(NamedTuple):
    """A layout, with the mesh axes of all arrays."""

    layout: Layout
    entries: tuple[tuple[Any, ...], ...]
    # Of equals the least is kept: with fewer axes, used in the order of priority of names.
    order: tuple[int, ...]


def _keep_first(
    first_by_key: dict[Any, LayoutCandidate], key: object, candidate: LayoutCandidate
) -> None:
    if key not in first_by_key or candidate.order < first_by_key[key].order:
        first_by_key[key] = candidate


def _equivalence_key(candidate: LayoutCandidate):
    """A key, equal for equivalent candidates."""
    sizes = {axis: size for axis, size in candidate.layout.mesh if size > 1}
    entries = [mesh_axes_of(target) for of_array in candidate.entries for target in of_array]
    distinct = dict.fromkeys(entries)  # far fewer than there are dimensions

    def together(axis: str, next_axis: str) -> bool:
        return all((axis in axes) == (next_axis in axes) for axes in distinct)

    used = {axis for axes in distinct for axis in axes}
    tokens: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in sizes if axis in used}
    idle = tuple(sorted(size for axis, size in sizes.items() if axis not in used))
    for axis, next_axis in itertools.pairwise([axis for axis in sizes if axis in used]):
        if _SLICE_AXIS not in (axis, next_axis) and together(axis, next_axis):
            tokens[next_axis] = (*tokens.pop(axis), next_axis)
    merged = {axes[-1]: math.prod(sizes[a] for a in axes) for axes in tokens.values()}
    forms = []
    for order in itertools.permutations(merged):
        number = {axis: position for position, axis in enumerate(order)}
        numbers = {axes: tuple(sorted(number[a] for a in axes if a in merged)) for axes in distinct}
        numbered = tuple([numbers[axes] for axes in entries])
        forms.append((tuple((merged[a], a == _SLICE_AXIS) for a in order), numbered))
    return idle, min(forms)


def _free_names(dimensions: DimensionModel, inputs: Inputs) -> frozenset[str]:
    """Names on no parameter, but on (nearly) every product, once."""
    total = dimensions.flops
    free: set[str] = set()
    stored = set(_names_of(inputs, "parameters", "optimizer"))
    for name in (name for name in dimensions.names if name not in stored):
        on = [[d for d in p.dims if name in d.names] for p in dimensions.products]
        covered = sum(p.flops for p, d in zip(dimensions.products, on, strict=True) if d)
        if total and covered >= 0.99 * total and all(len(d) <= 1 for d in on):
            free.add(name)
    return frozenset(free)


def _storage_key(
    candidate: LayoutCandidate,
    arrays: Sequence[tuple[tuple[int, ...], tuple[Any, ...]]],
    large: Sequence[bool],
    free: frozenset[str],
):
    """A key, equal for candidates with equal computation."""
    axes_of = {name: mesh_axes_of(target) for name, target in candidate.layout.rules}
    of_free = {axis for name in free for axis in axes_of.get(name, ())}
    names = tuple((n, tuple(a for a in axes if a not in of_free)) for n, axes in axes_of.items())
    free_axes = tuple((name, axes_of[name]) for name in sorted(free) if name in axes_of)
    arguments = candidate.entries[len(arrays) - len(large) :]
    stored = tuple(
        frozenset(axis for target in spec for axis in mesh_axes_of(target) if axis in of_free)
        for spec, counts in zip(arguments, large, strict=True)
        if counts
    )
    return candidate.layout.mesh, names, free_axes, stored


def names_of_batch(inputs: Inputs) -> Iterable[str]:
    """Names on arguments of the kind ``"batch"``."""
    return _names_of(inputs, "batch")


def names_of_parameters(inputs: Inputs) -> Iterable[str]:
    """Names on parameters."""
    return _names_of(inputs, "parameters")


def _names_of(inputs: Inputs, *kinds: str) -> Iterable[str]:
    for leaf, kind in zip(TreeInventory(inputs.tree).leaves, inputs.kinds, strict=True):
        if kind in kinds:
            for info in leaf.arrays:
                yield from axis_names_in(leaf.names_of(info) or ())


@dataclass(frozen=True)
class Candidates:
    """The layouts to time, and the rejected ones."""

    layouts: tuple[Layout, ...]  # in order of meshes and names
    repeating: tuple[LayoutReport, ...]  # rejected because they repeat work
    too_large: tuple[LayoutReport, ...]  # rejected because their arguments do not fit
    tried: int  # assignments
    distinct: int  # of them, those possible and not equivalent
    argument_bytes: tuple[Mapping[str, int], ...] = ()  # of a device by kind, for each layout

    @property
    def rejected(self) -> tuple[LayoutReport, ...]:
        """Reports of the rejected layouts."""
        return (*self.repeating, *self.too_large)


def find_candidates(
    dimensions: DimensionModel,
    space: SearchSpace,
    inputs: Inputs,
    limit_bytes: int | None,
    settings: Mapping[str, Sequence[object]] | None = None,
    *,
    keeps_near: bool = False,
) -> Candidates:
    """Enumerates a search space, without candidates not worth compiling."""
    # With ``settings``, candidates are layouts under each of them. With ``keeps_near``, of two
    # equivalents the one counts whose shards are on near devices, as between nodes it is faster.
    arrays = tuple(dict.fromkeys((*dimensions.constraints, *dimensions.arguments)))
    elements = [math.prod(shape) for shape, _ in dimensions.arguments]
    large = [count > _SMALL_SHARE * sum(elements) for count in elements]
    free = _free_names(dimensions, inputs)
    first_by_key: dict[Any, LayoutCandidate] = {}
    tried = 0
    for candidate in _enumerate(dimensions, space, arrays, free, keeps_near=keeps_near):
        tried += 1
        if candidate is not None:
            _keep_first(first_by_key, _equivalence_key(candidate), candidate)
    by_storage: dict[Any, LayoutCandidate] = {}
    for candidate in first_by_key.values():
        _keep_first(by_storage, _storage_key(candidate, arrays, large, free), candidate)
    distinct = sorted(
        by_storage.values(), key=lambda a: (space.meshes.index(a.layout.mesh), a.order)
    )
    layouts, repeating = _without_repeated_work(
        [candidate.layout for candidate in distinct], dimensions
    )
    variants: dict[Layout, list[Layout]] = {
        layout: [layout]
        if settings is None
        else with_settings(layout, dimensions, space, inputs, settings)
        for layout in layouts
    }
    fitting, too_large = _within_memory(variants, inputs, limit_bytes)
    return Candidates(
        tuple(fitting),
        tuple(repeating),
        tuple(too_large),
        tried,
        len(distinct),
        tuple(fitting.values()),
    )


def _enumerate(
    dimensions: DimensionModel,
    space: SearchSpace,
    arrays: Sequence[tuple[tuple[int, ...], tuple[Any, ...]]],
    free: frozenset[str],
    *,
    keeps_near: bool,
) -> Iterator[LayoutCandidate | None]:
    """Yields every assignment, or None for an impossible one."""
    sizes_of = {name: dimensions.sizes_of(name) for name in dimensions.names}
    searched = [name for group in space.groups for name in group]
    names = [*searched, *(name for name in dimensions.names if name not in searched)]
    work: Counter[str] = Counter()
    for product in dimensions.products:
        for name in {name for dim in product.dims for name in dim.names}:
            work[name] += int(product.flops)
    leads = [max(group, key=lambda n: (work[n], -group.index(n))) for group in space.groups]
    has_stages = any(axis == "stage" for mesh in space.meshes for axis, _ in mesh)
    outside = _outside(dimensions, space) if has_stages else []
    for mesh in space.meshes:
        sizes = dict(mesh)
        places = {axis: position for position, axis in enumerate(sizes)}
        text = "x".join(map(str, sizes.values()))
        choices = [_targets(mesh, inner_only=not set(group) & free) for group in space.groups]
        for chosen in itertools.product(*choices):
            rules = dict(space.fixed)
            whole = False
            for group, target in zip(space.groups, chosen, strict=True):
                ways = math.prod(sizes[axis] for axis in mesh_axes_of(target))
                split = [n for n in group if all(size % ways == 0 for size in sizes_of[n])]
                whole |= not split
                rules.update({name: target if name in split else None for name in group})
            for name in outside if sizes.get("stage", 1) > 1 else ():
                rules[name] = _with_axis(rules[name], "stage", sizes, sizes_of[name])
            if sizes.get("expert", 1) > 1:
                for name in free:
                    rules[name] = _with_axis(rules[name], "expert", sizes, sizes_of[name])
            pairs = tuple((name, rules[name]) for name in names)
            entries = tuple(Rules(pairs).assign(dims).entries for _, dims in arrays)
            if whole or not all(
                size % math.prod(sizes.get(axis, 1) for axis in mesh_axes_of(target)) == 0
                for (shape, _), spec in zip(arrays, entries, strict=True)
                for size, target in zip(shape, spec, strict=True)
            ):
                yield None
                continue
            axes = [mesh_axes_of(target) for target in chosen]
            parts = [f"{lead}={'+'.join(of)}" for lead, of in zip(leads, axes, strict=True) if of]
            name = f"{' '.join(parts) or 'replicated'} ({text})"
            first = [places[of[0]] if of else len(places) for of in axes]

            if keeps_near:
                _prefer_inner(first, space.groups, axes, places, free)
            order = (sum(map(len, axes)), *first)
            yield LayoutCandidate(Layout(name, pairs, mesh), entries, order)


def _prefer_inner(
    first: list[int],
    groups: Sequence[Sequence[str]],
    axes: Sequence[Sequence[str]],
    places: Mapping[str, int],
    free: frozenset[str],
) -> None:
    """Prefers the inner of the batch's axes for parameters that a part of them splits."""
    # Such parameters are gathered along that part and their gradients summed along the others
    # (HSDP), of which gathering is more.
    is_free = [bool(set(group) & free) for group in groups]
    of_batch = {
        axis for of, free_group in zip(axes, is_free, strict=True) if free_group for axis in of
    }
    for number, (of, free_group) in enumerate(zip(axes, is_free, strict=True)):
        if of and not free_group and set(of) < of_batch:
            first[number] = -places[of[-1]]


def _targets(mesh: tuple[tuple[str, int], ...], inner_only: bool) -> list[Any]:
    """None, each mesh axis, and all combinations in order."""
    axes = [
        axis
        for axis, size in mesh
        if size > 1 and axis not in FORMS and not (inner_only and axis == _SLICE_AXIS)
    ]
    counts = range(2, len(axes) + 1)
    several = [chosen for count in counts for chosen in itertools.combinations(axes, count)]
    return [None, *axes, *several]


def _with_axis(target: Any, axis: str, sizes: Mapping[str, int], lengths: Sequence[int]) -> Any:
    """The mesh axes of a name with one more, or None."""
    axes = (*mesh_axes_of(target), axis)
    ways = math.prod(sizes[axis] for axis in axes)
    if sizes[axis] == 1 or any(length % ways for length in lengths):
        return target
    return axes if len(axes) > 1 else axis


def _outside(dimensions: DimensionModel, space: SearchSpace) -> list[str]:
    """Names of parameters outside of stages, such as the vocabulary."""
    arrays = [set(axis_names_in(names)) for _, names in dimensions.arguments]
    staged = [names for names in arrays if names & set(space.staged)]
    inside = {name for names in staged for name in names}
    searched = {name for group in space.groups for name in group}
    stored = {name for names in arrays for name in names if names - set(space.activations)}
    return sorted((stored & searched) - inside - set(space.activations))


def _without_repeated_work(
    layouts: Sequence[Layout], dimensions: DimensionModel
) -> tuple[list[Layout], list[LayoutReport]]:
    factors = [dimensions.replicated_compute(layout.as_rules, layout.sizes) for layout in layouts]
    best = min(factors, default=1.0)
    layouts_kept: list[Layout] = []
    rejected: list[LayoutReport] = []
    for layout, factor in zip(layouts, factors, strict=True):
        if factor <= _MOST_REPEATED * best * (1 + 1e-9):
            layouts_kept.append(layout)
            continue
        reason = (
            f"the devices would do each operation at least {factor:.2f} times, and "
            f"{best:.2f} times in the best candidates"
        )
        rejected.append(LayoutReport(layout, "rejected", reason))
    return layouts_kept, rejected


def _within_memory(
    variants: Mapping[Layout, Sequence[Layout]], inputs: Inputs, limit_bytes: int | None
) -> tuple[dict[Layout, Mapping[str, int]], list[LayoutReport]]:
    """Returns argument bytes of fitting variants, and layouts without any."""
    fitting: dict[Layout, Mapping[str, int]] = {}
    rejected: list[LayoutReport] = []
    for layout, with_layout in variants.items():
        placed = inputs.place(layout, with_args=False)
        if placed.errors:
            rejected.append(LayoutReport(layout, "rejected", "\n".join(placed.errors)))
            continue
        by_variant = {
            variant: _of_optimizer_rules(variant, placed.argument_bytes) for variant in with_layout
        }
        totals = {variant: sum(sizes.values()) for variant, sizes in by_variant.items()}
        limit = math.inf if limit_bytes is None else limit_bytes
        fitting |= {
            variant: sizes for variant, sizes in by_variant.items() if totals[variant] <= limit
        }
        if totals and min(totals.values()) > limit:
            least = min(totals.values())
            report = LayoutReport(
                layout,
                "rejected",
                f"the arguments alone need {least:,} bytes of a device, which has {limit_bytes:,}",
                argument_bytes=placed.argument_bytes,
                limit_bytes=limit_bytes,
                replicated=placed.replicated,
            )
            rejected.append(report)
    return fitting, rejected


def _of_optimizer_rules(layout: Layout, argument_bytes: Mapping[str, int]) -> dict[str, int]:
    """Returns argument bytes of a device, by the optimizer's rules."""
    axes = {axis for _, target in layout.optimizer_rules for axis in mesh_axes_of(target)}
    shards = math.prod(layout.sizes[axis] for axis in axes)
    optimizer = argument_bytes.get("optimizer", 0)
    kept = 0 if layout.optimizer_memory else optimizer // shards
    return {**argument_bytes, "optimizer": kept} if optimizer else dict(argument_bytes)


def with_settings(
    layout: Layout,
    dimensions: DimensionModel,
    space: SearchSpace,
    inputs: Inputs,
    settings: Mapping[str, Sequence[Any]],
) -> list[Layout]:
    """Returns a layout under all settings to compare."""
    sizes, axes_of = layout.sizes, {name: mesh_axes_of(axes) for name, axes in layout.rules}
    choices: dict[str, Sequence[Any]] = {}
    stages = sizes.get("stage", 1) if space.staged else 1
    if stages > 1:
        rows = _batch_rows(inputs, axes_of, sizes)
        counts = settings.get("microbatches", [stages * times for times in _PER_STAGE])
        choices["microbatches"] = [n for n in counts if rows % n == 0]
        rounds = min(dimensions.sizes_of(space.staged[0]), default=stages) // stages
        choices["schedule"] = settings.get("schedule", ["gpipe", "circular"] if rounds > 1 else [])
    if sizes.get("context", 1) > 1:
        choices["context"] = settings.get("context", ["all-gather", "ring-zigzag"])
    zero_rules = _zero_rules(layout, dimensions, inputs, space)
    zero = (zero_rules if level else () for level in settings.get("zero", []))
    choices["zero"] = list(dict.fromkeys(zero))
    choices["optimizer_memory"] = [kind or "" for kind in settings.get("optimizer_memory", [])]
    if stages > 1 and not choices["microbatches"]:
        return []  # a pipeline needs rows to cut
    choices = {name: values for name, values in choices.items() if values}
    variants = []
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        zero_rules = chosen.pop("zero", ())
        memory = chosen.pop("optimizer_memory", "")
        parts = [f"{name}:{value}" for name, value in chosen.items()]
        parts += ["zero:1"] * bool(zero_rules) + [f"optimizer:{memory}"] * bool(memory)
        variants.append(
            dataclasses.replace(
                layout,
                name=" ".join([layout.name, *parts]),
                parallel=tuple(chosen.items()),
                optimizer_rules=zero_rules,
                optimizer_memory=memory,
            )
        )
    return variants


def _batch_rows(
    inputs: Inputs, axes_of: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> int:
    """Returns the number of rows of the batch of a device."""
    rows = 0
    for leaf, kind in zip(TreeInventory(inputs.tree).leaves, inputs.kinds, strict=True):
        names = leaf.axes if kind == "batch" else None
        if names and names[0] in inputs.batch_names:
            ways = math.prod(sizes.get(axis, 1) for axis in axes_of.get(names[0], ()))
            rows = math.gcd(rows, leaf.arrays[0].shape[0] // ways)
    return rows


def _zero_rules(
    layout: Layout, dimensions: DimensionModel, inputs: Inputs, space: SearchSpace
) -> tuple[tuple[str, Any], ...]:
    """Rules of the optimizer's state along axes of the batch alone."""
    axes_of = {name: mesh_axes_of(axes) for name, axes in layout.rules}
    stored = dict.fromkeys(_names_of(inputs, "parameters"))
    used = {axis for name in stored for axis in axes_of.get(name, ())}
    batch = [name for name in axes_of if name in inputs.batch_names]
    free = tuple(axis for name in batch for axis in axes_of[name] if axis not in used)
    searched = [name for group in space.groups for name in group if name in stored]
    order = dict.fromkeys((*searched, *(name for name in stored if name not in dimensions.looped)))
    ways = math.prod(layout.sizes[axis] for axis in free)
    whole = [
        name
        for name in order
        if not axes_of.get(name) and all(size % ways == 0 for size in dimensions.sizes_of(name))
    ]
    if not free:
        return ()
    (first, *more) = free
    return tuple((name, free if more else first) for name in whole)
