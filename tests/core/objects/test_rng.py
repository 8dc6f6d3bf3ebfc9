# SPDX-License-Identifier: Apache-2.0
"""Random streams: named, counted, scoped by name, the same in every process."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax._core.init.keys import KeySource
from shardax._core.init.rng import seed_source
from shardax.errors import ModuleAttributeError, ModuleError
from tests.core.objects.elsewhere import in_another_process


def bits(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())


def all_different(keys: list[jax.Array]) -> bool:
    return len({bits(key) for key in keys}) == len(keys)


# --- streams ---


def test_nth_key_is_base_key_folded_with_n() -> None:
    stream = sx.Rngs(jax.random.key(7)).default
    for n in range(3):
        assert bits(stream()) == bits(jax.random.fold_in(jax.random.key(7), n))
    assert int(stream.count) == 3 and stream.count.dtype == jnp.uint32


def test_streams_with_equal_seeds_are_independent() -> None:
    rngs = sx.Rngs(0, params=0, dropout=0)
    keys = [rngs(), rngs.params(), rngs.dropout(), rngs["params"](), rngs.default()]
    assert all_different(keys)
    assert [int(stream.count) for _, stream in rngs.streams()] == [2, 2, 1]


def test_missing_names_use_the_default_stream() -> None:
    rngs = sx.Rngs(0, dropout=1)
    assert rngs.params is rngs.default is rngs["noise"]
    assert rngs.dropout is not rngs.default
    assert bits(rngs.params()) == bits(sx.Rngs(0)())


def test_unknown_stream_error_lists_streams_and_fix() -> None:
    message = r"no stream 'noise' and no default; it has: params, dropout\..*noise=0\)"
    with pytest.raises(ModuleAttributeError, match=message):
        _ = sx.Rngs(params=0, dropout=1).noise
    with pytest.raises(ModuleAttributeError, match=r"it has: none\. Make it with Rngs\(noise=0\)"):
        sx.Rngs()["noise"]
    assert not hasattr(sx.Rngs(params=0), "noise")


@pytest.mark.parametrize(
    "seed",
    [0, -1, 2**40, np.int64(3), np.asarray(3), jnp.asarray(3)],
    ids=["zero", "negative", "wide", "numpy", "numpy 0-d", "jax 0-d"],
)
def test_integer_seeds_give_distinct_repeatable_streams(seed: Any) -> None:
    rngs, again = sx.Rngs(seed, noise=seed), sx.Rngs(seed, noise=seed)
    assert all_different([rngs(), rngs(), rngs.noise()])
    again()
    assert bits(again.noise()) == bits(sx.Rngs(seed, noise=seed).noise())
    if abs(int(seed)) < 2**31:
        assert bits(sx.Rngs(seed)()) == bits(sx.Rngs(int(seed))())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_and_raw_keys_are_used_unchanged(impl: str) -> None:
    key = jax.random.key(5, impl=impl)
    rngs = sx.Rngs(params=key)
    assert rngs.params.key.dtype == key.dtype
    assert bits(rngs.params()) == bits(jax.random.fold_in(key, 0))
    raw = jax.random.key_data(jax.random.key(5))
    for source in (raw, np.asarray(raw)):
        assert bits(sx.Rngs(params=source).params()) == bits(sx.Rngs(jax.random.key(5))())


@pytest.mark.parametrize(
    "source",
    [True, 1.0, "seed", None, [1], jnp.float32(1), np.ones(2), object()],
    ids=lambda source: type(source).__name__,
)
def test_rngs_refuses_what_is_neither_seed_nor_key(source: Any) -> None:
    with pytest.raises(ModuleError, match=r"needs an integer seed or a random key.*Rngs\(0\)"):
        sx.Rngs(params=source)


@pytest.mark.parametrize("name", ["scope", "fork", "streams", "train"])
def test_stream_named_like_method_is_refused(name: str) -> None:
    with pytest.raises(ModuleAttributeError, match=f"'{name}', which is a method"):
        sx.Rngs(**{name: 0})


def test_streams_are_variables_that_filters_select_by_name() -> None:
    state = sx.state(sx.Rngs(0, dropout=1), sx.All(sx.RngState, "dropout"))
    assert list(state.flat()) == [("dropout", "key"), ("dropout", "count")]


def test_restored_state_replays_the_same_keys() -> None:
    rngs = sx.Rngs(0, dropout=1)
    rngs.dropout()
    saved = sx.state(rngs)
    copies = [pickle.loads(pickle.dumps(rngs)), sx.clone(rngs)]
    first = [bits(rngs.dropout()), bits(rngs())]
    for copied in copies:
        assert [bits(copied.dropout()), bits(copied())] == first
    sx.update(rngs, saved)
    assert [bits(rngs.dropout()), bits(rngs())] == first


# --- scopes ---


def test_lazy_value_drawn_at_a_traced_count_matches() -> None:
    def words(key: Any, shape: Any, dtype: Any) -> Any:
        return jnp.broadcast_to(jax.random.key_data(key), shape).astype(dtype)

    def drawn(count: Any) -> Any:
        rngs = sx.Rngs(0)
        rngs.default.count.value = count
        return sx.Param(sx.Init(words, (2,), jnp.uint32, rngs=rngs)).value

    expected = drawn(np.uint32(3)).tolist()
    assert sx.jit(drawn)(jnp.uint32(3)).tolist() == expected
    assert drawn(np.uint32(2)).tolist() != expected


def test_scope_depends_on_name_not_on_draws() -> None:
    fresh, used = sx.Rngs(0, dropout=1), sx.Rngs(0, dropout=1)
    for _ in range(5):
        used.params()
        used.dropout()
    used.scope("other").params()
    for name in ("default", "dropout"):
        assert bits(fresh.scope("block")[name]()) == bits(used.scope("block")[name]())
    assert [int(stream.count) for _, stream in fresh.streams()] == [0, 0]  # scoping draws nothing


@given(names=st.lists(st.text(max_size=8), min_size=2, max_size=6, unique=True))
def test_inserting_a_layer_does_not_reshuffle_the_others(names: list[str]) -> None:
    def keys_of(layers: list[str]) -> dict[str, tuple[int, ...]]:
        rngs = sx.Rngs(0)
        return {layer: bits(rngs.scope(layer).params()) for layer in layers}

    everything = keys_of(names)
    assert keys_of(names[1:]) == {name: everything[name] for name in names[1:]}
    assert keys_of(names[::-1]) == everything
    assert len(set(everything.values())) == len(names)


def test_nested_scopes_differ_from_each_other() -> None:
    rngs = sx.Rngs(0)
    scopes = [rngs, rngs.scope("a"), rngs.scope("b"), rngs.scope("a").scope("b")]
    scopes += [rngs.scope("b").scope("a"), rngs.scope("a").scope("a"), rngs.scope("")]
    assert all_different([scope() for scope in scopes])


def test_scope_of_keys_and_of_seeds_agree() -> None:
    seeded, keyed = sx.Rngs(3), sx.Rngs(jax.random.key(3))
    assert bits(seeded.scope("a")()) == bits(keyed.scope("a")())


def test_rngs_draws_the_same_numbers_in_another_process() -> None:
    here = sx.Rngs(0, dropout=1)
    here.dropout()
    keys = [here(), here.dropout(), here.scope("block").dropout(), here.fork().params()]
    assert in_another_process()["keys"] == [list(bits(key)) for key in keys]


# --- forks ---


def test_fork_takes_one_draw_and_is_independent() -> None:
    rngs = sx.Rngs(0, dropout=1)
    first, second = rngs.fork(), rngs.fork()
    assert all_different([rngs(), first(), first(), second(), first.dropout(), second.dropout()])
    assert [int(stream.count) for _, stream in rngs.streams()] == [3, 2]
    assert bits(sx.Rngs(0, dropout=1).fork()()) == bits(sx.Rngs(0, dropout=1).fork()())


def test_split_fork_has_one_stream_per_slice() -> None:
    forked = sx.Rngs(0, dropout=1).fork(split=4)
    assert forked.default.key.shape == forked.dropout.count.shape == (4,)

    def draw(rngs: sx.Rngs) -> tuple[sx.Rngs, jax.Array]:
        rngs = sx.mutable(rngs)
        return rngs, jnp.stack([jax.random.normal(rngs.dropout()), jax.random.normal(rngs())])

    after, numbers = jax.vmap(draw)(forked)
    assert len({float(number) for number in numbers.ravel()}) == 8
    assert after.dropout.count.value.tolist() == [1, 1, 1, 1]


def test_rngs_uses_no_key_twice() -> None:
    with jax.debug_key_reuse(True):
        rngs = sx.Rngs(0, dropout=jax.random.key(1))
        scoped, forked, split = rngs.scope("x"), rngs.fork(), rngs.fork(split=3)
        for streams in (rngs, scoped, forked, scoped.scope("y"), forked.fork()):
            for _ in range(2):
                jax.random.normal(streams())
                jax.random.normal(streams.dropout())
        jax.vmap(lambda r: jax.random.normal(sx.mutable(r).dropout()))(split)
        jax.jit(lambda r: jax.random.normal(sx.mutable(r)()))(rngs)
        normal = jax.nn.initializers.normal()
        for param in [sx.Param(sx.Init(normal, (2,), rngs=rngs)) for _ in range(2)]:
            assert param.value.shape == (2,)


def test_seeds_beyond_32_bits_fold_their_other_words() -> None:
    assert seed_source(7) == KeySource(7)
    assert seed_source(2**32 + 7) == KeySource(7, (1, 0))
    assert seed_source(-1) != seed_source(2**32 - 1)


# --- numbers, and other streams of the same names ---


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("normal", ((2, 3),)),
        ("uniform", ((4,),)),
        ("randint", ((5,), 0, 10)),
        ("bernoulli", (0.5, (3,))),
        ("choice", (7,)),
        ("permutation", (5,)),
        ("truncated_normal", (-1.0, 1.0, (2,))),
    ],
)
def test_streams_draw_as_jax_random_with_next_key(name: str, args: Any) -> None:
    rngs, twin = sx.Rngs(0, dropout=1), sx.Rngs(0, dropout=1)
    expected = getattr(jax.random, name)
    for draw, key in (
        (getattr(rngs, name), twin),
        (getattr(rngs.dropout, name), twin.dropout),
        (getattr(rngs.params, name), twin.params),
    ):
        assert (draw(*args) == expected(key(), *args)).all()
    assert int(rngs.default.count) == 2 and int(rngs.dropout.count) == 1
    again = sx.jit(lambda rngs: getattr(rngs, name)(*args))
    assert (again(rngs) == expected(twin(), *args)).all()


def test_stream_may_be_named_like_a_draw() -> None:
    rngs = sx.Rngs(0, normal=1)
    assert rngs.normal.name == rngs["normal"].name == "normal"
    assert sx.Rngs(0)["normal"].name == "default"
    with pytest.raises(sx.errors.ModuleAttributeError, match="normal"):
        _ = sx.Rngs(params=0).normal


def test_split_gives_different_keys_and_broadcast_equal_ones() -> None:
    rngs, twin = sx.Rngs(0, dropout=1), sx.Rngs(0, dropout=1)
    split, forked = rngs.split(3), twin.fork(split=3)
    assert (split.default.key.value == forked.default.key.value).all()
    one = rngs.broadcast(3)
    assert one.dropout.key.shape == one.dropout.count.shape == (3,)
    assert (one.dropout.key.value == twin.dropout()).all()
    masks = sx.vmap(lambda rngs: rngs.dropout.normal(), in_axes=0)(one)
    assert masks.shape == (3,) and len(set(masks.tolist())) == 1
    for wrong in (0, "x", None, True):
        with pytest.raises(sx.errors.ModuleError, match="split=4"):
            rngs.broadcast(wrong)  # pyright: ignore[reportArgumentType]


def test_reseed_restarts_named_streams_in_place() -> None:
    rngs = sx.Rngs(0, dropout=1, noise=2)
    shared = rngs.dropout
    for _ in range(3):
        _ = rngs(), rngs.dropout(), rngs.noise()
    rngs.reseed(5, dropout=jax.random.key(7))
    assert rngs.dropout is shared
    assert rngs() == sx.Rngs(5)() and rngs.dropout() == sx.Rngs(dropout=jax.random.key(7)).dropout()
    assert int(rngs.noise.count) == 3
    with pytest.raises(sx.errors.ModuleAttributeError, match="'other'"):
        rngs.reseed(1, other=2)
    with pytest.raises(sx.errors.ModuleError):
        rngs.reseed(1, noise="x")
    assert int(rngs.default.count) == 1 and int(rngs.noise.count) == 3
