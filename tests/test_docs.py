"""The documentation names what exists, and its snippets, and the examples, print what
they say.

A fence ```sh or ```python is run, in a fresh shell in a folder that looks like the
checkout. A fence ```text after it is what it prints; there … stands for anything. A
fence ```console is not run: it does not end, or needs vLLM or a cluster.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from script_host import ScriptHost
from serving import serving
from typer.main import get_command

from benchmarks import coverage, fields
from engine.model.files import gguf_file
from engine.server.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = {
    f"{path.parent.relative_to(ROOT).as_posix()}/"
    for package in ("guided", "actors", "engine", "deploy")
    for path in (ROOT / package).rglob("*.py")
}
RUN_ELSEWHERE = ("benchmarks.md", "clients.md", "vllm.md")
"""Pages with code that takes long, or needs packages that exclude ours (`make
test-clients`, `make test-vllm`)."""
ADDRESS = "http://127.0.0.1:8000"
"""The server of the documentation."""
OTHER_OPTIONS = {"--build-arg", "--help"}
"""Options of other commands that the pages name."""


@dataclass(frozen=True)
class Snippet:
    """Code of a page, and what it prints (None: the page does not say)."""

    page: str
    number: int
    language: str
    code: str
    printed: str | None

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def snippets() -> list[Snippet]:
    all_pages = []
    for page in PAGES:
        found = re.findall(
            r"^```(sh|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?",
            page.read_text(),
            re.MULTILINE | re.DOTALL,
        )
        if page.name not in RUN_ELSEWHERE:
            for number, (language, code, printed) in enumerate(found, 1):
                all_pages.append(
                    Snippet(page.name, number, language, code, printed or None)
                )
    return all_pages


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    # a busy machine imports xgrammar slowly
    with serving("--pool", "inline", "--compile-seconds", "60") as process:
        yield process.url


@pytest.fixture(scope="module")
def script_host() -> Iterator[ScriptHost]:
    """Runs scripts as `python SCRIPT` does, without its seconds of imports."""
    host = ScriptHost()
    yield host
    host.close()


@pytest.mark.parametrize("snippet", snippets(), ids=str)
def test_snippets_print_what_the_page_says(
    snippet: Snippet,
    request: pytest.FixtureRequest,
    script_host: ScriptHost,
    tmp_path: Path,
) -> None:
    code, printed = snippet.code, snippet.printed
    if '"smollm2"' in code:
        try:
            gguf_file("smollm2")
        except OSError as error:
            pytest.skip(str(error))
    if ADDRESS in code:
        url = request.getfixturevalue("server")
        code, printed = (
            code.replace(ADDRESS, url),
            printed and printed.replace(ADDRESS, url),
        )
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "snippet").write_text(code)
    script = re.fullmatch(r"python (\S+\.py) *(?:#.*)?\n", code)
    if snippet.language == "python" or script:
        found = script_host.run(
            tmp_path / (script[1] if script else "snippet"), tmp_path
        )
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "120",
        }
        environment["OMP_NUM_THREADS"] = "1"
        command = ["bash", "-euo", "pipefail", "snippet"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        found = done.stdout
    if printed is not None:
        pattern = ".*".join(re.escape(part) for part in printed.strip().split("…"))
        assert re.fullmatch(pattern, found.strip(), re.DOTALL), found


def test_each_offline_answer_satisfies_its_constraint(script_host: ScriptHost) -> None:
    lines = script_host.run(ROOT / "examples/offline.py", ROOT).splitlines()
    person, date, mood, expression = (line.partition(": ")[2] for line in lines)
    assert json.loads(person).keys() == {"name", "age", "city"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert mood in ("positive", "negative")
    assert re.fullmatch(r"[1-9]( [-+] [1-9])+", expression)


def test_draft_tokens_need_fewer_steps_than_tokens(script_host: ScriptHost) -> None:
    answer, figures = script_host.run(
        ROOT / "examples/draft_tokens.py", ROOT
    ).splitlines()
    assert json.loads(answer) == {"name": "Anna Weber", "age": 47}
    counts = re.fullmatch(r"(\d+) tokens, (\d+) forward passes", figures)
    assert counts is not None
    assert int(counts[2]) < int(counts[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            if anchor:
                assert anchor in _anchors(page.parent / target if target else page), (
                    f"{target}#{anchor}"
                )


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:guided|actors|engine|deploy|benchmarks|tests|docs|examples)/[\w./-]+\.\w+)`",
        page.read_text(),
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    commands = get_command(app).commands.values()
    known = {
        each
        for command in commands
        for param in command.params
        for each in (*param.opts, *param.secondary_opts)
    }
    if page.name not in RUN_ELSEWHERE:
        pattern = r"(?:^|`)(guided (?:serve|check|doctor) [^`\n#]*|--[^`\n]*)"
        called = " ".join(re.findall(pattern, page.read_text(), re.MULTILINE))
        assert set(re.findall(r"(?<!\S)--[a-z-]+", called)) <= known | OTHER_OPTIONS


def test_metrics_that_are_named_exist(server: str) -> None:
    text = (
        (ROOT / "docs" / "http-reference.md")
        .read_text()
        .partition("## Metrics")[2]
        .partition("\n## ")[0]
    )
    named = set(re.findall(r"`([a-z_]+)(?:\{\w+(?:,\w+)*\})?`", text)) - {"guided_"}
    assert len(named) > 30
    exposed = httpx.get(f"{server}/metrics").text
    for name in named:
        assert f"# TYPE guided_{name.removesuffix('_total')}" in exposed, name


def test_design_names_each_folder_once_and_nothing_else() -> None:
    listed = re.findall(
        r"^\| `([\w/]+/)` \|",
        (ROOT / "docs" / "design.md").read_text(),
        flags=re.MULTILINE,
    )
    assert sorted(listed) == sorted(FOLDERS)


def test_failure_model_names_existing_tests_in_every_row() -> None:
    text = (ROOT / "docs" / "failure-model.md").read_text()
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)+)`", text)
    assert len(named) > 40
    for file, path in named:
        source = (
            ROOT / file if "/" in file else ROOT / "tests" / "faults" / file
        ).read_text()
        for name in path.removeprefix("::").split("::"):
            assert re.search(
                rf"^ *(?:class|(?:async )?def) {name}\b", source, re.MULTILINE
            ), f"{file}{path}"
    tables = text.partition("## What can go wrong")[2].partition("\n## ")[0]
    rows = [
        line
        for line in tables.splitlines()
        if line.startswith("| ") and not line.startswith("| what goes wrong")
    ]
    assert len(rows) > 30
    for row in rows:
        assert "::test_" in row, row


def test_coverage_is_what_the_code_says() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), (
        "run python -m benchmarks.coverage"
    )


def test_fields_are_what_the_code_says() -> None:
    assert fields.PAGE.read_text() == fields.page(), "run python -m benchmarks.fields"
