# SPDX-License-Identifier: Apache-2.0
"""The order of windows is a permutation, differs by key, and is the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import DataError
from shardax.train.data.order import hash64, mix64, permute


def test_mix64_gives_the_published_splitmix64_sequence():
    # First outputs of SplitMix64 seeded with 0: the state advances by the golden constant.
    golden = 0x9E3779B97F4A7C15
    states = [(golden * i) % 2**64 for i in range(3)]
    assert mix64(np.array(states, dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_permute_visits_every_item_once(size: int, key: int):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(
    size=st.integers(1, 2**62),
    key=st.integers(0, 2**64 - 1),
    fractions=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_permute_of_one_place_needs_no_other_place(size: int, key: int, fractions: list[float]):
    places = [min(size - 1, int(fraction * size)) for fraction in fractions]
    together = permute(places, size, key).tolist()
    assert together == [permute(place, size, key)[0] for place in places]
    assert all(0 <= item < size for item in together)


def test_permute_spreads_every_place_over_all_items():
    size, keys = 10, 1500
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), permute(np.arange(size), size, key)] += 1
    expected = keys / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # 81 degrees of freedom: mean 81, standard deviation 12.7.
    assert chi_squared < 81 + 5 * 12.7


def test_permute_equals_the_recorded_order():
    assert permute(np.arange(10), 10, key=0).tolist() == [7, 1, 6, 8, 3, 4, 5, 9, 0, 2]


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_permute_refuses_a_size_out_of_range(size: int):
    with pytest.raises(DataError, match=f"size={size}"):
        permute([], size, key=0)


@pytest.mark.parametrize("place", [-1, 5])
def test_permute_refuses_a_place_outside(place: int):
    with pytest.raises(DataError, match=r"outside \[0, 5\)"):
        permute([0, place], 5, key=0)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=4))
def test_hash64_broadcasts_as_elementwise_hashes(words: list[int]):
    *front, last = words
    many = hash64(*front, np.array([last, 7], dtype=np.uint64))
    assert many.tolist() == [hash64(*front, last)[0], hash64(*front, 7)[0]]
