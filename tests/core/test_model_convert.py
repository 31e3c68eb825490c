# SPDX-License-Identifier: Apache-2.0
"""nmoe-convert and nmoe-generate on a run of the trainer, each once as a process."""

import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nmoe import cli
from nmoe.checkpoint.load import load_weights
from nmoe.checkpoint.store import find_checkpoint
from nmoe.convert import import_folder
from nmoe.errors import CheckpointError
from nmoe.formats.tokenizers import ByteTokenizer, load_tokenizer
from nmoe.model.generate import generate
from nmoe.sample import _text, load_run

ROOT = Path(__file__).parents[2]
SMALL = ("model.hidden_size=48", "model.ffn_size=64", "moe.expert_size=24", "data.seq_len=64", "train.steps=3")
SMALL += ("train.batch_size=2", "train.micro_batch_size=2", "schedule.warmup_steps=0", "schedule.decay_steps=0")


def _run(program: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    module, function = program.split(":")
    code = f"import sys; from {module} import {function} as main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NMOE_ARCH": "reference", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def _call(program: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The same in this process, where starting one would add nothing but seconds."""
    module, function = program.split(":")
    main = getattr(importlib.import_module(module), function)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess([program], code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def reference_arch(monkeypatch):
    monkeypatch.setenv("NMOE_ARCH", "reference")


@pytest.fixture(scope="module")
def run(tmp_path_factory, forked) -> Path:
    """A run of three steps on the text that comes with Python."""
    root = tmp_path_factory.mktemp("work")
    sets = [f"--set={item}" for item in SMALL]
    forked(cli.train, root, [ROOT / "configs/quickstart.toml", *sets]).finish()
    return root / "runs" / "quickstart"


def test_generate_streams_a_continuation_of_the_prompt(run):
    done = _run("nmoe.sample:main", run, "--prompt", "The list ", "--max-tokens", 12, cwd=run.parents[1])
    assert done.returncode == 0, done.stderr
    tokenizer, model = ByteTokenizer(), load_run(run)
    prompt = [tokenizer.eos_id, *b"The list "]
    new = generate(model, prompt, max_tokens=12, eos_id=tokenizer.eos_id)
    assert done.stdout == "The list " + tokenizer.decode([t for t in new if t != tokenizer.eos_id]) + "\n"


def test_text_appears_character_by_character_and_without_the_end(tmp_path):
    snowman = list("☃".encode())
    assert list(_text(ByteTokenizer(), [104, *snowman, snowman[0]])) == ["h", "", "", "☃", "", "\ufffd"]
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json())
    tokenizer = load_tokenizer(str(tmp_path))
    assert "".join(_text(tokenizer, [tokenizer.eos_id])) == ""


def test_generate_draws_by_seed(run):
    arguments = (run, "--max-tokens", 20, "--temperature", 1.5, "--top-p", 0.9, "--dtype", "bf16", "--seed")
    outputs = [_call("nmoe.sample:main", *arguments, seed, cwd=run.parents[1]).stdout for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no complete checkpoint"),
        (["RUN", "--top-p", "0"], "--top-p 0.0: expected more than 0"),
        (["RUN", "--tokenizer", "missing.json"], "tokenizer 'missing.json': not found"),
    ],
)
def test_generate_says_what_is_wrong_in_one_line(run, arguments, message):
    arguments = [str(run) if a == "RUN" else a for a in arguments]
    done = _call("nmoe.sample:main", *arguments, cwd=run.parents[1])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_generate_refuses_a_damaged_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("checkpoints/*/__0_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = _call("nmoe.sample:main", tmp_path / "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "__0_0.distcp: damaged" in done.stderr


def test_a_trained_run_opens_in_transformers(run, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle; in the group dev of the workspace")
    done = _run("nmoe.convert:main", "to-hf", run, tmp_path / "hf", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert {f.name for f in (tmp_path / "hf").iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(0, 257, (1, 50), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(load_run(run).logits(tokens), oracle(tokens).logits, rtol=1e-4, atol=1e-5)


def test_convert_both_ways_keeps_bf16_weights_and_tokenizer_files(run, tmp_path):
    first, back, second = tmp_path / "first", tmp_path / "back", tmp_path / "second"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(_tokenizer_json())
    assert _call("nmoe.convert:main", "to-hf", run, first, "--tokenizer", tokenizer).returncode == 0
    done = _call("nmoe.convert:main", "from-hf", first, back)
    assert done.returncode == 0, done.stderr
    assert (back / "hf" / "tokenizer.json").read_text() == tokenizer.read_text()
    assert sorted(p.name for p in (back / "checkpoints").iterdir()) == ["step-00000000"]
    assert _call("nmoe.convert:main", "to-hf", back / "checkpoints" / "step-00000000", second).returncode == 0
    one, two = (
        {k: v for f in sorted(d.glob("*.safetensors")) for k, v in load_file(f).items()} for d in (first, second)
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert (second / "tokenizer.json").read_text() == tokenizer.read_text()
    configs = [json.loads((d / "config.json").read_text()) for d in (first, second)]
    different = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert not different


def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, models

    vocab = {chr(33 + i): i for i in range(200)} | {"<|endoftext|>": 200}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


def test_convert_refuses_a_folder_that_exists_and_a_damaged_checkpoint(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    done = _call("nmoe.convert:main", "to-hf", run, tmp_path / "full")
    assert (done.returncode, "exists already" in done.stderr) == (2, True)
    done = _call("nmoe.convert:main", "from-hf", tmp_path / "full", tmp_path / "new")
    assert (done.returncode, "config.json: not found" in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_import_of_an_unfit_folder_leaves_nothing_behind(run, tmp_path):
    assert _call("nmoe.convert:main", "to-hf", run, tmp_path / "hf").returncode == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    done = _call("nmoe.convert:main", "from-hf", tmp_path / "hf", tmp_path / "new")
    assert done.returncode == 2
    assert "missing: model.layers.3.input_layernorm.weight" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[1, 2]", "config.json: not a JSON object"),
        ("model.safetensors.index.json", "{}", "weight_map is no table"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b.safetensors"}}', "weight_map is no table"),
    ],
)
def test_import_of_a_folder_whose_json_is_of_another_kind_is_one_line(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    done = _call("nmoe.convert:main", "from-hf", tmp_path, tmp_path / "new")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_training_goes_on_from_an_imported_model(run, tmp_path, forked):
    assert _call("nmoe.convert:main", "to-hf", run, tmp_path / "hf", "--dtype", "fp32").returncode == 0
    assert _call("nmoe.convert:main", "from-hf", tmp_path / "hf", tmp_path / "imported").returncode == 0
    config = tmp_path / "imported" / "config.toml"
    text = config.read_text()
    text = text.replace('train = ["data/train"]', 'builtin = "python-docs"').replace("seq_len = 128", "seq_len = 64")
    config.write_text(text.replace("steps = 1000", "steps = 1").replace("batch_size = 8", "batch_size = 2"))
    sets = [
        "schedule.warmup_steps=0",
        "schedule.decay_steps=0",
        "train.micro_batch_size=2",
        "optim.learning_rate=1e-30",
    ]
    sets += ["optim.weight_decay=0.0", "moe.bias_update_rate=0.0", "train.dtype=fp32"]
    forked(cli.train, run.parents[1], [config, *(f"--set={item}" for item in sets)]).finish()
    trained = load_run(run.parent / "imported").state_dict()
    for name, value in load_run(run).state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-7)


def test_weights_of_another_model_are_refused_by_name(run):
    model = load_run(run)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    before = tensors["model.embed"].clone()
    other = tensors | {"model.layers.1.moe.experts.w13": torch.zeros(8, 16, 48)}
    with pytest.raises(CheckpointError, match=r"layers\.1\.moe\.experts\.w13 is stored as"):
        load_weights(find_checkpoint(run), other, prefix="model.")
    with pytest.raises(CheckpointError, match=r"model\.more is not in the checkpoint"):
        load_weights(find_checkpoint(run), tensors | {"model.more": before}, prefix="model.")
    load_weights(find_checkpoint(run), tensors, prefix="model.")
    assert torch.equal(tensors["model.embed"], before)


def test_imported_model_generates(run, tmp_path):
    assert _call("nmoe.convert:main", "to-hf", run, tmp_path / "hf", "--dtype", "fp32").returncode == 0
    import_folder(tmp_path / "hf", tmp_path / "imported")
    done = _call("nmoe.sample:main", tmp_path / "imported", "--tokenizer", "bytes", "--prompt", "x", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == _call("nmoe.sample:main", run, "--prompt", "x", cwd=run.parents[1]).stdout
