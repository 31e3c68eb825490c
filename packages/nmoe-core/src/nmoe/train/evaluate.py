# SPDX-License-Identifier: Apache-2.0
"""Held-out loss, and what it is worth: the entropy of single bytes of the same text."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nmoe.config import Config
from nmoe.data.loader import held_out_batches
from nmoe.data.packing import PackedRows
from nmoe.formats.shards import ShardSet
from nmoe.formats.tokenizers import Tokenizer
from nmoe.model.transformer import Transformer

__all__ = ["HeldOut", "byte_entropy", "forward", "held_out_loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Loss on held-out text.

    Attributes:
        loss: nats a token, mean over the targets.
        loss_per_byte: nats a UTF-8 byte of the text.
    """

    loss: float
    loss_per_byte: float


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
    model: Transformer, val: ShardSet, *, config: Config, device: torch.device, tick: Callable[[], None]
) -> HeldOut:
    """Mean cross entropy over the held-out set, or over `train.eval_batches` micro batches of it.

    Args:
        model: the model.
        val: the set.
        config: lengths and sizes.
        device: where to compute.
        tick: called after each batch, to show that something moves.
    """
    batches = held_out_batches(
        val,
        seq_len=config.data.seq_len,
        vocab_size=config.model.vocab_size,
        micro_batch_size=config.train.micro_batch_size,
        num_batches=config.train.eval_batches,
    )
    loss_sum, num_targets = 0.0, 0
    was_training = model.training
    model.eval()
    for rows in batches:
        loss_sum += float(forward(model, rows, device).loss_sum)
        num_targets += int((rows.targets_BT >= 0).sum())
        tick()
    model.train(was_training)
    loss = loss_sum / num_targets
    return HeldOut(loss=loss, loss_per_byte=loss * val.num_tokens / val.text_bytes)


def byte_entropy(val: ShardSet, tokenizer: Tokenizer) -> float:
    """Entropy of the distribution of single bytes in a set's text, in nats: what knowing no context gives."""
    counts = np.zeros(val.vocab_size, dtype=np.int64)
    for shard in val.shards:
        counts += np.bincount(shard.tokens, minlength=val.vocab_size)
    of_byte = np.zeros(256, dtype=np.int64)
    for token in np.flatnonzero(counts):
        for byte in tokenizer.token_bytes(int(token)):
            of_byte[byte] += counts[token]
    share = of_byte[of_byte > 0] / of_byte.sum()
    return float(-(share * np.log(share)).sum())
