"""A pseudo-random permutation of range(size) that needs no memory and any element of which is cheap.

A Feistel network over the next power of four, walked until it falls into the range again (cycle walking:
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It shuffles millions of tasks without a
list of their places.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6


def permute(index: int, size: int, key: str) -> int:
    """Where `index` lies in the permutation of range(size) that `key` names. Needs 0 <= index < size."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(_ROUNDS):
            digest = blake2b(f"{key}:{number}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half_bits | right
        if index < size:
            return index
