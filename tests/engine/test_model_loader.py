from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.model.attention import UnsupportedModelError
from engine.model.loader import load_model, prepare_model

HEADS: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    **HEADS,
}


@pytest.mark.parametrize("is_fast", [False, True])
def test_half_precision_is_float32_on_a_cpu_without_it(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    checkpoint = tmp_path / "half"
    shutil.copytree(tiny_llama_dir, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_fast)
    loaded = load_model(str(checkpoint), device="cpu")
    assert loaded.dtype == (torch.bfloat16 if is_fast else torch.float32)
    assert (
        load_model(str(checkpoint), dtype="float16", device="cpu").dtype
        == torch.float16
    )


def test_an_unknown_dtype_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'int3'"):
        load_model(str(tiny_llama_dir), dtype="int3")


def test_logits_are_those_of_the_models_own_forward(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """No flag says that a model scales or caps its logits after the head."""

    class Scaled(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 3.0
            return output

    class Shifted(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids, **kwargs)
            if input_ids is not None:
                output.logits = output.logits.roll(1, -1)
            return output

    config = LlamaConfig(**TINY)
    plain = LlamaForCausalLM(config)
    scaled = Scaled(config)
    scaled.load_state_dict(plain.state_dict())
    hidden = torch.randn(3, 32)
    expected = prepare_model(copy.deepcopy(plain), tiny_tokenizer).head(hidden)
    torch.testing.assert_close(
        prepare_model(scaled, tiny_tokenizer).head(hidden), 3.0 * expected
    )
    with pytest.raises(
        UnsupportedModelError, match="logits with paged attention differ"
    ):
        prepare_model(Shifted(config), tiny_tokenizer)
