# SPDX-License-Identifier: Apache-2.0
"""The outcomes of branches, which must be alike.

The *outcome* of a branch is all that it leaves behind: its result, the Variables that it wrote, how
it changed the structure of the objects it was given, and the objects that it made. One program
comes out of all branches, so ``check_alike`` refuses two outcomes that differ in more than numbers.
It compares, in this order, the containers of the results, the structure of the objects, and the
forms of arrays and Variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from shardax._core.graph import flatten
from shardax._core.graph.definitions import GraphDef, Ref, VariableDef, definition_paths
from shardax._core.graph.differences import Difference, Text, structure_differences
from shardax._core.graph.paths import Leaf, Path, PyTree, plain_path
from shardax._transforms.control import errors
from shardax._transforms.control.forms import ARRAY, form_text, outline_difference
from shardax._transforms.lift.effects import Effects
from shardax._transforms.lift.engine import LiftedCall


class BranchOutputs(NamedTuple):
    """The arrays that leave a branch, or their types."""

    result: list[Leaf]
    written: dict[int, PyTree]  # values of the Variables that it wrote, by position
    fresh: list[PyTree]  # values of new Variables


class BranchOutcome(NamedTuple):
    """What the trace of one branch showed."""

    label: str  # how the caller knows the branch
    effects: Effects
    outline: PyTree  # of the result (``forms.ARRAY``)
    treedef: jax.tree_util.PyTreeDef  # of the arrays of the result

    def structure(self, call: LiftedCall) -> tuple[GraphDef, list[Path]]:
        """Returns the structure of the objects after the branch, and the path of each root."""
        given, updates = call.graph.flat.graphdef, self.effects.updates
        objects = [updates.get(position, old) for position, old in enumerate(given.objects)]
        returned = [
            (path, position)
            for path, position in _outline_leaves(self.outline)
            if position != ARRAY
        ]
        roots = (*given.roots, *(Ref(position) for _, position in returned))
        names = [*call.names, *(path for path, _ in returned)]
        return GraphDef((*objects, *self.effects.fresh), roots), names


def result_outline(result: PyTree, effects: Effects) -> PyTree:
    """Returns the outline of a result: the position of each object, and ``ARRAY`` for the rest."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=flatten.is_object)
    position_of = {} if effects.result is None else dict(effects.result.roots)
    return treedef.unflatten([position_of.get(index, ARRAY) for index in range(len(leaves))])


def _outline_leaves(outline: PyTree) -> list[tuple[Path, int]]:
    pairs = jax.tree_util.tree_leaves_with_path(outline)
    return [(("result", *plain_path(keys)), leaf) for keys, leaf in pairs]


class OutcomeComparison(NamedTuple):
    """Two branches of a call, with the types of the arrays that leave them."""

    call: LiftedCall
    values: Sequence[PyTree]  # of the Variables before the choice
    first: BranchOutcome
    first_types: BranchOutputs
    second: BranchOutcome
    second_types: BranchOutputs

    def check_alike(self) -> None:
        """Raises if the outcomes differ in more than numbers."""
        first, second = self.first, self.second
        containers = outline_difference(first.outline, second.outline, ("result",))
        if containers is not None:
            raise self._differ(
                "return different structures",
                containers,
                "Return the same containers with the same keys from every branch.",
            )

        for difference in self._structures():
            raise self._differ(
                "leave different structures",
                difference,
                "One program comes out of both, so they must leave one structure. Make the same "
                "change in every branch (sow the same names, set the same attributes in the same "
                "order, return the same object), or make it before the choice and only write "
                "values inside.",
            )

        for difference in self._forms():
            raise self._differ(
                "leave different forms",
                difference,
                "Keep one structure, shape and dtype: v[...] = new.astype(v.dtype), "
                "x.reshape(shape).",
            )

    def _differ(self, problem: str, difference: Difference, advice: str) -> Exception:
        labels = (self.first.label, self.second.label)
        return errors.branches_differ(self.call.name, problem, labels, difference, advice)

    def _structures(self) -> Iterator[Difference]:
        """Yields the differences in structure."""
        leaves, other_leaves = map(_outline_leaves, (self.first.outline, self.second.outline))
        for (path, leaf), (_, other) in zip(leaves, other_leaves, strict=True):
            if (leaf == ARRAY) != (other == ARRAY):
                texts = (Text("an array"), Text("an object"))
                yield Difference(path, *(texts if leaf == ARRAY else reversed(texts)))

        (first, first_names), (second, second_names) = (
            outcome.structure(self.call) for outcome in (self.first, self.second)
        )
        if first != second:
            yield from structure_differences(first, second, first_names, second_names)
            yield Difference((), Text("its objects"), Text("objects shared in another way"))

        # An object that was put in from outside must be the same one.
        foreign, other_foreign = self.first.effects.foreign, self.second.effects.foreign
        for position in sorted({*foreign, *other_foreign}):
            if foreign.get(position) is not other_foreign.get(position):
                kind = first.objects[position].type.__name__
                path = definition_paths(first, first_names).get(position, ())
                yield Difference(path, Text(f"a {kind} from outside"), Text("another one"))

    def _forms(self) -> Iterator[Difference]:
        """Yields the differences in form of what leaves, given that structures are alike."""
        first, second = self.first_types, self.second_types
        array_paths = [path for path, leaf in _outline_leaves(self.first.outline) if leaf == ARRAY]
        new_paths = self._paths_of_new()
        results = zip(array_paths, first.result, second.result, strict=True)
        new_variables = zip(new_paths, first.fresh, second.fresh, strict=True)
        for path, value, other in (*results, *new_variables):
            form, other_form = form_text(value), form_text(other)
            if form != other_form:
                yield Difference(path, form, other_form)

        # A Variable that one branch does not write leaves it as it was.
        for position in sorted({*first.written, *second.written}):
            path, old = self.call.graph.flat.leaf_paths[position], self.values[position]
            forms = [form_text(each.written.get(position, old)) for each in (first, second)]
            if forms[0] != forms[1]:
                verbs = [
                    "writes" if position in each.written else "leaves" for each in (first, second)
                ]
                texts = [Text(f"{verb} {form}") for verb, form in zip(verbs, forms, strict=True)]
                yield Difference(path, *texts)

    def _paths_of_new(self) -> list[Path]:
        """Returns the paths of new Variables."""
        structure, names = self.first.structure(self.call)
        paths = definition_paths(structure, names)
        count = len(self.call.graph.flat.graphdef.objects)
        return [
            paths.get(position, ())
            for position, definition in enumerate(self.first.effects.fresh, start=count)
            if type(definition) is VariableDef and position not in self.first.effects.foreign
        ]
