"""What tests of datasets share."""

import pytest


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Minari's folder, empty."""
    folder = tmp_path / "datasets"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder
