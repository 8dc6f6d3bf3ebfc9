# SPDX-License-Identifier: Apache-2.0
"""``shardax train``: a byte-level decoder, data and tensor parallel over a mesh."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import tyro

from shardax import (
    Param,
    Variable,
    distributed,
    eval_shape,
    iter_variables,
    models,
    nn,
    partition,
    select,
    surgery,
    train,
    view,
)
from shardax._files import PathNotFoundError
from shardax.cli import inputs
from shardax.cli.planned import PlannedRun
from shardax.cli.runs import KERNEL_KINDS, RunSettings, TextCodec, read_settings, write_settings
from shardax.extend import format_path, mesh_text
from shardax.models.generating.generation import max_positions_of
from shardax.models.weights import TOKENIZER_FILES, find_directory
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.train.data.text import hash64, permute
from shardax.train.errors import DataError
from shardax.train.progress import TrainingProgress
from shardax.train.trainer import RunResult

_PROMPT, _SAMPLE_LENGTH = "def ", 240
_PROMPT_LENGTH = 16  # tokens of the held-out text, which a fine-tuned model continues
_PICTURED = (".embed.embedding", ".layers[0].mlp.gate.kernel")
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
        timings = _Timings() if self.timings else None
        planned = None if self.plan is None else PlannedRun.read(self.plan)
        self._join()
        if self.out.exists() and not self.out.is_dir():
            raise inputs.CommandError(f"--out {self.out}: it is no folder.")
        fresh = self._fresh(planned)
        settings = self._resumed(read_settings(self.out), fresh) if self.resume else fresh
        if planned is not None:
            planned.check_sizes(settings)
            planned.check_layout(settings)
        if settings.zero and not settings.mesh:
            raise inputs.CommandError(
                "--zero splits the optimizer's state over the mesh axis data, but there is no "
                "mesh; name one, such as --mesh data=2,model=4."
            )
        if settings.rules is not None and not settings.mesh:
            raise inputs.CommandError(
                f"--rules {self.rules} names no mesh, and without one there is nothing to lay out; "
                "name it, such as --mesh data=2,model=4."
            )
        if settings.lora is not None and settings.source is None:
            raise inputs.CommandError("--lora needs --from, the model that the adapters are for.")
        settings.check()
        inputs.use_devices(settings.devices)
        distributed.agree("run.json", settings)
        run = _TrainingRun(settings, self.out, self.stop_within)
        if planned is not None:
            planned.check_model(run.model)
        how: dict[str, Any] = {
            name: getattr(self, name) for name in ("resume", "fallback", "override")
        }
        checked = dict(how)
        run.trainer.check(**checked)
        is_main = distributed.is_main()
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.trainer.folder.held())
            run.trainer.check(**checked)  # now that no other process can change it
            if is_main:
                write_settings(self.out, settings)
            elif not self.verbose_processes:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            if timings is not None:
                timings.prepared()
                how["display"] = timings.display
            status = run.run(**how, verbose_processes=self.verbose_processes)
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
        preset = inputs.find_preset(self.preset)
        named_rules = None if self.rules is None else inputs.load_rules(self.rules)
        if named_rules is None and planned is not None and not self.mesh:
            named_rules = planned.named_rules
        own_mesh = "" if named_rules is None else mesh_text(named_rules.mesh or (), ",")
        sizes: dict[str, Any] = {
            name: getattr(preset if getattr(self, name) is None else self, name) for name in _SIZES
        }
        return RunSettings(
            model=preset.model,
            # Absolute, so that the run can be resumed from another folder.
            text=None if self.text is None else str(self.text.absolute()),
            seed=self.seed,
            mesh=self.mesh or own_mesh,
            devices=self.devices,
            eval_batches=preset.eval_batches,
            checkpoint_every=self.checkpoint_every,
            zero=self.zero,
            source=_absolute(self.source),
            lora=self.lora,
            **{kind: getattr(self, kind) for kind in KERNEL_KINDS},
            precision=self.precision,
            rules=None if named_rules is None else _as_data(named_rules),
            **sizes,
        )

    def _resumed(self, saved: RunSettings, fresh: RunSettings) -> RunSettings:
        default = Train()
        differing = [
            (option.name, getattr(self, option.name))
            for option in fields(self)
            if option.name not in _MAY_DIFFER
            and getattr(self, option.name) != getattr(default, option.name)
            and any(
                getattr(fresh, name) != getattr(saved, name)
                for name in _DECIDES.get(option.name, (option.name,))
            )
        ]
        if differing and not self.override:
            options = ", ".join(
                f"--{'from' if name == 'source' else name.replace('_', '-')} {value}"
                for name, value in differing
            )
            raise inputs.CommandError(
                f"The run in {self.out} was started with other settings than {options}. Leave them "
                "out to go on with it, change it with --override, or start another run: no "
                "--resume, and another --out."
            )
        changes = {
            n: getattr(fresh, n) for name, _ in differing for n in _DECIDES.get(name, (name,))
        }
        return replace(
            replace(saved, **changes),
            mesh=fresh.mesh or saved.mesh,
            devices=saved.devices if self.devices is None else self.devices,
            zero=self.zero or saved.zero,
            rules=saved.rules if fresh.rules is None else fresh.rules,
        )


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


class _TrainingRun:
    """One run of the training command."""

    def __init__(self, settings: RunSettings, out: Path, stop_within: float = 10.0) -> None:
        self.settings = settings
        self.out = out
        self.mesh = inputs.parse_mesh(settings.mesh, settings.mesh_axes)
        try:
            training, held_out = train.open_text(settings.text).split()
        except (PathNotFoundError, DataError) as error:
            raise inputs.CommandError(f"--text {settings.text}: {error}") from error
        shape = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
        self.model = settings.make_model(self.mesh)
        batches: Any = train.TrainBatches(training, **shape, seed=settings.seed)
        self.held_out: Any = train.EvalBatches(held_out, **shape, max_batches=settings.eval_batches)
        self.codec = TextCodec(settings.source, self.model.config.vocab_size)
        self.prompt = list(bytes(next(iter(held_out.segments()))[:_PROMPT_LENGTH]))
        if self.codec.tokenizer is not None:
            tokens = _Tokens(settings, self.codec)
            batches, self.held_out = tokens.batches(training), tokens.held_out(held_out)
            self.prompt = self.held_out[0]["inputs"][0, :_PROMPT_LENGTH].tolist()
        experts = getattr(self.model.config, "experts", None)
        weight = 0.0 if experts is None else experts.load_balance_weight
        balance = weight if select(self.model).at_instances_of(nn.MoE).count() else 0.0
        self.loss = functools.partial(_training_loss, balance, settings.loss is not None)
        self._check_kernels()
        optimizer = inputs.decoder_optimizer(settings.steps, settings.learning_rate)
        self.trainer = train.Trainer(
            self.model,
            train.Optimizer(self.model, optimizer, *([] if settings.lora is None else ["lora"])),
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
        settings, names = self.settings, {*self.settings.kernels.values()}
        if settings.experts is not None and not select(self.model).at_instances_of(nn.MoE).count():
            raise inputs.CommandError(f"--experts {settings.experts}: the model has no experts.")
        if settings.loss is None and names <= {None, "auto", "xla"}:
            return  # which run everywhere
        batch = {
            name: jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), "int32")
            for name in ("inputs", "targets")
        }
        mesh = contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)
        rules, kernels = settings.layout_rules, partition.kernels(**settings.kernels)
        with mesh, partition.axis_rules(rules), kernels:
            try:
                eval_shape(self.loss, self.model, batch)
            except (LayerInputError, LayerConfigError) as error:
                options = (f"--{kind} {name}" for kind, name in settings.kernels.items() if name)
                raise inputs.CommandError(f"{' '.join(options)}: {error}") from error

    def run(self, **how) -> int:
        settings = self.settings
        table = view.table(self.model, mesh=self.mesh, rules=self.trainer.rules)
        print(table, "\n", sep="")
        tuned = settings.source is not None
        entropy = {} if tuned else _byte_entropy(self.held_out.part)
        started = time.monotonic()
        layout = settings.layout
        parallel = partition.parallel(**dict(() if layout is None else layout.parallel))
        with parallel, partition.kernels(**settings.kernels):
            result = self.trainer.run(**how)
        if result.stopped is not None:
            print(
                f"Stopped by {result.stopped.name} at step {result.step}. Go on with: shardax "
                f"train --resume --out {self.out}"
            )
            # Whoever asked one of several processes to stop did not ask the others.
            return 0 if jax.process_count() > 1 else 128 + result.stopped
        seconds = time.monotonic() - started
        if tuned:
            return self._finish_tuning(result, table, seconds)
        pictures = self._show_shardings()
        print(f"\nheld-out loss     {result.eval_loss:.4f} nats per byte")
        for name in ("bigram", "unigram"):
            print(f"{f'{name} entropy':18}{entropy[name]:.4f} of the same text")
        options = {"temperature": 0.7, "seed": settings.seed}
        prompt = self.codec.encode(_PROMPT)
        (sample,) = self.codec.sample(self.model, [prompt], _SAMPLE_LENGTH, **options)
        print(f"\nSample:\n{sample}\n")
        if not distributed.is_main():
            return 0
        report = self._write_report(result, table, seconds, "byte", sample, entropy, pictures)
        print(f"checkpoint  {result.checkpoint}\nlog         {result.log}\nreport      {report}")
        return 0

    def _write_report(
        self,
        result: RunResult,
        table: view.ParameterTable,
        seconds: float,
        token: str,
        sample: str,
        entropy: Mapping[str, float] = MappingProxyType({}),
        pictures: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Writes the report of a run that is done; returns its path.

        Args:
            result: The result of the run.
            table: The parameters.
            seconds: How long the run took.
            token: What the loss is measured for: "byte" or "token".
            sample: Text that the model wrote.
            entropy: Losses to compare by, by name.
            pictures: SVG text by caption.
        """
        settings, unit = self.settings, f"nats per {token}"
        records = train.read_jsonl(result.log)
        speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
        run = {
            "text": settings.text or "Python's standard library",
            "mesh": settings.mesh or "one device",
            "steps": f"{result.step:,} of {settings.batch_size} x {settings.seq_len} {token}s",
            "held-out loss": f"{result.eval_loss:.4f} {unit}",
            **{f"{name} entropy": f"{nats:.4f} {unit}" for name, nats in entropy.items()},
            "time": f"{seconds:,.0f} seconds",
            "speed": f"{np.median(speeds):,.0f} {token}s per second" if speeds else "not measured",
            "seed": settings.seed,
        }
        return view.write_report(
            self.out / "report.html",
            title=f"shardax run {self.out.name}",
            summary=run,
            facts={
                "Model": _model_facts(self.model, settings),
                "Optimizer": inputs.optimizer_facts(settings.steps, settings.learning_rate),
            },
            parameters=table,
            pictures=pictures,
            records=records,
            references=entropy,
            sample=sample,
            loss_unit=unit,
        )

    def _finish_tuning(self, result: RunResult, table: view.ParameterTable, seconds: float) -> int:
        """Writes a fine-tuned model as it was published; returns the exit status."""
        merged = self.model if self.settings.lora is None else surgery.merge_lora(self.model)
        if self.settings.precision is not None:
            merged = surgery.with_precision(merged, "default")  # without its histories
        folder = self.out / f"model-{result.step:08}"
        if not folder.is_dir():  # else of this step, before the run was resumed
            models.save_pretrained(merged, folder)
            if distributed.is_main():
                _copy_text_files(find_directory(str(self.settings.source)), folder)
        print(f"\nheld-out loss     {result.eval_loss:.4f} nats per token")
        room = max_positions_of(merged) or _SAMPLE_LENGTH + _PROMPT_LENGTH
        length = min(_SAMPLE_LENGTH, room - len(self.prompt))
        sample = ""
        if length > 0:
            options = {"temperature": 0.7, "seed": self.settings.seed}
            (sample,) = self.codec.sample(merged, [self.prompt], length, **options)
            print(f"\nSample:\n{sample}\n")
        print(f"checkpoint  {result.checkpoint}\nlog         {result.log}\nmodel       {folder}")

        if distributed.is_main():
            report = self._write_report(result, table, seconds, "token", sample)
            print(f"report      {report}")
        return 0

    def _show_shardings(self) -> dict[str, str]:
        """Prints pictures of two parameters and returns them as SVG by caption."""
        by_path = {format_path(path): variable for path, variable in iter_variables(self.model)}
        pictures: dict[str, str] = {}
        for path in _PICTURED:
            variable = by_path[path]
            print(f"\n{path} {variable.axes} {tuple(variable.shape)} over the devices:")
            view.show_sharding(variable)
            pictures[f"{path} {variable.axes}"] = view.sharding_svg(variable)
        return pictures


def _model_facts(model: Any, settings: RunSettings) -> dict[str, str]:
    """Returns the figures of a model by which people know it, by name."""
    config = model.config
    is_decoder = isinstance(config, models.DecoderConfig)
    heads = config if is_decoder else config.attention
    mlp_dim = config.mlp_dim if is_decoder else getattr(config.mlp, "dim", None)
    parameters = [variable for _, variable in iter_variables(model, Param)]
    trained = parameters
    if settings.lora is not None:
        trained = [variable for _, variable in iter_variables(model, "lora")]

    facts = {
        "model": settings.source or type(model).__name__,
        "parameters": _size_text(parameters),
        "layers": f"{config.num_layers} of width {config.embed_dim}",
        "vocabulary": f"{config.vocab_size:,}",
        "dtype": f"{config.dtype}, parameters {config.param_dtype}",
    }
    if mlp_dim:
        facts["MLP"] = f"of width {mlp_dim}"
    if heads is not None:
        of_queries = f"{heads.num_heads} of size {heads.head_dim}"
        facts["heads"] = f"{of_queries}, {heads.num_kv_heads} of keys and values"
    if settings.lora is not None:
        facts["trained"] = f"{_size_text(trained)}, adapters of rank {settings.lora}"
    if settings.precision is not None:
        facts["precision"] = settings.precision
    return facts


def _size_text(variables: Sequence[Variable]) -> str:
    """Formats the number of elements of parameters."""
    return f"{sum(math.prod(variable.shape) for variable in variables):,}"


class _Timings:
    """Time of each stage until the end of the first step."""

    # JAX tells how long it traced, lowered and compiled ``train_step``; before that, model and
    # optimizer are initialised, and after it the step runs.

    _STAGES: ClassVar[dict[str, str]] = {
        "jaxpr_trace_duration": "trace the step",
        "jaxpr_to_mlir_module_duration": "lower the step",
        "backend_compile_duration": "compile the step, or load it",
    }

    def __init__(self) -> None:
        self._start = _process_start()
        self._marks = [("Python, imports, command line", time.time())]
        self._told = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def prepared(self) -> None:
        """Notes the time just before the run."""
        self._marks.append(("text, model, checks", time.time()))

    def display(self, first: int, total: int) -> TrainingProgress:
        """Makes the progress display, with a note on the first step."""
        timings = self

        class Display(TrainingProgress):
            def step(self, step: int, loss: float | None, speed: str | None) -> None:
                super().step(step, loss, speed)
                for line in timings.lines():
                    self.note(line)

        return Display(first, total)

    def _listen(self, event: str, duration_secs: float, **kwargs: object) -> None:
        stage = self._STAGES.get(event.rpartition("/")[2])
        of_step = kwargs.get("fun_name") in ("train_step", "jit(train_step)")
        if stage is None or not of_step or self._told:
            return
        now = time.time()
        if now - duration_secs > self._marks[-1][1] and self._marks[-1][0] == "text, model, checks":
            self._marks.append(("initialise", now - duration_secs))
        self._marks.append((stage, now))

    def lines(self) -> list[str]:
        """Returns the table, once."""
        if self._told:
            return []
        self._told = True
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self._marks.append(("run the step", time.time()))
        spent: dict[str, float] = {}
        previous = self._start
        for name, now in self._marks:
            spent[name] = spent.get(name, 0.0) + now - previous
            previous = now
        spent["the first step is done after"] = previous - self._start
        return ["", *(f"{name:32}{seconds:8.2f} s" for name, seconds in spent.items()), ""]


def _process_start() -> float:
    """When the process started, in seconds since the epoch."""
    # Elsewhere than on Linux without the time that it waited.
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return time.time() - time.process_time()
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def _copy_text_files(source: Path, folder: Path) -> None:
    """Copies the tokenizer files of a published model."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():  # config.json is its own
                shutil.copyfile(file, folder / file.name)


def _as_data(named_rules) -> dict[str, Any]:
    """Returns rules as they are kept in the run's folder."""
    from shardax.plan.rules_file import entry_to_data

    return entry_to_data(replace(named_rules, mesh=None))


def _absolute(source: str | None) -> str | None:
    """Makes the path of a folder absolute."""
    if source is None or not Path(source).is_dir():
        return source
    return str(Path(source).absolute())


class _Tokens:
    """A text as tokens of a published model, in rows."""

    def __init__(self, settings: RunSettings, codec: TextCodec) -> None:
        self.settings, self.codec = settings, codec

    def batches(self, part) -> train.RowBatches:
        """Returns rows to train on, shuffled in each epoch."""
        rows, seed, size = self._rows(part), self.settings.seed, self.settings.batch_size
        name = f"{part.fingerprint} {self.settings.seq_len} {seed} {rows.shape}"

        def read(start: int, stop: int) -> dict[str, np.ndarray]:
            epochs, places = np.divmod(np.arange(start, stop), len(rows))
            chosen = np.empty_like(places)
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                order_key = int(hash64(seed, epoch)[0])
                chosen[in_epoch] = permute(places[in_epoch], len(rows), order_key)
            return {"inputs": rows[chosen, :-1], "targets": rows[chosen, 1:]}

        return train.RowBatches(read, batch_size=size, name=name)

    def held_out(self, part) -> list[dict[str, np.ndarray]]:
        """Returns batches of one shape, the last one filled up."""
        size = self.settings.batch_size
        rows = self._rows(part)[: size * self.settings.eval_batches]
        filled = np.pad(rows, ((0, -len(rows) % size), (0, 0)))
        real = np.broadcast_to((np.arange(len(filled)) < len(rows))[:, None], filled[:, 1:].shape)
        batch = {"inputs": filled[:, :-1], "targets": filled[:, 1:], "mask": real}
        return [
            {name: array[at : at + size] for name, array in batch.items()}
            for at in range(0, len(filled), size)
        ]

    def _rows(self, part) -> np.ndarray:
        """Returns windows of tokens, each one longer than the inputs."""
        tokens: list[int] = []
        for segment in part.segments():
            text = bytes(segment).decode(errors="replace")
            tokens += self.codec.encode(text, special=False)
        length = self.settings.seq_len
        count = (len(tokens) - 1) // length
        if count < 1:
            raise inputs.CommandError(
                f"--text: {part!r} has {len(tokens)} tokens, too few for --seq-len {length}."
            )
        starts = length * np.arange(count)[:, None] + np.arange(length + 1)[None]
        return np.asarray(tokens, np.int32)[starts]


def _byte_entropy(part) -> dict[str, float]:
    """Unigram and bigram entropy of a text part, in nats per byte."""
    pairs = np.zeros(256 * 256, np.int64)
    for segment in part.segments():
        pairs += np.bincount(segment[:-1] * np.int64(256) + segment[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)

    def entropy(counts: np.ndarray, totals) -> float:
        occurs = counts > 0
        information = np.log(np.broadcast_to(totals, counts.shape)[occurs] / counts[occurs])
        return float((counts[occurs] * information).sum() / pairs.sum())

    unigram = entropy(pairs.sum(axis=0), pairs.sum())
    # Rounding may break what holds exactly: context never raises the entropy.
    bigram = min(entropy(pairs, pairs.sum(axis=1, keepdims=True)), unigram)
    return {"bigram": bigram, "unigram": unigram}
