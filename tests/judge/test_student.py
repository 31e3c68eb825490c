# SPDX-License-Identifier: Apache-2.0
"""The student: what it learns, when it knows that it does not know, and what it saves."""

import json
import random
import time

import numpy as np
import pytest

from hydra_judge.features import DENSE, features
from hydra_judge.student import KeepProbability, fit, judge_by_student, load_student
from nmoe.errors import DataError, FormatError
from nmoe.formats.documents import Document, ScoredDocument, ScoredWriter

GOOD = [
    "theorem",
    "proof",
    "energy",
    "cell",
    "history",
    "measure",
    "because",
    "therefore",
    "example",
    "explains",
    "plant",
    "river",
    "light",
    "number",
]
BAD = [
    "buy",
    "cheap",
    "click",
    "now",
    "winner",
    "free",
    "casino",
    "offer",
    "deal",
    "subscribe",
    "cookies",
    "login",
    "menu",
    "share",
    "like",
]


def text_of(level: int, rng: random.Random) -> str:
    """A text whose share of good words follows its level."""
    return " ".join(rng.choice(GOOD if rng.random() < level / 5 else BAD) for _ in range(rng.randrange(40, 120)))


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder of a thousand scored documents, and the student that learned from them."""
    folder, rng = tmp_path_factory.mktemp("student") / "scored", random.Random(0)
    with ScoredWriter(folder, rubric={"name": "r", "sha256": "0", "low": 0, "high": 5}, model="teacher") as writer:
        for number in range(1000):
            level = rng.randrange(6)
            text = text_of(level, rng)
            writer.add(
                ScoredDocument(id=str(number), text=text, source="s", outcome="ok", score=level, windows=[[0, 9]])
            )
        writer.add(ScoredDocument(id="x", text="not scored", source="s", outcome="refused"))
        writer.add(ScoredDocument(id="y", text="by a student", source="s", outcome="ok", score=5.0))
    return folder, fit(folder)


def test_it_agrees_with_the_judge_on_documents_it_has_not_seen(taught):
    _, student = taught
    rng = random.Random(99)
    levels = [rng.randrange(6) for _ in range(300)]
    grades = [student.grade(text_of(level, rng)) for level in levels]
    assert np.corrcoef(levels, grades)[0, 1] > 0.93
    assert student.about["spearman"] > 0.9
    assert student.about["trained_on"] + student.about["held_out"] < 1000


def test_the_reported_agreement_is_that_of_the_held_out_part(taught):
    folder, student = taught
    shuffled = folder.parent / "shuffled"
    rng = random.Random(5)
    with ScoredWriter(shuffled, rubric={"name": "r", "sha256": "0", "low": 0, "high": 5}, model="teacher") as writer:
        for number in range(600):
            text = text_of(rng.randrange(6), rng) + f" unique{number}"
            writer.add(
                ScoredDocument(
                    id=str(number), text=text, source="s", outcome="ok", score=rng.randrange(6), windows=[[0, 9]]
                )
            )
    assert abs(fit(shuffled).about["spearman"]) < 0.4  # it can learn noise by heart, and must not report that
    assert student.about["spearman"] > 0.9


def test_fitting_twice_gives_the_same_student_and_saving_keeps_it(taught, tmp_path):
    folder, student = taught
    again = fit(folder)
    assert again.sha256 == student.sha256
    student.save(tmp_path / "s.npz")
    loaded = load_student(tmp_path / "s.npz")
    assert loaded.sha256 == student.sha256
    assert loaded.grade("a theorem and its proof") == student.grade("a theorem and its proof")
    (tmp_path / "half.npz").write_bytes((tmp_path / "s.npz").read_bytes()[:5000])
    with pytest.raises(FormatError):
        load_student(tmp_path / "half.npz")
    with pytest.raises(DataError):
        load_student(tmp_path / "none.npz")


def test_where_it_is_sure_it_is_right_as_often_as_it_says(taught):
    _, student = taught
    rng = random.Random(7)
    probability = student.keep_probability(min_score=3)
    decided = right = 0
    for _ in range(1500):
        level = rng.randrange(6)
        document = Document(id="1", text=text_of(level, rng), source="s")
        found = judge_by_student(document, student=student, probability=probability, min_score=3, confidence=0.9)
        if found is not None and found.score is not None:
            decided += 1
            right += (found.score >= 3) == (level >= 3)
    assert decided > 500
    assert right / decided > 0.9


def test_probabilities_never_fall_and_are_never_certain():
    rng = np.random.default_rng(0)
    grades = rng.random(500)
    probability = KeepProbability(grades, rng.random(500) < grades)
    found = [probability(grade) for grade in np.linspace(-1, 2, 200)]
    assert found == sorted(found)
    assert 0 < found[0] < 0.2
    assert 0.8 < found[-1] < 1
    for grade in (0.3, 0.5, 0.7):
        assert abs(probability(grade) - grade) < 0.2


@pytest.mark.parametrize(
    "text", ["", " ", "!", "a", "ß", "日本語", "x" * 100_000, "a b " * 50_000, "\ud800", "Ünïcödé WÖRDS 12"]
)
def test_features_of_any_text_are_finite_and_alone_its_own(text):
    index, value, dense = features(text)
    features("another text in between")
    same = features(text)
    assert (index == same[0]).all()
    assert (value == same[1]).all()
    assert len(dense) == DENSE
    assert np.isfinite(dense).all()
    assert len(index) == 0 or abs(value @ value - 1) < 1e-12


def test_words_are_the_features_and_not_their_places():
    one, other = features("the cat sat. The cat ran."), features("THE cat sat... the CAT ran")
    assert (one[0] == other[0]).all()
    words, moved = features("alpha beta"), features("zzz alpha beta")
    assert set(words[0]) <= set(moved[0])


def test_a_document_takes_less_than_a_millisecond(taught):
    _, student = taught
    text = text_of(3, random.Random(1)) * 5
    began = time.perf_counter()
    for _ in range(300):
        student.grade(text)
    assert (time.perf_counter() - began) / 300 < 1e-3


def test_score_with_a_student_asks_for_the_unsure_only(tmp_path, serve, score, scored, hydra):
    rng = random.Random(3)
    levels = [rng.randrange(6) for _ in range(300)]
    lines = [{"id": f"d{n}", "text": f"[[score={level}]] " + text_of(level, rng)} for n, level in enumerate(levels)]
    (tmp_path / "teach.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    server = serve()
    score(server, "teach.jsonl", "--answer", "json_schema", output="teach")
    said = hydra("fit", "teach", "--output", "student.npz").stdout
    assert "Spearman" in said
    more = [{"id": f"n{n}", "text": f"[[score={level}]] New. " + text_of(level, rng)} for n, level in enumerate(levels)]
    (tmp_path / "new.jsonl").write_text("\n".join(json.dumps(line) for line in more))
    before = server.stats()["requests"]
    usual = (
        "new.jsonl",
        "--answer",
        "json_schema",
        "--student",
        "student.npz",
        "--min-score",
        "3",
        "--confidence",
        "0.9",
    )
    score(server, *usual)
    asked = server.stats()["requests"] - before
    documents = scored()
    by_student = [one for one in documents if one["reason"].startswith("student")]
    assert len(by_student) > 50
    assert asked == 300 - len(by_student)
    assert np.mean([(one["score"] >= 3) == (levels[int(one["id"][1:])] >= 3) for one in by_student]) > 0.9
    assert "another" in score(server, *usual[:-2], "--confidence", "0.8", expect=2).stderr
