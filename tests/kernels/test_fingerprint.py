"""Fingerprints: one value with and without kernels, another one for every change."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.fingerprint import (
    STRIPE,
    constants,
    digest_of_sums,
    fingerprint,
    flat_bytes,
    plain_stripe_sums,
    stripe_sums,
)

SIZES = [0, 1, 7, 8, 9, STRIPE - 1, STRIPE, STRIPE + 1, 5 * STRIPE + 13, 300 * STRIPE + 1]


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def by_definition(data: bytes) -> str:
    """The value from the words of the module's docstring, with whole numbers."""
    sums = b""
    for start in range(0, len(data), STRIPE):
        stripe = data[start : start + STRIPE]
        total = 0
        for i in range(0, len(stripe), 8):
            word = int.from_bytes(stripe[i : i + 8].ljust(8, b"\0"), "little")
            total += (word ^ word >> 32) * int(constants()[i // 8])
        sums += (total % 2**64).to_bytes(8, "little")
    return hashlib.blake2b(f"{len(data)} 0 ".encode() + sums, digest_size=16).hexdigest()


@pytest.mark.parametrize("size", SIZES[:-1])
def test_it_is_what_the_definition_says(size: int) -> None:
    data = content(size)
    assert fingerprint(data) == by_definition(data)


@pytest.mark.kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 3])
def test_kernels_and_numpy_agree(size: int, offset: int) -> None:
    flat = np.frombuffer(content(size + offset), dtype=np.uint8)[offset:]
    assert np.array_equal(stripe_sums(flat), plain_stripe_sums(flat))


def test_tensors_and_buffers_of_the_same_bytes_are_the_same() -> None:
    tensor = torch.arange(1000, dtype=torch.float64).view(10, 100)
    data = tensor.numpy().tobytes()
    assert (
        fingerprint(tensor)
        == fingerprint(data)
        == fingerprint(memoryview(data))
        == fingerprint(bytearray(data))
    )
    assert fingerprint(tensor.bfloat16()) != fingerprint(tensor)
    with pytest.raises(ValueError, match="contiguous"):
        fingerprint(tensor.t())


@given(st.integers(0, 3 * STRIPE * 8 - 1))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_shows(bit: int) -> None:
    data = bytearray(content(3 * STRIPE))
    before = fingerprint(data)
    data[bit // 8] ^= 1 << bit % 8
    assert fingerprint(data) != before


@given(st.lists(st.integers(0, 511), min_size=2, max_size=2, unique=True), st.integers(0, 63))
@settings(max_examples=60, deadline=None)
def test_the_same_bit_flipped_in_two_words_of_a_stripe_shows(words: list[int], bit: int) -> None:
    """Sums of plain products would let two flipped top bits cancel."""
    data = np.frombuffer(content(STRIPE), dtype=np.uint64).copy()
    before = fingerprint(data.tobytes())
    data[words] ^= np.uint64(1 << bit)
    assert fingerprint(data.tobytes()) != before


def test_length_order_and_context_show() -> None:
    a, b = content(STRIPE, 1), content(STRIPE, 2)
    assert len({fingerprint(bytes(n)) for n in range(20)}) == 20
    assert fingerprint(a + b) != fingerprint(b + a)
    swapped = b[8:16] + b[:8] + b[16:]
    assert fingerprint(swapped) != fingerprint(b)
    sums = stripe_sums(flat_bytes(a))
    assert len({digest_of_sums(sums, len(a), context) for context in (b"", b"x", b"y", b"xy")}) == 4
