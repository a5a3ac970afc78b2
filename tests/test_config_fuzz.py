"""Valid configs with one thing changed either still work or end in one line and exit status 2, never in a traceback."""

from __future__ import annotations

import pytest

from tests.command_line import run
from tests.config_mutations import mutant, write

FAST, ALL = 24, 1000


def check(seed, folder, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    mutation = mutant(seed)
    status, _, err = run(write(mutation, folder), capfd)
    said = f"{mutation.kind} of {mutation.key}: {status} {err}\n{mutation.text.decode(errors='replace')}"
    assert status in (0, 2), said
    if status == 0:
        assert not err, said
    else:
        line = err.removesuffix("\n")
        assert line.startswith("error: ") and line.isprintable() and len(line) <= 200, said
    if mutation.kind == "misspell":
        assert status == 2, said
        assert mutation.key in err or len(mutation.key) < 4, said


@pytest.mark.variants
@pytest.mark.parametrize("seed", range(FAST))
def test_a_changed_config_works_or_is_refused_in_one_line(seed, folder, monkeypatch, capfd):
    check(seed, folder, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST, ALL))
def test_many_changed_configs_work_or_are_refused_in_one_line(seed, folder, monkeypatch, capfd):
    check(seed, folder, monkeypatch, capfd)
