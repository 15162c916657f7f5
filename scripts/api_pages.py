"""The reference: every public name with its signature as it is written, what it is,
and where it is derived; a page for each room of the library, and one that lists all.
"""

import ast
import json
import re

from check_docs import CODE, FENCE, MATH
from modules import ROOT, first_line, meaning, modules

# Each room, what its page is called, and what it is for. A module belongs to the room
# of its name or of its folder.
ROOMS = {
    "block": ("The block", "A norm, terms that are energies, and their sum."),
    "dynamics": ("Dynamics", "The descent: solvers, where it settles, and noise."),
    "hopfield": ("Hopfield networks", "Where the block comes from."),
    "training": ("Training", "One loop for every task, and what happens beside it."),
    "vision": ("Pictures", "Data, models and training for pictures."),
    "graph": ("Graphs", "Attention along edges, odd nodes and whole graphs."),
    "testing": ("Testing", "Is this gradient right, and does this descend?"),
    "explore": ("Explorer", "A descent to play with, in a notebook."),
}
BY_MODULE = dict.fromkeys("norm energy attention memory block".split(), "block")
BY_MODULE |= dict.fromkeys("dynamics solvers equilibria".split(), "dynamics")
DEFINED = ast.FunctionDef, ast.ClassDef


def room_of(module):
    own = module.name.split(".")[1]
    room = BY_MODULE.get(own, own)
    if room not in ROOMS:
        raise SystemExit(f"{module.name} is in none of the rooms of the API pages")
    return room


def escaped(text):
    "Text for a cell of a table."
    if "`" in text or "$" in text:
        return text.replace("|", "\\|")
    return re.sub(r"([|<>\[\]])", r"\\\1", text)


NO_NAMES = re.compile(r"^#+\s.*$|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)", re.M)


def linked(text, notebook, page=None):
    """Names in code, linked to where they are explained. What they mean is up to the
    notebook; `page` is where the text stands, if not there. Headings, links, formulas
    and code of several lines stay as they are.
    """
    kept = [
        m.span() for pattern in (FENCE, MATH, NO_NAMES) for m in pattern.finditer(text)
    ]

    def link(m):
        name = re.fullmatch(r"([A-Za-z_][\w.]*)(\(\))?", m[2])
        place = name and meaning(name[1], notebook)
        if not place or any(start <= m.start() < end for start, end in kept):
            return m[0]
        where, anchor = place
        target = where if where != (page or notebook) else ""
        target += f"#{anchor}" if anchor else ""
        return f"[{m[0]}]({target})" if target else m[0]

    return CODE.sub(link, text)


def title_of(notebook):
    cells = json.loads((ROOT / "nbs" / notebook).read_text(encoding="utf-8"))["cells"]
    return re.match(r"# (.+)", "".join(cells[0]["source"]))[1].strip()


def called(method):
    "How a method is called: its name and the names of its arguments."
    a = method.args
    if any(ast.unparse(d) == "property" for d in method.decorator_list):
        return method.name
    names = [p.arg for p in (*a.posonlyargs, *a.args)][1:]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    names += [p.arg for p in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    return f"{method.name}({', '.join(names)})"


# Decorators that change nothing for whoever calls.
IDLE = re.compile(r"^ *@(?!dataclass|staticmethod|classmethod|property).*\n", re.M)


def methods_of(node):
    "The public methods of a class that say what they do."
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(part, ast.FunctionDef) and part.name[0] != "_":
            if first_line(part):
                yield part


def what(node, comment):
    return first_line(node) if isinstance(node, DEFINED) else comment


def address(page, anchor):
    return f"{page}#{anchor}" if anchor else page


def anchor_of(module, name):
    "On the page of its room; with a number where only its capitals are its own."
    return name + "-1" * (module.anchor(name) == f"{name.lower()}-1")


def listing(rows):
    "A table whose rows stand below each other on a phone."
    return "\n".join(["::: {.api-list}", *rows, ":::"])


def entry(module, name, config, offered):
    """A name on the page of its room: where it is, how it is called, what it is. Its
    heading is one of a section, since these are what the search finds by their names.
    """
    node, comment = module.public[name]
    file = module.path.relative_to(ROOT).as_posix()
    source = f"{config.git_url}/blob/{config.branch}/{file}#L{node.lineno}"
    notebook = module.home(name)
    chapter = address(notebook, module.anchor(name))
    home = "et_nbdev" if name in offered else module.name
    parts = [
        f"## {name} {{#{anchor_of(module, name)}}}",
        f"`from {home} import {name}` · [{title_of(notebook)}]({chapter})"
        f" · [source]({source})",
    ]
    if not isinstance(node, DEFINED):
        return "\n\n".join([*parts, escaped(comment)])
    said = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
    parts += [
        f"```python\n{IDLE.sub('', module.signature(name))}\n```",
        linked(said, notebook, "api"),
    ]
    if rows := [
        f"| `{called(method)}` | {escaped(first_line(method))} |"
        for method in methods_of(node)
    ]:
        parts.append(listing(["| method | what it does |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def front(title, description):
    # there is no such file in the repository that a reader could be sent to
    return (
        f'---\ntitle: "{title}"\ndescription: "{description}"\n'
        "repo-actions: false\ntoc-depth: 2\n---\n"
    )


def offered_names():
    "What `import et_nbdev` offers."
    tree = ast.parse((ROOT / "et_nbdev/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def api_pages(config):
    "{file: text} of the reference."
    offered, rows, pages = offered_names(), {}, {}
    for module in modules():
        if module.path.name.startswith("_") or not module.public:
            continue
        room = room_of(module)
        for name, (node, comment) in module.public.items():
            said = escaped(what(node, comment))
            link = f"[`{name}`](api_{room}.qmd#{anchor_of(module, name)})"
            rows.setdefault(room, []).append(f"| {link} | {said} |")
            text = entry(module, name, config, offered)
            pages.setdefault(f"api_{room}.qmd", []).append(text)
    listed = [
        front("API", "Every public name of et_nbdev, room by room."),
        f"`import et_nbdev` offers {len(offered)} of these names. The page of a room"
        " has signatures, and links to the chapters that derive them.",
    ]
    for room in ROOMS:
        title, purpose = ROOMS[room]
        table = listing(["| name | what it is |", "|---|---|", *rows[room]])
        listed.append(f"## [{title}](api_{room}.qmd)\n\n{purpose}\n\n{table}")
        entries = pages[f"api_{room}.qmd"]
        pages[f"api_{room}.qmd"] = "\n\n".join(
            [front(f"API: {title[0].lower()}{title[1:]}", purpose), *entries, ""]
        )
    print(f"api.qmd lists {sum(map(len, rows.values()))} public names")
    return {"api.qmd": "\n\n".join([*listed, ""])} | {
        f"api_{room}.qmd": pages[f"api_{room}.qmd"] for room in ROOMS
    }
