"""Settings of all tests."""

from hypothesis import settings

# A machine that is busy with something else makes single examples slow.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
