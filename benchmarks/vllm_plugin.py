"""Measure what guided requests cost within vLLM: `python -m benchmarks.vllm_plugin --vllm-python PATH`.

The same requests run, all at once, through vLLM's own engine (its `LLM`, with the engine core in another process):

- `unguided`: without constraints, with the same numbers of tokens as the answers of `switch, ray`.
- `own, guidance`, `own, xgrammar`: vLLM's structured outputs, with masks in the engine's process.
- `switch, ray`, `switch, inline`: the same requests with `GUIDED_VLLM=1`, with masks in two Ray actors or in the
  engine's process.

Three of four requests have a JSON Schema (eight different ones), the others a regex. All outputs are finite, and JSON
has no white space between tokens. Answers are checked. The models are `embedded`, the default model of 2.9 million
parameters, greedy; and `HxL`, a Llama of L layers and width H with random weights and the same tokenizer, sampled with
seeds. Each way runs in its own process with one thread. All are started first and then take turns, `--rounds` times
after one warm-up round. Tokens per second are those of the median round. Writes
benchmarks/out/vllm_plugin.{json,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
from tqdm import tqdm

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, JsonProcess
from benchmarks.comparison import vllm_candidate
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import canvas, fail, machine, print_table, write_json
from benchmarks.vllm_faults import has_plugin

WAYS = {
    "unguided": "unguided",
    "own, guidance": "own:guidance",
    "own, xgrammar": "own:xgrammar",
    "switch, ray": "switch:ray",
    "switch, inline": "switch:inline",
}
REFERENCE = "switch, ray"
"""The unguided requests have the lengths of this way's answers."""
COLUMNS = {
    "model": "model",
    "batch": "at once",
    "way": "way",
    "rate": "tokens/s",
    "slowest": "slowest round",
    "fastest": "fastest",
    "share": "to unguided",
    "step_ms": "ms per step",
    "valid": "valid",
    "tokens": "tokens per round",
}
CHECKPOINT = ROOT / "engine" / "default_model" / "checkpoint"
PROMPT = "Text: Maria Keller is {age} years old and lives in Lisbon.\nJSON: "


def requests(count: int, temperature: float) -> list[dict[str, Any]]:
    """Return `count` requests with outputs of about 100 tokens."""
    found = []
    for index in range(count):
        name = f"name_{index % 8}"
        one: dict[str, Any] = {"prompt": PROMPT.format(age=20 + index), "max_tokens": 600, "seed": index}
        one["temperature"] = temperature
        if index % 4 == 3:
            one["regex"] = rf"{index}: [a-z ]{{150}}\."
        else:
            person = {
                "type": "object",
                "properties": {name: {"type": "string", "maxLength": 10}, "age": {"enum": list(range(18, 100))}},
                "required": [name, "age"],
                "additionalProperties": False,
            }
            one["json"] = json.dumps({"type": "array", "minItems": 5, "maxItems": 5, "items": person})
        found.append(one)
    return found


def is_valid(request: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether an answer is complete and satisfies its constraint."""
    if answer["finish_reason"] != "stop":
        return False
    if "regex" in request:
        return re.fullmatch(request["regex"], answer["text"]) is not None
    with contextlib.suppress(ValueError):
        return jsonschema.Draft202012Validator(json.loads(request["json"])).is_valid(json.loads(answer["text"]))
    return False


@contextlib.contextmanager
def engines(python: str, model: Path, dummy: bool, batch: int, ways: Iterable[str]) -> Iterator[dict[str, JsonProcess]]:
    """Start a `benchmarks.peers.vllm_engine` per way, one after the other."""
    environment = SINGLE_THREADED | VLLM_ON_CPU | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        found = {}
        for label in tqdm(ways, desc="starting", leave=False, disable=None):
            arguments = (WAYS[label], str(model), "dummy" if dummy else "real", str(batch), "auto")
            process = JsonProcess(
                "benchmarks.peers.vllm_engine", *arguments, label=label, environment=environment, python=python
            )
            found[label] = stack.enter_context(process)
            process.answer()
        yield found


@contextlib.contextmanager
def checkpoint(model: str) -> Iterator[tuple[Path, bool]]:
    """Return a model's folder, and whether vLLM must use random weights."""
    if model == "embedded":
        yield CHECKPOINT, False
        return
    sizes = re.fullmatch(r"(\d+)x(\d+)", model)
    if sizes is None or int(sizes[1]) % 64:
        fail(f"--model: {model} is neither `embedded` nor WIDTHxLAYERS with a width that is a multiple of 64")
    width, layers = map(int, sizes.groups())
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (CHECKPOINT / name).exists():
                shutil.copy(CHECKPOINT / name, folder)
        config = json.loads((CHECKPOINT / "config.json").read_text())
        config |= {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "head_dim": 64}
        config |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
        config |= {"tie_word_embeddings": False}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder), True


def measure(
    running: dict[str, JsonProcess], model: str, batch: int, rounds: int, bar: tqdm[Any]
) -> list[dict[str, Any]]:
    """Return one row per way."""
    batch_requests = requests(batch, 0.0 if model == "embedded" else 1.0)
    lengths = [one["tokens"] for one in running[REFERENCE].ask(batch_requests)["answers"]]
    free = [one | {"max_tokens": length} for one, length in zip(batch_requests, lengths, strict=True)]
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in running}
    for round_ in range(rounds + 1):
        for label, process in running.items():
            bar.set_description(f"{model}, {batch}, {label}")
            answer = process.ask(free if label == "unguided" else batch_requests)
            if round_:
                found[label].append(answer)
            bar.update()
    rows = []
    for label, answers in found.items():
        rates = [sum(one["tokens"] for one in answer["answers"]) / answer["seconds"] for answer in answers]
        steps = [max(one["tokens"] for one in answer["answers"]) for answer in answers]
        valid = sum(is_valid(one, answer) for one, answer in zip(batch_requests, answers[-1]["answers"], strict=True))
        rows.append(
            {
                "model": model,
                "batch": batch,
                "way": label,
                "rate": statistics.median(rates),
                "slowest": min(rates),
                "fastest": max(rates),
                "step_ms": statistics.median(
                    1e3 * answer["seconds"] / count for answer, count in zip(answers, steps, strict=True)
                ),
                "valid": "-" if label == "unguided" else f"{valid} of {batch}",
                "tokens": sum(one["tokens"] for one in answers[-1]["answers"]),
                "seconds": [answer["seconds"] for answer in answers],
            }
        )
    unguided = next(row["rate"] for row in rows if row["way"] == "unguided")
    return [row | {"share": round(row["rate"] / unguided, 3)} for row in rows]


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw tokens per second, by model and batch."""
    cases = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    figure, axes = canvas(len(cases), width=3.4, height=3.6)
    for axis, case in zip(axes, cases, strict=True):
        mine = [row for row in rows if (row["model"], row["batch"]) == case]
        bars = axis.bar(range(len(mine)), [row["rate"] for row in mine], color=[f"C{at}" for at in range(len(mine))])
        axis.bar_label(bars, [f"{row['rate']:.0f}\n{row['share']:.0%}" for row in mine], fontsize=7)
        axis.set_xticks(range(len(mine)), [row["way"].replace(", ", "\n") for row in mine], fontsize=7)
        axis.set_ylim(0, 1.2 * max(row["rate"] for row in mine))
        axis.set_title(f"{case[0]}, {case[1]} requests at once", fontsize=9)
    axes[0].set_ylabel("tokens/s")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["embedded", "768x8"], help="embedded, or WIDTHxLAYERS")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32], help="requests at once")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="besides unguided and `switch, ray`")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns per way")
    parser.add_argument("--vllm-python", required=True, help="a Python interpreter with vLLM and this package")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="only the embedded model, 8 requests, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.model, options.batch, options.rounds = ["embedded"], [8], 2
    return options


def main() -> None:
    options = parsed()
    vllm = vllm_candidate(options.vllm_python)
    assert vllm is not None
    if not has_plugin(vllm.python):
        fail(f"{options.vllm_python} has no guided[ray]: `make test-vllm` makes such an environment (docs/vllm.md)")
    started_on = machine()
    rows: list[dict[str, Any]] = []
    ways = [way for way in WAYS if way in options.way or way in ("unguided", REFERENCE)]
    turns = len(options.model) * len(options.batch) * (options.rounds + 1) * len(ways)
    with tqdm(total=turns, unit=" turns", disable=None) as bar:
        for model in options.model:
            with (
                checkpoint(model) as (folder, dummy),
                engines(vllm.python, folder, dummy, max(options.batch), ways) as running,
            ):
                for batch in options.batch:
                    rows += measure(running, model, batch, options.rounds, bar)
    print_table(rows, COLUMNS)
    write_json(options.out / "vllm_plugin.json", vars(options), rows, started_on)
    plot(rows, options.out / "vllm_plugin.png", f"guided requests within vLLM, {started_on['cpus']} CPUs")
    print(f"wrote {options.out / 'vllm_plugin.json'} and .png")


if __name__ == "__main__":
    main()
