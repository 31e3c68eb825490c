# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: its store, its record, its checkpoints, and what the same command does with them."""

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from nmoe import cli
from nmoe.checkpoint.load import load_weights
from nmoe.checkpoint.store import find_checkpoint, list_checkpoints
from nmoe.config import load_config, parse_config
from nmoe.formats.metrics import CATALOGUE, open_store
from nmoe.formats.order import Rows
from nmoe.formats.runs import RunLock, read_run
from nmoe.formats.shards import ShardSet, open_shards
from nmoe.model.transformer import Transformer
from nmoe.train.folder import RunFolder, open_folder
from nmoe.train.record import Recorder

Train = Callable[..., int]
STEADY = ("schedule.warmup_steps=1", "schedule.decay_steps=0")
FIGURES = (
    *STEADY,
    "train.steps=12",
    "train.eval_every=6",
    "checkpoint.every=4",
    "train.z_loss=1e-4",
    "moe.balance_loss=1e-3",
)


@pytest.fixture(scope="module")
def nmoe_train(tiny_text) -> Iterator[Train]:
    """`nmoe-train` in this process: `nmoe_train(folder, "train.steps=3", "--fresh")` gives its exit status."""
    handlers, threads, origin = list(logging.getLogger("nmoe").handlers), torch.get_num_threads(), Path.cwd()

    def run(folder: Path, *arguments: str) -> int:
        (folder / "tiny.toml").write_text(tiny_text)
        command = ["tiny.toml"]
        for argument in arguments:
            command += [argument] if argument.startswith("--") else ["--set", argument]
        os.chdir(folder)
        try:
            return cli.train(command)
        finally:
            os.chdir(origin)
            logging.getLogger("nmoe").handlers[:] = handlers

    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, nmoe_train) -> Path:
    """The folder of a run that every figure of the store is on in."""
    folder = tmp_path_factory.mktemp("finished")
    assert nmoe_train(folder, *FIGURES) == 0
    return folder / "runs" / "tiny"


def query(run: Path, text: str) -> list[tuple]:
    with open_store(run) as store:
        return store.execute(text).fetchall()


def losses(run: Path) -> list[tuple]:
    return query(run, "SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step")


def axes_and_steps(run: Path) -> dict[str, tuple]:
    """By name: (layers, experts, number of steps with a value)."""
    found = query(
        run,
        "SELECT name, list(DISTINCT layer ORDER BY layer), list(DISTINCT expert ORDER BY expert), count(DISTINCT step)"
        " FROM metrics GROUP BY name",
    )
    plain = lambda values: [value for value in values if value is not None]  # noqa: E731
    return {name: (plain(layers), plain(experts), steps) for name, layers, experts, steps in found}


def test_store_has_every_figure_on_the_axes_of_its_layers_and_experts(finished):
    found = axes_and_steps(finished)
    scalar = "train/loss train/z_loss train/balance_loss train/grad_norm train/learning_rate train/tokens"
    scalar += " train/skipped_steps train/loss_spikes speed/tokens_per_second speed/step_time speed/mfu speed/data_wait"
    scalar += " speed/forward_time speed/backward_time memory/host_rss router/overload"
    for name in scalar.split():
        assert found.pop(name) == ([], [], 12), name
    assert found.pop("speed/optimizer_time") == ([], [], 11)  # of the update before a step
    for name in ("val/loss", "val/loss_per_byte", "speed/eval_time"):
        assert found.pop(name) == ([], [], 2), name
    assert found.pop("speed/checkpoint_time") == ([], [], 3)
    # Layer 0 is dense: the one MoE layer is number 1 of the model.
    for name in ("router/max_over_mean", "router/dead_experts", "router/entropy", "router/bias_range"):
        assert found.pop(name) == ([1], [], 12), name
    assert found.pop("router/load") == ([1], [0, 1, 2, 3], 4)  # steps 1, 5, 10 and the last
    assert set(found) <= {"metrics/publish_time"}
    assert {name for (name,) in query(finished, "SELECT name FROM catalogue")} == set(CATALOGUE)


def test_router_loads_are_shares_and_agree_with_the_figures_made_of_them(finished):
    shares = query(
        finished,
        "SELECT step, sum(value), max(value) FROM metrics WHERE name = 'router/load' GROUP BY ALL ORDER BY step",
    )
    over = dict(query(finished, "SELECT step, value FROM metrics WHERE name = 'router/max_over_mean'"))
    for step, total, largest in shares:
        assert total == pytest.approx(1.0)
        assert over[step] == pytest.approx(4 * largest)
    first, last = query(
        finished, "SELECT value FROM metrics WHERE name = 'router/bias_range' AND step IN (1, 12) ORDER BY step"
    )
    assert first[0] == 0, "biases move behind the first step"
    assert 0 < last[0] <= 11 * 2 * 1e-3 + 1e-9


def test_recording_touches_no_tensor(tmp_path, nmoe_train, monkeypatch):
    """A look at one would wait for the update, with which a GPU is still busy when a step is recorded."""

    class Untouched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    record = Recorder.step

    def guarded(*args, **keys):
        with Untouched():
            record(*args, **keys)

    monkeypatch.setattr(Recorder, "step", guarded)
    assert nmoe_train(tmp_path, *STEADY, "train.steps=2", "metrics.router_every=1", "moe.balance_loss=1e-3") == 0


def test_batches_name_the_tokens_of_every_step(finished, python_docs):
    lengths = {str(shard.path): len(shard.tokens) for shard in open_shards(python_docs / "train").shards}
    spans = query(finished, 'SELECT step, shard, "start", "end" FROM batches')
    assert [sum(step == number for step, *_ in spans) for number in range(1, 13)] == [4] * 12
    assert len({span[1:] for span in spans}) == 48, "no row comes twice in an epoch"
    for _, shard, start, end in spans:
        assert start % 64 == 0
        assert start < end <= min(start + 65, lengths[shard])
    tokens = query(finished, "SELECT max(value) FROM metrics WHERE name = 'train/tokens'")[0][0]
    assert tokens == sum(end - start - 1 for *_, start, end in spans)


def test_held_out_loss_is_that_of_every_document_read_alone(finished, python_docs):
    config = load_config(finished / "config.toml")
    model = Transformer(config)
    load_weights(
        find_checkpoint(finished), {f"model.{name}": t for name, t in model.state_dict().items()}, prefix="model."
    )
    val = open_shards(python_docs / "val")
    rows = Rows(val, seq_len=64)
    total, count = 0.0, 0
    for number in np.arange(4) * rows.num_rows // 4:  # eval_batches = 2 of micro_batch_size = 2
        shard, start, end = rows.span(int(number))
        row = val.shards[shard].tokens[start:end].astype(np.int64)
        cuts = [0, *(i for i in np.flatnonzero(row[:-1] == val.eos_id) if i), len(row) - 1]
        for begin, stop in itertools.pairwise(cuts):
            with torch.no_grad():
                logits = model.logits(torch.from_numpy(row[None, begin:stop]))[0]
            total += float(
                F.cross_entropy(logits.double(), torch.from_numpy(row[begin + 1 : stop + 1]), reduction="sum")
            )
        count += len(row) - 1
    (loss,), (per_byte,) = query(
        finished,
        "SELECT value FROM metrics WHERE name IN ('val/loss', 'val/loss_per_byte') AND step = 12 ORDER BY name",
    )
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert per_byte == pytest.approx(loss * val.num_tokens / val.text_bytes)


def test_several_held_out_sets_have_a_loss_each_and_the_mean_is_that_over_all_their_tokens(
    tmp_path, nmoe_train, python_docs, capsys
):
    folders = {name: python_docs / name for name in ("val", "train")}
    listed = ", ".join(f'"{folder}"' for folder in folders.values())
    names = {
        "both": f"[{listed}]",
        "val": str(folders["val"]),
        "train": f'["{folders["train"]}"]',
    }
    found = {}
    for name, value in names.items():
        setting = ("train.steps=1", *STEADY, "train.eval_batches=3", f"run.name={name}", f"data.val={value}")
        assert nmoe_train(tmp_path, *setting) == 0
        found[name] = dict(query(tmp_path / "runs" / name, "SELECT name, value FROM metrics WHERE name LIKE 'val/%'"))
    assert set(found["val"]) == {"val/loss", "val/loss_per_byte"}, "one set is the whole"
    apart = {name: found["both"][f"val/source_loss[{folder}]"] for name, folder in folders.items()}
    assert apart == {name: found[name]["val/loss"] for name in folders}
    assert apart["val"] != apart["train"]
    counts = {name: targets(open_shards(folder), rows=6) for name, folder in folders.items()}  # 3 micro batches of 2
    total = sum(apart[name] * counts[name] for name in folders)
    assert found["both"]["val/loss"] == pytest.approx(total / sum(counts.values()), rel=1e-12)
    per_token = {name: found[name]["val/loss"] / found[name]["val/loss_per_byte"] for name in folders}
    size = sum(counts[name] * per_token[name] for name in folders)
    assert found["both"]["val/loss_per_byte"] == pytest.approx(total / size, rel=1e-12)
    assert f"step 1: held-out loss of {folders['train']} {apart['train']:.4f} nat/token" in capsys.readouterr().err
    assert nmoe_train(tmp_path, f'data.val=["{folders["val"]}", "{folders["val"]}/"]') == 2
    assert "data.val names" in capsys.readouterr().err


def targets(shards: ShardSet, *, rows: int) -> int:
    """Targets of some rows, evenly spread."""
    cut = Rows(shards, seq_len=64)
    spans = [cut.span(int(number)) for number in np.arange(rows) * cut.num_rows // rows]
    return sum(end - start - 1 for _, start, end in spans)


def test_finished_run_and_the_same_command_make_a_second_folder_with_the_same_bits(finished, nmoe_train):
    folder = finished.parents[1]
    before = losses(finished)
    assert nmoe_train(folder, *FIGURES) == 0
    assert losses(folder / "runs" / "tiny-2") == before
    assert losses(finished) == before
    assert read_run(folder / "runs" / "tiny-2").id != read_run(finished).id


def leave_unfinished(run: Path, *, keep: int) -> None:
    """Makes of a finished run one that was killed: no end in its record, and only its oldest checkpoint."""
    record = run / "run.json"
    record.write_text(record.read_text().replace('"status": "finished"', '"status": "running"'))
    for path in list_checkpoints(run / "checkpoints"):
        if int(path.name.removeprefix("step-")) > keep:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def test_unfinished_run_goes_on_with_more_steps_and_other_intervals_and_not_with_another_model(
    tmp_path, nmoe_train, capfd
):
    assert nmoe_train(tmp_path, *STEADY, "train.steps=8", "checkpoint.every=4") == 0
    run = tmp_path / "runs" / "tiny"
    leave_unfinished(run, keep=4)
    first, run_id = losses(run), read_run(run).id

    capfd.readouterr()
    assert nmoe_train(tmp_path, *STEADY, "train.steps=8", "moe.top_k=1") == 2
    assert "runs/tiny: this unfinished run has another config: moe.top_k: 2 -> 1" in capfd.readouterr().err

    longer = (*STEADY, "train.steps=14", "train.log_every=5", "checkpoint.every=3", "checkpoint.keep=9")
    assert nmoe_train(tmp_path, *longer, "train.eval_every=7", "metrics.router_every=2") == 0
    info = read_run(run)
    assert (info.id, info.status, info.step, info.steps) == (run_id, "finished", 14, 14)
    assert losses(run)[:4] == first[:4]
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 10, 14]
    assert losses(run)[4] == first[4], "the step after the checkpoint was trained anew, to the same bits"
    # What a step read and the load of the experts do not wait for a log line.
    assert query(run, "SELECT count(*), count(DISTINCT step) FROM batches") == [(56, 14)]
    load = query(run, "SELECT DISTINCT step FROM metrics WHERE name = 'router/load' AND step > 4 ORDER BY step")
    assert [step for (step,) in load] == [6, 8, 10, 12, 14]

    leave_unfinished(run, keep=14)
    assert nmoe_train(tmp_path, *STEADY, "train.steps=3", "moe.top_k=1", "--fresh") == 0
    assert losses(run)[:4] == first[:4], "the unfinished run is untouched"
    assert read_run(tmp_path / "runs" / "tiny-2").step == 3


def test_damaged_newest_checkpoint_is_refused_and_the_one_before_it_used_when_it_is_gone(tmp_path, nmoe_train, capfd):
    arguments = (*STEADY, "train.steps=8", "checkpoint.every=4")
    assert nmoe_train(tmp_path, *arguments) == 0
    run = tmp_path / "runs" / "tiny"
    first = losses(run)
    leave_unfinished(run, keep=8)
    newest = list_checkpoints(run / "checkpoints")[-1]
    data = bytearray((newest / "__0_0.distcp").read_bytes())
    data[-9] ^= 1
    (newest / "__0_0.distcp").write_bytes(data)
    capfd.readouterr()
    assert nmoe_train(tmp_path, *arguments) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "step-00000008/__0_0.distcp: damaged: SHA-256" in errors[0]
    info = read_run(run)
    assert info.status == "failed"
    assert info.error
    assert "damaged" in info.error
    leave_unfinished(run, keep=4)
    assert nmoe_train(tmp_path, *arguments) == 0
    assert losses(run) == first


def test_run_of_another_process_is_left_alone(finished, nmoe_train, capfd):
    folder, run = finished.parents[1], finished.parents[1] / "runs" / "other"
    assert nmoe_train(folder, *STEADY, "train.steps=3", "run.name=other") == 0
    leave_unfinished(run, keep=3)
    record, lock = (run / "run.json").read_text(), RunLock(run)
    capfd.readouterr()
    assert nmoe_train(folder, *STEADY, "train.steps=3", "run.name=other") == 2
    lock.release()
    assert capfd.readouterr().err == (
        "error: runs/other: another process is training there; wait for it, stop it, or choose another run.name\n"
    )
    assert (run / "run.json").read_text() == record


def test_run_named_like_a_later_folder_of_another_is_no_folder_of_that_one(tmp_path, tiny_text):
    def opened(name: str, *, seed: int) -> RunFolder:
        overrides = [f"run.root={tmp_path}", f"run.name={name}", f"run.seed={seed}"]
        return open_folder(parse_config(tiny_text, where="tiny", name="tiny", overrides=overrides), fresh=False)

    other, mine = opened("a-2", seed=1), opened("a", seed=2)
    assert (other.path.name, mine.path.name) == ("a-2", "a"), "a neither waits for a-2 nor goes on with it"
    for folder in (other, mine):
        folder.release()
    again = opened("a", seed=2)
    assert (again.path, again.resumed) == (mine.path, True)
    again.finish("finished", step=3)
    again.release()
    third = opened("a", seed=2)
    assert third.path.name == "a-3", "a-2 is taken"
    third.release()
    assert opened("a", seed=2).path == third.path


def test_error_that_ends_a_run_is_recorded_in_one_line(tmp_path, nmoe_train):
    assert nmoe_train(tmp_path, *STEADY, "train.steps=3", "run.start_from=nowhere") == 2
    info = read_run(tmp_path / "runs" / "tiny")
    assert (info.status, info.step) == ("failed", 0)
    assert info.error
    assert info.error.startswith("CheckpointError: nowhere: no complete checkpoint")


def test_crash_is_recorded_in_one_line_with_its_stack_in_the_log(tmp_path, nmoe_train):
    assert nmoe_train(tmp_path, *STEADY, "train.steps=3") == 0
    run = tmp_path / "runs" / "tiny"
    leave_unfinished(run, keep=0)
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("")  # nothing that the program foresees
    assert nmoe_train(tmp_path, *STEADY, "train.steps=3") != 0
    info = read_run(run)
    assert info.status == "failed"
    assert info.error
    assert info.error.startswith("FileExistsError")
    assert "\n" not in info.error
    assert "Traceback" in (run / "log.txt").read_text()
    (run / "checkpoints").unlink()
    assert nmoe_train(tmp_path, *STEADY, "train.steps=3") == 0
    assert read_run(run).status == "finished"


def test_steps_that_are_not_finite_are_skipped_counted_and_do_not_end_the_run(tmp_path, nmoe_train):
    absurd = (*STEADY, "train.steps=4", "optim.learning_rate=1e30", "optim.weight_decay=0.0")
    assert nmoe_train(tmp_path, *absurd, "checkpoint.every=1", "checkpoint.keep=9") == 0
    run = tmp_path / "runs" / "tiny"
    counted = query(run, "SELECT step, value FROM metrics WHERE name = 'train/skipped_steps' ORDER BY step")
    assert counted == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    infos = [find_checkpoint(path) for path in list_checkpoints(run / "checkpoints")]
    assert [info.state["num_updates"] for info in infos] == [1, 1, 1, 1]
    assert [info.state["next_sample"] for info in infos] == [4, 8, 12, 16]
    assert len({info.files["__0_0.distcp"][1] for info in infos}) == 1, "skipped steps changed a value or a moment"


def test_losses_of_the_router_and_of_further_tokens_have_their_names(tmp_path, nmoe_train):
    assert (
        nmoe_train(tmp_path, *STEADY, "train.steps=2", "model.mtp_depth=1", "moe.z_loss=1e-3", "moe.balance_loss=1e-3")
        == 0
    )
    found = axes_and_steps(tmp_path / "runs" / "tiny")
    for name in ("train/mtp_loss", "train/router_z_loss", "train/balance_loss"):
        assert found[name] == ([], [], 2)
    assert found["router/load"][0] == [1, 2], "the layer of multi-token prediction counts on"
    ((loss,),) = query(
        tmp_path / "runs" / "tiny", "SELECT value FROM metrics WHERE name = 'train/mtp_loss' AND step = 1"
    )
    assert loss == pytest.approx(np.log(257), rel=0.05)


def test_run_killed_while_it_writes_a_checkpoint_goes_on_to_the_same_bits(finished, tmp_path, start_train, nmoe_train):
    often = [argument.replace("checkpoint.every=4", "checkpoint.every=1") for argument in FIGURES]
    process = start_train(tmp_path, *often)
    building = tmp_path / "runs" / "tiny" / "checkpoints"
    deadline = time.monotonic() + 120
    while not any(int(path.name[6:14]) > 4 for path in building.glob(".step-*.tmp")):
        assert process.poll() is None, process.said
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.finish(expect=-signal.SIGKILL)
    assert list_checkpoints(building)
    assert nmoe_train(tmp_path, *often) == 0
    log = (tmp_path / "runs" / "tiny" / "log.txt").read_text()
    assert "going on with runs/tiny at step" in log
    assert losses(tmp_path / "runs" / "tiny") == losses(finished)
