# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: the tests, the doctests of the sources, and the code of the pages.

*Pages* are the README and the Markdown files of ``docs/``. The code of one page is one test: its
examples share a namespace and run from top to bottom, as a reader would run them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Before jax is imported, and also for the processes that tests start. A machine with an accelerator
# can run the tests on it with JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile thousands of programs and run each once or twice. LLVM's optimizations, and XLA's
# newer emitters of fused loops, would take three quarters of the time to compile; cutting a program
# into parts for several threads, a tenth of the rest. None of this changes the text of the
# programs. A flag that a version does not know ends the process, so those that are of these times
# are given only where they are known. The last lets virtual devices wait for each other on a busy
# machine, where XLA would end the process after a minute.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        *(
            [
                "--xla_cpu_use_fusion_emitters=false",
                "--xla_cpu_parallel_codegen_split_count=1",
                "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
            ]
            if metadata.version("jaxlib").startswith("0.10.")
            else []
        ),
        os.environ.get("XLA_FLAGS", ""),
    ]
)

# Processes that tests start would else compile the package's sources to bytecode each time, a fifth
# of a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What the planner compiled is kept for one run of the tests and not in the user's own cache.
if "SHARDAX_CACHE_DIR" not in os.environ:
    os.environ["SHARDAX_CACHE_DIR"] = tempfile.mkdtemp(prefix="shardax-tests-")
    atexit.register(shutil.rmtree, os.environ["SHARDAX_CACHE_DIR"], ignore_errors=True)

import jax
import jaxlib
import pytest
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.example import SybilFailure
from sybil.parsers.markdown import PythonCodeBlockParser

DEVICES = 8

# Each worker would else rewrite the assertions of all tests in every run, a fifth of a minute.
sys.dont_write_bytecode = False

jax.config.update("jax_num_cpu_devices", DEVICES)
# Compiled programs, for the next run and for other workers. The folder may be lost at any time.
# JAX's own key covers versions, flags and devices. Only this process uses the folder: those that
# tests kill could leave half an entry.
PROGRAMS = Path(
    os.environ.get("JAX_COMPILATION_CACHE_DIR")
    or Path(__file__).parent / ".cache" / f"programs-{jaxlib.__version__}"
)


def _keep_programs() -> None:
    """Keeps every compiled program."""
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_keep_programs()
# Implicit rank promotion hides shape errors; the library must never need it.
jax.config.update("jax_numpy_rank_promotion", "raise")

# A collection of garbage walks over all that jax and the tests keep, which grows to gigabytes. At
# Python's own threshold of 700 new objects that takes an eighth of the time of the tests.
gc.set_threshold(20_000, 10, 10)

# Compiling takes as long as it takes, so there is no deadline. In CI the examples are the same on
# every run; elsewhere they vary, and what fails is kept in .hypothesis/ and tried first next time.
settings.register_profile(
    "shardax",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shardax")

# Of a worker, until it gives up the compiled programs that it holds, and by how much it may then
# grow until it does so again: where it stays large, it would else compile all anew for each test.
MOST_BYTES, GROWTH_BYTES = 2 * 2**30, 2**29
_bytes_to_clear_at = MOST_BYTES


def _resident_bytes() -> int:
    """Memory of this process, or 0 where the system does not say it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_sessionstart() -> None:
    """Begins the cache of programs anew where it has grown to a gigabyte."""
    if "PYTEST_XDIST_WORKER" not in os.environ and PROGRAMS.is_dir():
        with os.scandir(PROGRAMS) as entries:
            size = sum(entry.stat().st_size for entry in entries)
        if size > 2**30:
            shutil.rmtree(PROGRAMS, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Keeps the memory of a worker below about 3 GB: JAX's caches grow without bound."""
    # What then stays is passed by in later collections, as what the collection of tests left.
    global _bytes_to_clear_at
    if _resident_bytes() > _bytes_to_clear_at:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        with contextlib.suppress(OSError, AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        _bytes_to_clear_at = max(MOST_BYTES, _resident_bytes() + GROWTH_BYTES)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Lets collections of garbage pass by what stays for the whole run: modules and tests."""
    gc.collect()
    gc.freeze()


# Markers of tests that need more packages than others.
pytest_plugins = ["tests.needs"]

EXAMPLES = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"])
ROOT = Path(__file__).parent
SOURCES = ROOT / "src"


class Page(pytest.File):
    """A page whose code is run."""

    def collect(self) -> Iterator[PageCode]:
        """Yields one test: the examples build on each other, so they stay on one worker."""
        yield PageCode.from_parent(self, name="code")


class PageCode(pytest.Item):
    """All the code of one page, from top to bottom, until an example fails."""

    def runtest(self) -> None:
        """Runs the examples in one namespace."""
        # The page about settings shows those of JAX, and not those of the tests.
        shows_settings = self.path.name == "configure.md"
        if shows_settings:
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        try:
            for example in EXAMPLES.parse(self.path).examples():
                example.evaluate()
        finally:
            if shows_settings:
                _keep_programs()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Shows what the example printed beside what it should have; its line is in the text."""
        if isinstance(excinfo.value, SybilFailure):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo, style))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the report says that the test is."""
        return self.path, 0, f"the code of {self.path.name}"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Page | None:
    """Collects the pages: ``README.md`` and what is under ``docs/``."""
    if file_path.suffix == ".py" and SOURCES in file_path.parents and file_path.stem != "__main__":
        # Doctests would take a module that is not imported yet as a second copy, with own classes.
        with contextlib.suppress(ImportError):
            name = ".".join(file_path.relative_to(SOURCES).with_suffix("").parts)
            importlib.import_module(name.removesuffix(".__init__"))
    in_docs = ROOT / "docs" in file_path.parents and "_build" not in file_path.parts
    is_page = file_path == ROOT / "README.md" or (in_docs and file_path.suffix == ".md")
    if is_page and any(EXAMPLES.parse(file_path).examples()):
        return Page.from_parent(parent, path=file_path)
    return None
