"""Compare `guided.kernel.apply_bitmask` with xgrammar's kernel: `python -m benchmarks.apply_kernel`.

Both write -inf over forbidden logits. The masks are those of real outputs: llguidance, real JSON Schemas, a vocabulary
of 131,072 tokens. Tight masks allow at most 1 % of the vocabulary, loose ones at least 50 %, mixed ones are a random
sample. They are passed in three forms: as separate rows, as workers leave them (xgrammar's way first copies them into
an existing tensor); as one array in the order of the batch; and as separate rows for every second row of the batch. A
second measurement uses random masks that allow between one token and all of them. The kernels take turns on the same
logits and must give the same result. Writes benchmarks/out/apply_kernel.{json,png}.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.paths import RESULTS
from benchmarks.report import canvas, fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import Backends
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.kernel import apply_bitmask
from guided.vocabulary import Vocabulary

TIGHT, LOOSE = 0.01, 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS = ("separate rows", "one array", "every second row")
CURVE_BATCHES = (1, 64)
SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.94, 0.96, 0.98, 0.99, 1.0)
Masks = NDArray[np.int32]


def real_masks(vocabulary: Vocabulary, tokens: Tokens, data: Path, count: int) -> Masks:
    """Return masks along real instances: int32 `[count, words]`."""
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
    """Draw `batch` masks of each kind at random."""
    share = share_allowed(masks)
    random = np.random.default_rng(0)
    of = {"tight": masks[share <= TIGHT], "loose": masks[share >= LOOSE], "mixed": masks}
    for name, found in of.items():
        if not len(found):
            fail(f"none of {len(masks)} masks is {name}: use --data with more instances")
    return {name: found[random.integers(len(found), size=batch)] for name, found in of.items()}


def by_xgrammar(logits: torch.Tensor, masks: Masks | Sequence[Masks], rows: list[int], space: torch.Tensor) -> None:
    """Apply masks as xgrammar's integrations do. `space` is a tensor for the masks: int32 `[batch, words]`."""
    if isinstance(masks, np.ndarray):
        bitmask = torch.from_numpy(masks)
    else:
        bitmask, there = space, space.numpy()
        for row, mask in zip(rows, masks, strict=True):
            there[row] = mask
    xgrammar.apply_token_bitmask_inplace(logits, bitmask, indices=None if len(rows) == len(logits) else rows)


def given(masks: Masks, form: str) -> tuple[Masks | Sequence[Masks], list[int]]:
    """Return the masks in one of `FORMS`, and their rows in the batch."""
    batch = list(range(len(masks)))
    if form == "one array":
        return masks, batch
    chosen = batch if form == "separate rows" else batch[::2]
    return [masks[row].copy() for row in chosen], chosen


def measure(masks: Masks, form: str, fresh: torch.Tensor, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each kernel. The kernels take turns, and their results must be equal."""
    some, rows = given(masks, form)
    space = torch.empty(masks.shape, dtype=torch.int32)
    logits = torch.empty_like(fresh)
    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: apply_bitmask(logits, some, rows),
        "xgrammar": lambda: by_xgrammar(logits, some, rows, space),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: list[torch.Tensor] = []
    for index in range(repeat + 1):
        for name, way in ways.items():
            logits.copy_(fresh)
            started = time.perf_counter()
            way()
            if index:
                seconds[name].append(time.perf_counter() - started)
            else:  # the first round warms up
                results.append(logits.clone())
    if not torch.equal(*results):
        raise AssertionError("the kernels disagree")
    return seconds


def figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, values in seconds.items():
        row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
    row["xgrammar_to_ours"] = round(row["xgrammar_p50"] / row["ours_p50"], 2)
    return row


def random_masks(share: float, batch: int, size: int) -> Masks:
    """Return masks that allow a random share of the tokens."""
    random = np.random.default_rng(0)
    allowed = np.zeros((batch, words(size) * 32), np.bool_)
    allowed[:, :size] = random.random((batch, size), np.float32) < share
    allowed[:, 0] = True
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


def real(masks: Masks, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the kernels on real masks."""
    threads = list(dict.fromkeys(options.threads))
    rows: list[dict[str, Any]] = []
    settings = [
        (count, dtype, batch)
        for count in threads
        for dtype in options.dtype
        for batch in (options.batch if dtype == options.dtype[0] and count == threads[0] else [max(CURVE_BATCHES)])
        if batch in options.batch
    ]
    for count, dtype, batch in tqdm(settings, desc="real masks", leave=False, disable=None):
        torch.set_num_threads(count)
        fresh = torch.randn(batch, size).to(DTYPES[dtype])
        for kind, some in kinds(masks, batch).items():
            for form in FORMS[: 1 if batch == 1 else None]:
                row: dict[str, Any] = {"threads": count, "dtype": dtype, "batch": batch, "given": form, "masks": kind}
                row["allowed_percent"] = round(100 * float(share_allowed(some).mean()), 2)
                rows.append(row | figures(measure(some, form, fresh, options.repeat)))
    return rows


def curve(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the kernels on random masks, from tight to loose."""
    torch.set_num_threads(options.threads[0])
    rows: list[dict[str, Any]] = []
    batch = min(max(options.batch), max(CURVE_BATCHES))
    fresh = torch.randn(batch, size).to(DTYPES[options.dtype[0]])
    for share in tqdm(SHARES, desc="random masks", leave=False, disable=None):
        seconds = measure(random_masks(share, batch, size), FORMS[0], fresh, max(3, options.repeat // 4))
        rows.append({"allowed_percent": 100 * share, "batch": batch, **figures(seconds)})
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="number of torch's threads")
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run some seconds: batch 16, few repetitions")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.repeat, options.dtype = [16], 5, ["float32"]
    return options


def plot(rows: list[dict[str, Any]], line: list[dict[str, Any]], path: Path, title: str) -> None:
    first = rows[0]
    chosen = [row for row in rows if (row["threads"], row["dtype"]) == (first["threads"], first["dtype"])]
    largest = max(row["batch"] for row in chosen if row["batch"] <= max(CURVE_BATCHES))
    chosen = [row for row in chosen if row["batch"] == largest]
    figure, axes = canvas(2, width=7.0)
    names = [f"{row['masks']}\n{row['given'].replace(' ', chr(10))}" for row in chosen]
    for index, way in enumerate(("ours", "xgrammar")):
        at = [place + (index - 0.5) * 0.4 for place in range(len(chosen))]
        bars = axes[0].bar(at, [row[f"{way}_p50"] for row in chosen], 0.37, label=way)
        axes[0].bar_label(bars, fmt="%.2g", fontsize=7)
        axes[1].plot(
            [row["allowed_percent"] for row in line],
            [1e3 * row[f"{way}_p50"] / row["batch"] for row in line],
            "o-",
            label=way,
        )
    axes[0].set_xticks(range(len(chosen)), names, fontsize=7)
    axes[0].set(yscale="log", ylabel="ms, p50")
    axes[0].set_title(f"real masks, batch {largest}, {title}", fontsize=9)
    axes[1].set(yscale="log", ylim=(1, None), xlabel="% of the tokens allowed", ylabel="us per row, p50")
    axes[1].set_title(f"random masks, batch {line[0]['batch']}", fontsize=9)
    for axis in axes:
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    started_on = machine()
    masks = real_masks(vocabulary, tokens, options.data, 500 if options.quick else 6000)
    share = share_allowed(masks)
    results = real(masks, vocabulary.padded_vocab_size, options)
    line = curve(vocabulary.padded_vocab_size, options)
    columns = {
        "threads": "threads",
        "dtype": "dtype",
        "batch": "batch",
        "given": "form",
        "masks": "masks",
        "allowed_percent": "% allowed",
        "ours_p50": "ours p50",
        "ours_p99": "p99",
        "xgrammar_p50": "xgrammar p50",
        "xgrammar_p99": "p99",
        "xgrammar_to_ours": "times faster",
    }
    print_table(results, columns)
    print("\nrandom masks")
    print_table(line, {key: heading for key, heading in columns.items() if key in line[0]})
    mixture = {"tight": float((share <= TIGHT).mean()), "loose": float((share >= LOOSE).mean())}
    print(f"of {len(masks)} masks, {mixture['tight']:.0%} are tight and {mixture['loose']:.0%} loose; milliseconds")
    write_json(
        options.out / "apply_kernel.json",
        vars(options),
        {"real": results, "random": line, "mixture": mixture},
        started_on,
    )
    title = (
        f"{tokens.width} tokens, {results[0]['dtype']}, {results[0]['threads']} thread(s), {started_on['cpus']} CPUs"
    )
    plot(results, line, options.out / "apply_kernel.png", title)
    print(f"wrote {options.out / 'apply_kernel.json'} and .png")


if __name__ == "__main__":
    main()
