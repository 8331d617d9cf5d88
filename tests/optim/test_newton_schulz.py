"""Orthogonalisation against the SVD and against the iteration written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fbt_megatron.optim.newton_schulz import iteration_coefficients, orthogonalize, orthogonalize_flops
from tests.optim import reference

SHAPES = [(16, 16), (12, 40), (40, 12), (1, 7), (7, 1)]


def polar_factor(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def well_conditioned(rows: int, cols: int) -> torch.Tensor:
    """Singular values from 0.3 to 3 in random directions, [1, m, n]."""
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 100 + cols), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left * torch.linspace(0.3, 3.0, len(values), dtype=torch.float64) @ right).float().unsqueeze(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("coefficients", "low", "high"), [("polar_express", 0.85, 1.15), ("quintic", 0.68, 1.13)], ids=["polar", "quintic"]
)
def test_singular_values_end_in_the_band_around_one(shape, coefficients, low, high):
    matrix = well_conditioned(*shape)
    result = orthogonalize(matrix, ns_steps=5, coefficients=coefficients)
    values = torch.linalg.svdvals(result[0])
    assert low < values.min()
    assert values.max() < high


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
@pytest.mark.parametrize(("coefficients", "bound"), [("polar_express", 0.1), ("quintic", 0.35)])
@pytest.mark.parametrize("seed", range(3))
def test_random_matrix_comes_near_its_polar_factor(shape, coefficients, bound, seed):
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
    result, exact = orthogonalize(matrix, ns_steps=5, coefficients=coefficients)[0], polar_factor(matrix[0])
    assert torch.linalg.norm(result - exact) / torch.linalg.norm(exact) < bound


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", ["polar_express", "quintic"])
def test_equals_the_iteration_written_out(shape, coefficients):
    table = {"polar_express": reference.POLAR_EXPRESS, "quintic": reference.QUINTIC}[coefficients]
    matrices = torch.cat([well_conditioned(*shape), 7 * well_conditioned(*shape).flip(1)])
    result = orthogonalize(matrices, ns_steps=5, coefficients=coefficients)
    for matrix, actual in zip(matrices.double().numpy(), result.double().numpy(), strict=True):
        assert reference.relative_error(actual, reference.orthogonalize(matrix, table)) < 1e-5


def test_singular_value_ratio_of_sixteen_shrinks_below_1_7():
    matrix = torch.tensor([[[8.0, -0.5], [8.0, 0.5]]])
    for coefficients in ("polar_express", "quintic"):
        values = torch.linalg.svdvals(orthogonalize(matrix, ns_steps=5, coefficients=coefficients)[0])
        assert values[0] / values[1] < 1.7


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scale_of_the_input_does_not_matter(scale):
    matrix = well_conditioned(6, 9)
    expected = orthogonalize(matrix, ns_steps=5, coefficients="polar_express")
    torch.testing.assert_close(orthogonalize(matrix * scale, ns_steps=5, coefficients="polar_express"), expected)


def test_zero_stays_zero_beside_a_matrix_that_is_not():
    matrices = torch.cat([torch.zeros(1, 4, 6), well_conditioned(4, 6)])
    result = orthogonalize(matrices, ns_steps=5, coefficients="polar_express")
    assert torch.equal(result[0], torch.zeros(4, 6))
    assert result[1].isfinite().all()
    assert result[1].norm() > 1


def test_low_precision_iterates_in_its_type():
    matrix = well_conditioned(8, 24)
    result = orthogonalize(matrix.bfloat16(), ns_steps=5, coefficients="polar_express")
    assert result.dtype is torch.bfloat16
    exact = polar_factor(matrix[0])
    assert torch.linalg.norm(result[0].float() - exact) / torch.linalg.norm(exact) < 0.12


def test_fewer_iterations_take_the_first_polynomials():
    assert iteration_coefficients("polar_express", steps=2) == tuple(tuple(c) for c in reference.POLAR_EXPRESS[:2])
    assert len(iteration_coefficients("quintic", steps=9)) == 9
    with pytest.raises(ValueError, match="ns_steps=6"):
        iteration_coefficients("polar_express", steps=6)
    with pytest.raises(ValueError, match="coefficients=newton"):
        iteration_coefficients("newton", steps=5)


def test_cost_counts_the_products_on_the_smaller_side():
    gram, square, apply = 2 * 3 * 3 * 5, 2 * 3 * 3 * 3, 2 * 3 * 3 * 5
    assert orthogonalize_flops(3, 5, ns_steps=4) == orthogonalize_flops(5, 3, ns_steps=4) == 4 * (gram + square + apply)


def test_reference_itself_is_a_polar_factor():
    matrix = well_conditioned(6, 10)[0].double().numpy()
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    assert reference.relative_error(reference.orthogonalize(matrix, reference.POLAR_EXPRESS), left @ right) < 0.1
