"""The reference: every public name with its signature as it is written, what it is,
and where it is derived; a page for each room of the library, and one that lists all.
"""

import ast
import json
import re

from modules import DEFINED, NBS, ROOT, first_line, linked, modules, on_site

# Each room, what its page is called, and what it is for. A module belongs to the room
# of its name or of its folder.
ROOMS = {
    "block": ("The block", "A norm, terms that are energies, and their sum."),
    "dynamics": ("Dynamics", "The descent: solvers, where it settles, and noise."),
    "hopfield": ("Hopfield networks", "Where the block comes from."),
    "training": ("Training", "One loop for every task, and what happens beside it."),
    "vision": ("Pictures", "Data, models and training for pictures."),
    "graph": ("Graphs", "Attention along edges, odd nodes and whole graphs."),
    "puzzle": ("Puzzles", "Boards, a model that fills them in, and its descent."),
    "testing": ("Testing", "Is this gradient right, and does this descend?"),
    "explore": ("Explorer", "A descent to play with, in a notebook."),
}
BY_MODULE = dict.fromkeys("norm energy attention memory block".split(), "block")
BY_MODULE |= {"commands": "training"}
BY_MODULE |= dict.fromkeys("dynamics solvers equilibria".split(), "dynamics")

# Decorators that change nothing for whoever calls.
IDLE = re.compile(r"^ *@(?!dataclass|staticmethod|classmethod|property).*\n", re.M)


def room_of(module):
    own = module.name.split(".")[1]
    return BY_MODULE.get(own, own)


def escaped(text):
    "Text for a cell of a table."
    marks = "|" if re.search("[`$]", text) else r"|<>\[\]"
    return re.sub(f"([{marks}])", r"\\\1", text)


def what(node, comment=""):
    return escaped(first_line(node) if isinstance(node, DEFINED) else comment)


def called(method):
    "How a method is called: its name and the names of its arguments."
    a = method.args
    if any(ast.unparse(d) == "property" for d in method.decorator_list):
        return method.name
    names = [p.arg for p in (*a.posonlyargs, *a.args)][1:]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    names += [p.arg for p in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    return f"{method.name}({', '.join(names)})"


def listing(left, right, rows):
    "A table whose rows stand below each other on a phone."
    rows = [f"| {a} | {b} |" for a, b in [(left, right), ("---", "---"), *rows]]
    return "\n".join(["::: {.api-list}", *rows, ":::"])


def anchor_of(module, name):
    "On the page of its room; with a number where only its capitals are its own."
    return name + "-1" * (module.anchor(name) == f"{name.lower()}-1")


def entry(module, name, offered):
    """A name on the page of its room: where it is, how it is called, what it is. Its
    heading is one of a section, since these are what the search finds by their names.
    """
    node, comment = module.public[name]
    chapter, anchor = module.place([name])
    text = (NBS / chapter).read_text(encoding="utf-8")
    title = re.match(r"# (.+)", "".join(json.loads(text)["cells"][0]["source"]))[1]
    home = "et_nbdev" if name in offered else module.name
    parts = [
        f"## {name} {{#{anchor_of(module, name)}}}",
        f"`from {home} import {name}` · [{title.strip()}]({on_site(chapter)}{'#' * bool(anchor)}"
        f"{anchor}) · [source]({module.source(name)})",
    ]
    if not isinstance(node, DEFINED):
        return "\n\n".join([*parts, escaped(comment)])
    said = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
    code = IDLE.sub("", module.signature(name))
    parts += [f"```python\n{code}\n```", linked(said, chapter, "api")]
    methods = [
        (f"`{called(part)}`", what(part))
        for part in (node.body if isinstance(node, ast.ClassDef) else ())
        if isinstance(part, ast.FunctionDef) and part.name[0] != "_" and what(part)
    ]
    if methods:
        parts.append(listing("method", "what it does", methods))
    return "\n\n".join(parts)


def front(title, description):
    # there is no such file in the repository that a reader could be sent to
    said = f'title: "{title}"\ndescription: "{description}"\nrepo-actions: false'
    return f"---\n{said}\ntoc-depth: 2\n---\n"


def offered_names():
    "What `import et_nbdev` offers."
    text = (ROOT / "et_nbdev/__init__.py").read_text(encoding="utf-8")
    return ast.literal_eval(re.search(r"(?s)^__all__ = (\[.*?\])", text, re.M)[1])


def api_pages():
    "{file: text} of the reference."
    offered = offered_names()
    rows, entries = {room: [] for room in ROOMS}, {room: [] for room in ROOMS}
    for module in modules():
        if module.path.name.startswith("_"):
            continue
        for name, defined in module.public.items():
            room = room_of(module)
            link = f"[`{name}`](api_{room}.qmd#{anchor_of(module, name)})"
            rows[room].append((link, what(*defined)))
            entries[room].append(entry(module, name, offered))
    pages = {
        "api.qmd": front("API", "Every public name of et_nbdev, room by room.")
        + f"\n`import et_nbdev` offers {len(offered)} of these names. The page of a room"
        " has signatures, and links to the chapters that derive them.\n"
    }
    for room, (title, purpose) in ROOMS.items():
        table = listing("name", "what it is", rows[room])
        pages["api.qmd"] += f"\n## [{title}](api_{room}.qmd)\n\n{purpose}\n\n{table}\n"
        top = front(f"API: {title[0].lower()}{title[1:]}", purpose)
        pages[f"api_{room}.qmd"] = "\n\n".join([top, *entries[room], ""])
    print(f"api.qmd lists {sum(map(len, rows.values()))} public names")
    return pages
