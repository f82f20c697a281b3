// What transformers.js makes of exported folders. Reads one JSON job per line of standard input:
//   {"folder": "/path/bundle", "kind": "classification", "dtype": "fp32", "rows": [["a text"], ["a text", "its pair"]]}
// and answers each with a line: [{"ids": [...], "outputs": {"logits": [...]}, "label": "..."}, ...]; kinds "causal" and
// "seq2seq" answer with the token ids that greedy generation gives, as {"ids": [...], "written": [...]}.
//   node interop_js.mjs DIR    DIR/node_modules holds @huggingface/transformers. See interop_js.py.

import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const library = createRequire(path.resolve(process.argv[2], "package.json"))("@huggingface/transformers");
const NEW_TOKENS = 12;
const CLASSES = {
  classification: "AutoModelForSequenceClassification",
  multilabel: "AutoModelForSequenceClassification",
  regression: "AutoModelForSequenceClassification",
  tagging: "AutoModelForTokenClassification",
  qa: "AutoModelForQuestionAnswering",
  embedding: "AutoModel",
  encoder: "AutoModel",
  causal: "AutoModelForCausalLM",
  seq2seq: "AutoModelForSeq2SeqLM",
};

library.env.allowRemoteModels = false;

async function answered(job) {
  library.env.localModelPath = path.dirname(job.folder) + path.sep;
  const name = path.basename(job.folder);
  const tokenizer = await library.AutoTokenizer.from_pretrained(name);
  const model = await library[CLASSES[job.kind]].from_pretrained(name, { dtype: job.dtype });
  const answers = [];
  for (const [text, pair] of job.rows) {
    const row = tokenizer(text, { text_pair: pair ?? null, truncation: true });
    const ids = Array.from(row.input_ids.data, Number);
    if (job.kind === "causal" || job.kind === "seq2seq") {
      const written = await model.generate({ ...row, max_new_tokens: NEW_TOKENS, do_sample: false });
      answers.push({ ids, written: Array.from(written.data, Number) });
      continue;
    }
    const outputs = Object.fromEntries(
      Object.entries(await model(row)).filter(([, value]) => value?.data).map(([key, value]) => [key, Array.from(value.data)]),
    );
    const best = outputs.logits?.indexOf(Math.max(...outputs.logits));
    answers.push({ ids, outputs, label: job.kind === "classification" ? model.config.id2label[best] : "" });
  }
  await model.dispose();
  return answers;
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await answered(JSON.parse(line))));
}
