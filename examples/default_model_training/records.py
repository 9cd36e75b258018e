"""People, orders, events, products and made-up things, and texts about them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from examples.default_model_training.values import DATA, Values

ANY = (
    *(
        "word",
        "word",
        "words 2",
        "brand",
        "number",
        "number",
        "person",
        "code",
        "price",
        "iso_date",
        "time",
        "email",
    ),
    *(
        "phone",
        "city",
        "flag",
        "several word",
        "several number",
        "phrase",
        "phrase",
        "one_of colors",
    ),
)
"""Values of made-up things."""


@dataclass(frozen=True)
class Fact:
    """A fact, under `keys` of lower-case words.

    Clauses have placeholders for the value (`{v}`) and the subject (`{s}`, possessive
    `{p}`, object `{o}`).
    """

    keys: list[str]
    value: Any
    clauses: list[str]


@dataclass(frozen=True)
class Record:
    """A described thing. `subject` is its name in clauses."""

    domain: str
    subject: str
    facts: list[Fact]
    pronouns: tuple[str, ...] = ("it", "its", "it")


def known_record(v: Values, domain: str | None = None) -> Record:
    """Return a person, order, event or product."""
    domain = domain or v.rng.choice([*DATA["records"]])
    described = DATA["records"][domain]["facts"]
    values = {key: v.draw(fact["value"]) for key, fact in described.items()}
    name = str(next(iter(values.values())))
    pronouns = Record.pronouns
    if domain == "person":
        values["first name"], *_, values["last name"] = name.split(" ")
        pronouns = v.rng.choice((("she", "her", "her"), ("he", "his", "him")))
    facts = []
    for key, value in values.items():
        clauses = described[key]["if false" if value is False else "clauses"]
        facts.append(Fact(described[key]["keys"].split("|"), value, clauses))
    subject = v.rng.choice(
        (
            full_name(domain, name, v.rng),
            full_name(domain, name, v.rng),
            f"the {domain}",
        )
    )
    if domain == "person" and v.rng.random() < 0.3:
        subject = values["first name"]
    return Record(domain, subject, facts, pronouns)


def full_name(domain: str, name: str, rng: random.Random) -> str:
    """Return the name of the thing in passing."""
    before = {"order": ("order ", "order no. ", ""), "product": ("the ", "our ", "")}
    return rng.choice(before.get(domain, ("",))) + name


def made_up_record(v: Values) -> Record:
    """Return a thing with invented keys: the model has to find key and value in the
    text."""
    facts = []
    for key in {
        " ".join(v.word() for _ in range(v.rng.choice((1, 1, 2)))): 0
        for _ in range(v.rng.randint(2, 8))
    }:
        clauses = [
            f"the {key} is {{v}}",
            f"{key} is {{v}}",
            f"its {key} is {{v}}",
            f"the {key} of {{s}} is {{v}}",
        ]
        facts.append(Fact([key], v.draw(v.rng.choice(ANY)), clauses))
    return Record("thing", v.rng.choice(("the " + v.word(), v.brand(), "it")), facts)


def shown(value: Any, rng: random.Random) -> str:
    """Return the text of a value."""
    if isinstance(value, bool):
        return rng.choice(("true", "yes")) if value else rng.choice(("false", "no"))
    if isinstance(value, float) and rng.random() < 0.2:
        return f"{value:.2f}"
    if isinstance(value, dict):
        return rng.choice(("{1} x {0}", "{1} {0}", "{0} ({1})")).format(*value.values())
    if isinstance(value, list):
        texts = [shown(each, rng) for each in value]
        return (
            texts[0]
            if len(texts) == 1
            else ", ".join(texts[:-1]) + rng.choice((" and ", ", ")) + texts[-1]
        )
    return str(value)


def styled(key: str, style: str) -> str:
    """Return a key of lower-case words in one of the usual spellings."""
    words = key.split(" ")
    if style == "camel":
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if style == "pascal":
        return "".join(word.capitalize() for word in words)
    if style == "title":
        return " ".join(word.capitalize() for word in words)
    return {"snake": "_", "kebab": "-", "spaced": " "}[style].join(words)


def prose(
    record: Record, facts: list[Fact], rng: random.Random, named: str = ""
) -> str:
    """Return sentences with the facts in order. The first sentence mentions `named`."""
    sentences: list[str] = []
    clauses: list[str] = []
    by_name = rng.random() < 0.35
    for index, fact in enumerate(facts):
        subject = named or record.subject
        forms = (
            record.pronouns
            if index and not by_name
            else (subject, f"{subject}'s", subject)
        )
        choices = fact.clauses
        if named and not index:
            choices = [each for each in choices if "{s}" in each or "{p}" in each] or [
                f"{{s}}: {choices[0]}"
            ]
        text = shown(fact.value, rng)
        clauses.append(
            rng.choice(choices).format(s=forms[0], p=forms[1], o=forms[2], v=text)
        )
        if rng.random() < 0.6 or index == len(facts) - 1:
            text = rng.choice((" and ", ", ", ", and ", "; ")).join(clauses)
            sentences.append(text[0].upper() + text[1:] + ".")
            clauses = []
    return " ".join(sentences)


def listing(facts: list[Fact], keys: list[str], rng: random.Random) -> str:
    """Return the facts as `key: value` lines, or on one line."""
    colon = rng.choice((": ", ": ", ": ", " = ", " - ", ":"))
    between = rng.choice(("\n", "\n", "; ", ", ", "\n- "))
    lines = (
        f"{rng.choice((k, f.keys[0]))}{colon}{shown(f.value, rng)}"
        for k, f in zip(keys, facts, strict=True)
    )
    return ("- " if between == "\n- " else "") + between.join(lines)


def opened(record: Record, rng: random.Random) -> tuple[str, list[Fact]]:
    """Return a text that begins with one of the domain's openings, and its facts."""
    by_key = {fact.keys[0]: fact for fact in record.facts}
    opening = rng.choice(DATA["records"][record.domain]["openings"])
    told = [by_key[key] for key in re.findall(r"{(.*?)}", opening)]
    text = (
        re.sub(r"{(.*?)}", lambda found: shown(by_key[found[1]].value, rng), opening)
        + "."
    )
    rest = rng.sample(
        [fact for fact in record.facts[1:] if fact not in told],
        rng.choice((0, 0, 1, 2, 3)),
    )
    return f"{text} {prose(record, rest, rng)}".strip(), told + rest


@dataclass
class Told:
    """A record's text, and the requested facts under the requested keys."""

    record: Record
    text: str
    asked: dict[str, Any]
    all: dict[str, Any]
    """All facts of the text in its order, under their first keys."""


def tell(v: Values, record: Record, most: int = 7) -> Told:
    """Write some facts as prose or as a listing, and ask for some of them in another
    order."""
    rng = v.rng
    facts = rng.sample(record.facts, min(len(record.facts), rng.randint(2, most)))
    style = rng.choice(("snake", "snake", "snake", "camel", "title", "kebab", "spaced"))
    plain = rng.random() < 0.5

    def key(fact: Fact) -> str:
        return styled(fact.keys[0] if plain else rng.choice(fact.keys), style)

    kind = rng.random()
    known = record.domain in DATA["records"]
    implied: list[Fact] = []
    if known and kind < 0.3:
        text, facts = opened(record, rng)
    elif known and kind < 0.6:  # the name is in passing
        name, rest = (
            record.facts[0],
            [fact for fact in facts if fact is not record.facts[0]],
        )
        text = prose(record, rest, rng, full_name(record.domain, name.value, rng))
        facts = [name, *rest]
        if record.domain == "person" and rng.random() < 0.5:
            implied = [fact for fact in record.facts[1:3] if fact not in facts]
    elif kind < 0.8:
        text = prose(record, facts, rng)
    else:
        text = ""
    keys = [key(fact) for fact in facts]
    text = text or listing(facts, keys, rng)
    pairs = [*zip(keys, facts, strict=True), *((key(fact), fact) for fact in implied)]
    rng.shuffle(pairs)
    count = rng.randint(1, len(pairs)) if rng.random() < 0.4 else len(pairs)
    asked: dict[str, Any] = {}
    for name_of, fact in pairs[:count]:
        asked.setdefault(name_of, fact.value)
    everything = {styled(fact.keys[0], "snake"): fact.value for fact in facts}
    return Told(record, text[0].upper() + text[1:], asked, everything)
