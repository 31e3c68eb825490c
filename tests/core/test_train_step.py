# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, and what watches the steps: accumulation, skipped steps, router health, spikes, FLOP."""

import io
import itertools
import logging

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nmoe.data.loader import Loader
from nmoe.data.sources import open_train
from nmoe.train.evaluate import forward
from nmoe.train.health import is_spike, router_health
from nmoe.train.loop import train_step
from nmoe.train.ranks import Ranks
from nmoe.train.report import StepFigures, format_duration, format_step, set_up_logging
from nmoe.train.setup import Parts, build
from nmoe.train.throughput import flop_per_token

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def steps(config, count: int) -> tuple[Parts, list]:
    """The parts after `count` steps, and what each step reported."""
    sets, weights = open_train(config)
    parts = build(config, ALONE)
    results = []
    with Loader.of(config, sets, weights) as loader:
        for batch in itertools.islice(loader, count):
            results.append(train_step(parts, batch, config=config))
    return parts, results


def test_step_does_not_depend_on_how_the_batch_is_cut(tiny):
    common = ("train.dtype=fp64", "moe.balance_loss=0.01", "moe.z_loss=0.01", "train.z_loss=0.001")
    (whole, a), (cut, b) = (steps(tiny(*common, f"train.micro_batch_size={size}"), 3) for size in (4, 1))
    for one, other in zip(a, b, strict=True):
        for name in ("loss", "balance_loss", "router_z_loss", "z_loss", "grad_norm"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-11), name
        assert (one.load_LE == other.load_LE).all()
    for (name, x), (_, y) in zip(whole.model.state_dict().items(), cut.model.state_dict().items(), strict=True):
        assert (x - y).abs().max() < 1e-9, name


def test_step_tells_the_time_of_its_passes_and_of_the_update_before_it(tiny):
    """Its own update would have to be waited for; with accumulation a part is the sum of its laps."""
    parts, results = steps(tiny("train.micro_batch_size=1"), 2)
    first, second = (result.seconds for result in results)
    assert first.keys() == {"forward", "backward"}
    assert second.keys() == {"forward", "backward", "optimizer"}
    assert min(*first.values(), *second.values()) > 0
    assert parts.watch.take().keys() == {"optimizer"}


def test_step_moves_the_selection_bias_once_a_step_by_its_rate(tiny):
    config = tiny("train.micro_batch_size=1", "moe.bias_update_rate=0.5")
    parts, results = steps(config, 1)
    (router,) = parts.model.routers().values()
    load = results[0].load_LE[0]
    assert router.bias is not None
    assert router.bias.tolist() == (-0.5 * np.sign(load - load.mean())).tolist()
    assert load.sum() == config.tokens_per_step * config.moe.top_k


def test_step_with_a_gradient_that_is_not_finite_changes_nothing_and_says_why(tiny):
    config = tiny()
    parts, _ = steps(config, 1)
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    moments = {name: tensor.clone() for name, tensor in parts.optimizer.state().items()}
    sets, weights = open_train(config)
    with Loader(sets, weights=weights, seq_len=64, vocab_size=257, batch_size=4, micro_batch_size=2, seed=1) as loader:
        batch = next(loader)
    hook = parts.model.embed.register_hook(lambda gradient: gradient * float("nan"))
    result = train_step(parts, batch, config=config)
    hook.remove()
    assert result.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts.model.state_dict().items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in parts.optimizer.state().items())
    assert parts.optimizer.num_updates == 1
    assert not train_step(parts, batch, config=config).skipped


def test_router_health_of_even_and_of_collapsed_loads():
    health = router_health(np.array([[5, 5, 5, 5], [20, 0, 0, 0]]))
    assert health.max_over_mean.tolist() == [1.0, 4.0]
    assert health.dead_experts.tolist() == [0, 3]
    assert health.entropy == pytest.approx([1.0, 0.0])
    assert health.share_LE[1].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_spike_is_a_loss_far_above_the_recent_ones_and_nothing_else():
    rng = np.random.default_rng(0)
    recent = list(3.0 + 0.2 * rng.standard_normal(64))
    assert not any(is_spike(loss, recent) for loss in 3.0 + 0.2 * rng.standard_normal(2000))
    assert is_spike(4.5, recent)
    assert is_spike(4.5, [*recent[:-4], 9.0, 9.0, 9.0, 9.0])
    assert not is_spike(1.0, recent)
    assert not is_spike(9.0, recent[:10])


@pytest.mark.parametrize("overrides", [(), ("model.mtp_depth=2",), ("model.tie_embeddings=true", "model.mtp_depth=1")])
def test_flop_per_token_are_those_that_a_step_counts(tiny, overrides):
    """Counted product by product; the reference takes all T x T scores of a row, causal attention needs half."""
    config = tiny(*overrides, "train.batch_size=2")
    sets, weights = open_train(config)
    parts = build(config, ALONE)
    with Loader(sets, weights=weights, seq_len=64, vocab_size=257, batch_size=2, micro_batch_size=2, seed=1) as loader:
        (rows,) = next(loader).micro
    with FlopCounterMode(display=False) as counter:
        output = forward(parts.model, rows, ALONE.device)
        (output.loss_sum + output.aux_loss).backward()
    layers, width = 2 + config.model.mtp_depth, 2 * (16 + 8 + 16)
    other_half = 6 * layers * width * 64 / 2
    assert counter.get_total_flops() / (2 * 64) == flop_per_token(config) + other_half


def test_flop_of_a_window_are_those_of_the_keys_in_it(tiny):
    config = tiny("attention.window=5", "model.num_layers=3", "model.num_dense_layers=3")
    keys = np.minimum(np.arange(64) + 0.5, 5)  # a query sees half of its own pair, as the causal half does
    saved = 2 * 6 * 2 * (24 + 16) * (32 - keys.mean())
    assert flop_per_token(tiny("model.num_layers=3", "model.num_dense_layers=3")) - flop_per_token(config) == (
        pytest.approx(saved, rel=0.01)
    )


def test_router_losses_are_told_apart(tiny):
    """Each alone gives what it gives beside the other."""
    both, balance, z = (
        steps(tiny(*overrides), 1)[1][0]
        for overrides in (
            ("moe.balance_loss=0.1", "moe.z_loss=0.01"),
            ("moe.balance_loss=0.1",),
            ("moe.z_loss=0.01",),
        )
    )
    assert balance.balance_loss > 0
    assert z.router_z_loss > 0
    assert (both.balance_loss, both.router_z_loss) == (balance.balance_loss, z.router_z_loss)
    assert balance.router_z_loss == z.balance_loss == 0


def test_step_line_and_durations_read_as_documented():
    figures = StepFigures(
        step=7,
        steps=100,
        loss=1.5,
        grad_norm=0.25,
        learning_rate=1e-3,
        tokens_per_second=12345.6,
        step_time=0.5,
        mfu=0.4,
        overload=1.0,
        max_over_mean=1.25,
        memory_bytes=2_000_000_000,
        eta_s=3723,
    )
    assert format_step(figures) == (
        "step   7/100  loss 1.5000 nat/token  grad_norm 0.250  lr 1.00e-03  12,346 token/s  0.500 s/step  mfu 40.0 %"
        "  rank overload 1.00  fullest expert 1.25 x mean  mem 2.00 GB  eta 1:02:03"
    )
    assert [format_duration(seconds) for seconds in (0, 59.6, 3600, float("nan"))] == ["0:00", "1:00", "1:00:00", "?"]


def test_logs_go_to_the_present_stderr_once(monkeypatch):
    earlier, present = io.StringIO(), io.StringIO()
    for stream in (earlier, present, present):
        monkeypatch.setattr("sys.stderr", stream)
        bar = set_up_logging()
    earlier.close()
    logging.getLogger("nmoe").info("one line")
    assert present.getvalue() == "one line\n"
    logging.getLogger("nmoe").removeHandler(bar)
