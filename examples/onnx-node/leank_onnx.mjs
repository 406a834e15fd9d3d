// Decode with a model exported by leank-convert, in Node 18.3 or later; needs onnxruntime-node alone, for text
// what leank_onnx_text.mjs names.
//
//     node leank_onnx.mjs FOLDER --tokens 1,5,9 --max-new-tokens 20
//     node leank_onnx.mjs FOLDER --prompt "Why is the sky blue?"
//
//     const model = await LeanKOnnx.load("FOLDER", { threads: 2 });
//     for await (const token of model.generate([1, 5, 9], { maxNewTokens: 20 })) console.log(token);
//
// An example to read along: one row, tokens in and the likeliest tokens out. `leank_onnx.py` does batches,
// further turns and sampling with the same graph; a folder's README.md says what a host does. The graph returns
// K and V of the new tokens alone. This file keeps them in typed arrays that onnxruntime reads where they lie,
// and moves tokens between them as decoding goes on:
//
//     tokens 0 ... n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]
//
// A window holds sink and recent tokens with all channels, token t in slot t while t < sink_size, else in
// slot sink_size + (t - sink_size) mod (recent_size + flush_size). Slots that no token has reached are made as
// tokens come. A bucket's pruned keys have its kept channels, token sink_size + j in slot j. While the prompt
// is read the windows hold all of it, token t in slot t.

import { existsSync, readFileSync, realpathSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const FORMAT_VERSION = 1;
const CAPACITY_STEP = 64;
const USAGE =
  "usage: node leank_onnx.mjs FOLDER (--tokens 1,5,9 | --prompt TEXT [--plain]) " +
  "[--max-new-tokens 128] [--prompt-chunk 256] [--threads 2]; --prompt - reads standard input";

/** What the caller can put right: names the file or argument, its value and the remedy. */
export class LeanKOnnxError extends Error {}

/** An exported model. */
export class LeanKOnnx {
  /** Load a folder that `leank-convert export --format onnx` wrote; `threads` share a product of matrices. */
  static async load(folder, { threads } = {}) {
    const description = readDescription(folder);
    if (threads !== undefined) requireCount("threads", threads);
    const { default: ort } = await importPackage("onnxruntime-node");
    const path = join(folder, "model.onnx");
    // An arena would keep what a long prompt's attention took, many times what decoding needs.
    const options = { enableCpuMemArena: false };
    if (threads !== undefined) options.intraOpNumThreads = threads;
    let session;
    try {
      session = await ort.InferenceSession.create(path, options);
    } catch (error) {
      throw new LeanKOnnxError(`onnxruntime-node cannot load \`${path}\`: ${error.message}`);
    }
    const model = new LeanKOnnx(ort, session, description);
    const { feeds, fetches } = new Cache(model).newPass(1);
    const found = [...session.inputNames, ...session.outputNames];
    const expected = Object.keys({ ...feeds, ...fetches });
    const differs = [...found, ...expected].find((name) => !found.includes(name) || !expected.includes(name));
    const message = `\`${path}\` is not the graph that leank_onnx.json describes: \`${differs}\` differs`;
    requireThat(differs === undefined, `${message}; export the model again`);
    return model;
  }

  constructor(ort, session, description) {
    Object.assign(this, { ort, session, description });
  }

  /** Yield the tokens that answer a prompt as they come, the one that ends the answer included. */
  async *generate(tokens, { maxNewTokens = 128, promptChunk = 256 } = {}) {
    const { eos_token_ids: ends, model } = this.description;
    requireCount("maxNewTokens", maxNewTokens);
    requireCount("promptChunk", promptChunk);
    const prompt = Array.from(tokens);
    requireThat(prompt.length > 0, "the prompt is empty: pass one token or more");
    for (const token of prompt) {
      const known = Number.isInteger(token) && token >= 0 && token < model.vocab_size;
      requireThat(known, `the prompt has token ${token}: the vocabulary is 0 to ${model.vocab_size - 1}`);
    }
    const cache = new Cache(this);
    let logits = await cache.readPrompt(prompt, promptChunk);
    for (let count = 1; ; count++) {
      const token = logits.reduce((best, logit, id) => (logit > logits[best] ? id : best), 0);
      yield token;
      if (count === maxNewTokens || ends.includes(token)) return;
      logits = await cache.decode(token);
    }
  }
}

/** K `[1, heads, slots, width]` and V `[1, heads, headDim, slots]` of some tokens of some heads. */
class Store {
  constructor(ort, { heads, slots, width, headDim, firstHead = 0 }) {
    Object.assign(this, { ort, heads, slots, width, headDim, firstHead });
    // Zeros: what a slot without a token holds is multiplied by 0, so it must be finite.
    this.keys = new Float32Array(heads * slots * width);
    this.values = new Float32Array(heads * headDim * slots);
    // Tensors over the arrays, not copies of them.
    this.tensors = {
      key: new ort.Tensor("float32", this.keys, [1, heads, slots, width]),
      value: new ort.Tensor("float32", this.values, [1, heads, headDim, slots]),
    };
  }

  /** Copy `count` tokens from slot `from` of a store that has this one's heads and more into slot `to`. */
  take(other, from, to, count) {
    for (let head = 0; head < this.heads; head++) {
      const otherHead = this.firstHead - other.firstHead + head;
      for (let i = 0; i < count; i++) {
        // A key's kept channels come first.
        const start = (otherHead * other.slots + from + i) * other.width;
        const key = other.keys.subarray(start, start + this.width);
        this.keys.set(key, (head * this.slots + to + i) * this.width);
      }
      for (let channel = 0; channel < this.headDim; channel++) {
        const start = (otherHead * this.headDim + channel) * other.slots + from;
        const values = other.values.subarray(start, start + count);
        this.values.set(values, (head * this.headDim + channel) * this.slots + to);
      }
    }
  }

  /** Return a longer store of the same tokens. */
  grown(slots) {
    const longer = new Store(this.ort, { ...this, slots });
    longer.take(this, 0, 0, this.slots);
    return longer;
  }
}

/** The tokens that the model has read: `length` of them, `prunedLength` of these in the pruned stores. */
class Cache {
  constructor(model) {
    const { sink_size: sink, recent_size: recent, flush_size: flush } = model.description;
    Object.assign(this, { model, sink, recent, flush, length: 0, prunedLength: 0 });
    // A graph's input is never empty.
    this.windows = this.newWindows(this.unlikeSink(1));
    this.pruned = this.newPruned(1);
  }

  /** Read a prompt, `chunk` tokens at a time, split it and return the logits `[V]` after it. */
  async readPrompt(prompt, chunk) {
    let logits;
    for (let start = 0; start < prompt.length; start += chunk) {
      const tokens = prompt.slice(start, start + chunk);
      logits = await this.run(tokens);
      const stop = start + tokens.length;
      if (stop > this.windows[0].slots) {
        // Twice what is there, since every slot costs time, empty or not.
        const slots = this.unlikeSink(Math.min(2 * stop, prompt.length));
        this.windows = this.windows.map((window) => window.grown(slots));
        this.pass = undefined;
      }
      this.windows.forEach((window, layer) => window.take(this.present[layer], 0, start, tokens.length));
      this.length = stop;
    }
    this.split();
    return logits;
  }

  /** Read one token more and return the logits `[V]` after it, valid until the next one is read. */
  async decode(token) {
    this.makeRoom();
    const logits = await this.run([token]);
    const slot = this.slotOf(this.length);
    this.windows.forEach((window, layer) => window.take(this.present[layer], 0, slot, 1));
    this.length += 1;
    return logits;
  }

  /** Run the graph; arrays for its inputs and outputs are made anew only where a shape has changed. */
  async run(tokens) {
    if (this.pass?.numNew !== tokens.length) this.pass = this.newPass(tokens.length);
    const { feeds, fetches } = this.pass;
    feeds.input_ids.data.set(tokens.map(BigInt));
    feeds.past_lengths.data[0] = BigInt(this.length);
    feeds.pruned_lengths.data[0] = BigInt(this.prunedLength);
    feeds.logits_index.data[0] = BigInt(tokens.length - 1);
    await this.model.session.run(feeds, fetches);
    return fetches.logits.data;
  }

  newPass(numNew) {
    const { ort, description } = this.model;
    const vocabSize = description.model.vocab_size;
    const integers = (...dims) => new ort.Tensor("int64", new BigInt64Array(dims.at(-1)), dims);
    const feeds = {
      input_ids: integers(1, numNew),
      past_lengths: integers(1),
      pruned_lengths: integers(1),
      logits_index: integers(1, 1),
    };
    const fetches = { logits: new ort.Tensor("float32", new Float32Array(vocabSize), [1, 1, vocabSize]) };
    const name = (tensors, prefix, store) => {
      for (const [part, tensor] of Object.entries(store.tensors)) tensors[`${prefix}.${part}`] = tensor;
    };
    this.present = this.newWindows(numNew);
    this.present.forEach((store, layer) => name(fetches, `present.${layer}`, store));
    this.windows.forEach((store, layer) => name(feeds, `past_key_values.${layer}.window`, store));
    this.pruned.forEach((stores, layer) => {
      for (const store of stores) name(feeds, `past_key_values.${layer}.pruned.${store.width}`, store);
    });
    return { numNew, feeds, fetches };
  }

  /** Part the prompt, which lies whole in the windows, into sink, pruned and recent tokens. */
  split() {
    const { sink, recent, length, windows: prompt } = this;
    const numPruned = Math.max(length - sink - recent, 0);
    this.windows = this.newWindows(this.slotsFor(length));
    this.pruned = this.newPruned(capacityFor(numPruned));
    const kept = [...this.runs(0, Math.min(length, sink)), ...this.runs(sink + numPruned, length)];
    prompt.forEach((whole, layer) => {
      for (const [token, slot, count] of kept) this.windows[layer].take(whole, token, slot, count);
      for (const store of this.pruned[layer]) store.take(whole, sink, 0, numPruned);
    });
    this.prunedLength = numPruned;
    this.pass = undefined;
  }

  /** Make slots for one more token; where the window has them all, move its oldest tokens to the pruned stores. */
  makeRoom() {
    const { sink, recent, flush, prunedLength } = this;
    if (Math.min(this.length + 1, sink + recent + flush) > this.windows[0].slots) {
      const slots = this.slotsFor(this.length + 1);
      this.windows = this.windows.map((window) => window.grown(slots));
      this.pass = undefined;
    }
    const oldest = sink + prunedLength;
    if (this.length - oldest < recent + flush) return;
    const stores = this.pruned.flat();
    if (stores.length > 0 && prunedLength + flush > stores[0].slots) {
      const slots = capacityFor(prunedLength + flush);
      this.pruned = this.pruned.map((layer) => layer.map((store) => store.grown(slots)));
      this.pass = undefined;
    }
    const moved = [...this.runs(oldest, oldest + flush)];
    this.windows.forEach((window, layer) => {
      for (const store of this.pruned[layer]) {
        for (const [token, slot, count] of moved) store.take(window, slot, token - sink, count);
      }
    });
    this.prunedLength += flush;
  }

  slotsFor(numTokens) {
    return this.unlikeSink(Math.min(this.sink + this.recent + this.flush, capacityFor(numTokens)));
  }

  /** The graph divides by what a window has more or less than the sink. */
  unlikeSink(slots) {
    return slots === this.sink ? slots + 1 : slots;
  }

  slotOf(token) {
    return token < this.sink ? token : this.sink + ((token - this.sink) % (this.recent + this.flush));
  }

  /** Yield tokens `first` to `stop` as [token, slot, count], where token + i lies in slot + i. */
  *runs(first, stop) {
    for (let token = first; token < stop; ) {
      const slot = this.slotOf(token);
      const count = Math.min(stop - token, this.sink + this.recent + this.flush - slot);
      yield [token, slot, count];
      token += count;
    }
  }

  newWindows(slots) {
    const { ort, description } = this.model;
    const { num_key_value_heads: heads, head_dim: headDim } = description.model;
    return description.buckets.map(() => new Store(ort, { heads, slots, width: headDim, headDim }));
  }

  /** Per layer, a store for each bucket of heads that see pruned tokens. */
  newPruned(slots) {
    const { ort, description } = this.model;
    const headDim = description.model.head_dim;
    const newStore = ({ width, heads: [firstHead, stop] }) =>
      new Store(ort, { heads: stop - firstHead, slots, width, headDim, firstHead });
    return description.buckets.map((layer) => layer.filter(({ width }) => width > 0).map(newStore));
  }
}

/** Read leank_onnx.json and look whether the graph's files are there. */
function readDescription(folder) {
  const path = join(folder, "leank_onnx.json");
  const remedy = "pass a folder that `leank-convert export --format onnx` wrote";
  requireThat(existsSync(path), `\`${path}\` does not exist: ${remedy}`);
  let description;
  try {
    description = JSON.parse(readFileSync(path, "utf8"));
  } catch (error) {
    throw new LeanKOnnxError(`\`${path}\` is no JSON: ${error.message}; export the model again`);
  }
  requireThat(
    description?.format_version === FORMAT_VERSION,
    `\`${path}\`: format_version is ${description?.format_version}, this leank_onnx.mjs reads ` +
      `${FORMAT_VERSION}: use the leank_onnx.mjs that lies beside it, or export the model again`,
  );
  const sizes = ["sink_size", "recent_size", "flush_size"];
  const needed = ["dtype", "model", ...sizes, "buckets", "eos_token_ids", "files"];
  const lacking = needed.find((key) => description[key] === undefined);
  requireThat(lacking === undefined, `\`${path}\` lacks \`${lacking}\`; export the model again`);
  requireThat(
    description.dtype === "float32",
    `\`${path}\`: dtype is ${description.dtype}, this host runs float32 alone: export with ` +
      "--dtype float32, or run leank_onnx.py",
  );
  const modelSizes = ["vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings"];
  const values = { ...description, ...description.model };
  for (const key of [...sizes, ...modelSizes]) {
    const size = values[key];
    const least = key === "sink_size" || key === "recent_size" ? 0 : 1;
    const message = `\`${path}\`: ${key} is ${JSON.stringify(size)}, not ${least} or more`;
    requireThat(Number.isInteger(size) && size >= least, `${message}; export the model again`);
  }
  const graph = Object.keys(description.files).filter((name) => name.startsWith("model.onnx"));
  const missing = graph.map((name) => join(folder, name)).find((file) => !existsSync(file));
  requireThat(
    missing === undefined,
    `\`${missing}\` is missing: copy it from where the model was exported, it belongs to leank_onnx.json`,
  );
  return description;
}

/** Import a package, or say how to install it. */
export async function importPackage(name) {
  try {
    return await import(name);
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
    const remedy = `\`npm install ${name}\` in the folder of leank_onnx.mjs, or above it`;
    throw new LeanKOnnxError(`${name} is not installed: ${remedy}`);
  }
}

/** Slots to allocate for pruned tokens: a sixteenth more, so that copying per token stays constant. */
function capacityFor(numTokens) {
  return Math.max(Math.ceil((numTokens * 17) / 16 / CAPACITY_STEP), 1) * CAPACITY_STEP;
}

function requireThat(condition, message) {
  if (!condition) throw new LeanKOnnxError(message);
}

function requireCount(name, value) {
  requireThat(Number.isInteger(value) && value >= 1, `${name} is ${value}: pass 1 or more`);
}

/** Say where an answer may go beyond what the model was made for. */
function noteLength({ description }, ids, { maxNewTokens = 128 }) {
  const most = ids.length + maxNewTokens;
  const known = description.model.max_position_embeddings;
  if (!(most > known)) return; // NaN is refused elsewhere
  process.stderr.write(
    `note: prompt and answer may have ${most} tokens, the model's max_position_embeddings is ${known}: ` +
      "what lies beyond may make no sense\n",
  );
}

/** Answer one prompt on the command line as the answer comes, a token a line, and return the exit code. */
async function main() {
  const string = { type: "string" };
  const numbers = { "max-new-tokens": string, "prompt-chunk": string, threads: string };
  const flag = { type: "boolean" };
  const options = { tokens: string, prompt: string, plain: flag, help: { ...flag, short: "h" }, ...numbers };
  // What is no number becomes NaN, which is refused as such.
  const number = (text) => (text === undefined ? undefined : text.trim() === "" ? NaN : Number(text));
  try {
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    const { tokens, prompt, plain } = values;
    if (values.help) {
      process.stdout.write(`${USAGE}\n`);
      return 0;
    }
    requireThat(positionals.length === 1 && (tokens === undefined) !== (prompt === undefined), USAGE);
    const model = await LeanKOnnx.load(positionals[0], { threads: number(values.threads) });
    const limits = {
      maxNewTokens: number(values["max-new-tokens"]),
      promptChunk: number(values["prompt-chunk"]),
    };
    if (tokens !== undefined) {
      const ids = tokens.split(",").map(number);
      noteLength(model, ids, limits);
      const answer = model.generate(ids, limits);
      for await (const token of answer) process.stdout.write(`${token}\n`);
      return 0;
    }
    const { Text } = await import("./leank_onnx_text.mjs");
    const text = await Text.load(positionals[0]);
    const asChat = text.chatTemplate !== undefined && !plain;
    const content = prompt === "-" ? readFileSync(0, "utf8") : prompt;
    const ids = asChat ? await text.encodeChat([{ role: "user", content }]) : text.encode(content);
    noteLength(model, ids, limits);
    for await (const piece of text.stream(model.generate(ids, limits))) process.stdout.write(piece);
    process.stdout.write("\n");
    return 0;
  } catch (error) {
    const isUsersMistake = error instanceof LeanKOnnxError || error.code?.startsWith("ERR_PARSE_ARGS");
    if (!isUsersMistake) throw error;
    process.stderr.write(`error: ${error.message}\n`);
    return 2;
  }
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  // Whoever reads has enough: as the signal would end it.
  process.stdout.on("error", (error) => process.exit(error.code === "EPIPE" ? 141 : 1));
  // No `await`: leank_onnx_text.mjs imports this file, which has to be whole by then.
  main().then((code) => (process.exitCode = code));
}
