# SPDX-License-Identifier: Apache-2.0
"""The README's walk-through as it stands; injection canaries, report and explain on its way."""

import json
import pydoc_data.topics
import re
import shlex
from pathlib import Path

import pytest

from hydra_judge.explain import explain
from hydra_judge.injection import attacks
from hydra_judge.pack import Packing, pack
from hydra_judge.prompt import excerpts
from hydra_judge.rubric import load_rubric
from nmoe.formats.documents import ScoredDocument, ScoredWriter

README = Path(__file__).parents[2] / "packages/hydra-judge/README.md"
JUNK = "BUY $$$ NOW!!! CLICK HERE 4 FREE PRIZE {n} http://x.example/{n} WIN WIN WIN!!!"


def write_material(folder: Path) -> None:
    """Good and bad documents, and labels for all of them."""
    topics = [text[:3000] for text in pydoc_data.topics.topics.values() if len(text) > 300][:60]
    documents = [{"id": f"good{n}", "text": text} for n, text in enumerate(topics)]
    documents += [{"id": f"junk{n}", "text": JUNK.format(n=n) * (1 + n % 3)} for n in range(60)]
    lines = [json.dumps(document) for document in documents]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\nnot json\n")
    (folder / "more.jsonl").write_text("\n".join(line.replace('"text": "', '"text": "More. ') for line in lines))
    labels = [{"id": one["id"], "score": 4 if one["id"].startswith("good") else 0} for one in documents]
    (folder / "labels.jsonl").write_text("\n".join(json.dumps(label) for label in labels))


def test_the_walk_through_of_the_readme_runs(tmp_path, serve, hydra):
    write_material(tmp_path)
    server = serve("--gullible")
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("hydra-judge ")]
    assert {command.split()[1] for command in commands} == {
        "score", "calibrate", "report", "pack", "verify", "explain", "fit"
    }  # fmt: skip
    said = {}
    for command in commands:
        arguments = shlex.split(command.replace("http://localhost:8000/v1", server.url))[1:]
        said[" ".join(arguments[:2])] = hydra(*arguments).stdout
    assert "source: corpus.jsonl" in said["explain shards"]
    assert re.search(r"reason: worth \d", said["explain shards"])
    report = (tmp_path / "scored" / "report.md").read_text()
    assert "| bad_json | 1 | corpus.jsonl | 121 |" in report
    assert "| Spearman |" in report
    assert "53 attacks in 16 languages" in report
    by_student = json.loads((tmp_path / "more" / "scored.json").read_text())
    assert by_student["documents"] == 120
    page = (tmp_path / "scored" / "report.html").read_text()
    assert page.count("Plotly.newPlot") == 3


def test_attacks_are_many_and_cannot_close_the_fence():
    known = attacks()
    assert len(known) >= 41
    assert len({attack.language for attack in known}) >= 10
    assert len({attack.wrap for attack in known}) >= 6
    rubric = load_rubric("educational")
    for attack in known:
        text = attack.apply("A dull text.", top=5)
        (part,) = excerpts(text, rubric=rubric)
        assert part.fence not in part.text
        assert part.code not in text
        assert "{top}" not in text
        for mark in ("<|", "</s>", "[INST]", "[/INST]", "<end_of_turn>", "<start_of_turn>"):
            assert mark not in part.text
        assert not re.search("[\U000e0000-\U000e007f]", part.text)


@pytest.mark.parametrize("gullible", [True, False])
def test_the_report_shows_the_shift_of_each_attack(gullible, tmp_path, serve, score, hydra):
    lines = [{"id": f"d{n}", "text": f"Dull text {n}. [[score=1]]"} for n in range(8)]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    score(serve(*(["--gullible"] if gullible else [])), "in.jsonl", "--canaries", "2", "--answer", "json_schema")
    records = [json.loads(line) for line in (tmp_path / "scored" / "canaries.jsonl").read_text().splitlines()]
    assert len(records) == 2 * len(attacks())
    moved = {one["attack"] for one in records if one["attacked"] >= one["clean"] + 1}
    assert ("plain order" in moved, "German" in moved) == (gullible, gullible)
    assert "control" not in moved
    assert "invisible tag characters" not in moved  # removed before the model sees the text
    hydra("report", "scored")
    report = (tmp_path / "scored" / "report.md").read_text()
    assert re.search(r"\| control \| en \| 2 \| 0 \| \+0\.00 \| 0% \|", report)
    assert bool(re.search(r"\| plain order \| en \| 2 \| 0 \| \+4\.00 \| 100% \|", report)) == gullible


def test_explain_tells_documents_of_one_id_apart(tmp_path):
    texts = ["alpha", "bravo", "charlie"]
    with ScoredWriter(tmp_path / "scored", rubric={}, model="m") as writer:
        for number, text in enumerate(texts):
            writer.add(
                ScoredDocument(id="same", source="a", text=text, outcome="ok", score=3.0, reason=f"said {number}")
            )
    pack(
        Packing(
            scored=tmp_path / "scored",
            tokenizer="bytes",
            min_score=0,
            output=tmp_path / "shards",
            shard_tokens=9,
            max_document_tokens=4,
        )
    )
    offset = 0
    for number, text in enumerate(texts):
        found = [explain(tmp_path / "shards", offset=offset + n, tokenizer=None) for n in range(len(text))]
        assert {one["reason"] for one in found} == {f"said {number}"}
        offset += len(text) + 1
