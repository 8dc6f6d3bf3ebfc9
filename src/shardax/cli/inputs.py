# SPDX-License-Identifier: Apache-2.0
"""Models and rules of the user's own, as the command line names them.

A *target* is ``module:name``, something in a Python module, which is looked for in the working
folder too. Rules are a target; or a JSON file: a list of pairs of a name and mesh axes, or an
object from names to mesh axes; or a TOML file (``plan.rules_file``), which may name the mesh too,
and hold several layouts, of which ``FILE.toml:NAME`` is one.

Devices and meshes as the command line names them.

Presets: named sizes of model and training.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from shardax._core.errors import ShardaxError
from shardax._core.object import Object
from shardax.models import DecoderConfig
from shardax.partition.errors import RulesError, did_you_mean
from shardax.partition.inventory import TreeInventory
from shardax.partition.rules import Rules
from shardax.plan.rules_file import NamedRules, parse_rules


class CommandError(ShardaxError, ValueError):
    """A command line asks for something that cannot be done; the message says what would."""


# --- Inputs ---


def is_target(text: str) -> bool:
    """Whether a text is of the form ``module:name``.

    Example:
        >>> is_target("my_package.models:make_model"), is_target("runs/demo"), is_target("tiny")
        (True, False, False)
    """
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def load_target(text: str) -> Any:
    """Imports what a target names.

    Args:
        text: ``module:name``.

    Raises:
        CommandError: If there is no such module, or no such name in it. What the module itself
            raises comes out as it is.

    Example:
        >>> load_target("shardax.models:DECODER_RULES").names[0]
        'batch'
    """
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that this one needs
        raise CommandError(
            f"{text!r}: there is no module {error.name!r}, neither installed nor in the folder "
            f"{os.getcwd()}."
        ) from error
    if not hasattr(module, name):
        near = did_you_mean(name, [known for known in vars(module) if not known.startswith("_")])
        raise CommandError(f"{text!r}: the module {module_name} has no {name!r}.{near}")
    return getattr(module, name)


def load_model(text: str) -> Any:
    """Makes the model that a target names.

    Args:
        text: ``module:name`` of a function or class that is called without arguments, or of a
            model.

    Returns:
        A Module, or any tree that ``shardax.check`` takes.

    Raises:
        CommandError: As ``load_target``; or if it holds no array.
    """
    found = load_target(text)
    made = found if isinstance(found, Object) or not callable(found) else found()
    if not TreeInventory(made).leaves:
        raise CommandError(
            f"{text!r} gave {made!r} of type {type(made).__name__}, in which there is no array. "
            "Name a function without arguments that returns a model, or a model."
        )
    return made


def load_rules(text: str) -> NamedRules:
    """Reads rules, and the mesh that they are meant for if they name one.

    Args:
        text: A target, or the path of a JSON file or of a TOML file; after the latter, with a
            colon, the name of one of its layouts.

    Raises:
        CommandError: If there are none, or several, or they are malformed; names the file.
    """
    name, toml, layout = text.partition(".toml")
    if toml and (not layout or layout.startswith(":")):
        return _one(text, load_layouts(name + toml), layout[1:])
    found = load_target(text) if is_target(text) else _read(text, json.loads)
    try:
        return NamedRules(Path(text).stem, Rules(found))
    except RulesError as error:
        raise CommandError(f"--rules {text}: {error}") from error


def load_layouts(file: str) -> tuple[NamedRules, ...]:
    """Reads all layouts of a TOML file.

    Args:
        file: Its path.

    Raises:
        CommandError: If it cannot be read, or something in it is wrong; names file and key.
    """
    try:
        return parse_rules(_read(file, str), file, Path(file).stem)
    except RulesError as error:
        raise CommandError(f"--rules {error}") from error


def _read(file: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CommandError(
            f"--rules {file}: there is no such file; and it is no target, module:name."
        ) from error
    except (OSError, ValueError) as error:  # no JSON, or no text
        raise CommandError(f"--rules {file}: cannot be read: {error}.") from error


def _one(text: str, layouts: Sequence[NamedRules], name: str) -> NamedRules:
    """The layout of a name, or the only one."""
    names = [layout.name for layout in layouts]
    if not name and len(layouts) == 1:
        return layouts[0]
    if name in names:
        return layouts[names.index(name)]
    listed = ", ".join(map(repr, names))
    if not name:
        raise CommandError(
            f"--rules {text}: it holds {len(names)} layouts: {listed}. Name one, as in --rules "
            f"'{text}:{names[0]}'."
        )
    raise CommandError(
        f"--rules {text!r}: the file holds no layout {name!r}, but {listed}."
        f"{did_you_mean(name, names)}"
    )


# --- Devices ---


def use_devices(count: int | None) -> None:
    """Makes this process use ``count`` virtual CPU devices; None leaves JAX's own choice.

    Args:
        count: Number of devices.

    Raises:
        CommandError: If JAX already runs with another number of devices.
    """
    if count is None:
        return
    if count < 1:
        raise CommandError(f"--devices {count}: give at least 1.")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend is up: fine if it is what was asked for
        pass
    if jax.device_count() != count:
        raise CommandError(
            f"--devices {count}, but JAX already runs with {jax.device_count()} in this process. "
            f"Set it in a new process."
        )


def mesh_sizes(text: str, axes: Sequence[str] | None = None) -> dict[str, int]:
    """Reads the sizes of mesh axes from a text such as ``data=2,model=4``.

    Args:
        text: Comma-separated ``name=size``.
        axes: The names that rules use. One that the text leaves out has size 1. None: any names.

    Raises:
        CommandError: If the text cannot be read, or names another axis.

    Example:
        >>> mesh_sizes("model=4", ("data", "model"))
        {'model': 4, 'data': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().isdigit() or int(size) < 1:
            raise CommandError(
                f"--mesh {text!r}: {part!r} is not name=size, as in --mesh data=2,model=4."
            )
        if axes is not None and name.strip() not in axes:
            raise CommandError(
                f"--mesh {text!r}: no rule lays anything out over an axis {name.strip()!r}; the "
                f"axes are {', '.join(axes)}.{did_you_mean(name.strip(), axes)}"
            )
        if name.strip() in sizes:
            raise CommandError(f"--mesh {text!r}: the axis {name.strip()!r} is given twice.")
        sizes[name.strip()] = int(size)
    sizes.update({name: 1 for name in axes or () if name not in sizes})
    return sizes


def parse_mesh(text: str, axes: Sequence[str] | None) -> Mesh | None:
    """Makes the mesh that a text such as ``data=2,model=4`` describes, with Auto axes.

    Args:
        text: Comma-separated ``name=size``; empty: no mesh.
        axes: As in ``mesh_sizes``.

    Raises:
        CommandError: If the text cannot be read, names another axis, or the devices do not suffice.

    Example:
        >>> dict(parse_mesh("data=1", ("data", "model")).shape)
        {'data': 1, 'model': 1}
    """
    if not text:
        return None
    sizes = mesh_sizes(text, axes)
    needed = math.prod(sizes.values())
    if needed > jax.device_count():
        raise CommandError(
            f"--mesh {text} needs {needed} devices, but there are {jax.device_count()}. For "
            f"virtual CPU devices add --devices {needed}."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )


# --- Presets ---


@dataclass(frozen=True)
class Preset:
    """A model and how to train it.

    Attributes:
        model: The decoder's configuration.
        steps: Optimizer steps.
        batch_size: Windows a step.
        seq_len: Bytes a window.
        learning_rate: Peak learning rate.
        eval_batches: Held-out batches an evaluation reads, spread evenly over the text.
    """

    model: DecoderConfig
    steps: int
    batch_size: int
    seq_len: int
    learning_rate: float
    eval_batches: int


def _decoder(layers: int, embed: int, heads: int, kv_heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=256,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=embed // heads,
        mlp_dim=4 * embed,
        tied_head=True,
    )


PRESETS = {
    "tiny": Preset(_decoder(2, 64, 4, 4), 40, 16, 64, 1e-2, 4),
    "demo": Preset(_decoder(3, 128, 8, 4), 240, 16, 128, 6e-3, 64),
    "small": Preset(_decoder(8, 512, 8, 4), 20_000, 64, 512, 1e-3, 64),
}


def find_preset(name: str) -> Preset:
    """Returns a preset by name.

    Raises:
        CommandError: If there is none; the message lists them.

    Example:
        >>> find_preset("demo").model.vocab_size
        256
    """
    if name not in PRESETS:
        raise CommandError(f"--preset {name!r} is unknown; there are: {', '.join(PRESETS)}.")
    return PRESETS[name]


def decoder_optimizer(steps: int, learning_rate: float) -> Any:
    """Returns the transformation of optax that ``shardax train`` trains with.

    Args:
        steps: Optimizer steps of the run.
        learning_rate: The peak.
    """
    import optax

    warmup = max(1, steps // 15)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 20
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
