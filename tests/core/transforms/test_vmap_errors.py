# SPDX-License-Identifier: Apache-2.0
"""What ``vmap`` refuses: writes without a meaning, axes that do not fit, two axes for one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import (
    ForeignMutationError,
    ModuleError,
    PrefixError,
    TraceLeakError,
    TransformError,
)
from tests.advice import run_advice
from tests.core.transforms.examples import (
    SHARED,
    XS,
    Box,
    Scale,
    Sower,
    Tied,
    lanes,
    shapes,
    values,
)
from tests.strategies import assert_same_model

# --- closures ---


def test_captured_model_can_be_read() -> None:
    model = Scale()
    assert sx.vmap(lambda x: model.factor * x)(XS).tolist() == XS.tolist()
    compiled = sx.jit(lambda x: sx.vmap(lambda x: model.factor * x)(x))
    assert compiled(XS).tolist() == XS.tolist()
    model.factor[...] = jnp.full(2, 2.0)
    assert compiled(XS).tolist() == (2 * XS).tolist()


_WAYS_TO_WRITE = {
    "directly": lambda m, x: m(x),
    "at an index": lambda m, x: m.factor.__setitem__(0, 1.0),
    "by update": lambda m, x: sx.update(m, sx.state(m)),
    "its metadata": lambda m, x: m.factor.set_metadata(tag="a"),
    "in jit": lambda m, x: sx.jit(lambda x: m(x))(x),
    "in jit, passed on": lambda m, x: sx.jit(lambda m, x: m(x))(m, x),
    "in grad": lambda m, x: sx.grad(lambda x: m(x).sum())(x),
    "in grad, passed on": lambda m, x: sx.grad(lambda m: m(x).sum())(m),
    "in vmap, passed on": lambda m, x: sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None]),
    "its metadata in jit": lambda m, x: sx.jit(lambda m: m.factor.set_metadata(tag="a"))(m),
    "in jit around": sx.jit(lambda m, x: sx.vmap(lambda x: m(x))(x[None])),
}


@pytest.mark.parametrize("way", _WAYS_TO_WRITE)
def test_captured_model_cannot_be_written(way: str) -> None:
    model = Scale()
    before = sx.clone(model)
    pattern = r"sx\.vmap: the \w+ m(odel)?\.(calls|factor) was not passed in, .* in_axes"
    with pytest.raises(ForeignMutationError, match=pattern):
        sx.vmap(lambda x: _WAYS_TO_WRITE[way](model, x))(XS)
    assert_same_model(model, before)


def test_structure_of_captured_model_cannot_change() -> None:
    model = Scale()
    pattern = r"structure of .* inside sx\.vmap: .* changes are carried back\.(\n|$)"
    with pytest.raises(ForeignMutationError, match=pattern):
        sx.vmap(lambda x: setattr(model, "new", sx.Param(x)))(XS)
    assert not hasattr(model, "new")


def test_captured_model_cannot_be_returned() -> None:
    model = Scale()
    with pytest.raises(TransformError, match=r"returned .* a Scale that was not passed in"):
        sx.vmap(lambda x: model)(XS)


def test_write_under_plain_jax_transform_raises() -> None:
    run = sx.vmap(lambda m, x: m(x), in_axes=(None, 0))
    with pytest.raises(ModuleError, match=r"Variable at \.m\.calls"):
        jax.jit(run)(Scale(), XS)


def test_traced_value_does_not_leak_through_jax_vmap() -> None:
    model = lanes()
    with pytest.raises(TraceLeakError, match=r"Param at \.m\.factor"):
        jax.jit(lambda x: sx.vmap(lambda m, x: m.factor.__setitem__(..., x))(model, x))(XS)
    assert values(model)[("factor",)] == [[1, 1], [2, 2], [3, 3]]


# --- sharing ---


def test_equivalent_axes_of_shared_variable_are_accepted() -> None:
    model = Tied()
    model.embed.value = jnp.arange(3.0)

    def bump(a: Tied, b: Tied) -> Any:
        a.embed += 1
        return b.head[...]

    axes = (sx.StateAxes({sx.Param: 0}), sx.StateAxes({"none": 5, ...: 0}))
    assert sx.vmap(bump, in_axes=axes)(model, model).tolist() == [1.0, 2.0, 3.0]
    assert model.embed.tolist() == [1.0, 2.0, 3.0]


def test_two_axes_for_one_variable_name_both_paths() -> None:
    model = Tied()
    model.embed.value = jnp.arange(3.0)
    with pytest.raises(TransformError) as caught:
        sx.vmap(lambda a, b: None, in_axes=(0, None))(model, {"b": model})
    assert "different in_axes" in str(caught.value)
    assert "\n  .a.embed: 0\n  .b.b.embed: None\n" in str(caught.value)


def test_argument_that_is_returned_has_one_axis() -> None:
    model = lanes()
    with pytest.raises(TransformError) as caught:
        sx.vmap(lambda m: (m, 0), out_axes=1)(model)
    assert "different in_axes and out_axes" in str(caught.value)
    assert "\n  .m.factor: 0\n  .result[0].factor: 1\n" in str(caught.value)


def test_new_variable_returned_twice_has_one_axis() -> None:
    def twice(x: Any) -> Any:
        new = sx.Param(x)
        return new, new

    with pytest.raises(TransformError, match=r"\.result\[0\]: 0\n  \.result\[1\]: 1"):
        sx.vmap(twice, out_axes=(0, 1))(XS)


# --- what is refused ---


def _write_factor(m: Scale, x: Any) -> Any:
    m.calls += 1
    m.factor[...] = x


@pytest.mark.parametrize("axes", [None, SHARED, sx.StateAxes({sx.Param: None, ...: None})])
def test_batch_elements_cannot_write_differing_values_to_variable(axes: Any) -> None:
    model = Scale()
    with pytest.raises(TransformError, match=r"Param at \.m\.factor .*StateAxes\(\{sx\.Param: 0"):
        sx.vmap(_write_factor, in_axes=(axes, 0))(model, XS)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_value_computed_from_mapped_ones_counts_as_differing() -> None:
    variable = sx.Variable(jnp.float32(0))

    def write(variable: sx.Variable[Any], x: Any) -> None:
        variable.value = 0 * x

    with pytest.raises(TransformError, match=r"at \.variable is shared .* differs"):
        sx.vmap(write, in_axes=(None, 0))(variable, jnp.arange(3.0))


def _replace_factor_by_a_number(m: Scale) -> None:
    m.factor.value = jnp.float32(1)


class Own(sx.Variable[Any]):
    """A type of the user's own."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: Own(jnp.ones(2)), r"The Own at \.m\.x .*StateAxes\(\{Own: 0, \.\.\.: None"),
        (lambda: jnp.ones(2), r"The array at \.m\.x .*StateAxes\(\{sx\.PathContains\('x'\): 0"),
    ],
)
def test_error_suggests_state_axes(value: Any, message: str) -> None:
    model = Box()
    model.x = value()
    write = sx.vmap(lambda m, x: setattr(m.x, "value", x), in_axes=(None, 0))
    if not isinstance(model.x, sx.Variable):
        write = sx.vmap(lambda m, x: setattr(m, "x", x), in_axes=(None, 0))
    with pytest.raises(TransformError, match=message):
        write(model, XS)


def test_batch_elements_cannot_write_differing_values_to_self() -> None:
    model = Scale()
    with pytest.raises(TransformError, match=r"at \.factor of what sx\.vmap was bo") as caught:
        sx.vmap(model.grow)(XS)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}

    class Sum(sx.Module):
        def __init__(self) -> None:
            self.total = sx.Variable(jnp.zeros(len(XS)))

        def __call__(self, x: Any) -> None:
            self.total += x.sum()

    names = {"sx": sx, "module": Sum(), "x": XS}
    run_advice(caught.value, "sx.vmap(lambda module, x: module(x))(module, x)", names)
    assert names["module"].total.value.tolist() == jnp.sum(XS, 1).tolist()


def test_unmapped_result_cannot_differ_between_batch_elements() -> None:
    with pytest.raises(TransformError, match=r"None for \.result\.new, .* differs"):
        sx.vmap(lambda x: {"new": sx.Param(x)}, out_axes=None)(XS)
    with pytest.raises(TransformError, match=r"None for \.result\[1\], .* differs"):
        sx.vmap(lambda x: (x, x.sum()), out_axes=(0, None))(XS)
    same = sx.vmap(lambda x: (x, jnp.ones(2)), out_axes=(0, None))(XS)[1]
    assert same.shape == (2,)


def test_result_is_made_of_arrays_and_objects() -> None:
    with pytest.raises(TransformError, match=r"sx\.vmap returned 's' of type str at \['a'\]"):
        sx.vmap(lambda x: {"a": "s"})(XS)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m: sx.vmap(lambda m, x: 0)(m, jnp.ones((2, 4, 2))), r"\.m\.factor: 3\n  \.x: 2"),
        (lambda m: sx.vmap(lambda m: 0, axis_size=2)(m), r"  axis_size: 2\n  \.m\.factor: 3"),
        (lambda m: sx.vmap(lambda m: 0, in_axes=2)(m), r"axis 2 .* \.m\.factor, .* shape \(3, 2\)"),
        (lambda m: sx.vmap(lambda m, x: 0)(m, 1.0), r"axis 0 of the array at \.x, .* shape \(\)"),
        (lambda m: sx.vmap(lambda m, x: 0)(m, "a"), r"at \.x, but 'a' is a str"),
        (lambda m: sx.vmap(lambda m: 0, in_axes=None)(m), r"no argument has an axis"),
        (lambda m: sx.vmap(lambda: 0)(), r"no argument has an axis .* axis_size=\.\.\."),
        (lambda m: sx.vmap(lambda m: m.calls[...], out_axes=1)(m), r"puts \.result together"),
        (
            lambda m: sx.vmap(lambda m: (0, sx.Param(1.0)), out_axes=(0, -2))(m),
            r"result\[1\] .* axis -2",
        ),
        (
            lambda m: sx.vmap(
                _replace_factor_by_a_number, in_axes=(sx.StateAxes({sx.Param: 1, ...: None}),)
            )(m),
            r"puts \.m\.factor together along axis 1, .* from -1 to 0",
        ),
    ],
)
def test_unfitting_axes_and_sizes_name_the_array(run: Any, message: str) -> None:
    model = lanes()
    with pytest.raises(TransformError, match=message):
        run(model)
    assert_same_model(model, lanes())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_axes": "0"}, r"in_axes gives '0'; an entry is an axis \(an int\) or None"),
        ({"out_axes": (0, True)}, r"out_axes gives True"),
        ({"in_axes": (sx.Carry, 0)}, r"in_axes gives Carry \(sx\.Carry is for sx\.scan\)"),
        ({"in_axes": sx.StateSharding({...: 0})}, r"in_axes .* a StateSharding; use StateAxes"),
        ({"metadata": "layers"}, r"metadata of sx\.vmap is 'layers'; it is a mapping"),
    ],
)
def test_options_are_checked_before_anything_is_called(options: Any, message: str) -> None:
    with pytest.raises(PrefixError, match=message):
        sx.vmap(lambda m: m, **options)


def test_added_values_need_an_axis() -> None:
    model = Sower(jnp.ones(()))
    with pytest.raises(
        PrefixError, match=r"in_axes for the argument at \.m: .* Intermediate .*seen"
    ):
        sx.vmap(lambda m, x: m(x), in_axes=(sx.StateAxes({sx.Param: None}), 0))(model, XS)
    assert shapes(model) == {("weight",): ()}


def test_exception_leaves_everything_as_it_was() -> None:
    model, rngs = lanes(), sx.Rngs(0)
    before = sx.clone((model, rngs))

    def fail(m: Scale, rngs: sx.Rngs, x: Any) -> Any:
        m(x)
        m.new = sx.Param(rngs.noise())
        del m.factor
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        sx.vmap(fail)(model, rngs, XS)
    assert_same_model(sx.List([model, rngs]), sx.List(list(before)))
    assert sx.vmap(lambda m, x: m(x))(model, XS).shape == (3, 2)
