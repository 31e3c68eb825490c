# SPDX-License-Identifier: Apache-2.0
"""The linear cross entropy on both chips: three products a chunk by cuBLAS, and one kernel between them.

    logits = x head^T        bf16 in, fp32 out: they are never rounded
    softmax                  a block reads a row twice: for the log-sum-exp, then for the gradient, which it writes as bf16
                             over the front half of the row it came from
    dx     = dlogits head
    dhead += dlogits^T x     summed over the chunks in fp32

A chunk is as many tokens as keep every multiprocessor busy in the products (2048 at vocabularies of 100k to 200k) within
1.6 GB of logits. Compute bound: 6 T V D FLOP; the kernel moves 10 bytes a logit, a tenth of the products' time at D=2048.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache

__all__ = ["forward"]

_CHUNK_BYTES = 1_650_000_000
"""Most memory for the logits of a chunk: 2048 tokens of a vocabulary of 201088."""
_MOST_TOKENS = 16384
_THREADS = 512
_WIDTH = 8
"""Logits that a thread reads at once."""
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LOWEST = -1e30
"""Below every logit; not infinite, so that differences stay numbers."""


@cute.jit
def _load(mLogits: cute.Tensor, row: Int32, chunk: Int32, words: Int32, padded: cutlass.Constexpr[bool]):
    """Eight neighbouring logits, those behind the last word lowest."""
    rX = cute.make_rmem_tensor((_WIDTH,), Float32)
    cute.autovec_copy(cute.local_tile(mLogits[row, None], (_WIDTH,), (chunk,)), rX)
    if const_expr(padded):
        for i in cutlass.range_constexpr(_WIDTH):
            if chunk * _WIDTH + i >= words:
                rX[i] = Float32(_LOWEST)
    return rX


@cute.kernel
def _softmax_kernel(
    mLogits: cute.Tensor,
    mTarget: cute.Tensor,
    mNll: cute.Tensor,
    mLse: cute.Tensor,
    mDLogits: Any,
    words: Int32,
    z_loss: Float32,
    padded: cutlass.Constexpr[bool],
):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    warps = const_expr(_THREADS // 32)
    sMax = smem.allocate_tensor(Float32, cute.make_layout((warps,)))
    sSum = smem.allocate_tensor(Float32, cute.make_layout((warps,)))
    chunks = mLogits.shape[1] // _WIDTH
    rounds = cute.ceil_div(chunks, _THREADS)
    target = Int32(mTarget[row])
    valid = target >= 0

    highest = Float32(_LOWEST)
    total = Float32(0.0)
    for i in cutlass.range(rounds):
        chunk = tid + i * _THREADS
        if chunk < chunks:
            rX = _load(mLogits, row, chunk, words, padded)
            before = highest
            for j in cutlass.range_constexpr(_WIDTH):
                highest = cute.arch.fmax(highest, rX[j])
            total = total * cute.math.exp2((before - highest) * Float32(_LOG2E), fastmath=True)
            for j in cutlass.range_constexpr(_WIDTH):
                total += cute.math.exp2((rX[j] - highest) * Float32(_LOG2E), fastmath=True)

    warp_highest = cute.arch.warp_reduction_max(highest)
    total = cute.arch.warp_reduction_sum(
        total * cute.math.exp2((highest - warp_highest) * Float32(_LOG2E), fastmath=True)
    )
    if tid % 32 == 0:
        sMax[tid // 32] = warp_highest
        sSum[tid // 32] = total
    of_target = Float32(0.0)
    if tid == 0 and valid:
        of_target = mLogits[row, target]
    cute.arch.sync_threads()
    highest = sMax[0]
    for warp in cutlass.range_constexpr(1, warps):
        highest = cute.arch.fmax(highest, sMax[warp])
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(warps):
        total += sSum[warp] * cute.math.exp2((sMax[warp] - highest) * Float32(_LOG2E), fastmath=True)
    lse = highest + cute.math.log2(total) * Float32(_LN2)
    if tid == 0:
        mNll[row] = lse - of_target if valid else Float32(0.0)
        mLse[row] = lse if valid else Float32(0.0)

    if const_expr(mDLogits is not None):
        # d nll = softmax - onehot; d z = 2 z_loss lse softmax
        factor = Float32(1.0) + Float32(2.0) * z_loss * lse if valid else Float32(0.0)
        hit = Float32(1.0) if valid else Float32(0.0)
        for i in cutlass.range(rounds):
            chunk = tid + i * _THREADS
            rOut = cute.make_rmem_tensor((_WIDTH,), mDLogits.element_type)
            if chunk < chunks:
                rX = _load(mLogits, row, chunk, words, padded)
                for j in cutlass.range_constexpr(_WIDTH):
                    share = cute.math.exp2((rX[j] - lse) * Float32(_LOG2E), fastmath=True) * factor
                    if chunk * _WIDTH + j == target:
                        share = share - hit
                    rOut[j] = share.to(mDLogits.element_type)
            # A round writes where only it and earlier rounds have read; the barrier says that this one has.
            cute.arch.sync_threads()
            if chunk < chunks:
                cute.autovec_copy(rOut, cute.local_tile(mDLogits[row, None], (_WIDTH,), (chunk,)))


@cute.jit
def _softmax_entry(
    mLogits: cute.Tensor,
    mTarget: cute.Tensor,
    mNll: cute.Tensor,
    mLse: cute.Tensor,
    mDLogits: Any,
    words: Int32,
    z_loss: Float32,
    padded: cutlass.Constexpr[bool],
    stream: Any,
):
    _softmax_kernel(mLogits, mTarget, mNll, mLse, mDLogits, words, z_loss, padded).launch(
        grid=[mLogits.shape[0], 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def softmax_kernel(gradients: bool, padded: bool) -> Any:
    logits, target = fake("float32", None, None), fake("int64", None, align=8)
    nll, lse = fake("float32", None, align=4), fake("float32", None, align=4)
    dlogits = fake("bfloat16", None, None) if gradients else None
    return compile_kernel(_softmax_entry, logits, target, nll, lse, dlogits, Int32(1), Float32(0.0), padded)


def _chunk_tokens(words: int) -> int:
    """A power of two: the products then have whole tiles, however many chunks there are."""
    tokens = 128
    while tokens < _MOST_TOKENS and 2 * tokens * words * 4 <= _CHUNK_BYTES:
        tokens *= 2
    return tokens


def _aligned_head(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The head in the rows' dtype, with rows of zeros up to a whole number of vectors."""
    words, width = weight_VD.shape
    padding = -words % _WIDTH
    if not padding:
        return weight_VD.to(dtype)
    head = torch.zeros(words + padding, width, dtype=dtype, device=weight_VD.device)
    head[:words] = weight_VD
    return head


def forward(
    x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    if x_TD.dtype is not torch.bfloat16:
        raise EnvironmentFault(
            f"cross_entropy: found {x_TD.dtype}, the kernel takes bfloat16; set train.dtype=bf16, or NMOE_ARCH=reference"
        )
    words, tokens = weight_VD.shape[0], x_TD.shape[0]
    head = _aligned_head(weight_VD, x_TD.dtype)
    nll_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    lse_T = torch.empty_like(nll_T)
    dx_TD = torch.empty_like(x_TD) if gradients else None
    dweight_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=x_TD.device) if gradients else None

    size = min(_chunk_tokens(len(head)), tokens)
    memory = torch.empty(size, len(head), dtype=torch.float32, device=x_TD.device)
    kernel = softmax_kernel(gradients, len(head) != words) if tokens else None
    for start in range(0, tokens, size or 1):
        rows = slice(start, start + size)
        x, target = x_TD[rows], target_T[rows]
        logits = memory[: len(x)]
        dlogits = logits.view(torch.bfloat16)[:, : len(head)] if gradients else None
        torch.mm(x, head.t(), out_dtype=torch.float32, out=logits)
        kernel(logits, target, nll_T[rows], lse_T[rows], dlogits, words, z_loss)
        if dx_TD is not None and dweight_VD is not None and dlogits is not None:
            torch.mm(dlogits, head, out=dx_TD[rows])
            torch.addmm(dweight_VD, dlogits[:, :words].t(), x, out_dtype=torch.float32, out=dweight_VD)
    z_sum = lse_T.square().sum() * z_loss
    return nll_T.sum(), z_sum, dx_TD, dweight_VD if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
