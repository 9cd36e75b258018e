"""The command line: its help, and its errors when the server cannot start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from engine.config import EngineConfig, LoadOptions
from engine.server import process
from engine.server.cli import app
from engine.server.options import ServeOptions
from guided.limits import CompileLimits
from guided.pools.options import RayPoolOptions


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"TERMINAL_WIDTH": "120", "COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_help_names_every_option_with_its_default() -> None:
    code, text = run("serve", "--help")
    assert code == 0
    for option in (
        "--host",
        "--port",
        "--pool",
        "--ray-address",
        "--num-actors",
        "--backend",
        "--max-num-seqs",
        "--max-model-len",
        "--device",
        "--dtype",
        "--api-key",
        "GUIDED_API_KEY",
        "127.0.0.1",
        "8000",
        "0<=x<=65535",
        "x>=256",
    ):
        assert option in text
    assert len(text.splitlines()) <= 120
    assert "serve" in run("--help")[1]


def test_help_is_quick_for_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.server.cli; print(sorted({'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_options_are_checked_before_the_model_is_loaded() -> None:
    for option, status in (("--backend=nosuch", 1), ("--dtype=float3", 2), ("--logits-processors=json:loads", 1)):
        code = (
            f"import sys; sys.argv = ['guided', 'serve', '--port=0', {option!r}]\n"
            "from engine.server.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: print(end.code, 'transformers' in sys.modules, 'ray' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"{status} False False", done.stderr


def test_version() -> None:
    assert run("--version") == (0, "0.1.0\n")


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, text = run("serve", "--port", port)
    assert code == 1
    assert f"can't listen on 127.0.0.1 port {port}" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("./nonesuch",), "nonesuch"),
        (("--backend", "nonesuch"), "llguidance"),
        (("nosuchmodel",), "there is no local directory 'nosuchmodel', and no such model from the hub"),
        (("--device", "nosuchdevice"), "device is 'nosuchdevice'"),
        (("--device", "cuda:99"), "device is 'cuda:99'"),
        (("--max-model-len", "99999999"), "max_model_len is 99999999; the context of this model is"),
        (("--placement", "pool=masks"), "placement pool=masks needs a cluster: name it with --ray-address"),
    ],
)
def test_what_cant_be_served(arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, text = run("serve", "--port", "0", "--pool", "inline", *arguments)
    assert code == 1
    (line,) = [line for line in text.splitlines() if line.startswith("guided serve:")]
    assert says in line
    assert "Traceback" not in text


def test_what_others_say_in_many_lines_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    code, text = run("serve", "--port", "0", "--pool", "inline", str(tmp_path))
    assert code == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("guided serve:")
    assert "nonesuch" in last


def test_options_reach_the_pool_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def engine(model: str, pool: str, config: EngineConfig, *, pool_options: RayPoolOptions, **load: Any) -> NoReturn:
        given.extend((pool, config, pool_options, load))
        raise ValueError("that will do")

    monkeypatch.setattr(process, "AsyncLLM", engine)
    arguments = ("--actor-memory-mib", "700", "--grammar-cache-mib", "9", "--max-replays", "3", "--mask-limit", "4")
    arguments += ("--num-actors", "5", "--placement", "spread", "--compile-seconds", "2")
    arguments += ("--max-num-seqs", "7", "--dtype", "float32", "--post-processor", "logging:Logger")
    assert run("serve", "--port", "0", *arguments)[0] == 1
    assert given == [
        "ray",
        EngineConfig(max_num_seqs=7),
        RayPoolOptions(
            num_actors=5,
            placement="spread",
            actor_memory_bytes=700 << 20,
            max_cache_bytes=9 << 20,
            max_replays=3,
            mask_limit=4.0,
            compile_limits=CompileLimits(seconds=2.0),
        ),
        {"processor": "logging:Logger", **asdict(LoadOptions(dtype="float32"))},
    ]


def test_a_file_has_options_that_the_command_line_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServeOptions] = []
    monkeypatch.setattr(process, "serve", lambda options, listener: given.append(options))
    file = tmp_path / "guided.yaml"
    file.write_text(
        "model: null\nport: 0\nmax-num-seqs: 7\nkv_cache_mib: 9\nallowed_hosts: [a, b]\nenable_prefix_caching: no\n"
    )
    assert run("serve", "--config", str(file), "--max-num-seqs", "8") == (0, "")
    [options] = given
    assert (options.port, options.server.allowed_hosts) == (0, ("a", "b"))
    assert options.engine == EngineConfig(max_num_seqs=8, kv_cache_bytes=9 << 20, enable_prefix_caching=False)
    for text, says in (("prot: 1", "there is no option prot"), ("port: x", "--port"), ("- a", "'option: value'")):
        file.write_text(text)
        code, printed = run("serve", "--config", str(file))
        assert code == 2
        assert says in " ".join(printed.replace("│", " ").split())


def test_a_chat_template_replaces_the_model_s(tmp_path: Path) -> None:
    assert "there is no chat template" in run("serve", "--port", "0", "--chat-template", str(tmp_path / "no"))[1]
    file = tmp_path / "template.jinja"
    file.write_text("<ours>")
    options = ServeOptions(pool="inline", load=LoadOptions(chat_template=str(file), dtype="float32"))
    engine = process.start_engine(options)
    try:
        assert engine.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<ours>"
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-num-seqs", "0"), "Invalid value for '--max-num-seqs': Input should be greater than or equal to 1"),
        (("--port", "70000"), "Invalid value for '--port': Input should be less than or equal to 65535"),
        (("--max-replays", "-1"), "Invalid value for '--max-replays': Input should be greater than or equal to 0"),
        (("--actor-memory-mib", "1"), "Invalid value for '--actor-memory-mib': Input should be greater than or equal"),
        (("--dtype", "float3"), "Invalid value: dtype is 'float3'; it must be one of auto, float32"),
        (("--mask-limit", "0"), "Invalid value: mask_limit is 0.0; it must be more than 0"),
    ],
)
def test_what_is_out_of_range_is_a_usage_error(arguments: tuple[str, ...], says: str) -> None:
    code, text = run("serve", *arguments)
    assert code == 2
    assert says in " ".join(text.replace("│", " ").split())


class TestCheck:
    def test_the_status_and_the_reports(self, tmp_path: Path) -> None:
        good, bad, loose = tmp_path / "good.json", tmp_path / "bad.regex", tmp_path / "loose.json"
        good.write_text('{"type": "integer", "minimum": 3, "maximum": 5}')
        bad.write_text("a(?=b)")
        loose.write_text('{"type": "string", "format": "semver"}')
        code, text = run("check", str(good), str(loose), "--samples", "2")
        assert code == 0
        assert f"{good}: accepted (JSON schema), llguidance" in text
        assert text.count("sample: ") == 4
        assert run("check", str(loose), "--strict")[0] == 1
        code, text = run("check", str(good), str(bad), "--json")
        assert code == 1
        reports = [json.loads(line) for line in text.splitlines()]
        assert [report["accepted"] for report in reports] == [True, False]
        assert "lookaround" in reports[1]["error"]

    def test_what_is_hardly_meant_is_noted(self, tmp_path: Path) -> None:
        example, api, schema = tmp_path / "example.json", tmp_path / "api.yaml", tmp_path / "schema.yml"
        example.write_text('{"name": "Maria"}')
        api.write_text("openapi: 3.1.0\ncomponents: {schemas: {A: {type: string}}}\n")
        schema.write_text("type: object\nproperties: {a: {type: string}, b: {}}\n")
        code, text = run("check", str(example), str(api), str(schema))
        assert code == 0
        assert text.count("no keyword of JSON Schema") == 2
        assert text.count("allows: any JSON value") == 2
        assert f"{schema}: accepted (JSON schema)" in text
        assert "allows: object with a, b" in text
        assert run("check", str(example), "--strict")[0] == 1

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = CliRunner().invoke(app, ["check", "-"], input='root ::= "a"\n')
        assert result.exit_code == 0
        assert "accepted (GBNF grammar)" in result.output

    def test_wrong_calls_are_noticed_before_anything_slow(self) -> None:
        for arguments in (
            ["nosuch.json"],
            ["-", "--backend", "pencil"],
            ["-", "--samples", "-1"],
            ["-", "--kind", "x"],
        ):
            code = (
                "import sys; sys.argv = ['guided', 'check', *" + repr(arguments) + "]\n"
                "from engine.server.cli import main\n"
                "try: main()\n"
                "except SystemExit as end: print(end.code, 'llguidance' in sys.modules, 'torch' in sys.modules)"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout.strip() == "2 False False"
