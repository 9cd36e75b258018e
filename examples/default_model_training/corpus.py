"""The training text: generated descriptions with what is asked about them, and the answer.

`example(index, seed)` is a pure function of its arguments, so that a training run can be repeated and resumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from examples.default_model_training.exchange import Example, dumped
from examples.default_model_training.json_tasks import free_task, json_list_task, json_task, request_text
from examples.default_model_training.other_tasks import (
    choice_task,
    formal_task,
    repeat_task,
    sentence_task,
    talk_task,
    value_task,
    yes_no_task,
)
from examples.default_model_training.records import DOMAINS
from examples.default_model_training.telling import tell
from examples.default_model_training.tool_tasks import call_task, tool_task
from examples.default_model_training.values import Values

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer in JSON.",
    "You extract data from text.",
    "Be brief.",
    "Return only JSON.",
    "You are a precise assistant. Answer with what is asked and nothing else.",
    "Extract the facts.",
)
TASKS: tuple[tuple[Callable[[Values], Example], float], ...] = (
    (json_task, 0.50),
    (json_list_task, 0.05),
    (free_task, 0.04),
    (value_task, 0.11),
    (choice_task, 0.07),
    (yes_no_task, 0.02),
    (sentence_task, 0.04),
    (formal_task, 0.05),
    (repeat_task, 0.11),
    (talk_task, 0.03),
)


def example(index: int, seed: int = 0, held_out: bool = False, tool_share: float = 0.3) -> Example:
    """The `index`-th example of the corpus; the same arguments always give the same example.

    Args:
        tool_share: the part of the examples that offers functions. 0 gives the corpus of the tokenizer.
    """
    rng = random.Random(f"{seed}:{index}:{held_out}")
    v = Values(rng, held_out)
    if tool_share and rng.random() < tool_share:
        return tool_task(v)
    task = rng.choices([t for t, _ in TASKS], [w for _, w in TASKS])[0]
    one = task(v)
    if rng.random() < 0.04:
        earlier = [task(v) for _ in range(rng.randint(1, 4))]
        if one.chat:
            one.turns = [text for e in earlier for text in (*e.turns, e.answer)] + one.turns
        else:
            one.turns = ["\n\n".join(e.turns[0] + e.answer for e in earlier) + "\n\n" + one.turns[0]]
    if one.chat and rng.random() < 0.25:
        one.system = rng.choice(SYSTEMS)
    return one


def evaluation_example(index: int, seed: int = 1) -> Example:
    """A held-out JSON task about a person, order, event or product.

    Names, numbers, dates, codes and addresses are those that training never saw; the ways of telling are not new.
    """
    rng = random.Random(f"evaluation:{seed}:{index}")
    v = Values(rng, held_out=True)
    told = tell(v, DOMAINS[index % len(DOMAINS)](v))
    text = request_text(told, told.asked, v, "plain")
    return Example([text], dumped(told.asked, "plain"))


def evaluation_call(index: int, seed: int = 1) -> Example:
    """A held-out request with two to four functions."""
    return call_task(Values(random.Random(f"call:{seed}:{index}"), held_out=True))
