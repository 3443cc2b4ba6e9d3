/** The note beside a token: how likely it was, and what else might have been said. One for the page. */

import { element } from "./element.js";

const HIDE_AFTER_MS = 120;
const MARGIN = 8;

export class Inspector {
  #note;
  #token = null;
  #timer = 0;

  constructor(note) {
    this.#note = note;
    note.addEventListener("pointerenter", () => clearTimeout(this.#timer));
    note.addEventListener("pointerleave", () => this.hideSoon());
    // To the focus the browser may scroll, so the note goes along.
    addEventListener("scroll", () => this.#follow(), { passive: true });
    addEventListener("resize", () => this.#follow());
  }

  /** @param {HTMLElement} span the token's @param {Token[]} tokens one, or those that made one character */
  show(span, tokens) {
    clearTimeout(this.#timer);
    if (span === this.#token) return;
    this.hide();
    this.#token = span;
    this.#note.replaceChildren(...description(tokens));
    this.#note.hidden = false;
    span.setAttribute("aria-describedby", this.#note.id);
    this.#place(span);
  }

  hideSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.hide(), HIDE_AFTER_MS);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#token?.removeAttribute("aria-describedby");
    this.#token = null;
    this.#note.hidden = true;
  }

  #follow() {
    if (this.#token === null) return;
    const { top, bottom } = this.#token.getBoundingClientRect();
    if (bottom < 0 || top > innerHeight) this.hide();
    else this.#place(this.#token);
  }

  #place(span) {
    const token = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { width, height } = this.#note.getBoundingClientRect();
    const left = Math.max(MARGIN, Math.min(token.left, innerWidth - width - MARGIN));
    const isRoomBelow = token.bottom + height + MARGIN <= innerHeight;
    const top = isRoomBelow ? token.bottom + 4 : Math.max(MARGIN, token.top - height - 4);
    this.#note.style.left = `${left}px`;
    this.#note.style.top = `${top}px`;
  }
}

function description(tokens) {
  const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
  const title = element(
    "p",
    { className: "inspector-title" },
    element("code", {}, tokens.map((token) => shown(token.text)).join(" ")),
    element("strong", {}, percent(logprob)),
    element("span", {}, `log-probability ${logprob.toFixed(3)}`),
  );
  if (tokens.length > 1) return [title, element("p", {}, `${tokens.length} tokens make this character.`)];
  const [token] = tokens;
  if (token.top.length === 0) return [title];
  const rows = [...token.top]
    .sort((one, other) => other.logprob - one.logprob)
    .map((other) => {
      const bar = element("span", { className: "bar" });
      bar.style.width = `${Math.exp(other.logprob) * 100}%`;
      return element(
        "tr",
        { className: other.text === token.text ? "said" : "" },
        element("th", { scope: "row" }, element("code", {}, shown(other.text))),
        element("td", { className: "number" }, percent(other.logprob)),
        element("td", { className: "bars", "aria-hidden": "true" }, bar),
      );
    });
  return [title, element("table", {}, element("caption", {}, "Likeliest"), element("tbody", {}, ...rows))];
}

/** A token's text with its white space visible. */
function shown(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return value !== 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
}
