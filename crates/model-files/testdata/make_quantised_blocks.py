"""Writes quantised_blocks.jsonl: random blocks of every number type that model-files reads, and their values.

Run in this folder with `python make_quantised_blocks.py > quantised_blocks.jsonl`; made with gguf 0.19.0, numpy 2.4.6. One line
for a type: `blocks` is the hex of four random blocks (of 64 numbers for the plain types), whose f16 scales were replaced by
random finite ones of both signs, small ones included; `values` is the hex of what `gguf.quants.dequantize` makes of them, f32 in
little endian. gguf does not convert F32, F16 and BF16 to f32 with the same function; numpy's own conversion does it here.
"""

import json

import numpy
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

# Where the f16 scales of a block are.
SCALES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}
ORDER = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]


def scale(random):
    # From f16's smallest subnormals to about 0.1.
    return numpy.float16(random.choice([-1, 1]) * 2.0 ** random.uniform(-24, -3))


def main():
    random = numpy.random.default_rng(16)
    for kind in ORDER:
        elements, size = GGML_QUANT_SIZES[kind]
        if kind in SCALES:
            blocks = random.integers(0, 256, (4, size), dtype=numpy.uint8)
            for block in blocks:
                for at in SCALES[kind]:
                    block[at : at + 2] = numpy.frombuffer(scale(random).tobytes(), numpy.uint8)
            values = dequantize(blocks.reshape(-1), kind)
        else:
            plain = (random.standard_normal(64) * 2.0 ** random.uniform(-24, 3, 64)).astype(numpy.float32)
            if kind == Type.F32:
                blocks, values = plain, plain
            elif kind == Type.F16:
                blocks = plain.astype(numpy.float16)
                values = blocks.astype(numpy.float32)
            else:
                blocks = (plain.view(numpy.uint32) >> 16).astype(numpy.uint16)
                values = dequantize(blocks.view(numpy.uint8), kind)
        values = numpy.ascontiguousarray(values, dtype="<f4")
        assert values.size in (64, 4 * elements) and numpy.isfinite(values).all()
        line = {"type": kind.name, "type_id": int(kind), "blocks": blocks.tobytes().hex(), "values": values.tobytes().hex()}
        print(json.dumps(line))


main()
