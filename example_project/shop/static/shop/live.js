// Shows what the server sends of the parts of a page that change; see shop/live.py.
"use strict";
for (const live of document.querySelectorAll("[data-live]")) {
  const source = new EventSource(live.dataset.live);
  source.addEventListener("message", (event) => { live.innerHTML = event.data; });
  source.addEventListener("end", () => source.close());
}
