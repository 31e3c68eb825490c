# SPDX-License-Identifier: Apache-2.0
"""Continuations of a prompt, for looking at a model; not for serving."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmoe.model.transformer import Transformer

__all__ = ["choose", "generate"]


def choose(logits_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw the next token.

    Args:
        logits_V: Of one position.
        temperature: >= 0; 0 takes the likeliest (the lowest id of equal ones).
        top_p: In (0, 1]: draw from the smallest set of likeliest tokens whose probabilities reach this sum.
        generator: On the CPU; advanced by one draw unless temperature is 0.
    """
    logits_V = logits_V.float().cpu()
    if temperature == 0:
        return int(torch.argmax(logits_V))
    probability, token = torch.softmax(logits_V / temperature, dim=0).sort(descending=True, stable=True)
    before = probability.cumsum(0) - probability
    kept = probability.masked_fill(before >= top_p, 0)
    return int(token[torch.multinomial(kept, 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: Transformer,
    ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: Any; left as it is.
        ids: Prompt, at least one token.
        max_tokens: Most new tokens.
        temperature: See `choose`.
        top_p: See `choose`.
        seed: Of the draws.
        eos_id: Stop after this token; None never stops early.

    Returns:
        The new tokens, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.embed.device
    tokens = list(ids)
    while len(tokens) < len(ids) + max_tokens:
        logits = model.logits(torch.tensor([tokens], device=device))
        tokens.append(choose(logits[0, -1], temperature=temperature, top_p=top_p, generator=generator))
        if tokens[-1] == eos_id:
            break
    return tokens[len(ids) :]
