"""README.md from nbs/index.ipynb: the same text, with links that hold from the top of
the repository; pages that only the site has are named, not linked. And two lists from
the sidebar: the reading map of nbs/index.ipynb and the chapters of nbs/engine_room.ipynb.
"""

import json
import re

import yaml
from modules import NBS, ROOT, moved, notebook_cells

HEADER = (
    "<!-- Made from nbs/index.ipynb by scripts/readme.py (`make readme`): edit the"
    " notebook. -->\n\n"
)


def source(cell):
    return "".join(cell["source"]).strip("\n")


def relink(text):
    "Markdown of nbs/ as it holds at the top of the repository."
    pieces = re.split(r"(^```.*?^```|`[^`\n]*`)", text, flags=re.M | re.S)
    for i in range(0, len(pieces), 2):
        # the button of the site's reference leads to the examples here
        piece = pieces[i].replace("[Use it](api.qmd)", "[Use it](#in-code)")
        piece = re.sub(r"\[([^]]*)\]\([^)]*\.qmd[^)]*\)", r"\1", piece)
        piece = re.sub(r"^:::.*\n?", "", piece, flags=re.M)  # Quarto's divs and marks
        pieces[i] = re.sub(r"(?m)(\)|^#+ .*?) ?\{[#.\w][^}\n]*\}", r"\1", piece)
    return moved("".join(pieces), "nbs", str)


def markdown(cell):
    "The Markdown of one cell, without what only the site needs."
    text = source(cell)
    if cell["cell_type"] == "markdown":
        return relink(text)
    if re.search(r"^#\|\s*hide\s*$", text, re.M):
        return ""
    parts = []
    if not re.search(r"^#\|\s*echo:\s*false", text, re.M):
        parts.append(f"```python\n{text}\n```")
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
        elif shown := "".join(out.get("text", "")).strip("\n"):
            parts.append(f"```\n{shown}\n```")
    return "\n\n".join(parts)


def parts():
    "The first chapter of each part of the book, in a line."
    found = ((own or next(iter(groups[""]), ""), s) for s, own, groups in sidebar())
    return " · ".join(f"[{section}](nbs/{name})" for name, section in found if name)


def readme(cells):
    "README.md, from the cells of nbs/index.ipynb."
    texts = "\n\n".join(filter(None, map(markdown, cells)))
    texts = re.sub(
        r"(## Reading map\n\n).*?(?=\n\n## )", rf"\1{parts()}", texts, flags=re.S
    )
    return f"{HEADER}{texts}\n"


def sidebar():
    "(section, its own page or None, notebooks in it, section by section within)."
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    for entry in config["website"]["sidebar"]["contents"]:
        if isinstance(entry, dict):
            groups, loose = {}, []
            for part in entry["contents"]:
                if isinstance(part, dict):
                    groups[part["section"]] = part["contents"]
                elif part.endswith(".ipynb"):
                    loose.append(part)
            yield entry["section"], entry.get("href"), {"": loose} | groups


def reading_map():
    "A line for each part of the book; the engine room has a page of its own."
    lines = []
    word = lambda name: re.sub(r"^\d+_((image|graph|hopfield)_)?", "", name)
    for section, own, groups in sidebar():
        names = [n.removesuffix(".ipynb") for n in groups[""]]
        links = [f"[{word(n).replace('_', ' ')}]({n}.ipynb)" for n in names]
        if own:
            lines.append(f"- **[{section}]({own})**")
        elif links:
            lines.append(f"- **{section}**: {', '.join(links)}")
    return "## Reading map\n\n" + "\n".join(lines)


def engine_room():
    "The chapters of the engine room, each with the line that says what it is for."
    above, parts = (
        source(notebook_cells("engine_room.ipynb")[1]).partition("\n## ")[0],
        [],
    )
    (groups,) = (groups for _, own, groups in sidebar() if own == "engine_room.ipynb")
    for group, names in groups.items():
        lines = []
        for name in names:
            top = source(notebook_cells(name)[0])
            title, said = re.match(r"# (.+)\n+> (.+)", top).groups()
            folder = name.rpartition("/")[0]
            lines.append(f"- [{title}]({name}): {moved(said, folder, str)}")
        if lines:
            parts.append(f"## {group or 'Chapters'}\n\n" + "\n".join(lines))
    return "\n\n".join([above.rstrip(), *parts])


def made():
    "{file: its text} of all that this script writes."
    index, room = (
        json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))
        for name in ("index", "engine_room")
    )
    for cell in index["cells"]:
        if source(cell).startswith("## Reading map"):
            cell["source"] = reading_map().splitlines(keepends=True)
    room["cells"][1]["source"] = engine_room().splitlines(keepends=True)
    dump = lambda nb: json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True)
    return {
        ROOT / "README.md": readme(index["cells"]),
        NBS / "index.ipynb": dump(index) + "\n",
        NBS / "engine_room.ipynb": dump(room) + "\n",
    }


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
    print("README.md and the lists of index.ipynb and engine_room.ipynb written")
