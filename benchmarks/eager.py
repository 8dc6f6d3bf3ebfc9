# SPDX-License-Identifier: Apache-2.0
"""What transforms and tools cost when they are called eagerly, outside of compiled functions.

For each: milliseconds a call beside raw JAX in the same run, programs compiled a call after the
second, and growth of the process over many calls. The forms of a lifted transform:

- *arrays*: one function of arrays; the opponent is the transform of JAX on the same function.
- *Module*: a Module passed in.
- *lambda*: the function made anew at each call, a Module passed in. It is traced anew, and so is
  its opponent: ``jax.make_jaxpr`` of the transform of JAX, of a function made anew.
- *captured*: a Module that the function closes over.
- *new Module*: another Module of one structure at each call.

The opponent of the other three is the transform of JAX over a dict of the Module's arrays. Layers
and tools have one form, beside the same by hand on arrays; that of ``EMA.update`` is compiled.

Bounds, for control flow: nothing compiled after the second call in any form, with arrays at most
twice the transform of JAX, with a Module at most that and three dispatches of ``sx.jit`` more, a
function made anew at most six times JAX's trace, and no growth. Layers take at most twice the
same by hand, ``EMA.update`` and ``eval_shape`` at most three times.

    python benchmarks/eager.py --json eager.json
"""

import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from _harness import Opponent, Report, arguments, compare, measure, table
from jax.sharding import PartitionSpec

import shardax as sx

BATCH, WIDTH, STEPS = 4, 8, 3
CONTROL_FLOW = ("cond", "switch", "while_loop", "fori_loop", "bounded_while_loop", "scan")
FORMS = ("arrays", "Module", "lambda", "captured", "new Module")
ARRAYS_BOUND = 2.0
DISPATCHES = 3.0
TRACE_BOUND = 6.0
GROWTH_MIB = 20.0
LAYER_BOUND = 2.0
# Of one form, whatever the form is.
BOUNDS = {"EMA.update": 3.0, "eval_shape": 3.0}

FLAG, INDEX, COUNT = jnp.array(True), jnp.int32(1), jnp.int32(0)
X, ROWS = jnp.ones((BATCH, WIDTH)), jnp.arange(float(STEPS))
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

Function = Callable[..., Any]
Call = Callable[[], Any]


class Layer(sx.Module):
    """A product and a shift."""

    def __init__(self) -> None:
        self.kernel = sx.Param(jnp.eye(WIDTH) * 0.5)
        self.bias = sx.Param(jnp.zeros((1, WIDTH)))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.kernel + self.bias)


class Captured(Layer):
    """A layer in the place of the function, which bodies close over."""

    def __call__(self, state: Any, x: Any) -> Any:
        return super().__call__(x)


def plain_layer(weights: Any, x: Any) -> Any:
    """The same over a dict of arrays."""
    return jnp.tanh(x @ weights["kernel"] + weights["bias"])


def layer_of(weights: Any, x: Any) -> Any:
    """Calls a Module, or a dict of arrays."""
    return plain_layer(weights, x) if isinstance(weights, dict) else weights(x)


def shift(x: Any) -> Any:
    """A function of one array."""
    return jnp.tanh(x + 1)


# --- transforms -----------------------------------------------------------------------------------


class Transform(NamedTuple):
    """One transform, of shardax and of JAX, applied to a function of the state and the input."""

    apply: Callable[[Any, Function, Any, Any], Any]  # (namespace, function, state, x)
    uses_state: bool = True


def _loop(name: str) -> Callable[[Any, Function, Any, Any], Any]:
    def apply(space: Any, function: Function, state: Any, x: Any) -> Any:
        lax = space.lax
        if name == "cond":
            return lax.cond(FLAG, function, keep, state, x)
        if name == "switch":
            return lax.switch(INDEX, [keep, function], state, x)
        if name == "fori_loop":
            return lax.fori_loop(0, STEPS, lambda_body(function), (state, x))
        if name == "while_loop":
            return lax.while_loop(goes_on, counting_body(function), (state, x, COUNT))
        return space.scan(scan_body(function), (state, x), ROWS)

    return apply


def keep(state: Any, x: Any) -> Any:
    """The other branch."""
    return x


def goes_on(carry: Any) -> Any:
    """Whether a loop goes on."""
    return carry[2] < STEPS


# Bodies are made once for each function, as a program with functions at its top level has them.
_bodies: dict[tuple[str, Any], Function] = {}


def _once(kind: str, function: Function, make: Callable[[], Function]) -> Function:
    if getattr(function, "anew", False):
        return make()
    return _bodies.setdefault((kind, function), make())


def lambda_body(function: Function) -> Function:
    """A body of ``fori_loop``."""
    return _once("fori", function, lambda: lambda i, c: (c[0], function(*c)))


def counting_body(function: Function) -> Function:
    """A body of ``while_loop``."""
    return _once("while", function, lambda: lambda c: (c[0], function(c[0], c[1]), c[2] + 1))


def scan_body(function: Function) -> Function:
    """A body of ``scan``."""
    return _once("scan", function, lambda: lambda c, row: ((c[0], function(*c)), row))


def loss_of(function: Function) -> Function:
    """A number to differentiate."""
    return _once("loss", function, lambda: lambda state, x: jnp.sum(function(state, x)))


class Raw:
    """The names of JAX."""

    lax = jax.lax
    jit, vmap, grad, value_and_grad = jax.jit, jax.vmap, jax.grad, jax.value_and_grad
    remat, eval_shape = jax.checkpoint, staticmethod(jax.eval_shape)

    @staticmethod
    def scan(body: Function, carry: Any, rows: Any) -> Any:
        return jax.lax.scan(body, carry, rows)


class Shardax:
    """The names of shardax."""

    lax = sx
    jit, vmap, grad, value_and_grad = sx.jit, sx.vmap, sx.grad, sx.value_and_grad
    remat, eval_shape = sx.remat, staticmethod(sx.eval_shape)

    @staticmethod
    def scan(body: Function, carry: Any, rows: Any) -> Any:
        return sx.scan(body)(carry, rows)


def _bounded(space: Any, function: Function, state: Any, x: Any) -> Any:
    carry = (state, x, COUNT)
    if space is Raw:
        return jax.lax.while_loop(goes_on, counting_body(function), carry)
    return sx.bounded_while_loop(goes_on, counting_body(function), carry, max_steps=5).final


def _vjp(space: Any, function: Function, state: Any, x: Any) -> Any:
    value, pull = (jax if space is Raw else sx).vjp(function, state, x)
    return pull(value)


def _jvp(space: Any, function: Function, state: Any, x: Any) -> Any:
    if space is Raw:
        return jax.jvp(lambda x: function(state, x), (x,), (x,))
    return sx.jvp(function, (state, x), (sx.state(state, sx.Param), x))


def _custom_vjp(space: Any, function: Function, state: Any, x: Any) -> Any:
    def make() -> Function:
        wrapped = (jax if space is Raw else sx).custom_vjp(function)
        wrapped.defvjp(
            lambda state, x: (function(state, x), x), lambda kept, given: (None, given * kept)
        )
        return wrapped

    return _once(f"custom {space.__name__}", function, make)(state, x)


def _shard_map(space: Any, function: Function, state: Any, x: Any) -> Any:
    spec = PartitionSpec("data")
    transform = jax.shard_map if space is Raw else sx.shard_map
    return transform(function, mesh=MESH, in_specs=(PartitionSpec(), spec), out_specs=spec)(
        state, x
    )


TRANSFORMS: dict[str, Callable[[Any, Function, Any, Any], Any]] = {
    **{name: _loop(name) for name in CONTROL_FLOW if name != "bounded_while_loop"},
    "bounded_while_loop": _bounded,
    "jit": lambda space, function, state, x: space.jit(function)(state, x),
    "grad": lambda space, function, state, x: space.grad(loss_of(function))(state, x),
    "value_and_grad": lambda space, function, state, x: space.value_and_grad(loss_of(function))(
        state, x
    ),
    "vjp": _vjp,
    "jvp": _jvp,
    "custom_vjp": _custom_vjp,
    "vmap": lambda space, function, state, x: space.vmap(function, in_axes=(None, 0))(
        state, x[:, None]
    ),
    "remat": lambda space, function, state, x: space.remat(function)(state, x),
    "shard_map": _shard_map,
    "eval_shape": lambda space, function, state, x: space.eval_shape(function, state, x),
}
# Whose results may not be waited for, or that need state that is differentiated.
NEEDS_STATE = frozenset({"grad", "value_and_grad", "vjp", "jvp", "custom_vjp"})


def forms(name: str) -> Iterator[tuple[str, Call, Call]]:
    """Yields (form, call of shardax, call of JAX)."""
    apply = TRANSFORMS[name]
    weights = {"kernel": jnp.eye(WIDTH) * 0.5, "bias": jnp.zeros((1, WIDTH))}
    layer, layers = Layer(), itertools.cycle([Layer() for _ in range(4)])

    def raw() -> Any:
        return apply(Raw, layer_of, weights, X)

    def of_arrays(state: Any, x: Any) -> Any:
        return shift(x)

    if name not in NEEDS_STATE:
        yield "arrays", lambda: apply(Shardax, of_arrays, X, X), lambda: apply(Raw, of_arrays, X, X)
    yield "Module", lambda: apply(Shardax, layer_of, layer, X), raw

    def anew() -> Any:
        function = lambda state, x: layer_of(state, x)  # noqa: E731
        function.anew = True
        return apply(Shardax, function, layer, X)

    def raw_anew() -> Any:
        function = lambda state, x: layer_of(state, x)  # noqa: E731
        function.anew = True
        return jax.make_jaxpr(lambda: apply(Raw, function, weights, X))()

    yield "lambda", anew, raw_anew
    if name not in NEEDS_STATE:
        captured = Captured()
        yield "captured", lambda: apply(Shardax, captured, X, X), raw
    yield "new Module", lambda: apply(Shardax, layer_of, next(layers), X), raw


# --- layers ---------------------------------------------------------------------------------------


def layers() -> Iterator[tuple[str, Call, Call]]:
    """Yields (name, call of shardax, the same by hand on arrays)."""
    own = Layer()
    weights = {"kernel": own.kernel.value, "bias": own.bias.value}
    yield "a layer by hand", lambda: own(X), lambda: plain_layer(weights, X)

    linear = sx.nn.Linear(WIDTH, WIDTH, rngs=sx.Rngs(0))
    kernel, bias = linear.kernel.value, linear.bias.value[None]
    yield "Linear", lambda: linear(X), lambda: X @ kernel + bias

    mlp = sx.nn.MLP(WIDTH, 2 * WIDTH, rngs=sx.Rngs(0))
    gate, up, down = mlp.gate.kernel.value, mlp.up.kernel.value, mlp.down.kernel.value
    yield "MLP", lambda: mlp(X), lambda: (jax.nn.silu(X @ gate) * (X @ up)) @ down

    norm = sx.nn.LayerNorm(WIDTH, rngs=sx.Rngs(0))
    scale, shift = norm.scale.value[None], norm.bias.value[None]

    def normalized() -> Any:
        centred = X - X.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + norm.epsilon) * scale + shift

    yield "LayerNorm", lambda: norm(X), normalized


# --- tools ----------------------------------------------------------------------------------------


def tools(folder: Path) -> Iterator[tuple[str, Call, Call]]:
    """Yields (name, call of shardax, the same by hand on arrays)."""
    layer = Layer()
    weights = {"kernel": layer.kernel.value, "bias": layer.bias.value}
    gradients = sx.grad(lambda layer: jnp.sum(layer(X)))(layer)
    plain_gradients = jax.tree.map(jnp.ones_like, weights)
    transformation = optax.adam(1e-3)
    optimizer, state = sx.train.Optimizer(layer, transformation), transformation.init(weights)

    def by_hand() -> Any:
        updates, _ = transformation.update(plain_gradients, state, weights)
        return optax.apply_updates(weights, updates)

    yield "Optimizer.update", lambda: optimizer.update(gradients), by_hand
    ema = sx.train.EMA(layer, 0.99)

    @jax.jit
    def average(means: Any, values: Any) -> Any:
        return jax.tree.map(lambda mean, value: 0.99 * mean + 0.01 * value, means, values)

    yield "EMA.update", lambda: ema.update(layer), lambda: average(weights, plain_gradients)
    mean = sx.train.metrics.Average("values")
    values = jnp.ones(BATCH)
    yield (
        "metrics.Average.update",
        lambda: mean.update(values=values),
        lambda: (jnp.zeros(()) + jnp.sum(values), jnp.zeros(()) + values.size),
    )
    rngs, key = sx.Rngs(0), jax.random.key(0)
    yield "Rngs, one draw", lambda: rngs.noise(), lambda: jax.random.fold_in(key, 1)
    sharding = jax.sharding.NamedSharding(MESH, PartitionSpec())
    placed = sx.shard(Layer(), MESH, {})
    yield (
        "shard of a sharded model",
        lambda: sx.shard(placed, MESH, {}).kernel.value,
        lambda: jax.device_put(weights, sharding),
    )
    yield (
        "select(...).set",
        lambda: sx.select(layer).at(lambda m: m.bias).set(sx.Param(jnp.zeros((1, WIDTH)))),
        lambda: weights | {"bias": jnp.zeros((1, WIDTH))},
    )
    yield "clone", lambda: sx.clone(layer).kernel.value, lambda: dict(weights)

    def split_and_merge() -> Any:
        return sx.merge(*sx.split(layer)).kernel.value

    def flatten_and_unflatten() -> Any:
        leaves, treedef = jax.tree.flatten(weights)
        return treedef.unflatten(leaves)

    yield "split and merge", split_and_merge, flatten_and_unflatten
    yield "state", lambda: jax.tree.leaves(sx.state(layer)), lambda: jax.tree.leaves(weights)
    decoder = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
    prompts = [[1, 2, 3, 4]]
    by_jit = jax.jit(lambda x: jnp.tanh(x @ weights["kernel"]))
    yield (
        "generate, one token",
        lambda: sx.models.generate(decoder, prompts, max_new_tokens=1),
        lambda: by_jit(X),
    )
    numbers = itertools.count()

    def save() -> Any:
        sx.train.checkpoint.save(layer, folder / str(next(numbers)))
        return X

    def save_by_hand() -> Any:
        jnp.savez(folder / "by_hand.npz", **weights)
        return X

    yield "checkpoint.save", save, save_by_hand


# --- measurement ----------------------------------------------------------------------------------


@contextmanager
def counted_programs() -> Iterator[list[int]]:
    """Counts the programs that JAX compiles inside."""
    count = [0]

    def on_event(event: str, duration: float, **_: Any) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def opponent(name: str, call: Call) -> Opponent:
    """A call as the harness takes it."""

    def run(calls: int) -> Any:
        result = None
        for _ in range(calls):
            result = call()
        leaves = jax.tree.leaves(result)
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    return Opponent(name, run)


def measured(ours: Call, raw: Call, repeats: int, growth_calls: int) -> dict[str, Any]:
    """Returns the figures of one call beside its opponent."""
    opponents = [opponent("shardax", ours), opponent("jax", raw)]
    for each in opponents:
        each.run(2)
    with counted_programs() as count:
        opponents[0].run(3)
    compilations = count[0] / 3
    samples = measure(opponents, repeats=repeats, block_seconds=0.02)
    comparison = compare(samples, "jax")["shardax"]
    gc.collect()
    before = resident_mib()
    opponents[0].run(growth_calls)
    gc.collect()
    return {
        "ms": comparison.samples.median * 1e3,
        "jax_ms": samples[1].median * 1e3,
        "ratio": comparison.record()["ratio_median"],
        "ratio_min": comparison.record()["ratio_min"],
        "compilations": compilations,
        "growth_mib": resident_mib() - before,
    }


def dispatch_ms(repeats: int) -> float:
    """Milliseconds that ``sx.jit`` takes beyond ``jax.jit`` and its work, with a Module."""
    layer = Layer()
    call = sx.jit(lambda layer, x: x + 1)
    (sample,) = measure([opponent("jit", lambda: call(layer, X))], repeats=repeats)
    return sample.median * 1e3


def main() -> int:
    """Measure, print the tables, hold the bounds."""
    options = arguments(__doc__, repeats=7).parse_args()
    repeats = 2 if options.quick else options.repeats
    growth_calls = 5 if options.quick else 300
    names = ("cond", "scan", "grad") if options.quick else tuple(TRANSFORMS)
    settings = {"repeats": repeats, "growth_calls": growth_calls, "batch": BATCH, "width": WIDTH}
    report = Report("eager", settings)
    dispatch = dispatch_ms(repeats)
    rows = []
    for name in names:
        for form, ours, raw in forms(name):
            figures = measured(ours, raw, repeats, growth_calls)
            report.records.append({"name": name, "form": form, **figures})
            rows.append(row_of(f"{name}, {form}", figures))
            if name in CONTROL_FLOW and not options.quick:
                hold(report, name, form, figures, dispatch)
            hold_ratio(report, name, form, figures, BOUNDS.get(name))
    for name, ours, raw in [] if options.quick else layers():
        figures = measured(ours, raw, repeats, growth_calls)
        report.records.append({"name": name, "form": "layer", **figures})
        rows.append(row_of(name, figures))
        hold_ratio(report, name, "layer", figures, LAYER_BOUND)
    with tempfile.TemporaryDirectory() as folder:
        for name, ours, raw in [] if options.quick else tools(Path(folder)):
            few = 20 if name in ("checkpoint.save", "generate, one token") else growth_calls
            figures = measured(ours, raw, repeats, few)
            report.records.append({"name": name, "form": "tool", **figures})
            rows.append(row_of(name, figures))
            hold_ratio(report, name, "tool", figures, BOUNDS.get(name))
    headers = ["call", "ms", "JAX, ms", "ratio", "compiled a call", "growth, MiB"]
    print(table(headers, rows))
    print(f"One dispatch of sx.jit with a Module of two Variables: {dispatch:.3f} ms.")
    return report.finish(options)


def row_of(name: str, figures: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        name,
        f"{figures['ms']:.3f}",
        f"{figures['jax_ms']:.3f}",
        f"{figures['ratio']:.2f}",
        f"{figures['compilations']:.1f}",
        f"{figures['growth_mib']:.1f}",
    ]


def hold(report: Report, name: str, form: str, figures: dict[str, Any], dispatch: float) -> None:
    """Notes the bounds that do not hold."""
    if figures["compilations"] > 0:
        report.failures.append(f"{name}, {form}: compiles after the second call.")
    if figures["growth_mib"] > GROWTH_MIB:
        report.failures.append(f"{name}, {form}: grows by {figures['growth_mib']:.0f} MiB.")
    if form == "arrays" and figures["ratio"] > ARRAYS_BOUND:
        report.failures.append(f"{name}, arrays: {figures['ratio']:.2f} of JAX.")
    if form == "lambda" and figures["ratio"] > TRACE_BOUND:
        report.failures.append(f"{name}, lambda: {figures['ratio']:.2f} of JAX's trace.")
    is_steady = form not in ("arrays", "lambda")
    if is_steady and figures["ms"] > figures["jax_ms"] + DISPATCHES * dispatch:
        report.failures.append(f"{name}, {form}: {figures['ms']:.3f} ms.")


def hold_ratio(
    report: Report, name: str, form: str, figures: dict[str, Any], bound: float | None
) -> None:
    """Notes that a call takes more than a bound times its opponent."""
    # The least of the ratios, as the median is that of a busy machine.
    if bound is not None and figures["ratio_min"] > bound:
        report.failures.append(f"{name}, {form}: {figures['ratio_min']:.2f} of JAX.")


if __name__ == "__main__":
    sys.exit(main())
