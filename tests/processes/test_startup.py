"""Where Python looks for modules."""

import sys

import pytest

from lightning_rl.processes.startup import ROOT, search_here_last


@pytest.mark.parametrize("first", ["", "the folder itself"])
def test_python_m_keeps_the_current_folder_for_workers_if_it_contains_the_package(first, folder, monkeypatch):
    others = ["/somewhere", "/elsewhere"]
    for here, left in [(ROOT, [*others, str(ROOT)]), (folder, others)]:
        monkeypatch.chdir(here)
        sys.path[:] = [first and str(here), *others]
        search_here_last()
        assert sys.path == left


def test_only_the_current_folder_is_removed_from_the_front(folder):
    sys.path[:] = ["/somewhere", str(folder)]
    search_here_last()
    assert sys.path == ["/somewhere", str(folder)]
