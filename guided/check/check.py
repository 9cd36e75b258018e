"""Check constraints without a model: report whether and by which backend a constraint
is accepted, with samples.

`guided check` prints these reports. A constraint is compiled as in a server, for the
vocabulary of a tokenizer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from guided.backends import AUTO, Backends, candidates
from guided.backends.grammar import syntax
from guided.bitmask import allowed_ids, words
from guided.check.process import BackendProcess, set_time_limit
from guided.constraint import Constraint, ConstraintKind
from guided.errors import GuidedError, InvalidRequest
from guided.masks.compilation import Compiled, compile_constraint
from guided.masks.completing import Completions
from guided.masks.worker import MaskWorker
from guided.schema.canonical import canonical
from guided.schema.keywords import types_of
from guided.vocabulary import Vocabulary

_KINDS: dict[str, ConstraintKind] = {
    **dict.fromkeys((".json", ".yaml", ".yml"), "json_schema"),
    ".lark": "grammar",
    ".gbnf": "grammar",
    ".ebnf": "grammar",
    ".regex": "regex",
}
_FILES = ("tokenizer.json", "tekken.json")
_RULE = re.compile(r"^\s*[?!]?[\w-]+(\.\d+)?\s*(::=|:)", re.MULTILINE)
_SAMPLE_TOKENS = 60
"""Maximum number of tokens of a sample beyond the length of the shortest output."""
_END_CHANCE = 0.3
"""Probability with which a sample ends where it may end."""


@dataclass
class Report:
    """The result of the check of one constraint."""

    name: str
    kind: str = ""
    """`JSON schema`, `regex`, `Lark grammar` or `GBNF grammar`."""
    accepted: bool = False
    backend: str = ""
    """The backend that enforces the constraint."""
    understood: str = ""
    """A short description of the allowed values."""
    error: str = ""
    pointer: str | None = None
    """JSON pointer to the place of the error in the schema."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Name of a backend that refused the constraint -> its reason."""
    checked: list[str] = field(default_factory=list)
    """JSON pointers of keywords that are checked when the output ends, not enforced by
    the mask."""
    not_enforced: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0
    """Time of the compilation and of the first mask."""
    least_tokens: int | None = None
    """Number of tokens of a short output, with the stop token. None: no short output
    was found."""
    samples: list[str] = field(default_factory=list)
    """Random valid outputs."""


def vocabulary_of(path: Path) -> Vocabulary:
    """Read a `tokenizer.json`, a `tekken.json`, or the folder of a model with one of
    these files.

    Raises:
        InvalidRequest: the file is missing, is not a tokenizer, or names no stop token.
    """
    file = (
        path
        if path.is_file()
        else next(filter(Path.is_file, map(path.joinpath, _FILES)), None)
    )
    if file is None:
        raise InvalidRequest(
            f"{path} is neither a tokenizer file nor a folder with one of {', '.join(_FILES)}"
        )
    try:
        if file.name.startswith("tekken"):
            return Vocabulary.from_tekken(file)
        tokenizer = Tokenizer.from_file(str(file))
    except GuidedError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise InvalidRequest(f"{file} can't be read as a tokenizer: {error}") from None
    return Vocabulary.from_tokenizer(
        tokenizer, stop_token_ids=_stop_tokens(file, tokenizer)
    )


def _stop_tokens(file: Path, tokenizer: Tokenizer) -> list[int]:
    settings = file.with_name("tokenizer_config.json")
    eos: Any = (
        json.loads(settings.read_text()).get("eos_token")
        if settings.is_file()
        else None
    )
    if isinstance(eos, dict):
        eos = eos.get("content")
    if eos:
        names = [eos]
    else:
        names = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>"]
    return [token for token in map(tokenizer.token_to_id, names) if token is not None][
        :1
    ]


def kind_of(name: str, text: str) -> ConstraintKind:
    """Return the kind of a constraint, which the name of the file or else the text
    determines."""
    kind = _KINDS.get(Path(name).suffix.lower())
    if kind is not None:
        return kind
    if text.lstrip()[:1] == "{" or text.strip() in ("true", "false"):
        return "json_schema"
    if _RULE.search(text):
        return "grammar"
    return "regex"


def check(
    name: str,
    text: str,
    backends: Backends,
    *,
    kind: ConstraintKind | None = None,
    backend: str = AUTO,
    open_objects: bool | None = None,
    samples: int = 0,
    seed: int = 0,
) -> Report:
    """Compile a constraint and report on it.

    Args:
        name: name of the file, for the report and to find the kind.
        kind: `json_schema`, `regex` or `grammar`. None: `kind_of` finds it.
        backend: the backend, or `auto`, as in a request.
        open_objects: see `Constraint.json_schema`.
        samples: number of random outputs.
        seed: random seed of the samples.
    """
    kind = kind or kind_of(name, text)
    report = Report(name, {"json_schema": "JSON schema"}.get(kind, kind))
    try:
        if kind == "grammar":
            report.kind = {"lark": "Lark grammar", "gbnf": "GBNF grammar"}[syntax(text)]
        if kind == "regex":
            source = text.rstrip("\n")
        else:
            source = text
        constraint = Constraint.of_kind(
            kind, source, open_objects=open_objects, param=kind
        )
        compiled = compile_constraint(
            backends,
            constraint,
            candidates(kind, backend),
            lambda name, refusal: report.refusals.update({name: str(refusal)}),
        )
        report.accepted = True
        report.backend = compiled.backend
        report.compile_seconds = compiled.seconds
        report.not_enforced = list(constraint.not_enforced)
        report.checked = list(compiled.grammar.checked)
        if kind == "json_schema":
            report.understood = _values_of(canonical(constraint.schema_text).root)
        else:
            report.understood = ""
        chance = random.Random(seed)
        vocabulary = backends.vocabulary
        short = (
            Completions(vocabulary)
            .of(compiled.grammar)
            .first(compiled.grammar.matcher())
        )
        if short is not None:
            report.least_tokens = len(short.tokens) + 1
            budget = report.least_tokens + _SAMPLE_TOKENS
            report.samples = [
                _sample(budget, compiled, vocabulary, chance) for _ in range(samples)
            ]
    except GuidedError as error:
        report.accepted = False
        report.error = error.message
        report.pointer = error.pointer
    return report


def check_all(
    texts: Iterable[tuple[str, str]],
    vocabulary: Vocabulary,
    *,
    seconds: float,
    **options: Any,
) -> Iterator[Report]:
    """Report on several constraints in another process, which is killed if one
    constraint takes longer than `seconds`.

    Args:
        texts: `(name, text)` of each constraint.
        options: further arguments of `check`.
    """
    process = BackendProcess(vocabulary)
    try:
        for name, text in texts:
            try:
                yield process.call(_check, name, text, seconds, options)
            except GuidedError as error:
                yield Report(
                    name,
                    options.get("kind") or kind_of(name, text),
                    error=error.message,
                )
    finally:
        process.stop()


def _check(
    backends: Backends, name: str, text: str, seconds: float, options: dict[str, Any]
) -> Report:
    set_time_limit(seconds)
    return check(name, text, backends, **options)


def _values_of(root: Any) -> str:
    """Describe the values of a schema in canonical form."""
    if root in (True, {}):
        return "any JSON value"
    kinds = " or ".join(sorted(types_of(root)))
    if isinstance(root, dict):
        properties = root.get("properties", {})
    else:
        properties = {}
    if properties:
        return f"{kinds} with {', '.join(properties)}"
    return kinds


def _sample(
    budget: int, compiled: Compiled, vocabulary: Vocabulary, chance: random.Random
) -> str:
    """Generate a random output, of printable ASCII if possible."""
    worker = MaskWorker(vocabulary)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    worker.open(0, compiled.grammar, budget=budget)
    stops = frozenset(vocabulary.stop_token_ids)
    output = list[int]()
    while True:
        if error := worker.fill(0, output[-1:], row):
            raise error
        allowed = allowed_ids(row).tolist()
        ends = [token for token in allowed if token in stops]
        texts = [token for token in allowed if token not in stops]
        if ends and (not texts or chance.random() < _END_CHANCE):
            return vocabulary.decode(output).decode()
        readable = [
            token
            for token in texts
            if re.fullmatch(b"[ -~]+", vocabulary.token_bytes[token])
        ]
        output.append(chance.choice(readable or texts))
