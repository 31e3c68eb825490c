# SPDX-License-Identifier: Apache-2.0
"""Documents for the local judge, in two halves of 64 that share no text: one to choose a prompt on, one to report.

Good (32 a half): the Python language reference, documentation of its standard library and READMEs as they are installed here,
and plain paragraphs written for this purpose. Junk (32 a half): spam, shops, menus, boilerplate in whole sentences, keyword
stuffing, log lines, what a poor translation program makes, and good texts with their words shuffled, which a count of words
cannot tell from the originals. The texts written for this purpose stand in judge_local_texts.toml.
"""

import importlib
import importlib.metadata
import inspect
import pydoc_data.topics
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["documents"]

LENGTH = 1200
MODULES = (
    "heapq", "statistics", "fractions", "ipaddress", "asyncio.base_events", "decimal", "difflib", "copy", "selectors", "bisect",
    "tempfile", "shlex", "threading", "gettext", "random", "zipfile", "optparse", "pickle", "locale", "configparser", "string", "uuid",
    "textwrap", "http.cookiejar", "mailbox", "csv", "struct", "urllib.request", "hashlib", "numbers", "cmd", "calendar", "doctest",
)  # fmt: skip
PACKAGES = (
    "numpy", "click", "pydantic", "openai", "jinja2", "anyio", "h11", "idna", "typing-extensions", "python-dateutil", "aiohttp",
    "requests", "httpx", "fsspec", "multidict", "filelock", "plotly", "datasets", "attrs", "yarl", "frozenlist", "dill", "pandas",
    "tqdm", "packaging", "charset-normalizer", "urllib3", "huggingface-hub", "zstandard", "multiprocess",
)  # fmt: skip
TEXTS = tomllib.loads(Path(__file__).with_name("judge_local_texts.toml").read_text(encoding="utf-8"))


def _readme(package: str) -> str:
    """The prose of a package's description: whole paragraphs, without badges, headings, tables, links or code."""
    try:
        text = str(importlib.metadata.metadata(package).json.get("description", ""))
    except importlib.metadata.PackageNotFoundError:
        return ""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
    prose = [
        one for one in paragraphs if re.match(r"[A-Z][^\n]{50}", one) and not re.search(r"http|[<>|]|::|`_|^\W", one)
    ]
    return "\n\n".join(prose)


def _good(half: int) -> Iterator[tuple[str, str]]:
    topics = sorted(name for name, text in pydoc_data.topics.topics.items() if len(text) > LENGTH)
    for name in random.Random(7).sample(topics, 16)[half::2]:
        yield f"topic-{name}", pydoc_data.topics.topics[name]
    described = [(name, inspect.getdoc(importlib.import_module(name)) or "") for name in MODULES]
    described = [(name, text) for name, text in described if len(text) > 400]
    for name, text in described[half::2][:7]:
        yield f"module-{name}", text
    described = [(name, _readme(name)) for name in PACKAGES]
    described = [(name, text) for name, text in described if len(text) > 350]
    for name, text in described[half::2][:5]:
        yield f"readme-{name}", text
    for number, text in enumerate(TEXTS["prose"][half::2]):
        yield f"prose-{number}", text


def _log(kind: int, rng: random.Random) -> str:
    """One line of a log, in one of six forms."""
    hour, minute, second, size = rng.randrange(24), rng.randrange(60), rng.randrange(60), rng.randrange(99999)
    return (
        f"2024-03-0{rng.randrange(1, 9)} {rng.getrandbits(64):016x} WARN retry={rng.randrange(9)}",
        f'10.0.{rng.randrange(256)}.{rng.randrange(256)} - - "GET /img/{size}.png HTTP/1.1" {rng.choice((200, 304, 404))} {size}',
        f"Mar {rng.randrange(1, 29)} {hour:02}:{minute:02}:{second:02} host kernel: [{size}.{second}] eth{rng.randrange(4)}: link up",
        f"E/AndroidRuntime({rng.randrange(9999)}): at com.app.a.b.c{rng.randrange(99)}(SourceFile:{size})",
        f"[{hour:02}:{minute:02}:{second:02}] DEBUG worker-{rng.randrange(32)} heartbeat ok latency={rng.random() * 90:.2f}ms",
        f"0x{rng.getrandbits(48):012x} 0x{rng.getrandbits(32):08x} {rng.randrange(256):02x} {rng.randrange(256):02x} {size}",
    )[kind]


def _junk(half: int, good: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    rng = random.Random(half)
    spam, menu, shop = (TEXTS[kind][half::2] for kind in ("spam", "menu", "shop"))
    for number in range(5):
        yield f"spam-{number}", "\n".join(spam[2 * number : 2 * number + 2])
    for number, text in enumerate(shop):
        yield f"shop-{number}", "\n".join(re.sub(r"\d", lambda _: str(rng.randrange(10)), text) for _ in range(4))
    for number in range(4):
        yield f"menu-{number}", "\n".join(menu[2 * number : 2 * number + 2])
    for number, text in enumerate(TEXTS["boilerplate"][half::2]):
        yield f"boilerplate-{number}", text
    for number, words in enumerate(TEXTS["keywords"][half::2]):
        yield f"keywords-{number}", " ".join(rng.choices(words.split(", "), k=60))
    for number in range(3):
        yield f"log-{number}", "\n".join(_log(2 * number + half, rng) for _ in range(25))
    for number, text in enumerate(TEXTS["translated"][half::2]):
        yield f"translated-{number}", text
    for name, text in good[:: len(good) // 4][:4]:
        words = text[:LENGTH].split()
        rng.shuffle(words)
        yield f"shuffled-{name}", " ".join(words)


def documents(half: int) -> list[tuple[str, str, bool]]:
    """(id, text, whether it is worth reading) of 32 good documents and 32 of junk.

    Args:
        half: 0 for the half on which the prompt was chosen, 1 for the half that is reported.
    """
    good = [(name, text[:LENGTH]) for name, text in _good(half)]
    junk = list(_junk(half, good))
    assert len(good) == len(junk) == 32, "the environment lacks packages whose READMEs are judged"
    return [(name, text, True) for name, text in good] + [(name, text[:LENGTH], False) for name, text in junk]
