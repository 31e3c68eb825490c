# SPDX-License-Identifier: Apache-2.0
"""The two symmetric products of a Newton-Schulz step, batched over matrices: half of each result is the other, mirrored.

    gram = x x^T            [rows, rows]
    b gram + c gram gram    [rows, rows]

A kernel that computes only the tiles on and below the diagonal saves half of both. Of the three products of a step (with
rows = columns, of equal size) that leaves two thirds of the work.
"""

from typing import Protocol, cast

from torch import Tensor

from nmoe.ops.registry import implementation

__all__ = ["Kernels", "kernels"]


class Kernels(Protocol):
    """What an implementation file defines. Sums are in fp32, or fp64 where the matrices are; results in their dtype."""

    def gram(self, matrices: Tensor) -> Tensor:
        """x x^T of each matrix.

        Args:
            matrices: [n, rows, columns], any strides with one of 1 among the last two.

        Returns:
            [n, rows, rows], contiguous, exactly symmetric.
        """
        ...

    def quadratic(self, symmetric: Tensor, *, linear: float, square: float) -> Tensor:
        """linear g + square g g of each symmetric matrix g.

        Args:
            symmetric: [n, rows, rows], contiguous.
            linear: factor of g.
            square: factor of g g.

        Returns:
            [n, rows, rows], contiguous.
        """
        ...


def kernels() -> Kernels:
    """The implementation on this process's arch."""
    return cast(Kernels, implementation("gram"))
