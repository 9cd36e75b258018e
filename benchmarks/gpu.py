"""Measure decode steps on a GPU, with and without constraints: `python -m
benchmarks.gpu`.

The model has random weights, made in memory. All rows decode. Each constrained row has
its own schema, a long array of a real schema. The engine's process (inline) or Ray
actors compute the masks. Measured are

- tokens/s, the time of a step, and the time between two tokens of a row (ITL), in ms;
- the share of the time in which the device is busy, by torch's profiler, in additional
  steps;
- the exposed mask time of a step (`prepare`, the wait for masks, the kernel), on
  average, in ms; and late rows;
- the seconds in which engine and pool start, and the memory of the device.

With `--vllm-python`, vLLM decodes with the same model in the same run. Writes gpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks import report
from benchmarks.comparison import vllm_candidate
from benchmarks.serving import endless_schema
from benchmarks.workload import DATA, read_rows
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.model.config import model_factory
from engine.model.loader import LoadedModel, prepare_model
from engine.sampling_params import SamplingParams
from guided.backends import AUTO, resolve
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.inline import InlinePool

QWEN = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES: dict[str, tuple[type[PreTrainedConfig], int, int, int, dict[str, Any]]] = {
    "0.6B": (Qwen3Config, 1024, 3072, 28, QWEN),
    "1.7B": (Qwen3Config, 2048, 6144, 28, QWEN),
    "8B": (LlamaConfig, 4096, 14336, 32, LLAMA),
    "tiny": (Qwen3Config, 64, 128, 2, TINY),
}
"""Architecture, hidden size, intermediate size and number of layers. `tiny` tries the
command on a CPU."""
VOCAB = 131072
"""Minimum number of logits, except of the tiny model."""
PROMPT = 32
"""Tokens of a prompt."""
MAX_SCHEMA = 4000
PROFILED = 20
"""Steps under the profiler."""
COLUMNS = {
    "rows": "rows",
    "way": "way",
    "tokens_per_second": "tokens/s",
    "of_unguided": "to unguided",
    "step_p50": "step p50",
    "step_p99": "p99",
    "itl_p50": "ITL p50",
    "itl_p99": "p99",
    "busy": "device busy",
    "prepare": "prepare",
    "wait": "wait",
    "kernel": "kernel",
    "late_rows": "late rows",
    "start_seconds": "start, s",
    "memory_gib": "GiB",
}


def make_config(size: str, vocab_size: int) -> PreTrainedConfig:
    """Return the configuration of a model of this size."""
    factory, hidden, intermediate, layers, others = SIZES[size]
    return factory(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        **others,
    )


def make_model(size: str, device: str, tokenizer: Any) -> LoadedModel:
    """Make a model with random weights, in bfloat16 on a GPU."""
    width = len(tokenizer) if size == "tiny" else max(VOCAB, len(tokenizer))
    config = make_config(size, width)
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = model_factory(config).from_config(config, dtype=dtype)
    return prepare_model(model, tokenizer, name=f"random-{size}")


def make_schemas(count: int, model: LoadedModel) -> list[dict[str, Any]]:
    """Return different schemas of long arrays, of MaskBench's schemas if they are
    available and compile."""
    found: list[dict[str, Any]] = []
    pool = InlinePool(model.vocabulary)
    for row in read_rows(DATA) if DATA.exists() else ():
        if len(found) == count:
            break
        schema = {"type": "array", "minItems": 1000, "items": row["schema"]}
        text = json.dumps(schema)
        if len(text) < MAX_SCHEMA and "$" not in text:
            with contextlib.suppress(GuidedError):
                pool.compile(Constraint.json_schema(text), resolve(AUTO)).result()
                found.append(schema)
    return found + [endless_schema(index) for index in range(count - len(found))]


def prompt_of(row: int) -> list[int]:
    """Return the tokens of a row's prompt."""
    return [(row * 977 + place * 31) % 500 + 100 for place in range(PROMPT)]


def measure(
    llm: LLM,
    rows: int,
    schemas: list[dict[str, Any]] | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Decode with `rows` rows, and return the figures of `options.steps` steps."""
    engine = llm.engine
    most = 4 * options.steps + 8 * PROFILED
    names = [f"{'guided' if schemas else 'free'}-{rows}-{row}" for row in range(rows)]
    for row, name in enumerate(names):
        schema = None if schemas is None else schemas[row]
        params = SamplingParams(
            max_tokens=most, seed=row, ignore_eos=schemas is None, json_schema=schema
        )
        engine.add_request(name, prompt_of(row), params)
    counts = dict.fromkeys(names, 0)
    while min(counts.values()) < 5:  # grammars are compiled, prompts are prefilled
        _step(engine, counts, {})
    before = vars(engine.stats).copy()
    tokens, arrivals, steps = sum(counts.values()), dict[str, list[float]](), []
    begun = time.perf_counter()
    for _ in range(options.steps):
        started = time.perf_counter()
        _step(engine, counts, arrivals)
        steps.append(time.perf_counter() - started)
    seconds = time.perf_counter() - begun
    after = vars(engine.stats).copy()
    figures: dict[str, Any] = {
        "tokens_per_second": round((sum(counts.values()) - tokens) / seconds, 1)
    }
    gaps = [
        later - earlier
        for times in arrivals.values()
        for earlier, later in pairwise(times)
    ]
    for name, values in {"step": steps, "itl": gaps}.items():
        figures |= {
            f"{name}_{key}": value for key, value in report.percentiles(values).items()
        }
    for name in ("prepare", "wait", "kernel"):
        passed = after[f"{name}_seconds"] - before[f"{name}_seconds"]
        figures[name] = round(1e3 * passed / options.steps, 3)
    figures["late_rows"] = after["late_rows"] - before["late_rows"]
    figures["failures"] = sum(after["failures"].values())
    figures["busy"] = _busy(engine, counts) if llm.model.device.type == "cuda" else None
    for name in names:
        engine.abort_request(name)
    engine.step()
    return figures


def _step(
    engine: Any, counts: dict[str, int], arrivals: dict[str, list[float]]
) -> None:
    """Run a step, and record the number of tokens of each request, and their times."""
    outputs = engine.step()
    now = time.perf_counter()
    for output in outputs:
        if output.error is not None:
            raise output.error
        counts[output.request_id] = len(output.outputs[0].token_ids)
        arrivals.setdefault(output.request_id, []).append(now)
    if not outputs and not engine.has_work:
        engine.awake.wait(1.0)
        engine.awake.clear()


def _busy(engine: Any, counts: dict[str, int]) -> float:
    """Return the share of the time of some steps in which a kernel or a copy runs on
    the device."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(PROFILED):
            _step(engine, counts, {})
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() or () if event.device_type.name == "CUDA"
    ]
    return round(
        busy_share(
            [(event.time_range.start, event.time_range.end) for event in events]
        ),
        3,
    )


def busy_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end in which at
    least one span lasts."""
    busy, first, end = 0.0, min(spans)[0] if spans else 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - first) if spans else 0.0


@contextlib.contextmanager
def started(
    model: LoadedModel, pool: str, actors: int, options: argparse.Namespace
) -> Iterator[tuple[LLM, float]]:
    """Start an engine and its pool. Yields the seconds that it took, too."""
    config = EngineConfig(
        max_num_seqs=max(options.rows),
        max_model_len=min(4096, PROMPT + 4 * options.steps + 8 * PROFILED + 16),
        enforce_eager=options.enforce_eager,
        logits_processor_plugins=False,
    )
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    pool_options = {"num_actors": actors}
    with LLM(model, pool=pool, config=config, pool_options=pool_options) as llm:  # type: ignore[arg-type]
        yield llm, time.perf_counter() - begun
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def ours(
    model: LoadedModel, schemas: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure this project's engine: unguided, and with each pool."""
    pools = [("unguided", "inline", 1), ("inline", "inline", 1)]
    pools += [
        (f"Ray, {actors} actor{'s' * (actors > 1)}", "ray", actors)
        for actors in options.actors
    ]
    for way, pool, actors in tqdm(pools, unit=" ways", disable=None):
        with started(model, pool, actors, options) as (llm, seconds):
            for rows in options.rows:
                figures = measure(
                    llm, rows, None if way == "unguided" else schemas, options
                )
                figures |= {
                    "rows": rows,
                    "way": way,
                    "start_seconds": round(seconds, 2),
                }
                if model.device.type == "cuda":
                    figures["memory_gib"] = round(
                        torch.cuda.max_memory_reserved() / 2**30, 2
                    )
                yield figures


def vllm(
    python: str, size: str, schemas: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure vLLM with a model of the same configuration."""
    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        tokenizer.save_pretrained(folder)
        config = make_config(size, max(VOCAB, len(tokenizer)))
        config.architectures = [
            model_factory(config)._model_mapping[type(config)].__name__
        ]
        config.save_pretrained(folder)
        out = Path(folder) / "found.json"
        limits = {
            "max_num_seqs": max(options.rows),
            "max_model_len": 4096,
            "dtype": "bfloat16",
        }
        task: dict[str, Any] = {
            "rows": options.rows,
            "steps": options.steps,
            "schemas": schemas,
            "out": str(out),
        }
        task |= {
            "options": {
                "model": folder,
                **limits,
                "enforce_eager": options.enforce_eager,
            }
        }
        task["prompts"] = [prompt_of(row) for row in range(max(options.rows))]
        command = [python, "-m", "benchmarks.peers.vllm_generate"]
        subprocess.run(
            command, input=json.dumps(task), text=True, cwd=report.ROOT, check=True
        )
        yield from json.loads(out.read_text())


def measure_size(
    size: str, python: str | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the rows of a model of this size."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model = make_model(size, options.device, tokenizer)
    schemas = make_schemas(max(options.rows), model)
    found = list(ours(model, schemas, options))
    del model
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()
    if python is not None:
        found += vllm(python, size, schemas, options)
    unguided = {
        row["rows"]: row["tokens_per_second"]
        for row in found
        if row["way"] == "unguided"
    }
    for row in found:
        row |= {
            "size": size,
            "of_unguided": round(row["tokens_per_second"] / unguided[row["rows"]], 3),
        }
    return found


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument(
        "--size",
        choices=[*SIZES],
        nargs="+",
        default=["0.6B", "1.7B", "8B"],
        help="model sizes",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument(
        "--actors",
        type=int,
        nargs="*",
        default=[1, 4, 8],
        help="numbers of mask actors, one run each",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="number of measured steps"
    )
    parser.add_argument(
        "--enforce-eager", action="store_true", help="run without CUDA graphs"
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu, with --size tiny, only tries the command"
    )
    parser.add_argument("--vllm-python", help="a Python interpreter with vLLM")
    default = os.environ.get("TOKENIZER", str(checkpoint_path()))
    parser.add_argument(
        "--tokenizer",
        default=default,
        help="its folder ($TOKENIZER, or the embedded model's)",
    )
    options = parser.parse_args()
    if options.quick:
        options.size, options.rows, options.actors, options.steps = (
            options.size[:1],
            options.rows[:1],
            [1],
            30,
        )
    if options.device != "cpu" and not torch.cuda.is_available():
        report.fail(
            "this machine has no CUDA device, or torch is a CPU build (docs/install.md)"
        )
    candidate = vllm_candidate(options.vllm_python)
    started_on = report.machine()
    started_on["device"] = (
        "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    )
    rows = []
    for size in options.size:
        rows += measure_size(
            size, None if candidate is None else candidate.python, options
        )
        print(f"{size}, {started_on['device']}")
        report.print_table([row for row in rows if row["size"] == size], COLUMNS)
        report.write_json(options.out / "gpu.json", vars(options), rows, started_on)


if __name__ == "__main__":
    main()
