# SPDX-License-Identifier: Apache-2.0
"""What a compiled function uses without being given it: always as it is now, never a stale copy."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import TraceLeakError, UncertainCaptureWarning
from tests.core.transforms.examples import Box, Scale, Tied, values

# An object is reached in a way that is not certain, so each call is traced (docs/captures.md).
uncertain = pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")

current = Scale()


def _model(number: float) -> Scale:
    model = Scale()
    model.factor[...] = jnp.full(2, number)
    return model


# --- where an object can be found: each entry returns (call, replace the model) ---


def _cell() -> Any:
    model = _model(1.0)

    def rebind(new: Scale) -> None:
        nonlocal model
        model = new

    return sx.jit(lambda x: model(x)), rebind


def _global() -> Any:
    def rebind(new: Scale) -> None:
        global current
        current = new

    rebind(_model(1.0))
    return sx.jit(lambda x: current(x)), rebind


def _helper() -> Any:
    models = [_model(1.0)]

    def get() -> Scale:
        return models[0]

    def run(x: Any) -> Any:
        return get()(x)

    return sx.jit(lambda x: run(x)), lambda new: models.__setitem__(0, new)


def _dictionary() -> Any:
    models = {"a": _model(1.0)}
    return sx.jit(lambda x: models["a"](x)), lambda new: models.update(a=new)


def _bound_method() -> Any:
    holder = [_model(1.0).__call__]
    return sx.jit(lambda x: holder[0](x)), lambda new: holder.__setitem__(0, new.__call__)


class _Trainer:
    def __init__(self) -> None:
        self.model = _model(1.0)
        self.compiled = sx.jit(self.run)

    def run(self, x: Any) -> Any:
        return self.model(x)


def _attribute() -> Any:
    trainer = _Trainer()
    return sx.jit(lambda x: trainer.model(x)), lambda new: setattr(trainer, "model", new)


def _nested_attribute() -> Any:
    trainer = _Trainer()
    trainer.inner = {"trainer": _Trainer()}

    def rebind(new: Scale) -> None:
        trainer.inner["trainer"].model = new

    return sx.jit(lambda x: trainer.inner["trainer"].model(x)), rebind


def _long_list() -> Any:
    models = [_model(0.0) for _ in range(100)]
    return sx.jit(lambda x: sum(m(x) for m in models)), lambda new: models.__setitem__(99, new)


def _bound_to_a_plain_object() -> Any:
    trainer = _Trainer()
    return trainer.compiled, lambda new: setattr(trainer, "model", new)


def _partial() -> Any:
    models = [_model(1.0)]

    def run(scale: float, x: Any) -> Any:
        return models[0](scale * x)

    return sx.jit(functools.partial(run, 1.0)), lambda new: models.__setitem__(0, new)


PLACES = [
    _cell,
    _global,
    _helper,
    _dictionary,
    _bound_method,
    _attribute,
    _nested_attribute,
    _long_list,
    _bound_to_a_plain_object,
    _partial,
]


@pytest.mark.parametrize("place", PLACES)
def test_captured_model_is_live(place: Any) -> None:
    is_certain = place in (_cell, _global)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _check_live(place)
    # Traced at every call, and said once.
    assert [item.category for item in told] == [UncertainCaptureWarning] * (not is_certain)


def _check_live(place: Any) -> None:
    call, replace = place()
    model = _model(2.0)
    replace(model)
    for calls in (1, 2, 3):
        assert call(1.0).tolist() == [1.0, 1.0]
        assert int(model.calls) == calls
    model.factor[...] = model.factor * 2  # a value
    assert call(1.0).tolist() == [2.0, 2.0]
    model.rate = 0.25  # static configuration
    assert call(1.0).tolist() == [1.0, 1.0]
    model.factor = sx.Param(jnp.full(2, 8.0))  # another Variable
    assert call(1.0).tolist() == [2.0, 2.0]
    other = _model(6.0)
    replace(other)  # another model under the same name
    assert call(1.0).tolist() == [3.0, 3.0]
    assert call(1.0).tolist() == [3.0, 3.0]
    assert (int(model.calls), int(other.calls)) == (6, 2)


def test_global_bound_after_compilation_is_found() -> None:
    call = sx.jit(lambda x: later(x))  # noqa: F821 (bound below)
    with pytest.raises(NameError):
        call(1.0)
    globals()["later"] = model = _model(2.0)
    try:
        assert call(1.0).tolist() == [1.0, 1.0]
        assert call(1.0).tolist() == [1.0, 1.0]
        assert int(model.calls) == 2
    finally:
        del globals()["later"]


@uncertain
def test_model_from_opaque_source_is_read_and_written() -> None:
    def supply() -> Any:
        model = _model(2.0)
        while True:
            yield model

    supplier = supply()
    model = next(supplier)
    call = sx.jit(lambda x: next(supplier)(x))
    for calls in (1, 2, 3):
        assert call(1.0).tolist() == [1.0, 1.0]
        assert int(model.calls) == calls
    model.factor[...] = model.factor * 2
    assert call(1.0).tolist() == [2.0, 2.0]


def test_captured_variable_is_read_and_written() -> None:
    total = sx.Variable(0)

    @sx.jit
    def add(x: Any) -> Any:
        total[...] += x
        return total * 2

    assert [int(add(3)), int(add(4)), int(total)] == [6, 14, 7]
    total[...] = 100
    assert [int(add(1)), int(total)] == [202, 101]


def test_passed_and_captured_model_is_one() -> None:
    model = _model(1.0)

    @sx.jit
    def run(passed: Scale, x: Any) -> Any:
        passed.grow(1.0)
        return model(x)

    assert [run(model, 2.0).tolist(), run(model, 2.0).tolist()] == [[2.0, 2.0], [3.0, 3.0]]
    assert values(model) == {("factor",): [3.0, 3.0], ("calls",): 2}


def test_tied_names_in_closures_are_one_variable() -> None:
    model = Tied()
    head = model.head

    @sx.jit
    def run() -> Any:
        model.embed[...] = model.embed + 1
        return head * 1

    assert [float(run()), float(run()), float(model.head)] == [4.0, 5.0, 5.0]


@uncertain
def test_captured_models_are_live_through_nested_jit() -> None:
    model, holder = _model(2.0), [_model(4.0)]
    inner = sx.jit(lambda x: model(x) + holder[0](x))
    outer = sx.jit(lambda x: inner(x) * 2)
    assert [outer(1.0).tolist(), inner(1.0).tolist()] == [[6.0, 6.0], [3.0, 3.0]]
    model.factor[...] = jnp.zeros(2)
    old, holder[0] = holder[0], _model(8.0)
    assert [outer(1.0).tolist(), inner(1.0).tolist()] == [[8.0, 8.0], [4.0, 4.0]]
    assert (int(model.calls), int(old.calls), int(holder[0].calls)) == (4, 2, 2)


def test_inner_function_sees_the_traced_model() -> None:
    @sx.jit
    def outer(model: Scale, x: Any) -> Any:
        @sx.jit
        def inner(x: Any) -> Any:
            return model(x)

        model.grow(1.0)
        return inner(x) + inner(x)

    model = _model(1.0)
    assert outer(model, 1.0).tolist() == [2.0, 2.0]
    assert values(model) == {("factor",): [2.0, 2.0], ("calls",): 2}


def test_one_of_two_names_of_a_compiled_function_is_bound_anew() -> None:
    first, second = _model(1.0), _model(10.0)
    inner = other = sx.jit(lambda x: first.factor.sum() * x)

    @sx.jit
    def outer(x: Any) -> Any:
        return inner(x) + other(x)

    assert float(outer(1.0)) == 4.0
    other = sx.jit(lambda x: second.factor.sum() * x)
    assert float(outer(1.0)) == 22.0


def test_global_bound_to_another_model_of_its_structure_is_traced_for_once() -> None:
    global current
    traces: list[None] = []

    @sx.jit
    def count(x: Any) -> Any:
        traces.append(None)
        current.factor.value = current.factor + x
        return current.factor.sum()

    first, second = _model(1.0), _model(10.0)
    results = []
    for model in (first, second, first):
        current = model
        results.append(float(count(1.0)))
    assert results == [4.0, 22.0, 6.0]
    assert (values(first), values(second)) == (values(_model(3.0)), values(_model(11.0)))
    assert len(traces) == 1


def test_closed_over_random_stream_advances() -> None:
    rngs, same = sx.Rngs(0), sx.Rngs(0)
    draw = sx.jit(lambda: rngs.noise())
    assert [bool(draw() == same.noise()) for _ in range(3)] == [True, True, True]


def test_structure_of_captured_model_is_carried_back() -> None:
    model = _model(1.0)

    @sx.jit
    def add_attribute() -> None:
        model.extra = sx.Param(model.factor * 3)

    add_attribute()
    assert model.extra.value.tolist() == [3.0, 3.0]


def test_captured_model_is_returned_as_itself() -> None:
    model = _model(1.0)
    get = sx.jit(lambda: (model, model.factor * 2))
    for _ in range(2):
        returned, doubled = get()
        assert returned is model and doubled.tolist() == [2.0, 2.0]


def test_leaked_variable_raises_with_its_origin() -> None:
    leaked: list[Any] = []

    @sx.jit
    def leak(x: Any) -> Any:
        leaked.append(sx.Variable(x))
        return x

    leak(1.0)
    with pytest.raises(TraceLeakError, match=r"made inside sx\.jit was used after that call ended"):
        _ = leaked[0].value


@pytest.mark.parametrize(
    "name", ["grad", "value_and_grad", "jacrev", "jacfwd", "hessian", "vmap", "scan", "remat"]
)
def test_leaked_variable_is_told_of_the_transform_that_was_called(name: str) -> None:
    leaked: list[Any] = []

    def leak(x: Any) -> Any:
        leaked.append(sx.Variable(x))
        return x

    def leak_row(carry: Any, x: Any) -> Any:
        return leak(carry), x

    point = jnp.ones(2) if name == "vmap" else jnp.ones(())
    arguments = (point, jnp.ones(2)) if name == "scan" else (point,)
    leaking = sx.scan(leak_row) if name == "scan" else getattr(sx, name)(leak)
    leaking(*arguments)
    with pytest.raises(TraceLeakError, match=rf"made inside sx\.{name} was used after"):
        _ = leaked[-1].value


# --- closed-over Python numbers: read when traced, as by ``jax.jit`` ---


def _restructure_something_else() -> None:
    other = Box()
    sx.jit(lambda m: None)(other)
    other.new = sx.Param(1.0)


class Acts(sx.Module):
    """Applies the functions that it holds, in any kind of place."""

    def __init__(self, act: Any) -> None:
        self.weight = sx.Param(jnp.float32(1))
        self.act = act
        self.more = (act, {"deep": functools.partial(act)})

    def __call__(self, x: Any) -> Any:
        return self.act(x) * self.weight


def _number_of_a_function(scale: Any) -> tuple[Any, Any, Any]:
    def rescale(new: Any) -> None:
        nonlocal scale
        scale = new

    return (lambda w, x: w * 0 + x * scale), rescale, lambda act: (sx.Variable(jnp.ones(())), act)


def _number_of_a_model(scale: Any) -> tuple[Any, Any, Any]:
    def rescale(new: Any) -> None:
        nonlocal scale
        scale = new

    return (lambda x: x * scale), rescale, lambda act: (Acts(act), lambda m, x: m(x))


@pytest.mark.parametrize("static", [None, "auto", "numbers"])
@pytest.mark.parametrize("make", [_number_of_a_function, _number_of_a_model])
def test_captured_number_is_read_when_traced(make: Any, static: str | None) -> None:
    act, rescale, build = make(2)
    model, function = build(act)
    run = sx.jit(function, static=static)
    x = jnp.float32(1)
    assert float(run(model, x)) == 2.0
    rescale(3)
    with sx.explain_retraces(file=False) as retraces:
        for _ in range(2):
            assert float(run(model, x)) == 2.0
            _restructure_something_else()
    others = "_restructure_something_else"  # whose program may be an earlier test's
    assert [retrace for retrace in retraces if others not in retrace.function] == []
    assert run(model, jnp.ones(2)).tolist() == [3.0, 3.0]  # traced for another shape


def test_function_with_nonlocal_state_is_traced_once() -> None:
    traces = 0

    def act(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return x + traces

    run, model = sx.jit(lambda m, x, fn: fn(m(x)), static_argnums=2), Acts(act)
    for _ in range(3):
        assert float(run(model, 0.0, act)) == 3.0
        _restructure_something_else()
    assert traces == 2  # twice in one trace


def test_equal_closures_share_a_compiled_program(compilations: Any) -> None:
    run = sx.jit(lambda m, x: m(x))
    (first, rebind, _), (second, _, _) = (_number_of_a_model(11) for _ in range(2))
    models = [Acts(first), Acts(second)]
    assert float(run(models[0], 1.0)) == 11.0
    compilations()
    assert float(run(models[1], 1.0)) == 11.0
    assert compilations() == 0
    rebind(5)
    _restructure_something_else()
    assert [run(m, jnp.ones(1)).tolist() for m in models] == [[5.0], [11.0]]
    assert run(Acts(_number_of_a_model(11)[0]), jnp.ones(1)).tolist() == [11.0]
    assert run(Acts(_number_of_a_model(5)[0]), jnp.ones(1)).tolist() == [5.0]


class Counter(sx.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x


@uncertain
def test_captures_of_ended_traces_are_found_again() -> None:
    counter = Counter()

    def loop(step: Any) -> Any:
        scanned = sx.scan(lambda count, x: (count, step(count, x)))
        return lambda count, x: scanned(count, x[None])[1][0]

    step = sx.jit(loop(loop(lambda _, x: counter(x))))
    outer = sx.jit(step)
    for calls in (1, 2):
        assert outer(sx.Variable(jnp.zeros(())), jnp.ones(2)).tolist() == [1.0, 1.0]
        assert counter.calls == calls


def test_name_bound_after_the_call_is_an_input() -> None:
    run = sx.jit(lambda x: scale * x if x.ndim else -x)
    assert float(run(jnp.float32(2))) == -2.0
    scale = sx.Param(jnp.float32(3))
    assert run(jnp.ones(2)).tolist() == [3.0, 3.0]
    scale.value = jnp.float32(4)
    assert run(jnp.ones(2)).tolist() == [4.0, 4.0]


def test_call_that_warns_is_done_even_if_warnings_are_errors() -> None:
    held = [Counter()]
    count = sx.jit(lambda x: held[0](x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertainCaptureWarning)
        with pytest.raises(UncertainCaptureWarning):
            count(1.0)
        assert float(count(1.0)) == 1.0
    assert held[0].calls == 2
