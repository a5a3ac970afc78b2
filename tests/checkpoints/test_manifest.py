"""The manifest of a checkpoint: what it holds, and what a changed file or another version is told by it."""

from __future__ import annotations

import json
import random

import torch

from lightning_rl import SettingError
from lightning_rl.checkpoints.files import differences, read_verified
from tests.checkpoints.test_files import number, save


def test_the_manifest_has_size_hash_versions_and_processor(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    manifest = json.loads((tmp_path / "last.ckpt.json").read_text())
    assert manifest["size"] == (tmp_path / "last.ckpt").stat().st_size and len(manifest["sha256"]) == 64
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["versions"]) == {"python", "torch", "numpy", "gymnasium", "lightning_rl"}
    assert set(manifest["processor"]) == {"machine", "model", "capability", "threads"}


def test_a_checkpoint_without_a_manifest_is_read(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    (tmp_path / "last.ckpt").rename(tmp_path / "copied.ckpt")
    assert number(tmp_path / "copied.ckpt") == 1 and differences(tmp_path / "copied.ckpt") is None
    (tmp_path / "copied.ckpt").rename(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt.json").unlink()
    save(tmp_path / "last.ckpt", 2)
    assert (number(tmp_path / "last.ckpt"), number(tmp_path / "last.previous.ckpt")) == (2, 1)


def test_a_flipped_bit_without_a_manifest_is_detected_or_changes_nothing(tmp_path):
    save(tmp_path / "best.ckpt", 7)
    whole, path = (tmp_path / "best.ckpt").read_bytes(), tmp_path / "flipped.ckpt"
    refused = 0
    for place in random.Random(0).sample(range(8 * len(whole)), 60):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            content = read_verified(path)
        except SettingError as error:
            assert "\n" not in str(error) and "cannot be read as a checkpoint" in str(error)
            refused += 1
        else:
            assert content["number"] == 7 and torch.equal(content["weights"], torch.full((1000,), 7.0)), place
    assert refused >= 45  # 4,000 of 4,900 bytes are weights


def test_other_versions_are_reported_in_one_line(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    assert differences(tmp_path / "last.ckpt") is None
    manifest = json.loads((tmp_path / "last.ckpt.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (tmp_path / "last.ckpt.json").write_text(json.dumps(manifest))
    assert differences(tmp_path / "last.ckpt") == (
        f"last.ckpt was written with torch 1.0 (here {torch.__version__}): continuing is not bit-exact"
    )
    for broken in ("[", "[]", "{}", '{"size": 1, "sha256": "x", "versions": 5}', "[" * 100_000):
        (tmp_path / "last.ckpt.json").write_text(broken)
        assert differences(tmp_path / "last.ckpt") is None
