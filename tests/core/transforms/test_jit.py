# SPDX-License-Identifier: Apache-2.0
"""What can be compiled, what can be passed and returned, and what an exception leaves behind."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import TraceLeakError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Box, Scale, values

Two = collections.namedtuple("Two", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bundle:
    """A user's pytree."""

    model: Any
    batch: Any


# --- what can be compiled ---


class Methods(Scale):
    """Every way to compile a method."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = sx.jit(self.plain)

    def plain(self, x: Any) -> Any:
        return self(x)

    @sx.jit
    def decorated(self, x: Any) -> Any:
        return self(x)

    @sx.jit(static_argnames="times")
    def with_options(self, x: Any, times: int = 2) -> Any:
        return self(x) * times

    @staticmethod
    @sx.jit
    def static(model: Scale, x: Any) -> Any:
        return model(x)


FORMS: dict[str, Callable[[Methods], Any]] = {
    "function": lambda m: sx.jit(lambda model, x: model(x))(m, 2.0),
    "keyword arguments": lambda m: sx.jit(lambda model, x: model(x))(x=2.0, model=m),
    "callable Module": lambda m: sx.jit(m)(2.0),
    "bound method": lambda m: sx.jit(m.plain)(2.0),
    "method compiled in __init__": lambda m: m.compiled(2.0),
    "decorated method": lambda m: m.decorated(2.0),
    "decorated method through its class": lambda m: Methods.decorated(m, 2.0),
    "decorated static method": lambda m: Methods.static(m, 2.0),
    "partial over a Module": lambda m: sx.jit(functools.partial(Scale.__call__, m))(2.0),
    "partial over keyword": lambda m: sx.jit(functools.partial(lambda x, model: model(x), model=m))(
        2.0
    ),
    "partial of a bound method": lambda m: sx.jit(functools.partial(m.plain, 2.0))(),
    "already compiled function": lambda m: sx.jit(sx.jit(lambda model, x: model(x)))(m, 2.0),
    "decorator with empty options": lambda m: sx.jit()(lambda model, x: model(x))(m, 2.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_jit_of_every_form_of_callable_runs_and_writes_back(form: str) -> None:
    model = Methods()
    for calls in (1, 2, 3):
        assert FORMS[form](model).tolist() == [1.0, 1.0]
        assert int(model.calls) == calls


def test_decorated_method_uses_defaults_and_static_values() -> None:
    model = Methods()
    assert model.with_options(1.0).tolist() == [1.0, 1.0]
    assert model.with_options(1.0, times=4).tolist() == [2.0, 2.0]
    assert int(model.calls) == 2


def test_bound_method_is_shown_and_compiled_again() -> None:
    model = Methods()
    assert repr(model.decorated) == "<bound <sx.jit of Methods.decorated>>"
    assert sx.jit(model.decorated)(jnp.ones(2)).tolist() == [0.5, 0.5]
    assert sx.remat(model.decorated)(jnp.ones(2)).tolist() == [0.5, 0.5]
    assert int(model.calls) == 2


def test_bound_method_kept_as_attribute_follows_clone() -> None:
    model = Methods()
    model.saved = model.decorated
    copy = sx.clone(model)
    copy.saved(1.0)
    assert (int(model.calls), int(copy.calls)) == (0, 1)


def test_method_compiled_in_init_follows_the_clone() -> None:
    model = Methods()
    model.compiled(1.0)
    copy = sx.clone(model)
    copy.compiled(1.0)
    copy.compiled(1.0)
    assert (int(model.calls), int(copy.calls)) == (1, 3)


def test_compiled_function_keeps_name_and_documentation() -> None:
    @sx.jit
    def forward(model: Scale, x: Any) -> Any:
        """Runs the model."""
        return model(x)

    assert (forward.__name__, forward.__doc__) == ("forward", "Runs the model.")
    assert forward.lower(Scale(), 1.0).as_text().startswith("module @jit_forward")
    assert sx.jit(Scale()).lower(1.0).as_text().startswith("module @jit_Scale")


def test_compiled_functions_compose() -> None:
    inner = sx.jit(lambda model, x: model(x))

    @sx.jit
    def outer(model: Scale, x: Any) -> Any:
        return inner(model, inner(model, x))

    model = Scale(rate=3.0)
    assert outer(model, 1.0).tolist() == [9.0, 9.0]
    assert inner(model, 1.0).tolist() == [3.0, 3.0]
    assert int(model.calls) == 3


# --- what can be passed and returned ---


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: {"a": a, "b": [b, 1.0]},
        lambda a, b: [a, (b,)],
        lambda a, b: Two(a, {"x": b}),
        lambda a, b: Bundle(a, [b, jnp.ones(3)]),
        lambda a, b: (a, None, b),
    ],
)
def test_modules_pass_through_any_pytree_as_themselves(wrap: Any) -> None:
    first, second = Scale(), Scale()
    given = wrap(first, second)

    @sx.jit
    def same(tree: Any) -> Any:
        return tree

    for _ in range(2):
        returned = same(given)
        assert jax.tree.structure(returned) == jax.tree.structure(given)
        found = [
            leaf
            for leaf in jax.tree.leaves(returned, is_leaf=lambda x: isinstance(x, sx.Module))
            if isinstance(leaf, sx.Module)
        ]
        assert found[0] is first and found[1] is second


def test_returned_objects_are_those_of_the_caller() -> None:
    model = Box()
    model.layers = [Scale(), Scale()]

    @sx.jit
    def parts(m: Box) -> Any:
        return m, m.layers, m.layers[1], m.layers[1].factor

    for _ in range(2):
        whole, layers, second, factor = parts(model)
        assert whole is model and layers is model.layers
        assert second is model.layers[1] and factor is model.layers[1].factor


def test_returned_method_is_bound_to_callers_object() -> None:
    model = Box()
    model.inner = Scale()

    @sx.jit
    def promote(m: Box) -> None:
        m.call = m.inner.__call__

    promote(model)
    assert model.call.__self__ is model.inner


def test_model_in_two_arguments_is_one_inside() -> None:
    model = Scale()

    @sx.jit
    def both(a: Scale, b: Scale) -> Any:
        assert a is b
        a.grow(1.0)
        return b.factor + 0

    assert both(model, model).tolist() == [2.0, 2.0]
    assert values(model)[("factor",)] == [2.0, 2.0]


def test_shared_variable_of_models_is_shared_inside() -> None:
    first, second = Scale(), Scale()
    second.factor = first.factor

    @sx.jit
    def grow_first(a: Scale, b: Scale) -> Any:
        a.grow(1.0)
        return b.factor + 0

    assert grow_first(first, second).tolist() == [2.0, 2.0]
    other = Scale()
    assert grow_first(first, other).tolist() == [1.0, 1.0]
    assert first.factor.value.tolist() == [3.0, 3.0]


def test_new_models_are_new_at_every_call() -> None:
    make = sx.jit(lambda: Scale(3, rate=0.25))
    first, second = make(), make()
    assert first is not second and first.factor is not second.factor
    assert type(first) is Scale and first.rate == 0.25
    assert values(first) == {("factor",): [1.0, 1.0, 1.0], ("calls",): 0}


def test_class_can_be_compiled_as_a_constructor() -> None:
    model = sx.jit(Scale, static_argnums=0)(3)
    assert isinstance(model, Scale) and model.factor.shape == (3,)


def test_lazy_values_materialize_at_first_call() -> None:
    model = Box()
    model.kernel = sx.Param(sx.Init(jax.nn.initializers.normal(), (2, 2), rngs=sx.Rngs(0)))
    eager = sx.clone(model).kernel.value
    result = sx.jit(lambda m: m.kernel * 1)(model)
    assert not model.kernel.is_lazy
    assert (result == eager).all() and (model.kernel.value == eager).all()


def test_random_streams_advance_through_compiled_functions() -> None:
    inside, outside = sx.Rngs(0), sx.Rngs(0)
    draw = sx.jit(lambda rngs: jax.random.normal(rngs.params(), (2,)))
    for _ in range(3):
        assert (draw(inside) == jax.random.normal(outside.params(), (2,))).all()
    assert int(inside.params.count) == 3


def test_variables_that_hold_pytrees_are_read_and_written() -> None:
    moments = sx.Variable({"m": jnp.zeros(2), "v": (jnp.ones(1),)})

    @sx.jit
    def update(moments: Any) -> Any:
        held = moments.value
        moments.value = {"m": held["m"] + 1, "v": held["v"]}
        return held["v"][0] * 2

    assert update(moments).tolist() == [2.0]
    assert jax.tree.map(lambda x: x.tolist(), moments.value) == {"m": [1.0, 1.0], "v": ([1.0],)}


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sx.jit(lambda model, mode: model(1.0))(Scale(), "train"), "mode"),
        (lambda: sx.jit(lambda model, mode: 1.0)(Scale(), mode="train"), "mode"),
        (lambda: sx.jit(lambda tree: 1.0)({"m": Scale(), "mode": "train"}), "tree.mode"),
        (lambda: sx.jit(lambda model, mode: 1.0).lower(Scale(), "train"), "mode"),
    ],
)
def test_argument_that_is_no_array_is_named(call: Any, name: str) -> None:
    with pytest.raises(TransformError, match=f"^{name} of .* is a str"):
        call()


def test_steady_call_names_nonarray_argument() -> None:
    compiled = sx.jit(lambda model, mode: model(mode))
    model = Scale()
    compiled(model, 1.0)
    with pytest.raises(TransformError, match=r"^mode of .* is a str") as caught:
        compiled(model, "train")
    assert int(model.calls) == 1
    names = {"sx": sx, "f": lambda model, mode: model(len(mode)), "rest": "mode"}
    static = run_advice(caught.value, "sx.jit(f, static_argnames=...)", names)
    assert static(model, mode="train").tolist() == model(5.0).tolist()


def test_result_that_is_no_array_is_named() -> None:
    with pytest.raises(TransformError, match=r"returned .* of type slice at \['part'\]"):
        sx.jit(lambda model: {"model": model, "part": slice(3)})(Scale())


def test_traced_condition_raises_with_its_name() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        sx.jit(lambda model: 1.0 if model.calls > 0 else 2.0)(Scale())
    assert "depends on the value of the argument model.calls." in str(caught.value)


# --- exceptions ---


def _fail_after_everything(model: Any) -> None:
    model.factor += 1
    model.rate = 7.0
    model.extra = sx.Param(jnp.ones(1))
    model.layers.append(Scale())
    model.calls.set_metadata(note="changed")
    del model.layers[0].rate
    raise KeyError("stop")


def test_exception_leaves_values_and_structure_untouched() -> None:
    model = Scale()
    model.layers = [Scale()]
    structure, before = sx.graphdef(model), values(model)
    compiled = sx.jit(_fail_after_everything)
    for _ in range(2):
        with pytest.raises(KeyError, match="stop"):
            compiled(model)
        assert sx.graphdef(model) == structure and values(model) == before
    model.factor[...] = model.factor + 1  # nothing is locked either
    assert values(model)[("factor",)] == [2.0, 2.0]


def test_exception_in_retrace_keeps_earlier_programs() -> None:
    model = Scale()

    @sx.jit
    def forward(m: Scale, x: Any) -> Any:
        m.grow(1.0)
        if x.ndim == 2:
            raise ValueError("no matrices")
        return m.factor * x

    forward(model, jnp.ones(2))
    with pytest.raises(ValueError, match="no matrices"):
        forward(model, jnp.ones((1, 2)))
    assert forward(model, jnp.ones(2)).tolist() == [3.0, 3.0]


def test_plain_transform_leaves_no_tracer_in_model() -> None:
    model, grow = Scale(), sx.jit(Scale.grow)
    grow(model, 1.0)
    grow(model, 1.0)
    with pytest.raises(TraceLeakError, match=r"factor would be written with a traced value"):
        jax.jit(lambda: grow(model, 1.0))()
    with pytest.raises(TraceLeakError, match=r"factor would be written with a traced value"):
        jax.vmap(lambda by: grow(model, by))(jnp.ones(3))
    assert model.factor.value.tolist() == [3.0, 3.0]
    grow(model, 1.0)
    assert model.factor.value.tolist() == [4.0, 4.0]


# --- threads ---


def test_threads_trace_and_call_one_model() -> None:
    model, forward = Scale(), sx.jit(lambda m, x: m.factor * x)
    barrier, results, failures = threading.Barrier(16), [], []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for size in (1, 2):
                results.append((number, forward(model, jnp.full(size, number)).tolist()))
        except BaseException as error:  # noqa: BLE001 (shown in the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(results) == sorted((i, [float(i)] * 2) for i in range(16) for _ in range(2))


def test_threads_edit_their_own_models() -> None:
    @sx.jit
    def edit(m: Scale) -> Any:
        m.grow(1.0)
        m.extra = sx.Variable(m.factor * 2)
        return m

    barrier, models, failures = threading.Barrier(8), [Scale() for _ in range(8)], []

    def work(model: Scale) -> None:
        try:
            barrier.wait()
            for _ in range(5):
                assert edit(model) is model
        except BaseException as error:  # noqa: BLE001 (shown in the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    expected = {("factor",): [6.0, 6.0], ("calls",): 0, ("extra",): [12.0, 12.0]}
    assert [values(model) for model in models] == [expected] * 8


# --- memory ---


def _call(model: Scale) -> Any:
    compiled = sx.jit(lambda m, x: m(x))
    compiled(model, 1.0)
    compiled(model, 1.0)
    return compiled


def _call_by_name(model: Scale) -> Any:
    compiled = sx.jit(lambda m, n: m(1.0) * n, static_argnames="n", donate_argnames="m")
    compiled(m=model, n=2)
    return compiled


def _change(model: Scale) -> Any:
    def change(m: Scale) -> Scale:
        m.extra = sx.Param(m.factor * 2)
        return m

    compiled = sx.jit(change)
    compiled(model)
    compiled(model)
    return compiled


def _close_over(model: Scale) -> Any:
    holder = [model]
    compiled = sx.jit(lambda x: holder[0](x))
    compiled(1.0)
    compiled(1.0)
    holder.clear()
    return compiled


def _fail(model: Scale) -> Any:
    compiled = sx.jit(_fail_after_everything)
    with pytest.raises(AttributeError):
        compiled(model)
    return compiled


def _abstract(model: Scale) -> Any:
    return sx.eval_shape(lambda m: m(1.0), model)


def _differentiate(model: Scale) -> Any:
    gradient = sx.grad(lambda m: m(1.0).sum())
    return gradient, gradient(model)


USES = [
    _call,
    _call_by_name,
    _change,
    _close_over,
    _fail,
    _abstract,
    _differentiate,
    lambda model: sx.jit(lambda m, x: m(x)).trace(model, 1.0),
    lambda model: sx.jit(lambda m, x: m(x)).lower(model, 1.0).compile(),
]


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
@pytest.mark.usefixtures("collecting_only_what_is_new")
@pytest.mark.parametrize("use", USES)
def test_dropped_model_is_garbage_collected(use: Any) -> None:
    model = Scale()
    kept = use(model)
    watched = [weakref.ref(model), weakref.ref(model.factor), weakref.ref(model.calls)]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    del kept


def test_new_model_at_reused_address_is_distinct() -> None:
    forward = sx.jit(lambda m: m.factor * 1)
    for number in range(20):
        model = Scale(2)
        model.factor[...] = jnp.full(2, float(number))
        assert forward(model).tolist() == [number, number]
        del model


def test_static_object_changed_in_place_retraces() -> None:
    @dataclasses.dataclass(unsafe_hash=True)
    class Setting:
        factor: int = 1

    class Scaled(sx.Module):
        def __init__(self) -> None:
            self.setting = Setting()
            self.w = sx.Param(jnp.float32(1))

    def step(model: Scaled) -> jax.Array:
        result = model.w.value * model.setting.factor
        model.setting.factor += 1
        return result

    compiled, model = sx.jit(step), Scaled()
    assert [float(compiled(model)) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_jit_refuses_what_is_no_array_also_after_a_steady_call() -> None:
    double = sx.jit(lambda batch: batch["x"] * 2)
    for _ in range(2):
        double({"x": jnp.ones(2)})
    with pytest.raises(TransformError, match=r"^batch\['x'\] of .*<lambda> is a str, which is"):
        double({"x": "text"})
    assert double({"x": jnp.ones(2)}).tolist() == [2.0, 2.0]


def test_jit_traces_anew_for_another_tree_of_arrays() -> None:
    total = sx.jit(lambda batch: sum(batch.values()))
    assert float(total({"a": 1.0})) == 1.0
    with sx.explain_retraces(file=False) as retraces:
        assert float(total({"a": 1.0, "b": 2.0})) == 3.0
    assert [retrace.reasons for retrace in retraces] == [(".batch['b']: absent -> an array",)]


def test_jit_donates_arrays_of_arguments_by_position_and_by_name() -> None:
    swap = sx.jit(lambda m, x, *, y: (x["a"] * m, y * m), donate_argnums=1, donate_argnames="y")
    model = sx.Param(jnp.full(2, 3.0))
    for _ in range(3):
        a, y = jnp.ones(2), jnp.zeros(2)
        results = swap(model, {"a": a}, y=y)
        assert [result.tolist() for result in results] == [[3.0, 3.0], [0.0, 0.0]]
        assert [array.is_deleted() for array in (a, y, model.value)] == [True, True, False]


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
@pytest.mark.parametrize("form", [lambda v: v, lambda v: {"v": v}], ids=["bare", "in_a_dict"])
def test_jit_keeps_no_variable_that_it_wrote(form: Any, options: Any) -> None:
    @functools.partial(sx.jit, **options)
    def double(tree: Any) -> None:
        (v,) = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, sx.Variable))
        v[...] = v * 2

    references = []
    for _ in range(3):
        v = sx.Variable(jnp.ones(4))
        for _ in range(3):
            double(form(v))
        assert v.value.tolist() == [8.0] * 4
        references.append(weakref.ref(v))
        del v

    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
