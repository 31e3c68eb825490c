# SPDX-License-Identifier: Apache-2.0
"""Rules between keys of a config, and what a resumed run may change: the one place for both.

Each rule is a line that yields one message of the form `moe.top_k = 9 exceeds moe.num_experts = 8`.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from nmoe.config.schema import Config
from nmoe.config.text import format_value

__all__ = ["changed_keys", "violations"]

# Keys that a resumed run may change: they decide how long and how closely the run is watched, not what it computes.
FREE_KEYS = frozenset(
    {
        "run.name",
        "run.root",
        "train.steps",
        "train.tokens",
        "train.micro_batch_size",
        "train.log_every",
        "train.recompute",
        "train.eval_every",
        "train.eval_batches",
        "parallel.ep",
        "parallel.comm",
        "rdep.capacity",
        "rdep.sizes",
        "rdep.node_size",
        "rdep.timeout_s",
        "parallel.gather",
        "checkpoint.every",
        "checkpoint.keep",
        "metrics.publish_s",
        "metrics.router_every",
    }
)


_MOST_NAME = 240


def violations(config: Config) -> Iterator[str]:
    """What is wrong between the keys of `config`, one line each; nothing when the config is good."""
    yield from _model_violations(config)
    yield from _moe_violations(config)
    yield from _run_violations(config)


def _model_violations(config: Config) -> Iterator[str]:
    model, attention, rope = config.model, config.attention, config.rope
    if model.num_dense_layers > model.num_layers:
        yield f"model.num_dense_layers = {model.num_dense_layers} exceeds model.num_layers = {model.num_layers}"
    yield from _attention_violations(config)
    if attention.qk_rope_head_dim % 2:
        yield f"attention.qk_rope_head_dim = {attention.qk_rope_head_dim} is odd; rotary positions turn pairs"
    if rope.scaling == "none" and (rope.factor != 1.0 or rope.original_context):
        yield 'rope.factor and rope.original_context have no effect with rope.scaling = "none"; set it to "yarn"'
    if rope.scaling == "yarn" and not (rope.factor > 1.0 and rope.original_context):
        yield 'rope.scaling = "yarn" needs rope.factor > 1 and rope.original_context >= 1'
    if rope.beta_slow >= rope.beta_fast:
        yield f"rope.beta_slow = {rope.beta_slow} is not below rope.beta_fast = {rope.beta_fast}"


def _attention_violations(config: Config) -> Iterator[str]:
    attention = config.attention
    if attention.kind == "mla":
        if not attention.kv_lora_rank:
            yield 'attention.kind = "mla" needs attention.kv_lora_rank >= 1'
        if attention.num_kv_heads or attention.qk_norm:
            yield 'attention.num_kv_heads and attention.qk_norm have no effect with attention.kind = "mla"'
    else:
        if attention.kv_lora_rank or attention.q_lora_rank:
            yield 'attention.kv_lora_rank and attention.q_lora_rank have no effect with attention.kind = "gqa"'
        if not attention.num_kv_heads or attention.num_heads % attention.num_kv_heads:
            yield (
                f"attention.num_kv_heads = {attention.num_kv_heads} does not divide "
                f"attention.num_heads = {attention.num_heads}"
            )
    if attention.global_every and not attention.window:
        yield "attention.global_every has no effect without attention.window"


def _moe_violations(config: Config) -> Iterator[str]:
    moe, parallel = config.moe, config.parallel
    if parallel.ep and moe.num_experts % parallel.ep:
        yield f"parallel.ep = {parallel.ep} does not divide moe.num_experts = {moe.num_experts}"
    if parallel.ep > 1 and parallel.comm == "local":
        yield f'parallel.comm = "local" is one rank, but parallel.ep = {parallel.ep}'
    block = {"plain": 1, "mxfp8": 32, "nvfp4": 64}[config.rdep.wire]  # 64: so that the scale of a row is aligned
    if config.model.hidden_size % block:
        yield f'rdep.wire = "{config.rdep.wire}" needs blocks of {block}, but model.hidden_size = {config.model.hidden_size}'
    node, ep = config.rdep.node_size, config.parallel.ep
    if node and ep % node:
        yield f"rdep.node_size = {node} does not divide parallel.ep = {ep}"
    if moe.top_k > moe.num_experts:
        yield f"moe.top_k = {moe.top_k} exceeds moe.num_experts = {moe.num_experts}"
        return
    if moe.num_experts % moe.num_groups:
        yield f"moe.num_groups = {moe.num_groups} does not divide moe.num_experts = {moe.num_experts}"
        return
    if moe.top_k_groups > moe.num_groups:
        yield f"moe.top_k_groups = {moe.top_k_groups} exceeds moe.num_groups = {moe.num_groups}"
        return
    group_size = moe.num_experts // moe.num_groups
    if moe.top_k > moe.top_k_groups * group_size:
        yield (
            f"moe.top_k = {moe.top_k} exceeds the {moe.top_k_groups * group_size} experts of "
            f"moe.top_k_groups = {moe.top_k_groups} groups of {group_size}"
        )
    if moe.num_groups > 1 and moe.group_score == "top2_sum" and group_size < 2:
        yield f'moe.group_score = "top2_sum" needs groups of at least 2 experts; moe.num_groups = {moe.num_groups}'


def _run_violations(config: Config) -> Iterator[str]:
    data, train, schedule = config.data, config.train, config.schedule
    if "/" in config.run.name or config.run.name.startswith("."):
        yield f"run.name = {format_value(config.run.name)} is not a plain folder name; leave out / and a dot in front"
    if not config.run.root:
        yield "run.root is empty; name the folder of runs"
    if "" in (*(source.path for source in data.train), *data.val):
        yield "data.train and data.val name folders of shards, but a name is empty"
    if (length := len(config.run.name.encode())) > _MOST_NAME:
        yield f"run.name has {length} bytes; a folder's name may have {_MOST_NAME}, and a number behind it"
    if data.builtin and (data.train or data.val):
        yield f'data.builtin = "{data.builtin}" brings its own text; remove data.train and data.val'
    if not data.builtin and not data.train:
        yield "data.train is empty; name a folder of shards (nmoe-prep makes one) or set data.builtin"
    folders = [Path(folder) for folder in data.val]
    if twice := next((str(folder) for folder in folders if folders.count(folder) > 1), ""):
        yield f"data.val names {format_value(twice)} twice; name each folder once"
    if train.batch_size % train.micro_batch_size:
        yield f"train.micro_batch_size = {train.micro_batch_size} does not divide train.batch_size = {train.batch_size}"
    if not data.val and not data.builtin and (train.eval_every or train.eval_batches):
        yield "train.eval_every and train.eval_batches have no effect without data.val"
    if schedule.kind != "wsd" and schedule.decay_steps:
        yield f'schedule.decay_steps has no effect with schedule.kind = "{schedule.kind}", which decays from warmup to end'
    if schedule.warmup_steps + schedule.decay_steps > train.steps:
        yield (
            f"schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {schedule.decay_steps} "
            f"together exceed train.steps = {train.steps}"
        )
    if config.optim.kind == "adamw" and (config.optim.momentum, config.optim.newton_schulz_steps) != (0.95, 5):
        yield 'optim.momentum and optim.newton_schulz_steps have no effect with optim.kind = "adamw"; set it to "muon"'
    if train.dtype == "fp64" and config.optim.moment_dtype == "bf16":
        yield 'optim.moment_dtype = "bf16" contradicts train.dtype = "fp64", which keeps moments in fp64'


def changed_keys(old: dict[str, Any], new: Config) -> list[str]:
    """What differs between a run's recorded config and a new one, leaving out the keys that a resume may change.

    Args:
        old: the recorded config as tables of TOML values.
        new: the config of this start.

    Returns:
        One text per difference: `optim.learning_rate: 0.001 -> 0.002`. A key that the record lacks, because the key is
        newer than the run, had its default; a key that is unknown by now is a difference.
    """
    differences = []
    current = {section.name: getattr(new, section.name) for section in fields(new)}
    for section in sorted(set(old) | set(current)):
        known = fields(current[section]) if section in current else ()
        before = {field.name: _default(field) for field in known if _default(field) is not None} | old.get(section, {})
        after = {field.name: getattr(current[section], field.name) for field in known}
        for key in sorted(set(before) | set(after)):
            was = _written(_listed(before[key], like=after.get(key))) if key in before else "(absent)"
            now = _written(after[key]) if key in after else "(absent)"
            if was != now and f"{section}.{key}" not in FREE_KEYS:
                differences.append(f"{section}.{key}: {was} -> {now}")
    return differences


def _default(field: Field[Any]) -> Any:
    """The default of a key, or None where it has to be given."""
    return None if field.default is MISSING else field.default


def _listed(value: Any, *, like: Any) -> Any:
    """A text that by now stands in a list, as that list: `data.val` once named one folder."""
    return ([value] if value else []) if isinstance(value, str) and isinstance(like, tuple) else value


def _written(value: Any) -> str:
    """`value` as TOML, equal for tables that were read from a file and the dataclasses made of them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_written(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    return format_value(value)
