# SPDX-License-Identifier: Apache-2.0
"""Activations of selected layers come by path, however the layers are run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import SelectionError
from shardax.models import AttentionConfig, Transformer, TransformerConfig
from shardax.surgery import lora, record, save_activations
from tests.advice import run_advice
from tests.tools.surgery.decoders import TOKENS, close, decoder, in_every_layout, logits
from tests.values import with_values


def blocks(model: Any) -> Any:
    return sx.select(model).at_instances_of(sx.models.DecoderLayer)


def parts(model: Any) -> list[Any]:
    """Selects blocks, what is inside them, a function, and what is beside them."""
    layers = blocks(model)
    return [
        layers,
        layers.at_instances_of(sx.nn.Linear),
        layers.at(lambda layer: layer.attn.softmax),
        sx.select(model).at(lambda model: model.final_norm),
        *([] if model.head is None else [sx.select(model).at(lambda model: model.head)]),
    ]


@functools.cache
def recorded(tied: bool = False) -> dict[Any, Any]:
    """Returns the activations of unrolled layers."""
    model = decoder(tied=tied)
    return sx.jit(record(model, *parts(model)))(TOKENS)[1]


@in_every_layout
def test_record_gives_one_set_of_activations_for_every_layout(
    scanned: bool, tied: bool, remat: Any
) -> None:
    model = decoder(scanned, tied, remat)
    structure = sx.graphdef(model)
    result, activations = sx.jit(record(model, *parts(model)))(TOKENS)
    close(result, logits(tied))
    assert list(activations) == list(recorded(tied))
    assert {path[0] for path in activations} == {"layers", "final_norm"} | (
        set() if tied else {"head"}
    )
    for path, activation in activations.items():
        close(activation, recorded(tied)[path])
    assert sx.graphdef(model) == structure


def test_recorded_values_are_those_of_saved_activations() -> None:
    model = decoder()
    watched = save_activations(blocks(model).at_instances_of(sx.nn.Linear))
    close(watched(TOKENS), logits())
    for path, (expected,) in sx.pop(watched, sx.Intermediate).flat().items():
        close(recorded()[path[:-1]], expected)


def test_shared_layer_has_a_tuple_and_uncalled_none() -> None:
    linear = with_values(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(linear, jnp.tanh, linear)
    model.unused = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    x = np.ones(2, np.float32)
    result, activations = record(model, lambda model: model.at_instances_of(sx.nn.Linear))(x)
    first = linear(x)
    assert list(activations) == [("layers", 0)]
    close(activations["layers", 0], (first, linear(jnp.tanh(first))))
    close(result, activations["layers", 0][1])


def test_attributes_that_a_call_deletes_are_gone() -> None:
    class Once(sx.Module):
        def __init__(self, function: Any) -> None:
            self.pending, self.function = "first", function

        def __call__(self, x: Any) -> Any:
            if hasattr(self, "pending"):
                del self.pending
                self.ran = True
            return 2 * self.function(x)

    # One is copied, as what is recorded is in it; the other is the model's own.
    model = sx.nn.Sequential(Once(jnp.square), Once(jnp.negative))
    recording = record(model, sx.select(model).at_keypaths(".layers[0].function"))
    result, activations = recording(3 * np.ones(2))
    close(activations["layers", 0, "function"], [9, 9])
    close(result, [-36, -36])
    for layer in model.layers:
        assert layer.ran and not hasattr(layer, "pending")


def test_block_has_the_activation_of_its_last_layer() -> None:
    attention = AttentionConfig(num_heads=2, window=2, local_layers=(True, False) * 2)
    config = TransformerConfig(
        vocab_size=16, num_layers=4, embed_dim=8, attention=attention, scan_layers=True
    )
    model = with_values(Transformer(config, rngs=sx.Rngs(0)))
    block = sx.select(model).at(lambda model: model.layers.stacked)
    last = sx.select(model).at(lambda model: model.layers.stacked.layers[1])
    expected, found = (sx.jit(record(model, place))(TOKENS)[1] for place in (last, block))
    assert list(found) == list(expected) == [("layers", 1), ("layers", 3)]
    assert not np.allclose(found["layers", 1], found["layers", 3])
    for path, activation in found.items():
        close(activation, expected[path])


def test_later_edits_and_writes_of_the_call_count() -> None:
    model = sx.nn.Sequential(sx.nn.BatchNorm(2, rngs=sx.Rngs(0)), jnp.square)
    run = record(model, sx.select(model).at_keypaths(".layers[1]"))
    model.layers[1] = jnp.negative
    result, activations = run(np.array([[1.0, 0.0], [3.0, 4.0]], np.float32))
    close(activations["layers", 1], result)
    assert (np.asarray(result) != 0).all() and (result.sum(0) == 0).all()
    assert (np.asarray(model.layers[0].mean.value) > 0).all()


class Counting(sx.Module):
    """Sows, counts in an array, in a number, in a list and in a Variable."""

    def __init__(self) -> None:
        self.linear = with_values(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))
        self.array, self.number, self.items = jnp.zeros(()), 0, [jnp.zeros(())]
        self.variable = sx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.sow("seen", y)
        self.array, self.number = self.array + 1, self.number + 1
        self.items[0] = self.items[0] + 1
        self.variable[...] += 1
        return y


@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_call_leaves_what_a_plain_one_leaves(around: Any) -> None:
    def plain(model: Any, x: Any) -> Any:
        return model(x)

    def inner(model: Any, x: Any) -> Any:
        return record(model, lambda model: model.at_instances_of(sx.nn.Linear))(x)[0]

    def nested(model: Any, x: Any) -> Any:
        layers = sx.select(model).at_instances_of(Counting)
        return record(model, layers, layers.at(lambda layer: layer.linear))(x)[0]

    x = np.ones((1, 2), np.float32)
    models = [sx.nn.Sequential(shared := Counting(), Counting(), shared) for _ in range(3)]
    for function, model in zip((plain, inner, nested), models, strict=True):
        around(function)(model, x)
        assert sx.graphdef(model) == sx.graphdef(models[0])
        for path, value in sx.state(models[0]).flat().items():
            jax.tree.map(close, sx.state(model).flat()[path], value)


def test_layers_of_branches_and_loops_are_refused() -> None:
    linear = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))

    class Branching(sx.nn.Sequential):
        def __call__(self, x: jax.Array) -> jax.Array:
            branches = [lambda model, x, i=i: model.layers[i](x) for i in range(2)]
            return sx.cond(x.sum() > 0, *branches, self, x)

    class Looping(sx.nn.Sequential):
        def __call__(self, x: jax.Array) -> jax.Array:
            body = lambda _, carry: (carry[0], carry[0].layers[0](carry[1]))  # noqa: E731
            return sx.fori_loop(0, 3, body, (self, x))[1]

    class Enclosing(sx.nn.Sequential):
        def __call__(self, x: jax.Array) -> jax.Array:
            return sx.fori_loop(0, 3, lambda _, x: self.layers[0](x), x)

    def kinds(model: Any) -> Any:
        return model.at_instances_of(sx.nn.Linear)

    x = np.ones((1, 2), np.float32)
    for model, error in (
        (Branching(linear, sx.clone(linear)), sx.errors.TransformError),
        (Looping(linear), sx.errors.TransformError),
        (Enclosing(linear), sx.errors.ForeignMutationError),
    ):
        with pytest.raises(error, match="activation"):
            record(model, kinds)(x)
        assert "activation" not in {path[-1] for path, _ in sx.iter_variables(model)}


def test_stack_of_stacks_is_cut_by_both() -> None:
    rngs = sx.Rngs(0)
    linear = lambda: sx.nn.Linear(2, 2, rngs=rngs)  # noqa: E731
    model = sx.nn.Stack(lambda: sx.nn.Stack(linear, 2), 3)
    x = np.ones((1, 2), np.float32)
    result, activations = record(model, sx.select(model).at_instances_of(sx.nn.Linear))(x)
    assert list(activations) == [(i, j) for i in range(3) for j in range(2)]
    y = x
    for (i, j), activation in activations.items():
        y = model[i][j](y)
        close(activation, y)
    close(result, y)


def test_gradients_batches_and_adapters_see_through() -> None:
    model = lora(sx.select(decoder(True)).at_instances_of(sx.nn.MLP).at(lambda m: m.up), rank=1)

    def loss(model: Any) -> Any:
        _, activations = record(model, blocks(model))(TOKENS)
        return (activations["layers", 0] ** 2).mean()

    kernel = sx.jit(sx.grad(loss))(model)["layers"]["stacked"]["attn"]["q"]["kernel"]
    assert jnp.abs(kernel[0]).max() > 0
    assert (kernel[1] == 0).all()  # after the first layer
    mapped = sx.vmap(lambda tokens: record(model, blocks(model))(tokens[None]))(TOKENS)
    close(mapped[1]["layers", 1][:, 0], recorded()["layers", 1])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_pipeline_records_the_whole_batch(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(kind,) * 2)
    rules = sx.Rules([("layers", "stage"), ("batch", "data")])
    model = sx.shard(decoder(scanned=True), mesh, rules)
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(microbatches=2):
        result, activations = sx.jit(record(model, blocks(model)))(TOKENS)
    close(result, logits())
    for layer in range(2):
        close(activations["layers", layer], recorded()["layers", layer])


def test_wrong_selection_is_refused_with_advice() -> None:
    model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    of_others = sx.select(sx.clone(model)).at_instances_of(sx.nn.Linear)
    with pytest.raises(SelectionError, match="Select in the model") as refused:
        record(model, of_others)
    code = "sx.surgery.record(model, sx.select(model).at_instances_of(sx.nn.Linear))"
    run = run_advice(refused.value, code, {"sx": sx, "model": model})
    assert list(run(np.ones((1, 2), np.float32))[1]) == [("gate",), ("up",), ("down",)]
    with pytest.raises(SelectionError, match="Select some") as refused:
        record(model)
    code = "sx.surgery.record(model, sx.nn.Linear)"
    run = run_advice(refused.value, code, {"sx": sx, "model": model})
    assert list(run(np.ones((1, 2), np.float32))[1]) == [("gate",), ("up",), ("down",)]

    # A layer is what a selection is made of.
    with pytest.raises(SelectionError, match=r"not a Linear itself\. Select it") as refused:
        record(model, model.up)
    code = "sx.surgery.record(model, sx.select(model).at_keypaths(('up',)))"
    run = run_advice(refused.value, code, {"sx": sx, "model": model})
    assert list(run(np.ones((1, 2), np.float32))[1]) == [("up",)]

    with pytest.raises(SelectionError, match=r"\.up\.kernel is Param"):
        record(model, sx.select(model).at_keypaths(".up.kernel"))
    run = record(model, sx.select(model).at_keypaths(".gate"))
    model.gate = None
    with pytest.raises(SelectionError, match=r"\.gate"):
        run(np.ones((1, 2), np.float32))


@pytest.mark.parametrize("scanned", [False, True])
def test_record_of_a_class_gives_inputs_of_its_layers(scanned: bool) -> None:
    model = decoder(scanned)
    _, results = record(model, sx.nn.RMSNorm)(TOKENS)
    _, inputs = record(model, sx.nn.MLP, sx.nn.MultiHeadAttention, inputs=True)(TOKENS)
    assert list(inputs) == [("layers", i, name) for i in range(2) for name in ("attn", "mlp")]
    for path, activation in inputs.items():
        close(activation, results[*path[:-1], f"{path[-1]}_norm"])


def test_input_that_is_no_array_is_refused() -> None:
    class Reading(sx.Module):
        def __call__(self, layer: Any, x: Any) -> Any:
            return layer(x)

    class Model(sx.Module):
        def __init__(self) -> None:
            self.reading, self.layer = Reading(), sx.nn.Linear(2, 2, rngs=sx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.reading(self.layer, x=x)

    x = np.ones((1, 2), np.float32)
    with pytest.raises(SelectionError, match=r"a call gives Reading a Linear first"):
        record(Model(), Reading, inputs=True)(x)
    assert np.array_equal(record(Model(), sx.nn.Linear, inputs=True)(x)[1]["layer",], x)


@pytest.mark.parametrize("scanned", [False, True])
def test_generate_of_a_recording_gives_activations_of_every_token(scanned: bool) -> None:
    model, prompts = decoder(scanned), [[1, 2, 3], [4]]
    options = {"max_new_tokens": 4, "temperature": 0}
    rows, activations = record(model, blocks(model)).generate(prompts, **options)
    expected = sx.models.generate(model, prompts, **options)
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]
    for row, text in enumerate(rows):
        _, alone = record(model, blocks(model))(text[None])
        for path, activation in activations.items():
            close(activation[row, : len(text)], alone[path][0])

    recording = record(model, blocks(model))
    with pytest.raises(sx.errors.GenerationError, match="call the recording on the result") as no:
        recording.generate(prompts, **options, stream=True)
    with pytest.raises(sx.errors.GenerationError, match="call the recording on the result"):
        recording.generate(inputs=[[1, 2]], **options)
    code = "recording(tokens)"
    names = {"recording": recording, "tokens": rows[0][None]}
    _, found = run_advice(no.value, code, names)
    close(found["layers", 1], activations["layers", 1][:1])


class Masked(sx.Module):
    def __call__(self, x: Any, mask: Any = None) -> Any:
        return x if mask is None else x * mask


class CallsByKeywords(sx.Module):
    def __init__(self) -> None:
        self.layer = Masked()

    def __call__(self, x: Any, mask: Any) -> Any:
        return self.layer(mask=mask, x=x)


@pytest.mark.parametrize("mask", [None, jnp.zeros(2)])
def test_input_is_the_first_parameter_in_whatever_order_keywords_are_written(mask: Any) -> None:
    model, x, new = CallsByKeywords(), jnp.ones(2), jnp.full(2, 5.0)
    assert record(model, Masked, inputs=True)(x, mask)[1]["layer",].tolist() == [1, 1]

    patched = sx.surgery.patch(model, {("layer",): new}, inputs=True)
    _, seen = record(patched, Masked, inputs=True)(x, mask)
    assert patched(x, mask).tolist() == Masked()(new, mask).tolist()
    assert [value.tolist() for value in seen.values()] == [[5, 5]]
