# SPDX-License-Identifier: Apache-2.0
"""Prefixes: entries of a caller's option, spread over Variables and arrays.

Options such as ``in_shardings`` and ``in_axes`` are given per argument. For a Module an *entry* may
be one value for all its Variables, a ``State`` or nested mapping with one value per path, or a
*filter mapping* (``StateSharding``, ``StateAxes``), of which the first filter that matches gives
the value. A Variable that is reached twice is one Variable, so it must get one value; two different
entries are an error with both paths. A choice by path holds for all paths of a Variable
(``alias_paths``).

A *mapped* call runs its function on parts of its arguments: ``vmap`` on batch elements, ``scan`` on
iterations, ``shard_map`` on shards. Before the run, ``EntryAssignment`` spreads the in-prefix over
the arguments. In the run, ``output_entries`` spreads both prefixes over what the function left
behind, so that a new Variable, too, has the entry of its place in the result, or of the argument
that it was attached to. JAX wants out-entries before the run, when it is only known which entries
can occur; so values leave grouped by entry, one list for each (``MappedCall``).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core.errors import FilterError
from shardax._core.frames import is_eager, is_ref, kind_of, owner_here
from shardax._core.graph import flatten as graphs
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.init.lazy import LazyValue, compute_all
from shardax._core.object import Object
from shardax._core.state.filters import PathContains, first_match, no_match_error, to_predicates
from shardax._core.state.state import State, flatten_mapping
from shardax._core.threads import write_lock
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding, engine


def alias_paths(graphdef: graphs.GraphDef) -> tuple[tuple[int, Path], ...]:
    """Returns (position among the Variables, path) of further ways to reach Variables."""
    # From every shared place there is one way to each Variable that can be reached from there, so
    # that there are not more than shared places times Variables, and every Variable with a further
    # way has one here. No way leads back to an object that it came through.
    paths = _aliases.get(graphdef)
    if paths is None:
        paths = _aliases[graphdef] = _find_alias_paths(graphdef)
    return paths


_aliases: weakref.WeakKeyDictionary[graphs.GraphDef, tuple[tuple[int, Path], ...]] = (
    weakref.WeakKeyDictionary()
)


def _find_alias_paths(graphdef: graphs.GraphDef) -> tuple[tuple[int, Path], ...]:
    met: set[int] = set()
    # (object, path, objects on the way) of each way to an object that was met before.
    edges: list[tuple[int, Path, tuple[int, ...]]] = []

    def visit(position: int, path: Path, above: tuple[int, ...]) -> None:
        if position in met:
            if position not in above:
                edges.append((position, path, above))
            return
        met.add(position)
        for below, way in objects_in(graphdef.objects[position], path):
            visit(below, way, (*above, position))

    def reach(position: int, path: Path, visited: set[int]) -> Iterator[tuple[int, Path]]:
        """Yields every object reachable from one, itself first, with a path."""
        if position in visited:
            return
        visited.add(position)
        yield position, path
        for below, way in objects_in(graphdef.objects[position], path):
            yield from reach(below, way, visited)

    for root in graphdef.roots:
        for position, path in _objects(root, ()):
            visit(position, path, ())
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    alias_leaves: list[tuple[int, Path]] = []
    for target, path, came_through in edges:
        reached = reach(target, path, set(came_through))
        alias_leaves += sorted((leaf_of[i], way) for i, way in reached if i in leaf_of)
    return tuple(alias_leaves)


def objects_in(definition: object, path: Path) -> Iterator[tuple[int, Path]]:
    """Yields the objects that a definition holds, and their paths."""
    for key, child in graphs.definition_children(definition):
        yield from _objects(child, path if key is None else (*path, key))


def _objects(child: object, path: Path) -> Iterator[tuple[int, Path]]:
    """Yields the object that a child is, or those in it."""
    if type(child) is graphs.Ref:
        yield child.position, path
    elif type(child) is graphs.NodeDef:
        for key, below in graphs.definition_children(child):
            yield from _objects(below, path if key is None else (*path, key))


class FilterMapping(Mapping[Any, Any]):
    """An ordered mapping from filters to values; the first match wins."""

    __slots__ = ("_filters", "_predicates", "_values")

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        if isinstance(entries, State):
            pairs: list[tuple[Any, Any]] = [
                (ExactPath(path), value) for path, value in entries.flat().items()
            ]
        else:
            pairs = list(entries.items() if isinstance(entries, Mapping) else entries)
        self._filters = tuple(item for item, _ in pairs)
        self._values = tuple(value for _, value in pairs)
        self._predicates = to_predicates(self._filters)

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, in order."""
        return self._filters

    def lookup(self, path: Path, variable: object) -> PyTree:
        """Returns the value for a Variable."""
        position = first_match(self._predicates, path, variable)
        if position is None:
            raise no_match_error(path, variable, self._filters)
        return self._values[position]

    def __getitem__(self, key: Any) -> Any:
        for item, value in zip(self._filters, self._values, strict=True):
            if item is key or item == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, FilterMapping)
        return self._predicates == other._predicates and self._values == other._values

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._predicates), self._values))

    def __repr__(self) -> str:
        pairs = ", ".join(
            f"{_name(k)}: {v!r}" for k, v in zip(self._filters, self._values, strict=True)
        )
        return f"{type(self).__name__}({{{pairs}}})"


def _name(item: object) -> str:
    return item.__name__ if isinstance(item, type) else "..." if item is ... else repr(item)


class ExactPath(PathContains):
    """Matches the Variable at exactly one path."""

    def __call__(self, path: Path, variable: object) -> bool:
        return path == self.key


class StateSharding(FilterMapping):
    """Shardings of a Module argument by filter, for ``in_shardings`` and ``out_shardings``.

    Example:
        >>> import shardax as sx
        >>> sx.StateSharding({sx.Param: "some sharding", ...: None})
        StateSharding({Param: 'some sharding', ...: None})
    """

    __slots__ = ()

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of ``filters``."""
        return self._values


class _CarryType:
    """The type of ``Carry``, an entry of its own kind."""

    def __repr__(self) -> str:
        return "Carry"

    def __reduce__(self) -> str:
        return "Carry"


Carry = _CarryType()
"""Entry of what goes from one iteration of a loop to the next (``scan``)."""


class StateAxes(FilterMapping):
    """Axes of a Module argument by filter, for ``vmap`` and ``scan``.

    An entry is an axis (an int), ``None`` for one value that the whole batch shares, or, in
    ``scan``, ``Carry``.

    Raises:
        PrefixError: If an entry is something else.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> axes = sx.StateAxes({sx.PathContains("kernel"): None, ...: 0})
        >>> layer.bias.value = jnp.zeros((4, 3))
        >>> sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
    """

    __slots__ = ()

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the order of ``filters``."""
        return self._values

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        super().__init__(entries)
        for item, value in zip(self._filters, self._values, strict=True):
            if value is not None and value is not Carry and not is_axis(value):
                raise PrefixError(
                    f"StateAxes gives {value!r} for {_name(item)}; an entry is an axis (an int), "
                    "None for what the whole batch shares, or sx.Carry in sx.scan."
                )


def prefix(
    tree: PyTree,
    entries: Mapping[Any, Any] | Callable[[Path, Any], Any],
    *,
    as_module: bool = False,
) -> Any:
    """Makes a prefix of axes or shardings by path.

    Args:
        tree: A Module, Variable, State, or pytree of these and arrays: one argument of the function
            that is transformed.
        entries: A mapping from filters to entries, of which the first that matches decides; or a
            function of path and Variable (or array), which returns the entry.
        as_module: Whether the prefix of a Module is a Module of the same structure, whose Variables
            hold entries: for transforms of JAX itself, such as ``jax.vmap``, which take no other.

    Returns:
        What ``in_axes``, ``in_shardings`` and the like take for the argument: of a Module a
        ``State`` of entries, which ``StateAxes`` and ``StateSharding`` take too; of a container,
        the container with these in it.

    Raises:
        PrefixError: If no filter matches.
        TransformError: If a Variable has different entries by two paths.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> layer.bias.value = jnp.zeros((4, 3))
        >>> axes = sx.prefix(layer, lambda path, variable: 0 if "bias" in path else None)
        >>> axes.flat()
        {('kernel',): None, ('bias',): 0}
        >>> sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
        >>> axes = sx.prefix(layer, {sx.PathContains("bias"): 0, ...: None}, as_module=True)
        >>> jax.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
    """
    graphs.check_tree(tree, "prefix")
    if callable(entries):
        entry_of: Callable[[Path, Any], Any] = entries
    elif isinstance(entries, Mapping):
        entry_of = _ByFilter(entries).lookup
    else:
        raise PrefixError(
            f"sx.prefix takes a mapping from filters to entries, sx.prefix(model, "
            f"{{sx.Param: 0, ...: None}}), or a function of path and Variable, but was given "
            f"{entries!r}."
        )
    seen: list[tuple[Path, Any, Any]] = []

    def entry_at(path: Path, leaf: object):
        try:
            entry = entry_of(path, leaf)
        except FilterError as error:
            raise PrefixError(f"sx.prefix: {error}") from error
        seen.append((path, leaf, entry))
        return entry

    def of_state(where: Path, state: State) -> State:
        # A filter asks what the values came from.
        subjects = state.flat() if callable(entries) else state.origins()
        by_path = {path: entry_at((*where, *path), item) for path, item in subjects.items()}
        return State.from_flat(by_path, state.origins())

    def of_part(keys, part: object):
        where = plain_path(keys)
        if isinstance(part, State):
            return of_state(where, part)
        if not isinstance(part, Object) or isinstance(part, Variable):
            return entry_at(where, part)
        flat = graphs.flatten(part)
        pairs = zip(flat.leaf_paths, flat.leaves, strict=True)
        by_path = {path: entry_at((*where, *path), leaf) for path, leaf in pairs}
        for position, path in alias_paths(flat.graphdef):
            entry_at((*where, *path), flat.leaves[position])
        if as_module:
            (module,), _ = graphs.build(flat.graphdef, list(by_path.values()), owner_here())
            return module
        return State.from_flat(by_path)

    result = jax.tree_util.tree_map_with_path(
        of_part, tree, is_leaf=lambda item: isinstance(item, (Object, State))
    )
    consistent(seen, "entries of sx.prefix")
    return result


class _ByFilter(FilterMapping):
    """A filter mapping of entries of any kind."""


def is_axis(entry: object) -> bool:
    """Whether an entry is an axis: an integer that is no bool."""
    return isinstance(entry, int) and not isinstance(entry, bool)


def check_axes_only(prefix: object, name: str, carry: bool = False) -> None:
    """Checks a prefix of axes before anything is called."""
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, StateSharding):
            raise PrefixError(f"{name} takes axes, but was given a StateSharding; use StateAxes.")
        values = leaf.values() if isinstance(leaf, FilterMapping) else [leaf]
        for value in values:
            if not (is_axis(value) or value is None or (carry and value is Carry)):
                allowed = (
                    "an axis (an int), None or sx.Carry" if carry else "an axis (an int) or None"
                )
                hint = " (sx.Carry is for sx.scan)" if value is Carry else ""
                raise PrefixError(f"{name} gives {value!r}{hint}; an entry is {allowed}.")


def check_shardings_only(prefix: object, name: str) -> None:
    """Checks a prefix of shardings before anything is called."""
    kinds = (jax.sharding.Sharding, jax.sharding.PartitionSpec, Object, StateSharding)
    for leaf in jax.tree.leaves(prefix, is_leaf=lambda item: isinstance(item, Object)):
        if isinstance(leaf, StateAxes):
            raise PrefixError(
                f"{name} takes shardings, but was given a StateAxes; use StateSharding."
            )
        if isinstance(leaf, StateSharding):
            for value in leaf.values():
                check_shardings_only(value, name)
        elif not isinstance(leaf, kinds) and not hasattr(leaf, "sharding"):  # a Format has one
            raise PrefixError(
                f"{name} gives {leaf!r}; an entry is a jax.sharding.Sharding, a PartitionSpec or "
                "None, for a Module also a State of these or sx.StateSharding."
            )


def specs_in(prefix: PyTree, option: str, where: Path = ()) -> list[errors.DeclaredSpec]:
    """Returns the specs of a prefix, whatever it describes."""
    specs: list[errors.DeclaredSpec] = []
    for key_path, leaf in jax.tree.leaves_with_path(prefix):
        path = (*where, *plain_path(key_path)) if key_path else where
        if isinstance(leaf, StateSharding):
            for value in leaf.values():
                specs += specs_in(value, option, path)
        elif isinstance(leaf, jax.sharding.PartitionSpec):
            specs.append(errors.DeclaredSpec(option, path, leaf))
    return specs


def require_mesh_in_scope(specs: Sequence[errors.DeclaredSpec]) -> jax.sharding.Mesh | None:
    """Returns the mesh that specs mean, None in a trace; or raises."""
    mesh = mesh_in_scope()
    if mesh is not None:
        return mesh

    if is_eager():
        raise errors.specs_without_mesh(specs)

    # Under ``use_abstract_mesh`` alone there are names but no devices; in a trace only JAX can
    # tell that from a mesh whose devices it hides. A function made anew has no trace yet.
    takes_spec = jax.jit(lambda x: x, in_shardings=jax.sharding.PartitionSpec())
    try:
        takes_spec.trace(np.zeros((), np.float32))
    except RuntimeError as error:
        raise errors.specs_without_mesh(specs) from error
    return None


def mesh_in_scope() -> jax.sharding.Mesh | None:
    """Returns the mesh with devices in scope; None also in a trace."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX does not name the devices while it traces
        return None
    return None if mesh.empty else mesh


def check_plain(prefix: object, tree: object, name: str, where: Path = ()) -> None:
    """Checks that a prefix fits something that holds no objects."""
    refuse_filters(prefix, name, where)
    for _ in expand(prefix, tree, name, where):
        pass


def is_one_entry(prefix: object) -> bool:
    """Whether a prefix is one entry for all arguments."""
    return (
        not isinstance(prefix, (tuple, list))
        or hasattr(prefix, "_fields")  # a NamedTuple describes an argument of its own type
        or isinstance(prefix, jax.sharding.PartitionSpec)
    )


def per_argument(prefix: PyTree, labels: Sequence[str], name: str) -> list[PyTree]:
    """Returns one prefix per positional argument."""
    if is_one_entry(prefix):
        return [prefix] * len(labels)
    if len(prefix) == len(labels):
        return list(prefix)
    raise PrefixError(
        f"{name} has {_count(prefix, 'entry', 'entries')}, but the call has "
        f"{_count(labels, 'positional argument', 'positional arguments')} ({', '.join(labels)}). "
        f"Give one entry per argument, or one for all."
    )


class AssignedPrefixes(NamedTuple):
    """The arguments of a call, each with its prefix."""

    args: tuple[PyTree, ...]  # also those given by name that have their entry by position
    kwargs: dict[str, PyTree]  # the others
    prefixes: list[PyTree]  # one per positional argument
    named: dict[str, PyTree]  # one per other argument, by name


def entries_by_name(function: object, prefix: PyTree) -> PyTree:
    """Returns the entries in a dict by parameter; other prefixes unchanged."""
    parameters = {p.name for p in inputs.parameters_of(function) or ()}
    is_by_name = type(prefix) is dict and prefix and parameters.issuperset(prefix)
    return list(prefix.values()) if is_by_name else prefix


def assign_by_name(
    function: Any, prefix: PyTree, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], name: str
) -> AssignedPrefixes | None:
    """Finds the prefix of every argument in a dict by parameter."""
    if entries_by_name(function, prefix) is prefix:
        return None
    args, kwargs = inputs.by_position(function, args, kwargs)
    labels = [inputs.parameter_name(function, position) for position in range(len(args))]
    missing = [label for label in (*labels, *kwargs) if label not in prefix]
    if missing:
        raise PrefixError(
            f"{name} has entries by name of argument, {', '.join(prefix)}, and none for "
            f"{', '.join(missing)}. Give one for each argument of the call."
        )
    prefixes = [prefix[label] for label in labels]
    return AssignedPrefixes(args, kwargs, prefixes, {key: prefix[key] for key in kwargs})


def assign(
    function: Any,
    prefix: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    name: str,
    other: Any,
) -> AssignedPrefixes:
    """Finds the prefix of every argument, by position or name."""
    # ``other`` is that of a keyword argument without an entry.
    by_name = assign_by_name(function, prefix, args, kwargs, name)
    if by_name is not None:
        return by_name
    is_shared_prefix = is_one_entry(prefix)
    args, kwargs = inputs.by_position(
        function, args, kwargs, None if is_shared_prefix else len(prefix)
    )
    labels = [inputs.parameter_name(function, position) for position in range(len(args))]
    parameter_names = inputs.positional_names(function)
    after_gap = {
        keyword: prefix[parameter_names.index(keyword)]
        for keyword in kwargs
        if not is_shared_prefix and keyword in parameter_names[: len(prefix)]
    }
    prefixes = list(prefix[: len(args)]) if after_gap else per_argument(prefix, labels, name)
    return AssignedPrefixes(args, kwargs, prefixes, dict.fromkeys(kwargs, other) | after_gap)


def _count(items: Sequence[Any], singular: str, many: str) -> str:
    return f"{len(items)} {singular if len(items) == 1 else many}"


def expand(
    prefix: object,
    tree: object,
    name: str,
    where: Path = (),
    known: Mapping[int, object] = MappingProxyType({}),
    lenient: bool = False,
) -> Iterator[tuple[Path, PyTree, PyTree]]:
    """Spreads a prefix over a tree."""
    # Leniently, a Variable without an entry gets None.
    if isinstance(tree, Object):
        yield from _expand_object(prefix, tree, name, where, known, lenient)
        return
    if _is_entry(prefix):
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Object))
        for key_path, leaf in leaves:
            below = (*where, *plain_path(key_path)) if key_path else where
            if isinstance(leaf, Object):
                yield from expand(prefix, leaf, name, below, known, lenient)
            else:
                refuse_filters(prefix, name, below)
                yield below, leaf, prefix
        return
    children = one_level(tree)
    parts = one_level(prefix)
    if type(prefix) is not type(tree) or [key for key, _ in children] != [key for key, _ in parts]:
        kind, at = _place(name, where)
        raise PrefixError(
            f"{name} does not fit the {kind}{at}: it has {_shape(prefix)} where the {kind} has "
            f"{_shape(tree)}. Give one entry for all of it, or the same containers with one entry "
            "each."
        )
    for (key, child), (_, part) in zip(children, parts, strict=True):
        yield from expand(part, child, name, (*where, *key), known, lenient)


def _place(name: str, where: Path) -> tuple[str, str]:
    """Returns (argument or result, where), for messages."""
    kind = "result" if name.startswith("out_") else "argument"
    return kind, f" at {format_path(where)}" if where else ""


def _is_entry(prefix: object) -> bool:
    return prefix is None or jax.tree_util.all_leaves((prefix,))


def refuse_filters(prefix: object, name: str, where: Path) -> None:
    """Refuses filter mappings for what holds no objects."""
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, FilterMapping):
            kind, at = _place(name, where)
            raise PrefixError(
                f"{name} gives a {type(leaf).__name__} for the {kind}{at}, which holds no "
                "Variables to choose among. Only Modules take one; give plain arrays one entry."
            )


def one_level(tree: PyTree) -> list[tuple[Path, PyTree]]:
    """Returns (path, child) of each child of a pytree node; of a State, a path may come again."""
    if type(tree) in (tuple, list):
        return [((position,), child) for position, child in enumerate(tree)]
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(plain_path(path), child) for path, child in pairs if path]


def _shape(tree) -> str:
    kind = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"a {kind} of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, (tuple, list)):
        return f"a {kind} of {len(tree)}"
    return f"an array {tree.dtype}{list(tree.shape)}" if hasattr(tree, "dtype") else f"a {kind}"


def _expand_object(
    prefix: object, root: Object, name: str, where: Path, known: Mapping[int, object], lenient: bool
) -> Iterator[tuple[Path, PyTree, PyTree]]:
    flat = graphs.flatten(root)
    entry_of = _chooser(prefix, root, name, where)
    for path, variable in zip(flat.leaf_paths, flat.leaves, strict=True):
        try:
            entry = known[id(variable)] if id(variable) in known else entry_of(path, variable)
        except PrefixError:
            if not lenient:
                raise
            entry = None
        yield (*where, *path), variable, entry
    for position, path in alias_paths(flat.graphdef) if isinstance(prefix, Mapping) else ():
        variable = flat.leaves[position]
        if id(variable) not in known:
            with contextlib.suppress(PrefixError):  # a further path need not be chosen
                yield (*where, *path), variable, entry_of(path, variable)


def _chooser(prefix: object, root: Object, name: str, where: Path) -> Callable[[Path, Any], Any]:
    """Returns the function from (path, Variable) to entry."""
    if isinstance(prefix, FilterMapping):

        def by_filter(path: Path, variable: object):
            try:
                return prefix.lookup(path, variable)
            except FilterError as error:
                kind, at = _place(name, where)
                raise PrefixError(f"{name} for the {kind}{at}: {error}") from error

        return by_filter
    if isinstance(root, Variable) and not _is_entry(prefix) and _fits_value(prefix, root):
        return lambda path, variable: prefix
    if isinstance(prefix, Mapping):
        by_path = flatten_mapping(prefix)

        def at_path(path: Path, variable: object):
            if path in by_path:
                return by_path[path]
            raise PrefixError(
                f"{name} has no entry for the {type(variable).__name__} at "
                f"{format_path((*where, *path))}."
            )

        return at_path
    if isinstance(prefix, (Variable, Object)) or not _is_entry(prefix):
        kind, at = _place(name, where)
        raise PrefixError(
            f"{name} for the {kind}{at}, a {type(root).__name__}, is a {type(prefix).__name__}. "
            "Give one entry, a State of entries, or a filter mapping."
        )
    return lambda path, variable: prefix


def _fits_value(prefix: object, variable: Variable) -> bool:
    """Whether a prefix fits a Variable's value, such as named arrays."""
    if isinstance(prefix, (Object, State)):
        return False
    structure = jax.tree.structure(prefix, is_leaf=_is_none)
    try:
        structure.flatten_up_to(variable._here()._value)
    except ValueError:
        return False
    return True


def _is_same(first: object, second: object) -> bool:
    """Whether entries are equal, also pytrees of them."""
    return first is second or jax.tree.flatten(first) == jax.tree.flatten(second)


def consistent(
    entries: Iterable[tuple[Path, object, object]], name: str
) -> dict[int, tuple[Path, Any]]:
    """Returns (path, entry) by ``id`` of Variable, one each."""
    entries_by_id: dict[int, tuple[Path, Any]] = {}
    for path, leaf, entry in entries:
        if not isinstance(leaf, Variable):
            continue
        first = entries_by_id.setdefault(id(leaf), (path, entry))
        if not _is_same(first[1], entry):
            raise TransformError(
                f"One {type(leaf).__name__} is reached by two paths with different {name}:\n  "
                f"{format_path(first[0])}: {first[1]}\n  {format_path(path)}: {entry}\n"
                f"A shared Variable is one Variable and needs one entry. Give both paths the same, "
                f"or untie them with sx.clone."
            )
    return entries_by_id


def place_variables(
    variables: Sequence[Any], entries: Sequence[Any], mesh: jax.sharding.Mesh | None = None
) -> None:
    """Moves Variables to their entries: shardings, or specs over ``mesh``."""
    if not is_eager():
        return
    moved: list[tuple[Leaf, Leaf, Leaf]] = []
    for variable, entry in zip(variables, entries, strict=True):
        if entry is None or variable._parent is not None or variable.is_abstract:
            continue
        # One, or of the form of the value.
        sharding = jax.tree.map(functools.partial(_over_mesh, mesh=mesh), entry)
        places = jax.tree.broadcast(sharding, variable._value, is_leaf=_is_none)
        pairs = zip(
            jax.tree.leaves(variable._value), jax.tree.leaves(places, is_leaf=_is_none), strict=True
        )
        pairs = [(leaf, to) for leaf, to in pairs if to is not None and not _is_at(leaf, to)]
        for leaf, to in pairs:  # raises before anything is moved
            getattr(to, "sharding", to).shard_shape(tuple(leaf.shape))
        if pairs and is_ref(variable._value):
            raise PrefixError(
                f"A {kind_of(variable)} of {variable.dtype}{list(variable.shape)} holds a jax.Ref, "
                f"which stays where it is, and its entry is {entry!r}. Make the Ref there: "
                f"jax.new_ref(jax.device_put(x, sharding))."
            )
        if pairs:
            moved.append((variable, variable._value, sharding))
    lazy = [row for row in moved if isinstance(row[1], LazyValue)]
    live = [row for row in moved if not isinstance(row[1], LazyValue)]
    computed = compute_all([value for _, value, _ in lazy], [sharding for *_, sharding in lazy])
    put = jax.device_put([value for _, value, _ in live], [sharding for *_, sharding in live])
    for (variable, value, _), new in (
        *zip(lazy, computed, strict=True),
        *zip(live, put, strict=True),
    ):
        with write_lock:
            if variable._value is value:  # else another thread has written it
                variable._value = new


def _is_none(entry) -> bool:
    return entry is None


def _over_mesh(entry: object, mesh: jax.sharding.Mesh | None):
    """Returns the sharding that an entry means over a mesh."""
    # By default the mesh in scope.
    if not isinstance(entry, jax.sharding.PartitionSpec):
        return entry

    # A sharding over a mesh without devices ends the process where it is compared (JAX 0.10).
    mesh = mesh or mesh_in_scope()
    if mesh is None:
        raise errors.specs_without_mesh([errors.DeclaredSpec("in_shardings", (), entry)])
    return jax.sharding.NamedSharding(mesh, entry)


def _is_at(leaf, sharding) -> bool:
    if not (isinstance(leaf, jax.Array) or is_ref(leaf)):
        return False
    if not isinstance(sharding, jax.sharding.Sharding):
        return getattr(leaf, "format", None) == sharding
    # JAX takes the mesh of outputs from what enters, so one layout over another mesh is elsewhere.
    meshes = {getattr(place, "mesh", None) for place in (leaf.sharding, sharding)} - {None}
    return len(meshes) < 2 and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


class EntryAssignment:
    """The entries of one call."""

    def __init__(
        self,
        call: engine.LiftedCall,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        prefixes: Sequence[PyTree],
        named: PyTree,
        outside: object,
        name: str,
    ) -> None:
        self.call = call
        self.prefixes = prefixes
        self.named = named
        self.name = name
        entries = list(self._spread(args, kwargs, {}))
        self.by_id = consistent(entries, name)
        # One entry per Variable of the graph.
        self.leaves = [
            self.by_id.get(id(leaf), ((), outside))[1] for leaf in call.graph.flat.leaves
        ]
        plain = [(path, entry) for path, leaf, entry in entries if not isinstance(leaf, Variable)]
        # One entry per plain leaf, positional arguments first, then by name.
        self.plain = [entry for _, entry in plain]
        self.plain_paths = [path for path, _ in plain]  # the path of each plain leaf

    def _spread(
        self, args: Sequence[object], kwargs: Mapping[str, object], known: Mapping[int, object]
    ) -> Iterable[tuple[Path, PyTree, PyTree]]:
        for label, prefix, arg in zip(self.call.labels, self.prefixes, args, strict=True):
            yield from expand(prefix, arg, self.name, (label,), known)
        for keyword in sorted(kwargs):
            prefix = self.named[keyword] if isinstance(self.named, dict) else self.named
            yield from expand(prefix, kwargs[keyword], self.name, (keyword,), known)

    @property
    def leaf_paths(self) -> list[Path]:
        """The path of each Variable of the graph."""
        return self.call.graph.flat.leaf_paths

    def output_entries(
        self, context: engine.RunContext, out_prefix: object, out_name: str
    ) -> OutputEntries:
        """Returns the entry of everything that leaves."""
        of_result: list[tuple[Path, PyTree, PyTree]] = [
            (("result", *path), leaf, entry)
            for path, leaf, entry in expand(out_prefix, context.result, out_name)
        ]
        leaves = enumerate(self.call.graph.flat.leaves)
        argument_entries = {  # keep the entries they came with, also where the function moved them
            id(context.variable(position)): self.by_id[id(leaf)][1]
            for position, leaf in leaves
            if id(leaf) in self.by_id
        }
        of_arguments = list(self._spread(context.args, context.kwargs, argument_entries))
        entries = consistent([*of_arguments, *of_result], f"{self.name} and {out_name}")
        plain = [(path, entry) for path, leaf, entry in of_result if not isinstance(leaf, Variable)]
        return OutputEntries(entries, plain, frozenset(id(leaf) for _, leaf, _ in of_arguments))


class OutputEntries(NamedTuple):
    """Entries of what leaves."""

    by_id: dict[int, tuple[Path, Any]]  # (path, entry) by ``id`` of a Variable inside
    # (path, entry) of each plain leaf of the result; the path begins with "result".
    labels: list[tuple[Path, Any]]
    attached: frozenset[int]  # ``id`` of what the arguments hold

    @property
    def plain(self) -> list[Leaf]:
        """The entry of each plain leaf of the result."""
        return [entry for _, entry in self.labels]


def entries_in(prefix: object) -> list[PyTree]:
    """Returns the distinct entries that a prefix can give."""
    leaves = jax.tree.leaves(prefix, is_leaf=lambda item: item is None)
    distinct_values: list[Leaf] = []
    for leaf in leaves:
        values = list(leaf.values()) if isinstance(leaf, FilterMapping) else [leaf]
        distinct_values.extend(
            value for value in values if not any(value == item for item in distinct_values)
        )
    return distinct_values


def drop_written(
    outputs: binding.LiftedOutputs, positions: Container[int]
) -> binding.LiftedOutputs:
    """Returns, inside the transform, what leaves without some of the written Variables."""
    pairs = zip(outputs.effects.written, outputs.written, strict=True)
    remaining = [(position, value) for position, value in pairs if position not in positions]
    outputs.effects.written = tuple(position for position, _ in remaining)
    return outputs._replace(written=[value for _, value in remaining])


def add_written(
    outputs: binding.LiftedOutputs, more: Mapping[int, object]
) -> binding.LiftedOutputs:
    """Returns, outside the transform, what left with more written Variables."""
    outputs.effects.written = (*outputs.effects.written, *more)
    return outputs._replace(written=[*outputs.written, *more.values()])


def appended(
    context: engine.RunContext, effects: binding.Effects, is_shared: Callable[[int], bool]
) -> dict[int, tuple[Any, ...]]:
    """Returns what was sown into the tuples of shared Variables."""
    # Such values have a part per batch element or iteration, though the tuple that was there before
    # has none.
    sown_items: dict[int, tuple[Leaf, ...]] = {}
    for position in effects.written:
        old_items, new_items = context.bound[position], context.variable(position)._value
        if not is_shared(position) or not (
            isinstance(old_items, tuple) and type(new_items) is tuple
        ):
            continue
        count = len(old_items)
        if len(new_items) > count and binding.same_value(old_items, new_items[:count]):
            sown_items[position] = new_items[count:]
    return sown_items


def refuse_foreign(effects: binding.Effects, name: str) -> None:
    """Raises if objects that were not passed in stand in the result."""
    for item in effects.foreign.values():
        raise TransformError(
            f"The function given to sx.{name} returned (or attached to an argument) a "
            f"{type(item).__name__} that was not passed in: one object, with no part of its own in "
            "each run. Pass it as an argument, or return sx.clone of it."
        )
