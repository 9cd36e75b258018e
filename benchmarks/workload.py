"""Real constraints and real outputs: JSON Schemas with instances that satisfy them,
tokenized by a real tokenizer.

The file is JSON lines (gzipped or not), each `{"id", "schema", "tests": [{"valid",
"data"}]}`: MaskBench's format.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.rows import Document
from benchmarks.property_order import in_schema_order
from benchmarks.report import ROOT, fail

DATA = ROOT.parent / "shared" / "data" / "maskbench-dev.jsonl.gz"
LENGTHS = range(24, 301)
WORDS = (
    "amber",
    "basket",
    "candle",
    "ember",
    "forest",
    "garden",
    "harbor",
    "island",
    "lantern",
    "meadow",
    "zephyr",
)


def tekken() -> Path:
    """Return the path of mistral_common's vocabulary of 131,072 tokens."""
    try:
        import mistral_common
    except ImportError:
        fail("the vocabulary needs mistral_common: pip install mistral_common")
    return Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"


@dataclass(frozen=True)
class Tokens:
    """A vocabulary file and its tokenizer."""

    path: Path
    width: int
    """Number of logits."""
    stop: int
    encode: Callable[[str], list[int]]

    @classmethod
    def tekken(cls) -> Tokens:
        """Return mistral_common's tokenizer of 131,072 tokens."""
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        path = tekken()
        tokenizer = Tekkenizer.from_file(path)
        return cls(
            path,
            tokenizer.n_words,
            2,
            lambda text: tokenizer.encode(text, bos=False, eos=False),
        )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Exits with an error if it can't be read."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        fail(
            f"there is no file {path}: --data takes JSON lines of schemas with instances (see docs/benchmarks.md)"
        )
    except (OSError, ValueError) as error:
        fail(f"{path} can't be read as JSON lines: {error}")


def documents(tokens: Tokens, count: int, *, max_schema: int) -> list[Document]:
    """Return an instance, of `LENGTHS` tokens, of each of up to `count` random schemas.

    Args:
        max_schema: maximum characters of a schema. Some backends need minutes to
            compile larger ones.
    """
    rows = read_rows(DATA)
    random.Random(0).shuffle(rows)
    found: list[Document] = []
    for row in rows:
        schema = json.dumps(row["schema"], ensure_ascii=False)
        if len(schema) > max_schema:
            continue
        for test in row["tests"]:
            if test["valid"]:
                document = _document(
                    str(row["id"]),
                    schema,
                    in_schema_order(test["data"], row["schema"]),
                    tokens,
                )
                if len(document.tokens) in LENGTHS:
                    found.append(document)
                    break
        if len(found) == count:
            break
    if not found:
        fail(f"{DATA} has no schema with a valid instance of {LENGTHS} tokens")
    return found


def shared_documents(tokens: Tokens, count: int) -> list[Document]:
    """Return different instances of one schema, like the requests of an application."""
    text = {"type": "string", "maxLength": 40}
    fields = {
        "name": text,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": text,
        "note": text,
    }
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    random_ = random.Random(0)
    found = []
    for index in range(count):
        words = [" ".join(random_.sample(WORDS, 3)) for _ in range(3)]
        value = {
            "name": words[0],
            "age": random_.randint(1, 99),
            "city": words[1],
            "note": words[2],
        }
        found.append(_document(f"shared {index}", json.dumps(schema), value, tokens))
    return found


def _document(name: str, schema: str, value: Any, tokens: Tokens) -> Document:
    return Document(
        name, schema, tuple(tokens.encode(json.dumps(value, ensure_ascii=False)))
    )
