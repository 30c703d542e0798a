"""The engine of `locret-eval`: what it counts, what it computes once, and what the oracle keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import cases, prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetainingHeads, RetentionPolicy, scorers
from locret.data import tasks
from locret.infer.evaluation import methods, runner
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.records import key
from locret.labels.labels import answer_labels

POLICY = RetentionPolicy(budget=64, chunk_size=32, stabilizers=16, local_len=8)
# 2 layers of 2 KV heads: key and value of 8 float32 numbers each, a float32 score and an int32 position.
UNIT_BYTES = 2 * 2 * (2 * 8 * 4 + 4 + 4)


@pytest.fixture(scope="module")
def setup(backbone: Path, heads: Path) -> Setup:
    """Return the random backbone with its untrained heads."""
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    return Setup(model, tokenizer, RetainingHeads.from_pretrained(heads), 0)


@pytest.fixture
def prompt(setup: Setup) -> Callable[..., Prompt]:
    """Return a function that makes a prompt of a task."""

    def make(name: str = "passkey", tokens: int = 400, seed: int = 0) -> Prompt:
        sample = tasks.get(name).sample(setup.tokenizer, tokens, seed=seed)
        return Prompt(prompt_ids(setup.tokenizer, sample), sample, setup)

    return make


@pytest.mark.parametrize("name", ["locret", "untrained", "random", "streaming", "streaming-original", "oracle"])
def test_every_method_holds_the_same_units_in_the_same_bytes(name: str, prompt: Callable[..., Prompt]) -> None:
    method = methods.get(name)
    found = runner.answer(prompt(), runner.Run(method, method.policy(POLICY)), 4)
    assert found["kept_units"] == 64 + 8  # budget and local tokens
    assert found["peak_units"] == 64 + 32  # budget and one chunk
    # All layers share a workspace of one layer's keys.
    counted = (64 + 32) * (UNIT_BYTES + 2 * 8 * 4)
    assert found["cache_bytes"] == found["peak_bytes"] == counted


def test_all_methods_take_the_same_bytes_whatever_the_length(prompt: Callable[..., Prompt]) -> None:
    sizes = {
        runner.answer(prompt(tokens=tokens), runner.Run(methods.get(name), POLICY), 4)["peak_bytes"]
        for name in ("locret", "random", "streaming", "oracle")
        for tokens in (300, 600)
    }
    assert len(sizes) == 1


def test_units_of_the_plain_cache_are_counted_where_the_prompt_ends(prompt: Callable[..., Prompt]) -> None:
    found = runner.answer(prompt(tokens=400), runner.Run(methods.get("full"), None), 5)
    written = found["generated_tokens"]
    assert found["kept_units"] == 400
    assert found["peak_units"] == 400 + written - 1  # the last token is never read
    # 2 layers of 2 KV heads with key and value of 8 float32 numbers.
    assert found["cache_bytes"] == 400 * 2 * 2 * 2 * 8 * 4
    assert found["peak_bytes"] == (400 + written - 1) * 2 * 2 * 2 * 8 * 4


def test_a_prompt_within_the_budget_peaks_at_what_it_holds(prompt: Callable[..., Prompt]) -> None:
    policy = RetentionPolicy(budget=500, chunk_size=64, stabilizers=16, local_len=8)
    found = runner.answer(prompt(tokens=300), runner.Run(methods.get("random"), policy), 4)
    assert found["kept_units"] == 300
    assert found["peak_units"] == 300 + found["generated_tokens"] - 1


@pytest.mark.parametrize("name", ["locret", "random", "streaming", "streaming-original", "oracle"])
@pytest.mark.parametrize("chunk_size", [37, 400])
def test_with_room_for_all_every_method_says_what_the_plain_cache_says(
    name: str, chunk_size: int, prompt: Callable[..., Prompt]
) -> None:
    method, one = methods.get(name), prompt("multikey", 350, seed=3)
    policy = RetentionPolicy(budget=350, chunk_size=chunk_size, stabilizers=16, local_len=8)
    full = runner.answer(one, runner.Run(methods.get("full"), None), 20)
    ours = runner.answer(one, runner.Run(method, method.policy(policy)), 20)
    assert ours["prediction"] == full["prediction"]
    assert ours["generated_tokens"] == full["generated_tokens"]


def test_greedy_is_greedy_whatever_the_backbone_recommends(setup: Setup, prompt: Callable[..., Prompt]) -> None:
    assert setup.model.generation_config.do_sample, "the fixture's backbone recommends sampling"
    run = runner.Run(methods.get("full"), None)
    assert len({runner.answer(prompt(), run, 16)["prediction"] for _ in range(3)}) == 1


def test_an_answer_stops_at_the_end_of_the_turn(
    setup: Setup, backbone: Path, prompt: Callable[..., Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, run = prompt(), runner.Run(methods.get("full"), None)
    # A backbone without an end in its generation_config ends where its tokenizer says.
    monkeypatch.setattr(setup.model.generation_config, "eos_token_id", None)
    written = setup.model.generate(one.ids_1N, max_new_tokens=8, do_sample=False)[0, one.ids_1N.shape[1] :].tolist()
    last = next(place for place in range(2, 8) if written[place] not in written[:place])
    other = AutoTokenizer.from_pretrained(backbone)
    other.eos_token = other.convert_ids_to_tokens(written[last])
    found = runner.answer(Prompt(one.ids_1N, one.sample, Setup(setup.model, other, None, 0)), run, 8)
    assert found["generated_tokens"] == last + 1


def test_the_oracle_keeps_what_the_true_answer_looks_at(setup: Setup, prompt: Callable[..., Prompt]) -> None:
    from locret import RetentionCache, prefill

    one = prompt("passkey", 300)
    reply = setup.tokenizer(one.sample.reply, add_special_tokens=False)["input_ids"]
    answer = torch.tensor([[*reply, setup.tokenizer.eos_token_id]])
    labels = answer_labels(setup.model, one.ids_1N, answer, "log_attention", True)
    assert torch.equal(one.labels, labels)
    # One chunk, so that nothing is evicted on the way: the best labels of all but the local tokens stay.
    policy = RetentionPolicy(budget=40, chunk_size=300, stabilizers=0, local_len=8)
    cache = RetentionCache(setup.model, scorers.get("oracle", labels=one.labels), policy)
    prefill(setup.model, one.ids_1N, cache)
    for layer in range(2):
        best = labels[layer, :, :292].topk(40).indices.sort().values
        assert torch.equal(cache.kept_positions(layer)[0, :, :40], best)


def test_labels_are_computed_once_per_sample_and_only_for_the_oracle(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(1)
        return answer_labels(*given)

    monkeypatch.setattr(methods, "answer_labels", counted)
    places = cases([tasks.get("passkey")], [300], 2, 0)
    budgets = [Allotment({"budget": b, "chunk_size": 64, "local_len": 8, "stabilizers": 8}) for b in (32, 64, 96)]
    list(runner.evaluate(setup, places, runner.plan_runs([methods.get("random")], budgets), set()))
    assert not calls
    found = list(runner.evaluate(setup, places, runner.plan_runs([methods.get("oracle")], budgets), set()))
    assert len(found) == 6
    assert len(calls) == 2


@pytest.mark.parametrize("name", tasks.names("generated"))
def test_a_depth_on_record_is_that_of_the_first_statement(setup: Setup, name: str) -> None:
    task = tasks.get(name)
    for case in cases([task], [1024], 3, 0):
        depth = case.axes.get("depth")
        depths = case.sample(setup.tokenizer).depths
        assert not depths or depths[0] == depth


def test_a_sample_is_written_once_for_all_its_runs_and_not_at_all_when_all_are_done(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    sample = runner.Case.sample

    def counted(self: runner.Case, tokenizer: Any) -> Any:
        written.append(self.index)
        return sample(self, tokenizer)

    monkeypatch.setattr(runner.Case, "sample", counted)
    places = cases([tasks.get("number")], [300], 3, 0)
    runs = runner.plan_runs([methods.get("full"), methods.get("random")], [Allotment(POLICY.to_dict())])
    done = {key(places[1].axes | run.axes) for run in runs} | {key(places[2].axes | runs[0].axes)}
    found = list(runner.evaluate(setup, places, runs, done))
    assert written == [0, 2]
    assert [(record["index"], record["method"]) for record in found] == [(0, "full"), (0, "random"), (2, "random")]


def test_depths_are_even_over_the_samples_and_the_plain_cache_runs_once() -> None:
    places = cases([tasks.get("passkey")], [300, 400], 4, 7)
    assert [place.axes["depth"] for place in places] == [0.125, 0.375, 0.625, 0.875] * 2
    budgets = [Allotment({"budget": b, "chunk_size": 64, "local_len": 8, "stabilizers": 8}) for b in (32, 64)]
    runs = runner.plan_runs([methods.get("full"), methods.get("streaming-original")], budgets)
    assert [run.axes["budget"] for run in runs] == [None, 32, 64]
    assert [run.policy and run.policy.positions for run in runs] == [None, "original", "original"]


def test_every_registered_scorer_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(scorers.names()) - {"retaining_heads"} <= set(methods.names())

    class Newest(scorers.StreamingScorer):
        """Keep the newest."""

        name = "newest"

    monkeypatch.setattr(scorers, "_SCORERS", (*scorers._SCORERS, Newest))
    method = methods.get("newest")
    assert isinstance(method.scorer, Newest)
    assert method.description == "keep the newest"
    assert "newest" in methods.names()


def test_untrained_heads_have_the_trained_ones_size_and_follow_the_seed(setup: Setup) -> None:
    def weights(seed: int) -> torch.Tensor:
        fresh = Setup(setup.model, setup.tokenizer, setup.heads, seed).untrained
        assert fresh.config.hidden_dim == 8
        return torch.cat([weight.flatten() for weight in fresh.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_modifiers_of_a_method_change_its_policy_and_stay_in_its_name() -> None:
    method = methods.get("streaming+original+prompt_end")
    policy = method.policy(RetentionPolicy(budget=64, chunk_size=32, stabilizers=8, local_len=4))
    assert method.name == "streaming+original+prompt_end"
    assert (policy.positions, policy.when, policy.budget) == ("original", "prompt_end", 64)
    for name, message in (
        ("streaming+pyramide", r"\+pyramide is unknown; did you mean \+pyramid"),
        ("full+prompt_end", "full evicts nothing, so"),
        ("stroming+original", "did you mean streaming"),
    ):
        with pytest.raises(ValueError, match=message):
            methods.get(name)


@pytest.mark.parametrize(
    "name", ["random+pyramid", "random+linear+decremental", "random+adaptive", "random+prompt_end"]
)
def test_a_modified_method_is_measured_and_its_policy_is_on_record(name: str, prompt: Callable[..., Prompt]) -> None:
    method, one = methods.get(name), prompt(tokens=400)
    policy = RetentionPolicy(budget=64, chunk_size=32, stabilizers=8, local_len=8, min_chunk=8)
    run, plain = runner.Run(method, method.policy(policy)), runner.Run(methods.get("random"), policy)
    assert set(run.axes) - set(plain.axes) == set(method.changes)
    assert all(run.axes[key] == value for key, value in method.changes.items())
    found, fixed = runner.answer(one, run, 4), runner.answer(one, plain, 4)
    assert found["kept_units"] <= 64 + 8
    if name == "random+pyramid":  # 8 stabilizers and a pyramid of 56, 110 in the first layer and 2 in the second
        assert found["kept_units"] == fixed["kept_units"] == 64 + 8
    if "decremental" in name:
        assert found["peak_bytes"] < fixed["peak_bytes"]
    if "prompt_end" in name:
        assert (found["peak_units"], found["kept_units"]) == (400, 72)


def test_a_scorer_runs_in_the_positions_of_its_paper_unless_the_user_or_a_modifier_says_otherwise() -> None:
    policy = RetentionPolicy(budget=64, chunk_size=32, stabilizers=8, local_len=4)
    assert methods.get("snapkv").policy(policy).positions == "original"
    assert methods.get("snapkv").policy(policy, {"positions"}).positions == "compact"
    assert methods.get("snapkv+compact").policy(policy).positions == "compact"
    assert methods.get("locret").policy(policy).positions == "compact"
    assert methods.get("snapkv").description.startswith("keep what")


def test_a_sample_that_cannot_be_made_is_found_before_the_run(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    places = cases([tasks.get("number"), tasks.get("passkey")], [300, 400], 3, 0)
    made = runner.Case.sample

    def last_is_too_long(self: runner.Case, tokenizer: Any) -> Any:
        if (self.task.name, self.tokens, self.index) == ("number", 300, 2):
            raise ValueError("tokens=300 cannot hold it")
        return made(self, tokenizer)

    monkeypatch.setattr(runner.Case, "sample", last_is_too_long)
    left, unmade = runner.settled(places, setup.tokenizer)
    assert list(map(str, unmade)) == ["sample 2 of number cannot be made at 300 tokens: tokens=300 cannot hold it"]
    assert left == [case for case in places if (case.task.name, case.tokens) != ("number", 300)]
