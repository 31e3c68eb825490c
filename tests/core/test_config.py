# SPDX-License-Identifier: Apache-2.0
"""Configs: what is read, what is refused and in which words, overrides, round trip, the manual."""

import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config import Config, Source, changed_keys, load_config, parse_config
from nmoe.config.text import format_value
from nmoe.errors import ConfigError

ROOT = Path(__file__).parents[2]

TINY = """
[model]
vocab_size = 257
hidden_size = 16
num_layers = 2
num_dense_layers = 1
ffn_size = 24
[attention]
num_heads = 2
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
[moe]
num_experts = 8
num_shared_experts = 1
top_k = 2
expert_size = 16
[data]
train = ["shards"]
val = "held-out"
seq_len = 32
[train]
steps = 10
batch_size = 4
micro_batch_size = 2
[optim]
learning_rate = 1e-2
[schedule]
warmup_steps = 0
[checkpoint]
every = 5
"""


def tiny(*overrides: str, text: str = TINY) -> Config:
    return parse_config(text, where="tiny.toml", name="tiny", overrides=overrides)


def refusal(*overrides: str, text: str = TINY) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny(*overrides, text=text)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("top_k =", "topk =", "tiny.toml: unknown key moe.topk; did you mean moe.top_k?"),
        ("learning_rate =", "learning_rat =", "tiny.toml: unknown key optim.learning_rat; did you mean optim.learning_rate?"),
        ("[optim]", "[optimizer]", "tiny.toml: unknown section optimizer; did you mean optim?"),
        ("steps = 10", "zzz = 10", "tiny.toml: unknown key train.zzz; known: steps, tokens,"),
        ('["shards"]', '[{path = "a", wait = 2}]', "unknown key data.train[0].wait; did you mean data.train[0].weight?"),
        ("[model]", "steps = 3\n[model]", "tiny.toml: unknown section steps; "),
    ],
)  # fmt: skip
def test_unknown_key_names_the_nearest(old, new, message):
    assert message in refusal(text=TINY.replace(old, new, 1))


def test_unknown_key_in_an_override_names_the_override():
    assert refusal("train.stepps=3") == "--set train.stepps=3: unknown key train.stepps; did you mean train.steps?"
    assert refusal("trian.steps=3") == "--set trian.steps=3: unknown section trian; did you mean train?"


def test_missing_key_and_section_are_named_with_what_fits():
    assert (
        refusal(text=TINY.replace("batch_size = 4\nmicro", "micro"))
        == "tiny.toml: train.batch_size is missing; expected an integer >= 1"
    )
    assert "checkpoint.every is missing" in refusal(text=TINY.replace("[checkpoint]\nevery = 5\n", ""))
    assert refusal(text="model = 3\n" + TINY.replace("[model]", "[run]", 1).split("[attention]")[0]).startswith(
        "tiny.toml:"
    )
    assert refusal(text="moe = 3").startswith("tiny.toml: model.vocab_size is missing")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", "true", "an integer >= 0"),
        ("train.steps", "1.0", "an integer >= 0"),
        ("train.steps", '"8"', "an integer >= 0"),
        ("train.batch_size", "0", "an integer >= 1"),
        ("train.steps", "-3", "an integer >= 0"),
        ("train.steps", "[3]", "an integer >= 0"),
        ("train.steps", str(1 << 63), "an integer >= 0"),
        ("run.seed", "-1", "an integer >= 0"),
        ("attention.qk_rope_head_dim", "1", "an integer >= 2"),
        ("optim.learning_rate", "nan", "a number > 0"),
        ("optim.learning_rate", "inf", "a number > 0"),
        ("optim.learning_rate", "1e400", "a number > 0"),
        ("optim.learning_rate", "1" + 400 * "0", "a number > 0"),
        ("optim.learning_rate", '"1e-3"', "a number > 0"),
        ("optim.learning_rate", "true", "a number > 0"),
        ("optim.learning_rate", "0", "a number > 0"),
        ("schedule.final_ratio", "1.5", "a number >= 0 and <= 1"),
        ("optim.betas", "[0.9]", "a list of a number >= 0 and < 1, a number >= 0 and < 1"),
        ("optim.betas", "[0.9, 1.0]", "a number >= 0 and < 1"),
        ("optim.betas", "0.9", "a list of a number"),
        ("model.tie_embeddings", "1", "true or false"),
        ("model.tie_embeddings", '"False"', "true or false"),
        ("moe.scoring", "tanh", 'one of "sigmoid", "softmax"'),
        ("data.train", '"shards"', "a list, each a path or {path = ..., weight = ...}"),
        ("data.train", "[3]", "a path or {path = ..., weight = ...}"),
        ("data.train", '[{path = "a", weight = 0}]', "an integer >= 1"),
        ("data.train", "[{weight = 2}]", "data.train[0].path is missing; expected a text"),
        ("run.root", r'"a\u0000b"', "a text"),
    ],
)  # fmt: skip
def test_wrong_type_or_range_is_refused_with_what_fits(key, value, expected):
    message = refusal(f"{key}={value}")
    assert message.startswith(f"--set {key}={value}: ")
    assert key in message.partition(": ")[2]
    assert expected in message


def test_values_in_the_file_are_checked_like_overrides():
    assert refusal(text=TINY.replace("steps = 10", "steps = true")) == (
        "tiny.toml: train.steps = true: expected an integer >= 0"
    )
    assert "run.name = 5: expected a text" in refusal(text=TINY + "[run]\nname = 5\n")
    with pytest.raises(ConfigError, match=r"run\.root = .*: expected a text"):
        tiny("run.root=a\udcffb")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["moe.top_k=9"], "moe.top_k = 9 exceeds moe.num_experts = 8"),
        (["moe.num_groups=3"], "moe.num_groups = 3 does not divide moe.num_experts = 8"),
        (["parallel.ep=4", "rdep.node_size=3"], "rdep.node_size = 3 does not divide parallel.ep = 4"),
        (["moe.top_k_groups=2"], "moe.top_k_groups = 2 exceeds moe.num_groups = 1"),
        (["moe.num_groups=4", "moe.top_k=3"], "moe.top_k = 3 exceeds the 2 experts of moe.top_k_groups = 1 groups of 2"),
        (["moe.num_groups=8", "moe.top_k_groups=2"], 'moe.group_score = "top2_sum" needs groups of at least 2 experts'),
        (["model.num_dense_layers=3"], "model.num_dense_layers = 3 exceeds model.num_layers = 2"),
        (["attention.qk_rope_head_dim=3"], "attention.qk_rope_head_dim = 3 is odd"),
        (["attention.kv_lora_rank=0"], 'attention.kind = "mla" needs attention.kv_lora_rank >= 1'),
        (["attention.num_kv_heads=1"], 'no effect with attention.kind = "mla"'),
        (["attention.kind=gqa", "attention.num_kv_heads=1"], 'no effect with attention.kind = "gqa"'),
        (["attention.kind=gqa", "attention.kv_lora_rank=0"], "attention.num_kv_heads = 0 does not divide attention.num_heads = 2"),
        (["attention.global_every=2"], "attention.global_every has no effect without attention.window"),
        (["rope.factor=2.0"], 'no effect with rope.scaling = "none"'),
        (["rope.scaling=yarn"], 'rope.scaling = "yarn" needs rope.factor > 1'),
        (["rope.beta_slow=40"], "rope.beta_slow = 40.0 is not below rope.beta_fast = 32.0"),
        (["data.builtin=python-docs"], "brings its own text; remove data.train and data.val"),
        (["data.train=[]"], "data.train is empty; name a folder of shards"),
        (["train.micro_batch_size=3"], "train.micro_batch_size = 3 does not divide train.batch_size = 4"),
        (["data.val=", "train.eval_every=2"], "no effect without data.val"),
        (["schedule.kind=cosine", "schedule.decay_steps=2"], 'no effect with schedule.kind = "cosine"'),
        (["schedule.kind=linear", "schedule.decay_steps=2"], 'no effect with schedule.kind = "linear"'),
        (["optim.momentum=0.9"], 'have no effect with optim.kind = "adamw"'),
        (["schedule.warmup_steps=8", "schedule.decay_steps=3"], "together exceed train.steps = 10"),
        (["train.dtype=fp64", "optim.moment_dtype=bf16"], 'contradicts train.dtype = "fp64"'),
        (["run.root="], "run.root is empty; name the folder of runs"),
        (['data.val=["a", ""]'], "but a name is empty"),
        (["run.name=a/b"], 'run.name = "a/b" is not a plain folder name'),
        (["run.name=.."], 'run.name = ".." is not a plain folder name'),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(overrides, message):
    found = refusal(*overrides)
    assert found.startswith("tiny.toml: ")
    assert message in found


def test_override_is_toml_with_optional_quotes_for_texts():
    config = tiny(
        "run.name=trial one",
        'run.root="my runs"',
        "train.dtype=fp64",
        "train.grad_clip=2",
        " optim.betas = [0.5, 0.25] ",
        "model.tie_embeddings=true",
        'data.train=["a", {path = "b", weight = 3}]',
        "train.steps=1_000",
        "train.steps=2000",
    )
    assert (config.run.name, config.run.root) == ("trial one", "my runs")
    assert config.train.dtype == "fp64"
    assert type(config.train.grad_clip) is float
    assert config.optim.betas == (0.5, 0.25)
    assert config.model.tie_embeddings is True
    assert config.data.train == (Source(path="a"), Source(path="b", weight=3))
    assert config.train.steps == 2000


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "=3", "train.=3", ".steps=3", "train"])
def test_malformed_override_shows_the_form(override):
    message = refusal(override)
    assert message.startswith(f"--set {override}: ")
    assert "expected section.key=value, such as train.steps=100" in message


def test_override_that_is_not_toml_says_what_fits():
    assert refusal("train.steps=many") == "--set train.steps=many: 'many' is not a TOML value; expected an integer >= 0"
    assert "expected a list, each a path" in refusal("data.train=shards")
    assert "is not a TOML value" in refusal("train.steps=" + 5000 * "9")


def test_files_that_cannot_be_read_are_one_line_each(tmp_path):
    broken, latin = tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("[model\n")
    latin.write_bytes(b"# caf\xe9\n")
    for path, message in (
        (tmp_path / "none.toml", "no such config file"),
        (tmp_path, "is a folder"),
        (broken, "not valid TOML"),
        (latin, "not UTF-8 text (byte 5)"),
        (tmp_path / "latin.toml" / "x.toml", "cannot be read: Not a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"{path}: {message}")
        assert "\n" not in str(caught.value)


def test_name_defaults_to_the_stem_of_the_file(tmp_path):
    (tmp_path / "small.model.toml").write_text(TINY)
    assert load_config(tmp_path / "small.model.toml").run.name == "small.model"
    assert load_config(tmp_path / "small.model.toml", ["run.name=other"]).run.name == "other"


@given(
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1),
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    st.integers(0, (1 << 63) - 1),
)
def test_round_trip_of_any_value(text, number, seed):
    """Texts with quotes and whatever else a config takes, floats to the last bit, the largest integers."""
    config = tiny()
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, root=text, seed=seed),
        data=dataclasses.replace(config.data, train=(Source(path=text, weight=7),)),
        optim=dataclasses.replace(config.optim, learning_rate=number),
    )
    assert parse_config(config.to_toml(), where="again", name="again") == config


def test_format_value_keeps_booleans_apart_from_numbers():
    assert [format_value(value) for value in (True, 1, 1.0, "1", (True,))] == ["true", "1", "1.0", '"1"', "[true]"]


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().train.steps = 3  # type: ignore[misc]


def recorded(config: Config) -> dict:
    """A config as the tables that a run's folder holds."""
    return tomllib.loads(config.to_toml())


def test_change_of_a_free_key_lets_a_run_go_on_and_others_are_named():
    old = recorded(tiny())
    assert changed_keys(old, tiny()) == []
    assert (
        changed_keys(old, tiny("train.steps=99", "checkpoint.every=1", "run.root=elsewhere", "train.log_every=7")) == []
    )
    assert changed_keys(old, tiny("optim.learning_rate=0.5", 'data.train=["other"]')) == [
        'data.train: [{ path = "shards", weight = 1 }] -> [{ path = "other", weight = 1 }]',
        "optim.learning_rate: 0.01 -> 0.5",
    ]


def test_held_out_folders_may_be_one_text_and_a_run_that_recorded_one_goes_on():
    for text, folders in (("a", ("a",)), ('"a"', ("a",)), ('["a", "b"]', ("a", "b")), ("", ()), ("[]", ())):
        assert tiny(f"data.val={text}").data.val == folders
    assert "data.val = 3: expected a text or a list of texts" in refusal(text=TINY.replace('"held-out"', "3"))
    old = recorded(tiny())
    old["data"]["val"] = "held-out"
    assert changed_keys(old, tiny()) == []
    assert changed_keys(old, tiny("data.val=other")) == ['data.val: ["held-out"] -> ["other"]']
    old["data"]["val"] = ""
    assert changed_keys(old, tiny("data.val=")) == []


def test_key_that_is_newer_than_the_run_had_its_default():
    old = recorded(tiny())
    del old["moe"]["z_loss"], old["rope"], old["moe"]["top_k"]
    old["moe"]["gone"] = 3
    assert changed_keys(old, tiny("moe.z_loss=0.1", "rope.theta=5e5")) == [
        "moe.gone: 3 -> (absent)",
        "moe.top_k: (absent) -> 2",
        "moe.z_loss: 0.0 -> 0.1",
        "rope.theta: 10000.0 -> 500000.0",
    ]


def manual():
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "docs" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "operations.md"])
def test_manual_is_what_the_code_says(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # whatever the terminal is
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert manual().updated(name, text) == text, "run: uv run python docs/configuration.py"


def test_errors_that_the_manual_quotes_are_what_is_printed():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for message in (
        refusal(text=TINY.replace("top_k =", "topk =")),
        refusal("moe.top_k=9"),
        refusal("train.steps=1.5"),
    ):
        assert f"    error: {message.replace('tiny.toml', 'my.toml')}\n" in text


def test_every_key_has_a_text_in_the_manual():
    texts = manual().field_texts()
    kinds: list[Any] = [*(field.type for field in dataclasses.fields(Config)), Source]
    for kind in kinds:
        for field in dataclasses.fields(kind):
            assert texts[kind.__name__, field.name].endswith("."), (kind.__name__, field.name)
