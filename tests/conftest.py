"""Settings for every test."""

from hypothesis import settings

# Two busy cores: a slow example is the machine's doing, and a flaky deadline tells nothing.
settings.register_profile("kvcore", deadline=None, print_blob=True)
settings.load_profile("kvcore")
