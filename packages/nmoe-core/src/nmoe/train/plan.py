# SPDX-License-Identifier: Apache-2.0
"""What a config would need, from its numbers alone: `nmoe-train CONFIG --dry-run`."""

from bisect import bisect_left
from dataclasses import dataclass

from nmoe.config import Config
from nmoe.model.params import count_parameters
from nmoe.train.memory import Memory, plan_memory, recompute_choices

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
        gpus: fewest GPUs of `GPU_BYTES`, 5 % of each kept free, that hold the run: one, or whole nodes of eight; 0: no number does, because what
            one micro batch needs is too large.
        memory: of one of these GPUs at the moment of most.
        alternative: least `train.recompute` that needs the fewest GPUs, and these, where they are fewer; else None.
        tokens: that the run sees.
        steps: of the run.
    """

    parameters: int
    active_parameters: int
    bytes_per_parameter: dict[str, float]
    gpus: int
    memory: Memory
    alternative: tuple[tuple[str, ...], int] | None
    tokens: int
    steps: int

    @property
    def state_bytes(self) -> float:
        """Bytes of master values, gradients and moments over all GPUs."""
        return self.parameters * sum(self.bytes_per_parameter.values())


def make_plan(config: Config) -> Plan:
    """Sizes of a config; needs no torch and no data."""
    parameters, active = count_parameters(config)
    kernels = config.train.dtype == "bf16"  # others run plain torch
    whole = plan_memory(config, kernels=kernels)
    wide = 8 if config.train.dtype == "fp64" else 4
    sizes = {"master values": float(wide), "gradients": float(wide), "moments": whole.moments / parameters}
    gpus = _fewest(config, kernels=kernels)
    memory = plan_memory(config, kernels=kernels, ranks=gpus or _MOST_GPUS)
    return Plan(
        parameters=parameters,
        active_parameters=active,
        bytes_per_parameter=sizes,
        gpus=gpus,
        memory=memory,
        alternative=_fewer(config, gpus or _MOST_GPUS, kernels=kernels),
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
    each = ", ".join(f"{name} {size:.3g}" for name, size in plan.bytes_per_parameter.items())
    total = sum(plan.bytes_per_parameter.values())
    memory, gpus = plan.memory, plan.gpus or _MOST_GPUS
    share = f"{_size(plan.state_bytes / gpus)} of state on each"
    rows = [
        ("run", f"{config.run.root}/{config.run.name}"),
        ("parameters", f"{_count(plan.parameters)} total, {_count(plan.active_parameters)} active"),
        ("layers", f"{config.model.num_layers}, {config.num_moe_layers} of them MoE"),
        ("memory", f"{_size(plan.state_bytes)} for state: {total:.3g} bytes a parameter ({each})"),
        ("GPUs", f"{plan.gpus} of {_size(GPU_BYTES)}, 5 % kept free: {share}" if plan.gpus else _too_large(config)),
        (
            "peak",
            f"{_size(memory.peak)} on each, in the {memory.moment}: master values {_size(memory.masters)}, gradients "
            f"{_size(memory.gradients)}, moments {_size(memory.moments)}, activations {_size(memory.activations)}, "
            f"working {_size(memory.working)}",
        ),
        *_recompute_row(plan, config),
        ("step", f"{config.train.batch_size} x {config.data.seq_len} = {config.tokens_per_step:,} tokens"),
        ("steps", f"{plan.steps:,}"),
        ("tokens", f"{_count(plan.tokens)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


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


def _count(number: float) -> str:
    """At most four significant digits with a unit: 7.34 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"


def _size(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number / 1e3:.4g} kB"
