"""The output folder of a training run: checked before any weights are loaded, filled only once training can begin.

OUTPUT/  config.json, model.safetensors, README.md (the heads, at the end), run.json, log.jsonl, dropped_rows.json,
         tensorboard/, wandb/, checkpoint-<step>/, published/

And what config.json and the model card say about how heads were trained; of a local path, only its last part.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret import backbone_names, shipped
from locret.base.files import PARTIAL, visible, write_text
from locret.data.training.sources import ALIASES
from locret.environment import versions
from locret.train.resumed import AUTO, RECORD
from locret.train.training_options import LossOptions

if TYPE_CHECKING:
    from locret.train.training_run import TrainingRun

LOG, TENSORBOARD, CHECKPOINTS = "log.jsonl", "tensorboard", "checkpoint-*"
DROPPED = "dropped_rows.json"
_HEADS = ("config.json", "model.safetensors", "README.md")
_OURS = (RECORD, LOG, DROPPED, TENSORBOARD, "wandb", CHECKPOINTS, *_HEADS)
_PACKAGES = ("accelerate", "datasets", "peft", "safetensors")


def check(output: str, *, resume: str | None, overwrite: bool) -> Path:
    """Return the folder, after making sure that a run may go there; writes nothing."""
    folder = Path(os.path.expanduser(output)).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {output} is a file; choose a folder")
    content = visible(folder)
    if content and not (folder / RECORD).is_file():
        raise ValueError(
            f"--output {output} holds something else than a training run ({', '.join(content[:3])}); "
            "choose a new or an empty folder"
        )
    if content and not (resume or overwrite):
        raise ValueError(
            f"--output {output} holds an earlier run; choose another folder, go on with --resume {output}, "
            "or delete it with --overwrite"
        )
    if resume not in (None, AUTO) and folder.resolve() != Path(os.path.expanduser(resume)).resolve():
        raise ValueError(f"--output {output} is another run than --resume {resume}; leave it out")
    return folder


def prepare(folder: Path, record: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder and write `run.json`, after deleting what a killed run has left half-written there.

    With `overwrite`, all files of an earlier run are deleted, and nothing else.
    """
    try:
        for path in (path for pattern in (PARTIAL, *(_OURS if overwrite else ())) for path in folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"--output {folder} cannot be written ({error.strerror}); choose another folder") from error
    write_json(folder / RECORD, record)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def run_record(config: Mapping[str, Any], chosen: set[str], processes: int, device: str) -> dict[str, Any]:
    """Return what is needed to repeat a run: command, resolved options, versions, commit and hardware."""
    found = versions()
    commit = found.pop("commit", None)
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "config": dict(config),
        "chosen": sorted(chosen),
        "versions": {**found, **{package: version(package) for package in _PACKAGES}},
        "commit": commit,
        "processes": processes,
        "device": device,
        "platform": platform.platform(),
    }


def label_notes(loss: LossOptions) -> dict[str, Any]:
    queries = {
        "last": "the answer's tokens",
        "each": "the tokens of the answers to all questions, each asked by itself",
    }[loss.answers]
    return {
        "kind": loss.label_kind,
        "include_last_prompt_token": loss.include_last_prompt_token,
        "reduction": f"maximum over {queries} and the query heads of the group",
    }


def training_notes(run: TrainingRun, earlier: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """Return a summary of the run: its options, `earlier` ones of the heads it went on from, and other `facts`."""
    backbone, data, loss, o = run.backbone, run.data, run.loss, run.optimizer
    published = {name.lower(): entry for name, entry in ALIASES.items()}.get(data.dataset.lower())
    pinned = published.revision if published else None
    return {
        "dataset": published.repo if published else _public(data.dataset),
        "dataset_revision": data.dataset_revision or pinned,
        "backbone": _public(backbone.model),
        **({"weights": f"dequantised from {backbone.gguf}, so rounded as that file is"} if backbone.gguf else {}),
        "adapter": backbone.adapter and _public(backbone.adapter),
        "template": data.template,
        "max_prompt_tokens": data.max_prompt_tokens,
        "steps": o.steps,
        "optimizer": f"AdamW, lr {o.lr}, betas {list(o.betas)}, weight decay {o.weight_decay}",
        "schedule": f"linear warm-up over {o.warmup} steps, linear decay to 0 at {o.steps}",
        "clip": "none" if o.clip == "none" else f"by {o.clip}, {o.clip_limit}",
        "objective": loss.objective,
        "alpha": loss.alpha,
        "seed": o.seed,
        **facts,
        **({"went_on_from": _public(backbone.init_from)} if backbone.init_from else {}),
        **({"earlier": earlier} if backbone.init_from and earlier else {}),
    }


def _public(name: str) -> str:
    """Return a Hub id as it is, and the last part of a path, which tells nothing about this machine."""
    name = shipped.find(backbone_names.find(name))
    return Path(name).name if os.path.exists(name) or name.count("/") > 1 else name
