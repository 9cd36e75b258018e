"""Train a model like the embedded one: `python -m examples.default_model_training.train
--help`.

Text comes from `corpus`, so nothing is downloaded. The stream of batches is a pure
function of the seed.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.default_model_training.conversations import training_example
from examples.default_model_training.corpus import Example
from examples.default_model_training.tokenizer import ASSISTANT, build, load

MAX_LENGTH = 8192
IGNORED = -100


class Batch(NamedTuple):
    """`input_ids` and `labels`, int64 `[rows, length]`. Labels are shifted, and IGNORED
    outside the answers."""

    input_ids: Tensor
    labels: Tensor


def encode(
    tokenizer: PreTrainedTokenizerFast, one: Example
) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt, answer and end token, and the labels: IGNORED
    outside the model's turns."""
    answer = [
        *tokenizer.encode(one.answer, add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    if not one.chat:
        prompt = tokenizer.encode(one.turns[0])
        return [*prompt, *answer], [IGNORED] * len(prompt) + answer
    messages = one.messages()
    text = tokenizer.apply_chat_template(
        messages, tools=one.tools, tokenize=False, add_generation_prompt=True
    )
    ids = [*tokenizer.encode(text, add_special_tokens=False), *answer]
    trained = [
        message.get("trained", True)
        for message in messages
        if message["role"] == "assistant"
    ] + [True]
    labels = [IGNORED] * len(ids)
    begins = [
        i + 1
        for i, token in enumerate(ids)
        if token == tokenizer.convert_tokens_to_ids(ASSISTANT)
    ]
    for begin, is_trained in zip(begins, trained, strict=True):
        if is_trained:
            end = ids.index(tokenizer.eos_token_id, begin) + 1
            labels[begin:end] = ids[begin:end]
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Pad on the right (attention is causal, so padding needs no mask) and shift."""
    width = max(len(ids) for ids, _ in rows) - 1
    input_ids = torch.zeros((len(rows), width), dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (ids, expected) in enumerate(rows):
        input_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, : len(ids) - 1] = torch.tensor(expected[1:])
    return Batch(input_ids, labels)


def pool(
    tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, number: int
) -> list[Batch]:
    """Return a pool of examples by its number, in batches of similar lengths of at most
    `--batch-tokens` tokens."""
    size, kinds = args.pool_size, (args.chats, args.long, args.tool_share)
    rows = [
        encode(tokenizer, training_example(number * size + i, args.seed, *kinds))
        for i in range(size)
    ]
    rows = sorted((r for r in rows if len(r[0]) <= MAX_LENGTH), key=lambda r: len(r[0]))
    batches: list[Batch] = []
    start = 0
    for end in range(1, len(rows) + 1):
        if (
            end == len(rows)
            or (end + 1 - start) * len(rows[end][0]) > args.batch_tokens
        ):
            batches.append(collate(rows[start:end]))
            start = end
    random.Random(f"{args.seed}:{number}").shuffle(batches)
    return batches


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the answers' tokens."""
    device = model.device
    input_ids, labels = batch.input_ids.to(device), batch.labels.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        answers = labels != IGNORED
        logits = model.lm_head(hidden[answers])
    return cross_entropy(logits.float(), labels[answers])


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) in float32.

    `torch.optim.Muon` computes in bfloat16, which takes minutes a step on a CPU without
    instructions for it.
    """

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each matrix along its orthogonalized momentum, scaled to the size of an
        Adam step."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault(
                    "momentum", torch.zeros_like(matrix)
                )
                momentum.lerp_(matrix.grad, 0.05)
                update = orthogonalized(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - 0.05 * group["lr"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns, by five Newton-Schulz
    iterations."""
    if matrix.size(0) > matrix.size(1):
        return orthogonalized(matrix.T).T
    found: Tensor = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (2.0315 * square @ square - 4.775 * square) @ found
    return found


def optimizers_of(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings and
    norms."""
    matrices = [
        p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n
    ]
    others = [
        p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)
    ]
    adamw = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, args.lr), adamw]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return a rate that rises, stays, and falls to 0 over the last `--decay` steps."""
    share: float = min(
        1.0, (step + 1) / args.warmup, max(0.0, (args.steps - step) / args.decay)
    )
    return share * float(args.lr)


def export(
    model: LlamaForCausalLM,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    to: Path,
) -> None:
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
    """The state of a training run."""

    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, Tensor]
    step: int = 0

    def advance(self, batch: Batch, args: argparse.Namespace) -> Tensor:
        """Make one optimizer step, and update the running average of the weights."""
        rate = learning_rate(self.step, args)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        keep = min(0.99, self.step / (self.step + 10))
        for name, weight in self.model.named_parameters():
            self.average[name].lerp_(weight.detach(), 1 - keep)
        self.step += 1
        return loss.detach()


def train(args: argparse.Namespace) -> None:
    if args.start:
        tokenizer, model = (
            load(args.start),
            LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32),
        )
    else:
        tokenizer = build(seed=args.seed)
        model = new_model(tokenizer, args.seed)
    model.config.max_position_embeddings = MAX_LENGTH
    model.to(args.device)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    pools: Any = DataLoader(
        range(args.steps),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(pool, tokenizer, args),
        num_workers=args.workers,
    )
    run = Run(model, optimizers_of(model, args), average)
    with tqdm(total=args.steps, unit="step", mininterval=5) as progress:
        for number, batches in enumerate(pools, 1):
            for batch in batches[: args.steps - run.step]:
                loss = run.advance(batch, args)
                progress.update()
            if run.step < args.steps and number % args.every:
                continue
            tqdm.write(json.dumps({"step": run.step, "loss": float(loss)}))
            export(model, run.average, tokenizer, args.out)
            if run.step >= args.steps:
                return


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("default-model-training"),
        help="folder for the checkpoint",
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="a checkpoint to train further, instead of new weights",
    )
    parser.add_argument(
        "--tool-share", type=float, default=0.3, help="share of examples with functions"
    )
    parser.add_argument(
        "--chats", type=float, default=0.4, help="share of conversations"
    )
    parser.add_argument(
        "--long", type=float, default=0.08, help="share of long examples"
    )
    parser.add_argument("--device", default="cpu", help="device: cpu or cuda")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that generate text (0: this process)",
    )
    parser.add_argument(
        "--every", type=int, default=4, help="pools between two checkpoints"
    )
    parser.add_argument(
        "--steps", type=int, default=3150, help="number of optimizer steps"
    )
    parser.add_argument(
        "--decay",
        type=int,
        default=650,
        help="last steps, over which the learning rate falls to 0",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=60,
        help="steps over which the learning rate rises",
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="maximum tokens of a batch, with padding",
    )
    parser.add_argument(
        "--pool-size",
        type=int,
        default=512,
        help="examples that are sorted by length together",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the corpus, the tokenizer and the first weights",
    )
    train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
