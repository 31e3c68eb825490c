# SPDX-License-Identifier: Apache-2.0
"""The transformer: parameters, initial values, packed rows, loss, generation."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nmoe.config import Config, parse_config
from nmoe.data.packing import pack_rows
from nmoe.model.attention import Cache
from nmoe.model.block import Block
from nmoe.model.generate import choose, generate
from nmoe.model.init import init_model, normal
from nmoe.model.mtp import following, mtp_weight
from nmoe.model.params import parameter_shapes
from nmoe.model.transformer import IGNORED, ModelOutput, Transformer

TINY = """
[model]
vocab_size = 61
hidden_size = 24
num_layers = 3
num_dense_layers = 1
ffn_size = 40
[attention]
num_heads = 3
kv_lora_rank = 10
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 6
[moe]
num_experts = 6
num_shared_experts = 1
top_k = 2
expert_size = 14
[data]
train = ["unused"]
seq_len = 16
[train]
steps = 1
batch_size = 1
micro_batch_size = 1
dtype = "fp64"
[optim]
learning_rate = 1e-3
[schedule]
warmup_steps = 0
[checkpoint]
every = 1
"""

GQA = (
    "attention.kind=gqa",
    "attention.num_heads=4",
    "attention.num_kv_heads=2",
    "attention.kv_lora_rank=0",
    "attention.qk_nope_head_dim=0",
    "attention.qk_rope_head_dim=6",
    "attention.qk_norm=true",
)
WINDOW = ("model.num_layers=5", "attention.window=4", "attention.global_every=3")


@pytest.fixture(autouse=True)
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


def _config(*overrides: str) -> Config:
    return parse_config(TINY, where="tiny", name="tiny", overrides=overrides)


def _model(*overrides: str) -> Transformer:
    model = Transformer(_config(*overrides))
    init_model(model, 1)
    with torch.no_grad():  # weights large enough that every part of the model matters
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(10)
            else:
                normal(parameter, std=0.2, seed=3, name=name)
                parameter.add_(1)
        for router in model.routers().values():
            if router.bias is not None:
                normal(router.bias, std=0.05, seed=4, name="bias")
    return model


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


def _run(model: Transformer, documents: Sequence[Tensor], *, rows: int = 1) -> ModelOutput:
    """Loss of documents packed side by side into ``rows`` equal rows; a document's last token has no target."""
    tokens = torch.cat([*documents]).view(rows, -1)
    positions = torch.cat([torch.arange(len(d)) for d in documents]).view(rows, -1)
    number = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)]).view(rows, -1)
    targets = torch.cat([torch.cat((d[1:], torch.tensor([IGNORED]))) for d in documents]).view(rows, -1)
    return model(tokens, positions_BT=positions, document_BT=number, targets_BT=targets)


def test_parameter_shapes_of_grouped_queries_match_the_module():
    model = _model(*GQA)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(model.config)


def test_parameter_shapes_of_multi_token_prediction_match_the_module():
    model = _model("model.mtp_depth=2")
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(model.config)


def test_tied_embeddings_have_one_matrix():
    model = _model("model.tie_embeddings=true")
    assert "head" not in dict(model.named_parameters())
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(model.config)
    document = _tokens(9)
    _run(model, [document]).loss_sum.backward()
    assert model.embed.grad is not None
    unused = sorted(set(range(61)) - set(document.tolist()))
    assert model.embed.grad[unused].abs().sum() > 0  # the head's share reaches words that were not read


def test_scales_of_the_config_reach_the_model():
    tokens = _tokens(1, 9)
    plain = _model()
    scaled = _model("model.embedding_scale=3.0", "model.residual_scale=0.5", "model.logit_scale=0.25")
    with torch.no_grad():  # the same function, with the factors in the weights
        plain.embed.mul_(3)
        plain.norm.weight.mul_(0.25)
        for name, weight in plain.named_parameters():
            if name.endswith((".wo", ".w2")):
                weight.mul_(0.5)
    torch.testing.assert_close(scaled.logits(tokens), plain.logits(tokens))
    losses = [_run(model, [tokens[0]]).loss_sum for model in (scaled, plain)]
    torch.testing.assert_close(*losses)
    cached = [model.extend(tokens, [Cache() for _ in model.layers], past=0) for model in (scaled, plain)]
    torch.testing.assert_close(*cached)


# ---- packed rows


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("attention.q_lora_rank=7", "moe.scoring=softmax", "moe.normalize_gates=false"),
        ("rope.scaling=yarn", "rope.factor=4.0", "rope.original_context=8", "train.z_loss=0.01", "moe.z_loss=0.01"),
        GQA,
        WINDOW,
        ("model.mtp_depth=2", "train.mtp_weight=0.7", "moe.z_loss=0.01"),
    ],
    ids=["plain", "lora_softmax", "yarn_z", "gqa", "window", "mtp"],
)
def test_packed_documents_equal_each_document_alone(overrides):
    model = _model(*overrides)
    documents = [_tokens(length, seed=length) for length in (7, 1, 12, 4)]
    packed = _run(model, documents)
    alone = [_run(model, [d]) for d in documents]
    parameters = [*model.parameters()]

    def total(outputs: Sequence[ModelOutput]) -> Tensor:
        return torch.stack([o.loss_sum + o.aux_loss for o in outputs]).sum()

    torch.testing.assert_close(packed.loss_sum, torch.stack([o.loss_sum for o in alone]).sum(), rtol=1e-11, atol=1e-10)
    assert packed.num_targets == sum(len(d) - 1 for d in documents)
    ours = torch.autograd.grad(total([packed]), parameters)
    theirs = torch.autograd.grad(total(alone), parameters)
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_of_a_batch_do_not_mix():
    model = _model()
    a, b = _tokens(8, seed=1), _tokens(8, seed=2)
    both = _run(model, [a, b], rows=2)
    torch.testing.assert_close(both.loss_sum, _run(model, [a]).loss_sum + _run(model, [b]).loss_sum)


def test_loss_is_that_of_the_logits():
    model = _model()
    document = _tokens(10)
    output = _run(model, [document])
    logits = model.logits(document.unsqueeze(0))[0]
    torch.testing.assert_close(output.loss_sum, F.cross_entropy(logits[:-1], document[1:], reduction="sum"))
    assert len(output.router_stats) == 2
    assert [s.layer for s in output.router_stats] == [1, 2]
    assert all(s.load_E.sum() == 20 for s in output.router_stats)


# ---- multi-token prediction


def test_further_tokens_are_those_of_the_document():
    targets = torch.tensor([[11, 12, 13, IGNORED, 21, IGNORED, 31, 32]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1]])
    once = following(targets, positions)
    assert once.tolist() == [[12, 13, IGNORED, IGNORED, IGNORED, IGNORED, 32, IGNORED]]
    assert following(once, positions).tolist() == [[13, *[IGNORED] * 7]]


def test_further_tokens_of_a_row_as_the_trainer_packs_it_are_those_of_its_documents():
    model = _model("model.mtp_depth=2")
    eos = 60
    texts = [[eos, *_tokens(length, seed=length).clamp(max=eos - 1).tolist(), eos] for length in (5, 1, 3)]

    def run(row: list[int]) -> ModelOutput:
        packed = pack_rows([np.array(row)], seq_len=len(row) - 1, eos_id=eos)
        arrays = {f.name: torch.from_numpy(getattr(packed, f.name)) for f in fields(packed)}
        return model(arrays.pop("tokens_BT"), **arrays)

    together, alone = run([token for text in texts for token in text[:-1]] + [eos]), [run(text) for text in texts]
    for name in ("loss_sum", "mtp_loss"):
        torch.testing.assert_close(getattr(together, name), sum(getattr(one, name) for one in alone))


def test_further_tokens_change_the_gradient_by_their_weight_and_not_the_loss():
    model = _model("model.mtp_depth=2", "train.mtp_weight=0.25")
    document = _tokens(12)
    output = _run(model, [document])
    parameters = [*model.parameters()]
    both = torch.autograd.grad(output.loss_sum, parameters, allow_unused=True)
    model.mtp_weight = 0.0
    output_alone = _run(model, [document])
    alone = torch.autograd.grad(output_alone.loss_sum, parameters, allow_unused=True)
    assert output.loss_sum == output_alone.loss_sum
    assert len(output.router_stats) == 4

    # the same by hand, from the depths' own results
    at = model._positions(torch.arange(12).unsqueeze(0), torch.zeros(1, 12, dtype=torch.int64))
    x, _, _ = model._hidden(document.unsqueeze(0), at)
    total = torch.zeros((), dtype=torch.float64)
    for k, depth in enumerate(model.mtp, start=1):
        embedded = F.pad(F.embedding(document[k:], model.embed), (0, 0, 0, k))
        x, _, _ = depth(x, embedded, at)
        logits = x @ model.head.t()
        total = total + F.cross_entropy(logits[: 11 - k], document[1 + k :], reduction="sum") / 2
    torch.testing.assert_close(output.mtp_loss, total.detach())
    further = torch.autograd.grad(0.25 * total, parameters, allow_unused=True)
    for (name, _), a, b, c in zip(model.named_parameters(), both, alone, further, strict=True):
        base = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, base if c is None else base + c, msg=lambda m, n=name: f"{n}: {m}")


def test_further_tokens_that_do_not_exist_teach_no_embedding():
    model = _model("model.mtp_depth=1", "moe.z_loss=0.1")
    output = _run(model, [torch.arange(1, 9)])  # token 0 is nowhere
    (output.loss_sum + output.aux_loss).backward()
    assert model.embed.grad is not None
    assert (model.embed.grad[0] == 0).all()
    assert model.embed.grad[8].abs().sum() > 0


def test_weight_of_further_tokens_follows_its_schedule():
    config = _config("train.mtp_weight=0.3", "train.mtp_late_weight=0.1", "train.mtp_late_step=5")
    assert [mtp_weight(config, step=step) for step in (1, 4, 5, 9)] == [0.3, 0.3, 0.1, 0.1]
    assert mtp_weight(_config(), step=10**6) == 0.3


def test_bf16_computes_in_bf16_and_keeps_wide_gradients():
    model, exact = _model("train.dtype=bf16"), _model()
    document = _tokens(40)
    output, truth = _run(model, [document]), _run(exact, [document])
    assert output.loss_sum.dtype == torch.float32
    assert model.logits(document.unsqueeze(0)).dtype == torch.bfloat16
    assert output.loss_sum.item() == pytest.approx(truth.loss_sum.item(), rel=0.05)
    output.loss_sum.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_step_is_bit_identical_from_run_to_run():
    runs = []
    for _ in range(2):
        model = _model("train.dtype=fp32")
        output = _run(model, [_tokens(64), _tokens(64, seed=1)])
        (output.loss_sum + output.aux_loss).backward()
        runs.append([output.loss_sum.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# ---- generation


def test_modules_return_what_has_gradients_where_fsdp_looks_for_it():
    """In tuples, lists and dicts: PyTorch 2.11 finds no tensor in a dataclass, and then gathers no weights for backward."""
    model, seen, hidden = _model("model.mtp_depth=1"), [], []

    def look(module: torch.nn.Module, arguments: object, result: object) -> None:
        for leaf in tree_leaves(result):
            values = [getattr(leaf, field.name) for field in fields(leaf)] if is_dataclass(leaf) else [leaf]
            if any(isinstance(value, Tensor) and value.requires_grad for value in values):
                (hidden if is_dataclass(leaf) else seen).append(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(look)
    _run(model, [_tokens(16)])
    assert {"Router", "Norm", "Block", "Depth", "Transformer"} <= {*seen}
    assert not hidden


def test_generate_greedy_takes_the_likeliest():
    model = _model()
    prompt = _tokens(4).tolist()
    new = generate(model, prompt, max_tokens=6)
    tokens = list(prompt)
    for token in new:
        assert token == int(model.logits(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(new) == 6
    assert generate(model, prompt, max_tokens=6, eos_id=new[2]) == new[: new.index(new[2]) + 1]
    assert generate(model, prompt, max_tokens=0) == []


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize(
    "overrides",
    [(), ("attention.q_lora_rank=7", "rope.scaling=yarn", "rope.factor=4.0", "rope.original_context=8"), GQA, WINDOW],
    ids=["mla", "lora_yarn", "gqa", "window"],
)
def test_generation_with_cache_equals_generation_without(overrides, dtype):
    model = _model(*overrides, f"train.dtype={dtype}")
    prompt = _tokens(5).tolist()
    tokens = list(prompt)
    for _ in range(16):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, prompt, max_tokens=16) == tokens[5:]
    # and the logits behind the choice, the prompt fed in two parts
    caches = [Cache() for _ in model.layers]
    model.extend(torch.tensor([tokens[:3]]), caches, past=0)
    cached = model.extend(torch.tensor([tokens[3:]]), caches, past=3)
    tolerance = 1e-9 if dtype == "fp64" else 1e-3
    torch.testing.assert_close(cached, model.logits(torch.tensor([tokens]))[:, -1], rtol=tolerance, atol=tolerance)


def test_mla_cache_keeps_latents_only():
    model = _model()
    caches = [Cache() for _ in model.layers]
    model.extend(_tokens(2, 7), caches, past=0)
    assert [tuple(t.shape) for t in caches[0].kept] == [(2, 7, 10), (2, 7, 4)]


def test_window_layers_see_their_window_and_the_last_layer_all():
    model = _model(*WINDOW)
    assert [layer.attn.window for layer in model.layers if isinstance(layer, Block)] == [4, 4, 0, 4, 0]
    local = _model("model.num_layers=1", "model.num_dense_layers=1", "attention.window=3")
    assert [layer.attn.window for layer in local.layers if isinstance(layer, Block)] == [0]
    # one local layer below the global one, which is made blind: what lies 3 back cannot matter to the last token
    model = _model("model.num_layers=2", "model.num_dense_layers=2", "attention.window=3")
    with torch.no_grad():
        model.get_parameter("layers.1.attn.wo").zero_()
    tokens = _tokens(1, 8)
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 61
    assert torch.equal(model.logits(tokens)[0, 7], model.logits(changed)[0, 7])
    assert not torch.equal(model.logits(tokens)[0, 6], model.logits(changed)[0, 6])


def test_generate_repeats_with_its_seed():
    model = _model()
    draws = [generate(model, [1, 2], max_tokens=12, temperature=2.0, top_p=0.95, seed=s) for s in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


def test_choose_keeps_the_smallest_set_that_reaches_top_p():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def seen(top_p: float) -> set[int]:
        return {choose(logits, temperature=1.0, top_p=top_p, generator=generator) for _ in range(300)}

    assert seen(0.4) == {1}
    assert seen(0.6) == {1, 3}
    assert seen(0.8) == {1, 2, 3}
    assert seen(1.0) == {0, 1, 2, 3}
