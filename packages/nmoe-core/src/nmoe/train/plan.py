# SPDX-License-Identifier: Apache-2.0
"""What a config would need, from its numbers alone: `nmoe-train CONFIG --dry-run`."""

from dataclasses import dataclass

from nmoe.config import Config
from nmoe.model.params import count_parameters

__all__ = ["Plan", "format_plan", "make_plan"]

GPU_BYTES = 180e9
"""Memory of a B200, in bytes."""
_GPUS_A_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes of a run.

    Attributes:
        parameters: all of them.
        active_parameters: those that take part in one token.
        bytes_per_parameter: of master values, gradients and moments, by name.
        gpus: fewest GPUs of `GPU_BYTES` that hold these: one, or whole nodes of eight. Activations come on top; their
            size follows `train.micro_batch_size`.
        tokens: that the run sees.
        steps: of the run.
    """

    parameters: int
    active_parameters: int
    bytes_per_parameter: dict[str, int]
    gpus: int
    tokens: int
    steps: int

    @property
    def state_bytes(self) -> int:
        """Bytes of master values, gradients and moments over all GPUs."""
        return self.parameters * sum(self.bytes_per_parameter.values())


def make_plan(config: Config) -> Plan:
    """Sizes of a config; needs no torch and no data."""
    parameters, active = count_parameters(config)
    wide = 8 if config.train.dtype == "fp64" else 4
    moment = 2 if config.optim.moment_dtype == "bf16" else wide
    sizes = {"master values": wide, "gradients": wide, "moments": 2 * moment}
    state = parameters * sum(sizes.values())
    gpus = 1 if state <= GPU_BYTES else _GPUS_A_NODE * -(-state // int(_GPUS_A_NODE * GPU_BYTES))
    return Plan(
        parameters=parameters,
        active_parameters=active,
        bytes_per_parameter=sizes,
        gpus=gpus,
        tokens=config.tokens_per_step * config.train.steps,
        steps=config.train.steps,
    )


def format_plan(plan: Plan, *, config: Config) -> str:
    """The plan as aligned lines; `config` is the one it was made of."""
    each = ", ".join(f"{name} {size}" for name, size in plan.bytes_per_parameter.items())
    rows = [
        ("run", f"{config.run.root}/{config.run.name}"),
        ("parameters", f"{_count(plan.parameters)} total, {_count(plan.active_parameters)} active"),
        ("layers", f"{config.model.num_layers}, {config.num_moe_layers} of them MoE"),
        (
            "memory",
            f"{_size(plan.state_bytes)} for state: {sum(plan.bytes_per_parameter.values())} bytes a parameter ({each})",
        ),
        ("GPUs", f"{plan.gpus} of {_size(GPU_BYTES)}: {_size(plan.state_bytes / plan.gpus)} of state on each"),
        ("step", f"{config.train.batch_size} x {config.data.seq_len} = {config.tokens_per_step:,} tokens"),
        ("steps", f"{plan.steps:,}"),
        ("tokens", f"{_count(plan.tokens)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


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
