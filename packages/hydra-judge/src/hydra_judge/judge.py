# SPDX-License-Identifier: Apache-2.0
"""From one document to its scored record: excerpts, votes, repeated questions, and what their answers add up to.

What is asked depends on the document, the rubric and the settings alone, never on timing, so a run that was killed and
started again asks the same questions, finds their answers in the cache and writes the same bytes.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from hydra_judge.backends import RejectedError, ServerError
from hydra_judge.cache import cache_key
from hydra_judge.engine import Request
from hydra_judge.prompt import PROMPT_VERSION, Excerpt, excerpts, messages, retry_messages
from hydra_judge.rubric import Rubric
from hydra_judge.verdict import (
    FORMS,
    Fault,
    Reply,
    Verdict,
    read_fault,
    read_reply,
    response_options,
    yes_odds,
    yes_verdict,
)
from nmoe.errors import EnvironmentFault
from nmoe.formats.documents import Document, Outcome, ScoredDocument

__all__ = ["Ask", "Judge", "choose_form"]

T = TypeVar("T")

Ask = Callable[[Request], Awaitable[Reply]]

# A character of English is a quarter of a token; a third is the careful side for budgets.
_CHARS_PER_TOKEN = 3

_PROBE = Document(
    id="probe",
    source="probe",
    text=(
        "Water boils at a lower temperature on a mountain than at the sea, because the air above it weighs less. "
        "At 3,000 metres it boils near 90 degrees Celsius, so potatoes take longer to cook."
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """How documents are judged.

    Attributes:
        rubric: by what.
        model: by whom; the name that the servers know.
        form: answer form, one of `hydra_judge.verdict.FORMS`.
        votes: independent answers for each excerpt, >= 1.
        temperature: of sampling; None leaves it to the server.
        attempts: times that one question is asked until its answer can be used, >= 1.
        options: further keys of the request body; None removes a key.
        faults_allowed: see `hydra_judge.engine.Request`.
    """

    rubric: Rubric
    model: str
    form: str
    votes: int = 1
    temperature: float | None = 0.0
    attempts: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    faults_allowed: int | None = None

    def settings(self) -> dict[str, Any]:
        """Everything that decides the scores, for the files that hold them."""
        return {
            "name": self.rubric.name,
            "sha256": self.rubric.sha256,
            "low": self.rubric.low,
            "high": self.rubric.high,
            "prompt_version": PROMPT_VERSION,
            "form": self.form,
            "votes": self.votes,
            "temperature": self.temperature,
            "attempts": self.attempts,
            "options": self.options,
        }

    def request(self, excerpt: Excerpt, chat: list[dict[str, str]], *, vote: int, attempt: int, order: int) -> Request:
        """The request that asks for one verdict.

        Args:
            excerpt: what is judged.
            chat: messages, with earlier attempts.
            vote: number of the vote, from 0.
            attempt: number of the attempt, from 0; later ones leave more room for the answer.
            order: number of the document in this run; does not reach the server.
        """
        answer_tokens = 1 if self.form == "p_yes" else self.rubric.answer_tokens * (1 + min(attempt, 2))
        body: dict[str, Any] = {"model": self.model, "messages": chat, "max_tokens": answer_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.votes > 1:
            body["seed"] = vote
        body |= response_options(self.form, rubric=self.rubric) | self.options
        body = {key: value for key, value in body.items() if value is not None}
        decides = {
            "prompt": PROMPT_VERSION,
            "rubric": self.rubric.sha256,
            "body": body,
            "part": [excerpt.part, excerpt.parts],
            "vote": [vote, attempt],
        }
        return Request(
            key=cache_key(decides),
            body=body,
            order=order,
            prompt_tokens=sum(len(message["content"]) for message in chat) // _CHARS_PER_TOKEN,
            answer_tokens=answer_tokens,
            faults_allowed=self.faults_allowed,
        )

    async def document(self, document: Document, ask: Ask, *, order: int = 0) -> ScoredDocument:
        """Judges one document.

        Args:
            document: what to judge.
            ask: answers a request.
            order: number of the document in this run.
        """
        parts = excerpts(document.text, rubric=self.rubric)
        asked = [self._vote(part, ask, vote=vote, order=order) for part in parts for vote in range(self.votes)]
        answers = await _all(asked)
        by_part = [answers[start : start + self.votes] for start in range(0, len(answers), self.votes)]
        windows = [[part.start, part.end] for part in parts]
        return _scored(document, by_part, windows=windows, votes=self.votes)

    async def probe(self, ask: Ask) -> None:
        """Asks once about a short text of our own, as about a document: whether a server takes such requests at all."""
        await replace(self, votes=1, attempts=1).document(_PROBE, ask)

    async def _vote(self, excerpt: Excerpt, ask: Ask, *, vote: int, order: int) -> Verdict | Fault:
        """One verdict on one excerpt; an answer that cannot be used is shown to the model with what was wrong."""
        if self.form == "p_yes":
            return await self._yes_or_no(excerpt, ask, vote=vote, order=order)
        chat = messages(excerpt, rubric=self.rubric, form=self.form)
        fault = Fault(outcome="failed", detail="not asked")
        for attempt in range(self.attempts):
            try:
                reply = await ask(self.request(excerpt, chat, vote=vote, attempt=attempt, order=order))
            except RejectedError as rejected:
                return Fault(outcome=rejected.outcome, detail=str(rejected))
            read = read_reply(reply, rubric=self.rubric, code=excerpt.code)
            if isinstance(read, Verdict):
                return read
            fault = read
            if fault.outcome == "filtered":  # asking again would bring the same
                break
            first = messages(excerpt, rubric=self.rubric, form=self.form)
            chat = retry_messages(first, answer=reply.content or reply.refusal, fault=fault.detail)
        return fault

    async def _yes_or_no(self, excerpt: Excerpt, ask: Ask, *, vote: int, order: int) -> Verdict | Fault:
        """One verdict from the question and its opposite, each asked once: asking again would bring the same."""
        both = (False, True) if self.rubric.opposite else (False,)
        found = await _all([self._odds(excerpt, ask, opposite=one, vote=vote, order=order) for one in both])
        odds = [one for one in found if isinstance(one, float)]
        fault = next((one for one in found if isinstance(one, Fault)), None)
        return fault or yes_verdict(odds, self.rubric)

    async def _odds(self, excerpt: Excerpt, ask: Ask, *, opposite: bool, vote: int, order: int) -> float | Fault:
        chat = messages(excerpt, rubric=self.rubric, form=self.form, opposite=opposite)
        try:
            reply = await ask(self.request(excerpt, chat, vote=vote, attempt=0, order=order))
        except RejectedError as rejected:
            return Fault(outcome=rejected.outcome, detail=str(rejected))
        return read_fault(reply) or yes_odds(reply)


async def _all(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all coroutines, in order; all have ended before an error of one is raised."""
    if len(asked) == 1:
        return [await asked[0]]
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


def _scored(
    document: Document, by_part: list[list[Verdict | Fault]], *, windows: list[list[int]], votes: int
) -> ScoredDocument:
    """Adds up the verdicts [part][vote]: mean over excerpts and votes; each excerpt needs most of its votes."""
    base = {"id": document.id, "text": document.text, "source": document.source, "line": document.line}
    verdicts = [[one for one in part if isinstance(one, Verdict)] for part in by_part]
    if any(2 * len(part) <= votes for part in verdicts):
        faults = [one for part in by_part for one in part if isinstance(one, Fault)]
        first = faults[0]
        return ScoredDocument(**base, outcome=cast(Outcome, first.outcome), reason=first.detail, windows=windows)
    axes = {
        name: _mean([_mean([one.levels[name] for one in part]) for part in verdicts]) for name in verdicts[0][0].levels
    }
    reason = " | ".join(part[0].reason for part in verdicts if part[0].reason)
    score = _mean([_mean([one.score for one in part]) for part in verdicts])
    # Votes of a document: the n-th usable verdict of each excerpt, averaged.
    shared = min(len(part) for part in verdicts)
    spread = [_mean([part[vote].score for part in verdicts]) for vote in range(shared)] if votes > 1 else []
    return ScoredDocument(**base, outcome="ok", score=score, axes=axes, reason=reason, windows=windows, votes=spread)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 6)


async def choose_form(make: Callable[[str], Judge], ask: Ask) -> tuple[str, str]:
    """Finds the strictest answer form that the servers understand, by judging a short text in each.

    Args:
        make: gives the judge for a form.
        ask: answers a request.

    Returns:
        The form, and what was tried before it, for the log.

    Raises:
        EnvironmentFault: if no form brings a verdict.
    """
    tried = []
    for form in FORMS:
        if form == "p_yes":
            continue
        try:
            found = await make(form).document(_PROBE, ask)
        except ServerError as fault:
            tried.append(f"{form}: {fault}")
            continue
        if found.outcome == "ok":
            return form, "; ".join(tried)
        tried.append(f"{form}: {found.outcome}, {found.reason}")
    listed = json.dumps(tried)
    raise EnvironmentFault(f"the model gave no usable answer in any form; name one with --answer. Tried: {listed}")
