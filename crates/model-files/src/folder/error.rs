//! Everything that can be wrong with a Hugging Face folder, each with the culprit's name and the next step.

use std::io;
use std::path::PathBuf;

/// Why a folder was refused. None is worth a retry with the same folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    #[error("cannot read {}: {cause}; check the path and its permissions", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error(
        "the folder {} has no config.json: pass a folder as transformers saves and loads it, or a .gguf file",
        folder.display()
    )]
    NoConfig { folder: PathBuf },
    #[error(
        "the folder {} has neither model.safetensors nor model.safetensors.index.json; if its weights have another form, \
         load it in transformers and save it again with save_pretrained",
        folder.display()
    )]
    NoWeights { folder: PathBuf },
    #[error("{reading} is {value}, above the limit of {limit}: the folder is damaged or hostile; download it again")]
    AboveLimit { reading: String, value: u64, limit: u64 },
    #[error("{} is not the JSON that it should be: {cause}; download it again", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error(
        "{file} is truncated: its header needs {needed} bytes and {left} are left; download it again, or copy it again"
    )]
    Truncated { file: String, needed: u64, left: u64 },
    #[error("the tensor \"{tensor}\" appears twice: the folder is damaged; download it again")]
    DuplicateTensor { tensor: String },
    #[error("the tensor \"{tensor}\" has the impossible shape {shape:?}: the folder is damaged; download it again")]
    BadShape { tensor: String, shape: Vec<u64> },
    #[error(
        "the tensor \"{tensor}\" takes the bytes {start}..{end} of the {data_bytes} in its file: the file is truncated or \
         damaged; download it again"
    )]
    TensorOutsideFile {
        tensor: String,
        start: u64,
        end: u64,
        data_bytes: u64,
    },
    #[error(
        "the tensor \"{tensor}\" has {found} bytes, but its shape and type need {expected}: the folder is damaged; \
         download it again"
    )]
    WrongLength { tensor: String, found: u64, expected: u64 },
    #[error("the tensors \"{first}\" and \"{second}\" overlap: the folder is damaged; download it again")]
    OverlappingTensors { first: String, second: String },
    #[error(
        "the tensor \"{tensor}\" has the type {dtype}; this build reads F32, F16 and BF16 in folders, and quantised \
         weights in GGUF files"
    )]
    UnsupportedDtype { tensor: String, dtype: String },
    #[error(
        "the tensor \"{tensor}\" is none of a plain {architecture} model: it asks for something this build does not \
         compute; choose another model"
    )]
    UnexpectedTensor { tensor: String, architecture: &'static str },
    #[error(
        "the index names the file {name:?}, which is no name of a safetensors file in the folder; download it again"
    )]
    BadShardName { name: String },
    #[error("the index names the file {file}, which is not in the folder; finish the download")]
    MissingShard { file: String },
    #[error("the index and the file {file} do not agree on the tensor \"{tensor}\"; download both again")]
    IndexDisagrees { file: String, tensor: String },
    #[error("config.json has no key \"{key}\"; download the folder again, or choose another model")]
    MissingKey { key: String },
    #[error("the key \"{key}\" of config.json is not {expected}; download the folder again")]
    WrongType { key: String, expected: &'static str },
}
