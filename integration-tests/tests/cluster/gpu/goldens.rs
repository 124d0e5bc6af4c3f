//! One layer of the real model on the false CUDA driver, with the own products, beside the CPU engine in exact arithmetic. The
//! example `gpu_goldens` runs the whole model with the false cuBLASLt, by hand: interpreted, it takes too long for each change.

use std::path::{Path, PathBuf};

use integration_tests::cluster::model_path;
use integration_tests::goldens;
use integration_tests::gpu_goldens::{GpuCluster, GpuNode, reference};
use model_files::gguf::{GgufFile, MetadataValue};
use model_files::model::Model;
use model_files::test_kit::TinyModel;

/// Tokens of the cut model. In the whole vocabulary the head has eight times as many weights as the layer, and the interpreter
/// would compute little else.
const TOKENS: usize = 1_024;
/// "The the of a years", all below [`TOKENS`]. The five greedy tokens of the cut model differ from each other, and each is well ahead
/// of the second best one.
const PROMPT: [u32; 5] = [504, 260, 282, 253, 929];
const OUTPUT_TOKENS: usize = 5;

/// With the folder of compiled kernels that other tests fill, too.
fn node(model: PathBuf) -> GpuNode {
    GpuNode {
        model,
        gpu_numerics: "invariant",
        kernel_cache: Some(super::COMPILED.into()),
    }
}

/// The real model without its layers behind the first one, and without its tokens behind the first [`TOKENS`].
fn write_one_layer(path: &Path) {
    let real_path = model_path().expect("the real model");
    let real = GgufFile::open(&real_path).expect("a GGUF file");
    let model = Model::open(&real_path).expect("a model");
    let config = model.config();
    let tiny = TinyModel {
        layer_count: 1,
        head_count: config.head_count,
        kv_head_count: config.kv_head_count,
        head_dim: config.head_dim,
        ffn_size: config.ffn_size,
        ..TinyModel::default()
    };
    let mut file = tiny.build();
    for built in &mut file.tensors {
        let tensor = real.tensor(&built.name).expect("the same names in both files");
        built.type_id = tensor.kind.id();
        built.dims = tensor.dims.to_vec();
        built.bytes = tensor.bytes.to_vec();
        if built.name == config.architecture.token_embedding {
            built.dims[1] = TOKENS as u64;
            built.bytes.truncate(tensor.bytes.len() / tensor.rows() * TOKENS);
        }
    }
    let of_first_tokens = |key: &str| match real.metadata(key) {
        Some(MetadataValue::Array(values)) => MetadataValue::Array(values[..TOKENS].to_vec()),
        other => panic!("{key} is {other:?}"),
    };
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"] {
        file = file.metadata(key, of_first_tokens(key));
    }
    file.metadata("llama.vocab_size", MetadataValue::U32(TOKENS as u32))
        .metadata("llama.rope.freq_base", MetadataValue::F32(config.rope.base))
        .write(path)
        .expect("room for a layer");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_layer_with_the_own_products_keeps_to_the_thresholds_of_bf16() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("one-layer.gguf");
    write_one_layer(&model);
    let row = reference(&model, &PROMPT, OUTPUT_TOKENS).await.expect("the CPU engine");
    let threshold = goldens::BF16.margin;
    assert!(row.margin.iter().all(|margin| *margin > threshold), "{row:?}");
    let mut gpu = GpuCluster::start(node(model)).await.expect("it starts");
    gpu.prefill(&row).await.expect("prefill");
    gpu.decode(&row, 3).await.expect("decode");
    gpu.finish().await.expect("inside the thresholds, and nothing found");
}
