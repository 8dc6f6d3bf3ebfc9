# SPDX-License-Identifier: Apache-2.0
"""Tracked containers compare and behave like list and dict, and box the arrays they hold."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import StaticAttributeError
from tests.structure import advance_structure_epoch, structure_epoch

# --- a random sequence of operations does the same to a List and a list ---

ITEM = st.one_of(st.integers(-3, 3), st.booleans(), st.sampled_from(["a", 1.5, None, (1, 2)]))
INDEX = st.integers(-4, 4)
SLICE = st.builds(slice, st.none() | INDEX, st.none() | INDEX, st.sampled_from([None, 1, 2, -1]))
ITEMS = st.lists(ITEM, max_size=4)


def _operation(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.tuples(*arguments))


LIST_OPERATIONS = st.lists(
    st.one_of(
        _operation("append", ITEM),
        _operation("extend", ITEMS),
        _operation("extend", ITEMS.map(tuple)),
        _operation("insert", INDEX, ITEM),
        _operation("pop"),
        _operation("pop", INDEX),
        _operation("remove", ITEM),
        _operation("index", ITEM),
        _operation("index", ITEM, INDEX, INDEX),
        _operation("count", ITEM),
        _operation("reverse"),
        _operation("sort"),
        _operation("clear"),
        _operation("copy"),
        _operation("__getitem__", INDEX | SLICE),
        _operation("__delitem__", INDEX | SLICE),
        _operation("__setitem__", INDEX, ITEM),
        _operation("__setitem__", SLICE, ITEMS),
        _operation("__contains__", ITEM),
        _operation("__len__"),
        _operation("__add__", ITEMS),
        _operation("__mul__", st.integers(-1, 2)),
        _operation("__rmul__", st.integers(-1, 2)),
        _operation("__iadd__", ITEMS),
        _operation("__imul__", st.integers(-1, 2)),
        _operation("__eq__", ITEMS),
        _operation("__ne__", ITEMS),
    ),
    max_size=8,
)

KEY = st.sampled_from(["a", "b", 0, 1, True, (1, "x"), None])
ENTRIES = st.dictionaries(KEY, ITEM, max_size=3)
DICT_OPERATIONS = st.lists(
    st.one_of(
        _operation("__getitem__", KEY),
        _operation("__setitem__", KEY, ITEM),
        _operation("__delitem__", KEY),
        _operation("__contains__", KEY),
        _operation("__len__"),
        _operation("__or__", ENTRIES),
        _operation("__ror__", ENTRIES),
        _operation("__ior__", ENTRIES),
        _operation("__eq__", ENTRIES),
        _operation("get", KEY),
        _operation("get", KEY, ITEM),
        _operation("pop", KEY),
        _operation("pop", KEY, ITEM),
        _operation("popitem"),
        _operation("setdefault", KEY, ITEM),
        _operation("update", ENTRIES),
        _operation("update", ENTRIES.map(lambda entries: list(entries.items()))),
        _operation("clear"),
        _operation("copy"),
    ),
    max_size=8,
)


def _outcome(target: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    """Returns what an operation did: its result, or the type of its error; itself as "self"."""
    try:
        result = getattr(target, name)(*arguments)
    except Exception as error:  # noqa: BLE001 (whatever Python's own container raises)
        return type(error)
    return "self" if result is target else (type(result), result)


@given(start=ITEMS, operations=LIST_OPERATIONS)
def test_list_does_what_a_plain_list_does(start: list[Any], operations: list[Any]) -> None:
    plain, tracked = list(start), sx.List(start)
    for name, arguments in operations:
        before = list(plain)
        outcome = _outcome(plain, name, arguments)
        assert _outcome(tracked, name, arguments) == outcome, name
        if name == "sort" and outcome is TypeError:
            plain[:] = before  # a plain list is left half sorted; a List as it was
        assert [(type(item), item) for item in tracked] == [(type(item), item) for item in plain]
        assert list(reversed(tracked)) == list(reversed(plain))
        assert (tracked == plain, plain == tracked, tracked != plain) == (True, True, False)


@given(start=ENTRIES, operations=DICT_OPERATIONS)
def test_dict_does_what_a_plain_dict_does(start: dict[Any, Any], operations: list[Any]) -> None:
    plain, tracked = dict(start), sx.Dict(start)
    for name, arguments in operations:
        assert _outcome(tracked, name, arguments) == _outcome(plain, name, arguments), name
        assert list(tracked.items()) == list(plain.items())
        assert (tracked.keys(), list(tracked.values())) == (plain.keys(), list(plain.values()))
        assert list(reversed(tracked)) == list(reversed(plain))
        assert (tracked == plain, plain == tracked, tracked != plain) == (True, True, False)
        assert {**tracked} == dict(tracked) == plain


@given(start=ITEMS, operations=LIST_OPERATIONS)
def test_cached_structure_follows_every_list_operation(
    start: list[Any], operations: list[Any]
) -> None:
    tracked = sx.List(start)
    for name, arguments in operations:
        sx.graphdef(tracked)
        _outcome(tracked, name, arguments)
        assert sx.graphdef(tracked) == sx.graphdef(sx.List(list(tracked)))


@given(start=ENTRIES, operations=DICT_OPERATIONS)
def test_cached_structure_follows_every_dict_operation(
    start: dict[Any, Any], operations: list[Any]
) -> None:
    tracked = sx.Dict(start)
    for name, arguments in operations:
        sx.graphdef(tracked)
        _outcome(tracked, name, arguments)
        remembered = sx.graphdef(tracked)
        advance_structure_epoch()
        assert remembered == sx.graphdef(tracked)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_lists_are_ordered_as_plain_lists(compare: Callable[[Any, Any], bool]) -> None:
    for one in ([], [1], [1, 2], [2]):
        for other in ([], [1], [1, 2], [2]):
            expected = compare(one, other)
            assert compare(sx.List(one), sx.List(other)) is expected
            assert compare(sx.List(one), other) is expected
            assert compare(one, sx.List(other)) is expected
    with pytest.raises(TypeError):
        compare(sx.List([1]), (1,))


def test_containers_compare_to_other_types_like_builtin_ones() -> None:
    assert sx.List([1]) != (1,)
    assert sx.Dict(a=1) != [("a", 1)]
    assert operator.add([0], sx.List([1])) == [0, 1]


@pytest.mark.parametrize("container", [sx.List([1]), sx.Dict(a=1)], ids=["List", "Dict"])
def test_containers_are_unhashable_as_plain_ones_are(container: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(container)


def test_dict_accepts_every_builtin_constructor_form() -> None:
    assert sx.Dict() == {}
    assert sx.Dict({"a": 1}, b=2) == sx.Dict([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    assert sx.Dict.fromkeys("ab", 0) == {"a": 0, "b": 0}


# --- what is particular to models ---


def test_failing_sort_comparison_leaves_list_unchanged() -> None:
    words = sx.List(["bb", "a", "ccc"])
    words.sort(key=len, reverse=True)
    assert words == ["ccc", "bb", "a"]
    mixed = sx.List([3, 1, "x", 2])
    with pytest.raises(TypeError):
        mixed.sort()
    assert mixed == [3, 1, "x", 2]


def test_extend_adds_all_items_or_none() -> None:
    items = sx.List([1])
    with pytest.raises(StaticAttributeError, match="item 2 of a list"):
        items.extend([2, {3}])
    assert items == [1]


def test_nested_plain_containers_become_tracked_copies() -> None:
    original: dict[str, Any] = {"layers": [1]}
    tracked = sx.Dict(original)
    assert isinstance(tracked["layers"], sx.List)
    original["layers"].append(2)
    original["more"] = 3
    assert tracked == {"layers": [1]}


def test_setdefault_returns_the_tracked_container() -> None:
    groups = sx.Dict()
    groups.setdefault("a", []).append(1)
    assert groups == {"a": [1]}


def test_arrays_are_held_in_hidden_variables() -> None:
    items = sx.List([np.ones(2, np.float32), jnp.zeros(3)])
    assert [type(v).__name__ for _, v in sx.iter_variables(items)] == ["ArrayAttribute"] * 2
    assert all(isinstance(item, jax.Array) for item in items)
    assert [item.tolist() for item in items] == [[1.0, 1.0], [0.0, 0.0, 0.0]]


def test_array_over_array_is_a_value_write() -> None:
    items, entries = sx.List([jnp.zeros(2)]), sx.Dict(a=jnp.zeros(2))
    hidden = [v for _, v in sx.iter_variables([items, entries])]
    before = structure_epoch()
    items[0] = jnp.ones(3)
    entries["a"] = np.ones(3)
    assert structure_epoch() == before
    assert [v for _, v in sx.iter_variables([items, entries])] == hidden
    assert [v.value.tolist() for v in hidden] == [[1.0] * 3] * 2


def test_array_over_variable_is_refused_with_working_code() -> None:
    items, entries = sx.List([sx.Param(1.0)]), sx.Dict(a=sx.BatchStat(1.0))
    with pytest.raises(
        StaticAttributeError, match=r"Param in item 0 of a list.*sx\.Param\(array\)"
    ):
        items[0] = jnp.ones(())
    with pytest.raises(StaticAttributeError, match=r"BatchStat in entry 'a' of a dict"):
        entries["a"] = jnp.ones(())
    replacement = items[0] = sx.Param(2.0)
    assert items[0] is replacement


def test_reverse_moves_variables_instead_of_values() -> None:
    param = sx.Param(1.0)
    items = sx.List([param, jnp.ones(2), 3])
    items.reverse()
    assert items[0] == 3 and items[1].tolist() == [1.0, 1.0] and items[2] is param


@pytest.mark.parametrize(
    ("assign", "where"),
    [
        (lambda: sx.List([{1}]), "item 0 of a list"),
        (lambda: sx.Dict(a={1}), "entry 'a' of a dict"),
        (lambda: sx.List([]).append(bytearray()), "item 0 of a list"),
        (lambda: sx.Dict().update(b=bytearray()), "entry 'b' of a dict"),
        (lambda: sx.Dict({sx.Param(1.0): 1}), "key of a dict"),
        (lambda: sx.Dict().__setitem__((sx.Param(1.0),), 1), "key of a dict"),
    ],
    ids=["list", "dict", "append", "update", "key", "key in a tuple"],
)
def test_unhashable_configuration_is_refused_where_it_is_put(
    assign: Callable[[], Any], where: str
) -> None:
    with pytest.raises(StaticAttributeError, match=where):
        assign()


def test_shallow_copy_shares_objects_but_not_places() -> None:
    param = sx.Param(1.0)
    for original in (sx.List([param, jnp.zeros(2)]), sx.Dict({0: param, 1: jnp.zeros(2)})):
        copied = copy.copy(original)
        assert type(copied) is type(original) and copied[0] is param
        copied[1] = jnp.ones(2)
        copied.pop(0)
        assert original[0] is param and original[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("container", [sx.List(), sx.Dict(), sx.List([1, [2]]), sx.Dict(a={})])
def test_containers_survive_pickle_and_deepcopy(container: Any) -> None:
    for copied in (pickle.loads(pickle.dumps(container)), copy.deepcopy(container)):
        assert type(copied) is type(container) and copied == container


def test_container_in_itself_prints() -> None:
    items, entries = sx.List([1]), sx.Dict(a=1)
    items.append(items)
    entries["self"] = entries
    assert repr(items) == "List([1, List([...])])"
    assert repr(entries) == "Dict({'a': 1, 'self': Dict({...})})"


def test_container_is_one_pytree_node() -> None:
    shared = sx.Param(2.0)
    model = sx.Dict(a=[shared, jnp.ones(2)], b=shared, c="static")
    leaves, treedef = jax.tree.flatten(model)
    assert [leaf.tolist() for leaf in leaves] == [2.0, [1.0, 1.0]]
    doubled = jax.tree.unflatten(treedef, [2 * leaf for leaf in leaves])
    assert isinstance(doubled, sx.Dict) and doubled["a"][0] is doubled["b"]
    assert doubled["c"] == "static" and float(doubled["b"]) == 4.0
