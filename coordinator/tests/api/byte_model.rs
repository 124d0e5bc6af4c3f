//! The model of these tests, as text: its tokens are bytes.

use coordinator::text::{Chat, TextCodec, TextError, TextOf, TokenizerInfo, ToolFormat};
use serving_core::ids::TokenId;

pub const END: TokenId = TokenId(256);
pub const START: TokenId = TokenId(257);
/// Beyond the vocabulary: whoever reads its text panics.
pub const PANICS: TokenId = TokenId(4096);

/// One token per byte, two control tokens, one word.
pub struct Bytes {
    table: Vec<Vec<u8>>,
}

impl Bytes {
    pub fn new() -> Self {
        let mut table: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        table.extend([b"<end>".to_vec(), b"<start>".to_vec(), b"word".to_vec()]);
        Self { table }
    }
}

impl TextCodec for Bytes {
    /// `<end>` is found in texts; the other control token and the word are not.
    fn encode(&self, text: &str, _add_special: bool, tokens_max: usize) -> Result<Vec<TokenId>, TextError> {
        let bytes = |text: &str| -> Vec<TokenId> { text.bytes().map(|byte| TokenId(u32::from(byte))).collect() };
        let parts: Vec<Vec<TokenId>> = text.split("<end>").map(bytes).collect();
        let tokens = parts.join(&END);
        match tokens.len() > tokens_max {
            true => Err(TextError::TooLong { tokens_max }),
            false => Ok(tokens),
        }
    }
    fn hide_control(&self, text: &str, mark: char, _whose: TextOf) -> Option<String> {
        text.contains("<end>")
            .then(|| text.replace("<end>", &format!("<{mark}end>")))
    }
    fn encode_hidden(&self, text: &str, mark: char, limits: (bool, usize)) -> Result<Vec<TokenId>, TextError> {
        let mark = TokenId(u32::from(mark));
        let marked = text.chars().map(|c| TokenId(u32::from(c)));
        let plain: Vec<TokenId> = marked.filter(|id| *id != mark).collect();
        match plain.len() > limits.1 {
            true => Err(TextError::TooLong { tokens_max: limits.1 }),
            false => Ok(plain),
        }
    }
    fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        assert!(token != PANICS, "the test asked for a panic");
        self.table.get(token.0 as usize).map(Vec::as_slice)
    }
    fn is_special(&self, token: TokenId) -> bool {
        token == END || token == START
    }
    fn vocab_size(&self) -> u32 {
        self.table.len() as u32
    }
    fn end_tokens(&self) -> &[TokenId] {
        &[END]
    }
    fn tool_format(&self) -> Option<ToolFormat> {
        Some(ToolFormat::Tagged)
    }
    fn info(&self) -> TokenizerInfo {
        TokenizerInfo {
            begin: Some("<start>".to_owned()),
            end: Some("<end>".to_owned()),
            chat_template: Some("{{ messages }}".to_owned()),
            ..TokenizerInfo::default()
        }
    }
    fn render_chat(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, TextError> {
        let turn = |turn: &serde_json::Value| {
            let (role, content) = (turn["role"].as_str().unwrap(), turn["content"].as_str().unwrap());
            assert!(content != "panic", "the test asked for a panic");
            let calls = turn.get("tool_calls").map_or(String::new(), ToString::to_string);
            format!("[{role}]{content}{calls}")
        };
        let names = chat
            .tools
            .iter()
            .map(|tool| format!("({})", tool["function"]["name"].as_str().unwrap()));
        let body: String = names.chain(chat.messages.iter().map(turn)).collect();
        Ok(if add_generation_prompt {
            body + "[assistant]"
        } else {
            body
        })
    }
}
