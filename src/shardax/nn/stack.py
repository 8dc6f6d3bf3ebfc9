# SPDX-License-Identifier: Apache-2.0
"""``Stack``: like layers in a row, stored as one layer of stacked Variables and run by ``scan``.

A network of many equal layers costs as much to trace and compile as it has layers, if each is
called by itself. A *stack* holds them as one: every Variable has a leading dimension with one part
per layer, and calling the stack runs the program of one layer in a loop. ``stack[i]`` is a *view*:
the layer at that place, which reads and writes its parts of the stacked Variables (``core.views``).

What all layers have in common, such as a random stream that they draw from together, is *shared*:
it stays one, and goes from layer to layer as in a Python loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np

from shardax.core import epoch
from shardax.core._jax import is_eager
from shardax.core.errors import LayerConfigError, StackError
from shardax.core.frames import owner_here
from shardax.core.metadata import PARTITION_NAME
from shardax.core.modules import Module
from shardax.core.node import Object
from shardax.core.paths import Path
from shardax.core.pytree import is_object
from shardax.core.stacking import stack_objects, unstack_objects
from shardax.core.static import Static
from shardax.core.structure import Walk
from shardax.core.views import view
from shardax.nn.parameters import as_size
from shardax.nn.remat_policy import check_policy, rematerialised
from shardax.transforms.closures import find_sources, objects_in
from shardax.transforms.jit import jit
from shardax.transforms.prefix import Carry, StateAxes
from shardax.transforms.scan import scan


class Stack(Module):
    """Like layers in a row, stacked and scanned: tracing and compiling do not grow with depth.

    The parameters are those that the layers would have by themselves, to the last bit, and lazy:
    building a stack runs no JAX operation. State that layers write (statistics, counts, what they
    sow) is stacked like their parameters; ``train`` and ``eval`` reach them all.

    Args:
        make: Called without arguments, builds one layer, a Module that is called as
            ``layer(x, ...)`` and returns the next ``x``, of the same structure, shape and dtype. It
            takes its random streams from its closure.
        length: How many layers.
        axis_name: Name of the leading dimension, for rules.
        remat: Whether the backward pass computes a layer anew instead of keeping what is inside it
            (``sx.remat``): ``"full"``; the name of one of ``jax.checkpoint_policies``, such as
            ``"dots_saveable"``; such a policy; None to keep everything.
        unroll: How many layers one turn of the loop runs, as in ``jax.lax.scan``.

    Attributes:
        stacked: The layer that holds all layers' Variables, stacked.
        shared: Paths, below ``stacked``, of what all layers share.
        length: How many layers.
        axis_name: Name of the leading dimension.

    Raises:
        StackError: If the layers are not alike; names the path that differs.
        LayerConfigError: If ``length`` is not positive, ``make`` builds no Module or the same one
            twice, or there is no such policy.

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

    def __init__(
        self,
        make: Callable[[], Module],
        length: int,
        axis_name: str = "layers",
        *,
        remat: Any = None,
        unroll: int = 1,
    ) -> None:
        count = as_size("Stack", "length", length)
        older = frozenset(_objects_around(make)) if count == 1 else frozenset[int]()
        self._start([make() for _ in range(count)], axis_name, remat, unroll, older)

    def _start(
        self,
        layers: Sequence[Any],
        axis_name: str,
        remat: Any,
        unroll: int,
        older: frozenset[int],
    ) -> None:
        _check_layers(layers)
        self.stacked, self.shared = stack_objects(layers, axis_name, older)
        self.length = len(layers)
        self.axis_name = axis_name
        self.remat = check_policy("Stack", remat)
        self.unroll = as_size("Stack", "unroll", unroll)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers one after the other; outside of transforms, compiled.

        Args:
            x: What goes from layer to layer: an array or a pytree of arrays.
            *args: Given to every layer, whole.
            **kwargs: Likewise.

        Returns:
            The last layer's result.

        Raises:
            CarryError: If a layer's result has another structure, shape or dtype than its input.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        dynamic = [isinstance(leaf, _DYNAMIC) for leaf in leaves]
        given = [leaf if is_array else None for leaf, is_array in zip(leaves, dynamic, strict=True)]
        rest = tuple(
            None if is_array else _static(leaf)
            for leaf, is_array in zip(leaves, dynamic, strict=True)
        )
        run = _run_compiled if is_eager() else _run
        return run(self, x, given, (treedef, rest))

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
        return view(self.stacked, place % self.length, _Shared(self.stacked, self.shared))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.length))


_DYNAMIC = (Object, jax.Array, np.ndarray, np.generic)


def _static(leaf: Any) -> Any:
    try:
        return Static(leaf)
    except TypeError as error:
        raise StackError(
            f"A stack was called with {leaf!r} of type {type(leaf).__name__}, which is neither an "
            f"array nor hashable ({error}), so it cannot be part of the layers' one program."
        ) from error


# --- running --------------------------------------------------------------------------------------


def _run(stack: Stack, x: Any, given: list[Any], rest: Any) -> Any:
    """Scans ``x`` through the layers; ``rest`` are the static arguments and where all stand."""
    treedef, static = rest

    def body(x: Any, layer: Any, given: list[Any]) -> Any:
        leaves = [
            one if item is None else item.value for one, item in zip(given, static, strict=True)
        ]
        args, kwargs = treedef.unflatten(leaves)
        return layer(x, *args, **kwargs)

    of_layer = StateAxes({_IsShared(stack.shared): None, ...: 0}) if stack.shared else 0
    loop = scan(
        rematerialised(body, stack.remat, in_loop=True),
        in_axes=(Carry, of_layer, None),
        out_axes=Carry,
        length=stack.length,
        unroll=stack.unroll,
        metadata={PARTITION_NAME: stack.axis_name},
    )
    return loop(x, stack.stacked, given)


_run_compiled = jit(_run, static_argnums=3)
"""Outside of traces: a loop that is not compiled with what is around it would be compiled anew at
every call."""


class _IsShared:
    """Filter of what all layers share.

    Args:
        paths: Paths of shared objects.
    """

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths

    def __call__(self, path: Path, variable: Any) -> bool:
        return any(path[: len(shared)] == shared for shared in self.paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IsShared) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return "shared"


class _Shared:
    """The shared objects of a stack, for its views.

    Args:
        root: What holds all layers.
        paths: Paths of shared objects.
    """

    def __init__(self, root: Any, paths: tuple[Path, ...]) -> None:
        self.root = root
        self.paths = frozenset(paths)
        self.found: dict[int, Any] = {}
        self.epoch = -1

    def __contains__(self, item: object) -> bool:
        if not self.paths:
            return False
        if self.epoch != epoch.current:
            self.epoch = epoch.current
            walk = Walk(marking=True)
            walk.visit(self.root, ())
            pairs = zip(walk.paths, walk.objects, strict=True)
            self.found = {id(one): one for path, one in pairs if path in self.paths}
        return id(item) in self.found


# --- building -------------------------------------------------------------------------------------


def _check_layers(layers: Sequence[Any]) -> None:
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


def _objects_around(make: Callable[[], Any]) -> Iterator[int]:
    """Yields ``id`` of the objects that a function takes from its closure or holds."""
    walk = Walk()
    if isinstance(make, Object) or callable(make):
        walk.encode(make, ())
    for source in find_sources(make):
        for item in objects_in(source.read()):
            walk.visit(item, ())
    return map(id, walk.objects)


def stack_layers(
    layers: Sequence[Module], axis_name: str = "layers", *, remat: Any = None, unroll: int = 1
) -> Stack:
    """Makes a stack of layers that exist.

    Args:
        layers: Layers of one structure, at least one. The stack has Variables of its own; what all
            layers share, it shares with them.
        axis_name: As for ``Stack``.
        remat: As for ``Stack``.
        unroll: As for ``Stack``.

    Raises:
        StackError: If the layers are not alike; names the path that differs.
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
    stack = Stack._allocate(owner_here(), None)
    stack._start(list(layers), axis_name, remat, unroll, frozenset())
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
    return unstack_objects(stack.stacked, stack.shared, stack.length)
