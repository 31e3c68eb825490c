# SPDX-License-Identifier: Apache-2.0
"""A row of a shard -> inputs, targets, positions and document numbers.

A row holds parts of several documents. Attention stays inside a document and positions start anew with each, so a
document is read the same way whatever it was packed with. The end-of-document token (EOS) is the last target of the
document it ends and, as an input, the first token of the next one: every token is predicted exactly once, from its own
document alone, and a model learns both to stop and to begin.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["IGNORED", "PackedRows", "pack_rows"]

IGNORED = -100
"""Target of a padding position: it has no part in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Rows ready for the model, all int64 [B, T].

    Attributes:
        tokens_BT: inputs, in [0, vocab_size).
        targets_BT: the token after each input, or `IGNORED`.
        positions_BT: place of each input in its document's part of the row, from 0.
        document_BT: number of the document in its row, from 0, never falling along a row.
    """

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    positions_BT: np.ndarray
    document_BT: np.ndarray


def pack_rows(rows: list[np.ndarray], *, seq_len: int, eos_id: int) -> PackedRows:
    """Packs rows of a shard.

    Args:
        rows: B integer arrays of 2 to `seq_len` + 1 tokens: inputs, and one more as the last target.
        seq_len: T. A shorter row is filled up with EOS, each a document of its own, without targets.
        eos_id: id that ends every document.

    Returns:
        The arrays of the model's forward pass.
    """
    tokens_BT = np.full((len(rows), seq_len), eos_id, dtype=np.int64)
    targets_BT = np.full((len(rows), seq_len), IGNORED, dtype=np.int64)
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row) - 1] = row[:-1]
        targets_BT[number, : len(row) - 1] = row[1:]
    begins_BT = tokens_BT == eos_id
    begins_BT[:, 0] = True
    place_T = np.arange(seq_len)
    start_BT = np.maximum.accumulate(np.where(begins_BT, place_T, 0), axis=1)
    return PackedRows(
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        positions_BT=place_T - start_BT,
        document_BT=np.cumsum(begins_BT, axis=1) - 1,
    )
