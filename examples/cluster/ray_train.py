# SPDX-License-Identifier: Apache-2.0
"""A run on a Ray cluster.

    python examples/cluster/ray_train.py /shared/runs/ray

Ray starts the workers, and all of them again when one fails; each is a process of the job. The
folder is one that all nodes see: there the run goes on from its newest good checkpoint.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
from ray.train.v2.jax import JaxTrainer

GPUS_OF_A_WORKER = 0  # 0: two virtual CPU devices each, to try it on one machine
WORKERS = 2


def join() -> None:
    """Makes this worker one of the processes, unless Ray has done so."""
    import jax

    import shardax as sx

    context = ray.train.get_context()
    address = None
    if context.get_world_rank() == 0:
        with socket.socket() as found:
            found.bind(("", 0))
            address = f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"
    address = ray.train.collective.broadcast_from_rank_zero(address)
    if not jax.distributed.is_initialized():
        sx.distributed.initialize(address, context.get_world_size(), context.get_world_rank())


def train(settings: dict[str, Any]) -> None:
    """What every worker runs."""
    os.environ |= {} if GPUS_OF_A_WORKER else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    join()
    import jax
    import optax

    import shardax as sx

    text = sx.train.ByteText.from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    model = sx.models.Decoder(sx.models.DecoderConfig(), rngs=sx.Rngs(0))
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.adamw(1e-3)),
        sx.models.next_token_loss,
        sx.train.TrainBatches(text.whole, batch_size=16, seq_len=64),
        directory=Path(settings["folder"]),
        settings=sx.train.TrainerSettings(steps=settings["steps"], checkpoint_every=20),
        mesh=jax.make_mesh((jax.device_count(),), ("data",)),
        rules={"batch": "data", "embed": "data"},
    )
    result = trainer.run(resume=True)  # from the newest good checkpoint, if there is one
    ray.train.report({"step": result.step, "loss": result.loss})


if __name__ == "__main__":
    resources = {"GPU": GPUS_OF_A_WORKER} if GPUS_OF_A_WORKER else {"CPU": 1}
    JaxTrainer(
        train,
        train_loop_config={"folder": sys.argv[1], "steps": 60},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker=resources),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()
