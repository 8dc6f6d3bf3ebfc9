# SPDX-License-Identifier: Apache-2.0
"""Every form of parallelism, alone and with others, on 1, 2 and 8 devices: as one device.

Those on 4 devices run in two processes, in ``tests/distributed/test_training.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType
from tests.models.forms import FORMS, Form, make_batch, run, step, whole


@functools.cache
def alone() -> tuple[float, Any]:
    loss, gradients = step(whole(), make_batch())
    return float(loss), gradients.flat()


IN_ONE_PROCESS = [form for form in FORMS if math.prod(form.sizes.values()) != 4]


@pytest.mark.parametrize("form", IN_ONE_PROCESS, ids=lambda form: form.name)
def test_loss_and_gradients_equal_one_device(form: Form) -> None:
    value, wanted = alone()
    loss, gradients = run(form)
    assert float(loss) == pytest.approx(value, abs=1e-5)
    found = gradients.flat()
    assert found.keys() == wanted.keys()
    for path, each in found.items():
        np.testing.assert_allclose(each, wanted[path], atol=2e-5, err_msg=str(path))


def test_loss_and_gradients_over_explicit_axes() -> None:
    value, wanted = alone()
    loss, gradients = run(FORMS[-2], AxisType.Explicit)
    assert float(loss) == pytest.approx(value, abs=1e-5)
    for path, each in gradients.flat().items():
        np.testing.assert_allclose(each, wanted[path], atol=2e-5, err_msg=str(path))
