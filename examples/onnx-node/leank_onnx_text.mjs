// Text for leank_onnx.mjs: prompts to tokens, tokens to text. Needs @huggingface/tokenizers, and
// @huggingface/jinja where the model has a chat template.
//
//     const text = await Text.load("FOLDER");
//     const prompt = await text.encodeChat([{ role: "user", content: "Why is the sky blue?" }]);
//     for await (const piece of text.stream(model.generate(prompt))) process.stdout.write(piece);

import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";

import { LeanKOnnxError, importPackage } from "./leank_onnx.mjs";

const SPECIAL_TOKENS = ["bos_token", "eos_token", "pad_token", "unk_token"];

/** The tokenizer of an exported folder, and its chat template, undefined where it has none. */
export class Text {
  static async load(folder) {
    const file = join(folder, "tokenizer.json");
    if (!existsSync(file)) throw new LeanKOnnxError(`\`${file}\` does not exist: pass tokens (--tokens)`);
    const { Tokenizer } = await importPackage("@huggingface/tokenizers");
    const configFile = join(folder, "tokenizer_config.json");
    const config = existsSync(configFile) ? readJson(configFile) : {};
    try {
      const tokenizer = new Tokenizer(readJson(file), config);
      return new Text(tokenizer, config, readChatTemplate(folder, config));
    } catch (error) {
      if (error instanceof LeanKOnnxError) throw error;
      throw new LeanKOnnxError(`\`${file}\` cannot be read: ${error.message}; copy it again`);
    }
  }

  constructor(tokenizer, config, chatTemplate) {
    Object.assign(this, { tokenizer, config, chatTemplate });
  }

  /** Return the tokens of a text, with those that the tokenizer puts around it. */
  encode(text) {
    return this.tokenizer.encode(text).ids;
  }

  /** Return the tokens of a conversation that the model is to answer. */
  async encodeChat(messages) {
    if (!this.chatTemplate) throw new LeanKOnnxError("the model has no chat template: use encode()");
    const { Template } = await importPackage("@huggingface/jinja");
    // Older files write a token with its properties.
    const special = SPECIAL_TOKENS.map((name) => [name, this.config[name]?.content ?? this.config[name]]);
    const known = Object.fromEntries(special.filter(([, token]) => typeof token === "string"));
    let text;
    try {
      const variables = { messages, tools: null, documents: null, add_generation_prompt: true, ...known };
      text = new Template(this.chatTemplate).render(variables);
    } catch (error) {
      throw new LeanKOnnxError(`the chat template failed: ${error.message}; pass plain text (--plain)`);
    }
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  /** Yield the text of tokens in pieces, as soon as a piece is whole. */
  async *stream(tokens) {
    const ids = [];
    let text = "";
    let shown = "";
    for await (const token of tokens) {
      ids.push(token);
      text = this.tokenizer.decode(ids, { skip_special_tokens: true });
      // Half of a character decodes to U+FFFD: wait for the other half.
      if (text.endsWith("\ufffd") || text === shown) continue;
      yield text.slice(shown.length);
      shown = text;
    }
    if (text !== shown) yield text.slice(shown.length);
  }
}

function readChatTemplate(folder, config) {
  const file = join(folder, "chat_template.jinja");
  if (existsSync(file)) return readFileSync(file, "utf8");
  let template = config.chat_template;
  // Several by name, as older files hold them.
  if (Array.isArray(template)) template = template.find((entry) => entry?.name === "default")?.template;
  return typeof template === "string" ? template : undefined;
}

function readJson(file) {
  let content;
  try {
    content = JSON.parse(readFileSync(file, "utf8"));
  } catch (error) {
    throw new LeanKOnnxError(`\`${file}\` is no JSON: ${error.message}; copy it again`);
  }
  if (content === null || typeof content !== "object" || Array.isArray(content)) {
    throw new LeanKOnnxError(`\`${file}\` is no JSON object; copy it again`);
  }
  return content;
}
