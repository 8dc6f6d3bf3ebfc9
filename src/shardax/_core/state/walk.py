# SPDX-License-Identifier: Apache-2.0
"""Walks over models, and maps from models to models.

The *parts* of a model are its Modules, its Variables and the arrays in its attributes. Each is met
once, by its first path, however many paths lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardax._core import errors
from shardax._core.checks import Options
from shardax._core.errors import VariableValueError
from shardax._core.frames import owner_here
from shardax._core.graph import flatten
from shardax._core.graph.definitions import Child, Ref
from shardax._core.graph.handlers import handler_of
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.module import Module
from shardax._core.state.bind import freeze, thaw
from shardax._core.state.filters import Filter, to_predicate
from shardax._core.state.frozen import FrozenVariable
from shardax._core.state.split_merge import box_tree, clone, flat_tree, unbox_tree
from shardax._core.stored import array_of_attribute, to_stored
from shardax._core.variable import Variable

T = TypeVar("T")
_options = Options(VariableValueError)
PartFunction = Callable[[Path, Any], Any]


def iter_graph(tree: object) -> Iterator[tuple[Path, Any]]:
    """Yields (path, part) of each Module, Variable and plain array once.

    Args:
        tree: A Module, Variable, container or pytree of them.

    Yields:
        (path, part), a Module before what is in it.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> [(path, type(part).__name__) for path, part in sx.iter_graph(layer)]
        [((), 'Linear'), (('kernel',), 'Param'), (('bias',), 'Param')]
    """
    flatten.check_tree(tree, "iter_graph")
    walk = flatten.GraphWalk()
    walk.encode(box_tree(tree), ())
    for path, item in zip(walk.paths, walk.objects, strict=True):
        if isinstance(item, (Module, Variable)):
            yield path, array_of_attribute(item)


def map(fn: PartFunction, tree: T) -> T:  # noqa: A001 (its name in Flax)
    """Makes a new model with mapped Variables.

    Args:
        fn: Called as ``fn(path, variable)`` with each Variable once, and with the arrays of
            attributes. It returns a value, or a Variable, which may be of another type.
        tree: A Module, Variable, container or pytree of them; it stays as it is.

    Returns:
        The new model, with new Variables. A Variable that was shared is shared in it.

    Raises:
        ModuleError: If the tree is no model.
        VariableValueError: If a value is not made of arrays.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> half = sx.map(lambda path, v: v.astype(jnp.bfloat16), layer)
        >>> half.bias.dtype.name, layer.bias.dtype.name, type(half.bias).__name__
        ('bfloat16', 'float32', 'Param')
    """
    flat = flat_tree(tree, "map")
    old_ids = {id(leaf) for leaf in flat.leaves}
    new_variables: dict[int, Variable] = {}
    for position, path, leaf in zip(
        flat.graphdef.leaves, flat.leaf_paths, flat.leaves, strict=True
    ):
        result = fn(path, array_of_attribute(leaf))
        if not isinstance(result, Variable):
            result = leaf.replace(result)
        if id(result) in old_ids:  # the new model shares none with the given one
            result = clone(result)
        new_variables[position] = result

    decode = flatten.assemble(flat.graphdef.objects, new_variables, owner_here())
    return unbox_tree(decode(flat.graphdef.roots[0]))


def recursive_map(fn: PartFunction, tree: object) -> PyTree:
    """Makes a new model by a function of every part.

    Args:
        fn: Called as ``fn(path, part)`` with each Module, Variable and plain array once, a Module
            after what is in it was replaced. It returns what stands there instead, often the part
            itself.
        tree: A Module, Variable, container or pytree of them; it stays as it is.

    Returns:
        What ``fn`` returned for the tree. Modules are new; a Variable that ``fn`` returns is the
        same one, in the new model as in the old.

    Raises:
        ModuleError: If the tree is no model, or if a Module holds itself.

    Example:
        >>> import shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> jitted = lambda path, part: (
        ...     sx.Jitted(part) if isinstance(part, sx.nn.Linear) else part
        ... )
        >>> new = sx.recursive_map(jitted, mlp)
        >>> type(new.up).__name__, new.up.body.kernel is mlp.up.kernel, type(mlp.up).__name__
        ('Jitted', True, 'Linear')
    """
    flatten.check_tree(tree, "recursive_map")
    walk = flatten.GraphWalk()
    root = walk.encode(box_tree(tree), ())
    return unbox_tree(_Rebuilding(fn, walk)(root))


def with_vars(
    tree: T, *, ref: bool | None = None, mutable: bool | None = None, only: Filter = ...
) -> T:
    """Makes a model whose Variables hold a ``jax.Ref`` each, or are immutable.

    Args:
        tree: A Module, Variable, container or pytree of them; it stays as it is.
        ref: Whether the Variables hold a ``jax.Ref`` with a copy of their value, or its array. None
            leaves that as it is.
        mutable: Whether the Variables can be written: False is ``sx.freeze``, which holds arrays,
            and True is ``sx.thaw``. None leaves that as it is.
        only: Filter of the Variables, by what they are when mutable; the others stay the same.

    Returns:
        The new model, with new Modules. A Variable that was shared is shared in it.

    Raises:
        VariableValueError: If nothing is to change, if both cannot be, or if a Variable that is to
            hold a Ref holds a pytree or is frozen.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.with_vars(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), ref=True)
        >>> @jax.jit
        ... def fill(layer):
        ...     layer.bias[...] = jnp.ones(3)
        >>> fill(layer)
        >>> layer.bias.value.tolist()
        [1.0, 1.0, 1.0]
        >>> type(sx.with_vars(layer, mutable=False).bias).__name__
        'FrozenVariable'
    """
    for name, value in (("ref", ref), ("mutable", mutable)):
        is_flag = value is None or isinstance(value, bool)
        _options.check(name, value, is_flag, "True, False or None")
    is_given = (ref, mutable) != (None, None)
    _options.check("ref", ref, is_given, "given, or mutable=", "Write ref=True, or mutable=False.")
    is_possible = not (ref and mutable is False)
    remedy = "A Ref is there to be written."
    _options.check("ref", ref, is_possible, "None with mutable=False", remedy)

    if mutable is False:
        return freeze(tree, only)
    if mutable:
        tree = thaw(tree, only)
    if ref is None:
        return tree

    predicate = to_predicate(only)

    def changed(path: Path, part: object) -> PyTree:
        if not isinstance(part, Variable) or not predicate(path, part):
            return part
        value = part.value
        if not ref:
            return part.replace(value)
        if isinstance(part, FrozenVariable):
            raise errors.ref_of_frozen(path)
        if not isinstance(value, jax.Array):
            raise errors.ref_of_tree(type(part), path, value)
        return part.replace(jax.new_ref(jnp.copy(value)))

    return recursive_map(changed, tree)


class _Rebuilding(flatten.ChildDecoder):
    """Turns children into what a function makes of them."""

    __slots__ = ("fn", "inside", "owner", "walk")

    def __init__(self, fn: PartFunction, walk: flatten.GraphWalk) -> None:
        super().__init__([])
        self.fn = fn
        self.walk = walk
        self.owner = owner_here()
        self.inside: set[int] = set()  # positions of the objects that are being rebuilt
        self.objects: Any = {}  # what was made, by position

    def __call__(self, child: Child) -> PyTree:
        if not isinstance(child, Ref):
            return super().__call__(child)
        position = child.position
        if position not in self.objects:
            self._rebuild(position)
        return self.objects[position]

    def _rebuild(self, position: int) -> None:
        path, item = self.walk.paths[position], self.walk.objects[position]
        if position in self.inside:
            raise errors.holds_itself(type(item), path)
        self.inside.add(position)
        if isinstance(item, Variable):
            part = array_of_attribute(item)
        else:
            definition = self.walk.definitions[position]
            part = definition.type._allocate(self.owner, None)
            part._unflatten(definition, self)

        if isinstance(item, Module):
            # What replaces an array may be none, and the other way round: each attribute is stored
            # again, where its kind belongs.
            handler = handler_of(part)
            handler.fill(part, handler.children(part))
        if isinstance(item, (Module, Variable)):
            part = to_stored(self.fn(path, part), f"what replaces {format_path(path)}")
        self.inside.discard(position)
        self.objects[position] = part
