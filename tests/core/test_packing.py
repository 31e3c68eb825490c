# SPDX-License-Identifier: Apache-2.0
"""Rows of several documents: positions, document numbers, and every token a target exactly once."""

import numpy as np
import pytest

from nmoe.data.packing import IGNORED, pack_rows

EOS = 9


def test_packed_row_written_out_by_hand():
    # Two documents, "1 2 EOS" and "3 4 5 EOS", then the begin of a third.
    packed = pack_rows([np.array([1, 2, EOS, 3, 4, 5, EOS, 6, 7])], seq_len=8, eos_id=EOS)
    assert packed.tokens_BT.tolist() == [[1, 2, EOS, 3, 4, 5, EOS, 6]]
    assert packed.targets_BT.tolist() == [[2, EOS, 3, 4, 5, EOS, 6, 7]]
    assert packed.positions_BT.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert packed.document_BT.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2]]


def test_short_row_is_filled_with_documents_of_their_own_without_targets():
    packed = pack_rows([np.array([1, 2, 3]), np.array([4, EOS])], seq_len=5, eos_id=EOS)
    assert packed.targets_BT.tolist() == [[2, 3, IGNORED, IGNORED, IGNORED], [EOS] + [IGNORED] * 4]
    assert packed.tokens_BT.tolist() == [[1, 2, EOS, EOS, EOS], [4, EOS, EOS, EOS, EOS]]
    assert packed.positions_BT.tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert packed.document_BT.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("seq_len", [1, 3, 7, 64])
def test_every_token_is_a_target_once_and_is_predicted_from_its_own_document(seq_len):
    random = np.random.default_rng(seq_len)
    documents = [[*random.integers(0, EOS, random.integers(0, 12)).tolist(), EOS] for _ in range(30)]
    stream = np.array([token for document in documents for token in document])
    owner = np.array([number for number, document in enumerate(documents) for _ in document])
    starts = range(0, len(stream) - 1, seq_len)
    packed = pack_rows([stream[s : s + seq_len + 1] for s in starts], seq_len=seq_len, eos_id=EOS)

    is_target = packed.targets_BT != IGNORED
    assert packed.targets_BT[is_target].tolist() == stream[1:].tolist()
    place = np.flatnonzero(is_target.ravel())
    for row in range(len(starts)):
        inside = place[(place >= row * seq_len) & (place < (row + 1) * seq_len)]
        document_T = packed.document_BT.ravel()[inside]
        owner_T = owner[1:][np.searchsorted(place, inside)]
        # Tokens predicted inside one document are those of one document of the corpus, and the other way round.
        assert (np.diff(document_T) == np.diff(owner_T)).all()
        for document in np.unique(document_T):
            assert packed.positions_BT.ravel()[inside][document_T == document].tolist() == list(
                range((document_T == document).sum())
            )
