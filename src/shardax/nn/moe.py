# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts, a few for each token.

The router's softmax over all experts is in float32. The load-balance loss is that of Fedus et al.,
"Switch Transformers", 2021, equation 4, with the shares of all choices added up as Mixtral does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Init, Intermediate, Rngs, iter_modules
from shardax._parallel.experts import Split, by_expert, find_places, find_split
from shardax._parallel.kernels import against_experts, ragged_product
from shardax._parallel.manual_axes import with_auto_axes
from shardax.extend import Options, Static, explicit_sharding, is_eager, warn_user
from shardax.nn.arithmetic import cast_all, take_features, uses_tokamax
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.kernels.layer import KernelLayer, KernelMap, LowRankTerm
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.mlp import Activation, find_activation
from shardax.nn.parameters import (
    Initializer,
    as_axes,
    as_size,
    as_sizes,
    canonical_dtype,
    lecun_normal,
    make_parameter,
    refuse_input,
    zeros,
)
from shardax.partition import resolve_mesh

Dispatch = Literal["dense", "dropless", "capacity"]

_KERNELS = ("gate", "up", "down")

Multiply = Callable[[jax.Array, jax.Array], jax.Array]


class Kernel(NamedTuple):
    """A kernel of all experts, with its biases and low-rank term."""

    whole: Any
    bias: Any = None
    a: Any = None
    b: Any = None


class MoE(KernelLayer):
    """Mixture of gated feed-forward experts with top-k routing.

    Each token gets ``sum(weight * down(activation(gate(x)) * up(x)))`` over its ``top_k`` experts.

    Where the rules in scope, or the Explicit layout of the kernels, lay the experts over a mesh
    axis, the dispatches ``"dropless"`` and ``"capacity"`` send tokens to the devices of their
    experts by all-to-all, and the results back. Results, losses and drops are those of one device.
    The tokens stay split as the rules of ``"batch"`` and ``"seq"``, or the input's type, say, also
    if that is over the same axis; tokens that the experts' devices have alike are cut over them.
    TPU and GPU send only the rows that there are, CPU pads them; the buffer that receives them has
    room for the worst case, or for all places under a capacity. Tokens that cannot be divided by
    the devices, and ``"dense"``, are left to the compiler.

    Args:
        features: Size of the last dimension of input and output.
        hidden: Size of the hidden layer of an expert.
        num_experts: Number of experts.
        top_k: Number of experts of a token.
        dispatch: ``"dense"`` computes all experts for all tokens; ``"dropless"`` sorts tokens by
            expert and multiplies with ``jax.lax.ragged_dot``; ``"capacity"`` gives each expert
            ``ceil(capacity_factor * top_k * tokens / num_experts)`` places, first choices first,
            then in the order of tokens: a choice without a place adds nothing. So a token's result
            depends on the tokens beside it: a text in a batch, or computed token by token as
            ``sx.models.generate`` does, differs from the text alone. Without a mesh and
            in evaluation, the first two compute the chosen experts alone where the choices are at
            most half as many as the experts, as they are token by token.
        capacity_factor: Places of an expert over its even share.
        normalise: Whether the weights of a token add up to 1, which is a softmax over the chosen
            experts (Mixtral; Qwen3-MoE with ``norm_topk_prob``); else they are those of a softmax
            over all experts. None: with several experts a token. The weight of one expert alone
            would be 1 whatever the router says, so that no gradient of the results reaches it.
        activation: Name of a function of ``jax.nn``, or a function.
        use_bias: Whether the router and the three maps of an expert have biases.
        deterministic: Whether no loss is recorded; ``model.eval()`` sets it.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        axes: Axis names of the experts, of the features and of the hidden layer.
        rngs: Random streams; ``params`` is used.

    Attributes:
        router: ``Linear`` from features to experts.
        gate: ``Param`` of shape (num_experts, features, hidden).
        up: ``Param`` likewise.
        down: ``Param`` of shape (num_experts, hidden, features).
        gate_bias: ``Param`` of shape (num_experts, hidden), or None.
        up_bias: ``Param`` likewise, or None.
        down_bias: ``Param`` of shape (num_experts, features), or None.
        load_balance_loss: ``Intermediate``, a float32 scalar: the loss of the latest call in
            training, ``num_experts * sum(share of tokens * mean probability)``, which is ``top_k``
            if balanced; 0 before the first call. ``sx.nn.load_balance_loss(model)`` reads it.

    Raises:
        LayerConfigError: If a size, the dispatch, the factor or the activation is wrong.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> moe = sx.nn.MoE(4, 8, num_experts=4, top_k=2, rngs=sx.Rngs(0))
        >>> x = jnp.arange(32.0).reshape(4, 2, 4)
        >>> y = moe(x)
        >>> y.shape, moe.up.axes, float(moe.load_balance_loss) > 0
        ((4, 2, 4), ('expert', 'embed', 'mlp'), True)
        >>> mesh, rules = jax.make_mesh((4,), ("data",)), {"batch": "data", "expert": "data"}
        >>> with jax.set_mesh(mesh), sx.axis_rules(rules):  # two all-to-alls
        ...     split = sx.jit(lambda moe, x: moe(x))(sx.shard(moe, mesh), x)
        >>> bool(jnp.allclose(split, y, rtol=1e-4))
        True
    """

    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    _scales_inputs = False  # whether weights multiply what experts read, not what they return
    _may_normalise = True  # whether the class follows ``normalise``

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        num_experts: int,
        top_k: int = 2,
        dispatch: Dispatch = "dropless",
        capacity_factor: float = 1.25,
        normalise: bool | None = None,
        activation: Activation = "silu",
        use_bias: bool = False,
        deterministic: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        axes: Sequence[str | None] = ("expert", "embed", "mlp"),
        rngs: Rngs | None,
    ) -> None:
        features, hidden = as_size("MoE", "features", features), as_size("MoE", "hidden", hidden)
        count, top_k = as_size("MoE", "num_experts", num_experts), as_size("MoE", "top_k", top_k)

        options = Options(LayerConfigError, "MoE")
        if top_k > count:
            raise LayerConfigError(f"MoE chooses top_k={top_k} of num_experts={count}.")
        options.choice("dispatch", dispatch, get_args(Dispatch))
        fits = 0 < capacity_factor < math.inf
        options.check("capacity_factor", capacity_factor, fits, "positive and finite")
        find_activation(activation, "MoE")

        expert, outer, inner = as_axes("MoE", "axis names", axes, 3)
        init = lecun_normal((1,), (2,), (0,)) if kernel_init is None else kernel_init
        self.router = Linear(
            features,
            count,
            use_bias=use_bias,
            dtype=np.float32,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            kernel_axes=(outer, expert),
            rngs=rngs,
        )

        wide, narrow = (count, features, hidden), (count, hidden, features)
        self.gate = make_parameter(init, wide, param_dtype, (expert, outer, inner), rngs)
        self.up = make_parameter(init, wide, param_dtype, (expert, outer, inner), rngs)
        self.down = make_parameter(init, narrow, param_dtype, (expert, inner, outer), rngs)

        if use_bias:
            for name in ("gate_bias", "up_bias"):
                bias = make_parameter(zeros, (count, hidden), param_dtype, (expert, inner), rngs)
                setattr(self, name, bias)
            shape, names = (count, features), (expert, outer)
            self.down_bias = make_parameter(zeros, shape, param_dtype, names, rngs)

        self.top_k = top_k
        self.dispatch = dispatch
        self.capacity_factor = float(capacity_factor)
        self.normalise = top_k > 1 if normalise is None else normalise
        self.activation = activation
        self.deterministic = deterministic
        self.dtype = canonical_dtype(dtype)

        # There from the start, so that no call changes the structure of the model.
        self.load_balance_loss = Intermediate(Init(zeros, (), np.float32), axes=())

    def __call__(self, x: Any, *, mask: Any = None, out_sharding: Any = None) -> jax.Array:
        """Maps an input, and records the load-balance loss.

        Args:
            x: Shape (..., features); tokens are all dimensions but the last.
            mask: Booleans of shape (...), False for tokens that the loss leaves out, such as
                padding. Their results are computed all the same; under ``"capacity"`` they take no
                place, do not count as tokens, and their results are zeros. None: all count.
            out_sharding: Sharding of the result over Explicit mesh axes; by default the input's.

        Returns:
            Shape (..., features), in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``, or the mask has another
                shape, or numbers.
        """
        return self._call(x, {}, mask, out_sharding)

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the products of each expert's tokens with its three kernels."""
        ((count,), (features,)) = (
            as_sizes("MoE", name, getattr(self.router, name))
            for name in ("out_features", "in_features")
        )
        hidden = self.gate.shape[-1]
        wide = KernelMap.of("etd,edh->eth", (count, features, hidden))
        narrow = KernelMap.of("etd,edh->eth", (count, hidden, features))
        return {"gate": wide, "up": wide, "down": narrow}

    def call_with_terms(
        self, x: Any, terms: Mapping[str, LowRankTerm], **options: Any
    ) -> jax.Array:
        """Does the work of a call, with low-rank terms by kernel."""
        return self._call(x, terms, **options)

    def _call(
        self, x: Any, terms: Mapping[str, LowRankTerm], mask: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        kernels = [self._kernel(name, terms.get(name)) for name in _KERNELS]
        x = take_features("MoE", x, (kernels[0].whole.shape[1],))

        counted = jnp.ones((), bool)
        if mask is not None:
            shape = f"of shape {x.shape[:-1]}"
            counted = as_mask("MoE", mask, shape, "One per token.")
            if counted.shape != x.shape[:-1]:
                refuse_input("MoE", f"a mask of booleans {shape}", counted, "One per token.")

        # Experts over a mesh axis: each device has the tokens of its own part.
        out_layout = out_sharding or explicit_sharding(x)
        split = None
        if self.dispatch != "dense":
            split = find_split(x, kernels[0].whole, self.gate.axes)
        x = x if split is None else split.enter(x)
        logits = self._scores(x)

        leaves, structure = jax.tree.flatten(kernels)
        x, *leaves = cast_all(self.dtype, x, *leaves)
        leading = (x, logits, counted)

        axes = None if split is None else (*split.axes, *split.experts, *split.hidden)
        reason = partial(against_experts, self.dispatch, axes)
        tokamax = uses_tokamax("experts", type(self).__name__, x, reason)
        compute: Any = partial(self._compute, tokamax)
        if split is not None:
            compute = partial(self._exchanging, tokamax, split)

        found = [explicit_sharding(array) for array in (*leading, *leaves)]
        shardings = [sharding for sharding in found if sharding is not None]
        if shardings:
            # Sorting and gathering by expert have no layout of their own in the types of arrays:
            # the compiler chooses it, as over Auto axes.
            mesh = shardings[0].mesh
            whole = NamedSharding(mesh, PartitionSpec())
            compute = with_auto_axes(compute, mesh, (out_layout or whole, whole))

        if split is not None and is_eager():
            # A region outside of a compiled program would be compiled operation by operation.
            options = (self.top_k, self.dispatch, self.capacity_factor, self.normalise)
            key = (type(self), self.activation, *options, self._routing, split, out_layout, tokamax)
            compute = partial(_compiled, Static(compute, key))

        kernels = jax.tree.unflatten(structure, leaves)
        # In the compute dtype, which holds more of the scale than a parameter may.
        scaled = [
            kernel._replace(b=terms[name].scale * kernel.b) if name in terms else kernel
            for name, kernel in zip(_KERNELS, kernels, strict=True)
        ]
        y, loss = compute(*leading, *scaled)

        if not self.deterministic:
            self._check_router(len(kernels[0].whole))
            record = self.__dict__.get("load_balance_loss")
            if isinstance(record, Intermediate):
                record.value = loss
            else:  # ``sx.pop`` took it away, or the model is frozen
                self.load_balance_loss = Intermediate(loss)
        return y

    def _check_router(self, count: int) -> None:
        """Warns in training of a router that no loss of the results trains."""
        if self.normalise and self.top_k == 1 and count > 1 and self._may_normalise:
            warn_user(
                "MoE(top_k=1, normalise=True) gives each token's expert the weight 1, whatever the "
                "router says: of a loss of the results no gradient reaches the router, which "
                "load_balance_loss alone trains. With normalise=False, the default of top_k=1, the "
                "weight is the expert's probability."
            )

    def _kernel(self, name: str, term: LowRankTerm | None) -> Kernel:
        bias = getattr(self, f"{name}_bias")
        bias = None if bias is None else bias.value
        whole = getattr(self, name).value
        return Kernel(whole, bias) if term is None else Kernel(whole, bias, term.a, term.b)

    def _compute(
        self, tokamax: bool, x: jax.Array, logits: jax.Array, counted: jax.Array, *kernels: Kernel
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the result and the loss; sees no Explicit axes."""
        weights, experts, loss = self._route(logits, counted, x.shape[:-1], len(kernels[0][0]))

        tokens, few = x.reshape(-1, x.shape[-1]), 2 * experts.size <= len(kernels[0][0])
        dropless, capacity = partial(self._dropless, tokamax), partial(self._capacity, counted)
        apply = {"dense": self._dense, "dropless": dropless, "capacity": capacity}

        few = few and self.dispatch != "capacity" and not tokamax
        if few and self.deterministic and resolve_mesh() is None:
            apply = {self.dispatch: self._by_choice}
        y = apply[self.dispatch](tokens, weights.astype(x.dtype), experts, *kernels)
        return y.reshape(x.shape), loss

    def _exchanging(
        self,
        tokamax: bool,
        split: Split,
        x: jax.Array,
        logits: jax.Array,
        counted: jax.Array,
        *kernels: Kernel,
    ) -> tuple[jax.Array, jax.Array]:
        """Does the same with experts over a mesh axis."""
        count = len(kernels[0][0])

        def region(x: jax.Array, logits: jax.Array, counted, gate: Kernel, up: Kernel, down):
            if split.hidden and down.bias is not None:  # the results are added up over these axes
                is_first = jax.lax.axis_index(split.hidden) == 0
                down = down._replace(bias=jnp.where(is_first, down.bias, 0))
            everywhere = partial(jax.lax.psum, axis_name=split.axes)

            weights, experts, loss = self._route(logits, counted, x.shape[:-1], count, everywhere)
            places = None
            if self.dispatch == "capacity":
                choices = experts.size * split.size(split.axes)
                places = self._places(choices, count)
                experts = _without_masked(experts, counted, count)
                place = find_places(experts, count, x.shape[:-1], split)
                limit = self._limit(choices, count, counted, everywhere)
                experts = jnp.where(place < limit, experts, count)

            tokens = x.reshape(-1, x.shape[-1])
            compute = partial(self._sorted, tokamax, (gate, up, down))
            weights = weights.astype(x.dtype)
            options = (count, compute, split, places)
            y = by_expert(tokens, weights, experts, *options, on_inputs=self._scales_inputs)
            return y.reshape(x.shape), loss

        return split.run(region, x, logits, counted, *kernels, is_typed=not tokamax)

    def _scores(self, x: jax.Array) -> jax.Array:
        """Returns what experts are chosen by, of shape (..., experts)."""
        return self.router(x)

    @property
    def _routing(self) -> tuple[Any, ...]:
        """All that a choice depends on beside the options of this class."""
        return ()

    def _choose(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns probabilities, and weights and experts of each token."""
        probabilities = jax.nn.softmax(logits.reshape(-1, count), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.top_k)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return probabilities, weights, experts

    def _route(
        self,
        logits: jax.Array,
        counted: jax.Array,
        tokens: tuple[int, ...],
        count: int,
        everywhere: Callable[[Any], Any] = lambda numbers: numbers,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns weights and experts of each token, and the loss."""
        # ``everywhere`` sums over all devices that have some of the tokens.
        probabilities, weights, experts = self._choose(logits, count)
        counts = jnp.broadcast_to(counted.astype(np.float32), tokens).reshape(-1)

        chosen = jax.nn.one_hot(experts, count, dtype=weights.dtype)  # (tokens, top_k, experts)
        shares, means = jnp.einsum("t,tke->e", counts, chosen), counts @ probabilities
        size, shares, means = everywhere((counts.sum(), shares, means))

        size = jnp.maximum(size, 1)  # the loss of no tokens is 0
        loss = count * jnp.vdot(shares / size, means / size)
        return weights, experts, loss

    def _places(self, choices: int, count: int) -> int:
        return math.ceil(self.capacity_factor * choices / count)

    def _limit(
        self,
        choices: int,
        count: int,
        counted: jax.Array,
        everywhere: Callable[[Any], Any] = lambda numbers: numbers,
    ) -> int | jax.Array:
        """Returns how many places of an expert may be taken, if masked tokens take none.

        Args:
            choices: The number of choices of all tokens, on all devices.
            count: The number of experts.
            counted: The mask of the tokens here, or one value for all.
            everywhere: Sums over all devices that have some of the tokens.
        """
        if not counted.ndim:
            return self._places(choices, count)

        # The number of places is that of the real tokens alone. It is looked up, because float32
        # would round it to another one.
        places = np.ceil(self.capacity_factor * np.arange(0, choices + 1, self.top_k) / count)
        table = jnp.asarray(places.astype(np.int32))
        return table[everywhere(counted.sum(dtype=jnp.int32))]

    def _hidden(self, x: jax.Array, gate: Kernel, up: Kernel, **options: Callable[..., Any]):
        return self._gated(_product(x, gate, **options), _product(x, up, **options))

    def _weighed(self, rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns rows scaled if weights are of inputs, and weights of results."""
        return (rows * weights, jnp.ones_like(weights)) if self._scales_inputs else (rows, weights)

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns the hidden layer of an expert."""
        return find_activation(self.activation, "MoE")(gate) * up

    def _dense(
        self, x: jax.Array, weights: jax.Array, experts: jax.Array, *kernels: Kernel
    ) -> jax.Array:
        gate, up, down = kernels
        chosen = jax.nn.one_hot(experts, len(gate[0]), dtype=x.dtype)
        combined = jnp.einsum("tk,tke->et", weights, chosen)
        by_expert, gather = (partial(jnp.einsum, e) for e in ("etd,edh->eth", "eth,ehd->td"))

        # A product of each expert: for one of all, CPUs would transpose the kernels at each call.
        x = jnp.broadcast_to(x, (len(gate[0]), *x.shape))
        if self._scales_inputs:
            x, combined = combined[..., None] * x, chosen.sum(axis=1).T
        hidden = self._hidden(x, gate, up, multiply=by_expert, by_row=_for_each_row)

        add_up = partial(jnp.einsum, "et,ed->td", combined)
        options = {"multiply": gather, "first": by_expert, "by_row": add_up}
        return _product(combined[..., None] * hidden, down, **options)

    def _by_choice(
        self, x: jax.Array, weights: jax.Array, experts: jax.Array, *kernels: Kernel
    ) -> jax.Array:
        """Computes the chosen experts alone, one choice after the other."""

        def one(row: jax.Array, weight: jax.Array, expert: jax.Array) -> jax.Array:
            take = partial(jax.lax.dynamic_index_in_dim, index=expert, keepdims=False)
            gate, up, down = jax.tree.map(take, kernels)
            row, weight = self._weighed(row, weight)
            hidden = self._hidden(row, gate, up, multiply=jnp.matmul, by_row=_unchanged)
            return weight * _product(hidden, down, jnp.matmul, by_row=_unchanged)

        rows = jnp.repeat(x, self.top_k, axis=0)
        y = jax.lax.map(lambda choice: one(*choice), (rows, weights.ravel(), experts.ravel()))
        return y.reshape(*experts.shape, -1).sum(axis=1)

    def _sorted(
        self, tokamax: bool, kernels: Sequence[Kernel], x: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """Returns the results of rows sorted by expert."""
        gate, up, down = kernels
        is_valid = jnp.arange(len(x))[:, None] < sizes.sum()

        def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return ragged_product(x, kernel, sizes, tokamax)

        def by_row(bias: jax.Array) -> jax.Array:
            rows = jnp.repeat(jnp.arange(len(bias)), sizes, total_repeat_length=len(x))
            return jnp.where(is_valid, bias[rows], 0)

        hidden = self._hidden(x, gate, up, multiply=multiply, by_row=by_row)
        return _product(hidden, down, multiply, by_row=by_row)

    def _dropless(
        self, tokamax: bool, x: jax.Array, weights: jax.Array, experts: jax.Array, *kernels: Kernel
    ) -> jax.Array:
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=len(kernels[0][0])).astype(jnp.int32)
        token = order // self.top_k
        rows, weights = x[token], weights.reshape(-1)[order][:, None]
        rows, weights = self._weighed(rows, weights)
        y = self._sorted(tokamax, kernels, rows, sizes) * weights
        return jnp.zeros_like(x).at[token].add(y)

    def _capacity(
        self,
        counted: jax.Array,
        x: jax.Array,
        weights: jax.Array,
        experts: jax.Array,
        *kernels: Kernel,
    ) -> jax.Array:
        gate, up, down = kernels
        count = len(gate[0])
        places = self._places(experts.size, count)

        # A choice of the expert ``count`` has no place.
        experts = _without_masked(experts, counted, count)
        place = find_places(experts, count)
        experts = jnp.where(place < self._limit(experts.size, count, counted), experts, count)

        chosen, place = experts.T.reshape(-1), place.T.reshape(-1)  # first choices first
        rows, weights = jnp.tile(x, (self.top_k, 1)), weights.T.reshape(-1)[:, None]
        rows, weights = self._weighed(rows, weights)
        buffers = jnp.zeros((count, places, x.shape[-1]), x.dtype)
        buffers = buffers.at[chosen, place].set(rows, mode="drop")
        multiply = partial(jnp.einsum, "etd,edh->eth")
        hidden = self._hidden(buffers, gate, up, multiply=multiply, by_row=_for_each_row)
        y = _product(hidden, down, multiply, by_row=_for_each_row)
        y = y.at[chosen, place].get(mode="fill", fill_value=0) * weights
        return y.reshape(self.top_k, *x.shape).sum(axis=0)


def _without_masked(experts: jax.Array, counted: jax.Array, count: int) -> jax.Array:
    """Returns the experts of each token, and ``count`` for those of masked tokens."""
    if not counted.ndim:
        return experts
    return jnp.where(counted.reshape(-1, 1), experts, count)


@partial(jax.jit, static_argnums=0)
def _compiled(compute: Static, *arguments: object):
    return compute.value(*arguments)


def _product(
    x: jax.Array,
    kernel: Kernel,
    multiply: Multiply,
    first: Multiply | None = None,
    *,
    by_row: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Multiplies by a kernel, and adds its biases and low-rank term."""
    y = multiply(x, kernel.whole)
    y = y if kernel.bias is None else y + by_row(kernel.bias)
    if kernel.a is None:
        return y
    return y + multiply((first or multiply)(x, kernel.a), kernel.b)


def _unchanged(bias: jax.Array) -> jax.Array:
    return bias


def _for_each_row(bias: jax.Array) -> jax.Array:
    return bias[:, None]


def load_balance_loss(model: object) -> jax.Array:
    """Mean load-balance loss of the experts' layers, each from its latest call.

    To be added to the training loss, with a small weight: alone, a router comes to prefer few
    experts. Read it after the model was called, in the same function:
    ``next_token_loss(model, batch) + 0.01 * sx.nn.load_balance_loss(model)``. Reading changes
    nothing in the model. A layer that is called several times counts with its last call.

    Args:
        model: A model with ``MoE`` layers, in stacks too.

    Returns:
        A float32 scalar: the mean over the layers in training; 0 if all are in evaluation.

    Raises:
        LayerInputError: If there is no ``MoE`` in the model.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> make = lambda: sx.nn.MoE(4, 8, num_experts=2, top_k=2, rngs=sx.Rngs(0))
        >>> stack = sx.nn.Stack(make, 3)
        >>> def loss(stack, x):
        ...     return (stack(x) ** 2).mean() + 0.01 * sx.nn.load_balance_loss(stack)
        >>> grads = sx.jit(sx.grad(loss))(stack, jnp.ones((5, 4)))
        >>> float(sx.nn.load_balance_loss(stack)), stack.stacked.load_balance_loss.shape
        (2.0, (3,))
    """
    layers = [layer for _, layer in iter_modules(model) if isinstance(layer, MoE)]
    if not layers:
        raise LayerInputError(f"load_balance_loss found no MoE in {type(model).__name__}.")
    losses = [layer.load_balance_loss.value for layer in layers if not layer.deterministic]
    if not losses:
        return jnp.zeros((), np.float32)
    return jnp.mean(jnp.concatenate([jnp.ravel(loss) for loss in losses]))
