/** Asks for something again and again, while somebody can see the page. */
export class Poller {
  #ask;
  #periodMs;
  #timer = 0;
  #isAsking = false;

  /** @param {() => Promise<void>} ask never throws */
  constructor(ask, periodMs) {
    this.#ask = ask;
    this.#periodMs = periodMs;
    document.addEventListener("visibilitychange", () => this.askNow());
  }

  /** Also begins the asking. While a question is open, or nobody looks, nothing is asked. */
  async askNow() {
    clearTimeout(this.#timer);
    if (this.#isAsking || document.visibilityState === "hidden") return;
    this.#isAsking = true;
    await this.#ask();
    this.#isAsking = false;
    this.#timer = setTimeout(() => this.askNow(), this.#periodMs);
  }
}
