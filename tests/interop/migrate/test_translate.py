# SPDX-License-Identifier: Apache-2.0
"""Programs of Flax NNX, and what they become."""

from __future__ import annotations

import textwrap

import libcst
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.migrate.translation import (
    GUARD,
    NAMES,
    Project,
    Translation,
    UnreadableError,
    translate,
)

# What is before and after an expression of the cases below.
BEFORE = "import functools\nimport jax\nfrom flax import nnx\n\n"
AFTER = "import functools\nimport jax\nimport shardax as sx\n\n"
REST = "to write by hand; to list them: shardax migrate FILE"
ONLY_JAX = "import functools\nimport jax\n\n"

SAME = [
    # Names.
    ("class Net(nnx.Module):\n    pass", "class Net(sx.Module):\n    pass"),
    ("def f(rngs: nnx.Rngs) -> nnx.State: ...", "def f(rngs: sx.Rngs) -> sx.State: ..."),
    ("def f(g: nnx.GraphDef[Net]): ...", "def f(g: sx.GraphDef): ..."),
    ("y = nnx.relu(x) + nnx.tanh(x)", "y = jax.nn.relu(x) + jax.numpy.tanh(x)"),
    ("i = nnx.initializers.zeros_init()", "i = jax.nn.initializers.zeros"),
    ("i = nnx.initializers.normal(0.1)", "i = jax.nn.initializers.normal(0.1)"),
    ("l = nnx.List([nnx.data(x)])", "l = sx.List([x])"),
    ("n = nnx.metrics.Average('loss')", "n = sx.train.metrics.Average('loss')"),
    # Arguments: renamed, left out, with a keyword, reordered, written out.
    ("n = nnx.LayerNorm(num_features=4, rngs=r)", "n = sx.nn.LayerNorm(features=4, rngs=r)"),
    ("n = nnx.LayerNorm(4, use_fast_variance=False)", "n = sx.nn.LayerNorm(4)"),
    (
        "c = nnx.Conv(3, 8, (3, 3), 2, feature_group_count=1, rngs=r)",
        "c = sx.nn.Conv(3, 8, (3, 3), strides=2, groups=1, rngs=r)",
    ),
    ("y = nnx.max_pool(x, (2, 2), None)", "y = sx.nn.max_pool(x, (2, 2), strides=1)"),
    (
        "f = functools.partial(nnx.max_pool, inputs=x, window_shape=2, strides=None)",
        "f = functools.partial(sx.nn.max_pool, x=x, window=2, strides=1)",
    ),
    ("y = nnx.max_pool(x, (2, 2))", "y = sx.nn.max_pool(x, (2, 2), strides=1)"),
    (
        "y = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))",
        "y = sx.nn.avg_pool(x, window=(2, 2), strides=(2, 2))",
    ),
    ("l = nnx.LinearGeneral(4, (2, 3), rngs=r)", "l = sx.nn.Linear(4, (2, 3), rngs=r)"),
    (
        "l = nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=r)",
        "l = sx.nn.Linear((2, 3), 4, rngs=r)",
    ),
    (
        "e = nnx.Einsum('ab,bc->ac', (2, 3), rngs=r)",
        (
            "e = sx.nn.Einsum('ab,bc->ac', (2, 3), rngs=r, "
            "kernel_init=jax.nn.initializers.lecun_normal())"
        ),
    ),
    (
        "c = nnx.ConvTranspose(3, 8, (3, 3), mask=m, padding='CIRCULAR', rngs=r)",
        "c = sx.nn.ConvTranspose(3, 8, (3, 3), mask=m, padding='CIRCULAR', rngs=r)",
    ),
    # Transforms and states.
    ("f = nnx.checkify(g, errors)", "f = sx.checkify(g, errors=errors)"),
    ("h = nnx.map(f, model)", "h = sx.map(f, model)"),
    ("d = nnx.map(f, m).out.bias[...].dtype.name", "d = sx.map(f, m).out.bias[...].dtype.name"),
    (
        "a = nnx.prefix(model, {nnx.Param: 0, ...: None})",
        "a = sx.prefix(model, {sx.Param: 0, ...: None})",
    ),
    ("@nnx.with_rngs(split=3)\ndef f(m): ...", "@sx.with_rngs(split=3)\ndef f(m): ..."),
    ("with nnx.fork_rngs(model): y = f(x)", "with sx.fork_rngs(model): y = f(x)"),
    ("@nnx.fork_rngs(split=3)\ndef f(m): ...", "@sx.fork_rngs(split=3)\ndef f(m): ..."),
    ("@nnx.jit\ndef f(m): ...", "@sx.jit\ndef f(m): ..."),
    ("f = nnx.jit(g, donate_argnums=0, graph=True)", "f = sx.jit(g, donate_argnums=0)"),
    (
        "f = nnx.vmap(g, transform_metadata={nnx.PARTITION_NAME: 'l'})",
        "f = sx.vmap(g, metadata={sx.partition.PARTITION_NAME: 'l'})",
    ),
    (
        "@nnx.split_rngs(splits=5)\n@nnx.vmap\ndef make(rngs): ...",
        "@sx.vmap(axis_size=5)\ndef make(rngs): ...",
    ),
    (
        "@nnx.split_rngs(splits=5)\n@nnx.vmap(axis_size=5)\ndef make(rngs): ...",
        "@sx.vmap(axis_size=5)\ndef make(rngs): ...",
    ),
    ("f = nnx.cached_partial(g, model)", "f = functools.partial(g, model)"),
    ("a, b = nnx.split_state(typing, x, ...)", "a, b = typing.split(x, ...)"),
    ("y = nnx.data(a or b) * nnx.data([x])", "y = (a or b) * [x]"),
    ("def f(v: nnx.Param): v.set_value(x := 3)", "def f(v: sx.Param): v.value = (x := 3)"),
    (
        "def f(v: nnx.Param): v.set_value(a if b else c)",
        "def f(v: sx.Param): v.value = a if b else c",
    ),
    ("d = nnx.to_pure_dict(s := t)", "d = (s := t).to_pure_dict()"),
    ("nnx.update(model, values)", "sx.update(model, values)"),
    ("d = nnx.to_pure_dict(state)", "d = state.to_pure_dict()"),
    ("s = nnx.merge_state(a or b, c)", "s = (a or b).merge(c)"),
    ("a, b = nnx.split_state(s, nnx.Param, ...)", "a, b = s.split(sx.Param, ...)"),
    # Methods of what is known: annotated, made in the file, self, an attribute of these.
    (
        "class N(nnx.Module):\n    def f(self): self.sow(nnx.Intermediate, 'h', x)",
        "class N(sx.Module):\n    def f(self): self.sow('h', x, type=sx.Intermediate)",
    ),
    (
        "class N(nnx.Module):\n    def f(self): self.sow(nnx.Cache, 'h', x)",
        "class N(sx.Module):\n    def f(self): self.sow('h', x, type=sx.Cache)",
    ),
    ("def f(v: nnx.Param): return v.get_value()", "def f(v: sx.Param): return v.value"),
    (
        "layer = nnx.Linear(3, 4)\ny = layer.kernel.get_value()",
        "layer = sx.nn.Linear(3, 4)\ny = layer.kernel.value",
    ),
    (
        (
            "class N(nnx.Module):\n    def __init__(self): self.v = nnx.Param(x)\n"
            "    def f(self): self.v.set_value(x)"
        ),
        (
            "class N(sx.Module):\n    def __init__(self): self.v = sx.Param(x)\n"
            "    def f(self): self.v.value = x"
        ),
    ),
    (
        "def step(v: nnx.Param): v.set_value(\n    x\n    + 1)",
        "def step(v: sx.Param): v.value = (x\n    + 1)",
    ),
    ("n = nnx.LayerNorm(4)\nm = n.num_features", "n = sx.nn.LayerNorm(4)\nm = n.features"),
    # Of strides, what is false means steps of one.
    ("y = nnx.max_pool(x, (2, 2), strides=s)", "y = sx.nn.max_pool(x, (2, 2), strides=s or 1)"),
    (
        "y = nnx.avg_pool(x, (2, 2), (1, 1) if s else None)",
        "y = sx.nn.avg_pool(x, (2, 2), strides=((1, 1) if s else None) or 1)",
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_construction_has_the_same_meaning_here(theirs: str, ours: str) -> None:
    result = translate(f"{BEFORE}{theirs}\n")
    assert result == Translation(f"{AFTER if 'sx.' in ours else ONLY_JAX}{ours}\n", ())


def test_program_keeps_its_comments_and_formatting() -> None:
    program = '''\
        """A classifier."""

        from __future__ import annotations

        # The library.
        from flax import nnx  # models


        class Net(nnx.Module):
            """A layer, and its norm."""

            def __init__(self, *, rngs: nnx.Rngs):
                self.conv = nnx.Conv(
                    3,  # colors
                    8,
                    kernel_size=(3, 3),
                    feature_group_count=1,  # all
                    rngs=rngs,
                )
                self.norm = nnx.BatchNorm( 8, rngs = rngs, use_fast_variance = True )

            def __call__(self, x):
                return nnx.relu(self.norm(self.conv(x)))  # of both
        '''
    expected = '''\
        """A classifier."""

        from __future__ import annotations

        # The library.
        import jax
        import shardax as sx  # models


        class Net(sx.Module):
            """A layer, and its norm."""

            def __init__(self, *, rngs: sx.Rngs):
                self.conv = sx.nn.Conv(
                    3,  # colors
                    8,
                    kernel_size=(3, 3),
                    groups=1,  # all
                    rngs=rngs,
                )
                self.norm = sx.nn.BatchNorm( 8, rngs = rngs )

            def __call__(self, x):
                return jax.nn.relu(self.norm(self.conv(x)))  # of both
        '''
    assert translate(textwrap.dedent(program)) == Translation(textwrap.dedent(expected), ())


CHECKED = [
    ("p = nnx.Param(x, sharding=('a', None))", "p = sx.Param(x, axes=('a', None))", "axes= names"),
    (
        "a = nnx.MultiHeadAttention(2, 8, qkv_features=8, decode=False, rngs=r)",
        "a = sx.nn.MultiHeadAttention(num_heads=2, features=8, rngs=r, use_bias=True)",
        "parameters are named q, k, v",
    ),
    ("g, s = nnx.split(m, nnx.Param, ...)", "g, s = sx.split(m, sx.Param, ...)", "holds arrays"),
    ("m = nnx.merge(g, s)", "m = sx.merge(g, s)", "Variables of its own"),
    ("ok = isinstance(x, nnx.Param)", "ok = isinstance(x, sx.Param)", "this is False"),
    (
        "c = nnx.LSTMCell(3, hidden_features=4, rngs=r)",
        "c = sx.nn.LSTMCell(3, features=4, rngs=r)",
        "(hidden, cell)",
    ),
    (
        "o = nnx.Optimizer(m, tx, wrt=nnx.Param)\no.update(m, grads)",
        "o = sx.train.Optimizer(m, tx, wrt=sx.Param)\no.update(grads)",
        "gradients alone",
    ),
    (
        "class L(nnx.Linear):\n    pass",
        "class L(sx.nn.Linear):\n    pass",
        "its calls are sx.nn.Linear(in_features",
    ),
    ("p = nnx.Perturbation(x)", "p = sx.Perturbation(x)", "it is no Intermediate here"),
    ("class A(nnx.Module, pytree=False): ...", "class A(sx.Module): ...", "is a pytree here"),
    (
        "class B(nnx.Dict, pytree='strict', k=2): ...",
        "class B(sx.Dict, k=2): ...",
        "is a pytree here",
    ),
    (
        "p = nnx.PReLU(0.1, negative_slope_metadata={})",
        "p = sx.nn.PReLU(0.1)",
        "promoted with the slope",
    ),
    ("m = [*nnx.iter_modules(m)]", "m = [*sx.iter_modules(m)]", "streams are Modules too"),
    ("d = nnx.Dict(a=x)", "d = sx.Dict(a=x)", "entries are d[name]"),
    ("n = nnx.data(0)", "n = 0", "a Python number is configuration"),
    ("m = nnx.merge(g, s, copy=True)", "m = sx.merge(g, s)", "Variables of its own"),
    (
        "norms = {'n': nnx.LayerNorm}",
        "norms = {'n': sx.nn.LayerNorm}",
        "calls are sx.nn.LayerNorm(features,",
    ),
    (
        "f = functools.partial(nnx.max_pool, strides=None)",
        "f = functools.partial(sx.nn.max_pool, strides=1)",
        "its calls are sx.nn.max_pool(x, window",
    ),
    ("g = jax.grad(f)(nnx.Rngs(0))", "g = jax.grad(f)(sx.Rngs(0))", "in the order of creation"),
    (
        "l = jax.tree.map(f, m), jax.tree.leaves(nnx.Rngs(0))",
        "l = jax.tree.map(f, m), jax.tree.leaves(sx.Rngs(0))",
        "in the order of creation",
    ),
    ("k = {'l': nnx.Linear}", "k = {'l': sx.nn.Linear}", "in a test of classes"),
    ("s = nnx.pop(m, nnx.Param)", "s = sx.pop(m, sx.Param)", "tuple that sow made"),
    (
        "print(f'{nnx.relu(x)=} {x=} {nnx.relu(x)}')",
        "print(f'{jax.nn.relu(x)=} {x=} {jax.nn.relu(x)}')",
        "the text is the code",
    ),
    ("v = nnx.Variable(-1.5)", "v = sx.Variable(-1.5)", "holds a float32"),
    (
        "m = nnx.Rngs(0); f = nnx.jit(lambda x: m())",
        "m = sx.Rngs(0); f = sx.jit(lambda x: m())",
        "at each call here",
    ),
    (
        "@nnx.jit\ndef f(x): return m()\nm = nnx.Rngs(0)",
        "@sx.jit\ndef f(x): return m()\nm = sx.Rngs(0)",
        "at each call here",
    ),
    (
        "m = nnx.Rngs(0); m.a = [nnx.Linear(3, 4, rngs=r)]",
        "m = sx.Rngs(0); m.a = [sx.nn.Linear(3, 4, rngs=r)]",
        "refuses a plain list",
    ),
    (
        "import jax.numpy as jnp; m = nnx.Rngs(0); m.a = {'b': jnp.ones(2)}",
        "import jax.numpy as jnp; m = sx.Rngs(0); m.a = {'b': jnp.ones(2)}",
        "refuses a plain list",
    ),
    ("def f(v: nnx.Param): v += 1", "def f(v: sx.Param): v += 1", "operators in place"),
    (
        "import numpy; m = nnx.Rngs(0); m.a = numpy.ones(2)",
        "import numpy; m = sx.Rngs(0); m.a = numpy.ones(2)",
        "holds a float32",
    ),
    ("v = nnx.Variable(True)", "v = sx.Variable(True)", "holds a float32"),
    (
        "make(norm=nnx.LayerNorm)",
        "make(norm=sx.nn.LayerNorm)",
        "its calls are sx.nn.LayerNorm(features,",
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "reason"), CHECKED)
def test_difference_is_told_with_its_line(theirs: str, ours: str, reason: str) -> None:
    result = translate(f"{BEFORE}{theirs}\n")
    assert result.text == f"{AFTER if 'sx' in ours else ONLY_JAX}{ours}\n"
    assert {(note.line, note.kind) for note in result.notes} == {(5, "check")}
    assert [reason in note.reason for note in result.notes].count(True) == 1


LEFT_CODE = [
    ("c = nnx.GRUCell(3, 4, rngs=r)", "no bias on the recurrent product"),
    ("b = nnx.some_new_name", "in no table"),
    ("f = nnx.max_pool", "only where it is called"),
    ("s = nnx.split_state(s, ...)", "called with other arguments"),
    ("y = nnx.max_pool(*args)", "called with *arguments"),
    ("n = nnx.LayerNorm(4, reduction_axes=(1, 2), rngs=r)", "reduction_axes=(1, 2)"),
    ("l = nnx.Linear(3, 4, dot_general=f, rngs=r)", "dot_general= has no counterpart"),
    ("p = nnx.Param(x, on_get_value=f)", "on_get_value=f has no counterpart"),
    ("l = nnx.LinearGeneral((2, 3), 4, axis=(0, 1), rngs=r)", "axis=(0, 1) has no counterpart"),
    ("f = nnx.jit(g, device=d)", "device=d has no counterpart"),
    ("f = nnx.grad(g, graph=False)", "graph=False has no counterpart"),
    ("o = nnx.Optimizer(m, tx)\nu = o.update(m, grads)", "returns nothing"),
    ("optimizer.update(m, grads)", "cannot be seen here"),
    ("y = layers[0].kernel.get_value()", "cannot be seen here"),
    ("v.set_value(x)", "cannot be seen here"),
    ("m.sow(nnx.Cache, 'h', x)", "cannot be seen here"),
    ("n = v.get_metadata('note')", "cannot be seen here"),
    ("m.attention.dropout_rate = 0.0", "cannot be seen here"),
    ("m.set_attributes(decode=True)", "nothing here reads it"),
    ("def f(v: nnx.Param): return v.get_metadata('note')", "not offered here"),
    ("c = nnx.Conv(1, 1, (3,), rngs=r)\nc.kernel_dilation = 2", "no such attribute here"),
    ("nnx.relu = f\ny = nnx.relu(x)", "relu is set in this file"),
    ("exec('y = nnx.relu(x)')", "names in texts are not seen"),
    ("importlib.import_module('flax.nnx')", "names in texts are not seen"),
    ("def f(m: 'nnx.Module | None'): ...", "names in texts are not seen"),
    ("f = getattr(nnx, 'relu')", "used as a value"),
    ("old = hasattr(nnx, 'some_new_name')", "used as a value"),
    ("@nnx.split_rngs(splits=5)\n@nnx.vmap(in_axes=(0, None))\ndef f(m, x): ...", "in_axes"),
    (
        "a = nnx.MultiHeadAttention(2, 8, in_kv_features=4, rngs=r)",
        "in_kv_features=4 has no counterpart",
    ),
    ("b = nnx.Bidirectional(f, g, rngs=r)", "has reverse=True here"),
    ("backups = nnx.fork_rngs(m)", "for a block, or a call"),
    ("w = nnx.WeightNorm(l, rngs=r)", "a call overwrites the kernel there"),
    ("v = nnx.with_vars(m, hijax=True)", "hijax=True has no counterpart"),
    ("y = nnx.dot_product_attention(q, k, v, dropout_rate=0.1)", "dropout_rate=0.1"),
    ("def f(m: nnx.Module): m.use_bias = False", "nothing here reads it"),
    ("import typing\ndef f(m: typing.Any): m.use_bias = False", "cannot be seen here"),
    ("def f(v: object): v.set_value(x)", "cannot be seen here"),
    ("from typing import Optional\ndef f(v: Optional[nnx.Param]): v.get_value()", "cannot be seen"),
    ("def f() -> nnx.Module: ...\nf().padding, f().use_bias = 1, 2", "nothing here reads it"),
    ("for layer.use_bias in (True,): ...", "cannot be seen here"),
    ("setattr(layer, 'use_bias', False)", "names in texts are not seen"),
    ("b = hasattr(nnx.Linear(3, 4, rngs=r), 'use_bias')", "names in texts are not seen"),
    ("b = getattr(leaf, 'value', leaf)", "names in texts are not seen"),
    ("b = isinstance(m, (nnx.Conv, nnx.Linear))", "other classes are of this one here"),
    ("b = type(m) is nnx.LinearGeneral", "other classes are of this one here"),
    ("match m:\n    case nnx.Module(): ...", "other classes are of this one here"),
    ("match m:\n    case nnx.LayerNorm(num_features=4): ...", "of a pattern may differ"),
    ("match m:\n    case Net(use_bias=True): ...", "cannot be seen here"),
    ("f = functools.partial(nnx.max_pool, padding='SAME')", "a later strides="),
    ("y = nnx.max_pool(x, (2,), **options)", "called with **options"),
    ("g, a, b = nnx.split(m, nnx.Not(nnx.Variable), ...)", "is a Variable to filters here"),
    (
        "d = nnx.DiffState(0, lambda p, v: isinstance(v, jax.Array))",
        "is a Variable to filters here",
    ),
    (
        "class N(nnx.Module):\n    def f(self): return self.sow(nnx.Cache, 'h', 1)",
        "returns nothing",
    ),
    ("o = nnx.Optimizer(m, tx)\no.update(n, g)", "which this may not be"),
    ("m = 1\no = nnx.Optimizer(m, tx)\nm = 2\no.update(m, g)", "which this may not be"),
    ("m.a = m.b = 1\no = nnx.Optimizer(m.a, tx)\nm.a = 2\no.update(m.a, g)", "may not be"),
    ("s = nnx.pop(m, nnx.Variable)", "is a Variable to filters"),
    ("s = nnx.pop(m, jax.Array)", "is a Variable to filters"),
    ("a = nnx.MultiHeadAttention(2, 8, qkv_features=16, rngs=r)", "qkv_features=16 has no"),
    ("l = nnx.Linear(4, 8, kernel_metadata={'sharding': ('a', 'b')})", "kernel_metadata= has no"),
    ("a = nnx.training.metrics.Average('x')", "in no table"),
    ("def step(v): v.set_value(x)\nstep(nnx.Param(x))", "cannot be seen here"),
    ("l = nnx.Linear(3, 4)\nl.kernel = f()\ny = l.kernel.get_value()", "cannot be seen here"),
    ("o = nnx.Optimizer(m, tx)\no.update(model=m, grads=g)", "returns nothing"),
    (
        "@nnx.split_rngs(splits=5)\n@nnx.vmap(graph=False)\ndef make(rngs): ...",
        "streams are split by their entry",
    ),
    ("d = nnx.Dropout(0.5, rng_collection='noise', rngs=r)", "rng_collection='noise'"),
    # Other forms of a call of a method, and the method as a value.
    ("o = nnx.Optimizer(m, tx)\no.update(*pair)", "which this may not be"),
    ("o = nnx.Optimizer(m, tx)\no.update(m)", "called with other arguments"),
    ("o = nnx.Optimizer(m, tx)\nf = o.update", "only where it is called"),
    ("v = nnx.Param(x)\nv.set_value(*a)", "called with *arguments"),
    ("v = nnx.Param(x)\nv.get_value(0)", "fewer arguments here"),
    ("v = nnx.Param(x)\nf = functools.partial(v.set_value)", "only where it is called"),
]


@pytest.mark.parametrize(("code", "reason"), LEFT_CODE)
def test_untranslated_code_ends_program_at_its_first_line(code: str, reason: str) -> None:
    result = translate(f'"""Doc."""\nfrom __future__ import annotations\n{BEFORE}{code}\n')
    left = [note for note in result.notes if note.kind == "left"]
    assert any(reason in note.reason for note in left)
    first, second, guard, *_ = result.text.splitlines()
    places = "1 place" if len(left) == 1 else f"{len(left)} places"
    assert (first, second) == ('"""Doc."""', "from __future__ import annotations")
    assert guard == f'raise SystemExit("{GUARD}{places} {REST}")'
    with pytest.raises(SystemExit, match="to write by hand"):
        exec(compile(result.text, "program", "exec"), {})


def test_left_names_keep_their_import_until_they_are_written() -> None:
    program = "from flax import nnx\nc = nnx.GRUCell(3, 4), nnx.relu(x)\n"
    once = translate(program)
    assert once.text.splitlines()[1:] == [
        "import jax",
        "from flax import nnx",
        "c = nnx.GRUCell(3, 4), jax.nn.relu(x)",
    ]
    # Given again, it lists the same places; once they are written, it takes the line away.
    assert translate(once.text).text == once.text
    assert [note.line for note in translate(once.text).notes] == [4]
    written = once.text.replace("nnx.GRUCell", "nnx.LSTMCell")
    assert translate(written).text == (
        "import jax\nimport shardax as sx\nc = sx.nn.LSTMCell(3, 4), jax.nn.relu(x)\n"
    )


@pytest.mark.parametrize(
    ("base", "method"), [("nnx.Param", "get_value"), ("nnx.Variable[int]", "on_set_value")]
)
def test_hook_of_a_variable_is_left(base: str, method: str) -> None:
    result = translate(f"{BEFORE}class P({base}):\n    def {method}(self, x): ...\n")
    (note,) = result.notes
    assert (note.line, note.kind, note.what) == (6, "left", f"P.{method}")
    assert "raise SystemExit" in result.text


IMPORTS = [
    ("import flax.nnx as nnx\nm = nnx.State", "import shardax as sx\nm = sx.State"),
    ("import flax\nm = flax.nnx.State", "import shardax as sx\nm = sx.State"),
    ("from flax.nnx import State as M\nm = M", "import shardax as sx\nm = sx.State"),
    (
        "from flax import nnx, struct\nm = nnx.State, struct",
        "import shardax as sx\nfrom flax import struct\nm = sx.State, struct",
    ),
    (
        "from flax import nnx\nclass Count(nnx.Variable[nnx.A]): ...",
        "import typing\nimport shardax as sx\nclass Count(sx.Variable[typing.Any]): ...",
    ),
    (
        "def f():\n    from flax import nnx\n    return nnx.State",
        "def f():\n    import shardax as sx\n    return sx.State",
    ),
    (
        "import shardax as sx\nfrom flax import nnx\nm = nnx.State",
        "import shardax as sx\nm = sx.State",
    ),
    ("from flax import nnx\nsx = 1\nm = nnx.State", "import shardax\nsx = 1\nm = shardax.State"),
    ("nnx = 1\nm = nnx.real", "nnx = 1\nm = nnx.real"),
    (
        "from flax import linen as nn\ny = nn.with_logical_constraint(x, ('a',))",
        "import shardax as sx\ny = sx.partition.with_logical_constraint(x, ('a',))",
    ),
    (
        "import equinox as eqx\n@eqx.filter_jit\ndef f(x): ...",
        'import shardax as sx\n@sx.jit(static="auto")\ndef f(x): ...',
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), IMPORTS)
def test_import_is_replaced_whole(theirs: str, ours: str) -> None:
    assert translate(f"{theirs}\n") == Translation(f"{ours}\n", ())


def test_modules_of_linen_and_equinox_stay() -> None:
    program = "import equinox as eqx\nfrom flax import linen as nn\nm = nn.Dense(3), eqx.Module\n"
    result = translate(program)
    assert result.text == program
    assert [(note.what, note.kind) for note in result.notes] == [
        ("equinox", "kept"),
        ("flax.linen", "kept"),
    ]


@pytest.mark.parametrize("module", ["flax.nnx", "helpers"])
def test_file_with_star_import_is_left(module: str) -> None:
    program = f"from flax import nnx\nfrom {module} import *\nm = nnx.Module\n"
    result = translate(program)
    assert result.text.endswith(program)
    assert [(note.line, note.kind, note.what) for note in result.notes] == [
        (2, "left", f"from {module} import *")
    ]


@pytest.mark.parametrize(
    ("derived", "left"),
    [
        ("import a\nclass B(a.Net):\n    def __init__(self): self.count = Counter()\n", 1),
        ("from a import Net as Base\nclass B(Base):\n    def count(self): ...\n", 1),
        ("from a import Net\nN = Net\nclass B(N):\n    count = Counter()\n", 1),
        ("from a import Net\nclass B(Net[int]): ...\nclass C(B):\n    count: int = 1\n", 1),
        ("from a import Net\nclass B(Net):\n    async def count(self): ...\n", 1),
        ("from a import Net\nclass B(Net):\n    class count: ...\n", 1),
        ("from a import Net\nclass B(Net):\n    def f(self): setattr(self, 'count', 1)\n", 1),
        ("from a import Net\nclass B(Net):\n    def f(self, n): setattr(self, n, 1)\n", 1),
        ("from a import Net as B\nclass C(B): ...\nB = C\nclass D(B): count = 1\n", 1),
        ("from a import Net\nclass B(Net):\n    def f(self): setattr(self, 'other', 1)\n", 0),
        ("from a import Net\nclass B(Net):\n    def __init__(self): self.other = 1\n", 0),
        ("class Net:\n    def __init__(self): self.count = Counter()\n", 0),
    ],
)
def test_attribute_that_a_class_of_another_file_sets_is_not_known(derived: str, left: int) -> None:
    program = (
        f"{BEFORE}class Net(nnx.Module):\n"
        "    def __init__(self): self.count = nnx.Variable(x)\n"
        "    def __call__(self): return self.count.get_value()\n"
    )
    files = {"a.py": program, "b.py": derived}
    result = translate(program, Project(files.items()), "a.py")
    assert (result.left, "self.count.value" in result.text) == (left, not left)


def test_function_of_a_file_without_flax_may_be_given_layers() -> None:
    helper = "def widen(layer): layer.kernel_dilation = 2\n"
    main = f"{BEFORE}from helper import widen\nwiden(nnx.Conv(1, 1, (3,), rngs=r))\n"
    notes = [
        [(note.line, note.kind, note.what) for note in translate(helper, project).notes]
        for project in (Project([("helper.py", helper), ("a.py", text)]) for text in (main, BEFORE))
    ]
    assert notes == [[(1, "left", "kernel_dilation")], [(1, "check", "kernel_dilation")]]


def test_names_of_flax_by_way_of_another_file_are_left() -> None:
    files = {
        "layers.py": "from flax.nnx import Linear\n",
        "again.py": "from layers import Linear as Dense\n",
        "model.py": "import layers\nfrom again import Dense\nx = layers.Linear\n",
    }
    project = Project(files.items())
    notes = {label: translate(text, project).notes for label, text in files.items()}
    assert {label: [(n.line, n.what) for n in found] for label, found in notes.items()} == {
        "layers.py": [(1, "Linear")],
        "again.py": [(1, "Dense")],
        "model.py": [(2, "Dense"), (3, "layers.Linear")],
    }


def test_file_without_the_import_is_told_of_methods() -> None:
    program = (
        "from model import make\n"
        "count = make().counter.get_value()\n"
        "optimizer.update(model, grads)\n"
        "updates, state = tx.update(grads, state)\n"
        "module.sow(kind, 'h', 1)\n"
    )
    result = translate(program, Project([("a.py", program), ("b.py", BEFORE)]))
    assert result.text == program
    assert [(note.line, note.kind, note.what) for note in result.notes] == [
        (2, "check", "get_value"),
        (3, "check", "update"),
        (5, "check", "sow"),
    ]
    assert translate(program).notes == ()


@given(st.lists(st.sampled_from([pair[0] for pair in SAME]), min_size=1, max_size=4))
def test_translating_twice_changes_nothing_more(codes: list[str]) -> None:
    once = translate("\n".join([BEFORE, *codes]) + "\n").text
    assert translate(once).text == once
    compile(once, "program", "exec")


@given(st.sampled_from(sorted(NAMES)))
def test_translate_changes_no_name_without_its_import(name: str) -> None:
    result = translate(f"from flax import nnx\nvalue = nnx.{name}\n")
    is_left = result.left == 1
    assert is_left == ("SystemExit" in result.text) == (f"nnx.{name}" in result.text)
    assert is_left == ("from flax" in result.text)
    libcst.parse_module(result.text)


DEEP = {
    "parentheses": "x = " + "(" * 3000 + "1" + ")" * 3000,
    "calls": "x = " + "f(" * 150 + "1" + ")" * 150,
    "methods": "x = a" + ".b()" * 1500,
    "sums": "x = " + "+".join("1" * 5000),
    "branches": "if a: pass\n" + "elif a: pass\n" * 2000,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(UnreadableError, match="nest"):
        translate(f"from flax import nnx\n{text}\n")
