// What the `openai` package for Node makes of a server. `test_node.py` starts one, and says by GRAFT_TEST where it is, what
// its models are called and which prompt is answered by which script.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import OpenAI from "openai";

const { url, models, prompts, scripts } = JSON.parse(process.env.GRAFT_TEST);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const [base, adapter] = models;
const GREEDY = { temperature: 0, max_tokens: 200 };
const WEATHER = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const TOOLS = [{ type: "function", function: { name: "get_weather", parameters: WEATHER } }];

const asking = (script) => [{ role: "user", content: prompts[script] }];

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

describe("models", () => {
  test("are the base and its adapter", async () => {
    const listed = await collect(client.models.list());
    assert.deepEqual(listed.map((model) => model.id).sort(), [...models].sort());
    assert.equal((await client.models.retrieve(adapter)).parent, base);
  });
});

describe("completions", () => {
  test("are the same whole and streamed, for both models", async () => {
    for (const model of models) {
      const body = { model, prompt: prompts.text, ...GREEDY };
      const whole = await client.completions.create({ ...body, logprobs: 2 });
      const chunks = await collect(
        await client.completions.create({ ...body, stream: true, stream_options: { include_usage: true } }),
      );
      const streamed = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.text)).join("");
      assert.equal(whole.choices[0].text, scripts.text);
      assert.equal(streamed, scripts.text);
      assert.equal(whole.choices[0].logprobs.tokens.length, whole.usage.completion_tokens);
      assert.deepEqual(chunks.at(-1).usage, whole.usage);
    }
  });

  test("take lists of prompts and of token ids", async () => {
    const reply = await client.completions.create({ model: base, prompt: [[1, 2], [3]], max_tokens: 2, n: 2 });
    assert.deepEqual(reply.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  });
});

describe("chats", () => {
  test("are the same whole and streamed", async () => {
    const body = { model: adapter, messages: asking("text"), ...GREEDY };
    const whole = await client.chat.completions.create({ ...body, logprobs: true, top_logprobs: 2 });
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    assert.equal(whole.choices[0].message.content, scripts.text);
    assert.equal(whole.choices[0].logprobs.content[0].top_logprobs.length, 2);
    assert.equal(streamed.choices[0].message.content, scripts.text);
    assert.equal(streamed.choices[0].finish_reason, whole.choices[0].finish_reason);
  });

  test("carry calls of functions, whole and put together from deltas", async () => {
    const body = { model: base, messages: asking("calls"), tools: TOOLS, ...GREEDY };
    const whole = await client.chat.completions.create(body);
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    for (const completion of [whole, streamed]) {
      const [choice] = completion.choices;
      assert.equal(choice.finish_reason, "tool_calls");
      const calls = choice.message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
      assert.deepEqual(calls, [["get_weather", { city: "Rome", days: 2 }]]);
    }
  });

  test("run tools until the model has its answer", async () => {
    const asked = [];
    const runner = client.chat.completions.runTools(
      {
        model: base,
        messages: asking("calls"),
        ...GREEDY,
        tools: [
          {
            type: "function",
            function: {
              name: "get_weather",
              parameters: WEATHER,
              parse: JSON.parse,
              function: (args) => {
                asked.push(args);
                return "rain";
              },
            },
          },
        ],
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    assert.deepEqual(asked[0], { city: "Rome", days: 2 });
    assert.deepEqual(runner.messages.slice(0, 3).map((message) => message.role), ["user", "assistant", "tool"]);
  });

  test("keep to a JSON schema and are parsed by the client", async () => {
    const format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: WEATHER } };
    const body = { model: adapter, messages: asking("text"), response_format: format, max_tokens: 200, seed: 1 };
    const { city, days } = (await client.chat.completions.parse(body)).choices[0].message.parsed;
    assert.ok(["Rome", "Oslo"].includes(city));
    assert.ok(Number.isInteger(days) && days >= 1 && days <= 9);
  });
});

describe("responses", () => {
  test("are the same whole and streamed", async () => {
    const body = { model: base, input: prompts.text, temperature: 0, max_output_tokens: 200 };
    const whole = await client.responses.create(body);
    const streamed = await client.responses.stream(body).finalResponse();
    assert.equal(whole.output_text, scripts.text);
    assert.equal(streamed.output_text, scripts.text);
    assert.equal(streamed.status, "completed");
  });

  test("can be sent back with the result of the function they call", async () => {
    const [{ type, function: definition }] = TOOLS;
    const tools = [{ type, strict: false, ...definition }];
    const body = { model: base, tools, temperature: 0, max_output_tokens: 200 };
    const first = await client.responses.stream({ ...body, input: prompts.calls }).finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Rome", days: 2 });
    const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
    const input = [{ role: "user", content: prompts.calls }, ...first.output, result];
    assert.equal((await client.responses.create({ ...body, input })).status, "completed");
  });
});

describe("errors", () => {
  test("are those that the client knows", async () => {
    const body = { model: "nobody", messages: asking("text") };
    await assert.rejects(client.chat.completions.create(body), OpenAI.NotFoundError);
    const refused = client.chat.completions.create({ ...body, model: base, top_p: 3, stream: true });
    await assert.rejects(refused, (error) => error instanceof OpenAI.BadRequestError && error.param === "top_p");
    await assert.rejects(client.embeddings.create({ model: base, input: "x" }), OpenAI.NotFoundError);
  });

  test("an answer that the client stops is stopped on the server", async () => {
    const body = { model: base, prompt: [1], max_tokens: 300, logit_bias: { 120: 100 } };
    const stream = await client.completions.create({ ...body, stream: true });
    for await (const chunk of stream) {
      assert.ok(chunk.choices);
      break;
    }
    for (let unfinished = 1; unfinished > 0; ) {
      const { engine } = await (await fetch(`${url}/status`)).json();
      unfinished = engine.num_running + engine.num_waiting;
    }
  });
});
