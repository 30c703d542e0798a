"""What the embedded backbone learns from: copies of random sequences, and chats about texts with hidden facts."""
# B batch, T tokens of a sequence, A tokens to copy

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints.build.drills import DRILLS, USUAL, drill
from checkpoints.build.forks import Forks, fork
from locret.data.tasks.generated.mixture import mixture, quiz
from locret.data.text.embedded_tokenizer import (
    BOS,
    COLORS,
    COUNTRY_OF,
    NAMES,
    PEOPLE,
    ROOMS,
    STORY_WORDS,
    THINGS,
    VARIABLES,
)
from locret.data.text.filler import FillerOptions, generator


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the curriculum."""

    steps: int
    """Optimizer steps."""
    lr: float = 2.0e-3
    """Learning rate, after warm-up."""
    decay: bool = False
    """Whether the learning rate falls linearly over the stage, to a tenth."""
    tokens: int
    """Longest text of this stage, in tokens of the chat prompt; lengths are drawn between a quarter of it and it."""
    batch_tokens: int = 4096
    """Tokens of a batch; short sequences make larger batches."""
    tasks: list[str] = field(default_factory=list)
    """Tasks whose facts are hidden in the texts; none makes the stage copy only."""
    density: float = 0.4
    """Largest share of a text taken by facts and questions; the share is drawn between a tenth of it and it."""
    single_share: float = 0.5
    """Share of the texts that hide one task's facts and ask one question, as evaluation does."""
    focus_share: float = 0.0
    """Share of the texts that hide one task's facts and ask all their questions; what is left mixes the tasks."""
    distractors: float = 0.3
    """Largest shares of filler sentences with a number, and of those that look like a fact; each share is drawn."""
    lookalikes: float = 0.0
    """Largest share of filler sentences with a fact's own marks about what nobody asks; the share is drawn."""
    dense_share: float = 0.34
    """Share of batches that are dense copying."""
    drill_share: float = 0.0
    """Share of batches that are drills."""
    drills: list[str] = field(default_factory=lambda: list(USUAL))
    """Which ones, each as often as it is named."""
    span: int = 0
    """Highest position id reached by random gaps, in half of the batches; 0 makes no gaps."""
    gaps: int = 8
    """Most gaps of a text. Each cuts the sentence in two that it falls into, so short texts bear few or none."""
    gaps_between: bool = False
    """Whether gaps come after full stops alone, so that no sentence is cut, in texts that fork."""
    sharpen: float = 1.0
    """Factor on the logits of attention when the stage begins: the more tokens, the less of it falls on the one that is
    found, and learning makes up for that slowly."""
    louder: float = 1.0
    """Factor on the embeddings when the stage begins, taken back by the last norm. Layers after the first hear what a
    token is only as loudly as its embedding stands beside what the first layer adds, and copying needs to know."""
    local_share: float = 0.0
    """Share of batches in which the first layers see a short window only."""
    bare_share: float = 0.0
    """Share of forking texts that are nothing but their facts, so that every step of an answer has few places to choose
    from."""
    skim_share: float = 0.0
    """Share of forking texts that are read with a window in all layers, so that only the questions see far: the cost of
    a long text then grows with its length, and what is learnt does not depend on reading everything at once."""
    shortest: int = 0
    """Shortest text with facts, in tokens; as many texts are then between it and twice it as between half of `tokens`
    and `tokens`. 0 draws all lengths from half of `tokens` on alike."""
    forks: int = 0
    """Questions asked about one text at once, each as if it alone followed the text; 0 asks as the shares above say."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"stages: {name}={getattr(self, name)} trains nothing; give 1 or more")
        for name in self.drills:
            if name not in DRILLS:
                raise ValueError(f"stages: drills has {name}, which is none; choose from {', '.join(DRILLS)}")
        if self.gaps < 1:
            raise ValueError(f"stages: gaps={self.gaps} is not a number of gaps; give 1 or more, or span=0 for none")
        if not self.drills:
            raise ValueError("stages: drills is empty, so there is nothing to draw; leave it out, or name some")
        if self.drills != list(USUAL) and not self.drill_share:
            raise ValueError("stages: drills changes nothing without drill_share; give it, or drop drills")
        if self.tasks and self.tokens < 256:
            raise ValueError(f"stages: tokens={self.tokens} is too short to hide facts in; give 256 or more")
        for name in ("skim_share", "bare_share"):
            if getattr(self, name) and not self.forks:
                raise ValueError(
                    f"stages: {name}={getattr(self, name)} changes nothing without forks; give forks, or drop it"
                )
        if self.gaps_between and not (self.forks and self.span):
            raise ValueError("stages: gaps_between changes nothing without forks and span; give both, or drop it")
        if self.focus_share and self.forks:
            raise ValueError(f"stages: focus_share={self.focus_share} changes nothing with forks; drop one of the two")
        if not 0 < self.sharpen <= 4:
            raise ValueError(
                f"stages: sharpen={self.sharpen} is no factor on attention's logits; give more than 0, to 4"
            )
        if not 0 < self.louder <= 64:
            raise ValueError(f"stages: louder={self.louder} is no factor on the embeddings; give more than 0, to 64")
        if self.shortest and not 256 <= self.shortest <= self.tokens:
            raise ValueError(f"stages: shortest={self.shortest} is not between 256 and tokens={self.tokens}; change it")


@dataclass(frozen=True)
class Batch:
    """What is read at once; a step has one or more."""

    stage: int
    kinds: tuple[str, ...]
    """What each row is: "dense", the drill, the task it asks one question of, or "facts" for many questions."""
    local: bool
    """Whether the first layers see a short window only."""
    skim: bool = field(default=False, kw_only=True)
    """Whether the text, but not what follows it, sees a window in all layers."""
    ids_BT: Tensor
    mask_BT: Tensor
    """The tokens to be predicted."""
    positions_1T: Tensor
    forks: tuple[Forks, ...] = ()
    """How the texts that its only row is made of fork, if they do; `kinds` then says what each branch is."""

    def to(self, device: str) -> Batch:
        """Return the batch with its tensors on `device`."""
        return replace(
            self,
            ids_BT=self.ids_BT.to(device),
            mask_BT=self.mask_BT.to(device),
            positions_1T=self.positions_1T.to(device),
            forks=tuple(forks.to(device) for forks in self.forks),
        )

    def marked_rows(self) -> Tensor:
        """Return for each token that bears loss which of `kinds` it belongs to."""
        if not self.forks:
            return self.mask_BT[:, 1:].nonzero()[:, 0]
        rows, start, before = [], 0, 0
        for forks in self.forks:
            start += forks.text
            mask_F = self.mask_BT[0, start : start + len(forks.branches_F)]
            rows.append(before + forks.branches_F[mask_F])
            start += len(forks.branches_F)
            before += int(forks.branches_F[-1]) + 1
        return torch.cat(rows)


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Return the same batches, those of forking texts that are read alike as one: large products are cheaper."""
    alike: dict[Any, list[Batch]] = {}
    for index, batch in enumerate(batches):
        alike.setdefault((batch.stage, batch.local, batch.skim) if batch.forks else index, []).append(batch)
    return [_joined(group) if len(group) > 1 else group[0] for group in alike.values()]


def _joined(batches: Sequence[Batch]) -> Batch:
    return replace(
        batches[0],
        kinds=tuple(kind for batch in batches for kind in batch.kinds),
        ids_BT=torch.cat([batch.ids_BT for batch in batches], dim=1),
        mask_BT=torch.cat([batch.mask_BT for batch in batches], dim=1),
        positions_1T=torch.cat([batch.positions_1T for batch in batches], dim=1),
        forks=tuple(forks for batch in batches for forks in batch.forks),
    )


def fact_tokens(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the ids of the tokens that answers are made of: keys, colours, words of stories, pieces of numbers."""
    pieces = [*(f"{digit}" for digit in range(10)), *(f"{pair:02d}" for pair in range(100))]
    words = [*NAMES, *VARIABLES, *COLORS, *PEOPLE, *THINGS, *ROOMS, *COUNTRY_OF.values(), *STORY_WORDS]
    words += [*pieces, *(f"##{piece}" for piece in pieces)]
    return torch.tensor(tokenizer.convert_tokens_to_ids(words))


def dense_batch(rng: random.Random, alphabet_A: Tensor, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, T) of random sequences followed by a random rotation of themselves, and the loss mask (B, T).

    Half of the rows draw from few tokens, so that one token of context does not tell what follows.
    The mask marks tokens to be predicted: all of the copy whose predecessor is in the copy.
    """
    torch_rng = torch.Generator().manual_seed(rng.getrandbits(63))
    half = tokens // 2
    ids_BT = torch.empty(rows, 2 * half, dtype=torch.long)
    for row in range(rows):
        if rng.random() < 0.5:
            pool = alphabet_A[torch.randint(len(alphabet_A), (max(half // 4, 8),), generator=torch_rng)]
            source = pool[torch.randint(len(pool), (half,), generator=torch_rng)]
        else:
            source = alphabet_A[torch.randint(len(alphabet_A), (half,), generator=torch_rng)]
        ids_BT[row] = torch.cat([source, source.roll(-rng.randrange(half))])
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    mask_BT[:, half + min(4, half - 1) :] = True
    return ids_BT, mask_BT


def fact_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: str
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return chats about texts with hidden facts.

    Returns:
        Their ids (B, T), right-padded; the mask (B, T) of answer tokens; and what each row is (`Batch.kinds`).
    """
    length = _length(rng, stage)
    rows = max(stage.batch_tokens // length, 1)
    pairs, kinds = [], []
    for row in range(rows):
        filler = _filler(rng, stage)
        form = rng.random()
        single = form < stage.single_share
        focused = single or form < stage.single_share + stage.focus_share
        asked = [rng.choice(stage.tasks)] if focused else stage.tasks
        kinds.append(asked[0] if single else "facts")
        sample = mixture(
            tokenizer,
            asked,
            length,
            seed=f"{seed}/{row}",
            density=0.01 if single else stage.density * rng.uniform(0.1, 1.0),
            questions=1 if single else None,
            all_keys=True,
            filler=filler,
        )
        messages = [{"role": "system", "content": sample.system}] if sample.system else []
        messages.append({"role": "user", "content": sample.content})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        reply = tokenizer(sample.reply, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        pairs.append((prompt + reply, [False] * len(prompt) + [True] * len(reply)))
    return *_padded(pairs, tokenizer.pad_token_id), tuple(kinds)


def forked_batches(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, index: int, stage: Stage, seed: str
) -> Iterator[Batch]:
    """Yield texts with hidden facts, one after the other, each with up to `stage.forks` questions that fork off."""
    length = _length(rng, stage)
    for row in range(max(stage.batch_tokens // length, 1)):
        single = rng.random() < stage.single_share
        bare = bool(stage.bare_share) and rng.random() < stage.bare_share
        text = quiz(
            tokenizer,
            [rng.choice(stage.tasks)] if single else stage.tasks,
            length,
            questions=stage.forks,
            seed=f"{seed}/{row}",
            density=0.01 if single else stage.density * rng.uniform(0.1, 1.0),
            filler=_filler(rng, stage),
            bare=bare,
        )
        asked = [[question] for _, question in text.questions]
        kinds = [name for name, _ in text.questions]
        if len(asked) > 2:  # the last branch asks several at once, as the rows that heads learn from do
            some = rng.sample(text.questions, rng.randint(2, min(6, len(asked))))
            asked, kinds = [*asked[:-1], [question for _, question in some]], [*kinds[:-1], "facts"]
        ids_1T, mask_1T, forks = fork(tokenizer, text.document, asked, text.system)
        longest = int(forks.places_F.max()) + 1
        gaps = stage.span - longest if stage.span and rng.random() < 0.5 else 0
        places = _after_stops(tokenizer, ids_1T[0, : forks.text]) if stage.gaps_between else None
        positions_1T = forks.positions(gapped_positions(rng, forks.text, gaps, stage.gaps, places))
        local, skim = rng.random() < stage.local_share, rng.random() < stage.skim_share
        yield Batch(index, tuple(kinds), local, ids_1T, mask_1T, positions_1T, (forks,), skim=skim)


def _length(rng: random.Random, stage: Stage) -> int:
    """Return the length of the next texts, in tokens of the chat prompt."""
    if not stage.shortest:
        return rng.randint(max(stage.tokens // 2, 256), stage.tokens)
    return round(stage.shortest * (stage.tokens / stage.shortest) ** rng.random())


def _filler(rng: random.Random, stage: Stage) -> FillerOptions:
    return FillerOptions(
        number_share=rng.uniform(0, stage.distractors),
        keylike_share=rng.uniform(0, stage.distractors),
        noise_share=rng.choice((0.0, 0.0, 0.5, 1.0)),
        lookalike_share=rng.uniform(0, stage.lookalikes),
        digits=(4, 5, 7, 10) if stage.lookalikes else (5, 7, 10),
    )


def drill_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, stage: Stage
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return drills as `fact_batch` does."""
    length = rng.randint(stage.tokens // 2, stage.tokens)
    drills = [drill(rng, tokenizer, length, stage.drills) for _ in range(max(stage.batch_tokens // length, 1))]
    rows = [(ids, mask) for ids, mask, _ in drills]
    return *_padded(rows, tokenizer.pad_token_id), tuple(name for *_, name in drills)


def _padded(rows: Sequence[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack rows of ids and masks to (B, T), padded on the right."""
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), longest), pad)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (ids, mask) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = torch.tensor(mask)
    return ids_BT, mask_BT


def _after_stops(tokenizer: PreTrainedTokenizerFast, ids_T: Tensor) -> list[int]:
    """Return the places of tokens that come after a full stop, and the last place."""
    stops = torch.tensor(tokenizer.convert_tokens_to_ids([".", "##."]))
    return [*(torch.isin(ids_T[:-1], stops).nonzero()[:, 0] + 1).tolist(), len(ids_T) - 1]


def gapped_positions(
    rng: random.Random, tokens: int, span: int, most: int = 8, places: Sequence[int] | None = None
) -> Tensor:
    """Return ascending position ids (1, T) from 0, with up to `most` random gaps that reach at most `span` - 1.

    Gaps come before any token but the first, or before those at `places` alone.
    """
    positions_T = torch.arange(tokens)
    room = rng.randint(0, max(span - tokens, 0))
    gaps = rng.randint(1, most)
    cuts = sorted(rng.random() for _ in range(gaps - 1))
    for low, high in zip([0.0, *cuts], [*cuts, 1.0], strict=True):
        place = rng.choice(places) if places else rng.randrange(1, tokens)
        positions_T[place:] += int((high - low) * room)
    return positions_T[None]


def steps(
    tokenizer: PreTrainedTokenizerFast, stages: Sequence[Stage], seed: int, start: int = 0
) -> Iterator[list[Batch]]:
    """Yield the batches of every step from step `start` (counted from 0) on; they depend on seed and step alone."""
    plan = [index for index, stage in enumerate(stages) for _ in range(stage.steps)]
    for step, index in enumerate(plan[start:], start=start):
        rng = generator(seed, "train", "backbone", step)
        yield batches_of(rng, tokenizer, index, stages[index], f"{seed}/{step}")


def batches_of(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, index: int, stage: Stage, seed: str
) -> list[Batch]:
    """Return what is read at once in a step of `stage`, the one with this index: texts, drills, or random copies."""
    form = rng.random()
    if form < stage.drill_share:
        ids_BT, mask_BT, kinds = drill_batch(rng, tokenizer, stage)
    elif not stage.tasks or form < stage.drill_share + stage.dense_share:
        length = rng.randint(max(stage.tokens // 4, 16), stage.tokens)
        ids_BT, mask_BT = dense_batch(rng, fact_tokens(tokenizer), max(stage.batch_tokens // length, 1), length)
        ids_BT[:, 0] = tokenizer.convert_tokens_to_ids(BOS)
        kinds = ("dense",) * len(ids_BT)
    elif stage.forks:
        return list(forked_batches(rng, tokenizer, index, stage, seed))
    else:
        ids_BT, mask_BT, kinds = fact_batch(rng, tokenizer, stage, seed)
    gapped = stage.span and rng.random() < 0.5
    positions_1T = gapped_positions(rng, ids_BT.shape[1], stage.span if gapped else 0, stage.gaps)
    return [Batch(index, kinds, rng.random() < stage.local_share, ids_BT, mask_BT, positions_1T)]
