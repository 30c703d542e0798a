"""The model `locret` of lm-evaluation-harness: a backbone that reads every context into a bounded cache.

Imported only where lm-evaluation-harness is installed.
"""

# V vocabulary, L tokens of a continuation

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm.auto import tqdm

from locret import RetentionCache, RetentionPolicy, generate, loading, prefill, scorers
from locret.backbone.adapters import find_decoder, unwrap
from locret.base import method_spec
from locret.cache.reader import answering
from locret.conversation.chat import GREEDY
from locret.conversation.head_shares import sharing
from locret.generation import check_finite_logits
from locret.infer.infer_options import ModelOptions
from locret.infer.reading import ready_without_policy
from locret.loading.options import ScorerOptions
from locret.policy.resolve import check_no_turns, check_used, resolve
from locret.scorers.sirllm import surprisal_of

_MODEL_KEYS = {field.name for field in fields(ModelOptions)} - {"model", "device"}
_SCORER_KEYS = {field.name for field in fields(ScorerOptions)}
_POLICY_KEYS = {field.name for field in fields(RetentionPolicy)}
_KNOWN = _MODEL_KEYS | _SCORER_KEYS | _POLICY_KEYS


class LocretLM(TemplateLM):  # type: ignore[misc] # lm_eval has no types
    """Answers and scores from a cache of fixed size, one request at a time, whatever the batch size.

    Settings are `heads` or `scorer`, and options of `locret-infer`: budget, chunk_size, dtype, ... What is missing is
    what the heads recommend, or follows from the budget. Where the harness splits a scorer such as
    snapkv:kernel=7,pooling=max at its comma, what comes after it is still its option.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: Any = 1,
        max_batch_size: Any = None,
        max_gen_toks: int = 256,
        **settings: Any,
    ) -> None:
        super().__init__()
        settings = _rejoined(settings)
        if unknown := sorted(set(settings) - _KNOWN):
            known = ", ".join(sorted(_KNOWN))
            raise ValueError(f"--model_args: {unknown[0]} is not a setting of the model locret; choose among {known}")
        of_model, of_scorer, own = (
            {k: v for k, v in settings.items() if k in keys} for keys in (_MODEL_KEYS, _SCORER_KEYS, _POLICY_KEYS)
        )
        model = ModelOptions(model=pretrained, device="auto" if device is None else str(device), **of_model)
        scorer = ScorerOptions(**of_scorer)
        plan, self.tokenizer = ready_without_policy(model, scorer), loading.load_tokenizer(model)
        run = plan.run
        self.scorer, self._device = run.scorer, run.device
        self.policy = resolve(own, plan.recommended, named=scorer.changes)
        check_used(own, [self.policy])
        check_no_turns(own)
        self.model = loading.load_model(model, run.config, run.device, run.dtype)
        self.policy = sharing(self.policy, self.scorer, self.model, self.tokenizer, None)
        self.max_gen_toks, self._name = int(max_gen_toks), pretrained

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the id that stands for an empty context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Return the backbone's name, for the harness's own caches."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids; a text that begins with the tokenizer's bos gets no second one."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how))

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return an answer per request; the backbone's own sampling settings are not used."""
        answers = []
        for request in tqdm(requests, desc="locret: answering", disable=disable_tqdm):
            context, arguments = request.args
            answers.append(self._answer(context, dict(arguments)))
            self.cache_hook.add_partial("generate_until", (context, arguments), answers[-1])
        return answers

    def _answer(self, context: str, arguments: dict[str, Any]) -> str:
        ends = arguments.pop("until", None) or []
        stops = [ends] if isinstance(ends, str) else list(ends)
        most = next((int(arguments.pop(k)) for k in _LONGEST if arguments.get(k) is not None), self.max_gen_toks)
        ids, cache = self._ids(self.tok_encode(context)), self._cache()
        out = generate(
            self.model,
            ids,
            cache=cache,
            tokenizer=self.tokenizer,
            max_new_tokens=most,
            stop_strings=stops or None,
            pad_token_id=self.eot_token_id if (pad := self.tokenizer.pad_token_id) is None else int(pad),
            num_beams=1,
            repetition_penalty=1.0,
            **_sampling(arguments),
        )
        new = out[0, ids.shape[1] :].tolist()
        text = str(self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for stop in stops:  # one after the other, as the harness's own models cut
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability and whether greedy decoding would write it.

        A context is read once for all its continuations that follow each other, as those of a multiple choice do.
        """
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), desc="locret: scoring", disable=disable_tqdm) as bar:
            for context, group in groupby(requests, key=lambda request: request[1]):
                cache = self._cache()
                first_V = prefill(self.model, self._ids(context), cache)[0]
                for key, _context, continuation in group:
                    logits_LV = self._logits(cache, first_V, continuation)
                    check_finite_logits(self.model, logits_LV)
                    results.append(_verdict(logits_LV, continuation))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, results[-1])
                    bar.update()
        return results

    @torch.no_grad()
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, each read once as a prompt of its policy.

        A token is predicted from what was kept of the chunks before, and from its own chunk. A budget that holds the
        whole text gives the plain model's value for an unlimited context.
        """
        totals = []
        for request in tqdm(requests, desc="locret: scoring texts", disable=disable_tqdm):
            (text,) = request.args
            ids, cache = [self.prefix_token_id, *self.tok_encode(text, add_special_tokens=False)], self._cache()
            totals.append(-_surprisal_while_reading(self.model, self._ids(ids), cache))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _logits(self, cache: RetentionCache, first_V: Tensor, continuation: Sequence[int]) -> Tensor:
        """Return the (L, V) logits that predict a continuation; the cache stays as it is."""
        if len(continuation) == 1:
            return first_V[None]
        twin, base = cache.copy(), unwrap(self.model)
        twin.make_room(len(continuation))
        with answering(self.model, twin):
            tokens = self._ids(continuation[:-1])
            rest_LV = base(input_ids=tokens, past_key_values=twin, use_cache=True).logits[0]
        return torch.cat([first_V[None], rest_LV])

    def _cache(self) -> RetentionCache:
        return RetentionCache(self.model, self.scorer, self.policy)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self._device)


def _rejoined(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the scorer's own options in its text again, which the harness splits at commas."""
    if (named := settings.get("scorer")) is None:
        return settings
    spec = method_spec.parse(named, "--model_args scorer")
    own = {field.name for field in fields(scorers.find(spec.name))} - _KNOWN  # type: ignore[arg-type]
    options = {name: value for name, value in settings.items() if name in own}
    if twice := sorted(spec.options.keys() & options.keys()):
        raise ValueError(f'scorer "{spec}" has the option {twice[0]} already; give it once')
    others = {name: value for name, value in settings.items() if name not in own}
    return {**others, "scorer": str(replace(spec, options={**spec.options, **options}))}


_LONGEST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`, all of them, so that the backbone's own settings are not filled in."""
    for name in _LONGEST:
        arguments.pop(name, None)
    asked = {name: arguments.pop(name, None) for name in ("temperature", "top_p", "top_k")}
    sample = bool(arguments.pop("do_sample", bool(asked["temperature"])))
    chosen = {"do_sample": sample, **GREEDY}
    if unknown := sorted(arguments):
        raise ValueError(
            f"--gen_kwargs: {unknown[0]} is not supported by the model locret; use until, max_gen_toks, do_sample, "
            "temperature, top_p and top_k"
        )
    return {**chosen, "top_k": 0, **{name: one for name, one in asked.items() if one}} if sample else chosen


def _surprisal_while_reading(model: Any, ids_1N: Tensor, cache: RetentionCache) -> float:
    """Return the sum over all tokens but the first of -ln of the probability that the state before gives them."""
    total, read = 0.0, 0

    def look(_decoder: Any, _arguments: Any, output: Any) -> None:
        nonlocal total, read
        states_1LE = output[0]
        next_1L = ids_1N[:, read + 1 : read + 1 + states_1LE.shape[1]]
        total += float(surprisal_of(model, states_1LE[:, : next_1L.shape[1]], next_1L).double().sum())
        read += states_1LE.shape[1]

    hook = find_decoder(model).register_forward_hook(look)
    try:
        prefill(model, ids_1N, cache)
    finally:
        hook.remove()
    assert read == ids_1N.shape[1]
    return total


def _verdict(logits_LV: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the log-probability of a continuation and whether each of its tokens is the likeliest."""
    targets_L = torch.tensor(list(continuation), device=logits_LV.device)
    logs_LV = logits_LV.float().log_softmax(-1)
    likely = bool((logs_LV.argmax(-1) == targets_L).all())
    return float(logs_LV.gather(1, targets_L[:, None]).double().sum()), likely
