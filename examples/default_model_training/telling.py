"""How a record is told: as prose, or as a listing."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from examples.default_model_training.records import Fact, Record
from examples.default_model_training.values import Values


def shown(value: Any, rng: random.Random) -> str:
    """A value as it stands in prose."""
    if isinstance(value, bool):
        return rng.choice(("true", "yes")) if value else rng.choice(("false", "no"))
    if isinstance(value, float) and rng.random() < 0.2:
        return f"{value:.2f}"
    if isinstance(value, dict):
        texts = [str(v) for v in value.values()]
        if set(value) == {"product", "quantity"}:
            return rng.choice(("{1} x {0}", "{1} {0}", "{0} ({1})")).format(*texts)
        return " ".join(texts)
    if isinstance(value, list):
        texts = [shown(v, rng) for v in value]
        return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + rng.choice((" and ", ", ")) + texts[-1]
    return str(value)


def styled(key: str, style: str) -> str:
    """A key of lower-case words in one of the usual spellings."""
    words = key.split(" ")
    if style == "camel":
        return words[0] + "".join(w.capitalize() for w in words[1:])
    if style == "title":
        return " ".join(w.capitalize() for w in words)
    return {"snake": "_", "kebab": "-", "spaced": " "}[style].join(words)


def prose(record: Record, facts: list[Fact], rng: random.Random, named: str = "") -> str:
    """Sentences that tell the facts in order; `named` is a subject that has to be mentioned."""
    sentences: list[str] = []
    clauses: list[str] = []
    by_name = rng.random() < 0.35
    for i, fact in enumerate(facts):
        subject = named or record.subject
        forms = record.pronouns if i and not by_name else (subject, f"{subject}'s", subject)
        choices = fact.clauses
        if named and i == 0:
            choices = tuple(c for c in choices if "{s}" in c or "{p}" in c) or (f"{{s}}: {choices[0]}",)
        text = shown(fact.value, rng)
        clauses.append(rng.choice(choices).format(s=forms[0], p=forms[1], o=forms[2], v=text))
        if rng.random() < 0.6 or i == len(facts) - 1:
            text = rng.choice((" and ", ", ", ", and ", "; ")).join(clauses)
            sentences.append(text[0].upper() + text[1:] + ".")
            clauses = []
    return " ".join(sentences)


def listing(facts: list[Fact], keys: list[str], rng: random.Random) -> str:
    """The facts as `key: value` lines, or on one line."""
    colon = rng.choice((": ", ": ", ": ", " = ", " - ", ":"))
    between = rng.choice(("\n", "\n", "; ", ", ", "\n- "))
    lines = [f"{rng.choice((k, k, f.keys[0]))}{colon}{shown(f.value, rng)}" for k, f in zip(keys, facts, strict=True)]
    return ("- " if between == "\n- " else "") + between.join(lines)


def full_name(record: Record, rng: random.Random) -> str:
    """How a text names the thing when it tells the name by the way."""
    name = str(record.facts[0].value)
    before = {"order": ("order ", "Order ", "order no. ", ""), "product": ("the ", "The ", "our ", "")}
    return rng.choice(before.get(record.domain, ("",))) + name


def opened(record: Record, count: int, rng: random.Random) -> tuple[str, list[Fact]]:
    """A text that begins with one of the record's opening sentences, and the facts it tells."""
    by_key = {f.keys[0]: f for f in record.facts}
    opening = rng.choice(record.openings)
    told = [by_key[key] for key in re.findall(r"{(.*?)}", opening)]
    text = re.sub(r"{(.*?)}", lambda m: shown(by_key[m[1]].value, rng), opening)
    text = text[0].upper() + text[1:] + "."
    others = [f for f in record.facts[1:] if f not in told]
    rest = rng.sample(others, min(len(others), rng.choice((0, 0, count // 2))))
    return f"{text} {prose(record, rest, rng)}".strip(), told + rest


@dataclass
class Told:
    """A record's text, and the facts asked for, under the keys they are asked by."""

    record: Record
    text: str
    facts: list[Fact]
    asked: dict[str, Any]
    whole: bool  # all that is told is asked for


def tell(v: Values, record: Record, most: int = 7) -> Told:
    """Pick facts, tell them in prose or as a listing, and ask for some of them in another order."""
    rng = v.rng
    count = min(len(record.facts), rng.randint(2, most))
    facts = rng.sample(record.facts, count)
    if record.domain != "thing" and rng.random() < 0.7 and record.facts[0] not in facts:
        facts[0] = record.facts[0]
    facts.sort(key=lambda f: f is not record.facts[0])
    opening = bool(record.openings) and rng.random() < 0.3
    if opening:
        text, facts = opened(record, count, rng)
    style = rng.choice(("snake", "snake", "snake", "camel", "title", "kebab", "spaced"))
    plain = rng.random() < 0.5
    keys = [styled(f.keys[0] if plain else rng.choice(f.keys), style) for f in facts]
    as_list = rng.random() < 0.22
    pairs = list(zip(keys, facts, strict=True))
    if opening:
        pass
    elif as_list:
        text = listing(facts, keys, rng)
    elif facts[0] is record.facts[0] and record.domain != "thing" and rng.random() < 0.6:
        text = prose(record, facts[1:], rng, full_name(record, rng))
        if record.domain == "person" and rng.random() < 0.25:
            pairs += [(styled(f.keys[0], style), f) for f in record.facts[1:3] if f not in facts]
    else:
        text = prose(record, facts, rng)
    if rng.random() < 0.5:
        rng.shuffle(pairs)
    told = len(pairs)
    if rng.random() < 0.4:
        pairs = pairs[: rng.randint(1, len(pairs))]
    asked: dict[str, Any] = {}
    for key, fact in pairs:
        asked.setdefault(key, fact.value)
    return Told(record, text, [f for _, f in pairs], asked, whole=len(pairs) == told)
