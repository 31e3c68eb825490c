# SPDX-License-Identifier: Apache-2.0
"""The judge's spine, as a user runs it: score, pack, verify."""

import gzip
import json
import re
import subprocess
import time
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from nmoe.formats.shards import open_shards

LINES = [{"id": f"d{n}", "text": f"A sentence about number {n}. [[score={n % 6}]]"} for n in range(12)]


def write_every_kind(folder: Path) -> None:
    """The same twelve documents in every format, ids told apart by the file's letter."""
    folder.mkdir()

    def named(letter: str) -> list[dict[str, str]]:
        return [{"id": f"{letter}{line['id']}", "text": line["text"]} for line in LINES]

    def jsonl(letter: str) -> bytes:
        return "".join(json.dumps(line) + "\n" for line in named(letter)).encode()

    (folder / "a.jsonl").write_bytes(jsonl("a"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl("b")))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(jsonl("c")[:300]) + zstandard.compress(jsonl("c")[300:]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(named("d")), folder / "d.parquet", row_group_size=5)
    table = pyarrow.Table.from_pylist(named("e"))
    with pyarrow.ipc.new_file(folder / "e.arrow", table.schema) as sink:
        sink.write_table(table)
    with pyarrow.ipc.new_stream(folder / "f.arrow", table.schema) as sink:
        sink.write_table(pyarrow.Table.from_pylist(named("f")))
    (folder / "g.txt").write_text("A text of its own.\r\nTwo lines. [[score=4]]\r\n")
    (folder / "ignored.bin").write_bytes(b"\x00\x01")


def test_score_reads_every_format_with_the_right_scores(tmp_path, serve, score, scored):
    write_every_kind(tmp_path / "in")
    score(serve(), "in")
    found = scored()
    by_id = {f"{letter}{line['id']}": int(line["id"][1:]) % 6 for letter in "abcdef" for line in LINES}
    assert {one["id"]: one["score"] for one in found[:-1]} == by_id
    assert (found[-1]["source"], found[-1]["score"], found[-1]["text"][:20]) == ("g.txt", 4.0, "A text of its own.\nT")
    assert [one["source"] for one in found] == sorted(one["source"] for one in found)
    assert found[3]["line"] == 4
    assert found[3]["windows"] == [[0, len(found[3]["text"])]]


@pytest.mark.parametrize("block_bytes", ["200", "100000000"])
def test_blocks_change_the_parts_but_not_the_documents(block_bytes, tmp_path, serve, score, scored, corpus):
    corpus(count=40)
    table = pyarrow.Table.from_pylist([{"id": f"p{n}", "text": f"Row {n} says this. [[score=2]]"} for n in range(30)])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    score(serve(), "corpus.jsonl", "t.parquet", "--block-bytes", block_bytes)
    found = scored()
    assert [(one["id"], one["line"]) for one in found] == [(f"d{n}", n + 1) for n in range(40)] + [
        (f"p{n}", n + 1) for n in range(30)
    ]
    assert (len(list((tmp_path / "scored" / "blocks").iterdir())) > 10) == (block_bytes == "200")


def test_a_second_run_pays_for_new_documents_only(tmp_path, serve, score, scored, corpus):
    server = serve()
    corpus(count=50)
    score(server, "corpus.jsonl")
    first = server.stats()["requests"]
    score(server, "corpus.jsonl", output="again")
    assert server.stats()["requests"] == first
    before = (tmp_path / "scored" / "scored.json").read_bytes()
    assert (tmp_path / "again" / "scored.json").read_bytes() == before
    corpus(count=55, start=0)
    score(server, "corpus.jsonl")
    assert server.stats()["requests"] == first + 5
    assert len(scored()) == 55


def test_identical_texts_are_paid_once(tmp_path, serve, score, scored):
    text = "The same text again. [[score=3]]"
    variants = [text, text + "\n", "  " + text, text.replace(". ", ".\u2060 ")]
    lines = [{"id": f"x{n}", "text": variants[n % 4]} for n in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = serve("--latency", "0.05")
    score(server, "in.jsonl", "--answer", "json_schema")
    assert server.stats()["requests"] == 1
    assert [one["score"] for one in scored()] == [3.0] * 40
    assert [one["text"] for one in scored()] == [line["text"] for line in lines]


def test_a_killed_run_goes_on_and_ends_like_an_uninterrupted_one(tmp_path, serve, score, scored, corpus, environment):
    server = serve("--latency", "0.03")
    path = corpus(count=300)
    command = [
        "hydra-judge",
        "score",
        path.name,
        "--rubric",
        "educational",
        "--base-url",
        server.url,
        "--model",
        "test-model",
    ]
    for asked in (60, 150):
        process = subprocess.Popen(
            [*command, "--output", "scored", "--concurrency", "8"],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        while server.stats().get("answered", 0) < asked:
            time.sleep(0.02)
        process.kill()
        process.wait()
    assert not (tmp_path / "scored" / "scored.json").exists()
    score(server, path.name)
    stats = server.stats()
    # An answer may be lost between the server's socket and the cache, for each request in flight at a kill.
    assert stats["requests"] <= 301 + 2 * 8
    (tmp_path / "cache").rename(tmp_path / "old-cache")
    score(serve(), path.name, output="calm")
    for name in ("scored.json", "quarantine.jsonl", "blocks/00000/part-00000.jsonl"):
        assert (tmp_path / "scored" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
    assert len(scored()) == 300


def test_interrupt_keeps_what_was_paid(tmp_path, serve, score, corpus, environment):
    server = serve("--latency", "0.3")
    path = corpus(count=200)
    command = [
        "hydra-judge",
        "score",
        path.name,
        "--rubric",
        "educational",
        "--base-url",
        server.url,
        "--model",
        "test-model",
    ]
    process = subprocess.Popen(
        [*command, "--output", "scored", "--concurrency", "16"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    while server.stats().get("answered", 0) < 40:
        time.sleep(0.02)
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.strip().splitlines()[-1].startswith("error: interrupted")
    stopped_at = server.stats()
    assert stopped_at["requests"] == stopped_at["answered"]
    score(server, path.name)
    assert server.stats()["requests"] == 201


def test_pack_keeps_what_reaches_the_score_and_verify_finds_damage(tmp_path, serve, score, hydra, corpus):
    corpus(count=60)
    score(serve(), "corpus.jsonl")
    said = hydra(
        "pack", "scored", "--tokenizer", "bytes", "--min-score", "3", "--output", "shards", "--shard-tokens", "500"
    )
    assert "30 documents" in said.stdout
    assert "30 below_score" in said.stdout
    shards = open_shards(tmp_path / "shards")
    lineages = [line for shard in shards.shards for line in shard.lineages()]
    assert [line["id"] for line in lineages] == [f"d{n}" for n in range(60) if n % 6 >= 3]
    assert {line["score"] for line in lineages} == {3.0, 4.0, 5.0}
    assert len(shards.shards) > 1
    hydra("verify", "shards")
    path = tmp_path / "shards" / shards.shards[0].name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert "SHA-256" in hydra("verify", "shards", expect=1).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("score", "missing.jsonl", "--base-url", "URL"), "missing.jsonl: not found"),
        (("score", "in.jsonl"), "--base-url is missing"),
        (("score", "in.jsonl", "--base-url", "localhost:80"), "expected http"),
        (("score", "in.jsonl", "--base-url", "URL", "--rubric", "nope"), "rubric nope"),
        (("score", "in.jsonl", "--base-url", "URL", "--max-cost", "1"), "--prices"),
        (("score", "x.bin", "--base-url", "URL"), "cannot tell what it is"),
        (("score", "empty", "--base-url", "URL"), "no file that can be read"),
        (("pack", "nothing", "--tokenizer", "bytes", "--min-score", "1", "--output", "o"), "nothing"),
        (("verify", "nothing"), "nothing"),
        (("score",), "Missing"),
        (("frobnicate",), "No such command"),
        (("serve-local", "--gguf", "none.gguf"), "none.gguf: not found"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, says, tmp_path, serve, hydra):
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "x.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    usual = ["--model", "m", "--output", "o"] if arguments[0] == "score" and len(arguments) > 1 else []
    if usual and "--rubric" not in arguments:
        usual += ["--rubric", "educational"]
    given = [serve().url if argument == "URL" else argument for argument in arguments]
    assert says in hydra(*given, *usual, expect=2).stderr


def test_the_api_key_is_in_no_file_and_on_no_stream(tmp_path, serve, score, hydra, corpus, environment):
    key = environment["OPENAI_API_KEY"]
    corpus(count=20)
    good = serve("--key", key)
    said = score(good, "corpus.jsonl")
    environment["OPENAI_API_KEY"] = key + "-wrong"
    refused = score(good, "corpus.jsonl", "--cache", "other.sqlite", output="second", expect=2)
    assert "401" in refused.stderr
    del environment["OPENAI_API_KEY"]
    score(good, "corpus.jsonl", "--cache", "other.sqlite", output="second", expect=2)
    environment["JUDGE_KEY"] = key
    score(good, "corpus.jsonl", "--api-key-env", "JUDGE_KEY", "--cache", "other.sqlite", output="third")
    streams = said.stdout + said.stderr + refused.stdout + refused.stderr
    assert "planted" not in streams
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if b"planted" in path.read_bytes()]


def test_documents_go_to_the_named_host_alone(tmp_path, serve, score, corpus, environment):
    other, server = serve(), serve()
    environment |= {
        "HTTP_PROXY": other.url,
        "http_proxy": other.url,
        "ALL_PROXY": other.url,
        "OPENAI_BASE_URL": other.url,
    }
    corpus(count=5)
    score(server, "corpus.jsonl")
    elsewhere = serve("--redirect", f"{other.url}/chat/completions")
    said = score(elsewhere, "corpus.jsonl", "--cache", "new.sqlite", output="second", expect=2)
    assert "points elsewhere" in said.stderr
    assert other.stats().get("requests", 0) == 0
    assert server.stats()["requests"] == 6


def test_long_documents_are_judged_by_windows(tmp_path, serve, score, scored):
    text = "The head says five. [[score=5]] " + "word " * 8000 + " The tail says one. [[score=1]]"
    (tmp_path / "long.txt").write_text(text)
    score(serve(), "long.txt")
    (found,) = scored()
    windows = found["windows"]
    assert len(windows) == 3
    assert windows[0][0] == 0
    assert windows[-1][1] == len(text)
    assert all(0 < end - start <= 6080 for start, end in windows)
    assert found["reason"] == "worth 5 | worth 1 | worth 1", "head, words without a sentence, tail"
    assert found["score"] == pytest.approx((5 + 1 + 1) / 3, abs=1e-6)


def test_help_of_every_verb_names_its_options(hydra):
    verbs = re.findall(r"^  (\w[\w-]+)  ", hydra("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert {"score", "pack", "verify"} <= set(verbs)
    for verb in verbs:
        said = hydra(verb, "--help").stdout
        assert "Usage:" in said
        assert len(said.splitlines()) > 5


def test_output_of_another_rubric_is_not_overwritten(tmp_path, serve, score, corpus):
    server = serve()
    corpus(count=5)
    score(server, "corpus.jsonl")
    before = (tmp_path / "scored" / "scored.json").read_bytes()
    assert "another" in score(server, "corpus.jsonl", "--votes", "3", expect=2).stderr
    assert (tmp_path / "scored" / "scored.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.doc").write_text("x")
    assert "thesis" not in score(server, "corpus.jsonl", output="mine", expect=2).stdout
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.doc"]


def test_workers_share_the_blocks_and_leave_what_one_process_leaves(
    tmp_path, serve, score, scored, corpus, environment
):
    """Three workers at once, one of them killed in the middle and started again."""
    server = serve("--latency", "0.05")
    corpus(count=120)
    usual = ("corpus.jsonl", "--answer", "json_schema", "--block-bytes", "500", "--concurrency", "2")
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
    start = [[*command, "--output", "scored", "--quiet", "--worker", f"{number}/3"] for number in range(3)]
    running = [subprocess.Popen(one, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) for one in start]
    while server.stats().get("answered", 0) < 30:
        time.sleep(0.02)
    running[1].kill()
    assert [worker.wait(timeout=60) for worker in running] == [0, -9, 0]
    assert not (tmp_path / "scored" / "scored.json").exists()
    assert (
        subprocess.run(start[1], cwd=tmp_path, env=environment, timeout=60, stdout=subprocess.DEVNULL).returncode == 0
    )
    assert [one["id"] for one in scored()] == [f"d{n}" for n in range(120)]
    score(server, *usual, output="alone")
    names = [path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.json*")]
    assert len(names) > 30
    for name in names:
        if name.name != "runs.jsonl":
            assert (tmp_path / "scored" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    for bad in ("3/3", "x", "1"):
        assert "expected I/N" in score(server, "corpus.jsonl", "--worker", bad, expect=2).stderr
