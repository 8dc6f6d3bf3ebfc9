# SPDX-License-Identifier: Apache-2.0
"""Ownership: what plain transforms reach through closures, leaked tracers, and threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.frames import Frame, local, owner_here, resolve
from shardax.errors import ForeignMutationError, ShardaxError, TraceLeakError
from tests.strategies import Node, assert_same_model


def _model() -> Node:
    model = Node()
    model.w = sx.Param(jnp.ones(()), tag="x")
    model.items, model.entries, model.rate, model.array = [1], {"a": 1}, 0.5, jnp.ones(())
    return model


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "value": lambda m, x: setattr(m.w, "value", x),
    "index": lambda m, x: m.w.__setitem__(..., x),
    "in place": lambda m, x: m.w.__iadd__(x),
    "array attribute": lambda m, x: setattr(m, "array", x),
    "new array": lambda m, x: setattr(m, "new", x),
    "new variable": lambda m, x: setattr(m, "new", sx.Param(x)),
    "append": lambda m, x: m.items.append(x),
    "list item": lambda m, x: m.items.__setitem__(0, x),
    "dict entry": lambda m, x: m.entries.update(b=x),
    "sow": lambda m, x: m.sow("seen", x),
    "static": lambda m, x: setattr(m, "rate", 1.0),
    "deletion": lambda m, x: delattr(m, "rate"),
    "metadata": lambda m, x: m.w.set_metadata(tag="y"),
}
PLAIN: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(1.0),
    "grad in jit": lambda f: jax.jit(jax.grad(f))(1.0),
}
each_plain = pytest.mark.parametrize("run", PLAIN.values(), ids=PLAIN.keys())


@each_plain
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_closure_write_inside_plain_transform_is_refused(
    write: Callable[[Any, Any], Any], run: Callable[[Any], Any]
) -> None:
    model = _model()
    before = sx.clone(model)
    with pytest.raises(
        TraceLeakError, match=r"plain JAX transform that did not receive it.*sx\.jit"
    ):
        run(lambda x: (write(model, x), x)[1])
    assert_same_model(model, before)
    assert issubclass(TraceLeakError, (ShardaxError, RuntimeError))


@each_plain
def test_closure_read_works_in_every_plain_transform(run: Callable[[Any], Any]) -> None:
    model = _model()
    run(lambda x: model.w * x + model.array + model.rate + len(model.items))
    assert isinstance(model.array, jax.Array) and not isinstance(model.array, jax.core.Tracer)


def test_outer_trace_model_is_read_only_in_inner() -> None:
    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        inner = _model()
        inner.w.value = x
        for write in WRITES.values():
            with pytest.raises(TraceLeakError):
                jax.grad(lambda y: (write(inner, y), y)[1])(x)  # noqa: B023 (called at once)
        inner.items.append(x)
        return inner.w + inner.items[1]

    assert float(function(jnp.float32(3))) == 6.0


IMPORT_WHILE_TRACING = """
import jax

@jax.jit
def function(x):
    import shardax as sx

    models.append(sx.List([1]))
    return x * sx.Param(x)

models = []
assert float(function(2.0)) == 4.0
import shardax as sx

counter = sx.Variable(1)
counter += 1
print(int(counter))
"""


def test_first_import_while_tracing_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WHILE_TRACING], capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n", done.stderr


# --- frames ---


def test_object_belongs_to_frame_of_its_creation() -> None:
    outside = sx.Param(1.0)
    with Frame("test") as outer:
        made = sx.Param(2.0)
        assert made._owner is owner_here() is outer and outside._owner is None
        with Frame("test") as inner:
            assert sx.Param(3.0)._owner is inner and inner.parent is outer
        assert local.frame is outer
    assert local.frame is None and owner_here() is None


def test_outside_variable_is_captured_once_by_a_proxy() -> None:
    variable = sx.Param(1.0)
    with Frame("test") as frame:
        variable.value = jnp.float32(5)
        assert float(variable) == 5.0
        assert resolve(variable, frame) is resolve(variable, frame) is not variable
        with Frame("test"):
            assert float(variable) == 5.0
            variable.value = jnp.float32(7)
            assert float(variable) == 7.0
        assert float(variable) == 5.0  # the inner frame's transform would carry it out
    assert float(variable) == 1.0


def test_structural_change_through_closure_is_refused_with_fix() -> None:
    model = _model()
    before = sx.clone(model)
    structural = ["new array", "append", "dict entry", "static", "deletion", "sow"]
    with Frame("jit"):
        for name in structural:
            with pytest.raises(
                ForeignMutationError, match=r"inside sx\.jit.*Pass the Module as an"
            ):
                WRITES[name](model, jnp.ones(()))
    assert_same_model(model, before)


def test_variable_outliving_its_frame_is_reported_as_leaked() -> None:
    with Frame("jit"):
        leaked = sx.Param(1.0)
    for use in (lambda: leaked.value, lambda: leaked + 1, lambda: setattr(leaked, "value", 2.0)):
        with pytest.raises(TraceLeakError, match=r"made inside sx\.jit was used after.*Return it"):
            use()


def test_module_kept_from_a_trace_is_plain_python() -> None:
    kept: list[Node] = []

    def build(x: Any) -> Any:
        kept.append(Node())
        return x

    sx.jit(build)(1.0)
    kept[0].rate = 0.5
    with pytest.raises(TraceLeakError) as caught:
        jax.eval_shape(lambda x: setattr(kept[0], "rate", 2.0), 1.0)
    assert kept[0].rate == 0.5
    assert str(caught.value).startswith(
        "Cannot write the structure of attribute 'rate' of Node from inside a plain JAX transform "
        "that did not receive it"
    )


def test_frame_is_left_on_an_error() -> None:
    with pytest.raises(ZeroDivisionError), Frame("jit"):
        _ = 1 / 0
    assert local.frame is None


# --- threads ---


def test_threads_have_frames_of_their_own() -> None:
    seen: list[Any] = []
    with Frame("test"):
        thread = threading.Thread(target=lambda: seen.append((local.frame, sx.Param(1.0)._owner)))
        thread.start()
        thread.join()
    assert seen == [(None, None)]


def test_model_is_usable_in_transforms_by_several_threads() -> None:
    model = _model()
    barrier = threading.Barrier(4)

    def work(number: int) -> float:
        barrier.wait()
        total = 0.0
        for step in range(5):
            function = jax.jit(lambda m, x: m.w * x + m.array * number)
            total += float(function(model, float(step)))
            with pytest.raises(TraceLeakError):
                jax.jit(lambda x: setattr(model.w, "value", x))(1.0)
        return total

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [10.0 + 5 * number for number in range(4)]


def test_threads_build_and_edit_models_independently() -> None:
    barrier = threading.Barrier(4)

    def work(number: int) -> int:
        barrier.wait()
        model = Node()
        for step in range(30):
            setattr(model, f"p{step}", sx.Param(float(number)))
            sx.graphdef(model)
            model.p0.value = float(step)
        return len(sx.state(model).flat())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [30] * 4
