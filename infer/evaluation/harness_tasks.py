"""Our tasks as tasks of lm-evaluation-harness: the same samples, the same metrics, any of its models.

Imported only where lm-evaluation-harness is installed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.task import SAMPLES, Wanted
from locret.infer.evaluation.eval_options import words
from locret.loading import tokenizer_of

LENGTHS = (4096,)


class HarnessTask(ConfigurableTask):  # type: ignore[misc] # lm_eval has no types
    """One of our tasks, with its own metric: `score@LENGTH` for every length asked for; of a published one `score`.

    A published task that the harness does not have brings its protocol's prompts, turns and metric.

    Args:
        config: As read from the file that `harness.write_task_files` wrote. Its `metadata` says which task it is, and
            holds what the user gave: `lengths` in tokens, `samples` (per length, where they are made), `seed`,
            `task_options` by task, the name of the tokenizer as `tokenizer` or `pretrained`; for a published task
            `data_dir` (local copies, as --data-dir of `locret-eval`) and `max_prompt`.

    Raises:
        ValueError: For a metadata value that cannot be used, a tokenizer that cannot express the task, or rows that are
            missing or bad.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config["metadata"])
        name = metadata["locret_task"]
        own = tasks.get(name, **_task_options(metadata).get(name, {}))
        self.published, self.tokenizer_name = own.family != "generated", _tokenizer_name(metadata)
        folders = metadata.get("data_dir") if self.published else None
        wanted = Wanted(
            tokenizer=lambda: _tokenizer(self.tokenizer_name),
            lengths=_lengths(metadata.get("lengths", metadata.get("max_seq_lengths", list(LENGTHS)))),
            samples=_count(metadata, "samples", None if self.published else SAMPLES),
            seed=metadata.get("seed", 0),
            folders=None if folders is None else words(folders, "--metadata: data_dir"),
            max_prompt=_count(metadata, "max_prompt", None),
        )
        self.selection = own.select(wanted)
        self.own, lengths = self.selection.task, list(self.selection.samples)
        said = {"facts": self.selection.facts} if self.published else {"lengths": lengths}
        metrics = {"score": self._summarised} if self.published else {f"score@{tokens}": "mean" for tokens in lengths}
        super().__init__(
            config={
                "task": config["task"],
                "output_type": "generate_until",
                "custom_dataset": self._documents,
                "test_split": "test",
                "doc_to_text": lambda doc: doc["content"],
                "doc_to_target": lambda doc: doc["reply"],
                "process_results": self._results,
                "metric_list": [
                    {"metric": metric, "aggregation": rule, "higher_is_better": True}
                    for metric, rule in metrics.items()
                ],
                # The models stop where their turn ends; an empty list keeps the harness from adding a blank line.
                "generation_kwargs": {
                    "do_sample": False,
                    "max_gen_toks": self.own.max_new_tokens,
                    "until": list(self.own.stop),
                },
                "num_fewshot": 0,
                "repeats": 1,
                "metadata": {**metadata, "version": self.own.version, **said},
            }
        )

    def fewshot_context(self, doc: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        """Return the prompt; a published one has its turns already.

        Raises:
            ValueError: If the harness is to write turns as well.
        """
        if self.published and settings.get("apply_chat_template"):
            raise ValueError(f"{self.config.task} writes its protocol's turns itself; leave out --apply_chat_template")
        return super().fewshot_context(doc, *arguments, **settings)

    def _documents(self, **_metadata: Any) -> dict[str, Dataset]:
        """Return the samples; made ones length after length for each index, so that a limit takes as many of each."""
        tokenizer, rows = _tokenizer(self.tokenizer_name), []
        self.own.check(tokenizer)
        places = [(n, tokens) for tokens, found in self.selection.samples.items() for n in found.chosen]
        for number, tokens in places if self.published else sorted(places, key=lambda place: place[0]):
            sample = self.selection.samples[tokens].sample(number, tokenizer)
            kept = {name: getattr(sample, name) for name in ("content", "question", "reply", "id")}
            kept |= {name: list(getattr(sample, name)) for name in ("targets", "choices", "depths")}
            if self.published:
                built = build_prompt(self.own, sample, tokenizer)
                kept["content"] = built.text or tokenizer.decode(built.ids, clean_up_tokenization_spaces=False)
            rows.append({**kept, "tokens": tokens})
        return {"test": Dataset.from_list(rows)}

    def _results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        targets, choices = tuple(doc["targets"]), tuple(doc["choices"])
        sample = Sample(content=doc["content"], targets=targets, reply=doc["reply"], choices=choices)
        score = self.own.score(results[0], sample)
        return {"score": (score, results[0], targets)} if self.published else {f"score@{doc['tokens']}": score}

    def _summarised(self, found: list[tuple[float, str, tuple[str, ...]]]) -> float:
        """Return the task's score by its protocol, which may be no mean (L-Eval's ROUGE)."""
        return self.own.summarise([score for score, _, _ in found], [(said, right) for _, said, right in found])


PublishedHarnessTask = HarnessTask
"""The name in task files that were written before there was one class."""


def _task_options(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options by task; a run may hold tasks of which the options do not speak, but not the reverse."""
    given = metadata.get("task_options") or {}
    if not isinstance(given, dict) or not all(isinstance(options, dict) for options in given.values()):
        raise ValueError(
            f"--metadata: task_options={given!r} does not say whose options they are; name the task, such as "
            '{"multikey": {"keys": 12}}'
        )
    for name in given:
        tasks.get(name, **given[name])  # refuses unknown names and options
    return given


def _lengths(given: Any) -> tuple[int, ...]:
    lengths = given if isinstance(given, list | tuple) else [given]
    if not lengths or not all(isinstance(tokens, int) and tokens > 0 for tokens in lengths):
        raise ValueError(f"--metadata: lengths={given!r} is not a list of lengths; give tokens, such as [2048, 8192]")
    return tuple(dict.fromkeys(lengths))


def _count(metadata: dict[str, Any], name: str, default: int | None) -> int | None:
    value = metadata.get(name, default)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"--metadata: {name}={value!r} is not a count; give 1 or more")
    return value


def _tokenizer_name(metadata: dict[str, Any]) -> str:
    for key in ("tokenizer", "pretrained", "model"):
        if isinstance(metadata.get(key), str) and metadata[key]:
            return str(metadata[key])
    raise ValueError(
        "nothing says which tokenizer measures the prompts; give --model_args pretrained=... or "
        "--metadata '{\"tokenizer\": ...}'"
    )


@lru_cache(maxsize=2)
def _tokenizer(name: str) -> Any:
    return tokenizer_of(name)
