//! Everything that can be wrong with a GGUF file, each with the culprit's name and the next step.

use std::io;
use std::path::PathBuf;

/// Why a model file was refused. None is worth a retry with the same file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    #[error("cannot read the model file {}: {cause}; check the path and its permissions", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error(
        "not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"; pass a .gguf model file, for example the \
         one that `baton model pull smollm2-135m` fetches"
    )]
    NotGguf { found: [u8; 4] },
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again with a current converter")]
    UnsupportedVersion { version: u32 },
    #[error("the file is a big-endian GGUF; convert the model again as little endian")]
    BigEndian,
    #[error(
        "the file is truncated: {reading} at byte {offset} needs {needed} bytes and {left} are left; download it \
         again with `baton model pull --force`, or copy it again"
    )]
    Truncated {
        reading: String,
        offset: u64,
        needed: u64,
        left: u64,
    },
    #[error(
        "{reading} is {value}, above the limit of {limit}: the file is damaged or hostile; download it again with \
         `baton model pull --force`"
    )]
    AboveLimit { reading: String, value: u64, limit: u64 },
    #[error("{reading} is not valid UTF-8: the file is damaged; download it again with `baton model pull --force`")]
    InvalidUtf8 { reading: String },
    #[error(
        "{reading} is a bool with byte {byte}, not 0 or 1: the file is damaged; download it again with `baton model pull --force`"
    )]
    InvalidBool { reading: String, byte: u8 },
    #[error(
        "{reading} has the unknown value type {type_id}: the file is damaged or newer than GGUF 3; download or convert it again"
    )]
    UnknownValueType { reading: String, type_id: u32 },
    #[error("{reading} nests arrays deeper than {limit}: no known model does; the file is damaged or hostile")]
    NestedTooDeep { reading: String, limit: u32 },
    #[error("the metadata key \"{key}\" appears twice: the file is damaged; convert or download it again")]
    DuplicateKey { key: String },
    #[error("the tensor \"{tensor}\" appears twice: the file is damaged; convert or download it again")]
    DuplicateTensor { tensor: String },
    #[error("general.alignment is {alignment}; it must be a power of two from 8 to 65536; convert the model again")]
    BadAlignment { alignment: u64 },
    #[error(
        "tensor \"{tensor}\" has type {type_name} (id {type_id}), which this build cannot run; use a file whose tensors \
         have these types: {supported}"
    )]
    UnsupportedType {
        tensor: String,
        type_id: u32,
        type_name: &'static str,
        /// The names of the types that it can run.
        supported: String,
    },
    #[error(
        "tensor \"{tensor}\" has impossible dimensions {dims:?}: the file is damaged; download it again with `baton model pull --force`"
    )]
    BadDimensions { tensor: String, dims: Vec<u64> },
    #[error(
        "tensor \"{tensor}\" has rows of {row_elements} elements, not a multiple of the {block_elements} of one \
         {type_name} block: the file is damaged; download or convert it again"
    )]
    RowNotBlocks {
        tensor: String,
        row_elements: u64,
        block_elements: usize,
        type_name: &'static str,
    },
    #[error(
        "tensor \"{tensor}\" starts at data offset {offset}, not a multiple of the alignment {alignment}: the file is damaged; download or convert it again"
    )]
    MisalignedTensor {
        tensor: String,
        offset: u64,
        alignment: u64,
    },
    #[error(
        "the file is truncated: tensor \"{tensor}\" ends at byte {end} of a file of {file_bytes} bytes; download it \
         again with `baton model pull --force`, or copy it again"
    )]
    TensorOutsideFile { tensor: String, end: u128, file_bytes: u64 },
    #[error("tensors \"{first}\" and \"{second}\" overlap: the file is damaged; download or convert it again")]
    OverlappingTensors { first: String, second: String },
    #[error(
        "{} is part {part} of a split model: pass the first part, {}", path.display(), first.display()
    )]
    NotTheFirstPart {
        path: PathBuf,
        /// Counted from one.
        part: u64,
        first: PathBuf,
    },
    #[error(
        "{} is the first part of a model that was split into {count} files, but it is not called NAME-00001-of-{count:05}.gguf, so \
         that the other parts cannot be found; give all parts their names back", path.display()
    )]
    PartName { path: PathBuf, count: u64 },
    #[error("the model was split into {count} files, and {} is missing; finish the download", path.display())]
    MissingPart { path: PathBuf, count: u64 },
    #[error(
        "{} says {found} of {key}, where {expected} is right beside the first part: the files belong to different models; \
         download them again", path.display()
    )]
    PartDisagrees {
        path: PathBuf,
        key: &'static str,
        found: String,
        expected: u64,
    },
    #[error(
        "the parts of the split model have {found} tensors, and split.tensors.count says {expected}: a part is damaged or is \
         another model's; download them again"
    )]
    PartTensors { found: u64, expected: u64 },
    #[error("the model has no tensor \"{tensor}\"; it is not a complete model of an architecture this build runs")]
    MissingTensor { tensor: String },
    #[error("the model has no metadata key \"{key}\"; convert it again with a current converter")]
    MissingKey { key: String },
    #[error(
        "the metadata key \"{key}\" is {found}, expected {expected}; convert the model again with a current converter"
    )]
    WrongType {
        key: String,
        expected: &'static str,
        found: &'static str,
    },
    #[error("the metadata key \"{key}\" holds a number that does not fit {expected}; convert the model again")]
    OutOfRange { key: String, expected: &'static str },
}
