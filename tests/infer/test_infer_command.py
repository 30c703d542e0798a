"""`locret-infer` from the command line: what it prints, how its options combine, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from locret import LongContextModel, RetainingHeads, generate, scorers
from locret.cli.command import warnings_as_lines
from locret.conversation.chat import AnswerStreamer
from locret.conversation.document import Document, decode
from locret.conversation.turns import Transcript

QUESTION = "What is the pass key?"
FULL = ("--budget", 8000, "--stabilizers", 0, "--chunk-size", 700)
Infer = Callable[..., Any]


@pytest.fixture
def usual(backbone: Path, heads: Path, text: Path) -> tuple[object, ...]:
    return ("--model", backbone, "--heads", heads, "--prompt-file", text, "--max-new-tokens", 12)


@pytest.fixture
def ask(infer: Infer, backbone: Path, heads: Path, text: Path) -> Infer:
    """Return a function that asks for JSON with the usual arguments and more, and returns the record."""

    def call(*more: object) -> Any:
        given = {str(argument).partition("=")[0] for argument in more}
        usual = {"--model": backbone, "--heads": heads, "--prompt-file": text, "--question": QUESTION}
        if "--scorer" in given:
            del usual["--heads"]
        arguments = [part for pair in usual.items() if pair[0] not in given for part in pair]
        outcome = infer(*arguments, "--json", "--max-new-tokens", 12, *more)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return call


@pytest.fixture
def plain(backbone: Path, text: Path) -> Infer:
    """Return a function that answers with transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def call(**options: Any) -> str:
        tokenizer = AutoTokenizer.from_pretrained(backbone)
        model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
        before, after = Transcript(tokenizer, "chat").around(QUESTION)
        ids = tokenizer(before + text.read_text().strip() + after, return_tensors="pt").input_ids
        out = model.generate(input_ids=ids, max_new_tokens=12, **{"do_sample": False, **options})
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return call


def test_printed_json_and_python_answers_agree_and_numbers_are_consistent(
    ask: Infer, infer: Infer, usual: tuple[object, ...], backbone: Path, heads: Path, text: Path
) -> None:
    record = ask()
    assert (record["model"], record["scorer"], record["device"]) == (str(backbone), str(heads), "cpu")
    assert 64 + 8 < record["kept_units"] < 64 + 8 + 32, "what stays of the text, and the question"
    assert record["prefill_tokens_per_second"] == pytest.approx(record["prompt_tokens"] / record["prefill_seconds"])
    assert record["dtype"] == "float32", "bfloat16 is the checkpoint's, but this is a CPU"
    printed, quiet = (infer(*usual, "--question", QUESTION, *more) for more in ((), ("--quiet",)))
    assert printed.out == quiet.out == record["answer"] + "\n"
    assert f"kept {record['kept_units']} units per KV head (" in printed.err
    assert (printed.err.count("\n"), quiet.err) == (1, ""), "nothing but the summary"
    lm = LongContextModel.from_pretrained(backbone, heads=heads, dtype="float32", device="cpu")
    measured = lm.read(text).ask(QUESTION, max_new_tokens=12, measured=True)
    for name in ("answer", "kept_units", "prompt_tokens"):
        assert getattr(measured, name) == record[name]
    chat = lm.read(text).chat()
    chat.measured(QUESTION, lm.settings(12, {}))
    assert chat.cache.memory().units == record["kept_units"] + record["new_tokens"] - 1
    aware = ask("--protocol", "aware")
    assert (aware["kept_units"], aware["prompt_tokens"]) == (64 + 8, record["prompt_tokens"])


def test_where_everything_stays_answers_are_those_of_transformers_alone(ask: Infer, plain: Infer) -> None:
    kept, (_, again) = ask("--compare-full"), ask("--compare-full", *2 * ("--question", QUESTION))["answers"]
    assert kept["full"]["peak_cache_bytes"] > 10 * kept["peak_cache_bytes"]
    assert again["answer"] == kept["answer"]
    for record in (kept["full"], again["full"], ask(*FULL), ask("--scorer", "full")):
        assert record["answer"] == plain()
        assert record["kept_units"] == record["prompt_tokens"] > kept["kept_units"]


def test_each_question_is_answered_as_if_it_were_the_only_one(
    infer: Infer, usual: tuple[object, ...], tmp_path: Path
) -> None:
    asked = [QUESTION, "Who, then: you?"]
    alone = [json.loads(infer(*usual, "--question", one, "--json").out)["answer"] for one in asked]
    recipe = tmp_path / "asked.yaml"
    recipe.write_text(f"question: [{json.dumps(asked[0])}, {json.dumps(asked[1])}]\n")
    ways = (["--question", asked[0], "--question", asked[1]], ["--config", recipe])
    for way in ways:
        record = json.loads(infer(*usual, *way, "--json").out)
        assert [(one["question"], one["answer"]) for one in record["answers"]] == list(zip(asked, alone, strict=True))
    printed = infer(*usual, *ways[0]).out
    assert printed == f"> {asked[0]}\n{alone[0]}\n\n> {asked[1]}\n{alone[1]}\n"


def test_standard_input_is_read_like_a_file(ask: Infer, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with text.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert ask("--prompt-file", "-")["answer"] == ask()["answer"]


@pytest.mark.parametrize("method", [[], ["--method", "locret"], ["--method", "locret+pyramid"]])
def test_shipped_heads_decide_where_nobody_names_others(infer: Infer, text: Path, method: list[str]) -> None:
    run = infer("--model", "checkpoints/tiny", "--prompt-file", text, "--dry-run", *method)
    assert "checkpoints/tiny-heads are shipped with this toolkit for this backbone" in run.err, run.err
    assert json.loads(run.out)["policy"]["layer_budgets"] == ("pyramid" if "locret+pyramid" in method else "uniform")


def test_dry_run_reads_neither_weights_nor_prompt(ask: Infer, backbone: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((backbone / "config.json").read_text())
    record = ask("--model", tmp_path, "--prompt-file", "-", "--dry-run", "--top-k", 2, "--temperature", 1)
    assert record["planned_cache_bytes"] == ask("--prompt-file", "-", "--dry-run")["planned_cache_bytes"]
    assert (record["options"]["top_k"], record["policy"]["budget"]) == (2, 64)


def test_bars_are_drawn_on_a_terminal_alone_and_elsewhere_ours_are_lines(
    infer: Infer, usual: tuple[object, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings_as_lines("locret-infer", quiet=False):
        assert list(tqdm([1])) == [1]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("locret.cli.command.LINES_EVERY", 0)
    said = infer(*usual, "--question", QUESTION, "--compare-full").err
    for name in ("reading", "reading for --compare-full"):
        assert re.search(rf"^{name}: +\d+%\| [\d.k]+ of [\d.k]+ B, \d\d:\d\d gone, \d\d:\d\d left$", said, re.MULTILINE)
    assert "gone" not in infer(*usual, "--question", QUESTION, "--quiet").err
    assert list(tqdm([1])) == [1]
    assert "1/1" in capsys.readouterr().err


def test_options_of_an_answer_are_heard(ask: Infer) -> None:
    whole = ask()["answer"]
    stop = whole.split()[3]
    stopped = ask(f"--stop={stop}")
    assert (stopped["answer"], stopped["finished"]) == (whole[: whole.index(stop) + len(stop)], True)
    drawn = [ask("--temperature", 1.5, "--top-k", 50, "--seed", seed)["answer"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    bounded = ask("--max-new-tokens", 150, "--stop=<never>", "--decode-budget", 80, "--decode-interval", 4)
    assert (bounded["new_tokens"], bounded["peak_cache_bytes"] < 150 * 256) == (150, True), "not the whole answer"


def test_scorers_by_name_take_options_and_without_any_a_fallback_is_named(
    ask: Infer, infer: Infer, backbone: Path, text: Path
) -> None:
    small = ("--budget", 64, "--stabilizers", 0, "--chunk-size", 32, "--local-len", 8)
    answers = [ask("--scorer", f"random:seed={seed}", *small) for seed in (0, 1)]
    assert [one["scorer"] for one in answers] == ["random:seed=0", "random:seed=1"]
    assert answers[0]["answer"] != answers[1]["answer"]
    outcome = infer("--model", backbone, "--prompt-file", text, "--json", *small, "--max-new-tokens", 2)
    assert outcome.err.count("decides which units stay") == 1
    assert json.loads(outcome.out)["scorer"] == scorers.FALLBACK


def test_positions_beyond_the_context_are_warned_about_once(infer: Infer, usual: tuple[object, ...]) -> None:
    longer = (*usual, *2 * usual[4:6])  # the text three times
    assert "warning" not in infer(*longer).err
    err = infer(*longer, "--positions", "original").err
    assert err.count("warning") == 1
    assert "beyond 4096, the longest context of this backbone" in err


def test_evidence_is_said_of_the_same_answer(infer: Infer, usual: tuple[object, ...]) -> None:
    call = (*usual, "--question", QUESTION, "--question", "Who?", "--temperature", "0.8", "--seed", "3")
    plain, own = (json.loads(infer(*call, *more, "--json").out)["answers"] for more in ([], ["--evidence"]))
    assert [one["answer"] for one in own] == [one["answer"] for one in plain]


REFUSED = {
    "--budget 0": "--budget 0 is too small; it must be 1 or more",
    "--model checkpoints/tinny": "--model checkpoints/tinny: there is no such folder",
    "--model checkpoints/tiny-heads": "holds retaining heads",
    "--heads {other}": "num_hidden_layers is 3 in the heads and 2 in the model",
    "--scorer streaming": "exclude each other",
    "--device tpu": "--device tpu is unknown",
    "--attn math": "--attn math is not one of auto, sdpa, flash_attention_2",
    "--attn flash_attention_2": "locret[flash]",
    "--question {blank}": "--question is empty",
    "--prompt-file {nothing}": "--prompt-file nothing.txt is empty; give a text to read",
    "--head-budgets shares --when prompt_end": "all of them; leave both out, or use --head-budgets uniform",
    "--temperature 1e-40": "--temperature 1e-40",
    "--top-p 0.5": "set a temperature",
    "--context a.ctx": "locret-context ask",
    "--adapter no/such/adapter": "--adapter no/such/adapter cannot be put on",
    "--question a --question b --protocol aware": "--protocol aware needs one --question, which is read with the text",
    "--question a --turns text --protocol aware": "--turns text changes nothing here",
    "--questions a.txt": "was retired: give --question TEXT once for each",
    "--question a --engine llamacpp": "--engine llamacpp writes with a GGUF file on this machine; name it with --model",
    "--engine llamacpp": "--engine llamacpp answers a --question, without --evidence",
    "--evidence": "--evidence is about an answer, but nothing is asked",
    "--question a --evidence --reread a.txt": "was retired: --compare-full answers once more with every unit kept",
    "--protect message:9": "--protect message:9 is none of 1 messages",
    "--protect document=0.5 --protect document": "--protect document=0.5 adds nothing to document",
    "--recall-by exact:page=16": "--recall-by exact:page=16 changes nothing without --recall",
    "--host-budget 1000000000000 --recall 4": "bytes of host memory, but this machine has",
    "--budget 64 --kv-memory 1MiB": "--budget 64 and --kv-memory 1MiB exclude each other; drop one",
    "--kv-memory 4KiB": "--kv-memory 4KiB is too small, for even a budget of 1 takes ",
    "--scorer streaming --recall-by infllm --kv-memory 4KiB": "even a budget of 21 takes",
    "--kv-memory 1MiB --when prompt_end": "--kv-memory 1MiB bounds the cache",
    "--max-new-tokens 1000000000000": "together need a cache of ",
    "--question a --num-beams 2": "was retired: context.ask(TEXT, num_beams=N) searches beams in Python",
    "--scorer full --budget 64": "--budget 64 means nothing to full, which keeps every unit",
}
"""A line, and what it is refused with; of one with a scorer and its numbers, the usual heads are left out."""
WITH_WEIGHTS = ("--adapter no/such/adapter", "--protect message:9")
"""Lines that are refused once the backbone has been loaded, or while the text is read."""


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_are_one_sentence_with_setting_value_and_way_out(
    infer: Infer, usual: tuple[Any, ...], backbone: Path, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    if line not in WITH_WEIGHTS:
        monkeypatch.setattr("locret.loading.load_model", lambda *_: pytest.fail("weights were loaded"))
    usual = usual if not line.startswith("--scorer") or line.count("--") == 1 else (*usual[:2], *usual[4:])
    if "{other}" in line:
        config = AutoConfig.from_pretrained(backbone)
        config.num_hidden_layers = 3
        RetainingHeads.for_model(config, hidden_dim=8).save_pretrained(tmp_path / "other")
    (nothing := tmp_path / "nothing.txt").write_text("\n \n")
    named = {"nothing": nothing, "other": tmp_path / "other"}
    words = line.format(**named, blank="{blank}").split()
    outcome = infer(*usual, *(" " if word == "{blank}" else word for word in words))
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert len(outcome.err.strip().splitlines()) == 1, outcome.err
    assert REFUSED[line] in outcome.err


def test_streamed_lines_keep_their_indentation_and_each_part_comes_as_soon_as_it_is_known() -> None:
    # A tokenizer that drops the space before a text's first word, as Llama-2's and Phi-3's do.
    vocabulary = ["<unk>", "<0x0A>", "▁", "▁▁", "▁def", "▁return", "▁x", "x", ":"]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    ids, written, after = [4, 6, 8, 1, 3, 5, 6, 1, 1, 3, 6, 7], list[str](), list[str]()
    streamer = AnswerStreamer(tokenizer, written.append)
    streamer.put(torch.tensor([[4, 4]]))  # the prompt
    for token in ids:
        streamer.put(torch.tensor([token]))
        after.append("".join(written))
    streamer.end()
    assert after[:5] == ["def", "def x", "def x:", "def x:\n", "def x:\n  "]
    assert "".join(written) == decode(tokenizer, ids) == "def x:\n   return x\n\n   xx"


@pytest.fixture(scope="module")
def lm(backbone: Path) -> LongContextModel:
    return LongContextModel.from_pretrained(backbone, scorer="random", dtype="float32")


def test_a_question_read_with_its_text_is_the_chat_template_around_both(lm: LongContextModel) -> None:
    pieces = ["\n  The ", "tower", " ", "\n", " waits.", " \n", "\n"]
    chat = lm.converse(Document("text", iter(pieces)), "Where?", progress=False)
    messages = [{"role": "user", "content": "The tower \n waits.\n\nWhere?"}]
    ids = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert chat.cache.seen == ids.shape[1]
    # This refuses a cache of other ids.
    out = generate(lm.model, ids, cache=chat.cache.copy(), max_new_tokens=4, do_sample=False)
    assert chat.say("Where?", max_new_tokens=4) == decode(lm.tokenizer, out[0, ids.shape[1] :].tolist())


def test_plain_text_keeps_its_white_space(backbone: Path) -> None:
    plain = LongContextModel.from_pretrained(backbone, scorer="random", dtype="float32", template="none")
    context = plain.read("\nThe tower\n", progress=False)
    chat = context.chat()
    chat.read_turn(None, 1)
    assert chat.cache.seen == len(plain.tokenizer("\nThe tower\n").input_ids)
