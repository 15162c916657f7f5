"""The browser's engine computes what the library computes."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import browser_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from browser_graph import graph_arrays
from flax import nnx
from puzzle_rivals import Broken
from sklearn.metrics import roc_auc_score

from et_nbdev.explore import descend_graph
from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyEnergyTransformer, known_config
from et_nbdev.graph.data import Graph, load_graph
from et_nbdev.graph.nodes import scaled
from et_nbdev.puzzle import (
    PuzzleConfig,
    PuzzleTransformer,
    as_boards,
    is_solved,
    save_puzzle,
)
from et_nbdev.puzzle import from_pretrained as puzzle_model
from et_nbdev.training import load_checkpoint, read_meta, save_checkpoint
from et_nbdev.vision.data import photographs
from et_nbdev.vision.model import (
    ImageConfig,
    ImageEnergyTransformer,
    ImageTransformer,
    complete,
    from_pretrained,
    save_model,
)

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "nbs/play/engine.js"
pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")
TINY = dict(
    image_size=12, patch_size=3, channels=3, dim=10, num_heads=2, head_dim=5,
    num_memories=14, steps=4, step_size=0.3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3),
)  # fmt: skip
OPTIONS = {
    "plain": {},
    "one channel": dict(channels=1, mean=(0.5,), std=(0.25,)),
    "all parts": dict(recipe="tiny-imagenet"),
    "two and a half negative memories": dict(recipe="tiny-imagenet", num_memories=10),
}


def in_node(script: str, *arguments) -> dict:
    "What a script of tests/play has the engine say."
    command = ["node", str(ROOT / "tests/play" / script), str(ENGINE)]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def completed(model: Path, folder: Path, pixels, masked, steps: int) -> dict:
    "What the engine says of one picture (S, S, C)."
    given = dict(pixels=pixels.ravel().tolist(), masked=masked.tolist(), steps=steps)
    (folder / "input.json").write_text(json.dumps(given))
    return in_node("run.mjs", model, folder / "input.json")


def shaken(model):
    "With other parameters, so that none of them is 0 or 1."
    random = np.random.default_rng(0)
    for leaf in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)
    ):
        leaf[...] = leaf[...] + 0.3 * random.normal(size=leaf.shape).astype(np.float32)
    return model


def relative(found, wanted) -> float:
    wanted = np.asarray(wanted, np.float64).ravel()
    gap = np.abs(np.asarray(found, np.float64).ravel() - wanted).max()
    return gap / (np.abs(wanted).max() or 1)  # zeros, where a term is switched off


def compare(model, found: dict, pixels, masked, steps: int, within: float):
    result = complete(model, pixels[None], masked[None], steps=steps, path=True)
    for name, energies in result.energies.items():
        said = [row[name] for row in found["energies"]]
        assert relative(said, energies[:, 0]) < within, name
    assert relative(found["pictures"], result.path[:, 0]) < within


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_energies_updates_and_pictures_are_the_librarys(options, tmp_path):
    c = ImageConfig(**TINY | options)
    model = shaken(ImageEnergyTransformer(c, rngs=nnx.Rngs(0)))
    save_model(tmp_path / "model.safetensors", model)
    random = np.random.default_rng(1)
    pixels = random.random((12, 12, c.channels), np.float32)
    masked = random.random(16) < 0.5
    found = completed(
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
    if name == "photographs":
        return photographs(size).astype(np.float32) / 255
    sheet = pytest.importorskip("PIL.Image").open(ROOT / "nbs/play/digits.png")
    pixels = np.asarray(sheet, np.float32) / 255
    return np.stack(np.split(pixels, pixels.shape[1] // size, 1))[..., None]


# how far it may be from the library's: the larger one is in half precision
SHIPPED = {"photographs": 2e-3, "digits": 1e-3}


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
        found = completed(path, tmp_path, pixels, masked, c.steps)
        compare(model, found, pixels, masked, c.steps, SHIPPED[name])


def test_the_page_has_the_weights_that_ship_with_the_library():
    "After a change of these: python scripts/browser_models.py"
    for name, packed in browser_models.PACKED.items():
        shipped = browser_models.source(name)
        there = ROOT / f"nbs/play/{name}.safetensors"
        assert there.read_bytes() == packed(shipped.read_bytes())
    (sizes,) = re.findall(
        r"SIZES = \[(.*)\];", (ROOT / "nbs/play/puzzle.js").read_text()
    )
    boards = [name for name in browser_models.PACKED if name.startswith("sudoku")]
    assert sorted(boards) == [f"sudoku-{n}" for n in sizes.split(", ")]


def test_a_model_it_cannot_run_is_refused(tmp_path):
    c = ImageConfig(**TINY | dict(recipe="transformer"))
    path = tmp_path / "model.safetensors"
    save_model(path, ImageTransformer(c, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="expected a recipe of the library"):
        completed(path, tmp_path, np.zeros((12, 12, 3)), np.zeros(16, bool), 1)


# --- a graph

WALK = ROOT / "nbs/play/digits-graph.safetensors"


def compare_walk(model, graph, path: list, attentive: bool = True):
    "Energies and updates of every node, P of every edge and p, within 1e-3."
    features, edges = scaled(graph), model.prepare(graph)
    weights = {} if attentive else {"attention": 0.0}
    dials = dict(steps=len(path) - 1, weights=weights)
    wanted = descend_graph(model, features, edges, **dials)
    for name, shares in wanted.shares.items():
        assert relative([at[name] for at in path], shares) < 1e-3, name
    assert relative([at["p"] for at in path], wanted.p) < 1e-3
    if attentive:
        assert relative([at["P"] for at in path], wanted.weights) < 1e-3
        g = model.blocks[0].norm(model.encode(jnp.asarray(features)))
        updates = model.blocks[0].updates(g, edges=edges[0])
        for name, found in zip(("attention", "memory"), path[0]["updates"]):
            assert relative(found, updates[name]) < 1e-4, name


@pytest.mark.parametrize("learn_beta", [True, False])
def test_a_graph_descends_as_in_the_library(learn_beta, tmp_path):
    c = AnomalyConfig(
        dim=10,
        head_dim=6,
        num_memories=14,
        hidden=7,
        step_size=0.3,
        beta=None if learn_beta else 6**-0.5,
    )
    random = np.random.default_rng(0)
    a, b = np.triu_indices(12, 1)
    chosen = random.random(len(a)) < 0.4
    chosen &= (a != 5) & (b != 5)  # a node without neighbors
    levels = random.integers(0, 17, (12, 8))
    levels[:, 3] = 4  # a constant column
    labels = (np.arange(12) % 3 == 0).astype(np.int8)
    graph = Graph(a[chosen], b[chosen], levels, labels, name="few").symmetric()
    model = shaken(AnomalyEnergyTransformer(9, c, rngs=nnx.Rngs(0)))
    tree = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    tree["graph"] = graph_arrays(graph)
    save_checkpoint(tmp_path / "g", tree, {"config": {"model": dataclasses.asdict(c)}})
    compare_walk(model, graph, in_node("walk.mjs", tmp_path / "g", 4, "true"))
    compare_walk(model, graph, in_node("walk.mjs", tmp_path / "g", 4, "false"), False)


@pytest.fixture(scope="module")
def detector():
    "The model of the page."
    c = known_config(read_meta(WALK)["config"]["model"])
    model = AnomalyEnergyTransformer(33, c, rngs=nnx.Rngs(0))
    params = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    nnx.update(model, load_checkpoint(WALK, params)[0]["params"])
    return model


def test_the_walk_is_the_librarys(detector):
    "After a change of the graph or the model: python scripts/browser_graph.py"
    graph = load_graph("digits-knn")
    assert WALK.stat().st_size < 300_000
    with safetensors.safe_open(WALK, framework="numpy") as file:
        for name, wanted in graph_arrays(graph).items():
            np.testing.assert_array_equal(file.get_tensor(f"graph.{name}"), wanted)
    path = in_node("walk.mjs", WALK, 6, "true")
    compare_walk(detector, graph, path)
    p = np.array(path[detector.config.steps]["p"])
    assert roc_auc_score(graph.labels, p) > 0.95
    assert p[1279] > 0.8  # where the walk begins, as in the chapter


def test_a_graph_model_it_cannot_run_is_refused(tmp_path, detector):
    tree = {"graph": graph_arrays(load_graph("digits-knn"))}
    config = dataclasses.asdict(detector.config) | dict(num_heads=2)
    save_checkpoint(tmp_path / "g", tree, {"config": {"model": config}})
    with pytest.raises(AssertionError, match="expected one head"):
        in_node("walk.mjs", tmp_path / "g", 1, "true")


# --- in a real browser

PAGE = """<!doctype html><meta name=viewport content="width=device-width">
<link rel=stylesheet href="play/play.css"><body>
<main><div class="et-{0}">What stands here without JavaScript.</div></main>
<script type=module>import "./play/{0}.js"</script>"""
SITE = "http://play.test/"


def opened(browser, width: int, html=PAGE.format("play"), missing="", touch=False):
    "A page in a window of that width, without the file `missing`."
    page = browser.new_page(
        viewport=dict(width=width, height=900),
        has_touch=touch,
        is_mobile=touch and width < 768,
        device_scale_factor=2,
    )
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))

    def answer(route):
        file = ROOT / "nbs" / route.request.url.removeprefix(SITE)
        if file == ROOT / "nbs":
            return route.fulfill(body=html, content_type="text/html")
        if file.name == missing or not file.is_file():
            return route.fulfill(status=404)
        return route.fulfill(path=file)

    page.route(SITE + "**", answer)
    page.goto(SITE)
    return page


def is_well(page):
    "It fits into a window and onto a phone, and no script has failed."
    for width in (1280, 390):
        page.set_viewport_size(dict(width=width, height=900))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.faults == []
    page.close()


def said(page, text: str):
    page.wait_for_function(
        "text => document.querySelector('.play-status')?.textContent.includes(text)",
        arg=text,
        timeout=120_000,
    )
    return page.inner_text(".play-status")


REST = """<!doctype html><link rel=stylesheet href="styles.css">
<body class=quarto-dark><div id=quarto-search><button></button></div>
<main id=quarto-document-content><div class=callout-header data-bs-toggle=collapse
data-bs-target=".c" aria-label="Toggle callout">Answer</div><div class="c collapse"></div>
<div class=drawn><img src="images/walk.png" alt=""></div></main>
<div class=glightbox-container></div>
<script type=module src="play/page.js"></script>"""


def test_a_page_is_for_the_keyboard_too_and_its_drawings_are_dark_by_night(browser):
    page = opened(browser, 1280, html=REST)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.get_by_role("button", name="Search").wait_for()
    fold = page.get_by_role("button", name="Answer")
    assert fold.get_attribute("aria-expanded") == "false"
    page.evaluate("document.querySelector('.c').classList.add('show')")
    page.wait_for_selector(".callout-header[aria-expanded=true]")
    # a picture that is opened comes after the page
    page.evaluate(
        "document.querySelector('.glightbox-container').innerHTML ="
        " '<img src=\"images/walk.png\" alt>'"
    )
    large = page.wait_for_selector(".glightbox-container img.drawn", state="attached")
    assert "invert" in large.evaluate("e => getComputedStyle(e).filter")


def test_patches_are_hidden_by_hand(browser):
    page = opened(browser, 390)
    assert "128 of 256 patches hidden" in said(page, "t = 6:")
    page.get_by_text("Show all").click()
    said(page, "0 of 256 patches hidden")
    canvas = page.locator(".play-picture > canvas")
    box = canvas.bounding_box()
    row = box["y"] + box["height"] / 32
    page.mouse.move(box["x"] + 5, row)
    page.mouse.down()
    said(page, "1 of 256 patches hidden")
    middle = box["x"] + box["width"] / 2 - 5
    page.mouse.move(middle, row)  # one event for seven patches
    page.mouse.up()
    said(page, "8 of 256 patches hidden")
    # a touch that scrolls the page takes back what it did
    page.mouse.move(box["x"] + 5, row + box["height"] / 16)
    page.mouse.down()
    said(page, "9 of 256 patches hidden")
    canvas.dispatch_event("pointercancel")
    said(page, "8 of 256 patches hidden")
    # by the keyboard, one patch after the other; and back
    for key, count in (("ArrowRight", 8), (" ", 7), (" ", 8)):
        canvas.press(key)
        said(page, f"{count} of 256 patches hidden")
    page.get_by_text("Hide half").click()
    said(page, "128 of 256 patches hidden")
    is_well(page)


def listed(page, what: str) -> np.ndarray:
    "The numbers that a curve says at t = 0, 1, …"
    said = page.locator(f"canvas[aria-label^={what}]").get_attribute("aria-label")
    return np.array(said.split(": ")[1].split(", "), float)


def test_a_picture_is_completed_in_a_browser(browser, tmp_path):
    page = opened(browser, 1280)
    said(page, "t = 6:")
    # the curves have as many dots as the screen
    curve = page.locator("canvas[aria-label^=Energy]")
    assert curve.evaluate("c => c.width === 2 * c.clientWidth && c.clientWidth > 0")
    # time, beyond the depth of training
    page.locator("input[type=range]").first.fill("12")
    assert "beyond T = 6" in said(page, "t = 12:")
    before = listed(page, "Energy")
    assert len(before) == 13 and (np.diff(before) < 0).all()
    # one's own picture has another descent; and a file that is none
    picture = pytest.importorskip("PIL.Image").fromarray(photographs(90)[3][:, 10:])
    picture.save(tmp_path / "own.png")
    (tmp_path / "none.png").write_bytes(b"no picture")
    chooser = page.locator("input[type=file]")
    chooser.set_input_files(tmp_path / "own.png")
    said(page, "t = 6: E")
    assert listed(page, "Energy")[0] != before[0]
    chooser.set_input_files(tmp_path / "none.png")
    said(page, "none.png is not a picture")
    is_well(page)


@pytest.mark.parametrize(
    "kind, missing",
    [
        ("play", "photographs.safetensors"),
        ("walk", "digits-graph.safetensors"),
        ("puzzle", "sudoku-4.safetensors"),
    ],
)
def test_weights_that_cannot_be_had_are_said(browser, kind, missing):
    page = opened(browser, 1280, PAGE.format(kind), missing)
    assert "could not be loaded (404)" in said(page, "could not be loaded")
    page.close()


def test_digits_are_completed_in_a_browser(browser):
    page = opened(browser, 390)
    said(page, "t = 6:")
    for label, says, count in (
        ("digits, 8 × 8", "8 of 16 patches hidden", 10),
        ("photographs, 128 × 128", "128 of 256 patches hidden", 6),
        ("digits, 8 × 8", "8 of 16 patches hidden", 10),
    ):
        page.get_by_label("pictures").select_option(label=label)
        said(page, says)
        assert page.locator(".play-pictures button").count() == count
    page.get_by_label("a handwritten 7").click()
    said(page, "t = 8:")
    is_well(page)


def test_a_graph_is_walked_in_a_browser(browser, detector):
    page = opened(browser, 1280, PAGE.format("walk"), touch=True)
    assert "Node 1279, an eight: p = 0.830 at t = 2." in said(page, "Node 1279")
    graph = load_graph("digits-knn")
    edges = detector.prepare(graph)
    wanted = descend_graph(detector, scaled(graph), edges, steps=6)
    near = page.locator(".walk-map > button")

    def stands_at(node):
        assert f"Node {node}," in said(page, f"Node {node},")
        assert relative(listed(page, "Probability"), wanted.p[:, node]) < 1e-3
        E = sum(wanted.shares.values())[:, node]
        assert relative(listed(page, "Energy"), E) < 1e-3
        edges = detector.prepare(graph)[0].edge_list()
        into = np.flatnonzero(edges[1] == node)
        names = near.evaluate_all("all => all.map(e => e.ariaLabel)")
        for name, edge in zip(names, into, strict=True):
            said_of = r"Node (\d+), (?:an|no) eight: p = ([\d.]+), attention (\d+) %"
            here, p, paid = re.fullmatch(said_of, name).groups()
            assert int(here) == edges[0][edge]
            assert abs(float(p) - wanted.p[2, int(here)]) < 0.006
            assert abs(float(paid) / 100 - wanted.weights[2, edge]) < 0.006

    stands_at(1279)
    # a bar is as high as p, and eights have a frame
    looks = near.evaluate_all(
        """all => all.map(e => [e.ariaLabel, parseFloat(getComputedStyle(e).borderWidth),
          e.querySelector("i").offsetHeight / e.querySelector(".walk-bar").offsetHeight])"""
    )
    for name, frame, height in looks:
        assert abs(height - float(re.search(r"p = ([\d.]+)", name)[1])) < 0.04
        assert (frame > 1) == ("an eight" in name)
    # by touch, by click, by the keyboard, and back
    goal = lambda i: int(re.search(r"\d+", near.nth(i).get_attribute("title"))[0])
    walk = [1279]
    for step in ("tap", "click", "keyboard"):
        walk.append(goal(2))
        if step == "keyboard":
            near.nth(2).focus()
            page.keyboard.press("Enter")
        else:
            getattr(near.nth(2), step)()
        stands_at(walk[-1])
    # the keyboard goes on at the node that it came from
    assert f"Node {walk[-2]}," in page.evaluate("document.activeElement.ariaLabel")
    for _ in walk[1:]:
        page.get_by_text("Back").click()
    stands_at(1279)
    assert page.get_by_text("Back").is_disabled()
    # time, and attention
    page.get_by_label("time t").fill("5")
    assert "beyond the 2 steps" in said(page, "t = 5")
    page.get_by_label("time t").fill("2")
    page.get_by_label("attention", exact=True).uncheck()
    assert "p = 0.369" in said(page, "attention 0.0")
    assert "attention 0 %" in near.first.get_attribute("title")
    page.get_by_text("Another eight").click()
    page.wait_for_function("!document.body.innerText.includes('Node 1279')")
    assert ", an eight" in page.inner_text(".play-status")
    is_well(page)


def test_what_is_touched_in_a_walk_is_large_enough(browser):
    "The most crowded node, on a phone: 44 pixels each, and as far apart."
    page = opened(browser, 390, PAGE.format("walk"), touch=True)
    said(page, "Node 1279")
    degrees = np.delete(load_graph("digits-knn").degrees, 1279)  # where it may jump
    chance = (np.argmax(degrees) + 0.5) / len(degrees)
    page.evaluate(f"Math.random = () => {chance}")
    page.get_by_text("Any node").click()
    said(page, f"{degrees.max()} neighbors")
    boxes = page.locator(".walk-map > button").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().toJSON())"
    )
    assert all(min(box["width"], box["height"]) >= 44 for box in boxes)
    middles = np.array(
        [(b["x"] + b["width"] / 2, b["y"] + b["height"] / 2) for b in boxes]
    )
    apart = np.linalg.norm(middles[:, None] - middles, axis=-1)
    assert apart[~np.eye(len(apart), dtype=bool)].min() >= 44
    for control in page.locator(".play-controls :is(button, input)").all():
        assert control.bounding_box()["height"] >= 44
    page.close()


# --- a board

BOARDS = {
    "sudoku-4": ("1... ..3. .4.. ...2", {}, 64),
    "6 × 6, units and channels": ("1" + 34 * "." + "2", dict(units=True, channels=True), 9),
    "6 × 6": (36 * ".", {}, 5),
    "4 × 4, channels": ("12.." + 12 * ".", dict(channels=True), 5),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, key_term", [*((name, True) for name in BOARDS), ("sudoku-4", False)]
)
def test_a_board_descends_as_in_the_library(name, key_term, tmp_path):
    "Energies, updates and beliefs, from the same random start."
    text, options, steps = BOARDS[name]
    board = as_boards(text)
    if name == "sudoku-4":
        model = puzzle_model(name)
    else:
        sizes = dict(dim=10, num_heads=3, head_dim=5, num_memories=14, steps=3)
        config = PuzzleConfig(len(board), **sizes, **options)
        model = shaken(PuzzleTransformer(config, rngs=nnx.Rngs(0)))
    path = tmp_path / "board.safetensors"
    save_puzzle(path, model)
    if not key_term:
        deaf = Broken(model.config, broken=["key"], rngs=nnx.Rngs(0))
        nnx.update(deaf, nnx.state(model))
        model = deaf
    start = model.encode(jnp.asarray(board), jax.random.key(5))
    _, (energies, states) = model.descend(start, steps, states=True)
    given = dict(board=board.ravel().tolist(), start=np.asarray(start).ravel().tolist())
    given |= dict(steps=steps, keyTerm=key_term)
    (tmp_path / "input.json").write_text(json.dumps(given))
    found = in_node("board.mjs", path, tmp_path / "input.json")
    attention, memory, update, beliefs = zip(*found)
    E = np.add(attention, memory)
    assert relative(E, energies.total) < 1e-3
    wanted = jax.nn.softmax(model.logits(states), -1)
    assert np.abs(np.reshape(beliefs, wanted.shape) - wanted).max() < 1e-3
    if key_term:
        assert relative(attention, energies["attention"]) < 1e-3
        force = model.block.update(model.block.norm(start))
        assert relative(update[0], force) < 1e-4


def test_puzzles_of_the_page_have_one_solution():
    "Which its search finds, and the model too, most often."
    boards, found, every, none = in_node("puzzles.mjs")
    assert every == 288 and none == 0
    for board, answers in zip(boards, found, strict=True):
        n = round(len(board) ** 0.5)
        (answer,) = np.reshape(answers, (-1, n, n))
        board = as_boards(np.reshape(board, (n, n)))
        assert is_solved(answer) and ((board == 0) | (board == answer)).all()
    counts = [np.count_nonzero(board) for board in boards]
    assert (
        counts[:10] == [7] * 10 and max(counts[10:20]) <= 6 and counts[20:] == [14] * 2
    )


def digits_of(page) -> str:
    "What the cells say: given digits, and a dot where none is given."
    names = page.locator("[role=gridcell]").evaluate_all(
        "all => all.map(e => e.ariaLabel)"
    )
    return "".join(
        re.search(r": (\d|empty)", name)[1].replace("empty", ".") for name in names
    )


def test_a_board_is_filled_in_a_browser(browser):
    page = opened(browser, 390, PAGE.format("puzzle"), touch=True)
    said(page, "t = 32:")
    for control in page.locator(".et-puzzle :is(button, .puzzle-switch)").all():
        box = control.bounding_box()
        assert min(box["width"], box["height"]) >= 44
    for label, fewest, most in (("New puzzle", 7, 7), ("Harder", 4, 6)):
        page.get_by_text(label).click()
        given = 16 - digits_of(page).count(".")
        assert fewest <= given <= most
        said(page, f"{given} givens")
    board, curve = (
        page.locator(f".et-puzzle {part}").bounding_box()
        for part in (".puzzle-board", "canvas")
    )
    assert curve["y"] + curve["height"] - board["y"] < 664  # one screen of a phone
    # by the keyboard and by the pad
    page.get_by_text("Empty board").click()
    assert digits_of(page) == 16 * "."
    cells = page.locator("[role=gridcell]")
    cells.nth(0).focus()
    for key in ("1", "ArrowRight", "ArrowRight", "3", "ArrowDown", "ArrowDown", "4"):
        page.keyboard.press(key)
    cells.nth(15).tap()
    page.get_by_role("button", name="2", exact=True).tap()
    board = "1.3. .... ..4. ...2"
    assert digits_of(page) == board.replace(" ", "")
    said(page, "t = 32:")
    E = listed(page, "Energy")
    assert (np.diff(E[:33]) < 1e-2).all() and E[32] < E[0] - 20
    # a rule is broken, and mended
    cells.nth(3).tap()
    page.keyboard.press("1")
    assert "row 1 has 1 twice. Change one" in said(page, "No solution")
    wrong = (
        "all => all.map(e => e.matches('.puzzle-wrong') && / in con/.test(e.ariaLabel))"
    )
    assert np.array(cells.evaluate_all(wrong))[[0, 3]].all()
    page.keyboard.press("Backspace")
    said(page, "t = 32:")
    assert digits_of(page) == board.replace(" ", "")
    if "Solved" in page.inner_text(".play-status"):
        assert not any(cells.evaluate_all(wrong))
    # time, and what a certain cell looks like
    page.get_by_label("step t").fill("0")
    said(page, "t = 0:")
    assert "beyond" not in page.inner_text(".play-status")
    page.get_by_label("step t").fill("64")
    said(page, "t = 64:")
    look = "all => all.map(e => Math.max(...[...e.children].map(d => d.style.opacity)))"
    assert min(cells.evaluate_all(look)) > 0.3
    # no digit fits into row 1, column 3
    page.get_by_text("Empty board").click()
    for cell, digit in ((0, 1), (1, 2), (10, 3), (14, 4)):
        cells.nth(cell).tap()
        page.keyboard.press(str(digit))
    said(page, "This board has no solution")
    # without the key term, from the same start
    said(page, "t = 32:")
    before = listed(page, "Energy")
    page.get_by_label("without the key term").check()
    said(page, "t = 32:")
    assert "E need not fall" in page.inner_text(".play-status")
    after = listed(page, "Energy")
    assert after[0] == before[0] and after[32] > before[32]
    is_well(page)
