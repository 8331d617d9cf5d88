"""Draws depend on seed, global row and pass, and on nothing else; their distributions are those that are documented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fbt_megatron.model.noise import FeedbackNoise

NOISE = FeedbackNoise(seed=1, jitter=0.5, prefix_mixin="row")
STATE = torch.zeros(6, 4, 8)


def test_a_row_draws_the_same_in_any_micro_batch() -> None:
    together = NOISE.add_jitter(STATE, rows=[10, 11, 12, 13], pass_idx=1)
    alone = NOISE.add_jitter(STATE[:, :1], rows=[12], pass_idx=1)
    assert torch.equal(together[:, 2:3], alone)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2]] * 4)
    for mixin in ("row", "document"):
        noise = replace(NOISE, prefix_mixin=mixin)
        prefixes = noise.plain_prefix(documents, rows=[10, 11, 12, 13], pass_idx=1)
        assert torch.equal(prefixes[2:3], noise.plain_prefix(documents[:1], rows=[12], pass_idx=1))


def test_seed_row_and_pass_each_change_the_draw() -> None:
    base = NOISE.add_jitter(STATE[:, :1], rows=[3], pass_idx=1)
    others = [
        replace(NOISE, seed=2).add_jitter(STATE[:, :1], rows=[3], pass_idx=1),
        NOISE.add_jitter(STATE[:, :1], rows=[4], pass_idx=1),
        NOISE.add_jitter(STATE[:, :1], rows=[3], pass_idx=2),
    ]
    assert not any(torch.equal(base, other) for other in others)


def test_global_generator_is_neither_used_nor_moved() -> None:
    before = torch.get_rng_state()
    first = NOISE.add_jitter(STATE, rows=[0, 1, 2, 3], pass_idx=1)
    torch.rand(3)
    second = NOISE.add_jitter(STATE, rows=[0, 1, 2, 3], pass_idx=1)
    assert torch.equal(first, second)
    torch.set_rng_state(before)
    NOISE.plain_prefix(torch.zeros(1, 6, dtype=torch.int64), rows=[0], pass_idx=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_jitter_is_uniform_and_centred() -> None:
    noise = NOISE.add_jitter(torch.zeros(500, 2, 40), rows=[0, 1], pass_idx=1)
    assert float(noise.abs().max()) <= 0.5
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.std()) == pytest.approx(0.5 / 3**0.5, rel=0.02)
    assert noise.dtype is torch.float32
    assert NOISE.add_jitter(STATE.bfloat16(), rows=[0, 1, 2, 3], pass_idx=1).dtype is torch.bfloat16


def test_row_prefixes_are_uniform_from_one_to_the_row() -> None:
    """1 + floor(U * 6): each length about equally often, the first token always plain."""
    rows = list(range(3000))
    prefix = NOISE.plain_prefix(torch.zeros(len(rows), 6, dtype=torch.int64), rows=rows, pass_idx=1)
    lengths = prefix.sum(dim=1)
    assert torch.equal(prefix, torch.arange(6) < lengths[:, None])
    shares = torch.bincount(lengths, minlength=7) / len(rows)
    assert shares[0] == 0.0
    torch.testing.assert_close(shares[1:], torch.full((6,), 1 / 6), atol=0.03, rtol=0)


def test_document_prefixes_start_at_each_document() -> None:
    """1 + floor(U * length) tokens of each of the documents of lengths 4, 1 and 5, drawn independently."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2]] * 2000)
    noise = replace(NOISE, prefix_mixin="document")
    prefix = noise.plain_prefix(documents, rows=list(range(2000)), pass_idx=2)
    parts = prefix.split([4, 1, 5], dim=1)
    lengths = [part.sum(dim=1) for part in parts]
    for part, length, size in zip(parts, lengths, (4, 1, 5), strict=True):
        assert torch.equal(part, torch.arange(size) < length[:, None])
        shares = torch.bincount(length, minlength=size + 1)[1:] / 2000
        torch.testing.assert_close(shares, torch.full((size,), 1 / size), atol=0.05, rtol=0)
    correlation = torch.corrcoef(torch.stack((lengths[0], lengths[2])).float())[0, 1]
    assert abs(float(correlation)) < 0.1


def test_switched_off() -> None:
    noise = FeedbackNoise(seed=1, jitter=0.0, prefix_mixin="off")
    assert noise.add_jitter(STATE, rows=[0, 1, 2, 3], pass_idx=1) is STATE
    assert noise.plain_prefix(torch.zeros(1, 6, dtype=torch.int64), rows=[0], pass_idx=1) is None
