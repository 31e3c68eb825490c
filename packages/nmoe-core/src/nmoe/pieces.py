# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a tensor: some of its rows, one after the other.

Everything that is divided over ranks here is divided so, along the first dimension: experts are blocks of the expert
dimension, FSDP cuts rows. One notion then serves initial values, checkpoints and the optimizer, and none of them needs to
know which ranks there are.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Piece", "as_piece", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows [start, start + n) of a tensor.

    Attributes:
        tensor: the rows that this rank holds; n may be 0.
        shape: of the whole tensor.
        start: first of the rows.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing elsewhere."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def offset(self) -> int:
        """Number of elements of the whole tensor before the first of these."""
        return self.start * math.prod(self.shape[1:])

    def of(self, tensor: Tensor) -> "Piece":
        """The same rows of another tensor of that shape, such as a moment of a parameter."""
        return Piece(tensor=local(tensor), shape=self.shape, start=self.start)


def as_piece(tensor: Tensor | Piece) -> Piece:
    """A tensor as a piece that is the whole of it; a piece as it is."""
    return tensor if isinstance(tensor, Piece) else Piece(tensor=tensor, shape=tuple(tensor.shape))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
