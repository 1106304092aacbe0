"""Where figures come from: the commit of a checkout, a worktree, a wheel, and the command."""

from __future__ import annotations

import sys

import pytest
from extkv.bench import provenance as module
from extkv.bench.pairs import PairSettings, open_pair
from extkv.bench.provenance import commit, provenance
from extkv.errors import InvalidArgumentError, ModelFileError

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package within a folder that may be a checkout."""
    monkeypatch.delenv("EXTKV_COMMIT", raising=False)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "python" / "extkv" / "provenance.py"))
    return tmp_path


def test_the_commit_of_the_environment_comes_first(package, monkeypatch):
    (package / ".git").mkdir()
    (package / ".git" / "HEAD").write_text(HASH)
    assert commit() == HASH[:12]
    monkeypatch.setenv("EXTKV_COMMIT", "abc")
    assert commit() == "abc"


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_commit_of_a_branch_is_found(package, is_packed):
    git = package / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    if is_packed:
        (git / "packed-refs").write_text(f"# pack-refs\n{HASH} refs/heads/main\n")
    else:
        (git / "refs" / "heads" / "main").write_text(HASH + "\n")
    assert commit() == HASH[:12]


def test_the_commit_of_a_worktree_is_found(package):
    git = package / "elsewhere"
    (git / "worktrees" / "one").mkdir(parents=True)
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "topic").write_text(HASH)
    (git / "worktrees" / "one" / "HEAD").write_text("ref: refs/heads/topic")
    (git / "worktrees" / "one" / "commondir").write_text("../..\n")
    (package / ".git").write_text(f"gitdir: {git / 'worktrees' / 'one'}\n")
    assert commit() == HASH[:12]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_wheel_has_no_commit(package, is_broken):
    if is_broken:
        (package / ".git").mkdir()
    assert commit() == "unknown"


def test_a_description_names_device_model_and_command_and_no_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, '
        '"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8, '
        '"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, '
        '"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false}'
    )
    pair = open_pair(
        PairSettings(tmp_path, has_random_weights=True, has_random_drafter=True, device="cpu")
    )
    monkeypatch.setattr(sys, "argv", ["/somewhere/extkv/__main__.py", "profile", "a model"])
    found = provenance(pair, context_lens=[4])
    assert found["command"] == "extkv profile 'a model'"
    assert found["model"] == f"{tmp_path.name}, random weights"
    assert found["draft"] == "5 layers, random weights"
    assert (found["num_drafts"], found["dtype"], found["driver"]) == ("7", "float32", "none")
    assert found["context_lens"] == "[4]"
    assert all(isinstance(value, str) for value in found.values())


def test_pairs_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="not both"):
        PairSettings(draft="d", has_random_drafter=True)
    with pytest.raises(InvalidArgumentError, match="beside random weights"):
        PairSettings("qwen3-8b", draft="d")
    with pytest.raises(InvalidArgumentError, match="random weights need a shape"):
        open_pair(PairSettings(has_random_weights=True, device="cpu"))
    with pytest.raises(ModelFileError):
        open_pair(PairSettings(tmp_path, has_random_weights=True, device="cpu"))
