"""People, orders, events, products and made-up things, and the texts that tell of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.default_model_training.values import DATA, Values

Draw = Callable[[Values], Any]
DRAWS: dict[str, dict[str, Draw]] = {
    "person": {
        "name": Values.person,
        "age": lambda v: v.integer(1, 99),
        "city": Values.city,
        "country": Values.country,
        "job": lambda v: v.one_of("jobs"),
        "employer": Values.company,
        "email": Values.email,
        "phone": Values.phone,
        "birthday": Values.iso_date,
        "hobbies": lambda v: v.some("hobbies"),
        "languages": lambda v: v.some("languages"),
        "children": lambda v: v.integer(0, 12),
        "married": lambda v: v.rng.random() < 0.5,
    },
    "order": {
        "order id": Values.code,
        "customer": Values.person,
        "total": Values.price,
        "currency": lambda v: v.one_of("currencies"),
        "status": lambda v: v.rng.choice(("pending", "paid", "shipped", "delivered", "cancelled", "returned")),
        "date": Values.iso_date,
        "address": Values.city,
        "quantity": lambda v: v.integer(1, 500),
        "product": Values.product,
        "gift": lambda v: v.rng.random() < 0.5,
        "carrier": Values.company,
    },
    "event": {
        "title": lambda v: f"{v.brand()} {v.one_of('topics')} {v.one_of('events')}",
        "date": Values.iso_date,
        "time": Values.time,
        "venue": Values.venue,
        "city": Values.city,
        "attendees": lambda v: v.integer(5, 9000),
        "organizer": Values.person,
        "ticket price": Values.price,
        "topic": lambda v: v.one_of("topics"),
        "online": lambda v: v.rng.random() < 0.5,
        "duration": lambda v: v.integer(1, 72),
    },
    "product": {
        "name": Values.product,
        "brand": Values.company,
        "price": Values.price,
        "color": lambda v: v.one_of("colors"),
        "weight": lambda v: v.integer(1, 90),
        "stock": lambda v: v.integer(1, 9999),
        "in stock": lambda v: v.rng.random() < 0.5,
        "rating": lambda v: v.rng.randint(10, 50) / 10,
        "category": lambda v: v.one_of("categories"),
        "sku": Values.code,
        "tags": lambda v: v.some("tags"),
        "released": Values.iso_date,
        "warranty": lambda v: v.integer(1, 20),
    },
}
"""Domain -> key of a fact -> how its value is drawn. The first fact names the thing."""
ANY: tuple[Draw, ...] = (
    *(Values.word, Values.word, Values.brand, Values.number, Values.number, Values.person, Values.code, Values.price),
    *(Values.iso_date, Values.time, Values.email, Values.phone, Values.city, lambda v: v.rng.random() < 0.5),
    *(lambda v: [v.word() for _ in range(v.rng.randint(1, 4))], lambda v: f"{v.word()} {v.word()}"),
)
"""Values of made-up things."""


@dataclass(frozen=True)
class Fact:
    """One thing to know, under `keys` of lower-case words.

    Clauses have places for the value `{v}` and the subject: `{s}` who, `{p}` whose, `{o}` whom.
    """

    keys: list[str]
    value: Any
    clauses: list[str]


@dataclass(frozen=True)
class Record:
    """A described thing. `subject` stands in clauses."""

    domain: str
    subject: str
    facts: list[Fact]

    @property
    def pronouns(self) -> tuple[str, str, str]:
        """Who, whose, whom."""
        return ("she", "her", "her") if self.domain == "person" else ("it", "its", "it")


def known_record(v: Values, domain: str | None = None) -> Record:
    """A person, order, event or product."""
    domain = domain or v.rng.choice([*DRAWS])
    facts = []
    for key, draw in DRAWS[domain].items():
        described, value = DATA["records"][domain]["facts"][key], draw(v)
        clauses = described["if false"] if value is False else described["clauses"]
        facts.append(Fact(described["keys"].split("|"), value, clauses))
    subject = {"order": f"order {facts[0].value}", "product": f"the {facts[0].value}"}.get(domain, str(facts[0].value))
    return Record(domain, v.rng.choice((subject, subject, f"the {domain}")), facts)


def made_up_record(v: Values) -> Record:
    """Something whose keys have never been seen: the model has to find key and value in the text."""
    facts = []
    for key in {" ".join(v.word() for _ in range(v.rng.choice((1, 1, 2)))): 0 for _ in range(v.rng.randint(2, 8))}:
        clauses = [f"the {key} is {{v}}", f"{key} is {{v}}", f"its {key} is {{v}}", f"the {key} of {{s}} is {{v}}"]
        facts.append(Fact([key], v.rng.choice(ANY)(v), clauses))
    return Record("thing", v.rng.choice(("the " + v.word(), v.brand(), "it")), facts)


def shown(value: Any, rng: random.Random) -> str:
    """A value as it stands in a text."""
    if isinstance(value, bool):
        return rng.choice(("true", "yes")) if value else rng.choice(("false", "no"))
    if isinstance(value, list):
        texts = [shown(each, rng) for each in value]
        return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + rng.choice((" and ", ", ")) + texts[-1]
    return str(value)


def styled(key: str, style: str) -> str:
    """A key of lower-case words in one of the usual spellings."""
    words = key.split(" ")
    if style == "camel":
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if style == "title":
        return " ".join(word.capitalize() for word in words)
    return {"snake": "_", "kebab": "-", "spaced": " "}[style].join(words)


def prose(record: Record, facts: list[Fact], rng: random.Random) -> str:
    """Sentences that tell the facts in order."""
    sentences: list[str] = []
    clauses: list[str] = []
    by_name = rng.random() < 0.35
    for index, fact in enumerate(facts):
        named = (record.subject, f"{record.subject}'s", record.subject)
        forms = record.pronouns if index and not by_name else named
        text = shown(fact.value, rng)
        clauses.append(rng.choice(fact.clauses).format(s=forms[0], p=forms[1], o=forms[2], v=text))
        if rng.random() < 0.6 or index == len(facts) - 1:
            text = rng.choice((" and ", ", ", ", and ", "; ")).join(clauses)
            sentences.append(text[0].upper() + text[1:] + ".")
            clauses = []
    return " ".join(sentences)


def listing(facts: list[Fact], rng: random.Random) -> str:
    """The facts as `key: value` lines, or on one line."""
    colon = rng.choice((": ", ": ", ": ", " = ", " - "))
    between = rng.choice(("\n", "\n", "; ", ", ", "\n- "))
    text = between.join(f"{fact.keys[0]}{colon}{shown(fact.value, rng)}" for fact in facts)
    return ("- " if between == "\n- " else "") + text


@dataclass
class Told:
    """A record's text, and the facts asked for, under the keys they are asked by."""

    record: Record
    text: str
    asked: dict[str, Any]
    all: dict[str, Any]
    """All facts of the text in its order, under their first keys."""


def tell(v: Values, record: Record, most: int = 7) -> Told:
    """Pick facts, tell them in prose or as a listing, and ask for some of them in another order."""
    rng = v.rng
    facts = rng.sample(record.facts, min(len(record.facts), rng.randint(2, most)))
    openings = DATA["records"].get(record.domain, {}).get("openings")
    if openings and rng.random() < 0.3:
        by_key = {fact.keys[0]: fact for fact in record.facts}
        opening = rng.choice([each for each in openings if by_key.keys() >= {*re.findall(r"{(.*?)}", each)}])
        facts = [by_key[key] for key in re.findall(r"{(.*?)}", opening)]
        text = re.sub(r"{(.*?)}", lambda found: shown(by_key[found[1]].value, rng), opening) + "."
    else:
        text = listing(facts, rng) if rng.random() < 0.25 else prose(record, facts, rng)
    style = rng.choice(("snake", "snake", "snake", "camel", "title", "kebab", "spaced"))
    plain = rng.random() < 0.5
    asked = {styled(fact.keys[0] if plain else rng.choice(fact.keys), style): fact.value for fact in facts}
    pairs = list(asked.items())
    rng.shuffle(pairs)
    count = rng.randint(1, len(pairs)) if rng.random() < 0.4 else len(pairs)
    everything = {styled(fact.keys[0], "snake"): fact.value for fact in facts}
    return Told(record, text[0].upper() + text[1:], dict(pairs[:count]), everything)
