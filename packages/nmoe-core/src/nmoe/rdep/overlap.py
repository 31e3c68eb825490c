# SPDX-License-Identifier: Apache-2.0
"""Work beside the exchange of rows: on a second stream of the GPU, forward and backward.

While rows travel, the multiprocessors that do not send them are idle; the shared expert needs no row of another rank
and fills them. Autograd runs a backward on the stream of its forward, so there it lies beside the exchange as well.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["start_beside"]


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Rejoined(torch.autograd.Function):
    """Its argument. Backward makes the stream of this forward wait for all that the other one was given.

    Autograd waits there for the gradient of the rows alone. Gradients of weights that are added to earlier ones are added
    after it was made, on the other stream, and FSDP sums over ranks from this one.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, other: torch.cuda.Stream) -> Tensor:
        ctx.other = other
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (dx_TD,) = grad_outputs
        torch.cuda.current_stream(dx_TD.device).wait_stream(ctx.other)
        return dx_TD, None


def start_beside(run: Callable[[Tensor], Tensor], x_TD: Tensor) -> Callable[[], Tensor]:
    """Start ``run(x_TD)`` next to what the current stream does from here on; on a CPU, run it at once.

    Returns:
        What to call for the result; it makes the current stream wait for it.
    """
    if x_TD.device.type != "cuda":
        out_TD = run(x_TD)
        return lambda: out_TD
    here, beside = torch.cuda.current_stream(x_TD.device), _second_stream(x_TD.device)
    x_TD = _Rejoined.apply(x_TD, beside)  # type: ignore[assignment]
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
