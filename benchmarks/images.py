"""Speed and memory of the image model: inference and training step, at two sizes, beside
the plain reference, the same in PyTorch where it is installed, the authors' own code
where ET_AUTHORS names a checkout of it, and the machine's own peak. Peak memory and the
time to the first result come from a process of their own each.
"""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import reference
import timing
from flax import nnx

from et_nbdev.training import OptimConfig, in_parts
from et_nbdev.vision.data import occlude
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
from et_nbdev.vision.train import completion_loss, part_size

small = dict(image_size=64, dim=128, num_heads=4, head_dim=32, num_memories=512)
SIZES = {  # name: (configuration, batch)
    "small": (ImageConfig(patch_size=8, **small), 64),
    "base": (ImageConfig(), 4),
}
# name: (class, options of the descent in training, whether a batch is taken in parts)
MODELS = {
    "library": (ImageEnergyTransformer, {"unroll": True}, True),
    "library, whole batches": (ImageEnergyTransformer, {"unroll": True}, False),
    "library, recomputed": (ImageEnergyTransformer, {"remat": True}, True),
    "reference": (reference.PlainEnergyTransformer, {}, False),
}
TRAINING_ONLY = ("library, whole batches", "library, recomputed")
if reference.FOLDER:
    MODELS["authors' code"] = (reference.AuthorsEnergyTransformer, {}, False)
TORCH = importlib.util.find_spec("torch") is not None
PYTORCH = {"PyTorch": False, "PyTorch, compiled": True} if TORCH else {}
PRODUCTS = [(3072, 3072, 3072), (784, 768, 3072), (784, 3072, 768)]  # n × k times k × m
PRODUCTS += [(4096, 128, 512), (4096, 512, 128)]


def work(kind: str, size: str, name: str):
    "A thunk that does one inference or one training step, and waits for it."
    config, B = SIZES[size]
    if name in PYTORCH:
        from torch_reference import torch_work

        return torch_work(kind, config, B, compiled=PYTORCH[name])
    make, how, parts = MODELS[name]
    graphdef, params = nnx.split(make(config, rngs=nnx.Rngs(0)))
    params, N = nnx.to_pure_dict(params), config.num_tokens
    patches = jax.random.normal(jax.random.key(0), (B, N, config.patch_dim))
    occluded, masked = occlude(jax.random.key(1), B, N, N // 2, 0.1)
    if kind == "inference":
        infer = jax.jit(lambda params: nnx.merge(graphdef, params)(patches, masked))
        return lambda: jax.block_until_ready(infer(params))

    def completion(model, batch):
        patches, occluded, masked = batch
        predicted = model(patches, masked, **how)
        return completion_loss(predicted, patches, occluded), {}

    def loss(model, patches, key):
        most = part_size(B, N) if parts else B
        return in_parts(completion, model, (patches, occluded, masked), most)

    train = timing.trainer(graphdef, params, loss, OptimConfig(steps=10**6, warmup=1))
    return lambda: train(patches)


def product(n: int, k: int, m: int):
    "A thunk that multiplies two matrices."
    a = jax.random.normal(jax.random.key(0), (n, k))
    b = jax.random.normal(jax.random.key(1), (k, m))
    call = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(call(a, b))


def measure_alone(kind: str, size: str, name: str) -> dict:
    """Seconds to the first result (tracing and compiling), and the peak memory of the
    process in MiB: all of it, and what the imports take of it.
    """
    jax.block_until_ready(jnp.ones(8) + 1)  # the runtime itself
    if name in PYTORCH:
        import torch_reference  # noqa: F401
    before, thunk = timing.peak(), work(kind, size, name)
    first = timing.seconds(thunk)
    for _ in range(2):
        thunk()
    return {"first_call_s": first, "peak_mib": timing.peak(), "before_mib": before}


def import_seconds(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; "
    command = [sys.executable, "-c", code + "print(time.perf_counter() - t)"]
    each = [subprocess.check_output(command, text=True) for _ in range(5)]
    return float(np.median([float(text) for text in each]))


def row_of(kind: str, size: str, repeats: int) -> dict:
    "One size of model, in inference or training."
    config, B = SIZES[size]
    made = nnx.eval_shape(lambda: ImageEnergyTransformer(config, rngs=nnx.Rngs(0)))
    names = [n for n in MODELS if kind == "training" or n not in TRAINING_ONLY]
    names += [*PYTORCH]
    thunks = {shape: product(*shape) for shape in PRODUCTS}
    thunks |= {name: work(kind, size, name) for name in names}
    times = timing.in_turn(thunks, repeats, again=True)
    median, spread = timing.medians(times), timing.spreads(times)
    peak_rate = max(2 * np.prod(s, dtype=float) / median[s] for s in PRODUCTS)
    row = {
        "batch": B,
        "gflop_per_picture": made.flops / 1e9,
        "repeats": repeats,
        "pictures_per_second": {name: B / median[name] for name in names},
        "spread": {name: spread[name] for name in names},
    }
    if kind == "inference":
        share = lambda name: B * made.flops / median[name] / peak_rate
        row["share_of_peak"] = {name: share(name) for name in names}
    del thunks
    jax.clear_caches()
    row["alone"] = found = {name: timing.alone(kind, size, name) for name in names}
    whole = {name: a["peak_mib"] for name, a in found.items()}
    row["process_memory_over_reference"] = whole["library"] / whole["reference"]
    return row


def main():
    args = timing.options(__doc__, "images", repeats=9).parse_args()
    if args.alone:
        return print(json.dumps(measure_alone(*args.alone)))
    report = {"import_s": import_seconds("et_nbdev.vision.model")}
    if reference.FOLDER:
        report["authors_differ_by"] = reference.authors_difference(SIZES["small"][0])
        assert report["authors_differ_by"] < 1e-4
    if TORCH:
        import torch
        from torch_reference import torch_of

        report["torch"] = torch.__version__
        report["torch_differs_by"] = reference.difference(SIZES["small"][0], torch_of)
        assert report["torch_differs_by"] < 1e-4
    for size in SIZES:
        for kind in ("inference", "training"):
            report[f"{size} {kind}"] = row = row_of(kind, size, args.repeats)
            rates = row["pictures_per_second"].items()
            print(f"{size} {kind}:", *(f"{name} {rate:.1f}/s" for name, rate in rates))
    timing.write(args.out, report)


if __name__ == "__main__":
    main()
