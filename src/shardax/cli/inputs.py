# SPDX-License-Identifier: Apache-2.0
"""Inputs of commands: models, rules, meshes, devices, and presets.

A *target* is ``module:name``, something in a Python module, which is looked for in the working
folder too. Rules are a target; or a JSON file: a list of pairs of a name and mesh axes, or an
object from names to mesh axes; or a TOML file (``plan.rules_file``), which may name the mesh too,
and hold several layouts, of which ``FILE.toml:NAME`` is one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from shardax import Rules
from shardax.errors import PartitionError, ShardaxError
from shardax.extend import Object, TreeInventory, did_you_mean
from shardax.models import DecoderConfig

if TYPE_CHECKING:
    from shardax.plan.rules_file import NamedRules


class CommandError(ShardaxError, ValueError):
    """A command line cannot be run; the message names a remedy."""

    exit_status = 2


_FROZEN = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")

# What options and settings of runs may be: the least, the most, and in words.
_COUNT = (1, 2**31 - 1, "a number of at least 1")
_SIZE = (1, 2**28, f"a number from 1 to {2**28:,}")
_WIDTH = (1, 2**24, f"a number from 1 to {2**24:,}")
_SOME = (0, 2**31 - 1, "a number of at least 0")
_RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(("batch_size", "seq_len", "batch"), _SIZE),
    **dict.fromkeys(("steps", "top", "eval_batches"), _COUNT),
    **dict.fromkeys(("vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim"), _WIDTH),
    "mlp_dim": _WIDTH,
    "num_layers": (1, 10_000, "a number from 1 to 10,000"),
    "checkpoint_every": _SOME,
    "lora": (1, 2**16, f"a number from 1 to {2**16:,}"),
    "seed": (0, 2**32 - 1, f"a number from 0 to {2**32 - 1:,}"),
    "length": (0, 10**6, "a number from 0 to 1,000,000"),
    **dict.fromkeys(("devices", "processes"), (1, 4096, "a number from 1 to 4,096")),
    "process": (0, 4095, "a number from 0 to 4,095"),
    "restarts": _SOME,
    "start_timeout": (sys.float_info.min, 10**6, "a number of seconds above 0, such as 60"),
    "stop_within": (0, 10**6, "a number of seconds of at least 0"),
    "learning_rate": (sys.float_info.min, sys.float_info.max, "a finite number above 0"),
    "temperature": (0, sys.float_info.max, "a finite number of at least 0"),
    "large": (0, 2**40, "a finite number of at least 0"),
}


def check_values(values: Mapping[str, Any], *, of: str = "") -> None:
    """Refuses numbers of options or files out of range."""
    for name, value in values.items():
        low, high, range_text = _RANGES.get(name, (-math.inf, math.inf, ""))
        for number in value if isinstance(value, tuple) else (value,):
            if range_text and number is not None and not low <= number <= high:
                label = f"{of}: {name}=" if of else f"--{name.replace('_', '-')} "
                text = str(number) if abs(number) < 10**30 or number != number else "it"
                raise CommandError(f"{label}{text}: give {range_text}.")


def check_words(words: Sequence[str]) -> None:
    """Raises CommandError if a word is no text, or is empty."""
    option = ""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise CommandError(f"{word!r} is not UTF-8.") from None
        if "\0" in word:
            raise CommandError(f"{word!r} holds a NUL, which no text or path has.")

        name, _, value = (word or f"{option}=").partition("=")
        if len(word) > 4096 and name != "--prompt" != option:  # longer than any path
            raise CommandError(f"{word[:40]!r}... of {len(word):,} characters is too long.")

        is_empty = not word or (word.startswith("--") and word.endswith("=") and not value)
        # An empty prompt is refused by the command: one of several has no name before it.
        if is_empty and name not in ("--mesh", "--prompt") and option != "--prompt":
            raise CommandError(f"{name or 'an argument'} is given an empty text.")

        option = word if word.startswith("--") else option


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Raises CommandError if a path cannot be a file's."""
    for option, path in outputs.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise CommandError(f"--{option.replace('_', '-')} {path}: {problem}.")


def is_target(text: str) -> bool:
    """Whether a text is of the form ``module:name``."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def load_target(text: str) -> Any:
    """Imports the object named by a target."""
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise user_error(text, error) from error  # such as a module that this one needs
        raise CommandError(
            f"{text!r}: there is no module {missing!r}, neither installed nor in the folder "
            f"{os.getcwd()}."
        ) from error

    if not hasattr(module, name):
        hint = did_you_mean(name, [attr for attr in vars(module) if not attr.startswith("_")])
        raise CommandError(f"{text!r}: the module {module_name} has no {name!r}.{hint}")
    return getattr(module, name)


def call(function: Callable[..., Any], text: str, **arguments: Any) -> Any:
    """Calls the object named by a target."""
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:  # other arguments, or none that are known
        named = ", ".join(f"{name}={value}" for name, value in arguments.items())
        manner = f"as {text.partition(':')[2]}({named})" if arguments else "without arguments"
        raise CommandError(f"{text!r} is called {manner}: {error}.") from error
    try:
        return function(**arguments)
    except Exception as error:
        raise user_error(text, error) from error


def user_error(text: str, error: Exception) -> ShardaxError:
    """Error of a target's own code, with its part of the traceback."""
    if isinstance(error, ShardaxError):
        raise error  # it says what is wrong by itself
    frames = frames_of(text, error) or error.__traceback__
    passed = (__file__, importlib.__file__, *_FROZEN)
    while frames is not None and frames.tb_frame.f_code.co_filename in passed:
        frames = frames.tb_next
    lines = traceback.TracebackException(type(error), error, frames, compact=True).format(
        chain=False
    )
    return ShardaxError(
        f"{text!r} raised {type(error).__name__}; this traceback is of its own code:\n"
        + "".join(lines).rstrip()
    )


def frames_of(text: str, error: BaseException) -> TracebackType | None:
    """Frames of an error from a target's module on, if any."""
    file = getattr(sys.modules.get(text.partition(":")[0]), "__file__", None)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return frames


def load_model(text: str) -> Any:
    """Returns the model named by a target, or made by it."""
    target = load_target(text)
    model = target if isinstance(target, Object) or not callable(target) else call(target, text)
    if not TreeInventory(model).leaves:
        raise CommandError(
            f"{text!r} gave {model!r} of type {type(model).__name__}, in which there is no array. "
            "Name a function without arguments that returns a model, or a model."
        )
    return model


def load_rules(text: str) -> NamedRules:
    """Reads rules from a target, a JSON or a TOML file."""
    from shardax.plan.rules_file import NamedRules

    file, toml, name = text.partition(".toml")
    if not toml or name[:1] not in ("", ":"):
        pairs = load_target(text) if is_target(text) else _read(text, json.loads)
        try:
            return NamedRules(Path(text).stem, Rules(pairs))
        except PartitionError as error:
            raise CommandError(f"--rules {text}: {error}") from error
    layouts = {layout.name: layout for layout in load_layouts(file + toml)}
    name = name[1:]
    if not name and len(layouts) == 1:
        return next(iter(layouts.values()))
    if name in layouts:
        return layouts[name]
    listed = ", ".join(map(repr, layouts))
    if not name:
        raise CommandError(
            f"--rules {text}: it holds {len(layouts)} layouts: {listed}. Name one, as in --rules "
            f"'{text}:{next(iter(layouts))}'."
        )
    raise CommandError(
        f"--rules {text!r}: the file holds no layout {name!r}, but {listed}."
        f"{did_you_mean(name, list(layouts))}"
    )


def load_layouts(file: str) -> tuple[NamedRules, ...]:
    """Reads all layouts of a TOML file."""
    from shardax.plan.rules_file import parse_rules

    try:
        return parse_rules(_read(file, str), file, Path(file).stem)
    except PartitionError as error:
        raise CommandError(f"--rules {error}") from error
    except RecursionError as error:
        raise CommandError(f"--rules {file}: it is nested too deeply.") from error


def _read(file: str, parse: Callable[[str], object]) -> Any:
    try:
        return parse(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CommandError(
            f"--rules {file}: there is no such file; and it is no target, module:name."
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no text, or nested deeply
        raise CommandError(f"--rules {file}: cannot be read: {error}.") from error


def use_devices(count: int | None) -> None:
    """Makes this process use virtual CPU devices; None leaves JAX's own choice."""
    if count is None:
        return
    check_values({"devices": count})
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend is up: fine if it is what was asked for
        pass
    if jax.local_device_count() != count:
        raise CommandError(
            f"--devices {count}, but JAX already runs with {jax.local_device_count()} in this "
            f"process. Set it in a new process."
        )


def mesh_sizes(text: str, axes: Sequence[str] | None = None) -> dict[str, int]:
    """Reads sizes of mesh axes, such as ``data=2,model=4``."""
    # ``axes`` that the text leaves out have size 1; without them any names are allowed.
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        is_size = size.isascii() and size.isdecimal() and len(size) < 10 and int(size) > 0
        if not name.isidentifier() or not is_size:
            raise CommandError(
                f"--mesh {text!r}: {part!r} is not name=size, as in --mesh data=2,model=4."
            )

        if axes is not None and name not in axes:
            raise CommandError(
                f"--mesh {text!r}: no rule lays anything out over an axis {name!r}; the "
                f"axes are {', '.join(axes)}.{did_you_mean(name, axes)}"
            )
        if name in sizes:
            raise CommandError(f"--mesh {text!r}: the axis {name!r} is given twice.")
        sizes[name] = int(size)

    if math.prod(sizes.values()) >= 2**31:
        raise CommandError(f"--mesh {text!r} has {math.prod(sizes.values()):,} devices.")
    return sizes | {name: 1 for name in axes or () if name not in sizes}


def parse_mesh(text: str, axes: Sequence[str] | None) -> Mesh | None:
    """Makes a mesh with Auto axes; None for an empty text."""
    if not text:
        return None
    sizes = mesh_sizes(text, axes)
    needed = math.prod(sizes.values())
    if needed > jax.device_count():
        raise CommandError(
            f"--mesh {text} needs {needed} devices, but there are {jax.device_count()}. For "
            f"virtual CPU devices add --devices {-(-needed // jax.process_count())}."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:needed]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


@dataclass(frozen=True)
class Preset:
    """A model and its training settings."""

    model: DecoderConfig
    steps: int
    batch_size: int  # windows a step
    seq_len: int  # bytes a window
    learning_rate: float  # the peak
    eval_batches: int  # that an evaluation reads, spread evenly over the held-out text


def _decoder(layers: int, embed: int, heads: int, kv_heads: int) -> DecoderConfig:
    sizes: dict[str, Any] = {"num_layers": layers, "embed_dim": embed, "num_heads": heads}
    sizes |= {"num_kv_heads": kv_heads, "head_dim": embed // heads, "mlp_dim": 4 * embed}
    return DecoderConfig(vocab_size=256, **sizes, tied_head=True)


PRESETS = {
    "tiny": Preset(_decoder(2, 64, 4, 4), 40, 16, 64, 1e-2, 4),
    "demo": Preset(_decoder(3, 128, 8, 4), 240, 16, 128, 6e-3, 64),
    "small": Preset(_decoder(8, 512, 8, 4), 20_000, 64, 512, 1e-3, 64),
}


def find_preset(name: str) -> Preset:
    """Returns a preset by name."""
    if name not in PRESETS:
        raise CommandError(f"--preset {name!r} is unknown; there are: {', '.join(PRESETS)}.")
    return PRESETS[name]


_BETAS, _EPSILON, _WEIGHT_DECAY, _MOST_NORM = (0.9, 0.999), 1e-8, 0.01, 1.0


def decoder_optimizer(steps: int, learning_rate: float) -> Any:
    """Returns the optax transformation of ``shardax train``."""
    import optax

    warmup = warmup_steps(steps)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 20
    )
    b1, b2 = _BETAS
    return optax.chain(
        optax.clip_by_global_norm(_MOST_NORM),
        optax.adamw(schedule, b1, b2, _EPSILON, weight_decay=_WEIGHT_DECAY),
    )


def warmup_steps(steps: int) -> int:
    """Returns over how many steps the learning rate of ``shardax train`` rises."""
    return max(1, steps // 15)


def optimizer_facts(steps: int, learning_rate: float) -> dict[str, str]:
    """Returns the settings of ``decoder_optimizer``, by name, for people."""
    return {
        "optimizer": "AdamW",
        "learning rate": f"{learning_rate:g} at most",
        "schedule": f"from 0 over {warmup_steps(steps):,} steps, then by a cosine to "
        f"{learning_rate / 20:g}",
        "betas": ", ".join(f"{beta:g}" for beta in _BETAS),
        "epsilon": f"{_EPSILON:g}",
        "weight decay": f"{_WEIGHT_DECAY:g}",
        "gradients": f"clipped to a norm of {_MOST_NORM:g}",
    }
