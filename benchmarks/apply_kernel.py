"""Compare `guided.kernel.apply_bitmask` with xgrammar's kernel on a CPU: `python -m benchmarks.apply_kernel`.

Both write -inf over forbidden logits. The masks are those of real outputs: llguidance, real JSON Schemas, a vocabulary
of 131,072 tokens. Tight masks allow at most 1 % of the vocabulary, loose ones at least 50 %, mixed ones are a random
sample. They lie in scattered slots of a worker's table; xgrammar's way first copies them into an existing tensor. They
belong to every row of the batch, or to every second one. The ways take turns on the same logits and must give the same
result. Writes benchmarks/out/apply_kernel.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.paths import RESULTS
from benchmarks.report import fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import Backends
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.kernel import apply_bitmask
from guided.pools.protocol import ReadyMasks
from guided.vocabulary import Vocabulary

TIGHT, LOOSE = 0.01, 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = {"all": 1, "every second": 2}
"""Step between the rows of the batch that have a mask."""
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


def measure(masks: Masks, step: int, fresh: torch.Tensor, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each way, for a mask in every `step`-th row of the batch."""
    batch = len(masks)
    slots = np.random.default_rng(1).permutation(2 * batch)[:batch]
    table = np.zeros((2 * batch, masks.shape[1]), np.int32)
    table[slots] = masks
    rows = np.arange(0, batch, step)
    ready = [ReadyMasks(table, slots[rows], rows, np.zeros(2 * batch, np.float32))]
    space = torch.empty(masks.shape, dtype=torch.int32)
    logits = torch.empty_like(fresh)

    def by_xgrammar() -> None:
        space.numpy()[rows] = table[slots[rows]]
        xgrammar.apply_token_bitmask_inplace(logits, space, indices=None if step == 1 else rows.tolist())

    ways: dict[str, Callable[[], None]] = {"ours": lambda: apply_bitmask(logits, ready, rows), "xgrammar": by_xgrammar}
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


def real(masks: Masks, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both ways in each setting."""
    rows: list[dict[str, Any]] = []
    for dtype, batch in tqdm(list(product(options.dtype, options.batch)), leave=False, disable=None):
        fresh = torch.randn(batch, size).to(DTYPES[dtype])
        for kind, some in kinds(masks, batch).items():
            for form, step in list(ROWS.items())[: 1 if batch == 1 else None]:
                row: dict[str, Any] = {"dtype": dtype, "batch": batch, "rows": form, "masks": kind}
                row["allowed_percent"] = round(100 * float(share_allowed(some).mean()), 2)
                for name, values in measure(some, step, fresh, options.repeat).items():
                    row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
                row["xgrammar_to_ours"] = round(row["xgrammar_p50"] / row["ours_p50"], 2)
                rows.append(row)
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="number of torch's threads")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run some seconds: batch 16, few repetitions")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.repeat, options.dtype = [16], 5, ["float32"]
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    started_on = machine()
    masks = real_masks(vocabulary, tokens, options.data, 500 if options.quick else 6000)
    share = share_allowed(masks)
    results = real(masks, vocabulary.padded_vocab_size, options)
    columns = {
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
    path = options.out / "apply_kernel.json"
    write_json(path, vars(options), {"real": results, "mixture": mixture}, started_on)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
