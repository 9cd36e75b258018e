"""Writing -inf over forbidden logits: `guided.bitmask.apply_bitmask` beside xgrammar's kernel: `python -m
benchmarks.apply_kernel`.

Masks are those of real outputs: llguidance, real JSON Schemas, a vocabulary of 131,072 tokens. Tight masks allow at
most 1 % of the vocabulary, loose ones at least 50 %, mixed ones are as they come. All rows of a batch, and every second
one. The ways take turns on the same logits and must give the same result. Writes
benchmarks/results/apply_kernel.{json,png}.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.report import RESULTS, canvas, fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import Backends
from guided.bitmask import apply_bitmask, words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary

TIGHT, LOOSE = 0.01, 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Masks = NDArray[np.int32]


def real_masks(vocabulary: Vocabulary, tokens: Tokens, data: Path, count: int) -> Masks:
    """int32 `[count, words]`: masks along real instances."""
    backend = Backends(vocabulary)["llguidance"]
    rows: list[Masks] = []
    with tqdm(total=count, desc="masks", leave=False, disable=None) as bar:
        for document in documents(data, tokens, count):
            try:
                matcher = backend.compile(Constraint.json_schema(document.schema)).matcher()
                for token in document.tokens:
                    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
                    matcher.fill_bitmask(row)
                    rows.append(row)
                    bar.update()
                    matcher.accept_tokens([token])
            except GuidedError:
                continue
            if len(rows) >= count:
                break
    return np.stack(rows)


def share_allowed(masks: Masks) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.unpackbits(masks.view(np.uint8), axis=1).mean(axis=1)
    return shares


def kinds(masks: Masks, batch: int) -> dict[str, Masks]:
    """`batch` masks of each kind, drawn at random."""
    share = share_allowed(masks)
    random = np.random.default_rng(0)
    of = {"tight": masks[share <= TIGHT], "loose": masks[share >= LOOSE], "mixed": masks}
    for name, found in of.items():
        if not len(found):
            fail(f"no mask is {name} among {len(masks)}: give --data with more instances")
    return {name: found[random.integers(len(found), size=batch)] for name, found in of.items()}


def by_xgrammar(logits: torch.Tensor, masks: Masks, rows: list[int]) -> None:
    """As integrations call it: bitmask rows agree with logits rows; its CPU kernel wants float32."""
    bitmask = torch.from_numpy(masks)
    whole = len(rows) == logits.shape[0]
    if not whole:
        scattered = torch.full((logits.shape[0], masks.shape[1]), -1, dtype=torch.int32)
        scattered[rows] = bitmask
        bitmask = scattered
    target = logits if logits.dtype == torch.float32 else logits.to(torch.float32)
    xgrammar.apply_token_bitmask_inplace(target, bitmask, indices=None if whole else rows)
    if target is not logits:
        logits.copy_(target)


WAYS: dict[str, Callable[[torch.Tensor, Masks, list[int]], None]] = {"ours": apply_bitmask, "xgrammar": by_xgrammar}


def measure(masks: Masks, rows: list[int], fresh: torch.Tensor, repeat: int, bar: tqdm[Any]) -> dict[str, list[float]]:
    """Seconds of each way, taking turns; checks that they agree."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    logits = torch.empty_like(fresh)
    for index in range(repeat + 1):
        expected: torch.Tensor | None = None
        for name, way in WAYS.items():
            logits.copy_(fresh)
            started = time.perf_counter()
            way(logits, masks, rows)
            if index:
                seconds[name].append(time.perf_counter() - started)
            else:  # the first round warms up
                assert expected is None or torch.equal(expected, logits), "the kernels disagree"
                expected = logits.clone()
        bar.update()
    return seconds


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()], help="torch's")
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="seconds: batch 16, few repetitions")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.repeat, options.dtype = [16], 5, ["float32"]
    return options


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    chosen = [row for row in rows if row["threads"] == rows[0]["threads"] and row["dtype"] == rows[0]["dtype"]]
    figure, axes = canvas(1, width=max(7.0, 0.75 * len(chosen)))
    names = [f"{row['masks']}\nbatch {row['batch']}\n{row['rows']}" for row in chosen]
    for index, way in enumerate(WAYS):
        at = [place + (index - 0.5) * 0.4 for place in range(len(chosen))]
        bars = axes[0].bar(at, [row[f"{way}_p50"] for row in chosen], 0.37, label=way)
        axes[0].bar_label(bars, fmt="%.2g", fontsize=6)
    axes[0].set_yscale("log")
    axes[0].set_xticks(range(len(chosen)), names, fontsize=7)
    axes[0].set_ylabel("ms, p50")
    axes[0].set_title(title, fontsize=10)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    started_on = machine()
    masks = real_masks(vocabulary, tokens, options.data, 500 if options.quick else 6000)
    share = share_allowed(masks)
    threads = list(dict.fromkeys(options.threads))
    results: list[dict[str, Any]] = []
    total = len(options.batch) * len(options.dtype) * len(threads) * 6 * (options.repeat + 1)
    with tqdm(total=total, desc="kernels", leave=False, disable=None) as bar:
        for count in threads:
            torch.set_num_threads(count)
            for dtype in options.dtype:
                for batch in options.batch:
                    fresh = torch.randn(batch, vocabulary.padded_vocab_size).to(DTYPES[dtype])
                    for kind, some in kinds(masks, batch).items():
                        for which, rows in (("all", list(range(batch))), ("every second", list(range(0, batch, 2)))):
                            if batch == 1 and which != "all":
                                bar.update(options.repeat + 1)
                                continue
                            found = measure(some[: len(rows)], rows, fresh, options.repeat, bar)
                            row = {"threads": count, "dtype": dtype, "batch": batch, "rows": which, "masks": kind}
                            row["allowed_percent"] = round(100 * float(share_allowed(some[: len(rows)]).mean()), 2)
                            for name, values in found.items():
                                row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
                            row["xgrammar_to_ours"] = round(row["xgrammar_p50"] / row["ours_p50"], 2)
                            results.append(row)
    columns = {
        "threads": "threads",
        "dtype": "dtype",
        "batch": "batch",
        "rows": "rows",
        "masks": "masks",
        "allowed_percent": "% allowed",
        "ours_p50": "ours p50",
        "ours_p99": "p99",
        "xgrammar_p50": "xgrammar p50",
        "xgrammar_p99": "p99",
        "xgrammar_to_ours": "times faster",
    }
    print_table(results, columns)
    mixture = {"tight": float((share <= TIGHT).mean()), "loose": float((share >= LOOSE).mean())}
    print(f"of {len(masks)} masks, {mixture['tight']:.0%} are tight and {mixture['loose']:.0%} loose; milliseconds")
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    setting["data"] = options.data.name
    write_json(options.out / "apply_kernel.json", setting, {"kernels": results, "mixture": mixture}, started_on)
    title = (
        f"{tokens.width} tokens, {results[0]['dtype']}, {results[0]['threads']} thread(s), {started_on['cpus']} CPUs"
    )
    plot(results, options.out / "apply_kernel.png", title)
    print(f"wrote {options.out / 'apply_kernel.json'} and .png")


if __name__ == "__main__":
    main()
