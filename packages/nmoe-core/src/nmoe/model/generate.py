# SPDX-License-Identifier: Apache-2.0
"""Continuations of a prompt, for looking at a model; not for serving."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nmoe.model.attention import Cache
from nmoe.model.transformer import Transformer

__all__ = ["choose", "generate", "stream"]


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
def stream(
    model: Transformer,
    ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    agree: Callable[[int], int] = lambda token: token,
) -> Iterator[int]:
    """Continue a prompt, giving each new token as it is drawn.

    Args:
        model: Any; left as it is.
        ids: Prompt, at least one token.
        max_tokens: Most new tokens.
        temperature: See `choose`.
        top_p: See `choose`.
        seed: Of the draws.
        eos_id: Stop after this token; None never stops early.
        agree: Makes of the token drawn here the one that all ranks go on with, where several compute one model.
    """
    generator = torch.Generator().manual_seed(seed)
    caches = [Cache() for _ in model.layers]
    fed, past = list(ids), 0
    for _ in range(max_tokens):
        logits = model.extend(torch.tensor([fed], device=model.embed.device), caches, past=past)
        past += len(fed)
        fed = [agree(choose(logits[0], temperature=temperature, top_p=top_p, generator=generator))]
        yield fed[0]
        if fed[0] == eos_id:
            break


def generate(
    model: Transformer,
    ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    agree: Callable[[int], int] = lambda token: token,
) -> list[int]:
    """The new tokens of `stream` as a list, without the prompt."""
    new = stream(
        model,
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        eos_id=eos_id,
        agree=agree,
    )
    return list(new)
