# SPDX-License-Identifier: Apache-2.0
"""`shardax train --preset tiny --steps 1` up to its first step, by hand in raw JAX and optax.

The opponent of `train_startup.py`: the decoder of `raw_decoder.py`, the same text, sizes, optimizer
and layout, the same record in `log.jsonl` and the same line. Parameters and the optimizer's state
are made by one compiled program, straight into their shardings; the step is another one.

    python benchmarks/raw_train.py --text README.md --out /tmp/raw-run
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import raw_decoder as raw
from jax.sharding import AxisType, NamedSharding, PartitionSpec

BATCH, LENGTH, STEPS = 16, 64, 1
CONFIG = raw.Config(
    vocab=256, layers=2, embed=64, heads=4, kv_heads=4, head_dim=16, mlp=256, tied=True
)
RULES = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}


def make_optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """Clipping and AdamW, with a warmup and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 1, max(steps, 2), rate / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_batch(text: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Windows of the text, and the bytes that follow each."""
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, BATCH)
    rows = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def layout(mesh: Any, tx: Any) -> tuple[Any, Any, Any]:
    """Shardings of parameters, optimizer state and batch; None without a mesh."""
    if mesh is None:
        return None, None, None
    params = jax.eval_shape(functools.partial(raw.init, CONFIG), jax.random.key(0))

    def sharding(names: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(RULES.get(name) for name in names)))

    def is_names(each: Any) -> bool:
        return isinstance(each, tuple)

    of_params = jax.tree.map(sharding, raw.axes(CONFIG), is_leaf=is_names)
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(tx.init, params)
    of_state = optax.tree_map_params(
        tx, lambda _, each: each, state, of_params, transform_non_params=lambda _: whole
    )
    return of_params, of_state, NamedSharding(mesh, PartitionSpec("data"))


def main() -> None:
    """Takes the first step and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mesh", default="", help="sizes of data and model, such as 2,4")
    parser.add_argument("--devices", type=int)
    options = parser.parse_args()
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = None
    if options.mesh:
        sizes = tuple(map(int, options.mesh.split(",")))
        mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    text = np.memmap(options.text, dtype=np.uint8, mode="r")
    tx = make_optimizer(STEPS, 1e-2)
    of_params, of_state, of_batch = layout(mesh, tx)

    @functools.partial(jax.jit, out_shardings=None if mesh is None else (of_params, of_state))
    def init(key: Any) -> Any:
        params = raw.init(CONFIG, key)
        return params, tx.init(params)

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1),
        out_shardings=None if mesh is None else (of_params, of_state, None, None),
    )
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: raw.loss(CONFIG, p, batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.global_norm(grads)

    params, state = init(jax.random.key(0))
    batch = jax.device_put(make_batch(text, 0), of_batch)
    params, state, loss, norm = step(params, state, batch)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"step": 1, "loss": float(loss), "grad_norm": float(norm), "learning_rate": 0.0}
    with open(options.out / "log.jsonl", "a") as log:
        log.write(json.dumps(record) + "\n")
    print(f"step 1/{STEPS}  loss {record['loss']:.4f}  ETA 0:00", flush=True)
    assert jnp.isfinite(record["loss"])


if __name__ == "__main__":
    main()
