# SPDX-License-Identifier: Apache-2.0
"""Parameters of the model: how many, of what shape, and what they start from."""

import subprocess
import sys

import pytest
import torch

from nmoe.comm.local import Local
from nmoe.config import Config, load_config
from nmoe.model.init import init_model, normal
from nmoe.model.params import count_parameters, parameter_shapes
from nmoe.model.transformer import Transformer


def _quickstart(*overrides: str) -> Config:
    return load_config("configs/quickstart.toml", overrides)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("moonlet", 7.34e9, 1.82e9),
        ("moonlight", 15.96e9, 2.92e9),
        ("dsv2", 235.7e9, 21.4e9),
        ("dsv3", 671.0e9, 37.55e9),
    ],
)
def test_parameter_counts_match_the_published_models(name, total, active):
    counted = count_parameters(load_config(f"configs/{name}.toml"))
    assert counted == (pytest.approx(total, rel=0.005), pytest.approx(active, rel=0.005))


@pytest.mark.parametrize("name", ["moonlet", "dsv2", "dsv3", "quickstart"])
def test_parameter_shapes_match_the_module(name):
    config = load_config(f"configs/{name}.toml")
    with torch.device("meta"):
        model = Transformer(config)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(config)


def test_counting_parameters_needs_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from nmoe.config import load_config\nfrom nmoe.model.params import count_parameters\n"
        "print(count_parameters(load_config('configs/dsv3.toml')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("(671")


# ---- initial values


def test_initial_values_depend_on_seed_and_name_only():
    config = _quickstart()
    first, again, other = (Transformer(config) for _ in range(3))
    init_model(first, 5)
    init_model(again, 5)
    init_model(other, 6)
    values, same, changed = (dict(m.named_parameters()) for m in (first, again, other))
    for name, value in values.items():
        assert torch.equal(value, same[name])
        assert name.endswith("norm.weight") or not torch.equal(value, changed[name])
    drawn = [v.flatten()[:8].tolist() for n, v in values.items() if not n.endswith("norm.weight")]
    assert len({tuple(d) for d in drawn}) == len(drawn)


def test_initial_values_of_an_expert_do_not_depend_on_its_rank():
    class Rank(Local):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__()
            self.rank, self.size = rank, size

    config = _quickstart()
    whole = Transformer(config)
    init_model(whole, 5)
    for rank in range(4):
        part = Transformer(config, comm=Rank(rank, 4))
        init_model(part, 5)
        for name, value in part.named_parameters():
            expected = whole.get_parameter(name)
            if ".experts." in name:
                assert value.shape[0] == 2
                expected = expected[2 * rank : 2 * rank + 2]
            assert torch.equal(value, expected), name
    experts = whole.get_parameter("layers.1.moe.experts.w13")
    assert len({tuple(e.flatten()[:8].tolist()) for e in experts}) == 8


def test_initial_values_of_fp64_widen_those_of_fp32():
    narrow, wide = (Transformer(_quickstart(f"train.dtype={d}")) for d in ("bf16", "fp64"))
    for model in (narrow, wide):
        init_model(model, 2)
    for (name, a), b in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
        assert torch.equal(a.double(), b), name


def test_initial_values_have_the_configured_spread():
    values = torch.empty(3, 1 << 21)  # more than one block
    normal(values, std=0.02, seed=0, name="x")
    assert values.mean().abs() < 1e-4
    assert values.std() == pytest.approx(0.02, rel=1e-3)
    assert not torch.equal(values.view(-1)[: 1 << 21], values.view(-1)[1 << 22 :])


def test_initial_spread_follows_the_input_width_from_a_base_width():
    model = Transformer(_quickstart("model.init_base_width=6", "model.init_std=0.5"))
    init_model(model, 0)
    for name in ("layers.0.mlp.w13", "layers.0.mlp.w2", "layers.1.moe.experts.w2"):
        values = model.get_parameter(name)
        assert values.std().item() == pytest.approx(0.5 * (6 / values.shape[-1]) ** 0.5, rel=0.02), name
    assert model.embed.std().item() == pytest.approx(0.5, rel=0.06)
