# SPDX-License-Identifier: Apache-2.0
"""Splitting models into structure and values, and merging them.

``split`` takes a model apart into a ``GraphDef`` and one or more ``State``; ``merge`` puts one
together; ``state`` and ``update`` read and write values by path. All take any *tree*: a Module, a
Variable, a tracked container, or a pytree (tuple, list, dict) of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax.numpy as jnp

from shardax._core import errors
from shardax._core.containers import Dict
from shardax._core.errors import StateMismatchError, first_of
from shardax._core.frames import check_structural_write, is_ref, owner_here, resolve
from shardax._core.graph import flatten, handlers
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.graph.pytrees import values_of
from shardax._core.module import Module, modules_in
from shardax._core.object import Object
from shardax._core.state.filters import Filter, group_by_filter, matching
from shardax._core.state.forms import StateForm
from shardax._core.state.frozen import FrozenVariable, Origin
from shardax._core.state.state import State, state_of
from shardax._core.state.values_by_path import merged_values
from shardax._core.stored import array_of_attribute, to_stored
from shardax._core.threads import local
from shardax._core.values import copy_value, refuse_deleted, snapshot
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute

T = TypeVar("T")


def flat_tree(tree: object, caller: str) -> flatten.Flat:
    """Flattens the argument of a public function."""
    if isinstance(tree, Object):
        return flatten.flatten(tree)
    flatten.check_tree(tree, caller)
    return flatten.flatten_roots((box_tree(tree),))


def box_tree(tree: object) -> PyTree:
    """Returns the tree with arrays boxed and plain containers kept plain."""
    handler = handlers.handler_of(tree)
    if isinstance(tree, State):
        origins = tree.origins()
        variables = {
            path: _as_variable(value, origins[path]) for path, value in tree.flat().items()
        }
        return State.from_flat(variables, origins)

    if _is_container(tree, handler):
        pairs = [(key, box_tree(child)) for key, child in handler.children(tree)]
        return handler.rebuild(handler.config(tree), pairs)

    if handler.is_object or isinstance(tree, str):
        return tree
    return to_stored(tree, "an entry of the tree")


def _as_variable(value: object, origin: Origin) -> Variable:
    """Returns a value of a State as a Variable of the type that it came from."""
    if isinstance(value, Variable):
        return value
    return origin.variable_type._make(value, origin.all_metadata, owner_here())


def _is_container(tree: object, handler: handlers.Handler) -> bool:
    return handler in handlers.PLAIN or (handler.stores_items and handlers.has_parts(tree))


def unbox_tree(tree: object) -> PyTree:
    """Returns the tree with arrays as the user sees them."""
    handler = handlers.handler_of(tree)
    if isinstance(tree, State):
        values = {path: variable._value for path, variable in tree.flat().items()}
        return State.from_flat(values, tree.origins())
    if not _is_container(tree, handler):
        return array_of_attribute(tree)

    pairs = [(key, unbox_tree(child)) for key, child in handler.children(tree)]
    config = list if handler is handlers.LIST else handler.config(tree)
    return handler.rebuild(config, pairs)


def _read(flat: flatten.Flat, positions: Sequence[int] | None = None) -> State:
    """Returns the values of the Variables at some positions in ``flat.leaves``; None: of all."""
    leaves = flat.leaves if positions is None else [flat.leaves[i] for i in positions]
    values = [value[...] if is_ref(value) else value for value in values_of(leaves)]
    key = None if positions is None else tuple(positions)
    return state_of(_form_of(flat.graphdef, key), values)


# The forms of the States of a structure, by the positions of the Variables in it. A State that is
# read again, as at every step of training, shares the nodes that JAX sees in it.
_forms: weakref.WeakKeyDictionary[GraphDef, dict[tuple[int, ...] | None, StateForm]]
_forms = weakref.WeakKeyDictionary()
_MOST_FORMS = 64  # of one structure


def _form_of(graphdef: GraphDef, positions: tuple[int, ...] | None) -> StateForm:
    """Returns the form of the State of some Variables of a structure, or of all."""
    forms = _forms.setdefault(graphdef, {})
    form = forms.get(positions)
    if form is None:
        chosen = range(len(graphdef.leaves)) if positions is None else positions
        paths = [graphdef.leaf_paths[i] for i in chosen]
        definitions = [graphdef.objects[graphdef.leaves[i]] for i in chosen]
        origins = [Origin(definition.type, definition.metadata) for definition in definitions]
        if len(forms) >= _MOST_FORMS:
            forms.clear()
        form = forms[positions] = StateForm(paths, origins)
    return form


def _named(flat: flatten.Flat) -> Iterator[tuple[Path, Any]]:
    return zip(flat.leaf_paths, flat.leaves, strict=True)


def split(tree: PyTree, *filters: Filter) -> tuple[PyTree, ...]:
    """Splits a model into its structure and its values.

    Args:
        tree: A Module, Variable, container or pytree of them.
        *filters: One State is returned per filter; the first matching filter takes a Variable.
            None: one State with all.

    Returns:
        (graphdef, state, ...).

    Raises:
        FilterError: If a Variable matches no filter.

    Example:
        >>> import shardax as sx
        >>> graphdef, params, rest = sx.split(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.Param, ...)
        >>> list(params), list(rest)
        (['kernel', 'bias'], [])
        >>> sx.merge(graphdef, params, rest).kernel.shape
        (2, 3)
    """
    flat = flat_tree(tree, "split")
    if not filters:
        return (flat.graphdef, _read(flat))
    groups = group_by_filter(filters, _named(flat), complete=True)
    return (flat.graphdef, *(_read(flat, group) for group in groups))


def merge(graphdef: GraphDef, *states: object) -> PyTree:
    """Makes a new model from a structure and values.

    It is the inverse of ``split``.

    Args:
        graphdef: The structure.
        *states: States or nested mappings that together have every Variable.

    Returns:
        A new model (or tree) with new Variables.

    Raises:
        StateMismatchError: If values are missing or unexpected; all are listed.

    Example:
        >>> import shardax as sx
        >>> graphdef, params, rest = sx.split(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.Param, ...)
        >>> sx.merge(graphdef, params, rest).kernel.shape
        (2, 3)
    """
    if not isinstance(graphdef, GraphDef):
        raise errors.no_graphdef(type(graphdef))
    paths = graphdef.leaf_paths
    values = merged_values(states, paths, complete=True, fit=_refuse_text)
    roots, _ = flatten.build(graphdef, [values[path] for path in paths], owner_here())
    return unbox_tree(roots[0])


def _refuse_text(path: Path, value: PyTree) -> tuple[PyTree, str | None]:
    if isinstance(value, (str, bytes)):
        return value, f"holds arrays, given {value!r}"
    return value, None


def state(tree: PyTree, *filters: Filter) -> PyTree:
    """Returns the values of a model by path.

    Args:
        tree: A Module, Variable, container or pytree of them.
        *filters: With none, everything. With one, the matching values. With several, a tuple with
            one State each, where the first matching filter takes a value and what matches none is
            left out.

    Returns:
        A State, or a tuple of States.

    Example:
        >>> import shardax as sx
        >>> sx.state(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.Param)
        State(
          .kernel: float32[2, 3]
          .bias: float32[3]
        )
    """
    flat = flat_tree(tree, "state")
    if not filters:
        return _read(flat)
    states = tuple(_read(flat, group) for group in group_by_filter(filters, _named(flat)))
    return states[0] if len(states) == 1 else states


def graphdef(tree: PyTree) -> GraphDef:
    """Returns the structure of a model.

    It is hashable, and equal for models that differ only in values.

    Args:
        tree: A Module, Variable, container or pytree of them.

    Example:
        >>> import shardax as sx
        >>> one, two = (sx.nn.Linear(2, 3, rngs=sx.Rngs(seed)) for seed in (0, 1))
        >>> sx.graphdef(one) == sx.graphdef(two)
        True
    """
    return flat_tree(tree, "graphdef").graphdef


def update(
    tree: PyTree,
    *states: PyTree,
    cast: Literal["param", "keep"] | None = None,
    strict: bool = False,
) -> None:
    """Writes values into a model's Variables, by path.

    Args:
        tree: A Module, Variable, container or pytree of them.
        *states: States, mappings by path (nested, or as ``state.flat()``), or frozen values, which
            go to the paths that are their labels. Later States and mappings win.
        cast: What to do about another dtype: None to refuse it, ``"param"`` to convert to the
            Variable's, ``"keep"`` to take the value's. A Python number has no dtype of its own.
        strict: Whether every Variable must be given; by default the others keep their values.

    Raises:
        StateMismatchError: If a path does not exist in the model, is missing or frozen, or a label,
            type, shape or dtype differs; all are listed and nothing is changed.
        ModuleError: If two frozen values have one label; nothing is changed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> sx.update(layer, {"bias": jnp.ones(3)})
        >>> layer.bias.value.tolist()
        [1.0, 1.0, 1.0]
        >>> sx.update(layer, {"bias": jnp.zeros(3, "bfloat16")}, cast="param")
        >>> layer.bias.dtype.name
        'float32'
    """
    if cast not in (None, "param", "keep"):
        raise StateMismatchError(f"cast={cast!r} is none of None, 'param' and 'keep'.")
    flatten.check_tree(tree, "update")
    boxed = box_tree(tree)
    flat = flat_tree(boxed, "update")
    variables = dict(_named(flat))
    # Variables that were made just now for the plain arrays of the tree: nobody would see a write.
    temporary = set(map(id, _directly_in(boxed))) - set(map(id, _directly_in(tree)))

    def fit(path: Path, value: object) -> tuple[PyTree, str | None]:
        variable = variables[path]
        if isinstance(variable, FrozenVariable):
            return None, "is frozen; write into sx.thaw(model)"
        if id(variable) in temporary:
            return None, "is a plain array outside any Module; it cannot be written, only replaced"
        if isinstance(value, FrozenVariable) and value.label not in ((), path):
            return None, f"is given the frozen value of {format_path(value.label)}"
        return variable._fitted(value, cast)

    values = merged_values(states, flat.leaf_paths, complete=strict, fit=fit)
    for path, value in values.items():
        variables[path].value = value


def _directly_in(value: PyTree) -> Iterator[Object]:
    """Yields the objects in a value without looking into them."""
    handler = handlers.handler_of(value)
    if handler.is_object:
        yield value
    elif handler.in_models:
        for _, child in handler.children(value):
            yield from _directly_in(child)


def clone(tree: T) -> T:
    """Returns an independent copy with equal structure, sharing and values.

    Its arrays have memory of their own, so that it outlives a donation of the original
    (``donate_argnums``). Lazy values stay lazy. While a transform is tracing nothing is copied:
    what a program donates is decided where it is called.

    Args:
        tree: A Module, Variable, container or pytree of them.

    Raises:
        DonationError: If it holds arrays that were donated or deleted.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> copy = sx.clone(layer)
        >>> copy.kernel is layer.kernel, bool((copy.kernel == layer.kernel).all())
        (False, True)
    """
    return _cloned(tree, copy_value)


def clone_sharing(tree: T) -> T:
    """Returns new objects that share the arrays of the given ones."""
    return _cloned(tree, snapshot)


def _cloned(tree: T, copied: Callable[[PyTree], PyTree]) -> T:
    flat = flat_tree(tree, "clone")
    values = [resolve(leaf, local.frame)._value for leaf in flat.leaves]
    refuse_deleted(flat.leaf_paths, values)
    copies = list(map(copied, values))
    roots, _ = flatten.build(flat.graphdef, copies, owner_here())
    return unbox_tree(roots[0])


def pop(tree: object, *filters: Filter) -> PyTree:
    """Removes the matching Variables from the model and returns their values.

    Args:
        tree: A Module, container or pytree of them.
        *filters: At least one; with several, a tuple of States is returned.

    Returns:
        A State, or a tuple of States.

    Raises:
        FilterError: If no filter is given.
        StateMismatchError: If a matching Variable sits in a list or tuple, where removing it would
            shift the others; nothing is removed then.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Square(sx.Module):
        ...     def __call__(self, x):
        ...         self.sow("seen", x)
        ...         return x**2
        >>> square = Square()
        >>> _ = square(jnp.float32(3))
        >>> sx.pop(square, sx.Intermediate), hasattr(square, "seen")
        (State(
          .seen: ('float32[]',)
        ), False)
    """
    if not filters:
        raise errors.FilterError(
            "pop needs at least one filter, to say which Variables to remove: sx.pop(model, "
            "sx.Intermediate)."
        )
    flatten.check_tree(tree, "pop")
    root = box_tree(tree)
    flat = flat_tree(root, "pop")
    groups = group_by_filter(filters, _named(flat))
    path_by_id = {id(flat.leaves[i]): flat.leaf_paths[i] for group in groups for i in group}

    # All places are found, and refused, before the first is removed.
    removals = list(_removals(root, path_by_id))
    popped = tuple(_read(flat, group) for group in groups)
    for holder, key in removals:
        if isinstance(holder, Module):
            delattr(holder, key)
        else:
            del holder[key]
    return popped if len(popped) != 1 else popped[0]


def _removals(root: PyTree, path_by_id: Mapping[int, Path]) -> Iterator[tuple[Any, Any]]:
    """Yields (holder, key) of every place of the Variables to remove, or raises."""
    walk = flatten.GraphWalk()
    walk.encode(root, ())
    _check_removal(None, root, path_by_id)
    for holder in walk.objects:
        for key, child in handlers.children_in_model(holder):
            if _check_removal(holder, child, path_by_id):
                check_structural_write(holder, f"{key!r} of a {type(holder).__name__}")
                yield holder, key


def _check_removal(holder: object, child: PyTree, path_by_id: Mapping[int, Path]) -> bool:
    """Returns whether a child of a holder is to be removed; raises if only a part of it is."""
    variables = [item for item in _directly_in(child) if id(item) in path_by_id]
    if not variables:
        return False
    has_names = isinstance(holder, (Module, Dict))
    if child is variables[0] and has_names:
        return True

    if holder is None:
        holder_text = "what was given"
    else:
        holder_text = f"a {type(child if has_names else holder).__name__}"
    raise errors.unremovable(path_by_id[id(variables[0])], holder_text)


def iter_variables(tree: object, *filters: Filter) -> Iterator[tuple[Path, Variable]]:
    """Yields (path, Variable) pairs in order, each Variable once.

    Args:
        tree: A Module, Variable, container or pytree of them.
        *filters: Which Variables, those that match any; none: all.

    Yields:
        (path, Variable).

    Example:
        >>> import shardax as sx
        >>> [path for path, _ in sx.iter_variables(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))]
        [('kernel',), ('bias',)]
    """
    flat = flat_tree(tree, "iter_variables")
    for position in matching(filters or (...,), _named(flat)):
        yield flat.leaf_paths[position], flat.leaves[position]


def describe_plain_arrays(tree: object, where: Path = ()) -> str:
    """Describes, for errors, the arrays of a tree that are no Variables."""
    flat = flat_tree(tree, "iter_variables")
    paths = [
        path
        for path, leaf in _named(flat)
        if type(leaf) is ArrayAttribute and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if not paths:
        return ""

    listed = first_of([format_path((*where, *path)) for path in paths])
    return (
        f" Plain arrays ({listed}) are no parameters; wrap those that are to be learned "
        f"where they are made: `sx.Param(array)`."
    )


def iter_modules(tree: object) -> Iterator[tuple[Path, Module]]:
    """Yields (path, Module) pairs in order, each Module once.

    Args:
        tree: A Module, Variable, container or pytree of them.

    Yields:
        (path, Module), the tree itself included.

    Example:
        >>> import shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> [type(module).__name__ for _, module in sx.iter_modules(mlp)]
        ['MLP', 'Linear', 'Linear', 'Linear']
    """
    flatten.check_tree(tree, "iter_modules")
    yield from modules_in(box_tree(tree))


def find_duplicates(tree: object) -> list[list[Path]]:
    """Returns the paths of each Variable with several.

    Args:
        tree: A Module, Variable, container or pytree of them.

    Returns:
        One list of paths per shared Variable.

    Example:
        >>> import shardax as sx
        >>> class Tied(sx.Module):
        ...     def __init__(self):
        ...         self.embed = sx.Param(0.0)
        ...         self.head = self.embed
        >>> sx.find_duplicates(Tied())
        [[('embed',), ('head',)]]
    """
    flatten.check_tree(tree, "find_duplicates")
    paths_by_id: dict[int, list[Path]] = {}
    for path, variable in _occurrences(box_tree(tree), (), ()):
        paths_by_id.setdefault(id(variable), []).append(path)
    return [paths for paths in paths_by_id.values() if len(paths) > 1]


def _occurrences(
    value: object, path: Path, above: tuple[int, ...]
) -> Iterator[tuple[Path, Variable]]:
    """Yields every acyclic path to every Variable."""
    if isinstance(value, Variable):
        yield path, value
        return
    if id(value) in above:
        return
    for key, child in handlers.children_in_model(value):
        below = path if key is None else (*path, key)
        yield from _occurrences(child, below, (*above, id(value)))
