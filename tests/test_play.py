"""The browser's engine computes what the library computes."""

import json
import os
import re
import runpy
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


def pictures_for(name: str, size: int):
    "The pictures of a model on the page, in [0, 1]."
    if name == "tiny-imagenet":
        return photographs(size).astype(np.float32) / 255
    sheet = pytest.importorskip("PIL.Image").open(ROOT / "nbs/play/digits.png")
    pixels = np.asarray(sheet, np.float32) / 255
    return np.stack(np.split(pixels, pixels.shape[1] // size, 1))[..., None]


# how far it may be from the library's: the larger one is in half precision
SHIPPED = {"tiny-imagenet": 2e-3, "digits": 1e-3}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_the_librarys(name, tmp_path):
    """The picture that a browser shows differs from the library's by less than a shade
    of gray.
    """
    model = from_pretrained(name)
    c = model.config
    path = ROOT / f"nbs/play/{name}.safetensors"
    assert path.stat().st_size < 1_000_000
    for i, pixels in enumerate(pictures_for(name, c.image_size)[:3]):
        masked = np.random.default_rng(i).random(c.num_tokens) < 0.5
        found = in_the_browser(path, tmp_path, pixels, masked, c.steps)
        compare(model, found, pixels, masked, c.steps, SHIPPED[name])
    print(f"{name} in node: {found['stepsPerSecond']:.0f} steps per second")


def test_the_page_has_the_weights_that_ship_with_the_library():
    "After a change of these: python scripts/browser_models.py"
    script = runpy.run_path(str(ROOT / "scripts/browser_models.py"))
    for name, packed in script["PACKED"].items():
        shipped = ROOT / f"et_nbdev/vision/weights/{name}.safetensors"
        there = ROOT / f"nbs/play/{name}.safetensors"
        assert there.read_bytes() == packed(shipped.read_bytes())


def test_a_model_it_cannot_run_is_refused(tmp_path):
    c = ImageConfig(**TINY | dict(activation="softmax"))
    path = tmp_path / "model.safetensors"
    save_model(path, ImageEnergyTransformer(c, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="expected an energy block with ReLU"):
        in_the_browser(path, tmp_path, np.zeros((12, 12, 3)), np.zeros(16, bool), 1)


# --- in a real browser

PAGE = """<!doctype html><meta name=viewport content="width=device-width">
<link rel=stylesheet href="play/play.css"><body>
<div class="et-play">What stands here without JavaScript.</div>
<script type=module>import "./play/play.js"</script>"""
SITE = "http://play.test/"


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api").sync_playwright
    names = os.environ.get("CHROME") or "chromium", "chromium-browser", "google-chrome"
    chrome = next(filter(None, map(shutil.which, names)), None)
    if chrome is None:
        pytest.skip("needs a Chromium, on the PATH or named by CHROME")
    with sync() as play:
        browser = play.chromium.launch(executable_path=chrome, chromium_sandbox=False)
        yield browser
        browser.close()


def opened(browser, width: int, missing: str = "nothing"):
    "The page in a window of that width, without the file `missing`."
    page = browser.new_page(viewport=dict(width=width, height=900))
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))

    def answer(route):
        path = route.request.url.removeprefix(SITE)
        if not path:
            return route.fulfill(body=PAGE, content_type="text/html")
        file = ROOT / "nbs" / path
        if file.name == missing or not file.is_file():
            return route.fulfill(status=404)
        return route.fulfill(path=file)

    page.route(SITE + "**", answer)
    page.goto(SITE)
    return page


def said(page, text: str):
    page.wait_for_function(
        "text => document.querySelector('.play-status')?.textContent.includes(text)",
        arg=text,
        timeout=120_000,
    )
    return page.inner_text(".play-status")


def test_a_fast_drag_leaves_no_patch_out(browser):
    page = opened(browser, 1280)
    said(page, "t = 6:")
    page.get_by_text("Show all").click()
    said(page, "0 of 64 patches hidden")
    box = page.locator(".play-picture > canvas").bounding_box()
    row = box["y"] + box["height"] / 16
    page.mouse.move(box["x"] + 5, row)
    page.mouse.down()
    said(page, "1 of 64 patches hidden")
    page.mouse.move(box["x"] + box["width"] - 5, row)  # one event for seven patches
    page.mouse.up()
    said(page, "8 of 64 patches hidden")
    # a touch that scrolls the page takes back what it did
    page.mouse.move(box["x"] + 5, row + box["height"] / 8)
    page.mouse.down()
    said(page, "9 of 64 patches hidden")
    page.locator(".play-picture > canvas").dispatch_event("pointercancel")
    said(page, "8 of 64 patches hidden")
    assert not page.faults


@pytest.mark.parametrize("width", [1280, 390])
def test_a_picture_is_completed_in_a_browser(browser, width, tmp_path):
    image = pytest.importorskip("PIL.Image")
    page = opened(browser, width)
    assert "32 of 64 patches hidden" in said(page, "t = 6:")
    assert page.locator(".play-pictures button").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # a patch is hidden or shown by a press, and by the keyboard
    canvas = page.locator(".play-picture > canvas")
    hidden = lambda: int(re.search(r"(\d+) of 64", page.inner_text(".play-status"))[1])
    counts = [hidden()]
    canvas.click(position=dict(x=10, y=10))
    counts.append(hidden())
    canvas.press("ArrowRight")
    canvas.press(" ")
    counts.append(hidden())
    assert (np.abs(np.diff(counts)) == 1).all()
    page.get_by_text("Show all").click()
    said(page, "0 of 64 patches hidden")
    page.get_by_text("Hide half").click()
    said(page, "t = 6: E")
    # time, beyond the depth of training
    said_at = lambda t: page.locator("input[type=range]").first.evaluate(
        "(e, t) => { e.value = t; e.dispatchEvent(new Event('input')); }", t
    )
    page.wait_for_function(
        "document.querySelector('.et-play canvas[aria-label^=Energy]').ariaLabel"
        ".split(',').length == 15",  # 13 energies
        timeout=120_000,
    )
    said_at(12)
    assert "beyond the 6 steps" in said(page, "t = 12:")
    # E falls, and less memory is another descent
    path = lambda: [
        float(part)
        for part in page.locator("canvas[aria-label^=Energy]")
        .get_attribute("aria-label")
        .split(": ")[1]
        .split(", ")
    ]
    assert (np.diff(path()) < 0).all()
    # one's own picture, and a file that is none
    image.fromarray(photographs(90)[3][:, 10:]).save(tmp_path / "own.png")
    (tmp_path / "none.png").write_bytes(b"no picture")
    chooser = page.locator("input[type=file]")
    before = path()
    chooser.set_input_files(tmp_path / "own.png")
    said(page, "t = 6: E")
    assert path() != before
    chooser.set_input_files(tmp_path / "none.png")
    said(page, "none.png is not a picture")
    assert page.faults == []
    page.close()


def test_weights_that_cannot_be_had_are_said(browser):
    page = opened(browser, 1280, missing="tiny-imagenet.safetensors")
    assert "could not be loaded (404)" in said(page, "could not be loaded")
    page.close()


def test_digits_are_completed_in_a_browser(browser):
    page = opened(browser, 390)
    said(page, "t = 6:")
    page.get_by_label("pictures").select_option(label="digits, 8 × 8")
    assert "8 of 16 patches hidden" in said(page, "t = 8:")
    assert page.locator(".play-pictures button").count() == 10
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("a handwritten 7").click()
    said(page, "t = 8:")
    page.get_by_text("Show all").click()
    said(page, "0 of 16 patches hidden")
    page.locator(".play-picture > canvas").click(position=dict(x=10, y=10))
    assert "1 of 16 patches hidden" in said(page, "t = 8:")
    page.get_by_label("pictures").select_option(label="photographs, 64 × 64")
    assert "32 of 64 patches hidden" in said(page, "t = 6:")
    assert page.locator(".play-pictures button").count() == 6
    assert page.faults == []
    page.close()


SPEED = """async ([name, steps]) => {
  const { ImageEnergyTransformer, readSafetensors } = await import("./play/engine.js");
  const answer = await fetch(`./play/${name}.safetensors`);
  const net = new ImageEnergyTransformer(readSafetensors(await answer.arrayBuffer()));
  const { image_size: S, channels: C } = net.config;
  const pixels = new Float32Array(S * S * C).fill(0.5);
  const masked = Array.from({ length: net.N }, (_, n) => n % 2 === 0);
  net.descend(pixels, masked, steps);
  const began = performance.now();
  net.descend(pixels, masked, steps);
  return (1000 * steps) / (performance.now() - began);
}"""


@pytest.mark.parametrize("name, steps", [("digits", 120), ("tiny-imagenet", 12)])
def test_how_fast_a_browser_descends(browser, name, steps):
    "A figure to read: the machine may have other work to do."
    page = opened(browser, 1280)
    page.goto(SITE)
    speed = page.evaluate(SPEED, [name, steps])
    print(f"{name} in Chromium: {speed:.0f} steps per second, a picture for each")
    assert speed > 0
    page.close()
