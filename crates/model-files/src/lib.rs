//! Owns reading model files: GGUF files and Hugging Face folders, the model's numbers, its tokenizer and its chat template.
//! Never runs a model, never touches the network, never trusts a file: every count and offset is checked before use.
//! Read first: `model::Model`, then `config::ModelConfig`, `arch`; the tokenizer and the chat template
//! build on the metadata alone.
//! Tests: beside the code; they need the real model file, see `test_kit::model_path`.

pub mod arch;
pub mod chat_template;
pub mod config;
mod files;
pub mod folder;
pub mod gguf;
pub mod info;
mod mapped_file;
pub mod model;
pub mod name;
pub mod tokenizer;

#[cfg(any(test, feature = "testing"))]
pub mod test_kit;
