"""Tokens per second of the engine beside transformers' own batched `generate()`, on the same model.

    python benchmarks/engine_throughput.py                   # the embedded model, else a random Llama of 5 M parameters
    python benchmarks/engine_throughput.py --model DIR --batch 1 8 32 --new-tokens 128

Same prompts (mixed lengths), same number of new tokens, greedy, one process; the engine takes all prompts at once, and
so does `generate()` (left-padded). Each figure is the best of `--repeat` runs, the ways taking turns. Guided: a regex
that goes on for as long as there are tokens, masks by llguidance, inline, so that all mask work is in this process too.
`--clock cpu` counts the process's CPU seconds instead of the wall's: on a busy machine, and with one thread, the fairer
comparison. Writes `benchmarks/results/engine_throughput.{json,png}`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model_loader import LoadedModel, prepare_model
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent
EMBEDDED = ROOT.parent / "engine" / "default_model" / "checkpoint"
RESULTS = ROOT / "results"
GUIDE = r"[A-Za-z0-9 ,.:{}\"]{4000}"


def load(name: str | None, dtype: str) -> tuple[Any, Any, str]:
    """(model, tokenizer, name)."""
    if name is None and (EMBEDDED / "model.safetensors").exists():
        name = str(EMBEDDED)
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
        return model.eval(), AutoTokenizer.from_pretrained(name), Path(name).parent.name
    return *random_llama(getattr(torch, dtype)), "random Llama"


def random_llama(dtype: torch.dtype) -> tuple[Any, Any]:
    """5.2 M parameters over a byte-level BPE trained on this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")
    return LlamaForCausalLM(config).to(dtype).eval(), tokenizer


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Random tokens, 16 to 96 a prompt."""
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
    """What is measured: name -> prompts in, tokens out."""
    pad = loaded.vocabulary.stop_token_ids[0]

    def llm() -> LLM:
        config = EngineConfig(max_num_seqs=batch, max_model_len=512, cpu_threads=torch.get_num_threads())
        return LLM(loaded, config=config)

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


def measure(
    many: list[list[int]],
    runs: dict[str, Callable[[list[list[int]]], int]],
    repeat: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Tokens/s, the best of `repeat`; the ways take turns, so that a busy minute hits all of them."""
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        at = [position + (index - (len(names) - 1) / 2) * width for position in range(len(rows))]
        bars = axes.bar(at, [row[name] for row in rows], width * 0.92, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axes.set_ylabel("tokens/s")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local directory or hub name")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer, name = load(args.model, args.dtype)
    loaded = prepare_model(copy.deepcopy(model), tokenizer, name=name)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        many = prompts(batch, loaded.vocabulary.vocab_size)
        rates = measure(many, ways(model, loaded, batch, args.new_tokens), args.repeat, clock)
        rows.append({"batch": batch, **rates})
        base = rates["transformers generate()"]
        print(
            f"batch {batch}",
            *(f"  {way:26} {rate:9.0f} tokens/s  {rate / base:5.2f} x" for way, rate in rates.items()),
            sep="\n",
        )
    names = [key for key in rows[0] if key != "batch"]
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    setting = {
        "model": name,
        "parameters_m": round(millions, 2),
        "dtype": args.dtype,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "clock": args.clock,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    title = (
        f"{name}, {millions:.1f} M parameters, {args.dtype}, {args.new_tokens} new tokens a prompt, "
        f"CPU, {args.threads} thread(s), {args.clock} clock"
    )
    args.out.mkdir(exist_ok=True)
    (args.out / "engine_throughput.json").write_text(
        json.dumps({"setting": setting, "tokens_per_second": rows}, indent=1) + "\n"
    )
    plot(rows, names, title, args.out / "engine_throughput.png")
    print(f"wrote {args.out / 'engine_throughput.json'} and .png")


if __name__ == "__main__":
    main()
