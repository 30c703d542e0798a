"""How many cache units stay, where, and when: the numbers of Algorithm 1, checked once when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from locret.base.fields import SHARE, OptionClass, Range, Refusal, check_fields, check_ranges, checked_values, shown
from locret.base.nearest import check_retired
from locret.policy.sizes import EVERY_UNIT, check_shares

if TYPE_CHECKING:
    from locret.lookups import InfLLM, Lookup

EVERYTHING = "all"
"""A second tier that keeps all that is evicted."""
BITS = (16, 8, 4, 3, 2)
"""Bits of a number; with 16 the units stay as they are."""
BLOCKS = "infllm"
"""The lookup that recalls blocks from a tier of its own."""
NO_MERGER = "none"
"""The value of `merge` where evicted units are lost."""
LEAST_CHUNK = 512
"""Tokens per forward pass that the smallest budget leaves: shorter chunks cost time and save little."""
USUAL = {"stabilizers": 2500, "local_len": 100, "chunk_size": 3072, "min_chunk": 64, "decode_interval": 64}
"""Numbers that follow from the budget where nobody gives them, each after those that it depends on: the reference's."""
FOLLOWING = tuple(USUAL)
_REFERENCE = 6000
"""The budget that these belong to."""

Wanted = Mapping[str, tuple[int, int]]
"""Numbers that nobody gave, by name: what each should be, and the budget that this belongs to."""


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy(OptionClass, usual=("budget",)):
    """The memory a prompt may use. Defaults are those of the original package (Phi-3-mini-128K, Locret section 4.1).

    A budget alone is enough: what is not given follows from it. The defaults belong to a budget of 6,000; below that,
    stabilizers that are not given are at most a quarter of the budget, local tokens at most the budget, and a chunk at
    most the budget or 512 tokens. Given numbers are taken as they are. `changed` keeps the difference: what was given
    stays, the rest follows the new budget.

    Raises:
        ValueError: If a value is of another type or not finite, out of range, or two of them contradict each other.

    Examples:
        >>> RetentionPolicy(budget=1024).stabilizers
        256
        >>> policy = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16)
        >>> policy.budget + policy.local_len  # units per KV head when a prompt has been read
        80
    """

    budget: int = 6000
    """Cache units kept per layer and KV head once a chunk has been read (the paper's b, 6000)."""
    chunk_size: int = None  # type: ignore[assignment]
    """Prompt tokens per forward pass (the paper's B, 3072; with a smaller budget at most as many, or 512)."""
    stabilizers: int = None  # type: ignore[assignment]
    """Newest units of the cache kept unconditionally after every chunk but the last (n_s, 2500; of a smaller
    budget at most a quarter); 0 protects nothing. With when="prompt_end" nothing is evicted after those chunks."""
    local_len: int = None  # type: ignore[assignment]
    """Last prompt tokens, read after the last eviction and never evicted while reading (n_loc, 100; with a smaller
    budget at most as many)."""
    positions: str = "compact"
    """Rotary position of a kept unit: its rank in the cache ("compact"), or its position in the text ("original")."""
    spacing: int = 1
    """With compact positions and head_budgets="shares": how far apart the positions of two kept neighbours may be, at
    most; as far as they are in the text, where the backbone's positions have room for that. 1: their ranks."""
    diversity: float = 0.0
    """How much it counts that a unit's key, before rotation, differs from the others of its KV head (KeyDiff): this
    part of what a unit is worth, both standardised over the head's units; the rest is its score. 0: the score alone."""
    decode_budget: int | None = None
    """Units per KV head that a cache may hold while it generates; none: it grows by one for each token."""
    decode_interval: int = None  # type: ignore[assignment]
    """Units evicted at once when generation reaches decode_budget."""
    when: str = "chunk"
    """Evict after every "chunk", in bounded memory; or once at "prompt_end", with memory that grows with the prompt."""
    turns: str = "local"
    """What follows a finished read, such as a question about it: "local", all units stay and its tokens are added, as
    in any engine, up to chunk_size tokens since that read; "text", it is read like more text and competes for the
    budget, as in the original package."""
    layer_budgets: str = "uniform"
    """The budget of each layer: "uniform"; or "pyramid", more in the first layers and less in the last (PyramidKV)."""
    pyramid_beta: int = 20
    """With layer_budgets="pyramid": share of the budget, 1 in so many, that the last layer keeps (PyramidKV's beta)."""
    head_budgets: str = "uniform"
    """The budget of each KV head: "uniform"; "adaptive", a layer keeps the best units of all its heads (Ada-KV); or
    "shares", in proportion to measured numbers, over all layers: few KV heads find what is asked, and need most of the
    units."""
    head_shares: tuple[float, ...] | None = None
    """With head_budgets="shares": the share of each KV head of each full-attention layer, layer by layer, in all units;
    none: what the retaining heads recommend, else what is measured when the backbone is loaded. Where little of a text
    stays and there is no second tier, in proportion to their squares."""
    head_floor: float = 0.2
    """With head_budgets="adaptive": share of the budget that every head keeps at least, protected units included
    (Ada-KV's alpha); 1 splits uniformly."""
    memory: str = "fixed"
    """Units kept from the first chunk to the last: "fixed", the budget at once; or growing up to it (IM), as "linear",
    "sqrt" (early), "square" (late), "square_sqrt" (late in the lower layers, early in the upper), or "adaptive" (more
    for layers that keep more of their old units). All but "fixed" need a prompt of known length."""
    decremental: bool = False
    """Make chunks smaller as memory grows, so that all chunks attend to as many units (IMDC)."""
    min_chunk: int = None  # type: ignore[assignment]
    """Smallest chunk in tokens with decremental."""
    host_budget: int | str | None = None
    """Units per layer and KV head of a second tier in host memory: the best that eviction dropped, the rest is gone
    for good; or "all", everything. None: no second tier. Needs recall."""
    recall: int = 0
    """Units of the second tier that each query of the answer, and of the prompt's local tokens, attends to besides, in
    every layer and KV head."""
    recall_by: str = "exact"
    """How they are found, by a lookup with its options: "exact" (the largest logits of all), "quest", "omnikv" or
    "infllm" (as in those papers)."""
    prefill_attention: str = "dense"
    """How the queries of a chunk attend while a prompt is read: "dense"; or sparsely, as "minference:patterns=FILE",
    "xattention:threshold=0.9", "a_shape", "vertical_slash" or "block_sparse", with options after a colon. The local
    tokens and the answer attend to everything that is held."""
    key_bits: int = 16
    """Bits of a number of a kept key: 16, as the backbone has it; or 8, 4, 3, 2, rounded once when the unit comes."""
    value_bits: int = 16
    """Bits of a number of a kept value, likewise."""
    rounding: str = "channel"
    """With fewer bits, how: "channel", keys by the ranges of their channels (KIVI, KVQuant); or "token", as they are.
    Scales are per token and group of channels: "token:group=32"."""
    exact_recent: int = 0
    """With fewer bits: newest tokens whose units are held as they are besides, until as many newer ones have come."""
    exact_layers: int = 0
    """With fewer bits: first and last full-attention layers, so many each, whose units stay as they are."""
    merge: str = NO_MERGER
    """Fold evicted units into kept ones: "none", or a merger, loco:kernels=FOLDER (docs/budgets.md)."""

    def __post_init__(self) -> None:
        self._complete({})

    def _complete(self, known: Wanted) -> None:
        """Fill in the numbers that are not given, which `known` may say, and check them all."""
        wanted = {n: known.get(n, (usual, _REFERENCE)) for n, usual in USUAL.items() if getattr(self, n) is None}
        object.__setattr__(self, "_wanted", wanted)
        for name, (number, _) in wanted.items():
            object.__setattr__(self, name, number)
        check_fields(self)
        for name, (number, reference) in wanted.items():
            most = _limits(self, name, small=self.budget < reference)
            object.__setattr__(self, name, min([number, *most]))
        check_ranges(self, RANGES)
        if self.head_shares is not None:
            check_shares(self.head_shares)
        for clash, sentence in _CLASHES:
            if clash(self):
                setting, _, rule = sentence.partition("=")
                value, rule = rule.split(" ", 1)
                numbers = {**vars(self), "most": self.budget - 1}
                raise Refusal(setting, value == "True" or value.format(**numbers), rule, numbers)
        if self.recalls_blocks:
            self.blocks()
            for name, allowed in _OF_BLOCKS.items():
                if getattr(self, name) not in allowed:
                    rule = f"has a rule of its own for {name}, so {name}={{{name}}} contradicts it; leave {name} out"
                    raise Refusal("recall_by", self.recall_by, rule, vars(self))
        if self.prefill_attention != "dense":
            from locret import prefill_attention  # needs torch, which help and completion should not load

            prefill_attention.get(self.prefill_attention)

    @classmethod
    def following_from(cls, given: Mapping[str, Any], wanted: Wanted) -> RetentionPolicy:
        """Return the policy of given numbers, where those that nobody gave should be as `wanted` says."""
        values = {field.name: field.default for field in fields(RetentionPolicy)} | dict(given)
        if unknown := values.keys() - {field.name for field in fields(RetentionPolicy)}:
            raise TypeError(f"{min(unknown)} is no field of RetentionPolicy")
        policy = object.__new__(RetentionPolicy)
        vars(policy).update(values)
        policy._complete(wanted)
        return policy

    def changed(self, **numbers: Any) -> RetentionPolicy:
        """Return the policy with other numbers, from which follows anew what nobody gave."""
        given = {one.name: getattr(self, one.name) for one in fields(RetentionPolicy) if one.name not in self.wanted}
        return self.following_from({**given, **numbers}, self.wanted)

    @property
    def wanted(self) -> Wanted:
        """The numbers that nobody gave; they follow from those given, as far as these leave what they should be."""
        return vars(self)["_wanted"]  # type: ignore[no-any-return]

    @property
    def exact_bits(self) -> bool:
        """Whether units are held as they are."""
        return self.key_bits == self.value_bits == 16

    @property
    def recalls_blocks(self) -> bool:
        """Whether old tokens go to blocks, which are recalled while a text is read too (InfLLM)."""
        return self.recall_by.partition(":")[0].strip() == BLOCKS

    @property
    def has_host(self) -> bool:
        """Whether there is a second tier."""
        return self.host_budget is not None or self.recalls_blocks

    @property
    def host_grows(self) -> bool:
        """Whether the second tier grows with the text."""
        return self.host_budget == EVERYTHING or self.recalls_blocks

    def blocks(self) -> InfLLM:
        """Return the numbers of the method that recalls blocks."""
        from locret import lookups  # needs torch, which help and completion should not load

        return lookups.in_blocks(self.recall_by).completed(self.budget)

    def lookup(self) -> Lookup | None:
        """Return what finds the units of the second tier that are recalled; None where no units are."""
        from locret import lookups  # as above

        return None if self.host_budget is None or self.recalls_blocks else lookups.get(self.recall_by)

    @property
    def least_budget(self) -> int:
        """The smallest budget that goes with what was given."""
        from locret import lookups  # as above

        if self.recalls_blocks:
            return lookups.in_blocks(self.recall_by).least_budget
        return 1 if "stabilizers" in self.wanted else self.stabilizers + 1

    @property
    def needs_length(self) -> bool:
        """Whether the length of a prompt must be known before it is read."""
        return self.memory != "fixed"

    @property
    def plans_by_length(self) -> bool:
        """Whether a plan depends on the length of a prompt, known or not."""
        return self.needs_length or self.when == "prompt_end" or self.host_grows or self.budget == EVERY_UNIT

    @property
    def prefill_units(self) -> int:
        """Most units a KV head ever holds while a prompt is read, with uniform budgets and fixed memory."""
        return self.budget + max(self.chunk_size, self.local_len)

    @classmethod
    def from_dict(cls, values: Any, where: str, following: Any = ()) -> RetentionPolicy:
        """Return the policy that a file holds under the name `where`; what it leaves out has its default.

        What an earlier version has written of features that are retired is left out: it says how a text was read.
        """
        given = checked_values(cls, without_retired(values), where)
        if not isinstance(following, (list, tuple)) or not all(name in FOLLOWING for name in following):
            raise ValueError(
                f"{where}: the numbers that nobody gave are {shown(following)}; they can be {', '.join(FOLLOWING)}"
            )
        budget = given.get("budget", cls.budget)
        wanted = {name: (given.pop(name), budget) for name in following if name in given}
        try:
            return cls.following_from(given, wanted)
        except ValueError as error:
            raise ValueError(" ".join(f"{where}: {error}".split())) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data, for config.json and reports."""
        return asdict(self)

    def following(self) -> list[str]:
        """Return the names of the numbers that nobody gave and that have an effect."""
        idle = self.idle()
        return [name for name in self.wanted if name not in idle]

    def idle(self) -> dict[str, str]:
        """Return the names of the numbers that change nothing here, each with the setting that would let it."""
        # At a prompt's end 0 stabilizers say what is so anyway.
        evicting = (self.when == "chunk" or not self.stabilizers) and not self.recalls_blocks
        spaced = "head-budgets shares" if self.positions == "compact" else "positions compact"
        needed = {
            "min_chunk": (self.decremental, "decremental"),
            "decode_interval": (self.decode_budget is not None, "decode-budget"),
            "pyramid_beta": (self.layer_budgets == "pyramid", "layer-budgets pyramid"),
            "head_shares": (self.head_budgets == "shares", "head-budgets shares"),
            "head_floor": (self.head_budgets == "adaptive", "head-budgets adaptive"),
            "spacing": (self.head_budgets == "shares" and self.positions == "compact", spaced),
            **dict.fromkeys(("rounding", "exact_recent", "exact_layers"), (not self.exact_bits, "key-bits")),
            "recall_by": (self.recall > 0 or self.recalls_blocks, "recall"),
            "stabilizers": (evicting, "recall-by exact" if self.recalls_blocks else "when chunk"),
        }
        return {name: setting for name, (used, setting) in needed.items() if not used}


RANGES: Mapping[str, Any] = {
    **dict.fromkeys(
        ("budget", "chunk_size", "local_len", "decode_interval", "pyramid_beta", "min_chunk", "spacing"), Range(1)
    ),
    **dict.fromkeys(("stabilizers", "recall", "exact_recent", "exact_layers"), Range(0)),
    **dict.fromkeys(("head_floor", "diversity"), SHARE),
    "host_budget": Range(1),
    "positions": ("compact", "original"),
    "when": ("chunk", "prompt_end"),
    "turns": ("local", "text"),
    "layer_budgets": ("uniform", "pyramid"),
    "head_budgets": ("uniform", "adaptive", "shares"),
    "memory": ("fixed", "linear", "sqrt", "square", "square_sqrt", "adaptive"),
    **dict.fromkeys(("key_bits", "value_bits"), BITS),
}
"""What each number may be by itself."""

_CLASHES: tuple[tuple[Callable[[RetentionPolicy], bool], str], ...] = (
    (
        lambda own: own.when == "chunk" and own.stabilizers >= own.budget,
        "stabilizers={stabilizers} leaves no room for scored units in budget={budget}; raise budget, lower stabilizers "
        "to at most {most}, or leave them out to follow the budget",
    ),
    (
        lambda own: own.head_budgets == "shares" and own.layer_budgets != "uniform",
        'head_budgets="shares" shares out the layers too, so layer_budgets="{layer_budgets}" has no effect; leave '
        "layer_budgets out",
    ),
    # Small heads hold fewer units than the newest ones that these two keep in every head.
    (
        lambda own: own.head_budgets == "shares" and (own.when != "chunk" or own.decode_budget is not None),
        'head_budgets="shares" leaves some KV heads no room for the newest units, which when="prompt_end" and '
        'decode_budget keep in all of them; leave both out, or use head_budgets="uniform"',
    ),
    (
        lambda own: bool(own.diversity) and (own.positions != "compact" or own.head_budgets == "adaptive"),
        'diversity={diversity} compares the keys of each KV head before rotation, which positions="{positions}" with '
        'head_budgets="{head_budgets}" does not; leave diversity out, or use compact positions and head_budgets '
        "uniform or shares",
    ),
    (
        lambda own: bool(own.diversity) and not own.exact_bits,
        "diversity={diversity} compares keys that are held as they are, but key_bits={key_bits} and value_bits="
        "{value_bits}; use 16 bits, or leave diversity out",
    ),
    (
        lambda own: own.memory != "fixed" and own.when == "prompt_end",
        'memory="{memory}" grows from chunk to chunk, but when="prompt_end" evicts once; use when="chunk" or '
        'memory="fixed"',
    ),
    (
        lambda own: own.decremental and own.memory == "fixed",
        'decremental=True makes chunks smaller as memory grows, but memory="fixed" does not grow; choose memory '
        "linear, sqrt or square",
    ),
    (
        lambda own: own.decremental and own.memory in ("square_sqrt", "adaptive"),
        'decremental=True needs one memory size for all layers, but memory="{memory}" differs by layer; choose memory '
        "linear, sqrt or square",
    ),
    (
        lambda own: own.decremental and own.min_chunk > own.chunk_size,
        "min_chunk={min_chunk} is larger than the average chunk, chunk_size={chunk_size}; lower min_chunk or raise "
        "chunk_size",
    ),
    (
        lambda own: bool(own.recall) and not own.has_host,
        f'recall={{recall}} needs a second tier to recall from; give host_budget, such as 1024 or "{EVERYTHING}"',
    ),
    (
        lambda own: isinstance(own.host_budget, str) and own.host_budget != EVERYTHING,
        f'host_budget={{host_budget}} is neither a number of units nor "{EVERYTHING}"; leave it out for no second tier',
    ),
    (
        lambda own: own.host_budget is not None and not own.recall and not own.recalls_blocks,
        "host_budget={host_budget} keeps units that nothing recalls; give recall, such as 8",
    ),
    (
        lambda own: isinstance(own.host_budget, int) and own.recall > own.host_budget,
        "recall={recall} is more than host_budget={host_budget} can hold; lower recall, or raise host_budget",
    ),
    (
        lambda own: own.head_budgets != "uniform" and (found := own.lookup()) is not None and not found.uneven,
        'head_budgets="{head_budgets}" gives heads different numbers of units, among which recall_by="{recall_by}" '
        'finds none; use recall_by="exact", or head_budgets="uniform"',
    ),
    (
        lambda own: own.recalls_blocks and not own.exact_bits,
        'recall_by="{recall_by}" gives blocks away as they are, but key_bits={key_bits} and value_bits={value_bits}; '
        "use 16 bits, or another recall_by",
    ),
    (
        lambda own: own.merge != NO_MERGER and not own.exact_bits,
        'merge="{merge}" changes kept units, but key_bits={key_bits} and value_bits={value_bits} round every unit '
        "once; use 16 bits, or leave merge out",
    ),
    (
        lambda own: own.head_budgets != "uniform" and not own.exact_bits,
        'head_budgets="{head_budgets}" gives heads different numbers of units, which are held as they are, but '
        'key_bits={key_bits} and value_bits={value_bits}; use 16 bits, or head_budgets="uniform"',
    ),
    (
        lambda own: own.merge != NO_MERGER and own.host_budget is not None,
        "merge={merge} makes up for units that are lost, but host_budget={host_budget} keeps them, and what is "
        "recalled would count twice; leave one of them out",
    ),
    (
        lambda own: own.decode_budget is not None and own.decode_budget <= own.local_len + own.decode_interval,
        "decode_budget={decode_budget} cannot hold local_len={local_len} protected units and free "
        "decode_interval={decode_interval} at a time; raise decode_budget above their sum",
    ),
)
"""What excludes what, and why; a sentence begins with the setting that it is about."""

_OF_BLOCKS: Mapping[str, tuple[Any, ...]] = {
    "host_budget": (None, EVERYTHING),
    "recall": (0,),
    "positions": ("compact",),
    "when": ("chunk",),
    "layer_budgets": ("uniform",),
    "head_budgets": ("uniform",),
    "memory": ("fixed",),
    "decode_budget": (None,),
    "diversity": (0.0,),
    "prefill_attention": ("dense",),
    "merge": (NO_MERGER,),
}
"""What the method that recalls blocks has rules of its own for."""

_RETIRED: dict[str, Any] = {"ledger": 0, "refit": False, "host_by": "score", "layer_shares": None}
"""Fields that files of earlier versions have, and the values that changed nothing."""


def without_retired(values: Any) -> Any:
    """Return the fields of a policy in a file of any version, less those of features that are retired."""
    if not isinstance(values, Mapping):
        return values
    kept = {name: value for name, value in values.items() if name not in _RETIRED}
    if str(kept.get("merge")).partition(":")[0] in ("d2o", "kvmerger"):
        del kept["merge"]
    if str(kept.get("recall_by")).partition(":")[0] == "codes":  # which found what "exact" finds
        del kept["recall_by"]
    if kept.get("layer_budgets") == "shares":
        del kept["layer_budgets"]
    if "memory" in (method := str(kept.get("recall_by"))):  # of omnikv: its share of the text is among those recalled
        kept["recall_by"] = re.sub(r"(?<=[:,])memory=[^,]*,?", "", method).rstrip(":,")
    rounding = kept.get("rounding")
    if isinstance(rounding, str) and rounding.startswith("rotated"):  # its units are still read
        kept["rounding"] = f"earlier_{rounding}"
    return kept


def usual_budget(positions: int) -> int:
    """Return the budget where nobody gives one: the reference's, or half of a backbone's positions if that is less.

    So what is kept and a chunk, which is as long at most, are within the positions that the backbone knows.
    """
    return min(_REFERENCE, max(1, positions // 2))


def policy_of(policy: Any, budget: int | None = None) -> RetentionPolicy | None:
    """Return the policy that an argument means: one, the numbers of one by name, or its budget alone."""
    if budget is not None:
        if policy is not None:
            raise ValueError(f"budget={budget!r} and policy exclude each other; give the budget in the policy")
        return RetentionPolicy(budget=budget)
    if isinstance(policy, Mapping):
        for name, usual in _RETIRED.items():
            if policy.get(name, usual) != usual:
                check_retired("policy field", name)
        for name in ("rounding", "merge", "layer_budgets"):
            check_retired(name, str(policy.get(name)).partition(":")[0])
        return RetentionPolicy.from_dict(dict(policy), "policy")
    if policy is None or isinstance(policy, RetentionPolicy):
        return policy
    shown = f"={policy!r}" if isinstance(policy, int | float | str) else ""
    kind = type(policy).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    raise ValueError(f"policy{shown} is {article} {kind}; give a RetentionPolicy, such as RetentionPolicy(budget=256)")


def _limits(policy: RetentionPolicy, name: str, *, small: bool) -> list[int]:
    """Return what a number that nobody gave may be at most; `small` budgets are below that of the reference."""
    budget, decode_budget = policy.budget, policy.decode_budget
    below = {"stabilizers": budget // 4, "local_len": budget, "chunk_size": max(LEAST_CHUNK, budget)}
    found = [below[name]] if small and name in below else []
    if policy.recalls_blocks:
        own = {"chunk_size": policy.blocks().execution_block, "local_len": 1, "stabilizers": 0}
        found += [own[name]] if name in own else []
    if policy.decremental and name == "min_chunk":
        found.append(policy.chunk_size)
    if decode_budget is not None and name == "local_len":
        found.append(max(1, decode_budget // 2))
    if decode_budget is not None and name == "decode_interval":
        found.append(max(1, decode_budget - policy.local_len - 1))
    return found
