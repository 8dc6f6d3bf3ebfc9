# SPDX-License-Identifier: Apache-2.0
"""Pipelines of one executable a stage: the same results as the whole model on one device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import PartitionError
from shardax.train import PipelineStep, Schedule, accumulated_value_and_grad
from shardax.train.pipeline.programs import cut
from tests.advice import run_advice
from tests.values import with_values

ROWS, WIDTH, VOCAB = 16, 8, 32
RULES = {"batch": "data", "mlp": "model", "vocab": "model"}


class Embed(sx.Module):
    """Tokens to vectors; hands the mask on."""

    def __init__(self, seed: int) -> None:
        self.embed = sx.nn.Embed(VOCAB, WIDTH, rngs=sx.Rngs(seed))

    def __call__(self, batch: Any) -> Any:
        return {"x": self.embed(batch["tokens"]), "mask": batch["mask"]}


class Block(sx.Module):
    """A perceptron of its own width, beside what it does not change."""

    def __init__(self, seed: int, width: int, rate: float = 0.0, rngs: Any = None) -> None:
        rngs = sx.Rngs(seed) if rngs is None else rngs
        self.mlp = sx.nn.MLP(WIDTH, width, rngs=rngs)
        self.dropout = sx.nn.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, given: Any) -> Any:
        x = given["x"] + self.mlp(given["x"])
        return given | {"x": x if self.dropout is None else self.dropout(x)}


class Head(sx.Module):
    """Logits, of which the mask takes some away."""

    def __init__(self, seed: int) -> None:
        self.head = sx.nn.Linear(WIDTH, VOCAB, rngs=sx.Rngs(seed))

    def __call__(self, given: Any) -> Any:
        return self.head(given["x"]) * given["mask"][..., None]


def make(rate: float = 0.0) -> list[Any]:
    stages = [Embed(0), Block(1, 16, rate), Block(2, 32, rate), Head(3)]
    return [with_values(stage, seed) for seed, stage in enumerate(stages)]


def cross_entropy(logits: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_batch() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (ROWS, 4))
    return {"tokens": tokens, "mask": random.integers(0, 2, (ROWS, 4))}, (tokens + 1) % VOCAB


def make_mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    kinds = (kind,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


class Whole(sx.Module):
    """The model that the stages are of."""

    def __init__(self, stages: list[Any]) -> None:
        self.stages = stages

    def __call__(self, x: Any) -> Any:
        for stage in self.stages:
            x = stage(x)
        return x


def whole(stages: list[Any], microbatches: int) -> Any:
    """The loss and gradients of the stages on one device."""

    def total(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    step = sx.jit(accumulated_value_and_grad(total, microbatches))
    value, gradients = step(Whole(stages), make_batch())
    return value, [gradients.stages[i] for i in range(len(stages))]


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    one, other = (dict(sx.State(tree).flat()) for tree in (found, wanted))
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_allclose(
            np.asarray(value), np.asarray(other[path]), atol=tolerance, err_msg=str(path)
        )


@functools.cache
def whole_of_four() -> Any:
    """The loss and gradients of ``make()``, computed once."""
    return whole(make(), 4)


# Each kind of axes and each split of a stage; gpipe and 1f1b order the same programs.
@pytest.mark.parametrize(
    ("schedule", "kind", "sizes"),
    [
        ("gpipe", AxisType.Explicit, {"stage": 4, "data": 1, "model": 2}),
        ("1f1b", AxisType.Auto, {"data": 2, "stage": 4, "model": 1}),
        ("zero-bubble", AxisType.Explicit, {"data": 2, "stage": 4, "model": 1}),
        ("zero-bubble", AxisType.Auto, {"stage": 4, "data": 1, "model": 2}),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_the_whole_model(
    schedule: str, kind: AxisType, sizes: dict[str, int]
) -> None:
    value, wanted = whole_of_four()
    mesh = make_mesh(kind, **sizes)
    step = PipelineStep(
        make(), cross_entropy, mesh=mesh, rules=RULES, microbatches=4, schedule=schedule
    )
    for _ in range(2):
        loss, gradients = step(*make_batch())
        assert float(loss) == pytest.approx(float(value), abs=1e-6)
        for number, grads in enumerate(gradients):
            assert_close(grads, wanted[number])
            for path, each in grads.flat().items():
                parameter = sx.state(step.stages[number]).flat()[path]
                assert each.sharding == parameter.sharding
                assert each.sharding.device_set == set(step.meshes[number].devices.flat)


class Normalized(sx.Module):
    """A layer with running statistics, a stream and something that it sows."""

    def __init__(self, seed: int, rngs: Any = None) -> None:
        self.norm = sx.nn.BatchNorm(WIDTH, rngs=sx.Rngs(seed))
        self.linear = sx.nn.Linear(WIDTH, WIDTH, rngs=sx.Rngs(seed))
        self.dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(seed) if rngs is None else rngs)

    def __call__(self, x: Any) -> Any:
        y = self.dropout(self.norm(self.linear(x)))
        self.sow("size", jnp.mean(y**2))
        return jnp.tanh(y)


def squares(y: Any, target: Any) -> Any:
    return jnp.mean((y - target) ** 2)


def states(stages: Any) -> list[Any]:
    return [sx.state(stage) for stage in stages]


def test_streams_state_and_sown_values_ignore_the_mesh() -> None:
    x, target = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)

    def run(schedule: str, **sizes: int) -> Any:
        shared = sx.Rngs(7)  # all stages draw from one stream
        stages = [Normalized(i, shared if i < 2 else None) for i in range(4)]
        stages = [with_values(stage, seed) for seed, stage in enumerate(stages)]
        rules = {"batch": "data"} if "data" in sizes else {}
        options: dict[str, Any] = {"rules": rules, "schedule": schedule}
        step = PipelineStep(stages, squares, mesh=make_mesh(**sizes), microbatches=4, **options)
        found = [step(x, target) for _ in range(2)]
        assert float(found[0][0]) != float(found[1][0])  # other numbers are drawn
        return found[1], states(stages)

    (value, gradients), after = run("gpipe", stage=1)
    means = [float(np.abs(np.asarray(after[number].norm.mean)).max()) for number in range(4)]
    assert min(means) > 0
    counts = [path for path in after[0].flat() if path[-1] == "count"]
    assert counts and all(int(after[0].flat()[path]) == 4 for path in counts)  # 2 stages, 2 steps
    for schedule, sizes in (
        ("zero-bubble", {"stage": 4, "data": 2}),
        ("interleaved", {"stage": 2, "data": 2}),
    ):
        (other, others), here = run(schedule, **sizes)
        assert float(other) == pytest.approx(float(value), rel=1e-5)
        for number in range(4):
            assert_close(others[number], gradients[number], 1e-5)
            one, two = here[number].flat(), after[number].flat()
            assert one.keys() == two.keys()
            for path in one:
                for each, wanted in zip(*map(jax.tree.leaves, (one[path], two[path])), strict=True):
                    if not jnp.issubdtype(each.dtype, jax.dtypes.prng_key):
                        np.testing.assert_allclose(np.asarray(each), np.asarray(wanted), rtol=1e-4)


def test_clipped_training_equals_that_of_one_device() -> None:
    inputs, targets = make_batch()
    model = Whole(make())
    tx = optax.adamw(1e-2)
    alone = sx.train.Optimizer(model, optax.chain(optax.clip_by_global_norm(0.1), tx))

    @sx.jit
    def train(model: Any, optimizer: Any) -> Any:
        def loss(model: Any) -> Any:
            logits = model(inputs)
            return cross_entropy(logits, targets), logits

        (value, logits), gradients = sx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(gradients)
        return value, optax.tree.norm(jax.tree.leaves(gradients)), logits

    step = PipelineStep(
        make(), cross_entropy, mesh=make_mesh(stage=4, data=2, model=1), rules=RULES,
        microbatches=4, schedule="1f1b",
    )  # fmt: skip
    optimizers = step.optimizers(tx)
    values, losses = [], []
    for _ in range(5):
        value, wanted_norm, _ = train(model, alone)
        values.append(float(value))
        loss, gradients = step(inputs, targets)
        norm = step.global_norm(gradients)
        step.update(optimizers, gradients, clip_norm=0.1)
        losses.append(float(loss))
        assert float(norm) == pytest.approx(float(wanted_norm), rel=1e-3) and float(norm) > 0.1
    assert losses == pytest.approx(values, rel=1e-4) and losses[-1] < losses[0]
    for optimizer, where in zip(optimizers, step.meshes, strict=True):
        assert optimizer is not None and int(optimizer.step) == 5
        for each in sx.state(optimizer.model, sx.Param).flat().values():
            assert each.sharding.device_set == set(where.devices.flat)
    for stage, wanted in zip(step.stages, model.stages, strict=True):
        assert_close(sx.state(stage), sx.state(wanted), 1e-3)
    _, _, logits = train(model, alone)
    np.testing.assert_allclose(step.predict(inputs), logits, atol=1e-3)


def test_stage_losses_are_added_and_differentiated() -> None:
    def penalty(stage: Any) -> Any:
        return 0.1 * sum((jnp.sum(v.value**2) for _, v in sx.iter_variables(stage, sx.Param)), 0.0)

    def total(logits: Any, targets: Any, stages: Any) -> Any:
        return cross_entropy(logits, targets) + sum(map(penalty, stages))

    stages = make()
    value, plain = whole_of_four()
    step = PipelineStep(
        stages, cross_entropy, mesh=make_mesh(stage=4), microbatches=4, stage_loss=penalty
    )
    loss, gradients = step(*make_batch())
    parameters = [
        {path: np.asarray(each) for path, each in sx.state(stage, sx.Param).flat().items()}
        for stage in make()
    ]
    penalties = sum(0.1 * (x**2).sum() for group in parameters for x in group.values())
    assert float(loss) == pytest.approx(float(value) + penalties, rel=1e-5)
    for number, grads in enumerate(gradients):
        for path, each in grads.flat().items():
            wanted = np.asarray(plain[number].flat()[path]) + 0.2 * parameters[number][path]
            np.testing.assert_allclose(np.asarray(each), wanted, atol=1e-5)


@pytest.fixture(scope="module")
def step_with_dropout() -> PipelineStep:
    """A step that some tests share, so that its programs are compiled once."""
    step = PipelineStep(make(0.1), cross_entropy, mesh=make_mesh(stage=4), microbatches=4)
    assert step.sent_bytes is None, "nothing is known before the first step"
    return step


def test_stages_send_only_activations_and_their_gradients(step_with_dropout: PipelineStep) -> None:
    step = step_with_dropout
    step(*make_batch())
    vectors, mask = (
        ROWS * 4 * WIDTH * 4,
        ROWS * 4 * np.dtype(make_batch()[0]["mask"].dtype).itemsize,
    )
    forward, backward = 3 * (vectors + mask // (1 if jax.config.jax_enable_x64 else 2)), 3 * vectors
    assert step.sent_bytes == forward + backward


def test_programs_compile_once_and_return_no_weights(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(sx.Module):
        def __init__(self, seed: int) -> None:
            self.layer = sx.nn.Linear(256, 256, dtype="bfloat16", rngs=sx.Rngs(seed))

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.layer(x)).astype(jnp.float32)

    mesh = make_mesh(stage=2)
    step = PipelineStep([Wide(0), Wide(1)], squares, mesh=mesh, microbatches=2)
    x = np.ones((4, 256), np.float32)
    step(x, x)
    with jax.log_compiles(True):
        step(x, x)
        step(x + 1, x)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    live = {id(a): a.nbytes for a in jax.live_arrays() if a.shape == (256, 256)}
    assert len([n for n in live.values() if n == 256 * 256 * 2]) == 0  # no bfloat16 copies are left


def test_cut_backward_pass_repeats_no_products() -> None:
    weights = {name: np.ones((4, 4), jnp.bfloat16) for name in "ab"}

    def layers(weights: Any, x: Any) -> Any:
        for name in "ab":
            x = jnp.tanh(x @ weights[name].astype(jnp.float32))
        return x

    def whole(weights: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(layers, weights, x)
        dw, dx = pull(dy)
        return {"y": y}, {"dx": dx}, {"dw": dw}

    x = dy = np.ones((2, 4), np.float32)
    programs, arguments, results = cut(whole, (weights, x, dy), constant_count=2)
    values = dict(zip(arguments, jax.tree.leaves((weights, x, dy)), strict=True))
    counts = []
    for program in programs:
        given = [values[item] for item in program.takes]
        counts.append(str(jax.make_jaxpr(program)(*given)).count("dot_general"))
        values.update(zip(program.gives, program(*given), strict=True))
        # Parameters are taken again, and casts of them computed again, rather than handed on.
        assert not [item for item in program.gives[1:] if item.aval.shape == (4, 4)] or (
            program is programs[2]
        )
    assert counts == [2, 2, 2]
    found = jax.tree.map(values.get, results)
    assert_close(found[0] | found[1] | found[2], sx.State(_merged(whole(weights, x, dy))))


def _merged(groups: Any) -> dict[str, Any]:
    return {name: value for group in groups for name, value in group.items()}


def test_batch_size_may_change_if_microbatches_divide_it() -> None:
    step = PipelineStep(
        [sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), jnp.tanh],
        squares,
        mesh=make_mesh(stage=2),
        microbatches=2,
    )
    for count in (4, 6):
        x = np.ones((count, 2), np.float32)
        value, (_, empty) = step(x, x)
        assert np.isfinite(float(value)) and not empty.flat()
    step.stages[0].kernel.value = step.stages[0].kernel.value.astype(jnp.bfloat16)
    _, (narrow, _) = step(x, x)
    assert narrow["kernel"].dtype == jnp.bfloat16
    with pytest.raises(PartitionError, match=r"inputs\['x'\] of shape \(3, 2\)"):
        step({"x": np.ones((3, 2))}, np.ones((4, 2)))


def test_invalid_pipelines_are_refused_before_anything_moves() -> None:
    mesh = make_mesh(stage=2, data=2)
    layers = [sx.nn.Linear(2, 2, rngs=sx.Rngs(i)) for i in range(2)]
    before = [layer.kernel for layer in layers]
    tied = [sx.nn.Linear(2, 2, rngs=sx.Rngs(0)) for _ in range(2)]
    tied[1].kernel = tied[0].kernel
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tied, {}, r"stages\[0\]\.kernel and stages\[1\]\.kernel\n.*sx\.clone"),
        ([*layers, 3], {}, r"stages\[2\] of int"),
        ([], {}, "found none"),
        (layers, {"axis": "model"}, "'model', but the mesh has the axes 'stage', 'data'"),
        (layers, {"mesh": 3}, "the mesh has none"),
        ([*layers, jnp.sin, jnp.cos], {}, "one part of the model a stage"),
        ([*layers, jnp.tanh], {"schedule": "interleaved"}, "3 parts of a model"),
        (layers, {"schedule": "2f2b"}, "schedule='2f2b' must be 'gpipe', "),
        (layers, {"schedule": Schedule.gpipe(2, 8)}, "is for 2 parts of the mesh, 8 microbatches"),
        (layers, {"microbatches": 0}, "microbatches=0"),
        ([*layers, jnp.sin, jnp.cos], {"schedule": "interleaved", "microbatches": 3},
         "3 microbatches and 4 parts"),
    ]  # fmt: skip
    for stages, options, message in cases:
        given = {"mesh": mesh, "microbatches": 4, "rules": {"batch": "data"}} | options
        with pytest.raises(PartitionError, match=message) as caught:
            PipelineStep(stages, squares, **given)
        if "sx.clone(stage)" in str(caught.value):
            names = {"sx": sx, "stage": stages[1]}
            own = run_advice(caught.value, "sx.clone(stage)", names)
            assert own.kernel is not stages[0].kernel
    last = [layers[0], sx.nn.Linear(2, 3, rngs=sx.Rngs(2))]
    with pytest.raises(sx.errors.PartitionCheckError, match="3"):  # of the second stage alone
        PipelineStep(last, squares, mesh=mesh, microbatches=4, rules={"out": "data"})
    assert [layer.kernel for layer in layers] == before
    assert all(layer.kernel.sharding is None for layer in layers)  # still lazy

    class Writes(sx.Module):
        def __init__(self) -> None:
            self.weight = sx.Param(jnp.ones(()))
            self.count = sx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.count.value = self.count.value + 0.5
            return x * self.weight

    step = PipelineStep([Writes(), jnp.tanh], squares, mesh=make_mesh(stage=2), microbatches=2)
    x = np.ones((4, 2), np.float32)
    with pytest.raises(
        PartitionError, match=r"stages\[0\]\.count was int32\[\], and became ~float"
    ):
        step(x, x)
    assert int(step.stages[0].count) == 0
    with pytest.raises(PartitionError, match="inside of jit"):
        jax.jit(lambda x: step(x, x)[0])(x)
    step = PipelineStep(layers, squares, mesh=make_mesh(stage=2), microbatches=2)
    layers[1].kernel.value = jax.device_put(layers[1].kernel.value, jax.devices()[5])
    with pytest.raises(PartitionError, match=r"stages\[1\]\.kernel") as caught:
        step(x, x)
    names = {"sx": sx, "step": step, "rules": {}}
    run_advice(caught.value, "sx.shard(step.stages[1], step.meshes[1], rules)", names)
    step(x, x)


def test_stages_may_scan_rematerialize_or_have_experts() -> None:
    class Layer(sx.Module):
        def __init__(self, seed: int) -> None:
            types = {"param_dtype": "bfloat16", "dtype": "float32"}
            self.mlp = sx.nn.MLP(WIDTH, 16, rngs=sx.Rngs(seed), **types)
            self.moe = sx.nn.MoE(WIDTH, 16, num_experts=4, dispatch="dropless", rngs=sx.Rngs(seed))

        def __call__(self, x: Any) -> Any:
            return x + self.mlp(x) + self.moe(x)

    class Vectors(sx.Module):
        def __init__(self) -> None:
            self.embed = sx.nn.Embed(VOCAB, WIDTH, rngs=sx.Rngs(0))

        def __call__(self, batch: Any) -> Any:
            return self.embed(batch["tokens"])

    def stages() -> list[Any]:
        scanned = sx.nn.Stack(lambda: Layer(1), 2, remat="full")
        made = [Vectors(), scanned, Layer(2), sx.nn.Linear(WIDTH, VOCAB, rngs=sx.Rngs(3))]
        return [with_values(stage, seed) for seed, stage in enumerate(made)]

    value, wanted = whole(stages(), 4)
    rules = {"batch": "data", "expert": "data"}
    step = PipelineStep(
        stages(), cross_entropy, mesh=make_mesh(stage=4, data=2), rules=rules, microbatches=4,
        schedule="zero-bubble",  # which cuts the backward programs of the others in two
    )  # fmt: skip
    loss, gradients = step(*make_batch())
    assert float(loss) == pytest.approx(float(value), abs=1e-6)
    for number, grads in enumerate(gradients):
        parameters = sx.state(step.stages[number], sx.Param).flat()
        expected = wanted[number].flat()
        assert grads.flat().keys() == expected.keys()
        for path, gradient in grads.flat().items():
            assert gradient.dtype == parameters[path].dtype
            np.testing.assert_allclose(
                np.asarray(gradient, np.float32), np.asarray(expected[path], np.float32),
                atol=1e-6, err_msg=str(path),
            )  # fmt: skip


def test_run_resumes_from_a_checkpoint_bit_for_bit(
    step_with_dropout: PipelineStep, tmp_path: Path
) -> None:
    step = step_with_dropout
    optimizers = step.optimizers(optax.adam(1e-2))

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss, gradients = step(*make_batch())
            step.update(optimizers, gradients)
            losses.append(float(loss))
        return losses

    train(2)
    sx.train.checkpoint.save(optimizers, tmp_path / "saved")
    after = train(2)
    sx.train.checkpoint.restore(optimizers, tmp_path / "saved")
    assert train(2) == after


@pytest.mark.parametrize(
    ("kind", "has_mask"), [(AxisType.Auto, False), (AxisType.Explicit, True)], ids=str
)
def test_microbatches_are_weighted_by_targets(kind: AxisType, has_mask: bool) -> None:
    inputs, tokens = make_batch()
    kept = np.arange(4) < np.resize([0, 1, 4, 2], ROWS)[:, None]
    targets: Any = {"targets": tokens, "mask": kept} if has_mask else np.where(kept, tokens, -100)

    def loss(logits: Any, targets: Any) -> Any:
        given = targets if has_mask else {"targets": targets}
        return sx.models.cross_entropy(logits, given["targets"], given.get("mask"))

    with jax.set_mesh(mesh := make_mesh(kind, stage=2, data=2, model=2)):
        step = PipelineStep(
            make(), loss, mesh=mesh, microbatches=4, rules=RULES, schedule="interleaved"
        )
        value, gradients = step(inputs, targets)

    def whole(model: Any, inputs: Any) -> Any:
        for stage in model.layers:
            inputs = stage(inputs)
        return loss(inputs, targets)

    expected, grads = sx.jit(sx.value_and_grad(whole))(sx.nn.Sequential(*make()), inputs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for number, stage in enumerate(gradients):
        for path, gradient in stage.flat().items():
            whole_gradient = grads.flat()["layers", number, *path]
            np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-5, atol=1e-7)
