# SPDX-License-Identifier: Apache-2.0
"""The compiled program of one structure of arguments.

A ``Specialization`` wraps one ``jax.jit`` of the *pure function*, whose arguments are flat lists:
values of the Variables that are kept, of those that are donated, and plain arguments likewise. It
returns ``LiftedOutputs``. Declared shardings need the tree of that result before compiling, so the
function is then traced once first; JAX keeps the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from shardax._core.errors import DonationError
from shardax._core.frames import local
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import exact_key
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms.errors import StaticArgumentError, TransformError
from shardax._transforms.jit import retraces
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding, engine
from shardax._transforms.lift import prefix as prefixes
from shardax._transforms.lift.tracer_errors import TRACER_ERRORS, add_advice


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """Options of ``jit``, named as those of ``jax.jit``."""

    in_shardings: PyTree = None
    out_shardings: PyTree = None
    static_argnums: Any = None
    static_argnames: Any = None
    static: Any = None
    donate_argnums: Any = None
    donate_argnames: Any = None
    keep_unused: bool = False
    inline: bool = False
    compiler_options: Any = None

    def __post_init__(self) -> None:
        inputs.check_static_option(self.static)
        check_compiler_options(self.compiler_options)
        for name in ("in_shardings", "out_shardings"):
            if (sharding := getattr(self, name)) is not None:
                prefixes.check_shardings_only(sharding, name)

    @property
    def auto_static(self) -> bool:
        """Whether leaves that are neither arrays nor objects are static."""
        return self.static is not None

    @property
    def static_numbers(self) -> bool:
        """Whether Python's numbers are static, too."""
        return self.static == inputs.NUMBERS

    @property
    def static_types(self) -> frozenset[type]:
        """Types that are static although JAX takes them."""
        return frozenset({bool, *inputs.NUMBER_TYPES}) if self.static_numbers else frozenset({bool})

    def key(self) -> Any:
        """Returns what the options compare by: their values if hashable, else themselves."""
        try:
            return exact_key(self)
        except TypeError:
            return object()

    def split_arguments(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        label: Callable[[int | str], Path],
    ) -> inputs.SplitArguments:
        """Splits the arguments of a call, without static ones."""
        numbers = self.static_numbers
        return inputs.SplitArguments(
            args, kwargs, self.auto_static, static_numbers=numbers, label=label
        )

    def donates(self, position: int, name: str) -> bool:
        """Whether the positional argument (by position or parameter name) is donated."""
        return position in inputs.as_tuple(self.donate_argnums) or self.donates_name(name)

    def donates_name(self, name: str) -> bool:
        """Whether the keyword argument is donated."""
        return name in inputs.as_tuple(self.donate_argnames)


def check_compiler_options(options: object) -> None:
    """Raises unless compiler options are a mapping."""
    if options is not None and not isinstance(options, Mapping):
        raise TransformError(
            f"compiler_options={options!r} is of type {type(options).__name__}, but options of XLA "
            "are given by name: compiler_options={'xla_embed_ir_in_executable': True}."
        )


def with_resolved_donation(options: JitOptions, function: Callable[..., object]) -> JitOptions:
    """Returns the options with donated arguments by position and name."""
    positions, names = inputs.resolve_arguments(
        function, options.donate_argnums, options.donate_argnames, "donate", DonationError
    )
    static, static_names = inputs.resolve_arguments(
        function, options.static_argnums, options.static_argnames, "static", StaticArgumentError
    )
    both = sorted({*names} & {*static_names}) or sorted({*positions} & {*static})
    if both:
        raise DonationError(
            f"The arguments {both} are both static and donated, but a static argument has no "
            "memory to donate. Take them out of one of the two."
        )
    return dataclasses.replace(options, donate_argnums=positions, donate_argnames=names)


def _not_noted(_: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Specialization:
    """One compiled form of a function."""

    def __init__(
        self,
        function: Callable[..., PyTree],
        options: JitOptions,
        key: Any,
        graph: binding.InputGraph,
        arguments: inputs.SplitArguments,
        positions: inputs.ArgumentPositions,
        names: Sequence[Path],
    ) -> None:
        self.function = function
        self.options = options
        self.key = key
        # Entered with the function for as long as a trace takes; the cache sets it.
        self.tracing: Callable[[Any], contextlib.AbstractContextManager[None]] = _not_noted
        self.names = names
        self.positions = positions
        self.graphdef = graph.flat.graphdef
        # With what the last trace wrote into settings objects.
        self.graphdef_after = self.graphdef
        self.leaf_paths = graph.flat.leaf_paths
        self.templates = arguments.templates
        self.named = arguments.named
        self.root_count = len(arguments.roots)
        # Donated plain arguments, by index; of objects, their Variables are (``donated_leaves``).
        self.donated = frozenset(
            i
            for i, (position, label) in enumerate(positions.positional)
            if options.donates(position, label)
            and not isinstance(arguments.templates[i], inputs.RootTemplate)
        )
        # Where ``shard_map`` uses Variables that are only read, by position, once that is known.
        self.wanted: dict[int, Any] = {}
        self._settled = False
        self.used = 0  # when it was last called, by the count of calls of its ``Jit``
        self.signatures: list[Any] = []
        self.donated_leaves = self._find_donated(graph, arguments)
        self.leaf_shardings: list[Any] = [None] * len(self.leaf_paths)
        # (label, prefix, template) of each positional argument, if shardings are declared.
        self._declared: list[tuple[str, Any, Any]] = []
        self._in_shardings = self._spread_in_shardings(graph, arguments)
        self._expected: Any = None
        self._program = self._named_program()
        self._jitted: Any = None
        self._full = bool(arguments.named or self.donated or self._in_shardings is not None)

    def partition(self, leaves: Sequence[Leaf]) -> tuple[list[PyTree], list[PyTree]]:
        """Separates kept Variables (or values) from donated ones."""
        donated = self.donated_leaves
        if not donated:
            return list(leaves), []
        undonated = [leaf for i, leaf in enumerate(leaves) if i not in donated]
        return undonated, [leaf for i, leaf in enumerate(leaves) if i in donated]

    def run(
        self,
        undonated: list[Leaf],
        donated: list[Leaf],
        plain: list[Leaf],
        named: Mapping[str, PyTree] = MappingProxyType({}),
    ) -> PyTree:
        """Calls the compiled function in a steady call."""
        if self._full:
            return self._jitted(undonated, donated, *self._separate_plain(plain, named))
        return self._jitted(undonated, donated, plain)

    def place(self, variables: Mapping[int, Any]) -> None:
        """Moves Variables, by position, to their declared shardings, where they stay."""
        entries = [self.leaf_shardings[position] for position in variables]
        if self.wanted:
            entries = [
                self.wanted.get(position) if entry is None and self._is_off(position, v) else entry
                for (position, v), entry in zip(variables.items(), entries, strict=True)
            ]
        if self.wanted or self._in_shardings is not None:
            prefixes.place_variables([*variables.values()], entries)

    def _is_off(self, position: int, variable) -> bool:
        """Whether a Variable is not on the mesh that splits it."""
        mesh = getattr(self.wanted.get(position), "mesh", None)
        leaves = jax.tree.leaves(variable._value)
        return any(
            getattr(getattr(leaf, "sharding", None), "mesh", None) != mesh for leaf in leaves
        )

    def call(
        self, values: Sequence[Leaf], arguments: inputs.SplitArguments
    ) -> binding.LiftedOutputs:
        """Calls the compiled function with values and arguments taken apart."""
        full = self.pack(values, arguments)
        return binding.LiftedOutputs(*self.jitted(full)(*full))

    @property
    def donates(self) -> bool:
        """Whether the program may use up arrays that it is given."""
        return bool(self.donated_leaves or self.donated or self.options.donate_argnames)

    def compile(self, values: Sequence[Leaf], arguments: inputs.SplitArguments) -> None:
        """Compiles for a call without running it."""
        full = self.pack(values, arguments)
        self.jitted(full).lower(*full).compile()

    def pack(self, values: Sequence[Leaf], arguments: inputs.SplitArguments) -> tuple[Leaf, ...]:
        """Arranges values and plain arguments as the pure function takes them."""
        undonated, donated = self.partition(values)
        if not self._full:
            return undonated, donated, list(arguments.plain)
        return (
            undonated,
            donated,
            *self._separate_plain(list(arguments.plain), arguments.plain_named),
        )

    def _separate_plain(self, plain: list[object], named: Mapping[str, object]) -> tuple[Leaf, ...]:
        kept_named = {name: v for name, v in named.items() if not self.options.donates_name(name)}
        donated_named = {name: v for name, v in named.items() if self.options.donates_name(name)}
        return *self._split_donated(plain), kept_named, donated_named

    def _split_donated(self, plain: Sequence[object]) -> tuple[list[Leaf], list[Leaf]]:
        undonated = [None if i in self.donated else item for i, item in enumerate(plain)]
        return undonated, [item if i in self.donated else None for i, item in enumerate(plain)]

    def jitted(self, full: tuple[Any, ...]) -> Any:
        """Returns the ``jax.jit`` of the pure function, making it on first use."""
        if self._jitted is None:
            if self._in_shardings is None and self.options.out_shardings is None:
                self._jitted = self._make(None)
            else:
                effects = self._make(None).trace(*full).out_info[3]
                self._expected = effects.tree_key
                result, written, fresh = effects.shardings
                self._jitted = self._make((result, written, fresh, None))
        return self._jitted

    def _make(self, out_shardings):
        options = self.options
        options_given: dict[str, Any] = {
            "in_shardings": self._in_shardings,
            "out_shardings": out_shardings,
            "compiler_options": options.compiler_options,
        }
        if self.donates:
            options_given["donate_argnums"] = (1, 3, 5) if self._full else (1,)
        options_given = {name: value for name, value in options_given.items() if value is not None}
        return jax.jit(
            self._program, keep_unused=options.keep_unused, inline=options.inline, **options_given
        )

    def _named_program(self) -> Callable[..., Any]:
        """Returns the pure function under the user's name and source line."""
        # Profiles and JAX's errors show them. JAX follows ``__wrapped__`` for the line, but must
        # not take the user's parameters for those of the pure function.

        def program(*flat) -> tuple[Any, ...]:
            return self._pure(*flat)

        named: PyTree = self.function
        while isinstance(named, functools.partial):
            named = named.func
        program.__name__ = getattr(named, "__name__", type(named).__name__)
        if isinstance(named, Object):
            named = type(named).__call__
        program.__dict__["__signature__"] = inspect.signature(program)
        program.__dict__["__wrapped__"] = named
        return program

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        if self._jitted is not None:
            self._jitted.clear_cache()

    def _pure(
        self,
        undonated: list[Leaf],
        donated: list[Leaf],
        plain: list[Leaf],
        donated_plain: Sequence[Leaf] = (),
        named=None,
        donated_named=None,
    ) -> tuple[PyTree, ...]:
        settles, graph = local.call.settles, local.call.graph()
        values = self.join(undonated, donated)
        for position in self.donated:
            plain[position] = donated_plain[position]
        named = {**(named or {}), **(donated_named or {})}
        signature = jax.tree.map(jax.typeof, (values, plain, named))
        if self.signatures and retraces.listeners.get():
            retraces.report_trace(self, self.signatures, signature)
        self.signatures.append(signature)
        with self.tracing(self.function), engine.CompiledFrame("jit") as frame:
            roots, copies = binding.bind(
                frame, self.graphdef, values, graph.objects(), graph.leaves
            )
            result = self._call_user(roots, plain, named)
            frame.take_in()
            binding.check_result(result, "jit", binding.TEXTS)
            outputs = binding.record_effects(
                frame, self.graphdef, copies, values, result, self._emitted(result, copies)
            )
            lost = [*(item.outer for item in frame.captured), *outputs.effects.foreign.values()]
            if lost:
                raise engine.RetraceRequest(lost)
            if settles and not self._settled and frame.parent is None:
                self._find_placement(frame, copies, graph.leaves, outputs.effects.written)
            self._declare_shardings(outputs, copies, result, plain, roots[1:])
        return tuple(outputs)

    def _find_placement(
        self,
        frame: engine.CompiledFrame,
        copies: Sequence[object],
        leaves: Sequence[object],
        written: Sequence[int],
    ) -> None:
        """Finds where Variables that are only read are to be moved."""
        self.wanted = {
            position: frame.wanted[id(copies[index])]
            for position, index in enumerate(self.graphdef.leaves)
            if id(copies[index]) in frame.wanted
            and position not in written
            and self.leaf_shardings[position] is None
        }
        self._settled = True
        if any(self._is_off(position, leaves[position]) for position in self.wanted):
            raise engine.RetraceRequest  # they are moved there first

    def join(self, undonated: Iterable[Leaf], donated: Iterable[Leaf]) -> list[PyTree]:
        """The inverse of ``partition``."""
        remaining, donated_values = iter(undonated), iter(donated)
        return [
            next(donated_values if i in self.donated_leaves else remaining)
            for i in range(len(self.graphdef.leaves))
        ]

    def _call_user(self, roots: Sequence[PyTree], plain: Sequence[Leaf], named: dict[str, PyTree]):
        function, objects = roots[0], roots[1 : 1 + self.root_count]
        args, kwargs = inputs.join_arguments(self, plain, named, objects)
        args, kwargs = self.positions.insert_static(args, kwargs)
        try:
            return function(*args, **kwargs)
        except TRACER_ERRORS as error:
            add_advice(error)
            raise

    def _find_donated(
        self, graph: binding.InputGraph, arguments: inputs.SplitArguments
    ) -> frozenset[int]:
        positional = zip(self.positions.positional, self.templates, strict=True)
        donated = [t for (at, label), t in positional if self.options.donates(at, label)]
        donated += [t for name, t in self.named if self.options.donates_name(name)]
        roots = [root for template in donated for root, _ in inputs.root_places("", template)]
        ids = {
            id(v) for root in roots for v in binding.InputGraph([arguments.roots[root]]).flat.leaves
        }
        return frozenset(i for i, leaf in enumerate(graph.flat.leaves) if id(leaf) in ids)

    def _emitted(self, result: object, copies: Sequence[object]) -> frozenset[int]:
        """Positions of Variables to return even if unchanged."""
        # They are the donated ones, and those in the result when its shardings are declared.
        if self.options.out_shardings is None:
            return self.donated_leaves
        returned_ids = {
            id(v)
            for leaf in jax.tree.leaves(result, is_leaf=is_object)
            if isinstance(leaf, Object)
            for v in binding.InputGraph([leaf]).flat.leaves
        }
        returned = (
            i for i, index in enumerate(self.graphdef.leaves) if id(copies[index]) in returned_ids
        )
        return self.donated_leaves | frozenset(returned)

    def _spread_in_shardings(self, graph: binding.InputGraph, arguments: inputs.SplitArguments):
        if self.options.in_shardings is None:
            return None
        declared, labels = self.options.in_shardings, self.positions.labels
        static = [place for place, _ in self.positions.static if isinstance(place, int)]
        if not prefixes.is_one_entry(declared) and len(declared) == len(labels) + len(static):
            declared = [entry for place, entry in enumerate(declared) if place not in static]
        argument_prefixes = prefixes.per_argument(declared, labels, "in_shardings")
        args = [
            inputs.join_argument(t, p, arguments.roots, with_static=False)
            for t, p in zip(self.templates, arguments.plain, strict=True)
        ]
        entries: list[Any] = []
        plain: list[Leaf] = []
        for label, prefix, arg, template in zip(
            labels, argument_prefixes, args, self.templates, strict=True
        ):
            if isinstance(template, inputs.PlainTemplate):
                prefixes.check_plain(prefix, arg, "in_shardings", (label,))
                plain.append(prefix)
                continue
            prefix_entries = list(prefixes.expand(prefix, arg, "in_shardings", (label,)))
            entries.extend(prefix_entries)
            plain_entries = [
                entry for _, leaf, entry in prefix_entries if not isinstance(leaf, Variable)
            ]
            plain.append(plain_entries if isinstance(template, inputs.TreeTemplate) else None)
        by_id = prefixes.consistent(entries, "in_shardings")
        self._declared = [*zip(labels, argument_prefixes, self.templates, strict=True)]
        self.leaf_shardings = [by_id.get(id(leaf), ((), None))[1] for leaf in graph.flat.leaves]
        undonated, donated = self.partition(self.leaf_shardings)
        return undonated, donated, *self._split_donated(plain), None, None

    def _declare_shardings(
        self,
        outputs: binding.LiftedOutputs,
        copies: Sequence[object],
        result: object,
        plain: Sequence[object],
        objects: Sequence[object],
    ) -> None:
        """Works out the sharding of everything that leaves, when shardings are declared."""
        effects = outputs.effects
        if self._in_shardings is None and self.options.out_shardings is None:
            return
        if self._expected is not None and self._expected != effects.tree_key:
            raise engine.RetraceRequest(drops_program=True)
        declared = self.options.out_shardings
        prefix_entries_by_id = {id(copies[index]): None for index in self.graphdef.leaves}
        by_id: dict[int, Any] = {  # new Variables have the entry of the place that they took
            id(leaf): entry
            for (label, prefix, template), part in zip(self._declared, plain, strict=False)
            if not isinstance(template, inputs.PlainTemplate)
            for _, leaf, entry in prefixes.expand(
                prefix,
                inputs.join_argument(template, part, objects, with_static=False),
                "in_shardings",
                (label,),
                prefix_entries_by_id,
                lenient=True,
            )
            if id(leaf) not in prefix_entries_by_id
        }
        arrays: Leaf = declared
        if effects.result is None:
            prefixes.check_plain(declared, result, "out_shardings")
        else:
            result_entries = list(prefixes.expand(declared, result, "out_shardings"))
            of_result = prefixes.consistent(result_entries, "out_shardings")
            by_id |= {key: entry for key, (_, entry) in of_result.items() if entry is not None}
            arrays = [entry for _, leaf, entry in result_entries if not isinstance(leaf, Variable)]
        written = []
        for position in effects.written:
            entry = by_id.get(id(copies[self.graphdef.leaves[position]]))
            written.append(self.leaf_shardings[position] if entry is None else entry)
        fresh = [by_id.get(key) for key in effects.fresh_ids]
        effects.shardings = (arrays, written, fresh)
