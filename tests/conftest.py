"""What every test shares: hypothesis profiles, and a header that says how to repeat the run."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings

# No deadline: a shared machine stalls for longer than any example takes, and a test that fails
# because of that teaches us to ignore failures.
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
# The same examples in every run: a failure is about the change, and new examples are nightly's.
settings.register_profile(
    "ci", max_examples=100, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile(
    "nightly",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)  # hypothesis takes the option over in its own pytest_configure
def pytest_configure(config: pytest.Config) -> None:
    """Give every random run a seed that its header can name."""
    if config.option.hypothesis_seed is None and not settings().derandomize:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    repeat = f"repeat with --hypothesis-seed={seed}" if seed else "the same examples every time"
    return f"hypothesis: profile {PROFILE}, {repeat}"
