# SPDX-License-Identifier: Apache-2.0
"""The example with a PyTorch loss trains, and says what it needs where PyTorch is missing."""

from __future__ import annotations

import importlib.util

import pytest

from examples import torch_loss
from tests.needs import needs


@needs("torch")
def test_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    losses = torch_loss.main(["--steps", "60"])
    assert losses is not None
    assert losses[1] < 0.6 * losses[0]
    assert capsys.readouterr().out.startswith("loss 0.")


def test_missing_pytorch_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_loss.main([]) is None
    assert capsys.readouterr().out == "This example needs PyTorch: pip install torch\n"
