//! What the JSON files of a Hugging Face folder hold, as far as a tokenizer needs it. All of it is untrusted.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::error::TokenizerError;

/// Largest tokenizer.json. The largest known one (Gemma 3) has 33 MB. Reading takes up to about ten times as much memory.
pub(super) const TOKENIZER_BYTES_MAX: u64 = 64 << 20;
/// Largest of the other files. The largest known one (Gemma 3's tokenizer_config.json) has 1.2 MB.
pub(super) const SETTINGS_BYTES_MAX: u64 = 16 << 20;

/// tokenizer.json.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedTokenJson>,
    #[serde(default)]
    pub(super) normalizer: Value,
    #[serde(default)]
    pub(super) pre_tokenizer: Value,
    #[serde(default)]
    pub(super) post_processor: Value,
    #[serde(default)]
    pub(super) decoder: Value,
    pub(super) model: BpeJson,
}

/// The kind of the model alone, read first: the vocabulary of another kind has another form.
#[derive(Debug, Deserialize)]
pub(super) struct KindJson {
    pub(super) model: ModelKindJson,
}

#[derive(Debug, Deserialize)]
pub(super) struct ModelKindJson {
    /// Missing in files of old versions of the library.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct BpeJson {
    pub(super) vocab: HashMap<String, u32>,
    pub(super) merges: Vec<MergeJson>,
    pub(super) unk_token: Option<String>,
    pub(super) dropout: Option<f32>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    pub(super) fuse_unk: Option<bool>,
    pub(super) byte_fallback: Option<bool>,
    pub(super) ignore_merges: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum MergeJson {
    Pair(String, String),
    /// Both halves with a space between them, as old versions of the library wrote them.
    Joined(String),
}

/// An entry of `added_tokens`, or of `added_tokens_decoder` in tokenizer_config.json, where the key is the id.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct AddedTokenJson {
    pub(super) id: Option<u32>,
    pub(super) content: String,
    #[serde(default)]
    pub(super) single_word: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
    #[serde(default)]
    pub(super) normalized: bool,
    #[serde(default)]
    pub(super) special: bool,
}

/// tokenizer_config.json, and special_tokens_map.json, which has some of its fields.
#[derive(Debug, Default, Deserialize)]
pub(super) struct SettingsJson {
    pub(super) add_bos_token: Option<bool>,
    pub(super) add_eos_token: Option<bool>,
    pub(super) bos_token: Option<TokenTextJson>,
    pub(super) eos_token: Option<TokenTextJson>,
    pub(super) unk_token: Option<TokenTextJson>,
    pub(super) pad_token: Option<TokenTextJson>,
    #[serde(default)]
    pub(super) added_tokens_decoder: BTreeMap<String, AddedTokenJson>,
}

/// A token's text, by itself or with the settings of an added token.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenTextJson {
    Text(String),
    Token { content: String },
}

impl TokenTextJson {
    pub(super) fn text(&self) -> &str {
        match self {
            TokenTextJson::Text(text) | TokenTextJson::Token { content: text } => text,
        }
    }
}

/// generation_config.json, and config.json, which has this field, too.
#[derive(Debug, Default, Deserialize)]
pub(super) struct GenerationJson {
    pub(super) eos_token_id: Option<IdsJson>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum IdsJson {
    One(u64),
    Several(Vec<u64>),
}

impl IdsJson {
    pub(super) fn ids(&self) -> &[u64] {
        match self {
            IdsJson::One(id) => std::slice::from_ref(id),
            IdsJson::Several(ids) => ids,
        }
    }
}

/// The bytes of a file; `None` when there is none.
pub(super) fn read(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, TokenizerError> {
    let path_buf = || path.to_path_buf();
    let io = |cause| TokenizerError::Io {
        path: path_buf(),
        cause,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(io(cause)),
    };
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(io(std::io::Error::other("not a regular file")));
    }
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > max_bytes {
        return Err(TokenizerError::TooLarge {
            path: path_buf(),
            max_bytes,
        });
    }
    Ok(Some(bytes))
}

/// JSON nested deeper than 128 levels is an error, too: the parser's limit.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, TokenizerError> {
    serde_json::from_slice(bytes).map_err(|cause| TokenizerError::Json {
        path: path.to_path_buf(),
        cause,
    })
}

/// The content of a file of settings; the default when there is none.
pub(super) fn settings<T: DeserializeOwned + Default>(path: &Path) -> Result<T, TokenizerError> {
    match read(path, SETTINGS_BYTES_MAX)? {
        Some(bytes) => parse(path, &bytes),
        None => Ok(T::default()),
    }
}
