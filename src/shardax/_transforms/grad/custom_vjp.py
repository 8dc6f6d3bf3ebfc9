# SPDX-License-Identifier: Apache-2.0
"""``custom_vjp``: functions over Modules with a derivative of their author's, in reverse mode.

The rule is two functions. ``fwd`` takes the arguments of the function and returns (result,
residuals); it runs in place of the function when that is differentiated. ``bwd`` takes the
residuals and the cotangent of the result and returns one gradient per argument.

What differs from ``custom_jvp`` (see ``ruled_call`` for what they share):

- JAX may run ``fwd`` when the call is over. What it captures and writes must be known by then, so
  it is *explored* first: traced once for that. Captured Variables become inputs of the call.
- ``bwd`` runs outside of the call. It gets all it needs from ``fwd``, as residuals: arrays,
  Modules, Variables and static values, packed as one pytree node with the structure as static data.
- Only an input that ``fwd`` uses is guarded against a derivative, since a gradient of the whole
  model asks for all of its Variables.
- A Variable may arrive twice: in an argument that has a gradient by the rule, and by a way that has
  none, such as a closure. A part of its gradient would be lost, so that is an error, too.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from shardax._core import _jax
from shardax._core.array_ops import dtype_of, is_differentiable
from shardax._core.frames import Frame, kind_of, local
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.flatten import build, flatten
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.state.filters import Filter
from shardax._core.state.state import State
from shardax._core.variable import Variable
from shardax._core.variable_types import Param
from shardax._transforms.errors import ClosureError, TransformError, forward_mode
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import Argnums, DiffPair
from shardax._transforms.grad.forward_mode import note_vjp_rule
from shardax._transforms.grad.liveness import used_inputs
from shardax._transforms.grad.ruled_call import (
    FUNCTION,
    RULE,
    Others,
    Outputs,
    RuledCall,
    RuledFunction,
    refuse_derivative,
)
from shardax._transforms.jit import eager
from shardax._transforms.lift.arguments import join_argument, root_places, split_argument
from shardax._transforms.lift.effects import LiftedOutputs, returned_pair
from shardax._transforms.lift.engine import RetraceRequest, RunContext, retry_captured
from shardax._transforms.lift.frames import path_of
from shardax._transforms.lift.input_graph import InputGraph
from shardax._transforms.lift.prefixes import expand
from shardax._transforms.lift.signatures import by_position
from shardax._transforms.lift.transformed import decorator


@decorator
def custom_vjp(
    function: Callable[..., PyTree] | None = None,
    *,
    nondiff_argnums: Argnums = (),
    wrt: Filter = Param,
) -> CustomVjp:
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
    assert function is not None  # ``decorator`` makes a decorator without it
    return CustomVjp(function, nondiff_argnums, wrt)


class CustomVjp(RuledFunction):
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

    __slots__ = ("bwd", "fwd", "state_cotangents")
    transform = "custom_vjp"

    def __init__(
        self, function: Callable[..., PyTree], nondiff_argnums: Argnums, wrt: Filter
    ) -> None:
        super().__init__(function, nondiff_argnums, wrt)
        self.fwd: Callable[..., tuple[PyTree, PyTree]] | None = None
        self.bwd: Callable[..., tuple[PyTree, ...]] | None = None
        self.state_cotangents = False

    def defvjp(
        self,
        fwd: Callable[..., tuple[PyTree, PyTree]],
        bwd: Callable[..., tuple[PyTree, ...]],
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
        self.fwd = fwd
        self.bwd = bwd
        self.state_cotangents = bool(state_cotangents)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if self.fwd is None or self.bwd is None:
            raise errors.without_rule(self, "derivative", "f.defvjp(fwd, bwd)")

        positional, named = by_position(self.function, args, kwargs, fill="all")
        if self.nondiff_argnums:  # static values, which ``eager`` does not compare
            return _custom_vjp((self,), None, positional, named)
        return eager.run(_custom_vjp, (self,), None, positional, named)


def _custom_vjp(
    functions: Sequence[CustomVjp],
    options: None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    """Runs one call; in the form that ``eager.run`` takes."""
    (custom,) = functions

    def attempt(captured: list[Variable]) -> PyTree:
        return _VjpCall(custom, args, kwargs, captured).run_transformed()

    return retry_captured(attempt)


# --- residuals ------------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "plain"],
    meta_fields=["graphdef", "template"],
)
@dataclasses.dataclass(eq=False)
class PackedResiduals:
    """Arrays, objects and static values, as a pytree of arrays."""

    values: list[PyTree]  # of all Variables
    plain: PyTree  # the other arrays
    graphdef: GraphDef  # the structure of the objects
    template: PyTree  # how objects, arrays and static values stand together

    @classmethod
    def pack(cls, residuals: PyTree) -> PackedResiduals:
        """Returns residuals with the present values of their Variables."""
        roots: list[PyTree] = []
        template, plain = split_argument(residuals, roots, auto_static=True, static_numbers=True)
        graph = InputGraph(roots)
        return cls(graph.values(), plain, graph.flat.graphdef, template)

    def unpack(self, frame: Frame) -> PyTree:
        """Returns the residuals, with new objects that a frame owns."""
        roots, _ = build(self.graphdef, self.values, frame)
        return join_argument(self.template, self.plain, roots)


# --- frames ---------------------------------------------------------------------------------------


class VjpFrame(Frame):
    """The frame of a run of a function or its ``fwd``."""

    __slots__ = ("custom", "reached_by_closure")

    def __init__(self, custom: CustomVjp, name: str) -> None:
        super().__init__(name)
        self.custom = custom
        self.reached_by_closure: set[int] = set()  # ``id`` of stand-ins of arguments

    def reached(self, stand_in: Variable) -> Variable:
        """See ``Frame.reached``."""
        self.reached_by_closure.add(id(stand_in))
        return stand_in


class BackwardFrame(Frame):
    """The frame of ``bwd``, which runs when the call is over."""

    __slots__ = ("bwd",)

    def __init__(self, bwd: Callable[..., PyTree]) -> None:
        super().__init__("custom_vjp")
        self.bwd = bwd

    def capture(self, outer: Variable) -> Variable:
        """Refuses what ``bwd`` was not given."""
        name = format_path(path_of([self.bwd], outer)).removeprefix(".")
        raise ClosureError(
            f"bwd of sx.custom_vjp uses the {kind_of(outer)} {name}, which it was not "
            f"given. It may run long after the call, when that value is another. Let fwd return "
            f"it among the residuals."
        )


def _is_called_by_its_rule(custom: CustomVjp) -> bool:
    """Whether the function is called in a run of its own ``fwd``, as is usual."""
    frame = local.frame
    while frame is not None:
        if isinstance(frame, VjpFrame) and frame.custom is custom:
            return True
        frame = frame.parent
    return False


# --- the call -------------------------------------------------------------------------------------


class _VjpCall(RuledCall):
    """One call of a function with a vjp."""

    rule_name = "fwd"

    def __init__(
        self,
        custom: CustomVjp,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        captured: Sequence[Variable],
    ) -> None:
        assert custom.fwd is not None
        make_frame = functools.partial(VjpFrame, custom)
        super().__init__(custom, custom.fwd, args, kwargs, captured, make_frame)
        self.custom = custom
        # How differentiated Variables arrive without a gradient as well, by their index.
        self.ways_without_gradient = self._find_ways_without_gradient()
        self.fresh_paths: list[Path] = []  # of the new Variables that the function makes
        # What ``bwd`` is compared with: shapes and varying axes of the inputs.
        self.shapes: tuple[Sequence[PyTree], Sequence[PyTree]] = ([], [])
        self.varying_axes: PyTree = None
        self.fwd_finished = False  # as it does where the call is differentiated

    def run_transformed(self) -> PyTree:
        """Runs the call as a function that JAX differentiates by the rule."""
        differentiated, others = self.split_inputs()

        # For ``bwd``, which may run when these values are gone.
        all_values, all_plain = self.inputs.insert(differentiated, others[0], others[1])
        self.shapes = jax.tree.map(_shape_of, (all_values, all_plain))
        self.varying_axes = jax.tree.map(_jax.varying_axes, differentiated)

        # From here on a derivative that the rule does not give is an error.
        used = self._explore(differentiated, others)
        others = self.guard(others, errors.lost_gradient, used)
        differentiated = self._guard_second_ways(differentiated)

        def function(differentiated: DiffPair, others: Others) -> Outputs:
            return self.run(FUNCTION, differentiated, others, self.leave_function)

        def fwd(differentiated: DiffPair, others: Others) -> tuple[Outputs, PackedResiduals]:
            return self.run(RULE, differentiated, others, self._leave_fwd)

        transformed = jax.custom_vjp(function)
        transformed.defvjp(fwd, self._run_bwd)
        try:
            result, written, fresh = transformed(differentiated, others)
        except TypeError as error:
            # JAX refuses forward mode, after ``fwd`` has run. Its error has no class of its own.
            if self.fwd_finished and _has_reverse_mode(transformed, differentiated, others):
                raise forward_mode(self.custom) from error
            raise

        if not self.custom.state_cotangents:
            written, fresh = jax.lax.stop_gradient((written, fresh))
        return self.finish((result, written, fresh))

    # --- fwd ---

    def _explore(self, differentiated: DiffPair, others: Others) -> list[bool]:
        """Traces ``fwd`` to know what it captures, writes and reaches by a closure.

        Returns for each array of the others whether ``fwd`` uses it. A Variable that ``fwd``
        captures ends the call by ``RetraceRequest``; it is made again with that input.
        """
        count = len(jax.tree.leaves(others))
        if _is_called_by_its_rule(self.custom):
            return [True] * count

        def leave(context: RunContext) -> tuple[LiftedOutputs, PackedResiduals]:
            result, packed = self._result_and_residuals(context)
            outputs = self.arrays_of(context, result)
            self.originals = context.known()
            self.always_written = frozenset(outputs.effects.written)
            if isinstance(context.frame, VjpFrame):
                for index in self.inputs.indices:
                    if id(context.variable(index)) in context.frame.reached_by_closure:
                        self.ways_without_gradient[index] = "by a closure"
            return outputs, packed

        def fwd(differentiated: DiffPair, others: Others) -> PyTree:
            return self.run(RULE, differentiated, others, leave)

        try:
            program = jax.make_jaxpr(fwd)(differentiated, others)
        except RetraceRequest:
            raise
        except Exception:  # noqa: BLE001 (it is raised again, should fwd really run)
            return [True] * count

        used = used_inputs(program.jaxpr)
        return used[len(used) - count :]

    def _leave_fwd(self, context: RunContext) -> tuple[Outputs, PackedResiduals]:
        result, packed = self._result_and_residuals(context)
        outputs = self.record(context, result)
        self.fwd_finished = True
        note_vjp_rule(self.custom)
        return outputs, packed

    def _result_and_residuals(self, context: RunContext) -> tuple[PyTree, PackedResiduals]:
        """Returns the result of ``fwd``, and its residuals with the arguments that ``bwd`` gets."""
        form = "(result, residuals)"
        result, residuals = returned_pair(context.result, "fwd of sx.custom_vjp", form)
        nondiff = [context.args[i] for i in self.nondiff if i not in self.static]
        return result, PackedResiduals.pack([nondiff, residuals])

    def record(self, context: RunContext, result: PyTree) -> Outputs:
        """See ``RuledCall.record``."""
        is_first = self.effects is None
        outputs = super().record(context, result)
        if is_first and self.effects is not None:
            self.fresh_paths = _fresh_paths(context, self.effects.fresh_ids)
        return outputs

    # --- bwd ---

    def _run_bwd(self, packed: PackedResiduals, cotangents: Outputs) -> tuple[DiffPair, None]:
        """Runs ``bwd``; returns the gradients of (differentiated, others)."""
        of_result, of_written, of_fresh = cotangents
        bwd = self.custom.bwd
        assert bwd is not None

        with BackwardFrame(bwd) as frame:
            nondiff, residuals = packed.unpack(frame)
            remaining = iter(nondiff)
            args = [self.static[i] if i in self.static else next(remaining) for i in self.nondiff]
            args += [residuals, of_result]
            if self.custom.state_cotangents:
                args.append(self._state_cotangents(of_written, of_fresh))
            return self._split_gradients(bwd(*args)), None

    def _state_cotangents(self, of_written: Sequence[PyTree], of_fresh: Sequence[PyTree]) -> State:
        """Returns the cotangents of what the function wrote, by path."""
        assert self.effects is not None
        paths = [self.paths[index] for index in self.effects.written] + self.fresh_paths
        cotangents = zip(paths, [*of_written, *of_fresh], strict=True)
        return State.from_flat(
            {
                path: value
                for path, value in cotangents
                if any(map(is_differentiable, jax.tree.leaves(value)))
            }
        )

    def _split_gradients(self, gradients: PyTree) -> DiffPair:
        """Returns what ``bwd`` returned, arranged like the differentiated inputs."""
        labels = [argument.label for argument in self.inputs.arguments]
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(labels):
            raise errors.wrong_count_of_gradients(labels, gradients)

        values, plain = self.shapes
        pair = self.inputs.split_tangents("gradient", gradients, values, plain, strict=False)
        return jax.tree.map(
            _with_varying_axes, self.varying_axes, pair, is_leaf=lambda axes: axes is None
        )

    # --- Variables that arrive twice ---

    def _find_ways_without_gradient(self) -> dict[int, str]:
        """Returns how differentiated Variables arrive in what has no gradient for them, too."""
        differentiated = set(self.inputs.indices)
        chosen = {
            argument.label: {variable.index for variable in argument.variables}
            for argument in self.inputs.arguments
        }
        indices = {id(leaf): index for index, leaf in enumerate(self.call.graph.flat.leaves)}
        ways: dict[int, str] = {}

        # In the object that a bound method or a callable Module holds.
        bound = [f for f in self.call.functions if not isinstance(f, types.FunctionType)]
        if bound:
            leaves = {indices[id(leaf)] for leaf in InputGraph(bound).flat.leaves}
            ways |= dict.fromkeys(leaves & differentiated, "in the function itself")

        # In an argument that has no gradient, or whose filter leaves them out.
        arguments = self.call.arguments
        labelled = zip(self.call.labels, arguments.templates, strict=True)
        for label, template in [*labelled, *arguments.named]:
            for root, _ in root_places(label, template):
                leaves = {indices[id(leaf)] for leaf in flatten(arguments.roots[root]).leaves}
                lost = (leaves & differentiated) - chosen.get(label, set())
                ways |= dict.fromkeys(lost, f"in the argument {label!r}")
        return ways

    def _guard_second_ways(self, differentiated: DiffPair) -> DiffPair:
        """Returns the differentiated inputs, without a derivative for those that arrive twice."""

        def guarded(index: int, value: PyTree) -> PyTree:
            way = self.ways_without_gradient.get(index)
            if way is None:
                return value

            def make_error() -> TransformError:
                return errors.partly_lost_gradient(self.name_of(index), way)

            return jax.tree.map(lambda leaf: refuse_derivative(leaf, make_error), value)

        values, plain = differentiated
        return list(map(guarded, self.inputs.indices, values)), plain


def _has_reverse_mode(
    transformed: Callable[..., PyTree], differentiated: DiffPair, others: Others
) -> bool:
    """Whether a function that JAX refused to differentiate has a derivative in reverse mode."""

    def pullback(differentiated: DiffPair, others: Others) -> PyTree:
        return jax.vjp(transformed, differentiated, others)[0]

    try:
        jax.make_jaxpr(pullback)(differentiated, others)
    except Exception:  # noqa: BLE001 (then it is not the mode that JAX refuses)
        return False
    return True


def _shape_of(array: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(array), dtype_of(array))


def _with_varying_axes(axes: frozenset[str] | None, gradient: jax.Array | None) -> jax.Array | None:
    """Returns a gradient that varies over the manual mesh axes of its input."""
    if gradient is None or axes is None:
        return None

    # An input that all shards share has one gradient, the sum of what they give.
    present = _jax.varying_axes(gradient)
    if present - axes:
        gradient = jax.lax.psum(gradient, tuple(sorted(present - axes)))
    if axes - present:
        gradient = jax.lax.pcast(gradient, tuple(sorted(axes - present)), to="varying")
    return gradient


def _fresh_paths(context: RunContext, fresh_ids: Sequence[int]) -> list[Path]:
    """Returns the path of each new Variable, from the name of its argument on."""
    arguments = zip(context.call.labels, context.args, strict=True)
    paths = {
        id(leaf): path
        for label, argument in [*arguments, *sorted(context.kwargs.items())]
        for path, leaf, _ in expand(None, argument, "", (label,))
        if isinstance(leaf, Variable)
    }
    return [paths.get(key, (str(index),)) for index, key in enumerate(fresh_ids)]
