"""Settings for every test."""

from hypothesis import settings

# No deadline per example, for the machine may be busy; a failure prints how to repeat it.
settings.register_profile("checkmate", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("few", deadline=None, max_examples=3)
settings.load_profile("checkmate")
