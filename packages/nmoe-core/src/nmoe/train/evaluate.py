# SPDX-License-Identifier: Apache-2.0
"""Held-out loss, and what it is worth: the entropy of single bytes of the same text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nmoe.config import Config
from nmoe.data.loader import held_out_batches
from nmoe.data.packing import PackedRows
from nmoe.formats.shards import ShardSet
from nmoe.formats.tokenizers import Tokenizer
from nmoe.model.transformer import Transformer
from nmoe.train.ranks import Ranks

__all__ = ["HeldOut", "byte_entropy", "forward", "held_out_loss"]

_COUNTED = 1 << 22  # tokens at once: counting makes 8 bytes of each


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Loss on held-out text.

    Attributes:
        loss: nats a token, mean over the targets.
        loss_per_byte: nats a UTF-8 byte of the text.
        by_source: nats a token of each set by its folder, where there are several.
    """

    loss: float
    loss_per_byte: float
    by_source: dict[str, float]


def forward(model: Transformer, rows: PackedRows, device: torch.device):
    """The model's output for packed rows, moved to `device`; the documents' numbers are wanted on the CPU."""

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return model(
        move(rows.tokens_BT),
        positions_BT=move(rows.positions_BT),
        document_BT=torch.from_numpy(rows.document_BT),
        targets_BT=move(rows.targets_BT),
    )


@torch.no_grad()
def held_out_loss(
    model: Transformer, val: Sequence[ShardSet], *, config: Config, ranks: Ranks, tick: Callable[[], None]
) -> HeldOut:
    """Mean cross entropy over the held-out sets, or over `train.eval_batches` micro batches of each.

    Args:
        model: the model.
        val: the sets, at least one.
        config: lengths and sizes.
        ranks: each takes its share of the batches; the sum is in their order, whatever the number of ranks.
        tick: called after each batch, to show that something moves.
    """
    was_training = model.training
    model.eval()
    sums = {shards: _sums(model, shards, config=config, ranks=ranks, tick=tick) for shards in val}
    model.train(was_training)
    loss_sum, num_targets = sum(loss for loss, _ in sums.values()), sum(count for _, count in sums.values())
    text_bytes = sum(count * shards.text_bytes / shards.num_tokens for shards, (_, count) in sums.items())
    by_source = {str(shards.directory): loss / count for shards, (loss, count) in sums.items()}
    return HeldOut(
        loss=loss_sum / num_targets,
        loss_per_byte=loss_sum / text_bytes if text_bytes else math.nan,
        by_source=by_source if len(val) > 1 else {},
    )


def _sums(
    model: Transformer, shards: ShardSet, *, config: Config, ranks: Ranks, tick: Callable[[], None]
) -> tuple[float, float]:
    """Loss summed over the targets of a set, and their number; the same bits on all ranks."""
    batches = held_out_batches(
        shards,
        seq_len=config.data.seq_len,
        vocab_size=config.model.vocab_size,
        micro_batch_size=config.train.micro_batch_size,
        num_batches=config.train.eval_batches,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    sums: list[float] = []
    for rows in batches:
        sums += [float(forward(model, rows, ranks.device).loss_sum), float((rows.targets_BT >= 0).sum())]
        tick()
    of_rank = ranks.rows(torch.tensor(sums, dtype=torch.float64, device=ranks.device)).view(ranks.size, -1, 2)
    in_order = of_rank.transpose(0, 1).flatten(0, 1).tolist()
    return sum(loss for loss, _ in in_order), sum(count for _, count in in_order)


def byte_entropy(val: Sequence[ShardSet], tokenizer: Tokenizer) -> float:
    """Entropy of the distribution of single bytes in the text of sets, in nats: what knowing no context gives."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for shard in (shard for shards in val for shard in shards.shards):
        for start in range(0, len(shard.tokens), _COUNTED):
            tokens = shard.tokens[start : start + _COUNTED]
            counts += np.bincount(tokens, minlength=tokenizer.vocab_size)
    of_byte = np.zeros(256, dtype=np.int64)
    for token in np.flatnonzero(counts):
        for byte in tokenizer.token_bytes(int(token)):
            of_byte[byte] += counts[token]
    share = of_byte[of_byte > 0] / of_byte.sum()
    return float(-(share * np.log(share)).sum())
