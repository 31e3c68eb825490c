# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how many there are, how they share the work, and the little that they tell each other.

Rank r has its own tokens. Ranks of one expert group (consecutive ranks, inside a node) share the experts of a layer; the
ranks of equal place in all expert groups hold the same experts. Both are dimensions of one mesh:

    mesh (data, expert), 8 ranks, 4 expert ranks      [[0 1 2 3]      rows: expert groups
                                                       [4 5 6 7]]     columns: ranks with the same experts

Everything here is a collective: all ranks call it, in the same order. With one process there is no process group, and
every call returns at once.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nmoe.comm.watcher import PATIENCE_S, Watcher
from nmoe.config import Config
from nmoe.errors import ConfigError, NmoeError
from nmoe.train.environment import nodes_of, world_of

__all__ = ["Ranks", "join_ranks"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# The watchers end a wait before, with a message that says for whom it was.
_PATIENCE = timedelta(seconds=PATIENCE_S + 300)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        rank: its number, from 0.
        size: processes of the run.
        device: where it computes.
        mesh: (data, expert); None with one process.
        world: all ranks as one dimension of that mesh.
        files: a group of its own for the thread that writes checkpoints, on the CPU.
        watcher: what ends all of them when one is lost.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    world: DeviceMesh | None = None
    files: dist.ProcessGroup | None = None
    watcher: Watcher | None = None

    @property
    def expert_size(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.mesh["expert"].size() if self.mesh else 1

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the experts of a layer with this one."""
        return self.mesh["expert"].get_group() if self.mesh else None

    @property
    def data_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.size // self.expert_size

    def add(self, values: Tensor, *, over: Literal["world", "data", "expert"] = "world") -> Tensor:
        """`values` summed over ranks, in place; exact for integers below 2^53 in fp64."""
        if self.mesh and self.world:
            dist.all_reduce(values, group=(self.world if over == "world" else self.mesh[over]).get_group())
        return values

    def rows(self, values: Tensor) -> Tensor:
        """One row a rank, [ranks, n], of everyone's `values` [n]; the same bits on all ranks."""
        if not self.mesh:
            return values.unsqueeze(0)
        rows = values.new_empty(self.size * values.numel())
        if rows.numel():
            dist.all_gather_into_tensor(rows, values.contiguous())
        return rows.view(self.size, values.numel())

    def agree(self, work: Callable[[], _Result] | None) -> _Result:
        """What `work` gives on rank 0, for all ranks; an error that it raises is raised on all.

        Args:
            work: called on rank 0 only; its result can be pickled.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            assert work is not None
            try:
                outcome = [work(), None]
            except Exception as error:
                if not self.mesh:
                    raise
                outcome = [None, error]
        if self.mesh:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            self.part()
            raise outcome[1]
        return outcome[0]

    def together(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives here; where it raises an error of ours on any rank, the first rank's is raised on all."""
        if not self.mesh:
            return work()
        result, error = None, None
        try:
            result = work()
        except NmoeError as found:
            error = found
        errors: list[NmoeError | None] = [None] * self.size
        dist.all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                self.part()
                raise found
        return result  # type: ignore[return-value]

    def beat(self, doing: str, *, step: int | None = None, long: bool = False) -> None:
        """This rank has come to its next place in the program, see `Watcher.beat`. It costs a microsecond.

        Args:
            doing: the place, in words.
            step: number of the step, at its first place.
            long: it may take half an hour there, whatever `rdep.timeout_s` says: the others wait for a disk or a compiler.
        """
        if self.watcher:
            self.watcher.beat(doing, step=step, patience_s=PATIENCE_S if long else 0.0)

    def part(self) -> None:
        """Meets the others for the last time: from then on each may end when it likes."""
        if self.watcher:
            self.watcher.leave()
            dist.barrier()
            self.watcher.close()


def join_ranks(config: Config, device: torch.device) -> Ranks:
    """Meets the other processes that the launcher's environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        ConfigError: `parallel.ep` does not fit the number of ranks.
    """
    rank, size, _, local_size = world_of(os.environ)
    if config.parallel.ep and size % config.parallel.ep:
        raise ConfigError(
            f"parallel.ep = {config.parallel.ep} does not divide the {size} ranks of this start; "
            "set it to 0 to let it follow the number of ranks"
        )
    if size == 1:
        return Ranks(rank=0, size=1, device=device)
    if nodes_of(os.environ) > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _log.warning(
            "torchrun uses one store for all starts: after a lost rank no start would succeed; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each node"
        )
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("nmoe", store),
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    files = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(files, dist.ProcessGroup)  # this process is in it
    watcher = Watcher(files, store=store, place=os.environ.get("GROUP_RANK", ""))  # torchrun's number of the node
    experts = config.parallel.ep or _expert_ranks(config, local_size, files)
    mesh = init_device_mesh(device.type, (size // experts, experts), mesh_dim_names=("data", "expert"))
    return Ranks(
        rank=rank,
        size=size,
        device=device,
        mesh=mesh,
        world=mesh["data", "expert"]._flatten("world"),
        files=files,
        watcher=watcher,
    )


def _expert_ranks(config: Config, local_size: int, group: dist.ProcessGroup) -> int:
    """As many as divide the experts and the ranks of every node: nodes need not have equally many, and all must agree."""
    if not config.num_moe_layers:
        return 1
    local_sizes = [0] * group.size()
    dist.all_gather_object(local_sizes, local_size, group=group)
    return math.gcd(config.moe.num_experts, group.size(), *local_sizes)
