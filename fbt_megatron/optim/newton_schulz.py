"""The orthogonalisation of NorMuon: a few matrix products that push every singular value towards one.

Legend: k matrices of one shape, m rows, n columns; s = min(m, n), l = max(m, n).
"""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""One polynomial for every iteration; singular values end in 0.68..1.13. Source: K. Jordan, Muon, 2024."""

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""One polynomial for each of five iterations; singular values end in 0.85..1.15. Source: arXiv 2505.16932."""

NORM_MARGIN = 1.02
"""The first iterate has Frobenius norm 1 / NORM_MARGIN, so that rounding cannot lift a singular value above one."""


def iteration_coefficients(name: str, *, steps: int) -> tuple[tuple[float, float, float], ...]:
    """The polynomial (a, b, c) of each iteration for `optimizer.normuon.coefficients` = `name`.

    Raises ValueError for an unknown name, or where Polar Express is asked for more than its five iterations.
    """
    if name == "quintic":
        return (QUINTIC,) * steps
    if name != "polar_express":
        raise ValueError(f"coefficients={name}: must be polar_express or quintic.")
    if steps > len(POLAR_EXPRESS):
        raise ValueError(f"ns_steps={steps}: Polar Express has {len(POLAR_EXPRESS)} iterations.")
    return POLAR_EXPRESS[:steps]


def orthogonalize(matrices: Tensor, *, ns_steps: int, coefficients: str) -> Tensor:
    """Approximate polar factor of each matrix: U V' where U S V' is its singular value decomposition.

    `matrices` is [k, m, n]; so is the result. Iterations run in its dtype, the norm in fp32. The result does not depend
    on the scale of a matrix, and a zero matrix stays zero. Raises ValueError as `iteration_coefficients` does.

    Source: X <- M / (1.02 ||M||), then X <- a X + (b A + c A A) X with A = X X' on the smaller side.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    iterate = _unit_norm(matrices if wide else matrices.mT)
    for a, b, c in iteration_coefficients(coefficients, steps=ns_steps):
        gram = iterate @ iterate.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        iterate = torch.baddbmm(iterate, polynomial, iterate, beta=a)
    return iterate if wide else iterate.mT


def orthogonalize_flops(rows: int, cols: int, *, ns_steps: int) -> int:
    """Floating-point operations of `orthogonalize` on one m x n matrix: 2 s^2 (2 l + s) for each iteration."""
    small, large = min(rows, cols), max(rows, cols)
    return ns_steps * 2 * small * small * (2 * large + small)


def _unit_norm(matrices: Tensor) -> Tensor:
    """Each [m, n] of [k, m, n] divided by NORM_MARGIN times its Frobenius norm; zero stays zero.

    The largest element is taken out before squaring: squares of elements below 1e-23 would vanish in fp32, and the rule
    would no longer be free of scale.
    """
    exact = matrices.float()
    largest = _zero_to_one(exact.abs().amax(dim=(-2, -1), keepdim=True))
    scaled = exact / largest
    norm = _zero_to_one(torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True))
    return (scaled / (NORM_MARGIN * norm)).to(matrices.dtype)


def _zero_to_one(divisor: Tensor) -> Tensor:
    """A divisor with which zero divided by zero is zero."""
    return torch.where(divisor > 0, divisor, 1.0)
