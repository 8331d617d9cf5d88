"""Reads that are tried again are so at once, and what modules warn of can be looked at."""

import logging

import pytest

from fbt_megatron.data import retries


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def captured_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # DeepSpeed, in the test of an engine before, has set that of pytest's handler
