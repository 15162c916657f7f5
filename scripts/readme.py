"""README.md from nbs/index.ipynb: the same text, with links that hold from the top of
the repository; pages that only the site has are named, not linked. And two lists from
the sidebar: the reading map of nbs/index.ipynb and the chapters of nbs/engine_room.ipynb.
"""

import json
import re

import yaml
from modules import NBS, ROOT, dumped, moved

HEADER = "<!-- Made by `make readme`: edit nbs/index.ipynb. -->\n\n"


def source(cell):
    return "".join(cell["source"]).strip("\n")


def notebook(name):
    return json.loads((NBS / name).read_text(encoding="utf-8"))


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
    shown = not re.search(r"^#\|\s*echo:\s*false", text, re.M)
    parts = [f"```python\n{text}\n```"] * shown
    for out in cell["outputs"]:
        data = out.get("data", {})
        if "text/markdown" in data:
            parts.append(relink("".join(data["text/markdown"]).strip("\n")))
        elif shown := "".join(out.get("text", "")).strip("\n"):
            parts.append(f"```\n{shown}\n```")
    return "\n\n".join(parts)


def parts():
    "The first chapter of each part of the book, in a line."
    found = ((own or next(iter(groups[""]), ""), s) for s, own, groups in sidebar())
    return ", ".join(f"[{section}](nbs/{name})" for name, section in found if name)


def readme(cells):
    "README.md, from the cells of nbs/index.ipynb."
    texts = "\n\n".join(filter(None, map(markdown, cells)))
    listed = r"(?s)(## Reading map\n\n).*?(?=\n\n## )"
    return HEADER + re.sub(listed, rf"\1{parts()}", texts) + "\n"


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
    word = lambda name: re.sub(r"^\d+b?_((image|graph|hopfield)_)?", "", name)
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
    text = (
        source(notebook("engine_room.ipynb")["cells"][1]).partition("\n## ")[0].rstrip()
    )
    (groups,) = (groups for _, own, groups in sidebar() if own == "engine_room.ipynb")
    for group, names in groups.items():
        text += f"\n\n## {group or 'Chapters'}\n" * bool(names)
        for name in names:
            top = source(notebook(name)["cells"][0])
            title, said = re.match(r"# (.+)\n+> (.+)", top).groups()
            text += (
                f"\n- [{title}]({name}): {moved(said, name.rpartition('/')[0], str)}"
            )
    return text


def made():
    "{file: its text} of all that this script writes."
    index, room = (notebook(f"{name}.ipynb") for name in ("index", "engine_room"))
    for cell in index["cells"]:
        if source(cell).startswith("## Reading map"):
            cell["source"] = reading_map().splitlines(keepends=True)
    room["cells"][1]["source"] = engine_room().splitlines(keepends=True)
    return {
        ROOT / "README.md": readme(index["cells"]),
        NBS / "index.ipynb": dumped(index),
        NBS / "engine_room.ipynb": dumped(room),
    }


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
    print("README.md and the lists of the front page and the engine room are written")
