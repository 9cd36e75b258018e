"""Measure what our plugin's copy of new tokens costs in vLLM's V2 runner: `python -m benchmarks.v2_token_copies`.

The V2 runner keeps tokens on the device. `TokenCopies` copies the tokens that a step added: `begin`
before the forward pass, `read` after its launch. Both are timed on the host, for a batch of guided slots with one new
token each, or up to five (four draft tokens). With `--device cuda` a forward pass of about `--forward-ms` runs between
the two, and `read` also waits for the step before. With `--device cpu` there is no copy from a device, only the host's
work.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.paths import RESULTS
from benchmarks.report import fail, machine, percentiles, print_table, write_json
from guided.integrations.vllm.v2_batch import TokenCopies

COLUMNS = {
    "slots": "guided slots",
    "width": "tokens each",
    "begin_p50": "begin p50, ms",
    "begin_p99": "p99",
    "read_p50": "read p50, ms",
    "read_p99": "p99",
    "both_p50": "both p50, ms",
    "both_p99": "p99",
}
MAX_MODEL_LEN = 8192


class Forward:
    """A forward pass on a CUDA device, or none on a CPU."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        self._times = 0
        if device.type == "cuda":
            self._matrix = torch.randn(4096, 4096, device=device, dtype=torch.float16)
            self._times = 20
            self.launch()
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.launch()
            torch.cuda.synchronize()
            self._times = max(1, round(20 * milliseconds / 1e3 / (time.perf_counter() - started)))

    def launch(self) -> None:
        for _ in range(self._times):
            self._matrix @ self._matrix


def measured(device: torch.device, forward: Forward, slots: int, width: int, steps: int) -> dict[str, Any]:
    """Return one row of the table, in milliseconds. Checks the copied tokens."""
    tokens = torch.randint(100_000, (4 * slots, MAX_MODEL_LEN), dtype=torch.int32)
    lengths = torch.randint(100, MAX_MODEL_LEN - width, (4 * slots,), dtype=torch.int32)
    state = SimpleNamespace(
        device=device,
        all_token_ids=SimpleNamespace(gpu=tokens.to(device)),
        total_len=SimpleNamespace(gpu=lengths.to(device)),
    )
    copies = TokenCopies(state)
    seconds: dict[str, list[float]] = {"begin": [], "read": [], "both": []}
    chosen = random.Random(0)
    for step in range(20 + steps):
        which = chosen.sample(range(4 * slots), slots)
        starts = lengths[which].tolist()
        started = time.perf_counter()
        copies.begin(which, starts, width)
        begun = time.perf_counter()
        forward.launch()
        launched = time.perf_counter()
        copied = copies.read()
        read = time.perf_counter()
        places = zip(which, starts, strict=True)
        if copied != [[start, *tokens[row, start : start + width].tolist()] for row, start in places]:
            raise AssertionError(f"step {step}: the copied tokens are wrong")
        if step >= 20:
            seconds["begin"].append(begun - started)
            seconds["read"].append(read - launched)
            seconds["both"].append(begun - started + read - launched)
    row: dict[str, Any] = {"slots": slots, "width": width}
    for name, values in seconds.items():
        row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
    return row


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--forward-ms", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run some seconds: few steps")
    options = parser.parse_args()
    if options.quick:
        options.steps = 200
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        fail("torch sees no CUDA device here: --device cpu")
    torch.set_num_threads(1)
    started_on = machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else started_on["processor"]
    forward = Forward(device, options.forward_ms)
    rows = [measured(device, forward, slots, width, options.steps) for slots in options.slots for width in (1, 5)]
    print(f"{device.type}: {name}")
    print_table(rows, COLUMNS)
    setting = vars(options) | {"device": device.type, "device_name": name}
    path = options.out / "v2_token_copies.json"
    write_json(path, setting, rows, started_on)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
