# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: which server, when, how often, and when to stop.

An answer counts when it is in the cache. Until then its request is repeated, whatever happens to the server, within
the deadline of its document; time in which the servers are down does not count, since that says nothing about the
document. Requests wait in the order of their documents, so what has waited longest is repeated first.
"""

import asyncio
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra_judge.backends import Backend, RateLimitError, RejectedError, ServerError
from hydra_judge.budget import Budget, BudgetError
from hydra_judge.cache import Cache
from hydra_judge.limits import OPEN_AFTER, Backoff, Endpoint
from hydra_judge.verdict import Reply
from nmoe.errors import EnvironmentFault, NmoeError

__all__ = ["Engine", "Request", "StoppedError"]


class StoppedError(NmoeError):
    """The run ends before its last document; everything paid for is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One question to the model.

    Attributes:
        key: of the cache; requests with the same key get the same answer.
        body: of the chat request.
        order: number of the document; lower ones go first.
        prompt_tokens: estimate, for rate limits and the budget.
        answer_tokens: the most the answer may take.
        faults_allowed: HTTP 5xx answers after which `ServerError` is raised instead of repeating; None for no limit.
    """

    key: bytes
    body: dict[str, Any]
    order: int
    prompt_tokens: int
    answer_tokens: int
    faults_allowed: int | None = None

    @property
    def tokens(self) -> int:
        """What counts against a limit on tokens per minute."""
        return self.prompt_tokens + self.answer_tokens


Probe = Callable[[Callable[[Request], Awaitable[Reply]]], Awaitable[None]]


class Engine:
    """Answers requests from the cache or from servers.

    Args:
        servers: state and backend of each server.
        cache: where answers are kept.
        budget: what may be spent.
        model: name stored beside the answers.
        timeout: seconds that one sending of a request takes at the most.
        deadline: seconds of trying for one request, after which its document fails.
        max_outage: seconds for which all servers may be down before the run stops.
        say: told once of each server that cannot be reached from the start, since that may be a slip in its address.
    """

    def __init__(
        self,
        servers: Sequence[tuple[Endpoint, Backend]],
        *,
        cache: Cache,
        budget: Budget,
        model: str,
        timeout: float = 120.0,
        deadline: float = 600.0,
        max_outage: float = 7200.0,
        say: Callable[[str], None] = lambda _: None,
    ):
        self._servers = list(servers)
        self.cache, self.budget, self._model = cache, budget, model
        self._timeout, self._deadline, self._max_outage = timeout, deadline, max_outage
        self._say, self._silent = say, set(range(len(self._servers)))
        self._queue: list[tuple[int, int, Request, asyncio.Future[int]]] = []
        self._ticket = itertools.count()
        self._flights: dict[bytes, asyncio.Task[Reply]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stop: NmoeError | None = None
        self._stopping = asyncio.Event()
        self.probe: Probe | None = None
        """Asks what any server takes: tells a document that is refused from a request that is wrong for all of them."""
        self._probed: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """requests, answers, cached, shared, rate_limited, timeout, dropped, status, garbled, prompt_tokens, answer_tokens."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered."""
        return sum(endpoint.in_flight for endpoint, _ in self._servers)

    @property
    def spent(self) -> float:
        """US dollars billed so far."""
        return self.budget.spent

    @property
    def stopping(self) -> bool:
        """Whether the run is about to end."""
        return self._stop is not None

    async def ask(self, request: Request) -> Reply:
        """The answer to a request: from the cache, from an equal request in flight, or from a server.

        Raises:
            RejectedError: if this request cannot be answered.
            StoppedError, BudgetError, EnvironmentFault: if the run stops, as where no request like this would be answered.
            ServerError: after `request.faults_allowed` faults.
        """
        try:
            return await self._ask(request)
        except RejectedError as refused:
            if refused.status and self.probe and not (self.counts["answers"] or self.counts["cached"]):
                self._probed = self._probed or asyncio.create_task(self._try(self.probe, refused))
                await asyncio.shield(self._probed)
            raise

    async def _try(self, probe: Probe, refused: RejectedError) -> None:
        """Stops the run where the probe is refused like the first document.

        Raises:
            EnvironmentFault: it is.
        """
        statuses = []

        async def ask(request: Request) -> Reply:
            try:
                return await self._ask(request)
            except RejectedError as fault:
                statuses.append(fault.status)
                raise

        await probe(ask)
        if refused.status in statuses:
            self.stop(
                EnvironmentFault(
                    f"{refused}; it refused a text of our own as well, so all would be: look at --request-option, --answer and --model"
                )
            )
            raise self._stop or refused

    async def _ask(self, request: Request) -> Reply:
        known = self.cache.get(request.key)
        if known is not None:
            self.counts["cached"] += 1
            return known
        flight = self._flights.get(request.key)
        if flight is None:
            flight = asyncio.create_task(self._pay(request))
            self._flights[request.key] = flight
            flight.add_done_callback(lambda _: self._flights.pop(request.key, None))
        else:
            self.counts["shared"] += 1
        return await asyncio.shield(flight)

    def stop(self, why: NmoeError) -> None:
        """Sends nothing from now on; requests in flight end normally, all others raise `why`."""
        if self._stop is None:
            self._stop = why
            self._stopping.set()
            for _, _, _, slot in self._queue:
                if not slot.done():
                    slot.set_exception(why)
            self._queue.clear()

    async def drain(self) -> None:
        """Waits until every request in flight has ended and its answer is kept."""
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    async def close(self) -> None:
        """Ends what is in flight and closes the connections."""
        if self._timer is not None:
            self._timer.cancel()
        for flight in list(self._flights.values()):
            flight.cancel()
        await self.drain()
        for _, backend in self._servers:
            await backend.close()

    async def _pay(self, request: Request) -> Reply:
        backoff, tried, faults = Backoff(), 0.0, 0
        while True:
            number = await self._slot(request)
            endpoint, began = self._servers[number][0], time.monotonic()
            try:
                return await self._send(request, number)
            except RateLimitError as fault:
                endpoint.refused(retry_after=fault.retry_after)
                self.counts["rate_limited"] += 1
                asked, last = fault.retry_after, fault
            except ServerError as fault:
                endpoint.failed(timeout=fault.kind == "timeout")
                self.counts[fault.kind] += 1
                asked, last = fault.retry_after, fault
                faults += fault.kind == "status"
                if number in self._silent and fault.kind in ("dropped", "timeout"):
                    self._say(f"{fault}; tried again for --max-outage, {self._max_outage:g} s")
                self._silent.discard(number)
                if request.faults_allowed is not None and faults > request.faults_allowed:
                    raise
            finally:
                self._dispatch()
            pause = backoff.next()
            # With so few requests left, the breaker cannot tell a server that is down from documents that break it.
            if endpoint.open_since is None or len(self._flights) < OPEN_AFTER:
                # What passed beyond the time-out, this process was stopped or without a core.
                tried += min(time.monotonic() - began, self._timeout) + pause
            if tried > self._deadline:
                raise RejectedError(f"no answer in {self._deadline:g} s of trying; last: {last}", outcome="failed")
            await self._pause(pause if asked is None else asked * random.uniform(1.0, 1.1))

    async def _send(self, request: Request, number: int) -> Reply:
        """Sends a request whose slot and money are reserved, and keeps the answer."""
        endpoint, backend = self._servers[number]
        reserved = self.budget.cost(request.prompt_tokens, request.answer_tokens)
        known = self.cache.get(request.key)  # another process may have paid meanwhile
        if known is not None:
            endpoint.abandoned()
            self.budget.settle(reserved=reserved, cost=0.0)
            self.budget.requests -= 1
            self.counts["cached"] += 1
            return known
        self.counts["requests"] += 1
        bill = 0.0
        try:
            reply = await backend.chat(request.body)
            bill = self.budget.cost(reply.prompt_tokens, reply.completion_tokens)
        except RejectedError:
            endpoint.succeeded(estimated=request.tokens, used=0)
            raise
        except (RateLimitError, ServerError):
            raise  # counted by the caller
        except EnvironmentFault as fault:
            endpoint.abandoned()
            self.stop(fault)
            raise
        except BaseException:
            endpoint.abandoned()
            raise
        finally:
            self.budget.settle(reserved=reserved, cost=bill)
        self._silent.discard(number)
        endpoint.succeeded(estimated=request.tokens, used=reply.prompt_tokens + reply.completion_tokens)
        self.counts.update(answers=1, prompt_tokens=reply.prompt_tokens, answer_tokens=reply.completion_tokens)
        try:
            await self.cache.put(request.key, reply, model=self._model)
        except EnvironmentFault as fault:
            self.stop(fault)
            raise
        return reply

    async def _pause(self, seconds: float) -> None:
        """Sleeps, unless the run stops."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
        raise self._stop or StoppedError("stopped")

    async def _slot(self, request: Request) -> int:
        """Waits for a turn; returns the number of the server."""
        if self._stop is not None:
            raise self._stop
        slot: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (request.order, next(self._ticket), request, slot))
        self._dispatch()
        return await slot

    def _dispatch(self) -> None:
        """Gives slots to the first in the queue while there are any."""
        while self._queue and self._stop is None:
            _, _, request, slot = self._queue[0]
            if slot.done():  # cancelled
                heapq.heappop(self._queue)
                continue
            waits = [endpoint.wait(request.tokens) for endpoint, _ in self._servers]
            ready = [number for number, wait in enumerate(waits) if wait <= 0]
            if not ready:
                self._again(min(waits))
                return
            try:
                self.budget.reserve(self.budget.cost(request.prompt_tokens, request.answer_tokens))
            except BudgetError as reached:
                self.stop(reached)
                return
            number = min(ready, key=lambda candidate: self._servers[candidate][0].load)
            self._servers[number][0].send(request.tokens)
            heapq.heappop(self._queue)
            slot.set_result(number)

    def _again(self, seconds: float) -> None:
        """Comes back when a server may be ready; stops the run if all have been down for too long."""
        down = [endpoint.open_since for endpoint, _ in self._servers]
        if all(since is not None for since in down):
            since = max(since for since in down if since is not None)
            if time.monotonic() - since > self._max_outage:
                urls = ", ".join(endpoint.url for endpoint, _ in self._servers)
                self.stop(
                    StoppedError(f"{urls}: no answer for {self._max_outage:g} s; the same command goes on from here")
                )
                return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.001), self._dispatch)
