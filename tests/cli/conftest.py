# SPDX-License-Identifier: Apache-2.0
"""What tests of the command line share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_layer() -> Iterator[None]:
    """The preset ``tiny`` with one layer, whose programs are compiled sooner."""
    from tests.cli.test_runs import PRESETS  # needs packages that other folders do without

    preset = PRESETS["tiny"]
    model = dataclasses.replace(preset.model, num_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", dataclasses.replace(preset, model=model))
        yield
