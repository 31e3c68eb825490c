# SPDX-License-Identifier: Apache-2.0
"""Every key of a training config: name, type, range, default and meaning, each stated once.

One frozen dataclass per TOML section. The text under a field is its documentation: `docs/configuration.md` is made of it.
A field without a default must be given. Ranges are part of the type; rules between two keys are in `nmoe.config.rules`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from nmoe.config.text import to_toml

__all__ = [
    "Attention",
    "Bound",
    "Checkpoint",
    "Config",
    "Data",
    "Metrics",
    "Model",
    "Moe",
    "Optim",
    "Parallel",
    "Rdep",
    "Rope",
    "Run",
    "Schedule",
    "Source",
    "Train",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The closed or open ends of a number's range; None is no limit."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __str__(self) -> str:
        ends = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)

    def admits(self, value: float) -> bool:
        """Whether `value` lies in the range."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


Recomputable = Literal["experts", "mlp", "attention"]
RECOMPUTABLE: tuple[Recomputable, ...] = ("experts", "mlp", "attention")
Positive = Annotated[int, Bound(ge=1)]
Natural = Annotated[int, Bound(ge=0)]
NonNegative = Annotated[float, Bound(ge=0)]
AboveZero = Annotated[float, Bound(gt=0)]
Fraction = Annotated[float, Bound(ge=0, le=1)]
Beta = Annotated[float, Bound(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Where the run is kept and what makes it repeatable."""

    name: str = ""
    """Folder of the run under `run.root`. Default: the config file's name without `.toml`."""
    root: str = "runs"
    """Folder that holds all runs."""
    start_from: str = ""
    """Folder of a run, or of a checkpoint, whose weights a new run starts from; nmoe-convert makes one of a Hugging Face
    model. Optimizer and data begin anew."""
    seed: Natural = 0
    """Seed of the initial values and of the order of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The transformer's outer dimensions."""

    vocab_size: Positive
    """Rows of the embedding and of the output head, in tokens; at least the tokenizer's number of ids."""
    hidden_size: Positive
    """Width D of the residual stream, in features."""
    num_layers: Annotated[int, Bound(ge=1, le=1024)]
    """Transformer layers, dense and MoE together."""
    num_dense_layers: Natural
    """First layers whose feed-forward part is one dense MLP; the others are MoE layers."""
    ffn_size: Positive
    """Hidden width of the dense layers' MLP, in features."""
    norm_eps: AboveZero = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding as the output head as well."""
    mtp_depth: Annotated[int, Bound(ge=0, le=64)] = 0
    """Further tokens that multi-token prediction predicts, each by a layer of its own behind the last; 0: none."""
    init_std: AboveZero = 0.02
    """Standard deviation of the normal distribution that the weight matrices start from."""
    init_base_width: Natural = 0
    """Width at which `init_std` holds: a matrix starts from `init_std` times the root of this over its input width, as
    muP asks (arXiv:2203.03466); the embedding from `init_std`. 0: every matrix starts from `init_std`."""
    embedding_scale: AboveZero = 1.0
    """Factor on the embedding where it enters the first layer."""
    residual_scale: AboveZero = 1.0
    """Factor on what attention and feed-forward add to the residual stream."""
    logit_scale: AboveZero = 1.0
    """Factor on the input of the output head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434 section 2.1) or grouped queries (GQA)."""

    num_heads: Positive
    """Query heads."""
    qk_rope_head_dim: Annotated[int, Bound(ge=2)]
    """Part of a query or key head that is rotated, in features; even."""
    v_head_dim: Positive
    """Width of a value head, in features."""
    kind: Literal["mla", "gqa"] = "mla"
    """Where keys and values come from: one latent vector for all heads (mla), or a projection per key/value head (gqa)."""
    kv_lora_rank: Natural = 0
    """mla: width of the latent from which keys and values are made, in features."""
    q_lora_rank: Natural = 0
    """mla: width of the latent from which queries are made, in features; 0: queries come straight from the input."""
    qk_nope_head_dim: Natural = 0
    """Part of a query or key head without rotary position, in features."""
    num_kv_heads: Natural = 0
    """gqa: key/value heads; divides `num_heads`."""
    qk_norm: bool = False
    """gqa: RMSNorm on every query and key head before the rotation."""
    window: Natural = 0
    """Tokens that a query of a local layer sees, itself included; 0: every layer is global."""
    global_every: Natural = 0
    """With `window`: every n-th layer is global (4: three local, then one global); 0: the last layer alone. The last
    layer always is."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, in features."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding, plain or stretched by YaRN (arXiv:2309.00071)."""

    theta: AboveZero = 10000.0
    """Base of the rotation periods."""
    scaling: Literal["none", "yarn"] = "none"
    """How positions beyond the trained context are made to fit."""
    factor: Annotated[float, Bound(ge=1)] = 1.0
    """YaRN: new context over original context."""
    original_context: Natural = 0
    """YaRN: context length before stretching, in tokens."""
    beta_fast: AboveZero = 32.0
    """YaRN: dimensions that turn more often than this within the original context keep their period."""
    beta_slow: AboveZero = 1.0
    """YaRN: dimensions that turn less often than this within the original context are stretched by the full factor."""
    mscale: NonNegative = 1.0
    """YaRN: strength of the correction of the attention logits' size."""
    mscale_all_dim: NonNegative = 0.0
    """YaRN: strength of the same correction for the part of a head without rotary position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Routed and shared experts of the MoE layers (DeepSeek-V3, arXiv:2412.19437 section 2.1.2)."""

    num_experts: Positive
    """Routed experts E of a layer."""
    num_shared_experts: Natural
    """Experts that every token passes through; they form one MLP of `num_shared_experts * expert_size`."""
    top_k: Positive
    """Routed experts K chosen for a token."""
    expert_size: Positive
    """Hidden width F of an expert, in features."""
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    """What turns router logits into scores."""
    selection_bias: bool = True
    """Choose experts by score plus a bias per expert that levels the load; gates never contain the bias."""
    bias_update_rate: NonNegative = 1e-3
    """Change of the selection bias a step, towards the mean load (1 = one score)."""
    num_groups: Positive = 1
    """Groups into which the experts are divided for group-limited choice."""
    top_k_groups: Positive = 1
    """Groups that a token may choose from."""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """What ranks the groups: the sum of the two best selection scores (V3) or the best one (V2)."""
    normalize_gates: bool = True
    """Divide the chosen gates by their sum."""
    route_scale: AboveZero = 1.0
    """Factor on the (normalised) gates."""
    balance_loss: NonNegative = 0.0
    """Weight of the sequence-wise balance loss; 0: none."""
    z_loss: NonNegative = 0.0
    """Weight of the mean square of logsumexp of the router logits; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One folder of shards in the mixture."""

    path: str
    """Folder with a `manifest.json`."""
    weight: Positive = 1
    """Share of this source in the mixture, relative to the other weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Which tokens are read, and how long a sequence is."""

    seq_len: Annotated[int, Bound(ge=2)]
    """Length of a sequence, in tokens."""
    train: tuple[Source, ...] = ()
    """Shard folders to train on: `["dir"]` or `[{path = "dir", weight = 2}, ...]`."""
    val: tuple[str, ...] = ()
    """Shard folders held out from training: `"dir"` or `["dir", ...]`, each with a loss of its own; empty: no held-out loss."""
    builtin: Literal["", "python-docs"] = ""
    """Instead of `train` and `val`: a corpus that comes with Python, made under `data/` on first use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Length of the run, size of a step, precision."""

    steps: Natural = 0
    """Optimizer steps of the whole run; 0: `tokens` says it."""
    tokens: Natural = 0
    """Instead of `steps`: tokens of the whole run, `batch_size * data.seq_len` a step; rounded up to whole steps."""
    batch_size: Positive
    """Sequences a step, over all ranks and accumulated micro batches."""
    micro_batch_size: Positive
    """Sequences in one forward and backward of one rank; divides `batch_size`."""
    dtype: Literal["fp32", "bf16", "fp64"] = "bf16"
    """Precision of the computation. Master values are fp64 for fp64, fp32 otherwise."""
    recompute: tuple[Recomputable, ...] = ()
    """Parts whose activations are computed again in the backward pass instead of kept: `attention` with the norm before
    it, `mlp` (dense layers and shared experts), `experts` (the routed ones). Losses stay the same bits."""
    grad_clip: NonNegative = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it; 0: no limit."""
    z_loss: NonNegative = 0.0
    """Weight of the mean square of logsumexp of the output logits; 0: none."""
    mtp_weight: NonNegative = 0.3
    """With `model.mtp_depth`: weight of the loss of the further tokens, averaged over depths."""
    mtp_late_weight: NonNegative = 0.1
    """The same from step `mtp_late_step` on."""
    mtp_late_step: Natural = 0
    """Step from which `mtp_late_weight` holds; 0: never."""
    log_every: Positive = 1
    """Steps between log lines and scalar metrics."""
    eval_every: Natural = 0
    """Steps between held-out evaluations; 0: only after the last step."""
    eval_batches: Natural = 0
    """Micro batches of one held-out evaluation, from each folder of `data.val`; 0: all held-out data."""

    @property
    def accumulation(self) -> int:
        """Micro batches a step on one rank."""
        return self.batch_size // self.micro_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """AdamW (arXiv:1711.05101), or Muon (arXiv:2502.16982) for the matrices of layers and experts with AdamW for the rest."""

    learning_rate: AboveZero
    """Peak learning rate, 1/step. Muon's updates have the size of AdamW's, so one rate serves both."""
    kind: Literal["adamw", "muon"] = "adamw"
    """What updates the matrices of layers and experts; embedding, head, routers and norms always have AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW: decay a step of the first and of the second moment."""
    eps: AboveZero = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Beta = 0.95
    """muon: decay a step of the momentum, which is Nesterov's."""
    newton_schulz_steps: Positive = 5
    """muon: steps of the iteration towards the orthogonal factor."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices, times the learning rate."""
    norm_decay: NonNegative = 0.0
    """Factor on `weight_decay` for the weights of norms."""
    embedding_rate: AboveZero = 1.0
    """Factor on `learning_rate` for embedding and head."""
    embedding_decay: NonNegative = 1.0
    """Factor on `weight_decay` for embedding and head."""
    router_rate: AboveZero = 1.0
    """Factor on `learning_rate` for the routers."""
    router_decay: NonNegative = 1.0
    """Factor on `weight_decay` for the routers."""
    expert_rate: AboveZero = 1.0
    """Factor on `learning_rate` for the routed experts."""
    expert_decay: NonNegative = 1.0
    """Factor on `weight_decay` for the routed experts."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of moments and momentum (fp64 runs keep them in fp64); bf16 rounds stochastically."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate over the run: linear warmup, then constant with a linear decay at the end (wsd), cosine, or linear."""

    kind: Literal["wsd", "cosine", "linear"] = "wsd"
    """Shape after the warmup; cosine and linear fall from its end to the last step."""
    warmup_steps: Natural = 0
    """Steps of the linear rise to the peak; 0: none, or `warmup_tokens` says it."""
    warmup_tokens: Natural = 0
    """Instead of `warmup_steps`: the rise in tokens, rounded up to whole steps."""
    decay_steps: Natural = 0
    """wsd: steps of the linear decay at the end; 0: none, or `decay_tokens` says it."""
    decay_tokens: Natural = 0
    """Instead of `decay_steps`: the decay in tokens, rounded up to whole steps."""
    final_ratio: Fraction = 0.1
    """Learning rate after the last step over the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How several ranks share the work; results differ by rounding only, so all of it may change on resume."""

    ep: Natural = 0
    """Consecutive ranks that share a layer's experts; divides experts and ranks. 0: gcd of experts and every node's ranks."""
    comm: Literal["auto", "local", "shm", "ipc", "nvshmem"] = "auto"
    """How these ranks reach each other's memory. auto: by their number, devices and machines (docs/rdep.md)."""
    gather: Literal["layer", "step"] = "layer"
    """Parameters are gathered, gradients summed: a layer at a time (least memory), or once a step (least traffic)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rdep:
    """The way of rows to the experts of other ranks, and back (docs/rdep.md)."""

    capacity: AboveZero = 2.0
    """Assignments that a rank has room for at once, over the balanced load. More come in further rounds; none is lost."""
    sizes: Literal["bound", "exact"] = "bound"
    """Room for what may come (bound), or for just what comes, which the host has to wait for once a layer (exact)."""
    wire: Literal["plain", "mxfp8", "nvfp4"] = "plain"
    """Format of rows on the way to the experts: as they are, or quantised. Gradients and results travel as they are."""
    node_size: Natural = 0
    """Ranks that map each other's memory, a divisor of a machine's; a row is put once to each other node. 0: a machine's."""
    timeout_s: AboveZero = 60.0
    """Seconds that a rank may be late or stand still before all end with a message: from step 3, or 3 steps' time if more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is kept to resume from."""

    every: Positive
    """Steps between checkpoints; the last step and a stop by signal always write one."""
    keep: Positive = 2
    """Complete checkpoints kept; older ones are deleted once a newer one is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The metric store."""

    publish_s: AboveZero = 10.0
    """Seconds between publications of `metrics.duckdb`."""
    router_every: Positive = 50
    """Steps between records of the load of every expert of every layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole training config; built by `load_config`, which checks it."""

    run: Run
    model: Model
    attention: Attention
    rope: Rope
    moe: Moe
    data: Data
    train: Train
    optim: Optim
    schedule: Schedule
    parallel: Parallel
    rdep: Rdep
    checkpoint: Checkpoint
    metrics: Metrics

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.model.num_layers - self.model.num_dense_layers

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all ranks."""
        return self.train.batch_size * self.data.seq_len

    def to_toml(self) -> str:
        """The config with every default written out, as TOML that `load_config` reads back to the same values."""
        return to_toml(self)
