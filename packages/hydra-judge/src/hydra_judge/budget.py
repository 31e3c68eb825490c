# SPDX-License-Identifier: Apache-2.0
"""What a run may cost, and what it has cost.

A request is paid for when it is sent: what it may cost at the most is reserved then, and replaced by the bill when the
answer is there. So a limit is never passed, also with hundreds of requests in flight.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.errors import ConfigError, NmoeError

__all__ = ["Budget", "BudgetError", "Price", "load_price"]


class BudgetError(NmoeError):
    """The next request would pass a limit that the user set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a model charges.

    Attributes:
        prompt: US dollars per million prompt tokens.
        answer: US dollars per million answer tokens.
        batch: factor on both in the Batch API.
    """

    prompt: float
    answer: float
    batch: float = 0.5

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """US dollars for these many tokens."""
        return (prompt_tokens * self.prompt + answer_tokens * self.answer) / 1e6


def load_price(path: Path, *, model: str) -> Price:
    """Reads the price of `model` from a TOML file of tables [models."NAME"] with `prompt`, `answer` and `batch`.

    Raises:
        ConfigError: if the file or the model's price is missing or senseless.
    """
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prices {path}: cannot be read ({error})") from None
    models = table.get("models")
    if not isinstance(models, dict) or not isinstance(models.get(model), dict):
        known = ", ".join(models) if isinstance(models, dict) else "none"
        raise ConfigError(f'--prices {path}: has no table [models."{model}"]; it has {known}')
    values = models[model]
    unknown = set(values) - {"prompt", "answer", "batch"}
    numbers = [value for value in values.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    if (
        unknown
        or not {"prompt", "answer"} <= set(values)
        or len(numbers) < len(values)
        or not all(map(_sensible, numbers))
    ):
        raise ConfigError(
            f'--prices {path}: [models."{model}"] holds {values}; expected prompt and answer (and perhaps batch), '
            "finite numbers of 0 or more"
        )
    return Price(**{key: float(value) for key, value in values.items()})


def _sensible(number: float) -> bool:
    """Whether a bill can be made of it: TOML knows nan and inf, by which no limit is ever passed."""
    return 0 <= number < float("inf")


class Budget:
    """Reservations and bills of one run.

    Args:
        price: None if the model costs nothing.
        max_requests: requests that may be sent, repeated ones included; None for no limit.
        max_cost: US dollars; None for no limit.
    """

    def __init__(self, *, price: Price | None = None, max_requests: int | None = None, max_cost: float | None = None):
        if max_cost is not None and price is None:
            raise ConfigError("--max-cost: needs the model's price; give --prices FILE")
        self.price, self.max_requests, self.max_cost = price, max_requests, max_cost
        self.requests = 0
        self.spent = 0.0
        self._reserved = 0.0

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """US dollars for these many tokens; 0 without a price."""
        return self.price.cost(prompt_tokens, answer_tokens) if self.price else 0.0

    @property
    def reserved(self) -> float:
        """US dollars that requests in flight may cost."""
        return self._reserved

    def reserve(self, cost: float) -> None:
        """Counts a request that is about to be sent and may cost `cost`.

        Raises:
            BudgetError: if it would pass a limit; then nothing is counted.
        """
        if self.max_requests is not None and self.requests + 1 > self.max_requests:
            raise BudgetError(f"--max-requests {self.max_requests} reached")
        if self.max_cost is not None and self.spent + self._reserved + cost > self.max_cost:
            raise BudgetError(f"--max-cost {self.max_cost:g} reached: {self.spent:.4f} spent")
        self.requests += 1
        self._reserved += cost

    def settle(self, *, reserved: float, cost: float) -> None:
        """Replaces a reservation by the bill (0 for a request that was not answered)."""
        self._reserved -= reserved
        self.spent += cost
