# SPDX-License-Identifier: Apache-2.0
"""Work of one device in a layout, from a traced step.

A product is split along the mesh axes of its dimensions, each axis once, in the order of the rules.
An operand that an axis splits which another dimension of the product has is gathered. What is
summed over split dimensions is reduced, and scattered where a dimension of the result has the axis.
An argument that a loop's body uses several times is gathered once. In a pipeline weights of layers
are gathered, and their gradients summed, for each microbatch.

Traffic of the memory beside products is that of the results between them, of which compilers fuse
most operations, and of the arguments that are read and written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax._parallel.pipeline import bubble_share
from shardax.extend import axis_names_in, mesh_axes_of
from shardax.hlo import MatrixProduct
from shardax.plan.hardware.targets import Target
from shardax.plan.records import Layout
from shardax.plan.searching.dimensions import DimensionModel, Product, ProductDimension
from shardax.plan.timing.workload import ExpectedTime, Transfer, Workload, expected_time, role_of
from shardax.plan.timing.workload import group_stride as stride_of

_PASSES = 2.5  # of the memory over a product's result, until the next product reads it
_STATE_PASSES = 2.0  # over an argument: read and written
_GRADIENT_PASSES = 3.0  # over gradients: written, and read for their norm and the update
# Which of left operand, right operand and result have a dimension, by its role.
_OPERANDS: dict[str, tuple[int, ...]] = {
    "batch": (0, 1, 2),
    "left": (0, 2),
    "right": (1, 2),
    "sum": (0, 1),
    "rows": (0, 2),
    "terms": (0, 1),
    "group": (1,),
    "sums": (2,),
}
_GROUPS = ("group", "sums")


def traced_time(
    layout: Layout,
    dimensions: DimensionModel,
    target: Target,
    *,
    batch_names: frozenset[str],
    argument_bytes: Mapping[str, int],
    figures: Mapping[str, float] | None = None,
    splits: Splits | None = None,
) -> ExpectedTime:
    """Returns the expected seconds of a traced step in a layout."""
    # ``splits`` keeps the products of equal rules, for layouts that differ in settings alone.
    work = traced_workload(
        layout, dimensions, batch_names, argument_bytes, kind=target.hardware.kind, splits=splits
    )
    return expected_time(work, target.hardware, layout.sizes, slices=target.slices, figures=figures)


def traced_workload(
    layout: Layout,
    dimensions: DimensionModel,
    batch_names: frozenset[str],
    argument_bytes: Mapping[str, int],
    *,
    kind: str = "gpu",
    splits: Splits | None = None,
) -> Workload:
    """Returns the work of one device in a layout."""
    width = 4.0 if dimensions.dtype == "float32" else 2.0
    axes_of = {name: mesh_axes_of(axes) for name, axes in layout.rules}
    batch_axes = frozenset(axis for name in batch_names for axis in axes_of.get(name, ()))
    pipeline = _pipeline_of(layout, dimensions)
    products: list[MatrixProduct] = []
    transfers = list(_stage_transfers(pipeline, layout, dimensions, width))
    traffic = _STATE_PASSES * sum(argument_bytes.values())
    if argument_bytes.get("optimizer"):
        traffic += _GRADIENT_PASSES * argument_bytes.get("parameters", 0)
    if layout.optimizer_rules:  # each device updates its part of parameters, and gathers the others
        axes = {axis for _, target in layout.optimizer_rules for axis in mesh_axes_of(target)}
        size = math.prod(layout.sizes[axis] for axis in axes)
        stride = stride_of(layout.sizes, list(axes))
        payload = argument_bytes.get("parameters", 0)
        transfers.append(Transfer("all-gather", "parameters", payload, size, stride))
    splits = {} if splits is None else splits
    key = layout.rules, layout.mesh
    if key not in splits:
        splits[key] = [
            _ProductShards(product, layout, axes_of, batch_names) for product in dimensions.products
        ]
    for split in splits[key]:
        product = split.product
        is_staged = bool(product.loops & pipeline.names)
        busy = pipeline.stages * (1 - pipeline.bubble) if is_staged else 1.0
        parts = pipeline.microbatches if is_staged else 1
        local = split.matrices(dimensions.dtype, parts, product.runs / busy)
        if split.is_ragged:
            local, masked = split.ragged(local, kind)
            traffic += width * masked * local.runs
        products.append(local)
        traffic += _PASSES * width * local.rows * local.columns * local.batch * local.runs
        for transfer, names in split.transfers(width, batch_axes):
            of_weights = is_staged and bool(names) and names <= pipeline.weights
            times = (parts if of_weights else 1) / busy
            transfers.append(dataclasses.replace(transfer, runs=transfer.runs * times))
    return Workload(products, traffic, _combined(transfers))


_JOINED = {"parameters": 2, "gradients": 1}  # collectives of a layer: in each pass, and once


def _combined(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Joins collectives of parameters, and of gradients, that run together."""
    # The arrays of a layer are gathered at a time, as XLA combines them and ``plan.predict`` counts
    # them: each would start anew, which over thousands of nodes takes longer than its bytes.
    groups: dict[Transfer, list[Transfer]] = {}
    combined: list[Transfer] = []
    for transfer in transfers:
        if transfer.role in _JOINED and transfer.runs > 1:
            key = dataclasses.replace(transfer, payload=0.0, runs=0.0)
            groups.setdefault(key, []).append(transfer)
        else:
            combined.append(transfer)

    for key, of_group in groups.items():
        layers = min(transfer.runs for transfer in of_group)
        runs = min(layers * _JOINED[key.role], sum(transfer.runs for transfer in of_group))
        total = sum(transfer.payload * transfer.runs for transfer in of_group)
        combined.append(dataclasses.replace(key, payload=total / runs, runs=runs))
    return combined


class _ProductShards:
    """A product split over a mesh."""

    def __init__(
        self,
        product: Product,
        layout: Layout,
        axes_of: Mapping[str, Sequence[str]],
        batch_names: frozenset[str],
    ) -> None:
        self.product, self.sizes = product, layout.sizes
        place = {name: position for position, name in enumerate(axes_of)}

        def priority(dim: ProductDimension) -> int:
            return min((place.get(name, len(place)) for name in dim.names), default=len(place))

        arrays_of: dict[str, tuple[int, ...]] = {}  # of the dimension that has an axis
        self.local = dict.fromkeys(_OPERANDS, 1.0)  # sizes by role
        self.elements = [1.0, 1.0, 1.0]  # of operands and result, on one device
        self.names: list[set[str]] = [set(), set(), set()]
        self.lost: list[list[str]] = [[], [], []]  # axes that another dimension has
        self.summed: list[str] = []
        self.fewer_runs = 1.0
        self.group_ways = 1  # devices that rows are sent to, each with some of the groups
        self.group_axes: list[str] = []
        ordered = sorted(product.dims, key=lambda dim: (dim.role in _GROUPS, priority(dim)))
        for dim in ordered:
            axes_of_dim = (axis for name in dim.names for axis in axes_of.get(name, ()))
            axes = [axis for axis in dict.fromkeys(axes_of_dim) if self.sizes[axis] > 1]
            if dim.role in _GROUPS:
                self._split_groups(dim, axes, arrays_of)
                continue
            taken = [axis for axis in axes if axis not in arrays_of]
            ways = math.prod(self.sizes[axis] for axis in taken)
            size = dim.size / ways
            # Blocks are as large on a device as they are here, and a device has fewer.
            is_cut = product.in_blocks and dim.names <= batch_names
            self.fewer_runs *= ways if is_cut and dim.names else 1.0
            self.local[dim.role] *= dim.size if is_cut and dim.names else size
            for array in _OPERANDS[dim.role]:
                self.elements[array] *= size
                self.names[array] |= dim.names
                # An axis that another dimension of the same array has splits the array already.
                self.lost[array] += [
                    axis for axis in axes if array not in arrays_of.get(axis, (array,))
                ]
            if dim.role in ("sum", "terms"):
                self.summed += taken
            arrays_of.update(dict.fromkeys(taken, _OPERANDS[dim.role]))

    @property
    def is_ragged(self) -> bool:
        """Whether rows belong to groups."""
        return any(dim.role in _GROUPS for dim in self.product.dims)

    def _split_groups(
        self, dim: ProductDimension, axes: Sequence[str], arrays_of: dict[str, tuple[int, ...]]
    ) -> None:
        """Splits groups, and rows with them."""
        role = "rows" if dim.role == "group" else "terms"
        array = _OPERANDS[dim.role][0]
        taken = [a for a in axes if arrays_of.get(a, _OPERANDS[role]) == _OPERANDS[role]]
        for axis in taken:
            if axis not in arrays_of:  # what all devices of the groups have alike is cut
                arrays_of[axis] = _OPERANDS[role]
                self.local[role] /= self.sizes[axis]
                for side in _OPERANDS[role]:
                    self.elements[side] /= self.sizes[axis]
        self.summed = [axis for axis in self.summed if axis not in taken]
        ways = math.prod(self.sizes[axis] for axis in taken)
        self.group_ways *= ways
        self.group_axes += taken
        self.local[dim.role] *= dim.size / ways
        self.elements[array] *= dim.size / ways
        self.names[array] |= dim.names

    def ragged(self, local: MatrixProduct, kind: str) -> tuple[MatrixProduct, float]:
        """Returns a ragged product as compiled, and its masked elements."""
        # Compilers have room for the most rows that can come. XLA for GPU and CPU multiplies all of
        # them with the matrices of all groups, and masks the others' rows; that for TPU has a
        # grouped kernel for rows, and masks where groups are summed.
        is_sum = any(dim.role == "sums" for dim in self.product.dims)
        groups = self.local["sums" if is_sum else "group"]
        copies = self.product.copies
        room = self.group_ways * min(copies, groups) / copies
        if is_sum:
            depth = local.depth * room
            operations = 2.0 * local.rows * local.columns * depth
            masked = 0.0 if kind == "tpu" else 2 * groups * depth * (local.rows + local.columns)
            changes = {"depth": depth, "batch": local.batch * groups, "operations": operations}
        elif kind == "tpu":
            rows, masked = local.rows * room / groups, 0.0
            operations = 2.0 * rows * local.columns * local.depth
            changes = {"rows": rows, "batch": local.batch * groups, "operations": operations}
        else:
            rows, depth = local.rows * room, local.depth * groups
            masked = 2 * rows * depth
            operations = 2.0 * rows * local.columns * depth
            changes = {"rows": rows, "depth": depth, "operations": operations}
        operations = changes["operations"] * changes.get("batch", local.batch)
        return dataclasses.replace(local, **changes | {"operations": operations}), masked

    def matrices(self, dtype: str, parts: int, runs: float) -> MatrixProduct:
        """Returns the product of one device, its rows cut into parts."""
        rows, columns = self.local["left"] * self.local["rows"], self.local["right"]
        depth, batch = self.local["sum"] * self.local["terms"], self.local["batch"]
        # Of a gradient's product the sum goes over the rows of a batch.
        if self.product.computed and self.summed and parts > 1:
            depth /= parts
        else:
            rows /= parts
        operations = 2.0 * rows * columns * depth * batch
        runs *= parts / self.fewer_runs
        return MatrixProduct(operations, rows, columns, depth, batch, dtype, runs)

    def transfers(
        self, width: float, batch_axes: frozenset[str]
    ) -> Iterator[tuple[Transfer, set[str]]]:
        """Yields the transfers of operands and result, with names on the array."""
        for array in (0, 1):
            if lost := self.lost[array]:
                payload = width * self.elements[array]
                yield self._transfer("all-gather", lost, payload, array, batch_axes)
        scattered = [axis for axis in self.lost[2] if axis in self.summed]
        if scattered:
            payload = width * self.elements[2]
            yield self._transfer("reduce-scatter", scattered, payload, 2, batch_axes)
        for array, times in enumerate(self.product.exchanged if self.group_ways > 1 else ()):
            payload, axes = width * self.elements[array], self.group_axes
            sent, names = self._transfer("all-to-all", axes, payload, array, batch_axes)
            if times:  # there, and the results back
                yield dataclasses.replace(sent, runs=2 * times / self.fewer_runs), names
        if whole := [axis for axis in self.summed if axis not in scattered]:
            payload = width * self.elements[2] / math.prod(self.sizes[axis] for axis in scattered)
            yield self._transfer("all-reduce", whole, payload, 2, batch_axes)

    def _transfer(
        self, kind: str, axes: Sequence[str], payload: float, array: int, batch_axes: frozenset[str]
    ) -> tuple[Transfer, set[str]]:
        role = role_of(kind, axes, batch_axes)
        size = math.prod(self.sizes[axis] for axis in axes)
        stride = stride_of(self.sizes, axes)
        runs = self.product.changes[array] / self.fewer_runs
        return Transfer(kind, role, payload, size, stride, runs), self.names[array]


Splits = dict[tuple[Any, Any], list[_ProductShards]]  # by rules and mesh


@dataclass(frozen=True)
class _StagesOfLayout:
    """Stages of a layout."""

    names: frozenset[str] = frozenset()  # of the dimensions that its stages split
    weights: frozenset[str] = frozenset()  # names on the parameters of its layers
    stages: int = 1
    microbatches: int = 1
    rounds: int = 1
    bubble: float = 0.0


def _pipeline_of(layout: Layout, dimensions: DimensionModel) -> _StagesOfLayout:
    sizes, chosen = layout.sizes, dict(layout.parallel)
    stages = sizes.get("stage", 1)
    names = {name for name, axes in layout.rules if "stage" in mesh_axes_of(axes)}
    names &= dimensions.looped
    if stages == 1 or not names or "microbatches" not in chosen:
        return _StagesOfLayout()
    count, schedule = chosen["microbatches"], chosen.get("schedule", "gpipe")
    rounds = 1
    if schedule == "circular":
        rounds = min(size for name in names for size in dimensions.sizes_of(name)) // stages
    weights = {name for _, dim_names in _of_layers(dimensions, names) for name in dim_names}
    bubble = bubble_share(schedule, stages, count, rounds)
    return _StagesOfLayout(
        frozenset(names), frozenset(weights - names), stages, count, rounds, bubble
    )


def _of_layers(
    dimensions: DimensionModel, names: frozenset[str] | set[str]
) -> list[tuple[tuple[int, ...], list[str]]]:
    """Returns shapes and names of staged arguments."""
    pairs = [(shape, list(axis_names_in(entries))) for shape, entries in dimensions.arguments]
    return [(shape, dim_names) for shape, dim_names in pairs if names & set(dim_names)]


def _stage_transfers(
    pipeline: _StagesOfLayout, layout: Layout, dimensions: DimensionModel, width: float
) -> Iterator[Transfer]:
    """Yields transfers between stages: weights into rounds, and activations."""
    if pipeline.stages == 1:
        return
    sizes = layout.sizes
    axes_of = {name: mesh_axes_of(axes) for name, axes in layout.rules}
    stride = stride_of(sizes, ["stage"])

    def elements(shape: Sequence[int], names: Sequence[str]) -> float:
        axes = {axis for name in names for axis in axes_of.get(name, ())}
        return math.prod(shape) / math.prod(sizes[axis] for axis in axes)

    def send(payload: float, runs: float) -> Transfer:
        return Transfer("collective-permute", "stages", payload, pipeline.stages, stride, runs)

    if pipeline.rounds > 1:  # there, and gradients back
        of_layers = _of_layers(dimensions, pipeline.names)
        moved = sum(2 * elements(shape, names) for shape, names in of_layers)
        yield send(width * moved * (1 - 1 / pipeline.stages), 1)
    activations = [
        elements(shape, list(axis_names_in(names)))
        for shape, names in dimensions.constraints
        if not pipeline.names & set(axis_names_in(names))
    ]
    # Of the residual stream, which is the narrowest of what layers name; both ways.
    if activations:
        ticks = pipeline.microbatches * pipeline.rounds + pipeline.stages - 1
        yield send(width * min(activations) / pipeline.microbatches, 2 * ticks)
