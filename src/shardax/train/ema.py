# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of a model's parameters.

After each update ``average = decay * average + (1 - decay) * parameter``. As an optimizer's, the
step of an average may be too small for its dtype: averages of bfloat16 parameters have masters in
float32, and the model of averages holds them rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax import Module, Param, State, iter_variables, jit
from shardax.errors import TransformError
from shardax.extend import (
    Options,
    PyTree,
    describe_plain_arrays,
    format_path,
    is_eager,
    raise_if_any,
)
from shardax.train.errors import TrainError
from shardax.train.optimizer import Optimizer, laid_out_as


class EMA(Module):
    """Exponential moving average of a model's parameters, as a model.

    What is no parameter (statistics of batches, random streams) is that of the trained model after
    the last update.

    Args:
        model: The model that is trained. It is copied, with arrays of the copy's own; lazy
            parameters stay lazy and will have the same values.
        decay: In ``[0, 1)``; or a function of the number of updates before this one, an int32 of
            shape (), such as ``lambda step: jnp.minimum(0.999, (1 + step) / (10 + step))``.
        wrt: Filter of the Variables to average.

    Attributes:
        model: The copy; its parameters are the averages.
        average: The ``Optimizer`` that moves the copy's parameters: ``average.step`` counts
            updates, ``average.masters`` are the averages of narrow parameters in float32.

    Raises:
        TransformError: If ``decay`` is neither.
        TrainError: If no Variable matches ``wrt``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Line(sx.Module):
        ...     def __init__(self):
        ...         self.slope = sx.Param(jnp.zeros(()))
        >>> line = Line()
        >>> ema = EMA(line, decay=0.75)
        >>> line.slope.value = jnp.array(4.0)
        >>> ema.update(line)
        >>> float(ema.model.slope), int(ema.average.step)
        (1.0, 1)
    """

    def __init__(
        self, model: PyTree, decay: float | Callable[[Any], Any] = 0.999, *, wrt: Any = Param
    ) -> None:
        is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
        fits = callable(decay) or (is_number and 0 <= decay < 1)
        expected = "a number in [0, 1), or a function of the number of updates"
        options = Options(TransformError)
        options.check("decay", decay, fits, expected, "For instance EMA(model, decay=0.999).")

        if not any(True for _ in iter_variables(model, wrt)):
            filter_text = getattr(wrt, "__name__", repr(wrt))
            raise TrainError(
                f"No Variable of the {type(model).__name__} matches wrt={filter_text}, so there is "
                f"nothing to average.{describe_plain_arrays(model)} Choose others: "
                "`EMA(model, decay, wrt=filter)`."
            )

        # With arrays of its own, as a train step may donate those of both.
        self.model = copy.deepcopy(model)
        tx = _MovingAverage(decay if callable(decay) else float(decay))
        self.average = Optimizer(self.model, tx, wrt, master_dtype=jnp.float32)

    def update(self, model: object) -> None:
        """Takes the values of the trained model in.

        Args:
            model: The model, with the structure that it had when the EMA was made.

        Raises:
            TrainError: If Variables were added, removed or reshaped; nothing is changed.
        """
        if not is_eager():
            self._take_in(model)
            return

        # One program, as by a function of ``jax.jit``: one operation after the other takes 30 to 90
        # times as long.
        variables = [variable for _, variable in iter_variables(self)] if _has_layouts() else []
        before = [variable.value for variable in variables]
        _take_in_compiled(self, model)

        # Over Auto axes the compiler chooses where results are.
        for variable, value in zip(variables, before, strict=True):
            if not _are_laid_out_alike(value, variable.value):
                variable.value = jax.tree.map(laid_out_as, value, variable.value)

    def _take_in(self, model: object) -> None:
        """Takes the values of the trained model in, one operation after the other."""
        means, values = (dict(iter_variables(tree)) for tree in (self.model, model))
        wrong = [format_path(path) for path in means.keys() ^ values.keys()]
        wrong += [
            format_path(path)
            for path in means.keys() & values.keys()
            if _form(means[path].value) != _form(values[path].value)
        ]
        raise_if_any(
            TrainError,
            sorted(wrong),
            "The model is not the one whose average this is any more, as Variables were added, "
            "removed or reshaped; nothing was changed: ",
            ". Make a new one: EMA(model, decay).",
        )

        chosen = dict(iter_variables(self.model, self.average.wrt))
        self.average.update(State.from_flat({path: values[path].value for path in chosen}))
        for path in means.keys() - chosen.keys():
            means[path].value = jax.tree.map(laid_out_as, means[path].value, values[path].value)


_take_in_compiled = jit(EMA._take_in)


def _has_layouts() -> bool:
    """Whether an array can be laid out in more than one way."""
    return jax.device_count() > 1


def _are_laid_out_alike(old: PyTree, new: PyTree) -> bool:
    """Whether arrays surely have the same sharding."""
    # The results of a program share their sharding objects, so a steady call compares no more.
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(
        isinstance(before, jax.Array) and before.sharding is after.sharding
        for before, after in pairs
    )


class _MovingAverage(NamedTuple):
    """Transformation of the values to average, in place of gradients."""

    decay: Any  # a number, or a function of the number of updates

    def init(self, params: object):
        """Returns the number of updates, if the decay depends on it."""
        return jnp.zeros((), jnp.int32) if callable(self.decay) else ()

    def update(self, values, count, params) -> tuple[PyTree, PyTree]:
        """Returns the steps from the averages towards values, and the count."""
        decay: Any = self.decay(count) if callable(self.decay) else self.decay
        share = 1 - decay

        def step(value, average) -> PyTree:
            gap = jnp.asarray(value, average.dtype) - average
            return gap * share if jnp.issubdtype(gap.dtype, jnp.inexact) else gap

        return jax.tree.map(step, values, params), count + 1 if callable(self.decay) else ()


def _form(value: object):
    """The structure, shapes and dtypes of a Variable's arrays."""
    leaves, structure = jax.tree.flatten(value)
    return structure, [(jnp.shape(leaf), leaf.dtype) for leaf in leaves]
