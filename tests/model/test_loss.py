"""Cross entropy and log-sum-exp without the padding of the vocabulary, on one rank and on two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.model.loss import pass_losses, token_cross_entropy
from tests.distributed import run_distributed

PADDED_LOGITS = [1.0, 2.0, 3.0, 5.0]  # three ids and a padding column that would win
TARGET, VOCAB = 2, 3


def loss_of(logits: Tensor, labels: Tensor, z: float, group: dist.ProcessGroup | None = None) -> tuple[float, Tensor]:
    """`ce + z * lse^2`, summed, and its gradient."""
    leaf = logits.clone().requires_grad_()
    losses = pass_losses(leaf, labels, vocab_size=VOCAB, group=group)
    total = losses.ce_sum + z * losses.z_sum
    total.backward()
    return float(total.detach()), leaf.grad


CASES = [
    (0.0, 0.407606, [0.090031, 0.244728, -0.334759, 0.0]),
    (1e-4, 0.408767, None),
    (0.1, 1.568784, [0.151388, 0.411516, 0.118617, 0.0]),
]


@pytest.mark.parametrize(("z", "expected", "gradient"), CASES)
def test_padding_has_no_probability(z: float, expected: float, gradient: list[float] | None) -> None:
    total, grad = loss_of(torch.tensor([[PADDED_LOGITS]]), torch.tensor([[TARGET]]), z)
    assert total == pytest.approx(expected, abs=2e-6)
    if gradient is not None:
        torch.testing.assert_close(grad[0, 0], torch.tensor(gradient), atol=2e-6, rtol=0)
    assert grad[0, 0, 3] == 0.0


def test_both_terms_are_separate() -> None:
    losses = pass_losses(torch.tensor([[PADDED_LOGITS]]), torch.tensor([[TARGET]]), vocab_size=VOCAB, group=None)
    assert float(losses.ce_sum) == pytest.approx(0.407606, abs=1e-6)
    assert float(losses.z_sum) == pytest.approx(11.611778, abs=1e-5)
    assert int(losses.num_tokens) == 1


@pytest.mark.parametrize("shift", [10000.0, -10000.0])
def test_large_logits(shift: float) -> None:
    logits = torch.tensor([[PADDED_LOGITS]]) + shift
    ce, lse = token_cross_entropy(logits, torch.tensor([[TARGET]]), vocab_size=VOCAB, group=None)
    assert float(ce) == pytest.approx(0.407606, abs=1e-6)
    assert float(lse) == pytest.approx(shift + 3.407606, abs=1e-3)


def test_untrained_tokens_add_nothing() -> None:
    logits = torch.tensor([[PADDED_LOGITS], [[9.0, -9.0, 0.0, 1.0]]])
    total, gradient = loss_of(logits, torch.tensor([[TARGET, -100]]), z=0.1)
    assert total == pytest.approx(1.568784, abs=2e-6)
    assert torch.count_nonzero(gradient[1]) == 0
    losses = pass_losses(logits, torch.tensor([[-100, -100]]), vocab_size=VOCAB, group=None)
    assert (float(losses.ce_sum), float(losses.z_sum), int(losses.num_tokens)) == (0.0, 0.0, 0)


def test_equals_torch_on_random_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 128, generator=generator, dtype=torch.float64) * 4
    labels = torch.randint(0, 100, (3, 5), generator=generator)
    labels[1, 2:] = -100
    leaf = logits[..., :100].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf.transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="sum")
    squares = leaf.logsumexp(-1).square()[labels.t() >= 0].sum()
    (expected + 0.1 * squares).backward()
    product = logits.float().requires_grad_()
    losses = pass_losses(product, labels, vocab_size=100, group=None)
    (losses.ce_sum + 0.1 * losses.z_sum).backward()
    assert losses.ce_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.z_sum.item() == pytest.approx(squares.item(), rel=1e-6)
    torch.testing.assert_close(product.grad[..., :100].double(), leaf.grad, rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(product.grad[..., 100:]) == 0


def test_logits_are_left_alone_and_gradients_keep_their_type() -> None:
    logits = torch.tensor([[PADDED_LOGITS]], dtype=torch.bfloat16)
    before = logits.clone()
    _, gradient = loss_of(logits, torch.tensor([[TARGET]]), z=0.1)
    assert torch.equal(logits, before)
    assert gradient.dtype is torch.bfloat16


def _two_ranks(rank: int) -> list[tuple[float, list[float]]]:
    shard = torch.tensor([[PADDED_LOGITS[2 * rank : 2 * rank + 2]]])
    results = []
    for z, _, _ in CASES:
        for shift in (0.0, 10000.0):
            total, gradient = loss_of(shard + shift, torch.tensor([[TARGET]]), z, dist.group.WORLD)
            results.append((total, gradient[0, 0].tolist()))
    return results


@pytest.mark.distributed
def test_two_vocabulary_shards() -> None:
    first, second = run_distributed(_two_ranks, 2)
    for index, (_, expected, gradient) in enumerate(CASES):
        for (total, left), (same, right) in [(first[2 * index], second[2 * index])]:
            assert total == same == pytest.approx(expected, abs=2e-6)
            if gradient is not None:
                assert left + right == pytest.approx(gradient, abs=2e-6)
            assert right[1] == 0.0
    for shifted in (first[1], second[1]):
        assert shifted[0] == pytest.approx(0.407606, abs=2e-6)
