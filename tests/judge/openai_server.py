# SPDX-License-Identifier: Apache-2.0
"""A server that speaks the OpenAI protocol over a real socket, grades by a formula, and misbehaves on demand.

    python tests/judge/openai_server.py --port 0        prints its base URL and serves until it is killed

The grade of a document depends on its text alone (`grade`), so a test knows what every score must be. `[[score=N]]` in
a text sets it. Misbehaviour is drawn for each request (`--faults 429=0.1,drop=0.02`); a document gets at most
`--bad-answers` unusable answers, so that a judge that asks again always ends with the right one.

GET /stats tells what was asked and answered, POST /control changes options while it runs.
"""

import argparse
import asyncio
import hashlib
import json
import math
import random
import re
import sys
import time
from collections import Counter
from typing import Any

from openai_batches import poll_batch, start_batch, store_file

TRANSPORT_FAULTS = ("429", "429_after", "500", "503", "529", "timeout", "drop", "drop_late", "garbled")
ANSWER_FAULTS = (
    "fenced", "prose", "trailing_comma", "truncated", "out_of_range", "wrong_type", "missing_axis", "wrong_code", "refused",
    "declared_refusal", "empty", "two_objects",
)  # fmt: skip
HARMLESS = ("fenced", "prose", "trailing_comma")
DIALECTS = ("json_schema", "json_object_schema", "json_object", "text", "logprobs_only")

_DOCUMENT = re.compile(r"<document ([0-9a-f]{32})>\n(.*)\n</document \1>", re.DOTALL)
_INJECTED = re.compile(
    r"(?:score|grade|rating|punkte|note|puntuaci\S*|оценк\S*|评分|スコア)\D{0,40}([0-9])|([0-9])\s*/\s*5", re.IGNORECASE
)
_WORD = re.compile(r"[^\W\d_]+")


def grade(text: str) -> float:
    """Quality of a text in [0, 5]: prose in sentences scores high, shouting, links and gibberish low."""
    marked = re.search(r"\[\[score=(\d)\]\]", text)
    if marked:
        return float(marked[1])
    words = _WORD.findall(text)
    if not words:
        return 0.0
    letters = sum(len(word) for word in words)
    points = 5.0
    points -= 4.0 * max(0.0, 0.75 - letters / max(len(text.strip()), 1))
    points -= 3.0 * sum(word.isupper() and len(word) > 1 for word in words) / len(words)
    points -= 2.0 * abs(letters / len(words) - 4.8) / 2
    points -= 3.0 * max(0.0, 0.6 - len({word.lower() for word in words}) / min(len(words), 200))
    points -= 1.5 * (not re.search(r"[a-z]\.\s", text + " "))
    points -= 0.5 * len(re.findall(r"https?://|!!|\$\$", text))
    return min(max(points, 0.0), 5.0)


class State:
    """Options and counts of one server."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.random = random.Random(options.seed)
        self.faults: dict[str, float] = parse_faults(options.faults)
        self.outage_until = 0.0
        self.counts: Counter[str] = Counter()
        self.asked: Counter[bytes] = Counter()
        self.answered: Counter[bytes] = Counter()
        self.bad_answers: Counter[str] = Counter()
        self.after_answer = self.unread = 0
        self.in_flight = self.most_in_flight = 0
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}

    def draw(self) -> str:
        """Name of the fault of this request, "" for none."""
        point = self.random.random()
        for name, share in self.faults.items():
            if point < share:
                return name
            point -= share
        return ""


def parse_faults(text: str) -> dict[str, float]:
    """ "NAME=SHARE,..." as a table."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    unknown = [name for name, _, _ in pairs if name not in (*TRANSPORT_FAULTS, *ANSWER_FAULTS)]
    if unknown:
        raise SystemExit(f"unknown faults {unknown}; known are {(*TRANSPORT_FAULTS, *ANSWER_FAULTS)}")
    return {name: float(share) for name, _, share in pairs}


def complete(state: State, body: dict[str, Any], fault: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of a chat completion."""
    refusal = _unsupported(state.options.dialect, body)
    if refusal:
        return refusal
    if "top_q" in body:
        return 400, {"error": {"message": "Unknown parameter: 'top_q'.", "type": "invalid_request_error"}}
    messages = body["messages"]
    asked = messages[-1]["content"]
    if body.get("logprobs"):  # the text in a turn of its own, an assistant's word, the question
        shown = messages[-3]["content"]
        found = _DOCUMENT.search(shown)
        fence, text = found.groups() if found else ("", shown.removeprefix("Text:\n"))
    else:  # behind the first question there may be attempts
        found = _DOCUMENT.search(messages[1]["content"])
        if not found:
            return 400, {"error": {"message": "no document", "type": "invalid_request_error", "code": None}}
        fence, text = found.groups()
    if len(text) > state.options.context:
        message = f"This model's maximum context length is {state.options.context} characters."
        return 400, {"error": {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}}
    if "[[invalid]]" in text:
        return 400, {"error": {"message": "invalid prompt", "type": "invalid_request_error"}}
    if "[[filtered]]" in text:
        return 200, _completion(messages, "", finish="content_filter")
    if "[[refused]]" in text:
        return 200, _completion(messages, "I'm sorry, but I can't help with that.")
    points = grade(text)
    if state.options.gullible and (told := _INJECTED.findall(text)):
        points = float(max(int(one or other) for one, other in told))
    if body.get("logprobs"):
        share = min(max(points / 5, 0.001), 0.999)
        share = 1 - share if "Is this junk" in asked else share
        return 200, _completion(messages, "Yes" if share >= 0.5 else "No", p_yes=share)
    if fault in ANSWER_FAULTS and fault not in HARMLESS:
        if state.bad_answers[fence] >= state.options.bad_answers:
            fault = ""
        state.bad_answers[fence] += 1
    return 200, _answer(messages, fence, points, fault)


def _unsupported(dialect: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """What servers answer to a response format that they do not know: each its own way."""
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema" and dialect != "json_schema":
        return 500, {"error": {"message": "1 validation error", "type": "internal_server_error"}}
    if "schema" in form and dialect not in ("json_object_schema", "json_schema"):
        return 400, {"error": {"message": "unknown field response_format.schema", "type": "invalid_request_error"}}
    if form.get("type") == "json_object" and dialect in ("text", "logprobs_only"):
        return 400, {"error": {"message": "response_format is not supported", "type": "invalid_request_error"}}
    if not body.get("logprobs") and dialect == "logprobs_only":
        return 200, _completion(body["messages"], "The text is quite good, I would say.")
    return None


def _answer(messages: list[dict[str, str]], fence: str, points: float, fault: str) -> dict[str, Any]:
    axes = re.findall(r'"([a-z_]+)": <\d+-(\d+)>', messages[1]["content"])
    level = round(points)
    values: dict[str, Any] = {"code": fence[:6], "reason": f"worth {level}", **{name: level for name, _ in axes}}
    if fault == "out_of_range":
        values[axes[0][0]] = 99
    elif fault == "wrong_type":
        values[axes[0][0]] = "four"
    elif fault == "missing_axis":
        del values[axes[-1][0]]
    elif fault == "wrong_code":
        values["code"] = "ffffff" if values["code"] != "ffffff" else "000000"
    text = json.dumps(values)
    if fault == "fenced":
        text = f"```json\n{text}\n```"
    elif fault == "prose":
        text = f"Here is my verdict:\n{text}\nI hope this helps."
    elif fault == "trailing_comma":
        text = f"{text[:-1]},}}"
    elif fault == "truncated":
        return _completion(messages, text[: len(text) // 2], finish="length")
    elif fault == "refused":
        text = "I'm sorry, but I can't help with that."
    elif fault == "declared_refusal":
        return _completion(messages, "", refusal="I will not grade this.")
    elif fault == "empty":
        text = ""
    elif fault == "two_objects":
        text += json.dumps({**values, axes[0][0]: (level + 1) % 6})
    return _completion(messages, text)


def _completion(
    messages: list[dict[str, str]],
    content: str,
    *,
    finish: str = "stop",
    refusal: str | None = None,
    p_yes: float | None = None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": content, "refusal": refusal},
        "finish_reason": finish,
    }
    if p_yes is not None:
        top = [("Yes", p_yes * 0.98), ("No", (1 - p_yes) * 0.98), ("Maybe", 0.02)]
        listed = [{"token": token, "logprob": math.log(share)} for token, share in top]
        choice["logprobs"] = {"content": [{"token": content, "logprob": -0.1, "top_logprobs": listed}]}
    prompt = sum(len(message["content"]) for message in messages) // 4
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "test-model",
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(content) // 4 + 1, "total_tokens": prompt},
    }


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection; requests on it come one after the other."""

    def __init__(self, state: State):
        self.state = state
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None
        self.answer_is_out = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if time.monotonic() < self.state.outage_until:
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        # The kernel resets a connection that is closed with something unread in it, or written to after it was closed.
        self.state.unread += self.answer_is_out and isinstance(exc, ConnectionError)
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        self.answer_is_out = False  # a client that sends the next request has read the last answer
        self.task = asyncio.ensure_future(self.serve(head, rest[:size]))

    async def serve(self, head: bytes, body: bytes) -> None:
        method, path = head.split(b" ", 2)[:2]
        if path.endswith(b"/chat/completions"):
            state = self.state
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
            try:
                await self.chat(head, body)
            finally:
                state.in_flight -= 1
            return
        status, value = manage(self.state, method.decode(), path.decode(), head, body)
        self.reply(status, value)

    async def chat(self, head: bytes, body: bytes) -> None:
        state, digest = self.state, hashlib.sha256(body).digest()
        if time.monotonic() < state.outage_until:
            self.transport.abort()  # type: ignore[attr-defined]
            return
        if (
            state.options.key
            and f"authorization: bearer {state.options.key}\r\n".encode() not in head.lower() + b"\r\n"
        ):
            message = (
                "Incorrect API key provided: " + head.decode(errors="replace").partition("earer ")[2].partition("\r")[0]
            )
            self.reply(401, {"error": {"message": message, "type": "invalid_request_error", "code": "invalid_api_key"}})
            return
        if state.options.redirect:
            self.reply(307, {}, {"Location": state.options.redirect})
            return
        state.counts["requests"] += 1
        state.asked[digest] += 1
        state.after_answer += state.answered[digest] > 0
        fault = state.draw()
        state.counts[fault or "calm"] += 1
        if fault == "timeout":
            await asyncio.sleep(3600)
        if fault == "drop":
            self.transport.abort()  # type: ignore[attr-defined]
            return
        if fault in ("429", "429_after"):
            headers = {"Retry-After": state.options.retry_after} if fault == "429_after" else {}
            self.reply(429, {"error": {"message": "slow down", "type": "rate_limit", "code": "rate_limit"}}, headers)
            return
        await asyncio.sleep(state.options.latency * (1 + state.options.jitter * (state.random.random() - 0.5)))
        if fault in ("500", "503", "529"):
            self.reply(int(fault), {"error": {"message": "overloaded", "type": "server_error"}})
            return
        if time.monotonic() < state.outage_until:
            self.transport.abort()  # type: ignore[attr-defined]
            return
        status, value = complete(state, json.loads(body), fault)
        if fault == "garbled":
            self.send(200, b"<html>bad gateway</html>")
        elif fault == "drop_late":
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")  # type: ignore[attr-defined]
            self.transport.close()
        elif not self.transport.is_closing():
            state.answered[digest] += status == 200
            state.counts["answered"] += status == 200
            self.answer_is_out = status == 200
            self.reply(status, value)

    def reply(self, status: int, value: Any, headers: dict[str, Any] | None = None) -> None:
        self.send(status, value if isinstance(value, bytes) else json.dumps(value).encode(), headers)

    def send(self, status: int, data: bytes, headers: dict[str, Any] | None = None) -> None:
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
        self.transport.write(head.encode() + data)  # type: ignore[attr-defined]


def manage(state: State, method: str, path: str, head: bytes, body: bytes) -> tuple[int, Any]:
    """Everything but chat: counts, control, files and batches."""
    if path == "/stats":
        return 200, {
            **state.counts,
            "asked": len(state.asked),
            "answered_bodies": len(state.answered),
            "asked_after_answer": state.after_answer,
            "unread": state.unread,
            "in_flight": state.in_flight,
            "most_in_flight": state.most_in_flight,
        }
    if path == "/control":
        for key, value in json.loads(body).items():
            if key == "faults":
                state.faults = parse_faults(value)
            elif key == "outage":
                state.outage_until = time.monotonic() + value
            else:
                setattr(state.options, key, value)
        return 200, {}
    if path.endswith("/models"):
        return 200, {
            "object": "list",
            "data": [{"id": "test-model", "object": "model", "created": 0, "owned_by": "test"}],
        }
    if path.endswith("/files") and method == "POST":
        return 200, store_file(state, head, body)
    if path.endswith("/content"):
        return 200, state.files[path.split("/")[-2]]
    if path.partition("?")[0].endswith("/batches") and method == "GET":
        return 200, {"object": "list", "data": list(state.batches.values()), "has_more": False}
    if path.endswith("/batches") and method == "POST":
        return 200, start_batch(state, json.loads(body))
    if "/batches/" in path:
        return 200, poll_batch(
            state, path.rsplit("/", 1)[1], lambda body, fault: complete(state, body, fault), TRANSPORT_FAULTS
        )
    return 404, {"error": {"message": f"no {path}", "type": "not_found"}}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds to an answer")
    parser.add_argument("--jitter", type=float, default=0.0, help="share of the latency that varies")
    parser.add_argument("--faults", default="", help="NAME=SHARE,...")
    parser.add_argument("--bad-answers", type=int, default=2, help="unusable answers of one document at the most")
    parser.add_argument("--retry-after", default="0.2", help="value of Retry-After")
    parser.add_argument("--dialect", choices=DIALECTS, default="json_schema")
    parser.add_argument("--context", type=int, default=1 << 30, help="characters of the longest document")
    parser.add_argument("--key", default="", help="API key that is demanded, in lower case")
    parser.add_argument("--redirect", default="", help="send every chat request to this address instead")
    parser.add_argument("--gullible", action="store_true", help="believe documents that name their own score")
    parser.add_argument("--batch-polls", type=int, default=1, help="polls until a batch is complete")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


async def main() -> None:
    state = State(options())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", state.options.port, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(0)
