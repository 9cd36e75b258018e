"""Measure validity and cost of our logits processor in transformers: `python -m benchmarks.transformers_processor`.

Validity: the embedded model answers schemas of `--data`, greedily and with beam search, in batches where each row has
its own schema. An output that ended by itself must satisfy its schema (`jsonschema`). An output that `--max-tokens`
cut must be a beginning that a new matcher accepts.

Cost: the rows of a batch write known documents over 131,072 tokens. The masks of each step are applied by an inline
pool through `LogitPostProcessor`, by the logits processor, and by xgrammar's logits processor, which writes into the
scores. The order is random at each step. A copy of the scores is measured too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import torch
import xgrammar.contrib.hf
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.paths import RESULTS
from benchmarks.peers.xgrammar_processor import XGrammarProcessor
from benchmarks.report import canvas, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents, read_rows
from engine.default_model import checkpoint_path
from guided.backends import Backends, candidates
from guided.compilation import compile_constraint
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.pools.inline import InlinePool
from guided.processor import GuidedProcessor
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

PROMPT_CHARACTERS = 400
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "2 beams": {"num_beams": 2},
    "4 beams, best 2": {"num_beams": 4, "num_return_sequences": 2},
}
VALIDITY = {
    "mode": "mode",
    "schemas": "schemas",
    "outputs": "outputs",
    "ended": "ended",
    "valid": "of them valid",
    "cut": "cut",
    "beginnings": "legal beginnings",
    "invalid": "invalid",
    "share": "% of generate()",
    "row_us": "µs per row",
}
COST = {
    "rows": "rows",
    "pool_p50": "pool alone p50",
    "pool_p99": "p99",
    "processor_p50": "processor p50",
    "processor_p99": "p99",
    "processor_share": "to the pool",
    "xgrammar_p50": "xgrammar's p50",
    "xgrammar_p99": "p99",
    "copy_p50": "copy p50",
    "copy_p99": "p99",
}


@dataclass(frozen=True)
class Task:
    """One schema and its prompt."""

    name: str
    schema: Any
    constraint: Constraint
    prompt: str


@dataclass
class Timed:
    """A logits processor that measures the time of its calls."""

    processor: GuidedLogitsProcessor
    seconds: float = 0.0
    rows: int = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        masked = self.processor(input_ids, scores)
        self.seconds += time.perf_counter() - started
        self.rows += len(scores)
        return masked


@dataclass
class Found:
    """Counts of one mode's outputs."""

    outputs: int = 0
    ended: int = 0
    valid: int = 0
    beginnings: int = 0
    wrong: list[str] = field(default_factory=list)


class Generation:
    """The embedded model with transformers' `generate()`."""

    def __init__(self, max_tokens: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer, self.model.config.vocab_size)
        self.backends = Backends(self.vocabulary)
        self.max_tokens = max_tokens

    def tasks(self, data: Path, count: int, seed: int = 0) -> Iterator[Task]:
        """Yield `count` random schemas that a backend can enforce."""
        rows = read_rows(data)
        random.Random(seed).shuffle(rows)
        for row in rows:
            if not count:
                return
            try:
                constraint = Constraint.json_schema(row["schema"])
                compile_constraint(self.backends, constraint, candidates("json_schema", "llguidance"))
            except GuidedError:
                continue
            count -= 1
            instance: Any = next((test["data"] for test in row["tests"] if test["valid"]), {})
            yield Task(str(row["id"]), row["schema"], constraint, self.prompt(instance))

    def prompt(self, instance: Any) -> str:
        """Return a prompt with lines to copy from, the task that the embedded model is trained for."""
        if isinstance(instance, dict):
            lines = "\n".join(f"{key}: {value}" for key, value in instance.items())
        else:
            lines = json.dumps(instance, ensure_ascii=False)
        message = {"role": "user", "content": f"Extract as JSON.\n{lines[:PROMPT_CHARACTERS]}"}
        text: str = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return text

    def run(self, mode: str, tasks: Sequence[Task], batch: int, bar: tqdm[Any]) -> dict[str, Any]:
        """Run all tasks in one mode."""
        found = Found()
        guiding = rows = seconds = 0.0
        for start in range(0, len(tasks), batch):
            some = tasks[start : start + batch]
            prompts = self.tokenizer(
                [task.prompt for task in some],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            )
            with GuidedLogitsProcessor(self.vocabulary, [task.constraint for task in some]) as processor:
                timed = Timed(processor)
                started = time.perf_counter()
                sequences = self.model.generate(
                    **prompts, **MODES[mode], logits_processor=[timed], max_new_tokens=self.max_tokens
                )
                seconds += time.perf_counter() - started
            guiding, rows = guiding + timed.seconds, rows + timed.rows
            outputs = sequences[:, prompts["input_ids"].shape[1] :].tolist()
            for index, tokens in enumerate(outputs):
                self.check(some[index * len(some) // len(outputs)], tokens, found)
            bar.update(len(some))
        return {
            "mode": mode,
            "schemas": len(tasks),
            "outputs": found.outputs,
            "ended": found.ended,
            "valid": found.valid,
            "cut": found.outputs - found.ended,
            "beginnings": found.beginnings,
            "invalid": len(found.wrong),
            "share": round(100 * guiding / seconds, 2),
            "row_us": round(1e6 * guiding / rows, 2),
            "wrong": found.wrong,
        }

    def check(self, task: Task, tokens: list[int], found: Found) -> None:
        """Check one output."""
        found.outputs += 1
        special = self.vocabulary.special_token_ids.union(self.vocabulary.stop_token_ids)
        end = next((place for place, token in enumerate(tokens) if token in special), len(tokens))
        ended = end < len(tokens) and tokens[end] in self.vocabulary.stop_token_ids
        tokens = tokens[:end]
        text = self.vocabulary.decode(tokens)
        if ended:
            found.ended += 1
            fine = satisfies(text, task.schema)
            found.valid += fine
        else:
            fine = self.is_beginning(task.constraint, tokens)
            found.beginnings += fine
        if not fine:
            found.wrong.append(f"{task.name}: {text.decode('utf-8', 'backslashreplace')}")

    def is_beginning(self, constraint: Constraint, tokens: list[int]) -> bool:
        """Return whether a new matcher accepts these tokens."""
        compiled = compile_constraint(self.backends, constraint, candidates("json_schema", "llguidance"))
        matcher = compiled.grammar.matcher()
        try:
            for token in tokens:
                matcher.accept_tokens([token])
        except GuidedError:
            return False
        return True


def satisfies(text: bytes, schema: Any) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(checker(schema).is_valid(value))


class Steps:
    """A batch of known documents, step by step, as `generate()` calls the processor and as an engine calls the pool."""

    def __init__(
        self, vocabulary: Vocabulary, schemas: Sequence[str], texts: Sequence[Sequence[int]], peers: list[Any]
    ) -> None:
        """
        Args:
            peers: each row's grammar, compiled by xgrammar.
        """
        constraints = [Constraint.json_schema(schema) for schema in schemas]
        self.rows, self.steps = len(texts), min(map(len, texts))
        self.texts = torch.tensor([list(text[: self.steps]) for text in texts])
        self.prompts = torch.ones(self.rows, 32, dtype=torch.long)
        self.scores = torch.randn(self.rows, vocabulary.padded_vocab_size)
        self.logits = torch.empty_like(self.scores)
        self.handed = torch.empty_like(self.scores)
        self.guide = GuidedLogitsProcessor(vocabulary, constraints)
        self.peers = peers
        self.pool = InlinePool(vocabulary)
        self.alone = GuidedProcessor(self.pool)
        for row, constraint in enumerate(constraints):
            self.alone.initialize(str(row), constraint).result()
        self.round = 0

    def run(self, seconds: dict[str, list[float]]) -> None:
        """Run one round: all steps in all ways."""
        self.guide.reset()
        peer = xgrammar.contrib.hf.LogitsProcessor(self.peers)
        ids = [self.round * self.rows + row for row in range(self.rows)]
        outputs: list[list[int]] = [[] for _ in ids]
        self.round += 1
        kept: dict[str, torch.Tensor] = {}  # as in `generate()`, the last step's scores live until this step's exist

        def by_pool(input_ids: torch.Tensor) -> torch.Tensor:
            self.alone.prepare([GuidedSequence(str(row), ids[row], outputs[row]) for row in range(self.rows)])
            report = self.alone.apply(self.logits)
            if report.failed:
                raise AssertionError(f"failed: {report.failed}")
            return self.logits

        ways: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
            ("pool", by_pool),
            ("processor", lambda input_ids: self.guide(input_ids, self.scores)),
            ("xgrammar", lambda input_ids: peer(input_ids, self.handed)),
            ("copy", lambda input_ids: self.scores.clone()),
        ]
        for step in range(self.steps):
            input_ids = torch.cat([self.prompts, self.texts[:, :step]], dim=1)
            self.logits.copy_(self.scores)
            self.handed.copy_(self.scores)
            for name, way in random.sample(ways, len(ways)):
                started = time.perf_counter()
                found = way(input_ids)
                took = time.perf_counter() - started
                kept[name] = found
                if self.round > 1:  # the first round warms up
                    seconds[name].append(took)
            if not torch.equal(self.logits, kept["processor"]):
                raise AssertionError(f"the results differ at step {step}")
            for row, token in enumerate(self.texts[:, step].tolist()):
                outputs[row].append(token)
        for sequence_id in ids:
            self.alone.free_sequence(sequence_id)

    def close(self) -> None:
        self.guide.close()
        self.pool.shutdown()


def costs(data: Path, batches: Sequence[int], rounds: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """Return one row of the table per batch size, in milliseconds."""
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    backends = Backends(vocabulary)
    peer = XGrammarProcessor(vocabulary)
    able = []
    for document in documents(data, tokens, 2 * max(batches), max_schema=8000, lengths=(48, 300)):
        try:
            compiled = compile_constraint(
                backends, Constraint.json_schema(document.schema), candidates("json_schema", "llguidance")
            )
            compiled.grammar.matcher().accept_tokens(list(document.tokens))
            if not peer.load("xgrammar", [document]):
                able.append(document)
        except GuidedError:
            continue
    rows = []
    for batch in batches:
        some = [able[index % len(able)] for index in range(batch)]
        grammars = [peer.grammars[one.schema] for one in some]
        steps = Steps(vocabulary, [one.schema for one in some], [one.tokens for one in some], grammars)
        seconds: dict[str, list[float]] = {"pool": [], "processor": [], "xgrammar": [], "copy": []}
        for _ in range(1 + max(2, rounds // batch)):
            steps.run(seconds)
            bar.update()
        steps.close()
        row: dict[str, Any] = {"rows": batch, "steps": len(seconds["pool"])}
        for name, values in seconds.items():
            row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
        row["processor_share"] = round(row["processor_p50"] / row["pool_p50"], 2)
        rows.append(row)
    return rows


def plot(validity: list[dict[str, Any]], cost: list[dict[str, Any]], path: Path, title: str) -> None:
    figure, (left, right) = canvas(2)
    names = [row["mode"] for row in validity]
    bottom = [0] * len(names)
    for key, label, color in (
        ("valid", "ended, valid", "C2"),
        ("beginnings", "cut, a beginning", "C7"),
        ("invalid", "invalid", "C3"),
    ):
        values = [row[key] for row in validity]
        left.bar(names, values, 0.6, bottom=bottom, label=label, color=color)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    left.set_ylabel("outputs")
    left.legend(frameon=False)
    places = range(len(cost))
    bars = {"pool": "inline pool alone", "processor": "the processor", "xgrammar": "xgrammar's processor"}
    for index, (name, label) in enumerate(bars.items()):
        values = [row[f"{name}_p50"] / row["rows"] * 1e3 for row in cost]
        right.bar([place + 0.27 * (index - 1) for place in places], values, 0.25, label=label, color=f"C{index}")
    right.set_xticks(list(places), [str(row["rows"]) for row in cost])
    right.set_xlabel("rows")
    right.set_ylabel("µs per row and step, p50")
    right.margins(y=0.3)
    right.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="prompts per generate()")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="batch sizes of the cost measurement")
    parser.add_argument("--rounds", type=int, default=64, help="documents per batch size, at least 2 batches")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run a minute: few schemas, small batches")
    options = parser.parse_args()
    if options.quick:
        options.schemas, options.rows, options.rounds = 16, [1, 8], 8
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started_on = machine()
    generation = Generation(options.max_tokens)
    tasks = list(generation.tasks(options.data, options.schemas))
    with tqdm(total=len(tasks) * len(MODES), unit=" schemas", disable=None) as bar:
        validity = [generation.run(mode, tasks, options.batch, bar) for mode in MODES]
    print_table(validity, VALIDITY)
    with tqdm(unit=" rounds", disable=None) as bar:
        cost = costs(options.data, options.rows, options.rounds, bar)
    print("\none step, ms")
    print_table(cost, COST)
    name = "transformers_processor"
    write_json(options.out / f"{name}.json", vars(options), {"validity": validity, "cost": cost}, started_on)
    plot(validity, cost, options.out / f"{name}.png", f"{len(tasks)} schemas; 131,072 tokens, one thread")
    print(f"wrote {options.out / name}.json and .png")


if __name__ == "__main__":
    main()
