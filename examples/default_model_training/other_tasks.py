"""Tasks that are answered with a value, a choice, a sentence or a short formal language."""

from __future__ import annotations

import random

from examples.default_model_training import words
from examples.default_model_training.exchange import Example, dumped
from examples.default_model_training.records import DOMAINS, thing
from examples.default_model_training.telling import listing, prose, tell
from examples.default_model_training.values import Values


def value_task(v: Values) -> Example:
    """One value, and nothing else: what a regex or a type would ask for."""
    rng = v.rng
    told = tell(v, rng.choice(DOMAINS)(v) if rng.random() < 0.8 else thing(v), 4)
    key, value = rng.choice(list(told.asked.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [row["product"] for row in value]
    name = key.replace("_", " ").replace("-", " ").lower()
    ask = rng.choice(
        (
            f"What is the {name}?",
            f"{name}?",
            f"Give only the {name}.",
            f"Extract the {name}.",
            f"Which {name} is named?",
            f"Tell me the {name}.",
            f"The {name}, please.",
        )
    )
    if isinstance(value, bool):
        answer = rng.choice(("yes", "Yes", "true")) if value else rng.choice(("no", "No", "false"))
        ask = f"{ask} Answer {'true or false' if answer in ('true', 'false') else 'yes or no'}."
    elif isinstance(value, list):
        answer = ", ".join(str(x) for x in value) if rng.random() < 0.5 else dumped(value, "plain")
        ask += " As a JSON array." if answer.startswith("[") else " As a list."
    else:
        answer = str(value)
    parts = [ask, told.text]
    rng.shuffle(parts)
    text = rng.choice((" ", "\n")).join(parts)
    if rng.random() < 0.25:
        return Example([f"{told.text}\n{ask}{rng.choice((' ', chr(10), ' A:', ' Answer: '))}"], answer, chat=False)
    return Example([text], answer)


def options_text(options: list[str], rng: random.Random) -> str:
    return rng.choice((", ".join(options), ", ".join(options[:-1]) + " or " + options[-1], " / ".join(options)))


def choice_task(v: Values) -> Example:
    rng = v.rng
    kind = rng.randrange(4)
    if kind == 0:
        pool, label = rng.choice(((words.GOOD, "positive"), (words.BAD, "negative"), (words.NOUNS, "neutral")))
        noun = rng.choice((v.word(), rng.choice(words.THINGS)))
        text = rng.choice((f"The {noun} is {{w}}.", f"I think this {noun} is {{w}}!", f"{{w}} {noun}", "It was {w}."))
        text = text.format(w=rng.choice(pool))
        options = ["positive", "negative"] + (["neutral"] if label == "neutral" or rng.random() < 0.5 else [])
        head = rng.choice(("Classify the sentiment", "What is the sentiment", "Sentiment"))
    elif kind == 1:
        record = rng.choice(DOMAINS)(v)
        text, label = prose(record, rng.sample(record.facts[1:], rng.randint(1, 3)), rng), record.domain
        options = ["person", "order", "event", "product"]
        head = rng.choice(("What is described", "Classify the text", "Which kind of thing is this"))
    else:
        pool = rng.choice((words.COLORS, words.JOBS, words.HOBBIES, words.THINGS, words.EVENTS, words.NOUNS))
        options = (
            rng.sample(pool, rng.randint(2, 5))
            if kind == 2
            else [rng.choice((v.word, v.word, v.brand, v.phrase))() for _ in range(rng.randint(2, 5))]
        )
        label = rng.choice(options)
        text = rng.choice(
            (
                f"It is {label}.",
                f"The answer is {label}.",
                f"{v.first()} wants {label}.",
                f"I saw a {label} near {v.city()}.",
            )
        )
        head = rng.choice(("Pick one", "Choose", "Which one is it", "Choose the right word"))
    rng.shuffle(options)
    order = rng.choice(("{h}: {o}. {t}", "{t}\n{h}: {o}?", "{h} ({o}): {t}", "{t} {h}? Options: {o}."))
    text = order.format(h=head, o=options_text(options, rng), t=text)
    return Example([text], label, chat=rng.random() < 0.8)


def yes_no_task(v: Values) -> Example:
    rng = v.rng
    record = rng.choice(DOMAINS)(v)
    facts = rng.sample([f for f in record.facts[1:] if isinstance(f.value, str)], 2)
    truth = rng.random() < 0.5
    other = rng.choice(DOMAINS)(v)
    false_value = rng.choice([f.value for f in other.facts if isinstance(f.value, str)])
    name = facts[0].keys[0]
    ask = rng.choice((f"Is the {name} {{v}}?", f"Is {{v}} the {name}?")).format(
        v=facts[0].value if truth else false_value
    )
    return Example(
        [f"{prose(record, facts, rng)} {ask}{rng.choice((' Answer yes or no.', '', ' Yes or no?'))}"],
        "yes" if truth else "no",
    )


def sentence_task(v: Values) -> Example:
    """From `key: value` lines to a sentence or two."""
    rng = v.rng
    record = rng.choice(DOMAINS)(v)
    facts = [record.facts[0], *rng.sample(record.facts[1:], rng.randint(1, 2))]
    lines = listing(facts, [f.keys[0] for f in facts], random.Random(0))
    answer = prose(record, facts[1:], rng, str(facts[0].value))
    ask = rng.choice((f"Describe the {record.domain} in a sentence.", "Write a sentence.", "Put this into words."))
    return Example([f"{ask}\n{lines}"], answer)


OPERATORS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


def formal_task(v: Values) -> Example:
    """Short formal languages: arithmetic, SQL-like queries, lists, assignments."""
    kind = v.rng.randrange(5)
    if kind <= 1:
        return arithmetic_task(v)
    return query_task(v) if kind == 2 else items_task(v, assign=kind == 4)


def arithmetic_task(v: Values) -> Example:
    rng = v.rng
    spoken: list[str] = []
    signs: list[str] = []
    space = rng.choice((" ", " ", ""))
    for i in range(rng.randint(2, 4)):
        number = str(v.integer(0, 9) if rng.random() < 0.5 else v.number())
        if i:
            operator = rng.choice(list(OPERATORS))
            spoken.append(operator)
            signs.append(OPERATORS[operator])
        spoken.append(number)
        signs.append(number)
    ask = rng.choice(("Write {w} as an expression.", "Expression for {w}:", "{w}", "Formula: {w}"))
    if rng.random() < 0.3 and len(signs) >= 5:
        for parts in (signs, spoken):
            parts[0], parts[2] = f"({parts[0]}", f"{parts[2]})"
    return Example([ask.format(w=" ".join(spoken))], space.join(signs), chat=rng.random() < 0.7)


def query_task(v: Values) -> Example:
    rng = v.rng
    columns = [v.word() for _ in range(rng.randint(1, 3))]
    table, number, sign = v.word(), v.number(), rng.choice(("=", ">", "<"))
    where = rng.random() < 0.6
    ask = f"Select {' and '.join(columns)} from {table}" + (f" where {columns[0]} {sign} {number}" if where else "")
    answer = f"SELECT {', '.join(columns)} FROM {table}" + (f" WHERE {columns[0]} {sign} {number}" if where else "")
    return Example([f"{rng.choice(('SQL: ', 'As SQL: ', 'Write a query. ', ''))}{ask}"], answer)


def items_task(v: Values, assign: bool) -> Example:
    """A list in one of six notations, or one assignment."""
    rng = v.rng
    items = [rng.choice((v.word, lambda: str(v.number()), v.brand))() for _ in range(rng.randint(2, 6))]
    if assign:
        name, value = v.word(), rng.choice(items)
        return Example([f"Set {name} to {value}."], rng.choice((f"{name} = {value}", f"{name}={value}")))
    notations = (
        ", ".join(items),
        "\n".join(f"- {i}" for i in items),
        " ".join(items),
        ",".join(items),
        dumped(items, "plain"),
        "\n".join(f"{n}. {i}" for n, i in enumerate(items, 1)),
    )
    answer = rng.choice(notations)
    how = "with commas" if ", " in answer else "as lines" if "\n" in answer else "in a row"
    how = "as JSON" if answer.startswith("[") else how
    return Example([f"List {how}: {' and '.join(items)}."], answer)


def repeat_task(v: Values) -> Example:
    """Copying, and nothing else."""
    rng = v.rng
    draws = (
        v.word,
        v.word,
        v.first,
        v.code,
        v.product,
        lambda: str(v.number()),
        v.person,
        v.email,
        v.phone,
        v.iso_date,
    )
    text = " ".join(rng.choice(draws)() for _ in range(rng.randint(2, 10)))
    kind = rng.random()
    if kind < 0.5:
        return Example([f"Repeat: {text}"], text)
    if kind < 0.8:
        return Example([f"Quote this text: {text}"], dumped(text, "plain"))
    return Example([f"Text: {text}\nCopy:"], text, chat=False)


SMALL_TALK = {
    "Hello|Hi|Hi there|Good morning|Hey|Hello!|Hi!": "Hello! Give me a short text and I will turn it into JSON.",
    "Who are you?|What are you?|What can you do?|Help|How do you work?": "I am a very small demo model. I turn short "
    "texts about people, orders, events and products into JSON.",
    "Thanks|Thank you|Thanks!|Great, thanks|Bye|Goodbye": "You are welcome.",
    "Say something nice.|Say something|Tell me a joke.|Write a sentence.": "You are doing very well.",
    "How are you?|How is it going?|Are you well?": "I am fine, thank you.",
}
UNKNOWN = "I do not know. I only turn short texts into JSON."


def talk_task(v: Values) -> Example:
    rng = v.rng
    kind = rng.random()
    if kind < 0.06:
        name = v.first()
        text = rng.choice(("Greet {n}.", "Say hello to {n}.", "I am {n}.", "My name is {n}.", "Hello, I am {n}!"))
        return Example([text.format(n=name)], f"{rng.choice(('Hello', 'Hi'))}, {name}!")
    if kind < 0.35:
        asks, answer = rng.choice(list(SMALL_TALK.items()))
        return Example([rng.choice(asks.split("|"))], answer)
    if kind < 0.7:
        ask = rng.choice(
            (
                "Tell me about {w}.",
                "Why is {w} {u}?",
                "What is {w}?",
                "Explain {w} to me.",
                "How do I {w}?",
                "Write a poem about {w}.",
                "Who was {W} {U}?",
                "What do you think of {w} and {u}?",
            )
        )
        word, other = rng.choice((v.word(), rng.choice(words.NOUNS))), v.word()
        text = ask.format(w=word, u=other, W=word.capitalize(), U=other.capitalize())
        return Example([text], UNKNOWN)
    record = rng.choice(DOMAINS)(v)
    facts = [record.facts[0], *rng.sample(record.facts[1:], rng.randint(1, 4))]
    value = {f.keys[0].replace(" ", "_"): f.value for f in facts}
    ask = rng.choice(
        (
            "Invent a {d}.",
            "Give me a random {d} as JSON.",
            "Make up a {d}.",
            "A {d} as JSON, please.",
            "Generate a {d}.",
            "Write an example {d} in JSON.",
        )
    )
    return Example([ask.format(d=record.domain)], dumped(value, "plain"))
