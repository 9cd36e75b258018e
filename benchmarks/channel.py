"""What it costs to ask processes for a step's masks: `python -m benchmarks.channel`.

The control round trip of one step: a message with the rows of the step goes to each actor, its answers come back, and
the masks are copied out of shared memory into the step's bitmask. Nothing is computed by the actors, so that only the
way there and back is measured. Beside it, in the same run and taking turns: the same bytes through our channel alone,
through plain Ray actor calls and `ray.get`, and through bare `multiprocessing` pipes. None of these copies masks, keeps
leases or places sequences.

Last, the whole of it: a `RayPool` with llguidance masks for a JSON Schema, `submit` and `collect` one after the other
without a forward pass between them that would hide anything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import ray

from actors.channel import Address, Transport
from actors.cluster import Cluster
from actors.link import Link, Wired
from actors.mask_actor import Place
from actors.ray_pool import RayPool
from actors.rotation import Rotation
from actors.segment import Segment, SegmentName, attach
from actors.step_loop import StepLoop
from actors.supervisor import Up
from guided.bitmask import words
from guided.constraint import Constraint
from guided.messages import FillRow, RowResult, RowStatus, StepAnswer, StepRequest, decoder, encode
from guided.pool import Fill, Grammar
from guided.vocabulary import Vocabulary

RESULTS = Path(__file__).parent / "results"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
}
TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines", "poetry", "programs"'

OURS = "a pool's step (masks copied)"
Samples = dict[str, list[float]]


class IdleWorker:
    """A mask worker that answers at once and computes nothing."""

    def handle(self, request: StepRequest, bitmask: Any) -> Iterator[RowResult]:
        for fill in request.fills:
            yield RowResult(fill.sequence, fill.position, fill.row, RowStatus.READY, 1e-5)


class ChannelActor:
    """A Ray actor with our step loop and an idle worker; also answers the same bytes as a plain Ray call."""

    def __init__(self) -> None:
        self.worker = IdleWorker()
        self.decode = decoder(StepRequest).decode

    def attach(self, address: Address, segment: SegmentName) -> int:
        import zmq

        from actors.channel import connect

        rows = attach(segment)
        assert rows is not None
        worker: Any = self.worker
        StepLoop(1, worker, connect(zmq.Context(), address), rows, True, lambda: os._exit(1)).start()
        return os.getpid()

    def step(self, message: bytes) -> bytes:
        return answer(self.worker, self.decode, message)


def answer(worker: IdleWorker, decode: Callable[[bytes], StepRequest], message: bytes) -> bytes:
    request = decode(message)
    return encode(StepAnswer(request.incarnation, request.step, list(worker.handle(request, None))))


def pipe_process(pipe: Connection) -> None:
    worker, decode = IdleWorker(), decoder(StepRequest).decode
    while message := pipe.recv_bytes():
        pipe.send_bytes(answer(worker, decode, message))


def requests(rows: int, actors: int) -> list[bytes]:
    """What a step sends to each actor: one new token a row."""
    mine = range(rows // actors)
    return [encode(StepRequest(1, 7, [FillRow(row, row, 20, [1234]) for row in mine])) for _ in range(actors)]


def decoded(answers: list[bytes]) -> int:
    decode = decoder(StepAnswer).decode
    return sum(len(decode(message).results) for message in answers)


class Ours:
    """Rotation, links and leases as in the pool; the actors' workers are idle."""

    def __init__(self, actors: list[Any], rows: int, width: int, directory: str) -> None:
        self.transport = Transport(directory, "127.0.0.1")
        self.rotation = Rotation()
        self.links: list[Link] = []
        for index, actor in enumerate(actors):
            segment, channel = Segment(1024, width), self.transport.ipc()
            pid = ray.get(actor.attach.remote(channel.address, segment.name))
            assert channel.wait_connected(10)
            link = Link(Wired(index, 1, Place(pid, "", ""), channel, segment, True, {"g"}))
            self.links.append(link)
            self.rotation.announce(Up(link))
        grammar = Grammar("g", "none", Constraint.json_object(), ("g",))
        for sequence in range(rows):
            self.rotation.open(sequence, grammar, None)
        self.fills = [Fill(sequence, 20, [1234]) for sequence in range(rows)]
        self.bitmask = np.zeros((rows, width), np.int32)
        self.submit_ms = 0.0

    def step(self) -> None:
        started = time.perf_counter()
        self.rotation.submit(self.fills)
        self.submit_ms = 1e3 * (time.perf_counter() - started)
        states = self.rotation.collect(self.bitmask, 10.0)
        assert all(row.state == "ready" for row in states)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.transport.close()


def measure_channels(rows: int, actors: int, width: int, steps: int) -> Samples:
    """Milliseconds a step, by channel; the channels take turns."""
    cluster = Cluster.join()
    context = multiprocessing.get_context("spawn")
    handles = [ray.remote(num_cpus=0)(ChannelActor).remote() for _ in range(actors)]
    pairs = [context.Pipe() for _ in range(actors)]
    processes = [context.Process(target=pipe_process, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    messages = requests(rows, actors)
    samples: Samples = {}

    def by_ray() -> None:
        calls = [actor.step.remote(message) for actor, message in zip(handles, messages, strict=True)]
        assert decoded(ray.get(calls)) == rows

    def by_channel() -> None:
        for link, message in zip(ours.links, messages, strict=True):
            assert link._channel.send(message)
        for link in ours.links:
            left = rows // actors
            while left:  # a step that takes longer than a millisecond is answered in several messages
                left -= decoded([link.socket.recv()])

    def by_pipe() -> None:
        for (pipe, _), message in zip(pairs, messages, strict=True):
            pipe.send_bytes(message)
        assert decoded([pipe.recv_bytes() for pipe, _ in pairs]) == rows

    with tempfile.TemporaryDirectory(prefix="guided-") as directory:
        ours = Ours(handles, rows, width, directory)
        ways = {
            OURS: ours.step,
            "ZeroMQ (bytes only)": by_channel,
            "multiprocessing pipe": by_pipe,
            "Ray calls + ray.get": by_ray,
        }
        for index in range(steps + steps // 10):
            for name, step in ways.items():
                started = time.perf_counter()
                step()
                if index >= steps // 10:
                    samples.setdefault(name, []).append(1e3 * (time.perf_counter() - started))
                    if name is OURS:
                        samples.setdefault("  of it: submit", []).append(ours.submit_ms)
        ours.close()
    for pipe, _ in pairs:
        pipe.send_bytes(b"")
    for process in processes:
        process.join()
    cluster.leave()
    return samples


def measure_pool(vocabulary: Vocabulary, rows: int, actors: int, steps: int) -> Samples:
    """Milliseconds of a step with real masks: every sequence writes the same text, token by token, again and again."""
    pool = RayPool(vocabulary, num_actors=actors)
    grammar = pool.compile(Constraint.json_schema(SCHEMA), ("llguidance",)).result(120)
    tokens = vocabulary.encode(TEXT)
    bitmask = np.zeros((rows, words(vocabulary.padded_vocab_size)), np.int32)
    samples: Samples = {"pool: submit": [], "pool: submit + collect": [], "pool: mask a row (in the worker)": []}
    done, opened = 0, 0
    while done < steps:
        sequences = range(opened, opened + rows)
        opened += rows
        for sequence in sequences:
            pool.open(sequence, grammar)
        for position in range(len(tokens)):
            new = tokens[position - 1 : position] if position else []
            fills = [Fill(sequence, position - len(new), new) for sequence in sequences]
            started = time.perf_counter()
            pool.submit(fills)
            submitted = time.perf_counter()
            results = pool.collect(bitmask, 30.0)
            ended = time.perf_counter()
            assert all(row.state == "ready" for row in results)
            if opened > rows:
                samples["pool: submit"].append(1e3 * (submitted - started))
                samples["pool: submit + collect"].append(1e3 * (ended - started))
                samples["pool: mask a row (in the worker)"].extend(1e3 * row.seconds for row in results)
                done += 1
        pool.free(sequences)
    pool.shutdown()
    return samples


def big_vocabulary() -> Vocabulary:
    """The 131,072 tokens that mistral_common ships; bytes where that isn't installed."""
    try:
        import mistral_common
    except ImportError:
        return Vocabulary((b"</s>", *(bytes([byte]) for byte in range(256))), (0,), frozenset({0}), 131072)
    return Vocabulary.from_tekken(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")


def summary(samples: Samples) -> dict[str, dict[str, float]]:
    percentiles = {"p50": 50, "p90": 90, "p99": 99}
    return {
        name: {label: round(float(np.percentile(values, at)), 4) for label, at in percentiles.items()}
        for name, values in samples.items()
    }


def plot(samples: Samples, path: Path, title: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, values in samples.items():
        if name.startswith(("a pool", "ZeroMQ", "multiprocessing", "Ray")):
            ordered = np.sort(values)
            axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered) * 100, label=name)
    axes.set(xscale="log", xlabel="control round trip of a step, ms", ylabel="steps that were faster, %", title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of a step, over all actors")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps of each channel")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for channel.json and channel.png")
    options = parser.parse_args()
    vocabulary = big_vocabulary()
    width = words(vocabulary.padded_vocab_size)
    load = os.getloadavg()[0]
    samples = measure_channels(options.rows, options.actors, width, options.steps)
    samples |= measure_pool(vocabulary, options.rows, options.actors, options.steps // 4)
    table = summary(samples)
    print(
        f"{options.rows} rows, {options.actors} actors, {vocabulary.vocab_size} tokens, load {load:.1f}; milliseconds"
    )
    print(f"{'':36}{'p50':>9}{'p90':>9}{'p99':>9}")
    for name, row in table.items():
        print(f"{name:36}" + "".join(f"{row[label]:9.3f}" for label in ("p50", "p90", "p99")))
    options.output.mkdir(parents=True, exist_ok=True)
    record = {
        "rows": options.rows,
        "actors": options.actors,
        "steps": options.steps,
        "vocabulary": vocabulary.vocab_size,
        "cpus": os.cpu_count(),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "milliseconds": table,
    }
    (options.output / "channel.json").write_text(json.dumps(record, indent=2) + "\n")
    plot(
        samples, options.output / "channel.png", f"{options.rows} rows, {options.actors} actors, {os.cpu_count()} CPUs"
    )


if __name__ == "__main__":
    main()
