"""Settings of all tests."""

import logging
import os
import tempfile

import pytest
from hypothesis import settings

# A machine that is busy with something else makes single examples slow.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# transformers reads these when it is imported: it copies the code of exported models there, and looks for nothing else.
_modules = tempfile.TemporaryDirectory(prefix="hf_modules_")
os.environ.setdefault("HF_MODULES_CACHE", _modules.name)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def captured_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # DeepSpeed, in the test of an engine before, has set that of pytest's handler
