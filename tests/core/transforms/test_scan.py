# SPDX-License-Identifier: Apache-2.0
"""``sx.scan``: a loop in Python, as one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.advice import run_advice

Carry = sx.Carry


class Layer(sx.Module):
    """A layer with state of every kind: parameters, dropout, a counter."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(3, 3, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.calls = sx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.dropout(jnp.tanh(self.linear(x)))


def stacked(length: int = 4) -> Layer:
    """Layers stacked on a leading axis."""
    options: Any = {"axis_size": length, "metadata": {sx.partition.PARTITION_NAME: "layers"}}
    return sx.vmap(Layer, **options)(sx.Rngs(0))


class TestCarry:
    def test_array_is_carried_between_iterations(self) -> None:
        final, rows = sx.scan(lambda c, x: (c + x, c))(0.0, jnp.arange(4.0))
        assert float(final) == 6
        assert rows.tolist() == [0, 0, 1, 3]

    def test_carried_module_keeps_identity_and_last_writes(self) -> None:
        total = sx.Variable(jnp.float32(0))

        def add(total: Any, x: Any) -> Any:
            total += x
            return total, total.value

        same, rows = sx.scan(add)(total, jnp.arange(4.0))
        assert same is total
        assert (float(total), rows.tolist()) == (6, [0, 1, 3, 6])

    def test_any_argument_may_be_the_carry(self) -> None:
        def body(x: Any, scale: Any, c: Any) -> Any:
            return x * scale, c + x

        rows, final = sx.scan(body, in_axes=(0, None, Carry), out_axes=(0, Carry))(
            jnp.arange(3.0), 2.0, 10.0
        )
        assert (rows.tolist(), float(final)) == ([0, 2, 4], 13)

    def test_carry_alone_covers_argument_and_result(self) -> None:
        double = sx.scan(lambda c: c * 2, in_axes=Carry, out_axes=Carry, length=5)
        assert float(double(1.0)) == 32

    def test_scan_without_carry_stacks_all_results(self) -> None:
        rows = sx.scan(lambda x, y: {"sum": x + y}, in_axes=0, out_axes=0)(
            jnp.arange(3.0), jnp.ones(3)
        )
        assert rows["sum"].tolist() == [1, 2, 3]

    def test_tree_of_arrays_and_modules_is_carried(self) -> None:
        count = sx.Variable(jnp.zeros((), jnp.int32))

        def body(carry: Any, x: Any) -> Any:
            carry["count"] += 1
            return {"count": carry["count"], "sum": (carry["sum"][0] + x,)}, None

        final, rows = sx.scan(body)({"count": count, "sum": (0.0,)}, jnp.arange(4.0))
        assert final["count"] is count
        assert (int(count), float(final["sum"][0]), rows) == (4, 6, None)

    def test_unwritten_module_is_a_loop_constant(self) -> None:
        layer = sx.nn.Linear(3, 3, rngs=sx.Rngs(0))
        run = sx.scan(lambda m, x: (m, m(x)), in_axes=(Carry, 0))
        loop = next(
            equation
            for equation in jax.make_jaxpr(lambda xs: run(layer, xs)[1])(jnp.ones((5, 3))).eqns
            if equation.primitive.name == "scan"
        )
        assert [result.aval.shape for result in loop.outvars] == [(5, 3)]  # rows, and no carry


class TestEntries:
    def test_module_slices_are_visited_and_writes_stacked(self) -> None:
        layers = stacked()
        layers.eval()
        x = np.ones(3, np.float32)
        y = sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry)(layers, x)
        kernel, bias = np.asarray(layers.linear.kernel.value), np.asarray(layers.linear.bias.value)
        for i in range(4):
            x = np.tanh(x @ kernel[i] + bias[i])
        np.testing.assert_allclose(y, x, rtol=1e-5)
        assert layers.calls.value.tolist() == [1, 1, 1, 1]

    def test_state_axes_choose_by_filter(self) -> None:
        layers = stacked()
        layers.calls.value = jnp.int32(0)
        axes = sx.StateAxes({sx.BatchStat: Carry, ...: 0})
        sx.scan(lambda m, x: m(x), in_axes=(axes, Carry), out_axes=Carry)(layers, jnp.ones(3))
        assert int(layers.calls) == 4

    def test_state_of_axes_chooses_by_path(self) -> None:
        layers = stacked()
        axes = sx.State.from_flat(dict.fromkeys(sx.state(layers).flat(), 0))
        sx.scan(lambda m, x: m(x), in_axes=(axes, Carry), out_axes=Carry)(layers, jnp.ones(3))
        assert layers.calls.value.tolist() == [1, 1, 1, 1]

    def test_mapped_variable_may_be_written_in_another_form(self) -> None:
        variable = sx.Variable(jnp.arange(3.0))

        def body(variable: Any) -> Any:
            variable.value = jnp.stack([variable.value] * 2).astype(jnp.int32)
            return variable.value.sum()

        assert sx.scan(body, in_axes=0, out_axes=0)(variable).tolist() == [0, 2, 4]
        assert (variable.dtype, variable.value.tolist()) == (jnp.int32, [[0, 0], [1, 1], [2, 2]])

    def test_shared_variable_passes_writes_to_next_iteration(self) -> None:
        count = sx.Variable(jnp.zeros((), jnp.int32))

        def body(count: Any, x: Any) -> Any:
            count += 1
            return x * count

        rows = sx.scan(body, in_axes=(None, 0), out_axes=0)(count, jnp.ones(3))
        assert (rows.tolist(), int(count)) == ([1, 2, 3], 3)

    @pytest.mark.parametrize("axis", [0, 1, -1, -2])
    def test_slices_and_results_lie_along_any_axis(self, axis: int) -> None:
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        outs = (0, 1, -1)

        def body(w: Any, x: Any) -> Any:
            w[...] = w + x
            return w * 10

        @sx.jit  # one program for all
        def run(ws: Any, x: Any) -> Any:
            return [
                sx.scan(body, in_axes=axis, out_axes=out)(w, x)
                for w, out in zip(ws, outs, strict=True)
            ]

        ws = [sx.Variable(jnp.asarray(x)) for _ in outs]
        for w, rows, out in zip(ws, run(ws, x), outs, strict=True):
            np.testing.assert_array_equal(w.value, 2 * x)
            rows_first = np.moveaxis(20 * x, axis, 0)
            np.testing.assert_array_equal(rows, np.moveaxis(rows_first, 0, out))

    def test_keyword_arguments_have_axis_0(self) -> None:
        final, _ = sx.scan(lambda c, *, x: (c + x, None), in_axes=(Carry,))(0.0, x=jnp.arange(4.0))
        assert float(final) == 6

    def test_modules_made_in_the_body_come_back_stacked(self) -> None:
        def body(c: Any, x: Any) -> Any:
            return c, {"v": sx.Param(x * jnp.ones(2), axes=("embed",))}

        options: Any = {"metadata": {sx.partition.PARTITION_NAME: "time"}}
        _, rows = sx.scan(body, out_axes=(Carry, 1), **options)(0.0, jnp.arange(3.0))
        assert isinstance(rows["v"], sx.Param)
        assert rows["v"].value.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert rows["v"].axes == ("embed", "time")

    def test_shared_variable_has_one_entry(self) -> None:
        class Tied(sx.Module):
            def __init__(self) -> None:
                self.a = sx.Param(jnp.ones((3, 2)))
                self.b = self.a

        first, second = sx.PathContains("a"), ...
        axes = sx.StateAxes({first: 0, second: 0})
        run = sx.scan(lambda m: m.a * m.b, in_axes=(axes,), out_axes=0)
        assert run(Tied()).shape == (3, 2)
        tied = Tied()
        with pytest.raises(TransformError, match=r"\.m\.a: 0\n.*\.other: None"):
            sx.scan(lambda m, other: m.a * 1, in_axes=(0, None), out_axes=0)(tied, tied.a)


class TestOptions:
    def test_reverse_goes_from_the_last_to_the_first(self) -> None:
        final, rows = sx.scan(lambda c, x: (c * 2 + x, c), reverse=True)(0.0, jnp.arange(3.0))
        expected = jax.lax.scan(lambda c, x: (c * 2 + x, c), 0.0, jnp.arange(3.0), reverse=True)
        assert (float(final), rows.tolist()) == (float(expected[0]), expected[1].tolist())

    @pytest.mark.parametrize("unroll", [2, True])
    def test_unroll_changes_nothing(self, unroll: Any) -> None:
        layers, same = stacked(), stacked()
        once = sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry)
        several = sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry, unroll=unroll)
        np.testing.assert_allclose(once(layers, jnp.ones(3)), several(same, jnp.ones(3)), rtol=1e-6)

    def test_length_zero_runs_nothing(self) -> None:
        count = sx.Variable(jnp.zeros((), jnp.int32))

        def body(count: Any, x: Any) -> Any:
            count += 1
            return count, x * 2

        _, rows = sx.scan(body)(count, jnp.zeros((0, 3)))
        assert (int(count), rows.shape) == (0, (0, 3))

    def test_decorates_functions_and_methods(self) -> None:
        class Sum(sx.Module):
            def __init__(self) -> None:
                self.total = sx.Variable(jnp.float32(0))

            @sx.scan(in_axes=(None, 0), out_axes=0)
            def rows(self, x: Any) -> Any:
                self.total += x
                return self.total * 1

        model = Sum()
        assert model.rows(jnp.arange(4.0)).tolist() == [0, 1, 3, 6]
        assert float(model.total) == 6

    def test_callable_modules_and_methods_are_bodies(self) -> None:
        layer = Layer(sx.Rngs(0))
        layer.eval()
        run = sx.scan(layer, in_axes=Carry, out_axes=Carry, length=3)
        assert run(jnp.ones(3)).shape == (3,)
        assert int(layer.calls) == 3
        again = sx.scan(layer.__call__, in_axes=Carry, out_axes=Carry, length=2)
        assert again(jnp.ones(3)).shape == (3,)
        assert int(layer.calls) == 5


class TestTracing:
    def test_body_is_traced_once(self) -> None:
        traces = 0
        layers = stacked()

        def body(layer: Any, x: Any) -> Any:
            nonlocal traces
            traces += 1
            return layer(x)

        run = sx.scan(body, in_axes=(0, Carry), out_axes=Carry)
        run(layers, jnp.ones(3))
        assert traces == 1
        sx.jit(sx.grad(lambda layers, x: run(layers, x).sum()))(layers, jnp.ones(3))
        assert traces == 2

    def test_program_size_is_independent_of_length(self) -> None:
        run = sx.jit(sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry))
        texts = [run.lower(stacked(n), jnp.ones(3)).as_text() for n in (2, 64)]
        assert len(texts[0].splitlines()) == len(texts[1].splitlines())

    def test_gradients_are_those_of_the_unrolled_loop(self) -> None:
        layers = stacked()
        layers.eval()
        run = sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry)
        grads = sx.jit(sx.grad(lambda layers, x: run(layers, x).sum()))(layers, jnp.ones(3))

        def by_hand(kernel: Any, bias: Any) -> Any:
            x = jnp.ones(3)
            for i in range(4):
                x = jnp.tanh(x @ kernel[i] + bias[i])
            return x.sum()

        kernel, bias = jax.jit(jax.grad(by_hand, argnums=(0, 1)))(
            layers.linear.kernel.value, layers.linear.bias.value
        )
        np.testing.assert_allclose(grads["linear"]["kernel"], kernel, rtol=1e-5)
        np.testing.assert_allclose(grads["linear"]["bias"], bias, rtol=1e-5)

    def test_inside_jit_it_does_what_it_does_outside(self) -> None:
        one, other = stacked(), stacked()
        run = sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry)
        np.testing.assert_allclose(
            run(one, jnp.ones(3)), sx.jit(run)(other, jnp.ones(3)), rtol=1e-6
        )
        assert one.calls.value.tolist() == other.calls.value.tolist() == [1, 1, 1, 1]


class TestRandomStreams:
    def test_carried_stream_draws_as_a_python_loop(self) -> None:
        one, other = sx.Rngs(0), sx.Rngs(0)
        _, rows = sx.scan(lambda r, _: (r, jax.random.uniform(r())), length=3)(one, jnp.ones(3))
        assert rows.tolist() == [float(jax.random.uniform(other())) for _ in range(3)]
        assert int(one.default.count) == int(other.default.count) == 3

    def test_stream_all_iterations_share_also_goes_on(self) -> None:
        one, other = sx.Rngs(0), sx.Rngs(0)
        run = sx.scan(lambda r: jax.random.uniform(r()), in_axes=None, out_axes=0, length=3)
        assert run(one).tolist() == [float(jax.random.uniform(other())) for _ in range(3)]

    def test_stream_with_axis_is_split(self) -> None:
        one, other = sx.Rngs(0), sx.Rngs(0)
        run = sx.scan(lambda r: jax.random.uniform(r()), in_axes=0, out_axes=0, length=3)
        keys = other.fork(split=3)
        expected = [
            float(jax.random.uniform(jax.random.fold_in(keys.default.key.value[i], 0)))
            for i in range(3)
        ]
        np.testing.assert_allclose(run(one), expected)
        assert int(one.default.count) == int(other.default.count) == 1

    def test_stream_that_no_iteration_draws_from_stays(self) -> None:
        rngs = sx.Rngs(0)
        sx.scan(lambda r, x: x, in_axes=0, out_axes=0)(rngs, jnp.ones(3))
        assert int(rngs.default.count) == 0

    def test_dropout_differs_by_layer_and_call(self) -> None:
        layers = stacked()
        run = sx.scan(lambda m, x: m.dropout(x), in_axes=(0, None), out_axes=0)
        first, second = run(layers, jnp.ones(64)), run(layers, jnp.ones(64))
        masks = {tuple((row != 0).tolist()) for row in [*first, *second]}
        assert len(masks) == 8

    def test_new_key_in_split_stream_is_refused(self) -> None:
        def body(rngs: Any, x: Any) -> Any:
            rngs.default.key.value = jax.random.key(7)
            return x

        with pytest.raises(TransformError, match=r"\.rngs\.default\.key .* splits it"):
            sx.scan(body, in_axes=0, out_axes=0)(sx.Rngs(0), jnp.ones(3))


class TestSown:
    class Sower(sx.Module):
        """Sows what it is given."""

        def __init__(self) -> None:
            self.scale = sx.Param(jnp.float32(2))

        def __call__(self, x: Any) -> Any:
            self.sow("seen", x)
            return self.scale * x

    def test_scan_stacks_what_a_carried_module_sows(self) -> None:
        model = self.Sower()
        sx.scan(lambda m, x: (m, m(x)))(model, jnp.arange(3.0))
        assert [rows.tolist() for rows in model.seen.value] == [[0, 1, 2]]

    def test_sown_values_are_appended_to_existing_ones(self) -> None:
        model = self.Sower()
        run = sx.scan(lambda m, x: (m, m(x)))
        run(model, jnp.arange(3.0))
        run(model, jnp.arange(2.0))
        model(jnp.float32(9))
        assert [rows.tolist() for rows in model.seen.value] == [[0, 1, 2], [0, 1], 9]

    def test_scan_puts_what_stacked_layers_sow_along_their_axis(self) -> None:
        layers = sx.vmap(lambda _: self.Sower(), in_axes=0)(jnp.ones(4))
        sx.scan(lambda m, x: m(x), in_axes=(0, Carry), out_axes=Carry)(layers, jnp.float32(1))
        assert [rows.tolist() for rows in layers.seen.value] == [[1, 2, 4, 8]]


class TestClosures:
    def test_captured_variable_is_read(self) -> None:
        scale = sx.Param(jnp.float32(2))
        final, _ = sx.scan(lambda c, x: (c * scale, None))(1.0, jnp.ones(3))
        assert float(final) == 8

    def test_captured_write_is_read_by_next_iteration(self) -> None:
        seen = sx.Variable(jnp.float32(0))

        def body(c: Any, x: Any) -> Any:
            seen[...] = seen * 2 + x
            return c, seen.value

        _, rows = sx.scan(body)(0.0, jnp.ones(3))
        assert (rows.tolist(), float(seen)) == ([1, 3, 7], 7)
        _, rows = sx.jit(sx.scan(body))(0.0, jnp.ones(3))
        assert (rows.tolist(), float(seen)) == ([15, 31, 63], 63)

    def test_captured_module_cannot_be_stacked(self) -> None:
        layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
        with pytest.raises(TransformError, match="Linear that was not passed in"):
            sx.scan(lambda c, x: (c, layer))(0.0, jnp.ones(3))


class TestErrors:
    @pytest.mark.parametrize(
        "call",
        [
            lambda f, init, xs: sx.scan(f, init, xs),
            lambda f, init, xs: sx.scan(f, init=init, xs=xs),
            lambda f, init, xs: sx.scan(f, init, None, length=3),
            lambda f, init, xs: sx.scan(f, init, xs=xs, reverse=True),
        ],
    )
    def test_argument_order_of_jax_raises_with_fix(self, call: Any) -> None:
        with pytest.raises(TransformError, match=r"sx\.scan\(function\)\(init, xs\)"):
            call(lambda c, x: (c + x, x), 0.0, jnp.arange(3.0))
        carry, _ = sx.scan(lambda c, x: (c + x, x))(0.0, jnp.arange(3.0))
        assert carry == 3

    @pytest.mark.parametrize("length", ["x", 2.5, True, -1, None])
    def test_invalid_length_is_refused(self, length: Any) -> None:
        if length is not None:
            with pytest.raises(TransformError, match=r"length is .*such as length=8"):
                sx.scan(lambda c, x: (c, x), length=length)
            with pytest.raises(TransformError, match=r"axis_size is .*such as axis_size=8"):
                sx.vmap(lambda x: x, axis_size=length)
        with pytest.raises(TransformError, match=r"axis_size is JitTracer.*known before it runs"):
            jax.jit(lambda n: sx.vmap(lambda x: x, axis_size=n)(jnp.ones(3)))(3)
        assert sx.vmap(lambda x: x, axis_size=np.int64(3))(jnp.ones(3)).shape == (3,)  # pyright: ignore[reportArgumentType]

    def test_carry_appears_once_at_top_level(self) -> None:
        with pytest.raises(TransformError, match=r"in_axes of sx\.scan has sx\.Carry 2 times"):
            sx.scan(lambda a, b: a, in_axes=(Carry, Carry))
        with pytest.raises(
            TransformError, match=r"out_axes of sx\.scan has sx\.Carry, but in_axes"
        ):
            sx.scan(lambda a, b: a, in_axes=(0, 0))
        with pytest.raises(
            TransformError, match=r"in_axes of sx\.scan has sx\.Carry, but out_axes"
        ):
            sx.scan(lambda a, b: a, out_axes=(0, 0))
        with pytest.raises(TransformError, match=r"inside \(Carry, 0\)") as caught:
            sx.scan(lambda a, b: a, in_axes=((Carry, 0), 0))
        code = "sx.StateAxes({filter: sx.Carry, ...: None})"
        axes = run_advice(caught.value, code, {"sx": sx, "filter": sx.BatchStat})
        layer = Layer(sx.Rngs(0))
        sx.scan(lambda m, x: x, in_axes=(axes, 0), out_axes=0)(layer, jnp.ones((3, 2)))
        with pytest.raises(TransformError, match="has 2 \\(a, b\\)"):
            sx.scan(lambda a, b: a, in_axes=Carry, out_axes=Carry)(1.0, 2.0)

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            (0, None),
            {"a": sx.StateAxes({...: None})},
            sx.StateAxes({sx.Param: 0, ...: None}),
            sx.State({"kernel": None}),
        ],
    )
    def test_result_without_axis_is_refused(self, entry: Any) -> None:
        with pytest.raises(PrefixError, match=r"out_axes of sx\.scan gives None"):
            sx.scan(lambda a, b: a, out_axes=(Carry, entry))
        with pytest.raises(PrefixError, match=r"out_axes of sx\.scan gives None"):
            sx.scan(lambda b: b, in_axes=0, out_axes=entry)

    def test_result_must_match_out_axes(self) -> None:
        with pytest.raises(
            TransformError, match="carry at position 0, but it returned a tuple of 3"
        ):
            sx.scan(lambda c, x: (c, x, x))(0.0, jnp.ones(2))

    def test_carry_keeps_its_form(self) -> None:
        with pytest.raises(TransformError, match=r"\.c changes .* float32\[2\] to int32\[2\]"):
            sx.scan(lambda c, x: (c.astype(int), x))(jnp.ones(2), jnp.ones(2))
        with pytest.raises(
            TransformError, match=r"at \.c a dict with keys 'b' came back as a dict with keys 'a'"
        ):
            sx.scan(lambda c, x: ({"a": 1}, x))({"b": 1.0}, jnp.ones(2))
        state = sx.State({"layers": {0: {"b": 1.0}}})
        with pytest.raises(TransformError, match=r"at \.c\.layers\[0\] a State with keys 'b' came"):
            sx.scan(lambda c, x: (sx.State({"layers": {0: {"a": 1.0}}}), x))(state, jnp.ones(2))

    def test_changed_form_of_variable_raises_with_path(self) -> None:
        layer = Layer(sx.Rngs(0))
        before = sx.state(layer).flat()

        def body(layer: Any, x: Any) -> Any:
            layer.calls.value = jnp.float32(1.5)
            return layer, x

        with pytest.raises(
            TransformError, match=r"BatchStat at \.layer\.calls .*int32\[\] to float32"
        ):
            sx.scan(body)(layer, jnp.ones(2))
        after = sx.state(layer).flat()
        assert all(before[path] is after[path] for path in before)

    def test_carried_module_comes_back_itself(self) -> None:
        layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
        with pytest.raises(TransformError, match=r"at \.m, .* came back as another Lin") as caught:
            sx.scan(lambda m, x: (sx.clone(m), x))(layer, jnp.ones(2))

        def body(model: Any, x: Any) -> Any:
            names = {"sx": sx, "model": model, "new": {"bias": model.bias + x}}
            run_advice(caught.value, "sx.update(model, new)", names)
            return model, x

        sx.scan(body)(layer, jnp.ones(2))
        assert layer.bias.value.tolist() == [2.0, 2.0]

    def test_structure_does_not_change_between_iterations(self) -> None:
        def replace(m: Any, x: Any) -> Any:
            m.mode = "fast"
            return m, x

        layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
        with pytest.raises(TransformError, match=r"structure of the Linear at \.m: \.mode is new"):
            sx.scan(replace)(layer, jnp.ones(2))
        assert not hasattr(layer, "mode")

        def remove(m: Any, x: Any) -> Any:
            del m.bias
            return m, x

        with pytest.raises(TransformError, match=r"\.bias is removed"):
            sx.scan(remove)(layer, jnp.ones(2))

    def test_sizes_must_agree_and_be_known(self) -> None:
        with pytest.raises(TransformError, match=r"\.x: 2\n  \.y: 3"):
            sx.scan(lambda x, y: x, in_axes=0, out_axes=0)(jnp.ones(2), jnp.ones(3))
        with pytest.raises(TransformError, match=r"Give length="):
            sx.scan(lambda c: c, in_axes=Carry, out_axes=Carry)(1.0)
        with pytest.raises(TransformError, match=r"axis 1 of the array at \.w, .* shape \(2,\)"):
            sx.scan(lambda w: w, in_axes=1, out_axes=0)(jnp.ones(2))

    def test_exception_in_body_changes_nothing(self) -> None:
        count = sx.Variable(jnp.zeros((), jnp.int32))

        def body(count: Any, x: Any) -> Any:
            count += 1
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            sx.scan(body)(count, jnp.ones(2))
        assert int(count) == 0

    def test_carry_keeps_its_explicit_sharding(self) -> None:
        spec, kinds = jax.sharding.PartitionSpec("data"), (jax.sharding.AxisType.Explicit,)
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=kinds)
        total = sx.Variable(jnp.zeros(4))

        def body(total: Any, x: Any) -> Any:
            total[...] = jax.sharding.reshard(total.value, spec) + x
            return total, None

        with (
            jax.set_mesh(mesh),
            pytest.raises(
                TransformError, match=r"\.total .* to float32\[4\] sharded as P\('data',?\)"
            ),
        ):
            sx.scan(body)(total, jnp.ones(3))


def test_result_carries_no_part_of_a_module() -> None:
    out_axes = (Carry, sx.StateAxes({...: Carry}))
    with pytest.raises(TransformError) as caught:
        sx.scan(lambda c, x: (c, x), in_axes=(Carry, 0), out_axes=out_axes)
    assert str(caught.value) == (
        "out_axes of sx.scan has sx.Carry in a filter mapping. Variables are carried where their "
        "Module comes in; out_axes says how new ones are stacked."
    )
