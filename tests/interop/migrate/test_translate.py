# SPDX-License-Identifier: Apache-2.0
"""Programs of Flax NNX, and what they become."""

from __future__ import annotations

import textwrap
from typing import Any

import libcst
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from tests.interop.migrate.translation import NAMES, Translation, survey, translate

# What is before and after an expression of the cases below.
BEFORE = "import functools\nimport jax\nfrom flax import nnx\n\n"
AFTER = "import functools\nimport jax\nimport shardax as sx\n\n"

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
    ("y = nnx.max_pool(x, (2, 2))", "y = sx.nn.max_pool(x, (2, 2), strides=1)"),
    (
        "y = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))",
        "y = sx.nn.avg_pool(x, window=(2, 2), strides=(2, 2))",
    ),
    (
        "f = functools.partial(nnx.max_pool, window_shape=(2, 2))",
        "f = functools.partial(sx.nn.max_pool, window=(2, 2), strides=1)",
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
    ("nnx.update(model, values)", "sx.update(model, values)"),
    ("d = nnx.to_pure_dict(state)", "d = state.to_pure_dict()"),
    ("s = nnx.merge_state(a or b, c)", "s = (a or b).merge(c)"),
    ("a, b = nnx.split_state(s, nnx.Param, ...)", "a, b = s.split(sx.Param, ...)"),
    ("L = nnx.List if hasattr(nnx, 'List') else list", "L = sx.List if True else list"),
    # Methods.
    ("self.sow(nnx.Intermediate, 'h', x)", "self.sow('h', x)"),
    ("self.sow(nnx.Cache, 'h', x)", "self.sow('h', x, type=sx.Cache)"),
    ("y = layer.kernel.get_value()", "y = layer.kernel.value"),
    ("y = layers[0].kernel.get_value()", "y = layers[0].kernel.value"),
    ("layer.kernel.set_value(x)", "layer.kernel.value = x"),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_construction_has_the_same_meaning_here(theirs: str, ours: str) -> None:
    used = "m: nnx.Module\n"  # where the case is of a method alone
    result = translate(f"{BEFORE}{used}{theirs}\n")
    assert result == Translation(f"{AFTER}{used.replace('nnx', 'sx')}{ours}\n", ())


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
        "l = nnx.Linear(4, 8, kernel_metadata={'sharding': ('a', 'b')}, rngs=r)",
        "l = sx.nn.Linear(4, 8, kernel_axes=('a', 'b'), rngs=r)",
        "axes= names",
    ),
    (
        "a = nnx.MultiHeadAttention(2, 8, qkv_features=16, decode=False, rngs=r)",
        (
            "a = sx.nn.MultiHeadAttention(num_heads=2, features=8, rngs=r, "
            "head_dim=16 // 2, use_bias=True)"
        ),
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
        "super().__init__ takes",
    ),
    ("p = nnx.Perturbation(x)", "p = sx.Perturbation(x)", "it is no Intermediate here"),
    ("class A(nnx.Module, pytree=False): ...", "class A(sx.Module): ...", "is a pytree here"),
    ("class B(A, pytree='strict', k=2): ...", "class B(A, k=2): ...", "is a pytree here"),
    (
        "y = nnx.max_pool(x, (2, 2), strides=s)",
        "y = sx.nn.max_pool(x, (2, 2), strides=s)",
        "steps of one there",
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
    ("norms = {'n': nnx.LayerNorm}", "norms = {'n': sx.nn.LayerNorm}", "take features= for num_"),
    ("make(norm=nnx.LayerNorm)", "make(norm=sx.nn.LayerNorm)", "take features= for num_features="),
    ("n = v.get_metadata('note')", "n = v.get_metadata('note')", "not offered"),
]


@pytest.mark.parametrize(("theirs", "ours", "reason"), CHECKED)
def test_difference_is_told_with_its_line(theirs: str, ours: str, reason: str) -> None:
    used = "" if "nnx." in theirs else "m: nnx.Module\n"
    result = translate(f"{BEFORE}{used}{theirs}\n")
    (note,) = result.notes
    assert result.text == f"{AFTER}{used.replace('nnx', 'sx')}{ours}\n"
    assert (note.line, note.kind) == (6 if used else 5, "check")
    assert reason in note.reason


LEFT_CODE = [
    ("c = nnx.GRUCell(3, 4, rngs=r)", "no bias on the recurrent product"),
    ("b = nnx.some_new_name", "in no table"),
    ("f = nnx.max_pool", "calls through another name"),
    ("s = nnx.split_state(s, ...)", "takes other arguments"),
    ("y = nnx.max_pool(*args)", "called with *arguments"),
    ("n = nnx.LayerNorm(4, reduction_axes=(1, 2), rngs=r)", "reduction_axes=(1, 2)"),
    ("l = nnx.Linear(3, 4, dot_general=f, rngs=r)", "dot_general= has no counterpart"),
    ("p = nnx.Param(x, on_get_value=f)", "no hooks"),
    ("l = nnx.LinearGeneral((2, 3), 4, axis=(0, 1), rngs=r)", "the last dimensions"),
    ("f = nnx.jit(g, device=d)", "device=d has no counterpart"),
    ("f = nnx.grad(g, graph=False)", "graph=False has no counterpart"),
    ("u = optimizer.update(m, grads); v = nnx.Module", "returns nothing"),
    ("f = getattr(nnx, 'relu')", "used as a value"),
    ("old = hasattr(nnx, 'some_new_name')", "used as a value"),
    ("@nnx.split_rngs(splits=5)\n@nnx.vmap(in_axes=(0, None))\ndef f(m, x): ...", "in_axes"),
    ("a = nnx.MultiHeadAttention(2, 8, in_kv_features=4, rngs=r)", "differs from in_features="),
    ("b = nnx.Bidirectional(f, g, rngs=r)", "it has reverse=True here"),
    ("@nnx.fork_rngs(split=3)\ndef f(m): ...", "as a decorator it is with_rngs"),
    ("w = nnx.WeightNorm(l, rngs=r)", "a call overwrites the kernel there"),
    ("v = nnx.with_vars(m, hijax=True)", "hijax=True has no counterpart"),
    ("y = nnx.dot_product_attention(q, k, v, dropout_rate=0.1)", "dropout_rate=0.1"),
    ("d = nnx.Dropout(0.5, rng_collection='noise', rngs=r)", "rng_collection='noise'"),
]


@pytest.mark.parametrize(("code", "reason"), LEFT_CODE)
def test_untranslated_code_fails_at_import(code: str, reason: str) -> None:
    result = translate(f"{BEFORE}{code}\n")
    (note,) = result.notes
    assert note.kind == "left"
    assert reason in note.reason
    guard = result.text.removeprefix(AFTER.rstrip("\n") + "\n").splitlines()[0]
    assert guard.startswith('raise ImportError("shardax migrate left 1 place')
    first = code.splitlines()[0].replace("@nnx.vmap(", "@sx.vmap(")
    assert first.split(";")[0] in result.text
    with pytest.raises(ImportError, match="left 1 place to write by hand"):
        exec(compile(result.text, "program", "exec"), {})


@pytest.mark.parametrize(
    ("base", "method"), [("nnx.Param", "get_value"), ("nnx.Variable[int]", "on_set_value")]
)
def test_hook_of_a_variable_is_left(base: str, method: str) -> None:
    result = translate(f"{BEFORE}class P({base}):\n    def {method}(self, x): ...\n")
    (note,) = result.notes
    assert (note.line, note.kind, note.what) == (6, "left", f"P.{method}")
    assert "raise ImportError" in result.text


IMPORTS = [
    ("import flax.nnx as nnx\nm = nnx.Module", "import shardax as sx\nm = sx.Module"),
    ("import flax\nm = flax.nnx.Module", "import shardax as sx\nm = sx.Module"),
    ("from flax.nnx import Module as M\nm = M", "import shardax as sx\nm = sx.Module"),
    (
        "from flax.nnx.nn.linear import Linear\nm = Linear(3, 4)",
        "import shardax as sx\nm = sx.nn.Linear(3, 4)",
    ),
    (
        "from flax import nnx, struct\nm = nnx.Module, struct",
        "import shardax as sx\nfrom flax import struct\nm = sx.Module, struct",
    ),
    (
        "from flax import nnx\nclass Count(nnx.Variable[nnx.A]): ...",
        "import typing\nimport shardax as sx\nclass Count(sx.Variable[typing.Any]): ...",
    ),
    (
        "def f():\n    from flax import nnx\n    return nnx.Module",
        "def f():\n    import shardax as sx\n    return sx.Module",
    ),
    (
        "import shardax as sx\nfrom flax import nnx\nm = nnx.Module",
        "import shardax as sx\nm = sx.Module",
    ),
    ("from flax import nnx\nsx = 1\nm = nnx.Module", "import shardax\nsx = 1\nm = shardax.Module"),
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
        ("flax.linen", "kept"),
        ("equinox", "kept"),
    ]


def test_star_import_is_refused() -> None:
    program = "from flax.nnx import *\nm = Module\n"
    result = translate(program)
    assert (result.text, result.left, result.notes[0].what) == (program, 1, "import *")


UNHASHABLE = """
import dataclasses
@dataclasses.dataclass
class Config:
    size: int = 2
@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int = 2
"""
MODULE = """
class Net(nnx.Module):
    def __init__(self, config: Config, other: "list[Config] | None", fine: Frozen):
        self.config = config
        self.other = other
        self.fine = fine
        self.own = Config()
        size = config
"""


def test_unhashable_configuration_is_told_across_files() -> None:
    project = survey([UNHASHABLE, "no Python ("])
    notes = translate(f"{BEFORE}{MODULE}", project).notes
    assert [(note.line, note.kind, note.what) for note in notes] == [
        (8, "check", "self.config"),
        (9, "check", "self.other"),
        (11, "check", "self.own"),
    ]
    assert "refuses objects of Config" in notes[0].reason


def test_module_refuses_what_the_report_tells() -> None:
    space: dict[str, Any] = {}
    exec(UNHASHABLE + translate(f"{BEFORE}{MODULE}").text, space)
    config, fine = space["Config"](), space["Frozen"]()
    with pytest.raises(sx.errors.StaticAttributeError, match=r"frozen dataclass"):
        space["Net"](config, None, fine)


def test_file_without_the_import_is_told_of_methods() -> None:
    program = (
        "from model import make\n"
        "count = make().counter.get_value()\n"
        "optimizer.update(model, grads)\n"
        "tx.update(grads, state)\n"
        "module.sow(kind, 'h', 1)\n"
    )
    result = translate(program, survey([program, BEFORE]))
    assert result.text == program
    assert [(note.line, note.what) for note in result.notes] == [
        (2, "get_value"),
        (3, "update"),
        (5, "sow"),
    ]
    assert translate(program).notes == ()


@given(st.lists(st.sampled_from([pair[0] for pair in SAME]), min_size=1, max_size=4))
def test_translating_twice_changes_nothing_more(codes: list[str]) -> None:
    program = "\n".join([f"{BEFORE}m: nnx.Module", *codes]) + "\n"
    once = translate(program).text
    assert "nnx" not in once
    assert translate(once) == Translation(once, ())
    compile(once, "program", "exec")


@given(st.sampled_from(sorted(NAMES)))
def test_translate_changes_no_name_without_its_import(name: str) -> None:
    result = translate(f"from flax import nnx\nvalue = nnx.{name}\n")
    is_left = result.left == 1
    assert is_left == ("ImportError" in result.text) == (f"nnx.{name}" in result.text)
    assert "from flax" not in result.text
    libcst.parse_module(result.text)
