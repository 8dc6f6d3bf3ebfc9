# SPDX-License-Identifier: Apache-2.0
"""A Module is one pytree node: plain JAX transforms take it; lost writes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax._core.graph.flatten import has_objects
from shardax.errors import ModuleError
from tests.strategies import Node, assert_same_model


class Attention(sx.Module):
    def __init__(self) -> None:
        self.q = Linear(2)


class Linear(sx.Module):
    def __init__(self, size: int) -> None:
        self.kernel = sx.Param(jnp.arange(float(size)), axes=("embed",), tag="slow")
        self.calls = [0]
        self.rate = 0.5

    def __call__(self, x: Any) -> Any:
        return (self.kernel * x).sum() * self.rate


def _tower() -> Node:
    tower = Node()
    tower.layers = [Node()]
    tower.layers[0].attn = Attention()
    tower.heads = {"en-us": Linear(1)}
    tower.table = np.ones(3, np.float32)
    return tower


# --- flattening ---


def test_key_paths_print_as_access_code() -> None:
    paths = jax.tree_util.tree_leaves_with_path(_tower())
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        ".layers[0].attn.q.kernel",
        ".heads['en-us'].kernel",
        ".table",
    ]
    inside = jax.tree_util.tree_leaves_with_path({"model": _tower()})
    assert jax.tree_util.keystr(inside[0][0]) == "['model'].layers[0].attn.q.kernel"
    variable = jax.tree_util.tree_leaves_with_path([sx.Param(1.0)])
    assert jax.tree_util.keystr(variable[0][0]) == "[0].value"


def test_shared_variable_is_one_leaf() -> None:
    linear = Linear(2)
    model = Node()
    model.a, model.b, model.kernel = linear, linear, linear.kernel
    assert [leaf.tolist() for leaf in jax.tree.leaves(model)] == [[0.0, 1.0]]


def test_tied_weight_gets_its_summed_gradient() -> None:
    tied, untied = Node(), Node()
    tied.embed = tied.head = sx.Param(jnp.asarray([1.0, 2.0]))
    untied.embed, untied.head = (sx.Param(jnp.asarray([1.0, 2.0])) for _ in range(2))

    def loss(model: Node) -> jax.Array:
        return (3 * model.embed + model.head**2).sum()

    whole, parts = jax.grad(loss)(tied), jax.grad(loss)(untied)
    assert whole.embed is whole.head
    assert whole.embed.value.tolist() == (parts.embed + parts.head).tolist() == [5.0, 7.0]


def test_models_of_different_structure_are_different_trees() -> None:
    one, other = Linear(2), Linear(2)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    other.rate = 1
    assert jax.tree.structure(one) != jax.tree.structure(other)
    tied, untied = sx.List([one.kernel, one.kernel]), sx.List([one.kernel, other.kernel])
    assert jax.tree.structure(tied) != jax.tree.structure(untied)


def test_tree_map_returns_an_independent_writable_model() -> None:
    tower = _tower()
    before = sx.clone(tower)
    doubled = jax.tree.map(lambda x: 2 * x, tower)
    assert doubled.layers[0].attn.q.kernel.value.tolist() == [0.0, 2.0]
    doubled.heads["en-us"].kernel[...] = jnp.ones(1)
    doubled.heads["de"] = Linear(1)
    doubled.table = jnp.zeros(3)
    doubled.layers.append(1)
    doubled.layers[0].attn.q.kernel.set_metadata(tag="fast")
    assert_same_model(tower, before)


def test_model_returned_by_plain_transform_is_writable() -> None:
    returned = jax.jit(lambda model: model)(_tower())
    returned.layers[0].attn.q.kernel[0] = 9.0
    returned.layers.append(sx.Param(1.0))
    assert returned.layers[0].attn.q.kernel.value.tolist() == [9.0, 1.0]


def test_leaves_may_be_anything_as_jax_trees_allow() -> None:
    model = Linear(2)
    shapes = jax.tree.map(lambda x: x.shape, model, is_leaf=None)
    assert shapes.kernel.value == (2,)
    assert jax.tree.map(lambda _: None, model).kernel.value is None
    abstract = jax.eval_shape(lambda m: m, model)
    assert isinstance(abstract, Linear) and abstract.kernel.is_abstract
    assert (abstract.kernel.shape, abstract.kernel.axes) == ((2,), ("embed",))


def test_has_objects_finds_objects_at_any_depth() -> None:
    class Holder:
        """Registered below: a user's own pytree node."""

        def __init__(self, content: Any) -> None:
            self.content = content

    jax.tree_util.register_pytree_node(
        Holder, lambda h: ((h.content,), None), lambda _, c: Holder(*c)
    )
    for found in (Linear(1), sx.Param(1.0), sx.List(), [{"a": (sx.Dict(),)}], Holder([Linear(1)])):
        assert has_objects(found)
    for plain in (1, "x", None, [jnp.ones(1), {"a": ()}], Holder(1), sx.state(Linear(1)), Linear):
        assert not has_objects(plain)


# --- plain transforms ---

PLAIN_TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda m: f(m).sum()),
    "vmap": jax.vmap,
    "eval_shape": lambda f: lambda m: jax.eval_shape(f, m),
    "checkpoint": lambda f: jax.grad(lambda m: jax.checkpoint(f)(m).sum()),
    "scan": lambda f: lambda m: jax.lax.scan(lambda c, _: (c, f(c)), m, None, length=2),
    "cond": lambda f: jax.jit(lambda m: jax.lax.cond(m.rate > 0, f, f, m)),
}
each_transform = pytest.mark.parametrize(
    "transform", PLAIN_TRANSFORMS.values(), ids=PLAIN_TRANSFORMS.keys()
)

WRITES: dict[str, Callable[[Any], Any]] = {
    "value": lambda m: setattr(m.kernel, "value", m.kernel.value + 1),
    "whole": lambda m: m.kernel.__setitem__(..., m.kernel.value + 1),
    "in place": lambda m: m.kernel.__iadd__(1.0),
    "static attribute": lambda m: setattr(m, "rate", 0.1),
    "new attribute": lambda m: setattr(m, "new", sx.Param(1.0)),
    "array attribute": lambda m: setattr(m, "table", m.kernel.value),
    "deletion": lambda m: delattr(m, "rate"),
    "append": lambda m: m.calls.append(1),
    "list item": lambda m: m.calls.__setitem__(0, 5),
    "dict entry": lambda m: m.names.__setitem__("b", 1),
    "metadata": lambda m: m.kernel.set_metadata(tag="fast"),
    "sow": lambda m: m.sow("seen", m.kernel.value),
    "update": lambda m: sx.update(m, {"kernel": m.kernel.value + 1}),
    "pop": lambda m: sx.pop(m, sx.Param),
    "eval mode": lambda m: m.set_attributes(rate=0.0),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


def _with_table() -> Linear:
    model = Linear(2)
    model.table, model.names = jnp.ones(2), {"a": 1}
    return model


@each_transform
def test_plain_transforms_accept_and_read_models(transform: Any) -> None:
    def read(model: Linear) -> jax.Array:
        model.calls.index(0)
        return model.kernel * model.table + model.rate + len(model.names)

    transform(read)(_with_table())


@each_write
def test_write_to_copy_inside_plain_transform_is_refused(write: Callable[[Any], Any]) -> None:
    model = _with_table()
    before = sx.clone(model)

    def function(copied: Linear) -> jax.Array:
        with pytest.raises(ModuleError, match=r"would be lost.*sx\.jit.*(?s:.*)sx\.mutable"):
            write(copied)
        return copied.kernel.value

    jax.jit(function)(model)
    assert_same_model(model, before)


@each_transform
def test_plain_transforms_refuse_writes(transform: Any) -> None:
    refused: list[str] = []

    def function(copied: Linear) -> jax.Array:
        for name, write in WRITES.items():
            with pytest.raises(ModuleError):
                write(copied)
            refused.append(name)
        return copied.kernel.value

    transform(function)(_with_table())
    assert refused[: len(WRITES)] == list(WRITES)


def test_separately_passed_variable_is_read_only() -> None:
    def function(variable: sx.Param[Any]) -> jax.Array:
        with pytest.raises(ModuleError):
            variable[...] = 0.0
        with pytest.raises(ModuleError):
            variable.set_metadata(tag="x")
        return variable * 2

    assert float(jax.jit(function)(sx.Param(2.0))) == 4.0


class Counting(sx.Module):
    """Writes, draws, sows or gets an attribute, and holds no tracer under a plain transform."""

    def __init__(self) -> None:
        self.calls, self.items, self.number = sx.Variable(0), [], 0
        self.drop = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))


class Arrayless(sx.Module):
    def __init__(self) -> None:
        self.items, self.number = [], 0


def _count(model: Counting) -> None:
    model.calls += 1


UNTRACED_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "counter": lambda m, x: m.calls.__iadd__(1),
    "draw": lambda m, x: m.drop(x),
    "lifted": lambda m, x: sx.jit(_count)(m),
    "number": lambda m, x: setattr(m, "number", m.number + 1),
    "new attribute": lambda m, x: setattr(m, "new", x),
    "sow": lambda m, x: m.sow("seen", x),
    "append": lambda m, x: m.items.append(1),
}
PASSING: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda f, m: jax.vmap(f, in_axes=(None, 0))(m, jnp.ones((4, 2))),
    "jit of vmap": lambda f, m: jax.jit(jax.vmap(f, in_axes=(None, 0)))(m, jnp.ones((4, 2))),
    "jit": lambda f, m: jax.jit(f)(m, jnp.ones(2)),
    "grad": lambda f, m: jax.grad(lambda x, m: f(m, x).sum())(jnp.ones(2), m),
    "checkpoint": lambda f, m: jax.checkpoint(f)(m, jnp.ones(2)),
    "eval_shape": lambda f, m: jax.eval_shape(f, m, jnp.ones(2)),
    "scan": lambda f, m: jax.lax.scan(lambda m, x: (m, f(m, x)), m, jnp.ones((3, 2))),
    "scan closure": lambda f, m: jax.lax.scan(lambda c, x: (c, f(m, x)), 0.0, jnp.ones((3, 2))),
    "cond": lambda f, m: jax.lax.cond(True, f, lambda m, x: x, m, jnp.ones(2)),
    "fori_loop": lambda f, m: jax.lax.fori_loop(0, 2, lambda i, x: f(m, x), jnp.ones(2)),
}


# Every write below two transforms, and two writes below every transform.
UNTRACED = [
    (transform, write)
    for i, transform in enumerate(PASSING)
    for j, write in enumerate(UNTRACED_WRITES)
    if (i - j) % 5 == 0 or write in ("counter", "append")
]


@pytest.mark.parametrize(("name", "write"), UNTRACED)
@pytest.mark.parametrize("kind", [Counting, Arrayless])
def test_untraced_copy_loses_no_write(name: str, write: str, kind: Any) -> None:
    transform = PASSING[name]
    model = kind()
    if write in ("counter", "draw", "lifted") and kind is Arrayless:
        return
    jax.tree.leaves(model)  # what is lazy becomes real
    before = repr(model)

    def function(model: Any, x: Any) -> Any:
        UNTRACED_WRITES[write](model, x)
        return x

    if write == "lifted" and transform is PASSING["grad"]:  # nothing is traced by the inner jit
        transform(function, model)
        assert int(model.calls) == 1
        return
    with pytest.raises(
        (ModuleError, sx.errors.TraceLeakError), match="shardax transform of the same name"
    ):
        transform(function, model)
    assert repr(model) == before


def test_arrayless_variable_is_read_only_in_plain_transform() -> None:
    variable: sx.Variable[Any] = sx.Variable({})
    with pytest.raises(ModuleError):
        jax.jit(lambda v, x: v.__setitem__("s", x))(variable, 1.0)
    assert variable.value == {}


def test_copies_outside_transforms_are_writable() -> None:
    model = Counting()
    leaves, treedef = jax.tree.flatten(model)
    copies = [jax.tree.map(lambda x: x, model), jax.tree.unflatten(treedef, leaves)]
    for made in (*copies, jax.tree.map(lambda x: x, Arrayless())):
        for name, write in UNTRACED_WRITES.items():
            if hasattr(made, "calls") or name not in ("counter", "draw", "lifted"):
                write(made, jnp.ones(2))
        assert made.number == 1 and made.items == [1]
    assert [int(made.calls) for made in copies] == [2, 2] and int(model.calls) == 0


# --- mutable ---


@each_write
def test_mutable_allows_writes_to_the_returned_model(write: Callable[[Any], Any]) -> None:
    model, expected = _with_table(), _with_table()

    @jax.jit
    def function(copied: Linear) -> Linear:
        copied = sx.mutable(copied)
        write(copied)
        return copied

    before = sx.clone(model)
    returned = function(model)
    write(expected)
    assert_same_model(returned, expected)
    assert_same_model(model, before)


def test_mutable_covers_every_object_of_a_tree() -> None:
    @jax.jit
    def function(models: dict[str, Any]) -> dict[str, Any]:
        assert sx.mutable(models) is models
        models["a"][0].layers[0].attn.q.kernel[...] = jnp.zeros(2)
        models["b"][...] = 2.0
        return models

    returned = function({"a": (_tower(),), "b": sx.Param(1.0)})
    assert returned["a"][0].layers[0].attn.q.kernel.value.tolist() == [0.0, 0.0]
    assert float(returned["b"]) == 2.0


def test_mutable_outside_of_transforms_changes_nothing() -> None:
    model = _with_table()
    assert sx.mutable(model) is model
    assert sx.mutable([1, jnp.ones(2)])[0] == 1


def test_new_objects_inside_a_plain_transform_are_writable() -> None:
    @jax.jit
    def build(x: jax.Array) -> Linear:
        model = Linear(2)
        model.kernel[...] = model.kernel + x
        model.calls.append(1)
        model.table = x
        return model

    built = build(jnp.ones(2))
    assert (built.kernel.value.tolist(), built.calls) == ([1.0, 2.0], [0, 1])
    built.table = jnp.zeros(2)
