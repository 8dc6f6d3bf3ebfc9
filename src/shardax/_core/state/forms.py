# SPDX-License-Identifier: Apache-2.0
"""Forms of States: everything that a State is besides its values.

A form has the *paths* of the values and their *origins*, in order. To JAX a State is a node for
each step of its paths: a ``StateNode`` has the *steps* of one, and what stands at each, the origin
of a value or a node *below*. A form and the outermost node say the same; each is made of the other,
once, when it is first asked for. States share one form where they can: what JAX rebuilds, and all
States of one model (``_core.state.split_merge``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence

from jax.tree_util import DictKey

from shardax._core.graph.paths import KeyEntry, Path, attribute_key
from shardax._core.graph.static import EMPTY
from shardax._core.state.frozen import Origin
from shardax._core.variable import Variable

UNKNOWN_ORIGIN = Origin(Variable, EMPTY)


class _BareStep(enum.Enum):
    """The step to the value of a bare Variable, whose path has none."""

    VALUE = "()"

    def __repr__(self) -> str:
        return self.value


_BARE = _BareStep.VALUE


class StateForm:
    """Paths and origins of the values of a State, in order."""

    __slots__ = ("_node", "_origin_by_path", "origins", "paths")

    def __init__(
        self, paths: Sequence[Path], origins: Sequence[Origin], node: StateNode | None = None
    ) -> None:
        self.paths = tuple(paths)
        self.origins = tuple(origins)
        self._node = node
        self._origin_by_path: dict[Path, Origin] | None = None

    @property
    def origin_by_path(self) -> Mapping[Path, Origin]:
        """What each value came from, by its path."""
        if self._origin_by_path is None:
            self._origin_by_path = dict(zip(self.paths, self.origins, strict=True))
        return self._origin_by_path

    @property
    def node(self) -> StateNode:
        """The outermost node that JAX sees."""
        if self._node is None:
            paths = [path or (_BARE,) for path in self.paths]
            self._node = _node_of(paths, self.origins, 0, len(paths), 0, self)
        return self._node


class StateNode:
    """One node that JAX sees in a State: its static part.

    Attributes:
        steps: The step to each child.
        origins: The origin of the value at each step; None where a node is below.
        below: The node at each step, None where a value is; None if no node is below.
        size: How many values are in the node, and in those below.
    """

    __slots__ = ("_form", "below", "origins", "size", "steps")

    def __init__(
        self,
        steps: Sequence[Hashable],
        origins: Sequence[Origin | None],
        below: Sequence[StateNode | None] | None,
        size: int,
        form: StateForm | None = None,
    ) -> None:
        self.steps = tuple(steps)
        self.origins = tuple(origins)
        self.below = below
        self.size = size
        self._form = form

    @property
    def form(self) -> StateForm:
        """Paths from here, and origins, of all values."""
        if self._form is None:
            paths: list[Path] = []
            origins: list[Origin] = []
            nodes = self.below or [None] * self.size
            for step, origin, node in zip(self.steps, self.origins, nodes, strict=True):
                if node is None:
                    paths.append(path_below((), step))
                    origins.append(origin or UNKNOWN_ORIGIN)
                else:
                    paths.extend((step, *path) for path in node.form.paths)
                    origins.extend(node.form.origins)
            self._form = StateForm(paths, origins, self)
        return self._form

    def key_entries(self) -> list[KeyEntry]:
        """Returns JAX's key of each child."""
        # The value of a bare Variable has the key that it has in the Variable.
        return [attribute_key("value") if step is _BARE else DictKey(step) for step in self.steps]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StateNode):
            return NotImplemented
        # JAX compares the nodes below by themselves, and names the place where one differs.
        return self.steps == other.steps and self.origins == other.origins

    def __hash__(self) -> int:
        return hash(self.steps)

    def __repr__(self) -> str:
        return repr((self.steps, self.origins))


def path_below(path: Path, step: Hashable) -> Path:
    """Returns the path of a step below a path."""
    return path if step is _BARE else (*path, step)


def _node_of(
    paths: Sequence[Path],
    origins: Sequence[Origin],
    start: int,
    stop: int,
    depth: int,
    form: StateForm | None = None,
) -> StateNode:
    """Returns the node of some neighbours, whose paths share so many steps."""
    below = depth + 1
    steps: list[Hashable] = []
    kinds: list[Origin | None] = []
    nodes: list[StateNode | None] = []
    position = start
    while position < stop:
        path = paths[position]
        step = path[depth]
        steps.append(step)

        if len(path) == below:
            kinds.append(origins[position])
            nodes.append(None)
            position += 1
            continue

        # One node for all that goes on with the same step.
        end = position + 1
        while end < stop and paths[end][depth] == step and len(paths[end]) > below:
            end += 1
        kinds.append(None)
        nodes.append(_node_of(paths, origins, position, end, below))
        position = end

    has_nodes = None in kinds
    return StateNode(steps, kinds, nodes if has_nodes else None, stop - start, form)
