# SPDX-License-Identifier: Apache-2.0
"""Changes of what selected layers return, or are given, while a model runs.

``patch`` is the counterpart of ``record``: it takes arrays by the paths that ``record`` returns
them by. They are Variables of the patched model, beside the layers that they change, so it passes
through every transform, and nothing of it is hidden in a closure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Perturbation, Variable, iter_modules, select
from shardax.extend import Path, PyTree, align, format_path
from shardax.surgery import errors
from shardax.surgery.edits import TransparentWrapper, wrap_selected
from shardax.surgery.recording import first_argument, first_keyword
from shardax.surgery.unrolled import LayerPosition, check_unrolled_paths, position_of


def replace(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the new value: what ``patch`` does with a value, unless it is told otherwise."""
    return new


def patch(
    model: PyTree,
    values: Mapping[Path, PyTree],
    how: Callable[[Any, Any], Any] = replace,
    *,
    inputs: bool = False,
) -> PyTree:
    """Makes a model in which what some layers return is changed.

    Args:
        model: A Module that can be called.
        values: What to change it by, by path. The paths are those that ``record`` returns, which
            are those of unrolled layers also in a ``nn.Stack``. Each value is an array, or a pytree
            like the layer's result. In the layers of one stack the values of a place have one
            shape.
        how: Function of what a layer returned and the value at its path, which has as many
            dimensions; called for each array. Its result is used in place of the first one,
            broadcast to its shape and in its dtype. The value itself if left out; ``jnp.add`` adds
            it.
        inputs: Whether to change what the layers are given, their first argument, in place of what
            they return.

    Returns:
        The model with a wrapper around each of these layers; it shares the Variables of the model,
        and has the values as further ones, ``Perturbation``.

    Raises:
        SelectionError: If there are no values, the model has no layer at a path, or what is there
            is not called; when called, if a value does not fit.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> model = sx.nn.Stack(lambda: sx.nn.MLP(2, 4, rngs=rngs), 3)
        >>> x, other = jnp.ones((1, 2)), jnp.zeros((1, 2))
        >>> _, activations = sx.surgery.record(model, sx.nn.MLP)(x)
        >>> patched = sx.surgery.patch(model, {(2,): activations[2,]})
        >>> bool((patched(other) == model(x)).all())
        True
        >>> steered = sx.surgery.patch(model, {(2,): jnp.array([0.0, 3.0])}, how=jnp.add)
        >>> (steered(x) - model(x)).round(4).tolist()
        [[0.0, 3.0]]
    """
    if not values:
        raise errors.nothing_to_patch()

    check_unrolled_paths(model)

    # Positions of one path in the tree are layers of one stack.
    by_path: dict[Path, dict[LayerPosition, PyTree]] = {}
    for path, value in values.items():
        try:
            position = position_of(model, path)
        except (AttributeError, LookupError, TypeError):
            raise errors.no_such_layer(model, path, _paths_beside(model, path)) from None
        by_path.setdefault(position.path, {})[position] = value

    # What is inside of another layer is wrapped before the path to it becomes longer.
    for path in sorted(by_path, key=len, reverse=True):
        wrap = functools.partial(_patched, by_path[path], how, inputs)
        model = wrap_selected("patch", select(model).at_keypaths(path), wrap)
    return model


class Patched(TransparentWrapper):
    """A layer whose result, or input, is changed by a value; made by ``patch``.

    Args:
        layer: A Module, or a function.
        value: The value, an array or a pytree of them.
        is_patched: In a stack, whether a layer is changed; else None.
        how: The function of the old value and the new one.
        inputs: Whether the first argument is changed.
        path_text: Where the layer is, for errors.

    Attributes:
        body: The layer.
        value: ``Perturbation`` with the value. Of layers of a stack the values have a dimension for
            them first.
        is_patched: In a stack, whether a layer is changed; else None.
        how: The function of the old value and the new one.
        inputs: Whether the first argument is changed.
        path_text: Where the layer is, for errors.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> patched = sx.surgery.patch(model, {("up",): jnp.zeros(4)})
        >>> type(patched.up) is sx.surgery.Patched, patched.up.body is model.up, patched.up.value
        (True, True, Perturbation(float32[4]))
    """

    _own = frozenset({"body", "value", "is_patched", "how", "inputs", "path_text"})

    def __init__(
        self,
        layer: Callable[..., PyTree],
        value: PyTree,
        is_patched: jax.Array | None,
        how: Callable[[Any, Any], Any],
        inputs: bool,
        path_text: str,
    ) -> None:
        super().__init__(layer)
        self.value = Perturbation(value)
        self.is_patched = None if is_patched is None else Variable(is_patched)
        self.how = how
        self.inputs = inputs
        self.path_text = path_text

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if not self.inputs:
            return self._changed(self.body(*args, **kwargs))

        changed = self._changed(first_argument("patch", self.body, args, kwargs))
        if args:
            return self.body(changed, *args[1:], **kwargs)

        keyword = first_keyword(self.body, kwargs)
        assert keyword is not None  # else ``first_argument`` has refused the call
        return self.body(**{**kwargs, keyword: changed})

    def _changed(self, old: PyTree) -> PyTree:
        """Returns what stands in place of a result, or of an input."""
        old_leaves, structure = jax.tree.flatten(old)
        new_leaves, new_structure = jax.tree.flatten(self.value.value)
        if structure != new_structure:
            raise errors.shape_of_patch(self.path_text, new_structure, structure)

        pairs = zip(old_leaves, new_leaves, strict=True)
        return structure.unflatten([self._changed_leaf(old, new) for old, new in pairs])

    def _changed_leaf(self, old: jax.Array, value: jax.Array) -> jax.Array:
        old, value = jnp.asarray(old), jnp.asarray(value)
        missing = range(max(0, old.ndim - value.ndim))
        new = jnp.asarray(self.how(old, jnp.expand_dims(value, [*missing])))
        if not _can_be_broadcast(new, old):
            raise errors.shape_of_patch(self.path_text, jax.typeof(new), jax.typeof(old))

        # The dtype and the layout stay: a loop over layers carries them, and so does a cache.
        new = align(jnp.broadcast_to(new, old.shape).astype(old.dtype), old)
        return new if self.is_patched is None else jnp.where(self.is_patched.value, new, old)


def _can_be_broadcast(new: jax.Array, old: jax.Array) -> bool:
    """Whether an array can be broadcast to the shape of another one."""
    sizes = zip(reversed(new.shape), reversed(old.shape), strict=False)
    return new.ndim <= old.ndim and all(size in (1, whole) for size, whole in sizes)


def _patched(
    values: Mapping[LayerPosition, PyTree],
    how: Callable[[Any, Any], Any],
    inputs: bool,
    path: Path,
    layer: Callable[..., PyTree],
) -> Patched:
    """Returns a layer with the values of its positions."""
    lengths = next(iter(values)).lengths
    path_text = format_path(path)
    if not lengths:
        (value,) = values.values()
        return Patched(layer, value, None, how, inputs, path_text)

    def stack(*leaves: jax.Array) -> jax.Array:
        arrays = {p.layers: jnp.asarray(leaf) for p, leaf in zip(values, leaves, strict=True)}
        return _stacked(arrays, lengths, path_text)

    stacked = jax.tree.map(stack, *values.values())
    is_patched = np.zeros(lengths, bool)
    for position in values:
        is_patched[position.layers] = True
    return Patched(layer, stacked, jnp.asarray(is_patched), how, inputs, path_text)


def _stacked(
    arrays: Mapping[tuple[int, ...], jax.Array], lengths: Sequence[int], path_text: str
) -> jax.Array:
    """Returns arrays of layers in one, with zeros for the other layers.

    Args:
        arrays: By the layer's number, in each of the stacks around it.
        lengths: The number of layers of each.
        path_text: Where the layers are, for errors.

    Raises:
        SelectionError: If the arrays have several shapes.
    """
    first = next(iter(arrays.values()))
    for array in arrays.values():
        if array.shape != first.shape:
            raise errors.shapes_in_stack(path_text, array, first)

    def below(layers: tuple[int, ...]) -> jax.Array:
        if len(layers) == len(lengths):
            return arrays.get(layers, empty)
        return jnp.stack([below((*layers, i)) for i in range(lengths[len(layers)])])

    empty = jnp.zeros_like(first)
    return below(())


def _paths_beside(model: PyTree, path: Path) -> Sequence[Path]:
    """Returns paths of layers that may be meant by one that is not there."""
    paths = [
        tuple(0 if step == "stacked" else step for step in known)
        for known, _ in iter_modules(model)
        if known
    ]
    alike = [known for known in paths if path and known[-1] == path[-1]]
    return alike or [known for known in paths if len(known) == len(path)] or paths
