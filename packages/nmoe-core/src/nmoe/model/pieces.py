# SPDX-License-Identifier: Apache-2.0
"""Which rows of each parameter a rank holds, counted in the whole model: all E experts, all rows."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from nmoe.model.transformer import Transformer
from nmoe.pieces import Piece, as_piece, local
from nmoe.rdep.experts import Experts

__all__ = ["model_pieces"]


def model_pieces(model: Transformer) -> dict[str, Piece]:
    """Every parameter and buffer by name, as it is, not copied."""
    owned = {f"{name}.": module.owned for name, module in model.named_modules() if isinstance(module, Experts)}
    pieces = {name: as_piece(buffer) for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        mine = next((experts for prefix, experts in owned.items() if name.startswith(prefix)), None)
        rows = model.config.moe.num_experts if mine is not None else parameter.shape[0]
        first = mine.start if mine is not None else 0
        pieces[name] = Piece(
            tensor=local(parameter.detach()),
            shape=(rows, *parameter.shape[1:]),
            start=first + _first_row(parameter),
        )
    return pieces


def _first_row(parameter: Tensor) -> int:
    """First row of this rank's shard: FSDP gives each rank ceil(rows / ranks), the last ones what is left."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))
