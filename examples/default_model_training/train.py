"""Train a model like the embedded one from nothing: `python -m examples.default_model_training.train --help`.

Text comes from `corpus`, so nothing is downloaded. The stream of batches is a pure function of the seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.default_model_training.corpus import Example, example
from examples.default_model_training.tokenizer import build, load

MAX_LENGTH = 1024
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """`input_ids` and `labels`, int64 `[rows, length]`; labels are shifted, and IGNORED outside the answers."""

    input_ids: Tensor
    labels: Tensor


def encode(tokenizer: PreTrainedTokenizerFast, one: Example) -> tuple[list[int], int]:
    """The token ids of prompt and answer with the end token, and how many of them are the prompt's."""
    if one.chat:
        text = tokenizer.apply_chat_template(
            one.messages(), tools=one.tools, tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
    else:
        prompt = tokenizer.encode(one.turns[0])
    answer = tokenizer.encode(one.answer, add_special_tokens=False)
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def collate(rows: list[tuple[list[int], int]]) -> Batch:
    """Pad on the right (attention is causal, so padding needs no mask) and shift."""
    width = max(len(ids) for ids, _ in rows) - 1
    input_ids = torch.zeros((len(rows), width), dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (ids, prompt) in enumerate(rows):
        input_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
    return Batch(input_ids, labels)


def pool(
    tokenizer: PreTrainedTokenizerFast, number: int, seed: int, size: int, tokens: int, tool_share: float
) -> list[Batch]:
    """The `number`-th pool of `size` examples, cut into batches of like lengths of at most `tokens` tokens each."""
    rows = [encode(tokenizer, example(number * size + i, seed, tool_share=tool_share)) for i in range(size)]
    rows = sorted((r for r in rows if len(r[0]) <= MAX_LENGTH), key=lambda r: len(r[0]))
    batches: list[Batch] = []
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * len(rows[end][0]) > tokens:
            batches.append(collate(rows[start:end]))
            start = end
    random.Random(f"{seed}:{number}").shuffle(batches)
    return batches


def loss_of(model: LlamaForCausalLM, batch: Batch, bfloat16: bool) -> Tensor:
    """Mean cross entropy of the answers' tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        answers = batch.labels != IGNORED
        logits = model.lm_head(hidden[answers]).float()
    return cross_entropy(logits, batch.labels[answers])


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def optimizers_of(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    adamw = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm up, stay, and fall to nothing over the last `--decay` steps."""
    share: float = min(1.0, (step + 1) / args.warmup, max(0.0, (args.steps - step) / args.decay))
    return share * float(args.lr)


def export(model: LlamaForCausalLM, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast, to: Path) -> None:
    """Write the averaged weights in bfloat16 with config and tokenizer."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(weights, strict=False)
    copy.tie_weights()
    copy = copy.to(torch.bfloat16)
    copy.generation_config.do_sample = False
    copy.save_pretrained(to)
    tokenizer.save_pretrained(to)


@dataclass
class Run:
    """What a training run carries from step to step."""

    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, Tensor]
    step: int = 0
    tokens: int = 0

    def advance(self, batch: Batch, args: argparse.Namespace) -> float:
        """One optimizer step; the weights' running average follows."""
        rate = learning_rate(self.step, args)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = loss_of(self.model, batch, args.bfloat16)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        keep = min(0.99, self.step / (self.step + 10))
        for name, weight in self.model.named_parameters():
            self.average[name].lerp_(weight.detach(), 1 - keep)
        self.step += 1
        self.tokens += int((batch.input_ids != 0).sum())
        return float(loss.detach())


def train(args: argparse.Namespace) -> None:
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer").exists():
        build(seed=args.seed).save_pretrained(work / "tokenizer")
    tokenizer = load(work / "tokenizer")
    model = new_model(tokenizer, args.seed)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = Run(model, optimizers_of(model, args), average)
    rows = sorted((encode(tokenizer, example(i, seed=2, held_out=True)) for i in range(32)), key=lambda r: len(r[0]))
    held_out = [collate(rows[i : i + 16]) for i in range(0, 32, 16)]
    with tqdm(total=args.steps, unit="step", mininterval=5) as progress:
        for number in itertools.count(1):
            batches = pool(tokenizer, number - 1, args.seed, args.pool_size, args.batch_tokens, args.tool_share)
            for batch in batches[: args.steps - run.step]:
                loss = run.advance(batch, args)
                progress.update()
                progress.set_postfix(loss=f"{loss:.3f}", tokens=f"{run.tokens / 1e6:.1f}M", refresh=False)
            if run.step < args.steps and number % 4:
                continue
            with torch.no_grad():
                losses = [float(loss_of(model, batch, args.bfloat16)) for batch in held_out]
            row = {"step": run.step, "tokens": run.tokens, "loss": loss, "held_out_loss": sum(losses) / len(losses)}
            with (work / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            export(model, run.average, tokenizer, args.out)
            if run.step >= args.steps:
                return


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("default-model-training"), help="log and tokenizer")
    parser.add_argument("--out", type=Path, default=Path("default-model-training/out"), help="the checkpoint")
    parser.add_argument("--tool-share", type=float, default=0.3, help="part of the exchanges that offers functions")
    parser.add_argument("--steps", type=int, default=3150, help="optimizer steps in all")
    parser.add_argument("--decay", type=int, default=650, help="last steps, over which the learning rate falls to 0")
    parser.add_argument("--warmup", type=int, default=60, help="steps over which the learning rate rises")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens in a batch, padding included")
    parser.add_argument("--pool-size", type=int, default=512, help="examples that are sorted by length together")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the tokenizer and the first weights")
    parser.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=True, help="autocast matrices")
    train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
