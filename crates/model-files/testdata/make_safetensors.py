"""Writes python.safetensors with the safetensors package, whose writer is not ours.

Run in this folder with `python make_safetensors.py`; made with safetensors 0.8.0, numpy 2.4.6. The numbers are what folder/tests.rs
expects.
"""

import numpy
from safetensors.numpy import save_file

save_file(
    {
        "b": numpy.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], numpy.float32),
        "a": numpy.array([0.5, -0.25, 0.125], numpy.float16),
        "ids": numpy.array([1, 2], numpy.int64),
    },
    "python.safetensors",
    metadata={"format": "pt", "note": "two \"quoted\" words"},
)
