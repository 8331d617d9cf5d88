"""What an evaluation can tell apart: intervals, paired tests and standard errors, and the estimator of pass@k."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_Z_95 = 1.959963984540054
"""97.5% point of the normal distribution."""


def wilson_interval(share: float, count: int, *, z: float = _Z_95) -> tuple[float, float]:
    """The interval (95% with the default `z`) of a share of `count` independent cases.

    Source: Wilson, JASA 22 (1927) 209. For means of cases between 0 and 1 it is too wide and never too narrow.
    """
    assert count > 0
    assert 0 <= share <= 1
    weight = z * z / count
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    # At 0 and 1 one end is exact, and rounding must not take it away.
    return (0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half))


def mcnemar_test(only_first: int, only_second: int) -> float:
    """Two-sided p-value that two ways are equally good, where one alone was right on so many cases, and the other.

    The exact binomial test on the cases in which they differ. Source: McNemar, Psychometrika 12 (1947) 153.
    """
    differing, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(differing, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / 2**differing)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated from more: 1 - C(n - c, k) / C(n, k).

    Without bias, unlike 1 - (1 - c/n)^k. Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    assert 0 <= num_correct <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ratio_error(totals: npt.ArrayLike, sizes: npt.ArrayLike) -> float:
    """Standard error of sum(totals) / sum(sizes) over independent groups: a mean per token, where documents are drawn.

    Tokens of one document are not independent; documents are. NaN for less than two groups.
    """
    total, size = np.asarray(totals, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    if len(size) < 2:
        return math.nan
    residuals = total - total.sum() / size.sum() * size
    return float(math.sqrt(len(size) / (len(size) - 1) * np.square(residuals).sum()) / size.sum())
