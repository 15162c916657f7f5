"""The strict settings every test runs under, and the fixtures they share."""

import contextlib
import gc
import os
import shutil
from pathlib import Path

import doors
import jax
import jaxlib
import pytest
from hypothesis import HealthCheck, Phase, settings
from jax.experimental.compilation_cache import compilation_cache

# XLA's older emitters compile small programs in about half the time; tests wait for the
# compiler. Set XLA_FLAGS yourself (it may be empty) to test with others. A version that
# does not know these names would end the process.
QUICK_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
if jaxlib.__version__.startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)
# Threads of BLAS and OpenMP wait for each other in busy loops: where every core has a
# worker of its own, more than one makes scikit-learn ten times as slow. The workers and
# notebooks read this, and load NumPy after it.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

doors.ask_first()

# Silent promotion and silent broadcasting hide wrong formulas: (N,) against (N, D) must
# be an error, not a guess.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "et",
    deadline=None,
    print_blob=True,  # compiling takes seconds the first time
    # the same examples on every CI run; fresh ones at home
    derandomize=bool(os.environ.get("CI")),
    # `x64` holds no state
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("et")


def examples(n):
    """Every example is small, and every shape compiled anew: a failing one is shown as
    it is, not shrunk for minutes.
    """
    return settings(
        max_examples=n, phases=(Phase.explicit, Phase.reuse, Phase.generate)
    )


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Each compiled program holds several memory maps, of which Linux grants a process
    65,530; one test file's programs are of no use to the next.
    """
    yield
    jax.clear_caches()
    gc.collect()


@contextlib.contextmanager
def without_optimizations(off):
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", off)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def compile_quickly():
    """For tests that spend nearly all their time on compiling small programs that run
    once.
    """
    with without_optimizations(True):
        yield


@pytest.fixture
def compile_fully(compile_quickly):
    "For the one test among such that looks at what the compiler makes."
    with without_optimizations(False):
        yield


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    "For tests that run the same few programs again and again."
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for kept in (options, before):
        for name, value in kept.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if kept is options:
            yield


@pytest.fixture
def x64():
    "Double precision for one test."
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def browser():
    "A Chromium: the one that CHROME names, or one on the PATH."
    sync = pytest.importorskip("playwright.sync_api").sync_playwright
    names = os.environ.get("CHROME") or "chromium", "chromium-browser", "google-chrome"
    chrome = next(filter(None, map(shutil.which, names)), None)
    if chrome is None:
        pytest.skip("needs a Chromium, on the PATH or named by CHROME")
    with sync() as play:
        browser = play.chromium.launch(executable_path=chrome, chromium_sandbox=False)
        yield browser
        browser.close()


def pytest_collection_modifyitems(items):
    "What asks for real data is marked so. Notebooks, which take longest, come first."
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")
    for item in items:
        if "et_data" in getattr(item, "fixturenames", ()):
            item.add_marker("data")


@pytest.fixture(scope="session")
def et_data():
    """The folder of real data that ET_DATA names; tests that need it are skipped where
    it is not set.
    """
    folder = os.environ.get("ET_DATA")
    if not folder:
        pytest.skip("ET_DATA is not set: no folder of real data to test on")
    if not Path(folder).is_dir():
        pytest.fail(f"ET_DATA={folder!r} is not a folder")
    return Path(folder)
