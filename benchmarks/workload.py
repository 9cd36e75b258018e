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

from benchmarks.peers.rows import Document
from benchmarks.report import ROOT, fail
from guided.vocabulary import Vocabulary

__all__ = ["DATA", "Tokens", "documents", "read_rows", "shared_documents", "tekken"]

DATA = ROOT.parent / "shared" / "data" / "maskbench-dev.jsonl.gz"
WORDS = ("amber", "basket", "candle", "ember", "forest", "garden", "harbor", "island", "lantern", "meadow", "zephyr")


def tekken() -> Path:
    """The 131,072 tokens that mistral_common ships."""
    try:
        import mistral_common
    except ImportError:
        fail("the vocabulary is mistral_common's, which isn't installed: pip install mistral_common")
    return Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"


@dataclass(frozen=True)
class Tokens:
    """A vocabulary as the ways of masking get it, and its tokenizer."""

    path: Path
    width: int
    """Of the logits."""
    stop: int
    encode: Callable[[str], list[int]]

    @classmethod
    def tekken(cls) -> Tokens:
        """The real tokenizer of 131,072 tokens; tokens as it has them."""
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        path = tekken()
        tokenizer = Tekkenizer.from_file(path)
        return cls(path, tokenizer.n_words, 2, lambda text: tokenizer.encode(text, bos=False, eos=False))

    @classmethod
    def sentencepiece(cls) -> Tokens:
        """32,000 tokens, mistral_common's first model; texts take the longest tokens first."""
        path = tekken().with_name("tokenizer.model.v1")
        return cls(path, 32000, 2, Vocabulary.from_sentencepiece(path).encode)

    @classmethod
    def trained(cls, data: Path, size: int, path: Path) -> Tokens:
        """A byte-level BPE of `size` tokens, trained on the schemas of `data` and saved as `path`."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((json.dumps(row["schema"])[:5000] for row in read_rows(data)), trainer)
        tokenizer.save(str(path))
        vocabulary = Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[0])
        return cls(path, vocabulary.padded_vocab_size, 0, vocabulary.encode)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The file's rows; ends the program where it can't be read."""
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
    """One instance each of up to `count` schemas, drawn at random.

    Args:
        max_schema: characters of a schema's JSON; larger ones take some backends minutes to compile.
        lengths: tokens of an instance, at the least and at the most.
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
    """Many different instances of few schemas, as an application sends them.

    Args:
        schemas: ids of the file's rows.
        each: instances of a schema: its own with other words and numbers, where the schema allows them.
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
    """The same value, its properties in the schema's order: the order in which some backends have them generated."""
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
    """A value like `value` that satisfies `schema` too; `value` itself where none was found."""
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
