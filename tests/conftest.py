"""Settings of all tests."""

import logging
import os
import tempfile

import pytest
from hypothesis import settings

# A machine that is busy with something else makes single examples slow.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# transformers and datasets read these when they are imported: the code of exported models is copied and data is
# prepared there, and nothing else is looked for.
_cache = tempfile.TemporaryDirectory(prefix="hf_cache_")
os.environ.setdefault("HF_MODULES_CACHE", f"{_cache.name}/modules")
os.environ.setdefault("HF_DATASETS_CACHE", f"{_cache.name}/datasets")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def captured_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # DeepSpeed, in the test of an engine before, has set that of pytest's handler
