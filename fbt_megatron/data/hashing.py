"""The short hash behind draws that must be the same with every version of every library."""

from __future__ import annotations

import hashlib


def hash64(data: bytes) -> int:
    """64 well mixed bits, as an unsigned integer, that depend on `data` alone."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
