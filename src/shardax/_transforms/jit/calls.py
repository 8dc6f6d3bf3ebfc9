# SPDX-License-Identifier: Apache-2.0
"""A steady call of a compiled function: what it is found by, and what it does.

``flatten_call`` makes the key of a call: one look at the type of each argument, in which an object
is one entry whatever is in it. A ``CachedCall`` is remembered by that key. It has the flat list of
the Variables of the objects, and the specialization that was found for them; it is current while
the structure epoch stays. Its methods are the steps of ``Jit.__call__``, in this order:

- ``read`` takes the array of each Variable,
- ``run`` calls the program with them,
- ``store`` puts back the arrays that the program wrote.

Each of the three does a little for each Variable. Nothing else depends on the size of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from shardax._core import threads
from shardax._core._jax import Tracer
from shardax._core.errors import ConcurrentWriteError
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.graph.settings import Setting, have_changed, settings_key
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, epoch
from shardax._core.values import has_deleted
from shardax._core.variable import Variable
from shardax._transforms.explain.error_context import explain
from shardax._transforms.jit.options import JitOptions
from shardax._transforms.jit.programs import NeedsSlowCall
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.effects import Effects, LiftedOutputs, apply_effects, check_no_leak
from shardax._transforms.lift.input_graph import InputGraph

if TYPE_CHECKING:
    from shardax._transforms.jit.specialization import Specialization

# Types of arguments that are surely inputs. JAX's concrete array type joins when it is first met:
# it has no public name, and to make an array here would start a backend.
ARRAY_TYPES: set[type] = {np.ndarray, bool, int, float, complex}

# Types whose values are keys by themselves, the type beside them.
_COMPARED_BY_VALUE = frozenset({str, bool, int, bytes})

# ``isinstance(value, Object)``, without a function of Python around it.
_is_object = Object.__instancecheck__
_flatten_tree = jax.tree_util.default_registry.flatten

CallKey = tuple[Hashable, ...]


def flatten_call(
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    options: JitOptions,
    static_types: frozenset[type],
    besides: Sequence[Hashable],
) -> tuple[CallKey | None, list[Leaf]]:
    """Returns the key of a call, and the arrays among the leaves of its arguments.

    The key has an entry for each leaf: the identity of an object, a static value with its type, or
    None for an array. It is None for a call that is not to be remembered.

    Args:
        args: The positional arguments, without static ones.
        kwargs: The keyword arguments, without static ones.
        options: The options of ``jit``.
        static_types: Its ``static_types``.
        besides: What the key has besides what is found in the arguments.
    """
    # Most calls have arrays and objects alone: JAX would take 0.5 us to say that these are leaves.
    arrays: list[Leaf] = []
    key: list[Hashable] = [*besides, None]
    if not kwargs:
        for arg in args:
            arg_type = type(arg)
            if arg_type in ARRAY_TYPES and arg_type not in static_types:
                key.append(None)
                arrays.append(arg)
            elif isinstance(arg, Object):
                key.append(id(arg))
            elif note_array_type(arg):
                key.append(None)
                arrays.append(arg)
            else:
                break
        else:
            return tuple(key), arrays

    leaves, treedef = _flatten_tree((args, kwargs), _is_object)
    arrays = []
    key = [*besides, treedef]
    for leaf in leaves:
        leaf_type = type(leaf)
        if leaf_type in ARRAY_TYPES and leaf_type not in static_types:
            key.append(None)
            arrays.append(leaf)
        elif isinstance(leaf, Object):
            key.append(id(leaf))
        elif leaf_type in _COMPARED_BY_VALUE and options.static is not None:
            key.append((leaf_type, leaf))
        elif isinstance(leaf, Tracer):
            # Part of another program.
            return None, arrays
        elif not options.auto_static or inputs.is_dynamic(leaf, options.static_numbers):
            note_array_type(leaf)
            key.append(None)
            arrays.append(leaf)
        else:
            try:
                key.append((leaf_type, settings_key(leaf)))
            except TypeError:
                # The slow way refuses it, by its path.
                return None, arrays

    return tuple(key), arrays


def note_array_type(leaf: Leaf) -> bool:
    """Notes the type of an array as one of inputs; returns whether it is one."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if is_array:
        ARRAY_TYPES.add(type(leaf))
    return is_array


def have_tracers(values: Sequence[Leaf]) -> bool:
    """Whether there are tracers among values that a program wrote; learns types of arrays."""
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, Tracer):
            return True
        note_array_type(leaf)
    return False


class CachedCall:
    """What is remembered of a call for particular objects.

    Attributes:
        specialization: What was compiled for calls of this structure.
        lock: What is held from reading the values to storing the new ones.
        effects: What the last run did, if it stored values and nothing else; else None.
        settings: The settings objects in Modules, compared at every call.
    """

    __slots__ = (
        "_donated",
        "_epoch",
        "_kept",
        "_leaves",
        "_placed",
        "_roots",
        "_watched",
        "_written",
        "_written_positions",
        "effects",
        "lock",
        "settings",
        "specialization",
    )

    def __init__(self, specialization: Specialization, graph: InputGraph) -> None:
        self.specialization = specialization
        self.lock: AbstractContextManager[Any] = specialization.lock
        self.effects: Effects | None = None
        self.settings: list[Setting] = graph.flat.settings

        self._epoch = graph.flat.epoch
        # All Variables, in the order of the graph; those whose arrays are kept and donated.
        self._leaves: list[Variable] = graph.leaves
        self._kept, self._donated = specialization.partition(graph.leaves)
        # Those that the last run wrote.
        self._written: list[Variable] = []
        self._written_positions: Sequence[int] = ()
        # Called, each returns a root.
        self._roots: list[Callable[[], Any]] = [lambda root=root: root for root in graph.roots]
        # Variables that belong somewhere, by position; the shardings of their values when they were
        # last there, and the mesh that specs meant.
        self._watched: dict[int, Variable] = {}
        self._placed: tuple[list[Sharding | list[Sharding | None]], Mesh | None] | None = None

    # --- a steady call ----------------------------------------------------------------------------

    def read(self, arrays: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """Returns the inputs of the program: those that are kept, and those that are donated.

        Variables with a declared sharding are moved there first.

        Args:
            arrays: Those among the arguments, which follow those of the Variables.

        Raises:
            NeedsSlowCall: If an object was changed in structure since the call was remembered.
        """
        if self._epoch != epoch.current or (self.settings and have_changed(self.settings)):
            raise NeedsSlowCall
        if self._placed is not None:
            self._restore_places()

        kept = [variable._value for variable in self._kept]
        if not self.specialization.donated:
            return kept + arrays, []

        donated = [variable._value for variable in self._donated]
        if len(donated) == len(self.specialization.donated):
            return kept + arrays, donated

        first = self.specialization.variable_count
        kept_arrays, donated_arrays = self.specialization.partition(arrays, first)
        return kept + kept_arrays, donated + donated_arrays

    def run(self, kept: list[Leaf], donated: list[Leaf]) -> tuple[Any, ...]:
        """Returns what the program returns for inputs: result, written, fresh and effects.

        Raises:
            NeedsSlowCall: If no program is known for such inputs, or a Variable holds what cannot
                be an input: a lazy value, or an array that was deleted.
        """
        try:
            return self.specialization.run(kept, donated)
        except NeedsSlowCall:
            raise
        except TypeError:
            # An argument that JAX does not take. The slow way refuses it, by its path.
            raise NeedsSlowCall from None
        except Exception as error:
            if _are_unusable(kept, donated, error):
                raise NeedsSlowCall from None
            if isinstance(error, ValueError) and self._move_back():
                # A Variable that the program writes was moved away since the last call.
                raise NeedsSlowCall from None
            explain(error, self)
            raise

    def did_as_before(self, effects: Effects, written: Sequence[Leaf]) -> bool:
        """Whether a run wrote arrays into the same Variables as the last one, and that is all."""
        # Inside of a plain JAX transform the outputs are tracers.
        return effects is self.effects and (not written or type(written[0]) in ARRAY_TYPES)

    def store(self, kept: list[Leaf], donated: list[Leaf], values: Sequence[Leaf]) -> None:
        """Stores what a run wrote.

        Args:
            kept: The inputs that the run was given.
            donated: Those that it was given to donate.
            values: What it wrote.

        Raises:
            NeedsSlowCall: If a value was written by another thread since it was read.
        """
        if not values:
            return
        if not threads.several:
            for variable, value in zip(self._written, values):  # noqa: B905 (hot path)
                variable._value = value
        else:
            read = self.specialization.join(kept, donated)
            values_read = [read[position] for position in self._written_positions]
            if not threads.store(self._written, values_read, values):
                raise NeedsSlowCall

    def apply(self, kept: list[Leaf], donated: list[Leaf], outputs: LiftedOutputs) -> PyTree:
        """Applies what a run did that did not do as the last one; returns the result of the call.

        Raises:
            NeedsSlowCall: If a value was written by another thread since it was read.
        """
        effects = outputs.effects
        if self.lock is not self.specialization.lock:
            # Another thread has traced meanwhile that such calls write.
            raise NeedsSlowCall
        self.learn(effects)

        are_traced = have_tracers(outputs.written)
        if effects.simple and not are_traced:
            self.store(kept, donated, outputs.written)
            return outputs.result

        graph = self.graph()
        graph.read = self.specialization.join(kept, donated)[: len(self._leaves)]
        if are_traced:
            check_no_leak(graph, outputs)
        try:
            return apply_effects(graph, outputs)
        except ConcurrentWriteError:
            if self.specialization.donated:
                raise
            raise NeedsSlowCall from None

    # --- what the slow way prepares ---------------------------------------------------------------

    def learn(self, effects: Effects) -> None:
        """Notes what a run did, as what the next one will do."""
        self.effects = effects if effects.simple else None
        self._written_positions = effects.written
        self._written = [self._leaves[position] for position in effects.written]

        layouts = self.specialization.layouts
        if layouts.place_variables:
            # The program returns what it writes where that belongs. If such a Variable was given
            # another value meanwhile, JAX refuses the call, and ``run`` finds that.
            self._watched = {
                position: variable
                for position, variable in enumerate(self._leaves)
                if layouts.has_place(position) and position not in effects.written
            }
            self._placed = ([], None)

    def note_placed(self) -> None:
        """Notes that the Variables are where they belong."""
        if self._placed is None:
            return
        shardings = [_sharding_of(variable._value) for variable in self._watched.values()]
        self._placed = (shardings, self.specialization.layouts.mesh_of_specs())

    def _restore_places(self) -> None:
        """Moves Variables back, where they were given other values, or specs mean another mesh."""
        placed = self._placed
        self.note_placed()
        if placed != self._placed:
            self.specialization.layouts.place(self._watched)
            self.note_placed()

    def _move_back(self) -> bool:
        """Moves all Variables to where they belong; returns whether one of them was elsewhere."""
        layouts = self.specialization.layouts
        if self._placed is None:
            return False
        belonging = {
            position: variable
            for position, variable in enumerate(self._leaves)
            if layouts.has_place(position)
        }
        values = [variable._value for variable in belonging.values()]
        layouts.place(belonging)
        pairs = zip(belonging.values(), values, strict=True)
        return any(variable._value is not value for variable, value in pairs)

    def graph(self) -> InputGraph:
        """Returns the objects of the call, flattened anew, as an ``InputGraph``."""
        return InputGraph([root() for root in self._roots], self.specialization.names)

    def has_changed(self, graph: InputGraph) -> bool:
        """Whether the objects have another structure than when they were flattened."""
        return self.graph().flat.graphdef != graph.flat.graphdef

    def hold_weakly(self, graph: InputGraph, forget: Callable[[Any], None]) -> None:
        """Lets go of the objects of the caller; ``forget`` is called when one of them is gone."""
        self._roots = [
            weakref.ref(root, forget) if isinstance(root, Object) else lambda root=root: root
            for root in graph.roots
        ]

        # A Variable that is an argument itself has no Module whose end would be noticed.
        bare = {id(root) for root in graph.roots if isinstance(root, Variable)}
        if bare:
            leaves: list[Any] = [
                weakref.proxy(variable) if id(variable) in bare else variable
                for variable in graph.leaves
            ]
            self._leaves = leaves
            self._kept, self._donated = self.specialization.partition(leaves)
            self._written = [leaves[position] for position in self._written_positions]
            self._watched = {position: leaves[position] for position in self._watched}


def _sharding_of(value: PyTree) -> Sharding | list[Sharding | None]:
    """Returns the sharding of an array, or those of the leaves of another value."""
    if type(value) in ARRAY_TYPES:
        return value.sharding
    return [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(value)]


def _are_unusable(kept: Sequence[Leaf], donated: Sequence[Leaf], error: Exception) -> bool:
    """Whether values could not be inputs of the call that raised an error."""
    if any(isinstance(value, LazyValue) for value in (*kept, *donated)):
        return True
    if any(map(has_deleted, kept)):
        return True

    # A program that has begun to run has deleted everything that it is given to donate.
    deleted = [has_deleted(value) for value in donated]
    has_begun = all(deleted) and isinstance(error, jax.errors.JaxRuntimeError)
    return any(deleted) and not has_begun
