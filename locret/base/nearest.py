"""Which of the known names is meant by one that is unknown: what messages suggest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the name that differs from `name` in upper case only; else up to three that are spelt most like it.

    A name without a slash is also compared with what follows the slash in names that have one: "qasper" means
    "longbench/qasper". If nothing is spelt alike, names that contain it will do.
    """
    wanted, forms = name.lower(), dict[str, list[str]]()
    for one in known:
        whole = one.lower()
        if whole == wanted:
            return [one]
        for form in dict.fromkeys((whole, whole if "/" in name else whole.rpartition("/")[2])):
            forms.setdefault(form, []).append(one)
    alike = [wanted] if wanted in forms else get_close_matches(wanted, forms, n=3)
    close = alike or [form for form in forms if wanted in form]
    return list(dict.fromkeys(one for form in close for one in forms[form]))[:3]


_RETIRED = (
    "locret-verify --output",
    *(f"--only {name}" for name in ("answer", "chunks", "units", "protected", "scores", "decode-budget", "fork")),
    *("--only interrupted", "--only layers"),
    "locret patterns",
    *("--suite world", "--suite lookalikes", "task world/", "task lookalikes/", "method kvpress/", "locret compare"),
    *("folder checkpoints/world", "folder checkpoints/world-heads", "lookup pages", "lookup means", "lookup codes"),
    *("option --ledger", "policy field ledger", "rounding rotated", "layer_budgets shares"),
    *("merge d2o", "merge kvmerger", "option --refit", "policy field refit"),
    *("option --host-by", "policy field host_by"),
    *(f"scorer option nacl:{option}" for option in ("group", "proxy_mask", "sampling", "draws")),
    *(f"scorer option expected_attention:{option}" for option in ("covariance", "value_norm", "epsilon")),
    *("method random_answer", "scorer random_answer", "method untrained"),
    *("scorer option sirllm:definition", "scorer option h2o:normalise"),
    *("label kind kvzip_plus", "quant_method gguf"),
    *("option --evict-while-training", "option --label-floor", "option --sp-size", "locret-train --shard tp"),
    *("option --devices", "option --host-memory", "option --gate", "option --offload-folder"),
    *("option --cache-type-v", "option --flash-attention", "option --streams"),
    *("option --skip-bad-rows", "option --data-revision"),
    *("option --streaming", "option --push-to-hub", "option --shuffle-buffer", "option --max-row-bytes"),
    *(
        "option --neighbours",
        "option --temperature",
        "option --label-source",
        "lookup option omnikv:memory",
        "lookup option infllm:preset",
    ),
    *(f"task longbench_v2/{split}_cot" for split in ("all", "easy", "hard", "short", "medium", "long")),
    *("--suite longbench-v2-cot", "--suite longbench-v2-splits-cot", "--suite multistep-omnikv", "task multistep/"),
    *("task multivalue", "task variable_tracking", "task two_stage"),
    *("task option lookalikes", "option --density", "option --lookalikes"),
    *("task option max_row_bytes", "task option answer_room", "task option replace_mask", "task option collection"),
    *("task option max_turns", "task option no_context", "task option compensated", "task option digits"),
    *("scbench option golden", "scbench option scorer", "loogle option scorer", "infinitebench option scorer"),
    *("modifier +d2o", "modifier +kvmerger", "modifier +refit", "modifier +shares"),
)
"""What could be chosen until then, as kind and name; a name that ends with a slash stands for all that begin so."""
_BY_ITSELF = {
    "option threads": "OMP_NUM_THREADS=N before the command says how many threads there are",
    "option questions": "give --question TEXT once for each, or a recipe's list, question: [TEXT, ...]",
    "option quick": "--tokens 256 is a quick look",
    "option memory_cap": "the peak of each row says what a GPU had allocated; leave it out",
    "option compile": "on CUDA the step of one token is captured and replayed by itself where it can be; leave it out",
    "option scorer_options": "a scorer's options stand behind its name, as in --scorer snapkv:kernel=7",
    "option print_completion": "--help all lists the options",
    "option save_context": "locret-context read TEXT --output FILE writes a context",
    "option tiers": "the table has the peak of each row's cache and second tier beside its scores; leave it out",
    "option shares": "each context has as many units; locret-context shrink FILE gives one fewer, or all the best",
    "option progress": "LongContextModel.read shows a bar, and prefill calls on_chunk after every chunk",
    **dict.fromkeys(("option data_dir", "option --data-dir"), "--dataset FILE reads a local copy of a named set"),
    "option text_file": "verify(model, ids=...) of locret.infer.verify takes the tokens of a text",
    "option disk": "a second tier lies in host memory, and host_budget bounds it",
    "option context": "locret-context ask FILE --question TEXT asks a context",
    "option reread": "--compare-full answers once more with every unit kept",
    "babilong option length": "--lengths chooses it, and --suite babilong-0k asks the facts alone",
    **dict.fromkeys(("option picture", "option kept"), "locret-context show FILE says and draws what a context kept"),
    "method streaming-original": "streaming+original has the positions of the text",
    "method oracle_agnostic": "--suite real measures it; oracle knows the answer to one question",
    "option figures": "results.json and samples.jsonl hold the numbers of every picture; leave it out",
    "option create_pr": "hf upload org/name FOLDER . --create-pr opens a pull request",
    "option eval_results": "the card in the folder keeps its text, so put what locret-eval wrote there",
    "locret-context push": "hf upload org/name FILE context.safetensors publishes a context",
    **dict.fromkeys(("locret-chat /fork", "locret-chat /back"), "/save FILE and /load FILE return to a point"),
    "locret-chat /protect": "--protect, given where the text is read, holds for the turns that follow",
    "locret-context pull": "hf download org/name fetches a context, and org/name may stand for its file",
}
"""What is needed no more, and what does the same, or what happens without it."""
_LAST = "release 0.1.0 (git tag lab-frozen)"


def check_retired(kind: str, name: str) -> None:
    """Refuse a name that an earlier release had; `kind` is what messages call such a choice, as "--suite"."""
    asked = f"{kind} {name}"
    if asked in _BY_ITSELF:
        raise ValueError(f'{kind} "{name}" was retired: {_BY_ITSELF[asked]}')
    if any(asked == one or (one.endswith("/") and asked.startswith(one)) for one in _RETIRED):
        raise ValueError(f'{kind} "{name}" was retired; {_LAST} is the last that has it')
