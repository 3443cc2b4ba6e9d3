/** Errors in the words of someone who looks at the page. */

import { ConnectionLost, Refused } from "./api.js";

const TITLES = {
  400: "The server refused this",
  401: "An API key is needed",
  403: "Not allowed",
  404: "There is no such model",
  413: "Too long",
  429: "Too many requests",
  503: "The server takes no requests now",
  504: "It took too long",
};

/** Title and detail of what went wrong, and whether another key, or another try, may help. */
export function explain(error) {
  if (error instanceof ConnectionLost) {
    return { title: "Connection lost", detail: `${capitalised(error.message)}.`, wantsKey: false, mayRetry: true };
  }
  if (!(error instanceof Refused)) {
    console.error(error);
    return { title: "This page failed", detail: String(error), wantsKey: false, mayRetry: true };
  }
  const { status, message, retryAfterSeconds } = error;
  const title = TITLES[status] ?? (status === null ? "The answer broke off" : "The server failed");
  const wait = retryAfterSeconds === null || retryAfterSeconds === undefined ? "" : ` Try again in ${retryAfterSeconds} s.`;
  return {
    title: status === null ? title : `${title} (${status})`,
    detail: capitalised(message) + wait,
    wantsKey: status === 401,
    mayRetry: status === null || status === 429 || status >= 500,
  };
}

function capitalised(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
