# SPDX-License-Identifier: Apache-2.0
"""Slots and functional calls: unbind, bind, freeze, thaw, stateless_call.

A *tree* is a Module, or any pytree that holds Modules and Variables. ``unbind`` replaces Variables
by slots and returns them beside the tree; ``bind`` is the inverse. ``freeze`` and ``thaw`` replace
Variables by frozen values and back. All four return a new tree, with new Modules and containers
around the old Variables, and leave the given one as it was. ``stateless_call`` takes a model with
slots and frozen values for them, and returns the result with the new values; it changes nothing, so
plain JAX transforms can be used on it.

A Variable's *label* is the path at which it is met first. So it is the same in every process, and a
Variable that is shared has one. A frozen value carries its label; a mutable Variable remembers the
labels under which it was taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core import errors
from shardax._core.frames import owner_here
from shardax._core.graph.definitions import Child, Definition, Ref, VariableDef, static_values
from shardax._core.graph.flatten import ChildDecoder, GraphWalk, assemble, check_tree
from shardax._core.graph.handlers import has_parts
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.object import Object
from shardax._core.state.filters import Filter, matching
from shardax._core.state.frozen import FrozenVariable, Slot, frozen
from shardax._core.variable import Variable


class OpenSlot(NamedTuple):
    """A slot, and where it is."""

    path: Path
    slot: Slot

    def __str__(self) -> str:
        return f"{self.slot!r} at {format_path(self.path)}"


class _Encoded(NamedTuple):
    """A leaf that holds objects or slots, as a child."""

    child: Child


class FlatTree:
    """A tree taken apart: the walk over its objects, and its leaves.

    Attributes:
        walk: The walk.
        variables: Positions of the Variables among the objects of the walk.
    """

    def __init__(self, tree: PyTree) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda value: isinstance(value, (Object, Slot))
        )
        self.walk = GraphWalk()
        self._paths = [plain_path(keys) for keys, _ in leaves]
        self._leaves = [
            self._encoded(leaf, path) for (_, leaf), path in zip(leaves, self._paths, strict=True)
        ]
        self.variables = [
            position
            for position, definition in enumerate(self.walk.definitions)
            if isinstance(definition, VariableDef)
        ]

    def _encoded(self, leaf: Leaf, path: Path) -> _Encoded | Leaf:
        return _Encoded(self.walk.encode(leaf, path)) if has_parts(leaf) else leaf

    def matching(self, filters: Sequence[Filter]) -> list[tuple[int, Path, Any]]:
        """Returns (position, path, Variable) of what any filter matches."""
        named = [(i, self.walk.paths[i], self.walk.objects[i]) for i in self.variables]
        positions = matching(filters or (...,), [(path, variable) for _, path, variable in named])
        return [named[i] for i in positions]

    def bare(self) -> set[int]:
        """Returns the positions of Variables outside of all Modules."""
        children = (leaf.child for leaf in self._leaves if isinstance(leaf, _Encoded))
        return {child.position for child in children if isinstance(child, Ref)}

    def open_slots(self) -> Iterator[OpenSlot]:
        """Yields every slot, in order."""
        parts: list[tuple[Path, Child | Definition]] = [
            (path, leaf.child)
            for path, leaf in zip(self._paths, self._leaves, strict=True)
            if isinstance(leaf, _Encoded)
        ]
        parts.extend(zip(self.walk.paths, self.walk.definitions, strict=True))
        for path, part in parts:
            for slot_path, value in static_values(part, path):
                if isinstance(value, Slot):
                    yield OpenSlot(slot_path, value)

    def rebuilt(
        self,
        replaced: Mapping[int, Variable | Slot],
        decoder: Callable[[list[Any]], ChildDecoder] = ChildDecoder,
    ) -> PyTree:
        """Returns the tree with new Modules and containers around its Variables.

        Args:
            replaced: By position, what stands in the place of a Variable.
            decoder: Makes the decoder of the objects.
        """
        variables = {i: replaced.get(i, self.walk.objects[i]) for i in self.variables}
        decode = assemble(self.walk.definitions, variables, owner_here(), decoder=decoder)
        leaves = [
            decode(leaf.child) if isinstance(leaf, _Encoded) else leaf for leaf in self._leaves
        ]
        return self._treedef.unflatten(leaves)


# --- taking out -----------------------------------------------------------------------------------


def unbind(
    tree: PyTree, *filters: Filter, freeze: bool = False
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Takes Variables out of a tree.

    Args:
        tree: A Module, Variable, or any pytree that holds such.
        *filters: Which Variables to take, those that match any; none: all. As everywhere,
            ``sx.Param`` matches Params, and ``sx.Frozen(sx.Param)`` their frozen values.
        freeze: Whether to return frozen values instead of the Variables themselves.

    Returns:
        (a tree with slots, the Variables in order, each once). The tree shares the Variables that
        were not taken with the given one, which is left as it was.

    Raises:
        ModuleError: If a slot that the tree has already has the label of a Variable.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> slots, params = sx.unbind(layer, sx.Param, freeze=True)
        >>> slots.kernel, [param.label for param in params]
        (Slot(Param, .kernel), [('kernel',), ('bias',)])
        >>> loss = lambda params: sx.bind(slots, params)(jnp.ones((1, 2))).sum()
        >>> [gradient.shape for gradient in jax.grad(loss)(params)]
        [(2, 3), (3,)]
    """
    check_tree(tree, "unbind")
    flat = FlatTree(tree)
    chosen = flat.matching(filters)

    # The label of each is its path, which no slot may have already.
    slot_path_by_label: dict[Path, Path] = {}
    for slot in flat.open_slots():
        slot_path_by_label.setdefault(slot.slot.label, slot.path)
    for _, path, _ in chosen:
        if path in slot_path_by_label:
            slot_text = f"a slot at {format_path(slot_path_by_label[path])}"
            raise errors.two_with_label(path, slot_text, format_path(path))

    slots: dict[int, Slot] = {}
    taken: list[Variable] = []
    for position, path, variable in chosen:
        if isinstance(variable, FrozenVariable):
            taken.append(frozen(variable, path))
        else:
            other_labels = [label for label in variable.labels if label != path]
            variable._labels = (*other_labels, path)
            taken.append(frozen(variable, path) if freeze else variable)
        slots[position] = Slot(path, variable.variable_type)
    return flat.rebuilt(slots), tuple(taken)


def freeze(tree: object, *filters: Filter) -> PyTree:
    """Returns the tree with frozen values in place of Variables.

    What two places share, they share frozen: it is one leaf, with one gradient.

    Args:
        tree: A Module, Variable, or any pytree that holds such.
        *filters: Which Variables, those that match any; none: all.

    Returns:
        A new tree; it shares the other Variables with the given one. The label of a frozen value is
        its path, or, for a Variable that ``unbind`` returned, the one that it has already.

    Example:
        >>> import shardax as sx
        >>> mlp = sx.freeze(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), sx.PathContains("up"))
        >>> mlp.up.kernel
        FrozenVariable(float32[2, 4], lazy, Param .up.kernel, axes=('embed', 'mlp'))
        >>> sorted(path[0] for path, _ in sx.iter_variables(mlp, sx.Param))
        ['down', 'gate']
    """
    check_tree(tree, "freeze")
    flat = FlatTree(tree)
    bare = flat.bare()
    frozen_by_position: dict[int, FrozenVariable[Any]] = {}
    for position, path, variable in flat.matching(filters):
        if isinstance(variable, FrozenVariable):
            continue
        labels = variable.labels if position in bare else ()
        label = labels[-1] if labels else path
        frozen_by_position[position] = frozen(variable, label)
    return flat.rebuilt(frozen_by_position)


def thaw(tree: object, *filters: Filter) -> PyTree:
    """Replaces frozen values by new mutable Variables.

    It undoes ``freeze``.

    Args:
        tree: A Module, or any pytree that holds frozen values.
        *filters: Which, by what they become: ``sx.Param`` thaws what becomes a Param; none: all.

    Returns:
        A new tree. What two places share, they share thawed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.thaw(sx.freeze(sx.nn.Linear(2, 3, rngs=sx.Rngs(0))))
        >>> layer.bias[...] = jnp.ones(3)
        >>> layer.bias.value.tolist()
        [1.0, 1.0, 1.0]
    """
    check_tree(tree, "thaw")
    flat = FlatTree(tree)
    frozen_items = [item for item in flat.matching(()) if isinstance(item[2], FrozenVariable)]

    # A filter is asked about what a frozen value becomes.
    origins = [(path, variable._frozen_metadata().origin()) for _, path, variable in frozen_items]
    chosen = [frozen_items[i] for i in matching(filters or (...,), origins)]
    return flat.rebuilt({position: variable.thaw() for position, _, variable in chosen})


# --- putting in -----------------------------------------------------------------------------------


class _SlotDecoder(ChildDecoder):
    """Turns children into values, with Variables for slots."""

    __slots__ = ("variable_by_label",)

    def __init__(self, objects: list[Any], variable_by_label: Mapping[Path, Variable]) -> None:
        super().__init__(objects)
        self.variable_by_label = variable_by_label

    def __call__(self, child: Child) -> PyTree:
        value = super().__call__(child)
        if isinstance(value, Slot):
            return self.variable_by_label.get(value.label, value)
        return value


def bind(tree: object, variables: object, allow_unused: bool = False) -> PyTree:
    """Puts Variables or frozen values into the slots of a tree.

    It is the inverse of ``unbind``.

    Args:
        tree: A tree with slots; several slots of one label get one Variable.
        variables: A tuple as ``unbind`` returns it, or any pytree of Variables and frozen values.
            Each goes as it is to the slots of its label: what is frozen stays so (``thaw``).
        allow_unused: Whether Variables may be left for which the tree has no slot.

    Returns:
        A new tree. Slots for which no Variable is given stay.

    Raises:
        ModuleError: If something is no Variable, has no label, no slot, or is of another type than
            its slot; all are listed; if two different Variables, or slots of two types, have one
            label.

    Example:
        >>> import jax, shardax as sx
        >>> build = lambda key: sx.nn.Linear(2, 3, rngs=sx.Rngs(key))
        >>> init = jax.jit(lambda key: sx.unbind(build(key), freeze=True))
        >>> layer = sx.thaw(sx.bind(*init(jax.random.key(0))))
        >>> layer.kernel.shape
        (2, 3)
    """
    check_tree(tree, "bind")
    return bound(tree, variables, lambda variable: variable, allow_unused)[0]


def bound(
    tree: PyTree, variables: PyTree, change: Callable[[Any], Variable], allow_unused: bool = False
) -> tuple[PyTree, dict[Path, Variable]]:
    """Returns the bound tree and what was put in, by label.

    Args:
        tree: A tree with slots.
        variables: A pytree of Variables and frozen values.
        change: Returns what is put in for each of them.
        allow_unused: Whether some may be left over.
    """
    flat = FlatTree(tree)
    given = _variable_by_label(_slot_by_label(flat), variables, allow_unused)
    by_label = {label: change(variable) for label, variable in given.items()}
    return flat.rebuilt({}, lambda objects: _SlotDecoder(objects, by_label)), by_label


def _slot_by_label(flat: FlatTree) -> dict[Path, OpenSlot]:
    """Returns the first slot of every label, or raises if slots of one label differ."""
    slots: dict[Path, OpenSlot] = {}
    for slot in flat.open_slots():
        first = slots.setdefault(slot.slot.label, slot)
        if first.slot != slot.slot:
            raise errors.two_with_label(slot.slot.label, str(first), str(slot))
    return slots


def _variable_by_label(
    slots: Mapping[Path, OpenSlot], variables: PyTree, allow_unused: bool
) -> dict[Path, Variable]:
    """Returns what was given for every label; raises one error for all that cannot be put in."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        variables, is_leaf=lambda item: isinstance(item, Object)
    )
    given: dict[Path, tuple[str, Variable]] = {}
    problems: list[str] = []
    for keys, variable in leaves:
        name = f"variables{format_path(plain_path(keys)) if keys else ''}"
        if not isinstance(variable, Variable):
            kind = type(variable).__name__
            problems.append(f"  {name}: the {kind} is neither a Variable nor a frozen value")
            continue

        label, problem = _find_slot(variable, slots, allow_unused)
        if label is not None:
            first_name, first = given.setdefault(label, (name, variable))
            if not _are_equal(first, variable):
                raise errors.two_with_label(label, first_name, name)
        if problem is not None:
            form = "frozen " if isinstance(variable, FrozenVariable) else ""
            problems.append(f"  {name}: the {form}{variable.variable_type.__name__} {problem}")

    if problems:
        raise errors.unbindable(problems, len(leaves))
    return {label: variable for label, (_, variable) in given.items()}


def _find_slot(
    variable: Variable, slots: Mapping[Path, OpenSlot], allow_unused: bool
) -> tuple[Path | None, str | None]:
    """Returns the label of a Variable, and why it cannot be put into a slot; None for neither."""
    if not variable.labels:
        return None, (
            "has no label: it was not taken out by sx.unbind, or not in this transform. Give "
            "transforms frozen values, sx.unbind(tree, freeze=True)"
        )

    with_slot = [label for label in variable.labels if label in slots]
    if len(with_slot) > 1:
        texts = " and ".join(map(format_path, with_slot))
        return None, f"was taken out as {texts}, and there are slots for both: assign it yourself"
    if with_slot:
        slot_type = slots[with_slot[0]].slot.variable_type
        is_fitting = issubclass(variable.variable_type, slot_type)
        problem = f"does not belong into the slot of a {slot_type.__name__}"
        return with_slot[0], None if is_fitting else problem

    label = variable.labels[-1]
    if allow_unused:
        return label, None
    hint = errors.nearest_path_hint(label, slots)
    return label, f"has the label {format_path(label)}, for which there is no slot{hint}"


def _are_equal(first: Variable, second: Variable) -> bool:
    """Whether two things given for one label are one Variable, or equal frozen values."""
    if first is second:
        return True
    both_frozen = isinstance(first, FrozenVariable) and isinstance(second, FrozenVariable)
    return both_frozen and bool(first == second)


# --- functional calls -----------------------------------------------------------------------------


def stateless_call(
    tree: object, variables: object, /, *args: object, **kwargs: object
) -> tuple[PyTree, PyTree]:
    """Calls a model as a pure function of values for its slots.

    Args:
        tree: A callable Module with slots, or one of its methods. Variables that it still has are
            read as they are; writing them is an error.
        variables: Frozen values for the slots: a tuple as ``unbind(model, freeze=True)`` returns
            it, or any pytree of frozen values.
        *args: Arguments of the call; slots in them are filled too, by the same labels.
        **kwargs: Likewise.

    Returns:
        (result, new frozen values, arranged like ``variables``).

    Raises:
        ModuleError: If the values do not fit the slots, or are not frozen; if it adds or removes
            Variables, or changes other structure, which a pure function cannot return.
        ModuleAttributeError: If the call writes a Variable that was left in the model.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> class Counter(sx.Module):
        ...     def __init__(self):
        ...         self.count = sx.Variable(0)
        ...     def __call__(self, by):
        ...         self.count += by
        ...         return self.count * 10
        >>> slots, values = sx.unbind(Counter(), freeze=True)
        >>> step = jax.jit(lambda values, by: sx.stateless_call(slots, values, by))
        >>> result, values = step(values, 2)
        >>> result, values = step(values, 3)
        >>> int(result), int(values[0])
        (50, 5)
    """
    if not callable(tree):
        raise errors.no_stateless_callable(type(tree))
    leaves, treedef = jax.tree.flatten(variables, is_leaf=lambda x: isinstance(x, Variable))
    mutable = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, FrozenVariable)}
    if mutable:
        raise errors.mutable_in_stateless_call(sorted(mutable))

    # What the slots get is thawed, so that the call may write it; all other Variables are frozen.
    arguments = (args, kwargs)
    has_slots = any(True for _ in FlatTree(arguments).open_slots())
    call = (_with_frozen_rest(tree, arguments), arguments if has_slots else None)
    filled, thawed = bound(call, leaves, lambda leaf: leaf.thaw())
    args, kwargs = filled[1] if has_slots else arguments

    before = FlatTree(filled).walk
    result = filled[0](*args, **kwargs)
    _check_unchanged(before, FlatTree(filled).walk)

    values = [frozen(thawed[leaf.label], leaf.label) for leaf in leaves]
    return result, treedef.unflatten(values)


def _with_frozen_rest(tree: PyTree, arguments: PyTree) -> PyTree:
    """Returns the tree with frozen values in place of the Variables that are no arguments."""
    argument_ids = set(map(id, FlatTree(arguments).walk.objects))
    flat = FlatTree(tree)
    frozen_by_position: dict[int, FrozenVariable[Any]] = {}
    for position in flat.variables:
        variable = flat.walk.objects[position]
        if id(variable) not in argument_ids:
            frozen_by_position[position] = frozen(variable, flat.walk.paths[position])
    return flat.rebuilt(frozen_by_position)


def _check_unchanged(before: GraphWalk, after: GraphWalk) -> None:
    """Raises if a call changed the structure of the tree that it was given."""
    if before.definitions == after.definitions:
        return

    old = dict(zip(before.paths, before.definitions, strict=True))
    new = dict(zip(after.paths, after.definitions, strict=True))
    changed = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    added = [path for path in changed if path not in old and isinstance(new[path], VariableDef)]
    # The first step leads to the tree, among what was called.
    paths = [path[1:] for path in (added or changed)]
    raise errors.changed_by_stateless_call(paths, added=bool(added))
