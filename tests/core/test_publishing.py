"""Model cards and publishing: the real huggingface_hub client against a Hub on the loopback, and every refusal."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import READ_TOKEN, HubServer, Repo
from huggingface_hub import ModelCard, constants

from locret import backbone_names, shipped
from locret.heads.fingerprint import norm_fingerprint
from locret.heads.heads import RetainingHeads
from locret.heads.push import PushOptions, push
from locret.loading import load_config, load_model
from locret.loading.options import BackboneSource
from locret.mergers.kernels import MergingKernels
from locret.scorers.chosen import chosen_heads

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture
def heads(tiny_llama: Any) -> RetainingHeads:
    tiny_llama.config._name_or_path = "org/base"
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3).annotate(evaluation={"exact_match": 0.94})


@pytest.fixture
def saved(heads: RetainingHeads, tmp_path: Path) -> Path:
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def options(saved: Path, **more: Any) -> PushOptions:
    return PushOptions(heads=str(saved), repo="org/heads", **more)


def card_of(hub: HubServer) -> str:
    return hub.repos["org/heads"].files()["README.md"].decode()


# -- cards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-heads", "smollm2-heads", "qwen2.5-coder-0.5b-heads"])
def test_the_cards_of_the_shipped_heads_are_what_this_version_writes(name: str) -> None:
    name = f"checkpoints/{name}"
    text = str(RetainingHeads.from_pretrained(name).generate_model_card())
    assert (Path(shipped.find(name)) / "README.md").read_text() == text


# -- publishing ------------------------------------------------------------------------------------------------------


def test_pushed_heads_come_back_identical_and_load_without_the_hub(
    heads: RetainingHeads, saved: Path, hub: HubServer, tiny_llama: Any
) -> None:
    record = push(options(saved, private=True))
    repo = hub.repos["org/heads"]
    assert (record["url"], record["commit"]) == (f"{hub.url}/org/heads", repo.branches["main"])
    assert (sorted(repo.files()), repo.private, len(repo.messages)) == (FILES, True, 1)
    for local in (False, True):
        loaded = RetainingHeads.from_pretrained("org/heads", local_files_only=local)
        assert all(torch.equal(weight, heads.state_dict()[name]) for name, weight in loaded.state_dict().items())
        hub.broken_with = 503
    assert loaded.config == heads.config
    loaded.check_matches(tiny_llama)
    assert 'heads="org/heads"' in card_of(hub)


def test_heads_push_themselves_and_are_loaded_by_commit_as_kernels_are(
    heads: RetainingHeads, hub: HubServer, tiny_llama: Any, tmp_path: Path
) -> None:
    assert heads.push_to_hub("org/heads") == f"{hub.url}/org/heads"
    first = hub.repos["org/heads"].branches["main"]
    RetainingHeads.for_model(tiny_llama, 12, seed=4).push_to_hub("org/heads", commit_message="Anew")
    assert hub.repos["org/heads"].messages[1:] == ["Anew"]
    old = RetainingHeads.from_pretrained("org/heads", revision=first)
    assert torch.equal(old[0].fc1.weight, heads[0].fc1.weight)
    assert 'heads="org/heads"' in card_of(hub)
    kernels = MergingKernels.for_model(tiny_llama, slots=4, seed=0)
    kernels.save_pretrained(tmp_path / "kernels")
    files = {file.name: file.read_bytes() for file in (tmp_path / "kernels").iterdir()}
    hub.repos["org/kernels"] = Repo(branches={"main": "1" * 40}, commits={"1" * 40: files})
    loaded = MergingKernels.from_pretrained("org/kernels").state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in kernels.state_dict().items())
    with pytest.raises(ValueError, match="cannot load org/heads: that revision does not exist on the Hub"):
        RetainingHeads.from_pretrained("org/heads", revision="nope")


def test_a_card_edited_on_the_hub_keeps_what_was_added_and_is_not_replaced(saved: Path, hub: HubServer) -> None:
    push(options(saved))
    repo = hub.repos["org/heads"]
    edited = repo.files()
    note = "\n## Known limits\n\nWritten by hand on the Hub.\n"
    edited["README.md"] += note.encode()
    RetainingHeads.from_pretrained(saved).annotate(license="mit").push_to_hub("org/heads")
    assert card_of(hub).endswith(note)
    assert ModelCard(card_of(hub)).data.license == "mit"
    theirs = card_of(hub).replace("Retaining heads for", "My heads for")
    repo.files()["README.md"] = theirs.encode()
    with pytest.raises(ValueError, match="the card of org/heads was edited on the Hub, .*; take it over as README.md"):
        push(options(saved))
    assert card_of(hub) == theirs
    (saved / "README.md").write_text(theirs)  # what the sentence says
    push(options(saved))
    assert "My heads for" in card_of(hub)
    assert card_of(hub).endswith(note)


def test_an_edited_card_of_the_folder_keeps_its_text_and_loads_the_repository(saved: Path, hub: HubServer) -> None:
    (saved / "trainer_state.pt").write_bytes(b"private")
    (saved / "README.md").write_text('---\ntags: [mine]\n---\nMine. heads="path/to/these-heads"\n')
    push(options(saved))
    assert card_of(hub).startswith('---\ntags: [mine]\n---\nMine. heads="org/heads"\n')
    assert sorted(hub.repos["org/heads"].files()) == FILES


# -- refusals --------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_load_and_names_that_are_none_are_refused_before_anything_else(
    saved: Path, hub: HubServer, tmp_path: Path
) -> None:
    for repo in ("heads", "org/a--b"):
        with pytest.raises(ValueError, match="is not a repository name; use org/name"):
            push(PushOptions(heads="nowhere", repo=repo))
    (saved / "README.md").rename(tmp_path / "x")
    (saved / "README.md").symlink_to(tmp_path / "x")
    with pytest.raises(ValueError, match="README.md is a link to a file elsewhere, which is not sent"):
        push(options(saved))
    (saved / "model.safetensors").write_bytes(b"xx")
    (saved / "README.md").unlink()
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        push(options(saved))
    assert hub.requests == []


def test_every_refusal_of_the_hub_is_told_apart(saved: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    push(options(saved, private=True))
    del hub.repos["org/heads"].files()["model.safetensors"]
    load = RetainingHeads.from_pretrained
    for token, action, kind, said in [
        (None, load, ValueError, r"org/heads on the Hub has no config.json or model.safetensors"),
        ("hf_wrong", load, PermissionError, r"does not accept the token \(401\)"),
        ("", load, ValueError, r"\(401\); check the name, or set HF_TOKEN"),
        (READ_TOKEN, lambda _: push(options(saved)), PermissionError, r"the token has no write access there \(403\)"),
        ("", lambda _: push(options(saved)), PermissionError, "without a token; set HF_TOKEN or run `hf auth login`"),
    ]:
        with monkeypatch.context() as patched:
            if token:
                patched.setenv("HF_TOKEN", token)
            elif token == "":
                patched.delenv("HF_TOKEN")
            with pytest.raises(kind, match=said):
                action("org/heads")
    with pytest.raises(ValueError, match=r"cannot load org/none: it is neither a folder here nor a repo.* \(404\)"):
        load("org/none")
    (saved / "README.md").write_text("---\ntags: [[1]]\n---\n")
    hub.repos.clear()
    with pytest.raises(ValueError, match='cannot push to org/heads: Invalid metadata in README.md. - "tags" must be'):
        push(options(saved))
    hub.broken_with = 500
    with pytest.raises(OSError, match=r"answered 500 \(the server is being repaired\); try again later"):
        push(options(saved))


def test_an_unreachable_hub_is_one_sentence(saved: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # its retries take 23 s
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        for action in (lambda: push(options(saved)), lambda: RetainingHeads.from_pretrained("org/none")):
            with pytest.raises(ConnectionError, match=r"the Hub at http://127.* was not reached") as error:
                action()
            assert "\n" not in str(error.value)


def test_auto_takes_the_shipped_heads_of_a_backbone_and_no_others(tmp_path: Path) -> None:
    of, named = (lambda name: BackboneSource(model=name)), "checkpoints/smollm2-heads"
    with pytest.warns(UserWarning, match="the heads .*tiny-heads are shipped with this toolkit") as said:
        found = chosen_heads("auto", of("checkpoints/tiny"))
    assert (Path(str(found)).name, said[0].filename) == ("tiny-heads", __file__)
    copied, packed = shutil.copytree("checkpoints/tiny", tmp_path / "tiny"), Path(backbone_names.find("smollm2"))
    assert chosen_heads(None, of(str(copied)), usual=True) is None, "the toy is known by its place alone"
    (tmp_path / "book.gguf").symlink_to(packed)  # as llama.cpp's users have it
    source = of(str(tmp_path / "book.gguf"))
    model = load_model(source, load_config(source), torch.device("cpu"), torch.float16)
    model.save_pretrained(tmp_path / "folder")
    weights = RetainingHeads.from_pretrained(named).config.base_weights
    assert norm_fingerprint(model) == weights, "dequantised, in half precision"
    for name in ("book.gguf", "folder"):
        with pytest.warns(UserWarning, match=f"the heads {named} are shipped with this toolkit"):
            assert chosen_heads(None, of(str(tmp_path / name)), usual=True) == named
    assert chosen_heads(None, of("smollm2")) is None, "not asked for"
    (tmp_path / "cut.gguf").write_bytes(packed.read_bytes()[:900_000])
    with pytest.raises(ValueError, match="cut.gguf cannot be read"):  # and no fallback is told of before
        chosen_heads(None, of(str(tmp_path / "cut.gguf")), usual=True)
    (tmp_path / "folder/consolidated.safetensors").symlink_to(tmp_path / "folder/model.safetensors")
    with pytest.warns(UserWarning, match="for a backbone with the same norms"):
        assert chosen_heads(None, of(str(tmp_path / "folder")), usual=True) == named, "what is loaded counts"
    with pytest.warns(UserWarning, match="for this backbone without --adapter mine, and decide"):
        assert chosen_heads(None, BackboneSource(model="smollm2", adapter="mine"), usual=True) == named
    config, whole = tmp_path / "folder/config.json", (tmp_path / "folder/config.json").read_text()
    config.write_text(whole.replace('"num_key_value_heads": 3', '"num_key_value_heads": 1'))
    assert chosen_heads(None, of(str(tmp_path / "folder")), usual=True) is None, "merged KV heads leave norms alone"
    with pytest.raises(
        ValueError, match="no heads are shipped for smolm2; name some .*smollm2-heads or .*; did you mean smollm2"
    ):
        chosen_heads("auto", of("smolm2"))
