"""Which documents go where: train or validation, the global shuffle, and the cut into shards.

All three are functions of the documents and a seed. The generator is written out here, so that a build gives the same
bytes whatever version of a library is installed.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fbt_megatron.errors import DataError

IntArray = npt.NDArray[np.int64]


def validation_mask(text_hashes: npt.NDArray[np.uint64], fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Choose the validation documents.

    Documents are ordered by a seeded hash of their text and the first `fraction` of them is taken, so copies of one
    text always fall on the same side.

    Args:
        text_hashes: hash of each document's text [num_documents].
        fraction: share of the documents, at least one document where it is above 0.

    Raises:
        DataError: nothing would be left to train on.
    """
    if fraction == 0:
        return np.zeros(len(text_hashes), dtype=bool)
    keys = _mix(text_hashes ^ _stream_key("validation", seed))
    wanted = max(1, math.floor(fraction * len(keys) + 0.5))
    mask: npt.NDArray[np.bool_] = keys <= np.sort(keys)[wanted - 1]
    if mask.all():
        raise DataError(
            f"--validation-fraction {fraction}: would take all {len(keys)} documents for validation. "
            "Give more documents, or --validation-fraction 0."
        )
    return mask


def shuffled(num_documents: int, seed: int) -> IntArray:
    """Return a permutation of `0 .. num_documents - 1`."""
    keys = _mix(np.arange(num_documents, dtype=np.uint64) ^ _stream_key("shuffle", seed))
    return np.argsort(keys, kind="stable").astype(np.int64)


def shard_boundaries(num_tokens: IntArray, num_shards: int) -> IntArray:
    """Cut documents into consecutive shards of about equal numbers of tokens.

    Args:
        num_tokens: tokens of each document, in order.
        num_shards: at most the number of documents.

    Returns:
        First document of each shard, and the number of documents: int64 [num_shards + 1], strictly rising.
    """
    num_documents = len(num_tokens)
    ends = np.cumsum(num_tokens)
    targets = ends[-1] * np.arange(1, num_shards) / num_shards
    inner = np.searchsorted(ends, targets, side="left") + 1
    # At least one document per shard, from both sides.
    numbers = np.arange(1, num_shards)
    inner = np.maximum.accumulate(np.maximum(inner, 1) - numbers) + numbers
    inner = np.minimum(inner, num_documents - num_shards + numbers)
    return np.concatenate([[0], inner, [num_documents]]).astype(np.int64)


def _stream_key(purpose: str, seed: int) -> np.uint64:
    digest = hashlib.sha256(f"{purpose} {seed}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def _mix(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers, one to one.

    Source: output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    mixed = values.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
