"""The estimate of a replay buffer's memory before it is filled."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Box

from lightning_rl.data.replay import buffer
from lightning_rl.data.replay.buffer import describe_memory, format_bytes, get_memory_limit
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces

CHEETAH = Spaces(Box(-np.inf, np.inf, (17,), np.float64), Box(-1, 1, (6,), np.float32))
ACTION = np.zeros(6, np.float32)


def words(total: float, monkeypatch: pytest.MonkeyPatch, buffer_size: int = 1_000_000, ranks: int = 1, **config: object) -> str:
    """For half-cheetahs on a machine with `total` bytes."""
    monkeypatch.setattr(buffer, "get_memory_limit", lambda: int(total))
    return describe_memory(CHEETAH, ACTION, buffer_size, ReplayConfig(**config), ranks)


def test_the_line_describes_the_memory_of_a_buffer(monkeypatch):
    # 2 · 17 · 4 of observations, 24 of the action, 4 of the reward and two flags: 166, in steps of 4
    assert words(8e9, monkeypatch) == "replay buffer: 1,000,000 transitions, 168.0 MB of 8.0 GB memory"
    # 17 · 4, 24 + 4 + 2 in steps of 4, and 5 that say where a last observation lies and which frames belong together
    saving = words(8e9, monkeypatch, optimize_memory_usage=True)
    assert saving == "replay buffer: 1,000,000 transitions, 105.0 MB of 8.0 GB memory"
    assert words(64e9, monkeypatch, 10_000_000) == "replay buffer: 10,000,000 transitions, 1.7 GB of 64.0 GB memory"


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    expected = "replay buffer: 1,000,000 transitions on each of 2 ranks, 336.0 MB of 8.0 GB memory"
    assert words(8e9, monkeypatch, ranks=2) == expected
    with pytest.raises(SettingError):
        words(336e6 / 0.91, monkeypatch, ranks=2)


def test_more_than_nine_tenths_of_the_memory_are_refused_and_ways_out_are_named(monkeypatch):
    words(168e6 / 0.89, monkeypatch)
    with pytest.raises(SettingError) as refusal:
        words(168e6 / 0.91, monkeypatch)
    assert str(refusal.value) == (
        "replay buffer: 1,000,000 transitions, 168.0 MB, more than 90 % of this machine's 184.6 MB; "
        "lower buffer_size or set replay.optimize_memory_usage, or name a replay.directory"
    )
    with pytest.raises(SettingError) as refusal:
        words(104e6 / 0.91, monkeypatch, optimize_memory_usage=True)
    assert str(refusal.value).endswith("more than 90 % of this machine's 114.3 MB; lower buffer_size, or name a replay.directory")


def test_a_buffer_in_files_may_be_larger_than_the_memory(monkeypatch, tmp_path):
    folder = tmp_path / "not" / "yet"
    expected = f"replay buffer: 1,000,000 transitions, 168.0 MB in {folder}"
    assert words(1000, monkeypatch, directory=str(folder)) == expected
    assert not folder.exists()


def test_a_buffer_in_files_must_fit_on_the_disk(monkeypatch, tmp_path):
    with pytest.raises(SettingError) as refusal:  # 1.7e18 bytes
        words(8e9, monkeypatch, 10**16, directory=str(tmp_path))
    text = str(refusal.value)
    assert text.startswith("replay buffer: 10,000,000,000,000,000 transitions, 1,680,000,000.0 GB, but the disk of replay.directory")
    assert str(tmp_path) in text and text.endswith("lower buffer_size")


def test_the_folder_may_be_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert words(8e9, monkeypatch, directory="here/and/there").endswith("168.0 MB in here/and/there")


def test_a_container_may_use_less_than_the_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr(buffer, "CGROUP_LIMITS", ())
    machine = get_memory_limit()
    assert machine > 1e8
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(buffer, "CGROUP_LIMITS", (tmp_path / "missing", limit))
    for text, expected in (("max\n", machine), ("50000000\n", 50_000_000), (str(2 * machine), machine)):
        limit.write_text(text)
        assert get_memory_limit() == expected


@pytest.mark.parametrize(
    "size, text", [(0, "0.0 MB"), (168_000_000, "168.0 MB"), (1_000_000_000, "1.0 GB"), (1_250_000_000_000, "1,250.0 GB")]
)
def test_sizes_are_written_with_units(size, text):
    assert format_bytes(size) == text
