# SPDX-License-Identifier: Apache-2.0
"""A function that was exported and loaded does what the original does."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import ExportError, PickleWriteError
from shardax.host.export.exporting import write_weights
from shardax.host.export.loading import read_array
from shardax.host.export.signature import from_json, structure, to_json
from tests.advice import run_advice
from tests.strategies import models
from tests.tools.host.exported_models import Counter, Noisy, RoundTrip, run_python, same, values
from tests.tools.host.exported_models import round_trip as round_trip

# --- state ----------------------------------------------------------------------------------------


def test_calls_return_and_write_what_the_model_would(round_trip: RoundTrip) -> None:
    model = Noisy(sx.Rngs(0))
    loaded = round_trip(model, jnp.zeros((2, 3)))
    for step in range(3):
        x = jax.random.normal(jax.random.key(step), (2, 3))
        np.testing.assert_allclose(loaded(x), model(x), rtol=1e-6)
    for held, own in zip(values(loaded), values(model), strict=True):
        np.testing.assert_allclose(held, own, rtol=1e-6)


def test_exporting_changes_nothing(round_trip: RoundTrip) -> None:
    model = Noisy(sx.Rngs(0))
    before, structure_before = values(model), sx.graphdef(model)
    round_trip(model, jnp.zeros((2, 3)))
    assert same(values(model), before)
    assert sx.graphdef(model) == structure_before


def test_process_without_the_source_runs_it(tmp_path: pathlib.Path) -> None:
    path = sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")
    code = """
import json, sys
import numpy
import shardax as sx
loaded = sx.host.load(sys.argv[1])
first, second = loaded(numpy.ones(2)), loaded(numpy.full(2, 2.0))
print(json.dumps([first.tolist(), second.tolist(), loaded.variables[".total"].value.tolist()]))
assert not [name for name in sys.modules if name.startswith("tests")]
"""
    assert json.loads(run_python(code, path)) == [[1.0, 2.0], [3.0, 6.0], [3.0, 3.0]]


def test_state_lists_variables_by_path_type_and_axes(round_trip: RoundTrip) -> None:
    loaded = round_trip(Noisy(sx.Rngs(0)), jnp.zeros((2, 3)))
    assert {path: (type(v), v.axes) for path, v in loaded.variables.items()} == {
        ".linear.kernel": (sx.Param, ("in", "out")),
        ".linear.bias": (sx.Param, ("out",)),
        ".dropout.stream.key": (sx.RngState, None),
        ".dropout.stream.count": (sx.RngState, None),
        ".norm.mean": (sx.BatchStat, ("embed",)),
        ".norm.var": (sx.BatchStat, ("embed",)),
        ".norm.scale": (sx.Param, ("embed",)),
        ".norm.bias": (sx.Param, ("embed",)),
    }


def test_shared_variable_is_held_once(round_trip: RoundTrip) -> None:
    class Tied(sx.Module):
        def __init__(self) -> None:
            self.first = sx.Param(jnp.full(2, 3.0))
            self.second = self.first

        def __call__(self, x: Any) -> Any:
            self.first *= 2
            return x * self.second

    loaded = round_trip(Tied(), jnp.ones(2))
    assert list(loaded.variables) == [".first"]
    assert loaded(jnp.ones(2)).tolist() == [6.0, 6.0]


def test_variable_holding_pytree_is_exported_as_its_arrays(round_trip: RoundTrip) -> None:
    held = sx.Variable({"a": jnp.ones(1), "b": (jnp.zeros(()),)})

    def step(x: Any) -> Any:
        held.value = {"a": held.value["a"] + x, "b": (held.value["b"][0] - x,)}
        return x

    loaded = round_trip(step, 1.0)
    loaded(2.0)
    assert {path: v.value.tolist() for path, v in loaded.variables.items()} == {
        ".held['a']": [3.0],
        ".held['b'][0]": -2.0,
    }


def test_unused_state_is_left_out_of_the_artifact(round_trip: RoundTrip) -> None:
    loaded = round_trip(Counter().peek)
    assert list(loaded.variables) == [".total"]
    assert loaded().tolist() == [0.0, 0.0]


def test_arrays_that_are_no_variables_are_weights_too(
    round_trip: RoundTrip, tmp_path: pathlib.Path
) -> None:
    table = jnp.arange(250_000.0)
    loaded = round_trip(lambda i: table[i], 0)
    assert loaded(7) == 7.0
    assert list(loaded.variables) == ["constants[0]"]
    assert (tmp_path / "0" / "program.bin").stat().st_size < 50_000


def test_random_streams_draw_on_from_where_they_were(round_trip: RoundTrip) -> None:
    rngs = sx.Rngs(noise=7)
    rngs.noise()
    loaded = round_trip(lambda: jax.random.normal(rngs.noise(), (3,)))
    expected = [jax.random.normal(rngs.noise(), (3,)) for _ in range(2)]
    assert same([loaded(), loaded()], expected)


# --- what is exported -----------------------------------------------------------------------------


def test_functions_of_every_kind_are_exported(round_trip: RoundTrip) -> None:
    model = Counter()
    one = jnp.ones(2)
    ways: list[tuple[Any, tuple[Any, ...]]] = [
        (model, (one,)),
        (model.__call__, (one,)),
        (sx.jit(model), (one,)),
        (sx.Jitted(Counter()), (one,)),
        (lambda x: model(x), (one,)),
        (lambda module, x: module(x), (model, one)),
        (sx.jit(lambda module, x: module(x), donate_argnums=0), (model, one)),
    ]
    for function, args in ways:
        loaded = round_trip(function, *args)
        results = [loaded(one).tolist(), loaded(one).tolist()]
        assert results == [[1.0, 2.0], [2.0, 4.0]], function


def test_compiled_method_is_exported(round_trip: RoundTrip) -> None:
    class Scaled(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.float32(3.0))

        @sx.jit
        def times(self, x: Any) -> Any:
            return x * self.scale

    loaded = round_trip(Scaled().times, 2.0)
    assert (list(loaded.variables), float(loaded(4.0))) == ([".scale"], 12.0)


def test_loaded_function_is_exported_again(round_trip: RoundTrip) -> None:
    loaded = round_trip(round_trip(Counter(), jnp.ones(2)), jnp.ones(2))
    assert [loaded(jnp.ones(2)).tolist() for _ in range(2)] == [[1.0, 2.0], [2.0, 4.0]]


def test_arguments_without_arrays_belong_to_the_artifact(round_trip: RoundTrip) -> None:
    @sx.jit(static_argnames="mode")
    def f(x: Any, mask: Any, mode: str, y: Any) -> Any:
        assert mask is None
        return x - y if mode == "minus" else x + y

    loaded = round_trip(f, 5.0, None, "minus", 2.0)
    assert str(loaded.signature) == "f(x: float32[], y: float32[]) -> float32[]"
    assert float(loaded(7.0, 3.0)) == 4.0


def test_arguments_and_results_are_trees(round_trip: RoundTrip) -> None:
    def f(pair: Any, *, options: Any) -> Any:
        return {"sum": pair[0] + pair[1]["x"], "list": [options["scale"], None], "none": ()}

    args = (jnp.ones(2), {"x": jnp.full(2, 2.0)})
    loaded = round_trip(f, args, options={"scale": 3})
    assert str(loaded.signature) == (
        "f(pair: (float32[2], {'x': float32[2]}), options: {'scale': int32[]})"
        " -> {'list': [int32[], None], 'none': (), 'sum': float32[2]}"
    )
    assert same(loaded(args, options={"scale": 4}), f(args, options={"scale": jnp.int32(4)}))


def test_keys_are_arguments_and_results(round_trip: RoundTrip) -> None:
    def f(key: Any, x: Any) -> Any:
        first, second = jax.random.split(key)
        return first, x + jax.random.normal(second, x.shape)

    for key in (jax.random.key(3), jax.random.key(3, impl="rbg")):
        loaded = round_trip(f, key, jnp.zeros(2))
        got, expected = loaded(key, jnp.ones(2)), f(key, jnp.ones(2))
        assert got[0].dtype == expected[0].dtype
        assert same(got, expected)


# --- dynamic sizes --------------------------------------------------------------------------------


def test_export_makes_one_program_for_every_dynamic_dimension_size(round_trip: RoundTrip) -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    loaded = round_trip(layer, jnp.zeros((1, 2)), dynamic={"batch": 0})
    for size in (1, 2, 7):
        x = jnp.arange(2.0 * size).reshape(size, 2)
        np.testing.assert_allclose(loaded(x), layer(x), rtol=1e-6)


def test_dynamic_dimensions_are_named_by_argument(round_trip: RoundTrip) -> None:
    loaded = round_trip(
        lambda x, y, offset: x @ y + offset,
        jnp.zeros((3, 4)),
        jnp.zeros((4, 5)),
        1.0,
        dynamic={"n": {"x": 0}, "k": {"x": 1, "y": 0}},
    )
    assert [str(item) for item in loaded.signature.inputs] == [
        "x: float32[n,k]",
        "y: float32[k,5]",
        "offset: float32[]",
    ]
    assert loaded(jnp.ones((2, 6)), jnp.ones((6, 5)), 0.5).tolist() == [[6.5] * 5] * 2


def test_constraints_are_kept(round_trip: RoundTrip) -> None:
    loaded = round_trip(lambda x: x[:2], jnp.zeros(4), dynamic={"n": 0}, constraints=("n >= 2",))
    assert loaded(jnp.arange(5.0)).tolist() == [0.0, 1.0]
    with pytest.raises(ExportError, match="n >= 2"):
        loaded(jnp.ones(1))


# --- what is loaded -------------------------------------------------------------------------------


def test_loaded_function_is_a_module(round_trip: RoundTrip) -> None:
    loaded = round_trip(Counter(), jnp.ones(2))
    twin = sx.clone(loaded)
    step = sx.jit(lambda f, x: f(x) + 1)
    assert step(loaded, jnp.ones(2)).tolist() == [2.0, 3.0]
    assert (loaded.variables[".total"].value.tolist(), twin.variables[".total"].value.tolist()) == (
        [1.0, 1.0],
        [0.0, 0.0],
    )
    sx.update(twin, sx.state(loaded))
    assert twin(jnp.ones(2)).tolist() == [2.0, 4.0]


def test_copy_shares_program_and_pickling_is_refused(
    round_trip: RoundTrip, tmp_path: pathlib.Path
) -> None:
    loaded = round_trip(Counter(), jnp.ones(2))
    twin = copy.deepcopy(loaded)
    twin(jnp.ones(2))
    assert (twin.program is loaded.program, loaded(jnp.ones(2)).tolist()) == (True, [1.0, 2.0])
    with pytest.raises(PickleWriteError, match="Counter") as caught:
        pickle.dumps(loaded)
    path = sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")
    names = {"sx": sx, "path": path, "loaded": loaded}
    again = run_advice(caught.value, "sx.host.load(path)", names)
    assert again(jnp.ones(2)).tolist() == [1.0, 2.0]
    assert sx.state(again).flat().keys() == (
        run_advice(caught.value, "sx.state(loaded)", names).flat().keys()
    )


def test_decoder_exports_with_dynamic_batch_and_length(round_trip: RoundTrip) -> None:
    config = sx.models.DecoderConfig(
        num_layers=1, vocab_size=7, embed_dim=8, head_dim=4, mlp_dim=8, num_heads=2
    )
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    loaded = round_trip(model, jnp.zeros((2, 4), jnp.int32), dynamic={"batch": 0, "length": 1})
    tokens = jnp.arange(15).reshape(3, 5) % 7
    np.testing.assert_allclose(loaded(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_loaded_function_has_only_the_requested_derivatives(round_trip: RoundTrip) -> None:
    weight = sx.Param(jnp.float32(2.0))

    def loss(x: Any) -> Any:
        return weight**3 * x

    with pytest.raises(ExportError, match="vjp_order=1"):
        sx.grad(lambda f: f(1.0))(round_trip(loss, 1.0))
    loaded = round_trip(loss, 1.0, vjp_order=1)
    assert float(sx.grad(lambda f: f(2.0))(loaded).variables[".weight"]) == 24.0


def test_loaded_function_is_not_mapped(round_trip: RoundTrip) -> None:
    loaded = round_trip(lambda x: x * 2, 1.0)
    with pytest.raises(ExportError, match="dynamic="):
        jax.vmap(loaded)(jnp.ones(3))


def test_program_for_several_platforms_runs_here(round_trip: RoundTrip) -> None:
    loaded = round_trip(lambda x: jnp.sin(x), 1.0, platforms=("cpu", "cuda", "tpu"))
    assert loaded.signature.platforms == ("cpu", "cuda", "tpu")
    assert float(loaded(0.0)) == 0.0


# --- calls that do not fit ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An exported function of two arguments that counts its calls."""
    count = sx.Variable(jnp.zeros(()))

    def f(x: Any, y: Any) -> Any:
        count.value += 1
        return x * y["a"]

    to = tmp_path_factory.mktemp("calls") / "f"
    return sx.host.export(f, jnp.ones((1, 3)), {"a": 1}, to=to, dynamic={"n": {"x": 0}})


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((jnp.ones((2, 4)), {"a": 1}), {}, r"x has the shape \(2, 4\)"),
        ((jnp.ones(3), {"a": 1}), {}, r"x has the shape \(3,\)"),
        ((jnp.ones((2, 3), jnp.int32), {"a": 1}), {}, "x is int32"),
        ((jnp.ones((2, 3)), {"a": 1.5}), {}, "y.a is float32"),
        ((jnp.ones((2, 3)), {"a": "1"}), {}, "y.a is '1'"),
        ((jnp.ones((2, 3)), {"b": 1}), {}, "y is made like"),
        ((jnp.ones((2, 3)),), {}, "lacks y"),
        ((jnp.ones((2, 3)), {"a": 1}, 3), {}, "3 positional"),
        ((jnp.ones((2, 3)), {"a": 1}), {"x": 1}, "x twice"),
        ((jnp.ones((2, 3)),), {"y": {"a": 1}, "z": 1}, "unknown z"),
        ((jnp.ones((2, 3)), {"a": jax.random.key(0)}), {}, "y.a is key"),
    ],
)
def test_call_that_does_not_fit_runs_nothing(
    args: Any, kwargs: Any, said: str, scaled: Any
) -> None:
    loaded = sx.host.load(scaled)
    with pytest.raises(ExportError, match=said):
        loaded(*args, **kwargs)
    assert float(loaded.variables[".count"]) == 0.0


def test_dynamic_size_is_one_size_in_all_arguments(round_trip: RoundTrip) -> None:
    loaded = round_trip(lambda x, y: x + y, jnp.ones(3), jnp.ones(3), dynamic={"n": 0})
    with pytest.raises(ExportError, match="n is 2 in x and 4 in y"):
        loaded(jnp.ones(2), jnp.ones(4))


# --- laws -----------------------------------------------------------------------------------------

TREES = st.recursive(
    st.just(0) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
)


@given(TREES)
def test_trees_come_back_from_json(tree: Any) -> None:
    written = json.loads(json.dumps(to_json(jax.tree.structure(tree), ("x",))))
    assert structure(written) == jax.tree.structure(tree)
    assert jax.tree.leaves(from_json(written)) == list(range(len(jax.tree.leaves(tree))))


@settings(max_examples=8)
@given(models())
def test_values_of_any_model_come_back(
    tmp_path_factory: pytest.TempPathFactory, model: sx.Module
) -> None:
    def read() -> list[Any]:
        return [variable.value for _, variable in sx.iter_variables(model)]

    loaded = sx.host.load(sx.host.export(read, to=tmp_path_factory.mktemp("law") / "artifact"))
    assert same(loaded(), read())


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"),
    *("bfloat16", "complex64", "int4", "float8_e4m3fn", "float8_e5m2", "int64", "float64"),
    "complex128",
]


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
def test_arrays_come_back_from_their_file(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, tuple[str, list[int]]]
) -> None:
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    arrays = {
        name: (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5).astype(jnp.dtype(dtype))
        for name, (dtype, shape) in forms.items()
    }
    write_weights(file, arrays)
    safetensors = pytest.importorskip("safetensors")
    with jax.enable_x64(True), safetensors.safe_open(file, "numpy") as weights:
        for name, array in arrays.items():
            form = jax.ShapeDtypeStruct(array.shape, array.dtype)
            found = np.asarray(read_array(weights, name, form, None))
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()


def test_full_disk_is_named_and_leaves_nothing(tmp_path: pathlib.Path):
    layer = sx.nn.Linear(64, 64, rngs=None)
    layer.kernel.value, layer.bias.value = jnp.ones((64, 64)), jnp.ones(64)
    x = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # no file grows beyond it
    try:
        with pytest.raises(sx.errors.ExportError, match=r"not written to .*layer: \[Errno"):
            sx.host.export(layer, x, to=tmp_path / "layer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    sx.host.export(layer, x, to=tmp_path / "layer")  # when it can be written
    np.testing.assert_array_equal(
        sx.host.load(tmp_path / "layer")(jnp.ones((1, 64))), [[65.0] * 64]
    )
