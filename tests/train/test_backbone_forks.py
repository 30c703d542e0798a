"""Questions that fork off one text learn what they would learn alone behind it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from checkpoints.build import attention
from checkpoints.build.batches import Batch, Stage, forked_batches, joined, steps
from checkpoints.build.forks import fork
from checkpoints.build.model import build_model
from checkpoints.build.options import BackboneTraining
from checkpoints.build.training import masked_loss, train
from locret.data.tasks.generated.mixture import quiz
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.data.text.haystack import prompt_length

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TASKS = ["passkey", "multikey", "two_stage"]
STAGE = Stage(steps=3, tokens=400, batch_tokens=800, tasks=TASKS, forks=5, dense_share=0.0, span=4096, local_share=0.5)
TOKENIZER = build_tokenizer()


def test_a_branch_is_the_chat_with_its_question_alone():
    text = quiz(TOKENIZER, TASKS, 800, questions=6, density=0.9, seed=1)
    asked = [[question] for _, question in text.questions]
    ids_1T, mask_1T, forks = fork(TOKENIZER, text.document, asked)
    assert len(asked) > 3
    for branch, (question,) in enumerate(asked):
        messages = [{"role": "user", "content": f"{text.document}\n{question.text}"}]
        prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        own = forks.branches_F == branch
        ids_T = torch.cat([ids_1T[0, : forks.text], ids_1T[0, forks.text :][own]])
        marked = mask_1T[0, forks.text :][own]
        assert ids_T[: len(prompt)].tolist() == prompt
        assert int(marked.sum()) == len(ids_T) - len(prompt)
        assert TOKENIZER.decode(ids_T[len(prompt) :]).replace(" ", "") == f"{question.reply}<eos>".replace(" ", "")
    assert not mask_1T[0, : forks.text].any()


@pytest.mark.parametrize("window", [0, 32, 5000])
def test_the_loss_of_branches_is_that_of_single_rows(window):
    model = build_model(BackboneTraining(stages=[STAGE], **SMALL), TOKENIZER)
    text = quiz(TOKENIZER, TASKS, 500, questions=4, density=0.9, seed=2)
    asked = [[question] for _, question in text.questions]
    ids_1T, mask_1T, forks = fork(TOKENIZER, text.document, asked)
    gapped = torch.arange(forks.text) + 700 * (torch.arange(forks.text) > 100)
    positions_1T = forks.positions(gapped[None])
    kinds = tuple(name for name, _ in text.questions)
    with attention.local_layers(1 if window else 0, window):
        loss, tokens_R, right_R = masked_loss(model, Batch(0, kinds, False, ids_1T, mask_1T, positions_1T, (forks,)))
        singles = []
        for branch in range(len(asked)):
            keep = torch.cat([torch.ones(forks.text, dtype=torch.bool), forks.branches_F == branch])
            row = Batch(0, ("one",), False, ids_1T[:, keep], mask_1T[:, keep], positions_1T[:, keep])
            singles.append(masked_loss(model, row))
    assert tokens_R.tolist() == [int(tokens_R1) for _, tokens_R1, _ in singles]
    assert right_R.tolist() == [int(right_R1) for _, _, right_R1 in singles]
    mean = sum(one * tokens_R1 for one, tokens_R1, _ in singles) / tokens_R.sum()
    torch.testing.assert_close(loss, mean.squeeze(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize("tokens", [300, 1200])
def test_texts_read_in_one_row_have_the_loss_and_the_gradients_of_texts_read_apart(window, tokens):
    model = build_model(BackboneTraining(stages=[STAGE], **SMALL), TOKENIZER)
    rng = random.Random(3)
    stage = Stage(steps=1, tokens=tokens, batch_tokens=2 * tokens, tasks=TASKS, forks=4, span=5000)
    parts = list(forked_batches(rng, TOKENIZER, 0, stage, "3"))
    parts = [replace(part, local=False) for part in parts]
    one, several = joined(parts), parts
    assert len(one) == 1 < len(several)

    def run(batches):
        model.zero_grad()
        total, right, marked = 0, [], []
        for batch in batches:
            with attention.local_layers(1 if window else 0, window):
                loss, tokens_R, right_R = masked_loss(model, batch)
            (loss * tokens_R.sum()).backward()
            total += float(loss.detach() * tokens_R.sum())
            right, marked = right + right_R.tolist(), marked + tokens_R.tolist()
        return total, right, marked, [weight.grad.clone() for weight in model.parameters()]

    (total, right, marked, grads), (totals, rights, marks, gradients) = run(one), run(several)
    assert (right, marked) == (rights, marks)
    assert total == pytest.approx(totals, rel=1e-5)
    torch.testing.assert_close(grads, gradients, rtol=1e-3, atol=1e-4)


def test_gaps_between_sentences_cut_none():
    stage = Stage(
        steps=12, tokens=300, batch_tokens=600, tasks=TASKS, forks=3, span=4096, gaps_between=True, dense_share=0
    )
    gapped = 0
    for batch in (batch for parts in steps(TOKENIZER, [stage], seed=0) for batch in parts):
        (forks,) = batch.forks
        after = (batch.positions_1T[0, : forks.text].diff() > 1).nonzero()[:, 0].tolist()
        gapped += bool(after)
        said = TOKENIZER.convert_ids_to_tokens(batch.ids_BT[0, : forks.text].tolist())
        assert all(said[place].endswith(".") or place == forks.text - 2 for place in after)
    assert gapped > 4
    with pytest.raises(ValueError, match="gaps_between changes nothing without forks and span"):
        Stage(steps=1, tokens=300, tasks=TASKS, gaps_between=True)


def test_texts_that_are_read_otherwise_are_not_joined():
    stage = Stage(steps=8, tokens=300, batch_tokens=1200, tasks=TASKS, forks=3, local_share=0.5, dense_share=0.3)
    for parts in steps(TOKENIZER, [stage], seed=0):
        groups = joined(parts)
        assert len({(batch.local, batch.skim) for batch in groups}) == len(groups) == len({b.local for b in parts})
        assert sum(len(batch.kinds) for batch in groups) == sum(len(batch.kinds) for batch in parts)
        assert sum(batch.ids_BT.numel() for batch in groups) == sum(batch.ids_BT.numel() for batch in parts)


def test_every_token_of_a_branch_sees_the_text_and_its_own_past_alone():
    text = quiz(TOKENIZER, ["multikey"], 256, questions=3, seed=0)
    *_, forks = fork(TOKENIZER, text.document, [[question] for _, question in text.questions])
    seen_FT = forks.allowed()
    assert seen_FT[:, : forks.text].all()
    for row, (branch, place) in enumerate(zip(forks.branches_F.tolist(), forks.places_F.tolist(), strict=True)):
        assert int(seen_FT[row, forks.text :].sum()) == place + 1
        assert (forks.branches_F[seen_FT[row, forks.text :]] == branch).all()
    assert (forks.allowed(window=7).sum(1) == 7).all()


def test_every_task_of_a_text_gets_a_question_before_any_gets_its_second():
    for seed in range(10):
        text = quiz(TOKENIZER, TASKS, 1500, questions=3, density=0.9, seed=seed)
        names = [name for name, _ in text.questions]
        assert len(set(names)) == len(names) == 3
        longest = max((question.text for _, question in text.questions), key=len)
        assert prompt_length(TOKENIZER, f"{text.document}\n{longest}") <= 1500


def test_lengths_reach_down_to_the_shortest_and_the_last_branch_asks_for_several_facts():
    stage = Stage(steps=40, tokens=1024, batch_tokens=1024, tasks=TASKS, shortest=256, forks=6, dense_share=0.0)
    parts = [batch for step in steps(TOKENIZER, [stage], seed=0) for batch in step]
    lengths = [batch.forks[0].text for batch in parts]
    assert min(lengths) < 300
    assert max(lengths) > 800
    assert max(len(batch.kinds) for batch in parts) == 6
    several = [batch for batch in parts if len(batch.kinds) > 2]
    assert several
    assert all(batch.kinds[-1] == "facts" and "facts" not in batch.kinds[:-1] for batch in several)


def test_training_on_forks_learns_and_repeats_itself():
    def run():
        model, _, log = train(BackboneTraining(stages=[STAGE], seed=1, **SMALL))
        return model.state_dict(), log[-1]

    (first, record), (second, _) = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {"passkey_rows", "multikey_rows", "two_stage_rows"} & set(record)


@pytest.mark.parametrize("shortest", [10, 5000])
def test_a_shortest_length_out_of_range_is_refused(shortest):
    with pytest.raises(ValueError, match=f"stages: shortest={shortest} is not between 256 and tokens=400"):
        Stage(steps=1, tokens=400, shortest=shortest, tasks=TASKS)
