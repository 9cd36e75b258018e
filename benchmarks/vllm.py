"""Measure guided requests inside vLLM, and what one bad mask does to the others:

    python -m benchmarks.vllm --vllm-python PATH

*Throughput*: the requests of `benchmarks.serving` at `vllm serve` with its own guidance
and xgrammar backends, and with `GUIDED_VLLM=1`, which computes the masks in two mask
actors. One server runs at a time.

*Stalls*: one request (the victim) beside six others, four with a JSON Schema, first
without and then with a fault:

- `sleep`, `hold`, `raise`, `segfault`, `endless` are injected into the victim's masks
  (`benchmarks.injected_faults`): take 0.2 s; the same in C with the interpreter lock;
  raise; read from address 0; never return;
- `killed actor`: a mask actor is killed during the requests.

Reported are the answers of the victim and of the others, the others' inter-token
latency and longest gap, and whether the server answers afterwards. A server that does
not answer is started again. `guided serve` runs the same for comparison. Writes
vllm.{json,png}.

    python -m benchmarks.vllm --vllm-python PATH --device cuda
    python -m benchmarks.vllm --vllm-python PATH --simulated-step 0.005

measure the engine's steps instead, without a server: `benchmarks.vllm_engine` has the
cases. One engine runs at a time. The second command needs no GPU: it measures vLLM's V2
scheduling with a device that computes nothing, but takes this many seconds for a
forward pass (`benchmarks.fake_device`). Writes vllm_DEVICE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import jsonschema
from tqdm import tqdm

from benchmarks import report, serving
from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU
from benchmarks.client import Answer, ask
from benchmarks.comparison import vllm_candidate
from benchmarks.fake_device import ENVIRONMENT, STEP_SECONDS
from benchmarks.injected_faults import environment
from benchmarks.servers import Server, guided_server, vllm_server
from engine.default_model import checkpoint_path

KILL = "killed actor"
FAULTS = ("sleep", "hold", "raise", "segfault", "endless", KILL)
LIMIT_SECONDS = 40.0
"""A request that takes longer counts as hung."""
KILL_SECONDS = 0.3
PLAIN_TOKENS = 160
COLUMNS = {
    "fault": "fault",
    "way": "way",
    "victim": "victim",
    "others": "others valid",
    "without_p50": "ITL p50 without",
    "itl_p50": "with",
    "itl_p99": "ITL p99",
    "longest_gap": "longest gap, ms",
    "afterwards": "next request",
}
Start = Callable[[], AbstractContextManager[Server]]
ENGINES: dict[str, tuple[str | None, bool]] = {
    "unguided": (None, False),
    "vLLM, xgrammar": ("xgrammar", False),
    "vLLM, guidance": ("guidance", False),
    "GUIDED_VLLM=1, xgrammar": ("xgrammar", True),
    "GUIDED_VLLM=1, llguidance": ("guidance", True),
}
"""Way -> backend, and whether `GUIDED_VLLM` is set."""
STEP_COLUMNS = {
    "way": "way",
    "requests": "requests",
    "case": "case",
    "tokens_per_second": "tokens/s",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "itl_max": "ITL max, ms",
    "late_steps": "steps beyond the mask",
    "ttft": "its TTFT, ms",
}
LATE_SECONDS = 0.1
"""Duration of each injected mask of the late request."""


def people(name: str, count: int) -> dict[str, Any]:
    """Return the schema of a finite array of people, each with a property of this
    name."""
    fields = {
        name: {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    person = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": count, "maxItems": count, "items": person}


async def outcome_of(
    http: httpx.AsyncClient, schema: dict[str, Any] | None
) -> tuple[str, Answer]:
    """Send a streamed request, with a schema or with a fixed number of tokens.

    Returns:
        valid, invalid, or the failure; and the answer.
    """
    body: dict[str, Any] = {
        "messages": serving.MESSAGES,
        "temperature": 0,
        "stream": True,
        "max_tokens": 600,
    }
    body |= (
        serving.response_format(schema)
        if schema
        else {"ignore_eos": True, "max_tokens": PLAIN_TOKENS}
    )
    answer = await ask(http, body, LIMIT_SECONDS)
    if answer.failure:
        return answer.failure, answer
    choice = answer.choices[0]
    if schema is None:
        return "valid" if choice.finish_reason == "length" else "invalid", answer
    with contextlib.suppress(ValueError):
        if (
            jsonschema.Draft202012Validator(schema).is_valid(json.loads(choice.text))
            and choice.finish_reason == "stop"
        ):
            return "valid", answer
    return "invalid", answer


async def run_beside(
    server: Server, victim: str, kill: bool
) -> list[tuple[str, Answer]]:
    """Run the victim, with this property in its schema, and the others. Returns the
    outcomes, the victim first."""
    schemas = [*(people(f"name_{index}", 8) for index in range(4)), None, None]
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
        tasks = [
            asyncio.ensure_future(outcome_of(http, schema))
            for schema in (people(victim, 4), *schemas)
        ]
        if kill:
            await asyncio.sleep(KILL_SECONDS)
            os.kill(server.pids("mask actor")[0], signal.SIGKILL)
        return await asyncio.gather(*tasks)


async def observe(server: Server, fault: str) -> dict[str, Any]:
    """Return the figures of one fault. Times are in milliseconds."""
    await run_beside(server, "ordinary", kill=False)  # compiles and warms up
    _, *calm = await run_beside(server, "ordinary", kill=False)
    mark = "ordinary" if fault == KILL else f"injected_{fault}"
    (victim, _), *others = await run_beside(server, mark, kill=fault == KILL)
    row: dict[str, Any] = {"fault": fault, "victim": victim}
    for name, answers in {"without": calm, "itl": others}.items():
        gaps = [gap for _, answer in answers for gap in answer.gaps]
        row |= {
            f"{name}_{key}": value for key, value in report.percentiles(gaps).items()
        }
        row["longest_gap"] = round(1e3 * max(gaps, default=0.0), 1)
    row["others_not_valid"] = [outcome for outcome, _ in others if outcome != "valid"]
    row["others"] = f"{len(others) - len(row['others_not_valid'])} of {len(others)}"
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
        row["afterwards"], _ = await outcome_of(http, people("name", 2))
    return row


def stalls(ways: dict[str, Start], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every fault in every server."""
    rows = []
    with tqdm(total=len(ways) * len(options.fault), unit=" runs", disable=None) as bar:
        for way, start in ways.items():
            with contextlib.ExitStack() as stack:
                server: Server | None = None
                for fault in options.fault:
                    bar.set_description(f"{way}, {fault}")
                    bar.update()
                    server = server or stack.enter_context(start())
                    if fault == KILL and not server.pids("mask actor"):
                        continue  # it has no actors
                    rows.append({"way": way, **asyncio.run(observe(server, fault))})
                    if rows[-1]["afterwards"] != "valid":
                        with contextlib.suppress(ProcessLookupError):
                            server.process.kill()
                        stack.close()
                        server = None
    return rows


def device_name(python: str) -> str:
    """Return the name of the CUDA device."""
    command = [python, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.strip()


def engine_steps(python: str, options: argparse.Namespace) -> None:
    """Measure the steps of an engine of each way, one after the other."""
    started_on = report.machine()
    simulated = options.simulated_step
    device = f"simulated {1e3 * simulated:g} ms" if simulated else device_name(python)
    faults = environment() | {
        "GUIDED_SLOW_SECONDS": str(LATE_SECONDS),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if simulated:
        faults |= {
            **SINGLE_THREADED,
            **VLLM_ON_CPU,
            **ENVIRONMENT,
            STEP_SECONDS: str(simulated),
        }
        faults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    rows: list[dict[str, Any]] = []
    for way in options.way:
        backend, switch = ENGINES[way]
        setting = {
            "model": options.model or str(checkpoint_path()),
            "backend": backend,
            "switch": switch,
            "requests": options.requests,
            "beside": options.beside,
            "tokens": options.engine_tokens,
            "rounds": 2,
            "step_seconds": simulated,
            "prefix_caching": not options.no_prefix_caching,
        }
        run = subprocess.run(
            [python, "-m", "benchmarks.vllm_engine", json.dumps(setting)],
            env={**os.environ, **faults, "GUIDED_VLLM": str(int(switch))},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if run.returncode:
            report.fail(f"the engine of {way} failed")
        rows += [{"way": way, **row} for row in json.loads(run.stdout.splitlines()[-1])]
    print(device)
    report.print_table(rows, STEP_COLUMNS)
    name = re.sub(r"[^a-z0-9]+", "_", device.lower())
    report.write_json(
        options.out / f"vllm_{name}.json",
        vars(options),
        {"device": device, "steps": rows},
        started_on,
    )


def main() -> None:
    parser = serving.start(__doc__)
    parser.add_argument(
        "--device", choices=["cuda"], help="measure the engine's steps on a GPU"
    )
    parser.add_argument(
        "--simulated-step",
        type=float,
        help="measure them with a simulated device: seconds of a step",
    )
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[8, 64, 256],
        help="requests of the engine at once",
    )
    parser.add_argument(
        "--beside",
        type=int,
        nargs="*",
        default=[64],
        help="requests beside a late one, a new schema, a kill",
    )
    parser.add_argument(
        "--engine-tokens",
        type=int,
        default=200,
        help="tokens per request of the engine",
    )
    parser.add_argument(
        "--way",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES),
        help="engines to measure",
    )
    parser.add_argument(
        "--model", help="the engine's model (default: the embedded one)"
    )
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=list(FAULTS))
    options = serving.shorten(parser.parse_args())
    vllm = vllm_candidate(options.vllm_python)
    if vllm is None:
        report.fail("this benchmark needs --vllm-python")
    if options.device or options.simulated_step:
        engine_steps(vllm.python, options)
        return
    started_on, most = report.machine(), max(16, *options.concurrency)

    def run(backend: str, *, switch: bool = False, faults: bool = True) -> Start:
        variables = environment() if faults else {}
        return lambda: vllm_server(
            vllm.python,
            backend,
            switch=switch,
            max_num_seqs=most,
            environment=variables,
        )

    names = {
        "vLLM, guidance": ("guidance", False),
        "vLLM, xgrammar": ("xgrammar", False),
    }
    names |= {"vLLM, GUIDED_VLLM=1": ("guidance", True)}
    throughput = []
    # one at a time: an idle engine spins beside the measured one
    for name, (backend, switch) in names.items():
        with run(backend, switch=switch, faults=False)() as server:
            throughput += serving.measure({name: server}, options)
    ways: dict[str, Start] = {
        "vLLM, guidance": run("guidance"),
        "vLLM, GUIDED_VLLM=1": run("guidance", switch=True),
        "guided serve": lambda: guided_server(
            "--num-actors", "2", "--max-replays", "1", environment=environment()
        ),
    }
    rows = stalls(ways, options)
    report.print_table(rows, COLUMNS)
    results = {"throughput": throughput, "stalls": rows}
    report.write_json(options.out / "vllm.json", vars(options), results, started_on)
    serving.show(
        throughput,
        options,
        "vllm",
        f"vLLM's server, embedded model, {started_on['cpus']} CPUs",
    )


if __name__ == "__main__":
    main()
