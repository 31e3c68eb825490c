# SPDX-License-Identifier: Apache-2.0
"""The router on both chips.

`project` keeps fp32 precision on the bf16 tensor cores: an fp32 operand is the sum of three bf16 numbers (two where
the result is rounded to bf16), their products with bf16 rows are exact, and the sums are in fp32. Three times the
FLOP of a bf16 product, but the rows, which are most of the bytes, are read once. One kernel makes the pieces, side by
side in the order in which the products want them.

`route` gives one warp to a token: lane i holds experts i, i + 32, ...; every maximum is a butterfly over the warp, ties
go to the lowest id, and the load is counted with integer atomics, whose order cannot change a sum. The whole of step
1 to 5 of the contract is one kernel that reads the logits once.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, const_expr
from torch import Tensor

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute.build import compile_kernel, fake, kernel_cache, sm_count
from nmoe.ops.route_topk import Routing

__all__ = ["project", "project_backward", "route", "route_backward"]

_THREADS = 128
_WARPS = _THREADS // 32
_TINY = 1e-20  # as in the reference


@cute.kernel
def _pieces_kernel(
    mX: cute.Tensor, mOut: cute.Tensor, chunks: Int32, order: cutlass.Constexpr[str], width: cutlass.Constexpr[int]
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    item = bid * _THREADS + tid
    row = item // chunks
    col = item - row * chunks
    if row < mX.shape[0]:
        count = const_expr(int(max(order)) + 1)
        rRest = cute.make_rmem_tensor((width,), Float32)
        rPiece = cute.make_rmem_tensor((width, count), BFloat16)
        cute.autovec_copy(cute.local_tile(mX[row, None], (width,), (col,)), rRest)
        for p in cutlass.range_constexpr(count):
            rPiece[None, p].store(rRest.load().to(BFloat16))
            rRest.store(rRest.load() - rPiece[None, p].load().to(Float32))
        for j in cutlass.range_constexpr(len(order)):
            p = const_expr(int(order[j]))
            cute.autovec_copy(rPiece[None, p], cute.local_tile(mOut[row, j, None], (width,), (col,)))


@cute.jit
def _pieces_entry(
    mX: cute.Tensor, mOut: cute.Tensor, order: cutlass.Constexpr[str], width: cutlass.Constexpr[int], stream: Any
):
    chunks = mX.shape[1] // width
    _pieces_kernel(mX, mOut, chunks, order, width).launch(
        grid=[cute.ceil_div(mX.shape[0] * chunks, _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@kernel_cache
def pieces_kernel(order: str, width: int) -> Any:
    x = fake("float32", None, None, align=4 * width)
    out = fake("bfloat16", None, len(order), None, align=2 * width)
    return compile_kernel(_pieces_entry, x, out, order, width)


def _pieces(x_NM: Tensor, order: str) -> Tensor:
    """bf16 [N, len(order), M]: numbers whose sum is x to 8 bits of mantissa each, 0 the largest, in the order asked for."""
    rows, columns = x_NM.shape
    out = torch.empty(rows, len(order), columns, dtype=torch.bfloat16, device=x_NM.device)
    if out.numel():
        pieces_kernel(order, 1 if columns % 4 else 4)(x_NM, out)
    return out


def project(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if x_TD.dtype != torch.bfloat16:
        return x_TD.float() @ weight_ED.float().t()
    if weight_ED.dtype == torch.bfloat16:
        return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
    experts, width = weight_ED.shape
    weight = _pieces(weight_ED.view(1, -1), "012").view(3 * experts, width)
    return torch.mm(x_TD, weight.t(), out_dtype=torch.float32).view(-1, 3, experts).sum(dim=1)


def project_backward(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, dx_TD: Tensor) -> tuple[Tensor, Tensor]:
    if x_TD.dtype != torch.bfloat16:
        dx_TD = torch.addmm(dx_TD.float(), dlogits_TE, weight_ED.float()).to(x_TD.dtype)
        return dx_TD, (dlogits_TE.t() @ x_TD.float()).to(weight_ED.dtype)
    experts, width = weight_ED.shape
    if weight_ED.dtype == torch.bfloat16:  # both results are rounded to bf16: two pieces reach past its last bit
        dlogits = _pieces(dlogits_TE, "01").flatten(1)
        left, right, of_weight = dlogits, weight_ED.repeat(2, 1), dlogits
    else:  # dx = d0 w0 + d1 w0 + d0 w1, the product of both second pieces is below its last bit; dweight of d1, d0, d2
        dlogits = _pieces(dlogits_TE, "0102").flatten(1)
        right = _pieces(weight_ED.view(1, -1), "001").view(3 * experts, width)
        left, of_weight = dlogits[:, : 3 * experts], dlogits[:, experts:]
    dweight = torch.mm(of_weight.t(), x_TD, out_dtype=torch.float32).view(-1, experts, width).sum(dim=0)
    return torch.addmm(dx_TD, left, right, out=dx_TD), dweight.to(weight_ED.dtype)  # cuBLAS rounds product and sum


@cute.jit
def _scores(
    mLogits: cute.Tensor, token: Int32, rScore: cute.Tensor, experts: cutlass.Constexpr[int], softmax: cutlass.Constexpr
):
    """Fill a lane's scores of one token; what lies past the last expert gets 0."""
    lane = cute.arch.lane_idx()
    count = const_expr(cute.size(rScore))
    rLogit = cute.make_rmem_tensor((count,), Float32)
    for i in cutlass.range_constexpr(count):
        e = lane + 32 * i
        rLogit[i] = -Float32.inf
        if e < experts:
            rLogit[i] = mLogits[token, e]
    if const_expr(softmax):
        top = rLogit[0]
        for i in cutlass.range_constexpr(1, count):
            top = cute.arch.fmax(top, rLogit[i])
        top = cute.arch.warp_reduction_max(top)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(count):
            rScore[i] = cute.math.exp(rLogit[i] - top)
            total += rScore[i]
        total = cute.arch.warp_reduction_sum(total)
        for i in cutlass.range_constexpr(count):
            rScore[i] = rScore[i] / total
    else:
        for i in cutlass.range_constexpr(count):
            rScore[i] = Float32(1.0) / (Float32(1.0) + cute.math.exp(-rLogit[i]))


@cute.jit
def _limit_groups(
    rChoice: cute.Tensor,
    experts: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[int],
    keep: cutlass.Constexpr[int],
    best_two: cutlass.Constexpr[bool],
):
    """Put every expert outside the ``keep`` best groups at -inf."""
    lane = cute.arch.lane_idx()
    count = const_expr(cute.size(rChoice))
    size = const_expr(experts // groups)
    rBest = cute.make_rmem_tensor((groups,), Float32)
    for g in cutlass.range_constexpr(groups):
        first = -Float32.inf
        second = -Float32.inf
        for i in cutlass.range_constexpr(count):
            e = lane + 32 * i
            value = rChoice[i] if (e >= g * size and e < (g + 1) * size) else -Float32.inf
            second = cute.arch.fmax(second, cute.arch.fmin(first, value))
            first = cute.arch.fmax(first, value)
        for step in cutlass.range_constexpr(5):
            other_first = cute.arch.shuffle_sync_bfly(first, offset=1 << step)
            other_second = cute.arch.shuffle_sync_bfly(second, offset=1 << step)
            second = cute.arch.fmax(cute.arch.fmax(second, other_second), cute.arch.fmin(first, other_first))
            first = cute.arch.fmax(first, other_first)
        rBest[g] = first + second if const_expr(best_two and size > 1) else first
    kept = Int32(0)
    for _ in cutlass.range_constexpr(keep):
        best = -Float32.inf
        which = Int32(0)
        for g in cutlass.range_constexpr(groups):
            if rBest[g] > best and ((kept >> g) & 1) == 0:
                best = rBest[g]
                which = Int32(g)
        kept = kept | (Int32(1) << which)
    for i in cutlass.range_constexpr(count):
        if ((kept >> ((lane + 32 * i) // size)) & 1) == 0:
            rChoice[i] = -Float32.inf


@cute.kernel
def _route_kernel(
    mLogits: cute.Tensor,
    mBias: Any,
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mLoad: cute.Tensor,
    experts: cutlass.Constexpr[int],
    routing: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    count = const_expr((experts + 31) // 32)
    top_k = const_expr(routing.top_k)
    sLoad = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(experts), byte_alignment=16)
    for e in cutlass.range(tid, experts, _THREADS):
        sLoad[e] = 0
    cute.arch.sync_threads()
    rScore = cute.make_rmem_tensor((count,), Float32)
    rChoice = cute.make_rmem_tensor((count,), Float32)
    rBias = cute.make_rmem_tensor((count,), Float32)
    for i in cutlass.range_constexpr(count):
        rBias[i] = Float32(0.0)
        if const_expr(mBias is not None):
            if lane + 32 * i < experts:
                rBias[i] = mBias[lane + 32 * i]

    for token in cutlass.range(bid * _WARPS + warp, mLogits.shape[0], blocks * _WARPS):
        _scores(mLogits, token, rScore, experts, routing.scoring == "softmax")
        for i in cutlass.range_constexpr(count):
            rChoice[i] = rScore[i] + rBias[i] if lane + 32 * i < experts else -Float32.inf
        if const_expr(routing.top_k_groups < routing.num_groups):
            _limit_groups(rChoice, experts, routing.num_groups, routing.top_k_groups, routing.group_score == "top2_sum")
        my_expert = Int32(0)
        my_gate = Float32(0.0)
        total = Float32(0.0)
        for k in cutlass.range_constexpr(top_k):
            best = rChoice[0]
            which = lane
            for i in cutlass.range_constexpr(1, count):
                if rChoice[i] > best:
                    best = rChoice[i]
                    which = lane + 32 * i
            top = cute.arch.warp_reduction_max(best)
            # A NaN equals nothing: the last expert then stands in, so that no index leaves the table.
            which = cute.arch.warp_redux_sync(which if best == top else Int32(experts - 1), kind="min")
            score = Float32(0.0)
            for i in cutlass.range_constexpr(count):
                if which == lane + 32 * i:
                    score = rScore[i]
                    rChoice[i] = -Float32.inf
            score = cute.arch.shuffle_sync(score, which % 32)
            total += score
            if lane == k:
                my_expert = which
                my_gate = score
        if const_expr(routing.normalize):
            my_gate = my_gate / (total + Float32(_TINY))
        if lane < top_k:
            mExpert[token, lane] = my_expert
            mGate[token, lane] = my_gate * Float32(routing.scale)
            cute.arch.atomic_add((sLoad.iterator + my_expert).llvm_ptr, Int32(1), scope="cta")
    cute.arch.sync_threads()
    for e in cutlass.range(tid, experts, _THREADS):
        if sLoad[e] > 0:
            cute.arch.atomic_add((mLoad.iterator + e).llvm_ptr, sLoad[e], sem="relaxed", scope="gpu")


@cute.kernel
def _route_backward_kernel(
    mDGate: cute.Tensor,
    mLogits: cute.Tensor,
    mExpert: cute.Tensor,
    mDLogits: cute.Tensor,
    experts: cutlass.Constexpr[int],
    routing: cutlass.Constexpr,
):
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    count = const_expr((experts + 31) // 32)
    top_k = const_expr(routing.top_k)
    rScore = cute.make_rmem_tensor((count,), Float32)
    rGrad = cute.make_rmem_tensor((count,), Float32)
    for token in cutlass.range(bid * _WARPS + warp, mLogits.shape[0], blocks * _WARPS):
        _scores(mLogits, token, rScore, experts, routing.scoring == "softmax")
        my_expert = Int32(-1)
        my_grad = Float32(0.0)
        if lane < top_k:
            my_expert = mExpert[token, lane]
            my_grad = mDGate[token, lane] * Float32(routing.scale)
        if const_expr(routing.normalize):
            my_score = Float32(0.0)
            for k in cutlass.range_constexpr(top_k):
                expert = cute.arch.shuffle_sync(my_expert, k)
                score = Float32(0.0)
                for i in cutlass.range_constexpr(count):
                    if expert == lane + 32 * i:
                        score = rScore[i]
                score = cute.arch.shuffle_sync(score, expert % 32)
                if lane == k:
                    my_score = score
            total = cute.arch.warp_reduction_sum(my_score) + Float32(_TINY)
            mean = cute.arch.warp_reduction_sum(my_grad * my_score) / total
            my_grad = (my_grad - mean) / total
        for i in cutlass.range_constexpr(count):
            rGrad[i] = Float32(0.0)
        for k in cutlass.range_constexpr(top_k):
            expert = cute.arch.shuffle_sync(my_expert, k)
            grad = cute.arch.shuffle_sync(my_grad, k)
            for i in cutlass.range_constexpr(count):
                if expert == lane + 32 * i:
                    rGrad[i] = grad
        dot = Float32(0.0)
        if const_expr(routing.scoring == "softmax"):
            for i in cutlass.range_constexpr(count):
                dot += rGrad[i] * rScore[i]
            dot = cute.arch.warp_reduction_sum(dot)
        for i in cutlass.range_constexpr(count):
            if lane + 32 * i < experts:
                if const_expr(routing.scoring == "softmax"):
                    mDLogits[token, lane + 32 * i] = rScore[i] * (rGrad[i] - dot)
                else:
                    mDLogits[token, lane + 32 * i] = rGrad[i] * rScore[i] * (Float32(1.0) - rScore[i])


@cute.jit
def _route_entry(
    mLogits: cute.Tensor,
    mBias: Any,
    mExpert: cute.Tensor,
    mGate: cute.Tensor,
    mLoad: cute.Tensor,
    blocks: Int32,
    experts: cutlass.Constexpr[int],
    routing: cutlass.Constexpr,
    stream: Any,
):
    _route_kernel(mLogits, mBias, mExpert, mGate, mLoad, experts, routing).launch(
        grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


@cute.jit
def _route_backward_entry(
    mDGate: cute.Tensor,
    mLogits: cute.Tensor,
    mExpert: cute.Tensor,
    mDLogits: cute.Tensor,
    blocks: Int32,
    experts: cutlass.Constexpr[int],
    routing: cutlass.Constexpr,
    stream: Any,
):
    _route_backward_kernel(mDGate, mLogits, mExpert, mDLogits, experts, routing).launch(
        grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


def _check(experts: int, routing: Routing) -> None:
    if routing.top_k > 32 or routing.num_groups > 32 or experts > 1024:
        raise EnvironmentFault(
            f"route_topk: found {experts} experts, top_k {routing.top_k}, {routing.num_groups} groups; "
            "the kernel takes at most 1024, 32 and 32; NMOE_ARCH=reference takes others"
        )


@kernel_cache
def route_kernel(experts: int, biased: bool, routing: Routing) -> Any:
    top_k = routing.top_k
    bias = fake("float32", experts, align=4) if biased else None
    logits, gate = fake("float32", None, experts, align=4), fake("float32", None, top_k, align=4)
    expert, load = fake("int32", None, top_k, align=4), fake("int32", experts, align=4)
    return compile_kernel(_route_entry, logits, bias, expert, gate, load, Int32(1), experts, routing)


@kernel_cache
def route_backward_kernel(experts: int, routing: Routing) -> Any:
    top_k = routing.top_k
    logits, gate = fake("float32", None, experts, align=4), fake("float32", None, top_k, align=4)
    expert, dlogits = fake("int32", None, top_k, align=4), fake("float32", None, experts, align=4)
    return compile_kernel(_route_backward_entry, gate, logits, expert, dlogits, Int32(1), experts, routing)


def _blocks(tokens: int, device: torch.device) -> int:
    return min(-(-tokens // _WARPS), 8 * sm_count(device.index))


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    _check(experts, routing)
    device = logits_TE.device
    expert_TK = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=device)
    gate_TK = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=device)
    load_E = torch.zeros(experts, dtype=torch.int32, device=device)
    if tokens:
        kernel = route_kernel(experts, bias_E is not None, routing)
        kernel(logits_TE, bias_E, expert_TK, gate_TK, load_E, _blocks(tokens, device))
    return expert_TK, gate_TK, load_E


def route_backward(dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, routing: Routing) -> Tensor:
    tokens, experts = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    if tokens:
        kernel = route_backward_kernel(experts, routing)
        kernel(dgate_TK, logits_TE, expert_TK, dlogits_TE, _blocks(tokens, logits_TE.device))
    return dlogits_TE
