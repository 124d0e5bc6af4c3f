//! The tensors that a model's numbers imply: each must be there with its shape, and no other may be.

use super::{ConfigError, ModelConfig, gguf_rope};
use crate::arch::{GateUp, Linear, Projections, in_layer};
use crate::files::Files;
use crate::gguf::GgmlType;

/// Shape and type that one tensor must have; `kind` is given where only one type will do.
struct Expected {
    name: String,
    dims: Vec<usize>,
    kind: Option<GgmlType>,
}

pub(super) fn check(files: &Files, config: &ModelConfig) -> Result<(), ConfigError> {
    let mut expected = expected_tensors(config);
    let factors = [gguf_rope::FACTORS, gguf_rope::SHORT_FACTORS, gguf_rope::LONG_FACTORS];
    expected.extend(
        files
            .tensor_names()
            .filter(|name| factors.contains(name))
            .map(|name| vector(name, config.rope.dims / 2)),
    );
    for tensor in &expected {
        let found = files.tensor(&tensor.name)?;
        let dims: Vec<u64> = tensor.dims.iter().map(|&dim| dim as u64).collect();
        if found.dims != dims {
            let found = found.dims.to_vec();
            return Err(ConfigError::WrongShape {
                tensor: tensor.name.clone(),
                found,
                expected: dims,
            });
        }
        // What is in a folder is plain numbers, and `Model::vector` reads all of them.
        if let (Some(kind), Files::Gguf(_)) = (tensor.kind, files)
            && kind != found.kind
        {
            return Err(ConfigError::WrongType {
                tensor: tensor.name.clone(),
                found: found.kind,
                expected: kind,
            });
        }
    }
    let names: std::collections::HashSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
    match files.tensor_names().find(|name| !names.contains(name)) {
        Some(name) => Err(ConfigError::UnexpectedTensor {
            tensor: name.to_owned(),
        }),
        None => Ok(()),
    }
}

fn vector(name: &str, length: usize) -> Expected {
    Expected {
        name: name.to_owned(),
        dims: vec![length],
        kind: Some(GgmlType::F32),
    }
}

fn expected_tensors(config: &ModelConfig) -> Vec<Expected> {
    let (hidden, kv, ffn) = (config.hidden_size, config.kv_size(), config.ffn_size);
    let facts = config.architecture;
    let matrix = |name: &str, columns, rows| Expected {
        name: name.to_owned(),
        dims: vec![columns, rows],
        kind: None,
    };
    let mut expected = vec![
        matrix(facts.token_embedding, hidden, config.vocab_size),
        vector(facts.output_norm, hidden),
    ];
    if !config.tied_embeddings {
        expected.push(matrix(facts.output, hidden, config.vocab_size));
    }
    let linear = |linear: Linear, columns, rows| {
        let bias = linear.bias.map(|bias| vector(bias, rows));
        std::iter::once(matrix(linear.weight, columns, rows)).chain(bias)
    };
    let query = config.query_size();
    let tensors = &facts.layer;
    for layer in 0..config.layer_count {
        let first = expected.len();
        expected.extend([
            vector(tensors.attention_norm, hidden),
            vector(tensors.ffn_norm, hidden),
            matrix(tensors.ffn_down, ffn, hidden),
        ]);
        match tensors.gate_up {
            GateUp::Separate { gate, up } => expected.extend([matrix(gate, hidden, ffn), matrix(up, hidden, ffn)]),
            GateUp::Fused(both) => expected.push(matrix(both, hidden, 2 * ffn)),
        }
        match tensors.projections {
            Projections::Separate { query: q, key, value } => {
                expected.extend(linear(q, hidden, query));
                expected.extend(linear(key, hidden, kv));
                expected.extend(linear(value, hidden, kv));
            }
            Projections::Fused(all) => expected.push(matrix(all, hidden, query + 2 * kv)),
        }
        expected.extend(linear(tensors.attention_output, query, hidden));
        let head_norms = [tensors.query_norm, tensors.key_norm];
        let post_norms = [tensors.post_attention_norm, tensors.post_ffn_norm];
        expected.extend(
            head_norms
                .into_iter()
                .flatten()
                .map(|name| vector(name, config.head_dim)),
        );
        expected.extend(post_norms.into_iter().flatten().map(|name| vector(name, hidden)));
        for tensor in &mut expected[first..] {
            tensor.name = in_layer(layer, &tensor.name);
        }
    }
    expected
}
