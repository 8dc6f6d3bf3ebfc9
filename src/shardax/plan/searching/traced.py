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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardax._parallel.pipeline import bubble_share
from shardax.extend import axis_names_in, mesh_axes_of
from shardax.hlo import MatrixProduct
from shardax.plan.records import Layout
from shardax.plan.searching.dimensions import DimensionModel, Product, ProductDimension
from shardax.plan.timing.workload import Transfer, Workload, group_stride, role_of

_PASSES = 2.5  # of the memory over a product's result, until the next product reads it
_STATE_PASSES = 2.0  # over an argument: read and written
_GRADIENT_PASSES = 3.0  # over gradients: written, and read for their norm and the update
# Which of left operand, right operand and result have a dimension, by its role.
_LEFT, _RIGHT, _RESULT = 0, 1, 2
_ARRAYS: dict[str, tuple[int, ...]] = {
    "batch": (_LEFT, _RIGHT, _RESULT),
    "left": (_LEFT, _RESULT),
    "right": (_RIGHT, _RESULT),
    "sum": (_LEFT, _RIGHT),
    "rows": (_LEFT, _RESULT),
    "terms": (_LEFT, _RIGHT),
    "group": (_RIGHT,),
    "sums": (_RESULT,),
}
_GROUPS = ("group", "sums")
_COLLECTIVES_OF_LAYER = {"parameters": 2, "gradients": 1}  # in each pass, and once


def traced_workload(
    layout: Layout,
    dimensions: DimensionModel,
    batch_names: frozenset[str],
    argument_bytes: Mapping[str, int],
    *,
    kind: str = "gpu",
    sharded: Sequence[ShardedProduct] | None = None,
) -> Workload:
    """Returns the work of one device in a layout.

    ``sharded`` are the products of layouts with these rules and mesh, if they are known already.
    """
    if sharded is None:
        sharded = sharded_products(layout, dimensions, batch_names)
    width = _width(dimensions.dtype)
    pipeline = _StagesOfLayout.of(layout, dimensions)
    products: list[MatrixProduct] = []
    transfers = list(pipeline.transfers(layout, dimensions, width))

    # What the optimizer reads and writes.
    parameter_bytes = argument_bytes.get("parameters", 0)
    traffic = _STATE_PASSES * sum(argument_bytes.values())
    if argument_bytes.get("optimizer"):
        traffic += _GRADIENT_PASSES * parameter_bytes
    if layout.optimizer_rules:  # each device updates its part of parameters, and gathers the others
        axes = {axis for _, target in layout.optimizer_rules for axis in mesh_axes_of(target)}
        stride = group_stride(layout.sizes, list(axes))
        gather = Transfer("all-gather", "parameters", parameter_bytes, layout.ways(axes), stride)
        transfers.append(gather)

    weights = pipeline.weights
    for shards in sharded:
        product = shards.product
        is_staged = bool(product.loops & pipeline.names)
        busy = pipeline.stages * (1 - pipeline.bubble) if is_staged else 1.0
        parts = pipeline.microbatches if is_staged else 1
        local = shards.matrices(parts, product.runs / busy)
        if shards.is_ragged:
            local, masked = shards.ragged(local, kind)
            traffic += width * masked * local.runs
        products.append(local)
        traffic += _PASSES * width * local.rows * local.columns * local.batch * local.runs

        # Weights of a stage are gathered for each microbatch.
        for transfer, names in shards.transfers():
            is_of_weights = is_staged and bool(names) and names <= weights
            times = (parts if is_of_weights else 1) / busy
            transfers.append(dataclasses.replace(transfer, runs=transfer.runs * times))
    return Workload(products, traffic, _combined(transfers))


def _width(dtype: str) -> float:
    """Returns the bytes of an element of a product."""
    return 4.0 if dtype == "float32" else 2.0


def _combined(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Joins collectives of parameters, and of gradients, that run together."""
    # The arrays of a layer are gathered at a time, as XLA combines them and ``plan.predict`` counts
    # them: each would start anew, which over thousands of nodes takes longer than its bytes.
    groups: defaultdict[Transfer, list[Transfer]] = defaultdict(list)
    combined: list[Transfer] = []
    for transfer in transfers:
        if transfer.role in _COLLECTIVES_OF_LAYER and transfer.runs > 1:
            groups[dataclasses.replace(transfer, payload=0.0, runs=0.0)].append(transfer)
        else:
            combined.append(transfer)

    for group, members in groups.items():
        layers = min(transfer.runs for transfer in members)
        most = layers * _COLLECTIVES_OF_LAYER[group.role]
        runs = min(most, sum(transfer.runs for transfer in members))
        total = sum(transfer.payload * transfer.runs for transfer in members)
        combined.append(dataclasses.replace(group, payload=total / runs, runs=runs))
    return combined


# --- Products ---


def sharded_products(
    layout: Layout, dimensions: DimensionModel, batch_names: frozenset[str]
) -> list[ShardedProduct]:
    """Returns the products of a step, split as by a layout."""
    sizes, axes_of = layout.sizes, layout.axes_of
    return [
        ShardedProduct(product, dimensions.dtype, sizes, axes_of, batch_names)
        for product in dimensions.products
    ]


class ShardedProduct:
    """A product split over a mesh."""

    def __init__(
        self,
        product: Product,
        dtype: str,
        sizes: Mapping[str, int],
        axes_of: Mapping[str, Sequence[str]],
        batch_names: frozenset[str],
    ) -> None:
        self.product = product
        self._dtype = dtype
        self._sizes = sizes
        self._batch_names = batch_names
        self._batch_axes = frozenset(axis for name in batch_names for axis in axes_of.get(name, ()))

        # Of left operand, right operand and result, on one device.
        self._elements = [1.0, 1.0, 1.0]
        self._names: list[set[str]] = [set(), set(), set()]
        self._lost: list[list[str]] = [[], [], []]  # axes that another dimension has
        self._local = dict.fromkeys(_ARRAYS, 1.0)  # sizes by role
        self._arrays_of: dict[str, tuple[int, ...]] = {}  # of the dimension that has an axis
        self._summed: list[str] = []
        self._fewer_runs = 1.0
        self._group_ways = 1  # devices that rows are sent to, each with some of the groups
        self._group_axes: list[str] = []

        # Groups come last, as they share the axes of their rows.
        position = {name: index for index, name in enumerate(axes_of)}
        last = len(position)

        def priority(dim: ProductDimension) -> tuple[bool, int]:
            first = min((position.get(name, last) for name in dim.names), default=last)
            return dim.role in _GROUPS, first

        for dim in sorted(product.dims, key=priority):
            axes_of_dim = (axis for name in dim.names for axis in axes_of.get(name, ()))
            axes = [axis for axis in dict.fromkeys(axes_of_dim) if sizes.get(axis, 1) > 1]
            if dim.role in _GROUPS:
                self._split_groups(dim, axes)
            else:
                self._split(dim, axes)

    def _ways(self, axes: Sequence[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _split(self, dim: ProductDimension, axes: Sequence[str]) -> None:
        """Splits a dimension along those of its axes that no other has."""
        arrays = _ARRAYS[dim.role]
        taken = [axis for axis in axes if axis not in self._arrays_of]
        ways = self._ways(taken)
        size = dim.size / ways

        # Blocks are as large on a device as they are here, and a device has fewer.
        is_cut = self.product.in_blocks and bool(dim.names) and dim.names <= self._batch_names
        if is_cut:
            self._fewer_runs *= ways
        self._local[dim.role] *= dim.size if is_cut else size

        for array in arrays:
            self._elements[array] *= size
            self._names[array] |= dim.names
            # An axis that another dimension of the same array has splits the array already.
            self._lost[array] += [
                axis for axis in axes if array not in self._arrays_of.get(axis, (array,))
            ]
        if dim.role in ("sum", "terms"):
            self._summed += taken
        self._arrays_of.update(dict.fromkeys(taken, arrays))

    def _split_groups(self, dim: ProductDimension, axes: Sequence[str]) -> None:
        """Splits groups, and rows with them."""
        role = "rows" if dim.role == "group" else "terms"
        arrays_with_rows = _ARRAYS[role]
        taken = [
            axis for axis in axes if self._arrays_of.get(axis, arrays_with_rows) == arrays_with_rows
        ]
        for axis in taken:
            if axis not in self._arrays_of:  # what all devices of the groups have alike is cut
                self._arrays_of[axis] = arrays_with_rows
                self._local[role] /= self._sizes[axis]
                for array in arrays_with_rows:
                    self._elements[array] /= self._sizes[axis]
        self._summed = [axis for axis in self._summed if axis not in taken]

        ways = self._ways(taken)
        self._group_ways *= ways
        self._group_axes += taken
        (array,) = _ARRAYS[dim.role]
        self._local[dim.role] *= dim.size / ways
        self._elements[array] *= dim.size / ways
        self._names[array] |= dim.names

    @property
    def is_ragged(self) -> bool:
        """Whether rows belong to groups."""
        return any(dim.role in _GROUPS for dim in self.product.dims)

    def matrices(self, parts: int, runs: float) -> MatrixProduct:
        """Returns the product of one device, its rows cut into parts."""
        local = self._local
        rows, columns = local["left"] * local["rows"], local["right"]
        depth, batch = local["sum"] * local["terms"], local["batch"]
        # Of a gradient's product the sum goes over the rows of a batch.
        if self.product.computed and self._summed and parts > 1:
            depth /= parts
        else:
            rows /= parts
        operations = 2.0 * rows * columns * depth * batch
        runs *= parts / self._fewer_runs
        return MatrixProduct(operations, rows, columns, depth, batch, self._dtype, runs)

    def ragged(self, matrices: MatrixProduct, kind: str) -> tuple[MatrixProduct, float]:
        """Returns a ragged product as compiled, and its masked elements."""
        # Compilers have room for the most rows that can come.
        is_sum = any(dim.role == "sums" for dim in self.product.dims)
        groups = self._local["sums" if is_sum else "group"]
        copies = self.product.copies
        room = self._group_ways * min(copies, groups) / copies

        # XLA for GPU and CPU multiplies all of them with the matrices of all groups, and masks the
        # others' rows; that for TPU has a grouped kernel for rows, and masks where groups are
        # summed.
        rows, depth, batch, masked = matrices.rows, matrices.depth, matrices.batch, 0.0
        if is_sum:
            depth *= room
            batch *= groups
            if kind != "tpu":
                masked = 2 * groups * depth * (rows + matrices.columns)
        elif kind == "tpu":
            rows = rows * room / groups
            batch *= groups
        else:
            rows *= room
            depth *= groups
            masked = 2 * rows * depth
        operations = 2.0 * rows * matrices.columns * depth * batch
        compiled = dataclasses.replace(
            matrices, operations=operations, rows=rows, depth=depth, batch=batch
        )
        return compiled, masked

    def transfers(self) -> Iterator[tuple[Transfer, set[str]]]:
        """Yields the transfers of operands and result, with the names on the array."""
        for array in (_LEFT, _RIGHT):
            if self._lost[array]:
                yield self._transfer("all-gather", self._lost[array], array)

        scattered = [axis for axis in self._lost[_RESULT] if axis in self._summed]
        if scattered:
            yield self._transfer("reduce-scatter", scattered, _RESULT)

        if self._group_ways > 1:
            for array, times in zip((_LEFT, _RIGHT), self.product.exchanged, strict=True):
                if times:  # there, and the results back
                    sent, names = self._transfer("all-to-all", self._group_axes, array)
                    yield dataclasses.replace(sent, runs=2 * times / self._fewer_runs), names

        whole = [axis for axis in self._summed if axis not in scattered]
        if whole:
            yield self._transfer("all-reduce", whole, _RESULT, parts=self._ways(scattered))

    def _transfer(
        self, kind: str, axes: Sequence[str], array: int, parts: int = 1
    ) -> tuple[Transfer, set[str]]:
        transfer = Transfer(
            kind,
            role_of(kind, axes, self._batch_axes),
            payload=_width(self._dtype) * self._elements[array] / parts,
            size=self._ways(axes),
            stride=group_stride(self._sizes, axes),
            runs=self.product.changes[array] / self._fewer_runs,
        )
        return transfer, self._names[array]


# --- Stages ---


@dataclass(frozen=True)
class _StagesOfLayout:
    """The stages of a layout; one, if it is no pipeline."""

    names: frozenset[str] = frozenset()  # of the dimensions that its stages split
    layers: tuple[tuple[tuple[int, ...], list[str]], ...] = ()  # shapes and names of its weights
    stages: int = 1
    microbatches: int = 1
    rounds: int = 1
    bubble: float = 0.0

    @classmethod
    def of(cls, layout: Layout, dimensions: DimensionModel) -> _StagesOfLayout:
        """Returns the pipeline of a layout."""
        settings = dict(layout.parallel)
        stages = layout.sizes.get("stage", 1)
        split_names = {name for name, axes in layout.axes_of.items() if "stage" in axes}
        names = split_names & dimensions.looped
        if stages == 1 or not names or "microbatches" not in settings:
            return cls()

        microbatches, schedule = settings["microbatches"], settings.get("schedule", "gpipe")
        rounds = 1
        if schedule == "circular":
            rounds = min(size for name in names for size in dimensions.sizes_of(name)) // stages
        arguments = [(shape, list(axis_names_in(entry))) for shape, entry in dimensions.arguments]
        return cls(
            frozenset(names),
            tuple((shape, dim_names) for shape, dim_names in arguments if names & set(dim_names)),
            stages,
            microbatches,
            rounds,
            bubble_share(schedule, stages, microbatches, rounds),
        )

    @property
    def weights(self) -> set[str]:
        """Names on the parameters of its layers."""
        return {name for _, dim_names in self.layers for name in dim_names} - self.names

    def transfers(
        self, layout: Layout, dimensions: DimensionModel, width: float
    ) -> Iterator[Transfer]:
        """Yields transfers between stages: weights into rounds, and activations."""
        if self.stages == 1:
            return
        axes_of = layout.axes_of

        def local_elements(shape: Sequence[int], names: Sequence[str]) -> float:
            axes = {axis for name in names for axis in axes_of.get(name, ())}
            return math.prod(shape) / layout.ways(axes)

        send = Transfer(
            "collective-permute",
            "stages",
            payload=0.0,
            size=self.stages,
            stride=group_stride(layout.sizes, ["stage"]),
        )
        if self.rounds > 1:  # there, and gradients back
            moved = sum(2 * local_elements(shape, names) for shape, names in self.layers)
            yield dataclasses.replace(send, payload=width * moved * (1 - 1 / self.stages))

        # Of the residual stream, which is the narrowest of what layers name; both ways.
        constraints = [
            (shape, list(axis_names_in(entry))) for shape, entry in dimensions.constraints
        ]
        activations = [
            local_elements(shape, names)
            for shape, names in constraints
            if not self.names & set(names)
        ]
        if activations:
            payload = width * min(activations) / self.microbatches
            ticks = self.microbatches * self.rounds + self.stages - 1
            yield dataclasses.replace(send, payload=payload, runs=2 * ticks)
