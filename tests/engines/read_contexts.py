"""Read texts of the embedded backbone into contexts, with questions and Locret's own answers, for tests of engines.

    python tests/engines/read_contexts.py FOLDER [BUDGET [TOKENS [TEXTS]]]

FOLDER/contexts/bookN.ctx are the contexts, of BUDGET + 32 units, and FOLDER/record.json says for each question about
each the ids that follow the context's units and those that `locret.generate` answers with.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import locret
from locret import LongContextModel, RetentionPolicy
from locret.chunked_prefill import read_turn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
LOCAL, ANSWER = 32, 16


def main(folder: str, budget: str = "224", tokens: str = "8192", texts: str = "4") -> None:
    torch.set_num_threads(1)
    policy = RetentionPolicy(budget=int(budget), chunk_size=512, stabilizers=64, local_len=LOCAL)
    heads = str(ROOT / "checkpoints/tiny-heads")
    lm = LongContextModel.from_pretrained(ROOT / "checkpoints/tiny", heads=heads, policy=policy, dtype="float32")
    from embedded import many_keys  # once it can be found

    out, record = Path(folder), {}
    (out / "contexts").mkdir(parents=True, exist_ok=True)
    for seed in range(1, int(texts) + 1):
        sample = many_keys(lm.tokenizer, int(tokens), seed=seed)
        text = sample.content.removesuffix(sample.question)
        context = lm.read(text, name=f"book{seed}", progress=False)
        context.save(out / f"contexts/book{seed}.ctx")
        record[f"book{seed}"] = asked(context, sample, text)
    (out / "record.json").write_text(json.dumps(record))


def asked(context: locret.Context, sample: Any, text: str) -> list[dict[str, object]]:
    """Ask for eight of the numbers in a text."""
    about, questions = re.findall(r"for (\w+) mentioned", sample.question)[0], []
    for key in re.findall(r"numbers for (\w+) is: ", text)[:8]:
        ids, cache = context.question_ids(sample.question.replace(about, key)), context.cache.copy()
        read_turn(context.lm.model, ids, cache, new_tokens=ANSWER)
        answer = locret.generate(context.lm.model, cache=cache, max_new_tokens=ANSWER, do_sample=False)
        questions.append({"ids": ids[0].tolist(), "answer": answer[0].tolist()})
    return questions


if __name__ == "__main__":
    main(*sys.argv[1:])
