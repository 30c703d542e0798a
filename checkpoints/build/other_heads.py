"""Heads of other kinds than the package has: would they keep more? A trial by their scores alone.

    python -m checkpoints.build.other_heads --model checkpoints/world --output runs/other-heads

All kinds are trained side by side, on the same texts in the same order. Then texts of other seeds are read with each
kind's scores, taken from a read that loses nothing, in the place of the oracle's labels, and their questions are asked
on forks: what an engine that holds a head's state, or knows its budget, would answer, without building one.
"""

# F features, R hidden_dim, K KV heads, D document tokens, C units that are kept

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill
from locret.backbone.adapters import LayerShape, describe, input_device
from locret.backbone.chunk import Attended
from locret.cli.command import parse_options, print_json
from locret.data import tasks
from locret.data.tasks.generated.base import GeneratedTask
from locret.files import locked, write_text
from locret.heads.gates import WIDEST
from locret.heads.head import RetainingHead
from locret.infer.evaluation.composing import generated
from locret.infer.evaluation.eval_options import Names, Numbers, numbers
from locret.infer.evaluation.lost_units import Asked, LostUnitsOptions, made, right, text_of
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.summary import with_error
from locret.infer.evaluation.world.ordering import difference
from locret.infer.evaluation.world.plan import SHARED
from locret.infer.infer_options import ModelOptions
from locret.labels.labels import observe
from locret.loading import load_config, load_model, load_tokenizer, resolve_device
from locret.policy.growth import check_share_count, check_shares, shared_budgets
from locret.scorers.oracle import OracleScorer
from locret.tables import markdown
from locret.train.loss import fit_and_smoothness
from locret.train.optimizer import head_optimizer
from locret.train.training_options import Loss, OptimizerOptions

_BUDGETS = (16, 32, 64, 128, 256, 512)
"""What is drawn from, a step each, where the loss looks at a budget."""
_MIDDLE = 64
"""The budget that changes nothing of a head that is told it."""


class RecurrentHead(RetainingHead):
    """A retaining head that also knows all tokens before each one, by the state of a gated recurrent unit.

    The state follows the products of W1 and is added to them: s_t = W2 act(W1 x_t + U g_t), g_t = GRU(g_(t-1), W1 x_t).

    Args:
        states: Width of the state.
        others: Of `RetainingHead`.
    """

    def __init__(self, *others: Any, states: int = 64, **options: Any) -> None:
        super().__init__(*others, **options)
        self.state = nn.GRU(self.fc1.out_features, states, batch_first=True)
        self.added = nn.Linear(states, self.fc1.out_features, bias=False)

    def _scores(self, hidden: Tensor) -> Tensor:
        return super()._scores(hidden + self.added(self.state(hidden[None])[0][0]))


class ToldHead(RetainingHead):
    """A retaining head that is told how many units stay: s = W2 act((1 + a b) * W1 x + c b), b = log2(C / 64).

    Args:
        others: Of `RetainingHead`.
    """

    def __init__(self, *others: Any, **options: Any) -> None:
        super().__init__(*others, **options)
        self.scaled, self.moved = (nn.Parameter(torch.zeros(self.fc1.out_features)) for _ in range(2))
        self.budget = _MIDDLE

    def _scores(self, hidden: Tensor) -> Tensor:
        told = torch.tensor(self.budget / _MIDDLE).log2()
        return super()._scores(hidden * (1 + self.scaled * told) + self.moved * told)


@dataclass(frozen=True)
class Kind:
    """A kind of head, and what it learns."""

    head: type[RetainingHead]
    neighbours: int = 0
    ranking: bool = True
    """Whether the softmax of its scores follows that of the labels, as our heads are trained."""
    boundary: bool = False
    """Whether the softmax of its scores follows the best C units by label, each as much, for a C that is drawn."""

    def loss(self, scores_KD: Tensor, labels_KD: Tensor, budget: int, layers: int = 1) -> Tensor:
        """Return what one of so many layers is to lower; the mean over them is what `locret-train` lowers."""
        loss = scores_KD.new_zeros(())
        if self.ranking:
            options = Loss(objective="ranking")
            fit, smoothness = fit_and_smoothness(scores_KD, labels_KD, options)
            loss = loss + fit + options.alpha * layers * smoothness  # a mean over layers, and a sum over them
        if self.boundary:
            best = labels_KD.topk(min(budget, labels_KD.shape[-1]), dim=-1).indices
            loss = loss - scores_KD.log_softmax(dim=-1).gather(-1, best).mean()
        return loss


KINDS = {
    "token": Kind(RetainingHead),
    "neighbours": Kind(RetainingHead, neighbours=3),
    "recurrent": Kind(RecurrentHead),
    "neighbours+recurrent": Kind(RecurrentHead, neighbours=3),
    "boundary": Kind(RetainingHead, neighbours=3, ranking=False, boundary=True),
    "boundary+told": Kind(ToldHead, neighbours=3, ranking=False, boundary=True),
    "ranking+boundary": Kind(RetainingHead, neighbours=3, boundary=True),
    "ranking+boundary+told": Kind(ToldHead, neighbours=3, boundary=True),
}
"""Neighbours that are learnt by ranking are our own heads."""
Text = tuple[str, int]
"""A task, and the number of its text."""
ORACLE = "labels"
"""The labels themselves: what the agnostic oracle keeps."""


@dataclass(frozen=True, kw_only=True)
class OtherHeadsOptions:
    """Which texts kinds of heads learn from, and on which they are asked."""

    model: str = "checkpoints/world"
    """Backbone."""
    kinds: Names = field(default_factory=lambda: list(KINDS))
    """Kinds of heads."""
    train_tasks: Names = field(
        default_factory=lambda: [*tasks.names("generated"), *tasks.names("lookalikes"), *tasks.names("world")]
    )
    """Tasks of the texts that are learnt from, in turn."""
    train_tokens: Numbers = "1024,1024,2048"
    """Their lengths, in turn."""
    steps: int = 390
    """How many of them, one a step."""
    hidden_dim: int = 256
    """R, the width of a head."""
    lr: float = 2e-3
    """Highest learning rate, as for `locret-train`."""
    tasks: Names = "multikey,multivalue,lookalikes/needles,world/near_keys,world/strings,world/paraphrase"
    """Tasks that are asked."""
    tokens: int = 2048
    """Length of each prompt."""
    samples: int = 8
    """Texts of each task."""
    questions: int = 4
    """Most questions asked of a text."""
    budget: Numbers = "32,64"
    """Units per KV head, each by itself."""
    layer_shares: list[float] | None = None
    """What the layers hold, in proportion, where texts are read a second time with layers that are not alike; a head
    that is told the budget is told its own layer's."""
    chunk_size: int = 512
    """Prompt tokens per forward pass."""
    local_len: int = 32
    """Last tokens of the document, which stay besides the budget."""
    seed: int = 0
    """Of the weights, and of the texts that are asked; those that are learnt from have others."""
    output: str | None = None
    """Folder for other_heads.json."""
    json: bool = False
    """Print the record instead of tables."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} is of texts that are learnt from; give 0 or more")
        if self.steps < 2:
            raise ValueError(f"--steps {self.steps} leaves no step after the warm-up; give 2 or more")
        if not 1 <= self.hidden_dim <= WIDEST:
            raise ValueError(f"--hidden-dim {self.hidden_dim} is no width of a head; give one such as 256")
        if not self.lr > 0:
            raise ValueError(f"--lr {self.lr} trains nothing; give one such as 2e-3")
        if self.output is not None and Path(self.output).exists() and not Path(self.output).is_dir():
            raise ValueError(f"--output {self.output} is a file; name a folder")
        if self.layer_shares is not None:
            check_shares(self.layer_shares)
        if not (named := self.named()):
            raise ValueError(f"--kinds is empty; choose of {', '.join(KINDS)}")
        for name in named:
            if name not in KINDS:
                raise ValueError(f"--kinds {name} is unknown; choose of {', '.join(KINDS)}")
        for budget in numbers(self.budget, "--budget"):
            self.policy(budget)
            self.texts(budget)
        for tokens in _lengths(self.train_tokens):
            self.learnt_from(tokens, 1, 0)

    def named(self) -> list[str]:
        """Return the names of the kinds, each once."""
        given = self.kinds.split(",") if isinstance(self.kinds, str) else self.kinds
        return list(dict.fromkeys(name.strip() for name in given if name.strip()))

    def policy(self, budget: int) -> RetentionPolicy:
        """Return how texts are read within a budget.

        Raises:
            ValueError: For numbers that are no policy.
        """
        try:
            return RetentionPolicy(budget=budget, chunk_size=self.chunk_size, local_len=self.local_len)
        except ValueError as error:
            given = f"--budget {budget}, --chunk-size {self.chunk_size}, --local-len {self.local_len}"
            raise ValueError(f"{given}: {error}") from None

    def texts(self, budget: int) -> LostUnitsOptions:
        """Return what `made` takes of the texts that are asked.

        Raises:
            ValueError: For tasks that there are not, or texts that lose nothing.
        """
        return LostUnitsOptions(
            model=self.model,
            tasks=self.tasks,
            tokens=self.tokens,
            samples=self.samples,
            questions=self.questions,
            budget=budget,
            chunk_size=self.chunk_size,
            local_len=self.local_len,
            seed=self.seed,
        )

    def learnt_from(self, tokens: int, samples: int, nth: int) -> LostUnitsOptions:
        """Return what `made` takes of the texts that are learnt from, of one of the lengths.

        Raises:
            ValueError: For tasks or a length that there are not.
        """
        try:
            return LostUnitsOptions(
                tasks=self.train_tasks, tokens=tokens, samples=samples, budget=0, local_len=0, seed=-1 - nth
            )
        except ValueError as error:
            raise ValueError(_of_training(error)) from None


class Trial:
    """Heads of all kinds for one backbone.

    Args:
        setup: The backbone and its tokenizer.
        options: What is trained, and asked.
    """

    def __init__(self, setup: Setup, options: OtherHeadsOptions) -> None:
        self.setup, self.options = setup, options
        backbone, plain = describe(setup.model), RetainingHeads.for_model(setup.model, options.hidden_dim)
        self.layers, self.reader = tuple(backbone.layers), plain
        self.kv_heads = [backbone.shape(layer).num_kv_heads for layer in self.layers]
        self.kinds = {name: KINDS[name] for name in options.named()}
        self.heads = {name: self._made(kind, plain) for name, kind in self.kinds.items()}
        self.held: dict[tuple[str, str], list[Tensor]] = {}
        """By kind and way of reading: for each text and layer, the share of the attention that the best units hold."""
        self.right: dict[tuple[str, str], dict[Text, float]] = {}
        """By kind and way of reading: of each text, the share of right answers."""
        shares = options.layer_shares
        if shares is not None:
            check_share_count(shares, len(self.layers))
        self.ways: dict[str, RetentionPolicy] = {}
        """How texts are read, by name."""
        for budget in numbers(options.budget, "--budget"):
            alike = options.policy(budget)
            self.ways[str(budget)] = alike
            if shares is not None:
                unlike = replace(alike, layer_budgets="shares", layer_shares=tuple(shares))
                self.ways[f"{budget}{SHARED}"] = unlike

    def _made(self, kind: Kind, plain: RetainingHeads) -> nn.ModuleList:
        torch.manual_seed(self.options.seed)

        def made_for(shape: LayerShape) -> RetainingHead:
            config = plain.config
            return kind.head(
                shape.feature_dim,
                config.hidden_dim,
                shape.num_kv_heads,
                config.hidden_act,
                initializer_range=config.initializer_range,
                neighbours=kind.neighbours,
            )

        device = input_device(self.setup.model)
        return nn.ModuleList(made_for(plain.config.shape(layer)) for layer in self.layers).to(device)

    def features(self, document_1D: Tensor) -> list[Tensor]:
        """Return (D, F) of every layer, from a read that loses nothing."""
        found: list[Tensor] = []

        def on_layer(chunk: Attended) -> None:
            found.append(self.reader.features(chunk)[0].float().clone())

        with torch.no_grad():
            observe(self.setup.model, document_1D, on_layer)
        return found

    def train(self, texts: Iterable[Asked]) -> dict[str, float]:
        """Take a step of every kind on each text; return the mean loss of the last tenth of them."""
        steps, drawn = self.options.steps, torch.Generator().manual_seed(self.options.seed)
        rate = OptimizerOptions(lr=self.options.lr, steps=steps, warmup_steps=max(1, steps // 8))
        optimizers = {name: head_optimizer(heads, rate) for name, heads in self.heads.items()}
        losses: dict[str, list[float]] = {name: [] for name in self.heads}
        for asked in tqdm(texts, "training", steps, unit="text", disable=None):
            features = self.features(asked.document_1D)
            budget = _BUDGETS[int(torch.randint(len(_BUDGETS), (), generator=drawn))]
            for name, (optimizer, schedule) in optimizers.items():
                parts = [
                    self.kinds[name].loss(scores_KD, labels_KD[: scores_KD.shape[0]], budget, len(features))
                    for scores_KD, labels_KD in zip(
                        self._scores(name, features, [budget] * len(features)), asked.labels, strict=True
                    )
                ]
                loss = torch.stack(parts).mean()
                if not loss.isfinite():
                    raise ValueError(f"--lr {self.options.lr}: the loss of {name} is no number any more; lower it")
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_value_(self.heads[name].parameters(), rate.clip_limit)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses[name].append(float(loss.detach()))
        last = max(1, steps // 10)
        return {name: sum(found[-last:]) / last for name, found in losses.items()}

    def _scores(self, name: str, features: Sequence[Tensor], budgets: Sequence[int]) -> list[Tensor]:
        """Return (K, D) of every layer, told its budget."""
        found = []
        for head, features_DF, budget in zip(self.heads[name], features, budgets, strict=True):
            if isinstance(head, ToldHead):
                head.budget = budget
            found.append(head(features_DF).T)
        return found

    @torch.no_grad()
    def ask(self, task: str, index: int, asked: Asked) -> None:
        """Read a text with the scores of every kind, and ask its questions."""
        features, before = self.features(asked.document_1D), -self.options.local_len or None
        labels = [labels_KD[:heads] for labels_KD, heads in zip(asked.labels, self.kv_heads, strict=True)]
        for way, policy in self.ways.items():
            told = own_budgets(policy, len(self.layers))
            for name in (*self.heads, ORACLE):
                scores = labels if name == ORACLE else self._scores(name, features, told)
                held = [
                    held_attention(own[:, :before], true[:, :before], budget)
                    for own, true, budget in zip(scores, labels, told, strict=True)
                ]
                self.held.setdefault((name, way), []).append(torch.stack(held))
                padded = nn.utils.rnn.pad_sequence(scores, batch_first=True)
                cache = RetentionCache(self.setup.model, OracleScorer(labels=padded), policy)
                prefill(self.setup.model, asked.document_1D, cache)
                answered = [right(self.setup.model, cache, *pair) for pair in asked.pairs]
                self.right.setdefault((name, way), {})[task, index] = sum(answered) / len(answered)

    def record(self) -> dict[str, Any]:
        """Return, by kind and way, the share of right answers of each text and of attention held in each layer."""
        return {
            name: {
                way: {
                    "right": [
                        {"task": task, "index": index, "share": share}
                        for (task, index), share in self.right[name, way].items()
                    ],
                    "held": torch.stack(self.held[name, way]).mean(dim=0).tolist(),
                }
                for way in self.ways
            }
            for name in (*self.heads, ORACLE)
        }


def own_budgets(policy: RetentionPolicy, layers: int) -> list[int]:
    """Return the units that compete in each layer."""
    return list(shared_budgets(policy.budget, layers, policy.layer_shares))


def held_attention(scores_KD: Tensor, labels_KD: Tensor, budget: int) -> Tensor:
    """Return, as a mean over KV heads, the attention of the best units by score, of that of the best by label.

    Args:
        scores_KD: Scores.
        labels_KD: Logarithms of the attention.
        budget: C, how many are the best.
    """
    attention_KD, count = labels_KD.exp(), min(budget, labels_KD.shape[-1])
    ours, best = (
        attention_KD.gather(-1, order.topk(count, dim=-1).indices).sum(dim=-1) for order in (scores_KD, labels_KD)
    )
    return (ours / best).mean()


def measure(options: OtherHeadsOptions) -> dict[str, Any]:
    """Train all kinds, ask all questions, and return the record.

    Raises:
        ValueError: If something is missing, or a text cannot be made.
    """
    source, device = ModelOptions(model=options.model), resolve_device("auto")
    config, tokenizer = load_config(source), load_tokenizer(source)
    setup = Setup(load_model(source, config, device, torch.float32), tokenizer, None, options.seed)
    asking = options.texts(min(numbers(options.budget, "--budget")))
    trial = Trial(setup, options)
    # Before anything is trained: what cannot be made is refused here.
    for task, own in _sources(options):
        for index in range(own.samples):
            try:
                text_of(task, tokenizer, own, index)
            except ValueError as error:
                raise ValueError(_of_training(error)) from None
    asked = {name: list(made(setup, generated(name), asking)) for name in asking.names()}
    last = trial.train(_learnt_from(setup, options))
    for name, texts in asked.items():
        for index, text in enumerate(tqdm(texts, name, unit="text", disable=None)):
            trial.ask(name, index, text)
    return {
        "options": {name: value for name, value in asdict(options).items() if name not in ("output", "json")},
        "layers": list(trial.layers),
        "loss": last,
        "kinds": trial.record(),
    }


def _learnt_from(setup: Setup, options: OtherHeadsOptions) -> Iterator[Asked]:
    """Yield a text of every task in turn, of one length after the other, with negative seeds."""
    sources = [made(setup, task, own) for task, own in _sources(options)]
    yield from islice((next(source) for source in cycle(sources)), options.steps)


def _sources(options: OtherHeadsOptions) -> list[tuple[GeneratedTask, LostUnitsOptions]]:
    """Return every task at every length, with how many texts are learnt from."""
    lengths = _lengths(options.train_tokens)
    names = options.learnt_from(lengths[0], 1, 0).names()
    each = -(-options.steps // (len(names) * len(lengths)))
    return [
        (generated(name), options.learnt_from(tokens, each, nth))
        for nth, tokens in enumerate(lengths)
        for name in names
    ]


def _of_training(error: ValueError) -> str:
    """Return what is wrong with texts that are learnt from, by the names of their options."""
    return str(error).replace("--tasks", "--train-tasks").replace("--tokens", "--train-tokens")


def _lengths(given: Numbers) -> list[int]:
    """Return all lengths; one that stands there twice is taken twice as often."""
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    return [number for part in parts for number in numbers(str(part), "--train-tokens")]


def tables(record: Mapping[str, Any]) -> str:
    """Return the record for people: right answers, and the attention that is held, by kind and way."""
    kinds = record["kinds"]
    first, ways = next(iter(kinds)), list(next(iter(kinds.values())))
    right = {
        way: {
            name: {(one["task"], one["index"]): 100 * one["share"] for one in found[way]["right"]}
            for name, found in kinds.items()
        }
        for way in ways
    }
    rows: list[list[str]] = []
    for name, found in kinds.items():
        cells = []
        for scores in right.values():
            mean, error = difference(scores, name, first)
            more = with_error(mean, error if isfinite(error) else None, 0)
            cells += [f"{fmean(scores[name].values()):.0f}", more]
        rows.append([name, *cells, *(f"{100 * share:.0f}" for share in found[ways[0]]["held"])])
    header = [title for way in ways for title in (f"right @ {way} (%)", f"more than {first}")]
    held_by = [f"layer {layer} @ {ways[0]} (%)" for layer in record["layers"]]
    return "\n".join(markdown(["heads", *header, *held_by], rows)) + "\n"


def command(argv: Sequence[str] | None = None) -> int:
    """Train, ask, print, and write the record; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If the file cannot be written.
    """
    title = "What heads of other kinds would keep."
    (options,), _ = parse_options("checkpoints.build.other_heads", title, [OtherHeadsOptions], argv)
    # Whether the folder can be written is known before anything is trained.
    with nullcontext() if options.output is None else locked(options.output, f"--output {options.output}"):
        record = measure(options)
        if options.output is not None:
            write_text(Path(options.output) / "other_heads.json", json.dumps(record, indent=1) + "\n")
    if options.json:
        print_json(record)
    else:
        sys.stdout.write(tables(record))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="checkpoints.build.other_heads")
