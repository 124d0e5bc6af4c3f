//! The chat template and the special tokens in the files of a Hugging Face folder.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{ChatTemplateError, SOURCE_BYTES_MAX, SPECIAL_TOKENS, WITH_TOOLS};

/// `tokenizer_config.json` of models with a large vocabulary has about a megabyte.
const JSON_BYTES_MAX: usize = 16 << 20;

pub(super) struct Found {
    pub(super) source: Option<String>,
    pub(super) with_tools: Option<String>,
    pub(super) special_tokens: Map<String, Value>,
}

/// `chat_template.json`, and the fields of `tokenizer_config.json` and `special_tokens_map.json` that count here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    chat_template: Option<Templates>,
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    unk_token: Option<Token>,
    sep_token: Option<Token>,
    pad_token: Option<Token>,
    cls_token: Option<Token>,
    mask_token: Option<Token>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`chat_template` is a text or a list of named texts")]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a special token is a text or an object with `content`")]
enum Token {
    Text(String),
    Object { content: String },
}

impl Config {
    fn token(&mut self, name: &str) -> Option<String> {
        let token = match name {
            "bos_token" => self.bos_token.take(),
            "eos_token" => self.eos_token.take(),
            "unk_token" => self.unk_token.take(),
            "sep_token" => self.sep_token.take(),
            "pad_token" => self.pad_token.take(),
            "cls_token" => self.cls_token.take(),
            _ => self.mask_token.take(),
        };
        token.map(|token| match token {
            Token::Text(text) | Token::Object { content: text } => text,
        })
    }
}

pub(super) fn read(folder: &Path) -> Result<Found, ChatTemplateError> {
    let mut config: Config = json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut map: Config = json(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let mut special_tokens = Map::new();
    for (name, _) in SPECIAL_TOKENS {
        if let Some(text) = config.token(name).or_else(|| map.token(name)) {
            special_tokens.insert(name.to_owned(), Value::from(text));
        }
    }
    let mut with_tools = None;
    let mut source = text(&folder.join("chat_template.jinja"), SOURCE_BYTES_MAX)?;
    if source.is_some() {
        let path = folder
            .join("additional_chat_templates")
            .join(format!("{WITH_TOOLS}.jinja"));
        with_tools = text(&path, SOURCE_BYTES_MAX)?;
    } else {
        let of_file: Option<Config> = json(&folder.join("chat_template.json"))?;
        match of_file.and_then(|file| file.chat_template).or(config.chat_template) {
            None => {}
            Some(Templates::One(template)) => source = Some(template),
            Some(Templates::Named(templates)) => {
                for named in templates {
                    match named.name.as_str() {
                        "default" => source = Some(named.template),
                        WITH_TOOLS => with_tools = Some(named.template),
                        _ => {}
                    }
                }
            }
        }
    }
    Ok(Found {
        source,
        with_tools,
        special_tokens,
    })
}

/// The parsed file; `None` if there is none. serde_json refuses JSON that is more than 128 deep.
fn json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ChatTemplateError> {
    let Some(text) = text(path, JSON_BYTES_MAX)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_str(&text).map_err(|cause| ChatTemplateError::Json {
        path: path.to_path_buf(),
        cause,
    })?;
    Ok(Some(parsed))
}

/// The whole file, if it has at most `bytes_max` bytes; `None` if there is none.
fn text(path: &Path, bytes_max: usize) -> Result<Option<String>, ChatTemplateError> {
    let failed = |cause| ChatTemplateError::Io {
        path: path.to_path_buf(),
        cause,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    let mut text = String::new();
    // The length that the file claims may be wrong, so the reading itself is limited.
    file.take(bytes_max as u64 + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() > bytes_max {
        return Err(ChatTemplateError::TooLarge {
            path: path.to_path_buf(),
            bytes_max,
        });
    }
    Ok(Some(text))
}
