# SPDX-License-Identifier: Apache-2.0
"""Experts over a mesh axis: tokens are sent to them by all-to-all.

Each device holds some of the experts and routes some of the tokens. A *row* is a token for one of
its experts. Devices tell each other how many rows they have for each expert, send the rows to the
devices of their experts by all-to-all, and send the results back (D. Lepikhin and others, "GShard",
arXiv:2006.16668; without a limit per expert: T. Gale and others, "MegaBlocks", arXiv:2211.15841).

On TPU and GPU the exchange is ``jax.lax.ragged_all_to_all``, which sends the rows that there are.
Its buffer has room for the most rows that can come: of n devices with t tokens each, top-k routing
and e experts a device, ``n * t * min(k, e)`` rows; under a capacity no more than the places of
those e experts. XLA for CPU has no ragged exchange: there each device sends every other
``t * min(k, e)`` rows, or as many as places, and pads with zeros.

Where only tokens are split, each device sorts its own, and has all experts. The compiler would
gather the tokens of all devices to sort them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._parallel.manual_axes import axis_types, mark_varying, mesh_of_region, sum_over
from shardax.extend import AnyMesh, PyTree, explicit_entries, mesh_axes_of, varying_axes
from shardax.partition import current_rules, resolve_mesh

Axes = tuple[str, ...]


class Split(NamedTuple):
    """The mesh axes of experts, tokens and hidden layers."""

    mesh: AnyMesh
    experts: Axes
    hidden: Axes
    tokens: tuple[Axes, ...]  # of each dimension of the tokens, inside of the region
    outside: tuple[Axes, ...]  # likewise, around it

    @property
    def axes(self) -> Axes:
        """All axes of tokens inside of the region."""
        return tuple(axis for axes in self.tokens for axis in axes)

    def size(self, axes: Axes) -> int:
        """Returns the number of devices along axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def enter(self, x: jax.Array) -> jax.Array:
        """Cuts the input to the region's parts, without moving anything."""
        added = [a for a in self.axes if all(a not in axes for axes in self.outside)]
        if not added:
            return x

        entries = explicit_entries(x)
        types = axis_types(self.mesh)
        if all(types[axis] is AxisType.Explicit for axis in added):
            features = (entries or (None,))[-1]
            tokens = [
                tuple(axis for axis in axes if types[axis] is AxisType.Explicit)
                for axes in self.tokens
            ]
            return jax.sharding.reshard(x, _spec(*tokens, features))
        return x if entries else self._constrained(x, self.tokens)

    def run(
        self,
        compute: Callable[..., PyTree],
        x: Any,
        logits: Any,
        counted: Any,
        *kernels: Any,
        is_typed: bool = True,
    ) -> PyTree:
        """Runs the region; returns the result and the loss."""
        tokens, experts, hidden = _spec(*self.tokens), self.experts, self.hidden

        # Of a kernel, its biases and both parts of its low-rank term.
        whole = _spec(experts, (), hidden)
        wide = (whole, _spec(experts, hidden), _spec(experts), whole)
        narrow = (_spec(experts, hidden), _spec(experts), _spec(experts, hidden), _spec(experts))
        kernel_specs = [
            type(kernel)(
                *(None if x is None else spec for x, spec in zip(kernel, specs, strict=True))
            )
            for kernel, specs in zip(kernels, (wide, wide, narrow), strict=True)
        ]

        def entered(x: object, logits: object, counted: object, *kernels: object):
            # Their gradients are summed over the tokens of all devices, as ``mark_varying`` says.
            return compute(x, logits, counted, *_varying(kernels, frozenset(self.axes)))

        # Pallas's kernels do not say along which axes their results vary: then it is not typed.
        is_typed = is_typed and AxisType.Manual not in self.mesh.axis_types
        make: Any = jax.shard_map if is_typed else _nested
        region = make(
            entered if is_typed else compute,
            mesh=mesh_of_region(self.mesh),
            in_specs=(tokens, tokens, tokens if counted.ndim else _spec(), *kernel_specs),
            out_specs=(tokens, _spec()),
            axis_names={*self.axes, *hidden},
        )
        y, loss = region(x, logits, counted, *kernels)
        return (y if self.tokens == self.outside else self._constrained(y, self.outside)), loss

    def _constrained(self, x: jax.Array, layout: tuple[Axes, ...]) -> jax.Array:
        """Lays out the dimension of tokens cut by the region."""
        pairs = zip(self.tokens, self.outside, layout, strict=True)
        free = PartitionSpec.UNCONSTRAINED
        spec: Any = _spec(*(free if a == b else axes for a, b, axes in pairs), free)

        mesh = mesh_of_region(self.mesh)
        if mesh is not None:
            spec = NamedSharding(mesh, spec)
        return jax.lax.with_sharding_constraint(x, spec)


def _spec(*entries: object) -> PartitionSpec:
    return PartitionSpec(*(None if entry == () else entry for entry in entries))


def find_split(x: jax.Array, kernel: jax.Array, names: Sequence[object] | None) -> Split | None:
    """Returns the split of tokens and experts; None: the compiler's."""
    mesh = resolve_mesh()
    if mesh is None or x.ndim < 2 or not x.size:
        return None
    types, sizes = axis_types(mesh), mesh.shape

    def axes_of(array: jax.Array, names: Sequence[object]) -> tuple[Axes, ...]:
        """Mesh axes that split each dimension: by the type of the array, else by rules."""
        entries: Sequence[Any] | None = explicit_entries(array)
        wanted = AxisType.Explicit
        if entries is None:
            entries, wanted = current_rules().assign(names).entries, AxisType.Auto
        return tuple(
            tuple(a for a in mesh_axes_of(e) if types.get(a) is wanted and sizes[a] > 1)
            for e in entries
        )

    if names is None or len(names) != kernel.ndim:
        names = (None,) * kernel.ndim
    experts, _, hidden = axes_of(kernel, names)

    named = ("batch", "seq")[: x.ndim - 1]
    outside = axes_of(x, (*named, *(None,) * (x.ndim - len(named))))[:-1]
    split = Split(mesh, experts, (), outside, outside)
    if not split.axes and not experts:
        return None

    # Nothing is padded: experts and tokens are divided evenly, or the compiler splits them.
    shares = list(zip(x.shape[:-1], map(split.size, outside), strict=True))
    if len(kernel) % split.size(experts) or any(size % count for size, count in shares):
        return None

    unused = tuple(axis for axis in experts if axis not in split.axes)
    if unused:
        # Tokens that all devices of the experts have alike are cut over them.
        rows = [size // count for size, count in shares]
        cuts = (i for i, size in enumerate(rows) if size % split.size(unused) == 0)
        dimension = next(cuts, None)
        if dimension is None:
            return None
        cut = (*outside[dimension], *unused)
        split = split._replace(tokens=(*outside[:dimension], cut, *outside[dimension + 1 :]))

    # Along axes of the hidden layer sums stay partial until they are those of tokens again.
    hidden = tuple(axis for axis in hidden if axis not in split.axes)
    is_divided = kernel.shape[2] % split.size(hidden) == 0
    return split._replace(hidden=hidden) if is_divided else split


def find_places(
    experts: jax.Array, count: int, shape: Sequence[int] = (), split: Split | None = None
) -> jax.Array:
    """Returns the place of each choice with its expert, (tokens, top_k).

    First choices come first, then tokens in order, also if a device has only some of them.

    Args:
        experts: The choices, (tokens, top_k).
        count: The number of experts.
        shape: That of the tokens of this device.
        split: How tokens are split over devices, if they are.
    """
    # From the last dimension on that is split, the tokens of a device follow each other.
    axes = () if split is None else split.tokens
    last = max((dimension for dimension, split_by in enumerate(axes) if split_by), default=0)
    choices = experts.shape[1]
    chosen = jax.nn.one_hot(experts.T, count, dtype=jnp.int32)
    chosen = chosen.reshape(choices, *shape[:last], -1, count)
    within = jnp.cumsum(chosen, axis=-2)

    # How many rows of each expert all devices have before these ones.
    run = within[..., -1:, :]
    whole = run
    dimensions = [(number + 1, split_by) for number, split_by in enumerate(axes[: last + 1])]
    dimensions = [(dimension, split_by) for dimension, split_by in dimensions if split_by]
    for dimension, split_by in dimensions:
        whole = jax.lax.all_gather(whole, split_by, axis=dimension, tiled=True)
    flat = whole.reshape(-1, count)
    earlier = (jnp.cumsum(flat, axis=0) - flat).reshape(whole.shape)
    for dimension, split_by in dimensions:
        size = run.shape[dimension]
        start = jax.lax.axis_index(split_by) * size
        earlier = jax.lax.dynamic_slice_in_dim(earlier, start, size, dimension)

    places = ((within + earlier - 1) * chosen).sum(axis=-1)
    return places.reshape(choices, -1).T


def by_expert(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    count: int,
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    split: Split,
    places: int | None = None,
    *,
    on_inputs: bool = False,
) -> jax.Array:
    """Sums the weighted results of each token's experts, wherever these are.

    Args:
        x: The tokens, (tokens, features).
        weights: Of each choice, (tokens, top_k).
        experts: The choices; the expert ``count`` is none.
        count: The number of experts.
        compute: Called with rows sorted by the experts of the device, and how many each has.
        split: How tokens and experts are split.
        places: The most rows of an expert, if there is a limit.
        on_inputs: Whether weights are those of the inputs of experts, and not of their results.
    """
    (tokens, choices), devices = experts.shape, split.size(split.experts)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    numbers = jax.lax.iota(jnp.int32, flat.size)
    inverse = jnp.zeros_like(order, jnp.int32).at[order].set(numbers, unique_indices=True)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)

    # Gradients are summed over the hidden layer's axes where they are those of tokens.
    x, weights = _varying((x, weights), frozenset(split.hidden))
    rows: Any = _spread(choices, x, order, inverse)
    if on_inputs:
        rows = rows * weights.reshape(-1)[order][:, None]
        weights = jnp.ones_like(weights)

    if devices == 1:
        y = compute(rows, sizes)
    else:
        exchange = _Exchange.of(split.experts, devices, count // devices, (tokens, choices), places)
        table = jax.lax.all_gather(sizes, split.experts).reshape(devices, count)
        rows = _to_experts(exchange, table, rows)
        y = _from_experts(exchange, table, compute(rows, exchange.parts(table)[0].sum(axis=0)))

    y = _sorted_back(y, order, inverse)
    y = (y.reshape(tokens, choices, -1) * weights[..., None]).sum(axis=1)
    return sum_over(y, split.hidden) if split.hidden else y


# The cotangents of a permutation are gathered too: a sum by index is slower on all platforms.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(choices: int, x, order, inverse):
    """Returns a row for each choice of a token, in order."""
    return x[order // choices]


def _spread_forward(choices: int, x, order, inverse):
    return x[order // choices], inverse


def _spread_backward(choices: int, inverse, cotangents):
    rows = cotangents[inverse]
    return rows.reshape(-1, choices, *rows.shape[1:]).sum(axis=1), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _sorted_back(rows, order: object, inverse):
    """Undoes the order of rows."""
    return rows[inverse]


_sorted_back.defvjp(
    lambda rows, order, inverse: (rows[inverse], order),
    lambda order, cotangents: (cotangents[order], None, None),
)


# --- Regions inside of regions ---

# JAX 0.10 lays what such a region keeps for its gradient over the axes of the outer one too, and
# cannot lower that. So what is kept is handed over here, as results. Inside, values do not say
# along which axes they differ, or JAX would keep constants that it marks by all axes.


def _nested(
    compute: Callable[..., object],
    *,
    mesh: Mesh | None,
    in_specs: tuple[object, ...],
    out_specs: object,
    axis_names: set[str],
):
    """Makes a region in another, of ``x, logits, counted, *kernels``."""
    options: dict[str, Any] = {"mesh": mesh, "axis_names": axis_names, "check_vma": False}
    make: Any = functools.partial(jax.shard_map, **options)
    all_axes = PartitionSpec(tuple(sorted(axis_names)))  # in all processes alike
    entering = (*in_specs[:2], *in_specs[3:])  # of what is differentiated: all but ``counted``
    structures: list[Any] = []  # of pullbacks, noted while the forward pass is traced

    def run(*arguments) -> PyTree:
        result = make(compute, in_specs=in_specs, out_specs=out_specs)(*arguments)
        return _varying(result, _outer(arguments))

    def keeping(*arguments: object):
        """Returns the result, and the leaves of the function that gives its gradients."""
        x, logits, counted, *kernels = jax.tree.map(_untyped, arguments)

        def differentiable(x, logits, *kernels):
            return compute(x, logits, counted, *kernels)

        result, back = jax.vjp(differentiable, x, logits, *kernels)
        leaves, structure = jax.tree.flatten(back)
        structures.append(structure)
        return result, [jnp.asarray(leaf)[None] for leaf in leaves]

    def forward(*arguments) -> PyTree:
        region = make(keeping, in_specs=in_specs, out_specs=(out_specs, all_axes))
        result, leaves = region(*arguments)

        differentiated = jax.tree.leaves((*arguments[:2], *arguments[3:]))
        like = tuple(map(varying_axes, differentiated))
        outer = _outer(arguments)
        back = functools.partial(backward, structures[-1], like, outer)
        return _varying(result, outer), jax.tree_util.Partial(back, leaves)

    def backward(structure, like, outer, leaves, cotangents: object) -> PyTree:
        def pull(leaves, cotangents):
            # All devices do this, so those that have a result alike share its gradient.
            cotangents = jax.tree.map(
                lambda ct, spec: _shared(ct, absent(spec)), cotangents, out_specs
            )
            back = structure.unflatten([_untyped(leaf[0]) for leaf in leaves])
            return jax.tree.map(
                lambda spec, ct: _summed(ct, absent(spec)),
                entering,
                back(cotangents),
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            )

        def absent(spec: PartitionSpec) -> Axes:
            spec_axes = {axis for entry in spec for axis in mesh_axes_of(entry)}
            return tuple(sorted(axis_names - spec_axes))

        region = make(pull, in_specs=(all_axes, out_specs), out_specs=entering)
        gradients = _varying(region(leaves, cotangents), outer)

        # Summed where the outer region has the argument alike.
        numbers, tree = jax.tree.flatten(gradients)
        pairs = zip(numbers, like, strict=True)
        numbers = [_summed(ct, tuple(sorted(outer - varied))) for ct, varied in pairs]
        x, logits, *kernels = tree.unflatten(numbers)
        return x, logits, None, *kernels

    function: Any = jax.custom_vjp(run)
    function.defvjp(forward, lambda back, cotangents: back(cotangents))
    return function


def _outer(values: object) -> frozenset[str]:
    """Returns the manual axes of any varying value."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(values)))


def _varying(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """Marks values as varying along axes."""
    return jax.tree.map(functools.partial(mark_varying, axes=tuple(sorted(axes))), tree)


def _untyped(x: jax.Array) -> jax.Array:
    """Returns a value without its varying axes."""
    return x[None].reshape(x.shape)


def _shared(ct: jax.Array, axes: Axes) -> jax.Array:
    return _untyped(ct) / jax.lax.axis_size(axes) if axes else _untyped(ct)


def _summed(ct: jax.Array, axes: Axes) -> jax.Array:
    return sum_over(ct, axes) if axes else ct


# --- The exchange ---


class _Exchange(NamedTuple):
    """Sizes known while the program is traced."""

    axes: Axes
    devices: int
    local: int  # experts of a device
    sent: int  # rows of a device
    chunk: int  # the most rows that a device has for another
    received: int  # the most rows that come to a device

    @classmethod
    def of(
        cls, axes: Axes, devices: int, local: int, choices: tuple[int, int], places: int | None
    ) -> _Exchange:
        """Returns the sizes for (tokens, top_k) of a device and at most some rows an expert."""
        tokens, top_k = choices
        chunk = tokens * min(top_k, local)
        received = chunk * devices
        if places is not None:
            chunk = min(chunk, local * places)
            received = min(chunk * devices, local * places)
        return cls(axes, devices, local, tokens * top_k, chunk, received)

    def parts(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of received and of sent rows."""
        # By other device and expert. ``table`` says how many each device has for each expert.
        me = jax.lax.axis_index(self.axes)
        by_device = table.reshape(self.devices, self.devices, self.local)
        return by_device[:, me], by_device[me]


def _starts(sizes: jax.Array) -> jax.Array:
    """Returns the starts of consecutive parts of the last dimension."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _taken(rows: jax.Array, index: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the rows at an index, zeros if not valid."""
    index = jnp.where(valid, index, len(rows))
    return rows.at[index].get(mode="fill", fill_value=0)


def _moved(rows: jax.Array, sizes: jax.Array, shifts: jax.Array, length: int) -> jax.Array:
    """Returns rows part after part, each from its place plus a shift."""
    number = jnp.arange(length)
    index = jnp.repeat(shifts, sizes, total_repeat_length=length) + number
    return _taken(rows, index, number < sizes.sum())


def _sorted_starts(coming: jax.Array) -> jax.Array:
    """Returns the places of rows, sorted by expert, then by device."""
    return _starts(coming.T.reshape(-1)).reshape(coming.T.shape).T


def _padded_to(exchange: _Exchange, table, rows):
    """Sends each device the rows for its experts, padded to one length."""
    coming, going = exchange.parts(table)
    total, positions = going.sum(axis=1), jnp.arange(exchange.chunk)[None]
    sent = _taken(rows, _starts(total)[:, None] + positions, positions < total[:, None])
    came = jax.lax.all_to_all(sent, exchange.axes, 0, 0, tiled=True)

    # Parts come by device and, within one, by expert: experts are put first.
    chunks = exchange.chunk * jnp.arange(exchange.devices)[:, None]
    shifts = chunks + _starts(coming) - _sorted_starts(coming)
    came = came.reshape(-1, *rows.shape[1:])
    return _moved(came, coming.T.reshape(-1), shifts.T.reshape(-1), exchange.received)


def _padded_from(exchange: _Exchange, table, rows):
    """Sends the results back to their senders, padded to one length."""
    coming, going = exchange.parts(table)
    ends, positions = jnp.cumsum(coming, axis=1), jnp.arange(exchange.chunk)[None]
    expert = (positions[..., None] >= ends[:, None, :-1]).sum(axis=-1)
    shifts = jnp.take_along_axis(_sorted_starts(coming) - _starts(coming), expert, axis=1)
    sent = _taken(rows, shifts + positions, positions < ends[:, -1:])
    came = jax.lax.all_to_all(sent, exchange.axes, 0, 0, tiled=True)

    total = going.sum(axis=1)
    shifts = exchange.chunk * jnp.arange(exchange.devices) - _starts(total)
    return _moved(came.reshape(-1, *rows.shape[1:]), total, shifts, exchange.sent)


def _ragged_to(exchange: _Exchange, table, rows):
    """Sends a slice for each expert to its device."""
    me = jax.lax.axis_index(exchange.axes)
    mine = table[me]

    # Of each device what comes to it, sorted by expert, then by device.
    shape = (exchange.devices, exchange.devices, exchange.local)
    coming = jnp.moveaxis(table.reshape(shape), 0, 2)
    places = _starts(coming.reshape(exchange.devices, -1)).reshape(coming.shape)
    offsets = places[..., me].reshape(-1)

    starts = exchange.parts(table)[0].reshape(-1)
    return _ragged(exchange, rows, exchange.received, _starts(mine), mine, offsets, starts)


def _ragged_from(exchange: _Exchange, table, rows):
    """Sends the slices back to their senders."""
    me = jax.lax.axis_index(exchange.axes)
    coming = exchange.parts(table)[0]
    shape = (exchange.devices, exchange.devices, exchange.local)
    offsets = _starts(table).reshape(shape)[:, me].reshape(-1)
    starts = _sorted_starts(coming).reshape(-1)
    sizes = coming.reshape(-1)
    return _ragged(exchange, rows, exchange.sent, starts, sizes, offsets, table[me])


def _ragged(exchange: _Exchange, rows, length: int, *numbers):
    output = jnp.zeros_like(rows, shape=(length, *rows.shape[1:]))
    return jax.lax.ragged_all_to_all(rows, output, *numbers, axis_name=exchange.axes)


def _there(exchange: _Exchange, table: object, rows: object):
    """Returns the rows for the experts here, sorted by expert."""
    return jax.lax.platform_dependent(
        table,
        rows,
        cpu=functools.partial(_padded_to, exchange),
        default=functools.partial(_ragged_to, exchange),
    )


def _back(exchange: _Exchange, table: object, rows: object) -> Any:
    """Returns the results of the sent rows, in their order."""
    return jax.lax.platform_dependent(
        table,
        rows,
        cpu=functools.partial(_padded_from, exchange),
        default=functools.partial(_ragged_from, exchange),
    )


# Each is the transpose of the other.
_to_experts: Any = jax.custom_vjp(_there, nondiff_argnums=(0,))
_to_experts.defvjp(
    lambda exchange, table, rows: (_there(exchange, table, rows), table),
    lambda exchange, table, cotangents: (None, _from_experts(exchange, table, cotangents)),
)
_from_experts: Any = jax.custom_vjp(_back, nondiff_argnums=(0,))
_from_experts.defvjp(
    lambda exchange, table, rows: (_back(exchange, table, rows), table),
    lambda exchange, table, cotangents: (None, _to_experts(exchange, table, cotangents)),
)
