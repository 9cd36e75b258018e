"""The logits processor on pools: one that is passed in, or one that it opens by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers_generation import CONSTRAINTS, PROMPTS, inputs

from guided.integrations import transformers
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.pools.protocol import MaskPool
from guided.vocabulary import Vocabulary


class TestPools:
    def test_a_pool_by_name_is_opened_and_shut_down(
        self,
        model: LlamaForCausalLM,
        vocabulary: Vocabulary,
        tiny_tokenizer: PreTrainedTokenizerFast,
        local_ray: None,
        opened: list[MaskPool],
    ) -> None:
        batch = inputs(tiny_tokenizer, PROMPTS)
        with (
            GuidedLogitsProcessor(vocabulary, CONSTRAINTS, pool="ray") as there,
            GuidedLogitsProcessor(vocabulary, CONSTRAINTS, pool="inline") as here,
        ):
            ray, inline = opened
            assert (ray.status().name, inline.status().name) == ("ray", "inline")
            pids = [worker.pid for worker in ray.status().workers]
            assert pids
            assert os.getpid() not in pids
            found = [model.generate(**batch, logits_processor=[one], max_new_tokens=20) for one in (there, here)]
            assert torch.equal(*found)
        for pid in pids:
            assert pid is not None
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(120)  # raises if the actor is still there

    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> list[MaskPool]:
        """Pools that were opened by name."""
        found: list[MaskPool] = []
        real = transformers.find_pool

        def noted(name: str, options: Mapping[str, Any]) -> Callable[[Vocabulary], MaskPool]:
            open_pool = real(name, options)

            def open_noted(vocabulary: Vocabulary) -> MaskPool:
                found.append(open_pool(vocabulary))
                return found[-1]

            return open_noted

        monkeypatch.setattr(transformers, "find_pool", noted)
        return found
