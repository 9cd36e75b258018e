"""`guided serve` as a real process, with the official `openai` client. Masks are inline for a faster start."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import httpx
import openai
import psutil
import pytest
from pydantic import BaseModel, Field
from serving import ServerProcess, serving

from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams

MODEL = "guided-default"
ABOUT = "Extract name, age and city as JSON. Maria Keller is 34 years old and lives in Lisbon."


Short = Annotated[str, Field(max_length=30)]
"""The embedded model knows when a person's name ends; of other things it doesn't know so well."""


class Person(BaseModel):
    name: Short
    age: Annotated[int, Field(ge=0, le=150)]
    city: Short


@pytest.fixture(scope="module")
def client(inline_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{inline_server.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


class TestOpenAIClient:
    def test_parse(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(model=MODEL, messages=user(ABOUT), response_format=Person)
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.guided["backend"] == "llguidance"  # type: ignore[attr-defined]

    def test_parse_streamed(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model=MODEL, messages=user(ABOUT), response_format=Person) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert isinstance(answer.choices[0].message.parsed, Person)

    def test_regex_and_choice_through_extra_body(self, client: openai.OpenAI) -> None:
        pattern = "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
        dated = client.completions.create(model=MODEL, prompt="A date: ", extra_body={"regex": pattern})
        assert re.fullmatch(pattern, dated.choices[0].text)
        choices = ["red", "green", "blue"]
        chosen = client.chat.completions.create(
            model=MODEL, messages=user("Which?"), extra_body={"structured_outputs": {"choice": choices}}
        )
        assert chosen.choices[0].message.content in choices

    def test_bad_schema(self, client: openai.OpenAI) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "strng"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model=MODEL, messages=user("x"), response_format=form)  # type: ignore[call-overload]
        assert raised.value.param == "response_format"
        assert raised.value.body["pointer"] == "/properties/a/type"  # type: ignore[index]
        assert "strng" in str(raised.value)


def run_curl(command: str) -> str:
    assert shlex.split(command)[0] == "curl"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout


def test_greeting_holds_lines_that_work(inline_server: ServerProcess) -> None:
    """What it prints when it is up can be pasted into a shell."""
    greeting = "".join(inline_server.log)
    commands = re.findall(r"^  (curl .*\\\n.*)$", greeting, re.MULTILINE)
    assert len(commands) == 1
    for command in commands:
        assert '"finish_reason":"stop"' in run_curl(command)
    assert f"{inline_server.url}/docs" in greeting


def test_a_model_split_over_two_processes_answers_as_in_one() -> None:
    bodies: list[dict[str, Any]] = [{"prompt": ABOUT, "json_schema": Person.model_json_schema()}, {"prompt": ABOUT}]
    params = [
        SamplingParams(temperature=0, max_tokens=40, json_schema=body.get("json_schema"), logprobs=1) for body in bodies
    ]
    with LLM(str(checkpoint_path()), "inline", dtype="float32", device="cpu") as one:
        prompts = [body["prompt"] for body in bodies]
        expected = [output.outputs[0] for output in one.generate(prompts, params, use_tqdm=False)]
    with serving("--pool", "inline", "--dtype", "float32", "--device", "cpu", "--tensor-parallel-size", "2") as server:
        assert any("engine.ranks" in child.cmdline() for child in psutil.Process(server.process.pid).children())
        for body, output in zip(bodies, expected, strict=True):
            body |= {"temperature": 0, "max_tokens": 40, "logprobs": 1}
            (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
            assert choice["text"] == output.text
            own = [
                entries[token].logprob
                for token, entries in zip(output.token_ids, output.logprobs or [], strict=True)
                if entries
            ]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-3)
        assert Person.model_validate_json(expected[0].text)


def test_sigterm_lets_answers_end_while_the_grace_lasts() -> None:
    def stream(stack: ExitStack, tokens: int) -> Iterator[str]:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        answer = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
        lines = stack.enter_context(answer).iter_lines()
        next(lines)
        return lines

    with serving("--pool", "inline", "--grace-seconds", "2") as server, ExitStack() as stack:
        short, long = stream(stack, 10), stream(stack, 1900)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in short if line][-1] == "data: [DONE]"
        assert '"code":"shutting_down"' in [line for line in long if line][-1]
        assert server.stop() == 0
    assert "Finished server process" in server.log[-1], "nothing follows, such as reports of leaks"
