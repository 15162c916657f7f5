"""The browser's engine computes what the library computes."""

import json
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.vision.data import photographs
from et_nbdev.vision.model import (
    ImageConfig,
    ImageEnergyTransformer,
    complete,
    from_pretrained,
    save_model,
)

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "nbs/play/engine.js"
pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")
TINY = dict(
    image_size=12,
    patch_size=3,
    channels=3,
    dim=10,
    num_heads=2,
    head_dim=5,
    num_memories=14,
    steps=4,
    step_size=0.3,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.25, 0.3),
)
OPTIONS = {
    "plain": {},
    "one channel, one norm": dict(
        channels=1, mean=(0.5,), std=(0.25,), shared_norm=True
    ),
    "a beta, self-attention": dict(beta=0.7, self_attention=True),
    "a learned beta": dict(learn_beta=True),
    "everything": dict(
        relative_positions="distance",
        normalize_heads=True,
        learn_beta=True,
        beta_per_head=True,
        negative_memories=0.3,
        learn_steps=True,
        gate_steps=True,
    ),
}


def in_the_browser(model: Path, folder: Path, pixels, masked, steps: int) -> dict:
    "What the engine says of one picture (S, S, C)."
    given = dict(pixels=pixels.ravel().tolist(), masked=masked.tolist(), steps=steps)
    path = folder / "input.json"
    path.write_text(json.dumps(given))
    command = ["node", str(ROOT / "tests/play/run.mjs"), str(ENGINE), str(model)]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def relative(found, wanted) -> float:
    wanted = np.asarray(wanted, np.float64).ravel()
    gap = np.abs(np.asarray(found, np.float64).ravel() - wanted).max()
    return gap / np.abs(wanted).max()


def compare(model, found: dict, pixels, masked, steps: int, within: float):
    result = complete(model, pixels[None], masked[None], steps=steps, path=True)
    for name, energies in result.energies.items():
        said = [row[name] for row in found["energies"]]
        assert relative(said, energies[:, 0]) < within, name
    assert relative(found["pictures"], result.path[:, 0]) < within


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_energies_updates_and_pictures_are_the_librarys(options, tmp_path):
    c = ImageConfig(**TINY | options)
    model = ImageEnergyTransformer(c, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    for leaf in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)
    ):
        leaf[...] = leaf[...] + 0.3 * random.normal(size=leaf.shape).astype(np.float32)
    save_model(tmp_path / "model.safetensors", model)
    pixels = random.random((12, 12, c.channels), np.float32)
    masked = random.random(16) < 0.5
    found = in_the_browser(
        tmp_path / "model.safetensors", tmp_path, pixels, masked, c.steps + 2
    )
    mean, std = (np.asarray(v, np.float32) for v in (c.mean, c.std))
    rows = ((pixels - mean) / std).reshape(4, 3, 4, 3, -1).swapaxes(1, 2)
    patches = jnp.asarray(rows.reshape(1, 16, -1))
    x = model.encode(patches, jnp.asarray(masked)[None])
    g = model.block.norm(x)
    assert relative(found["x"], x) < 1e-5
    assert relative(found["g"], g) < 1e-5
    for name in model.block.names:
        update = getattr(model.block, name).update(g)
        assert relative(found[name], update) < 1e-4, name
    compare(model, found, pixels, masked, c.steps + 2, 1e-3)


def test_a_shipped_model_in_half_precision(tmp_path):
    """The picture that a browser shows differs from the library's by less than a shade
    of gray.
    """
    model = from_pretrained("tiny-imagenet")
    c = model.config
    pixels = photographs(c.image_size)[0].astype(np.float32) / 255
    masked = np.random.default_rng(0).random(c.num_tokens) < 0.5
    path = ROOT / "nbs/play/tiny-imagenet.safetensors"
    assert path.stat().st_size < 1_000_000
    found = in_the_browser(path, tmp_path, pixels, masked, c.steps)
    compare(model, found, pixels, masked, c.steps, 2e-3)
    print(f"{found['stepsPerSecond']:.1f} steps per second")


def test_a_model_it_cannot_run_is_refused(tmp_path):
    c = ImageConfig(**TINY | dict(activation="softmax"))
    path = tmp_path / "model.safetensors"
    save_model(path, ImageEnergyTransformer(c, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="expected an energy block with ReLU"):
        in_the_browser(path, tmp_path, np.zeros((12, 12, 3)), np.zeros(16, bool), 1)
