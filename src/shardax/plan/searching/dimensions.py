# SPDX-License-Identifier: Apache-2.0
"""The dimension model of a step: matrix products with named dimensions.

A step is traced once, on shapes, and the names of its arguments and constraints are followed
through the jaxpr. The model tells at once what a compile would tell in seconds: how much of the
work a layout leaves undivided.

Two dimensions are *joined* where an operation keeps one as the other, such as the rows of both
operands of an addition; what is joined is one *class*, with all names given to its dimensions. A
reshape may make one dimension, the *whole*, of several, its *parts*: each is reached by the other's
names, though they stay classes of their own.

Each primitive has a rule from the dimensions of operands to those of results; without a rule,
results are unrelated to anything. Jaxprs inside of equations are walked where they are called, so
that two calls of one function do not become one. Dead equations are passed over.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from shardax import Jit, Rules, make_jaxpr
from shardax.extend import (
    AxisNameMarks,
    Object,
    Path,
    PyTree,
    RulesLike,
    ScopeSettings,
    TreeInventory,
    axis_names_in,
    mesh_axes_of,
    open_jaxpr,
)
from shardax.plan.inputs import Inputs, auto_mesh, needs_no_values, unbound


class DimensionClasses:
    """Dimensions, numbered, and their classes."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._names: dict[int, set[str]] = {}
        self._wholes: list[tuple[int, tuple[int, ...]]] = []
        self._looped: set[int] = set()

    def new(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Makes one dimension of a class of its own for each size."""
        first = len(self._parents)
        self._sizes += shape
        self._parents += range(first, len(self._sizes))
        return tuple(range(first, len(self._sizes)))

    def size(self, dimension: int) -> int:
        """Returns the size of a dimension."""
        return self._sizes[dimension]

    def find(self, dimension: int) -> int:
        """Returns the representative dimension of the class."""
        parents = self._parents
        while parents[dimension] != dimension:
            parents[dimension] = parents[parents[dimension]]
            dimension = parents[dimension]
        return dimension

    def join(self, first: int, second: int) -> None:
        """Joins the classes of two dimensions, unless of size 1."""
        if 1 in (self._sizes[first], self._sizes[second]):
            return
        first, second = sorted((self.find(first), self.find(second)))
        if first != second:
            self._parents[second] = first
            self._names.setdefault(first, set()).update(self._names.pop(second, ()))

    def join_same_sizes(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Joins dimensions of two arrays pairwise, if sizes are equal."""
        for a, b in zip(left, right, strict=False):
            if self._sizes[a] == self._sizes[b]:
                self.join(a, b)

    def make_whole(self, whole: int, parts: Sequence[int]) -> None:
        """Declares a dimension made of several, major to minor."""
        self._wholes.append((whole, tuple(parts)))

    def name(self, dimension: int, name: str) -> None:
        """Names a class; dimensions of size 1, never split, have none."""
        if self._sizes[dimension] != 1:
            self._names.setdefault(self.find(dimension), set()).add(name)

    def loop_over(self, dimension: int) -> None:
        """Declares a dimension taken element by element by a loop."""
        self._looped.add(dimension)

    def looped_names(self) -> frozenset[str]:
        """Returns the names of dimensions of loops."""
        return frozenset(name for dim in self._looped for name in self.own_names(dim))

    def own_names(self, dimension: int) -> frozenset[str]:
        """Returns the names given to a dimension's class."""
        return frozenset(self._names.get(self.find(dimension), ()))

    def resolve(self) -> dict[int, frozenset[str]]:
        """Joins the remaining parts; returns names by class."""
        while self._join_parts():
            pass
        reached = {self.find(dim): set(self.own_names(dim)) for dim in self._names}
        for whole, parts in self._wholes:
            for part in parts:
                for target, source in ((whole, part), (part, whole)):
                    names = self.own_names(source)
                    if names and self._sizes[target] != 1:
                        reached.setdefault(self.find(target), set()).update(names)
        # A whole of wholes has the names of all their parts, as rows of tokens sent to experts.
        wholes = {self.find(whole) for whole, _ in self._wholes}
        nested = [
            (self.find(whole), [self.find(part) for part in parts if self.find(part) in wholes])
            for whole, parts in self._wholes
            if self._sizes[whole] != 1
        ]
        nested = [(whole, parts) for whole, parts in nested if parts]
        changed = True
        while changed:
            changed = False
            for whole, parts in nested:
                names = set().union(*(reached.get(part, set()) for part in parts))
                if not names <= reached.get(whole, set()):
                    reached.setdefault(whole, set()).update(names)
                    changed = True
        return {dim: frozenset(names) for dim, names in reached.items()}

    def _join_parts(self) -> bool:
        """Joins the parts of joined wholes; whether there were any."""
        # The same whole of the same sizes of parts, met again, has the same parts.
        first_parts: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        changed = False
        for whole, parts in self._wholes:
            key = (self.find(whole), tuple(self._sizes[part] for part in parts))
            for first, second in zip(first_parts.setdefault(key, parts), parts, strict=True):
                if self._sizes[first] != 1 and self.find(first) != self.find(second):
                    self.join(first, second)
                    changed = True
        return changed


def matching_groups(
    left_sizes: Sequence[int], right_sizes: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs the fewest consecutive dimensions of two shapes with equal products."""
    left = [i for i, size in enumerate(left_sizes) if size != 1]
    right = [i for i, size in enumerate(right_sizes) if size != 1]
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while left and right:
        left_group, right_group = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(left_sizes[i] for i in left_group)) != (
            b := math.prod(right_sizes[i] for i in right_group)
        ):
            source, target = (left, left_group) if a < b else (right, right_group)
            if not source:  # sizes of no element: nothing corresponds
                return groups
            target.append(source.pop(0))
        groups.append((tuple(left_group), tuple(right_group)))
    return groups


Dims = tuple[int, ...]
Rule = Callable[[DimensionClasses, Any, Sequence[Dims]], list[Dims]]


def _fresh(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    """Dimensions unrelated to those of operands."""
    return [classes.new(getattr(out.aval, "shape", ())) for out in eqn.outvars]


def _elementwise(classes: DimensionClasses, eqn: object, operands: Sequence[Dims]) -> list[Dims]:
    results = _fresh(classes, eqn, operands)
    for operand, out in itertools.product(operands, results):
        if len(operand) == len(out):
            classes.join_same_sizes(operand, out)
    return results


def _one_to_one(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    return list(operands[: len(eqn.outvars)])


def _transpose(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    return [tuple(operands[0][i] for i in eqn.params["permutation"])]


def _broadcast(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = _fresh(classes, eqn, operands)
    places = eqn.params["broadcast_dimensions"]
    classes.join_same_sizes(operands[0], [out[i] for i in places])
    return [out]


def _reduce(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    """Reductions over axes, and squeezed dimensions."""
    reduced = {int(axis) for axis in eqn.params.get("axes", eqn.params.get("dimensions"))}
    remaining = [tuple(d for i, d in enumerate(dims) if i not in reduced) for dims in operands]
    return remaining[: len(eqn.outvars)]


def _reshape(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = _fresh(classes, eqn, operands)
    in_dims = operands[0]
    sizes = [classes.size(d) for d in in_dims]
    if eqn.params.get("dimensions") is not None:
        return [out]
    for in_axes, out_axes in matching_groups(sizes, [classes.size(d) for d in out]):
        sources, targets = [in_dims[i] for i in in_axes], [out[i] for i in out_axes]
        if len(sources) == len(targets) == 1:
            classes.join(sources[0], targets[0])
        elif len(sources) == 1:
            classes.make_whole(sources[0], targets)
        elif len(targets) == 1:
            classes.make_whole(targets[0], sources)
    return [out]


def _resized(classes: DimensionClasses, eqn: object, operands: Sequence[Dims]) -> list[Dims]:
    """Slices, pads, concatenations: dimensions stay the same, sizes change."""
    results = _fresh(classes, eqn, operands)
    for operand, out in itertools.product(operands, results):
        if len(operand) == len(out):
            for in_dim, out_dim in zip(operand, out, strict=True):
                classes.join(in_dim, out_dim)
    return results


def _gather(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    """Rows of an operand by indices (last dimension: one index)."""
    numbers = eqn.params["dimension_numbers"]
    (out,) = _fresh(classes, eqn, operands)
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    window = numbers.offset_dims, numbers.collapsed_slice_dims
    _join_rows(classes, operands[0], operands[1], out, *window, tuple(batching))
    return [out]


def _scatter(classes: DimensionClasses, eqn, operands: Sequence[Dims]) -> list[Dims]:
    """The reverse of a gather: updates of rows, by indices."""
    numbers = eqn.params["dimension_numbers"]
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    window = numbers.update_window_dims, numbers.inserted_window_dims
    _join_rows(classes, operands[0], operands[1], operands[2], *window, tuple(batching))
    return [operands[0]]


def _join_rows(
    classes: DimensionClasses,
    operand: Dims,
    indices: Dims,
    rows: Dims,
    window: Sequence[int],  # dimensions of the rows that are of the operand
    collapsed: Sequence[int],  # dimensions of the operand that rows do not have
    batching: Sequence[tuple[int, int]],  # pairs of dimensions of operand and indices
) -> None:
    indexed = {*collapsed, *(operand_axis for operand_axis, _ in batching)}
    sliced = [d for i, d in enumerate(operand) if i not in indexed]
    classes.join_same_sizes(sliced, [rows[i] for i in window])
    classes.join_same_sizes(indices[:-1], [d for i, d in enumerate(rows) if i not in window])
    for operand_axis, index_axis in batching:
        classes.join(operand[operand_axis], indices[index_axis])


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
cumlogsumexp cummax cummin cumprod cumsum digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
lt_to max min mul name ne neg nextafter not or polygamma population_count pow pvary
random_gamma_grad real reduce_precision regularized_incomplete_beta rem reshard rev round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sort sqrt square stop_gradient sub tan tanh xor zeta mesh_cast layout_constraint
"""

_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""

_PAIRWISE = """
optimization_barrier psum psum2 psum_invariant pmax pmin ppermute pbroadcast pcast device_put
"""

_SCATTERS = """
scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max
scatter_max
"""

# By the name of the primitive.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(_PAIRWISE.split(), _one_to_one),
    **dict.fromkeys(["slice", "pad", "concatenate", "split"], _resized),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _reduce,
    "reshape": _reshape,
    "dynamic_slice": lambda classes, eqn, operands: _resized(classes, eqn, operands[:1]),
    "dynamic_update_slice": lambda classes, eqn, operands: _resized(classes, eqn, operands[:2]),
    "top_k": _elementwise,
    "gather": _gather,
}  # fmt: skip
# Operations whose result is still their first operand, in another form.
_KEEPS_ARGUMENT = frozenset(
    ["convert_element_type", "name", "transpose", "reshape", "squeeze", "slice", "copy", "copy_p",
     "dynamic_slice", "reduce_precision", "sharding_constraint", "reshard", "pvary", "device_put"]
)  # fmt: skip


# Without a rule, and without products.
_MOVES = frozenset(
    ["all_gather", "all_gather_invariant", "all_to_all", "approx_top_k", "cumsum", "debug_callback",
     "debug_print", "infeed", "outfeed", "ragged_all_to_all", "reduce_scatter", "reduce_window",
     "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add",
     "select_and_scatter_add", "zeros_like"]
)  # fmt: skip

_ADDITIONS = ("add", "add_any")
_ELEMENTWISE_NAMES = frozenset(_ELEMENTWISE.split())
_PAIRWISE_NAMES = frozenset(_PAIRWISE.split())


class TracedArray(NamedTuple):
    """An array of the program, and whether it is an argument."""

    dims: Dims
    given: bool
    changes: int = 1  # in how many of the runs of the loops around it has it another value
    product: int = -1  # the number of the product that it is the result of, or a sum with it
    copies: int = 1  # rows for each row of the array that they were gathered from
    routed: bool = False  # whether its rows are with their groups, as results of ragged products


class RawProduct(NamedTuple):
    """A matrix product."""

    flops: float  # of one run
    runs: int
    dims: tuple[tuple[str, int], ...]  # with their roles
    computed: bool  # whether both operands are computed
    dtype: str  # of its first operand
    loops: tuple[int, ...]  # the dimensions that loops around it run over
    changes: tuple[int, int, int]  # of its operands and its result, as in TracedArray
    exchanged: tuple[int, int] = (0, 0)  # how often rows of an operand are sent to their groups
    copies: int = 1  # rows of a ragged product for each row that they were gathered from


class JaxprWalk:
    """A walk through a program."""

    def __init__(self) -> None:
        self.classes = DimensionClasses()
        self.products: list[RawProduct] = []
        self.loops: tuple[int, ...] = ()
        self.loop_number = 0  # of the loop that is walked; 0 outside of loops
        self.loop_count = 0
        self.argument_uses: set[tuple[int, frozenset[int]]] = set()
        self.exchanged: set[Dims] = set()  # of rows sent to their groups, and saved there
        self.constraints: dict[tuple[tuple[int, ...], tuple[Any, ...]], None] = {}
        self.notes: dict[str, None] = {}

    def program(
        self, jaxpr: Any, inputs: Sequence[TracedArray], needed_results: Sequence[bool], runs: int
    ) -> list[TracedArray]:
        """Walks a program."""
        values = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
        values.update({id(var): self._new(var, given=True) for var in jaxpr.constvars})
        needed = _needed(jaxpr, needed_results)
        for eqn, results in zip(jaxpr.eqns, needed, strict=True):
            if results is None:
                continue
            operands = [self._read(values, item) for item in eqn.invars]
            results_made = self._equation(eqn, operands, results, runs)
            values.update(zip(map(id, eqn.outvars), results_made, strict=True))
        return [self._read(values, item) for item in jaxpr.outvars]

    def _new(self, item, given: bool = False) -> TracedArray:
        return TracedArray(self.classes.new(getattr(item.aval, "shape", ())), given)

    def _read(self, values: dict[int, TracedArray], item: object) -> TracedArray:
        return values[id(item)] if id(item) in values else self._new(item)

    def _equation(
        self, eqn, operands: list[TracedArray], needed_results: list[bool], runs: int
    ) -> list[TracedArray]:
        match eqn.primitive.name:
            case "dot_general":
                out_dims = self._dot(eqn, operands, runs)
                return [TracedArray(out_dims, False, _changes(operands), len(self.products) - 1)]
            case "ragged_dot_general":
                return [self._ragged_dot(eqn, operands, runs)]
            case "conv_general_dilated":
                out_dims = self._convolution(eqn, operands, runs)
                return [TracedArray(out_dims, False, _changes(operands), len(self.products) - 1)]
            case "scan":
                return self._scan(eqn, operands, needed_results, runs)
            case "while":
                return self._while(eqn, operands, runs)
            case "cond":
                return self._cond(eqn, operands, needed_results, runs)
            case name if name not in _RULES:
                return self._call(eqn, operands, needed_results, runs)
            case "name":
                dims, names = operands[0].dims, AxisNameMarks.read(eqn.params["name"])
                if names is not None:
                    self.constraints[tuple(map(self.classes.size, dims)), names] = None
                    for dim, entry in zip(dims, names, strict=False):
                        for name_text in axis_names_in((entry,)):  # a merged dimension has several
                            self.classes.name(dim, name_text)
        out_dims = _RULES[name](self.classes, eqn, [value.dims for value in operands])
        is_argument = name in _KEEPS_ARGUMENT and operands[0].given
        keeps = name in _KEEPS_ARGUMENT or name in _ADDITIONS
        product = max((operand.product for operand in operands), default=-1) if keeps else -1
        result = TracedArray((), is_argument, _changes(operands), product)
        results = [result._replace(dims=dims) for dims in out_dims]
        return self._with_rows(eqn, operands, results)

    def _with_rows(
        self, eqn, operands: list[TracedArray], results: list[TracedArray]
    ) -> list[TracedArray]:
        """Returns results that say how their rows were gathered."""
        name = eqn.primitive.name
        if name == "gather" and operands[0].dims and results[0].dims:
            rows, gathered = (self.classes.size(v.dims[0]) for v in (operands[0], results[0]))
            return [results[0]._replace(copies=max(1, gathered // max(1, rows)))]
        if name in _PAIRWISE_NAMES:
            pairs = zip(results, operands, strict=False)
            return [r._replace(copies=v.copies, routed=v.routed) for r, v in pairs]
        if name in _ELEMENTWISE_NAMES and operands:
            copies = max(value.copies for value in operands)
            routed = any(value.routed for value in operands)
            return [value._replace(copies=copies, routed=routed) for value in results]
        return results

    def _add_product(
        self,
        eqn,
        operands: list[TracedArray],
        flops: float,
        dims: list[tuple[str, int]],
        runs: int,
        *,
        exchanged: tuple[int, int] = (0, 0),
        copies: int = 1,
    ) -> None:
        computed = not (operands[0].given or operands[1].given)
        dtype = str(eqn.invars[0].aval.dtype)
        left, right = (self._first_changes(operand) for operand in operands[:2])
        changes = left, right, runs
        product = RawProduct(flops, runs, tuple(dims), computed, dtype, self.loops, changes)
        self.products.append(product._replace(exchanged=exchanged, copies=copies))

    def _first_changes(self, operand: TracedArray) -> int:
        """Returns the changes of an operand, at its first use."""
        use = self.loop_number, frozenset(operand.dims)
        if not operand.given or use not in self.argument_uses:
            self.argument_uses.add(use)
            return operand.changes
        return 0

    def _dot(self, eqn, operands: list[TracedArray], runs: int) -> Dims:
        (sum_left, sum_right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
        left, right = operands[0].dims, operands[1].dims
        for left_axes, right_axes in ((sum_left, sum_right), (batch_left, batch_right)):
            for a, b in zip(left_axes, right_axes, strict=True):
                self.classes.join(left[a], right[b])
        batch = [left[i] for i in batch_left]
        rows = [d for i, d in enumerate(left) if i not in {*sum_left, *batch_left}]
        columns = [d for i, d in enumerate(right) if i not in {*sum_right, *batch_right}]
        dims = [
            *(("batch", d) for d in batch),
            *(("left", d) for d in rows),
            *(("right", d) for d in columns),
            *(("sum", left[i]) for i in sum_left),
        ]
        flops = 2.0 * math.prod(self.classes.size(d) for _, d in dims)
        self._add_product(eqn, operands, flops, dims, runs)
        return (*batch, *rows, *columns)

    def _ragged_dot(self, eqn, operands: list[TracedArray], runs: int) -> TracedArray:
        """A product of rows with the matrices of their groups."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (sum_left, sum_right), (batch_left, batch_right) = numbers.dot_dimension_numbers
        left, right = operands[0].dims, operands[1].dims
        for left_axes, right_axes in ((sum_left, sum_right), (batch_left, batch_right)):
            for a, b in zip(left_axes, right_axes, strict=True):
                self.classes.join(left[a], right[b])
        (ragged,) = numbers.lhs_ragged_dimensions
        group_axes = numbers.rhs_group_dimensions
        batch = [left[i] for i in batch_left]
        rows = [i for i in range(len(left)) if i not in {*sum_left, *batch_left}]
        columns = [i for i in range(len(right)) if i not in {*sum_right, *batch_right, *group_axes}]
        dims = [
            *(("batch", d) for d in batch),
            *(("rows" if i == ragged else "left", left[i]) for i in rows),
            *(("right", right[i]) for i in columns),
            *(("terms" if i == ragged else "sum", left[i]) for i in sum_left),
        ]
        # Each row meets the matrix of its group, or each group sums its own rows.
        flops = 2.0 * math.prod(self.classes.size(d) for _, d in dims)
        groups: Dims = tuple(right[i] for i in group_axes)
        dims += [("group", d) for d in groups]
        out = [*batch, *(left[i] for i in rows), *(right[i] for i in columns)]
        is_sum = ragged in sum_left
        if is_sum:
            groups = operands[2].dims[-1:]
            dims += [("sums", d) for d in groups]
            out = [*groups, *out]
        for dim in groups:
            self.classes.join(dim, operands[2].dims[-1])
        with_rows = operands[: 0 if ragged in batch_left else 2 if is_sum else 1]
        copies, exchanged = 1, [0, 0]
        for place, value in enumerate(with_rows):
            copies = max(copies, value.copies)
            if not value.routed and value.dims not in self.exchanged:
                self.exchanged.add(value.dims)
                exchanged[place] = value.changes
        sent = exchanged[0], exchanged[1]
        self._add_product(eqn, operands, flops, dims, runs, exchanged=sent, copies=copies)
        number = len(self.products) - 1
        routed = ragged in rows
        return TracedArray(tuple(out), False, _changes(operands), number, copies, routed)

    def _convolution(self, eqn, operands: list[TracedArray], runs: int) -> Dims:
        classes, numbers = self.classes, eqn.params["dimension_numbers"]
        left, right = operands[0].dims, operands[1].dims
        (out,) = _fresh(classes, eqn, (left, right))
        batch, feature, *spatial = numbers.lhs_spec
        out_feature, in_feature, *window = numbers.rhs_spec
        out_batch, out_channel, *places = numbers.out_spec
        classes.join(left[batch], out[out_batch])
        classes.join(right[out_feature], out[out_channel])
        for in_axis, out_axis in zip(spatial, places, strict=True):
            classes.join(left[in_axis], out[out_axis])
        if eqn.params["feature_group_count"] * eqn.params["batch_group_count"] == 1:
            classes.join(left[feature], right[in_feature])
        dims = [("left", left[batch]), ("right", right[out_feature]), ("sum", right[in_feature])]
        dims += [("left", out[i]) for i in places]
        # For each element of the result a sum over those of the kernel.
        elements = math.prod(classes.size(d) for d in out)
        terms = math.prod(classes.size(right[i]) for i in (in_feature, *window))
        self._add_product(eqn, operands, 2.0 * elements * terms, dims, runs)
        return out

    def _scan(
        self, eqn, operands: list[TracedArray], needed_results: list[bool], runs: int
    ) -> list[TracedArray]:
        body = open_jaxpr(eqn.params["jaxpr"])
        # Versions of JAX name the numbers of constants and of carried values differently; what the
        # loop takes and gives one element at a time has a dimension more than in its body.
        first = _same_rank(eqn.invars, body.invars)
        carried = _same_rank(eqn.outvars, body.outvars)
        consts = first - carried
        for value in operands[first:]:
            self.classes.loop_over(value.dims[0])
        flags = [True] * carried + needed_results[carried:]
        times = runs * int(eqn.params["length"])
        inner = [v._replace(dims=v.dims[1:], changes=times, product=-1) for v in operands[first:]]
        state = [TracedArray(v.dims, False, times) for v in operands[consts:first]]
        inputs = [*operands[:consts], *state]
        outer = self.loops, self.loop_number
        self.loops = (*self.loops, *(v.dims[0] for v in operands[first:]))
        self.loop_count += 1
        self.loop_number = self.loop_count
        results = self.program(body, [*inputs, *inner], flags, times)
        self.loops, self.loop_number = outer
        for start, end in zip(operands[consts:first], results, strict=False):
            self.classes.join_same_sizes(start.dims, end.dims)
        for place in _sums(body, consts, carried):  # what only adds up is summed after the loop
            if (number := results[place].product) >= 0:
                product = self.products[number]
                self.products[number] = product._replace(changes=(*product.changes[:2], runs))
        stacked = []
        for out, value in zip(eqn.outvars[carried:], results[carried:], strict=True):
            (loop,) = self.classes.new(out.aval.shape[:1])
            self.classes.loop_over(loop)
            for operand in operands[first:]:  # the same iterations, as of saved activations
                self.classes.join(loop, operand.dims[0])
            stack = TracedArray((loop, *value.dims), False, runs, -1, value.copies, value.routed)
            stacked.append(stack)
        return [*(TracedArray(v.dims, v.given, runs) for v in results[:carried]), *stacked]

    def _while(self, eqn, operands: list[TracedArray], runs: int) -> list[TracedArray]:
        params = eqn.params
        cond_consts, consts = params["cond_nconsts"], params["body_nconsts"]
        state = [TracedArray(v.dims, False, runs) for v in operands[cond_consts + consts :]]
        results = self.program(
            open_jaxpr(params["body_jaxpr"]),
            [*operands[cond_consts : cond_consts + consts], *state],
            [True] * len(state),
            runs,
        )
        for start, end in zip(state, results, strict=True):
            self.classes.join_same_sizes(start.dims, end.dims)
        self.notes["a loop of unknown length counts once"] = None
        return results

    def _cond(
        self, eqn, operands: list[TracedArray], needed_results: list[bool], runs: int
    ) -> list[TracedArray]:
        results = [
            self.program(open_jaxpr(branch), operands[1:], needed_results, runs)
            for branch in eqn.params["branches"]
        ]
        for branch_results in results[1:]:
            for first, second in zip(results[0], branch_results, strict=True):
                self.classes.join_same_sizes(first.dims, second.dims)
        self.notes["all branches of a condition count"] = None
        return results[0]

    def _call(
        self, eqn, operands: list[TracedArray], needed_results: list[bool], runs: int
    ) -> list[TracedArray]:
        """A jaxpr inside of an equation, or an unknown operation."""
        unrelated = _fresh(self.classes, eqn, [value.dims for value in operands])
        results = [TracedArray(dims, False, _changes(operands)) for dims in unrelated]
        if eqn.primitive.name.startswith("pallas"):
            self.notes["operations of custom kernels are not counted"] = None
            return results
        has_program = False
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = open_jaxpr(eqn.params.get(parameter))
            if not hasattr(inner, "eqns"):
                continue
            has_program = True
            if len(inner.invars) == len(operands) and len(inner.outvars) == len(results):
                return self.program(inner, operands, needed_results, runs)
            self.program(
                inner, [self._new(v) for v in inner.invars], [True] * len(inner.outvars), runs
            )
        if not has_program and self._may_multiply(eqn):
            self.notes[f"operations of {eqn.primitive.name} are not counted"] = None
        return results

    def _may_multiply(self, eqn) -> bool:
        """Whether an unknown operation could hold products."""
        arrays = [item.aval for item in eqn.invars if hasattr(item.aval, "dtype")]
        ranks = [len(a.shape) for a in arrays if jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)]
        return max(ranks, default=0) > 1 and eqn.primitive.name not in _MOVES


def _changes(operands: Sequence[TracedArray]) -> int:
    """Returns the number of changes of a result of these arrays."""
    return max((value.changes for value in operands), default=1)


def _sums(body, consts: int, carried: int) -> list[int]:
    """Returns the carried values of a loop only ever added to."""
    sums = []
    for place in range(carried):
        start, end = body.invars[consts + place], body.outvars[place]
        uses = [eqn for eqn in body.eqns for item in eqn.invars if item is start]
        added = len(uses) == 1 and uses[0].primitive.name in _ADDITIONS
        if added and uses[0].outvars[0] is end:
            sums.append(place)
    return sums


def _same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Counts the values in front kept whole by a loop."""
    ranks = [
        len(getattr(outer_var.aval, "shape", ())) == len(getattr(inner_var.aval, "shape", ()))
        for outer_var, inner_var in zip(outer, inner, strict=True)
    ]
    return ranks.index(False) if False in ranks else len(ranks)


def _needed(jaxpr, needed_results: Sequence[bool]) -> list[list[bool] | None]:
    """Returns the needed results of each equation; None if it is dead."""
    live = {id(item) for item, flag in zip(jaxpr.outvars, needed_results, strict=True) if flag}
    needed: list[list[bool] | None] = []
    for eqn in reversed(jaxpr.eqns):
        results = [id(item) in live for item in eqn.outvars]
        if not any(results) and not eqn.effects:
            needed.append(None)
            continue
        needed.append(results)
        live |= {id(item) for item in eqn.invars}
    return needed[::-1]


NamedArrayShape = tuple[tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class ProductDimension:
    """A dimension of a matrix product."""

    size: int
    names: frozenset[str]  # of its class and of what it is a part or the whole of
    # "batch" (of both operands and the result), "sum" (of both operands), "left" or "right" (of
    # one operand and the result). Of a ragged product the rows that belong to groups are "rows" (of
    # the left operand and the result) or "terms" (of both operands), the groups "group" (of the
    # right operand) or "sums" (of the result).
    role: str


@dataclass(frozen=True)
class Product:
    """All matrix products with dimensions of equal names, sizes and roles."""

    flops: float  # of all runs on all devices: two for a product and a sum
    runs: int
    dims: tuple[ProductDimension, ...]  # without those of size 1
    computed: bool  # whether neither operand is an argument of the step
    loops: frozenset[str] = frozenset()  # names of the dimensions that loops around it run over
    # Of all runs, how often the operands have other values (0 of arguments that an earlier product
    # of a loop's body has), and the result is not only added up.
    changes: tuple[int, int, int] = (1, 1, 1)
    in_blocks: bool = False  # whether loops around it run over dimensions without names only
    exchanged: tuple[int, int] = (0, 0)  # how often rows of an operand are sent to their groups
    copies: int = 1  # of a ragged product: rows of a token


@dataclass(frozen=True)
class DimensionModel:
    """The dimension model of a step."""

    products: tuple[Product, ...]  # those with most operations first
    constraints: tuple[NamedArrayShape, ...]
    arguments: tuple[NamedArrayShape, ...]  # those that have names
    looped: frozenset[str]  # names of dimensions that a loop takes one element at a time
    # Pairs of names that are one dimension, or one the whole and the other a part.
    together: frozenset[frozenset[str]]
    notes: tuple[str, ...]  # what could not be told
    dtype: str = "bfloat16"  # of most operations

    @property
    def flops(self) -> float:
        """Operations of all matrix products, on all devices together."""
        return sum(product.flops for product in self.products)

    def masked_flops(self, *, recomputed: bool = True) -> float:
        """Operations added by all groups meeting all rows."""
        ragged = {"rows": 0.0, "terms": 0.0}  # by what each product has of the two
        for product in self.products:
            sizes = {dim.role: dim.size for dim in product.dims}
            groups = max(sizes.get("group", 1), sizes.get("sums", 1))
            ragged["terms" if "terms" in sizes else "rows"] += product.flops * (groups - 1)
        if ragged["terms"] and not recomputed:  # each product has two derivatives, of which one
            return 3 * ragged["terms"]  # sums over terms, and is not computed twice
        return sum(ragged.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those of constraints first."""
        arrays = (*self.constraints, *self.arguments)
        return tuple(dict.fromkeys(name for _, names in arrays for name in axis_names_in(names)))

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of dimensions with a name, in ascending order."""
        arrays = (*self.constraints, *self.arguments)
        pairs = (pair for shape, names in arrays for pair in zip(shape, names, strict=True))
        return tuple(sorted({size for size, entry in pairs if name in axis_names_in((entry,))}))

    def replicated_compute(self, rules: RulesLike, mesh_sizes: Mapping[str, int]) -> float:
        """Returns a lower bound of the copies of each operation."""
        # A product can be split by every mesh axis that a name of one of its dimensions has by the
        # rules. A dimension without a name counts as split by whatever is left, as far as its size
        # goes; so this is a lower bound.
        devices = math.prod(mesh_sizes.values())
        axes: dict[str, set[str]] = {}
        for name, target in Rules(rules):
            axes.setdefault(name, set()).update(mesh_axes_of(target))
        total = 0.0
        for product in self.products:
            names = [*product.loops, *(name for dim in product.dims for name in dim.names)]
            used = {axis for name in names for axis in axes.get(name, ())}
            ways = math.prod(mesh_sizes.get(axis, 1) for axis in used)
            ways *= math.prod(dim.size for dim in product.dims if not dim.names)
            total += product.flops * devices / min(devices, ways)
        return total / self.flops if self.flops else 1.0


def trace_dimensions(
    inputs: Inputs, mesh_axes: Iterable[str] = ("data", "model")
) -> DimensionModel:
    """Traces a step on shapes, with mesh axes of size 1."""
    axes = tuple(mesh_axes)
    mesh = auto_mesh(dict.fromkeys(axes, 1))
    rules = Rules(dict.fromkeys(("batch", *inputs.logical_names)))
    values = enumerate(inputs.tree.values())
    static = tuple(position for position, value in values if not TreeInventory(value).leaves)
    mesh_scope = jax.sharding.use_abstract_mesh(mesh)
    marking = ScopeSettings.scope(rules=rules, marking=True, reference=True)
    with marking, mesh_scope, needs_no_values():
        traced = make_jaxpr(_marked(inputs), static_argnums=static)(*inputs.shapes())
    jaxpr = traced.jaxpr
    walk = JaxprWalk()
    step_inputs = [TracedArray(walk.classes.new(var.aval.shape), True) for var in jaxpr.invars]
    walk.program(jaxpr, step_inputs, [True] * len(jaxpr.outvars), 1)
    reached = walk.classes.resolve()
    arguments: dict[NamedArrayShape, None] = {}
    for leaf in _named_arrays(inputs):
        for shape, names in zip(leaf.shapes, leaf.names, strict=True):
            if names is not None:
                arguments[shape, names] = None
    flops_by_dtype: Counter[str] = Counter()
    for product in walk.products:
        flops_by_dtype[product.dtype] += int(product.flops * product.runs)
    together = [itertools.combinations(sorted(names), 2) for names in reached.values()]
    return DimensionModel(
        products=_merged_products(walk, reached),
        constraints=tuple(pair for pair in walk.constraints if pair not in arguments),
        arguments=tuple(arguments),
        looped=walk.classes.looped_names(),
        together=frozenset(frozenset(pair) for pairs in together for pair in pairs),
        notes=tuple(walk.notes),
        dtype=max(flops_by_dtype, key=lambda name: flops_by_dtype[name], default="bfloat16"),
    )


def _merged_products(walk: JaxprWalk, reached: Mapping[int, frozenset[str]]) -> tuple[Product, ...]:
    """Merges the products with equal dimensions."""
    sizes, classes = walk.classes.size, walk.classes
    groups: dict[tuple[Any, bool, frozenset[str], bool, int], list[RawProduct]] = {}
    for product in walk.products:
        dims = tuple(
            ProductDimension(sizes(d), reached.get(classes.find(d), frozenset()), role)
            for role, d in product.dims
            if sizes(d) != 1
        )
        loops = frozenset(name for loop in product.loops for name in classes.own_names(loop))
        in_blocks = bool(product.loops) and not loops
        key = dims, product.computed, loops, in_blocks, product.copies
        groups.setdefault(key, []).append(product)
    merged: list[Product] = []
    for (dims, computed, loops, in_blocks, copies), group in groups.items():
        flops = sum(product.flops * product.runs for product in group)
        left, right, result = (sum(product.changes[i] for product in group) for i in range(3))
        runs = sum(product.runs for product in group)
        changes = left, right, result
        first, second = (sum(product.exchanged[i] for product in group) for i in range(2))
        sent = first, second
        merged.append(Product(flops, runs, dims, computed, loops, changes, in_blocks, sent, copies))
    return tuple(sorted(merged, key=lambda product: -product.flops))


class _NamedArrays(NamedTuple):
    """The arrays of a leaf of the arguments."""

    path: Path
    shapes: list[tuple[int, ...]]
    names: list[tuple[Any, ...] | None]  # the logical names of each


def _named_arrays(inputs: Inputs) -> list[_NamedArrays]:
    """The shapes and logical names of the arrays of each leaf."""
    leaves: list[_NamedArrays] = []
    for leaf in TreeInventory(inputs.tree).leaves:
        names: list[Any] = [None] * len(leaf.arrays)
        if not leaf.has_names_of_mesh_axes:
            names = [leaf.names_of(info) for info in leaf.arrays]
        shapes = [tuple(info.shape) for info in leaf.arrays]
        leaves.append(_NamedArrays(leaf.path, shapes, names))
    return leaves


def _marked(inputs: Inputs) -> Callable[..., Any]:
    """The step, with the names of its arguments marked in the program."""
    step, bound, keywords = unbound(inputs.step)
    step = functools.partial(step.function if isinstance(step, Jit) else step, *bound, **keywords)
    named = {leaf.path: leaf.names for leaf in _named_arrays(inputs)}

    def run(*args) -> PyTree:
        inventory = TreeInventory(dict(zip(inputs.names, args, strict=True)))
        values: list[Any] = []
        for leaf in inventory.leaves:
            names = named.get(leaf.path) or [None] * len(leaf.arrays)  # numbers are traced too
            arrays = zip(leaf.arrays_in(leaf.value), names, strict=True)
            marks = [
                array if axis_names is None else AxisNameMarks.put(array, axis_names)
                for array, axis_names in arrays
            ]
            marked = leaf.with_arrays(leaf.value, marks)
            if leaf.variable is not None and any(axis_names is not None for axis_names in names):
                leaf.variable.value = marked
            values.append(marked)
        tree = inventory.unflatten(
            lambda part: part.value if isinstance(part.value, Object) else part.filled(values)
        )
        marked = zip(inputs.names, args, strict=True)
        return step(*(arg if tree[name] is None else tree[name] for name, arg in marked))

    return run
