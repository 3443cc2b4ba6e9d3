/** The page put together: its parts, and who tells whom. */

import { Answer } from "./answer.js";
import { Api, Refused } from "./api.js";
import { ApiKey } from "./api_key.js";
import { explain } from "./failure.js";
import { Inspector } from "./inspector.js";
import { KeyDialog } from "./key_dialog.js";
import { Live } from "./live.js";
import { Loading } from "./loading.js";
import { Models } from "./models.js";
import { Poller } from "./poller.js";

const POLL_MS = 1500;
const byId = (id) => document.getElementById(id);

const key = new ApiKey();
const api = new Api(key);
const live = new Live();
const inspector = new Inspector(byId("inspector"));
const poller = new Poller(look, POLL_MS);
const keyDialog = new KeyDialog(key, () => poller.askNow());
const loading = new Loading(api, () => poller.askNow());
const models = new Models((name) => loading.confirmUnload(name));

const page = { api, inspector, askForKey: () => keyDialog.open() };
/** Of every answer that is still coming, what stops it. */
const running = new Map();

async function look() {
  try {
    const status = await api.json("status");
    const { data } = await api.json("v1/models");
    live.show(status.engine);
    loading.show(status.loading_refused);
    models.show(data, status.loading_refused === null);
    byId("base").textContent = data.find((card) => card.parent === null)?.id ?? "";
    tell("models-note", data.length > 0 ? "" : "This API key may use no model.");
  } catch (error) {
    const { title, detail } = explain(error);
    live.lose(`${title}. ${detail}`);
    if (error instanceof Refused && error.status === 401) showNothing();
  }
}

function showNothing() {
  models.show([], false);
  loading.show("an API key is needed");
  tell("models-note", "The server tells its models to those who have an API key: give it by the button above.");
}

function ask() {
  const chosen = models.chosen;
  tell("ask-note", chosen.length > 0 ? "" : "Choose at least one model.");
  if (running.size > 0 || chosen.length === 0) return;
  const question = readQuestion();
  const answers = chosen.map(({ name, isBase }) => new Answer(name, isBase, question, page));
  byId("no-answers").hidden = true;
  byId("answers").replaceChildren(...answers.map((answer) => answer.element));
  for (const answer of answers) run(answer);
}

async function run(answer) {
  const stopper = new AbortController();
  running.set(answer, stopper);
  showRunning();
  await answer.run(stopper.signal);
  running.delete(answer);
  showRunning();
  poller.askNow();
}

function stop() {
  for (const stopper of running.values()) stopper.abort();
}

function showRunning() {
  const isRunning = running.size > 0;
  // A button that is disabled loses the focus, and with it whoever goes by keyboard.
  if (!isRunning && document.activeElement === byId("stop")) byId("prompt").focus();
  byId("send").setAttribute("aria-disabled", String(isRunning));
  byId("stop").disabled = !isRunning;
}

function readQuestion() {
  const seed = byId("seed").value;
  return {
    form: document.querySelector('input[name="form"]:checked').value,
    prompt: byId("prompt").value,
    system: byId("system").value,
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    topP: byId("top-p").valueAsNumber,
    seed: seed === "" ? null : Number(seed),
  };
}

function tell(id, text) {
  const note = byId(id);
  if (note.textContent !== text) note.textContent = text;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
// What is missing or wrong may be folded away, where the browser could not point at it.
byId("ask").addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
byId("ask").addEventListener("change", () => {
  // Plain text has no place for it.
  byId("system").disabled = readQuestion().form === "completion";
});
byId("stop").addEventListener("click", stop);
byId("shade").addEventListener("change", ({ target }) => byId("answers").classList.toggle("plain", !target.checked));
byId("answers").addEventListener("retry", ({ detail }) => run(detail));
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    inspector.hide();
    stop();
  }
});
poller.askNow();
