# SPDX-License-Identifier: Apache-2.0
"""The walk through a traced step: its matrix products, and which of their dimensions are the same.

Each primitive has a rule from the dimensions of operands to those of results; without a rule,
results are unrelated to anything. Jaxprs inside of equations are walked where they are called, so
that two calls of one function do not become one. Dead equations are passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from shardax.extend import AxisNameMarks, axis_names_in, open_jaxpr
from shardax.plan.searching.classes import DimensionClasses, Dims, matching_groups

NamedArrayShape = tuple[tuple[int, ...], tuple[Any, ...]]  # sizes, and names of the dimensions


class Item(Protocol):
    """A variable or a literal of a jaxpr."""

    aval: Any  # with shape and dtype, if it is an array


class JaxprEqn(Protocol):
    """An equation of a jaxpr."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Item]
    outvars: list[Item]
    effects: set[Any]


class Jaxpr(Protocol):
    """What walks need of a jaxpr."""

    invars: list[Item]
    constvars: list[Item]
    eqns: list[JaxprEqn]
    outvars: list[Item]


# --- Rules of primitives: the dimensions of results ---


DimensionRule = Callable[[DimensionClasses, JaxprEqn, Sequence[Dims]], list[Dims]]


def _unrelated(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    return [classes.new(_shape(out)) for out in eqn.outvars]


def _shape(item: Item) -> tuple[int, ...]:
    return getattr(item.aval, "shape", ())


def _elementwise(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    results = _unrelated(classes, eqn, operands)
    for operand, out in itertools.product(operands, results):
        if len(operand) == len(out):
            classes.join_same_sizes(operand, out)
    return results


def _one_to_one(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    return list(operands[: len(eqn.outvars)])


def _transpose(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    return [tuple(operands[0][axis] for axis in eqn.params["permutation"])]


def _broadcast(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = _unrelated(classes, eqn, operands)
    kept_axes = eqn.params["broadcast_dimensions"]
    classes.join_same_sizes(operands[0], [out[axis] for axis in kept_axes])
    return [out]


def _reduce(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    """Reductions over axes, and squeezed dimensions."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    remaining = [_without(dims, set(axes)) for dims in operands]
    return remaining[: len(eqn.outvars)]


def _without(dims: Dims, axes: set[int]) -> Dims:
    return tuple(dim for axis, dim in enumerate(dims) if axis not in axes)


def _reshape(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = _unrelated(classes, eqn, operands)
    if eqn.params.get("dimensions") is not None:  # it transposes too
        return [out]

    in_dims = operands[0]
    in_sizes = [classes.size(dim) for dim in in_dims]
    out_sizes = [classes.size(dim) for dim in out]
    for in_axes, out_axes in matching_groups(in_sizes, out_sizes):
        sources = [in_dims[axis] for axis in in_axes]
        targets = [out[axis] for axis in out_axes]
        if len(sources) == len(targets) == 1:
            classes.join(sources[0], targets[0])
        elif len(sources) == 1:
            classes.make_whole(sources[0], targets)
        elif len(targets) == 1:
            classes.make_whole(targets[0], sources)
    return [out]


def _resized(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    """Slices, pads, concatenations: dimensions stay the same, sizes change."""
    results = _unrelated(classes, eqn, operands)
    for operand, out in itertools.product(operands, results):
        if len(operand) == len(out):
            for in_dim, out_dim in zip(operand, out, strict=True):
                classes.join(in_dim, out_dim)
    return results


def _gather(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
    """Rows of an operand by indices (last dimension: one index)."""
    numbers = eqn.params["dimension_numbers"]
    (out,) = _unrelated(classes, eqn, operands)
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    window = numbers.offset_dims, numbers.collapsed_slice_dims
    _join_rows(classes, operands[0], operands[1], out, *window, tuple(batching))
    return [out]


def _scatter(classes: DimensionClasses, eqn: JaxprEqn, operands: Sequence[Dims]) -> list[Dims]:
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
    classes.join_same_sizes(_without(operand, indexed), [rows[axis] for axis in window])
    classes.join_same_sizes(indices[:-1], _without(rows, set(window)))
    for operand_axis, index_axis in batching:
        classes.join(operand[operand_axis], indices[index_axis])


def _primitives(names: str) -> frozenset[str]:
    return frozenset(names.split())


_ELEMENTWISE = _primitives("""
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
cumlogsumexp cummax cummin cumprod cumsum digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
lt_to max min mul name ne neg nextafter not or polygamma population_count pow pvary
random_gamma_grad real reduce_precision regularized_incomplete_beta rem reshard rev round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sort sqrt square stop_gradient sub tan tanh xor zeta mesh_cast layout_constraint
""")

_REDUCTIONS = _primitives("""
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
""")

_PAIRWISE = _primitives("""
optimization_barrier psum psum2 psum_invariant pmax pmin ppermute pbroadcast pcast device_put
""")

_SCATTERS = _primitives("""
scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max
scatter_max
""")

# By the name of the primitive.
_DIMENSION_RULES: dict[str, DimensionRule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_PAIRWISE, _one_to_one),
    **dict.fromkeys(["slice", "pad", "concatenate", "split"], _resized),
    **dict.fromkeys(_SCATTERS, _scatter),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _reduce,
    "reshape": _reshape,
    "dynamic_slice": lambda classes, eqn, operands: _resized(classes, eqn, operands[:1]),
    "dynamic_update_slice": lambda classes, eqn, operands: _resized(classes, eqn, operands[:2]),
    "top_k": _elementwise,
    "gather": _gather,
}

# Operations whose result is still their first operand, in another form.
_KEEPS_ARGUMENT = _primitives("""
convert_element_type name transpose reshape squeeze slice copy copy_p dynamic_slice
reduce_precision sharding_constraint reshard pvary device_put
""")

# Without a rule, and without products.
_MOVES = _primitives("""
all_gather all_gather_invariant all_to_all approx_top_k cumsum debug_callback debug_print infeed
outfeed ragged_all_to_all reduce_scatter reduce_window reduce_window_max reduce_window_min
reduce_window_sum select_and_gather_add select_and_scatter_add zeros_like
""")

_ADDITIONS = ("add", "add_any")


# --- The walk ---


class TracedArray(NamedTuple):
    """An array of the program."""

    dims: Dims
    is_argument: bool = False  # of the step, in whatever form
    changes: int = 1  # in how many of the runs of the loops around it has it another value
    product: int = -1  # the number of the product that it is the result of, or a sum with it
    copies: int = 1  # rows for each row of the array that they were gathered from
    is_routed: bool = False  # whether its rows are with their groups, as results of ragged products


class RawProduct(NamedTuple):
    """A matrix product, with dimensions by number."""

    flops: float  # of one run
    runs: int
    dims: tuple[tuple[str, int], ...]  # with their roles, as of ``ProductDimension``
    computed: bool  # whether both operands are computed
    dtype: str  # of its first operand
    loops: Dims  # that loops around it run over
    changes: tuple[int, int, int]  # of its operands and its result, as in TracedArray
    exchanged: tuple[int, int]  # how often rows of an operand are sent to their groups
    copies: int  # rows of a ragged product for each row that they were gathered from


class LoopScope(NamedTuple):
    """The loops around an equation."""

    runs: int = 1  # of it, in all
    dims: Dims = ()  # that the loops run over
    number: int = 0  # of the innermost loop; 0 outside of loops


class JaxprWalk:
    """A walk through a program, and what it met."""

    def __init__(self) -> None:
        self.classes = DimensionClasses()
        self.products: list[RawProduct] = []
        self.constraints: dict[NamedArrayShape, None] = {}
        self.notes: dict[str, None] = {}
        self._scope = LoopScope()
        self._loop_count = 0
        self._argument_uses: set[tuple[int, frozenset[int]]] = set()  # by loop and dimensions
        self._exchanged: set[Dims] = set()  # of rows sent to their groups, and saved there

    def program(
        self, jaxpr: Jaxpr, inputs: Sequence[TracedArray], needed_results: Sequence[bool]
    ) -> list[TracedArray]:
        """Walks a program, and returns its results."""
        values = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
        for var in jaxpr.constvars:
            values[id(var)] = self.new_array(var, is_argument=True)

        for eqn, needed in zip(jaxpr.eqns, _needed(jaxpr, needed_results), strict=True):
            if needed is not None:
                operands = [self._read(values, item) for item in eqn.invars]
                results = self._equation(eqn, operands, needed)
                values.update(zip(map(id, eqn.outvars), results, strict=True))
        return [self._read(values, item) for item in jaxpr.outvars]

    def new_array(self, item: Item, *, is_argument: bool = False) -> TracedArray:
        """Returns an array whose dimensions are related to nothing."""
        return TracedArray(self.classes.new(_shape(item)), is_argument)

    def _read(self, values: dict[int, TracedArray], item: Item) -> TracedArray:
        return values[id(item)] if id(item) in values else self.new_array(item)

    def _equation(
        self, eqn: JaxprEqn, operands: list[TracedArray], needed_results: list[bool]
    ) -> list[TracedArray]:
        name = eqn.primitive.name
        match name:
            case "dot_general":
                return [self._dot(eqn, operands)]
            case "ragged_dot_general":
                return [self._ragged_dot(eqn, operands)]
            case "conv_general_dilated":
                return [self._convolution(eqn, operands)]
            case "scan":
                return self._scan(eqn, operands, needed_results)
            case "while":
                return self._while(eqn, operands)
            case "cond":
                return self._cond(eqn, operands, needed_results)
            case _ if name not in _DIMENSION_RULES:
                return self._call(eqn, operands, needed_results)

        if name == "name":
            self._read_mark(eqn, operands[0].dims)

        # What only converts a product, or adds to it, is still summed over devices as that product.
        keeps_product = name in _KEEPS_ARGUMENT or name in _ADDITIONS
        product = max((operand.product for operand in operands), default=-1)
        result = TracedArray(
            (),
            is_argument=name in _KEEPS_ARGUMENT and operands[0].is_argument,
            changes=_changes(operands),
            product=product if keeps_product else -1,
        )
        out_dims = _DIMENSION_RULES[name](self.classes, eqn, [value.dims for value in operands])
        results = [result._replace(dims=dims) for dims in out_dims]
        return self._with_rows(name, operands, results)

    def _read_mark(self, eqn: JaxprEqn, dims: Dims) -> None:
        """Names dimensions, if the equation is a mark of names."""
        names = AxisNameMarks.read(eqn.params["name"])
        if names is None:
            return

        self.constraints[tuple(map(self.classes.size, dims)), names] = None
        for dim, entry in zip(dims, names, strict=False):
            for name in axis_names_in((entry,)):  # a merged dimension has several
                self.classes.name(dim, name)

    def _with_rows(
        self, primitive: str, operands: list[TracedArray], results: list[TracedArray]
    ) -> list[TracedArray]:
        """Returns results that say how their rows were gathered."""
        if primitive == "gather" and operands[0].dims and results[0].dims:
            rows = self.classes.size(operands[0].dims[0])
            gathered = self.classes.size(results[0].dims[0])
            return [results[0]._replace(copies=max(1, gathered // max(1, rows)))]

        if primitive in _PAIRWISE:
            pairs = zip(results, operands, strict=False)
            return [
                result._replace(copies=operand.copies, is_routed=operand.is_routed)
                for result, operand in pairs
            ]

        if primitive in _ELEMENTWISE and operands:
            copies = max(value.copies for value in operands)
            is_routed = any(value.is_routed for value in operands)
            return [value._replace(copies=copies, is_routed=is_routed) for value in results]
        return results

    # --- Products ---

    def _add_product(
        self,
        eqn: JaxprEqn,
        operands: list[TracedArray],
        flops: float,
        dims: Sequence[tuple[str, int]],
        out_dims: Dims,
        *,
        exchanged: tuple[int, int] = (0, 0),
        copies: int = 1,
        is_routed: bool = False,
    ) -> TracedArray:
        """Keeps a product, and returns its result."""
        left, right = operands[:2]
        scope = self._scope
        product = RawProduct(
            flops,
            scope.runs,
            tuple(dims),
            computed=not (left.is_argument or right.is_argument),
            dtype=str(eqn.invars[0].aval.dtype),
            loops=scope.dims,
            changes=(self._first_changes(left), self._first_changes(right), scope.runs),
            exchanged=exchanged,
            copies=copies,
        )
        self.products.append(product)
        number = len(self.products) - 1
        return TracedArray(out_dims, False, _changes(operands), number, copies, is_routed)

    def _first_changes(self, operand: TracedArray) -> int:
        """Returns the changes of an operand, at its first use."""
        use = self._scope.number, frozenset(operand.dims)
        if operand.is_argument and use in self._argument_uses:
            return 0
        self._argument_uses.add(use)
        return operand.changes

    def _contraction(
        self,
        dimension_numbers: tuple[Any, Any],
        left: Dims,
        right: Dims,
        group_axes: Sequence[int] = (),
    ) -> list[tuple[str, int]]:
        """Joins the dimensions of both operands, and returns all with their roles."""
        (sum_left, sum_right), (batch_left, batch_right) = dimension_numbers
        pairs = zip((*sum_left, *batch_left), (*sum_right, *batch_right), strict=True)
        for left_axis, right_axis in pairs:
            self.classes.join(left[left_axis], right[right_axis])

        rows = _without(left, {*sum_left, *batch_left})
        columns = _without(right, {*sum_right, *batch_right, *group_axes})
        return [
            *(("batch", left[axis]) for axis in batch_left),
            *(("left", dim) for dim in rows),
            *(("right", dim) for dim in columns),
            *(("sum", left[axis]) for axis in sum_left),
        ]

    def _dot(self, eqn: JaxprEqn, operands: list[TracedArray]) -> TracedArray:
        numbers = eqn.params["dimension_numbers"]
        dims = self._contraction(numbers, operands[0].dims, operands[1].dims)
        flops = 2.0 * self.classes.elements(dim for _, dim in dims)
        out_dims = tuple(dim for role, dim in dims if role != "sum")
        return self._add_product(eqn, operands, flops, dims, out_dims)

    def _ragged_dot(self, eqn: JaxprEqn, operands: list[TracedArray]) -> TracedArray:
        """A product of rows with the matrices of their groups."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        left, right, sizes = (operand.dims for operand in operands[:3])
        group_axes = numbers.rhs_group_dimensions
        dims = self._contraction(numbers.dot_dimension_numbers, left, right, group_axes)

        # Each row meets the matrix of its group, or each group sums its own rows.
        flops = 2.0 * self.classes.elements(dim for _, dim in dims)
        (ragged_axis,) = numbers.lhs_ragged_dimensions
        ragged = left[ragged_axis]
        role = next(role for role, dim in dims if dim == ragged and role != "right")
        ragged_role = {"left": "rows", "sum": "terms", "batch": "batch"}[role]
        dims[dims.index((role, ragged))] = ragged_role, ragged

        groups = tuple(right[axis] for axis in group_axes)
        out_dims = tuple(dim for role, dim in dims if role not in ("sum", "terms"))
        if ragged_role == "terms":
            groups = sizes[-1:]
            out_dims = (*groups, *out_dims)
        for dim in groups:
            self.classes.join(dim, sizes[-1])
            dims.append(("sums" if ragged_role == "terms" else "group", dim))

        # Rows that are not with their groups yet are sent there, once.
        operands_with_rows = {"rows": 1, "terms": 2, "batch": 0}[ragged_role]
        copies, exchanged = 1, [0, 0]
        for index, operand in enumerate(operands[:operands_with_rows]):
            copies = max(copies, operand.copies)
            if not operand.is_routed and operand.dims not in self._exchanged:
                self._exchanged.add(operand.dims)
                exchanged[index] = operand.changes
        return self._add_product(
            eqn,
            operands,
            flops,
            dims,
            out_dims,
            exchanged=(exchanged[0], exchanged[1]),
            copies=copies,
            is_routed=ragged_role == "rows",
        )

    def _convolution(self, eqn: JaxprEqn, operands: list[TracedArray]) -> TracedArray:
        classes, numbers = self.classes, eqn.params["dimension_numbers"]
        left, right = operands[0].dims, operands[1].dims
        (out,) = _unrelated(classes, eqn, (left, right))
        batch, feature, *spatial = numbers.lhs_spec
        out_feature, in_feature, *window = numbers.rhs_spec
        out_batch, out_channel, *out_spatial = numbers.out_spec

        classes.join(left[batch], out[out_batch])
        classes.join(right[out_feature], out[out_channel])
        for in_axis, out_axis in zip(spatial, out_spatial, strict=True):
            classes.join(left[in_axis], out[out_axis])
        if eqn.params["feature_group_count"] * eqn.params["batch_group_count"] == 1:
            classes.join(left[feature], right[in_feature])

        # For each element of the result a sum over those of the kernel.
        terms = classes.elements(right[axis] for axis in (in_feature, *window))
        flops = 2.0 * classes.elements(out) * terms
        dims = [("left", left[batch]), ("right", right[out_feature]), ("sum", right[in_feature])]
        dims += [("left", out[axis]) for axis in out_spatial]
        return self._add_product(eqn, operands, flops, dims, out)

    # --- Programs inside of equations ---

    def _scan(
        self, eqn: JaxprEqn, operands: list[TracedArray], needed_results: list[bool]
    ) -> list[TracedArray]:
        # Versions of JAX name the numbers of constants and of carried values differently; what the
        # loop takes and gives one element at a time has a dimension more than in its body.
        body = open_jaxpr(eqn.params["jaxpr"])
        whole = _same_rank(eqn.invars, body.invars)
        carried = _same_rank(eqn.outvars, body.outvars)
        constants, starts, scanned = (
            operands[: whole - carried],
            operands[whole - carried : whole],
            operands[whole:],
        )
        loop_dims = tuple(value.dims[0] for value in scanned)
        for dim in loop_dims:
            self.classes.loop_over(dim)

        outer = self._scope
        runs = outer.runs * int(eqn.params["length"])
        state = [TracedArray(value.dims, changes=runs) for value in starts]
        elements = [
            value._replace(dims=value.dims[1:], changes=runs, product=-1) for value in scanned
        ]
        self._loop_count += 1
        self._scope = LoopScope(runs, (*outer.dims, *loop_dims), self._loop_count)
        needed = [True] * carried + needed_results[carried:]
        results = self.program(body, [*constants, *state, *elements], needed)
        self._scope = outer

        for start, end in zip(starts, results, strict=False):
            self.classes.join_same_sizes(start.dims, end.dims)
        for index in _sums(body, len(constants), carried):
            # What only adds up is summed over devices after the loop, once.
            number = results[index].product
            if number >= 0:
                product = self.products[number]
                changes = (*product.changes[:2], outer.runs)
                self.products[number] = product._replace(changes=changes)

        final = [TracedArray(v.dims, v.is_argument, outer.runs) for v in results[:carried]]
        for out, value in zip(eqn.outvars[carried:], results[carried:], strict=True):
            (loop_dim,) = self.classes.new(_shape(out)[:1])
            self.classes.loop_over(loop_dim)
            for dim in loop_dims:  # the same iterations, as of saved activations
                self.classes.join(loop_dim, dim)
            stacked = value._replace(
                dims=(loop_dim, *value.dims), is_argument=False, changes=outer.runs, product=-1
            )
            final.append(stacked)
        return final

    def _while(self, eqn: JaxprEqn, operands: list[TracedArray]) -> list[TracedArray]:
        first = eqn.params["cond_nconsts"]
        constants = operands[first : first + eqn.params["body_nconsts"]]
        starts = operands[first + len(constants) :]
        state = [TracedArray(value.dims, changes=self._scope.runs) for value in starts]
        body = open_jaxpr(eqn.params["body_jaxpr"])
        results = self.program(body, [*constants, *state], [True] * len(state))
        self._join_arrays(state, results)
        self.notes["a loop of unknown length counts once"] = None
        return results

    def _cond(
        self, eqn: JaxprEqn, operands: list[TracedArray], needed_results: list[bool]
    ) -> list[TracedArray]:
        results, *others = (
            self.program(open_jaxpr(branch), operands[1:], needed_results)
            for branch in eqn.params["branches"]
        )
        for other in others:
            self._join_arrays(results, other)
        self.notes["all branches of a condition count"] = None
        return results

    def _join_arrays(self, left: Sequence[TracedArray], right: Sequence[TracedArray]) -> None:
        for left_array, right_array in zip(left, right, strict=True):
            self.classes.join_same_sizes(left_array.dims, right_array.dims)

    def _call(
        self, eqn: JaxprEqn, operands: list[TracedArray], needed_results: list[bool]
    ) -> list[TracedArray]:
        """A jaxpr inside of an equation, or an unknown operation."""
        unrelated = _unrelated(self.classes, eqn, [value.dims for value in operands])
        results = [TracedArray(dims, changes=_changes(operands)) for dims in unrelated]
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
                return self.program(inner, operands, needed_results)
            inputs = [self.new_array(var) for var in inner.invars]
            self.program(inner, inputs, [True] * len(inner.outvars))

        if not has_program and _may_multiply(eqn):
            self.notes[f"operations of {eqn.primitive.name} are not counted"] = None
        return results


def _may_multiply(eqn: JaxprEqn) -> bool:
    """Whether an unknown operation could hold products."""
    arrays = [item.aval for item in eqn.invars if hasattr(item.aval, "dtype")]
    ranks = [
        len(array.shape) for array in arrays if jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
    ]
    return max(ranks, default=0) > 1 and eqn.primitive.name not in _MOVES


def _changes(operands: Sequence[TracedArray]) -> int:
    """Returns the number of changes of a result of these arrays."""
    return max((value.changes for value in operands), default=1)


def _sums(body: Jaxpr, constant_count: int, carried_count: int) -> list[int]:
    """Returns which carried values of a loop are only ever added to."""
    sums = []
    for index in range(carried_count):
        start, end = body.invars[constant_count + index], body.outvars[index]
        uses = [eqn for eqn in body.eqns for item in eqn.invars if item is start]
        is_added = len(uses) == 1 and uses[0].primitive.name in _ADDITIONS
        if is_added and uses[0].outvars[0] is end:
            sums.append(index)
    return sums


def _same_rank(outer: Sequence[Item], inner: Sequence[Item]) -> int:
    """Counts the values in front that a loop keeps whole."""
    ranks = [
        len(_shape(outer_item)) == len(_shape(inner_item))
        for outer_item, inner_item in zip(outer, inner, strict=True)
    ]
    return ranks.index(False) if False in ranks else len(ranks)


def _needed(jaxpr: Jaxpr, needed_results: Sequence[bool]) -> list[list[bool] | None]:
    """Returns which results of each equation are needed; None if it is dead."""
    live = {id(item) for item, flag in zip(jaxpr.outvars, needed_results, strict=True) if flag}
    needed: list[list[bool] | None] = []
    for eqn in reversed(jaxpr.eqns):
        results = [id(item) in live for item in eqn.outvars]
        is_dead = not any(results) and not eqn.effects
        needed.append(None if is_dead else results)
        if not is_dead:
            live |= {id(item) for item in eqn.invars}
    return needed[::-1]
