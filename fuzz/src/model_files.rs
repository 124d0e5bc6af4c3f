//! Files of models, which people fetch from anywhere: each is refused with a reason, or everything in it can be read.

use model_files::gguf::GgmlType;
use model_files::model::Model;
use model_files::test_kit::{TinyFolder, TinyModel};

use crate::folder::Folder;

/// A whole model of a few kilobytes.
pub(crate) fn small() -> TinyModel {
    TinyModel {
        layer_count: 1,
        head_count: 1,
        kv_head_count: 1,
        head_dim: 8,
        ffn_size: 8,
        matrix_kind: GgmlType::F16,
        ..TinyModel::default()
    }
}

thread_local! {
    static GGUF: Folder = Folder::new();
    static FOLDER: (Folder, [Vec<u8>; 2]) = sound_folder();
}

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

fn sound_folder() -> (Folder, [Vec<u8>; 2]) {
    let folder = Folder::new();
    let file = folder.write("small.gguf", &small().build().build());
    let model = Model::open(&file).expect("a sound model");
    TinyFolder {
        model: &model,
        shards: 1,
    }
    .write(folder.path());
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("a file of the folder");
    let sound = [read(CONFIG), read(WEIGHTS)];
    drop(model);
    folder.remove("small.gguf");
    (folder, sound)
}

pub(crate) fn gguf(data: &[u8]) {
    GGUF.with(|folder| {
        let file = folder.write("model.gguf", data);
        if let Ok(model) = Model::open(&file) {
            look_at_all(&model);
        }
    });
}

/// The weights of a folder whose other files are sound.
pub(crate) fn safetensors(data: &[u8]) {
    FOLDER.with(|(folder, [config, _])| {
        folder.write(CONFIG, config);
        folder.write(WEIGHTS, data);
        open(folder);
    });
}

/// The configuration of a folder whose other files are sound.
pub(crate) fn config(data: &[u8]) {
    FOLDER.with(|(folder, [_, weights])| {
        folder.write(CONFIG, data);
        folder.write(WEIGHTS, weights);
        open(folder);
    });
}

fn open(folder: &Folder) {
    if let Ok(model) = Model::open(folder.path()) {
        look_at_all(&model);
    }
}

fn look_at_all(model: &Model) {
    let config = model.config();
    assert!(config.layer_count > 0 && config.vocab_size > 0 && config.kv_size() > 0);
    assert!((0..config.layer_count).all(|layer| config.window_of(layer) != Some(0)));
    model.parameter_count().expect("every tensor is there");
    let norm = model
        .vector("output_norm.weight")
        .expect("the norm that every model has");
    assert_eq!(norm.len(), config.hidden_size);
    let _ = model.content_sha256();
    if let Ok(tokenizer) = model.tokenizer() {
        let tokens = tokenizer.encode("Hello wörld", true).unwrap_or_default();
        assert!(tokens.iter().all(|token| tokenizer.token_bytes(*token).is_some()));
    }
}
