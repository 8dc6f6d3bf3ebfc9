# SPDX-License-Identifier: Apache-2.0
"""The most CPU-seconds that one test may take, and the tests that may take more.

A pytest plugin that the root ``conftest.py`` loads. CPU-seconds count all threads and the child
processes that a test waited for. On a slower machine, or one whose cores others share, the same
work takes more of them: the limit grows by what JAX then takes to lower a fixed program. A loop in
Python would not do: where memory is slow it takes no longer, but tests take three times as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.suite import cpu_seconds

LIMIT = 20.0
CORES = os.cpu_count() or 1
# What ``lowering_seconds`` is where the suite takes 1,800 CPU-seconds (docs/contributing.md).
LOWERING_SECONDS = 0.1
# Tests that take more, each with the reason.
DEAR = {
    "tests/programs/benchmarks/test_plan_depths.py::test_sampled_layouts_have_both_times": (
        "traces and compiles a sample of layouts, to compare both times"
    ),
    "tests/house/test_style.py::test_the_code_is[well_typed]": (
        "the type checker reads the package, JAX and NumPy as a whole"
    ),
    "tests/house/test_pages.py::test_pages_build_without_a_warning": (
        "sphinx imports the package and builds every page"
    ),
    "tests/programs/benchmarks/test_processes.py::test_the_cost_of_processes_is_measured": (
        "jobs of one, two and four processes, each of which imports JAX"
    ),
    "tests/programs/benchmarks/test_processes.py::test_job_with_killed_coordinator_resumes_bit_for_bit": (
        "jobs of several processes that are killed and begin again"
    ),
    "tests/cli/test_resume.py::test_run_killed_three_times_resumes_bit_for_bit": (
        "a run that is killed begins four times, each a process"
    ),
    "tests/training/distributed/test_launch.py::test_killed_process_restarts_all_from_the_newest_checkpoint": (  # noqa: E501
        "a job of two processes begins twice"
    ),
    "tests/training/distributed/test_training.py::test_parallelism_over_processes_gives_gradients_of_one_device": (  # noqa: E501
        "two processes and this one compile a step of each form of parallelism"
    ),
    "tests/training/distributed/test_training.py::test_processes_give_the_parameters_and_losses_of_one[four]": (  # noqa: E501
        "four processes, each of which imports JAX and compiles a step"
    ),
    "tests/programs/benchmarks/test_parallel.py::test_search_of_a_published_model_includes_its_layout": (
        "a search compiles several layouts of a published model"
    ),
    "tests/programs/benchmarks/test_parallel.py::test_gpu_step_reports_speed_and_memory": (
        "compiles steps of two precisions and four decoding loops"
    ),
    "tests/programs/benchmarks/test_parallel.py::test_every_parallel_form_is_timed_beside_raw_jax": (
        "compiles each form of parallelism and its opponent"
    ),
}
DEAR["tests/models/test_published_configs.py::test_published_models_are_read_as_they_are"] = (
    "reads the configs of all published models"
)
# Pages whose code is one test each, and searches or trains.
# With the compilers of accelerators, and the newest JAX.
DEAR |= {
    "tests/planner/plan/test_forms.py::test_host_offloaded_activations_lower_the_device_peak[tpu:v5e:2x4]": (  # noqa: E501
        "libtpu compiles a program of several layers twice"
    ),
    "tests/planner/plan/test_memory_boundary.py::test_peak_reaches_limit_where_compiler_starts_to_refuse": (
        "libtpu compiles until a program does not fit"
    ),
    "tests/planner/plan/test_kernels.py::test_plan_compares_xla_and_splash_on_tpus[tpu:v5e:2x4]": (
        "libtpu starts, and compiles the gradient of a layer by two kernels"
    ),
}
DEAR |= {
    f"tests/planner/plan/test_kernels.py::test_training_by_kernel_and_precision_compiles_and_counts[{case}]": (  # noqa: E501
        "compilers of accelerators compile a decoder forwards and backwards"
    )
    for case in (
        *("tpu-xla-fp8-64", "tpu-xla-fp8-delayed-8", "tpu-splash-None-64", "tpu-splash-fp8-1"),
        *("gpu-xla-fp8-64", "gpu-xla-fp8-delayed-8", "gpu-splash-None-64", "gpu-splash-fp8-1"),
    )
}
DEAR |= {
    f"tests/training/train/test_pipeline_stages.py::{test}": (
        "compiles every stage, forwards and backwards, for several schedules and meshes"
    )
    for test in (
        "test_stages_may_scan_rematerialize_or_have_experts",
        "test_streams_state_and_sown_values_ignore_the_mesh",
    )
}
DEAR |= {
    f"docs/{page}.md::code": "a page is one test, and this one searches layouts or trains a model"
    for page in ("demo", "generate", "parallelism", "plan", "plan-cases", "precision-and-memory")
}
DEAR["docs/coming-from-flax.md::code"] = "a page is one test, and this one runs two libraries"
DEAR |= {
    f"tests/programs/docs/test_notebooks.py::test_notebook_reproduces_its_stored_outputs[{notebook}]": (
        "a notebook is one test, and this one starts processes or searches layouts"
    )
    for notebook in ("many-processes", "planning")
}
# Another limit, for the test of this file.
LIMIT_VARIABLE = "SHARDAX_TEST_CPU_SECONDS"


def lowering_seconds() -> float:
    """CPU-seconds that JAX takes to trace and lower a fixed program; the least of three."""
    # Imported here: where no test is dear, the plugin needs no JAX.
    import jax
    import jax.numpy as jnp

    def seconds() -> float:
        def program(values: jax.Array) -> jax.Array:
            for number in range(300):
                values = jnp.where(values > number, jnp.sin(values) @ values, values * number)
            return values

        start = time.thread_time()
        jax.jit(program).lower(jax.ShapeDtypeStruct((8, 8), "float32"))
        return time.thread_time() - start

    return min(seconds() for _ in range(3))


def slowness() -> float:
    """How much slower this machine is now than the one of the limit; at least 1."""
    return max(1.0, lowering_seconds() / LOWERING_SECONDS)


class CpuLimit:
    """Fails a test that took more CPU-seconds than the limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.start = 0.0
        self.started_at = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes the clock before a test and its fixtures."""
        self.start, self.started_at = cpu_seconds(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        """Turns the last report of a dear test into a failure."""
        report: Any = yield
        # All cores for so long would not be above the limit.
        most = (time.monotonic() - self.started_at) * CORES
        if call.when != "teardown" or most <= self.limit or item.nodeid in DEAR:
            return report
        spent = cpu_seconds() - self.start
        if spent > self.limit and spent > (limit := self.limit * slowness()):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {spent:.1f} CPU-seconds; the limit is {limit:.1f}. Make it "
                "cheaper (docs/contributing.md says how), or add it to DEAR in "
                "tests/suite/limits.py with the reason."
            )
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    limit = float(os.environ.get(LIMIT_VARIABLE, LIMIT))
    config.pluginmanager.register(CpuLimit(limit), "suite-cpu-limit")
