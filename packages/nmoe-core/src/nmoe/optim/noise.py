# SPDX-License-Identifier: Apache-2.0
"""The keys of stochastic rounding: which random bits an update of a parameter draws.

With the place of an element in the whole parameter (`nmoe.ops.adamw.rounding`) they decide each bit, so a resumed run, and
one on another number of ranks, rounds as the first one did.
"""

import hashlib

__all__ = ["noise_key"]


def noise_key(seed: int, *, update: int, name: str) -> int:
    """64 bits for one update of one parameter.

    Args:
        seed: of the run.
        update: number of the update, from 1.
        name: of the parameter in the whole model.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {update} {name}".encode()).digest()[:8], "little")
