# SPDX-License-Identifier: Apache-2.0
"""Warnings about names of rules that no array has, and about stacks that are no pipeline."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.advice import run_advice


def _layers(axis: str) -> dict[str, list[sx.Param]]:
    return {"up": [sx.Param(jnp.ones((4, 8)), axes=("embed", axis)) for _ in range(6)]}


def _restore(model: Any, mesh: Mesh, rules: Any, folder: Path) -> Any:
    sx.train.checkpoint.save(model, folder / "saved")
    sx.train.checkpoint.restore(model, folder / "saved", mesh=mesh, rules=rules)
    return model


@pytest.mark.parametrize(
    ("axis", "rule"), [("mlp", "mpl"), ("vocabulary", "vocabulry"), ("heads", "head")]
)
@pytest.mark.parametrize(
    "place",
    [
        lambda model, mesh, rules, folder: sx.shard(model, mesh, rules),
        lambda model, mesh, rules, folder: sx.abstract(model, mesh, rules),
        lambda model, mesh, rules, folder: sx.shardings(model, mesh, rules),
        lambda model, mesh, rules, folder: sx.partition_specs(model, rules),
        _restore,
    ],
    ids=["shard", "abstract", "shardings", "specs", "restore"],
)
def test_misspelt_rules_are_warned_of(
    axis: str, rule: str, place: Any, mesh: Mesh, tmp_path: Path
) -> None:
    model = _layers(axis)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        place(model, mesh, {"embed": None, rule: "model"}, tmp_path)
    assert [record.filename for record in caught] == [__file__]
    text = str(caught[0].message)
    assert f"'{rule}'" in text and f"'{axis}'" in text
    assert "up[0], up[1], up[2], up[3] and 2 more" in text.replace(".up", "up")
    assert model["up"][5].value.is_fully_replicated


def test_warning_of_a_lone_array_has_no_path(mesh: Mesh) -> None:
    kernel = sx.Param(np.ones((8, 8), np.float32), axes=("embed", "mlp"))
    with pytest.warns(UserWarning, match="^Names of axes look misspelt. no rule mentions"):
        sx.shard(kernel, mesh, {"embed": None, "mpl": "model"})


def test_rules_of_activations_are_not_warned_of(mesh: Mesh) -> None:
    model = sx.shard(_layers("mlp"), mesh, {"batch": "data", "seq": None, "mlp": "model"})
    assert model["up"][0].value.sharding.spec == P(None, "model")
    sx.shard(model, mesh, {})
    assert model["up"][0].value.sharding.is_fully_replicated


def test_stack_without_microbatches_is_no_pipeline(mesh: Mesh) -> None:
    rules = [("layers", "model")]

    def stack(**options: Any) -> sx.nn.Stack:
        return sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 4, **options)

    model = {"blocks": stack()}
    (diagnostic,) = [d for d in sx.check(model, mesh, rules) if d.severity == "warning"]
    assert diagnostic.code == "gathered-stack" and diagnostic.path == ("blocks",)
    count = mesh.shape["model"]
    codes: list[str] = []

    def rest() -> None:
        codes.extend(d.code for d in sx.check(model, mesh, rules))

    advice = f"with sx.parallel(microbatches={count}): ..."
    run_advice(str(diagnostic), advice, {"sx": sx, "body": rest})
    codes += [d.code for d in sx.check({"blocks": stack(microbatches=2)}, mesh, rules)]
    codes += [d.code for d in sx.check(model, mesh, {"layers": None})]
    assert "gathered-stack" not in codes
    assert np.all(np.asarray(model["blocks"](jnp.zeros((2, 4)))) == 0)
