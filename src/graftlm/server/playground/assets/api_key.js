/** The caller's API key: in this tab's session, or in memory where a browser keeps no session. */

const NAME = "graft-api-key";

export class ApiKey {
  #value = "";

  constructor() {
    try {
      this.#value = sessionStorage.getItem(NAME) ?? "";
    } catch {
      // Storage is switched off.
    }
  }

  get value() {
    return this.#value;
  }

  set value(value) {
    this.#value = value;
    try {
      if (value) sessionStorage.setItem(NAME, value);
      else sessionStorage.removeItem(NAME);
    } catch {
      // In memory only, then.
    }
  }
}
