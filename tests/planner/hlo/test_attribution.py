# SPDX-License-Identifier: Apache-2.0
"""Which parameters collectives move, and why, in programs of which that is known by hand."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.hlo import parse, read_program
from shardax.hlo.collectives import Collective
from shardax.hlo.live_memory import aliases
from shardax.hlo.partitioner import partitioned_text
from tests.planner.hlo.cases import CASES

GOLDEN = Path(__file__).parent / "golden"
PATHS = {
    "decoder": ("w['down']", "w['out']", "w['qkv']", "w['up']", "x"),
    "fully_sharded": ("up", "down", "x"),
    "experts": ("x", "w"),
}
GATHERS = [f"gathers w['{name}'] before dot_general" for name in ("down", "out", "qkv", "up")]
GRADIENTS = [f"sums the gradient of w['{name}'] over data" for name in ("down", "out", "qkv", "up")]
PRODUCTS = "sums partial products of dot_general over model"


def golden(compiler: str, case: str) -> tuple[Collective, ...]:
    """The collectives of a case in the program of a compiler that need not be here."""
    path = min(GOLDEN.glob(f"{compiler}/{case}.hlo.gz"))
    text = gzip.decompress(path.read_bytes()).decode()
    return read_program(text, CASES[case].mesh, arguments=PATHS[case]).collectives


def partitioned(case: str) -> tuple[Collective, ...]:
    text = partitioned_text(CASES[case].lower(jax.devices(), jnp.bfloat16))
    mesh, paths = CASES[case].mesh, PATHS[case]
    return read_program(text, mesh, arguments=paths, estimate=True).collectives


def whys(collectives: Sequence[Collective]) -> list[str]:
    return sorted({each.why for each in collectives})


# --- whole programs of several compilers ---


def test_decoder_weights_are_gathered_and_gradients_summed() -> None:
    assert whys(partitioned("decoder")) == [*GATHERS, PRODUCTS, *GRADIENTS]
    tpu = whys(golden("libtpu-*/v5e", "decoder"))
    joined = "sums the gradient of w['down'], w['out'] and 1 more over data"
    assert tpu == [*GATHERS, PRODUCTS, joined, GRADIENTS[-1]]
    gpu = whys(golden("jax-cuda12-plugin-*/h100", "decoder"))
    four = "w['down'], w['out'] and 2 more"
    assert gpu == [
        *(f"gathers {four} before dot_general", PRODUCTS, f"sums the gradient of {four} over data")
    ]


@pytest.mark.parametrize("compiler", ["libtpu-*/v5e", "jax-cuda12-plugin-*/h100", "jaxlib-*/cpu"])
def test_parameters_are_moved_twice_by_every_compiler(compiler: str) -> None:
    moved = golden(compiler, "fully_sharded")
    assert whys(moved)[0].startswith("gathers") and whys(moved)[-1].startswith("sums the gradient")
    for kind in ("all-gather", "reduce-scatter"):
        kinds = (kind, "all-reduce") if kind == "reduce-scatter" else (kind,)
        paths = [path for each in moved if each.kind in kinds for path in each.parameters]
        assert sorted(paths) == ["down", "up"]
    assert {each.source.partition(":")[0] for each in moved} == {"cases.py"}


def test_tokens_go_to_their_expert_and_come_back() -> None:
    there, back = golden("libtpu-*/v5e", "experts")
    assert (there.why, there.parameters) == ("re-lays out x for all_to_all", ("x",))
    assert (back.why, back.parameters) == ("asked for by all_to_all over expert", ())


# --- one reason at a time ---

SIZES = {"data": 2, "model": 4}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def place(mesh: Mesh, shape: tuple[int, ...], *axes: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))


def facts(
    f: Callable[..., Any], args: Sequence[Any], paths: Sequence[str], **options: Any
) -> list[tuple[str, str, tuple[str, ...]]]:
    """Kind, why and parameters of each collective."""
    text = jax.jit(f, **options).lower(*args).compile().as_text()
    found = read_program(text or "", SIZES, arguments=paths).collectives
    return [(each.kind, each.why, each.parameters) for each in found]


def test_gradient_is_attributed_to_parameter_not_moments(mesh: Mesh) -> None:
    w, x = place(mesh, (16, 8)), place(mesh, (32, 16), "data")

    def step(state: Any, x: Any) -> Any:
        w, mu, nu = state["w"], state["opt"]["mu"]["w"], state["opt"]["nu"]["w"]
        g = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
        return {"w": w - mu / (jnp.sqrt(nu) + 1e-8), "opt": {"mu": {"w": mu}, "nu": {"w": nu}}}

    state = {"w": w, "opt": {"mu": {"w": w}, "nu": {"w": w}}}
    paths = ["opt.mu['w']", "opt.nu['w']", "state['w']", "x"]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    found = facts(step, (state, x), paths, donate_argnums=0, out_shardings=shardings)
    assert found == [("all-reduce", "sums the gradient of state['w'] over data", ("state['w']",))]


def test_returned_gradient_is_attributed_to_argument_by_type(mesh: Mesh) -> None:
    w, x = place(mesh, (16, 8)), place(mesh, (32, 16), "data")

    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w).sum()

    found = facts(jax.grad(loss), (w, x), ["w", "x"], out_shardings=w.sharding)
    assert found == [("all-reduce", "sums the gradient of w over data", ("w",))]


def test_ambiguous_argument_types_are_not_guessed(mesh: Mesh) -> None:
    w, x = place(mesh, (16, 16)), place(mesh, (32, 16), "data")

    def loss(frozen: Any, w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ frozen) @ w).sum()

    paths = ["frozen", "w", "x"]
    found = facts(jax.grad(loss, 1), (w, w, x), paths, out_shardings=w.sharding)
    assert found == [("all-reduce", "sums partial products of dot_general over data", ())]


def test_new_parameter_is_gathered_after_sharded_update(mesh: Mesh) -> None:
    w, m = place(mesh, (16, 8)), place(mesh, (16, 8), "data")

    def step(w: Any, m: Any) -> Any:
        m = m * 0.9 + lax.with_sharding_constraint(w, m_sharding)
        return lax.with_sharding_constraint(jnp.tanh(m), w_sharding), m

    w_sharding, m_sharding = w.sharding, m.sharding
    options = {"donate_argnums": (0, 1), "out_shardings": (w_sharding, m_sharding)}
    found = facts(step, (w, m), ["w", "m"], **options)
    assert found == [("all-gather", "gathers the new w over data", ("w",))]


def test_cache_is_no_parameter_with_a_gradient(mesh: Mesh) -> None:
    cache, x = place(mesh, (64, 8)), place(mesh, (1, 16), None, "model")
    w = place(mesh, (16, 8), "model")

    def decode(cache: Any, x: Any, w: Any) -> Any:
        return lax.dynamic_update_slice(cache, x @ w, (3, 0))

    options = {"donate_argnums": 0, "out_shardings": cache.sharding}
    found = facts(decode, (cache, x, w), ["cache", "x", "w"], **options)
    assert found == [("all-reduce", PRODUCTS, ("cache",))]


def test_softmax_over_sharded_scores_reduces_max_and_sum(mesh: Mesh) -> None:
    found = facts(jax.nn.softmax, (place(mesh, (16, 32), None, "model"),), ["scores"])
    assert found == [
        ("all-reduce", "takes the largest of reduce_max over model", ()),
        ("all-reduce", "sums parts of reduce_sum over model", ()),
    ]


def test_activations_are_gathered_before_what_needs_them_whole(mesh: Mesh) -> None:
    x, w = place(mesh, (32, 16), "data"), place(mesh, (16, 64), None, "model")

    def f(x: Any, w: Any) -> Any:
        h = lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", "model")))
        return lax.with_sharding_constraint(h, NamedSharding(mesh, P("data")))

    found = facts(f, (x, w), ["x", "w"])
    assert found == [("all-gather", "gathers an activation before sharding_constraint", ())]


@pytest.mark.parametrize(
    ("collective", "why"),
    [
        (lambda x: lax.psum(x, "model"), "asked for by psum"),
        (lambda x: lax.pmax(jnp.tanh(x), "model"), "asked for by pmax"),
        (lambda x: lax.ppermute(jnp.tanh(x), "model", [(0, 1)]), "asked for by ppermute"),
    ],
    ids=["psum", "pmax", "ppermute"],
)
def test_attribution_says_what_a_program_asks_for_itself(
    mesh: Mesh, collective: Callable[[Any], Any], why: str
) -> None:
    f = jax.shard_map(
        collective, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"), check_vma=False
    )
    [(_, found, _)] = facts(f, (place(mesh, (32, 16), "data", "model"),), ["x"])
    assert found == f"{why} over model"


def test_reason_is_given_without_argument_paths() -> None:
    text = jax.jit(jnp.sum).lower(place(jax.make_mesh((8,), ("d",)), (8, 4), "d")).compile()
    [each] = read_program(text.as_text() or "", {"d": 8}).collectives
    assert (each.why, each.parameters) == ("sums parts of reduce_sum over d", ())


# --- results that take the place of arguments ---


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("input_output_alias={ {0}: (1, {}, may-alias), {1}: (0, {}, must-alias) }", {0: 1, 1: 0}),
        ("buffer_donor={ (1, {}), (0, {}) }", {0: 0, 1: 1}),
        ("input_output_alias={ {1}: (1, {}, may-alias) }, buffer_donor={ (0, {}) }", {1: 1, 0: 0}),
        ("is_scheduled=true", {}),
    ],
)
def test_results_that_take_the_place_of_arguments(header: str, expected: dict[int, int]) -> None:
    text = f"""HloModule m, {header}

ENTRY %main (x: f32[8], y: f32[4]) -> (f32[8], f32[4]) {{
  %x = f32[8]{{0}} parameter(0)
  %y = f32[4]{{0}} parameter(1)
  ROOT %both = (f32[8]{{0}}, f32[4]{{0}}) tuple(%x, %y)
}}
"""
    assert aliases(parse(text)) == expected
