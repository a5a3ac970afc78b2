"""Content is read only if it is no larger in memory than its file, whatever shape its plain data has."""

from __future__ import annotations

import pytest
import torch

from lightning_rl.checkpoints.archive import NotPlainError, read_archive


def itself(kind):
    if kind == "list":
        tree = []
        tree.append(tree)
    else:
        tree = {}
        tree["again"] = tree
    return tree


def doubled(kind, levels=60):
    """A tree of 2 ** levels leaves that takes a few bytes for each level."""
    tree = {"list": [0], "tuple": (0,), "dict": {"a": 0}}[kind]
    for _ in range(levels):
        tree = {"list": [tree, tree], "tuple": (tree, tree), "dict": {"a": tree, "b": tree}}[kind]
    return tree


def nested(levels):
    tree = []
    for _ in range(levels):
        tree = [tree]
    return tree


TREES = {
    "a list in itself": itself("list"),
    "a dict in itself": itself("dict"),
    "two lists in each other": (lambda one, other: (one.append(other), other.append(one), one)[2])([], []),
    "lists shared 60 levels deep": doubled("list"),
    "tuples shared 60 levels deep": doubled("tuple"),
    "dicts shared 60 levels deep": doubled("dict"),
    "lists nested 250 deep": nested(250),
}


@pytest.mark.parametrize("name", TREES)
def test_plain_data_that_never_ends_is_refused(name, tmp_path):
    torch.save({"hyper_parameters": {"net_arch": TREES[name]}}, tmp_path / "a.ckpt")
    with pytest.raises(NotPlainError, match=r"plain data that repeats itself|nested more than 200 deep"):
        read_archive(tmp_path / "a.ckpt")


def test_plain_data_that_is_shared_as_a_run_shares_it_is_read(tmp_path):
    betas, weight = (0.9, 0.999), torch.zeros(1000)
    content = {"groups": [{"betas": betas, "weights": [weight, weight]} for _ in range(100)], "deep": nested(100)}
    torch.save(content, tmp_path / "a.ckpt")
    read = read_archive(tmp_path / "a.ckpt")
    assert read["groups"][99]["betas"] == betas and read["deep"] == nested(100)
