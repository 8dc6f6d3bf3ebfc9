# SPDX-License-Identifier: Apache-2.0
"""What cannot be exported is refused by name, and nothing is written."""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import DrawError, ExportError, ModuleError, PathExistsError
from tests.advice import run_advice
from tests.tools.host.exported_models import Counter, Noisy

FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


def refusal(
    tmp_path: pathlib.Path, function: Any, *args: Any, error: Any = ExportError, **options: Any
) -> str:
    """Returns the text with which an export is refused; checks that nothing was written."""
    with pytest.raises(error) as caught:
        sx.host.export(function, *args, to=tmp_path / "artifact", **options)
    assert list(tmp_path.iterdir()) == []
    return "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


# --- Python while the program runs ----------------------------------------------------------------


def printing(x: Any) -> Any:
    jax.debug.print("x is {}", x)
    return x


def logging(x: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    return x


def computing(x: Any) -> Any:
    return jax.pure_callback(np.square, FLOAT, x)


def reading(x: Any) -> Any:
    return io_callback(np.square, FLOAT, x)


HOST = sx.host.host_function(np.square, out=lambda x: x)


def by_host_function(x: Any) -> Any:
    return HOST(x + 1)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (printing, "jax.debug.print('x is {}', ...)"),
        (logging, "debug_callback"),
        (computing, "pure_callback"),
        (reading, "io_callback"),
        (by_host_function, "pure_callback"),
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    ],
    ids=["bare", "jit", "cond", "scan"],
)
def test_callbacks_are_named_with_their_line(
    tmp_path: pathlib.Path, function: Any, name: str, around: Any
) -> None:
    text = refusal(tmp_path, around(function), 1.0)
    named = next(line for line in text.splitlines() if line.strip().startswith(name))
    assert named.endswith(f" at {__file__}:{function.__code__.co_firstlineno + 1}")


def test_references_of_jax_are_refused(tmp_path: pathlib.Path) -> None:
    held = jax.new_ref(jnp.zeros(2))

    def f(x: Any) -> Any:
        held[...] = held[...] + x
        return held[...]

    text = refusal(tmp_path, f, jnp.ones(2))
    assert "jax.Ref" in text

    class Holder(sx.Module):
        def __init__(self) -> None:
            names = {"sx": sx, "value": jnp.zeros(2)}
            self.total = run_advice(text, "sx.Variable(value)", names)

        def __call__(self, x: Any) -> Any:
            self.total += x
            return self.total.value

    loaded = sx.host.load(sx.host.export(Holder(), jnp.ones(2), to=tmp_path / "holder"))
    assert [loaded(jnp.ones(2)).tolist() for _ in range(2)] == [[1, 1], [2, 2]]


# --- state ----------------------------------------------------------------------------------------


def test_random_state_without_a_seed_is_named(tmp_path: pathlib.Path) -> None:
    text = refusal(tmp_path, sx.abstract(Noisy(sx.Rngs(0))), jnp.ones((2, 3)))
    assert ".dropout.stream.key" in text
    seeded = Noisy(run_advice(text, "sx.Rngs(0)", {"sx": sx}))
    sx.host.export(seeded, jnp.ones((2, 3)), to=tmp_path / "seeded")


def test_global_stream_draw_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    def f(x: Any) -> Any:
        return x + sx.random.normal((2,))

    assert "random.normal" in refusal(tmp_path, f, jnp.ones(2), error=DrawError)


def test_model_of_shapes_is_named(tmp_path: pathlib.Path) -> None:
    layer = sx.abstract(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    text = refusal(tmp_path, layer, jnp.ones((1, 2)), error=ModuleError)
    assert ".kernel" in text


def test_state_that_changes_its_form_is_named(tmp_path: pathlib.Path) -> None:
    class Growing(sx.Module):
        def __init__(self) -> None:
            self.seen = sx.Cache(jnp.zeros((0, 2)))

        def __call__(self, x: Any) -> Any:
            self.seen.value = jnp.concatenate([self.seen.value, x])
            return self.seen.value.sum()

    text = refusal(tmp_path, Growing(), jnp.ones((1, 2)))
    assert ".seen from float32[0,2] into float32[1,2]" in text


def test_structure_that_changes_is_named(tmp_path: pathlib.Path) -> None:
    class Sowing(sx.Module):
        def __init__(self) -> None:
            self.inner = Counter()

        def __call__(self, x: Any) -> Any:
            self.inner.sow("seen", x)
            return x

    text = refusal(tmp_path, Sowing(), jnp.ones(2))
    assert ".inner" in text
    assert "Intermediate" in text


# --- arguments and results ------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (lambda: Counter(), (), "returns Modules"),
        (lambda x: Pair(x, x), (1.0,), "Pair at .result"),
        (lambda d: d["pair"].left, ({"pair": Pair(1.0, 2.0)},), "Pair at .d.pair"),
        (lambda x: {"n": sx.named.wrap(x, "a")}, (jnp.ones(2),), "NamedArray at .result.n"),
        (lambda d: d["m"](d["x"]), ({"m": Counter(), "x": jnp.ones(2)},), "argument d"),
    ],
)
def test_values_not_representable_outside_python_are_named(
    tmp_path: pathlib.Path, function: Any, args: Any, said: str
) -> None:
    text = refusal(tmp_path, function, *args)
    assert said in text
    if said == "returns Modules":
        module = Counter()
        code = "sx.state(module).to_pure_dict()"
        values = lambda module: run_advice(text, code, {"sx": sx, "module": module})  # noqa: E731
        loaded = sx.host.load(sx.host.export(values, module, to=tmp_path / "values"))
        assert loaded().keys() == values(module).keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dynamic": {"n": 1}}, "dimension 1 of .x"),
        ({"dynamic": {"n": {"z": 0}}}, "argument 'z'"),
        ({"dynamic": {"n": 0}}, "'n' is 3 in .x and 2 in .y"),
        ({"dynamic": {"n m": {"x": 0}}}, "n m"),
        ({"dynamic": {"n": {"x": ()}}}, "of no array"),
        ({"dynamic": {"n": {"x": 0}}, "constraints": ("n >> 2",)}, "n >> 2"),
        ({"constraints": ("n >= 2",)}, "there are none"),
    ],
)
def test_dynamic_dimensions_that_do_not_fit_are_named(
    tmp_path: pathlib.Path, options: Any, said: str
) -> None:
    text = refusal(tmp_path, lambda x, y: x.sum() + y.sum(), jnp.ones(3), jnp.ones(2), **options)
    assert said in text


def test_function_needing_concrete_number_is_refused_with_hint(tmp_path: pathlib.Path) -> None:
    def f(x: Any) -> Any:
        return sum(x[i] for i in range(x.shape[0]))

    text = refusal(tmp_path, f, jnp.ones(3), dynamic={"rows": 0}, error=TypeError)
    assert "any size of rows" in text


def test_errors_of_the_function_are_its_own(tmp_path: pathlib.Path) -> None:
    def f(x: Any) -> Any:
        raise LookupError("mine")

    assert refusal(tmp_path, f, 1.0, error=LookupError).startswith("mine")


# --- where and when -------------------------------------------------------------------------------


def test_nothing_is_exported_while_a_transform_traces(tmp_path: pathlib.Path) -> None:
    def f(x: Any) -> Any:
        assert "Export outside" in refusal(tmp_path, lambda y: y, x)
        return x

    jax.jit(f)(1.0)


def test_nothing_is_overwritten(tmp_path: pathlib.Path) -> None:
    path = sx.host.export(lambda x: x, 1.0, to=tmp_path / "f")
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    with pytest.raises(PathExistsError, match="f"):
        sx.host.export(lambda x: x + 1, 1.0, to=path)
    assert {item.name: item.read_bytes() for item in path.iterdir()} == before


@pytest.mark.parametrize("missing", ["safetensors", "flatbuffers"])
def test_missing_library_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    text = refusal(tmp_path, lambda x: x, 1.0, error=ImportError)
    assert missing in text
    assert "pip install 'shardax[export]'" in text


def test_function_over_two_meshes_is_told_which(tmp_path: pathlib.Path) -> None:
    devices = np.array(jax.devices())
    left, right = (
        jax.device_put(jnp.ones(4), NamedSharding(Mesh(half, (name,)), P(name)))
        for name, half in (("a", devices[:4]), ("b", devices[4:]))
    )
    text = refusal(tmp_path, lambda x, y: x.sum() + y.sum(), left, right)
    assert "2 meshes" in text
    names = {"sx": sx, "mesh": Mesh(devices, ("a",)), "rules": {}}
    names["model"] = model = sx.List([sx.Param(left), sx.Param(right)])
    run_advice(text, "sx.shard(model, mesh, rules)", names)
    sx.host.export(lambda x, y: x + y, *(v.value for v in model), to=tmp_path / "one")
    assert "an array of y" in text
