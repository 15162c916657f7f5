"""The style of the site: what is read can be read by day and by night. In a browser:
test_play.py.
"""

import re
from pathlib import Path

import pytest

from et_nbdev import explore

NBS = Path(__file__).resolve().parent.parent / "nbs"
NAMED = r"^\$([\w-]+): (#[0-9a-f]{6});"
COLORS = {
    mode: dict(re.findall(NAMED, (NBS / f"theme/{mode}.scss").read_text(), re.M))
    for mode in ("light", "dark")
}

# What is written on what, by the names of the colors in nbs/theme.
READ = {
    "page": "text muted link link-hover accent note tip warning caution important",
    "box": "text muted link link-hover chip-text code-keyword code-string code-number"
    " code-function code-operator code-comment",
    "button": "button-text",
    "primary-button": "primary-button-text",
    "bar": "bar-text bar-hover",
}


def luminance(color):
    "Of #rrggbb, as WCAG defines it."
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts))


def contrast(one, other):
    a, b = sorted(map(luminance, (one, other)))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.parametrize("mode", COLORS)
def test_what_is_read_stands_out(mode):
    "By at least 4.5, which is WCAG's level AA."
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#18bc9c", "#ffffff") == pytest.approx(2.4, abs=0.05)
    for ground, texts in READ.items():
        for text in texts.split():
            found = contrast(COLORS[mode][text], COLORS[mode][ground])
            assert found >= 4.5, f"{text} on {ground}"


@pytest.mark.parametrize("mode", COLORS)
def test_the_explorers_key_stands_out(mode):
    "Its signs are letters in the colors of curves, mixed with those of the page."
    text, page = COLORS[mode]["text"], COLORS[mode]["page"]
    key = explore._key(["E", "attention", "memory", "a", "b"])
    for color, share in re.findall(r"srgb, (#\w+) (\d+)%", key):
        mix = lambda i: int(share) * int(color[i : i + 2], 16) / 100
        rest = lambda i: (100 - int(share)) * int(text[i : i + 2], 16) / 100
        mixed = "#" + "".join(f"{round(mix(i) + rest(i)):02x}" for i in (1, 3, 5))
        assert contrast(mixed, page) >= 4.5, color


def test_every_color_is_named_in_both_themes_and_handed_on():
    assert COLORS["light"].keys() == COLORS["dark"].keys()
    shared = (NBS / "theme/shared.scss").read_text()
    handed = set(re.findall(r"--([\w-]+): #\{\$\1\};", shared))
    assert handed == COLORS["light"].keys()
    for path in (NBS / "styles.css", *NBS.glob("play/*.css")):
        css = path.read_text()
        own = {"n"}  # of the board: how many columns
        assert set(re.findall(r"var\(--([\w-]+)", css)) - own <= handed, path.name


def test_the_fonts_of_the_formulas_are_there():
    folder = NBS / "katex"
    fonts = re.findall(r"fonts/[\w-]+\.woff2", (folder / "katex.min.css").read_text())
    assert len({*fonts}) == 20 and all((folder / font).is_file() for font in fonts)
