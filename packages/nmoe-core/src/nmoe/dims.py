# SPDX-License-Identifier: Apache-2.0
"""The legend of shape suffixes: one letter, one meaning, in the whole package.

A tensor's name ends in its axes, outermost first: ``x_TD`` is [tokens, model width], ``w2_XDF`` is [experts of this
rank, model width, expert hidden width]. A number before a letter multiplies it: ``preact_S2F`` has 2F columns. Tables
of boundaries (``offset_X``) have one entry more than the axis that they cut, because both ends are in them.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DIMS"]

DIMS: Mapping[str, str] = MappingProxyType(
    {
        "B": "rows of a batch (packed sequences)",
        "T": "tokens: of this rank, or of one row where B stands before it",
        "D": "model width",
        "N": "query heads",
        "G": "key/value heads",
        "H": "width of a head, or of the part of it that the name speaks of",
        "L": "latent width (low-rank queries, keys and values)",
        "V": "vocabulary",
        "E": "experts of the layer",
        "X": "experts of this rank",
        "K": "experts per token",
        "F": "hidden width of a feed-forward network or expert",
        "P": "ranks of the expert-parallel group",
        "R": "rows received by this rank",
        "Q": "rows received by this rank from the ranks of its node, to which other nodes' rows came first",
        "S": "assignments (row-expert slots); T*K on one rank",
        "M": "words (int32) of the record that travels with a row",
        "O": "owners of one token: at most min(K, P)",
    }
)
