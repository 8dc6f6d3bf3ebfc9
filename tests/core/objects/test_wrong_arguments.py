# SPDX-License-Identifier: Apache-2.0
"""Arguments of a wrong kind: errors that name the argument and the code that would work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import StateMismatchError
from tests.advice import run_advice

LAYER = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
GRAPHDEF, STATE = sx.split(LAYER)
ON_MODELS: dict[str, Callable[[Any], Any]] = {
    "split": sx.split,
    "state": sx.state,
    "graphdef": sx.graphdef,
    "clone": sx.clone,
    "update": lambda tree: sx.update(tree, STATE),
    "pop": lambda tree: sx.pop(tree, sx.Param),
    "iter_variables": lambda tree: list(sx.iter_variables(tree)),
    "iter_modules": lambda tree: list(sx.iter_modules(tree)),
    "find_duplicates": sx.find_duplicates,
    "unbind": sx.unbind,
    "bind": lambda tree: sx.bind(tree, ()),
    "freeze": sx.freeze,
    "thaw": sx.thaw,
}


@pytest.mark.parametrize("name", ON_MODELS)
@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (sx.nn.Linear, r"type type.*\(Linear\(\.\.\.\), \.\.\.\)"),
        ("abc", "'abc' of type str"),
        (5, "'5' of type int"),
        (len, "of type builtin_function_or_method"),
        (lambda x: x, "of type function"),
        (GRAPHDEF, "of type GraphDef"),
    ],
)
def test_model_argument_without_model_is_refused(name: str, given: Any, fix: str) -> None:
    with pytest.raises(
        sx.errors.ModuleError, match=rf"sx\.{name} takes a model as its first.*{fix}"
    ):
        ON_MODELS[name](given)


@pytest.mark.parametrize("given", ["abc", 5, None, [1, 2], jnp.ones(2), LAYER, GRAPHDEF])
def test_values_of_a_wrong_kind_are_refused(given: Any) -> None:
    for write in (sx.merge, lambda _, value: sx.update(sx.clone(LAYER), value)):
        with pytest.raises(StateMismatchError, match=r"a State, a mapping by path") as caught:
            write(GRAPHDEF, given)
        write(GRAPHDEF, run_advice(caught.value, "sx.state(model)", {"sx": sx, "model": LAYER}))


@pytest.mark.parametrize("given", [STATE, LAYER, (GRAPHDEF, STATE), "abc"])
def test_merge_wants_a_graphdef_first(given: Any) -> None:
    with pytest.raises(sx.errors.ModuleError, match=r"GraphDef") as caught:
        sx.merge(given, GRAPHDEF)
    names = {"sx": sx, "graphdef": GRAPHDEF, "state": STATE}
    model = run_advice(caught.value, "sx.merge(graphdef, state)", names)
    assert sx.graphdef(model) == GRAPHDEF


def test_wrong_arguments_of_other_kinds_name_the_fix() -> None:
    with pytest.raises(StateMismatchError, match=r"\.kernel: holds arrays, given 'x'"):
        sx.merge(GRAPHDEF, {"kernel": "x", "bias": jnp.ones(3)})
    with pytest.raises(StateMismatchError, match=r"not of a list") as caught:
        sx.State([1, 2])  # pyright: ignore[reportArgumentType]
    names = {"sx": sx, "model": LAYER, "array": jnp.ones((2, 3)), "x": jnp.ones(2)}
    state = run_advice(caught.value, "sx.State({'kernel': array})", names)
    assert run_advice(caught.value, "sx.state(model)", names).merge(state).flat().keys() == (
        STATE.flat().keys()
    )
    with pytest.raises(sx.errors.ModuleError, match=r"callable Module") as caught:
        sx.stateless_call(5, ())
    result, _ = run_advice(
        caught.value, "sx.stateless_call(*sx.unbind(model, freeze=True), x)", names
    )
    assert result.shape == (3,)
    for wrong in ("abc", 5, STATE, {"a": 1}):
        with pytest.raises(sx.errors.ModuleError, match=r"sx\.unbind\(tree\)"):
            sx.bind(sx.unbind(LAYER)[0], wrong)
    with pytest.raises(sx.errors.FilterError, match=r"5 of type int is not a filter"):
        sx.state(LAYER, 5)
    with pytest.raises(sx.errors.SelectionError, match="at_keypaths"):
        sx.select(LAYER).at("kernel")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "make",
    [
        lambda: sx.Rngs("a"),
        lambda: sx.Rngs(1.5),
        lambda: sx.Rngs(True),
        lambda: sx.Rngs(params=None),
        lambda: sx.Rngs([0, 1]),
        lambda: sx.Rngs(jnp.ones(2)),
        lambda: sx.Rngs(jnp.ones(3, jnp.uint32)),
        lambda: sx.Rngs(0, 1),
        lambda: sx.Rngs({"params": 0}),
        lambda: sx.Rngs(sx.Rngs(0)),
        lambda: sx.Rngs(params=sx.Rngs(0).params),
        lambda: sx.Rngs(LAYER),
        lambda: sx.Rngs(0).fork(split="x"),  # pyright: ignore[reportArgumentType]
        lambda: sx.Rngs(0).fork(split=0),
        lambda: sx.Rngs(0).scope(5),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_seeds_name_right_ones(make: Callable[[], Any]) -> None:
    with pytest.raises(sx.errors.ModuleError, match=r"Rngs\(0|split=4|rngs\.scope\('block'\)"):
        make()
    assert sx.Rngs(sx.Variable(3)).default.key == jax.random.key(3)
