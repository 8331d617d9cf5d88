"""Adam against torch's."""

from __future__ import annotations

import pytest
import torch

from fbt_megatron.config.schema import AdamConfig
from fbt_megatron.optim.adam import adam_update


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.0)])
def test_equals_torch(weight_decay, betas):
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(50, generator=draw)
    expected = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.02, betas=betas, eps=1e-6, weight_decay=weight_decay)
    if not weight_decay:
        optimizer = torch.optim.Adam([expected], lr=0.02, betas=betas, eps=1e-6)
    exp_avg, exp_avg_sq = torch.zeros(50), torch.zeros(50)
    config = AdamConfig(betas=betas, eps=1e-6)
    for update in range(1, 31):
        gradient = torch.randn(50, generator=draw) * 10 ** torch.randint(-4, 2, (50,), generator=draw).float()
        expected.grad = gradient.clone()
        optimizer.step()
        rates = {"lr": 0.02, "weight_decay": weight_decay}
        adam_update(weights, gradient, exp_avg, exp_avg_sq, num_updates=update, config=config, **rates)
        torch.testing.assert_close(weights, expected.detach(), rtol=1e-5, atol=1e-6)


def test_first_update_is_the_sign_of_the_gradient_after_the_decay():
    weights, gradient = torch.tensor([2.0, -4.0]), torch.tensor([0.3, -70.0])
    moments = torch.zeros(2), torch.zeros(2)
    adam_update(weights, gradient, *moments, num_updates=1, lr=0.1, weight_decay=0.5, config=AdamConfig())
    torch.testing.assert_close(weights, torch.tensor([2 * 0.95 - 0.1, -4 * 0.95 + 0.1]))
