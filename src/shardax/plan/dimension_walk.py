# SPDX-License-Identifier: Apache-2.0
"""The walk through a traced program that finds its matrix products and classes of dimensions.

Programs inside of equations (loops, branches, compiled and rematerialised functions) are walked
where they are called, so that two calls of one function do not become one. Equations whose results
nothing needs are passed over, as the compiler drops them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardax.partition.assignment import strings
from shardax.partition.scope import names_marked
from shardax.plan.dimension_classes import DimensionClasses
from shardax.plan.dimension_rules import KEEPS_ARGUMENT, RULES, Dims, convolution_dims, fresh


class Value(NamedTuple):
    """What is known of an array in the program: its dimensions; whether it is an argument."""

    dims: Dims
    given: bool


class RawProduct(NamedTuple):
    """A matrix product.

    Attributes:
        flops: Operations of one run.
        runs: How often it runs.
        dims: Dimensions by role.
        computed: Whether both operands are computed.
        dtype: Of its first operand.
    """

    flops: float
    runs: int
    dims: tuple[tuple[str, int], ...]
    computed: bool
    dtype: str


class Walk:
    """A walk through a program.

    Attributes:
        classes: Dimensions of all arrays.
        products: The products met.
        constraints: Shapes and names of arrays that constraints lay out, each once.
        notes: What could not be told.
    """

    def __init__(self) -> None:
        self.classes = DimensionClasses()
        self.products: list[RawProduct] = []
        self.constraints: dict[tuple[tuple[int, ...], tuple[Any, ...]], None] = {}
        self.notes: dict[str, None] = {}

    def program(
        self, jaxpr: Any, inputs: Sequence[Value], wanted: Sequence[bool], runs: int
    ) -> list[Value]:
        """Walks a program.

        Args:
            jaxpr: An open jaxpr.
            inputs: Its inputs.
            wanted: Which outputs are needed.
            runs: How often it runs.

        Returns:
            Its outputs.
        """
        known = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
        known.update({id(var): self._new(var, given=True) for var in jaxpr.constvars})
        needed = _needed(jaxpr, wanted)
        for equation, results in zip(jaxpr.eqns, needed, strict=True):
            if results is None:
                continue
            operands = [self._read(known, item) for item in equation.invars]
            made = self._equation(equation, operands, results, runs)
            known.update(zip(map(id, equation.outvars), made, strict=True))
        return [self._read(known, item) for item in jaxpr.outvars]

    def _new(self, item: Any, given: bool = False) -> Value:
        return Value(self.classes.new(getattr(item.aval, "shape", ())), given)

    def _read(self, known: dict[int, Value], item: Any) -> Value:
        return known[id(item)] if id(item) in known else self._new(item)

    def _equation(
        self, equation: Any, operands: list[Value], wanted: list[bool], runs: int
    ) -> list[Value]:
        name = equation.primitive.name
        if name == "dot_general":
            return [Value(self._dot(equation, operands, runs), False)]
        if name == "conv_general_dilated":
            out, dims, flops = convolution_dims(self.classes, equation, [v.dims for v in operands])
            computed = not (operands[0].given or operands[1].given)
            self.products.append(RawProduct(flops, runs, tuple(dims), computed, _dtype(equation)))
            return [Value(out, False)]
        if name == "name":
            self._mark(equation.params["name"], operands[0].dims)
        if name in RULES:
            made = RULES[name](self.classes, equation, [value.dims for value in operands])
            given = name in KEEPS_ARGUMENT and operands[0].given
            return [Value(dims, given) for dims in made]
        if name == "scan":
            return self._scan(equation, operands, wanted, runs)
        if name == "while":
            return self._while(equation, operands, runs)
        if name == "cond":
            return self._cond(equation, operands, wanted, runs)
        return self._call(equation, operands, wanted, runs)

    def _mark(self, text: str, dims: Dims) -> None:
        names = names_marked(text)
        if names is None:
            return
        shape = tuple(self.classes.size(d) for d in dims)
        self.constraints[shape, names] = None
        self.name(dims, names)

    def name(self, dims: Dims, names: Sequence[Any]) -> None:
        """Gives dimensions their names; a merged dimension has several."""
        for dim, entry in zip(dims, names, strict=False):
            for each in strings((entry,)):
                self.classes.name(dim, each)

    def _dot(self, equation: Any, operands: list[Value], runs: int) -> Dims:
        (sum_left, sum_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
        left, right = operands[0].dims, operands[1].dims
        for one, other in ((sum_left, sum_right), (batch_left, batch_right)):
            for a, b in zip(one, other, strict=True):
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
        computed = not (operands[0].given or operands[1].given)
        self.products.append(RawProduct(flops, runs, tuple(dims), computed, _dtype(equation)))
        return (*batch, *rows, *columns)

    # --- programs inside --------------------------------------------------------------------------

    def _scan(
        self, equation: Any, operands: list[Value], wanted: list[bool], runs: int
    ) -> list[Value]:
        consts, carried = equation.params["num_consts"], equation.params["num_carry"]
        first = consts + carried
        for value in operands[first:]:
            self.classes.loop_over(value.dims[0])
        inner = [Value(v.dims[1:], v.given) for v in operands[first:]]
        flags = [True] * carried + wanted[carried:]
        times = runs * int(equation.params["length"])
        inputs = [*operands[:consts], *(Value(v.dims, False) for v in operands[consts:first])]
        body = equation.params["jaxpr"].jaxpr
        made = self.program(body, [*inputs, *inner], flags, times)
        for before, after in zip(operands[consts:first], made, strict=False):
            self.classes.join_same_sizes(before.dims, after.dims)
        stacked = []
        for out, value in zip(equation.outvars[carried:], made[carried:], strict=True):
            (loop,) = self.classes.new(out.aval.shape[:1])
            self.classes.loop_over(loop)
            stacked.append(Value((loop, *value.dims), False))
        return [*made[:carried], *stacked]

    def _while(self, equation: Any, operands: list[Value], runs: int) -> list[Value]:
        params = equation.params
        before, consts = params["cond_nconsts"], params["body_nconsts"]
        state = [Value(v.dims, False) for v in operands[before + consts :]]
        made = self.program(
            params["body_jaxpr"].jaxpr,
            [*operands[before : before + consts], *state],
            [True] * len(state),
            runs,
        )
        for one, other in zip(state, made, strict=True):
            self.classes.join_same_sizes(one.dims, other.dims)
        self.notes["a loop of unknown length counts once"] = None
        return made

    def _cond(
        self, equation: Any, operands: list[Value], wanted: list[bool], runs: int
    ) -> list[Value]:
        results = [
            self.program(branch.jaxpr, operands[1:], wanted, runs)
            for branch in equation.params["branches"]
        ]
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                self.classes.join_same_sizes(one.dims, two.dims)
        self.notes["all branches of a condition count"] = None
        return results[0]

    def _call(
        self, equation: Any, operands: list[Value], wanted: list[bool], runs: int
    ) -> list[Value]:
        """A function inside of an equation; else an operation of which nothing is known."""
        unrelated = fresh(self.classes, equation, [value.dims for value in operands])
        results = [Value(dims, False) for dims in unrelated]
        if equation.primitive.name.startswith("pallas"):
            self.notes["operations of custom kernels are not counted"] = None
            return results
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            found = equation.params.get(parameter)
            inner = getattr(found, "jaxpr", found)
            if not hasattr(inner, "eqns"):
                continue
            if len(inner.invars) == len(operands) and len(inner.outvars) == len(results):
                return self.program(inner, operands, wanted, runs)
            self.program(
                inner, [self._new(v) for v in inner.invars], [True] * len(inner.outvars), runs
            )
        return results


def _needed(jaxpr: Any, wanted: Sequence[bool]) -> list[list[bool] | None]:
    """Returns, for each equation, which of its results are needed, or None if it is not."""
    live = {id(item) for item, flag in zip(jaxpr.outvars, wanted, strict=True) if flag}
    found: list[list[bool] | None] = []
    for equation in reversed(jaxpr.eqns):
        results = [id(item) in live for item in equation.outvars]
        if not any(results) and not equation.effects:
            found.append(None)
            continue
        found.append(results)
        live |= {id(item) for item in equation.invars}
    return found[::-1]


def _dtype(equation: Any) -> str:
    return str(equation.invars[0].aval.dtype)
