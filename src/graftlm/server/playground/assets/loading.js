/** Loading and unloading adapters, where the server lets this caller, and why not where it does not. */

import { explain } from "./failure.js";

const byId = (id) => document.getElementById(id);

export class Loading {
  #api;
  #changed;
  #form = byId("load-form");
  #refused = byId("loading-refused");
  #note = byId("loading-note");
  #dialog = byId("unload-dialog");
  #leaving = "";

  /** @param {() => void} changed is called after the list of models has become another */
  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#load();
    });
    byId("confirm-unload").addEventListener("click", () => {
      this.#dialog.close();
      this.#unload(this.#leaving);
    });
    byId("cancel-unload").addEventListener("click", () => this.#dialog.close());
  }

  /** @param {string|null} refused why not; null if it may be done */
  show(refused) {
    this.#form.hidden = refused !== null;
    this.#refused.hidden = refused === null;
    const text = refused === null ? "" : `Not here: ${refused}.`;
    if (this.#refused.textContent !== text) this.#refused.textContent = text;
  }

  /** Ask whether it is meant, and then unload. */
  confirmUnload(name) {
    this.#leaving = name;
    byId("unload-title").textContent = `Unload ${name}?`;
    this.#dialog.showModal();
  }

  async #load() {
    const [path, name] = [byId("load-path").value.trim(), byId("load-name").value.trim()];
    const body = { lora_path: path, lora_name: name, load_inplace: byId("load-replace").checked };
    await this.#do(`Loading ${name} …`, "v1/load_lora_adapter", body, (loaded) => {
      this.#form.reset();
      return `Loaded ${loaded.id}: ${loaded.method}, ${loaded.bound} of ${loaded.total} tensors bound.`;
    });
  }

  async #unload(name) {
    await this.#do(`Unloading ${name} …`, "v1/unload_lora_adapter", { lora_name: name }, () => `Unloaded ${name}.`);
  }

  async #do(doing, path, body, done) {
    const buttons = this.#form.querySelectorAll("button");
    for (const button of buttons) button.disabled = true;
    this.#tell(doing, false);
    try {
      this.#tell(done(await this.#api.json(path, { body })), false);
      this.#changed();
    } catch (error) {
      const { title, detail } = explain(error);
      this.#tell(`${title}. ${detail}`, true);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }

  #tell(text, isWarning) {
    this.#note.textContent = text;
    this.#note.classList.toggle("warning", isWarning);
  }
}
