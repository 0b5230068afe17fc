"""Settings of all tests."""

from hypothesis import settings

# No example may fail because the machine is busy.
settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")
