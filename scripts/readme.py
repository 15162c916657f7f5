"""README.md from nbs/index.ipynb: the same text, with links that hold from the top of
the repository; pages that only the site has are named, not linked. And the list of
nbs/engine_room.ipynb, from the sidebar and the first lines of its chapters.
"""

import json
import re

import yaml
from modules import ROOT, moved

HEADER = (
    "<!-- Made from nbs/index.ipynb by scripts/readme.py (`make readme`): edit the"
    " notebook. -->\n\n"
)


def source(cell):
    return "".join(cell["source"]).strip("\n")


def relink(text):
    """Targets relative to nbs/, rewritten to be relative to its parent; pages of the
    site alone are named. Code is left alone.
    """
    pieces = re.split(r"(^```.*?^```|`[^`\n]*`)", text, flags=re.M | re.S)
    for i in range(0, len(pieces), 2):
        # the button of the site's reference leads to the examples here
        pieces[i] = pieces[i].replace("[Use it](api.qmd)", "[Use it](#in-code)")
        pieces[i] = re.sub(r"\[([^]]*)\]\([^)]*\.qmd[^)]*\)", r"\1", pieces[i])
        pieces[i] = re.sub(r"^:::.*\n?", "", pieces[i], flags=re.M)  # Quarto's divs,
        # its attributes
        pieces[i] = re.sub(
            r"(\)|^#+ .*?) ?\{[#.\w][^}\n]*\}", r"\1", pieces[i], flags=re.M
        )
    return moved("".join(pieces), "nbs", str)


def markdown(cell):
    "The Markdown of one cell, without what only the site needs."
    text = source(cell)
    if cell["cell_type"] == "markdown":
        return relink(re.sub(r"\A---\n.*?\n---\n?", "", text, flags=re.S))
    if cell["cell_type"] != "code" or re.search(
        # the last one: what the site alone shows
        r"^#\|\s*(hide|include:\s*false|classes:\s*site)\s*$",
        text,
        flags=re.M,
    ):
        return ""
    parts = (
        []
        if re.search(r"^#\|\s*echo:\s*false", text, flags=re.M)
        else [
            "```python\n"
            + re.sub(r"^#\|.*\n?", "", text, flags=re.M).strip("\n")
            + "\n```"
        ]
    )
    for out in cell["outputs"]:
        data = out.get("data", {})
        if any(kind.startswith("image/") for kind in data):
            raise ValueError(
                "nbs/index.ipynb: a cell's output is an image, which README.md cannot"
                " hold; save it under nbs/images/ and show it with ![what it"
                " shows](images/name.png)"
            )
        if "text/markdown" in data:
            parts.append(relink("".join(data["text/markdown"]).strip("\n")))
            continue
        shown = "".join(out.get("text", data.get("text/plain", ""))).strip("\n")
        if shown:
            parts.append("```\n" + shown + "\n```")
    return "\n\n".join(parts)


def readme(root=ROOT):
    cells = json.loads((root / "nbs/index.ipynb").read_text(encoding="utf-8"))["cells"]
    return (
        HEADER
        + "\n\n".join(filter(None, (markdown(c).strip("\n") for c in cells)))
        + "\n"
    )


def engine_room(root=ROOT):
    "The notebook that lists the chapters of the engine room, as text."
    path = root / "nbs/engine_room.ipynb"
    config = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))
    groups = next(
        entry["contents"]
        for entry in config["website"]["sidebar"]["contents"]
        if isinstance(entry, dict) and entry.get("href") == path.name
    )
    parts = []
    for group in groups:
        lines = [f"## {group['section']}", ""]
        for name in group["contents"]:
            text = (root / "nbs" / name).read_text(encoding="utf-8")
            title, said = re.match(
                r"# (.+)\n+> (.+)", source(json.loads(text)["cells"][0])
            ).groups()
            lines.append(f"- [{title}]({name}): {said}")
        parts.append("\n".join(lines))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    above = source(notebook["cells"][1]).partition("\n## ")[0].rstrip()
    text = "\n\n".join([above, *parts])
    notebook["cells"][1]["source"] = text.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    (ROOT / "nbs/engine_room.ipynb").write_text(engine_room(), encoding="utf-8")
    print("README.md and nbs/engine_room.ipynb written")
