// What the theme's and Sphinx's own markup lacks for a screen reader and a keyboard. Pages can be read without it.
document.addEventListener("DOMContentLoaded", () => {
  const each = (selector, change) => document.querySelectorAll(selector).forEach(change);
  each(".sidebar-tree .caption[role=heading]", (caption) => caption.setAttribute("aria-level", "2"));
  each("aside.sidebar-drawer", (aside) => aside.setAttribute("aria-label", "All pages"));
  each("aside.toc-drawer", (aside) => aside.setAttribute("aria-label", "On this page"));
  each('article p > img[src$=".svg"]', (drawing) => drawing.parentElement.setAttribute("tabindex", "0"));
  each("pre", (block) => block.setAttribute("tabindex", "0"));
  each(".table-wrapper", (table) => table.setAttribute("tabindex", "0"));
  each(".sig > dl", (parameters) => {
    // A list of parameters without terms: no definition list.
    const lines = document.createElement("div");
    lines.className = "sig-parameters";
    for (const parameter of [...parameters.children]) {
      const line = document.createElement("div");
      line.append(...parameter.childNodes);
      lines.append(line);
    }
    parameters.replaceWith(lines);
  });
  each("thead th", (head) => {
    if (head.textContent.trim() === "") {
      head.replaceWith(document.createElement("td"));
    }
  });
});
