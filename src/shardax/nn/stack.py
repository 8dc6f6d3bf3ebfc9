# SPDX-License-Identifier: Apache-2.0
"""Layers of one structure, stored stacked and run by ``scan``.

A network of many equal layers costs as much to trace and compile as it has layers, if each is
called by itself. A stack holds them as one: every Variable has a leading dimension with one part
per layer, and calling the stack runs the program of one layer in a loop. ``stack[i]`` is a view:
the layer at that place, which reads and writes its parts of the stacked Variables. What all layers
have in common, such as a random stream that they draw from together, is shared: it stays one, and
is carried from layer to layer as in a Python loop.

A model may hold its layers in a list or in a ``Stack``. In the unrolled layout a layer's value is
at ``.layers[2].kernel``; in the stacked one it is part 2 of the value at
``.layers.stacked.kernel``. What all layers share stands once in either, in the unrolled layout with
the first layer. ``stack_state`` and ``unstack_state`` bring the state of one layout to the other,
as for a checkpoint of one and a model of the other.

A remat policy says what the backward pass keeps: None (everything), ``"full"`` (nothing but the
inputs), the name of one of JAX's policies, a function of ``jax.checkpoint_policies``, or a mapping
from names to memory kinds. Names are those that ``jax.ad_checkpoint.checkpoint_name`` gives to
values: what ``"device"`` stands for is kept, what ``"pinned_host"`` stands for waits in the
device's host memory, and the rest is computed anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import numpy as np

from shardax import (
    Carry,
    Module,
    Rules,
    State,
    StateAxes,
    find_duplicates,
    iter_modules,
    iter_variables,
    jit,
    remat,
    scan,
)
from shardax._parallel.pipeline import run_pipeline
from shardax.errors import ModuleError, StateMismatchError
from shardax.extend import (
    AnyMesh,
    Object,
    Options,
    Origin,
    Path,
    ScopeSettings,
    StackedObjects,
    Static,
    format_path,
    is_eager,
    mesh_axes_of,
)
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import as_size
from shardax.partition import PARTITION_NAME

POLICY_NAMES = (
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
)
"""Policies of ``jax.checkpoint_policies`` that are no factories and have one name each."""

MEMORY_KINDS = ("device", "pinned_host")
"""Where a remat policy can keep values of a name."""

Policy = str | Callable[..., Any] | Mapping[str, str] | tuple[tuple[str, str], ...] | None


def check_policy(layer: str, policy: Any, names: Sequence[str] | None = None) -> Policy:
    """Returns a remat policy, or raises ``LayerConfigError`` if there is none such."""
    if policy is None or callable(policy):
        return policy

    if isinstance(policy, str):
        if policy == "full" or policy in POLICY_NAMES:
            return policy
    elif pairs := _kinds_by_name(policy):
        wrong = [name for name, _ in pairs if names is not None and name not in names]
        if not wrong:
            return pairs
        raise LayerConfigError(
            f"{layer} was given remat={policy!r}, but no value has the name {wrong[0]!r}. The "
            f"names are {', '.join(map(repr, names or ()))}."
        )

    raise LayerConfigError(
        f"{layer} was given remat={policy!r}. It takes None, 'full', one of "
        f"{', '.join(map(repr, POLICY_NAMES))}, a policy such as "
        f"jax.checkpoint_policies.save_only_these_names('attention'), or memory kinds by name, "
        f"'device' or 'pinned_host': {{'attention': 'device', 'mlp': 'pinned_host'}}."
    )


def _kinds_by_name(policy) -> tuple[tuple[str, str], ...] | None:
    """Returns pairs of a name and a memory kind, or None."""
    pairs = policy.items() if isinstance(policy, Mapping) else policy
    try:
        kinds = dict(pairs)
    except (TypeError, ValueError):
        return None
    fits = all(isinstance(n, str) and k in MEMORY_KINDS for n, k in kinds.items())
    return tuple(kinds.items()) if fits and kinds else None


def rematerialised(
    function: Callable[..., object], policy: Policy, *, in_loop: bool = False
) -> Callable[..., Any]:
    """Returns a function with rematerialization by a policy."""
    # In a loop the compiler cannot undo it, so nothing has to prevent that.
    if policy is None:
        return function
    return remat(function, policy=_jax_policy(policy), prevent_cse=not in_loop)


def _jax_policy(policy: Policy) -> Any:
    """Returns the policy as ``jax.checkpoint`` takes it."""
    if isinstance(policy, str):
        return None if policy == "full" else getattr(jax.checkpoint_policies, policy)
    return _by_name(policy) if isinstance(policy, tuple) else policy


@functools.lru_cache(maxsize=256)
def _by_name(kinds: tuple[tuple[str, str], ...]):
    """Returns the policy of memory kinds by name."""
    saved, hosted = ([n for n, memory in kinds if memory == kind] for kind in MEMORY_KINDS)
    if not hosted:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=hosted,
        offload_src="device",
        offload_dst="pinned_host",
    )


class Stack(Module):
    """Layers of one structure in a row, stacked and scanned.

    Tracing and compiling do not grow with depth. The parameters are those that the layers would
    have by themselves, to the last bit, and lazy: building a stack runs no JAX operation. State
    that layers write (statistics, counts, what they sow) is stacked like their parameters;
    ``train`` and ``eval`` reach them all.

    Args:
        make: Called without arguments, builds one layer, a Module that is called as
            ``layer(x, ...)`` and returns the next ``x``, of the same structure, shape and dtype. It
            takes its random streams from its closure.
        length: How many layers.
        axis_name: Name of the leading dimension, for rules.
        remat: Whether the backward pass computes a layer anew instead of keeping what is inside it
            (``sx.remat``): ``"full"``; the name of one of ``jax.checkpoint_policies``, such as
            ``"dots_saveable"``; such a policy; memory kinds by the names that layers give to values
            by ``jax.ad_checkpoint.checkpoint_name``, ``{"attention": "device", "mlp":
            "pinned_host"}``, to keep these there; None to keep everything.
        unroll: How many layers one turn of the loop runs, as in ``jax.lax.scan``.
        microbatches: In how many parts the layers run a batch, one after another; None for those of
            ``sx.parallel``, else the whole. Where the rules in scope lay ``axis_name`` over a mesh
            axis, the layers are a pipeline along it. A call with a Module, such as a cache, runs
            the whole batch.
        schedule: In which order stages of a pipeline have layers, ``"gpipe"`` or ``"circular"``, as
            for ``sx.parallel``; None for that of the scope.

    Attributes:
        stacked: The layer that holds all layers' Variables, stacked.
        shared: Paths, below ``stacked``, of what all layers share.
        length: How many layers.
        axis_name: Name of the leading dimension.
        microbatches: In how many parts the layers run a batch.
        schedule: Of a pipeline, or None.

    Raises:
        ModuleError: If the layers are not alike; names the path that differs.
        LayerConfigError: If ``length`` is not positive, ``make`` builds no Module or the same one
            twice, or there is no such policy or schedule.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> stack = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=rngs), 3)
        >>> stack.stacked.kernel
        Param(float32[3, 4, 4], lazy, axes=('layers', 'in', 'out'))
        >>> x = jnp.ones((2, 4))
        >>> y = stack[2](stack[1](stack[0](x)))
        >>> bool(jnp.allclose(stack(x), y))
        True
    """

    microbatches: int | None = None
    schedule: str | None = None

    def __init__(
        self,
        make: Callable[[], Module],
        length: int,
        axis_name: str = "layers",
        *,
        remat: Any = None,
        unroll: int = 1,
        microbatches: int | None = None,
        schedule: str | None = None,
    ) -> None:
        options, fits = (
            Options(LayerConfigError, "Stack"),
            schedule in (None, *ScopeSettings.choices("schedule")),
        )
        options.check("schedule", schedule, fits, 'known (use "gpipe" or "circular")')

        count = as_size("Stack", "length", length)
        layers = StackedObjects.build(make, count, axis_name, _check_layers)
        self._start(layers, axis_name, remat, unroll)

        if microbatches is not None:
            self.microbatches = as_size("Stack", "microbatches", microbatches)
        if schedule is not None:
            self.schedule = schedule

    def _start(self, layers: StackedObjects, axis_name: str, remat: object, unroll: int) -> None:
        self.stacked = layers.root
        self.shared = layers.shared
        self.length = layers.length
        self.axis_name = axis_name
        self.remat = check_policy("Stack", remat)
        self.unroll = as_size("Stack", "unroll", unroll)

    def _layout_warnings(self, mesh: AnyMesh, rules: Rules) -> Iterator[tuple[str, str]]:
        """Codes and texts of ``sx.check`` about this stack."""
        if (
            self.microbatches
            or ScopeSettings.current().microbatches
            or self.axis_name not in rules.names
        ):
            return

        for axis in mesh_axes_of(rules.spec((self.axis_name,))[0]):
            if mesh.shape.get(axis, 1) > 1:
                text = (
                    f"the rules lay the {self.length} layers of this Stack, {self.axis_name!r}, "
                    f"over the mesh axis {axis!r}, and they run without microbatches: no pipeline, "
                    "and each device gathers all of them at every call. Run and check it in a "
                    f"`with sx.parallel(microbatches={mesh.shape[axis]}): ...`, or take "
                    f"{self.axis_name!r} out of the rules."
                )
                yield "gathered-stack", text

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers one after the other; outside of transforms, compiled.

        Args:
            x: What goes from layer to layer: an array or a pytree of arrays.
            *args: Given to every layer, whole; but of a Module whose Variables all have the stack's
                ``axis_name`` first, such as a cache of all layers, each layer gets its part.
            **kwargs: Likewise.

        Returns:
            The last layer's result.

        Raises:
            TransformError: If a layer's result has another structure, shape or dtype than its
                input.
            ModuleError: With microbatches, if rows or layers cannot be divided, or layers
                write what they share.
        """
        leaves, treedef = jax.tree.flatten(
            (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Object)
        )
        dynamic: list[Any] = []
        static: list[Any] = []
        for leaf in leaves:
            is_dynamic = isinstance(leaf, (Object, jax.Array, np.ndarray, np.generic))
            dynamic.append(leaf if is_dynamic else None)
            static.append(None if is_dynamic else _static(leaf))
        structure = (treedef, tuple(static))
        if not is_eager():
            return _run(self, x, dynamic, structure)

        # Traced anew at every eager call, as each layer alone would be: it may read settings. What
        # is compiled is found by the jaxpr.
        @jit
        def run_layers(stack: Stack, x: Any, arguments: list[Any]) -> Any:
            return _run(stack, x, arguments, structure)

        return run_layers(self, x, dynamic)

    @property
    def _stacked_objects(self) -> StackedObjects:
        """The layers as ``shardax.extend`` has them: with their views, and how to unstack them."""
        return StackedObjects(self.stacked, self.shared, self.length)

    def unrolled_paths(self) -> dict[Path, list[Path]]:
        """Returns the paths that the layers have in a list of them.

        Returns:
            By the path of all layers below this one, the path of each. A layer of another class
            that holds layers as one says so likewise; ``sx.surgery.record`` and ``patch`` ask it.
        """
        return {("stacked",): [(index,) for index in range(self.length)]}

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns a view of one layer, or a list of views.

        Args:
            index: Which layer, negative from the end; or a slice.

        Raises:
            IndexError: If there is no such layer.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.length))]
        place = operator.index(index)
        if not -self.length <= place < self.length:
            raise IndexError(f"The stack has {self.length} layers, none at {place}.")
        return self._stacked_objects.view(place % self.length)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.length))


def _static(leaf: object):
    try:
        return Static(leaf)
    except TypeError as error:
        raise ModuleError(
            f"A stack was called with {leaf!r} of type {type(leaf).__name__}, which is neither an "
            f"array nor hashable ({error}), so it cannot be part of the layers' one program."
        ) from error


def _run(stack: Stack, x: jax.Array, arguments: list[object], structure):
    """Scans ``x`` through the layers; ``rest`` holds the static arguments."""
    treedef, static = structure
    is_shared = _IsShared(_all_shared(stack) if stack.shared else ())

    def body(x: jax.Array, layer, arguments: list[Any]):
        leaves = [
            argument if item is None else item.value
            for argument, item in zip(arguments, static, strict=True)
        ]
        args, kwargs = treedef.unflatten(leaves)
        return layer(x, *args, **kwargs)

    def run(
        stacked, x: jax.Array, arguments: list[Any], length: int, policy: Policy = stack.remat
    ) -> Any:
        by_layer = [0 if _is_stacked(argument, stack.axis_name) else None for argument in arguments]
        of_layer = StateAxes({is_shared: None, ...: 0}) if stack.shared else 0
        loop = scan(
            rematerialised(body, policy, in_loop=True),
            in_axes=(Carry, of_layer, by_layer),
            out_axes=Carry,
            length=length,
            unroll=stack.unroll if length > 1 else True,
            metadata={PARTITION_NAME: stack.axis_name},
        )
        return loop(x, stacked, arguments)

    # A cache is written for the whole batch, token by token.
    microbatches = stack.microbatches or ScopeSettings.current().microbatches
    if microbatches is None or any(isinstance(argument, Object) for argument in arguments):
        return run(stack.stacked, x, arguments, stack.length)
    # What a layer is given is one microbatch: the scope does not cut it again in stacks inside.
    with ScopeSettings.scope(microbatches=None):
        return run_pipeline(
            stack.stacked,
            is_shared,
            run,
            functools.partial(run, policy=None),
            x,
            arguments,
            policy=jax.checkpoint_policies.everything_saveable
            if stack.remat is None
            else _jax_policy(stack.remat),
            axis_name=stack.axis_name,
            length=stack.length,
            microbatches=microbatches,
            schedule=stack.schedule or ScopeSettings.current().schedule,
        )


def _is_stacked(argument: object, axis_name: str) -> bool:
    """Whether an argument holds one part for each layer."""
    names = [v.axes for _, v in iter_variables(argument)] if isinstance(argument, Module) else []
    return bool(names) and all(axes and axes[0] == axis_name for axes in names)


def _all_shared(stack: Stack) -> tuple[Path, ...]:
    """Returns every path to objects shared by all layers."""
    # A layer may reach it by several, such as one stream of two dropouts.
    is_shared = _IsShared(stack.shared)
    duplicates = find_duplicates(stack.stacked)
    groups = [group for group in duplicates if any(is_shared(path, None) for path in group)]
    return (*stack.shared, *(path for group in groups for path in group))


@dataclasses.dataclass(frozen=True, repr=False)
class _IsShared:
    """Filter of objects shared by all layers, by path."""

    paths: tuple[Path, ...]

    def __call__(self, path: Path, variable: object) -> bool:
        return any(path[: len(shared)] == shared for shared in self.paths)

    def __repr__(self) -> str:
        return "shared"


def _check_layers(layers: Sequence[object]) -> None:
    for layer in layers:
        if not isinstance(layer, Module) or not callable(layer):
            raise LayerConfigError(
                f"A Stack is made of Modules that can be called, but was given {layer!r} of type "
                f"{type(layer).__name__}. Write Stack(lambda: Layer(..., rngs=rngs), length)."
            )

    if len({id(layer) for layer in layers}) < len(layers):
        raise LayerConfigError(
            f"A Stack needs a {type(layers[0]).__name__} of its own for each layer, but was given "
            f"one and the same twice. Build it where the stack is made: "
            f"Stack(lambda: Layer(..., rngs=rngs), length)."
        )


def stack_layers(
    layers: Sequence[Module], axis_name: str = "layers", *, remat: object = None, unroll: int = 1
) -> Stack:
    """Makes a stack of existing layers.

    Args:
        layers: Layers of one structure, at least one. The stack has Variables of its own; what all
            layers share, it shares with them.
        axis_name: As for ``Stack``.
        remat: As for ``Stack``.
        unroll: As for ``Stack``.

    Returns:
        The stack.

    Raises:
        ModuleError: If the layers are not alike; names the path that differs.
        LayerConfigError: If there are none, or they are no Modules.

    Example:
        >>> import shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> stack = stack_layers([sx.nn.Linear(4, 4, rngs=rngs) for _ in range(3)])
        >>> len(stack), stack.stacked.kernel.shape
        (3, (3, 4, 4))
    """
    if not layers:
        raise LayerConfigError("stack_layers needs at least one layer, but was given none.")
    _check_layers(layers)
    stack = Stack.__new__(Stack)
    stack._start(StackedObjects.of(layers, axis_name), axis_name, remat, unroll)
    return stack


def unstack_layers(stack: Stack) -> list[Any]:
    """Takes a stack apart: the inverse of ``stack_layers``.

    Args:
        stack: The stack; it is left as it is.

    Returns:
        New layers with Variables of their own (lazy where the stack is), but for what all layers
        share, which they share with the stack.

    Example:
        >>> import shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> stack = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=rngs), 3)
        >>> [layer.kernel.shape for layer in unstack_layers(stack)]
        [(4, 4), (4, 4), (4, 4)]
    """
    return stack._stacked_objects.unstack()


def stack_state(state: State | Mapping[Any, object], model: object) -> State:
    """Turns the state of unrolled layers into a stack's.

    Args:
        state: Values of a model that has lists of layers where ``model`` has stacks; all of them or
            some.
        model: The model with the stacks, lazy or not; or a tuple or dict with it and an optimizer,
            whose state follows.

    Returns:
        The values by the paths of ``model``; for ``sx.update(model, ...)``.

    Raises:
        StateMismatchError: If some layers have a value and others do not, or values that belong
            together differ in shape or dtype.

    Example:
        >>> import shardax as sx
        >>> layers = sx.nn.Sequential(*(sx.nn.Linear(4, 4, rngs=sx.Rngs(i)) for i in range(3)))
        >>> stacked = sx.nn.Sequential()
        >>> stacked.layers = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(9)), 3)
        >>> sx.update(stacked, stack_state(sx.state(layers), stacked))
        >>> bool((stacked.layers[2].kernel == layers.layers[2].kernel).all())
        True
    """
    stacked = state if isinstance(state, State) else State(state)
    values, origins = stacked.flat(), stacked.origins()

    stacks = _Stacks(model)
    gathered: dict[Path, Any] = {}
    kinds: dict[Path, Origin] = {}

    for path, variable in iter_variables(model):
        levels = stacks.levels(path)
        parts = {indices: _unrolled(path, levels, indices) for indices in _indices(levels)}
        present = [part for part in parts.values() if part in values]
        if not present or not levels:
            continue
        missing = [part for part in parts.values() if part not in values]
        if missing:
            raise StateMismatchError(
                f"Of the layers that are stacked at {format_path(path)}, {len(present)} have a "
                f"value, but {len(missing)} have none: {_listed(missing)}. The state is of another "
                f"number of layers, or of layers that are not alike."
            )
        forms = {part: _form(values[part]) for part in present}
        for part, form in forms.items():
            if form != forms[present[0]]:
                raise StateMismatchError(
                    f"The layers that are stacked at {format_path(path)} differ: "
                    f"{forms[present[0]]} at {format_path(present[0])}, {form} at "
                    f"{format_path(part)}."
                )
        gathered[path] = _gathered(lambda i, parts=parts: values.pop(parts[i]), levels)
        kinds[path] = Origin.of(variable)
    return State.from_flat({**values, **gathered}, {**origins, **kinds})


def unstack_state(state: State | Mapping[Any, object], model: object) -> State:
    """Turns the state of stacked layers into unrolled layers'.

    Args:
        state: Values of ``model``, all of them or some.
        model: The model with the stacks, lazy or not; or a tuple or dict with it and an optimizer,
            whose state follows.

    Returns:
        The values by the paths of a model that has lists of layers instead.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.Sequential()
        >>> model.layers = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 3)
        >>> kernels = sx.state(model, sx.PathContains("kernel"))
        >>> list(unstack_state(kernels, model).flat())
        [('layers', 0, 'kernel'), ('layers', 1, 'kernel'), ('layers', 2, 'kernel')]
    """
    stacked = state if isinstance(state, State) else State(state)
    origins, stacks = stacked.origins(), _Stacks(model)
    values: dict[Path, Any] = {}
    kinds: dict[Path, Origin] = {}

    for path, value in stacked.flat().items():
        levels = stacks.levels(path)
        kind = origins[path]
        for level in levels:
            if level.length is not None:
                kind = Origin(kind.variable_type, kind.all_metadata.without_axis(0))
        for indices in _indices(levels):
            part = value
            for index, level in zip(indices, levels, strict=True):
                part = part if level.length is None else StackedObjects.part_of(part, index)
            unrolled = _unrolled(path, levels, indices)
            values[unrolled], kinds[unrolled] = part, kind
    return State.from_flat(values, kinds)


class _Level(NamedTuple):
    """A stack on the way to a Variable."""

    place: int  # of the step ``stacked`` in the path
    length: int | None  # None if the layers share what the path leads to


class _Stacks:
    """Stacks of a tree with a model."""

    def __init__(self, tree) -> None:
        modules = dict(iter_modules(tree))
        self.modules = modules.keys()
        self.stacks = {path: item for path, item in modules.items() if isinstance(item, Stack)}

    def levels(self, path: Path) -> list[_Level]:
        """Returns the stacks on the way to a Variable, from the outside."""
        levels = []
        for position, step in enumerate(path):
            stack = self._stack_at(path[:position]) if step == "stacked" else None
            if stack is not None:
                below = path[position + 1 :]
                shared = any(below[: len(item)] == item for item in stack.shared)
                levels.append(_Level(position, None if shared else stack.length))
        return levels

    def _stack_at(self, path: Path) -> Stack | None:
        """Returns the stack at a path, also in an optimizer's state."""
        if path in self.modules:
            return self.stacks.get(path)

        common = {place: _common_end(place, path) for place in self.stacks}
        longest = max(common.values(), default=0)
        nearest = [self.stacks[place] for place, count in common.items() if count == longest]

        if longest == 0:
            return None
        if len({(stack.length, stack.shared) for stack in nearest}) > 1:
            raise StateMismatchError(
                f"The state at {format_path(path)} may belong to several stacks of different "
                f"lengths. Convert the model and its optimizer one by one."
            )
        return nearest[0]


def _common_end(left: Path, right: Path) -> int:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _indices(levels: Sequence[_Level]) -> Iterator[tuple[int, ...]]:
    """Yields the indices of the layers of a path."""
    return itertools.product(*(range(level.length or 1) for level in levels))


def _unrolled(path: Path, levels: Sequence[_Level], indices: Sequence[int]) -> Path:
    steps = list(path)
    for level, index in zip(levels, indices, strict=True):
        steps[level.place] = index
    return tuple(steps)


def _form(value) -> str:
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return str(jax.tree.map(_form, value))


def _gathered(
    read: Callable[[tuple[int, ...]], object],
    levels: Sequence[_Level],
    indices: tuple[int, ...] = (),
):
    """Stacks values from the inside out."""
    if len(indices) == len(levels):
        return read(indices)
    level = levels[len(indices)]
    if level.length is None:
        return _gathered(read, levels, (*indices, 0))
    return StackedObjects.stack_values(
        [_gathered(read, levels, (*indices, index)) for index in range(level.length)]
    )


def _listed(paths: Sequence[Path]) -> str:
    listed = ", ".join(map(format_path, paths[:4]))
    return listed if len(paths) <= 4 else f"{listed} and {len(paths) - 4} more"
