// What Quarto 1.7 leaves out of a page: a way past the menus, names and states for those
// who do not see them, the keyboard for what folds, and drawings in the dark.

const CONTENT = "quarto-document-content";

/** Make what folds at a click a button for the keyboard, too. */
function pressable(fold) {
  fold.setAttribute("role", "button");
  fold.tabIndex = 0;
  fold.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    fold.click();
  });
}

if (document.querySelector(".et-puzzle")) import("./puzzle.js");
if (document.querySelector(".et-play")) import("./play.js");
if (document.querySelector(".et-walk")) import("./walk.js");

// the first link that the keyboard reaches leads past the menus
const content = document.getElementById(CONTENT);
if (content) {
  const skip = document.createElement("a");
  Object.assign(skip, { href: `#${CONTENT}`, className: "skip-link", textContent: "Skip to content" });
  content.tabIndex = -1;
  document.body.prepend(skip);
}

// one stop for each section of the sidebar is enough
for (const fold of document.querySelectorAll("#quarto-sidebar a[data-bs-toggle]:not([href])")) {
  const section = fold.closest(".sidebar-item-container");
  fold.setAttribute("role", "button");
  if (fold !== section.querySelector("a[data-bs-toggle]")) continue;
  fold.setAttribute("aria-label", `Fold or open: ${section.textContent.trim()}`);
  pressable(fold);
}

for (const fold of document.querySelectorAll(".callout-header[data-bs-toggle]")) {
  const folded = document.querySelector(fold.dataset.bsTarget);
  const say = () => fold.setAttribute("aria-expanded", folded.classList.contains("show"));
  fold.removeAttribute("aria-label"); // it is named by its title
  pressable(fold);
  say();
  new MutationObserver(say).observe(folded, { attributeFilter: ["class"] });
}

// the search makes its button when the page is ready
addEventListener("load", () => {
  for (const button of document.querySelectorAll("#quarto-search button")) {
    if (!button.textContent.trim()) button.setAttribute("aria-label", "Search");
  }
});

// a drawing that is opened large is inverted by night, as it is in the page
const drawings = new Set();
for (const { src } of document.querySelectorAll("main :is(.drawn img, img.drawn)")) drawings.add(src);
const marked = ({ target }) => {
  if (target.closest?.(".glightbox-container")) target.classList.toggle("drawn", drawings.has(target.src));
};
document.addEventListener("load", marked, true);
