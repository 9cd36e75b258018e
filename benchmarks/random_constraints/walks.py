"""Random outputs of a constraint, sampled from its masks as by a model with random weights."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_constraints.languages import Case, random_choice, random_grammar, random_regex
from benchmarks.random_constraints.schemas import random_schema
from guided.backends import AUTO, BACKENDS, Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids, words
from guided.compilation import compile_constraint
from guided.errors import ConstraintNotMet, GuidedError, InvalidConstraint
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

WAYS = (AUTO, *BACKENDS)
_KEY = "grammar"


@dataclass(frozen=True)
class Result:
    """What happened to `count` outputs of a case."""

    outcome: str
    """`stop` (valid), `invalid`, `not met` (a checked keyword), `failed` (the row), `cut`, `refused`, `error`;
    `crashed`, `timeout` (the process)."""
    detail: str = ""
    count: int = 1


def random_case(seed: int, number: int) -> Case:
    """Return one of the random constraints of a seed."""
    source = random.Random(f"{seed} {number}")
    makers = [random_schema] * 7 + [random_regex] * 3 + [random_grammar] + [random_choice]
    return source.choice(makers)(source)


def run_case(
    backends: Backends, case: Case, backend: str, source: random.Random, outputs: int, tokens: int
) -> list[Result]:
    """Compile a case with one backend (or "auto"), and sample `outputs` of at most `tokens` tokens."""
    try:
        constraint = case.constraint()
        compiled = compile_constraint(backends, constraint, candidates(constraint.kind, backend))
    except InvalidConstraint as error:
        return [Result("refused", str(error))]
    except GuidedError as error:
        return [Result("error", f"{type(error).__name__}: {error}")]
    seen: Counter[Result] = Counter()
    for _ in range(outputs):
        try:
            text = sample(backends.vocabulary, compiled.grammar, source, tokens)
        except ConstraintNotMet as error:
            seen[Result("not met", f"{compiled.backend}: {error}")] += 1
            continue
        except GuidedError as error:
            seen[Result("failed", f"{compiled.backend}: {error}")] += 1
            continue
        problem = None if text is None else case.problem(text)
        if text is None:
            seen[Result("cut")] += 1
        elif problem is None:
            seen[Result("stop")] += 1
        else:
            seen[Result("invalid", f"{compiled.backend}: {text!r}: {problem}")] += 1
    return [Result(result.outcome, result.detail, count) for result, count in seen.items()]


def sample(vocabulary: Vocabulary, grammar: CompiledGrammar, source: random.Random, limit: int) -> str | None:
    """Return one random output; None if it has no end after `limit` tokens.

    Raises:
        GuidedError: the row failed.
    """
    worker = MaskWorker(vocabulary)
    worker.install(_KEY, grammar)
    worker.open(0, _KEY)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    logits, generator = _logits(vocabulary, source), np.random.default_rng(source.getrandbits(32))
    text = b""
    new: list[int] = []
    for _ in range(limit):
        if (error := worker.fill(0, new, row)) is not None:
            raise error
        allowed = allowed_ids(row)
        noise = generator.gumbel(size=len(allowed))
        token = int(allowed[np.argmax(logits[allowed] + noise)])
        if token in vocabulary.stop_token_ids:
            return text.decode()
        text, new = text + vocabulary.token_bytes[token], [token]
    return None


def _logits(vocabulary: Vocabulary, source: random.Random) -> NDArray[np.float64]:
    """Return the logits of a model without context, divided by a temperature: some prefer ends and short tokens."""
    size = vocabulary.padded_vocab_size
    generator = np.random.default_rng(source.getrandbits(32))
    logits = generator.normal(size=size) * source.choice([0.0, 0.0, 0.5, 3.0])
    ends, blanks = source.choice([0.0, 1.0, 3.0, 6.0]), source.choice([-8.0, -3.0, 0.0])
    for token in vocabulary.text_token_ids:
        text = vocabulary.token_bytes[token]
        if text[:1] in (b'"', b"}", b"]"):
            logits[token] += ends
        if not text.strip():
            logits[token] += blanks
    for token in vocabulary.stop_token_ids:
        logits[token] += ends + 1.0
    return logits
