# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells and their loops over time.

A cell is called as ``cell(carry, x) -> (carry, y)`` for one step, and says by
``cell.initial_carry(x)`` what it starts from. ``RNN`` runs it over the second last dimension of its
input with ``sx.scan``. The products with the input do not depend on the carry, so those of all
steps are one matrix product before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Carry, Module, Rngs, scan
from shardax.extend import explicit_entries, explicit_sharding, gathered, with_layout
from shardax.nn import parameters
from shardax.nn.arithmetic import as_array, at_least_float32, take_features
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.mlp import Activation, find_activation
from shardax.nn.parameters import Initializer


def _orthogonal_gates(
    key: jax.Array, shape: Sequence[int], dtype: jax.typing.DTypeLike = np.float32
) -> jax.Array:
    """An orthogonal matrix for each gate; Saxe et al., 2014."""
    first, gates, last = shape
    init = jax.nn.initializers.orthogonal()
    keys = jax.random.split(key, gates)
    wide = at_least_float32(dtype)  # there is no QR decomposition of narrower numbers
    matrices = jax.vmap(lambda key: init(key, (first, last), wide), out_axes=1)(keys)
    return matrices.astype(dtype)


class _Cell(Module):
    """Base of cells: the products with the input and with the carry."""

    _gates: int
    _recurrent_bias = False

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        recurrent_init: Initializer = _orthogonal_gates,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("in", "hidden", "gates", "out"),
        precision=None,
        rngs: Rngs | None,
    ) -> None:
        name = type(self).__name__
        self.in_features = parameters.as_size(name, "in_features", in_features)
        self.features = parameters.as_size(name, "features", features)
        outer, hidden, gates, out = parameters.as_axes(name, "axis names", axes, 4)

        def linear(size: int, axis: str | None, init, bias: bool) -> Linear:
            return Linear(
                size,
                (self._gates, self.features),
                use_bias=use_bias and bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                bias_init=bias_init,
                kernel_axes=(axis, gates, out),
                precision=precision,
                rngs=rngs,
            )

        self.input = linear(self.in_features, outer, kernel_init, True)
        self.recurrent = linear(self.features, hidden, recurrent_init, self._recurrent_bias)

    def initial_carry(self, x: object):
        """Returns the zeros at the start of a sequence."""
        return self._zeros(self._project(x))

    def __call__(self, carry: object, x: object) -> tuple[Any, jax.Array]:
        """Runs one step; ``x`` has the shape (..., in_features)."""
        return self._step(carry, self._project(x))

    def _project(self, x: object) -> jax.Array:
        name = f"{type(self).__name__}(in_features={self.in_features})"
        return _gates_of(self.input, take_features(name, x, (self.in_features,), "in_features"))

    def _zeros(self, projected: jax.Array) -> Any:
        return jnp.zeros_like(projected[..., 0, :])

    def _step(self, carry: object, projected: jax.Array) -> tuple[Any, jax.Array]:
        raise NotImplementedError


def _gates_of(linear: Linear, x: Any) -> jax.Array:
    """Returns the gates of a product, all of them on each device."""
    # They are read one by one: over Explicit mesh axes that split them they are gathered.
    return gathered(linear(x), -2)


class SimpleCell(_Cell):
    """Recurrent cell with one activation; Elman, 1990.

    ``hidden = activation(input(x) + recurrent(hidden))``

    Args:
        in_features: Size of the last dimension of the input.
        features: Size of the hidden state.
        activation: Name of a function of ``jax.nn``, or a function.
        use_bias: Whether there is a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the input's kernel; None for LeCun normal.
        recurrent_init: Initializer of the recurrent kernel; an orthogonal matrix by default.
        bias_init: Initializer of the bias.
        axes: Axis names of the input features, of the hidden features that are summed over, of the
            gates and of the hidden features that come out.
        precision: As in ``jax.lax.dot_general``.
        rngs: Random streams; ``params`` is used.

    Attributes:
        input: ``Linear`` from in_features to (1, features).
        recurrent: ``Linear`` from features to (1, features), without bias.

    Raises:
        LayerConfigError: If a size, the names or the activation are wrong.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> cell = sx.nn.SimpleCell(3, 4, rngs=sx.Rngs(0))
        >>> x = jnp.ones((2, 3))
        >>> carry, y = cell(cell.initial_carry(x), x)
        >>> y.shape, cell.recurrent.kernel.axes
        ((2, 4), ('hidden', 'gates', 'out'))
    """

    _gates = 1

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        activation: Activation = "tanh",
        rngs: Rngs | None,
        **options: Any,
    ) -> None:
        find_activation(activation, "SimpleCell")
        super().__init__(in_features, features, rngs=rngs, **options)
        self.activation = activation

    def _step(self, carry: object, projected: jax.Array) -> tuple[Any, jax.Array]:
        activate = find_activation(self.activation, "SimpleCell")
        hidden = activate((projected + _gates_of(self.recurrent, carry))[..., 0, :])
        return hidden, hidden


class LSTMCell(_Cell):
    """Long short-term memory; Hochreiter and Schmidhuber, 1997, with forget gate.

    The gates are, in this order, input, forget, cell and output, as in PyTorch:
    ``cell = sigmoid(f) * cell + sigmoid(i) * tanh(g)`` and ``hidden = sigmoid(o) * tanh(cell)``.
    The carry is ``(hidden, cell)``.

    Args:
        in_features: Size of the last dimension of the input.
        features: Size of the hidden state and of the cell.
        use_bias: Whether there is a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the input's kernel; None for LeCun normal.
        recurrent_init: Initializer of the recurrent kernel; an orthogonal matrix for each gate by
            default.
        bias_init: Initializer of the bias.
        axes: Axis names of the input features, of the hidden features that are summed over, of the
            gates and of the hidden features that come out.
        precision: As in ``jax.lax.dot_general``.
        rngs: Random streams; ``params`` is used.

    Attributes:
        input: ``Linear`` from in_features to (4, features).
        recurrent: ``Linear`` from features to (4, features), without bias.

    Raises:
        LayerConfigError: If a size or the names are wrong.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> cell = sx.nn.LSTMCell(3, 4, rngs=sx.Rngs(0))
        >>> x = jnp.ones((2, 3))
        >>> (hidden, memory), y = cell(cell.initial_carry(x), x)
        >>> y.shape, memory.shape, cell.input.kernel.shape
        ((2, 4), (2, 4), (3, 4, 4))
    """

    _gates = 4

    def _zeros(self, projected: jax.Array) -> Any:
        hidden = super()._zeros(projected)
        return hidden, hidden

    def _step(self, carry: Any, projected: jax.Array) -> tuple[Any, jax.Array]:
        hidden, cell = carry
        gates = projected + _gates_of(self.recurrent, hidden)
        write, keep, new, read = (gates[..., index, :] for index in range(4))
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(read) * jnp.tanh(cell)
        return (hidden, cell), hidden


class GRUCell(_Cell):
    """Gated recurrent unit; Cho et al., 2014.

    The gates are, in this order, reset, update and new, as in PyTorch:
    ``n = tanh(input_n + sigmoid(r) * recurrent_n)`` and
    ``hidden = (1 - sigmoid(z)) * n + sigmoid(z) * hidden``.

    Args:
        in_features: Size of the last dimension of the input.
        features: Size of the hidden state.
        use_bias: Whether there are biases, one of the input and one of the recurrent products.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the input's kernel; None for LeCun normal.
        recurrent_init: Initializer of the recurrent kernel; an orthogonal matrix for each gate by
            default.
        bias_init: Initializer of the biases.
        axes: Axis names of the input features, of the hidden features that are summed over, of the
            gates and of the hidden features that come out.
        precision: As in ``jax.lax.dot_general``.
        rngs: Random streams; ``params`` is used.

    Attributes:
        input: ``Linear`` from in_features to (3, features).
        recurrent: ``Linear`` from features to (3, features).

    Raises:
        LayerConfigError: If a size or the names are wrong.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> cell = sx.nn.GRUCell(3, 4, rngs=sx.Rngs(0))
        >>> x = jnp.ones((2, 3))
        >>> carry, y = cell(cell.initial_carry(x), x)
        >>> y.shape, cell.recurrent.bias.shape
        ((2, 4), (3, 4))
    """

    _gates = 3
    _recurrent_bias = True

    def _step(self, carry: Any, projected: jax.Array) -> tuple[Any, jax.Array]:
        recurrent = _gates_of(self.recurrent, carry)
        from_input, from_state = (
            [gates[..., index, :] for index in range(3)] for gates in (projected, recurrent)
        )
        reset, update = (
            jax.nn.sigmoid(from_input[index] + from_state[index]) for index in range(2)
        )
        hidden = (1 - update) * jnp.tanh(from_input[2] + reset * from_state[2]) + update * carry
        return hidden, hidden


class RNN(Module):
    """Runs a cell over time.

    Args:
        cell: ``SimpleCell``, ``LSTMCell``, ``GRUCell``, or a Module with
            ``cell(carry, x) -> (carry, y)`` and ``cell.initial_carry(x)``.
        reverse: Whether it goes from the last step to the first; outputs stay at their steps.
        unroll: Steps of one iteration of the loop, as in ``jax.lax.scan``.

    Attributes:
        cell: The cell.

    Raises:
        LayerConfigError: If the cell has no ``initial_carry``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rnn = sx.nn.RNN(sx.nn.LSTMCell(3, 4, rngs=sx.Rngs(0)))
        >>> rnn(jnp.ones((2, 5, 3))).shape
        (2, 5, 4)
        >>> (hidden, memory), y = rnn(jnp.ones((2, 5, 3)), return_carry=True)
        >>> bool((hidden == y[:, -1]).all())
        True
    """

    def __init__(self, cell: object, *, reverse: bool = False, unroll: int | bool = 1) -> None:
        if not callable(cell) or isinstance(cell, type):
            raise LayerConfigError(
                f"RNN runs a cell, a Module with initial_carry(x), not {cell!r}. For example "
                f"sx.nn.RNN(sx.nn.LSTMCell(in_features, features, rngs=rngs))."
            )

        if not callable(getattr(cell, "initial_carry", None)):
            raise LayerConfigError(
                f"RNN runs a cell, a Module with cell(carry, x) and initial_carry(x), but "
                f"{type(cell).__name__} does not say what it starts from. Write the method, for "
                f"steps x of shape (..., in_features):\n\n"
                f"def initial_carry(self, x):\n"
                f"    return jnp.zeros((*x.shape[:-1], features), x.dtype)\n"
            )

        self.cell = cell
        self.reverse = reverse
        self.unroll = unroll

    def __call__(
        self, x: Any, carry: Any = None, *, mask: Any = None, return_carry: bool = False
    ) -> Any:
        """Maps sequences.

        Args:
            x: Shape (..., time, in_features). Over Explicit mesh axes time is made whole.
            carry: What to start from; by default the cell's initial carry.
            mask: Booleans of shape (..., time), True at real steps. The others leave the carry as
                it is, wherever they stand, and their outputs are zeros.
            return_carry: Whether to return the carry too.

        Returns:
            The outputs of all steps, shape (..., time, features), or ``(carry, outputs)``.

        Raises:
            LayerInputError: If the input has no time, or the mask or carry another shape.
            TransformError: If the cell returns another structure, shape or dtype than ``carry``.
        """
        x = as_array(x)
        if x.ndim < 2 or not x.shape[-2]:
            parameters.refuse_input(
                "RNN", "an input of shape (..., time, features)", x, "It needs at least one step."
            )
        axis, x = x.ndim - 2, gathered(x, x.ndim - 2)
        if mask is not None:
            shape, meaning = f"of shape {x.shape[:-1]}", "True is a real step."
            mask = as_mask("RNN", mask, shape, meaning)
            if mask.shape != x.shape[:-1]:
                parameters.refuse_input("RNN", f"a mask of booleans {shape}", mask, meaning)
            mask = gathered(mask, axis)
        cell: Any = self.cell
        step = cell
        if isinstance(cell, _Cell) and type(cell).__call__ is _Cell.__call__:
            x, step = cell._project(x), cell._step
            start = cell._zeros(jax.lax.index_in_dim(x, 0, axis, keepdims=False))
        else:
            start = cell.initial_carry(jax.lax.index_in_dim(x, 0, axis, keepdims=False))

        def run(carry, x: jax.Array, real: jax.Array | None) -> tuple[Any, Any]:
            new, y = step(carry, x)
            if real is None:
                return new, y
            new = jax.tree.map(lambda new, old: _where(real, new, old), new, carry)
            return new, jax.tree.map(lambda y: _where(real, y, jnp.zeros_like(y)), y)

        axes = (Carry, axis, None if mask is None else axis)
        if carry is not None:
            start = _take_carry(carry, start)
        loop = scan(
            run, in_axes=axes, out_axes=(Carry, axis), reverse=self.reverse, unroll=self.unroll
        )
        carry, y = loop(start, x, mask)
        return (carry, y) if return_carry else y


class Bidirectional(Module):
    """Runs one RNN forwards and one backwards.

    Args:
        forward: ``RNN``, or a cell.
        backward: ``RNN``, or a cell; it is run from the last step to the first.
        merge: How two outputs become one, of ``(forward, backward)``; by default they are
            concatenated along the last dimension.

    Attributes:
        forward: The ``RNN`` that goes forwards.
        backward: The ``RNN`` that goes backwards.

    Raises:
        LayerConfigError: If one is no cell, or goes the other way.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> both = sx.nn.Bidirectional(*(sx.nn.GRUCell(3, 4, rngs=rngs) for _ in range(2)))
        >>> both(jnp.ones((2, 5, 3))).shape
        (2, 5, 8)
    """

    def __init__(
        self, forward: object, backward: object, *, merge: Callable[[Any, Any], Any] | None = None
    ) -> None:
        if isinstance(forward, RNN) and forward.reverse:
            raise LayerConfigError("Bidirectional has a forward RNN with reverse=True.")
        if isinstance(backward, RNN) and not backward.reverse:
            raise LayerConfigError(
                "Bidirectional has a backward RNN with reverse=False. Give RNN(cell, "
                "reverse=True), or the cell."
            )
        self.forward = forward if isinstance(forward, RNN) else RNN(forward)
        self.backward = backward if isinstance(backward, RNN) else RNN(backward, reverse=True)
        self.merge = merge

    def __call__(
        self, x: Any, carry: Any = (None, None), *, mask: Any = None, return_carry: bool = False
    ) -> Any:
        """Maps sequences.

        Args:
            x: Shape (..., time, in_features).
            carry: What both start from, a pair.
            mask: As for ``RNN``.
            return_carry: Whether to return the carries too.

        Returns:
            Shape (..., time, features of both), or ``((carry, carry), outputs)``.

        Raises:
            LayerInputError: If the input has no time or the mask another shape.
        """
        results = [
            rnn(x, start, mask=mask, return_carry=True)
            for rnn, start in zip((self.forward, self.backward), carry, strict=True)
        ]
        carries, outputs = zip(*results, strict=True)
        y = _side_by_side(*outputs) if self.merge is None else self.merge(*outputs)
        return (carries, y) if return_carry else y


def _side_by_side(one: jax.Array, other: jax.Array) -> jax.Array:
    """Joins features, laid out as the first over Explicit mesh axes."""
    layout = explicit_sharding(one) or explicit_sharding(other)
    return with_layout(lambda *arrays: jnp.concatenate(arrays, axis=-1), layout, one, other)


def _take_carry(carry: object, start: object):
    """Returns a given carry, laid out as the cell's own, or raises."""
    (leaves, structure), (expected_leaves, expected) = map(jax.tree.flatten, (carry, start))
    leaves = [as_array(leaf) for leaf in leaves]
    if structure != expected or [a.shape for a in leaves] != [a.shape for a in expected_leaves]:
        shapes = jax.tree.map(np.shape, start), jax.tree.map(np.shape, carry)
        raise LayerInputError(
            f"RNN takes a carry of shapes {shapes[0]}, as cell.initial_carry gives, but was given "
            f"{shapes[1]}."
        )

    laid = [
        leaf if explicit_entries(a) is None else jax.sharding.reshard(leaf, jax.typeof(a).sharding)
        for leaf, a in zip(leaves, expected_leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, laid)


def _where(real: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Selects rows; ``real`` has the leading dimensions of both."""
    entries = explicit_entries(new)
    layout = None
    if entries is not None:
        mesh = jax.typeof(new).sharding.mesh
        rows = NamedSharding(mesh, PartitionSpec(*entries[: real.ndim]))
        real, layout = (
            jax.sharding.reshard(real, rows),
            NamedSharding(mesh, PartitionSpec(*entries)),
        )
    dims = tuple(range(real.ndim))
    return jnp.where(jax.lax.broadcast_in_dim(real, new.shape, dims, out_sharding=layout), new, old)
