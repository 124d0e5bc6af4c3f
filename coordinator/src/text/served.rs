//! The served model's tokenizer and chat template, out of its files.

use std::path::Path;
use std::time::SystemTime;

use model_files::chat_template::{ChatTemplate, ChatTemplateError, Conversation};
use model_files::gguf::hex;
use model_files::model::{Model, ModelError};
use model_files::tokenizer::{RoleMarks, Tokenizer, TokenizerError};
use serde_json::{Map, Value};
use serving_core::ids::TokenId;
use thiserror::Error;

use super::{Chat, TextCodec, TextError, TextModel, TextOf, TokenizerInfo, ToolFormat};

/// Why a coordinator cannot start with this model file. The operator can mend it, and each text says how.
#[derive(Debug, Error)]
pub enum OpenModelError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    #[error(
        "--max-model-len {asked} is more than the {trained} tokens this model was trained for; choose a smaller one"
    )]
    ContextTooLong { asked: u32, trained: u32 },
}

struct ServedText {
    tokenizer: Tokenizer,
    /// Base models have no template. They serve completions.
    template: Option<ChatTemplate>,
    /// Tokens of users that stand in the template: some families have such ones as the marks of roles.
    role_marks: RoleMarks,
}

impl TextModel {
    /// `max_model_tokens: None` takes the context length the model was trained for.
    pub fn open(path: &Path, max_model_tokens: Option<u32>) -> Result<TextModel, OpenModelError> {
        let file = Model::open(path)?;
        let trained = u32::try_from(file.config().context_length).unwrap_or(u32::MAX);
        let max_model_tokens = match max_model_tokens {
            Some(asked) if asked > trained => return Err(OpenModelError::ContextTooLong { asked, trained }),
            Some(asked) => asked,
            None => trained,
        };
        let template = match file.chat_template() {
            Ok(template) => Some(template),
            Err(ChatTemplateError::Missing) => None,
            Err(error) => return Err(error.into()),
        };
        let tokenizer = file.tokenizer()?;
        let source = template.as_ref().map_or("", ChatTemplate::source_with_tools);
        let codec = ServedText {
            role_marks: tokenizer.role_marks(&|text| source.contains(text))?,
            tokenizer,
            template,
        };
        let fingerprint = format!(
            "baton-{}-{}",
            env!("CARGO_PKG_VERSION"),
            &hex(&file.content_sha256())[..12]
        );
        let parameter_count = Some(file.parameter_count().map_err(ModelError::from)?);
        Ok(TextModel {
            parameter_count,
            ..TextModel::new(Box::new(codec), max_model_tokens, file.name(), fingerprint)
        })
    }
}

fn not_encoded(error: TokenizerError) -> TextError {
    match error {
        TokenizerError::TooManyTokens { max } => TextError::TooLong { tokens_max: max },
        error => TextError::Tokenize(Box::new(error)),
    }
}

impl TextCodec for ServedText {
    fn encode(&self, text: &str, add_special: bool, tokens_max: usize) -> Result<Vec<TokenId>, TextError> {
        let encoded = self.tokenizer.encode_at_most(text, add_special, tokens_max);
        encoded.map_err(not_encoded)
    }
    fn hide_control(&self, text: &str, mark: char, whose: TextOf) -> Option<String> {
        // An earlier answer of the model may have its marks of thoughts and calls, which templates look for.
        let role_marks = (whose == TextOf::Others).then_some(&self.role_marks);
        self.tokenizer.hide_control(text, mark, role_marks)
    }
    fn encode_hidden(&self, text: &str, mark: char, limits: (bool, usize)) -> Result<Vec<TokenId>, TextError> {
        self.tokenizer.encode_hidden(text, mark, limits).map_err(not_encoded)
    }
    fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.tokenizer.token_bytes(token)
    }
    fn is_special(&self, token: TokenId) -> bool {
        self.tokenizer.is_special(token)
    }
    fn vocab_size(&self) -> u32 {
        u32::try_from(self.tokenizer.vocab_size()).unwrap_or(u32::MAX)
    }
    fn end_tokens(&self) -> &[TokenId] {
        self.tokenizer.end_tokens()
    }
    fn render_chat(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let mut variables = Map::new();
        if !chat.tools.is_empty() {
            variables.insert("tools".to_owned(), Value::from(chat.tools.clone()));
        }
        let conversation = Conversation {
            messages: &chat.messages,
            variables: &variables,
            add_generation_prompt,
            now: SystemTime::now(),
        };
        template
            .render_conversation(&conversation)
            .map_err(|error| TextError::Template(Box::new(error)))
    }
    fn tool_format(&self) -> Option<ToolFormat> {
        ToolFormat::of_template(self.template.as_ref()?.source_with_tools())
    }
    /// The names of the padding and the unknown token come with the chat template, so they are not known of a base model.
    fn info(&self) -> TokenizerInfo {
        let text = |token: TokenId| {
            let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let template = self.template.as_ref();
        let named = |name| Some(template?.special_token(name)?.to_owned());
        TokenizerInfo {
            begin: self.tokenizer.begin_token().map(text),
            end: self.tokenizer.main_end_token().map(text),
            padding: named("pad_token"),
            unknown: named("unk_token"),
            adds_begin: self.tokenizer.adds_begin(),
            chat_template: template.map(|template| template.source().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real() -> TextModel {
        TextModel::open(&model_files::test_kit::model_path(), None).expect("the test model opens")
    }

    #[test]
    fn the_real_model_renders_encodes_and_comes_back() {
        let model = real();
        let chat = Chat {
            messages: vec![serde_json::json!({"role": "user", "content": "Bonjour, où est le café ?"})],
            tools: Vec::new(),
        };
        let prompt = model
            .codec()
            .render_chat(&chat, true)
            .expect("the template takes a user turn");
        let tokens = model.codec().encode(&prompt, false, usize::MAX).expect("encodes");
        assert_eq!(model.decode(&tokens, true), prompt);
        assert!(!model.decode(&tokens, false).contains("<|im_start|>"));
        assert!(tokens.len() >= model.fewest_tokens(prompt.len()));
        assert_eq!(model.parameter_count, Some(134_515_008));
    }

    #[test]
    fn the_info_of_the_real_model_is_that_of_its_files() {
        let info = real().codec().info();
        let named = [&info.begin, &info.end, &info.padding, &info.unknown].map(Option::as_deref);
        let (begin, end) = (Some("<|im_start|>"), Some("<|im_end|>"));
        assert_eq!(named, [begin, end, end, Some("<|endoftext|>")]);
        assert!(!info.adds_begin);
        assert!(info.chat_template.is_some_and(|source| source.contains("<|im_start|>")));
    }

    #[test]
    fn a_context_longer_than_trained_is_refused() {
        let refused = TextModel::open(&model_files::test_kit::model_path(), Some(u32::MAX));
        assert!(matches!(refused, Err(OpenModelError::ContextTooLong { .. })));
    }
}
