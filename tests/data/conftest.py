"""Reads that are tried again are so at once."""

import pytest

from fbt_megatron.data import retries


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.001)
