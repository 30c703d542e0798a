"""Many questions about one text: read the text once, and let every question and its answer fork off its end."""
# T tokens of a row, F tokens of all branches

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from locret.data.tasks.generated.base import Question


@dataclass(frozen=True)
class Forks:
    """A row of a text and, behind it, branches that each continue the text as if the others were not there."""

    text: int
    """Tokens of the text."""
    branches_F: Tensor
    """Which branch each later token belongs to, from 0."""
    places_F: Tensor
    """How many tokens of its branch come before it."""

    def allowed(self, window: int | None = None) -> Tensor:
        """Return (F, T) bool: what each token of a branch sees; with a window the last `window` tokens up to itself."""
        own_FF = self.branches_F[:, None] == self.branches_F
        place_F = self.text + self.places_F
        place_T = torch.cat([torch.arange(self.text, device=place_F.device), place_F])
        distance_FT = place_F[:, None] - place_T
        seen_FT = torch.cat([own_FF.new_ones(len(place_F), self.text), own_FF], dim=1) & (distance_FT >= 0)
        return seen_FT if window is None else seen_FT & (distance_FT < window)

    def allowed_everywhere(self, window: int | None = None) -> Tensor:
        """Return (T, T) bool: what each token of the text and of the branches sees."""
        place_T = torch.arange(self.text, device=self.places_F.device)
        distance_TT = place_T[:, None] - place_T
        seen_TT = (distance_TT >= 0) & (distance_TT < (self.text if window is None else window))
        nothing_TF = seen_TT.new_zeros(self.text, len(self.branches_F))
        return torch.cat([torch.cat([seen_TT, nothing_TF], dim=1), self.allowed(window)])

    def positions(self, text_1T: Tensor) -> Tensor:
        """Return (1, T) position ids: those of the text, then of every branch as it goes on from there."""
        return torch.cat([text_1T, text_1T[:, -1:] + 1 + self.places_F], dim=1)

    def to(self, device: str) -> Forks:
        """Return the same with its tensors on `device`."""
        return Forks(self.text, self.branches_F.to(device), self.places_F.to(device))


def fork(
    tokenizer: PreTrainedTokenizerFast, document: str, asked: Sequence[Sequence[Question]], system: str = ""
) -> tuple[Tensor, Tensor, Forks]:
    """Return one row in which each list of questions follows the document, with its replies, on a branch of its own.

    Returns:
        Its ids (1, T), the mask (1, T) of the replies' tokens, and how the row forks.
    """
    text: list[int] = []
    rows: list[tuple[list[int], list[bool]]] = []
    for questions in asked:
        content = f"{document}\n{' '.join(question.text for question in questions)}"
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        end = prompt.index(document) + len(document)
        text = text or _encode(tokenizer, prompt[:end])
        question_ids = _encode(tokenizer, prompt[end:])
        reply_ids = [*_encode(tokenizer, " ".join(q.reply for q in questions)), tokenizer.eos_token_id]
        rows.append((question_ids + reply_ids, [False] * len(question_ids) + [True] * len(reply_ids)))
    ids = [*text, *(token for tokens, _ in rows for token in tokens)]
    mask = [*(False for _ in text), *(marked for _, marks in rows for marked in marks)]
    branches = [index for index, (tokens, _) in enumerate(rows) for _ in tokens]
    places = [place for tokens, _ in rows for place in range(len(tokens))]
    forks = Forks(len(text), torch.tensor(branches), torch.tensor(places))
    return torch.tensor([ids]), torch.tensor([mask]), forks


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
