# SPDX-License-Identifier: Apache-2.0
"""Agreement with people: the statistics against scipy and scikit-learn, thresholds, the command."""

import dataclasses
import json

import numpy as np
import pytest

from hydra_judge.agreement import (
    bootstrap,
    confusion,
    mean_absolute_error,
    precision_threshold,
    quadratic_kappa,
    share_threshold,
    spearman,
)
from hydra_judge.calibrate import Pairs, calibrate


def random_grades(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, count)
    return labels, np.clip(labels + rng.integers(-2, 3, count), 0, 5)


@pytest.mark.parametrize("seed", range(8))
def test_statistics_equal_those_of_scipy_and_sklearn(seed):
    from scipy.stats import spearmanr
    from sklearn.metrics import cohen_kappa_score, confusion_matrix
    from sklearn.metrics import mean_absolute_error as their_error

    labels, scores = random_grades(seed, 30 + 100 * seed)
    fine = scores + np.random.default_rng(seed).normal(size=len(scores)).round(1)
    assert abs(spearman(labels, scores) - float(spearmanr(labels, scores)[0])) < 1e-12  # type: ignore[arg-type]
    assert abs(spearman(labels, fine) - float(spearmanr(labels, fine)[0])) < 1e-12  # type: ignore[arg-type]
    levels = list(range(6))
    theirs = cohen_kappa_score(labels, scores, weights="quadratic", labels=levels)
    assert abs(quadratic_kappa(labels, scores, low=0, high=5) - theirs) < 1e-12
    assert abs(mean_absolute_error(labels, fine) - float(their_error(labels, fine))) < 1e-12
    assert (confusion(labels, scores, low=0, high=5) == confusion_matrix(labels, scores, labels=levels)).all()


def test_constant_grades_have_no_agreement_and_no_crash():
    constant, other = np.full(20, 3), np.arange(20) % 6
    assert np.isnan(spearman(constant, other))
    assert np.isnan(quadratic_kappa(constant, constant, low=0, high=5))
    assert np.isnan(bootstrap(spearman, constant, other, resamples=20)).all()


def test_a_bootstrap_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        one = rng.normal(size=60)
        low, high = bootstrap(mean_absolute_error, one, np.zeros(60), resamples=200, seed=trial)
        covered += low <= np.sqrt(2 / np.pi) <= high
    assert 175 <= covered <= 199


def test_thresholds_are_monotone_and_keep_what_they_say():
    rng = np.random.default_rng(3)
    for _ in range(50):
        scores = rng.integers(0, 26, rng.integers(5, 200)) / 5
        good = rng.random(len(scores)) < scores / 5
        wanted = np.linspace(0.05, 1, 20)
        by_share = [share_threshold(scores, share=share) for share in wanted]
        by_precision = [precision_threshold(scores, good, precision=precision) for precision in wanted]
        assert by_share == sorted(by_share, reverse=True)
        assert by_precision == sorted(by_precision)
        for share, cut in zip(wanted, by_share, strict=True):
            assert (scores >= cut).mean() <= share + 1e-12
            assert all((scores >= lower).mean() > share for lower in np.unique(scores) if lower < cut)
        for precision, cut in zip(wanted, by_precision, strict=True):
            assert not (scores >= cut).any() or good[scores >= cut].mean() >= precision - 1e-12


def test_a_threshold_is_reported_on_the_half_that_did_not_choose_it():
    # The halves disagree: in the first, 4 and above is good; in the second, nothing is.
    scores = np.tile(np.arange(6.0), 20)
    first = np.arange(120) < 60
    labels = np.where(first & (scores >= 4), 5.0, 0.0)
    pairs = Pairs(scores=scores, labels=labels, first_half=first, low=0, high=5, without_score=0)
    (cut,) = calibrate(pairs, good=3, shares=[], precisions=[0.9], resamples=10).thresholds
    assert (cut.threshold, cut.precision, cut.recall) == (4.0, 0.0, None)
    assert (cut.chosen_on, cut.measured_on) == (60, 60)
    assert cut.keep_share == pytest.approx(2 / 6)
    none = dataclasses.replace(pairs, labels=np.zeros(120))
    line = calibrate(none, good=3, shares=[], precisions=[0.9], resamples=10).lines()[-1]
    assert line.startswith("precision 0.9: no score does that")
    assert "inf" not in line  # `pack` would refuse it


def test_the_command_joins_labels_by_id_and_writes_page_and_numbers(tmp_path, serve, score, hydra, corpus):
    corpus(count=80)
    score(serve(), "corpus.jsonl")
    labels = [{"id": f"d{n}", "score": min(5, n % 6 + (n % 7 == 0))} for n in range(80)] + [
        {"id": "unknown", "score": 1}
    ]
    labels.append({"id": "d1", "score": 2})  # a second person
    (tmp_path / "labels.jsonl").write_text("\n".join(json.dumps(label) for label in labels))
    said = hydra("calibrate", "scored", "--labels", "labels.jsonl", "--keep-share", "0.4", "--precision", "0.9").stdout
    assert "80 with score and label, 1 labelled without" in said
    found = json.loads((tmp_path / "scored" / "calibration.json").read_text())
    truth = np.array([1.5 if n == 1 else min(5, n % 6 + (n % 7 == 0)) for n in range(80)])
    judged = np.arange(80) % 6
    assert found["mae"][0] == pytest.approx(np.abs(truth - judged).mean())
    assert found["spearman"][0] == pytest.approx(spearman(truth, judged))
    assert found["spearman"][1] < found["spearman"][0] < found["spearman"][2]
    assert [one["wanted"] for one in found["thresholds"]] == ["keep share", "precision"]
    page = (tmp_path / "scored" / "calibration.html").read_text()
    assert "plotly" in page.lower()
    for bad, says in [
        ('{"id": "d1"}', "expected"),
        ('{"id": "d1", "score": 9}', "scale"),
        ('{"id": "x", "score": 1}', "at least 10"),
    ]:
        (tmp_path / "bad.jsonl").write_text(bad)
        assert says in hydra("calibrate", "scored", "--labels", "bad.jsonl", expect=2).stderr
