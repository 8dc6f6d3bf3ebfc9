# SPDX-License-Identifier: Apache-2.0
"""A layer from outside of shardax is quantized, adapted and recorded by what it says of itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import errors
from shardax.surgery import LoRA, lora, merge_lora
from tests.advice import run_advice
from tests.values import with_values


class Heads(sx.nn.KernelLayer):
    """A layer of one kernel, without options in its call."""

    takes_precision = True

    def __init__(self, features: int, heads: int, size: int, *, rngs: sx.Rngs) -> None:
        init = sx.Init(jax.nn.initializers.zeros, (features, heads, size), np.float32, rngs=rngs)
        self.kernel = sx.Param(init, axes=("embed", "heads", None))
        self.shape = (features, heads, size)
        self.precision: Any = None

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("...d,dhk->...hk", x, self.kernel.value)

    def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
        return {"kernel": sx.nn.KernelMap.of("...d,dhk->...hk", self.shape)}


class Gated(sx.nn.KernelLayer):
    """A layer of two kernels, whose terms are added inside of the call."""

    def __init__(self, features: int, *, rngs: sx.Rngs) -> None:
        self.features = features
        for name in ("gate", "up"):
            init = sx.Init(jax.nn.initializers.zeros, (features, features), np.float32, rngs=rngs)
            setattr(self, name, sx.Param(init))

    def __call__(self, x: Any) -> Any:
        return self.call_with_terms(x, {})

    def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
        kernel_map = sx.nn.KernelMap.of("...i,ij->...j", (self.features, self.features))
        return {"gate": kernel_map, "up": kernel_map}

    def call_with_terms(self, x: Any, terms: Any, **options: Any) -> Any:
        def product(name: str) -> Any:
            y = x @ getattr(self, name).value
            term = terms.get(name)
            return y if term is None else y + term.scale * (x @ term.a @ term.b)

        return jnp.tanh(product("gate")) * product("up")


X = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
LAYERS = {
    "one kernel": lambda: Heads(4, 3, 2, rngs=sx.Rngs(0)),
    "two kernels": lambda: Gated(4, rngs=sx.Rngs(0)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


MODELS = {
    **{name: lambda make=make: sx.nn.Sequential(make()) for name, make in LAYERS.items()},
    "stack": lambda: sx.nn.Stack(LAYERS["two kernels"], 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_user_layer_is_adapted_and_merged(name: str) -> None:
    model = with_values(MODELS[name]())
    adapted = lora(sx.select(model), 2, scale=0.5)
    np.testing.assert_allclose(adapted(X), model(X), rtol=1e-5, atol=1e-6)

    with_values(adapted)
    merged = merge_lora(adapted)
    assert sx.graphdef(merged) == sx.graphdef(model)
    assert np.abs(merged(X) - model(X)).max() > 0.01
    np.testing.assert_allclose(merged(X), adapted(X), rtol=1e-3, atol=1e-4)


def test_user_layer_of_several_kernels_has_a_pair_for_each() -> None:
    adapted = LoRA(Gated(4, rngs=sx.Rngs(0)), 2)
    paths = {(name, kernel) for name in "ab" for kernel in ("gate", "up")}
    assert set(sx.state(adapted, "lora").flat()) == paths


@each_layer
def test_user_layer_is_quantized(name: str) -> None:
    layer = with_values(LAYERS[name]())
    small = sx.quantize(sx.nn.Sequential(layer), "int8")
    (quantized,) = small.layers
    for kernel_name in layer.kernel_maps():
        kernel = getattr(quantized, kernel_name)
        assert isinstance(kernel, sx.nn.QuantizedKernel)
        assert kernel.scale.shape == (1, *kernel.shape[1:])
    np.testing.assert_allclose(small(X), layer(X), rtol=0.1, atol=0.05)


def test_precision_of_user_layers_is_set_where_they_take_one() -> None:
    model = sx.nn.Sequential(*(make() for make in LAYERS.values()))
    heads, gated = sx.surgery.with_precision(model, "highest").layers
    assert heads.precision == "highest" and not hasattr(gated, "precision")


def test_history_of_an_equation_has_the_dimensions_of_its_stack() -> None:
    make = lambda: sx.nn.Einsum("...d,de->...e", (4, 4), rngs=sx.Rngs(0))  # noqa: E731
    for model, lead in ((make(), ()), (sx.nn.Stack(make, 2), (2,))):
        trained = sx.surgery.with_precision(model, "fp8-delayed")
        histories = [variable for _, variable in sx.iter_variables(trained, sx.AmaxHistory)]
        assert {history.shape for history in histories} == {(*lead, 16)}
        assert sx.jit(lambda model, x: model(x))(with_values(trained), X).shape == (5, 4)


def test_subclass_with_its_own_call_and_maps_is_adapted() -> None:
    class Doubled(sx.nn.Linear):
        def __call__(self, x: Any, out_sharding: Any = None) -> Any:
            return 2 * super().__call__(x, out_sharding)

    class Explained(Doubled):
        def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
            return super().kernel_maps()

        def low_rank_term(self, x: Any, y: Any, a: Any, b: Any, out_sharding: Any) -> Any:
            return 2 * super().low_rank_term(x, y, a, b, out_sharding)

    with pytest.raises(errors.SelectionError, match="whose __call__ is its own"):
        LoRA(Doubled(4, 3, rngs=sx.Rngs(0)), 2)
    adapted = with_values(LoRA(with_values(Explained(4, 3, rngs=sx.Rngs(0))), 2))
    np.testing.assert_allclose(adapted.merged()(X), adapted(X), rtol=1e-4, atol=1e-5)


def test_several_kernels_without_a_call_of_terms_are_refused() -> None:
    class Silent(Gated):
        call_with_terms = sx.nn.KernelLayer.call_with_terms

        def __call__(self, x: Any) -> Any:
            return x

        def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
            return super().kernel_maps()

    with pytest.raises(NotImplementedError, match="Silent has the kernels gate, up"):
        LoRA(Silent(4, rngs=sx.Rngs(0)), 2)(X)


class Nested(Heads):
    """A layer with a kernel, and another such layer within it."""

    def __init__(self, *, rngs: sx.Rngs) -> None:
        super().__init__(4, 3, 2, rngs=rngs)
        self.inner = sx.nn.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return super().__call__(self.inner(x))

    def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
        return super().kernel_maps()


def test_precision_of_a_layer_within_another_is_set() -> None:
    model = sx.nn.Sequential(Nested(rngs=sx.Rngs(0)))
    (changed,) = sx.surgery.with_precision(model, "highest").layers
    assert (changed.precision, changed.inner.precision) == ("highest", "highest")
    (outer,) = sx.surgery.with_precision(
        model, {sx.PathContains("inner"): None, ...: "highest"}
    ).layers
    assert (outer.precision, outer.inner.precision) == ("highest", None)
    assert (model.layers[0].precision, model.layers[0].inner.precision) == (None, None)


def test_user_layer_without_kernels_is_not_adapted() -> None:
    class Empty(sx.nn.KernelLayer):
        def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
            return {}

    with pytest.raises(errors.SelectionError, match="has no kernel that LoRA knows"):
        LoRA(Empty(), 2)


class TwoPrecise(Gated):
    """A layer of two kernels and one precision."""

    takes_precision = True
    precision: Any = None

    def __call__(self, x: Any) -> Any:
        return super().__call__(x)

    def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
        return super().kernel_maps()


@pytest.mark.parametrize(
    "filters",
    [
        {sx.PathContains("gate"): None, ...: "highest"},
        {sx.PathContains("gate"): "highest"},
        {sx.PathContains("up"): "high", ...: "highest"},
    ],
)
def test_layer_has_one_precision_for_all_kernels(filters: Any) -> None:
    model = sx.nn.Sequential(TwoPrecise(4, rngs=sx.Rngs(0)))
    with pytest.raises(errors.SelectionError, match=r"one precision for all of its kernels, but"):
        sx.surgery.with_precision(model, filters)
    assert model.layers[0].precision is None
    (changed,) = sx.surgery.with_precision(model, "highest").layers
    assert changed.precision == "highest"


def test_lora_reaches_layers_within_one_that_is_not_adapted_unasked() -> None:
    class Kept(Nested):
        is_adapted_unasked = False

        def __call__(self, x: Any) -> Any:
            return super().__call__(x)

        def kernel_maps(self) -> dict[str, sx.nn.KernelMap]:
            return super().kernel_maps()

    model = sx.nn.Sequential(Kept(rngs=sx.Rngs(0)))
    adapted = lora(sx.select(model), 2)
    assert set(sx.state(adapted, "lora").flat()) == {
        ("layers", 0, "inner", "a"),
        ("layers", 0, "inner", "b"),
    }
    asked = lora(sx.select(model).at(lambda model: model.layers[0]), 2)
    assert set(sx.state(asked, "lora").flat()) == {("layers", 0, "a"), ("layers", 0, "b")}


def test_map_of_an_equation_with_an_ellipsis_in_the_kernel_is_that_of_einsum() -> None:
    text, shape = "...d,d...->...", (4, 3)
    layer = with_values(sx.nn.Einsum(text, shape, rngs=sx.Rngs(0)))
    assert sx.nn.KernelMap.of(text, shape).equation == layer.kernel_maps()["kernel"].equation


class Tower(sx.Module):
    """Layers in a loop of its own, and one more."""

    def __init__(self, features: int, length: int, *, rngs: sx.Rngs) -> None:
        make = sx.vmap(lambda rngs: sx.nn.Linear(features, features, rngs=rngs))
        self.looped = make(rngs.split(length))
        self.last = sx.nn.Linear(features, features, rngs=rngs)
        self.length = length

    def __call__(self, x: Any) -> Any:
        return self.last(sx.scan(lambda x, layer: layer(x), out_axes=sx.Carry)(x, self.looped))

    def unrolled_paths(self) -> dict[Any, Any]:
        looped = [("layers", index) for index in range(self.length)]
        return {("looped",): looped, ("last",): ("layers", self.length)}


def test_layers_of_a_users_loop_are_recorded_and_patched_by_unrolled_paths() -> None:
    model = sx.nn.Sequential(with_values(Tower(4, 3, rngs=sx.Rngs(0))))
    y, found = sx.surgery.record(model, sx.nn.Linear)(X)
    assert list(found) == [("layers", 0, "layers", index) for index in range(4)]
    np.testing.assert_array_equal(found["layers", 0, "layers", 3], y)

    shift = jnp.arange(4.0)
    for index in range(4):
        patched = sx.surgery.patch(model, {("layers", 0, "layers", index): shift}, jnp.add)
        _, changed = sx.surgery.record(patched, sx.nn.Linear)(X)
        same = [bool((found[path] == changed[path]).all()) for path in found]
        assert same == [other < index for other in range(4)]
        path = ("layers", 0, "layers", index)
        np.testing.assert_allclose(changed[path], found[path] + shift[None], rtol=1e-5)


L = ("layers",)


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (None, "returned None, no mapping"),
        ({(): L}, "has (), which is no path: a tuple of one step or more"),
        ({"looped": [L]}, "has 'looped', which is no path: a tuple of one step or more"),
        ({("looped",): ["layers"]}, "has 'layers', which is no path: a tuple of one step or more"),
        ({("looped",): (L, L)}, "has (('layers',), ('layers',)), which is no path"),
        ({("looped",): [L, L, ("last",)]}, "gives .layers to two layers at .looped"),
    ],
)
def test_unrolled_paths_that_cannot_be_are_refused(paths: Any, problem: str) -> None:
    class Claiming(Tower):
        def unrolled_paths(self) -> Any:
            return paths

    model = with_values(Claiming(4, 3, rngs=sx.Rngs(0)))
    calls = (
        lambda: sx.surgery.record(model, sx.nn.Linear)(X),
        lambda: sx.surgery.patch(model, {("layers", 0): jnp.zeros(4)}),
    )
    for call in calls:
        with pytest.raises(errors.SelectionError) as caught:
            call()
        assert str(caught.value).startswith(f"unrolled_paths of Claiming {problem}")
        advice = '{("looped",): [("layers", index) for index in range(3)]}'
        advised = run_advice(caught.value, advice, {})
        assert advised.items() <= Tower.unrolled_paths(model).items()


@pytest.mark.parametrize("count", [0, 2, 4])
def test_unrolled_paths_of_another_number_of_layers_are_refused(count: int) -> None:
    class Claiming(Tower):
        def unrolled_paths(self) -> Any:
            return {("looped",): [("layers", index) for index in range(count)]}

    model = with_values(Claiming(4, 3, rngs=sx.Rngs(0)))
    with pytest.raises(errors.SelectionError, match=f"gives {count} paths .* of which 3 were"):
        sx.surgery.record(model, sx.nn.Linear)(X)


def test_attribute_that_is_no_method_says_nothing_of_layers() -> None:
    class Plain(Tower):
        unrolled_paths: Any = ()

    _, found = sx.surgery.record(with_values(Plain(4, 3, rngs=sx.Rngs(0))), sx.nn.Linear)(X)
    assert list(found) == [("looped",), ("last",)]
