"""The playground: the page, its headers, and how it works in a browser (Debian's
chromium with playwright)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hosting import hosted
from serving import ServerProcess, wait_until
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def test_its_policy_allows_its_own_script_and_style_only(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1)
        for part in answer.headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["connect-src"] == "'self'"
    assert (
        policy["default-src"]
        == policy["frame-ancestors"]
        == policy["base-uri"]
        == "'none'"
    )
    assert not re.findall(r"""(?:src|href)=["'](?!/|data:)""", answer.text)
    assert "https://" not in answer.text
    assert "innerHTML" not in answer.text


BROWSER = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright"
    )
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page. At the end, nothing was written to its console."""
    made = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    made.on("console", lambda message: complaints.append(message.text))
    made.on("pageerror", lambda error: complaints.append(str(error)))
    yield made
    made.close()
    # Chromium reports answers with an error status.
    assert [
        text for text in complaints if not text.startswith("Failed to load resource")
    ] == []


def wait_for(page: Page, selector: str, text: str) -> str:
    """Wait until an element has the text, and return all of its text."""
    found = page.locator(selector, has_text=text)
    found.wait_for(timeout=90_000)
    return found.inner_text()


def choose(page: Page, kind: str, constraint: str | None = None) -> None:
    page.locator("#kinds").get_by_role("button", name=kind, exact=True).click()
    if constraint is not None:
        page.fill("#constraint", constraint)


def send(page: Page) -> str:
    """Send the request and return the answer."""
    page.click("#send")
    page.locator("#send:enabled").wait_for(timeout=90_000)
    return page.inner_text("#answer")


@pytest.mark.skipif(
    BROWSER is None, reason="there is no browser: install Debian's package chromium"
)
class TestInABrowser:
    def test_an_answer_with_its_tokens(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        assert "llguidance" in wait_for(page, "#status", "Accepted")
        assert set(json.loads(send(page))) == {"name", "age", "city"}
        counts = page.locator("#tokens .token small").all_inner_texts()
        assert "1" in counts
        assert len(set(counts)) > 3
        assert page.locator("#tokens .forced").count() > 3
        facts = page.inner_text("#facts")
        assert "json_schema, enforced by llguidance" in facts
        assert "nothing: all of it is enforced" in facts
        assert re.search(r"exposed\s+[\d.]+ ms: [\d.]+ % of", facts)
        assert re.search(r"kept mass\s+[\d.]+ % on average", facts)
        assert page.locator("#tokens .token .kept").count() == len(counts)
        assert "very small embedded model" in page.inner_text("#model")
        assert wait_for(page, "#progress", "tokens").startswith("stop · ")

    def test_a_constraint_is_checked_before_it_is_sent(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        page.fill(
            "#constraint", '{"type": "object", "properties": {"age": {"type": "int"}}}'
        )
        text = wait_for(page, "#status", "invalid_constraint")
        assert "/properties/age/type" in text
        assert page.locator("#send").is_disabled()
        page.fill("#constraint", '{"type": ')
        wait_for(page, "#status", "This is not JSON")
        assert page.locator("#send").is_disabled()
        tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        page.fill(
            "#constraint", json.dumps({"type": "object", "properties": {"tags": tags}})
        )
        assert "checked: /properties/tags/uniqueItems" in wait_for(
            page, "#status", "Accepted"
        )
        assert page.locator("#send").is_enabled()

    def test_it_asks_which_schema_is_meant(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        page.fill("#constraint", '{"invoice": 17, "customer": {"name": "Ann"}}')
        wait_for(page, "#status.warn", "This looks like an instance")
        assert not page.locator("#schemas").is_visible()
        schemas = {
            "Order": {"items": {"$ref": "#/components/schemas/a~1b"}},
            "a/b": {"type": "boolean"},
        }
        page.fill(
            "#constraint",
            json.dumps({"openapi": "3.1.0", "components": {"schemas": schemas}}),
        )
        wait_for(page, "#status.warn", "Which schema?")
        page.select_option("#schemas", "#/components/schemas/a~1b")
        wait_for(page, "#status.good", "Accepted")
        assert json.loads(send(page)) in (True, False)

    def test_an_error_says_its_place_once(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        page.fill("#constraint", '{"properties": {"it\'s": {"pattern": "("}}}')
        text = wait_for(page, "#status.bad", "invalid_constraint")
        assert text.endswith(
            "at /properties/it's/pattern in json_schema (invalid_constraint)"
        )
        assert text.count(" at ") == 1

    def test_the_first_example_of_each_kind(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        for kind in ("None", "Regex", "Choice", "Lark", "Structural tag", "Tools"):
            choose(page, kind)
            wait_for(page, "#status", "Accepted")
            assert send(page)
            assert wait_for(page, "#progress", "tokens in")

    def test_what_a_model_writes_stays_text(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        evil = '<img id="evil" src="x" onerror="document.title=1"><script>document.title=2</script>'
        choose(page, "Choice", evil)
        wait_for(page, "#status", "Accepted")
        assert send(page) == evil
        assert page.locator("#evil").count() == 0
        assert page.title() == "guided: playground"

    def test_its_code_gives_the_same_answer(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        choose(page, "Choice", 'it\'s\n"so"')
        wait_for(page, "#status", "Accepted")
        answer = send(page)
        command = page.inner_text("#code")
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == answer
        page.locator("#languages").get_by_role("button", name="Python").click()
        program = page.inner_text("#code")
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == answer

    def test_a_refusal_names_no_constraint(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.route("**/v1/check", lambda route: route.abort())  # the page cannot know
        page.goto(inline_server.url)
        wait_for(page, "#model", "context")
        page.fill("#constraint", '{"type": "int"}')
        assert "invalid_constraint" in send(page)
        facts = page.inner_text("#facts")
        assert "invalid_constraint" in facts
        assert "constraint\nnone" not in facts

    def test_an_answer_to_another_request_is_marked(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        choose(page, "Choice", "yes")
        wait_for(page, "#status", "Accepted")
        assert send(page) == "yes"
        assert page.locator("#stale").is_hidden()
        page.fill("#constraint", "no")
        assert page.locator("#stale").is_visible()
        assert send(page) == "no"
        assert page.locator("#stale").is_hidden()

    def test_a_reload_keeps_the_form(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        choose(page, "Regex", "[0-9]{3}")
        page.fill("#max_tokens", "77")
        page.locator("#messages textarea").first.fill("Which number?")
        page.click("#add")
        page.locator("#messages select").last.select_option("assistant")
        before = json.loads(page.evaluate("JSON.stringify(request())"))
        assert before["regex"] == "[0-9]{3}"
        page.reload()
        wait_for(page, "#status", "Accepted")
        assert json.loads(page.evaluate("JSON.stringify(request())")) == before | {
            "model": "guided-default"
        }
        page.click("#reset")
        wait_for(page, "#model", "context")
        assert "json_schema" in json.loads(page.evaluate("JSON.stringify(request())"))

    def test_a_tool_call_and_its_result_are_messages(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        choose(page, "Tools")
        wait_for(page, "#status", "Accepted")
        assert send(page).startswith("get_weather(")
        page.click("#continue")
        page.locator("#messages textarea:visible").last.fill("18 degrees")
        wait_for(page, "#status", "Accepted")
        messages = json.loads(page.evaluate("JSON.stringify(request())"))["messages"]
        assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
        page.locator("#tool_choice").select_option("auto")
        assert send(page)
        assert wait_for(page, "#progress", "tokens in")

    def test_stop_ends_the_generation(
        self, page: Page, inline_server: ServerProcess
    ) -> None:
        page.goto(inline_server.url)
        page.fill("#max_tokens", "1500")
        choose(page, "Regex", "[a-z]{1400}")
        wait_for(page, "#status", "Accepted")
        page.click("#send")
        page.locator("#tokens .token").first.wait_for()
        page.click("#stop")
        wait_for(page, "#progress", "stopped")
        wait_until(lambda: inline_server.metric("guided_num_requests_running") == 0)

    def test_it_asks_for_the_key(self, page: Page, tiny_engine: AsyncLLM) -> None:
        with hosted(tiny_engine.model, api_key="secret") as server:
            page.goto(server.url)
            assert (
                page.locator("#key").is_visible()
                or page.locator("#key-form").wait_for() is None
            )
            page.fill("#key", "secret")
            page.click("#key-form button")
            wait_for(page, "#status", "Accepted")
            assert not page.locator("#key-form").is_visible()
            assert "$GUIDED_API_KEY" in page.inner_text("#code")
            assert "secret" not in page.content()
