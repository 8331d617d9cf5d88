"""The update of whole matrices: numbers worked by hand, and the equations written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fbt_megatron.config.schema import NorMuonConfig
from fbt_megatron.optim.normuon import normalize_rows, normuon_update, shape_factor
from tests.optim import reference

ORTHONORMAL = torch.tensor([[[0.6, 0.0], [0.8, 0.0], [0.0, 1.0], [0.0, 0.0]]])


def test_hand_worked_update_of_a_2_by_3_matrix():
    """The direction is Q diag(3, 4) [I 0] with the rotation Q = [[0.6, -0.8], [0.8, 0.6]]; its norm is 5.

    The five polynomials act on singular values: 3 / 5.1 -> 1.3400231, 0.8191858, 1.8505778, 1.1536069, 0.9467875 and
    4 / 5.1 -> 0.2624631, 1.0109567, 1.6040925, 0.4293148, 0.8782865. So O = Q diag(0.9467875, 0.8782865) [I 0] =
    [[0.5680725, -0.7026292, 0], [0.7574300, 0.5269719, 0]], ||O|| = 1.2914416, and v = 0.05 * row mean of squares =
    0.01360657, 0.01418999. Rows over sqrt(v) are [4.8700053, -6.0235412, 0], [6.3584521, 4.4238091, 0], of norm
    10.9544512: back to ||O|| they shrink by 0.1178910, and the shape factor is sqrt(2/3) = 0.8164966.
    """
    direction = torch.tensor([[[1.8, -3.2, 0.0], [2.4, 2.4, 0.0]]])
    update, row_moments = normuon_update(direction, torch.zeros(1, 2), NorMuonConfig())
    expected = torch.tensor([[[0.4687749, -0.5798115, 0.0], [0.6120492, 0.4258252, 0.0]]])
    torch.testing.assert_close(update, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_moments, torch.tensor([[0.01360657, 0.01418999]]), rtol=1e-5, atol=0)


def test_row_stage_keeps_the_norm_and_zero_rows():
    normalized, row_moments = normalize_rows(ORTHONORMAL, torch.zeros(1, 4), beta2=0.95)
    length = (2 / 3) ** 0.5
    expected = torch.tensor([[[length, 0.0], [length, 0.0], [0.0, length], [0.0, 0.0]]])
    torch.testing.assert_close(normalized, expected, rtol=1e-5, atol=0)
    assert normalized.norm().item() == pytest.approx(1.4142, rel=1e-4)
    torch.testing.assert_close(row_moments, 0.05 * torch.tensor([[0.18, 0.32, 0.5, 0.0]]), rtol=1e-5, atol=0)


def test_shape_factor_is_applied_once():
    """The norm of the update is that of the polar factor times the factor, whatever the rows were divided by."""
    direction = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(5))
    for scale, factor in (("spectral", 0.5), ("rms", 0.2 * 32**0.5), ("none", 1.0)):
        update, _ = normuon_update(direction, torch.zeros(1, 8), NorMuonConfig(scale=scale))
        norm = np.linalg.norm(reference.orthogonalize(direction[0].double().numpy(), reference.POLAR_EXPRESS))
        assert update.norm().item() == pytest.approx(factor * norm, rel=1e-5)


def test_shape_factors():
    assert shape_factor(9, 4, scale="spectral") == 1.5
    assert shape_factor(4, 9, scale="spectral") == pytest.approx(2 / 3)
    assert shape_factor(4, 9, scale="rms") == pytest.approx(0.6)
    assert shape_factor(4, 9, scale="none") == 1.0
    with pytest.raises(ValueError, match="scale=muon"):
        shape_factor(4, 9, scale="muon")


def test_zero_direction_gives_zero_update_and_only_decays_the_moment():
    update, row_moments = normuon_update(torch.zeros(1, 3, 5), torch.ones(1, 3), NorMuonConfig())
    assert torch.equal(update, torch.zeros(1, 3, 5))
    torch.testing.assert_close(row_moments, torch.full((1, 3), 0.95))


def test_without_row_norm_the_moments_are_left_alone():
    moments = torch.rand(1, 4)
    direction = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2))
    update, after = normuon_update(direction, moments, NorMuonConfig(row_norm=False, scale="none"))
    assert torch.equal(moments, after)
    expected = reference.orthogonalize(direction[0].double().numpy(), reference.POLAR_EXPRESS)
    assert reference.relative_error(update[0].double().numpy(), expected) < 1e-5


def test_arguments_are_not_changed():
    directions, moments = torch.randn(2, 4, 6), torch.rand(2, 4)
    before = directions.clone(), moments.clone()
    normuon_update(directions, moments, NorMuonConfig())
    assert torch.equal(directions, before[0])
    assert torch.equal(moments, before[1])
