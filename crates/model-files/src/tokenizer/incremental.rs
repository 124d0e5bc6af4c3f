//! Text from a stream of tokens. A character comes out as soon as all its bytes have come, and not before.

use std::fmt;
use std::sync::Arc;

use serving_core::ids::TokenId;

use super::Tokenizer;

/// Decodes one sequence token by token. The pieces joined equal [`Tokenizer::decode`] of the whole.
pub struct IncrementalDecoder {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Bytes that may still become a character: at most the 3 first bytes of one.
    held: Vec<u8>,
    /// The piece last returned; kept to save an allocation for each token.
    piece: String,
}

impl IncrementalDecoder {
    /// `skip_special` leaves control tokens out of the text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        IncrementalDecoder {
            tokenizer,
            skip_special,
            held: Vec::new(),
            piece: String::new(),
        }
    }

    /// Adds a token and returns the text it completes, possibly none. Bytes that can no longer become a character
    /// come out as U+FFFD at once. Ids outside the vocabulary add nothing.
    pub fn push(&mut self, token: TokenId) -> &str {
        self.piece.clear();
        if !(self.skip_special && self.tokenizer.is_special(token))
            && let Some(bytes) = self.tokenizer.token_bytes(token)
        {
            self.held.extend_from_slice(bytes);
            let done = complete_text(&self.held, &mut self.piece);
            self.held.drain(..done);
        }
        &self.piece
    }

    /// Ends the sequence: an unfinished character comes out as one U+FFFD.
    pub fn flush(&mut self) -> &str {
        self.piece.clear();
        if !self.held.is_empty() {
            self.piece.push_str(&String::from_utf8_lossy(&self.held));
            self.held.clear();
        }
        &self.piece
    }

    /// Bytes held back because their character is not complete: 0 to 3.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }
}

impl fmt::Debug for IncrementalDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncrementalDecoder")
            .field("skip_special", &self.skip_special)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

/// Appends the complete text at the front of `bytes` to `text` and returns how many bytes it took.
fn complete_text(bytes: &[u8], text: &mut String) -> usize {
    let mut done = 0;
    loop {
        let rest = &bytes[done..];
        let error = match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return bytes.len();
            }
            Err(error) => error,
        };
        let (valid, _) = rest.split_at(error.valid_up_to());
        // `valid` was just found to be UTF-8: nothing is replaced.
        text.push_str(&String::from_utf8_lossy(valid));
        done += error.valid_up_to();
        match error.error_len() {
            Some(invalid) => {
                text.push(char::REPLACEMENT_CHARACTER);
                done += invalid;
            }
            None => return done,
        }
    }
}
