# SPDX-License-Identifier: Apache-2.0
"""The symmetric products on both chips: quack's kernel computes the tiles on one side of the diagonal.

Compute bound. A cluster's square has 256 rows: of matrices with 1024, 10 of 16 squares are computed, with 2048, 36 of 64. Smaller
matrices, and those whose rows are no multiple of 16 bytes (which the tensor memory accelerator cannot address), are left to
cuBLAS. Tiles and limit are chosen by reasoning. On an H200 five Newton-Schulz steps of 64 and 128 matrices of 1408 x 2048 take 0.77 and
0.80 of cuBLAS's time, of one of 4096 x 4096 0.84, of one with 2048 rows as much as cuBLAS (commit d2bcafb); no B200 has run it.
"""

import torch
from torch import Tensor

from nmoe import arch
from nmoe.ops._cute import products
from nmoe.ops._cute.products import GemmConfig
from nmoe.ops.gram import reference

__all__ = ["gram", "quadratic"]

_SMALLEST = 1024
"""Rows from which on the kernel is used."""
_TILES = {
    "sm90a": GemmConfig(
        tile_m=128,
        tile_n=256,
        pingpong=False,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=False,
        device_capacity=9,
    ),
    "sm100a": GemmConfig(
        tile_m=256,
        tile_n=256,
        pingpong=False,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=True,
        device_capacity=10,
    ),
}


def gram(matrices: Tensor) -> Tensor:
    if not _fits(matrices):
        return reference.gram(matrices)
    return products.symmetric(matrices, None, _TILES[arch.current().name])


def quadratic(symmetric: Tensor, *, linear: float, square: float) -> Tensor:
    if not _fits(symmetric):
        return reference.quadratic(symmetric, linear=linear, square=square)
    return products.symmetric(symmetric, symmetric, _TILES[arch.current().name], alpha=square, beta=linear)


def _fits(matrices: Tensor) -> bool:
    rows, columns = matrices.shape[-2:]
    return matrices.dtype is torch.bfloat16 and rows >= _SMALLEST and rows % 8 == 0 and columns % 8 == 0
