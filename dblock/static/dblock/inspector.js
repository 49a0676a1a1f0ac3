/* Refreshes what is marked data-dblock-live from the page's own address, while it is looked at. Without it the page is
   as it was when it was loaded. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const region = document.querySelector("[data-dblock-live]");
  const bar = document.querySelector(".dblock-live");
  if (!region || !bar) return;
  const [button, time, trouble] = bar.children;
  const every = 1000 * Number(region.dataset.dblockLive);
  const updated = (page) => { time.textContent = page.querySelector(".dblock-live").dataset.updated; };
  // The only part that a screen reader says by itself: once, not at each attempt.
  const tell = (words) => { if (trouble.textContent !== words) trouble.textContent = words; };
  let paused = false, ended = false;

  // On a phone each row of a table is a card, whose values carry the names of their columns. The roles keep it a table
  // for screen readers, whatever the style sheet makes of it.
  function label() {
    const roles = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TD: "cell" };
    for (const table of region.querySelectorAll("#result_list, .dblock-queue table")) {
      for (const part of [table, ...table.querySelectorAll("thead, tbody, tr, td")]) part.setAttribute("role", roles[part.tagName]);
      table.querySelectorAll("thead th").forEach((head, column) => {
        head.setAttribute("role", "columnheader");
        const name = (head.querySelector(".text") || head).textContent.trim();
        for (const row of table.tBodies[0].rows) row.cells[column].dataset.label = name;
      });
      table.querySelectorAll("tbody th").forEach((head) => head.setAttribute("role", "rowheader"));
      table.classList.add("dblock-cards");
    }
  }

  // A user who has the focus inside, or has marked text, must not lose it.
  const busy = () => region.contains(document.activeElement) || !document.getSelection().isCollapsed;

  async function refresh() {
    if (paused || ended || busy() || document.hidden) return;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", signal: AbortSignal.timeout(10000) });
      ended = answer.redirected || answer.status === 403;
      if (!answer.ok || ended) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("[data-dblock-live]");
      if (!fresh) throw new Error("no such page");
      if (busy()) return; // since it was asked for
      region.replaceChildren(...fresh.childNodes);
      label();
      updated(page);
      tell("");
    } catch (error) {
      tell(ended ? bar.dataset.ended : bar.dataset.failed);
      button.hidden = ended;
    }
  }

  async function keepFresh() {
    const began = Date.now();
    await refresh();
    // A page that takes long to make is asked for less often.
    if (!ended) setTimeout(keepFresh, Math.max(every, 4 * (Date.now() - began)));
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? bar.dataset.resume : bar.dataset.pause;
    if (!paused) refresh();
  });
  bar.hidden = false;
  label();
  updated(document);
  setTimeout(keepFresh, every);
});
