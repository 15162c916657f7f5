"A notebook in a process of its own, as nbdev_test would run it."

import os
import sys

import jax

SKIPPED = 77


def run(path, folder, said, flags, quick):
    """Ends the process with 0, 1 or SKIPPED; what is printed goes to the file `said`.
    `flags` are those of XLA, which reads them when it first computes; `quick`: the
    compiler is to hurry.
    """
    with open(said, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    from nbdev.config import get_config
    from nbdev.test import test_nb

    os.environ["XLA_FLAGS"] = flags
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))
    jax.config.update("jax_disable_most_optimizations", quick)
    # the flags of settings.ini and `#| eval: false` say which cells are left out
    passed, seconds = test_nb(path, skip_flags=get_config().tst_flags.split())
    sys.stdout.flush()
    sys.exit(SKIPPED if seconds == 0 else not passed)
