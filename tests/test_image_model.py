"""Completing pictures: the promises of nbs/21_image_model.ipynb and
nbs/22_image_train.ipynb, from the mask token to the console scripts.
"""

import json
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.dynamics import Euler, Look, plot_energies
from et_nbdev.testing import assert_gradient
from et_nbdev.training import (
    CheckpointError,
    OptimConfig,
    read_meta,
    read_metrics,
    save_checkpoint,
)
from et_nbdev.vision import train as image_train
from et_nbdev.vision.data import Images, fill_mean, normalize, patchify, unpatchify
from et_nbdev.vision.model import (
    ImageConfig,
    ImageEnergyTransformer,
    ImageTransformer,
    complete,
    from_pretrained,
    image_model,
    load_model,
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
    price_of_rises,
    training_loss,
)

CONFIG = ImageConfig(
    image_size=8,
    channels=3,
    patch_size=4,
    dim=16,
    num_heads=2,
    head_dim=8,
    num_memories=24,
    steps=3,
    step_size=0.1,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.25, 0.3),
)  # N = 4, P = 48
rng = np.random.default_rng(0)
PICTURES = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
PATCHES = np.asarray(patchify(normalize(PICTURES, CONFIG.mean, CONFIG.std), 4))
HIDDEN = np.array(
    [[1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool
)
# HIDDEN, pixel by pixel
UNDER = np.asarray(unpatchify(np.broadcast_to(HIDDEN[..., None], (5, 4, 48)), 8, 4))

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")


# what the library's terms have and the paper's model does not
OPTIONS = dict(
    relative_positions="distance",
    normalize_heads=True,
    beta=1.5,
    beta_per_head=True,
    learn_beta=True,
    negative_memories=0.25,
    learn_steps=True,
    gate_steps=True,
)


def build(config=CONFIG, seed=0, **changes):
    return ImageEnergyTransformer(replace(config, **changes), rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def result(model):
    return complete(model, PICTURES, HIDDEN, path=True)


@nnx.jit
def forward(model, patches, masked):
    return model(patches, masked)


def weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def same(a, b):
    a, b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (a, b))
    return len(a) == len(b) and all(
        p == q
        and np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for (p, x), (q, y) in zip(a, b)
    )


# --- the configuration
# --------------------------------------------------------------------------------------


def count(config):
    return sum(
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(
            nnx.state(nnx.eval_shape(lambda: build(config)), nnx.Param)
        )
    )


def test_the_defaults_are_et_base():
    c = ImageConfig()
    assert (c.image_size, c.patch_size, c.num_tokens, c.patch_dim) == (
        224,
        16,
        196,
        768,
    )
    assert (c.dim, c.num_heads, c.head_dim, c.num_memories, c.steps, c.step_size) == (
        768,
        12,
        64,
        3072,
        12,
        0.1,
    )
    assert c.beta is None and c.activation == "relu" and c.dtype == "float32"
    # without a CLS token, as computed for the paper's model
    assert count(replace(c, shared_norm=True)) == 4_872_193
    assert count(c) == 4_872_962


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(shared_norm=True),
        dict(learn_beta=True),
        dict(channels=1, mean=(0.5,), std=(0.5,)),
        OPTIONS,
        dict(learn_steps=True),
        dict(learn_steps=True, channel_steps=True),
        dict(learn_steps=True, channel_steps=True, map_per_step=True),
    ],
)
def test_parameters_add_up(changes):
    c = replace(CONFIG, **changes)
    D, N, P = c.dim, c.num_tokens, c.patch_dim
    block = 2 * c.num_heads * c.head_dim * D + c.num_memories * D + D + 1
    if c.relative_positions != "none":
        block += c.num_heads * 3 * 3  # N = 2 × 2
    if c.negative_memories is not None:
        block += c.num_memories
    solver = c.steps * c.learn_steps + (D + 1) * c.gate_steps
    if c.channel_steps:
        solver += c.steps * D + D * D * (c.steps if c.map_per_step else 1)
    assert (
        count(c)
        == (P * D + D)
        + D
        + N * D
        + block
        + (0 if c.shared_norm else D + 1)
        + (D * P + P)
        + c.learn_beta * (c.num_heads if c.beta_per_head else 1)
        + solver
    )


@pytest.mark.parametrize(
    "changes, name",
    [
        *(
            (dict([(name, 0)]), name)
            for name in (
                "image_size",
                "channels",
                "patch_size",
                "dim",
                "head_dim",
                "steps",
            )
        ),
        *((dict([(name, -1)]), name) for name in ("num_heads", "num_memories")),
        *(
            (dict([(name, 0)], block="transformer"), name)
            for name in ("num_heads", "num_memories")
        ),
        (dict(block="mlp"), "block"),
        (dict(steps=-2), "steps"),
        (dict(patch_size=3), "patch_size"),
        (dict(step_size=0.0), "step_size"),
        (dict(step_size=-0.1), "step_size"),
        (dict(step_size=math.nan), "step_size"),
        (dict(step_size=math.inf), "step_size"),
        (dict(dtype="float16"), "dtype"),
        (dict(position_scale=-1.0), "position_scale"),
        (dict(mask_scale=-1.0), "mask_scale"),
        (dict(position_scale=math.nan), "position_scale"),
        (dict(init_scale=-0.1), "init_scale"),
        (dict(init_scale=math.inf), "init_scale"),
        (dict(mean=(math.nan,)), "mean"),
        (dict(std=(0.2, 0.0, 0.2)), "std"),
        (dict(std=(-1.0,)), "std"),
        (dict(power=1.0), "power"),
        (dict(memory_beta=0.0), "(memory_)?beta"),
        (dict(mean=(0.5, 0.5)), "mean"),
        (dict(std=()), "std"),
        (dict(activation="tanh"), "activation"),
        (dict(beta=-1.0), "beta"),
        (dict(dim=1), "dim"),
        (dict(relative_positions="far"), "relative_positions"),
        (dict(negative_memories=1.1), "negative_memories"),
        (dict(negative_memories=False), "negative_memories"),
        (dict(negative_memories="0.3"), "negative_memories"),
        (dict(normalize_heads="false"), "normalize_heads"),
        (dict(learn_steps=1), "learn_steps"),
        (dict(block="transformer", learn_steps=True), "learn_steps"),
        (dict(block="transformer", negative_memories=0.0), "negative_memories"),
        (dict(negative_memories=math.nan), "negative_memories"),
        (dict(negative_memories=0.5, activation="softmax"), "negative_memories"),
        (dict(gate_steps=True), "gate_steps"),
        (dict(channel_steps=True), "channel_steps: expected learn_steps=True"),
        (
            dict(learn_steps=True, gate_steps=True, channel_steps=True),
            "channel_steps: expected learn_steps=True, gate_steps=False",
        ),
        (dict(learn_steps=True, channel_steps=2), "channel_steps"),
        (dict(map_per_step=True), "map_per_step: expected channel_steps=True"),
        (dict(learn_steps=True, channel_steps=True, map_per_step=1), "map_per_step"),
        (dict(block="transformer", map_per_step=True), "map_per_step: expected none"),
        (dict(block="transformer", channel_steps=True), "channel_steps: expected none"),
        (dict(block="transformer", shared_norm=True), "shared_norm: expected none"),
        (dict(block="transformer", learn_beta=True), "learn_beta: expected none"),
        (
            dict(block="transformer", self_attention=True),
            "self_attention: expected none",
        ),
        (dict(dim="64"), "dim: expected a whole number"),
        (dict(dim=None), "dim: expected a whole number"),
        (dict(mean=0.5), "mean: expected a tuple of 1 or .*, got 0.5"),
        (dict(mean=("red",)), "mean: expected a tuple"),
        (dict(mean=(128.0,)), "mean: expected .* numbers between 0 and 1"),
        (dict(std=(math.inf,)), "std"),
    ],
)
def test_an_impossible_model_names_the_field(changes, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        nnx.eval_shape(lambda: build(**changes))


def test_a_configuration_survives_json():
    for c in (
        ImageConfig(),
        CONFIG,
        replace(
            CONFIG, beta=0.3, activation="softmax", dtype="bfloat16", init_scale=0.02
        ),
        replace(CONFIG, **OPTIONS),
    ):
        again = ImageConfig(**json.loads(json.dumps(asdict(c))))
        assert again == c and hash(again) == hash(c)


def test_every_option_explains_itself():
    def texts(config):
        for f in fields(config):
            value = getattr(config, f.name)
            yield from (
                texts(value)
                if is_dataclass(value)
                else [(f.name, f.metadata.get("help", ""))]
            )

    assert all(len(text) > 10 for _, text in texts(TrainConfig())), [
        name for name, text in texts(TrainConfig()) if len(text) <= 10
    ]


# --- the model
# --------------------------------------------------------------------------------------


def test_encode_is_the_patch_or_mask_plus_the_position(model):
    x = model.encode(jnp.asarray(PATCHES), jnp.asarray(HIDDEN))
    encoded = PATCHES @ np.asarray(model.encoder.kernel[...]) + np.asarray(
        model.encoder.bias[...]
    )
    expected = np.where(
        HIDDEN[..., None], np.asarray(model.mask_token[...]), encoded
    ) + np.asarray(model.positions[...])
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(x)[HIDDEN],
        np.broadcast_to(model.mask_token[...][None] + model.positions[...], (5, 4, 16))[
            HIDDEN
        ],
    )


def test_masked_tokens_never_see_their_pixels(model):
    other = np.where(
        HIDDEN[..., None],
        rng.normal(size=PATCHES.shape).astype(np.float32) * 1e6,
        PATCHES,
    )
    a, b = (
        np.asarray(forward(model, jnp.asarray(x), jnp.asarray(HIDDEN)))
        for x in (PATCHES, other)
    )
    np.testing.assert_array_equal(a, b)
    seen = (
        np.asarray(forward(model, jnp.asarray(x), jnp.zeros_like(HIDDEN)))
        for x in (PATCHES, other)
    )
    assert not np.allclose(*seen)


def reference_norm(norm, x):
    centered = x - x.mean(-1, keepdims=True)
    return float(norm.gamma) * centered / np.sqrt(
        (centered**2).mean(-1, keepdims=True) + norm.eps
    ) + np.asarray(norm.delta[...])


@pytest.mark.parametrize("shared", [False, True])
def test_decode_is_a_norm_and_an_affine_map(shared):
    model = build(shared_norm=shared)
    model.block.norm.delta[...] = jnp.asarray(rng.normal(size=16), jnp.float32)
    model.block.norm.rho[...] = jnp.float32(1.7)
    assert hasattr(model, "norm") is not shared
    x = rng.normal(size=(5, 4, 16)).astype(np.float32)
    g = reference_norm(model.block.norm if shared else model.norm, x)
    expected = g @ np.asarray(model.decoder.kernel[...]) + np.asarray(
        model.decoder.bias[...]
    )
    np.testing.assert_allclose(
        model.decode(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "options, steps, alpha",
    [
        ({}, 3, 0.1),
        (dict(steps=1), 1, 0.1),
        (dict(steps=0), 0, 0.1),
        (dict(step_size=0.7), 3, 0.7),
    ],
)
def test_a_forward_pass_is_a_descent(model, options, steps, alpha):
    patches, masked = jnp.asarray(PATCHES), jnp.asarray(HIDDEN)
    x = model.encode(patches, masked)
    for _ in range(steps):
        x = x + alpha * model.block.update(model.block.norm(x))
    np.testing.assert_allclose(
        model(patches, masked, **options), model.decode(x), rtol=1e-3, atol=1e-4
    )
    last, trajectory = model.descend(patches, masked, **options)
    np.testing.assert_allclose(last, x, rtol=1e-3, atol=1e-4)
    assert trajectory.energies.total.shape == (steps + 1, 5)


def test_pictures_do_not_see_each_other(model):
    together = np.asarray(forward(model, jnp.asarray(PATCHES), jnp.asarray(HIDDEN)))
    for b in (0, 4):
        np.testing.assert_allclose(
            forward(
                model, jnp.asarray(PATCHES[b : b + 1]), jnp.asarray(HIDDEN[b : b + 1])
            ),
            together[b : b + 1],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    "patches, masked, name",
    [
        (PATCHES[0], HIDDEN, "patches"),
        (PATCHES[:, :3], HIDDEN[:, :3], "patches"),
        (PATCHES[..., :47], HIDDEN, "patches"),
        (PATCHES, HIDDEN[:4], "masked"),
        (PATCHES, HIDDEN[:, :1], "masked"),
        (PATCHES, HIDDEN.astype(np.int32), "masked"),
        (PATCHES, HIDDEN[0], "masked"),
    ],
)
def test_the_model_names_what_does_not_fit(model, patches, masked, name):
    with pytest.raises(ValueError, match=rf"^{name}:"):
        model(jnp.asarray(patches), jnp.asarray(masked))


@pytest.mark.parametrize(
    "changes",
    [
        dict(beta=3.0),
        dict(self_attention=True),
        dict(activation="softmax"),
        dict(activation="power"),
        dict(activation="power", power=5.0),
        dict(activation="softmax", memory_beta=4.0),
        dict(dtype="bfloat16"),
        dict(init_scale=0.02),
        dict(position_scale=0.02),
        dict(steps=4),
        dict(step_size=0.2),
        dict(relative_positions="distance"),
        dict(normalize_heads=True),
        dict(negative_memories=0.5),
        dict(activation="gelu"),
        dict(learn_steps=True, gate_steps=True),
        dict(learn_steps=True, channel_steps=True),
    ],
)
def test_every_field_changes_the_prediction(model, changes):
    first = {k: v for k, v in changes.items() if k in ("activation", "learn_steps")}
    other = build(**first) if len(changes) > 1 else model
    a, b = (
        np.asarray(forward(m, jnp.asarray(PATCHES), jnp.asarray(HIDDEN)))
        for m in (other, build(**changes))
    )
    assert a.dtype == b.dtype == np.float32 and not np.array_equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_memories_with_signs_keep_the_activation(activation):
    plain = build(activation=activation).block.memory
    # no sign is negative, and thresholds start at 0
    signed = build(activation=activation, negative_memories=0.0).block.memory
    signed.xi[...] = plain.xi[...]
    g = jnp.asarray(rng.normal(size=(2, 4, CONFIG.dim)), jnp.float32)
    np.testing.assert_allclose(signed.update(g), plain.update(g), rtol=1e-4, atol=1e-5)


def test_the_scales_at_the_start():
    large = build(
        dim=256, position_scale=0.5, mask_scale=0.3, init_scale=0.03, image_size=32
    )
    for scale, weight in (
        (0.5, large.positions),
        (0.3, large.mask_token),
        (0.03, large.block.memory.xi),
        (0.03, large.block.attention.Wq),
    ):
        assert float(jnp.std(weight[...])) == pytest.approx(scale, rel=0.2)
    assert float(jnp.std(build(dim=256).block.memory.xi[...])) == pytest.approx(
        1 / 16, rel=0.2
    )


# --- the loss
# --------------------------------------------------------------------------------------


@given(st.sampled_from([(1, 1, 1), (2, 5, 3), (3, 4, 1)]), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_loss_is_the_mean_square_over_occluded_pixels_alone(shape, seed):
    B, N, P = shape
    draw = np.random.default_rng(seed)
    predicted, patches = draw.normal(size=(2, B, N, P)).astype(np.float32)
    occluded = draw.integers(0, 2, (B, N)).astype(bool)
    occluded[draw.integers(B), draw.integers(N)] = True
    total = pixels = 0
    for b in range(B):
        for n in range(N):
            for p in range(P):
                if occluded[b, n]:
                    total = (
                        total
                        + (float(predicted[b, n, p]) - float(patches[b, n, p])) ** 2
                    )
                    pixels = pixels + 1
    loss, gradient = jax.value_and_grad(completion_loss)(
        jnp.asarray(predicted), jnp.asarray(patches), jnp.asarray(occluded)
    )
    assert loss.shape == () and float(loss) == pytest.approx(total / pixels, rel=1e-4)
    expected = np.where(occluded[..., None], 2 * (predicted - patches) / pixels, 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert not np.asarray(gradient)[~occluded].any()  # exactly zero, not small


def test_what_stands_in_open_patches_cannot_reach_the_loss():
    predicted = np.where(HIDDEN[..., None], PATCHES + 2, np.float32(np.inf))
    assert float(
        completion_loss(
            jnp.asarray(predicted), jnp.asarray(PATCHES), jnp.asarray(HIDDEN)
        )
    ) == pytest.approx(4, rel=1e-5)
    assert (
        float(
            completion_loss(
                jnp.asarray(predicted), jnp.asarray(PATCHES), jnp.zeros_like(HIDDEN)
            )
        )
        == 0
    )


@nnx.jit
def gradients(model, patches, masked, occluded):
    return nnx.grad(
        lambda model: completion_loss(model(patches, masked), patches, occluded)
    )(model)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(shared_norm=True, learn_beta=True, self_attention=True), OPTIONS],
)
def test_the_gradient_reaches_every_parameter(changes):
    masked = HIDDEN & ~np.eye(5, 4, dtype=bool)
    model = build(**changes)

    def grad(masked):
        return nnx.to_pure_dict(
            gradients(
                model, jnp.asarray(PATCHES), jnp.asarray(masked), jnp.asarray(HIDDEN)
            )
        )

    grads = grad(masked)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.any(leaf), jax.tree_util.keystr(path)
    assert np.all(np.any(grads["positions"], -1)) and np.all(grads["mask_token"])
    # with no token masked there is no MASK to train; with all of them there is no patch
    # to encode
    assert not np.any(grad(np.zeros_like(HIDDEN))["mask_token"])
    assert not np.any(grad(np.ones_like(HIDDEN))["encoder"]["kernel"])


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
    ImageConfig(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)),
    occluded=100 / 196,
    flip=0.0,
)
LARGE = rng.integers(0, 256, (3, 224, 224, 3), np.uint8)


def loss_of(f, config, seed=0):
    batch = drawn_batch(config, jnp.asarray(LARGE), jax.random.key(seed))
    loss, metrics = completion_of(config, Answer(f, config.model), batch)
    assert metrics == {}
    return float(loss)


def test_the_papers_occlusion():
    assert (
        BASE.num_occluded == CONFIGS["et-base"].num_occluded == 100
        and CONFIGS["et-base"].open_fraction == 0.1
    )
    seen = []
    loss_of(lambda patches, masked: (seen.append(np.asarray(masked)), patches)[1], BASE)
    assert (
        seen[0].shape == (3, 196)
        and (seen[0].sum(-1) == 90).all()
        and not (seen[0][0] == seen[0][1]).all()
    )


def test_the_training_loss_is_taken_on_all_occluded_tokens_and_no_other():
    ones = lambda where: jnp.broadcast_to(where[..., None], (3, 196, 768)).astype(
        jnp.float32
    )
    assert loss_of(lambda patches, masked: patches, BASE) == 0
    assert loss_of(lambda patches, masked: patches + 3, BASE) == pytest.approx(
        9, rel=1e-5
    )
    # the 90 MASKs
    assert loss_of(
        lambda patches, masked: patches + ones(masked), BASE
    ) == pytest.approx(0.9, rel=1e-5)
    # the 10 left as they are, not the 96
    assert loss_of(
        lambda patches, masked: patches + ones(~masked), BASE
    ) == pytest.approx(0.1, rel=1e-5)


def test_the_loss_is_in_units_of_the_variance():
    everything = replace(BASE, occluded=1.0)
    pixels = (LARGE / 255 - np.array(BASE.model.mean)) / np.array(BASE.model.std)
    assert loss_of(lambda patches, masked: 0 * patches, everything) == pytest.approx(
        (pixels**2).mean(), rel=1e-4
    )


def test_augmented_pictures_are_their_own_targets():
    seen = {}
    for name, config in dict(
        plain=BASE,
        flip=replace(BASE, flip=1.0),
        crop=replace(BASE, crop=0.2),
        jitter=replace(BASE, jitter=0.4),
    ).items():
        assert (
            loss_of(
                lambda patches, masked: (
                    seen.setdefault(name, np.asarray(patches)),
                    patches,
                )[1],
                config,
            )
            == 0
        )
    plain = np.asarray(patchify(normalize(LARGE, BASE.model.mean, BASE.model.std), 16))
    np.testing.assert_allclose(seen["plain"], plain, rtol=1e-4, atol=1e-5)
    flipped = np.asarray(
        patchify(normalize(LARGE[:, :, ::-1], BASE.model.mean, BASE.model.std), 16)
    )
    np.testing.assert_allclose(seen["flip"], flipped, rtol=1e-3, atol=1e-3)
    assert not np.allclose(seen["crop"], plain, atol=0.1) and not np.allclose(
        seen["jitter"], plain, atol=0.1
    )


def test_the_loss_is_a_function_of_its_key():
    tiny = TrainConfig(CONFIG, occluded=0.5, flip=0.5, crop=0.5, jitter=0.2)
    loss = nnx.jit(
        lambda model, key: training_loss(tiny)(model, jnp.asarray(PICTURES), key)[0]
    )
    a, b, c = (float(loss(build(), jax.random.key(seed))) for seed in (3, 3, 4))
    assert a == b != c and np.isfinite([a, c]).all()


def test_a_cpu_takes_a_batch_in_parts(monkeypatch):
    assert part_size(64, 64) == 8  # 512 tokens
    assert part_size(128, 16) == 32
    assert part_size(10, 64) == 5  # parts are of equal size
    assert part_size(7, 196) == part_size(7, 10_000) == 1
    assert part_size(4, 16) == 4
    assert part_size(97, 64) == 97  # a prime number: single pictures, or all
    # several devices have parts of their own
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 8)
        assert part_size(64, 64) == 64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert part_size(64, 64) == 64


@pytest.mark.parametrize("downhill", [0.0, 0.5])
def test_parts_have_the_loss_and_the_gradient_of_the_batch(monkeypatch, downhill):
    config = TrainConfig(CONFIG, occluded=0.5, downhill=downhill)
    images, key = jnp.asarray(PICTURES[:4]), jax.random.key(0)
    net = build(step_size=3.0)  # so long that some steps rise
    found = []
    for size in (4, 2, 1):
        monkeypatch.setattr(image_train, "part_size", lambda *_: size)
        slope = nnx.value_and_grad(training_loss(config), has_aux=True)
        (value, metrics), grads = slope(net, images, key)
        found.append((value, metrics, nnx.to_pure_dict(grads)))
    for parts in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            parts,
            found[0],
        )
    assert metrics.keys() == ({"price"} if downhill else set())


def test_rises_have_a_price():
    # of two pictures, one falls far, and one rises by a half, then falls by a quarter
    energies = jnp.array([[-10.0, -10.0], [-20.0, -5.0], [-40.0, -6.25]])
    assert price_of_rises(energies) == pytest.approx((0.5 + 0.01) / 2, rel=1e-6)
    # a fall by less than a hundredth has its price, too
    flat = price_of_rises(jnp.array([[-10.0], [-10.0], [-10.05]]))
    assert flat == pytest.approx(0.01 + 0.005, rel=1e-4)
    # no gradient passes through |E_t|
    slope = jax.grad(price_of_rises)(energies)
    np.testing.assert_allclose(slope, [[0, -0.05], [0, 0.05], [0, 0]], atol=1e-7)
    # nor is there a division by zero
    nothing = jnp.zeros((3, 2))
    assert price_of_rises(nothing) == pytest.approx(0.02, rel=1e-6)
    assert np.isfinite(jax.grad(price_of_rises)(nothing)).all()


def test_the_price_of_rises_is_part_of_the_loss():
    free = TrainConfig(CONFIG)
    # so short that E falls by less than a hundredth
    net, images = build(step_size=1e-6), jnp.asarray(PICTURES)
    loss = lambda config: training_loss(config)(net, images, jax.random.key(0))
    error, metrics = loss(free)
    assert metrics == {}
    for weight in (0.5, 2.0):
        whole, metrics = loss(replace(free, downhill=weight))
        price = float(metrics["price"])
        assert price == pytest.approx(0.01 * CONFIG.steps, rel=1e-2)
        assert float(whole) == pytest.approx(float(error) + weight * price, rel=1e-5)


@pytest.mark.parametrize(
    "changes, name",
    [
        (dict(batch_size=0), "batch_size"),
        (dict(occluded=-0.1), "occluded"),
        (dict(occluded=1.1), "occluded"),
        (dict(occluded=0.1), "occluded"),
        (dict(occluded=math.nan), "occluded"),
        (dict(open_fraction=1.5), "open_fraction"),
        (dict(flip=-1.0), "flip"),
        (dict(jitter=2.0), "jitter"),
        (dict(crop=0.0), "crop"),
        (dict(crop=1.1), "crop"),
        (dict(every=0), "every"),
        (dict(validate_on=0), "validate_on"),
        (dict(seed=-1), "seed"),
        (dict(downhill=-1.0), "downhill"),
        (dict(downhill=math.inf), "downhill"),
        (dict(downhill=math.nan), "downhill"),
        (dict(model=replace(CONFIG, block="transformer"), downhill=1.0), "downhill"),
        (dict(batch_size=64.5), "batch_size: expected a whole number, got 64.5"),
        (dict(validate_on=10.5), "validate_on"),
        (dict(every="2"), "every"),
        (dict(seed=True), "seed"),
        (dict(occluded=True), "occluded"),
        (dict(downhill="1"), "downhill"),
    ],
)
def test_an_impossible_run_names_the_field(changes, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        TrainConfig(**dict(model=CONFIG) | changes)


@pytest.mark.parametrize("share, number", [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_occluded_is_a_share_of_the_tokens(share, number):
    assert TrainConfig(CONFIG, occluded=share).num_occluded == number


def test_the_named_configurations_are_sound():
    assert {"digits", "small", "et-base"} <= set(CONFIGS)
    for config in CONFIGS.values():
        nnx.eval_shape(lambda: build(config.model))
        assert (
            0 < config.num_occluded <= config.model.num_tokens
            and TrainConfig(**{f.name: getattr(config, f.name) for f in fields(config)})
            == config
        )
    base = CONFIGS["et-base"]
    assert (
        base.batch_size,
        base.optim.lr,
        base.optim.lr_floor,
        base.crop,
        base.jitter,
        base.flip,
    ) == (768, 5e-4, 5e-7, 0.08, 0.4, 0.5)
    assert (
        replace(base.model, position_scale=1.0, mask_scale=1.0, init_scale=None)
        == ImageConfig()
    )


# --- completing pictures
# --------------------------------------------------------------------------------------


def test_open_patches_come_back_as_they_are(result):
    np.testing.assert_array_equal(
        np.asarray(result.images)[~UNDER],
        (PICTURES.astype(np.float32) / np.float32(255))[~UNDER],
    )
    np.testing.assert_array_equal(
        np.asarray(result.path)[:, ~UNDER],
        np.broadcast_to(
            (PICTURES.astype(np.float32) / np.float32(255))[~UNDER], (4, (~UNDER).sum())
        ),
    )


def test_occluded_patches_are_the_models(model, result):
    predicted = np.asarray(
        unpatchify(forward(model, jnp.asarray(PATCHES), jnp.asarray(HIDDEN)), 8, 4)
    ) * np.array(CONFIG.std) + np.array(CONFIG.mean)
    np.testing.assert_allclose(
        np.asarray(result.images)[UNDER],
        np.clip(predicted, 0, 1)[UNDER],
        rtol=1e-3,
        atol=1e-4,
    )
    assert result.images.shape == PICTURES.shape and result.images.dtype == jnp.float32
    assert 0 <= float(result.images.min()) and float(result.images.max()) <= 1


def test_nothing_under_an_occluded_patch_is_looked_at(model, result):
    for other in (0, 255, rng.integers(0, 256, PICTURES.shape)):
        again = complete(
            model, np.where(UNDER, other, PICTURES).astype(np.uint8), HIDDEN
        )
        np.testing.assert_array_equal(again.images, result.images)
        np.testing.assert_array_equal(again.energies.total, result.energies.total)
    for worst in (np.nan, np.inf, -7.0):  # a damaged region is just what one completes
        again = complete(
            model,
            np.where(
                UNDER, np.float32(worst), PICTURES.astype(np.float32) / np.float32(255)
            ),
            HIDDEN,
        )
        np.testing.assert_array_equal(again.images, result.images)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kind", [np.float16, np.float32, np.float64, jnp.bfloat16, jnp.asarray]
)
def test_pixels_of_any_floating_kind(model, result, kind):
    images = (PICTURES / 255).astype(np.float32)
    images = kind(images) if kind is jnp.asarray else (PICTURES / 255).astype(kind)
    occluded = jnp.asarray(HIDDEN) if kind is jnp.asarray else HIDDEN
    again = complete(model, images, occluded)
    assert again.images.dtype == jnp.float32 and again.path is None
    np.testing.assert_allclose(
        again.images,
        result.images,
        atol=1e-5 if kind in (np.float32, np.float64, jnp.asarray) else 0.02,
    )


def test_the_path_is_the_completion_at_every_time(model, result):
    assert result.path.shape == (CONFIG.steps + 1, *PICTURES.shape)
    np.testing.assert_array_equal(result.path[-1], result.images)
    for t in (0, 2):
        np.testing.assert_allclose(
            complete(model, PICTURES, HIDDEN, steps=t).images,
            result.path[t],
            rtol=1e-4,
            atol=1e-5,
        )
    assert all(
        e.shape == (CONFIG.steps + 1, 5)
        for e in (
            result.energies["attention"],
            result.energies["memory"],
            result.energies.total,
        )
    )


def test_the_energy_falls(model):
    e = np.asarray(
        complete(model, PICTURES, HIDDEN, steps=20, step_size=0.05).energies.total
    )
    assert e.shape == (21, 5) and (np.diff(e, axis=0) < 0).all()


def test_steps_and_step_size_are_options(model, result):
    np.testing.assert_array_equal(
        complete(model, PICTURES, HIDDEN, steps=3, step_size=0.1).images, result.images
    )
    assert not np.array_equal(
        complete(model, PICTURES, HIDDEN, step_size=0.5).images, result.images
    )
    slow, fast = (
        complete(model, PICTURES, HIDDEN, step_size=s).energies.total
        for s in (0.01, 0.5)
    )
    assert (slow[-1] > fast[-1]).all() and (slow[0] == fast[0]).all()


def spoiled(value, at=(3, 0, 0, 0)):  # picture 3 has no occluded patch
    images = (PICTURES / 255).astype(np.float32)
    images[at] = value
    return images


@pytest.mark.parametrize(
    "images, occluded, options, error, says",
    [
        (spoiled(np.nan), HIDDEN, {}, ValueError, "images: .*nan"),
        (spoiled(np.inf), HIDDEN, {}, ValueError, "images: .*to inf"),
        (spoiled(1.5), HIDDEN, {}, ValueError, r"images: .*\[0, 1\]"),
        (spoiled(-0.5), HIDDEN, {}, ValueError, r"images: .*\[0, 1\]"),
        (
            PICTURES.astype(np.float32),
            HIDDEN,
            {},
            ValueError,
            "images: .*divide by 255",
        ),
        (PICTURES.astype(np.int64), HIDDEN, {}, TypeError, "images: .*int64"),
        (PICTURES > 9, HIDDEN, {}, TypeError, "images: .*bool"),
        (PICTURES[0], HIDDEN, {}, ValueError, "images: .*8, 8, 3"),
        (PICTURES[:, :4], HIDDEN, {}, ValueError, "images: .*8, 8, 3"),
        (PICTURES[..., :1], HIDDEN, {}, ValueError, "images: .*8, 8, 3"),
        (PICTURES.tolist(), HIDDEN, {}, TypeError, "images: "),
        (PICTURES, HIDDEN[:4], {}, ValueError, r"occluded: .*\(5, 4\)"),
        (PICTURES, HIDDEN[:, :3], {}, ValueError, r"occluded: .*\(5, 4\)"),
        (PICTURES, HIDDEN.astype(int), {}, ValueError, "occluded: .*int64"),
        (PICTURES, HIDDEN[0], {}, ValueError, "occluded: "),
        (PICTURES, HIDDEN, dict(steps=-1), ValueError, "steps: "),
        (PICTURES, HIDDEN, dict(step_size=0.0), ValueError, "step_size: "),
        (PICTURES, HIDDEN, dict(step_size=-0.1), ValueError, "step_size: "),
        (PICTURES, HIDDEN, dict(step_size=math.nan), ValueError, "step_size: "),
    ],
)
def test_complete_names_what_is_wrong(model, images, occluded, options, error, says):
    with pytest.raises(error, match=f"^{says}"):
        complete(model, images, occluded, **options)


def test_the_figures(model):
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure = plot_completion(model, PICTURES, HIDDEN, times=[1, 3], max_rows=3)
    assert [ax.get_title() for ax in figure.axes[:4]] == [
        "original",
        "occluded",
        "t = 1",
        "t = 3",
    ] and len(figure.axes) == 12
    shown = {
        ax.get_title(): np.asarray(ax.images[0].get_array()) for ax in figure.axes[:4]
    }
    np.testing.assert_allclose(shown["original"], PICTURES[0] / 255, atol=1e-6)
    flat, rest = shown["occluded"][:4, :4].reshape(16, 3), np.s_[4:]
    # one color, and the original
    assert (flat == flat[0]).all() and (
        shown["occluded"][rest] == shown["original"][rest]
    ).all()
    np.testing.assert_allclose(
        shown["t = 3"], complete(model, PICTURES[:1], HIDDEN[:1]).images[0], atol=1e-5
    )
    figure = plot_energies(complete(model, PICTURES, HIDDEN).energies, max_lines=4)
    assert [len(ax.lines) for ax in figure.axes] == [4, 4, 4] and figure.axes[0].lines[
        0
    ].get_ydata().shape == (4,)
    plt.close("all")


# --- a model in a file
# --------------------------------------------------------------------------------------


def test_a_model_comes_back_from_its_file(tmp_path, result):
    model = build()
    save_model(tmp_path / "m.safetensors", model, {"note": "kept"})
    again = load_model(str(tmp_path / "m.safetensors"))
    assert again.config == model.config and same(weights(again), weights(model))
    np.testing.assert_array_equal(
        complete(again, PICTURES, HIDDEN).images, result.images
    )
    assert read_meta(tmp_path / "m.safetensors")["note"] == "kept"
    odd = build(
        shared_norm=True,
        learn_beta=True,
        beta=0.3,
        activation="softmax",
        dtype="bfloat16",
    )
    save_model(tmp_path / "odd.safetensors", odd)
    again = load_model(tmp_path / "odd.safetensors")
    assert again.config == odd.config and same(weights(again), weights(odd))


def spoil(path, kind):
    content = path.read_bytes()
    model = asdict(CONFIG)
    params = {"params": weights(build())}
    save = lambda meta: save_checkpoint(path, params, meta)
    if kind == "missing":
        path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    if kind == "text":
        path.write_text("no weights here")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(jax.tree.map(np.asarray, params)))
    if kind == "truncated":
        path.write_bytes(content[:-5])
    if kind == "flipped":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 4]) + content[-4:])
    if kind == "another step size":
        path.write_bytes(content.replace(b'step_size\\": 0.1', b'step_size\\": 0.3'))
    if kind == "foreign":
        safetensors.numpy.save_file(
            {"w": np.ones(3, np.float32)}, path, {"format": "pt"}
        )
    if kind == "no configuration":
        save({})
    if kind == "unknown key":
        save({"config": {"model": {**model, "wings": 2}}})
    if kind == "missing key":
        save({"config": {"model": {k: v for k, v in model.items() if k != "dim"}}})
    if kind == "impossible value":
        save({"config": {"model": {**model, "dim": -3}}})
    if kind == "impossible kind":
        save({"config": {"model": {**model, "dim": "wide"}}})
    if kind == "unknown activation":
        save({"config": {"model": {**model, "activation": "tanh"}}})
    if kind == "other shape":
        save({"config": {"model": {**model, "dim": 24}}})
    if kind == "other kind of model":
        save({"config": {"model": {"layers": 3}}})


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        "empty",
        "text",
        "pickle",
        "truncated",
        "flipped",
        "another step size",
        "foreign",
        "no configuration",
        "unknown key",
        "missing key",
        "impossible value",
        "impossible kind",
        "unknown activation",
        "other shape",
        "other kind of model",
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "m.safetensors"
    save_model(path, build())
    before = path.read_bytes()
    spoil(path, kind)
    assert not path.exists() or path.read_bytes() != before
    with pytest.raises(CheckpointError) as e:
        load_model(path)
    assert str(path) in str(e.value)


# --- scoring
# --------------------------------------------------------------------------------------

MANY = rng.integers(0, 256, (260, 8, 8, 3), np.uint8)  # more than one batch of 250


def test_held_out_pictures_in_order_with_occlusions_of_their_own():
    first, again, other = (
        list(held_out_batches(MANY, CONFIG, 2, seed=seed)) for seed in (1, 1, 2)
    )
    assert [len(x) for x, _ in first] == [250, 10]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in first]), MANY)
    occluded = np.concatenate([o for _, o in first])
    assert (
        occluded.dtype == bool
        and occluded.shape == (260, 4)
        and (occluded.sum(-1) == 2).all()
    )
    np.testing.assert_array_equal(occluded, np.concatenate([o for _, o in again]))
    assert (occluded != np.concatenate([o for _, o in other])).any()
    # all six pairs: none is special
    assert len({tuple(o) for o in occluded.tolist()}) == 6
    assert (occluded[250:] != occluded[:10]).any()  # and every batch its own
    by_sevens = list(held_out_batches(MANY, CONFIG, 2, seed=1, batch_size=7))
    assert len(by_sevens) == 38
    # a picture's own, however they are batched
    np.testing.assert_array_equal(np.concatenate([o for _, o in by_sevens]), occluded)


@pytest.mark.parametrize(
    "limit, expected",
    [(1, 1), (7, 7), (250, 250), (253, 253), (260, 260), (900, 260), (None, 260)],
)
def test_a_limit_takes_the_first_pictures_with_the_same_occlusions(limit, expected):
    whole, part = (
        list(held_out_batches(MANY, CONFIG, 2, limit=n)) for n in (None, limit)
    )
    assert sum(len(x) for x, _ in part) == expected
    np.testing.assert_array_equal(np.concatenate([x for x, _ in part]), MANY[:expected])
    np.testing.assert_array_equal(
        np.concatenate([o for _, o in part]),
        np.concatenate([o for _, o in whole])[:expected],
    )


def test_a_second_validation_compiles_nothing(model, monkeypatch):
    traced, occlude = [], image_train.occlude
    monkeypatch.setattr(
        image_train,
        "occlude",
        lambda *args, **options: (traced.append(1), occlude(*args, **options))[1],
    )
    first = evaluate(model, MANY[:20], 3, seed=8)
    del traced[:]
    np.testing.assert_array_equal(evaluate(model, MANY[:20], 3, seed=8), first)
    assert not traced


def test_the_truth_scores_zero():
    assert not evaluate(Answer(lambda patches, masked: patches), MANY, 2).any()
    # every occluded one is MASK
    assert not evaluate(
        Answer(
            lambda patches, masked: jnp.where(masked[..., None], patches, patches + 9)
        ),
        MANY,
        2,
    ).any()


def test_the_score_is_the_mean_square_of_each_picture():
    scores = evaluate(
        Answer(lambda patches, masked: 0.5 + 0 * patches), MANY, 3, seed=4
    )
    expected = []
    for x, occluded in held_out_batches(MANY, CONFIG, 3, seed=4):
        pixels = (x / 255 - np.array(CONFIG.mean)) / np.array(CONFIG.std)
        for picture, hidden in zip(pixels, occluded):
            tokens = [
                picture[4 * (n // 2) : 4 * (n // 2) + 4, 4 * (n % 2) : 4 * (n % 2) + 4]
                for n in range(4)
                if hidden[n]
            ]
            expected.append(np.mean([(token - 0.5) ** 2 for token in tokens]))
    assert scores.shape == (260,)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_scoring_is_deterministic(model):
    a, b, other, part = (
        evaluate(model, MANY[:60], 2, seed=seed, limit=n)
        for seed, n in ((1, None), (1, None), (2, None), (1, 30))
    )
    np.testing.assert_array_equal(a, b)
    assert (a != other).any()
    np.testing.assert_allclose(part, a[:30], rtol=1e-4)
    assert a.std() > 0


def test_fills_are_scored_on_the_same_pictures_and_occlusions():
    asked = []

    def truth(images, occluded, patch_size):
        asked.append((images, occluded, patch_size))
        return images.astype(np.float32) / 255

    scores = evaluate_fill(truth, MANY, CONFIG, 2, seed=3, limit=255)
    assert scores.shape == (255,) and scores.max() < 1e-9
    for (x, o, p), (y, q) in zip(
        asked, held_out_batches(MANY, CONFIG, 2, seed=3, limit=255), strict=True
    ):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(o, q)
        assert p == 4
    assert list(FILLS.values())[0] is fill_mean and len(FILLS) == 3


def test_a_fill_and_a_model_that_say_the_same_score_the_same():
    """Mid-gray from a fill is a constant from the model, also when the fill leaves [0,
    1] and is clipped.
    """
    gray = (0.5 - np.array(CONFIG.mean)) / np.array(CONFIG.std)
    model = Answer(
        lambda patches, masked: jnp.broadcast_to(
            jnp.tile(jnp.asarray(gray, jnp.float32), 16)[None, None], patches.shape
        )
    )
    fill = lambda value: (
        lambda images, occluded, patch_size: np.full(images.shape, value, np.float32)
    )
    np.testing.assert_allclose(
        evaluate_fill(fill(0.5), MANY, CONFIG, 2), evaluate(model, MANY, 2), rtol=1e-4
    )
    np.testing.assert_array_equal(
        evaluate_fill(fill(1.7), MANY, CONFIG, 2),
        evaluate_fill(fill(1.0), MANY, CONFIG, 2),
    )


# --- training, and the two commands
# --------------------------------------------------------------------------------------


def test_training_in_bfloat16_keeps_float32_weights_and_chooses_them_on_validation(
    tmp_path,
):
    config = TrainConfig(
        replace(CONFIG, dtype="bfloat16", steps=2),
        OptimConfig(steps=6, warmup=1, lr=1e-2),
        batch_size=5,
        every=2,
        validate_on=12,
        seed=3,
    )
    images = dict(train=PICTURES, validation=MANY[:30], test=None)
    trained = image_train.train(config, images, tmp_path, progress=False)
    assert (
        all(np.isfinite(row["loss"]) for row in trained.history)
        and trained.history[-1]["step"] == 6
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(weights(trained.model))} == {
        jnp.dtype("float32")
    }
    assert not same(weights(trained.model), weights(build(config.model, seed=3)))
    assert complete(trained.model, PICTURES, HIDDEN).images.dtype == jnp.float32
    validation = {
        row["step"]: row["validation_loss"]
        for row in trained.history
        if "validation_loss" in row
    }
    assert list(validation) == [2, 4, 6] and trained.best_step == min(
        validation, key=validation.get
    )
    scores = evaluate(
        trained.model, images["validation"], config.num_occluded, seed=3, limit=12
    )
    assert len(scores) == 12 and float(scores.mean()) == pytest.approx(
        validation[trained.best_step], rel=1e-3
    )


def test_prepare_reads_channels_and_statistics_off_the_pictures():
    pytest.importorskip("sklearn")
    config, images = prepare(replace(CONFIGS["digits"], batch_size=10**6))
    assert set(images) == {"train", "validation", "test"} and all(
        isinstance(split, Images) for split in images.values()
    )
    mean, std = images["train"].statistics()
    assert (
        config.model.channels == 1
        and config.model.mean == tuple(mean.tolist())
        and config.model.std == tuple(std.tolist())
    )
    assert config.batch_size == len(images["train"])
    assert json.loads(json.dumps(asdict(config)))["model"]["dim"] == config.model.dim


TINY = [
    "--config",
    "digits",
    "--model.dim",
    "8",
    "--model.num_heads",
    "2",
    "--model.head_dim",
    "4",
    "--model.num_memories",
    "8",
    "--model.steps",
    "2",
    "--optim.steps",
    "4",
    "--optim.warmup",
    "1",
    "--batch_size",
    "8",
    "--every",
    "2",
    "--validate_on",
    "10",
    "--test_on",
    "12",
]


TINY_CONFIG = replace(
    CONFIGS["digits"],
    batch_size=8,
    every=2,
    validate_on=10,
    optim=replace(CONFIGS["digits"].optim, steps=4, warmup=1),
    model=replace(
        CONFIGS["digits"].model, dim=8, num_heads=2, head_dim=4, num_memories=8, steps=2
    ),
)


def blank(*args):
    "In place of the figures, where they have been seen."
    import matplotlib.pyplot as plt

    return plt.figure(figsize=(1, 1))


def stopped(argv, command=_main):
    """(status, message) of a command that ends itself; anything but SystemExit would be
    a traceback.
    """
    with pytest.raises(SystemExit) as e:
        command(argv)
    return (1, e.value.code) if isinstance(e.value.code, str) else (e.value.code, "")


def reported(out):
    "What the command writes about its run."
    _main([*TINY, "--out", str(out)])
    return json.loads(
        (out / "metrics.json").read_text(),
        parse_constant=lambda s: pytest.fail(f"{s} is no JSON"),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "(folder, metrics) of a tiny run."
    pytest.importorskip("sklearn"), pytest.importorskip("skimage")
    pytest.importorskip("matplotlib").use("Agg")
    out = tmp_path_factory.mktemp("cli") / "deep" / "run"
    return out, reported(out)


# what knows the training pictures, for pictures as small as these
KNOWN = "mean training picture|nearest neighbor|seven nearest neighbors|Gaussian".split(
    "|"
)


def test_a_run_writes_its_weights_log_figures_and_metrics(run):
    out, metrics = run
    assert {
        "best.safetensors",
        "last.safetensors",
        "metrics.jsonl",
        "metrics.json",
        "completion.png",
        "energy.png",
    } == set(os.listdir(out))
    assert (
        set(metrics["masked_patch_mse"])
        == {"Energy Transformer", *FILLS, *KNOWN}
        == set(metrics["standard_error"])
    )
    assert (
        metrics["pictures"] == 12
        and metrics["split"] == "test"
        and metrics["data"] == "digits"
        and metrics["config"]["model"]["dim"] == 8
    )
    assert (
        metrics["best_step"] in (2, 4)
        and metrics["training_seconds"] > 0
        and {"commit", "device", "jax", "date"} <= set(metrics)
    )
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [2, 4]
    for name in ("completion.png", "energy.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_the_reported_scores_are_those_of_the_best_weights(run):
    out, metrics = run
    # a checkpoint of the training is a model file
    model = load_model(out / "best.safetensors")
    config, images = prepare(replace(CONFIGS["digits"], model=model.config))
    scores = evaluate(
        model, images["test"], config.num_occluded, seed=config.seed, limit=12
    )
    assert metrics["masked_patch_mse"]["Energy Transformer"] == pytest.approx(
        float(scores.mean()), rel=1e-5
    )
    assert metrics["standard_error"]["Energy Transformer"] == pytest.approx(
        float(scores.std(ddof=1) / 12**0.5), rel=1e-4
    )
    fill = evaluate_fill(
        fill_mean,
        images["test"],
        model.config,
        config.num_occluded,
        seed=config.seed,
        limit=12,
    )
    assert metrics["masked_patch_mse"]["mean of the open pixels"] == pytest.approx(
        float(fill.mean()), rel=1e-5
    )
    assert read_meta(out / "best.safetensors")["step"] == metrics["best_step"]


def test_run_again_it_finishes_at_once(run, monkeypatch, capsys):
    out, metrics = run
    before = {
        name: (out / name).read_bytes()
        for name in ("best.safetensors", "last.safetensors", "metrics.jsonl")
    }
    monkeypatch.setattr(
        image_train,
        "training_loss",
        lambda config: lambda *args: pytest.fail("trained again"),
    )
    for plot in ("plot_completion", "plot_energies"):
        monkeypatch.setattr(image_train, plot, blank)
    again = reported(out)
    assert (
        again["masked_patch_mse"] == metrics["masked_patch_mse"]
        and again["best_step"] == metrics["best_step"]
    )
    assert before == {name: (out / name).read_bytes() for name in before}
    printed = capsys.readouterr().out
    assert f"figures: {out}/; from_pretrained" in printed
    best = weights(load_model(out / "best.safetensors"))
    assert same(weights(from_pretrained(out)), best)
    for name, mse in metrics["masked_patch_mse"].items():
        assert re.search(rf"{name} +{mse:.3f} ± ", printed), printed


@pytest.mark.parametrize(
    "change, name",
    [
        (["--model.beta", "2"], "beta: None there, 2.0 here"),
        (["--model.dim", "16"], "dim: 8 there, 16 here"),
        (["--optim.lr", "0.5"], "lr"),
        (["--seed", "3"], "seed"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(run, change, name):
    out, _ = run
    before = {file: (out / file).read_bytes() for file in os.listdir(out)}
    status, message = stopped([*TINY, "--out", str(out), *change])
    assert (
        status
        and str(out) in message
        and name in message
        and "num_memories" not in message
    )
    assert before == {file: (out / file).read_bytes() for file in os.listdir(out)}


def test_a_damaged_run_is_refused(run, tmp_path):
    for name in ("last.safetensors", "best.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run[0] / name).read_bytes())
    (tmp_path / "last.safetensors").write_bytes(
        (run[0] / "last.safetensors").read_bytes()[:-9]
    )
    status, message = stopped([*TINY, "--out", str(tmp_path)])
    assert status and str(tmp_path / "last.safetensors") in message


def test_an_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(
        image_train,
        "training_loss",
        lambda config: lambda *args: pytest.fail("trained"),
    )
    for out, command, options in (
        (tmp_path / "file", _main, TINY),
        (tmp_path / "file" / "below", _demo_main, []),
    ):
        status, message = stopped([*options, "--out", str(out)], command)
        said = message + capsys.readouterr().err
        assert status and str(tmp_path / "file") in said and "folder" in said


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--config", "huge"], ["--config", "huge", "small", "digits", "et-base"]),
        (["--data", "nosuchset"], ["nosuchset", "digits", "cifar10"]),
        (["--model.dim", "zero"], ["--model.dim", "zero", "int"]),
        (["--model.dim", "0"], ["dim", "at least 1"]),
        (["--optim.lr", "-1"], ["lr", "-1.0"]),
        (["--optim.lr", "fast"], ["--optim.lr", "fast", "float"]),
        (["--model.learn_beta", "maybe"], ["--model.learn_beta", "maybe"]),
        (["--model.activation", "tanh"], ["--model.activation", "tanh", "softmax"]),
        (["--model.dtype", "float64"], ["--model.dtype", "bfloat16"]),
        (["--model.dim", "none"], ["--model.dim", "none"]),
        (["--model.patch_size", "3"], ["patch_size", "3"]),
        (["--model.beta", "-2"], ["beta", "-2"]),
        (["--model.step_size", "nan"], ["step_size"]),
        (["--batch_size", "0"], ["batch_size"]),
        (["--occluded", "2"], ["occluded"]),
        (["--occluded", "0.01"], ["occluded"]),
        (["--every", "0"], ["every"]),
        (["--validate_on", "0"], ["validate_on"]),
        (["--test_on", "0"], ["test_on"]),
        (["--seed", "-1"], ["seed"]),
        (["--optim.warmup", "9999"], ["warmup"]),
        (["--wings", "2"], ["--wings"]),
        (["--out"], ["--out"]),
    ],
)
def test_a_bad_option_is_named(tmp_path, monkeypatch, capsys, argv, says):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    for name in ("ET_DATA",):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        image_train, "evaluate", lambda *a, **k: pytest.fail("got as far as scoring")
    )
    status, message = stopped([*(TINY if argv[0] != "--config" else []), *argv])
    message += capsys.readouterr().err
    assert status and all(word in message for word in says), message
    assert not (tmp_path / "runs" / "digits" / "last.safetensors").exists()


def test_a_loss_that_explodes_is_explained(tmp_path):
    status, message = stopped(
        [*TINY, "--out", str(tmp_path / "run"), "--model.init_scale", "1e30"]
    )
    assert status and "loss" in message and "step" in message


def chosen(monkeypatch, argv):
    "The configuration that the options of a command line make."
    seen = []

    def grab(config):
        seen.append(config)
        raise ValueError("far enough")

    monkeypatch.setattr(image_train, "prepare", grab)
    assert stopped(argv) == (1, "et_train_images: far enough")
    return seen[0]


def test_options_reach_the_configuration(monkeypatch):
    assert chosen(monkeypatch, []) == CONFIGS["small"]
    for name, config in CONFIGS.items():
        assert chosen(monkeypatch, ["--config", name]) == config
    c = chosen(
        monkeypatch,
        [
            "--config",
            "digits",
            "--model.learn_beta",
            "true",
            "--model.beta",
            "0.25",
            "--model.self_attention",
            "TRUE",
            "--optim.lr",
            "1e-2",
            "--data",
            "cifar10",
            "--model.activation",
            "softmax",
            "--seed=7",
            "--occluded",
            "0.75",
            "--model.init_scale",
            "0.02",
        ],
    )
    expected = replace(
        CONFIGS["digits"],
        data="cifar10",
        seed=7,
        occluded=0.75,
        optim=replace(CONFIGS["digits"].optim, lr=1e-2),
        model=replace(
            CONFIGS["digits"].model,
            learn_beta=True,
            beta=0.25,
            self_attention=True,
            activation="softmax",
            init_scale=0.02,
        ),
    )
    assert c == expected
    assert chosen(monkeypatch, TINY) == TINY_CONFIG
    c = chosen(
        monkeypatch,
        [
            "--config",
            "et-base",
            "--model.beta",
            "none",
            "--model.init_scale",
            "None",
            "--model.learn_beta",
            "false",
        ],
    )
    assert c == replace(
        CONFIGS["et-base"], model=replace(CONFIGS["et-base"].model, init_scale=None)
    )


def test_a_dataset_library_that_is_missing_is_named(monkeypatch):
    def missing(config):
        raise ModuleNotFoundError(
            "No module named 'datasets': pip install 'et_nbdev[images]'"
        )

    monkeypatch.setattr(image_train, "prepare", missing)
    status, message = stopped([])
    assert status and "et_nbdev[images]" in message


@pytest.mark.parametrize("name", list(CONFIGS))
def test_help_explains_every_option_with_its_default(capsys, name):
    assert stopped(["--config", name, "--help"]) == (0, "")
    text = re.sub(r"\s+", "", capsys.readouterr().out)

    def check(config, prefix=""):
        for f in fields(config):
            value = getattr(config, f.name)
            if is_dataclass(value):
                check(value, f"{f.name}.")
            elif f.name not in ("mean", "std", "channels"):  # read off the pictures
                assert f"--{prefix}{f.name}" in text, f.name
                assert (
                    re.sub(r"\s+", "", f"{f.metadata['help']} (default: {value})")
                    in text
                ), f.name

    check(CONFIGS[name])
    for option in ("--config", "--out", "--test_on"):
        assert option in text
    for word in ("Raises", "thepaper'sforimages", "Consolescript"):
        assert word not in text


@pytest.mark.parametrize("name", ["tiny-imagenet", "tiny-imagenet-2026-11-21"])
def test_a_shipped_model_is_that_of_its_named_run(name):
    shipped, named = from_pretrained(name).config, CONFIGS[name].model
    assert replace(named, mean=shipped.mean, std=shipped.std) == shipped


def test_the_demos_help(capsys):
    assert stopped(["--help"], _demo_main) == (0, "")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert (
        "--data" in text
        and "--out" in text
        and "default: digits" in text
        and "default: out" in text
    )


def test_the_demo_trains_once_and_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn"), pytest.importorskip("skimage")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr(
        image_train, "CONFIGS", {"digits": TINY_CONFIG, "small": TINY_CONFIG}
    )
    for plot in ("plot_completion", "plot_energies"):
        monkeypatch.setattr(image_train, plot, blank)
    monkeypatch.setattr(image_train, "FILLS", {"mean of the open pixels": fill_mean})
    metrics = _demo("digits", tmp_path / "out")
    printed = capsys.readouterr().out
    assert os.listdir(tmp_path / "out") == ["digits"]
    files = {"completion.png", "energy.png", "metrics.json", "run"}
    assert files == set(os.listdir(tmp_path / "out/digits"))
    assert (
        set(metrics["masked_patch_mse"])
        == {"Energy Transformer", "mean of the open pixels", *KNOWN}
        and metrics["pictures"] == 400
    )
    assert "digits" in printed and "Energy Transformer" in printed and "4/4" in printed
    monkeypatch.setattr(
        image_train,
        "training_loss",
        lambda config: lambda *args: pytest.fail("trained again"),
    )
    monkeypatch.setattr(image_train, "_complete_photographs", lambda out: None)
    _demo_main(["--out", str(tmp_path / "out")])
    assert stopped(["--data", "nosuchset", "--out", str(tmp_path / "out")], _demo_main)[
        0
    ]


def test_the_demo_begins_with_photographs(tmp_path, monkeypatch, capsys):
    """Before anything is trained, figures and energies that fall; and a second set of
    pictures leaves the figures of the first alone.
    """
    pytest.importorskip("sklearn"), pytest.importorskip("skimage")
    pytest.importorskip("matplotlib").use("Agg")
    out = tmp_path / "out"
    asked = []

    def show(model, images, occluded):
        assert images.shape == (6, 64, 64, 3) and (occluded.sum(1) == 32).all()
        return blank()

    monkeypatch.setattr(image_train, "plot_completion", show)
    monkeypatch.setattr(image_train, "plot_energies", blank)
    monkeypatch.setattr(image_train, "_demo", lambda *args: asked.append(args))
    _demo_main(["--data", "some/where", "--out", str(out)])
    printed = capsys.readouterr().out
    assert asked == [("some/where", out)] and os.listdir(out) == ["six-photographs"]
    for file in ("completion.png", "energy.png"):
        assert (out / "six-photographs" / file).stat().st_size
        assert str(out / "six-photographs" / file) in printed
    energies = [
        float(e.replace(",", "")) for e in re.findall(r"mean energy +(\S+)", printed)
    ]
    assert len(energies) == 7 and energies == sorted(energies, reverse=True)


def test_the_demo_takes_a_folder_of_pictures(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from PIL import Image

    for n in range(20):
        (tmp_path / "pics").mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), np.uint8)).save(
            tmp_path / "pics" / f"{n}.png"
        )
    asked = {}
    monkeypatch.setattr(
        image_train,
        "train",
        lambda config, images, folder: (
            asked.update(config=config, images=images, folder=folder) or 1 / 0
        ),
    )
    with pytest.raises(ZeroDivisionError):
        _demo(str(tmp_path / "pics"), tmp_path / "out")
    assert (
        asked["folder"] == tmp_path / "out" / "pics" / "run"
        and len(asked["images"]["train"]) == 16
    )
    c = asked["config"]
    assert (
        c.data == str(tmp_path / "pics")
        and c.model.channels == 3
        and c.model.image_size == 32
        and c.batch_size == 16
    )
    assert c.optim.steps < CONFIGS["small"].optim.steps


def test_as_a_command_it_ends_with_a_status_and_without_a_traceback(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(et_nbdev.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from et_nbdev.vision.train import _main; _main()",
            *TINY,
            "--model.step_size",
            "nan",
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    assert (
        ended.returncode == 1
        and "step_size" in ended.stderr
        and "Traceback" not in ended.stderr
    ), ended.stderr
    assert os.listdir(tmp_path) == []


# --- where training starts
# --------------------------------------------------------------------------------------
def test_waves_have_unit_variance_and_tell_distance_only():
    for side, dim in ((4, 64), (8, 192)):
        p = np.asarray(waves(side, dim), np.float64)
        assert (
            p.shape == (side * side, dim)
            and p.dtype == np.float64
            and len(np.unique(p.round(5), axis=0)) == side * side
        )
        np.testing.assert_allclose((p**2).mean(), 1, rtol=1e-5)
        overlap = (p @ p.T / dim).reshape(side, side, side, side)
        for i, j in np.ndindex(side - 1, side - 1):  # the same wherever the pair lies
            np.testing.assert_allclose(
                overlap[i + 1, j + 1, 1:, 1:], overlap[i, j, :-1, :-1], atol=1e-5
            )
        assert overlap[0, 0, 0, 0] > overlap[0, 0, 0, 1] > overlap[
            0, 0, 0, 2
        ] and np.allclose(overlap[0, 0], overlap[0, 0].T, atol=1e-5)


@pytest.mark.parametrize("dim", [2, 3, 5, 6, 7])
def test_waves_of_any_width(dim):
    p = np.asarray(waves(3, dim))
    assert p.shape == (9, dim) and np.isfinite(p).all()


def test_how_a_model_starts():
    tied = build(tied_start=True)
    apart = build()
    plain = build(position_init="waves", position_scale=0.5)
    np.testing.assert_array_equal(
        tied.block.attention.Wk[...], tied.block.attention.Wq[...]
    )
    assert not np.allclose(apart.block.attention.Wk[...], apart.block.attention.Wq[...])
    np.testing.assert_allclose(plain.positions[...], 0.5 * waves(2, 16), rtol=1e-6)
    # a start, not a bond
    tied.block.attention.Wk[...] = tied.block.attention.Wk[...] + 1
    assert not np.allclose(tied.block.attention.Wk[...], tied.block.attention.Wq[...])


# --- the transformer to compare with
# --------------------------------------------------------------------------------------
def test_the_transformer_is_its_block_applied_T_times():
    net = image_model(replace(CONFIG, block="transformer"), rngs=nnx.Rngs(0))
    assert (
        type(net) is ImageTransformer
        and type(image_model(CONFIG, rngs=nnx.Rngs(0))) is ImageEnergyTransformer
    )
    x = net.encode(PATCHES, HIDDEN)
    for _ in range(CONFIG.steps):
        x = net.block(x)
    for remat in (False, True):
        np.testing.assert_allclose(
            net(PATCHES, HIDDEN, remat=remat), net.decode(x), rtol=1e-4, atol=1e-5
        )
    scrambled = np.where(HIDDEN[..., None], PATCHES + 9, PATCHES)
    np.testing.assert_array_equal(net(scrambled, HIDDEN), net(PATCHES, HIDDEN))
    with pytest.raises(TypeError, match="step"):
        net(PATCHES, HIDDEN, step=3)
    completion = complete(net, PICTURES, HIDDEN, path=True)
    assert completion.energies is None and completion.path.shape == (
        CONFIG.steps + 1,
        *PICTURES.shape,
    )


def test_it_differs_from_the_energy_model_in_the_block_alone():
    shapes = lambda config: {
        name: leaf.shape
        for name, leaf in (
            (jax.tree_util.keystr(p), x)
            for p, x in jax.tree_util.tree_leaves_with_path(
                weights(image_model(config, rngs=nnx.Rngs(0)))
            )
        )
    }
    energy, other = shapes(CONFIG), shapes(replace(CONFIG, block="transformer"))
    outside = lambda names: {k: v for k, v in names.items() if "block" not in k}
    assert outside(energy) == outside(other) and energy != other


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(block="transformer"),
        dict(num_heads=0),
        dict(num_memories=0),
        dict(self_attention=True),
        OPTIONS,
        dict(block="transformer", relative_positions="zero"),
    ],
    ids=str,
)
def test_operations_are_those_the_compiler_counts(changes):
    config = replace(
        CONFIG,
        image_size=32,
        dim=64,
        num_heads=changes.pop("num_heads", 4),
        head_dim=16,
        num_memories=changes.pop("num_memories", 256),
        steps=2,
        **changes,
    )
    graphdef, state = nnx.split(image_model(config, rngs=nnx.Rngs(0)))
    patches = jnp.zeros((3, config.num_tokens, config.patch_dim))
    masked = jnp.zeros((3, config.num_tokens), bool)
    way = lambda net: getattr(net, "solver", Euler(0.1))

    # a compiler counts the inside of a loop once, so the loop is left out
    def once(state):
        net = nnx.merge(graphdef, state)
        x = net.encode(patches, masked)
        for _ in range(config.steps):
            if config.block == "transformer":
                x = net.block(x)
            else:
                look = Look(net.block, {})
                x = way(net).step(look, way(net).init(look, x))[0]
                x = x[0] if config.learn_steps else x
        return net.decode(x)

    counted = jax.jit(once).lower(state).compile().cost_analysis()["flops"] / 3
    assert 0.85 * counted < config.flops <= counted  # all but the elementwise ones


# --- what the paper's model does not have
# --------------------------------------------------------------------------------------
def shaken(tree, seed=0, size=0.1):
    "All parameters in double precision, moved off their start."
    draw = np.random.default_rng(seed).normal
    move = lambda p: jnp.asarray(np.asarray(p) + size * draw(size=p.shape))
    return jax.tree.map(move, tree)


def test_with_every_option_the_update_is_the_gradient(x64):
    block = shaken(build(**OPTIONS).block)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 16)))
    energies, update = block.energies_and_update(g)
    assert_gradient(block.energy, g, -update)
    assert list(energies) == ["attention", "memory"]
    # each option has its share in it
    for name, off in dict(
        relative_positions="none", normalize_heads=False, negative_memories=None
    ).items():
        other = shaken(build(**{**OPTIONS, name: off}).block)
        other.attention.Wq, other.attention.Wk = block.attention.Wq, block.attention.Wk
        other.attention.log_beta = block.attention.log_beta
        other.memory.xi, other.norm = block.memory.xi, block.norm
        assert jnp.abs(other.update(g) - update).max() > 1e-3, name
    np.testing.assert_allclose(build(**OPTIONS).block.attention.beta, [1.5, 1.5])
    assert build(**OPTIONS).block.attention.log_beta.shape == (2,)


def test_the_gate_is_the_only_option_with_products():
    c = replace(CONFIG, **OPTIONS)
    gate = 3 * 2 * 4 * 16  # T products of N tokens with w, D multiplications each
    assert c.flops - CONFIG.flops == gate


def test_a_transformer_is_no_energy_transformer():
    with pytest.raises(
        ValueError, match="^block: expected 'energy', got 'transformer'"
    ):
        ImageEnergyTransformer(replace(CONFIG, block="transformer"), rngs=nnx.Rngs(0))


def test_learned_steps_are_taken_everywhere(tmp_path):
    net, patches, hidden = build(**OPTIONS), jnp.asarray(PATCHES), jnp.asarray(HIDDEN)
    net.solver.log_alpha[...] = jnp.log(jnp.asarray([0.3, 0.1, 0.2], jnp.float32))
    net.solver.w[...] = jax.random.normal(jax.random.key(0), (16,), jnp.float32)
    net.solver.b[...] = jnp.float32(0.5)
    x = net.encode(patches, hidden)
    for alpha in (0.3, 0.1, 0.2, 0.2):  # a step more repeats the last
        g = net.block.norm(x)
        share = jax.nn.sigmoid(g @ net.solver.w[...] + net.solver.b[...])
        x = x + alpha * share[..., None] * net.block.update(g)
    np.testing.assert_allclose(
        net.descend(patches, hidden, steps=4)[0], x, rtol=1e-4, atol=1e-5
    )
    # in use, and when it comes back from a file
    save_model(tmp_path / "rich.safetensors", net)
    done = complete(net, PICTURES, HIDDEN, steps=4)
    predicted = np.asarray(unpatchify(net.decode(x), 8, 4))
    expected = np.clip(
        predicted * np.float32(CONFIG.std) + np.float32(CONFIG.mean), 0, 1
    )
    np.testing.assert_allclose(
        np.asarray(done.images)[UNDER], expected[UNDER], atol=1e-5
    )
    again = complete(load_model(tmp_path / "rich.safetensors"), PICTURES, HIDDEN)
    np.testing.assert_array_equal(again.images, complete(net, PICTURES, HIDDEN).images)
    # steps of a size that is asked for are Euler's
    asked = complete(net, PICTURES, HIDDEN, step_size=0.1)
    assert not np.allclose(asked.images, again.images, atol=1e-3)
    plain = complete(net, PICTURES, HIDDEN, step_size=0.1, steps=1).energies.total
    assert not np.allclose(plain[1], again.energies.total[1])


def test_the_transformer_takes_relative_positions():
    config = replace(CONFIG, block="transformer", relative_positions="zero")
    net = image_model(config, rngs=nnx.Rngs(0))
    plain = image_model(replace(CONFIG, block="transformer"), rngs=nnx.Rngs(0))
    assert same(weights(plain)["encoder"], weights(net)["encoder"])
    x = net.encode(jnp.asarray(PATCHES), jnp.asarray(HIDDEN))
    for tokens in (x, x[0], x[None]):
        np.testing.assert_allclose(
            net.block(tokens), plain.block(tokens), rtol=1e-4, atol=1e-5
        )
    # a bias that leaves the patch below alone: the two upper patches read the lower
    table = jnp.full((2, 3, 3), -1e4, jnp.float32).at[:, 0, 1].set(0.0)
    net.block.positions.table[...] = table
    g, layer = net.block.norm1(x), net.block.attention
    read = jnp.einsum("bnhy,hyd->bnd", layer.value(g), layer.out.kernel[...])
    found = net.block._attend(g)
    np.testing.assert_allclose(found[:, :2], read[:, 2:], atol=1e-4)


def test_the_explorer_takes_the_learned_steps():
    from et_nbdev.explore import ExplorerSettings, descend_picture

    net = build(**OPTIONS)
    net.solver.log_alpha[...] = jnp.log(jnp.asarray([0.3, 0.1, 0.2], jnp.float32))
    look = lambda **options: descend_picture(
        net, PICTURES[0], HIDDEN[0], ExplorerSettings(steps=3, **options)
    )
    expected = complete(net, PICTURES[:1], HIDDEN[:1], path=True)
    np.testing.assert_allclose(
        look(alpha=0.1).completed, np.asarray(expected.path)[:, 0], atol=1e-5
    )
    net.solver.log_alpha[...] += jnp.log(jnp.float32(2))
    twice = complete(net, PICTURES[:1], HIDDEN[:1], path=True)
    net.solver.log_alpha[...] -= jnp.log(jnp.float32(2))
    kept = np.array(net.solver.log_alpha[...])
    for _ in range(2):  # the dial does not turn the model itself
        np.testing.assert_allclose(
            look(alpha=0.2).completed, np.asarray(twice.path)[:, 0], atol=1e-5
        )
    np.testing.assert_array_equal(net.solver.log_alpha[...], kept)


# --- weights that come with the library
# --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", pretrained())
def test_shipped_weights_load_and_complete(name):
    net = from_pretrained(name)
    c = net.config
    pictures = np.random.default_rng(0).integers(
        0, 256, (2, c.image_size, c.image_size, c.channels), np.uint8
    )
    occluded = np.arange(2 * c.num_tokens).reshape(2, -1) % 2 == 0
    done = complete(net, pictures, occluded)
    assert (
        np.isfinite(done.images).all()
        and (
            np.diff(done.energies.total, axis=0)
            <= 1e-4 * np.abs(done.energies.total[:-1])
        ).all()
    )
    # what is learned: the paper's, or that and all the options of `ImageConfig`
    own = set(nnx.to_pure_dict(nnx.state(net.block, nnx.Param))["attention"])
    more = {"log_beta", "positions"} if name == "tiny-imagenet" else set()
    assert own == {"Wq", "Wk"} | more
    x = net.encode(patchify(normalize(pictures, c.mean, c.std), c.patch_size), occluded)
    for t in range(c.steps):
        g, alpha = net.block.norm(x), c.step_size
        move = net.block.update(g)
        if c.channel_steps:
            W = net.solver.W[t] if c.map_per_step else net.solver.W[...]
            logits = g @ W.T + net.solver.c[...][None, None, t]
            alpha = np.exp(net.solver.log_alpha[...][t]) * jax.nn.sigmoid(logits)
            # σ/γ M u: what the move u does to g, in its direction
            turned = jax.jvp(net.block.norm, (x,), (move,))[1]
            sigma = np.sqrt(x.var(-1, keepdims=True) + net.block.norm.eps)
            move = turned * sigma / net.block.norm.gamma
        x = x + alpha * move
    drawn = np.asarray(unpatchify(net.decode(x), c.image_size, c.patch_size))
    drawn = np.clip(drawn * np.float32(c.std) + np.float32(c.mean), 0, 1)
    patches = lambda x: np.asarray(patchify(np.asarray(x), c.patch_size))[occluded]
    np.testing.assert_allclose(patches(done.images), patches(drawn), atol=1e-4)


def test_a_hub_repository_is_fetched_by_name_and_revision(tmp_path, monkeypatch):
    import huggingface_hub

    net, asked = build(), []
    save_model(tmp_path / "model.safetensors", net)

    def fetch(repo, file, revision=None):
        asked.append((repo, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert same(
        weights(from_pretrained("someone/net", revision="v1")), weights(net)
    ) and asked == [("someone/net", "model.safetensors", "v1")]

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(OSError, match="someone/net.*no network"):
        from_pretrained("someone/net")


@pytest.mark.parametrize(
    "source", ["no-such-model", "", "a/b/c", "../weights", "user/na me"]
)
def test_an_unknown_source_lists_what_there_is(source):
    with pytest.raises(ValueError, match="^source: .*cifar10-small"):
        from_pretrained(source)


@pytest.mark.parametrize("source", [None, 3, b"digits"])
def test_a_source_that_is_no_text_is_refused(source):
    with pytest.raises(TypeError, match="^source: .*, got " + type(source).__name__):
        from_pretrained(source)


def test_damaged_weights_are_refused(tmp_path):
    save_model(tmp_path / "model.safetensors", build())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    with pytest.raises(CheckpointError, match="checksum"):
        from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        from_pretrained(tmp_path)


def test_weights_of_an_older_version_keep_their_meaning(tmp_path):
    """A file that does not know an option was made before there was one, when the model
    was what the option's default is now.
    """
    net = build()
    meta = {
        "config": {
            "model": {
                k: v
                for k, v in asdict(net.config).items()
                if k not in ("block", "position_init", "tied_start", *OPTIONS)
                or k in ("beta", "learn_beta")
            }
        }
    }
    save_checkpoint(tmp_path / "old.safetensors", {"params": weights(net)}, meta)
    assert load_model(tmp_path / "old.safetensors").config == net.config


# --- depth in use
# ----------------------------------------------------------------------------------
def test_the_depth_in_use_is_an_option(model):
    as_trained, by_name, at_once = (
        evaluate(model, MANY[:12], 2, **options)
        for options in (dict(), dict(steps=CONFIG.steps), dict(steps=0))
    )
    np.testing.assert_array_equal(as_trained, by_name)
    assert not np.allclose(as_trained, at_once)
