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
from locret.infer.evaluation.eval_options import EvalOptions
from locret.loading import tokenizer_of

LENGTH = 4096
_KEYS = ("lengths", "samples", "seed", "data_dir", "max_prompt")
"""Options of `locret-eval` that --metadata may have."""


class HarnessTask(ConfigurableTask):  # type: ignore[misc] # lm_eval has no types
    """One of our tasks, with its protocol's prompts, turns and metric.

    `metadata` of its file says which; the user adds `lengths`, `samples`, `seed`, `data_dir`, `max_prompt` and
    `task_options` (by task) of `locret-eval`, and the tokenizer's name as `tokenizer` or `pretrained`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = dict(config["metadata"])
        name, self.tokenizer_name = metadata["locret_task"], _tokenizer_name(metadata)
        chosen = {key: metadata[key] for key in _KEYS if key in metadata}
        # A run may hold tasks of which the options do not speak.
        own = {one: given for one, given in (metadata.get("task_options") or {}).items() if tasks.get(one).name == name}
        options = EvalOptions(tasks=name, task_options=own, **{"lengths": LENGTH, **chosen})
        (task,) = options.chosen_tasks()
        self.selection = task.select(options.wanted(lambda: _tokenizer(self.tokenizer_name)))
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
        """Return the prompt, which has its turns already."""
        if settings.get("apply_chat_template"):
            raise ValueError(f"{self.config.task} writes its protocol's turns itself; leave out --apply_chat_template")
        return super().fewshot_context(doc, *arguments, **settings)

    def _documents(self, **_metadata: Any) -> dict[str, Dataset]:
        tokenizer, rows = _tokenizer(self.tokenizer_name), []
        for tokens, found in self.selection.samples.items():
            for number in found.chosen:
                sample = found.sample(number)
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


def _tokenizer_name(metadata: dict[str, Any]) -> str:
    for key in ("tokenizer", "pretrained", "model"):
        if isinstance(metadata.get(key), str) and metadata[key]:
            return str(metadata[key])
    raise ValueError(
        "nothing says which tokenizer measures the prompts; give --model_args pretrained=... or "
        "--metadata '{\"tokenizer\": ...}'"
    )


_tokenizer = lru_cache(maxsize=2)(tokenizer_of)
