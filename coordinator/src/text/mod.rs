//! Text and token ids. This is the only place of a running cluster that knows both. It is pure except for the tokenizer's
//! tables.

mod choice;
mod hidden;
mod served;
mod tools;

use std::fmt;

use serving_core::ids::TokenId;
use thiserror::Error;

pub use choice::{ChoiceText, STOP_STRINGS_MAX, StopReason, StopStrings, Utf8Decoder};
pub use hidden::TextOf;
pub(crate) use hidden::hide_control;
pub use served::OpenModelError;

pub use tools::{Chat, Piece, ToolCall, ToolCallReader, ToolFormat};

#[derive(Debug, Error)]
pub enum TextError {
    /// The tokenizer cannot handle the client's text. Sending it again changes nothing.
    #[error("{0}")]
    Tokenize(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The model's own template refused the messages, mostly for a wrong order of roles. The client must change the
    /// messages.
    #[error("{0}")]
    Template(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    #[error(
        "the last message cannot be continued: the model's chat template leaves its text out. Leave out \
         `continue_final_message`"
    )]
    CannotContinue,
    #[error(
        "the messages use every character that could mark control tokens in them; leave out those from U+10FF00 on"
    )]
    NoMark,
    /// The count ended before the whole text was looked at.
    #[error("the text has more than {tokens_max} tokens")]
    TooLong { tokens_max: usize },
}

/// What a client has to know of a tokenizer that it uses over HTTP. Tokens are texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerInfo {
    pub begin: Option<String>,
    pub end: Option<String>,
    pub padding: Option<String>,
    pub unknown: Option<String>,
    /// A prompt gets the begin token in front unless the client says otherwise.
    pub adds_begin: bool,
    /// As the model's files have it.
    pub chat_template: Option<String>,
}

/// A model's tokenizer and chat template. `model-files` has the real one; the API's tests use a byte tokenizer.
pub trait TextCodec: Send + Sync {
    /// Ends with [`TextError::TooLong`] as soon as there are more than `tokens_max`.
    fn encode(&self, text: &str, add_special: bool, tokens_max: usize) -> Result<Vec<TokenId>, TextError>;
    /// The text with `mark` inside each control token that is written in it; `None`: there is none. In a text that is not the model's
    /// own, what the chat template writes as a mark of roles counts, too.
    fn hide_control(&self, text: &str, mark: char, whose: TextOf) -> Option<String>;
    /// As [`TextCodec::encode`] of the text without `mark`, but control tokens with a mark inside are plain text.
    fn encode_hidden(&self, text: &str, mark: char, limits: (bool, usize)) -> Result<Vec<TokenId>, TextError>;
    /// The bytes a token stands for; for a control token the bytes of its name. `None` for an id not in the vocabulary.
    fn token_bytes(&self, token: TokenId) -> Option<&[u8]>;
    /// Control tokens are left out of generated text.
    fn is_special(&self, token: TokenId) -> bool;
    fn vocab_size(&self) -> u32;
    fn end_tokens(&self) -> &[TokenId];
    fn render_chat(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, TextError>;
    /// `None`: the chat template knows no tools.
    fn tool_format(&self) -> Option<ToolFormat>;
    fn info(&self) -> TokenizerInfo;
}

/// What the edge knows of the served model.
pub struct TextModel {
    codec: Box<dyn TextCodec>,
    /// Prompt and output tokens of one sequence together.
    pub max_model_tokens: u32,
    /// What the model is called where nobody gives it another name: the `root` of `/v1/models`, too, which is no path of this
    /// machine.
    pub name: String,
    /// Differs between two builds or models: the `system_fingerprint` of every answer.
    pub fingerprint: String,
    /// `None` where no model file was read.
    pub parameter_count: Option<u64>,
    longest_token_bytes: usize,
}

impl TextModel {
    pub fn new(codec: Box<dyn TextCodec>, max_model_tokens: u32, name: String, fingerprint: String) -> Self {
        let longest_token_bytes = (0..codec.vocab_size())
            .filter_map(|id| codec.token_bytes(TokenId(id)).map(<[u8]>::len))
            .max()
            .unwrap_or(1)
            .max(1);
        Self {
            codec,
            max_model_tokens,
            name,
            fingerprint,
            parameter_count: None,
            longest_token_bytes,
        }
    }

    pub fn codec(&self) -> &dyn TextCodec {
        &*self.codec
    }

    /// The prompt of a chat, whose tools, calls and results become text where the template knows none.
    pub fn render_chat(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, TextError> {
        match chat.has_tools() && self.codec.tool_format().is_none() {
            true => self
                .codec
                .render_chat(&chat.with_tools_as_text(), add_generation_prompt),
            false => self.codec.render_chat(chat, add_generation_prompt),
        }
    }

    /// How this model writes calls.
    pub fn tool_format(&self) -> ToolFormat {
        self.codec.tool_format().unwrap_or(ToolFormat::Tagged)
    }

    /// The fewest tokens that a text of this many bytes can have. Texts that cannot fit are refused without tokenizing
    /// them.
    pub(crate) fn fewest_tokens(&self, text_bytes: usize) -> usize {
        text_bytes.div_ceil(self.longest_token_bytes)
    }

    /// Text of any tokens, control tokens by name when `with_special`.
    pub fn decode(&self, tokens: &[TokenId], with_special: bool) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            if with_special || !self.codec.is_special(*token) {
                bytes.extend_from_slice(self.codec.token_bytes(*token).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl fmt::Debug for TextModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextModel")
            .field("name", &self.name)
            .field("max_model_tokens", &self.max_model_tokens)
            .finish_non_exhaustive()
    }
}
