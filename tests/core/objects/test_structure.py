# SPDX-License-Identifier: Apache-2.0
"""Structure: what makes models equal, when a remembered walk is out of date, what is kept alive."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import shardax as sx
from shardax._core.graph.flatten import Flat, build, flatten, flatten_roots
from tests.strategies import Node, OtherNode, assert_same_model, models
from tests.structure import advance_structure_epoch, structure_epoch


def _model() -> Node:
    model = Node()
    model.w, model.array, model.rate = sx.Param(jnp.ones(2), axes=("embed",)), jnp.ones(3), 0.5
    model.items, model.entries = [1, jnp.ones(1), sx.Param(1.0)], {"a": 1, "p": sx.Param(2.0)}
    model.child = OtherNode()
    model.child.w = model.w
    return model


# --- equality ---

DIFFERENCES: dict[str, Callable[[Any], Any]] = {
    "static value": lambda m: setattr(m, "rate", 0.6),
    "static type": lambda m: setattr(m, "rate", np.dtype("float32")),
    "int for bool": lambda m: m.items.__setitem__(0, True),
    "attribute": lambda m: setattr(m, "extra", None),
    "attribute name": lambda m: (delattr(m, "rate"), setattr(m, "ratio", 0.5)),
    "Variable type": lambda m: setattr(m, "array", sx.Param(jnp.ones(3))),
    "axes": lambda m: m.w.set_metadata(axes=("mlp",)),
    "metadata": lambda m: m.w.set_metadata(tag="x"),
    "sharing": lambda m: setattr(m.child, "w", sx.Param(jnp.ones(2), axes=("embed",))),
    "class": lambda m: setattr(m, "child", _like(m.child)),
    "container length": lambda m: m.items.append(1),
    "dict key": lambda m: m.entries.__setitem__("b", m.entries.pop("a")),
    "order": lambda m: setattr(m, "rate", (delattr(m, "rate"), 0.5)[1]),
    "tuple for list": lambda m: setattr(m, "items", tuple(m.items)),
    "cycle": lambda m: setattr(m.child, "parent", m),
}


def _like(module: sx.Module) -> Node:
    node = Node()
    for name, value in vars(module).items():
        setattr(node, name, value)
    return node


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_any_difference_except_values_changes_structure(change: Callable[[Any], Any]) -> None:
    one, other = _model(), _model()
    assert sx.graphdef(one) == sx.graphdef(other)
    assert hash(sx.graphdef(one)) == hash(sx.graphdef(other))
    change(other)
    assert sx.graphdef(one) != sx.graphdef(other)


def test_values_shapes_and_laziness_are_not_structure() -> None:
    one, other = _model(), _model()
    other.w.value, other.array = jnp.zeros((5,), jnp.int8), np.zeros(1)
    other.items[2].value = sx.Init(jax.nn.initializers.ones, (2,))
    assert sx.graphdef(one) == sx.graphdef(other)


def test_graphdef_prints_its_size_and_survives_pickling() -> None:
    graphdef = sx.graphdef(_model())
    assert repr(graphdef) == "GraphDef(9 objects, 5 variables)"
    copied = pickle.loads(pickle.dumps(graphdef))
    assert copied == graphdef and hash(copied) == hash(graphdef)
    assert copied.leaf_paths == graphdef.leaf_paths
    assert graphdef != "GraphDef"


def test_plain_transforms_take_and_return_it_as_static() -> None:
    model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    model.up.kernel = model.gate.kernel
    graphdef, state = sx.split(model)

    @jax.jit
    def step(graphdef: Any, state: Any) -> Any:
        model = sx.merge(graphdef, state)
        for _, param in sx.iter_variables(model, sx.Param):
            param[...] = param + 1
        return sx.split(model)

    made, new = step(*sx.split(model))
    assert made == graphdef and jax.tree.leaves(made) == []
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b + 1).all()), new, state))
    traces = step._cache_size()
    step(made, new)
    assert step._cache_size() == traces
    abstract_def, abstract = jax.eval_shape(lambda: sx.split(model))
    assert abstract_def == graphdef and abstract == jax.eval_shape(lambda s: s, state)
    batched = jax.vmap(lambda g, s, x: sx.split(sx.merge(g, s))[1], in_axes=(None, None, 0))
    assert jax.tree.leaves(batched(graphdef, state, jnp.ones(3)))[0].shape[0] == 3
    gradient = jax.grad(lambda s, g: sum(x.sum() for x in jax.tree.leaves(sx.merge(g, s))))
    assert jax.tree.structure(gradient(state, graphdef)) == jax.tree.structure(state)
    assert sx.jit(lambda g, s: sx.split(sx.merge(g, s)))(graphdef, state) == (graphdef, state)


def test_graphdef_holds_no_value() -> None:
    model = _model()
    arrays = [weakref.ref(v.value) for _, v in sx.iter_variables(model)]
    graphdef = sx.graphdef(model)
    del model
    gc.collect()
    assert [ref() for ref in arrays] == [None] * 5
    assert len(graphdef.leaves) == 5


# --- flatten and build ---


def test_object_shared_between_roots_is_one() -> None:
    model = _model()
    flat = flatten_roots([model.child, 3, (model, [model.w])], [("a",), ("b",), ("c",)])
    assert sum(leaf is model.w for leaf in flat.leaves) == 1
    assert flat.leaf_paths[:2] == [("a", "w"), ("c", 0, "items", 1)]
    roots, objects = build(flat.graphdef, [v.value for v in flat.leaves], None)
    assert roots[0] is roots[2][0].child and roots[1] == 3
    assert roots[2][1][0] is roots[0].w and len(objects) == len(flat.paths)


@given(model=models())
@settings(max_examples=20)
def test_build_is_the_inverse_of_flattening(model: Any) -> None:
    flat = flatten(model)
    (built,), objects = build(flat.graphdef, [v._value for v in flat.leaves], None)
    assert_same_model(built, model)
    assert [type(item) for item in objects] == [
        getattr(definition, "type", None) for definition in flat.graphdef.objects
    ]


def test_containers_of_objects_keep_their_type() -> None:
    class Pair(tuple[Any, ...]):
        """A tuple of the user's own."""

    model = Node()
    model.w = sx.Param(1.0)
    model.pair = Pair((model.w, 1))
    model.act = functools.partial(max, model.w, key=model)
    model.method = model.set_attributes
    copied = sx.clone(model)
    assert type(copied.pair) is Pair and copied.pair[0] is copied.w
    assert copied.act.func is max and copied.act.args == (copied.w,)
    assert copied.act.keywords == {"key": copied}
    assert copied.method.__self__ is copied


def test_deep_models_do_not_overflow() -> None:
    model: Any = sx.Param(1.0)
    for _ in range(100):
        model = sx.List([model])
    assert len(sx.graphdef(sx.clone(model)).objects) == 101


# --- the epoch ---


@pytest.fixture
def walked() -> Node:
    """A model that has been flattened."""
    model = _model()
    sx.graphdef(model)
    return model


STRUCTURAL: dict[str, Callable[[Any], Any]] = {
    **{name: DIFFERENCES[name] for name in ("static value", "attribute", "axes", "metadata")},
    **{
        name: DIFFERENCES[name] for name in ("int for bool", "container length", "sharing", "cycle")
    },
    "deletion": lambda m: delattr(m, "rate"),
    "array deletion": lambda m: delattr(m, "array"),
    "array to static": lambda m: setattr(m, "array", 1),
    "static to array": lambda m: setattr(m, "rate", jnp.ones(1)),
    "new Variable": lambda m: setattr(m, "w", sx.Param(1.0)),
    "new list": lambda m: setattr(m, "items", [1]),
    "list deletion": lambda m: m.items.__delitem__(0),
    "insert": lambda m: m.items.insert(0, 5),
    "slice": lambda m: m.items.__setitem__(slice(1), [7]),
    "reverse": lambda m: m.items.reverse(),
    "new entry": lambda m: m.entries.__setitem__("b", 1),
    "entry changed": lambda m: m.entries.__setitem__("a", 2),
    "entry deletion": lambda m: m.entries.__delitem__("a"),
    "in a child": lambda m: setattr(m.child, "extra", 1),
    "sow": lambda m: m.sow("seen", jnp.ones(1)),
    "pop": lambda m: sx.pop(m.entries, sx.Param),
}

NOT_STRUCTURAL: dict[str, Callable[[Any], Any]] = {
    "value": lambda m: setattr(m.w, "value", jnp.zeros(7)),
    "in place": lambda m: m.w.__iadd__(1),
    "at an index": lambda m: m.w.__setitem__(0, 5.0),
    "array attribute": lambda m: setattr(m, "array", np.zeros(4)),
    "array item": lambda m: m.items.__setitem__(1, jnp.zeros(4)),
    "equal static": lambda m: setattr(m, "rate", 0.5),
    "equal item": lambda m: m.items.__setitem__(0, 1),
    "equal entry": lambda m: m.entries.__setitem__("a", 1),
    "equal metadata": lambda m: m.w.set_metadata(axes=("embed",)),
    "same object": lambda m: setattr(m, "w", m.w),
    "same list": lambda m: setattr(m, "items", m.items),
    "update": lambda m: sx.update(m, sx.state(m)),
    "reading": lambda m: (m.w.value, list(m.items), repr(m), sx.find_duplicates(m)),
    "copying": lambda m: (sx.clone(m), pickle.dumps(m), jax.tree.map(lambda x: x, m)),
    "a new model": lambda m: (_model(), setattr(_model(), "x", 1), sx.graphdef(_model())),
    "editing a copy": lambda m: setattr(sx.clone(m), "extra", 1),
    "a refused write": lambda m: _refused(lambda: setattr(m, "names", {1})),
    "a refused deletion": lambda m: _refused(lambda: delattr(m, "no_such_attribute")),
}


def _refused(act: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        act()


@pytest.mark.parametrize("change", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_write_to_flattened_model_advances_the_epoch(
    change: Callable[[Any], Any], walked: Node
) -> None:
    before, structure = structure_epoch(), sx.graphdef(walked)
    change(walked)
    assert structure_epoch() == before + 1
    assert sx.graphdef(walked) != structure


@pytest.mark.parametrize("change", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_write_to_unflattened_model_keeps_the_epoch(change: Callable[[Any], Any]) -> None:
    model = _model()
    before = structure_epoch()
    if change is not STRUCTURAL["pop"]:  # which itself flattens
        change(model)
    assert structure_epoch() == before


@pytest.mark.parametrize("change", NOT_STRUCTURAL.values(), ids=NOT_STRUCTURAL.keys())
def test_nothing_else_advances_the_epoch(change: Callable[[Any], Any], walked: Node) -> None:
    before, remembered = structure_epoch(), flatten(walked)
    change(walked)
    assert structure_epoch() == before
    assert flatten(walked) is remembered


def test_flattening_is_remembered_until_the_epoch_advances() -> None:
    model, other = _model(), _model()
    first: Flat = flatten(model)
    flatten(other)
    assert flatten(model) is first
    other.extra = 1  # any flattened model's change makes every memory walk again
    again = flatten(model)
    assert (
        again is not first
        and again.graphdef == first.graphdef
        and list(map(id, again.leaves)) == list(map(id, first.leaves))
    )
    assert flatten(model) is again


def test_object_joining_flattened_model_is_seen() -> None:
    model, late = _model(), Node()
    sx.graphdef(model)
    model.late = late
    sx.graphdef(model)
    before = structure_epoch()
    late.w = sx.Param(1.0)
    assert structure_epoch() == before + 1
    assert ("late", "w") in sx.graphdef(model).leaf_paths


def test_edits_by_one_thread_reach_other_threads() -> None:
    model = Node()
    done = threading.Event()

    def edit() -> None:
        for number in range(200):
            setattr(model, f"p{number % 3}", number)
        done.set()

    def read() -> bool:
        while not done.is_set():
            try:
                sx.graphdef(model)
            except RuntimeError as error:  # the walk met the edit
                assert "changed size during iteration" in str(error)  # noqa: PT017
        return sx.graphdef(model) == sx.graphdef(sx.clone(model))

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        pool.submit(edit).result()
        assert all(reader.result() for reader in readers)
    assert (model.p0, model.p1, model.p2) == (198, 199, 197)


def test_epochs_advanced_by_many_threads_are_all_counted() -> None:
    before = structure_epoch()
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: [advance_structure_epoch() for _ in range(500)], range(4)):
            pass
    assert structure_epoch() == before + 2000


# --- memory ---


def _with_method() -> Node:
    model = _model()
    model.act = model.train
    return model


def _with_transforms() -> Node:
    model = _model()
    model.act, model.step = sx.vmap(model.train), sx.jit(model.train)
    return model


def _with_cycle() -> Node:
    model = _model()
    model.itself = (model, [model])
    return model


MODELS = [
    _model,
    _with_method,
    _with_transforms,
    _with_cycle,
    lambda: sx.Param(1.0),
    lambda: sx.List([1.0]),
]
USES: dict[str, Callable[[Any], Any]] = {
    "graphdef": sx.graphdef,
    "state": sx.state,
    "split": lambda m: sx.merge(*sx.split(m)),
    "leaves": jax.tree.leaves,
    "jax.jit": jax.jit(lambda m: jnp.ones(())),
    "sx.jit": sx.jit(lambda m: jnp.ones(())),
    "repr": repr,
    "duplicates": sx.find_duplicates,
}


@pytest.mark.usefixtures("collecting_only_what_is_new")
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_dropped_model_is_not_kept_alive(use: Callable[[Any], Any]) -> None:
    for make in MODELS:
        model = make()
        use(model)
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None, make


def test_variables_are_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        model = Node()
        model.w = sx.Param(jnp.ones(2))
        sx.state(model)
        alive = [weakref.ref(model), weakref.ref(model.w), weakref.ref(model.w.value)]
        del model
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()
