/** The server's routes as JSON and as streams of events. Knows statuses and headers, nothing of the page. */

/** What the server refused. `status` is null for an error within a stream, whose status line was a good one. */
export class Refused extends Error {
  constructor({ status, message, code, retryAfterSeconds }) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

/** The server cannot be reached, or went away within a reply. */
export class ConnectionLost extends Error {}

export class Api {
  #key;

  /** @param {{value: string}} key */
  constructor(key) {
    this.#key = key;
  }

  /** The reply's JSON. Throws Refused, ConnectionLost, or the signal's AbortError. */
  async json(path, { body, signal } = {}) {
    const reply = await this.#fetch(path, body, signal);
    return await lostIfBroken(() => reply.json());
  }

  /** Each event's JSON, until [DONE]. Throws what `json` does. */
  async *events(path, body, signal) {
    const reply = await this.#fetch(path, body, signal);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let unread = "";
    try {
      for (;;) {
        const { value, done } = await lostIfBroken(() => reader.read());
        if (done) throw new ConnectionLost("the connection ended before the answer did");
        const events = (unread + value).split("\n\n");
        unread = events.pop();
        for (const event of events) {
          const data = event.replace(/^data: /, "");
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Refused({ status: null, ...chunk.error });
          yield chunk;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async #fetch(path, body, signal) {
    const headers = {};
    if (this.#key.value) headers.authorization = `Bearer ${this.#key.value}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const options = {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    };
    const reply = await lostIfBroken(() => fetch(path, options));
    if (reply.ok) return reply;
    throw await refusal(reply);
  }
}

async function lostIfBroken(attempt) {
  try {
    return await attempt();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("the server cannot be reached", { cause: error });
  }
}

async function refusal(reply) {
  let error = {};
  try {
    error = (await reply.json()).error ?? {};
  } catch {
    // Not from Graft: a proxy in front of it, say.
  }
  const wait = Number.parseInt(reply.headers.get("retry-after") ?? "", 10);
  return new Refused({
    status: reply.status,
    message: error.message ?? reply.statusText,
    code: error.code ?? null,
    retryAfterSeconds: Number.isNaN(wait) ? null : wait,
  });
}
