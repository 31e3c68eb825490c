# SPDX-License-Identifier: Apache-2.0
"""Dispatch and return as others do them, for `rdep.py`: each peer yields what it does by name, ready to be timed.

A peer takes the rows x [T, D] in bf16, their experts [T, K] in int32, gates [T, K] in fp32 and the number of experts of
all ranks; what it yields moves this rank's rows to the owners, or back and sums them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

__all__ = ["Peer", "nccl", "torchtitan", "vdev"]


class Peer(Protocol):
    """One way to move rows."""

    def __call__(self, x: Tensor, expert: Tensor, gate: Tensor, experts: int) -> Iterator[tuple[str, Callable]]: ...


def nccl(x: Tensor, expert: Tensor, gate: Tensor, experts: int) -> Iterator[tuple[str, Callable]]:
    """Counts exchange, permutation and `all_to_all_single`, both ways."""
    size, top_k, width = dist.get_world_size(), expert.shape[1], x.shape[1]
    flat = expert.view(-1)

    def sending() -> tuple:
        order = torch.argsort(flat, stable=True)
        sent = torch.bincount(flat // (experts // size), minlength=size)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        out_splits, in_splits = torch.stack([got, sent]).tolist()
        rows = x[order // top_k]
        arrived = rows.new_empty(sum(out_splits), width)
        dist.all_to_all_single(arrived, rows, out_splits, in_splits)
        return arrived, order, out_splits, in_splits

    arrived, order, out_splits, in_splits = sending()

    def returning() -> Tensor:
        home = arrived.new_empty(sum(in_splits), width)
        dist.all_to_all_single(home, arrived, in_splits, out_splits)
        back = torch.empty_like(home)
        back[order] = home
        return (back.view(-1, top_k, width) * gate.unsqueeze(2).bfloat16()).sum(dim=1)

    yield "nccl dispatch", sending
    yield "nccl return", returning


def vdev(x: Tensor, expert: Tensor, gate: Tensor, experts: int) -> Iterator[tuple[str, Callable]]:
    """torch's NVSHMEM all-to-all, which reads its counts on the device: rows sorted by expert."""
    symmetric.set_backend("NVSHMEM")
    world = dist.group.WORLD
    assert world is not None
    rows, flat, width = expert.numel(), expert.view(-1), x.shape[1]
    sent = symmetric.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    got = symmetric.empty(2 * rows, width, dtype=torch.bfloat16, device=x.device)
    counts = symmetric.empty(experts, dtype=torch.int64, device=x.device)
    places = symmetric.empty(2, experts, dtype=torch.int64, device=x.device)
    for tensor in (sent, got, counts, places):
        symmetric.rendezvous(tensor, world.group_name)

    def sending() -> None:
        order = torch.argsort(flat, stable=True)
        counts.copy_(torch.bincount(flat, minlength=experts))
        torch.index_select(x, 0, order // expert.shape[1], out=sent)
        torch.ops.symm_mem.all_to_all_vdev_2d(sent, got, counts, places, world.group_name, None)

    yield "vdev_2d dispatch", sending


def torchtitan(x: Tensor, expert: Tensor, gate: Tensor, experts: int) -> Iterator[tuple[str, Callable]]:
    """torchtitan's MinimalAsyncEP: rows stored by Triton kernels into the owners' symmetric memory, sorted by expert.

    Its kernels need torch and Triton alone, the packages around them much more: so these are passed over.
    """
    found = _minimal_async_ep()
    if isinstance(found, str):
        print(f"torchtitan: left out, {found}", file=sys.stderr, flush=True)
        return
    size, top_k, tokens, share = dist.get_world_size(), expert.shape[1], len(x), experts // dist.get_world_size()
    capacity = size * tokens * min(top_k, share)
    found._buffer_key = found._buffer_state = None  # it keeps one buffer a process, of the first shape
    found.init_buffer(dist.group.WORLD, x.shape[1], tokens, share, top_k, x.dtype, x.device)
    chosen, flat = expert.long(), gate.view(-1)

    def sending() -> tuple:
        return found.dispatch_op(x, chosen, torch.bincount(chosen.view(-1), minlength=experts), capacity, size)

    arrived, *places = sending()
    to_rank, to_row, back_rank, back_row, valid, expert_to_token, token_to_expert, _ = places
    y = arrived.clone()  # of experts that change nothing; in memory of its own, as the operator wants it

    def returning() -> Any:
        ways = (to_rank, to_row, back_rank, back_row, valid, token_to_expert, expert_to_token)
        return found.combine_op(y, *ways, flat, tokens, top_k)

    got, _ = returning()
    want = x.float() * gate.sum(dim=1, keepdim=True)
    error = ((got.float() - want).norm() / want.norm()).item()
    if error > 0.01:
        raise RuntimeError(f"torchtitan: rows came home wrong, relative error {error:.3g}")
    yield "torchtitan dispatch", sending
    yield "torchtitan return", returning


def _minimal_async_ep() -> Any:
    """The module with `dispatch_op` and `combine_op`, or why there is none."""
    try:
        root = distribution("torchtitan").locate_file("torchtitan")
        for name in ("torchtitan", "torchtitan.distributed"):
            package = ModuleType(name)  # its __init__ would import the whole trainer
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules.setdefault(name, package)
        return importlib.import_module("torchtitan.distributed.minimal_async_ep.api")
    except (PackageNotFoundError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
