# SPDX-License-Identifier: Apache-2.0
"""Jitted and Remat: Modules around another one, which behave as it does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import DonationError, PrefixError, StaticArgumentError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Mask
from tests.strategies import assert_same_model
from tests.values import with_values

X = jnp.linspace(-1, 1, 8).reshape(2, 4)
TRACES: list[Any] = []


class Noisy(sx.Module):
    """A layer with dropout, a counter, and a running mean, that counts its traces."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear: Any = sx.nn.Linear(4, 4, rngs=rngs)
        self.dropout = Mask(rngs)
        self.mean = sx.BatchStat(jnp.zeros(4))
        self.calls = sx.Variable(0)

    def __call__(self, x: Any, mode: str = "train", scale: float = 1.0) -> Any:
        TRACES.append(mode)
        self.calls += 1
        x = self.dropout(jnp.tanh(self.linear(x)))
        if mode == "train":
            self.mean[...] = 0.9 * self.mean + 0.1 * x.mean(0)
        return x * scale

    def peek(self) -> Any:
        return self.calls.value


def fresh_class() -> type[Noisy]:
    """Returns a class of which nothing has been compiled."""

    class Fresh(Noisy):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    return Fresh


def noisy(seed: int = 0) -> Noisy:
    return with_values(Noisy(sx.Rngs(seed)), seed)


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    TRACES.clear()


AROUND = pytest.mark.parametrize("around", [sx.Jitted, sx.Remat])


# --- both ---


@AROUND
def test_wrapped_layer_computes_as_the_layer(around: Callable[[Any], Any]) -> None:
    layer, plain = noisy(), noisy()
    wrapped = around(layer)
    assert wrapped.body is layer
    for _ in range(3):
        np.testing.assert_allclose(wrapped(X), plain(X), rtol=1e-5, atol=1e-6)
    assert_same_model_within(layer, plain)


def assert_same_model_within(first: Any, second: Any) -> None:
    """Asserts equal structure, and values that a compiler may have rounded differently."""
    assert sx.graphdef(first) == sx.graphdef(second)
    pairs = zip(jax.tree.leaves(sx.state(first)), jax.tree.leaves(sx.state(second)), strict=True)
    for one, other in pairs:
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other


@AROUND
def test_side_inputs_that_are_no_arrays_are_static(around: Callable[[Any], Any]) -> None:
    layer, plain = around(noisy()), noisy()
    for mode in ("train", "eval", "train"):
        np.testing.assert_allclose(
            layer(X, mode, scale=2.0), plain(X, mode, scale=2.0), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(layer(X, mode=mode), plain(X, mode=mode), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.mean.value, plain.mean.value, rtol=1e-5, atol=1e-6)


@AROUND
def test_gradients_and_random_numbers_are_the_layers(around: Callable[[Any], Any]) -> None:
    layer, plain = noisy(), noisy()
    loss = lambda layer: (layer(X) ** 2).sum()  # noqa: E731
    for transform in (lambda f: f, sx.jit):
        ours = transform(sx.grad(loss))(around(layer))
        theirs = transform(sx.grad(loss))(plain)
        expected = {("body", *path): g for path, g in theirs.flat().items()}
        assert list(ours.flat()) == list(expected)
        for path, gradient in expected.items():
            np.testing.assert_allclose(ours.flat()[path], gradient, rtol=1e-5, atol=1e-6)
    assert int(layer.calls) == int(plain.calls) == 2


@AROUND
def test_modes_reach_the_layer(around: Callable[[Any], Any]) -> None:
    layer = around(noisy())
    layer.eval()
    assert layer.body.dropout.deterministic is True
    plain = noisy()
    plain.eval()
    np.testing.assert_allclose(layer(X), plain(X), rtol=1e-5, atol=1e-6)


@AROUND
def test_wrapper_exposes_attributes_of_the_layer(around: Callable[[Any], Any]) -> None:
    layer = noisy()
    wrapped = around(layer)
    assert wrapped.linear is layer.linear and int(wrapped.peek()) == 0
    wrapped.note = "seen"
    wrapped.linear = replaced = sx.nn.Linear(4, 4, use_bias=False, rngs=sx.Rngs(1))
    assert layer.note == "seen" and layer.linear is replaced
    del wrapped.note
    assert not hasattr(layer, "note")
    assert wrapped(X).shape == (2, 4)
    with pytest.raises(AttributeError, match="'Noisy' object has no attribute 'absent'"):
        wrapped.absent  # noqa: B018


@AROUND
def test_paths_lead_through_the_wrapper(around: Callable[[Any], Any]) -> None:
    model = around(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    assert [path for path, _ in sx.iter_variables(model)] == [("body", "kernel"), ("body", "bias")]
    assert repr(model).startswith(
        f"{around.__name__}(  # 9 parameters\n  body=Linear(\n    kernel=Param("
    )


COPIES = {
    "clone": sx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "split and merge": lambda model: sx.merge(*sx.split(model)),
    "jax.tree": lambda model: jax.tree.map(lambda x: x, model),
    "freeze and thaw": lambda model: sx.thaw(sx.freeze(model)),
}


@AROUND
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
def test_wrapped_layer_is_copied_with_its_layer(
    around: Callable[..., Any], duplicate: Callable[[Any], Any]
) -> None:
    model = around(noisy())
    copied = duplicate(model)
    assert_same_model(copied, model)
    np.testing.assert_array_equal(copied(X), model(X))
    assert int(copied.calls) == 1 and copied.body is not model.body


@AROUND
def test_wrappers_nest_around_any_part_of_a_model(around: Callable[[Any], Any]) -> None:
    model, plain = noisy(), noisy()
    model.linear = around(model.linear)
    nested = around(sx.Remat(sx.Jitted(around(model))))
    loss = lambda layer: (layer(X) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(nested(X), plain(X), rtol=1e-5, atol=1e-6)
    ours, theirs = (sx.grad(loss)(m) for m in (nested, plain))
    kernels = [g for path, g in ours.flat().items() if path[-1] == "kernel"]
    np.testing.assert_allclose(kernels[0], theirs.linear.kernel, rtol=1e-5, atol=1e-6)


@AROUND
def test_jitted_and_remat_wrap_callable_modules_only(around: Callable[[Any], Any]) -> None:
    class Silent(sx.Module):
        pass

    for wrong in (jnp.tanh, Silent(), Silent):
        with pytest.raises(TransformError, match=around.__name__) as caught:
            around(wrong)
        names = {"sx": sx, "f": jnp.tanh}
        for lifted in (
            run_advice(caught.value, "sx.jit(f)", names),
            run_advice(caught.value, "sx.remat(f)", names),
        ):
            assert float(lifted(0.0)) == 0.0


@AROUND
def test_stateless_calls_and_slots_go_through(around: Callable[[Any], Any]) -> None:
    layer, plain = around(noisy()), noisy()
    slots, values = sx.unbind(layer, freeze=True)
    result, values = slots.stateless_call(values, X)
    np.testing.assert_allclose(result, plain(X), rtol=1e-5, atol=1e-6)
    assert int(sx.bind(slots, values).calls) == 1 and int(layer.calls) == 0


# --- Jitted ---


def test_equal_layers_are_traced_once() -> None:
    kind = fresh_class()
    layers = [sx.Jitted(kind(sx.Rngs(seed))) for seed in range(4)]
    for layer in [*layers, *layers, sx.clone(layers[0])]:
        layer(X)
    assert TRACES == ["train"]
    layers[0](X, mode="eval")
    layers[1](jnp.ones((3, 4)))
    layers[2](X, mode="eval")
    assert TRACES == ["train", "eval", "train"]


def test_edit_of_the_layer_is_seen() -> None:
    layer = sx.Jitted(noisy())
    layer(X)
    layer.eval()
    layer(X)
    layer.body = sx.nn.Linear(4, 2, rngs=sx.Rngs(0))
    assert layer(X).shape == (2, 2)


def test_inside_jit_it_joins_the_outer_program() -> None:
    model = noisy()
    model.linear = sx.Jitted(model.linear)
    for make in (sx.make_jaxpr, jax.make_jaxpr):
        text = str(make(lambda m, x: m.linear(x))(model, X))
        assert "jit" not in text.replace("let", "")
    assert sx.jit(model)(X).shape == (2, 4)
    plain = sx.jit(noisy())
    np.testing.assert_allclose(sx.jit(sx.Jitted(noisy()))(X), plain(X), rtol=1e-5, atol=1e-8)


def test_jitted_compiles_under_other_transforms() -> None:
    layer = sx.Jitted(fresh_class()(sx.Rngs(0)))
    for _ in range(3):
        sx.grad(lambda layer: layer(X).sum())(layer)
    assert TRACES == ["train"]
    layer.eval()
    mapped = sx.vmap(lambda layer, x: layer(x, "eval"), in_axes=(None, 0))
    for _ in range(2):
        mapped(layer, X[:, None])
    assert TRACES == ["train", "eval"]


def test_exception_leaves_the_layer_as_it_was() -> None:
    layer = sx.Jitted(noisy())
    with pytest.raises(Exception, match="4"):
        layer(jnp.ones((2, 5)))
    assert int(layer.calls) == 0 and layer(X).shape == (2, 4)


def test_static_arguments_are_those_of_the_call() -> None:
    traces = []

    class Repeat(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(2.0)

        def __call__(self, x: Any, times: int, plus: int = 0) -> Any:
            traces.append((times, plus))
            return jnp.concatenate([x * self.w.value] * times) + plus

    for options in ({"static_argnums": 1}, {"static_argnames": "times"}, {"static_argnums": -2}):
        layer = sx.Jitted(Repeat(), **options)
        assert layer(X, 2).shape == layer(X, times=2).shape == (4, 4)
        assert layer(X, 3, 1).shape == (6, 4)
    with pytest.raises(StaticArgumentError, match="time"):
        sx.Jitted(Repeat(), static_argnames="time")
    with pytest.raises(StaticArgumentError, match="static_argnums=3"):
        sx.Jitted(Repeat(), static_argnums=3)
    with pytest.raises(StaticArgumentError, match="hashable"):
        layer(X, [2])


def test_donation_spares_the_layer_variables() -> None:
    layer = sx.Jitted(noisy(), donate_argnums=0)
    x = X + 1
    layer(x)
    assert x.is_deleted() and not layer.linear.kernel.value.is_deleted()
    by_name = sx.Jitted(noisy(), donate_argnames="x")
    x = X + 1
    by_name(x=x)
    assert x.is_deleted()
    with pytest.raises(DonationError):
        sx.Jitted(noisy(), donate_argnames="y")


def test_declared_shardings_apply_to_arguments(auto_mesh: Any) -> None:
    rows = NamedSharding(auto_mesh, PartitionSpec("data"))
    columns = NamedSharding(auto_mesh, PartitionSpec(None, "model"))
    for declared in (rows, (rows,)):
        layer = sx.Jitted(
            sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), in_shardings=declared, out_shardings=columns
        )
        assert layer(X).sharding.is_equivalent_to(columns, 2)
        kernel = layer.kernel.value.sharding
        assert not isinstance(kernel, NamedSharding) or kernel.is_fully_replicated
        inside = sx.jit(lambda layer, x: layer(x))
        assert inside(layer, X).sharding.is_equivalent_to(columns, 2)
    with pytest.raises(PrefixError):
        sx.Jitted(sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), in_shardings=(rows, rows))(X)


def test_options_are_structure_and_compare_by_value() -> None:
    body = noisy()
    same = [sx.Jitted(body, donate_argnums=0, compiler_options={}) for _ in range(2)]
    assert sx.graphdef(same[0]) == sx.graphdef(same[1])
    assert sx.graphdef(same[0]) != sx.graphdef(sx.Jitted(body))
    assert "donate_argnums=0" in repr(same[0])
    with pytest.raises(TypeError, match="unknown"):
        sx.Jitted(body, unknown=1)


def test_option_that_is_not_hashable_is_refused() -> None:
    with pytest.raises(StaticArgumentError) as caught:
        sx.Jitted(noisy(), compiler_options={"flags": ["a"]})
    assert str(caught.value) == (
        "The option compiler_options={'flags': ['a']} of sx.Jitted is not hashable (unhashable "
        "type: 'list'), but is part of a model's structure. Use tuples instead of lists."
    )


def test_variables_used_through_closures_are_live() -> None:
    shared = sx.Param(jnp.ones(4))

    class Uses(sx.Module):
        def __call__(self, x: Any) -> Any:
            shared[...] = shared * 2
            return x * shared[...][None]

    layer = sx.Jitted(Uses())
    assert layer(X)[0, 3] == 2 * X[0, 3] and layer(X)[0, 3] == 4 * X[0, 3]
    assert shared.value.tolist() == [4.0] * 4


# --- Remat ---


def test_remat_policy_chooses_what_is_kept() -> None:
    class Deep(sx.Module):
        def __init__(self) -> None:
            self.layers = [sx.nn.Linear(4, 4, rngs=sx.Rngs(i)) for i in range(4)]

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jnp.sin(layer(x))
            return x

    keep = jax.checkpoint_policies.everything_saveable
    full, all_kept = sx.Remat(Deep()), sx.Remat(Deep(), policy=keep)
    texts = [
        str(jax.make_jaxpr(jax.grad(lambda x, m=m: (m(x) ** 2).sum()))(X)) for m in (full, all_kept)
    ]
    assert [text.count(" sin ") for text in texts] == [7, 4]
    assert sx.graphdef(full) != sx.graphdef(all_kept)
    np.testing.assert_allclose(sx.jit(full)(X), sx.jit(all_kept)(X), rtol=1e-5, atol=1e-8)
    names = [jax.checkpoint_policies.save_only_these_names("a") for _ in range(2)]
    assert len({sx.graphdef(sx.Remat(Deep(), policy=policy)) for policy in names}) == 1


def test_static_side_inputs_need_the_static_option() -> None:
    layer = noisy()
    assert sx.remat(layer, static="auto")(X, "eval").shape == (2, 4)
    with pytest.raises(StaticArgumentError, match="static='all'"):
        sx.remat(layer, static="all")
