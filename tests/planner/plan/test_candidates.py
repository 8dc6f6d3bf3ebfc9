# SPDX-License-Identifier: Apache-2.0
"""What a search would compile: groups, meshes, assignments without equals, rejections."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.partition.assignment import mesh_axes_of
from shardax.plan import Layout, NamedShape
from shardax.plan.inputs import Inputs
from shardax.plan.searching.candidates import find_candidates
from shardax.plan.searching.dimensions import trace_dimensions
from shardax.plan.searching.space import SearchSpace, mesh_shapes, search_space
from tests.planner.plan.steps import decoder, param, perceptron

SMALL = Inputs(*perceptron(batch=32, embed=16, mlp=64))
DIMENSIONS = trace_dimensions(SMALL)
DECODER = Inputs(*decoder())
OF_DECODER = trace_dimensions(DECODER)


def space_of(devices: int = 4, **options: Any) -> SearchSpace:
    meshes = options.pop("meshes", mesh_shapes(devices, ("data", "model")))
    return search_space(DIMENSIONS, meshes, activations=SMALL.names_on("batch"), **options)


def space_of_decoder(devices: int = 4, **options: Any) -> SearchSpace:
    meshes = mesh_shapes(devices, ("data", "model"))
    return search_space(OF_DECODER, meshes, activations=DECODER.names_on("batch"), **options)


def named(layout: Layout) -> dict[str, Any]:
    return {name: target for name, target in layout.rules if target is not None}


# --- names ----------------------------------------------------------------------------------------


def test_decoder_names_are_classified_by_the_rules() -> None:
    space = space_of_decoder()
    assert space.groups == (("batch",), ("seq",), ("embed",), ("vocab", "heads", "kv_heads", "mlp"))
    assert dict(space.fixed) == {"layers": None, "head_dim": None}
    assert [note.partition(":")[0] for note in space.notes] == [
        "layers stays whole",
        "head_dim stays whole",
        "tied",
    ]


def test_user_ties_and_fixed_names_are_respected() -> None:
    space = space_of_decoder(tie=[("heads", "mlp")], fix={"vocab": "model", "seq": None})
    assert space.groups == (("batch",), ("embed",), ("heads", "mlp"), ("kv_heads",))
    assert dict(space.fixed) == {"vocab": "model", "seq": None, "layers": None, "head_dim": None}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tie": [("mlp", "emded")]}, "Did you mean 'embed'"),
        ({"fix": {"mpl": None}}, "Did you mean 'mlp'"),
        ({"tie": [("mlp",)], "fix": {"mlp": None}}, "tied twice, or tied and fixed"),
        ({"tie": [("mlp", "embed"), ("mlp",)]}, "tied twice"),
        ({"fix": {"mlp": "modle"}}, "Did you mean 'model'"),
    ],
)
def test_unknown_or_repeated_names_are_refused(options: Any, said: str) -> None:
    with pytest.raises(sx.errors.PlanInputError, match=said):
        space_of(**options)


# --- meshes ---------------------------------------------------------------------------------------


def test_multi_slice_meshes_get_a_slice_axis() -> None:
    assert [dict(mesh) for mesh in mesh_shapes(8, ("data", "model"), slices=2)] == [
        {"slice": 2, "data": 4, "model": 1},
        {"slice": 2, "data": 2, "model": 2},
        {"slice": 2, "data": 1, "model": 4},
    ]


def test_find_candidates_splits_only_the_batch_over_slices() -> None:
    space = space_of(meshes=mesh_shapes(8, ("data",), slices=2))
    for layout in find_candidates(DIMENSIONS, space, SMALL, None).layouts:
        assert {n for n, t in layout.rules if "slice" in mesh_axes_of(t)} <= {"batch"}


@given(st.integers(1, 96), st.integers(1, 3))
def test_meshes_are_all_ordered_factorizations_of_devices(devices: int, axes: int) -> None:
    meshes = mesh_shapes(devices, ("a", "b", "c")[:axes])
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    expected = {
        sizes for sizes in itertools.product(divisors, repeat=axes) if math.prod(sizes) == devices
    }
    assert {tuple(size for _, size in mesh) for mesh in meshes} == expected
    assert len(meshes) == len(expected)


# --- candidates -----------------------------------------------------------------------------------


def test_perceptron_candidates_are_all_distinct_splits() -> None:
    found = find_candidates(DIMENSIONS, space_of(4), SMALL, None)
    assert [layout.name for layout in found.layouts] == [
        "batch=data (4x1)",
        "embed=data (4x1)",
        "mlp=data (4x1)",
        "batch=data embed=data (4x1)",
        "batch=data embed=model (2x2)",
        "batch=data mlp=model (2x2)",
        "embed=data mlp=model (2x2)",
        "batch=data embed=data mlp=model (2x2)",
        "batch=data embed=data+model (2x2)",
        "batch=data+model embed=data (2x2)",
        "batch=data+model embed=data mlp=model (2x2)",
    ]


def test_layouts_repeating_work_are_rejected_with_the_factor() -> None:
    found = find_candidates(DIMENSIONS, space_of(4), SMALL, None)
    reasons = Counter(report.reason for report in found.rejected)
    assert {report.outcome for report in found.rejected} == {"rejected"}
    assert "the devices would do each operation at least 4.00 times" in next(iter(reasons))
    assert found.distinct == len(found.layouts) + len(found.rejected)


def test_layouts_exceeding_memory_are_rejected_with_bytes() -> None:
    held = 4 * (2 * 16 * 64 // 4 + 32 * 16 // 4)  # all split four ways
    found = find_candidates(DIMENSIONS, space_of(4), SMALL, held)
    assert all("model" in str(named(each)) or "data" in str(named(each)) for each in found.layouts)
    large = [report for report in found.rejected if report.argument_bytes]
    assert large
    assert large[0].reason == (
        f"the arguments alone need {sum(large[0].argument_bytes.values()):,} bytes of a device, "
        f"which has {held:,}"
    )
    for layout in found.layouts:
        assert sum(SMALL.place(layout).argument_bytes.values()) <= held


def test_tied_name_indivisible_by_axes_stays_replicated() -> None:
    found = find_candidates(OF_DECODER, space_of_decoder(8), DECODER, None)
    wide = next(each for each in found.layouts if named(each) == {
        "heads": "data", "mlp": "data", "vocab": "data"
    })  # fmt: skip
    assert wide.mesh == (("data", 8), ("model", 1))  # four heads of keys on eight devices


def test_free_name_axis_splits_one_argument_dimension() -> None:
    found = find_candidates(DIMENSIONS, space_of(4), SMALL, None)
    fully = [each for each in found.layouts if named(each).get("batch") == "data"]
    on_one_axis = [each for each in fully if each.sizes == {"data": 4, "model": 1}]
    assert [named(each) for each in on_one_axis] == [
        {"batch": "data"},
        {"batch": "data", "embed": "data"},
    ]


@settings(max_examples=15)
@given(
    batch=st.sampled_from([2, 4, 12, 16]),
    embed=st.sampled_from([3, 8, 16]),
    mlp=st.sampled_from([8, 24]),
    devices=st.sampled_from([2, 4, 6, 8]),
)
def test_candidates_divide_arrays_under_any_axis_names(
    batch: int, embed: int, mlp: int, devices: int
) -> None:
    inputs = Inputs(
        lambda weight, x: x @ weight.value,
        (
            param((embed, mlp), "embed", "mlp"),
            NamedShape((batch, embed), "float32", ("batch", "embed")),
        ),
    )
    model = trace_dimensions(inputs)
    space = search_space(model, mesh_shapes(devices, ("data", "model")), tie=[])
    found = find_candidates(model, space, inputs, None)
    seen: set[Any] = set()
    for layout in found.layouts:
        assert inputs.place(layout).errors == ()
        forms = {_form(layout, order) for order in itertools.permutations(("data", "model"))}
        assert not forms & seen
        seen |= forms


def _form(layout: Layout, order: tuple[str, ...]) -> Any:
    """The specs of a layout with mesh axes called by their place in an order."""
    rules = layout.as_rules
    specs = [rules.spec(names) for names in (("embed", "mlp"), ("batch", "embed"))]
    sizes = tuple(layout.sizes[axis] for axis in order)
    places = [[tuple(sorted(order.index(a) for a in mesh_axes_of(e))) for e in s] for s in specs]
    return sizes, str(places)
