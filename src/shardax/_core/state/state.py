# SPDX-License-Identifier: Apache-2.0
"""States: values of a model by path.

A ``State`` maps paths to values. It looks like a nested mapping (``state["layers"][0]["kernel"]``,
``state.layers[0].kernel``) and is stored flat. It is immutable, and a pytree whose leaves are the
values, so optimizers and ``jax.tree.map`` work on it. For each path it keeps the *origin* of the
value, the type and metadata of its Variable, so that it can be filtered like a model.

To JAX a State is a node for each step of its paths, as nested dicts are: its children are values
and, below a step that is not the last of a path, States. Key paths have one ``DictKey`` a step,
like those of ``state.to_pure_dict()``, but the values keep their order. What JAX rebuilds holds
such nodes until it is asked for values by path.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import DictKey

from shardax._core.cross_process import packed
from shardax._core.errors import ModuleError, StateMismatchError
from shardax._core.frozen import FrozenVariable, Origin
from shardax._core.graph.handlers import PLAIN, Handler, handler_of, register
from shardax._core.graph.paths import KeyEntry, Leaf, Path, attribute_key, format_path
from shardax._core.graph.static import EMPTY
from shardax._core.object import Object, Shown
from shardax._core.state.filters import Filter, group_by_filter
from shardax._core.state.layouts import is_layout, lay_out_alike
from shardax._core.text import layout_text
from shardax._core.values import same_value
from shardax._core.variable import Variable

_UNKNOWN = Origin(Variable, EMPTY)


class _BareStep(enum.Enum):
    """The step to the value of a bare Variable, whose path has none."""

    VALUE = "()"

    def __repr__(self) -> str:
        return self.value


_NO_STEP = _BareStep.VALUE

# What one node is besides its children: the step to each, and its origin, None for a State below.
NodeForm: TypeAlias = tuple[tuple[Hashable, ...], tuple[Origin | None, ...]]
Node: TypeAlias = "tuple[Sequence[Leaf | State], NodeForm]"


class _Entries(NamedTuple):
    """Entries of a State, to be put into nodes by their paths."""

    paths: Sequence[Path]  # of at least one step
    values: Sequence[Leaf]
    origins: Sequence[Origin]

    def node(self, start: int, stop: int, depth: int) -> Node:
        """Returns the node of some neighbours that share so many steps."""
        paths = self.paths
        steps: list[Hashable] = []
        children: list[Leaf | State] = []
        kinds: list[Origin | None] = []
        below = depth + 1

        while start < stop:
            path = paths[start]
            step = path[depth]
            steps.append(step)

            if len(path) == below:
                children.append(self.values[start])
                kinds.append(self.origins[start])
                start += 1
                continue

            # A State for all that goes on with the same step.
            end = start + 1
            while end < stop and len(paths[end]) > below and paths[end][depth] == step:
                end += 1
            children.append(_state_of(self.node(start, end, below)))
            kinds.append(None)
            start = end

        return children, (tuple(steps), tuple(kinds))


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

    # By path, and as JAX's node: one of both is always there, the other once it was asked for.
    __slots__ = ("_node", "_origins_by_path", "_values_by_path")
    _values_by_path: dict[Path, Leaf] | None
    _origins_by_path: dict[Path, Origin] | None
    _node: Node | None

    def __init__(self, entries: Mapping[Any, Any] = {}) -> None:
        if isinstance(entries, State):
            values, origins = entries._values, entries._origins
        else:
            if not isinstance(entries, Mapping):
                raise StateMismatchError(
                    f"A State is made of a nested mapping, sx.State({{'kernel': array}}), not of a "
                    f"{type(entries).__name__}. Of a model take sx.state(model)."
                )
            values = flatten_mapping(entries)
            origins = dict.fromkeys(values, _UNKNOWN)
        self._values_by_path = dict(values)
        self._origins_by_path = dict(origins)
        self._node = None

    @classmethod
    def from_flat(
        cls, values: Mapping[Path, object], origins: Mapping[Path, Origin] | None = None
    ) -> State:
        """Makes a State from values by full path.

        Args:
            values: Path tuple to value, in order.
            origins: What each came from; by default unknown.
        """
        state = object.__new__(cls)
        known = origins or {}
        state._values_by_path = dict(values)
        state._origins_by_path = {path: known.get(path, _UNKNOWN) for path in values}
        state._node = None
        return state

    @property
    def _values(self) -> dict[Path, Leaf]:
        if self._values_by_path is None:
            values: dict[Path, Leaf] = {}
            self._add_values((), values)
            self._values_by_path = values
        return self._values_by_path

    @property
    def _origins(self) -> dict[Path, Origin]:
        if self._origins_by_path is None:
            known: dict[Path, Origin] = {}
            self._add_origins((), known)
            self._origins_by_path = known
        return self._origins_by_path

    def _add_values(self, start: Path, values: dict[Path, Leaf]) -> None:
        """Adds values by path, below a start."""
        children, (steps, origins) = self._node or self._as_node()
        for step, origin, child in zip(steps, origins, children, strict=True):
            path = start if step is _NO_STEP else (*start, step)
            if origin is None and isinstance(child, State):
                child._add_values(path, values)
                continue
            if origin is None and path in values:
                raise _replaced_twice(path)
            values[path] = child

    def _add_origins(self, start: Path, known: dict[Path, Origin]) -> None:
        """Adds origins by path, below a start."""
        children, (steps, origins) = self._node or self._as_node()
        for step, origin, child in zip(steps, origins, children, strict=True):
            path = start if step is _NO_STEP else (*start, step)
            if origin is None and isinstance(child, State):
                child._add_origins(path, known)
            else:  # without an origin, a function of JAX has put a value in a State's place
                known[path] = origin or _UNKNOWN

    def _as_node(self) -> Node:
        """Returns JAX's node: children and form."""
        if self._node is None:
            values, origins = self._values, self._origins
            paths = [path or (_NO_STEP,) for path in values]
            entries = _Entries(paths, list(values.values()), list(origins.values()))
            self._node = entries.node(0, len(paths), 0)
        return self._node

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
        below = [path for path in self._values if len(path) > 1 and path[0] == key]
        if not below:
            raise KeyError(f"{key!r} (present: {', '.join(map(repr, self))})")
        return State.from_flat(
            {path[1:]: self._values[path] for path in below},
            {path[1:]: self._origins[path] for path in below},
        )

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

    def __copy__(self) -> State:
        return State(self)

    def __getstate__(self) -> Any:
        values = {path: packed(value) for path, value in self._values.items()}
        return values, self._origins

    def __setstate__(self, state: Any) -> None:
        self._values_by_path, self._origins_by_path = state
        self._node = None

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
        paths = list(self._values)
        groups = group_by_filter(filters, self._origins.items())
        states = tuple(self._take(paths[i] for i in group) for group in groups)
        return states if len(states) > 1 else states[0] if states else self._take(())

    def split(self, *filters: Filter) -> tuple[State, ...]:
        """Returns one State per filter; the first matching filter takes an entry.

        Raises:
            FilterError: If an entry matches none.
        """
        paths = list(self._values)
        groups = group_by_filter(filters, self._origins.items(), complete=True)
        return tuple(self._take(paths[i] for i in group) for group in groups)

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
            place = nested
            for step in path[:-1]:
                place = place.setdefault(step, {})
            place[path[-1]] = value
        return nested

    def _take(self, paths: Iterable[Path]) -> State:
        chosen = list(paths)
        return State.from_flat({p: self._values[p] for p in chosen}, self._origins)

    def __repr__(self) -> str:
        layout = layout_text(
            (path, self._origins[path].axes, value) for path, value in self._values.items()
        )
        if layout is not None:
            return layout
        rows = [f"  {format_path(path)}: {_shown(value)}" for path, value in self._values.items()]
        return "State(\n" + "\n".join(rows) + "\n)" if rows else "State()"


def _state_of(node: Node) -> State:
    """Returns the State that JAX sees as a node."""
    state = object.__new__(State)
    state._values_by_path = None
    state._origins_by_path = None
    state._node = node
    return state


def _replaced_twice(path: Path) -> StateMismatchError:
    return StateMismatchError(
        f"Entries below {format_path(path)} stand at several positions of this State, as after "
        f"merge, so it has several parts there, and a function of JAX with is_leaf= put a value in "
        f"the place of each. Bring them together first: state = sx.State(state.to_pure_dict())."
    )


_ABSENT = object()


def _shown(value: Any) -> str:
    if isinstance(value, Object):  # such as a gradient that is a Module
        return repr(value)
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"{value.dtype}{list(value.shape)}"
    return (
        repr(jax.tree.map(_shown, value)) if not jax.tree_util.all_leaves((value,)) else repr(value)
    )


def flatten_mapping(
    entries: object, known: Any = None, path: Path = (), raw: bool = False
) -> dict[Path, Leaf]:
    """Flattens a nested mapping to values, or raw Variables, by path."""
    # Where paths are known, lists, tuples, dataclasses and nodes nest as mappings do.
    if isinstance(entries, State):
        return {(*path, *below): value for below, value in entries.flat().items()}
    is_mapping = isinstance(entries, Mapping)
    flat: dict[Path, Leaf] = {}
    for key, value in entries.items() if is_mapping else handler_of(entries).children(entries):
        here = (*path, key)
        nests = _nests(value) if known is not None else isinstance(value, Mapping)
        if nests and not (known is not None and here in known):
            flat.update(flatten_mapping(value, known, here, raw))
        else:
            flat[here] = value.value if isinstance(value, Variable) and not raw else value
    return flat


def _nests(value: object) -> bool:
    """Whether a value holds others, as containers and mappings do."""
    handler = handler_of(value)
    is_container = handler in PLAIN or (handler.stores_items and not handler.whole)
    return is_container or isinstance(value, Mapping)


def by_paths_of(entries: object, known: Collection[Path]) -> dict[Path, Leaf]:
    """Returns values arranged like a model by its paths, without Nones."""
    if not isinstance(entries, State) and (() in known or not _nests(entries)):
        return {(): entries}
    by_path = flatten_mapping(entries, known)
    return {path: value for path, value in by_path.items() if value is not None}


def _by_path(entries: object, known: Collection[Path]) -> dict[Path, Leaf]:
    """Returns what was given, by path or label."""
    if isinstance(entries, State):
        return entries.flat()
    if isinstance(entries, Mapping):
        heads = {path[:1] for path in known}
        is_flat = all(isinstance(key, tuple) and (key,) not in heads for key in entries)
        return dict(entries) if is_flat else flatten_mapping(entries, known, raw=True)
    leaves = jax.tree.leaves(entries, is_leaf=lambda leaf: isinstance(leaf, Object))
    if isinstance(entries, (FrozenVariable, tuple, list)) and all(
        isinstance(leaf, FrozenVariable) for leaf in leaves
    ):
        by_label: dict[Path, Leaf] = {}
        for leaf in leaves:
            _refuse_second(by_label.setdefault(leaf.label, leaf), leaf, leaf.label)
        return by_label
    raise StateMismatchError(
        f"Values are given as a State, a mapping by path (nested, or state.flat()), or a tuple of "
        f"frozen values, but one is {str(entries)[:80]!r} of type {type(entries).__name__}. Of a "
        f"model take sx.state(model); nothing was changed."
    )


def _refuse_second(first: object, second: object, label: Path) -> None:
    """Raises if two frozen values are given for one label."""
    both_frozen = isinstance(first, FrozenVariable) and isinstance(second, FrozenVariable)
    if both_frozen and first is not second:
        raise ModuleError(
            f"Two frozen values have the label {format_path(label)}; nothing was changed. A label "
            f"says which Variable a value belongs to, so there is one for each. Take one of them "
            f"out, or call update twice."
        )


def _flatten(state: State) -> Node:
    return state._node or state._as_node()


def _flatten_with_keys(state: State) -> tuple[list[tuple[KeyEntry, Leaf | State]], NodeForm]:
    children, form = _flatten(state)
    return list(zip(map(_key_of, form[0]), children, strict=True)), form


def _key_of(step: Hashable) -> KeyEntry:
    # The value of a bare Variable has the key that it has in the Variable.
    return attribute_key("value") if step is _NO_STEP else DictKey(step)


def _unflatten(form: NodeForm, children: Iterable[Leaf | State]) -> State:
    return _state_of((tuple(children), form))


def _rebuild(origins: Mapping[Path, Origin], pairs: Iterable[tuple[object, object]]) -> State:
    values: dict[Path, Leaf] = {}
    known = {**origins}
    for key, item in pairs:
        if isinstance(item, State):
            values.update(((key, *path), value) for path, value in item._values.items())
            known.update(((key, *path), origin) for path, origin in item._origins.items())
        else:
            values[(key,)] = item
    return State.from_flat(values, known)


register(
    State,
    Handler(
        "State",
        children=lambda state: [(key, state[key]) for key in state],
        config=lambda state: tuple(state._origins.items()),
        rebuild=lambda origins, pairs: _rebuild(dict(origins), pairs),
        in_models=True,
        whole=True,
        size="shrinks",
    ),
)
jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)


def merged_values(
    states: Sequence[object],
    known: Sequence[Path],
    complete: bool = False,
    fit: Callable[[Path, Any], tuple[object, str | None]] = lambda path, value: (value, None),
) -> dict[Path, Leaf]:
    """Joins States, mappings and frozen values into values by known paths."""
    # Formats that only have string keys turn 0 into "0"; such a step is understood where the model
    # has no other reading. Later mappings win. All mismatches are listed in one error.
    spelled = {tuple(map(str, path)): path for path in known}
    known_set = set(known)
    values: dict[Path, Leaf] = {}
    unexpected: list[Path] = []
    for entries in states:
        for path, value in _by_path(entries, known_set).items():
            place = path if path in known_set else spelled.get(tuple(map(str, path)))
            if place is None:
                unexpected.append(path)
            else:
                _refuse_second(values.get(place), value, place)
                values[place] = value
    missing = [path for path in known if path not in values] if complete else []
    wrong = []
    for path, value in values.items():
        values[path], problem = fit(path, value)
        if problem:
            wrong.append(f"  {format_path(path)}: {problem}")
    if unexpected or missing or wrong:
        candidates = missing or known
        raise StateMismatchError(_mismatch(unexpected, missing, wrong, len(values), candidates))
    return {p: v.value if isinstance(v, Variable) else v for p, v in values.items()}


def _mismatch(
    unexpected: Sequence[Path],
    missing: Sequence[Path],
    wrong: Sequence[str],
    count: int,
    candidates: Sequence[Path],
) -> str:

    names = [format_path(path) for path in candidates]
    parts = []
    if unexpected:
        lines = []
        for path in map(format_path, unexpected):
            near = difflib.get_close_matches(path, names, n=1)
            lines.append(f"  {path}" + (f" (did you mean {near[0]}?)" if near else ""))
        counted = "1 entry does" if len(unexpected) == 1 else f"{len(unexpected)} entries do"
        parts.append(f"{counted} not belong to any Variable of the model:\n" + "\n".join(lines))
    if missing:
        lines = [f"  {format_path(path)}" for path in missing]
        counted = "1 value is" if len(missing) == 1 else f"{len(missing)} values are"
        parts.append(
            f"{counted} missing (pass every State that split returned):\n" + "\n".join(lines)
        )
    if unexpected or missing:
        parts.insert(0, "The State does not fit the model; nothing was changed.")
    if wrong:
        parts.append(f"{len(wrong)} of {count} values do not fit; nothing was changed:")
        parts += wrong
        parts.append(
            "To change a shape on purpose, assign to the Variable: model.path.value = array. For "
            "dtypes, cast='param' converts to the Variable's and cast='keep' takes the value's."
        )
    return "\n".join(parts).replace("changed.\n", "changed. ", 1)
