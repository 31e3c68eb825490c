# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the packets."""

import torch
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.plan import Sends
from nmoe.ops.push import reference as push_op
from nmoe.ops.wire import NVFP4, NVFP4_RANGE, Wire

__all__ = ["push_packed", "unpack"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def push_packed(x_TD: Tensor, sends: Sends, count_PP2: Tensor, *, packets: Remote, wire: Wire) -> None:
    tokens, width = x_TD.shape
    if tokens == 0:
        return
    block_TNB = x_TD.float().view(tokens, width // wire.block, wire.block)
    parts = _nvfp4(block_TNB) if wire is NVFP4 else _mxfp8(block_TNB)
    packet = torch.zeros(tokens, wire.packet_bytes(width), dtype=torch.uint8, device=x_TD.device)
    used = torch.cat([part.flatten(1) for part in parts], dim=1)
    packet[:, : used.shape[1]] = used
    push_op.push(packet, sends, count_PP2, rows=packets)


def _mxfp8(block_TNB: Tensor) -> tuple[Tensor, ...]:
    bits = block_TNB.abs().amax(dim=2).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 448 is 1.75 * 2^8: one more where the largest value's significand is above 1.75.
    scale_TN = (exponent - 8 + (mantissa > 0x600000).int()).clamp(min=0)
    scale_TN = torch.where(exponent == 255, 255, scale_TN)
    inverse_TN = ((254 - scale_TN.clamp(max=253)) << 23).view(torch.float32)
    element = (block_TNB * inverse_TN.unsqueeze(2)).to(torch.float8_e4m3fn).view(torch.uint8)
    return element, scale_TN.to(torch.uint8)


def _nvfp4(block_TNB: Tensor) -> tuple[Tensor, ...]:
    amax_TN = block_TNB.abs().amax(dim=2)
    row_T1 = amax_TN.amax(dim=1, keepdim=True) * (1 / NVFP4_RANGE)
    scale_TN = torch.where(row_T1 == 0, 0, amax_TN / (6.0 * row_T1)).to(torch.float8_e4m3fn)
    divisor_TN1 = (scale_TN.float() * row_T1).unsqueeze(2)
    inverse_TN1 = torch.where(divisor_TN1 == 0, 0, 1 / divisor_TN1)
    size = block_TNB.abs() * inverse_TN1
    # Ties go to the even code: down at 0.25, up at 0.75, and so on.
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0) + 8 * torch.signbit(block_TNB)
    pair = code[..., 0::2] | (code[..., 1::2] << 4)
    return pair.to(torch.uint8), scale_TN.view(torch.uint8), row_T1.contiguous().view(torch.uint8)


def unpack(packets: Tensor, count_PP2: Tensor, *, rank: int, wire: Wire, like_RD: Tensor) -> Tensor:
    rows, width = packets.shape[0], like_RD.shape[1]
    payload, blocks = wire.payload_bytes(width), width // wire.block
    element = packets[:, :payload].contiguous()
    scale_RN = packets[:, payload : payload + blocks].contiguous()
    if wire is NVFP4:
        table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packets.device)
        codes = torch.stack([element & 15, element >> 4], dim=2).view(rows, blocks, wire.block)
        row_R1 = packets[:, payload + blocks : payload + blocks + 4].contiguous().view(torch.float32)
        x = table[codes.long()] * (scale_RN.view(torch.float8_e4m3fn).float() * row_R1).unsqueeze(2)
    else:
        x = element.view(torch.float8_e4m3fn).float().view(rows, blocks, wire.block)
        x = x * scale_RN.view(torch.float8_e8m0fnu).float().unsqueeze(2)
    return x.view(rows, width).to(like_RD.dtype)
