/** One model's answer: its column, its stream, its figures. Nothing that goes wrong here touches other columns. */

import { element } from "./element.js";
import { explain } from "./failure.js";
import { Pieces } from "./pieces.js";
import { requestFor } from "./question.js";

/** From which probability on a token gets a shade, the likeliest none. */
const SHADES = [
  [0.9, ""],
  [0.5, "likely"],
  [0.15, "unlikely"],
  [0, "rare"],
];
const ENDS = { stop: "ended by itself", length: "cut at the limit", tool_calls: "called a function" };

let numAnswers = 0;

export class Answer {
  #api;
  #model;
  #question;
  #inspector;
  #askForKey;
  #tokensOf = new WeakMap();
  #hasTabStop = false;
  #status = element("p", { className: "status", role: "status" });
  #text;
  #problem = element("div", { className: "problem", role: "alert", hidden: true });
  #figures = {
    first: element("dd", {}, "–"),
    speed: element("dd", {}, "–"),
    tokens: element("dd", {}, "–"),
  };

  /** @param {{api: Api, inspector: Inspector, askForKey: () => void}} page */
  constructor(model, isBase, question, { api, inspector, askForKey }) {
    this.#api = api;
    this.#model = model;
    this.#question = question;
    this.#inspector = inspector;
    this.#askForKey = askForKey;
    const id = `answer-${++numAnswers}`;
    this.#text = element("div", { className: "text", role: "group", "aria-label": `Tokens of ${model}` });
    const name = element("h3", { id, title: model }, model);
    const kind = element("span", { className: "tag" }, isBase ? "base" : "adapter");
    this.element = element(
      "article",
      { className: "panel answer", "aria-labelledby": id },
      element("header", {}, name, kind),
      element(
        "dl",
        {},
        element("div", {}, element("dt", {}, "First token"), this.#figures.first),
        element("div", {}, element("dt", {}, "Tokens/s"), this.#figures.speed),
        element("div", {}, element("dt", {}, "Tokens"), this.#figures.tokens),
      ),
      this.#status,
      this.#text,
      this.#problem,
    );
    this.#listen();
  }

  /** Ask, and show what comes, until it ends in some way. Never throws. */
  async run(signal) {
    const clock = new Clock();
    this.#text.replaceChildren();
    this.#hasTabStop = false;
    this.#problem.hidden = true;
    this.#say("Waiting for the first token", "busy");
    try {
      const end = await this.#stream(clock, signal);
      this.#say(`Complete, ${ENDS[end] ?? end}`, "done");
    } catch (error) {
      if (signal.aborted) this.#say("Stopped", "done");
      else this.#fail(error);
    }
  }

  async #stream(clock, signal) {
    const { path, body, read } = requestFor(this.#model, this.#question);
    const pieces = new Pieces();
    let end = null;
    for await (const chunk of this.#api.events(path, body, signal)) {
      const choice = chunk.choices[0];
      if (choice) {
        const { text, tokens } = read(choice);
        if (tokens.length > 0) {
          if (clock.numTokens === 0) this.#say("Answering", "busy");
          clock.count(tokens.length);
        }
        this.#text.append(...pieces.push(text, tokens).map((piece) => this.#span(piece)));
        end = choice.finish_reason ?? end;
      }
      // What the server counted is what counts.
      if (chunk.usage) clock.numTokens = chunk.usage.completion_tokens;
      this.#show(clock);
    }
    return end;
  }

  #span({ text, tokens }) {
    if (tokens.length === 0) return document.createTextNode(text);
    const probability = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
    const shade = SHADES.find(([least]) => probability >= least)[1];
    const span = element("span", { className: `token ${shade}`, tabIndex: this.#hasTabStop ? -1 : 0 }, text);
    this.#hasTabStop = true;
    this.#tokensOf.set(span, tokens);
    return span;
  }

  #show({ firstSeconds, tokensPerSecond, numTokens }) {
    if (firstSeconds === null) return;
    this.#figures.first.textContent = `${firstSeconds.toFixed(2)} s`;
    this.#figures.speed.textContent = tokensPerSecond === null ? "–" : tokensPerSecond.toFixed(1);
    this.#figures.tokens.textContent = String(numTokens);
  }

  #fail(error) {
    const { title, detail, wantsKey, mayRetry } = explain(error);
    this.#say("Failed", "failed");
    this.#problem.replaceChildren(element("strong", {}, title), element("p", {}, detail));
    if (wantsKey) this.#problem.append(element("button", { type: "button", onclick: this.#askForKey }, "Enter an API key"));
    if (mayRetry) {
      const retry = () => this.element.dispatchEvent(new CustomEvent("retry", { bubbles: true, detail: this }));
      this.#problem.append(element("button", { type: "button", onclick: retry }, "Try again"));
    }
    this.#problem.hidden = false;
  }

  #say(text, state) {
    this.#status.textContent = text;
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(state === "busy"));
  }

  #listen() {
    const text = this.#text;
    const inspect = (event) => {
      const tokens = this.#tokensOf.get(event.target);
      if (tokens) this.#inspector.show(event.target, tokens);
    };
    text.addEventListener("pointerover", inspect);
    text.addEventListener("pointerleave", () => this.#inspector.hideSoon());
    text.addEventListener("focusin", inspect);
    text.addEventListener("focusout", () => this.#inspector.hideSoon());
    text.addEventListener("keydown", (event) => this.#move(event));
    // One stop for the Tab key, wherever in the answer it was last.
    text.addEventListener("focusin", ({ target }) => {
      for (const span of text.querySelectorAll('.token[tabindex="0"]')) span.tabIndex = -1;
      target.tabIndex = 0;
    });
  }

  #move(event) {
    const tokens = [...this.#text.querySelectorAll(".token")];
    const here = tokens.indexOf(document.activeElement);
    const there = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (there === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    tokens[there]?.focus();
  }
}

/** Seconds from the question on, as the page sees them. */
class Clock {
  #asked = performance.now();
  #first = null;
  #latest = null;
  #numFirst = 0;
  numTokens = 0;

  count(numTokens) {
    this.#latest = performance.now();
    if (this.#first === null) {
      this.#first = this.#latest;
      this.#numFirst = numTokens;
    }
    this.numTokens += numTokens;
  }

  get firstSeconds() {
    return this.#first === null ? null : (this.#first - this.#asked) / 1000;
  }

  /** After the first ones, so that the prompt does not count. */
  get tokensPerSecond() {
    const seconds = (this.#latest - this.#first) / 1000;
    return seconds > 0 ? (this.numTokens - this.#numFirst) / seconds : null;
  }
}
