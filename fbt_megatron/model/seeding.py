"""Seeds of independent random streams, derived from what they are for."""

from __future__ import annotations

import hashlib


def derive_seed(*key: int | str) -> int:
    """A 64-bit seed that is a pure function of `key`, the same on every machine and Python.

    Unlike `seed + rank` or `seed * 31 + step`, neighbouring keys give unrelated streams.
    """
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
