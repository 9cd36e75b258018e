"""Measure the round trip of a step to the mask processes: `python -m benchmarks.channel`.

In each step the engine asks every actor for the masks of its rows and waits for them. The actors compute nothing, so
only the communication is measured. These ways take turns in one run:

- a pool's step: `submit` and `collect` as the engine calls them, with tokens and masks in the slot table;
- the step's message and an answer, and nothing else, through our channel, ZeroMQ (`PAIR` over ipc), plain
  `multiprocessing` pipes, and Ray actor calls with `ray.get`;
- a Ray step: the same Ray calls, each of which also returns the masks of its rows through Ray's object store.

Compare a pool's step with a Ray step, and messages with messages.

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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
import ray
import zmq
from msgspec.msgpack import encode
from numpy.typing import NDArray

from actors.channel import Address, Channel, Transport, connect
from actors.processes import ProcessLocation
from actors.ray_pool import RayPool
from actors.steps import Dispatcher
from actors.steps.connection import WorkerConnection
from actors.steps.placement import WorkerUp
from actors.steps.protocol import Fill, Filled, Segment, SegmentName, attach
from actors.steps.server import StepServer
from benchmarks.paths import RESULTS
from benchmarks.report import machine, write_json
from guided.bitmask import words
from guided.constraint import Constraint
from guided.pools.protocol import Grammar, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
}
TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines", "poetry", "programs"'
TOKEN, TOKENS_BEFORE = 1234, 20
SLOTS = 1024
WAIT = 30.0

OURS, RAY = "a pool's step", "a Ray step"
OUR_MESSAGE, ZEROMQ_MESSAGE, PIPE_MESSAGE = "message: our channel", "message: ZeroMQ", "message: pipes"
RAY_MESSAGE = "message: Ray calls"
Samples = dict[str, list[float]]


class IdleWorker:
    """Stands in for a `MaskWorker` and computes nothing."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def open(self, slot: int, grammar: str, parent: int | None, tokens: Sequence[int]) -> None:
        self._lengths[slot] = len(tokens)

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def fill(self, slot: int, tokens: Sequence[int], row: NDArray[np.int32]) -> None:
        self._lengths[slot] += len(tokens)


class ChannelActor:
    """A Ray actor with our step server and an idle worker. It also answers bare messages over sockets and Ray."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def attach(self, address: Address, segment: SegmentName) -> int:
        """Serve steps; return the pid."""
        table = attach(segment)
        assert table is not None
        worker: Any = IdleWorker()
        StepServer(worker, connect(self._context, address), table, True, lambda: os._exit(1)).start()
        return os.getpid()

    def echo(self, address: Address) -> None:
        """Answer messages over one of our channels."""
        end = connect(self._context, address)
        self._answer_all(end.receive, end.send)

    def echo_by_zeromq(self, endpoint: str) -> None:
        """Answer messages over a ZeroMQ socket."""
        socket = self._context.socket(zmq.PAIR)
        socket.connect(endpoint)
        self._answer_all(socket.recv, socket.send)

    def _answer_all(self, receive: Callable[[], bytes | None], send: Callable[[bytes], object]) -> None:
        def serve() -> None:
            while (message := receive()) is not None:
                send(answer(message))

        threading.Thread(target=serve, daemon=True).start()

    def message(self, message: bytes) -> bytes:
        return answer(message)

    def masks(self, message: bytes, words: int) -> tuple[bytes, NDArray[np.int32]]:
        """Return the answer and new masks: int32 `[rows, words]`."""
        found = answer(message)
        return found, np.ones((num_rows([found]), words), np.int32)


def answer(message: bytes) -> bytes:
    """Return the answer to a frame with one `Fill`: the same slots."""
    (fill,) = msgspec.msgpack.decode(message, type=list[Fill])
    return encode(Filled(slots=fill.slots))


def num_rows(answers: Sequence[bytes]) -> int:
    """Decode the answers; return the number of their rows."""
    return sum(len(np.frombuffer(msgspec.msgpack.decode(message, type=Filled).slots, np.int32)) for message in answers)


def pipe_process(pipe: Connection) -> None:
    while message := pipe.recv_bytes():
        pipe.send_bytes(answer(message))


def received(channel: Channel) -> bytes:
    """Wait for the next message."""
    while (message := channel.receive()) is None:
        select.select([channel.socket], [], [])
    return message


class PoolStep:
    """The engine's side of the step path, with idle workers in the actors."""

    def __init__(self, actors: list[Any], rows: int, width: int, transport: Transport) -> None:
        self._dispatcher = Dispatcher(mask_limit=WAIT, pool_wait=WAIT, max_replays=0)
        for index, actor in enumerate(actors):
            segment, channel = Segment(SLOTS, width), transport.ipc()
            pid = ray.get(actor.attach.remote(channel.address, segment.name))
            assert channel.wait_connected(WAIT)
            location = ProcessLocation(pid, "", "")
            self._dispatcher.announce(
                WorkerUp(WorkerConnection(index, 1, location, channel, segment, shared=True, installed={"g"}))
            )
        self._output = [TOKEN] * TOKENS_BEFORE
        """Of every sequence: one append per step, whatever the number of rows."""
        self._batch = tuple(GuidedSequence("request", row, self._output) for row in range(rows))
        self._new_tokens = np.full(rows, TOKEN, np.int32)
        grammar = Grammar("g", "none", Constraint.json_object(), ("g",))
        for sequence in self._batch:
            self._dispatcher.open(sequence, grammar)
        self.submit_ms = 0.0

    def step(self) -> StepMasks:
        self._output.append(TOKEN)
        started = time.perf_counter()
        self._dispatcher.submit(self._batch, self._new_tokens)
        self.submit_ms = 1e3 * (time.perf_counter() - started)
        return self._dispatcher.collect(WAIT)

    def close(self) -> None:
        self._dispatcher.close()


def measure_channels(rows: int, actors: int, width: int, steps: int) -> Samples:
    """Measure milliseconds per step and way. The ways take turns."""
    os.environ.update({"RAY_worker_niceness": "5"})  # as in the pool
    ray.init(address="local", include_dashboard=False, num_cpus=0, log_to_driver=False)
    context = multiprocessing.get_context("spawn")
    handles = [ray.remote(num_cpus=0)(ChannelActor).remote() for _ in range(actors)]
    pairs = [context.Pipe() for _ in range(actors)]
    processes = [context.Process(target=pipe_process, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    message = encode([Fill(np.arange(rows // actors, dtype=np.int32).tobytes())])
    samples: Samples = {}
    zeromq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def by_ray() -> None:
        assert num_rows(ray.get([actor.message.remote(message) for actor in handles])) == rows

    def by_ray_with_masks() -> None:
        answers = ray.get([actor.masks.remote(message, width) for actor in handles])
        assert num_rows([message for message, _ in answers]) == sum(len(masks) for _, masks in answers) == rows

    def by_channel() -> None:
        for channel in channels:
            channel.send(message)
        assert num_rows([received(channel) for channel in channels]) == rows

    def by_zeromq() -> None:
        for socket in sockets:
            socket.send(message)
        assert num_rows([socket.recv() for socket in sockets]) == rows

    def by_pipe() -> None:
        for pipe, _ in pairs:
            pipe.send_bytes(message)
        assert num_rows([pipe.recv_bytes() for pipe, _ in pairs]) == rows

    def by_pool() -> None:
        found = pool.step()
        assert sum(len(part.rows) for part in found.ready) == rows

    with tempfile.TemporaryDirectory(prefix="guided-") as directory:
        transport = Transport(directory, "127.0.0.1")
        pool = PoolStep(handles, rows, width, transport)
        channels = [transport.ipc() for _ in handles]
        ray.get([actor.echo.remote(channel.address) for actor, channel in zip(handles, channels, strict=True)])
        sockets = [zeromq.socket(zmq.PAIR) for _ in handles]
        for index, (actor, socket) in enumerate(zip(handles, sockets, strict=True)):
            socket.bind(f"ipc://{directory}/z{index}")
            ray.get(actor.echo_by_zeromq.remote(f"ipc://{directory}/z{index}"))
        for channel in channels:
            assert channel.wait_connected(WAIT)
        ways: dict[str, Callable[[], None]] = {
            OURS: by_pool,
            OUR_MESSAGE: by_channel,
            ZEROMQ_MESSAGE: by_zeromq,
            PIPE_MESSAGE: by_pipe,
            RAY_MESSAGE: by_ray,
            RAY: by_ray_with_masks,
        }
        for index in range(steps + steps // 10):
            for name, step in ways.items():
                started = time.perf_counter()
                step()
                elapsed = 1e3 * (time.perf_counter() - started)
                if index >= steps // 10:
                    samples.setdefault(name, []).append(elapsed)
                    if name == OURS:
                        samples.setdefault(f"{OURS}: submit", []).append(pool.submit_ms)
        pool.close()
        transport.close()
        zeromq.destroy(linger=0)
    for pipe, _ in pairs:
        pipe.send_bytes(b"")
    for process in processes:
        process.join()
    ray.shutdown()
    return samples


def measure_pool(vocabulary: Vocabulary, rows: int, actors: int, steps: int) -> Samples:
    """Measure milliseconds per step with real masks. Every sequence writes the same text, token by token."""
    pool = RayPool(vocabulary, num_actors=actors)
    grammar = pool.compile(Constraint.json_schema(SCHEMA), ("llguidance",)).result(120)
    tokens = vocabulary.encode(TEXT)
    samples: Samples = {"pool: submit": [], "pool: submit + collect": [], "pool: one mask (in the worker)": []}
    done, opened = 0, 0
    while done < steps:
        output: list[int] = []
        batch = tuple(GuidedSequence("request", opened + row, output) for row in range(rows))
        opened += rows
        for sequence in batch:
            pool.open(sequence, grammar)
        for token in tokens:
            new_tokens = np.full(rows, output[-1], np.int32) if output else None
            started = time.perf_counter()
            pool.submit(batch, new_tokens)
            submitted = time.perf_counter()
            found = pool.collect(WAIT)
            ended = time.perf_counter()
            assert sum(len(part.rows) for part in found.ready) == rows
            if opened > rows:
                samples["pool: submit"].append(1e3 * (submitted - started))
                samples["pool: submit + collect"].append(1e3 * (ended - started))
                samples["pool: one mask (in the worker)"].append(1e3 * found.seconds / rows)
                done += 1
            output.append(token)
        pool.free([sequence.sequence_id for sequence in batch])
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
        if name in (OURS, RAY, OUR_MESSAGE, PIPE_MESSAGE, RAY_MESSAGE):
            ordered = np.sort(values)
            axes.plot(
                ordered,
                np.arange(1, len(ordered) + 1) / len(ordered) * 100,
                label=name,
                linestyle=":" if name.startswith("message") else "-",
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
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per way")
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
        for ours, theirs in ((OURS, RAY), (OUR_MESSAGE, RAY_MESSAGE))
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
