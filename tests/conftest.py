"""The strict settings every test runs under, and the fixtures they share."""
import os
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

# Silent promotion and silent broadcasting hide wrong formulas: (N,) against (N, D) must be an error, not a guess.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "et", deadline=None, print_blob=True,           # compiling takes seconds the first time
    derandomize=bool(os.environ.get("CI")),         # the same examples on every CI run; fresh ones at home
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],  # `x64` holds no state
)
settings.load_profile("et")


@pytest.fixture
def x64():
    "Double precision for one test."
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def et_data():
    "The folder of real data that ET_DATA names; tests that need it are skipped where it is not set."
    folder = os.environ.get("ET_DATA")
    if not folder:
        pytest.skip("ET_DATA is not set: no folder of real data to test on")
    if not Path(folder).is_dir():
        pytest.fail(f"ET_DATA={folder!r} is not a folder")
    return Path(folder)
