# SPDX-License-Identifier: Apache-2.0
"""Learning rates at the corners of their schedules."""

import math

import pytest

from nmoe.config import parse_config
from nmoe.errors import ConfigError
from nmoe.optim.schedule import learning_rate

PEAK = 3e-3


def rates(config) -> list[float]:
    return [learning_rate(config, step=step) for step in range(1, config.train.steps + 1)]


def test_wsd_rises_stays_and_falls_to_its_final_ratio(tiny):
    found = rates(tiny("train.steps=20", "schedule.warmup_steps=4", "schedule.decay_steps=5"))
    assert found[:4] == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])
    assert found[4:15] == [PEAK] * 11
    assert found[15:] == pytest.approx([PEAK * x for x in (0.82, 0.64, 0.46, 0.28, 0.1)])


def test_wsd_without_warmup_or_decay_is_constant(tiny):
    assert rates(tiny("train.steps=5", "schedule.warmup_steps=0", "schedule.decay_steps=0")) == [PEAK] * 5


def test_wsd_of_warmup_and_decay_alone_has_its_peak_between_them(tiny):
    found = rates(
        tiny("train.steps=4", "schedule.warmup_steps=2", "schedule.decay_steps=2", "schedule.final_ratio=0.0")
    )
    assert found == pytest.approx([PEAK / 2, PEAK, PEAK / 2, 0.0])


def test_cosine_falls_from_the_end_of_warmup_to_the_last_step(tiny):
    cosine = ("schedule.kind=cosine", "schedule.decay_steps=0", "schedule.final_ratio=0.2")
    found = rates(tiny("train.steps=12", "schedule.warmup_steps=2", *cosine))
    assert found[0] == pytest.approx(PEAK / 2)
    assert found[1] == PEAK
    assert found[6] == pytest.approx(PEAK * (0.2 + 0.8 / 2))  # half-way between steps 2 and 12
    assert found[11] == pytest.approx(PEAK * 0.2)
    for step in range(3, 12):
        assert found[step - 1] == pytest.approx(PEAK * (0.2 + 0.4 * (1 + math.cos(math.pi * (step - 2) / 10))))


def test_longer_run_changes_only_the_steps_of_its_decay(tiny):
    short = rates(tiny("train.steps=20", "schedule.warmup_steps=4", "schedule.decay_steps=5"))
    long = rates(tiny("train.steps=40", "schedule.warmup_steps=4", "schedule.decay_steps=5"))
    assert long[:15] == short[:15]
    assert long[35:] == short[15:]


def test_linear_falls_from_the_end_of_warmup_to_the_last_step(tiny):
    linear = ("schedule.kind=linear", "schedule.decay_steps=0", "schedule.final_ratio=0.2")
    found = rates(tiny("train.steps=10", "schedule.warmup_steps=2", *linear))
    assert found == pytest.approx([PEAK * x for x in (0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)])


def test_lengths_in_tokens_are_those_in_steps_whatever_the_batch_is(tiny):
    """A step of the tiny config sees 4 x 64 tokens."""
    tokens = ("train.steps=0", "schedule.warmup_steps=0", "schedule.decay_steps=0", "train.tokens=5100")
    tokens += ("schedule.warmup_tokens=1024", "schedule.decay_tokens=1280")
    config = tiny(*tokens)
    assert rates(config) == rates(tiny("train.steps=20", "schedule.warmup_steps=4", "schedule.decay_steps=5"))
    half = tiny(*tokens, "train.batch_size=2")
    assert (half.train.steps, half.schedule.warmup_steps, half.schedule.decay_steps) == (40, 8, 10)
    assert parse_config(config.to_toml(), where="again", name="again") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.tokens=999",
            r"train\.steps = 60 contradicts train\.tokens = 999, which is 4 steps of 256 tokens; set one",
        ),
        ("schedule.warmup_tokens=2000", r"schedule\.warmup_steps = 3 contradicts schedule\.warmup_tokens = 2000"),
        ("train.steps=0", r"train\.steps is missing; expected it or train\.tokens"),
    ],
)
def test_length_given_twice_or_not_at_all_is_refused(tiny, override, message):
    with pytest.raises(ConfigError, match=message):
        tiny(override)
