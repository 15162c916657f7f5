"""Speed and memory of the image model: inference and training step, at two sizes,
beside the plain reference, the same in PyTorch where it is installed, the authors' own
code where ET_AUTHORS names a checkout of it, and the machine's own peak.

Everything is timed in turn within one process, and what is reported are ratios of
medians; peak memory and the time to the first result come from a process of their own
each. Writes results/benchmarks/images.json. Run it on a machine that does nothing else.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from authors_reference import FOLDER, AuthorsEnergyTransformer, authors_difference
from flax import nnx
from memory import peak
from reference import PlainEnergyTransformer

from et_nbdev.training.checkpoint import atomic_write, provenance
from et_nbdev.training.loop import (
    OptimConfig,
    TrainState,
    in_parts,
    make_optimizer,
    make_step,
)
from et_nbdev.vision.data import occlude
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
from et_nbdev.vision.train import completion_loss as _completion_loss
from et_nbdev.vision.train import part_size as _part_size

SIZES = {  # name: (configuration, batch)
    "small": (
        ImageConfig(
            image_size=64,
            patch_size=8,
            dim=128,
            num_heads=4,
            head_dim=32,
            num_memories=512,
        ),
        64,
    ),
    "base": (ImageConfig(), 4),
}
# name: (class, options of the descent in training, whether a batch is taken in parts)
MODELS = {
    "library": (ImageEnergyTransformer, {"unroll": True}, True),
    "library, whole batches": (ImageEnergyTransformer, {"unroll": True}, False),
    "library, recomputed": (ImageEnergyTransformer, {"remat": True}, True),
    "reference": (PlainEnergyTransformer, {}, False),
}
TRAINING_ONLY = ("library, whole batches", "library, recomputed")
if FOLDER:
    MODELS["authors' code"] = (AuthorsEnergyTransformer, {}, False)
TORCH = importlib.util.find_spec("torch") is not None
PYTORCH = {"PyTorch": False, "PyTorch, compiled": True} if TORCH else {}
# n × k times k × m
PRODUCTS = (
    (3072, 3072, 3072),
    (784, 768, 3072),
    (784, 3072, 768),
    (4096, 128, 512),
    (4096, 512, 128),
)


def work(kind: str, size: str, name: str):
    """A thunk that does one inference or one training step of the named model, and
    waits for it.
    """
    config, B = SIZES[size]
    if name in PYTORCH:
        from torch_reference import torch_work

        return torch_work(kind, config, B, compiled=PYTORCH[name])
    make, options, parts = MODELS[name]
    model = make(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    patches = jax.random.normal(
        jax.random.key(0), (B, config.num_tokens, config.patch_dim)
    )
    occluded, masked = occlude(
        jax.random.key(1), B, config.num_tokens, config.num_tokens // 2, 0.1
    )
    if kind == "inference":
        call = jax.jit(
            lambda params, patches: nnx.merge(graphdef, params)(patches, masked)
        )
        return lambda: jax.block_until_ready(call(params, patches))

    def completion(model, batch):
        patches, occluded, masked = batch
        predicted = model(patches, masked, **options)
        return _completion_loss(predicted, patches, occluded), {}

    def loss(model, patches, key):
        size = _part_size(B, config.num_tokens) if parts else B
        return in_parts(completion, model, (patches, occluded, masked), size)

    optimizer = make_optimizer(OptimConfig(steps=10**6, warmup=1))
    step = make_step(graphdef, loss, optimizer, 0)
    state = [TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))]

    def train():
        state[0], metrics = step(state[0], patches)
        jax.block_until_ready(state[0])

    return train


def product(n: int, k: int, m: int):
    "A thunk that multiplies two matrices."
    a = jax.random.normal(jax.random.key(0), (n, k))
    b = jax.random.normal(jax.random.key(1), (k, m))
    call = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(call(a, b))


def seconds(thunk) -> float:
    start = time.perf_counter()
    thunk()
    return time.perf_counter() - start


def alone(kind: str, size: str, name: str) -> dict:
    """Seconds to the first result (tracing and compiling), and the peak memory of the
    process in MiB: all of it, and what the imports take of it.
    """
    command = [sys.executable, __file__, "--alone", kind, size, name]
    return json.loads(
        subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )


def measure_alone(kind: str, size: str, name: str) -> dict:
    jax.block_until_ready(jnp.ones(8) + 1)  # the runtime itself
    if name in PYTORCH:
        import torch_reference  # noqa: F401
    before, thunk = peak(), work(kind, size, name)
    first = seconds(thunk)
    for _ in range(2):
        thunk()
    return {"first_call_s": first, "peak_mib": peak(), "before_mib": before}


def import_seconds(module: str) -> float:
    code = (
        f"import time; t = time.perf_counter(); import {module};"
        " print(time.perf_counter() - t)"
    )
    return float(
        np.median(
            [
                float(
                    subprocess.run(
                        [sys.executable, "-c", code],
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout
                )
                for _ in range(5)
            ]
        )
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent.parent / "results/benchmarks/images.json",
    )
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.alone:
        return print(json.dumps(measure_alone(*args.alone)))
    report = {"import_s": import_seconds("et_nbdev.vision.model"), **provenance()}
    print(f"import et_nbdev.vision.model: {report['import_s']:.2f} s")
    if FOLDER:
        report["authors_differ_by"] = authors_difference(SIZES["small"][0])
        assert report["authors_differ_by"] < 1e-4
    if TORCH:
        import torch
        from torch_reference import difference

        report["torch"] = torch.__version__
        report["torch_differs_by"] = difference(SIZES["small"][0])
        assert report["torch_differs_by"] < 1e-4
    multiply = {shape: product(*shape) for shape in PRODUCTS}
    for size, (config, B) in SIZES.items():
        model = nnx.eval_shape(lambda: ImageEnergyTransformer(config, rngs=nnx.Rngs(0)))
        flops = model.flops
        for kind in ("inference", "training"):
            names = [
                name
                for name in MODELS
                if kind == "training" or name not in TRAINING_ONLY
            ] + [*PYTORCH]
            thunks = {**multiply, **{name: work(kind, size, name) for name in names}}
            for thunk in thunks.values():
                thunk()  # compile
            times = {name: [] for name in thunks}
            # In turn, so that a slow moment hits all of them; whatever ran before leaves
            # its memory behind, so the order is drawn and a second call counts.
            for _ in range(args.repeats):
                for name in random.sample(list(thunks), len(thunks)):
                    thunks[name]()
                    times[name].append(seconds(thunks[name]))
            median = {name: float(np.median(t)) for name, t in times.items()}
            fastest, at = max(
                (2 * np.prod(shape, dtype=float) / median[shape], shape)
                for shape in PRODUCTS
            )
            row = {
                "batch": B,
                "gflop_per_picture": flops / 1e9,
                "peak_gflops": fastest / 1e9,
                "peak_at": at,
                "repeats": args.repeats,
                "pictures_per_second": {name: B / median[name] for name in names},
                "speed_over_reference": median["reference"] / median["library"],
                "spread": {
                    name: [float(np.quantile(times[name], q)) for q in (0.1, 0.9)]
                    for name in names
                },
            }
            if kind == "inference":
                row["share_of_peak"] = {
                    name: B * flops / median[name] / fastest for name in names
                }
            del thunks
            jax.clear_caches()
            row["alone"] = {name: alone(kind, size, name) for name in names}
            own = {
                name: a["peak_mib"] - a["before_mib"]
                for name, a in row["alone"].items()
            }
            row["memory_over_reference"] = own["library"] / own["reference"]
            row["process_memory_over_reference"] = (
                row["alone"]["library"]["peak_mib"]
                / row["alone"]["reference"]["peak_mib"]
            )
            report[f"{size} {kind}"] = row
            print(
                f"{size:<6}{kind:<10}"
                + "  ".join(
                    f"{name} {row['pictures_per_second'][name]:7.1f}/s"
                    for name in names
                )
                + f"  speed × {row['speed_over_reference']:.2f}  memory ×"
                f" {row['memory_over_reference']:.2f} (whole process ×"
                f" {row['process_memory_over_reference']:.2f})"
                + (
                    f"  of peak {row['share_of_peak']['library']:.0%} (reference"
                    f" {row['share_of_peak']['reference']:.0%}, peak"
                    f" {fastest / 1e9:.0f} GFLOP/s)"
                    if kind == "inference"
                    else ""
                )
                + f"  first call {row['alone']['library']['first_call_s']:.1f} s",
                flush=True,
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.out) as path:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
