# SPDX-License-Identifier: Apache-2.0
"""Forty documents for the local judge: twenty that are worth reading, twenty that are not, half of each kind for choosing a prompt.

Good: the Python language reference, documentation of its standard library, and READMEs, as they are installed here, and some
paragraphs written for this purpose. Junk: spam, advertising, menus and notices, keyword stuffing, log lines, and good texts with
their words shuffled, which a count of words cannot tell from the originals.
"""

import importlib
import importlib.metadata
import inspect
import pydoc_data.topics
import random
import re
from collections.abc import Iterator

__all__ = ["documents"]

LENGTH = 1200
MODULES = (
    "heapq", "statistics", "fractions", "ipaddress", "asyncio.base_events", "decimal", "difflib", "copy", "selectors", "bisect",
    "tempfile", "shlex", "threading", "gettext", "random", "zipfile", "optparse", "pickle", "locale", "configparser", "string", "uuid",
)  # fmt: skip
PACKAGES = (
    "numpy",
    "click",
    "pydantic",
    "openai",
    "jinja2",
    "anyio",
    "h11",
    "idna",
    "typing-extensions",
    "python-dateutil",
)
PROSE = (
    "Bread rises because yeast feeds on the sugar in dough and gives off carbon dioxide. The gas is caught in a net of gluten, "
    "the protein that forms when flour is wetted and kneaded. If the dough is left too long, the net tears and the loaf falls; "
    "if it is baked too soon, the crumb is dense. A cool place slows the yeast, which gives bacteria time to make the acids "
    "that we taste in sourdough.",
    "A lighthouse lens is not one piece of glass but a stack of rings, each a slice of a much thicker lens. Augustin Fresnel "
    "saw that only the slope of the surface bends the light, so the bulk behind it could be left out. His lens of 1823 threw "
    "a beam over thirty kilometres with an oil lamp, and ships could tell one coast from another by the rhythm of the flashes.",
    "When two players share a pie, let one cut and the other choose. The cutter then gains most by halving it as evenly as he "
    "can, since the chooser will take the larger piece. For three players the problem is harder: a fair division exists in which "
    "nobody envies another, but the number of cuts needed grows quickly with the number of people at the table.",
    "Tides follow the moon, yet there are two of them a day and not one. The moon pulls the water on the near side more strongly "
    "than the earth beneath it, and the earth more strongly than the water on the far side, so the sea bulges on both. The sun "
    "does the same with less than half the force; when both stand in line, at new and full moon, the tides are highest.",
    "Paper money began as a receipt. Merchants in Sichuan left heavy iron coins with a shop and carried its note instead; by the "
    "eleventh century the state had taken the business over. It soon learned that notes can be printed faster than coins can be "
    "struck, and that prices rise when they are. Later rulers banned paper money for centuries because of it.",
    "A violin string that is touched lightly at its middle sounds an octave higher, because only those vibrations remain that are "
    "still at that point. Touched at a third of its length it gives the fifth above the octave. Players call these tones "
    "harmonics; they are faint, clear, and the reason why a bugle without valves can play a tune at all.",
    "Antibiotics do nothing against a cold, which is caused by a virus. They attack what bacteria have and we do not, such as the "
    "wall around each cell. Taken needlessly, they kill the harmless bacteria of the gut and leave those that happen to resist, "
    "and these then have the room to themselves. That is why doctors ask for a full course and no more.",
    "The Romans built their roads in layers: large stones at the bottom for drainage, then gravel, then slabs that sloped to both "
    "sides so that rain ran off. A legion could march thirty kilometres a day on them. Many lie under modern highways, because "
    "the surveyors had already found the easiest way across the hills.",
)  # fmt: skip
SPAM = (
    "CONGRATULATIONS!!! You have been selected for a FREE gift card worth $1000. Click here NOW to claim your prize!!!",
    "Make $$$ from home, no experience needed!!! I earned $9,437 last month and so can YOU. Hurry, only 5 places left!!!",
    "Lose 20 pounds in 7 days with this one weird trick. Doctors HATE it! Order today and get a second bottle FREE.",
    "Dear friend, I am the widow of a late general and need your help to transfer 14,500,000 dollars. Send your bank details.",
    "HOT singles in your area are waiting to chat with you right now. Sign up free, no credit card!!!",
    "URGENT: your account will be suspended in 24 hours. Verify your password at the link below immediately.",
    "Buy followers, likes and views!!! 100% real, instant delivery, lowest price guaranteed. Best best best!!!",
    "Win BIG tonight! 200 free spins, no deposit. Best casino bonus code: LUCKY777. Play now play now play now!",
)
SHOP = (
    "Wireless Earbuds Pro Max - 70% OFF - Add to cart - Free shipping over $25 - 4.8 stars (12,394) - Only 3 left in stock -",
    "Running shoes men sale - Size 7 8 9 10 11 12 - Black White Grey - $39.99 $89.99 - Quick view - Add to wishlist -",
    "Sofa 3-seater fabric grey - Was 799.00 Now 499.00 - Buy now pay later - Compare - In stock - Customers also bought -",
    "iPhone case shockproof clear - 2 for 1 - Ships today - Color: Red Blue Pink - Qty: 1 2 3 4 5 - Checkout -",
    "LED strip lights 10m RGB remote - Deal of the day - Ends in 02:13:45 - Save 60% - Subscribe and save - Add to cart -",
    "Vitamin C serum 30ml - Bestseller - Buy 3 get 1 free - Add to bag - Reviews (4,201) - Recommended for you -",
)
MENU = (
    "Home | About us | Products | Services | Blog | Careers | Contact | Login | Register | Cart (0) | Search",
    "We use cookies to improve your experience. Accept all. Reject all. Manage preferences. Privacy policy. Cookie policy.",
    "Copyright 2019 All rights reserved. Terms of use. Privacy. Sitemap. Accessibility. Do not sell my information.",
    "Share on Facebook. Share on Twitter. Share on Pinterest. Email this. Print. Previous post. Next post. Leave a reply.",
    "Skip to main content. Toggle navigation. Menu. Close. English Deutsch Français Español. Sign in. Sign up.",
    "Page 1 2 3 4 5 6 7 8 9 10 Next Last. Showing 1-20 of 4,312 results. Sort by: relevance, newest, price.",
    "Categories: News (12) Sports (7) Travel (31) Tech (4). Archives: January February March April May June July.",
    "Loading... Please enable JavaScript to view this page. Subscribe to our newsletter. Enter your email. Submit. Thank you!",
)
KEYWORDS = (
    "cheap flights", "best insurance quotes", "online casino", "payday loans", "weight loss pills", "plumber near me", "used cars",
    "mortgage rates", "buy essay online", "hotel deals", "free download full version", "seo services", "credit score", "crypto signals",
)  # fmt: skip


def _readme(package: str) -> str:
    """The prose of a package's description: no badges, headings, tables or code."""
    text = importlib.metadata.metadata(package).json["description"]
    text = re.sub(r"```.*?```|<!--.*?-->", "", str(text), flags=re.DOTALL)
    kept = [line for line in text.splitlines() if re.match(r"\s*(?:[A-Z*-]|$)", line) and "](http" not in line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _good(half: int) -> Iterator[tuple[str, str]]:
    topics = sorted(name for name, text in pydoc_data.topics.topics.items() if len(text) > LENGTH)
    for name in random.Random(7).sample(topics, 16)[half::2][:8]:
        yield f"topic-{name}", pydoc_data.topics.topics[name]
    described = [(name, inspect.getdoc(importlib.import_module(name)) or "") for name in MODULES]
    described = [(name, text) for name, text in described if len(text) > 500]
    for name, text in described[half::2][:4]:
        yield f"module-{name}", text
    described = [(name, _readme(name)) for name in PACKAGES]
    described = [(name, text) for name, text in described if len(text) > 400]
    for name, text in described[half::2][:4]:
        yield f"readme-{name}", text
    for number, text in enumerate(PROSE[half::2]):
        yield f"prose-{2 * number + half}", text


def _junk(half: int, good: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    rng = random.Random(half)
    for number in range(4):
        yield f"spam-{number}", "\n".join(rng.sample(SPAM[half::2], 3) * 2)
    for number in range(3):
        yield f"shop-{number}", "\n".join(rng.choices(SHOP[half::2], k=6))
    for number in range(4):
        yield f"menu-{number}", "\n".join(rng.sample(MENU[half::2], 4) * 2)
    for number in range(3):
        yield f"keywords-{number}", " ".join(rng.choices(KEYWORDS[half::2], k=90))
    for number in range(2):
        lines = [
            f"2024-03-0{rng.randrange(1, 9)} {rng.getrandbits(64):016x} WARN retry={rng.randrange(9)}"
            for _ in range(25)
        ]
        yield f"log-{number}", "\n".join(lines)
    for name, text in good[:: len(good) // 4][:4]:
        words = text[:LENGTH].split()
        rng.shuffle(words)
        yield f"shuffled-{name}", " ".join(words)


def documents(half: int) -> list[tuple[str, str, bool]]:
    """(id, text, whether it is worth reading) of twenty good documents and twenty of junk.

    Args:
        half: 0 for the half on which the prompt was chosen, 1 for the half that is reported.
    """
    good = [(name, text[:LENGTH]) for name, text in _good(half)]
    junk = list(_junk(half, good))
    return [(name, text, True) for name, text in good] + [(name, text[:LENGTH], False) for name, text in junk]
