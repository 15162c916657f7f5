"""The style of the site: what is read can be read by day and by night, and what Quarto's
theme hides or breaks is seen, in a browser.
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


# --- in a browser ---

# A page as Quarto 1.7 renders it, in small, with the rules of its theme that have hidden
# or broken something: bar, sidebar, a section, code, a table, and a drawing opened large.
THEMED = """<!doctype html><style>
html { scroll-behavior: auto } body { margin: 0; padding-top: 107px }
.fixed-top { position: fixed; top: 0; left: 0; right: 0; height: BARpx; z-index: 1030 }
#quarto-sidebar { position: fixed; overflow: auto }
#quarto-sidebar .sidebar-menu-container { white-space: nowrap; min-width: 225px }
.sidebar-item-container { display: flex; justify-content: space-between }
section:target::before { content: ""; display: block; height: BARpx; margin: -BARpx 0 0 }
h2 { margin: 2.2rem 0 1rem } pre { white-space: pre-wrap } table { width: 100% }
pre > code.sourceCode > span, code span, code span.ex { color: INK }
td { white-space: nowrap }
PALETTES</style><style>STYLE</style><body class="quarto-SCHEME">
<header id="quarto-header" class="fixed-top"></header>
<nav id="quarto-sidebar" class="sidebar floating overflow-auto">
<div class="sidebar-menu-container"><ul><li class="sidebar-item">
<div class="sidebar-item-container"><a class="sidebar-item-text sidebar-link">
<span class="menu-text">A chapter with a title that is as long as titles may be, or more
</span></a></div></li></ul></div></nav><main id="quarto-document-content">
<div class="sourceCode"><pre class="sourceCode"><code class="sourceCode python"><span
id="cb1-1"><span class="ex">make</span> f(x)<span>: ...</span></span></code></pre></div>
<table class="table"><tr>CELLS</tr></table>
<figure class="drawn"><img src="images/walk.png"></figure><p style="height: 2000px"></p>
<section id="a"><h2 class="anchored">A</h2><p style="height: 2000px"></p></section></main>
<script type="module" src="play/page.js"></script>"""
FITS = "document.documentElement.scrollWidth <= innerWidth"
BELOW = """(() => { location.hash = "a";
  const { top } = document.querySelector("h2").getBoundingClientRect();
  const { bottom } = document.querySelector("#quarto-header").getBoundingClientRect();
  return bottom <= top && top < bottom + 40; })()"""
NARROW = "document.querySelector('#quarto-sidebar').offsetWidth <= innerWidth"
OWN = """[...document.querySelectorAll("pre span")].every((span) =>
  !["rgb(84, 84, 84)", "rgb(248, 248, 242)"].includes(getComputedStyle(span).color))"""
LARGE = """new Promise((done) => {
  document.body.insertAdjacentHTML("beforeend",
    `<div class="glightbox-container"><img src="images/walk.png"></div>`);
  const large = document.querySelector(".glightbox-container img");
  large.onload = () => done(getComputedStyle(large).filter.includes("invert")); })"""
REACHED = """(() => { const link = document.querySelector(".skip-link");
  link.focus();
  return link.getBoundingClientRect().top >= 0; })()"""
BROKEN = {
    "html { scroll-padding-top: 5.5rem": (1280, "light", BELOW),
    "  html { scroll-padding-top: 8rem": (820, "light", BELOW),
    "section:target::before": (1280, "light", BELOW),
    "main pre code span { color: inherit": (1280, "light", OWN),
    "main pre code span:is(.fu": (1280, "dark print", OWN),
    "main pre > code.sourceCode > span {": (1280, "dark print", OWN),
    "#quarto-sidebar": (390, "light", NARROW),
    "body.quarto-dark .glightbox-container": (1280, "dark", LARGE),
    ".skip-link:focus": (1280, "light", REACHED),
    "  main table { display: block": (820, "light", FITS),
}


def palettes():
    "The colors of both themes, as Quarto hands them on."
    rules = []
    for mode, selector in (("light", ":root"), ("dark", "body.quarto-dark")):
        named = " ".join(f"--{k}: {v};" for k, v in COLORS[mode].items())
        rules.append(f"{selector} {{{named}}}")
    return "\n".join(rules)


def is_well(browser, style, width, scheme, well):
    "What the page in small with this style says of itself."
    html = THEMED.replace("STYLE", style).replace("SCHEME", scheme.split()[0])
    html = html.replace("PALETTES", palettes())
    html = html.replace("BAR", "67" if width > 991 else "107")
    html = html.replace("INK", "#f8f8f2" if "dark" in scheme else "#545454")
    html = html.replace("CELLS", "<td>a_long_name</td>" * 20)

    def answer(route):
        path = NBS / route.request.url.removeprefix("http://site.test/")
        if path.is_file():
            route.fulfill(path=path)
        else:
            route.fulfill(body=html, content_type="text/html")

    page = browser.new_page(viewport={"width": width, "height": 900})
    page.route("http://site.test/**", answer)
    page.goto("http://site.test/")
    if "print" in scheme:
        page.emulate_media(media="print")
    found = page.evaluate(well)
    page.close()
    return found


@pytest.mark.parametrize("rule", BROKEN)
def test_the_style_mends_what_the_theme_breaks(browser, rule):
    "With its style the page is well; without one of its rules it is not."
    style = (NBS / "styles.css").read_text()
    less = re.sub(rf"^{re.escape(rule)}.*", "", style, flags=re.M)
    assert is_well(browser, style, *BROKEN[rule])
    assert not is_well(browser, less, *BROKEN[rule])
