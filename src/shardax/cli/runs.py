# SPDX-License-Identifier: Apache-2.0
"""Folders of training runs, and the commands to read them.

``run.json`` holds the settings of a run; beside it are ``log.jsonl``, ``report.html`` and
``checkpoints/``. ``shardax show`` prints the parameters of a run without loading them, ``shardax
sample`` continues prompts with a trained or published model, ``shardax verify`` checks the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import jax
import tyro

from shardax import (
    OptState,
    PathContains,
    Rngs,
    Rules,
    models,
    nn,
    partition,
    select,
    surgery,
    train,
    view,
)
from shardax._files import write_whole
from shardax.cli import inputs
from shardax.errors import CheckpointDamagedError, SelectionError, TrainError
from shardax.extend import Options, PyTree, ScopeSettings
from shardax.models import DECODER_RULES, Decoder, DecoderConfig
from shardax.models.files import read_json
from shardax.models.generating.checks import max_positions_of
from shardax.models.weights.hub import TOKENIZER_FILES, find_directory
from shardax.train.checkpoint_files import read_description, verify
from shardax.train.run_folder import differences, settings_of
from shardax.view.display import html_fragment
from shardax.view.page import html_page

if TYPE_CHECKING:
    from shardax.plan.rules_file import NamedRules

# Splits an optimizer's state over the mesh axis data, by the dimension embed.
ZERO = {OptState: {"embed": "data"}}

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
KERNEL_KINDS = ("attention", "experts", "loss", "gated", "norms")
_PRECISIONS = ("fp8", "fp8-delayed", "none")
LARGEST_BATCH = 2**28  # bytes that a step reads
_FORMAT = 1


@dataclass(frozen=True)
class RunSettings:
    """Everything behind a run's numbers, and its layout."""

    model: DecoderConfig
    text: str | None  # path, or None for Python's standard library
    batch_size: int  # windows a step
    seq_len: int  # bytes a window
    steps: int
    learning_rate: float  # the peak
    seed: int  # of parameters and data order
    mesh: str  # as text; "" for one device
    devices: int | None  # virtual CPU devices
    eval_batches: int  # that an evaluation reads
    checkpoint_every: int
    zero: bool = False  # whether the optimizer's state is split over the mesh axis data too
    rules: dict[str, Any] | None = None  # other than the decoder's: ``rules_file.entry_to_data``
    source: str | None = None  # of a published model, which is trained instead of the decoder
    lora: int | None = None  # rank of its adapters; None to train all of it
    # Kernels, as for ``sx.kernels``.
    attention: str | None = None
    experts: str | None = None
    loss: str | None = None
    gated: str | None = None
    norms: str | None = None
    precision: str | None = None  # of products, by parts of paths, as ``--precision`` takes them

    @property
    def layout(self) -> NamedRules | None:
        """One's own layout; None for the decoder's rules."""
        if self.rules is None:
            return None
        from shardax.plan.rules_file import entry_from_data

        return entry_from_data(self.rules, RUN_FILE, "rules", "rules")

    @property
    def layout_rules(self) -> Rules:
        """Rules for the model's layout."""
        return DECODER_RULES if self.layout is None else self.layout.rules

    @property
    def mesh_axes(self) -> tuple[str, ...] | None:
        """The possible mesh axes; None: any, with the user's own rules."""
        return DECODER_RULES.mesh_axes if self.rules is None else None

    @property
    def overrides(self) -> Any:
        """Exceptions from the rules, or None."""
        return ZERO if self.zero else None if self.layout is None else self.layout.overrides

    @property
    def kernels(self) -> dict[str, Any]:
        """The kernel of each kind, None for XLA's."""
        return {kind: getattr(self, kind) for kind in KERNEL_KINDS}

    def check(self, of: str = "") -> None:
        """Raises CommandError for settings that cannot be, alone or together.

        Args:
            of: The file that the settings are from; empty: options of a command.
        """
        _check_settings(type(self), vars(self), of)
        _check_settings(type(self.model), vars(self.model), of)

        for kind, name in self.kernels.items():
            names = ScopeSettings.choices(kind)
            Options(inputs.CommandError, of).choice(kind, name, (None, *names))

        if self.precision is not None:
            _precisions(self.precision, of)
        for problem in self._conflicts():
            raise inputs.CommandError(f"{of}: {problem}" if of else problem)

        if self.batch_size * self.seq_len > LARGEST_BATCH:
            raise inputs.CommandError(
                f"{of or '--batch-size and --seq-len'}: {self.batch_size} x {self.seq_len} bytes a "
                f"step are more than {LARGEST_BATCH:,}; give fewer."
            )

    def _conflicts(self) -> Iterator[str]:
        """Yields the problems of settings that are right alone, but not together."""
        if self.zero and not self.mesh:
            yield (
                "--zero splits the optimizer's state over the mesh axis data, but there is no "
                "mesh; name one, such as --mesh data=2,model=4."
            )
        if self.rules is not None and not self.mesh:
            yield (
                "--rules names no mesh, and without one there is nothing to lay out; name it, such "
                "as --mesh data=2,model=4."
            )

        if self.lora is not None and self.source is None:
            yield "--lora needs --from, the model that the adapters are for."
        if self.lora is not None and self.precision is not None:
            yield (
                f"--precision {self.precision} sets layers that --lora replaces; give one of them."
            )

        if self.text == "":
            yield "text='' is no path."

    def make_model(self, mesh: object = None) -> Any:
        """Makes the decoder, lazy, or loads the published model."""
        if self.source is None:
            return self._with_precision(Decoder(self.model, rngs=Rngs(params=self.seed)))
        streams = {"rngs": Rngs(self.seed), "rules": self.layout_rules}
        model = load_causal(self.source, mesh=mesh, **streams)
        model.train()
        if self.lora is None:
            return self._with_precision(model)
        linears = select(model).at_instances_of((nn.Linear, nn.MoE))  # the router stays
        chosen = linears.where(lambda path, _: path[0] in ("layers", "rest"))
        return surgery.lora(chosen, self.lora, rngs=Rngs(self.seed))

    def make_optimizer(self, model: Any) -> train.Optimizer:
        """Returns the optimizer of the model, or of its adapters alone."""
        transformation = inputs.decoder_optimizer(self.steps, self.learning_rate)
        if self.lora is None:
            return train.Optimizer(model, transformation)
        return train.Optimizer(model, transformation, "lora")

    def _with_precision(self, model: Any) -> Any:
        """Sets the precision of chosen products."""
        if self.precision is None:
            return model
        try:
            return surgery.with_precision(model, _precisions(self.precision))
        except SelectionError as error:
            raise inputs.CommandError(f"--precision {self.precision}: {error}") from error


def _precisions(text: str, of: str = "") -> dict[Any, str | None]:
    """Reads precisions by parts of paths, such as ``attn=none,layers=fp8``."""
    precisions: dict[Any, str | None] = {}
    for entry in (text if "=" in text else f"layers={text}").split(","):
        part, _, name = entry.strip().partition("=")
        if name not in _PRECISIONS or not part:
            raise inputs.CommandError(
                f"{of or '--precision'} {text}: {entry!r} is no part of a path with one of "
                f"{', '.join(_PRECISIONS)}. For all layers: --precision fp8. Without attention: "
                "--precision attn=none,layers=fp8"
            )
        precisions[PathContains(part)] = None if name == "none" else name
    return precisions


def rules_data(layout: NamedRules) -> dict[str, Any]:
    """Returns a layout as it is kept in the run's folder, without its mesh."""
    from shardax.plan.rules_file import entry_to_data

    return entry_to_data(replace(layout, mesh=None))


def load_causal(source: str, **options: Any) -> Any:
    """Loads a published model for predicting the next token."""
    model = models.from_pretrained(source, **options)
    if not model.config.causal or model.config.head != "tokens":
        raise inputs.CommandError(f"--from {source}: it does not predict the next token.")
    return model


def published_context(model: PyTree) -> int | None:
    """Longest text of a published model, in tokens, by its own files."""
    content = json.loads(getattr(model.config, "source", None) or "{}")
    longest = content.get("text_config", content).get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _check_settings(kind: type, settings: Mapping[str, object], of: str) -> None:
    hints = get_type_hints(kind)
    for name, value in settings.items():
        hint = hints.get(name, Any)
        allowed = {get_origin(member) or member for member in get_args(hint) or (hint,)}
        if float in allowed:
            allowed.add(int)
        if hint is not Any and type(value) not in allowed:
            raise inputs.CommandError(
                f"{of}: {name}={value!r} is not {getattr(hint, '__name__', hint)}."
            )
    inputs.check_values(settings, of=of)


def write_settings(directory: Path, settings: RunSettings) -> None:
    """Writes ``run.json``, replacing it in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {"format": _FORMAT, **asdict(settings)}
    write_whole(directory / RUN_FILE, json.dumps(record, indent=2, default=str) + "\n")


def read_settings(directory: Path) -> RunSettings:
    """Reads ``run.json``."""
    file = directory / RUN_FILE
    if not file.is_file():
        raise inputs.CommandError(
            f"{directory} holds no run: there is no {RUN_FILE}. Start one with: shardax train "
            f"--out {directory}"
        )

    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.pop("format", None) != _FORMAT:
            raise inputs.CommandError(
                f"{file} was written by another version of shardax; train anew or use that version."
            )
        model = record.pop("model")
        _check_settings(RunSettings, record, str(file))
        _check_settings(DecoderConfig, model, str(file))

        settings = RunSettings(model=DecoderConfig(**model), **record)
        settings.check(str(file))
        _ = settings.layout_rules  # which raises if they are malformed
        if settings.mesh:
            inputs.mesh_sizes(settings.mesh, settings.mesh_axes)
        return settings
    except inputs.CommandError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise inputs.CommandError(
            f"{file} cannot be read ({error}); it was changed, or is not a run's."
        ) from error


def find_run(path: Path) -> tuple[Path, int | None]:
    """Returns a path's run, and the step of a checkpoint's path."""
    path = Path(os.path.realpath(path))  # which, unlike resolve(), passes loops of links on
    if (path / RUN_FILE).is_file():
        return path, None
    if path.name == CHECKPOINTS and (path.parent / RUN_FILE).is_file():
        return path.parent, None
    run = path.parent.parent
    is_step = path.name.isascii() and path.name.isdecimal() and len(path.name) < 20
    if path.parent.name == CHECKPOINTS and is_step and (run / RUN_FILE).is_file():
        return run, int(path.name)
    raise inputs.CommandError(
        f"{path} is no run (it has no {RUN_FILE}) and no checkpoint of one "
        f"(RUN/{CHECKPOINTS}/STEP)."
    )


class TextCodec:
    """Text as a model's tokens: by its tokenizer, or byte by byte."""

    def __init__(self, source: str | None, vocab_size: int, tokenizer: str | None = None) -> None:
        self.source, self.vocab_size, self.tokenizer = source, vocab_size, None
        place = source if tokenizer is None else tokenizer
        if place is not None:
            folder = find_directory(place, TOKENIZER_FILES)
            if tokenizer is not None or (folder / "tokenizer.json").is_file():
                self.tokenizer = models.load_tokenizer(folder)
            elif vocab_size < 256:
                raise inputs.CommandError(
                    f"--from {source}: it has no tokenizer.json, and its {vocab_size} tokens are "
                    "too few for bytes."
                )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns tokens, with start tokens unless told otherwise."""
        if self.tokenizer is None:
            return list(text.encode())
        tokens = self.tokenizer.encode(text, add_special_tokens=special).ids
        if tokens and max(tokens) >= self.vocab_size:
            raise inputs.CommandError(
                f"The tokenizer has the token {max(tokens)}, but the model only {self.vocab_size} "
                "of them; it is another model's."
            )
        return tokens

    def decode(self, tokens: Any) -> str:
        """Returns the text of tokens, skipping tokens without text."""
        if self.tokenizer is None:
            return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def room(self, model: PyTree, prompt: Sequence[int], length: int) -> int:
        """Returns how many tokens, ``length`` at most, a model can add to a prompt."""
        most = max_positions_of(model)  # 0 where it learns none, and reads texts of any length
        return min(length, max(0, most - len(prompt))) if most else length

    def copy_files(self, folder: Path) -> None:
        """Copies the tokenizer files of the published model beside another one."""
        source = find_directory(str(self.source))
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                if file.is_file() and not (folder / file.name).exists():  # config.json is its own
                    shutil.copyfile(file, folder / file.name)

    def sample(
        self, model: PyTree, prompts: Sequence[Sequence[int]], length: int, **options: Any
    ) -> list[str]:
        """Continues prompts in one batch; options as for ``models.generate``."""
        model.eval()
        stop = () if self.tokenizer is None else _stop_tokens(self.source)
        rows = models.generate(model, prompts, max_new_tokens=length, stop=stop, **options)
        return [self.decode(row) for row in rows]


def _stop_tokens(source: str | None) -> Sequence[int]:
    """Returns the end tokens of texts, by the model's own files."""
    if source is None:
        return ()
    folder = find_directory(source, TOKENIZER_FILES)
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        settings = read_json(file) if file.is_file() else {}
        if (ends := settings.get("eos_token_id")) is not None:
            return ends if isinstance(ends, list) else [ends]
    return ()


@dataclass(frozen=True)
class Show:
    """Print the table of a run's parameters."""

    # Folder of a run, or of one of its checkpoints.
    path: Annotated[Path, tyro.conf.Positional]
    # Mesh to lay it out on, instead of the run's.
    mesh: str | None = None
    # Use this many virtual CPU devices, instead of the run's.
    devices: int | None = None
    # Also count what each part of the model takes, for a batch of the run's size.
    flops: bool = False
    # Write a page with the model and the table to this file.
    html: Path | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        inputs.check_values(vars(self))
        inputs.check_outputs({"html": self.html})
        folder, step = find_run(self.path)
        settings = read_settings(folder)
        if step is not None:
            read_description(train.Checkpoints(folder / CHECKPOINTS).path(step))  # it is there

        inputs.use_devices(settings.devices if self.devices is None else self.devices)
        text = settings.mesh if self.mesh is None else self.mesh
        mesh, rules = inputs.parse_mesh(text, settings.mesh_axes), settings.layout_rules
        model = settings.make_model()
        batch = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), "int32")
        table = view.table(model, mesh=mesh, rules=rules, inputs=[batch] if self.flops else None)

        print(table)
        if self.html is not None:
            planned = partition.abstract(model, mesh, rules)
            page = html_page(folder.name, html_fragment(planned) + table.html())
            write_whole(self.html, page)
            print(f"page: {self.html}")
        return 0


@dataclass(frozen=True)
class Sample:
    """Continue prompts with a trained run, or with a published model."""

    # Folder of a run, or of one of its checkpoints.
    checkpoint: Annotated[Path | None, tyro.conf.Positional] = None
    # Instead of a run: a published model's folder (config.json and safetensors), or its name on the
    # hub.
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    # Folder with a tokenizer.json, or name on the hub, if the model is published without one.
    tokenizer: str | None = None
    # Text to continue; several are continued together.
    prompt: tuple[str, ...] = ("def ",)
    # How many tokens to add to each; of a run without a tokenizer, bytes.
    length: int = 300
    # 0 takes the likeliest token; 1 samples from the model's distribution.
    temperature: float = 0.7
    # Seed of the sampling.
    seed: int = 0

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        inputs.check_values(vars(self))
        if not self.prompt or not all(self.prompt):
            raise inputs.CommandError("--prompt is empty; give at least one byte to continue.")
        if (self.checkpoint is None) == (self.source is None):
            raise inputs.CommandError("Name one model: the folder of a run, or --from FOLDER.")

        model, codec, context = self._restored() if self.source is None else self._published()
        prompts = [codec.encode(text) for text in self.prompt]
        for text, tokens in zip(self.prompt, prompts, strict=True):
            if not tokens:
                raise inputs.CommandError(f"--prompt {text!r}: the tokenizer finds no token in it.")
            if context is not None and len(tokens) > context:
                start = f"{text[:20]!r}{'...' if len(text) > 20 else ''}"
                raise inputs.CommandError(
                    f"--prompt {start} has {len(tokens):,} tokens, but the model was trained on "
                    f"texts of at most {context:,}. Give the end of it, of so many tokens."
                )

        options = {"temperature": self.temperature, "seed": self.seed}
        print("\n\n".join(codec.sample(model, prompts, self.length, **options)))
        return 0

    def _restored(self) -> tuple[Any, TextCodec, int | None]:
        """Returns a run's model, its text codec, its context."""
        assert self.checkpoint is not None
        folder, step = find_run(self.checkpoint)
        settings = read_settings(folder)
        if settings.source is None and self.tokenizer is not None:
            raise inputs.CommandError(
                "--tokenizer is of published models; this run's is read by bytes."
            )

        with contextlib.closing(train.Checkpoints(folder / CHECKPOINTS)) as checkpoints:
            if step is None and not checkpoints.all_steps():
                raise inputs.CommandError(f"{folder} has no checkpoint yet.")
            model = settings.make_model()
            checkpoints.restore((model,), step, partial=True)

        # What was fine-tuned on short texts still reads longer ones.
        context = settings.seq_len if settings.source is None else published_context(model)
        return model, TextCodec(settings.source, model.config.vocab_size, self.tokenizer), context

    def _published(self) -> tuple[Any, TextCodec, int | None]:
        """Returns a published model, its text codec, its context."""
        model = load_causal(str(self.source))
        size = model.config.vocab_size
        if self.tokenizer is None and size != 256:  # else bytes, of which there are so many
            folder = find_directory(str(self.source))
            if not (folder / "tokenizer.json").is_file():
                raise inputs.CommandError(
                    f"--from {self.source}: it has no tokenizer.json. Name a folder that has the "
                    "model's: --tokenizer FOLDER."
                )
        return model, TextCodec(self.source, size, self.tokenizer), published_context(model)


@dataclass(frozen=True)
class Verify:
    """Check the checkpoints, the settings and the log of a run."""

    details: ClassVar[str] = (
        "Every file of a checkpoint is compared with the checksum that was saved. The exit status "
        "is 0 if all is good, else 1."
    )

    # Folder of a run, or of one of its checkpoints.
    path: Annotated[Path, tyro.conf.Positional]

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        folder, only = find_run(self.path)
        settings = read_settings(folder)
        checkpoints = train.Checkpoints(folder / CHECKPOINTS)
        steps = checkpoints.all_steps() if only is None else [only]
        problems = [] if steps else ["there is no checkpoint yet"]
        for step in steps:
            problem = _report(checkpoints.path(step), settings if step == steps[-1] else None)
            problems += [f"step {step} {problem}"] if problem else []

        try:
            train.read_jsonl(folder / "log.jsonl")
        except (TrainError, FileNotFoundError) as error:
            problems.append(str(error))

        for problem in problems:
            print(f"problem: {problem}")
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        print(f"{folder}: {count if problems else 'all is good'}")
        return 1 if problems else 0


def _report(path: Path, settings: RunSettings | None) -> str:
    """Prints a good checkpoint, or returns the fault of a bad one."""
    try:
        description = verify(path)
    except CheckpointDamagedError as error:
        return f"is damaged: {error.problems}"

    saved, data = (description["extra"].get(part) for part in ("settings", "data"))
    if settings is not None and saved is not None:
        model = settings.make_model()
        present = settings_of(model, settings.make_optimizer(model))
        names = ("seed", "batch_size", "seq_len")
        saved |= {name: str(data[name]) for name in names}
        present |= {name: str(getattr(settings, name)) for name in names}
        if changed := differences(saved, present):
            return f"was trained with other settings than {RUN_FILE} has: {'; '.join(changed[:4])}"

    print(f"good: {path.name}, {len(description['files']) + 1} files")
    return ""
