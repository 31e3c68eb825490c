# SPDX-License-Identifier: Apache-2.0
"""Work beside the exchange of rows: on other streams of the GPU, forward and backward.

While rows travel, the multiprocessors that do not send them are idle; the shared expert needs no row of another rank
and fills them. Autograd runs a backward on the stream of its forward, so there it lies beside the exchange as well.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["start_beside", "start_carrying"]


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _carrier(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def start_carrying(carry: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Start `carry`, which moves rows between ranks, next to the products that the current stream gets from here on.

    Its kernels come first where both want a multiprocessor: a persistent product gives none away before it ends. It must
    allocate nothing. On a CPU it is run at once.

    Returns:
        What makes the current stream wait for its end; whatever `carry` uses has to live until then.
    """
    if device.type != "cuda":
        carry()
        return lambda: None
    here, carrier = torch.cuda.current_stream(device), _carrier(device)
    carrier.wait_stream(here)
    with torch.cuda.stream(carrier):
        carry()
        end = carrier.record_event()

    def finish() -> None:
        assert carry is not None  # held until here
        here.wait_event(end)

    return finish


def start_beside(run: Callable[[Tensor], Tensor], x_TD: Tensor) -> Callable[[], Tensor]:
    """Start ``run(x_TD)`` next to what the current stream does from here on; on a CPU, run it at once.

    Returns:
        What to call for the result; it makes the current stream wait for it.
    """
    if x_TD.device.type != "cuda":
        out_TD = run(x_TD)
        return lambda: out_TD
    here, beside = torch.cuda.current_stream(x_TD.device), _second_stream(x_TD.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        out_TD = run(x_TD)
    # Neither may be handed out again by the allocator before the other stream is done with it.
    x_TD.record_stream(beside)

    def finish() -> Tensor:
        here.wait_stream(beside)
        out_TD.record_stream(here)
        return out_TD

    return finish
