# SPDX-License-Identifier: Apache-2.0
"""How hard one server may be pushed: adaptive concurrency, rate limits, a circuit breaker.

Pure state on a clock that is passed in, so that an hour of a bad day is tested in a millisecond.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["OPEN_AFTER", "Backoff", "Endpoint", "TokenBucket"]

# An epoch is as many completions as the limit allows in flight. A tenth of the requests refused at random is no reason
# to slow down, a quarter is.
_GROW_BELOW, _SHRINK_ABOVE, _PAUSE_ABOVE = 0.15, 0.25, 0.5
OPEN_AFTER = 8
"""Faults in a row that open the breaker."""

_FIRST_COOL_DOWN_S, _LAST_COOL_DOWN_S = 1.0, 60.0


@dataclass(slots=True)
class TokenBucket:
    """A rate limit with a burst of one second's worth, or of one item if that is more.

    Attributes:
        per_minute: units that flow in a minute; 0 means no limit.
        level: units left; below zero after a draw that was larger than estimated.
        time: when `level` was true, seconds.
    """

    per_minute: float
    level: float = 0.0
    time: float | None = None

    def wait(self, now: float, amount: float) -> float:
        """Seconds until `amount` may be drawn; 0 if now."""
        if not self.per_minute:
            return 0.0
        rate = self.per_minute / 60.0
        burst = max(rate, 1.0)
        self.level = burst if self.time is None else min(burst, self.level + (now - self.time) * rate)
        self.time = now
        # An amount larger than the burst passes when the bucket is full, and is paid back afterwards.
        wait = (min(amount, burst) - self.level) / rate
        return wait if wait > 1e-6 else 0.0

    def draw(self, amount: float) -> None:
        """Takes `amount` (negative: gives back)."""
        if self.per_minute:
            self.level -= amount


class Backoff:
    """Exponential waits with full jitter, from `first` seconds doubling to `last`.

    Source: Brooker 2015, "Exponential Backoff And Jitter" (AWS architecture blog).
    """

    def __init__(self, *, first: float = 0.5, last: float = 60.0):
        self._step, self._last = first, last

    def next(self) -> float:
        """The next wait in seconds, in [step / 10, step]."""
        wait = self._step * random.uniform(0.1, 1.0)
        self._step = min(self._step * 2, self._last)
        return wait


@dataclass(slots=True)
class Endpoint:
    """State of one server.

    Attributes:
        url: its address.
        most: requests in flight at the most, >= 1.
        weight: share of the load against other servers, > 0.
        requests, tokens: rate limits.
        clock: seconds, monotonic.
        limit: requests allowed in flight now, in [1, most].
        in_flight: requests sent and not answered.
        resume_at: nothing is sent before this time (Retry-After of a saturated server).
        open_since: when the breaker opened; None while it is closed.
    """

    url: str
    most: int
    weight: float = 1.0
    requests: TokenBucket = field(default_factory=lambda: TokenBucket(0))
    tokens: TokenBucket = field(default_factory=lambda: TokenBucket(0))
    clock: Callable[[], float] = field(kw_only=True)
    limit: float = 0.0
    in_flight: int = 0
    resume_at: float = 0.0
    open_since: float | None = None
    _cool_down: float = _FIRST_COOL_DOWN_S
    _retry_at: float = 0.0
    _probing: bool = False
    _faults: int = 0
    _refusals: int = 0
    _epoch: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        self.limit = float(max(1, min(self.most, max(32, self.most // 4))))

    def wait(self, tokens: float) -> float:
        """Seconds until a request of `tokens` may be sent; infinity if first one in flight must end."""
        now = self.clock()
        if self.open_since is not None:
            return float("inf") if self._probing else max(0.0, self._retry_at - now)
        if self.in_flight >= int(self.limit):
            return float("inf")
        return max(self.resume_at - now, self.requests.wait(now, 1.0), self.tokens.wait(now, tokens), 0.0)

    @property
    def load(self) -> float:
        """Requests in flight for its weight: the next request goes where this is least."""
        return self.in_flight / (self.weight * self.limit)

    def send(self, tokens: float) -> None:
        """Counts a request that is sent now."""
        self.in_flight += 1
        self._probing = self.open_since is not None
        self.requests.draw(1.0)
        self.tokens.draw(tokens)

    def succeeded(self, *, estimated: float, used: float) -> None:
        """Counts an answer; `used` tokens instead of `estimated`."""
        self.in_flight -= 1
        self.tokens.draw(used - estimated)
        if self.open_since is not None:
            self.open_since, self._probing, self._cool_down = None, False, _FIRST_COOL_DOWN_S
            self.limit = min(self.limit, 8.0)
        self._faults = 0
        self._count(congested=False)

    def refused(self, *, retry_after: float | None) -> None:
        """Counts a 429; after an epoch of little else, everything waits as long as the server asked."""
        self.in_flight -= 1
        self._probing, self.open_since = False, None  # it answers, if only to say no
        self._faults = 0
        self._refusals += 1
        # Refusals come back sooner than answers, so only a whole epoch tells their share.
        good, bad = self._epoch
        if good + bad + 1 >= self._epoch_length and self._refusals > (good + bad + 1) * _PAUSE_ABOVE:
            self.resume_at = max(self.resume_at, self.clock() + (1.0 if retry_after is None else retry_after))
        self._count(congested=True)

    @property
    def _epoch_length(self) -> float:
        return max(self.limit, 8.0)

    def failed(self, *, timeout: bool) -> None:
        """Counts a request without an answer; several in a row open the breaker."""
        self.in_flight -= 1
        self._faults += 1
        now = self.clock()
        if self.open_since is not None:
            if self._probing:
                self._probing = False
                self._cool_down = min(self._cool_down * 2, _LAST_COOL_DOWN_S)
                self._retry_at = now + self._cool_down * random.uniform(0.8, 1.0)
        elif self._faults >= OPEN_AFTER:
            self.open_since = now
            self._retry_at = now + self._cool_down * random.uniform(0.8, 1.0)
        self._count(congested=timeout)

    def abandoned(self) -> None:
        """Counts a request that was cancelled before its end."""
        self.in_flight -= 1
        self._probing = False

    def _count(self, *, congested: bool) -> None:
        """Adapts the limit: by one an answer while few are refused, down by a third after an epoch with many."""
        self._epoch[congested] += 1
        good, bad = self._epoch
        share = bad / (good + bad)
        if not congested and share < _GROW_BELOW:
            self.limit = min(self.limit + 1.0, float(self.most))
        if good + bad >= self._epoch_length:
            if share > _SHRINK_ABOVE:
                self.limit = max(1.0, self.limit * 0.7)
            self._epoch, self._refusals = [0, 0], 0
