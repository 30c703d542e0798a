"""Ways of sharding that cannot be, or would be ignored, are refused early, in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, GptOssConfig, PreTrainedConfig

from locret import RetainingHeads, loading
from locret.cli.command import parse_options
from locret.distributed.ranks import Ranks, check_launcher
from locret.distributed.shard import part_of
from locret.infer.command import OPTION_CLASSES, Options, contents
from locret.loading.options import ShardedSource

REFUSED = [
    ({"shard": "tp", "shard_offload": "cpu"}, "not for --shard tp, which keeps every part on its device; change one"),
    ({"shard": "zero3", "shard_offload": "nvme"}, "--shard-offload nvme and --shard-offload-dir DIR"),
    ({"shard": "fsdp", "device_map": "auto"}, "as they are, and not with --device-map; drop one of them"),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED, ids=[expected[:30] for _, expected in REFUSED])
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--shard") as refusal:
        ShardedSource(model="checkpoints/tiny", **options)
    assert expected in str(refusal.value)


def test_one_process_has_nobody_to_share_with() -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node N -m locret.train.command"):
        ShardedSource(model="checkpoints/tiny", shard="fsdp")


def test_commands_of_one_process_say_so() -> None:
    from locret.infer.chat_command import command as chat
    from locret.train.merging_command import command as kernels

    for command in (chat, kernels):
        with pytest.raises(ValueError, match="--shard is for locret-train, .*; this command is one process, so leave"):
            command(["--model", "checkpoints/tiny", "--shard", "fsdp"])


def test_what_accelerate_would_wrap_is_refused_with_our_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true: .*add --shard fsdp"):
        check_launcher()


def test_processes_that_read_compare_texts_and_heads(tmp_path: Path) -> None:
    def found(text: str) -> dict[str, Any]:
        (tmp_path / "a.txt").write_text(text)
        parts, _ = parse_options("x", "", OPTION_CLASSES, ["--model=m", "--prompt-file", str(tmp_path / "a.txt")])
        run: Any = SimpleNamespace(scorer=RetainingHeads.from_pretrained("checkpoints/tiny-heads"))
        return contents(Options(*parts, chosen=frozenset()), SimpleNamespace(run=run))  # type: ignore[misc]

    assert found("one") == found("one")
    assert found("one") != found("two")
    assert found("one")["the weights of --heads"]


def test_rows_are_dealt_out_but_under_tensor_parallelism() -> None:
    rows = list(range(7))
    assert [Ranks(rank, 2).under("fsdp").share(rows) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5]]
    assert [Ranks(rank, 2).under("tp").share(rows) for rank in range(2)] == [rows, rows]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV2Config(), "cannot share the KV heads of deepseek_v2 equally .*: it has 1; use --shard fsdp"),
        (GptOssConfig(), "no plan for tensor parallelism of gpt_oss .*; use --shard fsdp"),
    ],
    ids=["latent attention", "no plan"],
)
def test_backbones_that_cannot_be_split_by_heads_are_refused_by_config(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        part_of(config, 2)


def test_an_adapter_is_not_put_on_heads_that_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = ShardedSource(model="checkpoints/tiny", adapter="somewhere", shard="tp")
    with pytest.raises(ValueError, match="--adapter somewhere changes weights that --shard tp splits; merge it"):
        loading.load_model(options, loading.load_config(options), torch.device("cpu"), torch.float32)
