"""Measure how many real schemas a backend enforces, and how fast, by MaskBench's
protocol.

    python -m benchmarks.maskbench

Compiles each schema and replays its instances token by token. Valid instances must be
accepted, invalid ones rejected. Prints the outcomes, the refusals by keyword, and the
times. Writes maskbench.{json,png}. Exit status 1 if an invalid instance is accepted.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from benchmarks import report
from benchmarks.property_order import in_schema_order
from benchmarks.workload import DATA, read_rows, tekken
from guided.backends import AUTO, Backends, candidates
from guided.backends.base import Matcher
from guided.bitmask import words
from guided.check.process import BackendProcess, set_time_limit
from guided.constraint import Constraint
from guided.errors import CompileTimeout, GuidedError, InvalidConstraint, TokenRejected
from guided.masks.compilation import compile_constraint
from guided.vocabulary import Vocabulary

Outcome = Literal[
    "passes", "accepts invalid", "rejects valid", "refused", "timeout", "error"
]
OUTCOMES: tuple[Outcome, ...] = (
    "passes",
    "accepts invalid",
    "rejects valid",
    "refused",
    "timeout",
    "error",
)
_REPLAY_SECONDS = 120.0
"""Time limit for the instances of a schema."""


@dataclass(kw_only=True)
class Result:
    """The result of one schema."""

    id: str
    outcome: Outcome
    backend: str = ""
    """The backend that compiled the schema; empty if none did."""
    pointer: str | None = None
    """JSON pointer to the refused part of the schema."""
    reason: str = ""
    """The error's message, or the instance that was not decided as expected."""
    reordered: bool = False
    """Whether a valid instance was accepted only with its properties in the schema's
    order."""
    not_enforced: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    """JSON pointers of keywords that the mask does not enforce, and that are checked at
    the end of the output."""
    compile_seconds: float = 0.0
    """Seconds of the compilation with the first mask."""
    mask_seconds: list[float] = field(default_factory=list)
    """Seconds of each mask of the instances, with the acceptance of the token after the
    mask."""

    @property
    def keyword(self) -> str:
        """The last keyword of the pointer."""
        named = [
            token for token in (self.pointer or "").split("/") if not token.isdecimal()
        ]
        return named[-1] if named else ""

    def row(self) -> dict[str, Any]:
        """Return the line of `--lines`."""
        names = ("id", "outcome", "backend", "keyword", "pointer", "reason", "checked")
        return {
            **{name: getattr(self, name) for name in names},
            "first mask [ms]": round(1e3 * self.compile_seconds, 3) or None,
            "mask [us]": report.percentiles(self.mask_seconds, 1e6).get("mean"),
        }


def judge_all(
    entries: Iterable[Mapping[str, Any]],
    vocabulary: Vocabulary,
    names: Sequence[str],
    seconds: float,
) -> Iterator[Result]:
    """Judge entries in order in another process, which is replaced after a timeout or
    an error.

    Args:
        entries: each `{"id", "schema", "tests": [{"valid", "data"}]}`.
        names: backends to try in order.
        seconds: time limit of a compilation. A longer compilation is a `timeout`.
    """
    process = BackendProcess(vocabulary, names)
    try:
        for entry in entries:
            try:
                result: Result = process.call(_judge, entry, names, seconds)
            except GuidedError as error:
                outcome: Outcome = (
                    "timeout" if isinstance(error, CompileTimeout) else "error"
                )
                result = Result(
                    id=str(entry.get("id", "")), outcome=outcome, reason=error.message
                )
            if result.outcome == "error":
                process.stop()
            yield result
    finally:
        process.stop()


def _judge(
    backends: Backends, entry: Mapping[str, Any], names: Sequence[str], seconds: float
) -> Result:
    set_time_limit(seconds)
    result = Result(id=str(entry.get("id", "")), outcome="passes")
    started = time.perf_counter()
    try:
        constraint = Constraint.json_schema(entry["schema"])
        compiled = compile_constraint(backends, constraint, names)
        result.compile_seconds = time.perf_counter() - started
        result.backend, result.not_enforced = compiled.backend, constraint.not_enforced
        result.checked = tuple(getattr(compiled.grammar, "checked", ()))
        set_time_limit(_REPLAY_SECONDS)
        for test in entry["tests"]:
            accepted = accepts(
                compiled.grammar.matcher(),
                test["data"],
                backends.vocabulary,
                result.mask_seconds,
            )
            if test["valid"] and not accepted:
                ordered = in_schema_order(test["data"], entry["schema"])
                accepted = accepts(
                    compiled.grammar.matcher(),
                    ordered,
                    backends.vocabulary,
                    result.mask_seconds,
                )
                result.reordered |= accepted
            if accepted != test["valid"] and result.outcome != "accepts invalid":
                result.outcome = "rejects valid" if test["valid"] else "accepts invalid"
                result.reason = json.dumps(test["data"], ensure_ascii=False)
    except InvalidConstraint as error:
        result.outcome, result.pointer, result.reason = (
            "refused",
            error.pointer,
            error.message,
        )
    except GuidedError as error:
        result.outcome, result.reason = "error", str(error)
    return result


def accepts(
    matcher: Matcher, document: Any, vocabulary: Vocabulary, seconds: list[float]
) -> bool:
    """Return whether every mask allows the next token of `document` as JSON text.
    Appends the seconds of each mask."""
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    for token in vocabulary.encode(json.dumps(document, ensure_ascii=False)):
        started = time.perf_counter()
        matcher.fill_bitmask(row)
        allowed = int(row[token >> 5]) >> (token & 31) & 1
        if allowed:
            try:
                matcher.accept_tokens([token])
            except TokenRejected:
                allowed = 0
        seconds.append(time.perf_counter() - started)
        if not allowed:
            return False
    return matcher.is_accepting()


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the table of results."""
    count = len(results)
    outcomes = Counter(result.outcome for result in results)
    refused = Counter(
        result.keyword or result.reason[:60]
        for result in results
        if result.outcome == "refused"
    )
    written = sum(
        result.outcome == "passes" and not result.checked for result in results
    )
    return {
        "schemas": count,
        "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "percent": {
            outcome: round(100 * outcomes[outcome] / max(1, count), 2)
            for outcome in OUTCOMES
        },
        "accepted in the schema's property order only": sum(
            result.reordered for result in results
        ),
        "with something not enforced": sum(
            bool(result.not_enforced) for result in results
        ),
        "schemas with checked keywords": sum(
            bool(result.checked) for result in results
        ),
        "enforced while written [%]": round(
            100 * written / max(1, outcomes["passes"]), 2
        ),
        "refused by keyword": dict(refused.most_common()),
        "backends": dict(
            Counter(
                result.backend for result in results if result.backend
            ).most_common()
        ),
        "first mask [ms]": report.percentiles(
            [each.compile_seconds for each in results if each.compile_seconds]
        ),
        "mask [us]": report.percentiles(
            [seconds for result in results for seconds in result.mask_seconds], 1e6
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.start(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="JSON lines of MaskBench (default: %(default)s)",
    )
    parser.add_argument("--backend", default=AUTO)
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="time limit of a compilation, in seconds",
    )
    parser.add_argument(
        "--every", type=int, default=1, help="use only every Nth schema"
    )
    parser.add_argument(
        "--lines", type=Path, help="write one line of JSON per schema to this file"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.every = 40
    started_on = report.machine()
    entries = read_rows(options.data)[:: options.every]
    names = candidates("json_schema", options.backend)
    judged = judge_all(
        entries, Vocabulary.from_tekken(tekken()), names, options.seconds
    )
    results = list(tqdm(judged, total=len(entries), disable=None, mininterval=1))
    table = summary(results)
    shares = [
        {
            "outcome": name,
            "schemas": table["outcomes"][name],
            "%": table["percent"][name],
        }
        for name in OUTCOMES
    ]
    report.print_table(shares, {name: name for name in ("outcome", "schemas", "%")})
    for name in list(table)[3:]:
        print(f"{name}: {json.dumps(table[name], ensure_ascii=False)}")
    if options.lines:
        options.lines.write_text(
            "".join(
                json.dumps(each.row(), ensure_ascii=False) + "\n" for each in results
            )
        )
    report.write_json(options.out / "maskbench.json", vars(options), table, started_on)
    title = f"{len(entries)} schemas, {options.backend}"
    shown = [{"way": options.backend, **share} for share in shares]
    report.plot(
        options.out / "maskbench.png",
        title,
        shown,
        ("outcome",),
        {"%": "% of the schemas"},
    )
    report.exit_with(
        [
            f"{each.id} accepts {each.reason[:200]}"
            for each in results
            if each.outcome == "accepts invalid"
        ]
    )


if __name__ == "__main__":
    main()
