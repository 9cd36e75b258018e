"""Tasks that are answered with JSON."""

from __future__ import annotations

from typing import Any

from examples.default_model_training import words
from examples.default_model_training.exchange import Example, dumped, schema_of
from examples.default_model_training.records import DOMAINS, thing
from examples.default_model_training.telling import Told, full_name, prose, shown, tell
from examples.default_model_training.values import Values


def grouped(asked: dict[str, Any], v: Values, domain: str) -> Any:
    """Now and then a part of the object moves into an inner one, or the whole into an outer one."""
    rng = v.rng
    kind = rng.random()
    if kind < 0.12 and len(asked) > 2:
        cut = rng.randint(1, len(asked) - 1)
        group = rng.choice(("details", "info", "data", "contact", "profile", "meta", v.word()))
        pairs = list(asked.items())
        if group not in asked:
            return {**dict(pairs[:cut]), group: dict(pairs[cut:])}
    if kind < 0.18:
        return {rng.choice((domain, "result", "data", v.word())): asked}
    return [asked] if kind < 0.20 else asked


def nothing(v: Values, value: Any) -> Any:
    """What to say of a value that is not in the text: null, or something empty."""
    empty: Any = {int: 0, float: 0.0, list: [], bool: False}.get(type(value), v.rng.choice(("", "unknown")))
    return None if v.rng.random() < 0.4 else empty


def padded_with_unknown(asked: dict[str, Any], told: Told, v: Values) -> dict[str, Any]:
    """Ask for one more key, that the text says nothing about."""
    absent = [f for f in told.record.facts if f.keys[0] not in asked and f not in told.facts and len(told.facts) > 0]
    absent = [f for f in absent if all(k not in told.text for k in f.keys) and str(f.value) not in told.text]
    if not absent or v.rng.random() > 0.08:
        return asked
    fact = v.rng.choice(absent)
    pairs = list(asked.items())
    pairs.insert(v.rng.randint(0, len(pairs)), (fact.keys[0].replace(" ", "_"), nothing(v, fact.value)))
    return dict(pairs)


ASK = (
    "Extract the {d} as JSON.",
    "Return the {d} as JSON.",
    "Give me JSON.",
    "Turn this into JSON.",
    "To JSON:",
    "Extract the information as a JSON object.",
    "What are the details? Answer in JSON.",
    "Extract the {d}.",
    "Describe the {d} as JSON.",
    "Write a JSON object for this {d}.",
    "Convert the text to JSON.",
    "Parse this.",
    "Read the text and fill in the form.",
    "Extract all data from the text.",
    "Answer with JSON only.",
)
ASK_KEYS = (
    "Extract {k} as JSON.",
    "Return JSON with the keys {k}.",
    "Give {k} as a JSON object.",
    "Keys: {k}.",
    "Use the keys {k}.",
    "Fill in {k}.",
    "I need {k}.",
    "Answer as JSON with {k}.",
)


def request_text(told: Told, value: Any, v: Values, style: str) -> str:
    """The user's message: a question and the text, in either order, perhaps with keys, schema or style named."""
    rng = v.rng
    keys = [*told.asked]
    kind = rng.random() if told.whole or rng.random() < 0.2 else rng.uniform(0.5, 1.0)
    if kind < 0.5:
        ask = rng.choice(ASK).format(d=told.record.domain)
    elif kind < 0.92:
        names = ", ".join(keys) if rng.random() < 0.6 or len(keys) < 2 else ", ".join(keys[:-1]) + " and " + keys[-1]
        ask = rng.choice(ASK_KEYS).format(k=names)
    else:
        ask = f"{rng.choice(('Schema', 'JSON schema', 'Follow this schema'))}: {dumped(schema_of(value), 'plain')}"
    if style == "compact":
        ask += rng.choice((" Compact.", " No spaces.", " Use compact JSON."))
    elif style == "indented":
        ask += rng.choice((" Indent it.", " Pretty-print it.", " Use indented JSON."))
    label = rng.choice(("", "", "", "Text: ", "Input: ", "Description: "))
    order = rng.random()
    if order < 0.5:
        return ask + rng.choice((" ", "\n", "\n\n")) + label + told.text
    return label + told.text + rng.choice((" ", "\n", "\n\n")) + ask


def json_task(v: Values) -> Example:
    rng = v.rng
    told = tell(v, rng.choice(DOMAINS)(v) if rng.random() < 0.75 else thing(v))
    told.asked = padded_with_unknown(told.asked, told, v)
    value = grouped(told.asked, v, told.record.domain)
    style = rng.choices(("plain", "compact", "indented"), (0.86, 0.08, 0.06))[0]
    spaces = rng if style == "plain" and rng.random() < 0.04 else None
    if rng.random() < 0.2:
        label = rng.choice((("Text", "JSON"), ("Input", "Output"), ("Description", "JSON"), ("Q", "A")))
        space = rng.choice(("", " ", "\n"))
        text = f"{label[0]}: {told.text}\n{label[1]}:{space}"
        return Example([text], dumped(value, style, spaces), chat=False)
    return Example([request_text(told, value, v, style)], dumped(value, style, spaces))


def json_list_task(v: Values) -> Example:
    """Two to four short records of one kind: a JSON array, or an object that holds it."""
    rng = v.rng
    domain = rng.choice(DOMAINS)
    records = [domain(v) for _ in range(rng.randint(2, 4))]
    picked = rng.sample(range(1, len(records[0].facts)), rng.randint(1, 2))
    rows, texts = [], []
    for record in records:
        facts = [record.facts[0], *(record.facts[i] for i in picked)]
        rows.append({f.keys[0].replace(" ", "_"): f.value for f in facts})
        values = [shown(f.value, rng) for f in facts]
        if picked and rng.random() < 0.5:
            texts.append(f"{values[0]}: " + ", ".join(values[1:]))
        else:
            texts.append(prose(record, facts[1:], rng, full_name(record, rng)))
    kind = records[0].domain
    value: Any = rows if rng.random() < 0.5 else {rng.choice((f"{kind}s", "items", "results", "people")): rows}
    text = rng.choice(("\n", " ", "\n- ")).join(texts)
    ask = rng.choice((f"List the {kind}s as JSON.", f"Extract all {kind}s.", f"Return an array of {kind}s.", "JSON:"))
    return Example([f"{ask}\n{text}"], dumped(value, "plain"))


FREE = (
    "Plan a trip to {W}.",
    "A recipe for {w}",
    "Rate the film {W}.",
    "Where is {W}?",
    "Describe {w}.",
    "{W} {u} is {w}.",
    "Make a list of {w}.",
    "The {w} is down since {u}.",
    "Write about {W} and {U}.",
    "Two things: {w} ({u}), {u} ({w})",
    "What is the {w} of {U}?",
    "Ticket {n}: {w} {u} {n}",
    "{w} {u}",
    "I want {w} for {n} {u}",
    "Fill in the form.",
)


def free_task(v: Values) -> Example:
    """A prompt that hardly says what to fill in: something short of every type, and an end."""
    rng = v.rng
    word, other, number = v.word(), v.word(), v.number()
    ask = rng.choice(FREE).format(w=word, W=word.capitalize(), u=other, U=other.capitalize(), n=number)
    near = (word, other, word.capitalize(), other.capitalize(), "unknown", "", f"{word} {other}")

    def filling(depth: int) -> Any:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(near)
        if kind < 0.6:
            return rng.choice((number, rng.randint(0, 10), rng.randint(0, 10), rng.randint(1, 50) / 10))
        if kind < 0.7:
            return rng.choice((True, False, None))
        if kind < 0.9 or depth > 1:
            return [rng.choice(near) for _ in range(rng.randint(0, 3))]
        if kind < 0.95:
            row = {key(): filling(2) for _ in range(2)}
            return [dict.fromkeys(row, word), row][: rng.randint(1, 2)]
        return {key(): filling(depth + 1) for _ in range(rng.randint(1, 3))}

    def key() -> str:
        return v.word() if rng.random() < 0.5 else rng.choice((*words.NOUNS, *words.KEYS))

    value = {key(): filling(0) for _ in range(rng.randint(1, 4))}
    spaces = rng if rng.random() < 0.1 else None
    return Example([ask], dumped(value, "plain", spaces), chat=rng.random() < 0.8)
