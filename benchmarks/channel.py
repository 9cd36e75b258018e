"""Measure the round trip of a step to the mask processes: `python -m benchmarks.channel`.

A message with the rows of the step goes to each actor, and the answers come back. The actors compute nothing, so only
the communication is measured. These ways take turns in one run:

- a pool's step: `submit` and `collect` as the engine calls them; the masks are in shared memory;
- the same bytes and nothing else through our channel, ZeroMQ (`PAIR` over ipc), plain `multiprocessing` pipes, and
  plain
  Ray actor calls with `ray.get`;
- a Ray step: the same calls, each of which returns the masks of its rows through Ray's object store.

Compare a pool's step with a Ray step, and bytes with bytes.

The last measurement is a whole `RayPool` with llguidance masks for a JSON Schema: `submit` and `collect` without a
forward pass between them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import ray
import zmq
from actors.address import Address
from actors.link import Link, Wired
from actors.rotation import Rotation
from actors.segment import Segment, SegmentName, attach
from actors.step_loop import StepLoop

from actors.channel import Channel, Transport
from actors.cluster import Cluster
from actors.ray_pool import RayPool
from actors.supervision.process import ActorLocation
from actors.supervision.supervisor import WorkerUp
from benchmarks.report import RESULTS, machine, write_json
from guided.bitmask import words
from guided.constraint import Constraint
from guided.messages import FillRow, RowResult, RowStatus, StepAnswer, StepRequest, decoder, encode
from guided.pool import Fill, Grammar, Row
from guided.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
}
TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines", "poetry", "programs"'

OURS, RAY = "a pool's step", "a Ray step"
OURS_BYTES, ZEROMQ_BYTES, PIPE_BYTES = "bytes: our channel", "bytes: ZeroMQ", "bytes: pipes"
RAY_BYTES = "bytes: Ray calls"
Samples = dict[str, list[float]]


class IdleWorker:
    """A mask worker that computes nothing."""

    def free(self, sequences: Sequence[int]) -> None:
        pass

    def handle(self, request: StepRequest, bitmask: Any) -> Iterator[RowResult]:
        for fill in request.fills:
            yield RowResult(fill.sequence, fill.position, fill.row, RowStatus.READY, 1e-5)


class ChannelActor:
    """A Ray actor with our step loop and an idle worker. It also answers the same bytes over a socket and a Ray
    call."""

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

    def echo(self, address: Address) -> None:
        import zmq

        from actors.channel import connect

        self._echo_through(connect(zmq.Context(), address))

    def echo_by_zeromq(self, endpoint: str) -> None:
        import zmq

        socket = zmq.Context().socket(zmq.PAIR)
        socket.connect(endpoint)
        self._echo_through(socket)

    def _echo_through(self, end: Any) -> None:
        def serve() -> None:
            while True:
                end.send(answer(self.worker, self.decode, end.recv()))

        threading.Thread(target=serve, daemon=True).start()

    def step(self, message: bytes) -> bytes:
        return answer(self.worker, self.decode, message)

    def masks(self, message: bytes, words: int) -> tuple[bytes, Any]:
        """Return the answer and new masks: int32 `[rows, words]`."""
        found = self.step(message)
        return found, np.ones((len(decoder(StepAnswer).decode(found).results), words), np.int32)


def answer(worker: IdleWorker, decode: Callable[[bytes], StepRequest], message: bytes) -> bytes:
    request = decode(message)
    return encode(StepAnswer(request.incarnation, request.step, list(worker.handle(request, None))))


def pipe_process(pipe: Connection) -> None:
    worker, decode = IdleWorker(), decoder(StepRequest).decode
    while message := pipe.recv_bytes():
        pipe.send_bytes(answer(worker, decode, message))


def requests(rows: int, actors: int) -> list[bytes]:
    """Return the message of a step to each actor: one new token per row."""
    mine = range(rows // actors)
    return [encode(StepRequest(1, 7, [FillRow(row, row, 20, [1234]) for row in mine])) for _ in range(actors)]


def decoded(answers: list[bytes]) -> int:
    decode = decoder(StepAnswer).decode
    return sum(len(decode(message).results) for message in answers)


def received(channel: Channel) -> bytes:
    """Wait for the next message."""
    while (message := channel.receive()) is None:
        select.select([channel.socket], [], [])
    return message


class Ours:
    """The pool's step path with idle workers in the actors."""

    def __init__(self, actors: list[Any], rows: int, width: int, directory: str) -> None:
        self.transport = Transport(directory, "127.0.0.1")
        self.rotation = Rotation()
        self.links: list[Link] = []
        for index, actor in enumerate(actors):
            segment, channel = Segment(1024, width), self.transport.ipc()
            pid = ray.get(actor.attach.remote(channel.address, segment.name))
            assert channel.wait_connected(10)
            link = Link(Wired(index, 1, ActorLocation(pid, "", ""), channel, segment, True, {"g"}))
            self.links.append(link)
            self.rotation.announce(WorkerUp(link))
        grammar = Grammar("g", "none", Constraint.json_object(), ("g",))
        for sequence in range(rows):
            self.rotation.open(sequence, grammar, None)
        self.fills = [Fill(sequence, 20, [1234]) for sequence in range(rows)]
        self.submit_ms = 0.0

    def step(self) -> Sequence[Row]:
        started = time.perf_counter()
        self.rotation.submit(self.fills)
        self.submit_ms = 1e3 * (time.perf_counter() - started)
        return self.rotation.collect(None, 10.0)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.transport.close()


def measure_channels(rows: int, actors: int, width: int, steps: int) -> Samples:
    """Measure milliseconds per step and channel. The channels take turns."""
    cluster = Cluster.join()
    context = multiprocessing.get_context("spawn")
    handles = [ray.remote(num_cpus=0)(ChannelActor).remote() for _ in range(actors)]
    pairs = [context.Pipe() for _ in range(actors)]
    processes = [context.Process(target=pipe_process, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    messages = requests(rows, actors)
    samples: Samples = {}
    zeromq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def by_ray() -> None:
        calls = [actor.step.remote(message) for actor, message in zip(handles, messages, strict=True)]
        assert decoded(ray.get(calls)) == rows

    def by_ray_with_masks() -> None:
        calls = [actor.masks.remote(message, width) for actor, message in zip(handles, messages, strict=True)]
        answers = ray.get(calls)
        assert decoded([message for message, _ in answers]) == sum(len(masks) for _, masks in answers) == rows

    def by_channel() -> None:
        for channel, message in zip(channels, messages, strict=True):
            assert channel.send(message)
        assert decoded([received(channel) for channel in channels]) == rows

    def by_zeromq() -> None:
        for socket, message in zip(sockets, messages, strict=True):
            socket.send(message)
        assert decoded([socket.recv() for socket in sockets]) == rows

    def by_pipe() -> None:
        for (pipe, _), message in zip(pairs, messages, strict=True):
            pipe.send_bytes(message)
        assert decoded([pipe.recv_bytes() for pipe, _ in pairs]) == rows

    with tempfile.TemporaryDirectory(prefix="guided-") as directory:
        ours = Ours(handles, rows, width, directory)
        channels = [ours.transport.ipc() for _ in handles]
        ray.get([actor.echo.remote(channel.address) for actor, channel in zip(handles, channels, strict=True)])
        sockets = [zeromq.socket(zmq.PAIR) for _ in handles]
        for index, (actor, socket) in enumerate(zip(handles, sockets, strict=True)):
            socket.bind(f"ipc://{directory}/z{index}")
            ray.get(actor.echo_by_zeromq.remote(f"ipc://{directory}/z{index}"))
        for channel in channels:
            assert channel.wait_connected(10)
        ways: dict[str, Callable[[], object]] = {
            OURS: ours.step,
            OURS_BYTES: by_channel,
            ZEROMQ_BYTES: by_zeromq,
            PIPE_BYTES: by_pipe,
            RAY_BYTES: by_ray,
            RAY: by_ray_with_masks,
        }
        for index in range(steps + steps // 10):
            for name, step in ways.items():
                started = time.perf_counter()
                found = step()
                elapsed = 1e3 * (time.perf_counter() - started)
                if name == OURS:
                    assert isinstance(found, Sequence)
                    assert all(row.state == "ready" for row in found)
                if index >= steps // 10:
                    samples.setdefault(name, []).append(elapsed)
                    if name == OURS:
                        samples.setdefault(f"{OURS}: submit", []).append(ours.submit_ms)
        for channel in channels:
            channel.close()
        ours.close()
        zeromq.destroy(linger=0)
    for pipe, _ in pairs:
        pipe.send_bytes(b"")
    for process in processes:
        process.join()
    cluster.leave()
    return samples


def measure_pool(vocabulary: Vocabulary, rows: int, actors: int, steps: int) -> Samples:
    """Measure milliseconds per step with real masks. Every sequence writes the same text, token by token."""
    pool = RayPool(vocabulary, num_actors=actors)
    grammar = pool.compile(Constraint.json_schema(SCHEMA), ("llguidance",)).result(120)
    tokens = vocabulary.encode(TEXT)
    samples: Samples = {"pool: submit": [], "pool: submit + collect": [], "pool: one mask (in the worker)": []}
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
            results = pool.collect(None, 30.0)
            ended = time.perf_counter()
            assert all(row.state == "ready" for row in results)
            if opened > rows:
                samples["pool: submit"].append(1e3 * (submitted - started))
                samples["pool: submit + collect"].append(1e3 * (ended - started))
                samples["pool: one mask (in the worker)"].append(1e3 * results.seconds / rows)
                done += 1
        pool.free(sequences)
    pool.shutdown()
    return samples


def big_vocabulary() -> Vocabulary:
    """Return mistral_common's vocabulary of 131,072 tokens, or bytes if it isn't installed."""
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
        if name in (OURS, RAY, OURS_BYTES, PIPE_BYTES, RAY_BYTES):
            ordered = np.sort(values)
            axes.plot(
                ordered,
                np.arange(1, len(ordered) + 1) / len(ordered) * 100,
                label=name,
                linestyle=":" if name.startswith("bytes") else "-",
            )
    axes.set(xscale="log", xlabel="round trip of a step, ms", ylabel="faster steps, %", title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows per step, over all actors")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per channel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for channel.json and channel.png")
    parser.add_argument("--quick", action="store_true", help="run half a minute: few steps")
    options = parser.parse_args()
    if options.quick:
        options.steps = 200
    started_on = machine()
    vocabulary = big_vocabulary()
    width = words(vocabulary.padded_vocab_size)
    samples = measure_channels(options.rows, options.actors, width, options.steps)
    samples |= measure_pool(vocabulary, options.rows, options.actors, options.steps // 4)
    table = summary(samples)
    print(f"{options.rows} rows, {options.actors} actors, {vocabulary.vocab_size} tokens; milliseconds")
    print(f"{'':36}{'p50':>9}{'p90':>9}{'p99':>9}")
    for name, row in table.items():
        print(f"{name:36}" + "".join(f"{row[label]:9.3f}" for label in ("p50", "p90", "p99")))
    ratios = {
        f"{theirs} / {ours}": {at: round(table[theirs][at] / table[ours][at], 1) for at in ("p50", "p99")}
        for ours, theirs in ((OURS, RAY), (OURS_BYTES, RAY_BYTES))
    }
    for name, ratio in ratios.items():
        print(f"{name:36}{ratio['p50']:9.1f}{ratio['p99']:18.1f}  times")
    setting = {"rows": options.rows, "actors": options.actors, "steps": options.steps, "words": width}
    write_json(options.out / "channel.json", setting, {"milliseconds": table, "ratios": ratios}, started_on)
    title = f"{options.rows} rows, {options.actors} actors, {started_on['cpus']} CPUs"
    plot(samples, options.out / "channel.png", title)
    print(f"wrote {options.out / 'channel.json'} and .png")


if __name__ == "__main__":
    main()
