# SPDX-License-Identifier: Apache-2.0
"""One call sets up a process, or says what is wrong and changes nothing.

The tests' own process runs on 8 virtual devices already; what must come before that is tested in
new processes (``test_new_process.py``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import shardax as sx
from shardax._core.init import defaults, key_reuse
from shardax._transforms.jit.slow_call import comparing
from shardax.config import configure as configure_module
from shardax.config.configure import backend_runs, check_settings, usable_platform
from shardax.errors import ConfigureError


def everything() -> dict[str, Any]:
    """All that ``configure`` may change."""
    return {
        **jax.config.values,
        "process": (defaults.process_defaults(), len(key_reuse._process), len(comparing)),
        "stream": sx.random.get_state(),
    }


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Starts from JAX's own cache of programs, not that of the tests; restores all afterwards."""
    before, state = jax.config.values, sx.random.get_state()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    yield
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    defaults.set_process_dtype(None)
    defaults.set_process_device(None)
    key_reuse.check_whole_process(False)
    comparing.clear()
    sx.random.set_state(state)
    compilation_cache.reset_cache()


def changed_from(before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in everything().items() if before[name] != value}


# --- what is set ---


def test_configure_without_settings_changes_nothing_and_shows_all() -> None:
    before = everything()
    configuration = sx.configure()
    assert changed_from(before) == {}
    assert configuration.given == configuration.notes == ()
    assert configuration.backend_runs and backend_runs()
    assert {name: configuration.settings[name] for name in ("platform", "devices", "x64")} == {
        "platform": "cpu",
        "devices": 8,
        "x64": False,
    }


def test_settings_change_what_they_name_only(tmp_path: Path) -> None:
    before = everything()
    sx.random.seed(5)
    seeded = sx.random.get_state()
    configuration = sx.configure(
        x64=True,
        dtype="float64",
        create_on="cpu:3",
        cache_dir=tmp_path / "new" / "cache",
        cache_min_seconds=0,
        seed=5,
        matmul_precision="highest",
        rank_promotion="warn",
        debug_nans=True,
        debug_infs=True,
        debug_key_reuse=True,
        debug_processes=True,
        log_compiles=True,
    )
    folder = str(tmp_path / "new" / "cache")
    assert changed_from(before) == {
        "jax_enable_x64": True,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_default_matmul_precision": "highest",
        "jax_numpy_rank_promotion": "warn",
        "jax_debug_nans": True,
        "jax_debug_infs": True,
        "jax_debug_key_reuse": True,
        "jax_log_compiles": True,
        "process": ((jnp.dtype("float64"), "cpu:3"), 1, 1),
        "stream": seeded,
    }
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert configuration.settings["cache_dir"] == folder
    assert set(configuration.given) == set(configuration.settings) - {"platform", "devices"}
    assert configuration.notes == ("x64: arrays that exist keep their dtypes.",)


def test_summary_marks_what_was_set() -> None:
    lines = str(sx.configure(seed=7, debug_nans=False)).splitlines()
    assert [line.split() for line in lines if line.startswith("*")] == [
        ["*", "seed", "7"],
        ["*", "debug_nans", "False"],
    ]
    assert "its backend runs" in lines[0]
    assert repr(sx.configure()) == str(sx.configure())


def test_create_on_moves_creation_and_not_computation() -> None:
    sx.configure(create_on="cpu:3", dtype="bfloat16")
    drawn = sx.random.normal(3)
    assert drawn.devices() == {jax.devices()[3]} and drawn.dtype == jnp.bfloat16
    assert jnp.zeros(3).devices() == {jax.devices()[0]}


def test_default_restores_the_choices_of_jax(tmp_path: Path) -> None:
    before = everything()
    sx.configure(dtype="bfloat16", create_on="cpu:1", cache_dir=tmp_path)
    configuration = sx.configure(dtype="default", create_on="default", cache_dir="default")
    assert changed_from(before) == {}
    assert {configuration.settings[name] for name in configuration.given} == {None}


def test_jax_itself_is_not_patched(tmp_path: Path) -> None:
    spaces = (jax, jnp, jax.random, jax.config, jnp.ndarray)
    before = [dict(vars(space)) for space in spaces]
    sx.configure(x64=True, dtype="float64", create_on="cpu:1", cache_dir=tmp_path, seed=1)
    assert [dict(vars(space)) for space in spaces] == before


def test_programs_go_to_the_folder_named_last(tmp_path: Path) -> None:
    """JAX itself stays with the first folder that it used."""
    for number, name in enumerate(("first", "second")):
        sx.configure(cache_dir=tmp_path / name, cache_min_seconds=0)
        program = jax.jit(lambda x, number=number: x * number + 17)
        program(np.ones(3, np.float32)).block_until_ready()
        assert any((tmp_path / name).iterdir())


def test_folder_writable_by_others_is_noted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (note,) = sx.configure(cache_dir=tmp_path).notes
    assert str(tmp_path) in note and "chmod 700" in note
    assert sx.configure(cache_dir="gs://bucket/cache").notes == ()


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "devices=0 is neither how many"),
        ({"devices": True}, "devices=True"),
        ({"devices": [1, 1]}, r"devices=\[1, 1\]"),
        ({"devices": "8"}, "devices='8'"),
        ({"devices": [[0]]}, r"devices=\[\[0\]\]"),
        ({"x64": 1}, "x64=1 is neither True nor False"),
        ({"debug_nans": "off"}, "debug_nans='off'"),
        ({"debug_key_reuse": 1}, "debug_key_reuse=1"),
        ({"debug_processes": "on"}, "debug_processes='on'"),
        ({"dtype": "int8"}, "dtype='int8'.*cannot be int8"),
        ({"dtype": "float64"}, "dtype='float64'.*needs 64 bits"),
        ({"dtype": "float64", "x64": False}, "needs 64 bits"),
        ({"create_on": "cpu 3"}, "create_on='cpu 3'.*does not name a device"),
        ({"cache_dir": __file__}, "test_configure.py is not a folder"),
        ({"cache_dir": Path(__file__) / "cache"}, "test_configure.py is not a folder"),
        ({"cache_dir": ""}, "cache_dir=''"),
        ({"cache_dir": "a\0b"}, "is not the path of a folder"),
        ({"cache_min_seconds": -1}, "cache_min_seconds=-1"),
        ({"cache_min_seconds": float("nan")}, "cache_min_seconds=nan"),
        ({"seed": "today"}, "seed='today'.*integer seed"),
        ({"matmul_precision": "best"}, "matmul_precision='best'.*'highest'"),
        ({"rank_promotion": False}, "rank_promotion=False"),
    ],
    ids=str,
)
@pytest.mark.parametrize("runs", [True, False], ids=["late", "early"])
def test_invalid_setting_is_refused_and_changes_nothing(
    settings: dict[str, Any], message: str, runs: bool
) -> None:
    before = everything()
    with pytest.raises(ConfigureError, match=message):
        check_settings({"debug_infs": True, "seed": 1, **settings}, runs)
    assert changed_from(before) == {}


def test_configure_names_all_invalid_settings_and_sets_none() -> None:
    before = everything()
    with pytest.raises(ConfigureError) as caught:
        sx.configure(x64="yes", debug_nans=True, seed=1.5, cache_min_seconds="fast")  # pyright: ignore[reportArgumentType]
    assert [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "x64",
        "cache_min_seconds",
        "seed",
    ]
    assert changed_from(before) == {}


def test_default_dtype_keeps_the_64_bits_it_needs() -> None:
    sx.configure(x64=True, dtype="float64")
    with pytest.raises(ConfigureError, match=r"dtype=.*float64.*set before"):
        sx.configure(x64=False)
    sx.configure(x64=False, dtype="float32")
    assert sx.random.normal().dtype == jnp.float32


@pytest.mark.parametrize(
    ("settings", "late"),
    [
        ({"devices": 4}, "devices=4 came too late"),
        ({"platform": "cuda"}, "platform='cuda' came too late"),
        ({"platform": "cuda", "devices": [0]}, r"platform='cuda', devices=\[0\] came too late"),
        ({"platform": "tpu", "devices": 8}, "platform='tpu', devices=8 came too late"),
    ],
    ids=str,
)
def test_late_settings_are_refused_and_change_nothing(settings: dict[str, Any], late: str) -> None:
    before = everything()
    with pytest.raises(ConfigureError, match=rf"{late}.*8 devices of the platform 'cpu'"):
        sx.configure(debug_nans=True, seed=3, **settings)
    assert changed_from(before) == {}


def test_running_platform_and_devices_may_be_repeated() -> None:
    before = everything()
    for settings in ({"devices": 8}, {"platform": "cpu"}, {"platform": "cpu", "devices": 8}):
        sx.configure(**settings)
    assert changed_from(before) == {}


def test_running_gpus_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_cuda_visible_devices", "2,3")
    before = everything()
    for settings in ({"devices": [2, 3]}, {"platform": "cuda", "devices": 8}, {"platform": "gpu"}):
        sx.configure(**settings)
    for settings in ({"devices": [3, 2]}, {"devices": 8}, {"platform": "cpu"}):
        with pytest.raises(ConfigureError, match=f"{next(iter(settings))}=.* too late"):
            sx.configure(**settings)
    assert changed_from(before) == {}


def test_configure_is_refused_while_tracing() -> None:
    before = everything()

    def program(x: Any) -> Any:
        sx.configure(debug_nans=True)
        return x

    with pytest.raises(ConfigureError, match="while a JAX transform is tracing"):
        jax.jit(program)(1.0)
    assert changed_from(before) == {}


def test_settings_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another thread had started the backend after the check."""
    before = everything()
    monkeypatch.setattr(configure_module, "backend_runs", lambda: False)
    with pytest.raises(RuntimeError, match="jax_num_cpu_devices"):
        sx.configure(rank_promotion="warn", debug_nans=True, devices=3)
    assert changed_from(before) == {}


# --- platforms ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": [0], "platform": "cpu"}, "processors have no numbers"),
        ({"platform": 3}, "platform=3 is not the name"),
        ({"platform": "CPU"}, "platform='CPU'.*Did you mean 'cpu'"),
        ({"platform": ""}, "platform=''"),
    ],
    ids=str,
)
def test_invalid_platforms_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigureError, match=message):
        check_settings(settings, runs=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that plugins are installed, and that there is a GPU or none."""

    def pretend(*plugins: str, gpu: bool = True) -> None:
        monkeypatch.setattr(configure_module, "installed_plugins", lambda: set(plugins))
        monkeypatch.setattr(configure_module, "nvidia_gpu_is_visible", lambda: gpu)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
        )

    return pretend


def test_gpu_is_the_platform_with_a_plugin(machine: Any) -> None:
    machine("xla_cuda13")
    assert usable_platform("gpu") == usable_platform("cuda") == "cuda"
    machine("jax_plugins.xla_rocm7")
    assert usable_platform("gpu") == usable_platform("rocm") == "rocm"
    machine("vendor_neuron")
    assert usable_platform("neuron") == "neuron"


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("cuda", r"not installed.*pip install 'shardax\[cuda\]'"),
        ("gpu", r"pip install 'shardax\[cuda\]'"),
        ("tpu", r"pip install 'shardax\[tpu\]'"),
        ("rocm", "not installed"),
        ("cudda", "no such platform.*Did you mean 'cuda'"),
        ("neuron", "no plugin for it is installed"),
    ],
)
def test_platform_that_is_not_installed_is_refused(
    platform: str, message: str, machine: Any
) -> None:
    machine()
    with pytest.raises(ConfigureError, match=message):
        usable_platform(platform)


def test_missing_gpu_is_refused_without_fallback(machine: Any) -> None:
    machine("xla_cuda13", gpu=False)
    with pytest.raises(ConfigureError, match="no NVIDIA GPU here"):
        usable_platform("cuda")


def test_accelerator_devices_are_chosen_and_cpu_stays(machine: Any) -> None:
    machine("xla_cuda13")
    assert check_settings({"platform": "gpu", "devices": 2}, runs=False).options == {
        "jax_platforms": "cuda,cpu",
        "jax_cuda_visible_devices": "0,1",
    }
    assert check_settings({"devices": (3, 1)}, runs=False).options == {
        "jax_platforms": "cuda,cpu",
        "jax_cuda_visible_devices": "3,1",
    }
    machine("vendor_neuron")
    with pytest.raises(ConfigureError, match="does not choose among the devices of 'neuron'"):
        check_settings({"platform": "neuron", "devices": 2}, runs=False)
