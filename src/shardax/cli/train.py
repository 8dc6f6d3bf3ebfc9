# SPDX-License-Identifier: Apache-2.0
"""``shardax train``: a byte-level decoder, data and tensor parallel over a mesh."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from shardax import distributed, eval_shape, models, nn, partition, select, surgery, train, view
from shardax.cli import inputs
from shardax.cli.planned import PlannedRun
from shardax.cli.run_report import byte_entropy, show_shardings, write_report
from shardax.cli.runs import (
    KERNEL_KINDS,
    RunSettings,
    TextCodec,
    read_settings,
    rules_data,
    write_settings,
)
from shardax.cli.start_timings import StartTimings
from shardax.errors import DataError, LayerConfigError, LayerInputError, PathNotFoundError
from shardax.extend import mesh_text

_PROMPT, _SAMPLE_LENGTH = "def ", 240
_PROMPT_LENGTH = 16  # tokens of the held-out text, which a fine-tuned model continues
_SIZES = ("batch_size", "seq_len", "steps", "learning_rate")  # of a preset, or given
# Of one process.
PLACES = ("coordinator", "processes", "process", "start_timeout", "verbose_processes")
_MAY_DIFFER = ("out", "resume", "fallback", "override", "mesh", "rules", "devices", "zero")
_MAY_DIFFER += ("timings", "stop_within", "plan", *PLACES)
_DECIDES = {"preset": ("model", "eval_batches")}  # the settings that an option alone decides


@dataclass(frozen=True)
class Train:
    """Train a byte-level decoder on text."""

    # Size of model and training: tiny, demo or small.
    preset: str = "demo"
    # Sizes of the mesh axes data and model, such as data=2,model=4. Empty: one device.
    mesh: str = ""
    # Use this many virtual CPU devices, in each process.
    devices: int | None = None
    # Rules instead of the decoder's: a TOML file, such as shardax plan --write-rules makes (with
    # FILE.toml:NAME one of its layouts), whose mesh is used unless --mesh is given; a JSON file; or
    # module:name of rules.
    rules: str | None = None
    # A plan, written by shardax plan --json: train in its best layout (with PLAN.json:NAME in that
    # one), unless --rules or --mesh say another, and hold the run against it at the end.
    plan: str | None = None
    # Split the optimizer's state over the mesh axis data too, so that each device holds and updates
    # its part of it.
    zero: bool = False
    # Fine-tune the published model in this folder (config.json and safetensors), or of this name on
    # the hub, instead of a new decoder. Text goes through its tokenizer.json, or is read as bytes.
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    # Train adapters of this rank around the layers' matrices, instead of all parameters.
    lora: int | None = None
    # A text file or a folder of them. By default the source of Python's standard library.
    text: Path | None = None
    # Folder of the run.
    out: Path = Path("runs/demo")
    # Go on with the run in the folder, with the settings it was started with; only mesh, rules,
    # devices and zero may be others.
    resume: bool = False
    # Go on from the newest good checkpoint if the last one is damaged, rather than stop.
    fallback: bool = True
    # Go on although settings were changed, by options or in run.json: learning rate, dtype, steps.
    override: bool = False
    # Optimizer steps, instead of the preset's.
    steps: int | None = None
    # Windows a step, instead of the preset's.
    batch_size: int | None = None
    # Bytes a window, instead of the preset's.
    seq_len: int | None = None
    # Peak learning rate, instead of the preset's.
    learning_rate: float | None = None
    # Steps between checkpoints.
    checkpoint_every: int = 50
    # Seconds that data and the display may still take after SIGINT or SIGTERM, before the run saves
    # its steps and ends without them.
    stop_within: float = 10.0
    # The kernel of attention: auto, xla, cudnn, splash or tokamax; by default XLA's.
    attention: str | None = None
    # The kernels of experts' products: auto, xla or tokamax; by default XLA's.
    experts: str | None = None
    # The kernel of the loss over the vocabulary, likewise. With it the loss is computed for some
    # tokens at a time, which holds no logits of all.
    loss: str | None = None
    # The kernel of gated units, likewise.
    gated: str | None = None
    # The kernel of norms, likewise.
    norms: str | None = None
    # The precision of products with kernels: fp8, or fp8-delayed, which scales by earlier steps, of
    # all layers; or by parts of paths, of which the first decides: attn=none,layers=fp8.
    precision: str | None = None
    # Seed of parameters and data order.
    seed: int = 0
    # Be one of several processes, of which the first listens at this HOST:PORT; "auto" finds out
    # from SLURM, Open MPI, Kubernetes or a TPU pod. shardax launch starts processes on one machine.
    coordinator: str | None = None
    # How many processes there are.
    processes: int | None = None
    # Which of them this one is, from 0.
    process: int | None = None
    # Seconds in which all processes have to be there.
    start_timeout: float = 60
    # Print in all processes, not only in the first.
    verbose_processes: bool = False
    # Print where the time went between the start of the process and the end of the first step.
    timings: bool = False

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        inputs.check_values(vars(self))
        timings = StartTimings() if self.timings else None
        planned = None if self.plan is None else PlannedRun.read(self.plan)
        self._join()
        if self.out.exists() and not self.out.is_dir():
            raise inputs.CommandError(f"--out {self.out}: it is no folder.")

        settings = self._fresh(planned)
        if self.resume:
            settings = self._resumed(read_settings(self.out), settings)
        if planned is not None:
            planned.check_sizes(settings)
            planned.check_layout(settings)
        settings.check()
        inputs.use_devices(settings.devices)
        distributed.agree("run.json", settings)

        training = _TrainingRun(settings, self.out, self.stop_within)
        if planned is not None:
            planned.check_model(training.model)
        resumption = {"resume": self.resume, "fallback": self.fallback, "override": self.override}
        training.trainer.check(**resumption)

        is_main = distributed.is_main()
        with training.trainer.folder.held(), contextlib.ExitStack() as stack:
            training.trainer.check(**resumption)  # now that no other process can change it
            if is_main:
                write_settings(self.out, settings)
            elif not self.verbose_processes:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            options: dict[str, Any] = {"verbose_processes": self.verbose_processes, **resumption}
            if timings is not None:
                timings.prepared()
                options["display"] = timings.display
            status = training.run(**options)
            if planned is not None and status == 0 and is_main:
                planned.hold_against(self.out)
        return status

    def _join(self) -> None:
        """Becomes one of several processes, if asked to."""
        place_options = [name for name in PLACES[1:3] if getattr(self, name) is not None]
        if self.coordinator is None and place_options:
            raise inputs.CommandError(f"--{place_options[0]} needs --coordinator HOST:PORT.")
        if self.coordinator == "auto":
            distributed.initialize(timeout=self.start_timeout)
        elif self.coordinator is not None:
            distributed.initialize(
                self.coordinator, self.processes, self.process, timeout=self.start_timeout
            )

    def _fresh(self, planned: PlannedRun | None = None) -> RunSettings:
        """Returns the settings of a run that begins with these options."""
        preset = inputs.find_preset(self.preset)
        sizes: dict[str, Any] = {
            name: getattr(preset if getattr(self, name) is None else self, name) for name in _SIZES
        }

        # Rules and mesh that are named go before those of a plan.
        rules = None if self.rules is None else inputs.load_rules(self.rules)
        if rules is None and planned is not None and not self.mesh:
            rules = planned.named_rules
        own_mesh = "" if rules is None else mesh_text(rules.mesh or (), ",")

        # Paths are absolute, so that the run can be resumed from another folder.
        source = self.source
        if source is not None and Path(source).is_dir():
            source = str(Path(source).absolute())
        return RunSettings(
            model=preset.model,
            text=None if self.text is None else str(self.text.absolute()),
            seed=self.seed,
            mesh=self.mesh or own_mesh,
            devices=self.devices,
            eval_batches=preset.eval_batches,
            checkpoint_every=self.checkpoint_every,
            zero=self.zero,
            source=source,
            lora=self.lora,
            **{kind: getattr(self, kind) for kind in KERNEL_KINDS},
            precision=self.precision,
            rules=None if rules is None else rules_data(rules),
            **sizes,
        )

    def _resumed(self, saved: RunSettings, fresh: RunSettings) -> RunSettings:
        """Returns the settings of the run in the folder, with what these options may change."""
        default = Train()
        changes: dict[str, Any] = {}
        changed_options: list[str] = []
        for name, value in vars(self).items():
            # An option that is as by default was not given.
            if name in _MAY_DIFFER or value == getattr(default, name):
                continue
            decided = {decides: getattr(fresh, decides) for decides in _DECIDES.get(name, (name,))}
            if any(getattr(saved, decides) != new for decides, new in decided.items()):
                changes |= decided
                option = "from" if name == "source" else name.replace("_", "-")
                changed_options.append(f"--{option} {value}")

        if changed_options and not self.override:
            raise inputs.CommandError(
                f"The run in {self.out} was started with other settings than "
                f"{', '.join(changed_options)}. Leave them "
                "out to go on with it, change it with --override, or start another run: no "
                "--resume, and another --out."
            )
        return replace(
            saved,
            **changes,
            mesh=fresh.mesh or saved.mesh,
            devices=saved.devices if self.devices is None else self.devices,
            zero=self.zero or saved.zero,
            rules=saved.rules if fresh.rules is None else fresh.rules,
        )


class _TrainingRun:
    """One run of the training command: model, data, loss and optimizer, given to a Trainer."""

    def __init__(self, settings: RunSettings, out: Path, stop_within: float = 10.0) -> None:
        self.settings = settings
        self.out = out
        self.mesh = inputs.parse_mesh(settings.mesh, settings.mesh_axes)
        try:
            training, held_out = train.open_text(settings.text).split()
        except (PathNotFoundError, DataError) as error:
            raise inputs.CommandError(f"--text {settings.text}: {error}") from error

        self.model = settings.make_model(self.mesh)
        self.codec = TextCodec(settings.source, self.model.config.vocab_size)
        if self.codec.tokenizer is not None:
            training = _tokenized(training, self.codec, settings.seq_len)
            held_out = _tokenized(held_out, self.codec, settings.seq_len)
        sizes = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
        batches = train.TrainBatches(training, **sizes, seed=settings.seed)
        self.held_out = train.EvalBatches(held_out, **sizes, max_batches=settings.eval_batches)

        # A new decoder continues code; a published model the text that it was tuned for, of which
        # it has seen as many tokens at a time as a window has.
        if settings.source is None:
            self.prompt = self.codec.encode(_PROMPT)
        else:
            length = min(_PROMPT_LENGTH, settings.seq_len)
            self.prompt = next(iter(held_out.segments()))[:length].tolist()

        experts = getattr(self.model.config, "experts", None)
        has_experts = select(self.model).at_instances_of(nn.MoE).count() > 0
        if settings.experts is not None and not has_experts:
            raise inputs.CommandError(f"--experts {settings.experts}: the model has no experts.")
        balance = experts.load_balance_weight if experts is not None and has_experts else 0.0
        self.loss = functools.partial(_training_loss, balance, settings.loss is not None)
        self._check_kernels()

        self.trainer = train.Trainer(
            self.model,
            settings.make_optimizer(self.model),
            self.loss,
            batches,
            directory=out,
            settings=train.TrainerSettings(
                steps=settings.steps,
                eval_every=max(1, settings.steps // 2),
                checkpoint_every=settings.checkpoint_every,
                stop_within=stop_within,
            ),
            held_out=self.held_out,
            mesh=self.mesh,
            rules=settings.layout_rules,
            overrides=settings.overrides,
            memory_kind=None if settings.layout is None else settings.layout.memory_kind,
        )

    def _check_kernels(self) -> None:
        """Raises if a kernel asked for by name cannot run."""
        settings = self.settings
        if settings.loss is None and {*settings.kernels.values()} <= {None, "auto", "xla"}:
            return  # which run everywhere

        tokens = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), "int32")
        mesh = contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)
        rules = partition.axis_rules(settings.layout_rules)
        with mesh, rules, partition.kernels(**settings.kernels):
            try:
                eval_shape(self.loss, self.model, {"inputs": tokens, "targets": tokens})
            except (LayerInputError, LayerConfigError) as error:
                options = (f"--{kind} {name}" for kind, name in settings.kernels.items() if name)
                raise inputs.CommandError(f"{' '.join(options)}: {error}") from error

    def run(self, **how: Any) -> int:
        """Trains, and says how it ended; options as for ``Trainer.run``."""
        settings = self.settings
        table = view.table(self.model, mesh=self.mesh, rules=self.trainer.rules)
        print(table, "\n", sep="")

        started = time.monotonic()
        parallel = {} if settings.layout is None else dict(settings.layout.parallel)
        with partition.parallel(**parallel), partition.kernels(**settings.kernels):
            result = self.trainer.run(**how)
        seconds = time.monotonic() - started
        if result.stopped is not None:
            print(
                f"Stopped by {result.stopped.name} at step {result.step}. Go on with: shardax "
                f"train --resume --out {self.out}"
            )
            # Whoever asked one of several processes to stop did not ask the others.
            return 0 if jax.process_count() > 1 else 128 + result.stopped

        # A new decoder is judged by what counting bytes would reach; a published one is published.
        if settings.source is None:
            model, token, published = self.model, "byte", None
            pictures, entropy = show_shardings(model), byte_entropy(self.held_out.part)
        else:
            model, published = self._publish(result.step)
            token, pictures, entropy = "token", {}, {}
        print(f"\nheld-out loss     {result.eval_loss:.4f} nats per {token}")
        for name, nats in entropy.items():
            print(f"{f'{name} entropy':18}{nats:.4f} of the same text")
        sample = self._sample(model)

        print(f"checkpoint  {result.checkpoint}\nlog         {result.log}")
        if published is not None:
            print(f"model       {published}")
        if distributed.is_main():
            report = write_report(
                self.out,
                settings,
                self.model,
                result,
                table=table,
                seconds=seconds,
                token=token,
                sample=sample,
                entropy=entropy,
                pictures=pictures,
            )
            print(f"report      {report}")
        return 0

    def _publish(self, step: int) -> tuple[Any, Path]:
        """Writes a fine-tuned model as it was published; returns the model and its folder."""
        model = self.model
        if self.settings.lora is not None:
            model = surgery.merge_lora(model)
        if self.settings.precision is not None:
            model = surgery.with_precision(model, "default")  # without its histories

        folder = self.out / f"model-{step:08}"
        if not folder.is_dir():  # else of this step, before the run was resumed
            models.save_pretrained(model, folder)
            if distributed.is_main():
                self.codec.copy_files(folder)
        return model, folder

    def _sample(self, model: Any) -> str:
        """Prints and returns what a model continues the prompt with, if it has room for more."""
        length = self.codec.room(model, self.prompt, _SAMPLE_LENGTH)
        if length == 0:
            return ""
        options = {"temperature": 0.7, "seed": self.settings.seed}
        (sample,) = self.codec.sample(model, [self.prompt], length, **options)
        print(f"\nSample:\n{sample}\n")
        return sample


def _training_loss(balance: float, in_blocks: bool, model: Any, batch: Any) -> jax.Array:
    """Returns the loss of the next token, and of experts' balance."""
    if in_blocks:
        packed = {name: batch[name] for name in ("segment_ids", "positions") if name in batch}
        hidden = model.hidden_states(batch["inputs"], **packed)
        targets = batch["targets"], batch.get("mask")
        loss = models.blockwise_cross_entropy(hidden, model.head_kernel, *targets)
    else:
        loss = models.next_token_loss(model, batch)
    # In evaluation the loss of balance is 0.
    return loss + balance * nn.load_balance_loss(model) if balance else loss


def _tokenized(part: Any, codec: TextCodec, seq_len: int) -> Any:
    """Returns a part of a text as tokens of a published model, in a file without a name."""
    segments = (
        codec.encode(bytes(segment).decode(errors="replace"), special=False)
        for segment in part.segments()
    )

    # The open file outlives its name, and ends with this process.
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokens = train.TokenFile.write(f"{folder}/tokens.npy", segments, dtype="uint32")
        except DataError:  # no segment has a token
            raise _too_short(part, 0, seq_len) from None

    if len(tokens) <= seq_len:
        raise _too_short(part, len(tokens), seq_len)
    return tokens.whole


def _too_short(part: Any, tokens: int, seq_len: int) -> inputs.CommandError:
    """Returns the error of a text that is shorter than a window."""
    return inputs.CommandError(
        f"--text: {part!r} has {tokens} tokens, too few for --seq-len {seq_len}."
    )
