# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank at the moment of most, from a config's numbers alone: no torch, no device, no data.

What autograd keeps is stated op by op, as the ops state it themselves; each formula is checked against the allocations of
a real step (tests/core/test_memory.py). Peaks are looked for where they can be: at the loss, when every layer's
activations are there; in the backward of each kind of layer; in the optimizer. Under gradient accumulation the gradients
of earlier micro batches are there all the while.

Symbols: T tokens of a micro batch; `a` bytes of an activation; `m` bytes of a master value; `w` bytes of fp32 (fp64).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from nmoe.config import Config
from nmoe.config.schema import RECOMPUTABLE
from nmoe.model.params import block_shapes, parameter_shapes
from nmoe.rdep.size import shared_bytes

__all__ = ["Memory", "kept_activations", "plan_memory", "recompute_choices"]

_CHUNK_LOGITS = 1 << 27
"""Logits that the loss holds at once in plain torch (`nmoe.ops.cross_entropy.reference`)."""
_CHUNK_BYTES, _CHUNK_TOKENS = 1_650_000_000, 16384
"""Most memory and tokens of the kernels' chunk of logits, a power of two of tokens (`nmoe.ops.cross_entropy.cuda`)."""
_CHUNK_MOMENTS, _CHUNK_MUON = 1 << 24, 1 << 26
"""Elements that AdamW with bf16 moments, and Muon, work on at once (`nmoe.optim`)."""
_ROOM = 0.92
"""Share of a GPU's memory that a plan may fill before what is only convenient has to go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank at the moment of most memory, by what they are.

    Attributes:
        masters: parameters and buffers.
        copies: the experts rounded to the activations' dtype, kept where there is room for them.
        gradients: of parameters, that are there at that moment.
        moments: of the optimizer.
        activations: kept from forward to backward.
        working: of the operation that runs.
        moment: where that moment is: "loss", "backward of layer 3", "optimizer".
    """

    masters: int
    copies: int
    gradients: int
    moments: int
    activations: int
    working: int
    moment: str

    @property
    def state(self) -> int:
        """What the model needs, whatever the batch."""
        return self.masters + self.copies + self.gradients + self.moments

    @property
    def peak(self) -> int:
        """All of it."""
        return self.state + self.activations + self.working


@dataclass(frozen=True, kw_only=True, slots=True)
class _Widths:
    """Bytes of an element, and the lengths that all formulas share."""

    T: int
    rows: int
    a: int
    m: int
    w: int
    kernels: bool
    ep: int = 1
    """Ranks that share the experts of a layer."""
    keeps_casts: bool = True
    """Whether autograd keeps rounded copies of dense weights; ranks that share them gather them again instead."""
    copies: bool = False
    """Whether the experts are kept rounded."""

    @property
    def swiglu_backward(self) -> int:
        """Held by the backward of SwiGLU, a hidden feature: three numbers, or in plain torch all its steps."""
        if self.kernels:
            return 3 * self.a
        return self.a + 6 * self.w + (0 if self.a == self.w else 2 * self.w + 2 * self.a)

    def cast(self, *shapes: tuple[int, ...]) -> int:
        """Copies of weights in the activations' dtype, which autograd keeps; none where the dtypes are one."""
        return 0 if self.a == self.m or not self.keeps_casts else self.a * sum(math.prod(shape) for shape in shapes)


def _widths(config: Config, *, kernels: bool, ranks: int = 1) -> _Widths:
    """Of a rank; without `parallel.ep` experts are shared by as many ranks of a node of eight as divide them."""
    experts = config.moe.num_experts
    ep = config.parallel.ep or max(n for n in range(1, 9) if ranks % n == 0 and experts % n == 0)
    a = {"bf16": 2, "fp32": 4, "fp64": 8}[config.train.dtype]
    wide = max(a, 4)
    rows = config.train.micro_batch_size
    return _Widths(
        T=rows * config.data.seq_len, rows=rows, a=a, m=wide, w=wide, kernels=kernels, ep=ep, keeps_casts=ranks == 1
    )


def _attention(config: Config, s: _Widths, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Kept by attention and the norm before it, without their input."""
    at, D, T = config.attention, config.model.hidden_size, s.T
    N, G, H, V = at.num_heads, at.num_kv_heads, at.qk_head_dim, at.v_head_dim
    kept = T * s.w + T * D * s.a  # the norm's reciprocals, its result
    kept += s.cast(*(shape for name, shape in shapes.items() if name.startswith("attn.") and len(shape) == 2))
    if at.kind == "mla":
        if at.q_lora_rank:
            kept += T * (2 * at.q_lora_rank * s.a + s.w)
        kept += T * ((at.kv_lora_rank + at.qk_rope_head_dim) + at.kv_lora_rank) * s.a + T * s.w
        heads = N * (at.qk_nope_head_dim + V) if s.kernels else N * V  # v is a view of the expanded latents
        kept += T * (2 * N * H + heads) * s.a
    else:
        if at.qk_norm:
            kept += T * (N + G) * (H * s.a + s.w)
        shared = G if s.kernels else N  # plain torch repeats keys and values
        kept += T * (N * H + shared * (H + V)) * s.a
    kept += T * N * V * s.a  # the result
    if s.kernels:
        return kept + T * N * 4
    scores = T * N * config.data.seq_len
    return kept + scores * s.w + (scores * s.a if s.a != s.w else 0)


def _network(width: int, config: Config, s: _Widths) -> int:
    """Kept by a SwiGLU network, without its input."""
    D = config.model.hidden_size
    return s.T * 3 * width * s.a + s.cast((2 * width, D), (D, width))


def _router(config: Config, s: _Widths) -> int:
    moe = config.moe
    logits = s.T * moe.num_experts * s.w
    kept = logits + s.T * moe.top_k * 4  # and the choices
    if moe.balance_loss:
        kept += logits + (s.T * s.w if moe.scoring == "sigmoid" else 0)
    if moe.z_loss:
        kept += 2 * s.T * s.w
    return kept


def _routed(config: Config, s: _Widths) -> int:
    """Kept by the routed experts, without rows, choices and gates."""
    moe, slots = config.moe, s.T * config.moe.top_k
    kept = slots * (4 + s.w + 4) + (moe.num_experts + 1) * 4  # index, gate, place; offsets
    return kept if "experts" in config.train.recompute else kept + slots * 2 * moe.expert_size * s.a


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Bytes that a layer keeps from forward to backward, in the order in which backward frees them."""

    network: int
    routed: int
    attention: int

    @property
    def total(self) -> int:
        return self.network + self.routed + self.attention


def _layer(config: Config, layer: int, s: _Widths) -> _Kept:
    model, moe, recompute = config.model, config.moe, config.train.recompute
    stream = s.T * model.hidden_size * s.a
    attention = stream if "attention" in recompute else stream + _attention(config, s, _layer_shapes(config, layer))
    normed = 2 * stream + s.T * s.w  # the second half's input, its norm's result and reciprocals
    dense = layer < model.num_dense_layers
    width = model.ffn_size if dense else moe.num_shared_experts * moe.expert_size
    network = _network(width, config, s) if width and "mlp" not in recompute else 0
    routed = 0 if dense else _router(config, s) + _routed(config, s)
    return _Kept(network=network, routed=routed + normed, attention=attention)


def _layer_shapes(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    return dict(block_shapes(config, layer))


def kept_activations(config: Config, *, kernels: bool, ranks: int = 1) -> dict[str, int]:
    """Bytes that autograd keeps of one micro batch between forward and backward, by part of the model.

    Args:
        config: `train.recompute` is read, too.
        kernels: whether the ops are kernels; plain torch keeps the scores of attention.
        ranks: see `plan_memory`.
    """
    s, model = _widths(config, kernels=kernels, ranks=ranks), config.model
    stream = s.T * model.hidden_size * s.a
    kept = {f"layer {i}": _layer(config, i, s).total for i in range(model.num_layers)}
    for depth in range(model.mtp_depth):
        joined = 5 * stream + s.T * (3 * s.w + 1) + s.cast((model.hidden_size, 2 * model.hidden_size))
        loss = stream + model.vocab_size * model.hidden_size * s.m
        index = model.num_layers + depth
        kept[f"layer {index}"] = joined + loss + _layer(config, index, s).total
    tables = 2 * s.T * (config.attention.qk_rope_head_dim // 2) * s.w
    masks = 0 if s.kernels else s.T * config.data.seq_len
    kept["positions"] = tables + masks
    kept["loss"] = 2 * stream + s.T * s.w + model.vocab_size * model.hidden_size * s.m
    return kept


def _loss_working(config: Config, s: _Widths) -> int:
    """Held by the loss beside its two gradients, which are kept: its input twice, the head rounded, a chunk of logits."""
    head, V = config.model.vocab_size * config.model.hidden_size, config.model.vocab_size
    held = 2 * s.T * config.model.hidden_size * s.a + (head * s.a if s.a != s.m else 0)
    if s.kernels:
        fits = [128 << n for n in range(8) if (128 << n) * V * 4 <= _CHUNK_BYTES]
        return held + min(s.T, max(fits, default=128)) * V * 4
    chunk = min(s.T, max(16, _CHUNK_LOGITS // V)) * V
    making = chunk * (s.w + s.a) if s.a != s.w else chunk * s.w
    return held + max(making, chunk * s.a + head * s.a)


def _routed_working(config: Config, s: _Widths) -> int:
    """Held by the backward of the routed experts: their gradients, and what flows between four products."""
    moe, D, slots = config.moe, config.model.hidden_size, s.T * config.moe.top_k
    w2 = moe.num_experts // s.ep * D * moe.expert_size
    rounded = 0 if s.a == s.m or s.copies else s.a
    act = slots * moe.expert_size * s.a
    again = 2 * act if "experts" in config.train.recompute else 0
    steps = slots * moe.expert_size * s.swiglu_backward  # all of them at once in plain torch
    copied = slots * D * s.a  # the output's gradient in slot order
    between = 3 * act + (w2 * rounded + copied if s.kernels else steps)
    in_place = (
        config.train.accumulation > 1 and s.ep == 1 and s.keeps_casts
    )  # to the gradients of earlier micro batches
    return (0 if in_place else 3 * w2 * s.m) + again + max(between, 2 * act + slots * D * s.a + 2 * w2 * rounded)


def _attention_working(config: Config, s: _Widths) -> int:
    """Held by the backward of attention: gradients of q, k and v, and its own workspace."""
    at = config.attention
    N, H, V = at.num_heads, at.qk_head_dim, at.v_head_dim
    if s.kernels:
        return s.T * N * ((2 * H + 2 * V) * s.a + H * 4)
    scores = s.T * N * config.data.seq_len
    freed = 0 if s.a == s.w else s.a  # the rounded weights, before their gradient is widened
    return s.T * N * (2 * H + 2 * V) * s.a + scores * (2 * s.w - freed)


def _backward_working(config: Config, layer: int, s: _Widths) -> int:
    """Most that the backward of a layer holds, over what is kept when it begins; the gradient of its output among it."""
    model, moe, recompute, kept = config.model, config.moe, config.train.recompute, _layer(config, layer, s)
    stream = s.T * model.hidden_size * s.a
    dense = layer < model.num_dense_layers
    width = model.ffn_size if dense else moe.num_shared_experts * moe.expert_size
    network = s.T * width * s.swiglu_backward + (_network(width, config, s) if "mlp" in recompute else 0)
    routed = (0 if dense else _routed_working(config, s)) - kept.network
    attention = _attention_working(config, s) - kept.network - kept.routed
    if "attention" in recompute:
        attention += _attention(config, s, _layer_shapes(config, layer))
    return 2 * stream + max(network, stream + routed, attention)


def _optimizer_working(config: Config, s: _Widths) -> int:
    narrow = config.optim.moment_dtype == "bf16"
    chunk = _CHUNK_MOMENTS * 7 * s.w if narrow and not s.kernels else 0
    if config.optim.kind != "muon":
        return min(chunk, 7 * s.w * max(math.prod(shape) for shape in parameter_shapes(config).values()))
    shapes = parameter_shapes(config)
    matrices = [(name, shape) for name, shape in shapes.items() if _moments(name, shape, config) == 1]
    return max(_muon_working(name, shape, s, narrow=narrow) for name, shape in matrices)


def _muon_working(name: str, shape: tuple[int, ...], s: _Widths, *, narrow: bool) -> int:
    """Two copies of a parameter, and of a batch of its matrices the iterate and its Gram matrix twice.

    Or, where the momentum is rounded, it in full precision and random bits for a part of it.
    """
    rows, columns = shape[-2] // (2 if name.endswith("w13") else 1), shape[-1]
    size, square = math.prod(shape), min(rows, columns) / max(rows, columns)
    rounding = size * s.w + min(_CHUNK_MOMENTS, size) * 20 if narrow else 0
    return max(rounding, 2 * size * s.w + int(min(_CHUNK_MUON, size) * s.a * (2 + 2 * square)))


def plan_memory(config: Config, *, kernels: bool, ranks: int = 1, memory: float = 0.0) -> Memory:
    """The moment of most memory in a step, on one rank.

    Args:
        config: the config; `train.micro_batch_size` is one rank's.
        kernels: whether the ops are kernels (True) or plain torch (False).
        ranks: that share master values, gradients and moments evenly, and gather two layers' weights at a time; rows
            spread evenly over the experts. The buffers of RDEP come on top.
        memory: bytes of the GPU, for what a run keeps only where there is room: the experts rounded. 0: it keeps none.
    """
    s = _widths(config, kernels=kernels, ranks=ranks)
    if ranks == s.ep and s.a != s.m and memory:  # several owners of an expert gather its weights anew
        kept = _peak(config, replace(s, copies=True), ranks=ranks)
        if kept.peak < _ROOM * (memory - shared_bytes(config, ranks=ranks, node_size=config.rdep.node_size)):
            return kept
    return _peak(config, s, ranks=ranks)


def _peak(config: Config, s: _Widths, *, ranks: int = 1) -> Memory:
    kept = kept_activations(config, kernels=s.kernels, ranks=ranks)
    shapes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    every = s.m * sum(shapes.values())
    width = 2 if config.optim.moment_dtype == "bf16" else s.m
    moments = width * sum(
        _moments(name, shape, config) * math.prod(shape) for name, shape in parameter_shapes(config).items()
    )
    experts = sum(size for name, size in shapes.items() if ".experts." in name)
    gathered = 0 if ranks == 1 else _gathered(config, s, copies=ranks > s.ep)

    def at(moment: str, *, gradients: int, activations: int, working: int) -> Memory:
        return Memory(
            masters=every // ranks,
            copies=s.a * experts // ranks if s.copies else 0,
            gradients=gradients // ranks,
            moments=moments // ranks,
            activations=activations,
            working=working + gathered,
            moment=moment,
        )

    earlier = every if config.train.accumulation > 1 else 0  # gradients of the micro batches before
    done = s.m * shapes.get("head", shapes["embed"])
    alive = sum(kept.values())
    moments_of_most = [
        at("loss", gradients=earlier, activations=alive, working=_loss_working(config, s)),
        at("optimizer", gradients=every, activations=0, working=_optimizer_working(config, s)),
    ]
    alive -= kept["loss"]
    for layer in reversed(range(config.model.num_layers + config.model.mtp_depth)):
        working = _backward_working(config, layer, s)
        name = f"backward of layer {layer}"
        moments_of_most.append(at(name, gradients=max(earlier, done), activations=alive, working=working))
        alive -= kept[f"layer {layer}"]
        done += s.m * sum(math.prod(shape) for shape in _layer_shapes(config, layer).values())
    return max(moments_of_most, key=lambda memory: memory.peak)


def _moments(name: str, shape: tuple[int, ...], config: Config) -> int:
    """Moments of a parameter: Muon keeps one, AdamW two (`nmoe.optim.groups`)."""
    muon = config.optim.kind == "muon" and len(shape) > 1 and name not in ("embed", "head") and "router" not in name
    return 1 if muon else 2


def _gathered(config: Config, s: _Widths, *, copies: bool) -> int:
    """Weights of others that a rank holds at a time (`nmoe.train.shard`), and the dense gradients of the layer it is in.

    Embedding and head stay whole in the masters' dtype; two layers' dense weights are there in the activations' dtype,
    and their experts, where other ranks have the same ones, in the masters'.
    """
    model, moe = config.model, config.moe
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size * s.m
    dense = max(
        sum(math.prod(shape) for name, shape in _layer_shapes(config, layer).items() if ".experts." not in name)
        for layer in range(model.num_layers)
    )
    experts = 3 * moe.num_experts // s.ep * model.hidden_size * moe.expert_size * s.m
    return tables + dense * (3 * s.a + s.m) + (2 * experts if copies else 0)


def recompute_choices(config: Config) -> Iterator[Config]:
    """The config with each `train.recompute`, from the least to the most that is computed again.

    The parts stand in the order of what a byte costs: the experts' pre-activations are one product, attention is all of it.
    """
    for count in range(len(RECOMPUTABLE) + 1):
        for parts in combinations(RECOMPUTABLE, count):
            yield replace(config, train=replace(config.train, recompute=parts))
