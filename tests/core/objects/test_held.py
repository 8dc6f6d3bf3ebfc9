# SPDX-License-Identifier: Apache-2.0
"""What a Module holds is tracked or refused: layers inside of callables and other values."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import ModuleAttributeError, StaticAttributeError
from shardax.train import checkpoint
from tests.advice import run_advice
from tests.core.objects.copies import COPIES


class Scale(sx.Module):
    """A layer with one parameter."""

    def __init__(self, weight: float = 3.0) -> None:
        self.weight = sx.Param(jnp.float32(weight))

    def __call__(self, x: Any) -> Any:
        return x * self.weight


class Model(sx.Module):
    """Calls what stands in its attribute."""

    def __init__(self, part: Any = None) -> None:
        self.part = part

    def __call__(self, x: Any) -> Any:
        return self.part(x)


class Plain:
    """An ordinary object."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


class Slotted:
    """An ordinary object without a dictionary."""

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer


@dataclasses.dataclass(frozen=True)
class Settings:
    """Configuration by value."""

    function: Callable[[Any], Any]


def closure(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer(x)


def decorated(layer: Any) -> Callable[[Any], Any]:
    return functools.wraps(layer.__call__)(lambda x: layer(x))


def with_default(layer: Any) -> Callable[[Any], Any]:
    return lambda x, layer=layer: layer(x)


def with_keyword_default(layer: Any) -> Callable[[Any], Any]:
    return lambda x, *, layer=layer: layer(x)


def with_attribute(layer: Any, holder: Any) -> Any:
    holder.layer = layer
    return holder


def in_a_list_far_down(layer: Any) -> Callable[[Any], Any]:
    table = {"a": [({"b": collections.deque([layer])},)]}
    return lambda x: table["a"][0][0]["b"][0](x)


def deep(layer: Any) -> Callable[[Any], Any]:
    for _ in range(2000):  # deeper than Python's stack
        layer = closure(layer)
    return layer


def of_generator(layer: Any) -> Callable[[Any], Any]:
    def layers() -> Iterator[Any]:
        mine = layer
        while True:
            yield mine

    running = layers()
    next(running)
    return lambda x: next(running)(x)


def of_iterator(layer: Any) -> Callable[[Any], Any]:
    layers = itertools.cycle([layer])
    return lambda x: next(layers)(x)


def of_local_class(layer: Any) -> Any:
    class Local:
        def __call__(self, x: Any) -> Any:
            return layer(x)

    return Local()


def of_class_attribute(layer: Any) -> Any:
    return type("Local", (), {"layer": layer})


def with_rule(layer: Any) -> Any:
    function = jax.custom_vjp(jnp.tanh)
    function.defvjp(lambda x: (layer(x), None), lambda _, gradient: (gradient,))
    return function


def of_object_array(layer: Any) -> Callable[[Any], Any]:
    array = np.empty(1, object)
    array[0] = layer
    return lambda x: array[0](x)


# Around one layer: what walks find it in, at the path of the whole.
TRACKED: dict[str, Callable[[Any], Any]] = {
    "the layer": lambda layer: layer,
    "sx.Remat": sx.Remat,
    "sx.Jitted": sx.Jitted,
    "sx.jit": sx.jit,
    "sx.vmap": sx.vmap,
    "sx.vmap with a list": lambda layer: sx.vmap(layer, in_axes=[0]),
    "sx.remat": sx.remat,
    "sx.remat as decorator": lambda layer: sx.remat(prevent_cse=False)(layer),
    "sx.jit of sx.vmap": lambda layer: sx.jit(sx.vmap(layer)),
    "sx.vmap of sx.remat": lambda layer: sx.vmap(sx.remat(layer)),
    "sx.vmap of a method": lambda layer: sx.vmap(layer.__call__),
    "sx.named.nmap": sx.named.nmap,
    "partial": lambda layer: functools.partial(lambda layer, x: layer(x), layer),
    "partial of sx.vmap": lambda layer: functools.partial(sx.vmap(layer)),
    "method": lambda layer: layer.__call__,
}

# What they would not find it in.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "lambda": closure,
    "wraps": decorated,
    "default": with_default,
    "keyword default": with_keyword_default,
    "attribute of a function": lambda layer: with_attribute(layer, lambda x: x),
    "attribute of a partial": lambda layer: with_attribute(layer, functools.partial(max)),
    "attribute of sx.jit": lambda layer: with_attribute(layer, sx.jit(Scale())),
    "containers": in_a_list_far_down,
    "deep": deep,
    "jax.jit": jax.jit,
    "jax.jit of a lambda": lambda layer: jax.jit(closure(layer)),
    "jax.vmap": jax.vmap,
    "jax.checkpoint": jax.checkpoint,
    "jax.grad": lambda layer: jax.grad(lambda x: layer(x).sum()),
    "jax.custom_vjp": with_rule,
    "sx.jit of a lambda": lambda layer: sx.jit(closure(layer)),
    "sx.vmap of a lambda": lambda layer: sx.vmap(closure(layer)),
    "sx.remat with a policy": lambda layer: sx.remat(Scale(), policy=lambda *_, **__: bool(layer)),
    "sx.custom_jvp": lambda layer: sx.custom_jvp(closure(layer)),
    "sx.capture": lambda layer: sx.capture(layer, sx.Intermediate),
    "partial of a lambda": lambda layer: functools.partial(closure(layer)),
    "partial with a lambda": lambda layer: functools.partial(map, closure(layer)),
    "partial of a lambda with a layer": lambda layer: functools.partial(
        lambda first, x: layer(first(x)), Scale()
    ),
    "method of an object": lambda layer: Plain(layer).__call__,
    "method of a layer by a lambda": lambda layer: types.MethodType(
        lambda self, x: layer(self(x)), Scale()
    ),
    "method of a list": lambda layer: [layer].pop,
    "operator": lambda layer: operator.methodcaller("__call__", layer),
    "staticmethod": staticmethod,
    "lru_cache": lambda layer: functools.lru_cache(closure(layer)),
    "singledispatch": lambda layer: functools.singledispatch(closure(layer)),
    "object": Plain,
    "object with slots": Slotted,
    "object of an object": lambda layer: Plain({"a": [Plain(layer)]}),
    "namespace": lambda layer: types.SimpleNamespace(layer=layer),
    "frozen dataclass": lambda layer: Settings(closure(layer)),
    "object of a local class": of_local_class,
    "class": of_class_attribute,
    "generator": of_generator,
    "iterator": of_iterator,
    "array of objects": of_object_array,
    "Variable": lambda layer: lambda x: x * layer.weight,
    "slots": lambda layer: functools.partial(map, closure(sx.unbind(layer)[0])),
}

# How a value comes into a model: each returns the model, and a path to the value.
PLACES: dict[str, Callable[[Any], Any]] = {
    "in __init__": lambda value: (Model(value), ".part"),
    "later": lambda value: (_assigned(Model(), value), ".part"),
    "in a list": lambda value: (Model([1, value]), ".part[1]"),
    "in a dict of tuples": lambda value: (Model({"a": (1, value)}), ".part['a'][1]"),
    "appended": lambda value: (_appended(Model([]), value), ".part[0]"),
    "by an edit": lambda value: (
        sx.select(Model(Scale())).at(lambda model: model.part).set(value),
        ".part",
    ),
    "past assignment": lambda value: (_put(Model(), value), ".part"),
}


def _assigned(model: Model, value: Any) -> Model:
    model.part = value
    return model


def _appended(model: Model, value: Any) -> Model:
    model.part.append(value)
    return model


def _put(model: Model, value: Any) -> Model:
    vars(model)["part"] = value
    sx.state(model)  # a walk
    return model


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("wrap", TRACKED.values(), ids=TRACKED.keys())
def test_wrapped_layer_is_tracked(wrap: Any, place: Any) -> None:
    layer = Scale()
    model, path = place(wrap(layer))
    ((_, tracked),) = sx.iter_variables(model)
    assert tracked is layer.weight
    called = sx.select(model).at_keypaths(path).get()
    assert called(jnp.ones(2)).tolist() == [3.0, 3.0]
    gradients = sx.grad(lambda m: sx.select(m).at_keypaths(path).get()(jnp.ones(2)).sum())(model)
    assert [float(gradient) for gradient in gradients.flat().values()] == [2.0]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("wrap", REFUSED.values(), ids=REFUSED.keys())
def test_value_with_hidden_layer_is_refused(wrap: Any, place: Any) -> None:
    value = wrap(Scale())
    with pytest.raises(StaticAttributeError, match=r"the (Scale|Param) that it reaches by") as no:
        place(value)
    text = str(no.value)
    assert len(text) < 1200
    assert "part of no state, gradient, optimizer or checkpoint" in text
    assert any(where in text for where in ("'part' of Model", "item 0 of a list", " at .part"))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("transform", [sx.vmap, sx.remat, sx.jit, lambda f: sx.vmap(sx.remat(f))])
def test_copy_of_model_has_wrapper_of_its_own_layer(transform: Any, copied: Any) -> None:
    model = Model(transform(Scale()))
    copy = copied(model)
    assert sx.graphdef(copy) == sx.graphdef(model)
    ((_, weight),) = sx.iter_variables(copy)
    weight[...] = 5.0
    assert (float(copy(jnp.ones(1))[0]), float(model(jnp.ones(1))[0])) == (5.0, 3.0)
    step = sx.jit(lambda m, x: m(x))
    assert (float(step(copy, jnp.ones(1))[0]), float(step(model, jnp.ones(1))[0])) == (5.0, 3.0)


def test_drawing_of_model_shows_wrapped_layer() -> None:
    model = Model(sx.vmap(sx.remat(Scale())))
    lines = (
        "Model(  # 1 parameters",
        "  part=sx.vmap(",
        "    sx.remat(",
        "      Scale(",
        "        weight=Param(float32[]),",
        "      ),",
        "    ),",
        "  ),",
        ")",
    )
    assert repr(model) == sx.view.to_text(model) == "\n".join(lines)
    assert "part=sx.vmap(...)" in repr(sx.select(model).at_instances_of(Scale))
    assert repr(model.part) == "<sx.vmap of <sx.remat of Scale>>"


def test_check_names_wrapped_layer() -> None:
    def findings(wrap: Any) -> list[tuple[str, str, Any]]:
        model = Model(wrap(sx.nn.Linear(4, 3, rngs=sx.Rngs(0))))
        mesh = jax.sharding.AbstractMesh((2,), ("model",))
        return [(d.severity, d.code, d.path) for d in sx.check(model, mesh, {"out": "model"})]

    assert findings(sx.vmap) == findings(lambda layer: layer) != []


def test_edits_reach_wrapped_layer() -> None:
    model = Model(sx.vmap(Scale()))
    layers = sx.select(model).at_instances_of(Scale)
    assert layers.get() is model.part.function
    replaced = layers.set(Scale(7.0))
    assert float(replaced(jnp.ones(1))[0]) == 7.0 and float(model(jnp.ones(1))[0]) == 3.0
    for wrap in (sx.vmap, sx.jit):
        model = Model(wrap(Scale()))
        taken, rest = sx.select(model).at_instances_of(Scale).partition()
        assert jax.tree.leaves(rest) == []
        assert float(sx.combine(taken, rest)(jnp.ones(1))[0]) == 3.0


# --- what the errors say --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "way"),
    [
        (closure, "the closed-over name 'layer'"),
        (with_default, "the default of 'layer'"),
        (Plain, "the attribute 'layer'"),
        (lambda layer: Plain(closure(layer)), "the attribute 'layer', there by the closed-over"),
        (lambda layer: jax.jit(layer), "the attribute '__wrapped__'"),
        (of_class_attribute, "the class attribute 'layer'"),
        (of_generator, "the closed-over name 'running', there by the local name 'mine'"),
        (lambda layer: sx.jit(closure(layer)), "the function that it runs, there by the closed"),
    ],
)
def test_error_names_layer_and_the_way_to_it(wrap: Any, way: str) -> None:
    model = Model()
    with pytest.raises(StaticAttributeError) as refused:
        model.part = wrap(Scale())
    assert f"as attribute 'part' of Model: the Scale that it reaches by {way}" in str(refused.value)
    assert model.part is None


def test_advice_of_error_leads_to_tracked_layer() -> None:
    layer, x = Scale(), jnp.ones(2)
    with pytest.raises(StaticAttributeError) as refused:
        Model(lambda x: layer(x) + 1.0)
    names = {"functools": functools, "layer": layer, "function": lambda layer, x: layer(x) + 1.0}
    partial = run_advice(refused.value, "functools.partial(function, layer)", names)
    made = [
        run_advice(refused.value, "sx.jit(layer)", {"sx": sx, "layer": layer}),
        run_advice(refused.value, "sx.vmap(layer)", {"sx": sx, "layer": layer}),
        run_advice(refused.value, "sx.remat(layer)", {"sx": sx, "layer": layer}),
    ]
    assert Model(partial)(x).tolist() == [4.0, 4.0]
    assert [Model(part)(x).tolist() for part in made] == [[3.0, 3.0]] * 3
    for part in (partial, *made):
        assert [variable is layer.weight for _, variable in sx.iter_variables(Model(part))] == [
            True
        ]


def test_lambda_over_the_module_itself_is_refused() -> None:
    class Own(sx.Module):
        def __init__(self) -> None:
            self.layer = Scale()
            self.call = lambda x: self.layer(x)

    with pytest.raises(StaticAttributeError, match="the Own that it reaches by the closed-over"):
        Own()

    class ByMethod(Own):
        def __init__(self) -> None:
            self.layer = Scale()
            self.call = self.run

        def run(self, x: Any) -> Any:
            return self.layer(x)

    model = ByMethod()
    copied = sx.clone(model)
    copied.layer.weight[...] = 5.0
    assert (float(model.call(1.0)), float(copied.call(1.0))) == (3.0, 5.0)


def test_layers_of_nn_refuse_functions_with_layers() -> None:
    layer = Scale()
    with pytest.raises(StaticAttributeError, match=r"as attribute 'activation' of MLP: the Scale"):
        sx.nn.MLP(2, 4, activation=lambda x: layer(x), rngs=sx.Rngs(0))
    with pytest.raises(StaticAttributeError, match=r"item 1 of a list in attribute 'layers' of S"):
        sx.nn.Sequential(layer, lambda x: layer(x))
    steered = sx.select(sx.nn.Sequential(layer)).at(lambda model: model.layers[0])
    with pytest.raises(StaticAttributeError, match=r"as what stands at \.layers\[0\]: the Scale"):
        steered.apply(lambda layer: lambda x: layer(x) + 1.0)
    model = steered.apply(lambda layer: functools.partial(lambda f, x: f(x) + 1.0, layer))
    assert float(model(1.0)) == 4.0 and list(sx.state(model).flat()) == [("layers", 0, 0, "weight")]


def test_metadata_of_variables_holds_no_layer() -> None:
    layer, variable = Scale(), sx.Param(1.0)
    with pytest.raises(
        StaticAttributeError, match="the metadata entry 'hook' of a Param: the Scale"
    ):
        sx.Param(1.0, hook=closure(layer))
    with pytest.raises(
        StaticAttributeError, match="the metadata entry 'hook' of a Param: the Scale"
    ):
        variable.set_metadata(hook=jax.jit(layer))
    assert dict(variable.metadata) == {}


# --- what is bound later --------------------------------------------------------------------------


def test_layer_that_a_function_reaches_later_is_refused_by_the_next_walk() -> None:
    def late() -> Any:
        model = Model(lambda x: layer(x))
        layer = Scale()
        return model

    def put_into_a_list() -> Any:
        layers: list[Any] = []
        model = Model(lambda x: layers[0](x))
        layers.append(Scale())
        return model

    def put_into_an_object() -> Any:
        holder = Plain(None)
        model = Model([holder])
        assert sx.state(model).flat() == {}
        holder.layer = Scale()
        return model

    for make, path in ((late, r"\.part"), (put_into_a_list, r"\.part"), (put_into_an_object, "")):
        model = make()
        with pytest.raises(StaticAttributeError, match=rf"as what stands at {path}.* the Scale"):
            sx.state(model)
        with pytest.raises(StaticAttributeError, match=r"the Scale that it reaches by"):
            sx.jit(lambda model: 1.0)(model)
        assert repr(model).startswith("Model(")


# --- what holds no layer --------------------------------------------------------------------------

GLOBAL = Scale()


def uses_global(x: Any) -> Any:
    return GLOBAL(x)


def test_functions_without_layers_stay_configuration() -> None:
    rate, table = 2.0, jnp.arange(3.0)
    parent = Scale()
    state, structure = sx.state(parent), sx.graphdef(Model(sx.jit(parent)))
    values = [
        *(jnp.tanh, jax.nn.gelu, jax.nn.relu, max, operator.itemgetter(0), len, "text".upper),
        lambda x: x * rate + table,
        functools.partial(jax.nn.softmax, axis=-1),
        jax.checkpoint(jnp.sin),
        sx.vmap(jnp.sin),
        sx.jit(lambda x: x),
        optax.adam(1e-3).update,
        jax.checkpoint_policies.save_only_these_names("a"),
        *(Scale, Plain, int, jnp.float32, logging.getLogger("shardax")),
        Plain(lambda x: x),
        weakref.ref(parent),
        uses_global,  # a global belongs to the program
        lambda: sx.merge(structure, state),
    ]
    model = Model(values)
    assert sx.state(model).flat() == {}
    assert list(sx.clone(model).part) == values


def test_transforms_of_functions_are_functions() -> None:
    assert type(sx.vmap(jnp.sin)) is type(sx.remat(lambda x: x)) is types.FunctionType
    made = sx.remat(Scale())
    assert type(functools.wraps(jnp.sin)(made)) is type(made)
    assert float(made(2.0)) == 6.0  # what ``wraps`` writes is only shown


def test_transform_of_layer_is_traced_once() -> None:
    traced = []

    class Counted(Scale):
        def __call__(self, x: Any) -> Any:
            traced.append(x)
            return super().__call__(x)

    mapped = sx.vmap(Counted())
    rematerialised = sx.remat(mapped)
    for _ in range(3):
        assert float(rematerialised(jnp.ones(1))[0]) == 3.0
    assert len(traced) == 1
    for _ in range(3):
        assert float(sx.jit(mapped)(jnp.ones(1))[0]) == 3.0
    assert len(traced) == 2


# --- attributes of classes ------------------------------------------------------------------------


def test_layer_that_only_the_class_has_is_refused() -> None:
    class Shared(sx.Module):
        layer = Scale()

    class Derived(Shared):
        pass

    for kind in (Shared, Derived):
        with pytest.raises(ModuleAttributeError, match="'layer' is an attribute of the class"):
            sx.state(kind())
    with pytest.raises(ModuleAttributeError) as refused:
        sx.jit(lambda model: 1.0)(Shared())
    model = Shared()
    model.layer = run_advice(refused.value, "sx.clone(Shared.layer)", {"sx": sx, "Shared": Shared})
    assert list(sx.state(model).flat()) == [("layer", "weight")]
    assert model.layer is not Shared.layer


def test_default_of_a_field_becomes_an_attribute() -> None:
    @dataclasses.dataclass(eq=False)
    class WithDefault(sx.Module):
        layer: Any = Scale()  # noqa: RUF009 (a Module is shared on purpose)
        other: Any = dataclasses.field(default=GLOBAL)

    assert list(sx.state(WithDefault()).flat()) == [("layer", "weight"), ("other", "weight")]


# --- a law ----------------------------------------------------------------------------------------

_ANY = {**TRACKED, **REFUSED}
_CALLABLE = sorted(
    {
        *(TRACKED.keys() - {"sx.Jitted", "sx.Remat", "method", "sx.vmap of a method"}),
        *("lambda", "default", "keyword default", "containers", "jax.jit", "jax.vmap"),
        *("jax.checkpoint", "sx.jit of a lambda", "sx.vmap of a lambda", "partial of a lambda"),
        *("method of an object", "lru_cache", "object", "object of a local class", "generator"),
    }
)
_WRAPPINGS = st.lists(st.sampled_from(_CALLABLE), max_size=3)


class Tower(sx.Module):
    """Calls parts in turn, which stand in several places."""

    def __init__(self, first: Any, second: Any, third: Any) -> None:
        self.first = first
        self.more = [second, {"third": (third,)}]

    def __call__(self, x: Any) -> Any:
        for part in (self.first, self.more[0], self.more[1]["third"][0]):
            x = part(x)
        return x


@settings(max_examples=25)
@given(wrappings=st.tuples(_WRAPPINGS, _WRAPPINGS, _WRAPPINGS))
def test_law_model_has_what_its_call_reads(
    wrappings: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layers = [Scale(2.0), Scale(3.0), Scale(5.0)]
    parts = []
    for part, names in zip(layers, wrappings, strict=True):
        for name in names:
            part = _ANY[name](part)
        parts.append(part)
    try:
        model = Tower(*parts)
    except StaticAttributeError:
        assert any(name in REFUSED for names in wrappings for name in names)
        return

    x, weights = jnp.ones((1, 1, 1)), [layer.weight for layer in layers]
    assert [id(variable) for _, variable in sx.iter_variables(model)] == [*map(id, weights)]
    assert float(model(x).sum()) == 30.0

    copied = sx.clone(model)
    gradients = sx.grad(lambda model: model(x).sum())(model)
    assert sorted(map(float, gradients.flat().values())) == [6.0, 10.0, 15.0]
    sx.train.Optimizer(model, optax.sgd(1.0)).update(gradients)
    assert [float(weight) for weight in weights] == [-13.0, -7.0, -1.0]
    assert (float(model(x).sum()), float(copied(x).sum())) == (-91.0, 30.0)

    folder: Path = tmp_path_factory.mktemp("law") / "checkpoint"
    checkpoint.save(model, folder)
    checkpoint.restore(copied, folder)
    assert float(copied(x).sum()) == -91.0
