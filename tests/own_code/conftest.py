"""Changes of torch itself end with their test, and `pytest -n 0 -s` prints the table of changes."""

import pytest

from tests.own_code.changes import TABLE, restore_torch, show_table


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    restore_torch()


@pytest.fixture(scope="session", autouse=True)
def print_table(request):
    yield
    if TABLE and request.config.getoption("capture") == "no":
        print(f"\n{show_table()}")
