# SPDX-License-Identifier: Apache-2.0
"""The engine on good and bad days: limits, outcomes, budgets, forms of answers, several servers, the Batch API."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_judge.budget import Budget, BudgetError, Price
from hydra_judge.cache import Cache
from hydra_judge.limits import Backoff, Endpoint, TokenBucket
from hydra_judge.verdict import Reply
from nmoe.errors import EnvironmentFault

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def endpoint(most: int = 64, **more: object) -> tuple[Endpoint, Clock]:
    clock = Clock()
    return Endpoint(url="u", most=most, clock=clock, **more), clock  # type: ignore[arg-type]


def test_concurrency_grows_under_few_refusals_and_shrinks_under_many():
    server, _ = endpoint(most=256)
    begun = server.limit
    for number in range(2000):
        server.send(1)
        if number % 10 == 0:
            server.refused(retry_after=None)
        else:
            server.succeeded(estimated=1, used=1)
    assert server.limit == 256 > begun
    for _ in range(2000):
        server.send(1)
        server.refused(retry_after=None)
    assert server.limit == 1


def test_a_saturated_server_is_left_alone_for_as_long_as_it_asked():
    server, clock = endpoint(most=8)
    for _ in range(8):
        server.send(1)
        server.refused(retry_after=30.0)
    assert 29 <= server.wait(1) <= 30
    clock.now += 30.1
    assert server.wait(1) == 0


def test_the_breaker_opens_probes_and_closes():
    server, clock = endpoint()
    for _ in range(8):
        server.send(1)
        server.failed(timeout=False)
    assert 0.7 < server.wait(1) <= 1.0
    pauses = []
    for _ in range(10):
        clock.now += server.wait(1)
        assert server.wait(1) == 0
        server.send(1)
        assert server.wait(1) == float("inf")  # one probe at a time
        server.failed(timeout=False)
        pauses.append(server.wait(1))
    assert 40 < pauses[-1] <= 60
    clock.now += pauses[-1]
    server.send(1)
    server.succeeded(estimated=1, used=1)
    assert server.open_since is None
    assert server.wait(1) == 0
    assert server.in_flight == 0


def test_rates_per_minute_are_kept_and_estimates_are_corrected():
    bucket = TokenBucket(600)
    now, sent = 0.0, 0
    while now < 60:
        wait = bucket.wait(now, 1)
        if wait:
            now += wait
        else:
            bucket.draw(1)
            sent += 1
    assert 600 <= sent <= 611
    tokens = TokenBucket(6000)
    assert tokens.wait(0.0, 5000) == 0  # larger than the burst, so it passes when the bucket is full
    tokens.draw(5000)
    assert tokens.wait(0.0, 100) == pytest.approx(50)
    tokens.draw(-4000)
    assert tokens.wait(0.0, 100) == pytest.approx(10)


def test_backoff_doubles_with_jitter_up_to_its_end():
    waits = [
        wait
        for backoff in [Backoff(first=1, last=16) for _ in range(200)]
        for wait in [[backoff.next() for _ in range(8)]]
    ]
    for number, column in enumerate(zip(*waits, strict=True)):
        step = min(2.0**number, 16)
        assert step / 10 <= min(column) < max(column) <= step
        assert max(column) - min(column) > step / 2


def test_a_budget_counts_what_is_in_flight():
    budget = Budget(price=Price(prompt=1e6, answer=2e6), max_requests=5, max_cost=10.0)
    assert budget.cost(3, 1) == 5
    budget.reserve(5)
    budget.reserve(4)
    with pytest.raises(BudgetError):
        budget.reserve(2)
    budget.settle(reserved=5, cost=1)
    budget.reserve(2)
    budget.settle(reserved=4, cost=0)
    assert (budget.spent, budget.reserved, budget.requests) == (1, 2, 3)
    budget.reserve(0)
    budget.reserve(0)
    with pytest.raises(BudgetError, match="max-requests"):
        budget.reserve(0)


def test_an_answer_that_cannot_be_kept_is_an_error_and_no_endless_wait(tmp_path):
    path = tmp_path / "answers.sqlite"
    cache = Cache(path)
    for file in tmp_path.iterdir():
        file.unlink()
    path.mkdir()  # what the thread that writes opens is no file any more
    with pytest.raises(EnvironmentFault, match="cannot keep answers"):
        asyncio.run(asyncio.wait_for(cache.put(b"key", Reply(content="3"), model="m"), timeout=30))
    cache.close()


def test_a_bad_day_with_kills_and_an_outage_ends_like_a_calm_one():
    command = [
        sys.executable,
        str(ROOT / "benchmarks/judge_faults.py"),
        "--documents",
        "500",
        "--kills",
        "2",
        "--outage",
        "3",
        "--timeout",  # what the last answers of a day are waited for: some never come
        "10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 of 500 documents, 0 wrong, 0 files differ" in done.stdout


def test_a_process_that_was_stopped_takes_the_answers_that_came_meanwhile(tmp_path, serve, corpus, scored, environment):
    server = serve("--latency", "0.5")
    corpus(count=24)
    command = [
        "hydra-judge",
        "score",
        "corpus.jsonl",
        "--rubric",
        "educational",
        "--base-url",
        server.url,
        "--model",
        "m",
    ]
    command += ["--answer", "json_schema", "--timeout", "1", "--concurrency", "8", "--output", "scored"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    while server.stats()["in_flight"] < 8:
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0
    assert len(scored()) == 24
    stats = server.stats()
    assert (stats["requests"], stats["unread"]) == (24, 0)


def test_outcomes_that_are_no_score_are_told_apart(tmp_path, serve, score, scored):
    texts = {"ok": "[[score=3]] Fine.", "refused": "[[refused]]", "filtered": "[[filtered]]", "too_long": "long " * 300}
    lines = [json.dumps({"id": id, "text": f"{text} Text of {id}."}) for id, text in texts.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    said = score(serve("--context", "1000"), "in.jsonl")
    assert {one["id"]: (one["outcome"], one["score"]) for one in scored()} == {
        "ok": ("ok", 3.0), "refused": ("refused", None), "filtered": ("filtered", None), "too_long": ("too_long", None)
    }  # fmt: skip
    assert "1 ok" in said.stdout
    assert "1 refused" in said.stdout


def test_a_document_without_an_answer_fails_and_is_asked_again_by_the_next_run(serve, score, scored, corpus):
    server = serve("--faults", "500=1")
    corpus(count=3)
    usual = ("corpus.jsonl", "--answer", "json_schema", "--deadline", "0.5")
    assert "no answer to any document" in score(server, *usual, expect=1).stderr
    assert [one["outcome"] for one in scored()] == ["failed"] * 3
    server.control(faults="")
    score(server, *usual)
    assert [one["score"] for one in scored()] == [0.0, 1.0, 2.0]


def test_a_request_that_no_document_would_be_answered_with_ends_the_run_at_its_start(serve, score, corpus, tmp_path):
    server = serve()
    corpus(count=60)
    wrong = ("--answer", "json_schema", "--request-option", "top_q=1", "--concurrency", "2")
    said = score(server, "corpus.jsonl", *wrong, expect=2).stderr
    assert "400 Unknown parameter: 'top_q'." in said
    assert "look at --request-option" in said
    assert server.stats()["requests"] <= 25  # 20 documents are read ahead, and wait for what the probe says
    assert not (tmp_path / "scored" / "scored.json").exists()


def test_a_first_document_that_the_server_refuses_ends_nothing(tmp_path, serve, score, scored):
    server = serve()
    texts = ["[[invalid]] one", "[[score=2]] two", "[[score=3]] three"]
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    score(server, "c.jsonl", "--answer", "json_schema", "--concurrency", "1")
    assert [(one["outcome"], one["score"]) for one in scored()] == [("failed", None), ("ok", 2.0), ("ok", 3.0)]
    assert server.stats()["requests"] == 4


def test_a_server_that_is_not_there_is_named_at_once(hydra, corpus):
    corpus(count=20)
    given = (
        "--rubric",
        "educational",
        "--base-url",
        "http://127.0.0.1:1/v1",
        "--model",
        "m",
        "--answer",
        "json_schema",
    )
    said = hydra("score", "corpus.jsonl", *given, "--output", "o", "--max-outage", "1", expect=1).stderr.splitlines()
    assert "127.0.0.1:1" in said[0]
    assert "tried again for --max-outage, 1 s" in said[0]
    assert "no answer for 1 s" in said[-1]
    assert len(said) == 2


def test_a_server_that_stays_down_stops_the_run(serve, score, corpus):
    server = serve()
    server.control(outage=1000)
    corpus(count=3)
    said = score(server, "corpus.jsonl", "--answer", "json_schema", "--max-outage", "1", expect=1)
    assert "no answer for 1 s" in said.stderr


@pytest.mark.parametrize(
    ("dialect", "form"),
    [("json_object_schema", "json_object_schema"), ("json_object", "json_object"), ("text", "text")],
)
def test_the_answer_form_is_found_by_asking(dialect, form, tmp_path, serve, score, scored, corpus):
    corpus(count=6)
    said = score(serve("--dialect", dialect), "corpus.jsonl")
    assert f"answer form {form}" in said.stderr
    assert json.loads((tmp_path / "scored" / "scored.json").read_text())["rubric"]["form"] == form
    assert [one["score"] for one in scored()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_p_yes_scores_by_probability(serve, score, hydra, scored, corpus):
    corpus(count=6)
    server = serve("--dialect", "logprobs_only")
    score(server, "corpus.jsonl", "--answer", "p_yes")
    assert [one["score"] for one in scored()] == pytest.approx([0.005, 1, 2, 3, 4, 4.995], abs=1e-4)
    asked = ("--base-url", server.url, "--model", "test-model", "--answer", "p_yes", "--rubric", "small", "--quiet")
    hydra("score", "corpus.jsonl", *asked, "--output", "both")
    assert [one["score"] for one in scored("both")] == pytest.approx([0.005, 1, 2, 3, 4, 4.995], abs=1e-4)
    assert server.stats()["requests"] == 6 + 12  # the question and its opposite
    assert "no usable answer in any form" in score(server, "corpus.jsonl", output="other", expect=2).stderr


def test_votes_are_separate_answers(serve, score, scored, corpus):
    server = serve()
    corpus(count=4)
    score(server, "corpus.jsonl", "--votes", "3", "--answer", "json_schema")
    assert server.stats()["requests"] == 12
    assert [one["votes"] for one in scored()] == [[float(n)] * 3 for n in range(4)]


def test_max_requests_stops_exactly_and_the_next_run_goes_on(serve, score, scored, corpus):
    server = serve("--latency", "0.02")
    corpus(count=30)
    usual = ("corpus.jsonl", "--answer", "json_schema")
    assert "--max-requests 12" in score(server, *usual, "--max-requests", "12", expect=1).stderr
    assert server.stats()["requests"] == 12
    score(server, *usual)
    assert server.stats()["requests"] == 30
    assert len(scored()) == 30


def test_max_cost_is_never_passed_and_a_dry_run_tells_it_before(tmp_path, serve, score, corpus):
    server = serve("--latency", "0.02")
    corpus(count=40)
    (tmp_path / "prices.toml").write_text('[models."test-model"]\nprompt = 2.0\nanswer = 8.0\n')
    usual = ("corpus.jsonl", "--answer", "json_schema", "--prices", "prices.toml")
    guessed = score(server, *usual, "--dry-run").stdout
    assert server.stats().get("requests", 0) == 0
    assert "documents: 40" in guessed
    measured = score(server, *usual, "--dry-run", "--pilot", "10").stdout
    assert server.stats()["requests"] == 10
    assert "requests: 30, in the cache: 0" in measured
    told = float(re.search(r"cost: \$([0-9.]+)", measured)[1])  # type: ignore[index]
    assert not (tmp_path / "scored").exists()
    score(server, *usual, "--max-cost", str(told / 2), expect=1)
    assert 0 < cost(tmp_path) <= told / 2
    score(server, *usual)
    assert cost(tmp_path) == pytest.approx(told, rel=0.05)
    assert server.stats()["requests"] == 40


def cost(folder: Path) -> float:
    """Dollars of all runs into an output folder."""
    return sum(json.loads(line)["cost"] for line in (folder / "scored" / "runs.jsonl").read_text().splitlines())


def test_load_is_shared_by_weight_and_survives_the_loss_of_a_server(serve, score, scored, corpus, hydra):
    light, heavy, dead = serve("--latency", "0.05"), serve("--latency", "0.05"), serve()
    dead.stop()
    corpus(count=200)
    urls = [f"{light.url}#weight=1", f"{heavy.url}#weight=3", dead.url]
    given = [word for url in urls for word in ("--base-url", url)]
    usual = (
        "--rubric",
        "educational",
        "--model",
        "m",
        "--answer",
        "json_schema",
        "--concurrency",
        "8",
        "--output",
        "scored",
    )
    hydra("score", "corpus.jsonl", *given, *usual)
    assert [one["score"] for one in scored()] == [float(n % 6) for n in range(200)]
    assert light.stats()["requests"] + heavy.stats()["requests"] == 200
    assert heavy.stats()["requests"] > 1.5 * light.stats()["requests"]


def test_retry_after_is_honoured(serve, score, corpus):
    server = serve("--faults", "429_after=1", "--retry-after", "1.5")
    corpus(count=2)
    began = time.monotonic()
    assert (
        "--max-requests"
        in score(server, "corpus.jsonl", "--answer", "json_schema", "--max-requests", "4", expect=1).stderr
    )
    assert time.monotonic() - began > 3.0


def test_the_batch_api_is_paid_once_and_gives_the_same_scores(tmp_path, serve, score, scored, corpus, environment):
    server = serve("--faults", "out_of_range=0.2,500=0.1", "--batch-polls", "2")
    corpus(count=60)
    usual = ("corpus.jsonl", "--answer", "json_schema", "--batch", "--batch-poll", "0.2")
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
    process = subprocess.Popen(
        [*command, "--output", "scored"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    while server.stats().get("batches", 0) < 1:
        time.sleep(0.01)
    process.kill()
    process.wait()
    score(server, *usual)
    stats = server.stats()
    assert stats["asked_after_answer"] == 0
    assert stats["batches"] < 8
    assert [one["score"] for one in scored()] == [float(n % 6) for n in range(60)]
    score(serve(), "corpus.jsonl", "--answer", "json_schema", "--cache", "calm.sqlite", output="calm")
    part = "blocks/00000/part-00000.jsonl"
    assert (tmp_path / "scored" / part).read_bytes() == (tmp_path / "calm" / part).read_bytes()
