# SPDX-License-Identifier: Apache-2.0
"""Which versions of JAX shardax imports with."""

from __future__ import annotations

import subprocess
import sys
import warnings

import jax
import pytest

from shardax._core import _jax

WITH_VERSION = """
import jax
jax.__version_info__ = {version}
{broken}
import shardax
"""


def importing(version: tuple[int, ...], broken: str = "") -> subprocess.CompletedProcess[str]:
    """Imports shardax in a process in which JAX says that it is of a version."""
    program = WITH_VERSION.format(version=version, broken=broken)
    command = [sys.executable, "-W", "default", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_jax_older_than_the_bound_is_refused_by_the_import_with_the_command_that_updates_it() -> (
    None
):
    # An older version also lacks names that other modules import.
    done = importing((0, 9, 2), broken="del jax.sharding.AxisType")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: shardax needs JAX 0.10 or newer, and JAX 0.9.2 is installed. "
        "Update it: pip install --upgrade 'jax>=0.10'."
    )


def test_a_jax_newer_than_tested_warns_once_and_works() -> None:
    done = importing((0, 13, 0))
    assert done.returncode == 0
    assert done.stderr.count("JAX 0.13.0 is newer than the versions that shardax is tested") == 1
    assert "pip install 'jax<0.13'" in done.stderr


def test_a_tested_jax_says_nothing() -> None:
    assert _jax.OLDEST <= jax.__version_info__[:2] <= _jax.NEWEST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for minor in range(_jax.OLDEST[1], _jax.NEWEST[1] + 1):
            _jax.check_version((0, minor, 99))


@pytest.mark.parametrize("version", [(0, 4, 38), (0, 9, 99)])
def test_every_version_below_the_bound_is_refused(version: tuple[int, ...]) -> None:
    with pytest.raises(ImportError, match="shardax needs JAX"):
        _jax.check_version(version)
