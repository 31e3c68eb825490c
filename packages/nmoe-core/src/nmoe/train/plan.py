# SPDX-License-Identifier: Apache-2.0
"""What a config would need, from its numbers alone: `nmoe-train CONFIG --dry-run`."""

from bisect import bisect_left
from dataclasses import dataclass

from nmoe.config import Config
from nmoe.errors import ConfigError
from nmoe.model.params import count_parameters
from nmoe.train.memory import Memory, plan_memory, recompute_choices
from nmoe.words import count, size

__all__ = ["Plan", "format_plan", "make_plan"]

GPU_BYTES = 180e9
"""Memory of a B200, in bytes."""
_KEPT_FREE = 0.05
"""Share of it that is not planned: the driver's contexts, NCCL's buffers, and fragments between allocations."""
_ROOM = GPU_BYTES * (1 - _KEPT_FREE)
_GPUS_A_NODE, _MOST_GPUS = 8, 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes of a run.

    Attributes:
        parameters: all of them.
        active_parameters: those that take part in one token.
        bytes_per_parameter: of master values, gradients and moments, by name; a mean where parameters differ.
        fewest: GPUs of `GPU_BYTES`, 5 % of each kept free, that hold the run: one, or whole nodes of eight; 0: no number
            does, because what one micro batch needs is too large.
        gpus: as many as asked for, or the fewest.
        memory: of one of these GPUs at the moment of most.
        alternative: least `train.recompute` that needs the fewest GPUs, and these, where they are fewer; else None.
        tokens: that the run sees.
        steps: of the run.
    """

    parameters: int
    active_parameters: int
    bytes_per_parameter: dict[str, float]
    fewest: int
    gpus: int
    memory: Memory
    alternative: tuple[tuple[str, ...], int] | None
    tokens: int
    steps: int

    @property
    def state_bytes(self) -> float:
        """Bytes of master values, gradients and moments over all GPUs."""
        return self.parameters * sum(self.bytes_per_parameter.values())


def make_plan(config: Config, *, nproc: int | None = None) -> Plan:
    """Sizes of a config; needs no torch and no data.

    Args:
        config: the config.
        nproc: GPUs that it is to run on; None: as few as hold it.

    Raises:
        ConfigError: `parallel.ep` does not divide `nproc`.
    """
    if nproc and config.parallel.ep and nproc % config.parallel.ep:
        raise ConfigError(f"{nproc} ranks: parallel.ep = {config.parallel.ep} does not divide them")
    parameters, active = count_parameters(config)
    kernels = config.train.dtype == "bf16"  # others run plain torch
    whole = plan_memory(config, kernels=kernels)
    wide = 8 if config.train.dtype == "fp64" else 4
    sizes = {"master values": float(wide), "gradients": float(wide), "moments": whole.moments / parameters}
    fewest = _fewest(config, kernels=kernels)
    gpus = nproc or fewest
    memory = plan_memory(config, kernels=kernels, ranks=gpus or _MOST_GPUS, memory=GPU_BYTES)
    return Plan(
        parameters=parameters,
        active_parameters=active,
        bytes_per_parameter=sizes,
        gpus=gpus,
        fewest=fewest,
        memory=memory,
        alternative=_fewer(config, fewest or _MOST_GPUS, kernels=kernels),
        tokens=config.tokens_per_step * config.train.steps,
        steps=config.train.steps,
    )


def _fewest(config: Config, *, kernels: bool) -> int:
    """GPUs that hold the run; 0 where none do."""
    if plan_memory(config, kernels=kernels).peak <= _ROOM:
        return 1
    nodes = range(1, _MOST_GPUS // _GPUS_A_NODE + 1)
    # A peak falls with the number of ranks, so the fewest nodes are found by halving.
    index = bisect_left(
        nodes, True, key=lambda n: plan_memory(config, kernels=kernels, ranks=n * _GPUS_A_NODE).peak <= _ROOM
    )
    return nodes[index] * _GPUS_A_NODE if index < len(nodes) else 0


def _fewer(config: Config, gpus: int, *, kernels: bool) -> tuple[tuple[str, ...], int] | None:
    """What recomputation would save, in GPUs."""
    if gpus == 1:
        return None
    needs = [(choice.train.recompute, _fewest(choice, kernels=kernels)) for choice in recompute_choices(config)]
    best = min(((number, parts) for parts, number in needs if number), key=lambda need: need[0], default=(gpus, ()))
    return (best[1], best[0]) if best[0] < gpus else None


def format_plan(plan: Plan, *, config: Config) -> str:
    """The plan as aligned lines; `config` is the one it was made of."""
    each = ", ".join(f"{name} {width:.3g}" for name, width in plan.bytes_per_parameter.items())
    total = sum(plan.bytes_per_parameter.values())
    memory, gpus = plan.memory, plan.gpus or _MOST_GPUS
    share = f"{size(plan.state_bytes / gpus)} of state on each"
    rows = [
        ("run", f"{config.run.root}/{config.run.name}"),
        ("parameters", f"{count(plan.parameters)} total, {count(plan.active_parameters)} active"),
        ("layers", f"{config.model.num_layers}, {config.num_moe_layers} of them MoE"),
        ("memory", f"{size(plan.state_bytes)} for state: {total:.3g} bytes a parameter ({each})"),
        (
            "GPUs",
            f"{plan.gpus} of {size(GPU_BYTES)}, 5 % kept free: {share}{_too_few(plan)}"
            if plan.gpus
            else _too_large(config),
        ),
        (
            "peak",
            f"{size(memory.peak)} on each, in the {memory.moment}: master values {size(memory.masters)}, "
            f"{f'experts in bf16 {size(memory.copies)}, ' if memory.copies else ''}gradients "
            f"{size(memory.gradients)}, moments {size(memory.moments)}, activations {size(memory.activations)}, "
            f"working {size(memory.working)}",
        ),
        *_recompute_row(plan, config),
        ("step", f"{config.train.batch_size} x {config.data.seq_len} = {config.tokens_per_step:,} tokens"),
        ("steps", f"{plan.steps:,}"),
        ("tokens", f"{count(plan.tokens)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _too_few(plan: Plan) -> str:
    if plan.memory.peak <= _ROOM:
        return ""
    return (
        f"; too few, {plan.fewest} hold it" if plan.fewest else "; no number holds it, one micro batch needs too much"
    )


def _too_large(config: Config) -> str:
    return (
        f"no number: one micro batch of {config.train.micro_batch_size} x {config.data.seq_len} tokens needs too much"
    )


def _recompute_row(plan: Plan, config: Config) -> list[tuple[str, str]]:
    rows = []
    if config.train.recompute:
        rows.append(("recompute", ", ".join(config.train.recompute)))
    if plan.alternative is not None:
        parts = ", ".join(f'"{part}"' for part in plan.alternative[0])
        rows.append(("or", f"train.recompute = [{parts}]: GPUs {plan.alternative[1]}"))
    return rows
