# SPDX-License-Identifier: Apache-2.0
"""A short stress of the exchange; the long one is `stress.py`."""

import pytest
from layers import Case
from stress import stress


@pytest.mark.parametrize("tokens", [(9, 13), (9, 13, 5, 11)], ids=["2", "4"])
def test_random_delays_change_no_number(tokens):
    stress(Case(tokens=tokens, experts=8, top_k=3, width=16, expert_width=4, capacity=1.0), 250)
