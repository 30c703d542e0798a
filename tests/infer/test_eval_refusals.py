"""Mistakes are refused before anything is written: one sentence, exit code 2, and the way out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from published_cases import published

from locret.cli.command import run
from locret.infer.evaluation.command import command

PUBLISHED = "--methods full --data-dir DATA --tasks"
MULTIKEY = "--tasks multikey --lengths 500 --task-options '{\"multikey\": {%s}}'"
REFUSED = [
    # Names.
    ("--methods kvpress/snapkv", 'method "kvpress/snapkv" was retired; release 0.1.0 (git tag lab-frozen) is the'),
    ("--methods streeming", 'method "streeming" is unknown; did you mean streaming'),
    ("--methods locret", "--methods locret needs trained heads; give --heads, or leave it out"),
    ("--suite leval-locrett", 'suite "leval-locrett" is unknown; did you mean leval-locret'),
    (MULTIKEY % '"chit": 3', 'it has no option "chit"; did you mean chat?'),
    (MULTIKEY % '"limit": "many"', "limit='many' must be a whole number, 1 or more"),
    ('--tasks passkey --task-options \'{"number": {"chat": false}}\'', "speaks of number, which is not among --tasks"),
    # Numbers.
    ("--budget many", "--budget many is not possible"),
    ("--budget 16 --stabilizers 32", "stabilizers=32"),
    ("--samples 0", "--samples 0 is not possible; give 1 to 1000000"),
    ("--tasks multikey --lengths 100", "tokens=100 cannot hold a row of ruler/niah_multikey_1"),
    ("--budget-share 0.1,2", "--budget-share 0.1,2 is not possible"),
    # What cannot end.
    # Options that contradict each other, or change nothing.
    ("--resume --overwrite", "--resume and --overwrite exclude each other"),
    ("--suite leval-locret --tasks passkey", "--suite leval-locret and --tasks exclude each other"),
    ("--suite ruler-4k --lengths 64", "--suite ruler-4k reads 4,096 tokens; drop --lengths, or choose another suite"),
    ("--budget-share 0.1 --budget 64", "--budget 64 and --budget-share 0.1 exclude each other; drop one"),
    ("--allow-other-base", "--allow-other-base is about --heads, which are not given; add them, or drop it"),
    ("--max-prompt 100", "--max-prompt 100 cannot cut prompts of niah/passkey, which are made to --lengths 2048"),
    ("--tasks longbench/qasper --template chatty", "--template chatty is unknown; choose one of chat"),
    ("--tasks sirllm/rock --budget 64 --lengths 64", "--lengths is for prompts that are made here, but those of sir"),
    ("--pyramid-beta 10", "--pyramid-beta 10 changes nothing without --layer-budgets pyramid; add that, or"),
    # Methods that cannot work.
    ("--methods random,snapkv --decode-budget 80 --decode-interval 4 --budget 64", "method snapkv: decode_budget=80 "),
    ("--methods snapkv+shares --budget 64", 'method snapkv+shares: layer_budgets="shares" needs a share of'),
    ("--methods random_answer", "without --decode-budget none are; give it, or take random"),
    ("--methods full --decode-budget 60 --budget 48", "--decode-budget 60 means nothing to full, so it would change"),
    # Sessions and questions.
    ("--tasks sirllm/rock --methods random,oracle", "method oracle knows the answer to one prompt, and sirllm/rock is"),
    ("--tasks sirllm/rock --budget-share 0.1", "is a share of a whole prompt, and sirllm/rock is a session, whose"),
    ("--tasks scbench/kv --protocol agnostic", "scbench/kv is a session, whose turns follow each other"),
    ("--tasks infinitebench/math_find --protocol aware,agnostic", "math_find asks before its document; leave one out"),
    ("--protocol blind", "--protocol blind is unknown; choose aware or agnostic, or aware,agnostic"),
    ("--questions 5", "--questions 5 asks several questions of a text, but no text of niah/passkey"),
    ("--tasks ruler/vt --lengths 1000 --methods oracle_agnostic", "ruler/vt does not say which there are; leave one"),
    ("--tasks ruler/vt --lengths 1000 --protocol agnostic", "ruler/vt does not say where its questions begin"),
    # Rows that are not there.
    (f"{PUBLISHED} leval/codeU", "holds no rows of leval/codeU; looked for leval/LEval-data"),
    ("--methods full --data-dir DATA/none --tasks leval/codeU", "is not a folder; give the folder of a local copy"),
    ("--data-dir DATA/leval --suite longbench", "no rows of any task of --suite longbench"),
    (f"{PUBLISHED} leval/review_summ", "review_summ.jsonl holds no row that leval/review_summ could ask"),
    (f"{PUBLISHED} infinitebench/passkey --max-prompt 9 --protocol agnostic", "raise --max-prompt"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_mistake_is_one_sentence_with_exit_code_2_and_leaves_no_folder(
    line: str, message: str, backbone: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    given, output = shlex.split(line.replace("DATA", str(data))), tmp_path / "out"
    usual = {"--methods": "random", "--samples": "1", "--tasks": "passkey", "--lengths": "400"}
    other = {"--tasks": ("--suite",), "--lengths": ("--tasks", "--suite")}
    for flag, value in usual.items():
        if flag not in given and not any(one in given for one in other.get(flag, ())):
            given += [flag, value]
    with pytest.raises(SystemExit) as leaving:
        run(command, ["--model", str(backbone), *given, "--output", str(output), "--figures", "none"])
    err = str(capsys.readouterr().err)
    assert leaving.value.code == 2, err
    assert any(one in err.splitlines()[-1] for one in message.split("|")), err
    assert not output.exists()
