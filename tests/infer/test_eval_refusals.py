"""Mistakes are refused before anything is written: one sentence, exit code 2, and the way out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from published_cases import infinitebench, leval, longbench, write_rows

from locret.cli.command import run
from locret.infer.evaluation.command import command

TINY = "--model checkpoints/tiny"
SHORT = f"{TINY} --tasks passkey --lengths 512 --methods"
NEEDLE = f"{TINY} --tasks niah/needle --protect system --methods streaming"
PUBLISHED = "--methods full --data-dir DATA --tasks"
MULTIKEY = "--methods random --tasks multikey --lengths 300 --budget 64 --task-options '{\"multikey\": {%s}}'"
REFUSED = [
    # Names.
    ("--methods kvpress/snapkv", 'method "kvpress/snapkv" was retired; release 0.1.0 (git tag lab-frozen) is the'),
    ("--methods streeming", 'method "streeming" is unknown; did you mean streaming'),
    ("--methods ,", "--methods is empty; name at least one"),
    ("--methods locret", "--methods locret needs trained heads; give --heads, or leave it out"),
    ("--tasks passky", 'task "passky" is unknown; did you mean passkey'),
    ("--tasks leval/codeX", 'task "leval/codeX" is unknown; did you mean leval/codeU'),
    ("--suite leval-locrett", 'suite "leval-locrett" is unknown; did you mean leval-locret'),
    (MULTIKEY % '"kees": 3', 'task multikey: it has no option "kees"; did you mean keys?'),
    (MULTIKEY % '"keys": "many"', "task multikey: keys='many' must be a whole number, 1 or more"),
    ('--tasks multikey --task-options \'{"number": {"digits": 4}}\'', "speaks of number, which is not among --tasks"),
    # Numbers.
    ("--budget many", "--budget many is not a list of whole numbers; write it like 256,128"),
    (
        "--budget 16 --stabilizers 32",
        "stabilizers=32 leaves no room for scored units in budget=16; raise budget, lower",
    ),
    ("--threads 23647334", "--threads 23647334 is too large; give at most 4096"),
    ("--samples 0", "--samples 0 leaves nothing to measure; give 1 or more"),
    ("--questions 0", "--questions 0 asks nothing; give 1 or more"),
    ("--lengths 0", "--lengths 0 holds a text without tokens; give 1 or more"),
    ("--lengths 20", "tokens=20 cannot hold the facts and the question"),
    ("--tasks multikey --lengths 100", "sample 0 of multikey cannot be made at 100 tokens"),
    ("--tasks leval/codeU --max-prompt 1", "--max-prompt 1 is too small; give 2 or more"),
    ("--budget-share 0.1,2", "--budget-share: 2.0 is not a share of the prompt; give more than 0"),
    ("--budget-share nan", "--budget-share: nan is not a share of the prompt"),
    ("--budget-share a", "--budget-share a is not a list of numbers; write it like 0.1,0.2"),
    # What cannot end.
    ("--samples 1000000000", "--samples 1000000000 comes to 1,000,000,000 answers, which would take months; give"),
    ("--lengths 10000000000", "--lengths 10000000000: the text of a prompt takes at least 640.0 GB, and cpu has"),
    ("--lengths 100000000000000", "comes to 100,000,000,000,000 prompt tokens, which would take months; lower"),
    ("--methods full --max-new-tokens 1000000000000", "and 1,000,000,000,000 new tokens: its cache takes at least"),
    ("--tasks ruler/vt --lengths 10000000000", "--lengths 10000000000: the text of a prompt takes at least"),
    ("--questions 1000000000000", "--questions 1000000000000 are more than any text has; give 10000 or less"),
    ("--tasks niah/needle --samples 100000000", "comes to 100,000,000 answers, which would take months"),
    # Options that contradict each other, or change nothing.
    ("--resume --overwrite", "--resume and --overwrite exclude each other"),
    ("--suite leval-locret --tasks passkey", "--suite leval-locret and --tasks exclude each other"),
    ("--budget-share 0.1 --budget 64", "--budget 64 and --budget-share 0.1 exclude each other; drop one"),
    ("--data-dir DATA --data-revision main", "--data-revision main is of no use with --data-dir"),
    ("--published", "--published shows the rows of a suite's table; give --suite"),
    ("--allow-other-base", "--allow-other-base is about --heads, which are not given; add them, or drop it"),
    ("--max-prompt 100", "--max-prompt is for published tasks, but passkey are made here; add such a task, or"),
    ("--template original", "--template is for published tasks, but passkey are made here"),
    ("--data-dir .", "--data-dir is for published tasks, but passkey are made here"),
    ("--tasks longbench/qasper --template chatty", "--template chatty is unknown; choose one of chat"),
    ("--tasks sirllm/rock --budget 64 --lengths 64", "--lengths is for prompts that are made here, but those of sir"),
    ("--pyramid-beta 10", "--pyramid-beta 10 changes nothing without --layer-budgets pyramid; add that, or"),
    ("--head-floor 0.5", "--head-floor 0.5 changes nothing without --head-budgets adaptive"),
    ("--min-chunk 16", "--min-chunk 16 changes nothing without --decremental; add that, or drop --min-chunk"),
    ("--when prompt_end --stabilizers 16", "--stabilizers 16 changes nothing without --when chunk; add"),
    ("--decode-interval 5", "--decode-interval 5 changes nothing without --decode-budget"),
    ("--decremental", 'memory="fixed" does not grow; choose memory linear, sqrt or square'),
    # Methods that cannot work.
    ("--methods random,snapkv --decode-budget 80 --decode-interval 4 --budget 64", "method snapkv: decode_budget=80 "),
    ("--methods random,nacl+adaptive_heads --budget 64", "method nacl+adaptive_heads: head_budgets"),
    ("--methods snapkv+shares --budget 64", 'method snapkv+shares: layer_budgets="shares" needs a share of'),
    ("--methods snapkv:window=600+prompt_end --budget 64", "looks back 600 tokens at the prompt's end, but chunk_size"),
    ("--methods random_answer", "without --decode-budget none are; give it, or take random"),
    ("--methods full --decode-budget 60 --budget 48", "--decode-budget 60 means nothing to full, so it would change"),
    (f"{SHORT} random --budget 64 --key-bits 4 --exact-layers 9", "exact_layers=9 leaves none of 5 layers"),
    # Sessions and questions.
    ("--tasks sirllm/rock --methods random,oracle", "method oracle knows the answer to one prompt, and sirllm/rock is"),
    ("--tasks sirllm/rock --methods oracle_agnostic", "method oracle_agnostic knows the answer to one"),
    ("--tasks scbench/kv --methods oracle", "knows the answer to one prompt, and scbench/kv is a session"),
    ("--tasks sirllm/rock --budget-share 0.1", "sirllm/rock is a session that goes on; give --budget"),
    ("--tasks sirllm/rock --protocol agnostic", "--protocol agnostic reads a document before its question"),
    ("--tasks scbench/kv --protocol agnostic", "scbench/kv is a session, whose turns follow each other"),
    ("--tasks infinitebench/math_find --protocol aware,agnostic", "math_find asks before its document; leave one out"),
    ("--tasks infinitebench/code_run --protocol agnostic", "code_run asks before its document; leave one out"),
    ("--protocol blind", "--protocol blind is unknown; choose aware or agnostic, or aware,agnostic"),
    ("--questions 5", "--questions 5 asks several questions of a text, but no text of passkey"),
    ("--tasks ruler/vt --lengths 1000 --methods oracle_agnostic", "ruler/vt does not say which there are; leave one"),
    # Rows that are not there.
    (f"{PUBLISHED} leval/codeU", "holds no rows of leval/codeU; looked for leval/LEval-data"),
    ("--methods full --data-dir DATA/none --tasks leval/codeU", "is not a folder; give the folder of a local copy"),
    ("--data-dir DATA/leval --suite infinitebench --max-new-tokens 6", "no rows of any task of --suite infinitebench"),
    (f"{PUBLISHED} leval/review_summ", "review_summ.jsonl holds no row that leval/review_summ could ask"),
    # What is protected.
    (f"{TINY} --protect sytem", "--protect 'sytem' names nothing"),
    (f"{TINY} --protect user", "--protect user is no part that every prompt has; give system, question, or tokens:A-B"),
    (f"{TINY} --protect question --protocol agnostic", "agnostic asks when all has been evicted; add aware"),
    (
        f"{SHORT} random --protect question --budget 4",
        "method random, text 0 of task passkey: the protected spans need",
    ),
    # As much as a uniform layer holds; the last of a pyramid holds less.
    (f"{SHORT} random+pyramid --protect tokens:0-50 --budget 50", "method random+pyramid, text 0 of task passkey: "),
    (
        f"{NEEDLE} --lengths 512 --budget 64 --memory linear --chunk-size 64 --stabilizers 4 --local-len 8",
        "--protect, method streaming, text 0 of task niah/needle: ",
    ),
    (f"{NEEDLE} --lengths 320,1024 --budget-share 0.1 --local-len 8 --seed 8", " but budget=19 holds 19"),
    (f"{SHORT} random --protect tokens:500-600", "tokens to read, protocol aware; name tokens"),
    (f"{TINY} --protect system --protect system=0.5", "--protect system=0.5 adds nothing to --protect system, which"),
    (f"{TINY} --protect question --methods quest:page=8", "changes nothing, for none of quest:page=8"),
    (f"{TINY} --protect system --methods full", "changes nothing, for none of full evicts as ours do"),
    (f"{SHORT} random --protect system --budget 64", "no text of passkey has a system message; drop it, or add such a"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows of three benchmarks, one of them for judges alone."""
    folder = longbench(leval(infinitebench(tmp_path_factory.mktemp("refusals"), rows=1)))
    judged = {"input": "Text.", "instructions": ["Why?"], "outputs": ["So."], "source": "own", "evaluation": "human"}
    write_rows(folder / "leval" / "LEval-data" / "Open-ended-tasks" / "review_summ.jsonl", [judged])
    return folder


def said(line: str, backbone: Path, data: Path, output: Path, capsys: Any) -> str:
    """Return the last line that the command writes for mistakes, after exit code 2 and without a folder."""
    given = shlex.split(line.replace("DATA", str(data)))
    usual = {
        "--model": str(backbone),
        "--methods": "random",
        "--samples": "1",
        "--tasks": "passkey",
        "--lengths": "300",
    }
    other = {"--tasks": ("--suite",), "--lengths": ("--tasks", "--suite")}
    for flag, value in usual.items():
        if flag not in given and not any(one in given for one in other.get(flag, ())):
            given += [flag, value]
    with pytest.raises(SystemExit) as leaving:
        run(command, [*given, "--output", str(output), "--figures", "none"])
    err = str(capsys.readouterr().err)
    assert leaving.value.code == 2, f"{line}: {err}"
    assert "Traceback" not in err
    assert not output.exists()
    return err.splitlines()[-1]


def test_every_mistake_is_refused_in_one_sentence(backbone: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    found = {line: said(line, backbone, data, tmp_path / "out", capsys) for line, _ in REFUSED}
    assert not {line: found[line] for line, message in REFUSED if message not in found[line]}
