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

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.tree_util import KeyPath

from shardax._core.errors import ModuleError
from shardax._core.frames import owner_here
from shardax._core.frozen import FrozenVariable, Slot, frozen
from shardax._core.graph import flatten
from shardax._core.graph.definitions import Child
from shardax._core.graph.handlers import has_parts
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.object import Object
from shardax._core.state.filters import Filter, matching
from shardax._core.variable import Variable


class OpenSlot(NamedTuple):
    """A slot, and where it is."""

    path: Path
    slot: Slot


class FlatTree:
    """A tree taken apart into objects and slots."""

    def __init__(self, tree: PyTree) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_part)
        self.walk = flatten.GraphWalk()
        self._leaves = [
            (self._encoded(keys, leaf) if has_parts(leaf) else leaf) for keys, leaf in leaves
        ]
        self._paths = [plain_path(keys) for keys, _ in leaves]
        definitions = enumerate(self.walk.definitions)
        self.variables = [
            i for i, definition in definitions if type(definition) is flatten.VariableDef
        ]

    def _encoded(self, keys: KeyPath, leaf: object) -> _Encoded:
        return _Encoded(self.walk.encode(leaf, plain_path(keys)))

    def matching(self, filters: Sequence[Filter]) -> list[tuple[int, Path, Any]]:
        """Returns (position, path, Variable) of what any filter matches."""
        named = [(i, self.walk.paths[i], self.walk.objects[i]) for i in self.variables]
        positions = matching(filters or (...,), [(path, variable) for _, path, variable in named])
        return [named[i] for i in positions]

    def bare(self) -> set[int]:
        """Returns the positions of Variables outside of all Modules."""
        children = (leaf.child for leaf in self._leaves if type(leaf) is _Encoded)
        return {child.position for child in children if type(child) is flatten.Ref}

    def open_slots(self) -> Iterator[OpenSlot]:
        """Yields every slot, in order."""
        leaves = zip(self._paths, self._leaves, strict=True)
        below = [(path, leaf.child) for path, leaf in leaves if type(leaf) is _Encoded]
        for path, child in (*below, *zip(self.walk.paths, self.walk.definitions, strict=True)):
            for where, value in flatten.static_values(child, path):
                if isinstance(value, Slot):
                    yield OpenSlot(where, value)

    def rebuilt(
        self,
        variables: Mapping[int, object],
        decoder: Callable[[list[Any]], flatten.ChildDecoder] = flatten.ChildDecoder,
    ) -> PyTree:
        """Returns the tree with new Modules and containers."""
        objects_by_position = {i: variables.get(i, self.walk.objects[i]) for i in self.variables}
        decode = flatten.assemble(
            self.walk.definitions, objects_by_position, owner_here(), decoder=decoder
        )
        return self._treedef.unflatten(
            [decode(leaf.child) if type(leaf) is _Encoded else leaf for leaf in self._leaves]
        )


class _Encoded(NamedTuple):
    """A leaf that holds objects or slots, as a child."""

    child: Child


def _is_part(value: object) -> bool:
    return isinstance(value, (Object, Slot))


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
    flatten.check_tree(tree, "unbind")
    flat = FlatTree(tree)
    chosen = flat.matching(filters)
    owners = {
        open_slot.slot.label: open_slot.path for open_slot in reversed(list(flat.open_slots()))
    }
    for _, path, _ in chosen:
        if path in owners:
            _refuse_label(path, f"a slot at {format_path(owners[path])}", format_path(path))
        owners[path] = path
    slots, variables = {}, []
    for i, path, variable in chosen:
        if freeze or isinstance(variable, FrozenVariable):
            stored = frozen(variable, path)
        else:
            stored = variable
        if not isinstance(variable, FrozenVariable):
            other_labels = [label for label in getattr(variable, "_labels", ()) if label != path]
            variable._labels = (*other_labels, path)
        slots[i] = Slot(
            path, flat.walk.definitions[i].type if stored is variable else stored.variable_type
        )
        variables.append(stored)
    return flat.rebuilt(slots), tuple(variables)


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
    flatten.check_tree(tree, "freeze")
    flat = FlatTree(tree)
    bare = flat.bare()
    frozen_by_position: dict[int, Any] = {}
    for i, path, variable in flat.matching(filters):
        if not isinstance(variable, FrozenVariable):
            labels = getattr(variable, "_labels", ()) if i in bare else ()
            frozen_by_position[i] = frozen(variable, labels[-1] if labels else path)
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
    flatten.check_tree(tree, "thaw")
    flat = FlatTree(tree)
    frozen_items = [item for item in flat.matching(()) if isinstance(item[2], FrozenVariable)]
    origins = [(path, variable._here()._metadata.origin()) for _, path, variable in frozen_items]
    chosen = [frozen_items[i] for i in matching(filters or (...,), origins)]
    return flat.rebuilt({i: variable.thaw() for i, _, variable in chosen})


# --- putting in -----------------------------------------------------------------------------------


class _SlotDecoder(flatten.ChildDecoder):
    """Turns children into values, with Variables for slots."""

    __slots__ = ("by_label",)

    def __init__(self, objects: list[Any], by_label: Mapping[Path, Leaf]) -> None:
        super().__init__(objects)
        self.by_label = by_label

    def __call__(self, child: Child) -> PyTree:
        value = super().__call__(child)
        return self.by_label.get(value.label, value) if type(value) is Slot else value


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
    flatten.check_tree(tree, "bind")
    return bound(tree, variables, lambda variable: variable, allow_unused)[0]


def bound(
    tree: PyTree, variables: Any, change: Callable[[PyTree], PyTree], allow_unused: bool = False
) -> tuple[PyTree, dict[Path, PyTree]]:
    """Returns the bound tree and what was put in, by label."""
    flat = FlatTree(tree)
    variable_by_label = _matched(_first_open(flat), variables, allow_unused)
    by_label = {label: change(variable) for label, variable in variable_by_label.items()}
    return flat.rebuilt({}, lambda objects: _SlotDecoder(objects, by_label)), by_label


def _first_open(flat: FlatTree) -> dict[Path, OpenSlot]:
    """Returns the first slot of every label."""
    slot_by_label: dict[Path, OpenSlot] = {}
    for open_slot in flat.open_slots():
        first = slot_by_label.setdefault(open_slot.slot.label, open_slot)
        if first.slot != open_slot.slot:
            first_text, second_text = (
                f"{s.slot!r} at {format_path(s.path)}" for s in (first, open_slot)
            )
            _refuse_label(open_slot.slot.label, first_text, second_text)
    return slot_by_label


def _matched(
    slots: Mapping[Path, OpenSlot], variables: object, allow_unused: bool
) -> dict[Path, Any]:
    """Returns the Variable for every label that gets one."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        variables, is_leaf=lambda item: isinstance(item, Object)
    )
    matched: dict[Path, tuple[str, Any]] = {}
    wrong = []
    for keys, variable in pairs:
        where = f"variables{format_path(plain_path(keys)) if keys else ''}"
        label = _label_for(variable, slots)
        problem = None if isinstance(label, tuple) else label
        if isinstance(label, tuple):
            earlier = matched.setdefault(label, (where, variable))
            if earlier[1] is not variable and not _equal(earlier[1], variable):
                _refuse_label(label, earlier[0], where)
            if label in slots:
                problem = _misfit(variable, slots[label].slot)
            elif not allow_unused:
                problem = f"has the label {format_path(label)}, for which there is no slot"
                problem += _near(label, slots)
        if problem:
            wrong.append(f"  {where}: {_shown(variable)} {problem}")
    if wrong:
        raise ModuleError(
            f"{len(wrong)} of {len(pairs)} Variables cannot be put into the tree; nothing was "
            f"changed:\n" + "\n".join(wrong) + "\nGive what sx.unbind(tree) returned, or frozen "
            "values with those labels; allow_unused=True leaves out what has no slot."
        )
    return {label: variable for label, (_, variable) in matched.items()}


def _label_for(variable: object, slots: Mapping[Path, OpenSlot]) -> Path | str:
    """Returns a Variable's label, or why there is none."""
    if isinstance(variable, FrozenVariable):
        return variable.label
    if not isinstance(variable, Variable):
        return "is neither a Variable nor a frozen value"
    labels: tuple[Path, ...] = getattr(variable, "_labels", ())
    if not labels:
        return (
            "has no label: it was not taken out by sx.unbind, or not in this transform. Give "
            "transforms frozen values, sx.unbind(tree, freeze=True)"
        )
    fitting = [label for label in labels if label in slots]
    if len(fitting) > 1:
        places = " and ".join(map(format_path, fitting))
        return f"was taken out as {places}, and there are slots for both: assign it yourself"
    return fitting[0] if fitting else labels[-1]


def _equal(first: object, second: object) -> bool:
    frozen_both = isinstance(first, FrozenVariable) and isinstance(second, FrozenVariable)
    return frozen_both and bool(first == second)


def _misfit(variable: Variable, slot: Slot) -> str | None:
    is_frozen = isinstance(variable, FrozenVariable)
    kind = variable.variable_type if is_frozen else variable._flatten(None).type
    if issubclass(kind, slot.variable_type):
        return None
    return f"does not belong into the slot of a {slot.variable_type.__name__}"


def _shown(variable: Variable) -> str:
    if isinstance(variable, FrozenVariable):
        return f"the frozen {variable.variable_type.__name__}"
    return f"the {type(variable).__name__}"


def _near(label: Path, slots: Mapping[Path, OpenSlot]) -> str:
    near = difflib.get_close_matches(format_path(label), map(format_path, slots), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _refuse_label(label: Path, first: str, second: str) -> NoReturn:
    raise ModuleError(
        f"Two have the label {format_path(label)}: {first}, and {second}. A label says which "
        "slot a Variable belongs to, so there must be one for each. Labels are paths: take the "
        "Variables out of the whole tree at once, sx.unbind(tree), rather than out of parts of it "
        "before these are put together."
    )


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
        raise ModuleError(
            f"sx.stateless_call takes a callable Module, or a method of one, as its first "
            f"argument, but was given a {type(tree).__name__}. Give it slots and values: "
            f"sx.stateless_call(*sx.unbind(model, freeze=True), x)."
        )
    leaves, treedef = jax.tree.flatten(variables, is_leaf=lambda x: isinstance(x, Variable))
    mutable = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, FrozenVariable)]
    if mutable:
        raise ModuleError(
            f"stateless_call takes frozen values, but was given {', '.join(sorted(set(mutable)))}. "
            f"Freeze them, sx.freeze(variables); or call the model with its Variables in place, "
            f"sx.bind(model, variables)(...)."
        )
    arguments = (args, kwargs)
    has_slots = any(True for _ in FlatTree(arguments).open_slots())
    call = (_with_frozen_rest(tree, arguments), arguments if has_slots else None)
    filled, thawed = bound(call, leaves, lambda leaf: leaf.thaw())
    args, kwargs = filled[1] if has_slots else arguments
    structure_before = _structure(filled)
    result = filled[0](*args, **kwargs)
    _check_unchanged(structure_before, _structure(filled))
    return result, treedef.unflatten([frozen(thawed[leaf.label], leaf.label) for leaf in leaves])


def _with_frozen_rest(tree: object, arguments: object):
    """Freezes the Variables that are not arguments too."""
    argument_ids = set(map(id, FlatTree(arguments).walk.objects))
    flat = FlatTree(tree)
    items = [(i, flat.walk.objects[i], flat.walk.paths[i]) for i in flat.variables]
    return flat.rebuilt({i: frozen(v, path) for i, v, path in items if id(v) not in argument_ids})


def _structure(tree: object) -> tuple[flatten.GraphDef, list[Path]]:
    walk = FlatTree(tree).walk
    return flatten.GraphDef(tuple(walk.definitions), ()), walk.paths


def _change_text(
    old_structure: tuple[flatten.GraphDef, list[Path]],
    new_structure: tuple[flatten.GraphDef, list[Path]],
) -> str:
    """Describes Variables added, or structure changed, by a call."""
    old, new = (
        dict(zip(paths, graphdef.objects, strict=True))
        for graphdef, paths in (old_structure, new_structure)
    )
    changed = [p for p in {**old, **new} if old.get(p) != new.get(p)]
    new_variables = [p for p in changed if p not in old and type(new[p]) is flatten.VariableDef]
    paths_text = ", ".join(format_path(path[1:]) for path in (new_variables or changed)[:4])
    kind = "added the Variables" if new_variables else "changed the structure of"
    return f"{kind} {paths_text}"


def _check_unchanged(
    old_structure: tuple[flatten.GraphDef, list[Path]],
    new_structure: tuple[flatten.GraphDef, list[Path]],
) -> None:
    if old_structure[0] == new_structure[0]:
        return
    change = _change_text(old_structure, new_structure)
    raise ModuleError(
        f"The functional call {change}. It returns new values for the slots that were filled, and "
        f"nothing else, so this would be lost. Make such Variables before they are taken out "
        f"(a first call of the model does, where layers sow or cache); or use sx.jit, which "
        f"carries changes of structure back."
    )
