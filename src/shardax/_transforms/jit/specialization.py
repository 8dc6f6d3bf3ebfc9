# SPDX-License-Identifier: Apache-2.0
"""The compiled program of one structure of arguments.

A ``Specialization`` has one ``jax.jit`` of the *pure function*, whose arguments are flat lists:
values of the Variables that are kept, of those that are donated, and plain arguments likewise. It
returns ``LiftedOutputs``. This ``jax.jit`` traces the user's function. What runs is a program that
other functions with an equal jaxpr share (``jit.programs``), found by the shapes of the plain
arguments. Where a program cannot be shared, and where two signatures have the same shapes, the
``jax.jit`` of the pure function itself runs, and JAX tells the signatures apart.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from shardax._core.errors import DonationError
from shardax._core.frames import a_kind_of, is_eager, is_ref, local
from shardax._core.functions import NamedFunction
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import exact_key
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms.errors import (
    DeclaredSpec,
    StaticArgumentError,
    TransformError,
    changed_capture,
    describe_variable,
)
from shardax._transforms.jit import retraces
from shardax._transforms.jit.programs import (
    OtherSignature,
    SharedProgram,
    constants_of,
    forget_program,
    shared_program,
)
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding, engine
from shardax._transforms.lift import prefix as prefixes
from shardax._transforms.lift.captures import Functions, StandIns
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


class _SharedCall:
    """A shared program with what one trace adds to it: constants and effects."""

    __slots__ = ("call", "constants", "program")

    def __init__(
        self, program: SharedProgram, constants: list[jax.Array], effects: binding.Effects
    ) -> None:
        self.program = program
        self.constants = constants
        run = program.call

        # A function, since calling an instance takes longer.
        def call(*inputs: PyTree) -> tuple[Any, ...]:
            result, written, fresh = run(*inputs, constants)
            return result, written, fresh, effects

        self.call = call

    def compile(self, inputs: Sequence[PyTree]) -> None:
        """Compiles for inputs without running."""
        self.program.call.lower(*inputs, self.constants).compile()


class _OwnCall:
    """The ``jax.jit`` of a specialization's own function."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call

    def compile(self, inputs: Sequence[PyTree]) -> None:
        """Compiles for inputs without running."""
        self.call.lower(*inputs).compile()


def _plain_of(full: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns the plain arguments among the inputs, which are after two lists of Variables."""
    return full[2:]


def _shapes_of(inputs: PyTree) -> Hashable:
    """Returns the structure of inputs and the shapes of their arrays."""
    arrays, treedef = jax.tree.flatten(inputs)
    return treedef, tuple([getattr(array, "shape", ()) for array in arrays])


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
        uncertain_places: Container[Hashable] = (),
    ) -> None:
        self.uncertain_places = uncertain_places
        self.function = function
        self.options = options
        self.key = key
        # The same without what a trace met in no certain way.
        self.base_key = key
        # What the last trace met in no certain way (``lift.captures``), for a message.
        self.met: list[str] = []
        # What an earlier trace met so, which is among the inputs.
        self.met_objects: Sequence[Object] = ()
        # Those of them whose values an earlier trace for the same call read or wrote.
        self.asked_for: Sequence[Object] = ()
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
        self.specs = self._find_specs()
        self.mesh_of_specs()  # refuses specs before anything is traced or moved
        self._expected: Any = None
        self._program = self._named_program()
        self._tracer: Any = None
        self._own: Any = None
        # What runs, by the shapes of the plain arguments: ``_program`` compiled, or an equal one.
        self._programs: dict[Hashable, _SharedCall | _OwnCall] = {}
        # The ``call`` of the only one of these, so that most steady calls look for no shapes.
        self._only_call: Callable[..., Any] | None = None
        # Whether plain arguments are passed in groups: kept and donated, by position and by name.
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
        """Calls the compiled function for objects of an earlier call: the fast way."""
        inputs = (plain,) if not self._full else self._separate_plain(plain, named)
        call = self._only_call
        if call is None:
            program = self._programs.get(_shapes_of(inputs))
            if program is None:
                raise engine.RetraceRequest
            call = program.call
        try:
            return call(undonated, donated, *inputs)
        except OtherSignature:
            raise engine.RetraceRequest from None

    def mesh_of_specs(self) -> Mesh | None:
        """Returns the mesh in scope that declared specs mean, None without specs."""
        return prefixes.require_mesh_in_scope(self.specs) if self.specs else None

    def place(self, variables: Mapping[int, Any], mesh: Mesh | None = None) -> None:
        """Moves Variables, by position, to their declared shardings, where they stay."""
        # Declared specs mean the mesh in scope, unless one is given.
        entries = [self.leaf_shardings[position] for position in variables]
        if self.wanted:
            entries = [
                self.wanted.get(position) if entry is None and self._is_off(position, v) else entry
                for (position, v), entry in zip(variables.items(), entries, strict=True)
            ]
        if self.wanted or self._in_shardings is not None:
            prefixes.place_variables([*variables.values()], entries, mesh)

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
        try:
            # One that is shared raises ``OtherSignature`` for what it was not traced for.
            outputs = (self._known_program(full) or self._find_program(full)).call(*full)
        except OtherSignature:
            try:
                outputs = self._find_program(full).call(*full)
            except OtherSignature:
                # The settings of JAX are such that no trace is kept (``jax_check_tracer_leaks``).
                outputs = self.own(full)(*full)
        return binding.LiftedOutputs(*outputs)

    @property
    def donates(self) -> bool:
        """Whether the program may use up arrays that it is given."""
        return bool(self.donated_leaves or self.donated or self.options.donate_argnames)

    def compile(self, values: Sequence[Leaf], arguments: inputs.SplitArguments) -> None:
        """Compiles for a call without running it."""
        full = self.pack(values, arguments)
        try:
            self._find_program(full).compile(full)
        except OtherSignature:  # see ``call``
            _OwnCall(self.own(full)).compile(full)

    def _known_program(self, full: tuple[PyTree, ...]) -> _SharedCall | _OwnCall | None:
        """Returns the program of an earlier call with inputs of these shapes."""
        if local.frame is not None or not is_eager():
            return None
        return self._programs.get(_shapes_of(_plain_of(full)))

    def _find_program(self, full: tuple[PyTree, ...]) -> _SharedCall | _OwnCall:
        """Returns the program for inputs, tracing and sharing it where that is right."""
        # Within other traces a program is part of theirs, and may be differentiated.
        if local.frame is not None or not is_eager():
            return _OwnCall(self.own(full))

        program = self._trace_and_share(full)
        shapes = _shapes_of(_plain_of(full))
        known = self._programs.get(shapes)
        is_other = (
            isinstance(known, _SharedCall)
            and isinstance(program, _SharedCall)
            and known.program is not program.program
        )
        if is_other or isinstance(known, _OwnCall):
            # The shapes do not tell dtypes, Variables of other types and settings of JAX apart. The
            # function's own ``jax.jit`` does, from now on.
            program = _OwnCall(self.own(full))
        elif isinstance(program, _SharedCall) and isinstance(self.function, Functions):
            # JAX keeps a trace as long as the function that was traced. The jaxpr of a transform
            # may refer to what keeps its program (a ``custom_vjp``): neither would be freed.
            self.tracer().clear_cache()
        self._programs[shapes] = program
        self._only_call = program.call if len(self._programs) == 1 else None
        return program

    def _trace_and_share(self, full: tuple[PyTree, ...]) -> _SharedCall | _OwnCall:
        """Traces for inputs; returns the program that is shared, or else the function's own."""
        if any(map(is_ref, jax.tree.leaves(full))):  # whose effects belong to one trace
            return _OwnCall(self.own(full))

        local.call.is_sharing = True
        try:
            traced = self.tracer().trace(*full)
        finally:
            local.call.is_sharing = False
        if local.call.request is not None:
            raise local.call.request
        outputs = traced.out_info
        effects = outputs[3]
        out_tree = jax.tree.structure(outputs[:3])
        options = self._options(effects.shardings if self._declares else None, outputs)
        if any(map(is_ref, traced.jaxpr.consts)):
            return _OwnCall(self.own(full))
        program = shared_program(
            traced.jaxpr,
            self._program.__name__,
            jax.tree.structure(tuple(full)),
            out_tree,
            options,
            _key_of_options(options),
        )
        constants = constants_of(traced.jaxpr, full)
        if program is None or constants is None:
            return _OwnCall(self.own(full))
        return _SharedCall(program, constants, effects)

    def _options(
        self, shardings: tuple[PyTree, ...] | None, outputs: tuple[PyTree, ...]
    ) -> dict[str, Any]:
        """Returns the options of a shared program, whose last input are the constants."""
        options = self._common_options()
        if self._in_shardings is not None:
            options["in_shardings"] = (*self._in_shardings, None)
        if shardings is not None:
            pairs = zip(shardings, outputs[:3], strict=True)
            options["out_shardings"] = tuple(_spread(*pair) for pair in pairs)
        return options

    @property
    def _declares(self) -> bool:
        """Whether shardings are declared."""
        return self._in_shardings is not None or self.options.out_shardings is not None

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

    def tracer(self) -> Any:
        """Returns the ``jax.jit`` of the pure function that traces it, for any result."""
        if self._tracer is None:
            options = self._common_options()
            if self._in_shardings is not None:
                options["in_shardings"] = self._in_shardings
            self._tracer = jax.jit(self._program, **options)
        return self._tracer

    def own(self, full: tuple[Any, ...]) -> Any:
        """Returns the ``jax.jit`` of the pure function that runs it."""
        if self._own is None:
            self._own = self.tracer()
            if self._declares:
                effects = self._own.trace(*full).out_info[3]
                self._expected = effects.tree_key
                options = self._common_options()
                if self._in_shardings is not None:
                    options["in_shardings"] = self._in_shardings
                options["out_shardings"] = (*effects.shardings, None)
                self._own = jax.jit(self._program, **options)
        return self._own

    def _common_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "keep_unused": self.options.keep_unused,
            "inline": self.options.inline,
        }
        if self.options.compiler_options is not None:
            options["compiler_options"] = self.options.compiler_options
        if self.donates:
            options["donate_argnums"] = (1, 3, 5) if self._full else (1,)
        return options

    def _named_program(self) -> NamedFunction[..., tuple[Any, ...]]:
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
        for program in self._programs.values():
            if isinstance(program, _SharedCall):
                forget_program(program.program)
        self._programs, self._only_call = {}, None
        for jitted in (self._tracer, self._own):
            if jitted is not None:
                jitted.clear_cache()

    def _pure(
        self,
        undonated: list[Leaf],
        donated: list[Leaf],
        plain: list[Leaf],
        donated_plain: Sequence[Leaf] = (),
        named=None,
        donated_named=None,
    ) -> tuple[PyTree, ...]:
        settles, graph = local.call.settles, local.call.input_graph or local.call.graph()
        values = self.join(undonated, donated)
        for position in self.donated:
            plain[position] = donated_plain[position]
        named = {**(named or {}), **(donated_named or {})}
        signature = jax.tree.map(jax.typeof, (values, plain, named))
        if self.signatures and retraces.listeners.get():
            retraces.report_trace(self, self.signatures, signature)
        self.signatures.append(signature)
        with engine.CompiledFrame("jit") as frame:
            originals = graph.objects()
            roots, copies = binding.bind(frame, self.graphdef, values, originals, graph.leaves)
            result = self._call_user(originals, copies, roots, plain, named)
            frame.take_in()
            self.met = [_described(item, copies, self) for item in frame.met]
            self._check_met_again(frame, originals, copies)
            binding.check_result(result, "jit", binding.TEXTS)
            outputs = binding.record_effects(
                frame, self.graphdef, copies, values, result, self._emitted(result, copies)
            )
            captured = [item.outer for item in frame.captured]
            lost = [*captured, *outputs.effects.foreign.values()]
            if lost:
                # An exception that passes through a trace of JAX 0.10 to 0.12 leaves its constants
                # in memory for good. So a trace that nothing is compiled of ends well, and
                # ``_trace_and_share`` raises after it.
                local.call.request = engine.RetraceRequest(lost, read=captured)
                if not local.call.is_sharing:
                    raise local.call.request
            if settles and not self._settled and frame.parent is None:
                self._find_placement(frame, copies, graph.leaves, outputs.effects.written)
            self._declare_shardings(outputs, copies, result, plain, roots)
        return tuple(outputs)

    def _check_met_again(
        self, frame: engine.CompiledFrame, originals: Sequence[Object], copies: Sequence[Object]
    ) -> None:
        """Checks that a second trace for one call does what the first one did."""
        by_copy = {id(copy): original for original, copy in zip(originals, copies, strict=True)}
        met = {id(by_copy.get(id(item), item)) for item in frame.met}
        for item in self.asked_for:
            if id(item) not in met:
                raise changed_capture(self.function, item)

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

    def _call_user(
        self,
        originals: Sequence[Object],
        copies: Sequence[Object],
        roots: Sequence[PyTree],
        plain: Sequence[Leaf],
        named: dict[str, PyTree],
    ):
        args, kwargs = inputs.join_arguments(self, plain, named, roots[: self.root_count])
        args, kwargs = self.positions.insert_static(args, kwargs)
        pairs = zip(originals, copies, strict=True)
        stand_ins = StandIns(pairs, self.uncertain_places)
        try:
            result = stand_ins.function(self.function)(*args, **kwargs)
        except engine.RetraceRequest:
            stand_ins.bound_anew()  # for what it undoes
            raise
        except Exception as error:
            # What the function stored before it raised is seen by the user, as in plain Python.
            self._check_bound_anew(stand_ins)
            if isinstance(error, TRACER_ERRORS):
                add_advice(error)
            raise
        self._check_bound_anew(stand_ins)
        return result

    def _check_bound_anew(self, stand_ins: StandIns) -> None:
        """Asks for another trace where the function bound the name of a place anew."""
        bound_anew = stand_ins.bound_anew()
        if bound_anew:
            raise engine.RetraceRequest(uncertain=bound_anew)

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

    def _find_specs(self) -> list[DeclaredSpec]:
        """Returns the specs among the declared shardings."""
        specs: list[DeclaredSpec] = []
        if self._in_shardings is None and self.options.out_shardings is None:
            return specs

        for label, prefix, _ in self._declared:
            specs += prefixes.specs_in(prefix, "in_shardings", (label,))
        specs += prefixes.specs_in(self.options.out_shardings, "out_shardings")
        return specs

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


def _described(item: Any, copies: Sequence[object], program: Specialization) -> str:
    """Returns what a message calls a Variable that was met in no certain way."""
    index = {id(copies[position]): i for i, position in enumerate(program.graphdef.leaves)}
    position = index.get(id(item))
    path = () if position is None else program.leaf_paths[position]
    if not path or path[0] == engine.UNNAMED:
        return describe_variable(item)
    return f"{a_kind_of(item)} at {format_path(path)}"


def _spread(prefix: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree with the sharding of each array, by a prefix of it."""
    entries, treedef = jax.tree.flatten(prefix, is_leaf=lambda entry: entry is None)
    subtrees = treedef.flatten_up_to(tree)
    shardings = [
        entry
        for entry, subtree in zip(entries, subtrees, strict=True)
        for _ in jax.tree.leaves(subtree)
    ]
    return jax.tree.structure(tree).unflatten(shardings)


def _key_of_options(options: Mapping[str, Any]) -> Hashable:
    """Returns what options of ``jax.jit`` compare by."""
    leaves, treedef = jax.tree.flatten(dict(options), is_leaf=lambda entry: entry is None)
    return (treedef, *((type(leaf), leaf) for leaf in leaves))
