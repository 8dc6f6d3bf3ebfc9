# SPDX-License-Identifier: Apache-2.0
"""``x.at[index]`` takes what ``x[index]`` takes, and changes just that part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax import named
from shardax.errors import NamedAxesError
from tests.layers.named.arrays import compiled

NUMBERS = np.arange(24.0, dtype=np.float32).reshape(2, 4, 3)
X = named.wrap(jnp.asarray(NUMBERS), "n", None, None)  # what has no name has the shape (4, 3)
MASK = np.array([True, False, True, False])
INDICES: dict[str, Any] = {
    "array": jnp.asarray(np.array([1, 2])),
    "numpy": np.array([-1, 0]),
    "list": [2, 0],
    "mask": jnp.asarray(MASK),
    "list of booleans": MASK.tolist(),
    "two arrays": (jnp.array([1, 2]), jnp.array([0, 2])),
    "array and slice": (slice(1, 3), [0, 2]),
    "array of two dimensions": jnp.array([[0, 1], [2, 3]]),
    "ellipsis": (..., jnp.array([0, 2])),
    "new dimension": (None, jnp.array([3])),
    "scalar array": jnp.array(2),
    "Variable": sx.Variable(jnp.array([1, 3])),
}


def plain(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    values = (part.value if isinstance(part, sx.Variable) else part for part in parts)
    return tuple(
        part if part is None or part is ... or isinstance(part, slice) else np.asarray(part)
        for part in values
    )


def unwrapped(x: Any) -> np.ndarray:
    return np.moveaxis(np.asarray(x.data), x.dims.index("n"), 0)


CHANGES: dict[str, Any] = {
    "set": (-1.0, lambda old: old * 0 - 1),
    "add": (5.0, lambda old: old + 5),
    "multiply": (3.0, lambda old: old * 3),
    "mul": (3.0, lambda old: old * 3),
    "min": (4.0, lambda old: np.minimum(old, 4)),
    "apply": (jnp.negative, np.negative),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=list(INDICES))
def test_positional_updates_change_parts_along_names(index: Any) -> None:
    dims = []

    def run(x: Any) -> Any:
        changed = {name: getattr(x.at[index], name)(value) for name, (value, _) in CHANGES.items()}
        dims.extend(each.dims for each in changed.values())
        return x[index], x.at[index].get(), changed

    *parts, changed = compiled(run, X)
    for part in parts:
        np.testing.assert_array_equal(unwrapped(part), np.stack([n[plain(index)] for n in NUMBERS]))
    for name, (_, by_numpy) in CHANGES.items():
        expected = NUMBERS.copy()
        for row in expected:
            row[plain(index)] = by_numpy(row[plain(index)])
        np.testing.assert_array_equal(unwrapped(changed[name]), expected)
    assert dims == [X.dims] * len(CHANGES)


def test_values_meet_the_part_by_name_and_position() -> None:
    rows = jnp.array([3, 1])
    per_name = named.wrap(jnp.array([10.0, 20.0]), "n")
    changed = X.at[rows].set(per_name)
    assert np.array_equal(changed.data[:, rows], np.full((2, 2, 3), [[[10.0]], [[20.0]]]))
    block = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    changed = X.at[rows].set(block)
    assert np.array_equal(changed.data[:, rows], np.stack([block, block]))
    part = X[rows]
    assert np.array_equal(X.at[rows].set(part).data, NUMBERS)
    with pytest.raises(NamedAxesError, match="does not fit into a part"):
        X.at[rows].set(named.ones({"other": 2}))


def test_positions_under_other_names_are_further_positions() -> None:
    picks = named.wrap(jnp.array([0, 3, 3]), "pick")
    part, changed = jax.jit(lambda x: (x[picks, [0, 1]], x.at[picks, [0]].add(1.0)))(X)
    assert part.axes == {"n": 2, "pick": 3}
    expected = NUMBERS.copy()
    expected[:, 0, 0] += 1
    expected[:, 3, 0] += 2
    assert changed.axes == X.axes
    np.testing.assert_array_equal(unwrapped(changed), expected)


def test_updates_take_traced_positions() -> None:
    @jax.jit
    def update(x: Any, rows: Any, value: Any, at: Any) -> Any:
        return [x.at[each].set(value) for each in rows], x.at[{"n": at}].set(0.0)

    *rows, at = jnp.array([1, 2]), jnp.array(3), jnp.array(1)
    by_place, by_name = update(X, rows, 7.0, at)
    for index, found in zip(([1, 2], 3), by_place, strict=True):
        expected = NUMBERS.copy()
        expected[:, index] = 7
        np.testing.assert_array_equal(unwrapped(found), expected)
    expected = NUMBERS.copy()
    expected[1] = 0
    np.testing.assert_array_equal(unwrapped(by_name), expected)


def test_updates_have_derivatives() -> None:
    @jax.jit
    @jax.grad
    def gradient(value: Any) -> Any:
        return X.at[jnp.array([1])].add(value).sum().sum("n").data

    assert float(gradient(1.0)) == 6.0


def test_positions_out_of_range_follow_the_mode() -> None:
    far = np.array([1, 9])

    @jax.jit
    def run(x: Any) -> Any:
        changed = [x.at[far].set(-1.0, **mode) for mode in ({}, {"mode": "drop"}, {"mode": "clip"})]
        return changed, x.at[far].get(mode="fill", fill_value=5.0)

    changed, filled = run(X)
    for rows, found in zip(([1], [1], [1, 3]), changed, strict=True):
        expected = NUMBERS.copy()
        expected[:, rows] = -1
        np.testing.assert_array_equal(unwrapped(found), expected)
    expected = np.stack([NUMBERS[:, 1], np.full((2, 3), 5.0)], axis=1)
    np.testing.assert_array_equal(unwrapped(filled), expected)


def test_updates_keep_layout_over_any_mesh(mesh: Mesh) -> None:
    numbers = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    placed = sx.shard(named.wrap(jnp.asarray(numbers), None, "b"), mesh, {"b": "model"})
    indices = [np.array([1, 2]), {"b": np.array([1, 2])}, {"b": 1}, slice(2)]
    with jax.set_mesh(mesh):
        changed = jax.jit(lambda x: [x.at[index].add(1.0) for index in indices])(placed)
    for index, found in zip(indices, changed, strict=True):
        assert found.sharding.is_equivalent_to(placed.sharding, 2)
        expected = numbers.copy()
        expected[(slice(None), index["b"]) if isinstance(index, dict) else index] += 1
        np.testing.assert_array_equal(found.data, expected)


def test_new_axes_are_those_of_the_value() -> None:
    x = named.wrap(jnp.asarray(NUMBERS[0]), "a", "b")
    index = {"new": None, "a": 1}
    assert x.at[index].get().axes == x[index].axes == {"new": 1, "b": 3}
    value = named.wrap(jnp.array([[1.0, 2.0, 3.0]]), "new", "b")
    changed = x.at[index].set(value)
    assert changed.dims == x.dims and changed[{"a": 1}].data.tolist() == [1.0, 2.0, 3.0]
    assert x.at[index].add(1.0)[{"a": 1}].data.tolist() == (NUMBERS[0][1] + 1).tolist()
    with pytest.raises(NamedAxesError, match="None in an index"):
        x.at[None].set(0.0)


# --- keys and contractions ------------------------------------------------------------------------


def test_split_keys_are_split_and_drawn_separately() -> None:
    key = jax.random.key(0)
    keys = named.random_split(key, {"batch": 3})
    again = named.random_split(keys, {"head": 2, "a": 4})
    assert again.axes == {"a": 4, "batch": 3, "head": 2}
    words = np.asarray(jax.random.key_data(again.unwrap("batch", "head", "a"))).reshape(24, -1)
    assert len({tuple(row) for row in words.tolist()}) == 24
    noise = named.normal(keys, {"embed": 5})
    each = jax.vmap(lambda key: jax.random.normal(key, (5,)))(keys.unwrap("batch"))
    np.testing.assert_array_equal(noise.unwrap("batch", "embed"), each)
    for call in (named.random_split, named.normal, named.uniform):
        with pytest.raises(NamedAxesError, match="keys have the axis 'batch' already"):
            call(keys, {"batch": 2})


@pytest.mark.parametrize("draw", [named.normal, named.uniform, named.random_split])
def test_swapped_arguments_of_a_draw_say_so(draw: Any) -> None:
    with pytest.raises(NamedAxesError, match=r"The key comes before the axes: named\.normal\(key"):
        draw({"a": 2}, jax.random.key(0))
    swapped: Any = jax.random.key(0)
    with pytest.raises(NamedAxesError, match=r"named\.random"):
        named.random(swapped, jax.random.normal, {"a": 2})


def test_einsum_sums_over_names_missing_in_result() -> None:
    x = named.wrap(jnp.asarray(NUMBERS), "batch", "time", "embed")
    w, v = np.ones((3, 5), np.float32), named.arange({"mlp": 5}, dtype=np.float32)
    found = named.einsum("time embed, embed mlp, mlp -> time", x, w, v)
    expected = np.einsum("bte,em,m->bt", NUMBERS, w, np.arange(5.0))
    assert found.dims == ("batch", "time") and np.allclose(found.data, expected)
    traced = jax.jit(lambda x, w: named.einsum("embed time, embed mlp -> mlp time", x, w))(x, w)
    assert traced.axes == {"batch": 2, "mlp": 5, "time": 4}
    weight = sx.Param(w, axes=("embed", "mlp"))
    assert named.einsum("embed, embed mlp -> mlp", x, weight).axes == traced.axes
    total = named.einsum("batch time embed ->", x.astype("bfloat16"), dtype=jnp.float32)
    assert (total.dtype, total.axes, total.item()) == (jnp.float32, {}, NUMBERS.sum())


@pytest.mark.parametrize(
    "subscripts",
    [
        "batch embed, embed mlp",
        "embed, embed mlp -> other",
        "embed -> embed",
        "embed embed, mlp ->",
    ],
)
def test_unfit_subscripts_are_refused(subscripts: str) -> None:
    x = named.ones({"batch": 2, "embed": 3})
    with pytest.raises(NamedAxesError, match="einsum"):
        named.einsum(subscripts, x, np.ones((3, 5)))
    with pytest.raises(NamedAxesError, match="The sizes of the axis 'embed' differ"):
        named.einsum("embed, embed mlp -> mlp", x, np.ones((4, 5)))
    with pytest.raises(NamedAxesError, match=r"for float(64|32)"):
        named.einsum("embed, embed -> ", x, np.ones((3, 5)))
