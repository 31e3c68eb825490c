# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for one chip on a machine without a GPU; the object files stay in `$NMOE_CACHE/kernels`.

    python compile_kernels.py sm_90a|sm_100a

The arch has to be set before CuTe is imported and once for a process, so each chip takes a process of its own.
"""

import importlib
import os
import sys
from functools import partial
from pathlib import Path


def main(arch: str) -> None:
    os.environ["CUTE_DSL_ARCH"], os.environ["NMOE_ARCH"] = arch, arch.replace("_", "")
    os.environ["QUACK_ARCH"] = {"sm_90a": "90", "sm_100a": "100"}[arch]
    os.environ["FLASH_ATTENTION_ARCH"] = arch.removesuffix("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = {"sm_90a": "132", "sm_100a": "148"}[arch]

    from nmoe.ops.route_topk import Routing

    def op(name: str, stem: str = "cuda"):
        return importlib.import_module(f"nmoe.ops.{name}.{stem}")

    v3 = Routing(top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4, scale=2.5)
    v2 = Routing(top_k=6, scoring="softmax", num_groups=8, top_k_groups=3, group_score="max", normalize=False)
    for gated in (True, False):
        op("combine").combine_kernel("bfloat16", 6, gated)
    op("combine").collect_kernel()
    op("combine").spread_kernel("bfloat16", 6)
    op("group").group_kernel(64)
    for experts, routing in ((256, v3), (160, v2)):
        op("route_topk").route_kernel(experts, True, routing)
        op("route_topk").route_backward_kernel(experts, routing)
    for order in ("012", "001", "0102", "01"):
        op("route_topk").pieces_kernel(order, 4)
    op("route_topk").pieces_kernel("01", 1)
    for width in (8, 1):
        op("adamw").step_kernel(width)
    op("swiglu").swiglu_kernel("bfloat16")
    op("swiglu").swiglu_backward_kernel("bfloat16")
    op("rope").rotate_kernel("bfloat16", True)
    for width in (8, 2):
        op("heads").join_kernel("bfloat16", width)
        op("heads").split_kernel("bfloat16", width)
    op("cross_entropy").softmax_kernel(True, True)
    compile_symmetric(op("gram"))
    compile_attention(op("attention"))
    compile_exchange(op)
    compile_products(op("grouped_gemm", arch.replace("_", "")))


def compile_exchange(op) -> None:
    """What carries rows between ranks: of 2 and of 8, rows of 4 and of 14 KiB."""
    for ranks, top_k, one_block, row_bytes in ((2, 6, True, 4096), (8, 6, True, 4096), (8, 8, False, 14336)):
        op("plan").plan_kernel(ranks, top_k, one_block)
        op("push").push_kernel(row_bytes, ranks)
        op("push").records_kernel(top_k, ranks)
        op("receive").receive_kernel(top_k, ranks)
        op("give_back").partial_sum_kernel("bfloat16", ranks, ranks)
        op("meet").meet_kernel(ranks)
    for top_k in (6, 8):
        for gated in (True, False):
            op("give_back").reduce_push_kernel("bfloat16", top_k, gated)
    op("give_back").values_kernel(6)
    for wire in ("mxfp8", "nvfp4"):
        op("wire").push_packed_kernel(wire, 7168, 8)
        op("wire").unpack_kernel(wire, 2048, 2)
    # Kernels with NVSHMEM's functions in them are not kept on disk by the package; here their machine code is.
    folder = Path(os.environ["NMOE_CACHE"]) / "puts"
    folder.mkdir()
    options = f"--keep-cubin --dump-dir={folder}"
    op("ship").ship_kernel.build(options)
    for ranks in (2, 16):
        op("meet").meet_far_kernel.build(ranks, ranks - 1, options)


def compile_attention(attention) -> None:
    """flash-attn-4 compiles from tensors without memory, all but its semaphores, which get a stand-in here."""
    import torch
    from flash_attn.cute import utils
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nmoe.ops._cute.listing import semaphores

    utils.convert_from_dlpack_leading_static = semaphores
    tokens, heads = 4096, 16
    with FakeTensorMode(), torch.device("cuda"):
        q, k, v = (torch.empty(tokens, heads, width, dtype=torch.bfloat16) for width in (192, 192, 128))
        offset = torch.empty(6, dtype=torch.int32)
        documents = attention.Documents(offset=offset, bound=1024, window=0)
        out, lse = attention.forward(q, k, v, documents, scale=0.1)
        attention.backward(out, q, k, v, out, lse, documents, scale=0.1)


def compile_symmetric(gram) -> None:
    """Of matrices as they lie, of their transposes, and with a second summand."""
    import torch

    x = torch.zeros(2, 1024, 1536, dtype=torch.bfloat16)
    calls = [partial(gram.gram, x), partial(gram.gram, x.mT.contiguous().mT)]
    calls.append(partial(gram.quadratic, torch.zeros(2, 1024, 1024, dtype=torch.bfloat16), linear=-4.8, square=2.0))
    load_fails(calls)


def load_fails(calls) -> None:
    """Kernels that are compiled by their first call, which then fails for want of a driver to load them into."""
    for call in calls:
        try:
            call()
        except Exception as error:
            if "driver" not in str(error):
                raise


def compile_products(gemm) -> None:
    """The grouped products."""
    import torch

    tokens, width, experts, top_k = 4096, 256, 8, 2
    slots, half = tokens * top_k, torch.bfloat16
    offset = torch.zeros(experts + 1, dtype=torch.int32)
    for hidden, index in (
        (128, torch.zeros(slots, dtype=torch.int32)),
        (640, None),
    ):  # rows gathered; rows in slot order
        x = torch.zeros(tokens if index is not None else slots, width, dtype=half)
        act, preact = torch.zeros(slots, hidden, dtype=half), torch.zeros(slots, 2 * hidden, dtype=half)
        w13, w2 = torch.zeros(experts, 2 * hidden, width, dtype=half), torch.zeros(experts, width, hidden, dtype=half)
        calls = [
            partial(gemm.up, x, w13, index, offset),
            partial(gemm.down, act, w2, offset),
            partial(gemm.gated_backward, x, w2, preact, torch.zeros(slots), index, offset),
            partial(gemm.dx, preact, w13, offset),
            partial(gemm.dw13, x, preact, index, offset, out_X2FD=torch.zeros(w13.shape)),
            partial(gemm.dw2, x, act, index, offset, out_XDF=torch.zeros(w2.shape)),
        ]
        load_fails(calls)


if __name__ == "__main__":
    main(sys.argv[1])
