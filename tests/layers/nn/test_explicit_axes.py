# SPDX-License-Identifier: Apache-2.0
"""A rule for any name that a layer declares gives the numbers of one device, or is refused by name.

Over Explicit mesh axes layouts are part of the types, so that what a layer leaves open is an error
of JAX while it is traced. Each layer is run once for each of its names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from tests.layers.nn import test_descriptor_matrix as matrix

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = matrix.floats(4, 4, 8)


@dataclass(frozen=True, eq=False)
class Case:
    """A layer to run over a mesh.

    Attributes:
        make: Makes it, with a cache where ``call`` takes one.
        x: An input with a batch dimension in front.
        call: How to call it.
        kinds: Kinds of mesh axes to run it over.
        refused: Errors of ours by the name that a rule is refused for.
        differentiated: Whether gradients of its parameters are compared, too.
        tolerance: By how much numbers may differ.
    """

    make: Callable[[], Any]
    x: np.ndarray = field(default_factory=lambda: X)
    call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)
    kinds: tuple[AxisType, ...] = (AUTO, EXPLICIT)
    refused: Mapping[str, type[Exception]] = field(default_factory=dict)
    differentiated: bool = False
    tolerance: float = 1e-4


def attention(**options: Any) -> Any:
    options = {"head_dim": 4, "num_kv_heads": 2, **options}
    return sx.nn.MultiHeadAttention(8, 4, rngs=sx.Rngs(params=0, dropout=1), **options)


def with_softmax(function: Callable[[jax.Array], jax.Array]) -> Any:
    layer = attention()
    layer.softmax = function
    return layer


def latent_attention() -> Any:
    sizes = {"head_dim": 8, "rope_dim": 4, "value_dim": 4, "latent_dim": 8, "query_latent_dim": 8}
    return sx.nn.MultiHeadLatentAttention(8, 4, causal=True, rngs=sx.Rngs(0), **sizes)


def delta() -> Any:
    return sx.nn.GatedDeltaNet(8, num_heads=2, num_value_heads=4, head_dim=4, rngs=sx.Rngs(0))


def state_space() -> Any:
    return sx.nn.StateSpaceMixer(8, num_heads=2, head_dim=4, state_dim=4, rngs=sx.Rngs(0))


def cells(cell: Any) -> Iterator[Any]:
    return (cell(8, 8, rngs=sx.Rngs(seed)) for seed in range(2))


def with_own_cache(mixer: Any) -> tuple[Any, Any]:
    return mixer, mixer.make_cache(4)


def decode(pair: Any, x: Any) -> jax.Array:
    """Reads three tokens together and then one."""
    layer, cache = pair
    return jnp.concatenate([layer(part, cache=cache) for part in (x[:, :3], x[:, 3:])], axis=1)


def read_context(pair: Any, x: Any) -> jax.Array:
    """Writes a context to a cache, and reads it once more."""
    layer, cache = pair
    return layer(x, x, cache=cache) + layer(x, cache=cache)


# Of a window of 3, or 3 outputs, two devices do not hold equal parts.
UNEVEN = sx.errors.PartitionCheckError
REFUSED: dict[str, dict[str, type[Exception]]] = {
    "Linear, several dimensions": {"out_0": UNEVEN},
    "Conv": {"window_0": UNEVEN},
    "ConvTranspose": {"window": UNEVEN},
    "Conv, masked": {"window": UNEVEN},
    "ConvTranspose, circular": {"window": UNEVEN},
    # A loop takes one layer after the other.
    "Stack": {"layers": sx.errors.TransformError},
}

# Over Auto axes the matrix has a test of its own.
CASES = (
    {
        name: Case(
            functools.partial(matrix.make, case),
            case.x,
            case.call,
            kinds=(EXPLICIT,),
            refused=REFUSED.get(name, {}),
        )
        for name, case in matrix.DESCRIPTORS.items()
    }
    | {
        "attention, rotary": Case(
            lambda: attention(causal=True, rope_base=100.0), differentiated=True
        ),
        "attention, all options": Case(
            lambda: attention(
                rope=sx.nn.Rope(fraction=0.5, interleaved=True),
                softcap=3.0,
                sinks=True,
                gated=True,
                use_bias=True,
                query_norm=lambda: sx.nn.RMSNorm(4, axes=("head_dim",)),
            ),
            kinds=(EXPLICIT,),
        ),
        "attention, dropout": Case(lambda: attention(dropout=0.5), kinds=(EXPLICIT,)),
        "attention, other softmax": Case(
            lambda: with_softmax(lambda scores: jax.nn.softmax(2 * scores)), kinds=(EXPLICIT,)
        ),
        "attention, cache": Case(
            lambda: (attention(causal=True, rope_base=100.0), sx.nn.AttentionCache(4, 4, 2, 4)),
            call=decode,
        ),
        "attention, cache in int8": Case(
            lambda: (attention(causal=True), sx.nn.AttentionCache(4, 4, 2, 4, dtype=jnp.int8)),
            call=decode,
            kinds=(EXPLICIT,),
            tolerance=1e-2,  # sums in another order are at times rounded to the next integer
        ),
        "attention, ring of slots": Case(
            lambda: (attention(causal=True, window=2), sx.nn.AttentionCache(4, 2, 2, 4, ring=True)),
            call=decode,
            kinds=(EXPLICIT,),
        ),
        "attention, cache of a context": Case(
            lambda: (attention(), sx.nn.ContextCache(4, 4, 2, 4)),
            call=read_context,
            kinds=(EXPLICIT,),
        ),
        "latent attention": Case(latent_attention, differentiated=True),
        "latent attention, cache": Case(
            lambda: (latent_attention(), sx.nn.LatentCache(4, 4, latent_dim=8, rope_dim=4)),
            call=decode,
        ),
        "LSTM": Case(
            lambda: sx.nn.RNN(sx.nn.LSTMCell(8, 8, rngs=sx.Rngs(0))),
            kinds=(EXPLICIT,),
            differentiated=True,
        ),
        "GRU, both ways": Case(
            lambda: sx.nn.Bidirectional(*cells(sx.nn.GRUCell)), refused={"gates": UNEVEN}
        ),
        "LSTM, both ways": Case(
            lambda: sx.nn.Bidirectional(*cells(sx.nn.LSTMCell)), kinds=(EXPLICIT,)
        ),
        "simple cell": Case(
            lambda: sx.nn.RNN(sx.nn.SimpleCell(8, 8, rngs=sx.Rngs(0))), refused={"gates": UNEVEN}
        ),
        "short convolution": Case(
            lambda: with_own_cache(sx.nn.ShortConvolution(8, rngs=sx.Rngs(0))),
            call=decode,
            kinds=(EXPLICIT,),
            refused={"cache": UNEVEN},
        ),
        "delta rule": Case(
            lambda: with_own_cache(delta()),
            call=decode,
            kinds=(EXPLICIT,),
            refused={"cache": UNEVEN},
        ),
        "state space": Case(
            lambda: with_own_cache(state_space()),
            call=decode,
            kinds=(EXPLICIT,),
            refused={"cache": UNEVEN},
        ),
        "instance norm": Case(lambda: sx.nn.InstanceNorm(8), kinds=(EXPLICIT,)),
        "batch norm": Case(lambda: sx.nn.BatchNorm(8), kinds=(EXPLICIT,)),
        "quantized": Case(
            lambda: sx.quantize(sx.nn.Linear(8, 8, rngs=sx.Rngs(0)), "int8"), kinds=(EXPLICIT,)
        ),
    }
    | {
        f"experts, {dispatch}": Case(
            lambda dispatch=dispatch: sx.nn.MoE(
                8, 8, num_experts=4, top_k=2, dispatch=dispatch, use_bias=True, rngs=sx.Rngs(0)
            ),
            kinds=(EXPLICIT,),
        )
        for dispatch in ("dense", "dropless", "capacity")
    }
)


def names_of(model: Any) -> list[str]:
    """Returns the names of dimensions, but for the batch, which always has a rule."""
    names = {name for _, v in sx.iter_variables(model) for name in v.axes or () if name}
    return sorted(names - {"batch"})


def run(case: Case) -> Callable[[Any, Any], Any]:
    """Returns the call of a case, with gradients where it has them."""
    if not case.differentiated:
        return case.call
    return lambda layer, x: sx.value_and_grad(lambda layer: matrix.loss(case.call, layer, x))(layer)


@functools.cache
def alone(case: Case) -> Any:
    """What one device gives."""
    return sx.jit(run(case))(case.make(), case.x)


def outcome(
    case: Case, kind: AxisType, rules: dict[str, Any], shape: tuple[int, int] = (2, 2)
) -> Any:
    """Returns whether all numbers are those of one device, or the type of our error."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=devices)
    expected = alone(case)
    try:
        layer = sx.shard(case.make(), mesh, rules)
        x = jax.device_put(case.x, NamedSharding(mesh, PartitionSpec("data")))
        with jax.set_mesh(mesh), sx.axis_rules(rules):
            found = sx.jit(run(case))(layer, x)
    except sx.errors.ShardaxError as error:
        return type(error)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    limits = {"rtol": case.tolerance, "atol": case.tolerance}
    return all(np.allclose(one, other, **limits) for one, other in pairs)


@pytest.mark.parametrize(
    ("title", "kind"), [(title, kind) for title, case in CASES.items() for kind in case.kinds]
)
def test_rule_for_any_name_gives_the_numbers_of_one_device(title: str, kind: AxisType):
    case = CASES[title]
    names = names_of(case.make())
    found = {name: outcome(case, kind, {"batch": "data", name: "model"}) for name in names}
    refused = {name: error for name, error in case.refused.items() if name in names}
    assert found == dict.fromkeys(names, True) | refused


@pytest.mark.parametrize(
    "rules",
    [
        {"heads": "data", "kv_heads": "data", "head_dim": "model"},
        {"head_dim": ("data", "model")},
        {"batch": "data", "head_dim": "data"},  # the input has it
        {"heads": "model", "head_dim": "data"},  # heads of keys and values are whole
    ],
)
def test_rules_for_head_dim_go_with_others(rules: dict[str, Any]):
    assert outcome(CASES["attention, rotary"], EXPLICIT, rules) is True


def test_axis_of_one_device_splits_nothing():
    rules = {"batch": "data", "head_dim": "model"}
    assert outcome(CASES["attention, rotary"], EXPLICIT, rules, (4, 1)) is True


def test_every_layer_is_among_the_cases():
    layers = {
        layer
        for _, layer in inspect.getmembers(sx.nn, inspect.isclass)
        if issubclass(layer, sx.Module)
    }
    models = [case.make() for case in CASES.values()]
    found = {type(module) for model in models for _, module in sx.iter_modules(model)}
    pools = {sx.nn.AdaptiveAvgPool, sx.nn.AdaptiveMaxPool}
    bases = {sx.nn.KernelLayer, sx.nn.RecurrentMixer}
    assert layers - found == pools | bases
