"""Perplexity of a GGUF model by the program of reference_model.py, to set beside the engine's.

    cargo run --release -p engine --example perplexity -- --numerics exact --chunk 512 --chunks 4 --model MODEL --write-tokens TOKENS.json
    python3 integration-tests/python/reference_perplexity.py MODEL TOKENS.json

The first command writes the token ids of the chunks that it scored. As there, what follows the tokens of each chunk's second half counts.
"""

import json
import pathlib
import sys

import numpy as np
from reference_model import Gguf, Model


def negative_log_likelihoods(model, chunk):
    """Of the tokens behind each token of the chunk's second half."""
    states = model.states(chunk)
    for position in range(len(chunk) // 2, len(chunk) - 1):
        logits = model.logits(states[position])
        largest = np.max(logits)
        yield largest + np.log(np.sum(np.exp(logits - largest))) - logits[chunk[position + 1]]


def main():
    model = Model(Gguf(pathlib.Path(sys.argv[1])))
    with open(sys.argv[2]) as file:
        chunks = json.load(file)
    losses = [loss for chunk in chunks for loss in negative_log_likelihoods(model, chunk)]
    print(f"NumPy, double precision: perplexity {np.exp(np.mean(losses)):.3f} over {len(chunks)} chunks ({len(losses)} tokens counted)")


main()
