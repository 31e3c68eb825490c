# SPDX-License-Identifier: Apache-2.0
"""Device, model and optimizer of a run, and everything of them that a checkpoint holds."""

import base64
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import deterministic

from nmoe import arch
from nmoe.checkpoint.load import load_tensors, load_weights
from nmoe.checkpoint.store import CheckpointInfo, find_checkpoint
from nmoe.comm.communicator import Communicator
from nmoe.comm.connect import connect
from nmoe.config import Config
from nmoe.errors import CheckpointError, EnvironmentFault
from nmoe.model.init import init_model
from nmoe.model.pieces import model_pieces
from nmoe.model.transformer import Transformer, compute_dtype
from nmoe.ops import registry
from nmoe.optim.optimizer import Optimizer, make_optimizer
from nmoe.pieces import Piece
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.experts import Experts
from nmoe.rdep.nodes import NodeExchange, exchange_of
from nmoe.train.environment import world_of
from nmoe.train.ranks import Ranks
from nmoe.train.room import planned_memory, refuse_too_large
from nmoe.train.shard import shard
from nmoe.train.stopwatch import Stopwatch

__all__ = [
    "Parts",
    "Progress",
    "build",
    "checkpoint_tensors",
    "choose_device",
    "log_device",
    "log_ranks",
    "restore",
    "start_from",
]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Progress:
    """Counters of a run that a checkpoint carries.

    Attributes:
        step: steps done, skipped ones among them.
        next_sample: number of the first sample not yet taken.
        tokens: targets trained on.
        skipped_steps: steps left out because loss or gradient were not finite.
        loss_spikes: steps whose loss stood far above the recent ones.
        recent_losses: of the last steps, oldest first, for finding spikes.
    """

    step: int = 0
    next_sample: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    loss_spikes: int = 0
    recent_losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What computes: model and optimizer, or this rank's part of them.

    Attributes:
        ranks: all of them.
        comm: those that share the experts.
        exchange: the memory through which they do; None where this rank has all experts.
        model: its parameters are whole while a layer computes.
        pieces: what this rank holds of parameters and buffers at any time, by name.
        optimizer: of these pieces.
        watch: times the parts of the steps.
    """

    ranks: Ranks
    comm: Communicator
    exchange: Exchange | NodeExchange | None
    model: Transformer
    pieces: dict[str, Piece]
    optimizer: Optimizer
    watch: Stopwatch

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.ranks.device


def choose_device(config: Config) -> torch.device:
    """The GPU where there is one (of several ranks, each its own), else the CPU.

    Also decides the arch and makes the arithmetic repeatable.

    Raises:
        EnvironmentFault: the GPU is of a kind that has no kernels here, or there are fewer than ranks.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of two settings with repeatable sums
    device = _own_device()
    arch.decide(config.train.dtype)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums over several blocks stay in fp32
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    _, size, place, _ = world_of(os.environ)
    if size == 1:
        return torch.device("cuda")
    if place >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"rank {place} of this node has no GPU: {torch.cuda.device_count()} visible; start fewer ranks (--nproc)"
        )
    try:
        torch.cuda.set_device(place)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise EnvironmentFault(
            f"rank {place} of this node cannot use its GPU: {first} (nmoe-doctor says more)"
        ) from error
    return torch.device("cuda", place)


def log_ranks(ranks: Ranks, *, gather: str) -> None:
    """Logs how several ranks share the work; nothing for one."""
    if ranks.mesh:
        share = f"experts shared by {ranks.expert_size}, held {ranks.data_size} times"
        _log.info("%d ranks, %s; dense parameters in rows over all, gathered once a %s", ranks.size, share, gather)


def log_device(device: torch.device) -> None:
    """Logs what computes: the device, its arch, and the file that serves each op."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    _log.info("device %s, arch %s, PyTorch %s", name, arch.current().name, torch.__version__)
    for op, source in registry.table().items():
        _log.info("  op %-16s %s", op, source)


def build(config: Config, ranks: Ranks) -> Parts:
    """The model with its initial values, and its optimizer; of several ranks, each makes its own part.

    Raises:
        EnvironmentFault: the ranks cannot reach each other's memory in the way that `parallel.comm` names.
    """
    refuse_too_large(config, ranks)
    comm = connect(
        ranks.expert_group,
        ranks.device,
        kind=config.parallel.comm,
        watcher=ranks.watcher,
        node_size=config.rdep.node_size,
    )
    with torch.device("meta" if ranks.mesh else ranks.device):  # no rank ever holds the whole
        model = Transformer(config, comm=comm)
    shard(model, ranks=ranks, gather=config.parallel.gather)
    if ranks.mesh:
        model.to_empty(device=ranks.device)
    exchange = exchange_of(config, comm, dtype=model.dtype) if comm.size > 1 else None
    if exchange:
        model.connect(exchange)
    init_model(model, config.run.seed)
    if ranks.data_size == 1:  # several owners of an expert gather its weights anew
        _hold_experts(model, config, ranks)
    pieces, dtype = model_pieces(model), compute_dtype(config)
    optimizer = make_optimizer(
        model.named_parameters(), config=config.optim, seed=config.run.seed, dtype=dtype, pieces=pieces
    )
    watch = Stopwatch(ranks.device)
    return Parts(
        ranks=ranks, comm=comm, exchange=exchange, model=model, pieces=pieces, optimizer=optimizer, watch=watch
    )


def _hold_experts(model: Transformer, config: Config, ranks: Ranks) -> None:
    """Lets the experts' gradients add up in place and, on a GPU with room for it, keeps the experts rounded."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    copies = planned_memory(config, ranks).copies
    if ranks.device.type == "cuda" and compute_dtype(config) == torch.bfloat16:
        _log.info("the experts in bf16 are %s", f"kept, {copies / 1e9:.3g} GB" if copies else "made for each product")
    for module in experts:
        module.hold(copies=copies > 0)


def start_from(parts: Parts, path: Path) -> None:
    """Fills the model, and nothing else, from the newest checkpoint of another run.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another model.
    """
    tensors = {f"model.{name}": piece for name, piece in parts.pieces.items()}
    ranks = parts.ranks
    info = ranks.agree(lambda: find_checkpoint(path))
    ranks.together(lambda: load_weights(info, tensors, prefix="model.", part=ranks.rank, parts=ranks.size))
    _log.info("weights from %s", info.path)


def checkpoint_tensors(parts: Parts) -> dict[str, Piece]:
    """Every tensor that training changes, by name: this rank's rows of values, selection biases, moments."""
    pieces = parts.pieces
    moments = {
        f"optim.{name}": pieces[name.rpartition(".")[0]].of(moment) for name, moment in parts.optimizer.state().items()
    }
    return {f"model.{name}": piece for name, piece in pieces.items()} | moments


def checkpoint_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Every number that training changes, as JSON values."""
    rng = {"cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    if parts.device.type == "cuda":
        rng["cuda"] = base64.b64encode(torch.cuda.get_rng_state(parts.device).numpy().tobytes()).decode()
    return {
        "step": progress.step,
        "next_sample": progress.next_sample,
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped_steps,
        "loss_spikes": progress.loss_spikes,
        "recent_losses": progress.recent_losses,
        "num_updates": parts.optimizer.num_updates,
        "rng": rng,
    }


def restore(parts: Parts, checkpoint: CheckpointInfo) -> Progress:
    """Fills model, optimizer and random generators from a checkpoint.

    Raises:
        CheckpointError: a file is damaged, or it belongs to another model.
    """
    ranks, tensors = parts.ranks, checkpoint_tensors(parts)
    ranks.together(lambda: load_tensors(checkpoint, tensors, part=ranks.rank, parts=ranks.size))
    state = dict(checkpoint.state)
    try:
        num_updates, rng = int(state.pop("num_updates")), state.pop("rng")
        progress = Progress(**state)
        torch.set_rng_state(_bytes(rng["cpu"]))
        if parts.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(_bytes(rng["cuda"]), parts.device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its state is not one that this version wrote ({type(error).__name__}: {error}); "
            "go on with the version that wrote it, or start anew with --fresh"
        ) from None
    parts.optimizer.num_updates = num_updates
    return progress


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
