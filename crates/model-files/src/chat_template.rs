//! The model's own chat template, rendered in an environment that behaves like Hugging Face's Jinja.

mod environment;
mod python_json;
mod strftime;

use std::fmt;
use std::io::{self, Write};

use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

use crate::gguf::{GgufError, GgufFile, optional};
use environment::RaisedException;

const TEMPLATE_KEY: &str = "tokenizer.chat_template";
const TEMPLATE_NAME: &str = "chat";
/// Template instructions of one rendering. A turn takes tens to hundreds. This is enough for a hundred thousand turns, and
/// takes less than a second of an endless loop.
const FUEL: u64 = 10_000_000;
/// Bytes that a rendering may add to the messages' own bytes, for each message and once in all. Real templates add a few
/// hundred.
const OUTPUT_BYTES_EXTRA: usize = 16 << 10;
/// How often a template may repeat the messages. Some templates print the system prompt again in every turn.
const OUTPUT_BYTES_FACTOR: usize = 4;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    pub content: String,
}

/// A compiled chat template. `Send + Sync`: share it in an `Arc`.
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    begin_text: String,
    end_text: String,
}

/// Why there is no prompt text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("the model has no chat template; use /v1/completions, or choose a chat model")]
    Missing,
    #[error("the model's chat template does not compile: {cause}; choose another model")]
    Compile { cause: TemplateError },
    /// The template itself refused the messages (`raise_exception`): the client's fault.
    #[error("the model's chat template refuses these messages: {message}; change the messages, retrying will not help")]
    Refused { message: String },
    #[error("the model's chat template fails on these messages: {cause}; change the messages or choose another model")]
    Render { cause: TemplateError },
    #[error(
        "the model's chat template does not end or writes too much for these messages; send fewer or choose another model"
    )]
    TooLong,
}

/// An error of the template library, with the template's line. It keeps the library out of the public types.
type TemplateError = Box<dyn std::error::Error + Send + Sync>;

impl ChatTemplate {
    /// Compiles the template in the file's metadata.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] or [`ChatTemplateError::Compile`], or a metadata key of the wrong type.
    pub fn from_gguf(file: &GgufFile) -> Result<ChatTemplate, ChatTemplateError> {
        let source = optional(file.str(TEMPLATE_KEY))?.ok_or(ChatTemplateError::Missing)?;
        let tokens = optional(file.str_array("tokenizer.ggml.tokens"))?.unwrap_or_default();
        let text = |key| -> Result<String, GgufError> {
            let id = optional(file.u32(key))?;
            Ok(id
                .and_then(|id| tokens.get(id as usize))
                .map_or_else(String::new, |text| (*text).to_owned()))
        };
        let begin_text = text("tokenizer.ggml.bos_token_id")?;
        let end_text = text("tokenizer.ggml.eos_token_id")?;
        ChatTemplate::compile(source, begin_text, end_text)
    }

    fn compile(source: &str, begin_text: String, end_text: String) -> Result<ChatTemplate, ChatTemplateError> {
        let compile = |error: minijinja::Error| ChatTemplateError::Compile { cause: error.into() };
        let mut environment = environment::hugging_face(FUEL).map_err(compile)?;
        let compiled = environment::without_generation_tags(source);
        environment
            .add_template_owned(TEMPLATE_NAME, compiled)
            .map_err(compile)?;
        Ok(ChatTemplate {
            source: source.to_owned(),
            environment,
            begin_text,
            end_text,
        })
    }

    /// The template as the model's files have it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt text of a conversation, for `Tokenizer::encode` without added special tokens.
    /// `add_generation_prompt` opens the assistant's turn at the end.
    ///
    /// # Errors
    /// [`ChatTemplateError::Refused`] when the template refuses the messages, [`ChatTemplateError::TooLong`] at the
    /// limits of instructions and bytes, [`ChatTemplateError::Render`] for other failures of the template.
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatTemplateError> {
        let template = self
            .environment
            .get_template(TEMPLATE_NAME)
            .map_err(|error| ChatTemplateError::Compile { cause: error.into() })?;
        let given: usize = messages
            .iter()
            .map(|m| m.role.len() + m.content.len() + OUTPUT_BYTES_EXTRA)
            .sum();
        let mut output = LimitedOutput {
            bytes: Vec::new(),
            limit: given * OUTPUT_BYTES_FACTOR + OUTPUT_BYTES_EXTRA,
        };
        let values = context! {
            messages => minijinja::Value::from(Serde(messages)),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.begin_text.as_str(),
            eos_token => self.end_text.as_str(),
            tools => (),
            documents => (),
        };
        template.render_captured_to(values, &mut output).map_err(render_error)?;
        // The template and every value are UTF-8 and are written whole, so nothing is replaced.
        Ok(String::from_utf8(output.bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("begin_text", &self.begin_text)
            .finish_non_exhaustive()
    }
}

fn render_error(error: minijinja::Error) -> ChatTemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
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
    ChatTemplateError::Render { cause: error.into() }
}

/// A buffer that refuses to grow past its limit.
struct LimitedOutput {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(io::Error::other("the chat template writes too much"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
