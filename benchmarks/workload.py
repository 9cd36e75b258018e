"""Real constraints and real outputs: JSON Schemas with instances that satisfy them, tokenized by a real tokenizer.

The file is JSON lines (gzipped or not), each `{"id", "schema", "tests": [{"valid", "data"}]}`: MaskBench's format.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.paths import ROOT
from benchmarks.peers.rows import Document
from benchmarks.report import fail

DATA = ROOT.parent / "shared" / "data" / "maskbench-dev.jsonl.gz"
WORDS = ("amber", "basket", "candle", "ember", "forest", "garden", "harbor", "island", "lantern", "meadow", "zephyr")


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
        return cls(path, tokenizer.n_words, 2, lambda text: tokenizer.encode(text, bos=False, eos=False))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Exits with an error if it can't be read."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        fail(f"there is no file {path}: --data takes JSON lines of schemas with instances (see docs/benchmarks.md)")
    except (OSError, ValueError) as error:
        fail(f"{path} can't be read as JSON lines: {error}")


def documents(
    path: Path,
    tokens: Tokens,
    count: int,
    *,
    max_schema: int = 2000,
    lengths: tuple[int, int] = (24, 300),
    seed: int = 0,
) -> list[Document]:
    """Return one instance each of up to `count` random schemas.

    Args:
        max_schema: maximum characters of a schema. Some backends need minutes to compile larger ones.
        lengths: minimum and maximum tokens of an instance.
    """
    rows = read_rows(path)
    random.Random(seed).shuffle(rows)
    found: list[Document] = []
    for row in rows:
        schema = json.dumps(row["schema"], ensure_ascii=False)
        if len(schema) > max_schema:
            continue
        for test in row["tests"]:
            if test["valid"]:
                document = _document(str(row["id"]), schema, in_order(test["data"], row["schema"]), tokens)
                if lengths[0] <= len(document.tokens) <= lengths[1]:
                    found.append(document)
                    break
        if len(found) == count:
            break
    if not found:
        fail(f"{path} has no schema with a valid instance of {lengths[0]} to {lengths[1]} tokens")
    return found


def shared_documents(path: Path, tokens: Tokens, schemas: Sequence[str], each: int, seed: int = 0) -> list[Document]:
    """Return many different instances of few schemas, like the requests of an application.

    Args:
        schemas: ids of the file's rows.
        each: instances per schema: its own instance with other words and numbers, if the schema allows them.
    """
    random_ = random.Random(seed)
    found: list[Document] = []
    for row in read_rows(path):
        if str(row["id"]) in schemas:
            schema = json.dumps(row["schema"], ensure_ascii=False)
            instance = next(test["data"] for test in row["tests"] if test["valid"])
            for index in range(each):
                value = in_order(_another(instance, row["schema"], random_), row["schema"])
                found.append(_document(f"{row['id']}#{index}", schema, value, tokens))
    random_.shuffle(found)
    return found


def _document(name: str, schema: str, value: Any, tokens: Tokens) -> Document:
    return Document(name, schema, tuple(tokens.encode(json.dumps(value, ensure_ascii=False))))


def in_order(value: Any, schema: Any) -> Any:
    """Return a value with its properties in the schema's order, which some backends require."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, dict) and isinstance(schema.get("properties"), dict):
        properties = schema["properties"]
        known = [name for name in properties if name in value]
        rest = [name for name in value if name not in properties]
        return {name: in_order(value[name], properties.get(name)) for name in known + rest}
    if isinstance(value, list):
        return [in_order(one, schema.get("items")) for one in value]
    return value


def _another(value: Any, schema: Any, random_: random.Random) -> Any:
    """Return a similar value that satisfies `schema`, or `value` itself if none is found."""
    for _ in range(10):
        candidate = _changed(value, random_)
        if jsonschema.Draft202012Validator(schema).is_valid(candidate):
            return candidate
    return value


def _changed(value: Any, random_: random.Random) -> Any:
    if isinstance(value, dict):
        return {name: _changed(one, random_) for name, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, random_) for one in value]
    if isinstance(value, str) and value.replace(" ", "").isalpha() and random_.random() < 0.8:
        return " ".join(random_.choice(WORDS) for _ in value.split())
    if isinstance(value, int) and not isinstance(value, bool) and random_.random() < 0.8:
        return random_.randint(0, max(9, abs(value)))
    return value
