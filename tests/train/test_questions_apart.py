"""Rows with a document and questions that are each asked by themselves: schema, tokens, labels, loss, command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import tiny_tokenizer
from test_step import gradients
from training_cases import backbone, loss_of, refused, token_ids, train, train_arguments
from transformers import AutoConfig

from locret import RetainingHeads
from locret.backbone.adapters import describe
from locret.conversation.turns import Message
from locret.data.training.rows import Row
from locret.data.training.stream import TrainingStream
from locret.labels.labels import answer_labels, observe
from locret.train.loss import retention_loss
from locret.train.step import train_step

TOKENIZER = tiny_tokenizer()
DOCUMENT = "The tower has 10 steps. The number of Oslo is 314. The sky is blue."
PAIRS = [("What is the number of Oslo?", "It is 314."), ("How many steps has the tower?", "10 steps.")]
ROW = {"document": DOCUMENT, "questions": [{"question": q, "answer": a} for q, a in PAIRS]}


def heads_for(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, 16, seed=0).requires_grad_(True)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_step_learns_the_largest_labels_of_all_answers(family: str) -> None:
    model, document = backbone(family), token_ids(33)
    asked = [(token_ids(5, seed=1), token_ids(4, seed=2)), (token_ids(3, seed=3), token_ids(6, seed=4))]
    loss = loss_of("log_attention", objective="ranking", include_last_prompt_token=True)
    heads, naive = heads_for(model), heads_for(model)
    result = train_step(model, heads, document, asked[0][1], loss, asked=asked, max_prompt_tokens=30)
    labels = [
        answer_labels(model, torch.cat([document, question], dim=1), answer, "log_attention", True)[..., :30]
        for question, answer in asked
    ]
    features: list[torch.Tensor] = []
    observe(model, document, lambda chunk: features.append(chunk.features()[0]))
    scores = torch.stack([naive[layer](one[:30]).T for layer, one in zip(naive, features, strict=True)])
    total, fit, smoothness = retention_loss(scores, torch.stack(labels).amax(0), objective="ranking")
    total.backward()
    expected = torch.stack([total, fit, smoothness]).detach()
    torch.testing.assert_close(torch.stack([result.total, result.fit, result.smoothness]), expected)
    assert result.tokens == 33 + 5 + 4 + 3 + 6
    wanted = gradients(naive)
    assert wanted.keys() == gradients(heads).keys()
    assert wanted
    for name, gradient in gradients(heads).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def test_a_row_is_its_document_and_what_each_question_adds() -> None:
    example = next(TrainingStream([ROW], TOKENIZER, seed=0, max_length=None, answers="each"))
    assert TOKENIZER.decode(example.prompt_ids[0]).endswith("The sky is blue.")
    assert len(example.asked) == len(PAIRS)
    for (question, answer), (asked, answered) in zip(PAIRS, example.asked, strict=True):
        alone = {"prompt": f"{DOCUMENT}\n{question}", "answer": answer}
        expected = next(TrainingStream([alone], TOKENIZER, seed=0, max_length=None))
        assert torch.cat([example.prompt_ids, asked], dim=1).equal(expected.prompt_ids)
        assert answered.equal(expected.answer_ids)
    last = next(TrainingStream([ROW], TOKENIZER, seed=0, max_length=None))
    assert last.prompt_ids.equal(expected.prompt_ids)


def test_reconstruction_repeats_the_document_alone() -> None:
    from locret.data.training.rows import REQUEST, detect_schema, read_row, reconstruction

    row = reconstruction(read_row(ROW, detect_schema(ROW, "rows"), where="row 0", answer_needed=False))
    assert row == Row((Message("user", f"{DOCUMENT}\n\n{REQUEST}"),), DOCUMENT)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "questions": "What?"}, "has a field 'questions' that is not a list of question/answer objects"),
        ({**ROW, "questions": []}, "has a field 'questions' without a question"),
        (
            {**ROW, "questions": {"question": "Who?", "answer": "Bob."}},
            "'questions' that is not a list of question/answer",
        ),
        ({**ROW, "questions": {"question": "Who?", "answer": 7}}, "'questions' that is not a list of"),
        (
            {**ROW, "questions": {"question": ["Who?"], "answer": []}},
            "'questions' that is not a list of question/answer",
        ),
        ({**ROW, "questions": [{"question": "What?"}]}, "has a question without text or answer in field 'questions'"),
        ({**ROW, "document": " "}, "has an empty field 'document'"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        next(TrainingStream([row], TOKENIZER, seed=0, max_length=None, answers="each"))


def test_the_command_trains_on_them(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    documents = [{"document": f"{DOCUMENT} " * (2 + n), "questions": ROW["questions"]} for n in range(4)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in documents))
    both = (paths[0], rows)
    measured = ["--neighbours=2", "--policy.budget=32", "--eval-rows=2"]
    assert train(both, tmp_path / "run", "--answers=each", "--steps=3", *measured) == 0
    heads = RetainingHeads.from_pretrained(str(tmp_path / "run"))
    assert heads.config.neighbours == 2
    assert heads.config.policy is not None
    assert heads.config.policy["head_shares"] is None, "this tokenizer cannot write the passages"
    assert train(both, tmp_path / "next", "--answers=each", "--steps=3", f"--init-from={tmp_path / 'run'}") == 0
    assert heads.config.label is not None
    assert "each asked by itself" in heads.config.label["reduction"]
    capsys.readouterr()
    assert train(both, tmp_path / "plan", "--answers=each", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    shape = describe(AutoConfig.from_pretrained(paths[0]))
    held = sum(one.num_kv_heads * (one.head_dim + one.value_dim) for one in map(shape.shape, range(shape.num_layers)))
    assert "features" in plan["memory_bytes"]
    assert plan["memory_bytes"]["document"] % (2 * 4 * held) == 0 < plan["memory_bytes"]["document"]
    for given, more, expected in [
        (paths, ["--answers=each"], "are in the LongAlpaca schema, with one answer each; write document and questions"),
        (
            both,
            ["--policy.budget=32", "--policy.head_budgets=shares"],
            "--policy.head-budgets shares needs a share of each KV head, which cannot be measured here",
        ),
        (both, [f"--init-from={tmp_path / 'run'}", "--neighbours=1"], "--neighbours 1 differs from 2 of the heads in"),
        (both, ["--answers=each", "--label-source=reconstruction"], "--answers each changes nothing with"),
    ]:
        code, message = refused(capsys, train_arguments(given, tmp_path / "none", *more))
        assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "none").exists()
