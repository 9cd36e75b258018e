"""The byte-level BPE of the default model: 2,048 tokens, every word spelt the same wherever it stands.

Words, single digits, single spaces and single signs are tokenized apart, so that a name has the same tokens after a
space in the prompt and after a quote in the JSON: what the model has to learn is then plain copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.default_model_training.corpus import example

VOCAB_SIZE = 2048
PAD, BOS, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- if tools -%}"
    "{{- '<|system|>Functions:' -}}"
    "{%- for tool in tools -%}"
    "{%- set function = tool['function'] -%}{%- set schema = function['parameters'] or {} -%}"
    "{{- '\\n' ~ function['name'] ~ '(' -}}"
    "{%- for name, value in (schema['properties'] or {}).items() -%}"
    "{{- (', ' if not loop.first else '') ~ name ~ ('' if name in (schema['required'] or []) else '?') ~ ': ' -}}"
    "{{- value['enum'] | join('|') if value['enum'] else value['type'] or 'any' -}}"
    "{%- endfor -%}"
    "{{- ')' ~ (': ' ~ function['description'] if function['description'] else '') -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set role = {'developer': 'system', 'tool': 'user'}.get(message['role'], message['role']) -%}"
    "{%- if role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ role ~ '|>' -}}"
    "{%- if message['role'] == 'tool' -%}{{- '<tool_response>' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set arguments = call['function']['arguments'] -%}"
    "{{- '<tool_call>\\n{\"name\": \"' ~ call['function']['name'] ~ '\", \"arguments\": ' -}}"
    "{{- arguments if arguments is string else (arguments | tojson) -}}{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def texts(count: int, seed: int) -> Iterator[str]:
    """The prompts and answers of `count` examples, without any special token."""
    for index in range(count):
        one = example(index, seed, tool_share=0)
        yield from (*one.turns, one.answer)


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
    tokenizer.train_from_iterator(texts(count, seed), trainer)
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
    """The tokenizer saved in `path`; nothing is downloaded."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
