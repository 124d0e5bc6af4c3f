//! The model's own chat template, which turns a conversation into the prompt's text as Hugging Face's `apply_chat_template` does.
//! minijinja renders it. Its text comes from the operator's model files, never from clients: a rendering ends at a limit of
//! instructions, of printed bytes, and of bytes that it makes in between (`budget`, `metered`).

mod budget;
mod environment;
mod filters;
mod folder;
mod metered;
mod methods;
mod python;
mod python_json;
mod strftime;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::Builder;
use std::time::SystemTime;

use minijinja::machinery::{self, CompiledTemplate, TemplateConfig};
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::gguf::{GgufError, GgufFile, optional};
use environment::RaisedException;

const TEMPLATE_KEY: &str = "tokenizer.chat_template";
const DEFAULT: &str = "default";
/// Further templates of a GGUF file have a name behind a point. This is the name of the one that is used with tools.
const WITH_TOOLS: &str = "tool_use";
/// Real templates have at most 20 KB.
const SOURCE_BYTES_MAX: usize = 256 << 10;
/// minijinja walks a long chain such as `a.b.c` by recursion. This holds the longest chain in a source of that size.
const COMPILE_STACK_BYTES: usize = 512 << 20;
/// Template instructions of one rendering. A turn takes tens to hundreds. This is enough for a hundred thousand turns, and
/// takes less than a second of an endless loop.
const FUEL: u64 = 10_000_000;
/// Bytes that a rendering may add to the messages' own bytes, for each message and once in all. Real templates add a few
/// hundred.
const OUTPUT_BYTES_EXTRA: usize = 16 << 10;
/// How often a template may repeat the messages. Some templates print the system prompt again in every turn.
const OUTPUT_BYTES_FACTOR: usize = 4;
/// The special tokens that templates see, by the names that transformers gives them, and their keys in GGUF files.
const SPECIAL_TOKENS: [(&str, &str); 7] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("cls_token", "tokenizer.ggml.cls_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];
/// Fields in which a message may carry its reasoning. Templates read the first one.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    pub content: String,
}

/// All that a template sees of a request. Messages are objects as in OpenAI's API: besides `role` and `content` they may have
/// `tool_calls`, `tool_call_id`, `reasoning_content` and whatever else the template reads.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    pub messages: &'a [Value],
    /// `tools`, `documents`, `enable_thinking` and other names that the template knows.
    pub variables: &'a Map<String, Value>,
    /// Opens the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// What a template prints as today's date, in UTC.
    pub now: SystemTime,
}

/// A compiled chat template. `Send + Sync`: share it in an `Arc`.
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    compiled: CompiledTemplate<'static>,
    /// Why the template for conversations with tools does not compile, which some models have. It is only an error when it
    /// is used.
    with_tools: Option<Result<CompiledTemplate<'static>, (u32, String)>>,
    with_tools_source: Option<String>,
    special_tokens: Map<String, Value>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("special_tokens", &self.special_tokens)
            .finish_non_exhaustive()
    }
}

/// Why there is no prompt text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("the model has no chat template; use /v1/completions, or choose a chat model")]
    Missing,
    #[error("{} cannot be read: {cause}; check the file and its permissions", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("{} is larger than {bytes_max} bytes, so it is no file of a chat template; fetch the model again", path.display())]
    TooLarge { path: PathBuf, bytes_max: usize },
    #[error("{} is not the JSON that transformers writes: {cause}; fetch the model again", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error("the model's chat template does not compile: line {line}: {what}; choose another model")]
    Compile { line: u32, what: String },
    /// The template itself refused the messages (`raise_exception`): the client's fault.
    #[error("the model's chat template refuses these messages: {message}; change the messages, retrying will not help")]
    Refused { message: String },
    #[error(
        "the model's chat template fails on these messages in its line {line}: {what}; change the messages or choose another model"
    )]
    Render { line: u32, what: String },
    #[error(
        "the model's chat template does not end or writes too much for these messages; send fewer or choose another model"
    )]
    TooLong,
}

impl ChatTemplate {
    /// Parses the template in the file's metadata.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] or [`ChatTemplateError::Compile`], or a metadata key of the wrong type.
    pub(crate) fn from_gguf(file: &GgufFile) -> Result<ChatTemplate, ChatTemplateError> {
        let named = |name: &str| optional(file.str(&format!("{TEMPLATE_KEY}.{name}")));
        let source = match optional(file.str(TEMPLATE_KEY))? {
            Some(source) => Some(source),
            None => named(DEFAULT)?,
        };
        let tokens = optional(file.str_array("tokenizer.ggml.tokens"))?.unwrap_or_default();
        let mut special_tokens = Map::new();
        for (name, key) in SPECIAL_TOKENS {
            let id = optional(file.u32(key))?;
            if let Some(text) = id.and_then(|id| tokens.get(id as usize)) {
                special_tokens.insert(name.to_owned(), Value::from(*text));
            } else if matches!(name, "bos_token" | "eos_token") {
                // Templates add these to texts without a look.
                special_tokens.insert(name.to_owned(), Value::from(""));
            }
        }
        let source = source.ok_or(ChatTemplateError::Missing)?;
        ChatTemplate::parse(source, named(WITH_TOOLS)?, special_tokens)
    }

    /// Reads the template of a Hugging Face folder: `chat_template.jinja`, else `chat_template.json`, else the field
    /// `chat_template` of `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`], [`ChatTemplateError::Compile`], or a file that is too large or damaged.
    pub fn from_folder(folder: &Path) -> Result<ChatTemplate, ChatTemplateError> {
        let found = folder::read(folder)?;
        let source = found.source.ok_or(ChatTemplateError::Missing)?;
        ChatTemplate::parse(&source, found.with_tools.as_deref(), found.special_tokens)
    }

    /// [`ChatTemplate::compile`] on a stack of its own, which only takes the memory that is used.
    fn parse(
        source: &str,
        with_tools: Option<&str>,
        special_tokens: Map<String, Value>,
    ) -> Result<ChatTemplate, ChatTemplateError> {
        let compile = || ChatTemplate::compile(source, with_tools, special_tokens);
        let compiled = std::thread::scope(|scope| {
            let thread = Builder::new().stack_size(COMPILE_STACK_BYTES);
            thread.spawn_scoped(scope, compile).ok()?.join().ok()
        });
        let failed = || compile_error((1, "its compiler could not start, or panicked".to_owned()));
        compiled.unwrap_or_else(|| Err(failed()))
    }

    fn compile(
        source: &str,
        with_tools: Option<&str>,
        special_tokens: Map<String, Value>,
    ) -> Result<ChatTemplate, ChatTemplateError> {
        let environment = environment::hugging_face(FUEL).map_err(|error| compile_error(described(&error)))?;
        let compiled = |name: &'static str, source: &str| {
            if source.len() > SOURCE_BYTES_MAX {
                return Err((1, format!("it has more than {SOURCE_BYTES_MAX} bytes")));
            }
            let syntax = environment.syntax().clone();
            let source = metered::without_constant_products(&environment::prepared(source), syntax.clone());
            let config = TemplateConfig {
                syntax_config: syntax,
                default_auto_escape: Arc::new(|_| AutoEscape::None),
            };
            // The compiled template borrows its source, and a process has one model for its life.
            let source: &'static str = Box::leak(source.into_boxed_str());
            let compiled = CompiledTemplate::new(name, source, &config).map_err(|error| described(&error))?;
            metered::metered(compiled)
        };
        Ok(ChatTemplate {
            source: source.to_owned(),
            compiled: compiled(DEFAULT, source).map_err(compile_error)?,
            with_tools: with_tools.map(|source| compiled(WITH_TOOLS, source)),
            with_tools_source: with_tools.map(str::to_owned),
            special_tokens,
            environment,
        })
    }

    /// The template as the model's files have it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a special token by the name that transformers gives it: `pad_token`, `unk_token` and others. `None` where the
    /// model's files name none.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name)?.as_str().filter(|text| !text.is_empty())
    }

    /// The template for conversations with tools: one of its own, or the only one, which may not know them.
    pub fn source_with_tools(&self) -> &str {
        self.with_tools_source.as_deref().unwrap_or(&self.source)
    }

    /// The prompt text of a conversation, for `Tokenizer::encode` without added special tokens.
    /// `add_generation_prompt` opens the assistant's turn at the end.
    ///
    /// # Errors
    /// [`ChatTemplateError::Refused`] when the template refuses the messages, [`ChatTemplateError::TooLong`] at the
    /// limits of steps and bytes, [`ChatTemplateError::Render`] for other failures of the template.
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatTemplateError> {
        let turn = |message: &ChatMessage| json!({"role": message.role, "content": message.content});
        let messages: Vec<Value> = messages.iter().map(turn).collect();
        self.render_conversation(&Conversation {
            messages: &messages,
            variables: &Map::new(),
            add_generation_prompt,
            now: SystemTime::now(),
        })
    }

    /// [`ChatTemplate::render`] with all that a template may read: tools, calls, reasoning, documents.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_conversation(&self, conversation: &Conversation<'_>) -> Result<String, ChatTemplateError> {
        let given = conversation.messages.iter().map(text_bytes).sum::<usize>()
            + conversation.variables.values().map(text_bytes).sum::<usize>();
        let extra = OUTPUT_BYTES_EXTRA * (conversation.messages.len() + 1);
        let output_bytes_max = given.saturating_mul(OUTPUT_BYTES_FACTOR).saturating_add(extra);
        let has_tools = conversation
            .variables
            .get("tools")
            .is_some_and(|tools| !tools.is_null());
        let template = match &self.with_tools {
            Some(compiled) if has_tools => compiled
                .as_ref()
                .map_err(|(line, what)| compile_error((*line, what.clone())))?,
            _ => &self.compiled,
        };
        let values = self.values(conversation);
        budget::begin(given);
        let mut text = String::new();
        // minijinja 3.0.5 panics in a few filters, such as `format` with a letter behind `%` that is not ASCII.
        let render = AssertUnwindSafe(|| {
            let mut output = machinery::make_string_output(&mut text);
            let (instructions, blocks) = (&template.instructions, &template.blocks);
            machinery::eval(
                &self.environment,
                instructions,
                values,
                blocks,
                &mut output,
                AutoEscape::None,
            )
            .map(drop)
        });
        match catch_unwind(render) {
            Ok(rendered) => rendered.map_err(|error| render_error(&error))?,
            Err(_) => {
                let what = "the template library panicked".to_owned();
                return Err(ChatTemplateError::Render { line: 1, what });
            }
        }
        if text.len() > output_bytes_max {
            return Err(ChatTemplateError::TooLong);
        }
        Ok(text)
    }

    /// All variables of a rendering, later ones above earlier ones.
    fn values(&self, conversation: &Conversation<'_>) -> minijinja::Value {
        let now = conversation.now;
        let clock = minijinja::Value::from_function(move |format: &str| environment::strftime(format, now));
        let absent = ["tools", "documents"].map(|name| (name, minijinja::Value::from(())));
        let given = self.special_tokens.iter().chain(conversation.variables);
        let given = given.map(|(name, value)| (name.as_str(), minijinja::Value::from(Serde(value))));
        let messages: Vec<Value> = conversation.messages.iter().map(message_for_template).collect();
        let own = [
            ("messages", minijinja::Value::from(Serde(messages))),
            ("add_generation_prompt", conversation.add_generation_prompt.into()),
            ("strftime_now", clock),
        ];
        minijinja::Value::from_pairs(absent.into_iter().chain(given).chain(own))
    }
}

/// An error's line in the template and what it says.
fn described(error: &minijinja::Error) -> (u32, String) {
    let line = error.line().and_then(|line| u32::try_from(line).ok()).unwrap_or(1);
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    (line, what)
}

fn compile_error((line, what): (u32, String)) -> ChatTemplateError {
    ChatTemplateError::Compile { line, what }
}

fn render_error(error: &minijinja::Error) -> ChatTemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(RaisedException(message)) = current.downcast_ref() {
            return ChatTemplateError::Refused {
                message: message.clone(),
            };
        }
        let kind = current.downcast_ref::<minijinja::Error>().map(minijinja::Error::kind);
        if matches!(kind, Some(ErrorKind::OutOfFuel | ErrorKind::WriteFailure)) {
            return ChatTemplateError::TooLong;
        }
        cause = current.source();
    }
    let (line, what) = described(error);
    ChatTemplateError::Render { line, what }
}

/// Bytes of all texts in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum::<usize>() + items.len(),
        Value::Object(fields) => fields.iter().map(|(name, field)| name.len() + text_bytes(field)).sum(),
        _ => 1,
    }
}

/// As transformers gives a message to the template: without fields of null, and with its reasoning under the names that templates read.
fn message_for_template(message: &Value) -> Value {
    let Value::Object(fields) = message else {
        return message.clone();
    };
    let fields = fields.iter().filter(|(_, field)| !field.is_null());
    let mut kept: Map<String, Value> = fields.map(|(name, field)| (name.clone(), field.clone())).collect();
    let reasoning = REASONING_FIELDS.iter().find_map(|name| kept.get(*name)).cloned();
    if let Some(reasoning) = reasoning {
        if !kept.contains_key("thinking") {
            kept.shift_insert(0, "thinking".to_owned(), reasoning.clone());
        }
        kept.insert("reasoning_content".to_owned(), reasoning);
    }
    Value::Object(kept)
}

#[cfg(test)]
mod tests;
