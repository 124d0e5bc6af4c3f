"""Golden outputs of tiny models by plain Python in double precision, without any code of the engine.

    cargo run --release -p engine --example tiny_models -- ARCHITECTURE FOLDER
    python3 integration-tests/python/reference_model.py FOLDER/tied.gguf FOLDER/untied.gguf

Its output is the golden file of the architecture: see integration-tests/data/golden/README.md, which has the fields, too.
The formulas are those of the Llama and Qwen2 papers and of llama.cpp.
"""

import json
import math
import struct
import sys

# By architecture: the pairs that RoPE turns in a head of n numbers, and which projections have a bias.
ARCHITECTURES = {
    "llama": (lambda n: [(2 * i, 2 * i + 1) for i in range(n // 2)], ""),
}
OUTPUTS = 24
PROMPTS = [("short", 5), ("middle", 40), ("long", 100)]


class Gguf:
    """Metadata, and tensors as lists of rows. Types: F32 and Q8_0."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.at = 4
        _version, tensors, keys = self.take("I"), self.take("Q"), self.take("Q")
        self.keys = {}
        for _ in range(keys):
            name = self.text()
            self.keys[name] = self.value(self.take("I"))
        infos = [(self.text(), [self.take("Q") for _ in range(self.take("I"))], self.take("I"), self.take("Q")) for _ in range(tensors)]
        start = (self.at + 31) // 32 * 32
        self.tensors = {name: self.rows(dims, kind, start + offset) for name, dims, kind, offset in infos}

    def take(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self):
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            kind, count = self.take("I"), self.take("Q")
            return [self.value(kind) for _ in range(count)]
        return self.take(self.SCALARS[kind])

    def rows(self, dims, kind, at):
        count = math.prod(dims)
        if kind == 0:
            values = list(struct.unpack_from(f"<{count}f", self.data, at))
        elif kind == 8:
            values = []
            for block in range(count // 32):
                scale, *quants = struct.unpack_from("<e32b", self.data, at + 34 * block)
                values += [scale * quant for quant in quants]
        else:
            raise ValueError(f"tensor type {kind}")
        rows = [values[i : i + dims[0]] for i in range(0, count, dims[0])]
        return rows if len(dims) == 2 else rows[0]


class Model:
    def __init__(self, file):
        self.tensors, self.name = file.tensors, file.keys["general.architecture"]
        key = lambda name: file.keys[f"{self.name}.{name}"]
        self.pairs, self.biases = ARCHITECTURES[self.name]
        self.layers, self.heads = key("block_count"), key("attention.head_count")
        self.kv_heads, self.epsilon = key("attention.head_count_kv"), key("attention.layer_norm_rms_epsilon")
        self.size, self.base = key("embedding_length") // self.heads, key("rope.freq_base")
        self.cache = [([], []) for _ in range(self.layers)]

    def linear(self, name, x):
        return [sum(a * b for a, b in zip(row, x)) for row in self.tensors[name]]

    def norm(self, name, x):
        scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + self.epsilon)
        return [v * scale * w for v, w in zip(x, self.tensors[name])]

    def heads_of(self, layer, which, x):
        y = self.linear(f"blk.{layer}.attn_{which}.weight", x)
        if which in self.biases:
            y = [a + b for a, b in zip(y, self.tensors[f"blk.{layer}.attn_{which}.bias"])]
        return [y[i : i + self.size] for i in range(0, len(y), self.size)]

    def turn(self, head, position):
        out = list(head)
        for i, (a, b) in enumerate(self.pairs(self.size)):
            angle = position * self.base ** (-2 * i / self.size)
            out[a] = head[a] * math.cos(angle) - head[b] * math.sin(angle)
            out[b] = head[a] * math.sin(angle) + head[b] * math.cos(angle)
        return out

    def step(self, token):
        """The logprobs after one more token."""
        x = list(self.tensors["token_embd.weight"][token])
        for layer, (keys, values) in enumerate(self.cache):
            normed, position = self.norm(f"blk.{layer}.attn_norm.weight", x), len(keys)
            keys.append([self.turn(head, position) for head in self.heads_of(layer, "k", normed)])
            values.append(self.heads_of(layer, "v", normed))
            mixed = []
            for index, query in enumerate(self.heads_of(layer, "q", normed)):
                query, kv = self.turn(query, position), index * self.kv_heads // self.heads
                scores = [math.exp(sum(a * b for a, b in zip(query, key[kv])) / math.sqrt(self.size)) for key in keys]
                total = sum(scores)
                mixed += [sum(s * value[kv][i] for s, value in zip(scores, values)) / total for i in range(self.size)]
            x = [a + b for a, b in zip(x, self.linear(f"blk.{layer}.attn_output.weight", mixed))]
            normed = self.norm(f"blk.{layer}.ffn_norm.weight", x)
            gates = self.linear(f"blk.{layer}.ffn_gate.weight", normed)
            ups = self.linear(f"blk.{layer}.ffn_up.weight", normed)
            gated = [g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups)]
            x = [a + b for a, b in zip(x, self.linear(f"blk.{layer}.ffn_down.weight", gated))]
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        logits = self.linear(head, self.norm("output_norm.weight", x))
        total = math.log(sum(math.exp(v) for v in logits))
        return [v - total for v in logits]


def golden(file, name, length):
    model, prompt = Model(file), [(7 * i * i + 31 * i + length) % 259 for i in range(length)]
    for token in prompt:
        logprobs = model.step(token)
    outputs, margins, chosen = [], [], []
    for _ in range(OUTPUTS):
        second, best = sorted(range(len(logprobs)), key=logprobs.__getitem__)[-2:]
        outputs.append(best)
        margins.append(round(logprobs[best] - logprobs[second], 6))
        chosen.append(round(logprobs[best], 6))
        logprobs = model.step(best)
    return {"id": name, "prompt_token_ids": prompt, "output_token_ids": outputs, "margin": margins, "logprob": chosen}


for path in sys.argv[1:]:
    gguf = Gguf(path)
    for name, length in PROMPTS:
        print(json.dumps(golden(gguf, name, length)))
