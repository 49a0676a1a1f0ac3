// What the theme's and Sphinx's own markup lacks for a screen reader and a keyboard. Pages can be read without it.
document.addEventListener("DOMContentLoaded", () => {
  const each = (selector, change) => document.querySelectorAll(selector).forEach(change);
  each(".sidebar-tree .caption[role=heading]", (caption) => caption.setAttribute("aria-level", "2"));
  each("aside.sidebar-drawer", (aside) => aside.setAttribute("aria-label", "All pages"));
  each("aside.toc-drawer", (aside) => aside.setAttribute("aria-label", "On this page"));
  each('article p > img[src$=".svg"]', (drawing) => {
    // On a phone a drawing is small: touched, it is shown by itself.
    const link = document.createElement("a");
    link.href = drawing.src;
    link.className = drawing.className; // of a light or a dark page
    drawing.replaceWith(link);
    link.append(drawing);
  });
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
  each(".table-wrapper table", (table) => {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    const roles = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", th: "columnheader", td: "cell" };
    for (const [name, role] of Object.entries(roles)) {
      (name === "table" ? [table] : table.querySelectorAll(name)).forEach((part) => part.setAttribute("role", role));
    }
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, column) => column && heads[column] && cell.setAttribute("data-head", heads[column]));
    }
  });
  const fit = () =>
    each(".table-wrapper", (wrapper) => {
      wrapper.classList.remove("tight", "stacked", "many");
      if (wrapper.scrollWidth <= wrapper.clientWidth) return;
      wrapper.classList.add(wrapper.querySelectorAll("thead tr > *").length > 6 ? "many" : "tight");
      if (window.innerWidth < 740) wrapper.classList.add("stacked");
    });
  window.addEventListener("resize", fit);
  window.addEventListener("load", fit);
  each("thead th", (head) => {
    if (head.textContent.trim() === "") {
      head.replaceWith(document.createElement("td"));
    }
  });
});
