# SPDX-License-Identifier: Apache-2.0
"""Small programs of Flax NNX, with traps of names, scopes and objects.

Each stands with the lines that the report leaves; one of which nothing is left prints the same in
both libraries.
"""

from __future__ import annotations

import textwrap

_HEAD = """\
import jax, jax.numpy as jnp
from flax import nnx
ones, x = nnx.initializers.ones, jnp.arange(4.0).reshape(1, 4)
"""


def _program(text: str) -> str:
    """A program behind the usual imports, which are its first three lines."""
    return _HEAD + textwrap.dedent(text).lstrip("\n")


def _whole(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


SMALL_PROGRAMS: dict[str, tuple[str, list[int]]] = {
    # --- names that are bound again -------------------------------------------------------------
    "assignment of the imported name": (
        _whole("""
            from flax.nnx import relu
            relu = lambda x: x * 3
            print(relu(-1.0))
            """),
        [3],
    ),
    "exchange of two imported names": (
        _whole("""
            from flax.nnx import relu, tanh
            relu, tanh = tanh, relu
            print(relu(-1.0))
            """),
        [2, 2, 3],
    ),
    "import of another name in a try": (
        _whole("""
            from flax.nnx import relu
            try:
                from operator import neg as relu
            except ImportError:
                pass
            print(relu(-1.0))
            """),
        [6],
    ),
    "name set by global": (
        _program("""
            from flax.nnx import relu
            def use(f):
                global relu
                relu = f
            use(lambda x: x * 3)
            print(relu(-1.0), nnx.tanh(0.0))
            """),
        [9],
    ),
    "name set by nonlocal": (
        _program("""
            def outer():
                from flax.nnx import relu
                def use(f):
                    nonlocal relu
                    relu = f
                use(lambda x: x * 3)
                return relu(-1.0)
            print(outer())
            """),
        [10],
    ),
    "variable of a loop": (
        _program("""
            from flax.nnx import relu
            for relu in (lambda x: x * 3,):
                print(relu(-1.0))
            """),
        [5, 6],
    ),
    "name of a with": (
        _program("""
            import contextlib
            from flax.nnx import relu
            with contextlib.nullcontext(lambda x: x * 3) as relu:
                print(relu(-1.0))
            """),
        [7],
    ),
    "pattern of a match": (
        _program("""
            from flax.nnx import relu
            match (lambda x: x * 3):
                case relu:
                    print(relu(-1.0))
            """),
        [6, 7],
    ),
    "walrus in a comprehension": (
        _program("""
            from flax.nnx import relu
            found = [relu := f for f in (abs,)]
            print(relu(-1.0))
            """),
        [6],
    ),
    "deleted name": (
        _program("""
            from flax.nnx import relu
            y = relu(-1.0)
            del relu
            print(y)
            """),
        [5, 6],
    ),
    "class of the name of its base": (
        _program("""
            from flax.nnx import Linear
            class Linear(Linear):
                tag = 5
            print(Linear.tag)
            """),
        [5, 7],
    ),
    "name set on the library": (
        _program("""
            nnx.relu = lambda x: x * 3
            print(nnx.relu(-1.0))
            """),
        [4, 5],
    ),
    "fallback where Flax is missing": (
        _whole("""
            try:
                from flax import nnx
            except ImportError:
                nnx = None
            print(nnx is not None and nnx.relu(-1.0))
            """),
        [5, 5],
    ),
    # --- names of other scopes ------------------------------------------------------------------
    "parameter of the name of the import": (
        _program("""
            from flax.nnx import relu
            def apply(relu, x):
                return relu(x)
            print(apply(abs, -2.0), relu(-1.0))
            """),
        [],
    ),
    "local name of a function": (
        _program("""
            def f():
                nnx = {"relu": abs}
                return nnx["relu"](-2.0)
            print(f(), nnx.relu(-1.0))
            """),
        [],
    ),
    "comprehension of the name of the import": (
        _program("""
            from flax.nnx import relu
            print([relu(-2.0) for relu in (abs, float)], relu(-1.0))
            """),
        [],
    ),
    "body of a class": (
        _program("""
            from flax.nnx import relu
            class A:
                relu = relu
                def f(self):
                    return relu(-1.0)
            print(A().f())
            """),
        [6],
    ),
    "import in a function": (
        _whole("""
            def g(x):
                from flax import nnx
                return nnx.relu(x)
            print(g(-1.0))
            """),
        [],
    ),
    "import under a branch": (
        _whole("""
            import sys
            if sys.version_info > (3,):
                from flax import nnx
            print(nnx.relu(-1.0))
            """),
        [],
    ),
    "import of both branches": (
        _whole("""
            import sys
            if sys.version_info > (3,):
                from flax import nnx
            else:
                import flax.nnx as nnx
            print(nnx.relu(-1.0))
            """),
        [],
    ),
    "import on the line of its branch": (
        _whole("""
            if True: from flax import nnx
            print(nnx.relu(-1.0))
            """),
        [],
    ),
    "nested functions": (
        _program("""
            def outer(x):
                def inner():
                    layer = nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0))
                    return layer(x), layer.kernel.get_value().sum()
                return inner()
            print(outer(x))
            """),
        [],
    ),
    # --- names that the new text takes ----------------------------------------------------------
    "library under the name jax": (
        _whole("""
            from flax import nnx as jax
            print(jax.relu(-1.0), jax.Rngs(0) is None)
            """),
        [],
    ),
    "class called jax": (
        _whole("""
            from flax import nnx
            class jax:
                class nn:
                    relu = staticmethod(lambda x: x * 11)
            print(nnx.relu(-1.0), jax.nn.relu(1))
            """),
        [],
    ),
    "parameter called jax": (
        _whole("""
            from flax import nnx
            def f(jax, x):
                return nnx.relu(x), jax
            print(f("mine", -1.0))
            """),
        [],
    ),
    "import of jax further down": (
        _whole("""
            from flax import nnx
            def f(x):
                return nnx.relu(x)
            print(f(-1.0))
            import jax
            print(jax.numpy.zeros(1))
            """),
        [],
    ),
    "import of jax in a function": (
        _whole("""
            def f():
                return jax.numpy.ones(1)
            def g():
                y = jax.numpy.zeros(1)
                from flax import nnx
                return nnx.relu(y)
            import jax
            print(f(), g())
            """),
        [],
    ),
    "names sx and shardax taken": (
        _program("""
            sx, shardax = 5, 6
            layer = nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0))
            print(layer(x), sx + shardax)
            """),
        [],
    ),
    # --- objects --------------------------------------------------------------------------------
    "update of a dict": (
        _program("""
            stats, grad_stats = {"a": 1}, {"b": 2}
            dict.update(stats, grad_stats)
            print(stats, nnx.relu(-1.0))
            """),
        [],
    ),
    "update of an object of one's own": (
        _program("""
            class Tracker(nnx.Module):
                def update(self, step, grad_norm=0.0):
                    self.row = (step, grad_norm)
            class Other:
                def update(self, step, grads):
                    self.row = step
            tracker, other, grad_norm = Tracker(), Other(), 3.5
            tracker.update(7, grad_norm)
            other.update(8, grad_norm)
            print(tracker.row, other.row)
            """),
        [],
    ),
    "value of a slider": (
        _program("""
            class Slider:
                v = value = 1.0
                def set_value(self, v):
                    self.v = v
                def get_value(self):
                    return self.v
            class App:
                def __init__(self):
                    self.scale, self.knob = Slider(), nnx.Param(jnp.ones(1))
                    self.kernel = Slider()
            app = App()
            app.kernel.set_value(4.0)
            print(app.kernel.get_value(), app.kernel.value)
            """),
        [],
    ),
    "attribute that is set again from outside": (
        _program("""
            class Slider:
                value = 1.0
                def get_value(self):
                    return 5.0
            class Net(nnx.Module):
                def __init__(self):
                    self.scale, self.shift = nnx.Param(jnp.ones(1)), nnx.Param(jnp.zeros(1))
            net = Net()
            net.scale = Slider()
            print(net.scale.get_value(), net.shift.get_value())
            """),
        [13],
    ),
    "train and params of other objects": (
        _program("""
            class Job:
                params, value = {"a": 1}, 3
                def train(self, mode=True):
                    return mode
                def sow(self, kind, name):
                    return kind, name
            job = Job()
            print(job.train(), job.params, job.value, job.sow("a", "b"), nnx.relu(-1.0))
            """),
        [],
    ),
    "optimizer of optax": (
        _program("""
            import optax
            tx = optax.sgd(0.1)
            params, grads = nnx.relu(jnp.ones(2)), jnp.ones(2)
            updates, state = tx.update(grads, tx.init(params))
            print(updates)
            """),
        [],
    ),
    "optimizer as an argument": (
        _program("""
            import optax
            @nnx.jit
            def step(model, optimizer, x):
                grads = nnx.grad(lambda model: model(x).sum())(model)
                optimizer.update(model, grads)
            def other(optimizer, model, grads):
                optimizer.update(model, grads)
            model = nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            step(model, optimizer, x)
            print(model.kernel[...], other)
            """),
        [8, 10],
    ),
    "Variables of one's own": (
        _program("""
            class Count(nnx.Variable):
                pass
            class Net(nnx.Module):
                def __init__(self):
                    self.count = Count(jnp.array(0))
                    self.scale: nnx.Param = nnx.Param(jnp.ones(()))
                def __call__(self, x):
                    self.count.set_value(self.count.get_value() + 1)
                    self.sow(Count, "seen", x.sum())
                    return x * self.scale
            net = Net()
            net(x)
            print(net(x), net.count.get_value(), net.count.value)
            """),
        [],
    ),
    "attributes that nothing reads": (
        _program("""
            norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0), bias_init=ones, use_running_average=True)
            norm.use_bias = False
            norm.use_running_average = False
            print(norm(x))
            """),
        [5],
    ),
    "attributes of layers in layers": (
        _program("""
            class Net(nnx.Module):
                def __init__(self, rngs):
                    self.conv = nnx.Conv(1, 1, (3,), padding="VALID", kernel_init=ones, rngs=rngs)
                    self.use_bias = True
            net = Net(nnx.Rngs(0))
            net.conv.kernel_dilation = 2
            print(net.conv(jnp.arange(6.0).reshape(1, 6, 1)), net.use_bias)
            """),
        [9],
    ),
    "loop over layers": (
        _program("""
            layers = [nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2)]
            for layer in layers:
                layer.deterministic = True
            print(layers[0](x))
            """),
        [6],
    ),
    # --- calls ----------------------------------------------------------------------------------
    "strides by expressions": (
        _program("""
            def none():
                return None
            config, image = {"s": None}, jnp.arange(6.0).reshape(1, 6, 1)
            print(nnx.max_pool(image, (2,), strides=config["s"]).shape)
            print(nnx.avg_pool(image, (2,), strides=none()).shape)
            print(nnx.max_pool(image, (2,), (2,) if config["s"] else None).shape)
            print(nnx.max_pool(image, (2,), strides=(2,)).shape, nnx.max_pool(image, (2,)).shape)
            """),
        [],
    ),
    "options that are given on": (
        _program("""
            import functools
            dense = functools.partial(nnx.Linear, kernel_init=ones, rngs=nnx.Rngs(0))
            pool = functools.partial(nnx.max_pool, window_shape=(1, 1), strides=None)
            print(dense(4, 2)(x), pool(jnp.ones((1, 2, 2, 1))).shape)
            kwargs = dict(kernel_init=ones, dtype=jnp.bfloat16)
            print(nnx.Linear(4, 2, **kwargs, rngs=nnx.Rngs(0))(x).dtype)
            """),
        [],
    ),
    "types of arrays": (
        _program("""
            layer = nnx.Linear(4, 2, dtype=jnp.float16, param_dtype=jnp.bfloat16, kernel_init=ones,
                               rngs=nnx.Rngs(0))
            print(layer(x).dtype, layer.kernel.dtype)
            norm = nnx.LayerNorm(num_features=4, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
            print(norm(x).dtype, norm.scale.get_value().dtype, norm.num_features)
            """),
        [],
    ),
    "attribute set by a class of the family": (
        _program("""
            class Slider:
                def get_value(self): return 5.0
            class A(nnx.Module):
                def __init__(self): self.v = nnx.Param(jnp.array(2.0))
                def read(self): return self.v.get_value()
            class B(A): pass
            class C(B):
                def __init__(self): self.v = Slider()
            print(A().read(), C().read())
            """),
        [8],
    ),
    "attribute set by a text": (
        _program("""
            class Slider:
                def get_value(self): return 5.0
            class A(nnx.Module):
                def __init__(self): self.v = nnx.Param(jnp.array(2.0))
                def read(self): return self.v.get_value()
            a = A()
            setattr(a, "v", Slider())
            print(a.read())
            """),
        [8],
    ),
    "plain class that a Module derives from": (
        _program("""
            class Reader:
                def read(self): return self.get_value()
            class A(Reader, nnx.Param): pass
            print(A(jnp.array(2.0)).read())
            """),
        [5],
    ),
    "decorator that gives other arguments": (
        _program("""
            import functools
            class Slider:
                def get_value(self): return 5.0
            def swap(f): return lambda a, b: f(b, a)
            @functools.partial(swap)
            def f(v, s): return v.get_value()
            print(f(nnx.Param(x), Slider()))
            """),
        [9],
    ),
    "import of jax in another function": (
        _whole("""
            from flax import nnx
            def act(x):
                if isinstance(x, str):
                    import jax
                    x = jax.numpy.asarray(float(x))
                return nnx.relu(x)
            print(act("2.0"), act(-1.0))
            """),
        [],
    ),
    "name that a class changes": (
        _whole("""
            from flax import nnx as __n
            class A:
                def f(self): return __n.relu(-1.0)
            try:
                print(A().f())
            except NameError:
                print(__n.tanh(0.0))
            """),
        [3, 7],
    ),
    "library in a text": (
        _program("""
            name = "relu"
            print(getattr(nnx, name)(-1.0), eval("nnx.relu(-1.0)"))
            """),
        [5, 5],
    ),
    "expressions within texts": (
        _program("""
            if (layer := nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0))) is not None:
                print(f"{layer(x).sum():.1f} {nnx.relu(-1.0)!r} {{nnx}}", "nnx.relu")
            """),
        [],
    ),
    "annotations in quotes and comments": (
        _program("""
            def scale(layer: "nnx.Linear", by: "jax.Array | None" = None) -> "jax.Array":
                y = layer(x)  # type: nnx.Linear
                return y if by is None else y * by
            print(scale(nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0))), scale.__doc__)
            """),
        [4],
    ),
    "decorators in a row": (
        _program("""
            import functools
            @functools.partial(nnx.jit, static_argnums=1)
            def f(layer, n):
                return layer(x) * n
            @nnx.split_rngs(splits=3)  # three layers
            @nnx.vmap
            def make(rngs: nnx.Rngs):
                return nnx.Linear(4, 2, kernel_init=ones, rngs=rngs)
            print(f(nnx.Linear(4, 2, kernel_init=ones, rngs=nnx.Rngs(0)), 2))
            print(make(nnx.Rngs(0)).kernel.shape)
            """),
        [],
    ),
    "re-exported name": (
        _whole("""
            from flax.nnx import Linear, relu
            __all__ = ["Linear", "double"]
            def double(x):
                return relu(x) * 2
            print(double(-1.0))
            """),
        [1],
    ),
    "star import": (
        _program("""
            from math import *
            print(nnx.relu(-1.0), pi)
            """),
        [4],
    ),
    "half translated": (
        _program("""
            try:
                y = nnx.pool(x[..., None], 0.0, jax.lax.add, (2,), (2,), "VALID")
            except ImportError:
                y = "the slow one"
            print(y, nnx.relu(-1.0))
            """),
        [5],
    ),
}
