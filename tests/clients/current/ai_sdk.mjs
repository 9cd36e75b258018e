// Prints what AI SDK's providers answer: [object of a stream, input of a call], one provider a line.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";

const { URL: baseURL, KEY: apiKey, MODEL, TEXT: prompt, SCHEMA } = process.env;
const schema = jsonSchema(JSON.parse(SCHEMA));
const openai = createOpenAI({ baseURL, apiKey });
const compatible = { name: "guided", baseURL, apiKey, supportsStructuredOutputs: true };

for (const model of [
  openai(MODEL), // responses
  openai.chat(MODEL),
  createOpenAICompatible(compatible)(MODEL),
  createAnthropic({ baseURL, apiKey })(MODEL),
]) {
  const asked = { model, prompt, maxRetries: 0, maxOutputTokens: 200 };
  const streamed = streamText({ ...asked, output: Output.object({ schema }) });
  const tools = { store: tool({ description: "Store a person.", inputSchema: schema }) };
  const called = await generateText({ ...asked, tools, toolChoice: "required" });
  console.log(JSON.stringify([await streamed.output, called.toolCalls[0].input]));
}
