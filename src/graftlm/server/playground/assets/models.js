/** The list of models: which of them answer, which adapters are in memory, and the way to unload one. */

import { element } from "./element.js";
import { bytes } from "./units.js";

export const MOST_CHOSEN = 4;
// Beyond this many a search saves scrolling.
const FEW = 8;
const RESIDENCY = { resident: "in memory", loading: "loading", absent: "on disk" };

export class Models {
  #list = document.getElementById("models");
  #title = document.getElementById("models-title");
  #hint = document.getElementById("models-hint");
  #filter = document.getElementById("filter");
  #filterRow = document.getElementById("filter-row");
  #rows = new Map();
  #chosen = new Set();
  #hasShown = false;
  #unload;
  #mayUnload = false;

  /** @param {(name: string) => void} unload is called when somebody asks for it */
  constructor(unload) {
    this.#unload = unload;
    this.#filter.addEventListener("input", () => this.#applyFilter());
  }

  /** @returns {{name: string, isBase: boolean}[]} in the order of the list */
  get chosen() {
    return [...this.#rows.values()].filter(({ name }) => this.#chosen.has(name)).map(({ name, isBase }) => ({ name, isBase }));
  }

  /** Rows stay the elements they are, so that neither focus nor place is lost. @param cards the data of GET /v1/models */
  show(cards, mayUnload) {
    this.#mayUnload = mayUnload;
    const names = new Set(cards.map((card) => card.id));
    for (const [name, row] of this.#rows) {
      if (names.has(name)) continue;
      // The focus must not be lost with what had it.
      if (row.element.contains(document.activeElement)) this.#title.focus();
      row.element.remove();
      this.#rows.delete(name);
      this.#chosen.delete(name);
    }
    cards.forEach((card, index) => {
      const row = this.#rows.get(card.id) ?? this.#add(card);
      if (this.#list.children[index] !== row.element) this.#list.insertBefore(row.element, this.#list.children[index]);
      row.update(card);
    });
    // Rows are listed as the server does.
    this.#rows = new Map(cards.map((card) => [card.id, this.#rows.get(card.id)]));
    if (!this.#hasShown && cards.length > 0) {
      for (const card of cards.slice(0, MOST_CHOSEN)) this.#chosen.add(card.id);
      this.#hasShown = true;
    }
    this.#filterRow.hidden = cards.length <= FEW;
    this.#applyFilter();
    this.#applyLimit();
  }

  #add(card) {
    const name = card.id;
    const isBase = card.parent === null;
    const box = element("input", { type: "checkbox" });
    box.addEventListener("change", () => {
      if (box.checked) this.#chosen.add(name);
      else this.#chosen.delete(name);
      this.#applyLimit();
    });
    const about = element("span", { className: "about" });
    const badge = element("span", { className: "tag" });
    const label = element("label", { className: "check" }, box, element("span", { className: "name", title: name }, name));
    const unload = element("button", { type: "button", className: "quiet", hidden: true, "aria-label": `Unload ${name}` }, "Unload");
    unload.addEventListener("click", () => this.#unload(name));
    const row = {
      name,
      isBase,
      box,
      element: element("li", {}, label, badge, about, unload),
      update: (now) => {
        badge.textContent = isBase ? "base" : RESIDENCY[now.residency];
        badge.dataset.residency = isBase ? "base" : now.residency;
        about.textContent = isBase ? `context of ${now.max_model_len} tokens` : described(now);
        unload.hidden = isBase || !this.#mayUnload;
      },
    };
    this.#rows.set(name, row);
    return row;
  }

  #applyLimit() {
    const isFull = this.#chosen.size >= MOST_CHOSEN;
    for (const { name, box } of this.#rows.values()) {
      box.checked = this.#chosen.has(name);
      box.disabled = isFull && !box.checked;
    }
    this.#hint.textContent = isFull
      ? "Four at most: leave one out to choose another."
      : "Up to four answer side by side.";
  }

  #applyFilter() {
    const wanted = this.#filter.value.toLowerCase();
    for (const { name, element: item } of this.#rows.values()) item.hidden = !name.toLowerCase().includes(wanted);
  }
}

function described({ method, ranks, num_bytes: size }) {
  if (method === null) return "not read yet";
  const rank = ranks.length > 0 ? [`rank ${ranks.join(", ")}`] : [];
  return [method, ...rank, bytes(size)].join(" · ");
}
