# SPDX-License-Identifier: Apache-2.0
"""States: values of a model by path.

A ``State`` maps paths to values. It looks like a nested mapping (``state["layers"][0]["kernel"]``,
``state.layers[0].kernel``) and is stored flat: the values in order, and its *form*
(``_core.state.forms``), which has the path of each and its *origin*, the type and metadata of the
Variable that it came from. So a State can be filtered like a model. It is immutable, and a pytree
whose leaves are the values, so optimizers and ``jax.tree.map`` work on it.

To JAX a State is a node for each step of its paths, as nested dicts are: its children are values
and, below a step that is not the last of a path, States. Key paths have one ``DictKey`` a step,
like those of ``state.to_pure_dict()``, but the values keep their order. What JAX rebuilds holds
such children until it is asked for values by path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core import errors
from shardax._core.cross_process import PickledArray
from shardax._core.graph.handlers import Handler, register
from shardax._core.graph.paths import KeyEntry, Leaf, Path, format_path
from shardax._core.object import Object, Shown
from shardax._core.state.filters import Filter, group_by_filter
from shardax._core.state.forms import UNKNOWN_ORIGIN, StateForm, StateNode, path_below
from shardax._core.state.frozen import Origin
from shardax._core.state.layouts import is_layout, lay_out_alike
from shardax._core.text import layout_text
from shardax._core.values import same_value
from shardax._core.variable import Variable


class State(Shown, Mapping[Any, Any]):
    """Values by path; see the module's text.

    Two are equal if paths, origins (types of Variables and their metadata, such as names of axes)
    and every number or shape are. ``state.flat()`` compares the values alone. Shardings and specs
    are equal where they lay out arrays in the same way, whatever names they came from.

    Args:
        entries: A nested mapping (or another State) of values.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> state = sx.State({"layers": {0: {"kernel": jnp.ones(2)}}})
        >>> state["layers"][0]["kernel"].tolist(), state.layers[0].kernel.tolist()
        ([1.0, 1.0], [1.0, 1.0])
        >>> list(state.flat())
        [('layers', 0, 'kernel')]
    """

    # The form or the outermost node, and the values in order or the children that JAX gave: one of
    # each is there from the beginning, the other once it was asked for. So is the dict by path.
    __slots__ = ("_children", "_form", "_leaves", "_node", "_value_by_path")
    _form: StateForm | None
    _leaves: Sequence[Leaf] | None
    _node: StateNode | None
    _children: Sequence[Leaf | State] | None
    _value_by_path: dict[Path, Leaf] | None

    def __init__(self, entries: Mapping[Any, Any] = {}) -> None:
        if isinstance(entries, State):
            self._set(*entries._flat_parts())
            return

        if not isinstance(entries, Mapping):
            raise errors.no_mapping(entries)
        values = flatten_mapping(entries)
        form = StateForm(list(values), [UNKNOWN_ORIGIN] * len(values))
        self._set(form, list(values.values()))

    @classmethod
    def from_flat(
        cls, values: Mapping[Path, object], origins: Mapping[Path, Origin] | None = None
    ) -> State:
        """Makes a State from values by full path.

        Args:
            values: Path tuple to value, in order.
            origins: What each came from; by default unknown.
        """
        known = origins or {}
        form = StateForm(list(values), [known.get(path, UNKNOWN_ORIGIN) for path in values])
        return state_of(form, list(values.values()))

    def _set(self, form: StateForm, leaves: Sequence[Leaf]) -> None:
        self._form = form
        self._leaves = leaves
        self._node = self._children = self._value_by_path = None

    # --- form and values, node and children ------------------------------------------------------

    def _flat_parts(self) -> tuple[StateForm, Sequence[Leaf]]:
        """Returns the form, and the values in its order."""
        if self._form is not None and self._leaves is not None:
            return self._form, self._leaves

        leaves: list[Leaf] = []
        if self._collect(leaves):
            node, _ = self._jax_parts()
            self._form, self._leaves = node.form, leaves
        else:
            # A function of JAX with is_leaf= has put something else in the place of a State.
            values: dict[Path, Leaf] = {}
            origins: dict[Path, Origin] = {}
            self._add_entries((), values, origins)
            self._form = StateForm(list(values), list(origins.values()))
            self._leaves = list(values.values())
        return self._form, self._leaves

    def _collect(self, leaves: list[Leaf]) -> bool:
        """Adds the values in order; returns whether a State stands at each node below."""
        node, children = self._jax_parts()
        if node.below is None:
            leaves.extend(children)
            return True

        for child, below in zip(children, node.below, strict=True):
            if below is None:
                leaves.append(child)
            elif not (isinstance(child, State) and child._node is below and child._collect(leaves)):
                return False
        return True

    def _add_entries(
        self, start: Path, values: dict[Path, Leaf], origins: dict[Path, Origin]
    ) -> None:
        """Adds values and origins by path, below a start, whatever stands in places of States."""
        node, children = self._jax_parts()
        for step, origin, child in zip(node.steps, node.origins, children, strict=True):
            path = path_below(start, step)
            if origin is None and isinstance(child, State):
                child._add_entries(path, values, origins)
                continue
            if origin is None and path in values:
                raise errors.replaced_twice(path)
            values[path] = child
            origins[path] = origin or UNKNOWN_ORIGIN

    def _jax_parts(self) -> tuple[StateNode, Sequence[Leaf | State]]:
        """Returns the node that JAX sees, and its children."""
        if self._node is None:
            assert self._form is not None  # one of both is always there
            self._node = self._form.node
        if self._children is None:
            assert self._leaves is not None  # likewise
            self._children = _children_of(self._node, self._leaves)
        return self._node, self._children

    # --- by path ---------------------------------------------------------------------------------

    @property
    def _values(self) -> dict[Path, Leaf]:
        if self._value_by_path is None:
            form, leaves = self._flat_parts()
            self._value_by_path = dict(zip(form.paths, leaves, strict=True))
        return self._value_by_path

    @property
    def _origins(self) -> Mapping[Path, Origin]:
        return self._flat_parts()[0].origin_by_path

    def flat(self) -> dict[Path, Leaf]:
        """Returns a dict from full path to value, in order."""
        return dict(self._values)

    def origins(self) -> dict[Path, Origin]:
        """Returns a dict from full path to the value's origin."""
        return dict(self._origins)

    def __getitem__(self, key: Any) -> Any:
        leaf = self._values.get((key,), _ABSENT)
        if leaf is not _ABSENT:
            return leaf

        origins = self._origins
        below = [path for path in self._values if len(path) > 1 and path[0] == key]
        if not below:
            raise KeyError(f"{key!r} (present: {', '.join(map(repr, self))})")
        form = StateForm([path[1:] for path in below], [origins[path] for path in below])
        return state_of(form, [self._values[path] for path in below])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            text = f"State has no entry {error.args[0]}"
            if hasattr(Variable, name):
                text += (
                    ". Its entries are the values themselves, not Variables: what a Variable was "
                    "is in state.origins()[path]"
                )
            raise AttributeError(f"{text}.", name=name, obj=self) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(path[0] for path in self._values if path))

    def __len__(self) -> int:
        return len({path[0] for path in self._values if path})

    def __contains__(self, key: object) -> bool:
        return any(path[:1] == (key,) for path in self._values)

    # --- copies and comparison -------------------------------------------------------------------

    def __copy__(self) -> State:
        return State(self)

    def __getstate__(self) -> Any:
        values = {path: PickledArray.in_tree(value) for path, value in self._values.items()}
        return values, dict(self._origins)

    def __setstate__(self, state: Any) -> None:
        values, origins = state
        self._set(StateForm(list(values), list(origins.values())), list(values.values()))

    def __eq__(self, other: object) -> bool:
        """Whether paths, origins and every value are the same."""
        if self is other:
            return True
        if not isinstance(other, State):
            return NotImplemented
        if self._values.keys() != other._values.keys():
            return False
        return all(self._has_same_entry(other, path) for path in self._values)

    def _has_same_entry(self, other: State, path: Path) -> bool:
        first, second = self._values[path], other._values[path]
        origins = self._origins[path], other._origins[path]

        # Where a layout came from says nothing more about it: other names, by other rules, may have
        # led to the same one.
        if is_layout(first) and is_layout(second):
            same_type = origins[0].variable_type is origins[1].variable_type
            return same_type and lay_out_alike(first, second)
        return origins[0] == origins[1] and same_value(first, second)

    def __hash__(self) -> int:
        return hash(frozenset(self._values))

    # --- parts -----------------------------------------------------------------------------------

    def filter(self, *filters: Filter) -> Any:
        """Returns the entries that a filter matches.

        Args:
            *filters: See ``_core.state.filters``. With several, a tuple with one State each, where
                the first matching filter takes an entry. A tuple of filters matches any of them.

        Returns:
            A State, or a tuple of States; without filters, a State without entries.

        Example:
            >>> import shardax as sx
            >>> state = sx.state(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
            >>> list(state.filter(sx.PathContains("bias")).flat())
            [('bias',)]
            >>> biases, others = state.filter(sx.PathContains("bias"), ...)
            >>> list(others)
            ['kernel']
        """
        groups = group_by_filter(filters, self._origins.items())
        states = tuple(self._take(positions) for positions in groups)
        if not states:
            return self._take(())
        if len(states) > 1:
            return states
        return states[0]  # pyright: ignore[reportGeneralTypeIssues] (it is not empty here)

    def split(self, *filters: Filter) -> tuple[State, ...]:
        """Returns one State per filter; the first matching filter takes an entry.

        Raises:
            FilterError: If an entry matches none.
        """
        groups = group_by_filter(filters, self._origins.items(), complete=True)
        return tuple(self._take(positions) for positions in groups)

    def _take(self, positions: Sequence[int]) -> State:
        """Returns the State of the entries at some positions."""
        form, leaves = self._flat_parts()
        paths = [form.paths[i] for i in positions]
        origins = [form.origins[i] for i in positions]
        return state_of(StateForm(paths, origins), [leaves[i] for i in positions])

    def merge(self, *others: State) -> State:
        """Returns a State with the entries of all; later ones win."""
        values, origins = dict(self._values), dict(self._origins)
        for other in others:
            values.update(other._values)
            origins.update(other._origins)
        return State.from_flat(values, origins)

    def to_pure_dict(self) -> dict[Any, Any]:
        """Returns the values in nested plain dicts.

        That of a bare Variable's State is ``{(): value}``.
        """
        if () in self._values:
            return dict(self._values)

        nested: dict[Any, Any] = {}
        for path, value in self._values.items():
            holder = nested
            for step in path[:-1]:
                holder = holder.setdefault(step, {})
            holder[path[-1]] = value
        return nested

    def __repr__(self) -> str:
        origins = self._origins
        layout = layout_text(
            (path, origins[path].axes, value) for path, value in self._values.items()
        )
        if layout is not None:
            return layout
        rows = [f"  {format_path(path)}: {_shown(value)}" for path, value in self._values.items()]
        return "State(\n" + "\n".join(rows) + "\n)" if rows else "State()"


def state_of(form: StateForm, values: Sequence[Leaf]) -> State:
    """Returns the State of a form and of values in its order."""
    state = object.__new__(State)
    state._set(form, values)
    return state


_ABSENT = object()


def _shown(value: Any) -> str:
    if isinstance(value, Object):  # such as a gradient that is a Module
        return repr(value)
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"{value.dtype}{list(value.shape)}"
    if jax.tree_util.all_leaves((value,)):
        return repr(value)
    return repr(jax.tree.map(_shown, value))


def flatten_mapping(entries: Mapping[Any, Any], path: Path = ()) -> dict[Path, Leaf]:
    """Returns the values of nested mappings by path; in place of a Variable its value."""
    if isinstance(entries, State):
        return {(*path, *below): value for below, value in entries.flat().items()}

    values: dict[Path, Leaf] = {}
    for key, value in entries.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            values.update(flatten_mapping(value, here))
        else:
            values[here] = value.value if isinstance(value, Variable) else value
    return values


# --- for JAX and walks ----------------------------------------------------------------------------


def _children_of(node: StateNode, leaves: Sequence[Leaf]) -> Sequence[Leaf | State]:
    """Returns the children of a node: values, and a State for each node below."""
    if node.below is None:
        return leaves

    children: list[Leaf | State] = []
    position = 0
    for below in node.below:
        if below is None:
            children.append(leaves[position])
            position += 1
            continue

        end = position + below.size
        state = object.__new__(State)
        state._form, state._leaves = None, leaves[position:end]
        state._node, state._children = below, None
        state._value_by_path = None
        children.append(state)
        position = end
    return children


def _flatten(state: State) -> tuple[Sequence[Leaf | State], StateNode]:
    node, children = state._node, state._children
    if node is None or children is None:
        node, children = state._jax_parts()
    return children, node


def _flatten_with_keys(state: State) -> tuple[list[tuple[KeyEntry, Leaf | State]], StateNode]:
    children, node = _flatten(state)
    return list(zip(node.key_entries(), children, strict=True)), node


def _unflatten(node: StateNode, children: Iterable[Leaf | State]) -> State:
    state = object.__new__(State)
    state._form, state._leaves = None, None
    state._node, state._children = node, tuple(children)
    state._value_by_path = None
    return state


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)


def _rebuild(origins: Mapping[Path, Origin], pairs: Iterable[tuple[object, object]]) -> State:
    """Returns a State of other entries at its first steps."""
    values: dict[Path, Leaf] = {}
    known = {**origins}
    for key, item in pairs:
        if isinstance(item, State):
            values.update(((key, *path), value) for path, value in item.flat().items())
            known.update(((key, *path), origin) for path, origin in item.origins().items())
        else:
            values[(key,)] = item
    return State.from_flat(values, known)


register(
    State,
    Handler(
        "State",
        children=lambda state: [(key, state[key]) for key in state],
        config=lambda state: tuple(state.origins().items()),
        rebuild=lambda origins, pairs: _rebuild(dict(origins), pairs),
        in_models=True,
        whole=True,
        size="shrinks",
    ),
)
