// Shows what the server sends of the parts of a page that change; see shop/live.py.
"use strict";
for (const live of document.querySelectorAll("[data-live]")) {
  let source = null;
  let over = false;
  const look = () => {
    source?.close();
    if (document.hidden || over) return; // a browser has few connections to one site, for all of its tabs
    source = new EventSource(live.dataset.live);
    source.addEventListener("message", (event) => { live.innerHTML = event.data; });
    source.addEventListener("end", () => { over = true; source.close(); });
  };
  document.addEventListener("visibilitychange", look);
  look();
}
