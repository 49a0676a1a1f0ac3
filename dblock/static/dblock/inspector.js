/* Refreshes what is marked data-dblock-live from the page's own address, while it is looked at. Without it the page is
   as it was when it was loaded. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const region = document.querySelector("[data-dblock-live]");
  const bar = document.querySelector(".dblock-live");
  if (!region || !bar) return;
  const button = bar.querySelector("button"), said = bar.querySelector("output");
  const every = 1000 * Number(region.dataset.dblockLive);
  const tell = (words) => { said.textContent = words + " " + new Date().toLocaleTimeString(); };
  let paused = false;

  async function refresh() {
    // Whoever has the focus inside, or has marked text, is not to lose it.
    const busy = region.contains(document.activeElement) || !document.getSelection().isCollapsed;
    if (paused || busy || document.hidden) return;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", signal: AbortSignal.timeout(10000) });
      if (!answer.ok || answer.redirected) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("[data-dblock-live]");
      if (!fresh) throw new Error("no such page");
      region.replaceChildren(...fresh.childNodes);
      tell(bar.dataset.updated);
    } catch (error) {
      tell(bar.dataset.failed);
    }
  }

  async function keepFresh() {
    await refresh();
    setTimeout(keepFresh, every);
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? bar.dataset.resume : bar.dataset.pause;
    if (!paused) refresh();
  });
  bar.hidden = false;
  tell(bar.dataset.updated);
  setTimeout(keepFresh, every);
});
