# SPDX-License-Identifier: Apache-2.0
"""What sends one request to one server, and the words for what can come back.

A backend never retries: that is the engine's part, which alone knows the other requests, the budget and the deadline.
"""

from typing import Any, Protocol

from hydra_judge.verdict import Reply

__all__ = ["Backend", "RateLimitError", "RejectedError", "ServerError"]


class RateLimitError(Exception):
    """The server asks to slow down (429, 503 with Retry-After).

    Attributes:
        retry_after: seconds it asked to wait, None if it did not say.
    """

    def __init__(self, detail: str, *, retry_after: float | None = None):
        super().__init__(detail)
        self.retry_after = retry_after


class ServerError(Exception):
    """No answer: a 5xx, a time-out, a dropped connection, a body that is no chat completion.

    Attributes:
        kind: "status", "timeout", "dropped" or "garbled", for the counts.
        retry_after: seconds it asked to wait, None if it did not say.
    """

    def __init__(self, detail: str, *, kind: str, retry_after: float | None = None):
        super().__init__(detail)
        self.kind = kind
        self.retry_after = retry_after


class RejectedError(Exception):
    """The server will not take this request, now or later.

    Attributes:
        outcome: "too_long", "filtered" or "failed".
        status: of HTTP, where it says no more about why than that the request is at fault; else 0.
    """

    def __init__(self, detail: str, *, outcome: str, status: int = 0):
        super().__init__(detail)
        self.outcome = outcome
        self.status = status


class Backend(Protocol):
    """One server."""

    url: str

    async def chat(self, body: dict[str, Any]) -> Reply:
        """Sends one chat request, once.

        Raises:
            RateLimitError, ServerError, RejectedError: as described above.
            EnvironmentFault: if no request can succeed (bad key, unknown model, no money).
        """
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...
