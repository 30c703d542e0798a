"""`locret-chat`: a conversation with a document, from a pipe and at a terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from locret import LongContextModel, RetentionPolicy
from locret.cli.command import run
from locret.conversation.document import open_document
from locret.infer import kept_page
from locret.infer.chat_command import command

MODULE = [sys.executable, "-m", "locret.infer.chat_command"]
PAIR = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
TEXT = "recipes/infer/pass_key.txt"
QUESTION = "What is the pass key?"
ANSWER = "The pass key is 43600."
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backbone: Path, heads: Path
) -> Chat:
    """Return a function that says lines to the command in an empty folder, and returns its code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(lines: str, *arguments: object, pair: bool = True) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", StringIO(lines))
        given = ["--model", backbone, "--heads", heads, "--max-new-tokens", 5] if pair else []
        with pytest.raises(SystemExit) as end:
            run(command, [str(word) for word in (*given, *arguments)])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.mark.slow
def test_three_turns_a_save_and_a_second_process_that_goes_on(tmp_path: Path) -> None:
    def process(lines: str, *arguments: str) -> Any:
        line = [*MODULE, *PAIR, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            line, input=lines, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    first = process(f"{QUESTION}\n\n{QUESTION}\n{QUESTION}\n/save a.chat\n", "--prompt-file", TEXT)
    assert (first.returncode, first.stdout) == (0, f"{ANSWER}\n" * 3), first.stderr
    second = process(f"/memory\n{QUESTION}\n/quit\n{QUESTION}\n", "--context", "a.chat", "--quiet")
    lines = second.stdout.splitlines()
    assert (second.returncode, lines[1:], second.stderr) == (0, [ANSWER], "")
    assert "tokens read" in lines[0]


def test_points_can_be_gone_back_to(chat: Chat, text: Path) -> None:
    said = "Who?\n/memory\n/fork\nWhy?\n/back\n/memory\nWhy?\n"
    code, out, err = chat(said, "--prompt-file", text)
    assert code == 0, err
    answers = out.splitlines()
    assert answers[1].split(" read")[0] == answers[3].split(" read")[0]
    assert answers[2] == answers[4]
    assert "1 to go /back to" in err


def test_a_text_is_read_later_and_a_context_of_python_is_loaded(
    chat: Chat, text: Path, backbone: Path, heads: Path
) -> None:
    lm = LongContextModel.from_pretrained(backbone, heads=heads, dtype="float32", device="cpu")
    lm.read(text).save("a.ctx")
    code, out, err = chat(f"/read {text}\nWho?\n/load a.ctx\nWho?\n")
    first, second = out.splitlines()
    assert (code, first) == (0, second), err
    assert "nothing has been read yet" in err
    code, out, err = chat("Who?\n", "--context", "a.ctx", "--budget", 24)
    assert (code, out) == (0, f"{first}\n")
    assert "--context a.ctx has been read already, so --budget is for what /read reads" in err
    assert "Chat('text.txt': 0 turns" in err
    code, out, err = chat("Who?\n", "--context", "a.ctx", "--system", "Be brief.", "--template", "none")
    assert (code, out) == (0, f"{first}\n")
    assert "--context a.ctx has been read already, so --system, --template is for what /read reads" in err


def test_what_stayed_is_shown_with_its_text(chat: Chat, text: Path) -> None:
    code, out, err = chat("/kept\nWho?\n/save a.chat\n/load a.chat\n/kept\n", "--prompt-file", text)
    assert code == 0, err
    assert "units held, by tenths of what was read: [" in out
    assert "of heads  " in out
    assert "the text itself is not saved" in err


def test_shares_of_heads_count_every_unit_that_is_held() -> None:
    lm = LongContextModel.from_pretrained(
        "checkpoints/tiny",
        scorer="streaming",
        policy=RetentionPolicy(budget=64, chunk_size=64, stabilizers=8, local_len=8),
    )
    context = lm.read(TEXT, progress=False)
    share = kept_page.share_of_heads(context.cache)
    assert share[:4].tolist() == [1.0] * 4
    assert share.sum() == context.memory().units
    assert kept_page.by_tenths(share).endswith("█")
    blocks = [token for block in lm.tokens(open_document(TEXT)) for token in block]
    assert len(blocks) == context.cache.seen
    shown = kept_page.passages(share, lm.tokenizer, iter([blocks[:100], blocks[100:]]), count=3)
    assert shown[-1].endswith(" ".join(lm.tokenizer.decode(blocks).split()[-3:])) or len(share) % 12
    assert torch.all(share <= 1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("Who?\n", "read a text with /read FILE"),
        ("/memory\n", "read a text with /read FILE"),
        ("/red x\n", "/red is unknown; did you mean /read?"),
        ("/read\n", "/read needs a file; write /read FILE"),
        ("/read no.txt\n", "no.txt: no such file"),
        ("/load no.chat\n", "no.chat does not exist"),
        ("/back\n", "/back has nowhere to go"),
        ("/fork all of it\n", '/fork takes nothing, and "all of it" is given; say /fork alone'),
    ],
)
def test_from_a_pipe_the_first_mistake_ends_the_command(chat: Chat, lines: str, said: str) -> None:
    code, out, err = chat(lines + "/help\n")
    assert (code, out, said in err) == (2, "", True), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget-share", 0.1], "--budget-share 0.1 depends on one text's length"),
        (["--prompt-file", "-"], "--prompt-file - is standard input"),
        (["--prompt-file", "a", "--context", "b"], "so --prompt-file a comes too late"),
        (["--context", "no.chat"], "no.chat does not exist"),
        (["--prompt-file", "no.txt"], "no.txt: no such file"),
        (["--template", "lama"], "--template lama is not one of"),
        (["--budget", 0], "budget"),
        (["--max-new-tokens", 10**12], "together need a cache of"),
    ],
)
def test_options_that_make_no_sense_are_refused(chat: Chat, arguments: list[object], said: str) -> None:
    code, out, err = chat("Who?\n", *arguments)
    assert (code, out, said in err) == (2, "", True), err


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, line: list[str], folder: Path) -> None:
        import pty

        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "dumb"}
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def press_until(self, key: str, text: str) -> None:
        """Press a key every other second until a text is shown."""
        for _ in range(20):
            self.type(key)
            try:
                return self.wait_for(text, 2)
            except AssertionError:
                continue
        raise AssertionError(self.shown)

    def wait_for(self, text: str, seconds: float = 90) -> None:
        """Read until a text is shown after what has been waited for before."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.ours, 4096).decode(errors="replace")
                except OSError:  # the process is gone
                    assert text in self.shown, self.shown
        self.shown = self.shown.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no terminals of this kind")
def test_ctrl_c_ends_an_answer_and_ctrl_d_leaves(backbone: Path, heads: Path, text: Path, tmp_path: Path) -> None:
    pair = ["--model", str(backbone), "--heads", str(heads), "--max-new-tokens", "100000", "--budget", "64"]
    at = Terminal([*MODULE, *pair, "--prompt-file", str(text)], tmp_path)
    try:
        at.wait_for("> ")
        at.type("/mem\n")
        at.wait_for("did you mean /memory?")
        at.wait_for("> ")
        at.type("Who?\n")
        at.wait_for("\n")
        time.sleep(2)  # into the answer, of which words are shown whole
        at.type("\x03")
        at.wait_for("(stopped)")
        at.wait_for("> ")
        at.type("/memory\n")
        at.wait_for("tokens read")
        at.wait_for("> ")
        at.type("never said")
        at.wait_for("never said")
        at.press_until("\x03", "> ")  # readline sees a signal that comes while it does not wait with the next key only
        time.sleep(0.5)
        at.type("\x04")
        assert at.process.wait(60) == 0
    finally:
        at.process.kill()
        at.process.wait()
        os.close(at.ours)
