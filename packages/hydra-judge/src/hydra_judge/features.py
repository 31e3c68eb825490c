# SPDX-License-Identifier: Apache-2.0
"""A text as hashed words and word pairs, by a handful of NumPy calls a document: some thousand documents a second a core.

The hash of a word is a difference of prefix sums of its bytes times powers of an odd number, modulo 2^64, so all words
of a document are hashed at once. A document's features depend on its own text alone.
"""

import numpy as np

__all__ = ["DENSE", "FEATURE_BITS", "Features", "features"]

FEATURE_BITS = 18
DENSE = 8
"""Numbers of a document beside its words: length, word length, variety, and shares of kinds of characters."""

_MOST_BYTES = 1 << 15
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


def _powers(base: np.uint64) -> np.ndarray:
    steps = np.full(_MOST_BYTES + 1, base, dtype=np.uint64)
    steps[0] = 1
    return np.cumprod(steps, dtype=np.uint64)


_POWERS, _INVERSES = _powers(_BASE), _powers(_INVERSE)

_WORD_BYTE = np.zeros(256, dtype=bool)
_WORD_BYTE[[*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), *range(0x80, 0x100)]] = True
_LOWER = np.arange(256, dtype=np.uint8)
_LOWER[0x41:0x5B] += 0x20

Features = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(index int64 [N] ascending, value float64 [N] of norm 1, dense float64 [DENSE])."""


def _mix(values: np.ndarray) -> np.ndarray:
    """Spreads every bit over all others.

    Source: Steele, Lea, Flood 2014, SplitMix64's finaliser.
    """
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def features(text: str) -> Features:
    """Features of a text; of its head and tail where it is longer than 32 KiB.

    Args:
        text: the document.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) > _MOST_BYTES:
        raw = raw[: _MOST_BYTES // 2] + raw[-(_MOST_BYTES // 2) :]
    data = np.frombuffer(raw, dtype=np.uint8)
    inside = np.concatenate([[False], _WORD_BYTE[data], [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    terms = _LOWER[data].astype(np.uint64) * _POWERS[: len(data)]
    prefix = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
    words = _mix((prefix[ends] - prefix[starts]) * _INVERSES[starts] + (ends - starts).astype(np.uint64))
    pairs = _mix(words[:-1] * _BASE + words[1:])
    index, counts = np.unique(np.concatenate([words, pairs]) >> np.uint64(64 - FEATURE_BITS), return_counts=True)
    value = np.log1p(counts)
    norm = float(np.sqrt(value @ value))
    dense = _dense(data, ends - starts, len(np.unique(words)))
    return index.astype(np.int64), value / norm if norm else value, dense


def _dense(data: np.ndarray, lengths: np.ndarray, distinct: int) -> np.ndarray:
    """Numbers [DENSE] of about unit size."""
    size, words = max(len(data), 1), max(len(lengths), 1)
    upper = np.count_nonzero((data >= 0x41) & (data < 0x5B)) / size
    digits = np.count_nonzero((data >= 0x30) & (data < 0x3A)) / size
    letters = np.count_nonzero(_WORD_BYTE[data]) / size
    ends = np.count_nonzero((data == 0x2E) | (data == 0x3F) | (data == 0x3B)) / words
    loud = np.count_nonzero((data == 0x21) | (data == 0x24) | (data == 0x7C) | (data == 0x40)) / words
    return np.array(
        [
            np.log10(size) / 4,
            float(lengths.mean()) / 5 if len(lengths) else 0.0,
            distinct / min(words, 500),
            4 * upper,
            4 * digits,
            letters,
            min(5 * ends, 2.0),
            min(2 * loud, 2.0),
        ]
    )
