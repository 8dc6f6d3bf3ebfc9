# SPDX-License-Identifier: Apache-2.0
"""Where the values of a boxed tree go: specs, logical specs, and shardings.

The functions here give one entry per box, in its place: an entry is a prefix of the box, so the
result can be given to ``jax.jit`` as ``in_shardings`` and ``out_shardings``. Arrays without a box
are replicated, Variables count as boxes, a Module gives a ``State`` of entries, and what is no
array becomes None. Names become mesh axes by the engine of ``shardax.partition.check``, the same
that serves Modules, and what is wrong is reported for all boxes at once, by path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardax.core.errors import NoRulesError, ShardaxError
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.state import State
from shardax.partition.assignment import check_names
from shardax.partition.boxes import AxisMetadata
from shardax.partition.check import raise_on_errors, spec_for
from shardax.partition.findings import Finding
from shardax.partition.mesh import AnyMesh
from shardax.partition.partitioned import LogicallyPartitioned, Partitioned, identity_rules
from shardax.partition.rules import Rules, RulesLike
from shardax.partition.scope import resolve_rules
from shardax.partition.specs import lay_out, named_sharding, require_mesh, to_shardings
from shardax.partition.survey import Survey, _plain_path, in_slot, is_array


def get_partition_spec(tree: Any) -> Any:
    """Returns the ``PartitionSpec`` of every box of a tree, as the boxes have it.

    Args:
        tree: A boxed tree, usually what ``jax.eval_shape(init, ...)`` returns, or an optimizer's
            state over one.

    Returns:
        The tree with a spec in place of each box: of mesh axes for a ``Partitioned``, of logical
        names for a ``LogicallyPartitioned`` or Variable (``logical_to_mesh`` maps these). ``P()``
        for arrays, None for what is no array.

    Raises:
        PartitionCheckError: If names are malformed; lists all, by path.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> weight = sx.Partitioned(jnp.ones((4, 8)), (None, "model"))
        >>> tree = {"w": weight, "n": jnp.ones(3), "s": 2}
        >>> get_partition_spec(tree)
        {'n': P(), 's': None, 'w': P(None, 'model')}
    """
    return _without_errors(_own_specs(tree))


def logical_to_mesh(tree: Any, rules: RulesLike | None = None) -> Any:
    """Maps the logical names in every spec of a tree to mesh axes.

    Args:
        tree: A tree of logical ``PartitionSpec``, as ``get_partition_spec`` returns it, or the
            boxed tree itself. Rules baked into a box have precedence.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The tree with specs of mesh axes. ``P()`` for arrays, None for what is no array.

    Raises:
        PartitionCheckError: If names are malformed, or break a policy of the rules; lists all.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> logical_to_mesh({"w": P("embed", "mlp"), "step": None}, {"mlp": "model"})
        {'step': None, 'w': P(None, 'model')}
    """
    chosen = resolve_rules(rules)
    return _without_errors(_mapped_specs(tree, chosen))


def logical_to_mesh_sharding(
    tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> Any:
    """Maps the logical names in every spec of a tree to a sharding over a mesh.

    Args:
        tree: As for ``logical_to_mesh``.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The tree with ``NamedSharding``, None for what is no array.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionCheckError: If names cannot be mapped to the mesh; lists all, by path.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> logical_to_mesh_sharding(P("embed", "mlp"), mesh, {"mlp": "model"}).spec
        P(None, 'model')
    """
    where = require_mesh(mesh, "logical_to_mesh_sharding")
    specs, findings = _mapped_specs(tree, resolve_rules(rules))
    for path, spec in _specs_in(specs):
        names = tuple(spec)
        findings += spec_for(names, (0,) * len(names), where, identity_rules(names), path)[1]
    raise_on_errors(findings)
    return jax.tree.map(lambda spec: named_sharding(where, spec), specs, is_leaf=_is_spec)


def get_sharding(tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None) -> Any:
    """Returns the ``NamedSharding`` of every box of a tree.

    Args:
        tree: A boxed tree, usually what ``jax.eval_shape(init, ...)`` returns, or an optimizer's
            state over one.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules for logical names, unless the box has rules of its own; None for the current.

    Returns:
        The tree with a sharding in place of each box and array, and None for what is no array.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        NoRulesError: If boxes have logical names and there are no rules; names the first.
        PartitionCheckError: If an array cannot be laid out so; lists all, by path.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> tree = {"w": sx.Partitioned(jnp.ones((4, 8)), (None, "model")), "step": jnp.zeros(())}
        >>> [sharding.spec for sharding in get_sharding(tree, mesh).values()]
        [P(), P(None, 'model')]
    """
    where = require_mesh(mesh, "get_sharding")
    chosen = resolve_rules(rules)
    pieces = _Pieces(tree)
    for slot in pieces.survey.slots if not chosen else ():
        _check_unnamed(slot.axes, slot.path, slot.variable)
    specs, findings = lay_out(pieces.survey.slots, where, chosen)
    entries: dict[int, Any] = {}
    for position, path, box in pieces.boxes:
        spec, found = _laid_out(box, path, where, chosen)
        entries[position] = named_sharding(where, spec)
        findings += found
    raise_on_errors(findings)
    return pieces.arrange(to_shardings(specs, where), entries)


# --- the pieces of a tree -------------------------------------------------------------------------


class _Hole:
    """Stands where a box was, for the survey of everything else."""


_HOLE = _Hole()


class _Pieces:
    """A tree taken apart into boxes and a survey of the rest.

    Args:
        tree: A boxed tree.

    Attributes:
        boxes: Position among the leaves, path and box, for each box.
        survey: The arrays that are in no box.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
        self.boxes = [
            (position, _plain_path(path), leaf)
            for position, (path, leaf) in enumerate(leaves)
            if isinstance(leaf, (AxisMetadata, PartitionSpec))
        ]
        held = {position for position, _, _ in self.boxes}
        self.survey = Survey(
            self._treedef.unflatten(
                [_HOLE if i in held else leaf for i, (_, leaf) in enumerate(leaves)]
            )
        )

    def arrange(self, of_slots: list[Any], of_boxes: dict[int, Any]) -> Any:
        """Puts one entry per slot of the survey, and one per box, where these are in the tree."""
        rest = self._treedef.flatten_up_to(self.survey.arrange(of_slots))
        return self._treedef.unflatten([of_boxes.get(i, entry) for i, entry in enumerate(rest)])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (AxisMetadata, Object, State))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


# --- specs ----------------------------------------------------------------------------------------


class _Specs(NamedTuple):
    """A tree of specs, and what is wrong with it."""

    specs: Any
    findings: list[Finding]


def _without_errors(found: _Specs) -> Any:
    raise_on_errors(found.findings)
    return found.specs


def _own_specs(tree: Any) -> _Specs:
    """Specs as boxes have them, and the axes of Variables as logical specs."""
    return _specs_of(tree, None)


def _mapped_specs(tree: Any, rules: Rules) -> _Specs:
    """Specs of mesh axes; those of boxes without logical names, and of arrays, as they are."""
    return _specs_of(tree, rules)


def _specs_of(tree: Any, rules: Rules | None) -> _Specs:
    pieces = _Pieces(tree)
    findings: list[Finding] = []

    def attempt(path: Path, make: Any) -> Any:
        try:
            return make()
        except ShardaxError as error:
            text = f"{format_path(path)}: {error}"
            findings.append(Finding("error", path, "axis-names", text))
            return PartitionSpec()

    def of_names(names: Any) -> PartitionSpec:
        named = names or ()
        return PartitionSpec(*check_names(named)) if rules is None else rules.spec(named)

    def of_box(box: Any) -> PartitionSpec:
        if isinstance(box, PartitionSpec):
            return of_names(box)
        if rules is not None and isinstance(box, LogicallyPartitioned):
            return (rules if box.rules is None else box.rules).spec(box.names or ())
        return box.get_partition_spec()

    of_boxes = {i: attempt(path, lambda box=box: of_box(box)) for i, path, box in pieces.boxes}
    of_slots = [
        in_slot(slot, _repeat(attempt(slot.path, lambda slot=slot: of_names(slot.axes))))
        for slot in pieces.survey.slots
    ]
    return _Specs(pieces.arrange(of_slots, of_boxes), findings)


def _repeat(item: Any) -> Iterator[Any]:
    while True:
        yield item


def _specs_in(specs: Any) -> list[tuple[Path, PartitionSpec]]:
    leaves = jax.tree.leaves_with_path(specs, is_leaf=_is_spec)
    return [(_plain_path(path), spec) for path, spec in leaves]


# --- shardings ------------------------------------------------------------------------------------


def _laid_out(
    box: Any, path: Path, mesh: AnyMesh, rules: Rules
) -> tuple[PartitionSpec, list[Finding]]:
    """Lays out one box over a mesh: the spec of its arrays, and what is wrong with it at each."""
    if not isinstance(box, (Partitioned, PartitionSpec)):
        return _laid_out_by_itself(box, path, mesh)
    if isinstance(box, PartitionSpec):
        names, its_rules, arrays = tuple(box), identity_rules(tuple(box)), []
    else:
        if box.names is None:
            return PartitionSpec(), []
        names, its_rules = box.layout()
        if isinstance(box, LogicallyPartitioned) and box.rules is None:
            its_rules = rules
        arrays = _arrays_in(box, path)
    if not its_rules:
        _check_unnamed(names, path, box)
    if not arrays:  # only the names can be judged; 0 is divisible by everything
        return spec_for(names, (0,) * len(names), mesh, its_rules, path)
    results = [spec_for(names, shape, mesh, its_rules, where) for where, shape in arrays]
    return results[0][0], [finding for _, findings in results for finding in findings]


def _check_unnamed(names: Any, path: Path, owner: Any) -> None:
    """Raises if something has logical names, where there are no rules."""
    if any(isinstance(name, (str, tuple)) for name in names or ()):
        raise NoRulesError(
            f"{format_path(path)}: {owner!r} has logical names, and there are no rules to map them "
            "to mesh axes. Pass them, rules=rules, or put them in scope: "
            "with sx.axis_rules(rules): ..."
        )


def _laid_out_by_itself(
    box: AxisMetadata[Any], path: Path, mesh: AnyMesh
) -> tuple[PartitionSpec, list[Finding]]:
    """Lays out a box of the user's own class by the spec that it gives."""
    spec = tuple(box.get_partition_spec())
    found: list[Finding] = []
    for where, shape in _arrays_in(box, path):
        names = (*spec, *(None,) * (len(shape) - len(spec)))
        found += spec_for(names, shape, mesh, identity_rules(names), where)[1]
    return spec_for(spec, (0,) * len(spec), mesh, identity_rules(spec), path)[0], found


def _arrays_in(box: AxisMetadata[Any], path: Path) -> list[tuple[Path, tuple[int, ...]]]:
    """Path and shape of each array in a box, also inside boxes in it."""
    leaves = jax.tree.leaves_with_path(box.value)
    return [
        ((*path, *_plain_path(below)), tuple(leaf.shape))
        for below, leaf in leaves
        if is_array(leaf)
    ]
