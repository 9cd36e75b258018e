"""Compare the engine's tokens per second with transformers' batched `generate()`, and with vLLM's engine on a CPU:
`python -m benchmarks.engine_throughput --vllm-python PATH`.

All get the same prompts (mixed lengths, all at once; left-padded for `generate()`) and write the same number of new
tokens, greedily. Ours and transformers run in one process; vLLM in two, as it does by default. Each figure is the best
of `--repeat` runs, in which the ways take turns. Guided requests have a regex without an early end, and llguidance
computes the masks inline, so all mask work is in this process too, as it is in vLLM's (its guidance backend). `--clock
cpu`, without vLLM, counts CPU seconds of the process instead of wall time, which is a fairer comparison on a busy
machine with one thread. Writes `benchmarks/out/engine_throughput.{json,png}`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, JsonProcess
from benchmarks.comparison import vllm_candidate
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import canvas, fail, machine, write_json
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.model_loader import LoadedModel, prepare_model
from engine.sampling_params import SamplingParams

GUIDE = r"[A-Za-z0-9 ,.:{}\"]{4000}"
VLLM_WAYS = {"vLLM": "unguided", "vLLM, guided": "own:guidance"}


def load(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.eval(), AutoTokenizer.from_pretrained(path)


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of 16 to 96 random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 97, (count,), generator=generator).tolist()
    return [torch.randint(300, min(vocab_size, 2000), (n,), generator=generator).tolist() for n in lengths]


def by_transformers(model: Any, pad: int, many: list[list[int]], new_tokens: int) -> int:
    longest = max(map(len, many))
    ids = torch.tensor([[pad] * (longest - len(one)) + one for one in many])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in many])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            pad_token_id=pad,
        )  # fmt: skip
    return len(many) * int(out.shape[1] - longest)


def by_engine(llm: LLM, many: list[list[int]], params: SamplingParams) -> int:
    outputs = llm.generate(many, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def ways(model: Any, loaded: LoadedModel, batch: int, new_tokens: int) -> dict[str, Callable[[list[list[int]]], int]]:
    """Return the measured ways: name -> function from prompts to the number of tokens."""
    pad = loaded.vocabulary.stop_token_ids[0]

    def llm() -> LLM:
        config = EngineConfig(max_num_seqs=batch, max_model_len=512, cpu_threads=torch.get_num_threads())
        return LLM(loaded, "inline", config=config)

    free, guided = llm(), llm()
    plain = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    random = SamplingParams(temperature=1.0, seed=1, max_tokens=new_tokens, ignore_eos=True)
    constrained = SamplingParams(temperature=0.0, max_tokens=new_tokens, regex=GUIDE)
    return {
        "transformers generate()": lambda many: by_transformers(model, pad, many, new_tokens),
        "engine": lambda many: by_engine(free, many, plain),
        "engine, sampled": lambda many: by_engine(free, many, random),
        "engine, guided": lambda many: by_engine(guided, many, constrained),
    }


@contextlib.contextmanager
def vllm_engines(python: str | None, args: argparse.Namespace) -> Iterator[dict[str, JsonProcess]]:
    """Start vLLM's engines, one per way. Without an interpreter that has vLLM there are none."""
    candidate = vllm_candidate(python)
    environment = {**SINGLE_THREADED, **VLLM_ON_CPU, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)}
    environment["OMP_NUM_THREADS"] = str(args.threads)
    with contextlib.ExitStack() as stack:
        found = {}
        for label, way in VLLM_WAYS.items() if candidate is not None else ():
            assert candidate is not None
            arguments = (way, str(args.model), "real", str(max(args.batch)), args.dtype)
            process = JsonProcess(
                "benchmarks.peers.vllm_engine",
                *arguments,
                label=label,
                environment=environment,
                python=candidate.python,
            )
            found[label] = stack.enter_context(process)
            process.answer()
        yield found


def by_vllm(process: JsonProcess, guided: bool, many: list[list[int]], new_tokens: int) -> int:
    request = {"max_tokens": new_tokens, "temperature": 0.0, "seed": 1, **({"regex": GUIDE} if guided else {})}
    answer = process.ask([request | {"prompt": {"prompt_token_ids": one}} for one in many])
    return sum(one["tokens"] for one in answer["answers"])


def measure(
    many: list[list[int]], runs: dict[str, Callable[[list[list[int]]], int]], repeat: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return tokens/s, the best of `repeat` runs. The ways take turns, so that a busy minute affects all of them."""
    best = dict.fromkeys(runs, 0.0)
    for round_ in range(repeat + 1):
        for name, run in runs.items():
            started = clock()
            tokens = run(many)
            rate = tokens / (clock() - started)
            if round_:  # the first round warms up
                best[name] = max(best[name], rate)
    return best


def plot(rows: list[dict[str, Any]], names: list[str], title: str, path: Path) -> None:
    figure, (axis,) = canvas(width=8.0)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        at = [position + (index - (len(names) - 1) / 2) * width for position in range(len(rows))]
        bars = axis.bar(at, [row[name] for row in rows], width * 0.92, label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axis.set_ylabel("tokens/s")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="checkpoint directory")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.vllm_python and args.clock == "cpu":
        fail("--clock cpu does not count vLLM's processes: leave out --vllm-python")
    torch.set_num_threads(args.threads)
    started_on = machine()
    model, tokenizer = load(args.model, args.dtype)
    name = args.model.parent.name if args.model == checkpoint_path() else args.model.name
    loaded = prepare_model(copy.deepcopy(model), tokenizer, name=name)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    rows: list[dict[str, Any]] = []
    with vllm_engines(args.vllm_python, args) as peers:
        for batch in args.batch:
            many = prompts(batch, loaded.vocabulary.vocab_size)
            runs = ways(model, loaded, batch, args.new_tokens)
            for label, process in peers.items():
                runs[label] = partial(by_vllm, process, "guided" in label, new_tokens=args.new_tokens)
            rates = measure(many, runs, args.repeat, clock)
            rows.append({"batch": batch, **rates})
            base = rates["transformers generate()"]
            print(
                f"batch {batch}",
                *(f"  {way:26} {rate:9.0f} tokens/s  {rate / base:5.2f} x" for way, rate in rates.items()),
                sep="\n",
            )
    names = [key for key in rows[0] if key != "batch"]
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    setting = vars(args) | {"model": name, "parameters_m": round(millions, 2)}
    title = (
        f"{name}, {millions:.1f} M parameters, {args.dtype}, {args.new_tokens} new tokens per prompt, "
        f"CPU, {args.threads} thread(s), {args.clock} clock"
    )
    write_json(args.out / "engine_throughput.json", setting, rows, started_on)
    plot(rows, names, title, args.out / "engine_throughput.png")
    print(f"wrote {args.out / 'engine_throughput.json'} and .png")


if __name__ == "__main__":
    main()
