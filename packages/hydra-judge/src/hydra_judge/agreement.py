# SPDX-License-Identifier: Apache-2.0
"""How far two graders agree, in NumPy: rank correlation, weighted kappa, error, intervals, thresholds."""

from collections.abc import Callable

import numpy as np

__all__ = [
    "bootstrap",
    "confusion",
    "mean_absolute_error",
    "precision_threshold",
    "quadratic_kappa",
    "share_threshold",
    "spearman",
]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks [N] float64 from 1, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation, in [-1, 1]; NaN if a side is constant.

    Args:
        one, other: grades [N].

    Source: Spearman 1904; Pearson's correlation of mid-ranks.
    """
    left, right = _ranks(one), _ranks(other)
    left, right = left - left.mean(), right - right.mean()
    norm = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / norm if norm else float("nan")


def confusion(one: np.ndarray, other: np.ndarray, *, low: int, high: int) -> np.ndarray:
    """Counts int64 [L, L] of (level of `one`, level of `other`), levels `low` to `high`.

    Args:
        one, other: whole levels [N] in [low, high].
    """
    levels = high - low + 1
    flat = (one.astype(np.int64) - low) * levels + (other.astype(np.int64) - low)
    return np.bincount(flat, minlength=levels * levels).reshape(levels, levels)


def quadratic_kappa(one: np.ndarray, other: np.ndarray, *, low: int, high: int) -> float:
    """Cohen's kappa with quadratic weights, at most 1; NaN if both sides are the same constant.

    Args:
        one, other: whole levels [N] in [low, high].

    Source: Cohen 1968, "Weighted kappa".
    """
    observed = confusion(one, other, low=low, high=high).astype(np.float64)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / observed.sum()
    level = np.arange(high - low + 1)
    weight = (level[:, None] - level[None, :]) ** 2
    chance = float((weight * expected).sum())
    return 1.0 - float((weight * observed).sum()) / chance if chance else float("nan")


def mean_absolute_error(one: np.ndarray, other: np.ndarray) -> float:
    """Mean of |one - other|, grades [N]."""
    return float(np.abs(one - other).mean())


def bootstrap(
    measure: Callable[[np.ndarray, np.ndarray], float],
    one: np.ndarray,
    other: np.ndarray,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a measure of agreement.

    Args:
        measure: of two arrays of grades.
        one, other: grades [N].
        resamples: drawn with replacement.
        level: share of the resamples inside the interval.
        seed: of the draws.

    Returns:
        Lower and upper end; NaN if no resample has a value.

    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        rows = rng.integers(0, len(one), len(one))
        drawn.append(measure(one[rows], other[rows]))
    values = np.asarray(drawn)
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def share_threshold(scores: np.ndarray, *, share: float) -> float:
    """Lowest score from which on at most `share` of the documents are kept; infinite if even the best are too many.

    Falls or stays as `share` grows.

    Args:
        scores: [N].
        share: in [0, 1].
    """
    values, counts = np.unique(scores, return_counts=True)
    kept = np.cumsum(counts[::-1])[::-1] / len(scores)
    fits = np.flatnonzero(kept <= share)
    return float(values[fits[0]]) if len(fits) else float("inf")


def precision_threshold(scores: np.ndarray, good: np.ndarray, *, precision: float) -> float:
    """Lowest score from which on at least `precision` of the kept documents are good; infinite if there is none.

    Grows or stays as `precision` grows.

    Args:
        scores: [N].
        good: bool [N].
        precision: in [0, 1].
    """
    values, first = np.unique(np.sort(scores), return_index=True)
    ordered = good[np.argsort(scores, kind="stable")]
    kept = len(scores) - first
    right = np.cumsum(ordered[::-1])[::-1][first]
    fits = np.flatnonzero(right / kept >= precision)
    return float(values[fits[0]]) if len(fits) else float("inf")
