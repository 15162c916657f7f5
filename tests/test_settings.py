"""Numbers, names and sizes that cannot be: whoever takes them names the one that is
wrong, and what was given.
"""

import re
from dataclasses import replace
from functools import partial

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import EnergyAttention, PairBias, RelativePositions
from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.energy import ExternalField, Scaled
from et_nbdev.equilibria import Langevin, Noisy, equilibrium
from et_nbdev.explore import descend_picture
from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyTraining, SampleConfig
from et_nbdev.graph.classify import ClassifyConfig, ClassifyTraining
from et_nbdev.graph.crossval import FitConfig
from et_nbdev.graph.energy import EdgeIndex
from et_nbdev.hopfield import hopfield_energy, learn, recall, retrieve, sample, sweep
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.solvers import (
    Anderson,
    Backtracking,
    Flow,
    LearnedEuler,
    LearnedMetric,
    Schedule,
    solve,
)
from et_nbdev.training import OptimConfig
from et_nbdev.vision.data import (
    batches,
    load_images,
    normalize,
    occlude,
    patchify,
    unpatchify,
)
from et_nbdev.vision.model import ImageConfig, image_model
from et_nbdev.vision.train import TrainConfig

pytestmark = pytest.mark.usefixtures("compile_quickly")
NAN, INF = float("nan"), float("inf")
RNGS, KEY = dict(rngs=nnx.Rngs(0)), jax.random.key(0)
BLOCK, X = EnergyTransformer(4, 2, 3, 5, **RNGS), jnp.ones((2, 3, 4))
NORMALIZED = EnergyAttention(4, 2, 3, normalize=True, self_attention=True, **RNGS)
HALF, STATES, XI = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((3, 4)), jnp.ones((2, 4))
FLOATS, PATCHES = np.zeros((2, 8, 8, 3)), np.zeros((2, 16, 12))
BYTES = FLOATS.astype(np.uint8)
PICTURES = ImageConfig(image_size=8, patch_size=4)


def images(**changes):
    "A model of pictures, whose configuration is checked when it is made."
    config = replace(PICTURES, **changes)
    nnx.eval_shape(lambda: image_model(config, rngs=nnx.Rngs(0)))


def picture(**dials):
    "The explorer's descent."
    model = image_model(PICTURES, rngs=nnx.Rngs(0))
    descend_picture(model, np.zeros((8, 8, 3), np.uint8), np.zeros(4, bool), **dials)


STEP = dict(step_size=(0.0, -1.0, NAN, INF))
MEMORY = partial(HopfieldMemory, dim=4, num_memories=5, **RNGS)
SEEDS = (-1, 2**32)
TOKENS = (
    jnp.ones(4), jnp.ones((3, 5)), jnp.ones((2, 0, 4)), jnp.ones((3, 4), int),
    jnp.ones((3, 4), jnp.complex64), [[1.0, 2.0, 3.0, 4.0]],
)  # fmt: skip
pairs = lambda *shapes, kind=float: [jnp.ones(s, kind) for s in [(3,), (2, 3), *shapes]]
# another batch, the batch axis last, an axis for heads; of two samples of three tokens
PAIRS = dict(
    mask=(*pairs((3, 3, 3), (3, 3, 2), (1, 2, 3, 3), (1, 1), kind=bool),
          jnp.ones((3, 3)), jnp.ones((3, 3), int)),
    bias=pairs((3, 3, 3), (3, 2, 3, 3), (2, 2, 2, 3, 3)),
    weights=pairs(()),
)  # fmt: skip
# who is asked: what is wrong, a name and its values
WRONG = [
    (partial(EnergyLayerNorm, dim=4), dict(dim=(1, -3, 4.0, True))),
    (partial(EnergyLayerNorm, dim=4), dict(eps=(0.0, -1e-5, NAN, INF))),
    (partial(EnergyAttention, dim=4, num_heads=2, head_dim=3, **RNGS), dict(
        dim=(0,), num_heads=(0, 2.0), head_dim=(-2,), repelling=(-1, 3, 0.5),
        beta=(0, -1.0, NAN, INF, [1.0, 0.0], [1.0], [1.0] * 3, "warm", nnx.Param(-1.0)),
    )),
    (MEMORY, dict(dim=(0,), num_memories=("5",), activation=("ReLU",))),
    (partial(MEMORY, activation="power"), dict(power=(1.9, -3, NAN, INF, [2.0, 3.0]))),
    (partial(MEMORY, activation="softmax"), dict(beta=(0, -1.0, NAN, [1.0, 2.0]))),
    (partial(SignedMemory, dim=4, num_memories=5, **RNGS), dict(
        negative=(-0.1, 1.1, NAN), activation=("power",),
    )),
    (partial(PairBias, num_tokens=3, num_heads=2), dict(num_tokens=(0,), num_heads=(0,))),
    (partial(RelativePositions, side=3, num_heads=2), dict(side=(0,), start=("far",))),
    (partial(Scaled, ExternalField()), dict(factor=([1.0],))),
    (partial(EdgeIndex, [0], [1], num_nodes=2), dict(
        num_nodes=(0, 2.5), backend=("numba",), capacity=(0,),
    )),
    *((norm, dict(x=TOKENS)) for norm in (BLOCK.norm.__call__, BLOCK.norm.lagrangian)),
    *((call, dict(g=TOKENS)) for call in (BLOCK.energies, BLOCK.update)),
    *((partial(call, X), PAIRS) for term in (BLOCK, BLOCK.attention, NORMALIZED)
      for call in (term.energy, term.update)),
    # descents
    (Euler, dict(step_size=(*STEP["step_size"], True, "x"))),
    (Schedule, dict(step_sizes=([0.0], [1.0, -1.0], [NAN], []))),
    (Backtracking, STEP | dict(
        grow=(0.99, NAN, INF), shrink=(0.0, 1.0, NAN), sufficient=(-0.1, 1.1, NAN),
    )),
    (Anderson, dict(grow=(0.99, NAN, INF), memory=(0, 2.5, -1))),
    (Flow, STEP | dict(rtol=(0.0, -1.0, NAN), time=(0.0, NAN))),
    (partial(LearnedEuler, 3), STEP),
    (partial(LearnedMetric, 3, 6), STEP),
    (partial(Noisy, KEY), dict(noise=(-1.0, NAN), step_size=(0.0,))),
    (partial(Langevin, KEY), dict(step_size=(-1.0,), temperature=(0.0,))),
    (partial(descend, BLOCK, X), dict(
        steps=(-1, 2.5, True), step_size=(0, -0.1, NAN, INF, np.float32(-1), [0.1] * 3),
    )),
    (partial(solve, BLOCK, X), dict(
        evaluations=(0, 2.5, True), tolerance=(0.0, -1.0, NAN, INF, True),
    )),
    (partial(equilibrium, BLOCK, X), dict(cg_steps=(0,), evaluations=(0,))),
    (partial(solve, BLOCK, X, Flow()), dict(evaluations=(1, 2))),
    *((partial(run, BLOCK), dict(x=(HALF,))) for run in (solve, equilibrium)),
    *((partial(descend, BLOCK, solver=kind(KEY)), dict(x=(HALF,)))
      for kind in (Noisy, Langevin)),
    (lambda temperature: descend(BLOCK, X, solver=Langevin(KEY, 0.01, temperature)), dict(
        temperature=([1.0] * 3,),
    )),
    (partial(sweep, xi=XI, energy=lambda a: -(a**2).sum(-1)), dict(x=(jnp.ones(3),))),
    (partial(retrieve, xi=jnp.ones((2, 5))), dict(x=(STATES,))),
    (partial(retrieve, STATES), dict(xi=(jnp.ones((0, 4)),))),
    (partial(hopfield_energy, STATES, XI), dict(beta=(INF,))),
    (partial(sample, KEY, XI, 3), dict(beta=(-1.0,))),
    (partial(recall, STATES, XI, lambda a: -(a**2).sum(-1)), dict(most=(0,))),
    (partial(retrieve, STATES, XI), dict(
        beta=(0.0, [1.0, 2.0]), steps=(-1,), step_size=(-1.0,),
    )),
    (partial(sample, KEY, XI), dict(num=(0,))),
    (partial(learn, STATES, XI), dict(beta=(-1.0,), steps=(1.5,))),
    (picture, dict(
        alpha=(0.0, "a"), beta=(INF,), steps=(2.5,), solver=("Newton",),
    )),
    # pictures
    (partial(patchify, FLOATS), dict(patch_size=(3, 2.0))),
    (partial(patchify, patch_size=2), dict(images=(FLOATS[:, :6], FLOATS[0, 0]))),
    (partial(unpatchify, image_size=8, patch_size=2), dict(
        patches=(PATCHES[:, 1:], PATCHES[..., 1:]),
    )),
    (partial(unpatchify, PATCHES, patch_size=2), dict(image_size=(0,))),
    (partial(normalize, mean=0.5, std=0.5), dict(
        images=(FLOATS + NAN, FLOATS + 255, FLOATS.astype(int)),
    )),
    (partial(normalize, BYTES, std=0.5), dict(mean=([0.1, 0.2], NAN))),
    (partial(normalize, BYTES, 0.5), dict(std=([0.1, 0, 0.1],))),
    (partial(occlude, KEY, batch_size=4, num_tokens=16, num_occluded=4), dict(
        num_occluded=(17, -1), batch_size=(0,), num_tokens=(0,), open_fraction=(1.5,),
    )),
    (partial(batches, np.arange(10), batch_size=2, seed=0), dict(
        batch_size=(11, 0), seed=(-1,), start=(-1,), epochs=(0,),
        part=((0, 3), (2, 2), (0, 0)),
    )),
    (partial(load_images, "digits"), dict(split=("valid",), size=(0,))),
    (load_images, dict(name=("",))),
    # configurations
    (OptimConfig, dict(
        steps=(0, 1.5), warmup=(-1, 1000), lr=(-1.0, NAN, INF), lr_floor=(1.0, -1e-9),
        b1=(1.0, -0.1), b2=(1.5, NAN), clip=(0.0, NAN), weight_decay=(-0.1, NAN),
    )),
    (images, STEP | dict(
        image_size=(0,), patch_size=(0, 3), channels=(0,), dim=(0, 1, "64", None),
        num_heads=(0,), head_dim=(0,), num_memories=(0,), steps=(0, -2),
        recipe=("soup", 3), mean=((NAN,), (0.5, 0.5), 0.5, ("red",), (128.0,)),
        std=((0.2, 0.0, 0.2), (-1.0,), (), (INF,)),
    )),
    (partial(TrainConfig, PICTURES), dict(
        batch_size=(0, 64.5), every=(0, "2"), validate_on=(0,), open_fraction=(1.5,),
        occluded=(-0.1, 1.1, 0.1, NAN, True), flip=(-1.0,), jitter=(2.0,),
        crop=(0.0, 1.1), seed=(-1, True),
    )),
    (AnomalyConfig, dict(
        dim=(0,), steps=(0,), step_size=(0,), num_heads=(-1,), dropout=(1.0,),
        beta=(0.0, -1.0, NAN), relations=("sum",), scale=("log",),
    )),
    (AnomalyTraining, dict(train_fraction=(0.0, 1.0), seed=SEEDS, every=(0,))),
    (partial(SampleConfig, nodes=50), dict(seeds=(1, 60))),
    (SampleConfig, dict(nodes=(0,))),
    (ClassifyConfig, dict(
        dim=(0,), blocks=(0,), steps=(0,), step_size=(0,), noise=(-1,), dropout=(1,),
        filter_size=(2,), num_positions=(-1,), normalize_heads=(1,), strangers=("x",),
        negative_memories=(1.5,),
    )),
    (ClassifyTraining, dict(
        epochs=(0,), batch_size=(0,), warmup=(1,), every=(0,), lr=(-1,),
        fold=(10,), seed=(-1,),
    )),
    (FitConfig, dict(epochs=(0,), lr=(-1.0,), warmup=(1.0,), weight_decay=(NAN,))),
]  # fmt: skip
# what else is said of some
SAYS = {
    "activation='ReLU'": "'relu'.*'power'.*'softmax'",
    "activation='power'": "signs.*'relu'.*'gelu'",
    "beta='warm'": "positive, finite numbers",
    "batch_size=11": "at most 10",
    "factor=[1.0]": "a number",
    "mean=(128.0,)": r"numbers .* in \[0, 1\]",
    "mean=0.5": r"numbers of shape \(1,\) or ",
    "num_occluded=17": "at most num_tokens = 16",
    "patch_size=3": "a divisor of image_size = 8",
    "power=1.9": r"\[2, inf\)",
    "recipe='soup'": "plain or ",
    "start='far'": "zero.*distance",
}
ROWS = [(make, name, values) for make, all_ in WRONG for name, values in all_.items()]
named = lambda make: getattr(make, "func", make).__name__


@pytest.mark.parametrize(
    "make, name, values", ROWS, ids=lambda v: named(v) if callable(v) else None
)
def test_what_cannot_be_is_named(make, name, values):
    for value in values:
        with doors.unchecked(), pytest.raises((ValueError, TypeError)) as e:
            make(**{name: value})
        said = str(e.value)
        assert re.match(rf"{name}\b", said), said
        assert re.search(SAYS.get(f"{name}={value!r}", ""), said), said
        kinds = jax.Array, np.ndarray, list, tuple, nnx.Variable
        arrays = isinstance(value, kinds)
        share = name == "warmup" and value == 1  # of the steps, which are told
        assert arrays or share or f"{value}" in said or f"{value!r}" in said, said
