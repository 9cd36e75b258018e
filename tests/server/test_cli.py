"""The command line: its help, and its errors when the server cannot start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine import base_llm
from engine.config import EngineConfig, LoadOptions
from engine.server import process
from engine.server.cli import app
from engine.server.options import ServeOptions, ServerSettings
from guided.limits import CompileLimits
from guided.pools.options import RayPoolOptions


def run(
    *arguments: str, given: str | None = None, columns: str = "120"
) -> tuple[int, str]:
    environment = {"TERMINAL_WIDTH": columns, "COLUMNS": columns}
    result = CliRunner().invoke(app, list(arguments), input=given, env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_help_names_every_option_with_its_default() -> None:
    code, text = run("serve", "--help")
    assert code == 0
    for option in (
        "--ray-address",
        "--max-num-seqs",
        "--device",
        "GUIDED_API_KEY",
        "127.0.0.1",
        "8000",
    ):
        assert option in text
    assert len(text.splitlines()) <= 120
    assert "serve" in run("--help")[1]
    assert run("--version") == (0, "0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "status", "unused"),
    [
        (["--help"], 0, ["torch", "ray", "transformers", "fastapi"]),
        (["serve", "--port=0", "--backend=nosuch"], 1, ["transformers", "ray"]),
        (
            ["serve", "--port=0", "--logits-processors=json:loads"],
            1,
            ["transformers", "ray"],
        ),
        (["check", "nosuch.json"], 2, ["llguidance", "torch"]),
        (["top", "--help"], 0, ["httpx", "prometheus_client"]),
    ],
)
def test_wrong_calls_are_noticed_before_anything_slow(
    arguments: list[str], status: int, unused: list[str]
) -> None:
    code = (
        f"import sys; sys.argv = ['guided', *{arguments!r}]\n"
        "from engine.server.cli import main\n"
        "try: main()\n"
        f"except SystemExit as end: print(end.code, sorted(set({unused!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == f"{status} []", done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("./nonesuch",), "nonesuch"),
        (("--backend", "nonesuch"), "llguidance"),
        (("--chat-template", "nonesuch"), "nonesuch"),
        (
            ("nosuchmodel",),
            "there is no local directory or GGUF file 'nosuchmodel', and no such model from the hub",
        ),
        (
            ("--placement", "pool=masks"),
            "placement pool=masks needs a cluster: name it with --ray-address",
        ),
    ],
)
def test_what_cant_be_served(
    arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, text = run("serve", "--port", "0", "--pool", "inline", *arguments)
    assert code == 1
    (line,) = [line for line in text.splitlines() if line.startswith("guided serve:")]
    assert says in line


def test_short_help_is_not_cut() -> None:
    commands = run("--help", columns="80")[1].partition("Commands:")[2]
    assert "..." not in commands
    assert "say what to do." in " ".join(commands.split())
    assert max(map(len, commands.splitlines())) <= 80


@pytest.mark.parametrize(
    ("missing", "command", "says"),
    [
        ("uvicorn", "serve --port 0", "pip install '.[server]' in a checkout"),
        (
            "ray",
            "serve --port 0 --pool ray",
            "pip install '.[server,ray]' in a checkout",
        ),
        ("prometheus_client", "top --once", "pip install '.[server]' in a checkout"),
    ],
)
def test_what_is_not_installed_is_named(missing: str, command: str, says: str) -> None:
    code = (
        f"import sys; sys.argv = ['guided', *{command.split()!r}]; sys.modules[{missing!r}] = None\n"
        "from engine.server.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = [
        line
        for line in done.stderr.splitlines()
        if line.startswith(f"guided {command.split()[0]}:")
    ]
    assert missing in line
    assert says in line


def test_serve_without_ray_has_an_inline_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools: list[str] = []

    def start(model: str, pool: str, *others: Any, **options: Any) -> None:
        pools.append(pool)
        raise OSError("it is not started")

    monkeypatch.setattr(base_llm, "find_spec", lambda name: None)
    monkeypatch.setattr(process, "AsyncLLM", start)
    for options in (
        ServeOptions(),
        ServeOptions(ray=RayPoolOptions(address="auto")),
        ServeOptions(pool="ray"),
    ):
        with caplog.at_level("WARNING"), pytest.raises(OSError, match="not started"):
            process.start_engine(options)
    assert pools == ["inline", "ray", "ray"]
    assert caplog.text.count("Ray is not installed") == 1


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = run("serve", "--port", str(port))
    assert (code, f"can't listen on 127.0.0.1 port {port}" in text) == (1, True)


def test_a_file_has_options_that_the_command_line_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ServeOptions] = []
    monkeypatch.setattr(
        process, "serve", lambda options, listener: given.append(options)
    )
    file = tmp_path / "guided.yaml"
    file.write_text(
        "model: null\nport: 0\nmax-num-seqs: 7\nkv_cache_mib: 9\nallowed_hosts: [a, b]\nenable_prefix_caching: no\n"
        "actor-memory-mib: 700\nmask-limit: 4\nplacement: spread\n"
    )
    others = (
        "--num-actors",
        "5",
        "--compile-seconds",
        "2",
        "--dtype",
        "float32",
        "--post-processor",
        "logging:Logger",
    )
    assert run("serve", "--config", str(file), "--max-num-seqs", "8", *others) == (
        0,
        "",
    )
    engine = EngineConfig(
        max_num_seqs=8, kv_cache_bytes=9 << 20, enable_prefix_caching=False
    )
    limits = CompileLimits(seconds=2.0)
    pool = RayPoolOptions(
        num_actors=5,
        placement="spread",
        actor_memory_bytes=700 << 20,
        mask_limit=4.0,
        compile_limits=limits,
    )
    server, load = (
        ServerSettings(allowed_hosts=("a", "b")),
        LoadOptions(dtype="float32"),
    )
    processor = "logging:Logger"
    assert given == [
        ServeOptions(
            port=0,
            engine=engine,
            ray=pool,
            server=server,
            load=load,
            post_processor=processor,
        )
    ]
    for text, says in (
        ("prot: 1", "there is no option prot"),
        ("port: x", "--port"),
        ("- a", "'option: value'"),
    ):
        file.write_text(text)
        code, printed = run("serve", "--config", str(file))
        assert code == 2
        assert says in " ".join(printed.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--max-num-seqs", "0", "max_num_seqs is 0; it must be at least 1"),
        ("--port", "70000", "port is 70000; it must be between 0 and 65535"),
        ("--dtype", "float3", "dtype is 'float3'; it must be one of auto, float32"),
    ],
)
def test_what_is_out_of_range_is_a_usage_error(
    option: str, value: str, says: str
) -> None:
    code, text = run("serve", option, value)
    assert code == 2
    assert f"Invalid value: {says}" in " ".join(text.replace("│", " ").split())


def test_check_has_a_status_and_reports(tmp_path: Path) -> None:
    texts = {
        "good.json": '{"type": "integer", "minimum": 3, "maximum": 5}',
        "bad.regex": "a(?=b)",
        "loose.json": '{"type": "string", "format": "semver"}',
        "api.yaml": "openapi: 3.1.0\ncomponents: {schemas: {A: {type: string}}}\n",
        "schema.yml": "type: object\nproperties: {a: {type: string}, b: {}}\n",
    }
    good, bad, loose, api, schema = (str(tmp_path / name) for name in texts)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    code, text = run("check", good, loose, api, schema, "--samples", "2")
    assert (code, text.count("sample: ")) == (0, 8)
    assert f"{good}: accepted (JSON schema), llguidance" in text
    assert (
        text.count(
            "WARNING: not enforced: (no keyword of JSON Schema restricts this document: choose one of its schemas"
        )
        == 1
    )
    assert '"$ref": "#/components/schemas/A"' in text
    assert "allows: object with a, b" in text
    assert [run("check", file, "--strict")[0] for file in (loose, good)] == [1, 0]
    code, text = run("check", good, bad, "--json")
    reports = [json.loads(line) for line in text.splitlines()]
    assert (code, [report["accepted"] for report in reports]) == (1, [True, False])
    assert "lookaround" in reports[1]["error"]
    unread = [
        str(tmp_path / name) for name in ("bytes.json", "nosuch.json", "bad.yaml")
    ]
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    (tmp_path / "bad.yaml").write_text("a: [1")
    code, text = run("check", unread[0], good, *unread[1:], schema)
    assert (code, text.count(": accepted")) == (2, 2)
    assert [f"{file}: can't be read: " in text for file in unread] == [True] * 3
    assert [
        json.loads(line)["name"]
        for line in run("check", *unread, "--json")[1].splitlines()
    ] == unread
    code, text = run("check", "-", given='root ::= "a"\n')
    assert (code, "accepted (GBNF grammar)" in text) == (0, True)
