"""The figures of the answers of one way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.answers.scoring import Score, score
from benchmarks.answers.tasks import KINDS, Task
from benchmarks.client import Answer, Choice

COLUMNS = {
    "way": "way",
    "sampling": "sampling",
    "right": "right fields, %",
    "exact": "exactly right, %",
    "stop": "ended stop, %",
    "invented": "invented keys",
    "tokens": "tokens per answer",
    "blanks": "blanks, %",
    "tokens_per_second": "tokens/s",
    "failed": "failed",
}
BY_KIND = {
    "way": "way",
    "sampling": "sampling",
    **{kind: f"{kind}, %" for kind in KINDS},
}


@dataclass(frozen=True)
class Result:
    """The answer of a way to a task."""

    sampling: str
    task: Task
    answer: Answer

    @property
    def choice(self) -> Choice:
        return self.answer.choices.get(0, Choice())

    @property
    def score(self) -> Score:
        return score(self.task, self.choice.text)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of one way and sampling. Shares are in percent."""
    scores = [result.score for result in results]
    answered = [result for result in results if not result.answer.failure]
    tokens = [result.answer.tokens for result in answered]
    row: dict[str, Any] = {
        "answers": len(results),
        "failed": len(results) - len(answered),
    }
    row["right"] = _percent(score.right / score.expected for score in scores)
    row["exact"] = _percent(score.exact for score in scores)
    row["stop"] = _percent(result.choice.finish_reason == "stop" for result in results)
    row["invented"] = sum(score.invented for score in scores)
    row["tokens"] = round(statistics.mean(tokens), 1) if tokens else None
    row["blanks"] = _percent(
        score.blanks for score in scores if score.blanks is not None
    )
    for kind in KINDS:
        row[kind] = _percent(
            result.score.right / result.score.expected
            for result in results
            if result.task.kind == kind
        )
    return row


def _percent(shares: Iterator[float | bool]) -> float | None:
    values = list(shares)
    return round(100 * statistics.mean(values), 1) if values else None
