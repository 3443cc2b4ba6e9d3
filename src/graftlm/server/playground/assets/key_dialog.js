/** Where an API key is entered, and forgotten. */

const byId = (id) => document.getElementById(id);

export class KeyDialog {
  #dialog = byId("key-dialog");
  #field = byId("key");
  #opener = byId("open-key");
  #key;
  #changed;

  /** @param {{value: string}} key @param {() => void} changed is called after it has become another */
  constructor(key, changed) {
    this.#key = key;
    this.#changed = changed;
    this.#opener.addEventListener("click", () => this.open());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#use(this.#field.value.trim());
    });
    byId("forget-key").addEventListener("click", () => this.#use(""));
    byId("close-key").addEventListener("click", () => this.#dialog.close());
    this.#mark();
  }

  open() {
    this.#field.value = this.#key.value;
    this.#dialog.showModal();
    this.#field.focus();
  }

  #use(value) {
    this.#dialog.close();
    this.#key.value = value;
    this.#mark();
    this.#changed();
  }

  #mark() {
    this.#opener.textContent = this.#key.value ? "API key: set" : "API key";
  }
}
