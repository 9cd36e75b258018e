"""Load a causal language model and its tokenizer through transformers. Models that
cannot be served are rejected."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoTokenizer, GgufConfig

from engine.config import LoadOptions
from engine.memory.kv_cache import KVCache, LayerShapes
from engine.memory.recurrent import RecurrentStates, StateLayout
from engine.model.attention import ATTENTION, UnsupportedModelError
from engine.model.config import architecture, model_factory, read_config, refusal
from engine.model.files import complete, gguf_file, pretrained, processor_template
from engine.model.fusion import attributes_of, fuse, restore
from engine.model.head import Head, body_name
from engine.model.packing import pack, unpack
from engine.model.probe import Probe
from engine.model.ranks import Ranks
from guided.errors import bounded
from guided.vocabulary import Vocabulary

_PLANS: dict[str, dict[str, str]] = {
    "opt": {
        "model.decoder.embed_tokens": "embedding_rowwise",
        **{
            f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"
        },
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}
"""Plans for tensor parallelism by `model_type`, in transformers' terms, where
transformers has none."""


@dataclass
class LoadedModel:
    """A model that has passed the probe. `body` makes hidden states `[1, tokens,
    hidden]`, and `head` logits `[rows, padded_vocab_size]`. `layers` are by index; with
    tensor parallelism those of this process's heads."""

    name: str
    config: Any
    """transformers' config of the language model."""
    body: torch.nn.Module
    """The language model without its head."""
    head: Head
    layers: dict[int, LayerShapes]
    tokenizer: Any
    vocabulary: Vocabulary
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None = None
    """The other processes of tensor parallelism."""
    layout: StateLayout | None = None
    """The states of its recurrent layers, if it has some."""

    def context_length(self, wanted: int | None) -> int:
        """Return `wanted`, in tokens, or the model's own context length if it is None.
        More than that is refused."""
        if wanted is not None and wanted > self.max_model_len:
            raise ValueError(
                f"max_model_len is {wanted}; the context of this model is {self.max_model_len} tokens"
            )
        return wanted or self.max_model_len

    def new_cache(self, num_blocks: int, block_size: int, max_seqs: int) -> KVCache:
        """Allocate a KV cache, and the states of recurrent layers, with one more for
        rows that pad a decode step."""
        if self.layout is None:
            states = None
        else:
            states = RecurrentStates(self.layout, max_seqs + 1, self.device)
        return KVCache(
            self.layers, num_blocks, block_size, self.dtype, self.device, states
        )


def load_model(
    model: str, *, max_model_len: int | None = None, **options: Any
) -> LoadedModel:
    """Load a model from a directory, a GGUF file, an installed wheel (`WHEELS`) or the
    hub.

    `max_model_len` is the maximum length of prompt and output together. None: the
    model's own limit. `options` are fields of `LoadOptions`.

    Raises:
        UnsupportedModelError: the engine cannot serve this architecture. The message
            says why.
        OSError, ValueError: the model is not found, the dtype is unknown, or the
            machine has no such device.
    """
    how = LoadOptions(**options)
    device = _find_device(how.device)
    config = check_model(model, how.revision, max_model_len)
    if how.tensor_parallel_size == 1:
        return _limited(_load(model, config, how, device), max_model_len)
    if gguf_file(model) is not None:
        raise ValueError("tensor_parallel_size must be 1 with a GGUF file")
    _check_plan(config, how.tensor_parallel_size, device)
    ranks = Ranks(model, how, max_model_len, device.type)
    try:
        return replace(_limited(_load(model, config, how), max_model_len), ranks=ranks)
    except RuntimeError as error:
        raise ranks.ended(error) from error
    except BaseException:
        ranks.close()
        raise


def check_model(
    model: str, revision: str | None = None, max_model_len: int | None = None
) -> Any:
    """Check that a model can be served, as far as that shows without its weights.
    Returns its configuration.

    Raises as `load_model`.
    """
    config = read_config(model, revision, max_model_len)
    with torch.device("meta"), torch.inference_mode():
        shell = model_factory(config).from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=ATTENTION
        )
        # some operations need numbers
        with contextlib.suppress(NotImplementedError, RuntimeError):
            Probe(shell, _body(shell)).record()
    return config


def load_part(model: str, how: LoadOptions, max_model_len: int | None) -> LoadedModel:
    """Load the part of a rank of tensor parallelism, while rank 0 calls
    `load_model`."""
    return _load(model, read_config(model, how.revision, max_model_len), how)


def _limited(loaded: LoadedModel, max_model_len: int | None) -> LoadedModel:
    """Limit the context to the length that a model was loaded for."""
    return replace(loaded, max_model_len=loaded.context_length(max_model_len))


def _load(
    model: str, config: Any, how: LoadOptions, device: torch.device | None = None
) -> LoadedModel:
    """Read the weights: all of them to `device`, or, if it is None, this process's part
    for tensor parallelism."""
    place, others = pretrained(model)
    path = gguf_file(model)
    plan = None
    if device is None:
        plan = _PLANS.get(config.model_type)
        from transformers.distributed import DistributedConfig

        # With a plan of None, transformers uses its own.
        others["distributed_config"] = DistributedConfig(
            tp_size=how.tensor_parallel_size, tp_plan=plan
        )
    else:
        others["device_map"] = {"": device}
    if path is not None:
        others["quantization_config"] = GgufConfig(dequantize=True)
    loaded, report = model_factory(config).from_pretrained(
        place,
        config=config,
        revision=how.revision,
        dtype=_dtype(how.dtype, config, device),
        attn_implementation=ATTENTION,
        trust_remote_code=False,
        output_loading_info=True,
        **others,
    )
    missing = sorted(report["missing_keys"])
    if missing and path is None:  # `complete` counts those of a GGUF file
        raise refusal(
            architecture(config),
            f"its files lack {len(missing)} weights, such as {missing[0]}",
        )
    if (
        plan is not None
        # with its own plans, transformers reads the heads from the size of the projections
    ):
        for module in loaded.modules():
            if hasattr(module, "num_heads"):
                module.num_heads //= how.tensor_parallel_size
    if path is not None:
        complete(loaded, path)
    place, options = pretrained(how.tokenizer or model)
    if how.tokenizer:
        revision = None
    else:
        revision = how.revision
    tokenizer = AutoTokenizer.from_pretrained(
        place, revision=revision, trust_remote_code=False, **options
    )
    if how.chat_template is not None:
        tokenizer.chat_template = Path(how.chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor_template(place, revision)
    return prepare_model(loaded, tokenizer, name=model)


def _dtype(name: str, config: Any, device: torch.device | None) -> Any:
    """Return the dtype to load: for "auto" the checkpoint's, but float32 on a CPU
    without instructions for it. torch multiplies such matrices element by element
    there."""
    if name != "auto":
        return getattr(torch, name)
    if device is not None:
        on_cpu = device.type == "cpu"
    else:
        on_cpu = not torch.cuda.is_available()
    stored: Any = getattr(config, "dtype", None) or getattr(
        config.get_text_config(decoder=True), "dtype", None
    )
    # Operators that tell whether this CPU multiplies a dtype quickly.
    fast = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if on_cpu:
        check = fast.get(stored)
    else:
        check = None
    if check is None or getattr(torch.ops.mkldnn, check)():
        return "auto"
    return torch.float32


def _check_plan(config: Any, size: int, device: torch.device) -> None:
    """Reject a model without a plan, or with heads that cannot be split, and another
    device than transformers uses."""
    text = config.get_text_config(decoder=True)
    name = architecture(config)
    if (
        not getattr(text, "base_model_tp_plan", None)
        and config.model_type not in _PLANS
    ):
        raise UnsupportedModelError(
            f"{name} has no plan for tensor parallelism in transformers"
        )
    heads = (
        text.num_attention_heads,
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
    )
    if any(count % size for count in heads):
        raise UnsupportedModelError(
            f"{name} can't be split over {size} processes: it has {heads[0]} heads and {heads[1]} key heads"
        )
    if torch.cuda.is_available():
        kind = "cuda"
    else:
        kind = "cpu"
    if device.type != kind or device.index is not None:
        raise ValueError(
            f"device is {str(device)!r}; with tensor_parallel_size it must be {kind}"
        )


def prepare_model(model: Any, tokenizer: Any, *, name: str = "model") -> LoadedModel:
    """Check a model of transformers that generates text, give it the paged attention
    and run a probe."""
    config = model.config.get_text_config(decoder=True)
    model = model.eval().requires_grad_(False)
    body = _body(model)
    probe = Probe(model, body)
    try:
        with torch.inference_mode():
            probe.record()
            head = probe.find_head()
            if not distributed.is_initialized():
                _optimise(model, body, probe, head)
    except (AttributeError, TypeError, RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = f"its code does not run with the engine's caches ({type(error).__name__}: {bounded(error)})"
        raise refusal(type(model).__name__, why) from error
    for module in getattr(model, body_name(model)).children():
        if module is not body and config is not model.config:
            module.to("meta")  # frees the weights of encoders of images and sounds
    weight = model.get_output_embeddings().weight
    return LoadedModel(
        name=name,
        config=config,
        body=body,
        head=head,
        layers=probe.layers,
        tokenizer=tokenizer,
        vocabulary=Vocabulary.from_tokenizer(
            tokenizer,
            padded_vocab_size=weight.shape[0],
            stop_token_ids=_stop_tokens(model, tokenizer),
        ),
        max_model_len=getattr(config, "max_position_embeddings", None)
        or min(tokenizer.model_max_length, 1 << 20),
        dtype=weight.dtype,
        device=weight.device,
        layout=probe.layout,
    )


def _optimise(model: Any, body: torch.nn.Module, probe: Probe, head: Head) -> None:
    """Give the model what its device computes faster."""
    if model.device.type == "cuda":
        undo = partial(restore, attributes_of(body))
        probe.optimise(head, partial(fuse, body), undo, "fused kernels")
    elif model.device.type == "cpu":
        change = partial(pack, model, partial(probe.run, head))
        probe.optimise(head, change, partial(unpack, model), "packed weights")


def _body(model: Any) -> torch.nn.Module:
    """Return the language model without its head, and without encoders."""
    is_text = model.config is model.config.get_text_config(decoder=True)
    body: torch.nn.Module = (
        getattr(model, body_name(model)) if is_text else model.get_decoder()
    )
    return body


def _find_device(name: str) -> torch.device:
    """Find and try the device before anything is loaded."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device is {name!r}: {bounded(why)}") from error
    return place


def _stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an output, from the generation config, the config and
    the tokenizer."""
    sources = (
        getattr(model, "generation_config", None),
        model.config.get_text_config(decoder=True),
        tokenizer,
    )
    tokens: list[int] = []
    for source in sources:
        given = getattr(source, "eos_token_id", None)
        if isinstance(given, list):
            tokens += [int(token) for token in given if token is not None]
        elif given is not None:
            tokens.append(int(given))
    return list(dict.fromkeys(tokens))
