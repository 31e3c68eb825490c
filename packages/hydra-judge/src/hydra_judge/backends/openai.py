# SPDX-License-Identifier: Apache-2.0
"""Any server that speaks the OpenAI protocol, through the `openai` client.

The client's own retries are off (its attempts would multiply with the engine's), so are redirects and the proxies of
the environment: a document goes to the host that the user named and to no other. The transport is aiohttp, since the
default one saturates two cores at some hundred requests a second.

A time-out counts the time in which this process was awake. One that gets no core for a while, or is stopped (Slurm suspends
jobs by SIGSTOP), finds the answers that it waited for in its sockets; by the clock on the wall it would throw away what is
paid for and ask again.
"""

import asyncio
import email.utils
import json
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx2
import openai

from hydra_judge.backends import RateLimitError, RejectedError, ServerError
from hydra_judge.verdict import Reply
from nmoe.errors import ConfigError, EnvironmentFault

__all__ = ["OpenAIBackend", "make_client", "read_completion"]

T = TypeVar("T")

_NO_KEY = "no-key-given"
_TICK_S = 1.0


def make_client(url: str, *, api_key: str | None, timeout: float | None, connections: int) -> openai.AsyncOpenAI:
    """A client that talks to `url` alone.

    Args:
        url: base URL, with the version ("http://localhost:8000/v1").
        api_key: bearer token; None for servers that want none.
        timeout: seconds for one request; None if the caller limits it.
        connections: the most connections at once.

    Raises:
        ConfigError: if `url` is not an HTTP address, or the key cannot stand in a header.
    """
    if "@" in url:
        raise ConfigError("--base-url: holds a user name or password; give the key by --api-key-env")
    if _is_odd(url):
        raise ConfigError(f"--base-url {url}: not an address; expected http(s)://HOST[:PORT]/v1")
    if api_key and not all("!" <= letter <= "~" for letter in api_key):
        raise ConfigError(
            "the API key holds a blank, a line end or a letter outside ASCII; look at the variable that --api-key-env names"
        )
    transport = openai.DefaultAioHttpClient(
        timeout=httpx2.Timeout(timeout, connect=10.0 if timeout is None else min(timeout, 10.0)),
        limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=60.0),
        follow_redirects=False,
        trust_env=False,
    )
    client = openai.AsyncOpenAI(api_key=api_key or _NO_KEY, base_url=url, max_retries=0, http_client=transport)
    # These come from the environment unasked, and belong to another host.
    client.organization = client.project = client.admin_api_key = client.webhook_secret = None
    return client


def _is_odd(url: str) -> bool:
    """Whether nothing can be sent there: no HTTP, no host, a port of letters, half an IPv6 address, a name that DNS cannot hold."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and parts.port != 0 and bool(httpx2.URL(url).host)
    except (ValueError, httpx2.InvalidURL):
        return True
    return not usable or any(letter.isspace() for letter in url)


class OpenAIBackend:
    """One OpenAI-compatible server.

    Args:
        url: its base URL.
        api_key: bearer token; None for servers that want none.
        timeout: seconds for one request.
        connections: the most connections at once.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout: float, connections: int):
        self.url = url
        self._key = api_key
        self._timeout = timeout
        self._client = make_client(url, api_key=api_key, timeout=None, connections=connections)

    async def chat(self, body: dict[str, Any]) -> Reply:
        """See `hydra_judge.backends.Backend`."""
        try:
            sent = self._client.post("/chat/completions", body=body, cast_to=httpx2.Response)
            response = await _within(self._timeout, sent)
            return read_completion(response.content)
        except openai.APIStatusError as error:
            raise self._status(error) from None
        except (openai.APIConnectionError, aiohttp.ClientError, httpx2.HTTPError, TimeoutError, OSError) as error:
            if _timed_out(error):
                raise ServerError(f"{self.url}: no answer in {self._timeout:g} s", kind="timeout") from None
            detail = self._hide(str(error.__cause__ or error) or type(error).__name__)
            raise ServerError(f"{self.url}: {detail}", kind="dropped") from None

    async def close(self) -> None:
        """See `hydra_judge.backends.Backend`."""
        await self._client.close()

    def _hide(self, text: str) -> str:
        """`text` on one line and without the key, should a server repeat it."""
        text = " ".join(text.split())[:300]
        return text.replace(self._key, "***") if self._key else text

    def _status(self, error: openai.APIStatusError) -> Exception:
        """What an HTTP error means for the engine."""
        status, wait = error.status_code, _retry_after(error.response.headers)
        body = error.body if isinstance(error.body, dict) else {}
        code, said = str(body.get("code") or body.get("type") or ""), str(body.get("message") or error.message)
        detail = self._hide(f"{self.url}: {status} {said}")
        if status == 429 and code == "insufficient_quota":
            return EnvironmentFault(f"{detail}; the account has no money left, the same command goes on when it has")
        if status == 429 or (status == 503 and wait is not None):
            return RateLimitError(detail, retry_after=wait)
        if status in (408, 409, 425) or status >= 500:
            return ServerError(detail, kind="status", retry_after=wait)
        if status in (401, 403):
            return EnvironmentFault(f"{detail}; set the key in the variable that --api-key-env names")
        if status == 404:
            return EnvironmentFault(f"{detail}; look at --model and at the path of --base-url (most end in /v1)")
        if 300 <= status < 400:
            return EnvironmentFault(f"{self.url}: {status} points elsewhere; documents go only to the host you name")
        lowered = f"{code} {said}".lower()
        if "content_filter" in lowered or "content management policy" in lowered:
            return RejectedError(detail, outcome="filtered")
        if status == 413 or "context_length" in lowered or "context length" in lowered or "too long" in lowered:
            return RejectedError(detail, outcome="too_long")
        return RejectedError(detail, outcome="failed", status=status)


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which may take as long as `seconds` pass in this process's event loop.

    Each turn of the loop reads what has arrived before it looks at the clock, and counts as one tick however late it is: so
    an answer that is there is taken, also after a stall that was longer than the time-out. The transport's own time-outs go
    by the wall, and do not cover every wait: on a reused connection one was seen to last for ever.

    Raises:
        TimeoutError: if it takes longer; then it is cancelled.
    """
    task = asyncio.ensure_future(work)
    left = seconds
    try:
        while left > 0:
            tick = min(left, _TICK_S, seconds / 4)
            await asyncio.wait([task], timeout=tick)
            if task.done():
                return task.result()
            left -= tick
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # looked at, or asyncio would report it as lost


def _timed_out(error: BaseException | None) -> bool:
    """Whether a time-out is at the bottom of it; the client calls every lost connection one."""
    while error is not None and not isinstance(error, TimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None


def _retry_after(headers: httpx2.Headers) -> float | None:
    """Seconds to wait by Retry-After (seconds or a date) or retry-after-ms; None if absent or senseless."""
    for name, divisor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / divisor
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return max(date.timestamp() - time.time(), 0.0)


def read_completion(data: bytes) -> Reply:
    """Reads the body of a chat completion.

    Raises:
        ServerError: if it is none.
    """
    try:
        body = json.loads(data)
        choice = body["choices"][0]
        message = choice.get("message") or {}
        usage = body.get("usage") or {}
        return Reply(
            content=_text(message.get("content")),
            finish=str(choice.get("finish_reason") or ""),
            refusal=_text(message.get("refusal")),
            first_token=_alternatives(choice.get("logprobs")),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the body is no chat completion ({type(error).__name__})", kind="garbled") from None


def _text(content: Any) -> str:
    """Text of a message: a string, or the text parts of a list."""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    # Lone surrogates come from half an escape sequence; they could not be stored.
    return content.encode("utf-8", "replace").decode("utf-8") if isinstance(content, str) else ""


def _alternatives(logprobs: Any) -> tuple[tuple[str, float], ...]:
    """Alternatives of the first answer token that is not blank."""
    for entry in (logprobs or {}).get("content") or ():
        if str(entry.get("token", "")).strip():
            found = entry.get("top_logprobs") or [entry]
            return tuple((str(one["token"]), float(one["logprob"])) for one in found)
    return ()
