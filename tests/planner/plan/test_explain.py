# SPDX-License-Identifier: Apache-2.0
"""What a layout sends and why, and what differs between two layouts, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import PlanInputError
from shardax.plan.report.explanation import BY, diff, explain, groups
from tests.planner.plan.samples import array, gather, report, sample_reports

FSDP, BOTH, DP, TP, *_ = sample_reports()


def test_explanation_lists_source_lines_reasons_and_bytes() -> None:
    assert explain(FSDP) == EXPLAINED.strip("\n")


EXPLAINED = """
fsdp 16x1 over data=16, model=1: fits; peak 9.10 GiB of 15.8 GiB; 0.59 - 1.41 s (estimate), \
bound by memory
10.3 GB on the wire of each device in a step

6.90 GB   67%  decoder.py:240
    all-gather along data, 24 x 307 MB of bf16: 6.90 GB, while other work goes on
        dot_general needs the whole of a matrix that is split by embed
        carries model.layers.mlp.gate.kernel, model.layers.mlp.up.kernel

3.30 GB   32%  train.py:31
    reduce-scatter along data, 24 x 147 MB of bf16: 3.30 GB
        sums the gradient of a matrix that is split by embed
        carries model.layers.mlp.gate.kernel, model.layers.mlp.up.kernel

90.0 MB    1%  no line of the model (made by the compiler, or of a library)
    all-reduce along data, at least 1 x 4.00 MB of bf16: 90.0 MB, while other work goes on
        of jit(train_step)/reduce_sum
"""


@given(st.sampled_from(BY), st.sampled_from([None, "data", "model"]))
def test_groups_hold_every_collective_along_the_axis_once(by: str, axis: str | None) -> None:
    found = groups(BOTH, axis, by)
    members = [each for group in found for each in group.collectives]
    along = [each for each in BOTH.collectives if axis is None or axis in each.axes]
    assert sorted(members, key=repr) == sorted(along, key=repr)
    sizes = [group.wire_bytes for group in found]
    assert sizes == sorted(sizes, reverse=True)


def test_equal_collectives_are_grouped_with_their_layers() -> None:
    layers = tuple(
        gather(1e9, asynchronous=False, parameters=(f"up[{n}].w", f"gate[{n}].w", f"up[{n + 1}].w"))
        for n in (0, 1, 7)
    )
    text = explain(report("a", (("data", 16),), collectives=layers))
    assert text.splitlines()[4:] == [
        "    3 times all-gather along data, 24 x 44.4 MB of bf16: 1.00 GB, 3.00 GB together",
        "        dot_general needs the whole of a matrix that is split by embed",
        "        carries up[0-8].w, gate[0-7].w",
    ]


def test_names_of_operations_that_compilers_joined_are_cut() -> None:
    long = gather(1e9, why="", op_name="jit(step)/" + "dot_general/" * 20)
    text = explain(report("a", (("data", 16),), collectives=(long,)))
    (line,) = [line.strip() for line in text.splitlines() if "jit(step)" in line]
    name = line.removeprefix("of ")
    assert name.startswith("jit(step)/dot_general/") and name.endswith("…") and len(name) == 90


def test_uncompiled_layout_is_explained_by_its_reason() -> None:
    assert explain(TP).splitlines() == [
        "tp 1x16 over data=1, model=16: does not fit",
        "HLO temporaries (43.40G) exceeds available HBM (15.75G)",
    ]
    assert explain(FSDP, "model").splitlines()[1:] == ["nothing on the wire along model"]


def test_unknown_axis_or_grouping_is_refused() -> None:
    with pytest.raises(PlanInputError, match=r"no axis 'modle'; it has 'data', 'model'\. Did you"):
        explain(FSDP, "modle")
    with pytest.raises(PlanInputError, match=r"by='lines' is no grouping; there are 'source'"):
        explain(FSDP, by="lines")


def test_comparison_lists_all_differences_of_two_layouts() -> None:
    text = diff(FSDP, BOTH)
    assert text[text.index("Rules") :] == DIFFERENCES.strip("\n")


DIFFERENCES = """
Rules  a        b
mlp    None     model
seq    no rule  data+model

Mesh   a   b
data   16  4
model  1   4

Figures              a          b          b - a
peak                 9.10 GiB   8.20 GiB   -922 MiB
work                 115 TFLOP  144 TFLOP  +28.8 TFLOP
wire                 10.3 GB    20.3 GB    +10.0 GB
cross-slice          0 B        1.00 GB    +1.00 GB
time: lower          586 ms     610 ms     +24.0 ms
time: upper          1.41 s     1.50 s     +90.0 ms
time: compute        586 ms     610 ms     +24.0 ms
time: memory         593 ms     500 ms     -93.0 ms
time: communication  229 ms     350 ms     +121 ms

Wire bytes                                   a        b        b - a
all-reduce along model, decoder.py:240       0 B      12.1 GB  +12.1 GB
reduce-scatter along data, train.py:31       3.30 GB  0 B      -3.30 GB
all-reduce along data+model, decoder.py:240  0 B      1.00 GB  +1.00 GB
all-gather along data, decoder.py:240        6.90 GB  7.20 GB  +300 MB
all-reduce along data, no line of the model  90.0 MB  0 B      -90.0 MB

Arrays                        a            b
model.layers.mlp.gate.kernel  embed: data  embed: data, mlp: model
"""


def test_comparing_uncompiled_layout_shows_no_figures() -> None:
    assert diff(DP, TP).splitlines()[7:] == [
        "Figures              a          b  b - a",
        "peak                 29.8 GiB   -",
        "work                 115 TFLOP  -",
        "memory traffic       480 GB     -",
        "wire                 10.3 GB    -",
        "cross-slice          0 B        -",
        "time: lower          586 ms     -",
        "time: upper          1.41 s     -",
        "time: compute        586 ms     -",
        "time: memory         593 ms     -",
        "time: communication  229 ms     -",
    ]


def test_layout_differs_from_itself_only_by_policies() -> None:
    assert diff(FSDP, FSDP).endswith("\n\nThere is no difference.")
    strict = replace(FSDP, layout=replace(FSDP.layout, policies=("error", "replicate")))
    assert diff(FSDP, strict).splitlines()[3:] == [
        "Rules          a      b",
        "(on_conflict)  first  error",
    ]


def test_layers_that_are_split_alike_are_one_line() -> None:
    names = ("embed", "mlp")
    layers = [f"model.layers[{n}].up.kernel" for n in (0, 1, 10)]
    row = tuple(array(path, (8, 8), names, ("data",), ()) for path in layers)
    column = tuple(array(path, (8, 8), names, (), ("data",)) for path in layers)
    text = diff(replace(FSDP, arrays=row), replace(FSDP, arrays=column))
    assert text.splitlines()[3:] == [
        "Arrays                        a            b",
        "model.layers[0-10].up.kernel  embed: data  mlp: data",
    ]


def test_of_many_changes_the_largest_are_listed() -> None:
    many = tuple(gather(float(n + 1) * 1e6, source=f"m.py:{n}") for n in range(30))
    text = diff(replace(FSDP, collectives=()), replace(FSDP, collectives=many))
    rows = text[text.index("Wire bytes") :].splitlines()
    assert rows[1].split() == [
        "all-gather",
        "along",
        "data,",
        "m.py:29",
        "0",
        "B",
        "30.0",
        "MB",
        "+30.0",
        "MB",
    ]
    assert (len(rows), rows[-1]) == (22, "and 10 more")


def test_meshes_of_another_order_differ_by_it() -> None:
    turned = replace(BOTH, layout=replace(BOTH.layout, mesh=tuple(reversed(BOTH.layout.mesh))))
    assert diff(BOTH, turned).splitlines()[3:] == [
        "Mesh   a            b",
        "order  data, model  model, data",
    ]


def test_array_of_one_layout_alone_is_named() -> None:
    more = replace(FSDP, arrays=(*FSDP.arrays, array("model.bias", (8,), (None,), ("data",))))
    assert diff(FSDP, more).splitlines()[3:] == [
        "Arrays      a          b",
        "model.bias  not there  0: data",
    ]
