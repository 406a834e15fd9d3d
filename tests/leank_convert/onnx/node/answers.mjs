// Answers what standard input asks for as JSON, with a host that test_node.py names, and writes JSON.
import { readFileSync } from "node:fs";

const { host, cases } = JSON.parse(readFileSync(0, "utf8"));
const { LeanKOnnx } = await import(host);

/** Answer, and count in how many runs a cache tensor had another array than in the run before. */
async function answer({ folder, prompt, maxNewTokens, promptChunk, endless }) {
  const model = await LeanKOnnx.load(folder, { threads: 1 });
  if (endless) model.description.eos_token_ids = [];
  const { session } = model;
  const run = session.run.bind(session);
  const moved = [];
  let before = {};
  session.run = async (feeds, fetches) => {
    const names = Object.keys(feeds).filter((name) => name.startsWith("past_key_values."));
    moved.push(names.filter((name) => feeds[name].data !== before[name]).length);
    before = Object.fromEntries(names.map((name) => [name, feeds[name].data]));
    return run(feeds, fetches);
  };
  const tokens = [];
  for await (const token of model.generate(prompt, { maxNewTokens, promptChunk })) tokens.push(token);
  return { tokens, moved };
}

const results = [];
for (const each of cases) results.push(await answer(each));
process.stdout.write(JSON.stringify(results));
