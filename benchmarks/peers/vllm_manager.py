"""Compute masks with vLLM's `StructuredOutputManager` and `apply_grammar_bitmask`, as
vLLM's V1 engine does in a step.

`EngineCore.step` launches the forward pass, computes the batch's bitmask on the same
thread meanwhile, waits, lets the runner apply the mask and sample, and passes the
sampled tokens to the grammars. The rest of the engine (scheduler, runner, sampler) is
not measured.

Imports vLLM, so it runs in vLLM's virtual environment.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from benchmarks.peers.loop import SleepingForward, Times, Way
from benchmarks.peers.rows import Document, RunningSequence

MAX_BATCH = 1024
BACKENDS = {"llguidance": "guidance", "xgrammar": "xgrammar"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class VLLMManager(Way):
    """Args:
    vocabulary: a tekken.json.
    """

    def __init__(self, vocabulary: str) -> None:
        self._config = _config(vocabulary)
        self._manager = StructuredOutputManager(self._config)
        self._backend = ""
        self._requests: dict[str, Request] = {}

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        if backend != self._backend:  # an engine has one backend
            self._manager = StructuredOutputManager(self._config)
            self._backend = backend
        refused: dict[str, str] = {}
        for document in documents:
            try:
                grammar = self._grammar(self._request("check", document))
                if not grammar.accept_tokens("check", list(document.tokens)):
                    refused[document.name] = "its tokens are rejected"
            except Exception as error:
                refused[document.name] = f"{type(error).__name__}: {error}"
        return refused

    def _request(self, name: str, document: Document) -> Request:
        constraint = StructuredOutputsParams(json=document.schema)
        constraint._backend = BACKENDS[self._backend]
        params = SamplingParams(max_tokens=1 << 20, structured_outputs=constraint)
        return Request(
            request_id=name,
            prompt_token_ids=[1],
            sampling_params=params,
            pooling_params=None,
        )

    def _grammar(self, request: Request) -> Any:
        """Compile a grammar and wait for it."""
        self._manager.grammar_init(request)
        pending = request.structured_output_request
        assert pending is not None
        while not pending.is_grammar_ready:
            time.sleep(0.0005)
        if isinstance(pending.grammar, Exception):
            raise pending.grammar
        return pending.grammar

    def open(self, sequence: RunningSequence) -> None:
        request = self._request(str(sequence.id), sequence.document)
        self._grammar(request)
        self._requests[request.request_id] = request

    def close(self, sequence: RunningSequence) -> None:
        self._requests.pop(str(sequence.id), None)

    def step(
        self, sequences: Sequence[RunningSequence], forward: SleepingForward
    ) -> tuple[torch.Tensor, Times]:
        ids = [str(sequence.id) for sequence in sequences]
        forward.start()
        launched = time.perf_counter()
        bitmask = self._manager.grammar_bitmask(self._requests, ids, {})
        filled = time.perf_counter()
        logits = forward.wait()
        ready = time.perf_counter()
        apply_grammar_bitmask(
            SimpleNamespace(scheduled_spec_decode_tokens={}),
            GrammarOutput(ids, bitmask, [0] * len(ids)),
            SimpleNamespace(req_ids=ids),
            logits,
        )
        kernel = time.perf_counter() - ready
        exposed = max(0.0, filled - forward.end)
        return logits, Times(exposed, filled - launched - exposed, kernel)

    def sampled(
        self, sequences: Sequence[RunningSequence], tokens: Sequence[int]
    ) -> float:
        started = time.perf_counter()
        for sequence, token in zip(sequences, tokens, strict=True):
            self._manager.accept_tokens(self._requests[str(sequence.id)], [token])
        return time.perf_counter() - started


def _config(vocabulary: str) -> Any:
    """Return vLLM's configuration of a model that is never loaded. It needs a
    folder."""
    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        tekken = json.loads(Path(vocabulary).read_text())
        size = tekken["config"]["default_vocab_size"]
        (Path(folder) / "config.json").write_text(
            json.dumps({**MODEL, "vocab_size": size})
        )
        shutil.copy(vocabulary, Path(folder) / "tekken.json")
        arguments = EngineArgs(
            model=folder,
            tokenizer_mode="mistral",
            config_format="hf",
            load_format="dummy",
            enforce_eager=True,
            max_num_seqs=MAX_BATCH,
            max_model_len=4096,
            disable_log_stats=True,
        )
        config = arguments.create_engine_config()
        StructuredOutputManager(config)  # reads the tokenizer while the folder exists
        return config
