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
from locret.data.tasks.task import Wanted
from locret.infer.evaluation.eval_options import numbers, words
from locret.loading import tokenizer_of

LENGTH = 4096


class HarnessTask(ConfigurableTask):  # type: ignore[misc] # lm_eval has no types
    """One of our tasks, with its protocol's prompts, turns and metric.

    Args:
        config: As read from the file that `harness.write_task_files` wrote. Its `metadata` says which task it is, and
            holds what the user gave: `lengths` in tokens and `samples` where they are made, `seed`, `task_options` by
            task, `data_dir` (local copies, as --data-dir of `locret-eval`), `max_prompt`, and the name of the tokenizer
            as `tokenizer` or `pretrained`.

    Raises:
        ValueError: For a metadata value that cannot be used, or rows that are missing or bad.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config["metadata"])
        name, options, self.tokenizer_name = metadata["locret_task"], _options(metadata), _tokenizer_name(metadata)
        folders = metadata.get("data_dir")
        wanted = Wanted(
            tokenizer=lambda: _tokenizer(self.tokenizer_name),
            lengths=numbers(metadata.get("lengths", LENGTH), "--metadata: lengths"),
            samples=_count(metadata, "samples"),
            seed=metadata.get("seed", 0),
            folders=None if folders is None else words(folders, "--metadata: data_dir"),
            max_prompt=_count(metadata, "max_prompt"),
        )
        self.selection = tasks.get(name, **options.get(name, {})).select(wanted)
        self.own = self.selection.task
        super().__init__(
            config={
                "task": config["task"],
                "output_type": "generate_until",
                "custom_dataset": self._documents,
                "test_split": "test",
                "doc_to_text": lambda doc: doc["prompt"],
                "doc_to_target": lambda doc: doc["reply"],
                "process_results": self._results,
                "metric_list": [{"metric": "score", "aggregation": self._summarised, "higher_is_better": True}],
                # The models stop where their turn ends; an empty list keeps the harness from adding a blank line.
                "generation_kwargs": {
                    "do_sample": False,
                    "max_gen_toks": self.own.max_new_tokens,
                    "until": list(self.own.stop),
                },
                "num_fewshot": 0,
                "repeats": 1,
                "metadata": {**metadata, "version": self.own.version, "facts": self.selection.facts},
            }
        )

    def fewshot_context(self, doc: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        """Return the prompt, which has its turns already.

        Raises:
            ValueError: If the harness is to write turns as well.
        """
        if settings.get("apply_chat_template"):
            raise ValueError(f"{self.config.task} writes its protocol's turns itself; leave out --apply_chat_template")
        return super().fewshot_context(doc, *arguments, **settings)

    def _documents(self, **_metadata: Any) -> dict[str, Dataset]:
        tokenizer, rows = _tokenizer(self.tokenizer_name), []
        for tokens, found in self.selection.samples.items():
            for number in found.chosen:
                sample = found.sample(number, tokenizer)
                built = build_prompt(self.own, sample, tokenizer)
                text = built.text or tokenizer.decode(built.ids, clean_up_tokenization_spaces=False)
                kept = {name: getattr(sample, name) for name in ("content", "reply", "id", "targets", "choices")}
                rows.append({**kept, "prompt": text, "tokens": tokens})
        return {"test": Dataset.from_list(rows)}

    def _results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        targets, choices = tuple(doc["targets"]), tuple(doc["choices"])
        sample = Sample(content=doc["content"], targets=targets, reply=doc["reply"], choices=choices)
        return {"score": (self.own.score(results[0], sample), results[0], targets)}

    def _summarised(self, found: list[tuple[float, str, tuple[str, ...]]]) -> float:
        """Return the task's score by its protocol, which may be no mean (L-Eval's ROUGE)."""
        return self.own.summarise([score for score, _, _ in found], [(said, right) for _, said, right in found])


def _options(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options by task; a run may hold tasks of which the options do not speak, but not the reverse."""
    given = metadata.get("task_options") or {}
    if not isinstance(given, dict) or not all(isinstance(options, dict) for options in given.values()):
        raise ValueError(
            f"--metadata: task_options={given!r} does not say whose options they are; name the task, such as "
            '{"leval/codeU": {"prompt_style": "official"}}'
        )
    return {tasks.get(name, **options).name: options for name, options in given.items()}


def _count(metadata: dict[str, Any], name: str) -> int | None:
    value = metadata.get(name)
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
