"""LongBench: 21 tasks in English, Chinese and code, with the prompts and lengths of its own configuration.

Paper:     arXiv 2308.14508.
Source:    THUDM/LongBench (MIT), now zai-org/LongBench on the Hub, whose data.zip unpacks to data/<task>.jsonl; prompts
           and generation lengths of its config/dataset2prompt.json and dataset2maxlen.json.
Fields:    input (question, may be empty), context, answers, length, dataset, language, all_classes, _id.
Deviates:  never. The prompt limit belongs to the model: `limit`, none by default; `MODEL_LIMITS` has the published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locret.data.tasks.published.base import PublishedTask
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of, texts_of

MODEL_LIMITS = {
    "llama2-7b-chat-4k": 3500,
    "longchat-v1.5-7b-32k": 31500,
    "xgen-7b-8k": 7500,
    "internlm-7b-8k": 7500,
    "chatglm2-6b": 31500,
    "chatglm2-6b-32k": 31500,
    "chatglm3-6b-32k": 31500,
    "vicuna-v1.5-7b-16k": 15500,
}
"""Tokens of the prompt in the published runs."""

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_HOPS = (
    f"{_PASSAGES}\n\nThe following are given passages.\n",
    f"\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:",
)
_STORY = (
    "nswer the question {based}asconcisely as you can, using a single phrase if possible. Do not provide any "
    "explanation.\n\n"
)
_ARTICLE = (
    "nswer the question {based}as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the question is a yes/no '
    'question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
)
_CODE = "Please complete the code given below. \n"
_EXAMPLES = "The following are some examples.\n\n"
# Text before and after the context, as config/dataset2prompt.json has it, its misprints included.
_FORMS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. A"
        + _STORY.format(based="")
        + "Story: ",
        "\n\nNow, a" + _STORY.format(based="based on the story ") + "Question: {input}\n\nAnswer:",
    ),
    "qasper": (
        "You are given a scientific article and a question. A" + _ARTICLE.format(based="") + "Article: ",
        "\n\n A" + _ARTICLE.format(based="based on the above article ") + "Question: {input}\n\nAnswer:",
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:",
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n",
        "\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    ),
    "hotpotqa": _HOPS,
    "2wikimqa": _HOPS,
    "musique": _HOPS,
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：",
        "\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    ),
    "vcsum": ("下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n", "\n\n会议总结："),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{input}",
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        + _EXAMPLES,
        "\n\n{input}",
    ),
    "samsum": ("Summarize the dialogue into a few short sentences. " + _EXAMPLES, "\n\n{input}"),
    "lsht": ("请判断给定新闻的类别，下面是一些例子。\n\n", "\n{input}"),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
        "only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n",
        "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is "
        'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n",
        '\n\n下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    ),
    "lcc": (_CODE, "Next line of code:\n"),
    "repobench-p": (_CODE, "{input}Next line of code:\n"),
}
_CLASSIFIED = ("trec", "lsht")
_NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# What a reference must be, where the metric reads something out of it.
_REFERENCES = {
    "passage_count": r"^\d+$",
    "passage_retrieval_en": r"Paragraph \d+",
    "passage_retrieval_zh": r"段落\d+",
}


@dataclass(frozen=True, kw_only=True)
class LongBenchTask(PublishedTask):
    """One file of LongBench."""

    task: str
    """The file's name in the published set."""

    def read(self, index: int, place: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row.

        Raises:
            BadRow: If a field is missing, empty or of the wrong type, or the row is another task's.
        """
        context = text_of(record, place, "context")
        question = text_of(record, place, "input", may_be_empty="{input}" not in _FORMS[self.task][1])
        targets = texts_of(record, place, "answers")
        classes = texts_of(record, place, "all_classes", may_be_empty=True) if "all_classes" in record else ()
        for target in targets:
            if not re.search(_REFERENCES.get(self.task, ""), target):
                needed = _REFERENCES[self.task].strip("^$").replace(r"\d+", "12")
                raise BadRow(place, "wrong answer", f"holds {target!r} in field 'answers' where {needed!r} is right")
        if self.task in _CLASSIFIED and not classes:
            raise BadRow(place, "no classes", "has an empty field 'all_classes', and the metric looks for classes")
        dataset = record.get("dataset", self.task)
        if dataset not in (self.task, f"{self.task}_e"):
            raise BadRow(place, "other task", f"says {dataset!r} in field 'dataset' where {self.task!r} is read")
        head, tail = (part.format(input=question) for part in _FORMS[self.task])
        return [
            Sample(
                id=str(index),
                content=head + context + tail,
                targets=targets,
                reply=targets[0],
                choices=classes,
                span=(len(head), len(head) + len(context)),
                extra=(("row id", str(record["_id"])),) if "_id" in record else (),
            )
        ]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the task's own metric, the best over the references."""
        from locret.data.tasks.metrics import longbench

        return longbench.score(self.task, prediction, sample.targets, sample.choices)


def _task(name: str, new: int, metric: str, size: int = 200) -> LongBenchTask:
    return LongBenchTask(
        name=f"longbench/{name}",
        source="LongBench, arXiv 2308.14508",
        metric=metric,
        max_new_tokens=new,
        # samsum's answers end with their line, which has one token at least.
        min_new_tokens=1 if name == "samsum" else 0,
        stop=("\n",) if name == "samsum" else (),
        chat=name not in _NO_CHAT,
        truncation="middle",
        reencode=True,
        file=f"data/{name}.jsonl",
        hub_file=f"data.zip!data/{name}.jsonl",
        repo="zai-org/LongBench",
        revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        size=size,
        task=name,
    )


_F1, _ROUGE, _CLASS = "token F1", "ROUGE-L", "classification"
TASKS: tuple[LongBenchTask, ...] = (
    _task("narrativeqa", 128, _F1),
    _task("qasper", 128, _F1),
    _task("multifieldqa_en", 64, _F1, 150),
    _task("multifieldqa_zh", 64, _F1 + " of jieba's words"),
    _task("hotpotqa", 32, _F1),
    _task("2wikimqa", 32, _F1),
    _task("musique", 32, _F1),
    _task("dureader", 128, _ROUGE + " of jieba's words"),
    _task("gov_report", 512, _ROUGE),
    _task("qmsum", 512, _ROUGE),
    _task("multi_news", 512, _ROUGE),
    _task("vcsum", 512, _ROUGE + " of jieba's words"),
    _task("trec", 64, _CLASS),
    _task("triviaqa", 32, _F1),
    _task("samsum", 128, _ROUGE),
    _task("lsht", 64, _CLASS),
    _task("passage_count", 32, "share of the numbers that are the count"),
    _task("passage_retrieval_en", 32, "share of the numbers that are the paragraph"),
    _task("passage_retrieval_zh", 32, "share of the numbers that are the paragraph"),
    _task("lcc", 64, "edit similarity", 500),
    _task("repobench-p", 64, "edit similarity", 500),
)
