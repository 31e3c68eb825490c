# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 and 4 bits: every element is the nearest that its scale allows, and kernels write the reference's bytes."""

import importlib

import pytest
import torch
from torch import Tensor

from nmoe.comm.remote import Remote
from nmoe.ops.plan import Sends
from nmoe.ops.wire import MXFP8, NVFP4, Wire, reference

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all finite magnitudes, rising


def rows(tokens: int, width: int) -> Tensor:
    """Rows of very different sizes, with zeros among them."""
    x = torch.randn(tokens, width) * torch.logspace(-20, 20, tokens).unsqueeze(1)
    x[tokens // 2] = 0
    x[0, : width // 2] = 0
    x[1, 0] = 1e4 * x[1].abs().max()  # next to it, whole blocks vanish
    return x.bfloat16()


def sent(x_TD: Tensor, wire: Wire, op=reference) -> Tensor:
    """Packets of all rows, as the rank itself receives them."""
    tokens, device = x_TD.shape[0], x_TD.device
    packets = torch.zeros(tokens, wire.packet_bytes(x_TD.shape[1]), dtype=torch.uint8, device=device)
    address = torch.tensor([packets.data_ptr()], dtype=torch.int64, device=device)
    sends = Sends(row_TP=torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1), top_k=1)
    target = Remote(rank=0, local=packets, views=(packets,), address_P=address)
    op.push_packed(x_TD, sends, counts(tokens, device), packets=target, wire=wire)
    return packets


def counts(tokens: int, device) -> Tensor:
    return torch.tensor([[[tokens, tokens]]], dtype=torch.int32, device=device)


def received(packets: Tensor, x_TD: Tensor, wire: Wire, op=reference) -> Tensor:
    return op.unpack(packets, counts(len(packets), packets.device), rank=0, wire=wire, like_RD=x_TD)


def scales(packets: Tensor, width: int, wire: Wire) -> Tensor:
    """fp64 scale of each block, read from the packets by the definition of the format."""
    payload = width * wire.bits // 8
    byte = packets[:, payload : payload + width // wire.block]
    if wire is MXFP8:
        return 2.0 ** (byte.double() - 127)
    end = payload + width // wire.block
    row = packets[:, end : end + 4].contiguous().view(torch.float32).double()
    return byte.contiguous().view(torch.float8_e4m3fn).double() * row


@pytest.mark.parametrize("width", [32, 416])
@pytest.mark.parametrize("wire", [MXFP8, NVFP4], ids=lambda w: w.name)
def test_elements_are_the_nearest_of_their_scale(wire, width):
    x = rows(41, width)
    packets = sent(x, wire)
    scale = scales(packets, width, wire).repeat_interleave(wire.block, dim=1)
    grid = E4M3 if wire is MXFP8 else E2M1
    step = (x.double().abs() / scale).nan_to_num(0)  # 0 / 0 where a whole block is 0
    nearest = (step.unsqueeze(-1) - grid).abs().amin(-1) * scale
    found = (received(packets, x.float(), wire).double() - x.double()).abs()
    assert (found <= nearest + 2**-22 * x.double().abs()).all()


def test_scale_of_mxfp8_is_the_least_without_saturation():
    x = rows(41, 64)
    x[2, :32] = torch.linspace(-448, 448, 32).bfloat16()  # exactly the largest E4M3: scale 1
    scale = scales(sent(x, MXFP8), 64, MXFP8)
    largest = x.double().abs().view(41, 2, 32).amax(-1)
    assert scale[2, 0] == 1
    assert (largest <= 448 * scale).all()
    assert ((largest > 448 * scale / 2) | (scale == 2.0**-127)).all()


def test_scales_of_nvfp4_use_their_range():
    x = torch.randn(7, 64)
    packets = sent(x, NVFP4)
    blocks = packets[:, 32:36].contiguous().view(torch.float8_e4m3fn).float()
    assert blocks.amax(dim=1).tolist() == [448.0] * 7
    largest = x.view(7, 4, 16).abs().amax(-1).double()
    torch.testing.assert_close(6 * scales(packets, 64, NVFP4), largest, rtol=1 / 16, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wire", [MXFP8, NVFP4], ids=lambda w: w.name)
def test_values_that_are_not_finite_are_seen(wire, value):
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 5] = value
    out = received(sent(x, wire), x, wire)
    assert out[1, : wire.block].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (41, 448), (1000, 2048), (517, 7168)])
@pytest.mark.parametrize("wire", [MXFP8, NVFP4], ids=lambda w: w.name)
def test_kernels_write_and_read_the_bytes_of_the_reference(wire, tokens, width):
    kernels = importlib.import_module("nmoe.ops.wire.cuda")
    x = rows(max(tokens, 3), width)[:tokens].cuda()
    x[0, 3] = float("nan")
    packets = sent(x, wire, kernels)
    assert torch.equal(packets[1:], sent(x, wire)[1:])
    ours, truth = received(packets, x, wire, kernels), received(packets, x, wire)
    assert torch.equal(ours.nan_to_num(7.5e30), truth.nan_to_num(7.5e30))
    assert ours[0, : wire.block].isnan().all()
