// Encodes and streams texts, as standard input asks for as JSON, and writes tokens and pieces as JSON.
import { readFileSync } from "node:fs";

const { host, folder, texts } = JSON.parse(readFileSync(0, "utf8"));
const { Text } = await import(host);
const text = await Text.load(folder);

async function* slowly(ids) {
  yield* ids;
}

const results = [];
for (const each of texts) {
  const tokens = text.encode(each);
  const pieces = [];
  for await (const piece of text.stream(slowly(tokens))) pieces.push(piece);
  results.push({ tokens, pieces });
}
process.stdout.write(JSON.stringify(results));
