"""The page in a real browser against a real server: with a file, questions, the keyboard, on a narrow screen.

Needs playwright (Python) and a Chromium: `chromium` or `google-chrome` on the path, or what CHROMIUM names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from many_clients import Book, make_books, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
HOSTILE = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
BARS = "[...document.querySelectorAll('#memory, #memory > div')].map((part) => part.getBoundingClientRect().width)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server") / "contexts"
    with serving(folder, ["--kv-memory", "64MiB", "--readers", "3"]) as (url, _):
        yield url


@pytest.fixture(scope="module")
def book() -> Book:
    return make_books(1, 6000, 6000)[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Return what opens a page; fails if the page broke its own policy or raised."""
    pages, wrong = [], list[str]()

    def opened(url: str, **options: Any) -> Any:
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
        page.on(
            "request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url)
        )
        page.set_default_timeout(20_000)
        page.goto(url)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert not wrong


def drop(page: Any, name: str, text: str) -> None:
    """Drop a file on the page, as a mouse would."""
    code = """([name, text]) => { const data = new DataTransfer();
        data.items.add(new File([text], name, {type: "text/plain"}));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})); }"""
    page.evaluate(code, [name, text])


def test_a_dropped_file_is_read_shown_and_asked_while_the_bar_stays(open_page: Any, server: str, book: Book) -> None:
    page = open_page(server)
    page.wait_for_selector("#memory > div")
    bars = page.evaluate(BARS)
    drop(page, "My book.txt", book.text)
    page.wait_for_selector("#context-title:has-text('My-book')")
    page.wait_for_selector("#kept details")
    assert page.locator("#kept svg rect").count() == 50
    assert "most is kept" in page.locator("#kept svg").get_attribute("aria-label")
    for question in book.questions[:2]:
        page.fill("#question", question.text)
        page.press("#question", "Control+Enter")
        answer = page.locator("#answers > li").filter(has_text=question.text).first
        answer.locator("details").first.wait_for()
        assert question.truth in answer.locator(".answer").text_content()
        assert re.search(r"first words after [\d.]+ s, .* tokens, from [\d,]+ units for", answer.text_content())
    answer.locator("summary").first.click()
    answer.locator("summary").nth(1).click()
    key = question.text.split(" mentioned")[0].split()[-1]
    assert f"for {key} is" in answer.locator(".passages").text_content()
    assert key in answer.locator(".passages mark").all_text_contents()
    assert page.evaluate(BARS) == bars
    assert "promised at the start" in page.text_content("#memory-text")


def test_the_keyboard_reaches_everything(open_page: Any, server: str, book: Book, tmp_path: Path) -> None:
    page = open_page(server)
    (tmp_path / "typed.txt").write_text(book.text)
    page.wait_for_selector("#memory > div")

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(it) => document.activeElement.matches(it)", selector):
                return
        raise AssertionError(f"Tab does not lead to {selector}")

    tab_to(".skip")
    tab_to("#file")
    page.set_input_files("#file", tmp_path / "typed.txt")  # the system's own dialog is not the page's
    tab_to("#name")
    page.keyboard.type("by-key")
    page.keyboard.press("Enter")
    page.wait_for_selector("#kept details")
    tab_to("#fork")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog[open]")
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    page.wait_for_selector("#context-title:has-text('again')")
    assert page.evaluate("document.activeElement.id") == "context-title"
    tab_to("#shrink")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.wait_for_selector("#dialog:not([open])", state="attached")
    tab_to("#delete")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Cancel comes after Delete
    assert page.locator("li[data-name=again]").count() == 1
    tab_to("#delete")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.wait_for_selector("li[data-name=again]", state="detached")


def test_contexts_are_joined_and_shrunk(open_page: Any, server: str, book: Book) -> None:
    page = open_page(server)
    for name in ("one", "two"):
        drop(page, f"{name}.txt", book.text[:8000])
        page.wait_for_selector(f"#context-title:text-is('{name}')")
        page.wait_for_selector("#kept details")
        page.check(f"li[data-name={name}] input")
    page.click("#compose")
    page.fill("#dialog-input", "both")
    page.click("#dialog-yes")
    page.wait_for_selector("#facts:has-text('one, two')")
    page.click("#shrink")
    page.fill("#dialog-input", "100")
    page.click("#dialog-yes")
    page.wait_for_selector("#context-title:text-is('both-100')")
    assert "100 per layer" in page.text_content("#facts")


def test_a_text_is_never_taken_for_html(open_page: Any, server: str) -> None:
    page = open_page(server)
    drop(page, f"{HOSTILE}.txt".replace("/", "_"), f"{HOSTILE} " * 40)
    page.wait_for_selector("#kept details")
    page.fill("#question", HOSTILE)
    page.click("#send")
    page.wait_for_selector("#answers details")
    page.click("#kept summary")
    assert page.locator("#main img, #main script").count() == 0
    assert "<img" in page.text_content("#kept")
    assert page.title() == "Locret"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_narrow_screen(open_page: Any, server: str, scheme: str) -> None:
    page = open_page(server, viewport={"width": 320, "height": 640}, color_scheme=scheme)
    drop(page, f"{'long-name-' * 6}.txt", "They say that Delhi is short. " * 60)
    page.wait_for_selector("#kept details")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    lighter = sum(map(int, re.findall(r"\d+", ground)[:3])) > sum(map(int, re.findall(r"\d+", ink)[:3]))
    assert lighter == (scheme == "light")
    page.click("#delete")
    page.click("#dialog-yes")
    page.wait_for_selector("#context", state="hidden")


def test_refusals_are_shown_in_the_words_of_the_server(open_page: Any, server: str) -> None:
    page = open_page(server)
    page.evaluate("document.body.dataset.ready = 1")
    drop(page, "latin.txt", "")
    page.wait_for_selector("#alert:has-text('empty')")
    page.fill("#name", "../../etc/passwd")
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"})
    page.click("#upload button")
    page.wait_for_selector("#alert:has-text('is no name of a context')")


def test_a_key_is_asked_for_once_and_kept_out_of_the_page(open_page: Any, tmp_path: Path) -> None:
    key = "a-key-for-this-test"
    with serving(tmp_path / "contexts", ["--kv-memory", "32MiB", "--api-key", key]) as (url, _):
        page = open_page(url)
        for typed in ("wrong", key):
            page.wait_for_selector("#dialog[open]")
            page.fill("#dialog-input", typed)
            page.click("#dialog-yes")
            page.wait_for_timeout(300)
        page.wait_for_selector("#memory > div")
        assert page.locator("#dialog[open]").count() == 0
        assert key not in page.content()
        page.reload()
        page.wait_for_selector("#memory > div")
        assert page.locator("#dialog[open]").count() == 0
