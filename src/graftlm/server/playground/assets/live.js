/** Tiles and tables of what the server is doing. */

import { element } from "./element.js";
import { bytes } from "./units.js";

export class Live {
  #tiles = {
    running: tile("Running"),
    waiting: tile("Waiting"),
    cache: meterTile("KV cache in use"),
    adapters: meterTile("Adapter memory"),
  };
  #requests = document.getElementById("requests");
  #requestTable = document.getElementById("request-table");
  #requestRows = document.getElementById("request-rows");
  #noRequests = document.getElementById("no-requests");
  #workers = document.getElementById("workers");
  #workerRows = document.getElementById("worker-rows");
  #note = document.getElementById("live-note");
  #strip = document.getElementById("tiles");

  constructor() {
    this.#strip.append(...Object.values(this.#tiles).map(({ box }) => box));
  }

  /** @param engine what GET /status says of it; null where this caller may not know */
  show(engine) {
    this.#strip.hidden = engine === null;
    this.#requests.hidden = engine === null;
    if (engine === null) {
      this.#workers.hidden = true;
      this.tell("What the server is doing is shown to API keys with metrics = true.");
      return;
    }
    this.tell("");
    this.#strip.classList.remove("stale");
    this.#tiles.running.value.textContent = String(engine.num_running);
    this.#tiles.waiting.value.textContent = String(engine.num_waiting);
    this.#tiles.cache.show(engine.kv_cache_usage, `${(engine.kv_cache_usage * 100).toFixed(1)} %`);
    const share = engine.max_adapter_bytes ? engine.adapter_bytes / engine.max_adapter_bytes : 0;
    this.#tiles.adapters.show(share, `${bytes(engine.adapter_bytes)} of ${bytes(engine.max_adapter_bytes)}`);
    this.#showRequests(engine.requests);
    this.#showWorkers(engine.workers);
  }

  /** What is shown is not of now. */
  lose(text) {
    this.#strip.classList.add("stale");
    this.tell(text);
  }

  tell(text) {
    // Setting the same text again would make a screen reader say it again.
    if (this.#note.textContent !== text) this.#note.textContent = text;
  }

  #showRequests(requests) {
    this.#noRequests.hidden = requests.length > 0;
    this.#requestTable.hidden = requests.length === 0;
    this.#requestRows.replaceChildren(
      ...requests.map((request) =>
        row(
          request.model,
          request.state,
          ...[request.prompt_tokens, request.output_tokens, request.seconds.toFixed(1)].map(number),
        ),
      ),
    );
  }

  #showWorkers(workers) {
    this.#workers.hidden = workers.length === 0;
    this.#workerRows.replaceChildren(
      ...workers.map(({ id, state, layers, adapters }) =>
        row(id, state, layers ? `${layers[0]} to ${layers[1] - 1}` : "none", adapters.join(", ") || "none"),
      ),
    );
  }
}

function tile(name) {
  const value = element("dd", {}, "–");
  return { box: element("dl", { className: "tile" }, element("dt", {}, name), value), value };
}

function meterTile(name) {
  const { box, value: cell } = tile(name);
  const value = element("span", {}, "–");
  const bar = element("span", { className: "bar" });
  const attributes = { className: "meter", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" };
  const meter = element("div", { ...attributes, "aria-valuenow": "0" }, bar);
  cell.replaceChildren(value, meter);
  return {
    box,
    show(share, text) {
      const percent = Math.min(share * 100, 100);
      value.textContent = text;
      bar.style.width = `${percent}%`;
      meter.setAttribute("aria-valuenow", percent.toFixed(0));
      meter.setAttribute("aria-valuetext", text);
    },
  };
}

function number(value) {
  return element("td", { className: "number" }, String(value));
}

function row(first, ...others) {
  const cells = others.map((cell) => (typeof cell === "string" ? element("td", {}, cell) : cell));
  return element("tr", {}, element("th", { scope: "row" }, first), ...cells);
}
