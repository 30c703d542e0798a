"""Publishing: the real huggingface_hub client against a Hub on the loopback, and every refusal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import READ_TOKEN, WRITE_TOKEN, HubServer
from huggingface_hub import ModelCard, constants

from locret.heads.heads import RetainingHeads
from locret.heads.push import PushOptions, command, push
from locret.heads.search import find_heads
from locret.scorers.chosen import chosen_heads

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture
def heads(tiny_llama) -> RetainingHeads:
    tiny_llama.config._name_or_path = "org/base"
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3).annotate(
        base_model_revision="abc123",
        label={"kind": "log_attention", "include_last_prompt_token": True},
        policy={"budget": 64, "chunk_size": 32},
        training={"dataset": "org/long-texts", "steps": 300},
        evaluation={"exact_match": 0.94},
    )


@pytest.fixture
def saved(heads, tmp_path) -> Path:
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


@pytest.fixture
def refusing(hub, monkeypatch) -> Iterator[None]:
    """Put an address in the Hub's place that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # its retries take 23 s
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield


def assert_same(one: RetainingHeads, other: RetainingHeads) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def run_push(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "locret.heads.push", *map(str, arguments)]
    return subprocess.run(command_line, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


# ---- push_to_hub and from_pretrained


def test_pushed_heads_come_back_identical(heads, hub, tiny_llama):
    heads.push_to_hub("org/heads", private=True)
    assert sorted(hub.repos["org/heads"].files()) == FILES
    assert hub.repos["org/heads"].private
    loaded = RetainingHeads.from_pretrained("org/heads")
    assert_same(loaded, heads)
    assert loaded.config == heads.config
    loaded.check_matches(tiny_llama)
    assert b'RetainingHeads.from_pretrained("org/heads")' in hub.repos["org/heads"].files()["README.md"]


def test_save_pretrained_can_push_too(heads, hub, tmp_path):
    heads.save_pretrained(tmp_path / "h", push_to_hub=True, repo_id="org/both")
    assert hub.repos["org/both"].files()["model.safetensors"] == (tmp_path / "h" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_revision_is_loaded_by_branch_and_by_commit(heads, hub, tiny_llama):
    heads.push_to_hub("org/heads")
    first = hub.repos["org/heads"].branches["main"]
    newer = RetainingHeads.for_model(tiny_llama, 12, seed=4)
    newer.push_to_hub("org/heads")
    assert_same(RetainingHeads.from_pretrained("org/heads"), newer)
    assert_same(RetainingHeads.from_pretrained("org/heads", revision=first), heads)
    with pytest.raises(ValueError, match="cannot load org/heads: that revision does not exist on the Hub"):
        RetainingHeads.from_pretrained("org/heads", revision="nope")


def test_downloaded_heads_load_again_without_the_hub(heads, hub):
    heads.push_to_hub("org/heads")
    RetainingHeads.from_pretrained("org/heads")
    hub.broken_with = 503
    assert_same(RetainingHeads.from_pretrained("org/heads", local_files_only=True), heads)


def test_a_repository_that_is_missing_private_or_of_something_else_is_named(heads, hub, monkeypatch):
    with pytest.raises(
        ValueError, match=r"cannot load org/none: it is neither a folder here nor a repository .* \(404\)"
    ):
        RetainingHeads.from_pretrained("org/none")
    heads.push_to_hub("org/hidden", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        PermissionError, match=r"cannot load org/hidden: the Hub at .* does not accept the token \(401\)"
    ):
        RetainingHeads.from_pretrained("org/hidden")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"cannot load org/hidden: .* \(401\); check the name, or set HF_TOKEN"):
        RetainingHeads.from_pretrained("org/hidden")
    hub.repos["org/hidden"].private = False
    del hub.repos["org/hidden"].files()["model.safetensors"]
    with pytest.raises(ValueError, match=r"org/hidden on the Hub has no config.json or model.safetensors"):
        RetainingHeads.from_pretrained("org/hidden")


def test_loading_from_an_unreachable_hub_is_one_sentence(refusing):
    with pytest.raises(
        ConnectionError, match=r"cannot load org/none: .* the Hub at http://127.* was not reached"
    ) as error:
        RetainingHeads.from_pretrained("org/none")
    assert "\n" not in str(error.value)


# ---- locret-push


@pytest.mark.slow  # starts interpreters that import torch
def test_the_command_publishes_and_the_heads_load_elsewhere(saved, heads, tmp_path):
    with HubServer() as hub:
        done = run_push(hub.environment(), "--heads", saved, "--repo", "org/heads", "--private", "--json")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["url"] == f"{hub.url}/org/heads"
        assert record["commit"] == hub.repos["org/heads"].branches["main"]
        assert [file["path"] for file in record["files"]] == FILES
        assert hub.repos["org/heads"].private
        assert hub.repos["org/heads"].messages == ["Upload retaining heads with locret-push"]
        stored = hub.repos["org/heads"].files()
        assert stored["model.safetensors"] == (saved / "model.safetensors").read_bytes()
        assert stored["config.json"] == (saved / "config.json").read_bytes()
        assert b"path/to/these-heads" not in stored["README.md"]
        code = (
            "import sys, torch; from locret import RetainingHeads\n"
            "heads = RetainingHeads.from_pretrained('org/heads')\n"
            "torch.save(heads.state_dict(), sys.argv[1])"
        )
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        subprocess.run([sys.executable, "-c", code, tmp_path / "w.pt"], env=environment, check=True, timeout=300)
    mine, theirs = heads.state_dict(), torch.load(tmp_path / "w.pt", weights_only=True)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow  # starts interpreters that import torch
def test_a_refused_token_ends_the_command_with_one_line(saved, tmp_path):
    with HubServer() as hub:
        environment = {**hub.environment("hf_wrong"), "HF_HOME": str(tmp_path)}
        done = run_push(environment, "--heads", saved, "--repo", "org/heads")
        assert hub.repos == {}
        expected = f"cannot push to org/heads: the Hub at {hub.url} does not accept the token (401); renew HF_TOKEN\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"locret-push: {expected}"


def test_a_token_that_may_not_write_is_told_apart(saved, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(
        PermissionError, match=r"the token has no write access there \(403\); use a token with the 'write' role"
    ):
        push(PushOptions(heads=str(saved), repo="org/heads"))


def test_a_failing_hub_is_told_apart(saved, hub):
    hub.broken_with = 500
    with pytest.raises(
        OSError, match=r"the Hub at http://.* answered 500 \(the server is being repaired\); try again later"
    ):
        push(PushOptions(heads=str(saved), repo="org/heads"))


def test_an_unreachable_hub_is_told_apart(saved, refusing):
    with pytest.raises(ConnectionError, match="cannot push to org/heads: the Hub at http://127.* was not reached"):
        push(PushOptions(heads=str(saved), repo="org/heads"))


def test_without_a_token_nothing_is_called(saved, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        PermissionError, match="cannot push to org/heads without a token; set HF_TOKEN or run `hf auth login`"
    ):
        push(PushOptions(heads=str(saved), repo="org/heads"))
    assert hub.requests == []


def test_a_card_that_the_hub_refuses_is_one_sentence(saved, hub):
    (saved / "README.md").write_text("---\ntags: [[1]]\n---\n")
    with pytest.raises(
        ValueError, match='cannot push to org/heads: Invalid metadata in README.md. - "tags" must be a list'
    ):
        push(PushOptions(heads=str(saved), repo="org/heads"))
    assert hub.repos["org/heads"].files() == {}


def test_a_branch_is_made_and_main_stays_as_it_was(saved, hub):
    record = push(PushOptions(heads=str(saved), repo="org/heads", revision="try/one", commit_message="Hello"))
    repo = hub.repos["org/heads"]
    assert sorted(repo.files("try/one")) == FILES
    assert repo.files("main") == {}
    assert repo.messages == ["Hello"]
    assert record["url"] == f"{hub.url}/org/heads/tree/try/one"


def test_a_pull_request_leaves_main_alone_and_its_url_is_returned(saved, hub):
    record = push(PushOptions(heads=str(saved), repo="org/heads", create_pr=True))
    assert hub.repos["org/heads"].files("main") == {}
    assert record["url"] == f"{hub.url}/org/heads/discussions/1"


def test_pushing_the_same_again_makes_no_second_commit(saved, hub):
    one, two = (push(PushOptions(heads=str(saved), repo="org/heads")) for _ in range(2))
    assert one["commit"] == two["commit"]
    assert len(hub.repos["org/heads"].messages) == 1


def test_only_the_heads_own_files_are_sent_and_an_edited_card_is_kept(saved, hub):
    (saved / "trainer_state.pt").write_bytes(b"private")
    (saved / "README.md").write_text('---\nlicense: mit\n---\nMine. from_pretrained("path/to/these-heads")\n')
    push(PushOptions(heads=str(saved), repo="org/heads"))
    files = hub.repos["org/heads"].files()
    assert sorted(files) == FILES
    assert files["README.md"] == b'---\nlicense: mit\n---\nMine. from_pretrained("org/heads")\n'


def test_a_missing_card_is_written(saved, hub):
    (saved / "README.md").unlink()
    push(PushOptions(heads=str(saved), repo="org/heads"))
    assert b"# Retaining heads for org/base" in hub.repos["org/heads"].files()["README.md"]


def test_a_dry_run_lists_files_and_sizes_and_calls_nobody(saved, hub, capsys):
    assert command(["--heads", str(saved), "--repo", "org/heads", "--dry-run"]) == 0
    output = capsys.readouterr().out
    size = (saved / "model.safetensors").stat().st_size
    assert f"would push to {hub.url}/org/heads:" in output
    assert f"{size:,} bytes  model.safetensors" in output
    assert hub.requests == []


@pytest.mark.parametrize("damage", ["weights", "config", "missing"])
def test_heads_that_do_not_load_are_not_sent(saved, hub, damage):
    if damage == "weights":
        (saved / "model.safetensors").write_bytes(b"xx")
    elif damage == "config":
        (saved / "config.json").write_text('{"model_type": "llama"}')
    folder = saved / "nowhere" if damage == "missing" else saved
    message = {
        "weights": "not a whole safetensors file",
        "config": "not the config of retaining heads",
        "missing": "is not a folder",
    }
    with pytest.raises(ValueError, match=message[damage]):
        push(PushOptions(heads=str(folder), repo="org/heads"))
    assert hub.requests == []


@pytest.mark.parametrize(
    "repo", ["heads", "org/heads/x", "org/he ads", "/heads", "org/", "org/-x", "org/a--b", "org/x.git", ""]
)
def test_a_malformed_repository_name_is_refused_before_anything_else(repo):
    with pytest.raises(ValueError, match="is not a repository name; use org/name"):
        PushOptions(heads="nowhere", repo=repo)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="--create-pr opens a pull request against main, not --revision dev"):
        PushOptions(heads="h", repo="org/x", create_pr=True, revision="dev")
    with pytest.raises(ValueError, match="--commit-message is empty"):
        PushOptions(heads="h", repo="org/x", commit_message=" ")


@pytest.mark.slow  # starts interpreters that import torch
def test_wrong_usage_exits_with_2(tmp_path, capsys):
    with pytest.raises(ValueError, match="--no-such-flag is unknown"):
        command(["--heads", "h", "--repo", "org/x", "--no-such-flag"])
    with pytest.raises(ValueError, match="--heads is missing"):
        command(["--repo", "org/x"])
    done = run_push({"HF_TOKEN": WRITE_TOKEN}, "--heads", tmp_path / "none", "--repo", "org/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a folder; give one that locret-train wrote" in done.stderr


# ---- what is published besides the weights


def results(folder: Path) -> Path:
    cell = {
        "task": "passkey",
        "tokens": 64,
        "method": "locret",
        "budget": 8,
        "n": 5,
        "score": 90.0,
        "standard_error": 1,
    }
    (folder / "results.json").write_text(json.dumps({"complete": True, "cells": [cell]}))
    return folder / "results.json"


def test_licence_and_results_are_published_with_the_heads(saved, hub, tmp_path):
    push(PushOptions(heads=str(saved), repo="org/heads", license="mit", eval_results=str(results(tmp_path))))
    card = ModelCard(hub.repos["org/heads"].files()["README.md"].decode())
    assert card.data.license == "mit"
    assert card.data.model_name == "org/heads"
    assert [result.metric_value for result in card.data.eval_results] == [90.0]
    assert "| passkey | 64 | locret | 8 | 90.0 \u00b1 1.0 | 5 |" in card.content
    loaded = RetainingHeads.from_pretrained("org/heads")
    assert loaded.config.license == "mit"
    assert loaded.config.evaluation["results"][0]["score"] == 90.0
    assert json.loads((saved / "config.json").read_text())["license"] == "apache-2.0"


def test_results_of_other_heads_are_not_published(saved, tmp_path):
    file = results(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": {"weights": {"heads": "0" * 64}}}))
    with pytest.raises(ValueError, match="results.json is of other heads"):
        push(PushOptions(heads=str(saved), repo="org/heads", eval_results=str(file), dry_run=True))


def test_an_edited_card_keeps_its_text_and_gets_the_facts(saved, hub, tmp_path):
    (saved / "README.md").write_text("---\ntags: [mine]\n---\nMy own words.\n")
    push(PushOptions(heads=str(saved), repo="org/heads", license="mit", eval_results=str(results(tmp_path))))
    card = ModelCard(hub.repos["org/heads"].files()["README.md"].decode())
    assert card.content.endswith("My own words.\n")
    assert (card.data.license, card.data.tags, len(card.data.eval_results)) == ("mit", ["mine"], 1)


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_sent_through_a_link_out_of_the_folder(saved, hub, name, tmp_path):
    (saved / name).rename(tmp_path / name)
    (saved / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a link to a file elsewhere, which is not sent"):
        push(PushOptions(heads=str(saved), repo="org/heads"))
    assert hub.requests == []


def test_the_shipped_heads_are_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = push(PushOptions(heads="checkpoints/tiny-heads", repo="org/heads", dry_run=True))
    assert [file["path"] for file in record["files"]] == FILES


def test_a_licence_that_the_hub_does_not_know_how_to_read_is_refused():
    with pytest.raises(ValueError, match="--license My Own is not how the Hub spells a licence"):
        PushOptions(heads="h", repo="org/x", license="My Own")


# ---- --heads auto


def published(
    hub: HubServer, tiny_llama, name: str, scores: dict[str, float], base: str = "org/base", downloads: int = 0
):
    heads = RetainingHeads.for_model(tiny_llama, hidden_dim=4).annotate(base_model=base)
    cells = [
        {"task": task, "tokens": 64, "method": "locret", "budget": 8, "n": 5, "score": score}
        for task, score in scores.items()
    ]
    if cells:
        heads.annotate(evaluation={"results": cells})
    heads.push_to_hub(name)
    hub.repos[name].downloads = downloads


def test_the_heads_with_the_best_recorded_results_are_taken(hub, tiny_llama):
    published(hub, tiny_llama, "org/none", {}, downloads=900)
    published(hub, tiny_llama, "org/good", {"passkey": 90.0, "number": 80.0})
    published(hub, tiny_llama, "org/better", {"passkey": 95.0, "other": 1.0})
    published(hub, tiny_llama, "org/foreign", {"passkey": 100.0}, base="org/another")
    found = find_heads("org/base")
    assert found.heads == "org/better"
    assert found.reason == (
        "the best of 3 for org/base on the Hub by their recorded results (a mean of 95.0 over the 1 that all have)"
    )
    with pytest.warns(UserWarning, match="--heads auto takes org/better, the best of 3"):
        assert chosen_heads("auto", "org/base") == "org/better"
    assert chosen_heads("org/good", "org/base") == "org/good"


def test_without_results_the_most_downloaded_are_taken_and_it_says_so(hub, tiny_llama):
    published(hub, tiny_llama, "org/one", {}, downloads=3)
    published(hub, tiny_llama, "org/two", {}, downloads=30)
    found = find_heads("org/base")
    assert (found.heads, found.reason) == (
        "org/two",
        "the most downloaded of 2 for org/base on the Hub, none of which records results",
    )


def test_a_backbone_without_heads_or_without_a_name_is_refused(hub, tmp_path):
    with pytest.raises(ValueError, match="--heads auto: the Hub has no retaining heads for org/base; train some"):
        find_heads("org/base")
    with pytest.raises(ValueError, match="does not say which backbone of the Hub it is"):
        find_heads(str(tmp_path))
    with pytest.raises(ValueError, match="neither a folder nor a name on the Hub"):
        find_heads("./nowhere")
    with pytest.raises(ValueError, match="give it with --model"):
        chosen_heads("auto", None)
    hub.broken_with = 500
    with pytest.raises(OSError, match="cannot search for heads of org/base: the Hub at .* answered 500"):
        find_heads("org/base")


def test_a_folder_may_remember_which_backbone_it_is(hub, tiny_llama, tmp_path):
    published(hub, tiny_llama, "org/one", {})
    (tmp_path / "config.json").write_text('{"_name_or_path": "org/base"}')
    assert find_heads(str(tmp_path)).heads == "org/one"


def test_the_embedded_backbone_has_its_heads_beside_it_without_the_hub(hub):
    assert find_heads("checkpoints/tiny").heads.endswith("checkpoints/tiny-heads")
    assert hub.requests == []
