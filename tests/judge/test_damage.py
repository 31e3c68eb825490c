# SPDX-License-Identifier: Apache-2.0
"""Numbers that are none, addresses that lead nowhere, files that were damaged, disks that are full: one line, nothing lost."""

import json
import resource
import signal
import subprocess
from pathlib import Path

import click
import pytest

from hydra_judge.backends.openai import make_client
from hydra_judge.budget import load_price
from hydra_judge.calibrate import read_pairs
from hydra_judge.cli import group
from hydra_judge.options import Number, request_options
from hydra_judge.report import read_totals
from hydra_judge.student import fit
from nmoe.errors import ConfigError, DataError
from nmoe.formats.documents import ScoredDocument, ScoredWriter


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_no_option_takes_a_number_that_is_not_finite(value):
    options = [
        one
        for verb in group.commands.values()
        for one in verb.params
        if isinstance(one.type, click.types.FloatParamType)
    ]
    assert len(options) > 10
    for option in options:
        assert isinstance(option.type, Number), option.name
        with pytest.raises(click.BadParameter):
            option.type.convert(value, option, None)
    with pytest.raises(ConfigError, match="finite"):
        request_options((f"temperature={'NaN' if value == 'nan' else '1e999'}",))


@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "true", '"1"', "[1]"])
@pytest.mark.parametrize("key", ["prompt", "answer", "batch"])
def test_a_price_that_cannot_be_is_refused(key, value, tmp_path):
    values = {"prompt": "1.0", "answer": "1.0", "batch": "0.5"} | {key: value}
    (tmp_path / "p.toml").write_text("[models.m]\n" + "".join(f"{one} = {of}\n" for one, of in values.items()))
    with pytest.raises(ConfigError, match="finite numbers"):
        load_price(tmp_path / "p.toml", model="m")


@pytest.mark.parametrize(
    "url",
    ["", "http://", "http://[::1", "http://h:x/v1", "http://h:99999/v1", "http://h:0", "ftp://h/v1", "http://h h/v1", "//h", "http://a..b/v1"],
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(ConfigError, match="not an address"):
        make_client(url, api_key=None, timeout=1.0, connections=1)


@pytest.mark.parametrize("key", ["sk-planted\n", "sk-planted\r\nX: y", "sk planted", "sk-plänted", "ключ-planted"])
def test_a_key_that_cannot_stand_in_a_header_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="blank, a line end") as refused:
        make_client("http://127.0.0.1:1/v1", api_key=key, timeout=1.0, connections=1)
    assert "plan" not in str(refused.value)
    with pytest.raises(ConfigError, match="user name or password") as refused:
        make_client("http://u:planted@h h/v1", api_key=None, timeout=1.0, connections=1)
    assert "plan" not in str(refused.value)


RUBRIC = {"name": "r", "sha256": "0" * 64, "low": 0, "high": 5}
HEADER, PART = "scored.json", "part-00000.jsonl"


@pytest.fixture
def run(tmp_path) -> Path:
    """A small run's folder, and labels beside it."""
    folder = tmp_path / "run"
    with ScoredWriter(folder, rubric=RUBRIC, model="m") as writer:
        for number in range(20):
            writer.add(ScoredDocument(id=f"d{number}", text="t", source="s", outcome="ok", score=float(number % 6)))
    (folder / "quarantine.jsonl").write_text('{"path": "p", "line": 1, "reason": "empty_text", "detail": ""}\n')
    (folder / "runs.jsonl").write_text('{"requests": 20, "cost": 0.1}\n')
    (folder / "labels").write_text("".join(json.dumps({"id": f"d{number}", "score": 3}) + "\n" for number in range(20)))
    read_totals(folder)
    read_pairs(folder, folder / "labels")
    return folder


def header_with(**changes: object):
    return lambda data: json.dumps(json.loads(data) | changes).encode()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (HEADER, lambda data: data[:50]),
        (HEADER, lambda _: b"\xff\xfe"),
        (HEADER, header_with(rubric=3)),
        (HEADER, header_with(rubric={"name": "r"})),
        (HEADER, header_with(outcomes=None)),
        (HEADER, header_with(rubric={"name": "r", "sha256": "", "low": 5, "high": 0})),
        (HEADER, header_with(parts=[1])),
        (HEADER, header_with(parts=[{}])),
        (PART, lambda data: data[:-30]),
        (PART, lambda _: b"\xff\xfe\n"),
        (PART, lambda data: data.replace(b'"score": 3.0', b'"score": NaN')),
        (PART, lambda data: data.replace(b'"score": 3.0', b'"score": "3"')),
        (PART, lambda data: data.replace(b'"votes": []', b'"votes": 3')),
        (PART, lambda data: data.replace(b'"votes": []', b'"votes": ["3", "4"]')),
        (PART, lambda data: data.replace(b'"text": "t"', b'"text": 1')),
        ("quarantine.jsonl", lambda data: data[:9]),
        ("quarantine.jsonl", lambda _: b"{}\n"),
        ("runs.jsonl", lambda data: data[:9]),
        ("canaries.jsonl", lambda _: b"{}\n"),
        ("calibration.json", lambda _: b'{"half'),
        ("calibration.json", lambda _: b"[]"),
        ("labels", lambda data: data[:9]),
        ("labels", lambda data: b"\xff\xfe\n" + data),
        ("labels", lambda data: b"[" * 100_000 + data),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(name, damage, run):
    path = run / name
    path.write_bytes(damage(path.read_bytes() if path.exists() else b""))
    read = (lambda: read_pairs(run, path)) if name == "labels" else (lambda: read_totals(run))
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        read()
    if name in (HEADER, PART):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            fit(run)


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, serve, score, scored, corpus, environment):
    """A limit on the size of files stands for the disk. Where the answers fit but not the scores, nothing is paid again."""
    server = serve()
    corpus(count=300)
    usual = ("corpus.jsonl", "--answer", "json_schema")
    command = [
        "hydra-judge",
        "score",
        *usual,
        "--rubric",
        "educational",
        "--base-url",
        server.url,
        "--model",
        "test-model",
    ]

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))

    def on_small_disk(*more: str) -> None:
        told = subprocess.run(
            [*command, *more, "--quiet"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=small_disk,
        )
        assert (told.returncode, len(told.stderr.splitlines())) == (2, 1), told.stderr

    on_small_disk("--output", "scored", "--cache", "small.sqlite")
    asked = server.stats()["requests"]
    score(server, *usual)
    assert [one["score"] for one in scored()] == [float(n % 6) for n in range(300)]
    on_small_disk("--output", "second")
    score(server, *usual, output="second")
    assert server.stats()["requests"] == asked + 300
