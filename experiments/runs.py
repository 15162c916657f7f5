"""What every experiment does beside its model: options, shares of the work between
processes, runs that are not made again, and files that say where they come from.
"""

import argparse
import json
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path

import jax
from flax import nnx

from et_nbdev.training import atomic_write, provenance

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RUNS = ROOT / "results", ROOT / "runs"  # what is kept, and checkpoints


def options(said: str, out: str | None = None) -> argparse.ArgumentParser:
    "A parser of a script's options, whose docstring is `said`; `out` is in results/."
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=said, formatter_class=kind)
    if out:
        parser.add_argument("--out", type=Path, default=RESULTS / out)
    return parser


def add_part(parser):
    told = "i/n: only the i-th of n shares of the work, for several processes"
    parser.add_argument("--part", type=share, default=slice(None), help=told)


def add_fields(parser, kind):
    "An option for each field of a dataclass, which has a default and a help."
    for f in fields(kind):
        many = isinstance(f.default, tuple)
        one = f.default[0] if many else f.default
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=type(one),
            nargs="+" if many else None,
            default=f.default,
            help=f"{f.metadata['help']} (default: {f.default})",
        )


def share(text: str) -> slice:
    "'i/n' as a slice of a list of work."
    i, n = map(int, text.split("/"))
    if not 0 <= i < n:
        raise ValueError
    return slice(i, None, n)


def keep(path: Path, row: dict):
    "Write what a run found, with commit, machine and date."
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(row | provenance()) + "\n")


def make(path: Path, run, said):
    "Make a run unless its file stands: `run()` is what it holds, `said(row)` is printed."
    if not path.exists():
        keep(path, row := run())
        print(f"{path.stem:<40} {said(row)}", flush=True)


def compare(said: str, out: str, run, told, data, variants, seeds, first=1):
    """The runs of every seed, data set and variant, `run(data, variant, seed)`; the
    first of the data sets unless others are named.
    """
    parser = options(said, out)
    add = partial(parser.add_argument, nargs="+", metavar="NAME")
    add("--data", choices=data, default=[*data][:first])
    add("--only", choices=variants, default=[*variants])
    add("--seeds", type=int, default=seeds)
    args = parser.parse_args()
    for seed, name, variant in product(args.seeds, args.data, args.only):
        path = args.out / f"{name}-{variant}-{seed}.json"
        make(path, partial(run, name, variant, seed), told)


def read(folder: Path, pattern: str = "*.json") -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def score(row: dict) -> float:
    "What a run ended at on validation pictures; infinity if it diverged."
    return float("inf") if row["validation_mse"] is None else row["validation_mse"]


def said_of(row: dict) -> str:
    return f"{score(row):.4f}  {row['seconds']:.0f} s"


def parameters_of(model: nnx.Module) -> int:
    return sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
