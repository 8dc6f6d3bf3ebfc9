# SPDX-License-Identifier: Apache-2.0
"""While loops over Modules, and the body that all loops share.

The *body* is the user's function, run once per *iteration*. The *carry* is what one iteration hands
to the next: plain arrays that the body returns, and the values of Variables that it writes.
Variables that it only reads are constants of the loop, which cost no memory per step when the loop
is differentiated. The carry keeps its *form*: pytree structure, shapes and dtypes.

Which Variables the body writes is found by tracing it for its shapes. The body is one ``jax.jit``,
so JAX keeps that trace and the loop does not run the user's code again.

A predicate, an index or a bound is one number: a Python number, an array of shape (), or a Variable
that holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardax._core._jax import varying_axes
from shardax._core.graph.flatten import GraphDef, is_object
from shardax._core.graph.paths import Path, format_path, plain_path
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms.errors import CarryError, DecisionError
from shardax._transforms.lift import engine


def as_predicate(value: Any, what: str) -> Any:
    """Returns a predicate as a boolean of shape ()."""
    number = _one_number(value, what, "one boolean", "Reduce it: x.all(), x.any(), x[0] > 0.")
    kind = jnp.result_type(number)
    if kind == jnp.bool_:
        return number
    if jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating):
        return number != 0
    raise DecisionError(f"{what} must be one boolean, but has dtype {kind}. Compare it: x != y.")


def as_integer(value: Any, what: str) -> Any:
    """Returns an index or bound, an integer of shape ()."""
    number = _one_number(value, what, "one integer", "Take one of them: x[0].")
    kind = jnp.result_type(number)
    if jnp.issubdtype(kind, jnp.integer):
        return number
    hint = "jnp.int32(x)" if kind == jnp.bool_ else "x.astype(int)"
    raise DecisionError(f"{what} must be one integer, but has dtype {kind}. Convert it: {hint}.")


def _one_number(value: Any, what: str, wanted: str, hint: str) -> Any:
    number = value.value if isinstance(value, Variable) else value
    if not isinstance(number, engine.ARRAY_OR_NUMBER):
        raise DecisionError(f"{what} must be {wanted}, but is a {type(value).__name__}.")
    if jnp.shape(number) != ():
        raise DecisionError(f"{what} must be {wanted}, but has shape {jnp.shape(number)}. {hint}")
    return number


def abstract_eval(function: Callable[..., Any], *args: Any) -> Any:
    """Returns shapes and dtypes, with layouts over Explicit axes."""
    traceable: Any = function if hasattr(function, "trace") else jax.jit(function)
    report_trace = traceable.trace(*args)
    shapes, treedef = jax.tree.flatten(report_trace.out_info)
    kinds = [_typed(*pair) for pair in zip(shapes, report_trace.jaxpr.out_avals, strict=True)]
    return treedef.unflatten(kinds)


def _typed(shape: jax.ShapeDtypeStruct, kind: Any) -> jax.ShapeDtypeStruct:
    layout = getattr(kind, "sharding", None)
    if shape.sharding is not None or layout is None or layout.mesh.empty:
        return shape
    explicit = AxisType.Explicit in layout.mesh.axis_types
    return shape.update(sharding=layout) if explicit else shape


class LoopBody:
    """The body of one loop."""

    def __init__(
        self,
        call: engine.LiftedCall,
        carry_of: Callable[[engine.RunContext], tuple[Any, Any]],
        label: str,
        carried_plain: Sequence[int] | None = None,
    ) -> None:
        self.call = call
        self.carry_of = carry_of
        self.label = label
        # The structure that one iteration sees, where its metadata differ.
        self.graphdef: GraphDef | None = None
        self.values = call.graph.values()
        self.plain, self.plain_tree = call.arguments.plain_leaves()
        self.carried_plain = range(len(self.plain)) if carried_plain is None else carried_plain
        self.carried_variables: tuple[int, ...] = ()
        self.carry_paths: list[Path] = []
        self.outputs: engine.LiftedOutputs | None = None
        # A unit, so that JAX traces it once, for its shapes and for the loop; put into the program
        # of the loop, which is then smaller and quicker to differentiate.
        self.one = jax.jit(self._one, inline=True)

    def _one(self, values: list[Any], plain: list[Any]) -> tuple[list[Any], dict[int, Any], Any]:
        """Runs one iteration."""
        positional, named = self.plain_tree.unflatten(plain)
        return self.call.run(values, positional, named, self._leave, graphdef=self.graphdef)

    def _leave(self, context: engine.RunContext) -> tuple[list[Any], dict[int, Any], Any]:
        name = self.call.name
        context.require_inputs()
        engine.check_result(context.result, name)
        given, returned = self.carry_of(context)
        returned = jax.tree.map(context.here, returned, is_leaf=is_object)
        paths, leaves = matching_leaves(given, returned, self.label, name)
        self.carry_paths = paths
        outputs = context.record_effects(self.outgoing(context))
        self.outputs, extra, apart = self.leave_more(context, outputs)
        written = zip(self.outputs.effects.written, self.outputs.written, strict=True)
        return leaves, {p: v for p, v in written if p not in apart}, extra

    def outgoing(self, context: engine.RunContext) -> Any:
        """Returns the result as it leaves the loop."""
        return context.result

    def leave_more(
        self, context: engine.RunContext, outputs: engine.LiftedOutputs
    ) -> tuple[engine.LiftedOutputs, Any, Collection[int]]:
        """Decides what leaves every iteration besides the carry: here, nothing."""
        refuse_changes(self.call, outputs, outputs.effects.updates)
        if outputs.effects.fresh:
            raise CarryError(
                f"The body of sx.{self.call.name} returned a new object where what is carried must "
                f"come back as it was given. Write into the given Module and return it."
            )
        return outputs, None, ()

    def discover(self, values: Sequence[Any], plain: Sequence[Any]) -> Any:
        """Finds which Variables are carried, and checks that their form stays."""
        leaves, written, extra = abstract_eval(self.one, list(values), list(plain))
        self.carried_variables = tuple(sorted(written))
        paths = self.call.graph.flat.leaf_paths
        for position in self.carried_variables:
            kind = type(self.call.graph.leaves[position]).__name__
            what = f"The {kind} at {format_path(paths[position])}"
            check_form(what, values[position], written[position], self.call.name)
        for path, index, after in zip(self.carry_paths, self.carried_plain, leaves, strict=True):
            check_form(f"The array at {format_path(path)}", plain[index], after, self.call.name)
        if self._vary([written[position] for position in self.carried_variables], leaves):
            return self.discover(*self.inputs(self.start(), others=(values, plain)))
        return extra

    def _vary(self, written: Sequence[Any], leaves: Sequence[Any]) -> bool:
        """Makes the carry differ between shards where the body makes it differ."""
        # Inside ``shard_map``, JAX counts this to the type, which must be the same in all
        # iterations.
        changed = False
        for inputs, positions, after in (
            (self.values, self.carried_variables, written),
            (self.plain, self.carried_plain, leaves),
        ):
            for position, kind in zip(positions, after, strict=True):
                before = inputs[position]
                inputs[position] = jax.tree.map(vary_alike, before, kind)
                changed |= not engine.same_value(before, inputs[position])
        return changed

    def differ_like(self, decision: Any) -> bool:
        """Makes the carry differ between shards where what ends the loop does."""
        # Inside ``shard_map`` shards may then run for different numbers of iterations, which JAX
        # does not count to the types of what comes out.
        values, plain = jax.tree.map(lambda _: decision, self.start())
        changed = self._vary(values, plain)
        if changed:
            self.discover(self.values, self.plain)
        return changed

    def start(self) -> tuple[list[Any], list[Any]]:
        """Returns what goes into the first iteration: (values of Variables, plain leaves)."""
        return (
            [self.values[position] for position in self.carried_variables],
            [self.plain[index] for index in self.carried_plain],
        )

    def step(
        self,
        carry: tuple[Sequence[Any], Sequence[Any]],
        values: Mapping[int, Any] | None = None,
        plain: Mapping[int, Any] | None = None,
    ) -> tuple[tuple[list[Any], list[Any]], Any]:
        """Runs one iteration, inside the loop."""
        all_values, all_plain = self.inputs(carry, values, plain)
        leaves, written, extra = self.one(all_values, all_plain)
        after = [written[position] for position in self.carried_variables], leaves
        return jax.tree.map(vary_alike, after, tuple(carry)), extra

    def inputs(
        self,
        carry: tuple[Sequence[Any], Sequence[Any]],
        values: Mapping[int, Any] | None = None,
        plain: Mapping[int, Any] | None = None,
        others: tuple[Sequence[Any], Sequence[Any]] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns all values and plain leaves that an iteration sees."""
        all_values, all_plain = map(list, others or (self.values, self.plain))
        for position, value in [
            *zip(self.carried_variables, carry[0], strict=True),
            *(values or {}).items(),
        ]:
            all_values[position] = value
        for index, leaf in [
            *zip(self.carried_plain, carry[1], strict=True),
            *(plain or {}).items(),
        ]:
            all_plain[index] = leaf
        return all_values, all_plain

    def finish(self, carry: tuple[Sequence[Any], Sequence[Any]]) -> engine.LiftedOutputs:
        """Returns the outputs of a loop that returns only the carry."""
        assert self.outputs is not None
        effects = self.outputs.effects
        final = dict(zip(self.carried_variables, carry[0], strict=True))
        treedef = jax.tree.structure(self.outputs.result)
        written = [final[position] for position in effects.written]
        return engine.LiftedOutputs(treedef.unflatten(carry[1]), written, [], effects)


def vary_alike(leaf: Any, other: Any) -> Any:
    """Returns an array that varies over another's manual mesh axes."""
    missing = varying_axes(other) - varying_axes(leaf)
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def matching_leaves(
    given: Any, returned: Any, label: str, name: str
) -> tuple[list[Path], list[Any]]:
    """Checks that the carry came back as it was given."""
    before = _with_paths(given, label)
    after = _with_paths(returned, label)
    if jax.tree.structure(given, is_leaf=is_object) != jax.tree.structure(
        returned, is_leaf=is_object
    ):
        raise CarryError(
            f"What is carried in sx.{name} must come back with the structure it was given, but "
            f"{_difference(dict(before), dict(after), given, returned)}. Return every part of it, "
            f"in the same containers."
        )
    for (path, one), (_, other) in zip(before, after, strict=True):
        if (isinstance(one, Object) or isinstance(other, Object)) and one is not other:
            found = type(other).__name__ if isinstance(other, Object) else "array"
            kind = type(one).__name__ if isinstance(one, Object) else "array"
            raise CarryError(
                f"The {kind} at {format_path(path)}, which is carried in sx.{name}, came back as "
                f"another {found}. A Module is carried as the object it is: write "
                f"into it (v[...] = new, sx.update(model, new)) and return it."
            )
    plain = [
        (path, other)
        for (path, one), (_, other) in zip(before, after, strict=True)
        if not isinstance(one, Object)
    ]
    return [path for path, _ in plain], [leaf for _, leaf in plain]


def _with_paths(tree: Any, label: str) -> list[tuple[Path, Any]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object)
    return [((label, *(plain_path(path) if path else ())), leaf) for path, leaf in pairs]


def _difference(before: Mapping[Path, Any], after: Mapping[Path, Any], given: Any, got: Any) -> str:
    missing = [format_path(path) for path in before if path not in after]
    extra = [format_path(path) for path in after if path not in before]
    if any(missing) or any(extra):
        parts = [
            *([f"{', '.join(missing)} is missing"] if any(missing) else []),
            *([f"{', '.join(extra)} is new"] if any(extra) else []),
        ]
        return " and ".join(parts)
    return f"a {type(given).__name__} came back as a {type(got).__name__}"


def form(value: Any) -> str:
    """Returns the form of a value for messages, like ``float32[2,3]``."""
    # Over Explicit mesh axes the layout is part of the type, and of the form.
    shown = jax.tree.map(_leaf_form, value)
    text = shown if isinstance(shown, str) else str(shown).replace("'", "")
    specs = {explicit_spec(leaf) for leaf in jax.tree.leaves(value)} - {""}
    return text + "".join(f" sharded as {spec}" for spec in sorted(specs))


def explicit_spec(leaf: Any) -> str:
    """Returns an array's spec over Explicit mesh axes, or ""."""
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
    return "" if spec is None or all(entry is None for entry in spec) else str(spec)


def _leaf_form(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"


def check_form(what: str, before: Any, after: Any, name: str) -> None:
    """Raises if the form of the carry changed."""
    if jax.tree.structure(before) == jax.tree.structure(after) and all(
        _same_type(a, b)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ):
        return
    explicit = any(explicit_spec(leaf) for leaf in jax.tree.leaves((before, after)))
    hint = ", jax.sharding.reshard(new, spec)" if explicit else ""
    raise CarryError(
        f"{what} changes its form in the body of sx.{name}: from {form(before)} to {form(after)}. "
        f"All iterations share one program, so what goes from one to the next keeps structure, "
        f"shape and dtype. Start with the form it will have, or convert what is written: "
        f"new.astype(old.dtype){hint}."
    )


def _same_type(before: Any, after: Any) -> bool:
    if jnp.shape(before) != jnp.shape(after) or explicit_spec(before) != explicit_spec(after):
        return False
    old, new = jnp.result_type(before), jnp.result_type(after)
    # What starts as a Python number takes the dtype of what the body makes of it, as in JAX.
    weak = isinstance(before, (bool, int, float, complex)) or getattr(before, "weak_type", False)
    return old == new or (weak and jnp.result_type(before, after) == new)


def refuse_changes(
    call: engine.LiftedCall,
    outputs: engine.LiftedOutputs,
    changed: Sequence[int] | Mapping[int, Any],
) -> None:
    """Raises if a body changed the structure of its Modules."""
    effects = outputs.effects
    for index in changed:
        path = format_path(call.graph.flat.paths[index])
        old, new = call.graph.flat.graphdef.objects[index], effects.updates[index]
        raise CarryError(
            f"The body of sx.{call.name} changes the structure of the {old.type.__name__} at "
            f"{path}: {describe_change(old, new)}. The body is traced once for all iterations, so "
            f"the change would happen once. Make it before the loop; in the body, write values of "
            f"Variables (v[...] = new)."
        )


def describe_change(old: Any, new: Any) -> str:
    """Returns, for messages, how the definition of an object changed."""
    before, after = getattr(old, "attributes", None), getattr(new, "attributes", None)
    if before is None or after is None:
        same = getattr(old, "metadata", None) == getattr(new, "metadata", None)
        return "its items change" if same else "its metadata change"
    first = dict([*before, *old.array_attributes])
    second = dict([*after, *new.array_attributes])
    changes = [
        *(f".{name} is new" for name in second if name not in first),
        *(f".{name} is removed" for name in first if name not in second),
        *(f".{name} is set" for name in first if name in second and first[name] != second[name]),
    ]
    return ", ".join(changes) or "its type or order of attributes changes"


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any) -> Any:
    """Runs a function over Modules while a condition holds, as ``jax.lax.while_loop`` does.

    The body may write Variables, passed or reached through a closure, and draw random numbers; only
    those that it writes are carried. The condition only reads. As in JAX, the loop has a
    forward-mode but no reverse-mode derivative; see ``bounded_while_loop``.

    Args:
        cond_fun: Called as ``cond_fun(carry)``; returns a boolean of shape ().
        body_fun: Called as ``body_fun(carry)``; returns the next carry: the same structure, shapes
            and dtypes, Modules as the objects they are.
        init: The first carry: arrays, Modules, Variables and pytrees of these.

    Returns:
        The last carry.

    Raises:
        CarryError: If the body changes the form of the carry or of a Variable, or the structure of
            a Module.
        DecisionError: If the condition does not return one boolean, or writes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> counter = sx.Variable(jnp.int32(0))
        >>> def double(x):
        ...     counter[...] = counter + 1
        ...     return 2 * x
        >>> float(sx.while_loop(lambda x: x < 100, double, jnp.float32(1))), int(counter)
        (128.0, 7)
    """

    def attempt(captured: list[Variable[Any]]) -> Any:
        call = engine.LiftedCall("while_loop", [body_fun, cond_fun], [init], {}, captured=captured)
        body, condition = body_and_condition(call)
        carry = jax.lax.while_loop(condition, lambda carry: body.step(carry)[0], body.start())
        return call.apply(body.finish(carry))

    return engine.retry_captured(attempt)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Runs a function over Modules a number of times, as ``jax.lax.fori_loop`` does.

    With Python integers as bounds the loop has a reverse-mode derivative.

    Args:
        lower: The first index, an integer of shape ().
        upper: The index to stop before.
        body_fun: Called as ``body_fun(index, carry)``; returns the next carry, as for
            ``while_loop``.
        init: The first carry, as for ``while_loop``.
        unroll: As in ``jax.lax.fori_loop``.

    Returns:
        The last carry.

    Raises:
        CarryError: As for ``while_loop``.
        DecisionError: If a bound is not one integer.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jnp.int32(0))
        >>> def add(i, total):
        ...     total += i
        ...     return total
        >>> sx.fori_loop(0, 5, add, total) is total, int(total)
        (True, 10)
    """
    first = as_integer(lower, "lower of sx.fori_loop")
    stop = as_integer(upper, "upper of sx.fori_loop")
    index = jnp.zeros((), jnp.result_type(first, stop))

    def attempt(captured: list[Variable[Any]]) -> Any:
        call = engine.LiftedCall("fori_loop", [body_fun], [index, init], {}, captured=captured)
        engine.check_operands(call)
        count = len(jax.tree.leaves(list(call.arguments.plain)))
        body = LoopBody(
            call, lambda context: (context.args[1], context.result), call.labels[1], range(1, count)
        )
        body.discover(body.values, body.plain)
        body.differ_like(first)
        body.differ_like(stop)

        def step(i: Any, carry: Any) -> Any:
            return body.step(carry, plain={0: jax.lax.convert_element_type(i, index.dtype)})[0]

        carry = jax.lax.fori_loop(first, stop, step, body.start(), unroll=unroll)
        return call.apply(body.finish(carry))

    return engine.retry_captured(attempt)


class ReadOnlyFunction:
    """A function of the carry that only reads, such as a condition."""

    def __init__(self, body: LoopBody, which: int, role: str, finish: Callable[[Any], Any]) -> None:
        self.body = body
        self.which = which
        self.role = role
        self.finish = finish
        # Compiled as a unit so that JAX traces it once.
        self.one = jax.jit(self._one, inline=True)

    def __call__(self, carry: tuple[Sequence[Any], Sequence[Any]]) -> Any:
        return self.one(*self.body.inputs(carry))

    def _one(self, values: list[Any], plain: list[Any]) -> Any:
        positional, named = self.body.plain_tree.unflatten(plain)
        return self.body.call.run(values, positional, named, self._leave, which=self.which)

    def _leave(self, context: engine.RunContext) -> Any:
        call = self.body.call
        for item in context.captured():
            self._refuse(item.outer, engine.path_of(call.functions, item.outer))
        effects = context.record_effects(None).effects
        for position in effects.written:
            self._refuse(call.graph.leaves[position], call.graph.flat.leaf_paths[position])
        for index in effects.updates:
            self._refuse(call.graph.objects()[index], call.graph.flat.paths[index])
        return self.finish(context.result)

    def _refuse(self, item: Any, path: Path) -> None:
        raise DecisionError(
            f"The {self.role} of sx.{self.body.call.name} changes the {type(item).__name__} at "
            f"{format_path(path)}, but it only reads: it may be asked at other times than the body "
            f"runs. Write in the body (draw random numbers there, too), and keep what it needs in "
            f"the carry."
        )


def body_and_condition(call: engine.LiftedCall) -> tuple[LoopBody, ReadOnlyFunction]:
    """Returns the first two functions of a call, the form of the carry settled."""
    engine.check_operands(call)
    body = LoopBody(call, lambda context: (context.args[0], context.result), call.labels[0])
    body.discover(body.values, body.plain)
    what = f"What the condition of sx.{call.name} returns"
    condition = ReadOnlyFunction(body, 1, "condition", lambda result: as_predicate(result, what))
    while body.differ_like(jax.eval_shape(condition, body.start())):
        pass
    return body, condition
