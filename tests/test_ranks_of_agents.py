"""Two ranks learn from worlds of their own: one policy for all agents, groups, games of turns, past selves, several behaviors."""

import pytest
import torch

from tests.agents_on_two_ranks import CASES
from tests.processes.test_ranks import two_processes


@pytest.mark.slow
def test_two_ranks_have_equal_weights_and_go_on_exactly(tmp_path):
    ranks = two_processes(tmp_path, f"-m tests.agents_on_two_ranks {tmp_path}")
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], (said[0][1][-2000:], said[1][1][-2000:])
    assert "new episodes" not in said[0][0]
    ours, theirs = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    for case in CASES:
        whole = ours[case]["whole"]
        for other in (ours[case]["parts"], theirs[case]["whole"], theirs[case]["parts"]):
            assert other["weights"].keys() == whole["weights"].keys(), case
            assert [name for name, weight in whole["weights"].items() if not torch.equal(weight, other["weights"][name])] == [], case
            assert other["counts"] == whole["counts"] and other["ratings"] == whole["ratings"], case
    elo, elos, scores, taken_at = ours["self-play"]["whole"]["ratings"]
    assert elo != 1200 and sum(games for *_, games, _ in scores) > 10 and taken_at % 48 == 0
    assert len(elos) == 3  # the last two snapshots and the random player
