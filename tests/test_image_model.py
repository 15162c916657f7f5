"""Completing pictures: recipes, the model, its files, training and the two commands
(nbs/21_image_model.ipynb, nbs/22_image_train.ipynb, nbs/engine/pictures.ipynb).
"""

import json
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import image_pair
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.block import Block
from et_nbdev.dynamics import Euler, Look, descend
from et_nbdev.energy import ExternalField
from et_nbdev.testing import assert_gradient
from et_nbdev.training import CheckpointError, read_meta, read_metrics, save_checkpoint
from et_nbdev.vision import train as image_train
from et_nbdev.vision.data import fill_mean, normalize, patchify, unpatchify
from et_nbdev.vision.model import (
    RECIPES,
    ImageConfig,
    ImageEnergyTransformer,
    ImageTransformer,
    complete,
    from_pretrained,
    image_model,
    load_model,
    plain,
    plot_completion,
    pretrained,
    save_model,
    waves,
)
from et_nbdev.vision.train import (
    CONFIGS,
    FILLS,
    TrainConfig,
    _demo,
    _demo_main,
    _main,
    completion_loss,
    completion_of,
    drawn_batch,
    evaluate,
    evaluate_fill,
    held_out_batches,
    part_size,
    prepare,
    training_loss,
)

CONFIG = ImageConfig(
    image_size=8, patch_size=4, dim=16, num_heads=2, head_dim=8, num_memories=24,
    steps=3, step_size=0.1, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3),
)  # N = 4, P = 48  # fmt: skip
rng = np.random.default_rng(0)
PICTURES = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
PATCHES = patchify(normalize(PICTURES, CONFIG.mean, CONFIG.std), 4)
HIDDEN = np.array(
    [[1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool
)
# HIDDEN, pixel by pixel
UNDER = np.asarray(unpatchify(np.broadcast_to(HIDDEN[..., None], (5, 4, 48)), 8, 4))
GIVEN = jnp.asarray(PATCHES), jnp.asarray(HIDDEN)
MANY = rng.integers(0, 256, (260, 8, 8, 3), np.uint8)  # more than one batch of 250
ENERGIES = ("plain", "waves", "tiny-imagenet")
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")


def build(recipe="plain", config=CONFIG, seed=0, **changes):
    changed = replace(config, recipe=recipe, **changes)
    return image_model(changed, rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def rich():
    "The recipe with the most parts, moved off its start."
    net = build("tiny-imagenet", step_size=0.4)
    for p in (net.solver.log_alpha, net.solver.c, net.solver.W):
        p[...] += 0.3 * jnp.asarray(rng.normal(size=p.shape), jnp.float32)
    return net


@pytest.fixture(scope="module")
def result(model):
    return complete(model, PICTURES, HIDDEN, path=True)


@nnx.jit
def forward(model, patches, masked):
    return model(patches, masked)


def weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def same(a, b):
    jax.tree.map(equal, a, b)
    return True


def shapes(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p): x.shape for p, x in found}


def count(config):
    made = nnx.eval_shape(lambda: image_model(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(s) for s in shapes(weights(made)).values())


# --- configurations and recipes


def test_a_resized_model_sees_as_far_as_before(rich):
    equal(rich.resized(8)(*GIVEN), rich(*GIVEN))
    with pytest.raises(ValueError, match="^recipe: .*relative positions, got 'plain'"):
        build().resized(16)
    patches = jnp.zeros((2, 36, 48)).at[1, 35].set(1)
    seen = rich.resized(24)(patches, jnp.zeros((2, 36), bool), steps=1)
    # neighbors, and theirs: as a key a token is pulled by whom its neighbors attend to
    corner = [21, 22, 23, 27, 28, 29, 33, 34, 35]
    assert np.flatnonzero((seen[0] != seen[1]).any(-1)).tolist() == corner


def test_the_defaults_are_et_base():
    c = ImageConfig()
    assert (c.num_tokens, c.patch_dim, c.steps, c.step_size) == (196, 768, 12, 0.1)
    # the paper's, with one norm for block and decoder, is 4,872,193
    assert count(c) - (768 + 1) == 4_872_193


# without those of an experiment that another test imports
LIBRARY = [n for n in RECIPES if n not in image_pair.OWN and ":" not in n]
# weights of a small model; the last one has no table of positions in its attention
COUNTED = dict.fromkeys(["plain", "paper", "waves"], 2610) | {"tiny-imagenet": 3473}
COUNTED |= {"transformer": 3675, "transformer-plain": 3657}


@pytest.mark.parametrize("recipe", LIBRARY)
def test_parameters_are_counted_and_differ_between_encoder_and_decoder_alone(recipe):
    assert count(replace(CONFIG, recipe=recipe)) == COUNTED[recipe]
    inside = lambda name: "block" in name or "solver" in name
    own, first = (shapes(weights(build(name))) for name in (recipe, "plain"))
    rest = lambda names: {k: v for k, v in names.items() if not inside(k)}
    assert rest(own) == rest(first)


@pytest.mark.parametrize("recipe", LIBRARY)
def test_operations_are_those_the_compiler_counts(recipe):
    sizes = dict(image_size=32, dim=64, num_heads=4, head_dim=16, num_memories=256)
    net = build(recipe, steps=2, **sizes)
    graphdef, state = nnx.split(net)
    patches, masked = jnp.zeros((3, 64, 48)), jnp.zeros((3, 64), bool)

    # a compiler counts the inside of a loop once, so the loop is left out
    def once(state):
        net = nnx.merge(graphdef, state)
        x, way = net.encode(patches, masked), getattr(net, "solver", Euler(0.1))
        energy = isinstance(net.block, Block)
        look = Look(net.block, {}) if energy else None
        at = way.init(look, x) if energy else x
        for _ in range(2):
            at = way.step(look, at)[0] if energy else net.block(at)
        return net.decode(at[0] if isinstance(at, tuple) else at)

    counted = jax.jit(once).lower(state).compile().cost_analysis()["flops"] / 3
    assert 0.85 * counted < net.flops <= counted  # all but the elementwise ones


def test_where_recipes_start():
    large = dict(dim=256, image_size=32)
    for recipe, scale, block in (("plain", 1.0, 1 / 16), ("paper", 0.02, 0.02)):
        net = build(recipe, **large)
        found = [net.positions, net.mask_token, net.block.memory.xi]
        for weight, wanted in zip(found, (scale, scale, block)):
            assert float(weight[...].std()) == pytest.approx(wanted, rel=0.2)
        assert float(net.block.attention.Wq[...].std()) == pytest.approx(block, rel=0.2)
    for recipe, scale in {
        "waves": 2, "tiny-imagenet": 2, "transformer": 2, "transformer-plain": 1
    }.items():  # fmt: skip
        net = build(recipe)
        close(net.positions[...], scale * waves(2, 16), rtol=1e-6)
        if recipe in ENERGIES:
            equal(net.block.attention.Wk[...], net.block.attention.Wq[...])
    full = build("tiny-imagenet").block
    close(full.attention.beta, 4 / 8**0.5, rtol=1e-6)
    assert full.attention.normalize and full.attention.positions.table[0, 0, 0] < 0
    assert full.memory.num_negative == 6


@pytest.mark.parametrize("side, dim", [(4, 64), (8, 192), (3, 2), (3, 5), (3, 7)])
def test_waves_have_unit_variance_and_tell_distance_only(side, dim):
    p = np.asarray(waves(side, dim), np.float64)
    assert p.shape == (side * side, dim) and np.isfinite(p).all()
    if dim < 8:
        return
    close((p**2).mean(), 1, rtol=1e-5)
    overlap = (p @ p.T / dim).reshape(side, side, side, side)
    for i, j in np.ndindex(side - 1, side - 1):  # the same wherever the pair lies
        close(overlap[i + 1, j + 1, 1:, 1:], overlap[i, j, :-1, :-1], atol=1e-5)
    assert overlap[0, 0, 0, 0] > overlap[0, 0, 0, 1] > overlap[0, 0, 0, 2]


@pytest.mark.parametrize("recipe", ENERGIES)
def test_the_update_is_the_gradient(recipe, x64):
    draw = np.random.default_rng(0).normal
    move = lambda p: jnp.asarray(np.asarray(p) + 0.1 * draw(size=p.shape))
    block = jax.tree.map(move, build(recipe).block)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 16)))
    energies, update = block.energies_and_update(g)
    assert_gradient(block.energy, g, -update)
    assert list(energies) == ["attention", "memory"]


def own_recipe(c, rngs):
    "With another term, and products in half precision."
    parts = plain(c, rngs)
    terms = parts.block.terms | {"field": ExternalField()}
    for term in parts.block.terms.values():
        term.dtype = jnp.dtype("bfloat16")
    return parts._replace(block=Block(parts.block.norm, **terms))


class FieldModel(ImageEnergyTransformer):
    def context(self, x):
        return {"field": 0.1 * x}


def test_a_recipe_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "own", own_recipe)
    net = FieldModel(replace(CONFIG, recipe="own"), rngs=nnx.Rngs(0))
    done = complete(net, PICTURES, HIDDEN)
    assert list(done.energies) == ["attention", "memory", "field"]
    save_model(tmp_path / "own.safetensors", net)
    assert same(weights(load_model(tmp_path / "own.safetensors")), weights(net))
    monkeypatch.delitem(RECIPES, "own")
    with pytest.raises(CheckpointError, match="recipe: expected plain or"):
        load_model(tmp_path / "own.safetensors")


# --- the model


@pytest.mark.parametrize("recipe", ["plain", "tiny-imagenet", "transformer"])
def test_masked_tokens_never_see_their_pixels_nor_pictures_each_other(recipe):
    net = build(recipe)
    noise = 1e6 * rng.normal(size=PATCHES.shape).astype(np.float32)
    other = np.where(HIDDEN[..., None], noise, PATCHES)
    found = forward(net, *GIVEN)
    equal(forward(net, jnp.asarray(other), GIVEN[1]), found)
    seen = jnp.zeros_like(GIVEN[1])
    assert not np.allclose(forward(net, other, seen), forward(net, PATCHES, seen))
    for b in (0, 4):
        alone = forward(net, *(a[b : b + 1] for a in GIVEN))
        close(alone, found[b : b + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, steps, alpha",
    [({}, 3, 0.1), (dict(steps=0), 0, 0.1), (dict(step_size=0.7), 3, 0.7)],
)
def test_a_forward_pass_is_a_descent(model, options, steps, alpha):
    x, path = descend(model.block, model.encode(*GIVEN), steps, alpha)
    close(model(*GIVEN, **options), model.decode(x), rtol=1e-3, atol=1e-4)
    found = model.descend(*GIVEN, **options)[1].energies.total
    close(found, path.energies.total, rtol=1e-4)


def pixels(patches):
    "What is shown of predicted patches."
    found = np.asarray(unpatchify(patches, 8, 4)) * np.float32(CONFIG.std)
    return np.clip(found + np.float32(CONFIG.mean), 0, 1)


def test_learned_steps_are_taken_everywhere(rich, tmp_path):
    "In the model, in use, and when it comes back from a file."
    start = rich.encode(*GIVEN)
    x = descend(rich.block, start, 4, solver=rich.solver)[0]
    close(rich.descend(*GIVEN, steps=4)[0], x, rtol=1e-3, atol=1e-4)
    save_model(tmp_path / "rich.safetensors", rich)
    again = load_model(tmp_path / "rich.safetensors")
    done, more = (complete(n, PICTURES, HIDDEN, steps=4) for n in (rich, again))
    equal(more.images, done.images)
    close(np.asarray(done.images)[UNDER], pixels(rich.decode(x))[UNDER], atol=1e-4)
    # steps of a size that is asked for are Euler's
    asked = complete(rich, PICTURES, HIDDEN, step_size=0.1, steps=1).energies
    x = descend(rich.block, start, 1, 0.1)[1].energies
    close(asked.total, x.total, rtol=1e-4)


def test_the_explorer_takes_the_learned_steps(rich):
    "A dial twice as high makes each of them twice as long, and not the model's own."
    from et_nbdev.explore import descend_picture

    dials = dict(steps=3, alpha=2 * rich.config.step_size)
    kept = np.array(rich.solver.log_alpha[...])
    twice = descend_picture(rich, PICTURES[0], HIDDEN[0], **dials).completed
    equal(rich.solver.log_alpha[...], kept)
    rich.solver.log_alpha[...] += jnp.log(jnp.float32(2))
    close(
        twice, complete(rich, PICTURES[:1], HIDDEN[:1], path=True).path[:, 0], atol=1e-5
    )
    rich.solver.log_alpha[...] = kept


def test_the_transformer_is_its_block_applied_T_times():
    net = build("transformer-plain")
    assert type(net) is ImageTransformer and type(build()) is ImageEnergyTransformer
    x = net.encode(*GIVEN)
    for _ in range(CONFIG.steps):
        x = net.block(x)
    close(net(*GIVEN), net.decode(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="step"):
        net(*GIVEN, step=3)
    done = complete(net, PICTURES, HIDDEN, path=True)
    assert done.energies is None and done.path.shape == (4, *PICTURES.shape)
    with pytest.raises(ValueError, match="^recipe: expected one with an energy"):
        ImageEnergyTransformer(net.config, rngs=nnx.Rngs(0))


def test_the_transformer_takes_relative_positions():
    net, bare = build("transformer"), build("transformer-plain")
    x = net.encode(*GIVEN)
    for tokens in (x, x[0], x[None]):  # a table of zeros changes nothing
        close(net.block(tokens), bare.block(tokens), rtol=1e-4, atol=1e-5)
    # a bias that leaves the patch below alone: the two upper patches read the lower
    table = jnp.full((2, 3, 3), -1e4, jnp.float32).at[:, 0, 1].set(0.0)
    net.block.positions.table[...] = table
    g, layer = net.block.norm1(x), net.block.attention
    read = jnp.einsum("bnhy,hyd->bnd", layer.value(g), layer.out.kernel[...])
    net.block.down.kernel[...] = jnp.zeros_like(net.block.down.kernel)
    close((net.block(x) - x)[:, :2], read[:, 2:], atol=1e-4)


@nnx.jit
def gradients(model, patches, masked, occluded):
    loss = lambda net: completion_loss(net(patches, masked), patches, occluded)
    return nnx.grad(loss)(model)


@pytest.mark.parametrize("recipe", [*ENERGIES, "transformer"])
def test_the_gradient_reaches_every_parameter(recipe, rich):
    masked = HIDDEN & ~np.eye(5, 4, dtype=bool)
    net = rich if recipe == "tiny-imagenet" else build(recipe)

    def grad(masked):
        return nnx.to_pure_dict(gradients(net, GIVEN[0], jnp.asarray(masked), GIVEN[1]))

    grads = grad(masked)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        # a bias of all keys changes no attention
        if "key']['bias" not in name:
            assert np.isfinite(leaf).all() and np.any(leaf), name
    assert np.all(np.any(grads["positions"], -1)) and np.all(grads["mask_token"])
    # with no token masked there is no MASK to train; with all, no patch to encode
    assert not np.any(grad(np.zeros_like(HIDDEN))["mask_token"])
    assert not np.any(grad(np.ones_like(HIDDEN))["encoder"]["kernel"])


# --- the loss


def test_the_loss_is_the_mean_square_over_occluded_pixels_alone():
    "Number by number in nbs/22_image_train.ipynb; what is not occluded may be anything."
    patches, own = rng.normal(size=(5, 4, 3)), np.repeat(HIDDEN[..., None], 3, -1)
    wild = np.where(own, patches + 2, np.inf)
    for occluded, wanted in ((HIDDEN, 4), (HIDDEN & False, 0)):
        found = completion_loss(*map(jnp.asarray, (wild, patches, occluded)))
        assert float(found) == pytest.approx(wanted, rel=1e-5)


class Answer(ImageEnergyTransformer):
    "A model whose predictions are a function of what it is given."

    def __init__(self, f, config=CONFIG):
        self.f, self.config = f, config

    def descend(self, patches, masked, **options):
        return self.f(patches, masked), None

    def decode(self, x):
        return x


# the paper's 196 tokens
BASE = TrainConfig(
    ImageConfig(mean=CONFIG.mean, std=CONFIG.std), occluded=100 / 196, flip=0.0
)
LARGE = rng.integers(0, 256, (3, 224, 224, 3), np.uint8)
UNITS = (LARGE / 255 - np.array(CONFIG.mean)) / np.array(CONFIG.std)


def loss_of(f, config, seed=0):
    batch = drawn_batch(config, jnp.asarray(LARGE), jax.random.key(seed))
    loss, metrics = completion_of(config, Answer(f, config.model), batch)
    assert metrics == {}
    return float(loss)


def test_the_training_loss_is_taken_on_all_occluded_tokens_and_no_other():
    base = CONFIGS["et-base"]
    assert (BASE.num_occluded, base.num_occluded, base.open_fraction) == (100, 100, 0.1)
    ones = lambda where: jnp.repeat(where[..., None], 768, -1).astype(jnp.float32)
    of = lambda f, config=BASE: pytest.approx(loss_of(f, config), rel=1e-4)
    assert of(lambda p, _: p + 3) == 9
    # the 90 MASKs; the 10 left as they are, not the 96
    assert of(lambda p, masked: p + ones(masked)) == 0.9
    assert of(lambda p, masked: p + ones(~masked)) == 0.1
    # in units of the variance
    everything = replace(BASE, occluded=1.0)
    assert of(lambda p, _: 0 * p, everything) == (UNITS**2).mean()


def test_augmented_pictures_are_their_own_targets():
    seen = {}
    for name, change in dict(
        plain={}, flip=dict(flip=1.0), crop=dict(crop=0.2), jitter=dict(jitter=0.4)
    ).items():
        keep = lambda patches, _, name=name: seen.setdefault(name, patches)
        assert loss_of(keep, replace(BASE, **change)) == 0
    of = lambda pixels: patchify(pixels, 16)
    close(seen["plain"], of(UNITS), rtol=1e-4, atol=1e-5)
    close(seen["flip"], of(UNITS[:, :, ::-1]), atol=1e-3)
    for name in ("crop", "jitter"):
        assert not np.allclose(seen[name], of(UNITS), atol=0.1)


def test_pictures_are_drawn_before_a_batch_is_divided(model, monkeypatch):
    "How is a function of the key; what parts are is in test_training.py."
    loss = training_loss(TrainConfig(CONFIG, crop=0.5, jitter=0.2))
    images, key, found = jnp.asarray(PICTURES[:4]), jax.random.key(0), []
    for size in (4, 2):
        monkeypatch.setattr(image_train, "part_size", lambda *_, size=size: size)
        found.append(loss(model, images, key)[0])
    close(*found, rtol=1e-5)
    assert loss(model, images, jax.random.key(1))[0] != found[1]


def test_a_cpu_takes_a_batch_in_parts(monkeypatch):
    # 512 tokens; of equal size; a prime number: single pictures, or all
    sizes = {(64, 64): 8, (128, 16): 32, (10, 64): 5, (7, 196): 1, (4, 16): 4}
    for (batch, tokens), size in (sizes | {(97, 64): 97}).items():
        assert part_size(batch, tokens) == size
    with monkeypatch.context() as patch:  # several devices have parts of their own
        patch.setattr(jax, "device_count", lambda: 8)
        assert part_size(64, 64) == 64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert part_size(64, 64) == 64


def test_the_named_configurations_are_sound():
    assert {"digits", "small", "et-base", "tiny-imagenet"} <= set(CONFIGS)
    for config in CONFIGS.values():
        made = nnx.eval_shape(lambda: image_model(config.model, rngs=nnx.Rngs(0)))
        assert type(made) is ImageEnergyTransformer
        assert 0 < config.num_occluded <= config.model.num_tokens
    base = CONFIGS["et-base"]
    found = (base.batch_size, base.optim.lr, base.crop, base.jitter, base.flip)
    assert found == (768, 5e-4, 0.08, 0.4, 0.5) and base.model == ImageConfig("paper")
    for name in ("digits", "tiny-imagenet", "tiny-imagenet-2026-11-21"):
        shipped, named = from_pretrained(name).config, CONFIGS[name].model
        assert replace(named, mean=shipped.mean, std=shipped.std) == shipped


# --- completing pictures


def test_open_patches_come_back_and_occluded_ones_are_the_models(model, result):
    unit = PICTURES.astype(np.float32) / np.float32(255)
    equal(np.asarray(result.images)[~UNDER], unit[~UNDER])
    for at in result.path:
        equal(np.asarray(at)[~UNDER], unit[~UNDER])
    predicted = pixels(forward(model, *GIVEN))
    close(np.asarray(result.images)[UNDER], predicted[UNDER], rtol=1e-3, atol=1e-4)
    assert result.images.dtype == jnp.float32


def test_nothing_under_an_occluded_patch_is_looked_at(model, result):
    for worst in (np.nan, np.inf, -7.0):  # a damaged region is just what one completes
        unit = np.where(UNDER, worst, PICTURES / np.float32(255)).astype(np.float32)
        again = complete(model, unit, HIDDEN)
        equal(again.images, result.images)
        equal(again.energies.total, result.energies.total)


@pytest.mark.filterwarnings("error")
def test_pixels_of_any_floating_kind(model, result):
    for kind in (np.float16, np.float64, jnp.bfloat16):
        again = complete(model, (PICTURES / 255).astype(kind), jnp.asarray(HIDDEN))
        assert again.images.dtype == jnp.float32 and again.path is None
        off = 1e-5 if kind == np.float64 else 0.02
        close(again.images, result.images, atol=off)


def test_the_path_is_the_completion_at_every_time(model, result):
    assert result.path.shape == (4, *PICTURES.shape)
    equal(result.path[-1], result.images)
    for t in (0, 2):
        found = complete(model, PICTURES, HIDDEN, steps=t).images
        close(found, result.path[t], rtol=1e-4, atol=1e-5)
    assert {e.shape for e in result.energies.values()} == {(4, 5)}
    asked = complete(model, PICTURES, HIDDEN, steps=3, step_size=0.1).images
    equal(asked, result.images)
    e = complete(model, PICTURES, HIDDEN, steps=20, step_size=0.05).energies.total
    assert e.shape == (21, 5) and (np.diff(e, axis=0) < 0).all()
    assert (e[0] == result.energies.total[0]).all()


SPOILED = (PICTURES / 255).astype(np.float32)
SPOILED[3, 0, 0, 0] = np.nan  # picture 3 has no occluded patch
WRONG = [
    (SPOILED, HIDDEN, {}, "images: .*nan"),
    (PICTURES[0], HIDDEN, {}, "images: .*8, 8, 3"),
    (PICTURES[:, :4], HIDDEN, {}, "images: .*8, 8, 3"),
    (PICTURES[..., :1], HIDDEN, {}, "images: .*8, 8, 3"),
    *((PICTURES, h, {}, r"occluded: .*\(5, 4\)") for h in (HIDDEN[:4], HIDDEN[:, :3])),
    (PICTURES, HIDDEN.astype(int), {}, "occluded: .*int64"),
    (PICTURES, HIDDEN[0], {}, "occluded: "),
    (PICTURES, HIDDEN, dict(steps=-1), "steps: "),
    *((PICTURES, HIDDEN, dict(step_size=a), "step_size: ") for a in (0.0, math.nan)),
]
UNFIT = [
    *((PATCHES[n], HIDDEN, "patches") for n in (0, np.s_[:, :3], np.s_[..., :47])),
    *((PATCHES, h, "masked") for h in (HIDDEN[:4], HIDDEN.astype(int))),
]


def test_what_does_not_fit_is_named(model):
    for images, occluded, options, says in WRONG:
        with pytest.raises(ValueError, match=f"^{says}"):
            complete(model, images, occluded, **options)
    for patches, masked, name in UNFIT:
        with pytest.raises(ValueError, match=rf"^{name}:"):
            model(jnp.asarray(patches), jnp.asarray(masked))


def test_the_figure(model):
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure = plot_completion(model, PICTURES, HIDDEN, times=[1, 3], max_rows=3)
    titles = ["original", "occluded", "t = 1", "t = 3"]
    assert [ax.get_title() for ax in figure.axes[:4]] == titles
    assert len(figure.axes) == 12
    image = lambda ax: np.asarray(ax.images[0].get_array())
    original, occluded, _, last = map(image, figure.axes[:4])
    close(original, PICTURES[0] / 255, atol=1e-6)
    flat = occluded[:4, :4].reshape(16, 3)
    # one color, and the original
    assert (flat == flat[0]).all() and (occluded[4:] == original[4:]).all()
    close(last, complete(model, PICTURES[:1], HIDDEN[:1]).images[0], atol=1e-5)
    plt.close("all")


# --- files


def test_a_model_comes_back_from_its_file(tmp_path, model, result):
    "By its name, and as the last weights of a run that has no best ones yet."
    path = tmp_path / "last.safetensors"
    save_model(path, model, {"note": "kept"})
    for source in (path, str(path), tmp_path):
        again = from_pretrained(source)
        assert again.config == model.config and same(weights(again), weights(model))
    equal(complete(again, PICTURES, HIDDEN).images, result.images)
    assert read_meta(path)["note"] == "kept"


def test_what_is_no_model_of_this_version_is_refused_by_name(tmp_path, model):
    "Damaged files are in test_drill.py."
    path, params = tmp_path / "m.safetensors", {"params": weights(model)}
    changed = dict(dim=-3), dict(dim="wide"), dict(recipe="soup"), dict(dim=24)
    wrong = [{"model": asdict(CONFIG) | change} for change in changed]
    for config in (*wrong, {"model": {"layers": 3}}, {"model": {}}, None):
        save_checkpoint(path, params, {"config": config} if config else {})
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load_model(path)


@pytest.mark.parametrize(
    "recipe, table", [("transformer", "zero"), ("transformer-plain", "none")]
)
def test_a_file_of_an_older_version_names_its_recipe(tmp_path, recipe, table):
    "As those that come with the library do, of the other recipes."
    net, path = build(recipe), tmp_path / "old.safetensors"
    shipped = Path(image_train.__file__).with_name("weights") / "digits.safetensors"
    older = read_meta(shipped)["config"]["model"]
    older |= {k: v for k, v in asdict(net.config).items() if k != "recipe"}
    save = lambda **more: save_checkpoint(
        path, {"params": weights(net)}, {"config": {"model": older | more}}
    )
    save(block="transformer", relative_positions=table)
    again = load_model(path)
    assert again.config == net.config and same(weights(again), weights(net))
    save(activation="gelu", self_attention=True)
    with pytest.raises(CheckpointError, match="0.2 or before.*gelu.*RECIPES"):
        load_model(path)


# mean pixel of a completion, and energy at its end; with the code of 0.2
FROZEN = {
    "cifar10-small": (0.4850575, -71258.25),
    "digits": (0.4110121, -7220.93),
    "photographs": (0.5017145, -44541.434),
    "tiny-imagenet": (0.4985975, -16532.18),
    "tiny-imagenet-2026-11-21": (0.4993533, -213195.00),
}


@pytest.mark.parametrize("name", FROZEN)
def test_shipped_weights_complete_as_they_did(name):
    assert {*FROZEN} == {*pretrained()}
    net = from_pretrained(name)
    c, draw = net.config, np.random.default_rng(0)
    pictures = draw.random((3, c.image_size, c.image_size, c.channels)).astype("f4")
    occluded = draw.random((3, c.num_tokens)) < 0.5
    done = complete(net, pictures, occluded)
    found = float(done.images.mean()), float(done.energies.total[-1].mean())
    close(found, FROZEN[name], rtol=1e-5)
    assert (np.diff(done.energies.total, axis=0) < 0).all()


def test_a_hub_repository_is_fetched_by_name_and_revision(tmp_path, model, monkeypatch):
    import huggingface_hub

    save_model(tmp_path / "model.safetensors", model)
    asked = []
    fetch = lambda *of, **more: asked.append((of, more)) or str(tmp_path / of[1])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    found = from_pretrained("someone/net", revision="v1")
    assert same(weights(found), weights(model))
    assert asked == [(("someone/net", "model.safetensors"), dict(revision="v1"))]

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(OSError, match="no network"):
        from_pretrained("someone/net")


def test_an_unknown_source_lists_what_there_is():
    for source in ("no-such-model", "", "a/b/c", "../weights", "user/na me", None, 3):
        with pytest.raises(ValueError, match=f"^source: .*cifar10.*{source}"):
            from_pretrained(source)
    with pytest.raises(ValueError, match="^source: .*user/name .*'digits'"):
        from_pretrained("digits", revision="v1")


# --- scoring


def test_held_out_pictures_in_order_with_occlusions_of_their_own():
    draw = lambda *of, **options: [*held_out_batches(MANY, CONFIG, *of, **options)]
    joined = lambda found: np.concatenate([o for _, o in found])
    first = draw(2, seed=1)
    assert [len(x) for x, _ in first] == [250, 10]
    equal(np.concatenate([x for x, _ in first]), MANY)
    occluded = joined(first)
    assert occluded.dtype == bool and (occluded.sum(-1) == 2).all()
    assert (joined(draw(2, seed=2)) != occluded).any()
    assert len({tuple(o) for o in occluded.tolist()}) == 6  # all pairs: none is special
    assert (occluded[250:] != occluded[:10]).any()  # and every batch its own
    # a picture's own, however they are batched and limited
    equal(joined(draw(2, seed=1, batch_size=7)), occluded)
    for limit in (1, 7, 250, 253, 900):
        part = draw(2, seed=1, limit=limit)
        equal(np.concatenate([x for x, _ in part]), MANY[:limit])
        equal(joined(part), occluded[:limit])


def test_the_score_is_the_mean_square_of_each_picture():
    scores = evaluate(Answer(lambda p, _: 0.5 + 0 * p), MANY, 3, seed=4)
    expected = []
    for x, occluded in held_out_batches(MANY, CONFIG, 3, seed=4):
        tokens = patchify((x / 255 - CONFIG.mean) / np.array(CONFIG.std), 4)
        expected += [((t[o] - 0.5) ** 2).mean() for t, o in zip(tokens, occluded)]
    close(scores, expected, rtol=1e-4)
    # every occluded one is MASK
    known = Answer(lambda p, masked: jnp.where(masked[..., None], p, p + 9))
    assert not evaluate(known, MANY, 2).any()


def test_scoring_compiles_once_and_takes_a_depth(model, monkeypatch):
    traced, occlude = [], image_train.occlude
    watch = lambda *args, **options: traced.append(1) or occlude(*args, **options)
    monkeypatch.setattr(image_train, "occlude", watch)
    a = evaluate(model, MANY[:60], 2, seed=1)
    del traced[:]
    equal(evaluate(model, MANY[:60], 2, seed=1, steps=CONFIG.steps), a)
    assert not traced
    assert not np.allclose(evaluate(model, MANY[:60], 2, seed=1, steps=0), a)


def test_a_fill_and_a_model_that_say_the_same_score_the_same():
    "Also when the fill leaves [0, 1] and is clipped."
    gray = np.float32((0.5 - np.array(CONFIG.mean)) / np.array(CONFIG.std))
    tokens = jnp.tile(jnp.asarray(gray), 16)[None, None]
    model = Answer(lambda patches, _: jnp.broadcast_to(tokens, patches.shape))
    fill = lambda value: lambda images, *_: np.full(images.shape, value, np.float32)
    score = lambda value: evaluate_fill(fill(value), MANY, CONFIG, 2, seed=3)
    close(score(0.5), evaluate(model, MANY, 2, seed=3), rtol=1e-4)
    equal(score(1.7), score(1.0))


# --- training, and the two commands; how words become options is in test_commands.py


def test_a_model_of_another_configuration_is_not_trained(model):
    config, images = TrainConfig(replace(CONFIG, dim=24)), dict(train=PICTURES)
    with pytest.raises(ValueError, match="^model: .*dim: 16 there, 24 here"):
        image_train.train(config, images, model=model)


DIGITS = CONFIGS["digits"]
SIZES = dict(dim=8, num_heads=2, head_dim=4, num_memories=8, steps=2)
TINY_CONFIG = replace(
    DIGITS,
    **dict(batch_size=8, every=2, validate_on=10),
    optim=replace(DIGITS.optim, steps=4, warmup=1),
    model=replace(DIGITS.model, **SIZES),
)
TINY = "--config digits --optim.steps 4 --optim.warmup 1 --batch_size 8 --every 2"
TINY = f"{TINY} --validate_on 10 --test_on 12".split()
TINY += [word for k, v in SIZES.items() for word in (f"--model.{k}", str(v))]
# what knows the training pictures, for pictures as small as these
KNOWN = ["mean training picture", "nearest neighbor", "seven nearest neighbors"]
KNOWN.append("Gaussian")


def blank(*args):
    "In place of the figures, where they have been seen."
    import matplotlib.pyplot as plt

    return plt.figure(figsize=(1, 1))


def reported(out):
    "What the command writes about its run."
    _main([*TINY, "--out", str(out)])
    strict = lambda s: pytest.fail(f"{s} is no JSON")
    return json.loads((out / "metrics.json").read_text(), parse_constant=strict)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "(folder, metrics) of a tiny run."
    pytest.importorskip("sklearn"), pytest.importorskip("skimage")
    pytest.importorskip("matplotlib").use("Agg")
    out = tmp_path_factory.mktemp("cli") / "deep" / "run"
    return out, reported(out)


def test_a_run_writes_its_weights_log_figures_and_metrics(run):
    out, metrics = run
    files = "best.safetensors last.safetensors metrics.jsonl metrics.json"
    assert {*os.listdir(out)} == {*files.split(), "completion.png", "energy.png"}
    names = {"Energy Transformer", *FILLS, *KNOWN}
    assert set(metrics["masked_patch_mse"]) == names == set(metrics["standard_error"])
    about = [metrics[k] for k in ("pictures", "split", "data")]
    assert about == [12, "test", "digits"] and metrics["config"]["model"]["dim"] == 8
    assert {"commit", "device", "jax", "date", "forward_flops"} <= set(metrics)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [2, 4]
    # a checkpoint of the training is a model file, with the best weights; channels and
    # statistics of the model are those of the pictures
    net = load_model(out / "best.safetensors")
    config, images = prepare(replace(DIGITS, model=net.config, batch_size=10**6))
    mean, std = images["train"].statistics()
    found = net.config.channels, net.config.mean, net.config.std
    assert found == (1, tuple(mean.tolist()), tuple(std.tolist()))
    assert config.batch_size == len(images["train"]) and config.model == net.config
    scores = evaluate(net, images["test"], config.num_occluded, limit=12)
    error = scores.std(ddof=1) / 12**0.5
    for key, value in (("masked_patch_mse", scores.mean()), ("standard_error", error)):
        assert metrics[key]["Energy Transformer"] == pytest.approx(value, rel=1e-4)
    assert read_meta(out / "best.safetensors")["step"] == metrics["best_step"]


def test_run_again_it_finishes_at_once(run, monkeypatch, capsys):
    out, metrics = run
    before = {path: path.read_bytes() for path in out.glob("*.safetensors")}
    again = lambda config: lambda *args: pytest.fail("trained again")
    monkeypatch.setattr(image_train, "training_loss", again)
    for plot in ("plot_completion", "plot_energies"):
        monkeypatch.setattr(image_train, plot, blank)
    assert reported(out)["masked_patch_mse"] == metrics["masked_patch_mse"]
    assert before == {path: path.read_bytes() for path in before}
    printed = capsys.readouterr().out
    assert f"figures: {out}/; from_pretrained" in printed
    best = weights(load_model(out / "best.safetensors"))
    assert same(weights(from_pretrained(out)), best)
    for name, mse in metrics["masked_patch_mse"].items():
        assert re.search(rf"{name} +{mse:.3f} ± ", printed), printed


def test_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(image_train, "prepare", lambda c: seen.append(c) or 1 / 0)
    for argv in ([], TINY):
        with pytest.raises(ZeroDivisionError):
            _main(argv)
    assert seen == [CONFIGS["small"], TINY_CONFIG]


def test_the_demo_trains_and_shows(tmp_path, monkeypatch, capsys):
    "Photographs that a trained model completes, with energies that fall; a training."
    pytest.importorskip("sklearn"), pytest.importorskip("skimage")
    pytest.importorskip("matplotlib").use("Agg")
    shown, out = [], tmp_path / "out"
    show = lambda model, images, occluded: shown.append(images.shape) or blank()
    monkeypatch.setitem(image_train.CONFIGS, "digits", TINY_CONFIG)
    monkeypatch.setattr(image_train, "plot_completion", show)
    monkeypatch.setattr(image_train, "plot_energies", blank)
    monkeypatch.setattr(image_train, "FILLS", {"mean of the open pixels": fill_mean})
    _demo_main(["--out", str(out)])
    printed = capsys.readouterr().out
    assert shown[0] == (6, 128, 128, 3)
    found = re.findall(r"mean energy +(\S+)", printed)
    energies = [float(e.replace(",", "")) for e in found]
    assert len(energies) == 7 and energies == sorted(energies, reverse=True)
    files = {"completion.png", "energy.png", "metrics.json", "run"}
    assert set(os.listdir(out / "digits")) == files
    assert all((out / "six-photographs" / f).stat().st_size for f in sorted(files)[:2])
    assert "Energy Transformer" in printed and "4/4" in printed
    monkeypatch.setattr(image_train, "_complete_photographs", lambda out: None)
    with pytest.raises(SystemExit, match="nosuchset"):
        _demo_main(["--data", "nosuchset", "--out", str(out)])


def test_the_demo_takes_a_folder_of_pictures(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from PIL import Image

    (tmp_path / "pics").mkdir()
    for n in range(20):
        pixels = rng.integers(0, 256, (10, 12, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pics" / f"{n}.png")
    asked = []
    monkeypatch.setattr(image_train, "train", lambda *a: asked.extend(a) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _demo(str(tmp_path / "pics"), tmp_path / "out")
    c, images, folder = asked
    assert folder == tmp_path / "out" / "pics" / "run" and len(images["train"]) == 16
    assert (c.model.channels, c.model.image_size, c.batch_size) == (3, 32, 16)
    assert c.optim.steps < CONFIGS["small"].optim.steps
