"""`locret-chat`: a conversation with a document, from a pipe and at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from locret import LongContextModel
from locret.cli.command import run
from locret.infer import chat_command
from locret.infer.chat_command import command

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


def test_a_saved_point_can_be_gone_back_to(chat: Chat, text: Path) -> None:
    code, out, err = chat("Who?\n/memory\n/save a.chat\nWhy?\n/load a.chat\n/memory\nWhy?\n", "--prompt-file", text)
    assert code == 0, err
    _, before, first, after, second = out.splitlines()
    assert before.split(" read")[0] == after.split(" read")[0]
    assert first == second


def test_a_text_is_read_later_and_a_context_is_loaded(chat: Chat, text: Path, backbone: Path, heads: Path) -> None:
    lm = LongContextModel.from_pretrained(backbone, heads=heads, dtype="float32", device="cpu")
    lm.read(text).save("a.ctx")
    code, out, err = chat(f"/read {text}\nWho?\n/load a.ctx\nWho?\n")
    first, second = out.splitlines()
    assert (code, first) == (0, second), err
    assert "nothing has been read yet" in err
    code, out, err = chat("Who?\n", "--context", "a.ctx", "--budget", 24, "--system", "Be brief.")
    assert (code, out) == (0, f"{first}\n")
    assert "--context a.ctx has been read already, so --budget, --system is for what /read reads" in err
    assert "Chat('text.txt': 0 turns" in err


@pytest.mark.slow
def test_a_saved_chat_needs_nothing_that_its_file_says(chat: Chat, text: Path) -> None:
    for method, reads in (("locret", True), ("streaming", False)):
        tiny = ("--model", "checkpoints/tiny", "--method", method, "--budget", 64, "--max-new-tokens", 5)
        heads = ("--heads", "checkpoints/tiny-heads") if reads else ()
        said = chat("Who?\n/save a.chat\nWhy?\n", *tiny, *heads, "--prompt-file", text, pair=False)[1].splitlines()
        lines = f"Why?\n/load a.chat\nWhy?\n/read {text}\nWho?\n"
        code, out, err = chat(lines, "--context", "a.chat", "--budget", 64, "--max-new-tokens", 5, pair=False)
        assert "a.chat names the backbone" in err
        assert out.splitlines() == [said[1], said[1], said[0]][: 3 if reads else 2], err
        assert (code, "nothing rates what is read here" in err) == ((0, False) if reads else (2, True))
    code, _, err = chat("Who?\n", pair=False)
    assert (code, "--model is missing; give a backbone, or --context FILE" in err) == (2, True)


def test_what_stayed_is_shown_layer_by_layer_and_turn_by_turn(chat: Chat, text: Path) -> None:
    code, out, err = chat("Who?\n/kept\n", "--prompt-file", text)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[1] == "kept by each layer, from the beginning of the text to its end"
    assert [line.split("|")[0].strip() for line in lines[2:4]] == ["0", "1"]
    assert "units per KV head that stayed of each message" in lines


def test_from_a_pipe_the_first_mistake_ends_the_command(chat: Chat) -> None:
    for lines, said in (
        ("Who?\n", "nothing has been read yet; read a text with /read FILE"),
        ("/red x\n", "/red is unknown; did you mean /read?"),
        ("/read\n", "/read needs a file; write /read FILE"),
        ("/read no.txt\n", "no.txt: no such file"),
        ("/back\n", 'locret-chat "/back" was retired: /save FILE and /load FILE return to a point'),
        ("/memory all of it\n", '/memory takes nothing, and "all of it" is given; say /memory alone'),
    ):
        code, out, err = chat(f"\n{lines}/help\n")
        assert (code, out, f"line 2 ends the chat: {said}" in err) == (2, "", True), err


def test_options_that_make_no_sense_are_refused(chat: Chat) -> None:
    for arguments, said in (
        (["--keep", 0.1], "--keep 0.1 depends on one text's length"),
        (["--prompt-file", "-"], "--prompt-file - is standard input"),
        (["--prompt-file", "a", "--context", "b"], "so --prompt-file a comes too late"),
        (["--context", "no.chat"], "no.chat does not exist"),
    ):
        code, out, err = chat("Who?\n", *arguments)
        assert (code, out, said in err) == (2, "", True), err


def test_ctrl_c_at_a_terminal_ends_an_answer_and_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    class Talk:
        def take(self, line: str) -> bool:
            said.append(line)
            if line == "Who?":
                raise KeyboardInterrupt
            if line == "/red":
                raise ValueError("/red is unknown")
            return line != "/quit"

    monkeypatch.setattr(chat_command, "_typed", lambda: iter(["Who?", "/red", "Why?", "/quit", "never"]))
    chat_command._talk(Talk())  # type: ignore[arg-type]
    assert said == ["Who?", "/red", "Why?", "/quit"]
    assert capsys.readouterr().err == "(stopped)\n/red is unknown\n"
