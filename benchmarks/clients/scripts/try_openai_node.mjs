import OpenAI from "openai";
import { CITY_SCHEMA, MODEL, QUESTION, URL, WEATHER_SCHEMA, check, run } from "./probe.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "no-key" });
const asked = { model: MODEL, messages: [{ role: "user", content: QUESTION }], max_tokens: 24 };
const first = async (more) => (await client.chat.completions.create({ ...asked, ...more })).choices[0];

await run({
  async chat() {
    check((await client.models.list()).data.some((each) => each.id === MODEL), "models.list");
    check((await first({})).message.content, "no content");
  },
  async stream() {
    let chunks = 0;
    for await (const _ of await client.chat.completions.create({ ...asked, stream: true })) chunks++;
    check(chunks > 3, chunks);
  },
  async tools() {
    const weather = { name: "weather", description: "The weather", parameters: WEATHER_SCHEMA };
    const choice = await first({
      tools: [{ type: "function", function: weather }], tool_choice: "required",
      parallel_tool_calls: false,
    });
    check("city" in JSON.parse(choice.message.tool_calls[0].function.arguments), choice);
  },
  async "structured output"() {
    const form = { name: "city", schema: CITY_SCHEMA, strict: true };
    const choice = await first({ response_format: { type: "json_schema", json_schema: form } });
    check("size" in JSON.parse(choice.message.content), choice);
  },
  async embeddings() {
    const found = await client.embeddings.create({ model: MODEL, input: ["a cat", "a kitten"] });
    check(found.data.length === 2 && found.data[0].embedding.length > 100, found.data.length);
  },
  async logprobs() {
    const choice = await first({ logprobs: true, top_logprobs: 5 });
    check(choice.logprobs.content[0].top_logprobs.length === 5, choice);
  },
  async responses() {
    const found = await client.responses.create({
      model: MODEL, input: QUESTION, max_output_tokens: 16,
    });
    check(found.output_text, found);
  },
  async abort() {
    const stop = new AbortController();
    const chunks = await client.chat.completions.create(
      { ...asked, max_tokens: 500, stream: true }, { signal: stop.signal });
    for await (const _ of chunks) stop.abort();
  },
});
