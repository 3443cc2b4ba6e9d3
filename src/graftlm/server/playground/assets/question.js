/** One prompt for one model as a request, and the chunks of its stream in one form, whichever route it takes. */

const NUM_ALTERNATIVES = 5;

/**
 * @param {{form: "chat"|"completion", prompt: string, system: string, maxTokens: number, temperature: number,
 *   topP: number, seed: number|null}} question
 * @returns {{path: string, body: object, read: (choice: object) => {text: string, tokens: Token[]}}}
 */
export function requestFor(model, question) {
  const shared = {
    model,
    max_tokens: question.maxTokens,
    temperature: question.temperature,
    top_p: question.topP,
    ...(question.seed === null ? {} : { seed: question.seed }),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (question.form === "completion") {
    const body = { ...shared, prompt: question.prompt, logprobs: NUM_ALTERNATIVES };
    return { path: "v1/completions", body, read: readCompletion };
  }
  const system = question.system ? [{ role: "system", content: question.system }] : [];
  const messages = [...system, { role: "user", content: question.prompt }];
  const body = { ...shared, messages, logprobs: true, top_logprobs: NUM_ALTERNATIVES };
  return { path: "v1/chat/completions", body, read: readChat };
}

/** @typedef {{text: string, logprob: number, top: {text: string, logprob: number}[]}} Token */

function readChat(choice) {
  const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({
    text: token,
    logprob,
    top: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
  }));
  return { text: choice.delta.content ?? "", tokens };
}

function readCompletion(choice) {
  const { tokens = [], token_logprobs: rated = [], top_logprobs: top } = choice.logprobs ?? {};
  return {
    text: choice.text,
    tokens: tokens.map((text, index) => ({
      text,
      logprob: rated[index],
      top: Object.entries(top?.[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
    })),
  };
}
