"""The byte-level BPE of the default model: 2,048 tokens, with the same tokens for a
word at every place.

Words, single digits, single spaces and single signs are separate tokens, so that a name
has the same tokens after a space in the prompt and after a quote in the JSON: the model
then only has to copy tokens.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.default_model import checkpoint_path
from examples.default_model_training.corpus import example

VOCAB_SIZE = 2048
PAD, BOS, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (checkpoint_path() / "chat_template.jinja").read_text()


def build(count: int = 20_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `count` examples of the corpus (some seconds)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+|[\s\S]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    examples = (example(index, seed, tool_share=0) for index in range(count))
    tokenizer.train_from_iterator(
        (text for one in examples for text in (*one.turns, one.answer)), trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer saved in `path`, without a download."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
