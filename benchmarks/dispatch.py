# SPDX-License-Identifier: Apache-2.0
"""What a call of a compiled function costs beyond the work it does, by number of variables.

Opponents, all in one process, over the same arrays of shape (4,) in layers of two variables:

- `jax.jit`: a nested dictionary of arrays, handed back and forth by hand. The baseline.
- `jax.jit flat`: the same over one flat list: no dictionary to walk and sort. The floor.
- `shardax.jit`: a Module that owns Variables, updated in place.
- `equinox.filter_jit`: a Module that is a pytree, handed back and forth.
- `nnx.jit`: a Module updated in place, default flags.
- `nnx.jit tree`: `graph=False, graph_updates=False`, its fastest flags (shared references not
  supported).
- `nnx.jit_partial`: as `tree`, the Module flattened once when the function is made.
- `penzai.variable_jit`: a tree of variables updated in place; for (c) its `StatefulTrainer`.

Work: (a) `update`: write every variable; (b) `forward`: read every variable, return a scalar; (c)
`train`: value and gradient of a squared error, then an optax step, on (model, optimizer, batch).
Each once more with donation of what it updates, for `jax.jit` and `shardax.jit` (`forward` updates
nothing and is left out there).

`--references` compares ways of writing in place instead, for `update` and `forward`:

- `jax.jit refs`: a list of `jax.Ref`.
- `shardax.jit`, as above; `shardax.jit refs`: its Variables hold Refs.
- `jax.jit, Module of refs`: that Module as an argument of plain `jax.jit`.
- `nnx.jit hijax`, `jax.jit, hijax`: a Module of hijax Variables, in tree mode and under plain
  `jax.jit`. Both have no derivatives of these (Flax 0.12.8), so there is no `train`.

Bounds on the median over repeats: `shardax.jit` takes at most 1.10 of `jax.jit` from 128 variables
on, and at most 8 microseconds more than `jax.jit` below.

    python benchmarks/dispatch.py --json dispatch.json
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _harness import Opponent, Report, arguments, compare, measure, table

SHAPE = (4,)
DECAY = 0.999
SIZES = (2, 16, 128, 512, 2048)
QUICK_SIZES = (2, 16)
REFERENCES = [
    "jax.jit refs",
    "shardax.jit",
    "shardax.jit refs",
    "jax.jit, Module of refs",
    "nnx.jit hijax",
    "jax.jit, hijax",
]
BOUND_RATIO = 1.10
BOUND_RATIO_FROM = 128
BOUND_EXTRA_MICROSECONDS = 8.0

Run = Callable[[int], Any]
Pairs = Iterable[tuple[Any, Any]]


def initial(size: int) -> list[tuple[jax.Array, jax.Array]]:
    """Fresh arrays for `size` variables: a (kernel, bias) pair per layer."""
    one = jnp.ones(SHAPE)
    return [(one * (i + 1) / size, one * 0.5) for i in range(size // 2)]


def batch() -> dict[str, jax.Array]:
    """The input of every call."""
    return {"x": jnp.full(SHAPE, 1e-3), "y": jnp.full(SHAPE, 0.25)}


def predict(pairs: Pairs, x: jax.Array) -> jax.Array:
    """(b): the sum of every layer's output; one reduction, so that the work stays small."""
    return jnp.sum(sum((kernel * x + bias for kernel, bias in pairs), start=jnp.zeros(SHAPE)))


def error(pairs: Pairs, x: jax.Array, y: jax.Array) -> jax.Array:
    """(c): the sum of every layer's squared error, a scalar."""
    squares = ((kernel * x + bias - y) ** 2 for kernel, bias in pairs)
    return jnp.sum(sum(squares, start=jnp.zeros(SHAPE)))


def jax_nested(work: str, size: int, donate: bool, tx: optax.GradientTransformation) -> Run:
    """`jax.jit` over a dictionary of layers, each a dictionary of two arrays."""
    layers = {f"layer_{i}": {"kernel": k, "bias": b} for i, (k, b) in enumerate(initial(size))}
    return _pure_jax(work, {"layers": layers}, _nested_pairs, donate, tx)


def jax_flat(work: str, size: int, donate: bool, tx: optax.GradientTransformation) -> Run:
    """`jax.jit` over one flat list of arrays."""
    flat = [array for pair in initial(size) for array in pair]
    return _pure_jax(work, flat, lambda p: zip(p[::2], p[1::2], strict=True), donate, tx)


def _nested_pairs(params: Any) -> Pairs:
    """The (kernel, bias) pairs of the nested dictionary."""
    return ((layer["kernel"], layer["bias"]) for layer in params["layers"].values())


def _pure_jax(
    work: str,
    params: Any,
    pairs: Callable[[Any], Pairs],
    donate: bool,
    tx: optax.GradientTransformation,
) -> Run:
    """The three kinds of work as pure functions over any tree of arrays."""
    data = batch()

    def update(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda v: v * DECAY + x, params)

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return predict(pairs(params), x)

    def train(params: Any, state: Any, data: dict[str, jax.Array]) -> Any:
        def objective(p: Any) -> jax.Array:
            return error(pairs(p), data["x"], data["y"])

        loss, grads = jax.value_and_grad(objective)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    if work == "update":
        step = jax.jit(update, donate_argnums=(0,) if donate else ())
        return _carry(lambda carried: (step(carried[0], data["x"]),), (params,))
    if work == "forward":
        call = jax.jit(forward)
        return _repeat(lambda: call(params, data["x"]))
    step = jax.jit(train, donate_argnums=(0, 1) if donate else ())
    carried = (params, tx.init(params), jnp.zeros(()))
    return _carry(lambda c: step(c[0], c[1], data), carried)


def _carry(step: Callable[[Any], Any], carried: Any) -> Run:
    """A run that hands the result of each call to the next."""

    def run(calls: int) -> Any:
        nonlocal carried
        for _ in range(calls):
            carried = step(carried)
        return jax.tree.leaves(carried)[-1]

    return run


def _repeat(call: Callable[[], Any], result: Callable[[Any], Any] = lambda out: out) -> Run:
    """A run of calls that carry their state in an object."""

    def run(calls: int) -> Any:
        out = None
        for _ in range(calls):
            out = call()
        return result(out)

    return run


def jax_refs(work: str, size: int) -> Run:
    """`jax.jit` over a list of pairs of `jax.Ref`, written in place."""
    refs, x = [(jax.new_ref(k), jax.new_ref(b)) for k, b in initial(size)], batch()["x"]

    def update(refs: Any, x: jax.Array) -> None:
        for pair in refs:
            for ref in pair:
                ref[...] = ref[...] * DECAY + x

    def forward(refs: Any, x: jax.Array) -> jax.Array:
        return predict(((kernel[...], bias[...]) for kernel, bias in refs), x)

    if work == "update":
        step = jax.jit(update)
        return _repeat(lambda: step(refs, x), lambda _: refs[-1][1][...])
    call = jax.jit(forward)
    return _repeat(lambda: call(refs, x))


def shardax_jit(
    work: str,
    size: int,
    donate: bool,
    tx: optax.GradientTransformation,
    *,
    refs: bool = False,
    plain: bool = False,
) -> Run:
    """`shardax.jit`, or plain `jax.jit`, over a Module of Variables that hold arrays or Refs."""
    import shardax as sx

    class Layer(sx.Module):
        def __init__(self, kernel: jax.Array, bias: jax.Array) -> None:
            self.kernel = sx.Param(jax.new_ref(kernel) if refs else kernel)
            self.bias = sx.Param(jax.new_ref(bias) if refs else bias)

    class Model(sx.Module):
        def __init__(self) -> None:
            self.layers = [Layer(kernel, bias) for kernel, bias in initial(size)]

        def pairs(self) -> Pairs:
            return ((layer.kernel.value, layer.bias.value) for layer in self.layers)

    model, data = Model(), batch()

    def update(model: Model, x: jax.Array) -> None:
        for layer in model.layers:
            layer.kernel.value = layer.kernel.value * DECAY + x
            layer.bias.value = layer.bias.value * DECAY + x

    def forward(model: Model, x: jax.Array) -> jax.Array:
        return predict(model.pairs(), x)

    def train(model: Model, optimizer: Any, data: dict[str, jax.Array]) -> jax.Array:
        def objective(model: Model) -> jax.Array:
            return error(model.pairs(), data["x"], data["y"])

        loss, grads = sx.value_and_grad(objective)(model)
        optimizer.update(grads)
        return loss

    if work == "update":
        step = jax.jit(update) if plain else sx.jit(update, donate_argnums=(0,) if donate else None)
        return _repeat(lambda: step(model, data["x"]), lambda _: model.layers[-1].bias.value)
    if work == "forward":
        call = (jax.jit if plain else sx.jit)(forward)
        return _repeat(lambda: call(model, data["x"]))
    from shardax.train import Optimizer

    optimizer = Optimizer(model, tx)
    step = sx.jit(train, donate_argnums=(0, 1) if donate else None)
    return _repeat(lambda: step(model, optimizer, data))


def equinox_jit(work: str, size: int, donate: bool, tx: optax.GradientTransformation) -> Run:
    """`equinox.filter_jit` over a Module that is a pytree; in and out by hand."""
    import equinox as eqx

    class Layer(eqx.Module):
        kernel: jax.Array
        bias: jax.Array

    class Model(eqx.Module):
        layers: list[Layer]

        def pairs(self) -> Pairs:
            return ((layer.kernel, layer.bias) for layer in self.layers)

    model, data = Model([Layer(kernel, bias) for kernel, bias in initial(size)]), batch()

    def update(model: Model, x: jax.Array) -> Model:
        return jax.tree.map(lambda v: v * DECAY + x, model)

    def forward(model: Model, x: jax.Array) -> jax.Array:
        return predict(model.pairs(), x)

    def train(model: Model, state: Any, data: dict[str, jax.Array]) -> Any:
        def objective(model: Model) -> jax.Array:
            return error(model.pairs(), data["x"], data["y"])

        loss, grads = eqx.filter_value_and_grad(objective)(model)
        updates, state = tx.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    if work == "update":
        step = eqx.filter_jit(update)
        return _carry(lambda carried: (step(carried[0], data["x"]),), (model,))
    if work == "forward":
        call = eqx.filter_jit(forward)
        return _repeat(lambda: call(model, data["x"]))
    step = eqx.filter_jit(train)
    carried = (model, tx.init(eqx.filter(model, eqx.is_array)), jnp.zeros(()))
    return _carry(lambda c: step(c[0], c[1], data), carried)


def nnx_jit(mode: str, work: str, size: int, tx: optax.GradientTransformation) -> Run:
    """`nnx.jit`: "default", "tree", "partial" or "hijax"; "plain" is `jax.jit` with hijax."""
    from flax import nnx

    hijax = mode in ("hijax", "plain")

    flags = {} if mode == "default" else {"graph": False, "graph_updates": False}
    graph = None if mode == "default" else False

    class Layer(nnx.Module):
        def __init__(self, kernel: jax.Array, bias: jax.Array) -> None:
            self.kernel = nnx.Param(kernel, hijax=hijax)
            self.bias = nnx.Param(bias, hijax=hijax)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer(kernel, bias) for kernel, bias in initial(size)])

        def pairs(self) -> Pairs:
            return ((layer.kernel[...], layer.bias[...]) for layer in self.layers)

    model, data = Model(), batch()

    def update(model: Model, x: jax.Array) -> None:
        for layer in model.layers:
            layer.kernel.set_value(layer.kernel[...] * DECAY + x)
            layer.bias.set_value(layer.bias[...] * DECAY + x)

    def forward(model: Model, x: jax.Array) -> jax.Array:
        return predict(model.pairs(), x)

    def train(model: Model, optimizer: Any, data: dict[str, jax.Array]) -> jax.Array:
        def objective(model: Model) -> jax.Array:
            return error(model.pairs(), data["x"], data["y"])

        loss, grads = nnx.value_and_grad(objective, **flags)(model)
        optimizer.update(model, grads)
        return loss

    functions: dict[str, Any] = {"update": update, "forward": forward, "train": train}
    held: tuple[Any, ...] = (model,)
    if work == "train":
        held = (model, nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph))
    inputs = data if work == "train" else data["x"]
    if mode == "partial":
        call = partial(nnx.jit_partial(functions[work], *held, **flags), inputs)
    elif mode == "plain":
        call = partial(jax.jit(functions[work]), *held, inputs)
    else:
        call = partial(nnx.jit(functions[work], **flags), *held, inputs)
    if work == "update":
        return _repeat(call, lambda _: model.layers[-1].bias[...])
    return _repeat(call)


def penzai_jit(work: str, size: int, tx: optax.GradientTransformation) -> Run:
    """`penzai.variable_jit` over a tree of Parameters; for "train" penzai's own trainer."""
    from penzai import pz
    from penzai.toolshed import basic_training

    @pz.pytree_dataclass
    class Layer(pz.Struct):
        kernel: pz.Parameter
        bias: pz.Parameter

    @pz.pytree_dataclass
    class Model(pz.Struct):
        layers: list[Layer]

        def pairs(self) -> Pairs:
            return ((layer.kernel.value, layer.bias.value) for layer in self.layers)

    def parameter(label: str, value: jax.Array) -> pz.Parameter:
        return pz.Parameter(value=value, label=label)

    layers = [
        Layer(parameter(f"{i}.kernel", kernel), parameter(f"{i}.bias", bias))
        for i, (kernel, bias) in enumerate(initial(size))
    ]
    model, data = Model(layers), batch()

    def update(model: Model, x: jax.Array) -> None:
        for layer in model.layers:
            layer.kernel.value = layer.kernel.value * DECAY + x
            layer.bias.value = layer.bias.value * DECAY + x

    def forward(model: Model, x: jax.Array) -> jax.Array:
        return predict(model.pairs(), x)

    def objective(*, model: Model, state: Any, rng: Any, x: jax.Array, y: jax.Array) -> Any:
        del rng
        loss = error(model.pairs(), x, y)
        return loss, state, loss

    if work == "update":
        step = pz.variable_jit(update)
        return _repeat(lambda: step(model, data["x"]), lambda _: model.layers[-1].bias.value)
    if work == "forward":
        call = pz.variable_jit(forward)
        return _repeat(lambda: call(model, data["x"]))
    trainer = basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(0), model=model, optimizer_def=tx, loss_fn=objective
    )
    return _repeat(lambda: trainer.step(**data))


def opponents(
    names: Iterable[str], work: str, size: int, donate: bool, tx: optax.GradientTransformation
) -> list[Opponent]:
    """The opponents asked for, each with fresh state; with donation only `jax` and `shardax`."""
    makers: dict[str, tuple[str, Callable[[], Run]]] = {
        "jax.jit": ("jax", lambda: jax_nested(work, size, donate, tx)),
        "jax.jit flat": ("jax", lambda: jax_flat(work, size, donate, tx)),
        "shardax.jit": ("shardax", lambda: shardax_jit(work, size, donate, tx)),
    }
    if not donate:
        makers |= {
            "equinox.filter_jit": ("equinox", lambda: equinox_jit(work, size, donate, tx)),
            "nnx.jit": ("flax", lambda: nnx_jit("default", work, size, tx)),
            "nnx.jit tree": ("flax", lambda: nnx_jit("tree", work, size, tx)),
            "nnx.jit_partial": ("flax", lambda: nnx_jit("partial", work, size, tx)),
            "penzai.variable_jit": ("penzai", lambda: penzai_jit(work, size, tx)),
            "jax.jit refs": ("jax", lambda: jax_refs(work, size)),
            "shardax.jit refs": ("shardax", lambda: shardax_jit(work, size, donate, tx, refs=True)),
            "jax.jit, Module of refs": (
                "shardax",
                lambda: shardax_jit(work, size, donate, tx, refs=True, plain=True),
            ),
            "nnx.jit hijax": ("flax", lambda: nnx_jit("hijax", work, size, tx)),
            "jax.jit, hijax": ("flax", lambda: nnx_jit("plain", work, size, tx)),
        }
    chosen = [(name, *makers[name]) for name in makers if name in names or name == "jax.jit"]
    return [Opponent(name, make()) for name, package, make in chosen if installed(package)]


def installed(package: str) -> bool:
    """Whether an opponent's package is here."""
    return importlib.util.find_spec(package) is not None


def bound_failures(record: dict[str, Any]) -> list[str]:
    """What is wrong with a record of `shardax.jit`, a sentence each; none if it holds."""
    if record["name"] != "shardax.jit":
        return []
    what = f"{record['work']}{' donated' if record['donate'] else ''}, {record['size']} variables"
    if record["size"] >= BOUND_RATIO_FROM:
        ratio = record["ratio_median"]
        holds = ratio <= BOUND_RATIO
        return [] if holds else [f"{what}: {ratio:.3f} of jax.jit, at most {BOUND_RATIO}"]
    extra = record["extra_median_us"]
    holds = extra <= BOUND_EXTRA_MICROSECONDS
    return [] if holds else [f"{what}: {extra:.1f} us extra, at most {BOUND_EXTRA_MICROSECONDS}"]


def print_table(records: list[dict[str, Any]], work: str, donate: bool) -> None:
    """One table: a row per opponent, and per size its time.

    A cell has the least time, its ratio to that of jax.jit, and the median ratio over repeats.
    """
    mine = [r for r in records if r["work"] == work and r["donate"] == donate]
    sizes = sorted({r["size"] for r in mine})
    cells = {(r["name"], r["size"]): r for r in mine}
    rows = []
    for name in dict.fromkeys(r["name"] for r in mine):
        here = [cells[name, size] for size in sizes]
        base = [cells["jax.jit", size]["min_us"] for size in sizes]
        rows.append([name, *map(_cell, here, base)])
    print(f"\n### {work}{', donated' if donate else ''}\n")
    print(table(["call", *(f"{size} variables" for size in sizes)], rows), flush=True)


def _cell(record: dict[str, Any], base: float) -> str:
    """The least time of a call, and its ratios to jax.jit."""
    least = record["min_us"]
    return f"{least:.1f} us, {least / base:.2f}x, {record['ratio_median']:.2f}x"


def main() -> int:
    """Measure, print one table per kind of work, and check the bounds."""
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--sizes", type=int, nargs="*", default=None)
    parser.add_argument("--work", nargs="*", default=["update", "forward", "train"])
    parser.add_argument("--opponents", nargs="*", default=None, help="a subset, by table name")
    parser.add_argument("--references", action="store_true", help="ways of writing in place")
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    parser.add_argument("--block-ms", type=float, default=30.0, help="length of a timed block")
    options = parser.parse_args()
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    repeats = min(options.repeats, 3) if options.quick else options.repeats
    everyone = ["jax.jit flat", "shardax.jit", "equinox.filter_jit", "nnx.jit", "nnx.jit tree"]
    everyone += ["nnx.jit_partial", "penzai.variable_jit"]
    names = options.opponents or (REFERENCES if options.references else everyone)
    works = [w for w in options.work if not (options.references and w == "train")]
    tx = optax.adam(1e-3) if options.optimizer == "adam" else optax.sgd(1e-3)
    report = Report("dispatch", {"sizes": sizes, "repeats": repeats, "tx": options.optimizer})
    for donate in (False,) if options.references else (False, True):
        for work in works:
            if donate and work == "forward":
                continue
            for size in sizes:
                competing = opponents(names, work, size, donate, tx)
                block_seconds = options.block_ms / 1e3
                samples = measure(competing, repeats=repeats, block_seconds=block_seconds)
                for comparison in compare(samples, "jax.jit").values():
                    about = {"work": work, "size": size, "donate": donate}
                    report.records.append(about | comparison.record())
                jax.clear_caches()
            print_table(report.records, work, donate)
    report.failures = [line for record in report.records for line in bound_failures(record)]
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
