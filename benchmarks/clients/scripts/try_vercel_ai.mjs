import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, QUESTION, URL, check, run } from "./probe.mjs";

const provider = createOpenAICompatible({
  name: "moonpool", baseURL: `${URL}/v1`, apiKey: "no-key", supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const asked = { model, prompt: QUESTION, maxOutputTokens: 48 };

await run({
  async chat() { check((await generateText(asked)).text, "no text"); },
  async stream() {
    let parts = 0;
    for await (const _ of streamText(asked).textStream) parts++;
    check(parts > 1, parts);
  },
  async tools() {
    const weather = tool({
      description: "The weather", inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    });
    const found = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
    check(found.toolCalls[0]?.input?.city, found.text);
  },
  async "structured output"() {
    const schema = z.object({ city: z.enum(["Paris", "Rome"]), size: z.enum(["small", "large"]) });
    const found = await generateText({ ...asked, output: Output.object({ schema }) });
    check(found.output.size, found.text);
  },
  async embeddings() {
    const found = await embedMany({
      model: provider.embeddingModel(MODEL), values: ["a cat", "a kitten"],
    });
    check(found.embeddings.length === 2, found.embeddings.length);
  },
});
