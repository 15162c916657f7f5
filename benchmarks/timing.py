"""How the benchmarks measure. Ways that are compared take turns within one process, so
that a slow moment hits all of them; medians and the middle 80 % are kept. Peak memory is
that of a process of its own: the script calls itself with `--alone`.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "experiments"))  # whose models are measured


def options(said: str, name: str, **numbers):
    "A parser with `--out`, and an option of each of these numbers with its default."
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=said, formatter_class=kind)
    for key, default in numbers.items():
        parser.add_argument(f"--{key}", type=type(default), default=default)
    out = ROOT / f"results/benchmarks/{name}.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    return parser


def write(out: Path, result: dict):
    "Results, with commit, machine and date."
    from et_nbdev.training import atomic_write, provenance

    with atomic_write(out) as path:
        path.write_text(json.dumps(result | provenance(), indent=2) + "\n")


def seconds(thunk) -> float:
    start = time.perf_counter()
    thunk()
    return time.perf_counter() - start


def in_turn(work: dict, rounds: int, warm: int = 1, again: bool = False) -> dict:
    """{name: seconds of each round} of thunks. The first `warm` rounds are not counted;
    with `again` a second call is, since whatever ran before leaves its memory behind.
    """
    times = {name: [] for name in work}
    for number in range(-warm, rounds):
        for name in random.sample([*work], len(work)):
            if again:
                work[name]()
            took = seconds(work[name])
            times[name] += [took] * (number >= 0)
    return times


def medians(times: dict) -> dict:
    return {name: float(np.median(each)) for name, each in times.items()}


def spreads(times: dict) -> dict:
    return {n: np.quantile(each, [0.1, 0.9]).tolist() for n, each in times.items()}


def compared(work: dict, rounds: int, base: str, warm: int = 1) -> dict:
    "Medians and spreads of thunks that take turns, and their ratios to the one `base`."
    times = in_turn(work, rounds, warm)
    median = medians(times)
    ratios = {name: s / median[base] for name, s in median.items()}
    for name, s in median.items():
        print(f"{name:<40}{1e3 * s:10.1f} ms{ratios[name]:8.2f} × {base}", flush=True)
    found = {"seconds": median, "spread": spreads(times), "rounds": rounds}
    return found | {f"over_{base.lower()}": ratios}


def peak() -> float:
    """This process's peak memory so far in MiB. getrusage would count what the parent
    held when it forked.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024


def alone(*words) -> dict:
    "What this script prints when it is called with `--alone` and these words."
    command = [sys.executable, sys.argv[0], "--alone", *map(str, words)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def trainer(graphdef, params, loss, optim):
    "A function that does one training step on a batch and waits for it."
    import jax
    import jax.numpy as jnp

    from et_nbdev.training import TrainState, gradient_step, make_optimizer

    optimizer = make_optimizer(optim)
    step = jax.jit(gradient_step(graphdef, loss, optimizer), donate_argnums=0)
    state = [TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))]

    def train(batch):
        state[0] = jax.block_until_ready(step(state[0], batch, jax.random.key(0))[0])

    return train
