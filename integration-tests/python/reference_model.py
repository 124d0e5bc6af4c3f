"""Golden outputs of tiny models by NumPy in double precision, without any code of the engine or of a GGUF library.

    cargo run --release -p engine --example tiny_models -- FOLDER
    python3 integration-tests/python/reference_model.py FOLDER integration-tests/data/golden

It writes the golden files of all architectures and types: see integration-tests/data/golden/README.md, which has the
fields, too. NumPy 2.4.6 with Python 3.11 wrote those in the repository. The formulas are those of the models' papers, of
transformers and of llama.cpp; a whole sequence is computed anew for each token.
"""

import json
import math
import pathlib
import struct
import sys

import numpy as np

# By architecture. pairs: what RoPE turns together, (i, i + n / 2) or (2i, 2i + 1). every: each such layer, counted from one,
# has no window, in models with one (0: all have it).
ARCHITECTURES = {
    "llama": dict(pairs="neighbours"),
    "qwen2": dict(pairs="halves", bias=True),
    "qwen3": dict(pairs="halves", head_norms=True),
    "gemma2": dict(pairs="halves", gelu=True, post_norms=True, scaled_embedding=True, every=2),
    "gemma3": dict(pairs="halves", gelu=True, post_norms=True, scaled_embedding=True, every=6, head_norms=True, window_base=10_000.0),
    "phi3": dict(pairs="halves", fused=True),
}
OUTPUTS = 24
PROMPTS = [("short", 5), ("middle", 40), ("long", 100)]


def halves(raw):
    return raw.copy().view("<f2").astype(np.float64)


def nibbles(raw):
    """[block][byte] to [block][element]: the low nibbles first."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float64)


def fifth_bits(raw):
    return np.unpackbits(raw, axis=1, bitorder="little").astype(np.float64) * 16


def k_scales(raw):
    """The eight 6-bit scales and the eight 6-bit minima in 12 bytes."""
    low, middle, high = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float64), minima.astype(np.float64)


def k_nibbles(raw):
    """128 bytes to eight groups of 32: each 32 bytes hold two groups."""
    pairs = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32).astype(np.float64)


def q4_k(b):
    scales, minima = k_scales(b[:, 4:16])
    return k_nibbles(b[:, 16:]) * (halves(b[:, 0:2]) * scales)[:, :, None] - (halves(b[:, 2:4]) * minima)[:, :, None]


def q5_k(b):
    scales, minima = k_scales(b[:, 4:16])
    fifths = np.unpackbits(b[:, 16:48].reshape(-1, 32, 1), axis=2, bitorder="little").transpose(0, 2, 1)
    quants = k_nibbles(b[:, 48:]) + 16.0 * fifths
    return quants * (halves(b[:, 0:2]) * scales)[:, :, None] - (halves(b[:, 2:4]) * minima)[:, :, None]


def q6_k(b):
    values = np.empty((len(b), 256))
    scales = b[:, 192:208].view(np.int8).astype(np.float64) * halves(b[:, 208:210])
    for half in range(2):
        low, high = b[:, 64 * half : 64 * half + 64], b[:, 128 + 32 * half : 160 + 32 * half]
        for group in range(4):
            part = low[:, 32 * (group % 2) : 32 * (group % 2) + 32]
            nibble = part & 15 if group < 2 else part >> 4
            at = 128 * half + 32 * group
            values[:, at : at + 32] = (nibble | (((high >> (2 * group)) & 3) << 4)).astype(np.float64) - 32
    return values * np.repeat(scales, 16, axis=1)


# By number in the file: elements and bytes of a block, and what makes [block][element] of [block][byte].
TYPES = {
    0: (1, 4, lambda b: b.copy().view("<f4")),
    1: (1, 2, halves),
    2: (32, 18, lambda b: (nibbles(b[:, 2:]) - 8) * halves(b[:, 0:2])),
    3: (32, 20, lambda b: nibbles(b[:, 4:]) * halves(b[:, 0:2]) + halves(b[:, 2:4])),
    6: (32, 22, lambda b: (nibbles(b[:, 6:]) + fifth_bits(b[:, 2:6]) - 16) * halves(b[:, 0:2])),
    7: (32, 24, lambda b: (nibbles(b[:, 8:]) + fifth_bits(b[:, 4:8])) * halves(b[:, 0:2]) + halves(b[:, 2:4])),
    8: (32, 34, lambda b: b[:, 2:].view(np.int8) * halves(b[:, 0:2])),
    12: (256, 144, q4_k),
    13: (256, 176, q5_k),
    14: (256, 210, q6_k),
    30: (1, 2, lambda b: (b.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)),
}


class Gguf:
    """Metadata, and tensors as arrays of rows."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, path):
        self.data = path.read_bytes()
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
        elements, size, decode = TYPES[kind]
        blocks = math.prod(dims) // elements
        raw = np.frombuffer(self.data, np.uint8, blocks * size, at).reshape(blocks, size)
        return np.asarray(decode(raw), np.float64).reshape(dims[::-1])


class Model:
    def __init__(self, file):
        self.tensors, name = file.tensors, file.keys["general.architecture"]
        self.facts = ARCHITECTURES[name]
        key = lambda key, default=None: file.keys.get(f"{name}.{key}", default)
        self.layers, self.heads, self.kv_heads = key("block_count"), key("attention.head_count"), key("attention.head_count_kv")
        self.hidden, self.epsilon = key("embedding_length"), key("attention.layer_norm_rms_epsilon")
        self.size = key("attention.key_length", self.hidden // self.heads)
        self.window = key("attention.sliding_window")
        self.score_cap, self.logit_cap = key("attn_logit_softcapping"), key("final_logit_softcapping")
        self.ffn, self.dims = key("feed_forward_length"), key("rope.dimension_count", self.size)
        speeds = key("rope.freq_base") ** (-2 * np.arange(self.dims // 2) / self.dims)
        self.magnitude = key("rope.scaling.attn_factor", 1.0)
        if key("rope.scaling.type") == "linear":
            speeds = speeds / key("rope.scaling.factor")
        if key("rope.scaling.type") == "longrope":
            is_long = key("context_length") > key("rope.scaling.original_context_length")
            speeds = speeds / self.tensors["rope_factors_long.weight" if is_long else "rope_factors_short.weight"]
        if "rope_freqs.weight" in self.tensors:
            speeds = speeds / self.tensors["rope_freqs.weight"]
        self.speeds = self.window_speeds = speeds
        if "window_base" in self.facts:
            self.window_speeds = self.facts["window_base"] ** (-2 * np.arange(self.dims // 2) / self.dims)

    def has_window(self, layer):
        every = self.facts.get("every", 0)
        return self.window is not None and not (every and (layer + 1) % every == 0)

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self.tensors[name]

    def turn(self, heads, speeds):
        """[token][head][value]: each pair turns by the token's position times its speed."""
        angles = np.arange(len(heads))[:, None, None] * speeds
        cos, sin = np.cos(angles) * self.magnitude, np.sin(angles) * self.magnitude
        out, pairs = heads.copy(), np.arange(self.dims // 2)
        first, second = (2 * pairs, 2 * pairs + 1) if self.facts["pairs"] == "neighbours" else (pairs, pairs + self.dims // 2)
        a, b = heads[:, :, first], heads[:, :, second]
        out[:, :, first], out[:, :, second] = a * cos - b * sin, a * sin + b * cos
        return out

    def projections(self, x, tensor):
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        if self.facts.get("fused"):
            parts = np.split(x @ tensor("attn_qkv.weight").T, np.cumsum(sizes)[:2], axis=1)
        else:
            parts = [x @ tensor(f"attn_{which}.weight").T for which in "qkv"]
        if self.facts.get("bias"):
            parts = [part + tensor(f"attn_{which}.bias") for part, which in zip(parts, "qkv")]
        return [part.reshape(len(x), -1, self.size) for part in parts]

    def attention(self, x, layer, tensor):
        q, k, v = self.projections(x, tensor)
        if self.facts.get("head_norms"):
            q, k = self.norm(q, f"blk.{layer}.attn_q_norm.weight"), self.norm(k, f"blk.{layer}.attn_k_norm.weight")
        speeds = self.window_speeds if self.has_window(layer) else self.speeds
        q, k = self.turn(q, speeds), self.turn(k, speeds)
        group = self.heads // self.kv_heads
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) / math.sqrt(self.size)
        if self.score_cap:
            scores = self.score_cap * np.tanh(scores / self.score_cap)
        age = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
        seen = (age >= 0) & (age < (self.window if self.has_window(layer) else len(x)))
        weights = np.where(seen, np.exp(scores - np.max(np.where(seen, scores, -np.inf), axis=2, keepdims=True)), 0.0)
        mixed = np.einsum("hqk,khd->qhd", weights / np.sum(weights, axis=2, keepdims=True), np.repeat(v, group, axis=1))
        return mixed.reshape(len(x), -1) @ tensor("attn_output.weight").T

    def feed_forward(self, x, tensor):
        if self.facts.get("fused"):
            gate, up = np.split(x @ tensor("ffn_up.weight").T, 2, axis=1)
        else:
            gate, up = x @ tensor("ffn_gate.weight").T, x @ tensor("ffn_up.weight").T
        if self.facts.get("gelu"):
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return (gate * up) @ tensor("ffn_down.weight").T

    def states(self, tokens):
        """What the head gets, [token][value]."""
        x = self.tensors["token_embd.weight"][tokens]
        if self.facts.get("scaled_embedding"):
            x = x * math.sqrt(self.hidden)
        for layer in range(self.layers):
            tensor = lambda name: self.tensors[f"blk.{layer}.{name}"]
            post = (lambda y, name: self.norm(y, f"blk.{layer}.{name}")) if self.facts.get("post_norms") else (lambda y, _: y)
            x = x + post(self.attention(self.norm(x, f"blk.{layer}.attn_norm.weight"), layer, tensor), "post_attention_norm.weight")
            x = x + post(self.feed_forward(self.norm(x, f"blk.{layer}.ffn_norm.weight"), tensor), "post_ffw_norm.weight")
        return self.norm(x, "output_norm.weight")

    def logits(self, states):
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        logits = states @ head.T
        return self.logit_cap * np.tanh(logits / self.logit_cap) if self.logit_cap else logits


def golden(model, name, case, length):
    prompt = [(7 * i * i + 31 * i + length) % 259 for i in range(length)]
    outputs, margins, chosen = [], [], []
    for _ in range(OUTPUTS):
        logits = model.logits(model.states(prompt + outputs)[-1])
        logprobs = logits - np.max(logits) - math.log(np.sum(np.exp(logits - np.max(logits))))
        second, best = (int(token) for token in np.argsort(logprobs, kind="stable")[-2:])
        margins.append(round(float(logprobs[best] - logprobs[second]), 6))
        chosen.append(round(float(logprobs[best]), 6))
        outputs.append(best)
    last = [round(float(logit), 5) for logit in logits]
    return {
        "model": name,
        "id": case,
        "prompt_token_ids": prompt,
        "output_token_ids": outputs,
        "margin": margins,
        "logprob": chosen,
        "last_logits": last,
    }


def main():
    source, target = (pathlib.Path(argument) for argument in sys.argv[1:3])
    lines = {}
    for path in sorted(source.glob("*.*.gguf")):
        file, name = path.stem.split(".", 1)
        model = Model(Gguf(path))
        lines.setdefault(file, []).extend(json.dumps(golden(model, name, *prompt)) for prompt in PROMPTS)
    for file, cases in lines.items():
        (target / f"{file}.jsonl").write_text("\n".join(cases) + "\n")


if __name__ == "__main__":
    main()
