# SPDX-License-Identifier: Apache-2.0
"""What ``shardax plan`` plans: a step of the user's own, or the training step of a preset."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from shardax.cli.inputs import load_target
from shardax.cli.presets import decoder_optimizer, find_preset
from shardax.core.errors import CommandError
from shardax.core.rng import Rngs
from shardax.models import Decoder, next_token_loss
from shardax.partition.findings import did_you_mean
from shardax.plan import NamedShape
from shardax.transforms.autodiff import value_and_grad
from shardax.transforms.jit import jit

_OPTIONS = ("tie", "fix", "meshes", "mesh_axes")
_KEYS = ("step", "args", *_OPTIONS)


@dataclass(frozen=True)
class PlannedStep:
    """A step with its arguments.

    Attributes:
        step: The function that is compiled.
        args: Its positional arguments, as ``plan.compare`` takes them.
        options: Those of ``plan.search`` that belong to the step: ``tie``, ``fix``, ``meshes``,
            ``mesh_axes``.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@jit(donate_argnums=(0, 1))
def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """The step of ``shardax train``: loss, gradients, update."""
    loss, gradients = value_and_grad(next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def preset_step(name: str, batch: int | None = None, seq_len: int | None = None) -> PlannedStep:
    """Returns the training step of a preset, whose model and optimizer hold no array.

    Args:
        name: The preset.
        batch: Windows a step, instead of the preset's.
        seq_len: Bytes a window, instead of the preset's.

    Raises:
        CommandError: If there is no such preset; or a size is not positive.

    Example:
        >>> planned = preset_step("tiny", batch=8)
        >>> planned.args[2]["inputs"].shape
        (8, 64)
    """
    from shardax.train import Optimizer

    preset = find_preset(name)
    rows = preset.batch_size if batch is None else batch
    length = preset.seq_len if seq_len is None else seq_len
    for option, size in (("batch", rows), ("seq-len", length)):
        if size < 1:
            raise CommandError(f"--{option} {size}: give at least 1.")
    model = Decoder(preset.model, rngs=Rngs(params=0))
    optimizer = Optimizer(model, decoder_optimizer(preset.steps, preset.learning_rate))
    tokens = NamedShape((rows, length), "int32", ("batch", "seq"))
    return PlannedStep(train_step, (model, optimizer, {"inputs": tokens, "targets": tokens}))


def own_step(target: str, batch: int | None = None) -> PlannedStep:
    """Returns the step that a function of the user's makes.

    Args:
        target: ``module:name`` of a function that returns ``(step, args)``; or a mapping or
            dataclass with ``step`` and ``args``, and if wanted ``tie``, ``fix``, ``meshes`` and
            ``mesh_axes``, as ``plan.search`` takes them.
        batch: What it is called with as ``batch``; None to call it without.

    Raises:
        CommandError: If there is no such function, it takes no batch, or returns something else.
    """
    found = load_target(target)
    if not callable(found):
        raise CommandError(
            f"{target!r} is {found!r}, which cannot be called. Name a function that returns "
            "(step, args)."
        )
    given: dict[str, Any] = {} if batch is None else {"batch": batch}
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        how = f"as {target.partition(':')[2]}(batch={batch})" if given else "without arguments"
        raise CommandError(f"{target!r} is called {how}: {error}.") from error
    return as_planned(found(**given), target)


def as_planned(made: Any, target: str) -> PlannedStep:
    """Returns what a user's function made, checked.

    Args:
        made: What it returned.
        target: What errors call the function.

    Raises:
        CommandError: If it is no step with arguments; says what it should be.

    Example:
        >>> as_planned((abs, [1]), "my:make").args
        (1,)
    """
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        names = [each.name for each in dataclasses.fields(made)]
        made = {name: getattr(made, name) for name in names}
    if isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) == 2:
        made = dict(zip(("step", "args"), made, strict=True))
    if not isinstance(made, Mapping) or not {"step", "args"} <= set(made):
        raise CommandError(
            f"{target!r} returned {type(made).__name__}. It should return (step, args), or a "
            f"mapping or dataclass with step and args, and if wanted {', '.join(_OPTIONS)}."
        )
    parts = dict(cast("Mapping[str, Any]", made))
    for name in parts:
        if name not in _KEYS:
            raise CommandError(
                f"{target!r} returned something with {name!r}; there are {', '.join(_KEYS)}."
                f"{did_you_mean(name, _KEYS)}"
            )
    if not callable(parts["step"]) or not isinstance(parts["args"], (tuple, list)):
        raise CommandError(
            f"{target!r} returned step={parts['step']!r} and args of type "
            f"{type(parts['args']).__name__}. step is the function that is compiled, and args the "
            "tuple of its positional arguments."
        )
    options = {name: parts[name] for name in _OPTIONS if parts.get(name) is not None}
    return PlannedStep(parts["step"], tuple(parts["args"]), options)
