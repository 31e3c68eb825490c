# SPDX-License-Identifier: Apache-2.0
"""`nmoe-train --profile`: all of a step's time is in the table, with the part that spends it, and in the trace."""

import json
import os
import re

import pytest
import torch
from torch.utils import deterministic

from nmoe import cli
from nmoe.train.throughput import PARTS, flop_by_part, flop_per_token


@pytest.fixture
def profiled(tiny_text, tmp_path, capfd, monkeypatch):
    """Profiles the tiny config with overrides; gives forward ms, backward ms and share in % by part, and the trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(tiny_text)

    def run(*overrides: str) -> tuple[dict[str, tuple[float, float, float]], dict]:
        options = [word for override in overrides for word in ("--set", override)]
        assert cli.train(["tiny.toml", "--profile", "out", *options]) == 0
        out = capfd.readouterr().out
        table = {}
        for line in out.splitlines():
            if found := re.match(r"(\S.*?)  +(?:([\d.]+) ms)? +(?:([\d.]+) ms)? +([\d.]+) %", line):
                table[found[1]] = tuple(float(cell or 0) for cell in found.groups()[1:])
        assert f"trace: out{os.sep}trace.json" in out
        return table, json.loads((tmp_path / "out" / "trace.json").read_text())

    yield run
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_profile_accounts_for_the_whole_step_and_keeps_no_run(profiled, tmp_path):
    table, trace = profiled('train.recompute=["attention"]', "model.mtp_depth=1")
    parts = {name: cells for name, cells in table.items() if name != "step"}
    beside = {"optimizer", "loader", "metrics", "rest", "host gaps"}
    assert set(parts) == {"attention", "router", "experts", "mlp", "loss", "norms"} | beside
    assert parts["metrics"][0] > 0
    spent = sum(forward + backward for forward, backward, _ in parts.values())
    assert spent == pytest.approx(table["step"][0], rel=0.05)
    assert sum(share for _, _, share in parts.values()) == pytest.approx(100, abs=5)
    for part in ("attention", "experts", "mlp", "norms", "router"):
        assert parts[part][0] > 0
        assert parts[part][1] > 0, f"no operation of the backward pass was found to belong to {part}"
    assert not (tmp_path / "runs").exists()
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"nmoe:attention", "nmoe:experts", "nmoe:optimizer", "aten::mm"} <= names


@pytest.mark.parametrize(
    ("part", "overrides"),
    [
        ("loss", ("model.vocab_size=60000",)),
        ("mlp", ("model.ffn_size=20000",)),
        ("experts", ("moe.expert_size=8000", "moe.num_shared_experts=0")),
        ("attention", ("data.seq_len=512", "attention.num_heads=8")),
    ],
)
def test_profile_finds_the_part_that_was_made_heavy(part, overrides, profiled):
    """Time that is given to the wrong part would not follow the part that grows."""
    table, _ = profiled(*overrides, "train.batch_size=2")
    times = {name: forward + backward for name, (forward, backward, _) in table.items() if name in PARTS}
    assert max(times, key=lambda name: times[name]) == part, table
    assert times[part] > 0.6 * sum(times.values()), table


def test_profile_overwrites_nothing(profiled, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trace.json").write_text("mine")
    assert cli.train(["tiny.toml", "--profile", "out"]) == 2
    assert "error: out/trace.json: exists already; name another folder\n" in capfd.readouterr().err
    assert (tmp_path / "out" / "trace.json").read_text() == "mine"


def test_flop_of_the_parts_are_those_of_a_token(tiny):
    config = tiny("model.mtp_depth=1")
    assert set(flop_by_part(config)) == set(PARTS)
    assert sum(flop_by_part(config).values()) == flop_per_token(config)
    assert "further tokens" not in flop_by_part(tiny())
