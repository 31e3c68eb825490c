# SPDX-License-Identifier: Apache-2.0
"""A short stress of the exchange; the long one is `stress.py`."""

import pytest
from layers import Case
from stress import stress


@pytest.mark.parametrize(
    ("tokens", "node_size"), [((9, 13), 0), ((9, 13, 5, 11), 0), ((9, 13, 5, 11), 2)], ids=["2", "4", "2 x 2"]
)
def test_random_delays_change_no_number(tokens, node_size):
    case = Case(tokens=tokens, experts=8, top_k=3, width=16, expert_width=4, capacity=1.0, node_size=node_size)
    stress(case, 250)
