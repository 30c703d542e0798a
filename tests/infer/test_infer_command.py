"""`locret-infer` from the command line: what it prints, how its options combine, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer_cases import write_text

from locret.conversation.turns import Transcript

QUESTION = "What is the pass key?"
KEYS = {
    "answer", "prompt_tokens", "new_tokens", "kept_units", "final_units", "planned_cache_bytes", "peak_cache_bytes",
    "peak_device_bytes", "prefill_seconds", "decode_seconds", "prefill_tokens_per_second",
    "decode_tokens_per_second", "finished", "model", "scorer", "policy", "device", "dtype", "versions",
    "planned_host_bytes", "host_bytes", "planned_disk_bytes", "disk_bytes", "moved_bytes",
}  # fmt: skip
Infer = Callable[..., Any]


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

    def call(prepare: Callable[[Any], Any] = lambda model: model, **options: Any) -> str:
        tokenizer = AutoTokenizer.from_pretrained(backbone)
        model = prepare(AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)).eval()
        before, after = Transcript(tokenizer, "chat").around(QUESTION)
        ids = tokenizer(before + text.read_text().strip() + after, return_tensors="pt").input_ids
        out = model.generate(input_ids=ids, max_new_tokens=12, **{"do_sample": False, **options})
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return call


FULL = ("--budget", 8000, "--stabilizers", 0, "--chunk-size", 700)


@pytest.mark.slow
def test_json_has_every_key_and_consistent_numbers(ask: Infer, backbone: Path, heads: Path) -> None:
    record = ask()
    assert set(record) == KEYS
    assert (record["model"], record["scorer"], record["device"]) == (str(backbone), str(heads), "cpu")
    assert 64 + 8 < record["kept_units"] < 64 + 8 + 32, "what stays of the text, and the question"
    assert record["final_units"] == record["kept_units"] + record["new_tokens"] - 1
    assert record["prefill_tokens_per_second"] == pytest.approx(record["prompt_tokens"] / record["prefill_seconds"])
    assert record["versions"]["torch"] == torch.__version__
    assert record["dtype"] == "float32", "bfloat16 is the checkpoint's, but this is a CPU"


@pytest.mark.slow
def test_whole_budget_answers_like_transformers_alone(ask: Infer, plain: Infer) -> None:
    assert ask(*FULL)["answer"] == plain()


@pytest.mark.slow
def test_beam_search_answers_like_transformers_alone_and_counts_its_copy(ask: Infer, plain: Infer) -> None:
    record = ask(*FULL, "--num-beams", 3)
    assert record["answer"] == plain(num_beams=3)
    assert record["peak_cache_bytes"] > 3 * ask(*FULL)["peak_cache_bytes"]
    assert record["peak_cache_bytes"] <= record["planned_cache_bytes"]


@pytest.mark.slow
def test_lora_adapter_is_used(ask: Infer, plain: Infer, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def save(model: Any) -> Any:
        torch.manual_seed(1)
        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(model, settings).save_pretrained(tmp_path / "lora")
        return model

    plain(save)
    expected = plain(lambda model: PeftModel.from_pretrained(model, tmp_path / "lora"))
    assert expected != plain()
    assert ask(*FULL, "--adapter", tmp_path / "lora")["answer"] == expected


@pytest.mark.slow
def test_streaming_prints_the_text_of_the_json_answer(
    ask: Infer, infer: Infer, backbone: Path, heads: Path, text: Path
) -> None:
    arguments = ("--model", backbone, "--heads", heads, "--prompt-file", text, "--question", QUESTION)
    outcome = infer(*arguments, "--max-new-tokens", 12)
    assert outcome.code == 0
    assert outcome.out == ask()["answer"] + "\n"
    assert f"kept {ask()['kept_units']} units per KV head; wrote 12 tokens" in outcome.err
    assert outcome.err.count("\n") == 1, "nothing but the summary"
    quiet = infer(*arguments, "--max-new-tokens", 12, "--quiet")
    assert (quiet.out, quiet.err) == (outcome.out, "")


@pytest.mark.slow
def test_standard_input_is_read_like_a_file(
    ask: Infer, infer: Infer, backbone: Path, heads: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask()["answer"]
    with text.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert ask("--prompt-file", "-")["answer"] == expected
    with text.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        arguments = ("--model", backbone, "--heads", heads, "--question", QUESTION, "--max-new-tokens", 12)
        assert infer(*arguments).out == expected + "\n"


@pytest.mark.slow
def test_ten_times_the_text_takes_the_same_bytes_and_as_planned(ask: Infer, tmp_path: Path) -> None:
    short, long = ask(), ask("--prompt-file", write_text(tmp_path / "long.txt", 200_000))
    assert long["prompt_tokens"] > 9 * short["prompt_tokens"]
    unit = short["peak_cache_bytes"] / (short["final_units"] + 1)
    asked = short["kept_units"] - 72
    for record in (short, long):
        assert record["peak_cache_bytes"] <= record["planned_cache_bytes"]
        assert record["peak_cache_bytes"] <= ask("--dry-run")["planned_cache_bytes"] + (asked + 1) * unit
    assert ask("--dry-run")["planned_cache_bytes"] == ask("--protocol", "aware")["planned_cache_bytes"]


def test_dry_run_reads_neither_weights_nor_prompt(ask: Infer, backbone: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((backbone / "config.json").read_text())
    record = ask("--model", tmp_path, "--prompt-file", tmp_path / "missing", "--dry-run", "--num-beams", 2)
    assert record["planned_cache_bytes"] == 3 * ask("--dry-run")["planned_cache_bytes"]
    assert record["options"]["num_beams"] == 2
    assert record["policy"]["budget"] == 64


@pytest.mark.slow
def test_short_prompt_allocates_no_more_than_itself(ask: Infer, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The pass key is 48213.")
    record = ask("--prompt-file", tmp_path / "short.txt", *FULL)
    assert record["kept_units"] == record["prompt_tokens"] < 40
    assert record["peak_cache_bytes"] < ask(*FULL)["peak_cache_bytes"] / 50


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.slow
def test_decode_budget_bounds_a_long_answer(ask: Infer, positions: str) -> None:
    arguments = ("--max-new-tokens", 150, "--positions", positions, "--stop=<never>")
    grown = ask(*arguments)
    bounded = ask(*arguments, "--decode-budget", 80, "--decode-interval", 4)
    assert grown["new_tokens"] == bounded["new_tokens"] == 150
    assert grown["final_units"] == grown["kept_units"] + 149
    assert bounded["final_units"] <= 80
    assert bounded["peak_cache_bytes"] < grown["peak_cache_bytes"]


@pytest.mark.parametrize("counted", [(), ("--memory", "linear")])
def test_an_answer_is_no_part_of_the_protected_question(ask: Infer, counted: tuple[str, ...]) -> None:
    arguments = ("--max-new-tokens", 150, "--decode-budget", 80, "--decode-interval", 4, "--stop=<never>")
    record = ask(*arguments, *counted, "--protect", "question", "--kept")
    assert record["new_tokens"] == 150
    *_, question = record["messages"]
    assert (question["role"], question["protected"]) == ("user", "all")


def test_policy_is_the_users_then_the_heads_then_the_default(ask: Infer, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("chunk_size: 48\nlocal_len: 4\n")
    policy = ask("--config", tmp_path / "recipe.yaml", "--local-len", 5, "--dry-run")["policy"]
    assert (policy["local_len"], policy["chunk_size"]) == (5, 48), "flags beat the recipe, which beats the heads"
    assert (policy["budget"], policy["stabilizers"]) == (64, 16), "the heads'"
    assert policy["decode_interval"] == 64, "the default"
    assert ask("--scorer", "streaming", "--dry-run")["policy"]["budget"] == 6000


def test_scorers_by_name_take_options(ask: Infer) -> None:
    small = ("--budget", 64, "--stabilizers", 0, "--chunk-size", 32, "--local-len", 8)
    answers = [ask("--scorer", "random", "--scorer-options.seed", seed, *small) for seed in (0, 1)]
    assert [one["scorer"] for one in answers] == ["random:seed=0", "random:seed=1"]
    assert answers[0]["answer"] != answers[1]["answer"]
    short = ask("--scorer", "random:seed=1", *small)
    assert (short["scorer"], short["answer"]) == (answers[1]["scorer"], answers[1]["answer"])


@pytest.mark.slow
def test_sampling_follows_the_seed(ask: Infer) -> None:
    answers = [ask("--temperature", 1.5, "--top-k", 50, "--seed", seed)["answer"] for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.slow
def test_stop_text_ends_the_answer(ask: Infer) -> None:
    whole = ask()["answer"]
    stop = whole.split()[3]
    stopped = ask(f"--stop={stop}")
    assert stopped["answer"] == whole[: whole.index(stop) + len(stop)]
    assert stopped["finished"]


@pytest.mark.slow
def test_plain_kernel_agrees_with_the_fused_ones(ask: Infer) -> None:
    assert ask("--attn", "math")["answer"] == ask("--attn", "sdpa")["answer"]


@pytest.mark.slow
def test_no_template_reads_the_text_as_it_is(ask: Infer, infer: Infer, backbone: Path, heads: Path) -> None:
    assert ask("--template", "none")["prompt_tokens"] < ask("--system", "Answer with a number.")["prompt_tokens"]


@pytest.mark.slow
def test_true_positions_beyond_the_context_are_warned_about_once(
    infer: Infer, backbone: Path, heads: Path, text: Path
) -> None:
    arguments = ("--model", backbone, "--heads", heads, "--prompt-file", text, "--max-new-tokens", 2)
    assert "warning" not in infer(*arguments).err
    err = infer(*arguments, "--positions", "original").err
    assert err.count("warning") == 1
    assert "beyond 4096, the longest context of this backbone" in err
    assert "compact positions" in err


def test_picture_is_drawn(ask: Infer, tmp_path: Path) -> None:
    ask("--picture", tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.png"]


@pytest.mark.slow
def test_process_reads_a_pipe_and_leaves_with_the_code_of_a_mistake(backbone: Path, heads: Path, text: Path) -> None:
    line = [sys.executable, "-m", "locret.infer.command", "--model", str(backbone), "--heads", str(heads)]
    good = subprocess.run([*line, "--max-new-tokens", "3"], input=text.read_text(), capture_output=True, text=True)
    assert (good.returncode, len(good.stdout.split()) > 0) == (0, True)
    bad = subprocess.run([*line, "--budget", "0"], input="", capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.endswith("budget=0 is too small; it must be 1 or more\n")
    assert "Traceback" not in bad.stderr


def test_help_shows_every_option_with_its_text(infer: Infer) -> None:
    outcome = infer("--help", "all")
    assert outcome.code == 0
    for flag in ("--model", "--heads", "--scorer", "--budget", "--prompt-file", "--max-new-tokens", "--json"):
        assert flag in outcome.out
    assert "Cache units kept per layer and KV head" in outcome.out


def test_heads_auto_are_the_shipped_ones_for_the_embedded_backbone(infer: Infer, text: Path) -> None:
    options = ("--model", "checkpoints/tiny", "--prompt-file", text, "--question", QUESTION, "--heads", "auto")
    outcome = infer(*options, "--json", "--max-new-tokens", 2)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["scorer"].endswith("checkpoints/tiny-heads")
    assert "tiny-heads, which are shipped with this toolkit" in outcome.err


def test_a_question_is_read_with_its_text_only_if_that_is_asked_for(ask: Infer) -> None:
    aware, apart = ask("--protocol", "aware"), ask()
    assert aware["kept_units"] == 64 + 8
    assert aware["prompt_tokens"] == apart["prompt_tokens"]


@pytest.mark.slow
def test_an_answer_is_compared_with_that_of_all_units(ask: Infer, plain: Infer) -> None:
    record = ask("--compare-full")
    assert record["full"]["answer"] == plain()
    assert record["full"]["kept_units"] == record["prompt_tokens"] > record["kept_units"]
    assert record["full"]["peak_cache_bytes"] > 10 * record["peak_cache_bytes"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--protocol", "aware", "--question=Who?"), "--protocol aware reads the text with its question"),
        (("--compare-full", "--question=Who?"), "--compare-full compares one answer"),
        (("--compare-full", "--prompt-file", "-"), "--compare-full reads the text twice"),
    ],
)
def test_what_does_not_go_together_is_refused(
    infer: Infer, backbone: Path, heads: Path, text: Path, more: tuple[str, ...], said: str
) -> None:
    usual = () if "--prompt-file" in more else ("--prompt-file", text)
    refused = infer("--model", backbone, "--heads", heads, *usual, "--question", QUESTION, *more)
    assert refused.code == 2
    assert said in refused.err
