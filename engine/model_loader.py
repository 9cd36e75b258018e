"""Load a causal language model and its tokenizer through transformers. Models that cannot be served are rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from engine.attention import ATTENTION, PagedContext, UnsupportedModelError
from engine.config import LoadOptions
from engine.kv_cache import KVCache, LayerShapes
from engine.model_files import complete, gguf_file, pretrained, read_gguf_config
from engine.model_head import heads_of
from engine.ranks import Ranks
from engine.recurrent import RECURRENT_TYPES, RecurrentStates, StateLayout, is_recurrent
from engine.recurrent_probe import probe_recurrent
from guided.errors import bounded
from guided.vocabulary import Vocabulary

_SAME = {torch.float32: 0.9999, torch.bfloat16: 0.99, torch.float16: 0.99}
"""Minimum correlation of the probe's logits with those of eager attention."""


_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "mlp", "moe", "mamba", *RECURRENT_TYPES}

_PLANS: dict[str, dict[str, str]] = {
    "opt": {
        "model.decoder.embed_tokens": "embedding_rowwise",
        **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}
"""Plans for tensor parallelism by `model_type`, in transformers' terms, where transformers has none."""


@dataclass
class LoadedModel:
    """A model that has passed the probe. `body` makes hidden states `[1, tokens, hidden]`, and `head` logits `[rows,
    padded_vocab_size]`. `layers` are by index; with tensor parallelism those of this process's heads."""

    name: str
    config: Any
    """transformers' config of the language model."""
    body: torch.nn.Module
    head: torch.nn.Module
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
        """Return `wanted`, in tokens, or the model's own context length if it is None. More than that is refused."""
        if wanted is not None and wanted > self.max_model_len:
            raise ValueError(f"max_model_len is {wanted}; the context of this model is {self.max_model_len} tokens")
        return wanted or self.max_model_len

    def new_cache(self, num_blocks: int, block_size: int, max_seqs: int) -> KVCache:
        """Allocate a KV cache, and the states of recurrent layers."""
        states = None if self.layout is None else RecurrentStates(self.layout, max_seqs, self.device)
        return KVCache(self.layers, num_blocks, block_size, self.dtype, self.device, states)


def load_model(model: str, **options: Any) -> LoadedModel:
    """Load a model from a directory, a GGUF file, an installed wheel (`WHEELS`) or the hub.

    `options` are fields of `LoadOptions`.

    Raises:
        UnsupportedModelError: the engine cannot serve this architecture. The message says why.
        OSError, ValueError: the model is not found, the dtype is unknown, or the machine has no such device.
    """
    how = LoadOptions(**options)
    device = _find_device(how.device)
    config = read_config(model, how.revision)
    if how.tensor_parallel_size == 1:
        return _load(model, config, how, device)
    if gguf_file(model) is not None:
        raise ValueError("tensor_parallel_size must be 1 with a GGUF file")
    _check_plan(config, how.tensor_parallel_size, device)
    ranks = Ranks(model, how, device.type)
    try:
        return replace(_load(model, config, how), ranks=ranks)
    except RuntimeError as error:
        raise ranks.ended(error) from error
    except BaseException:
        ranks.close()
        raise


def load_part(model: str, how: LoadOptions) -> LoadedModel:
    """Load the part of a rank of tensor parallelism, while rank 0 calls `load_model`."""
    return _load(model, read_config(model, how.revision), how)


def _load(model: str, config: Any, how: LoadOptions, device: torch.device | None = None) -> LoadedModel:
    """Read the weights: all of them to `device`, or, if it is None, this process's part for tensor parallelism."""
    place, others = pretrained(model)
    path = gguf_file(model)
    plan = _PLANS.get(config.model_type) if device is None else None
    if device is None:
        from transformers.distributed import DistributedConfig

        # With a plan of None, transformers uses its own.
        others["distributed_config"] = DistributedConfig(tp_size=how.tensor_parallel_size, tp_plan=plan)
    if path is not None:
        others["quantization_config"] = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        place,
        config=config,
        revision=how.revision,
        dtype=_dtype(how.dtype, config, device),
        attn_implementation=ATTENTION,
        **others,
    )
    if plan is not None:  # with its own plans, transformers reads the heads from the size of the projections
        for module in loaded.modules():
            if hasattr(module, "num_heads"):
                module.num_heads //= how.tensor_parallel_size
    if path is not None:
        complete(loaded, path)
    place, options = pretrained(how.tokenizer or model)
    tokenizer = AutoTokenizer.from_pretrained(place, revision=None if how.tokenizer else how.revision, **options)
    if how.chat_template is not None:
        tokenizer.chat_template = Path(how.chat_template).read_text(encoding="utf-8")
    return prepare_model(loaded if device is None else loaded.to(device), tokenizer, name=model)


def _dtype(name: str, config: Any, device: torch.device | None) -> Any:
    """Return the dtype to load: for "auto" the checkpoint's, but float32 on a CPU without instructions for it. torch
    multiplies such matrices element by element there."""
    if name != "auto":
        return getattr(torch, name)
    on_cpu = device.type == "cpu" if device is not None else not torch.cuda.is_available()
    stored: Any = getattr(config, "dtype", None)
    # Operators that tell whether this CPU multiplies a dtype quickly.
    fast = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    check = fast.get(stored) if on_cpu else None
    return "auto" if check is None or getattr(torch.ops.mkldnn, check)() else torch.float32


def _check_plan(config: Any, size: int, device: torch.device) -> None:
    """Reject a model without a plan, or with heads that cannot be split, and another device than transformers uses."""
    text = config.get_text_config(decoder=True)
    name = _architecture(config)
    if not getattr(text, "base_model_tp_plan", None) and config.model_type not in _PLANS:
        raise UnsupportedModelError(f"{name} has no plan for tensor parallelism in transformers")
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(count % size for count in heads):
        raise UnsupportedModelError(
            f"{name} can't be split over {size} processes: it has {heads[0]} heads and {heads[1]} key heads"
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device.type != kind or device.index is not None:
        raise ValueError(f"device is {str(device)!r}; with tensor_parallel_size it must be {kind}")


def prepare_model(model: Any, tokenizer: Any, *, name: str = "model") -> LoadedModel:
    """Check a transformers `...ForCausalLM`, give it the paged attention and run a probe."""
    config = model.config.get_text_config(decoder=True)
    model = model.eval().requires_grad_(False)
    weight = model.get_output_embeddings().weight
    layout = None
    if is_recurrent(config):
        layers, layout, head = probe_recurrent(model, _Recorder(), partial(_alike, least=_SAME[weight.dtype]))
    else:
        layers, head = _probe(model)
    return LoadedModel(
        name=name,
        config=config,
        body=getattr(model, model.base_model_prefix),
        head=head,
        layers=layers,
        tokenizer=tokenizer,
        vocabulary=Vocabulary.from_tokenizer(
            tokenizer, padded_vocab_size=weight.shape[0], stop_token_ids=_stop_tokens(model, tokenizer)
        ),
        max_model_len=getattr(config, "max_position_embeddings", None) or min(tokenizer.model_max_length, 1 << 20),
        dtype=weight.dtype,
        device=weight.device,
        layout=layout,
    )


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


def read_config(model: str, revision: str | None) -> Any:
    """Read the configuration of a model, and check that it can be served. Raises as `load_model`.

    Fails early if the hub cannot be reached.
    """
    path = gguf_file(model)
    if path is not None:
        config = read_gguf_config(path)
    elif Path(model).is_dir():
        config = AutoConfig.from_pretrained(model, revision=revision)
    else:
        config = _find_on_hub(model, revision)
    _check_config(config)
    return config


def _find_on_hub(model: str, revision: str | None) -> Any:
    try:
        if try_to_load_from_cache(model, "config.json", revision=revision) is None:
            HfApi().model_info(model, revision=revision, timeout=10)  # transformers would try for a minute
        return AutoConfig.from_pretrained(model, revision=revision)
    except Exception as error:  # the type depends on the HTTP library
        why = " ".join(str(error).split())
        raise OSError(
            f"there is no local directory or GGUF file {model!r}, and no such model from the hub: {bounded(why)}"
        ) from error


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def _check_config(config: Any) -> None:
    """Reject what the configuration shows to be unsupported, before the weights are read."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    is_causal = model_class is not None and not getattr(config, "is_encoder_decoder", False)
    is_pluggable = getattr(model_class, "_supports_attention_backend", False)
    text = config.get_text_config(decoder=True)
    others = ", ".join(sorted({*(getattr(text, "layer_types", None) or ())} - _LAYER_TYPES))
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    reasons = {
        "it is not a causal language model of transformers": not is_causal,
        "its code does not support other attention backends": not is_pluggable and not is_recurrent(text),
        f"it has {others} layers": others,
        f"{rope} RoPE depends on the longest sequence of a batch": rope in ("dynamic", "longrope"),
    }
    for why, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{_architecture(config)} can't be served: {why}")


class _Recorder(KVCache):
    """Records the shapes of the layers, and stores nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShapes] = {}
        self.states = None
        self.block_size = self.gather_tokens = 1

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self.layers:
            raise UnsupportedModelError(f"two attention modules of the model have layer index {layer}")
        self.layers[layer] = LayerShapes(key.shape[1], key.shape[2], value.shape[2])


def _probe(model: Any) -> tuple[dict[int, LayerShapes], torch.nn.Module]:
    """Run two short sequences flattened in one row, and compare the logits with those of eager attention. No flag of a
    model says what this shows: nothing mixes the sequences, and which head makes its logits. Returns that head too."""
    name = type(model).__name__
    body, weight = getattr(model, model.base_model_prefix), model.get_output_embeddings().weight
    device = weight.device
    size = model.config.get_text_config(decoder=True).vocab_size
    prompts = [torch.arange(1, 10) * 7 % size, torch.arange(1, 6) * 11 % size]
    first, total = len(prompts[0]), sum(map(len, prompts))
    recorder = _Recorder()
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    packed = torch.stack([torch.cat(prompts), positions, torch.zeros_like(positions)]).numpy()
    context = PagedContext(packed, [(0, first, 0, None), (first, total, 0, None)])
    model.set_attn_implementation(ATTENTION)
    with torch.inference_mode():
        try:
            hidden = context.run(body, recorder, device)
        except TypeError as error:
            raise UnsupportedModelError(f"{name} can't be served: {error}") from error
        heads = heads_of(model, hidden)
        candidates = [(head, head(hidden).float()) for head in heads]
        model.set_attn_implementation("eager")
        theirs = torch.cat(
            [model(input_ids=prompt[None].to(device), use_cache=False).logits[0] for prompt in prompts]
        ).float()
        model.set_attn_implementation(ATTENTION)
    if not recorder.layers:
        raise UnsupportedModelError(f"{name} can't be served: it does not call the attention backend")
    for head, ours in candidates:
        if _alike(ours, theirs, _SAME[weight.dtype]):
            return dict(sorted(recorder.layers.items())), head
    raise UnsupportedModelError(f"{name} can't be served: its logits with paged attention differ from eager's")


def _alike(ours: torch.Tensor, theirs: torch.Tensor, least: float) -> bool:
    if ours.shape != theirs.shape or not torch.allclose(ours.std(), theirs.std(), rtol=0.05):
        return False
    pairs = torch.stack([ours.flatten(), theirs.flatten()])
    return bool(torch.corrcoef(pairs.double())[0, 1] >= least)


def _stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an output, from the generation config, the config and the tokenizer."""
    sources = getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer
    found: dict[int, None] = {}
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update((int(token), None) for token in (ids if isinstance(ids, list) else [ids]) if token is not None)
    return list(found)
