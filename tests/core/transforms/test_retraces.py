# SPDX-License-Identifier: Apache-2.0
"""``explain_retraces``: which change made a compiled function trace again, by path."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from tests.core.transforms.examples import Box, Scale


def _reasons(function: Any, *calls: Callable[[], Any]) -> list[tuple[str, ...]]:
    """Returns the reasons of the retraces in the calls; each is made twice, to see it settle."""
    with sx.explain_retraces(file=False) as retraces:
        for call in calls:
            call()
            call()
    return [retrace.reasons for retrace in retraces]


def _start() -> tuple[Any, Scale]:
    forward, model = sx.jit(lambda model, x: model(x)), Scale()
    forward(model, jnp.ones(2))
    return forward, model


EDITS: dict[str, tuple[Callable[[Scale], Any], tuple[str, ...]]] = {
    "attribute": (
        lambda m: setattr(m, "rate", 0.25),
        (".model.rate: 0.5 (float) -> 0.25 (float)",),
    ),
    "type of attribute": (
        lambda m: setattr(m, "rate", 1),
        (".model.rate: 0.5 (float) -> 1 (int)",),
    ),
    "new attribute": (lambda m: setattr(m, "mode", "x"), (".model.mode: absent -> 'x' (str)",)),
    "new Variable": (
        lambda m: setattr(m, "new", sx.Param(jnp.ones(2))),
        (".model.new: absent -> Param",),
    ),
    "removed attribute": (lambda m: delattr(m, "rate"), (".model.rate: 0.5 (float) -> absent",)),
    "type of Variable": (
        lambda m: setattr(m, "factor", sx.BatchStat(jnp.ones(2))),
        (".model.factor: Param -> BatchStat",),
    ),
    "metadata": (
        lambda m: m.factor.set_metadata(axes=("embed",)),
        (".model.factor: Param -> Param(axes=('embed',))",),
    ),
    "shape": (
        lambda m: setattr(m.factor, "value", jnp.ones((1, 2))),
        (".model.factor: float32[2] -> float32[1,2]",),
    ),
    "dtype": (
        lambda m: setattr(m.factor, "value", jnp.ones(2, jnp.bfloat16)),
        (".model.factor: float32[2] -> bfloat16[2]",),
    ),
    "tie": (
        lambda m: setattr(m, "alias", m.factor),
        (".model.alias: absent -> same as .model.factor",),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_model_change_is_named_by_path(name: str) -> None:
    edit, expected = EDITS[name]
    run, model = sx.jit(lambda model: model.factor * 1), Scale()
    run(model)
    edit(model)
    assert _reasons(run, lambda: run(model)) == [expected]


ARGUMENTS = {
    "shape": (jnp.ones(1), ".x: float32[2] -> float32[1]"),
    "dtype": (jnp.ones(2, jnp.int32), ".x: float32[2] -> int32[2]"),
    "weak type": (1.0, ".x: float32[2] -> float32[] (weakly typed)"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_change_of_an_array_argument_is_named(name: str) -> None:
    forward, model = _start()
    x, reason = ARGUMENTS[name]
    assert _reasons(forward, lambda: forward(model, x)) == [(reason,)]


def test_weak_and_strong_types_are_told_apart() -> None:
    double = sx.jit(lambda x: x * 2)
    double(1.0)
    assert _reasons(double, lambda: double(jnp.float32(1.0))) == [
        (".x: float32[] (weakly typed) -> float32[]",)
    ]


def test_leaves_of_containers_and_keywords_are_named() -> None:
    run = sx.jit(lambda batch, *, mask: batch["x"][0] * mask)
    run({"x": [jnp.ones(2)]}, mask=1.0)
    assert _reasons(
        run, lambda: run({"x": [jnp.ones(3)]}, mask=1.0), lambda: run({"x": [jnp.ones(2)]}, mask=1)
    ) == [
        (".batch['x'][0]: float32[2] -> float32[3]",),
        (".mask: float32[] (weakly typed) -> int32[] (weakly typed)",),
    ]


def test_static_values_that_compare_equal_are_told_apart() -> None:
    run = sx.jit(lambda x, times: x * times, static_argnames="times")
    run(1.0, 1)
    assert _reasons(run, lambda: run(1.0, True), lambda: run(1.0, 1.0)) == [
        ("static argument 'times': 1 (int) -> True (bool)",),
        ("static argument 'times': 1 (int) -> 1.0 (float)",),
    ]


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_changed_model_of_two_is_named() -> None:
    run = sx.jit(lambda models, student: models["teacher"][0].factor * student.factor)
    teacher, student = Scale(), Scale()
    run({"teacher": [teacher]}, student)
    teacher.rate = 0.25
    first = _reasons(run, lambda: run({"teacher": [teacher]}, student))
    student.rate = 0.75
    second = _reasons(run, lambda: run({"teacher": [teacher]}, student))
    assert first == [(".models.teacher[0].rate: 0.5 (float) -> 0.25 (float)",)]
    assert second == [(".student.rate: 0.5 (float) -> 0.75 (float)",)]


def test_captured_models_are_named_as_in_function() -> None:
    model, others = Scale(), (Scale(), Scale())
    run = sx.jit(lambda x: model(x) + others[0](x) + others[1](x))
    run(1.0)
    model.rate = 0.25
    first = _reasons(run, lambda: run(1.0))
    others[1].rate = 0.75
    second = _reasons(run, lambda: run(1.0))
    assert first == [(".model.rate: 0.5 (float) -> 0.25 (float)",)]
    assert second == [(".others[1].rate: 0.5 (float) -> 0.75 (float)",)]


def test_explain_retraces_names_other_containers_around_arguments() -> None:
    run, model = sx.jit(lambda t: t[0].factor * 1), Scale()
    run([model])
    assert _reasons(run, lambda: run((model,))) == [
        ("the arguments have other containers, or objects stand elsewhere in them",)
    ]


def test_most_similar_earlier_call_is_compared() -> None:
    forward, model = _start()
    model.rate, model.mode, model.other = 0.25, "a", "b"
    forward(model, jnp.ones(2))
    model.mode = "c"
    assert _reasons(forward, lambda: forward(model, jnp.ones(2))) == [
        (".model.mode: 'a' (str) -> 'c' (str)",)
    ]


def test_train_and_eval_modes_are_traced_once_each() -> None:
    class Layer(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.deterministic = False

    model = Layer()
    forward = sx.jit(lambda model, x: model(x))
    forward(model, 1.0)

    def toggle() -> None:
        model.eval()
        forward(model, 1.0)
        model.train()
        forward(model, 1.0)

    assert _reasons(forward, toggle, toggle) == [
        (".model.deterministic: False (bool) -> True (bool)",)
    ]


def test_optimizer_made_anew_is_named() -> None:
    import optax

    traces: list[int] = []

    class Optimizer(sx.Module):
        def __init__(self, rate: Any, model: Scale) -> None:
            self.transformation = optax.adam(rate)
            self.state = sx.OptState(self.transformation.init({"factor": model.factor.value}))

    @sx.jit
    def train(model: Scale, optimizer: Optimizer) -> None:
        traces.append(1)
        gradient = sx.grad(lambda m: m(1.0).sum())(model)
        updates, optimizer.state.value = optimizer.transformation.update(
            {"factor": gradient["factor"]}, optimizer.state.value
        )
        model.factor += updates["factor"]

    model = Scale()
    found = _reasons(train, *[lambda: train(model, Optimizer(1e-3, model))] * 3)
    # The functions of optax are made anew, and may read other settings.
    assert len(traces) == 6
    assert all(reason.endswith("(made anew)") for reasons in found for reason in reasons)
    assert found[0][0].startswith(".optimizer.transformation")
    assert _reasons(train, lambda: train(model, Optimizer(1e-2, model)))[0][0].startswith(
        ".optimizer.transformation"
    )


# --- how it reports ---


def test_steady_calls_report_nothing() -> None:
    forward, model = _start()
    assert _reasons(forward, lambda: forward(model, jnp.ones(2))) == []
    assert _reasons(forward, lambda: forward(Scale(), jnp.ones(2))) == []


def test_first_trace_is_not_a_retrace() -> None:
    model = Scale()
    forward = sx.jit(lambda model: model(1.0))
    assert _reasons(forward, lambda: forward(model)) == []


def test_report_is_written_to_file_or_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(model: Scale) -> Any:
        return model(1.0)

    compiled, model, file = sx.jit(forward), Scale(), io.StringIO()
    compiled(model)
    model.rate = 0.25
    with sx.explain_retraces(), sx.explain_retraces(file):
        compiled(model)
    expected = (
        "test_report_is_written_to_file_or_stderr.<locals>.forward was "
        "traced again because:\n  .model.rate: 0.5 (float) -> 0.25 (float)\n"
    )
    assert file.getvalue() == expected and capsys.readouterr().err == expected


def test_explain_retraces_omits_other_threads_and_later_calls() -> None:
    import threading

    forward, model = _start()
    with sx.explain_retraces(file=False) as retraces:
        model.rate = 0.25
        thread = threading.Thread(target=forward, args=(model, jnp.ones(2)))
        thread.start()
        thread.join()
    model.rate = 0.75
    forward(model, jnp.ones(2))
    assert retraces == []


def test_cleared_cache_is_said_to_be_so() -> None:
    forward, model = _start()
    with sx.explain_retraces(file=False) as retraces:
        # As by jax.clear_caches(), which would have the tests after this one compile all again.
        for program in forward.memory.specializations.values():
            program.clear_cache()
        forward(model, jnp.ones(2))
    assert [r.reasons for r in retraces] == [
        ("nothing that shardax can see (JAX's own settings, or its cache was cleared)",)
    ]


def test_new_child_of_other_type_is_described() -> None:
    forward, model = sx.jit(lambda model: model.factor * 1), Scale()
    forward(model)
    model.child = Box()
    model.child.x = sx.Param(1.0)
    assert _reasons(forward, lambda: forward(model)) == [
        (".model.child: absent -> Box", ".model.child.x: absent -> Param")
    ]


def _scaled(scale: Any, shift: int = 0) -> Callable[[Any], Any]:
    return lambda x: x * scale + shift


@pytest.mark.parametrize("inside", [False, True])
def test_changed_captured_number_is_named(inside: bool) -> None:
    run, model = sx.jit(lambda m, x: (m.act[1] if inside else m.act)(x)), Box()

    def use(act: Any) -> Callable[[], Any]:
        def call() -> Any:
            model.act = (0, act) if inside else act
            return run(model, 1.0)

        return call

    reasons = _reasons(run, use(_scaled(2)), use(_scaled(2)), use(_scaled(3)))
    where = ".m.act[1]" if inside else ".m.act"
    assert reasons == [
        (".m.act: the function _scaled.<locals>.<lambda> (made anew)",),
        (f"{where} closes over scale: 2 (int) -> 3 (int)",),
    ]


def test_changed_captured_number_of_static_argument_is_named() -> None:
    run = sx.jit(lambda act, x: act(x), static_argnums=0)
    calls = [lambda: run(_scaled(2), 1.0), lambda: run(_scaled(2.0, 1), 1.0)]
    assert _reasons(run, *calls) == [
        (
            "static argument 'act' closes over scale: 2 (int) -> 2.0 (float)",
            "static argument 'act' closes over shift: 0 (int) -> 1 (int)",
        )
    ]


def test_number_captured_by_a_partial_function_is_named() -> None:
    run = sx.jit(lambda act, x: act(x), static_argnums=0)
    calls = [lambda: run(functools.partial(_scaled(2)), 1.0) for _ in range(2)]
    calls.append(lambda: run(functools.partial(_scaled(3)), 1.0))
    assert _reasons(run, *calls) == [
        ("static argument 'act' closes over scale: 2 (int) -> 3 (int)",)
    ]


def test_captured_name_that_is_unbound_is_absent() -> None:
    def shifted(bound: bool) -> Callable[[Any], Any]:
        act = lambda x: x + shift if bound else x  # noqa: E731
        if bound:
            shift = 3
        return act

    run = sx.jit(lambda act, x: act(x), static_argnums=0)
    first, second = shifted(True), shifted(False)
    assert _reasons(run, lambda: run(first, 1.0), lambda: run(second, 1.0)) == [
        (
            "static argument 'act' closes over bound: True (bool) -> False (bool)",
            "static argument 'act' closes over shift: 3 (int) -> absent",
        )
    ]


def test_change_inside_nested_containers_is_named() -> None:
    run, model = sx.jit(lambda m: m.parts[1][1] * 1), Box()

    def use(*rest: Any) -> Callable[[], Any]:
        def call() -> Any:
            model.parts = (1, (2, sx.Param(jnp.float32(1)), *rest))
            return run(model)

        return call

    assert _reasons(run, use(), use(3)) == [(".m.parts[1][2]: absent -> 3 (int)",)]
