# SPDX-License-Identifier: Apache-2.0
"""``custom_vjp``: functions over Modules with a derivative of their author's.

A *rule* is two functions. ``fwd`` takes the arguments of the function and returns (result,
residuals); it runs in place of the function when that is differentiated. ``bwd`` takes the
residuals and the cotangent of the result and returns one gradient per argument.

JAX may run ``fwd`` and ``bwd`` long after the call, when the transforms around it are over: a
compiled function is differentiated when its trace has ended. What they use must be known by then.
So ``fwd`` is *explored* first, that is, traced once for what it captures and writes. Captured
Variables become inputs of the call; ``bwd`` gets what it needs from ``fwd``, as residuals: arrays,
Modules, Variables and static values, packed as one pytree node with the structure as static data.

*Differentiable* inputs have a gradient by the rule: chosen Variables, and the plain parts of
differentiable arguments. Other Variables, captured ones, and arguments in ``nondiff_argnums`` do
not; differentiating one of these is an error, since its gradient would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.cross_process import PickledByName
from shardax._core.frames import Frame, kind_of, local
from shardax._core.graph.flatten import GraphDef, build, flatten, is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object
from shardax._core.state.state import State
from shardax._core.variable import Param, Variable
from shardax._transforms.errors import ClosureError, TransformError, forward_mode
from shardax._transforms.grad import grad as diff
from shardax._transforms.grad.custom_jvp import check_same_effects, nondiff_position, record_arrays
from shardax._transforms.jit import eager
from shardax._transforms.lift import binding, engine
from shardax._transforms.lift.arguments import (
    by_position,
    join_argument,
    root_places,
    split_argument,
)
from shardax._transforms.lift.prefix import expand


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "plain"],
    meta_fields=["graphdef", "template"],
)
@dataclasses.dataclass(eq=False)
class PackedResiduals:
    """Arrays, objects and static values, as a pytree of arrays."""

    values: Leaf  # of all Variables
    plain: Leaf  # the other arrays
    graphdef: GraphDef  # the structure of the objects
    template: PyTree  # how objects, arrays and static values stand together

    def unpack(self, frame: Frame) -> PyTree:
        """Returns what was packed, with new objects that a frame owns."""
        roots, _ = build(self.graphdef, self.values, frame)
        return join_argument(self.template, self.plain, roots)


def pack_residuals(item: object) -> PackedResiduals:
    """Packs an item with the present values of its Variables."""
    roots: list[PyTree] = []
    template, plain = split_argument(item, roots, auto_static=True, static_numbers=True)
    graph = binding.InputGraph(roots)
    return PackedResiduals(graph.values(), plain, graph.flat.graphdef, template)


def used_inputs(jaxpr: Any, outputs_used: Sequence[bool] | None = None) -> list[bool]:
    """Returns which inputs of a program its results depend on."""
    # Programs inside an equation are looked into where their inputs and outputs are those of the
    # equation, as for compiled, rematerialised and custom functions.
    flags = [True] * len(jaxpr.outvars) if outputs_used is None else outputs_used
    live = {id(item) for item, flag in zip(jaxpr.outvars, flags, strict=True) if flag}
    for equation in reversed(jaxpr.eqns):
        results = [id(item) in live for item in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        inner = _inner_program(equation)
        needed = [True] * len(equation.invars)
        if inner is not None and not equation.effects:
            needed = used_inputs(inner, results)
        live |= {id(item) for item, flag in zip(equation.invars, needed, strict=True) if flag}
    return [id(item) in live for item in jaxpr.invars]


def _inner_program(equation):
    """Returns the one program inside an equation with its signature."""
    if equation.primitive.name in _REPEATED:
        return None
    programs = [*_jax.inner_jaxprs(equation)]
    if len(programs) != 1:
        return None
    same = (len(programs[0].invars), len(programs[0].outvars))
    return programs[0] if same == (len(equation.invars), len(equation.outvars)) else None


# What one round does not use, another may: their results are also inputs.
_REPEATED = frozenset({"scan", "while"})


class VjpFrame(Frame):
    """The frame of a function or its ``fwd``."""

    __slots__ = ("by_closure", "rule")

    def __init__(self, rule: CustomVjp, name: str) -> None:
        super().__init__(name)
        self.rule = rule
        self.by_closure: set[int] = set()  # ``id`` of stand-ins of arguments

    def reached(self, stand_in: PyTree) -> PyTree:
        self.by_closure.add(id(stand_in))
        return stand_in


class BackwardFrame(Frame):
    """The frame of ``bwd``, which runs when the call is over."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., PyTree], name: str) -> None:
        super().__init__(name)
        self.function = function

    def capture(self, outer: Any) -> PyTree:
        """Refuses what ``bwd`` was not given."""
        name = format_path(engine.path_of([self.function], outer)).removeprefix(".")
        raise ClosureError(
            f"bwd of sx.custom_vjp uses the {kind_of(outer)} {name}, which it was not "
            f"given. It may run long after the call, when that value is another. Let fwd return "
            f"it among the residuals."
        )


class CustomVjpCall:
    """One call."""

    def __init__(
        self,
        rule: CustomVjp,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        captured: Sequence[Variable],
    ) -> None:
        assert rule.fwd is not None
        self.rule = rule
        self.nondiff, chosen = _arguments(rule, len(args))
        arguments = {**{i: args[i] for i in self.nondiff}, **kwargs}
        static = {key for key, value in arguments.items() if not _holds_data(value)}
        self.static = {key: value for key, value in arguments.items() if key in static}
        make_frame = functools.partial(VjpFrame, rule)
        functions = [rule.function, rule.fwd]
        self.call = engine.LiftedCall(
            "custom_vjp", functions, args, kwargs, make_frame, captured, static, auto_static=True
        )
        self.targets = [diff.DiffArgument(self.call, item) for item in chosen]
        self.indices = sorted({entry.leaf for target in self.targets for entry in target.entries})
        self.positions = [target.position for target in self.targets if target.has_plain]
        # How differentiable Variables arrive without a gradient too, by their index.
        self.second_ways = self._arrivals_without_gradient()
        self.effects: binding.Effects | None = None
        self.emit: frozenset[int] = frozenset()
        self.known: list[tuple[Any, int]] = []
        self.written_paths: list[Path] = list(self.call.graph.flat.leaf_paths)
        self.fresh_paths: list[Path] = []
        self.like: PyTree = None
        self.varying: Any = None
        self.fwd_ran = False  # to its end, as it does where the call is differentiated

    def run(self) -> PyTree:
        values, arguments = self.call.graph.values(), self.call.arguments
        plain, named = list(arguments.plain), arguments.plain_named
        self.like = jax.tree.map(_like, (values, plain))
        differentiable = ([values[i] for i in self.indices], [plain[p] for p in self.positions])
        self.varying = jax.tree.map(_jax.varying_axes, differentiable)
        nondifferentiable = (
            diff.replaced(values, self.indices, [None] * len(self.indices)),
            diff.replaced(plain, self.positions, [None] * len(self.positions)),
            named,
        )
        used = self._explore(differentiable, nondifferentiable)
        differentiable = (self._guarded_twice(differentiable[0]), differentiable[1])
        transformed = jax.custom_vjp(functools.partial(self._run, 0, self._leave))
        transformed.defvjp(functools.partial(self._run, 1, self._leave_forward), self._backward)
        inputs = (differentiable, self._guarded(nondifferentiable, used))
        try:
            result, written, fresh = transformed(*inputs)
        except TypeError as error:
            if not self.fwd_ran or not _has_reverse_mode(transformed, inputs):
                raise
            raise forward_mode(self.rule) from error
        if not self.rule.state_cotangents:
            written, fresh = jax.lax.stop_gradient((written, fresh))
        assert self.effects is not None
        outputs = binding.LiftedOutputs(result, written, fresh, self.effects)
        out = self.call.apply(outputs)
        known, self.known = self.known, []
        self.call.release(known)
        return out

    def _explore(self, differentiable: object, nondifferentiable: object) -> list[bool]:
        """Explores ``fwd``; returns which nondifferentiable arrays it uses."""
        count = len(jax.tree.leaves(nondifferentiable))
        frame = local.frame
        while frame is not None:
            if isinstance(frame, VjpFrame) and frame.rule is self.rule:
                return [True] * count  # fwd calls the function itself, as is usual
            frame = frame.parent

        def leave(context: engine.RunContext):
            outputs, packed = self._forward(context)
            self.known, self.emit = context.known(), frozenset(outputs.effects.written)
            for index in self.indices:
                by_closure = getattr(context.frame, "by_closure", ())
                if id(context.variable(index)) in by_closure:
                    self.second_ways[index] = "by a closure"
            return outputs, packed

        try:
            program = jax.make_jaxpr(functools.partial(self._run, 1, leave))(
                differentiable, nondifferentiable
            )
        except engine.RetraceRequest:
            raise
        except Exception:  # noqa: BLE001 (it is raised again, should fwd really run)
            return [True] * count
        used = used_inputs(program.jaxpr)
        return used[len(used) - count :]

    def _guarded(self, nondifferentiable, used: Sequence[bool]):
        """Forbids gradients of the nondifferentiable inputs that are used."""
        values, plain, named = nondifferentiable
        leaves, treedef = jax.tree.flatten(nondifferentiable)
        names: list[str] = []
        for position, value in enumerate(values):
            kind = kind_of(self.call.graph.leaves[position])
            where = f"the {kind} at {format_path(self.written_paths[position])}"
            names += [where] * len(jax.tree.leaves(value))
        labelled = [*zip(self.call.labels, plain, strict=True), *sorted(named.items())]
        for label, part in labelled:
            names += [f"the argument {label!r}"] * len(jax.tree.leaves(part))
        guarded = [
            forbid_gradient(leaf, _LOST.format(name=name)) if needed else leaf
            for leaf, name, needed in zip(leaves, names, used, strict=True)
        ]
        return treedef.unflatten(guarded)

    def _arrivals_without_gradient(self) -> dict[int, str]:
        """Returns how chosen Variables arrive in arguments that do not choose them."""
        arguments, chosen = self.call.arguments, {}
        for target in self.targets:
            chosen[target.label] = {entry.leaf for entry in target.entries}
        indices = {id(leaf): i for i, leaf in enumerate(self.call.graph.flat.leaves)}
        differentiable, ways = set(self.indices), {}
        bound = [f for f in self.call.functions if not isinstance(f, types.FunctionType)]
        if bound:
            leaves = {indices[id(leaf)] for leaf in binding.InputGraph(bound).flat.leaves}
            ways |= dict.fromkeys(leaves & differentiable, "in the function itself")
        labelled = zip(self.call.labels, arguments.templates, strict=True)
        for label, template in [*labelled, *arguments.named]:
            for root, _ in root_places(label, template):
                leaves = {indices[id(leaf)] for leaf in flatten(arguments.roots[root]).leaves}
                lost = leaves.intersection(differentiable) - chosen.get(label, set())
                ways |= dict.fromkeys(lost, f"in the argument {label!r}")
        return ways

    def _guarded_twice(self, values: Sequence[object]) -> list[Any]:
        """Forbids gradients of Variables that arrive without one, too."""
        guarded = list(values)
        for place, index in enumerate(self.indices):
            if index in self.second_ways:
                kind = kind_of(self.call.graph.leaves[index])
                name = f"the {kind} at {format_path(self.written_paths[index])}"
                text = _LOST_IN_PART.format(name=name, way=self.second_ways[index])
                forbid = functools.partial(forbid_gradient, message=text)
                guarded[place] = jax.tree.map(forbid, values[place])
        return guarded

    def _run(
        self,
        which: int,
        leave: Callable[[engine.RunContext], PyTree],
        differentiable,
        nondifferentiable,
    ):
        values = diff.replaced(nondifferentiable[0], self.indices, differentiable[0])
        plain = diff.replaced(nondifferentiable[1], self.positions, differentiable[1])
        return self.call.run(values, plain, nondifferentiable[2], leave, which)

    def _leave(self, context: engine.RunContext):
        outputs = record_arrays(context, context.result, "custom_vjp", self.emit)
        self._check_same_effects(context, outputs.effects)
        if not self.known:
            self.known = context.known()
        return outputs.result, outputs.written, outputs.fresh

    def _leave_forward(self, context: engine.RunContext):
        outputs, packed = self._forward(context)
        self._check_same_effects(context, outputs.effects)
        self.fwd_ran = True
        diff.note_vjp(self.rule)
        return (outputs.result, outputs.written, outputs.fresh), packed

    def _forward(self, context: engine.RunContext) -> tuple[binding.LiftedOutputs, PackedResiduals]:
        form = "(result, residuals)"
        result = binding.returned_pair(context.result, "fwd of sx.custom_vjp", form)
        nondiff = [context.args[i] for i in self.nondiff if i not in self.static]
        packed = pack_residuals([nondiff, result[1]])
        return record_arrays(context, result[0], "custom_vjp", self.emit), packed

    def _check_same_effects(self, context: engine.RunContext, effects: binding.Effects) -> None:
        """Checks that every run has the effects of the first."""
        first = self.effects
        if first is None:
            self.effects, self.emit = effects, frozenset(effects.written)
            self.fresh_paths = _fresh_paths(context, effects)
            return
        check_same_effects(first, effects, self.written_paths, "fwd", "custom_vjp")

    def _backward(self, packed: PackedResiduals, cotangents):
        bwd, (of_result, of_written, of_fresh) = self.rule.bwd, cotangents
        assert bwd is not None
        with BackwardFrame(bwd, "custom_vjp") as frame:
            values, residuals = packed.unpack(frame)
            remaining = iter(values)
            nondiff = [
                self.static[i] if i in self.static else next(remaining) for i in self.nondiff
            ]
            extra = [self._of_state(of_written, of_fresh)] if self.rule.state_cotangents else []
            return self._arrange(bwd(*nondiff, residuals, of_result, *extra)), None

    def _of_state(self, of_written: Sequence[object], of_fresh: Sequence[object]) -> State:
        assert self.effects is not None
        paths = [self.written_paths[position] for position in self.effects.written]
        pairs = [
            *zip(paths, of_written, strict=True),
            *zip(self.fresh_paths, of_fresh, strict=True),
        ]
        return State.from_flat(
            {
                path: value
                for path, value in pairs
                if any(diff.is_differentiable(leaf) for leaf in jax.tree.leaves(value))
            }
        )

    def _arrange(self, gradients: object) -> tuple[list[Any], list[Any]]:
        """Returns what ``bwd`` returned like the moving inputs."""
        labels = [target.label for target in self.targets]
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(labels):
            count = f" of {len(gradients)}" if isinstance(gradients, (tuple, list)) else ""
            raise TransformError(
                f"bwd of sx.custom_vjp must return a tuple with one gradient for each of "
                f"({', '.join(labels)}), but it returned a {type(gradients).__name__}{count}."
            )
        values, plain = self.like
        tangents = diff.Tangents("gradient", values, strict=False)
        parts: dict[int, Any] = {}
        for target, gradient in zip(self.targets, gradients, strict=True):
            like = plain[target.position]
            leaves = target.place(gradient, like, tangents)
            parts[target.position] = jax.tree.structure(like).unflatten(leaves)
        nothing = {index: jax.tree.map(lambda _: None, values[index]) for index in self.indices}
        of_values = [tangents.by_index.get(index, nothing[index]) for index in self.indices]
        of_plain = [parts[position] for position in self.positions]
        return jax.tree.map(
            _with_varying, self.varying, (of_values, of_plain), is_leaf=lambda item: item is None
        )


def _has_reverse_mode(function: Callable[..., object], inputs: tuple[object, ...]) -> bool:
    """Whether a function that JAX refused to differentiate has a derivative backward."""
    try:
        jax.make_jaxpr(lambda *values: jax.vjp(function, *values)[0])(*inputs)
    except Exception:  # noqa: BLE001 (then it is not the mode that JAX refuses)
        return False
    return True


def _arguments(rule: CustomVjp, count: int) -> tuple[list[int], list[diff.DiffState]]:
    """Returns the positions without gradient, and what is differentiated in the others."""
    positions = rule.nondiff_argnums
    items = list(positions) if isinstance(positions, (tuple, list)) else [positions]
    filters: dict[int, Any] = {}
    nondiff: list[int] = []
    for item in items:
        argnum = item.argnum if isinstance(item, diff.DiffState) else int(item)
        position = nondiff_position(argnum, count)
        if position in filters or position in nondiff:
            raise TransformError(f"nondiff_argnums names the argument {argnum} twice.")
        if isinstance(item, diff.DiffState):
            filters[position] = item.filter
        else:
            nondiff.append(position)
    chosen = [
        diff.DiffState(position, filters.get(position, rule.wrt))
        for position in range(count)
        if position not in nondiff
    ]
    return sorted(nondiff), chosen


def _holds_data(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return any(isinstance(leaf, Object) or hasattr(leaf, "dtype") for leaf in leaves)


def _like(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), diff.dtype_of(leaf))


def _with_varying(axes: frozenset[str], gradient: object):
    """Returns a gradient that varies over its input's manual axes."""
    # An input that all shards share has one gradient, the sum of what they give.
    if gradient is None:
        return None
    present = _jax.varying_axes(gradient)
    if present - axes:
        gradient = jax.lax.psum(gradient, tuple(sorted(present - axes)))
    if axes - present:
        gradient = jax.lax.pcast(gradient, tuple(sorted(axes - present)), to="varying")
    return gradient


def _fresh_paths(context: engine.RunContext, effects: binding.Effects) -> list[Path]:
    """Returns the path of each new Variable."""
    names = [*zip(context.call.labels, context.args, strict=True), *sorted(context.kwargs.items())]
    paths = {
        id(leaf): path
        for label, arg in names
        for path, leaf, _ in expand(None, arg, "", (label,))
        if isinstance(leaf, Variable)
    }
    return [paths.get(key, (str(place),)) for place, key in enumerate(effects.fresh_ids)]


_LOST = (
    "A gradient is asked for {name}, which a function made by sx.custom_vjp uses but whose rule "
    "gives none: it would be lost. Make it differentiable (pass it as an argument, outside "
    "nondiff_argnums, with wrt=... or nondiff_argnums=sx.DiffState(argnum, filter) choosing it) "
    "and let bwd return its gradient, or None; or cut it before the call with "
    "jax.lax.stop_gradient."
)
_LOST_IN_PART = (
    "A gradient is asked for {name}, which a function made by sx.custom_vjp gets twice: in a "
    "differentiable argument and {way}, for which the rule gives no gradient, so a part of it "
    "would be lost. Read it by the differentiable argument alone; or pass it by two that are not "
    "in nondiff_argnums, and let bwd return its whole gradient for one, and None for the other."
)


def forbid_gradient(value: object, message: str) -> PyTree:
    """Returns a value that it is an error to differentiate."""
    if not isinstance(value, Tracer) or not diff.is_differentiable(value):
        return value

    @jax.custom_jvp
    def same(value) -> PyTree:
        return value

    @same.defjvp
    def refuse(primals: object, tangents: object):
        raise TransformError(message)

    return same(value)


@engine.decorator
def custom_vjp(function: Any = None, *, nondiff_argnums: Any = (), wrt: Any = Param) -> Any:
    """Makes a function over Modules whose derivative is given by ``defvjp``.

    Values that the function, or ``fwd`` in its place, writes into Variables are carried back. They
    carry no gradient, unless ``bwd`` asks for it (``defvjp(..., state_cotangents=True)``).

    Args:
        function: A function, method or callable Module that returns arrays. Left out: returns a
            decorator.
        nondiff_argnums: Positions of arguments without a gradient: static values, functions,
            Modules, arrays. ``bwd`` gets them first. A ``DiffState`` in their place says which
            Variables of that argument have one.
        wrt: Filter of the Variables that have a gradient in other Module arguments.

    Returns:
        A function of the same arguments, with a method ``defvjp``. Arguments may be passed by name,
        but keyword-only ones have no gradient.

    Raises:
        TransformError: When called without ``defvjp``, or when something is differentiated for
            which the rule gives no gradient; when differentiated, if a gradient that ``bwd``
            returned fits nothing.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_vjp
        ... def apply(layer, x):
        ...     return layer(x)
        >>> def fwd(layer, x):
        ...     return layer(x), (layer, x)
        >>> def bwd(residuals, ct):
        ...     layer, x = residuals
        ...     return {"kernel": jnp.outer(x, ct).clip(-1, 1)}, layer.kernel.value @ ct
        >>> apply.defvjp(fwd, bwd)
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> loss = lambda layer, x: apply(layer, x).sum()
        >>> sx.grad(loss)(layer, jnp.array([0.5, 2.0]))["kernel"].tolist()
        [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]]
    """
    return CustomVjp(function, nondiff_argnums, wrt)


class CustomVjp(PickledByName):
    """A function made by ``custom_vjp``.

    Args:
        function: The user's function.
        nondiff_argnums: As for ``custom_vjp``.
        wrt: As for ``custom_vjp``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_vjp
        ... def straight_through(x):
        ...     return jnp.round(x)
        >>> straight_through.defvjp(lambda x: (jnp.round(x), None), lambda residuals, ct: (ct,))
        >>> float(sx.grad(straight_through)(1.7))
        1.0
    """

    # Apart from what is only shown, which ``functools.wraps`` may overwrite.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "bwd",
        "function",
        "fwd",
        "nondiff_argnums",
        "state_cotangents",
        "wrt",
    )

    def __init__(self, function: Callable[..., PyTree], nondiff_argnums: Any, wrt: Any) -> None:
        engine.wraps(function)(self)
        self.function = function
        self.nondiff_argnums = nondiff_argnums
        self.wrt = wrt
        self.fwd: Callable[..., PyTree] | None = None
        self.bwd: Callable[..., PyTree] | None = None
        self.state_cotangents = False

    def defvjp(
        self,
        fwd: Callable[..., PyTree],
        bwd: Callable[..., PyTree],
        *,
        state_cotangents: bool = False,
    ) -> None:
        """Gives the derivative.

        Args:
            fwd: Takes the arguments of the function; returns (result, residuals). Residuals may
                hold arrays, Variables, Modules (as ``fwd`` left them) and static values. It may
                write Variables, and should write those that the function does: when the function is
                differentiated, what ``fwd`` writes is what is carried back.
            bwd: Called as ``bwd(*nondiff, residuals, cotangent)`` with the cotangent arranged like
                the result. Returns a tuple with one gradient per argument that is not in
                ``nondiff_argnums``: for a Module a ``State`` or nested mapping by path, for a
                Variable an array, for anything else the same pytree; ``None``, and what is left
                out, is zero. The Modules it gets are copies of its own, and what it writes into
                them goes nowhere.
            state_cotangents: Whether ``bwd`` also gets the cotangents of what ``fwd`` wrote, as a
                last argument: a ``State`` by path, the first step being the argument's name.
                Without it, gradients stop at written values.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> @sx.custom_vjp(wrt=sx.Cache)
            ... def put(cache, x):
            ...     cache[...] = 2 * x
            ...     return x
            >>> def fwd(cache, x):
            ...     return put(cache, x), None
            >>> def bwd(residuals, ct, written):
            ...     return None, ct + 2 * written["cache"]
            >>> put.defvjp(fwd, bwd, state_cotangents=True)
            >>> cache = sx.Cache(jnp.zeros(()))
            >>> def loss(x):
            ...     put(cache, x)
            ...     return 10 * cache.value
            >>> float(sx.grad(loss)(1.0))
            20.0
        """
        self.fwd, self.bwd, self.state_cotangents = fwd, bwd, bool(state_cotangents)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if self.fwd is None or self.bwd is None:
            raise TransformError(
                f"{self!r} has no derivative yet. Give it one before the first call: "
                f"f.defvjp(fwd, bwd)."
            )
        positional, named = by_position(self.function, args, kwargs, fill="all")
        if self.nondiff_argnums:  # a call by values, which ``eager`` does not compare
            return _custom_vjp((self,), None, positional, named)
        return eager.run(_custom_vjp, (self,), None, positional, named)

    def __repr__(self) -> str:
        return f"<custom_vjp of {getattr(self.function, '__qualname__', self.function)}>"


def _custom_vjp(
    functions: Sequence[CustomVjp], _: None, args: Sequence[object], kwargs: Mapping[str, object]
):
    (rule,) = functions

    def attempt(captured: list[Variable]):
        return CustomVjpCall(rule, args, kwargs, captured).run()

    return engine.retry_captured(attempt)
