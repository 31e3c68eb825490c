# SPDX-License-Identifier: Apache-2.0
"""From a model's reply to a verdict, or to a stated fault. Nothing else becomes a score.

A reply counts only if exactly one verdict can be read from it: whole, every axis once and in range, with the code of
the document it was asked about. A server's schema is a help for the model, never a proof: some ignore ranges, some
ignore the schema.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from hydra_judge.rubric import Rubric

__all__ = [
    "FORMS",
    "Fault",
    "Reply",
    "Verdict",
    "read_fault",
    "read_reply",
    "response_options",
    "yes_odds",
    "yes_verdict",
]

# Answer forms in the order in which a server is probed for them; `p_yes` is chosen only by name.
FORMS = ("json_schema", "json_object_schema", "json_object", "text", "p_yes")

_REFUSAL = re.compile(
    r"^\W*(?:i['’]?m sorry|i am sorry|sorry,|i can(?:no|['’])t|i cannot|i won['’]t|i['’]?m (?:unable|not able)|i am (?:unable|not able)|as an ai)",
    re.IGNORECASE,
)
_LEAST = 1e-12  # probabilities below are a server's word for "excluded" (vLLM: a logarithm of -9999), no measurement
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a server answered to one request, as far as a verdict or a bill needs it.

    Attributes:
        content: text of the answer, "" if there was none.
        finish: the server's finish reason ("stop", "length", "content_filter", ...).
        refusal: text of a declared refusal, "" if none.
        first_token: (token, natural log of its probability) of the first answer token's alternatives.
        prompt_tokens: as billed.
        completion_tokens: as billed.
    """

    content: str = ""
    finish: str = ""
    refusal: str = ""
    first_token: tuple[tuple[str, float], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Reply":
        values = json.loads(text)
        values["first_token"] = tuple((token, logprob) for token, logprob in values["first_token"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Grades of one excerpt.

    Attributes:
        levels: level of each axis; {"p_yes": probability} for the form `p_yes`.
        score: in [rubric.low, rubric.high].
        reason: the model's own words, "" if it gave none.
    """

    levels: dict[str, float]
    score: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a reply is no verdict.

    Attributes:
        outcome: "unparsable", "refused" or "filtered".
        detail: what was wrong, in words that can be shown to the model.
    """

    outcome: str
    detail: str


def response_options(form: str, *, rubric: Rubric) -> dict[str, Any]:
    """The part of a chat request that binds the form of its answer.

    Args:
        form: one of `FORMS`.
        rubric: names the axes and their levels.
    """
    if form == "p_yes":
        return {"logprobs": True, "top_logprobs": 20}
    levels = {"type": "integer", "enum": list(range(rubric.low, rubric.high + 1))}
    properties = {"code": {"type": "string"}, "reason": {"type": "string"}}
    properties |= {axis.name: levels for axis in rubric.axes}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    if form == "json_schema":
        named = {"name": "verdict", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if form == "json_object_schema":  # the dialect of llama.cpp
        return {"response_format": {"type": "json_object", "schema": schema}}
    return {"response_format": {"type": "json_object"}} if form == "json_object" else {}


def read_fault(reply: Reply) -> Fault | None:
    """Why a reply is no answer, whatever its form."""
    if reply.finish == "content_filter":
        return Fault(outcome="filtered", detail="the answer was withheld by the server's content filter")
    if reply.refusal:
        return Fault(outcome="refused", detail="the request was refused")
    return None


def read_reply(reply: Reply, *, rubric: Rubric, code: str) -> Verdict | Fault:
    """Reads the verdict of one reply in any form but `p_yes`, for which see `yes_odds`.

    Args:
        reply: what the server answered.
        rubric: by which it was asked.
        code: what a JSON answer must repeat.

    Returns:
        The verdict, or why there is none.
    """
    fault = read_fault(reply)
    if fault is not None:
        return fault
    if reply.finish == "length":
        return Fault(outcome="unparsable", detail="the answer was cut off before its end; be shorter")
    if not reply.content.strip():
        return Fault(outcome="unparsable", detail="the answer was empty")
    read = [_verdict(found, rubric, code) for found in _objects(reply.content)]
    verdicts = [one for one in read if isinstance(one, Verdict)]
    if verdicts and all(one.levels == verdicts[0].levels for one in verdicts):
        return verdicts[0]
    if verdicts:
        return Fault(outcome="unparsable", detail="the answer holds several objects that contradict each other")
    if read:
        return next(one for one in read if isinstance(one, Fault))
    if _REFUSAL.match(reply.content):
        return Fault(outcome="refused", detail="the request was refused")
    return Fault(outcome="unparsable", detail="the answer holds no complete JSON object")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _objects(content: str) -> list[dict[str, Any]]:
    """Every top-level JSON object in a text, whatever stands around it."""
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates)
    found, position = [], content.find("{")
    while position >= 0:
        parsed, end = _decode(decoder, content, position)
        if parsed is not None:
            found.append(parsed)
        position = content.find("{", max(end, position + 1))
    return found


def _decode(decoder: json.JSONDecoder, content: str, position: int) -> tuple[dict[str, Any] | None, int]:
    try:
        return decoder.raw_decode(content, position)
    except (ValueError, RecursionError):
        pass
    repaired = _TRAILING_COMMA.sub(r"\1", content[position:])
    try:
        parsed, length = decoder.raw_decode(repaired)
    except (ValueError, RecursionError):
        return None, position + 1
    # The repair shortened the text by one comma at a time, so the end lies at least this far on.
    return parsed, position + length


def _verdict(found: dict[str, Any], rubric: Rubric, code: str) -> Verdict | Fault:
    levels: dict[str, float] = {}
    for axis in rubric.axes:
        level = _level(found.get(axis.name))
        if level is None:
            return Fault(outcome="unparsable", detail=f'"{axis.name}" must be a whole number')
        if not rubric.low <= level <= rubric.high:
            return Fault(outcome="unparsable", detail=f'"{axis.name}" must lie from {rubric.low} to {rubric.high}')
        levels[axis.name] = level
    if str(found.get("code", "")).strip().lower() != code:
        return Fault(outcome="unparsable", detail=f'"code" must be "{code}"')
    reason = found.get("reason", "")
    reason = " ".join(reason.split())[:500] if isinstance(reason, str) else ""
    return Verdict(levels=levels, score=rubric.score(levels), reason=reason)


def _level(value: Any) -> int | None:
    """A whole number from what models write for one: 3, 3.0 or "3"."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,2}\s*", value):
        return int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or value in (math.inf, -math.inf)
    ):
        return None
    return int(value) if value == int(value) else None


def yes_odds(reply: Reply) -> float | Fault:
    """Natural log of the odds of "yes" to "no" among the first token's alternatives.

    Source: Sachdeva et al. 2024, "How to Train Data-Efficient LLMs" (Ask-LLM).
    """
    listed = [(token.strip().lower(), math.exp(logprob)) for token, logprob in reply.first_token if logprob <= 0]
    if not listed:
        return Fault(outcome="unparsable", detail="the server returned no log probabilities")
    mass = {word: sum(share for token, share in listed if token == word) for word in ("yes", "no")}
    if mass["yes"] + mass["no"] < 0.01:
        return Fault(outcome="unparsable", detail="the answer must be Yes or No")
    if len(listed) == 1:  # nothing is known of the other answer
        return Fault(outcome="unparsable", detail="the server lists no alternatives to its answer (top_logprobs)")
    # An answer outside the listed alternatives is less likely than the last of them, not impossible.
    least = max(min(share for _, share in listed), _LEAST)
    return math.log(max(mass["yes"], least)) - math.log(max(mass["no"], least))


def yes_verdict(odds: list[float], rubric: Rubric) -> Verdict:
    """Score from the log odds of the question and, if it was asked, of its opposite.

    Some texts make a model say Yes to whatever it is asked; in the difference of a question and its opposite that
    cancels, as it does with people. If the opposite tells little else, less of it is taken off.
    """
    weight = rubric.opposite_weight
    mean = odds[0] if len(odds) == 1 else (odds[0] - weight * odds[1]) / (1 + weight)
    share = round(1 / (1 + math.exp(-mean)), 6)
    score = round(rubric.low + share * (rubric.high - rubric.low), 6)
    return Verdict(levels={"p_yes": share}, score=score, reason="")
