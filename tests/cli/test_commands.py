# SPDX-License-Identifier: Apache-2.0
"""The commands do what they say, and where they cannot, one line says why."""

from __future__ import annotations

import builtins
import importlib.util
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

import shardax as sx
from shardax.cli import main
from shardax.cli.inputs import parse_mesh
from shardax.cli.runs import read_settings
from tests.native_logs import without_native_logs

pytestmark = pytest.mark.usefixtures("one_layer")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
SIZES = ["--preset", "tiny", "--steps", "4", "--batch-size", "8", "--seq-len", "16"]
SIZES += ["--checkpoint-every", "2"]
MESH = ["--devices", "8", "--mesh", "data=2,model=4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=9000)))
    return path


class Trained:
    """A run that is done, and what it printed."""

    def __init__(self, out: Path, printed: str) -> None:
        self.out = out
        self.printed = printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path, one_layer: None) -> Trained:
    """The only training of this file that runs to its end."""
    out = tmp_path_factory.mktemp("runs") / "first"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(sys.stdout, "write", lines.append)
        status = main(["train", *SIZES, *MESH, "--text", str(text), "--out", str(out)])
    assert status == 0
    return Trained(out, "".join(lines))


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Path:
    """The same run elsewhere, to be spoilt."""
    return shutil.copytree(trained.out, tmp_path / "copy")


def refused(capsys: Any, *words: str, status: int = 2) -> str:
    """What a command that must fail says; it prints nothing else."""
    assert main(words) == status
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("shardax: ") and said.count("Traceback") == 0
    return said.removeprefix("shardax: ")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- train ----------------------------------------------------------------------------------------


def test_training_prints_every_part_in_order(trained: Trained) -> None:
    order = [
        r"path +type +shape",
        r"\.embed\.embedding +Param +256x64 +float32 +vocab, embed +model, - +16,384 +16\.0 KiB",
        r"[\d,]+ elements, .* per device on 8 devices",
        r"step 4/4  loss \d\.\d{4}  [\d,]+ tokens/s  ETA 0:00",
        r"step 4: held-out loss \d\.\d{4}",
        r"\.embed\.embedding \('vocab', 'embed'\) \(256, 64\) over the devices:\n┌",
        r"\.layers\[0\]\.mlp\.gate\.kernel .* over the devices:\n┌",
        r"held-out loss     \d\.\d{4} nats per byte\nbigram entropy    \d\.\d{4}",
        r"unigram entropy   \d\.\d{4}",
        r"Sample:\ndef ",
        rf"checkpoint  {trained.out}/checkpoints/00000004\n",
        rf"log         {trained.out}/log\.jsonl\n",
        rf"report      {trained.out}/report\.html\n",
    ]
    place = 0
    for pattern in order:
        match = re.compile(pattern).search(trained.printed, place)
        assert match is not None, (pattern, trained.printed[place:])
        place = match.end()


def test_training_leaves_settings_log_checkpoints_and_report(trained: Trained, text: Path) -> None:
    names = sorted(item.name for item in trained.out.iterdir())
    assert names == [".lock", "checkpoints", "log.jsonl", "report.html", "run.json"]
    assert sx.train.Checkpoints(trained.out / "checkpoints").steps() == [2, 4]
    settings = read_settings(trained.out)
    assert (settings.steps, settings.batch_size, settings.seq_len) == (4, 8, 16)
    assert (settings.mesh, settings.devices, settings.seed) == ("data=2,model=4", 8, 0)
    assert settings.text == str(text)
    records = sx.train.read_jsonl(trained.out / "log.jsonl")
    assert [(r["step"], *(r.keys() & {"loss", "eval_loss"})) for r in records] == [
        (2, "eval_loss"),
        (4, "loss"),
        (4, "eval_loss"),
    ]
    report = (trained.out / "report.html").read_text(encoding="utf-8")
    assert 'aria-label="Loss over' in report and ".layers[0].mlp.down.kernel" in report
    assert f"{records[-1]['eval_loss']:.4f} nats per byte" in report


def test_text_is_kept_as_an_absolute_path(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardax.cli.train import Train

    monkeypatch.chdir(text.parent)
    assert Train(text=Path("words.txt"))._fresh().text == str(text)


def test_folder_of_texts_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardax.cli.train import Train, _TrainingRun

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(" ".join(random.Random(name).choices(WORDS, k=9000)))
    settings = Train(preset="tiny", text=folder, out=tmp_path / "run")._fresh()
    text = _TrainingRun(settings, tmp_path / "run").held_out.part.text
    contents = bytes(text.data)
    assert all(file.read_bytes() in contents for file in folder.iterdir())


def test_existing_run_is_not_overwritten(trained: Trained, text: Path, capsys: Any) -> None:
    before = files_of(trained.out)
    words = ["train", *SIZES, *MESH, "--text", str(text), "--out", str(trained.out)]
    said = refused(capsys, *words, status=1)
    assert "already holds a run, saved at step 4" in said and "--resume" in said
    assert files_of(trained.out) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "huge"], "--preset 'huge' is unknown; there are: tiny, demo, small"),
        (["--mesh", "data"], "is not name=size"),
        (["--mesh", "data=3", "--devices", "8"], "['inputs'] of shape (16, 128): 16 along 'batch'"),
        (["--devices", "3"], "JAX already runs with 8"),
        (["--text", "/no/such/text"], "/no/such/text"),
        (["--steps", "0"], "--steps 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--seq-len", "-1"], "--seq-len -1"),
        (["--checkpoint-every", "-1"], "--checkpoint-every -1"),
        (["--mesh", "model=8", "--devices", "8", "--preset", "tiny"], ".layers[0].attn.k.kernel"),
        (["--resume"], "holds no run"),
        (["--zero", "--preset", "tiny"], "name one, such as --mesh data=2,model=4"),
    ],
)
def test_invalid_training_is_refused_and_nothing_written(
    tmp_path: Path, text: Path, capsys: Any, words: list[str], message: str
) -> None:
    out = tmp_path / "run"
    given = words if "--text" in words else [*words, "--text", str(text)]
    status = 1 if "cannot" in message or message.startswith((".", "[")) else 2
    assert message in refused(capsys, "train", *given, "--out", str(out), status=status)
    assert not out.exists()


def test_timings_add_up_to_the_first_step(tmp_path: Path, text: Path, capsys: Any) -> None:
    out = str(tmp_path / "run")
    started = time.monotonic()
    # The same programs as those of ``trained``, which this process would find by their jaxprs.
    jax.clear_caches()
    words = ["train", *SIZES, *MESH, "--text", str(text), "--out", out, "--timings"]
    assert main(words) == 0
    took = time.monotonic() - started
    printed = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?) {2,}(\d+\.\d\d) s$", printed, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "Python, imports, command line",
        "text, model, checks",
        "initialise",
        "trace the step",
        "lower the step",
        "compile the step, or load it",
        "run the step",
        "the first step is done after",
    ]
    *parts, whole = [float(seconds) for _, seconds in rows]
    # The process is that of the tests, which began before; all else is within the command.
    assert sum(parts) == pytest.approx(whole, abs=0.01 * len(rows))
    assert all(parts[3:6]) and sum(parts[1:]) <= took + 0.1
    assert main(["train", "--resume", "--out", out, "--timings"]) == 0
    assert "the first step is done after" not in capsys.readouterr().out


# --- train --resume -------------------------------------------------------------------------------


def test_resume_continues_from_the_last_checkpoint(
    trained: Trained, copy: Path, capsys: Any
) -> None:
    log = (copy / "log.jsonl").read_bytes()
    sx.train.Checkpoints(copy / "checkpoints").rewind(2)
    (copy / "report.html").unlink()
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert "step 2: held-out loss" not in printed and "step 4: held-out loss" in printed
    assert (copy / "report.html").exists()

    def losses(text: bytes) -> list[bytes]:
        return re.findall(rb'"(?:eval_)?loss":[\d.]+', text)

    assert losses((copy / "log.jsonl").read_bytes()) == losses(log)


def test_resuming_a_finished_run_rewrites_its_report(copy: Path, capsys: Any) -> None:
    log = (copy / "log.jsonl").read_bytes()
    (copy / "report.html").unlink()
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert "held-out loss  " in capsys.readouterr().out
    assert (copy / "report.html").exists() and (copy / "log.jsonl").read_bytes() == log


def test_resume_accepts_same_options_and_another_mesh(copy: Path, text: Path, capsys: Any) -> None:
    words = [*SIZES, "--text", str(text), "--mesh", "data=4,model=2", "--devices", "8"]
    assert main(["train", "--resume", "--out", str(copy), *words]) == 0
    assert read_settings(copy).mesh == "data=4,model=2"
    assert "-, model" in capsys.readouterr().out


def test_zero_splits_optimizer_state_and_keeps_losses(
    copy: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Seen(sx.train.Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    def losses() -> list[float]:
        records = sx.train.read_jsonl(copy / "log.jsonl")
        return [record[name] for record in records for name in record if "loss" in name]

    plain = losses()
    sx.train.Checkpoints(copy / "checkpoints").rewind(2)
    monkeypatch.setattr(sx.train, "Trainer", Seen)
    assert main(["train", "--resume", "--zero", "--out", str(copy)]) == 0
    assert read_settings(copy).zero
    assert losses() == pytest.approx(plain, rel=1e-5)
    end = ("layers", 0, "mlp", "gate", "kernel")
    shares = {
        "mu" in path: variable.sharding.shard_shape(variable.shape)
        for path, variable in sx.iter_variables((made[0].model, made[0].optimizer.opt_state))
        if path[-5:] == end and "nu" not in path
    }
    assert shares == {False: (64, 64), True: (32, 64)}  # of (64, 256)
    capsys.readouterr()
    assert main(["check", str(copy), "--mesh", "data=3,model=4", "--quiet"]) == 1  # 64 by 3
    assert "'embed'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--steps", "8"], "--steps 8"),
        (["--seed", "3", "--learning-rate", "0.5"], "--learning-rate 0.5, --seed 3"),
        (["--preset", "small"], "--preset small"),
        (["--text", "/other"], "--text /other"),
    ],
)
def test_resuming_refuses_other_settings_by_name(
    copy: Path, capsys: Any, words: list[str], named: str
) -> None:
    before = files_of(copy)
    said = refused(capsys, "train", "--resume", "--out", str(copy), *words)
    assert f"was started with other settings than {named}." in said
    assert files_of(copy) == before


# --- show -----------------------------------------------------------------------------------------


def test_show_prints_table_of_run_and_checkpoint(trained: Trained, capsys: Any) -> None:
    settings = read_settings(trained.out)
    mesh = parse_mesh(settings.mesh, ("data", "model"))
    table = sx.view.table(settings.make_model(), mesh=mesh, rules=sx.models.DECODER_RULES)
    for path in (trained.out, trained.out / "checkpoints" / "00000002"):
        assert main(["show", str(path)]) == 0
        assert capsys.readouterr().out == f"{table}\n"


def test_show_lays_out_over_another_mesh(trained: Trained, capsys: Any) -> None:
    assert main(["show", str(trained.out), "--mesh", "model=2", "--devices", "8"]) == 0
    assert capsys.readouterr().out.endswith("per device on 2 devices\n")
    assert main(["show", str(trained.out), "--mesh", ""]) == 0
    assert capsys.readouterr().out.endswith("per device on 1 device\n")


def test_show_counts_operations_and_writes_a_page(
    trained: Trained, capsys: Any, tmp_path: Path
) -> None:
    page = tmp_path / "model.html"
    assert main(["show", str(trained.out), "--flops", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    lines = [line.split()[:2] for line in printed.splitlines()]
    assert lines[lines.index(["module", "type"]) + 1] == ["(root)", "Decoder"]
    assert printed.endswith(f"page: {page}\n")
    text = page.read_text(encoding="utf-8")
    assert f"<title>{trained.out.name}</title>" in text
    assert "treescope-container" in text and '<table class="modules">' in text


def test_show_of_no_run_is_an_error(tmp_path: Path, capsys: Any) -> None:
    assert "is no run" in refused(capsys, "show", str(tmp_path))


# --- sample ---------------------------------------------------------------------------------------


def sample(capsys: Any, path: Path, *words: str) -> str:
    assert main(["sample", str(path), "--length", "24", *words]) == 0
    return capsys.readouterr().out


def test_samples_continue_the_prompt_and_follow_the_seed(trained: Trained, capsys: Any) -> None:
    one = sample(capsys, trained.out, "--prompt", "the q")
    assert one.startswith("the q") and len(one.encode(errors="replace")) >= len("the q") + 24
    assert sample(capsys, trained.out, "--prompt", "the q") == one
    assert sample(capsys, trained.out, "--prompt", "the q", "--seed", "1") != one


def test_sample_continues_several_prompts_together(trained: Trained, capsys: Any) -> None:
    both = sample(capsys, trained.out, "--prompt", "the q", "a", "--temperature", "0")
    each = [
        sample(capsys, trained.out, "--prompt", text, "--temperature", "0")
        for text in ("the q", "a")
    ]
    assert both == "\n".join(each)


def test_sample_is_of_the_checkpoint_asked_for(trained: Trained, capsys: Any) -> None:
    def expected(step: int) -> str:
        settings = read_settings(trained.out)
        model = settings.make_model()
        sx.train.Checkpoints(trained.out / "checkpoints").restore((model,), step, partial=True)
        (tokens,) = sx.models.generate(
            model, [list(b"the q")], max_new_tokens=24, temperature=0.7, seed=0
        )
        return bytes(tokens.astype("uint8")).decode(errors="replace") + "\n"

    earlier = trained.out / "checkpoints" / "00000002"
    assert sample(capsys, earlier, "--prompt", "the q") == expected(2)
    assert sample(capsys, trained.out, "--prompt", "the q") == expected(4)
    assert expected(2) != expected(4)


@pytest.mark.parametrize(
    ("place", "words", "message"),
    [
        ("nothing", [], "is no run"),
        ("", ["--prompt", ""], "prompt is empty"),
        ("", ["--prompt", "a", ""], "prompt is empty"),
        ("", ["--temperature", "-1"], "--temperature -1"),
        (
            "",
            ["--prompt", "a", "word " * 800],
            r"'word word word word '\.\.\. has 4,000 tokens.* 16",
        ),
    ],
)
def test_invalid_sampling_is_refused(
    trained: Trained, capsys: Any, place: str, words: list[str], message: str
) -> None:
    assert re.search(message, refused(capsys, "sample", str(trained.out / place), *words))


@pytest.mark.parametrize("command", ["show", "sample", "verify"])
def test_missing_checkpoint_error_lists_the_existing_ones(
    trained: Trained, capsys: Any, command: str
) -> None:
    said = refused(capsys, command, str(trained.out / "checkpoints" / "00000003"), status=1)
    assert re.search("There is nothing at .*00000003.*nearby: .*00000002", said)


def test_run_without_a_checkpoint_cannot_be_sampled(copy: Path, capsys: Any) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint yet" in refused(capsys, "sample", str(copy))


# --- the command itself ---------------------------------------------------------------------------


def block(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes a package impossible to import, and the commands to be imported again."""
    original = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **named)

    for name in [name for name in sys.modules if name.startswith("shardax.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    found = importlib.util.find_spec

    def spec_without(name: str, *rest: Any) -> Any:
        return None if name.partition(".")[0] == package else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", spec_without)


@pytest.mark.parametrize("package", ["tyro", "optax", "orbax.checkpoint"])
def test_missing_package_error_names_the_extra(
    tmp_path: Path, text: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    missing = package.partition(".")[0]
    block(monkeypatch, missing)
    words = ["train", *SIZES, "--text", str(text), "--out", str(tmp_path / "run")]
    said = refused(capsys, *words, status=1)
    assert not (tmp_path / "run").exists()
    assert missing in said and "pip install 'shardax[train]'" in said


def test_help_lists_commands_without_tyro(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    # Names and first lines of the commands, as tyro shows them in its box.
    rich = re.findall(r"• (\w+) +(.*\.)[ │]*$", capsys.readouterr().out, re.MULTILINE)
    block(monkeypatch, "tyro")
    for words in (["--help"], ["-h"], ["train", "--help"]):
        assert main(words) == 0
        plain, said = capsys.readouterr()
        assert re.findall(r"^  (\w+) +(.*)$", plain, re.MULTILINE) == rich != []
        assert plain.splitlines()[-1] == (
            "tyro is missing. The command line needs extra packages: pip install 'shardax[train]'"
        )
        assert said == ""


def test_missing_user_package_error_is_propagated(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Any) -> int:
        raise ModuleNotFoundError("No module named 'numpyy'", name="numpyy")

    monkeypatch.setattr(sx.cli, "_run", broken)
    with pytest.raises(ModuleNotFoundError):
        main([])


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "shardax: interrupted\n"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "shardax: [Errno 13] Permission"),
    ],
)
def test_interrupt_and_os_error_give_line_and_status(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def broken(arguments: Any) -> int:
        raise error

    monkeypatch.setattr(sx.cli, "_run", broken)
    assert main([]) == status
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("words", [[], ["paint"], ["train", "--stps", "3"], ["sample"]])
def test_unknown_words_exit_with_status_2(words: list[str], capsys: Any) -> None:
    assert refused(capsys, *words).count("\n") == 1


def test_help_lists_the_commands(capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("train", "show", "sample"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train"], ["--batch-size", "Windows a step, instead of the preset's.", "(default: 50)"]),
        (["show"], ["PATH", "Folder of a run, or of one of its checkpoints."]),
        (["sample"], ["--temperature", "0 takes the likeliest token; 1 samples"]),
        (["check"], ["MODEL", "The exit status is 1 if there are errors", '[["embed", null]']),
        (["plan"], ["--top", "How many layouts to show of a search, the best ones."]),
        (["plan", "explain"], ["PLAN.json", "A file that shardax plan --json wrote."]),
    ],
)
def test_help_of_a_command_explains_its_options(
    words: list[str], expected: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as exit_info:
        main([*words, "--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in expected)
    options = [line for line in printed.splitlines() if line.startswith("│ --")]
    assert all(re.search(r"  \S.* \((default: .*|repeatable|optional)\)", line) for line in options)


def test_module_exits_with_the_status_of_main(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardax", "show", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    stderr = without_native_logs(done.stderr)
    assert stderr.startswith("shardax: ") and "is no run" in stderr


def test_closed_pipe_ends_the_command_quietly(trained: Trained) -> None:
    command = f"{sys.executable} -m shardax show {trained.out} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert without_native_logs(done.stderr) == ""
    assert done.stdout in ("141\n", "0\n")  # 0: all was taken before the reader left
