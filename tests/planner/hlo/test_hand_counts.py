# SPDX-License-Identifier: Apache-2.0
"""Wire bytes and operations of whole programs, against counts by hand, for each compiler.

The programs are golden files of one version of each compiler, and, where a compiler is installed,
what it makes of the cases now. In formulas b is the batch, d the width, f the hidden size and s the
bytes of an element; of n devices an all-reduce sends 2 (n-1)/n of its bytes, others (n-1)/n.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardax.hlo import ProgramFacts, read_program
from tests.planner.hlo.cases import BATCH, CASES, EXPERTS, HIDDEN, LAYERS, SLICES, TOKENS, WIDTH
from tests.planner.hlo.compilers import COMPILERS

GOLDEN = Path(__file__).parent / "golden"
ALL = CASES | SLICES
Wire = dict[tuple[str, tuple[str, ...]], float]

b, d, f = BATCH, WIDTH, HIDDEN
TWO = 1 / 2  # (n-1)/n of two, four and eight devices
FOUR = 3 / 4
EIGHT = 7 / 8


@dataclass(frozen=True)
class Count:
    """What is known by hand.

    Attributes:
        flops: Of one device.
        wire: Wire bytes by kind and axes, without those of gradients over ``data``.
        gradients: What a reduce-scatter of the gradients sends; an all-reduce sends it twice.
    """

    flops: float = 0.0
    wire: Wire = field(default_factory=dict)
    gradients: float = 0.0


def tensor_parallel(s: int) -> Count:
    # y and the gradient of x, [b/2, d], are summed over model; the loss, 4 bytes, over data.
    activations = 2 * (2 * FOUR * b / 2 * d * s)
    return Count(
        12 * b * d * f / 8,
        {("all-reduce", ("model",)): activations, ("all-reduce", ("data",)): 2 * TWO * 4},
        gradients=TWO * 2 * d * f / 4 * s,
    )


def data_parallel(s: int) -> Count:
    return Count(10 * b * d * f / 8, gradients=EIGHT * 2 * d * f * s)


def fully_sharded(s: int) -> Count:
    # Both weights are gathered once: the backward pass takes what the forward pass gathered.
    gathers = EIGHT * 2 * d * f * s
    return Count(10 * b * d * f / 8, {("all-gather", ("data",)): gathers}, gathers)


def scan(s: int) -> Count:
    activations = LAYERS * 2 * (2 * FOUR * b / 2 * d * s)
    return Count(
        LAYERS * 12 * b * d * d / 8,
        {("all-reduce", ("model",)): activations, ("all-reduce", ("data",)): 2 * TWO * 4},
        gradients=LAYERS * TWO * 2 * d * d / 4 * s,
    )


def remat(s: int) -> Count:
    # Of a layer only the first product is computed anew; nothing needs the second.
    once = scan(s)
    return Count(LAYERS * 14 * b * d * d / 8, once.wire, once.gradients)


def sharded_scan(s: int) -> Count:
    gathers = LAYERS * 2 * (EIGHT * 2 * d * d * s)  # forward, and anew in the backward pass
    return Count(
        LAYERS * 14 * b * d * d / 8,
        {("all-gather", ("data",)): gathers, ("all-reduce", ("data",)): 2 * EIGHT * 4},
        gradients=gathers / 2,
    )


def decoder(s: int) -> Count:
    width, head, heads, hidden, length, batch = 256, 32, 8 / 4, 512 / 4, 128, 8 / 2
    tokens = batch * length
    weights = 4 * width * width / 4 + 2 * width * hidden  # of a layer, on a device, gathered
    attention = 2 * (2 * batch * heads * length * length * head)
    forward = 2 * tokens * weights + attention
    unneeded = 2 * tokens * hidden * width  # the last product of what is computed anew
    sums = 2 * FOUR * tokens * width * s  # out and down; out anew; of the gradients qkv and up
    return Count(
        LAYERS * (4 * forward - unneeded),
        {
            ("all-gather", ("data",)): LAYERS * 2 * TWO * weights * s,
            ("all-reduce", ("model",)): LAYERS * 5 * sums,
        },
        gradients=LAYERS * TWO * weights * s,
    )


def experts(s: int) -> Count:
    sent = EIGHT * TOKENS / 8 * EXPERTS * d * s
    return Count(2 * TOKENS * d * d, {("all-to-all", ("expert",)): 2 * sent})


def slices_train(s: int) -> Count:
    gathers = FOUR * 2 * d * f * s
    shards = 2 * TWO * 2 * (d * f / 4) * s  # each device sums its shard of the gradients
    wire: Wire = {("all-gather", ("data",)): gathers, ("all-reduce", ("slice",)): shards}
    return Count(10 * b * d * f / 8, wire, gradients=gathers)


def one(kind: str, axes: str, times: float) -> Callable[[int], Count]:
    """A collective of a quarter of half the rows, times a number."""
    return lambda s: Count(wire={(kind, tuple(axes.split())): times * (b / 2) * (d / 4) * s})


def slices_psum_all(s: int) -> Count:
    shard = (b / 2) * (d / 4) * s
    return Count(
        wire={
            ("reduce-scatter", ("data",)): FOUR * shard,
            ("all-reduce", ("slice",)): 2 * TWO * shard / 4,
            ("all-gather", ("data",)): FOUR * shard,
        }
    )


COUNTS: dict[str, Callable[[int], Count]] = {
    "tensor_parallel": tensor_parallel,
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "decoder": decoder,
    "experts": experts,
    "scan": scan,
    "remat": remat,
    "sharded_scan": sharded_scan,
    "psum": one("all-reduce", "model", 2 * FOUR),
    "psum_all": one("all-reduce", "data model", 2 * EIGHT),
    "all_gather": one("all-gather", "data", TWO * 2),
    "psum_scatter": one("reduce-scatter", "model", FOUR),
    "all_to_all": one("all-to-all", "model", FOUR),
    "ppermute": one("collective-permute", "model", 1),
    "slices_train": slices_train,
    "slices_psum": one("all-reduce", "slice", 2 * TWO),
    "slices_psum_all": slices_psum_all,
    "slices_all_gather": one("all-gather", "slice", TWO * 2),
    "slices_psum_scatter": one("reduce-scatter", "slice", TWO),
    "slices_all_to_all": one("all-to-all", "slice", TWO),
    "slices_ppermute": one("collective-permute", "slice", 1),
}

# The share of gradients over data that versions of compilers reduce-scatter; the others are
# all-reduced. Fully sharded layers that XLA for CPU and for TPU v4 leave with an all-reduce send
# twice what they need.
SCATTERED = {
    ("v5e", "fully_sharded"): 1.0,
    ("v5e", "decoder"): 1 / 4,
    ("v5e", "sharded_scan"): 1.0,
    ("v4", "decoder"): 1 / 4,
    ("tpu7x", "decoder"): 1.0,
    ("h100", "fully_sharded"): 1.0,
    ("h100", "sharded_scan"): 1.0,
    ("h100", "decoder"): 1.0,
}


def read(hardware: str, name: str, text: str) -> ProgramFacts:
    return read_program(text, ALL[name].mesh, slices=2 if hardware == "v5e-slices" else 1)


def text_of(file: Path) -> str:
    return gzip.decompress(file.read_bytes()).decode()


def golden(hardware: str, name: str) -> str:
    """The golden file of the oldest version of a compiler."""
    return text_of(min(GOLDEN.glob(f"*/{hardware}/{name}.hlo.gz")))


def wire_of(facts: ProgramFacts) -> Wire:
    wire: Wire = {}
    for each in facts.collectives:
        key = each.kind, each.axes
        wire[key] = wire.get(key, 0.0) + each.wire_bytes
    return wire


def plus(wire: Wire, more: Wire) -> Wire:
    keys = wire.keys() | more.keys()
    total = {key: wire.get(key, 0.0) + more.get(key, 0.0) for key in keys}
    return {key: value for key, value in total.items() if value}


def expected(hardware: str, name: str) -> tuple[float, Wire]:
    s = 4 if hardware == "cpu" else 2
    count = COUNTS[name](s)
    share = SCATTERED.get((hardware, name), 0.0)
    gradients: Wire = {
        ("reduce-scatter", ("data",)): share * count.gradients,
        ("all-reduce", ("data",)): (1 - share) * 2 * count.gradients,
    }
    return count.flops, plus(count.wire, gradients)


EACH = [
    (hardware, name)
    for hardware, compiler in COMPILERS.items()
    for name in compiler.cases
    if name != "slices_train"  # there the compiler pads what it scatters
]


FILES = [
    file for hardware, name in EACH for file in sorted(GOLDEN.glob(f"*/{hardware}/{name}.hlo.gz"))
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "-".join(file.parts[-3:]))
def test_golden_programs_match_hand_counts(file: Path) -> None:
    hardware, name = file.parts[-2], file.name.removesuffix(".hlo.gz")
    facts = read(hardware, name, text_of(file))
    assert (facts.matmul_flops, wire_of(facts)) == expected(hardware, name)
    assert all(each.runs_known for each in facts.collectives)
    assert [w for w in facts.warnings if "promoted" not in w] == []


def test_tensor_parallel_perceptron_matches_documented_bytes() -> None:
    for hardware, wire in [("cpu", 11_534_340), ("v5e", 5_767_172), ("h100", 5_767_172)]:
        facts = read(hardware, "tensor_parallel", golden(hardware, "tensor_parallel"))
        assert facts.wire_bytes() == wire
        assert facts.matmul_flops == 3_221_225_472


def test_between_slices_only_each_devices_shard_travels() -> None:
    facts = read("v5e-slices", "slices_train", golden("v5e-slices", "slices_train"))
    count, wire = slices_train(2), wire_of(facts)
    assert facts.matmul_flops == count.flops
    assert {key: wire[key] for key in count.wire} == count.wire
    # The compiler pads gradients before it scatters them, and moves what then is on a neighbour.
    padded = wire["reduce-scatter", ("data",)] / count.gradients
    assert 1 < padded < 1.1
    assert {each.axes for each in facts.collectives if each.crosses_slices} == {("slice",)}
    assert (
        sum(each.wire_bytes for each in facts.collectives if each.crosses_slices)
        == (count.wire["all-reduce", ("slice",)])
    )


def test_collective_across_fusions_counts_once_as_asynchronous() -> None:
    text = golden("v5e", "fully_sharded")
    assert text.count(" all-gather(") == 4  # one is synchronous; of the other three stages are
    gathers = [c for c in read("v5e", "fully_sharded", text).collectives if c.kind == "all-gather"]
    assert sorted((each.asynchronous, each.payload) for each in gathers) == [
        (False, d * f * 2),
        (True, d * f * 2),
    ]


@pytest.mark.parametrize("hardware", [n for n, c in COMPILERS.items() if c.kind == "tpu"])
def test_tpu_named_scatter_counts_as_reduce_scatter(hardware: str) -> None:
    for name in COMPILERS[hardware].cases:
        text = golden(hardware, name)
        named = re.findall(r"calls=%(all-reduce-scatter[\w.\-]*)", text)
        facts = read(hardware, name, text)
        found = [each for each in facts.collectives if each.kind == "reduce-scatter"]
        assert len([each for each in found if not each.crosses_slices]) >= len(named), name


def test_collectives_name_the_line_of_the_model() -> None:
    for hardware in ("cpu", "v5e", "h100"):
        facts = read(hardware, "decoder", golden(hardware, "decoder"))
        files = {each.source.partition(":")[0] for each in facts.collectives}
        assert files == {"cases.py"}


@pytest.mark.parametrize(
    ("hardware", "name"), [pytest.param(*each, marks=COMPILERS[each[0]].marks) for each in EACH]
)
def test_current_compilers_match_hand_counts(hardware: str, name: str) -> None:
    compiler = COMPILERS[hardware]
    facts = read(hardware, name, compiler.text(name))
    flops, wire = expected(hardware, name)
    assert facts.matmul_flops == flops
    if compiler.installed and (GOLDEN / compiler.version / hardware / f"{name}.hlo.gz").exists():
        assert wire_of(facts) == wire
    else:  # of another version, which may scatter what this one reduces
        gradients = [(kind, ("data",)) for kind in ("all-reduce", "reduce-scatter")]
        found = {key: value for key, value in wire_of(facts).items() if key not in gradients}
        assert found == {key: value for key, value in wire.items() if key not in gradients}


def test_parameters_are_followed_through_sends_between_slices() -> None:
    text = golden("v5e-slices", "slices_train")
    found = read_program(text, SLICES["slices_train"].mesh, slices=2, arguments=(".up", ".down"))
    said = {(each.kind, each.axes, each.why) for each in found.collectives if each.parameters}
    assert said >= {
        ("all-gather", ("data",), "gathers .up before dot_general"),
        ("reduce-scatter", ("data",), "sums the gradient of .up over data"),
        ("all-reduce", ("slice",), "sums the gradient of .up over slice"),
        ("all-reduce", ("slice",), "sums the gradient of .down over slice"),
    }
