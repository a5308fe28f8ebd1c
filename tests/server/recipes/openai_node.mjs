// The openai package of Node: chat, stream with usage, completion. Arguments: base URL, key. Prints JSON.
import { createRequire } from "node:module";

const OpenAI = createRequire(process.cwd() + "/")("openai").default;
const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3] });
const messages = [{ role: "user", content: "The quick brown fox" }];
const asked = { model: "tiny", messages, max_completion_tokens: 12 };
const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const text = await client.completions.create({ model: "tiny", prompt: "The quick brown fox", max_tokens: 12 });
console.log(
  JSON.stringify({
    chat: [whole.choices[0].message.content, streamed],
    completion: [text.choices[0].text],
    tokens: [whole.usage.completion_tokens, usage.completion_tokens],
  }),
);
