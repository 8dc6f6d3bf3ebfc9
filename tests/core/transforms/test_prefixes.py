# SPDX-License-Identifier: Apache-2.0
"""Prefixes mean the same in every transform that takes them, and fail with the same errors.

A *way* is one transform with its own kind of entries: ``one`` and ``other`` are two that any array
of the examples takes, ``bad`` is one that none of them takes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import FilterError, PrefixError, ShardaxError, TransformError
from tests.advice import run_advice
from tests.conftest import make_mesh
from tests.core.transforms.examples import Box, Tied
from tests.strategies import assert_same_model

MESH = make_mesh(jax.sharding.AxisType.Auto)


def _on(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


class Way(NamedTuple):
    """One transform that takes prefixes."""

    into: str
    out: str
    mapping: type[sx.StateAxes] | type[sx.StateSharding]
    one: Any
    other: Any
    bad: Any
    transform: Callable[..., Any]

    def __call__(self, function: Any, into: Any, out: Any = None) -> Any:
        """Transforms a function with prefixes of its arguments and of its result."""
        return self.transform(function, into, self.one if out is None else out)


WAYS = {
    "vmap": Way(
        "in_axes", "out_axes", sx.StateAxes, 0, 1, 7,
        lambda f, into, out: sx.vmap(f, in_axes=into, out_axes=out),
    ),
    "scan": Way(
        "in_axes", "out_axes", sx.StateAxes, 0, 1, 7,
        lambda f, into, out: sx.scan(f, in_axes=into, out_axes=out),
    ),
    "jit": Way(
        "in_shardings", "out_shardings", sx.StateSharding, _on(), _on("data"),
        _on(None, None, None, "data"),
        lambda f, into, out: sx.jit(f, in_shardings=into, out_shardings=out),
    ),
    "shard_map": Way(
        "in_specs", "out_specs", sx.StateSharding, PartitionSpec(), PartitionSpec("data"),
        PartitionSpec(None, None, None, "data"),
        lambda f, into, out: sx.jit(sx.shard_map(f, mesh=MESH, in_specs=into, out_specs=out)),
    ),
}  # fmt: skip


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Every transform that takes prefixes."""
    return WAYS[request.param]


def _model() -> Any:
    model = Box()
    model.w, model.s = sx.Param(jnp.ones((8, 8))), sx.BatchStat(jnp.zeros((8, 8)))
    return model


def _square(_: Any) -> Any:
    return jnp.zeros((8, 8))


def _step(model: Any) -> Any:
    model.s[...] = model.s + 1
    return _square(model)


# --- what fits ---


def test_first_match_gives_the_entry(way: Way) -> None:
    model = _model()
    filters = {sx.PathContains("w"): way.other, sx.Param: way.bad, ...: way.one}
    way(_step, (way.mapping(filters),))(model)
    assert model.s.tolist() == jnp.ones((8, 8)).tolist()


@pytest.mark.parametrize("form", ["one for all", "state", "nested", "mapping of a state"])
def test_entries_may_be_given_per_path(way: Way, form: str) -> None:
    model = Box()
    model.layers = [_model(), _model()]
    inner = {"w": way.other, "s": way.one}
    nested = {"layers": {0: inner, 1: inner}}
    prefix: Any = {
        "one for all": way.one,
        "state": sx.State(nested),
        "nested": nested,
        "mapping of a state": way.mapping(sx.State(nested)),
    }[form]

    def step(m: Any) -> Any:
        return _step(m.layers[0]) + _step(m.layers[1])

    way(step, (prefix,))(model)
    assert all(layer.s.tolist() == jnp.ones((8, 8)).tolist() for layer in model.layers)


def test_shared_variable_accepts_equal_entries(way: Way) -> None:
    model = Tied()
    model.embed.value = jnp.ones((8, 8))
    prefixes = (
        way.mapping({sx.Param: way.other}),
        {"m": way.mapping({"none": way.bad, ...: way.other})},
    )
    way(lambda a, b: _square(a), prefixes)(model, {"m": model})
    assert model.embed.shape == (8, 8)


# --- what does not ---


def _fails(way: Way, error: type[Exception], call: Callable[[Any], Any]) -> str:
    """Returns the message of the error, after which the model is as it was."""
    model = _model()
    with pytest.raises(error) as caught:
        call(model)
    assert_same_model(model, _model())
    assert isinstance(caught.value, ShardaxError)
    return str(caught.value)


def test_variable_that_no_filter_matches_is_named(way: Way) -> None:
    prefix = way.mapping({sx.Param: way.one})
    message = _fails(way, PrefixError, lambda m: way(lambda model: _step(model), (prefix,))(m))
    assert message.startswith(
        f"{way.into} for the argument at .model: No filter matches the BatchStat at .s"
    )


def test_variable_that_a_state_lacks_is_named(way: Way) -> None:
    prefix = sx.State({"w": way.one})
    message = _fails(way, PrefixError, lambda m: way(lambda model: _step(model), (prefix,))(m))
    assert message == f"{way.into} has no entry for the BatchStat at .model.s."


def test_everything_comes_last(way: Way) -> None:
    with pytest.raises(FilterError, match=r"`\.\.\.`, which matches everything"):
        way.mapping({...: way.one, sx.Param: way.other})


def test_unequal_entries_of_shared_variable_name_paths(way: Way) -> None:
    def call(model: Any) -> Any:
        prefixes = (way.mapping({...: way.one}), {"m": way.mapping({...: way.other})})
        return way(lambda a, b: _square(a), prefixes)(model, {"m": model})

    message = _fails(way, TransformError, call)
    head = f"One Param is reached by two paths with different {way.into}:\n  .a.w: "
    assert message.startswith(head) and "\n  .b.m.w: " in message


def test_filters_match_all_paths_of_a_variable(way: Way) -> None:
    model = Tied()
    model.embed.value = jnp.ones((8, 8))
    by_embed = way.mapping({sx.PathContains("embed"): way.other})
    way(_square, (by_embed,))(model)
    by_head = way.mapping({sx.PathContains("head"): way.other, ...: way.one})
    with pytest.raises(TransformError) as caught:
        way(lambda model: _square(model), (by_head,))(model)
    first, second = str(caught.value).splitlines()[1:3]
    assert first.startswith("  .model.embed: ") and second.startswith("  .model.head: ")


def test_prefix_of_another_number_of_entries_names_the_arguments(way: Way) -> None:
    message = _fails(way, PrefixError, lambda m: way(lambda a, b: _square(a), (way.one,) * 3)(m, m))
    assert message.startswith(f"{way.into} has 3 entries") and "a, b" in message


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (lambda e: [e], "a list of 1 where the argument has a dict of 'm', 'x'"),
        (lambda e: {"m": e}, "a dict of 'm' where the argument has a dict of 'm', 'x'"),
        (
            lambda e: {"m": e, "y": e},
            "a dict of 'm', 'y' where the argument has a dict of 'm', 'x'",
        ),
    ],
)
def test_containers_must_be_the_same(way: Way, prefix: Any, expected: str) -> None:
    tree = {"m": _model(), "x": jnp.ones((8, 8))}
    message = _fails(
        way, PrefixError, lambda m: way(lambda tree: _square(tree["m"]), (prefix(way.one),))(tree)
    )
    assert message.startswith(f"{way.into} does not fit the argument at .tree: it has {expected}.")


def test_containers_inside_module_are_no_prefix(way: Way) -> None:
    message = _fails(way, PrefixError, lambda m: way(lambda model: _step(model), ([way.one],))(m))
    assert message.startswith(f"{way.into} for the argument at .model, a Box, is a list.")


def test_filters_choose_among_variables_only(way: Way) -> None:
    prefix = way.mapping({...: way.one})
    message = _fails(
        way, PrefixError, lambda m: way(lambda m, x: _square(m), (way.one, prefix))(m, jnp.ones(8))
    )
    name = way.mapping.__name__
    assert message.startswith(f"{way.into} gives a {name} for the argument at .x, which holds no")


def test_prefix_of_other_mapping_type_is_refused_by_name(way: Way) -> None:
    other = sx.StateSharding if way.mapping is sx.StateAxes else sx.StateAxes
    prefix = other({...: None})
    message = _fails(way, PrefixError, lambda m: way(_step, (prefix,))(m))
    assert message.startswith(way.into) and other.__name__ in message


def test_prefix_of_the_result_says_so(way: Way) -> None:
    message = _fails(
        way,
        PrefixError,
        lambda m: way(lambda m: {"y": (_square(m),)}, (way.one,), {"y": [way.one]})(m),
    )
    assert message.startswith(
        f"{way.out} does not fit the result at .y: it has a list of 1 where the result has a tuple"
    )


# --- DiffState: which Variables of an argument, in the words of grad ---


def _loss(model: Any, scale: Any) -> Any:
    return scale * (model.w.sum() + model.s.sum())


def test_diff_state_chooses_by_filter_as_mappings_do() -> None:
    gradient = sx.grad(_loss, argnums=sx.DiffState(0, sx.BatchStat))(_model(), 2.0)
    assert list(gradient.flat()) == [("s",)]


@pytest.mark.parametrize(
    ("argnums", "message"),
    [
        (sx.DiffState(2, sx.Param), r"argnums=2 is out of range: the call has 2"),
        (sx.DiffState(0, sx.Cache), r"argument 'model' \(Box\) has no Variable .* filter Cache"),
        ((sx.DiffState(0, sx.Param), 0), r"argnums names an argument twice"),
    ],
)
def test_unfitting_diff_state_names_the_argument(argnums: Any, message: str) -> None:
    model = _model()
    with pytest.raises(sx.errors.TransformError, match=message) as caught:
        sx.grad(_loss, argnums=argnums)(model, 2.0)
    assert_same_model(model, _model())
    if "twice" in message:
        names = {"sx": sx, "filter": sx.Param, "other_filter": sx.BatchStat}
        joined = run_advice(caught.value, "sx.DiffState(0, (filter, other_filter))", names)
        assert {*sx.grad(_loss, argnums=joined)(model, 2.0).flat()} == {("w",), ("s",)}


def test_diff_state_is_no_prefix_and_says_so(way: Way) -> None:
    message = _fails(way, PrefixError, lambda m: way(_step, (sx.DiffState(0, sx.Param),))(m))
    assert way.into in message and "DiffState" in message


def test_axes_of_a_module_show_their_entries() -> None:
    axes = sx.StateAxes({"slow": sx.Carry, sx.Param: 0, ...: None})
    assert repr(axes) == "StateAxes({'slow': Carry, Param: 0, ...: None})"
    assert pickle.loads(pickle.dumps(sx.Carry)) is sx.Carry


def test_entry_that_is_no_axis_is_refused() -> None:
    with pytest.raises(PrefixError) as caught:
        sx.StateAxes({sx.Param: "layers", ...: None})
    assert str(caught.value) == (
        "StateAxes gives 'layers' for Param; an entry is an axis (an int), None for what the whole "
        "batch shares, or sx.Carry in sx.scan."
    )
