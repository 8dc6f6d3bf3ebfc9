# SPDX-License-Identifier: Apache-2.0
"""Published programs, run with Flax and translated, in one process.

``python -m tests.interop.migrate.published vae`` prints as JSON, for each program: how many places
the report leaves, and by how much the results of the two runs differ at most. Draws depend on
shapes alone here, so that both start the same.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FLAX = ROOT / ".cache" / "flax-0.12.8"


@dataclass(frozen=True)
class Published:
    """A program, with what makes it short and what to compare."""

    path: str  # below the sources of Flax, or "package:file"
    edits: Mapping[str, str] = field(default_factory=dict)
    # Code in terms of Flax behind the program, translated with it, and expressions over all.
    driver: str = ""
    results: tuple[str, ...] = ("y_pred",)
    # Packages that it imports and a short run does not need.
    without: tuple[str, ...] = ()


_TOYS = "examples/nnx_toy_examples"
_SHORT = {"10_000": "20", "1000 == 0": "5 == 0"}
_FEW = {"dataset(1000,": "dataset(9,"}
_MNIST = """
model, rngs = CNN(rngs=nnx.Rngs(0)), nnx.Rngs(0)
optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
batch = {"image": jax.numpy.ones((4, 28, 28, 1)) / 3, "label": jax.numpy.arange(4)}
model.train()
for _ in range(3):
    train_step(model, optimizer, metrics, batch, rngs)
trained = metrics.compute()
model.eval()
eval_step(model, metrics, batch)
"""
_MAMBA = """
config = Mamba2Config.tiny()
model, tokens = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), jnp.arange(32).reshape(2, 16)
def scores(model, tokens):
    outputs = model(tokens)
    return outputs["logits"] if isinstance(outputs, dict) else jax.tree.leaves(outputs)[0]
y_pred = nnx.jit(scores)(model, tokens)
gradients = jax.tree.leaves(nnx.grad(lambda model: scores(model, tokens).var())(model))
gradients = sorted(float(jnp.linalg.norm(gradient)) for gradient in gradients)
"""
_LLAMA = """
fields = {field.name: None for field in dataclasses.fields(ShardingConfig)}
config = ModelConfig(
    num_layers=2, vocab_size=32, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=4,
    num_kv_heads=2, rope_theta=10000, norm_eps=1e-5, shd_config=ShardingConfig(**fields))
model, tokens = Llama3(config, rngs=nnx.Rngs(params=0)), jnp.arange(12).reshape(2, 6)
positions, mask = jnp.tile(jnp.arange(6), (2, 1)), jnp.tril(jnp.ones((2, 6, 6), bool))
def scores(model):
    return model(tokens, positions, None, mask)[0]
y_pred = scores(model)
gradients = jax.tree.leaves(nnx.grad(lambda model: scores(model).var())(model))
gradients = sorted(float(jnp.linalg.norm(gradient)) for gradient in gradients)
"""
_ALONE = {
    "from tunix.generate.mappings import": "class BackendMappingMixin: pass  #",
    "from tunix.utils import compat\n": "class compat:\n    ModuleList = nnx.List\n",
    "from tunix.utils import env_utils\n": "",
    "env_utils.setup_sharding_environment()\n": "",
}
PROGRAMS = {
    "lifted_transforms": Published(f"{_TOYS}/02_lifted_transforms.py", _SHORT),
    "train_state": Published(f"{_TOYS}/03_train_state.py", _SHORT),
    "data_parallel": Published(f"{_TOYS}/04_data_parallel_with_jit.py", _FEW),
    "vae": Published(
        f"{_TOYS}/05_vae.py",
        {
            "steps_per_epoch: int = 200": "steps_per_epoch: int = 3",
            "epochs: int = 20": "epochs = 1",
        },
        results=("losses", "y_pred", "samples"),
        without=("datasets",),
    ),
    "scan_over_layers": Published(f"{_TOYS}/06_scan_over_layers.py", results=("y",)),
    "array_leaves": Published(f"{_TOYS}/07_array_leaves.py", _SHORT),
    "save_load_checkpoints": Published(f"{_TOYS}/08_save_load_checkpoints.py", results=("y",)),
    "parameter_surgery": Published(
        f"{_TOYS}/09_parameter_surgery.py",
        results=("len(jax.tree.leaves(non_trainable))", "model(jax.numpy.ones((1, 784)))"),
    ),
    "fsdp_and_optimizer": Published(f"{_TOYS}/10_fsdp_and_optimizer.py", _SHORT),
    "hijax_basic": Published(f"{_TOYS}/hijax_basic.py"),
    "hijax_demo": Published(f"{_TOYS}/hijax_demo.py"),
    "mnist": Published(
        "examples/mnist/train.py",
        driver=_MNIST,
        results=("trained['loss']", "metrics.compute()['accuracy']", "model(batch['image'], rngs)"),
        without=("flax.metrics", "ml_collections", "tensorflow", "tensorflow_datasets"),
    ),
    "gemma_helpers": Published("examples/gemma/helpers.py"),
    "gemma_transformer": Published("examples/gemma/transformer.py"),
    "mamba2": Published("mamba2_jax:modeling.py", driver=_MAMBA, results=("y_pred", "gradients")),
    "llama3": Published("tunix:models/llama3/model.py", _ALONE, _LLAMA, ("y_pred", "gradients")),
    "jimmy_dropout": Published("jimmy:layers/dropout.py"),
    "ppo": Published("nnx_ppo:algorithms/ppo.py"),
    "ppo_normalizer": Published("nnx_ppo:networks/normalizer.py"),
}


class _Anything(types.ModuleType):
    """A package that a program imports and a short run does not need."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def draw_by_shape() -> None:
    """Makes the draws of JAX depend on shapes alone."""
    import jax
    import numpy as np

    def drawn(key: Any, shape: Any = (), dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = int(np.prod(shape))
        return jax.numpy.sin(1.3 * jax.numpy.arange(size)).reshape(shape).astype(dtype or float)

    def truncated(key: Any, lower: Any, upper: Any, *args: Any, **kwargs: Any) -> Any:
        return drawn(key, *args, **kwargs)

    def kept(key: Any, p: Any = 0.5, shape: Any = (), *args: Any, **kwargs: Any) -> Any:
        return drawn(key, shape) > -0.5

    draws = {"normal": drawn, "uniform": drawn, "truncated_normal": truncated, "bernoulli": kept}
    for module in (jax.random, sys.modules["jax._src.random"]):  # that of the initializers
        for name, function in draws.items():
            setattr(module, name, function)


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Puts what does nothing in the place of packages."""
    import numpy as np

    stubs = {name: _Anything(name) for name in ("matplotlib", "matplotlib.pyplot", *names)}
    if "datasets" in stubs:
        images = {part: {"image": np.tri(28, 28)[None].repeat(9, 0)} for part in ("train", "test")}
        vars(stubs["datasets"])["load_dataset"] = lambda name: images
    old = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in old.items() if module is not None})


def path_of(program: Published) -> Path | None:
    """Returns where a program is, or None."""
    package, colon, rest = program.path.rpartition(":")
    if not colon:
        path = FLAX / rest
    else:
        spec = importlib.machinery.PathFinder.find_spec(package)
        folders = (spec and spec.submodule_search_locations) or ["-"]
        path = Path(folders[0], rest)
    return path if path.is_file() else None


def _namespace(text: str) -> dict[str, Any]:
    import numpy as np

    np.random.seed(0)
    module = types.ModuleType("published")
    sys.modules["published"] = module
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "published", "exec"), vars(module))
    return vars(module)


def outcome_of(program: Published) -> dict[str, Any]:
    """Returns how many places are left, and the largest relative difference of the results."""
    import jax
    import numpy as np

    from shardax._migrate.translate import translate

    path = path_of(program)
    assert path is not None
    text = path.read_text() + program.driver
    for old, new in program.edits.items():
        text = text.replace(old, new)
    result = translate(text)
    if result.left:
        return {"left": result.left, "ends": "raise SystemExit(" in result.text}

    with _without(program.without):
        spaces = _namespace(text), _namespace(result.text)
    largest = 0.0
    for expression in program.results:
        theirs, ours = (jax.tree.leaves(eval(expression, space)) for space in spaces)
        for one, two in zip(theirs, ours, strict=True):
            difference = np.abs(np.asarray(one, float) - np.asarray(two, float)).max()
            largest = max(
                largest, float(difference / (np.abs(np.asarray(one, float)).max() + 1e-9))
            )
    return {"left": 0, "difference": largest}


def main(names: list[str]) -> None:
    """Prints the outcomes of programs."""
    outcomes: dict[str, Any] = {}
    draw_by_shape()
    for name in names or PROGRAMS:
        try:
            outcomes[name] = outcome_of(PROGRAMS[name])
        except Exception as error:  # noqa: BLE001 (one program's fault is told, and stops no other)
            outcomes[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
